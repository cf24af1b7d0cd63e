"""The kernels besides the products: a row's softmax sums from blocks of its logits, its values, and its gradient.

Sums are in the order of `norm.kernels.softmax`. A logit z becomes x: softcap * tanh(z / softcap), divided by the
temperature. As torch's on a GPU, a division by a number is a product with its reciprocal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from isogemm.core.launch import Launch
from isogemm.epilogues.device import tanh as exact_tanh
from isogemm.loss import configs
from isogemm.norm.kernels.softmax import block_max_sum, combine, exp, finite_maximum
from isogemm.norm.kernels.sums import sum_by_halves

ROW_UNIT = tl.constexpr(configs.ROW_UNIT)


@triton.jit
def _scaled(z, softcap, per_softcap, per_temperature, CAPPED: tl.constexpr, HEATED: tl.constexpr):
    """x, and tanh(z / softcap)."""
    bent = z
    if CAPPED:
        bent = exact_tanh(z * per_softcap, True)
        z = bent * softcap
    if HEATED:
        z = z * per_temperature
    return z, bent


@triton.jit
def _aligned(columns):
    """The columns that a row has in memory at least; with a mask that ends there, loads and stores are wide."""
    return tl.cdiv(columns, ROW_UNIT) * ROW_UNIT


@triton.jit(do_not_specialize=["rows", "columns", "first", "blocks"])
def _block_sums_kernel(
    logits, targets, sums, picked, rows, columns, ld, first, blocks, softcap, per_softcap, per_temperature,
    CAPPED: tl.constexpr, HEATED: tl.constexpr, ENTROPY: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce BLOCK columns of a row of logits [rows, columns], the vocabulary's from `first` on.

    sums [2 to 4, rows, blocks]: the maximum m; the sums of e = exp(x - m), of e * (x - m) and of x - m.
    picked [rows]: the target's x, if it is in this block.
    """
    here = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // here).to(tl.int64)
    start = tl.program_id(0) % here * BLOCK
    column = start + tl.arange(0, BLOCK)[None, :]
    z = tl.load(logits + row * ld + column, mask=column < _aligned(columns), other=0.0)  # [1, BLOCK]
    x = _scaled(z, softcap, per_softcap, per_temperature, CAPPED, HEATED)[0]
    x = tl.where(column < columns, x, -float("inf"))
    m, s = block_max_sum(x)
    at = sums + row * blocks + (first + start) // BLOCK + tl.arange(0, 1)
    size = rows.to(tl.int64) * blocks
    tl.store(at, m)
    tl.store(at + size, s)
    if ENTROPY or MEAN:
        below = x - finite_maximum(m)[:, None]
    if ENTROPY:
        e = exp(below)
        weighted = sum_by_halves(tl.where(e == 0, 0.0, e * below), 1)
        tl.store(at + 2 * size, tl.reshape(weighted, (1,)))
    if MEAN:
        total = sum_by_halves(tl.where(column < columns, below, 0.0), 1)
        tl.store(at + (2 + ENTROPY) * size, tl.reshape(total, (1,)))
    target = tl.load(targets + row).to(tl.int64) - first
    if (target >= start) & (target < min(start + BLOCK, columns)):
        logit = tl.load(logits + row * ld + target)
        chosen = _scaled(logit, softcap, per_softcap, per_temperature, CAPPED, HEATED)[0]
        tl.store(picked + row, chosen)


@triton.jit(do_not_specialize=["rows", "tokens", "vocabulary", "blocks", "ignored"])
def _row_values_kernel(
    sums, picked, targets, values, stats, rows, tokens, vocabulary, blocks, ignored,
    ENTROPY: tl.constexpr, MEAN: tl.constexpr, LSE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combine the sums of a row's blocks.

    values [1 to 4, tokens]: the target's log-probability, the entropy, the mean log-probability of the vocabulary, the
    log-sum-exp; 0 where the target is ignored. stats [2, tokens]: the row's maximum M, and L, the sum of exp(x - M).
    """
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    block = tl.arange(0, BLOCKS)[None, :]
    at, live = sums + row[:, None] * blocks + block, block < blocks
    size = rows.to(tl.int64) * blocks
    m = tl.load(at, mask=live, other=-float("inf"))  # [1, BLOCKS]
    s = tl.load(at + size, mask=live, other=0.0)
    largest, total = combine(m, s)  # [1]
    tl.store(stats + row, largest)
    tl.store(stats + tokens + row, total)
    target = tl.load(targets + row).to(tl.int64)
    is_ignored = target == ignored
    known = (target >= 0) & (target < vocabulary)
    logarithm = tl.log(total)
    x = tl.load(picked + row, mask=known, other=float("nan"))
    tl.store(values + row, tl.where(is_ignored, 0.0, (x - largest) - logarithm))
    place = tokens
    if ENTROPY:
        weighted = tl.load(at + 2 * size, mask=live, other=0.0)
        # e * (x - M) = exp(m - M) * (e' * (x - m) + (m - M) * e')
        terms = exp(m - finite_maximum(largest)[:, None]) * tl.fma(m - largest[:, None], s, weighted)
        mean = tl.div_rn(tl.reshape(sum_by_halves(tl.where(s == 0, 0.0, terms), 1), (1,)), total)
        tl.store(values + place + row, tl.where(is_ignored, 0.0, logarithm - mean))
        place += tokens
    if MEAN:
        below = tl.load(at + (2 + ENTROPY) * size, mask=live, other=0.0)
        count = tl.minimum(vocabulary - block * BLOCK, BLOCK).to(tl.float32)
        terms = tl.where(live, tl.fma(count, m - largest[:, None], below), 0.0)
        mean = tl.div_rn(tl.reshape(sum_by_halves(terms, 1), (1,)), vocabulary.to(tl.float32))
        tl.store(values + place + row, tl.where(is_ignored, 0.0, mean - logarithm))
        place += tokens
    if LSE:
        tl.store(values + place + row, tl.where(is_ignored, 0.0, largest + logarithm))


@triton.jit(do_not_specialize=["columns", "first", "tokens", "vocabulary", "ignored"])
def _logit_grad_kernel(
    logits, targets, grad, values, stats, out, columns, ld, first, tokens, vocabulary, ignored,
    softcap, per_softcap, per_temperature,
    CAPPED: tl.constexpr, HEATED: tl.constexpr, ENTROPY: tl.constexpr, MEAN: tl.constexpr, LSE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of BLOCK columns of a row of logits, from those of its values."""
    here = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // here).to(tl.int64)
    column = tl.program_id(0) % here * BLOCK + tl.arange(0, BLOCK)
    live = column < _aligned(columns)
    z = tl.load(logits + row * ld + column, mask=live, other=0.0)  # [BLOCK]
    x, bent = _scaled(z, softcap, per_softcap, per_temperature, CAPPED, HEATED)
    largest, total = tl.load(stats + row), tl.load(stats + tokens + row)
    target = tl.load(targets + row).to(tl.int64)
    is_ignored = target == ignored
    above = tl.load(grad + row)
    above = tl.where((target >= 0) & (target < vocabulary), above, float("nan"))
    below = x - largest
    p = exp(below) * tl.div_rn(1.0, total)
    d = above * (tl.where(column + first == target, 1.0, 0.0) - p)
    place = row + tokens
    if ENTROPY:
        slope = tl.load(values + place) + (below - tl.log(total))
        d -= tl.load(grad + place) * tl.where(p == 0, 0.0, p * slope)
        place += tokens
    if MEAN:
        d += tl.load(grad + place) * (tl.div_rn(1.0, vocabulary.to(tl.float32)) - p)
        place += tokens
    if LSE:
        d += tl.load(grad + place) * p
    if HEATED:
        d *= per_temperature
    if CAPPED:
        d *= 1.0 - bent * bent
    d = tl.where(is_ignored, 0.0, d)
    tl.store(out + row * ld + column, d.to(out.dtype.element_ty), mask=live)


Scaling = tuple[float | None, float | None, float | None]  # softcap, its reciprocal, the temperature's


def describe_block_sums(
    rows: int, columns: int, ld: int, first: int, blocks: int, scaling: Scaling, entropy: bool, mean: bool
) -> Launch:
    """Launch on logits, targets; sums and picked (out)."""
    constants = {**_scaled_by(scaling), "ENTROPY": entropy, "MEAN": mean, "BLOCK": configs.BLOCK}
    programs = rows * -(-columns // configs.BLOCK)
    scalars = (rows, columns, ld, first, blocks, *scaling)
    return Launch(_block_sums_kernel, programs, scalars, constants, _options(configs.SUM_WARPS))


def describe_row_values(
    rows: int, tokens: int, vocabulary: int, ignored: int, entropy: bool, mean: bool, lse: bool
) -> Launch:
    """Launch on sums, picked, targets; values and stats (out)."""
    blocks = -(-vocabulary // configs.BLOCK)
    constants: dict[str, object] = {
        "ENTROPY": entropy, "MEAN": mean, "LSE": lse, "BLOCKS": 1 << (blocks - 1).bit_length(), "BLOCK": configs.BLOCK,
    }  # fmt: skip
    scalars = (rows, tokens, vocabulary, blocks, ignored)
    return Launch(_row_values_kernel, rows, scalars, constants, _options(1))


def describe_logit_grad(
    rows: int, columns: int, ld: int, first: int, tokens: int, vocabulary: int, ignored: int, scaling: Scaling,
    entropy: bool, mean: bool, lse: bool,
) -> Launch:  # fmt: skip
    """Launch on logits, targets, grad, values, stats; the gradient of the logits (out)."""
    constants = {**_scaled_by(scaling), "ENTROPY": entropy, "MEAN": mean, "LSE": lse, "BLOCK": configs.GRADIENT_BLOCK}
    programs = rows * -(-columns // configs.GRADIENT_BLOCK)
    scalars = (columns, ld, first, tokens, vocabulary, ignored, *scaling)
    return Launch(_logit_grad_kernel, programs, scalars, constants, _options(configs.GRADIENT_WARPS))


def _scaled_by(scaling: Scaling) -> dict[str, object]:
    softcap, _, per_temperature = scaling
    return {"CAPPED": softcap is not None, "HEATED": per_temperature is not None}


def _options(num_warps: int) -> dict[str, object]:
    return {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": False}
