"""The forward of attention in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.kernels import start_launch
from isogemm.encoder.attention.kernels.registers import ops
from isogemm.gemm.kernels.tiles import multiple


@triton.jit
def _attend(
    state, q, head_at, mask, key, t, first, groups, pair, tokens, live, previous_at, scores_at, dropout, D, VEC, OWN,
    KEYS, LAST, MASK, CAUSAL, WIDE, BLOCK,
):  # fmt: skip
    """The queries' (largest score, sum, o) after KEYS keys; LAST: some keys may lie beyond the end."""
    DROPOUT: tl.constexpr = dropout is not None
    ks, vs, seen = ops.load_keys(key, tokens, head_at, mask, D, VEC, KEYS, MASK, DROPOUT, BLOCK)
    tops, totals, outs, words = (), (), (), ()
    for n in tl.static_range(OWN):
        scores = ()
        top = state[0][n]
        for i in tl.static_range(KEYS):
            j = ops.read_token(key, i, KEYS, DROPOUT)
            s = ops.dot_of(q[n], ks[i])
            if previous_at is not None:
                s = ops.with_score(s, previous_at, t[n], j, tokens, WIDE)
            s = ops.masked_score(s, seen, i, j, t[n], tokens, LAST, MASK, CAUSAL)
            if scores_at is not None:
                ops.write_score(scores_at, t[n], j, s * 0.6931471805599453, tokens, live, WIDE)
            scores = scores + (s,)
            top = tl.maximum(top, s)
        base = top
        if MASK != "" or CAUSAL or previous_at is not None:
            base = tl.where(top == float("-inf"), 0.0, top)
        shrink = tl.exp2(state[0][n] - base)
        total = state[1][n] * shrink
        o = ops.scaled_head(state[2][n], shrink)
        if DROPOUT and n % 2 == 0:
            words = ()
            for i in tl.static_range(KEYS // 2):
                words = words + (ops.random_words(dropout, pair + i, first + n // 2 * groups),)
        for i in tl.static_range(KEYS):
            p = tl.exp2(scores[i] - base)
            total += p
            if DROPOUT:
                p = ops.kept(p, words[i % (KEYS // 2)][n % 2 * 2 + i // (KEYS // 2)], dropout)
            o = ops.plus_scaled(o, p, vs[i])
        tops = tops + (top,)
        totals = totals + (total,)
        outs = outs + (o,)
    return tops, totals, outs


@triton.jit(do_not_specialize=["sequences", "tokens", "dropped"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, scores_ptr, sequences, tokens, scale,
    ld_q, ld_k, ld_v, mask_stride, mask_step, dropped, kept_scale,
    H: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    WIDE: tl.constexpr, FETCH: tl.constexpr, UNIT: tl.constexpr, VEC: tl.constexpr,
    OWN: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_launch(PDL)
    ld_q, ld_k, ld_v = multiple(ld_q, UNIT), multiple(ld_k, UNIT), multiple(ld_v, UNIT)
    DROPOUT: tl.constexpr = seed_ptr is not None
    groups = ops.groups_of(tokens, OWN, DROPOUT)
    thread = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, sequence, head, live, row = ops.place(thread, groups, sequences, tokens, H, WIDE)
    k_at = k_ptr + (row * ld_k + head * D)
    v_at = v_ptr + (row * ld_v + head * D)
    mask = (mask_ptr + sequence.to(tl.int64) * mask_stride, mask_step) if MASK != "" else None
    head_at = (k_at, v_at, ld_k, ld_v)
    matrix = sequence * H + head
    previous_at = ops.matrix_at(previous_ptr, matrix, tokens, WIDE) if previous_ptr is not None else None
    scores_at = ops.matrix_at(scores_ptr, matrix, tokens, WIDE) if scores_ptr is not None else None
    dropout = (tl.load(seed_ptr), dropped, matrix) if DROPOUT else None
    t, q, tops, totals, outs = (), (), (), (), ()
    for n in tl.static_range(OWN):
        token = ops.owned_token(first, groups, n, DROPOUT)
        t = t + (token,)
        token = tl.minimum(token, tokens - 1)
        ops.fetch_head(k_at + token * ld_k, FETCH)
        ops.fetch_head(v_at + token * ld_v, FETCH)
        values = ops.read_head(q_ptr + ((row + token) * ld_q + head * D), D, VEC, BLOCK)
        q = q + (ops.scaled_head(values, scale),)
        tops = tops + (tl.full([BLOCK], float("-inf"), tl.float32),)
        totals = totals + (tl.zeros([BLOCK], tl.float32),)
        outs = outs + (ops.zero_head(D, BLOCK),)
    state = (tops, totals, outs)
    if DROPOUT:
        for pair in tl.range(0, ops.pairs_of(tokens), KEYS // 2):
            key = ops.first_of_pair(pair)
            state = _attend(
                state, q, head_at, mask, key, t, first, groups, pair, tokens, live, previous_at, scores_at, dropout,
                D, VEC, OWN, KEYS, True, MASK, CAUSAL, WIDE, BLOCK,
            )  # fmt: skip
    else:
        full = tokens // KEYS * KEYS
        for key in tl.range(0, full, KEYS):
            state = _attend(
                state, q, head_at, mask, key, t, first, groups, 0, tokens, live, previous_at, scores_at, None,
                D, VEC, OWN, KEYS, False, MASK, CAUSAL, WIDE, BLOCK,
            )  # fmt: skip
        if full < tokens:
            state = _attend(
                state, q, head_at, mask, full, t, first, groups, 0, tokens, live, previous_at, scores_at, None,
                D, VEC, OWN, KEYS, True, MASK, CAUSAL, WIDE, BLOCK,
            )  # fmt: skip
    for n in tl.static_range(OWN):
        total = state[1][n]
        empty = total == 0.0
        share = 1.0 / tl.where(empty, 1.0, total)
        if DROPOUT:
            share *= kept_scale
        written = live & (t[n] < tokens)
        ops.write_head(
            o_ptr + ((row + t[n]) * (H * D) + head * D), ops.scaled_head(state[2][n], share), written, D, VEC, BLOCK
        )
        lse = tl.where(empty, float("inf"), state[0][n] + tl.log2(total))
        tl.store(lse_ptr + (row + t[n]) * H + head, lse, mask=written)


KERNEL = _attention_kernel
