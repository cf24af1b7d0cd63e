"""Whether a call may go straight to its kernel, or must go through the dispatcher first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.compiler import is_compiling
from torch.overrides import has_torch_function

from isogemm.core import private
from isogemm.core.private import forward_ad_level

PLAIN = (torch.nn.Parameter, torch.Tensor)


def through_dispatcher(*tensors: torch.Tensor) -> bool:
    """Whether a call must go through the dispatcher: compilation, modes, tracers, transforms, tensor subclasses."""
    return (
        is_compiling()
        or not _HAS_FAST_PATH
        or _dispatch_modes() > 0
        or is_tracing()
        or forward_ad_level() >= 0
        or _interpreter() is not None
        or _any_special(tensors)
    )


def is_intercepted() -> bool:
    """Whether a torch function mode is on. It is to see a call as one, as it does torch's own: not what is inside."""
    return has_torch_function(_NO_TENSOR) and not is_compiling()


def likeness(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Whether other tensors are like these in all but memory, at a tenth of the cost of asking each; None if special.

    In type, dispatch keys, dtype, device, sizes, strides, whether they require a gradient, and which are the same.
    """
    if _TensorGuards is None or _any_special(tensors):
        return None
    firsts = _first_places(tensors)
    places = sorted(set(firsts))
    distinct = [tensors[place] for place in places]
    sizes, strides = [list(each.shape) for each in distinct], [list(each.stride()) for each in distinct]
    check: Callable[..., bool] = _TensorGuards(*distinct, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if len(places) == len(firsts):
        return check
    # The guards hold for no tensor that is given twice.
    return lambda *others: _first_places(others) == firsts and check(*[others[place] for place in places])


def _first_places(tensors: Sequence[object]) -> list[int]:
    """Where each was given first."""
    ids = list(map(id, tensors))
    return [ids.index(each) for each in ids]


def in_transform(*tensors: torch.Tensor) -> bool:
    """Inside forward-mode AD or vmap and its kin, which torch's own operators know and a custom one does not."""
    return (
        forward_ad_level() >= 0
        or (_interpreter is not None and _interpreter() is not None)
        or (_is_batched is not None and any(map(_is_batched, tensors)))
    )


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast makes of matrix products where x is; None where it is off."""
    kind = "cuda" if x.is_cuda else x.device.type  # which takes longer to ask
    # Not is_autocast_available: torch 2.11 cannot trace it.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _any_special(tensors: Sequence[torch.Tensor]) -> bool:
    """A subclass, or without memory that a kernel could read as it stands."""
    try:
        for x in tensors:
            if type(x) not in PLAIN or x.is_neg() or x.is_nested or (not x.data_ptr() and x.numel()):
                return True
    except RuntimeError:  # sparse, or of a vmap, without an address
        return True
    return False


# Looked up once: they are asked at every call.
_NO_TENSOR = (None,)  # has_torch_function then asks for a mode alone
is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
_HAS_FAST_PATH = not private.is_off(private.FAST_PATH)
_TensorGuards = private.find("torch._C._dynamo.guards:TensorGuards")
_dispatch_modes = private.find("torch._C:_len_torch_dispatch_stack")
_interpreter = private.find("torch._C:_functorch.peek_interpreter_stack")
_is_batched = private.find("torch._C:_functorch.is_legacy_batchedtensor")
