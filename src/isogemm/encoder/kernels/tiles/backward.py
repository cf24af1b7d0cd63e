"""The layer's backward around attention: feed-forward, input, and the parameters' gradients.

The row kernels are the forward's in reverse and recompute what it did not save. The parameters' gradients are sums over
rows, in chunks of whole sequences: each chunk in ascending order, then the chunks in ascending order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.kernels import start_launch
from isogemm.encoder.kernels.chunk_sums import add_tiles
from isogemm.encoder.kernels.common import ACTIVATION, OUTPUT, scale_of_kept
from isogemm.encoder.kernels.tiles import ops


@triton.jit
def _store_sum(norm_sums, slot, which: tl.constexpr, rows_of, D, DP):
    """Store the sum of a tile's rows to row `which` of its [6, D]."""
    col = tl.arange(0, DP)
    at = norm_sums + (slot.to(tl.int64) * (6 * D) + which * D + col)
    tl.store(at, tl.sum(rows_of, axis=0), mask=col < D)


@triton.jit
def _live_statistics(x, row, rows, eps, BM, D, DP, NORM):
    """`statistics`, with 0 for 1 / deviation beyond the last row: without eps it would be infinite."""
    mean, deviation = ops.statistics(x, eps, D, DP, NORM)
    return mean, tl.where((row + tl.arange(0, BM) < rows)[:, None], deviation, 0.0)


@triton.jit
def _first_slot(norm_sums, tile, SLOTS, first: tl.constexpr, end: tl.constexpr, D, DP):
    """First of the tile's SLOTS for sums, one slot per smallest tile; writes zeros to the others."""
    col = tl.arange(0, DP)
    for slot in tl.static_range(1, SLOTS):
        at = norm_sums + ((tile * SLOTS + slot).to(tl.int64) * (6 * D) + col)
        for which in tl.static_range(first, end):
            tl.store(at + which * D, tl.zeros((DP,), tl.float32), mask=col < D)
    return tile * SLOTS


@triton.jit
def _norm_backward(dn, x, mean, deviation, g_ptr, norm_sums, slot, which: tl.constexpr, D, DP, NORM):
    """The gradient of a norm's input x; stores the tile's sums for scale and shift to rows which, which + 1."""
    _store_sum(norm_sums, slot, which + 1, dn, D, DP)
    if NORM == "layer_norm":
        xhat = (x - mean) * deviation
        if DP != D:
            xhat = tl.where((tl.arange(0, DP) < D)[None, :], xhat, 0.0)
    else:
        xhat = x * deviation
    _store_sum(norm_sums, slot, which, dn * xhat, D, DP)
    if g_ptr is not None:
        dn = dn * ops.columns_of(g_ptr, D, DP)
    along = tl.sum(dn * xhat, axis=1, keep_dims=True) * (1.0 / D)
    if NORM == "layer_norm":
        dx = (dn - tl.sum(dn, axis=1, keep_dims=True) * (1.0 / D) - xhat * along) * deviation
        if DP != D:
            dx = tl.where((tl.arange(0, DP) < D)[None, :], dx, 0.0)
    else:
        dx = (dn - xhat * along) * deviation
    return dx


@triton.jit(do_not_specialize=["rows"])
def _feedforward_backward_kernel(
    x_ptr, o_ptr, wo, bo, w1, b1, w1_t, w2_t, norm_w, norm_b, last_w, dy_ptr, sum_ptr,
    u_ptr, act_ptr, dz_ptr, dlast_ptr, ds_ptr, norm_sums, dlast_t, seed_ptr, left_ptr, rows, eps, ld,
    D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, NORM: tl.constexpr, NORM_LAST: tl.constexpr,
    RESIDUAL_NORMED: tl.constexpr, HIDDEN_DROPPED: tl.constexpr, DROPPED: tl.constexpr,
    PACKED: tl.constexpr, TRANSPOSED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
    ACT: tl.constexpr, ACT_GRAD: tl.constexpr, EXACT: tl.constexpr, INDEX: tl.constexpr,
    BM: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_launch(PDL)
    tile = tl.program_id(0)
    row = (tile * BM).to(INDEX)
    slot = _first_slot(norm_sums, tile, SLOTS, 0 if NORM_LAST else 4 if NORM == "batch_norm" else 2, 5, D, DP)
    s = ops.attended(x_ptr, o_ptr, wo, bo, row, rows, D, DP, PACKED, OPERAND, PRECISION, BM, BK)
    if NORM == "batch_norm":
        u = ops.batch_normed(s, norm_w, norm_b, D, DP)
    else:
        mean, deviation = _live_statistics(s, row, rows, eps, BM, D, DP, NORM)
        if o_ptr is not None:
            ops.store_tile(ds_ptr, s, row, rows, 0, D, BM, DP, D)  # waits there for the norm's gradient
        u = ops.normed(s, mean, deviation, norm_w, norm_b, D, DP, NORM)
    ops.store_grad_operand(u_ptr, u.T, row, rows, 0, ld, D, BM, DP, TRANSPOSED)
    u = ops.operand(u, OPERAND, PRECISION).T
    dlast = ops.row_tile(dy_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
    if NORM_LAST:
        total = ops.row_tile(sum_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
        last_mean, last_deviation = _live_statistics(total, row, rows, eps, BM, D, DP, NORM)
        dlast = _norm_backward(dlast, total, last_mean, last_deviation, last_w, norm_sums, slot, 2, D, DP, NORM)
        ops.store_tile(dlast_ptr, dlast, row, rows, 0, D, BM, DP, D)
    if DROPPED > 0:
        dlast = ops.dropout(dlast, seed_ptr, OUTPUT, row, 0, DROPPED, BM, DP)
    if left_ptr is not None:
        ops.store_tile(left_ptr, dlast, row, rows, 0, D, BM, DP, D)
    _store_sum(norm_sums, slot, 4, dlast, D, DP)  # linear2's bias, before any rounding, as in torch
    if TRANSPOSED:
        ops.store_grad_operand(dlast_t, dlast.T, row, rows, 0, ld, D, BM, DP, True)
    dlast = ops.operand(dlast, OPERAND, PRECISION).T
    tl.debug_barrier()
    acc = tl.zeros((DP, BM), tl.float32)
    for f in tl.range(0, F, BF):
        z = ops.hidden(u, w1, b1, f, F, D, DP, PACKED, OPERAND, PRECISION, BM, BF)
        act = ACT(z, EXACT)
        if HIDDEN_DROPPED > 0:
            kept = ops.is_kept_transposed(seed_ptr, ACTIVATION, row, f, HIDDEN_DROPPED, BM, BF)
            keeping = tl.where(kept, scale_of_kept(HIDDEN_DROPPED), 0.0)
            act = act * keeping
        ops.store_grad_operand(act_ptr, act, row, rows, f, ld, F, BM, BF, TRANSPOSED)
        w = ops.backward_weight(w2_t, f, 0, F, D, BF, DP, PACKED, OPERAND, PRECISION)  # [BF, DP]
        dz = ops.product(w, dlast, tl.zeros((BF, BM), tl.float32), PRECISION) * ACT_GRAD(z, EXACT)
        if HIDDEN_DROPPED > 0:
            dz = dz * keeping
        ops.store_grad_operand(dz_ptr, dz, row, rows, f, ld, F, BM, BF, TRANSPOSED)
        w = ops.backward_weight(w1_t, 0, f, D, F, DP, BF, PACKED, OPERAND, PRECISION)  # [DP, BF]
        acc = ops.product(w, ops.operand(dz, OPERAND, PRECISION), acc, PRECISION)
    ds = acc.T
    if NORM_LAST:
        ds += ops.row_tile(dlast_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
    elif RESIDUAL_NORMED:
        ds += ops.row_tile(dy_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
    if NORM != "batch_norm":
        s = ops.row_tile(x_ptr if o_ptr is None else ds_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
        ds = _norm_backward(ds, s, mean, deviation, norm_w, norm_sums, slot, 0 if NORM_LAST else 2, D, DP, NORM)
        if not RESIDUAL_NORMED:
            ds += ops.row_tile(dy_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
    tl.debug_barrier()
    ops.store_tile(ds_ptr, ds, row, rows, 0, D, BM, DP, D)


@triton.jit(do_not_specialize=["rows"])
def _input_grad_kernel(
    x_ptr, norm_w, norm_b, in_proj_weight, dqkv_ptr, ds_ptr, n_ptr, dx_ptr, norm_sums, o_ptr, ds_operand, o_t,
    residual_ptr, rows, eps, ld,
    D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, PACKED: tl.constexpr,
    TRANSPOSED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr, BM: tl.constexpr,
    BK: tl.constexpr, SLOTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_launch(PDL)
    tile = tl.program_id(0)
    row = (tile * BM).to(INDEX)
    if NORM != "":
        slot = _first_slot(norm_sums, tile, SLOTS, 0, 2, D, DP)
    slot = _first_slot(norm_sums, tile, SLOTS, 5, 6, D, DP)
    ds = ops.row_tile(ds_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
    _store_sum(norm_sums, slot, 5, ds, D, DP)  # out_proj's bias, before any rounding
    if ds_operand is not None:
        ops.store_grad_operand(ds_operand, ds.T, row, rows, 0, ld, D, BM, DP, TRANSPOSED)
    if TRANSPOSED:
        o = ops.row_tile(o_ptr, row, rows, 0, D, BM, DP, D)
        ops.store_grad_operand(o_t, o.T, row, rows, 0, ld, D, BM, DP, True)
    n = ops.row_tile(x_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
    if NORM != "":
        mean, deviation = _live_statistics(n, row, rows, eps, BM, D, DP, NORM)
        n = ops.normed(n, mean, deviation, norm_w, norm_b, D, DP, NORM)
    if n_ptr is not None:
        ops.store_grad_operand(n_ptr, n.T, row, rows, 0, ld, D, BM, DP, TRANSPOSED)
    acc = tl.zeros((DP, BM), tl.float32)
    for k in tl.range(0, 3 * D, BK):
        if TRANSPOSED:
            r = row + tl.arange(0, BM)
            c = (k + tl.arange(0, BK)).to(INDEX)
            at = dqkv_ptr + (c[:, None] * ld + r[None, :])
            live = (r < ld)[None, :]
            if D % BK != 0:
                live = live & (c < 3 * D)[:, None]
            grad = tl.load(at, mask=live, other=0.0)
        else:
            grad = ops.operand(ops.row_tile(dqkv_ptr, row, rows, k, 3 * D, BM, BK, 3 * D), OPERAND, PRECISION).T
        w = ops.backward_weight(in_proj_weight, 0, k, D, 3 * D, DP, BK, PACKED, OPERAND, PRECISION)  # [DP, BK]
        acc = ops.product(w, grad, acc, PRECISION)
    dx = acc.T
    if residual_ptr is None:
        residual_ptr = ds_ptr
    if RESIDUAL == "through":
        dx += ops.row_tile(residual_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
    if NORM != "":
        x = ops.row_tile(x_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
        dx = _norm_backward(dx, x, mean, deviation, norm_w, norm_sums, slot, 0, D, DP, NORM)
    if RESIDUAL == "around":
        dx += ops.row_tile(residual_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
    ops.store_tile(dx_ptr, dx, row, rows, 0, D, BM, DP, D)


@triton.jit(do_not_specialize=["rows"])
def _weight_grads_kernel(
    left0, right0, left1, right1, norm_sums, partials, rows, ld, weight0, bias0, weight1, norms,
    M0: tl.constexpr, N0: tl.constexpr, M1: tl.constexpr, N1: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
    CHUNK: tl.constexpr, TILES: tl.constexpr, TILES_P: tl.constexpr, ADDED: tl.constexpr, TRANSPOSED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A program adds up one tile of left0^T right0 or left1^T right1 over one chunk of rows, and left0's columns. One
    # program per chunk adds up the sums that its TILES tiles left for the norms' and biases' gradients.
    start_launch(PDL)
    COLS0: tl.constexpr = (N0 + BN - 1) // BN
    COLS1: tl.constexpr = (N1 + BN - 1) // BN
    TILES0: tl.constexpr = (M0 + BM - 1) // BM * COLS0
    TILES1: tl.constexpr = (M1 + BM - 1) // BM * COLS1
    PER: tl.constexpr = TILES0 + TILES1 + 1
    program = tl.program_id(0)
    chunk = program // PER
    item = program % PER
    to = partials + chunk.to(tl.int64) * SIZE
    if item < TILES0:
        _chunk_product(
            left0, right0, to + weight0, to + bias0, chunk, item // COLS0 * BM, item % COLS0 * BN, rows, ld,
            M0, N0, CHUNK, TRANSPOSED, OPERAND, PRECISION, INDEX, True, BM, BN, BK,
        )  # fmt: skip
    elif item < TILES0 + TILES1:
        item -= TILES0
        _chunk_product(
            left1, right1, to + weight1, to, chunk, item // COLS1 * BM, item % COLS1 * BN, rows, ld,
            M1, N1, CHUNK, TRANSPOSED, OPERAND, PRECISION, INDEX, False, BM, BN, BK,
        )  # fmt: skip
    else:
        add_tiles(norm_sums, to + norms, chunk, rows, D, CHUNK, TILES, TILES_P, ADDED)


@triton.jit
def _chunk_product(
    left, right, weight, bias, chunk, m, n, rows, ld, M, N, CHUNK, TRANSPOSED, OPERAND, PRECISION, INDEX, SUMS, BM, BN,
    BK,
):  # fmt: skip
    """Add up a chunk's left^T right at (m, n), and left's columns; TRANSPOSED: from the transposes of both."""
    start = (chunk * CHUNK).to(INDEX)
    end = tl.minimum(start + CHUNK, rows)
    row = m + tl.arange(0, BM)
    col = n + tl.arange(0, BN)
    # wgmma reads `a` asynchronously, and Triton 3.6 refills its buffer too early if `a` is also read into registers. So
    # the tensor cores sum the columns, too: in two parts if `a` is rounded here.
    ASYNC: tl.constexpr = BM >= 64
    ones = tl.full((BK, 16), 1.0, OPERAND)
    acc = tl.zeros((BM, BN), tl.float32)
    if ASYNC:
        sums = tl.zeros((BM, 16), tl.float32)
    else:
        sums = tl.zeros((BM, BK), tl.float32)
    if TRANSPOSED:
        end = tl.minimum(start + CHUNK, ld)  # zeros beyond the last row
    for k in tl.range(start, end, BK):
        if TRANSPOSED:
            a = _transposed_tile(left, row.to(INDEX), k, end, ld, M, BM, BK)
            b = _transposed_tile(right, col.to(INDEX), k, end, ld, N, BN, BK).T
            exact = a
        else:
            exact = ops.row_tile(left, k, end, m, M, BK, BM, M).T
            a = ops.operand(exact, OPERAND, PRECISION)
            b = ops.operand(ops.row_tile(right, k, end, n, N, BK, BN, N), OPERAND, PRECISION)
        acc = ops.product(a, b, acc, PRECISION)
        if SUMS:
            if ASYNC:
                sums = ops.product(a, ones, sums, PRECISION)
                if PRECISION == "tf32" and not TRANSPOSED:
                    sums = ops.product(ops.operand(exact - a, OPERAND, PRECISION), ones, sums, PRECISION)
            else:
                sums += exact.to(tl.float32)
    tl.store(weight + (row[:, None] * N + col[None, :]), acc, mask=(row < M)[:, None] & (col < N)[None, :])
    if SUMS:
        if n == 0:
            if ASYNC:
                at = bias + row[:, None] + tl.zeros((1, 16), tl.int32)
                tl.store(at, sums, mask=(row < M)[:, None] & (tl.arange(0, 16) == 0)[None, :])
            else:
                tl.store(bias + row, tl.sum(sums, axis=1), mask=row < M)


@triton.jit
def _transposed_tile(ptr, col, k, end, ld, COLS, BC, BK):
    """[BC, BK] of a transpose: columns `col`, rows k .. k + BK - 1 of the matrix."""
    r = k + tl.arange(0, BK)
    live = (r < end)[None, :]
    if COLS % BC != 0:
        live = live & (col < COLS)[:, None]
    return tl.load(ptr + (col[:, None] * ld + r[None, :]), mask=live, other=0.0)


KERNELS = {
    "feedforward_backward": _feedforward_backward_kernel,
    "input_grad": _input_grad_kernel,
    "weight_grads": _weight_grads_kernel,
}
