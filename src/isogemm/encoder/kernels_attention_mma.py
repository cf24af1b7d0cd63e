"""Attention of short heads (d <= 16) on tensor cores: a warp owns up to 16 TILES tokens of one head of one sequence.

The fragments of mma.m16n8k8 are held as the instruction wants them, one value (or packed pair) a lane, so that a
product's result is the next one's operand where it lies: nothing passes through shared memory, and d is padded to 8,
not to 32, and tokens to 16. Sums go over tokens in blocks of eight in ascending order, whatever the warp owns: no bit
depends on the batch, the packing or the launch.

In a warp, lane 4 r + c holds of a left operand [16, 8] rows r and r + 8 at columns 2 c and 2 c + 1, of a right operand
[8, 8] row n = r at k = 2 c and 2 c + 1, and of a result [16, 8] rows r and r + 8 at columns 2 c and 2 c + 1. (For TF32
the instruction counts k otherwise; the order within a block of eight is ours to choose as long as both operands agree.)

Head by head, q, k, v and do are what the projections here write, and rounded: they are operands as they are.

Factors: the scores of earlier layers are sums of q k^T, so their queries and keys are taken in as more columns of this
layer's, the earliest layer's first and its own last. Their fragments stand one after the other in one tuple.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from isogemm.core.launch import Launch
from isogemm.encoder.configs_attention import CACHED, MOST_FACTORS, Attention, MmaConfig
from isogemm.encoder.kernels_forward import started
from isogemm.encoder.kernels_fragments import floats, instruction, loaded_operand, operand, packed, row_max, row_sum
from isogemm.epilogues.device import philox
from isogemm.gemm.kernels import round_by_instruction

_KINDS = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}


# the warp's instructions; NATIVE = False: the same in plain Triton, for the interpreter


@triton.jit
def _product(acc, a, b, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """acc [16, 8] + a [16, 8] b^T, b [8, 8] by rows."""
    if not NATIVE:
        c0, c1 = _half_product(acc[0], acc[1], a[0], a[1], b)
        c2, c3 = _half_product(acc[2], acc[3], a[2], a[3], b)
        return c0, c1, c2, c3
    elif KIND == tl.float32:
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
def _half_product(even, odd, a0, a1, b):
    """Rows r of the result's columns 2 c and 2 c + 1."""
    WARPS: tl.constexpr = even.shape[0] // 32
    left0 = tl.reshape(a0, [WARPS, 8, 1, 4])
    left1 = tl.reshape(a1, [WARPS, 8, 1, 4])
    right0 = tl.reshape(b[0], [WARPS, 1, 8, 4])
    right1 = tl.reshape(b[1], [WARPS, 1, 8, 4])
    found = tl.sum(left0 * right0 + left1 * right1, axis=3)
    first, second = tl.split(tl.reshape(found, [WARPS, 8, 4, 2]))
    return even + tl.reshape(first, [WARPS * 32]), odd + tl.reshape(second, [WARPS * 32])


@triton.jit
def _loaded(raw, READY: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """What was read, for every eight columns, as operands; READY: it is rounded."""
    made = ()
    for j in tl.static_range(len(raw)):
        if READY and NATIVE:
            made = made + (raw[j],)
        else:
            made = made + (loaded_operand(raw[j], KIND, KIND, NATIVE),)
    return made


@triton.jit
def _of_columns(x, c, NATIVE: tl.constexpr):
    """From a value for each row r, known to its lanes: those of rows 2 c and 2 c + 1, which are a result's columns."""
    if NATIVE:
        even = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [x, 8 * c],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        odd = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [x, 8 * c + 4],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        return even, odd
    else:
        WARPS: tl.constexpr = x.shape[0] // 32
        rows = tl.sum(tl.reshape(x, [WARPS, 8, 4]), axis=2) * 0.25
        even, odd = tl.split(tl.reshape(rows, [WARPS, 4, 2]))
        even = tl.broadcast_to(tl.reshape(even, [WARPS, 1, 4]), [WARPS, 8, 4])
        odd = tl.broadcast_to(tl.reshape(odd, [WARPS, 1, 4]), [WARPS, 8, 4])
        return tl.reshape(even, [WARPS * 32]), tl.reshape(odd, [WARPS * 32])


# memory


@triton.jit
def _fetch(at, ld, tokens, FETCH: tl.constexpr, BLOCK: tl.constexpr):
    """Ask for all of the head's lines at once: the walk over them then waits for the cache, not for memory."""
    if FETCH:
        lane = tl.arange(0, BLOCK) % 32
        for first in tl.range(0, tokens, 32):
            tl.inline_asm_elementwise(
                "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [at + tl.minimum(first + lane, tokens - 1) * ld],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def _fetch_layers(ats, ld, tokens, FETCH: tl.constexpr, BLOCK: tl.constexpr):
    for layer in tl.static_range(len(ats)):
        _fetch(ats[layer], ld, tokens, FETCH, BLOCK)


@triton.jit
def _pair(at, first, D: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Columns first and first + 1 of the rows at `at`, zeros beyond D: two values, or a packed pair."""
    if D % 8 != 0:
        return _load_pair(at + first, first < D, KIND, NATIVE)
    elif NATIVE and KIND == tl.float32:
        return tl.inline_asm_elementwise(
            "ld.global.v2.b32 {$0, $1}, [$2];",
            "=r,=r,l",
            [at + first],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        return _load_pair(at + first, None, KIND, NATIVE)


@triton.jit
def _load_pair(at, inside, KIND: tl.constexpr, NATIVE: tl.constexpr):
    if not NATIVE:
        return _load(at, inside, 0.0).to(tl.float32), _load(at + 1, inside, 0.0).to(tl.float32)
    elif KIND == tl.float32:
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
def _store_pair(at, even, odd, live, KIND: tl.constexpr, NATIVE: tl.constexpr):
    if not NATIVE:
        tl.store(at, even.to(KIND), mask=live)
        tl.store(at + 1, odd.to(KIND), mask=live)
    elif KIND == tl.float32:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.global.v2.f32 [$1], {$2, $3}; mov.b32 $0, 0; }",
            "=r,l,f,f,r", [at.to(tl.int64), even, odd, live.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(at.to(tl.pointer_type(tl.int32), bitcast=True), packed(even, odd, KIND), mask=live)


@triton.jit
def _inside(token, tokens, BOUNDED: tl.constexpr):
    """The last token for any beyond, of which there are none where not BOUNDED."""
    if BOUNDED:
        return tl.minimum(token, tokens - 1)
    else:
        return token


@triton.jit
def _rows(
    at, ld, token, tokens, c, D: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, BOUNDED: tl.constexpr = True
):
    """For every eight columns: rows token and token + 8 at columns 2 c and 2 c + 1; the last row for any beyond."""
    upper = at + _inside(token, tokens, BOUNDED) * ld
    lower = at + _inside(token + 8, tokens, BOUNDED) * ld
    found = ()
    for j in tl.static_range(0, D, 8):
        found = found + (_pair(upper, j + 2 * c, D, KIND, NATIVE) + _pair(lower, j + 2 * c, D, KIND, NATIVE),)
    return found


@triton.jit
def _row(at, ld, token, tokens, c, D: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, BOUNDED: tl.constexpr):
    """The same of row token alone."""
    at += _inside(token, tokens, BOUNDED) * ld
    found = ()
    for j in tl.static_range(0, D, 8):
        found = found + (_pair(at, j + 2 * c, D, KIND, NATIVE),)
    return found


@triton.jit
def _column(at, ld, token, tokens, r, D: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, BOUNDED: tl.constexpr):
    """For every eight columns: column r at rows token and token + 1; the last row for any beyond."""
    upper = at + (_inside(token, tokens, BOUNDED) * ld + r)
    lower = at + (_inside(token + 1, tokens, BOUNDED) * ld + r)
    found = ()
    for j in tl.static_range(0, D, 8):
        inside = None
        if D % 8 != 0:
            inside = j + r < D
        even = _load(upper + j, inside, 0.0)
        odd = _load(lower + j, inside, 0.0)
        if not NATIVE:
            found = found + ((even.to(tl.float32), odd.to(tl.float32)),)
        elif KIND == tl.float32:
            found = found + ((even.to(tl.int32, bitcast=True), odd.to(tl.int32, bitcast=True)),)
        else:
            low = even.to(tl.uint16, bitcast=True).to(tl.uint32)
            high = odd.to(tl.uint16, bitcast=True).to(tl.uint32)
            found = found + (((low | (high << 16)).to(tl.int32, bitcast=True),),)
    return found


@triton.jit
def _operands(
    ats, ld, token, tokens, lane, READ: tl.constexpr, READY: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr,
    NATIVE: tl.constexpr, BOUNDED: tl.constexpr = True,
):  # fmt: skip
    """What READ (`_rows`, `_row` or `_column`) finds of every layer, as operands; READY: of the last it is rounded."""
    made = ()
    for layer in tl.static_range(len(ats)):
        raw = READ(ats[layer], ld, token, tokens, lane, D, KIND, NATIVE, BOUNDED)
        made = made + _loaded(raw, READY and layer == len(ats) - 1, KIND, NATIVE)
    return made


@triton.jit
def _matrix_at(ptr, matrix, tokens, WIDE: tl.constexpr):
    """The first of a matrix's scores."""
    if WIDE:
        return ptr + matrix.to(tl.int64) * tokens * tokens
    else:
        return ptr + matrix * (tokens * tokens)


@triton.jit
def _score_at(at, query, key, tokens, WIDE: tl.constexpr):
    if WIDE:
        query = query.to(tl.int64)
    return at + (query * tokens + key)


@triton.jit
def _score(at, query, key, tokens, WIDE: tl.constexpr):
    """One score as it is, 0 beyond the end."""
    inside = (query < tokens) & (key < tokens)
    return tl.load(_score_at(at, query, key, tokens, WIDE), mask=inside, other=0.0)


@triton.jit
def _scores_of_rows(at, query, key, tokens, EVEN: tl.constexpr, WIDE: tl.constexpr, NATIVE: tl.constexpr):
    """[16, 8] of the scores in memory from (query, key) on, 0 beyond the end; EVEN: so are the tokens, pairs are."""
    found = ()
    for i in tl.static_range(2):
        row = query + 8 * i
        if EVEN:
            inside = (row < tokens) & (key < tokens)
            pair = _load_pair(_score_at(at, row, key, tokens, WIDE), inside, at.dtype.element_ty, NATIVE)
            found = found + pair
        else:
            found = found + (_score(at, row, key, tokens, WIDE), _score(at, row, key + 1, tokens, WIDE))
    return found


@triton.jit
def _scores_of_columns(at, query, key, tokens, WIDE: tl.constexpr):
    """The same of the transpose: [16, 8] by key and query."""
    found = ()
    for i in tl.static_range(4):
        found = found + (_score(at, query + i % 2, key + 8 * (i // 2), tokens, WIDE),)
    return found


@triton.jit
def _values(raw, PAIRS: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Scores that were loaded, in pairs or one by one, as floats."""
    made = ()
    if PAIRS:
        made = floats(raw, KIND, NATIVE)
    else:
        for i in tl.static_range(len(raw)):
            made = made + (raw[i].to(tl.float32),)
    return made


@triton.jit
def _with_scores(s, raw, root, PAIRS: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Products with scores of the layer before, in the products' units."""
    values = _values(raw, PAIRS, KIND, NATIVE)
    made = ()
    for i in tl.static_range(len(s)):
        made = made + (tl.fma(values[i], root, s[i]),)
    return made


@triton.jit
def _write_scores(
    at, query, key, even, odd, tokens, live, EVEN: tl.constexpr, WIDE: tl.constexpr, NATIVE: tl.constexpr
):
    """Those of keys key and key + 1."""
    KIND: tl.constexpr = at.dtype.element_ty
    live = live & (query < tokens)
    to = _score_at(at, query, key, tokens, WIDE)
    if EVEN:
        _store_pair(to, even, odd, live & (key < tokens), KIND, NATIVE)
    else:
        tl.store(to, even.to(KIND), mask=live & (key < tokens))
        tl.store(to + 1, odd.to(KIND), mask=live & (key + 1 < tokens))


@triton.jit
def _words(dropout, keys, queries, ALONG_KEYS: tl.constexpr):
    """As in `epilogues.random`, of two neighbours in groups of keys or of queries: the four words of each.

    dropout: the seed, the threshold and the matrix.
    """
    made = ()
    for i in tl.static_range(2):
        of_keys = keys + i if ALONG_KEYS else keys
        of_queries = queries if ALONG_KEYS else queries + i
        made = made + (philox(dropout[0], of_keys, of_queries, dropout[2]),)
    return made


@triton.jit
def _kept(x, word, dropout):
    return tl.where((word >> 16).to(tl.int32) < dropout[1], 0.0, x)


@triton.jit
def _zeros(N: tl.constexpr, BLOCK: tl.constexpr):
    """N results."""
    made = ()
    for _ in tl.static_range(N):
        zero = tl.zeros([BLOCK], tl.float32)
        made = made + ((zero, zero, zero, zero),)
    return made


@triton.jit
def _scores(a, b, BLOCK: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """[16, 8] of a b^T over all columns."""
    zero = tl.zeros([BLOCK], tl.float32)
    acc = (zero, zero, zero, zero)
    for j in tl.static_range(len(a)):
        acc = _product(acc, a[j], b[j], KIND, NATIVE)
    return acc


@triton.jit
def _with_products(acc, a, b, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """acc + a b for every eight columns of b."""
    made = ()
    for j in tl.static_range(len(acc)):
        made = made + (_product(acc[j], a, b[j], KIND, NATIVE),)
    return made


@triton.jit
def _score_of_key(mask_at, mask_step, key, tokens, root, MASK: tl.constexpr):
    """What is added to every score of a key, in their units: 0, or the mask; -inf for one beyond the end.

    Not asked for where there is no mask and no key beyond.
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
def _seen(score, key, query, CAUSAL: tl.constexpr):
    if CAUSAL:
        return tl.where(key <= query, score, float("-inf"))
    else:
        return score


@triton.jit
def _head_at(ptr, row, head, ld, all_rows, D: tl.constexpr, BY_HEAD: tl.constexpr):
    """A head's first row in its sequence."""
    if BY_HEAD:
        return ptr + (row + head * all_rows) * D
    else:
        return ptr + (row * ld + head * D)


@triton.jit
def _layers(earlier0, earlier1, earlier2, earlier3, own):
    """The earlier layers' pointers that are there, then this one's."""
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
def _layers_at(ptrs, row, head, ld, all_rows, D: tl.constexpr, BY_HEAD: tl.constexpr):
    found = ()
    for layer in tl.static_range(len(ptrs)):
        found = found + (_head_at(ptrs[layer], row, head, ld, all_rows, D, BY_HEAD),)
    return found


@triton.jit
def _place(tokens, sequences, H: tl.constexpr, TILES: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, program):
    """All rows; a lane's row and column in fragments; its warp's first token, sequence, head, if any, its row."""
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


@triton.jit(do_not_specialize=["sequences", "tokens", "dropped"])
def _attention_mma_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, scores_ptr,
    q0_ptr, k0_ptr, q1_ptr, k1_ptr, q2_ptr, k2_ptr, q3_ptr, k3_ptr, sequences, tokens, scale, root,
    ld_q, ld_k, ld_v, mask_stride, mask_step, dropped, kept_scale,
    H: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr, FETCH: tl.constexpr, BY_HEAD: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    started(EARLY)
    all_rows, r, c, first, sequence, head, live, row = _place(
        tokens, sequences, H, TILES, WIDE, BLOCK, tl.program_id(0)
    )
    q_at = _layers_at(_layers(q0_ptr, q1_ptr, q2_ptr, q3_ptr, q_ptr), row, head, ld_q, all_rows, D, BY_HEAD)
    k_at = _layers_at(_layers(k0_ptr, k1_ptr, k2_ptr, k3_ptr, k_ptr), row, head, ld_k, all_rows, D, BY_HEAD)
    v_at = _head_at(v_ptr, row, head, ld_v, all_rows, D, BY_HEAD)
    _fetch_layers(k_at, ld_k, tokens, FETCH, BLOCK)
    _fetch(v_at, ld_v, tokens, FETCH, BLOCK)
    mask_at = None
    if MASK != "":
        mask_at = mask_ptr + sequence.to(tl.int64) * mask_stride
    q = ()
    tops = ()
    totals = ()
    outs = ()
    for n in tl.static_range(TILES):
        q = q + (_operands(q_at, ld_q, first + 16 * n + r, tokens, c, _rows, BY_HEAD, D, KIND, NATIVE),)
        low = tl.full([BLOCK], float("-inf"), tl.float32)
        zero = tl.zeros([BLOCK], tl.float32)
        tops = tops + ((low, low),)
        totals = totals + ((zero, zero),)
        outs = outs + (_zeros((D + 7) // 8, BLOCK),)
    state = (tops, totals, outs)
    matrix = sequence * H + head
    previous_at = None
    if previous_ptr is not None:
        previous_at = _matrix_at(previous_ptr, matrix, tokens, WIDE)
    scores_at = None
    if scores_ptr is not None:
        scores_at = _matrix_at(scores_ptr, matrix, tokens, WIDE)
    dropout = None
    if seed_ptr is not None:
        dropout = (tl.load(seed_ptr), dropped, matrix)
    for BOUNDED in tl.static_range(2):  # whole blocks, then one that ends beyond the last key
        begin = tokens // 16 * 16 if BOUNDED else 0
        end = tokens if BOUNDED else tokens // 16 * 16
        for key in tl.range(begin, end, 16):
            state = _attend(
                state, q, k_at, v_at, mask_at, previous_at, scores_at, dropout, ld_k, ld_v, mask_step, key, first, r, c,
                live, tokens, scale, root, D, KIND, NATIVE, MASK, CAUSAL, WIDE, EVEN, BY_HEAD, TILES, BLOCK, BOUNDED,
            )  # fmt: skip
    for n in tl.static_range(TILES):
        for i in tl.static_range(2):
            token = first + (16 * n + 8 * i) + r
            written = live & (token < tokens)
            total = row_sum(state[1][n][i], NATIVE)
            empty = total == 0.0
            share = 1.0 / tl.where(empty, 1.0, total)
            if dropout is not None:
                share *= kept_scale
            at = o_ptr + ((row + token) * (H * D) + head * D)
            for j in tl.static_range(0, D, 8):
                out = state[2][n][j // 8]
                column = j + 2 * c
                even, odd = out[2 * i] * share, out[2 * i + 1] * share
                _store_pair(at + column, even, odd, written & (column < D), KIND, NATIVE)
            lse = tl.where(empty, float("inf"), state[0][n][i] * scale + tl.log2(total))
            lse_at = _head_at(lse_ptr, row, head, H, all_rows, 1, BY_HEAD)
            tl.store(lse_at + token * (1 if BY_HEAD else H), lse, mask=written & (c == 0))


@triton.jit
def _attend(
    state, q, k_at, v_at, mask_at, previous_at, scores_at, dropout, ld_k, ld_v, mask_step, key, first, r, c,
    live, tokens, scale, root,
    D: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    WIDE: tl.constexpr, EVEN: tl.constexpr, BY_HEAD: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """The rows' (largest score, sum, o) with keys key .. key + 15 taken in; sums are a lane's own until the end."""
    k = ()
    v = ()
    added = ()
    keys = ()
    for i in tl.static_range(2):
        k = k + (_operands(k_at, ld_k, key + 8 * i + r, tokens, c, _row, BY_HEAD, D, KIND, NATIVE, BOUNDED),)
        along = _column(v_at, ld_v, key + 8 * i + 2 * c, tokens, r, D, KIND, NATIVE, BOUNDED)
        v = v + (_loaded(along, BY_HEAD, KIND, NATIVE),)
        for j in tl.static_range(2):
            keys = keys + (key + (8 * i + j) + 2 * c,)
            if BOUNDED or MASK != "":
                added = added + (_score_of_key(mask_at, mask_step, key + (8 * i + j) + 2 * c, tokens, root, MASK),)
    before = ()
    if previous_at is not None:
        for n in tl.static_range(TILES):
            query = first + 16 * n + r
            before = before + (
                _scores_of_rows(previous_at, query, keys[0], tokens, EVEN, WIDE, NATIVE)
                + _scores_of_rows(previous_at, query, keys[2], tokens, EVEN, WIDE, NATIVE),
            )
    tops = ()
    totals = ()
    outs = ()
    for n in tl.static_range(TILES):
        s = _scores(q[n], k[0], BLOCK, KIND, NATIVE) + _scores(q[n], k[1], BLOCK, KIND, NATIVE)
        if previous_at is not None:
            s = _with_scores(s, before[n], root, EVEN, KIND, NATIVE)
        of_rows = ()
        for i in tl.static_range(2):
            query = first + (16 * n + 8 * i) + r
            seen = ()
            for j in tl.static_range(4):
                score = s[4 * (j // 2) + 2 * i + j % 2]
                if BOUNDED or MASK != "":
                    score += added[j]
                seen = seen + (_seen(score, keys[j], query, CAUSAL),)
            if scores_at is not None:
                for j in tl.static_range(0, 4, 2):
                    even, odd = seen[j] * (1.0 / root), seen[j + 1] * (1.0 / root)
                    _write_scores(scores_at, query, keys[j], even, odd, tokens, live, EVEN, WIDE, NATIVE)
            of_rows = of_rows + (
                _attend_row(
                    state[0][n][i], state[1][n][i], seen[0], seen[1], seen[2], seen[3],
                    scale, NATIVE, MASK != "" or CAUSAL or previous_at is not None,
                ),
            )  # fmt: skip
        tops = tops + ((of_rows[0][0], of_rows[1][0]),)
        totals = totals + ((of_rows[0][1], of_rows[1][1]),)
        o = ()
        for j in tl.static_range((D + 7) // 8):
            acc = state[2][n][j]
            upper, lower = of_rows[0][2], of_rows[1][2]
            o = o + ((acc[0] * upper, acc[1] * upper, acc[2] * lower, acc[3] * lower),)
        words = ()
        if dropout is not None:
            words = _words(dropout, key // 2 + 2 * c, first // 2 + (8 * n + r), True)
        for i in tl.static_range(2):
            p = (of_rows[0][3 + 2 * i], of_rows[0][4 + 2 * i], of_rows[1][3 + 2 * i], of_rows[1][4 + 2 * i])
            if dropout is not None:
                p = (
                    _kept(p[0], words[0][i], dropout), _kept(p[1], words[1][i], dropout),
                    _kept(p[2], words[0][2 + i], dropout), _kept(p[3], words[1][2 + i], dropout),
                )  # fmt: skip
            o = _with_products(o, operand(p, KIND, NATIVE), v[i], KIND, NATIVE)
        outs = outs + (o,)
    return tops, totals, outs


@triton.jit
def _attend_row(top, total, s0, s1, s2, s3, scale, NATIVE: tl.constexpr, EMPTY: tl.constexpr):
    """A row's largest score and sum with four scores taken in; what earlier ones shrink by; the four's exponentials."""
    above = tl.maximum(top, row_max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3)), NATIVE))
    base = above
    if EMPTY:
        base = tl.where(above == float("-inf"), 0.0, above)
    shrink = tl.exp2((top - base) * scale)  # 1 where nothing is higher: what is left out then changes no bit
    below = -base * scale
    p0 = tl.exp2(tl.fma(s0, scale, below))
    p1 = tl.exp2(tl.fma(s1, scale, below))
    p2 = tl.exp2(tl.fma(s2, scale, below))
    p3 = tl.exp2(tl.fma(s3, scale, below))
    return above, total * shrink + ((p0 + p1) + (p2 + p3)), shrink, p0, p1, p2, p3


@triton.jit
def _delta(do, o, READY: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """The sum of do o over all columns, of every row of which a lane holds pairs."""
    totals = ()
    operands = _loaded(do, READY, KIND, NATIVE)
    for j in tl.static_range(len(do)):
        left = floats(operands[j], KIND, NATIVE)  # as the products have it: what a key gives and takes is then the same
        right = floats(o[j], KIND, NATIVE)
        after = ()
        for i in tl.static_range(0, len(left), 2):
            product = left[i] * right[i] if j == 0 else tl.fma(left[i], right[i], totals[i // 2])
            after = after + (tl.fma(left[i + 1], right[i + 1], product),)
        totals = after
    sums = ()
    for i in tl.static_range(len(totals)):
        sums = sums + (row_sum(totals[i], NATIVE),)
    return sums


@triton.jit
def _write_grad(
    ptr, values, FIRST: tl.constexpr, factor, more, row, token, tokens, ld, head, c, live, D: tl.constexpr,
    KIND: tl.constexpr, NATIVE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """A result [16, D], values from FIRST on, times a factor, and more, to rows token and token + 8 of a head.

    TURNED: of a transpose, as TF32.
    """
    for i in tl.static_range(2):
        at = token + 8 * i
        written = live & (at < tokens)
        for j in tl.static_range(0, D, 8):
            even, odd = values[FIRST + j // 8][2 * i] * factor, values[FIRST + j // 8][2 * i + 1] * factor
            if more is not None:
                even += more[j // 8][2 * i]
                odd += more[j // 8][2 * i + 1]
            column = j + 2 * c
            if TURNED:
                to = ptr + ((head * D + column).to(row.dtype) * ld + (row + at))
                tl.store(to, round_by_instruction(even), mask=written & (column < D))
                tl.store(to + ld, round_by_instruction(odd), mask=written & (column < D))
            else:
                to = ptr + ((row + at) * ld + head * D) + column
                _store_pair(to, even, odd, written & (column < D), KIND, NATIVE)


@triton.jit
def _write_grads(
    ptrs, values, factor, coming_ptr, row, all_rows, token, tokens, ld, head, c, live, D: tl.constexpr,
    KIND: tl.constexpr, NATIVE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Results of all layers: the earlier ones' by head; this one's as `_write_grad` does, with what comes in for it."""
    BLOCKS: tl.constexpr = (D + 7) // 8
    OWN: tl.constexpr = len(ptrs) - 1
    for layer in tl.static_range(OWN):
        _write_grad(
            ptrs[layer], values, layer * BLOCKS, factor, None, row + head * all_rows, token, tokens, D, 0, c, live,
            D, KIND, NATIVE, False,
        )  # fmt: skip
    more = None
    if coming_ptr is not None:
        coming_at = _head_at(coming_ptr, row, head, D, all_rows, D, True)
        more = ()
        raw = _rows(coming_at, D, token, tokens, c, D, KIND, NATIVE)
        for j in tl.static_range(BLOCKS):
            more = more + (floats(raw[j], KIND, NATIVE),)
    _write_grad(
        ptrs[OWN], values, OWN * BLOCKS, factor, more, row, token, tokens, ld, head, c, live, D, KIND, NATIVE, TURNED
    )


@triton.jit
def _clear_beyond(dq_ptr, dk_ptr, dv_ptr, end, ld, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in the columns of transposes that lie beyond the last token."""
    column = tl.arange(0, BLOCK)
    for token in tl.range(end, ld):
        for first in tl.range(0, COLUMNS, BLOCK):
            at = (first + column).to(tl.int64) * ld + token
            inside = first + column < COLUMNS
            tl.store(dq_ptr + at, tl.zeros([BLOCK], tl.float32), mask=inside)
            tl.store(dk_ptr + at, tl.zeros([BLOCK], tl.float32), mask=inside)
            tl.store(dv_ptr + at, tl.zeros([BLOCK], tl.float32), mask=inside)


@triton.jit
def _grads_of_queries(
    program, q_ptrs, k_ptrs, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, do_ptr, d_scores_ptr, dq_ptrs,
    d_previous_ptr, dq_in_ptr, sequences, tokens, scale, root, ld_q, ld_k, ld_v, ld_do, ld_dq, mask_stride, mask_step,
    dropped, kept_scale,
    H: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr, FETCH: tl.constexpr, BY_HEAD: tl.constexpr,
    TURNED: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    all_rows, r, c, first, sequence, head, live, row = _place(tokens, sequences, H, TILES, WIDE, BLOCK, program)
    q_at = _layers_at(q_ptrs, row, head, ld_q, all_rows, D, BY_HEAD)
    k_at = _layers_at(k_ptrs, row, head, ld_k, all_rows, D, BY_HEAD)
    v_at = _head_at(v_ptr, row, head, ld_v, all_rows, D, BY_HEAD)
    do_at = _head_at(do_ptr, row, head, ld_do, all_rows, D, BY_HEAD)
    _fetch_layers(k_at, ld_k, tokens, FETCH, BLOCK)
    _fetch(v_at, ld_v, tokens, FETCH, BLOCK)
    mask_at = None
    if MASK != "":
        mask_at = mask_ptr + sequence.to(tl.int64) * mask_stride
    q = ()
    do = ()
    lse = ()
    delta = ()
    dq = ()
    for n in tl.static_range(TILES):
        token = first + 16 * n + r
        q = q + (_operands(q_at, ld_q, token, tokens, c, _rows, BY_HEAD, D, KIND, NATIVE),)
        values = _rows(do_at, ld_do, token, tokens, c, D, KIND, NATIVE)
        do = do + (_loaded(values, BY_HEAD, KIND, NATIVE),)
        out = _rows(o_ptr + (row * (H * D) + head * D), H * D, token, tokens, c, D, KIND, NATIVE)
        delta = delta + (_delta(values, out, BY_HEAD, KIND, NATIVE),)
        sums = _head_at(lse_ptr, row, head, H, all_rows, 1, BY_HEAD)
        upper = tl.load(sums + tl.minimum(token, tokens - 1) * (1 if BY_HEAD else H))
        lower = tl.load(sums + tl.minimum(token + 8, tokens - 1) * (1 if BY_HEAD else H))
        lse = lse + ((upper, lower),)
        dq = dq + (_zeros(len(q_at) * ((D + 7) // 8), BLOCK),)
    matrix = sequence * H + head
    previous_at = None
    if previous_ptr is not None:
        previous_at = _matrix_at(previous_ptr, matrix, tokens, WIDE)
    d_scores_at = None
    if d_scores_ptr is not None:
        d_scores_at = _matrix_at(d_scores_ptr, matrix, tokens, WIDE)
    d_previous_at = None
    if d_previous_ptr is not None:
        d_previous_at = _matrix_at(d_previous_ptr, matrix, tokens, WIDE)
    dropout = None
    if seed_ptr is not None:
        dropout = (tl.load(seed_ptr), dropped, matrix)
    PARTS: tl.constexpr = 1 if seed_ptr is None else 2  # of eight keys each: a call's words are for both
    STEP: tl.constexpr = 8 * PARTS
    for BOUNDED in tl.static_range(2):  # whole blocks, then one that ends beyond the last token
        whole = tokens // STEP * STEP
        for begin in tl.range(whole if BOUNDED else 0, tokens if BOUNDED else whole, STEP):
            words = ()
            for part in tl.static_range(PARTS):
                key = begin + 8 * part
                k = _operands(k_at, ld_k, key + r, tokens, c, _row, BY_HEAD, D, KIND, NATIVE, BOUNDED)
                v = _loaded(_row(v_at, ld_v, key + r, tokens, c, D, KIND, NATIVE, BOUNDED), BY_HEAD, KIND, NATIVE)
                along = _operands(k_at, ld_k, key + 2 * c, tokens, r, _column, BY_HEAD, D, KIND, NATIVE, BOUNDED)
                keys = (key + 2 * c, key + 2 * c + 1)
                added = ()
                if BOUNDED or MASK != "":
                    for j in tl.static_range(2):
                        added = added + (_score_of_key(mask_at, mask_step, keys[j], tokens, root, MASK),)
                before = ()
                above = ()
                for n in tl.static_range(TILES):
                    query = first + 16 * n + r
                    if previous_at is not None:
                        before = before + (_scores_of_rows(previous_at, query, keys[0], tokens, EVEN, WIDE, NATIVE),)
                    if d_scores_at is not None:
                        above = above + (_scores_of_rows(d_scores_at, query, keys[0], tokens, EVEN, WIDE, NATIVE),)
                after = ()
                for n in tl.static_range(TILES):
                    if dropout is not None and part == 0:
                        words = words + (_words(dropout, begin // 2 + 2 * c, first // 2 + (8 * n + r), True),)
                    s = _scores(q[n], k, BLOCK, KIND, NATIVE)
                    dp = _scores(do[n], v, BLOCK, KIND, NATIVE)
                    if previous_at is not None:
                        s = _with_scores(s, before[n], root, EVEN, KIND, NATIVE)
                    ds = ()
                    for i in tl.static_range(2):
                        query = first + (16 * n + 8 * i) + r
                        for j in tl.static_range(2):
                            score = s[2 * i + j]
                            if BOUNDED or MASK != "":
                                score += added[j]
                            score = _seen(score, keys[j], query, CAUSAL)
                            p = tl.exp2(tl.fma(score, scale, -lse[n][i]))
                            if dropout is None:
                                found = p * (dp[2 * i + j] - delta[n][i])
                            else:
                                share = _kept(dp[2 * i + j], words[n][j][2 * i + part], dropout)
                                found = p * tl.fma(share, kept_scale, -delta[n][i])
                            if d_scores_at is not None:
                                coming = _values(above[n], EVEN, KIND, NATIVE)[2 * i + j]
                                found += tl.where(score == float("-inf"), 0.0, coming)
                            ds = ds + (found,)
                        if d_previous_at is not None:
                            even, odd = ds[2 * i], ds[2 * i + 1]
                            _write_scores(d_previous_at, query, keys[0], even, odd, tokens, live, EVEN, WIDE, NATIVE)
                    after = after + (_with_products(dq[n], operand(ds, KIND, NATIVE), along, KIND, NATIVE),)
                dq = after
    for n in tl.static_range(TILES):
        token = first + 16 * n + r
        _write_grads(
            dq_ptrs, dq[n], 1.0 / root, dq_in_ptr, row, all_rows, token, tokens, ld_dq, head, c, live,
            D, KIND, NATIVE, TURNED,
        )  # fmt: skip


@triton.jit
def _grads_of_keys(
    program, q_ptrs, k_ptrs, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, do_ptr, d_scores_ptr, dk_ptrs,
    dv_ptr, dk_in_ptr, sequences, tokens, scale, root, ld_q, ld_k, ld_v, ld_do, ld_dk, ld_dv, mask_stride, mask_step,
    dropped, kept_scale,
    H: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, WIDE: tl.constexpr, FETCH: tl.constexpr, BY_HEAD: tl.constexpr, TURNED: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    all_rows, r, c, first, sequence, head, live, row = _place(tokens, sequences, H, TILES, WIDE, BLOCK, program)
    q_at = _layers_at(q_ptrs, row, head, ld_q, all_rows, D, BY_HEAD)
    k_at = _layers_at(k_ptrs, row, head, ld_k, all_rows, D, BY_HEAD)
    v_at = _head_at(v_ptr, row, head, ld_v, all_rows, D, BY_HEAD)
    do_at = _head_at(do_ptr, row, head, ld_do, all_rows, D, BY_HEAD)
    o_at = o_ptr + (row * (H * D) + head * D)
    lse_at = _head_at(lse_ptr, row, head, H, all_rows, 1, BY_HEAD)
    _fetch_layers(q_at, ld_q, tokens, FETCH, BLOCK)
    _fetch(do_at, ld_do, tokens, FETCH, BLOCK)
    _fetch(o_at, H * D, tokens, FETCH, BLOCK)
    _fetch(lse_at, 1 if BY_HEAD else H, tokens, FETCH, BLOCK)
    mask_at = None
    if MASK != "":
        mask_at = mask_ptr + sequence.to(tl.int64) * mask_stride
    k = ()
    v = ()
    added = ()
    dk = ()
    dv = ()
    for n in tl.static_range(TILES):
        token = first + 16 * n + r
        k = k + (_operands(k_at, ld_k, token, tokens, c, _rows, BY_HEAD, D, KIND, NATIVE),)
        v = v + (_loaded(_rows(v_at, ld_v, token, tokens, c, D, KIND, NATIVE), BY_HEAD, KIND, NATIVE),)
        if MASK != "":  # a key beyond the end takes part in nothing that is written
            added = added + (
                (
                    _score_of_key(mask_at, mask_step, token, tokens, root, MASK),
                    _score_of_key(mask_at, mask_step, token + 8, tokens, root, MASK),
                ),
            )
        dk = dk + (_zeros(len(k_at) * ((D + 7) // 8), BLOCK),)
        dv = dv + (_zeros((D + 7) // 8, BLOCK),)
    matrix = sequence * H + head
    previous_at = None
    if previous_ptr is not None:
        previous_at = _matrix_at(previous_ptr, matrix, tokens, WIDE)
    d_scores_at = None
    if d_scores_ptr is not None:
        d_scores_at = _matrix_at(d_scores_ptr, matrix, tokens, WIDE)
    dropout = None
    if seed_ptr is not None:
        dropout = (tl.load(seed_ptr), dropped, matrix)
    PARTS: tl.constexpr = 1 if seed_ptr is None else 2  # of eight queries each: a call's words are for both
    STEP: tl.constexpr = 8 * PARTS
    for BOUNDED in tl.static_range(2):  # whole blocks, then one that ends beyond the last token
        whole = tokens // STEP * STEP
        for begin in tl.range(whole if BOUNDED else 0, tokens if BOUNDED else whole, STEP):
            words = ()
            for part in tl.static_range(PARTS):
                query = begin + 8 * part
                q = _operands(q_at, ld_q, query + r, tokens, c, _row, BY_HEAD, D, KIND, NATIVE, BOUNDED)
                values = _row(do_at, ld_do, query + r, tokens, c, D, KIND, NATIVE, BOUNDED)
                do = _loaded(values, BY_HEAD, KIND, NATIVE)
                out = _row(o_at, H * D, query + r, tokens, c, D, KIND, NATIVE, BOUNDED)
                delta = _delta(values, out, BY_HEAD, KIND, NATIVE)
                deltas = _of_columns(delta[0], c, NATIVE)
                q_along = _operands(q_at, ld_q, query + 2 * c, tokens, r, _column, BY_HEAD, D, KIND, NATIVE, BOUNDED)
                do_along = _column(do_at, ld_do, query + 2 * c, tokens, r, D, KIND, NATIVE, BOUNDED)
                do_along = _loaded(do_along, BY_HEAD, KIND, NATIVE)
                lses = ()
                for i in tl.static_range(2):  # beyond the end, queries that see nothing
                    token = query + i + 2 * c
                    lse = tl.load(lse_at + _inside(token, tokens, BOUNDED) * (1 if BY_HEAD else H))
                    if BOUNDED:
                        lse = tl.where(token < tokens, lse, float("inf"))
                    lses = lses + (lse,)
                before = ()
                above = ()
                for n in tl.static_range(TILES):
                    key = first + 16 * n + r
                    if previous_at is not None:
                        before = before + (_scores_of_columns(previous_at, query + 2 * c, key, tokens, WIDE),)
                    if d_scores_at is not None:
                        above = above + (_scores_of_columns(d_scores_at, query + 2 * c, key, tokens, WIDE),)
                dks = ()
                dvs = ()
                for n in tl.static_range(TILES):
                    if dropout is not None and part == 0:
                        words = words + (_words(dropout, first // 2 + (8 * n + r), begin // 2 + 2 * c, False),)
                    s = _scores(k[n], q, BLOCK, KIND, NATIVE)
                    dp = _scores(v[n], do, BLOCK, KIND, NATIVE)
                    if previous_at is not None:
                        s = _with_scores(s, before[n], root, False, KIND, NATIVE)
                    shares = ()
                    ds = ()
                    for i in tl.static_range(4):
                        key = first + (16 * n + 8 * (i // 2)) + r
                        score = s[i]
                        if MASK != "":
                            score += added[n][i // 2]
                        score = _seen(score, key, query + i % 2 + 2 * c, CAUSAL)
                        p = tl.exp2(tl.fma(score, scale, -lses[i % 2]))
                        if dropout is None:
                            shares = shares + (p,)
                            found = p * (dp[i] - deltas[i % 2])
                        else:
                            word = words[n][i % 2][2 * part + i // 2]
                            shares = shares + (_kept(p, word, dropout),)
                            found = p * tl.fma(_kept(dp[i], word, dropout), kept_scale, -deltas[i % 2])
                        if d_scores_at is not None:
                            found += tl.where(score == float("-inf"), 0.0, above[n][i].to(tl.float32))
                        ds = ds + (found,)
                    dvs = dvs + (_with_products(dv[n], operand(shares, KIND, NATIVE), do_along, KIND, NATIVE),)
                    dks = dks + (_with_products(dk[n], operand(ds, KIND, NATIVE), q_along, KIND, NATIVE),)
                dk = dks
                dv = dvs
    for n in tl.static_range(TILES):
        token = first + 16 * n + r
        _write_grads(
            dk_ptrs, dk[n], 1.0 / root, dk_in_ptr, row, all_rows, token, tokens, ld_dk, head, c, live,
            D, KIND, NATIVE, TURNED,
        )  # fmt: skip
        _write_grad(
            dv_ptr, dv[n], 0, 1.0 if dropout is None else kept_scale, None, row, token, tokens, ld_dv, head, c, live,
            D, KIND, NATIVE, TURNED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["sequences", "tokens", "query_programs", "dropped"])
def _attention_mma_backward_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, do_ptr, d_scores_ptr, dq_ptr, dk_ptr, dv_ptr,
    d_previous_ptr, q0_ptr, k0_ptr, q1_ptr, k1_ptr, q2_ptr, k2_ptr, q3_ptr, k3_ptr,
    dq0_ptr, dk0_ptr, dq1_ptr, dk1_ptr, dq2_ptr, dk2_ptr, dq3_ptr, dk3_ptr, dq_in_ptr, dk_in_ptr,
    sequences, tokens, scale, root,
    ld_q, ld_k, ld_v, ld_do, ld_dq, ld_dk, ld_dv, mask_stride, mask_step, query_programs, dropped, kept_scale,
    H: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr, FETCH: tl.constexpr, BY_HEAD: tl.constexpr,
    TURNED: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # The first programs' warps own queries and write dq, the others' own keys and write dk and dv.
    started(EARLY)
    program = tl.program_id(0)
    if TURNED:
        if program == 0:
            _clear_beyond(dq_ptr, dk_ptr, dv_ptr, sequences * tokens, ld_dq, H * D, BLOCK)
    of_queries = program < query_programs
    if previous_ptr is not None or d_scores_ptr is not None or q0_ptr is not None:
        # by turns: what both read of scores or of earlier layers is then still near
        of_queries = program % 2 == 0
        program = program // 2 + tl.where(of_queries, 0, query_programs)
    q_ptrs = _layers(q0_ptr, q1_ptr, q2_ptr, q3_ptr, q_ptr)
    k_ptrs = _layers(k0_ptr, k1_ptr, k2_ptr, k3_ptr, k_ptr)
    if of_queries:
        _grads_of_queries(
            program, q_ptrs, k_ptrs, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, do_ptr, d_scores_ptr,
            _layers(dq0_ptr, dq1_ptr, dq2_ptr, dq3_ptr, dq_ptr), d_previous_ptr, dq_in_ptr,
            sequences, tokens, scale, root,
            ld_q, ld_k, ld_v, ld_do, ld_dq, mask_stride, mask_step, dropped, kept_scale,
            H, D, KIND, NATIVE, MASK, CAUSAL, WIDE, EVEN, FETCH, BY_HEAD, TURNED, TILES, BLOCK,
        )  # fmt: skip
    else:
        _grads_of_keys(
            program - query_programs, q_ptrs, k_ptrs, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, do_ptr,
            d_scores_ptr, _layers(dk0_ptr, dk1_ptr, dk2_ptr, dk3_ptr, dk_ptr), dv_ptr, dk_in_ptr,
            sequences, tokens, scale, root,
            ld_q, ld_k, ld_v, ld_do, ld_dk, ld_dv, mask_stride, mask_step, dropped, kept_scale,
            H, D, KIND, NATIVE, MASK, CAUSAL, WIDE, FETCH, BY_HEAD, TURNED, TILES, BLOCK,
        )  # fmt: skip


def describe_attention_mma(problem: Attention, config: MmaConfig) -> Launch:
    """Of q, k, v, mask, previous, seed, o, lse, scores; None where absent. With factors, then q0, k0, .. q3, k3."""
    scalars = () if problem.factors else (None,) * (2 * MOST_FACTORS)
    scalars += (problem.sequences, problem.tokens, *_scales(problem), *problem.row_strides)
    scalars += (*_mask_strides(problem), *problem.dropping)
    constants, options = _constants(problem, config), _options(problem, config)
    return Launch(_attention_mma_kernel, _programs(problem, config), scalars, constants, options)


def describe_attention_mma_backward(problem: Attention, config: MmaConfig) -> Launch:
    """Of q, k, v, mask, previous, seed, o, lse, do, d_scores, dq, dk, dv, d_previous; None where absent.

    With factors or gradients that come in, then q0, k0, .. q3, k3, dq0, dk0, .. dq3, dk3, dq_in, dk_in.
    """
    programs = _programs(problem, config)
    of_do = problem.head if problem.by_head else problem.heads * problem.head
    strides = (*problem.row_strides[:3], of_do, *problem.row_strides[3:])
    scalars = () if problem.factors or problem.added else (None,) * (4 * MOST_FACTORS + 2)
    scalars += (problem.sequences, problem.tokens, *_scales(problem), *strides)
    scalars += (*_mask_strides(problem), programs, *problem.dropping)
    constants, options = _constants(problem, config, {"TURNED": problem.turned}), _options(problem, config)
    return Launch(_attention_mma_backward_kernel, 2 * programs, scalars, constants, options)


def _scales(problem: Attention) -> tuple[float, float]:
    """From a score to its exponent of two, and what a score is divided by."""
    return math.log2(math.e) * problem.head**-0.5, problem.head**0.5


def _programs(problem: Attention, config: MmaConfig) -> int:
    warps = problem.sequences * problem.heads * -(-problem.tokens // (16 * config.tiles))
    return -(-warps // config.num_warps)


def _mask_strides(problem: Attention) -> tuple[int | None, int | None]:
    return problem.mask_strides if problem.mask else (None, None)


def _constants(problem: Attention, config: MmaConfig, more: dict[str, object] | None = None) -> dict[str, object]:
    itemsize = 4 if problem.dtype == "float32" else 2
    width = problem.heads * problem.head
    read = (3 + 2 * problem.factors) * problem.sequences * problem.tokens * width * itemsize
    farthest = width * problem.row_strides[3] if problem.turned else 0
    written = () if problem.turned else problem.row_strides[3:]
    farthest = max(farthest, problem.sequences * problem.tokens * max(*problem.row_strides[:3], *written, width))
    if problem.residual:
        farthest = max(farthest, problem.sequences * problem.heads * problem.tokens**2)
    return {
        "H": problem.heads,
        "D": problem.head,
        "KIND": _KINDS[problem.dtype],
        "NATIVE": not triton.knobs.runtime.interpret,
        "MASK": problem.mask,
        "CAUSAL": problem.causal,
        "WIDE": farthest >= 2**31,
        "EVEN": problem.residual and problem.tokens % 2 == 0,
        "FETCH": read > CACHED and not triton.knobs.runtime.interpret,
        "BY_HEAD": problem.by_head,
        **(more or {}),
        "TILES": config.tiles,
        "BLOCK": 32 * config.num_warps,
        "EARLY": problem.early,
    }


def _options(problem: Attention, config: MmaConfig) -> dict[str, object]:
    early = {"launch_pdl": True} if problem.early else {}
    return {"num_warps": config.num_warps, "num_stages": 1, "enable_fp_fusion": False} | early
