"""The backward of attention in registers: some threads own queries, others keys."""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.kernels import start_launch
from isogemm.encoder.attention.kernels.registers import ops
from isogemm.gemm.kernels.tiles import multiple


@triton.jit
def _query_grads(
    dq, q, do, lse, delta, head_at, mask, key, t, first, groups, pair, tokens, live, previous_at, d_scores_at,
    d_previous_at, dropout, kept_scale, D, VEC, OWN, KEYS, LAST, MASK, CAUSAL, WIDE, BLOCK,
):  # fmt: skip
    """dq after KEYS keys; LAST: some may lie beyond the end."""
    DROPOUT: tl.constexpr = dropout is not None
    ks, vs, seen = ops.load_keys(key, tokens, head_at, mask, D, VEC, KEYS, MASK, DROPOUT, BLOCK)
    after, words = (), ()
    for n in tl.static_range(OWN):
        total = dq[n]
        if DROPOUT and n % 2 == 0:
            words = ()
            for i in tl.static_range(KEYS // 2):
                words = words + (ops.random_words(dropout, pair + i, first + n // 2 * groups),)
        for i in tl.static_range(KEYS):
            j = ops.read_token(key, i, KEYS, DROPOUT)
            s = ops.dot_of(q[n], ks[i])
            if previous_at is not None:
                s = ops.with_score(s, previous_at, t[n], j, tokens, WIDE)
            s = ops.masked_score(s, seen, i, j, t[n], tokens, LAST, MASK, CAUSAL)
            if DROPOUT:
                dp = ops.kept(ops.dot_of(do[n], vs[i]), words[i % (KEYS // 2)][n % 2 * 2 + i // (KEYS // 2)], dropout)
                ds = tl.exp2(s - lse[n]) * tl.fma(dp, kept_scale, -delta[n])
            else:
                ds = tl.exp2(s - lse[n]) * (ops.dot_of(do[n], vs[i]) - delta[n])
            if d_scores_at is not None:
                ds = ops.with_gradient(ds, s, d_scores_at, t[n], j, tokens, WIDE)
            if d_previous_at is not None:
                ops.write_score(d_previous_at, t[n], j, ds, tokens, live, WIDE)
            total = ops.plus_scaled(total, ds, ks[i])
        after = after + (total,)
    return after


@triton.jit
def _grads_of_queries(
    first, groups, row, head, live, tokens, scale, head_at, mask, upstream_at, previous_at, d_scores_at, dq_ptr,
    d_previous_at, ld_dq, dropout, kept_scale, H, D, VEC, OWN, KEYS, MASK, CAUSAL, WIDE, FETCH, BLOCK,
):  # fmt: skip
    DROPOUT: tl.constexpr = dropout is not None
    k_at, v_at, ld_k, ld_v = head_at
    q_at, do_at, o_at, lse_at, ld_q, ld_do = upstream_at
    t, q, do, lse, delta, dq = (), (), (), (), (), ()
    for n in tl.static_range(OWN):
        t = t + (ops.owned_token(first, groups, n, DROPOUT),)
        at = tl.minimum(t[n], tokens - 1)
        ops.fetch_head(k_at + at * ld_k, FETCH)
        ops.fetch_head(v_at + at * ld_v, FETCH)
        q = q + (ops.scaled_head(ops.read_head(q_at + at * ld_q, D, VEC, BLOCK), scale * 1.4426950408889634),)
        do = do + (ops.read_head(do_at + at * ld_do, D, VEC, BLOCK),)
        lse = lse + (tl.load(lse_at + at * H),)
        delta = delta + (ops.dot_of(do[n], ops.read_head(o_at + at * (H * D), D, VEC, BLOCK)),)
        dq = dq + (ops.zero_head(D, BLOCK),)
    if DROPOUT:
        for pair in tl.range(0, ops.pairs_of(tokens), KEYS // 2):
            key = ops.first_of_pair(pair)
            dq = _query_grads(
                dq, q, do, lse, delta, head_at, mask, key, t, first, groups, pair, tokens, live, previous_at,
                d_scores_at, d_previous_at, dropout, kept_scale, D, VEC, OWN, KEYS, True, MASK, CAUSAL, WIDE, BLOCK,
            )  # fmt: skip
    else:
        full = tokens // KEYS * KEYS
        for key in tl.range(0, full, KEYS):
            dq = _query_grads(
                dq, q, do, lse, delta, head_at, mask, key, t, first, groups, 0, tokens, live, previous_at, d_scores_at,
                d_previous_at, None, None, D, VEC, OWN, KEYS, False, MASK, CAUSAL, WIDE, BLOCK,
            )  # fmt: skip
        if full < tokens:
            dq = _query_grads(
                dq, q, do, lse, delta, head_at, mask, full, t, first, groups, 0, tokens, live, previous_at, d_scores_at,
                d_previous_at, None, None, D, VEC, OWN, KEYS, True, MASK, CAUSAL, WIDE, BLOCK,
            )  # fmt: skip
    for n in tl.static_range(OWN):
        written = live & (t[n] < tokens)
        ops.write_head(
            dq_ptr + ((row + t[n]) * ld_dq + head * D), ops.scaled_head(dq[n], scale), written, D, VEC, BLOCK
        )


@triton.jit
def _grads_of_keys(
    first, groups, row, head, live, tokens, scale, head_at, mask, upstream_at, previous_at, d_scores_at, dk_ptr, dv_ptr,
    ld_dk, ld_dv, dropout, kept_scale, H, D, VEC, OWN, QUERIES, MASK, CAUSAL, WIDE, FETCH, BLOCK,
):  # fmt: skip
    DROPOUT: tl.constexpr = dropout is not None
    k_at, v_at, ld_k, ld_v = head_at
    q_at, do_at, o_at, lse_at, ld_q, ld_do = upstream_at
    t, k, v, seen, dks, dvs = (), (), (), (), (), ()
    for n in tl.static_range(OWN):
        t = t + (ops.owned_token(first, groups, n, DROPOUT),)
        at = tl.minimum(t[n], tokens - 1)
        ops.fetch_head(q_at + at * ld_q, FETCH)
        ops.fetch_head(do_at + at * ld_do, FETCH)
        ops.fetch_head(o_at + at * (H * D), FETCH)
        ops.fetch_head(lse_at + at * H, FETCH)
        k = k + (ops.scaled_head(ops.read_head(k_at + at * ld_k, D, VEC, BLOCK), scale * 1.4426950408889634),)
        v = v + (ops.read_head(v_at + at * ld_v, D, VEC, BLOCK),)
        if MASK != "":
            seen = seen + (tl.load(mask[0] + at * mask[1]),)
        dks = dks + (ops.zero_head(D, BLOCK),)
        dvs = dvs + (ops.zero_head(D, BLOCK),)
    end = ops.pairs_of(tokens) if DROPOUT else tokens
    for pair in tl.range(0, end, QUERIES // 2 if DROPOUT else QUERIES):
        query = ops.first_of_pair(pair) if DROPOUT else pair
        qs, dos, outs, lses = (), (), (), ()
        for i in tl.static_range(QUERIES):  # beyond the end, queries that see nothing
            token = ops.read_token(query, i, QUERIES, DROPOUT)
            j = tl.minimum(token, tokens - 1)
            qs = qs + (ops.read_head(q_at + j * ld_q, D, VEC, BLOCK),)
            dos = dos + (ops.read_head(do_at + j * ld_do, D, VEC, BLOCK),)
            outs = outs + (ops.read_head(o_at + j * (H * D), D, VEC, BLOCK),)
            lses = lses + (tl.where(token < tokens, tl.load(lse_at + j * H), float("inf")),)
        deltas = ()
        for i in tl.static_range(QUERIES):
            deltas = deltas + (ops.dot_of(dos[i], outs[i]),)
        after_dk, after_dv, words = (), (), ()
        for n in tl.static_range(OWN):
            dk = dks[n]
            dv = dvs[n]
            if DROPOUT and n % 2 == 0:
                words = ()
                for i in tl.static_range(QUERIES // 2):
                    words = words + (ops.random_words(dropout, first + n // 2 * groups, pair + i),)
            for i in tl.static_range(QUERIES):
                j = ops.read_token(query, i, QUERIES, DROPOUT)
                s = ops.dot_of(qs[i], k[n])
                if previous_at is not None:
                    s = ops.with_score(s, previous_at, j, t[n], tokens, WIDE)
                s = ops.masked_score(s, seen, n, t[n], j, tokens, False, MASK, CAUSAL)
                p = tl.exp2(s - lses[i])
                if DROPOUT:
                    word = words[i % (QUERIES // 2)][i // (QUERIES // 2) * 2 + n % 2]
                    dv = ops.plus_scaled(dv, ops.kept(p, word, dropout), dos[i])
                    ds = p * tl.fma(ops.kept(ops.dot_of(dos[i], v[n]), word, dropout), kept_scale, -deltas[i])
                else:
                    dv = ops.plus_scaled(dv, p, dos[i])
                    ds = p * (ops.dot_of(dos[i], v[n]) - deltas[i])
                if d_scores_at is not None:
                    ds = ops.with_gradient(ds, s, d_scores_at, j, t[n], tokens, WIDE)
                dk = ops.plus_scaled(dk, ds, qs[i])
            after_dk = after_dk + (dk,)
            after_dv = after_dv + (dv,)
        dks = after_dk
        dvs = after_dv
    for n in tl.static_range(OWN):
        written = live & (t[n] < tokens)
        dk = ops.scaled_head(dks[n], scale)
        ops.write_head(dk_ptr + ((row + t[n]) * ld_dk + head * D), dk, written, D, VEC, BLOCK)
        dv = dvs[n]
        if DROPOUT:
            dv = ops.scaled_head(dv, kept_scale)
        ops.write_head(dv_ptr + ((row + t[n]) * ld_dv + head * D), dv, written, D, VEC, BLOCK)


@triton.jit(do_not_specialize=["sequences", "tokens", "query_programs", "dropped"])
def _attention_backward_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, do_ptr, d_scores_ptr, dq_ptr, dk_ptr, dv_ptr,
    d_previous_ptr, sequences, tokens, inverse_root,
    ld_q, ld_k, ld_v, ld_do, ld_dq, ld_dk, ld_dv, mask_stride, mask_step, query_programs, dropped, kept_scale,
    H: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    WIDE: tl.constexpr, FETCH: tl.constexpr, UNIT: tl.constexpr, VEC: tl.constexpr,
    OWN_Q: tl.constexpr, OWN_K: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # The first programs' threads own queries and write dq, the others' own keys and write dk and dv.
    start_launch(PDL)
    program = tl.program_id(0)
    ld_q, ld_k, ld_v = multiple(ld_q, UNIT), multiple(ld_k, UNIT), multiple(ld_v, UNIT)
    ld_do, ld_dq, ld_dk = multiple(ld_do, UNIT), multiple(ld_dq, UNIT), multiple(ld_dk, UNIT)
    ld_dv = multiple(ld_dv, UNIT)
    of_queries = program < query_programs
    own = tl.where(of_queries, OWN_Q, OWN_K)
    groups = ops.groups_of(tokens, own, seed_ptr is not None)
    thread = tl.where(of_queries, program, program - query_programs) * BLOCK + tl.arange(0, BLOCK)
    first, sequence, head, live, row = ops.place(thread, groups, sequences, tokens, H, WIDE)
    mask = (mask_ptr + sequence.to(tl.int64) * mask_stride, mask_step) if MASK != "" else None
    q_at = q_ptr + (row * ld_q + head * D)
    k_at = k_ptr + (row * ld_k + head * D)
    v_at = v_ptr + (row * ld_v + head * D)
    o_at = o_ptr + (row * (H * D) + head * D)
    do_at = do_ptr + (row * ld_do + head * D)
    lse_at = lse_ptr + (row * H + head)
    head_at = (k_at, v_at, ld_k, ld_v)
    upstream_at = (q_at, do_at, o_at, lse_at, ld_q, ld_do)
    matrix = sequence * H + head
    previous_at = ops.matrix_at(previous_ptr, matrix, tokens, WIDE) if previous_ptr is not None else None
    d_scores_at = ops.matrix_at(d_scores_ptr, matrix, tokens, WIDE) if d_scores_ptr is not None else None
    d_previous_at = ops.matrix_at(d_previous_ptr, matrix, tokens, WIDE) if d_previous_ptr is not None else None
    dropout = (tl.load(seed_ptr), dropped, matrix) if seed_ptr is not None else None
    if of_queries:
        _grads_of_queries(
            first, groups, row, head, live, tokens, inverse_root, head_at, mask, upstream_at, previous_at, d_scores_at,
            dq_ptr, d_previous_at, ld_dq, dropout, kept_scale, H, D, VEC, OWN_Q, KEYS, MASK, CAUSAL, WIDE, FETCH, BLOCK,
        )  # fmt: skip
    else:
        _grads_of_keys(
            first, groups, row, head, live, tokens, inverse_root, head_at, mask, upstream_at, previous_at, d_scores_at,
            dk_ptr, dv_ptr, ld_dk, ld_dv, dropout, kept_scale, H, D, VEC, OWN_K, QUERIES, MASK, CAUSAL, WIDE, FETCH,
            BLOCK,
        )  # fmt: skip


KERNEL = _attention_backward_kernel
