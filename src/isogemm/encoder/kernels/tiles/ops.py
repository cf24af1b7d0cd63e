"""Tiles of rows and weights: loads, norms, dropout and products."""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.encoder.kernels.common import operand, scale_of_kept
from isogemm.gemm.kernels.epilogue import is_kept
from isogemm.gemm.kernels.halves import round_by_instruction
from isogemm.gemm.kernels.products import multiply


@triton.jit
def columns_of(ptr, D, DP):
    """A vector [D] as fp32 [1, DP], zeros beyond D."""
    col = tl.arange(0, DP)
    if DP == D:
        return tl.load(ptr + col).to(tl.float32)[None, :]
    else:
        return tl.load(ptr + col, mask=col < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def weight_tile(ptr, row, col, ROWS, COLS, BR, BC):
    """Rows row .. row + BR - 1 and columns col .. col + BC - 1 of a weight [ROWS, COLS], zeros beyond."""
    r = row + tl.arange(0, BR)
    c = col + tl.arange(0, BC)
    at = ptr + (r[:, None] * COLS + c[None, :])
    if ROWS % BR == 0:
        if COLS % BC == 0:
            return tl.load(at)
        else:
            return tl.load(at, mask=(c < COLS)[None, :], other=0.0)
    else:
        return tl.load(at, mask=(r < ROWS)[:, None] & (c < COLS)[None, :], other=0.0)


@triton.jit
def forward_weight(ptr, n, k, N, K, BN, BK, PACKED, OPERAND, PRECISION):
    """[BN, BK] of a weight W [N, K], or of what `pack_weights` made of it."""
    tile = weight_tile(ptr, n, k, N, K, BN, BK)
    if PACKED:
        return tile
    else:
        return operand(tile, OPERAND, PRECISION)


@triton.jit
def backward_weight(ptr, n, k, N, K, BN, BK, PACKED, OPERAND, PRECISION):
    """[BN, BK] of W^T for a weight W [K, N], or of its packed transpose."""
    if PACKED:
        return weight_tile(ptr, n, k, N, K, BN, BK)
    else:
        return operand(weight_tile(ptr, k, n, K, N, BK, BN), OPERAND, PRECISION).T


@triton.jit
def row_tile(ptr, row, rows, col, COLS, BM, BC, LD):
    """Rows row .. row + BM - 1 and columns col .. col + BC - 1 of [rows, COLS], rows LD apart, zeros beyond."""
    r = row + tl.arange(0, BM)
    c = col + tl.arange(0, BC)
    live = (r < rows)[:, None]
    if COLS % BC != 0:
        live = live & (c < COLS)[None, :]
    return tl.load(ptr + (r[:, None] * LD + c[None, :]), mask=live, other=0.0)


@triton.jit
def store_tile(ptr, value, row, rows, col, COLS, BM, BC, LD):
    r = row + tl.arange(0, BM)
    c = col + tl.arange(0, BC)
    live = (r < rows)[:, None]
    if COLS % BC != 0:
        live = live & (c < COLS)[None, :]
    tl.store(ptr + (r[:, None] * LD + c[None, :]), value.to(ptr.dtype.element_ty), mask=live)


@triton.jit
def store_heads(ptr, value, row, rows, col, D, HEAD, BM, BC):
    """Store a tile of [rows, D] to [D / HEAD, rows, HEAD]."""
    r = row + tl.arange(0, BM)
    c = col + tl.arange(0, BC)
    at = (c // HEAD * rows.to(row.dtype))[None, :] + r[:, None]
    live = (r < rows)[:, None] & (c < D)[None, :]
    tl.store(ptr + (at * HEAD + (c % HEAD)[None, :]), value.to(ptr.dtype.element_ty), mask=live)


@triton.jit
def statistics(x, eps, D, DP, NORM):
    """Each row's mean (0 for RMSNorm) and 1 / deviation, [BM, 1] each."""
    if NORM == "layer_norm":
        mean = tl.sum(x, axis=1, keep_dims=True) * (1.0 / D)
        x = x - mean
        if DP != D:
            x = tl.where((tl.arange(0, DP) < D)[None, :], x, 0.0)
    else:
        mean = tl.sum(x, axis=1, keep_dims=True) * 0.0
    return mean, 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1, keep_dims=True) * (1.0 / D) + eps)


@triton.jit
def scaled_and_shifted(xhat, g_ptr, b_ptr, D, DP):
    if g_ptr is not None:
        xhat = xhat * columns_of(g_ptr, D, DP)
    if b_ptr is not None:
        xhat = xhat + columns_of(b_ptr, D, DP)
    return xhat


@triton.jit
def normed(x, mean, deviation, g_ptr, b_ptr, D, DP, NORM):
    """The norm of rows x [BM, DP] with these statistics, zeros beyond D."""
    xhat = (x - mean) * deviation if NORM == "layer_norm" else x * deviation
    if DP != D:
        xhat = tl.where((tl.arange(0, DP) < D)[None, :], xhat, 0.0)
    return scaled_and_shifted(xhat, g_ptr, b_ptr, D, DP)


@triton.jit
def batch_normed(x, statistics_ptr, b_ptr, D, DP):
    """The batch norm of rows x [BM, DP], by the mean and the scale of its statistics [4, D]."""
    xhat = (x - columns_of(statistics_ptr, D, DP)) * columns_of(statistics_ptr + 2 * D, D, DP)
    return scaled_and_shifted(xhat, None, b_ptr, D, DP)


@triton.jit
def dropout(value, seed_ptr, PLACE, row, col, DROPPED, BM, BC):
    """Dropout of a tile [BM, BC] whose first element is (row, col)."""
    r = (row + tl.arange(0, BM)).to(tl.int32)[:, None]
    c = (col + tl.arange(0, BC))[None, :]
    kept = is_kept(tl.load(seed_ptr) + PLACE, row, col, r, c, DROPPED, BM, BC, False)
    return tl.where(kept, value * scale_of_kept(DROPPED), 0.0)


@triton.jit
def is_kept_transposed(seed_ptr, PLACE, row, col, DROPPED, BM, BC):
    """Mask of the elements that `dropout` keeps, as a tile [BC, BM]."""
    seed = tl.load(seed_ptr) + PLACE
    r = (row + tl.arange(0, BM)).to(tl.int32)[None, :]
    if BC < 32:
        c = (col + tl.arange(0, BC))[:, None]
        return is_kept(seed, row, col, r, c, DROPPED, BC, BM, True)
    else:  # one call for eight columns
        group = (col // 8 + tl.arange(0, BC // 8))[:, None]
        zero = tl.zeros((BC // 8, BM), dtype=tl.int32)
        w0, w1, w2, w3 = tl.philox(seed, group + zero, r + zero, zero, zero)
        low = tl.join(tl.join(w0 & 0xFFFF, w2 & 0xFFFF), tl.join(w1 & 0xFFFF, w3 & 0xFFFF))
        high = tl.join(tl.join(w0 >> 16, w2 >> 16), tl.join(w1 >> 16, w3 >> 16))
        kept = tl.join(low, high).to(tl.int32) >= DROPPED  # [groups, BM, 2, 2, half]: word 2 i + j
        kept = tl.reshape(kept.to(tl.int8), (BC // 32, 4, BM, 4, 2))
        return tl.reshape(tl.permute(kept, (0, 3, 1, 4, 2)), (BC, BM)) != 0


@triton.jit
def product(a, b, acc, PRECISION):
    """acc + a b, of operands."""
    return multiply(a, b, acc, PRECISION, True, True)


@triton.jit
def store_grad_operand(ptr, value, row, rows, col, ld, COLS, BM, BC, TRANSPOSED):
    """Store a tile [BC, BM] of the transpose of [rows, COLS], for the weights' gradients.

    TRANSPOSED: as it is, rounded to TF32, with rows ld apart."""
    if TRANSPOSED:
        r = row + tl.arange(0, BM)
        c = (col + tl.arange(0, BC)).to(r.dtype)
        live = (r < ld)[None, :]  # zeros beyond the last row
        if COLS % BC != 0:
            live = live & (c < COLS)[:, None]
        value = tl.where((r < rows)[None, :], round_by_instruction(value), 0.0)
        tl.store(ptr + (c[:, None] * ld + r[None, :]), value, mask=live)
    else:
        store_tile(ptr, value.T, row, rows, col, COLS, BM, BC, COLS)


@triton.jit
def projected(o_ptr, wo, bo, row, rows, D, DP, PACKED, OPERAND, PRECISION, BM, BK):
    """o Wo + bo, [BM, DP]."""
    acc = tl.zeros((DP, BM), tl.float32)
    for k in tl.range(0, D, BK):
        o = operand(row_tile(o_ptr, row, rows, k, D, BM, BK, D), OPERAND, PRECISION)
        acc = product(forward_weight(wo, 0, k, D, D, DP, BK, PACKED, OPERAND, PRECISION), o.T, acc, PRECISION)
    s = acc.T
    if bo is not None:
        s += columns_of(bo, D, DP)
    return s


@triton.jit
def attended(x_ptr, o_ptr, wo, bo, row, rows, D, DP, PACKED, OPERAND, PRECISION, BM, BK):
    """x + o Wo + bo, or x without o, [BM, DP]."""
    if o_ptr is None:
        return row_tile(x_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
    else:
        s = projected(o_ptr, wo, bo, row, rows, D, DP, PACKED, OPERAND, PRECISION, BM, BK)
        return s + row_tile(x_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)


@triton.jit
def hidden(u, w1, b1, f, F, D, DP, PACKED, OPERAND, PRECISION, BM, BF):
    """Rows f .. f + BF - 1 of W1 u + b1, of rows' columns u [DP, BM]."""
    w = forward_weight(w1, f, 0, F, D, BF, DP, PACKED, OPERAND, PRECISION)  # [BF, DP]
    z = product(w, u, tl.zeros((BF, BM), tl.float32), PRECISION)
    if b1 is not None:
        col = f + tl.arange(0, BF)
        z += tl.load(b1 + col, mask=col < F, other=0.0).to(tl.float32)[:, None]
    return z
