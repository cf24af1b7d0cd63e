"""`isogemm::batch_norm` and `isogemm::update_running`, and the norms of the encoder layer."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isogemm.core.dispatch import record_operator
from isogemm.core.eager import through_dispatcher
from isogemm.core.operator import Operator, refuse_second_derivative
from isogemm.core.plan import dense, placed
from isogemm.core.plan import run_launch as run
from isogemm.gemm import fused_autograd
from isogemm.gemm.configs import BIAS_BLOCKS
from isogemm.gemm.describe import flat
from isogemm.norm import configs, cpu
from isogemm.norm.row_norm import OWNERS, checked_owners, keep_parameters, owners_of, row_norm


class RunningStatistics(NamedTuple):
    """Running statistics of one batch norm of an encoder layer, as torch.nn.BatchNorm1d has them."""

    mean: Tensor | None = None  # [D]
    var: Tensor | None = None  # [D], the unbiased estimate
    batches: Tensor | None = None  # number of batches, int64 []
    momentum: float | None = 0.1  # None: the mean of all batches
    frozen: bool = False  # whether they are not updated, and normalise in training, too


def encoder_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, eps: float, dtype: torch.dtype
) -> Tensor:
    """norm(x) * weight + bias over x's last dimension, in fp32, rounded to `dtype`; differentiable."""
    return row_norm(x, None, weight, bias, norm, eps, 0.0, dtype)[0]


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running: RunningStatistics | None, from_batch: bool,
    eps: float, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """(x - mean) / sqrt(var + eps) * weight + bias, in fp32, rounded to `dtype`; differentiable.

    from_batch: use the statistics of x over all but its last dimension, and update `running` with them unless it is
    frozen. Otherwise use the running ones; without them, x's.
    """
    mean = var = None
    if running is not None and not from_batch and running.mean is not None and running.var is not None:
        mean, var = running.mean, running.var
    if mean is None:
        require_rows(x)
    y, statistics = batch_norm_operator(x, weight, bias, mean, var, *owners_of(weight, bias), eps, dtype)
    if from_batch and running is not None:
        update_running(statistics, running if x.numel() else running._replace(mean=None, var=None))
    return y


def require_rows(x: Tensor) -> None:
    """Raise for a single row, which has no variance. Zero rows are accepted, as in torch."""
    if _rows(x) == 1:
        raise ValueError(f"x has shape {list(x.shape)}: a batch norm needs more than one row to take statistics of")


def update_running(statistics: Tensor, *running: RunningStatistics) -> None:
    """Update running statistics in place with a batch's [4, D], as torch.nn.BatchNorm1d does.

    Two norms' [2, 4, D] take one launch.
    """
    tensors = [each for one in running for each in one[:3] if each is not None]
    if not tensors or any(each.frozen for each in running):
        return
    update = update_running_operator.op if through_dispatcher(statistics, *tensors) else _update_running
    update(statistics, *[value for one in running for value in one[:4]])


def _batch_norm_gradients(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 11
    refuse_second_derivative("batch_norm")
    x, statistics = ctx.saved_tensors
    of_x, *needs = ctx.needs_input_grad[:3]
    owners = checked_owners(ctx, x, ctx.needs_input_grad[1:3])
    dx, *found = batch_norm_backward(grad, x, statistics, ctx.from_batch, any(needs))
    gradients = [
        None if not needed
        else each.to(dtype) if owner[1] is None
        else fused_autograd.of_sums(each[None], BIAS_BLOCKS, dtype, owner)
        for each, dtype, owner, needed in zip(found, ctx.dtypes, owners, needs, strict=True)
    ]  # fmt: skip
    return dx if of_x else None, *gradients, *(None,) * 8


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    """y, and the statistics [4, D] that the kernels use; zeros if there are no rows."""
    *_, eps, dtype = rest
    d = x.shape[-1]
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not x.numel():
        return y, torch.zeros((4, d), dtype=torch.float32, device=x.device)
    record_operator("batch_norm", x)
    if not x.is_cuda:
        statistics = cpu.batch_statistics(flat(x), mean, var, weight, eps)
        y.view(-1, d).copy_(cpu.batch_norm(flat(x), statistics, bias))
        return y, statistics
    from isogemm.norm.kernels import batch_norm as kernels

    rows, x = _rows(x), placed(x)
    moments = None
    if mean is None:
        moments = _partials(x, -(-rows // configs.TILE_ROWS), 3)
        run(kernels.describe("moments", rows, d), (x, moments))
        if groups := configs.groups(rows):
            tiles, moments = moments, _partials(x, groups, 3)
            run(kernels.describe("group_moments", rows, d), (tiles, moments))
    statistics = torch.empty((4, d), dtype=torch.float32, device=x.device)
    given = dense(mean), dense(var), dense(weight)
    run(kernels.describe("statistics", rows, d, eps=eps), (moments, *given, statistics))
    run(kernels.describe("normalise", rows, d), (x, statistics, dense(bias), y))
    return y, statistics


def _batch_norm_backward(
    grad: Tensor, x: Tensor, statistics: Tensor, from_batch: bool, of_parameters: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, and of weight and bias in fp32; the latter are empty if not wanted."""
    d = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        zeros = torch.zeros((2, d if of_parameters else 0), dtype=torch.float32, device=x.device)
        return dx, zeros[0].clone(), zeros[1].clone()
    record_operator("batch_norm_backward", x)
    if not x.is_cuda:
        of_x, *found = cpu.batch_norm_backward(flat(grad), flat(x), statistics, from_batch)
        dx.view(-1, d).copy_(of_x)
        of_weight, of_bias = found if of_parameters else (each.new_empty(0) for each in found)
        return dx, of_weight, of_bias
    from isogemm.norm.kernels import batch_norm as kernels

    rows, grad, x = _rows(x), placed(grad), placed(x)
    gradients = [torch.empty(d if of_parameters else 0, dtype=torch.float32, device=x.device) for _ in range(2)]
    coefficients = torch.empty((2, d), dtype=torch.float32, device=x.device) if from_batch else None
    if from_batch or of_parameters:
        sums = _partials(x, -(-rows // configs.TILE_ROWS), 2)
        run(kernels.describe("gradient_sums", rows, d), (grad, x, statistics, sums))
        if groups := configs.groups(rows):
            tiles, sums = sums, _partials(x, groups, 2)
            run(kernels.describe("group_sums", rows, d), (tiles, sums))
        written = gradients if of_parameters else (None, None)
        run(kernels.describe("coefficients", rows, d), (sums, statistics, coefficients, *written))
    tensors = (grad, x, statistics, coefficients, None, dx, None, None)
    run(kernels.describe("batch_norm_backward", rows, d), tensors)
    return dx, gradients[0], gradients[1]


def _partials(x: Tensor, count: int, width: int) -> Tensor:
    return torch.empty((count, width, x.shape[-1]), dtype=torch.float32, device=x.device)


def _update_running(statistics: Tensor, *values: Any) -> None:
    """Update one norm's or two norms' running statistics; values: mean, var, batches and momentum of each."""
    of_norms = statistics.view(-1, *statistics.shape[-2:])
    norms = [values[4 * place : 4 * place + 4] for place in range(len(of_norms))]
    if not statistics.is_cuda:
        for each, norm in zip(of_norms, norms, strict=True):
            cpu.update_running(each, *norm)
        return
    from isogemm.norm.kernels import batch_norm as kernels

    momenta = [norm[3] for norm in norms]
    buffers = [buffer for norm in norms for buffer in norm[:3]]
    written = [dense(each) for each in buffers]
    arguments = [given for place, each in enumerate(of_norms) for given in (each, *written[3 * place : 3 * place + 3])]
    run(kernels.describe_running(statistics.shape[-1], momenta), (*arguments, *[None] * (8 - len(arguments))))
    for buffer, now in zip(buffers, written, strict=True):
        if buffer is None or now is None:
            continue
        if buffer is not now:
            buffer.copy_(now)
        elif not buffer.is_inference():
            torch.autograd.graph.increment_version(buffer)


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def _batch_norm_fake(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=args[-1]), x.new_empty((4, x.shape[-1]), dtype=torch.float32)


def _batch_norm_backward_fake(
    grad: Tensor, x: Tensor, statistics: Tensor, from_batch: bool, of_parameters: bool
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = [x.new_empty(x.shape[-1] if of_parameters else 0, dtype=torch.float32) for _ in range(2)]
    return x.new_empty(x.shape), gradients[0], gradients[1]


def _keep_batch_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, mean, _, *owners, _, _ = inputs
    ctx.save_for_backward(x, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.from_batch = mean is None
    keep_parameters(ctx, weight, bias, *owners)


batch_norm_operator = Operator(
    f"batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? var, {OWNERS}, float eps, "
    "ScalarType dtype) -> (Tensor, Tensor)",
    _batch_norm,
    _batch_norm_fake,
    keep=_keep_batch_norm,
    backward=_batch_norm_gradients,
)
batch_norm_backward = Operator(
    "batch_norm_backward(Tensor grad, Tensor x, Tensor statistics, bool from_batch, bool of_parameters) "
    "-> (Tensor, Tensor, Tensor)",
    _batch_norm_backward,
    _batch_norm_backward_fake,
)
update_running_operator = Operator(
    "update_running(Tensor statistics, Tensor(a!)? mean, Tensor(b!)? var, Tensor(c!)? batches, float? momentum, "
    "Tensor(d!)? mean2=None, Tensor(e!)? var2=None, Tensor(f!)? batches2=None, float? momentum2=None) -> ()",
    _update_running,
    lambda *args: None,
)
