"""The forward's row kernels by warpgroups: projections and feed-forward."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from isogemm.core.kernels import start_launch
from isogemm.encoder.kernels.common import ACTIVATION, OUTPUT, in_proj, pack_weights, projected_at
from isogemm.encoder.kernels.warpgroups import ops


@gluon.jit
def _place(column, KIND):
    """Place of a weight's column in the packed weight."""
    if KIND == gl.float32:
        return column // 8 * 8 + column % 2 * 4 + column % 8 // 2
    else:
        return column


@gluon.jit
def _column_at(place, KIND):
    """Column of a weight that is packed at this place."""
    if KIND == gl.float32:
        return place // 8 * 8 + place % 4 * 2 + place % 8 // 4
    else:
        return place


@gluon.jit
def _normed(x, live, eps, g_ptr, b_ptr, D, NORM, WARPS, KIND):
    mean, deviation = ops.statistics(x, live, eps, D, NORM)
    return ops.scaled(ops.normalized(x, mean, deviation, NORM), g_ptr, b_ptr, D, WARPS, KIND)


@gluon.jit
def _pack_tile(w, straight, transposed, r, c, first, ROWS, COLS, LD, SIDE, STRAIGHT, TRANSPOSE, KIND, PRECISION):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    row = (r + gl.arange(0, SIDE, gl.SliceLayout(1, layout)))[:, None]
    col = (c + gl.arange(0, SIDE, gl.SliceLayout(0, layout)))[None, :]
    live = (row < ROWS) & (col < COLS)
    tile = ops.as_number(gl.load(w + (row * COLS + col), mask=live, other=0.0), KIND)
    if STRAIGHT:
        gl.store(straight + (row * COLS + _place(col, KIND)), tile, mask=live)
    if TRANSPOSE:
        gl.store(transposed + (col * LD + _place(first + row, KIND)), tile, mask=live)


@gluon.jit
def _keep_vector(slot, ptr, D, WARPS):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    slot.store(gl.load(ptr + gl.arange(0, D, layout)).to(gl.float32))


@gluon.jit
def _kept_vector(slot, D, WARPS, KIND):
    """The vector that `_keep_vector` stored, for every row."""
    return slot.load(gl.SliceLayout(0, ops.rows_layout(D, WARPS, KIND)))[None, :]


@gluon.jit
def _keep_weight(slot, w, D, TRANSPOSED, WARPS, KIND):
    """Store a weight [D, D], or its transpose, as the right operand; ROWS rows at a time."""
    ROWS: gl.constexpr = 32
    layout: gl.constexpr = (
        gl.BlockedLayout([4, 1], [8, 4], [1, WARPS], [0, 1]) if TRANSPOSED
        else gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    )  # fmt: skip
    k = _column_at(gl.arange(0, D, gl.SliceLayout(0, layout)), KIND)[None, :]
    for first in gl.static_range(0, D, ROWS):
        n = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
        if TRANSPOSED:
            at = w + (k * D + n)
        else:
            at = w + (n * D + k)
        slot.slice(first, ROWS).store(ops.as_number(gl.load(at), KIND))


@gluon.jit
def _store_heads(ptr, value, row, rows, HEAD, BY_HEAD, LD, WARPS, KIND):
    """Store [rows, D] to [D / HEAD, rows, HEAD] (BY_HEAD), as attention's operands, or to rows LD apart."""
    if BY_HEAD:
        c = ops.column_numbers(value.shape[1], WARPS, KIND)
        at = ((c // HEAD).to(row.dtype) * rows.to(row.dtype))[None, :] + row[:, None]
        at = ptr + (at * HEAD + (c % HEAD)[None, :])
        gl.store(at, ops.as_number(value, KIND), mask=(row < rows)[:, None])
    else:
        ops.store_rows(ptr, value, row, rows, 0, LD, WARPS, KIND)


@gluon.jit
def _prefetch_tile(rows_place, ptr, tile, rows, D, WARPS, INDEX):
    """Start to copy a tile's rows to shared memory; without a place there (in 16 bits), prefetch them to L2."""
    BM: gl.constexpr = 16 * WARPS
    if rows_place is None:
        ops.prefetch_rows(ptr, tile * BM, rows, D, WARPS, INDEX)
    else:
        ops.fetch_rows(rows_place, ptr, tile * BM, rows, D, WARPS, INDEX)


@gluon.jit
def _next_tile(rows_place, ptr, tile, step, row, rows, D, WARPS, KIND, INDEX):
    """A tile's rows, prefetched before; starts to prefetch the next tile's."""
    if rows_place is None:
        value = ops.load_rows(ptr, row, rows, 0, D, D, WARPS, KIND)
    else:
        ops.wait_for_copies(0)
        value = ops.rows_in(rows_place, row < rows, WARPS)
        tl.debug_barrier()
    _prefetch_tile(rows_place, ptr, tile + step, rows, D, WARPS, INDEX)
    return value


@gluon.jit(do_not_specialize=["rows", "per_part"])
def _project_warpgroup_kernel(
    x_ptr, norm_w, norm_b, wq, wk, wv, bq, bk, bv, qkv_ptr, ds_ptr, wo, do_ptr, w1, w2, packed, v_ptr,
    rows, eps, per_part,
    D: gl.constexpr, F: gl.constexpr, HEAD: gl.constexpr, BY_HEAD: gl.constexpr, NORM: gl.constexpr,
    STACKED: gl.constexpr, BIASES: gl.constexpr, FIRST: gl.constexpr, BACKWARD: gl.constexpr, TRANSPOSE: gl.constexpr,
    KIND: gl.constexpr, INDEX: gl.constexpr, SIDE: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    # Programs keep one of the weights of q, k and v and loop over rows. In the backward there is a fourth, for
    # do = ds Wo, and FIRST is 2 if q and k were returned. In a forward the last programs pack the weights, if the other
    # launches read packed ones.
    start_launch(PDL)
    PARTS: gl.constexpr = (4 if BACKWARD else 3) - FIRST
    BM: gl.constexpr = 16 * WARPS
    program = gl.program_id(0)
    part = FIRST + program % PARTS
    first = program // PARTS
    if first >= per_part:
        if packed is not None:
            pack_weights(
                program - per_part * PARTS, wq, wk, wv, wo, w1, w2, packed, _pack_tile,
                D, F, SIDE, STACKED, False, TRANSPOSE, KIND, "tf32" if KIND == gl.float32 else "",
            )  # fmt: skip
    else:
        slot = gl.allocate_shared_memory(KIND, [D, D], ops.shared_layout(D, D, KIND))
        # in shared memory, to save registers
        vectors = gl.allocate_shared_memory(gl.float32, [3, D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        tiles = (rows + BM - 1) // BM
        rows_place = None
        if KIND == gl.float32:
            rows_place = gl.allocate_shared_memory(gl.float32, [BM, D], ops.TILE)
        if part < 3:
            _prefetch_tile(rows_place, x_ptr, first, rows, D, WARPS, INDEX)
            _keep_weight(slot, in_proj(wq, wk, wv, part, D * D, STACKED), D, False, WARPS, KIND)
            if norm_w is not None:
                _keep_vector(vectors.index(0), norm_w, D, WARPS)
            if norm_b is not None:
                _keep_vector(vectors.index(1), norm_b, D, WARPS)
            if BIASES:
                _keep_vector(vectors.index(2), in_proj(bq, bk, bv, part, D, STACKED), D, WARPS)
            fence_async_shared()
            tl.debug_barrier()
            if BY_HEAD:
                to = projected_at(qkv_ptr, v_ptr, part, rows.to(INDEX) * D, FIRST)
            else:
                to = qkv_ptr + part * D
            for tile in range(first, tiles, per_part):
                row = ops.row_numbers(tile * BM, D, WARPS, KIND, INDEX)
                x = _next_tile(rows_place, x_ptr, tile, per_part, row, rows, D, WARPS, KIND, INDEX).to(gl.float32)
                if NORM != "":
                    mean, deviation = ops.statistics(x, row < rows, eps, D, NORM)
                    x = ops.normalized(x, mean, deviation, NORM)
                if norm_w is not None:
                    x = x * _kept_vector(vectors.index(0), D, WARPS, KIND)
                if norm_b is not None:
                    x = x + _kept_vector(vectors.index(1), D, WARPS, KIND)
                acc = ops.product(ops.operand(x, D, WARPS, KIND), slot.permute((1, 0)), D, WARPS, KIND)
                if BIASES:
                    acc += _kept_vector(vectors.index(2), D, WARPS, KIND)
                _store_heads(to, acc, row, rows, HEAD, BY_HEAD, 3 * D, WARPS, KIND)
        elif BACKWARD:
            _prefetch_tile(rows_place, ds_ptr, first, rows, D, WARPS, INDEX)
            _keep_weight(slot, wo, D, KIND == gl.float32, WARPS, KIND)
            fence_async_shared()
            tl.debug_barrier()
            right = slot
            if KIND == gl.float32:  # TF32 needs both operands along the sum
                right = slot.permute((1, 0))
            for tile in range(first, tiles, per_part):
                row = ops.row_numbers(tile * BM, D, WARPS, KIND, INDEX)
                ds = _next_tile(rows_place, ds_ptr, tile, per_part, row, rows, D, WARPS, KIND, INDEX)
                acc = ops.product(ops.operand(ds, D, WARPS, KIND), right, D, WARPS, KIND)
                _store_heads(do_ptr, acc, row, rows, HEAD, BY_HEAD, D, WARPS, KIND)


@gluon.jit(do_not_specialize=["rows"])
def _feedforward_warpgroup_kernel(
    x_ptr, o_ptr, wo, bo, w1, b1, w2, b2, norm_w, norm_b, last_w, last_b, y_ptr, sum_ptr, seed_ptr, rows, eps,
    D: gl.constexpr, F: gl.constexpr, NORM: gl.constexpr, NORM_LAST: gl.constexpr, RESIDUAL_NORMED: gl.constexpr,
    HIDDEN_DROPPED: gl.constexpr, DROPPED: gl.constexpr, ACT: gl.constexpr, KIND: gl.constexpr, INDEX: gl.constexpr,
    STAGES: gl.constexpr, BF: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    # A weight's next block is copied while the other's is multiplied.
    start_launch(PDL)
    BM: gl.constexpr = 16 * WARPS
    # Tensor cores round sums toward zero: y as an accumulator would shrink with every few features.
    PARKED: gl.constexpr = KIND == gl.float32 or DROPPED > 0
    first = gl.program_id(0) * BM
    row = ops.row_numbers(first, D, WARPS, KIND, INDEX)
    if PARKED:
        tile = gl.allocate_shared_memory(gl.float32, [BM, D], ops.TILE)
    if KIND == gl.float32:
        ops.fetch_rows(tile, x_ptr, first, rows, D, WARPS, INDEX)
    if o_ptr is not None:
        if KIND == gl.float32:
            y = ops.attended(o_ptr, wo, bo, row, rows, D, WARPS, KIND)
            y += ops.rows_in(tile, row < rows, WARPS)
            tl.debug_barrier()
        else:
            ops.prefetch_rows(x_ptr, first, rows, D, WARPS, INDEX)
            y = ops.attended(o_ptr, wo, bo, row, rows, D, WARPS, KIND)
            y += ops.load_rows(x_ptr, row, rows, 0, D, D, WARPS, KIND).to(gl.float32)
    w1_places, w2_places = ops.allocate_blocks(BF, D, KIND, STAGES), ops.allocate_blocks(D, BF, KIND, STAGES)
    for i in gl.static_range(STAGES):
        ops.fetch_block(w1_places, i, w1, i * BF, 0, D, True, WARPS, KIND)
        ops.fetch_block(w2_places, i, w2, 0, i * BF, F, True, WARPS, KIND)
    if o_ptr is None:
        if KIND == gl.float32:
            ops.wait_for_copies(2 * STAGES)
            y = ops.rows_in(tile, row < rows, WARPS)
        else:
            y = ops.load_rows(x_ptr, row, rows, 0, D, D, WARPS, KIND).to(gl.float32)
    if NORM == "batch_norm":
        normed = ops.batch_normed(y, norm_w, norm_b, D, WARPS, KIND)
    else:
        normed = _normed(y, row < rows, eps, norm_w, norm_b, D, NORM, WARPS, KIND)
    u = ops.operand(normed, BF, WARPS, KIND)
    if RESIDUAL_NORMED:
        y = normed
    if DROPPED == 0:
        if b2 is not None:
            y += ops.vector(b2, 0, D, WARPS, KIND)
    if PARKED:
        tile.store(y)
        y = gl.zeros([BM, D], gl.float32, ops.rows_layout(D, WARPS, KIND))
    row_k = ops.row_numbers(first, BF, WARPS, KIND, INDEX)
    if HIDDEN_DROPPED > 0:
        seed = gl.load(seed_ptr) + ACTIVATION
    ops.wait_for_copies(2 * STAGES - 1)
    for f in range(0, F, BF):
        place = ops.stage_of(f, rows, BF, STAGES)
        ahead = f + STAGES * BF
        z = ops.product(u, w1_places.index(place).permute((1, 0)), BF, WARPS, KIND)
        tl.debug_barrier()  # all have read it
        ops.fetch_block(w1_places, place, w1, ahead, 0, D, ahead < F, WARPS, KIND)
        if b1 is not None:
            z += ops.vector(b1, f, BF, WARPS, KIND)
        act = ACT(z, False)
        if HIDDEN_DROPPED > 0:
            act = act * ops.keeping(seed, row_k, f, BF, HIDDEN_DROPPED, WARPS, KIND)
        ops.wait_for_copies(2 * STAGES - 1)
        w2_block = w2_places.index(place).permute((1, 0))
        y = ops.plus_product(y, ops.operand(act, D, WARPS, KIND), w2_block)
        ops.wait_for_copies(2 * STAGES - 2)
        ops.fetch_block(w2_places, place, w2, 0, ahead, F, ahead < F, WARPS, KIND)
    if DROPPED > 0:
        if b2 is not None:
            y += ops.vector(b2, 0, D, WARPS, KIND)
        y = y * ops.keeping(gl.load(seed_ptr) + OUTPUT, row, 0, D, DROPPED, WARPS, KIND)
    if PARKED:
        y += tile.load(ops.rows_layout(D, WARPS, KIND))
    if NORM_LAST:
        if sum_ptr is not None:
            ops.store_rows(sum_ptr, y, row, rows, 0, D, WARPS, KIND)
        y = _normed(y, row < rows, eps, last_w, last_b, D, NORM, WARPS, KIND)
    ops.store_rows(y_ptr, y, row, rows, 0, D, WARPS, KIND)


KERNELS = {"project": _project_warpgroup_kernel, "feedforward": _feedforward_warpgroup_kernel}
