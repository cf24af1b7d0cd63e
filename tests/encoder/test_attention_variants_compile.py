"""Attention with dropout and residual scores compiled for a GPU that is not here."""

import pytest

pytest.importorskip("triton")

from isogemm.encoder import plan
from isogemm.encoder.configs_attention import Attention
from isogemm.testing import CompileJob, compile_job, limit_violations

POINTERS = {"float32": "*fp32", "bfloat16": "*bf16"}
CASES = {  # head, dtype, precision, backward, residual, tokens; with both, fragments are in PatchTST's layers
    "registers": (4, "float32", "tf32", True, False, 42),
    "fragments, dropout alone": (8, "bfloat16", "ieee", True, False, 42),
    "dot": (32, "bfloat16", "ieee", True, True, 42),
}


def _job(head, dtype, precision, backward, residual, tokens):
    heads = 16
    strides = (3 * heads * head,) * (6 if backward else 3)
    problem = Attention(
        896, tokens, heads, head, dtype, precision, strides, dropout=0.2, previous=residual, scores=residual
    )
    launch = (plan.describe_attention_backward if backward else plan.describe_attention)(problem)
    names = launch.kernel.arg_names[: -len(launch.constants)]
    pointers, scalars = names[: -len(launch.scalars)], names[-len(launch.scalars) :]
    absent = ["mask_ptr"] + ([] if residual else [name for name in pointers if "previous" in name or "scores" in name])
    types = {"lse_ptr": "*fp32", "seed_ptr": "*i64"}
    signature = {name: types.get(name, POINTERS[dtype]) for name in pointers if name not in absent}
    attrs, constexprs = dict.fromkeys(signature, 16), launch.constants | dict.fromkeys(absent)
    for name, value in zip(scalars, launch.scalars, strict=True):
        if value is None:
            constexprs[name] = None
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if name.startswith("ld") and value % 16 == 0:
                attrs[name] = 16
    options = dict(launch.options)
    number = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    return CompileJob(launch.kernel.__name__, launch.kernel, signature, constexprs, attrs, **number, options=options)


@pytest.mark.parametrize("case", CASES)
def test_compiles_within_limits(case):
    job = _job(*CASES[case])
    used = compile_job(job, "sm_90")
    assert limit_violations(job, "sm_90", used) == ()  # spills, shared memory
    assert "dot" in job.name or used.shared_bytes == 0
