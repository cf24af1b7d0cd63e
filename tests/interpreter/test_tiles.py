"""Which parts of which tiles a program computes: of balanced grids, in teams of any size."""

import itertools
import random

import pytest
import torch
import triton
import triton.language as tl

from isogemm.gemm.kernels.tiles import item_at, items_of

ROWS, COLUMNS, BLOCK = 16, 8, 16


@triton.jit
def _list_items(
    out, counts, m_tiles, n_tiles, K, MOST: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, BK: tl.constexpr,
    TEAM: tl.constexpr,
):  # fmt: skip
    count, share = items_of(m_tiles * n_tiles, K, BK, TEAM)
    tl.store(counts + tl.program_id(0), count)
    for index in tl.range(0, count):
        m, n, begin, end, before = item_at(
            index, share, m_tiles, n_tiles, m_tiles * TILE_M, n_tiles * TILE_N, K, TILE_M, TILE_N, BK, 0, 4, (1, 1),
            False, False, TEAM,
        )  # fmt: skip
        at = out + (tl.program_id(0) * MOST + index) * 5
        tl.store(at, m // TILE_M * n_tiles + n // TILE_N)
        tl.store(at + 1, begin)
        tl.store(at + 2, end)
        tl.store(at + 3, before)


def _items(programs, m_tiles, n_tiles, k, team):
    """(tile, begin, end, blocks before) of each item, for each program."""
    most = m_tiles * n_tiles + 2
    out, counts = torch.full((programs, most, 5), -1), torch.zeros(programs, dtype=torch.int64)
    _list_items[(programs,)](out, counts, m_tiles, n_tiles, k, most, ROWS, COLUMNS, BLOCK, team)
    return [
        [tuple(item[:4]) for item in found[:count]] for found, count in zip(out.tolist(), counts.tolist(), strict=True)
    ]


def _cases():
    drawn = random.Random(0)
    for team in (1, 2, 3, 4):
        for teams in (1, 2, 5):
            programs = team * teams
            for _ in range(4):
                m_tiles = drawn.randint(1, 6)
                n_tiles = -(-programs // m_tiles) + drawn.randint(0, 3)
                yield team, programs, m_tiles, n_tiles, drawn.choice([1, 7, 16, 40, 112, 200])


@pytest.mark.parametrize(("team", "programs", "m_tiles", "n_tiles", "k"), _cases())
def test_balanced_items_are_all_tiles(team, programs, m_tiles, n_tiles, k):
    """Each block of k once. A tile that a program leaves comes before its other divided ones, begins at 0 and is ended
    by the next team; the one that it ends comes last."""
    items = _items(programs, m_tiles, n_tiles, k, team)
    parts = {}
    for program, found in enumerate(items):
        done = 0
        for index, (tile, begin, end, before) in enumerate(found):
            assert before == done
            assert begin < end
            done += -(-(end - begin) // BLOCK)
            parts.setdefault(tile, []).append((begin, end, program))
            assert begin == 0 or index == len(found) - 1
        left = [index for index, (_, _, end, _) in enumerate(found) if end < k]
        assert len(left) <= 1
        for first in left:
            assert all((begin, end) == (0, k) for _, begin, end, _ in found[:first])
    assert set(parts) == set(range(m_tiles * n_tiles))
    for found in parts.values():
        found.sort()
        assert (found[0][0], found[-1][1], len(found) <= 2) == (0, k, True)
        for (_, end, first), (begin, _, second) in itertools.pairwise(found):
            assert (end, second) == (begin, first + team)
            assert end % BLOCK == 0


@pytest.mark.parametrize("programs", [1, 3, 7])
def test_other_items_are_whole_tiles(programs):
    items = _items(programs, 3, 5, 40, 0)
    assert sorted(tile for found in items for tile, *_ in found) == list(range(15))
    assert all(item[1:] == (0, 40, 3 * index) for found in items for index, item in enumerate(found))


def test_programs_have_about_as_much():
    """To a block of k, beside the last group's missing tiles."""
    for team, programs, m_tiles, n_tiles, k in ((1, 7, 5, 3, 200), (4, 8, 6, 5, 112), (2, 10, 4, 6, 400)):
        items = _items(programs, m_tiles, n_tiles, k, team)
        blocks = [sum(-(-(end - begin) // BLOCK) for _, begin, end, _ in found) for found in items]
        missing = -(m_tiles * n_tiles) % team
        assert max(blocks) - sorted(blocks)[missing] <= 1
