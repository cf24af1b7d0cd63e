"""The CPU backend of attention: errors against float64, and bits that nothing around may change."""

import math

import plain_encoder_oracle
import pytest
import torch
from attention_oracle import AttentionInputs, AttentionResults, torch_attention
from nonfinite import assert_same_nonfinite
from torch.nn import functional as F

from isogemm.encoder.attention import cpu
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data

SIZES = [(5, 7, 12, 3), (3, 42, 16, 4), (2, 128, 64, 2), (4, 17, 48, 3), (1, 1, 16, 4)]  # S, T, D, H


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device="cpu")


def _attention(q, k, v, mask, nhead, is_causal, grad):
    """o, lse, dq, dk, dv."""
    o, lse = torch.full(q.shape, math.nan, dtype=q.dtype), torch.full((*q.shape[:2], nhead), math.nan)
    call = cpu.AttentionCall(q, k, v, mask, nhead, is_causal, None)
    cpu.attention(call, o, lse)
    gradients = [torch.full(q.shape, math.nan, dtype=q.dtype) for _ in range(3)]
    cpu.attention_backward(call, grad, None, *gradients)
    return o, lse, *gradients


def _operands(size, dtype=torch.float32):
    sequences, tokens, width, _ = size
    return [_normal(sequences, tokens, width, seed=seed, dtype=dtype) for seed in range(4)]


def _mask(kind, sequences, tokens):
    if kind == "none":
        return None
    left_out = torch.arange(tokens) >= torch.arange(sequences)[:, None] % tokens + 1
    if kind == "bool":
        return left_out
    return torch.where(left_out, -math.inf, _normal(sequences, tokens, seed=9))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_as_exact_as_torch(size, mask, is_causal):
    nhead = size[3]
    q, k, v, grad = _operands(size)
    mask = _mask(mask, *size[:2])

    def in_torch(dtype):
        leaves = [each.to(dtype).requires_grad_() for each in (q, k, v)]
        o = plain_encoder_oracle.attention(*leaves, nhead, mask, is_causal)
        return o.detach(), *torch.autograd.grad(o, leaves, grad.to(dtype))

    o, _, *gradients = _attention(q, k, v, mask, nhead, is_causal, grad)
    for ours, theirs, exact in zip((o, *gradients), in_torch(torch.float32), in_torch(torch.float64), strict=True):
        assert_no_worse_than_torch(ours, theirs, exact, ulps=8)  # products rounded, where torch's are fused into sums


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
@pytest.mark.parametrize("dropout", [0.0, 0.3, 1.0])
def test_residual_scores_and_dropout_are_as_exact_as_torch(size, mask, dropout, monkeypatch):
    monkeypatch.setattr(cpu, "_TILE", 5000)  # several parts
    sequences, tokens, _, nhead = size
    q, k, v, grad = _operands(size)
    previous, of_scores = (_normal(sequences, nhead, tokens, tokens, seed=seed) for seed in (5, 6))
    previous[0, 0, 0, 0] = -math.inf
    of_keys, is_causal, seed = _mask(mask, sequences, tokens), mask == "none", torch.tensor([-(2**40) + 3])
    inputs = AttentionInputs(q, k, v, grad, nhead, of_keys, is_causal, previous, of_scores, seed, dropout)
    call = cpu.AttentionCall(q, k, v, of_keys, nhead, is_causal, None, previous, seed, dropout, scores=True)
    o, *gradients = (torch.full(q.shape, math.nan) for _ in range(4))
    scores, d_previous = torch.full((2, *previous.shape), math.nan)
    cpu.attention(call, o, torch.empty(sequences, tokens, nhead), scores)
    cpu.attention_backward(call, grad, of_scores, *gradients, d_previous=d_previous)
    theirs, exact = torch_attention(inputs, torch.float32), torch_attention(inputs, torch.float64)
    ours = AttentionResults(o, scores, *gradients, d_previous)
    for name, *found in zip(ours._fields, ours, theirs, exact, strict=True):
        assert_same_nonfinite(found[0], found[2], name)
        assert_no_worse_than_torch(*found, ulps=8, what=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_attention_bits_of_a_sequence_are_its_own(size, dtype):
    sequences, tokens, _, nhead = size
    q, k, v, grad = _operands(size, dtype)
    mask = _mask("bool", sequences, tokens)
    whole = _attention(q, k, v, mask, nhead, False, grad)
    for index in range(sequences):
        one = slice(index, index + 1)
        alone = _attention(q[one], k[one], v[one], mask[one], nhead, False, grad[one])
        for ours, expected in zip(alone, whole, strict=True):
            assert_bitwise_equal(ours, expected[one])


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("longer", [43, 64, 100])
def test_attention_bits_survive_padding(kind, longer):
    size = sequences, tokens, _, nhead = 3, 42, 16, 4
    operands = _operands(size)
    plain = _attention(*operands[:3], None, nhead, False, operands[3])
    padded = [F.pad(each, (0, 0, 0, longer - tokens), value=2.0) for each in operands[:3]]
    grad = F.pad(operands[3], (0, 0, 0, longer - tokens))
    mask = torch.arange(longer).expand(sequences, longer) >= tokens
    if kind == "additive":
        mask = torch.where(mask, -math.inf, 0.0)
    for ours, expected in zip(_attention(*padded, mask, nhead, False, grad), plain, strict=True):
        assert_bitwise_equal(ours[:, :tokens], expected)


def test_a_query_without_keys_attends_to_nothing():
    q, k, v, grad = _operands((2, 5, 8, 2))
    mask = torch.tensor([[True] * 5, [True, False, False, False, False]])
    o, lse, *gradients = _attention(q, k, v, mask, 2, True, grad)
    empty = torch.tensor([[True] * 5, [True] + [False] * 4])
    assert torch.equal(o[empty], torch.zeros_like(o[empty]))
    assert torch.equal(lse == math.inf, empty[..., None].expand_as(lse))
    assert all(each.isfinite().all() for each in gradients)


def test_lse_is_in_base_two():
    q, k, v, grad = _operands((2, 9, 8, 2))
    _, lse, *_ = _attention(q, k, v, None, 2, False, grad)
    heads = [each.double().view(2, 9, 2, 4).transpose(1, 2) for each in (q, k)]
    exact = torch.logsumexp(heads[0] @ heads[1].mT / 2, -1).transpose(1, 2) * math.log2(math.e)
    torch.testing.assert_close(lse.double(), exact, rtol=1e-6, atol=1e-6)  # a few float32 ulps
