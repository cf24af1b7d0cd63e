"""isogemm.mm, matmul and linear on the CPU: torch's semantics, accuracy, the errors, any strides."""

import hypothesis
import pytest
import strategies
import torch
from cpu_tensors import CONTRACT, DTYPES, HALVES, integers
from hypothesis import strategies as st
from nonfinite import assert_same_nonfinite
from tensor_cases import ODD_SIZES
from torch.nn import functional as F

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data, make_operands, with_layout
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cpu"


def _assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def _exact(a, b):
    """The product in fp64, and |A| |B|, the natural size of an element's rounding error."""
    a, b = a.double(), b.double()
    return a @ b, a.abs() @ b.abs()


MATMULS = [  # shapes of a and b
    ((4,), (4,)),
    ((3, 4), (4,)),
    ((4,), (4, 5)),
    ((3, 4), (4, 5)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 4, 5)),
    ((2, 3, 4), (4, 5)),
    ((3, 4), (2, 4, 5)),
    ((2, 3, 4), (2, 4, 5)),
    ((1, 3, 4), (2, 4, 5)),
    ((2, 3, 4), (1, 4, 5)),
    ((2, 1, 3, 4), (4, 5)),
    ((2, 3, 1, 4), (4,)),
    ((4,), (2, 3, 4, 1)),
    ((2, 1, 3, 4), (6, 4, 5)),
    ((2, 1, 3, 4), (1, 6, 4, 5)),
    ((1, 1, 3, 4), (2, 6, 4, 5)),
    ((2, 1, 2, 1, 3, 4), (3, 1, 2, 4, 5)),
    ((1,), (1,)),
    ((1, 1), (1, 1)),
    ((1, 17), (17, 1)),
    ((17, 1), (1, 17)),
]
EMPTY_MATMULS = [
    ((0,), (0,)),
    ((3, 0), (0,)),
    ((0, 4), (4,)),
    ((4,), (4, 0)),
    ((0,), (0, 5)),
    ((0, 4), (4, 5)),
    ((3, 4), (4, 0)),
    ((3, 0), (0, 5)),
    ((0, 0), (0, 0)),
    ((0, 3, 4), (4, 5)),
    ((2, 0, 4), (4, 5)),
    ((2, 3, 0), (0, 5)),
    ((2, 3, 0), (0,)),
    ((0, 3, 4), (1, 4, 5)),
    ((1, 3, 4), (0, 4, 5)),
    ((2, 3, 4), (2, 4, 0)),
    ((2, 3, 0), (2, 0, 5)),
    ((0, 1, 3, 4), (6, 4, 5)),
    ((2, 0, 3, 4), (2, 1, 4, 5)),
]


def _shapes_id(shapes):
    return "@".join("x".join(map(str, shape)) for shape in shapes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", MATMULS + EMPTY_MATMULS, ids=_shapes_id)
def test_matmul_is_torch_matmul(shapes, dtype):
    a, b = (integers(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes))
    with poisoned_allocations():
        result = isogemm.matmul(a, b)
    expected = torch.matmul(a, b)
    _assert_equal(result, expected)
    assert result.is_contiguous()
    grad = integers(*expected.shape, seed=2, dtype=dtype)
    with poisoned_allocations():
        actual = torch.autograd.grad(result, (a, b), grad)
    for got, exact in zip(actual, torch.autograd.grad(expected, (a, b), grad), strict=True):
        _assert_equal(got, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("x_shape", "n"),
    [
        *[((7,), 5), ((3, 7), 5), ((2, 3, 7), 5), ((2, 1, 3, 7), 5), ((3, 1), 1)],
        *[((0, 7), 5), ((2, 0, 7), 5), ((3, 0), 5), ((0,), 5), ((3, 7), 0), ((0, 0), 0)],
    ],
    ids=str,
)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "plain"])
def test_linear_is_torch_linear(x_shape, n, with_bias, dtype):
    k = x_shape[-1]
    x, weight = integers(*x_shape, seed=0, dtype=dtype), integers(n, k, seed=1, dtype=dtype)
    inputs = [x, weight] + [integers(n, seed=2, dtype=dtype)] * with_bias
    inputs = [tensor.requires_grad_() for tensor in inputs]
    with poisoned_allocations():
        result = isogemm.linear(*inputs)
    expected = F.linear(*inputs)
    _assert_equal(result, expected)
    assert result.is_contiguous()
    grad = integers(*expected.shape, seed=3, dtype=dtype)
    with poisoned_allocations():
        actual = torch.autograd.grad(result, inputs, grad)
    for got, exact in zip(actual, torch.autograd.grad(expected, inputs, grad), strict=True):
        _assert_equal(got, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(3, 4, 5), (0, 4, 5), (3, 0, 5), (3, 4, 0), (1, 1, 1)], ids=str)
def test_mm_is_torch_mm(sizes, dtype):
    m, k, n = sizes
    a, b = integers(m, k, seed=0, dtype=dtype), integers(k, n, seed=1, dtype=dtype)
    with poisoned_allocations():
        result = isogemm.mm(a, b)
    _assert_equal(result, torch.mm(a, b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_operand_with_itself(dtype):
    """One tensor in both places takes both gradients."""
    x = integers(5, 5, dtype=dtype).requires_grad_()
    isogemm.matmul(x, x).sum().backward()
    expected = x.detach().clone().requires_grad_()
    torch.matmul(expected, expected).sum().backward()
    _assert_equal(x.grad, expected.grad)


# Not M = 1: there torch sums in several lanes, more exactly than one walk can, and our bits are those of any other M.
ODD = [(m, k, n) for k in ODD_SIZES for m, n in ((17, 127), (100, 33), (65, 63))]


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("sizes", ODD, ids=lambda sizes: "x".join(map(str, sizes)))
def test_odd_sizes_no_worse_than_torch(sizes, dtype):
    m, k, n = sizes
    a, b = make_operands("normal", (m, k), (k, n), seed=0, dtype=dtype, device=DEVICE)
    reference, scale = _exact(a, b)
    with poisoned_allocations():
        result = isogemm.mm(a, b)
    assert_no_worse_than_torch(result, torch.mm(a, b), reference, scale=scale)


@pytest.mark.parametrize("kind", ["wide", "cancelling"])
@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_hard_data_no_worse_than_torch(kind, dtype):
    a, b = make_operands(kind, (33, 1000), (1000, 65), seed=0, dtype=dtype, device=DEVICE)
    reference, scale = _exact(a, b)
    assert_no_worse_than_torch(isogemm.matmul(a, b), torch.matmul(a, b), reference, scale=scale)
    bias = make_data("normal", (65,), seed=1, dtype=dtype, device=DEVICE)
    result, theirs = isogemm.linear(a, b.T, bias), F.linear(a, b.T, bias)
    assert_no_worse_than_torch(result, theirs, reference + bias.double(), scale=scale + bias.double().abs())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("k", [17, 1000, 4096])
def test_float32_output_of_16_bit_inputs(k, dtype):
    """Within 4 times torch's error, and the very sum that a 16-bit output rounds, once."""
    a, b = make_operands("normal", (33, k), (k, 65), seed=0, dtype=dtype, device=DEVICE)
    bias = make_data("normal", (65,), seed=1, dtype=dtype, device=DEVICE)
    reference, scale = _exact(a, b)
    wide = isogemm.matmul(a, b, out_dtype=torch.float32)
    assert_no_worse_than_torch(wide, a.float() @ b.float(), reference, scale=scale, factor=4)
    assert_bitwise_equal(isogemm.mm(a, b, out_dtype=torch.float32), wide)
    assert_bitwise_equal(isogemm.matmul(a, b), wide.to(dtype), "one rounding")
    biased = isogemm.linear(a, b.T, bias, out_dtype=torch.float32)
    assert_bitwise_equal(biased, wide + bias.float(), "the bias is added in fp32")
    assert_bitwise_equal(isogemm.linear(a, b.T, bias), biased.to(dtype), "one rounding after the bias")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_dtype_of_the_inputs_is_the_default(dtype):
    a, b = integers(3, 4, dtype=dtype), integers(4, 5, dtype=dtype)
    assert_bitwise_equal(isogemm.matmul(a, b, out_dtype=dtype), isogemm.matmul(a, b))
    assert_bitwise_equal(isogemm.linear(a, b.T, out_dtype=dtype), isogemm.matmul(a, b))


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_any_precision_is_ieee_on_the_cpu(precision):
    a, b = make_operands("normal", (17, 100), (100, 9), seed=0)
    expected = isogemm.matmul(a, b)
    assert_bitwise_equal(isogemm.matmul(a, b, precision=precision), expected)
    assert_bitwise_equal(isogemm.mm(a, b, precision=precision), expected)
    assert_bitwise_equal(isogemm.linear(a, b.T, precision=precision), expected)


def test_float64_is_torch():
    a, b = make_operands("normal", (2, 17, 33), (33, 9), seed=0, dtype=torch.float64)
    bias = make_data("normal", (9,), seed=1, dtype=torch.float64)
    torch.testing.assert_close(isogemm.matmul(a, b), torch.matmul(a, b))
    torch.testing.assert_close(isogemm.linear(a, b.T, bias), F.linear(a, b.T, bias))


X, W, BIAS = torch.ones(3, 4), torch.ones(5, 4), torch.ones(5)
WRONG = {
    # name: (function, arguments, keywords, error, what the message starts with, what it also says)
    "matmul a no tensor": ("matmul", ([1.0], W.T), {}, TypeError, "a ", "list"),
    "matmul b no tensor": ("matmul", (X, None), {}, TypeError, "b ", "NoneType"),
    "matmul a scalar": ("matmul", (torch.tensor(1.0), X), {}, ValueError, "a ", "no dimensions"),
    "matmul b scalar": ("matmul", (X, torch.tensor(1.0)), {}, ValueError, "b ", "no dimensions"),
    "matmul k": ("matmul", (X, W), {}, ValueError, "a and b ", "4.*5"),
    "matmul k of vectors": ("matmul", (X[0], BIAS), {}, ValueError, "a and b ", "4.*5"),
    "matmul k of matrix and vector": ("matmul", (X, BIAS), {}, ValueError, "a and b ", "4.*5"),
    "matmul batches": ("matmul", (torch.ones(2, 3, 4), torch.ones(3, 4, 5)), {}, ValueError, "a .*b ", "broadcast"),
    "matmul batch of 0": ("matmul", (torch.ones(0, 3, 4), torch.ones(3, 4, 5)), {}, ValueError, "a .*b ", "broadcast"),
    "matmul dtypes": ("matmul", (X, W.T.half()), {}, (TypeError, ValueError), "a and b ", "float32.*float16"),
    "matmul devices": ("matmul", (X, W.T.to("meta")), {}, ValueError, "a and b ", "cpu.*meta"),
    "mm rank of a": ("mm", (X[None], W.T), {}, ValueError, "a ", r"\[1, 3, 4\]"),
    "mm rank of b": ("mm", (X, W[0]), {}, ValueError, "b ", r"\[4\]"),
    "mm a no tensor": ("mm", (None, W.T), {}, TypeError, "a ", "NoneType"),
    "mm k": ("mm", (X, W), {}, ValueError, "a and b ", "4.*5"),
    "mm dtypes": ("mm", (X.bfloat16(), W.T), {}, (TypeError, ValueError), "a and b ", "bfloat16.*float32"),
    "mm devices": ("mm", (X.to("meta"), W.T), {}, ValueError, "a and b ", "meta.*cpu"),
    "linear x no tensor": ("linear", ("x", W), {}, TypeError, "x ", "str"),
    "linear x scalar": ("linear", (torch.tensor(1.0), W), {}, ValueError, "x ", "no dimensions"),
    "linear weight no tensor": ("linear", (X, W.tolist()), {}, TypeError, "weight ", "list"),
    "linear weight rank": ("linear", (X, W[0]), {}, ValueError, "weight ", r"\[4\]"),
    "linear weight rank 3": ("linear", (X, W[None]), {}, ValueError, "weight ", r"\[1, 5, 4\]"),
    "linear k": ("linear", (X, W.T), {}, ValueError, "x and weight ", "4.*5"),
    "linear dtypes": ("linear", (X, W.half()), {}, (TypeError, ValueError), "x and weight ", "float32.*float16"),
    "linear devices": ("linear", (X, W.to("meta")), {}, ValueError, "x and weight ", "cpu.*meta"),
    "linear bias no tensor": ("linear", (X, W, 1.0), {}, TypeError, "bias ", "float"),
    "linear bias rank": ("linear", (X, W, BIAS[None]), {}, ValueError, "bias ", r"\[1, 5\]"),
    "linear bias size": ("linear", (X, W, BIAS[:4]), {}, ValueError, ".*bias ", "4"),
    "linear bias of one": ("linear", (X, W, BIAS[:1]), {}, ValueError, ".*bias ", "1"),
    "linear bias dtype": ("linear", (X, W, BIAS.half()), {}, (TypeError, ValueError), ".*bias ", "float16"),
    "linear bias device": ("linear", (X, W, BIAS.to("meta")), {}, ValueError, ".*bias ", "meta"),
}
for _name, _arguments in {"matmul": (X, W.T), "mm": (X, W.T), "linear": (X, W)}.items():
    _first = "x" if _name == "linear" else "a"
    for _dtype in (torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        _cast = tuple(t.to(_dtype) for t in _arguments)
        WRONG[f"{_name} of {_dtype}"] = (_name, _cast, {}, (TypeError, ValueError), f"{_first} ", str(_dtype))
    for _out in (torch.float16, torch.bfloat16, torch.float64, torch.int32):
        _keywords = {"out_dtype": _out}
        WRONG[f"{_name} to {_out}"] = (_name, _arguments, _keywords, (TypeError, ValueError), "out_dtype ", str(_out))
    _halves = tuple(t.bfloat16() for t in _arguments)
    WRONG[f"{_name} between halves"] = (
        _name, _halves, {"out_dtype": torch.float16}, (TypeError, ValueError), "out_dtype ", "float16",
    )  # fmt: skip
    WRONG[f"{_name} out_dtype no dtype"] = (
        _name, _halves, {"out_dtype": "float32"}, (TypeError, ValueError), "out_dtype ", "float32",
    )  # fmt: skip
    WRONG[f"{_name} precision unknown"] = (_name, _arguments, {"precision": "fp8"}, ValueError, "precision ", "fp8")
    for _dtype in (torch.bfloat16, torch.float16, torch.float64):
        _cast = tuple(t.to(_dtype) for t in _arguments)
        WRONG[f"{_name} precision of {_dtype}"] = (
            _name, _cast, {"precision": "tf32"}, ValueError, "precision ", str(_dtype),
        )  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    """The message names the argument and what came."""
    function, arguments, keywords, error, start, says = WRONG[name]
    with pytest.raises(error, match=f"^{start}.*{says}"):
        getattr(isogemm, function)(*arguments, **keywords)


C_WITHOUT_BETA = {  # name: (call with c, a and b of the product)
    "linear": (isogemm.linear, (X, W), (X, W.T)),
    "linear of a row": (isogemm.linear, (X[0], W), (X[0], W.T)),
    "matmul_fused": (isogemm.matmul_fused, (X, W.T), (X, W.T)),
    "compiled": (torch.compile(isogemm.linear, backend="aot_eager", fullgraph=True), (X, W), (X, W.T)),
}


@pytest.mark.parametrize("name", C_WITHOUT_BETA)
def test_c_without_beta_is_added(name):
    """As torch.addmm's input is, whose beta is 1; its gradient as well."""
    function, arguments, (a, b) = C_WITHOUT_BETA[name]
    c = integers(*(a @ b).shape, seed=5).requires_grad_()
    result = function(*arguments, c=c)
    _assert_equal(result, a @ b + c)
    result.sum().backward()
    _assert_equal(c.grad, torch.ones_like(c))
    _assert_equal(function(*arguments, c=c, alpha=2), 2 * (a @ b) + c)
    _assert_equal(function(*arguments, c=c, beta=0), a @ b)


def test_c_of_a_gated_activation_without_beta():
    with pytest.raises(ValueError, match="c does not go with the gated activation 'swiglu'"):
        isogemm.linear(X, W, weight_up=W, activation="swiglu", c=X @ W.T)


@pytest.mark.parametrize("function", [isogemm.mm, isogemm.matmul])
def test_options_are_keywords(function):
    with pytest.raises(TypeError):
        function(X, W.T, torch.float32)


LAYOUTS = ["contiguous", "transposed", "sliced", "strided", "misaligned"]


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("a_layout", LAYOUTS)
@pytest.mark.parametrize("b_layout", LAYOUTS)
def test_bits_do_not_follow_strides(a_layout, b_layout, dtype):
    """What lies around the views is NaN."""
    a, b = make_operands("normal", (33, 100), (100, 47), seed=0, dtype=dtype, device=DEVICE)
    expected = isogemm.matmul(a, b)
    a, b = with_layout(a, a_layout), with_layout(b, b_layout)
    with poisoned_allocations():
        assert_bitwise_equal(isogemm.mm(a, b), expected)
        assert_bitwise_equal(isogemm.matmul(a, b), expected)
        assert_bitwise_equal(isogemm.linear(a, b.T), expected)


def _views():
    """Operands [M, K] and [K, N] with strides of 0, and tensors permuted in memory."""
    a, b = make_operands("normal", (6, 20), (20, 15), seed=0, device=DEVICE)
    four = make_data("normal", (2, 3, 4, 20), seed=1, device=DEVICE)
    return {
        "rows of a are one": (a[:1].expand(6, 20), b),
        "columns of a are one": (a[:, :1].expand(6, 20), b),
        "a is one number": (a[:1, :1].expand(6, 20), b),
        "rows of b are one": (a, b[:1].expand(20, 15)),
        "columns of b are one": (a, b[:, :1].expand(20, 15)),
        "expanded batch": (a.expand(3, 6, 20), b),
        "expanded batches": (a.expand(3, 6, 20), b.expand(3, 20, 15)),
        "expanded against batched": (a.expand(3, 6, 20), b * torch.arange(1.0, 4)[:, None, None]),
        "batch of stride 0 inside": (four[:, :1].expand(2, 3, 4, 20), b),
        "permuted 3-D": (four[0].transpose(0, 1), b),
        "permuted 4-D": (four.permute(2, 0, 1, 3), b),
        "K not last in memory": (four.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0), b),
        "heads": (four.transpose(1, 2), four.transpose(1, 2).mT),
        "every other": (four[:, ::2, ::3], b),
        "diagonal": (a[:, :6].diagonal().expand(4, 6), b[:6]),
        "overlapping windows": (four.flatten().unfold(0, 20, 7), b),
    }


@pytest.mark.parametrize("name", _views())
def test_views_as_if_copied(name):
    a, b = _views()[name]
    with poisoned_allocations():
        result = isogemm.matmul(a, b)
    reference, scale = _exact(a, b)
    assert_no_worse_than_torch(result, torch.matmul(a, b), reference, scale=scale)
    assert_bitwise_equal(result, isogemm.matmul(a.contiguous(), b.contiguous()))
    if b.dim() == 2:
        assert_bitwise_equal(isogemm.linear(a, b.T), result)


def test_bias_of_any_stride():
    x, weight = make_operands("normal", (6, 20), (20, 15), seed=0, device=DEVICE)
    for bias in (make_data("normal", (30,), seed=1)[::2], torch.ones(1).expand(15), torch.ones(16)[1:]):
        expected = isogemm.linear(x, weight.T, bias.clone())
        assert_bitwise_equal(isogemm.linear(x, weight.T, bias), expected)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_nan_and_inf(dtype):
    a, b = make_operands("normal", (12, 20), (20, 16), seed=0, dtype=dtype, device=DEVICE)
    for row, value in ((3, torch.nan), (7, torch.inf), (11, -torch.inf)):
        a[row, 19] = value
        b[0, row] = value
    a[0, 0], b[0, 0] = torch.inf, -torch.inf
    a[1, 1], b[1, 1] = torch.inf, 0.0
    a[2, 0], a[2, 1] = torch.inf, -torch.inf
    reference = a.double() @ b.double()
    assert_same_nonfinite(isogemm.matmul(a, b), reference)
    assert_same_nonfinite(isogemm.linear(a, b.T), reference)
    bias = torch.zeros(16, dtype=dtype, device=DEVICE)
    bias[4], bias[7] = torch.nan, torch.inf
    assert_same_nonfinite(isogemm.linear(a, b.T, bias), reference + bias.double())


def test_float16_overflows_to_inf():
    a = torch.full((3, 64), 200.0, dtype=torch.float16, device=DEVICE)
    _assert_equal(isogemm.matmul(a, -a.T), torch.full((3, 3), -torch.inf, dtype=torch.float16, device=DEVICE))
    wide = isogemm.matmul(a, -a.T, out_dtype=torch.float32)
    _assert_equal(wide, torch.full((3, 3), -64 * 40000.0, device=DEVICE))


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(data=st.data())
def test_any_shape_stride_and_dtype(data):
    """torch.matmul's shape; each element within its sum's rounding; the bits those of contiguous operands."""
    m, n, k = (data.draw(strategies.sizes(130, min_size=0), label=name) for name in "mnk")
    batches = data.draw(
        st.sampled_from([((), ()), ((3,), ()), ((3,), (3,)), ((2, 1), (3,)), ((1,), (4,)), ((0,), (1,))]),
        label="batches",
    )
    dtype = data.draw(strategies.float_dtypes(), label="dtype")
    a = data.draw(strategies.tensor_cases((*batches[0], m, k), dtype=dtype), label="a").build(DEVICE)
    b = data.draw(strategies.tensor_cases((*batches[1], k, n), dtype=dtype), label="b").build(DEVICE)
    out_dtype = data.draw(st.sampled_from([None, torch.float32]), label="out_dtype")
    with poisoned_allocations():
        result = isogemm.matmul(a, b, out_dtype=out_dtype)
    reference, scale = _exact(a, b)
    assert result.shape == reference.shape
    assert result.dtype == (out_dtype or dtype)
    info = torch.finfo(result.dtype)
    # k roundings of an fp32 sum, one to the dtype, which may be subnormal or overflow.
    allowed = (k * 2**-23 + info.eps) * scale + info.eps * info.smallest_normal
    finite = scale < info.max / 2
    assert bool(((result.double() - reference).abs() <= allowed)[finite].all())
    assert_bitwise_equal(isogemm.matmul(a.contiguous(), b.contiguous(), out_dtype=out_dtype), result)


def test_long_sums_of_whole_numbers():
    """Each term counts once, however K is blocked."""
    for k in (1, 15, 16, 17, 255, 256, 257, 4095, 4097):
        a = torch.arange(1.0, k + 1).remainder(7)[None].repeat(3, 1)
        b = torch.arange(1.0, k + 1).remainder(5)[:, None].repeat(1, 2)
        assert isogemm.matmul(a, b).flatten().tolist() == [float((a[0] * b[:, 0]).double().sum())] * 6


def test_rows_beyond_any_block():
    """Every element of a large output is written and is its own."""
    m, n = 1000, 777
    a = torch.stack([torch.arange(m), torch.ones(m)], 1).float()
    b = torch.stack([torch.full((n,), float(n)), torch.arange(n).float()])
    with poisoned_allocations():
        result = isogemm.matmul(a, b)
    _assert_equal(result, torch.arange(m * n).float().view(m, n))
