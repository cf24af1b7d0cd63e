"""Attention of short heads (d <= 16), in fp32 registers: a thread owns a few tokens of one head of one sequence.

Tensor cores would pad d to 8 or 16 and the tokens to a power of two, and exchange P between threads; here every sum is
one thread's, over keys (or queries) in ascending order, so no bit depends on the batch, the packing or the launch.

With dropout tokens go in pairs that are eight apart, whose weights share random words: what a thread owns, and what it
takes in at a time. A pair has a number, as in `epilogues.random`.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from isogemm.core.launch import Launch
from isogemm.encoder.configs_attention import CACHED, Attention, RegistersBackwardConfig, RegistersConfig, threads
from isogemm.encoder.kernels_forward import started
from isogemm.epilogues.device import philox
from isogemm.gemm.kernels import multiple


@triton.jit
def _columns(x, BLOCK: tl.constexpr, VEC: tl.constexpr):
    """The VEC columns of x [BLOCK, VEC], each [BLOCK], in order."""
    if VEC == 1:
        return (tl.reshape(x, [BLOCK]),)
    elif VEC == 2:
        return tl.split(x)
    else:
        even, odd = tl.split(tl.reshape(x, [BLOCK, VEC // 2, 2]))
        evens = _columns(even, BLOCK, VEC // 2)
        odds = _columns(odd, BLOCK, VEC // 2)
        columns = ()
        for c in tl.static_range(VEC // 2):
            columns = columns + (evens[c], odds[c])
        return columns


@triton.jit
def _read(at, D: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """The D floats at each address, as D tensors [BLOCK]."""
    values = ()
    for c in tl.static_range(0, D, VEC):
        block = tl.load(at[:, None] + (c + tl.arange(0, VEC))[None, :])
        columns = _columns(block.to(tl.float32), BLOCK, VEC)
        for i in tl.static_range(VEC):
            values = values + (columns[i],)
    return values


@triton.jit
def _fetch(at, FETCH: tl.constexpr):
    """Bring the line at each address into the cache: every token is some thread's own, and read by all of its head."""
    if FETCH:
        tl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _write(at, values, live, D: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr):
    """D tensors [BLOCK] to the D places at each address."""
    for c in tl.static_range(0, D, VEC):
        block = _joined(values[c : c + VEC], BLOCK, VEC)
        tl.store(at[:, None] + (c + tl.arange(0, VEC))[None, :], block.to(at.dtype.element_ty), mask=live[:, None])


@triton.jit
def _joined(values, BLOCK: tl.constexpr, VEC: tl.constexpr):
    """VEC tensors [BLOCK] as the columns of one [BLOCK, VEC]."""
    if VEC == 1:
        return tl.reshape(values[0], [BLOCK, 1])
    elif VEC == 2:
        return tl.join(values[0], values[1])
    else:
        evens = ()
        odds = ()
        for c in tl.static_range(0, VEC, 2):
            evens = evens + (values[c],)
            odds = odds + (values[c + 1],)
        even = _joined(evens, BLOCK, VEC // 2)
        odd = _joined(odds, BLOCK, VEC // 2)
        return tl.reshape(tl.join(even, odd), [BLOCK, VEC])


@triton.jit
def _dot(a, b, D: tl.constexpr):
    """sum_c a[c] b[c], ascending."""
    total = a[0] * b[0]
    for c in tl.static_range(1, D):
        total = tl.fma(a[c], b[c], total)
    return total


@triton.jit
def _zeros(D: tl.constexpr, BLOCK: tl.constexpr):
    result = ()
    for _ in tl.static_range(D):
        result = result + (tl.zeros([BLOCK], tl.float32),)
    return result


@triton.jit
def _scaled(a, factor, D: tl.constexpr):
    """a times a number."""
    result = ()
    for c in tl.static_range(D):
        result = result + (a[c] * factor,)
    return result


@triton.jit
def _added(a, factor, b, D: tl.constexpr):
    """a + factor b."""
    result = ()
    for c in tl.static_range(D):
        result = result + (tl.fma(factor, b[c], a[c]),)
    return result


@triton.jit
def _pairs(tokens):
    """How many pairs there are."""
    return (tokens >> 4 << 3) + tl.minimum(tokens & 15, 8)


@triton.jit
def _first_of_pair(pair):
    return (pair >> 3 << 4) + (pair & 7)


@triton.jit
def _taken(first, i: tl.constexpr, COUNT: tl.constexpr, DROPOUT: tl.constexpr):
    """The i-th of COUNT tokens that are taken in at a time."""
    if DROPOUT:
        return first + (i % (COUNT // 2) + i // (COUNT // 2) * 8)
    else:
        return first + i


@triton.jit
def _owned(first, groups, n: tl.constexpr, DROPOUT: tl.constexpr):
    """A thread's n-th token; it may lie beyond the end."""
    if DROPOUT:
        return _first_of_pair(first + n // 2 * groups) + n % 2 * 8
    else:
        return first + n * groups


@triton.jit
def _groups(tokens, own, DROPOUT: tl.constexpr):
    """Threads of a head."""
    if DROPOUT:
        return (_pairs(tokens) + own // 2 - 1) // (own // 2)
    else:
        return (tokens + own - 1) // own


@triton.jit
def _matrix_at(ptr, matrix, tokens, WIDE: tl.constexpr):
    """The first of a matrix's scores."""
    if WIDE:
        matrix = matrix.to(tl.int64)
    return ptr + matrix * tokens * tokens


@triton.jit
def _score_at(at, query, key, tokens, WIDE: tl.constexpr):
    """Of the last query or key for any beyond."""
    query = tl.minimum(query, tokens - 1)
    if WIDE:
        query = query.to(tl.int64)
    return at + (query * tokens + tl.minimum(key, tokens - 1))


@triton.jit
def _with_score(s, at, query, key, tokens, WIDE: tl.constexpr):
    """s, in units of log 2, and a score in memory."""
    before = tl.load(_score_at(at, query, key, tokens, WIDE)).to(tl.float32)
    return tl.fma(before, 1.4426950408889634, s)


@triton.jit
def _with_gradient(ds, s, at, query, key, tokens, WIDE: tl.constexpr):
    """ds and what comes in for the score itself, unless that is -inf, or none."""
    above = tl.load(_score_at(at, query, key, tokens, WIDE)).to(tl.float32)
    return ds + tl.where((s == float("-inf")) | (query >= tokens), 0.0, above)


@triton.jit
def _write_score(at, query, key, x, tokens, live, WIDE: tl.constexpr):
    written = live & (query < tokens) & (key < tokens)
    tl.store(_score_at(at, query, key, tokens, WIDE), x.to(at.dtype.element_ty), mask=written)


@triton.jit
def _words(dropout, keys, queries):
    """As in `epilogues.random`, of a pair of keys and one of queries; dropout: the seed, the threshold, the matrix."""
    zero = tl.zeros(dropout[2].shape, tl.int32)
    return philox(dropout[0], keys + zero, queries + zero, dropout[2])


@triton.jit
def _kept(x, word, dropout):
    return tl.where((word >> 16).to(tl.int32) < dropout[1], 0.0, x)


@triton.jit
def _masked(s, seen, i: tl.constexpr, key, query, tokens, LAST: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr):
    """The score s, in units of log 2, or -inf where the query does not see the key."""
    if MASK == "additive":
        s += seen[i].to(tl.float32) * 1.4426950408889634
    if MASK == "bool":
        s = tl.where(seen[i] != 0, float("-inf"), s)
    if LAST:
        s = tl.where(key < tokens, s, float("-inf"))
    if CAUSAL:
        s = tl.where(key <= query, s, float("-inf"))
    return s


@triton.jit
def _load_keys(
    key, tokens, k_at, v_at, mask_at, ld_k, ld_v, mask_step,
    D: tl.constexpr, VEC: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """KEYS keys from `key` on, their values and what the mask says of them; the last one's for any beyond."""
    ks = ()
    vs = ()
    seen = ()
    for i in tl.static_range(KEYS):
        j = tl.minimum(_taken(key, i, KEYS, DROPOUT), tokens - 1)
        ks = ks + (_read(k_at + j * ld_k, D, VEC, BLOCK),)
        vs = vs + (_read(v_at + j * ld_v, D, VEC, BLOCK),)
        if MASK != "":
            seen = seen + (tl.load(mask_at + j * mask_step),)
    return ks, vs, seen


@triton.jit
def _attend(
    state, q, held, key, t, first, groups, pair, tokens, live, previous_at, scores_at, dropout,
    D: tl.constexpr, OWN: tl.constexpr, KEYS: tl.constexpr, LAST: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The queries' (largest score, sum, o) with the held keys taken in; LAST: some may lie beyond the end."""
    DROPOUT: tl.constexpr = dropout is not None
    ks, vs, seen = held
    tops = ()
    totals = ()
    outs = ()
    words = ()
    for n in tl.static_range(OWN):
        scores = ()
        top = state[0][n]
        for i in tl.static_range(KEYS):
            j = _taken(key, i, KEYS, DROPOUT)
            s = _dot(q[n], ks[i], D)
            if previous_at is not None:
                s = _with_score(s, previous_at, t[n], j, tokens, WIDE)
            s = _masked(s, seen, i, j, t[n], tokens, LAST, MASK, CAUSAL)
            if scores_at is not None:
                _write_score(scores_at, t[n], j, s * 0.6931471805599453, tokens, live, WIDE)
            scores = scores + (s,)
            top = tl.maximum(top, s)
        base = top
        if MASK != "" or CAUSAL or previous_at is not None:
            base = tl.where(top == float("-inf"), 0.0, top)
        shrink = tl.exp2(state[0][n] - base)
        total = state[1][n] * shrink
        o = _scaled(state[2][n], shrink, D)
        if DROPOUT and n % 2 == 0:
            words = ()
            for i in tl.static_range(KEYS // 2):
                words = words + (_words(dropout, pair + i, first + n // 2 * groups),)
        for i in tl.static_range(KEYS):
            p = tl.exp2(scores[i] - base)
            total += p
            if DROPOUT:
                p = _kept(p, words[i % (KEYS // 2)][n % 2 * 2 + i // (KEYS // 2)], dropout)
            o = _added(o, p, vs[i], D)
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
    OWN: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    started(EARLY)
    ld_q = multiple(ld_q, UNIT)
    ld_k = multiple(ld_k, UNIT)
    ld_v = multiple(ld_v, UNIT)
    DROPOUT: tl.constexpr = seed_ptr is not None
    groups = _groups(tokens, OWN, DROPOUT)
    thread = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = thread // groups
    first = thread - pair * groups
    sequence = pair // H
    head = pair - sequence * H
    live = sequence < sequences
    sequence = tl.minimum(sequence, sequences - 1)  # so that only stores need a mask
    row = sequence * tokens
    if WIDE:
        row = row.to(tl.int64)
    k_at = k_ptr + (row * ld_k + head * D)
    v_at = v_ptr + (row * ld_v + head * D)
    mask_at = None
    if MASK != "":
        mask_at = mask_ptr + sequence.to(tl.int64) * mask_stride
    matrix = sequence * H + head
    previous_at = None
    if previous_ptr is not None:
        previous_at = _matrix_at(previous_ptr, matrix, tokens, WIDE)
    scores_at = None
    if scores_ptr is not None:
        scores_at = _matrix_at(scores_ptr, matrix, tokens, WIDE)
    dropout = None
    if DROPOUT:
        dropout = (tl.load(seed_ptr), dropped, matrix)
    t = ()
    q = ()
    tops = ()
    totals = ()
    outs = ()
    for n in tl.static_range(OWN):
        token = _owned(first, groups, n, DROPOUT)
        t = t + (token,)
        token = tl.minimum(token, tokens - 1)
        _fetch(k_at + token * ld_k, FETCH)
        _fetch(v_at + token * ld_v, FETCH)
        values = _read(q_ptr + ((row + token) * ld_q + head * D), D, VEC, BLOCK)
        q = q + (_scaled(values, scale, D),)
        tops = tops + (tl.full([BLOCK], float("-inf"), tl.float32),)
        totals = totals + (tl.zeros([BLOCK], tl.float32),)
        outs = outs + (_zeros(D, BLOCK),)
    state = (tops, totals, outs)
    if DROPOUT:
        for pair in tl.range(0, _pairs(tokens), KEYS // 2):
            key = _first_of_pair(pair)
            held = _load_keys(key, tokens, k_at, v_at, mask_at, ld_k, ld_v, mask_step, D, VEC, KEYS, MASK, True, BLOCK)
            state = _attend(
                state, q, held, key, t, first, groups, pair, tokens, live, previous_at, scores_at, dropout,
                D, OWN, KEYS, True, MASK, CAUSAL, WIDE,
            )  # fmt: skip
    else:
        full = tokens // KEYS * KEYS
        for key in tl.range(0, full, KEYS):
            held = _load_keys(key, tokens, k_at, v_at, mask_at, ld_k, ld_v, mask_step, D, VEC, KEYS, MASK, False, BLOCK)
            state = _attend(
                state, q, held, key, t, first, groups, 0, tokens, live, previous_at, scores_at, None,
                D, OWN, KEYS, False, MASK, CAUSAL, WIDE,
            )  # fmt: skip
        if full < tokens:
            held = _load_keys(
                full, tokens, k_at, v_at, mask_at, ld_k, ld_v, mask_step, D, VEC, KEYS, MASK, False, BLOCK
            )
            state = _attend(
                state, q, held, full, t, first, groups, 0, tokens, live, previous_at, scores_at, None,
                D, OWN, KEYS, True, MASK, CAUSAL, WIDE,
            )  # fmt: skip
    for n in tl.static_range(OWN):
        total = state[1][n]
        empty = total == 0.0
        share = 1.0 / tl.where(empty, 1.0, total)
        if DROPOUT:
            share *= kept_scale
        written = live & (t[n] < tokens)
        _write(o_ptr + ((row + t[n]) * (H * D) + head * D), _scaled(state[2][n], share, D), written, D, VEC, BLOCK)
        lse = tl.where(empty, float("inf"), state[0][n] + tl.log2(total))
        tl.store(lse_ptr + (row + t[n]) * H + head, lse, mask=written)


@triton.jit
def _query_grads(
    dq, q, do, lse, delta, held, key, t, first, groups, pair, tokens, live, previous_at, d_scores_at, d_previous_at,
    dropout, kept_scale,
    D: tl.constexpr, OWN: tl.constexpr, KEYS: tl.constexpr, LAST: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """dq with the held keys taken in."""
    DROPOUT: tl.constexpr = dropout is not None
    ks, vs, seen = held
    after = ()
    words = ()
    for n in tl.static_range(OWN):
        total = dq[n]
        if DROPOUT and n % 2 == 0:
            words = ()
            for i in tl.static_range(KEYS // 2):
                words = words + (_words(dropout, pair + i, first + n // 2 * groups),)
        for i in tl.static_range(KEYS):
            j = _taken(key, i, KEYS, DROPOUT)
            s = _dot(q[n], ks[i], D)
            if previous_at is not None:
                s = _with_score(s, previous_at, t[n], j, tokens, WIDE)
            s = _masked(s, seen, i, j, t[n], tokens, LAST, MASK, CAUSAL)
            if DROPOUT:
                dp = _kept(_dot(do[n], vs[i], D), words[i % (KEYS // 2)][n % 2 * 2 + i // (KEYS // 2)], dropout)
                ds = tl.exp2(s - lse[n]) * tl.fma(dp, kept_scale, -delta[n])
            else:
                ds = tl.exp2(s - lse[n]) * (_dot(do[n], vs[i], D) - delta[n])
            if d_scores_at is not None:
                ds = _with_gradient(ds, s, d_scores_at, t[n], j, tokens, WIDE)
            if d_previous_at is not None:
                _write_score(d_previous_at, t[n], j, ds, tokens, live, WIDE)
            total = _added(total, ds, ks[i], D)
        after = after + (total,)
    return after


@triton.jit
def _load_queries(
    query, tokens, q_at, do_at, o_at, lse_at, ld_q, ld_do,
    H: tl.constexpr, D: tl.constexpr, VEC: tl.constexpr, QUERIES: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """QUERIES queries from `query` on and what belongs to them; beyond the end, queries that see nothing."""
    qs = ()
    dos = ()
    outs = ()
    lses = ()
    for i in tl.static_range(QUERIES):
        token = _taken(query, i, QUERIES, DROPOUT)
        j = tl.minimum(token, tokens - 1)
        qs = qs + (_read(q_at + j * ld_q, D, VEC, BLOCK),)
        dos = dos + (_read(do_at + j * ld_do, D, VEC, BLOCK),)
        outs = outs + (_read(o_at + j * (H * D), D, VEC, BLOCK),)
        lses = lses + (tl.where(token < tokens, tl.load(lse_at + j * H), float("inf")),)
    return qs, dos, outs, lses


@triton.jit
def _key_grads(
    state, k, v, seen, held, query, t, first, groups, pair, tokens, previous_at, d_scores_at, dropout, kept_scale,
    D: tl.constexpr, OWN: tl.constexpr, QUERIES: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """(dk, dv) with the held queries taken in."""
    DROPOUT: tl.constexpr = dropout is not None
    qs, dos, outs, lses = held
    deltas = ()
    for i in tl.static_range(QUERIES):
        deltas = deltas + (_dot(dos[i], outs[i], D),)
    dks = ()
    dvs = ()
    words = ()
    for n in tl.static_range(OWN):
        dk = state[0][n]
        dv = state[1][n]
        if DROPOUT and n % 2 == 0:
            words = ()
            for i in tl.static_range(QUERIES // 2):
                words = words + (_words(dropout, first + n // 2 * groups, pair + i),)
        for i in tl.static_range(QUERIES):
            j = _taken(query, i, QUERIES, DROPOUT)
            s = _dot(qs[i], k[n], D)
            if previous_at is not None:
                s = _with_score(s, previous_at, j, t[n], tokens, WIDE)
            s = _masked(s, seen, n, t[n], j, tokens, False, MASK, CAUSAL)
            p = tl.exp2(s - lses[i])
            if DROPOUT:
                word = words[i % (QUERIES // 2)][i // (QUERIES // 2) * 2 + n % 2]
                dv = _added(dv, _kept(p, word, dropout), dos[i], D)
                ds = p * tl.fma(_kept(_dot(dos[i], v[n], D), word, dropout), kept_scale, -deltas[i])
            else:
                dv = _added(dv, p, dos[i], D)
                ds = p * (_dot(dos[i], v[n], D) - deltas[i])
            if d_scores_at is not None:
                ds = _with_gradient(ds, s, d_scores_at, j, t[n], tokens, WIDE)
            dk = _added(dk, ds, qs[i], D)
        dks = dks + (dk,)
        dvs = dvs + (dv,)
    return dks, dvs


@triton.jit
def _grads_of_queries(
    first, groups, row, head, live, tokens, scale, q_at, k_at, v_at, mask_at, previous_at, o_at, lse_at, do_at,
    d_scores_at, dq_ptr, d_previous_at, ld_q, ld_k, ld_v, ld_do, ld_dq, mask_step, dropout, kept_scale,
    H: tl.constexpr, D: tl.constexpr, VEC: tl.constexpr, OWN: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, WIDE: tl.constexpr, FETCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    DROPOUT: tl.constexpr = dropout is not None
    t = ()
    q = ()
    do = ()
    lse = ()
    delta = ()
    dq = ()
    for n in tl.static_range(OWN):
        t = t + (_owned(first, groups, n, DROPOUT),)
        at = tl.minimum(t[n], tokens - 1)
        _fetch(k_at + at * ld_k, FETCH)
        _fetch(v_at + at * ld_v, FETCH)
        q = q + (_scaled(_read(q_at + at * ld_q, D, VEC, BLOCK), scale * 1.4426950408889634, D),)
        do = do + (_read(do_at + at * ld_do, D, VEC, BLOCK),)
        lse = lse + (tl.load(lse_at + at * H),)
        delta = delta + (_dot(do[n], _read(o_at + at * (H * D), D, VEC, BLOCK), D),)
        dq = dq + (_zeros(D, BLOCK),)
    if DROPOUT:
        for pair in tl.range(0, _pairs(tokens), KEYS // 2):
            key = _first_of_pair(pair)
            held = _load_keys(key, tokens, k_at, v_at, mask_at, ld_k, ld_v, mask_step, D, VEC, KEYS, MASK, True, BLOCK)
            dq = _query_grads(
                dq, q, do, lse, delta, held, key, t, first, groups, pair, tokens, live, previous_at, d_scores_at,
                d_previous_at, dropout, kept_scale, D, OWN, KEYS, True, MASK, CAUSAL, WIDE,
            )  # fmt: skip
    else:
        full = tokens // KEYS * KEYS
        for key in tl.range(0, full, KEYS):
            held = _load_keys(key, tokens, k_at, v_at, mask_at, ld_k, ld_v, mask_step, D, VEC, KEYS, MASK, False, BLOCK)
            dq = _query_grads(
                dq, q, do, lse, delta, held, key, t, first, groups, 0, tokens, live, previous_at, d_scores_at,
                d_previous_at, None, None, D, OWN, KEYS, False, MASK, CAUSAL, WIDE,
            )  # fmt: skip
        if full < tokens:
            held = _load_keys(
                full, tokens, k_at, v_at, mask_at, ld_k, ld_v, mask_step, D, VEC, KEYS, MASK, False, BLOCK
            )
            dq = _query_grads(
                dq, q, do, lse, delta, held, full, t, first, groups, 0, tokens, live, previous_at, d_scores_at,
                d_previous_at, None, None, D, OWN, KEYS, True, MASK, CAUSAL, WIDE,
            )  # fmt: skip
    for n in tl.static_range(OWN):
        written = live & (t[n] < tokens)
        _write(dq_ptr + ((row + t[n]) * ld_dq + head * D), _scaled(dq[n], scale, D), written, D, VEC, BLOCK)


@triton.jit
def _grads_of_keys(
    first, groups, row, head, live, tokens, scale, q_at, k_at, v_at, mask_at, previous_at, o_at, lse_at, do_at,
    d_scores_at, dk_ptr, dv_ptr, ld_q, ld_k, ld_v, ld_do, ld_dk, ld_dv, mask_step, dropout, kept_scale,
    H: tl.constexpr, D: tl.constexpr, VEC: tl.constexpr, OWN: tl.constexpr, QUERIES: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, WIDE: tl.constexpr, FETCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    DROPOUT: tl.constexpr = dropout is not None
    t = ()
    k = ()
    v = ()
    seen = ()
    dks = ()
    dvs = ()
    for n in tl.static_range(OWN):
        t = t + (_owned(first, groups, n, DROPOUT),)
        at = tl.minimum(t[n], tokens - 1)
        _fetch(q_at + at * ld_q, FETCH)
        _fetch(do_at + at * ld_do, FETCH)
        _fetch(o_at + at * (H * D), FETCH)
        _fetch(lse_at + at * H, FETCH)
        k = k + (_scaled(_read(k_at + at * ld_k, D, VEC, BLOCK), scale * 1.4426950408889634, D),)
        v = v + (_read(v_at + at * ld_v, D, VEC, BLOCK),)
        if MASK != "":
            seen = seen + (tl.load(mask_at + at * mask_step),)
        dks = dks + (_zeros(D, BLOCK),)
        dvs = dvs + (_zeros(D, BLOCK),)
    state = (dks, dvs)
    end = _pairs(tokens) if DROPOUT else tokens
    for pair in tl.range(0, end, QUERIES // 2 if DROPOUT else QUERIES):
        query = _first_of_pair(pair) if DROPOUT else pair
        held = _load_queries(query, tokens, q_at, do_at, o_at, lse_at, ld_q, ld_do, H, D, VEC, QUERIES, DROPOUT, BLOCK)
        state = _key_grads(
            state, k, v, seen, held, query, t, first, groups, pair, tokens, previous_at, d_scores_at, dropout,
            kept_scale, D, OWN, QUERIES, MASK, CAUSAL, WIDE,
        )  # fmt: skip
    for n in tl.static_range(OWN):
        written = live & (t[n] < tokens)
        dk = _scaled(state[0][n], scale, D)
        _write(dk_ptr + ((row + t[n]) * ld_dk + head * D), dk, written, D, VEC, BLOCK)
        dv = state[1][n]
        if DROPOUT:
            dv = _scaled(dv, kept_scale, D)
        _write(dv_ptr + ((row + t[n]) * ld_dv + head * D), dv, written, D, VEC, BLOCK)


@triton.jit(do_not_specialize=["sequences", "tokens", "query_programs", "dropped"])
def _attention_backward_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, do_ptr, d_scores_ptr, dq_ptr, dk_ptr, dv_ptr,
    d_previous_ptr, sequences, tokens, scale,
    ld_q, ld_k, ld_v, ld_do, ld_dq, ld_dk, ld_dv, mask_stride, mask_step, query_programs, dropped, kept_scale,
    H: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    WIDE: tl.constexpr, FETCH: tl.constexpr, UNIT: tl.constexpr, VEC: tl.constexpr,
    OWN_Q: tl.constexpr, OWN_K: tl.constexpr, KEYS: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # The first programs' threads own queries and write dq, the others' own keys and write dk and dv.
    started(EARLY)
    program = tl.program_id(0)
    ld_q = multiple(ld_q, UNIT)
    ld_k = multiple(ld_k, UNIT)
    ld_v = multiple(ld_v, UNIT)
    ld_do = multiple(ld_do, UNIT)
    ld_dq = multiple(ld_dq, UNIT)
    ld_dk = multiple(ld_dk, UNIT)
    ld_dv = multiple(ld_dv, UNIT)
    of_queries = program < query_programs
    own = tl.where(of_queries, OWN_Q, OWN_K)
    groups = _groups(tokens, own, seed_ptr is not None)
    thread = tl.where(of_queries, program, program - query_programs) * BLOCK + tl.arange(0, BLOCK)
    pair = thread // groups
    first = thread - pair * groups
    sequence = pair // H
    head = pair - sequence * H
    live = sequence < sequences
    sequence = tl.minimum(sequence, sequences - 1)
    row = sequence * tokens
    if WIDE:
        row = row.to(tl.int64)
    mask_at = None
    if MASK != "":
        mask_at = mask_ptr + sequence.to(tl.int64) * mask_stride
    q_at = q_ptr + (row * ld_q + head * D)
    k_at = k_ptr + (row * ld_k + head * D)
    v_at = v_ptr + (row * ld_v + head * D)
    o_at = o_ptr + (row * (H * D) + head * D)
    do_at = do_ptr + (row * ld_do + head * D)
    lse_at = lse_ptr + (row * H + head)
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
    if of_queries:
        _grads_of_queries(
            first, groups, row, head, live, tokens, scale, q_at, k_at, v_at, mask_at, previous_at, o_at, lse_at, do_at,
            d_scores_at, dq_ptr, d_previous_at, ld_q, ld_k, ld_v, ld_do, ld_dq, mask_step, dropout, kept_scale,
            H, D, VEC, OWN_Q, KEYS, MASK, CAUSAL, WIDE, FETCH, BLOCK,
        )  # fmt: skip
    else:
        _grads_of_keys(
            first, groups, row, head, live, tokens, scale, q_at, k_at, v_at, mask_at, previous_at, o_at, lse_at, do_at,
            d_scores_at, dk_ptr, dv_ptr, ld_q, ld_k, ld_v, ld_do, ld_dk, ld_dv, mask_step, dropout, kept_scale,
            H, D, VEC, OWN_K, QUERIES, MASK, CAUSAL, WIDE, FETCH, BLOCK,
        )  # fmt: skip


def describe_attention(problem: Attention, config: RegistersConfig) -> Launch:
    """Of q, k, v, mask, previous, seed, o, lse, scores; None where absent."""
    scalars = (problem.sequences, problem.tokens, math.log2(math.e) * problem.head**-0.5, *problem.row_strides)
    constants = _constants(problem) | {"OWN": config.own, "KEYS": config.block, "BLOCK": 32 * config.num_warps}
    constants["EARLY"] = problem.early
    return Launch(
        _attention_kernel,
        _programs(problem, config.own, config.num_warps),
        (*scalars, *_mask_strides(problem), *problem.dropping),
        constants,
        _options(problem, config.num_warps),
    )


def describe_attention_backward(problem: Attention, config: RegistersBackwardConfig) -> Launch:
    """Of q, k, v, mask, previous, seed, o, lse, do, d_scores, dq, dk, dv, d_previous; None where absent."""
    of_queries = _programs(problem, config.own_queries, config.num_warps)
    strides = (*problem.row_strides[:3], problem.heads * problem.head, *problem.row_strides[3:])
    scalars = (problem.sequences, problem.tokens, problem.head**-0.5, *strides, *_mask_strides(problem))
    scalars += (of_queries, *problem.dropping)
    constants = _constants(problem) | {
        "OWN_Q": config.own_queries,
        "OWN_K": config.own_keys,
        "KEYS": config.keys,
        "QUERIES": config.queries,
        "BLOCK": 32 * config.num_warps,
        "EARLY": problem.early,
    }
    return Launch(
        _attention_backward_kernel,
        of_queries + _programs(problem, config.own_keys, config.num_warps),
        scalars,
        constants,
        _options(problem, config.num_warps),
    )


def _programs(problem: Attention, own: int, num_warps: int) -> int:
    return -(-problem.sequences * problem.heads * threads(problem, own) // (32 * num_warps))


def _mask_strides(problem: Attention) -> tuple[int | None, int | None]:
    return problem.mask_strides if problem.mask else (None, None)


def _constants(problem: Attention) -> dict[str, object]:
    itemsize = 4 if problem.dtype == "float32" else 2
    unit = math.gcd(*problem.row_strides[:3], problem.head, 16 // itemsize)
    farthest = problem.sequences * problem.tokens * max(*problem.row_strides[:3], problem.heads * problem.head)
    if problem.residual:
        farthest = max(farthest, problem.sequences * problem.heads * problem.tokens**2)
    read = problem.sequences * problem.tokens * 3 * problem.heads * problem.head * itemsize
    return {
        "H": problem.heads,
        "D": problem.head,
        "MASK": problem.mask,
        "CAUSAL": problem.causal,
        "WIDE": farthest >= 2**31,
        "FETCH": problem.backend == "cuda" and read > CACHED and not triton.knobs.runtime.interpret,
        "UNIT": unit,
        "VEC": unit,
    }


def _options(problem: Attention, num_warps: int) -> dict[str, object]:
    early = {"launch_pdl": True} if problem.early else {}
    return {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": False} | early
