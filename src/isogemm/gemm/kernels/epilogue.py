"""Epilogues in the kernels: biases, scales, activations, dropout, residuals, and the one rounding.

`e`, `steps` and `numbers` are the tensors that an epilogue reads, their strides and its numbers. E says which of them
are used; `epilogues.operands` has their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.kernels import arange, zeros
from isogemm.epilogues.operands import MATRICES, PLACES
from isogemm.gemm import configs
from isogemm.gemm.kernels.handover import keep, kept_sums

_BIAS_ROWS = tl.constexpr(configs.BIAS_ROWS)
_BIAS, _BIAS_UP, _C, _RESIDUAL, _ROW_SCALE, _COL_SCALE, _ALPHA, _BETA = (
    tl.constexpr(PLACES[name])
    for name in ("bias", "bias_up", "c", "residual", "row_scale", "col_scale", "alpha", "beta")
)
_SEED, _SAVED, _SECOND, _AUX, _ROW_SUMS = (
    tl.constexpr(PLACES[name]) for name in ("seed", "saved", "second", "aux0", "row_sums")
)
_C_ROW, _RESIDUAL_ROW = (tl.constexpr(MATRICES.index(name)) for name in ("c", "residual"))
_AUX_ROW = tl.constexpr(len(MATRICES))
_FLOAT16_MAX = tl.constexpr(65504.0)


@triton.jit
def _column_parts(x, BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr):
    """Split x [BM, BN] into PARTS neighbours [BM, BN // PARTS], which are stored one after another."""
    if PARTS == 1:
        return (x,)
    else:
        left, right = tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))
        return _column_parts(left, BM, BN // 2, PARTS // 2) + _column_parts(right, BM, BN // 2, PARTS // 2)


@triton.jit
def _row_halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """Split x [BM, BN] into its upper and lower half."""
    return tl.split(tl.permute(tl.reshape(x, (2, BM // 2, BN)), (1, 2, 0)))


@triton.jit
def sum_by_halves(x, BLOCKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum x [BLOCKS, ROWS, COLUMNS] to [BLOCKS, 1, COLUMNS]: the first half plus the second, repeatedly.

    The order of additions does not depend on the layout, as `tl.sum`'s does.
    """
    if ROWS == 1:
        return x
    else:
        first, second = tl.split(tl.permute(tl.reshape(x, (BLOCKS, 2, ROWS // 2, COLUMNS)), (0, 2, 3, 1)))
        return sum_by_halves(first + second, BLOCKS, ROWS // 2, COLUMNS)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr, EAGER: tl.constexpr):
    """Round x as torch would between two operations."""
    return x.to(DTYPE).to(tl.float32) if EAGER else x


@triton.jit
def _packed(bits, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWAPPED: tl.constexpr):
    """Pack eight columns of the result into a byte, the first in the lowest bit; in a swapped tile these are rows."""
    if SWAPPED:
        shifted = bits.to(tl.int32) << (arange(0, ROWS) & 7)[:, None]
        return tl.sum(tl.reshape(shifted, (ROWS // 8, 8, COLUMNS)), axis=1).to(tl.uint8)
    else:
        shifted = bits.to(tl.int32) << (arange(0, COLUMNS) & 7)[None, :]
        return tl.sum(tl.reshape(shifted, (ROWS, COLUMNS // 8, 8)), axis=2).to(tl.uint8)


@triton.jit
def is_kept(seed, m, n, row, col, dropped, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWAPPED: tl.constexpr):
    """Where dropout keeps an element, as in `epilogues.random`, of a tile at (m, n) with indices row and col."""
    if SWAPPED or COLUMNS < 32:
        zero = zeros((ROWS, COLUMNS), dtype=tl.int32)
        w0, w1, w2, w3 = tl.philox(seed, (col >> 5 << 2) + (col >> 1 & 3) + zero, row + zero, zero, zero)
        which = (col >> 3 & 3) + zero
        word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
        bits = tl.where((col & 1) + zero == 1, word >> 16, word & 0xFFFF)
    else:  # one call for eight columns
        zero = zeros((ROWS, COLUMNS // 8), dtype=tl.int32)
        group = n // 8 + arange(0, COLUMNS // 8)[None, :]
        w0, w1, w2, w3 = tl.philox(seed, group + zero, row + zero, zero, zero)
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [ROWS, COLUMNS // 8, 2, 2]: word 2 i + j
        words = tl.reshape(words, (ROWS, COLUMNS // 32, 4, 4))
        words = tl.permute(words, (0, 1, 3, 2))
        halves = tl.join(words & 0xFFFF, words >> 16)
        bits = tl.reshape(halves, (ROWS, COLUMNS))
    return bits.to(tl.int32) >= dropped


@triton.jit
def _kept(m, n, e, numbers, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWAPPED: tl.constexpr):
    """`is_kept` with indices of its own: Gluon gives those that address memory the layout of what they address."""
    row, col = _indices(m, n, ROWS, COLUMNS, SWAPPED)
    return is_kept(tl.load(e[_SEED]), m, n, row, col, numbers[2], ROWS, COLUMNS, SWAPPED)


@triton.jit
def read_matrix(at, row, col, M, N, stride, INDEX: tl.constexpr):
    """Load a tile of a matrix that is contiguous along n, in fp32."""
    live = (row < M) & (col < N)
    return tl.load(at + (row.to(INDEX) * stride + col), mask=live, other=0.0).to(tl.float32)


@triton.jit
def _before_activation(
    z, row, col, M, N, e, steps, numbers, E: tl.constexpr, BIAS_FIRST: tl.constexpr, DTYPE: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    """alpha * row_scale * col_scale * z + beta * c + bias"""
    z = _rounded(z, DTYPE, E.eager)
    if E.alpha == "host":
        z = _rounded(z * numbers[0], DTYPE, E.eager)
    elif E.alpha == "device":
        z = _rounded(z * _rounded(tl.load(e[_ALPHA]).to(tl.float32), DTYPE, E.eager), DTYPE, E.eager)
    if E.row_scale:
        z = _rounded(z * tl.load(e[_ROW_SCALE] + row, mask=row < M, other=0.0).to(tl.float32), DTYPE, E.eager)
    if E.col_scale:
        z = _rounded(z * tl.load(e[_COL_SCALE] + col, mask=col < N, other=0.0).to(tl.float32), DTYPE, E.eager)
    if E.beta != "":
        addend = _rounded(read_matrix(e[_C], row, col, M, N, steps[_C_ROW], INDEX), DTYPE, E.eager)
        if E.beta == "host":
            addend = _rounded(addend * numbers[1], DTYPE, E.eager)
        else:
            factor = _rounded(tl.load(e[_BETA]).to(tl.float32), DTYPE, E.eager)  # a 0-d tensor takes the other's dtype
            addend = _rounded(addend * factor, DTYPE, E.eager)
        z = _rounded(z + addend, DTYPE, E.eager)
    if E.bias == "n" and not BIAS_FIRST:
        z = _rounded(z + tl.load(e[_BIAS] + col, mask=col < N, other=0.0).to(tl.float32), DTYPE, E.eager)
    elif E.bias == "m":
        z = _rounded(z + tl.load(e[_BIAS] + row, mask=row < M, other=0.0).to(tl.float32), DTYPE, E.eager)
    return z


@triton.jit
def _aux(at, row, col, M, N, stride_m, stride_n, INDEX: tl.constexpr):
    """Load a tile of an aux tensor, in fp32; its strides are 0 where it is broadcast."""
    live = (row < M) & (col < N)
    return tl.load(at + (row.to(INDEX) * stride_m + col.to(INDEX) * stride_n), mask=live, other=0.0).to(tl.float32)


@triton.jit
def _user(z, row, col, M, N, e, steps, E: tl.constexpr, ACT: tl.constexpr, INDEX: tl.constexpr):
    """Apply a registered epilogue."""
    COUNT: tl.constexpr = E.aux
    aux = ()
    for i in tl.static_range(COUNT):
        stride_m, stride_n = steps[_AUX_ROW + 2 * i], steps[_AUX_ROW + 2 * i + 1]
        aux += (_aux(e[_AUX + i], row, col, M, N, stride_m, stride_n, INDEX),)
    return ACT(z, col, row, *aux)


@triton.jit
def _activated(z, ACT: tl.constexpr, E: tl.constexpr):
    if len(E.arguments) == 0:
        return ACT(z, E.exact)
    else:
        return ACT(z, E.exact, E.arguments[0])


@triton.jit
def unpacked(packed, m, n, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr):
    """Load the tile at (m, n), a multiple of 8, of bits packed by `_packed`, into the lowest bit of each number.

    Each byte is read once. Reading it for every column, as `slope_at` does, takes six times as long, since the lanes of
    a load are then in 32 rows. Beyond the last row all bits are 1: a leaky_relu's slope for negative numbers may be
    infinite.
    """
    row = (m + arange(0, ROWS))[:, None]
    byte = (n // 8 + arange(0, COLUMNS // 8))[None, :]
    row_bytes = (N + 7) // 8
    live = (row < M) & (byte < row_bytes)
    bytes_ = tl.load(packed + (row.to(INDEX) * row_bytes + byte), mask=live, other=255).to(tl.int32)
    return tl.reshape(bytes_[:, :, None] >> arange(0, 8)[None, None, :], (ROWS, COLUMNS))


@triton.jit
def slope_of_bits(bits, SLOPE: tl.constexpr, E: tl.constexpr):
    """As `slope_at`, from bits that tell whether the pre-activation was positive."""
    sign = tl.where((bits & 1) == 1, 1.0, -1.0)
    return _activated(sign, SLOPE, E), sign


@triton.jit
def slope_at(row, col, M, N, saved, ACT: tl.constexpr, SLOPE: tl.constexpr, E: tl.constexpr, INDEX: tl.constexpr):
    """The activation's derivative, from what the forward saved; gated: the derivatives by the gate and by up."""
    if E.gradient == "mask":
        live = (row < M) & (col < N)
        bytes_ = tl.load(saved + (row.to(INDEX) * ((N + 7) // 8) + (col >> 3)), mask=live, other=0).to(tl.int32)
        return slope_of_bits(bytes_ >> (col & 7), SLOPE, E)
    else:
        z = read_matrix(saved, row, col, M, N, N, INDEX)
        if E.gated:
            up = read_matrix(saved + M.to(tl.int64) * N, row, col, M, N, N, INDEX)
            return _activated(z, SLOPE, E) * up, _activated(z, ACT, E)
        else:
            return _activated(z, SLOPE, E), z


@triton.jit
def store_result(
    value, c, m, n, row, col, M, N, stride_cm, stride_cn, C_TMA: tl.constexpr, INDEX: tl.constexpr
):  # fmt: skip
    """Round once and store."""
    if C_TMA:
        c.store([m, n], value.to(c.dtype))
    else:
        live = (row < M) & (col < N)
        tl.store(c + (row.to(INDEX) * stride_cm + col.to(INDEX) * stride_cn), value.to(c.dtype.element_ty), mask=live)


@triton.jit
def _kept_finite(z, at):
    """z, clamped if finite to float16's range if it is saved in float16: beyond, the derivative is constant."""
    if at.dtype.element_ty == tl.float16:
        return tl.where(tl.abs(z) < float("inf"), tl.clamp(z, -_FLOAT16_MAX, _FLOAT16_MAX), z)
    else:
        return z


@triton.jit
def _store_row_sums(
    value, sums, m, n, M, N, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INDEX: tl.constexpr
):  # fmt: skip
    """Store the sums of value [ROWS, COLUMNS] at (m, n) over blocks of rows."""
    BLOCKS: tl.constexpr = ROWS // _BIAS_ROWS
    wide = tl.reshape(value.to(tl.float32), (BLOCKS, _BIAS_ROWS, COLUMNS))
    blocks = sum_by_halves(wide, BLOCKS, _BIAS_ROWS, COLUMNS)
    row = (m // _BIAS_ROWS + arange(0, BLOCKS))[:, None]
    col = (n + arange(0, COLUMNS))[None, :]
    live = (row * _BIAS_ROWS < M) & (col < N)
    tl.store(sums + (row.to(INDEX) * N + col), tl.reshape(blocks, (BLOCKS, COLUMNS)), mask=live)


@triton.jit
def _indices(m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SWAPPED: tl.constexpr):
    """The result's row and column numbers in a tile [ROWS, COLUMNS] at (m, n). A swapped tile's rows are columns."""
    if SWAPPED:
        return (m + arange(0, COLUMNS))[None, :], (n + arange(0, ROWS))[:, None]
    else:
        return (m + arange(0, ROWS))[:, None], (n + arange(0, COLUMNS))[None, :]


@triton.jit
def _write(
    total, up, c, e, steps, numbers, m, n, M, N, stride_cm, stride_cn, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    C_TMA: tl.constexpr, SWAPPED: tl.constexpr, E: tl.constexpr, BIAS_FIRST: tl.constexpr, ACT: tl.constexpr,
    SLOPE: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to sums [ROWS, COLUMNS] at (m, n), in fp32, round once and store."""
    row, col = _indices(m, n, ROWS, COLUMNS, SWAPPED)
    DTYPE: tl.constexpr = c.dtype if C_TMA else c.dtype.element_ty
    if E.gradient != "":
        if E.dropout:
            total = tl.where(_kept(m, n, e, numbers, ROWS, COLUMNS, SWAPPED), total * numbers[3], 0.0)
        if E.sums:  # rows beyond M, zeros times the weight, may be NaN
            total = tl.where(row < M, total, 0.0)
        slope, other = slope_at(row, col, M, N, e[_SAVED], ACT, SLOPE, E, INDEX)
        value = total * slope
        store_result(value, c, m, n, row, col, M, N, stride_cm, stride_cn, C_TMA, INDEX)
        if E.sums:
            _store_row_sums(value.to(DTYPE), e[_ROW_SUMS], m, n, M, N, ROWS, COLUMNS, INDEX)
        if E.gated:
            of_up = total * other
            store_result(of_up, e[_SECOND], m, n, row, col, M, N, N, 1, False, INDEX)
            if E.sums:
                of_second = e[_ROW_SUMS] + tl.cdiv(M, _BIAS_ROWS).to(tl.int64) * N
                _store_row_sums(of_up.to(DTYPE), of_second, m, n, M, N, ROWS, COLUMNS, INDEX)
    else:
        value = _before_activation(total, row, col, M, N, e, steps, numbers, E, BIAS_FIRST, DTYPE, INDEX)
        if E.gated:
            up = _rounded(up, DTYPE, E.eager)
            if E.bias_up and not BIAS_FIRST:
                up = _rounded(up + tl.load(e[_BIAS_UP] + col, mask=col < N, other=0.0).to(tl.float32), DTYPE, E.eager)
        if E.saves == "mask":
            _, its_col = _indices(m, n, ROWS, COLUMNS, SWAPPED)  # its own, as in `_kept`
            packed = _packed((_activated(value, SLOPE, E) == 1.0) & (its_col < N), ROWS, COLUMNS, SWAPPED)
            if SWAPPED:
                byte = (n // 8 + arange(0, ROWS // 8))[:, None]
            else:
                byte = (n // 8 + arange(0, COLUMNS // 8))[None, :]
            row_bytes = (N + 7) // 8
            its_row, _ = _indices(m, n, ROWS, COLUMNS, SWAPPED)
            live = (its_row < M) & (byte < row_bytes)
            tl.store(e[_SAVED] + (its_row.to(INDEX) * row_bytes + byte), packed, mask=live)
        elif E.saves == "pre":
            store_result(_kept_finite(value, e[_SAVED]), e[_SAVED], m, n, row, col, M, N, N, 1, False, INDEX)
            if E.gated:
                store_result(up, e[_SAVED] + M.to(tl.int64) * N, m, n, row, col, M, N, N, 1, False, INDEX)
        if E.user != "":
            value = _user(value, row, col, M, N, e, steps, E, ACT, INDEX)
        elif E.activation != "":
            value = _rounded(_activated(value, ACT, E), DTYPE, E.eager)
            if E.gated:
                value = _rounded(value * up, DTYPE, E.eager)
        if E.dropout:
            kept = _kept(m, n, e, numbers, ROWS, COLUMNS, SWAPPED)
            value = _rounded(tl.where(kept, value * numbers[3], 0.0), DTYPE, E.eager)
        if E.residual:
            value = read_matrix(e[_RESIDUAL], row, col, M, N, steps[_RESIDUAL_ROW], INDEX) + value
        store_result(value, c, m, n, row, col, M, N, stride_cm, stride_cn, C_TMA, INDEX)


@triton.jit
def biases(e, at, N, SIZE: tl.constexpr, E: tl.constexpr):
    """Load the biases of SIZE columns of the result at once, since each part of a tile would wait for its own.

    A bias of -0 becomes +0, so that a sum that underflowed to -0 does too, as it does with more padding.
    """
    col = at + arange(0, SIZE)
    bias = zeros((SIZE,), dtype=tl.float32)
    bias_up = zeros((SIZE,), dtype=tl.float32)
    if E.bias_first and E.bias == "n":
        bias = tl.load(e[_BIAS] + col, mask=col < N, other=0.0).to(tl.float32) + 0.0
    if E.bias_first and E.bias_up:
        bias_up = tl.load(e[_BIAS_UP] + col, mask=col < N, other=0.0).to(tl.float32) + 0.0
    return bias, bias_up


@triton.jit
def _with_bias(acc, bias, SWAPPED: tl.constexpr):
    return acc + (bias[:, None] if SWAPPED else bias[None, :])


@triton.jit
def finish(
    acc, c, kept_here, e, loaded, steps, numbers, m, n, first_chunk, last_chunk, M, N, stride_cm, stride_cn,
    BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, C_TMA: tl.constexpr, SWAPPED: tl.constexpr,
    UP_FIRST: tl.constexpr, E: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, ACCUMULATION: tl.constexpr,
    ACCUMULATE: tl.constexpr, INDEX: tl.constexpr, BARRIER: tl.constexpr,
):  # fmt: skip
    """Keep or store the sums acc [BM, BN] at (m, n) at the end of a chunk, WIDTH columns at a time.

    A swapped tile's m and n, M and N and strides are exchanged here: then they are the result's.
    """
    if ACCUMULATION == "scratch":
        if first_chunk:
            keep(acc, kept_here, BM, BN)
        else:  # as a new value: ptxas runs products one after another where their sums change in a branch
            total = kept_sums(kept_here, acc, BM, BN) + 0.0 + acc  # as a sum that starts at 0: no -0
            if last_chunk:
                _store(
                    total, c, e, loaded, steps, numbers, m, n, first_chunk, M, N, stride_cm, stride_cn, BM, BN, WIDTH,
                    C_TMA, SWAPPED, UP_FIRST, E, ACT, SLOPE, "one", ACCUMULATE, INDEX, False,
                )  # fmt: skip
            else:
                keep(total, kept_here, BM, BN)
        if BARRIER:
            tl.debug_barrier()  # another thread may be the one to load it
    else:
        WHOLE: tl.constexpr = ACCUMULATION == "registers" or ACCUMULATION == "gathered"
        # Whole sums that C is part of already are stored as they are: its -0 stays, however many chunks are added.
        AS: tl.constexpr = "partials" if WHOLE and ACCUMULATE else "one" if WHOLE else ACCUMULATION
        _store(
            acc, c, e, loaded, steps, numbers, m, n, first_chunk, M, N, stride_cm, stride_cn, BM, BN, WIDTH, C_TMA,
            SWAPPED, UP_FIRST, E, ACT, SLOPE, AS, ACCUMULATE and not WHOLE, INDEX, BARRIER,
        )  # fmt: skip


@triton.jit
def _store(
    acc, c, e, loaded, steps, numbers, m, n, first_chunk, M, N, stride_cm, stride_cn,
    BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr, C_TMA: tl.constexpr, SWAPPED: tl.constexpr,
    UP_FIRST: tl.constexpr, E: tl.constexpr, ACT: tl.constexpr, SLOPE: tl.constexpr, ACCUMULATION: tl.constexpr,
    ACCUMULATE: tl.constexpr, INDEX: tl.constexpr, BARRIER: tl.constexpr,
):  # fmt: skip
    """Store whole sums, or add a chunk's to the result, WIDTH columns at a time."""
    if SWAPPED:
        m, n = n, m
        M, N = N, M
        stride_cm, stride_cn = stride_cn, stride_cm
    BIAS_FIRST: tl.constexpr = E.bias_first and ACCUMULATION == "one" and not ACCUMULATE
    ROWS: tl.constexpr = BM // 2 if E.paired and SWAPPED else BM
    COLUMNS: tl.constexpr = BN // 2 if E.paired and not SWAPPED else BN
    if E.paired:
        sums, sums_up = _row_halves(acc, BM, BN) if SWAPPED else _column_parts(acc, BM, BN, 2)
        if UP_FIRST:
            sums, sums_up = sums_up, sums
    else:
        sums = acc
        sums_up = acc
    if BIAS_FIRST:
        sums = _with_bias(sums, loaded[0], SWAPPED)
        sums_up = _with_bias(sums_up, loaded[1], SWAPPED) if E.paired else sums_up
    totals = _column_parts(sums, ROWS, COLUMNS, COLUMNS // WIDTH)
    ups = _column_parts(sums_up, ROWS, COLUMNS, COLUMNS // WIDTH) if E.paired else totals
    for part in tl.static_range(COLUMNS // WIDTH):
        at_m = m + part * WIDTH if SWAPPED else m
        at_n = n if SWAPPED else n + part * WIDTH
        total = totals[part]
        if ACCUMULATION == "in place" or (ACCUMULATE and ACCUMULATION != "partials"):
            row, col = _indices(at_m, at_n, BM, WIDTH, SWAPPED)
            live = (row < M) & (col < N)
            if not ACCUMULATE:
                live = live & (not first_chunk)
            total += tl.load(c + (row.to(INDEX) * stride_cm + col.to(INDEX) * stride_cn), mask=live, other=0.0)
        elif not (BIAS_FIRST or E.paired or ACCUMULATION == "partials"):
            total += 0.0  # a sum that underflowed to -0 is +0, as one with more padding is
        _write(
            total, ups[part] if E.paired else total, c, e, steps, numbers, at_m, at_n, M, N, stride_cm, stride_cn,
            ROWS, WIDTH, C_TMA, SWAPPED, E, BIAS_FIRST, ACT, SLOPE, INDEX,
        )  # fmt: skip
        if ACCUMULATION == "in place" and BARRIER:
            tl.debug_barrier()
