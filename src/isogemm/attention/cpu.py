"""The CPU backend of attention: one sequence after another, in the order of `configs.order`.

Products are `gemm.cpu`'s, whose rows do not depend on each other; a block of keys is padded to its full height, so that
every product of a sequence has one shape. exp and tanh are `elementary`'s, and other sums are by halves. So bits do not
depend on the batch, padding, chunks or the number of rows. A block that a row does not see is an exact no-op for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from isogemm.attention.configs import order
from isogemm.epilogues import elementary
from isogemm.gemm import cpu as products
from isogemm.gemm.describe import dtype_name

if TYPE_CHECKING:
    from isogemm.attention.describe import Call

_ROW_STEP = 64  # rows of one product, in the gradients of keys and values


@torch.no_grad()
def attention(call: Call, o: Tensor, lse: Tensor | None) -> None:
    """Write o and, if given, lse: the natural logarithm of a row's sum of exp(score), +inf for a row without keys."""
    o.zero_()
    lse = None if lse is None else _heads_first(lse.fill_(math.inf))
    for each in _sequences(call):
        of_rows, logs = _forward(call, each)
        each.of_queries(o).copy_(_by_head(of_rows, call))
        if lse is not None:
            each.of_queries(lse).copy_(_by_head(logs[..., None], call)[..., 0])


@torch.no_grad()
def attention_backward(
    call: Call, grad: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, sink_terms: Tensor | None,
    d_mask: Tensor | None,
) -> None:  # fmt: skip
    """Write the gradients of q, k and v, each row's term of that of its sink, and the scores' gradient, as d_mask."""
    for written in (dq, dk, dv, sink_terms, d_mask):
        if written is not None:
            written.zero_()
    lse, sink_terms = _heads_first(lse), None if sink_terms is None else _heads_first(sink_terms)
    for each in _sequences(call):
        _backward(call, each, grad, lse, dq, dk, dv, sink_terms, d_mask)


def _heads_first(lse: Tensor) -> Tensor:
    """[B, T, H] -> [B, H, T] as o; [tokens, H] is as o already."""
    return lse.transpose(1, 2) if lse.ndim == 3 else lse


class _Sequence(NamedTuple):
    """Where a sequence lies in the call's tensors."""

    place: int  # in the batch
    queries: slice  # those at position 0 and above
    keys: slice
    first: int  # position of the first key
    pages: Tensor | None  # of a paged cache
    dense: bool

    def of_queries(self, x: Tensor) -> Tensor:
        """[B, H, T, ...] or [tokens, H, ...] -> this sequence's [H, T, ...], a view."""
        return x[self.place][:, self.queries] if self.dense else x[self.queries].transpose(0, 1)

    def of_keys(self, x: Tensor) -> Tensor:
        if self.dense:
            return x[self.place][:, self.keys]
        if self.pages is not None:
            x = x[self.pages].flatten(0, 1)
        return x[self.keys].transpose(0, 1)

    def of_mask(self, mask: Tensor) -> Tensor:
        """[B or 1, H or 1, T or 1, S or 1] -> [H or 1, T or 1, S or 1]"""
        of_one = mask[self.place if mask.shape[0] > 1 else 0]
        of_one = of_one[:, self.queries] if mask.shape[2] > 1 else of_one
        return of_one[..., self.keys] if mask.shape[3] > 1 else of_one


def _sequences(call: Call) -> Iterator[_Sequence]:
    """The sequences that have both queries and keys."""
    if call.cu_q is not None and call.cu_k is not None:
        of_queries, of_keys = call.cu_q.tolist(), call.cu_k.tolist()
        counts = [after - begin for begin, after in pairwise(of_keys)]
        begins = [0] * len(counts) if call.block_table is not None else of_keys[:-1]
        queries = list(pairwise(of_queries))
    else:
        batch, _, tokens, _ = call.q.shape
        size = call.k.shape[2]
        begins = [0] * batch if call.starts is None else call.starts.tolist()
        ends = [size] * batch if call.lengths is None else [min(each, size) for each in call.lengths.tolist()]
        counts = [end - begin for begin, end in zip(begins, ends, strict=True)]
        queries = [(0, tokens)] * batch
    firsts = [0] * len(counts) if call.offsets is None else call.offsets.tolist()
    for index, (first, begin, count, (low, high)) in enumerate(zip(firsts, begins, counts, queries, strict=True)):
        if call.causal or call.starts is not None:  # those before position 0 are padding
            low = max(low, high - first - count)
        if count > 0 and low < high:
            table = call.block_table
            pages = None if table is None else table[index, : -(-count // call.k.shape[1])].long()
            keys = slice(begin, begin + count)
            yield _Sequence(index, slice(low, high), keys, first, pages, call.cu_q is None)


# Rows are (token, head of the group), as in the kernels: [kv heads, tokens * group, width].


def _rows(x: Tensor, call: Call) -> Tensor:
    """[H, T, W] -> [Hkv, T * G, W], in fp32."""
    kv_heads = call.kv_heads
    return x.reshape(kv_heads, x.shape[0] // kv_heads, *x.shape[1:]).transpose(1, 2).flatten(1, 2).float()


def _by_head(rows: Tensor, call: Call) -> Tensor:
    """[Hkv, T * G, W] -> [H, T, W]."""
    group = call.heads // call.kv_heads
    heads, count, width = rows.shape
    return rows.view(heads, count // group, group, width).transpose(1, 2).flatten(0, 1)


def _sinks(call: Call, rows: int) -> Tensor:
    """[Hkv, T * G]"""
    assert call.sinks is not None
    return _rows(call.sinks.float()[:, None, None].expand(-1, rows * call.kv_heads // call.heads, -1), call)[..., 0]


def _forward(call: Call, each: _Sequence) -> tuple[Tensor, Tensor]:
    """o of a sequence's rows [Hkv, T * G, DV] and the logarithms of their sums [Hkv, T * G], in fp32."""
    rows = _rows(each.of_queries(call.q), call)
    keys, values = each.of_keys(call.k), each.of_keys(call.v)
    total = _State(rows.shape[0], rows.shape[1], values.shape[2])
    split = _State(rows.shape[0], rows.shape[1], values.shape[2])
    size, length = order(call.q.shape[-1], values.shape[-1], dtype_name(call.q.dtype))
    for block in _blocks(call, each, size):
        if block.begin % length == 0:
            total.merge(split)
            split = _State(rows.shape[0], rows.shape[1], values.shape[2])
        scores, _ = _scores(call, each, block, rows, keys)
        split.add(scores, block.of(values))
    total.merge(split)
    unseen = total.largest == -math.inf
    if call.sinks is not None:
        total.add_sinks(_sinks(call, rows.shape[1]))
    sums = total.sums.masked_fill(unseen, 1.0)
    o = (total.weighted / sums[..., None]).masked_fill_(unseen[..., None], 0.0)
    return o, (total.largest + elementary.log(sums)).masked_fill_(unseen, math.inf)


class _State:
    """Running maximum, sum of weights and sum of weighted values of rows [Hkv, R]."""

    def __init__(self, heads: int, rows: int, width: int) -> None:
        self.largest = torch.full((heads, rows), -math.inf)
        self.sums = torch.zeros((heads, rows))
        self.weighted = torch.zeros((heads, rows, width))

    def add(self, scores: Tensor, values: Tensor) -> None:
        """Add a block's keys: scores [Hkv, R, BN], values [Hkv, BN, DV]."""
        largest = torch.maximum(self.largest, scores.amax(2))
        base = _finite(largest)
        weights = elementary.exp(scores - base[..., None])
        alpha = elementary.exp(self.largest - base)
        self.sums = self.sums * alpha + _by_halves(weights)
        self.weighted = self.weighted * alpha[..., None] + products.product(weights, values, None, torch.float32)
        self.largest = largest

    def merge(self, split: _State) -> None:
        """Add the keys of a split that follows."""
        largest = torch.maximum(self.largest, split.largest)
        base = _finite(largest)
        before, after = elementary.exp(self.largest - base), elementary.exp(split.largest - base)
        self.sums = self.sums * before + split.sums * after
        self.weighted = self.weighted * before[..., None] + split.weighted * after[..., None]
        self.largest = largest

    def add_sinks(self, sinks: Tensor) -> None:
        largest = torch.maximum(self.largest, sinks)
        alpha = elementary.exp(self.largest - largest)
        self.sums = self.sums * alpha + elementary.exp(sinks - largest)
        self.weighted = self.weighted * alpha[..., None]
        self.largest = largest


def _finite(largest: Tensor) -> Tensor:
    return largest.masked_fill(largest == -math.inf, 0.0)


def _backward(
    call: Call, each: _Sequence, grad: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    sink_terms: Tensor | None, d_mask: Tensor | None,
) -> None:  # fmt: skip
    """Write a sequence's gradients.

    Two passes over the keys. The first sums the weights, which are then exact whatever the rounding of lse, and delta,
    from the weights themselves: from o it would have o's rounding.
    """
    rows, above = _rows(each.of_queries(call.q), call), _rows(each.of_queries(grad), call)
    logs, scale = _rows(each.of_queries(lse)[..., None], call), call.factor
    keys, values = each.of_keys(call.k), each.of_keys(call.v)
    of_keys, of_values = each.of_keys(dk), each.of_keys(dv)
    blocks = list(_blocks(call, each, order(call.q.shape[-1], call.v.shape[-1], dtype_name(call.q.dtype)).block_n))

    def weighed(block: _Block) -> tuple[Tensor, Tensor, Tensor | None]:
        scores, slope = _scores(call, each, block, rows, keys)
        weights = elementary.exp(scores - logs)
        return weights, products.product(above, block.of(values).mT, None, torch.float32), slope

    of_sinks = None if call.sinks is None else elementary.exp(_sinks(call, rows.shape[1])[..., None] - logs)
    total = torch.zeros_like(logs) if of_sinks is None else of_sinks.clone()
    delta = torch.zeros_like(logs)
    for block in blocks:
        weights, of_weights, _ = weighed(block)
        total += _by_halves(weights)[..., None]
        delta += _by_halves(weights * of_weights)[..., None]
    total.masked_fill_(total == 0.0, 1.0)
    delta /= total
    if sink_terms is not None and of_sinks is not None:
        each.of_queries(sink_terms).copy_(_by_head(of_sinks / total * -delta, call)[..., 0])
    of_rows = torch.zeros_like(rows)
    for block in blocks:
        weights, of_weights, slope = weighed(block)
        weights /= total
        of_scores = weights * (of_weights - delta)
        if d_mask is not None:
            into = d_mask[each.place][:, each.queries, each.keys][..., block.held]
            into.copy_(_by_head(of_scores, call)[..., block.place])
        if slope is not None:
            of_scores *= slope
        of_rows += products.product(of_scores, block.of(keys), None, torch.float32)
        of_keys[:, block.held].copy_(_over_rows(of_scores, rows)[:, block.place] * scale)
        of_values[:, block.held].copy_(_over_rows(weights, above)[:, block.place])
    each.of_queries(dq).copy_(_by_head(of_rows * scale, call))


def _over_rows(left: Tensor, right: Tensor) -> Tensor:
    """[Hkv, R, BN], [Hkv, R, W] -> [Hkv, BN, W], summed over rows in steps, in ascending order."""
    more = -left.shape[1] % _ROW_STEP
    steps = (left.shape[1] + more) // _ROW_STEP
    left, right = (
        pad(x, (0, 0, 0, more)).view(len(x), steps, _ROW_STEP, x.shape[2]) for x in (left, right)
    )  # fmt: skip
    first, *rest = products.product(left.mT, right, None, torch.float32).unbind(1)
    for each in rest:
        first += each
    return first


class _Block(NamedTuple):
    """A block of keys, by positions; those that the sequence holds are part of it."""

    begin: int  # position
    size: int
    held: slice  # its keys among the sequence's
    place: slice  # their places in the block

    def of(self, x: Tensor) -> Tensor:
        """[heads, keys, W] -> [heads, block, W] in fp32, zero where there is no key."""
        return pad(x[:, self.held].float(), (0, 0, self.place.start, self.size - self.place.stop))


def _blocks(call: Call, each: _Sequence, size: int) -> Iterator[_Block]:
    """Blocks in ascending order, from the position 0 on; without those that no query sees."""
    after = each.first + each.keys.stop - each.keys.start
    low_query = after - (each.queries.stop - each.queries.start)
    lowest = max(each.first, low_query - call.left if call.left >= 0 else 0)
    highest = after if call.right < 0 else min(after, after + call.right)
    for begin in range(lowest // size * size, highest, size):
        low, high = max(begin, each.first), min(begin + size, after)
        yield _Block(begin, size, slice(low - each.first, high - each.first), slice(low - begin, high - begin))


def _scores(call: Call, each: _Sequence, block: _Block, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scores [Hkv, R, BN] of a block, -inf where a row does not see a key; and the slope of the soft cap."""
    scores = products.product(rows, block.of(keys).mT, None, torch.float32) * call.factor
    slope = None
    if call.softcap:
        bent = elementary.tanh(scores / call.softcap)
        scores, slope = bent * call.softcap, 1.0 - bent * bent
    count, tokens = each.keys.stop - each.keys.start, each.queries.stop - each.queries.start
    query = each.first + count - tokens + torch.arange(tokens)[:, None]
    key = block.begin + torch.arange(block.size)
    seen = (key >= each.first) & (key < each.first + count)
    if call.causal:
        seen = seen & (key <= query)
    if call.left >= 0:
        seen = seen & (query - key <= call.left)
    if call.right >= 0:
        seen = seen & (key - query <= call.right)
    seen = seen.expand(1, tokens, block.size)
    if call.mask is not None:
        mask = each.of_mask(call.mask)
        if call.mask.shape[3] > 1:
            mask = pad(mask[..., block.held], (block.place.start, block.size - block.place.stop))
        if mask.dtype is torch.bool:
            seen = seen & mask
        else:
            scores = scores + _rows(mask.expand(call.heads, tokens, block.size), call)
    unseen = _rows((~seen).expand(call.heads, tokens, block.size), call) > 0
    return scores.masked_fill_(unseen, -math.inf), slope


def _by_halves(x: Tensor) -> Tensor:
    """Sum over the last dimension: c and c + half first."""
    half = 1 << max(x.shape[-1] - 1, 0).bit_length()
    x = pad(x, (0, half - x.shape[-1]))
    while half > 1:
        half //= 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]
