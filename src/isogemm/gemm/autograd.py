"""The operators of plain products and token sums, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from isogemm.core.device import resolve_precision
from isogemm.core.eager import PLAIN, through_dispatcher
from isogemm.core.operator import Operator
from isogemm.gemm import op
from isogemm.gemm.describe import broadcast


class Linear(torch.autograd.Function):
    """`op.linear`; owners: weight and bias before autocast's cast, which carry main_grad."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, owners: Any, *how: Any) -> Tensor:
        _keep_factors(ctx, x, weight, how[-1])
        ctx.owners = owners
        return op.linear(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        totals = map(accumulated, ctx.owners, ctx.needs_input_grad[1:3])
        return *_linear_gradients(ctx, grads[0], *totals), None, None, None


def _keep_factors(ctx: Any, a: Tensor, b: Tensor, precision: str | None) -> None:
    """Save each factor of a product if the other's gradient is needed."""
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
    ctx.shapes, ctx.dtype, ctx.precision = (a.shape, b.shape), a.dtype, precision


Accumulated = tuple[Tensor | None, Tensor | None]  # a parameter, and its main_grad if the gradient is added to that


def accumulated(owner: Tensor | None, needed: bool) -> Accumulated:
    """The owner, and its main_grad if the running backward accumulates into `.grad`, without a graph.

    torch.autograd.grad returns gradients instead. Under create_graph the gradient goes to `.grad`, since a main_grad
    holds no graph; so it does where a tensor hook must see the gradient.
    """
    main_grad = main_grad_of(owner) if needed and not torch.is_grad_enabled() else None
    if owner is None or main_grad is None or op.has_hooks(owner):
        return owner, None
    try:
        return owner, main_grad if op.accumulates(owner) else None
    except RuntimeError:  # by torch.autograd.grad, which returns it
        return owner, None


def _linear_gradients(
    ctx: Any, grad: Tensor, weight_accumulated: Accumulated, bias_accumulated: Accumulated
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dX = dY W, dW = dY^T X and db, the sum of dY over the tokens."""
    x, weight = ctx.saved_tensors
    unrounded, grad = grad, grad.to(ctx.dtype)
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    shape = ctx.shapes[1]
    if needs_weight and weight_accumulated[1] is not None:  # check both before either is changed
        op.require_total("weight.main_grad", weight_accumulated[1], shape, grad.device)
    if needs_bias and bias_accumulated[1] is not None:
        op.require_total("bias.main_grad", bias_accumulated[1], shape[:1], grad.device)
    dx = by_rows(grad, weight, ctx.precision) if needs_x else None
    dw = of_weight(grad, x, ctx.precision, weight_accumulated) if needs_weight else None
    db = of_bias(unrounded, ctx.dtype, bias_accumulated) if needs_bias else None
    return dx, dw, db


def of_weight(grad: Tensor, x: Tensor, precision: str | None, accumulated: Accumulated) -> Tensor | None:
    """The [N, K] weight's gradient; None where it was added to a main_grad."""
    return None if add_weight_grad(accumulated, grad, x, precision) else weight_grad(grad, x, precision)


def of_bias(grad: Tensor, dtype: torch.dtype, accumulated: Accumulated) -> Tensor | None:
    """The [N] bias's gradient; None where it was added to a main_grad."""
    return None if add_bias_grad(accumulated, grad) else bias_grad(grad).to(dtype)


def _matmul_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
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


def _product_summed_to(shape: torch.Size, a: Tensor, b: Tensor, precision: str | None) -> Tensor:
    """A broadcast operand's gradient: a @ b, summed in float32 over the broadcast sizes; torch.sum's order is fixed."""
    summed = shape[:-2] != broadcast(a.shape[:-2], b.shape[:-2])
    product = matmul(a, b, torch.float32 if summed and a.dtype.itemsize == 2 else None, precision)
    return product.sum_to_size(shape).to(a.dtype) if summed else product


def _weight_grad_gradients(ctx: Any, above: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of W = G^T X: dG = X dW^T and dX = G dW, where dW is `above`."""
    grad, x = ctx.saved_tensors
    d_grad = by_rows(x, above.mT, ctx.precision) if ctx.needs_input_grad[0] else None
    d_x = by_rows(grad, above, ctx.precision) if ctx.needs_input_grad[1] else None
    return d_grad, d_x


def by_rows(x: Tensor, b: Tensor, precision: str | None) -> Tensor:
    """x [..., K] @ b [K, N]."""
    return matmul(x, b, None, precision) if x.ndim > 1 else matmul(x[None], b, None, precision)[0]


def _keep_resolved(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _keep_factors(ctx, inputs[0], inputs[1], resolve_precision(inputs[0], inputs[-1]))


def _keep_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _keep_resolved(ctx, inputs, output)
    # Not saved tensors: the backward of another micro-batch may change a main_grad in between.
    ctx.totals = inputs[3:5], inputs[5:7]


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    totals = map(given_or_accumulated, ctx.totals, ctx.needs_input_grad[1:3])
    return *_linear_gradients(ctx, grad, *totals), None, None, None, None, None, None


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    *_, out_dtype, precision = rest
    op.validate_linear(x, weight, bias, out_dtype, precision)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or x.dtype)


linear = Operator(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? owner, Tensor? main_grad, Tensor? bias_owner, "
    "Tensor? bias_main_grad, ScalarType? out_dtype, str? precision) -> Tensor",
    lambda x, weight, bias, *rest: op.linear(x, weight, bias, *rest[-2:]),
    _linear_fake,
    keep=_keep_linear,
    backward=_linear_backward,
)


def _matmul_fake(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, precision: str | None = None) -> Tensor:
    op.validate(a, b, None, out_dtype, precision)
    shape = (*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


matmul = Operator(
    "matmul(Tensor a, Tensor b, ScalarType? out_dtype=None, str? precision=None) -> Tensor",
    lambda a, b, out_dtype=None, precision=None: op.product(a, b, None, out_dtype, precision),
    _matmul_fake,
    keep=_keep_resolved,
    backward=lambda ctx, grad: (*_matmul_gradients(ctx, grad), None, None),
    refused="matmul",
)


def _weight_grad_fake(grad: Tensor, x: Tensor, precision: str | None = None) -> Tensor:
    op.validate_token_sum(grad, x, precision)
    return x.new_empty((grad.shape[-1], x.shape[-1]))


weight_grad = Operator(
    "weight_grad(Tensor grad, Tensor x, str? precision=None) -> Tensor",
    lambda grad, x, precision=None: op.weight_grad(grad, x, None, x.dtype, precision),
    _weight_grad_fake,
    keep=_keep_resolved,
    backward=lambda ctx, above: (*_weight_grad_gradients(ctx, above), None),
)


def _keep_shape(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shape = inputs[0].shape


bias_grad = Operator(
    "bias_grad(Tensor grad) -> Tensor",
    lambda grad: op.bias_grad(grad, None, grad.dtype),
    lambda grad: grad.new_empty(grad.shape[-1:]),
    keep=_keep_shape,
    backward=lambda ctx, above: above.expand(ctx.shape),
)


class MainGradAdder:
    """Adds a gradient to its parameter's main_grad; under torch.compile as the operator isogemm::add_<name>."""

    def __init__(
        self, name: str, of: str, arguments: str, shape: Callable[..., Any], compute: Callable[..., object]
    ) -> None:
        """Register the operator.

        Args:
            name: of the gradient.
            of: the parameter's name in error messages.
            arguments: what the gradient is computed from, as in a schema, tensors first.
            shape: the gradient's, from these arguments.
            compute: adds the gradient to its first argument, the main_grad; these arguments follow.
        """
        self._of, self._shape, self._compute = of, shape, compute
        self._tensors = arguments.count("Tensor ")
        schema = f"add_{name}(Tensor(a!) main_grad, Tensor owner, {arguments}) -> ()"
        self._operator: Operator[None] = Operator(schema, self._run, self._check)

    def __call__(self, accumulated: Accumulated, *args: Any) -> bool:
        """Add the gradient; False where there is no main_grad to add it to."""
        owner, main_grad = accumulated
        if owner is None or main_grad is None:
            return False
        add = self._operator.op if through_dispatcher(main_grad, *args[: self._tensors]) else self._add
        add(main_grad, owner, *args)
        return True

    def _run(self, main_grad: Tensor, owner: Tensor, *args: Any) -> None:
        if op.is_added(f"the {self._of}", owner):
            self._add(main_grad, owner, *args)

    def _add(self, main_grad: Tensor, owner: Tensor, *args: Any) -> None:
        self._check(main_grad, owner, *args)
        self._compute(main_grad, *args)
        owner.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # what Megatron-style trainers look for

    def _check(self, main_grad: Tensor, owner: Tensor, *args: Any) -> None:
        op.require_total(f"{self._of}.main_grad", main_grad, self._shape(*args), args[0].device)


add_weight_grad = MainGradAdder(
    "weight_grad", "weight", "Tensor grad, Tensor x, str? precision=None",
    shape=lambda grad, x, precision=None: (grad.shape[-1], x.shape[-1]),
    compute=lambda main_grad, grad, x, precision=None: op.weight_grad(grad, x, main_grad, torch.float32, precision),
)  # fmt: skip
add_bias_grad = MainGradAdder(
    "bias_grad", "bias", "Tensor grad",
    shape=lambda grad: grad.shape[-1:],
    compute=lambda main_grad, grad: op.bias_grad(grad, main_grad, torch.float32),
)  # fmt: skip


def parameter(x: Tensor | None) -> Tensor | None:
    """x if its gradient may be accumulated, else None: other tensors should not be kept alive for a main_grad."""
    return x if x is not None and x.is_leaf and x.requires_grad else None


def main_grad_of(parameter: Tensor | None) -> Tensor | None:
    """A leaf's main_grad; None for other tensors, whose gradients are not accumulated."""
    main_grad = getattr(parameter, "main_grad", None)
    return cast("Tensor | None", main_grad) if main_grad is not None and cast(Any, parameter).is_leaf else None


def with_main_grad(*parameters: Tensor | None) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """The parameters that have a main_grad (None for the others), and their main_grads."""
    main_grads = tuple(map(main_grad_of, parameters))
    owners = (None if main_grad is None else of for of, main_grad in zip(parameters, main_grads, strict=True))
    return tuple(owners), main_grads


def given_or_accumulated(given: Accumulated, needed: bool) -> Accumulated:
    """`accumulated`; while tracing, what was given: main_grads are then arguments, and the add_* operators ask."""
    return accumulated(given[0], needed) if given[0] is None or type(given[0]) in PLAIN else given
