"""What attention's kernels share: where a sequence's rows and keys lie, which keys a row sees, the order of sums."""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.kernels import round_to_tf32

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_sums(x):
    """Sum [R, C] over its columns, by halves: c and c + C / 2 first. Two numbers an addition: no layout reorders it."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    if COLUMNS == 1:
        return tl.reshape(x, [ROWS])
    else:
        return row_sums(tl.sum(tl.reshape(x, [ROWS, 2, COLUMNS // 2]), axis=1))


@triton.jit
def operand(x, PRECISION: tl.constexpr):
    """x as a product's operand: TF32 is rounded to nearest, where the tensor core would truncate."""
    if PRECISION == "tf32":
        x = round_to_tf32(x)
    return x


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b, in ascending order of the inner axis.

    In ieee a block is summed from zero: one long sum is less exact than torch's. So the tile is a part of the order.
    """
    if PRECISION == "":
        return tl.dot(a, b, acc)
    elif PRECISION == "ieee":
        return acc + tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def packed_sequence(slot, cu_q_ptr, B, G: tl.constexpr, BM: tl.constexpr):
    """The sequence and the block of rows that a slot of a packed problem stands for.

    Sequence b has the slots from cu_q[b] * G // BM + b on: at least as many as it has blocks, without a sum over the
    sequences before. The block may lie beyond its rows.
    """
    low = 0
    high = B
    while high - low > 1:
        middle = (low + high) // 2
        first = (tl.load(cu_q_ptr + middle).to(tl.int64) * G // BM).to(tl.int32) + middle
        low = tl.where(first <= slot, middle, low)
        high = tl.where(first <= slot, high, middle)
    first = (tl.load(cu_q_ptr + low).to(tl.int64) * G // BM).to(tl.int32) + low
    return low, slot - first


@triton.jit
def keys_of(b, S, cu_k_ptr, lengths_ptr, starts_ptr, offsets_ptr, KIND: tl.constexpr):
    """Where sequence b's keys begin in the buffer, the position of the first one, and one past the last position."""
    if KIND == "dense":
        end = S
        if lengths_ptr is not None:
            end = tl.minimum(tl.load(lengths_ptr + b).to(tl.int32), S)
        begin = 0
        if starts_ptr is not None:
            begin = tl.load(starts_ptr + b).to(tl.int32)
        count = tl.maximum(end - begin, 0)
    else:
        begin = tl.load(cu_k_ptr + b)
        count = tl.load(cu_k_ptr + b + 1) - begin
        if KIND == "paged":
            begin = 0
    first = 0
    if offsets_ptr is not None:
        first = tl.load(offsets_ptr + b).to(tl.int32)
    return begin, first, first + count


@triton.jit
def first_query(starts_ptr, CAUSAL: tl.constexpr):
    """Position below which queries are padding and see nothing. Queries may be more than keys, unless causal."""
    if CAUSAL or starts_ptr is not None:
        return 0
    else:
        return -(1 << 30)


@triton.jit
def key_range(low_query, high_query, first, last, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Positions from which and up to which queries at low_query .. high_query can see keys."""
    begin = first
    end = last
    if LEFT >= 0:
        begin = tl.maximum(begin, low_query - LEFT)
    if CAUSAL:
        end = tl.minimum(end, high_query + 1)
    if RIGHT >= 0:
        end = tl.minimum(end, high_query + RIGHT + 1)
    return begin, end


@triton.jit
def visible(query, key, first, last, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Whether queries see keys, by their positions; both broadcast."""
    seen = (key >= first) & (key < last)
    if CAUSAL:
        seen = seen & (key <= query)
    if LEFT >= 0:
        seen = seen & (query - key <= LEFT)
    if RIGHT >= 0:
        seen = seen & (key - query <= RIGHT)
    return seen


@triton.jit
def is_inside(low_query, high_query, n, first, last, BN, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Whether queries at low_query .. high_query see all keys n .. n + BN - 1."""
    inside = (n >= first) & (n + BN <= last)
    if CAUSAL:
        inside = inside & (n + BN - 1 <= low_query)
    if LEFT >= 0:
        inside = inside & (high_query - n <= LEFT)
    if RIGHT >= 0:
        inside = inside & (n + BN - 1 - low_query <= RIGHT)
    return inside


@triton.jit
def tanh(x):
    """tanh by exp2, within 2e-7 of 1."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    y = tl.div_rn(1.0 - e, 1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def logits(x, added, scale, softcap, GENERAL: tl.constexpr, SOFTCAP: tl.constexpr):
    """Raw scores as they are compared: scaled, soft-capped, and with a mask added, where there is one of these."""
    if GENERAL:
        x = x * scale
        if SOFTCAP:
            x = softcap * tanh(tl.div_rn(x, softcap))
        if added is not None:
            x = x + added
    return x


@triton.jit
def key_rows(
    ptr, b, hk, index, live, table_ptr, table_stride, stride_b, stride_t, stride_h, KIND: tl.constexpr,
    PAGE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Addresses of key (or value) rows by their index in the sequence's buffer."""
    if KIND == "paged":
        page = tl.load(table_ptr + b.to(tl.int64) * table_stride + index // PAGE, mask=live, other=0).to(tl.int64)
        return ptr + hk.to(tl.int64) * stride_h + page * stride_b + (index % PAGE).to(INDEX) * stride_t
    elif KIND == "packed":
        return ptr + hk.to(tl.int64) * stride_h + index.to(tl.int64) * stride_t
    else:
        base = ptr + b.to(tl.int64) * stride_b + hk.to(tl.int64) * stride_h
        return base + index.to(INDEX) * stride_t


@triton.jit
def load_rows(rows, live, D: tl.constexpr, BD: tl.constexpr):
    """Load rows [R, BD]; zero where not live and beyond D columns."""
    column = tl.arange(0, BD)
    if D == BD:
        return tl.load(rows[:, None] + column[None, :], mask=live[:, None], other=0.0)
    else:
        return tl.load(rows[:, None] + column[None, :], mask=live[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def load_mask(
    ptr, b, head, token, key_index, live, stride_b, stride_h, stride_t, stride_s, MASK: tl.constexpr,
):  # fmt: skip
    """Tile of the mask: whether a key takes part (bool), or what is added to a score."""
    at = ptr + b.to(tl.int64) * stride_b
    at = at + (head.to(tl.int64) * stride_h + token.to(tl.int64) * stride_t)[:, None]
    at = at + (key_index.to(tl.int64) * stride_s)[None, :]
    if MASK == "bool":
        return tl.load(at, mask=live, other=0) != 0
    else:
        return tl.load(at, mask=live, other=0.0).to(tl.float32)


@triton.jit
def quotient(x, divisor, inverse):
    """x / divisor, rounded to nearest as tl.div_rn does, whose branch for each element takes 100 cycles.

    inverse: 1 / divisor, rounded to nearest. Not for results below 2^-100, whose last bit may differ.
    """
    q = x * inverse
    rest = tl.fma(-q, divisor, x)
    closer = tl.fma(rest, inverse, q)
    return tl.where(closer == closer, closer, q)  # an infinite q has no rest
