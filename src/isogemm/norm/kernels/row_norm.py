"""RMS norm and layer norm of rows, forward and backward, and the sums over rows for weight and bias.

A tile is [RB, Q, C]: RB counts blocks of Q * C columns, B to a row, and a warp holds whole blocks, so that only the sum
of a row's blocks passes between warps. Sums are by halves, so their order depends on the row's width and dtype alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from isogemm.core.launch import Launch
from isogemm.norm.configs import LONG_COLUMNS, SUM_ROWS, BackwardConfig, NormConfig
from isogemm.norm.kernels.sums import block_columns, block_offsets, sum_by_halves

_VECTOR = tl.constexpr(8)  # columns that are added first; a thread of a 16-bit row holds as many
_SUM_ROWS = tl.constexpr(SUM_ROWS)
_SUMMED_COLUMNS = 32
_SUMS_IN_FLIGHT = 12
_LONG_ROWS, _LONG_BLOCK = 4, 512  # tile of a long row's backward


@triton.jit
def _row_sum(x, R: tl.constexpr, B: tl.constexpr):
    """Sum each row of x [R * B, Q, C]; every block of a row gets the row's sum: [R * B, 1, 1]."""
    C: tl.constexpr = x.shape[2]
    V: tl.constexpr = _VECTOR if C >= _VECTOR else C
    x = tl.reshape(sum_by_halves(x, 1), (R * B, C // V, V))
    x = sum_by_halves(sum_by_halves(x, 2), 1)
    if B > 1:
        x = tl.broadcast_to(sum_by_halves(tl.reshape(x, (R, B)), 1), (R, B))
    return tl.reshape(x, (R * B, 1, 1))


@triton.jit
def _row(R: tl.constexpr, B: tl.constexpr):
    """Row of each block of a tile [RB, 1, 1]."""
    return (tl.arange(0, R * B) // B)[:, None, None]


@triton.jit
def _load(at, live):
    return tl.load(at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _load_sum(x_ptr, residual_ptr, at, live):
    """x + residual, rounded to x's dtype."""
    x = _load(x_ptr + at, live)
    if residual_ptr is not None:
        x = (x + _load(residual_ptr + at, live)).to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, summed_ptr, statistics_ptr, rows, eps, offset,
    D: tl.constexpr, CENTRED: tl.constexpr, R: tl.constexpr, B: tl.constexpr, Q: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """out = norm(x + residual) * (offset + weight) + bias; summed = x + residual, rounded before it is normalised.

    statistics [1 or 2, rows]: 1 / deviation and, where CENTRED, the mean.
    """
    first = tl.program_id(0).to(tl.int64) * R
    row, column = _row(R, B), block_columns(B, R * B, Q, C)
    row_lives, column_lives = row < rows - first, column < D
    begin, at, live = first * D, block_offsets(row, D, column), row_lives & column_lives
    x = _load_sum(x_ptr, residual_ptr, begin + at, live)  # [RB, Q, C]
    if residual_ptr is not None:
        tl.store(summed_ptr + begin + at, x.to(summed_ptr.dtype.element_ty), mask=live)
    first_of_row = tl.arange(0, R * B)[:, None, None] % B == 0
    if CENTRED:
        mean = tl.div_rn(_row_sum(x, R, B), D * 1.0)
        x = tl.where(live, x - mean, 0.0)
        if statistics_ptr is not None:
            tl.store(statistics_ptr + rows + first + row, mean, mask=row_lives & first_of_row)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(_row_sum(x * x, R, B), D * 1.0) + eps))
    if statistics_ptr is not None:
        tl.store(statistics_ptr + first + row, inverse, mask=row_lives & first_of_row)
    y = x * inverse
    if weight_ptr is not None:
        y *= _load(weight_ptr + column, column_lives) + offset
    if bias_ptr is not None:
        y += _load(bias_ptr + column, column_lives)
    tl.store(out_ptr + begin + at, y.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def _long_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, summed_ptr, statistics_ptr, rows, eps, offset,
    D: tl.constexpr, CENTRED: tl.constexpr, R: tl.constexpr, B: tl.constexpr, Q: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`_norm_kernel` of a row in steps, which is read again for each pass over it."""
    row = tl.program_id(0).to(tl.int64)
    begin = row * D
    mean = 0.0
    if CENTRED:
        total = tl.zeros((B, 1, 1), dtype=tl.float32)
        for first in tl.range(0, D, B * Q * C):
            column = first + block_columns(B, B, Q, C)
            total += _row_sum(_load_sum(x_ptr, residual_ptr, begin + column, column < D), 1, B)
        mean = tl.div_rn(total, D * 1.0)
    total = tl.zeros((B, 1, 1), dtype=tl.float32)
    for first in tl.range(0, D, B * Q * C):
        column = first + block_columns(B, B, Q, C)
        x = _load_sum(x_ptr, residual_ptr, begin + column, column < D)
        x = tl.where(column < D, x - mean, 0.0)
        total += _row_sum(x * x, 1, B)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(total, D * 1.0) + eps))
    if statistics_ptr is not None:
        is_first = tl.arange(0, B)[:, None, None] == 0
        place = row + tl.zeros((B, 1, 1), dtype=tl.int64)
        tl.store(statistics_ptr + place, inverse, mask=is_first)
        if CENTRED:
            tl.store(statistics_ptr + rows + place, mean, mask=is_first)
    for first in tl.range(0, D, B * Q * C):
        column = first + block_columns(B, B, Q, C)
        live = column < D
        x = _load_sum(x_ptr, residual_ptr, begin + column, live)
        if residual_ptr is not None:
            tl.store(summed_ptr + begin + column, x.to(summed_ptr.dtype.element_ty), mask=live)
        y = (x - mean) * inverse
        if weight_ptr is not None:
            y *= _load(weight_ptr + column, live) + offset
        if bias_ptr is not None:
            y += _load(bias_ptr + column, live)
        tl.store(out_ptr + begin + column, y.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def _coefficients_kernel(
    grad_ptr, x_ptr, weight_ptr, statistics_ptr, coefficients_ptr, rows, offset,
    D: tl.constexpr, CENTRED: tl.constexpr, B: tl.constexpr, Q: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """coefficients [1 or 2, rows] of long rows: the means of dy * y and, where CENTRED, of dy."""
    row = tl.program_id(0).to(tl.int64)
    inverse = tl.load(statistics_ptr + row)
    mean = 0.0
    if CENTRED:
        mean = tl.load(statistics_ptr + rows + row)
    along = tl.zeros((B, 1, 1), dtype=tl.float32)
    total = tl.zeros((B, 1, 1), dtype=tl.float32)
    for first in tl.range(0, D, B * Q * C):
        column = first + block_columns(B, B, Q, C)
        live = column < D
        y = tl.where(live, (_load(x_ptr + row * D + column, live) - mean) * inverse, 0.0)
        dy = _load(grad_ptr + row * D + column, live)
        if weight_ptr is not None:
            dy *= _load(weight_ptr + column, live) + offset
        along += _row_sum(dy * y, 1, B)
        if CENTRED:
            total += _row_sum(dy, 1, B)
    is_first = tl.arange(0, B)[:, None, None] == 0
    place = row + tl.zeros((B, 1, 1), dtype=tl.int64)
    tl.store(coefficients_ptr + place, tl.div_rn(along, D * 1.0), mask=is_first)
    if CENTRED:
        tl.store(coefficients_ptr + rows + place, tl.div_rn(total, D * 1.0), mask=is_first)


@triton.jit(do_not_specialize=["rows"])
def _long_norm_backward_kernel(
    grad_ptr, grad_summed_ptr, x_ptr, weight_ptr, statistics_ptr, coefficients_ptr, dx_ptr, weight_sums_ptr,
    bias_sums_ptr, rows, offset,
    D: tl.constexpr, CENTRED: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`_norm_backward_kernel` of BLOCK long rows in BN of their columns, given the rows' coefficients."""
    ACROSS: tl.constexpr = (D + BN - 1) // BN
    block = (tl.program_id(0) // ACROSS).to(tl.int64)
    column = tl.program_id(0) % ACROSS * BN + tl.arange(0, BN)
    of_weight = tl.zeros((R, BN), dtype=tl.float32)
    of_bias = tl.zeros((R, BN), dtype=tl.float32)
    if weight_ptr is not None:
        weight = _load(weight_ptr + column, column < D)[None, :] + offset
    for step in tl.range(0, BLOCK // R, num_stages=STAGES):
        row = block * BLOCK + step * R + tl.arange(0, R)
        row_lives = row < rows
        live = row_lives[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        x = _load(x_ptr + at, live)
        grad = _load(grad_ptr + at, live)
        inverse = _load(statistics_ptr + row, row_lives)[:, None]
        along = _load(coefficients_ptr + row, row_lives)[:, None]
        if CENTRED:
            x = tl.where(live, x - _load(statistics_ptr + rows + row, row_lives)[:, None], 0.0)
        y = x * inverse
        dy = grad
        if weight_ptr is not None:
            dy = grad * weight
        if weight_sums_ptr is not None:
            of_weight += grad * y
        if bias_sums_ptr is not None:
            of_bias += grad
        dx = dy - y * along
        if CENTRED:
            dx -= _load(coefficients_ptr + rows + row, row_lives)[:, None]
        dx *= inverse
        if grad_summed_ptr is not None:
            dx += _load(grad_summed_ptr + at, live)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=live)
    if weight_sums_ptr is not None:
        tl.store(weight_sums_ptr + block * D + column, tl.reshape(sum_by_halves(of_weight, 0), (BN,)), mask=column < D)
    if bias_sums_ptr is not None:
        tl.store(bias_sums_ptr + block * D + column, tl.reshape(sum_by_halves(of_bias, 0), (BN,)), mask=column < D)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward_kernel(
    grad_ptr, grad_summed_ptr, x_ptr, weight_ptr, statistics_ptr, dx_ptr, weight_sums_ptr, bias_sums_ptr, rows, offset,
    D: tl.constexpr, CENTRED: tl.constexpr, R: tl.constexpr, B: tl.constexpr, Q: tl.constexpr, C: tl.constexpr,
    SUB: tl.constexpr, BLOCK: tl.constexpr, RELOAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of BLOCK rows (+ grad_summed), and their sums for weight and bias: sums of SUB rows, added in order."""
    program = tl.program_id(0).to(tl.int64)
    row, column = _row(R, B), block_columns(B, R * B, Q, C)
    column_lives = column < D
    at = block_offsets(row, D, column)
    of_weight = tl.zeros((R * B, Q, C), dtype=tl.float32)
    of_bias = tl.zeros((R * B, Q, C), dtype=tl.float32)
    if SUB < BLOCK:
        total_of_weight = tl.zeros((B, Q, C), dtype=tl.float32)
        total_of_bias = tl.zeros((B, Q, C), dtype=tl.float32)
    if weight_ptr is not None and not RELOAD:
        weight = _load(weight_ptr + column, column_lives) + offset
    for step in tl.range(0, BLOCK // R, num_stages=STAGES):
        first = program * BLOCK + step * R
        begin = first * D
        row_lives = row < rows - first
        live = row_lives & column_lives
        x = _load(x_ptr + begin + at, live)  # [RB, Q, C]
        grad = _load(grad_ptr + begin + at, live)
        inverse = _load(statistics_ptr + first + row, row_lives)
        if CENTRED:
            x = tl.where(live, x - _load(statistics_ptr + rows + first + row, row_lives), 0.0)
        y = x * inverse
        dy = grad
        if weight_ptr is not None:
            if RELOAD:
                weight = _load(weight_ptr + column, column_lives) + offset
            dy = grad * weight
        if weight_sums_ptr is not None:
            of_weight += grad * y
        if bias_sums_ptr is not None:
            of_bias += grad
        dx = dy - y * tl.div_rn(_row_sum(dy * y, R, B), D * 1.0)
        if CENTRED:
            dx -= tl.div_rn(_row_sum(dy, R, B), D * 1.0)
        dx *= inverse
        if grad_summed_ptr is not None:
            dx += _load(grad_summed_ptr + begin + at, live)
        tl.store(dx_ptr + begin + at, dx.to(dx_ptr.dtype.element_ty), mask=live)
        if SUB < BLOCK:
            if step % (SUB // R) == SUB // R - 1:
                if weight_sums_ptr is not None:
                    total_of_weight += _over_rows(of_weight, R, B)
                    of_weight = tl.zeros((R * B, Q, C), dtype=tl.float32)
                if bias_sums_ptr is not None:
                    total_of_bias += _over_rows(of_bias, R, B)
                    of_bias = tl.zeros((R * B, Q, C), dtype=tl.float32)
    if SUB == BLOCK:
        total_of_weight = _over_rows(of_weight, R, B)
        total_of_bias = _over_rows(of_bias, R, B)
    column = block_columns(B, B, Q, C)
    column_lives = column < D
    if weight_sums_ptr is not None:
        tl.store(weight_sums_ptr + program * D + column, total_of_weight, mask=column_lives)
    if bias_sums_ptr is not None:
        tl.store(bias_sums_ptr + program * D + column, total_of_bias, mask=column_lives)


@triton.jit
def _over_rows(x, R: tl.constexpr, B: tl.constexpr):
    """Sum x [R * B, Q, C] over its rows, by halves: [B, Q, C]."""
    if R == 1:
        return x
    else:
        Q: tl.constexpr = x.shape[1]
        C: tl.constexpr = x.shape[2]
        return tl.reshape(sum_by_halves(tl.reshape(x, (R, B * Q, C)), 0), (B, Q, C))


@triton.jit
def _add_sums(
    sums_ptr, out_ptr, count, stride, column, D: tl.constexpr, SUBS: tl.constexpr, TOGETHER: tl.constexpr,
    ACCUMULATE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    BN: tl.constexpr = column.shape[0]
    live = column < D
    at = out_ptr + column.to(tl.int64) * stride
    total = tl.zeros((BN,), dtype=tl.float32)
    if ACCUMULATE:
        total = tl.load(at, mask=live, other=0.0)
    block = tl.arange(0, TOGETHER)
    for first in tl.range(0, count, TOGETHER * SUBS, num_stages=STAGES):
        chunk = tl.zeros((TOGETHER, BN), dtype=tl.float32)
        for sub in tl.static_range(SUBS):
            which = (first + block * SUBS + sub)[:, None]
            here = sums_ptr + which.to(tl.int64) * D + column[None, :]
            chunk += tl.load(here, mask=(which < count) & live[None, :], other=0.0)
        total += tl.reshape(sum_by_halves(chunk, 0), (BN,))
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["count"])
def _weight_sums_kernel(
    sums_ptr, out_ptr, other_sums_ptr, other_out_ptr, count, stride, other_stride,
    D: tl.constexpr, SUBS: tl.constexpr, TOGETHER: tl.constexpr, ACCUMULATE: tl.constexpr,
    OTHER_ACCUMULATE: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out = (out or 0) + chunk + chunk + ..., in order, where a chunk is TOGETHER sums of SUM_ROWS rows, by halves.

    sums [count, D]; SUBS of them, in order, make a sum of SUM_ROWS rows. The other pair, if there is one, likewise.
    """
    ACROSS: tl.constexpr = (D + BN - 1) // BN
    column = tl.program_id(0) % ACROSS * BN + tl.arange(0, BN)
    if tl.program_id(0) < ACROSS:
        _add_sums(sums_ptr, out_ptr, count, stride, column, D, SUBS, TOGETHER, ACCUMULATE, STAGES)
    elif other_sums_ptr is not None:
        _add_sums(
            other_sums_ptr, other_out_ptr, count, other_stride, column, D, SUBS, TOGETHER, OTHER_ACCUMULATE, STAGES
        )


def describe_norm(rows: int, d: int, kind: str, eps: float, offset: float, config: NormConfig) -> Launch:
    """Launch on x, residual, weight, bias; out, x + residual and the statistics."""
    kernel = _norm_kernel if d <= LONG_COLUMNS else _long_norm_kernel
    constants = _constants(d, kind, config)
    return Launch(kernel, -(-rows // config.rows), (rows, eps, offset), constants, _options(config))


def describe_norm_backward(rows: int, d: int, kind: str, offset: float, block: int, config: BackwardConfig) -> Launch:
    """Launch on grad, the gradient of x + residual, x, weight, statistics; dx and the sums for weight and bias.

    block: rows per sum. For rows up to LONG_COLUMNS.
    """
    constants = _constants(d, kind, config) | {
        "SUB": min(config.sub, block), "BLOCK": block, "RELOAD": config.reload_weight, "STAGES": config.num_stages,
    }  # fmt: skip
    return Launch(_norm_backward_kernel, -(-rows // block), (rows, offset), constants, _options(config))


def describe_coefficients(rows: int, d: int, kind: str, offset: float, config: NormConfig) -> Launch:
    """Launch on grad, x, weight, statistics; the coefficients of long rows."""
    constants = _constants(d, kind, config)
    del constants["R"]
    return Launch(_coefficients_kernel, rows, (rows, offset), constants, _options(config))


def describe_long_backward(rows: int, d: int, kind: str, offset: float) -> Launch:
    """`describe_norm_backward` of long rows, with the coefficients after the statistics; a sum is of SUM_ROWS rows."""
    constants: dict[str, object] = {
        "D": d, "CENTRED": kind == "layer_norm", "R": _LONG_ROWS, "BN": _LONG_BLOCK, "BLOCK": SUM_ROWS, "STAGES": 3,
    }  # fmt: skip
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
    programs = -(-rows // SUM_ROWS) * -(-d // _LONG_BLOCK)
    return Launch(_long_norm_backward_kernel, programs, (rows, offset), constants, options)


def describe_weight_sums(
    count: int, d: int, subs: int, together: int, strides: Sequence[int], accumulate: Sequence[bool]
) -> Launch:
    """Launch on one or two pairs of sums [count, d] and their total; None and None for the second where there is one.

    subs: sums in a block of rows. together: blocks in a chunk. strides, accumulate: of each total.
    """
    pairs = len(strides)
    constants: dict[str, object] = {
        "D": d, "SUBS": subs, "TOGETHER": together, "ACCUMULATE": accumulate[0],
        "OTHER_ACCUMULATE": accumulate[-1], "BN": _SUMMED_COLUMNS, "STAGES": _SUMS_IN_FLIGHT // subs,
    }  # fmt: skip
    options = {"num_warps": 1, "num_stages": 1, "enable_fp_fusion": False}
    scalars = (count, strides[0], strides[1] if pairs > 1 else None)
    return Launch(_weight_sums_kernel, pairs * -(-d // _SUMMED_COLUMNS), scalars, constants, options)


def _constants(d: int, kind: str, config: NormConfig) -> dict[str, object]:
    return {
        "D": d, "CENTRED": kind == "layer_norm", "R": config.rows, "B": config.blocks, "Q": config.across,
        "C": config.columns,
    }  # fmt: skip


def _options(config: NormConfig) -> dict[str, object]:
    return {"num_warps": config.num_warps, "num_stages": 1, "enable_fp_fusion": False}
