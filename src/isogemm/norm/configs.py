"""Tiles of the norms' kernels. Pure: functions of a row's width and of the number of rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from isogemm.gemm.configs import BIAS_ROWS

# Layer norm and RMS norm. The tile depends on the row's width alone, because the order of a row's sums depends on it.

SUM_ROWS = BIAS_ROWS  # rows per partial sum in the gradients of weight and bias
MOST_COLUMNS = 65536  # of a row, which one program holds; above 8192 the backward spills registers

_TILE = 2048  # elements
_ELEMENTS = 16  # per thread


@dataclass(frozen=True)
class NormConfig:
    """A program normalises `rows` rows in the forward; in the backward SUM_ROWS of them, `rows` at a time."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int = 1  # of the backward's loads; does not affect the result


@functools.cache
def choose(d: int) -> NormConfig:
    if not 0 < d <= MOST_COLUMNS:
        raise ValueError(f"a row has {d} elements; the norm's kernels take 1 to {MOST_COLUMNS}")
    columns = 1 << (d - 1).bit_length()
    rows = max(1, min(SUM_ROWS, _TILE // columns))
    num_warps = max(1, min(32, rows * columns // (32 * _ELEMENTS)))
    # No pipeline for unaligned rows, which are copied element by element, and for long ones, which would not fit.
    return NormConfig(rows, columns, num_warps, num_stages=3 if d % 8 == 0 and columns <= _TILE else 1)


# Batch norm: sums over tiles of TILE_ROWS rows, then over groups of tiles. Depends on the number of rows alone.

TILE_ROWS = 64
GROUP = 64  # tiles
GROUP_ROWS = GROUP * TILE_ROWS
_UNGROUPED = 2048  # tiles up to which one launch combines them as fast as two


def groups(rows: int) -> int:
    """Number of groups of tiles that are combined first; 0 where there are few tiles."""
    return -(-rows // GROUP_ROWS) if rows > _UNGROUPED * TILE_ROWS else 0
