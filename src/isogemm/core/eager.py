"""Checks whether a call must go through the dispatcher, and a cache of calls that need not: `KnownCalls`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.overrides import has_torch_function

from isogemm.core import private
from isogemm.core.device import fp32_precision
from isogemm.core.plan import Cache, Value
from isogemm.core.private import forward_ad_level

PLAIN = (torch.nn.Parameter, Tensor)


def through_dispatcher(*tensors: Tensor) -> bool:
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
    """Whether a torch function mode is on. It must see one call of isogemm, not the torch calls inside."""
    return has_torch_function(NO_TENSOR) and not is_compiling()


def likeness(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """Return a check whether other tensors are like these in all but memory; None if one of these is special.

    It compares types, dispatch keys, dtypes, devices, sizes, strides, whether they require a gradient, and which of
    them are the same tensor. In Python that would take ten times as long.
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


class KnownCalls(Generic[Value]):
    """A cache of what served a call, found again by eager calls that are like it in all but memory.

    "Like it": the same key, tensors alike (`likeness`) and, with float32, the same precision of torch's products.
    """

    __slots__ = ("_aligned", "_cache", "_is_plan", "_most_alike")

    def __init__(self, most_alike: int = 8, *, aligned: int | None = None, is_plan: bool = True) -> None:
        """most_alike: entries per key. Beyond that, the strides become part of the key.

        is_plan: the values are plans. They serve calls without gradients, whose first `aligned` tensors (None: all)
        are aligned to 16 bytes.
        """
        self._is_plan, self._aligned = is_plan, aligned if is_plan else 0
        self._cache: Cache[list[tuple[Callable[..., bool], bool, str, Value]]] = Cache(4096)
        self._most_alike = most_alike

    def find(self, key: Hashable, tensors: Sequence[Tensor]) -> Value | None:
        """Return what served a call like this one; None where it is not known, or must go through the dispatcher.

        The caller checks for torch function modes (`is_intercepted`) and for a tracer, before it reads sizes.
        """
        # The guards do not check for the modes of fake and proxy tensors.
        if is_compiling() or _dispatch_modes() or forward_ad._current_level >= 0:
            return None
        try:
            found = self._cache.get(key, ())
        except TypeError:  # sizes that are symbols, or an argument that cannot be hashed
            return None
        for is_like, is_trained, precision, value in found:
            if precision and precision != fp32_precision("cuda", "matmul"):
                continue
            if is_like(*tensors) and not (is_trained and torch.is_grad_enabled()):
                for each in tensors[: self._aligned]:
                    if each.data_ptr() & 15:
                        return None
                return value
        if len(found) < self._most_alike:
            return None
        try:
            key = _with_strides(key, tensors)
        except (AttributeError, RuntimeError):  # no tensors, or without strides
            return None
        return self.find(key, tensors)

    def is_aligned(self, tensors: Sequence[Tensor]) -> bool:
        """Whether calls with such tensors can be known."""
        return not any(each.data_ptr() & 15 for each in tensors[: self._aligned])

    def clear(self) -> None:
        self._cache.clear()

    def keep(self, key: Hashable, tensors: Sequence[Tensor], value: Value) -> None:
        """Remember what served this call, if its tensors are plain."""
        try:
            alike = self._cache.get(key)
        except TypeError:  # not to be hashed
            return
        is_like = likeness(tensors) if _HAS_FAST_PATH and self.is_aligned(tensors) else None
        if is_like is None:
            return
        if alike is not None and len(alike) >= self._most_alike:
            # Views of many layouts, such as the last token of sequences of many lengths.
            key = _with_strides(key, tensors)
            alike = self._cache.get(key)
        alike = self._cache.keep(key, []) if alike is None else alike
        del alike[: max(0, len(alike) + 1 - self._most_alike)]  # the oldest
        is_trained = self._is_plan and any(each.requires_grad for each in tensors)
        reads_setting = torch.float32 in (autocast_dtype(tensors[0]), *[each.dtype for each in tensors])
        alike.append((is_like, is_trained, fp32_precision("cuda", "matmul") if reads_setting else "", value))


def _with_strides(key: Hashable, tensors: Sequence[Tensor]) -> Hashable:
    return key, *[each.stride() for each in tensors]


def _first_places(tensors: Sequence[object]) -> list[int]:
    """For each object, the index where it occurs first."""
    ids = list(map(id, tensors))
    return [ids.index(each) for each in ids]


def in_transform(*tensors: Tensor) -> bool:
    """Whether a call is inside forward-mode AD, vmap or another transform, where custom operators have no rule."""
    return (
        forward_ad_level() >= 0
        or (_interpreter is not None and _interpreter() is not None)
        or (_is_batched is not None and any(map(_is_batched, tensors)))
    )


def refuse_transforms(name: str, *tensors: Tensor) -> None:
    """Raise inside a transform: there is no rule for it, and a fallback would break the contract."""
    if not is_compiling() and in_transform(*tensors):
        raise RuntimeError(
            f"isogemm.{name} has no rule for forward-mode AD and torch.func transforms, and falls back to nothing: "
            "the contract would not hold"
        )


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast gives to matrix products on x's device; None where it is off."""
    kind = "cuda" if x.is_cuda else x.device.type  # x.device takes longer
    # Not is_autocast_available: torch 2.11 cannot trace it.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _any_special(tensors: Sequence[Tensor]) -> bool:
    """Whether one is a subclass, or has no memory that a kernel could read as it is."""
    try:
        for x in tensors:
            if type(x) not in PLAIN or x.is_neg() or x.is_nested or (not x.data_ptr() and x.numel()):
                return True
    except RuntimeError:  # sparse, or of a vmap, without an address
        return True
    return False


# Looked up once, since every call needs them.
NO_TENSOR = (None,)  # has_torch_function then checks for modes only
is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
_HAS_FAST_PATH = not private.is_off(private.FAST_PATH)
_TensorGuards = private.find("torch._C._dynamo.guards:TensorGuards")
# Without the fast path, pretend that there is one: then no call is known.
_dispatch_modes = private.find("torch._C:_len_torch_dispatch_stack") if _HAS_FAST_PATH else lambda: 1
_interpreter = private.find("torch._C:_functorch.peek_interpreter_stack")
_is_batched = private.find("torch._C:_functorch.is_legacy_batchedtensor")
