"""Attention's bits on a GPU depend on a query's own sequence: not on batch, padding, chunk, cache, tile or run."""

import functools
from dataclasses import replace

import attention_promises
import pytest
import torch
from attention_cases import Case, Pages, alone, attend, attend_packed, offsets, packed, padded
from attention_promises import Scale, assert_same

import isogemm
from isogemm.verify.compare import assert_bitwise_equal

CASES = [
    Case("bf16", 8, 2, 64),
    Case("bf16", 8, 1, 128),
    Case("fp16", 7, 1, 80, window=63, sinks=True),
    Case("bf16", 4, 4, 256, softcap=20.0, window=128),
    Case("tf32", 4, 1, 64),
    Case("ieee", 4, 2, 40, 16, window=128, sinks=True),
    Case("bf16", 4, 4, 192, 128, causal=False),
    Case("bf16", 14, 2, 16, causal=False, window=(100, 28), softcap=3.0),
]
CASES = [replace(case, device="cuda") for case in CASES]
SCALE = Scale(
    batches=tuple(range(1, 65)),
    trained_batches=(1, 2, 17, 64),
    everywhere=(2, 17),
    prompt=700,
    cuts=range(1, 700),
    random_cuts=4,
    decode=300,
    decoded=range(1, 301),
    lengths=tuple(length + more for length in (64, 128, 512, 1024) for more in (-1, 0, 1)),
    page_sizes=(16, 64),
)


@pytest.fixture
def scale():
    return SCALE


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return request.param


class TestAttention(attention_promises.AttentionPromises):
    """See tests/shared/attention_promises.py."""


HEADS = (16, 40, 64, 80, 96, 128, 192, 256)


@pytest.mark.parametrize("head", HEADS)
def test_every_head_size(head):
    """Alone, padded and packed, with gradients, and a few decoded tokens."""
    case = Case("bf16", 4, 1, head, device="cuda")
    sequences = [case.sequence(length, seed=length) for length in (600, 65, 1)]
    expected = [alone(case, each, train=True) for each in sequences]
    assert_same(padded(case, sequences, side="left", spare=3, train=True), expected, f"{case}: left")
    assert_same(packed(case, sequences, train=True), expected, f"{case}: packed")
    whole = sequences[0]
    for n in (1, 2, 63, 64, 65, 512, 513, 599):
        assert_bitwise_equal(
            alone(case, whole.prefix(n).last_queries(1))[0], expected[0][0][:, n - 1 : n], f"{case}: token {n}"
        )


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (16, 4), (14, 2), (32, 1)])
def test_every_number_of_queries(heads, kv_heads):
    """The last queries of a long sequence, from one to hundreds, alone and in batches: other tiles, the same bits."""
    case = Case("bf16", heads, kv_heads, 64, device="cuda")
    whole = case.sequence(3 * case.order().split + 77)
    expected = alone(case, whole)[0]
    q, k, v, _ = (x[None] for x in whole)
    for queries in (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 500):
        for batch in (1, 7) if queries > 5 else (1, 2, 7, 33):
            own = [x.expand(batch, -1, -1, -1) for x in (q[:, :, -queries:], k, v)]
            (o,) = attend(case, *own)
            for i in {0, batch - 1}:
                assert_bitwise_equal(o[i], expected[:, -queries:], f"{case}: {queries} queries, {i} of {batch}")


@pytest.mark.parametrize("number", ["bf16", "tf32"])
def test_a_long_cache(number):
    """Decode from 20000 keys, which lie anywhere in larger buffers, as in one pass over the last queries."""
    case = Case(number, 8, 2, 128, device="cuda")
    keys = 20_000
    whole = case.sequence(keys, 200)
    expected = alone(case, whole)[0]
    lengths = torch.tensor([keys, keys - 7, keys - 199], device="cuda")
    for spare in (0, 1, 5000):
        k, v = (torch.full_like(x, torch.nan).repeat(1, 2, 1)[None, :, : keys + spare] for x in whole[1:3])
        k, v = (x.repeat(3, 1, 1, 1) for x in (k, v))
        k[:, :, :keys], v[:, :, :keys] = whole.k, whole.v
        for queries in (1, 3):
            q = torch.stack([whole.q[:, end - queries : end] for end in (200, 193, queries)])
            at = [200, 193, queries]
            own = torch.stack([lengths[0], lengths[1], lengths[2] + queries - 1])
            (o,) = attend(case, q, k, v, kv_lengths=own)
            for i in range(3):
                what = f"{case}: sequence {i}, {queries} queries, {spare} more"
                assert_bitwise_equal(o[i], expected[:, at[i] - queries : at[i]], what)
    pages = Pages.of(case, [whole], 256)
    (o,) = pages.attend(case, [whole.q[:, -1:]], [keys])
    assert_bitwise_equal(o, expected[:, -1:], f"{case}: pages")


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[5]], ids=str)
def test_gradients_of_long_sequences(case):
    """Several splits and more than one block of queries, alone, in a batch and packed with shorter ones."""
    case = replace(case, window=None if case.window is None else 700)
    split = case.order().split
    sequences = [case.sequence(length, seed=length) for length in (2 * split + 70, 33, split + 1)]
    expected = [alone(case, each, train=True) for each in sequences]
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 1)):
        found = packed(case, [sequences[i] for i in order], train=True)
        assert_same(found, [expected[i] for i in order], f"{case}: packed as {order}")
    assert_same(padded(case, sequences, side="left", train=True), expected, f"{case}: left")
    whole = [x[None].expand(5, -1, -1, -1) for x in sequences[0]]
    found = attend(case, *whole)
    for i in range(5):
        assert_same([tuple(x[i] for x in found)], expected[:1], f"{case}: {i} of 5")


def test_gradients_of_sinks_and_masks_are_repeatable():
    """The same bits in every run: nothing is added up in the order in which programs end."""
    case = Case("bf16", 8, 2, 64, sinks=True, device="cuda")
    sequences = [case.sequence(700, seed=i) for i in range(4)]
    q, k, v, grad = (torch.stack(each) for each in zip(*sequences, strict=True))
    for shape in ((1, 1, 700, 700), (4, 8, 1, 700), (4, 1, 700, 700)):
        results = []
        for _ in range(3):
            mask, sinks = case.data(*shape, seed=5).requires_grad_(), case.options["sinks"].requires_grad_()
            o = isogemm.attention(q, k, v, causal=True, sinks=sinks, attn_mask=mask)
            results.append(torch.autograd.grad(o, (sinks, mask), grad))
        for again in results[1:]:
            for got, same in zip(again, results[0], strict=True):
                assert_bitwise_equal(got, same, f"mask of {shape}")


def test_two_ways_to_lay_out_the_same_batch():
    """A dense batch of equal sequences and the same as one pack: [B, T, H, D] is [B * T, H, D]."""
    case = Case("bf16", 8, 2, 128, device="cuda")
    sequences = [case.sequence(300, seed=i) for i in range(5)]
    q, k, v, grad = (torch.stack(each).transpose(1, 2).contiguous() for each in zip(*sequences, strict=True))
    dense = attend(case, *(x.transpose(1, 2) for x in (q, k, v, grad)))
    ends = offsets([300] * 5, "cuda")
    flat = attend_packed(case, *(x.flatten(0, 1) for x in (q, k, v)), ends, ends, grad.flatten(0, 1))
    assert_same([flat], [tuple(x.transpose(1, 2).flatten(0, 1) for x in dense)], str(case))


def test_bits_beside_other_work():
    """Another stream keeps the chip busy: programs start in another order, at other times."""
    case = Case("bf16", 8, 2, 64, device="cuda")
    prompt, decode = case.sequence(700), case.sequence(8000, 1)
    calls = [functools.partial(alone, case, prompt, True), functools.partial(alone, case, decode)]
    expected = [call() for call in calls]
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    load = torch.randn(2048, 2048, device="cuda")
    for _ in range(10):
        with torch.cuda.stream(other):
            load = torch.tanh(load @ load)
        for call, same in zip(calls, expected, strict=True):
            assert_same([call()], [same], str(case))
    torch.cuda.synchronize()


@pytest.mark.alone
def test_offsets_past_32_bits():
    """Keys and values of sequences that lie more than 2^31 elements apart, dense and in pages."""
    case = Case("bf16", 4, 2, 64, device="cuda")
    own = [case.sequence(600, seed=i) for i in range(2)]
    expected = [alone(case, each, train=True) for each in own]
    far = 2**31 + 64
    memory = torch.empty(far + 4 * own[0].k.numel() + 1024, dtype=torch.bfloat16, device="cuda")

    def apart(name, first):
        parts = torch.stack([getattr(each, name) for each in own])
        view = memory[first:].as_strided(parts.shape, (far, *parts.stride()[1:]))
        return view.copy_(parts)

    k, v = apart("k", 0), apart("v", own[0].k.numel())
    q, grad = (torch.stack([getattr(each, name) for each in own]) for name in ("q", "grad"))
    assert_same(zip(*attend(case, q, k, v, grad), strict=True), expected, "keys and values far apart")
    q = apart("q", 0)
    k, v = (torch.stack([getattr(each, name) for each in own]) for name in ("k", "v"))
    assert_same(zip(*attend(case, q, k, v, grad), strict=True), expected, "queries far apart")
    size = 16
    pages = Pages.of(case, own[:1], size)
    elements = size * 2 * 64
    many = memory.view(-1)[: memory.numel() // elements * elements].view(-1, size, 2, 64)
    for i, cache in enumerate((pages.k, pages.v)):
        count = len(cache)
        shift = len(many) - (2 - i) * count
        many[shift : shift + count] = cache
    base = len(many) - 2 * len(pages.k)
    table = torch.where(pages.table < 0, pages.table, pages.table + base)
    k, v = many[: -len(pages.k)], many[len(pages.k) :]
    (o,) = Pages(k, v, table).attend(case, [own[0].q], [600])
    assert_bitwise_equal(o, expected[0][0], "pages far apart")
