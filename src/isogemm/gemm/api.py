"""`isogemm.mm`, `matmul`, `linear` and `warmup`: autocast, autograd and the way to the plan.

In eager mode a call goes straight to its plan (no dispatcher hop); under torch.compile, fake tensors and dispatch modes
it goes through the registered operators.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch.compiler import is_compiling

from isogemm.core.eager import autocast_dtype, in_transform, through_dispatcher
from isogemm.core.errors import require_tensor
from isogemm.gemm import ahead, op
from isogemm.gemm.problem import resolve_precision

Tensors = torch.Tensor | Iterable[torch.Tensor] | torch.nn.Module


def mm(
    a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype | None = None, precision: str | None = None
) -> torch.Tensor:
    """Matrix product [M, K] @ [K, N] -> [M, N]; as `matmul`."""
    require_tensor("a", a, 2, "[M, K]")
    require_tensor("b", b, 2, "[K, N]")
    return matmul(a, b, out_dtype=out_dtype, precision=precision)


def matmul(
    a: torch.Tensor, b: torch.Tensor, *, out_dtype: torch.dtype | None = None, precision: str | None = None
) -> torch.Tensor:
    """torch.matmul, batch-invariant: a row's bits depend on the row and on b, on nothing else.

    Args:
        a: [..., M, K] or [K], any strides.
        b: [..., K, N] or [K], any strides; leading sizes are broadcast.
        out_dtype: torch.float32 for 16-bit inputs; None: the inputs' dtype.
        precision: of float32 inputs: "ieee", "tf32" or "tf32x3"; None follows
            torch.backends.cuda.matmul.fp32_precision. On the CPU any is computed as ieee.

    bfloat16, float16 and float32, summed in float32; float64 is torch's, without the promise. Differentiable, twice;
    gradients under the contract in docs/contract.md.
    """
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; expected a torch.Tensor")
        if x.ndim == 0:
            raise ValueError(f"{name} has no dimensions; expected at least one")
    dtype = autocast_dtype(a.device)
    if dtype is not None:
        a, b = _cast(a, dtype), _cast(b, dtype)
        precision = precision if dtype is torch.float32 else None
    row, column = a.ndim == 1, b.ndim == 1
    a = a[None] if row else a
    b = b[:, None] if column else b
    result = _matmul(a, b, out_dtype, precision)
    if column:
        result = result.squeeze(-1)
    return result.squeeze(-1 if column else -2) if row else result


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias in one launch, batch-invariant: a row's bits depend on the row, weight and bias alone.

    Args:
        x: [..., K], any strides.
        weight: [N, K], any strides, read where it lies. With a float32 `weight.main_grad` the backward accumulates into
            that, gives the weight no gradient and sets `weight.grad_added_to_main_grad`.
        bias: [N], likewise.
        out_dtype, precision: as in `matmul`.
    """
    if not all(isinstance(each, torch.Tensor) for each in (x, weight)) or not isinstance(bias, torch.Tensor | None):
        op.validate_linear(x, weight, bias, out_dtype, precision)
    owner, bias_owner = weight, bias
    dtype = autocast_dtype(x.device)
    if dtype is not None:
        x, weight = _cast(x, dtype), _cast(weight, dtype)
        bias = None if bias is None else _cast(bias, dtype)
        precision = precision if dtype is torch.float32 else None
    tensors = (x, weight) if bias is None else (x, weight, bias)
    if through_dispatcher(*tensors):
        _refuse_transforms("linear", *tensors)
        main_grads = _main_grad(owner), _main_grad(bias_owner)
        owners = tuple(
            None if main_grad is None else of for of, main_grad in zip((owner, bias_owner), main_grads, strict=True)
        )
        result = torch.ops.isogemm.linear(
            x, weight, bias, owners[0], main_grads[0], owners[1], main_grads[1], out_dtype, precision
        )
        return cast(torch.Tensor, result)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        resolved = resolve_precision(x, precision)
        return cast(
            torch.Tensor, cast(Any, _Linear).apply(x, weight, bias, _Owners(owner, bias_owner), out_dtype, resolved)
        )
    return op.linear(x, weight, bias, out_dtype, precision)


def warmup(
    weights: Tensors,
    *,
    tokens: int = 8192,
    backward: bool = False,
    bias: bool = False,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> int:
    """Compile all that `linear` will need for these weights: nothing is compiled later, in a server or a graph capture.

    Args:
        weights: [N, K] weights on a GPU, or a module, of which every linear is taken.
        tokens: the most rows of x; every number up to it is covered.
        backward: the gradients too, of up to `tokens` rows.
        bias: with a bias; a module's linears are taken as they are.
        out_dtype, precision: as in the calls to come.

    Returns:
        The number of kernels that were compiled or found in Triton's cache. x, outputs and gradients are taken to be
        contiguous and aligned to 16 bytes, as torch allocates them.
    """
    return ahead.warmup(weights, tokens, backward, bias, out_dtype, precision)


class _Owners:
    """The parameters themselves, where autocast multiplies by copies: they carry main_grad."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = _parameter(weight), _parameter(bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        owners: _Owners,
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
            (owner, _main_grad(owner) if _is_accumulated(ctx, index) else None)
            for index, owner in ((1, ctx.owners.weight), (2, ctx.owners.bias))
        )
        return *_linear_gradients(ctx, grads[0], x, weight, *accumulated), None, None, None


def _is_accumulated(ctx: Any, index: int) -> bool:
    """Whether this backward is to accumulate the gradient of an input: not if it is not asked for.

    torch.autograd.grad, which returns gradients and accumulates none, does not tell; it is given them.
    """
    if not ctx.needs_input_grad[index]:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[index][0]))
    except RuntimeError:
        return False


_Accumulated = tuple[torch.Tensor | None, torch.Tensor | None]  # a parameter and its main_grad, if it has one


def _linear_gradients(
    ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, of_weight: _Accumulated, of_bias: _Accumulated
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """dX = dY W, dW = dY^T X and db, the sum of dY over the tokens."""
    unrounded, grad = grad, grad.to(x.dtype)
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    if needs_weight and of_weight[1] is not None:  # both, before either is touched
        op.require_total("weight.main_grad", of_weight[1], weight.shape, x.device)
    if needs_bias and of_bias[1] is not None:
        op.require_total("bias.main_grad", of_bias[1], weight.shape[:1], x.device)
    dx = dw = db = None
    if needs_x:
        dx = _by_rows(grad, weight, ctx.precision)
    if needs_weight:
        owner, main_grad = of_weight
        if owner is None or main_grad is None:
            dw = _weight_grad(grad, x, ctx.precision)
        elif through_dispatcher(main_grad, grad, x):
            torch.ops.isogemm.add_weight_grad(main_grad, grad, x, owner, ctx.precision)
        else:
            op.add_weight_grad(main_grad, grad, x, owner, ctx.precision)
    if needs_bias:
        owner, main_grad = of_bias
        if owner is None or main_grad is None:
            db = _bias_grad(unrounded).to(x.dtype)
        elif through_dispatcher(main_grad, unrounded):
            torch.ops.isogemm.add_bias_grad(main_grad, unrounded, owner)
        else:
            op.add_bias_grad(main_grad, unrounded, owner)
    return dx, dw, db


# The differentiable operations that the gradients are made of.


def _matmul(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None, precision: str | None) -> torch.Tensor:
    if through_dispatcher(a, b):
        _refuse_transforms("matmul", a, b)
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
        da = _sum_to(_matmul(grad, b.mT, _wide(grad, a), ctx.precision), a)
    if ctx.needs_input_grad[1]:
        if b.ndim == 2:
            db = _weight_grad(a, grad, ctx.precision)
        else:
            db = _sum_to(_matmul(a.mT, grad, _wide(grad, b), ctx.precision), b)
    return da, db


def _wide(grad: torch.Tensor, of: torch.Tensor) -> torch.dtype | None:
    """float32 where a broadcast operand's gradient is yet to be summed over the batch."""
    summed = of.shape[:-2] != grad.shape[:-2] and of.dtype.itemsize == 2
    return torch.float32 if summed else None


def _sum_to(gradient: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Over what was broadcast; torch.sum's order is fixed."""
    return gradient if gradient.shape == of.shape else gradient.sum_to_size(of.shape).to(of.dtype)


def _weight_grad(grad: torch.Tensor, x: torch.Tensor, precision: str | None) -> torch.Tensor:
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
    d_grad = _by_rows(x, above.mT, ctx.precision) if ctx.needs_input_grad[0] else None
    d_x = _by_rows(grad, above, ctx.precision) if ctx.needs_input_grad[1] else None
    return d_grad, d_x


def _by_rows(x: torch.Tensor, b: torch.Tensor, precision: str | None) -> torch.Tensor:
    """x [..., K] @ b [K, N]."""
    return _matmul(x, b, None, precision) if x.ndim > 1 else _matmul(x[None], b, None, precision)[0]


def _bias_grad(grad: torch.Tensor) -> torch.Tensor:
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


def _parameter(x: torch.Tensor | None) -> torch.Tensor | None:
    """x, where it may carry a main_grad: a passing tensor is not to be kept alive for it."""
    return x if x is not None and (x.is_leaf or hasattr(x, "main_grad")) else None


def _main_grad(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return None if parameter is None else cast("torch.Tensor | None", getattr(parameter, "main_grad", None))


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.dtype in op.SERVED else x


def _refuse_transforms(name: str, *tensors: torch.Tensor) -> None:
    if not is_compiling() and in_transform(*tensors):
        raise RuntimeError(
            f"isogemm.{name} has no rule for forward-mode AD and torch.func transforms, and falls back to nothing: "
            "the contract would not hold"
        )
