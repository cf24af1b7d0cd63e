"""The kernel for few rows, compiled: it runs on a GPU alone, or with its layouts ignored."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from compile_matrix import compile_job, disassemble, limit_violations
from gemm_jobs import NAMES, launch_job

from isogemm.attention.configs import WORKSPACE, Config, Problem, illegal_decode
from isogemm.attention.kernels.decode import describe_decode, partial_elements

CONFIG = Config(16, 4, 3, split=True, roles=True, pdl=True)
SPILLS = 192  # bytes: soft-capped scores, and tiles of 32 rows


def make_problem(head=128, tokens=1, batch=2, keys=4096, kind="dense", dtype="bfloat16", **changes):
    strides = (8 * tokens * head, head, tokens * head) if kind == "dense" else (0, 8 * head, head)
    key_strides = (2 * keys * head, head, keys * head) if kind == "dense" else (32 * head, 2 * head, head)
    return Problem(
        kind, batch, tokens if kind == "dense" else batch, keys, 8, 2, head, head, dtype, q_strides=strides,
        k_strides=key_strides, v_strides=key_strides, o_strides=strides,
        **{"causal": True, "scale": head**-0.5, "lse": True} | changes,
    )  # fmt: skip


def make_job(problem, config=CONFIG):
    operand, paged = NAMES[problem.dtype], problem.kind == "paged"
    given = [operand if problem.sinks else None, operand, "fp32", "fp32", *["i32" if paged else None] * 2]
    given += ["i32" if here else None for here in problem.placed] + ["i32" if paged else None]
    kinds = (operand, operand, operand, None, *given)
    return launch_job(f"{problem} {config}", describe_decode(problem, config), kinds, [True] * len(kinds))


CASES = (
    (make_problem(), CONFIG),
    (make_problem(64, batch=9, left=500, softcap=30.0, sinks=True, placed=(True, True, True)), CONFIG),
    (make_problem(dtype="float16", kind="paged", page=16, table_stride=256), CONFIG),
    (make_problem(tokens=8), replace(CONFIG, block_m=32)),
)


@pytest.mark.parametrize(("problem", "config"), CASES, ids=["plain", "placed", "paged", "32 rows"])
def test_roles_compile_within_limits(problem, config):
    assert illegal_decode(problem, config) == ""
    job = replace(make_job(problem, config), allowed_spill_bytes=SPILLS)
    assert limit_violations(job, "sm_90", compile_job(job, "sm_90")) == ()


def test_tiles_that_would_not_fit_are_illegal():
    problem, config = make_problem(64, tokens=8), replace(CONFIG, block_m=32)
    assert "shared memory" in illegal_decode(problem, config)
    job = make_job(problem, config)
    assert limit_violations(job, "sm_90", compile_job(job, "sm_90")) != ()


def test_a_barrier_of_the_computing_warps_serves_four_blocks():
    code = disassemble(make_job(make_problem()), "sm_90")
    begins = code.index("LDSM")
    ends = code.rindex("HMMA")
    assert code.count("BAR.SYNC", begins, ends) <= 6


def test_partial_results_are_bounded():
    for batch in (1, 16, 512):
        for keys in (1024, 131072):
            problem = make_problem(batch=batch, keys=keys)
            assert 4 * partial_elements(problem, CONFIG) <= WORKSPACE
