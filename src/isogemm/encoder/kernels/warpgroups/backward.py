"""The backward's row kernels by warpgroups, in TF32: feed-forward, and the input's gradient."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, warpgroup_mma, warpgroup_mma_wait

from isogemm.core.kernels import start_launch
from isogemm.encoder.configs import GROUP_ROWS
from isogemm.encoder.kernels.common import ACTIVATION, OUTPUT
from isogemm.encoder.kernels.warpgroups import ops

_GROUP = gl.constexpr(GROUP_ROWS)
# Layouts of blocks of dqkv, 32 columns of rows, and of its transpose: no bank conflicts.
_NARROW_TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
_TRANSPOSED_TILE = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))


@gluon.jit
def _opaque(ld):
    """ld, opaque to the compiler, which would otherwise keep all offsets that depend on it in registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [ld], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _store_grad_operand(ptr, value, row, rows, column, ld, LD, TRANSPOSED, WARPS, KIND):
    """Store an operand of the weight gradients. TRANSPOSED: its transpose, rounded, rows ld apart, zeros at the end."""
    if TRANSPOSED:
        c = (column + ops.column_numbers(value.shape[1], WARPS, KIND)).to(row.dtype)
        value = gl.where((row < rows)[:, None], ops.rounded(value), 0.0)
        gl.store(ptr + (c[None, :] * ld + row[:, None]), value, mask=(row < ld)[:, None])
    else:
        ops.store_rows(ptr, value, row, rows, column, LD, WARPS, KIND)


@gluon.jit
def _store_sum(norm_sums, which: gl.constexpr, value, rows, D, WARPS):
    """Store sums over 64 rows each to row `which` of their [6, D]."""
    GROUPS: gl.constexpr = WARPS // 4
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, WARPS], [1, 0])
    sums = gl.sum(gl.reshape(value, [GROUPS, _GROUP, D]), axis=1)
    group = gl.program_id(0) * GROUPS + gl.arange(0, GROUPS, gl.SliceLayout(1, layout))
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    at = norm_sums + (group.to(gl.int64)[:, None] * (6 * D) + which * D + column[None, :])
    gl.store(at, gl.convert_layout(sums, layout), mask=(group * _GROUP < rows)[:, None])


@gluon.jit
def _norm_backward(dn, xhat, deviation, g_ptr, norm_sums, which: gl.constexpr, rows, D, NORM, WARPS, KIND):
    """The gradient of the input of a norm, xhat normalized; stores sums for scale and shift to which, which + 1."""
    _store_sum(norm_sums, which + 1, dn, rows, D, WARPS)
    _store_sum(norm_sums, which, dn * xhat, rows, D, WARPS)
    if g_ptr is not None:
        dn = dn * ops.vector(g_ptr, 0, D, WARPS, KIND)
    along = gl.sum(dn * xhat, axis=1)[:, None] * (1.0 / D)
    if NORM == "layer_norm":
        return (dn - gl.sum(dn, axis=1)[:, None] * (1.0 / D) - xhat * along) * deviation
    else:
        return (dn - xhat * along) * deviation


@gluon.jit
def _fetch_hidden(w1_place, w2_t_place, place, w1, w2_t, f, D, there, WARPS, KIND):
    """Start to copy rows f .. f + BF - 1 of linear1 and of linear2's transpose, if there are so many."""
    if there:
        ops.fetch(w1_place.index(place), w1, f, 0, D, WARPS, KIND)
        ops.fetch(w2_t_place.index(place), w2_t, f, 0, D, WARPS, KIND)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["rows"])
def _feedforward_backward_warpgroup_kernel(
    x_ptr, o_ptr, wo, bo, w1, b1, w1_t, w2_t, norm_w, norm_b, last_w, dy_ptr, sum_ptr,
    u_ptr, act_ptr, dz_ptr, dlast_ptr, ds_ptr, norm_sums, dlast_t, seed_ptr, left_ptr, rows, eps, ld,
    D: gl.constexpr, F: gl.constexpr, NORM: gl.constexpr, NORM_LAST: gl.constexpr, RESIDUAL_NORMED: gl.constexpr,
    HIDDEN_DROPPED: gl.constexpr, DROPPED: gl.constexpr, TRANSPOSED: gl.constexpr, ACT: gl.constexpr,
    ACT_GRAD: gl.constexpr, INDEX: gl.constexpr, BF: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    # A weight's next block is copied while the others' are multiplied.
    start_launch(PDL)
    BM: gl.constexpr = 16 * WARPS
    KIND: gl.constexpr = gl.float32
    first = gl.program_id(0) * BM
    row = ops.row_numbers(first, D, WARPS, KIND, INDEX)
    row_k = ops.row_numbers(first, BF, WARPS, KIND, INDEX)
    tile = gl.allocate_shared_memory(KIND, [BM, D], ops.TILE)
    ops.fetch_rows(tile, x_ptr, first, rows, D, WARPS, INDEX)
    ops.prefetch_rows(dy_ptr, first, rows, D, WARPS, INDEX)
    if o_ptr is not None:
        s = ops.attended(o_ptr, wo, bo, row, rows, D, WARPS, KIND)
        s += ops.rows_in(tile, row < rows, WARPS)
        tl.debug_barrier()  # before the tile's memory is reused
        ops.store_rows(ds_ptr, s, row, rows, 0, D, WARPS, KIND)  # waits there for the norm's gradient
    w1_place, w2_t_place = ops.allocate_blocks(BF, D, KIND), ops.allocate_blocks(BF, D, KIND)
    w1_t_place = ops.allocate_blocks(D, BF, KIND)
    _fetch_hidden(w1_place, w2_t_place, 0, w1, w2_t, 0, D, True, WARPS, KIND)
    ops.fetch_block(w1_t_place, 0, w1_t, 0, 0, F, True, WARPS, KIND)
    if o_ptr is None:
        ops.wait_for_copies(2)
        s = ops.rows_in(tile, row < rows, WARPS)
    if NORM == "batch_norm":
        normed = ops.batch_normed(s, norm_w, norm_b, D, WARPS, KIND)
    else:
        mean, deviation = ops.statistics(s, row < rows, eps, D, NORM)
        normed = ops.scaled(ops.normalized(s, mean, deviation, NORM), norm_w, norm_b, D, WARPS, KIND)
    _store_grad_operand(u_ptr, normed, row, rows, 0, _opaque(ld), D, TRANSPOSED, WARPS, KIND)
    u = ops.operand(normed, BF, WARPS, KIND)
    dlast = ops.load_rows(dy_ptr, row, rows, 0, D, D, WARPS, KIND).to(gl.float32)
    if NORM_LAST:
        total = ops.load_rows(sum_ptr, row, rows, 0, D, D, WARPS, KIND).to(gl.float32)
        last_mean, last_deviation = ops.statistics(total, row < rows, eps, D, NORM)
        total = ops.normalized(total, last_mean, last_deviation, NORM)
        dlast = _norm_backward(dlast, total, last_deviation, last_w, norm_sums, 2, rows, D, NORM, WARPS, KIND)
        ops.store_rows(dlast_ptr, dlast, row, rows, 0, D, WARPS, KIND)
    if DROPPED > 0:
        dlast = dlast * ops.keeping(gl.load(seed_ptr) + OUTPUT, row, 0, D, DROPPED, WARPS, KIND)
    if left_ptr is not None:
        ops.store_rows(left_ptr, dlast, row, rows, 0, D, WARPS, KIND)
    _store_sum(norm_sums, 4, dlast, rows, D, WARPS)  # linear2's bias, before any rounding, as in torch
    if TRANSPOSED:
        _store_grad_operand(dlast_t, dlast, row, rows, 0, _opaque(ld), D, TRANSPOSED, WARPS, KIND)
    d = ops.allocate_blocks(BM, D, KIND)  # to save registers
    d.index(0).store(ops.in_order(dlast, KIND))
    if HIDDEN_DROPPED > 0:
        seed = gl.load(seed_ptr) + ACTIVATION
    du = gl.zeros([BM, D], gl.float32, ops.rows_layout(D, WARPS, KIND))
    ops.wait_for_copies(1)
    for f in range(0, F, BF):
        place = ops.stage_of(f, rows, BF)
        z = gl.zeros([BM, BF], gl.float32, ops.rows_layout(BF, WARPS, KIND))
        dz = gl.zeros([BM, BF], gl.float32, ops.rows_layout(BF, WARPS, KIND))
        z = warpgroup_mma(u, w1_place.index(place).permute((1, 0)), z, use_acc=False, is_async=True)
        block = w2_t_place.index(place).permute((1, 0))
        dz = warpgroup_mma(d.index(place), block, dz, use_acc=False, is_async=True)
        z = warpgroup_mma_wait(1, deps=[z])
        if b1 is not None:
            z += ops.vector(b1, f, BF, WARPS, KIND)
        act = ACT(z, False)
        slope = ACT_GRAD(z, False)
        if HIDDEN_DROPPED > 0:
            kept = ops.keeping(seed, row_k, f, BF, HIDDEN_DROPPED, WARPS, KIND)
            act = act * kept
            slope = slope * kept
        _store_grad_operand(act_ptr, act, row_k, rows, f, _opaque(ld), F, TRANSPOSED, WARPS, KIND)
        dz = warpgroup_mma_wait(0, deps=[dz])
        ops.wait_for_copies(0)
        _fetch_hidden(w1_place, w2_t_place, place, w1, w2_t, f + BF, D, f + BF < F, WARPS, KIND)
        dz = dz * slope
        block = w1_t_place.index(place).permute((1, 0))
        du = warpgroup_mma(ops.operand(dz, D, WARPS, KIND), block, du, is_async=True)
        _store_grad_operand(dz_ptr, dz, row_k, rows, f, _opaque(ld), F, TRANSPOSED, WARPS, KIND)
        du = warpgroup_mma_wait(0, deps=[du])
        ops.wait_for_copies(0)
        ops.fetch_block(w1_t_place, place, w1_t, 0, f + BF, F, f + BF < F, WARPS, KIND)
    if NORM_LAST:
        du += ops.load_rows(dlast_ptr, row, rows, 0, D, D, WARPS, KIND).to(gl.float32)
    elif RESIDUAL_NORMED:
        du += ops.load_rows(dy_ptr, row, rows, 0, D, D, WARPS, KIND).to(gl.float32)
    if NORM != "batch_norm":
        xhat = ops.load_rows(x_ptr if o_ptr is None else ds_ptr, row, rows, 0, D, D, WARPS, KIND)
        xhat = ops.normalized(xhat, mean, deviation, NORM)
        which: gl.constexpr = 0 if NORM_LAST else 2
        du = _norm_backward(du, xhat, deviation, norm_w, norm_sums, which, rows, D, NORM, WARPS, KIND)
        if not RESIDUAL_NORMED:
            du += ops.load_rows(dy_ptr, row, rows, 0, D, D, WARPS, KIND).to(gl.float32)
    ops.store_rows(ds_ptr, du, row, rows, 0, D, WARPS, KIND)


@gluon.jit
def _fetch_input_grad(slot, tile, w_t, dqkv_ptr, first, rows, k, ld, D, BF, TRANSPOSED, WARPS, INDEX):
    """Start to copy columns k .. k + BF - 1 of in_proj's transpose and of dqkv, if there are so many."""
    layout: gl.constexpr = ops.copy_layout(WARPS, gl.float32)
    if k < 3 * D:
        ops.fetch(slot, w_t, 0, k, 3 * D, WARPS, gl.float32)
        if TRANSPOSED:
            c = (k + gl.arange(0, BF, gl.SliceLayout(1, layout))).to(INDEX)[:, None]
            r = (first + gl.arange(0, 16 * WARPS, gl.SliceLayout(0, layout))).to(INDEX)[None, :]
            ops.async_load(tile, dqkv_ptr + (c * ld + r), mask=r < ld)
        else:
            r = (first + gl.arange(0, 16 * WARPS, gl.SliceLayout(1, layout))).to(INDEX)[:, None]
            c = k + gl.arange(0, BF, gl.SliceLayout(0, layout))[None, :]
            ops.async_load(tile, dqkv_ptr + (r * (3 * D) + c), mask=r < rows)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["rows"])
def _input_grad_warpgroup_kernel(
    x_ptr, norm_w, norm_b, in_proj_t, dqkv_ptr, ds_ptr, n_ptr, dx_ptr, norm_sums, o_ptr, ds_operand, o_t,
    residual_ptr, rows, eps, ld,
    D: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, TRANSPOSED: gl.constexpr, INDEX: gl.constexpr,
    STAGES: gl.constexpr, BF: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    start_launch(PDL)
    BM: gl.constexpr = 16 * WARPS
    KIND: gl.constexpr = gl.float32
    first = gl.program_id(0) * BM
    row = ops.row_numbers(first, D, WARPS, KIND, INDEX)
    live = row < rows
    slots = gl.allocate_shared_memory(KIND, [STAGES, D, BF], ops.shared_layout(D, BF, KIND))
    if TRANSPOSED:
        grads = gl.allocate_shared_memory(KIND, [STAGES, BF, BM], _TRANSPOSED_TILE)
    else:
        grads = gl.allocate_shared_memory(KIND, [STAGES, BM, BF], _NARROW_TILE)
    for i in gl.static_range(STAGES - 1):
        _fetch_input_grad(
            slots.index(i), grads.index(i), in_proj_t, dqkv_ptr, first, rows, i * BF, ld,
            D, BF, TRANSPOSED, WARPS, INDEX,
        )  # fmt: skip
    dx = gl.zeros([BM, D], gl.float32, ops.rows_layout(D, WARPS, KIND))
    for block in range(3 * D // BF):
        ops.wait_for_copies(STAGES - 2)
        ahead = block + STAGES - 1
        stage = ahead % STAGES
        _fetch_input_grad(
            slots.index(stage), grads.index(stage), in_proj_t, dqkv_ptr, first, rows, ahead * BF, ld,
            D, BF, TRANSPOSED, WARPS, INDEX,
        )  # fmt: skip
        grad = grads.index(block % STAGES)
        if TRANSPOSED:
            grad = grad.permute((1, 0))
        weight = slots.index(block % STAGES)
        left = ops.operand(grad.load(ops.rows_layout(BF, WARPS, KIND)), D, WARPS, KIND)
        dx = ops.plus_product(dx, left, weight.permute((1, 0)))
    dx = gl.where(live[:, None], dx, 0.0)  # what is beyond the last row was not fetched
    tl.debug_barrier()
    gl.static_assert(STAGES * BF >= 2 * BM, "two tiles of rows shall fit")
    gl.static_assert(STAGES * BF >= D, "a tile of rows shall fit")
    tiles = ops.reinterpret(slots, KIND, [2, BM, D], ops.TILE)
    ops.fetch_rows(tiles.index(0), x_ptr, first, rows, D, WARPS, INDEX)
    ops.fetch_rows(tiles.index(1), ds_ptr, first, rows, D, WARPS, INDEX)
    if TRANSPOSED:
        last = ops.reinterpret(grads, KIND, [BM, D], ops.TILE)
        ops.fetch_rows(last, o_ptr, first, rows, D, WARPS, INDEX)
    ops.wait_for_copies(2 if TRANSPOSED else 1)
    n = ops.rows_in(tiles.index(0), live, WARPS)
    if NORM != "":
        mean, deviation = ops.statistics(n, live, eps, D, NORM)
        n = ops.normalized(n, mean, deviation, NORM)
        if RESIDUAL == "through":
            if residual_ptr is None:
                dx += ops.load_rows(ds_ptr, row, rows, 0, D, D, WARPS, KIND)
            else:
                dx += ops.load_rows(residual_ptr, row, rows, 0, D, D, WARPS, KIND)
        dx = _norm_backward(dx, n, deviation, norm_w, norm_sums, 0, rows, D, NORM, WARPS, KIND)
        n = ops.scaled(n, norm_w, norm_b, D, WARPS, KIND)
    if n_ptr is not None:
        _store_grad_operand(n_ptr, n, row, rows, 0, _opaque(ld), D, TRANSPOSED, WARPS, KIND)
    ops.wait_for_copies(0)
    ds = ops.rows_in(tiles.index(1), live, WARPS)
    _store_sum(norm_sums, 5, ds, rows, D, WARPS)  # out_proj's bias, before any rounding
    if RESIDUAL == "around" or (RESIDUAL == "through" and NORM == ""):
        if residual_ptr is None:
            dx += ds
        else:
            dx += ops.load_rows(residual_ptr, row, rows, 0, D, D, WARPS, KIND)
    ops.store_rows(dx_ptr, dx, row, rows, 0, D, WARPS, KIND)
    if TRANSPOSED:
        _store_grad_operand(ds_operand, ds, row, rows, 0, _opaque(ld), D, TRANSPOSED, WARPS, KIND)
        o = ops.rows_in(last, live, WARPS)
        _store_grad_operand(o_t, o, row, rows, 0, _opaque(ld), D, TRANSPOSED, WARPS, KIND)


KERNELS = {"feedforward_backward": _feedforward_backward_warpgroup_kernel, "input_grad": _input_grad_warpgroup_kernel}
