"""Whether a call may go straight to its kernel, or torch has something to say to it first."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

PLAIN = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided


def through_dispatcher(*tensors: torch.Tensor) -> bool:
    """Whether the plain path would not hear all that torch has to say to this call."""
    return (
        is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or in_transform(*tensors)
        or any(type(x) not in PLAIN or _is_lazy(x) for x in tensors)
    )


def in_transform(*tensors: torch.Tensor) -> bool:
    """Inside forward-mode AD or vmap and its kin, which torch's own operators know and a custom one does not."""
    return (
        forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(map(torch._C._functorch.is_legacy_batchedtensor, tensors))
    )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast makes of matrix products on a device; None where it is off."""
    # Not is_autocast_available: torch 2.11 cannot trace it.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _is_lazy(x: torch.Tensor) -> bool:
    """Without memory that a kernel could read as it stands."""
    return x.is_neg() or x._is_zerotensor() or x.layout is not _STRIDED or x.is_nested
