"""The forward's row kernels by fragments."""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.kernels import start_launch
from isogemm.encoder.attention.kernels.lanes import (
    load_weights,
    multiply,
    operand,
    packed_place,
    store_four,
    weight_row,
    zero_block,
    zero_blocks,
)
from isogemm.encoder.kernels.common import ACTIVATION, OUTPUT, PROJECTION, in_proj, pack_weights, projected_at
from isogemm.encoder.kernels.common import operand as as_operand
from isogemm.encoder.kernels.fragments import ops
from isogemm.gemm.kernels.halves import round_by_instruction


@triton.jit
def _rounded(values):
    return [round_by_instruction(value) for value in values]


@triton.jit
def _store_heads(ptr, block, at, live, c, column, rows, D, HEAD, BY_HEAD, LD):
    """Store a block of [rows, D] as attention's operands [D / HEAD, rows, HEAD] where BY_HEAD, or to rows LD apart."""
    if BY_HEAD:
        if ptr.dtype.element_ty == tl.float32:
            block = _rounded(block)
        tl.static_assert(HEAD % 4 == 0, "a lane's four columns shall be one head's")
        column += 4 * c
        of_head = (column // HEAD).to(rows.dtype) * rows
        for i in tl.static_range(2):
            to = ptr + ((of_head + at[i]) * HEAD + column % HEAD)
            store_four(to, block[4 * i : 4 * i + 4], live[i])
    else:
        ops.store_block(ptr, block, at, live, c, column, LD)


@triton.jit
def _pack_tile(w, straight, transposed, r, c, first, ROWS, COLS, LD, SIDE, STRAIGHT, TRANSPOSE, KIND, PRECISION):
    n = r + tl.arange(0, SIDE)[:, None]
    k = c + tl.arange(0, SIDE)[None, :]
    live = (n < ROWS) & (k < COLS)
    tile = as_operand(tl.load(w + (n * COLS + k), mask=live, other=0.0), KIND, PRECISION)
    if STRAIGHT:
        tl.store(straight + packed_place(n, k, COLS, KIND), tile, mask=live)
    if TRANSPOSE:
        tl.store(transposed + packed_place(k, first + n, LD, KIND), tile, mask=live)


@triton.jit(do_not_specialize=["rows", "per_part"])
def _project_rows_kernel(
    x_ptr, norm_w, norm_b, wq, wk, wv, bq, bk, bv, qkv_ptr, ds_ptr, wo, do_ptr, w1, w2, packed, v_ptr,
    rows, eps, per_part,
    D: tl.constexpr, F: tl.constexpr, HEAD: tl.constexpr, BY_HEAD: tl.constexpr, NORM: tl.constexpr,
    STACKED: tl.constexpr, BIASES: tl.constexpr, FIRST: tl.constexpr, BACKWARD: tl.constexpr, TRANSPOSE: tl.constexpr,
    SPLIT: tl.constexpr, KIND: tl.constexpr, INDEX: tl.constexpr, SIDE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # A program computes q, k and v of its rows, from FIRST on, or with SPLIT one of them. In the backward other
    # programs compute do = ds Wo. In the forward the last programs pack the weights for the other launches.
    start_launch(PDL)
    program = tl.program_id(0)
    PARTS: tl.constexpr = 3 - FIRST if SPLIT else 1
    if program < per_part * PARTS:
        first_part = FIRST + program % PARTS
        r, c, at, live, inside = ops.place_rows(program // PARTS, rows, INDEX, BLOCK)
        x = ops.load_rows(x_ptr, inside, c, D, D)
        if NORM != "":
            mean, deviation = ops.row_statistics(x, eps, D, NORM)
            x = ops.normed_rows(x, mean, deviation, norm_w, norm_b, c)
        n = ops.as_operands(x, KIND)
        for part in tl.range(first_part, first_part + 1 if SPLIT else 3):
            w = in_proj(wq, wk, wv, part, D * D, STACKED or BACKWARD)
            if BIASES:
                b = in_proj(bq, bk, bv, part, D, STACKED)
            for j in tl.range(0, D // 16):
                if BACKWARD:
                    acc = ops.times_block(n, w, 4 * r + c, j, D, BLOCK, KIND)
                else:
                    acc = zero_block(BLOCK)
                    from_row = w + ((16 * j + weight_row(r)) * D + 4 * c)
                    for i in tl.static_range(len(n)):
                        acc = multiply(acc, n[i], load_weights(from_row + 16 * i, D, KIND), KIND)
                if BIASES:
                    acc = ops.block_sum(acc, ops.columns_of(b, c, 16 * j))
                if BY_HEAD:
                    to = projected_at(qkv_ptr, v_ptr, part, rows.to(INDEX) * D, FIRST)
                    _store_heads(to, acc, at, live, c, 16 * j, rows.to(INDEX), D, HEAD, BY_HEAD, 3 * D)
                else:
                    ops.store_block(qkv_ptr, acc, at, live, c, part * D + 16 * j, 3 * D)
    else:
        program -= per_part * PARTS
        if BACKWARD:
            r, c, at, live, inside = ops.place_rows(program, rows, INDEX, BLOCK)
            ds = ops.load_operands(ds_ptr, inside, c, D, D, KIND)
            for j in tl.range(0, D // 16):
                acc = ops.times_block(ds, wo, 4 * r + c, j, D, BLOCK, KIND)
                _store_heads(do_ptr, acc, at, live, c, 16 * j, rows.to(INDEX), D, HEAD, BY_HEAD, D)
        else:
            pack_weights(
                program, wq, wk, wv, wo, w1, w2, packed, _pack_tile, D, F, SIDE, STACKED, True, TRANSPOSE, KIND,
                "tf32" if KIND == tl.float32 else "",
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _out_project_rows_kernel(
    x_ptr, o_ptr, wo, bo, norm_w, norm_b, seed_ptr, s_ptr, rows, eps,
    D: tl.constexpr, NORM: tl.constexpr, DROPPED: tl.constexpr, KIND: tl.constexpr,
    INDEX: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_launch(PDL)
    r, c, at, live, inside = ops.place_rows(tl.program_id(0), rows, INDEX, BLOCK)
    s = ops.projected_rows(o_ptr, wo, bo, inside, c, 4 * r + c, D, KIND, BLOCK)
    if DROPPED > 0:
        s = ops.dropped_rows(s, seed_ptr, PROJECTION, at, c, DROPPED)
    x = ops.load_rows(x_ptr, inside, c, D, D)
    if NORM != "":
        mean, deviation = ops.row_statistics(x, eps, D, NORM)
        x = ops.normed_rows(x, mean, deviation, norm_w, norm_b, c)
    ops.store_rows(s_ptr, ops.block_sums(s, x), at, live, c, D)


@triton.jit(do_not_specialize=["rows"])
def _feedforward_rows_kernel(
    x_ptr, o_ptr, wo, bo, w1, b1, w2, b2, norm_w, norm_b, last_w, last_b, y_ptr, sum_ptr, seed_ptr, rows, eps,
    D: tl.constexpr, F: tl.constexpr, NORM: tl.constexpr, NORM_LAST: tl.constexpr, RESIDUAL_NORMED: tl.constexpr,
    HIDDEN_DROPPED: tl.constexpr, DROPPED: tl.constexpr, ACT: tl.constexpr, EXACT: tl.constexpr, KIND: tl.constexpr,
    INDEX: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_launch(PDL)
    r, c, at, live, inside = ops.place_rows(tl.program_id(0), rows, INDEX, BLOCK)
    lane = 4 * r + c
    y = ops.attended_rows(x_ptr, o_ptr, wo, bo, inside, c, lane, D, KIND, BLOCK)
    if NORM == "batch_norm":
        normed = ops.batch_normed_rows(y, norm_w, norm_b, c, D)
    else:
        mean, deviation = ops.row_statistics(y, eps, D, NORM)
        normed = ops.normed_rows(y, mean, deviation, norm_w, norm_b, c)
    u = ops.as_operands(normed, KIND)
    if RESIDUAL_NORMED:
        y = normed
    if DROPPED == 0:
        if b2 is not None:
            y = ops.plus_vector(y, b2, c)
    if HIDDEN_DROPPED > 0:
        seed = tl.load(seed_ptr) + ACTIVATION
        later = ops.no_words(BLOCK)
    acc = zero_blocks(D // 16, BLOCK)  # not y, which would shrink with every block: tensor cores round sums toward zero
    for f in tl.range(0, F // 16):
        tl.debug_barrier()  # warps that stay together find the weights in the cache
        if HIDDEN_DROPPED > 0:
            if f % 2 == 0:
                words, later = ops.words_of_rows(seed, at, f // 2, c)
            else:
                words = later
        z = ops.times_block(u, w1, lane, f, D, BLOCK, KIND)
        if b1 is not None:
            z = ops.block_sum(z, ops.columns_of(b1, c, 16 * f))
        active = ()
        for e in tl.static_range(8):
            active = active + (ACT(z[e], EXACT),)
        if HIDDEN_DROPPED > 0:
            active = ops.block_product(active, ops.keeping_of(words, HIDDEN_DROPPED))
        acc = ops.with_block(acc, operand(active, KIND), w2, lane, f, F, KIND)
    if DROPPED > 0:
        if b2 is not None:
            acc = ops.plus_vector(acc, b2, c)
        acc = ops.dropped_rows(acc, seed_ptr, OUTPUT, at, c, DROPPED)
    y = ops.block_sums(y, acc)
    if NORM_LAST:
        if sum_ptr is not None:
            ops.store_rows(sum_ptr, y, at, live, c, D)
        mean, deviation = ops.row_statistics(y, eps, D, NORM)
        y = ops.normed_rows(y, mean, deviation, last_w, last_b, c)
    ops.store_rows(y_ptr, y, at, live, c, D)


KERNELS = {
    "project": _project_rows_kernel,
    "out_project": _out_project_rows_kernel,
    "feedforward": _feedforward_rows_kernel,
}
