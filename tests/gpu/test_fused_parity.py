"""Fused products on a GPU against fp64 and beside torch: epilogues, dtypes, sizes, strides, gates, MLPs."""

import functools
import itertools

import hypothesis
import pytest
import strategies
import torch
from fused_forms import doubled, fused_form, gated_form
from fused_gpu_cases import COMBINATIONS, EVERYTHING, NUMBERS, SHORT, fused_operands, normal, run_fused
from hypothesis import strategies as st
from torch.nn import functional as F

import isogemm
from isogemm.gemm.api import mlp
from isogemm.verify.activations import ACTIVATION_FORMS as ACTIVATIONS
from isogemm.verify.activations import GATE_FORMS as GATED
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import LAYOUTS, with_layout
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cuda"


def _set_torch(precision):
    """What torch computes beside us; put back after the test."""
    torch.backends.cuda.matmul.fp32_precision = precision or "ieee"


def _assert_no_worse(result, operands, **options):
    theirs = fused_form(**operands, **options).to(result.dtype)
    assert_no_worse_than_torch(result, theirs, fused_form(**doubled(operands), **options))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_no_worse_than_torch(activation, number):
    dtype, precision = NUMBERS[number]
    _set_torch(precision)
    for m, k in ((200, 512), (16, 65))[: 2 if number in SHORT else 1]:
        operands = fused_operands(("bias",), m, k, 320, dtype)
        operands["a"] = operands["a"] / k**0.5  # about 1, where activations bend
        result = run_fused(operands, activation=activation, precision=precision)
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
    operands = fused_operands(tensors, 130, 256, 200, dtype)
    _assert_no_worse(run_fused(operands, **options, precision=precision), operands, **options)


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
    operands = fused_operands(EVERYTHING, m, k, n, dtype)
    options = {"alpha": 0.5, "beta": 2.0, "activation": "gelu"}
    _assert_no_worse(run_fused(operands, **options, precision=precision), operands, **options)


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_sizes_of_gates(case):
    number, m, k, n = case
    dtype, precision = NUMBERS[number]
    _set_torch(precision)
    x, weight, up = (normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(((m, k), (n, k), (n, k))))
    operands = {"bias": normal(n, seed=3, dtype=dtype), "bias_up": normal(n, seed=4, dtype=dtype)}
    operands["residual"] = normal(m, n, seed=5, dtype=dtype)
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
        normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(((130, 256), (200, 256), (200, 256)))
    )
    shapes = {"bias": (200,), "bias_up": (200,), "residual": (130, 200)}
    operands = {name: normal(*shapes[name], seed=9 + i, dtype=dtype) for i, name in enumerate(names)}
    with poisoned_allocations():
        result = isogemm.linear(x, weight, weight_up=up, activation=activation, precision=precision, **operands)
    reference = gated_form(x.double(), weight.double(), up.double(), activation, **doubled(operands))
    assert_no_worse_than_torch(result, gated_form(x, weight, up, activation, **operands), reference)


@pytest.mark.parametrize("m", [1, 17, 130, 600])
def test_two_weights_wherever_they_lie(m):
    """Before or behind one another, in one buffer, interleaved, misaligned, of different strides: the same bits."""
    n, k = 192, 256
    x, weight, up = (normal(*shape, seed=i) for i, shape in enumerate(((m, k), (n, k), (n, k))))
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
    operands = fused_operands(EVERYTHING, m, 256, 160, torch.bfloat16)
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
    operands = fused_operands(EVERYTHING, 40, 64, 48, torch.bfloat16, batch=(3,))
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
    operands = fused_operands(EVERYTHING, *sizes, torch.float32, batch=(2,))
    with poisoned_allocations():
        result = isogemm.matmul_fused(**operands, beta=2.0, activation="relu")
        dropped = isogemm.matmul_fused(**operands, beta=2.0, activation="relu", dropout_p=0.5)
        x, weight = operands["a"], operands["b"].T
        gated = isogemm.linear(x, weight, weight_up=weight, activation="swiglu", residual=operands["residual"])
    torch.testing.assert_close(result, fused_form(**operands, beta=2.0, activation="relu"))
    assert dropped.shape == result.shape
    torch.testing.assert_close(gated, operands["residual"] + F.silu(x @ weight.T) * (x @ weight.T))


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_float32_operands_of_16_bit_products(out_dtype):
    """Scales, c and residual may be wider: they are not rounded on the way in."""
    operands = fused_operands((*EVERYTHING, "alpha", "beta"), 130, 256, 200, torch.bfloat16, extra=torch.float32)
    result = run_fused(operands, activation="silu", out_dtype=out_dtype)
    wide = {name: each.float() for name, each in operands.items()}
    theirs = fused_form(**wide, activation="silu").to(result.dtype)
    reference = fused_form(**doubled(operands), activation="silu")
    assert_no_worse_than_torch(result, theirs, reference, factor=4 if out_dtype else 2)


def test_c_is_not_read_without_beta():
    operands = fused_operands(("bias",), 130, 256, 200, torch.bfloat16)
    expected = isogemm.matmul_fused(**operands, activation="relu")
    c = torch.full((130, 200), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    assert_bitwise_equal(isogemm.matmul_fused(**operands, c=c, beta=0.0, activation="relu"), expected)


def test_numbers_or_tensors():
    operands = fused_operands(("bias", "c"), 130, 256, 200, torch.bfloat16)
    expected = isogemm.matmul_fused(**operands, alpha=0.75, beta=-1.5, activation="tanh")
    for dtype in (torch.float32, torch.bfloat16):
        alpha, beta = (torch.tensor(number, dtype=dtype, device=DEVICE) for number in (0.75, -1.5))
        assert_bitwise_equal(isogemm.matmul_fused(**operands, alpha=alpha, beta=beta, activation="tanh"), expected)
        assert_bitwise_equal(isogemm.matmul_fused(**operands, alpha=alpha, beta=-1.5, activation="tanh"), expected)


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
    first = {name: normal(*shape, seed=i, dtype=dtype) / k**0.5 for i, (name, shape) in enumerate(shapes.items())}
    second = {"weight_down": normal(n, h, seed=8, dtype=dtype) / h**0.5, "bias_down": normal(n, seed=9, dtype=dtype)}
    second["residual"] = normal(m, n, seed=10, dtype=dtype)
    x = normal(m, k, seed=11, dtype=dtype)

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
    operands = fused_operands(names, m, k, n, dtype)
    for name in sorted(operands):
        choices = [each for each in LAYOUTS if each != "transposed" or operands[name].ndim > 1]
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
    x, weight = normal(m, 64), normal(n, 64, seed=1)
    residual = torch.zeros(m, n, dtype=torch.bfloat16, device=DEVICE)
    residual[-256:] = normal(256, n, seed=2)
    linear = functools.partial(isogemm.linear, weight=weight, activation="gelu")
    result = linear(x, residual=residual)
    for rows in (slice(0, 256), slice(-256, None)):
        assert_bitwise_equal(result[rows], linear(x[rows], residual=residual[rows]), f"rows {rows}")
    del result, residual
    torch.cuda.empty_cache()
