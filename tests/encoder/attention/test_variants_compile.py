"""Attention with dropout, residual scores and earlier layers' factors compiled for a GPU that is not here."""

import re
from dataclasses import replace

import pytest

pytest.importorskip("triton")

from compile_matrix import CompileJob, compile_job, limit_violations

from isogemm.encoder.attention import kernels
from isogemm.encoder.attention.configs import Attention

POINTERS = {"float32": "*fp32", "bfloat16": "*bf16"}
CASES = {  # head, dtype, precision, backward, residual, tokens; with both, fragments are in PatchTST's layers
    "registers": (4, "float32", "tf32", True, False, 42),
    "fragments, dropout alone": (8, "bfloat16", "ieee", True, False, 42),
    "dot": (32, "bfloat16", "ieee", True, True, 42),
}


FACTORED = {  # head, dtype, precision
    "tf32": (8, "float32", "tf32"),
    "bf16": (16, "bfloat16", "ieee"),
}


def _variant(head, dtype, precision, backward, residual, tokens):
    strides = (3 * 16 * head,) * (6 if backward else 3)
    return Attention(896, tokens, 16, head, dtype, precision, strides, dropout=0.2, previous=residual, scores=residual)


def _factored(head, dtype, precision):
    """The backward, with two earlier layers, and later ones."""
    transposed = dtype == "float32"
    strides = (head,) * 3 + (896 * 42 if transposed else 3 * 16 * head,) * 3
    return Attention(
        896, 42, 16, head, dtype, precision, strides, by_head=True, transposed=transposed, factors=2, added=True
    )


def _job(problem):
    launch = kernels.describe(problem)
    names = launch.kernel.arg_names[: -len(launch.constants)][: -len(launch.scalars)]
    absent = ["mask_ptr"] + ([] if problem.dropout else ["seed_ptr"])
    if not problem.residual:
        absent += [name for name in names if "previous" in name or "scores" in name]
    layers = {name: re.fullmatch(r"d?[qk](\d)_ptr", name) for name in names}
    absent += [name for name, layer in layers.items() if layer and int(layer[1]) >= problem.factors]
    types = {"lse_ptr": "*fp32", "seed_ptr": "*i64"} | dict.fromkeys(absent)
    return CompileJob.of(launch, {name: types.get(name, POINTERS[problem.dtype]) for name in names})


@pytest.mark.parametrize("case", CASES)
def test_compiles_within_limits(case):
    _assert_within_limits(_job(_variant(*CASES[case])))


@pytest.mark.parametrize("case", FACTORED)
def test_earlier_layers_compile_within_limits(case):
    _assert_within_limits(_job(_factored(*FACTORED[case])))


def _assert_within_limits(job):
    used = compile_job(job, "sm_90")
    assert limit_violations(job, "sm_90", used) == ()  # spills, shared memory
    assert "dot" in job.name or used.shared_bytes == 0


@pytest.mark.parametrize(
    "wrong",
    [{"factors": 5}, {"factors": -1}, {"by_head": False}, {"previous": True}, {"scores": True}, {"head": 32},
     {"precision": "ieee"}, {"factors": 0, "added": True, "backend": "hip"}],
    ids=str,
)  # fmt: skip
def test_factors_are_refused(wrong):
    with pytest.raises(ValueError, match="factors"):
        replace(_factored(*FACTORED["tf32"]), **wrong)
