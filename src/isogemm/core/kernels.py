"""Helpers of the kernels of several families."""

from __future__ import annotations

import triton
import triton.language as tl


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
