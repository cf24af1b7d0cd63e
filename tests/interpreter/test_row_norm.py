"""The norm's kernels on the CPU: poisoned outputs against float64, rows and their sums."""

import math

import pytest
import torch
from torch.nn import functional as F

from isogemm.norm import configs
from isogemm.norm.configs import NormConfig
from isogemm.norm.kernels.row_norm import describe_norm, describe_norm_backward
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data

EPS = 1e-5


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device="cpu")


def _torch(kind, x, weight, bias):
    if kind == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def _norm(kind, x, weight, bias, config=None, dtype=None):
    out = torch.full(x.shape, math.nan, dtype=dtype or x.dtype)
    config = config or configs.choose(x.shape[1])
    describe_norm(*x.shape, kind, EPS, config).run(x, weight, bias, out)
    return out


def _backward(kind, grad, x, weight, *, bias=True, config=None):
    rows, width = x.shape
    dx = torch.full(x.shape, math.nan, dtype=x.dtype)
    sums = torch.full((2, -(-rows // configs.SUM_ROWS), width), math.nan)
    config = config or configs.choose(width)
    of_weight = None if weight is None else sums[0]
    launch = describe_norm_backward(rows, width, kind, EPS, config)
    launch.run(grad, x, weight, dx, of_weight, sums[1] if bias else None)
    return dx, *sums


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(5, 3), (70, 16), (65, 48), (33, 100), (3, 1000)])
def test_against_torch(kind, dtype, rows, width):
    x, weight = _normal(rows, width, dtype=dtype), _normal(width, seed=1, dtype=dtype)
    bias = _normal(width, seed=2, dtype=dtype) if kind == "layer_norm" else None
    grad = _normal(rows, width, seed=3, dtype=dtype)

    def in_torch(dtype):
        leaves = [None if each is None else each.to(dtype).requires_grad_() for each in (x, weight, bias)]
        out = _torch(kind, *leaves)
        return out.detach(), *torch.autograd.grad(out, leaves[0], grad.to(dtype))

    dx, of_weight, of_bias = _backward(kind, grad, x, weight, bias=bias is not None)
    ours = _norm(kind, x, weight, bias), dx
    for actual, theirs, exact in zip(ours, in_torch(dtype), in_torch(torch.float64), strict=False):
        assert_no_worse_than_torch(actual, theirs, exact, ulps=4)
    terms = grad.double() * _torch(kind, x.double(), None, None)
    for sums, exact_terms in [(of_weight, terms), (of_bias, grad.double())][: 1 + (bias is not None)]:
        error = (sums.double().sum(0) - exact_terms.sum(0)).abs()
        assert (error <= 16 * 2**-24 * exact_terms.abs().sum(0)).all()  # six adds, and a term's own roundings


@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_without_weight_and_bias(kind):
    x, grad = _normal(10, 12), _normal(10, 12, seed=1)
    ones = torch.ones(12)
    assert_bitwise_equal(_norm(kind, x, None, None), _norm(kind, x, ones, None))
    dx, of_weight, of_bias = _backward(kind, grad, x, None, bias=False)
    assert_bitwise_equal(dx, _backward(kind, grad, x, ones)[0])
    assert of_weight.isnan().all()
    assert of_bias.isnan().all()


def test_wide_x_and_narrow_result():
    x, weight, bias = _normal(9, 20), _normal(20, seed=1), _normal(20, seed=2)
    narrow = _norm("layer_norm", x, weight, bias, dtype=torch.float16)
    assert_bitwise_equal(narrow, _norm("layer_norm", x, weight, bias).half())


@pytest.mark.parametrize("width", [16, 48])
def test_bits_of_a_row_are_its_own(width):
    x, weight, grad = _normal(130, width), _normal(width, seed=1), _normal(130, width, seed=2)
    out, dx = _norm("layer_norm", x, weight, None), _backward("layer_norm", grad, x, weight)[0]
    for rows in (slice(0, 1), slice(129, 130), slice(7, 77)):
        assert_bitwise_equal(_norm("layer_norm", x[rows], weight, None), out[rows])
        assert_bitwise_equal(_backward("layer_norm", grad[rows], x[rows], weight)[0], dx[rows])


def test_sums_are_of_blocks_of_rows_and_survive_rows_without_gradient():
    x, weight, grad = _normal(200, 24), _normal(24, seed=1), _normal(200, 24, seed=2)
    grad[150:] = 0
    _, *whole = _backward("layer_norm", grad, x, weight)
    _, *shorter = _backward("layer_norm", grad[:150], x[:150], weight)
    for sums, expected in zip(whole, shorter, strict=True):
        assert_bitwise_equal(sums[:3], expected)
        assert not sums[3].any()


@pytest.mark.parametrize("width", [1, 3, 16, 100, 2048, 5000, configs.MOST_COLUMNS])
def test_config_holds_whole_rows_and_divides_a_block(width):
    config = configs.choose(width)
    assert width <= config.columns < 2 * width
    assert configs.SUM_ROWS % config.rows == 0


def test_another_tile_takes_the_same_rows():
    x, weight, grad = _normal(70, 24), _normal(24, seed=1), _normal(70, 24, seed=2)
    config = NormConfig(rows=2, columns=32, num_warps=1)
    assert_no_worse_than_torch(
        _norm("rms_norm", x, weight, None, config), _torch("rms_norm", x, weight, None),
        _torch("rms_norm", x.double(), weight.double(), None), ulps=4,
    )  # fmt: skip
    dx, of_weight, _ = _backward("rms_norm", grad, x, weight, config=config)
    torch.testing.assert_close(dx, _backward("rms_norm", grad, x, weight)[0])
    torch.testing.assert_close(of_weight, _backward("rms_norm", grad, x, weight)[1])


def test_too_wide_a_row_is_refused():
    with pytest.raises(ValueError, match="the norm's kernels take 1 to 65536"):
        configs.choose(configs.MOST_COLUMNS + 1)
