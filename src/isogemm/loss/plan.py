"""The GPU backend: products of blocks of logits, each followed by the kernel that reads it.

A block of float32 logits is one product's result in a workspace that all blocks share. Everything runs on the current
stream and is found by its key, so a warm call only launches.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isogemm.core.dispatch import Dispatch
from isogemm.core.plan import INPUTS, Cache, Plan, Seen, make_step, plans, seen_of
from isogemm.epilogues.operands import MATRICES, PLACES, Epilogue
from isogemm.gemm import describe
from isogemm.gemm import op as gemm_op
from isogemm.gemm.plan import gemm_plan
from isogemm.loss import configs
from isogemm.loss.configs import Blocks, How

if TYPE_CHECKING:
    from isogemm.core.launch import Launch

_chunks: Cache[int] = Cache()


def forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, how: How, blocks: Blocks | None = None
) -> tuple[Tensor, Tensor]:
    """The values [1 to 4, T] of the tokens, and the maximum and the sum [2, T] of their softmax.

    blocks: any, of whole SOFTMAX_BLOCKs; None for `gpu_blocks`.
    """
    tokens, vocabulary = len(hidden), len(weight)
    values = hidden.new_empty((how.value_count, tokens), dtype=torch.float32)
    stats = hidden.new_empty((2, tokens), dtype=torch.float32)
    blocks = blocks or configs.gpu_blocks(tokens, vocabulary)
    logits = _Logits(hidden, weight, bias, how, blocks, torch.float32)
    scaling, count_of_blocks = _scaling(how, hidden.device), -(-vocabulary // configs.BLOCK)
    sums = hidden.new_empty((2 + how.entropy + how.mean, blocks.tokens, count_of_blocks), dtype=torch.float32)
    picked = hidden.new_empty(blocks.tokens, dtype=torch.float32)
    for rows in configs.spans(tokens, blocks.tokens):
        count, target = rows.stop - rows.start, targets[rows]
        for columns in configs.spans(vocabulary, blocks.columns):
            z = logits.compute(rows, columns)
            sizes = *z.shape, logits.ld, columns.start, count_of_blocks
            _launch("block_sums", (*sizes, scaling, how.entropy, how.mean), z, target, sums, picked)
        of_row = count, tokens, vocabulary, how.ignore_index, how.entropy, how.mean, how.lse
        _launch("row_values", of_row, sums, picked, target, values[:, rows], stats[:, rows])
    return values, stats


def backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, values: Tensor, stats: Tensor,
    how: How, chunk: int, into: tuple[Tensor | None, Tensor | None, Tensor | None],
    totals: tuple[Tensor | None, Tensor | None], blocks: Blocks | None = None,
) -> None:  # fmt: skip
    """Write the gradients of hidden, weight and bias into `into`; add those of weight and bias to `totals` instead,
    where there are any. None: not wanted.

    chunk: tokens of one sum in the weight's gradient. blocks: any, of whole chunks and HIDDEN_CHUNKs; None for
    `gpu_blocks`.
    """
    tokens, vocabulary = len(hidden), len(weight)
    d_hidden, d_weight, d_bias = into
    weight_total, bias_total = totals
    blocks = blocks or configs.gpu_blocks(tokens, vocabulary)
    logits = _Logits(hidden, weight, bias, how, blocks, hidden.dtype)
    gradient = logits.empty(hidden.dtype)
    scaling, precision, at_once = _scaling(how, hidden.device), how.precision, tokens <= blocks.tokens
    total = None
    if d_hidden is not None and vocabulary > configs.HIDDEN_CHUNK:
        total = hidden.new_empty(hidden.shape, dtype=torch.float32)
    for columns in configs.spans(vocabulary, blocks.columns):
        weight_sum = _sum_like(weight_total, d_weight, columns, at_once=at_once)
        bias_sum = None if bias_total is None else bias_total[columns]
        for rows in configs.spans(tokens, blocks.tokens):
            z = logits.compute(rows, columns)
            dz = gradient[: z.shape[0], : z.shape[1]]
            sizes = *z.shape, logits.ld, columns.start, tokens, vocabulary
            of_row = how.ignore_index, scaling, how.entropy, how.mean, how.lse
            tensors = z, targets[rows], grad[:, rows], values[:, rows], stats[:, rows], dz
            _launch("logit_grad", (*sizes, *of_row), *tensors)
            if d_hidden is not None:
                sums = None if total is None else total[rows]
                _add_hidden_grad(dz, weight, columns.start, sums, d_hidden[rows], precision)
            if weight_sum is not None:
                added = weight_total is not None or rows.start > 0
                _add_weight_grad(dz, hidden[rows], weight_sum, precision, chunk, accumulate=added)
            if d_bias is not None or bias_total is not None:
                bias_sum = gemm_op.bias_grad(dz, bias_sum, torch.float32)
        if d_weight is not None and weight_sum is not None and not at_once:
            d_weight[columns] = weight_sum
        if d_bias is not None and bias_sum is not None:
            d_bias[columns] = bias_sum


class _Logits:
    """The float32 logits of a block of tokens and a block of the vocabulary, in memory that the next block reuses.

    They are summed over k as `isogemm.linear` of all tokens and the whole weight sums a result of dtype `summed_as`:
    float32 in the forward, which promises these bits; the operands' in the backward, in fewer sums, since its gradients
    are rounded to that dtype.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, how: How, blocks: Blocks,
        summed_as: torch.dtype,
    ) -> None:  # fmt: skip
        self._hidden, self._weight, self._bias, self._how, self._blocks = hidden, weight, bias, how, blocks
        self.ld = -(-blocks.columns // configs.ROW_UNIT) * configs.ROW_UNIT
        self._memory = self.empty(torch.float32)
        self._chunk = _chunk(hidden, weight, summed_as, how.precision)

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Memory for a block in this dtype."""
        return self._hidden.new_empty((self._blocks.tokens, self.ld), dtype=dtype)

    def compute(self, rows: slice, columns: slice) -> Tensor:
        """The logits of these tokens and rows of the weight."""
        z = self._memory[: rows.stop - rows.start, : columns.stop - columns.start]
        bias = None if self._bias is None else self._bias[columns]
        if not self._weight.shape[1]:
            z.zero_()
            return z if bias is None else z.copy_(bias.expand_as(z))
        _multiply(self._hidden[rows], self._weight[columns].mT, bias, z, self._how.precision, self._chunk)
        return z


def _chunk(hidden: Tensor, weight: Tensor, out_dtype: torch.dtype, precision: str | None) -> int:
    """k of one sum in `isogemm.linear` with this weight; it may depend on the whole vocabulary."""
    key = hidden.dtype, weight.shape, weight.stride(), out_dtype, precision
    chunk = _chunks.get(key)
    if chunk is None:
        problem = describe.product(hidden[:1], weight.mT, None, out_dtype, precision)
        chunk = _chunks.keep(key, 0 if problem is None else problem.chunk)
    return chunk


def _multiply(
    a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, precision: str | None, chunk: int,
    residual: Tensor | None = None,
) -> None:  # fmt: skip
    """Write a @ b + bias + residual, which may be `out` itself; the rows of both may be any distance apart."""
    if not out.numel():
        return
    name, of_residual = "linear_logprob", describe.layout(residual)
    key = *gemm_op.plan_key(name, a, b, bias, out.dtype, precision), chunk, describe.layout(out), of_residual
    plan = plans.get(key)
    if plan is None:
        problem = describe.product(a, b, bias, out.dtype, precision, chunk)
        assert problem is not None  # there is no batch
        problem = replace(problem, c_strides=(out.stride(0), 1), c_aligned=describe.aligned(out))
        read: list[Seen | None] = []
        if residual is not None:
            strides = tuple(residual.stride(0) if name == "residual" else None for name in MATRICES)
            problem = replace(
                problem, epilogue=Epilogue(residual=True), read_strides=strides, reads_float32=True,
                read_aligned=describe.aligned(residual),
            )  # fmt: skip
            read = [*[None] * PLACES["residual"], seen_of(residual)]
        plan = plans.keep(key, gemm_plan(name, out.shape, out.dtype, out.device, problem, read=read))
    read_by_place = [bias] if residual is None else [*[None] * PLACES["residual"], residual]
    plan.run((a, b, None, *read_by_place), out)


def _add_hidden_grad(
    grad: Tensor, weight: Tensor, first: int, total: Tensor | None, out: Tensor, precision: str | None
) -> None:
    """Add grad @ weight, of the columns from `first` on, to the total of those before; the vocabulary's last to `out`.

    Each HIDDEN_CHUNK of the vocabulary is one sum.
    """
    for columns in configs.spans(grad.shape[1], configs.HIDDEN_CHUNK):
        of_weight = weight[first + columns.start : first + columns.stop]
        before = total if first + columns.start else None
        to = out if total is None or first + columns.stop == len(weight) else total
        _multiply(grad[:, columns], of_weight, None, to, precision, 0, before)


def _sum_like(total: Tensor | None, into: Tensor | None, columns: slice, *, at_once: bool) -> Tensor | None:
    """Where a weight's gradient is summed: in its total; in itself if all tokens are there at once; or in float32."""
    if total is not None or into is None:
        return None if total is None else total[columns]
    return into[columns] if at_once else torch.empty_like(into[columns], dtype=torch.float32)


def _add_weight_grad(
    grad: Tensor, x: Tensor, out: Tensor, precision: str | None, chunk: int, *, accumulate: bool
) -> None:
    """Write grad^T x [N, K], summed over the tokens in chunks, or add it to `out`."""
    if not out.numel():
        return
    name = "weight_grad"
    key = *gemm_op.plan_key(name, grad, x, None, out.dtype, precision), chunk, accumulate, describe.layout(out)
    plan = plans.get(key)
    if plan is None:
        problem = describe.weight_grad(grad, x, out if accumulate else None, out.dtype, precision, chunk)
        problem = replace(problem, c_aligned=describe.aligned(out))
        plan = plans.keep(key, gemm_plan(name, out.shape, out.dtype, out.device, problem))
    plan.run((grad, x), out)


def _scaling(how: How, device: torch.device) -> tuple[float | None, float | None, float | None]:
    """The softcap, its reciprocal and the temperature's; None where nothing is scaled."""
    rounded_first = device.type == "cuda" and (how != how._replace(softcap=None, temperature=1)) and _rounds(device)

    def reciprocal(number: float) -> float:
        return _float32(1.0 / (_float32(number) if rounded_first else number))

    softcap = None if how.softcap is None else float(how.softcap)
    return softcap, softcap and reciprocal(softcap), None if how.temperature == 1 else reciprocal(how.temperature)


@functools.cache
def _rounds(device: torch.device) -> bool:
    """Whether torch's division by a number rounds it to float32 before it takes the reciprocal; newer ones do not."""
    number = 0.55  # where the two differ
    return (torch.ones((), device=device) / number).item() == _float32(1.0 / _float32(number))


def _float32(number: float) -> float:
    return ctypes.c_float(number).value


def _launch(name: str, sizes: tuple[Any, ...], *tensors: Tensor) -> None:
    """Run the kernel that `describe_<name>` describes for these sizes."""
    seen = tuple(map(seen_of, tensors))
    device = tensors[0].device
    key = name, sizes, seen, device.index
    plan = plans.get(key)
    if plan is None:
        from isogemm.loss import kernels

        describe_launch: Callable[..., Launch] = getattr(kernels, f"describe_{name}")
        places: Sequence[Any] = [(each, INPUTS + place) for place, each in enumerate(seen)]
        step = make_step(describe_launch(*sizes), places, device)
        served = Dispatch(f"linear_logprob {name}", "loss", str(list(sizes[:2])), "", "")
        plan = plans.keep(key, Plan.of(served, (), torch.float32, device, [step]))
    plan.run(tensors, tensors[0])
