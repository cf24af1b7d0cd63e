"""Attention of short heads (d <= 16), in fp32 registers: a thread owns a few tokens of one head of one sequence.

Tensor cores would pad d to 8 or 16 and the tokens to a power of two, and exchange P between threads; here every sum is
one thread's, over keys (or queries) in ascending order, so no bit depends on the batch, the packing or the launch.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from isogemm.core.launch import Launch
from isogemm.encoder.configs_attention import CACHED, Attention, RegistersBackwardConfig, RegistersConfig
from isogemm.encoder.kernels_forward import started
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
    D: tl.constexpr, VEC: tl.constexpr, KEYS: tl.constexpr, MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys key .. key + KEYS - 1, their values and what the mask says of them; the last one's for any beyond."""
    ks = ()
    vs = ()
    seen = ()
    for i in tl.static_range(KEYS):
        j = tl.minimum(key + i, tokens - 1)
        ks = ks + (_read(k_at + j * ld_k, D, VEC, BLOCK),)
        vs = vs + (_read(v_at + j * ld_v, D, VEC, BLOCK),)
        if MASK != "":
            seen = seen + (tl.load(mask_at + j * mask_step),)
    return ks, vs, seen


@triton.jit
def _attend(
    state, q, held, key, t, tokens, D: tl.constexpr, OWN: tl.constexpr, KEYS: tl.constexpr, LAST: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The queries' (largest score, sum, o) with the held keys taken in; LAST: some may lie beyond the end."""
    ks, vs, seen = held
    tops = ()
    totals = ()
    outs = ()
    for n in tl.static_range(OWN):
        scores = ()
        top = state[0][n]
        for i in tl.static_range(KEYS):
            s = _masked(_dot(q[n], ks[i], D), seen, i, key + i, t[n], tokens, LAST, MASK, CAUSAL)
            scores = scores + (s,)
            top = tl.maximum(top, s)
        base = top
        if MASK != "" or CAUSAL:
            base = tl.where(top == float("-inf"), 0.0, top)
        shrink = tl.exp2(state[0][n] - base)
        total = state[1][n] * shrink
        o = _scaled(state[2][n], shrink, D)
        for i in tl.static_range(KEYS):
            p = tl.exp2(scores[i] - base)
            total += p
            o = _added(o, p, vs[i], D)
        tops = tops + (top,)
        totals = totals + (total,)
        outs = outs + (o,)
    return tops, totals, outs


@triton.jit(do_not_specialize=["sequences", "tokens"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, scores_ptr, sequences, tokens, scale,
    ld_q, ld_k, ld_v, mask_stride, mask_step,
    H: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    WIDE: tl.constexpr, FETCH: tl.constexpr, UNIT: tl.constexpr, VEC: tl.constexpr,
    OWN: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    started(EARLY)
    ld_q = multiple(ld_q, UNIT)
    ld_k = multiple(ld_k, UNIT)
    ld_v = multiple(ld_v, UNIT)
    groups = (tokens + OWN - 1) // OWN
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
    t = ()
    q = ()
    tops = ()
    totals = ()
    outs = ()
    for n in tl.static_range(OWN):
        token = first + n * groups
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
    full = tokens // KEYS * KEYS
    for key in tl.range(0, full, KEYS):
        held = _load_keys(key, tokens, k_at, v_at, mask_at, ld_k, ld_v, mask_step, D, VEC, KEYS, MASK, BLOCK)
        state = _attend(state, q, held, key, t, tokens, D, OWN, KEYS, False, MASK, CAUSAL)
    if full < tokens:
        held = _load_keys(full, tokens, k_at, v_at, mask_at, ld_k, ld_v, mask_step, D, VEC, KEYS, MASK, BLOCK)
        state = _attend(state, q, held, full, t, tokens, D, OWN, KEYS, True, MASK, CAUSAL)
    for n in tl.static_range(OWN):
        total = state[1][n]
        empty = total == 0.0
        share = 1.0 / tl.where(empty, 1.0, total)
        written = live & (t[n] < tokens)
        _write(o_ptr + ((row + t[n]) * (H * D) + head * D), _scaled(state[2][n], share, D), written, D, VEC, BLOCK)
        lse = tl.where(empty, float("inf"), state[0][n] + tl.log2(total))
        tl.store(lse_ptr + (row + t[n]) * H + head, lse, mask=written)


@triton.jit
def _query_grads(
    dq, q, do, lse, delta, held, key, t, tokens, D: tl.constexpr, OWN: tl.constexpr, KEYS: tl.constexpr,
    LAST: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dq with the held keys taken in."""
    ks, vs, seen = held
    after = ()
    for n in tl.static_range(OWN):
        total = dq[n]
        for i in tl.static_range(KEYS):
            s = _masked(_dot(q[n], ks[i], D), seen, i, key + i, t[n], tokens, LAST, MASK, CAUSAL)
            ds = tl.exp2(s - lse[n]) * (_dot(do[n], vs[i], D) - delta[n])
            total = _added(total, ds, ks[i], D)
        after = after + (total,)
    return after


@triton.jit
def _load_queries(
    query, tokens, q_at, do_at, o_at, lse_at, ld_q, ld_do,
    H: tl.constexpr, D: tl.constexpr, VEC: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Queries query .. query + QUERIES - 1 and what belongs to them; beyond the end, queries that see nothing."""
    qs = ()
    dos = ()
    outs = ()
    lses = ()
    for i in tl.static_range(QUERIES):
        j = tl.minimum(query + i, tokens - 1)
        qs = qs + (_read(q_at + j * ld_q, D, VEC, BLOCK),)
        dos = dos + (_read(do_at + j * ld_do, D, VEC, BLOCK),)
        outs = outs + (_read(o_at + j * (H * D), D, VEC, BLOCK),)
        lses = lses + (tl.where(query + i < tokens, tl.load(lse_at + j * H), float("inf")),)
    return qs, dos, outs, lses


@triton.jit
def _key_grads(
    state, k, v, seen, held, query, t, tokens, D: tl.constexpr, OWN: tl.constexpr, QUERIES: tl.constexpr,
    MASK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """(dk, dv) with the held queries taken in."""
    qs, dos, outs, lses = held
    deltas = ()
    for i in tl.static_range(QUERIES):
        deltas = deltas + (_dot(dos[i], outs[i], D),)
    dks = ()
    dvs = ()
    for n in tl.static_range(OWN):
        dk = state[0][n]
        dv = state[1][n]
        for i in tl.static_range(QUERIES):
            s = _masked(_dot(qs[i], k[n], D), seen, n, t[n], query + i, tokens, False, MASK, CAUSAL)
            p = tl.exp2(s - lses[i])
            dv = _added(dv, p, dos[i], D)
            ds = p * (_dot(dos[i], v[n], D) - deltas[i])
            dk = _added(dk, ds, qs[i], D)
        dks = dks + (dk,)
        dvs = dvs + (dv,)
    return dks, dvs


@triton.jit
def _grads_of_queries(
    first, groups, row, head, live, tokens, scale, q_at, k_at, v_at, mask_at, o_at, lse_at, do_at, dq_ptr,
    ld_q, ld_k, ld_v, ld_do, ld_dq, mask_step, H: tl.constexpr, D: tl.constexpr, VEC: tl.constexpr, OWN: tl.constexpr,
    KEYS: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    FETCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = ()
    q = ()
    do = ()
    lse = ()
    delta = ()
    dq = ()
    for n in tl.static_range(OWN):
        t = t + (first + n * groups,)
        at = tl.minimum(t[n], tokens - 1)
        _fetch(k_at + at * ld_k, FETCH)
        _fetch(v_at + at * ld_v, FETCH)
        q = q + (_scaled(_read(q_at + at * ld_q, D, VEC, BLOCK), scale * 1.4426950408889634, D),)
        do = do + (_read(do_at + at * ld_do, D, VEC, BLOCK),)
        lse = lse + (tl.load(lse_at + at * H),)
        delta = delta + (_dot(do[n], _read(o_at + at * (H * D), D, VEC, BLOCK), D),)
        dq = dq + (_zeros(D, BLOCK),)
    full = tokens // KEYS * KEYS
    for key in tl.range(0, full, KEYS):
        held = _load_keys(key, tokens, k_at, v_at, mask_at, ld_k, ld_v, mask_step, D, VEC, KEYS, MASK, BLOCK)
        dq = _query_grads(dq, q, do, lse, delta, held, key, t, tokens, D, OWN, KEYS, False, MASK, CAUSAL)
    if full < tokens:
        held = _load_keys(full, tokens, k_at, v_at, mask_at, ld_k, ld_v, mask_step, D, VEC, KEYS, MASK, BLOCK)
        dq = _query_grads(dq, q, do, lse, delta, held, full, t, tokens, D, OWN, KEYS, True, MASK, CAUSAL)
    for n in tl.static_range(OWN):
        written = live & (t[n] < tokens)
        _write(dq_ptr + ((row + t[n]) * ld_dq + head * D), _scaled(dq[n], scale, D), written, D, VEC, BLOCK)


@triton.jit
def _grads_of_keys(
    first, groups, row, head, live, tokens, scale, q_at, k_at, v_at, mask_at, o_at, lse_at, do_at, dk_ptr, dv_ptr,
    ld_q, ld_k, ld_v, ld_do, ld_dk, ld_dv, mask_step, H: tl.constexpr, D: tl.constexpr, VEC: tl.constexpr,
    OWN: tl.constexpr, QUERIES: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    FETCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = ()
    k = ()
    v = ()
    seen = ()
    dks = ()
    dvs = ()
    for n in tl.static_range(OWN):
        t = t + (first + n * groups,)
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
    for query in tl.range(0, tokens, QUERIES):
        held = _load_queries(query, tokens, q_at, do_at, o_at, lse_at, ld_q, ld_do, H, D, VEC, QUERIES, BLOCK)
        state = _key_grads(state, k, v, seen, held, query, t, tokens, D, OWN, QUERIES, MASK, CAUSAL)
    for n in tl.static_range(OWN):
        written = live & (t[n] < tokens)
        dk = _scaled(state[0][n], scale, D)
        _write(dk_ptr + ((row + t[n]) * ld_dk + head * D), dk, written, D, VEC, BLOCK)
        _write(dv_ptr + ((row + t[n]) * ld_dv + head * D), state[1][n], written, D, VEC, BLOCK)


@triton.jit(do_not_specialize=["sequences", "tokens", "query_programs"])
def _attention_backward_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, do_ptr, d_scores_ptr, dq_ptr, dk_ptr, dv_ptr,
    d_previous_ptr, sequences, tokens, scale,
    ld_q, ld_k, ld_v, ld_do, ld_dq, ld_dk, ld_dv, mask_stride, mask_step, query_programs,
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
    groups = (tokens + own - 1) // own
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
    if of_queries:
        _grads_of_queries(
            first, groups, row, head, live, tokens, scale, q_at, k_at, v_at, mask_at, o_at, lse_at, do_at, dq_ptr,
            ld_q, ld_k, ld_v, ld_do, ld_dq, mask_step, H, D, VEC, OWN_Q, KEYS, MASK, CAUSAL, FETCH, BLOCK,
        )  # fmt: skip
    else:
        _grads_of_keys(
            first, groups, row, head, live, tokens, scale, q_at, k_at, v_at, mask_at, o_at, lse_at, do_at, dk_ptr,
            dv_ptr, ld_q, ld_k, ld_v, ld_do, ld_dk, ld_dv, mask_step, H, D, VEC, OWN_K, QUERIES, MASK, CAUSAL,
            FETCH, BLOCK,
        )  # fmt: skip


def describe_attention(problem: Attention, config: RegistersConfig) -> Launch:
    """Of q, k, v, mask, previous, seed, o, lse, scores; None where absent."""
    scalars = (problem.sequences, problem.tokens, math.log2(math.e) * problem.head**-0.5, *problem.row_strides)
    constants = _constants(problem) | {"OWN": config.own, "KEYS": config.block, "BLOCK": 32 * config.num_warps}
    constants["EARLY"] = problem.early
    return Launch(
        _attention_kernel,
        _programs(problem, config.own, config.num_warps),
        (*scalars, *_mask_strides(problem)),
        constants,
        _options(problem, config.num_warps),
    )


def describe_attention_backward(problem: Attention, config: RegistersBackwardConfig) -> Launch:
    """Of q, k, v, mask, previous, seed, o, lse, do, d_scores, dq, dk, dv, d_previous; None where absent."""
    of_queries = _programs(problem, config.own_queries, config.num_warps)
    strides = (*problem.row_strides[:3], problem.heads * problem.head, *problem.row_strides[3:])
    scalars = (problem.sequences, problem.tokens, problem.head**-0.5, *strides, *_mask_strides(problem), of_queries)
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
    threads = problem.sequences * problem.heads * -(-problem.tokens // own)
    return -(-threads // (32 * num_warps))


def _mask_strides(problem: Attention) -> tuple[int | None, int | None]:
    return problem.mask_strides if problem.mask else (None, None)


def _constants(problem: Attention) -> dict[str, object]:
    itemsize = 4 if problem.dtype == "float32" else 2
    unit = math.gcd(*problem.row_strides[:3], problem.head, 16 // itemsize)
    farthest = problem.sequences * problem.tokens * max(*problem.row_strides[:3], problem.heads * problem.head)
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
