"""The backward of attention by fragments: some warps own queries, others keys."""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.kernels import start_launch
from isogemm.encoder.attention.kernels.lanes import floats, operand, row_sum
from isogemm.encoder.attention.kernels.mma import ops
from isogemm.gemm.kernels.halves import round_by_instruction


@triton.jit
def _delta(do, o, ROUNDED, KIND):
    """The sum of do o over all columns, for each of a lane's rows."""
    totals = ()
    operands = ops.as_operands(do, ROUNDED, KIND)
    for j in tl.static_range(len(do)):
        left = floats(operands[j], KIND)  # rounded as in the products: a lone key's gradient is then exactly 0
        right = floats(o[j], KIND)
        after = ()
        for i in tl.static_range(0, len(left), 2):
            product = left[i] * right[i] if j == 0 else tl.fma(left[i], right[i], totals[i // 2])
            after = after + (tl.fma(left[i + 1], right[i + 1], product),)
        totals = after
    return [row_sum(total) for total in totals]


@triton.jit
def _write_grad(ptr, values, FIRST, factor, more, row, token, tokens, ld, head, c, live, D, KIND, TRANSPOSED):
    """A result [16, D], values from FIRST on, times a factor, and more, to rows token and token + 8 of a head.

    TRANSPOSED: of a transpose, as TF32.
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
            if TRANSPOSED:
                to = ptr + ((head * D + column).to(row.dtype) * ld + (row + at))
                tl.store(to, round_by_instruction(even), mask=written & (column < D))
                tl.store(to + ld, round_by_instruction(odd), mask=written & (column < D))
            else:
                to = ptr + ((row + at) * ld + head * D) + column
                ops.store_pair(to, even, odd, written & (column < D), KIND)


@triton.jit
def _write_grads(ptrs, values, factor, added_ptr, row, all_rows, token, tokens, ld, head, c, live, D, KIND, TRANSPOSED):
    """Write the results of all layers: earlier ones by head; this one's by `_write_grad`, plus added_ptr's."""
    BLOCKS: tl.constexpr = (D + 7) // 8
    OWN: tl.constexpr = len(ptrs) - 1
    for layer in tl.static_range(OWN):
        _write_grad(
            ptrs[layer], values, layer * BLOCKS, factor, None, row + head * all_rows, token, tokens, D, 0, c, live,
            D, KIND, False,
        )  # fmt: skip
    more = None
    if added_ptr is not None:
        added_at = ops.head_at(added_ptr, row, head, D, all_rows, D, True)
        more = [floats(raw, KIND) for raw in ops.load_rows(added_at, D, token, tokens, c, D, KIND)]
    _write_grad(
        ptrs[OWN], values, OWN * BLOCKS, factor, more, row, token, tokens, ld, head, c, live,
        D, KIND, TRANSPOSED,
    )  # fmt: skip


@triton.jit
def _clear_beyond(dq_ptr, dk_ptr, dv_ptr, end, ld, COLUMNS, BLOCK):
    """Write zeros to the transposes' columns beyond the last token."""
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
    dropped, kept_scale, H, D, KIND, MASK, CAUSAL, WIDE, EVEN, FETCH, BY_HEAD, TRANSPOSED, TILES, BLOCK,
):  # fmt: skip
    all_rows, r, c, first, sequence, head, live, row = ops.place(tokens, sequences, H, TILES, WIDE, BLOCK, program)
    q_at = ops.layers_at(q_ptrs, row, head, ld_q, all_rows, D, BY_HEAD)
    k_at = ops.layers_at(k_ptrs, row, head, ld_k, all_rows, D, BY_HEAD)
    v_at = ops.head_at(v_ptr, row, head, ld_v, all_rows, D, BY_HEAD)
    do_at = ops.head_at(do_ptr, row, head, ld_do, all_rows, D, BY_HEAD)
    ops.fetch_layers(k_at, ld_k, tokens, FETCH, BLOCK)
    ops.fetch(v_at, ld_v, tokens, FETCH, BLOCK)
    if dq_in_ptr is not None:
        ops.fetch(ops.head_at(dq_in_ptr, row, head, D, all_rows, D, True), D, tokens, FETCH, BLOCK)
    mask_at = mask_ptr + sequence.to(tl.int64) * mask_stride if MASK != "" else None
    q, do, lse, delta, dq = (), (), (), (), ()
    for n in tl.static_range(TILES):
        token = first + 16 * n + r
        q = q + (ops.load_operands(q_at, ld_q, token, tokens, c, ops.load_rows, BY_HEAD, D, KIND),)
        values = ops.load_rows(do_at, ld_do, token, tokens, c, D, KIND)
        do = do + (ops.as_operands(values, BY_HEAD, KIND),)
        out = ops.load_rows(o_ptr + (row * (H * D) + head * D), H * D, token, tokens, c, D, KIND)
        delta = delta + (_delta(values, out, BY_HEAD, KIND),)
        sums = ops.head_at(lse_ptr, row, head, H, all_rows, 1, BY_HEAD)
        upper = tl.load(sums + tl.minimum(token, tokens - 1) * (1 if BY_HEAD else H))
        lower = tl.load(sums + tl.minimum(token + 8, tokens - 1) * (1 if BY_HEAD else H))
        lse = lse + ((upper, lower),)
        dq = dq + (ops.zero_results(len(q_at) * ((D + 7) // 8), BLOCK),)
    matrix = sequence * H + head
    previous_at = ops.matrix_at(previous_ptr, matrix, tokens, WIDE) if previous_ptr is not None else None
    d_scores_at = ops.matrix_at(d_scores_ptr, matrix, tokens, WIDE) if d_scores_ptr is not None else None
    d_previous_at = ops.matrix_at(d_previous_ptr, matrix, tokens, WIDE) if d_previous_ptr is not None else None
    dropout = (tl.load(seed_ptr), dropped, matrix) if seed_ptr is not None else None
    PARTS: tl.constexpr = 1 if seed_ptr is None else 2  # of eight keys each: a call's words are for both
    STEP: tl.constexpr = 8 * PARTS
    WHOLE: tl.constexpr = previous_ptr is None and d_scores_ptr is None  # scores leave no registers for two loops
    for BOUNDED in tl.static_range(0 if WHOLE else 1, 2):  # whole blocks, then one that ends beyond the last token
        whole = tokens // STEP * STEP if WHOLE else 0
        for begin in tl.range(whole if BOUNDED else 0, tokens if BOUNDED else whole, STEP):
            words = ()
            for part in tl.static_range(PARTS):
                key = begin + 8 * part
                k = ops.load_operands(k_at, ld_k, key + r, tokens, c, ops.load_row, BY_HEAD, D, KIND, BOUNDED)
                v = ops.as_operands(ops.load_row(v_at, ld_v, key + r, tokens, c, D, KIND, BOUNDED), BY_HEAD, KIND)
                along = ops.load_operands(
                    k_at, ld_k, key + 2 * c, tokens, r, ops.load_column, BY_HEAD, D, KIND, BOUNDED
                )
                keys = (key + 2 * c, key + 2 * c + 1)
                added = ()
                if BOUNDED or MASK != "":
                    for j in tl.static_range(2):
                        added = added + (ops.score_of_key(mask_at, mask_step, keys[j], tokens, root, MASK),)
                before, d_scores = (), ()
                for n in tl.static_range(TILES):
                    query = first + 16 * n + r
                    if previous_at is not None:
                        before = before + (ops.scores_of_rows(previous_at, query, keys[0], tokens, EVEN, WIDE),)
                    if d_scores_at is not None:
                        d_scores = d_scores + (ops.scores_of_rows(d_scores_at, query, keys[0], tokens, EVEN, WIDE),)
                after = ()
                for n in tl.static_range(TILES):
                    if dropout is not None and part == 0:
                        words = words + (ops.random_words(dropout, begin // 2 + 2 * c, first // 2 + (8 * n + r), True),)
                    s = ops.score_products(q[n], k, BLOCK, KIND)
                    dp = ops.score_products(do[n], v, BLOCK, KIND)
                    if previous_at is not None:
                        s = ops.with_scores(s, before[n], root, EVEN, KIND)
                    ds = ()
                    for i in tl.static_range(2):
                        query = first + (16 * n + 8 * i) + r
                        for j in tl.static_range(2):
                            score = s[2 * i + j]
                            if BOUNDED or MASK != "":
                                score += added[j]
                            score = ops.if_seen(score, keys[j], query, CAUSAL)
                            p = tl.exp2(score * scale - lse[n][i])
                            if dropout is None:
                                found = p * (dp[2 * i + j] - delta[n][i])
                            else:
                                share = ops.kept(dp[2 * i + j], words[n][j][2 * i + part], dropout)
                                found = p * tl.fma(share, kept_scale, -delta[n][i])
                            if d_scores_at is not None:
                                d_score = ops.score_values(d_scores[n], EVEN, KIND)[2 * i + j]
                                found += tl.where(score == float("-inf"), 0.0, d_score)
                            ds = ds + (found,)
                        if d_previous_at is not None:
                            even, odd = ds[2 * i], ds[2 * i + 1]
                            ops.write_scores(d_previous_at, query, keys[0], even, odd, tokens, live, EVEN, WIDE)
                    after = after + (ops.with_products(dq[n], operand(ds, KIND), along, KIND),)
                dq = after
    for n in tl.static_range(TILES):
        token = first + 16 * n + r
        _write_grads(
            dq_ptrs, dq[n], 1.0 / root, dq_in_ptr, row, all_rows, token, tokens, ld_dq, head, c, live,
            D, KIND, TRANSPOSED,
        )  # fmt: skip


@triton.jit
def _grads_of_keys(
    program, q_ptrs, k_ptrs, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, do_ptr, d_scores_ptr, dk_ptrs,
    dv_ptr, dk_in_ptr, sequences, tokens, scale, root, ld_q, ld_k, ld_v, ld_do, ld_dk, ld_dv, mask_stride, mask_step,
    dropped, kept_scale, H, D, KIND, MASK, CAUSAL, WIDE, FETCH, BY_HEAD, TRANSPOSED, TILES, BLOCK,
):  # fmt: skip
    all_rows, r, c, first, sequence, head, live, row = ops.place(tokens, sequences, H, TILES, WIDE, BLOCK, program)
    q_at = ops.layers_at(q_ptrs, row, head, ld_q, all_rows, D, BY_HEAD)
    k_at = ops.layers_at(k_ptrs, row, head, ld_k, all_rows, D, BY_HEAD)
    v_at = ops.head_at(v_ptr, row, head, ld_v, all_rows, D, BY_HEAD)
    do_at = ops.head_at(do_ptr, row, head, ld_do, all_rows, D, BY_HEAD)
    o_at = o_ptr + (row * (H * D) + head * D)
    lse_at = ops.head_at(lse_ptr, row, head, H, all_rows, 1, BY_HEAD)
    ops.fetch_layers(q_at, ld_q, tokens, FETCH, BLOCK)
    ops.fetch(do_at, ld_do, tokens, FETCH, BLOCK)
    ops.fetch(o_at, H * D, tokens, FETCH, BLOCK)
    ops.fetch(lse_at, 1 if BY_HEAD else H, tokens, FETCH, BLOCK)
    if dk_in_ptr is not None:
        ops.fetch(ops.head_at(dk_in_ptr, row, head, D, all_rows, D, True), D, tokens, FETCH, BLOCK)
    mask_at = mask_ptr + sequence.to(tl.int64) * mask_stride if MASK != "" else None
    k, v, added, dk, dv = (), (), (), (), ()
    for n in tl.static_range(TILES):
        token = first + 16 * n + r
        k = k + (ops.load_operands(k_at, ld_k, token, tokens, c, ops.load_rows, BY_HEAD, D, KIND),)
        v = v + (ops.as_operands(ops.load_rows(v_at, ld_v, token, tokens, c, D, KIND), BY_HEAD, KIND),)
        if MASK != "":  # a key beyond the end affects nothing that is written
            added = added + (
                (
                    ops.score_of_key(mask_at, mask_step, token, tokens, root, MASK),
                    ops.score_of_key(mask_at, mask_step, token + 8, tokens, root, MASK),
                ),
            )
        dk = dk + (ops.zero_results(len(k_at) * ((D + 7) // 8), BLOCK),)
        dv = dv + (ops.zero_results((D + 7) // 8, BLOCK),)
    matrix = sequence * H + head
    previous_at = ops.matrix_at(previous_ptr, matrix, tokens, WIDE) if previous_ptr is not None else None
    d_scores_at = ops.matrix_at(d_scores_ptr, matrix, tokens, WIDE) if d_scores_ptr is not None else None
    dropout = (tl.load(seed_ptr), dropped, matrix) if seed_ptr is not None else None
    PARTS: tl.constexpr = 1 if seed_ptr is None else 2  # of eight queries each: a call's words are for both
    STEP: tl.constexpr = 8 * PARTS
    WHOLE: tl.constexpr = previous_ptr is None and d_scores_ptr is None  # scores leave no registers for two loops
    for BOUNDED in tl.static_range(0 if WHOLE else 1, 2):  # whole blocks, then one that ends beyond the last token
        whole = tokens // STEP * STEP if WHOLE else 0
        for begin in tl.range(whole if BOUNDED else 0, tokens if BOUNDED else whole, STEP):
            words = ()
            for part in tl.static_range(PARTS):
                query = begin + 8 * part
                q = ops.load_operands(q_at, ld_q, query + r, tokens, c, ops.load_row, BY_HEAD, D, KIND, BOUNDED)
                values = ops.load_row(do_at, ld_do, query + r, tokens, c, D, KIND, BOUNDED)
                do = ops.as_operands(values, BY_HEAD, KIND)
                out = ops.load_row(o_at, H * D, query + r, tokens, c, D, KIND, BOUNDED)
                delta = _delta(values, out, BY_HEAD, KIND)
                deltas = ops.of_columns(delta[0], c)
                q_along = ops.load_operands(
                    q_at, ld_q, query + 2 * c, tokens, r, ops.load_column, BY_HEAD, D, KIND, BOUNDED
                )
                do_along = ops.load_column(do_at, ld_do, query + 2 * c, tokens, r, D, KIND, BOUNDED)
                do_along = ops.as_operands(do_along, BY_HEAD, KIND)
                lses = ()
                for i in tl.static_range(2):  # beyond the end, queries that see nothing
                    token = query + i + 2 * c
                    lse = tl.load(lse_at + ops.at_most_last(token, tokens, BOUNDED) * (1 if BY_HEAD else H))
                    if BOUNDED:
                        lse = tl.where(token < tokens, lse, float("inf"))
                    lses = lses + (lse,)
                before, d_scores = (), ()
                for n in tl.static_range(TILES):
                    key = first + 16 * n + r
                    if previous_at is not None:
                        before = before + (ops.scores_of_columns(previous_at, query + 2 * c, key, tokens, WIDE),)
                    if d_scores_at is not None:
                        d_scores = d_scores + (ops.scores_of_columns(d_scores_at, query + 2 * c, key, tokens, WIDE),)
                dks, dvs = (), ()
                for n in tl.static_range(TILES):
                    if dropout is not None and part == 0:
                        words = words + (
                            ops.random_words(dropout, first // 2 + (8 * n + r), begin // 2 + 2 * c, False),
                        )
                    s = ops.score_products(k[n], q, BLOCK, KIND)
                    dp = ops.score_products(v[n], do, BLOCK, KIND)
                    if previous_at is not None:
                        s = ops.with_scores(s, before[n], root, False, KIND)
                    shares, ds = (), ()
                    for i in tl.static_range(4):
                        key = first + (16 * n + 8 * (i // 2)) + r
                        score = s[i]
                        if MASK != "":
                            score += added[n][i // 2]
                        score = ops.if_seen(score, key, query + i % 2 + 2 * c, CAUSAL)
                        p = tl.exp2(score * scale - lses[i % 2])
                        if dropout is None:
                            shares = shares + (p,)
                            found = p * (dp[i] - deltas[i % 2])
                        else:
                            word = words[n][i % 2][2 * part + i // 2]
                            shares = shares + (ops.kept(p, word, dropout),)
                            found = p * tl.fma(ops.kept(dp[i], word, dropout), kept_scale, -deltas[i % 2])
                        if d_scores_at is not None:
                            found += tl.where(score == float("-inf"), 0.0, d_scores[n][i].to(tl.float32))
                        ds = ds + (found,)
                    dvs = dvs + (ops.with_products(dv[n], operand(shares, KIND), do_along, KIND),)
                    dks = dks + (ops.with_products(dk[n], operand(ds, KIND), q_along, KIND),)
                dk = dks
                dv = dvs
    for n in tl.static_range(TILES):
        token = first + 16 * n + r
        _write_grads(
            dk_ptrs, dk[n], 1.0 / root, dk_in_ptr, row, all_rows, token, tokens, ld_dk, head, c, live,
            D, KIND, TRANSPOSED,
        )  # fmt: skip
        _write_grad(
            dv_ptr, dv[n], 0, 1.0 if dropout is None else kept_scale, None, row, token, tokens, ld_dv, head, c, live,
            D, KIND, TRANSPOSED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["sequences", "tokens", "dropped"])
def _attention_mma_backward_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, do_ptr, d_scores_ptr, dq_ptr, dk_ptr, dv_ptr,
    d_previous_ptr, q0_ptr, k0_ptr, q1_ptr, k1_ptr, q2_ptr, k2_ptr, q3_ptr, k3_ptr,
    dq0_ptr, dk0_ptr, dq1_ptr, dk1_ptr, dq2_ptr, dk2_ptr, dq3_ptr, dk3_ptr, dq_in_ptr, dk_in_ptr,
    sequences, tokens, scale, root,
    ld_q, ld_k, ld_v, ld_do, ld_dq, ld_dk, ld_dv, mask_stride, mask_step, dropped, kept_scale,
    H: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr, FETCH: tl.constexpr, BY_HEAD: tl.constexpr,
    TRANSPOSED: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # Even programs' warps own queries and write dq, odd ones own keys and write dk and dv: both read the same rows.
    start_launch(PDL)
    program = tl.program_id(0)
    if TRANSPOSED:
        if program == 0:
            _clear_beyond(dq_ptr, dk_ptr, dv_ptr, sequences * tokens, ld_dq, H * D, BLOCK)
    q_ptrs = ops.all_layers(q0_ptr, q1_ptr, q2_ptr, q3_ptr, q_ptr)
    k_ptrs = ops.all_layers(k0_ptr, k1_ptr, k2_ptr, k3_ptr, k_ptr)
    if program % 2 == 0:
        _grads_of_queries(
            program // 2, q_ptrs, k_ptrs, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, do_ptr, d_scores_ptr,
            ops.all_layers(dq0_ptr, dq1_ptr, dq2_ptr, dq3_ptr, dq_ptr), d_previous_ptr, dq_in_ptr,
            sequences, tokens, scale, root,
            ld_q, ld_k, ld_v, ld_do, ld_dq, mask_stride, mask_step, dropped, kept_scale,
            H, D, KIND, MASK, CAUSAL, WIDE, EVEN, FETCH, BY_HEAD, TRANSPOSED, TILES, BLOCK,
        )  # fmt: skip
    else:
        _grads_of_keys(
            program // 2, q_ptrs, k_ptrs, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, do_ptr,
            d_scores_ptr, ops.all_layers(dk0_ptr, dk1_ptr, dk2_ptr, dk3_ptr, dk_ptr), dv_ptr, dk_in_ptr,
            sequences, tokens, scale, root,
            ld_q, ld_k, ld_v, ld_do, ld_dk, ld_dv, mask_stride, mask_step, dropped, kept_scale,
            H, D, KIND, MASK, CAUSAL, WIDE, FETCH, BY_HEAD, TRANSPOSED, TILES, BLOCK,
        )  # fmt: skip


KERNEL = _attention_mma_backward_kernel
