"""Where tiles are, and what a compiler may know of sizes and strides."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiple(value, UNIT: tl.constexpr):
    """The same value, known to the compiler as a multiple of UNIT, for wide loads."""
    return value // UNIT * UNIT


@triton.jit
def multiples(row, col, ROW_UNIT: tl.constexpr, COL_UNIT: tl.constexpr, TMA: tl.constexpr):
    """The strides of a matrix as `multiple`; TMA has its own."""
    if TMA:
        return 0, 0
    else:
        return multiple(row, ROW_UNIT), multiple(col, COL_UNIT)


@triton.jit
def place(at, m_tiles, n_tiles, GROUP: tl.constexpr):
    """Row and column of the at-th tile: GROUP rows of tiles at a time, so that operands stay in the cache."""
    group = at // (GROUP * n_tiles)
    height = min(m_tiles - group * GROUP, GROUP)
    within = at % (GROUP * n_tiles)
    return group * GROUP + within % height, within // height


@triton.jit
def inside(begin, size, SIZE: tl.constexpr, UNIT: tl.constexpr, MOVED: tl.constexpr):
    """Where a tile of SIZE begins. The last one is moved back to end with the matrix: TMA takes up to 70 % longer for
    what is beyond. Some results are then computed and stored twice, with the same bits."""
    if MOVED:
        return multiple(max(min(begin, size - SIZE), 0), UNIT if SIZE % UNIT == 0 else 1)
    else:
        return begin


@triton.jit
def balanced_share(tiles, blocks, TEAM: tl.constexpr = 1):
    """Of tiles with `blocks` blocks of k each: how many tiles each program has to itself, and where its share of the
    others, which are those of the last two waves, begins and ends, in blocks.

    TEAM: so many programs take neighbouring tiles side by side, and tiles are counted in groups of so many.
    """
    team = tl.program_id(0) // TEAM
    teams = tl.num_programs(0) // TEAM
    groups = tl.cdiv(tiles, TEAM)
    whole = tl.maximum(groups // teams - 1, 0)
    divided = (groups - whole * teams) * blocks
    each = divided // teams
    left = divided % teams  # which team gets one more block
    begin = team * each + team * left // teams
    end = (team + 1) * each + (team + 1) * left // teams
    return whole, begin, end
