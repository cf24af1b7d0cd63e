"""What a block keeps does not grow with what it has done."""

import pytest
import torch

from isogemm.fusion import autofuse
from isogemm.fusion.deferred import Deferred, Ledger
from isogemm.fusion.memory import Pieces
from isogemm.fusion.report import MOST_ENTRIES

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


def test_a_report_counts_what_it_no_longer_lists():
    weight, counted = torch.randn(8, 8), MOST_ENTRIES + 50

    @(fuse := autofuse())
    def layer(x):
        z = x @ weight
        return torch.relu(z).sum(), z.sum(), (x @ weight).sum()

    for rows in range(1, counted + 1):
        for _ in range(2):
            layer(torch.ones(rows, 8))
    for entries, times in ((fuse.report.fused, 2), (fuse.report.repeated, 2), (fuse.report.left, 4)):
        assert entries.total() == times * counted
        assert len(entries) == MOST_ENTRIES + 1
    assert f"fused products beyond the first {MOST_ENTRIES} entries (x 100)" in str(fuse.report)
