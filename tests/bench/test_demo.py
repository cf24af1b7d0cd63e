from __future__ import annotations

import pytest
import torch

from isogemm.bench import demo, timer
from isogemm.bench.cases import tiny
from isogemm.bench.demo import Accuracy, Bits, DemoResult
from isogemm.training import benchmark as patchtst

CPU = torch.device("cpu")
X = torch.randn(10, 4)


def compute(function, rows):
    return function(rows)


def test_changes_are_counted_in_every_batch():
    """isogemm's rows never change; torch's do alone, and the last one, which is alone in batches of 3."""
    functions = {"isogemm": lambda rows: X[rows] + 0, "torch": lambda rows: X[rows] + (len(X[rows]) == 1)}
    found = demo.count_changes(functions, compute, "rows", batch=10, sizes=(1, 3))
    assert found == Bits("10 rows: alone and in batches of 3, against a batch of 10", 80, torch=44, isogemm=0)


def test_some_items_of_a_batch_are_computed_again():
    asked = []
    functions = {name: lambda rows: asked.append((rows.start, rows.stop)) or X[rows] for name in ("isogemm", "torch")}
    found = demo.count_changes(functions, compute, "rows", batch=10, sizes=(3,), compared=4)
    assert asked == 2 * [(0, 10), (0, 3), (3, 4)]
    assert found.how == "4 rows: in batches of 3, against a batch of 10"
    assert found.compared == 16


def test_bits_are_compared_not_values():
    functions = {
        "isogemm": lambda rows: torch.zeros(len(X[rows]), 1),
        "torch": lambda rows: torch.full((len(X[rows]), 1), -0.0 if rows.start else 0.0),
    }
    assert demo.count_changes(functions, compute, "rows", batch=10, sizes=(5,)).torch == 5


@pytest.mark.parametrize(
    ("changed", "text"), [(0, "0"), (1, "1 (<1%)"), (500, "500 (50%)"), (999, "999 (>99%)"), (1000, "1,000 (100%)")]
)
def test_shares_are_not_rounded_to_nothing_or_all(changed, text):
    assert demo.changed_text(changed, 1000) == text


def test_a_failure_is_said():
    right = DemoResult("op", Bits("", 10, 5, 0), accuracy=Accuracy("", 1.0, 1.0))
    wrong = DemoResult("op", Bits("", 10, 5, 3), failure="error 1")
    assert right.ok
    assert wrong.failures == ["isogemm changed 3 of 10 elements, expected 0", "error 1"]


def test_tiny_promises_nothing_on_a_cpu():
    shown = tiny.demo(CPU)
    assert shown.ok
    assert shown.bits is None
    assert shown.no_promise == "on a CPU isogemm.bmm is torch.bmm, which promises nothing about bits"
    assert shown.accuracy.isogemm == shown.accuracy.torch


def test_patchtst_shows_its_encoder(monkeypatch):
    monkeypatch.setattr(timer, "measure", lambda thunks, device, repeats: {name: [1.0] for name in thunks})
    shown = patchtst.demo(CPU)
    assert shown.ok
    assert (shown.bits.compared, shown.bits.isogemm) == (2 * 2 * 64 * 5 * 64, 0)  # the result and the gradient
    assert "BatchNorm" in shown.note
