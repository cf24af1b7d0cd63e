"""`isogemm.bmm`: autocast, autograd and the way to the plan.

In eager mode a call goes straight to its plan (no dispatcher hop); under torch.compile, fake tensors and dispatch modes
it goes through the registered operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function

from isogemm.core.eager import PLAIN, autocast_dtype, in_transform, is_intercepted, through_dispatcher
from isogemm.tiny import op
from isogemm.tiny.configs import DTYPES, MAX_SIZE

_SERVED = tuple(getattr(torch, name) for name in DTYPES)

_Product = Callable[[torch.Tensor, torch.Tensor, str | None], torch.Tensor]


def bmm(a: torch.Tensor, b: torch.Tensor, *, precision: str | None = None) -> torch.Tensor:
    """Batched matrix product: one launch where the tiny kernels win (m, n, k <= 64), else torch.bmm.

    Args:
        a: [B or 1, M, K], any strides.
        b: [B or 1, K, N], any strides. An operand with batch 1 is shared by the whole batch, without a copy.
        precision: of float32 inputs: "ieee", "tf32" or "tf32x3"; None follows
            torch.backends.cuda.matmul.fp32_precision. On the CPU torch.bmm computes it, as torch is set to.

    Returns:
        [B, M, N] in the inputs' dtype; sums are float32 for 16-bit inputs.

    Where the tiny kernels serve (a GPU; float32, float16, bfloat16; B > 1), a matrix's bits do not depend on the batch
    around it. `isogemm.dispatch_log` shows which path served a call. Differentiable, twice.
    """
    if is_intercepted():
        return handle_torch_function(bmm, (), **locals())
    if type(a) in PLAIN and a.is_cuda and not (through_dispatcher(a, b) or torch.is_autocast_enabled("cuda")):
        plan = op.plans.get(op.key(a, b, precision))  # one that is known was valid
        if plan is not None:
            return _served(plan, a, b, precision)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        a, b, precision = _autocast(a, b, precision)
    op.validate(a, b, precision)
    if not _concerns_tiny(a, b, precision):
        return op.torch_bmm(a, b, precision)
    return _bmm(a, b, precision)


def _bmm(a: torch.Tensor, b: torch.Tensor, precision: str | None) -> torch.Tensor:
    if not is_compiling() and in_transform(a, b):
        return op.torch_bmm(a, b, precision)
    if through_dispatcher(a, b):
        return cast(torch.Tensor, torch.ops.isogemm.bmm(a, b, precision))
    return _served(op.plan(a, b, precision), a, b, precision)


def _served(plan: op.Plan, a: torch.Tensor, b: torch.Tensor, precision: str | None) -> torch.Tensor:
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return cast(torch.Tensor, cast(Any, _Bmm).apply(a, b, op.resolve_precision(a, precision), plan))
    return op.run(plan, a, b)


class _Bmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, precision: str | None, plan: op.Plan) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.precision = precision
        return op.run(plan, a, b)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_gradients(ctx, grads[0], _bmm), None


def _gradients(
    ctx: Any, grad: torch.Tensor, product: _Product
) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    """dA = dC B^T and dB = A^T dC; transposes are views.

    An operand that the batch shares takes the sum over the batch: by torch.sum, whose order is fixed.
    """
    a, b = ctx.saved_tensors

    def multiply(x: torch.Tensor, y: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        result = product(x, y, ctx.precision)
        return result if result.shape[0] == of.shape[0] else result.sum(0, keepdim=True)

    da = multiply(grad, b.transpose(1, 2).conj(), a) if ctx.needs_input_grad[0] else None
    db = multiply(a.transpose(1, 2).conj(), grad, b) if ctx.needs_input_grad[1] else None
    return da, db, None


def _register_autograd() -> None:
    """The registered operator's autograd: the same gradients, through the operator."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        a, b, precision = inputs
        ctx.save_for_backward(a, b)
        ctx.precision = op.resolve_precision(a, precision)

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gradients(ctx, grad, torch.ops.isogemm.bmm)

    torch.library.register_autograd("isogemm::bmm", backward, setup_context=setup_context)


_register_autograd()


def _autocast(a: torch.Tensor, b: torch.Tensor, precision: str | None) -> tuple[torch.Tensor, torch.Tensor, str | None]:
    """What autocast makes of torch.bmm's arguments: each operand in its own turn."""
    dtype = autocast_dtype(a)
    if dtype is None:
        return a, b, precision
    a, b = (x.to(dtype) if x.dtype in _SERVED else x for x in (a, b))
    return a, b, precision if dtype is torch.float32 else None


def _concerns_tiny(a: torch.Tensor, b: torch.Tensor, precision: str | None) -> bool:
    """False where torch.bmm serves whatever the gate says, and its own autograd with it."""
    if not a.is_cuda or a.dtype not in _SERVED:
        return False
    a_shape, b_shape = a.shape, b.shape
    return precision is not None or (a_shape[1] <= MAX_SIZE and a_shape[2] <= MAX_SIZE and b_shape[2] <= MAX_SIZE)
