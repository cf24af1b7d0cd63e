"""The row kernels of layers that Hopper's warpgroups hold: 64 rows each, from the first product to the last.

A product's left operand is in registers; the weights come through shared memory, block after block, copied while
earlier ones are multiplied. A lane holds columns 2 c and 2 c + 1 of every eight in a result. In 16 bits that is how the
next product wants them; TF32 takes the same registers for columns c and c + 4, so of the weights' columns every eight
are prepared in the order 0, 2, 4, 6, 1, 3, 5, 7, and nothing moves between lanes.

What a row's bits depend on is its own values alone, in an order that neither the rows of a program nor the launch
changes; sums over rows are taken of 64.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from isogemm.core.launch import Launch
from isogemm.encoder.configs import GROUP_ROWS, Layer, WalkConfig, WarpgroupConfig
from isogemm.encoder.kernels_forward import TYPES, in_proj, started
from isogemm.epilogues import device

_GROUP = gl.constexpr(GROUP_ROWS)
_SIDE = 64  # of a tile of weights that one program prepares


@gluon.constexpr_function
def _rows_layout(columns, warps, kind):
    """Of [16 * warps, columns], as a product of operands of this kind leaves it."""
    depth = 8 if kind == gl.float32 else 16
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, depth])


@gluon.constexpr_function
def _operand_layout(columns, warps, kind):
    """Of the left operand of a product with so many columns."""
    return gl.DotOperandLayout(0, _rows_layout(columns, warps, kind), 1 if kind == gl.float32 else 2)


@gluon.constexpr_function
def _copy_layout(warps, kind):
    return gl.BlockedLayout([1, 128 // kind.primitive_bitwidth], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def _shared_layout(rows, columns, kind):
    return gl.NVMMASharedLayout.get_default_for([rows, columns], kind)


# Of tiles that are read as a product's rows: [rows, columns], and [columns, rows] of transposes. No banks conflict.
_TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_NARROW_TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))  # 32 columns
_TURNED_TILE = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))


# operands


@gluon.jit
def _rounded(x):
    return gl.inline_asm_elementwise(
        "cvt.rn.tf32.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def _as_number(x, KIND: gl.constexpr):
    """x as an operand's number: TF32 rounded to nearest, or 16 bits."""
    if KIND == gl.float32:
        return _rounded(x.to(gl.float32))
    else:
        return x.to(KIND)


@gluon.jit
def _operand(x, N: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr):
    """Rows x, as a product leaves them, as the left operand of one with N columns: where they lie."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    x = _as_number(x, KIND)
    if KIND == gl.float32:
        x = gl.permute(gl.reshape(x, [ROWS, COLUMNS // 8, 4, 2]), (0, 1, 3, 2))
        x = gl.reshape(x, [ROWS, COLUMNS])
    return gl.convert_layout(x, _operand_layout(N, WARPS, KIND), assert_trivial=True)


@gluon.jit
def _place(column, KIND: gl.constexpr):
    """Of a weight's column among the prepared."""
    if KIND == gl.float32:
        return column // 8 * 8 + column % 2 * 4 + column % 8 // 2
    else:
        return column


@gluon.jit
def _column_at(place, KIND: gl.constexpr):
    """Which column of a weight is prepared there."""
    if KIND == gl.float32:
        return place // 8 * 8 + place % 4 * 2 + place % 8 // 4
    else:
        return place


# rows


@gluon.jit
def _row_numbers(first, COLUMNS: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr, INDEX: gl.constexpr):
    """Of a program's rows, for tiles of so many columns."""
    layout: gl.constexpr = gl.SliceLayout(1, _rows_layout(COLUMNS, WARPS, KIND))
    return (first + gl.arange(0, 16 * WARPS, layout)).to(INDEX)


@gluon.jit
def _column_numbers(COLUMNS: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr):
    return gl.arange(0, COLUMNS, gl.SliceLayout(0, _rows_layout(COLUMNS, WARPS, KIND)))


@gluon.jit
def _load_rows(
    ptr, row, rows, column, COLUMNS: gl.constexpr, LD: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr
):
    """Columns column .. column + COLUMNS - 1 of rows LD apart, zeros beyond the last."""
    c = column + _column_numbers(COLUMNS, WARPS, KIND)
    return gl.load(ptr + (row[:, None] * LD + c[None, :]), mask=(row < rows)[:, None], other=0.0)


@gluon.jit
def _store_rows(ptr, value, row, rows, column, LD: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr):
    c = column + _column_numbers(value.shape[1], WARPS, KIND)
    at = ptr + (row[:, None] * LD + c[None, :])
    gl.store(at, value.to(ptr.dtype.element_ty), mask=(row < rows)[:, None])


@gluon.jit
def _store_grad_operand(
    ptr, value, row, rows, column, ld, LD: gl.constexpr, TURNED: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr
):
    """For the weights' gradients, the transpose where TURNED: rounded, ld apart, zeros beyond the last row."""
    if TURNED:
        c = (column + _column_numbers(value.shape[1], WARPS, KIND)).to(row.dtype)
        value = gl.where((row < rows)[:, None], _rounded(value), 0.0)
        gl.store(ptr + (c[None, :] * ld + row[:, None]), value, mask=(row < ld)[:, None])
    else:
        _store_rows(ptr, value, row, rows, column, LD, WARPS, KIND)


@gluon.jit
def _anew(ld):
    """The same, unknown to the compiler, which else keeps all offsets that follow from it from store to store."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [ld], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _ask_for_rows(ptr, first, rows, LD: gl.constexpr, WARPS: gl.constexpr, INDEX: gl.constexpr):
    """Have a program's rows brought nearer, to the second cache, while others are worked on."""
    LINE: gl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth  # 128 bytes
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    line = gl.arange(0, 16 * WARPS * LD // LINE, layout)
    at = first.to(INDEX) * LD + line * LINE
    at = ptr + gl.minimum(at, rows.to(INDEX) * LD - 1)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _vector(ptr, first, COLUMNS: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr):
    """Elements first .. first + COLUMNS - 1, for every row."""
    return gl.load(ptr + (first + _column_numbers(COLUMNS, WARPS, KIND))).to(gl.float32)[None, :]


# norms


@gluon.jit
def _statistics(x, live, eps, D: gl.constexpr, NORM: gl.constexpr):
    """Each row's mean (0 for RMSNorm) and 1 / deviation, [rows, 1] each; 0 for the latter beyond the last row."""
    if NORM == "layer_norm":
        mean = gl.sum(x, axis=1)[:, None] * (1.0 / D)
        x = x - mean
    else:
        mean = gl.sum(x, axis=1)[:, None] * 0.0
    deviation = 1.0 / gl.sqrt_rn(gl.sum(x * x, axis=1)[:, None] * (1.0 / D) + eps)
    return mean, gl.where(live[:, None], deviation, 0.0)


@gluon.jit
def _normalized(x, mean, deviation, NORM: gl.constexpr):
    if NORM == "layer_norm":
        x = x - mean
    return x * deviation


@gluon.jit
def _scaled(xhat, g_ptr, b_ptr, D: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr):
    """A norm of normalized rows."""
    if g_ptr is not None:
        xhat = xhat * _vector(g_ptr, 0, D, WARPS, KIND)
    if b_ptr is not None:
        xhat = xhat + _vector(b_ptr, 0, D, WARPS, KIND)
    return xhat


@gluon.jit
def _normed(
    x, live, eps, g_ptr, b_ptr, D: gl.constexpr, NORM: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr
):  # fmt: skip
    mean, deviation = _statistics(x, live, eps, D, NORM)
    return _scaled(_normalized(x, mean, deviation, NORM), g_ptr, b_ptr, D, WARPS, KIND)


@gluon.jit
def _store_sum(norm_sums, which: gl.constexpr, value, rows, D: gl.constexpr, WARPS: gl.constexpr):
    """The sums over 64 rows each, to row `which` of [6, D]."""
    GROUPS: gl.constexpr = WARPS // 4
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, WARPS], [1, 0])
    sums = gl.sum(gl.reshape(value, [GROUPS, _GROUP, D]), axis=1)
    group = gl.program_id(0) * GROUPS + gl.arange(0, GROUPS, gl.SliceLayout(1, layout))
    column = gl.arange(0, D, gl.SliceLayout(0, layout))
    at = norm_sums + (group.to(gl.int64)[:, None] * (6 * D) + which * D + column[None, :])
    gl.store(at, gl.convert_layout(sums, layout), mask=(group * _GROUP < rows)[:, None])


@gluon.jit
def _norm_backward(
    dn, xhat, deviation, g_ptr, norm_sums, which: gl.constexpr, rows,
    D: gl.constexpr, NORM: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """The gradient of a norm's input, xhat normalized; the sums for those of its scale and shift: which, which + 1."""
    _store_sum(norm_sums, which + 1, dn, rows, D, WARPS)
    _store_sum(norm_sums, which, dn * xhat, rows, D, WARPS)
    if g_ptr is not None:
        dn = dn * _vector(g_ptr, 0, D, WARPS, KIND)
    along = gl.sum(dn * xhat, axis=1)[:, None] * (1.0 / D)
    if NORM == "layer_norm":
        return (dn - gl.sum(dn, axis=1)[:, None] * (1.0 / D) - xhat * along) * deviation
    else:
        return (dn - xhat * along) * deviation


# weights on their way: a slot holds a block of rows [BF, D] or of columns [D, BF]


@gluon.jit
def _columns_slot(slot, D: gl.constexpr, BF: gl.constexpr, KIND: gl.constexpr):
    return slot._reinterpret(KIND, [D, BF], _shared_layout(D, BF, KIND))


@gluon.jit
def _fetch(slot, ptr, row, column, LD: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr):
    """The weight's block at (row, column), of the slot's shape."""
    layout: gl.constexpr = _copy_layout(WARPS, KIND)
    r = row + gl.arange(0, slot.shape[0], gl.SliceLayout(1, layout))
    c = column + gl.arange(0, slot.shape[1], gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(slot, ptr + (r[:, None] * LD + c[None, :]))


@gluon.jit
def _fetch_rows(tile, ptr, first, rows, LD: gl.constexpr, WARPS: gl.constexpr, INDEX: gl.constexpr):
    """A program's rows of float32."""
    layout: gl.constexpr = _copy_layout(WARPS, gl.float32)
    r = (first + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))).to(INDEX)
    c = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    at = ptr + (r[:, None] * LD + c[None, :])
    async_copy.async_copy_global_to_shared(tile, at, mask=(r < rows)[:, None])
    async_copy.commit_group()


@gluon.jit
def _rows_in(tile, live, WARPS: gl.constexpr):
    """Of `_fetch_rows`, zeros where not live."""
    value = tile.load(_rows_layout(tile.shape[1], WARPS, gl.float32))
    return gl.where(live[:, None], value, 0.0)


@gluon.jit
def _arrived(LATER: gl.constexpr):
    """Wait for all that was asked for but the last LATER groups, and for all warps."""
    async_copy.wait_group(LATER)
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def _attended(
    o_ptr, wo, bo, row, rows, slots, D: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr
):  # fmt: skip
    """o Wo + bo, when all that was asked for is there."""
    gl.static_assert(slots.shape[0] * slots.shape[1] >= D, "all of Wo shall fit")
    weight = slots._reinterpret(KIND, [D, D], _shared_layout(D, D, KIND))
    _fetch(weight, wo, 0, 0, D, WARPS, KIND)
    async_copy.commit_group()
    o = _operand(_load_rows(o_ptr, row, rows, 0, D, D, WARPS, KIND), D, WARPS, KIND)
    s = gl.zeros([16 * WARPS, D], gl.float32, _rows_layout(D, WARPS, KIND))
    _arrived(0)
    s = warpgroup_mma(o, weight.permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    tl.debug_barrier()  # before the slots are filled again
    if bo is not None:
        s += _vector(bo, 0, D, WARPS, KIND)
    return s


# the launches


@gluon.jit
def _prepare_tile(
    w, straight, turned, r, c, first, ROWS: gl.constexpr, COLS: gl.constexpr, LD: gl.constexpr, SIDE: gl.constexpr,
    TURN: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """A tile of a weight as an operand; and with TURN its transpose, from column `first` on in one LD wide."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    row = (r + gl.arange(0, SIDE, gl.SliceLayout(1, layout)))[:, None]
    col = (c + gl.arange(0, SIDE, gl.SliceLayout(0, layout)))[None, :]
    live = (row < ROWS) & (col < COLS)
    tile = _as_number(gl.load(w + (row * COLS + col), mask=live, other=0.0), KIND)
    gl.store(straight + (row * COLS + _place(col, KIND)), tile, mask=live)
    if TURN:
        gl.store(turned + (col * LD + _place(first + row, KIND)), tile, mask=live)


@gluon.jit
def _prepare(
    item, wq, wk, wv, wo, w1, w2, ready, D: gl.constexpr, F: gl.constexpr, STACKED: gl.constexpr, TURN: gl.constexpr,
    SIDE: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """`ready`: out_proj, linear1, linear2, in_proj; and with TURN their transposes in the order of the products:
    linear2's, linear1's, out_proj's, in_proj's."""
    ACROSS: gl.constexpr = D // SIDE
    DOWN: gl.constexpr = F // SIDE
    SQUARE: gl.constexpr = ACROSS * ACROSS
    turned = ready + (4 * D * D + 2 * D * F)
    if item < SQUARE:
        _prepare_tile(
            wo, ready, turned + 2 * D * F, item // ACROSS * SIDE, item % ACROSS * SIDE, 0,
            D, D, D, SIDE, TURN, WARPS, KIND,
        )  # fmt: skip
    elif item < SQUARE + ACROSS * DOWN:
        item -= SQUARE
        _prepare_tile(
            w1, ready + D * D, turned + D * F, item // ACROSS * SIDE, item % ACROSS * SIDE, 0,
            F, D, F, SIDE, TURN, WARPS, KIND,
        )  # fmt: skip
    elif item < SQUARE + 2 * ACROSS * DOWN:
        item -= SQUARE + ACROSS * DOWN
        _prepare_tile(
            w2, ready + (D * D + D * F), turned, item // DOWN * SIDE, item % DOWN * SIDE, 0,
            D, F, D, SIDE, TURN, WARPS, KIND,
        )  # fmt: skip
    elif TURN:
        item -= SQUARE + 2 * ACROSS * DOWN
        part = item // SQUARE
        item -= part * SQUARE
        _prepare_tile(
            in_proj(wq, wk, wv, part, D * D, STACKED), ready + (D * D + 2 * D * F) + part * (D * D),
            turned + (2 * D * F + D * D), item // ACROSS * SIDE, item % ACROSS * SIDE, part * D,
            D, D, 3 * D, SIDE, TURN, WARPS, KIND,
        )  # fmt: skip


@gluon.jit
def _keep_vector(slot, ptr, D: gl.constexpr, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    slot.store(gl.load(ptr + gl.arange(0, D, layout)).to(gl.float32))


@gluon.jit
def _kept_vector(slot, D: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr):
    """Of `_keep_vector`, for every row."""
    return slot.load(gl.SliceLayout(0, _rows_layout(D, WARPS, KIND)))[None, :]


@gluon.jit
def _keep_weight(slot, w, D: gl.constexpr, TURNED: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr):
    """All of a weight [D, D], or of its transpose, as the right operand; some rows of it at a time."""
    ROWS: gl.constexpr = 32
    layout: gl.constexpr = (
        gl.BlockedLayout([4, 1], [8, 4], [1, WARPS], [0, 1]) if TURNED
        else gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    )  # fmt: skip
    k = _column_at(gl.arange(0, D, gl.SliceLayout(0, layout)), KIND)[None, :]
    for first in gl.static_range(0, D, ROWS):
        n = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
        if TURNED:
            at = w + (k * D + n)
        else:
            at = w + (n * D + k)
        slot.slice(first, ROWS).store(_as_number(gl.load(at), KIND))


@gluon.jit
def _store_heads(
    ptr, value, row, rows, HEAD: gl.constexpr, BY_HEAD: gl.constexpr, LD: gl.constexpr,
    WARPS: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """[rows, D] to [D / HEAD, rows, HEAD] where BY_HEAD, or to rows LD apart."""
    if BY_HEAD:
        c = _column_numbers(value.shape[1], WARPS, KIND)
        at = ((c // HEAD).to(row.dtype) * rows.to(row.dtype))[None, :] + row[:, None]
        at = ptr + (at * HEAD + (c % HEAD)[None, :])
        gl.store(at, value.to(ptr.dtype.element_ty), mask=(row < rows)[:, None])
    else:
        _store_rows(ptr, value, row, rows, 0, LD, WARPS, KIND)


@gluon.jit(do_not_specialize=["rows", "per_part"])
def _project_warpgroup_kernel(
    x_ptr, norm_w, norm_b, wq, wk, wv, bq, bk, bv, qkv_ptr, ds_ptr, wo, do_ptr, w1, w2, ready, rows, eps, per_part,
    D: gl.constexpr, F: gl.constexpr, HEAD: gl.constexpr, BY_HEAD: gl.constexpr, NORM: gl.constexpr,
    STACKED: gl.constexpr, BIASES: gl.constexpr, BACKWARD: gl.constexpr, TURN: gl.constexpr, KIND: gl.constexpr,
    INDEX: gl.constexpr, SIDE: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    # Programs keep one of the weights of q, k and v and walk over rows. In the backward there is a fourth, for
    # do = ds Wo. In a forward the last programs prepare the weights for other launches, where these want that.
    started(EARLY)
    PARTS: gl.constexpr = 4 if BACKWARD else 3
    BM: gl.constexpr = 16 * WARPS
    program = gl.program_id(0)
    part = program % PARTS
    first = program // PARTS
    if first >= per_part:
        if ready is not None:
            _prepare(program - per_part * PARTS, wq, wk, wv, wo, w1, w2, ready, D, F, STACKED, TURN, SIDE, WARPS, KIND)
    else:
        slot = gl.allocate_shared_memory(KIND, [D, D], _shared_layout(D, D, KIND))
        # not in registers, which are wanted
        vectors = gl.allocate_shared_memory(gl.float32, [3, D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        tiles = (rows + BM - 1) // BM
        if part < 3:
            _ask_for_rows(x_ptr, first * BM, rows, D, WARPS, INDEX)
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
                to = qkv_ptr + part * rows.to(INDEX) * D
            else:
                to = qkv_ptr + part * D
            for tile in range(first, tiles, per_part):
                row = _row_numbers(tile * BM, D, WARPS, KIND, INDEX)
                x = _load_rows(x_ptr, row, rows, 0, D, D, WARPS, KIND).to(gl.float32)
                _ask_for_rows(x_ptr, (tile + per_part) * BM, rows, D, WARPS, INDEX)
                if NORM != "":
                    mean, deviation = _statistics(x, row < rows, eps, D, NORM)
                    x = _normalized(x, mean, deviation, NORM)
                if norm_w is not None:
                    x = x * _kept_vector(vectors.index(0), D, WARPS, KIND)
                if norm_b is not None:
                    x = x + _kept_vector(vectors.index(1), D, WARPS, KIND)
                acc = gl.zeros([BM, D], gl.float32, _rows_layout(D, WARPS, KIND))
                acc = warpgroup_mma(
                    _operand(x, D, WARPS, KIND), slot.permute((1, 0)), acc, use_acc=False, is_async=True
                )  # fmt: skip
                acc = warpgroup_mma_wait(0, deps=[acc])
                if BIASES:
                    acc += _kept_vector(vectors.index(2), D, WARPS, KIND)
                _store_heads(to, acc, row, rows, HEAD, BY_HEAD, 3 * D, WARPS, KIND)
        elif BACKWARD:
            _ask_for_rows(ds_ptr, first * BM, rows, D, WARPS, INDEX)
            _keep_weight(slot, wo, D, KIND == gl.float32, WARPS, KIND)
            fence_async_shared()
            tl.debug_barrier()
            right = slot
            if KIND == gl.float32:  # which wants both operands along the sum
                right = slot.permute((1, 0))
            for tile in range(first, tiles, per_part):
                row = _row_numbers(tile * BM, D, WARPS, KIND, INDEX)
                ds = _load_rows(ds_ptr, row, rows, 0, D, D, WARPS, KIND)
                _ask_for_rows(ds_ptr, (tile + per_part) * BM, rows, D, WARPS, INDEX)
                acc = gl.zeros([BM, D], gl.float32, _rows_layout(D, WARPS, KIND))
                acc = warpgroup_mma(_operand(ds, D, WARPS, KIND), right, acc, use_acc=False, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[acc])
                _store_heads(do_ptr, acc, row, rows, HEAD, BY_HEAD, D, WARPS, KIND)


@gluon.jit
def _fetch_feedforward(
    slots, stage, w1, w2, f, D: gl.constexpr, F: gl.constexpr, BF: gl.constexpr, WARPS: gl.constexpr, KIND: gl.constexpr
):
    """The blocks of both weights for BF features from f on, if there are so many."""
    if f < F:
        _fetch(slots.index(2 * stage), w1, f, 0, D, WARPS, KIND)
        _fetch(_columns_slot(slots.index(2 * stage + 1), D, BF, KIND), w2, 0, f, F, WARPS, KIND)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["rows"])
def _feedforward_warpgroup_kernel(
    x_ptr, o_ptr, wo, bo, w1, b1, w2, b2, norm_w, norm_b, last_w, last_b, y_ptr, sum_ptr, rows, eps,
    D: gl.constexpr, F: gl.constexpr, NORM: gl.constexpr, NORM_FIRST: gl.constexpr, ACT: gl.constexpr,
    KIND: gl.constexpr, INDEX: gl.constexpr, BF: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    # s = x + o Wo + bo; u = norm(s); y = s + act(u W1 + b1) W2 + b2, or with the norm last, y = norm(u + ...).
    started(EARLY)
    BM: gl.constexpr = 16 * WARPS
    row = _row_numbers(gl.program_id(0) * BM, D, WARPS, KIND, INDEX)
    slots = gl.allocate_shared_memory(KIND, [2 * STAGES, BF, D], _shared_layout(BF, D, KIND))
    if KIND == gl.float32:
        tile = gl.allocate_shared_memory(KIND, [BM, D], _TILE)
        _fetch_rows(tile, x_ptr, gl.program_id(0) * BM, rows, D, WARPS, INDEX)
        y = _attended(o_ptr, wo, bo, row, rows, slots, D, WARPS, KIND)
        y += _rows_in(tile, row < rows, WARPS)
        tl.debug_barrier()
    else:
        _ask_for_rows(x_ptr, gl.program_id(0) * BM, rows, D, WARPS, INDEX)
        y = _attended(o_ptr, wo, bo, row, rows, slots, D, WARPS, KIND)
        y += _load_rows(x_ptr, row, rows, 0, D, D, WARPS, KIND).to(gl.float32)
    for i in gl.static_range(STAGES - 1):
        _fetch_feedforward(slots, i, w1, w2, i * BF, D, F, BF, WARPS, KIND)
    normed = _normed(y, row < rows, eps, norm_w, norm_b, D, NORM, WARPS, KIND)
    u = _operand(normed, BF, WARPS, KIND)
    if not NORM_FIRST:
        y = normed
    if b2 is not None:
        y += _vector(b2, 0, D, WARPS, KIND)
    if KIND == gl.float32:  # tensor cores round sums toward zero: y would shrink with every few features
        tile.store(y)
        y = gl.zeros([BM, D], gl.float32, _rows_layout(D, WARPS, KIND))
    for block in range(F // BF):
        _arrived(STAGES - 2)
        ahead = block + STAGES - 1
        _fetch_feedforward(slots, ahead % STAGES, w1, w2, ahead * BF, D, F, BF, WARPS, KIND)
        stage = block % STAGES * 2
        z = gl.zeros([BM, BF], gl.float32, _rows_layout(BF, WARPS, KIND))
        z = warpgroup_mma(u, slots.index(stage).permute((1, 0)), z, use_acc=False, is_async=True)
        z = warpgroup_mma_wait(0, deps=[z])
        if b1 is not None:
            z += _vector(b1, block * BF, BF, WARPS, KIND)
        weight = _columns_slot(slots.index(stage + 1), D, BF, KIND)
        y = warpgroup_mma(_operand(ACT(z, False), D, WARPS, KIND), weight.permute((1, 0)), y, is_async=True)
        y = warpgroup_mma_wait(0, deps=[y])
    if KIND == gl.float32:
        y += tile.load(_rows_layout(D, WARPS, KIND))
    if not NORM_FIRST:
        if sum_ptr is not None:
            _store_rows(sum_ptr, y, row, rows, 0, D, WARPS, KIND)
        y = _normed(y, row < rows, eps, last_w, last_b, D, NORM, WARPS, KIND)
    _store_rows(y_ptr, y, row, rows, 0, D, WARPS, KIND)


@gluon.jit
def _fetch_feedforward_backward(
    slots, stage, w1, w1_turned, w2_turned, f, D: gl.constexpr, F: gl.constexpr, BF: gl.constexpr, WARPS: gl.constexpr
):
    """Rows f .. f + BF - 1 of linear1 and linear2's transpose, these columns of linear1's; if there are so many."""
    if f < F:
        _fetch(slots.index(3 * stage), w1, f, 0, D, WARPS, gl.float32)
        _fetch(slots.index(3 * stage + 1), w2_turned, f, 0, D, WARPS, gl.float32)
        _fetch(_columns_slot(slots.index(3 * stage + 2), D, BF, gl.float32), w1_turned, 0, f, F, WARPS, gl.float32)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["rows"])
def _feedforward_backward_warpgroup_kernel(
    x_ptr, o_ptr, wo, bo, w1, b1, w1_turned, w2_turned, norm_w, norm_b, last_w, dy_ptr, sum_ptr,
    u_ptr, act_ptr, dz_ptr, dlast_ptr, ds_ptr, norm_sums, dlast_turned, rows, eps, ld,
    D: gl.constexpr, F: gl.constexpr, NORM: gl.constexpr, NORM_FIRST: gl.constexpr, TURNED: gl.constexpr,
    ACT: gl.constexpr, ACT_GRAD: gl.constexpr, INDEX: gl.constexpr, BF: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    # From dy to ds, the gradient of s = x + o Wo + bo; u = norm(s), act(z) and dz go to the weights' gradients.
    started(EARLY)
    BM: gl.constexpr = 16 * WARPS
    KIND: gl.constexpr = gl.float32
    row = _row_numbers(gl.program_id(0) * BM, D, WARPS, KIND, INDEX)
    row_k = _row_numbers(gl.program_id(0) * BM, BF, WARPS, KIND, INDEX)
    slots = gl.allocate_shared_memory(KIND, [3 * STAGES, BF, D], _shared_layout(BF, D, KIND))
    tile = gl.allocate_shared_memory(KIND, [BM, D], _TILE)
    _fetch_rows(tile, x_ptr, gl.program_id(0) * BM, rows, D, WARPS, INDEX)
    _ask_for_rows(dy_ptr, gl.program_id(0) * BM, rows, D, WARPS, INDEX)
    s = _attended(o_ptr, wo, bo, row, rows, slots, D, WARPS, KIND)
    s += _rows_in(tile, row < rows, WARPS)
    tl.debug_barrier()
    tile.store(s)  # until the norm's gradient
    for i in gl.static_range(STAGES - 1):
        _fetch_feedforward_backward(slots, i, w1, w1_turned, w2_turned, i * BF, D, F, BF, WARPS)
    mean, deviation = _statistics(s, row < rows, eps, D, NORM)
    normed = _scaled(_normalized(s, mean, deviation, NORM), norm_w, norm_b, D, WARPS, KIND)
    _store_grad_operand(u_ptr, normed, row, rows, 0, _anew(ld), D, TURNED, WARPS, KIND)
    u = _operand(normed, BF, WARPS, KIND)
    dlast = _load_rows(dy_ptr, row, rows, 0, D, D, WARPS, KIND).to(gl.float32)
    if not NORM_FIRST:
        total = _load_rows(sum_ptr, row, rows, 0, D, D, WARPS, KIND).to(gl.float32)
        last_mean, last_deviation = _statistics(total, row < rows, eps, D, NORM)
        total = _normalized(total, last_mean, last_deviation, NORM)
        dlast = _norm_backward(dlast, total, last_deviation, last_w, norm_sums, 2, rows, D, NORM, WARPS, KIND)
        _store_rows(dlast_ptr, dlast, row, rows, 0, D, WARPS, KIND)
    _store_sum(norm_sums, 4, dlast, rows, D, WARPS)  # linear2's bias, here and exactly: torch rounds nothing of it
    if TURNED:
        _store_grad_operand(dlast_turned, dlast, row, rows, 0, _anew(ld), D, TURNED, WARPS, KIND)
    d = _operand(dlast, BF, WARPS, KIND)
    du = gl.zeros([BM, D], gl.float32, _rows_layout(D, WARPS, KIND))
    for block in range(F // BF):
        _arrived(STAGES - 2)
        ahead = block + STAGES - 1
        _fetch_feedforward_backward(slots, ahead % STAGES, w1, w1_turned, w2_turned, ahead * BF, D, F, BF, WARPS)
        stage = block % STAGES * 3
        z = gl.zeros([BM, BF], gl.float32, _rows_layout(BF, WARPS, KIND))
        dz = gl.zeros([BM, BF], gl.float32, _rows_layout(BF, WARPS, KIND))
        z = warpgroup_mma(u, slots.index(stage).permute((1, 0)), z, use_acc=False, is_async=True)
        dz = warpgroup_mma(d, slots.index(stage + 1).permute((1, 0)), dz, use_acc=False, is_async=True)
        z = warpgroup_mma_wait(1, deps=[z])
        if b1 is not None:
            z += _vector(b1, block * BF, BF, WARPS, KIND)
        _store_grad_operand(act_ptr, ACT(z, False), row_k, rows, block * BF, _anew(ld), F, TURNED, WARPS, KIND)
        slope = ACT_GRAD(z, False)
        dz = warpgroup_mma_wait(0, deps=[dz])
        dz = dz * slope
        weight = _columns_slot(slots.index(stage + 2), D, BF, KIND)
        du = warpgroup_mma(_operand(dz, D, WARPS, KIND), weight.permute((1, 0)), du, is_async=True)
        _store_grad_operand(dz_ptr, dz, row_k, rows, block * BF, _anew(ld), F, TURNED, WARPS, KIND)
        du = warpgroup_mma_wait(0, deps=[du])
    xhat = _normalized(tile.load(_rows_layout(D, WARPS, KIND)), mean, deviation, NORM)
    if NORM_FIRST:
        ds = _norm_backward(du, xhat, deviation, norm_w, norm_sums, 2, rows, D, NORM, WARPS, KIND)
        ds += _load_rows(dy_ptr, row, rows, 0, D, D, WARPS, KIND).to(gl.float32)
    else:
        du += _load_rows(dlast_ptr, row, rows, 0, D, D, WARPS, KIND).to(gl.float32)
        ds = _norm_backward(du, xhat, deviation, norm_w, norm_sums, 0, rows, D, NORM, WARPS, KIND)
    _store_rows(ds_ptr, ds, row, rows, 0, D, WARPS, KIND)


@gluon.jit
def _fetch_input_grad(
    slot, tile, w_turned, dqkv_ptr, first, rows, k, ld,
    D: gl.constexpr, BF: gl.constexpr, TURNED: gl.constexpr, WARPS: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Columns k .. k + BF - 1 of in_proj's transpose, and of the gradients of q, k and v; if there are so many."""
    layout: gl.constexpr = _copy_layout(WARPS, gl.float32)
    if k < 3 * D:
        _fetch(_columns_slot(slot, D, BF, gl.float32), w_turned, 0, k, 3 * D, WARPS, gl.float32)
        if TURNED:
            c = (k + gl.arange(0, BF, gl.SliceLayout(1, layout))).to(INDEX)[:, None]
            r = (first + gl.arange(0, 16 * WARPS, gl.SliceLayout(0, layout))).to(INDEX)[None, :]
            async_copy.async_copy_global_to_shared(tile, dqkv_ptr + (c * ld + r), mask=r < ld)
        else:
            r = (first + gl.arange(0, 16 * WARPS, gl.SliceLayout(1, layout))).to(INDEX)[:, None]
            c = k + gl.arange(0, BF, gl.SliceLayout(0, layout))[None, :]
            async_copy.async_copy_global_to_shared(tile, dqkv_ptr + (r * (3 * D) + c), mask=r < rows)
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["rows"])
def _input_grad_warpgroup_kernel(
    x_ptr, norm_w, norm_b, in_proj_turned, dqkv_ptr, ds_ptr, n_ptr, dx_ptr, norm_sums, o_ptr, ds_turned, o_turned,
    rows, eps, ld,
    D: gl.constexpr, NORM: gl.constexpr, TURNED: gl.constexpr, INDEX: gl.constexpr, BF: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    # dx = ds + (dq Wq + dk Wk + dv Wv) through the norm of x, which is written for the weights' gradients.
    started(EARLY)
    BM: gl.constexpr = 16 * WARPS
    KIND: gl.constexpr = gl.float32
    first = gl.program_id(0) * BM
    row = _row_numbers(first, D, WARPS, KIND, INDEX)
    live = row < rows
    slots = gl.allocate_shared_memory(KIND, [STAGES, BF, D], _shared_layout(BF, D, KIND))
    if TURNED:
        grads = gl.allocate_shared_memory(KIND, [STAGES, BF, BM], _TURNED_TILE)
    else:
        grads = gl.allocate_shared_memory(KIND, [STAGES, BM, BF], _NARROW_TILE)
    for i in gl.static_range(STAGES - 1):
        _fetch_input_grad(
            slots.index(i), grads.index(i), in_proj_turned, dqkv_ptr, first, rows, i * BF, ld,
            D, BF, TURNED, WARPS, INDEX,
        )  # fmt: skip
    dx = gl.zeros([BM, D], gl.float32, _rows_layout(D, WARPS, KIND))
    for block in range(3 * D // BF):
        _arrived(STAGES - 2)
        ahead = block + STAGES - 1
        stage = ahead % STAGES
        _fetch_input_grad(
            slots.index(stage), grads.index(stage), in_proj_turned, dqkv_ptr, first, rows, ahead * BF, ld,
            D, BF, TURNED, WARPS, INDEX,
        )  # fmt: skip
        grad = grads.index(block % STAGES)
        if TURNED:
            grad = grad.permute((1, 0))
        weight = _columns_slot(slots.index(block % STAGES), D, BF, KIND)
        left = _operand(grad.load(_rows_layout(BF, WARPS, KIND)), D, WARPS, KIND)
        dx = warpgroup_mma(left, weight.permute((1, 0)), dx, is_async=True)
        dx = warpgroup_mma_wait(0, deps=[dx])
    dx = gl.where(live[:, None], dx, 0.0)  # what is beyond the last row was not fetched
    tl.debug_barrier()
    gl.static_assert(STAGES * BF >= 2 * BM, "two tiles of rows shall fit")
    gl.static_assert(STAGES * BF >= D, "a tile of rows shall fit")
    tiles = slots._reinterpret(KIND, [2, BM, D], _TILE)
    _fetch_rows(tiles.index(0), x_ptr, first, rows, D, WARPS, INDEX)
    _fetch_rows(tiles.index(1), ds_ptr, first, rows, D, WARPS, INDEX)
    if TURNED:
        last = grads._reinterpret(KIND, [BM, D], _TILE)
        _fetch_rows(last, o_ptr, first, rows, D, WARPS, INDEX)
    _arrived(2 if TURNED else 1)
    n = _rows_in(tiles.index(0), live, WARPS)
    if NORM != "":
        mean, deviation = _statistics(n, live, eps, D, NORM)
        n = _normalized(n, mean, deviation, NORM)
        dx = _norm_backward(dx, n, deviation, norm_w, norm_sums, 0, rows, D, NORM, WARPS, KIND)
        n = _scaled(n, norm_w, norm_b, D, WARPS, KIND)
    if n_ptr is not None:
        _store_grad_operand(n_ptr, n, row, rows, 0, _anew(ld), D, TURNED, WARPS, KIND)
    _arrived(0)
    ds = _rows_in(tiles.index(1), live, WARPS)
    _store_sum(norm_sums, 5, ds, rows, D, WARPS)  # out_proj's bias, here and exactly
    _store_rows(dx_ptr, dx + ds, row, rows, 0, D, WARPS, KIND)
    if TURNED:
        _store_grad_operand(ds_turned, ds, row, rows, 0, _anew(ld), D, TURNED, WARPS, KIND)
        o = _rows_in(last, live, WARPS)
        _store_grad_operand(o_turned, o, row, rows, 0, _anew(ld), D, TURNED, WARPS, KIND)


def describe_project_warpgroup(
    layer: Layer, config: WalkConfig, eps: float, walkers: int, biases: bool, backward: bool, turn: bool
) -> Launch:
    """Of x, norm1, the weights of q, k and v, their biases, qkv, ds, out_proj, do, linear1, linear2 and ready.

    turn: whether the transposes are prepared too, for a backward.
    """
    programs = walkers * (4 if backward else 3)
    if layer.ready and not backward:
        across, down = layer.d_model // _SIDE, layer.dim_feedforward // _SIDE
        programs += across * across * (4 if turn else 1) + 2 * across * down
    constants = {
        "D": layer.d_model,
        "F": layer.dim_feedforward,
        "HEAD": layer.head,
        "BY_HEAD": layer.by_head,
        "NORM": layer.norm if layer.norm_first else "",
        "STACKED": layer.stacked,
        "BIASES": biases,
        "BACKWARD": backward,
        "TURN": turn,
        **_numbers(layer),
        "SIDE": _SIDE,
        "WARPS": config.warps,
        "EARLY": layer.early,
    }
    return Launch(_project_warpgroup_kernel, programs, (layer.rows, eps, walkers), constants, _options(layer, config))


def describe_feedforward_warpgroup(layer: Layer, config: WarpgroupConfig, eps: float) -> Launch:
    """Of x, o, out_proj, linear1, linear2 and both norms, weight and bias each; y, and the sum before the last norm."""
    constants = _feedforward(layer) | {
        "ACT": getattr(device, layer.activation),
        **_numbers(layer),
        **_blocks(layer, config),
    }
    scalars = (layer.rows, eps)
    return Launch(_feedforward_warpgroup_kernel, config.programs(layer), scalars, constants, _options(layer, config))


def describe_feedforward_backward_warpgroup(layer: Layer, config: WarpgroupConfig, eps: float) -> Launch:
    """In TF32, of x, o, out_proj's weight and bias, linear1's, linear1 and linear2 turned, the first norm's weight and
    bias, the last norm's weight, dy, the sum before the last norm; to u, act(z), dz, dlast, ds, the sums and dlast's
    transpose.
    """
    constants = _feedforward(layer) | {
        "TURNED": layer.turned,
        "ACT": getattr(device, layer.activation),
        "ACT_GRAD": getattr(device, f"{layer.activation}_derivative"),
        "INDEX": _index(layer),
        **_blocks(layer, config),
    }
    scalars = (layer.rows, eps, layer.ld)
    return Launch(
        _feedforward_backward_warpgroup_kernel, config.programs(layer), scalars, constants, _options(layer, config)
    )


def describe_input_grad_warpgroup(layer: Layer, config: WarpgroupConfig, eps: float) -> Launch:
    """In TF32, of x, norm1's weight and bias, in_proj turned, dqkv, ds; to the norm of x, dx and the sums; of o; to ds
    and o turned."""
    constants = {
        "D": layer.d_model,
        "NORM": layer.norm if layer.norm_first else "",
        "TURNED": layer.turned,
        "INDEX": _index(layer),
        **_blocks(layer, config),
    }
    scalars = (layer.rows, eps, layer.ld)
    return Launch(_input_grad_warpgroup_kernel, config.programs(layer), scalars, constants, _options(layer, config))


def _feedforward(layer: Layer) -> dict[str, object]:
    sizes = {"D": layer.d_model, "F": layer.dim_feedforward}
    return sizes | {"NORM": layer.norm, "NORM_FIRST": layer.norm_first}


def _numbers(layer: Layer) -> dict[str, object]:
    return {"KIND": TYPES[layer.operand], "INDEX": _index(layer)}


def _index(layer: Layer) -> object:
    return gl.int64 if layer.wide else gl.int32


def _blocks(layer: Layer, config: WarpgroupConfig) -> dict[str, object]:
    return {"BF": config.block, "STAGES": config.stages, "WARPS": config.warps, "EARLY": layer.early}


def _options(layer: Layer, config: WalkConfig | WarpgroupConfig) -> dict[str, object]:
    early = {"launch_pdl": True} if layer.early else {}
    return {"num_warps": config.warps, "enable_fp_fusion": False} | early
