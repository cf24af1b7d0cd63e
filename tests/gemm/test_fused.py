"""Products with an epilogue on the CPU: values, order of operations, sizes, strides, gates."""

import functools

import hypothesis
import pytest
import strategies
import torch
from cpu_tensors import CONTRACT, DTYPES, HALVES, integers, normal
from fused_cases import COMBINATIONS, fused_operands, gated_operands
from fused_forms import doubled, fused_form, gated_form
from hypothesis import strategies as st
from tensor_cases import ODD_SIZES
from torch.nn import functional as F

import isogemm
from isogemm.verify.activations import ACTIVATION_FORMS as ACTIVATIONS
from isogemm.verify.activations import GATE_FORMS as GATED
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import with_layout
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cpu"


def _double(value):
    return value.double() if isinstance(value, torch.Tensor) else value


def _assert_no_worse(result, operands, **options):
    theirs = fused_form(**operands, **options).to(result.dtype)
    reference = fused_form(**doubled(operands), **options)
    assert_no_worse_than_torch(result, theirs, reference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_no_worse_than_torch(activation, dtype):
    operands = fused_operands(("bias",), 33, 100, 47, dtype)
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
    operands = fused_operands(tensors, 33, 100, 47, dtype)
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
    operands = fused_operands(tensors, *sizes, dtype)
    with poisoned_allocations():
        result = isogemm.matmul_fused(**operands, **options)
    _assert_no_worse(result, operands, **options)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 3, 7), (2, 1, 3, 7)], ids=str)
def test_leading_sizes(shape, dtype):
    """Exactly, of whole numbers; every operand of x's own leading sizes, a vector's being none."""
    x, weight = integers(*shape, dtype=dtype), integers(5, 7, seed=1, dtype=dtype)
    rows = shape[:-1]
    operands = {"c": integers(*rows, 5, seed=2), "residual": integers(*rows, 5, seed=3)}
    operands |= {"row_scale": integers(*rows, seed=4), "col_scale": integers(5, seed=5)}
    operands = {name: tensor.to(dtype) for name, tensor in operands.items()}
    result = isogemm.linear(x, weight, activation="relu", beta=2.0, **operands)
    expected = fused_form(x.double(), weight.double().T, activation="relu", beta=2.0, **doubled(operands))
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=0)
    up = integers(5, 7, seed=6, dtype=dtype)
    gated = isogemm.linear(x, weight, weight_up=up, activation="reglu", residual=operands["residual"])
    expected = gated_form(x.double(), weight.double(), up.double(), "reglu", residual=operands["residual"].double())
    torch.testing.assert_close(gated.double(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_order_of_operations(dtype):
    """residual + act(alpha * row_scale * col_scale * (a @ b) + beta * c + bias), exactly: all are whole numbers."""
    names = ("bias", "c", "residual", "row_scale", "col_scale")
    operands = fused_operands(names, 9, 4, 11, dtype, make=integers)
    for bias_dim in (-1, -2):
        if bias_dim == -2:
            operands |= {"bias": integers(9, seed=20, dtype=dtype), "bias_dim": -2}
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
    operands = fused_operands(("bias", "c"), 17, 33, 9, dtype)
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
    operands = fused_operands(("bias",), 17, 33, 9, dtype)
    expected = isogemm.matmul_fused(**operands)
    c = torch.full((17, 9), torch.nan, dtype=dtype)
    assert_bitwise_equal(isogemm.matmul_fused(**operands, c=c, beta=0), expected)
    assert_bitwise_equal(isogemm.linear(operands["a"], operands["b"].T, operands["bias"], c=c, beta=0.0), expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_float32_operands_of_16_bit_products(out_dtype, dtype):
    """Scales, c and residual may be wider: they are not rounded on the way in."""
    names = ("bias", "c", "residual", "row_scale", "col_scale", "alpha", "beta")
    operands = fused_operands(names, 33, 100, 47, dtype, extra=torch.float32)
    result = isogemm.matmul_fused(**operands, activation="silu", out_dtype=out_dtype)
    assert result.dtype == (out_dtype or dtype)
    wide = {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in operands.items()}
    theirs = fused_form(**wide, activation="silu").to(result.dtype)
    reference = fused_form(**doubled(operands), activation="silu")
    # An fp32 result of 16-bit products is one walk: within 4 times torch's error, as isogemm.matmul's.
    assert_no_worse_than_torch(result, theirs, reference, factor=4 if out_dtype else 2)


LAYOUTS = ["transposed", "sliced", "strided", "misaligned"]


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_do_not_follow_strides(layout, dtype):
    """What lies around the views is NaN."""
    tensors, options = COMBINATIONS["all, gelu_tanh"]
    operands = fused_operands(tensors, 33, 100, 47, dtype)
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
    operands = fused_operands(("bias", "c", "residual", "row_scale", "col_scale"), 8, 20, 15, dtype, batch=(3,))
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
    operands = fused_operands(
        ("bias", "c", "residual", "row_scale", "col_scale"), *sizes, dtype, make=integers, batch=(2,)
    )
    expected = fused_form(**operands, beta=2.0, activation="relu")
    with poisoned_allocations():
        result = isogemm.matmul_fused(**operands, beta=2.0, activation="relu")
        dropped = isogemm.matmul_fused(**operands, beta=2.0, activation="relu", dropout_p=0.5)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert dropped.shape == expected.shape
    x, weight = operands["a"], operands["b"].T
    gated = isogemm.linear(x, weight, weight_up=weight, activation="swiglu", residual=operands["residual"])
    torch.testing.assert_close(gated, operands["residual"] + F.silu(x @ weight.T) * (x @ weight.T))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("names", [(), ("bias",), ("bias_up",), ("bias", "bias_up", "residual")], ids=str)
def test_gates_no_worse_than_torch(names, activation, dtype):
    x, weight, up = gated_operands(dtype)
    shapes = {"bias": (47,), "bias_up": (47,), "residual": (33, 47)}
    operands = {name: normal(*shapes[name], seed=9 + i, dtype=dtype) for i, name in enumerate(names)}
    with poisoned_allocations():
        result = isogemm.linear(x, weight, weight_up=up, activation=activation, **operands)
    theirs = gated_form(x, weight, up, activation, **operands)
    reference = gated_form(x.double(), weight.double(), up.double(), activation, **doubled(operands))
    assert_no_worse_than_torch(result, theirs, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_two_weights_wherever_they_lie(dtype):
    """Before or behind one another, in one buffer, interleaved, misaligned, of different strides: the same bits."""
    x, weight, up = gated_operands(dtype)
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
    operands = fused_operands(("bias",), 17, 33, 9, torch.bfloat16)
    with isogemm.dispatch_log() as log:
        isogemm.matmul_fused(**operands, activation="gelu")
    assert [entry.path for entry in log] == ["cpu"]
    with isogemm.dispatch_log() as log:
        isogemm.matmul_fused(operands["a"].double(), operands["b"].double(), activation="gelu")
    assert [entry.path for entry in log] == ["torch"]


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_any_precision_is_ieee_on_the_cpu(precision):
    operands = fused_operands(("bias",), 17, 33, 9, torch.float32)
    expected = isogemm.matmul_fused(**operands, activation="gelu")
    assert_bitwise_equal(isogemm.matmul_fused(**operands, activation="gelu", precision=precision), expected)
