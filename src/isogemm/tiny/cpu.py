"""The CPU backend, and the fallback everywhere: torch.bmm, with a shared operand expanded."""

from __future__ import annotations

import torch
from torch import Tensor


def bmm(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[0] == b.shape[0]:
        return torch.bmm(a, b)
    batch = b.shape[0] if a.shape[0] == 1 else a.shape[0]
    return torch.bmm(a.expand(batch, -1, -1), b.expand(batch, -1, -1))
