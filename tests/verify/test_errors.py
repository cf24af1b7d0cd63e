import pytest
import torch
from nonfinite import assert_same_nonfinite

from isogemm.verify.errors import assert_no_worse_than_torch, scaled_error
from isogemm.verify.inputs import make_operands

INF, NAN = float("inf"), float("nan")


def _double(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_errors_by_their_definitions():
    reference = _double(4.0, -3.0, 0.0, 0.1)
    actual = torch.tensor([4.0, -3.0, 0.5, 0.1], dtype=torch.float64)
    assert scaled_error(actual, reference, _double(1, 1, 0.25, 1)) == 2.0
    assert scaled_error(actual, reference) == 0.125


def test_exact_zero_and_empty_have_no_error():
    for shape in [(3,), (0, 4)]:
        zero = torch.zeros(shape, dtype=torch.float64)
        assert scaled_error(zero.float(), zero) == scaled_error(zero, zero, zero) == 0
        assert_no_worse_than_torch(zero.float(), zero.float(), zero)
    assert scaled_error(torch.ones(3), torch.zeros(3, dtype=torch.float64)) == INF


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_nonfinite_against_finite_is_infinite_error(bad):
    reference = _double(1.0, 2.0)
    actual = torch.tensor([1.0, bad])
    assert scaled_error(actual, reference) == INF
    with pytest.raises(AssertionError, match=r"1 of 2 elements exceed .* worst at \(1,\)"):
        assert_no_worse_than_torch(actual, reference.float(), reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("value", [1.0, 1.75, 3.0, 1e-3, 1e-300, 0.0])
def test_one_ulp_and_no_more(dtype, value):
    result = torch.tensor([value, 1.0], dtype=dtype)
    reference = result.double()
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]

    def off_by(ulps):
        moved = result.clone()
        moved[:1] = (result[:1].view(integer) + ulps).view(dtype)
        return moved

    assert_no_worse_than_torch(off_by(1), result, reference)
    assert_no_worse_than_torch(off_by(3), result, reference, ulps=3)
    with pytest.raises(AssertionError, match="1 of 2 elements exceed"):
        assert_no_worse_than_torch(off_by(2), result, reference)


def test_twice_torchs_error_and_no_more():
    reference = _double(1.0, 1.0)
    torch_result = torch.tensor([1.0, 1.01])
    assert_no_worse_than_torch(torch.tensor([1.0199, 1.0]), torch_result, reference)
    with pytest.raises(AssertionError, match=r"bmm: 1 of 2 .* error 0.03, allowed 0.02"):
        assert_no_worse_than_torch(torch.tensor([1.03, 1.0]), torch_result, reference, what="bmm")
    assert_no_worse_than_torch(torch.tensor([1.03, 1.0]), torch_result, reference, factor=4)


def test_scale_keeps_small_elements_honest():
    reference = _double(1e6, 1.0)
    torch_result = torch.tensor([1e6 + 1, 1.0])
    actual = torch.tensor([1e6, 2.0])
    assert_no_worse_than_torch(actual, torch_result, reference)
    with pytest.raises(AssertionError, match=r"worst at \(1,\)"):
        assert_no_worse_than_torch(actual, torch_result, reference, scale=_double(1e6, 1.0))


@pytest.mark.parametrize("kind", ["normal", "wide", "cancelling"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_products_against_themselves_and_coarser(kind, dtype):
    a, b = make_operands(kind, (17, 127), (127, 33), seed=3, dtype=dtype)
    reference, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    result = (a.float() @ b.float()).to(dtype)
    ours, torchs = assert_no_worse_than_torch(result, a @ b, reference, scale=scale)
    assert ours <= 2 * torchs + torch.finfo(dtype).eps
    coarse = (result.float() + 64 * torch.finfo(dtype).eps * scale.float()).to(dtype)
    with pytest.raises(AssertionError):
        assert_no_worse_than_torch(coarse, a @ b, reference, scale=scale)


def test_nonfinite_positions():
    reference = _double(NAN, INF, -INF, 1.0, 1e6)  # the last overflows fp16
    good = reference.half()
    assert_same_nonfinite(good, reference)
    for at, name in [(0, "NaN"), (1, r"\+Inf"), (2, "-Inf"), (4, r"\+Inf")]:
        bad = good.clone()
        bad[at] = 0
        assert_no_worse_than_torch(bad, good, reference)
        with pytest.raises(AssertionError, match=rf"{name} in other places .* first at \({at},\)"):
            assert_same_nonfinite(bad, reference)
    with pytest.raises(AssertionError, match="bmm: NaN"):
        assert_same_nonfinite(torch.tensor([NAN]), _double(INF), "bmm")


def test_torchs_own_overflow_does_not_excuse_ours():
    reference = _double(1.0, 2.0)
    torch_result = torch.tensor([INF, 2.0])
    assert_no_worse_than_torch(reference.float(), torch_result, reference)
    with pytest.raises(AssertionError, match="exceed"):
        assert_no_worse_than_torch(torch.tensor([1.0, 2.5]), torch_result, reference)


def test_bad_arguments():
    reference = _double(1.0, 2.0)
    result = reference.float()
    with pytest.raises(TypeError, match=r"reference: got torch\.float32, expected torch\.float64"):
        scaled_error(result, result)
    with pytest.raises(AssertionError, match=r"actual: shape \(1,\), reference \(2,\)"):
        assert_no_worse_than_torch(result[:1], result, reference)
    with pytest.raises(AssertionError, match=r"dtype torch\.float16, but torch's result is torch\.float32"):
        assert_no_worse_than_torch(result.half(), result, reference)
    with pytest.raises(ValueError, match="scale: got negative or non-finite"):
        assert_no_worse_than_torch(result, result, reference, scale=_double(NAN, 1.0))
