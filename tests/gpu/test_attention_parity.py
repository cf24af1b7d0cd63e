"""Attention's values and every gradient on a GPU: errors at most twice those of torch's, against float64."""

from dataclasses import replace

import pytest
import torch
from attention_cases import Case, alone, packed
from attention_parity import assert_parity
from attention_promises import assert_same

import isogemm

HEADS = (16, 40, 64, 80, 96, 128, 192, 256)
NUMBERS = ("bf16", "fp16", "tf32", "ieee")


def _case(*arguments, **options):
    return Case(*arguments, **options, device="cuda")


@pytest.mark.parametrize("head", HEADS)
def test_head_sizes(head):
    case = _case("bf16", 8, 2, head)
    assert_parity(case, 257, 257)
    assert_parity(replace(case, causal=False), 63, 1000)
    assert_parity(replace(case, causal=False), 300, 17)
    assert_parity(case, 1, 130)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head", "value_head"), [(4, 4, 192, 128), (7, 1, 40, 72), (4, 1, 64, 0), (2, 2, 3, 1)]
)
def test_groups_and_value_sizes(number, heads, kv_heads, head, value_head):
    case = _case(number, heads, kv_heads, head, value_head)
    for queries, keys in ((127, 127), (3, 65), (65, 700)):
        assert_parity(case, queries, keys)


OPTIONS = [
    {"window": 1},
    {"window": 63, "sinks": True},
    {"window": 128},
    {"window": 2000},
    {"causal": False, "window": (40, 20)},
    {"causal": False, "window": (None, 3), "scale": 0.5},
    {"softcap": 2.0},
    {"softcap": 30.0, "window": 100, "sinks": True},
    {"sinks": True, "causal": False},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("number", ["bf16", "tf32"])
def test_options(number, options):
    assert_parity(_case(number, 8, 2, 64, **options), 300, 300)
    assert_parity(_case(number, 8, 2, 64, **options), 33, 600)


@pytest.mark.parametrize("options", [{}, {"sinks": True, "causal": False}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("number", ["bf16", "ieee"])
def test_masks(number, options):
    case = _case(number, 4, 2, 64, **options)
    for shape in ((1, 1, 130, 130), (2, 4, 130, 130)):
        assert_parity(case, 130, 130, mask=(shape, "bool"))
    for shape in ((1, 4, 130, 130), (2, 1, 1, 130), (1, 1, 130, 1), (2, 4, 130, 130)):
        assert_parity(case, 130, 130, mask=(shape, "floating"))


@pytest.mark.parametrize("number", NUMBERS)
def test_placed_by_lengths(number):
    lengths, starts = (torch.tensor(at, device="cuda") for at in ([500, 700], [0, 331]))
    dropped = torch.tensor([512, 3], device="cuda")
    for options in ({}, {"window": 100, "sinks": True}):
        case = _case(number, 8, 2, 64, **options)
        assert_parity(case, 300, 710, kv_lengths=lengths, kv_starts=starts)
        assert_parity(case, 70, 710, kv_lengths=lengths, kv_offsets=dropped)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("head", [64, 128])
def test_long_sequences(number, head):
    """Many splits: the error does not grow with them beyond torch's."""
    case = _case(number, 2, 1, head)
    assert_parity(case, 1500, 1500, batch=1)
    assert_parity(case, 5, 20_000, batch=1)
    assert_parity(replace(case, causal=False), 20, 9000, batch=2)


def test_packed_sequences():
    """By the bits of dense calls, whose errors are measured above."""
    for case in (_case("bf16", 8, 2, 128), _case("tf32", 4, 2, 40, 16, causal=False)):
        sequences = [case.sequence(n, t, seed=n) for n, t in ((300, 300), (1, 1), (77, 3), (600, 130))]
        assert_same(packed(case, sequences, train=True), [alone(case, each, train=True) for each in sequences], case)


def test_large_scores():
    """One key takes all the weight, or two share it: values stay finite and are those keys' values."""
    case = _case("bf16", 2, 2, 64)
    q, k, v, grad = (x[None] for x in case.sequence(200))
    for size in (100.0, 1e4, 1e18):
        big = (q * size).requires_grad_()
        o = isogemm.attention(big, k, v, causal=True)
        exact = torch.nn.functional.scaled_dot_product_attention(
            *(x.detach().double() for x in (big, k, v)), is_causal=True
        )
        right = (o.detach().double() - exact).abs() <= 2**-8 * exact.abs() + 2**-9
        assert float(right.double().mean()) > 0.99, size  # where scores nearly tie, fp32 may choose another
        (dq,) = torch.autograd.grad(o, big, grad)
        assert bool(o.isfinite().all())
        assert bool(dq.isfinite().all())


def test_what_a_query_sees_is_not_hidden():
    """NaN in a key or a value that it sees; values that are infinite."""
    case = _case("bf16", 2, 1, 64)
    for name, value in (("k", torch.nan), ("v", torch.nan), ("v", torch.inf)):
        own = case.sequence(700)
        getattr(own, name)[:, 17] = value
        o = alone(case, own)[0]
        assert not bool(o[:, 17:].isfinite().any()), (name, value)
        if name == "k":
            assert_same([(o[:, :17],)], [alone(case, own.prefix(17))], f"{name} {value}: queries before it")
