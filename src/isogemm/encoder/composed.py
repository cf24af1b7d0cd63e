"""The layer out of the library's own products, the norm and the attention: any size, under the same contract."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from isogemm.encoder import op
from isogemm.encoder.op import AttentionCall
from isogemm.encoder.parameters import EncoderParameters, Options
from isogemm.gemm import configs
from isogemm.gemm.api import linear, mlp


def encoder_layer(x: Tensor, params: EncoderParameters, mask: Tensor | None, options: Options) -> Tensor:
    """Of x [S, T, D] and mask [S, T], valid and differentiable; the products apply autocast themselves."""

    def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        return op.encoder_norm(x, weight, bias, options.norm, options.eps, dtype)

    def attended(x: Tensor, residual: Tensor) -> Tensor:
        o = op.attention(_operands(x, params, mask, options))
        added, wide = _residual(residual, options)
        out = linear(
            o, params.out_proj_weight, params.out_proj_bias, residual=added, out_dtype=wide, precision=options.precision
        )
        return out.to(residual.dtype)

    def fed_forward(x: Tensor, residual: Tensor) -> Tensor:
        added, wide = _residual(residual, options)
        out = mlp(
            x, params.linear1_weight, params.linear2_weight, bias=params.linear1_bias, bias_down=params.linear2_bias,
            activation=options.activation, residual=added, out_dtype=wide, precision=options.precision,
        )  # fmt: skip
        return out.to(residual.dtype)

    norm1, norm2 = (params.norm1_weight, params.norm1_bias), (params.norm2_weight, params.norm2_bias)
    if options.norm_first:
        x = attended(normed(x, *norm1, options.operand), x)
        return fed_forward(normed(x, *norm2, options.operand), x)
    x = normed(attended(x, x), *norm1, x.dtype)
    return normed(fed_forward(x, x), *norm2, x.dtype)


def _operands(x: Tensor, params: EncoderParameters, mask: Tensor | None, options: Options) -> AttentionCall:
    """Queries, keys and values, in one tensor where their weight is one."""
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
    return AttentionCall(q, k, v, mask, options.nhead, options.is_causal, options.precision)


def _residual(x: Tensor, options: Options) -> tuple[Tensor, torch.dtype | None]:
    """As a product adds it, and the dtype of that sum: float32 where autocast's products are in another than x."""
    if x.dtype is options.operand:
        return x, None
    return x.float(), torch.float32


def chunk(tokens: int, d_model: int, dim_feedforward: int, dtype: str) -> int:
    """Sequences of one sum in the parameters' gradients: the fewest that all weights' chunks divide the tokens of."""
    weights = ((3 * d_model, d_model), (dim_feedforward, d_model), (d_model, dim_feedforward))
    widest = max(configs.token_chunk(n, k, dtype) for n, k in weights)
    return widest // math.gcd(widest, tokens)
