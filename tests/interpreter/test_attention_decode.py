"""Attention with few rows: the kernel whose programs share a sequence, bit for bit as `forward`'s walk.

Scores are of small integers, which every order of summation makes the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import gluon_interpreter
import pytest
import torch

from isogemm.attention.configs import Config, Problem
from isogemm.attention.kernels import forward
from isogemm.verify.compare import assert_bitwise_equal

TENSORS = (
    "q", "k", "v", "mask", "sinks", "o", "lse", "partial", "cu_q", "cu_k", "lengths", "starts", "offsets", "table"
)  # fmt: skip
BLOCK_M = 16


@dataclass(frozen=True)
class Case:
    """Sequences of these numbers of queries and keys; heads of 80 elements have few splits of many blocks."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head: int = 80
    value_head: int = 80
    causal: bool = True
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    sinks: bool = False
    kind: str = "dense"
    starts: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    page: int = 0


CASES = {
    "one split": Case((1,), (100,)),
    "splits": Case((1, 1, 1), (1100,) * 3),
    "16 rows": Case((8, 8), (1300, 1300), sinks=True),
    "lengths": Case((2, 2, 2, 2), (1, 1500, 600, 0), heads=6),
    "placed": Case((2, 2, 2), (1100, 40, 700), starts=(3, 70, 0), offsets=(0, 500, 1000), causal=False),
    "window": Case((2, 2), (1700, 900), left=700, offsets=(100, 0)),
    "soft-capped": Case((1, 1), (600, 600), softcap=2.0),
    "narrow": Case((1, 1), (1100, 1100), heads=2, head=48, value_head=40),
    "packed": Case((1, 11, 0, 3), (900, 700, 0, 3), kind="packed"),
    "paged": Case((1, 1, 1), (1100, 0, 515), kind="paged", page=16),
}


def _integers(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(torch.float16)


def _cumulated(counts):
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def _tensors(case):
    """The problem and its tensors; what belongs to no sequence is NaN."""
    t = dict.fromkeys(TENSORS)
    batch, most = len(case.keys), max(case.keys)
    heads, kv_heads, head, value_head = case.heads, case.kv_heads, case.head, case.value_head
    starts = case.starts or (0,) * batch
    if case.kind == "dense":
        rows, held = (batch, max(case.queries)), (batch, max(map(sum, zip(case.keys, starts, strict=True))))
        size, even = held[1], len(set(case.keys)) == 1
        t["lengths"] = None if even else torch.tensor([n + s for n, s in zip(case.keys, starts, strict=True)])
        t["starts"] = torch.tensor(case.starts) if case.starts else None
        t["offsets"] = torch.tensor(case.offsets, dtype=torch.int32) if case.offsets else None
        places = [(b, slice(s, s + n)) for b, (n, s) in enumerate(zip(case.keys, starts, strict=True))]
    else:
        t["cu_q"], t["cu_k"] = _cumulated(case.queries), _cumulated(case.keys)
        rows, held = (sum(case.queries),), (sum(case.keys) + 5,)
        size, places = held[0], [(slice(*t["cu_k"][b : b + 2].tolist()),) for b in range(batch)]
    k, v = (torch.full((*held, kv_heads, d), math.nan, dtype=torch.float16) for d in (head, value_head))
    for b, place in enumerate(places):
        k[place], v[place] = (_integers(*x[place].shape, seed=2 * b + i) for i, x in enumerate((k, v)))
    if case.kind == "paged":
        pages = -(-most // case.page)
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1)).reshape(batch, pages)
        t["table"], size = order.to(torch.int32), pages * case.page
        paged = [torch.full((batch * pages, case.page, *x.shape[1:]), math.nan, dtype=x.dtype) for x in (k, v)]
        for b, (place,) in enumerate(places):
            for whole, x in zip(paged, (k, v), strict=True):
                at = torch.arange(case.keys[b])
                whole[order[b, at // case.page], at % case.page] = x[place]
        k, v = paged
    t["q"], t["k"], t["v"] = _integers(*rows, heads, head, seed=99), k, v
    t["sinks"] = torch.randn(heads, generator=torch.Generator().manual_seed(2)) if case.sinks else None

    def strides(x):
        return (x.stride(0) if x.ndim == 4 else 0, *x.stride()[-3:-1])

    out = torch.empty(*rows, heads, value_head)
    return t, Problem(
        case.kind, batch, rows[-1], size, heads, kv_heads, head, value_head, "float16", "", strides(t["q"]),
        strides(k), strides(v), strides(out), case.causal, case.left, case.right, head**-0.5, case.softcap, case.sinks,
        placed=tuple(t[name] is not None for name in ("lengths", "starts", "offsets")), page=case.page,
        table_stride=0 if t["table"] is None else t["table"].stride(0), lse=True, sm_count=7,
    )  # fmt: skip


def _run(launch, t, problem, elements=0, stamps=(None,)):
    """Results of launches with these stamps, and one scratch memory."""
    partial = torch.zeros(elements) if elements else None
    for stamp in stamps:
        o = torch.full((*t["q"].shape[:-1], problem.value_head), math.nan, dtype=torch.float16)
        lse = torch.full(t["q"].shape[:-1], math.nan)
        scalars = launch.scalars if stamp is None else (stamp, *launch.scalars[1:])
        given = t | {"o": o, "lse": lse, "partial": partial}
        replace(launch, scalars=scalars).run(*(given[name] for name in TENSORS))
    return o, lse


def _assert_equal(results, expected):
    for result, other in zip(results, expected, strict=True):
        assert_bitwise_equal(result, other)


@pytest.fixture
def interpreted_roles(monkeypatch):
    return gluon_interpreter.interpreted(
        "isogemm.attention.kernels.decode",
        [("    gl.warp_specialize(", "    ready.tiles = tiles\n    gl.warp_specialize("), ("[1, _WARPS]", "[1, 4]")],
        monkeypatch, _set_flag=gluon_interpreter.set_flag, _await_flags=gluon_interpreter.await_flags,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_programs_that_share_a_sequence_give_the_bits_of_one(name, interpreted_roles):
    t, problem = _tensors(CASES[name])
    expected = _run(forward.describe_forward(problem, Config(BLOCK_M, 4, 1)), t, problem)
    assert not any(torch.isnan(each).any() for each in expected)
    config = Config(BLOCK_M, 4, 3, split=True, roles=True)
    for sm_count in (2, 7, 1000):  # programs with many splits, with some, and with one
        shared = replace(problem, sm_count=sm_count)
        launch = interpreted_roles.describe_decode(shared, config)
        elements = interpreted_roles.partial_elements(shared, config)
        _assert_equal(_run(launch, t, problem, elements, (5,)), expected)
