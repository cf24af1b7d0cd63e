"""Row kernels by Hopper's warpgroups: a warpgroup owns 64 rows from the first product to the last.

A product's left operand is in registers (all but one, for which there is no room). Weights come through shared memory,
a block being copied while others are multiplied. A lane holds columns 2 c and 2 c + 1 of every eight in a result. The
next product in 16 bits takes them like this. TF32 takes the same registers for columns c and c + 4, so every eight
columns of a weight are packed in the order 0, 2, 4, 6, 1, 3, 5, 7, and nothing moves between lanes.

A row's bits depend on its own values alone. Sums over rows are over 64.
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

from isogemm.encoder.kernels.common import scale_of_kept

# Gluon builtins that Triton 3.9 renames: an asynchronous copy from global to shared memory, and a view of shared memory
# with another shape and layout.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_Shared = gl.shared_memory_descriptor
reinterpret = getattr(_Shared, "reinterpret", None) or _Shared._reinterpret


@gluon.constexpr_function
def rows_layout(columns, warps, kind):
    """Layout of a product's result [16 * warps, columns]."""
    depth = 8 if kind == gl.float32 else 16
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, depth])


@gluon.constexpr_function
def operand_layout(columns, warps, kind):
    """Layout of the left operand of a product with so many columns."""
    return gl.DotOperandLayout(0, rows_layout(columns, warps, kind), 1 if kind == gl.float32 else 2)


@gluon.constexpr_function
def copy_layout(warps, kind):
    return gl.BlockedLayout([1, 128 // kind.primitive_bitwidth], [4, 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def shared_layout(rows, columns, kind):
    return gl.NVMMASharedLayout.get_default_for([rows, columns], kind)


# Layout of a tile that is read as a product's rows: no bank conflicts.
TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


# operands


@gluon.jit
def rounded(x):
    return gl.inline_asm_elementwise("cvt.rn.tf32.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def as_number(x, KIND):
    """x as an operand: rounded to TF32, or cast to 16 bits."""
    if KIND == gl.float32:
        return rounded(x.to(gl.float32))
    else:
        return x.to(KIND)


@gluon.jit
def in_order(x, KIND):
    """Rows x as a left operand, with columns in the packed weights' order."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    x = as_number(x, KIND)
    if KIND == gl.float32:
        x = gl.permute(gl.reshape(x, [ROWS, COLUMNS // 8, 4, 2]), (0, 1, 3, 2))
        x = gl.reshape(x, [ROWS, COLUMNS])
    return x


@gluon.jit
def operand(x, N, WARPS, KIND):
    """A product's result x as the left operand of a product with N columns, without moving data."""
    return gl.convert_layout(in_order(x, KIND), operand_layout(N, WARPS, KIND), assert_trivial=True)


# rows


@gluon.jit
def row_numbers(first, COLUMNS, WARPS, KIND, INDEX):
    """Numbers of a program's rows, for tiles of so many columns."""
    layout: gl.constexpr = gl.SliceLayout(1, rows_layout(COLUMNS, WARPS, KIND))
    return (first + gl.arange(0, 16 * WARPS, layout)).to(INDEX)


@gluon.jit
def column_numbers(COLUMNS, WARPS, KIND):
    return gl.arange(0, COLUMNS, gl.SliceLayout(0, rows_layout(COLUMNS, WARPS, KIND)))


@gluon.jit
def load_rows(ptr, row, rows, column, COLUMNS, LD, WARPS, KIND):
    """Columns column .. column + COLUMNS - 1 of rows LD apart, zeros beyond the last."""
    c = column + column_numbers(COLUMNS, WARPS, KIND)
    return gl.load(ptr + (row[:, None] * LD + c[None, :]), mask=(row < rows)[:, None], other=0.0)


@gluon.jit
def store_rows(ptr, value, row, rows, column, LD, WARPS, KIND):
    c = column + column_numbers(value.shape[1], WARPS, KIND)
    at = ptr + (row[:, None] * LD + c[None, :])
    gl.store(at, value.to(ptr.dtype.element_ty), mask=(row < rows)[:, None])


@gluon.jit
def prefetch_rows(ptr, first, rows, LD, WARPS, INDEX):
    """Prefetch a program's rows to the L2 cache."""
    LINE: gl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth  # 128 bytes
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    line = gl.arange(0, 16 * WARPS * LD // LINE, layout)
    at = first.to(INDEX) * LD + line * LINE
    at = ptr + gl.minimum(at, rows.to(INDEX) * LD - 1)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def vector(ptr, first, COLUMNS, WARPS, KIND):
    """Elements first .. first + COLUMNS - 1, for every row."""
    return gl.load(ptr + (first + column_numbers(COLUMNS, WARPS, KIND))).to(gl.float32)[None, :]


# norms


@gluon.jit
def statistics(x, live, eps, D, NORM):
    """Each row's mean (0 for RMSNorm) and 1 / deviation, [rows, 1] each; 0 for the latter beyond the last row."""
    if NORM == "layer_norm":
        mean = gl.sum(x, axis=1)[:, None] * (1.0 / D)
        x = x - mean
    else:
        mean = gl.sum(x, axis=1)[:, None] * 0.0
    deviation = 1.0 / gl.sqrt_rn(gl.sum(x * x, axis=1)[:, None] * (1.0 / D) + eps)
    return mean, gl.where(live[:, None], deviation, 0.0)


@gluon.jit
def normalized(x, mean, deviation, NORM):
    if NORM == "layer_norm":
        x = x - mean
    return x * deviation


@gluon.jit
def scaled(xhat, g_ptr, b_ptr, D, WARPS, KIND):
    """A norm of normalized rows."""
    if g_ptr is not None:
        xhat = xhat * vector(g_ptr, 0, D, WARPS, KIND)
    if b_ptr is not None:
        xhat = xhat + vector(b_ptr, 0, D, WARPS, KIND)
    return xhat


@gluon.jit
def batch_normed(x, statistics_ptr, b_ptr, D, WARPS, KIND):
    """The batch norm of rows, by the mean and the scale of its statistics [4, D]."""
    xhat = (x - vector(statistics_ptr, 0, D, WARPS, KIND)) * vector(statistics_ptr, 2 * D, D, WARPS, KIND)
    return scaled(xhat, None, b_ptr, D, WARPS, KIND)


# dropout


@gluon.jit
def keeping(seed, row, column, COLUMNS, DROPPED, WARPS, KIND):
    """Dropout's factors of columns from `column`, a multiple of 16, on; the same as `tiles.ops.dropout`'s.

    A lane holds the columns of one call of the generator, which the compiler makes once.
    """
    c = (column + column_numbers(COLUMNS, WARPS, KIND))[None, :]
    zero = (row.to(gl.int32)[:, None] + c) * 0
    w0, w1, w2, w3 = tl.philox(seed, (c >> 5 << 2) + (c >> 1 & 3) + zero, row.to(gl.int32)[:, None] + zero, zero, zero)
    which = (c >> 3 & 3) + zero
    word = gl.where(which < 2, gl.where(which == 0, w0, w1), gl.where(which == 2, w2, w3))
    bits = gl.where((c & 1) + zero == 1, word >> 16, word & 0xFFFF)
    return gl.where(bits.to(gl.int32) >= DROPPED, scale_of_kept(DROPPED), 0.0)


# copies to shared memory


@gluon.jit
def allocate_blocks(ROWS, COLUMNS, KIND, STAGES=1):
    """Shared memory for STAGES blocks of a product's operand."""
    return gl.allocate_shared_memory(KIND, [STAGES, ROWS, COLUMNS], shared_layout(ROWS, COLUMNS, KIND))


@gluon.jit
def stage_of(f, rows, BF, STAGES=1):
    """Slot of the block of features from f on.

    Hides from the compiler that it is often 0: it would keep all addresses in registers, from block to block."""
    return f // BF % STAGES + ((f + rows) >> 31)


@gluon.jit
def fetch(slot, ptr, row, column, LD, WARPS, KIND):
    """Start to copy the weight's block at (row, column), of the slot's shape."""
    layout: gl.constexpr = copy_layout(WARPS, KIND)
    r = row + gl.arange(0, slot.shape[0], gl.SliceLayout(1, layout))
    c = column + gl.arange(0, slot.shape[1], gl.SliceLayout(0, layout))
    async_load(slot, ptr + (r[:, None] * LD + c[None, :]))


@gluon.jit
def fetch_block(places, place, ptr, row, column, LD, there, WARPS, KIND):
    """Start to copy the weight's block at (row, column), if there is one."""
    if there:
        fetch(places.index(place), ptr, row, column, LD, WARPS, KIND)
    async_copy.commit_group()


@gluon.jit
def fetch_rows(tile, ptr, first, rows, LD, WARPS, INDEX):
    """Start to copy a program's float32 rows."""
    layout: gl.constexpr = copy_layout(WARPS, gl.float32)
    r = (first + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))).to(INDEX)
    c = gl.arange(0, tile.shape[1], gl.SliceLayout(0, layout))
    at = ptr + (r[:, None] * LD + c[None, :])
    async_load(tile, at, mask=(r < rows)[:, None])
    async_copy.commit_group()


@gluon.jit
def rows_in(tile, live, WARPS):
    """The rows that `fetch_rows` fetched, zeros where not live."""
    value = tile.load(rows_layout(tile.shape[1], WARPS, gl.float32))
    return gl.where(live[:, None], value, 0.0)


@gluon.jit
def wait_for_copies(LATER):
    """Wait for all copies except the last LATER groups, and for all warps."""
    async_copy.wait_group(LATER)
    fence_async_shared()
    tl.debug_barrier()


@gluon.jit
def product(a, b, N, WARPS, KIND):
    """a b, which has N columns."""
    acc = gl.zeros([16 * WARPS, N], gl.float32, rows_layout(N, WARPS, KIND))
    acc = warpgroup_mma(a, b, acc, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def plus_product(acc, a, b):
    """acc + a b."""
    acc = warpgroup_mma(a, b, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def attended(o_ptr, wo, bo, row, rows, D, WARPS, KIND):
    """o Wo + bo. Waits for all copies."""
    weight = gl.allocate_shared_memory(KIND, [D, D], shared_layout(D, D, KIND))
    fetch(weight, wo, 0, 0, D, WARPS, KIND)
    async_copy.commit_group()
    o = operand(load_rows(o_ptr, row, rows, 0, D, D, WARPS, KIND), D, WARPS, KIND)
    wait_for_copies(0)
    s = product(o, weight.permute((1, 0)), D, WARPS, KIND)
    tl.debug_barrier()  # before the weight's memory is reused
    if bo is not None:
        s += vector(bo, 0, D, WARPS, KIND)
    return s
