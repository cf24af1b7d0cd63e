"""The row kernels of layers that fragments hold: a warp owns sixteen rows from the first product to the last.

What a warp does depends on its own rows alone, in an order that no tile and no launch changes. The weights come
prepared (`prepare`): rounded or cast, and each block of 16 x 16 in the order in which lanes read it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.launch import Launch
from isogemm.encoder.configs import FRAGMENT_ROWS, Layer, projected_parts
from isogemm.encoder.kernels_forward import (
    ACTIVATION,
    OUTPUT,
    PROJECTION,
    TYPES,
    feedforward_sizes,
    in_proj,
    index_type,
    overlapping,
    prepare,
    projected_at,
    residual_of,
    scale_of_kept,
    started,
)
from isogemm.encoder.kernels_forward import operand as as_operand
from isogemm.encoder.kernels_fragments import (
    across,
    column_sum,
    floats,
    load_four,
    load_prepared,
    load_weights,
    loaded_operand,
    multiply,
    operand,
    prepared_place,
    row_sum,
    store_four,
    weight_row,
    zero_block,
    zero_blocks,
)
from isogemm.epilogues import device, random
from isogemm.gemm.kernels import round_by_instruction

_SIDE = 32  # of a tile of weights that one program prepares
_MOST_REGISTERS = 128  # with which a multiprocessor holds two programs of eight warps

# rows


@triton.jit
def _place(first_program, rows, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    """A lane's row and column in fragments; its two rows; whether they are there; the same, the last for any beyond."""
    index = tl.arange(0, BLOCK)
    r = index % 32 // 4
    upper = ((first_program * (BLOCK // 32) + index // 32) * 16 + r).to(INDEX)
    lower = upper + 8
    inside = tl.minimum(upper, rows - 1), tl.minimum(lower, rows - 1)
    return r, index % 4, (upper, lower), (upper < rows, lower < rows), inside


@triton.jit
def _load_rows(ptr, at, c, LD: tl.constexpr, COLUMNS: tl.constexpr, NATIVE: tl.constexpr):
    """Both rows as blocks of floats."""
    KIND: tl.constexpr = ptr.dtype.element_ty
    upper = ptr + (at[0] * LD + 4 * c)
    lower = ptr + (at[1] * LD + 4 * c)
    made = ()
    for i in tl.static_range(0, COLUMNS, 16):
        above = floats(load_four(upper + i, NATIVE), KIND, NATIVE)
        made = made + (above + floats(load_four(lower + i, NATIVE), KIND, NATIVE),)
    return made


@triton.jit
def _load_operands(ptr, at, c, LD: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Both rows as operands."""
    FROM: tl.constexpr = ptr.dtype.element_ty
    upper = ptr + (at[0] * LD + 4 * c)
    lower = ptr + (at[1] * LD + 4 * c)
    made = ()
    for i in tl.static_range(0, COLUMNS, 16):
        above = loaded_operand(load_four(upper + i, NATIVE), FROM, KIND, NATIVE)
        made = made + (above + loaded_operand(load_four(lower + i, NATIVE), FROM, KIND, NATIVE),)
    return made


@triton.jit
def _store_block(ptr, block, at, live, c, column, LD: tl.constexpr, NATIVE: tl.constexpr):
    store_four(ptr + (at[0] * LD + column + 4 * c), block[0:4], live[0], NATIVE)
    store_four(ptr + (at[1] * LD + column + 4 * c), block[4:8], live[1], NATIVE)


@triton.jit
def _rounded(values):
    made = ()
    for i in tl.static_range(len(values)):
        made = made + (round_by_instruction(values[i]),)
    return made


@triton.jit
def _store_heads(
    ptr, block, at, live, c, column, rows, D: tl.constexpr, HEAD: tl.constexpr, BY_HEAD: tl.constexpr,
    LD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Of [rows, D] to [D / HEAD, rows, HEAD] where BY_HEAD, as attention's operands, or to rows LD apart."""
    if BY_HEAD:
        if ptr.dtype.element_ty == tl.float32:
            block = _rounded(block)
        tl.static_assert(HEAD % 4 == 0, "a lane's four columns shall be one head's")
        column += 4 * c
        of_head = (column // HEAD).to(rows.dtype) * rows
        for i in tl.static_range(2):
            to = ptr + ((of_head + at[i]) * HEAD + column % HEAD)
            store_four(to, block[4 * i : 4 * i + 4], live[i], NATIVE)
    else:
        _store_block(ptr, block, at, live, c, column, LD, NATIVE)


@triton.jit
def _store_rows(ptr, blocks, at, live, c, LD: tl.constexpr, NATIVE: tl.constexpr):
    for i in tl.static_range(len(blocks)):
        _store_block(ptr, blocks[i], at, live, c, 16 * i, LD, NATIVE)


@triton.jit
def _columns_of(ptr, c, column, NATIVE: tl.constexpr):
    """Four elements of a vector, for each of both rows."""
    four = floats(load_four(ptr + (column + 4 * c), NATIVE), ptr.dtype.element_ty, NATIVE)
    return four + four


@triton.jit
def _sum(a, b):
    made = ()
    for i in tl.static_range(len(a)):
        made = made + (a[i] + b[i],)
    return made


@triton.jit
def _sums(a, b):
    made = ()
    for i in tl.static_range(len(a)):
        made = made + (_sum(a[i], b[i]),)
    return made


@triton.jit
def _product(a, b):
    made = ()
    for i in tl.static_range(len(a)):
        made = made + (a[i] * b[i],)
    return made


@triton.jit
def _operands(blocks, KIND: tl.constexpr, NATIVE: tl.constexpr):
    made = ()
    for i in tl.static_range(len(blocks)):
        made = made + (operand(blocks[i], KIND, NATIVE),)
    return made


@triton.jit
def _plus_vector(blocks, ptr, c, NATIVE: tl.constexpr):
    made = ()
    for i in tl.static_range(len(blocks)):
        made = made + (_sum(blocks[i], _columns_of(ptr, c, 16 * i, NATIVE)),)
    return made


@triton.jit
def _only_live(blocks, live):
    """Zeros in rows that are not there."""
    made = ()
    for i in tl.static_range(len(blocks)):
        block = ()
        for e in tl.static_range(8):
            block = block + (tl.where(live[e // 4], blocks[i][e], 0.0),)
        made = made + (block,)
    return made


@triton.jit
def _four_sum(block, first: tl.constexpr):
    return (block[first] + block[first + 1]) + (block[first + 2] + block[first + 3])


@triton.jit
def _row_sums(blocks, NATIVE: tl.constexpr):
    """Of each of both rows, over all columns."""
    upper = _four_sum(blocks[0], 0)
    lower = _four_sum(blocks[0], 4)
    for i in tl.static_range(1, len(blocks)):
        upper += _four_sum(blocks[i], 0)
        lower += _four_sum(blocks[i], 4)
    return row_sum(upper, NATIVE), row_sum(lower, NATIVE)


# norms


@triton.jit
def _statistics(x, eps, D: tl.constexpr, NORM: tl.constexpr, NATIVE: tl.constexpr):
    """Each row's mean (0 for RMSNorm) and 1 / deviation."""
    if NORM == "layer_norm":
        upper, lower = _row_sums(x, NATIVE)
        mean = (upper * (1.0 / D), lower * (1.0 / D))
    else:
        mean = (tl.zeros_like(x[0][0]), tl.zeros_like(x[0][0]))
    squares = ()
    for i in tl.static_range(len(x)):
        block = ()
        for e in tl.static_range(8):
            away = x[i][e] - mean[e // 4]
            block = block + (away * away,)
        squares = squares + (block,)
    upper, lower = _row_sums(squares, NATIVE)
    return mean, (1.0 / tl.sqrt_rn(upper * (1.0 / D) + eps), 1.0 / tl.sqrt_rn(lower * (1.0 / D) + eps))


@triton.jit
def _normalized(block, mean, deviation):
    made = ()
    for e in tl.static_range(8):
        made = made + ((block[e] - mean[e // 4]) * deviation[e // 4],)
    return made


@triton.jit
def _normed_block(block, mean, deviation, g_ptr, b_ptr, c, column, NATIVE: tl.constexpr):
    block = _normalized(block, mean, deviation)
    if g_ptr is not None:
        block = _product(block, _columns_of(g_ptr, c, column, NATIVE))
    if b_ptr is not None:
        block = _sum(block, _columns_of(b_ptr, c, column, NATIVE))
    return block


@triton.jit
def _normed(x, mean, deviation, g_ptr, b_ptr, c, NATIVE: tl.constexpr):
    """The norm of rows x with these statistics."""
    made = ()
    for i in tl.static_range(len(x)):
        made = made + (_normed_block(x[i], mean, deviation, g_ptr, b_ptr, c, 16 * i, NATIVE),)
    return made


@triton.jit
def _batch_normed(x, statistics, b_ptr, c, D: tl.constexpr, NATIVE: tl.constexpr):
    """The batch norm of rows x, of its statistics [4, D]: of which the mean and the scale are read."""
    made = ()
    for i in tl.static_range(len(x)):
        mean = _columns_of(statistics, c, 16 * i, NATIVE)
        scale = _columns_of(statistics + 2 * D, c, 16 * i, NATIVE)
        block = ()
        for e in tl.static_range(8):
            block = block + ((x[i][e] - mean[e]) * scale[e],)
        if b_ptr is not None:
            block = _sum(block, _columns_of(b_ptr, c, 16 * i, NATIVE))
        made = made + (block,)
    return made


@triton.jit
def _place_of_sums(norm_sums, r, c, live, D: tl.constexpr, BLOCK: tl.constexpr):
    """Where a warp's sums [6, D] go, at a lane's columns; and whether the lane is one that writes them."""
    tile = tl.program_id(0) * (BLOCK // 32) + tl.arange(0, BLOCK) // 32
    return norm_sums + (tile.to(tl.int64) * (6 * D) + 4 * c), (r == 0) & live[0]


@triton.jit
def _store_sum(at, block, column, leads, NATIVE: tl.constexpr):
    """The warp's sum of a block's columns, to its place in one of the [6, D] sums; leads: whether this lane writes."""
    sums = ()
    for e in tl.static_range(4):
        sums = sums + (column_sum(block[e] + block[e + 4], NATIVE),)
    store_four(at + column, sums, leads, NATIVE)


@triton.jit
def _norm_backward(
    dn, x, mean, deviation, g_ptr, sums, which: tl.constexpr, leads, c,
    D: tl.constexpr, NORM: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The gradient of a norm's input x; the warp's part in those of its scale and shift: sums which, which + 1."""
    upper_along = tl.zeros_like(mean[0])
    lower_along = tl.zeros_like(mean[0])
    upper_away = tl.zeros_like(mean[0])
    lower_away = tl.zeros_like(mean[0])
    xhat = ()
    scaled = ()
    for i in tl.static_range(len(x)):  # block by block: the registers are wanted
        normal = _normalized(x[i], mean, deviation)
        _store_sum(sums + (which + 1) * D, dn[i], 16 * i, leads, NATIVE)
        _store_sum(sums + which * D, _product(dn[i], normal), 16 * i, leads, NATIVE)
        block = dn[i]
        if g_ptr is not None:
            block = _product(block, _columns_of(g_ptr, c, 16 * i, NATIVE))
        along = _product(block, normal)
        upper_along += _four_sum(along, 0)
        lower_along += _four_sum(along, 4)
        if NORM == "layer_norm":
            upper_away += _four_sum(block, 0)
            lower_away += _four_sum(block, 4)
        xhat = xhat + (normal,)
        scaled = scaled + (block,)
    along = (row_sum(upper_along, NATIVE) * (1.0 / D), row_sum(lower_along, NATIVE) * (1.0 / D))
    away = (row_sum(upper_away, NATIVE) * (1.0 / D), row_sum(lower_away, NATIVE) * (1.0 / D))
    made = ()
    for i in tl.static_range(len(x)):
        block = ()
        for e in tl.static_range(8):
            rest = scaled[i][e] - away[e // 4] - xhat[i][e] * along[e // 4]
            block = block + (rest * deviation[e // 4],)
        made = made + (block,)
    return made


# dropout


@triton.jit
def _random_words(seed, row, group, c, NATIVE: tl.constexpr):
    """Of 32 columns of a row, the generator's words for a lane's four in the first sixteen, and for its four in the
    others: two words each, for two columns each.

    Two calls have the words of this lane and of the lane across, which make one each.
    """
    zero = (row * 0).to(tl.int32)
    w0, w1, w2, w3 = tl.philox(seed, 4 * group + c % 2 * 2 + c // 2 + zero, row.to(tl.int32), zero, zero)
    second = c >= 2
    made = ()
    for words in tl.static_range(2):
        low, high = (w0, w1) if words == 0 else (w2, w3)
        own = tl.where(second, high, low)
        other = across(tl.where(second, low, high), NATIVE)
        made = made + ((tl.where(second, other, own), tl.where(second, own, other)),)
    return made


@triton.jit
def _words_of_rows(seed, at, group, c, NATIVE: tl.constexpr):
    """Of 32 columns, a block's words and the next one's."""
    upper = _random_words(seed, at[0], group, c, NATIVE)
    lower = _random_words(seed, at[1], group, c, NATIVE)
    return upper[0] + lower[0], upper[1] + lower[1]


@triton.jit
def _no_words(BLOCK: tl.constexpr):
    zero = tl.zeros([BLOCK], tl.uint32)
    return zero, zero, zero, zero


@triton.jit
def _keeping(words, DROPPED: tl.constexpr):
    """What dropout multiplies a block with, as `epilogues.random` has it."""
    made = ()
    for e in tl.static_range(8):
        bits = words[e // 2] >> 16 if e % 2 else words[e // 2] & 0xFFFF
        made = made + (tl.where(bits >= DROPPED, scale_of_kept(DROPPED), 0.0),)
    return made


@triton.jit
def _dropout(blocks, seed_ptr, PLACE: tl.constexpr, at, c, DROPPED: tl.constexpr, NATIVE: tl.constexpr):
    """Of whole rows, at most 32 columns."""
    words = _words_of_rows(tl.load(seed_ptr) + PLACE, at, 0, c, NATIVE)
    made = ()
    for i in tl.static_range(len(blocks)):
        made = made + (_product(blocks[i], _keeping(words[i], DROPPED)),)
    return made


# products with prepared weights


@triton.jit
def _times_block(a, w, lane, first, K: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """One block of columns of a W^T; first: the block's place among the weight's, K columns deep."""
    acc = zero_block(BLOCK)
    for i in tl.static_range(len(a)):
        acc = multiply(acc, a[i], load_prepared(w + (first * (K // 16) + i) * 256, lane, KIND, NATIVE), KIND, NATIVE)
    return acc


@triton.jit
def _with_block(acc, a, w, lane, k, K: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """acc + a W^T for a block a of k, all columns of the result."""
    made = ()
    for j in tl.static_range(len(acc)):
        made = made + (
            multiply(acc[j], a, load_prepared(w + (j * (K // 16) + k) * 256, lane, KIND, NATIVE), KIND, NATIVE),
        )
    return made


@triton.jit
def _projected(
    o_ptr, wo, bo, at, c, lane, D: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr
):
    """o Wo + bo."""
    o = _load_operands(o_ptr, at, c, D, D, KIND, NATIVE)
    s = ()
    for j in tl.static_range(D // 16):
        s = s + (_times_block(o, wo, lane, j, D, BLOCK, KIND, NATIVE),)
    if bo is not None:
        s = _plus_vector(s, bo, c, NATIVE)
    return s


@triton.jit
def _attended(
    x_ptr, o_ptr, wo, bo, at, c, lane, D: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr
):
    """x + o Wo + bo, or without o, x."""
    if o_ptr is None:
        return _load_rows(x_ptr, at, c, D, D, NATIVE)
    else:
        s = _projected(o_ptr, wo, bo, at, c, lane, D, KIND, BLOCK, NATIVE)
        return _sums(s, _load_rows(x_ptr, at, c, D, D, NATIVE))


# the launches


@triton.jit
def _prepare_tile(
    w, straight, turned, r, c, first, ROWS: tl.constexpr, COLS: tl.constexpr, LD: tl.constexpr, SIDE: tl.constexpr,
    STRAIGHT: tl.constexpr, TURN: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n = r + tl.arange(0, SIDE)[:, None]
    k = c + tl.arange(0, SIDE)[None, :]
    live = (n < ROWS) & (k < COLS)
    tile = as_operand(tl.load(w + (n * COLS + k), mask=live, other=0.0), KIND, PRECISION)
    if STRAIGHT:
        tl.store(straight + prepared_place(n, k, COLS, KIND), tile, mask=live)
    if TURN:
        tl.store(turned + prepared_place(k, first + n, LD, KIND), tile, mask=live)


@triton.jit(do_not_specialize=["rows", "row_programs"])
def _project_rows_kernel(
    x_ptr, norm_w, norm_b, wq, wk, wv, bq, bk, bv, qkv_ptr, ds_ptr, wo, do_ptr, w1, w2, ready, v_ptr,
    rows, eps, row_programs,
    D: tl.constexpr, F: tl.constexpr, HEAD: tl.constexpr, BY_HEAD: tl.constexpr, NORM: tl.constexpr,
    STACKED: tl.constexpr, BIASES: tl.constexpr, FIRST: tl.constexpr, BACKWARD: tl.constexpr, TURN: tl.constexpr,
    SPLIT: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, INDEX: tl.constexpr, SIDE: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # q, k and v of a program's rows, from FIRST on, or with SPLIT one of them; in the backward others compute
    # do = ds Wo. In the forward the last programs prepare the weights for the other launches.
    started(EARLY)
    program = tl.program_id(0)
    PARTS: tl.constexpr = 3 - FIRST if SPLIT else 1
    if program < row_programs * PARTS:
        _project(
            program // PARTS, FIRST + program % PARTS, x_ptr, norm_w, norm_b, wq, wk, wv, bq, bk, bv, qkv_ptr, v_ptr,
            rows, eps, D, HEAD, BY_HEAD, NORM, STACKED, BIASES, FIRST, BACKWARD, SPLIT, KIND, NATIVE, INDEX, BLOCK,
        )  # fmt: skip
    else:
        program -= row_programs * PARTS
        if BACKWARD:
            r, c, at, live, inside = _place(program, rows, INDEX, BLOCK)
            ds = _load_operands(ds_ptr, inside, c, D, D, KIND, NATIVE)
            for j in tl.range(0, D // 16):
                acc = _times_block(ds, wo, 4 * r + c, j, D, BLOCK, KIND, NATIVE)
                _store_heads(do_ptr, acc, at, live, c, 16 * j, rows.to(INDEX), D, HEAD, BY_HEAD, D, NATIVE)
        else:
            prepare(
                program, wq, wk, wv, wo, w1, w2, ready, _prepare_tile, D, F, SIDE, STACKED, True, TURN, KIND,
                "tf32" if KIND == tl.float32 else "",
            )  # fmt: skip


@triton.jit
def _project(
    program, first_part, x_ptr, norm_w, norm_b, wq, wk, wv, bq, bk, bv, qkv_ptr, v_ptr, rows, eps,
    D: tl.constexpr, HEAD: tl.constexpr, BY_HEAD: tl.constexpr, NORM: tl.constexpr, STACKED: tl.constexpr,
    BIASES: tl.constexpr, FIRST: tl.constexpr, BACKWARD: tl.constexpr, SPLIT: tl.constexpr, KIND: tl.constexpr,
    NATIVE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r, c, at, live, inside = _place(program, rows, INDEX, BLOCK)
    x = _load_rows(x_ptr, inside, c, D, D, NATIVE)
    if NORM != "":
        mean, deviation = _statistics(x, eps, D, NORM, NATIVE)
        x = _normed(x, mean, deviation, norm_w, norm_b, c, NATIVE)
    n = _operands(x, KIND, NATIVE)
    for part in tl.range(first_part, first_part + 1 if SPLIT else 3):
        w = in_proj(wq, wk, wv, part, D * D, STACKED or BACKWARD)
        if BIASES:
            b = in_proj(bq, bk, bv, part, D, STACKED)
        for j in tl.range(0, D // 16):
            if BACKWARD:
                acc = _times_block(n, w, 4 * r + c, j, D, BLOCK, KIND, NATIVE)
            else:
                acc = zero_block(BLOCK)
                from_row = w + ((16 * j + weight_row(r)) * D + 4 * c)
                for i in tl.static_range(len(n)):
                    acc = multiply(acc, n[i], load_weights(from_row + 16 * i, D, KIND, NATIVE), KIND, NATIVE)
            if BIASES:
                acc = _sum(acc, _columns_of(b, c, 16 * j, NATIVE))
            if BY_HEAD:
                to = projected_at(qkv_ptr, v_ptr, part, rows.to(INDEX) * D, FIRST)
                _store_heads(to, acc, at, live, c, 16 * j, rows.to(INDEX), D, HEAD, BY_HEAD, 3 * D, NATIVE)
            else:
                _store_block(qkv_ptr, acc, at, live, c, part * D + 16 * j, 3 * D, NATIVE)


@triton.jit(do_not_specialize=["rows"])
def _out_project_rows_kernel(
    x_ptr, o_ptr, wo, bo, norm_w, norm_b, seed_ptr, s_ptr, rows, eps,
    D: tl.constexpr, NORM: tl.constexpr, DROPPED: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr,
    INDEX: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # s = x + dropout(o Wo + bo), or norm(x) + ...
    started(EARLY)
    r, c, at, live, inside = _place(tl.program_id(0), rows, INDEX, BLOCK)
    s = _projected(o_ptr, wo, bo, inside, c, 4 * r + c, D, KIND, BLOCK, NATIVE)
    if DROPPED > 0:
        s = _dropout(s, seed_ptr, PROJECTION, at, c, DROPPED, NATIVE)
    x = _load_rows(x_ptr, inside, c, D, D, NATIVE)
    if NORM != "":
        mean, deviation = _statistics(x, eps, D, NORM, NATIVE)
        x = _normed(x, mean, deviation, norm_w, norm_b, c, NATIVE)
    _store_rows(s_ptr, _sums(s, x), at, live, c, D, NATIVE)


@triton.jit(do_not_specialize=["rows"])
def _feedforward_rows_kernel(
    x_ptr, o_ptr, wo, bo, w1, b1, w2, b2, norm_w, norm_b, last_w, last_b, y_ptr, sum_ptr, seed_ptr, rows, eps,
    D: tl.constexpr, F: tl.constexpr, NORM: tl.constexpr, NORM_LAST: tl.constexpr, RESIDUAL_NORMED: tl.constexpr,
    HIDDEN_DROPPED: tl.constexpr, DROPPED: tl.constexpr, ACT: tl.constexpr, EXACT: tl.constexpr, KIND: tl.constexpr,
    NATIVE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # s = x + o Wo + bo, or without o, x; u = norm(s); y = s + dropout(act(u W1 + b1)) W2 + b2, with RESIDUAL_NORMED
    # y = u + ..., and with NORM_LAST the norm of that.
    started(EARLY)
    r, c, at, live, inside = _place(tl.program_id(0), rows, INDEX, BLOCK)
    lane = 4 * r + c
    y = _attended(x_ptr, o_ptr, wo, bo, inside, c, lane, D, KIND, BLOCK, NATIVE)
    if NORM == "batch_norm":
        normed = _batch_normed(y, norm_w, norm_b, c, D, NATIVE)
    else:
        mean, deviation = _statistics(y, eps, D, NORM, NATIVE)
        normed = _normed(y, mean, deviation, norm_w, norm_b, c, NATIVE)
    u = _operands(normed, KIND, NATIVE)
    if RESIDUAL_NORMED:
        y = normed
    if DROPPED == 0:
        if b2 is not None:
            y = _plus_vector(y, b2, c, NATIVE)
    if HIDDEN_DROPPED > 0:
        seed = tl.load(seed_ptr) + ACTIVATION
        later = _no_words(BLOCK)
    acc = zero_blocks(D // 16, BLOCK)  # not y: tensor cores round sums toward zero, it would shrink with every block
    for f in tl.range(0, F // 16):
        tl.debug_barrier()  # warps that stay together find the weights in the cache
        if HIDDEN_DROPPED > 0:
            if f % 2 == 0:
                words, later = _words_of_rows(seed, at, f // 2, c, NATIVE)
            else:
                words = later
        z = _times_block(u, w1, lane, f, D, BLOCK, KIND, NATIVE)
        if b1 is not None:
            z = _sum(z, _columns_of(b1, c, 16 * f, NATIVE))
        active = ()
        for e in tl.static_range(8):
            active = active + (ACT(z[e], EXACT),)
        if HIDDEN_DROPPED > 0:
            active = _product(active, _keeping(words, HIDDEN_DROPPED))
        acc = _with_block(acc, operand(active, KIND, NATIVE), w2, lane, f, F, KIND, NATIVE)
    if DROPPED > 0:
        if b2 is not None:
            acc = _plus_vector(acc, b2, c, NATIVE)
        acc = _dropout(acc, seed_ptr, OUTPUT, at, c, DROPPED, NATIVE)
    y = _sums(y, acc)
    if NORM_LAST:
        if sum_ptr is not None:
            _store_rows(sum_ptr, y, at, live, c, D, NATIVE)
        mean, deviation = _statistics(y, eps, D, NORM, NATIVE)
        y = _normed(y, mean, deviation, last_w, last_b, c, NATIVE)
    _store_rows(y_ptr, y, at, live, c, D, NATIVE)


@triton.jit(do_not_specialize=["rows"])
def _feedforward_backward_rows_kernel(
    x_ptr, o_ptr, wo, bo, w1, b1, w1_turned, w2_turned, norm_w, norm_b, last_w, dy_ptr, sum_ptr,
    u_ptr, act_ptr, dz_ptr, dlast_ptr, ds_ptr, norm_sums, seed_ptr, left_ptr, rows, eps,
    D: tl.constexpr, F: tl.constexpr, NORM: tl.constexpr, NORM_LAST: tl.constexpr, RESIDUAL_NORMED: tl.constexpr,
    HIDDEN_DROPPED: tl.constexpr, DROPPED: tl.constexpr, ACT: tl.constexpr, ACT_GRAD: tl.constexpr,
    EXACT: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # From dy to ds, the gradient of s = x + o Wo + bo, or without o, of x; where the norm is a batch norm, to the
    # gradient of its result u. u = norm(s), act(z), dz and what dropout leaves of dlast are for the weights' gradients.
    started(EARLY)
    r, c, at, live, inside = _place(tl.program_id(0), rows, INDEX, BLOCK)
    lane = 4 * r + c
    sums, leads = _place_of_sums(norm_sums, r, c, live, D, BLOCK)
    s = _attended(x_ptr, o_ptr, wo, bo, inside, c, lane, D, KIND, BLOCK, NATIVE)
    if NORM == "batch_norm":
        normed = _batch_normed(s, norm_w, norm_b, c, D, NATIVE)
    else:
        mean, deviation = _statistics(s, eps, D, NORM, NATIVE)
        if o_ptr is not None:
            _store_rows(ds_ptr, s, at, live, c, D, NATIVE)  # parked there until the norm's gradient
        normed = _normed(s, mean, deviation, norm_w, norm_b, c, NATIVE)
    _store_rows(u_ptr, normed, at, live, c, D, NATIVE)
    u = _operands(normed, KIND, NATIVE)
    dlast = _only_live(_load_rows(dy_ptr, inside, c, D, D, NATIVE), live)
    if NORM_LAST:
        total = _load_rows(sum_ptr, inside, c, D, D, NATIVE)
        last_mean, last_deviation = _statistics(total, eps, D, NORM, NATIVE)
        dlast = _norm_backward(
            dlast, total, last_mean, last_deviation, last_w, sums, 2, leads, c, D, NORM, NATIVE
        )  # fmt: skip
        _store_rows(dlast_ptr, dlast, at, live, c, D, NATIVE)
    if DROPPED > 0:
        dlast = _dropout(dlast, seed_ptr, OUTPUT, at, c, DROPPED, NATIVE)
        _store_rows(left_ptr, dlast, at, live, c, D, NATIVE)
    for i in tl.static_range(D // 16):  # linear2's bias, here and exactly: torch rounds none of it
        _store_sum(sums + 4 * D, dlast[i], 16 * i, leads, NATIVE)
    d_operand = _operands(dlast, KIND, NATIVE)
    if HIDDEN_DROPPED > 0:
        seed = tl.load(seed_ptr) + ACTIVATION
        later = _no_words(BLOCK)
    du = zero_blocks(D // 16, BLOCK)
    for f in tl.range(0, F // 16):
        tl.debug_barrier()  # warps that stay together find the weights in the cache
        if HIDDEN_DROPPED > 0:
            if f % 2 == 0:
                words, later = _words_of_rows(seed, at, f // 2, c, NATIVE)
            else:
                words = later
        z = _times_block(u, w1, lane, f, D, BLOCK, KIND, NATIVE)
        dz = _times_block(d_operand, w2_turned, lane, f, D, BLOCK, KIND, NATIVE)
        if b1 is not None:
            z = _sum(z, _columns_of(b1, c, 16 * f, NATIVE))
        active = ()
        slope = ()
        for e in tl.static_range(8):
            active = active + (ACT(z[e], EXACT),)
            slope = slope + (dz[e] * ACT_GRAD(z[e], EXACT),)
        if HIDDEN_DROPPED > 0:
            kept = _keeping(words, HIDDEN_DROPPED)
            active = _product(active, kept)
            slope = _product(slope, kept)
        _store_block(act_ptr, active, at, live, c, 16 * f, F, NATIVE)
        _store_block(dz_ptr, slope, at, live, c, 16 * f, F, NATIVE)
        du = _with_block(du, operand(slope, KIND, NATIVE), w1_turned, lane, f, F, KIND, NATIVE)
    if NORM == "batch_norm":
        ds = du
        if RESIDUAL_NORMED:
            ds = _sums(ds, _load_rows(dy_ptr, inside, c, D, D, NATIVE))
    else:
        if o_ptr is None:
            s = _only_live(_load_rows(x_ptr, inside, c, D, D, NATIVE), live)
        else:
            s = _only_live(_load_rows(ds_ptr, inside, c, D, D, NATIVE), live)
        if NORM_LAST:
            du = _sums(du, _only_live(_load_rows(dlast_ptr, inside, c, D, D, NATIVE), live))
        elif RESIDUAL_NORMED:
            du = _sums(du, _only_live(_load_rows(dy_ptr, inside, c, D, D, NATIVE), live))
        WHICH: tl.constexpr = 0 if NORM_LAST else 2
        ds = _norm_backward(du, s, mean, deviation, norm_w, sums, WHICH, leads, c, D, NORM, NATIVE)
        if not RESIDUAL_NORMED:
            ds = _sums(ds, _load_rows(dy_ptr, inside, c, D, D, NATIVE))
    _store_rows(ds_ptr, ds, at, live, c, D, NATIVE)


@triton.jit(do_not_specialize=["rows"])
def _input_grad_rows_kernel(
    x_ptr, norm_w, norm_b, in_proj_turned, dqkv_ptr, ds_ptr, n_ptr, dx_ptr, norm_sums, residual_ptr, rows, eps,
    D: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr,
    INDEX: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # dx = ds + (dq Wq + dk Wk + dv Wv) through the norm of x, which is written for the weights' gradients. Where ds is
    # what dropout left, the residual's gradient is another; RESIDUAL: whether it goes "around" the norm, "through" it,
    # or is added elsewhere.
    started(EARLY)
    r, c, at, live, inside = _place(tl.program_id(0), rows, INDEX, BLOCK)
    lane = 4 * r + c
    sums, leads = _place_of_sums(norm_sums, r, c, live, D, BLOCK)
    FROM: tl.constexpr = dqkv_ptr.dtype.element_ty
    upper = dqkv_ptr + (inside[0] * (3 * D) + 4 * c)
    lower = dqkv_ptr + (inside[1] * (3 * D) + 4 * c)
    dn = zero_blocks(D // 16, BLOCK)
    for k in tl.range(0, 3 * D // 16):
        tl.debug_barrier()  # warps that stay together find the weights in the cache
        above = loaded_operand(load_four(upper + 16 * k, NATIVE), FROM, KIND, NATIVE)
        grad = above + loaded_operand(load_four(lower + 16 * k, NATIVE), FROM, KIND, NATIVE)
        dn = _with_block(dn, grad, in_proj_turned, lane, k, 3 * D, KIND, NATIVE)
    dn = _only_live(dn, live)
    if NORM != "":
        x = _load_rows(x_ptr, inside, c, D, D, NATIVE)
        mean, deviation = _statistics(x, eps, D, NORM, NATIVE)
        for i in tl.static_range(D // 16):
            normed = _normed_block(x[i], mean, deviation, norm_w, norm_b, c, 16 * i, NATIVE)
            _store_block(n_ptr, normed, at, live, c, 16 * i, D, NATIVE)
        if RESIDUAL == "through":
            residual = _load_rows(ds_ptr if residual_ptr is None else residual_ptr, inside, c, D, D, NATIVE)
            dn = _sums(dn, _only_live(residual, live))
        dn = _norm_backward(dn, x, mean, deviation, norm_w, sums, 0, leads, c, D, NORM, NATIVE)
    for i in tl.static_range(D // 16):
        ds = _only_live(_load_rows(ds_ptr + 16 * i, inside, c, D, 16, NATIVE), live)
        _store_sum(sums + 5 * D, ds[0], 16 * i, leads, NATIVE)  # out_proj's bias, here and exactly
        dx = dn[i]
        if RESIDUAL == "around" or (RESIDUAL == "through" and NORM == ""):
            if residual_ptr is not None:
                ds = _load_rows(residual_ptr + 16 * i, inside, c, D, 16, NATIVE)
            dx = _sum(dx, ds[0])
        _store_block(dx_ptr, dx, at, live, c, 16 * i, D, NATIVE)


def describe_project_rows(
    layer: Layer, warps: int, eps: float, biases: bool, backward: bool, turn: bool, split: bool
) -> Launch:
    """Of x, norm1, the weights of q, k and v, their biases, qkv, ds, out_proj, do, linear1, linear2, ready, and v where
    it is no part of qkv.

    turn: whether the transposes are prepared too, for a backward; split: whether programs take one of q, k and v.
    """
    first, row_programs = projected_parts(layer, backward)[0], _row_programs(layer, warps)
    programs = row_programs * (3 - first if split else 1)
    if backward:
        programs += row_programs
    else:
        across, down = -(-layer.d_model // _SIDE), -(-layer.dim_feedforward // _SIDE)
        programs += across * across * (4 if turn else 1) + 2 * across * down
    constants = {
        "D": layer.d_model,
        "F": layer.dim_feedforward,
        "HEAD": layer.head,
        "BY_HEAD": layer.by_head,
        "NORM": layer.row_norm,
        "STACKED": layer.stacked,
        "BIASES": biases,
        "FIRST": first,
        "BACKWARD": backward,
        "TURN": turn,
        "SPLIT": split,
        **_numbers(layer),
        "SIDE": _SIDE,
        **_launch(layer, warps),
    }
    scalars = (layer.rows, eps, row_programs)
    return Launch(_project_rows_kernel, programs, scalars, constants, _options(layer, warps))


def describe_out_project_rows(layer: Layer, warps: int, eps: float) -> Launch:
    """Of the residual (x, or what is normed here), o, out_proj, that norm's weight and bias, and the seed; s."""
    constants = {
        "D": layer.d_model,
        "NORM": layer.row_norm if layer.residual_normed else "",
        "DROPPED": random.threshold(layer.dropout.projection),
        **_numbers(layer),
        **_launch(layer, warps),
    }
    programs = _row_programs(layer, warps)
    return Launch(_out_project_rows_kernel, programs, (layer.rows, eps), constants, _options(layer, warps))


def describe_feedforward_rows(layer: Layer, warps: int, eps: float) -> Launch:
    """Of x, o, out_proj, linear1, linear2 and both norms, weight and bias each; y, and the sum before the last norm;
    the seed. A batch norm's weight is its statistics; without o, x is s."""
    constants = {
        **feedforward_sizes(layer),
        "ACT": getattr(device, layer.activation),
        "EXACT": layer.exact,
        **_numbers(layer),
        **_launch(layer, warps),
    }
    programs = _row_programs(layer, warps)
    return Launch(_feedforward_rows_kernel, programs, (layer.rows, eps), constants, _options(layer, warps))


def describe_feedforward_backward_rows(layer: Layer, warps: int, eps: float) -> Launch:
    """Of x, o, out_proj's weight and bias, linear1's, linear1 and linear2 turned, the first norm's weight and bias, the
    last norm's weight, dy, the sum before the last norm; to u, act(z), dz, dlast, ds and the sums; the seed, and what
    dropout leaves of dlast. A batch norm's weight is its statistics; without o, x is s.
    """
    constants = {
        **feedforward_sizes(layer),
        "ACT": getattr(device, layer.activation),
        "ACT_GRAD": getattr(device, f"{layer.activation}_derivative"),
        "EXACT": layer.exact,
        **_numbers(layer),
        **_launch(layer, warps),
    }
    options = _options(layer, warps)
    if layer.dropout.activation and layer.precision == "tf32" and layer.d_model == 32:
        options["maxnreg"] = _MOST_REGISTERS  # up to four values wait in memory while the loop runs
    programs = _row_programs(layer, warps)
    return Launch(_feedforward_backward_rows_kernel, programs, (layer.rows, eps), constants, options)


def describe_input_grad_rows(layer: Layer, warps: int, eps: float) -> Launch:
    """Of x, norm1's weight and bias, in_proj turned, dqkv, ds; to the norm of x, dx and the sums; of the residual's
    gradient, where it is not ds."""
    constants = {
        "D": layer.d_model,
        "NORM": layer.row_norm,
        "RESIDUAL": residual_of(layer),
        **_numbers(layer),
        **_launch(layer, warps),
    }
    programs = _row_programs(layer, warps)
    return Launch(_input_grad_rows_kernel, programs, (layer.rows, eps), constants, _options(layer, warps))


def _row_programs(layer: Layer, warps: int) -> int:
    return -(-layer.rows // (FRAGMENT_ROWS * warps))


def _numbers(layer: Layer) -> dict[str, object]:
    return {
        "KIND": TYPES[layer.operand],
        "NATIVE": not triton.knobs.runtime.interpret,
        "INDEX": index_type(layer),
    }


def _launch(layer: Layer, warps: int) -> dict[str, object]:
    return {"BLOCK": 32 * warps, "EARLY": layer.early}


def _options(layer: Layer, warps: int) -> dict[str, object]:
    return {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": False} | overlapping(layer)
