"""Weight gradients of narrow layers in TF32: by fragments, from row-major operands.

A warp adds up 32 x 32 elements of left^T right over one chunk of rows, eight rows at a time. Lane 4 r + c reads columns
4 r .. 4 r + 3 of rows c and c + 4: sixteen bytes that are, for k = c and k = c + 4, one value each of rows r and r + 8
of two products [16, 8] on the left, and column r of four on the right.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.kernels import start_launch
from isogemm.encoder.attention.kernels.lanes import floats, instruction, load_four, operand, row_sum, store_four
from isogemm.encoder.kernels.chunk_sums import add_tiles

SIDE = 32  # of a warp's tile
_SIDE = tl.constexpr(SIDE)


@triton.jit
def _load(ptr, row, end, column, COLUMNS, LAST):
    """Four columns of rows `row` and `row + 4`, as floats; zeros beyond the columns, and with LAST beyond the end."""
    inside = column < COLUMNS
    at = ptr + tl.minimum(column, COLUMNS - 4)
    made = ()
    for i in tl.static_range(2):
        here = row + 4 * i
        four = floats(load_four(at + tl.minimum(here, end - 1) * COLUMNS), ptr.dtype.element_ty)
        kept = inside & (here < end) if LAST else inside
        for e in tl.static_range(4):
            made = made + (tl.where(kept, four[e], 0.0),)
    return made


@triton.jit
def _multiplied(acc, left, right):
    """acc + left^T right of eight rows. acc: four products [16, 8] for even and odd pairs of left's columns each."""
    a = operand(left, tl.float32)
    b = operand(right, tl.float32)
    made = ()
    for m in tl.static_range(2):
        for n in tl.static_range(4):
            c = acc[4 * m + n]
            c = instruction(
                c[0], c[1], c[2], c[3], a[2 * m], a[2 * m + 1], a[2 * m + 4], a[2 * m + 5], b[n], b[n + 4], tl.float32
            )  # fmt: skip
            made = made + (c,)
    return made


@triton.jit
def _added_columns(sums, left):
    made = ()
    for e in tl.static_range(4):
        made = made + (sums[e] + (left[e] + left[e + 4]),)
    return made


@triton.jit
def _chunk_product(left_ptr, right_ptr, weight, bias, item, start, rows, M, N, CHUNK, SUMS, BLOCK):
    """Tile `item` (a lane's own) of a chunk's left^T right, and the sums of left's columns."""
    COLS: tl.constexpr = (N + _SIDE - 1) // _SIDE
    TILES: tl.constexpr = (M + _SIDE - 1) // _SIDE * COLS
    index = tl.arange(0, BLOCK)
    r = index % 32 // 4
    c = index % 4
    live = item < TILES
    item = tl.minimum(item, TILES - 1)
    m = item // COLS * _SIDE + 4 * r
    n = item % COLS * _SIDE
    end = tl.minimum(start + CHUNK, rows)
    full = start + (end - start) // 8 * 8
    zero = tl.zeros([BLOCK], tl.float32)
    acc = ((zero,) * 4,) * 8
    sums = (zero,) * 4
    left = _load(left_ptr, start + c, end, m, M, False)
    right = _load(right_ptr, start + c, end, n + 4 * r, N, False)
    for k in tl.range(start, full, 8):
        next_left = _load(left_ptr, k + 8 + c, end, m, M, False)  # loaded while these are multiplied
        next_right = _load(right_ptr, k + 8 + c, end, n + 4 * r, N, False)
        acc = _multiplied(acc, left, right)
        if SUMS:
            sums = _added_columns(sums, left)
        left = next_left
        right = next_right
    if full < end:
        left = _load(left_ptr, full + c, end, m, M, True)
        right = _load(right_ptr, full + c, end, n + 4 * r, N, True)
        acc = _multiplied(acc, left, right)
        if SUMS:
            sums = _added_columns(sums, left)
    for i in tl.static_range(2):
        for half in tl.static_range(2):  # rows r and r + 8 of a product are two neighbours of left's columns
            row = m + (2 * i + half)
            for odd in tl.static_range(2):  # columns 2 c and 2 c + 1 of four products are four of right's each
                column = n + 4 * odd + 8 * c
                four = ()
                for e in tl.static_range(4):
                    four = four + (acc[4 * i + e][2 * half + odd],)
                store_four(weight + (row * N + column), four, live & (row < M) & (column < N))
    if SUMS:
        four = [row_sum(each) for each in sums]
        store_four(bias + m, four, live & (m < M) & (n == 0) & (c == 0))


@triton.jit(do_not_specialize=["rows"])
def _weight_grads_rows_kernel(
    left0, right0, left1, right1, norm_sums, partials, rows, weight0, bias0, weight1, norms,
    M0: tl.constexpr, N0: tl.constexpr, M1: tl.constexpr, N1: tl.constexpr, PROGRAMS0: tl.constexpr,
    PROGRAMS1: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, TILES: tl.constexpr,
    TILES_P: tl.constexpr, ADDED: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # A program's warps add up tiles of left0^T right0 or of left1^T right1 over one chunk of rows, and left0's columns.
    # One program per chunk adds up the sums that its TILES tiles left for the norms' and biases' gradients.
    start_launch(PDL)
    PER: tl.constexpr = PROGRAMS0 + PROGRAMS1 + 1
    program = tl.program_id(0)
    chunk = program // PER
    group = program % PER
    to = partials + chunk.to(tl.int64) * SIZE
    start = (chunk * CHUNK).to(INDEX)
    warp = tl.arange(0, BLOCK) // 32
    if group < PROGRAMS0:
        item = group * (BLOCK // 32) + warp
        _chunk_product(left0, right0, to + weight0, to + bias0, item, start, rows, M0, N0, CHUNK, True, BLOCK)
    elif group < PROGRAMS0 + PROGRAMS1:
        item = (group - PROGRAMS0) * (BLOCK // 32) + warp
        _chunk_product(left1, right1, to + weight1, to, item, start, rows, M1, N1, CHUNK, False, BLOCK)
    else:
        add_tiles(norm_sums, to + norms, chunk, rows, D, CHUNK, TILES, TILES_P, ADDED)


KERNELS = {"weight_grads": _weight_grads_rows_kernel}
