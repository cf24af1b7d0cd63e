"""`isogemm.bmm`: autocast, the operator with its gradients, and calls whose plan is known."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function, has_torch_function

from isogemm.core import env
from isogemm.core.device import resolve_precision
from isogemm.core.eager import (
    NO_TENSOR,
    PLAIN,
    KnownCalls,
    autocast_dtype,
    in_transform,
    is_tracing,
    through_dispatcher,
)  # fmt: skip
from isogemm.core.operator import Operator
from isogemm.core.plan import FreedOperandError, Plan
from isogemm.tiny import op
from isogemm.tiny.configs import DTYPES, MAX_SIZE

_SERVED = tuple(getattr(torch, name) for name in DTYPES)


def bmm(a: Tensor, b: Tensor, *, precision: str | None = None) -> Tensor:
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
    if has_torch_function(NO_TENSOR) and not is_compiling():  # `is_intercepted`, without its frame
        return handle_torch_function(bmm, (), a=a, b=b, precision=precision)
    key = plan = None
    try:
        if not (is_tracing() or (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad))):
            key = a.shape, b.shape, a.stride(), precision, env.settings.disable_tiny
    except (AttributeError, RuntimeError):  # no tensors, or without strides
        pass
    if key is not None:
        plan = _known.find(key, (a, b))
    if plan is not None:
        try:
            return plan.run((a, b))
        except (torch.OutOfMemoryError, FreedOperandError):
            raise
        except Exception:  # the call is tried again below, and served by torch if it fails again
            _known.clear()
    if type(a) in PLAIN and a.is_cuda and not (through_dispatcher(a, b) or torch.is_autocast_enabled("cuda")):
        found = op.served.get(op.key(a, b, precision))  # a known call was validated
        if found is not None:
            result = bmm_operator.differentiable(a, b, precision)
            if found.plan is not None and key is not None and not result.requires_grad:
                _known.keep(key, (a, b), found.plan)
            return result
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        a, b, precision = _autocast(a, b, precision)
    op.validate(a, b, precision)
    if not _concerns_tiny(a, b, precision):
        return op.torch_bmm(a, b, precision)
    return _bmm(a, b, precision)


_known: KnownCalls[Plan] = KnownCalls()


def _bmm(a: Tensor, b: Tensor, precision: str | None) -> Tensor:
    if not through_dispatcher(a, b):
        return bmm_operator.differentiable(a, b, precision)
    if not is_compiling() and in_transform(a, b):
        return op.torch_bmm(a, b, precision)
    return cast(Tensor, bmm_operator.op(a, b, precision))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, precision = inputs
    ctx.save_for_backward(a, b)
    ctx.precision = resolve_precision(a, precision)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """dA = dC B^T and dB = A^T dC; transposes are views.

    An operand that the batch shares takes the sum over the batch: by torch.sum, whose order is fixed.
    """
    a, b = ctx.saved_tensors

    def multiply(x: Tensor, y: Tensor, of: Tensor) -> Tensor:
        result = _bmm(x, y, ctx.precision)
        return result if result.shape[0] == of.shape[0] else result.sum(0, keepdim=True)

    da = multiply(grad, b.transpose(1, 2).conj(), a) if ctx.needs_input_grad[0] else None
    db = multiply(a.transpose(1, 2).conj(), grad, b) if ctx.needs_input_grad[1] else None
    return da, db, None


def _fake(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    op.validate(a, b, precision)
    return a.new_empty((b.shape[0] if a.shape[0] == 1 else a.shape[0], a.shape[1], b.shape[2]))


bmm_operator = Operator(
    "bmm(Tensor a, Tensor b, str? precision=None) -> Tensor", op.bmm, _fake, keep=_keep, backward=_gradients
)


def _autocast(a: Tensor, b: Tensor, precision: str | None) -> tuple[Tensor, Tensor, str | None]:
    """Cast the arguments as autocast does for torch.bmm, each operand by itself."""
    dtype = autocast_dtype(a)
    if dtype is None:
        return a, b, precision
    a, b = (x.to(dtype) if x.dtype in _SERVED else x for x in (a, b))
    return a, b, precision if dtype is torch.float32 else None


def _concerns_tiny(a: Tensor, b: Tensor, precision: str | None) -> bool:
    """Whether a tiny kernel may serve; else torch.bmm does, with its own autograd."""
    if not a.is_cuda or a.dtype not in _SERVED:
        return False
    a_shape, b_shape = a.shape, b.shape
    return precision is not None or (a_shape[1] <= MAX_SIZE and a_shape[2] <= MAX_SIZE and b_shape[2] <= MAX_SIZE)
