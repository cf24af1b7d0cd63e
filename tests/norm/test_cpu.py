"""The CPU backend of the norms: errors against float64, and bits that nothing around may change."""

import pytest
import torch
from torch.nn import functional as F

from isogemm.norm import cpu
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data

ROWS = 64
NORMS = ["layer_norm", "rms_norm"]
WIDTHS = [1, 3, 16, 17, 48, 100, 256]


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device="cpu")


def _norm(x, weight, bias, kind):
    return cpu.norm(x, None, weight, bias, kind, 1e-5, 0.0)[0]


def _backward(grad, x, weight, kind):
    *_, statistics = cpu.norm(x, None, None, None, kind, 1e-5, 0.0)
    return cpu.norm_backward(grad, None, x, weight, statistics, kind, 0.0, ROWS)


def _torch_norm(kind, x, weight, bias):
    if kind == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def _norm_gradients(kind, x, weight, bias, grad):
    leaves = [each.detach().requires_grad_() for each in (x, weight, bias)]
    found = torch.autograd.grad(_torch_norm(kind, *leaves), leaves, grad, allow_unused=True)
    return [each for each in found if each is not None]


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_is_as_exact_as_torch(kind, width):
    x, weight, bias = _normal(150, width), _normal(width, seed=1), _normal(width, seed=2)
    grad = _normal(150, width, seed=3)
    added = bias if kind == "layer_norm" else None
    exact = [each.double() for each in (x, weight, bias)]
    actual = _norm(x, weight, added, kind)
    assert_no_worse_than_torch(actual, _torch_norm(kind, x, weight, bias), _torch_norm(kind, *exact), ulps=4)
    dx, of_weight, of_bias = _backward(grad, x, weight, kind)
    theirs, right = _norm_gradients(kind, x, weight, bias, grad), _norm_gradients(kind, *exact, grad.double())
    assert_no_worse_than_torch(dx, theirs[0], right[0], ulps=4)
    terms = grad.double() * _torch_norm(kind, exact[0], None, None)
    for sums, exact_terms in ((of_weight, terms), (of_bias, grad.double())):
        error = (sums.double().sum(0) - exact_terms.sum(0)).abs()
        assert (error <= 16 * 2**-24 * exact_terms.abs().sum(0) + 1e-37).all()  # six adds, and a term's own roundings


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("threads", [1, 4])
def test_norm_bits_of_a_wide_row_are_its_own(kind, threads):
    """A sum that torch shares out among its threads, and by the strides."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = _normal(37, 40000), _normal(40000, seed=1)
        whole = _norm(x, weight, None, kind)
        assert_bitwise_equal(_norm(x.t().contiguous().t(), weight, None, kind), whole)
        for row in (0, 17, 36):
            assert_bitwise_equal(_norm(x[row : row + 1], weight, None, kind), whole[row : row + 1])
    finally:
        torch.set_num_threads(before)


def test_norm_sums_are_of_blocks_of_rows():
    x, weight, grad = _normal(200, 24), _normal(24, seed=1), _normal(200, 24, seed=2)
    _, of_weight, of_bias = _backward(grad, x, weight, "layer_norm")
    assert of_weight.shape == of_bias.shape == (4, 24)
    _, *alone = _backward(grad[64:128], x[64:128], weight, "layer_norm")
    assert_bitwise_equal(alone[0], of_weight[1:2])
    assert_bitwise_equal(alone[1], of_bias[1:2])


def test_parts_of_a_softmax_are_the_rows_own():
    """In several steps of rows, at any strides."""
    x = 4 * _normal(70, 130000)
    largest, sums = cpu.softmax_parts(x)
    for row in (0, 31, 69):
        for each in (x[row : row + 1], x[row, :, None].expand(-1, 2).t()[1:]):
            for found, expected in zip(cpu.softmax_parts(each), (largest, sums), strict=True):
                assert_bitwise_equal(found, expected[row : row + 1])
    torch.testing.assert_close(largest.double() + sums.double().log(), x.double().logsumexp(1), rtol=1e-6, atol=1e-6)
