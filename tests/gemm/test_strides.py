"""Strides of results and of gradients: contiguous, as torch's own, and what the fakes of the operators say."""

import functools

import pytest
import torch
import triton
from dispatching import ThroughOperators
from layouts import variations
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import isogemm
from isogemm.epilogues import register, spec
from isogemm.gemm.api import mlp
from isogemm.verify.inputs import make_data

B, T, K, N = 2, 3, 8, 16


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device="cpu")


@triton.jit
def _declared(acc, col, row, first, second):
    return acc * first + second


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setattr(spec, "REGISTERED", {})
    register("wave", _declared, lambda acc, col, row, first, second: second + torch.sin(acc) * first)


def _wave(x, weight, first, second):
    return isogemm.linear(x, weight, epilogue="wave", aux=(first, second))


SIZES = {
    "x": (B, T, K), "weight": (N, K), "bias": (N,), "weight_up": (N, K), "bias_up": (N,), "residual": (B, T, N),
    "c": (B, T, N), "row_scale": (B, T), "col_scale": (N,), "weight_down": (K, N), "first": (T, N),
    "second": (B, T, N),
}  # fmt: skip
LAYER = ("x", "weight", "bias")
GATE = ("x", "weight", "bias", "weight_up", "bias_up")


def _of(function, *names, **options):
    return functools.partial(function, **options), {name: SIZES[name] for name in names}


CASES = {
    "mm": (isogemm.mm, {"a": (T, K), "b": (K, N)}),
    "matmul": (isogemm.matmul, {"a": (B, T, K), "b": (K, N)}),
    "matmul batch": (isogemm.matmul, {"a": (B, 1, T, K), "b": (4, K, N)}),
    "matmul shared a": (isogemm.matmul, {"a": (T, K), "b": (B, K, N)}),
    "matmul vector": (isogemm.matmul, {"a": (K,), "b": (B, K, N)}),
    "linear": _of(isogemm.linear, *LAYER),
    "linear vector": (isogemm.linear, {"x": (K,), "weight": (N, K)}),
    "residual": _of(isogemm.linear, *LAYER, "residual"),
    "scales": _of(isogemm.linear, *LAYER, "c", "row_scale", "col_scale", "residual", beta=2.0, alpha=0.5),
    **{name: _of(isogemm.linear, *LAYER, activation=name) for name in ("relu", "gelu", "leaky_relu")},
    "tanh": _of(isogemm.linear, *LAYER, activation="tanh"),
    "tanh + residual": _of(isogemm.linear, *LAYER, "residual", activation="tanh"),
    "gelu dropout": _of(isogemm.linear, *LAYER, "residual", activation="gelu", dropout_p=0.3),
    "dropout": _of(isogemm.linear, *LAYER, dropout_p=0.3),
    "gelu eager": _of(isogemm.linear, *LAYER, "residual", activation="gelu", rounding="eager"),
    "swiglu": _of(isogemm.linear, *GATE, "residual", activation="swiglu"),
    "matmul_fused": (
        functools.partial(isogemm.matmul_fused, activation="silu", bias_dim=-2),
        {"a": (T, K), "b": (K, N), "bias": (T,), "residual": (T, N)},
    ),
    "user": (_wave, {name: SIZES[name] for name in ("x", "weight", "first", "second")}),
    "user matrix": (_wave, {"x": (T, K), "weight": (N, K), "first": (N,), "second": (T, N)}),
    "mlp": _of(mlp, *LAYER, "weight_down"),
    "mlp swiglu": _of(mlp, *GATE, "weight_down", activation="swiglu", hidden_dropout_p=0.3, dropout_p=0.3),
}


def _strides(function, tensors):
    """The look of the result and of the gradients of all tensors but `grad`, by that."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if name != "grad"}
    result = function(**leaves)
    gradients = torch.autograd.grad(result, leaves.values(), tensors["grad"])
    named = {"result": result, **dict(zip(leaves, gradients, strict=True))}
    return {name: (x.dtype, x.shape, x.stride()) for name, x in named.items()}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in CASES), ("gelu", torch.float16), ("swiglu", torch.float16),
    ("mm", torch.float64), ("matmul shared a", torch.float64), ("residual", torch.float64), ("user", torch.bfloat16)],
)  # fmt: skip
def test_strides_are_those_of_the_fakes(name, dtype):
    """With any strides of operands and incoming gradient, eager and through the operators; the result is contiguous."""
    function, shapes = CASES[name]
    tensors = {each: _normal(*shape, seed=seed, dtype=dtype) for seed, (each, shape) in enumerate(shapes.items())}
    tensors["grad"] = _normal(*function(**tensors).shape, seed=9, dtype=dtype)
    for what, varied in variations(tensors):
        real = _strides(function, varied)
        assert real["result"][2] == torch.empty(real["result"][1]).stride(), what
        with ThroughOperators():
            assert _strides(function, varied) == real, f"{what}: through the operators"
        with FakeTensorMode() as mode:
            fakes = {each: mode.from_tensor(x) for each, x in varied.items()}
            assert _strides(function, fakes) == real, f"{what}: fake"


def _trained(function, x, parameters):
    out = function(x)
    return out, torch.autograd.grad(out.square().sum(), parameters)


def _assert_trains_as_eager(function, x, parameters):
    torch._dynamo.reset()
    out, gradients = _trained(torch.compile(function), x, parameters)
    expected, right = _trained(function, x, parameters)
    assert out.stride() == expected.stride()
    torch.testing.assert_close((out, gradients), (expected, right))


def test_a_compiled_layer_whose_result_is_transposed():
    """Inductor asserts the strides of what an operator gives: here of dz, whose gradient comes transposed."""
    layer = isogemm.nn.Linear(K, N, activation="gelu")
    after = _normal(T, T, seed=1)
    _assert_trains_as_eager(lambda x: layer(x).transpose(1, 2) @ after, _normal(B, T, K), list(layer.parameters()))


def test_a_compiled_layer_with_a_transposed_residual():
    weight, residual = _normal(N, K).requires_grad_(), _normal(N, T, seed=1).requires_grad_()

    def layer(x):
        return isogemm.linear(x, weight, activation="relu", residual=residual.t()).view(-1)

    _assert_trains_as_eager(layer, _normal(T, K), [weight, residual])


def _plain(x, w, r):
    return (F.relu(x @ w) + r.t()).view(-1)


def _transposed(x, w, r):
    return (r.t() + F.relu(x @ w)).t().view(-1)  # a sum has the layout of what stands first


def _operands():
    return _normal(T, K), _normal(K, N, seed=1).requires_grad_(), _normal(N, T, seed=2).requires_grad_()


def test_autofuse_with_a_transposed_addend():
    """The result can be seen as flat, as torch's can."""
    x, *parameters = _operands()
    with isogemm.autofuse() as report:
        found = _trained(lambda x: _plain(x, *parameters), x, parameters)
    assert report.fused
    torch.testing.assert_close(found, _trained(lambda x: _plain(x, *parameters), x, parameters))


@pytest.mark.parametrize(("function", "fused"), [(_plain, True), (_transposed, False)])
def test_compile_fusion_with_a_transposed_addend(function, fused):
    """Fused where the result has torch's layout: what follows was traced with that."""
    x, *parameters = _operands()
    with isogemm.fusion.compile_fusion() as report:
        _assert_trains_as_eager(lambda x: function(x, *parameters), x, parameters)
    assert bool(report.left) is not fused
    assert fused or "another layout" in str(report)
