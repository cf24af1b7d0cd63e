"""What is asked of tensors and functions before a call is deferred."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from isogemm.core.eager import PLAIN

_C: Any = torch._C


def stamps(tensors: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """What changes when one is modified in place, or given other memory."""
    found: list[int] = []
    for x in tensors:
        found += (x._version, x.data_ptr())
    return tuple(found)


def is_plain(x: Any) -> bool:
    """Whether x is a strided tensor with memory and a version: not a subclass, not one made in inference mode."""
    if type(x) not in PLAIN:
        return False
    keys = _C._dispatch_keys(x).raw_repr()
    return keys in _plain_keys or (x.is_cuda and keys == _keys_of_a_new_tensor(x.device))


@functools.cache
def _keys_of_a_new_tensor(device: torch.device) -> int:
    keys = int(_C._dispatch_keys(torch.empty(0, device=device)).raw_repr())
    _plain_keys.add(keys)
    return keys


_plain_keys: set[int] = set()
_keys_of_a_new_tensor(torch.device("cpu"))


def tensors_in(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [x for value in values for x in tensors_in(value)]


def storage(x: torch.Tensor) -> int:
    """A number for the memory that x may share with others."""
    try:
        return int(x.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # it has none
        return -id(x)


_OPERATORS = "add and div floordiv lshift mod mul or pow rshift sub truediv xor"
_WRITING = frozenset({"__delete__", "__set__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS.split())})


def may_write(function: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may change one of its arguments: in place, by out=, by assignment, or as a custom operator."""
    called = getattr(function, "__name__", "")
    return (
        (called.endswith("_") and not called.endswith("__"))
        or called in _WRITING
        or "out" in kwargs
        or bool(kwargs.get("inplace"))
        or isinstance(function, OpOverload | OpOverloadPacket)
    )


def name(function: Any) -> str:
    """As a user would know it: a property's accessors by the property's name."""
    called = str(getattr(function, "__name__", function))
    return str(function.__self__.__name__) if called in ("__get__", "__set__", "__delete__") else called
