import pytest
import torch

from isogemm.verify.compare import assert_bitwise_equal, compare_bits

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_and_one_element_off(dtype):
    expected = torch.arange(24).reshape(2, 3, 4).to(dtype)
    actual = expected.clone()
    assert compare_bits(actual, expected).equal
    actual[1, 2, 0] = 0 if dtype == torch.bool else 3
    diff = compare_bits(actual, expected)
    assert (diff.count, diff.total, diff.coordinate) == (1, 24, (1, 2, 0))
    assert not diff.equal


def test_report_names_values_and_bits():
    diff = compare_bits(torch.tensor([1.0, -0.0, 5.0]), torch.tensor([1.0, 0.0, 6.0]))
    assert (diff.count, diff.coordinate) == (2, (1,))
    assert diff.actual == "-0.0 (0x80000000)"
    assert diff.expected == "0.0 (0x00000000)"
    assert "2 of 3 elements differ (66.67%), first at (1,)" in str(diff)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_same_nan_equal_other_payload_not(dtype):
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    nan = torch.full((3,), float("nan"), dtype=dtype)
    other = (nan.view(integer) + 1).view(dtype)
    assert other.isnan().all()
    assert compare_bits(nan, nan.clone()).equal
    assert compare_bits(nan, other).count == 3


def test_complex128_counts_elements_and_shows_both_words():
    expected = torch.zeros(2, 3, dtype=torch.complex128)
    actual = expected.clone()
    actual[1, 1] = complex(0.0, -0.0)
    diff = compare_bits(actual, expected)
    assert (diff.count, diff.total, diff.coordinate) == (1, 6, (1, 1))
    assert diff.actual.endswith("(0x00000000000000008000000000000000)")


def test_any_strides():
    base = torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(0))
    view = base.mT[::2, 1:, ::3]
    assert compare_bits(view, view.contiguous()).equal
    other = view.contiguous()
    other[2, 3, 1] += 1
    assert compare_bits(view, other).coordinate == (2, 3, 1)
    expanded = torch.ones(1, 3).expand(4, 3)
    assert compare_bits(expanded, torch.ones(4, 3)).equal


def test_lazy_conjugate_and_grad():
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert compare_bits(z.conj(), z.conj().resolve_conj()).equal
    x = torch.ones(2, requires_grad=True)
    assert compare_bits(x, x * 1).equal


def test_scalar_and_empty():
    assert compare_bits(torch.tensor(2.0), torch.tensor(3.0)).coordinate == ()
    empty = compare_bits(torch.empty(0, 3), torch.empty(0, 3))
    assert empty.equal
    assert empty.total == 0


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (torch.zeros(3, 2), r"torch.float32 of shape \(2, 3\), expected torch.float32 of shape \(3, 2\)"),
        (torch.zeros(2, 3, dtype=torch.float64), "expected torch.float64"),
        (torch.zeros(0, 3), r"shape \(0, 3\)"),
    ],
)
def test_shape_or_dtype_mismatch_fails(expected, message):
    actual = torch.zeros(2, 3)
    assert not compare_bits(actual, expected).equal
    with pytest.raises(AssertionError, match=message):
        assert_bitwise_equal(actual, expected)


def test_empty_shapes_that_differ_fail():
    assert not compare_bits(torch.empty(0, 3), torch.empty(3, 0)).equal


def test_assertion_says_what():
    assert_bitwise_equal(torch.ones(2), torch.ones(2), "rows")
    with pytest.raises(AssertionError, match=r"^rows: 1 of 2"):
        assert_bitwise_equal(torch.tensor([1.0, 2.0]), torch.ones(2), "rows")
