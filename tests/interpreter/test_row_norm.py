"""The kernels of RMS norm and layer norm on the CPU: poisoned outputs against float64, rows and their sums."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from isogemm.gemm.configs import BIAS_BLOCKS
from isogemm.norm import configs
from isogemm.norm.kernels.row_norm import (
    describe_coefficients,
    describe_long_backward,
    describe_norm,
    describe_norm_backward,
    describe_weight_sums,
)
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data

EPS = 1e-5
KINDS = ["layer_norm", "rms_norm"]


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device="cpu")


def _torch(kind, x, weight, bias):
    if kind == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def _poisoned(*shape, dtype=torch.float32):
    return torch.full(shape, math.nan, dtype=dtype)


def _norm(kind, x, weight, bias, *, residual=None, offset=0.0, config=None, dtype=None):
    """The result, x + residual and the statistics."""
    out, statistics = _poisoned(*x.shape, dtype=dtype or x.dtype), _poisoned(1 + (kind == "layer_norm"), len(x))
    summed = None if residual is None else _poisoned(*x.shape, dtype=x.dtype)
    config = config or configs.choose(x.shape[1], x.itemsize)
    describe_norm(*x.shape, kind, EPS, offset, config).run(x, residual, weight, bias, out, summed, statistics)
    return out, summed, statistics


def _backward(kind, grad, x, weight, *, of_summed=None, bias=True, offset=0.0, block=configs.SUM_ROWS, config=None):
    rows, width = x.shape
    *_, statistics = _norm(kind, x, None, None)
    dx, sums = _poisoned(*x.shape, dtype=x.dtype), _poisoned(2, -(-rows // block), width)
    config = config or configs.choose_backward(width, x.itemsize)
    of_weight, of_bias = None if weight is None else sums[0], sums[1] if bias else None
    if width > configs.LONG_COLUMNS:
        coefficients = _poisoned(*statistics.shape)
        describe_coefficients(rows, width, kind, offset, configs.choose(width, x.itemsize)).run(
            grad, x, weight, statistics, coefficients
        )
        launch, statistics = describe_long_backward(rows, width, kind, offset), (statistics, coefficients)
    else:
        launch, statistics = describe_norm_backward(rows, width, kind, offset, block, config), (statistics,)
    launch.run(grad, of_summed, x, weight, *statistics, dx, of_weight, of_bias)
    return dx, *sums


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(5, 3), (70, 16), (65, 48), (33, 100), (3, 1000), (2, 3000)])
def test_against_torch(kind, dtype, rows, width):
    x, weight = _normal(rows, width, dtype=dtype), _normal(width, seed=1, dtype=dtype)
    bias = _normal(width, seed=2, dtype=dtype) if kind == "layer_norm" else None
    grad = _normal(rows, width, seed=3, dtype=dtype)

    def in_torch(dtype):
        leaves = [None if each is None else each.to(dtype).requires_grad_() for each in (x, weight, bias)]
        out = _torch(kind, *leaves)
        return out.detach(), *torch.autograd.grad(out, leaves[0], grad.to(dtype))

    dx, of_weight, of_bias = _backward(kind, grad, x, weight, bias=bias is not None)
    ours = _norm(kind, x, weight, bias)[0], dx
    for actual, theirs, exact in zip(ours, in_torch(dtype), in_torch(torch.float64), strict=False):
        assert_no_worse_than_torch(actual, theirs, exact, ulps=4)
    terms = grad.double() * _torch(kind, x.double(), None, None)
    for sums, exact_terms in [(of_weight, terms), (of_bias, grad.double())][: 1 + (bias is not None)]:
        error = (sums.double().sum(0) - exact_terms.sum(0)).abs()
        assert (error <= 24 * 2**-24 * exact_terms.abs().sum(0)).all()  # up to 19 adds, and a term's own roundings


@pytest.mark.parametrize("kind", KINDS)
def test_without_weight_and_bias(kind):
    x, grad = _normal(10, 12), _normal(10, 12, seed=1)
    ones = torch.ones(12)
    assert_bitwise_equal(_norm(kind, x, None, None)[0], _norm(kind, x, ones, None)[0])
    dx, of_weight, of_bias = _backward(kind, grad, x, None, bias=False)
    assert_bitwise_equal(dx, _backward(kind, grad, x, ones)[0])
    assert of_weight.isnan().all()
    assert of_bias.isnan().all()


@pytest.mark.parametrize(
    ("kind", "rows", "width"), [("layer_norm", 9, 20), ("rms_norm", 9, 20), ("layer_norm", 1, 16400)]
)
def test_residual_and_offset(kind, rows, width):
    """The sum is rounded before it is normalised; its own gradient is added to dx in fp32."""
    x, residual, weight = (_normal(rows, width, seed=seed, dtype=torch.float16) for seed in range(3))
    weight = weight[0]
    out, summed, _ = _norm(kind, x, weight, None, residual=residual, offset=1.0)
    assert_bitwise_equal(summed, x + residual)
    assert_bitwise_equal(out, _norm(kind, summed, 1 + weight.float(), None)[0])
    x, weight, grad, of_summed = (
        summed.float(),
        weight.float(),
        _normal(rows, width, seed=3),
        _normal(rows, width, seed=4),
    )
    alone, *_ = _backward(kind, grad, x, 1 + weight)
    assert_bitwise_equal(_backward(kind, grad, x, weight, offset=1.0, of_summed=of_summed)[0], alone + of_summed)


def test_a_long_row():
    x, weight, bias, grad = (_normal(2, 20000, seed=seed, dtype=torch.float16) for seed in range(4))
    weight, bias = weight[0], bias[0]

    def in_torch(dtype):
        leaf = x.to(dtype).requires_grad_()
        out = _torch("layer_norm", leaf, weight.to(dtype), bias.to(dtype))
        return out.detach(), *torch.autograd.grad(out, leaf, grad.to(dtype))

    ours = _norm("layer_norm", x, weight, bias)[0], _backward("layer_norm", grad, x, weight)[0]
    for actual, theirs, exact in zip(ours, in_torch(torch.float16), in_torch(torch.float64), strict=True):
        assert_no_worse_than_torch(actual, theirs, exact, ulps=4)


def test_wide_x_and_narrow_result():
    x, weight, bias = _normal(9, 20), _normal(20, seed=1), _normal(20, seed=2)
    narrow = _norm("layer_norm", x, weight, bias, dtype=torch.float16)[0]
    assert_bitwise_equal(narrow, _norm("layer_norm", x, weight, bias)[0].half())


@pytest.mark.parametrize("width", [16, 48])
def test_bits_of_a_row_are_its_own(width):
    x, weight, grad = _normal(130, width), _normal(width, seed=1), _normal(130, width, seed=2)
    out, dx = _norm("layer_norm", x, weight, None)[0], _backward("layer_norm", grad, x, weight)[0]
    for rows in (slice(0, 1), slice(129, 130), slice(7, 77)):
        assert_bitwise_equal(_norm("layer_norm", x[rows], weight, None)[0], out[rows])
        assert_bitwise_equal(_backward("layer_norm", grad[rows], x[rows], weight)[0], dx[rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [24, 1500])
def test_the_rows_of_a_tile_do_not_affect_the_result(kind, width):
    x, weight, grad = _normal(7, width), _normal(width, seed=1), _normal(7, width, seed=2)
    config, backward = configs.choose(width, 4), configs.choose_backward(width, 4)
    out, dx = _norm(kind, x, weight, None)[0], _backward(kind, grad, x, weight)[0]
    for rows in (1, 4):
        other = replace(config, rows=rows)
        assert_bitwise_equal(_norm(kind, x, weight, None, config=other)[0], out)
        other = replace(backward, rows=rows, sub=configs.SUM_ROWS)
        assert_bitwise_equal(_backward(kind, grad, x, weight, config=other)[0], dx)


def test_sums_are_of_blocks_of_rows_and_survive_rows_without_gradient():
    x, weight, grad = _normal(200, 24), _normal(24, seed=1), _normal(200, 24, seed=2)
    grad[150:] = 0
    _, *whole = _backward("layer_norm", grad, x, weight)
    _, *shorter = _backward("layer_norm", grad[:150], x[:150], weight)
    for sums, expected in zip(whole, shorter, strict=True):
        assert_bitwise_equal(sums[:3], expected)
        assert not sums[3].any()


def test_sums_of_fewer_rows_have_the_same_total():
    """A long row's sums may be of 16 rows, for more programs."""
    rows, width = 150, 20
    x, grad = _normal(rows, width), _normal(rows, width, seed=1)
    config = replace(configs.choose_backward(width, 4), rows=1, sub=16)
    assert configs.choose_backward(4096, 4).sub == config.sub
    totals = []
    for block in (configs.SUM_ROWS, config.sub):
        _, sums, _ = _backward("rms_norm", grad, x, torch.ones(width), bias=False, block=block, config=config)
        totals.append(_weight_sums(sums, configs.SUM_ROWS // block))
    assert_bitwise_equal(*totals)
    exact = (grad.double() * F.rms_norm(x.double(), (width,), None, EPS)).sum(0)
    torch.testing.assert_close(totals[0].double(), exact, rtol=1e-5, atol=1e-4)


def _weight_sums(sums, subs, total=None):
    out = _poisoned(sums.shape[1]) if total is None else total.clone()
    describe_weight_sums(*sums.shape, subs, BIAS_BLOCKS, [1], [total is not None]).run(sums, out, None, None)
    return out


@pytest.mark.parametrize("subs", [1, 4])
def test_chunks_are_added_in_order(subs):
    chunk = BIAS_BLOCKS * subs
    sums, total = _normal(2 * chunk + 5, 40), _normal(40, seed=1)
    whole = _weight_sums(sums, subs, total)
    assert_bitwise_equal(_weight_sums(sums[chunk:], subs, _weight_sums(sums[:chunk], subs, total)), whole)
    torch.testing.assert_close(whole, total + sums.sum(0), rtol=1e-5, atol=1e-5)
    out, others = total.clone(), _poisoned(40, 2)[:, 0]
    launch = describe_weight_sums(*sums.shape, subs, BIAS_BLOCKS, [1, 2], [True, False])
    launch.run(sums, out, -sums, others)
    assert_bitwise_equal(out, whole)
    assert_bitwise_equal(-others, _weight_sums(sums, subs))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("width", [1, 3, 16, 100, 2048, 5000, configs.LONG_COLUMNS])
def test_config_holds_whole_rows_and_divides_a_block(width, itemsize):
    for config in (configs.choose(width, itemsize), configs.choose_backward(width, itemsize)):
        assert width <= config.blocks * config.across * config.columns < 2 * width
        assert configs.SUM_ROWS % config.rows == 0
    assert config.sub % config.rows == 0
    assert configs.SUM_ROWS % config.sub == 0
