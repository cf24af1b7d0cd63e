"""The backward's row kernels by fragments."""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.kernels import start_launch
from isogemm.encoder.attention.kernels.lanes import (
    column_sum,
    load_four,
    loaded_operand,
    operand,
    row_sum,
    store_four,
    zero_blocks,
)
from isogemm.encoder.kernels.common import ACTIVATION, OUTPUT
from isogemm.encoder.kernels.fragments import ops


@triton.jit
def _place_of_sums(norm_sums, r, c, live, D, BLOCK):
    """Address of a warp's sums [6, D] at a lane's columns; and whether the lane writes them."""
    tile = tl.program_id(0) * (BLOCK // 32) + tl.arange(0, BLOCK) // 32
    return norm_sums + (tile.to(tl.int64) * (6 * D) + 4 * c), (r == 0) & live[0]


@triton.jit
def _store_sum(at, block, column, leads):
    """Store the warp's sums of a block's columns; at: a row of its [6, D]; leads: whether this lane writes."""
    sums = ()
    for e in tl.static_range(4):
        sums = sums + (column_sum(block[e] + block[e + 4]),)
    store_four(at + column, sums, leads)


@triton.jit
def _norm_backward(dn, x, mean, deviation, g_ptr, sums, which: tl.constexpr, leads, c, D, NORM):
    """The gradient of a norm's input x; stores the warp's sums for scale and shift to rows which, which + 1."""
    upper_along = tl.zeros_like(mean[0])
    lower_along = tl.zeros_like(mean[0])
    upper_away = tl.zeros_like(mean[0])
    lower_away = tl.zeros_like(mean[0])
    xhat, scaled = (), ()
    for i in tl.static_range(len(x)):  # block by block, to save registers
        normal = ops.normalized_block(x[i], mean, deviation)
        _store_sum(sums + (which + 1) * D, dn[i], 16 * i, leads)
        _store_sum(sums + which * D, ops.block_product(dn[i], normal), 16 * i, leads)
        block = dn[i]
        if g_ptr is not None:
            block = ops.block_product(block, ops.columns_of(g_ptr, c, 16 * i))
        along = ops.block_product(block, normal)
        upper_along += ops.four_sum(along, 0)
        lower_along += ops.four_sum(along, 4)
        if NORM == "layer_norm":
            upper_away += ops.four_sum(block, 0)
            lower_away += ops.four_sum(block, 4)
        xhat = xhat + (normal,)
        scaled = scaled + (block,)
    along = (row_sum(upper_along) * (1.0 / D), row_sum(lower_along) * (1.0 / D))
    away = (row_sum(upper_away) * (1.0 / D), row_sum(lower_away) * (1.0 / D))
    made = ()
    for i in tl.static_range(len(x)):
        block = ()
        for e in tl.static_range(8):
            rest = scaled[i][e] - away[e // 4] - xhat[i][e] * along[e // 4]
            block = block + (rest * deviation[e // 4],)
        made = made + (block,)
    return made


@triton.jit(do_not_specialize=["rows"])
def _feedforward_backward_rows_kernel(
    x_ptr, o_ptr, wo, bo, w1, b1, w1_t, w2_t, norm_w, norm_b, last_w, dy_ptr, sum_ptr,
    u_ptr, act_ptr, dz_ptr, dlast_ptr, ds_ptr, norm_sums, seed_ptr, left_ptr, rows, eps,
    D: tl.constexpr, F: tl.constexpr, NORM: tl.constexpr, NORM_LAST: tl.constexpr, RESIDUAL_NORMED: tl.constexpr,
    HIDDEN_DROPPED: tl.constexpr, DROPPED: tl.constexpr, ACT: tl.constexpr, ACT_GRAD: tl.constexpr,
    EXACT: tl.constexpr, KIND: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_launch(PDL)
    r, c, at, live, inside = ops.place_rows(tl.program_id(0), rows, INDEX, BLOCK)
    lane = 4 * r + c
    sums, leads = _place_of_sums(norm_sums, r, c, live, D, BLOCK)
    s = ops.attended_rows(x_ptr, o_ptr, wo, bo, inside, c, lane, D, KIND, BLOCK)
    if NORM == "batch_norm":
        normed = ops.batch_normed_rows(s, norm_w, norm_b, c, D)
    else:
        mean, deviation = ops.row_statistics(s, eps, D, NORM)
        if o_ptr is not None:
            ops.store_rows(ds_ptr, s, at, live, c, D)  # waits there for the norm's gradient
        normed = ops.normed_rows(s, mean, deviation, norm_w, norm_b, c)
    ops.store_rows(u_ptr, normed, at, live, c, D)
    u = ops.as_operands(normed, KIND)
    dlast = ops.only_live(ops.load_rows(dy_ptr, inside, c, D, D), live)
    if NORM_LAST:
        total = ops.load_rows(sum_ptr, inside, c, D, D)
        last_mean, last_deviation = ops.row_statistics(total, eps, D, NORM)
        dlast = _norm_backward(dlast, total, last_mean, last_deviation, last_w, sums, 2, leads, c, D, NORM)
        ops.store_rows(dlast_ptr, dlast, at, live, c, D)
    if DROPPED > 0:
        dlast = ops.dropped_rows(dlast, seed_ptr, OUTPUT, at, c, DROPPED)
        ops.store_rows(left_ptr, dlast, at, live, c, D)
    for i in tl.static_range(D // 16):  # linear2's bias, before any rounding, as in torch
        _store_sum(sums + 4 * D, dlast[i], 16 * i, leads)
    d_operand = ops.as_operands(dlast, KIND)
    if HIDDEN_DROPPED > 0:
        seed = tl.load(seed_ptr) + ACTIVATION
        later = ops.no_words(BLOCK)
    du = zero_blocks(D // 16, BLOCK)
    for f in tl.range(0, F // 16):
        tl.debug_barrier()  # warps that stay together find the weights in the cache
        if HIDDEN_DROPPED > 0:
            if f % 2 == 0:
                words, later = ops.words_of_rows(seed, at, f // 2, c)
            else:
                words = later
        z = ops.times_block(u, w1, lane, f, D, BLOCK, KIND)
        dz = ops.times_block(d_operand, w2_t, lane, f, D, BLOCK, KIND)
        if b1 is not None:
            z = ops.block_sum(z, ops.columns_of(b1, c, 16 * f))
        active, slope = (), ()
        for e in tl.static_range(8):
            active = active + (ACT(z[e], EXACT),)
            slope = slope + (dz[e] * ACT_GRAD(z[e], EXACT),)
        if HIDDEN_DROPPED > 0:
            kept = ops.keeping_of(words, HIDDEN_DROPPED)
            active = ops.block_product(active, kept)
            slope = ops.block_product(slope, kept)
        ops.store_block(act_ptr, active, at, live, c, 16 * f, F)
        ops.store_block(dz_ptr, slope, at, live, c, 16 * f, F)
        du = ops.with_block(du, operand(slope, KIND), w1_t, lane, f, F, KIND)
    if NORM == "batch_norm":
        ds = du
        if RESIDUAL_NORMED:
            ds = ops.block_sums(ds, ops.load_rows(dy_ptr, inside, c, D, D))
    else:
        if o_ptr is None:
            s = ops.only_live(ops.load_rows(x_ptr, inside, c, D, D), live)
        else:
            s = ops.only_live(ops.load_rows(ds_ptr, inside, c, D, D), live)
        if NORM_LAST:
            du = ops.block_sums(du, ops.only_live(ops.load_rows(dlast_ptr, inside, c, D, D), live))
        elif RESIDUAL_NORMED:
            du = ops.block_sums(du, ops.only_live(ops.load_rows(dy_ptr, inside, c, D, D), live))
        WHICH: tl.constexpr = 0 if NORM_LAST else 2
        ds = _norm_backward(du, s, mean, deviation, norm_w, sums, WHICH, leads, c, D, NORM)
        if not RESIDUAL_NORMED:
            ds = ops.block_sums(ds, ops.load_rows(dy_ptr, inside, c, D, D))
    ops.store_rows(ds_ptr, ds, at, live, c, D)


@triton.jit(do_not_specialize=["rows"])
def _input_grad_rows_kernel(
    x_ptr, norm_w, norm_b, in_proj_t, dqkv_ptr, ds_ptr, n_ptr, dx_ptr, norm_sums, residual_ptr, rows, eps,
    D: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr,
    INDEX: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_launch(PDL)
    r, c, at, live, inside = ops.place_rows(tl.program_id(0), rows, INDEX, BLOCK)
    lane = 4 * r + c
    sums, leads = _place_of_sums(norm_sums, r, c, live, D, BLOCK)
    FROM: tl.constexpr = dqkv_ptr.dtype.element_ty
    upper = dqkv_ptr + (inside[0] * (3 * D) + 4 * c)
    lower = dqkv_ptr + (inside[1] * (3 * D) + 4 * c)
    dn = zero_blocks(D // 16, BLOCK)
    for k in tl.range(0, 3 * D // 16):
        tl.debug_barrier()  # warps that stay together find the weights in the cache
        above = loaded_operand(load_four(upper + 16 * k), FROM, KIND)
        grad = above + loaded_operand(load_four(lower + 16 * k), FROM, KIND)
        dn = ops.with_block(dn, grad, in_proj_t, lane, k, 3 * D, KIND)
    dn = ops.only_live(dn, live)
    if NORM != "":
        x = ops.load_rows(x_ptr, inside, c, D, D)
        mean, deviation = ops.row_statistics(x, eps, D, NORM)
        for i in tl.static_range(D // 16):
            normed = ops.normed_block(x[i], mean, deviation, norm_w, norm_b, c, 16 * i)
            ops.store_block(n_ptr, normed, at, live, c, 16 * i, D)
        if RESIDUAL == "through":
            residual = ops.load_rows(ds_ptr if residual_ptr is None else residual_ptr, inside, c, D, D)
            dn = ops.block_sums(dn, ops.only_live(residual, live))
        dn = _norm_backward(dn, x, mean, deviation, norm_w, sums, 0, leads, c, D, NORM)
    for i in tl.static_range(D // 16):
        ds = ops.only_live(ops.load_rows(ds_ptr + 16 * i, inside, c, D, 16), live)
        _store_sum(sums + 5 * D, ds[0], 16 * i, leads)  # out_proj's bias, before any rounding
        dx = dn[i]
        if RESIDUAL == "around" or (RESIDUAL == "through" and NORM == ""):
            if residual_ptr is not None:
                ds = ops.load_rows(residual_ptr + 16 * i, inside, c, D, 16)
            dx = ops.block_sum(dx, ds[0])
        ops.store_block(dx_ptr, dx, at, live, c, 16 * i, D)


KERNELS = {"feedforward_backward": _feedforward_backward_rows_kernel, "input_grad": _input_grad_rows_kernel}
