"""The encoder layer in plain torch, in the inputs' dtype: what tests and benchmarks compare with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from isogemm.encoder.parameters import EncoderParameters

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh"),
    "silu": functional.silu,
}


def encoder_layer(
    x: Tensor,
    params: EncoderParameters,
    *,
    nhead: int,
    norm_first: bool = False,
    activation: str = "relu",
    norm: str = "layer_norm",
    eps: float = 1e-5,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """x [S, T, D] or [T, D], as `isogemm.encoder_layer`."""

    def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if norm == "layer_norm":
            return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
        return functional.rms_norm(x, x.shape[-1:], weight, eps)

    def attended(x: Tensor) -> Tensor:
        q, k, v = in_projection(x, params)
        o = attention(q, k, v, nhead, key_padding_mask, is_causal)
        return functional.linear(o, params.out_proj_weight, params.out_proj_bias)

    def fed_forward(x: Tensor) -> Tensor:
        hidden = _ACTIVATIONS[activation](functional.linear(x, params.linear1_weight, params.linear1_bias))
        return functional.linear(hidden, params.linear2_weight, params.linear2_bias)

    norm1, norm2 = (params.norm1_weight, params.norm1_bias), (params.norm2_weight, params.norm2_bias)
    if norm_first:
        x = x + attended(normed(x, *norm1))
        return x + fed_forward(normed(x, *norm2))
    x = normed(x + attended(x), *norm1)
    return normed(x + fed_forward(x), *norm2)


def in_projection(x: Tensor, params: EncoderParameters) -> tuple[Tensor, ...]:
    """Queries, keys and values, each like x."""
    weight, bias = params.in_proj_weight, params.in_proj_bias
    if isinstance(weight, Tensor):
        assert not isinstance(bias, tuple)
        return functional.linear(x, weight, bias).chunk(3, dim=-1)
    biases = bias if isinstance(bias, tuple) else (None, None, None)
    return tuple(functional.linear(x, each, its_bias) for each, its_bias in zip(weight, biases, strict=True))


def attention(
    q: Tensor, k: Tensor, v: Tensor, nhead: int, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """q, k, v [..., T, H * d], mask [..., T] of the keys; a query without keys gets 0."""

    def heads(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], nhead, x.shape[-1] // nhead).transpose(-3, -2)  # [..., H, T, d]

    tokens = q.shape[-2]
    scores = heads(q) @ heads(k).mT / math.sqrt(q.shape[-1] // nhead)
    if mask is not None:
        of_keys = mask[..., None, None, :]
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(of_keys, -math.inf)
        else:
            scores = scores + of_keys.to(scores.dtype)
    if is_causal:
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return (weights @ heads(v)).transpose(-3, -2).flatten(-2)
