"""Dropout in the epilogue of a product, on the CPU."""

import math

import pytest
import torch
from cpu_tensors import DTYPES, normal
from fused_cases import fused_operands

import isogemm
from isogemm.epilogues import random
from isogemm.gemm.fused import new_seed
from isogemm.verify.compare import assert_bitwise_equal

DEVICE = "cpu"


# Dropout. x and weight are positive in what follows: a zero was dropped.


def _positive(m=256, k=8, n=192, dtype=torch.float32):
    return torch.ones(m, k, dtype=dtype), torch.full((n, k), 0.5, dtype=dtype)


def _seeded(function, *args, seed=0, **keywords):
    torch.manual_seed(seed)
    return function(*args, **keywords)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_dropout_statistics(p):
    x, weight = _positive()
    result = _seeded(isogemm.linear, x, weight, dropout_p=p)
    kept = result != 0
    scale = 1 / (1 - p)
    assert float((result[kept] - 4 * scale).abs().max()) < 4 * scale * 2**-15  # p is rounded to 16 bits
    for rate, count in (
        (kept.double().mean(), kept.numel()),
        (kept.double().mean(0), 256),
        (kept.double().mean(1), 192),
    ):
        sigma = math.sqrt(p * (1 - p) / count)
        assert float((rate - (1 - p)).abs().max()) < 5 * sigma
    assert float(result.mean()) == pytest.approx(4, rel=5 * math.sqrt(p / (1 - p) / kept.numel()))
    variance = 16 * p / (1 - p)
    assert float(result.var()) == pytest.approx(variance, rel=0.05)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_is_of_the_activation_before_the_residual(dtype):
    operands = fused_operands(("bias", "residual"), 33, 64, 47, dtype)
    p, seed = 0.25, 11
    torch.manual_seed(seed)
    mask = random.kept(new_seed(torch.device(DEVICE)), 33, 47, p)
    result = _seeded(isogemm.matmul_fused, **operands, activation="gelu", dropout_p=p, seed=seed)
    assert_bitwise_equal(result[~mask], operands["residual"][~mask], "what is dropped is the residual alone")
    value = isogemm.matmul_fused(operands["a"], operands["b"], bias=operands["bias"], activation="gelu",
                                 out_dtype=None if dtype == torch.float64 else torch.float32)  # fmt: skip
    expected = torch.where(mask, value * (4 / 3), 0).to(value.dtype) + operands["residual"].to(value.dtype)
    torch.testing.assert_close(result, expected.to(dtype))


def test_no_dropout_and_nothing_but():
    x, weight = _positive()
    plain = isogemm.linear(x, weight, activation="gelu")
    assert_bitwise_equal(isogemm.linear(x, weight, activation="gelu", dropout_p=0.0), plain)
    assert_bitwise_equal(isogemm.linear(x, weight, activation="gelu", dropout_p=1.0), torch.zeros_like(plain))
    residual = normal(256, 192)
    assert_bitwise_equal(isogemm.linear(x, weight, residual=residual, dropout_p=1), residual)


def test_no_dropout_draws_nothing():
    """The generator is left alone where there is nothing to drop."""
    x, weight = _positive()
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    isogemm.linear(x, weight, activation="relu", dropout_p=0.0)
    assert torch.equal(torch.rand(4), expected)


def test_the_seed_is_torch_s():
    x, weight = _positive()
    torch.manual_seed(5)
    first, second = (isogemm.linear(x, weight, dropout_p=0.5) for _ in range(2))
    assert float((first == second).float().mean()) == pytest.approx(0.5, abs=0.02), "another mask at each call"
    torch.manual_seed(5)
    for expected in (first, second):
        assert_bitwise_equal(isogemm.linear(x, weight, dropout_p=0.5), expected)


def test_masks_do_not_follow_the_number_of_rows():
    x, weight = _positive()
    whole = _seeded(isogemm.linear, x, weight, dropout_p=0.3)
    for m in (1, 17, 100, 255):
        assert_bitwise_equal(_seeded(isogemm.linear, x[:m], weight, dropout_p=0.3), whole[:m], f"{m} rows")
    for n in (1, 33, 100):
        assert_bitwise_equal(_seeded(isogemm.linear, x, weight[:n], dropout_p=0.3), whole[:, :n], f"{n} columns")
    batched = _seeded(isogemm.linear, x.view(4, 8, 8, 8), weight, dropout_p=0.3)
    assert_bitwise_equal(batched.view(256, -1), whole, "rows in a batch")
    half = _seeded(isogemm.linear, x.bfloat16(), weight.bfloat16(), dropout_p=0.3)
    assert torch.equal(half != 0, whole != 0)
    up = torch.ones_like(weight)
    gated = _seeded(isogemm.linear, x, weight, weight_up=up, activation="reglu", dropout_p=0.3)
    assert torch.equal(gated != 0, whole != 0)
