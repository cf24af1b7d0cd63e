"""Fused operations in torch's own functions, which isogemm's are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from isogemm.verify.activations import ACTIVATION_FORMS, GATE_FORMS, Form


def fused_form(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    product: Form = torch.matmul,
    bias: torch.Tensor | None = None,
    bias_dim: int = -1,
    activation: str | None = None,
    activation_args: Mapping[str, float] | None = None,
    alpha: float | torch.Tensor | None = None,
    beta: float | torch.Tensor | None = None,
    c: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
    col_scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition of `isogemm.matmul_fused` but for dropout, an operation of torch's at a time."""
    z = product(a, b)
    z = z if alpha is None else z * alpha
    z = z if row_scale is None else z * row_scale[..., None]
    z = z if col_scale is None else z * col_scale
    beta = 1 if beta is None else beta
    z = z if c is None or not (isinstance(beta, torch.Tensor) or beta) else z + beta * c
    z = z if bias is None else z + (bias if bias_dim == -1 else bias[..., None])
    z = z if activation is None else ACTIVATION_FORMS[activation](z, **(activation_args or {}))
    return z if residual is None else residual + z


def gated_form(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_up: torch.Tensor,
    activation: str,
    *,
    bias: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    linear: Form = F.linear,
) -> torch.Tensor:
    """The same of `isogemm.linear` with a gated activation."""
    gate, up = linear(x, weight), linear(x, weight_up)
    gate, up = gate if bias is None else gate + bias, up if bias_up is None else up + bias_up
    value = GATE_FORMS[activation](gate) * up
    return value if residual is None else residual + value


def doubled(operands: Mapping[str, Any]) -> dict[str, Any]:
    """With every tensor in float64."""
    return {name: each.double() if isinstance(each, torch.Tensor) else each for name, each in operands.items()}
