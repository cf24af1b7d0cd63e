"""Parameters and options of an encoder layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from isogemm.norm.op import RunningStatistics as RunningStatistics

NORMS = ("layer_norm", "rms_norm", "batch_norm")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")


class EncoderParameters(NamedTuple):
    """The parameters of `isogemm.encoder_layer`, D = d_model and F = dim_feedforward.

    The projections to queries, keys and values are one stacked weight, as in torch, or three, which are not copied
    together.
    """

    in_proj_weight: Tensor | tuple[Tensor, Tensor, Tensor]  # [3D, D], or (q, k, v) of [D, D]
    out_proj_weight: Tensor  # [D, D]
    linear1_weight: Tensor  # [F, D]
    linear2_weight: Tensor  # [D, F]
    norm1_weight: Tensor | None = None  # [D]; None: no scale
    norm2_weight: Tensor | None = None
    in_proj_bias: Tensor | tuple[Tensor | None, Tensor | None, Tensor | None] | None = None  # [3D], or (q, k, v) of [D]
    out_proj_bias: Tensor | None = None
    linear1_bias: Tensor | None = None
    linear2_bias: Tensor | None = None
    norm1_bias: Tensor | None = None
    norm2_bias: Tensor | None = None

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of every parameter that is not None; three for a tuple."""
        for name, value in zip(self._fields, self, strict=True):
            if isinstance(value, tuple):
                for index, each in enumerate(value):
                    if each is not None:
                        yield f"{name}[{index}]", each
            elif value is not None:
                yield name, value

    def flat(self) -> tuple[Tensor | None, ...]:
        """The tensors in the same order: twelve, or sixteen if q, k and v have separate weights."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if not isinstance(weight, tuple):
            return cast("tuple[Tensor | None, ...]", self)
        if bias is None:
            bias = (None, None, None)
        elif not isinstance(bias, tuple):
            raise TypeError(
                f"params.in_proj_bias is a {type(bias).__name__}; expected a tuple, since in_proj_weight is one"
            )
        return cast("tuple[Tensor | None, ...]", (*weight, *self[1:6], *bias, *self[7:]))


class EncoderDropout(NamedTuple):
    """Dropout probabilities at the four places of an encoder layer."""

    attention: float = 0.0  # the attention's weights
    projection: float = 0.0  # after out_proj
    activation: float = 0.0  # after the activation
    output: float = 0.0  # after linear2


NOTHING_DROPPED = EncoderDropout()


class Options(NamedTuple):
    """A call's options, validated."""

    nhead: int
    norm_first: bool
    residual_normed: bool
    activation: str
    norm: str
    eps: float
    is_causal: bool
    precision: str | None  # resolved; None if the operands are not float32, and on the CPU
    operand: torch.dtype  # of the products: autocast's, or x's
    dropout: EncoderDropout = NOTHING_DROPPED
    from_batch: bool = False  # whether a batch norm uses the batch's statistics
    return_scores: bool = False
    return_factors: bool = False  # the layer's queries and keys, in place of its scores
