"""`isogemm::softmax`: softmax and log-softmax over the last dimension, with their gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from isogemm.core import device as devices
from isogemm.core.dispatch import Dispatch, record_operator
from isogemm.core.operator import Operator, refuse_second_derivative
from isogemm.core.plan import INPUTS, OUT, Place, Plan, make_step, plans
from isogemm.gemm.describe import flat, layout, rows
from isogemm.norm import configs, cpu


def name_of(log: bool) -> str:
    return "log_softmax" if log else "softmax"


def _softmax(x: Tensor, log: bool, dtype: torch.dtype) -> Tensor:
    if x.is_cuda and x.numel():
        x = x.contiguous()
        return plan_of(x, log, dtype).run((x,))
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        record_operator(name_of(log), x)
        flat(y).copy_(cpu.softmax(flat(x), log))
    return y


def _softmax_backward(grad: Tensor, y: Tensor, log: bool, dtype: torch.dtype) -> Tensor:
    if y.is_cuda and y.numel():
        grad, y = grad.contiguous(), y.contiguous()
        return _plan(grad, y, log, dtype).run((grad, y))
    dx = torch.empty(y.shape, dtype=dtype, device=y.device)
    if y.numel():
        record_operator(f"{name_of(log)}_backward", y)
        flat(dx).copy_(cpu.softmax_backward(flat(grad), flat(y), log))
    return dx


def plan_of(x: Tensor, log: bool, dtype: torch.dtype) -> Plan:
    """The plan of the (log-)softmax of x on a GPU: contiguous, not empty."""
    return _plan(x, None, log, dtype)


def _plan(x: Tensor, y: Tensor | None, log: bool, dtype: torch.dtype) -> Plan:
    """The plan of x alone or, for the backward, of the result's gradient x and the result y."""
    key = "softmax", log, dtype, layout(x), layout(y)
    plan = plans.get(key)
    if plan is not None:
        return plan
    from isogemm.norm.kernels import softmax as kernels

    v, itemsize, name = x.shape[-1], x.dtype.itemsize, name_of(log)
    shared_memory = devices.facts(x.device).shared_memory
    places: list[Place] = [
        ((each.dtype, each.data_ptr() % 16 == 0), INPUTS + place)
        for place, each in enumerate((x, y))
        if each is not None
    ]
    if y is None:
        launch = kernels.describe_softmax(rows(x), v, log, configs.choose_softmax(v, itemsize, 1, shared_memory))
    else:
        config = configs.choose_softmax(v, itemsize, 2, shared_memory)
        launch = kernels.describe_softmax_backward(rows(x), v, log, config)
        name += "_backward"
    served = Dispatch(name, "norm", f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}", "", "")
    step = make_step(launch, (*places, ((dtype, True), OUT)), x.device)
    return plans.keep(key, Plan.of(served, x.shape, dtype, x.device, (step,)))


class Known(NamedTuple):
    """An eager call on a GPU that was served before, without what its tensor holds."""

    plan: Plan
    log: bool
    dtype: torch.dtype  # of x


class Eager(torch.autograd.Function):
    """A known call with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, known: Known) -> Tensor:
        y = known.plan.run((x,))
        ctx.save_for_backward(y)
        ctx.log, ctx.dtype = known.log, known.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gradient(ctx, grads[0])[0], None


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    refuse_second_derivative(name_of(ctx.log))
    (y,) = ctx.saved_tensors
    return softmax_backward(grad, y, ctx.log, ctx.dtype), None, None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.log, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(output)


softmax_operator: Operator[Tensor] = Operator(
    "softmax(Tensor x, bool log, ScalarType dtype) -> Tensor",
    _softmax,
    lambda x, log, dtype: x.new_empty(x.shape, dtype=dtype),
    keep=_keep,
    backward=_gradient,
    refused="softmax and isogemm.log_softmax",
)
softmax_backward: Operator[Tensor] = Operator(
    "softmax_backward(Tensor grad, Tensor y, bool log, ScalarType dtype) -> Tensor",
    _softmax_backward,
    lambda grad, y, log, dtype: y.new_empty(y.shape, dtype=dtype),
)
