"""Attention with residual scores and dropout in plain torch, what its kernels are compared with; theirs by head."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from isogemm.encoder.attention.configs import MOST_FACTORS, Attention, MmaConfig, choose_mma
from isogemm.epilogues import random
from isogemm.gemm.reference import round_to_tf32
from isogemm.verify.poison import poisoned_allocations


class AttentionInputs(NamedTuple):
    """q, k, v and grad, of the result, are [S, T, H * d]; previous and of_scores, a gradient, [S, H, T, T].

    earlier, instead of previous: q and k of earlier layers, [layers, 2, S, T, H * d]. of_own: gradients that come in
    for q and k.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    nhead: int
    mask: Tensor | None = None
    is_causal: bool = False
    previous: Tensor | None = None
    of_scores: Tensor | None = None
    seed: Tensor | None = None
    dropout: float = 0.0
    earlier: Tensor | None = None
    of_own: Tensor | None = None


class AttentionResults(NamedTuple):
    """The scores and d_previous, of previous or of earlier, are None where not asked for."""

    o: Tensor
    scores: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_previous: Tensor | None


def torch_attention(inputs: AttentionInputs, dtype: torch.dtype) -> AttentionResults:
    """By torch's operations in `dtype`; a query without keys gets 0."""
    sequences, tokens, width = inputs.q.shape
    leaves = [each.detach().to(dtype).requires_grad_() for each in inputs[:3]]
    q, k, v = (_heads(each, inputs.nhead) for each in leaves)
    products = q @ k.mT
    if inputs.earlier is not None:
        leaves.append(inputs.earlier.detach().to(dtype).requires_grad_())
        earlier = _heads(leaves[-1], inputs.nhead)
        products = products + (earlier[:, 0] @ earlier[:, 1].mT).sum(0)
    scores = products / math.sqrt(width // inputs.nhead)
    if inputs.previous is not None:
        leaves.append(inputs.previous.detach().to(dtype).requires_grad_())
        scores = scores + leaves[-1]
    if (mask := inputs.mask) is not None:
        if mask.dtype is torch.bool:
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
        scores = scores + mask[:, None, None].to(dtype)
    if inputs.is_causal:
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    left_out = scores == -math.inf
    empty = left_out.all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    if inputs.seed is not None:
        kept = random.kept_weights(inputs.seed, sequences * inputs.nhead, tokens, inputs.dropout)
        weights = weights * (kept.view(weights.shape) * random.scale(inputs.dropout)).to(dtype)
    o = (weights @ v).transpose(1, 2).flatten(2)
    outputs, above = [o], [inputs.grad.to(dtype)]
    if inputs.of_own is not None:
        outputs += leaves[:2]
        above += inputs.of_own.to(dtype).unbind()
    if inputs.of_scores is not None:
        outputs.append(scores)
        above.append(inputs.of_scores.to(dtype).masked_fill(left_out, 0.0))
    dq, dk, dv, *rest = torch.autograd.grad(outputs, leaves, above)
    shown = None if inputs.of_scores is None else scores.detach()
    return AttentionResults(o.detach(), shown, dq, dk, dv, rest[0] if rest else None)


def attention_by_head(
    inputs: AttentionInputs, precision: str, *, transposed: bool = False, config: MmaConfig | None = None
) -> AttentionResults:
    """By the kernels of short heads, with q, k, v and do head by head; transposed: dq, dk and dv are written so."""
    from isogemm.encoder.attention.kernels import describe

    sequences, tokens, width = inputs.q.shape
    rows, nhead = sequences * tokens, inputs.nhead
    mask, head, apart = inputs.mask, width // nhead, rows + 3 if transposed else width

    def by_head(x: Tensor) -> Tensor:
        return _heads(x.flatten(-3, -2), nhead).contiguous()

    def in_rows(x: Tensor) -> Tensor:
        return x.transpose(-3, -2).reshape(*x.shape[:-3], sequences, tokens, width)

    earlier = None if inputs.earlier is None else by_head(inputs.earlier)
    of_own = (None, None) if inputs.of_own is None else by_head(inputs.of_own).unbind()
    factors = 0 if earlier is None else len(earlier)
    forward = Attention(
        sequences, tokens, nhead, head, str(inputs.q.dtype).removeprefix("torch."), precision, (head,) * 3,
        inputs.is_causal, "" if mask is None else "bool" if mask.dtype is torch.bool else "additive",
        (0, 0) if mask is None else (mask.stride(0), mask.stride(1)),
        by_head=True, dropout=inputs.dropout, factors=factors,
    )  # fmt: skip
    backward = replace(
        forward, row_strides=(head,) * 3 + (apart,) * 3, transposed=transposed, added=inputs.of_own is not None
    )

    def all_layers(x: Tensor | None) -> tuple[Tensor | None, ...]:
        given = () if x is None else x.flatten(0, 1).unbind()
        return (*given, *(None,) * (2 * MOST_FACTORS - len(given)))

    q, k, v, do = map(by_head, inputs[:4])
    if precision == "tf32":  # as the projections leave them
        q, k, v, do = map(round_to_tf32, (q, k, v, do))
    with poisoned_allocations():
        o, lse = q.new_empty(rows, width), q.new_empty(nhead, rows, dtype=torch.float32)
        dq, dk, dv = q.new_empty(3, width, apart) if transposed else q.new_empty(3, rows, width)
        d_earlier = None if earlier is None else torch.empty_like(earlier)
    if mask is not None and mask.dtype is torch.bool:
        mask = mask.view(torch.uint8)
    given = (q, k, v, mask, None, inputs.seed, o, lse)
    launch = describe(forward, config or choose_mma(forward))
    launch.run(*given, None, *(all_layers(earlier) if factors else ()))
    launch = describe(backward, config or choose_mma(backward))
    more = (*all_layers(earlier), *all_layers(d_earlier), *of_own) if factors or backward.added else ()
    launch.run(*given, do, None, dq, dk, dv, None, *more)
    if transposed:
        assert not any(bool(each[:, rows:].any()) for each in (dq, dk, dv))
        dq, dk, dv = (each[:, :rows].mT for each in (dq, dk, dv))
    o, dq, dk, dv = (each.reshape(inputs.q.shape) for each in (o, dq, dk, dv))
    return AttentionResults(o, None, dq, dk, dv, None if d_earlier is None else in_rows(d_earlier))


def _heads(x: Tensor, nhead: int) -> Tensor:
    """[..., T, H * d] as [..., H, T, d]."""
    return x.view(*x.shape[:-1], nhead, -1).transpose(-3, -2)
