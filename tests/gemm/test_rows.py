"""A row of isogemm.mm, matmul and linear has the same bits in any call, on the CPU; tests/test_promises.py has more."""

import functools
import itertools

import hypothesis
import pytest
import strategies
import torch
from cpu_tensors import CONTRACT
from hypothesis import strategies as st

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data, make_operands

DEVICE = "cpu"


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
