"""Attention's backward compiled for GPUs that are not here, with the tiles that `choose_backward` gives."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from compile_matrix import compile_job, limit_violations
from gemm_jobs import NAMES, launch_job

from isogemm.attention.configs import BackwardProblem, Problem, choose_backward, tma_usable
from isogemm.attention.kernels.backward import describe_key_gradients, describe_query_gradients

LAUNCHES = ("query", "key")
FEW_WORDS = 48  # bytes of a spill


def make_problem(head, dtype="bfloat16", *, kind="dense", tokens=2048, heads=32, kv_heads=8, arch="sm_90", **more):
    """Causal sequences of as many keys as queries, contiguous [B, T, H, D] or [tokens, H, D]."""
    precision = more.pop("precision", "tf32" if dtype == "float32" else "")
    of_q, of_k = ((n * head * tokens * (kind == "dense"), n * head, head) for n in (heads, kv_heads))
    forward = Problem(
        kind, 4, tokens, tokens, heads, kv_heads, head, head, dtype, precision, of_q, of_k, of_k, of_q, True,
        scale=head**-0.5, arch=arch,
    )  # fmt: skip
    return BackwardProblem(replace(forward, **more), of_q, of_q, of_k, of_k)


def make_job(problem, config, launch):
    forward = problem.forward
    kind = NAMES[forward.dtype]
    mask = {"": None, "bool": "u8", "added": kind}[forward.mask]
    packed = "i32" if forward.kind == "packed" else None
    placing = (packed, packed, *("i32" if given else None for given in forward.placed))
    name = f"{launch} {problem} {config}"
    if launch == "query":
        sinks, of_sinks = (kind, "fp32") if forward.sinks else (None, None)
        of_mask = "fp32" if forward.mask == "added" else None
        given = (kind, kind, kind, mask, sinks, kind, "fp32", kind, "fp32", kind, of_sinks, of_mask, *placing)
        described = describe_query_gradients(problem, config)
    else:
        given = (kind, kind, kind, kind, mask, "fp32", kind, kind, *placing)
        described = describe_key_gradients(problem, config)
    return launch_job(name, described, given, (True,) * len(given))


def check(problem, launch, config=None):
    """Return what the kernel, the chosen one by default, needs, which is within the limits."""
    job = make_job(problem, config or choose_backward(problem), launch)
    used = compile_job(job, problem.forward.arch)
    assert limit_violations(replace(job, allowed_spill_bytes=FEW_WORDS), problem.forward.arch, used) == ()
    return used


def _id(problem):
    forward = problem.forward
    return f"{forward.arch} {forward.kind} {forward.head} {forward.dtype} {forward.precision}{forward.mask}"


EVERYTHING = {"left": 100, "softcap": 30.0, "sinks": True}
HOPPER = [
    make_problem(64), make_problem(128), make_problem(256), make_problem(128, kind="packed"),
    make_problem(80, "float16", heads=28, kv_heads=4), make_problem(64, "float32"),
    make_problem(128, mask="added", placed=(True, True, True), **EVERYTHING),
]  # fmt: skip
OTHERS = [make_problem(128, arch=arch) for arch in ("sm_80", "sm_100", "gfx942")]
OTHERS.append(make_problem(128, "float32", arch="sm_80", precision="ieee"))


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("problem", HOPPER, ids=_id)
def test_compiles_for_hopper(problem, launch):
    used = check(problem, launch)
    assert used.instructions & {"mma", "wgmma"}
    if problem.forward.dtype == "bfloat16":
        assert "wgmma" in used.instructions
        assert ("tma" in used.instructions) == tma_usable(problem)[LAUNCHES.index(launch)]


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("problem", OTHERS, ids=_id)
def test_compiles_for_others(problem, launch):
    check(problem, launch)
