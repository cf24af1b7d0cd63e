"""Gradients of the plain products, through autograd Functions in eager mode and through the operators elsewhere."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.compiler import is_compiling

from isogemm.core import private
from isogemm.core.eager import in_transform, through_dispatcher
from isogemm.gemm import op
from isogemm.gemm.problem import resolve_precision


class Owners:
    """The parameters themselves, where autocast multiplies by copies: they carry main_grad."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = parameter(weight), parameter(bias)


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        owners: Owners,
        out_dtype: torch.dtype | None,
        precision: str | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owners, ctx.precision = owners, precision
        return op.linear(x, weight, bias, out_dtype, precision)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        accumulated = (
            (owner, main_grad_of(owner) if is_accumulated(ctx, index, index) else None)
            for index, owner in ((1, ctx.owners.weight), (2, ctx.owners.bias))
        )
        return *_linear_gradients(ctx, grads[0], x, weight, *accumulated), None, None, None


def is_accumulated(ctx: Any, index: int, place: int) -> bool:
    """Whether this backward is to accumulate the gradient of an input, at `place` among those that are tensors.

    Not if it is not asked for. torch.autograd.grad, which returns gradients and accumulates none, does not tell; it is
    given them.
    """
    if not ctx.needs_input_grad[index]:
        return False
    if _will_execute is None:
        return True
    try:
        return bool(_will_execute(ctx.next_functions[place][0]))
    except RuntimeError:
        return False


_will_execute = private.find("torch._C:_will_engine_execute_node")


Accumulated = tuple[torch.Tensor | None, torch.Tensor | None]  # a parameter and its main_grad, if it has one


def _linear_gradients(
    ctx: Any,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_accumulated: Accumulated,
    bias_accumulated: Accumulated,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """dX = dY W, dW = dY^T X and db, the sum of dY over the tokens."""
    unrounded, grad = grad, grad.to(x.dtype)
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    if needs_weight and weight_accumulated[1] is not None:  # both, before either is touched
        op.require_total("weight.main_grad", weight_accumulated[1], weight.shape, x.device)
    if needs_bias and bias_accumulated[1] is not None:
        op.require_total("bias.main_grad", bias_accumulated[1], weight.shape[:1], x.device)
    dx = by_rows(grad, weight, ctx.precision) if needs_x else None
    dw = of_weight(grad, x, ctx.precision, weight_accumulated) if needs_weight else None
    db = of_bias(unrounded, x.dtype, bias_accumulated) if needs_bias else None
    return dx, dw, db


def of_weight(
    grad: torch.Tensor, x: torch.Tensor, precision: str | None, accumulated: Accumulated
) -> torch.Tensor | None:
    """The [N, K] weight's gradient; None where it was added to a main_grad."""
    owner, main_grad = accumulated
    if owner is None or main_grad is None:
        return weight_grad(grad, x, precision)
    if through_dispatcher(main_grad, grad, x):
        torch.ops.isogemm.add_weight_grad(main_grad, grad, x, owner, precision)
    else:
        op.add_weight_grad(main_grad, grad, x, owner, precision)
    return None


def of_bias(grad: torch.Tensor, dtype: torch.dtype, accumulated: Accumulated) -> torch.Tensor | None:
    """The [N] bias's gradient; None where it was added to a main_grad."""
    owner, main_grad = accumulated
    if owner is None or main_grad is None:
        return bias_grad(grad).to(dtype)
    if through_dispatcher(main_grad, grad):
        torch.ops.isogemm.add_bias_grad(main_grad, grad, owner)
    else:
        op.add_bias_grad(main_grad, grad, owner)
    return None


# The differentiable operations that the gradients are made of.


def matmul(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None, precision: str | None) -> torch.Tensor:
    if through_dispatcher(a, b):
        refuse_transforms("matmul", a, b)
        return cast(torch.Tensor, torch.ops.isogemm.matmul(a, b, out_dtype, precision))
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return cast(torch.Tensor, cast(Any, _Matmul).apply(a, b, out_dtype, resolve_precision(a, precision)))
    return op.product(a, b, None, out_dtype, precision)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None, precision: str | None
    ) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.precision = precision
        return op.product(a, b, None, out_dtype, precision)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_matmul_gradients(ctx, grads[0]), None, None


def _matmul_gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dA = dC B^T; dB = A^T dC, in the order of a weight's gradient where one b serves all rows."""
    a, b = ctx.saved_tensors
    grad = grad.to(a.dtype)
    da = db = None
    if ctx.needs_input_grad[0]:
        da = _sum_to(matmul(grad, b.mT, _wide(grad, a), ctx.precision), a)
    if ctx.needs_input_grad[1]:
        if b.ndim == 2:
            db = weight_grad(a, grad, ctx.precision)
        else:
            db = _sum_to(matmul(a.mT, grad, _wide(grad, b), ctx.precision), b)
    return da, db


def _wide(grad: torch.Tensor, of: torch.Tensor) -> torch.dtype | None:
    """float32 where a broadcast operand's gradient is yet to be summed over the batch."""
    summed = of.shape[:-2] != grad.shape[:-2] and of.dtype.itemsize == 2
    return torch.float32 if summed else None


def _sum_to(gradient: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Over what was broadcast; torch.sum's order is fixed."""
    return gradient if gradient.shape == of.shape else gradient.sum_to_size(of.shape).to(of.dtype)


def weight_grad(grad: torch.Tensor, x: torch.Tensor, precision: str | None) -> torch.Tensor:
    if through_dispatcher(grad, x):
        return cast(torch.Tensor, torch.ops.isogemm.weight_grad(grad, x, precision))
    if torch.is_grad_enabled() and (grad.requires_grad or x.requires_grad):
        return cast(torch.Tensor, cast(Any, _WeightGrad).apply(grad, x, precision))
    return op.weight_grad(grad, x, None, x.dtype, precision)


class _WeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, x: torch.Tensor, precision: str | None) -> torch.Tensor:
        ctx.save_for_backward(grad, x)
        ctx.precision = precision
        return op.weight_grad(grad, x, None, x.dtype, precision)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_weight_grad_gradients(ctx, grads[0]), None


def _weight_grad_gradients(ctx: Any, above: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Of W = G^T X with dW `above`: dG = X dW^T and dX = G dW."""
    grad, x = ctx.saved_tensors
    d_grad = by_rows(x, above.mT, ctx.precision) if ctx.needs_input_grad[0] else None
    d_x = by_rows(grad, above, ctx.precision) if ctx.needs_input_grad[1] else None
    return d_grad, d_x


def by_rows(x: torch.Tensor, b: torch.Tensor, precision: str | None) -> torch.Tensor:
    """x [..., K] @ b [K, N]."""
    return matmul(x, b, None, precision) if x.ndim > 1 else matmul(x[None], b, None, precision)[0]


def bias_grad(grad: torch.Tensor) -> torch.Tensor:
    if through_dispatcher(grad):
        return cast(torch.Tensor, torch.ops.isogemm.bias_grad(grad))
    if torch.is_grad_enabled() and grad.requires_grad:
        return cast(torch.Tensor, cast(Any, _BiasGrad).apply(grad))
    return op.bias_grad(grad, None, grad.dtype)


class _BiasGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        ctx.shape = grad.shape
        return op.bias_grad(grad, None, grad.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor]:
        return (grads[0].expand(ctx.shape),)


def _register_autograd() -> None:
    """The registered operators' autograd: the same gradients, through the operators."""

    def save_two(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[1])
        ctx.precision = resolve_precision(inputs[0], inputs[-1])

    def save_linear(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, weight, _, owner, main_grad, bias_owner, bias_main_grad, _, precision = inputs
        ctx.save_for_backward(x, weight)
        # Not saved tensors: another micro-batch's backward may change a main_grad before this one's does.
        ctx.accumulated = (owner, main_grad), (bias_owner, bias_main_grad)
        ctx.precision = resolve_precision(x, precision)

    def linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradients = _linear_gradients(ctx, grad, x, weight, *ctx.accumulated)
        return *gradients, None, None, None, None, None, None

    def save_shape(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.shape = inputs[0].shape

    register: Any = torch.library.register_autograd
    register("isogemm::linear", linear_backward, setup_context=save_linear)
    register("isogemm::matmul", lambda ctx, grad: (*_matmul_gradients(ctx, grad), None, None), setup_context=save_two)
    register(
        "isogemm::weight_grad", lambda ctx, above: (*_weight_grad_gradients(ctx, above), None), setup_context=save_two
    )
    register("isogemm::bias_grad", lambda ctx, above: above.expand(ctx.shape), setup_context=save_shape)


_register_autograd()


def parameter(x: torch.Tensor | None) -> torch.Tensor | None:
    """x, where it may carry a main_grad: a passing tensor is not to be kept alive for it."""
    return x if x is not None and (x.is_leaf or hasattr(x, "main_grad")) else None


def main_grad_of(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else cast("torch.Tensor | None", getattr(parameter, "main_grad", None))


def with_main_grad(
    *parameters: torch.Tensor | None,
) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor | None, ...]]:
    """The parameters that have a main_grad, and those."""
    main_grads = tuple(map(main_grad_of, parameters))
    owners = (None if main_grad is None else of for of, main_grad in zip(parameters, main_grads, strict=True))
    return tuple(owners), main_grads


def refuse_transforms(name: str, *tensors: torch.Tensor) -> None:
    if not is_compiling() and in_transform(*tensors):
        raise RuntimeError(
            f"isogemm.{name} has no rule for forward-mode AD and torch.func transforms, and falls back to nothing: "
            "the contract would not hold"
        )
