"""Attention of long heads (d > 16) on tensor cores: a program owns a block of queries, or of keys, of one head.

Each accumulator is summed over blocks of keys (or queries) in ascending order from the sequence's first, and a block
that a mask leaves out changes no bit. So no bit depends on the batch, the place in it, or padding at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.kernels import round_to_tf32
from isogemm.epilogues.device import philox
from isogemm.gemm.kernels.tiles import multiple

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _operand(x, DTYPE, PRECISION):
    """x as an operand of tl.dot: in the type of q, k and v, rounded to nearest."""
    x = x.to(DTYPE)
    if PRECISION == "tf32":
        x = round_to_tf32(x)
    return x


@triton.jit
def _multiply(a, b, acc, PRECISION):
    """acc + a b, one chain of sums over all blocks."""
    if PRECISION == "":
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _places(rows, first, D, WIDTH, INDEX):
    """Addresses of columns first .. first + WIDTH - 1 of a head's rows, and which exist: [ROWS, WIDTH] each."""
    base, row, live, ld = rows
    column = first + tl.arange(0, WIDTH)
    inside = live[:, None]
    if D % WIDTH != 0:
        inside = inside & (column < D)[None, :]
    return base + (row.to(INDEX)[:, None] * ld + column[None, :]), inside


@triton.jit
def _read(rows, D, BD, INDEX):
    """Load a head's rows [ROWS, BD], zero beyond the end; rows: base, indices, which exist, row stride."""
    at, inside = _places(rows, 0, D, BD, INDEX)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _write(rows, x, D, BD, INDEX):
    """Store x [ROWS, BD] to a head's rows, rounded once."""
    at, inside = _places(rows, 0, D, BD, INDEX)
    tl.store(at, x.to(rows[0].dtype.element_ty), mask=inside)


@triton.jit
def _over_head(x, x_rows, y, y_rows, D, BD, CHUNK, PRECISION, INDEX):
    """x y^T of tiles [ROWS, BD], or by CHUNK columns, which are read again to save registers (ieee)."""
    product = tl.zeros([x.shape[0], y.shape[0]], dtype=tl.float32)
    if CHUNK == BD:
        product = _multiply(x, y.T, product, PRECISION)
    else:
        for first in tl.range(0, D, CHUNK):
            x_at, x_inside = _places(x_rows, first, D, CHUNK, INDEX)
            y_at, y_inside = _places(y_rows, first, D, CHUNK, INDEX)
            x_part = _operand(tl.load(x_at, mask=x_inside, other=0.0), x.dtype, PRECISION)
            y_part = _operand(tl.load(y_at, mask=y_inside, other=0.0), x.dtype, PRECISION)
            product = _multiply(x_part, y_part.T, product, PRECISION)
    return product


@triton.jit
def _keys(mask_at, key, tokens, mask_step, MASK):
    """Which keys are attended, and what the mask adds to their scores (in units of log 2): [BK] each."""
    kept = key < tokens
    added = tl.zeros(key.shape, dtype=tl.float32)
    if MASK != "":
        seen = tl.load(mask_at + key.to(tl.int64) * mask_step, mask=kept, other=0)
        if MASK == "bool":
            kept = kept & (seen == 0)
        else:
            added = seen.to(tl.float32) * _LOG2E
            kept = kept & (added != float("-inf"))
    return kept, added


@triton.jit
def _matrix_at(ptr, matrix, tokens, LINE):
    """Address of a matrix's first score."""
    return ptr + matrix.to(tl.int64) * multiple(tokens, LINE) * tokens


@triton.jit
def _score_places(at, query, key, tokens, INDEX, LINE):
    """Addresses of scores by query and key (row and column indices), and which exist."""
    return at + (query.to(INDEX) * multiple(tokens, LINE) + key), (query < tokens) & (key < multiple(tokens, LINE))


@triton.jit
def _read_scores(at, query, key, tokens, INDEX, LINE):
    at, inside = _score_places(at, query, key, tokens, INDEX, LINE)
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _write_scores(at, query, key, tokens, x, INDEX, LINE):
    at, inside = _score_places(at, query, key, tokens, INDEX, LINE)
    tl.store(at, x.to(at.dtype.element_ty), mask=inside)


@triton.jit
def _kept(x, dropout, query, key, matrix, TRANSPOSED):
    """A tile x of weights, 0 where dropout (seed, threshold) drops them, as in `epilogues.random`.

    The tile begins at (query, key), multiples of sixteen; TRANSPOSED: rows are keys.
    """
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    seed, dropped = dropout
    zero = tl.zeros([ROWS // 2, COLUMNS // 2], dtype=tl.int32)
    row = tl.arange(0, ROWS // 2)[:, None] + zero
    column = tl.arange(0, COLUMNS // 2)[None, :] + zero
    if TRANSPOSED:
        w0, w2, w1, w3 = philox(seed, row + key // 2, column + query // 2, matrix + zero)
    else:
        w0, w1, w2, w3 = philox(seed, column + key // 2, row + query // 2, matrix + zero)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [.., .., 2, 2]: rows r and r + 8, columns c and c + 8
    words = tl.reshape(words, [ROWS // 16, 8, COLUMNS // 16, 8, 2, 2])
    words = tl.reshape(tl.permute(words, [0, 4, 1, 2, 5, 3]), [ROWS, COLUMNS])
    return tl.where((words >> 16).to(tl.int32) < dropped, 0.0, x)


@triton.jit(do_not_specialize=["tokens", "dropped"])
def _attention_dot_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, scores_ptr, tokens,
    ld_q, ld_k, ld_v, mask_stride, mask_step, dropped, kept_scale,
    H: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, INDEX: tl.constexpr, LINE: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    ld_q, ld_k, ld_v = multiple(ld_q, UNIT), multiple(ld_k, UNIT), multiple(ld_v, UNIT)
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    blocks = tl.cdiv(tokens, BQ)
    program = tl.program_id(0)
    first = program % blocks * BQ
    head = program // blocks % H
    sequence = (program // blocks // H).to(tl.int64)
    start = sequence * tokens
    k_at = k_ptr + (start * ld_k + head * D)
    v_at = v_ptr + (start * ld_v + head * D)
    mask_at = mask_ptr + sequence * mask_stride if MASK != "" else None
    matrix = program // blocks
    previous_at = _matrix_at(previous_ptr, matrix, tokens, LINE) if previous_ptr is not None else None
    scores_at = _matrix_at(scores_ptr, matrix, tokens, LINE) if scores_ptr is not None else None
    dropout = (tl.load(seed_ptr), dropped) if seed_ptr is not None else None
    row = first + tl.arange(0, BQ)
    live = row < tokens
    q_rows = (q_ptr + (start * ld_q + head * D), row, live, ld_q)
    q = _operand(_read(q_rows, D, BD, INDEX), DTYPE, PRECISION)  # [BQ, BD]
    top = tl.full([BQ], float("-inf"), tl.float32)
    total = tl.zeros([BQ], dtype=tl.float32)
    acc = tl.zeros([BQ, BD], dtype=tl.float32)
    end = tokens
    if CAUSAL and scores_ptr is None:
        end = tl.minimum(tokens, first + BQ)
    for begin in tl.range(0, end, BK):
        key = begin + tl.arange(0, BK)
        kept, added = _keys(mask_at, key, tokens, mask_step, MASK)
        k_rows = (k_at, key, key < tokens, ld_k)
        k = _operand(_read(k_rows, D, BD, INDEX), DTYPE, PRECISION)  # [BK, BD]
        v = _operand(_read((v_at, key, kept, ld_v), D, BD, INDEX), DTYPE, PRECISION)
        s = _over_head(q, q_rows, k, k_rows, D, BD, CHUNK, PRECISION, INDEX) * (SCALE * _LOG2E)  # [BQ, BK]
        if previous_at is not None:
            s += _read_scores(previous_at, row[:, None], key[None, :], tokens, INDEX, LINE) * _LOG2E
        if MASK == "additive":
            s += added[None, :]
        seen = kept[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= row[:, None])
        s = tl.where(seen, s, float("-inf"))
        if scores_at is not None:
            _write_scores(scores_at, row[:, None], key[None, :], tokens, s * _LN2, INDEX, LINE)
        higher = tl.maximum(top, tl.max(s, axis=1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key yet: exp2 of -inf is 0, of -inf + inf NaN
        shrink = tl.exp2(top - base)
        p = tl.exp2(s - base[:, None])
        total = total * shrink + tl.sum(p, axis=1)
        if dropout is not None:
            p = _kept(p, dropout, first, begin, matrix, False)
        acc = _multiply(_operand(p, DTYPE, PRECISION), v, acc * shrink[:, None], PRECISION)
        top = higher
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    o = acc / total[:, None]
    if dropout is not None:
        o *= kept_scale
    _write((o_ptr + (start * (H * D) + head * D), row, live, H * D), o, D, BD, INDEX)
    lse = tl.where(empty, float("inf"), top + tl.log2(total))
    tl.store(lse_ptr + (start * H + head) + row.to(INDEX) * H, lse, mask=live)


@triton.jit
def _upstream(o_at, lse_at, do_rows, H, D, BD, PRECISION, INDEX):
    """do [ROWS, BD] of some queries as an operand, their lse, and delta = sum(do o), the sum of P dP over keys."""
    base, row, live, ld = do_rows
    o = _read((o_at, row, live, ld), D, BD, INDEX)
    do = _operand(_read(do_rows, D, BD, INDEX), base.dtype.element_ty, PRECISION)
    lse = tl.load(lse_at + row.to(INDEX) * H, mask=live, other=float("inf"))
    return do, lse, tl.sum(do.to(tl.float32) * o.to(tl.float32), axis=1)


@triton.jit
def _score_gradient(p, dp, delta):
    """ds of softmax; exactly 0 where a key has all of its row's weight, as a lone key has."""
    return tl.where(p == 1.0, 0.0, p * (dp - delta))


@triton.jit
def _with_gradient(ds, s, at, query, key, tokens, INDEX, LINE):
    """ds plus the gradient given for the scores themselves, except where those are -inf."""
    above = _read_scores(at, query, key, tokens, INDEX, LINE)
    return ds + tl.where(s == float("-inf"), 0.0, above)


@triton.jit
def _query_gradients(
    q_at, k_at, v_at, mask_at, previous_at, o_at, lse_at, do_at, d_scores_at, dq_at, d_previous_at, first, matrix,
    tokens, ld_q, ld_k, ld_v, ld_dq, mask_step, dropout, kept_scale, H, D, SCALE, MASK, CAUSAL, PRECISION, INDEX, LINE,
    BQ, BK, BD, CHUNK,
):  # fmt: skip
    """dq of queries first .. first + BQ - 1, over blocks of keys."""
    DTYPE: tl.constexpr = q_at.dtype.element_ty
    row = first + tl.arange(0, BQ)
    live = row < tokens
    q_rows = (q_at, row, live, ld_q)
    do_rows = (do_at, row, live, H * D)
    do, lse, delta = _upstream(o_at, lse_at, do_rows, H, D, BD, PRECISION, INDEX)
    q = _operand(_read(q_rows, D, BD, INDEX), DTYPE, PRECISION)  # [BQ, BD]
    dq = tl.zeros([BQ, BD], dtype=tl.float32)
    end = tokens
    if CAUSAL and d_previous_at is None:
        end = tl.minimum(tokens, first + BQ)
    for begin in tl.range(0, end, BK):
        key = begin + tl.arange(0, BK)
        kept, added = _keys(mask_at, key, tokens, mask_step, MASK)
        k_rows = (k_at, key, kept, ld_k)
        v_rows = (v_at, key, kept, ld_v)
        k = _operand(_read(k_rows, D, BD, INDEX), DTYPE, PRECISION)  # [BK, BD]
        v = _operand(_read(v_rows, D, BD, INDEX), DTYPE, PRECISION)
        s = _over_head(q, q_rows, k, k_rows, D, BD, CHUNK, PRECISION, INDEX) * (SCALE * _LOG2E)  # [BQ, BK]
        if previous_at is not None:
            s += _read_scores(previous_at, row[:, None], key[None, :], tokens, INDEX, LINE) * _LOG2E
        if MASK == "additive":
            s += added[None, :]
        seen = kept[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] <= row[:, None])
        p = tl.where(seen, tl.exp2(s - lse[:, None]), 0.0)
        dp = _over_head(do, do_rows, v, v_rows, D, BD, CHUNK, PRECISION, INDEX)
        if dropout is not None:
            dp = _kept(dp, dropout, first, begin, matrix, False) * kept_scale
        ds = _score_gradient(p, dp, delta[:, None])
        if d_scores_at is not None:
            s = tl.where(seen, s, float("-inf"))
            ds = _with_gradient(ds, s, d_scores_at, row[:, None], key[None, :], tokens, INDEX, LINE)
        if d_previous_at is not None:
            _write_scores(d_previous_at, row[:, None], key[None, :], tokens, ds, INDEX, LINE)
        dq = _multiply(_operand(ds, DTYPE, PRECISION), k, dq, PRECISION)
    _write((dq_at, row, live, ld_dq), dq * SCALE, D, BD, INDEX)


@triton.jit
def _key_gradients(
    q_at, k_at, v_at, mask_at, previous_at, o_at, lse_at, do_at, d_scores_at, dk_at, dv_at, first, matrix, tokens, ld_q,
    ld_k, ld_v, ld_dk, ld_dv, mask_step, dropout, kept_scale, H, D, SCALE, MASK, CAUSAL, PRECISION, INDEX, LINE, BQ, BK,
    BD, CHUNK,
):  # fmt: skip
    """dk and dv of keys first .. first + BK - 1, over blocks of queries."""
    DTYPE: tl.constexpr = q_at.dtype.element_ty
    key = first + tl.arange(0, BK)
    kept, added = _keys(mask_at, key, tokens, mask_step, MASK)
    k_rows = (k_at, key, kept, ld_k)
    v_rows = (v_at, key, kept, ld_v)
    k = _operand(_read(k_rows, D, BD, INDEX), DTYPE, PRECISION)  # [BK, BD]
    v = _operand(_read(v_rows, D, BD, INDEX), DTYPE, PRECISION)
    dk = tl.zeros([BK, BD], dtype=tl.float32)
    dv = tl.zeros([BK, BD], dtype=tl.float32)
    begin_first = 0
    if CAUSAL:
        begin_first = first // BQ * BQ
    for begin in tl.range(begin_first, tokens, BQ):
        row = begin + tl.arange(0, BQ)
        q_rows = (q_at, row, row < tokens, ld_q)
        do_rows = (do_at, row, row < tokens, H * D)
        do, lse, delta = _upstream(o_at, lse_at, do_rows, H, D, BD, PRECISION, INDEX)
        q = _operand(_read(q_rows, D, BD, INDEX), DTYPE, PRECISION)  # [BQ, BD]
        s = _over_head(k, k_rows, q, q_rows, D, BD, CHUNK, PRECISION, INDEX) * (SCALE * _LOG2E)  # [BK, BQ]
        if previous_at is not None:
            s += _read_scores(previous_at, row[None, :], key[:, None], tokens, INDEX, LINE) * _LOG2E
        if MASK == "additive":
            s += added[:, None]
        seen = kept[:, None]
        if CAUSAL:
            seen = seen & (key[:, None] <= row[None, :])
        p = tl.where(seen, tl.exp2(s - lse[None, :]), 0.0)
        share = p
        if dropout is not None:
            share = _kept(p, dropout, begin, first, matrix, True)
        dv = _multiply(_operand(share, DTYPE, PRECISION), do, dv, PRECISION)
        dp = _over_head(v, v_rows, do, do_rows, D, BD, CHUNK, PRECISION, INDEX)
        if dropout is not None:
            dp = _kept(dp, dropout, begin, first, matrix, True) * kept_scale
        ds = _score_gradient(p, dp, delta[None, :])
        if d_scores_at is not None:
            s = tl.where(seen, s, float("-inf"))
            ds = _with_gradient(ds, s, d_scores_at, row[None, :], key[:, None], tokens, INDEX, LINE)
        dk = _multiply(_operand(ds, DTYPE, PRECISION), q, dk, PRECISION)
    _write((dk_at, key, key < tokens, ld_dk), dk * SCALE, D, BD, INDEX)
    if dropout is not None:
        dv *= kept_scale
    _write((dv_at, key, key < tokens, ld_dv), dv, D, BD, INDEX)


@triton.jit(do_not_specialize=["tokens", "dropped"])
def _attention_dot_backward_kernel(
    q_ptr, k_ptr, v_ptr, mask_ptr, previous_ptr, seed_ptr, o_ptr, lse_ptr, do_ptr, d_scores_ptr, dq_ptr, dk_ptr, dv_ptr,
    d_previous_ptr, tokens,
    ld_q, ld_k, ld_v, ld_dq, ld_dk, ld_dv, mask_stride, mask_step, dropped, kept_scale,
    H: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, INDEX: tl.constexpr, LINE: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Some programs own a block of keys, others one of queries: each recomputes P, and no sum is shared."""
    ld_q, ld_k, ld_v = multiple(ld_q, UNIT), multiple(ld_k, UNIT), multiple(ld_v, UNIT)
    ld_dq, ld_dk, ld_dv = multiple(ld_dq, UNIT), multiple(ld_dk, UNIT), multiple(ld_dv, UNIT)
    key_blocks = tl.cdiv(tokens, BK)
    blocks = key_blocks + tl.cdiv(tokens, BQ)
    program = tl.program_id(0)
    block = program % blocks
    head = program // blocks % H
    sequence = (program // blocks // H).to(tl.int64)
    start = sequence * tokens
    q_at = q_ptr + (start * ld_q + head * D)
    k_at = k_ptr + (start * ld_k + head * D)
    v_at = v_ptr + (start * ld_v + head * D)
    o_at = o_ptr + (start * (H * D) + head * D)
    do_at = do_ptr + (start * (H * D) + head * D)
    lse_at = lse_ptr + (start * H + head)
    mask_at = mask_ptr + sequence * mask_stride if MASK != "" else None
    matrix = program // blocks
    previous_at = _matrix_at(previous_ptr, matrix, tokens, LINE) if previous_ptr is not None else None
    d_scores_at = _matrix_at(d_scores_ptr, matrix, tokens, LINE) if d_scores_ptr is not None else None
    d_previous_at = _matrix_at(d_previous_ptr, matrix, tokens, LINE) if d_previous_ptr is not None else None
    dropout = (tl.load(seed_ptr), dropped) if seed_ptr is not None else None
    if block < key_blocks:
        _key_gradients(
            q_at, k_at, v_at, mask_at, previous_at, o_at, lse_at, do_at, d_scores_at,
            dk_ptr + (start * ld_dk + head * D), dv_ptr + (start * ld_dv + head * D), block * BK, matrix, tokens,
            ld_q, ld_k, ld_v, ld_dk, ld_dv, mask_step, dropout, kept_scale,
            H, D, SCALE, MASK, CAUSAL, PRECISION, INDEX, LINE, BQ, BK, BD, CHUNK,
        )  # fmt: skip
    else:
        _query_gradients(
            q_at, k_at, v_at, mask_at, previous_at, o_at, lse_at, do_at, d_scores_at,
            dq_ptr + (start * ld_dq + head * D), d_previous_at,
            (block - key_blocks) * BQ, matrix, tokens, ld_q, ld_k, ld_v, ld_dq, mask_step, dropout, kept_scale,
            H, D, SCALE, MASK, CAUSAL, PRECISION, INDEX, LINE, BQ, BK, BD, CHUNK,
        )  # fmt: skip


KERNELS = _attention_dot_kernel, _attention_dot_backward_kernel
