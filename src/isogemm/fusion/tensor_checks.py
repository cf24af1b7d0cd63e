"""Checks of tensors and functions before a call is deferred."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from isogemm.core.eager import PLAIN

CONSTANTS = frozenset({bool, int, float, str, type(None)})
_OVERLOAD: Any = type(torch.ops.aten.mm.default)
_PACKET: Any = type(torch.ops.aten.mm)
OPERATOR_TYPES: Any = (_PACKET, _OVERLOAD)


def stamps(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the versions and addresses, which change when a tensor is modified in place or given other memory."""
    found: tuple[int, ...] = ()
    for x in tensors:
        found += (x._version, x.data_ptr())
    return found


def stamps_of_plain(values: Sequence[Any]) -> tuple[int, ...] | None:
    """Return the stamps; None if a value is no strided tensor with memory and a version, or has a main_grad."""
    found: tuple[int, ...] = ()
    try:
        for x in values:
            if type(x) not in PLAIN or x.is_neg() or x.is_nested or hasattr(x, "main_grad"):
                return None
            address = x.data_ptr()
            if address == 0 and x.numel():
                return None
            found += (x._version, address)
    except RuntimeError:  # it was made in inference mode, or has no memory of its own
        return None
    return found


def is_in_order(x: torch.Tensor) -> bool:
    """Whether torch gives a contiguous layout to the result of an operation whose first operand this is.

    torch sorts the dimensions by the first operand's strides, except those that are broadcast.
    """
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and stride]
    return all(a > b for a, b in itertools.pairwise(strides))


def tensors_in(values: Any) -> list[torch.Tensor]:
    """List the tensors in nested lists, tuples and mappings."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [x for value in values if type(value) not in CONSTANTS for x in tensors_in(value)]


_OPERATORS = "add and div floordiv lshift mod mul or pow rshift sub truediv xor"
_WRITING = frozenset(
    {"__delete__", "__set__", "__setitem__", *(f"__i{name}__" for name in _OPERATORS.split())}
    | {"delitem", "setitem", "iconcat", "imatmul", *(f"i{name}" for name in _OPERATORS.split())}
    # They write buffers and rows of weights, which neither a schema nor `_version` shows.
    | {"batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
    | {"_batch_norm_impl_index"}
    | {"batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "batch_norm_update_stats"}
    | {"embedding", "embedding_bag", "fused_moving_avg_obs_fake_quant"}
    # They give the memory to code that may write it: NumPy, DLPack, a Triton kernel's launch, C++ by ctypes.
    | {"data_ptr", "numpy", "storage", "untyped_storage", "__array__", "__cuda_array_interface__", "__dlpack__"}
)


def may_write(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may change an argument (in place, out=, assignment, custom operator) or gives out its memory."""
    return (
        writes_by_name(function)
        or kwargs.get("out") is not None
        or bound_in_place(function, args, kwargs) is not None
        or isinstance(function, OPERATOR_TYPES)
    )


@functools.lru_cache(1024)
def writes_by_name(function: Any) -> bool:
    """Whether the name is that of a function that writes its arguments, or the operator of that name does."""
    called = str(getattr(function, "__name__", "")).partition(".")[0]
    if called in _WRITING or name(function) in _WRITING or (called.endswith("_") and not called.endswith("__")):
        return True
    return any(
        each.alias_info is not None and each.alias_info.is_write and not each.is_out and str(each.type) in _TENSORS
        for schema in schemas(getattr(torch.ops.aten, called, None))
        for each in schema.arguments
    )


_TENSORS = ("Tensor", "Optional[Tensor]")  # a list's are sorted in place in TorchScript, by an overload of `sort`


def schemas(operator: Any) -> list[Any]:
    """Return the schemas of an operator's overloads; of anything else, none."""
    if type(operator) is _PACKET:
        return [getattr(operator, each)._schema for each in operator.overloads()]
    return [operator._schema] if isinstance(operator, _OVERLOAD) else []


def bound_in_place(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments | None:
    """Return the arguments of a call with inplace=True; None for other calls."""
    signature = _signature(function) if kwargs or len(args) > 1 else None
    if signature is None:
        return None
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:  # torch will say what is wrong
        return None
    return bound if bound.arguments.get("inplace") else None


@functools.lru_cache(1024)
def _signature(function: Any) -> inspect.Signature | None:
    """Return the signature of a torch.nn.functional function with an inplace argument; None for others."""
    if getattr(function, "__module__", "") != F.__name__ or inspect.isbuiltin(function):
        return None
    signature = inspect.signature(function)
    return signature if "inplace" in signature.parameters else None


def name(function: Any) -> str:
    """Return the name that a user knows: a property's accessors have the property's name."""
    called = str(getattr(function, "__name__", function))
    if called not in ("__get__", "__set__", "__delete__"):
        return called
    accessed = function.__self__
    return str(getattr(accessed, "fget", accessed).__name__)  # a Python property's is its getter's
