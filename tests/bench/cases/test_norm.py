from __future__ import annotations

import pytest
import torch

from isogemm.bench import runner, timer
from isogemm.bench.cases import norm

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def few_input_sets(monkeypatch):
    """On the CPU rotation only takes time."""
    monkeypatch.setattr(timer, "rotations", lambda size, device, most: 2)


def test_the_grid_on_a_gpu():
    cases = norm.cases(CUDA, False)
    assert len({case.label for case in cases}) == len(cases)
    for name in norm.OPERATIONS:
        for of in ("", norm.STEP):
            shapes = {(case.params["rows"], case.params["d"]) for case in cases if case.op == name + of}
            assert {*norm.SHAPES, *norm.OTHER_SHAPES} <= shapes


@pytest.mark.parametrize("name", [*norm.ALL, *(name + norm.STEP for name in norm.ALL)])
def test_a_case_is_checked_and_timed(name):
    run = runner.Runner(CPU, repeats=1)
    (row,) = run.rows([norm._case(name, 20, 300, "bfloat16")])
    assert run.failures == []
    assert set(row.times_us) == set(row.error) == {"isogemm", "torch"}
    assert row.info["path"] == "cpu"


def test_an_embedding_is_checked_and_timed():
    run = runner.Runner(CPU, repeats=1)
    (row,) = run.rows([norm._embedding_case(50, 24, 300, "bfloat16")])
    assert run.failures == []
    assert row.info["path"] == "cpu"


def test_the_demo_counts_no_changed_bit():
    shown = norm.demo(CPU)
    assert shown.ok
    assert shown.bits.isogemm == 0
