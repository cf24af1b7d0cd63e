"""The forward whose warps have roles, compiled for sm_90: it runs on a GPU alone, since Gluon has no interpreter."""

import re
from dataclasses import replace
from importlib.metadata import version

import pytest

pytest.importorskip("triton")

from compile_matrix import compile_job, disassemble, limit_violations
from gemm_jobs import NAMES, launch_job

from isogemm.attention.configs import Config, Problem, illegal_roles, queries_by_tma
from isogemm.attention.kernels.roles import describe_roles_forward

# Bytes: numbers of a tile, of which no step reads one. Triton 3.9 keeps more of them in memory.
SPILLS = 64 if version("triton") < "3.9" else 160
CONFIG = Config(128, 4, 2, roles=True)


def make_problem(head=128, group=4, queries=2048, dtype="bfloat16", **changes):
    heads, keys = 2 * group, queries
    if changes.get("kind") == "packed":
        strides, key_strides = (0, heads * head, head), (0, 2 * head, head)
        return Problem(
            sequences=2, queries=2 * queries, keys=2 * keys, heads=heads, kv_heads=2, head=head, value_head=head,
            dtype=dtype, q_strides=strides, k_strides=key_strides, v_strides=key_strides, o_strides=strides,
            **{"causal": True, "scale": head**-0.5} | changes,
        )  # fmt: skip
    strides = (heads * queries * head, head, queries * head)
    key_strides = (2 * keys * head, head, keys * head)
    return Problem(
        "dense", 2, queries, keys, heads, 2, head, head, dtype, q_strides=strides, k_strides=key_strides,
        v_strides=key_strides, o_strides=strides, **{"causal": True, "scale": head**-0.5} | changes,
    )  # fmt: skip


def make_job(problem, config=CONFIG):
    launch = describe_roles_forward(problem, config)
    operand = NAMES[problem.dtype]
    sinks, lse = "fp32" if problem.sinks else None, "fp32" if problem.lse else None
    cu = "i32" if problem.kind == "packed" else None
    placed = ("i32" if given else None for given in problem.placed)
    kinds = (operand, operand, operand, None, sinks, operand, lse, None, cu, cu, *placed, None)
    job = launch_job(f"{problem} {config}", launch, kinds, [True] * len(kinds))
    return replace(job, allowed_spill_bytes=SPILLS)


CASES = (
    make_problem(lse=True),
    make_problem(64, dtype="float16", lse=True, sinks=True),
    make_problem(group=7),
    make_problem(96, left=500, right=3, causal=False),
    make_problem(kind="packed"),
    make_problem(64, placed=(True, True, True)),
)


@pytest.mark.parametrize("problem", CASES, ids=str)
def test_compiles_within_limits(problem):
    """And a step's products are issued with the last values' before, and exponentials taken while those run."""
    assert illegal_roles(problem, CONFIG) == ""
    job = make_job(problem)
    assert limit_violations(job, "sm_90", compile_job(job, "sm_90")) == ()
    code = disassemble(job, "sm_90")
    steps = re.findall(r"HGMMA|MUFU\.EX2|WARPGROUP\.(?:ARRIVE|DEPBAR\S* gsb\d+, 0x[0-9a-f]+)", code)
    block_n = problem.order.block_n
    widest = 64 if problem.head <= 64 else 128
    wait = r" WARPGROUP\.DEPBAR\S* gsb0, "
    second = r"((?: MUFU\.EX2)*) WARPGROUP\.ARRIVE((?: HGMMA)+)((?: MUFU\.EX2)+)" + wait + "0x0"
    found = re.findall(
        r"WARPGROUP\.ARRIVE((?: HGMMA)+) WARPGROUP\.ARRIVE((?: HGMMA)+)" + wait + r"0x1((?: MUFU\.EX2)+)" + wait + "0x0"
        + (second if block_n == 64 else ""),
        " ".join(steps),
    )  # fmt: skip
    assert len(found) == 2  # one of each warpgroup
    for scores, values, exponentials, *of_second in found:
        assert scores.count("HGMMA") == widest // 16
        assert values.count("HGMMA") == block_n // 16
        assert exponentials.count("EX2") >= block_n // 2
        if of_second:
            assert of_second[1].count("HGMMA") == block_n // 16
            assert of_second[2].count("EX2") >= block_n // 2


def test_softcapped_compiles():
    assert compile_job(replace(make_job(make_problem(64, softcap=20.0)), allowed_spill_bytes=512), "sm_90").registers


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "16-bit"),
        ({"arch": "sm_100"}, "sm_90"),
        ({"head": 192}, "33 to 128"),
        ({"kind": "paged"}, "dense or packed"),
        ({"placed": (True, True, False), "causal": False}, "causal"),
        ({"mask": "bool"}, "mask"),
        ({"queries": 0}, "at least"),
        ({"k_strides": (4, 4, 4)}, "TMA"),
        ({"k_strides": (0, 128, 1024)}, "TMA"),
        ({"aligned": False}, "TMA"),
    ],
)
def test_illegal_problems_say_why(changes, reason):
    assert reason in illegal_roles(replace(make_problem(), **changes), CONFIG)


@pytest.mark.parametrize("changes", [{"block_m": 64}, {"num_stages": 3}, {"split": True}, {"pdl": True}], ids=str)
def test_illegal_configs_say_why(changes):
    assert "roles have tiles" in illegal_roles(make_problem(), replace(CONFIG, **changes))


def test_queries_of_whole_tokens_by_tma():
    assert all(queries_by_tma(make_problem(group=group)) for group in (1, 2, 4, 8, 16, 64))
    assert not any(queries_by_tma(make_problem(group=group)) for group in (3, 5, 7, 128))
    assert not queries_by_tma(replace(make_problem(), o_strides=(2, 4, 8)))
