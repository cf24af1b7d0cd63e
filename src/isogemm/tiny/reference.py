"""The oracle of tests and benchmarks: plain torch in float64."""

from __future__ import annotations

import torch


def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[B or 1, M, K] @ [B or 1, K, N] -> [B, M, N], float64."""
    return torch.matmul(a.double(), b.double())


def bmm_scale(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|A| |B|: the natural size of an element's rounding error."""
    return torch.matmul(a.double().abs(), b.double().abs())
