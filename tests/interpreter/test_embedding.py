"""The kernels of an embedding's gradient on the CPU: in the order of the contract, bit for bit."""

import math

import pytest
import torch

from isogemm.norm.configs import EMBEDDING_CHUNK
from isogemm.norm.kernels.embedding import LONG, describe_embedding_backward, describe_long_pieces
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device="cpu")


def _gradient(grad, ids, vocabulary, *, padding=-1, total=None, dtype=torch.float32):
    tokens, d = grad.shape
    windows = -(-tokens // LONG)
    sums, ends = torch.full((windows, d), math.nan), torch.full((windows,), -1, dtype=torch.int32)
    out = torch.zeros(vocabulary, d, dtype=dtype) if total is None else total.clone()
    tensors = grad, *ids.sort(stable=True), sums, ends
    describe_long_pieces(tokens, d).run(*tensors)
    strides = out.stride()
    describe_embedding_backward(tokens, vocabulary, d, padding, strides, total is not None).run(*tensors, out)
    return out


def _expected(grad, ids, vocabulary, total=None):
    """Each chunk's rows of an id from zero, in order; then the chunks, in order."""
    out = torch.zeros(vocabulary, grad.shape[1]) if total is None else total.clone()
    for rows, those in zip(grad.float().split(EMBEDDING_CHUNK), ids.split(EMBEDDING_CHUNK), strict=True):
        for id in those.unique().tolist():
            piece = torch.zeros(grad.shape[1])
            for row in rows[those == id]:
                piece = piece + row
            out[id] += piece
    return out


def _ids(tokens, vocabulary, seed=0):
    """Some ids often, others once, in a row or scattered."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, (tokens,), generator=generator)
    ids[torch.rand(tokens, generator=generator) < 0.5] = 1
    ids[tokens // 3 : tokens // 3 + 40] = 2
    return ids.int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "vocabulary", "d"), [(1, 1, 1), (31, 3, 5), (300, 7, 20), (1100, 50, 3)])
def test_the_order_is_the_contracts(tokens, vocabulary, d, dtype):
    ids, grad = _ids(tokens, vocabulary).clamp(max=vocabulary - 1), _normal(tokens, d, dtype=dtype)
    expected = _expected(grad, ids, vocabulary)
    assert_bitwise_equal(_gradient(grad, ids, vocabulary), expected)
    assert_bitwise_equal(_gradient(grad, ids, vocabulary, dtype=dtype), expected.to(dtype))


def test_one_id_for_all_tokens():
    grad, ids = _normal(2 * EMBEDDING_CHUNK + 5, 4), torch.full((2 * EMBEDDING_CHUNK + 5,), 2, dtype=torch.int32)
    assert_bitwise_equal(_gradient(grad, ids, 4), _expected(grad, ids, 4))


def test_micro_batches_add_to_a_total():
    ids, grad, before = _ids(EMBEDDING_CHUNK + 99, 6), _normal(EMBEDDING_CHUNK + 99, 4), _normal(4, 6, seed=1).t()
    whole = _gradient(grad, ids, 6, total=before)
    assert_bitwise_equal(whole, _expected(grad, ids, 6, before))
    first = slice(0, EMBEDDING_CHUNK)
    rest = slice(EMBEDDING_CHUNK, None)
    assert_bitwise_equal(
        _gradient(grad[rest], ids[rest], 6, total=_gradient(grad[first], ids[first], 6, total=before)), whole
    )


def test_the_padding_row_is_left_alone():
    ids, grad = _ids(200, 6), _normal(200, 4)
    found = _gradient(grad, ids, 6, padding=1)
    assert not found[1].any()
    others = [0, 2, 3, 4, 5]
    assert_bitwise_equal(found[others], _expected(grad, ids, 6)[others])


def test_columns_in_several_programs():
    ids, grad = _ids(70, 4), _normal(70, 1030)
    assert_bitwise_equal(_gradient(grad, ids, 4), _expected(grad, ids, 4))
