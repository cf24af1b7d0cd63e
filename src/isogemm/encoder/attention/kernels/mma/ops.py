"""Attention of short heads (d <= 16) on tensor cores: a warp owns up to 16 TILES tokens of one head of one sequence.

Lanes hold fragments as mma.m16n8k8 wants them, so that a product's result is the next one's operand in place: nothing
passes through shared memory, and d is padded to 8, not to 32, and tokens to 16. Sums go over tokens in blocks of eight
in ascending order, whatever the warp owns: no bit depends on the batch, the packing or the launch.

In a warp, lane 4 r + c holds of a left operand [16, 8] rows r and r + 8 at columns 2 c and 2 c + 1, of a right operand
[8, 8] row n = r at k = 2 c and 2 c + 1, and of a result [16, 8] rows r and r + 8 at columns 2 c and 2 c + 1. (For TF32
the instruction orders k differently; the order within a block of eight is free as long as both operands agree.)

Stored head by head, q, k, v and do come from the projections and are rounded already: they are operands as they are.

Factors: the scores of earlier layers are sums of q k^T, so their queries and keys are read as more columns of this
layer's, the earliest layer's first and its own last. All their fragments are in one tuple.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.encoder.attention.kernels.lanes import floats, instruction, loaded_operand, packed
from isogemm.epilogues.device import philox

# the warp's instructions


@triton.jit
def _product(acc, a, b, KIND):
    """acc [16, 8] + a [16, 8] b^T, b [8, 8] by rows."""
    if KIND == tl.float32:
        return instruction(acc[0], acc[1], acc[2], acc[3], a[0], a[2], a[1], a[3], b[0], b[1], KIND)
    else:
        NAME: tl.constexpr = "bf16" if KIND == tl.bfloat16 else "f16"
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k8.row.col.f32." + NAME + "." + NAME + ".f32 "
            "{$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};",
            "=f,=f,=f,=f,r,r,r,f,f,f,f", [a[0], a[1], b[0], acc[0], acc[1], acc[2], acc[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def as_operands(raw, ROUNDED, KIND):
    """Loaded values as operands, for every eight columns; ROUNDED: they are rounded already."""
    made = ()
    for j in tl.static_range(len(raw)):
        if ROUNDED:
            made = made + (raw[j],)
        else:
            made = made + (loaded_operand(raw[j], KIND, KIND),)
    return made


@triton.jit
def of_columns(x, c):
    """From one value per row r, held by its lanes: the values of rows 2 c and 2 c + 1, a result's columns."""
    return _of_lane(x, 8 * c), _of_lane(x, 8 * c + 4)


@triton.jit
def _of_lane(x, lane):
    """x of the warp's lane with that number."""
    return tl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [x, lane], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip


# memory


@triton.jit
def fetch(at, ld, tokens, FETCH, BLOCK):
    """Prefetch all of a head's rows to L1, so that the loop over them does not wait for memory."""
    if FETCH:
        lane = tl.arange(0, BLOCK) % 32
        for first in tl.range(0, tokens, 32):
            tl.inline_asm_elementwise(
                "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [at + tl.minimum(first + lane, tokens - 1) * ld],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def fetch_layers(ats, ld, tokens, FETCH, BLOCK):
    for layer in tl.static_range(len(ats)):
        fetch(ats[layer], ld, tokens, FETCH, BLOCK)


@triton.jit
def _pair(at, first, D, KIND):
    """Columns first and first + 1 of the rows at `at`, zeros beyond D: two values, or a packed pair."""
    if D % 8 != 0:
        return _load_pair(at + first, first < D, KIND)
    elif KIND == tl.float32:
        return tl.inline_asm_elementwise(
            "ld.global.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [at + first], dtype=(tl.int32, tl.int32), is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        return _load_pair(at + first, None, KIND)


@triton.jit
def _load_pair(at, inside, KIND):
    if KIND == tl.float32:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.global.v2.b32 {$0, $1}, [$2]; }",
            "=r,=r,l,r", [at, inside.to(tl.int32)], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return (_load(at.to(tl.pointer_type(tl.int32), bitcast=True), inside, 0),)


@triton.jit
def _load(at, inside, other: tl.constexpr):
    if inside is None:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=other)


@triton.jit
def store_pair(at, even, odd, live, KIND):
    if KIND == tl.float32:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.global.v2.f32 [$1], {$2, $3}; mov.b32 $0, 0; }",
            "=r,l,f,f,r", [at.to(tl.int64), even, odd, live.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(at.to(tl.pointer_type(tl.int32), bitcast=True), packed(even, odd, KIND), mask=live)


@triton.jit
def at_most_last(token, tokens, BOUNDED):
    """The token, or with BOUNDED the last one for any beyond."""
    if BOUNDED:
        return tl.minimum(token, tokens - 1)
    else:
        return token


@triton.jit
def load_rows(at, ld, token, tokens, c, D, KIND, BOUNDED=True):
    """For every eight columns: rows token and token + 8 at columns 2 c and 2 c + 1; the last row for any beyond."""
    upper = at + at_most_last(token, tokens, BOUNDED) * ld
    lower = at + at_most_last(token + 8, tokens, BOUNDED) * ld
    found = ()
    for j in tl.static_range(0, D, 8):
        found = found + (_pair(upper, j + 2 * c, D, KIND) + _pair(lower, j + 2 * c, D, KIND),)
    return found


@triton.jit
def load_row(at, ld, token, tokens, c, D, KIND, BOUNDED):
    """`load_rows` of row token alone."""
    at += at_most_last(token, tokens, BOUNDED) * ld
    found = ()
    for j in tl.static_range(0, D, 8):
        found = found + (_pair(at, j + 2 * c, D, KIND),)
    return found


@triton.jit
def load_column(at, ld, token, tokens, r, D, KIND, BOUNDED):
    """For every eight columns: column r at rows token and token + 1; the last row for any beyond."""
    upper = at + (at_most_last(token, tokens, BOUNDED) * ld + r)
    lower = at + (at_most_last(token + 1, tokens, BOUNDED) * ld + r)
    found = ()
    for j in tl.static_range(0, D, 8):
        inside = None
        if D % 8 != 0:
            inside = j + r < D
        even = _load(upper + j, inside, 0.0)
        odd = _load(lower + j, inside, 0.0)
        if KIND == tl.float32:
            found = found + ((even.to(tl.int32, bitcast=True), odd.to(tl.int32, bitcast=True)),)
        else:
            low = even.to(tl.uint16, bitcast=True).to(tl.uint32)
            high = odd.to(tl.uint16, bitcast=True).to(tl.uint32)
            found = found + (((low | (high << 16)).to(tl.int32, bitcast=True),),)
    return found


@triton.jit
def load_operands(ats, ld, token, tokens, lane, READ, ROUNDED, D, KIND, BOUNDED=True):
    """Operands of every layer, loaded by READ (one of the three above); ROUNDED: the last layer's are rounded."""
    made = ()
    for layer in tl.static_range(len(ats)):
        raw = READ(ats[layer], ld, token, tokens, lane, D, KIND, BOUNDED)
        made = made + as_operands(raw, ROUNDED and layer == len(ats) - 1, KIND)
    return made


@triton.jit
def matrix_at(ptr, matrix, tokens, WIDE):
    """Address of a matrix's first score."""
    if WIDE:
        return ptr + matrix.to(tl.int64) * tokens * tokens
    else:
        return ptr + matrix * (tokens * tokens)


@triton.jit
def _score_at(at, query, key, tokens, WIDE):
    if WIDE:
        query = query.to(tl.int64)
    return at + (query * tokens + key)


@triton.jit
def _score(at, query, key, tokens, WIDE):
    """One score as it is, 0 beyond the end."""
    inside = (query < tokens) & (key < tokens)
    return tl.load(_score_at(at, query, key, tokens, WIDE), mask=inside, other=0.0)


@triton.jit
def scores_of_rows(at, query, key, tokens, EVEN, WIDE):
    """Load [16, 8] scores from (query, key) on, 0 beyond the end. EVEN: an even number of tokens, loaded in pairs."""
    found = ()
    for i in tl.static_range(2):
        row = query + 8 * i
        if EVEN:
            inside = (row < tokens) & (key < tokens)
            pair = _load_pair(_score_at(at, row, key, tokens, WIDE), inside, at.dtype.element_ty)
            found = found + pair
        else:
            found = found + (_score(at, row, key, tokens, WIDE), _score(at, row, key + 1, tokens, WIDE))
    return found


@triton.jit
def scores_of_columns(at, query, key, tokens, WIDE):
    """`scores_of_rows` of the transpose: [16, 8] by key and query."""
    found = ()
    for i in tl.static_range(4):
        found = found + (_score(at, query + i % 2, key + 8 * (i // 2), tokens, WIDE),)
    return found


@triton.jit
def score_values(raw, PAIRS, KIND):
    """Scores that were loaded, in pairs or one by one, as floats."""
    if PAIRS:
        return floats(raw, KIND)
    else:
        return [score.to(tl.float32) for score in raw]


@triton.jit
def with_scores(s, raw, root, PAIRS, KIND):
    """Products plus the previous layer's scores, in the products' units."""
    values = score_values(raw, PAIRS, KIND)
    made = ()
    for i in tl.static_range(len(s)):
        made = made + (tl.fma(values[i], root, s[i]),)
    return made


@triton.jit
def write_scores(at, query, key, even, odd, tokens, live, EVEN, WIDE):
    """Store a query's scores of keys key and key + 1."""
    KIND: tl.constexpr = at.dtype.element_ty
    live = live & (query < tokens)
    to = _score_at(at, query, key, tokens, WIDE)
    if EVEN:
        store_pair(to, even, odd, live & (key < tokens), KIND)
    else:
        tl.store(to, even.to(KIND), mask=live & (key < tokens))
        tl.store(to + 1, odd.to(KIND), mask=live & (key + 1 < tokens))


@triton.jit
def random_words(dropout, keys, queries, ALONG_KEYS):
    """Random words as in `epilogues.random`: four for each of two neighbours in groups of keys or of queries.

    dropout: the seed, the threshold and the matrix.
    """
    made = ()
    for i in tl.static_range(2):
        of_keys = keys + i if ALONG_KEYS else keys
        of_queries = queries if ALONG_KEYS else queries + i
        made = made + (philox(dropout[0], of_keys, of_queries, dropout[2]),)
    return made


@triton.jit
def kept(x, word, dropout):
    return tl.where((word >> 16).to(tl.int32) < dropout[1], 0.0, x)


@triton.jit
def zero_results(N, BLOCK):
    """N results."""
    return ((tl.zeros([BLOCK], tl.float32),) * 4,) * N


@triton.jit
def score_products(a, b, BLOCK, KIND):
    """[16, 8] of a b^T over all columns."""
    acc = (tl.zeros([BLOCK], tl.float32),) * 4
    for j in tl.static_range(len(a)):
        acc = _product(acc, a[j], b[j], KIND)
    return acc


@triton.jit
def with_products(acc, a, b, KIND):
    """acc + a b for every eight columns of b."""
    made = ()
    for j in tl.static_range(len(acc)):
        made = made + (_product(acc[j], a, b[j], KIND),)
    return made


@triton.jit
def score_of_key(mask_at, mask_step, key, tokens, root, MASK):
    """The term that is added to every score of a key: 0, or the mask; -inf for a key beyond the end.

    Not called if there is neither a mask nor a key beyond.
    """
    inside = key < tokens
    if MASK == "":
        return tl.where(inside, 0.0, float("-inf"))
    else:
        seen = tl.load(mask_at + tl.minimum(key, tokens - 1) * mask_step)
        if MASK == "bool":
            return tl.where(inside & (seen == 0), 0.0, float("-inf"))
        else:
            return tl.where(inside, seen.to(tl.float32) * root, float("-inf"))


@triton.jit
def if_seen(score, key, query, CAUSAL):
    if CAUSAL:
        return tl.where(key <= query, score, float("-inf"))
    else:
        return score


@triton.jit
def head_at(ptr, row, head, ld, all_rows, D, BY_HEAD):
    """A head's first row in its sequence."""
    if BY_HEAD:
        return ptr + (row + head * all_rows) * D
    else:
        return ptr + (row * ld + head * D)


@triton.jit
def all_layers(earlier0, earlier1, earlier2, earlier3, own):
    """Pointers of the earlier layers (those that are not None), then this layer's."""
    found = ()
    if earlier0 is not None:
        found = found + (earlier0,)
    if earlier1 is not None:
        found = found + (earlier1,)
    if earlier2 is not None:
        found = found + (earlier2,)
    if earlier3 is not None:
        found = found + (earlier3,)
    return found + (own,)


@triton.jit
def layers_at(ptrs, row, head, ld, all_rows, D, BY_HEAD):
    return [head_at(ptr, row, head, ld, all_rows, D, BY_HEAD) for ptr in ptrs]


@triton.jit
def place(tokens, sequences, H, TILES, WIDE, BLOCK, program):
    """All rows; a lane's row and column in fragments; its warp's first token, sequence, head, whether that exists, and
    the sequence's first row."""
    index = tl.arange(0, BLOCK)
    blocks = (tokens + 16 * TILES - 1) // (16 * TILES)
    unit = program * (BLOCK // 32) + index // 32
    pair = unit // blocks
    sequence = pair // H
    head = pair - sequence * H
    live = sequence < sequences
    sequence = tl.minimum(sequence, sequences - 1)  # so that only stores need a mask
    row = sequence * tokens
    all_rows = sequences * tokens
    if WIDE:
        row = row.to(tl.int64)
        all_rows = all_rows.to(tl.int64)
    return all_rows, index % 32 // 4, index % 4, (unit - pair * blocks) * (16 * TILES), sequence, head, live, row
