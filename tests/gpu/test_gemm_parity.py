"""The GEMM kernels against fp64 and beside torch: odd sizes, strides, dtypes, special values, offsets past 32 bits."""

import hypothesis
import pytest
import strategies
import torch
from hypothesis import strategies as st
from layouts import EVERY_LAYOUT, with_layout
from nonfinite import assert_same_nonfinite
from torch.nn import functional as F

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch, scaled_error
from isogemm.verify.inputs import make_data, make_operands
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cuda"
NUMBERS = {  # name: (dtype, precision)
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "ieee": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
}
SIZES = [  # M, K, N
    (1, 4096, 4096),
    (8, 1024, 32000),
    (17, 1000, 1003),
    (65, 63, 127),
    (127, 17, 3),
    (3, 1, 1),
    (512, 4096, 1024),
    (1000, 65, 1000),
]
# Not M = 1 in fp32: there torch splits the sum, more exact than one walk, and our bits are those of any other M.
SOME = [(17, 1000, 1003), (512, 1024, 768)]
CASES = [("bf16", *sizes) for sizes in SIZES] + [(name, *sizes) for name in ("fp16", "ieee", "tf32") for sizes in SOME]


def _id(case):
    return "-".join(map(str, case))


def _exact(a, b):
    """The product in fp64, and |A| |B|, the natural size of an element's rounding error."""
    a, b = a.detach().double(), b.detach().double()
    return torch.matmul(a, b), torch.matmul(a.abs(), b.abs())


def _set_torch(precision):
    """What torch computes beside us; put back after the test."""
    torch.backends.cuda.matmul.fp32_precision = precision or "ieee"


@pytest.mark.parametrize("case", CASES, ids=_id)
def test_no_worse_than_torch(case):
    number, m, k, n = case
    dtype, precision = NUMBERS[number]
    x, weight = make_operands("normal", (m, k), (k, n), seed=0, dtype=dtype, device=DEVICE)
    weight = weight.T.contiguous()
    bias = make_data("normal", (n,), seed=1, dtype=dtype, device=DEVICE)
    _set_torch(precision)
    reference, scale = _exact(x, weight.T)
    with poisoned_allocations(), isogemm.dispatch_log() as log:
        result = isogemm.linear(x, weight, bias, precision=precision)
    assert [entry.path for entry in log] == ["gemm"]
    reference, scale = reference + bias.double(), scale + bias.double().abs()
    assert_no_worse_than_torch(result, F.linear(x, weight, bias), reference, scale=scale)


@pytest.mark.parametrize("kind", ["wide", "cancelling"])
@pytest.mark.parametrize("number", ["bf16", "ieee"])
def test_hard_data_no_worse_than_torch(number, kind):
    dtype, precision = NUMBERS[number]
    a, b = make_operands(kind, (512, 1024), (1024, 768), seed=2, dtype=dtype, device=DEVICE)
    weight = b.T.contiguous()
    reference, scale = _exact(a, b)
    result = isogemm.linear(a, weight, precision=precision)
    assert_no_worse_than_torch(result, F.linear(a, weight), reference, scale=scale)


@pytest.mark.parametrize("k", [4096, 14336, 32768])
def test_float32_output_of_16_bit_inputs(k):
    """One walk over K, in which tensor cores truncate: within 4 times cuBLAS's error."""
    x, weight = make_operands("normal", (256, k), (k, 1024), seed=3, dtype=torch.bfloat16, device=DEVICE)
    weight = weight.T.contiguous()
    reference, scale = _exact(x, weight.T)
    theirs = torch.mm(x, weight.T, out_dtype=torch.float32)
    result = isogemm.linear(x, weight, out_dtype=torch.float32)
    assert_no_worse_than_torch(result, theirs, reference, scale=scale, factor=4)


def test_tf32x3_is_far_more_exact_than_tf32():
    a, b = make_operands("normal", (256, 1024), (1024, 512), seed=4, device=DEVICE)
    reference, scale = _exact(a, b)
    _set_torch("tf32")
    theirs = scaled_error(torch.mm(a, b), reference, scale)
    ours = scaled_error(isogemm.mm(a, b, precision="tf32x3"), reference, scale)
    assert ours <= theirs / 8


@pytest.mark.parametrize("m", [1, 200])
def test_tf32_rounds_its_operands_to_nearest(m):
    """The bits of operands rounded beforehand, which the hardware, left alone, would truncate."""
    a, b = make_operands("normal", (m, 512), (512, 256), seed=5, device=DEVICE)
    a, b = ((x.view(torch.int32) | 1).view(torch.float32) for x in (a, b))  # no ties
    near = [((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for x in (a, b)]
    expected = isogemm.mm(*near, precision="tf32")
    assert_bitwise_equal(isogemm.mm(a, b, precision="tf32"), expected)
    assert_bitwise_equal(isogemm.linear(a, b.T.contiguous(), precision="tf32"), expected)


def test_precision_follows_torch_without_a_word():
    a, b = make_operands("normal", (64, 256), (256, 96), seed=6, device=DEVICE)
    _set_torch("tf32")
    assert_bitwise_equal(isogemm.mm(a, b), isogemm.mm(a, b, precision="tf32"))
    _set_torch("ieee")
    assert_bitwise_equal(isogemm.mm(a, b), isogemm.mm(a, b, precision="ieee"))


@pytest.mark.parametrize(
    ("a_layout", "b_layout"),
    [("sliced", "strided"), ("strided", "sliced"), ("misaligned", "transposed"), ("transposed", "misaligned")],
)
def test_strided_operands(a_layout, b_layout):
    """Views go straight to the kernel; what lies around them is NaN."""
    a, b = make_operands("normal", (96, 256), (256, 160), seed=7, dtype=torch.bfloat16, device=DEVICE)
    expected = isogemm.mm(a, b)
    with poisoned_allocations():
        assert_bitwise_equal(isogemm.mm(with_layout(a, a_layout), with_layout(b, b_layout)), expected)


VIEWS = {  # of a [6, 40], b [40, 24], four [2, 3, 4, 40] and six [2, 3, 2, 3, 4, 40]
    "rows of a are one": lambda a, b, four, six: (a[:1].expand(6, 40), b),
    "columns of a are one": lambda a, b, four, six: (a[:, :1].expand(6, 40), b),
    "columns of b are one": lambda a, b, four, six: (a, b[:, :1].expand(40, 24)),
    "expanded batches": lambda a, b, four, six: (a.expand(3, 6, 40), b.expand(3, 40, 24)),
    "permuted 3-D": lambda a, b, four, six: (four[0].transpose(0, 1), b),
    "permuted 4-D": lambda a, b, four, six: (four.permute(2, 0, 1, 3), b),
    "heads": lambda a, b, four, six: (four.transpose(1, 2), four.transpose(1, 2).mT),
    "three levels of batch": lambda a, b, four, six: (six.permute(2, 1, 0, 3, 4, 5), b),
    "four levels of batch": lambda a, b, four, six: (six.permute(3, 2, 1, 0, 4, 5), six.permute(3, 2, 1, 0, 4, 5).mT),
    "broadcast batches": lambda a, b, four, six: (six[:, :1, :, :1], six[:1, :, :1].mT),
    "vector": lambda a, b, four, six: (a[0], b),
    "by vector": lambda a, b, four, six: (four, b[:, 0]),
    "overlapping windows": lambda a, b, four, six: (four.flatten().unfold(0, 40, 7), b),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_as_if_copied(name):
    shapes = (6, 40), (40, 24), (2, 3, 4, 40), (2, 3, 2, 3, 4, 40)
    bases = [make_data("normal", shape, seed=8, dtype=torch.bfloat16, device=DEVICE) for shape in shapes]
    a, b = VIEWS[name](*bases)
    with poisoned_allocations():
        result = isogemm.matmul(a, b)
    reference, scale = _exact(a, b)
    assert_no_worse_than_torch(result, torch.matmul(a, b), reference, scale=scale)
    assert_bitwise_equal(result, isogemm.matmul(a.contiguous(), b.contiguous()))


def test_bias_of_any_stride_and_alignment():
    x, weight = make_operands("normal", (33, 64), (64, 48), seed=11, dtype=torch.bfloat16, device=DEVICE)
    bias = make_data("normal", (48,), seed=12, dtype=torch.bfloat16, device=DEVICE)
    expected = isogemm.linear(x, weight.T, bias)
    for name in ("misaligned", "strided"):
        assert_bitwise_equal(isogemm.linear(x, weight.T, with_layout(bias, name)), expected, name)
    assert_bitwise_equal(isogemm.linear(x, weight.T, bias), expected, "the plain one again")


@pytest.mark.parametrize(("number", "m"), [*((number, 200) for number in NUMBERS), ("bf16", 1)])
def test_nan_and_inf(number, m):
    dtype, precision = NUMBERS[number]
    k, n = 300, 160
    a, b = make_operands("normal", (m, k), (k, n), seed=13, dtype=dtype, device=DEVICE)
    for place, value in ((3, torch.nan), (7, torch.inf), (11, -torch.inf)):
        b[k - 1, place] = value
        a[(5 * place) % m, k - 2] = value if m > 1 else a[0, 0]
    a[0, 0], b[0, 0] = torch.inf, 0.0
    reference = a.double() @ b.double()
    assert_same_nonfinite(isogemm.linear(a, b.T.contiguous(), precision=precision), reference)


def test_float16_overflows_to_inf():
    a = torch.full((65, 64), 200.0, dtype=torch.float16, device=DEVICE)
    assert bool(torch.isneginf(isogemm.mm(a, -a.T)).all())
    assert bool((isogemm.mm(a, -a.T, out_dtype=torch.float32) == -64 * 40000.0).all())


@pytest.mark.parametrize("sizes", [(0, 4, 5), (3, 0, 5), (3, 4, 0), (0, 0, 0)], ids=str)
def test_empty(sizes):
    m, k, n = sizes
    inputs = [torch.ones(shape, device=DEVICE, requires_grad=True) for shape in ((2, m, k), (n, k), (n,))]
    with poisoned_allocations():
        result = isogemm.linear(*inputs)
        gradients = torch.autograd.grad(result.sum(), inputs)
    _assert_same(result, F.linear(*inputs))
    for got, same in zip(gradients, torch.autograd.grad(F.linear(*inputs).sum(), inputs), strict=True):
        _assert_same(got, same)
    a, b = torch.ones(m, k, device=DEVICE), torch.ones(k, n, device=DEVICE)
    _assert_same(isogemm.mm(a, b), torch.mm(a, b))


def _assert_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_an_empty_batch():
    a, b = torch.ones(0, 3, 4, device=DEVICE), torch.ones(1, 4, 5, device=DEVICE)
    _assert_same(isogemm.matmul(a, b), torch.matmul(a, b))


@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_any_shape_stride_and_dtype(data):
    m, n, k = (data.draw(strategies.sizes(300), label=name) for name in "mnk")
    dtype = data.draw(strategies.float_dtypes(), label="dtype")
    kind = data.draw(st.sampled_from(["normal", "wide", "cancelling"]), label="kind")
    a, b = make_operands(kind, (2, m, k), (2, k, n), seed=14, dtype=dtype, device=DEVICE)
    a = with_layout(a, data.draw(st.sampled_from(EVERY_LAYOUT), label="a"))
    b = with_layout(b, data.draw(st.sampled_from(EVERY_LAYOUT), label="b"))
    with poisoned_allocations():
        result = isogemm.matmul(a, b)
    reference, scale = _exact(a, b)
    info = torch.finfo(dtype)
    # k fp32 sums (tensor cores truncate: 2^-22 each), one rounding to the dtype, which may be subnormal or overflow.
    allowed = (k * 2**-22 + info.eps) * scale + info.eps * info.smallest_normal
    assert bool(((result.double() - reference).abs() <= allowed)[scale < info.max / 2].all())


PAST = 2**31 // 4096 + 128  # rows of 4096 that pass 2^31 elements


@pytest.fixture(scope="module")
def huge():
    """[524416, 4096] in bf16, 4.3 GB, zero but for its first and last 256 rows."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("less than 24 GiB of GPU memory are free")
    tensor = torch.zeros(PAST, 4096, dtype=torch.bfloat16, device=DEVICE)
    for seed, rows in enumerate((slice(0, 256), slice(-256, None))):
        tensor[rows] = make_data("normal", (256, 4096), seed=seed, dtype=torch.bfloat16, device=DEVICE)
    yield tensor
    del tensor
    torch.cuda.empty_cache()


@pytest.mark.alone
@pytest.mark.parametrize("m", [1, 300])
def test_weight_past_32_bits(m, huge):
    x = make_data("normal", (m, 4096), seed=15, dtype=torch.bfloat16, device=DEVICE)
    result = isogemm.linear(x, huge)
    for columns in (slice(0, 256), slice(-256, None)):
        reference, scale = _exact(x, huge[columns].T)
        assert_no_worse_than_torch(result[:, columns], F.linear(x, huge[columns]), reference, scale=scale)
    assert not bool(result[:, 256:-256].any())


@pytest.mark.alone
def test_rows_past_32_bits(huge):
    """By the contract itself: the last rows of many are those rows alone. And their weight's gradient."""
    weight = make_data("normal", (128, 4096), seed=16, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    result = isogemm.linear(huge, weight)
    for rows in (slice(0, 256), slice(-256, None), slice(-1, None)):
        assert_bitwise_equal(result[rows], isogemm.linear(huge[rows], weight), f"rows {rows}")
    grad = torch.zeros_like(result)
    ends = torch.cat([huge[:256], huge[-256:]])
    given = make_data("normal", (512, 128), seed=17, dtype=torch.bfloat16, device=DEVICE)
    grad[:256], grad[-256:] = given[:256], given[256:]
    (dw,) = torch.autograd.grad(result, weight, grad)
    reference, scale = _exact(given.T, ends)
    assert_no_worse_than_torch(dw, given.T @ ends, reference, scale=scale)


@pytest.mark.alone
def test_output_past_32_bits():
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("less than 24 GiB of GPU memory are free")
    m, n = 2**15 + 128, 2**16 + 64
    x, weight = make_operands("normal", (m, 64), (64, n), seed=18, dtype=torch.bfloat16, device=DEVICE)
    weight = weight.T.contiguous()
    result = isogemm.linear(x, weight)
    assert_bitwise_equal(result[-256:], isogemm.linear(x[-256:], weight))
    torch.cuda.empty_cache()


@pytest.mark.alone
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_strides_past_32_bits(axis, huge):
    """Few elements, far apart."""
    strides = (2**31 // 32, 1) if axis == "rows" else (1, 2**31 // 39)
    a, b = make_operands("normal", (33, 40), (40, 24), seed=19, dtype=torch.bfloat16, device=DEVICE)
    view = huge.as_strided((33, 40), strides, 1024)
    kept = view.clone()
    try:
        view.copy_(a)
        assert_bitwise_equal(isogemm.mm(view, b), isogemm.mm(a, b))
    finally:
        view.copy_(kept)
