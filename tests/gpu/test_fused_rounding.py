"""The rounding of fused products on a GPU: once or as in eager mode; special values and every 16-bit number."""

import functools

import pytest
import torch
from fused_forms import fused_form, gated_form
from fused_gpu_cases import COMBINATIONS, EVERYTHING, NUMBERS, SHORT, fused_operands, normal
from nonfinite import assert_same_nonfinite

import isogemm
from isogemm.verify.activations import ACTIVATION_FORMS as ACTIVATIONS
from isogemm.verify.activations import GATE_FORMS as GATED
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

DEVICE = "cuda"


HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("number", SHORT)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_inf(activation, number):
    """As in torch's fp32: relu of a NaN is one, an infinity goes where the activation takes it."""
    dtype, precision = NUMBERS[number]
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -1.0, 60000.0, -60000.0], device=DEVICE)
    special = special.to(dtype)
    a, b = special[:, None], torch.ones(1, 3, dtype=dtype, device=DEVICE)
    for operands in ({}, {"bias": special[3:6], "residual": special[:3].repeat(9, 1), "row_scale": special}):
        result = isogemm.matmul_fused(a, b, activation=activation, precision=precision, **operands)
        single = {name: each.float() for name, each in operands.items()}
        expected = fused_form(a.float(), b.float(), activation=activation, **single)
        assert_same_nonfinite(result, expected, str(tuple(operands)))


@pytest.mark.parametrize("activation", GATED)
def test_nan_and_inf_of_gates(activation):
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.0, -1.0], dtype=torch.bfloat16, device=DEVICE)
    x = torch.ones(2, 1, dtype=torch.bfloat16, device=DEVICE)
    weight, up = special.repeat_interleave(6)[:, None], special.repeat(6)[:, None]
    result = isogemm.linear(x, weight, weight_up=up, activation=activation)
    assert_same_nonfinite(result, gated_form(x.float(), weight.float(), up.float(), activation))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "silu", "tanh", "sigmoid"])
def test_large_numbers_do_not_overflow_inside(activation):
    for large, dtype in ((60000.0, torch.float16), (1e30, torch.bfloat16), (1e30, torch.float32)):
        a = torch.tensor([[large], [-large], [300.0], [-300.0]], dtype=dtype, device=DEVICE)
        result = isogemm.matmul_fused(a, torch.ones(1, 1, dtype=dtype, device=DEVICE), activation=activation)
        expected = ACTIVATIONS[activation](a.double()).to(dtype)
        assert_bitwise_equal(result + 0, expected + 0, activation)  # -0 is 0 here


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_every_number(activation):
    """For every bf16 number within an ulp, nearly always the nearest; far out, where 1 + erf cancels, as fp32 may."""
    a = _every_pattern(torch.bfloat16)
    a = a[a.abs() <= 1e4][:, None]
    result = isogemm.matmul_fused(a, torch.ones(1, 8, dtype=torch.bfloat16, device=DEVICE), activation=activation)
    exact, size = ACTIVATIONS[activation](a.double()).expand(-1, 8), a.double().abs()
    info = torch.finfo(torch.bfloat16)
    error = (result.double() - exact).abs()
    assert bool((error <= info.eps * exact.abs() + 2**-20 * size + info.smallest_normal).all())
    plain = (exact.abs() >= 2**-8 * size) & (exact.abs() >= info.smallest_normal)
    assert float((result == exact.to(torch.bfloat16))[plain].float().mean()) > 0.99


# rounding="eager"


def _every_pattern(dtype):
    """[65536, 1]: each number that 16 bits can be."""
    return torch.arange(-(2**15), 2**15, device=DEVICE).to(torch.int16).view(dtype)[:, None]


def _assert_same_but_for_the_kind_of_nan(actual, expected, what=""):
    assert torch.equal(actual.isnan(), expected.isnan()), what
    zero = torch.zeros((), dtype=actual.dtype, device=actual.device)
    assert_bitwise_equal(torch.where(actual.isnan(), zero, actual), torch.where(expected.isnan(), zero, expected), what)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_eager_rounding_of_every_number(activation, dtype):
    a, b = _every_pattern(dtype), torch.ones(1, 16, dtype=dtype, device=DEVICE)
    result = isogemm.matmul_fused(a, b, activation=activation, rounding="eager")
    _assert_same_but_for_the_kind_of_nan(result, ACTIVATIONS[activation](isogemm.mm(a, b)), activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_eager_rounding_of_float32(activation):
    """For numbers over the whole range, exponents and all."""
    a = torch.cat([_every_pattern(torch.bfloat16).float(), make_data("wide", (65536, 1), seed=3, device=DEVICE)])
    a = torch.cat([a, normal(65536, 1, dtype=torch.float32)])
    b = torch.ones(1, 16, device=DEVICE)
    result = isogemm.matmul_fused(a, b, activation=activation, rounding="eager", precision="ieee")
    expected = ACTIVATIONS[activation](isogemm.mm(a, b, precision="ieee"))
    _assert_same_but_for_the_kind_of_nan(result, expected, activation)


EAGER = [  # tensors, numbers
    (("bias",), {}),
    (("column bias", "residual"), {}),
    (EVERYTHING, {"alpha": 0.3, "beta": -1.7}),
    (("alpha", "beta", "c"), {}),
]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("case", range(len(EAGER)))
def test_eager_rounding(case, number):
    """Bit-equal to isogemm.mm and torch's own operations, for a row and for many."""
    (dtype, precision), (names, numbers) = NUMBERS[number], EAGER[case]
    product = functools.partial(isogemm.mm, precision=precision)
    for m in (1, 130):
        operands = fused_operands(names, m, 256, 200, dtype)
        result = isogemm.matmul_fused(**operands, **numbers, rounding="eager", precision=precision)
        assert_bitwise_equal(result, fused_form(**operands, **numbers, product=product), f"{m} rows")


@pytest.mark.parametrize("number", SHORT)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_eager_rounding_with_an_activation(activation, number):
    dtype, precision = NUMBERS[number]
    operands = fused_operands(("bias", "residual"), 130, 256, 200, dtype)
    result = isogemm.matmul_fused(**operands, activation=activation, rounding="eager", precision=precision)
    product = functools.partial(isogemm.mm, precision=precision)
    assert_bitwise_equal(result, fused_form(**operands, activation=activation, product=product))


@pytest.mark.parametrize("number", SHORT)
@pytest.mark.parametrize("activation", GATED)
def test_eager_rounding_of_gates(activation, number):
    dtype, precision = NUMBERS[number]
    shapes = (130, 256), (200, 256), (200, 256)
    x, weight, up = (normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    operands = {"bias": normal(200, seed=3, dtype=dtype), "bias_up": normal(200, seed=4, dtype=dtype)}
    operands["residual"] = normal(130, 200, seed=5, dtype=dtype)
    linear = functools.partial(isogemm.linear, precision=precision)
    result = linear(x, weight, weight_up=up, activation=activation, rounding="eager", **operands)
    assert_bitwise_equal(result, gated_form(x, weight, up, activation, linear=linear, **operands))


def test_rounded_once():
    """The 16-bit result is the fp32 one, rounded; a K up to which both are one walk, and nothing has a shorter form."""
    for tensors, options in COMBINATIONS.values():
        if options.get("activation") not in (None, "leaky_relu"):
            continue
        operands = fused_operands(tensors, 130, 1024, 200, torch.bfloat16)
        wide = isogemm.matmul_fused(**operands, **options, out_dtype=torch.float32)
        assert wide.dtype == torch.float32
        assert_bitwise_equal(isogemm.matmul_fused(**operands, **options), wide.bfloat16())
