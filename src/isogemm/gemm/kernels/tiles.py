"""Where tiles are, which of them a program computes, and what a compiler may know of sizes and strides."""

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
    """Number of tiles that a program has to itself, and where its share of the others, which are those of the last two
    waves, begins and ends, in blocks of k. Each tile has `blocks` of these.

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


@triton.jit
def team_share(tiles, K, BK: tl.constexpr, TEAM: tl.constexpr):
    """`balanced_share` in teams, without the last group's tile where this program has none there."""
    blocks = tl.cdiv(K, BK)
    whole, begin, end = balanced_share(tiles, blocks, TEAM)
    last = whole * tl.num_programs(0) + (tl.cdiv(end, blocks) - 1) * TEAM + tl.program_id(0) % TEAM
    return whole, begin, tl.where(last < tiles, end, end - blocks)


@triton.jit
def items_of(items, K, BK: tl.constexpr, TEAM: tl.constexpr):
    """How many items a program has: tiles, chunks of them, or parts of them; and its `team_share`."""
    if TEAM:
        whole, begin, end = team_share(items, K, BK, TEAM)
        blocks = tl.cdiv(K, BK)
        return whole + tl.cdiv(end, blocks) - begin // blocks, (whole, begin, end)
    else:
        return tl.cdiv(items - tl.program_id(0), tl.num_programs(0)), (0, 0, 0)


@triton.jit
def item_at(
    index, share, m_tiles, n_tiles, M, N, K, TILE_M: tl.constexpr, TILE_N: tl.constexpr, BK: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, UNITS: tl.constexpr, INSIDE: tl.constexpr, PARALLEL: tl.constexpr,
    TEAM: tl.constexpr,
):  # fmt: skip
    """Where an item begins in the result, where its k begins and ends, and how many blocks of k the program's items
    before it have.

    TEAM: a program's share of the divided tiles is one range of their blocks of k, taken from its end. So the tile
    that it leaves to the next team comes first, and the one that the team before left to it comes last.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    blocks = tl.cdiv(K, BK)
    tile = program + index * programs
    before = index * blocks
    begin = 0
    end = K
    if TEAM:
        whole, share_begin, share_end = share
        if index >= whole:
            of_divided = tl.cdiv(share_end, blocks) - 1 - (index - whole)
            tile = whole * programs + of_divided * TEAM + program % TEAM
            last = tl.minimum(share_end, (of_divided + 1) * blocks)
            begin = tl.maximum(share_begin - of_divided * blocks, 0) * BK
            end = tl.minimum((last - of_divided * blocks) * BK, K)
            before = whole * blocks + share_end - last
    elif PARALLEL:
        places = m_tiles * n_tiles
        begin = tile // places * CHUNK
        tile = tile % places
        end = tl.minimum(begin + CHUNK, K)
        before = 0
    row, column = place(tile, m_tiles, n_tiles, GROUP)
    m = inside(row * TILE_M, M, TILE_M, UNITS[0], INSIDE)
    n = inside(column * TILE_N, N, TILE_N, UNITS[1], INSIDE)
    return m, n, begin, end, before
