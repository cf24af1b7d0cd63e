"""The encoder layer in plain torch, in the inputs' dtype: what tests compare with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from isogemm.encoder.parameters import EncoderParameters, RunningStatistics

Keeping = tuple["Tensor | float", "Tensor | float", "Tensor | float", "Tensor | float"]
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
    residual_normed: bool = False,
    activation: str = "relu",
    norm: str = "layer_norm",
    eps: float = 1e-5,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    running: tuple[RunningStatistics, RunningStatistics] | None = None,
    training: bool = True,
    keeping: Keeping | None = None,
    scores: Tensor | None = None,
    return_scores: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """x [S, T, D] or [T, D], as `isogemm.encoder_layer`; keeping: what dropout multiplies with at its four places."""
    attention_kept, projection_kept, activation_kept, output_kept = keeping or (1.0, 1.0, 1.0, 1.0)

    def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, number: int) -> Tensor:
        if norm == "layer_norm":
            return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
        if norm == "rms_norm":
            return functional.rms_norm(x, x.shape[-1:], weight, eps)
        return _batch_normed(x, weight, bias, None if running is None else running[number - 1], training, eps)

    def attended(x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = in_projection(x, params)
        of_layer = attention_scores(q, k, nhead, key_padding_mask, is_causal, scores)
        o = weighed(of_layer, v, nhead, attention_kept)
        return functional.linear(o, params.out_proj_weight, params.out_proj_bias) * projection_kept, of_layer

    def fed_forward(x: Tensor) -> Tensor:
        hidden = _ACTIVATIONS[activation](functional.linear(x, params.linear1_weight, params.linear1_bias))
        return functional.linear(hidden * activation_kept, params.linear2_weight, params.linear2_bias) * output_kept

    norm1, norm2 = (params.norm1_weight, params.norm1_bias, 1), (params.norm2_weight, params.norm2_bias, 2)
    if norm_first:
        n = normed(x, *norm1)
        out, of_layer = attended(n)
        s = (n if residual_normed else x) + out
        u = normed(s, *norm2)
        y = (u if residual_normed else s) + fed_forward(u)
    else:
        out, of_layer = attended(x)
        u = normed(x + out, *norm1)
        y = normed(u + fed_forward(u), *norm2)
    return (y, of_layer) if return_scores else y


def _batch_normed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running: RunningStatistics | None, training: bool, eps: float
) -> Tensor:
    mean, var, batches, momentum, frozen = running or (None, None, None, 0.1, False)
    training = training and not frozen
    if training and batches is not None:
        batches += 1
        momentum = 1.0 / int(batches) if momentum is None else momentum
    rows = x.reshape(-1, x.shape[-1])
    from_batch = training or mean is None
    return functional.batch_norm(rows, mean, var, weight, bias, from_batch, momentum or 0.0, eps).view(x.shape)


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
    return weighed(attention_scores(q, k, nhead, mask, is_causal), v, nhead)


def attention_scores(
    q: Tensor,
    k: Tensor,
    nhead: int,
    mask: Tensor | None = None,
    is_causal: bool = False,
    previous: Tensor | None = None,
) -> Tensor:
    """[..., H, T, T], -inf for keys that are left out."""
    tokens = q.shape[-2]
    scores = _heads(q, nhead) @ _heads(k, nhead).mT / math.sqrt(q.shape[-1] // nhead)
    if previous is not None:
        scores = scores + previous
    if mask is not None:
        of_keys = mask[..., None, None, :]
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(of_keys, -math.inf)
        else:
            scores = scores + of_keys.to(scores.dtype)
    if is_causal:
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    return scores


def weighed(scores: Tensor, v: Tensor, nhead: int, kept: Tensor | float = 1.0) -> Tensor:
    """softmax(scores) v, [..., T, H * d]; kept: what the weights are multiplied with."""
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) * kept
    return (weights @ _heads(v, nhead)).transpose(-3, -2).flatten(-2)


def _heads(x: Tensor, nhead: int) -> Tensor:
    return x.reshape(*x.shape[:-1], nhead, x.shape[-1] // nhead).transpose(-3, -2)  # [..., H, T, d]
