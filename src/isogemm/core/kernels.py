"""What the kernels of several families share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_to_tf32(x):
    """To nearest, ties to even, as the copy engine does.

    The tensor core would truncate, and make an infinity of some NaNs.
    """
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, float("nan"))
