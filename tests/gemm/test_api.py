"""isogemm.mm, matmul and linear on the CPU: torch's semantics, the errors, any strides, the forward's contract."""

import copy
import functools
import itertools
import pickle

import hypothesis
import pytest
import strategies
import torch
from hypothesis import strategies as st
from tensor_cases import ODD_SIZES
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch, assert_same_nonfinite
from isogemm.verify.inputs import make_data, make_operands, with_layout
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cpu"
CONTRACT = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*CONTRACT, torch.float64]
HALVES = [torch.bfloat16, torch.float16]


def _integers(*shape, seed=0, dtype=torch.float32):
    """Small whole numbers: their sums of products are exact in every dtype and order, so equal means right."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(dtype).to(DEVICE)


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
    a, b = (_integers(*shape, seed=seed, dtype=dtype).requires_grad_() for seed, shape in enumerate(shapes))
    with poisoned_allocations():
        result = isogemm.matmul(a, b)
    expected = torch.matmul(a, b)
    _assert_equal(result, expected)
    assert result.is_contiguous()
    grad = _integers(*expected.shape, seed=2, dtype=dtype)
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
    x, weight = _integers(*x_shape, seed=0, dtype=dtype), _integers(n, k, seed=1, dtype=dtype)
    inputs = [x, weight] + [_integers(n, seed=2, dtype=dtype)] * with_bias
    inputs = [tensor.requires_grad_() for tensor in inputs]
    with poisoned_allocations():
        result = isogemm.linear(*inputs)
    expected = F.linear(*inputs)
    _assert_equal(result, expected)
    assert result.is_contiguous()
    grad = _integers(*expected.shape, seed=3, dtype=dtype)
    with poisoned_allocations():
        actual = torch.autograd.grad(result, inputs, grad)
    for got, exact in zip(actual, torch.autograd.grad(expected, inputs, grad), strict=True):
        _assert_equal(got, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(3, 4, 5), (0, 4, 5), (3, 0, 5), (3, 4, 0), (1, 1, 1)], ids=str)
def test_mm_is_torch_mm(sizes, dtype):
    m, k, n = sizes
    a, b = _integers(m, k, seed=0, dtype=dtype), _integers(k, n, seed=1, dtype=dtype)
    with poisoned_allocations():
        result = isogemm.mm(a, b)
    _assert_equal(result, torch.mm(a, b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_operand_with_itself(dtype):
    """One tensor in both places takes both gradients."""
    x = _integers(5, 5, dtype=dtype).requires_grad_()
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
    a, b = _integers(3, 4, dtype=dtype), _integers(4, 5, dtype=dtype)
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
    c = _integers(*(a @ b).shape, seed=5).requires_grad_()
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


PROBLEMS = [(1000, 96), (64, 1000), (127, 65), (17, 3), (4096, 32)]  # K, N


@functools.cache
def _problem(k, n, dtype):
    x = make_data("normal", (512, k), seed=0, dtype=dtype, device=DEVICE)
    weight = make_data("normal", (n, k), seed=1, dtype=dtype, device=DEVICE)
    bias = make_data("normal", (n,), seed=2, dtype=dtype, device=DEVICE)
    noise = make_data("wide", (28, k), seed=3, dtype=dtype, device=DEVICE)
    return x, weight, bias, noise


def _forward(x, weight, bias):
    out_dtype = None if x.dtype == torch.float32 else torch.float32
    return isogemm.linear(x, weight, bias, out_dtype=out_dtype)


def _grad_of_x(grad, weight, bias):
    """dX for the rows of `grad`, which play the part of x: the weight is [K, N] here."""
    x = torch.zeros(*grad.shape[:-1], weight.shape[0], dtype=grad.dtype, device=grad.device, requires_grad=True)
    (dx,) = torch.autograd.grad(isogemm.linear(x, weight.T), x, grad)
    return dx


@pytest.fixture(params=[_forward, _grad_of_x], ids=["forward", "dX"])
def function(request):
    return request.param


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize(("k", "n"), PROBLEMS)
def test_a_row_follows_nothing_but_itself(k, n, dtype, function):
    x, weight, bias, noise = _problem(k, n, dtype)
    whole = function(x, weight, bias)
    for row in (0, 1, 255, 511):
        assert_bitwise_equal(function(x[row : row + 1], weight, bias), whole[row : row + 1], f"row {row} alone")
        assert_bitwise_equal(function(x[row], weight, bias), whole[row], f"row {row} as a vector")
    for m in (2, 3, 7, 16, 100, 257):
        assert_bitwise_equal(function(x[:m], weight, bias), whole[:m], f"the first {m} rows")
    cut = torch.cat([function(x[:100], weight, bias), function(x[100:256], weight, bias)])
    assert_bitwise_equal(cut, whole[:256], "256 rows as 100 + 156")
    padded = function(torch.cat([x[:100], noise]), weight, bias)
    assert_bitwise_equal(padded[:100], whole[:100], "100 rows beside 28 others")
    order = torch.randperm(512, generator=torch.Generator().manual_seed(0))
    assert_bitwise_equal(function(x[order], weight, bias), whole[order], "rows permuted")
    for shape in ((2, 256), (8, 64), (4, 8, 16), (512, 1)):
        batched = function(x.view(*shape, k), weight, bias)
        assert_bitwise_equal(batched, whole.view(*shape, n), f"rows as {shape}")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_a_row_at_every_position(dtype, function):
    x, weight, bias, noise = _problem(127, 65, dtype)
    expected = function(x[:1], weight, bias)
    for size in (5, 28):
        for position in range(size):
            batch = noise[:size].clone()
            batch[position] = x[0]
            assert_bitwise_equal(
                function(batch, weight, bias)[position : position + 1], expected, f"{position} of {size}"
            )


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_neighbours_may_be_nan(dtype, function):
    """Neither an infinity nor a NaN leaks into another row."""
    x, weight, bias, _ = _problem(127, 65, dtype)
    expected = function(x[:64], weight, bias)
    sick = x[:64].clone()
    sick[1::2] = torch.tensor([torch.nan, torch.inf], dtype=dtype).repeat(16)[:, None]
    assert_bitwise_equal(function(sick, weight, bias)[::2], expected[::2])


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_a_batch_of_products_is_each_of_them(dtype):
    a, b = make_operands("normal", (5, 33, 100), (5, 100, 47), seed=0, dtype=dtype, device=DEVICE)
    whole = isogemm.matmul(a, b)
    for i in range(5):
        assert_bitwise_equal(isogemm.mm(a[i], b[i]), whole[i], f"matrix {i} alone")
    assert_bitwise_equal(isogemm.matmul(a[1:3], b[1:3]), whole[1:3], "two of them")
    assert_bitwise_equal(isogemm.matmul(a[:, 7:8], b), whole[:, 7:8], "one row of each")
    shared = isogemm.matmul(a, b[0])
    assert_bitwise_equal(isogemm.matmul(a, b[:1]), shared, "a shared right operand")
    assert_bitwise_equal(isogemm.matmul(a, b[:1].expand(5, -1, -1)), shared, "expanded")
    assert_bitwise_equal(isogemm.matmul(a, b[:1].repeat(5, 1, 1)), shared, "copied")
    assert_bitwise_equal(isogemm.linear(a, b[0].T), shared, "linear")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_forward_repeats(dtype):
    x, weight, bias, _ = _problem(1000, 96, dtype)
    first = isogemm.linear(x, weight, bias)
    for _ in range(3):
        assert_bitwise_equal(isogemm.linear(x, weight, bias), first)


def test_bits_do_not_follow_the_number_of_threads():
    x, weight, bias, _ = _problem(1000, 96, torch.float32)
    found = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results += [_forward(x, weight, bias), _grad_of_x(x, weight, bias)]
    finally:
        torch.set_num_threads(found)
    for again in (results[2:4], results[4:]):
        for got, expected in zip(again, results[:2], strict=True):
            assert_bitwise_equal(got, expected)


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


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(data=st.data())
def test_any_cut_of_the_rows(data):
    """Chunks, and random rows behind each of them, change nothing."""
    m, n, k = (data.draw(strategies.sizes(200), label=name) for name in "mnk")
    dtype = data.draw(strategies.float_dtypes(), label="dtype")
    x = data.draw(strategies.tensor_cases((m, k), dtype=dtype), label="x").build(DEVICE)
    weight = data.draw(strategies.tensor_cases((n, k), dtype=dtype), label="weight").build(DEVICE)
    cuts = sorted(data.draw(st.sets(st.integers(0, m), max_size=4), label="cuts") | {0, m})
    padding = data.draw(st.integers(0, 9), label="padding")
    whole = isogemm.linear(x, weight)
    for start, stop in itertools.pairwise(cuts):
        part = torch.cat([x[start:stop], torch.full((padding, k), 3, dtype=dtype)])
        result = isogemm.linear(part, weight)[: stop - start]
        assert_bitwise_equal(result, whole[start:stop], f"rows {start}..{stop}")


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
    a, b = _integers(3, 4, dtype=torch.bfloat16), _integers(4, 5, dtype=torch.bfloat16)
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
    a, b = _integers(3, 4), _integers(4, 5, seed=1)
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
    a, b = _integers(3, 4, dtype=dtype), _integers(4, 5, seed=1, dtype=dtype)
    TRANSFORMS[transform](TORCHES[name], a, b)
    with pytest.raises(RuntimeError, match=r"has no rule for forward-mode AD and torch\.func transforms"):
        TRANSFORMS[transform](FUNCTIONS[name], a, b)


def test_dispatch_log():
    a, b = _integers(3, 4).requires_grad_(), _integers(4, 5).requires_grad_()
    with isogemm.dispatch_log() as log:
        isogemm.matmul(a, b)
        isogemm.mm(a.bfloat16(), b.bfloat16())
        isogemm.linear(a.double(), b.double().T)
    assert [(entry.op, entry.path) for entry in log] == [("matmul", "cpu"), ("matmul", "cpu"), ("matmul", "torch")]
    assert [entry.problem.split()[-1] for entry in log] == ["float32", "bfloat16", "float64"]
    assert all(str(entry).startswith("isogemm.matmul ") for entry in log)


def test_dispatch_log_of_the_backward():
    x, weight = _integers(2, 3, 4).requires_grad_(), _integers(5, 4).requires_grad_()
    bias = _integers(5).requires_grad_()
    result = isogemm.linear(x, weight, bias)
    with isogemm.dispatch_log() as log:
        result.sum().backward()
    assert sorted(entry.op for entry in log) == ["bias_grad", "matmul", "weight_grad"]
    assert {entry.path for entry in log} == {"cpu"}


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, False), (False, False, True)])
def test_gradients_that_nobody_needs_cost_nothing(needed):
    inputs = (_integers(3, 4), _integers(5, 4), _integers(5))
    for tensor, need in zip(inputs, needed, strict=True):
        tensor.requires_grad_(need)
    result = isogemm.linear(*inputs)
    with isogemm.dispatch_log() as log:
        result.sum().backward()
    assert [entry.op for entry in log] == list(itertools.compress(("matmul", "weight_grad", "bias_grad"), needed))
    assert [tensor.grad is not None for tensor in inputs] == list(needed)


def test_no_grad_keeps_no_graph():
    a, b = _integers(3, 4).requires_grad_(), _integers(4, 5).requires_grad_()
    with torch.no_grad():
        assert not isogemm.matmul(a, b).requires_grad
    with torch.inference_mode():
        assert isogemm.linear(a, b.T).is_inference()
    assert not isogemm.matmul(a.detach(), b.detach()).requires_grad


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(_integers(5, 4))
        self.bias = torch.nn.Parameter(_integers(5))

    def forward(self, x):
        return isogemm.linear(x, self.weight, self.bias)


def test_models_are_copied_and_stored():
    model = Model()
    x = _integers(3, 4)
    model(x).sum().backward()
    model.weight.main_grad = torch.ones(5, 4)
    for other in (copy.deepcopy(model), _restored(model)):
        _assert_equal(other(x), model(x))


def _restored(model):
    other = Model()
    other.load_state_dict(pickle.loads(pickle.dumps(model.state_dict())))
    return other


def test_deterministic_algorithms():
    inputs = [_integers(3, 4).requires_grad_(), _integers(5, 4).requires_grad_(), _integers(5).requires_grad_()]
    expected = torch.autograd.grad(isogemm.linear(*inputs).square().sum(), inputs)
    torch.use_deterministic_algorithms(True)
    try:
        actual = torch.autograd.grad(isogemm.linear(*inputs).square().sum(), inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    for got, same in zip(actual, expected, strict=True):
        assert_bitwise_equal(got, same)


def test_warmup_has_nothing_to_do_on_the_cpu():
    for weights in (W, [W, W.half()], torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU())):
        assert isogemm.warmup(weights, backward=True) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([BIAS],), r"^weights.*\[5\]"),
        ((["W"],), "^weights.*str"),
        ((None,), r"^weights is a NoneType; expected \[N, K\] tensors or a module"),
        ((W, 0), "^tokens.*0"),
    ],
    ids=["rank", "no tensor", "nothing", "tokens"],
)
def test_wrong_warmup(arguments, says):
    weights, *tokens = arguments
    with pytest.raises((TypeError, ValueError), match=says):
        isogemm.warmup(weights, **({"tokens": tokens[0]} if tokens else {}))


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
