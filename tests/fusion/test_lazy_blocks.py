"""Blocks of isogemm.autofuse: their ends, modes around them, dropout, threads, what they keep, compiled code."""

import functools
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from deferring import assert_same, in_another_thread, leaves_of, steps_of
from torch.utils.checkpoint import checkpoint

from isogemm.fusion import autofuse, deferred
from isogemm.fusion.deferred import Deferred


def test_exception_leaves_usable_tensors():
    leaves = leaves_of()
    kept = []

    def fail():
        with autofuse():
            kept.append(torch.relu(leaves["x"] @ leaves["w"]))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert type(kept[0]) is torch.Tensor
    assert_same(kept[0], torch.relu(leaves["x"] @ leaves["w"]))


def test_the_mode_is_gone_after_the_block():
    leaves = leaves_of()
    with pytest.raises(KeyError), autofuse():
        raise KeyError
    with autofuse():
        pass
    assert type(leaves["x"] @ leaves["w"]) is torch.Tensor


def test_nested_blocks():
    leaves = leaves_of()
    with autofuse() as outer:
        y = torch.relu(leaves["x"] @ leaves["w"])
        with autofuse() as inner:
            z = torch.sigmoid(leaves["x"] @ leaves["w"])
            assert type(z) is Deferred
        assert type(z) is torch.Tensor
        assert type(y) is Deferred  # the outer block's
        again = torch.tanh(leaves["x"] @ leaves["w"])
        assert type(again) is Deferred
    assert steps_of(inner) == [("sigmoid",)]
    assert steps_of(outer) == [("relu",), ("tanh",)]


def test_a_block_is_entered_once():
    block = autofuse()
    with block, pytest.raises(RuntimeError, match="entered already"), block:
        pass
    with block as report:
        pass
    assert report is block.report


def test_decorator():
    leaves = leaves_of()
    fuse = autofuse()

    @fuse
    def layer(x, w, *, depth=0):
        """A layer."""
        return layer(x, w, depth=depth - 1) if depth else torch.relu(x @ w)

    result = layer(leaves["x"], leaves["w"], depth=2)
    assert type(result) is torch.Tensor
    assert (layer.__name__, layer.__doc__) == ("layer", "A layer.")
    layer(leaves["x"], leaves["w"])
    assert steps_of(fuse.report) == [("relu",)] * 2


def generate():
    yield 1


async def wait():
    return 1


async def generate_later():
    yield 1


class Generating:
    __call__ = generate_later


@pytest.mark.parametrize(
    "function",
    [
        generate,
        wait,
        generate_later,
        functools.partial(generate_later),
        Generating(),
        Generating().__call__,
        functools.partial(Generating()),
        staticmethod(generate_later),
    ],
)
def test_a_function_that_runs_after_its_call_is_refused(function):
    with pytest.raises(TypeError, match="is a generator or a coroutine; use a with block inside it"):
        autofuse()(function)


def test_a_method_is_decorated_below_classmethod():
    with pytest.raises(TypeError, match="expected it below the other decorator"):
        autofuse()(classmethod(lambda cls: cls))


def test_other_modes_see_what_is_computed():
    class Names(torch.overrides.TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    leaves = leaves_of()
    with Names() as outer, autofuse():
        y = torch.relu(leaves["x"] @ leaves["w"])
    assert_same(y, torch.relu(leaves["x"] @ leaves["w"]))
    with autofuse(), Names() as inner:
        y = torch.relu(leaves["x"] @ leaves["w"])
    assert inner.names[:2] == ["__matmul__", "relu"] or "relu" in inner.names
    assert outer.names
    assert_same(y, torch.relu(leaves["x"] @ leaves["w"]))


def test_dispatch_modes():
    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **(kwargs or {}))

    leaves = leaves_of()
    with Count() as plain:
        torch.relu(leaves["x"] @ leaves["w"]).sum()
    with autofuse() as report:
        z = torch.relu(leaves["x"] @ leaves["w"])
        with Count() as count:
            inside = torch.relu(leaves["x"] @ leaves["w"])
            total = z.sum()
        assert count.calls == plain.calls  # and what was called before it is not its business
    assert_same(z, inside)
    assert_same(total, inside.sum())
    assert "a dispatch mode or a tracer listens" in {entry.reason for entry in report.left}


def test_dropout():
    leaves = leaves_of()
    x = torch.ones(64, 8)
    with autofuse() as report:
        torch.manual_seed(0)
        y = F.dropout(torch.relu(x @ leaves["w"]), 0.5)
    torch.manual_seed(0)
    assert_same(y, F.dropout(torch.relu(x @ leaves["w"]), 0.5))
    assert steps_of(report) == [("relu",)]
    with autofuse(dropout=True) as report:
        y = F.dropout(torch.sigmoid(x @ leaves["w"]), 0.5) + 1.0
        z = x @ leaves["w"]
        assert F.dropout(z, 0.0) is z
    expected = torch.sigmoid(x @ leaves["w"]) * 2
    kept = y != 1
    assert_same((y - 1)[kept], expected[kept])
    assert 0.3 < kept.float().mean() < 0.7
    assert steps_of(report) == [("sigmoid", "dropout")]


@pytest.mark.parametrize("first", ["operand", "dropout", "sums", "changed", "none"])
def test_one_call_of_dropout_has_one_mask(first):
    leaves = {name: leaf.detach() for name, leaf in leaves_of(torch.float64).items()}
    r, s = leaves["r"], leaves["r"] * 3
    with autofuse(dropout=True):
        z = torch.tanh(leaves["x"] @ leaves["w"])
        h = F.dropout(z, 0.5)
        a = h + r
        if first == "operand":
            z.sum()
        elif first == "dropout":
            h.sum()
        elif first == "sums":
            a.sum()
        elif first == "changed":
            kept = h.clone()
            h.add_(1)
            assert_same(a - kept, r)
            h = kept
        b = h + s
    assert_same(a - b, r - s)
    assert_same(a - h, r)
    assert (h == 0).any()


def test_dropout_fuses_with_the_residual_where_nobody_else_reads_it():
    leaves = leaves_of()
    with autofuse(dropout=True) as report:
        y = leaves["r"] + F.dropout(leaves["x"] @ leaves["w"] + leaves["b"], 0.5)
        in_place = F.dropout(torch.tanh(leaves["x"] @ leaves["w"]), 0.5)
        in_place += leaves["r"]
        held = F.dropout(torch.sigmoid(leaves["x"] @ leaves["w"]), 0.5)
        z = held + leaves["r"]
    assert_same(z - held, leaves["r"])
    assert y.requires_grad
    assert in_place.requires_grad
    assert steps_of(report) == [
        ("bias", "dropout", "residual"),
        ("tanh", "dropout", "residual"),
        ("sigmoid", "dropout"),
    ]


def test_a_dropout_changed_unseen_raises():
    leaves = {name: leaf.detach() for name, leaf in leaves_of().items()}
    with autofuse(dropout=True):
        h = F.dropout(leaves["x"] @ leaves["w"], 0.5)
        y = h + leaves["r"]
        h.sum()
        in_another_thread(lambda: h.add_(1))
        with pytest.raises(RuntimeError, match="was changed in place"):
            y.sum()


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


@pytest.mark.parametrize("end", [lambda z: z.view(-1), lambda z: z * 2, lambda z: z.sum(), lambda z: z])
def test_block_inside_a_checkpoint(end):
    """Which leaves the block by an exception when it has recomputed enough."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)

    def layer(x):
        return end(second(F.gelu(first(x))))

    expected = torch.autograd.grad(layer(x).sum(), [x, *first.parameters()])
    with autofuse():
        actual = torch.autograd.grad(
            checkpoint(autofuse()(layer), x, use_reentrant=False).sum(), [x, *first.parameters()]
        )
    outside = torch.autograd.grad(checkpoint(autofuse()(layer), x, use_reentrant=False).sum(), [x, *first.parameters()])
    for got, other, same in zip(actual, outside, expected, strict=True):
        assert_same(got, same)
        assert_same(other, same)


def test_a_write_looks_at_what_reads_its_memory_alone(monkeypatch):
    leaves, other = leaves_of(), torch.zeros(3)
    looked = []
    found = deferred._deferred_at
    monkeypatch.setattr(deferred, "_deferred_at", lambda refs: found(looked.append(ref) or ref for ref in refs))
    with autofuse():
        held = []
        for _ in range(200):
            held.append(leaves["x"] @ leaves["w"])
            other.add_(1)
        assert len(looked) < 1000


def test_report_is_live():
    leaves = leaves_of()
    with autofuse() as report:
        fused = report.fused
        torch.relu(leaves["x"] @ leaves["w"]).sum()
        assert fused.total() == 1


# Leaks.


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


# Compiling.


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_code_is_left_alone(fullgraph):
    leaves = leaves_of()

    def compute(x, w):
        return torch.relu(x @ w + leaves["b"])

    def with_block(x, w):
        with autofuse():
            return compute(x, w)

    torch._dynamo.reset()
    expected = compute(leaves["x"], leaves["w"])
    for function in (compute, with_block, autofuse()(compute)):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)
        with autofuse() as report:
            result = compiled(leaves["x"], leaves["w"])
        assert_same(result, expected)
        assert_same(compiled(leaves["x"], leaves["w"]), expected)
        assert not report.fused


def test_deferred_tensor_given_to_compiled_code():
    leaves = leaves_of()

    def after(z):
        return torch.relu(z + leaves["b"])

    torch._dynamo.reset()
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        result = torch.compile(after, backend="aot_eager")(z)
    assert_same(result, after(leaves["x"] @ leaves["w"]))
    assert_same(
        torch.autograd.grad(result.sum(), leaves["w"])[0],
        torch.autograd.grad(after(leaves["x"] @ leaves["w"]).sum(), leaves["w"])[0],
    )
    torch._dynamo.reset()
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"isogemm\.autofuse"):
            torch.compile(after, backend="aot_eager", fullgraph=True)(z)


def test_report():
    leaves = leaves_of()
    with autofuse() as report:
        for _ in range(2):
            torch.relu(leaves["x"] @ leaves["w"] + leaves["b"]).sum()
        F.linear(leaves["x"], leaves["w"].t()).sum()
    assert str(report).splitlines() == [
        "fused 2, left 1",
        "  fused matmul [6, 8] x [8, 5] float32 + bias + relu (x 2)",
        "  left linear [6, 8] x [5, 8] float32: sum reads it",
    ]
