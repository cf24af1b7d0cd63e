"""The logic of the attention on tensor cores on the CPU: poisoned outputs against fp64, and the bits of a sequence."""

from typing import NamedTuple

import pytest
import torch
from attention_oracle import AttentionInputs, AttentionResults, attention_by_head, torch_attention
from nonfinite import assert_same_nonfinite

from isogemm.encoder.attention import kernels
from isogemm.encoder.attention.configs import Attention, DotConfig, MmaConfig, choose, choose_mma
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch

NUMBERS = [(torch.float32, "ieee"), (torch.float32, "tf32"), (torch.float16, "ieee")]
SIZES = [  # tokens, head
    (1, 17), (2, 24), (17, 8), (63, 32), (64, 17), (65, 64), (17, 80), (33, 128), (17, 256),
]  # fmt: skip
SHORT = [(torch.float32, "tf32"), (torch.bfloat16, "ieee"), (torch.float16, "ieee")]
SHORT_SIZES = [(1, 8), (5, 16), (21, 6)]


class Inputs(NamedTuple):
    """q, k, v and do: [sequences, tokens, heads, head]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor


class Results(NamedTuple):
    o: torch.Tensor
    lse: torch.Tensor  # [sequences, tokens, heads]
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def _inputs(sequences, tokens, heads, head, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Inputs(*torch.randn(4, sequences, tokens, heads, head, generator=generator).to(dtype))


def _mask(kind, sequences, tokens, seed=1):
    """A few keys left out, and all of the last sequence's."""
    if not kind:
        return None
    generator = torch.Generator().manual_seed(seed)
    left_out = torch.rand(sequences, tokens, generator=generator) < 0.3
    left_out[-1] = True
    if kind == "bool":
        return left_out
    return torch.randn(sequences, tokens, generator=generator).masked_fill(left_out, -torch.inf)


def _problem(inputs, precision, mask, causal, row_strides):
    sequences, tokens, heads, head = inputs.q.shape
    kind = "" if mask is None else "bool" if mask.dtype == torch.bool else "additive"
    name = str(inputs.q.dtype).removeprefix("torch.")
    strides = (0, 0) if mask is None else mask.stride()
    return Attention(sequences, tokens, heads, head, name, precision, row_strides, causal, kind, strides)


def _launch(inputs, precision="ieee", mask=None, causal=False, config=None):
    """q, k and v as three views of one buffer, and so their gradients."""
    sequences, tokens, heads, head = inputs.q.shape
    rows, width = sequences * tokens, heads * head
    packed = torch.cat([x.reshape(rows, width) for x in inputs[:3]], dim=1)
    q, k, v = packed.split(width, dim=1)
    do = inputs.do.reshape(rows, width)
    o = torch.full_like(do, torch.nan)
    lse = torch.full((rows, heads), torch.nan)
    gradients = torch.full_like(packed, torch.nan)
    dq, dk, dv = gradients.split(width, dim=1)
    problem = _problem(inputs, precision, mask, causal, (3 * width,) * 3)
    kernels.describe(problem, config or choose(problem)).run(q, k, v, mask, None, None, o, lse, None)
    problem = _problem(inputs, precision, mask, causal, (3 * width,) * 6)
    backward = kernels.describe(problem, config or choose(problem))
    backward.run(q, k, v, mask, None, None, o, lse, do, None, dq, dk, dv, None)
    o, dq, dk, dv = (x.reshape(inputs.q.shape) for x in (o, dq, dk, dv))
    return Results(o, lse.reshape(sequences, tokens, heads), dq, dk, dv)


def _torch(inputs, mask, causal, dtype):
    """By torch's operations in `dtype`; a row without keys is all zeros, its lse inf."""
    q, k, v = (x.to(dtype).transpose(1, 2).detach().requires_grad_() for x in inputs[:3])
    tokens, head = q.shape[2:]
    scores = q @ k.transpose(2, 3) * head**-0.5
    if mask is not None:
        added = torch.zeros(mask.shape).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask
        scores = scores + added.to(dtype)[:, None, None]
    if causal:
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)
    empty = (scores == -torch.inf).all(dim=3, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    o = (torch.softmax(scores, dim=3) * ~empty) @ v
    lse = torch.logsumexp(scores, dim=3).masked_fill(empty[..., 0], torch.inf) / torch.log(torch.tensor(2.0).to(dtype))
    gradients = torch.autograd.grad(o, (q, k, v), inputs.do.to(dtype).transpose(1, 2))
    return Results(*(x.detach().transpose(1, 2) for x in (o, lse, *gradients)))


def _assert_close(results, inputs, precision="ieee", mask=None, causal=False):
    """TF32 keeps as many bits as float16, so float16 is its measure.

    Four times torch's error, not two: torch keeps P, where here the rounding of lse is in all weights of a row.
    """
    exact = _torch(inputs, mask, causal, torch.float64)
    peer = _torch(inputs, mask, causal, torch.float16 if precision == "tf32" else inputs.q.dtype)
    for name, actual, torchs, right in zip(Results._fields, results, peer, exact, strict=True):
        torchs = torchs.to(actual.dtype)
        assert_same_nonfinite(actual, right, name)
        assert_no_worse_than_torch(actual, torchs, right, factor=4, ulps=4, what=name)


@pytest.mark.parametrize(("tokens", "head"), SIZES)
@pytest.mark.parametrize(("dtype", "precision"), NUMBERS, ids=str)
def test_sizes(dtype, precision, tokens, head):
    inputs = _inputs(1, tokens, 2 if tokens < 10 else 1, head, dtype)
    _assert_close(_launch(inputs, precision), inputs, precision)


@pytest.mark.parametrize(("tokens", "head"), SHORT_SIZES)
@pytest.mark.parametrize(("dtype", "precision"), SHORT, ids=str)
def test_short_heads(dtype, precision, tokens, head):
    inputs = _inputs(1, tokens, 3, head, dtype)
    config = choose_mma(_problem(inputs, precision, None, False, (3 * head,) * 3))
    _assert_close(_launch(inputs, precision, config=config), inputs, precision)


@pytest.mark.parametrize(("mask", "causal"), [("", True), ("bool", True), ("additive", False)])
@pytest.mark.parametrize(("dtype", "precision"), SHORT[:2], ids=str)
def test_short_heads_masked(dtype, precision, mask, causal):
    inputs = _inputs(2, 18, 1, 8, dtype)
    mask = _mask(mask, 2, 18)
    _assert_close(_launch(inputs, precision, mask, causal, MmaConfig(2)), inputs, precision, mask, causal)


@pytest.mark.parametrize("far", [-1e9, -1e30])
def test_short_heads_all_masked_by_a_number(far):
    """Which leaves every key in: the weights are those of equal scores."""
    inputs = _inputs(1, 5, 1, 8)
    found = _launch(inputs, "tf32", torch.full((1, 5), far), config=MmaConfig(1))
    torch.testing.assert_close(found.o, inputs.v.mean(dim=1, keepdim=True).expand_as(inputs.v), rtol=1e-2, atol=1e-2)
    assert all(bool(each.isfinite().all()) and each.abs().max() < 100 for each in found[2:])


@pytest.mark.parametrize("tiles", [1, 3])
def test_short_heads_bits(tiles):
    """Whatever a warp owns, wherever the sequence stands, and with more tokens that are left out."""
    inputs = _inputs(2, 10, 1, 8, torch.bfloat16)
    alone = _launch(Inputs(*(x[1:] for x in inputs)), config=MmaConfig(2, num_warps=1))
    padded = Inputs(*(torch.cat([x, torch.randn(2, 30, 1, 8).to(x.dtype)], dim=1) for x in inputs))
    padded.do[:, 10:] = 0
    left_out = (torch.arange(40) >= 10).expand(2, 40)
    for actual in (
        _launch(inputs, config=MmaConfig(tiles)),
        _launch(padded, "ieee", left_out, config=MmaConfig(tiles)),
    ):
        for found, expected in zip(actual, alone, strict=True):
            assert_bitwise_equal(found[1:, :10], expected)


@pytest.mark.parametrize(("tokens", "head"), [(128, 32), (200, 24)])
def test_many_tokens(tokens, head):
    inputs = _inputs(1, tokens, 1, head, torch.float16)
    _assert_close(_launch(inputs), inputs)


@pytest.mark.parametrize(("mask", "causal"), [("", True), ("bool", True), ("additive", False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masks(dtype, mask, causal):
    inputs = _inputs(2, 66, 1, 24, dtype)
    mask = _mask(mask, 2, 66)
    _assert_close(_launch(inputs, "ieee", mask, causal), inputs, "ieee", mask, causal)


def test_strided_mask():
    inputs = _inputs(2, 17, 1, 24)
    mask = _mask("bool", 2, 17).T.contiguous().T
    _assert_close(_launch(inputs, "ieee", mask), inputs, "ieee", mask)


def test_tf32x3_is_ieee():
    inputs = _inputs(1, 17, 1, 24)
    for actual, expected in zip(_launch(inputs, "tf32x3"), _launch(inputs, "ieee"), strict=True):
        assert_bitwise_equal(actual, expected)


def test_tf32_rounds_to_nearest():
    inputs = _inputs(1, 1, 1, 32)
    v = torch.ones_like(inputs.v) + 2**-11 + 2**-20  # nearer to 1 + 2^-10
    assert bool((_launch(inputs._replace(v=v), "tf32").o == 1 + 2**-10).all())


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_one_key_has_no_gradient(precision):
    """A softmax of one score is constant. The scores are whole numbers, the same in whatever order they are summed."""
    inputs = _inputs(2, 1, 2, 24)
    results = _launch(inputs._replace(q=inputs.q.round(), k=inputs.k.round()), precision)
    assert not results.dq.any()
    assert not results.dk.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_row_without_keys(dtype):
    """Causal queries before the first key that is left in; then a sequence without any."""
    inputs = _inputs(2, 70, 1, 24, dtype)
    mask = torch.zeros(2, 70, dtype=torch.bool)
    mask[0, :66] = True
    mask[1] = True
    results = _launch(inputs, "ieee", mask, causal=True)
    for x in (results.o, results.dq, results.dk, results.dv):
        assert not x[0, :66].any()
        assert not x[1].any()
    assert bool(results.lse[0, :66].isposinf().all())
    assert bool(results.lse[1].isposinf().all())


@pytest.mark.parametrize(("tokens", "head"), [(35, 24), (17, 80)])
@pytest.mark.parametrize(("dtype", "precision"), NUMBERS, ids=str)
def test_bits_do_not_follow_the_batch(dtype, precision, tokens, head):
    inputs = _inputs(3, tokens, 1, head, dtype)
    alone = _launch(Inputs(*(x[2:] for x in inputs)), precision)
    for actual, expected in zip(_launch(inputs, precision), alone, strict=True):
        assert_bitwise_equal(actual[2:], expected)


@pytest.mark.parametrize(("causal", "mask"), [(False, "bool"), (True, "additive")])
@pytest.mark.parametrize(("dtype", "precision"), NUMBERS, ids=str)
def test_bits_do_not_follow_padding(dtype, precision, causal, mask):
    """Keys and values beyond the end may be NaN; nothing comes back from there."""
    tokens, head = 37, 24
    inputs = _inputs(1, tokens, 1, head, dtype)
    alone = _launch(inputs, precision, causal=causal)
    for padded in (45, 70):
        more = _inputs(1, padded, 1, head, dtype, seed=3)
        filling = (more.q, torch.nan, torch.nan, 0.0)
        for x, kept, value in zip(more, inputs, filling, strict=True):
            x[:] = value
            x[:, :tokens] = kept
        left_out = torch.arange(padded)[None] >= tokens
        given = left_out if mask == "bool" else torch.zeros(1, padded).masked_fill(left_out, -torch.inf)
        results = _launch(more, precision, given, causal)
        for actual, expected in zip(results, alone, strict=True):
            assert_bitwise_equal(actual[:, :tokens], expected)
        assert not results.dk[:, tokens:].any()
        assert not results.dv[:, tokens:].any()


@pytest.mark.parametrize(("blocks", "causal"), [((16, 32), True), ((32, 16), True), ((32, 16), False)], ids=str)
def test_blocks(blocks, causal):
    """Blocks of queries and keys of different sizes, and a head in chunks."""
    inputs = _inputs(1, 40, 1, 40)
    config = DotConfig(*blocks, block_d=64, chunk_d=16, num_warps=4, num_stages=1)
    _assert_close(_launch(inputs, causal=causal, config=config), inputs, causal=causal)


def test_wide_offsets():
    """Rows so far apart that their offsets need 64 bits. The buffer is virtual memory, touched at its rows alone."""
    stride, tokens, head = 2**30 + 8, 3, 24
    try:
        buffer = torch.empty((tokens - 1) * stride + 3 * head, dtype=torch.float16)
    except RuntimeError as error:
        pytest.skip(f"no 4.3 GB of address space: {error}")
    inputs = _inputs(1, tokens, 1, head, torch.float16)
    q, k, v = buffer.as_strided((tokens, 3 * head), (stride, 1)).split(head, dim=1)
    for far, near in zip((q, k, v), inputs, strict=False):
        far.copy_(near.reshape(tokens, head))
    o, dq, dk, dv = torch.full((4, tokens, head), torch.nan, dtype=torch.float16)
    lse = torch.full((tokens, 1), torch.nan)
    problem = _problem(inputs, "ieee", None, False, (stride,) * 3)
    kernels.describe(problem, choose(problem)).run(q, k, v, None, None, None, o, lse, None)
    problem = _problem(inputs, "ieee", None, False, (stride,) * 3 + (head,) * 3)
    do = inputs.do.reshape(tokens, head)
    kernels.describe(problem, choose(problem)).run(q, k, v, None, None, None, o, lse, do, None, dq, dk, dv, None)
    results = Results(*(x.reshape(1, tokens, 1, -1) for x in (o, lse, dq, dk, dv)))
    _assert_close(results._replace(lse=lse.reshape(1, tokens, 1)), inputs)


def _variant(tokens, nhead, head, dtype, mask="", causal=False, residual=True, dropout=0.0):
    """Two sequences; of residual scores the first is -inf."""
    generator = torch.Generator().manual_seed(tokens)
    q, k, v, grad = torch.randn(4, 2, tokens, nhead * head, generator=generator).to(dtype)
    previous = of_scores = None
    if residual:
        previous, of_scores = torch.randn(2, 2, nhead, tokens, tokens, generator=generator).to(dtype)
        previous[0, 0, 0, 0] = -torch.inf
    mask = _mask(mask, 2, tokens)
    seed = torch.tensor([-(2**40) - 5]) if dropout else None
    return AttentionInputs(q, k, v, grad, nhead, mask, causal, previous, of_scores, seed, dropout)


def _launch_variant(inputs, precision="ieee"):
    """By the kernels that heads of this size have, into poisoned outputs."""
    sequences, tokens, width = inputs.q.shape
    name = str(inputs.q.dtype).removeprefix("torch.")
    kind = "" if inputs.mask is None else "bool" if inputs.mask.dtype == torch.bool else "additive"
    strides = (0, 0) if inputs.mask is None else inputs.mask.stride()

    def problem(count):
        return Attention(
            sequences, tokens, inputs.nhead, width // inputs.nhead, name, precision, (width,) * count,
            inputs.is_causal, kind, strides, dropout=inputs.dropout, previous=inputs.previous is not None,
            scores=inputs.of_scores is not None,
        )  # fmt: skip

    q, k, v, do, mask, previous = *inputs[:4], inputs.mask, inputs.previous
    o, dq, dk, dv = (torch.full_like(q, torch.nan) for _ in range(4))
    lse = torch.full((sequences, tokens, inputs.nhead), torch.nan)
    scores, d_previous = (None if x is None else torch.full_like(x, torch.nan) for x in (inputs.of_scores, previous))
    given = (q, k, v, mask, previous, inputs.seed, o, lse)
    kernels.describe(problem(3)).run(*given, scores)
    kernels.describe(problem(6)).run(*given, do, inputs.of_scores, dq, dk, dv, d_previous)
    return AttentionResults(o, scores, dq, dk, dv, d_previous)


def _assert_variant_close(inputs, precision="ieee"):
    _assert_results_close(_launch_variant(inputs, precision), inputs, precision)


def _assert_results_close(found, inputs, precision):
    peer = torch.float16 if precision == "tf32" else inputs.q.dtype  # which keeps as many bits
    theirs, exact = torch_attention(inputs, peer), torch_attention(inputs, torch.float64)
    for name, ours, torchs, right in zip(found._fields, found, theirs, exact, strict=True):
        if ours is None:
            continue
        torchs = torchs.to(ours.dtype)
        assert_same_nonfinite(ours, right, name)
        assert_no_worse_than_torch(ours, torchs, right, factor=4, ulps=8, what=name)


VARIANTS = {  # of tokens, mask, causal, residual, dropout
    "dropout": (18, "", False, False, 0.3),
    "all dropped": (5, "", False, False, 1.0),
    "residual": (21, "", False, True, 0.0),
    "both, causal": (34, "", True, True, 0.2),
    "both, bool": (17, "bool", False, True, 0.2),
    "both, additive": (2, "additive", False, True, 0.5),
}


def _spread(numbers):
    """Every variant, each number in transpose."""
    return [(variant, *numbers[place % len(numbers)]) for place, variant in enumerate(VARIANTS)]


@pytest.mark.parametrize(("variant", "dtype", "precision"), _spread(NUMBERS), ids=str)
def test_variants_of_long_heads(variant, dtype, precision):
    tokens, *rest = VARIANTS[variant]
    _assert_variant_close(_variant(tokens, 1, 24, dtype, *rest), precision)


@pytest.mark.parametrize(("variant", "dtype", "precision"), _spread(SHORT), ids=str)
def test_variants_of_short_heads(variant, dtype, precision):
    tokens, *rest = VARIANTS[variant]
    _assert_variant_close(_variant(tokens, 1, 6, dtype, *rest), precision)


@pytest.mark.parametrize(("variant", "dtype", "precision"), _spread(NUMBERS), ids=str)
def test_variants_in_registers(variant, dtype, precision):
    tokens, *rest = VARIANTS[variant]
    head = 9 if precision == "ieee" and dtype == torch.float32 else 3
    _assert_variant_close(_variant(tokens, 2 if tokens < 10 else 1, head, dtype, *rest), "ieee")


def _factored(tokens, nhead, head, dtype, factors, of_own, mask="", causal=False, dropout=0.0):
    """With q and k of so many earlier layers; of_own: gradients come in from later ones."""
    inputs = _variant(tokens, nhead, head, dtype, mask, causal, False, dropout)
    generator = torch.Generator().manual_seed(factors)
    q_and_k = torch.randn(factors + 1, 2, *inputs.q.shape, generator=generator).to(dtype)
    return inputs._replace(earlier=q_and_k[1:] if factors else None, of_own=q_and_k[0] if of_own else None)


FACTORED = {  # of tokens, heads, head, dtype, factors, of_own, mask, causal, dropout
    "transposed": (21, 1, 8, torch.float32, 1, True),
    "causal": (18, 1, 16, torch.float32, 2, False, "additive", True),
    "dropped": (17, 1, 8, torch.float16, 2, True, "bool", False, 0.2),
    "most": (5, 2, 6, torch.bfloat16, 4, True),
    "first layer": (5, 2, 8, torch.float16, 0, True),
}


@pytest.mark.parametrize("case", FACTORED)
def test_earlier_layers(case):
    inputs = _factored(*FACTORED[case])
    precision = "tf32" if inputs.q.dtype == torch.float32 else "ieee"
    found = attention_by_head(inputs, precision, transposed=case == "transposed")
    _assert_results_close(found, inputs, precision)


def test_earlier_layers_bits():
    """Whatever a warp owns, wherever the sequence stands."""
    inputs = _factored(18, 1, 8, torch.float16, 2, True)
    q, k, v, grad = (each[1:] for each in inputs[:4])
    alone = inputs._replace(q=q, k=k, v=v, grad=grad, earlier=inputs.earlier[:, :, 1:], of_own=inputs.of_own[:, 1:])
    whole, one = attention_by_head(inputs, "ieee", config=MmaConfig(1)), attention_by_head(alone, "ieee")
    for name in ("o", "dq", "dk", "dv"):
        assert_bitwise_equal(getattr(whole, name)[1:], getattr(one, name), name)
    assert_bitwise_equal(whole.d_previous[:, :, 1:], one.d_previous)


def test_nothing_to_do():
    for sequences, tokens in [(0, 5), (2, 0)]:
        assert _launch(_inputs(sequences, tokens, 1, 24)).o.numel() == 0
