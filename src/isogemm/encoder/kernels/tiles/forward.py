"""The forward by tiles: norm and projections; output projection, norm and feed-forward.

A program owns BM rows (tokens) and keeps them on the chip from one product to the next. Products are transposed,
weights [features, k] times rows [k, BM], so that both operands lie in shared memory. Rows are independent and the tile
depends on the layer's sizes alone, so a row's bits depend neither on its place nor on the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.kernels import start_launch
from isogemm.encoder.kernels.common import (
    ACTIVATION,
    OUTPUT,
    PROJECTION,
    in_proj,
    pack_weights,
    projected_at,
    scale_of_kept,
)
from isogemm.encoder.kernels.tiles import ops


@triton.jit
def _pack_tile(w, straight, transposed, r, c, first, ROWS, COLS, LD, SIDE, STRAIGHT, TRANSPOSE, OPERAND, PRECISION):
    tile = ops.operand(ops.weight_tile(w, r, c, ROWS, COLS, SIDE, SIDE), OPERAND, PRECISION)
    row = (r + tl.arange(0, SIDE))[:, None]
    col = (c + tl.arange(0, SIDE))[None, :]
    live = (row < ROWS) & (col < COLS)
    if STRAIGHT:
        tl.store(straight + (row * COLS + col), tile, mask=live)
    if TRANSPOSE:
        tl.store(transposed + (col * LD + (first + row)), tile, mask=live)


@triton.jit(do_not_specialize=["rows", "per_part"])
def _project_kernel(
    x_ptr, norm_w, norm_b, wq, wk, wv, bq, bk, bv, qkv_ptr, ds_ptr, wo, do_ptr, w1, w2, packed, v_ptr,
    rows, eps, per_part,
    D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, HEAD: tl.constexpr, BY_HEAD: tl.constexpr,
    NORM: tl.constexpr, STACKED: tl.constexpr, BIASES: tl.constexpr, FIRST: tl.constexpr, BACKWARD: tl.constexpr,
    PACKED: tl.constexpr, TRANSPOSE: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Programs keep one part of the weight, BN columns of q, k or v, and loop over rows. In the backward there is a
    # fourth part, do = ds Wo, and FIRST is 2 if q and k were returned. In a forward that reads packed weights, the last
    # programs pack them for the other launches.
    start_launch(PDL)
    PARTS: tl.constexpr = (4 if BACKWARD else 3) - FIRST
    BLOCKS: tl.constexpr = (D + BN - 1) // BN
    program = tl.program_id(0)
    part = FIRST + program % PARTS
    n = program // PARTS % BLOCKS * BN
    first = program // (PARTS * BLOCKS)
    tiles = (rows + BM - 1) // BM
    if first >= per_part:
        if PACKED and not BACKWARD:
            item = program - per_part * (PARTS * BLOCKS)
            pack_weights(
                item, wq, wk, wv, wo, w1, w2, packed, _pack_tile,
                D, F, SIDE, STACKED, True, TRANSPOSE, OPERAND, PRECISION,
            )  # fmt: skip
    elif part < 3:
        w_ptr = in_proj(wq, wk, wv, part, D * D, STACKED or (PACKED and BACKWARD))
        if PACKED and not BACKWARD:  # through its place among the packed weights: a loaded operand needs no registers
            w = ops.forward_weight(w_ptr, n, 0, D, D, BN, DP, False, OPERAND, PRECISION)
            w_ptr = packed + (D * D + 2 * D * F) + part * (D * D)
            ops.store_tile(w_ptr, w, n, D, 0, D, BN, DP, D)
            tl.debug_barrier()
        w = ops.forward_weight(w_ptr, n, 0, D, D, BN, DP, PACKED, OPERAND, PRECISION)  # [BN, DP]
        bias = tl.zeros((BN, 1), tl.float32)
        if BIASES:
            col = n + tl.arange(0, BN)
            b = in_proj(bq, bk, bv, part, D, STACKED)
            bias = tl.load(b + col, mask=col < D, other=0.0).to(tl.float32)[:, None]
        for tile in tl.range(first, tiles, per_part):
            row = tile * BM + tl.zeros((), INDEX)
            x = ops.row_tile(x_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
            if NORM != "":
                mean, deviation = ops.statistics(x, eps, D, DP, NORM)
                x = ops.normed(x, mean, deviation, norm_w, norm_b, D, DP, NORM)
            x = ops.operand(x, OPERAND, PRECISION)
            acc = ops.product(w, x.T, tl.zeros((BN, BM), tl.float32), PRECISION) + bias
            if BY_HEAD:
                to = projected_at(qkv_ptr, v_ptr, part, rows.to(INDEX) * D, FIRST)
                ops.store_heads(to, ops.operand(acc.T, OPERAND, PRECISION), row, rows, n, D, HEAD, BM, BN)
            else:
                ops.store_tile(qkv_ptr + part * D, acc.T, row, rows, n, D, BM, BN, 3 * D)
    elif BACKWARD:
        w = ops.backward_weight(wo, n, 0, D, D, BN, DP, PACKED, OPERAND, PRECISION)  # [BN, DP]
        for tile in tl.range(first, tiles, per_part):
            row = tile * BM + tl.zeros((), INDEX)
            ds = ops.operand(ops.row_tile(ds_ptr, row, rows, 0, D, BM, DP, D), OPERAND, PRECISION)
            acc = ops.product(w, ds.T, tl.zeros((BN, BM), tl.float32), PRECISION)
            if BY_HEAD:
                ops.store_heads(do_ptr, ops.operand(acc.T, OPERAND, PRECISION), row, rows, n, D, HEAD, BM, BN)
            else:
                ops.store_tile(do_ptr, acc.T, row, rows, n, D, BM, BN, D)


@triton.jit(do_not_specialize=["rows"])
def _out_project_kernel(
    x_ptr, o_ptr, wo, bo, norm_w, norm_b, seed_ptr, s_ptr, rows, eps,
    D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr, DROPPED: tl.constexpr, PACKED: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_launch(PDL)
    row = (tl.program_id(0) * BM).to(INDEX)
    s = ops.projected(o_ptr, wo, bo, row, rows, D, DP, PACKED, OPERAND, PRECISION, BM, BK)
    if DROPPED > 0:
        s = ops.dropout(s, seed_ptr, PROJECTION, row, 0, DROPPED, BM, DP)
    x = ops.row_tile(x_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
    if NORM != "":
        mean, deviation = ops.statistics(x, eps, D, DP, NORM)
        x = ops.normed(x, mean, deviation, norm_w, norm_b, D, DP, NORM)
    ops.store_tile(s_ptr, x + s, row, rows, 0, D, BM, DP, D)


@triton.jit
def activated(z, seed_ptr, row, f, ACT, EXACT, DROPPED, BM, BF):
    """dropout(act(z)) of features from f on, [BF, BM]."""
    value = ACT(z, EXACT)
    if DROPPED > 0:
        kept = ops.is_kept_transposed(seed_ptr, ACTIVATION, row, f, DROPPED, BM, BF)
        value = tl.where(kept, value * scale_of_kept(DROPPED), 0.0)
    return value


@triton.jit(do_not_specialize=["rows"])
def _feedforward_kernel(
    x_ptr, o_ptr, wo, bo, w1, b1, w2, b2, norm_w, norm_b, last_w, last_b, y_ptr, sum_ptr, seed_ptr, rows, eps,
    D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, NORM: tl.constexpr, NORM_LAST: tl.constexpr,
    RESIDUAL_NORMED: tl.constexpr, HIDDEN_DROPPED: tl.constexpr, DROPPED: tl.constexpr,
    PACKED: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, ACT: tl.constexpr, EXACT: tl.constexpr,
    INDEX: tl.constexpr, PARKED: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_launch(PDL)
    row = (tl.program_id(0) * BM).to(INDEX)
    s = ops.attended(x_ptr, o_ptr, wo, bo, row, rows, D, DP, PACKED, OPERAND, PRECISION, BM, BK)
    if NORM == "batch_norm":
        u = ops.batch_normed(s, norm_w, norm_b, D, DP)
    else:
        mean, deviation = ops.statistics(s, eps, D, DP, NORM)
        u = ops.normed(s, mean, deviation, norm_w, norm_b, D, DP, NORM)
    if RESIDUAL_NORMED:
        y = u
    else:
        y = s
    if DROPPED == 0:
        if b2 is not None:
            y += ops.columns_of(b2, D, DP)
    if PARKED:  # wait in y's own memory, to free registers
        ops.store_tile(y_ptr, y, row, rows, 0, D, BM, DP, D)
        tl.debug_barrier()
    u = ops.operand(u, OPERAND, PRECISION).T
    acc = tl.zeros((DP, BM), tl.float32)
    for f in tl.range(0, F, BF):
        z = ops.hidden(u, w1, b1, f, F, D, DP, PACKED, OPERAND, PRECISION, BM, BF)
        act = activated(z, seed_ptr, row, f, ACT, EXACT, HIDDEN_DROPPED, BM, BF)
        w = ops.forward_weight(w2, 0, f, D, F, DP, BF, PACKED, OPERAND, PRECISION)  # [DP, BF]
        acc = ops.product(w, ops.operand(act, OPERAND, PRECISION), acc, PRECISION)
    if PARKED:
        y = ops.row_tile(y_ptr, row, rows, 0, D, BM, DP, D)
    if DROPPED > 0:
        fed = acc.T
        if b2 is not None:
            fed += ops.columns_of(b2, D, DP)
        y += ops.dropout(fed, seed_ptr, OUTPUT, row, 0, DROPPED, BM, DP)
    else:
        y += acc.T
    if NORM_LAST:
        if sum_ptr is not None:
            ops.store_tile(sum_ptr, y, row, rows, 0, D, BM, DP, D)
        mean, deviation = ops.statistics(y, eps, D, DP, NORM)
        y = ops.normed(y, mean, deviation, last_w, last_b, D, DP, NORM)
    ops.store_tile(y_ptr, y, row, rows, 0, D, BM, DP, D)


KERNELS = {"project": _project_kernel, "out_project": _out_project_kernel, "feedforward": _feedforward_kernel}
