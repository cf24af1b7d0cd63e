"""Batch norm over rows [rows, D]: statistics of all rows, the normalised rows, the backward, the running statistics.

Every sum has a fixed order: tiles of TILE_ROWS rows, then groups of GROUP tiles if there are many, then all groups (or
tiles), in fp64. Rows beyond the last are not counted. Given the statistics, rows are independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl

from isogemm.core.kernels import pdl_option, start_launch
from isogemm.core.launch import Launch
from isogemm.epilogues import random
from isogemm.gemm.kernels.epilogue import is_kept
from isogemm.norm.configs import GROUP, GROUP_ROWS, TILE_ROWS, groups

_COLUMNS = 64  # per tile
_ELEMENTS = 2048  # per tile of the kernels whose rows are independent
_GROUP_COLUMNS = 32
_LAST_COLUMNS = 8  # one sector of memory
_AT_ONCE = 512  # tiles in flight
_TILE_ROWS = tl.constexpr(TILE_ROWS)


@triton.jit(do_not_specialize=["rows"])
def _moments_kernel(
    x_ptr, moments, rows,
    D: tl.constexpr, INDEX: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # moments [tiles, 3, D]: mean, its rounding error, sum of squared deviations. The rounding error is the mean of the
    # deviations from the rounded mean.
    start_launch(PDL)
    tile, _, col, live, at = _place(rows, D, INDEX, BM, BC)
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)  # [BM, BC]
    count = tl.minimum(rows - tile * BM, BM).to(tl.float32)
    mean = tl.div_rn(tl.sum(x, axis=0), count)
    x = tl.where(live, x - mean[None, :], 0.0)
    rest = tl.div_rn(tl.sum(x, axis=0), count)
    to = moments + (tile.to(tl.int64) * (3 * D) + col)
    tl.store(to, mean, mask=col < D)
    tl.store(to + D, rest, mask=col < D)
    tl.store(to + 2 * D, tl.sum(x * x, axis=0) - count * rest * rest, mask=col < D)


@triton.jit
def _vector(at, col, live):
    """Load a vector as fp32 [1, BC]."""
    return tl.load(at + col, mask=live, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _place(rows, D, INDEX, BM, BC):
    """A program's tile, its rows [BM, 1] and columns [BC], which elements exist, and their offsets [BM, BC]."""
    ACROSS: tl.constexpr = (D + BC - 1) // BC
    tile = tl.program_id(0) // ACROSS
    row = tile * BM + tl.arange(0, BM)[:, None]
    col = tl.program_id(0) % ACROSS * BC + tl.arange(0, BC)
    live = row < rows
    if D % BC != 0:
        live = live & (col < D)[None, :]
    return tile, row, col, live, row.to(INDEX) * D + col[None, :]


@triton.jit
def _combined(moments, first, end, col, rows, D, HEIGHT, BT, BC):
    """Mean and sum of squared deviations [1, BC], in fp64, of parts first .. end - 1, which have HEIGHT rows each."""
    sums = tl.zeros((BT, BC), tl.float64)
    squares = tl.zeros((BT, BC), tl.float64)
    for start in tl.range(first, end, BT):
        part = (start + tl.arange(0, BT)).to(tl.int64)[:, None]
        live = part < end
        if D % BC != 0:
            live = live & (col < D)[None, :]
        at = moments + (part * (3 * D) + col[None, :])
        mean = tl.load(at, mask=live, other=0.0)
        rest = tl.load(at + D, mask=live, other=0.0)
        within = tl.load(at + 2 * D, mask=live, other=0.0)
        mean = mean.to(tl.float64) + rest.to(tl.float64)
        of_part = tl.minimum(rows - part * HEIGHT, HEIGHT).to(tl.float64) * mean
        sums += of_part
        squares += within.to(tl.float64) + of_part * mean
    count = tl.minimum(rows - first.to(tl.int64) * HEIGHT, (end - first).to(tl.int64) * HEIGHT).to(tl.float64)
    total = tl.sum(sums, axis=0, keep_dims=True)
    mean = total / count
    squares = tl.sum(squares, axis=0, keep_dims=True) - total * mean
    return mean, tl.maximum(squares, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _group(rows, D, GROUP, BC):
    """A program's group, its tiles first .. end - 1, and its columns [BC]."""
    ACROSS: tl.constexpr = (D + BC - 1) // BC
    group = tl.program_id(0) // ACROSS
    first = group * GROUP
    return group, first, tl.minimum(first + GROUP, tl.cdiv(rows, _TILE_ROWS)), _columns(D, BC)


@triton.jit
def _columns(D, BC):
    return tl.program_id(0) % ((D + BC - 1) // BC) * BC + tl.arange(0, BC)


@triton.jit(do_not_specialize=["rows"])
def _group_moments_kernel(
    moments, groups, rows,
    D: tl.constexpr, GROUP: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # From the tiles' moments to those of groups of tiles [groups, 3, D].
    start_launch(PDL)
    group, first, end, col = _group(rows, D, GROUP, BC)
    mean, squares = _combined(moments, first, end, col, rows, D, _TILE_ROWS, GROUP, BC)
    to = groups + (group.to(tl.int64) * (3 * D) + col)[None, :]
    tl.store(to, mean.to(tl.float32), mask=(col < D)[None, :])
    tl.store(to + D, (mean - mean.to(tl.float32).to(tl.float64)).to(tl.float32), mask=(col < D)[None, :])
    tl.store(to + 2 * D, squares.to(tl.float32), mask=(col < D)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _statistics_kernel(
    moments, running_mean, running_var, weight, statistics, rows, eps,
    D: tl.constexpr, HEIGHT: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # statistics [4, D]: mean, 1 / deviation, that times weight (None: 1), unbiased variance. They come from moments of
    # HEIGHT rows each, or where moments is None from the running statistics.
    start_launch(PDL)
    col = _columns(D, BC)
    live = (col < D)[None, :]
    if moments is not None:
        parts = tl.cdiv(rows, HEIGHT)
        mean, squares = _combined(moments, parts * 0, parts, col, rows, D, HEIGHT, BT, BC)
        count = rows.to(tl.float64)
        var = squares / count
        unbiased = squares / (count - 1.0)
    else:
        mean = tl.load(running_mean + col[None, :], mask=live, other=0.0).to(tl.float64)
        var = tl.load(running_var + col[None, :], mask=live, other=0.0).to(tl.float64)
        unbiased = var
    inverse = 1.0 / tl.sqrt(var + eps)
    scale = inverse
    if weight is not None:
        scale *= tl.load(weight + col[None, :], mask=live, other=0.0).to(tl.float64)
    to = statistics + col[None, :]
    tl.store(to, mean.to(tl.float32), mask=live)
    tl.store(to + D, inverse.to(tl.float32), mask=live)
    tl.store(to + 2 * D, scale.to(tl.float32), mask=live)
    tl.store(to + 3 * D, unbiased.to(tl.float32), mask=live)


@triton.jit(do_not_specialize=["rows"])
def _normalise_kernel(
    x_ptr, statistics, bias, y_ptr, rows,
    D: tl.constexpr, INDEX: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_launch(PDL)
    _, _, col, live, at = _place(rows, D, INDEX, BM, BC)
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)  # [BM, BC]
    y = (x - _vector(statistics, col, col < D)) * _vector(statistics + 2 * D, col, col < D)
    if bias is not None:
        y += _vector(bias, col, col < D)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def _gradient_sums_kernel(
    grad_ptr, x_ptr, statistics, sums, rows,
    D: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, WHICH: tl.constexpr, INDEX: tl.constexpr,
    BM: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # sums [tiles * SLOTS, WIDTH, D]: in the first of a tile's slots, the sums of grad * xhat and of grad are rows WHICH
    # and WHICH + 1; in its other slots zeros.
    start_launch(PDL)
    tile, _, col, live, at = _place(rows, D, INDEX, BM, BC)
    grad = tl.load(grad_ptr + at, mask=live, other=0.0).to(tl.float32)  # [BM, BC]
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    xhat = (x - _vector(statistics, col, col < D)) * _vector(statistics + D, col, col < D)
    to = sums + (tile.to(tl.int64) * (SLOTS * WIDTH * D) + WHICH * D + col)
    tl.store(to, tl.sum(grad * xhat, axis=0), mask=col < D)
    tl.store(to + D, tl.sum(grad, axis=0), mask=col < D)
    for slot in tl.static_range(1, SLOTS):
        for i in tl.static_range(2):
            tl.store(to + (slot * WIDTH + i) * D, tl.zeros((BC,), tl.float32), mask=col < D)


@triton.jit
def _summed(sums, first, end, col, D, SLOTS, WIDTH, WHICH, BT, BC):
    """The two sums [1, BC] of parts first .. end - 1, in fp64."""
    of_product = tl.zeros((BT, BC), tl.float64)
    of_grad = tl.zeros((BT, BC), tl.float64)
    for start in tl.range(first, end, BT):
        part = (start + tl.arange(0, BT)).to(tl.int64)[:, None]
        live = part < end
        if D % BC != 0:
            live = live & (col < D)[None, :]
        at = sums + (part * (SLOTS * WIDTH * D) + (WHICH * D + col)[None, :])
        product = tl.load(at, mask=live, other=0.0)
        grad = tl.load(at + D, mask=live, other=0.0)
        of_product += product.to(tl.float64)
        of_grad += grad.to(tl.float64)
    return tl.sum(of_product, axis=0, keep_dims=True), tl.sum(of_grad, axis=0, keep_dims=True)


@triton.jit(do_not_specialize=["rows"])
def _group_sums_kernel(
    sums, groups, rows,
    D: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, WHICH: tl.constexpr, GROUP: tl.constexpr,
    BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # From the tiles' sums to those of groups of tiles [groups, 2, D].
    start_launch(PDL)
    group, first, end, col = _group(rows, D, GROUP, BC)
    of_product, of_grad = _summed(sums, first, end, col, D, SLOTS, WIDTH, WHICH, GROUP, BC)
    to = groups + (group.to(tl.int64) * (2 * D) + col)[None, :]
    tl.store(to, of_product.to(tl.float32), mask=(col < D)[None, :])
    tl.store(to + D, of_grad.to(tl.float32), mask=(col < D)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _coefficients_kernel(
    sums, statistics, coefficients, weight_grad, bias_grad, rows,
    D: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, WHICH: tl.constexpr, HEIGHT: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # coefficients [2, D]: the means over all rows of grad, and of grad * xhat times 1 / deviation. sums: of HEIGHT rows
    # each. coefficients and the gradients may be None.
    start_launch(PDL)
    col = _columns(D, BC)
    live = (col < D)[None, :]
    parts = tl.cdiv(rows, HEIGHT)
    of_product, of_grad = _summed(sums, parts * 0, parts, col, D, SLOTS, WIDTH, WHICH, BT, BC)
    if coefficients is not None:
        count = rows.to(tl.float64)
        inverse = tl.load(statistics + D + col[None, :], mask=live, other=0.0).to(tl.float64)
        tl.store(coefficients + col[None, :], (of_grad / count).to(tl.float32), mask=live)
        tl.store(coefficients + D + col[None, :], (inverse * of_product / count).to(tl.float32), mask=live)
    if weight_grad is not None:
        tl.store(weight_grad + col[None, :], of_product.to(weight_grad.dtype.element_ty), mask=live)
    if bias_grad is not None:
        tl.store(bias_grad + col[None, :], of_grad.to(bias_grad.dtype.element_ty), mask=live)


@triton.jit
def _dropped(x, seed, row, col, threshold, kept_scale, D, PLACE, BM, BC):
    first = tl.program_id(0) % ((D + BC - 1) // BC) * BC
    kept = is_kept(tl.load(seed) + PLACE, 0, first, row, col[None, :], threshold, BM, BC, False)
    return tl.where(kept, x * kept_scale, 0.0)


@triton.jit(do_not_specialize=["rows", "threshold"])
def _batch_norm_backward_kernel(
    grad_ptr, x_ptr, statistics, coefficients, residual_ptr, dx_ptr, dropped_ptr, seed, rows, threshold, kept_scale,
    D: tl.constexpr, PLACE: tl.constexpr, INDEX: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # dx = scale * (grad - c0 - (x - mean) * c1) + residual. Without coefficients, of running statistics, scale * grad +
    # residual: x is not read. dropped: dx after dropout at PLACE, a field of EncoderDropout's by number. coefficients,
    # residual, and dropped with seed may be None.
    start_launch(PDL)
    _, row, col, live, at = _place(rows, D, INDEX, BM, BC)
    dx = tl.load(grad_ptr + at, mask=live, other=0.0).to(tl.float32)  # [BM, BC]
    if coefficients is not None:
        x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
        along = (x - _vector(statistics, col, col < D)) * _vector(coefficients + D, col, col < D)
        dx = dx - _vector(coefficients, col, col < D) - along
    dx *= _vector(statistics + 2 * D, col, col < D)
    if residual_ptr is not None:
        dx += tl.load(residual_ptr + at, mask=live, other=0.0).to(tl.float32)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=live)
    if dropped_ptr is not None:
        dropped = _dropped(dx, seed, row, col, threshold, kept_scale, D, PLACE, BM, BC)
        tl.store(dropped_ptr + at, dropped.to(dropped_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows", "threshold"])
def _dropped_kernel(
    x_ptr, seed, out_ptr, rows, threshold, kept_scale,
    D: tl.constexpr, PLACE: tl.constexpr, INDEX: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_launch(PDL)
    _, row, col, live, at = _place(rows, D, INDEX, BM, BC)
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    dropped = _dropped(x, seed, row, col, threshold, kept_scale, D, PLACE, BM, BC)
    tl.store(out_ptr + at, dropped.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _move(running, new, factor, D, BLOCK):
    for first in tl.range(0, D, BLOCK):
        col = first + tl.arange(0, BLOCK)
        before = tl.load(running + col, mask=col < D, other=0.0).to(tl.float32)
        after = (1.0 - factor) * before + factor * tl.load(new + col, mask=col < D, other=0.0)
        tl.store(running + col, after.to(running.dtype.element_ty), mask=col < D)


@triton.jit
def _update_running(statistics, mean, var, batches, momentum, D, CUMULATIVE, BLOCK):
    """Update as torch does: a cumulative average without a count of batches stays as it is."""
    factor = momentum
    if batches is not None:
        count = tl.load(batches) + 1
        tl.debug_barrier()  # all threads have read it
        tl.store(batches, count)
        if CUMULATIVE:
            factor = tl.div_rn(1.0, count.to(tl.float32))
    if not CUMULATIVE or batches is not None:
        if mean is not None:
            _move(mean, statistics, factor, D, BLOCK)
        if var is not None:
            _move(var, statistics + 3 * D, factor, D, BLOCK)


@triton.jit
def _running_kernel(
    statistics0, mean0, var0, batches0, statistics1, mean1, var1, batches1, momentum0, momentum1,
    D: tl.constexpr, CUMULATIVE0: tl.constexpr, CUMULATIVE1: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # One norm, or two, a program each. Each of mean, var and batches may be None.
    start_launch(PDL)
    if tl.program_id(0) == 0:
        _update_running(statistics0, mean0, var0, batches0, momentum0, D, CUMULATIVE0, BLOCK)
    else:
        _update_running(statistics1, mean1, var1, batches1, momentum1, D, CUMULATIVE1, BLOCK)


def describe(
    name: str, rows: int, d: int, *, eps: float | None = None, p: float = 0.0, pdl: bool = False, **constants: int
) -> Launch:
    """Launch of the kernel `name` on rows [rows, d]; p: dropout's probability; constants: if not at their default."""
    kernel, division = _KERNELS[name]
    if not constants.keys() <= set(kernel.arg_names) or ("eps" in kernel.arg_names) != (eps is not None):
        raise TypeError(f"eps is {eps} and constants are {list(constants)}; {name} takes {kernel.arg_names}")
    programs, num_warps, sizes = division(rows, d)
    of_call = {"rows": rows, "eps": eps, "threshold": random.threshold(p), "kept_scale": random.scale(p)}
    known = {"D": d, "SLOTS": 1, "WIDTH": 2, "WHICH": 0, "PLACE": 0, "PDL": pdl} | sizes | constants
    scalars = tuple(of_call[scalar] for scalar in kernel.arg_names if scalar in of_call)
    picked = {constant: known[constant] for constant in kernel.arg_names if constant in known}
    return Launch(kernel, programs, scalars, picked, _options(num_warps, pdl))


def describe_running(d: int, momenta: Sequence[float | None], pdl: bool = False) -> Launch:
    """Launch on statistics, mean, var, batches, and the four of a second norm or None; momenta: of one or both."""
    first, second = momenta[0], momenta[-1]
    constants = {"D": d, "CUMULATIVE0": first is None, "CUMULATIVE1": second is None, "BLOCK": 128, "PDL": pdl}
    scalars = (first or 0.0, second or 0.0)
    return Launch(_running_kernel, len(momenta), scalars, constants, _options(1, pdl))


_Division = tuple[int, int, dict[str, object]]  # a launch's programs, their warps, and the constants that follow


def _by_tile(rows: int, d: int, height: int = TILE_ROWS) -> _Division:
    columns = min(_padded(d), _COLUMNS)
    sizes = {"INDEX": tl.int64 if (rows + height) * d >= 2**31 else tl.int32, "BM": height, "BC": columns}
    return -(-rows // height) * -(-d // columns), max(1, min(4, height * columns // 256)), sizes


def _by_rows(rows: int, d: int) -> _Division:
    """By tiles whose height does not matter: their rows are independent."""
    return _by_tile(rows, d, _ELEMENTS // min(_padded(d), _COLUMNS))


def _by_group(rows: int, d: int) -> _Division:
    return groups(rows) * -(-d // _GROUP_COLUMNS), 4, {"GROUP": GROUP, "BC": _GROUP_COLUMNS}


def _by_columns(rows: int, d: int) -> _Division:
    """A program combines all groups, or all tiles if there are no groups, of a few columns."""
    sizes = {"HEIGHT": GROUP_ROWS if groups(rows) else TILE_ROWS, "BT": _AT_ONCE, "BC": _LAST_COLUMNS}
    return -(-d // _LAST_COLUMNS), 16, sizes


_KERNELS: dict[str, tuple[Any, Callable[[int, int], _Division]]] = {
    "moments": (_moments_kernel, _by_tile),
    "group_moments": (_group_moments_kernel, _by_group),
    "statistics": (_statistics_kernel, _by_columns),
    "normalise": (_normalise_kernel, _by_rows),
    "gradient_sums": (_gradient_sums_kernel, _by_tile),
    "group_sums": (_group_sums_kernel, _by_group),
    "coefficients": (_coefficients_kernel, _by_columns),
    "batch_norm_backward": (_batch_norm_backward_kernel, _by_rows),
    "dropped": (_dropped_kernel, _by_rows),
}


def _padded(d: int) -> int:
    return 1 << (d - 1).bit_length()


def _options(num_warps: int, pdl: bool) -> dict[str, object]:
    return {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": False} | pdl_option(pdl)
