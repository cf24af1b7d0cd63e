"""isogemm.bmm and the tiny kernels against fp64."""

import hypothesis
import pytest
import strategies
import torch
from hypothesis import strategies as st
from layouts import EVERY_LAYOUT, with_layout
from nonfinite import assert_same_nonfinite

import isogemm
from isogemm.tiny import configs
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_operands
from isogemm.verify.poison import poisoned_allocations

SHAPES = {  # name: (a, b)
    "12x64x12": ((1024, 12, 64), (1024, 64, 12)),
    "12x12x64": ((1024, 12, 12), (1024, 12, 64)),
    "shared-b": ((256, 12, 64), (1, 64, 12)),
    "shared-a": ((1, 12, 64), (256, 64, 12)),
    "64x64x64": ((64, 64, 64), (64, 64, 64)),
    "3x7x5": ((100, 3, 7), (100, 7, 5)),
    "42x8x42": ((14336, 42, 8), (14336, 8, 42)),
    "42x42x8": ((14336, 42, 42), (14336, 42, 8)),
    "5x16x5": ((1280, 5, 16), (1280, 16, 5)),
}
for _size in (63, 64, 65):
    SHAPES[f"m{_size}"] = (64, _size, 16), (64, 16, 16)
    SHAPES[f"k{_size}"] = (64, 16, _size), (64, _size, 16)
    SHAPES[f"n{_size}"] = (64, 16, 16), (64, 16, _size)

PRECISIONS = [("registers", "ieee"), ("dot", "ieee"), ("dot", "tf32"), ("whole", "ieee"), ("whole", "tf32")]


def _operands(name, seed=0, dtype=torch.float32):
    a_shape, b_shape = SHAPES[name]
    return make_operands("normal", a_shape, b_shape, seed=seed, dtype=dtype, device="cuda")


@pytest.mark.parametrize("name", SHAPES)
def test_bmm(name, assert_parity):
    a, b = _operands(name)
    with poisoned_allocations():
        result = isogemm.bmm(a, b)
    assert_parity(result, a, b)


@pytest.mark.parametrize("name", [name for name in SHAPES if "65" not in name])
@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_kernel(kernel, name, launch, assert_parity):
    a, b = _operands(name)
    assert_parity(launch(kernel, a, b), a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["12x64x12", "42x8x42"])
@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_16_bit(kernel, name, dtype, launch, assert_parity):
    a, b = _operands(name, dtype=dtype)
    assert_parity(launch(kernel, a, b), a, b)


@pytest.mark.parametrize("kernel", configs.KERNELS)
@pytest.mark.parametrize(
    ("a_layout", "b_layout"),
    [
        ("contiguous", "transposed"),
        ("transposed", "contiguous"),
        ("transposed", "transposed"),
        ("sliced", "strided"),
        ("misaligned", "misaligned"),
    ],
)
def test_strided_operands(kernel, a_layout, b_layout, launch, assert_parity):
    """Views go straight to the kernel; what lies around them is NaN."""
    a, b = make_operands("normal", (64, 12, 20), (64, 20, 16), seed=1, device="cuda")
    a, b = with_layout(a, a_layout), with_layout(b, b_layout)
    assert_parity(launch(kernel, a, b), a, b)


@pytest.mark.parametrize("kernel", configs.KERNELS)
@pytest.mark.parametrize("batch", [2, 65535, 200_003])
def test_batch_sizes(kernel, batch, launch, assert_parity):
    a, b = make_operands("normal", (batch, 5, 4), (batch, 4, 3), seed=2, device="cuda")
    assert_parity(launch(kernel, a, b), a, b)


def test_tf32_rounds_to_nearest(launch):
    """Equal to the product of operands rounded to nearest, but for the sums: truncation would be 30x off."""
    a, b = make_operands("normal", (256, 16, 64), (256, 64, 16), seed=3, device="cuda")
    a, b = _without_ties(a), _without_ties(b)
    reference = torch.matmul(_round_to_tf32(a).double(), _round_to_tf32(b).double())
    scale = torch.matmul(a.double().abs(), b.double().abs())
    error = (launch("dot", a, b, "tf32").double() - reference).abs()
    assert bool((error <= 64 * 2**-22 * scale).all())


def test_tf32_rounds_ties_to_even(launch):
    """As the GEMM's kernels and the copy engine do."""
    ulp = 2.0**-10
    a = torch.tensor([1 + ulp / 2, 1 + 3 * ulp / 2, -1 - 5 * ulp / 2, 1 + ulp / 2 + 2**-23], device="cuda")
    expected = torch.tensor([1.0, 1 + 2 * ulp, -1 - 2 * ulp, 1 + ulp], device="cuda")
    a, expected, eye = a.repeat(2, 16, 4), expected.repeat(2, 16, 4), torch.eye(16, device="cuda").repeat(2, 1, 1)
    assert_bitwise_equal(launch("dot", a, eye, "tf32"), expected)
    assert_bitwise_equal(launch("dot", eye, a, "tf32"), expected)


def test_tf32x3_is_ieee():
    a, b = make_operands("normal", (256, 16, 64), (256, 64, 16), seed=4, device="cuda")
    assert_bitwise_equal(isogemm.bmm(a, b, precision="tf32x3"), isogemm.bmm(a, b, precision="ieee"))


def _without_ties(x):
    return (x.view(torch.int32) | 1).view(torch.float32)


def _round_to_tf32(x):
    """To nearest 10-bit mantissa; there are no ties."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize(("kernel", "precision"), PRECISIONS)
def test_nan_and_inf(kernel, precision, launch, exact):
    m, k, n = 12, 20, 16  # a k that dot has to pad
    a, b = make_operands("normal", (64, m, k), (64, k, n), seed=5, device="cuda")
    for batch, value in ((3, torch.nan), (7, torch.inf), (11, -torch.inf)):
        a[batch, m // 2, k - 1] = value
        b[batch + 20, 0, n // 2] = value
    a[40, 0, 0], b[40, 0, 0] = torch.inf, -torch.inf
    a[41, 0, 0], b[41, 0, 0] = torch.inf, 0.0
    a[42, 1, 0], a[42, 1, 1] = torch.inf, -torch.inf
    a.view(torch.int32)[43, 0, 0] = 0x7FFFFFFF  # CUDA's own NaN
    b.view(torch.int32)[44, 0, 0] = 0x7F800001  # the NaN next to Inf
    reference, _ = exact(a, b)
    assert_same_nonfinite(launch(kernel, a, b, precision), reference)


@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_float16_overflows_to_inf(kernel, launch):
    a = torch.full((1024, 12, 64), 200.0, dtype=torch.float16, device="cuda")
    b = torch.full((1024, 64, 12), -200.0, dtype=torch.float16, device="cuda")
    assert_bitwise_equal(launch(kernel, a, b), torch.bmm(a, b))


@pytest.mark.parametrize("sizes", [(0, 3, 4, 5), (3, 0, 4, 5), (3, 4, 0, 5), (3, 4, 5, 0)])
def test_empty(sizes):
    batch, m, k, n = sizes
    a, b = torch.ones(batch, m, k, device="cuda"), torch.ones(batch, k, n, device="cuda")
    with poisoned_allocations():
        result = isogemm.bmm(a, b)
    assert_bitwise_equal(result, torch.zeros(batch, m, n, device="cuda"))


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(data=st.data())
def test_any_shape_stride_and_dtype(data, launch, exact):
    batch = data.draw(st.integers(2, 9), label="batch")
    m, n, k = (data.draw(strategies.sizes(64), label=name) for name in "mnk")
    dtype = data.draw(strategies.float_dtypes(), label="dtype")
    kind = data.draw(st.sampled_from(["normal", "wide", "cancelling"]), label="kind")
    a, b = make_operands(kind, (batch, m, k), (batch, k, n), seed=7, dtype=dtype, device="cuda")
    a = with_layout(a, data.draw(st.sampled_from(EVERY_LAYOUT), label="a"))
    b = with_layout(b, data.draw(st.sampled_from(EVERY_LAYOUT), label="b"))
    result = launch(data.draw(st.sampled_from(configs.KERNELS), label="kernel"), a, b)
    reference, scale = exact(a, b)
    info = torch.finfo(dtype)
    # k fp32 sums (tensor cores truncate: 2^-22 each), one rounding to the dtype, which may be subnormal.
    allowed = (k * 2**-22 + info.eps) * scale + info.eps * info.smallest_normal
    assert bool(((result.double() - reference).abs() <= allowed).all())


HUGE = 2**31 + 64


@pytest.fixture(scope="module")
def huge():
    """More than 2^31 elements, all NaN: 4.3 GB."""
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("less than 12 GiB of GPU memory are free")
    yield torch.full((HUGE + 4096,), torch.nan, dtype=torch.float16, device="cuda")
    torch.cuda.empty_cache()


STRIDES = {"batch": (HUGE, 16, 1), "row": (16, HUGE // 2, 1), "column": (16, 1, HUGE // 7)}


@pytest.mark.alone
@pytest.mark.parametrize("axis", STRIDES)
@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_offsets_past_32_bits(kernel, axis, huge, launch, assert_parity):
    strides = STRIDES[axis]
    a, b = make_operands("normal", (2, 3, 8), (2, 8, 3), seed=8, dtype=torch.float16, device="cuda")
    far_a = huge.as_strided((2, 3, 8), strides, 0).copy_(a)
    far_b = huge.as_strided((2, 3, 8), strides, 2048).copy_(b.mT).mT
    try:
        assert_parity(launch(kernel, far_a, far_b), a, b)
    finally:
        far_a.fill_(torch.nan)
        far_b.fill_(torch.nan)


@pytest.mark.alone
@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_output_past_32_bits(kernel, launch):
    batch = 2**31 // 4096 + 3
    free = torch.cuda.mem_get_info()[0]
    if free < 8 * 2**30:
        pytest.skip("less than 8 GiB of GPU memory are free")
    a, b = make_operands("normal", (1, 64, 4), (1, 4, 64), seed=9, dtype=torch.bfloat16, device="cuda")
    out = launch(kernel, a.expand(batch, -1, -1), b)
    first = launch(kernel, a.expand(2, -1, -1), b)[:1]
    for part in out.split(2**16):
        assert torch.equal(part, first.expand_as(part))
