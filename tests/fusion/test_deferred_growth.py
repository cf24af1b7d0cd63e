"""What a block keeps does not grow with what it has done, and nothing is leaked."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from deferring import leaves_of

from isogemm.fusion import autofuse
from isogemm.fusion.deferred import Deferred, Ledger
from isogemm.fusion.memory import Pieces

STEPS = 300
MOST = 200  # where a handful is pending


@pytest.fixture
def ledgers(monkeypatch):
    made = []

    class Watched(Ledger):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr("isogemm.fusion.lazy.Ledger", Watched)
    return made


def size_of(value):
    """The number of elements, those of elements included."""
    if isinstance(value, Pieces):
        value = value.notes
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(size_of, value)) if isinstance(value, list | tuple | set) else 1


def peak(ledger, step):
    """The largest of a ledger's containers, of any kind, over many steps."""
    found = 0
    for number in range(STEPS):
        step(number)
        found = max(found, *(size_of(value) for value in vars(ledger).values()))
    return found


def some_pending(x, w):
    return [x @ w, torch.relu(x @ w)]


@pytest.mark.parametrize("pending", [lambda x, w: [], some_pending])
@pytest.mark.parametrize("kind", ["trained", "read twice", "held", "changed in place", "dropped"])
def test_a_block_keeps_what_is_pending_alone(ledgers, pending, kind):
    torch.manual_seed(0)
    x, r = torch.randn(4, 8), torch.randn(4, 8)
    w = torch.randn(8, 8, requires_grad=kind == "trained")
    other, results = torch.randn(8, 8), []

    def step(number):
        z = x @ w
        y = torch.relu(z + r)
        if kind == "trained":
            y.sum().backward()
            with torch.no_grad():
                w.sub_(w.grad, alpha=1e-3)
            w.grad = None
            return
        if kind == "changed in place":
            z += r
        if kind != "dropped":
            z.sum()
        if kind == "held":
            results.append(z)  # memory of its own, step by step
        r.mul_(1.0)

    with autofuse():
        first = pending(x, other)
        assert peak(ledgers[0], step) < MOST
        assert kind == "trained" or all(type(each) is Deferred for each in first), "a backward alone computes them"
    torch.testing.assert_close(results, [x @ w] * len(results))


def test_unread_results_are_freed_at_once_and_never_computed():
    leaves = leaves_of()
    gc.disable()
    try:
        with autofuse() as report:
            operand = leaves["x"] * 2
            watched = weakref.ref(operand)
            z = operand @ leaves["w"]
            y = torch.relu(z)
            references = weakref.ref(z), weakref.ref(y)
            del operand, z
            assert references[0]() is None
            assert watched() is not None
            del y
            assert references[1]() is None
            assert watched() is None
        assert not report.fused
        assert not report.left
    finally:
        gc.enable()


def test_computed_results_hold_what_plain_ones_hold():
    leaves = leaves_of()
    gc.disable()
    try:
        with autofuse() as report, torch.no_grad():
            operand = leaves["x"] * 2
            watched = weakref.ref(operand)
            y = torch.relu(operand @ leaves["w"])
            y.sum()
            del operand
            assert watched() is None
        mode = weakref.ref(report)
        tracked = leaves["x"] * 2
        watched = weakref.ref(tracked)
        with autofuse():
            y = torch.relu(tracked @ leaves["w"])
        del tracked
        assert watched() is not None  # saved for the backward
        del y, report
        assert watched() is None
        assert mode() is None
    finally:
        gc.enable()


def test_no_garbage():
    leaves = leaves_of()
    with autofuse():
        torch.relu(leaves["x"] @ leaves["w"] + leaves["b"]).sum()
    while gc.collect():  # what other tests left may have finalisers, which leave more
        pass
    gc.disable()
    try:
        for _ in range(10):
            with autofuse():
                z = leaves["x"] @ leaves["w"]
                y = torch.relu(z + leaves["b"]) * 3
                del z, y
                F.silu(leaves["x"] @ leaves["w"]) * (leaves["x"] @ leaves["w3"])
        found = gc.collect()
        tensors = [each for each in gc.garbage if isinstance(each, torch.Tensor)]
    finally:
        gc.enable()
    assert not tensors
    assert found < 10  # none per pass
