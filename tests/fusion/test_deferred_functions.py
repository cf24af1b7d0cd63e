"""isogemm.autofuse and autograd.Functions, which take deferred tensors without asking __torch_function__."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from deferring import assert_as_plain, assert_same, leaves_of

from isogemm.fusion import autofuse, deferred


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.relu(x @ w)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = grad * (x @ w > 0)
        return grad @ w.t(), x.t() @ grad


_double = _Double.apply


def test_autograd_functions():
    """Their apply does not ask __torch_function__: gradients must not get lost on the way."""
    assert_as_plain(lambda x, w, b, **_: _double(x @ w + b))
    assert_as_plain(lambda x, w, b, **_: _Double.apply(torch.relu(x @ w + b)))
    assert_as_plain(lambda x, w, **_: _Product.apply(x, w) + x @ w)


def test_backward_of_a_function_inside_the_block():
    leaves = leaves_of()
    expected = torch.autograd.grad(_Product.apply(leaves["x"], leaves["w"]).sum(), [leaves["x"], leaves["w"]])
    with autofuse():
        y = _Product.apply(leaves["x"], leaves["w"])
        torch.autograd.backward(y, torch.ones_like(y))
    assert type(leaves["x"].grad) is torch.Tensor
    assert_same(leaves["x"].grad, expected[0])
    assert_same(leaves["w"].grad, expected[1])


class _Identity(torch.autograd.Function):
    """Returns its argument without reading it, like those of torch for distributed training."""

    @staticmethod
    def forward(ctx, z):
        return z

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class _Blind(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.shape = z.shape
        return torch.ones(6, 5)

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(ctx.shape)


class _Scaled(torch.autograd.Function):
    """Takes two arguments, has a setup_context, and asks which arguments require gradients."""

    @staticmethod
    def forward(z, s):
        return z * s

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        z, s = ctx.saved_tensors
        return grad * s if ctx.needs_input_grad[0] else None, (grad * z).sum() if ctx.needs_input_grad[1] else None


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.mark_dirty(z)
        return z.mul_(3)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class _Returns(torch.autograd.Function):
    """Reads its argument, saves it and gives it back."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        ctx.total = z.sum()
        return z

    @staticmethod
    def backward(ctx, grad):
        (z,) = ctx.saved_tensors
        return grad * z * ctx.total


FUNCTIONS = {
    "in place itself": lambda x, w, b, **_: _InPlace.apply(x @ w + b),
    "in place itself, and read": lambda x, w, b, **_: _InPlace.apply(z := x @ w + b) + torch.relu(z),
    "given back": lambda x, w, b, **_: _Returns.apply(z := torch.tanh(x @ w + b)) * z,
    "under vmap": lambda x, w, b, **_: torch.vmap(lambda row: row * 2)(torch.tanh(x @ w + b)),
    "identity": lambda x, w, b, **_: _Identity.apply(torch.relu(x @ w + b)),
    "identity of a product": lambda x, w, **_: _Identity.apply(x @ w),
    "blind": lambda x, w, b, **_: _Blind.apply(torch.tanh(x @ w + b)),
    "two arguments": lambda x, w, s, **_: _Scaled.apply(torch.sigmoid(x @ w), s),
    "of a gate": lambda x, w, w3, s, **_: _Scaled.apply(F.silu(x @ w) * (x @ w3), s),
    "in place": lambda x, w, b, s, **_: _Scaled.apply((x @ w).add_(b), s),
    "in place, read before": lambda x, w, b, s, **_: _Blind.apply(z := x @ w) + z.add_(b) * s,
    "twice": lambda x, w, b, **_: _double(z := torch.relu(x @ w + b)) * _Identity.apply(z) + z,
    "and read": lambda x, w, b, **_: _Identity.apply(z := x @ w + b) + torch.relu(z),
    "blind, of a product": lambda x, w, **_: _Blind.apply(x @ w),
    "blind, and read": lambda x, w, b, **_: _Blind.apply(z := x @ w + b) + torch.relu(z),
    "read, then taken": lambda x, w, b, **_: (z := x @ w + b).sum() + _Identity.apply(z),
    "inputs of one another": lambda x, w, r, **_: _double((x @ w) + (x * 2) @ (w * 3)),
    "a residual of an input": lambda x, **_: _double(torch.relu(x @ (w := x.t() @ x)) + x @ w + x * 2),
    "a residual of x": lambda x, w, **_: _double(torch.tanh(x @ (w @ w.t())) + torch.sin(x)),
    "read, then a step taken": lambda x, w, b, **_: (z := x @ w + b).sum() * _double(torch.relu(z)) + z,
    "a step taken, then read": lambda x, w, b, **_: _double(torch.relu(z := x @ w + b)) * z,
    "x and its transpose": lambda x, **_: _Identity.apply(x @ x.t()),
    "a bias of x": lambda x, w, **_: _Returns.apply(x @ w + (x @ w).sum(0)),
    "a step after one in place": lambda x, w, b, **_: torch.relu(_InPlace.apply(x @ w) + b),
    "a step before one in place": lambda x, w, **_: torch.tanh(z := x @ w) + _InPlace.apply(z),
    "changed in place after": lambda x, w, b, **_: _double(z := F.linear(x, w.t(), b)) + z.sin_() + z.add_(1),
    "an operand changed in place after": lambda x, w, r, **_: _double(x @ w + (h := r * 2)) * h.sin_(),
    "in a row": lambda x, w, b, **_: _double(_double(torch.relu(x @ w + b)) @ w.t()) @ w,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_take_deferred_tensors(name):
    """Their results are connected to the arguments' gradients before they look at them."""
    assert_as_plain(FUNCTIONS[name])
    assert_as_plain(FUNCTIONS[name], torch.float64)


def test_gradients_through_a_function_taken_again():
    def compute(x, w, b, **_):
        return _double(torch.tanh(x @ w + b))

    leaves = leaves_of(torch.float64)
    wanted = [leaves["x"], leaves["w"], leaves["b"]]
    found = []
    for block in (autofuse(), contextlib.nullcontext()):
        with block:
            y = compute(**leaves)
        first = torch.autograd.grad(y.sum(), wanted, retain_graph=True)
        again = torch.autograd.grad(y.sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in again), wanted)
        found.append((*first, *again, *second))
    for left, right in zip(*found, strict=True):
        assert_same(left, right)


@pytest.mark.parametrize("function", [_Double, _Identity, _Returns, _Blind, _InPlace])
def test_a_function_keeps_what_plain_code_keeps(function):
    """Until the backward, and no longer; whether the result is held or not."""
    w = torch.randn(8, 5, requires_grad=True)
    for is_read in (False, True):
        activation = torch.randn(6, 8).exp()
        kept = weakref.ref(activation)
        with autofuse():
            z = activation @ w
            y = function.apply(z)
            if is_read:
                y = y + z
        del z, activation
        total = y.sum()
        assert kept() is not None
        total.backward()
        gc.collect()
        assert kept() is None
        del y, total
    gc.collect()
    assert not any(issubclass(type(each), deferred.Node) for each in gc.get_objects())


def test_hooks_on_operands_of_a_taken_tensor():
    """They see a gradient once."""
    calls = []

    def compute(x, w, b, **_):
        h = x.sin()
        h.retain_grad()
        h.register_hook(lambda grad: calls.append(1) or grad * 2)
        w.register_hook(lambda grad: grad * 0.5)
        return _double(torch.relu(h @ w + b)), h

    found = []
    for block in (autofuse(), contextlib.nullcontext()):
        leaves = leaves_of(torch.float64)
        with block:
            y, h = compute(**leaves)
        y.square().sum().backward()
        found.append([h.grad, *(leaves[name].grad for name in ("x", "w", "b"))])
    assert len(calls) == 2
    for left, right in zip(*found, strict=True):
        assert_same(left, right)


def test_gradient_of_a_taken_tensor_is_refused():
    """What the Function got of it goes another way."""
    leaves = leaves_of()
    with autofuse():
        z = torch.relu(leaves["x"] @ leaves["w"])
        y = _double(z)
        for ask in (z.retain_grad, lambda: z.register_hook(print), lambda: torch.autograd.grad(y.sum(), z)):
            with pytest.raises(RuntimeError, match=r"an autograd\.Function took"):
                ask()
        z = torch.relu(leaves["x"] @ leaves["w"])
        z.retain_grad()  # computes it
        _double(z).sum().backward()
    assert_same(z.grad, torch.full((6, 5), 2.0))


def test_a_view_of_a_taken_tensor_is_read_before_that_changes():
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    found = []
    for block in (autofuse(), contextlib.nullcontext()):
        with block:
            z = x @ w
            y = torch.relu(_Identity.apply(z) @ w)
            z.sin_()
        found.append((y, z))
    for left, right in zip(*found, strict=True):
        assert_same(left, right)


def test_gradients_of_gradients_beside_a_second_reader():
    """The graph of the taken value is used by both orders."""
    leaves = leaves_of(torch.float64)
    wanted = [leaves["x"], leaves["w"]]
    found = []
    for block in (autofuse(), contextlib.nullcontext()):
        with block:
            z = leaves["x"] @ leaves["w"]
            y = torch.tanh(z)
            y = _double(y) * (z @ leaves["w"].t() @ leaves["w"]) + y
        first = torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
        (y.sum() + sum(each.square().sum() for each in first)).backward()
        found.append([*first, *(each.grad for each in wanted)])
        for each in wanted:
            each.grad = None
    for left, right in zip(*found, strict=True):
        assert_same(left, right)


def test_hooks_on_what_a_taken_tensor_was_made_of_are_refused():
    leaves = leaves_of()
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        y = torch.tanh(z)
        z.register_hook(lambda grad: grad * 2)  # computes z
        with pytest.raises(RuntimeError, match="has hooks"):
            _double(y)
        y.sum()
        z = leaves["x"] @ leaves["w"]
        y = torch.tanh(z)
        z.sum()
        _double(y)
        with pytest.raises(RuntimeError, match="asks for the gradient"):
            z.retain_grad()


def test_a_taken_dropout_that_is_held():
    leaves = leaves_of()
    with autofuse(dropout=True), torch.no_grad():
        z = F.dropout(leaves["x"] @ leaves["w"], 0.5)
        y = _Identity.apply(z + leaves["r"])
    assert_same(y, (z + leaves["r"]).detach())
    with autofuse(dropout=True):
        z = F.dropout(leaves["x"] @ leaves["w"], 0.5)
        y = z + leaves["r"]
        with pytest.raises(RuntimeError, match="which is held"):
            _Identity.apply(y)
        y.sum()
    assert_same(y, z + leaves["r"])


def test_a_saved_tensor_that_is_changed_later():
    leaves = leaves_of()
    for block in (autofuse(), contextlib.nullcontext()):
        with block:
            z = leaves["x"] @ leaves["w"]
            y = _Scaled.apply(z, leaves["s"])
            z.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_held_by_c_plus_plus():
    leaves = leaves_of()
    z = None

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(z)  # not an argument
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0].sum()

    with autofuse(), torch.no_grad():
        z = torch.relu(leaves["x"] @ leaves["w"])
        with torch.enable_grad():
            y = Saves.apply(leaves["r"])
        value = z.sum()
    assert type(z) is torch.Tensor
    assert_same(torch.autograd.grad(y.sum(), leaves["r"])[0], value.expand(6, 5))


def test_a_second_backward_of_a_taken_tensor_needs_the_graph():
    leaves = leaves_of()
    with autofuse():
        y = _double(torch.relu(leaves["x"] @ leaves["w"])).sum()
    once = torch.autograd.grad(y, leaves["x"], retain_graph=True)
    assert_same(torch.autograd.grad(y, leaves["x"])[0], once[0])
    with pytest.raises(RuntimeError, match=r"second time.*retain_graph=True"):
        torch.autograd.grad(y, leaves["x"])


def test_a_taken_dropout_that_was_not_read_has_no_gradient():
    leaves = leaves_of()
    with autofuse(dropout=True):
        y = _Blind.apply(F.dropout(leaves["x"] @ leaves["w"], 0.5))
    with pytest.raises(RuntimeError, match="did not read it took the result of a deferred dropout"):
        y.sum().backward()
