"""Weight and bias gradients as sums over tokens on the CPU: the order of chunks, micro-batches, padding."""

import itertools

import pytest
import torch
from cpu_tensors import CONTRACT, normal
from token_sums import accumulate, assert_same, result_and_gradients

import isogemm
from isogemm.gemm import configs
from isogemm.verify.errors import assert_no_worse_than_torch


def _chunk(n, k, dtype):
    return configs.token_chunk(n, k, str(dtype).removeprefix("torch."))


WEIGHTS = [(8, 16), (33, 65), (1, 127)]  # N, K


def _training(n, k, tokens, dtype):
    weight, bias = normal(n, k, seed=1, dtype=dtype), normal(n, seed=2, dtype=dtype)
    return normal(tokens, k, seed=0, dtype=dtype), weight, bias, normal(tokens, n, seed=3, dtype=dtype)


def test_chunks():
    """A power of two of at most 4096 tokens, by the weight alone."""
    sizes = (1, 3, 64, 1000, 4096, 14336, 128256)
    for n, k, dtype in itertools.product(sizes, sizes, ("bfloat16", "float16", "float32")):
        chunk = configs.token_chunk(n, k, dtype)
        assert 16 <= chunk <= 4096
        assert chunk & (chunk - 1) == 0
        assert chunk % configs.BIAS_CHUNK == 0


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_totals_are_the_partials_in_order(n, k, dtype):
    """total = 0, then total += partial, ascending: an fp32 add for each chunk of C tokens, the last one short."""
    chunk = _chunk(n, k, dtype)
    x, weight, bias, grad = _training(n, k, 3 * chunk + 37, dtype)
    whole = accumulate(x, weight, bias, grad)
    totals = [torch.zeros(n, k), torch.zeros(n)]
    for i, step in enumerate((chunk, configs.BIAS_CHUNK)):
        for start in range(0, len(x), step):
            part = slice(start, start + step)
            totals[i] = totals[i] + accumulate(x[part], weight, bias, grad[part])[i]
    assert_same(whole, totals, "the sum of the chunks' own")
    fresh = result_and_gradients(isogemm.linear, (x, weight, bias), grad)[1][1:]
    assert_same(fresh, [total.to(dtype) for total in whole], "without main_grad: rounded once")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize(("n", "k"), WEIGHTS)
def test_micro_batches_have_the_bits_of_one_pass(n, k, dtype):
    chunk = _chunk(n, k, dtype)
    x, weight, bias, grad = _training(n, k, 3 * chunk + 37, dtype)
    before = normal(n, k, seed=7), normal(n, seed=8)
    for main_grads in (None, before):
        whole = accumulate(x, weight, bias, grad, main_grads=main_grads)
        for cuts in ([1], [2], [1, 2], [1, 3], [1, 2, 3]):
            parts = accumulate(x, weight, bias, grad, [cut * chunk for cut in cuts], main_grads)
            assert_same(parts, whole, f"cut at {cuts} chunks")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("padding", [1, 100, 4096])
def test_trailing_zero_rows_change_nothing(padding, dtype):
    n, k = 8, 16
    chunk = _chunk(n, k, dtype)
    for tokens in (5, chunk, chunk + 37):
        x, weight, bias, grad = _training(n, k, tokens, dtype)
        whole = accumulate(x, weight, bias, grad)
        zeros = torch.zeros(padding, n, dtype=dtype)
        for tail in (torch.zeros(padding, k, dtype=dtype), normal(padding, k, seed=5, dtype=dtype)):
            padded = accumulate(torch.cat([x, tail]), weight, bias, torch.cat([grad, zeros]))
            assert_same(padded, whole, f"{padding} more tokens after {tokens}")
        fresh = result_and_gradients(isogemm.linear, (x, weight, bias), grad)[1][1:]
        longer = torch.cat([x, torch.zeros(padding, k, dtype=dtype)])
        again = result_and_gradients(isogemm.linear, (longer, weight, bias), torch.cat([grad, zeros]))[1][1:]
        assert_same(again, fresh, f"{padding} more tokens after {tokens}, without main_grad")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_gradients_repeat(dtype):
    arguments = _training(33, 65, 5000, dtype)
    first = accumulate(*arguments)
    for _ in range(3):
        assert_same(accumulate(*arguments), first, "run again")


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_every_token_counts_once(dtype):
    """Whole numbers: any order is exact, so the sum shows what was read."""
    n, k = 3, 5
    for tokens in (1, 15, 16, 17, 1023, 1025, 4095, 4097, 9000):
        x = torch.arange(tokens * k).remainder(5).view(tokens, k).to(dtype)
        grad = torch.arange(tokens * n).remainder(3).sub(1).view(tokens, n).to(dtype)
        dw, db = accumulate(x, torch.zeros(n, k, dtype=dtype), torch.zeros(n, dtype=dtype), grad)
        assert torch.equal(dw, (grad.double().T @ x.double()).float())
        assert torch.equal(db, grad.double().sum(0).float())


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
def test_batch_dimensions_are_tokens(dtype):
    x, weight, bias, grad = _training(8, 16, 6 * 50, dtype)
    flat = accumulate(x, weight, bias, grad)
    for shape in ((6, 50), (2, 3, 50), (1, 300)):
        batched = _accumulate_whole(x.view(*shape, 16), weight, bias, grad.view(*shape, 8))
        assert_same(batched, flat, f"tokens as {shape}")


def _accumulate_whole(x, weight, bias, grad):
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    weight.main_grad, bias.main_grad = torch.zeros(weight.shape), torch.zeros(bias.shape)
    isogemm.linear(x, weight, bias).backward(grad)
    return weight.main_grad, bias.main_grad


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("tokens", [64, 9000])
def test_main_grad_no_worse_than_torch(tokens, dtype):
    x, weight, bias, grad = _training(17, 33, tokens, dtype)
    dw, db = accumulate(x, weight, bias, grad)
    exact, size = grad.double().T @ x.double(), grad.double().abs().T @ x.double().abs()
    factor = 2 if dtype == torch.float32 else 4
    assert_no_worse_than_torch(dw, grad.float().T @ x.float(), exact, scale=size, factor=factor)
    sums, sizes = grad.double().sum(0), grad.double().abs().sum(0)
    # A chunk of db is one sum of up to 4096 terms; torch sums in a tree.
    assert bool(((db.double() - sums).abs() <= 4096 * 2**-24 * sizes).all())


@pytest.mark.parametrize(
    ("grad", "x", "message"),
    [
        (torch.ones(8, 4), torch.ones(9, 6), "same tokens"),
        (torch.ones(8, 4), torch.ones(8, 6, dtype=torch.bfloat16), "same dtype"),
    ],
)
def test_token_sums_are_validated(grad, x, message):
    with pytest.raises(ValueError, match=message):
        torch.ops.isogemm.weight_grad(grad, x)
    with pytest.raises(ValueError, match=message):
        torch.ops.isogemm.add_weight_grad(torch.zeros(4, 6), torch.zeros(4, 6), grad, x)
