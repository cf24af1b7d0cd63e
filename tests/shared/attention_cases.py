"""Cases of attention: operands, a float64 reference, torch's own attention, and ways to lay sequences out in memory."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from arithmetic import NUMBERS
from torch.nn import functional as F

import isogemm
from isogemm.verify.encoder_reference import products_of_tf32
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations


@dataclass(frozen=True)
class Case:
    """The heads and options of calls; `sinks` says whether each head has one."""

    number: str = "bf16"
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    value_head: int = 0  # 0: as `head`
    causal: bool = True
    window: int | tuple[int | None, int | None] | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    device: str = "cpu"

    def __str__(self):
        sizes = f"{self.head}" if not self.value_head else f"{self.head}:{self.value_head}"
        shown = "causal" if self.causal else "full"
        for name in ("window", "softcap", "scale"):
            if getattr(self, name) is not None:
                shown += f"-{name}_{getattr(self, name)}"
        return f"{self.number}-{self.heads}:{self.kv_heads}x{sizes}-{shown}{'-sinks' if self.sinks else ''}"

    @property
    def dtype(self):
        return NUMBERS[self.number][0]

    @property
    def precision(self):
        return NUMBERS[self.number][1]

    @property
    def options(self):
        """All that a call is given besides its operands, their places and the precision."""
        sinks = self.data(self.heads, seed=99) if self.sinks else None
        shown = {name: getattr(self, name) for name in ("causal", "scale", "window", "softcap")}
        return shown | {"sinks": sinks}

    def data(self, *shape, seed):
        return make_data("normal", shape, seed=seed, dtype=self.dtype, device=self.device)

    def sequence(self, keys, queries=None, seed=0):
        """One sequence, of which the last `queries` tokens ask."""
        queries, value_head = keys if queries is None else queries, self.value_head or self.head
        return Sequence(
            self.data(self.heads, queries, self.head, seed=10 * seed),
            self.data(self.kv_heads, keys, self.head, seed=10 * seed + 1),
            self.data(self.kv_heads, keys, value_head, seed=10 * seed + 2),
            self.data(self.heads, queries, value_head, seed=10 * seed + 3),
        )

    def order(self):
        """Keys per block and per split."""
        from isogemm.attention import configs

        return configs.order(self.head, self.value_head or self.head, str(self.dtype).removeprefix("torch."))


class Sequence(NamedTuple):
    q: torch.Tensor  # [H, T, D]
    k: torch.Tensor  # [Hkv, N, D]
    v: torch.Tensor  # [Hkv, N, DV]
    grad: torch.Tensor  # [H, T, DV], of the result

    @property
    def queries(self):
        return self.q.shape[1]

    @property
    def keys(self):
        return self.k.shape[1]

    def prefix(self, length):
        return Sequence(*(each[:, :length] for each in self))

    def last_queries(self, count):
        q, grad = (each[:, self.queries - count :] for each in (self.q, self.grad))
        return self._replace(q=q, grad=grad)


RESULTS = ("o", "dq", "dk", "dv")


def attend(case, q, k, v, grad=None, **more):
    """isogemm.attention on fresh memory that holds NaN: (o,), or with `grad` (o, dq, dk, dv)."""
    call = functools.partial(isogemm.attention, **(case.options | more), precision=case.precision)
    return _results(call, q, k, v, grad)


def attend_packed(case, q, k, v, cu_queries, cu_keys, grad=None, **more):
    call = functools.partial(
        isogemm.attention_varlen, cu_seqlens_q=cu_queries, cu_seqlens_k=cu_keys, **(case.options | more),
        precision=case.precision,
    )  # fmt: skip
    return _results(call, q, k, v, grad)


def _results(call, q, k, v, grad):
    with poisoned_allocations():
        if grad is None:
            with torch.no_grad():
                return (call(q, k, v),)
        leaves = [each.detach().requires_grad_() for each in (q, k, v)]
        result = call(*leaves)
        return (result.detach(), *torch.autograd.grad(result, leaves, grad))


def alone(case, sequence, train=False):
    """Results of one sequence, each without a batch axis."""
    q, k, v, grad = (each[None] for each in sequence)
    return tuple(each[0] for each in attend(case, q, k, v, grad if train else None))


GARBAGE = {"nan": torch.nan, "inf": torch.inf, "large": 1000.0}


def padded(case, sequences, *, side, spare=0, garbage="nan", train=False, index=torch.int32):
    """Results of each sequence in a batch whose keys lie at the `side` of a buffer, with garbage around them.

    "left" puts padding on the left; "inside" on both sides. Queries are at the end of theirs, which are `spare` more
    than the longest sequence's, as keys are. What belongs to no sequence must be zero.
    """
    keys = max(each.keys for each in sequences) + spare
    queries = max(each.queries for each in sequences)
    if all(each.queries == each.keys for each in sequences):
        queries += spare
    else:
        assert all(each.queries == queries for each in sequences), "a query before the first would be one too"
    starts = [{"left": keys - n, "right": 0, "inside": (keys - n) // 2}[side] for n in (s.keys for s in sequences)]

    def buffer(like, width):
        return like.new_full((len(sequences), like.shape[0], width, like.shape[2]), GARBAGE[garbage])

    first = sequences[0]
    q, grad, k, v = (*(buffer(x, queries) for x in (first.q, first.grad)), *(buffer(x, keys) for x in first[1:3]))
    for i, (each, start) in enumerate(zip(sequences, starts, strict=True)):
        q[i, :, queries - each.queries :], grad[i, :, queries - each.queries :] = each.q, each.grad
        k[i, :, start : start + each.keys], v[i, :, start : start + each.keys] = each.k, each.v
    places = {}
    if side != "right" or not case.causal:  # without either, queries may be more than keys
        places["kv_starts"] = torch.tensor(starts, dtype=index, device=case.device)
    if side != "left":
        ends = [start + each.keys for start, each in zip(starts, sequences, strict=True)]
        places["kv_lengths"] = torch.tensor(ends, dtype=index, device=case.device)
    results = attend(case, q, k, v, grad if train else None, **places)
    found = []
    for i, (each, start) in enumerate(zip(sequences, starts, strict=True)):
        rows, columns = slice(queries - each.queries, queries), slice(start, start + each.keys)
        found.append(tuple(x[i, :, rows if n < 2 else columns] for n, x in enumerate(results)))
        for n, (name, x) in enumerate(zip(RESULTS, results, strict=False)):
            rest = x[i].clone()
            rest[:, rows if n < 2 else columns] = 0
            wrong = int((rest != 0).sum())
            assert wrong == 0, f"{case}, {side}: {wrong} elements of {name} in the padding of sequence {i} are not 0"
    return found


def offsets(lengths, device):
    """cu_seqlens of these lengths."""
    return F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0), (1, 0)).to(torch.int32).to(device)


def tokens_first(x):
    return x.transpose(0, 1)


def packed(case, sequences, train=False):
    """Results of each sequence in one packed call."""
    q, k, v, grad = (torch.cat([tokens_first(each[n]) for each in sequences]) for n in range(4))
    counts = [[each.queries for each in sequences], [each.keys for each in sequences]]
    cu_queries, cu_keys = (offsets(lengths, case.device) for lengths in counts)
    results = attend_packed(case, q, k, v, cu_queries, cu_keys, grad if train else None)
    parts = [x.split(counts[n > 1]) for n, x in enumerate(results)]
    return [tuple(tokens_first(x) for x in found) for found in zip(*parts, strict=True)]


class Pages(NamedTuple):
    """A paged cache of some sequences: pages in any order, garbage in all that is not theirs."""

    k: torch.Tensor  # [pages, page_size, Hkv, D]
    v: torch.Tensor
    table: torch.Tensor  # [B, most]

    @classmethod
    def of(cls, case, sequences, page_size, seed=0, garbage=torch.nan):
        counts = [-(-each.keys // page_size) for each in sequences]
        total = sum(counts)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(total + 3, generator=generator)[:total].to(torch.int32)
        table = torch.full((len(sequences), max(counts) + 1), -1, dtype=torch.int32)  # -1: the page before the cache

        def pages(like):
            whole = like.new_full((total + 4, page_size, like.shape[0], like.shape[2]), garbage)
            return whole[1:]

        k, v = pages(sequences[0].k), pages(sequences[0].v)
        taken = 0
        for i, each in enumerate(sequences):
            for place in range(counts[i]):
                at, first = int(order[taken]), place * page_size
                count = min(page_size, each.keys - first)
                k[at, :count] = tokens_first(each.k[:, first : first + count])
                v[at, :count] = tokens_first(each.v[:, first : first + count])
                table[i, place] = at
                taken += 1
        return cls(k, v, table.to(case.device))

    def attend(self, case, queries, lengths, **more):
        """o [H, T, DV] of each of `queries` [H, T, D], of sequences that have `lengths` keys."""
        counts = [each.shape[1] for each in queries]
        q = torch.cat([tokens_first(each) for each in queries])
        cu_queries, cu_keys = offsets(counts, case.device), offsets(lengths, case.device)
        (o,) = attend_packed(case, q, self.k, self.v, cu_queries, cu_keys, block_table=self.table, **more)
        return [tokens_first(each) for each in o.split(counts)]


# references


def visible_keys(q, k, *, causal=False, window=None, kv_lengths=None, kv_starts=None, kv_offsets=None):
    """Which keys a query sees, [B, 1, T, S], and which a sequence has, [B, 1, S, 1]."""
    (batch, _, queries, _), keys, device = q.shape, k.shape[2], q.device

    def column(values, default):
        values = torch.full((batch,), default, device=device) if values is None else values.to(torch.int64)
        return values.view(-1, 1, 1, 1)

    lengths, starts, dropped = column(kv_lengths, keys), column(kv_starts, 0), column(kv_offsets, 0)
    j = torch.arange(keys, device=device)
    key = j - starts + dropped  # [B, 1, 1, S]
    query = lengths - starts + dropped - queries + torch.arange(queries, device=device)[:, None]  # [B, 1, T, 1]
    held = (j >= starts) & (j < lengths)
    visible = held & (query == query)
    if causal or kv_starts is not None:  # those before the first position are padding
        visible = visible & (query >= 0)
    if causal:
        visible = visible & (key <= query)
    if isinstance(window, int):
        visible = visible & (key > query - window)
    elif window is not None:
        left, right = window
        visible = visible if left is None else visible & (key >= query - left)
        visible = visible if right is None else visible & (key <= query + right)
    return visible, held.mT


def _scores(q, k, scale, softcap):
    scores = (q @ k.mT) * (scale or q.shape[-1] ** -0.5)
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def plain_attention(
    q, k, v, *, causal=False, scale=None, window=None, softcap=None, sinks=None, attn_mask=None, rounded_to=None,
    **places,
):  # fmt: skip
    """Attention written out, in the operands' dtype.

    `sinks` are [H], or [B, H, T, 1] with one for each row. `rounded_to`: dots take probabilities and the gradients of
    scores rounded to that dtype.
    """
    visible, held = visible_keys(q, k, causal=causal, window=window, **places)
    group = q.shape[1] // k.shape[1]
    k, v = (torch.where(held, x, 0).repeat_interleave(group, 1) for x in (k, v))
    scores = _scores(q, k, scale, softcap)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
        visible = visible & (attn_mask > -torch.inf)
    scores = scores.masked_fill(~visible, -torch.inf)
    if rounded_to:
        scores = _Round.apply(scores, rounded_to, True)
    extra = (
        scores.new_full((*scores.shape[:-1], 1), -torch.inf)
        if sinks is None
        else sinks.view(-1, 1, 1)
        if sinks.ndim == 1
        else sinks
    )
    scores = torch.cat([scores, extra.expand(*scores.shape[:-1], 1)], -1)
    highest = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - highest.clamp_min(torch.finfo(scores.dtype).min))
    total = weights.sum(-1, keepdim=True)
    if rounded_to:
        weights = _Round.apply(weights, rounded_to)
    return torch.where(total > 0, weights[..., :-1] @ v / total.clamp_min(torch.finfo(scores.dtype).tiny), 0)


class _Round(torch.autograd.Function):
    """x, or with `of_gradient` what flows back into it, rounded to `dtype` and back."""

    @staticmethod
    def forward(ctx, x, dtype, of_gradient=False):
        ctx.dtype, ctx.of_gradient = dtype, of_gradient
        return x.clone() if of_gradient else x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).to(grad.dtype) if ctx.of_gradient else grad, None, None


def torch_attention(q, k, v, *, causal=False, scale=None, window=None, softcap=None, sinks=None, attn_mask=None,
                    **places):  # fmt: skip
    """torch's scaled_dot_product_attention in the operands' dtype.

    A sink is a further key of zeros with a mask of its own. Where there is a softcap, which that function does not
    have: fp32 arithmetic on operands rounded where a flash kernel rounds them.
    """
    if softcap:
        dtype, options = q.dtype, {"causal": causal, "scale": scale, "window": window, "softcap": softcap}
        wide = [None if x is None else x.float() for x in (q, k, v, sinks)]
        mask = attn_mask.float() if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        rounded_to = None if dtype == torch.float32 else dtype
        result = plain_attention(*wide[:3], sinks=wide[3], attn_mask=mask, rounded_to=rounded_to, **options, **places)
        return result.to(dtype)
    visible, held = visible_keys(q, k, causal=causal, window=window, **places)
    group = q.shape[1] // k.shape[1]
    k, v = (torch.where(held, x, 0).repeat_interleave(group, 1) for x in (k, v))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    bias = torch.zeros((), dtype=q.dtype, device=q.device)
    if attn_mask is not None and attn_mask.is_floating_point():
        bias = attn_mask
    bias = bias.expand(shape).masked_fill(~visible, -torch.inf)
    if sinks is not None:
        bias = torch.cat([bias, sinks.view(1, -1, 1, 1).expand(*shape[:3], 1)], -1)
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    if bias.shape[-1] % 8:  # memory that every kernel of torch's can read
        bias = F.pad(bias, (0, -bias.shape[-1] % 8))[..., : bias.shape[-1]]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)


def torch_arithmetic(number):
    """A context in which torch's products of fp32 are of this kind."""
    return products_of_tf32() if number == "tf32" else contextlib.nullcontext()


def results_and_gradients(function, tensors, grad, **options):
    """{name: value}: the result as "o", and the gradient of each of `tensors`."""
    leaves = {name: each.detach().clone().requires_grad_() for name, each in tensors.items()}
    result = function(**leaves, **options)
    found = torch.autograd.grad(result, list(leaves.values()), grad.to(result.dtype))
    return {"o": result.detach()} | dict(zip(leaves, found, strict=True))


def torch_results(case, tensors, grad, **options):
    """torch_attention's, with the gradients that several heads or rows share added up in fp64.

    So torch's error is the kernel's, not that of sums in 16 bits which autograd makes of repeated operands.
    """
    apart = dict(tensors)
    shape, group = grad.shape[:3], case.heads // case.kv_heads
    for name in {"k", "v"} & tensors.keys():
        apart[name] = tensors[name].repeat_interleave(group, 1)
    if "sinks" in tensors:
        apart["sinks"] = tensors["sinks"]
    if "attn_mask" in tensors:
        apart["attn_mask"] = tensors["attn_mask"].expand(*shape, tensors["k"].shape[2]).contiguous()
    found = results_and_gradients(torch_attention, apart, grad, **options)
    for name in {"k", "v"} & tensors.keys():
        found[name] = found[name].double().unflatten(1, (-1, group)).sum(2).to(case.dtype)
    if "attn_mask" in tensors:
        found["attn_mask"] = found["attn_mask"].double().sum_to_size(tensors["attn_mask"].shape).to(case.dtype)
    return found
