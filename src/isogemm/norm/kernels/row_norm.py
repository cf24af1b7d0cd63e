"""The norm of rows, forward and backward, for the composed path.

A row's sums are tl.sum's: their order follows the tile, the warps and the alignment, so all of these are functions of
the row's width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.launch import Launch
from isogemm.norm.configs import SUM_ROWS, NormConfig


@triton.jit
def _row_mean(x, D):
    """[rows, columns] -> [rows, 1]"""
    return tl.div_rn(tl.sum(x, axis=1), D * 1.0)[:, None]


@triton.jit
def _normed(x, live, eps, D, CENTRED):
    """x normalised, zero where not live; and 1 / deviation [rows, 1]."""
    if CENTRED:
        x = tl.where(live, x - _row_mean(x, D), 0.0)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(_row_mean(x * x, D) + eps))
    return tl.where(live, x * inverse, 0.0), inverse


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, eps,
    D: tl.constexpr, CENTRED: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BD)
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    live = (row < rows)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)  # [BR, BD]
    y, _ = _normed(x, live, eps, D, CENTRED)
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, dx_ptr, weight_sums_ptr, bias_sums_ptr, rows, eps,
    D: tl.constexpr, CENTRED: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # A program computes BLOCK rows and writes their sums.
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BD)
    of_weight = tl.zeros((BR, BD), dtype=tl.float32)
    of_bias = tl.zeros((BR, BD), dtype=tl.float32)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    for start in tl.range(0, BLOCK, BR, num_stages=STAGES):
        row = block * BLOCK + start + tl.arange(0, BR)
        live = (row < rows)[:, None] & (column < D)[None, :]
        at = row[:, None] * D + column[None, :]
        x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)  # [BR, BD]
        grad = tl.load(grad_ptr + at, mask=live, other=0.0).to(tl.float32)
        y, inverse = _normed(x, live, eps, D, CENTRED)
        dy = grad
        if weight_ptr is not None:
            dy *= weight
        dx = dy - y * _row_mean(dy * y, D)
        if CENTRED:
            dx -= _row_mean(dy, D)
        tl.store(dx_ptr + at, (dx * inverse).to(dx_ptr.dtype.element_ty), mask=live)
        if weight_sums_ptr is not None:
            of_weight += grad * y
        if bias_sums_ptr is not None:
            of_bias += grad
    if weight_sums_ptr is not None:
        tl.store(weight_sums_ptr + block * D + column, tl.sum(of_weight, axis=0), mask=column < D)
    if bias_sums_ptr is not None:
        tl.store(bias_sums_ptr + block * D + column, tl.sum(of_bias, axis=0), mask=column < D)


def describe_norm(rows: int, d: int, kind: str, eps: float, config: NormConfig) -> Launch:
    """Launch on x, weight, bias and out."""
    return Launch(_norm_kernel, -(-rows // config.rows), (rows, eps), _constants(d, kind, config), _options(config))


def describe_norm_backward(rows: int, d: int, kind: str, eps: float, config: NormConfig) -> Launch:
    """Launch on grad, x, weight; dx and the sums for weight and bias (out)."""
    constants = _constants(d, kind, config) | {"BLOCK": SUM_ROWS, "STAGES": config.num_stages}
    return Launch(_norm_backward_kernel, -(-rows // SUM_ROWS), (rows, eps), constants, _options(config))


def _constants(d: int, kind: str, config: NormConfig) -> dict[str, object]:
    return {"D": d, "CENTRED": kind == "layer_norm", "BR": config.rows, "BD": config.columns}


def _options(config: NormConfig) -> dict[str, object]:
    return {"num_warps": config.num_warps, "num_stages": 1, "enable_fp_fusion": False}
