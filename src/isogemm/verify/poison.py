"""Fills uninitialised memory with NaN while a test runs, so that unwritten elements show."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from isogemm.core import plan

_ALLOCATORS: tuple[tuple[Any, str], ...] = (
    *((torch, name) for name in ("empty", "empty_like", "empty_strided")),
    *((Tensor, name) for name in ("new_empty", "new_empty_strided")),
    (plan, "_empty_strided_cuda"),
)


def poison_value(dtype: torch.dtype) -> complex | float | int | bool:
    """Return the value least likely to pass for a result: NaN, the largest integer, True."""
    if dtype.is_complex:
        return complex(float("nan"), float("nan"))
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill what `torch.empty` and similar functions return with `poison_value`, gaps between strides included.

    The functions themselves are replaced for the duration, in every thread: a torch mode would take the code
    under test down another path. Memory that torch's own operators allocate is left alone.
    """
    with ExitStack() as replaced:
        for owner, name in _ALLOCATORS:
            replaced.enter_context(mock.patch.object(owner, name, _poisoning(getattr(owner, name))))
        yield


def _poisoning(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(allocate)
    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.layout is torch.strided:
            with torch.no_grad():
                whole = tensor
                if kwargs.get("out") is None and not tensor.is_contiguous():  # all of a fresh tensor's storage
                    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
                whole.fill_(poison_value(tensor.dtype))
        return tensor

    return poisoned
