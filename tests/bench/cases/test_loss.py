from __future__ import annotations

import pytest
import torch

from isogemm.bench import runner, timer
from isogemm.bench.cases import loss

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def few_input_sets(monkeypatch):
    """On the CPU rotation only takes time."""
    monkeypatch.setattr(timer, "rotations", lambda size, device, most: 2)


def test_the_grid_on_a_gpu():
    cases = loss.cases(CUDA, False)
    assert len({case.label for case in cases}) == len(cases)
    heads = {tuple(case.params[name] for name in ("tokens", "vocabulary", "k")) for case in cases}
    assert {*loss.HEADS, *loss.OTHER_HEADS, *loss.FEW} <= heads


@pytest.mark.parametrize("name", [loss.FORWARD, loss.STEP])
def test_a_case_is_checked_and_timed(name):
    run = runner.Runner(CPU, repeats=1)
    (row,) = run.rows([loss._case(name, 20, 300, 24, "bfloat16")])
    assert run.failures == []
    products = loss.PRODUCTS if name == loss.STEP else "one product"
    assert set(row.times_us) == {"isogemm", "torch", products}
    assert set(row.error) == {"isogemm", "torch"}
    assert row.info["path"] == "cpu"


def test_the_demo_counts_no_changed_bit():
    shown = loss.demo(CPU)
    assert shown.ok
    assert shown.bits.isogemm == 0
