"""isogemm's two-layer MLP on the CPU: values, and that it is two calls of `linear`."""

import pytest
import torch
from cpu_tensors import CONTRACT, DTYPES, normal
from fused_forms import doubled
from torch.nn import functional as F

import isogemm
from isogemm.gemm.api import mlp
from isogemm.verify.activations import ACTIVATION_FORMS as ACTIVATIONS
from isogemm.verify.activations import GATE_FORMS as GATED
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch


def _seeded(function, *args, seed=0, **keywords):
    torch.manual_seed(seed)
    return function(*args, **keywords)


# Two layers.


def _mlp_operands(dtype, gated, m=33, k=20, h=47, n=15, biases=True):
    shapes = {"x": (m, k), "weight": (h, k), "weight_down": (n, h)}
    shapes |= {"bias": (h,), "bias_down": (n,)} if biases else {}
    shapes |= {"weight_up": (h, k)} if gated else {}
    shapes |= {"bias_up": (h,)} if gated and biases else {}
    return {name: normal(*shape, seed=seed, dtype=dtype) / 4 for seed, (name, shape) in enumerate(shapes.items())}


def _plain_linear(x, weight, bias):
    """In float64, which is its own reference, as isogemm has it: torch's product, then the sum."""
    if x.dtype != torch.float64 or bias is None:
        return F.linear(x, weight, bias)
    return F.linear(x, weight) + bias


def _plain_mlp(
    x, weight, weight_down, *, bias=None, bias_down=None, weight_up=None, bias_up=None, activation="gelu", residual=None
):  # fmt: skip
    hidden = _plain_linear(x, weight, bias)
    if weight_up is None:
        hidden = ACTIVATIONS[activation](hidden)
    else:
        hidden = GATED[activation](hidden) * _plain_linear(x, weight_up, bias_up)
    result = _plain_linear(hidden, weight_down, bias_down)
    return result if residual is None else residual + result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
def test_mlp_no_worse_than_torch(activation, dtype):
    for biases in (True, False):
        operands = _mlp_operands(dtype, activation in GATED, biases=biases)
        residual = normal(33, 15, seed=20, dtype=dtype)
        for more in ({}, {"residual": residual}):
            result = mlp(**operands, **more, activation=activation)
            theirs = _plain_mlp(**operands, **more, activation=activation)
            reference = _plain_mlp(**doubled(operands), **doubled(more), activation=activation)
            assert_no_worse_than_torch(result, theirs, reference)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
def test_mlp_is_two_calls_of_linear(activation, dtype):
    operands = _mlp_operands(dtype, activation in GATED)
    residual = normal(33, 15, seed=20, dtype=dtype)
    second = {"weight": operands["weight_down"], "bias": operands["bias_down"], "residual": residual}
    first = {name: value for name, value in operands.items() if not name.endswith("down")}
    for inside, last in ((0.0, 0.0), (0.3, 0.0), (0.0, 0.3), (0.3, 0.6)):
        torch.manual_seed(1)
        hidden = isogemm.linear(**first, activation=activation, dropout_p=inside)
        expected = isogemm.linear(hidden, **second, dropout_p=last)
        keywords = {"activation": activation, "hidden_dropout_p": inside, "dropout_p": last, "residual": residual}
        result = _seeded(mlp, **operands, **keywords, seed=1)
        if not (inside and last):  # the order in which two seeds are drawn is not promised
            assert_bitwise_equal(result, expected)
        needing = {name: value.clone().requires_grad_() for name, value in operands.items()}
        assert_bitwise_equal(_seeded(mlp, **needing, **keywords, seed=1), result, "where gradients are needed")
    wide = None if dtype == torch.float32 else torch.float32
    expected = isogemm.linear(isogemm.linear(**first, activation=activation), **second, out_dtype=wide)
    assert_bitwise_equal(mlp(**operands, activation=activation, residual=residual, out_dtype=wide), expected)


@pytest.mark.parametrize("shape", [(20,), (2, 3, 20), (0, 20), (2, 0, 20)], ids=str)
def test_mlp_of_any_leading_sizes(shape):
    operands = _mlp_operands(torch.float32, True) | {"x": normal(*shape)}
    residual = normal(*shape[:-1], 15, seed=1)
    result = mlp(**operands, activation="swiglu", residual=residual)
    torch.testing.assert_close(result, _plain_mlp(**operands, activation="swiglu", residual=residual))
