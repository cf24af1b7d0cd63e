from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isogemm.bench import runner, timer
from isogemm.bench.cases import attention
from isogemm.bench.cases.attention import Point

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SMALL = Point("attention", 3, 40, 40, 4, 2, 16)


@pytest.fixture(autouse=True)
def few_input_sets(monkeypatch):
    """On the CPU rotation only takes time."""
    monkeypatch.setattr(timer, "rotations", lambda size, device, most: 2)


def test_the_grid_on_a_gpu():
    points = list(attention.points())
    assert len({point.case().label for point in points}) == len(points)
    prefills = {(point.head, point.keys) for point in points if point.name == "attention"}
    assert prefills == {(head, length) for head in (64, 128) for length in attention.LENGTHS}
    assert all(point.batch * point.queries == attention.TOKENS for point in points if point.name == "attention")
    decoded = {(point.batch, point.keys) for point in points if point.name == "decode"}
    assert len(decoded) == 20


@pytest.mark.parametrize(
    "point",
    [
        SMALL,
        replace(SMALL, name="attention grad", of_grad=True),
        replace(SMALL, layout="packed"),
        replace(SMALL, layout="packed", of_grad=True),
        replace(SMALL, name="decode", queries=1, keys=64),
        replace(SMALL, name="decode paged", queries=1, keys=64, layout="paged"),
        replace(SMALL, queries=4),
        replace(SMALL, how={}),
        replace(SMALL, how={"causal": True, "window": 9}, of_grad=True),
        replace(SMALL, how={"causal": True, "softcap": 9.0}),
    ],
    ids=str,
)
def test_a_case_is_checked_and_timed(point):
    run = runner.Runner(CPU, repeats=1)
    (row,) = run.rows([point.case()])
    assert run.failures == []
    assert set(row.times_us) == {"isogemm", "torch"}
    assert set(row.error) == {"isogemm", "torch"}
    assert row.info["path"] == "cpu"
    assert row.flops > 0
    assert row.bytes > 0


def test_a_wrong_result_is_not_timed(monkeypatch):
    right = attention.attention
    monkeypatch.setattr(attention, "attention", lambda *x, **how: right(*x, **how) * 1.1)
    run = runner.Runner(CPU, repeats=1)
    assert not list(run.rows([SMALL.case()]))
    assert run.failures[0].stage == "check"


def test_the_demo_counts_no_changed_bit():
    shown = attention.demo(CPU)
    assert shown.ok
    assert shown.bits.isogemm == 0
