"""Gradients of the plain products, through autograd Functions in eager mode and through the operators elsewhere."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.compiler import is_compiling

from isogemm.core.eager import PLAIN, in_transform, through_dispatcher
from isogemm.gemm import op
from isogemm.gemm.problem import broadcast, resolve_precision


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
        _keep_factors(ctx, x, weight, precision)
        ctx.owners = owners
        return op.linear(x, weight, bias, out_dtype, precision)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        totals = accumulated(ctx.owners.weight, needs_weight), accumulated(ctx.owners.bias, needs_bias)
        return *_linear_gradients(ctx, grads[0], *totals), None, None, None


def _keep_factors(ctx: Any, a: torch.Tensor, b: torch.Tensor, precision: str | None) -> None:
    """Keep each factor of a product where the other's gradient is wanted."""
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
    ctx.shapes, ctx.dtype, ctx.precision = (a.shape, b.shape), a.dtype, precision


Accumulated = tuple[torch.Tensor | None, torch.Tensor | None]  # a parameter, and its main_grad if that is added to


def accumulated(owner: torch.Tensor | None, needed: bool) -> Accumulated:
    """The owner's main_grad, if the backward under way accumulates: it adds to `.grad`, and not with a graph.

    torch.autograd.grad returns gradients and accumulates none; a main_grad holds no graph, for which there is `.grad`.
    A tensor hook is to see the gradient, and may change it: that goes to `.grad` too.
    """
    main_grad = main_grad_of(owner) if needed and not torch.is_grad_enabled() else None
    if owner is None or main_grad is None or op.has_hooks(owner):
        return owner, None
    try:
        return owner, main_grad if op.accumulates(owner) else None
    except RuntimeError:  # by torch.autograd.grad, which returns it
        return owner, None


def _linear_gradients(
    ctx: Any, grad: torch.Tensor, weight_accumulated: Accumulated, bias_accumulated: Accumulated
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """dX = dY W, dW = dY^T X and db, the sum of dY over the tokens."""
    x, weight = ctx.saved_tensors
    unrounded, grad = grad, grad.to(ctx.dtype)
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    shape = ctx.shapes[1]
    if needs_weight and weight_accumulated[1] is not None:  # both, before either is touched
        op.require_total("weight.main_grad", weight_accumulated[1], shape, grad.device)
    if needs_bias and bias_accumulated[1] is not None:
        op.require_total("bias.main_grad", bias_accumulated[1], shape[:1], grad.device)
    dx = by_rows(grad, weight, ctx.precision) if needs_x else None
    dw = of_weight(grad, x, ctx.precision, weight_accumulated) if needs_weight else None
    db = of_bias(unrounded, ctx.dtype, bias_accumulated) if needs_bias else None
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
        _keep_factors(ctx, a, b, precision)
        return op.product(a, b, None, out_dtype, precision)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_matmul_gradients(ctx, grads[0]), None, None


def _matmul_gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dA = dC B^T; dB = A^T dC, in the order of a weight's gradient where one b serves all rows."""
    a, b = ctx.saved_tensors
    a_shape, b_shape = ctx.shapes
    grad = grad.to(ctx.dtype)
    da = db = None
    if ctx.needs_input_grad[0]:
        da = _product_summed_to(a_shape, grad, b.mT, ctx.precision)
    if ctx.needs_input_grad[1]:
        if len(b_shape) == 2:
            db = weight_grad(a, grad, ctx.precision)
        else:
            db = _product_summed_to(b_shape, a.mT, grad, ctx.precision)
    return da, db


def _product_summed_to(shape: torch.Size, a: torch.Tensor, b: torch.Tensor, precision: str | None) -> torch.Tensor:
    """A broadcast operand's gradient: a @ b, summed in float32 over what was broadcast; torch.sum's order is fixed."""
    summed = shape[:-2] != broadcast(a.shape[:-2], b.shape[:-2])
    product = matmul(a, b, torch.float32 if summed and a.dtype.itemsize == 2 else None, precision)
    return product.sum_to_size(shape).to(a.dtype) if summed else product


def weight_grad(grad: torch.Tensor, x: torch.Tensor, precision: str | None) -> torch.Tensor:
    if through_dispatcher(grad, x):
        return cast(torch.Tensor, torch.ops.isogemm.weight_grad(grad, x, precision))
    if torch.is_grad_enabled() and (grad.requires_grad or x.requires_grad):
        return cast(torch.Tensor, cast(Any, _WeightGrad).apply(grad, x, precision))
    return op.weight_grad(grad, x, None, x.dtype, precision)


class _WeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, x: torch.Tensor, precision: str | None) -> torch.Tensor:
        _keep_factors(ctx, grad, x, precision)
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

    def keep_factors(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _keep_factors(ctx, inputs[0], inputs[1], resolve_precision(inputs[0], inputs[-1]))

    def keep_linear(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        keep_factors(ctx, inputs, output)
        # Not saved tensors: another micro-batch's backward may change a main_grad before this one's does.
        ctx.totals = inputs[3:5], inputs[5:7]

    def linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        totals = map(given_or_accumulated, ctx.totals, ctx.needs_input_grad[1:3])
        return *_linear_gradients(ctx, grad, *totals), None, None, None, None, None, None

    def save_shape(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.shape = inputs[0].shape

    register: Any = torch.library.register_autograd
    register("isogemm::linear", linear_backward, setup_context=keep_linear)
    register(
        "isogemm::matmul", lambda ctx, grad: (*_matmul_gradients(ctx, grad), None, None), setup_context=keep_factors
    )
    register(
        "isogemm::weight_grad",
        lambda ctx, above: (*_weight_grad_gradients(ctx, above), None),
        setup_context=keep_factors,
    )
    register("isogemm::bias_grad", lambda ctx, above: above.expand(ctx.shape), setup_context=save_shape)


_register_autograd()


def parameter(x: torch.Tensor | None) -> torch.Tensor | None:
    """x, where its gradient may be accumulated: nothing else is to be kept alive for a main_grad."""
    return x if x is not None and x.is_leaf and x.requires_grad else None


def main_grad_of(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """That of a leaf: of anything else no gradient is accumulated."""
    main_grad = getattr(parameter, "main_grad", None)
    return cast("torch.Tensor | None", main_grad) if main_grad is not None and cast(Any, parameter).is_leaf else None


def with_main_grad(
    *parameters: torch.Tensor | None,
) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor | None, ...]]:
    """The parameters that have a main_grad, and those."""
    main_grads = tuple(map(main_grad_of, parameters))
    owners = (None if main_grad is None else of for of, main_grad in zip(parameters, main_grads, strict=True))
    return tuple(owners), main_grads


def given_or_accumulated(given: Accumulated, needed: bool) -> Accumulated:
    """`accumulated`; in a graph that is traced, what was given: its main_grads are arguments, and the operators ask."""
    return accumulated(given[0], needed) if given[0] is None or type(given[0]) in PLAIN else given


def refuse_transforms(name: str, *tensors: torch.Tensor) -> None:
    if not is_compiling() and in_transform(*tensors):
        raise RuntimeError(
            f"isogemm.{name} has no rule for forward-mode AD and torch.func transforms, and falls back to nothing: "
            "the contract would not hold"
        )
