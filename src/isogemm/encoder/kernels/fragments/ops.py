"""Row kernels by fragments: a warp owns sixteen rows from the first product to the last.

A row's bits depend on its own values alone. The weights come packed (`pack_weights`): rounded or cast, and each block
of 16 x 16 in the order in which lanes read it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.encoder.attention.kernels.lanes import (
    across,
    floats,
    load_four,
    load_packed,
    loaded_operand,
    multiply,
    operand,
    row_sum,
    store_four,
    zero_block,
)
from isogemm.encoder.kernels.common import scale_of_kept

# rows


@triton.jit
def place_rows(first_program, rows, INDEX, BLOCK):
    """A lane's row r and column c in fragments; its two rows; whether they exist; the two, clamped to the last row."""
    index = tl.arange(0, BLOCK)
    r = index % 32 // 4
    upper = ((first_program * (BLOCK // 32) + index // 32) * 16 + r).to(INDEX)
    lower = upper + 8
    inside = tl.minimum(upper, rows - 1), tl.minimum(lower, rows - 1)
    return r, index % 4, (upper, lower), (upper < rows, lower < rows), inside


@triton.jit
def load_rows(ptr, at, c, LD, COLUMNS):
    """A lane's two rows as blocks of floats."""
    return load_operands(ptr, at, c, LD, COLUMNS, None)


@triton.jit
def load_operands(ptr, at, c, LD, COLUMNS, KIND):
    """A lane's two rows as operands of type KIND; None: as floats."""
    upper = ptr + (at[0] * LD + 4 * c)
    lower = ptr + (at[1] * LD + 4 * c)
    made = ()
    for i in tl.static_range(0, COLUMNS, 16):
        made = made + (_four(upper + i, KIND) + _four(lower + i, KIND),)
    return made


@triton.jit
def _four(at, KIND):
    raw = load_four(at)
    if KIND is None:
        return floats(raw, at.dtype.element_ty)
    else:
        return loaded_operand(raw, at.dtype.element_ty, KIND)


@triton.jit
def store_block(ptr, block, at, live, c, column, LD):
    store_four(ptr + (at[0] * LD + column + 4 * c), block[0:4], live[0])
    store_four(ptr + (at[1] * LD + column + 4 * c), block[4:8], live[1])


@triton.jit
def store_rows(ptr, blocks, at, live, c, LD):
    for i in tl.static_range(len(blocks)):
        store_block(ptr, blocks[i], at, live, c, 16 * i, LD)


@triton.jit
def columns_of(ptr, c, column):
    """Four elements of a vector, the same for both rows."""
    four = floats(load_four(ptr + (column + 4 * c)), ptr.dtype.element_ty)
    return four + four


@triton.jit
def block_sum(a, b):
    made = ()
    for i in tl.static_range(len(a)):
        made = made + (a[i] + b[i],)
    return made


@triton.jit
def block_sums(a, b):
    made = ()
    for i in tl.static_range(len(a)):
        made = made + (block_sum(a[i], b[i]),)
    return made


@triton.jit
def block_product(a, b):
    made = ()
    for i in tl.static_range(len(a)):
        made = made + (a[i] * b[i],)
    return made


@triton.jit
def as_operands(blocks, KIND):
    return [operand(block, KIND) for block in blocks]


@triton.jit
def plus_vector(blocks, ptr, c):
    made = ()
    for i in tl.static_range(len(blocks)):
        made = made + (block_sum(blocks[i], columns_of(ptr, c, 16 * i)),)
    return made


@triton.jit
def only_live(blocks, live):
    """Blocks with zeros in rows beyond the last."""
    made = ()
    for i in tl.static_range(len(blocks)):
        block = ()
        for e in tl.static_range(8):
            block = block + (tl.where(live[e // 4], blocks[i][e], 0.0),)
        made = made + (block,)
    return made


@triton.jit
def four_sum(block, first: tl.constexpr):
    return (block[first] + block[first + 1]) + (block[first + 2] + block[first + 3])


@triton.jit
def row_sums(blocks):
    """Sums of both rows over all columns."""
    upper = four_sum(blocks[0], 0)
    lower = four_sum(blocks[0], 4)
    for i in tl.static_range(1, len(blocks)):
        upper += four_sum(blocks[i], 0)
        lower += four_sum(blocks[i], 4)
    return row_sum(upper), row_sum(lower)


# norms


@triton.jit
def row_statistics(x, eps, D, NORM):
    """Each row's mean (0 for RMSNorm) and 1 / deviation."""
    if NORM == "layer_norm":
        upper, lower = row_sums(x)
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
    upper, lower = row_sums(squares)
    return mean, (1.0 / tl.sqrt_rn(upper * (1.0 / D) + eps), 1.0 / tl.sqrt_rn(lower * (1.0 / D) + eps))


@triton.jit
def normalized_block(block, mean, deviation):
    made = ()
    for e in tl.static_range(8):
        made = made + ((block[e] - mean[e // 4]) * deviation[e // 4],)
    return made


@triton.jit
def normed_block(block, mean, deviation, g_ptr, b_ptr, c, column):
    block = normalized_block(block, mean, deviation)
    if g_ptr is not None:
        block = block_product(block, columns_of(g_ptr, c, column))
    if b_ptr is not None:
        block = block_sum(block, columns_of(b_ptr, c, column))
    return block


@triton.jit
def normed_rows(x, mean, deviation, g_ptr, b_ptr, c):
    """The norm of rows x with these statistics."""
    made = ()
    for i in tl.static_range(len(x)):
        made = made + (normed_block(x[i], mean, deviation, g_ptr, b_ptr, c, 16 * i),)
    return made


@triton.jit
def batch_normed_rows(x, statistics, b_ptr, c, D):
    """The batch norm of rows x, by the mean and the scale of its statistics [4, D]."""
    made = ()
    for i in tl.static_range(len(x)):
        mean = columns_of(statistics, c, 16 * i)
        scale = columns_of(statistics + 2 * D, c, 16 * i)
        block = ()
        for e in tl.static_range(8):
            block = block + ((x[i][e] - mean[e]) * scale[e],)
        if b_ptr is not None:
            block = block_sum(block, columns_of(b_ptr, c, 16 * i))
        made = made + (block,)
    return made


# dropout


@triton.jit
def _random_words(seed, row, group, c):
    """Random words for 32 columns of a row: two for a lane's four columns in the first sixteen, two for those in the
    second. A word serves two columns.

    One call of the generator makes half the words of this lane and half those of the lane across: they exchange them.
    """
    zero = (row * 0).to(tl.int32)
    w0, w1, w2, w3 = tl.philox(seed, 4 * group + c % 2 * 2 + c // 2 + zero, row.to(tl.int32), zero, zero)
    second = c >= 2
    made = ()
    for words in tl.static_range(2):
        low, high = (w0, w1) if words == 0 else (w2, w3)
        own = tl.where(second, high, low)
        other = across(tl.where(second, low, high))
        made = made + ((tl.where(second, other, own), tl.where(second, own, other)),)
    return made


@triton.jit
def words_of_rows(seed, at, group, c):
    """Random words of a block and of the next one."""
    upper = _random_words(seed, at[0], group, c)
    lower = _random_words(seed, at[1], group, c)
    return upper[0] + lower[0], upper[1] + lower[1]


@triton.jit
def no_words(BLOCK):
    return (tl.zeros([BLOCK], tl.uint32),) * 4


@triton.jit
def keeping_of(words, DROPPED):
    """Dropout's factors of a block, as in `epilogues.random`."""
    made = ()
    for e in tl.static_range(8):
        bits = words[e // 2] >> 16 if e % 2 else words[e // 2] & 0xFFFF
        made = made + (tl.where(bits >= DROPPED, scale_of_kept(DROPPED), 0.0),)
    return made


@triton.jit
def dropped_rows(blocks, seed_ptr, PLACE, at, c, DROPPED):
    """Dropout of whole rows, at most 32 columns."""
    words = words_of_rows(tl.load(seed_ptr) + PLACE, at, 0, c)
    made = ()
    for i in tl.static_range(len(blocks)):
        made = made + (block_product(blocks[i], keeping_of(words[i], DROPPED)),)
    return made


# products with packed weights


@triton.jit
def times_block(a, w, lane, first, K, BLOCK, KIND):
    """One block of columns of a W^T; first: the block's index in the weight, which is K deep."""
    acc = zero_block(BLOCK)
    for i in tl.static_range(len(a)):
        acc = multiply(acc, a[i], load_packed(w + (first * (K // 16) + i) * 256, lane, KIND), KIND)
    return acc


@triton.jit
def with_block(acc, a, w, lane, k, K, KIND):
    """acc + a W^T for a block a of k, all columns of the result."""
    made = ()
    for j in tl.static_range(len(acc)):
        made = made + (multiply(acc[j], a, load_packed(w + (j * (K // 16) + k) * 256, lane, KIND), KIND),)
    return made


@triton.jit
def projected_rows(o_ptr, wo, bo, at, c, lane, D, KIND, BLOCK):
    """o Wo + bo."""
    o = load_operands(o_ptr, at, c, D, D, KIND)
    s = ()
    for j in tl.static_range(D // 16):
        s = s + (times_block(o, wo, lane, j, D, BLOCK, KIND),)
    if bo is not None:
        s = plus_vector(s, bo, c)
    return s


@triton.jit
def attended_rows(x_ptr, o_ptr, wo, bo, at, c, lane, D, KIND, BLOCK):
    """x + o Wo + bo, or without o, x."""
    if o_ptr is None:
        return load_rows(x_ptr, at, c, D, D)
    else:
        s = projected_rows(o_ptr, wo, bo, at, c, lane, D, KIND, BLOCK)
        return block_sums(s, load_rows(x_ptr, at, c, D, D))
