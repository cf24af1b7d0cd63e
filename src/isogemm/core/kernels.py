"""Helpers of the kernels of several families."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def arange(start: Any, end: Any, _semantic: Any = None) -> Any:
    """tl.arange that Gluon's kernels may call too, where the layout follows from what it is used with."""
    if _semantic is None:  # in the interpreter
        return tl.arange(start, end)
    if _is_gluon(_semantic):
        return _semantic.arange(tl.core._unwrap_if_constexpr(start), tl.core._unwrap_if_constexpr(end), None)
    return tl.arange(start, end, _semantic=_semantic)


def zeros(shape: Any, dtype: Any, _semantic: Any = None) -> Any:
    """tl.zeros, likewise."""
    if _semantic is None:
        return tl.zeros(shape, dtype)
    if _is_gluon(_semantic):
        sizes = [tl.core._unwrap_if_constexpr(size) for size in shape]
        return _semantic.full(sizes, 0, tl.core._unwrap_if_constexpr(dtype), None)
    return tl.full(shape, 0, dtype, _semantic=_semantic)


def _is_gluon(semantic: Any) -> bool:
    return type(semantic).__module__.startswith("triton.experimental.gluon")


for _builtin in (arange, zeros):
    setattr(_builtin, tl.core.TRITON_BUILTIN, True)  # so that kernels call it at compile time


@triton.jit
def round_to_tf32(x):
    """Round float32 to TF32, to nearest, ties to even, as TMA does.

    The tensor core would truncate, and turn some NaNs into infinities.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, float("nan"))


@triton.jit
def start_launch(PDL: tl.constexpr):
    """Wait for the previous launch and let the next one start early (programmatic dependent launch).

    A kernel that is launched with `pdl_option` calls it before it reads or writes memory.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


def pdl_option(pdl: bool) -> dict[str, object]:
    """Launch option of a kernel that may start before the previous launch ends."""
    return {"launch_pdl": True} if pdl else {}
