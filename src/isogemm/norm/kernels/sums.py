"""Tiles of rows cut into blocks, and sums whose order does not depend on the tile's layout."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_by_halves(x, AXIS: tl.constexpr):
    """Sum x over an axis whose size is a power of two, keeping it with size 1: c and c + half first, repeatedly.

    x has one to three dimensions.
    """
    SIZE: tl.constexpr = x.shape[AXIS]
    if SIZE == 1:
        return x
    elif len(x.shape) == 1:
        return sum_by_halves(tl.sum(tl.reshape(x, (2, SIZE // 2)), axis=0), AXIS)
    elif len(x.shape) == 2:
        if AXIS == 0:
            return sum_by_halves(tl.sum(tl.reshape(x, (2, SIZE // 2, x.shape[1])), axis=0), AXIS)
        else:
            return sum_by_halves(tl.sum(tl.reshape(x, (x.shape[0], 2, SIZE // 2)), axis=1), AXIS)
    else:
        if AXIS == 0:
            return sum_by_halves(tl.sum(tl.reshape(x, (2, SIZE // 2, x.shape[1], x.shape[2])), axis=0), AXIS)
        elif AXIS == 1:
            return sum_by_halves(tl.sum(tl.reshape(x, (x.shape[0], 2, SIZE // 2, x.shape[2])), axis=1), AXIS)
        else:
            return sum_by_halves(tl.sum(tl.reshape(x, (x.shape[0], x.shape[1], 2, SIZE // 2)), axis=2), AXIS)


# Loads of tiles [RB, Q, C], in which a warp should hold whole blocks: their sums then need no other warp. The compiler
# gives warps to the axis with the most consecutive offsets after the last; which of two with one each depends on its
# version. So the first is said to have two. Only the last one's number decides a load's width.


@triton.jit
def block_columns(B: tl.constexpr, RB: tl.constexpr, Q: tl.constexpr, C: tl.constexpr):
    """Column of each element of a tile [RB, Q, C], whose rows have B blocks of Q * C columns each."""
    TWO: tl.constexpr = 2 if C > 2 else 1
    block = (tl.arange(0, RB) % B)[:, None, None]
    column = block * (Q * C) + tl.arange(0, Q)[None, :, None] * C + tl.arange(0, C)[None, None, :]
    return tl.max_contiguous(column, [TWO, 1, C])


@triton.jit
def block_offsets(row, D, column):
    """row * D + column [RB, Q, C]."""
    TWO: tl.constexpr = 2 if column.shape[2] > 2 else 1
    return tl.max_contiguous(row * D + column, [TWO, 1, column.shape[2]])
