"""The CPU backend of attention: blocks and splits from position 0, and errors no worse than torch's."""

import pytest
import torch

import isogemm
from isogemm.attention import configs
from isogemm.verify.attention import assert_accurate
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

ORDER = configs.order(16, 16, "float32")


def operands(queries, keys, heads=4, kv_heads=2, head=16, dtype=torch.float32):
    shapes = (1, heads, queries, head), (1, kv_heads, keys, head), (1, kv_heads, keys, head)
    return [make_data("normal", shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {"causal": True},
        {"softcap": 5.0, "causal": True, "window": 30},
        {"sinks": make_data("normal", (4,), seed=7), "scale": 0.5},
        {"attn_mask": make_data("normal", (1, 4, 90, 90), seed=8)},
        {"attn_mask": make_data("normal", (1, 1, 1, 90), seed=8) > -1, "causal": True},
        {"window": (7, 3)},
    ],
    ids=lambda how: " ".join(how),
)
def test_accurate(how, dtype):
    grad = make_data("normal", (1, 4, 90, 16), seed=3, dtype=dtype)
    assert_accurate(operands(90, 90, dtype=dtype), how, grad)


@pytest.mark.parametrize("keys", [ORDER.block_n, ORDER.split - 1, ORDER.split, ORDER.split + 1, 2 * ORDER.split + 3])
def test_a_token_has_the_bits_of_the_prompt(keys):
    q, k, v = operands(keys, keys)
    whole = isogemm.attention(q, k, v, causal=True)
    assert_bitwise_equal(isogemm.attention(q[:, :, -1:], k, v, causal=True), whole[:, :, -1:])


def test_positions_decide_where_blocks_begin():
    """A cache that dropped old keys keeps its blocks; without their positions it has others."""
    q, k, v = operands(1, ORDER.split + 40)
    window = 50
    whole = isogemm.attention(q, k, v, causal=True, window=window)
    kept = 60
    k, v = k[:, :, -kept:], v[:, :, -kept:]
    offset = torch.tensor([ORDER.split + 40 - kept])
    assert_bitwise_equal(isogemm.attention(q, k, v, causal=True, window=window, kv_offsets=offset), whole)
    assert not torch.equal(isogemm.attention(q, k, v, causal=True, window=window), whole)


def test_a_block_that_nobody_sees_is_not_read():
    q, k, v = operands(3, 200)
    expected = isogemm.attention(q, k, v, causal=True, window=10)
    for x in (k, v):
        x[:, :, : 200 - 13] = torch.nan
    found = isogemm.attention(q, k, v, causal=True, window=10)
    seen = 200 // ORDER.block_n * ORDER.block_n <= 200 - 13  # where the block that is read has none of them
    assert torch.equal(found, expected) == seen


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads):
    inputs = operands(130, 130, dtype=torch.bfloat16)

    def train():
        leaves = [x.clone().requires_grad_() for x in inputs]
        o = isogemm.attention(*leaves, causal=True)
        return [o.detach(), *torch.autograd.grad(o, leaves, torch.ones_like(o))]

    expected, before = train(), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for found, same in zip(train(), expected, strict=True):
            assert_bitwise_equal(found, same)
    finally:
        torch.set_num_threads(before)
