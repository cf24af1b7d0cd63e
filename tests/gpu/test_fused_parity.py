"""Fused products on the GPU against fp64 and beside torch: epilogues, dtypes, strides, rounding, special values."""

import functools
import itertools

import hypothesis
import pytest
import strategies
import torch
import triton
import triton.language as tl
from fused_forms import doubled, fused_form, gated_form
from hypothesis import strategies as st
from torch.nn import functional as F

import isogemm
from isogemm.epilogues import random, register, spec
from isogemm.gemm.api import mlp
from isogemm.gemm.fused import new_seed
from isogemm.verify.activations import ACTIVATION_FORMS as ACTIVATIONS
from isogemm.verify.activations import GATE_FORMS as GATED
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch, assert_same_nonfinite
from isogemm.verify.inputs import LAYOUTS, make_data, with_layout
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cuda"
NUMBERS = {  # name: (dtype, precision)
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "ieee": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
}
SHORT = ["bf16", "ieee"]  # where a kernel for each would take minutes to compile
HALVES = [torch.bfloat16, torch.float16]


def _normal(*shape, seed=0, dtype=torch.bfloat16):
    return make_data("normal", shape, seed=seed, dtype=dtype, device=DEVICE)


def _set_torch(precision):
    """What torch computes beside us; put back after the test."""
    torch.backends.cuda.matmul.fp32_precision = precision or "ieee"


def _operands(names, m, k, n, dtype, *, batch=(), extra=None):
    """a [..., M, K], b [K, N] of [N, K] in memory, and those named; the wider ones of dtype `extra` where given."""
    rows, extra = (*batch, m), extra or dtype
    made = {"a": _normal(*rows, k, dtype=dtype), "b": _normal(n, k, seed=1, dtype=dtype).T}
    shapes = {"bias": ((n,), dtype), "column bias": (rows, dtype), "c": ((*rows, n), extra)}
    shapes |= {"residual": ((*rows, n), extra), "row_scale": (rows, extra), "col_scale": ((n,), extra)}
    shapes |= {"alpha": ((), extra), "beta": ((), extra)}
    for seed, (name, (shape, kind)) in enumerate(shapes.items(), 2):
        if name in names:
            made[name] = _normal(*shape, seed=seed, dtype=kind)
    if "column bias" in made:
        made |= {"bias": made.pop("column bias"), "bias_dim": -2}
    return made


def _fused(operands, **options):
    with poisoned_allocations(), isogemm.dispatch_log() as log:
        result = isogemm.matmul_fused(**operands, **options)
    assert [entry.path for entry in log] == ["gemm"]
    return result


def _assert_no_worse(result, operands, **options):
    theirs = fused_form(**operands, **options).to(result.dtype)
    assert_no_worse_than_torch(result, theirs, fused_form(**doubled(operands), **options))


EVERYTHING = ("bias", "c", "residual", "row_scale", "col_scale")
COMBINATIONS = {  # name: (tensors, options)
    "bias": (("bias",), {}),
    "column bias": (("column bias",), {}),
    "residual": (("residual",), {}),
    "alpha": ((), {"alpha": 0.7}),
    "alpha tensor": (("alpha",), {}),
    "c": (("c",), {"beta": -1.3}),
    "c, tensors": (("alpha", "beta", "c"), {}),
    "scales": (("row_scale", "col_scale"), {}),
    "column bias, gelu": (("column bias",), {"activation": "gelu"}),
    "bias, silu, residual": (("bias", "residual"), {"activation": "silu"}),
    "all, gelu_tanh": (EVERYTHING, {"alpha": 0.5, "beta": 2.0, "activation": "gelu_tanh"}),
    "all, leaky_relu": (
        ("column bias", *EVERYTHING[1:], "alpha", "beta"),
        {"activation": "leaky_relu", "activation_args": {"negative_slope": 0.2}},
    ),
}


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_no_worse_than_torch(activation, number):
    dtype, precision = NUMBERS[number]
    _set_torch(precision)
    for m, k in ((200, 512), (16, 65))[: 2 if number in SHORT else 1]:
        operands = _operands(("bias",), m, k, 320, dtype)
        operands["a"] = operands["a"] / k**0.5  # about 1, where activations bend
        result = _fused(operands, activation=activation, precision=precision)
        assert result.dtype == dtype
        assert result.is_contiguous()
        _assert_no_worse(result, operands, activation=activation)


@pytest.mark.parametrize(
    ("name", "number"),
    [(name, number) for name in COMBINATIONS for number in (NUMBERS if name.startswith("all") else SHORT)],
)
def test_combinations_no_worse_than_torch(name, number):
    dtype, precision = NUMBERS[number]
    _set_torch(precision)
    tensors, options = COMBINATIONS[name]
    operands = _operands(tensors, 130, 256, 200, dtype)
    _assert_no_worse(_fused(operands, **options, precision=precision), operands, **options)


SIZES = [  # M, K, N
    (1, 4096, 4096),
    (8, 1024, 14336),
    (17, 1000, 1003),
    (65, 63, 127),
    (127, 17, 3),
    (3, 1, 1),
    (512, 4096, 1024),
    (1000, 65, 1000),
    (4096, 512, 1024),
]
SOME = [(17, 1000, 1003), (512, 1024, 768), (65, 63, 127)]
CASES = [("bf16", *sizes) for sizes in SIZES] + [(name, *sizes) for name in ("fp16", "ieee", "tf32") for sizes in SOME]


def _id(case):
    return "-".join(map(str, case))


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_sizes(case):
    number, m, k, n = case
    dtype, precision = NUMBERS[number]
    _set_torch(precision)
    operands = _operands(EVERYTHING, m, k, n, dtype)
    options = {"alpha": 0.5, "beta": 2.0, "activation": "gelu"}
    _assert_no_worse(_fused(operands, **options, precision=precision), operands, **options)


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_sizes_of_gates(case):
    number, m, k, n = case
    dtype, precision = NUMBERS[number]
    _set_torch(precision)
    x, weight, up = (_normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(((m, k), (n, k), (n, k))))
    operands = {"bias": _normal(n, seed=3, dtype=dtype), "bias_up": _normal(n, seed=4, dtype=dtype)}
    operands["residual"] = _normal(m, n, seed=5, dtype=dtype)
    with poisoned_allocations(), isogemm.dispatch_log() as log:
        result = isogemm.linear(x, weight, weight_up=up, activation="swiglu", precision=precision, **operands)
    assert [entry.path for entry in log] == ["gemm"]
    reference = gated_form(x.double(), weight.double(), up.double(), "swiglu", **doubled(operands))
    assert_no_worse_than_torch(result, gated_form(x, weight, up, "swiglu", **operands), reference)


BIASES = [("bias", "bias_up", "residual"), (), ("bias",), ("bias_up",)]


@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize(
    ("number", "names"),
    [*((number, BIASES[0]) for number in NUMBERS), *(("bf16", names) for names in BIASES[1:])],
    ids=str,
)
def test_gates_no_worse_than_torch(names, activation, number):
    dtype, precision = NUMBERS[number]
    _set_torch(precision)
    x, weight, up = (
        _normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(((130, 256), (200, 256), (200, 256)))
    )
    shapes = {"bias": (200,), "bias_up": (200,), "residual": (130, 200)}
    operands = {name: _normal(*shapes[name], seed=9 + i, dtype=dtype) for i, name in enumerate(names)}
    with poisoned_allocations():
        result = isogemm.linear(x, weight, weight_up=up, activation=activation, precision=precision, **operands)
    reference = gated_form(x.double(), weight.double(), up.double(), activation, **doubled(operands))
    assert_no_worse_than_torch(result, gated_form(x, weight, up, activation, **operands), reference)


@pytest.mark.parametrize("m", [1, 17, 130, 600])
def test_two_weights_wherever_they_lie(m):
    """Before or behind one another, in one buffer, interleaved, misaligned, of different strides: the same bits."""
    n, k = 192, 256
    x, weight, up = (_normal(*shape, seed=i) for i, shape in enumerate(((m, k), (n, k), (n, k))))
    linear = functools.partial(isogemm.linear, x, activation="swiglu")
    expected = linear(weight, weight_up=up)
    reference = gated_form(x.double(), weight.double(), up.double(), "swiglu")
    assert_no_worse_than_torch(expected, gated_form(x, weight, up, "swiglu"), reference)
    first, last = torch.cat([weight, up]), torch.cat([up, weight])
    rows, wide = torch.stack([weight, up], 1), torch.cat([weight, up], 1)
    odd = torch.full((2 * n * k + 3,), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    odd[1 : 1 + n * k], odd[2 + n * k : 2 + 2 * n * k] = weight.flatten(), up.flatten()
    pairs = {
        "merged": (first[:n], first[n:]),
        "merged, up first": (last[n:], last[:n]),
        "row by row": (rows[:, 0], rows[:, 1]),
        "side by side": (wide[:, :k], wide[:, k:]),
        "misaligned": (odd[1 : 1 + n * k].view(n, k), odd[2 + n * k : 2 + 2 * n * k].view(n, k)),
        "late allocation first": (weight.clone(), up),
        "late allocation second": (weight, up.clone()),
    }
    layouts = ("transposed", "sliced", "strided", "misaligned")
    pairs |= {f"{name} and plain": (with_layout(weight, name), up) for name in layouts}
    pairs |= {f"plain and {name}": (weight, with_layout(up, name)) for name in layouts}
    for name, (one, other) in pairs.items():
        assert_bitwise_equal(linear(one, weight_up=other), expected, name)


@pytest.mark.parametrize("m", [1, 200])
def test_bits_do_not_follow_strides(m):
    """What lies around the views is NaN."""
    operands = _operands(EVERYTHING, m, 256, 160, torch.bfloat16)
    options = {"alpha": 0.5, "beta": 2.0, "activation": "gelu"}
    expected = isogemm.matmul_fused(**operands, **options)
    changes = {name: {name: "transposed" if each.ndim > 1 else "strided"} for name, each in operands.items()}
    changes |= {f"all {layout}": dict.fromkeys(operands, layout) for layout in ("sliced", "strided", "misaligned")}
    for what, layouts in changes.items():
        views = {name: with_layout(operands[name], layout) for name, layout in layouts.items()}
        with poisoned_allocations():
            result = isogemm.matmul_fused(**operands | views, **options)
        assert_bitwise_equal(result, expected, what)


def test_expanded_and_permuted_operands():
    operands = _operands(EVERYTHING, 40, 64, 48, torch.bfloat16, batch=(3,))
    views = {
        "c": operands["c"][:, :1].expand(3, 40, 48),
        "residual": operands["residual"][..., :1].expand(3, 40, 48),
        "row_scale": operands["row_scale"][:1].expand(3, 40),
        "col_scale": operands["col_scale"][:1].expand(48),
        "bias": operands["bias"][:1].expand(48),
        "a": operands["a"][:1].expand(3, 40, 64),
    }
    permuted = {name: operands[name].transpose(0, 1).contiguous().transpose(0, 1) for name in ("a", "c", "residual")}
    scrambled = {name: operands[name].permute(2, 0, 1).contiguous().permute(1, 2, 0) for name in ("c", "residual")}
    cases = [*({name: view} for name, view in views.items()), views, permuted, scrambled]
    for changed in cases:
        copies = {name: each.clone(memory_format=torch.contiguous_format) for name, each in changed.items()}
        expected = isogemm.matmul_fused(**operands | copies, beta=0.5, activation="gelu")
        result = isogemm.matmul_fused(**operands | changed, beta=0.5, activation="gelu")
        assert_bitwise_equal(result, expected, str(tuple(changed)))


@pytest.mark.parametrize("sizes", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0)], ids=str)
def test_empty(sizes):
    operands = _operands(EVERYTHING, *sizes, torch.float32, batch=(2,))
    with poisoned_allocations():
        result = isogemm.matmul_fused(**operands, beta=2.0, activation="relu")
        dropped = isogemm.matmul_fused(**operands, beta=2.0, activation="relu", dropout_p=0.5)
        x, weight = operands["a"], operands["b"].T
        gated = isogemm.linear(x, weight, weight_up=weight, activation="swiglu", residual=operands["residual"])
    torch.testing.assert_close(result, fused_form(**operands, beta=2.0, activation="relu"))
    assert dropped.shape == result.shape
    torch.testing.assert_close(gated, operands["residual"] + F.silu(x @ weight.T) * (x @ weight.T))


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
    """Of every bf16 number within an ulp, nearly always the nearest; far out, where 1 + erf cancels, as fp32 may."""
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
    """Of numbers over the whole range, exponents and all."""
    a = torch.cat([_every_pattern(torch.bfloat16).float(), make_data("wide", (65536, 1), seed=3, device=DEVICE)])
    a = torch.cat([a, _normal(65536, 1, dtype=torch.float32)])
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
        operands = _operands(names, m, 256, 200, dtype)
        result = isogemm.matmul_fused(**operands, **numbers, rounding="eager", precision=precision)
        assert_bitwise_equal(result, fused_form(**operands, **numbers, product=product), f"{m} rows")


@pytest.mark.parametrize("number", SHORT)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_eager_rounding_with_an_activation(activation, number):
    dtype, precision = NUMBERS[number]
    operands = _operands(("bias", "residual"), 130, 256, 200, dtype)
    result = isogemm.matmul_fused(**operands, activation=activation, rounding="eager", precision=precision)
    product = functools.partial(isogemm.mm, precision=precision)
    assert_bitwise_equal(result, fused_form(**operands, activation=activation, product=product))


@pytest.mark.parametrize("number", SHORT)
@pytest.mark.parametrize("activation", GATED)
def test_eager_rounding_of_gates(activation, number):
    dtype, precision = NUMBERS[number]
    shapes = (130, 256), (200, 256), (200, 256)
    x, weight, up = (_normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    operands = {"bias": _normal(200, seed=3, dtype=dtype), "bias_up": _normal(200, seed=4, dtype=dtype)}
    operands["residual"] = _normal(130, 200, seed=5, dtype=dtype)
    linear = functools.partial(isogemm.linear, precision=precision)
    result = linear(x, weight, weight_up=up, activation=activation, rounding="eager", **operands)
    assert_bitwise_equal(result, gated_form(x, weight, up, activation, linear=linear, **operands))


def test_rounded_once():
    """The 16-bit result is the fp32 one, rounded; a K up to which both are one walk, and nothing has a shorter form."""
    for tensors, options in COMBINATIONS.values():
        if options.get("activation") not in (None, "leaky_relu"):
            continue
        operands = _operands(tensors, 130, 1024, 200, torch.bfloat16)
        wide = isogemm.matmul_fused(**operands, **options, out_dtype=torch.float32)
        assert wide.dtype == torch.float32
        assert_bitwise_equal(isogemm.matmul_fused(**operands, **options), wide.bfloat16())


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_float32_operands_of_16_bit_products(out_dtype):
    """Scales, c and residual may be wider: they are not rounded on the way in."""
    operands = _operands((*EVERYTHING, "alpha", "beta"), 130, 256, 200, torch.bfloat16, extra=torch.float32)
    result = _fused(operands, activation="silu", out_dtype=out_dtype)
    wide = {name: each.float() for name, each in operands.items()}
    theirs = fused_form(**wide, activation="silu").to(result.dtype)
    reference = fused_form(**doubled(operands), activation="silu")
    assert_no_worse_than_torch(result, theirs, reference, factor=4 if out_dtype else 2)


def test_c_is_not_read_without_beta():
    operands = _operands(("bias",), 130, 256, 200, torch.bfloat16)
    expected = isogemm.matmul_fused(**operands, activation="relu")
    c = torch.full((130, 200), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    assert_bitwise_equal(isogemm.matmul_fused(**operands, c=c, beta=0.0, activation="relu"), expected)


def test_numbers_or_tensors():
    operands = _operands(("bias", "c"), 130, 256, 200, torch.bfloat16)
    expected = isogemm.matmul_fused(**operands, alpha=0.75, beta=-1.5, activation="tanh")
    for dtype in (torch.float32, torch.bfloat16):
        alpha, beta = (torch.tensor(number, dtype=dtype, device=DEVICE) for number in (0.75, -1.5))
        assert_bitwise_equal(isogemm.matmul_fused(**operands, alpha=alpha, beta=beta, activation="tanh"), expected)
        assert_bitwise_equal(isogemm.matmul_fused(**operands, alpha=alpha, beta=-1.5, activation="tanh"), expected)


# Dropout


def _mask(seed, rows, columns, p):
    """Of the first call after torch.manual_seed(seed), by the torch form."""
    torch.manual_seed(seed)
    return random.kept(new_seed(torch.device(DEVICE)), rows, columns, p)


@pytest.mark.parametrize(
    "sizes", [(1, 8, 4096), (17, 8, 1003), (300, 64, 384), (1000, 8, 65), (4096, 64, 512)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_masks_are_the_torch_form_s(sizes, dtype):
    m, k, n = sizes
    p, mask = 0.3, _mask(7, m, n, 0.3)
    x, weight = (torch.ones(shape, dtype=dtype, device=DEVICE) for shape in ((m, k), (n, k)))
    torch.manual_seed(7)
    result = isogemm.linear(x, weight, dropout_p=p)
    assert torch.equal(result != 0, mask)
    assert_bitwise_equal(result, torch.where(mask, k * random.scale(p), 0.0).to(dtype))
    torch.manual_seed(7)
    gated = isogemm.linear(x, weight, weight_up=weight, activation="reglu", dropout_p=p)
    assert torch.equal(gated != 0, mask)
    torch.manual_seed(7)
    again = isogemm.matmul_fused(x, weight.T, dropout_p=p, rounding="eager")
    assert torch.equal(again != 0, mask)


def test_dropout_statistics():
    p, m, n = 0.4, 2048, 4096
    x, weight = (torch.ones(shape, dtype=torch.bfloat16, device=DEVICE) for shape in ((m, 16), (n, 16)))
    torch.manual_seed(1)
    result = isogemm.linear(x, weight, dropout_p=p, out_dtype=torch.float32)
    kept = (result != 0).double()
    for rate, count in ((kept.mean(), m * n), (kept.mean(0), m), (kept.mean(1), n)):
        assert float((rate - (1 - p)).abs().max()) < 5.5 * (p * (1 - p) / count) ** 0.5
    assert float(result.double().mean()) == pytest.approx(16, rel=1e-3)
    assert float(result.double().var()) == pytest.approx(256 * p / (1 - p), rel=1e-2)
    assert float(result.max()) == pytest.approx(16 / (1 - p), rel=1e-4)


def test_dropout_is_of_the_activation_before_the_residual():
    operands = _operands(("bias", "residual"), 130, 256, 200, torch.bfloat16)
    mask = _mask(11, 130, 200, 0.25)
    torch.manual_seed(11)
    result = isogemm.matmul_fused(**operands, activation="gelu", dropout_p=0.25)
    assert_bitwise_equal(result[~mask], operands["residual"][~mask], "what is dropped is the residual alone")
    double = doubled(operands)
    value = fused_form(double["a"], double["b"], bias=double["bias"], activation="gelu")
    torch.testing.assert_close(result, (double["residual"] + mask * random.scale(0.25) * value).bfloat16())
    for p, expected in ((1.0, operands["residual"]), (0.0, isogemm.matmul_fused(**operands, activation="gelu"))):
        assert_bitwise_equal(isogemm.matmul_fused(**operands, activation="gelu", dropout_p=p), expected, f"p = {p}")


# Epilogues of the user's own


@triton.jit
def _wave(acc, col, row, first, second):
    return tl.sin(acc) * first + second * (col - row)


@triton.jit
def _where(acc, col, row):
    return acc + row * 100 + col


@triton.jit
def _clamped(acc, col, row, bound):
    return tl.minimum(tl.maximum(acc, -bound), bound)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(spec, "REGISTERED", {})
    register("wave", _wave, lambda acc, col, row, first, second: torch.sin(acc) * first + second * (col - row))
    register("where", _where, lambda acc, col, row: acc + row * 100 + col)
    register("clamped", _clamped, lambda acc, col, row, bound: torch.minimum(torch.maximum(acc, -bound), bound))


AUX = {"scalar": (), "one": (1,), "columns": (200,), "rows": (130, 1), "row of one": (1, 200), "matrix": (130, 200)}


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(AUX, 2)))
def test_an_epilogue_of_the_users(first, second):
    operands = _operands(("bias", "residual"), 130, 64, 200, torch.bfloat16)
    operands["a"] = operands["a"] / 8
    aux = [_normal(*AUX[name], seed=30 + i) for i, name in enumerate((first, second))]
    result = _fused(operands, epilogue="wave", aux=aux)
    col, row = torch.arange(200, device=DEVICE)[None, :], torch.arange(130, device=DEVICE)[:, None]

    def plain(operands, aux):
        z = operands["a"] @ operands["b"] + operands["bias"]
        return operands["residual"] + (torch.sin(z) * aux[0] + aux[1] * (col - row))

    reference = plain(doubled(operands), [each.double() for each in aux])
    assert_no_worse_than_torch(result, plain(operands, aux), reference)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("number", SHORT)
def test_epilogues_of_the_users_in_a_batch(number):
    dtype, precision = NUMBERS[number]
    zeros = torch.zeros(2, 30, 16, dtype=dtype, device=DEVICE)
    result = isogemm.matmul_fused(
        zeros, torch.zeros(16, 24, dtype=dtype, device=DEVICE), epilogue="where",
        out_dtype=torch.float32, precision=precision,
    )  # fmt: skip
    expected = torch.arange(60, device=DEVICE).view(2, 30, 1) * 100.0 + torch.arange(24, device=DEVICE)
    assert_bitwise_equal(result, expected)
    operands = _operands(("bias",), 30, 64, 48, dtype, batch=(2,))
    for shape in ((), (48,), (30, 1), (2, 30, 48), (2, 1, 1)):
        bound = _normal(*shape, seed=8, dtype=dtype).abs()
        result = isogemm.matmul_fused(**operands, epilogue="clamped", aux=[bound], precision=precision)
        plain = isogemm.matmul_fused(**operands, precision=precision)
        assert_bitwise_equal(result, torch.minimum(torch.maximum(plain, -bound), bound), f"bound {shape}")
        for layout in ("strided", "sliced") if shape else ():
            view = isogemm.matmul_fused(
                **operands, epilogue="clamped", aux=[with_layout(bound, layout)], precision=precision
            )
            assert_bitwise_equal(view, result, layout)


@pytest.mark.usefixtures("registry")
def test_registered_again_it_replaces_the_former():
    """At once, though a kernel of the former was compiled."""
    operands = _operands((), 130, 64, 200, torch.bfloat16)
    before = isogemm.matmul_fused(**operands, epilogue="where")
    register("where", _clamped, lambda acc, col, row, bound: torch.minimum(torch.maximum(acc, -bound), bound))
    bound = torch.ones((), dtype=torch.bfloat16, device=DEVICE)
    after = isogemm.matmul_fused(**operands, epilogue="where", aux=[bound])
    assert_bitwise_equal(after, isogemm.matmul_fused(**operands).clamp(-1, 1))
    assert not torch.equal(before, after)


# Two layers


@pytest.mark.parametrize(
    ("activation", "number"),
    [*((name, "bf16") for name in (*ACTIVATIONS, *GATED)), *itertools.product(["gelu", "swiglu"], list(NUMBERS)[1:])],
)
def test_mlp_no_worse_than_torch(activation, number):
    dtype, precision = NUMBERS[number]
    _set_torch(precision)
    m, k, h, n = 130, 128, 384, 192
    shapes = {"weight": (h, k), "bias": (h,)} | ({"weight_up": (h, k), "bias_up": (h,)} if activation in GATED else {})
    first = {name: _normal(*shape, seed=i, dtype=dtype) / k**0.5 for i, (name, shape) in enumerate(shapes.items())}
    second = {"weight_down": _normal(n, h, seed=8, dtype=dtype) / h**0.5, "bias_down": _normal(n, seed=9, dtype=dtype)}
    second["residual"] = _normal(m, n, seed=10, dtype=dtype)
    x = _normal(m, k, seed=11, dtype=dtype)

    def plain(x, first, second):
        if activation in GATED:
            gated = {name: first[name] for name in ("bias", "bias_up")}
            hidden = gated_form(x, first["weight"], first["weight_up"], activation, **gated)
        else:
            hidden = ACTIVATIONS[activation](F.linear(x, first["weight"], first["bias"]))
        return second["residual"] + F.linear(hidden, second["weight_down"], second["bias_down"])

    with poisoned_allocations(), isogemm.dispatch_log() as log:
        result = mlp(x, **first, **second, activation=activation, precision=precision)
    assert [entry.path for entry in log] == ["gemm", "gemm"]
    reference = plain(x.double(), doubled(first), doubled(second))
    assert_no_worse_than_torch(result, plain(x, first, second), reference)
    hidden = isogemm.linear(x, **first, activation=activation, precision=precision)
    down = {"bias": second["bias_down"], "residual": second["residual"], "precision": precision}
    assert_bitwise_equal(result, isogemm.linear(hidden, second["weight_down"], **down), "two calls of linear")


@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_shape_stride_dtype_and_epilogue(data):
    m, n, k = (data.draw(strategies.sizes(300), label=name) for name in "mnk")
    dtype = data.draw(strategies.float_dtypes(), label="dtype")
    names = data.draw(st.sets(st.sampled_from(EVERYTHING)), label="operands")
    operands = _operands(names, m, k, n, dtype)
    for name in sorted(operands):
        choices = [
            each for each in LAYOUTS if each != "broadcast" and (each != "transposed" or operands[name].ndim > 1)
        ]
        operands[name] = with_layout(operands[name], data.draw(st.sampled_from(choices), label=name))
    options = {"beta": 2.0} if "c" in names else {}
    options["activation"] = data.draw(st.sampled_from([None, *ACTIVATIONS]), label="activation")
    with poisoned_allocations():
        result = isogemm.matmul_fused(**operands, **options)
    reference = fused_form(**doubled(operands), **options)
    sizes = {name: each.double().abs() for name, each in operands.items()}
    pre = fused_form(**sizes, **options | {"activation": None})
    info = torch.finfo(dtype)
    # k fp32 sums (tensor cores truncate: 2^-22 each) and ten of the epilogue, one rounding; relu2 is 2 |z| steep.
    steep = 2 * pre if options["activation"] == "relu2" else 1.2
    allowed = (k + 10) * 2**-22 * pre * steep + 2 * info.eps * reference.abs() + info.eps * info.smallest_normal + 1e-12
    finite = reference.abs() < info.max / 2
    assert bool(((result.double() - reference).abs() <= allowed)[finite].all())


@pytest.mark.alone
def test_output_and_residual_past_32_bits():
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("less than 30 GiB of GPU memory are free")
    m, n = 2**15 + 128, 2**16 + 64
    x, weight = _normal(m, 64), _normal(n, 64, seed=1)
    residual = torch.zeros(m, n, dtype=torch.bfloat16, device=DEVICE)
    residual[-256:] = _normal(256, n, seed=2)
    linear = functools.partial(isogemm.linear, weight=weight, activation="gelu")
    result = linear(x, residual=residual)
    for rows in (slice(0, 256), slice(-256, None)):
        assert_bitwise_equal(result[rows], linear(x[rows], residual=residual[rows]), f"rows {rows}")
    del result, residual
    torch.cuda.empty_cache()
