"""Blocks and deferred tensors on several threads."""

import sys
import threading

import pytest
import torch
from deferring import assert_same, leaves_of

from isogemm.fusion import autofuse, deferred
from isogemm.fusion.memory import Pieces


def test_threads():
    leaves = leaves_of()
    expected = torch.relu(leaves["x"] @ leaves["w"])
    results, failures = [], []

    def work():
        try:
            assert type(leaves["x"] @ leaves["w"]) is torch.Tensor
            with autofuse():
                results.extend(torch.relu(leaves["x"] @ leaves["w"]) for _ in range(20))
        except BaseException as failure:
            failures.append(failure)

    with autofuse():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert len(results) == 80
    for result in results:
        assert type(result) is torch.Tensor
        assert_same(result, expected)


@pytest.mark.parametrize("in_block", [False, True])
def test_handed_to_another_thread(in_block):
    leaves = leaves_of()
    expected = torch.relu(leaves["x"] @ leaves["w"])
    sums, failures = [], []
    barrier = threading.Barrier(4)

    def read(y):
        try:
            barrier.wait()
            if in_block:
                with autofuse():
                    sums.append(y + leaves["b"])
            else:
                sums.append(y + leaves["b"])
        except BaseException as failure:
            failures.append(failure)

    with autofuse():
        y = torch.relu(leaves["x"] @ leaves["w"])
        threads = [threading.Thread(target=read, args=(y,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert type(y) is torch.Tensor
    assert not failures
    for result in sums:
        assert type(result) is torch.Tensor
        assert_same(result, expected + leaves["b"])


def test_in_place_while_another_thread_computes_it(monkeypatch):
    leaves = {name: leaf.detach() for name, leaf in leaves_of().items()}
    started, go_on = threading.Event(), threading.Event()
    compute = deferred._compute

    def slowly(*args):
        started.set()
        go_on.wait(5)
        return compute(*args)

    monkeypatch.setattr(deferred, "_compute", slowly)
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        reader = threading.Thread(target=lambda: z.sum())
        reader.start()
        started.wait(5)
        threading.Timer(0.05, go_on.set).start()
        z.relu_()
        reader.join()
    assert_same(z, torch.relu(leaves["x"] @ leaves["w"]))


def test_another_thread_settles_results_while_one_writes():
    """What a write looks through may grow meanwhile."""
    x, w, other = torch.randn(4, 8), torch.randn(8, 8), torch.zeros(3)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with autofuse():
            products = [x @ w for _ in range(300)]
            steps = [torch.relu(each) for each in products]
            reading = threading.Thread(target=lambda: [each.sum() for each in products])
            reading.start()
            while reading.is_alive():
                other.add_(1)
            reading.join()
    finally:
        sys.setswitchinterval(interval)
    torch.testing.assert_close(steps[0], torch.relu(x @ w))


def test_results_that_another_thread_adds_during_a_write(monkeypatch):
    """The same without chance: each look at a result adds one."""
    x, w, other = torch.randn(4, 8), torch.randn(8, 8), torch.zeros(3)
    block, overlap = autofuse(), Pieces.overlap
    with block:
        z = x @ w
        y = torch.relu(z)
        z.sum()
        results = block._mode.ledger._results
        assert results

        def growing(pieces, memory):
            results.add((-len(results) - 1, -len(results)))
            return overlap(pieces, memory)

        monkeypatch.setattr(Pieces, "overlap", growing)
        other.add_(1)
        assert len(results) > 1
    torch.testing.assert_close(y, torch.relu(x @ w))
