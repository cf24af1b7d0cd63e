"""Tiles of the norms' kernels. Pure: functions of a row's width and of the number of rows."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from isogemm.gemm.configs import BIAS_CHUNK, BIAS_ROWS

# Layer norm and RMS norm. The tile depends on the row's width and dtype alone.

SUM_ROWS = BIAS_ROWS  # rows per sum of a chunk in the gradients of weight and bias
LONG_COLUMNS = 16384  # of a row, which one program holds; longer ones are read again for each pass over them

_LANES = 32
_VECTOR_BYTES = 16  # of a thread's load
_TILE = 4096  # elements, of several short rows
_SUB = 16  # rows per sum of a block of SUM_ROWS, where rows are long
_FEW_PROGRAMS = 264  # two for each of an H200's SMs
_HELD_COLUMNS = 8192  # of a weight, which the backward keeps in registers
_TOTALLED_COLUMNS = 4096


@dataclass(frozen=True)
class NormConfig:
    """A program's tile: `rows` rows of `blocks` blocks, which are `across` x `columns` columns each.

    Of a row longer than that, the tile is a step.
    """

    rows: int
    blocks: int
    across: int
    columns: int
    num_warps: int


@dataclass(frozen=True)
class BackwardConfig(NormConfig):
    """The tile of the backward, which walks over blocks of rows and writes their sums."""

    sub: int  # rows of the smallest sum
    num_stages: int  # of the loads
    reload_weight: bool  # for each row, to save registers


@functools.cache
def choose(d: int, itemsize: int) -> NormConfig:
    """The tile of the forward: 32 elements per thread."""
    return NormConfig(*_tile(d, itemsize, 1024, _TILE))


@functools.cache
def choose_backward(d: int, itemsize: int) -> BackwardConfig:
    """The tile of the backward: 16 elements per thread."""
    rows, blocks, across, columns, warps = _tile(d, itemsize, 512, _TILE // 2)
    sub = _SUB if rows == 1 and d <= LONG_COLUMNS else SUM_ROWS
    # No pipeline for unaligned rows, which are copied element by element, and for long ones, which would not fit.
    size = d * itemsize
    stages = 1 if size % _VECTOR_BYTES or size > 32768 else 4 if size <= 8192 else 3 if size <= 16384 else 2
    return BackwardConfig(rows, blocks, across, columns, warps, sub, stages, d > _HELD_COLUMNS)


def _tile(d: int, itemsize: int, block: int, elements: int) -> tuple[int, int, int, int, int]:
    width = min(1 << max(d - 1, 0).bit_length(), LONG_COLUMNS)
    block = min(block, width)
    columns = min(block, _LANES * math.gcd(d, _VECTOR_BYTES // itemsize))
    rows = max(1, min(SUM_ROWS, elements // width))
    num_warps = max(1, rows * width // (elements // 4))
    return rows, width // block, block // columns, columns, num_warps


def sum_rows(rows: int, d: int, sub: int) -> int:
    """Rows per sum that the backward writes, SUM_ROWS or `sub`. Does not affect the result.

    Fewer where few programs would be busy, and for rows so long that their sums of SUM_ROWS would not fit in registers.
    """
    return SUM_ROWS if d <= _TOTALLED_COLUMNS and rows >= _FEW_PROGRAMS * SUM_ROWS else sub


# Softmax and log-softmax: a row's sums are over blocks of so many columns, then over blocks. `loss` has the same order.

SOFTMAX_BLOCK = 1024

_WHOLE_BLOCKS = 16  # of a row that one program holds
_STEP_BYTES = 32768  # of a step of a longer row
_LONG_BYTES = 163840  # of a row, from which on one program at a time keeps an SM's rows in the L2 cache


@dataclass(frozen=True)
class SoftmaxConfig:
    """A program's tile: `rows` rows of `blocks` blocks, which are `across` x `columns` columns each."""

    rows: int
    blocks: int
    across: int
    columns: int
    num_warps: int
    unit: int  # columns, which divide a row and are loaded together
    steps: int = 0  # of `blocks` blocks at most; 0: the tile holds whole rows
    num_stages: int = 1  # of the loads


@functools.cache
def choose_softmax(v: int, itemsize: int, operands: int = 1, shared_memory: int = 1 << 18) -> SoftmaxConfig:
    """The tile of rows of v columns, 32 elements per thread, of a kernel that reads so many operands.

    Does not affect the result.
    """
    width = 1 << max(v - 1, 0).bit_length()
    unit = math.gcd(v, _VECTOR_BYTES // itemsize)
    block = min(width, SOFTMAX_BLOCK)
    columns = min(block, _LANES * unit)
    blocks = width // block
    if blocks > _WHOLE_BLOCKS:
        step = _STEP_BYTES // (SOFTMAX_BLOCK * itemsize)
        if itemsize == 2 and v * itemsize > _LONG_BYTES and 2 * operands * _STEP_BYTES + 1024 < shared_memory:
            step *= 2
        stages = 2 if unit > 1 else 1
        return SoftmaxConfig(1, step, block // columns, columns, step, unit, blocks // step, stages)
    rows = max(1, _TILE // width)
    return SoftmaxConfig(rows, blocks, block // columns, columns, max(1, rows * width // 1024), unit)


# Embedding: tokens of a chunk in the gradient of the weight.

EMBEDDING_CHUNK = BIAS_CHUNK


# Batch norm: sums over tiles of TILE_ROWS rows, then over groups of tiles. Depends on the number of rows alone.

TILE_ROWS = 64
GROUP = 64  # tiles
GROUP_ROWS = GROUP * TILE_ROWS
_UNGROUPED = 2048  # tiles up to which one launch combines them as fast as two


def groups(rows: int) -> int:
    """Number of groups of tiles that are combined first; 0 where there are few tiles."""
    return -(-rows // GROUP_ROWS) if rows > _UNGROUPED * TILE_ROWS else 0
