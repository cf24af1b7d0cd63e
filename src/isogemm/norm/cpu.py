"""The CPU backend of the norms.

Sums are of elementwise operations in a fixed order: by halves over a row's columns or over rows. Their bits do not
depend on the other rows or on the number of threads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from isogemm.gemm import cpu
from isogemm.norm.configs import EMBEDDING_CHUNK, SOFTMAX_BLOCK


@torch.no_grad()
def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of rows x [R, D] + residual, in fp32; that sum; 1 / deviation and a layer norm's mean, [1 or 2, R]."""
    if residual is not None:
        x = x + residual.reshape(x.shape)
    centred = x.float()
    statistics = []
    if kind == "layer_norm":
        mean = _over_columns(centred) / x.shape[1]
        centred = centred - mean
        statistics.append(mean)
    inverse = 1.0 / torch.sqrt(_over_columns(centred * centred) / x.shape[1] + eps)
    normed = centred * inverse
    if weight is not None:
        normed *= weight.float() + offset
    if bias is not None:
        normed += bias
    return normed, x, torch.cat([inverse, *statistics], 1).t()


@torch.no_grad()
def norm_backward(
    grad: Tensor, of_sum: Tensor | None, x: Tensor, weight: Tensor | None, statistics: Tensor, kind: str, offset: float,
    height: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x [R, D], and those of weight and bias summed over blocks of `height` rows; in fp32."""
    inverse, grad = statistics[0][:, None], grad.float()
    centred = x.float() - statistics[1][:, None] if kind == "layer_norm" else x.float()
    normed = centred * inverse
    d_normed = grad if weight is None else grad * (weight.float() + offset)
    dx = d_normed - normed * (_over_columns(d_normed * normed) / x.shape[1])
    if kind == "layer_norm":
        dx -= _over_columns(d_normed) / x.shape[1]
    dx *= inverse
    if of_sum is not None:
        dx += of_sum
    return dx, cpu.row_sums(grad * normed, height), cpu.row_sums(grad, height)


@torch.no_grad()
def weight_sums(sums: Tensor, together: int, total: Tensor | None, out: Tensor) -> Tensor:
    """out = (total or 0) + chunk + chunk + ..., in order; a chunk is `together` of the sums [N, D], by halves."""
    added = torch.zeros(sums.shape[1], device=sums.device) if total is None else total
    for chunk in cpu.row_sums(sums, together):
        added += chunk
    return out if out is added else out.copy_(added)


def _over_columns(x: Tensor) -> Tensor:
    """Sum over columns, [R, D] -> [R, 1], by halves: c and c + half first."""
    columns = x.shape[1]
    half = 1 << max(columns - 1, 0).bit_length()
    sums = functional.pad(x.t(), (0, 0, 0, half - columns))
    while half > 1:
        half //= 2
        sums = sums[:half] + sums[half:]
    return sums[0][:, None]


# Softmax and log-softmax, in the order of the kernels. torch.exp has the same bits for an element anywhere in a tensor;
# torch.exp2 has not.

_SOFTMAX_ELEMENTS = 1 << 22  # at a time


@torch.no_grad()
def softmax_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum M [R] of rows x [R, V], and L [R], the sum of exp(x - M), in fp32."""
    rows, columns = x.shape
    largest, sums = x.new_empty(rows, dtype=torch.float32), x.new_empty(rows, dtype=torch.float32)
    step = max(1, _SOFTMAX_ELEMENTS // max(columns, 1))
    for first in range(0, rows, step):
        largest[first : first + step], sums[first : first + step] = _softmax_parts(x[first : first + step].float())
    return largest, sums


@torch.no_grad()
def softmax(x: Tensor, log: bool) -> Tensor:
    """The (log-)softmax of rows x [R, V], in fp32."""
    largest, sums = (each[:, None] for each in softmax_parts(x))
    centred = x.float() - largest
    return centred.sub_(torch.log(sums)) if log else torch.exp(centred).div_(sums)


@torch.no_grad()
def softmax_backward(grad: Tensor, y: Tensor, log: bool) -> Tensor:
    """The gradient of rows x [R, V] from that of their (log-)softmax y, in fp32."""
    grad, y = grad.float(), y.float()
    sums = _by_blocks(grad if log else grad * y)[:, None]
    return grad - torch.exp(y) * sums if log else y * (grad - sums)


def _by_blocks(x: Tensor) -> Tensor:
    """Sum rows x [R, V] in the order of a softmax: [R]."""
    blocks = -(-x.shape[1] // SOFTMAX_BLOCK)
    padded = functional.pad(x, (0, blocks * SOFTMAX_BLOCK - x.shape[1]))
    return _by_halves(_by_halves(padded.view(len(x), blocks, SOFTMAX_BLOCK)))


def _softmax_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = -(-x.shape[1] // SOFTMAX_BLOCK)
    padded = functional.pad(x, (0, blocks * SOFTMAX_BLOCK - x.shape[1]), value=-math.inf)
    x = padded.view(len(x), blocks, SOFTMAX_BLOCK)
    m = x.amax(2)
    s = _by_halves(torch.exp(x - _finite_maximum(m)[:, :, None]))
    largest = m.amax(1)
    return largest, _by_halves(s * torch.exp(m - _finite_maximum(largest)[:, None]))


def _finite_maximum(m: Tensor) -> Tensor:
    return m.masked_fill(m == -math.inf, 0.0)


def _by_halves(x: Tensor) -> Tensor:
    """Sum over the last dimension: c and c + half first."""
    size = x.shape[-1]
    half = 1 << max(size - 1, 0).bit_length()
    x = functional.pad(x, (0, half - size))
    while half > 1:
        half //= 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


@torch.no_grad()
def embedding_backward(grad: Tensor, ids: Tensor, total: Tensor, padding: int) -> None:
    """Add rows grad [T, D] to the rows `ids` [T] of total, in chunks; in a chunk each id's rows from zero, in order."""
    for first in range(0, len(ids), EMBEDDING_CHUNK):
        kept = ids[first : first + EMBEDDING_CHUNK]
        rows = grad[first : first + EMBEDDING_CHUNK].float()
        if padding >= 0:
            kept, rows = kept[kept != padding], rows[kept != padding]
        distinct, place = torch.unique(kept, return_inverse=True)
        sums = rows.new_zeros(len(distinct), grad.shape[1]).index_add_(0, place, rows)
        total[distinct] += sums


# The batch norm's sums are over all rows, by halves, in float64.


@torch.no_grad()
def batch_statistics(x: Tensor, mean: Tensor | None, var: Tensor | None, weight: Tensor | None, eps: float) -> Tensor:
    """The kernels' statistics [4, D]: mean, 1 / deviation, that times weight, unbiased variance; of x without mean."""
    if mean is None or var is None:
        rows = len(x)
        mean = _over_rows(x.to(torch.float64, copy=True)) / rows
        squares = _over_rows((x.double() - mean).square_())
        var, unbiased = squares / rows, squares / (rows - 1)
    else:
        mean, var = mean.double(), var.double()
        unbiased = var
    inverse = 1.0 / torch.sqrt(var + eps)
    return torch.stack([mean, inverse, inverse if weight is None else inverse * weight, unbiased]).float()


@torch.no_grad()
def batch_norm(x: Tensor, statistics: Tensor, bias: Tensor | None) -> Tensor:
    """The batch norm of rows x [R, D], in fp32."""
    y = (x.float() - statistics[0]).mul_(statistics[2])
    return y if bias is None else y.add_(bias)


@torch.no_grad()
def batch_norm_backward(grad: Tensor, x: Tensor, statistics: Tensor, from_batch: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x [R, D], weight and bias; from_batch: also through the statistics."""
    inverse, scale = statistics[1], statistics[2]
    grad, centred = grad.float(), x.float() - statistics[0]
    of_weight, of_bias = _over_rows((grad * (centred * inverse)).double()), _over_rows(grad.double())
    if from_batch:
        rows = len(x)
        along = centred.mul_((inverse * of_weight / rows).float())
        grad = grad - (of_bias / rows).float() - along
    return grad * scale, of_weight.float(), of_bias.float()


@torch.no_grad()
def update_running(
    statistics: Tensor, mean: Tensor | None, var: Tensor | None, batches: Tensor | None, momentum: float | None
) -> None:
    if batches is not None:
        batches += 1
    if momentum is None:
        if batches is None:
            return
        momentum = 1.0 / batches.item()
    for running, new in ((mean, statistics[0]), (var, statistics[3])):
        if running is not None:
            running.copy_(running.float().mul(1.0 - momentum).add_(new * momentum))


def _over_rows(x: Tensor) -> Tensor:
    """Sum over rows, [R, D] -> [D], in place: rows r and r + R / 2 first."""
    while len(x) > 1:
        half = (len(x) + 1) // 2
        x[: len(x) - half] += x[half:]
        x = x[:half]
    return x[0]
