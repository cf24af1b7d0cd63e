"""isogemm.mm, matmul and linear amid torch's features: fakes, subclasses, transforms, the log, copies."""

import copy
import itertools
import pickle

import pytest
import torch
from cpu_tensors import integers
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import with_layout


def _assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


X, W = torch.ones(3, 4), torch.ones(5, 4)
FUNCTIONS = {
    "mm": lambda a, b: isogemm.mm(a, b),
    "matmul": lambda a, b: isogemm.matmul(a[None], b),
    "linear": lambda a, b: isogemm.linear(a, b.T, a.new_ones(b.shape[1])),
}
TORCHES = {
    "mm": torch.mm,
    "matmul": lambda a, b: torch.matmul(a[None], b),
    "linear": lambda a, b: F.linear(a, b.T, a.new_ones(b.shape[1])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensors_without_memory(name):
    function, expected = FUNCTIONS[name], TORCHES[name](X, W.T)
    meta = function(X.to("meta"), W.T.to("meta"))
    assert (meta.shape, meta.dtype, meta.device.type) == (expected.shape, expected.dtype, "meta")
    mode = FakeTensorMode()
    a, b = mode.from_tensor(X), mode.from_tensor(W).T
    with mode:
        assert function(a, b).shape == expected.shape
    fake = function(a, b)  # a fake tensor outside its mode
    assert (type(fake), fake.shape) == (type(a), expected.shape)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_fake_results_are_like_real_ones(name):
    """Strides too, for whatever the operands' are."""
    a, b = integers(3, 4, dtype=torch.bfloat16), integers(4, 5, dtype=torch.bfloat16)
    for x, y in itertools.product((a, with_layout(a, "transposed")), (b, with_layout(b, "transposed"))):
        real = FUNCTIONS[name](x, y)
        mode = FakeTensorMode()
        with mode:
            fake = FUNCTIONS[name](mode.from_tensor(x), mode.from_tensor(y))
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tensor_subclasses_and_parameters(name):
    assert type(FUNCTIONS[name](torch.nn.Parameter(X), W.T)) is torch.Tensor
    result = FUNCTIONS[name](X.as_subclass(Subclass), W.T)
    assert type(result) is Subclass
    _assert_equal(result.as_subclass(torch.Tensor), TORCHES[name](X, W.T))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_views_that_are_not_yet_negated(name):
    """torch has only noted the negation down: memory holds the opposite."""
    a, b = integers(3, 4), integers(4, 5, seed=1)
    _assert_equal(FUNCTIONS[name](torch._neg_view(a), b), TORCHES[name](-a, b))
    _assert_equal(FUNCTIONS[name](a, torch._neg_view(b)), TORCHES[name](a, -b))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_zeros_without_memory(name):
    zeros = torch._efficientzerotensor((3, 4))
    _assert_equal(FUNCTIONS[name](zeros, W.T), TORCHES[name](torch.zeros(3, 4), W.T))


TRANSFORMS = {
    "grad": lambda f, a, b: torch.func.grad(lambda x: f(x, b).square().sum())(a),
    "vjp": lambda f, a, b: torch.func.vjp(f, a, b)[1](torch.ones_like(f(a, b))),
    "jvp": lambda f, a, b: torch.func.jvp(f, (a, b), (2 * a, 3 * b)),
    "jacrev": lambda f, a, b: torch.func.jacrev(f)(a, b),
    "vmap": lambda f, a, b: torch.vmap(f)(torch.stack((a, 2 * a)), torch.stack((b, 3 * b))),
    "vmap one": lambda f, a, b: torch.vmap(f, in_dims=(0, None))(torch.stack((a, 2 * a)), b),
    "hessian": lambda f, a, b: torch.func.hessian(lambda x: f(x, b).square().sum())(a),
    "forward mode": lambda f, a, b: _tangent(f, a, b),
}


def _tangent(function, a, b):
    with forward_ad.dual_level():
        dual = function(forward_ad.make_dual(a, torch.ones_like(a)), b)
        tangent = forward_ad.unpack_dual(dual).tangent
    assert tangent is not None, "the tangent was lost"
    return tangent


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_function_transforms_are_refused(transform, name, dtype):
    """An error that says so, never a number of torch's own without the contract."""
    a, b = integers(3, 4, dtype=dtype), integers(4, 5, seed=1, dtype=dtype)
    TRANSFORMS[transform](TORCHES[name], a, b)
    with pytest.raises(RuntimeError, match=r"has no rule for forward-mode AD and torch\.func transforms"):
        TRANSFORMS[transform](FUNCTIONS[name], a, b)


def test_dispatch_log():
    a, b = integers(3, 4).requires_grad_(), integers(4, 5).requires_grad_()
    with isogemm.dispatch_log() as log:
        isogemm.matmul(a, b)
        isogemm.mm(a.bfloat16(), b.bfloat16())
        isogemm.linear(a.double(), b.double().T)
    assert [(entry.op, entry.path) for entry in log] == [("matmul", "cpu"), ("matmul", "cpu"), ("matmul", "torch")]
    assert [entry.problem.split()[-1] for entry in log] == ["float32", "bfloat16", "float64"]
    assert all(str(entry).startswith("isogemm.matmul ") for entry in log)


def test_dispatch_log_of_the_backward():
    x, weight = integers(2, 3, 4).requires_grad_(), integers(5, 4).requires_grad_()
    bias = integers(5).requires_grad_()
    result = isogemm.linear(x, weight, bias)
    with isogemm.dispatch_log() as log:
        result.sum().backward()
    assert sorted(entry.op for entry in log) == ["bias_grad", "matmul", "weight_grad"]
    assert {entry.path for entry in log} == {"cpu"}


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_that_nobody_needs_cost_nothing(needed):
    inputs = (integers(3, 4), integers(5, 4), integers(5))
    for tensor, need in zip(inputs, needed, strict=True):
        tensor.requires_grad_(need)
    result = isogemm.linear(*inputs)
    with isogemm.dispatch_log() as log:
        result.sum().backward()
    assert [entry.op for entry in log] == list(itertools.compress(("matmul", "weight_grad", "bias_grad"), needed))
    assert [tensor.grad is not None for tensor in inputs] == list(needed)


def test_no_grad_keeps_no_graph():
    a, b = integers(3, 4).requires_grad_(), integers(4, 5).requires_grad_()
    with torch.no_grad():
        assert not isogemm.matmul(a, b).requires_grad
    with torch.inference_mode():
        assert isogemm.linear(a, b.T).is_inference()
    assert not isogemm.matmul(a.detach(), b.detach()).requires_grad


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(integers(5, 4))
        self.bias = torch.nn.Parameter(integers(5))

    def forward(self, x):
        return isogemm.linear(x, self.weight, self.bias)


def test_models_are_copied_and_stored():
    model = Model()
    x = integers(3, 4)
    model(x).sum().backward()
    model.weight.main_grad = torch.ones(5, 4)
    for other in (copy.deepcopy(model), _restored(model)):
        _assert_equal(other(x), model(x))


def _restored(model):
    other = Model()
    other.load_state_dict(pickle.loads(pickle.dumps(model.state_dict())))
    return other


def test_deterministic_algorithms():
    inputs = [integers(3, 4).requires_grad_(), integers(5, 4).requires_grad_(), integers(5).requires_grad_()]
    expected = torch.autograd.grad(isogemm.linear(*inputs).square().sum(), inputs)
    torch.use_deterministic_algorithms(True)
    try:
        actual = torch.autograd.grad(isogemm.linear(*inputs).square().sum(), inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    for got, same in zip(actual, expected, strict=True):
        assert_bitwise_equal(got, same)
