"""The CPU backend: gemm's CPU products, and the softmax sums of norm's CPU backend.

The forward computes whole rows of logits, a few at a time, since the CPU's products depend on the whole weight. The
backward computes them again, in blocks of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isogemm.epilogues import elementary
from isogemm.gemm import configs as gemm_configs
from isogemm.gemm import cpu as products
from isogemm.loss import configs
from isogemm.loss.configs import How
from isogemm.norm import cpu as softmax


@torch.no_grad()
def forward(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, how: How) -> tuple[Tensor, Tensor]:
    """The values [1 to 4, T] of the tokens, and the maximum and the sum [2, T] of their softmax."""
    tokens, vocabulary = len(hidden), len(weight)
    values = hidden.new_empty((how.value_count, tokens), dtype=torch.float32)
    stats = hidden.new_empty((2, tokens), dtype=torch.float32)
    blocks = configs.cpu_blocks(tokens, vocabulary)
    for rows in configs.spans(tokens, blocks.tokens):
        x, _ = _scaled(products.product(hidden[rows], weight.mT, bias, torch.float32), how)
        _row_values(x, targets[rows], how, values[:, rows], stats[:, rows])
    return values.masked_fill_(targets == how.ignore_index, 0.0), stats


@torch.no_grad()
def backward(
    grad: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, values: Tensor, stats: Tensor,
    how: How, chunk: int, into: tuple[Tensor | None, Tensor | None, Tensor | None],
    totals: tuple[Tensor | None, Tensor | None],
) -> None:  # fmt: skip
    """Write the gradients of hidden, weight and bias into `into`; add those of weight and bias to `totals` instead,
    where there are any. None: not wanted."""
    tokens, vocabulary = len(hidden), len(weight)
    d_hidden, d_weight, d_bias = into
    weight_total, bias_total = totals
    blocks = configs.cpu_gradient_blocks(tokens, vocabulary)
    of_hidden = None if d_hidden is None else hidden.new_zeros(hidden.shape, dtype=torch.float32)
    for columns in configs.spans(vocabulary, blocks.columns):
        part, part_bias = weight[columns], None if bias is None else bias[columns]
        weight_sum = _sum_like(weight_total, d_weight, columns)
        bias_sum = _sum_like(bias_total, d_bias, columns)
        for rows in configs.spans(tokens, blocks.tokens):
            z = products.product(hidden[rows], part.mT, part_bias, torch.float32)
            at = columns.start
            d = _logit_grad(z, targets[rows], grad[:, rows], values[:, rows], stats[:, rows], how, at, vocabulary)
            d = d.to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[rows] += products.product(d, part, None, torch.float32)
            if weight_sum is not None:
                products.weight_grad(d, hidden[rows], weight_sum, torch.float32, chunk)
            if bias_sum is not None:
                products.bias_grad(d, bias_sum, torch.float32, gemm_configs.BIAS_CHUNK)
        if d_weight is not None and weight_sum is not None and weight_total is None:
            d_weight[columns] = weight_sum
        if d_bias is not None and bias_sum is not None and bias_total is None:
            d_bias[columns] = bias_sum
    if d_hidden is not None and of_hidden is not None:
        d_hidden.copy_(of_hidden)


def _sum_like(total: Tensor | None, into: Tensor | None, columns: slice) -> Tensor | None:
    """Where to add the gradient of these rows: to the total, or to zeros."""
    if total is not None:
        return total[columns]
    return None if into is None else torch.zeros_like(into[columns], dtype=torch.float32)


def _scaled(z: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """x, and tanh(z / softcap)."""
    bent = z
    if how.softcap is not None:
        bent = elementary.tanh(z / how.softcap)
        z = how.softcap * bent
    return z if how.temperature == 1 else z / how.temperature, bent


def _row_values(x: Tensor, targets: Tensor, how: How, values: Tensor, stats: Tensor) -> None:
    largest, total = softmax.softmax_parts(x)
    stats[0], stats[1] = largest, total
    logarithm = torch.log(total)
    target = x.gather(1, targets.long().clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    found = [(target - largest) - logarithm]
    below = x - largest[:, None] if how.entropy or how.mean else x
    if how.entropy:
        e = torch.exp(below)
        weighted = _sum_by_halves(torch.where(e == 0, 0.0, e * below))
        found.append(logarithm - weighted / total)
    if how.mean:
        found.append(_sum_by_halves(below) / x.shape[1] - logarithm)
    if how.lse:
        found.append(largest + logarithm)
    for place, value in enumerate(found):
        values[place] = value


def _logit_grad(
    z: Tensor, targets: Tensor, grad: Tensor, values: Tensor, stats: Tensor, how: How, first: int, vocabulary: int
) -> Tensor:
    """The gradient of logits z [R, V'], whose first column is the vocabulary's `first`: as the kernel's."""
    x, bent = _scaled(z, how)
    largest, total = stats[0][:, None], stats[1][:, None]
    below = x - largest
    p = torch.exp(below) * (1.0 / total)
    above, *others = grad[..., None]
    chosen = torch.arange(first, first + z.shape[1], device=z.device) == targets[:, None]
    d: Tensor = above * (chosen.float() - p)
    if how.entropy:
        slope = values[1][:, None] + (below - torch.log(total))
        d -= others.pop(0) * torch.where(p == 0, 0.0, p * slope)
    if how.mean:
        d += others.pop(0) * (1.0 / vocabulary - p)
    if how.lse:
        d += others.pop(0) * p
    if how.temperature != 1:
        d /= how.temperature
    if how.softcap is not None:
        d *= 1.0 - bent * bent
    return d.masked_fill_((targets == how.ignore_index)[:, None], 0.0)


def _sum_by_halves(x: Tensor) -> Tensor:
    """Sum [R, V] over its columns: by halves inside blocks, then over blocks."""
    blocks = products.row_sums(x.t(), configs.BLOCK)
    return products.row_sums(blocks, 1 << (len(blocks) - 1).bit_length())[0]
