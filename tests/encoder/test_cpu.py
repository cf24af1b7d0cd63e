"""The CPU backend of norm and attention: errors against float64, and bits that nothing around may change."""

import math

import pytest
import torch
from attention_oracle import AttentionInputs, AttentionResults, torch_attention
from torch.nn import functional as F

from isogemm.encoder import cpu, reference
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data

ROWS = 64
NORMS = ["layer_norm", "rms_norm"]
WIDTHS = [1, 3, 16, 17, 48, 100, 256]
SIZES = [(5, 7, 12, 3), (3, 42, 16, 4), (2, 128, 64, 2), (4, 17, 48, 3), (1, 1, 16, 4)]  # S, T, D, H


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device="cpu")


def _torch_norm(kind, x, weight, bias):
    if kind == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
    return F.rms_norm(x, x.shape[-1:], weight, 1e-5)


def _norm_gradients(kind, x, weight, bias, grad):
    leaves = [each.detach().requires_grad_() for each in (x, weight, bias)]
    found = torch.autograd.grad(_torch_norm(kind, *leaves), leaves, grad, allow_unused=True)
    return [each for each in found if each is not None]


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_is_as_exact_as_torch(kind, width):
    x, weight, bias = _normal(150, width), _normal(width, seed=1), _normal(width, seed=2)
    grad = _normal(150, width, seed=3)
    added = bias if kind == "layer_norm" else None
    exact = [each.double() for each in (x, weight, bias)]
    actual = cpu.norm(x, weight, added, kind, 1e-5)
    assert_no_worse_than_torch(actual, _torch_norm(kind, x, weight, bias), _torch_norm(kind, *exact), ulps=4)
    dx, of_weight, of_bias = cpu.norm_backward(grad, x, weight, kind, 1e-5, ROWS)
    theirs, right = _norm_gradients(kind, x, weight, bias, grad), _norm_gradients(kind, *exact, grad.double())
    assert_no_worse_than_torch(dx, theirs[0], right[0], ulps=4)
    terms = grad.double() * _torch_norm(kind, exact[0], None, None)
    for sums, exact_terms in ((of_weight, terms), (of_bias, grad.double())):
        error = (sums.double().sum(0) - exact_terms.sum(0)).abs()
        assert (error <= 16 * 2**-24 * exact_terms.abs().sum(0) + 1e-37).all()  # six adds, and a term's own roundings


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_bits_of_a_row_are_its_own(kind, width):
    x, weight, grad = _normal(513, width), _normal(width, seed=1), _normal(513, width, seed=2)
    whole = cpu.norm(x, weight, None, kind, 1e-5)
    dx, *_ = cpu.norm_backward(grad, x, weight, kind, 1e-5, ROWS)
    for rows in (slice(0, 1), slice(512, 513), slice(3, 20), slice(100, 513)):
        assert_bitwise_equal(cpu.norm(x[rows], weight, None, kind, 1e-5), whole[rows])
        assert_bitwise_equal(cpu.norm_backward(grad[rows], x[rows], weight, kind, 1e-5, ROWS)[0], dx[rows])


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("threads", [1, 4])
def test_norm_bits_of_a_wide_row_are_its_own(kind, threads):
    """A sum that torch shares out among its threads, and by the strides."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, weight = _normal(37, 40000), _normal(40000, seed=1)
        whole = cpu.norm(x, weight, None, kind, 1e-5)
        assert_bitwise_equal(cpu.norm(x.t().contiguous().t(), weight, None, kind, 1e-5), whole)
        for row in (0, 17, 36):
            assert_bitwise_equal(cpu.norm(x[row : row + 1], weight, None, kind, 1e-5), whole[row : row + 1])
    finally:
        torch.set_num_threads(before)


def test_norm_sums_are_of_blocks_of_rows():
    x, weight, grad = _normal(200, 24), _normal(24, seed=1), _normal(200, 24, seed=2)
    _, of_weight, of_bias = cpu.norm_backward(grad, x, weight, "layer_norm", 1e-5, ROWS)
    assert of_weight.shape == of_bias.shape == (4, 24)
    _, *alone = cpu.norm_backward(grad[64:128], x[64:128], weight, "layer_norm", 1e-5, ROWS)
    assert_bitwise_equal(alone[0], of_weight[1:2])
    assert_bitwise_equal(alone[1], of_bias[1:2])


def _attention(q, k, v, mask, nhead, is_causal, grad):
    """o, lse, dq, dk, dv."""
    o, lse = torch.full(q.shape, math.nan, dtype=q.dtype), torch.full((*q.shape[:2], nhead), math.nan)
    cpu.attention(q, k, v, mask, nhead, is_causal, o, lse)
    gradients = [torch.full(q.shape, math.nan, dtype=q.dtype) for _ in range(3)]
    cpu.attention_backward(grad, q, k, v, mask, nhead, is_causal, *gradients)
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
        o = reference.attention(*leaves, nhead, mask, is_causal)
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
    extras = cpu.Extras(previous, dropout, seed)
    o, *gradients = (torch.full(q.shape, math.nan) for _ in range(4))
    scores, d_previous = torch.full((2, *previous.shape), math.nan)
    cpu.attention(q, k, v, of_keys, nhead, is_causal, o, torch.empty(sequences, tokens, nhead), scores, extras)
    cpu.attention_backward(grad, q, k, v, of_keys, nhead, is_causal, *gradients, of_scores, d_previous, extras)
    theirs, exact = torch_attention(inputs, torch.float32), torch_attention(inputs, torch.float64)
    ours = AttentionResults(o, scores, *gradients, d_previous)
    for name, *found in zip(ours._fields, ours, theirs, exact, strict=True):
        assert_no_worse_than_torch(*found, ulps=8, match_nonfinite=True, what=name)


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
