"""The layer's forward around attention: norm and projections; output projection, norm and feed-forward.

A program owns BM rows (tokens) and keeps them on the chip from one product to the next. Products are turned, weights
[features, k] times rows [k, BM]: both operands lie in shared memory. Rows do not meet: where a row stands changes
nothing, and the tile is a function of the layer's sizes alone, so neither does the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.encoder.configs import Layer
from isogemm.encoder.parameters import EncoderDropout
from isogemm.epilogues import random
from isogemm.gemm.kernels import multiply, round_by_instruction
from isogemm.gemm.kernels_epilogue import is_kept

TYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}
_LEVELS = tl.constexpr(random.LEVELS)
# The places of dropout, by which its seed differs.
PROJECTION = tl.constexpr(EncoderDropout._fields.index("projection"))
ACTIVATION = tl.constexpr(EncoderDropout._fields.index("activation"))
OUTPUT = tl.constexpr(EncoderDropout._fields.index("output"))


@triton.jit
def started(EARLY: tl.constexpr):
    """First of all: wait for the launch before, and let the next one come as this one's programs run out."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def columns_of(ptr, D: tl.constexpr, DP: tl.constexpr):
    """A vector [D] as fp32 [1, DP], zeros beyond D."""
    col = tl.arange(0, DP)
    if DP == D:
        return tl.load(ptr + col).to(tl.float32)[None, :]
    else:
        return tl.load(ptr + col, mask=col < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def weight_tile(ptr, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Rows row .. row + BR - 1 and columns col .. col + BC - 1 of a weight [ROWS, COLS], zeros beyond."""
    r = row + tl.arange(0, BR)
    c = col + tl.arange(0, BC)
    at = ptr + (r[:, None] * COLS + c[None, :])
    if ROWS % BR == 0:
        if COLS % BC == 0:
            return tl.load(at)
        else:
            return tl.load(at, mask=(c < COLS)[None, :], other=0.0)
    else:
        return tl.load(at, mask=(r < ROWS)[:, None] & (c < COLS)[None, :], other=0.0)


@triton.jit
def forward_weight(
    ptr, n, k, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    READY: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[BN, BK] of a weight W [N, K], or of what `prepare` made of it."""
    tile = weight_tile(ptr, n, k, N, K, BN, BK)
    if READY:
        return tile
    else:
        return operand(tile, OPERAND, PRECISION)


@triton.jit
def backward_weight(
    ptr, n, k, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    READY: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[BN, BK] of W^T for a weight W [K, N], or of its prepared transpose."""
    if READY:
        return weight_tile(ptr, n, k, N, K, BN, BK)
    else:
        return operand(weight_tile(ptr, k, n, K, N, BK, BN), OPERAND, PRECISION).T


@triton.jit
def row_tile(ptr, row, rows, col, COLS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, LD: tl.constexpr):
    """Rows row .. row + BM - 1 and columns col .. col + BC - 1 of [rows, COLS], rows LD apart, zeros beyond."""
    r = row + tl.arange(0, BM)
    c = col + tl.arange(0, BC)
    live = (r < rows)[:, None]
    if COLS % BC != 0:
        live = live & (c < COLS)[None, :]
    return tl.load(ptr + (r[:, None] * LD + c[None, :]), mask=live, other=0.0)


@triton.jit
def store_tile(ptr, value, row, rows, col, COLS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, LD: tl.constexpr):
    r = row + tl.arange(0, BM)
    c = col + tl.arange(0, BC)
    live = (r < rows)[:, None]
    if COLS % BC != 0:
        live = live & (c < COLS)[None, :]
    tl.store(ptr + (r[:, None] * LD + c[None, :]), value.to(ptr.dtype.element_ty), mask=live)


@triton.jit
def store_heads(ptr, value, row, rows, col, D: tl.constexpr, HEAD: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """A tile of [rows, D] to [D / HEAD, rows, HEAD]."""
    r = row + tl.arange(0, BM)
    c = col + tl.arange(0, BC)
    at = (c // HEAD * rows.to(row.dtype))[None, :] + r[:, None]
    live = (r < rows)[:, None] & (c < D)[None, :]
    tl.store(ptr + (at * HEAD + (c % HEAD)[None, :]), value.to(ptr.dtype.element_ty), mask=live)


@triton.jit
def statistics(x, eps, D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr):
    """Each row's mean (0 for RMSNorm) and 1 / deviation, [BM, 1] each."""
    if NORM == "layer_norm":
        mean = tl.sum(x, axis=1, keep_dims=True) * (1.0 / D)
        x = x - mean
        if DP != D:
            x = tl.where((tl.arange(0, DP) < D)[None, :], x, 0.0)
    else:
        mean = tl.sum(x, axis=1, keep_dims=True) * 0.0
    return mean, 1.0 / tl.sqrt_rn(tl.sum(x * x, axis=1, keep_dims=True) * (1.0 / D) + eps)


@triton.jit
def scaled_and_shifted(xhat, g_ptr, b_ptr, D: tl.constexpr, DP: tl.constexpr):
    if g_ptr is not None:
        xhat = xhat * columns_of(g_ptr, D, DP)
    if b_ptr is not None:
        xhat = xhat + columns_of(b_ptr, D, DP)
    return xhat


@triton.jit
def normed(x, mean, deviation, g_ptr, b_ptr, D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr):
    """The norm of rows x [BM, DP] with these statistics, zeros beyond D."""
    xhat = (x - mean) * deviation if NORM == "layer_norm" else x * deviation
    if DP != D:
        xhat = tl.where((tl.arange(0, DP) < D)[None, :], xhat, 0.0)
    return scaled_and_shifted(xhat, g_ptr, b_ptr, D, DP)


@triton.jit
def batch_normed(x, statistics_ptr, b_ptr, D: tl.constexpr, DP: tl.constexpr):
    """The batch norm of rows x [BM, DP], of its statistics [4, D]: of which the mean and the scale are read."""
    xhat = (x - columns_of(statistics_ptr, D, DP)) * columns_of(statistics_ptr + 2 * D, D, DP)
    return scaled_and_shifted(xhat, None, b_ptr, D, DP)


@triton.jit
def scale_of_kept(DROPPED: tl.constexpr):
    """As `epilogues.random.scale` of the probability whose threshold is DROPPED."""
    return _LEVELS / (_LEVELS - DROPPED) if DROPPED < _LEVELS else 0.0


@triton.jit
def dropout(value, seed_ptr, PLACE: tl.constexpr, row, col, DROPPED: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """Of a tile [BM, BC] whose first element is (row, col)."""
    r = (row + tl.arange(0, BM)).to(tl.int32)[:, None]
    c = (col + tl.arange(0, BC))[None, :]
    kept = is_kept(tl.load(seed_ptr) + PLACE, row, col, r, c, DROPPED, BM, BC, False)
    return tl.where(kept, value * scale_of_kept(DROPPED), 0.0)


@triton.jit
def is_kept_turned(seed_ptr, PLACE: tl.constexpr, row, col, DROPPED: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """Where `dropout` keeps an element, as a tile [BC, BM]."""
    seed = tl.load(seed_ptr) + PLACE
    r = (row + tl.arange(0, BM)).to(tl.int32)[None, :]
    if BC < 32:
        c = (col + tl.arange(0, BC))[:, None]
        return is_kept(seed, row, col, r, c, DROPPED, BC, BM, True)
    else:  # one call for eight columns
        group = (col // 8 + tl.arange(0, BC // 8))[:, None]
        zero = tl.zeros((BC // 8, BM), dtype=tl.int32)
        w0, w1, w2, w3 = tl.philox(seed, group + zero, r + zero, zero, zero)
        low = tl.join(tl.join(w0 & 0xFFFF, w2 & 0xFFFF), tl.join(w1 & 0xFFFF, w3 & 0xFFFF))
        high = tl.join(tl.join(w0 >> 16, w2 >> 16), tl.join(w1 >> 16, w3 >> 16))
        kept = tl.join(low, high).to(tl.int32) >= DROPPED  # [groups, BM, 2, 2, half]: word 2 i + j
        kept = tl.reshape(kept.to(tl.int8), (BC // 32, 4, BM, 4, 2))
        return tl.reshape(tl.permute(kept, (0, 3, 1, 4, 2)), (BC, BM)) != 0


@triton.jit
def operand(x, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """x as a product's operand: in its type, and TF32 rounded to nearest, where the tensor core would truncate."""
    if PRECISION == "tf32":
        return round_by_instruction(x.to(OPERAND))
    else:
        return x.to(OPERAND)


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b, of operands."""
    return multiply(a, b, acc, PRECISION, True, True)


@triton.jit
def store_grad_operand(
    ptr, value, row, rows, col, ld, COLS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """A tile [BC, BM] of the transpose of [rows, COLS], for the weights' gradients; TURNED: stored as it is, ld apart,
    rounded to TF32."""
    if TURNED:
        r = row + tl.arange(0, BM)
        c = (col + tl.arange(0, BC)).to(r.dtype)
        live = (r < ld)[None, :]  # zeros beyond the last row
        if COLS % BC != 0:
            live = live & (c < COLS)[:, None]
        value = tl.where((r < rows)[None, :], round_by_instruction(value), 0.0)
        tl.store(ptr + (c[:, None] * ld + r[None, :]), value, mask=live)
    else:
        store_tile(ptr, value.T, row, rows, col, COLS, BM, BC, COLS)


@triton.jit
def _prepare_tile(
    w, straight, turned, r, c, first, ROWS: tl.constexpr, COLS: tl.constexpr, LD: tl.constexpr, SIDE: tl.constexpr,
    STRAIGHT: tl.constexpr, TURN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = operand(weight_tile(w, r, c, ROWS, COLS, SIDE, SIDE), OPERAND, PRECISION)
    row = (r + tl.arange(0, SIDE))[:, None]
    col = (c + tl.arange(0, SIDE))[None, :]
    live = (row < ROWS) & (col < COLS)
    if STRAIGHT:
        tl.store(straight + (row * COLS + col), tile, mask=live)
    if TURN:
        tl.store(turned + (col * LD + (first + row)), tile, mask=live)


@triton.jit
def prepare(
    item, wq, wk, wv, wo, w1, w2, ready, TILE: tl.constexpr, D: tl.constexpr, F: tl.constexpr, SIDE: tl.constexpr,
    STACKED: tl.constexpr, PROJECTED: tl.constexpr, TURN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the weights as operands: rounded or cast; with TURN also transposed, as the backward's products want.

    `ready`: out_proj, linear1, linear2, in_proj; and with TURN their transposes in the order of the products:
    linear2's, linear1's, out_proj's, in_proj's. Unless PROJECTED, in_proj and out_proj's transpose are left out, which
    projections want alone that do not read the weights as they are. TILE writes the tile at (r, c) of a weight [ROWS,
    COLS], and its transpose from column `first` on in one that is LD wide.
    """
    ACROSS: tl.constexpr = (D + SIDE - 1) // SIDE
    DOWN: tl.constexpr = (F + SIDE - 1) // SIDE
    SQUARE: tl.constexpr = ACROSS * ACROSS
    turned = ready + (4 * D * D + 2 * D * F)
    if item < SQUARE:
        TILE(
            wo, ready, turned + 2 * D * F, item // ACROSS * SIDE, item % ACROSS * SIDE, 0,
            D, D, D, SIDE, True, TURN and PROJECTED, OPERAND, PRECISION,
        )  # fmt: skip
    elif item < SQUARE + ACROSS * DOWN:
        item -= SQUARE
        TILE(
            w1, ready + D * D, turned + D * F, item // ACROSS * SIDE, item % ACROSS * SIDE, 0,
            F, D, F, SIDE, True, TURN, OPERAND, PRECISION,
        )  # fmt: skip
    elif item < SQUARE + 2 * ACROSS * DOWN:
        item -= SQUARE + ACROSS * DOWN
        TILE(
            w2, ready + (D * D + D * F), turned, item // DOWN * SIDE, item % DOWN * SIDE, 0,
            D, F, D, SIDE, True, TURN, OPERAND, PRECISION,
        )  # fmt: skip
    elif TURN:
        item -= SQUARE + 2 * ACROSS * DOWN
        part = item // SQUARE
        item -= part * SQUARE
        TILE(
            in_proj(wq, wk, wv, part, D * D, STACKED), ready + (D * D + 2 * D * F) + part * (D * D),
            turned + (2 * D * F + D * D), item // ACROSS * SIDE, item % ACROSS * SIDE, part * D,
            D, D, 3 * D, SIDE, PROJECTED, TURN, OPERAND, PRECISION,
        )  # fmt: skip


@triton.jit
def in_proj(q, k, v, part, size, STACKED: tl.constexpr):
    """The part of the stacked in_proj, or the one of three."""
    if STACKED:
        return q + part * size
    else:
        at = q
        if part == 1:
            at = k
        elif part == 2:
            at = v
        return at


@triton.jit
def projected_at(qkv_ptr, v_ptr, part, size, FIRST: tl.constexpr):
    """Where a part of so many elements goes: to its place among q, k and v, or v elsewhere, FIRST where it is alone."""
    if v_ptr is None:
        return qkv_ptr + part * size
    elif FIRST == 2:
        return v_ptr
    else:
        at = qkv_ptr + part * size
        if part == 2:
            at = v_ptr
        return at


@triton.jit(do_not_specialize=["rows", "per_part"])
def _project_kernel(
    x_ptr, norm_w, norm_b, wq, wk, wv, bq, bk, bv, qkv_ptr, ds_ptr, wo, do_ptr, w1, w2, ready, v_ptr,
    rows, eps, per_part,
    D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, HEAD: tl.constexpr, BY_HEAD: tl.constexpr,
    NORM: tl.constexpr, STACKED: tl.constexpr, BIASES: tl.constexpr, FIRST: tl.constexpr, BACKWARD: tl.constexpr,
    READY: tl.constexpr, TURN: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # Programs keep one part of the weight, BN columns of q, k or v, and walk over rows. In the backward there is a
    # fourth part, do = ds Wo, and FIRST is v's where q and k were kept. In a forward that reads prepared weights, the
    # last programs prepare them for the others.
    started(EARLY)
    PARTS: tl.constexpr = (4 if BACKWARD else 3) - FIRST
    BLOCKS: tl.constexpr = (D + BN - 1) // BN
    program = tl.program_id(0)
    part = FIRST + program % PARTS
    n = program // PARTS % BLOCKS * BN
    first = program // (PARTS * BLOCKS)
    tiles = (rows + BM - 1) // BM
    if first >= per_part:
        if READY and not BACKWARD:
            item = program - per_part * (PARTS * BLOCKS)
            prepare(
                item, wq, wk, wv, wo, w1, w2, ready, _prepare_tile, D, F, SIDE, STACKED, True, TURN, OPERAND, PRECISION
            )  # fmt: skip
    elif part < 3:
        w_ptr = in_proj(wq, wk, wv, part, D * D, STACKED or (READY and BACKWARD))
        if READY and not BACKWARD:  # by way of its place among the prepared: loaded operands need no registers
            w = forward_weight(w_ptr, n, 0, D, D, BN, DP, False, OPERAND, PRECISION)
            w_ptr = ready + (D * D + 2 * D * F) + part * (D * D)
            store_tile(w_ptr, w, n, D, 0, D, BN, DP, D)
            tl.debug_barrier()
        w = forward_weight(w_ptr, n, 0, D, D, BN, DP, READY, OPERAND, PRECISION)  # [BN, DP]
        bias = tl.zeros((BN, 1), tl.float32)
        if BIASES:
            col = n + tl.arange(0, BN)
            b = in_proj(bq, bk, bv, part, D, STACKED)
            bias = tl.load(b + col, mask=col < D, other=0.0).to(tl.float32)[:, None]
        for tile in tl.range(first, tiles, per_part):
            row = tile * BM + tl.zeros((), INDEX)
            x = row_tile(x_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
            if NORM != "":
                mean, deviation = statistics(x, eps, D, DP, NORM)
                x = normed(x, mean, deviation, norm_w, norm_b, D, DP, NORM)
            x = operand(x, OPERAND, PRECISION)
            acc = product(w, x.T, tl.zeros((BN, BM), tl.float32), PRECISION) + bias
            if BY_HEAD:
                to = projected_at(qkv_ptr, v_ptr, part, rows.to(INDEX) * D, FIRST)
                store_heads(to, operand(acc.T, OPERAND, PRECISION), row, rows, n, D, HEAD, BM, BN)
            else:
                store_tile(qkv_ptr + part * D, acc.T, row, rows, n, D, BM, BN, 3 * D)
    elif BACKWARD:
        w = backward_weight(wo, n, 0, D, D, BN, DP, READY, OPERAND, PRECISION)  # [BN, DP]
        for tile in tl.range(first, tiles, per_part):
            row = tile * BM + tl.zeros((), INDEX)
            ds = operand(row_tile(ds_ptr, row, rows, 0, D, BM, DP, D), OPERAND, PRECISION)
            acc = product(w, ds.T, tl.zeros((BN, BM), tl.float32), PRECISION)
            if BY_HEAD:
                store_heads(do_ptr, operand(acc.T, OPERAND, PRECISION), row, rows, n, D, HEAD, BM, BN)
            else:
                store_tile(do_ptr, acc.T, row, rows, n, D, BM, BN, D)


@triton.jit
def projected(
    o_ptr, wo, bo, row, rows, D: tl.constexpr, DP: tl.constexpr, READY: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """o Wo + bo, [BM, DP]."""
    acc = tl.zeros((DP, BM), tl.float32)
    for k in tl.range(0, D, BK):
        o = operand(row_tile(o_ptr, row, rows, k, D, BM, BK, D), OPERAND, PRECISION)
        acc = product(forward_weight(wo, 0, k, D, D, DP, BK, READY, OPERAND, PRECISION), o.T, acc, PRECISION)
    s = acc.T
    if bo is not None:
        s += columns_of(bo, D, DP)
    return s


@triton.jit
def attended(
    x_ptr, o_ptr, wo, bo, row, rows, D: tl.constexpr, DP: tl.constexpr, READY: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """x + o Wo + bo, [BM, DP]."""
    s = projected(o_ptr, wo, bo, row, rows, D, DP, READY, OPERAND, PRECISION, BM, BK)
    return s + row_tile(x_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _out_project_kernel(
    x_ptr, o_ptr, wo, bo, norm_w, norm_b, seed_ptr, s_ptr, rows, eps,
    D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr, DROPPED: tl.constexpr, READY: tl.constexpr,
    OPERAND: tl.constexpr, PRECISION: tl.constexpr, INDEX: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # s = x + dropout(o Wo + bo), or norm(x) + ...
    started(EARLY)
    row = (tl.program_id(0) * BM).to(INDEX)
    s = projected(o_ptr, wo, bo, row, rows, D, DP, READY, OPERAND, PRECISION, BM, BK)
    if DROPPED > 0:
        s = dropout(s, seed_ptr, PROJECTION, row, 0, DROPPED, BM, DP)
    x = row_tile(x_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
    if NORM != "":
        mean, deviation = statistics(x, eps, D, DP, NORM)
        x = normed(x, mean, deviation, norm_w, norm_b, D, DP, NORM)
    store_tile(s_ptr, x + s, row, rows, 0, D, BM, DP, D)


@triton.jit
def hidden(
    u, w1, b1, f, F: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, READY: tl.constexpr, OPERAND: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Rows f .. f + BF - 1 of W1 u + b1, of rows' columns u [DP, BM]."""
    w = forward_weight(w1, f, 0, F, D, BF, DP, READY, OPERAND, PRECISION)  # [BF, DP]
    z = product(w, u, tl.zeros((BF, BM), tl.float32), PRECISION)
    if b1 is not None:
        col = f + tl.arange(0, BF)
        z += tl.load(b1 + col, mask=col < F, other=0.0).to(tl.float32)[:, None]
    return z


@triton.jit
def activated(
    z, seed_ptr, row, f, ACT: tl.constexpr, EXACT: tl.constexpr, DROPPED: tl.constexpr, BM: tl.constexpr,
    BF: tl.constexpr,
):  # fmt: skip
    """dropout(act(z)) of features from f on, [BF, BM]."""
    value = ACT(z, EXACT)
    if DROPPED > 0:
        kept = is_kept_turned(seed_ptr, ACTIVATION, row, f, DROPPED, BM, BF)
        value = tl.where(kept, value * scale_of_kept(DROPPED), 0.0)
    return value


@triton.jit(do_not_specialize=["rows"])
def _feedforward_kernel(
    x_ptr, o_ptr, wo, bo, w1, b1, w2, b2, norm_w, norm_b, last_w, last_b, y_ptr, sum_ptr, seed_ptr, rows, eps,
    D: tl.constexpr, DP: tl.constexpr, F: tl.constexpr, NORM: tl.constexpr, NORM_LAST: tl.constexpr,
    RESIDUAL_NORMED: tl.constexpr, HIDDEN_DROPPED: tl.constexpr, DROPPED: tl.constexpr,
    READY: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr, ACT: tl.constexpr, EXACT: tl.constexpr,
    INDEX: tl.constexpr, PARKED: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # s = x + o Wo + bo, or without o, x; u = norm(s); y = s + dropout(act(u W1 + b1)) W2 + b2, with RESIDUAL_NORMED
    # y = u + ..., and with NORM_LAST the norm of that.
    started(EARLY)
    row = (tl.program_id(0) * BM).to(INDEX)
    if o_ptr is None:
        s = row_tile(x_ptr, row, rows, 0, D, BM, DP, D).to(tl.float32)
    else:
        s = attended(x_ptr, o_ptr, wo, bo, row, rows, D, DP, READY, OPERAND, PRECISION, BM, BK)
    if NORM == "batch_norm":
        u = batch_normed(s, norm_w, norm_b, D, DP)
    else:
        mean, deviation = statistics(s, eps, D, DP, NORM)
        u = normed(s, mean, deviation, norm_w, norm_b, D, DP, NORM)
    if RESIDUAL_NORMED:
        y = u
    else:
        y = s
    if DROPPED == 0:
        if b2 is not None:
            y += columns_of(b2, D, DP)
    if PARKED:  # in its place in memory: the registers are wanted
        store_tile(y_ptr, y, row, rows, 0, D, BM, DP, D)
        tl.debug_barrier()
    u = operand(u, OPERAND, PRECISION).T
    acc = tl.zeros((DP, BM), tl.float32)
    for f in tl.range(0, F, BF):
        z = hidden(u, w1, b1, f, F, D, DP, READY, OPERAND, PRECISION, BM, BF)
        act = activated(z, seed_ptr, row, f, ACT, EXACT, HIDDEN_DROPPED, BM, BF)
        w = forward_weight(w2, 0, f, D, F, DP, BF, READY, OPERAND, PRECISION)  # [DP, BF]
        acc = product(w, operand(act, OPERAND, PRECISION), acc, PRECISION)
    if PARKED:
        y = row_tile(y_ptr, row, rows, 0, D, BM, DP, D)
    if DROPPED > 0:
        fed = acc.T
        if b2 is not None:
            fed += columns_of(b2, D, DP)
        y += dropout(fed, seed_ptr, OUTPUT, row, 0, DROPPED, BM, DP)
    else:
        y += acc.T
    if NORM_LAST:
        if sum_ptr is not None:
            store_tile(sum_ptr, y, row, rows, 0, D, BM, DP, D)
        mean, deviation = statistics(y, eps, D, DP, NORM)
        y = normed(y, mean, deviation, last_w, last_b, D, DP, NORM)
    store_tile(y_ptr, y, row, rows, 0, D, BM, DP, D)


# the launches' constants


def feedforward_sizes(layer: Layer) -> dict[str, object]:
    return {
        "D": layer.d_model,
        "F": layer.dim_feedforward,
        "NORM": layer.norm,
        "NORM_LAST": layer.norm_last,
        "RESIDUAL_NORMED": layer.residual_normed or not layer.norm_first,
        "HIDDEN_DROPPED": random.threshold(layer.dropout.activation),
        "DROPPED": random.threshold(layer.dropout.output),
    }


def residual_of(layer: Layer) -> str:
    """Where the residual's gradient meets dx: "around" the norm, "through" it, or, of a batch norm, elsewhere."""
    if not layer.norm_first or layer.residual_normed:
        return "through"
    return "" if layer.batch_norm else "around"


def index_type(layer: Layer) -> object:
    return tl.int64 if layer.wide else tl.int32


def overlapping(layer: Layer) -> dict[str, object]:
    """The option of a launch that may begin before the last one ends."""
    return {"launch_pdl": True} if layer.early else {}
