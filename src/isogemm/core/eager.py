"""Whether a call may go straight to its kernel, or torch has something to say to it first."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

PLAIN = (torch.nn.Parameter, torch.Tensor)


def through_dispatcher(*tensors: torch.Tensor) -> bool:
    """Whether the plain path would not hear all that torch has to say to this call."""
    return (
        is_compiling()
        or _dispatch_modes() > 0
        or _tracing_state() is not None
        or forward_ad._current_level >= 0
        or _interpreter() is not None
        or _any_special(tensors)
    )


def in_transform(*tensors: torch.Tensor) -> bool:
    """Inside forward-mode AD or vmap and its kin, which torch's own operators know and a custom one does not."""
    return (
        forward_ad._current_level >= 0
        or _interpreter() is not None
        or any(map(torch._C._functorch.is_legacy_batchedtensor, tensors))
    )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast makes of matrix products on a device; None where it is off."""
    if not is_compiling() and not _is_any_autocast():
        return None
    # Not is_autocast_available: torch 2.11 cannot trace it.
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def _any_special(tensors: tuple[torch.Tensor, ...]) -> bool:
    """A subclass, or without memory that a kernel could read as it stands."""
    try:
        for x in tensors:
            if type(x) not in PLAIN or x.is_neg() or x.is_nested or (not x.data_ptr() and x._is_zerotensor()):
                return True
    except RuntimeError:  # sparse, or of a vmap, without an address
        return True
    return False


# Looked up once: they are asked at every call.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing_state = torch._C._get_tracing_state
_interpreter = torch._C._functorch.peek_interpreter_stack
_is_any_autocast = torch._C._is_any_autocast_enabled
