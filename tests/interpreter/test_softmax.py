"""The softmaxes' kernels on the CPU: poisoned outputs against float64, and bits that do not depend on the tile."""

import math
from dataclasses import replace

import pytest
import torch

from isogemm.norm import configs
from isogemm.norm.kernels.softmax import describe_softmax, describe_softmax_backward
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data

LOG = [False, True]


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device="cpu")


def _torch(x, log):
    return x.log_softmax(-1) if log else x.softmax(-1)


def _softmax(x, log, config=None, dtype=None):
    y = torch.full(x.shape, math.nan, dtype=dtype or x.dtype)
    describe_softmax(*x.shape, log, config or configs.choose_softmax(x.shape[1], x.itemsize)).run(x, y)
    return y


def _backward(grad, y, log, config=None):
    dx = torch.full(y.shape, math.nan, dtype=y.dtype)
    config = config or configs.choose_softmax(y.shape[1], y.itemsize, 2)
    describe_softmax_backward(*y.shape, log, config).run(grad, y, dx)
    return dx


@pytest.mark.parametrize("log", LOG)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(5, 1), (9, 3), (33, 64), (7, 1000), (3, 1025), (2, 20001)])
def test_against_torch(log, dtype, rows, columns):
    x, grad = 4 * _normal(rows, columns, dtype=dtype), _normal(rows, columns, seed=1, dtype=dtype)

    def in_torch(dtype):
        leaf = x.to(dtype).requires_grad_()
        y = _torch(leaf, log)
        return y.detach(), *torch.autograd.grad(y, leaf, grad.to(dtype))

    y = _softmax(x, log)
    ours = y, _backward(grad, y, log)
    sizes = None, grad.double().abs().amax(1, keepdim=True).expand(x.shape)
    for actual, theirs, exact, size in zip(ours, in_torch(dtype), in_torch(torch.float64), sizes, strict=True):
        assert_no_worse_than_torch(actual, theirs, exact, scale=size, ulps=4)


@pytest.mark.parametrize("log", LOG)
@pytest.mark.parametrize("columns", [40, 2500])
def test_the_tile_does_not_affect_the_result(log, columns):
    """One row or several in a program, whole or in steps."""
    x, grad = _normal(5, columns), _normal(5, columns, seed=1)
    config = configs.choose_softmax(columns, 4)
    y = _softmax(x, log)
    dx = _backward(grad, y, log)
    others = [replace(config, rows=1), replace(config, rows=2, across=2 * config.across, columns=config.columns // 2)]
    if config.blocks > 1:
        others.append(replace(config, rows=1, blocks=2, steps=config.blocks // 2))
        others.append(replace(config, rows=1, blocks=1, steps=2 * config.blocks, num_stages=2))
    for other in others:
        assert_bitwise_equal(_softmax(x, log, other), y, str(other))
        assert_bitwise_equal(_backward(grad, y, log, other), dx, str(other))


@pytest.mark.parametrize("log", LOG)
def test_bits_of_a_row_are_its_own(log):
    x, grad = _normal(33, 200, dtype=torch.float16), _normal(33, 200, seed=1, dtype=torch.float16)
    y = _softmax(x, log)
    dx = _backward(grad, y, log)
    for rows in (slice(0, 1), slice(32, 33), slice(7, 20)):
        assert_bitwise_equal(_softmax(x[rows], log), y[rows])
        assert_bitwise_equal(_backward(grad[rows], y[rows], log), dx[rows])


@pytest.mark.parametrize("log", LOG)
@pytest.mark.parametrize("columns", [20, 1100, 17000])
def test_rows_that_are_not_finite(log, columns):
    x = _normal(5, columns)
    x[0], x[1, 3], x[2, :19], x[3, 3] = -math.inf, math.nan, -math.inf, math.inf
    x[2, 1024:] = -math.inf
    y = _softmax(x, log)
    assert y[[0, 1, 3]].isnan().all()
    torch.testing.assert_close(y[[2, 4]], _torch(x[[2, 4]], log))


@pytest.mark.parametrize("log", LOG)
def test_a_wide_result_is_rounded_once(log):
    x = _normal(3, 100, dtype=torch.float16)
    assert_bitwise_equal(_softmax(x, log, dtype=torch.float32).half(), _softmax(x, log))
    assert_bitwise_equal(_softmax(x, log, dtype=torch.float32), _softmax(x.float(), log))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("columns", [1, 1000, 1025, 16384, 50257, 131072, 262144, 1 << 20])
def test_config_covers_a_row(columns, itemsize):
    for operands in (1, 2):
        for shared_memory in (1 << 16, 1 << 18):
            config = configs.choose_softmax(columns, itemsize, operands, shared_memory)
            assert columns % config.unit == 0
            assert columns <= max(config.steps, 1) * config.blocks * config.across * config.columns < 2 * columns
            if config.blocks > 1:
                assert config.across * config.columns == configs.SOFTMAX_BLOCK
