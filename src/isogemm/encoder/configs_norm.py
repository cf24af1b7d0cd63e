"""Which tile the norm's kernels take. Pure; a function of the row's width alone, since the bits of a sum follow it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from isogemm.gemm.configs import BIAS_ROWS

ROWS = BIAS_ROWS  # of one sum in the gradients of weight and bias
MOST_COLUMNS = 65536  # of a row, which one program holds; past 8192 the backward spills registers

_TILE = 2048  # elements
_ELEMENTS = 16  # of a thread


@dataclass(frozen=True)
class NormConfig:
    """A program of the forward norms `rows` rows, one of the backward ROWS of them, `rows` at a time."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int = 1  # of the backward's loads; changes no bit


@functools.cache
def choose(d: int) -> NormConfig:
    if not 0 < d <= MOST_COLUMNS:
        raise ValueError(f"a row has {d} elements; the norm's kernels take 1 to {MOST_COLUMNS}")
    columns = 1 << (d - 1).bit_length()
    rows = max(1, min(ROWS, _TILE // columns))
    num_warps = max(1, min(32, rows * columns // (32 * _ELEMENTS)))
    # Rows that begin anywhere are copied an element at a time, and long ones would not fit.
    return NormConfig(rows, columns, num_warps, num_stages=3 if d % 8 == 0 and columns <= _TILE else 1)
