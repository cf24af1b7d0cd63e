"""The composed path: the library's own products, norm and attention; any size, under the same contract."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isogemm.attention.api import attention
from isogemm.encoder.attention.configs import SHORT_HEAD
from isogemm.encoder.attention.cpu import AttentionCall
from isogemm.encoder.attention.op import attention as encoder_attention
from isogemm.encoder.parameters import EncoderParameters, Options, RunningStatistics
from isogemm.gemm import configs
from isogemm.gemm.api import linear, mlp
from isogemm.gemm.fused import new_seed
from isogemm.norm.op import batch_norm, encoder_norm


def encoder_layer(
    x: Tensor,
    params: EncoderParameters,
    mask: Tensor | None,
    scores: Tensor | None,
    running: tuple[RunningStatistics, RunningStatistics] | None,
    options: Options,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Run the layer on valid x [S, T, D], mask [S, T] and scores [S, H, T, T]. Returns y, its scores and its factors.

    The products apply autocast themselves.
    """
    dropout = options.dropout

    def normed(x: Tensor, number: int, dtype: torch.dtype) -> Tensor:
        weight, bias = (
            (params.norm1_weight, params.norm1_bias) if number == 1 else (params.norm2_weight, params.norm2_bias)
        )
        if options.norm == "batch_norm":
            its_running = None if running is None else running[number - 1]
            return batch_norm(x, weight, bias, its_running, options.from_batch, options.eps, dtype)
        return encoder_norm(x, weight, bias, options.norm, options.eps, dtype)

    def attended(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        call = _operands(x, params, mask, scores, options)
        o, of_layer = (_plain_attention(call), None) if _is_plain(call) else encoder_attention(call)
        qk = _factors(call) if options.return_factors else None
        added, wide = _residual(residual, options)
        out = linear(
            o, params.out_proj_weight, params.out_proj_bias, residual=added, dropout_p=dropout.projection,
            out_dtype=wide, precision=options.precision,
        )  # fmt: skip
        return out.to(residual.dtype), of_layer, qk

    def fed_forward(x: Tensor, residual: Tensor) -> Tensor:
        added, wide = _residual(residual, options)
        out = mlp(
            x, params.linear1_weight, params.linear2_weight, bias=params.linear1_bias, bias_down=params.linear2_bias,
            activation=options.activation, hidden_dropout_p=dropout.activation, dropout_p=dropout.output,
            residual=added, out_dtype=wide, precision=options.precision,
        )  # fmt: skip
        return out.to(residual.dtype)

    if not options.norm_first:
        s, of_layer, qk = attended(x, x)
        u = normed(s, 1, x.dtype)
        return normed(fed_forward(u, u), 2, x.dtype), of_layer, qk
    if options.residual_normed:
        n = normed(x, 1, x.dtype)
        s, of_layer, qk = attended(n, n)
        u = normed(s, 2, x.dtype)
        return fed_forward(u, u), of_layer, qk
    s, of_layer, qk = attended(normed(x, 1, options.operand), x)
    return fed_forward(normed(s, 2, options.operand), s), of_layer, qk


def scores_of(factors: Sequence[Tensor], precision: str | None) -> Tensor:
    """Add up q k^T / sqrt(d) [S, H, T, T] of layers' queries and keys [2, H, S, T, d], in attention's order."""
    scores = None
    for factor in factors:
        q, k = (each.permute(1, 2, 0, 3).flatten(2) for each in factor)
        call = AttentionCall(q, k, k, None, factor.shape[1], False, precision, scores, scores=True)
        _, scores = encoder_attention(call)
    assert scores is not None
    return scores


def _is_plain(call: AttentionCall) -> bool:
    """Whether `isogemm.attention` serves: no dropout, no scores of or for another layer, and heads of some length."""
    is_alone = call.previous is None and call.seed is None and not call.scores
    return is_alone and call.width // call.nhead > SHORT_HEAD


def _plain_attention(call: AttentionCall) -> Tensor:
    """o [S, T, H * d] by `isogemm.attention`."""
    sizes = (call.nhead, call.width // call.nhead)
    q, k, v = (each.reshape(*each.shape[:2], *sizes).transpose(1, 2) for each in call.parts(*call[:3]))
    mask = None if call.mask is None else call.mask[:, None, None, :]
    if mask is not None and mask.dtype is torch.bool:
        mask = ~mask
    o = attention(q, k, v, causal=call.is_causal, attn_mask=mask, precision=call.precision)
    return o.transpose(1, 2).flatten(2)


def _factors(call: AttentionCall) -> Tensor:
    """The call's queries and keys [2, H, S, T, d]."""
    q, k, _ = call.parts(call.q, call.k, call.v)
    by_head = (*q.shape[:-1], call.nhead, call.width // call.nhead)
    return torch.stack([each.reshape(by_head).permute(2, 0, 1, 3) for each in (q, k)])


def _operands(
    x: Tensor, params: EncoderParameters, mask: Tensor | None, scores: Tensor | None, options: Options
) -> AttentionCall:
    """Project x to queries, keys and values; one tensor if their weight is stacked."""
    weight, bias = params.in_proj_weight, params.in_proj_bias
    q: Tensor
    k = v = None
    if isinstance(weight, tuple):
        biases = bias if isinstance(bias, tuple) else (None, None, None)
        x = x.to(options.operand)
        q, k, v = (
            linear(x, each, its_bias, precision=options.precision)
            for each, its_bias in zip(weight, biases, strict=True)
        )
    else:
        assert not isinstance(bias, tuple)
        q = linear(x, weight, bias, precision=options.precision)
    p = options.dropout.attention
    seed = new_seed(x.device) if p else None
    return AttentionCall(
        q, k, v, mask, options.nhead, options.is_causal, options.precision, scores, seed, p, options.return_scores
    )  # fmt: skip


def _residual(x: Tensor, options: Options) -> tuple[Tensor, torch.dtype | None]:
    """The residual as a product adds it, and the sum's dtype: float32 if autocast's dtype is not x's."""
    if x.dtype is options.operand:
        return x, None
    return x.float(), torch.float32


def chunk(tokens: int, d_model: int, dim_feedforward: int, dtype: str) -> int:
    """Sequences per partial sum of the parameters' gradients: the fewest that are whole chunks of every weight."""
    weights = ((3 * d_model, d_model), (dim_feedforward, d_model), (d_model, dim_feedforward))
    widest = max(configs.token_chunk(n, k, dtype) for n, k in weights)
    return widest // math.gcd(widest, tokens)
