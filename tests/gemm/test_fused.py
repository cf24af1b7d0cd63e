"""Products with an epilogue on the CPU: values, order of operations, rounding, strides, invariance, dropout, errors."""

import functools
import itertools
import math

import hypothesis
import pytest
import strategies
import torch
import triton
from fused_forms import doubled, fused_form, gated_form
from hypothesis import strategies as st
from tensor_cases import ODD_SIZES
from torch.nn import functional as F

import isogemm
from isogemm.epilogues import random, register, spec
from isogemm.gemm.api import mlp
from isogemm.gemm.fused import new_seed
from isogemm.verify.activations import ACTIVATION_FORMS as ACTIVATIONS
from isogemm.verify.activations import GATE_FORMS as GATED
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch, assert_same_nonfinite
from isogemm.verify.inputs import make_data, with_layout
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cpu"
CONTRACT = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*CONTRACT, torch.float64]
HALVES = [torch.bfloat16, torch.float16]


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device=DEVICE)


def _integers(*shape, seed=0, dtype=torch.float32):
    """Small whole numbers: what is made of them below is exact in every dtype and order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype).to(DEVICE)


def _double(value):
    return value.double() if isinstance(value, torch.Tensor) else value


def _operands(names, m, k, n, dtype, *, batch=(), extra=None, make=_normal):
    """a [..., M, K], b [K, N] and those named; scales, c and residual of dtype `extra` where it is given."""
    rows, extra = (*batch, m), extra or dtype
    shapes = {"a": ((*rows, k), dtype), "b": ((k, n), dtype), "bias": ((n,), dtype), "column bias": (rows, dtype)}
    shapes |= {"c": ((*rows, n), extra), "residual": ((*rows, n), extra), "row_scale": (rows, extra)}
    shapes |= {"col_scale": ((n,), extra), "alpha": ((), extra), "beta": ((), extra)}
    made = {}
    for seed, (name, (shape, kind)) in enumerate(shapes.items()):
        if name in ("a", "b", *names):
            made[name] = make(*shape, seed=seed, dtype=kind)
    if "column bias" in made:
        made |= {"bias": made.pop("column bias"), "bias_dim": -2}
    return made


def _assert_no_worse(result, operands, **options):
    theirs = fused_form(**operands, **options).to(result.dtype)
    reference = fused_form(**doubled(operands), **options)
    assert_no_worse_than_torch(result, theirs, reference)


COMBINATIONS = {  # name: (tensors, options)
    "alone": ((), {}),
    "bias": (("bias",), {}),
    "column bias": (("column bias",), {}),
    "residual": (("residual",), {}),
    "alpha": ((), {"alpha": 0.7}),
    "alpha tensor": (("alpha",), {}),
    "c": (("c",), {"beta": -1.3}),
    "c, tensors": (("alpha", "beta", "c"), {}),
    "scales": (("row_scale", "col_scale"), {}),
    "bias, relu": (("bias",), {"activation": "relu"}),
    "column bias, gelu": (("column bias",), {"activation": "gelu"}),
    "bias, silu, residual": (("bias", "residual"), {"activation": "silu"}),
    "all, gelu_tanh": (
        ("bias", "c", "residual", "row_scale", "col_scale"), {"alpha": 0.5, "beta": 2.0, "activation": "gelu_tanh"},
    ),
    "all, leaky_relu": (
        ("column bias", "c", "residual", "row_scale", "col_scale", "alpha", "beta"),
        {"activation": "leaky_relu", "activation_args": {"negative_slope": 0.2}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_no_worse_than_torch(activation, dtype):
    operands = _operands(("bias",), 33, 100, 47, dtype)
    with poisoned_allocations():
        result = isogemm.matmul_fused(**operands, activation=activation)
    assert result.dtype == dtype
    assert result.is_contiguous()
    _assert_no_worse(result, operands, activation=activation)
    as_linear = isogemm.linear(operands["a"], operands["b"].T, operands["bias"], activation=activation)
    assert_bitwise_equal(as_linear, result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_combinations_no_worse_than_torch(name, dtype):
    tensors, options = COMBINATIONS[name]
    operands = _operands(tensors, 33, 100, 47, dtype)
    with poisoned_allocations():
        result = isogemm.matmul_fused(**operands, **options)
    assert result.dtype == dtype
    _assert_no_worse(result, operands, **options)


# Not M = 1 against torch: there it sums in several lanes, more exactly than one walk can (see the invariance below).
ODD = [(m, k, n) for k in ODD_SIZES for m, n in ((17, 127), (65, 63), (100, 3))]


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("sizes", ODD, ids=lambda sizes: "x".join(map(str, sizes)))
def test_odd_sizes(sizes, dtype):
    tensors, options = COMBINATIONS["all, gelu_tanh"]
    operands = _operands(tensors, *sizes, dtype)
    with poisoned_allocations():
        result = isogemm.matmul_fused(**operands, **options)
    _assert_no_worse(result, operands, **options)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (2, 1, 3, 7)], ids=str)
def test_leading_sizes(shape, dtype):
    """Exactly, of whole numbers; every operand of x's own leading sizes, a vector's being none."""
    x, weight = _integers(*shape, dtype=dtype), _integers(5, 7, seed=1, dtype=dtype)
    rows = shape[:-1]
    operands = {"c": _integers(*rows, 5, seed=2), "residual": _integers(*rows, 5, seed=3)}
    operands |= {"row_scale": _integers(*rows, seed=4), "col_scale": _integers(5, seed=5)}
    operands = {name: tensor.to(dtype) for name, tensor in operands.items()}
    result = isogemm.linear(x, weight, activation="relu", beta=2.0, **operands)
    expected = fused_form(x.double(), weight.double().T, activation="relu", beta=2.0, **doubled(operands))
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=0)
    up = _integers(5, 7, seed=6, dtype=dtype)
    gated = isogemm.linear(x, weight, weight_up=up, activation="reglu", residual=operands["residual"])
    expected = gated_form(x.double(), weight.double(), up.double(), "reglu", residual=operands["residual"].double())
    torch.testing.assert_close(gated.double(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_order_of_operations(dtype):
    """residual + act(alpha * row_scale * col_scale * (a @ b) + beta * c + bias), exactly: all are whole numbers."""
    names = ("bias", "c", "residual", "row_scale", "col_scale")
    operands = _operands(names, 9, 4, 11, dtype, make=_integers)
    for bias_dim in (-1, -2):
        if bias_dim == -2:
            operands |= {"bias": _integers(9, seed=20, dtype=dtype), "bias_dim": -2}
        result = isogemm.matmul_fused(**operands, alpha=3.0, beta=-2.0, activation="relu2")
        expected = fused_form(**doubled(operands), alpha=3.0, beta=-2.0, activation="relu2")
        limit = torch.finfo(dtype).eps * expected.abs()  # a square may have more than 8 bits
        assert bool(((result.double() - expected).abs() <= limit).all())
        linear = isogemm.matmul_fused(**operands, alpha=3.0, beta=-2.0, activation="leaky_relu",
                                      activation_args={"negative_slope": 0.5})  # fmt: skip
        slope = {"activation": "leaky_relu", "activation_args": {"negative_slope": 0.5}}
        expected = fused_form(**doubled(operands), alpha=3.0, beta=-2.0, **slope)
        torch.testing.assert_close(linear.double(), expected.to(dtype).double(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_numbers_or_tensors(dtype):
    """alpha and beta mean the same either way, and so does 1 or 0 as a number and nothing at all."""
    operands = _operands(("bias", "c"), 17, 33, 9, dtype)
    numbers = isogemm.matmul_fused(**operands, alpha=0.75, beta=-1.5, activation="tanh")
    for kind in {dtype, torch.float32}:
        alpha, beta = torch.tensor(0.75, dtype=kind), torch.tensor(-1.5, dtype=kind)
        assert_bitwise_equal(isogemm.matmul_fused(**operands, alpha=alpha, beta=beta, activation="tanh"), numbers)
        assert_bitwise_equal(isogemm.matmul_fused(**operands, alpha=alpha, beta=-1.5, activation="tanh"), numbers)
        assert_bitwise_equal(isogemm.matmul_fused(**operands, alpha=0.75, beta=beta, activation="tanh"), numbers)
    assert_bitwise_equal(isogemm.matmul_fused(**operands, alpha=3, beta=-2), isogemm.matmul_fused(
        **operands, alpha=3.0, beta=-2.0))  # fmt: skip
    without = {name: value for name, value in operands.items() if name != "c"}
    plain = isogemm.matmul_fused(**without)
    assert_bitwise_equal(isogemm.matmul_fused(**without, alpha=1.0, beta=0.0), plain)
    assert_bitwise_equal(isogemm.linear(operands["a"], operands["b"].T, operands["bias"]), plain)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_c_is_not_read_with_a_beta_of_0(dtype):
    operands = _operands(("bias",), 17, 33, 9, dtype)
    expected = isogemm.matmul_fused(**operands)
    c = torch.full((17, 9), torch.nan, dtype=dtype)
    assert_bitwise_equal(isogemm.matmul_fused(**operands, c=c, beta=0), expected)
    assert_bitwise_equal(isogemm.linear(operands["a"], operands["b"].T, operands["bias"], c=c, beta=0.0), expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_float32_operands_of_16_bit_products(out_dtype, dtype):
    """Scales, c and residual may be wider: they are not rounded on the way in."""
    names = ("bias", "c", "residual", "row_scale", "col_scale", "alpha", "beta")
    operands = _operands(names, 33, 100, 47, dtype, extra=torch.float32)
    result = isogemm.matmul_fused(**operands, activation="silu", out_dtype=out_dtype)
    assert result.dtype == (out_dtype or dtype)
    wide = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in operands.items()}
    theirs = fused_form(**wide, activation="silu").to(result.dtype)
    reference = fused_form(**doubled(operands), activation="silu")
    # An fp32 result of 16-bit products is one walk: within 4 times torch's error, as isogemm.matmul's.
    assert_no_worse_than_torch(result, theirs, reference, factor=4 if out_dtype else 2)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rounded_once(dtype):
    """The 16-bit result is the fp32 one, rounded."""
    for tensors, options in COMBINATIONS.values():
        operands = _operands(tensors, 17, 100, 48, dtype)
        wide = isogemm.matmul_fused(**operands, **options, out_dtype=torch.float32)
        assert_bitwise_equal(isogemm.matmul_fused(**operands, **options), wide.to(dtype))
    x, weight, up = (
        _normal(17, 33, dtype=dtype),
        _normal(9, 33, seed=1, dtype=dtype),
        _normal(9, 33, seed=2, dtype=dtype),
    )
    linear = functools.partial(isogemm.linear, x, weight, weight_up=up, activation="swiglu")
    assert_bitwise_equal(linear(), linear(out_dtype=torch.float32).to(dtype))


def _assert_same_but_for_the_kind_of_nan(actual, expected, what=""):
    assert torch.equal(actual.isnan(), expected.isnan()), what
    assert_bitwise_equal(actual.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf),
                         expected.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf), what)  # fmt: skip


def _every_pattern(dtype):
    """[65536, 1]: each number that 16 bits can be."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)[:, None]


# Arithmetic alone: torch has the same bits. The others are isogemm's own functions, torch's following the place.
TORCHS_BITS = ["relu", "relu2", "leaky_relu"]


def _rounded_forms():
    """Each activation's operations, every one rounded to the dtype: torch's, or what stands for it on the CPU."""
    return {name: spec.ACTIVATIONS[name].torch for name in (*ACTIVATIONS, *GATED)}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_eager_rounding_of_every_number(activation, dtype):
    """Bit-equal to torch, or at most an ulp from it; there the nearer (see tests/epilogues)."""
    a, b = _every_pattern(dtype), torch.ones(1, 4, dtype=dtype)
    result = isogemm.matmul_fused(a, b, activation=activation, rounding="eager")
    expected = ACTIVATIONS[activation](isogemm.mm(a, b))
    if activation in TORCHS_BITS:
        _assert_same_but_for_the_kind_of_nan(result, expected, activation)
    else:
        finite = expected[:, 0].isfinite()  # torch's gelu of the largest is not
        z, result, expected = (each[finite].double() for each in (a, result, expected))
        info = torch.finfo(dtype)  # an ulp, and torch's own error, which takes subnormals for 0
        slack = info.eps * expected.abs() + info.smallest_normal + 2**-23 * z.abs()
        assert bool(((result - expected).abs() <= slack).all())


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_eager_rounding(activation, dtype, monkeypatch):
    """Bit-equal to isogemm.mm and torch's own operations; the elementary functions among them aside."""
    if activation not in (None, *TORCHS_BITS):
        monkeypatch.setattr("fused_forms.ACTIVATION_FORMS", _rounded_forms())
    for names, numbers in (
        (("bias",), {}),
        (("column bias", "residual"), {}),
        (("bias", "c", "residual", "row_scale", "col_scale"), {"alpha": 0.3, "beta": -1.7}),
        (("alpha", "beta", "c"), {}),
    ):
        operands = _operands(names, 32, 100, 64, dtype)
        result = isogemm.matmul_fused(**operands, **numbers, activation=activation, rounding="eager")
        expected = fused_form(**operands, **numbers, activation=activation, product=isogemm.mm)
        assert_bitwise_equal(result, expected, str(names))


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("activation", GATED)
def test_eager_rounding_of_gates(activation, dtype, monkeypatch):
    if activation != "reglu":
        monkeypatch.setattr("fused_forms.GATE_FORMS", _rounded_forms())
    x, weight, up = _gated_operands(dtype, 32, 100, 64)
    operands = {"bias": _normal(64, seed=3, dtype=dtype), "bias_up": _normal(64, seed=4, dtype=dtype)}
    operands["residual"] = _normal(32, 64, seed=5, dtype=dtype)
    result = isogemm.linear(x, weight, weight_up=up, activation=activation, rounding="eager", **operands)
    assert_bitwise_equal(result, gated_form(x, weight, up, activation, linear=isogemm.linear, **operands))


def test_eager_rounding_differs():
    """Or the tests above would say nothing."""
    operands = _operands(("bias",), 32, 100, 64, torch.bfloat16)
    once, eager = (isogemm.matmul_fused(**operands, activation="gelu", rounding=each) for each in ("once", "eager"))
    assert 0.01 < float((once != eager).float().mean()) < 0.9


LAYOUTS = ["transposed", "sliced", "strided", "misaligned"]


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_do_not_follow_strides(layout, dtype):
    """What lies around the views is NaN."""
    tensors, options = COMBINATIONS["all, gelu_tanh"]
    operands = _operands(tensors, 33, 100, 47, dtype)
    expected = isogemm.matmul_fused(**operands, **options)
    for name, tensor in operands.items():
        if layout == "transposed" and tensor.ndim < 2:
            continue
        view = with_layout(tensor, layout)
        with poisoned_allocations():
            result = isogemm.matmul_fused(**operands | {name: view}, **options)
        assert_bitwise_equal(result, expected, name)
    views = {name: with_layout(t, layout) for name, t in operands.items() if layout != "transposed" or t.ndim > 1}
    with poisoned_allocations():
        assert_bitwise_equal(isogemm.matmul_fused(**operands | views, **options), expected, "all of them")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_expanded_operands(dtype):
    """c and residual of stride 0, a leading size of a and scales too."""
    operands = _operands(("bias", "c", "residual", "row_scale", "col_scale"), 8, 20, 15, dtype, batch=(3,))
    views = {"c": operands["c"][:, :1].expand(3, 8, 15), "residual": operands["residual"][..., :1].expand(3, 8, 15)}
    views |= {"row_scale": operands["row_scale"][:1].expand(3, 8), "col_scale": operands["col_scale"][:1].expand(15)}
    views |= {"bias": operands["bias"][:1].expand(15), "a": operands["a"][:1].expand(3, 8, 20)}
    for name, view in [*views.items(), ("all", None)]:
        changed = views if name == "all" else {name: view}
        copies = {each: tensor.clone(memory_format=torch.contiguous_format) for each, tensor in changed.items()}
        expected = isogemm.matmul_fused(**operands | copies, beta=0.5, activation="gelu")
        assert_bitwise_equal(isogemm.matmul_fused(**operands | changed, beta=0.5, activation="gelu"), expected, name)
    permuted = operands["a"].transpose(0, 1).contiguous().transpose(0, 1)
    residual = operands["residual"].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    expected = isogemm.matmul_fused(**operands, activation="relu")
    result = isogemm.matmul_fused(**operands | {"a": permuted, "residual": residual}, activation="relu")
    assert_bitwise_equal(result, expected, "permuted")


@pytest.mark.parametrize("sizes", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0), (0, 4, 0)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty(sizes, dtype):
    """No rows, no columns, or no terms in the sums: the epilogue of zeros."""
    operands = _operands(("bias", "c", "residual", "row_scale", "col_scale"), *sizes, dtype, make=_integers, batch=(2,))
    expected = fused_form(**operands, beta=2.0, activation="relu")
    with poisoned_allocations():
        result = isogemm.matmul_fused(**operands, beta=2.0, activation="relu")
        dropped = isogemm.matmul_fused(**operands, beta=2.0, activation="relu", dropout_p=0.5)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert dropped.shape == expected.shape
    x, weight = operands["a"], operands["b"].T
    gated = isogemm.linear(x, weight, weight_up=weight, activation="swiglu", residual=operands["residual"])
    torch.testing.assert_close(gated, operands["residual"] + F.silu(x @ weight.T) * (x @ weight.T))


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_inf(activation, dtype):
    """As in torch's fp64: relu of a NaN is one, an infinity goes where the activation takes it."""
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.0, -1.0, 60000.0, -60000.0], dtype=dtype)
    a, b = special[:, None], torch.ones(1, 3, dtype=dtype)
    for operands in ({}, {"bias": special[:3]}, {"residual": special[:3].repeat(9, 1)}, {"row_scale": special}):
        result = isogemm.matmul_fused(a, b, activation=activation, **operands)
        expected = fused_form(a.double(), b.double(), activation=activation, **doubled(operands))
        assert_same_nonfinite(result, expected.float(), str(tuple(operands)))
    assert bool(isogemm.matmul_fused(a[:1], b, activation=activation).isnan().all())


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("activation", GATED)
def test_nan_and_inf_of_gates(activation, dtype):
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.0, -1.0], dtype=dtype)
    x = torch.ones(2, 1, dtype=dtype)
    weight, up = special.repeat_interleave(6)[:, None], special.repeat(6)[:, None]
    result = isogemm.linear(x, weight, weight_up=up, activation=activation)
    assert_same_nonfinite(result, gated_form(x.double(), weight.double(), up.double(), activation))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "quick_gelu", "silu", "tanh", "sigmoid"])
def test_large_numbers_do_not_overflow_inside(activation):
    """60000 is finite in float16, and so is its activation, though not its square or its exponential."""
    for large, dtype in ((60000.0, torch.float16), (1e30, torch.bfloat16), (1e30, torch.float32)):
        a = torch.tensor([[large], [-large], [300.0], [-300.0]], dtype=dtype)
        result = isogemm.matmul_fused(a, torch.ones(1, 1, dtype=dtype), activation=activation)
        expected = ACTIVATIONS[activation](a.double()).to(dtype)
        assert_bitwise_equal(result + 0, expected + 0, activation)  # -0 is 0 here


def _gated_operands(dtype, m=33, k=100, n=47):
    shapes = (m, k), (n, k), (n, k)
    return [_normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("names", [(), ("bias",), ("bias_up",), ("bias", "bias_up", "residual")], ids=str)
def test_gates_no_worse_than_torch(names, activation, dtype):
    x, weight, up = _gated_operands(dtype)
    shapes = {"bias": (47,), "bias_up": (47,), "residual": (33, 47)}
    operands = {name: _normal(*shapes[name], seed=9 + i, dtype=dtype) for i, name in enumerate(names)}
    with poisoned_allocations():
        result = isogemm.linear(x, weight, weight_up=up, activation=activation, **operands)
    theirs = gated_form(x, weight, up, activation, **operands)
    reference = gated_form(x.double(), weight.double(), up.double(), activation, **doubled(operands))
    assert_no_worse_than_torch(result, theirs, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_two_weights_wherever_they_lie(dtype):
    """Before or behind one another, in one buffer, interleaved, misaligned, of different strides: the same bits."""
    x, weight, up = _gated_operands(dtype)
    linear = functools.partial(isogemm.linear, x, activation="swiglu")
    expected = linear(weight, weight_up=up)
    n, k = weight.shape
    both = torch.empty(2, n, k, dtype=dtype)
    merged = torch.cat([weight, up])
    pairs = {"merged": (merged[:n], merged[n:]), "merged, up first": torch.cat([up, weight]).chunk(2)[::-1]}
    both[0], both[1] = weight, up
    pairs["stacked"] = (both[0], both[1])
    rows = torch.stack([weight, up], 1)
    pairs["row by row"] = (rows[:, 0], rows[:, 1])
    wide = torch.cat([weight, up], 1)
    pairs["side by side"] = (wide[:, :k], wide[:, k:])
    odd = torch.full((2 * n * k + 3,), torch.nan, dtype=dtype)
    odd[1 : 1 + n * k], odd[2 + n * k : 2 + 2 * n * k] = weight.flatten(), up.flatten()
    pairs["misaligned"] = (odd[1 : 1 + n * k].view(n, k), odd[2 + n * k : 2 + 2 * n * k].view(n, k))
    pairs |= {f"{name} and plain": (with_layout(weight, name), up) for name in LAYOUTS}
    pairs |= {f"plain and {name}": (weight, with_layout(up, name)) for name in LAYOUTS}
    for name, (first, second) in pairs.items():
        assert_bitwise_equal(linear(first, weight_up=second), expected, name)
    same = linear(weight, weight_up=weight)
    assert_bitwise_equal(linear(weight, weight_up=weight.clone()), same, "one weight in both places")


# Each a function of x [..., K] and of the rows of the residual that go with it.
def _invariant_calls(k, n, dtype):
    weight, up = _normal(n, k, seed=1, dtype=dtype), _normal(n, k, seed=2, dtype=dtype)
    bias, bias_up = _normal(n, seed=3, dtype=dtype), _normal(n, seed=4, dtype=dtype)
    calls = {}
    for activation in ACTIVATIONS:
        keywords = {"activation": activation, "bias": bias}
        calls[activation] = functools.partial(isogemm.linear, weight=weight, **keywords)
    for activation in GATED:
        keywords = {"activation": activation, "bias": bias, "weight_up": up, "bias_up": bias_up}
        calls[activation] = functools.partial(isogemm.linear, weight=weight, **keywords)
    calls["eager"] = functools.partial(isogemm.linear, weight=weight, bias=bias, activation="gelu", rounding="eager")
    calls["scaled"] = functools.partial(isogemm.linear, weight=weight, col_scale=bias_up, alpha=0.3, activation="gelu")
    down = _normal(n, n, seed=5, dtype=dtype)
    for activation, second in (("gelu", None), ("swiglu", up)):
        keywords = {"weight": weight, "weight_down": down, "bias": bias, "weight_up": second, "activation": activation}
        calls[f"mlp {activation}"] = functools.partial(mlp, **keywords)
    return calls


CALLS = list(_invariant_calls(3, 3, torch.float32))


@functools.cache
def _problem(k, n, dtype):
    rows = _normal(512, k, seed=10, dtype=dtype), _normal(512, n, seed=11, dtype=dtype)
    others = make_data("wide", (28, k), seed=12, dtype=dtype), make_data("wide", (28, n), seed=13, dtype=dtype)
    return *rows, *others, _invariant_calls(k, n, dtype)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_row_follows_nothing_but_itself(name, dtype):
    k, n = 127, 65
    x, residual, noise, other, calls = _problem(k, n, dtype)
    call = calls[name]
    whole = call(x, residual=residual)
    for row in (0, 1, 255, 511):
        rows = slice(row, row + 1)
        assert_bitwise_equal(call(x[rows], residual=residual[rows]), whole[rows], f"row {row} alone")
        assert_bitwise_equal(call(x[row], residual=residual[row]), whole[row], f"row {row} as a vector")
    cut = [call(x[rows], residual=residual[rows]) for rows in (slice(0, 100), slice(100, 256))]
    assert_bitwise_equal(torch.cat(cut), whole[:256], "256 rows as 100 + 156")
    padded = call(torch.cat([x[:100], noise]), residual=torch.cat([residual[:100], other]))
    assert_bitwise_equal(padded[:100], whole[:100], "100 rows beside 28 others")
    order = torch.randperm(512, generator=torch.Generator().manual_seed(0))
    assert_bitwise_equal(call(x[order], residual=residual[order]), whole[order], "rows permuted")
    for shape in ((2, 256), (4, 8, 16), (512, 1)):
        batched = call(x.view(*shape, k), residual=residual.view(*shape, n))
        assert_bitwise_equal(batched, whole.view(*shape, n), f"rows as {shape}")
    sick = x[:64].clone()
    sick[1::2] = torch.tensor([torch.nan, torch.inf], dtype=dtype).repeat(16)[:, None]
    assert_bitwise_equal(call(sick, residual=residual[:64])[::2], whole[:64:2], "beside NaN and infinities")


@pytest.mark.parametrize("name", CALLS)
def test_every_number_of_rows(name):
    x, _, _, _, calls = _problem(17, 9, torch.float32)
    whole = calls[name](x)
    for m in range(1, 301, 1 if name in ("gelu", "silu", "swiglu") else 13):
        assert_bitwise_equal(calls[name](x[:m]), whole[:m], f"{m} rows")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_a_row_with_operands_of_its_own(dtype):
    """row_scale, c and a bias along rows go with the row."""
    names = ("column bias", "c", "residual", "row_scale", "col_scale")
    operands = _operands(names, 300, 64, 33, dtype)
    call = functools.partial(isogemm.matmul_fused, beta=0.5, activation="gelu")
    whole = call(**operands)
    for m in (1, 2, 7, 100, 257):
        part = {name: operands[name][:m] for name in ("a", "bias", "c", "residual", "row_scale")}
        assert_bitwise_equal(call(**operands | part), whole[:m], f"{m} rows")


def test_bits_do_not_follow_the_number_of_threads():
    x, residual, _, _, calls = _problem(127, 65, torch.float32)
    found = torch.get_num_threads()
    try:
        for name in ("gelu", "silu", "tanh", "swiglu", "mlp gelu"):
            results = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(calls[name](x, residual=residual))
            assert_bitwise_equal(results[1], results[0], name)
            assert_bitwise_equal(results[2], results[0], name)
    finally:
        torch.set_num_threads(found)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(data=st.data())
def test_any_shape_stride_dtype_and_epilogue(data):
    """Within the rounding of its sums, and the bits those of contiguous operands, whatever the combination."""
    m, n, k = (data.draw(strategies.sizes(100, min_size=0), label=name) for name in "mnk")
    dtype = data.draw(strategies.float_dtypes(), label="dtype")
    shapes = {"bias": (n,), "c": (m, n), "residual": (m, n), "row_scale": (m,), "col_scale": (n,)}
    names = data.draw(st.sets(st.sampled_from(sorted(shapes))), label="operands")
    operands = {
        name: data.draw(strategies.tensor_cases(shape, dtype=dtype, kinds=["normal"]), label=name).build(DEVICE)
        for name, shape in {"a": (m, k), "b": (k, n), **{name: shapes[name] for name in sorted(names)}}.items()
    }
    options = {"alpha": data.draw(st.sampled_from([1.0, -0.5]), label="alpha")}
    options |= {"beta": 2.0} if "c" in names else {}
    options["activation"] = data.draw(st.sampled_from([None, *ACTIVATIONS]), label="activation")
    with poisoned_allocations():
        result = isogemm.matmul_fused(**operands, **options)
    reference = fused_form(**doubled(operands), **options)
    assert result.shape == reference.shape
    pre = fused_form(
        **{name: _double(t).abs() for name, t in operands.items()}, **options | {"alpha": 1.0, "activation": None}
    )
    info = torch.finfo(dtype)
    # k roundings of an fp32 sum and ten of the epilogue, one to the dtype; relu2 is as steep as 2 |z|, the rest 1.2.
    steep = 2 * pre if options["activation"] == "relu2" else 1.2
    allowed = (k + 10) * 2**-23 * pre * steep + 2 * info.eps * reference.abs() + info.eps * info.smallest_normal + 1e-12
    finite = reference.abs() < info.max / 2
    assert bool(((result.double() - reference).abs() <= allowed)[finite].all())
    contiguous = {name: tensor.contiguous() for name, tensor in operands.items()}
    assert_bitwise_equal(isogemm.matmul_fused(**contiguous, **options), result)


def test_the_log():
    operands = _operands(("bias",), 17, 33, 9, torch.bfloat16)
    with isogemm.dispatch_log() as log:
        isogemm.matmul_fused(**operands, activation="gelu")
    assert [entry.path for entry in log] == ["cpu"]
    with isogemm.dispatch_log() as log:
        isogemm.matmul_fused(operands["a"].double(), operands["b"].double(), activation="gelu")
    assert [entry.path for entry in log] == ["torch"]


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_any_precision_is_ieee_on_the_cpu(precision):
    operands = _operands(("bias",), 17, 33, 9, torch.float32)
    expected = isogemm.matmul_fused(**operands, activation="gelu")
    assert_bitwise_equal(isogemm.matmul_fused(**operands, activation="gelu", precision=precision), expected)


# Dropout. x and weight are positive in what follows: a zero was dropped.


def _positive(m=256, k=8, n=192, dtype=torch.float32):
    return torch.ones(m, k, dtype=dtype), torch.full((n, k), 0.5, dtype=dtype)


def _seeded(function, *args, seed=0, **keywords):
    torch.manual_seed(seed)
    return function(*args, **keywords)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_dropout_statistics(p):
    x, weight = _positive()
    result = _seeded(isogemm.linear, x, weight, dropout_p=p)
    kept = result != 0
    scale = 1 / (1 - p)
    assert float((result[kept] - 4 * scale).abs().max()) < 4 * scale * 2**-15  # p is rounded to 16 bits
    for rate, count in (
        (kept.double().mean(), kept.numel()),
        (kept.double().mean(0), 256),
        (kept.double().mean(1), 192),
    ):
        sigma = math.sqrt(p * (1 - p) / count)
        assert float((rate - (1 - p)).abs().max()) < 5 * sigma
    assert float(result.mean()) == pytest.approx(4, rel=5 * math.sqrt(p / (1 - p) / kept.numel()))
    variance = 16 * p / (1 - p)
    assert float(result.var()) == pytest.approx(variance, rel=0.05)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_is_of_the_activation_before_the_residual(dtype):
    operands = _operands(("bias", "residual"), 33, 64, 47, dtype)
    p, seed = 0.25, 11
    torch.manual_seed(seed)
    mask = random.kept(new_seed(torch.device(DEVICE)), 33, 47, p)
    result = _seeded(isogemm.matmul_fused, **operands, activation="gelu", dropout_p=p, seed=seed)
    assert_bitwise_equal(result[~mask], operands["residual"][~mask], "what is dropped is the residual alone")
    value = isogemm.matmul_fused(operands["a"], operands["b"], bias=operands["bias"], activation="gelu",
                                 out_dtype=None if dtype == torch.float64 else torch.float32)  # fmt: skip
    expected = torch.where(mask, value * (4 / 3), 0).to(value.dtype) + operands["residual"].to(value.dtype)
    torch.testing.assert_close(result, expected.to(dtype))


def test_no_dropout_and_nothing_but():
    x, weight = _positive()
    plain = isogemm.linear(x, weight, activation="gelu")
    assert_bitwise_equal(isogemm.linear(x, weight, activation="gelu", dropout_p=0.0), plain)
    assert_bitwise_equal(isogemm.linear(x, weight, activation="gelu", dropout_p=1.0), torch.zeros_like(plain))
    residual = _normal(256, 192)
    assert_bitwise_equal(isogemm.linear(x, weight, residual=residual, dropout_p=1), residual)


def test_no_dropout_draws_nothing():
    """The generator is left alone where there is nothing to drop."""
    x, weight = _positive()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    isogemm.linear(x, weight, activation="relu", dropout_p=0.0)
    assert torch.equal(torch.rand(4), expected)


def test_the_seed_is_torch_s():
    x, weight = _positive()
    torch.manual_seed(5)
    first, second = (isogemm.linear(x, weight, dropout_p=0.5) for _ in range(2))
    assert float((first == second).float().mean()) == pytest.approx(0.5, abs=0.02), "another mask at each call"
    torch.manual_seed(5)
    for expected in (first, second):
        assert_bitwise_equal(isogemm.linear(x, weight, dropout_p=0.5), expected)


def test_masks_do_not_follow_the_number_of_rows():
    x, weight = _positive()
    whole = _seeded(isogemm.linear, x, weight, dropout_p=0.3)
    for m in (1, 17, 100, 255):
        assert_bitwise_equal(_seeded(isogemm.linear, x[:m], weight, dropout_p=0.3), whole[:m], f"{m} rows")
    for n in (1, 33, 100):
        assert_bitwise_equal(_seeded(isogemm.linear, x, weight[:n], dropout_p=0.3), whole[:, :n], f"{n} columns")
    batched = _seeded(isogemm.linear, x.view(4, 8, 8, 8), weight, dropout_p=0.3)
    assert_bitwise_equal(batched.view(256, -1), whole, "rows in a batch")
    half = _seeded(isogemm.linear, x.bfloat16(), weight.bfloat16(), dropout_p=0.3)
    assert torch.equal(half != 0, whole != 0)
    up = torch.ones_like(weight)
    gated = _seeded(isogemm.linear, x, weight, weight_up=up, activation="reglu", dropout_p=0.3)
    assert torch.equal(gated != 0, whole != 0)


# Epilogues of the user's own. On the CPU their torch form is computed; the device form is only declared.


@triton.jit
def _device_plain(acc, col, row):
    return acc


@triton.jit
def _device_one(acc, col, row, first):
    return acc + first


@triton.jit
def _device_two(acc, col, row, first, second):
    return acc * first + second


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(spec, "REGISTERED", {})


AUX = {"scalar": (), "one": (1,), "columns": (47,), "rows": (33, 1), "row of one": (1, 47), "matrix": (33, 47)}


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(AUX, 2)))
def test_an_epilogue_of_the_users(first, second, dtype):
    def form(acc, col, row, first, second):
        return torch.sin(acc) * first + second * (col - row)

    register("wave", _device_two, form)
    operands = _operands(("bias", "residual"), 33, 20, 47, dtype)
    aux = [_normal(*AUX[name], seed=30 + i, dtype=dtype) for i, name in enumerate((first, second))]
    result = isogemm.matmul_fused(**operands, epilogue="wave", aux=aux)
    col, row = torch.arange(47)[None, :], torch.arange(33)[:, None]

    def plain(operands, aux):
        z = operands["a"] @ operands["b"] + operands["bias"]
        return operands["residual"] + (torch.sin(z) * aux[0] + aux[1] * (col - row))

    reference = plain(doubled(operands), [_double(each) for each in aux])
    assert_no_worse_than_torch(result, plain(operands, aux), reference)
    as_linear = isogemm.linear(operands["a"], operands["b"].T, operands["bias"], residual=operands["residual"],
                               epilogue="wave", aux=aux)  # fmt: skip
    assert_bitwise_equal(as_linear, result)


@pytest.mark.usefixtures("registry")
def test_rows_and_columns_are_numbered_through_a_batch():
    register("where", _device_plain, lambda acc, col, row: acc + row * 100 + col)
    a, b = torch.zeros(2, 3, 4), torch.zeros(4, 5)
    expected = torch.arange(6).view(2, 3, 1) * 100.0 + torch.arange(5)
    torch.testing.assert_close(isogemm.matmul_fused(a, b, epilogue="where"), expected, rtol=0, atol=0)


@pytest.mark.usefixtures("registry")
def test_an_epilogue_after_all_that_comes_before_it():
    """alpha, scales, c and bias first; then its value is dropped and the residual added."""
    register("negative", _device_plain, lambda acc, col, row: -acc)
    operands = _operands(("bias", "c", "residual", "row_scale", "col_scale"), 9, 4, 11, torch.float32, make=_integers)
    result = isogemm.matmul_fused(**operands, alpha=3.0, beta=-2.0, epilogue="negative")
    residual = operands.pop("residual")
    expected = residual - fused_form(**operands, alpha=3.0, beta=-2.0)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    dropped = isogemm.matmul_fused(**operands, residual=residual, epilogue="negative", dropout_p=1.0)
    torch.testing.assert_close(dropped, residual, rtol=0, atol=0)


@pytest.mark.usefixtures("registry")
def test_registered_again_it_replaces_the_former():
    a, b = _normal(3, 4), _normal(4, 5)
    register("mine", _device_plain, lambda acc, col, row: acc + 1)
    first = isogemm.matmul_fused(a, b, epilogue="mine")
    register("mine", _device_plain, lambda acc, col, row: acc + 2)
    torch.testing.assert_close(isogemm.matmul_fused(a, b, epilogue="mine"), first + 1)
    register("mine", _device_one, lambda acc, col, row, first: acc * first)
    one = torch.full((), 2.0)
    torch.testing.assert_close(isogemm.matmul_fused(a, b, epilogue="mine", aux=[one]), 2 * isogemm.mm(a, b))


# Two layers.


def _mlp_operands(dtype, gated, m=33, k=20, h=47, n=15, biases=True):
    shapes = {"x": (m, k), "weight": (h, k), "weight_down": (n, h)}
    shapes |= {"bias": (h,), "bias_down": (n,)} if biases else {}
    shapes |= {"weight_up": (h, k)} if gated else {}
    shapes |= {"bias_up": (h,)} if gated and biases else {}
    return {name: _normal(*shape, seed=seed, dtype=dtype) / 4 for seed, (name, shape) in enumerate(shapes.items())}


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
        residual = _normal(33, 15, seed=20, dtype=dtype)
        for more in ({}, {"residual": residual}):
            result = mlp(**operands, **more, activation=activation)
            theirs = _plain_mlp(**operands, **more, activation=activation)
            reference = _plain_mlp(**doubled(operands), **doubled(more), activation=activation)
            assert_no_worse_than_torch(result, theirs, reference)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
def test_mlp_is_two_calls_of_linear(activation, dtype):
    operands = _mlp_operands(dtype, activation in GATED)
    residual = _normal(33, 15, seed=20, dtype=dtype)
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
    operands = _mlp_operands(torch.float32, True) | {"x": _normal(*shape)}
    residual = _normal(*shape[:-1], 15, seed=1)
    result = mlp(**operands, activation="swiglu", residual=residual)
    torch.testing.assert_close(result, _plain_mlp(**operands, activation="swiglu", residual=residual))


# Errors. Every one names its argument and comes before anything is computed.

A, B, W, BIAS = torch.ones(3, 4), torch.ones(4, 5), torch.ones(5, 4), torch.ones(5)
SQUARE = torch.ones(3, 5)
EITHER = (TypeError, ValueError)
WRONG = {  # name: (keywords of linear, error, what the message says of what argument)
    "activation unknown": ({"activation": "rleu"}, ValueError, "activation is 'rleu'.*relu"),
    "activation a function": ({"activation": torch.relu}, EITHER, "activation is .*relu"),
    "activation_args unknown": (
        {"activation": "leaky_relu", "activation_args": {"slope": 1.0}}, ValueError,
        "activation_args .*'slope'.*negative_slope",
    ),
    "activation_args of none": (
        {"activation": "relu", "activation_args": {"a": 1.0}}, ValueError, "activation_args .*'a'",
    ),
    "activation_args alone": (
        {"activation_args": {"negative_slope": 1.0}, "residual": SQUARE}, ValueError, "activation_args ",
    ),
    "activation_args no number": (
        {"activation": "leaky_relu", "activation_args": {"negative_slope": "steep"}}, EITHER, "activation_args .*steep",
    ),
    "weight_up without a gate": ({"activation": "relu", "weight_up": W}, ValueError, ".*weight_up"),
    "weight_up without activation": ({"weight_up": W}, ValueError, ".*weight_up"),
    "gate without weight_up": ({"activation": "swiglu"}, ValueError, "activation is 'swiglu'.*weight_up"),
    "weight_up shape": ({"activation": "swiglu", "weight_up": torch.ones(6, 4)}, ValueError, ".*weight_up .*6"),
    "weight_up rank": ({"activation": "swiglu", "weight_up": BIAS}, ValueError, ".*weight_up "),
    "weight_up dtype": ({"activation": "swiglu", "weight_up": W.half()}, EITHER, ".*weight_up .*float16"),
    "weight_up device": ({"activation": "swiglu", "weight_up": W.to("meta")}, ValueError, ".*weight_up .*meta"),
    "weight_up no tensor": ({"activation": "swiglu", "weight_up": 1.0}, TypeError, ".*weight_up .*float"),
    "bias_up alone": ({"activation": "relu", "bias_up": BIAS}, ValueError, "bias_up "),
    "bias_up shape": ({"activation": "swiglu", "weight_up": W, "bias_up": BIAS[:4]}, ValueError, ".*bias_up .*4"),
    "bias_up dtype": ({"activation": "swiglu", "weight_up": W, "bias_up": BIAS.half()}, EITHER, ".*bias_up .*float16"),
    "bias shape": ({"activation": "relu", "bias": BIAS[:4]}, ValueError, ".*bias .*4"),
    "bias dtype": ({"activation": "relu", "bias": BIAS.half()}, EITHER, ".*bias .*float16"),
    "bias no tensor": ({"activation": "relu", "bias": 1.0}, TypeError, "bias .*float"),
    "residual shape": ({"residual": SQUARE[:2]}, ValueError, r"residual .*\[2, 5\].*\[3, 5\]"),
    "residual to be broadcast": ({"residual": BIAS}, ValueError, r"residual .*\[5\].*\[3, 5\]"),
    "residual dtype": ({"residual": SQUARE.half()}, EITHER, "residual .*float16"),
    "residual device": ({"residual": SQUARE.to("meta")}, ValueError, "residual .*meta"),
    "residual no tensor": ({"residual": 1.0}, TypeError, "residual .*float"),
    "c shape": ({"c": SQUARE.T, "beta": 1.0}, ValueError, r"c .*\[5, 3\].*\[3, 5\]"),
    "c dtype": ({"c": SQUARE.half(), "beta": 1.0}, EITHER, "c .*float16"),
    "c no tensor": ({"c": 2.0, "beta": 1.0}, TypeError, "c .*float"),
    "beta without c": ({"beta": 1.0}, ValueError, "beta .*c"),
    "beta tensor without c": ({"beta": torch.tensor(1.0)}, ValueError, "beta .*c"),
    "beta rank": ({"beta": torch.ones(1), "c": SQUARE}, ValueError, r"beta .*\[1\]"),
    "beta no number": ({"beta": "one", "c": SQUARE}, EITHER, "beta .*(str|one)"),
    "alpha rank": ({"alpha": torch.ones(2)}, ValueError, r"alpha .*\[2\]"),
    "alpha dtype": ({"alpha": torch.tensor(1)}, EITHER, "alpha .*int64"),
    "alpha no number": ({"alpha": "one"}, EITHER, "alpha .*(str|one)"),
    "alpha none": ({"alpha": None}, EITHER, "alpha .*None"),
    "row_scale shape": ({"row_scale": BIAS}, ValueError, r"row_scale .*\[5\].*\[3\]"),
    "row_scale dtype": ({"row_scale": torch.ones(3).half()}, EITHER, "row_scale .*float16"),
    "row_scale no tensor": ({"row_scale": 1.0}, TypeError, "row_scale .*float"),
    "col_scale shape": ({"col_scale": BIAS[:3]}, ValueError, r"col_scale .*\[3\].*\[5\]"),
    "col_scale dtype": ({"col_scale": BIAS.long()}, EITHER, "col_scale .*int64"),
    "dropout_p negative": ({"dropout_p": -0.1}, ValueError, "dropout_p .*-0.1"),
    "dropout_p above one": ({"dropout_p": 1.5}, ValueError, "dropout_p .*1.5"),
    "dropout_p nan": ({"dropout_p": math.nan}, ValueError, "dropout_p .*nan"),
    "dropout_p no number": ({"dropout_p": "half"}, EITHER, "dropout_p .*(str|half)"),
    "rounding": ({"rounding": "twice"}, ValueError, "rounding is 'twice'.*once.*eager"),
    "epilogue unknown": ({"epilogue": "nobody"}, ValueError, "epilogue is 'nobody'"),
    "aux without epilogue": ({"aux": (BIAS,)}, ValueError, "aux .*epilogue"),
    "aux with an activation": ({"aux": (BIAS,), "activation": "relu"}, ValueError, "aux .*epilogue"),
    "out_dtype": ({"activation": "relu", "out_dtype": torch.float16}, EITHER, "out_dtype .*float16"),
    "precision": ({"activation": "relu", "precision": "fp8"}, ValueError, "precision .*fp8"),
    "weight shape": ({"activation": "relu", "weight": B}, ValueError, "x and weight .*4.*5"),
    "weight dtype": ({"activation": "relu", "weight": W.half()}, EITHER, "x and weight .*float16"),
}  # fmt: skip
for _name, _value in {
    "alpha": 2.0, "beta": 1.0, "row_scale": torch.ones(3), "col_scale": BIAS,
}.items():  # fmt: skip
    _keywords = {"activation": "swiglu", "weight_up": W, _name: _value} | ({"c": SQUARE} if _name == "beta" else {})
    WRONG[f"{_name} with a gate"] = (
        _keywords,
        ValueError,
        "(c|beta) .*gated" if _name == "beta" else f"{_name} .*gated",
    )


def _assert_refused(error, message, function, *args, **keywords):
    with isogemm.dispatch_log() as log, pytest.raises(error, match=f"^{message}"):
        function(*args, **keywords)
    assert not log, "something was computed first"


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    keywords, error, message = WRONG[name]
    _assert_refused(error, message, isogemm.linear, **{"x": A, "weight": W} | keywords)


WRONG_MATMULS = {  # of matmul_fused alone
    "a rank": ({"a": A[0]}, ValueError, r"a .*\[4\]"),
    "a no tensor": ({"a": None}, TypeError, "a .*NoneType"),
    "b rank": ({"b": B[None]}, ValueError, r"b .*\[1, 4, 5\]"),
    "b no tensor": ({"b": [1.0]}, TypeError, "b .*list"),
    "k": ({"b": W, "activation": "relu"}, ValueError, "a and b .*4.*5"),
    "dtypes": ({"b": B.half(), "activation": "relu"}, EITHER, "a and b .*float32.*float16"),
    "of integers": ({"a": A.long(), "b": B.long()}, EITHER, "a .*int64"),
    "a gate": ({"activation": "swiglu"}, ValueError, "activation is 'swiglu'"),
    "bias_dim": ({"bias": BIAS, "bias_dim": 0}, ValueError, "bias_dim is 0"),
    "bias_dim positive": ({"bias": BIAS, "bias_dim": 1}, ValueError, "bias_dim is 1"),
    "column bias shape": ({"bias": BIAS, "bias_dim": -2}, ValueError, r".*bias .*\[5\].*\[3\]"),
    "column bias dtype": ({"bias": torch.ones(3).half(), "bias_dim": -2}, EITHER, ".*bias .*float16"),
    "bias rank": ({"bias": SQUARE}, ValueError, r"bias .*\[3, 5\]"),
}


@pytest.mark.parametrize("name", WRONG_MATMULS)
def test_wrong_arguments_of_matmul_fused(name):
    keywords, error, message = WRONG_MATMULS[name]
    _assert_refused(error, message, isogemm.matmul_fused, **{"a": A, "b": B} | keywords)


@pytest.mark.usefixtures("registry")
def test_wrong_aux():
    register("add", _device_one, lambda acc, col, row, first: acc + first)
    refused = functools.partial(_assert_refused, function=isogemm.matmul_fused, a=A, b=B, epilogue="add")
    refused(ValueError, "aux has 0 tensors.*'add' reads 1")
    refused(ValueError, "aux has 2 tensors.*'add' reads 1", aux=(BIAS, BIAS))
    refused(ValueError, r"aux\[0\] .*\[4\]", aux=(torch.ones(4),))
    refused(ValueError, r"aux\[0\] .*\[2, 3, 5\]", aux=(torch.ones(2, 3, 5),))
    refused(EITHER, r"aux\[0\] .*float16", aux=(BIAS.half(),))
    refused(EITHER, r"aux\[0\] .*int64", aux=(BIAS.long(),))
    refused(TypeError, r"aux\[0\] .*float", aux=(1.0,))
    refused(ValueError, r".*aux\[0\] .*meta", aux=(BIAS.to("meta"),))
    refused(ValueError, "activation is 'relu' and epilogue 'add'", aux=(BIAS,), activation="relu")
    refused(ValueError, "activation_args ", aux=(BIAS,), activation_args={"negative_slope": 1.0})


DOWN = torch.ones(7, 5)
WRONG_MLPS = {
    "weight_down shape": ({"weight_down": DOWN.T}, ValueError, r"weight_down .*\[5, 7\].*5"),
    "weight_down rank": ({"weight_down": BIAS}, ValueError, "weight_down "),
    "weight_down no tensor": ({"weight_down": None}, TypeError, "weight_down .*NoneType"),
    "weight_down dtype": ({"weight_down": DOWN.half()}, EITHER, ".*weight_down .*float16"),
    "bias_down shape": ({"bias_down": BIAS}, ValueError, ".*bias_down .*5"),
    "bias_down dtype": ({"bias_down": torch.ones(7).half()}, EITHER, ".*bias_down .*float16"),
    "bias shape": ({"bias": BIAS[:4]}, ValueError, ".*bias .*4"),
    "weight_up missing": ({"activation": "swiglu"}, ValueError, ".*weight_up"),
    "weight_up with no gate": ({"weight_up": W}, ValueError, ".*weight_up"),
    "bias_up alone": ({"bias_up": BIAS}, ValueError, "bias_up "),
    "activation unknown": ({"activation": "rleu"}, ValueError, "activation is 'rleu'"),
    "activation none": ({"activation": None}, EITHER, "activation is None"),
    "hidden_dropout_p": ({"hidden_dropout_p": 2.0}, ValueError, "hidden_dropout_p .*2"),
    "dropout_p": ({"dropout_p": -1.0}, ValueError, "dropout_p .*-1"),
    "residual shape": ({"residual": SQUARE}, ValueError, r"residual .*\[3, 5\].*\[3, 7\]"),
    "residual dtype": ({"residual": torch.ones(3, 7).half()}, EITHER, "residual .*float16"),
    "out_dtype": ({"out_dtype": torch.float16}, EITHER, "out_dtype .*float16"),
    "precision": ({"precision": "fp8"}, ValueError, "precision .*fp8"),
    "x shape": ({"x": SQUARE}, ValueError, "x and weight .*5.*4"),
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", WRONG_MLPS)
def test_wrong_arguments_of_mlp(name, training):
    keywords, error, message = WRONG_MLPS[name]
    weight = W.clone().requires_grad_(training)
    _assert_refused(error, message, mlp, **{"x": A, "weight": weight, "weight_down": DOWN} | keywords)


def test_options_are_keywords():
    with pytest.raises(TypeError):
        isogemm.matmul_fused(A, B, BIAS)
    with pytest.raises(TypeError):
        isogemm.linear(A, W, BIAS, "relu")
    with pytest.raises(TypeError):
        mlp(A, W, DOWN, BIAS)
