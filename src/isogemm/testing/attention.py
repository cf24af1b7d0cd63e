"""Attention with residual scores and dropout in plain torch: what its kernels are compared with."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from isogemm.epilogues import random


class AttentionInputs(NamedTuple):
    """q, k, v and grad, of the result, are [S, T, H * d]; previous and of_scores, a gradient, [S, H, T, T]."""

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


class AttentionResults(NamedTuple):
    """The scores and d_previous are None where not asked for."""

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
    q, k, v = (each.view(sequences, tokens, inputs.nhead, -1).transpose(1, 2) for each in leaves)
    scores = q @ k.mT / math.sqrt(width // inputs.nhead)
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
    if inputs.of_scores is not None:
        outputs.append(scores)
        above.append(inputs.of_scores.to(dtype).masked_fill(left_out, 0.0))
    dq, dk, dv, *rest = torch.autograd.grad(outputs, leaves, above)
    shown = None if inputs.of_scores is None else scores.detach()
    return AttentionResults(o.detach(), shown, dq, dk, dv, rest[0] if rest else None)
