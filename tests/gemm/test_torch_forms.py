"""float16: pre-activations that leave its range, in layers whose results do not, have right gradients."""

import functools

import float16_range
import pytest
import torch
import triton

import isogemm
from isogemm.epilogues import ACTIVATIONS, register, spec
from isogemm.gemm.api import mlp
from isogemm.gemm.torch_forms import saved_dtype

GATED = [name for name, entry in ACTIVATIONS.items() if entry.gate]


def _layer(activation, **options):
    def call(x, weight, weight_up=None):
        return isogemm.linear(x, weight, weight_up=weight_up, activation=activation, **options)

    return call


@pytest.mark.parametrize("name", [name for name, entry in ACTIVATIONS.items() if entry.levels_off])
def test_derivatives_that_level_off(name):
    """Beyond what float16 holds, up to what a sum of its products does."""
    for sign in (-1, 1):
        ends = sign * torch.tensor([65504, 65520, 1e6, 1e9, 2e12], dtype=torch.float64)
        assert len(ACTIVATIONS[name].derivative(ends).unique()) == 1


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_where_the_result_is_finite(activation, residual):
    x, weight, weight_up = float16_range.operands("cpu")
    inputs = [x, weight, weight_up] if activation in GATED else [x, weight]
    options = {"residual": torch.zeros(x.shape[0], weight.shape[0])} if residual else {}
    grad = torch.full((x.shape[0], weight.shape[0]), 1e-4)
    form = float16_range.torch_form(activation)
    result, found = float16_range.gradients(_layer(activation, out_dtype=torch.float32, **options), inputs, grad)
    assert result.isfinite().all()
    float16_range.assert_gradients_right(found, form, inputs, grad, activation)
    # And in float16, where the result is: of the others there is no gradient.
    result, _ = float16_range.gradients(_layer(activation, **options), inputs, grad)
    grad = torch.where(result.isfinite(), grad, 0.0).half()
    result, found = float16_range.gradients(_layer(activation, **options), inputs, grad)
    float16_range.assert_gradients_right(found, form, inputs, grad, f"{activation} in float16")


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "relu2", "swiglu", "reglu"])
def test_mlp(activation, compiled):
    """With hidden values in range."""
    x, weight, weight_up = float16_range.operands("cpu")
    weight_up[:, 0], weight_up[:, 1:] = 0, weight_up[:, 1:] / 8
    weight = weight if activation in GATED else torch.where(weight.abs() > 1, -weight.abs(), weight)
    x = x if activation in GATED else torch.where(x.abs() > 300, x.abs(), x)
    weight_down = torch.randn(4, weight.shape[0], generator=torch.Generator().manual_seed(1)).div(64).half()
    inputs = [x, weight, weight_up] if activation in GATED else [x, weight]

    def ours(x, weight, weight_up=None):
        return mlp(x, weight, weight_down, weight_up=weight_up, activation=activation, out_dtype=torch.float32)

    form = float16_range.torch_form(activation)
    grad = torch.full((x.shape[0], 4), 1e-3)
    if compiled:
        torch._dynamo.reset()
        ours = torch.compile(ours, backend="aot_eager", fullgraph=True)
    result, found = float16_range.gradients(ours, inputs, grad)
    assert result.isfinite().all()
    float16_range.assert_gradients_right(found, form, inputs, grad @ weight_down.float(), activation)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_second_derivatives_of_mlp(activation):
    """Through a pre-activation in float32 as through one in float16."""
    shapes = ((6, 8), (10, 8), (4, 10), (10, 8))
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=draw).half().div(2) for size in shapes]

    def penalty(function, dtype):
        x, weight, down, up = (each.to(dtype).requires_grad_() for each in tensors)
        result = function(x, weight, down, weight_up=up if activation in GATED else None, activation=activation)
        (of_x,) = torch.autograd.grad(result.float().sum(), x, create_graph=True)
        return torch.autograd.grad(of_x.to(torch.float64).square().sum(), [x, weight, down])

    for got, right in zip(penalty(mlp, torch.float16), penalty(mlp, torch.float64), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=2**-6, atol=2**-6 * right.abs().max().item())


@triton.jit
def _declared(acc, col, row):
    return acc


def test_a_registered_epilogue(monkeypatch):
    """Whose derivative is not known: kept in float32."""
    monkeypatch.setattr(spec, "REGISTERED", {})
    register("square", _declared, lambda acc, col, row: acc * acc * 0.5)
    x, weight, _ = float16_range.operands("cpu")
    grad = torch.full((x.shape[0], weight.shape[0]), 1e-4)
    ours = functools.partial(isogemm.linear, epilogue="square", out_dtype=torch.float32)
    result, found = float16_range.gradients(ours, [x, weight], grad)
    assert result.isfinite().all()
    float16_range.assert_gradients_right(found, lambda x, weight: (x @ weight.T).square() * 0.5, [x, weight], grad)


def test_where_it_is_kept_in_float32():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert all(saved_dtype(name, dtype) is dtype for name in ("", *ACTIVATIONS))
    wide = {name for name in ACTIVATIONS if saved_dtype(name, torch.float16) is torch.float32}
    assert wide == {"relu2", *GATED}
    assert saved_dtype("", torch.float16) is torch.float32


def test_what_is_not_finite_stays_so():
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0]]).half().T.requires_grad_()
    weight = torch.ones(3, 1).half()
    for activation in ("gelu", "silu"):
        (found,) = torch.autograd.grad(isogemm.linear(x, weight, activation=activation).sum(), x)
        assert found[0].isnan()
        assert found[3].isfinite()
