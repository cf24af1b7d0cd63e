"""Attention with dropout and residual scores by every family of kernels, against torch in float64; its bits."""

import itertools

import pytest
import torch
from attention_oracle import AttentionInputs, AttentionResults, attention_by_head, torch_attention
from nonfinite import assert_same_nonfinite

from isogemm.encoder.attention import op
from isogemm.encoder.attention.configs import MOST_FACTORS, MmaConfig
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cuda"
FAMILIES = {  # head, dtype, precision
    "registers, ieee": (4, torch.float32, "ieee"),
    "registers, odd": (3, torch.bfloat16, None),
    "registers, long": (16, torch.float32, "ieee"),
    "fragments, short": (4, torch.float32, "tf32"),  # in registers without scores
    "fragments, tf32": (8, torch.float32, "tf32"),
    "fragments, bf16": (8, torch.bfloat16, None),
    "fragments, long": (16, torch.float16, None),
    "dot, tf32": (32, torch.float32, "tf32"),
    "dot, bf16": (32, torch.bfloat16, None),
    "dot, ieee": (24, torch.float32, "ieee"),
    "dot, widened": (80, torch.bfloat16, None),
}
TOKENS = {2: ("", False), 5: ("bool", False), 42: ("additive", False), 64: ("", True), 65: ("bool", True)}
SEQUENCES, NHEAD = 5, 2


def _normal(*shape, seed, dtype):
    return make_data("normal", shape, seed=seed, dtype=dtype, device=DEVICE)


def _inputs(family, tokens, residual=True, dropout=0.0, mask="", causal=False, sequences=SEQUENCES):
    """One of the residual scores is -inf; with a mask, the last sequence has no keys."""
    head, dtype, _ = FAMILIES[family]
    q, k, v, grad = (_normal(sequences, tokens, NHEAD * head, seed=seed, dtype=dtype) for seed in range(4))
    previous = of_scores = of_keys = None
    if residual:
        previous, of_scores = (_normal(sequences, NHEAD, tokens, tokens, seed=seed, dtype=dtype) for seed in (4, 5))
        previous[0, 0, 0, -1] = -torch.inf
    if mask:
        of_keys = torch.arange(tokens, device=DEVICE) >= torch.arange(sequences, 0, -1, device=DEVICE)[:, None] - 1
        if mask == "additive":
            values = _normal(sequences, tokens, seed=6, dtype=torch.float32)
            of_keys = values.masked_fill(of_keys, -torch.inf)
    seed = torch.tensor([-(2**40) - 5], device=DEVICE) if dropout else None
    return AttentionInputs(q, k, v, grad, NHEAD, of_keys, causal, previous, of_scores, seed, dropout)


def _results(inputs, precision):
    """Into poisoned memory."""
    residual = inputs.previous is not None
    leaves = [each.detach().requires_grad_() for each in (*inputs[:3], *([inputs.previous] if residual else []))]
    call = op.AttentionCall(
        *leaves[:3], inputs.mask, inputs.nhead, inputs.is_causal, precision,
        previous=leaves[3] if residual else None, seed=inputs.seed, dropout=inputs.dropout, scores=residual,
    )  # fmt: skip
    with poisoned_allocations():
        o, scores = op.attention(call)
        outputs = (o, scores) if residual else (o,)
        above = (inputs.grad, inputs.of_scores) if residual else (inputs.grad,)
        gradients = torch.autograd.grad(outputs, leaves, above)
    shown = scores.detach() if residual else None
    return AttentionResults(o.detach(), shown, *gradients[:3], gradients[3] if residual else None)


def _assert_close(inputs, precision):
    _assert_results_close(_results(inputs, precision), inputs, precision)


def _assert_results_close(found, inputs, precision):
    """float16 keeps as many bits as TF32; the factor is for the lse, whose rounding is in all weights of a row."""
    peer = torch_attention(inputs, torch.float16 if precision == "tf32" else inputs.q.dtype)
    exact = torch_attention(inputs, torch.float64)
    for name, ours, theirs, right in zip(found._fields, found, peer, exact, strict=True):
        if ours is not None:
            theirs = theirs.to(ours.dtype)
            assert_same_nonfinite(ours, right, name)
            assert_no_worse_than_torch(ours, theirs, right, factor=4, ulps=8, what=name)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_with_residual_scores(family, tokens):
    mask, causal = TOKENS[tokens]
    inputs = _inputs(family, tokens, True, 0.2, mask, causal)
    _assert_close(inputs, FAMILIES[family][2])


@pytest.mark.parametrize("variant", ["dropout", "residual"])
@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_or_residual_scores(family, variant):
    inputs = _inputs(family, 42, variant == "residual", 0.3 if variant == "dropout" else 0.0)
    _assert_close(inputs, FAMILIES[family][2])


@pytest.mark.parametrize("tokens", [40, 42])
@pytest.mark.parametrize("family", ["registers, ieee", "fragments, bf16", "dot, tf32"])
def test_all_dropped(family, tokens):
    found = _results(_inputs(family, tokens, True, 1.0), FAMILIES[family][2])
    assert not found.o.any()
    assert not found.dv.any()


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_of_a_sequence_are_its_own(family):
    """But for dropout, whose masks follow the place in the batch."""
    inputs, precision = _inputs(family, 42, sequences=33), FAMILIES[family][2]
    whole = _results(inputs, precision)
    for name, first, again in zip(whole._fields, whole, _results(inputs, precision), strict=True):
        assert_bitwise_equal(first, again, name)
    one = slice(32, 33)
    alone = AttentionInputs(*(each[one] if isinstance(each, torch.Tensor) else each for each in inputs))
    for name, ours, expected in zip(whole._fields, _results(alone, precision), whole, strict=True):
        assert_bitwise_equal(ours, expected[one], name)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_bits_are_those_of_the_seed(family, residual):
    inputs, precision = _inputs(family, 42, residual, 0.2, sequences=33), FAMILIES[family][2]
    first, again = _results(inputs, precision), _results(inputs, precision)
    for name, ours, expected in zip(first._fields, first, again, strict=True):
        if ours is not None:
            assert_bitwise_equal(ours, expected, name)
    other = _results(inputs._replace(seed=inputs.seed + 1), precision)
    assert not torch.equal(first.o, other.o)


@pytest.mark.parametrize("family", ["registers, ieee", "fragments, tf32", "dot, bf16"])
def test_scores_that_lie_apart(family):
    """What is not contiguous, or not aligned, has the same bits."""
    inputs, precision = _inputs(family, 42, dropout=0.2), FAMILIES[family][2]
    expected = _results(inputs, precision)
    shape = inputs.previous.shape
    odd = torch.empty(inputs.previous.numel() + 1, dtype=inputs.previous.dtype, device=DEVICE)[1:].view(shape)
    odd.copy_(inputs.previous)
    apart = inputs._replace(previous=odd, of_scores=inputs.of_scores.mT.contiguous().mT)
    for name, ours, right in zip(expected._fields, _results(apart, precision), expected, strict=True):
        assert_bitwise_equal(ours, right, name)


@pytest.mark.parametrize("family", ["registers, ieee", "fragments, bf16", "dot, tf32"])
def test_scores_without_gradients(family):
    """Nothing comes in for them, and nothing is wanted for those of the layer before."""
    inputs, precision = _inputs(family, 21, dropout=0.2), FAMILIES[family][2]
    expected = _results(inputs._replace(of_scores=torch.zeros_like(inputs.of_scores)), precision)
    leaves = [each.detach().requires_grad_() for each in inputs[:3]]
    call = op.AttentionCall(
        *leaves, None, NHEAD, False, precision, previous=inputs.previous, seed=inputs.seed, dropout=0.2, scores=True
    )
    o, scores = op.attention(call)
    gradients = torch.autograd.grad(o, leaves, inputs.grad)
    assert_bitwise_equal(scores, expected.scores)
    for ours, right in zip(gradients, expected[2:5], strict=True):
        torch.testing.assert_close(ours, right)  # -0 + 0


def _factored(family, tokens, factors, dropout=0.0, mask="", causal=False, sequences=SEQUENCES):
    """With q and k of so many earlier layers, and gradients from later ones."""
    inputs = _inputs(family, tokens, False, dropout, mask, causal, sequences)
    q_and_k = _normal(factors + 1, 2, *inputs.q.shape, seed=7, dtype=inputs.q.dtype)
    return inputs._replace(earlier=q_and_k[1:] if factors else None, of_own=q_and_k[0])


FACTORED = [family for family in FAMILIES if family.startswith("fragments")]


def _earlier_layers():
    """Each pair of family, factors and tokens: the kernels of all combinations take minutes to compile."""
    for (i, family), factors, (j, tokens) in itertools.product(
        enumerate(FACTORED), range(MOST_FACTORS + 1), enumerate(TOKENS)
    ):
        place = i + factors + j
        if place % 2 == 0:
            yield family, factors, tokens, 0.2 * (place // 2 % 2)


@pytest.mark.parametrize(("family", "factors", "tokens", "dropout"), [*_earlier_layers()])
def test_earlier_layers(family, factors, tokens, dropout):
    mask, causal = TOKENS[tokens]
    precision = FAMILIES[family][2] or "ieee"
    inputs = _factored(family, tokens, factors, dropout, mask, causal)
    found = attention_by_head(inputs, precision, transposed=precision == "tf32")
    _assert_results_close(found, inputs, precision)


@pytest.mark.parametrize("factors", [1, 2])
@pytest.mark.parametrize("family", FACTORED)
def test_earlier_layers_bits(family, factors):
    """A sequence's are its own, whatever a warp owns; enough of them that the cache is asked for all at once."""
    inputs, precision = _factored(family, 42, factors, sequences=2049), FAMILIES[family][2] or "ieee"
    whole = attention_by_head(inputs, precision)
    q, k, v, grad = (each[2048:] for each in inputs[:4])
    earlier, of_own = inputs.earlier[:, :, 2048:], inputs.of_own[:, 2048:]
    alone = inputs._replace(q=q, k=k, v=v, grad=grad, earlier=earlier, of_own=of_own)
    for config in (None, MmaConfig(1)):
        found = attention_by_head(alone, precision, config=config)
        for name in ("o", "dq", "dk", "dv"):
            assert_bitwise_equal(getattr(found, name), getattr(whole, name)[2048:], name)
        assert_bitwise_equal(found.d_previous, whole.d_previous[:, :, 2048:])
