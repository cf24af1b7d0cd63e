"""Running one launch on tensors, and what operators around it share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from isogemm.core import dispatch
from isogemm.core.dispatch import Dispatch

if TYPE_CHECKING:
    from isogemm.core.launch import BoundKernel, Launch

_bound: dict[tuple[Any, ...], BoundKernel] = {}


def run(launch: Launch, tensors: tuple[Tensor | None, ...]) -> None:
    """Run a launch on the tensors' device; compiles it the first time."""
    index = next(each for each in tensors if each is not None).get_device()
    seen = tuple(None if each is None else (each.dtype, each.data_ptr() & 15 == 0) for each in tensors)
    key = (launch.kernel, *launch.constants.values(), *map(_specialised, launch.scalars), index, seen)
    with torch.cuda.device(index):
        kernel = _bound.get(key)
        if kernel is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("nothing can be compiled while a CUDA graph is captured: call the layer before")
            kernel = _bound[key] = launch.bind(*tensors)
        addresses = (None if each is None else each.data_ptr() for each in tensors)
        kernel(index, launch.programs, *addresses, *launch.scalars)


def _specialised(scalar: object) -> object:
    """The properties of an integer that Triton specialises on; other values as they are."""
    return (scalar == 1, scalar % 16 == 0, scalar >= 2**31) if isinstance(scalar, int) else scalar


def placed(x: Tensor) -> Tensor:
    """x contiguous and 16-byte aligned: the order of a row's sums depends on how it is loaded."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def record(name: str, x: Tensor) -> None:
    """Note a call of an encoder operator in the dispatch log."""
    if dispatch.active:
        path, reason = ("encoder", "on a GPU") if x.is_cuda else ("cpu", "not on a GPU")
        dtype = str(x.dtype).removeprefix("torch.")
        dispatch.record(Dispatch(name, path, f"{list(x.shape)} {dtype}", "", reason))


def refuse_second_derivative(name: str) -> None:
    """Raise in a backward under create_graph, whose gradients would be wrong."""
    if torch.is_grad_enabled() and not is_compiling():
        raise RuntimeError(f"isogemm::{name} has no second derivative")
