"""The CPU backend of the norms.

Sums are of elementwise operations in a fixed order: by halves over a row's columns or over rows. Their bits do not
depend on the other rows or on the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from isogemm.gemm import cpu


@torch.no_grad()
def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float) -> Tensor:
    """The norm of rows x [R, D], in fp32."""
    normed, _ = _normed(x, kind, eps)
    if weight is not None:
        normed *= weight
    if bias is not None:
        normed += bias
    return normed


@torch.no_grad()
def norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, kind: str, eps: float, height: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x [R, D], and those of weight and bias summed over blocks of `height` rows; in fp32."""
    normed, inverse = _normed(x, kind, eps)
    grad = grad.float()
    d_normed = grad if weight is None else grad * weight
    dx = d_normed - normed * (_over_columns(d_normed * normed) / x.shape[1])
    if kind == "layer_norm":
        dx -= _over_columns(d_normed) / x.shape[1]
    return dx.mul_(inverse), cpu.row_sums(grad * normed, height), cpu.row_sums(grad, height)


def _normed(x: Tensor, kind: str, eps: float) -> tuple[Tensor, Tensor]:
    """x [R, D] normalised, and 1 / deviation [R, 1]."""
    centred = x.float()
    if kind == "layer_norm":
        centred = centred - _over_columns(centred) / x.shape[1]
    inverse = 1.0 / torch.sqrt(_over_columns(centred * centred) / x.shape[1] + eps)
    return centred * inverse, inverse


def _over_columns(x: Tensor) -> Tensor:
    """Sum over columns, [R, D] -> [R, 1], by halves: c and c + half first."""
    columns = x.shape[1]
    half = 1 << max(columns - 1, 0).bit_length()
    sums = functional.pad(x.t(), (0, 0, 0, half - columns))
    while half > 1:
        half //= 2
        sums = sums[:half] + sums[half:]
    return sums[0][:, None]


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
