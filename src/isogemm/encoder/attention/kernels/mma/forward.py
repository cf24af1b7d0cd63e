"""The forward of attention by fragments."""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.kernels import start_launch
from isogemm.encoder.attention.kernels.lanes import operand, row_max, row_sum
from isogemm.encoder.attention.kernels.mma import ops


@triton.jit(do_not_specialize=["sequences", "tokens", "dropped"])
def _attention_mma_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, scores_ptr,
    q0_ptr, k0_ptr, q1_ptr, k1_ptr, q2_ptr, k2_ptr, q3_ptr, k3_ptr, sequences, tokens, scale, root,
    ld_q, ld_k, ld_v, mask_stride, mask_step, dropped, kept_scale,
    H: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr, FETCH: tl.constexpr, BY_HEAD: tl.constexpr,
    TILES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_launch(PDL)
    all_rows, r, c, first, sequence, head, live, row = ops.place(
        tokens, sequences, H, TILES, WIDE, BLOCK, tl.program_id(0)
    )
    q_at = ops.layers_at(ops.all_layers(q0_ptr, q1_ptr, q2_ptr, q3_ptr, q_ptr), row, head, ld_q, all_rows, D, BY_HEAD)
    k_at = ops.layers_at(ops.all_layers(k0_ptr, k1_ptr, k2_ptr, k3_ptr, k_ptr), row, head, ld_k, all_rows, D, BY_HEAD)
    v_at = ops.head_at(v_ptr, row, head, ld_v, all_rows, D, BY_HEAD)
    ops.fetch_layers(k_at, ld_k, tokens, FETCH, BLOCK)
    ops.fetch(v_at, ld_v, tokens, FETCH, BLOCK)
    mask_at = mask_ptr + sequence.to(tl.int64) * mask_stride if MASK != "" else None
    q, tops, totals, outs = (), (), (), ()
    for n in tl.static_range(TILES):
        q = q + (ops.load_operands(q_at, ld_q, first + 16 * n + r, tokens, c, ops.load_rows, BY_HEAD, D, KIND),)
        low = tl.full([BLOCK], float("-inf"), tl.float32)
        zero = tl.zeros([BLOCK], tl.float32)
        tops = tops + ((low, low),)
        totals = totals + ((zero, zero),)
        outs = outs + (ops.zero_results((D + 7) // 8, BLOCK),)
    state = (tops, totals, outs)
    matrix = sequence * H + head
    previous_at = ops.matrix_at(previous_ptr, matrix, tokens, WIDE) if previous_ptr is not None else None
    scores_at = ops.matrix_at(scores_ptr, matrix, tokens, WIDE) if scores_ptr is not None else None
    dropout = (tl.load(seed_ptr), dropped, matrix) if seed_ptr is not None else None
    WHOLE: tl.constexpr = q0_ptr is not None or KIND != tl.float32  # else 39 us of 42 tokens become 44 (H200)
    for BOUNDED in tl.static_range(0 if WHOLE else 1, 2):  # whole blocks, then one that ends beyond the last key
        whole = tokens // 16 * 16 if WHOLE else 0
        for key in tl.range(whole if BOUNDED else 0, tokens if BOUNDED else whole, 16):
            state = _attend(
                state, q, k_at, v_at, mask_at, previous_at, scores_at, dropout, ld_k, ld_v, mask_step, key, first, r, c,
                live, tokens, scale, root, D, KIND, MASK, CAUSAL, WIDE, EVEN, BY_HEAD, TILES, BLOCK, BOUNDED,
            )  # fmt: skip
    for n in tl.static_range(TILES):
        for i in tl.static_range(2):
            token = first + (16 * n + 8 * i) + r
            written = live & (token < tokens)
            total = row_sum(state[1][n][i])
            empty = total == 0.0
            share = 1.0 / tl.where(empty, 1.0, total)
            if dropout is not None:
                share *= kept_scale
            at = o_ptr + ((row + token) * (H * D) + head * D)
            for j in tl.static_range(0, D, 8):
                out = state[2][n][j // 8]
                column = j + 2 * c
                even, odd = out[2 * i] * share, out[2 * i + 1] * share
                ops.store_pair(at + column, even, odd, written & (column < D), KIND)
            lse = tl.where(empty, float("inf"), state[0][n][i] * scale + tl.log2(total))
            lse_at = ops.head_at(lse_ptr, row, head, H, all_rows, 1, BY_HEAD)
            tl.store(lse_at + token * (1 if BY_HEAD else H), lse, mask=written & (c == 0))


@triton.jit
def _attend(
    state, q, k_at, v_at, mask_at, previous_at, scores_at, dropout, ld_k, ld_v, mask_step, key, first, r, c, live,
    tokens, scale, root, D, KIND, MASK, CAUSAL, WIDE, EVEN, BY_HEAD, TILES, BLOCK, BOUNDED,
):  # fmt: skip
    """The rows' (largest score, sum, o) after keys key .. key + 15; sums are per lane until the end."""
    k, v, added, keys = (), (), (), ()
    for i in tl.static_range(2):
        k = k + (ops.load_operands(k_at, ld_k, key + 8 * i + r, tokens, c, ops.load_row, BY_HEAD, D, KIND, BOUNDED),)
        along = ops.load_column(v_at, ld_v, key + 8 * i + 2 * c, tokens, r, D, KIND, BOUNDED)
        v = v + (ops.as_operands(along, BY_HEAD, KIND),)
        for j in tl.static_range(2):
            keys = keys + (key + (8 * i + j) + 2 * c,)
            if BOUNDED or MASK != "":
                added = added + (ops.score_of_key(mask_at, mask_step, key + (8 * i + j) + 2 * c, tokens, root, MASK),)
    before = ()
    if previous_at is not None:
        for n in tl.static_range(TILES):
            query = first + 16 * n + r
            before = before + (
                ops.scores_of_rows(previous_at, query, keys[0], tokens, EVEN, WIDE)
                + ops.scores_of_rows(previous_at, query, keys[2], tokens, EVEN, WIDE),
            )
    tops, totals, outs = (), (), ()
    for n in tl.static_range(TILES):
        s = ops.score_products(q[n], k[0], BLOCK, KIND) + ops.score_products(q[n], k[1], BLOCK, KIND)
        if previous_at is not None:
            s = ops.with_scores(s, before[n], root, EVEN, KIND)
        of_rows = ()
        for i in tl.static_range(2):
            query = first + (16 * n + 8 * i) + r
            seen = ()
            for j in tl.static_range(4):
                score = s[4 * (j // 2) + 2 * i + j % 2]
                if BOUNDED or MASK != "":
                    score += added[j]
                seen = seen + (ops.if_seen(score, keys[j], query, CAUSAL),)
            if scores_at is not None:
                for j in tl.static_range(0, 4, 2):
                    even, odd = seen[j] * (1.0 / root), seen[j + 1] * (1.0 / root)
                    ops.write_scores(scores_at, query, keys[j], even, odd, tokens, live, EVEN, WIDE)
            of_rows = of_rows + (
                _attend_row(
                    state[0][n][i], state[1][n][i], seen[0], seen[1], seen[2], seen[3],
                    scale, MASK != "" or CAUSAL or previous_at is not None,
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
            words = ops.random_words(dropout, key // 2 + 2 * c, first // 2 + (8 * n + r), True)
        for i in tl.static_range(2):
            p = (of_rows[0][3 + 2 * i], of_rows[0][4 + 2 * i], of_rows[1][3 + 2 * i], of_rows[1][4 + 2 * i])
            if dropout is not None:
                p = (
                    ops.kept(p[0], words[0][i], dropout), ops.kept(p[1], words[1][i], dropout),
                    ops.kept(p[2], words[0][2 + i], dropout), ops.kept(p[3], words[1][2 + i], dropout),
                )  # fmt: skip
            o = ops.with_products(o, operand(p, KIND), v[i], KIND)
        outs = outs + (o,)
    return tops, totals, outs


@triton.jit
def _attend_row(top, total, s0, s1, s2, s3, scale, EMPTY):
    """A row's largest score and sum after four more scores; the factor of earlier sums; the four exponentials."""
    above = tl.maximum(top, row_max(tl.maximum(tl.maximum(s0, s1), tl.maximum(s2, s3))))
    base = above
    if EMPTY:
        base = tl.where(above == float("-inf"), 0.0, above)
    shrink = tl.exp2((top - base) * scale)  # 1 if none is higher: keys that are left out change no bit
    p0 = tl.exp2((s0 - base) * scale)
    p1 = tl.exp2((s1 - base) * scale)
    p2 = tl.exp2((s2 - base) * scale)
    p3 = tl.exp2((s3 - base) * scale)
    return above, total * shrink + ((p0 + p1) + (p2 + p3)), shrink, p0, p1, p2, p3


KERNEL = _attention_mma_kernel
