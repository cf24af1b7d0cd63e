"""`isogemm.bmm`: validation, autocast and autograd.

In eager mode a call goes straight to its plan (no dispatcher hop); under torch.compile, fake tensors, dispatch modes
and function transforms it goes through the registered operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from isogemm.core.errors import require_precision, require_same, require_tensor
from isogemm.tiny import op
from isogemm.tiny.configs import MAX_SIZE

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_STRIDED = torch.strided
_SERVED = (torch.float32, torch.float16, torch.bfloat16)

_Product = Callable[[torch.Tensor, torch.Tensor, str | None], torch.Tensor]


def bmm(a: torch.Tensor, b: torch.Tensor, *, precision: str | None = None) -> torch.Tensor:
    """Batched matrix product: one launch where the tiny kernels win (m, n, k <= 64), else torch.bmm.

    Args:
        a: [B or 1, M, K], any strides.
        b: [B or 1, K, N], any strides. An operand with batch 1 is shared by the whole batch, without a copy.
        precision: of float32 inputs: "ieee", "tf32" or "tf32x3"; None follows
            torch.backends.cuda.matmul.fp32_precision. On the CPU any is computed as ieee.

    Returns:
        [B, M, N] in the inputs' dtype; sums are float32 for 16-bit inputs.

    Where the tiny kernels serve (a GPU; float32, float16, bfloat16; B > 1), a matrix's bits do not depend on the batch
    around it. `isogemm.dispatch_log` shows which path served a call. Differentiable, twice.
    """
    if not _through_dispatcher(a, b) and a.is_cuda and not torch.is_autocast_enabled("cuda"):
        plan = op.plans.get(op.key("bmm", a, b, precision))  # one that is known was valid
        if plan is not None:
            return _served(plan, a, b, precision)
    _validate(a, b, precision)
    device_type = a.device.type
    autocast = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    if autocast and a.dtype in _SERVED:
        dtype = torch.get_autocast_dtype(device_type)
        precision = precision if dtype is a.dtype else None
        a, b = a.to(dtype), b.to(dtype)
    if not _concerns_tiny(a, b, precision):
        return op.torch_bmm(a, b)
    return _bmm(a, b, precision)


def _bmm(a: torch.Tensor, b: torch.Tensor, precision: str | None) -> torch.Tensor:
    if not is_compiling() and _has_tangents():
        return op.torch_bmm(a, b)
    if _through_dispatcher(a, b):
        return cast(torch.Tensor, torch.ops.isogemm.bmm(a, b, precision))
    return _served(op.plan("bmm", a, b, precision), a, b, precision)


def _served(plan: op.Plan, a: torch.Tensor, b: torch.Tensor, precision: str | None) -> torch.Tensor:
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return cast(torch.Tensor, cast(Any, _Bmm).apply(a, b, op.resolve_precision(a, precision), plan))
    return op.run(plan, a, b)


def _bmm_sum(a: torch.Tensor, b: torch.Tensor, precision: str | None) -> torch.Tensor:
    if _through_dispatcher(a, b):
        return cast(torch.Tensor, torch.ops.isogemm.bmm_sum(a, b, precision))
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return cast(torch.Tensor, cast(Any, _BmmSum).apply(a, b, precision))
    return op.bmm_sum(a, b, precision)


class _Bmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, precision: str | None, plan: op.Plan) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.precision = precision
        return op.run(plan, a, b)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_gradients(ctx, grads[0], _bmm, _bmm_sum), None


class _BmmSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, precision: str | None) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.precision = precision
        return op.bmm_sum(a, b, precision)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gradients(ctx, grads[0], _bmm, _bmm_sum)


def _gradients(
    ctx: Any, grad: torch.Tensor, product: _Product, product_sum: _Product
) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    """dA = dC B^T and dB = A^T dC, of the product and of its sum over the batch alike.

    Transposes are views. An operand with batch 1 in a larger batch takes the sum of its gradients.
    """
    a, b = ctx.saved_tensors

    def multiply(x: torch.Tensor, y: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        summed = of.shape[0] == 1 and (x.shape[0] != 1 or y.shape[0] != 1)
        result = (product_sum if summed else product)(x, y, ctx.precision)
        return result.expand(of.shape)  # of a sum over a shared operand: every matrix has the same gradient

    da = multiply(grad, b.transpose(1, 2), a) if ctx.needs_input_grad[0] else None
    db = multiply(a.transpose(1, 2), grad, b) if ctx.needs_input_grad[1] else None
    return da, db, None


def _register_autograd() -> None:
    """The registered operators' autograd: the same gradients, through the operators."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        a, b, precision = inputs
        ctx.save_for_backward(a, b)
        ctx.precision = op.resolve_precision(a, precision)

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gradients(ctx, grad, torch.ops.isogemm.bmm, torch.ops.isogemm.bmm_sum)

    for name in ("isogemm::bmm", "isogemm::bmm_sum"):
        torch.library.register_autograd(name, backward, setup_context=setup_context)


_register_autograd()


def _validate(a: torch.Tensor, b: torch.Tensor, precision: str | None) -> None:
    require_tensor("a", a, 3, "[B or 1, M, K]")
    require_tensor("b", b, 3, "[B or 1, K, N]")
    require_same("dtype", ("a", "b"), (a.dtype, b.dtype))
    require_same("device", ("a", "b"), (a.device, b.device))
    require_same("K (a is [B, M, K], b is [B, K, N])", ("a", "b"), (a.shape[2], b.shape[1]))
    if a.shape[0] != 1 and b.shape[0] != 1:
        require_same("batch, or one of them batch 1", ("a", "b"), (a.shape[0], b.shape[0]))
    require_precision(precision, a.dtype)


def _concerns_tiny(a: torch.Tensor, b: torch.Tensor, precision: str | None) -> bool:
    """False where torch.bmm serves whatever the gate says, and its own autograd with it."""
    if not a.is_cuda or a.dtype not in _SERVED:
        return False
    a_shape, b_shape = a.shape, b.shape
    return precision is not None or (a_shape[1] <= MAX_SIZE and a_shape[2] <= MAX_SIZE and b_shape[2] <= MAX_SIZE)


def _has_tangents() -> bool:
    """Inside forward-mode AD or a torch.func transform, which torch.bmm knows and a custom operator does not."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _through_dispatcher(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether torch has anything to say to this call that the plain path would not hear."""
    return (
        is_compiling()
        or type(a) not in _PLAIN
        or type(b) not in _PLAIN
        or a.is_nested
        or b.is_nested
        or torch._C._len_torch_dispatch_stack() > 0
        or _has_tangents()
        or a.is_neg()
        or b.is_neg()
        or a.layout is not _STRIDED
        or b.layout is not _STRIDED
    )
