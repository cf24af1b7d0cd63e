"""The GEMM in plain torch, in float64: what tests and benchmarks compare with."""

from __future__ import annotations

import torch
from torch import Tensor


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., M, K] @ [..., K, N] (+ [N])."""
    result = torch.matmul(a.double(), b.double())
    return result if bias is None else result + bias.double()


def matmul_scale(a: Tensor, b: Tensor) -> Tensor:
    """|A| |B|: the unit of an element's error."""
    return torch.matmul(a.double().abs(), b.double().abs())


def round_to_tf32(x: Tensor) -> Tensor:
    """float32 rounded to ten bits of mantissa, to nearest, ties to even."""
    bits = x.contiguous().view(torch.int32).to(torch.int64)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000).to(torch.int32).view(torch.float32)
    return torch.where(torch.isnan(x), x, rounded)
