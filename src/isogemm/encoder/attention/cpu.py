"""The CPU backend of attention.

Sums are elementwise additions, in ascending order over channels, keys and queries; exp and log are `elementary`'s. Bits
do not depend on the other sequences or on the number of threads, and a masked key adds an exact zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from isogemm.epilogues import elementary, random

_TILE = 2**19  # scores per step


class AttentionCall(NamedTuple):
    """The arguments of `attention`."""

    q: Tensor  # [S, T, H * d], or [S, T, 3 H * d] with k and v after it
    k: Tensor | None
    v: Tensor | None
    mask: Tensor | None  # [S, T]: bool, True for a key to leave out, or floating point, added to the scores
    nhead: int
    is_causal: bool
    precision: str | None
    previous: Tensor | None = None  # [S, H, T, T] in q's dtype, added to the scores
    seed: Tensor | None = None  # of dropout, int64
    dropout: float = 0.0  # of the weights
    scores: bool = False  # whether they are returned

    def parts(self, packed: Tensor, *rest: Tensor | None) -> list[Tensor]:
        """Views of q, k and v, or of tensors laid out like them."""
        if self.k is None:
            return list(packed.chunk(3, dim=-1))
        return [packed, *(each for each in rest if each is not None)]

    @property
    def width(self) -> int:
        return self.q.shape[-1] // (3 if self.k is None else 1)

    def empty_scores(self, wanted: bool) -> Tensor:
        sequences, tokens, _ = self.q.shape
        return self.q.new_empty((sequences, self.nhead, tokens, tokens) if wanted else 0)


@torch.no_grad()
def attention(call: AttentionCall, o: Tensor, lse: Tensor, scores: Tensor | None = None) -> None:
    """Write o, lse and, if given, the scores; see `isogemm.encoder.attention.op.attention`."""
    nhead = call.nhead
    queries, keys, values = (_by_head(each, nhead) for each in call.parts(*call[:3]))
    of_keys = None if call.mask is None else _by_key(call.mask, nhead)
    result, logs = torch.empty_like(queries), torch.empty_like(queries[:, :1])
    for part in _parts(queries):
        found = _scores(queries, keys, of_keys, call, part)
        if scores is not None:
            scores.flatten(0, 1)[part] = found.permute(2, 0, 1)
        weights, total, largest = _softmax(found)
        share = _dropped(weights, call, part)
        result[..., part] = _weighed(share, values[..., part]).div_(total[:, None])
        empty = largest == -math.inf
        log = elementary.log(total).add_(largest).mul_(math.log2(math.e))
        logs[:, 0, part] = log.masked_fill_(empty, math.inf)
    o.copy_(_merged(result, nhead))
    lse.copy_(_merged(logs, nhead))


@torch.no_grad()
def attention_backward(
    call: AttentionCall, grad: Tensor, of_scores: Tensor | None, dq: Tensor, dk: Tensor, dv: Tensor,
    d_previous: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the gradients of q, k, v and `previous`, from o's `grad` and the scores' `of_scores`.

    The softmax is computed again: from the lse it would be less exact.
    """
    nhead = call.nhead
    above, queries, keys, values = (_by_head(each, nhead) for each in (grad, *call.parts(*call[:3])))
    of_keys = None if call.mask is None else _by_key(call.mask, nhead)
    scale = 1.0 / math.sqrt(queries.shape[1])
    d_queries, d_keys, d_values = map(torch.empty_like, (queries, keys, values))
    for part in _parts(queries):
        found = _scores(queries, keys, of_keys, call, part)
        left_out = found == -math.inf
        weights, total, _ = _softmax(found)
        weights /= total[:, None]
        d_scores = _dropped(_products(above[..., part], values[..., part]), call, part)
        d_scores -= _ascending(d_scores * weights)[:, None]
        d_scores *= weights
        if of_scores is not None:
            d_scores += _of_matrices(of_scores, part).masked_fill(left_out, 0.0)
        if d_previous is not None:
            d_previous.flatten(0, 1)[part] = d_scores.permute(2, 0, 1)
        d_scores *= scale
        d_queries[..., part] = _weighed(d_scores, keys[..., part])
        d_keys[..., part] = _weighed(d_scores.transpose(0, 1), queries[..., part])
        share = _dropped(weights, call, part)
        d_values[..., part] = _weighed(share.transpose(0, 1), above[..., part])
    for gradient, computed in ((dq, d_queries), (dk, d_keys), (dv, d_values)):
        gradient.copy_(_merged(computed, nhead))


# Sequences and heads are one innermost dimension N, along which every operation is vectorised.


def _by_head(x: Tensor, nhead: int) -> Tensor:
    """[S, T, H * d] -> [T, d, N], in fp32."""
    sequences, tokens, width = x.shape
    heads = x.view(sequences, tokens, nhead, width // nhead).permute(1, 3, 0, 2)
    return heads.to(torch.float32, memory_format=torch.contiguous_format).reshape(tokens, -1, sequences * nhead)


def _merged(x: Tensor, nhead: int) -> Tensor:
    """[T, d, N] -> [S, T, H * d]."""
    tokens, channels, count = x.shape
    return x.view(tokens, channels, count // nhead, nhead).permute(2, 0, 3, 1).flatten(2)


def _by_key(mask: Tensor, nhead: int) -> Tensor:
    """[S, T] -> [T, N]."""
    if mask.dtype is not torch.bool:
        mask = _bounded(mask)
    return mask.t().repeat_interleave(nhead, dim=1)


def _bounded(x: Tensor) -> Tensor:
    """x in fp32; a number whose product with log2(e) overflows becomes -inf, as on a GPU."""
    x = x.float()
    return x.masked_fill(x < torch.finfo(torch.float32).min / math.log2(math.e), -math.inf)


def _of_matrices(x: Tensor, part: slice) -> Tensor:
    """A part [T, T, n] of scores [S, H, T, T], in fp32."""
    return x.flatten(0, 1)[part].float().permute(1, 2, 0)


def _dropped(weights: Tensor, call: AttentionCall, part: slice) -> Tensor:
    """A part's weights [T, T, n] after dropout."""
    if not call.dropout:
        return weights
    assert call.seed is not None
    tokens, _, count = weights.shape
    kept = random.kept_weights(call.seed, count, tokens, call.dropout, part.start).permute(1, 2, 0)
    return (weights * random.scale(call.dropout)).masked_fill_(~kept, 0.0)


def _parts(queries: Tensor) -> Iterator[slice]:
    """Slices of N with about _TILE scores each."""
    tokens, _, count = queries.shape
    step = max(1, _TILE // tokens**2)
    return (slice(first, first + step) for first in range(0, count, step))


def _scores(queries: Tensor, keys: Tensor, mask: Tensor | None, call: AttentionCall, part: slice) -> Tensor:
    """Scores of a part [T, T, n], by query and key."""
    scores = _products(queries[..., part], keys[..., part]).div_(math.sqrt(queries.shape[1]))
    if call.previous is not None:
        scores += _bounded(_of_matrices(call.previous, part))
    if mask is not None:
        of_part = mask[:, part]
        if mask.dtype is torch.bool:
            scores.masked_fill_(of_part, -math.inf)
        else:
            scores += of_part
    if call.is_causal:
        later = torch.ones(scores.shape[:2], dtype=torch.bool).triu_(1)
        scores.masked_fill_(later[..., None], -math.inf)
    return scores


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(scores - largest), in place; its sums over the keys [T, n]; the largest [T, n].

    Without keys the sum is 1.
    """
    largest = scores.amax(1)
    empty = largest == -math.inf
    weights = elementary.exp(scores.sub_(largest.masked_fill(empty, 0.0)[:, None]))
    return weights, _ascending(weights).masked_fill_(empty, 1.0), largest


def _products(left: Tensor, right: Tensor) -> Tensor:
    """[I, d, n], [J, d, n] -> [I, J, n], summed over the channels."""
    sums = left[:, None, 0] * right[None, :, 0]
    product = torch.empty_like(sums)
    for channel in range(1, left.shape[1]):
        sums += torch.mul(left[:, None, channel], right[None, :, channel], out=product)
    return sums


def _weighed(weights: Tensor, values: Tensor) -> Tensor:
    """[I, J, n], [J, d, n] -> [I, d, n], summed over J."""
    sums = weights.new_zeros((weights.shape[0], *values.shape[1:]))
    product = torch.empty_like(sums)
    for weight, value in zip(weights.unbind(1), values, strict=True):
        sums += torch.mul(weight[:, None], value, out=product)
    return sums


def _ascending(x: Tensor) -> Tensor:
    """[I, J, n] -> [I, n]."""
    sums = torch.zeros_like(x[:, 0])
    for each in x.unbind(1):
        sums += each
    return sums
