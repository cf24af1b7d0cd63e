"""The oracle of tests and benchmarks: plain torch in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """[B or 1, M, K] @ [B or 1, K, N] -> [B, M, N], float64."""
    return torch.matmul(a.double(), b.double())


def bmm_scale(a: Tensor, b: Tensor) -> Tensor:
    """|A| |B|: the natural size of an element's rounding error."""
    return torch.matmul(a.double().abs(), b.double().abs())
