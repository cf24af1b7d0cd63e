"""Attention written plainly in torch: what serves float64, and an oracle of tests and benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from isogemm.attention.describe import Call


def attention(call: Call) -> Tensor:
    """softmax(scores) v in the dtype of q, by torch's own operations; differentiable. All scores are in memory."""
    if call.cu_q is not None:
        return _packed(call)
    return _weighted(call, call.q, call.k, call.v, call.mask, _seen(call))


def _weighted(call: Call, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, seen: Tensor) -> Tensor:
    """[B, H, T, D], [B, Hkv, S, D], [B, Hkv, S, DV] -> [B, H, T, DV]; seen broadcasts to [B, H, T, S]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    k, v = (x.masked_fill(~seen.any(-2).unsqueeze(-1), 0.0) for x in (k, v))  # a key that nobody sees may be NaN
    scores = q @ k.mT * call.factor
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if mask is not None and mask.dtype is torch.bool:
        seen = seen & mask
    elif mask is not None:
        scores = scores + mask
    scores = scores.masked_fill(~seen, -torch.inf)
    if call.sinks is not None:
        sinks = call.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    return weights[..., : k.shape[2]].to(v.dtype) @ v


def _seen(call: Call) -> Tensor:
    """Whether queries see keys of a dense call, by their positions: [B or 1, 1, T, S]."""
    tokens, size = call.q.shape[2], call.k.shape[2]
    device = call.q.device
    index = torch.arange(size, device=device)
    none = torch.zeros(1, dtype=torch.int64, device=device)
    start, offset = (none if x is None else x.long() for x in (call.starts, call.offsets))
    end = none + size if call.lengths is None else call.lengths.long().clamp(max=size)
    key = index - (start - offset)[:, None]
    held = (index >= start[:, None]) & (index < end[:, None])
    query = (end - start + offset - tokens)[:, None] + torch.arange(tokens, device=device)
    seen = _by_position(call, query[:, :, None], key[:, None]) & held[:, None]
    return seen[:, None]


def _by_position(call: Call, query: Tensor, key: Tensor) -> Tensor:
    seen = (query == query) & (key == key)
    if call.causal or call.starts is not None:  # those before position 0 are padding
        seen = seen & (query >= 0)
    if call.causal:
        seen = seen & (key <= query)
    if call.left >= 0:
        seen = seen & (query - key <= call.left)
    if call.right >= 0:
        seen = seen & (key - query <= call.right)
    return seen


def _packed(call: Call) -> Tensor:
    """A packed or paged call as one sequence, whose queries see the keys of their own alone."""
    assert call.cu_q is not None
    assert call.cu_k is not None
    k, v = call.k, call.v
    device = call.q.device
    cu_q, cu_k = call.cu_q.long(), call.cu_k.long()
    if call.block_table is not None:
        k, v = (x[call.block_table.long()].flatten(1, 2).flatten(0, 1) for x in (k, v))
        most = call.block_table.shape[1] * call.k.shape[1]
        of_key = torch.arange(len(k), device=device) // max(most, 1)
        place = torch.arange(len(k), device=device) % max(most, 1)
    else:
        of_key = torch.searchsorted(cu_k, torch.arange(len(k), device=device), right=True) - 1
        place = torch.arange(len(k), device=device) - cu_k[of_key.clamp(0, len(cu_k) - 1)]
    sequences = len(cu_q) - 1
    of_query = torch.searchsorted(cu_q, torch.arange(len(call.q), device=device), right=True) - 1
    of_query, of_key = of_query.clamp(0, max(sequences - 1, 0)), of_key.clamp(0, max(sequences - 1, 0))
    counts, tokens = cu_k.diff(), cu_q.diff()
    first = torch.zeros_like(counts) if call.offsets is None else call.offsets.long()
    key = first[of_key] + place
    query = (first + counts - tokens - cu_q[:-1])[of_query] + torch.arange(len(call.q), device=device)
    seen = _by_position(call, query[:, None], key[None]) & (place < counts[of_key])
    seen = seen & (of_query[:, None] == of_key[None])
    q, k, v = (x.transpose(0, 1)[None] for x in (call.q, k, v))
    return _weighted(call, q, k, v, None, seen[None, None])[0].transpose(0, 1)
