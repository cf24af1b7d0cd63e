"""Device memory of a step."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """What a step has allocated at most, beyond what was before it."""
    step()  # libraries' workspaces, and compilation
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
