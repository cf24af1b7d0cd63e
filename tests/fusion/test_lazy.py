"""Blocks of isogemm.autofuse: their ends, modes around them, dropout, threads, what they keep, compiled code."""

import functools

import pytest
import torch
from deferring import assert_same, leaves_of, steps_of

import isogemm
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


def test_a_sum_of_two_products_with_a_tensor_for_alpha():
    a, w, w2 = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6, 8)
    alpha = torch.tensor(2.0)
    with isogemm.autofuse():
        found = torch.add(torch.nn.functional.linear(a, w), torch.nn.functional.linear(a, w2), alpha=alpha)
    torch.testing.assert_close(found, a @ w.T + 2 * (a @ w2.T))
