"""`isogemm.rms_norm`, `layer_norm`, `softmax`, `log_softmax` and `embedding`.

In eager mode a known call goes straight to its plan; under torch.compile, fake tensors and dispatch modes calls go
through the registered operators. float64 is torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from isogemm.core import dispatch
from isogemm.core.dispatch import Dispatch
from isogemm.core.eager import NO_TENSOR, KnownCalls, autocast_dtype, is_tracing, through_dispatcher
from isogemm.core.errors import require_same, require_tensor
from isogemm.core.plan import Plan
from isogemm.gemm.autograd import main_grad_of, parameter
from isogemm.gemm.op import ACCEPTED
from isogemm.norm import embedding as embeddings
from isogemm.norm import row_norm as row_norms
from isogemm.norm import softmax as softmaxes

Result = TypeVar("Result")

_known: KnownCalls[Plan] = KnownCalls()  # without gradients and residual
_known_norms: KnownCalls[row_norms.Known] = KnownCalls(is_plan=False)  # all tensors contiguous and aligned
_known_softmaxes: KnownCalls[softmaxes.Known] = KnownCalls(is_plan=False)


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, residual: None = None
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, residual: Tensor
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, offset: float = 0.0, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension: a row's bits depend on the row alone.

    Args:
        x: [..., D], any strides.
        weight: [D]. With a float32 `weight.main_grad` the backward accumulates into that, as in `linear`.
        eps: added to the mean of squares.
        offset: added to weight in fp32: 1.0 for Gemma's norm.
        residual: like x; x + residual is rounded to x's dtype and normalised.

    Returns:
        [..., D] in x's dtype, computed in fp32 and rounded once; with a residual, this and x + residual.

    float32, float16 and bfloat16; float64 is torch's. Under autocast on a GPU the result is float32, as torch's is. The
    weight's gradient is a sum over tokens in chunks, as in docs/contract.md. Differentiable once.
    """
    if has_torch_function(NO_TENSOR) and not is_compiling():
        return _intercepted(rms_norm, x, weight, eps, offset=offset, residual=residual)
    key = ("rms_norm", eps, offset) if weight is not None and residual is None else None
    plan = _known.find(key, (x, weight)) if key is not None and not is_tracing() else None  # type: ignore[arg-type]
    if plan is not None:
        return plan.run((x, None, weight, None, None, None))
    return _row_norm("rms_norm", x, weight, None, eps, offset, residual, key)


@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *, residual: None = None
) -> Tensor: ...
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *, residual: Tensor
) -> tuple[Tensor, Tensor]: ...
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension; as `rms_norm`.

    Args:
        x: [..., D], any strides.
        weight, bias: [D], either, both or none.
        eps: added to the variance.
        residual: like x; x + residual is rounded to x's dtype, normalised, and returned too.
    """
    if has_torch_function(NO_TENSOR) and not is_compiling():
        return _intercepted(layer_norm, x, weight, bias, eps, residual=residual)
    key = ("layer_norm", eps) if weight is not None and bias is not None and residual is None else None
    plan = _known.find(key, (x, weight, bias)) if key is not None and not is_tracing() else None  # type: ignore[arg-type]
    if plan is not None:
        return plan.run((x, None, weight, bias, None, None))
    return _row_norm("layer_norm", x, weight, bias, eps, 0.0, residual, key)


def softmax(x: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> Tensor:
    """torch.softmax: a row's bits depend on the row alone.

    Args:
        x: any shape and strides; rows of any length.
        dim: the dimension along which rows lie. Any but the last costs a copy.
        dtype: of the result and its input, as in torch.softmax; None: x's (under autocast on a GPU, float32).

    float32, float16 and bfloat16, summed in fp32; float64 is torch's. Differentiable once.
    """
    if has_torch_function(NO_TENSOR) and not is_compiling():
        return _intercepted(softmax, x, dim, dtype=dtype)
    key = ("softmax", dim, dtype)
    plan = _known.find(key, (x,)) if not is_tracing() else None
    if plan is not None:
        return plan.run((x,))
    return _softmax(x, dim, dtype, False, key)


def log_softmax(x: Tensor, dim: int = -1, *, dtype: torch.dtype | None = None) -> Tensor:
    """torch.log_softmax: a row's bits depend on the row alone; as `softmax`."""
    if has_torch_function(NO_TENSOR) and not is_compiling():
        return _intercepted(log_softmax, x, dim, dtype=dtype)
    key = ("log_softmax", dim, dtype)
    plan = _known.find(key, (x,)) if not is_tracing() else None
    if plan is not None:
        return plan.run((x,))
    return _softmax(x, dim, dtype, True, key)


def embedding(ids: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """Rows of a weight; its gradient is summed over the tokens in one order, in chunks.

    Args:
        ids: int32 or int64, any shape. On the CPU an id out of range raises; on a GPU it fails an assertion on the
            device, as in torch.
        weight: [V, D]. With a float32 `weight.main_grad` the backward accumulates into that, as in `linear`.
        padding_idx: a row that gets no gradient; negative: counted from the end.

    Returns:
        [*ids.shape, D].

    The gradient of a row depends on the tokens with its id alone: those of each 1024 tokens are added in order from
    zero, and these sums in order, in fp32. So micro-batches of multiples of 1024 tokens, accumulated into a main_grad,
    have the bits of one batch. Differentiable once.
    """
    if has_torch_function(NO_TENSOR) and not is_compiling():
        return _intercepted(embedding, ids, weight, padding_idx=padding_idx)
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids is a {type(ids).__name__}; expected a torch.Tensor of int32 or int64")
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"ids has dtype {ids.dtype}; accepted: torch.int32 and torch.int64")
    require_tensor("weight", weight, 2, "[V, D]")
    _require_dtype("weight", weight)
    require_same("device", ("ids", "weight"), (ids.device, weight.device))
    vocabulary = weight.shape[0]
    if padding_idx is not None and not isinstance(padding_idx, int | torch.SymInt):
        raise TypeError(f"padding_idx is a {type(padding_idx).__name__}; expected an int or None")
    if padding_idx is not None and not -vocabulary <= padding_idx < vocabulary:
        raise ValueError(f"padding_idx is {padding_idx}; the weight has {vocabulary} rows")
    if weight.dtype is torch.float64:
        _record_float64("embedding", weight)
        return functional.embedding(ids, weight, padding_idx)
    padding = -1 if padding_idx is None else padding_idx % vocabulary
    owner = parameter(weight)
    return embeddings.embedding_operator(ids, weight, owner, main_grad_of(owner), padding)


def _intercepted(function: Callable[..., Result], *args: Any, **named: Any) -> Result:
    """Give one call of isogemm, not the torch calls inside, to the torch function mode that is on."""
    return handle_torch_function(function, (), *args, **named)


def _row_norm(
    name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    residual: Tensor | None, key: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    given = [each for each in (x, residual, weight, bias) if each is not None]
    kind = name, eps, offset, residual is None, weight is None, bias is None, torch.is_grad_enabled()
    known = None if is_tracing() else _known_norms.find(kind, given)
    if known is not None and not any(each.data_ptr() & 15 for each in given):
        result = row_norms.run_known(known, x, residual, weight, bias)
        return result[0] if residual is None else result  # type: ignore[return-value]
    _require_rows(x)
    for what, number in (("eps", eps), ("offset", offset)):
        if not isinstance(number, int | float | torch.SymInt | torch.SymFloat):
            raise TypeError(f"{what} is a {type(number).__name__}; expected a number")
    for what, each in (("weight", weight), ("bias", bias)):
        if each is not None:
            require_tensor(what, each, 1, "[D]")
            _require_dtype(what, each)
            require_same("device", (what, "x"), (each.device, x.device))
            require_same("size D (x is [..., D])", (what, "x"), (each.shape[0], x.shape[-1]))
            if (each.dtype is torch.float64) != (x.dtype is torch.float64):
                require_same("dtype, where one is torch.float64", (what, "x"), (each.dtype, x.dtype))
    if residual is not None:
        require_tensor("residual", residual, x.ndim, "like x")
        require_same("shape", ("residual", "x"), (list(residual.shape), list(x.shape)))
        require_same("dtype", ("residual", "x"), (residual.dtype, x.dtype))
        require_same("device", ("residual", "x"), (residual.device, x.device))
    if x.dtype is torch.float64:
        _record_float64(name, x)
        summed = x if residual is None else x + residual
        y = _float64_norm(name, summed, weight, bias, eps, offset)
        return y if residual is None else (y, summed)
    dtype = _result_dtype(x)
    y, summed = row_norms.row_norm(x, residual, weight, bias, name, eps, offset, dtype)
    if _can_be_known(x, *given):
        trained = torch.is_grad_enabled() and any(each.requires_grad for each in given)
        if not trained and key is not None:
            plan = row_norms.plan_of(x, None, weight, bias, None, None, name, eps, offset, dtype)
            _known.keep(key, given, plan)
        elif not any(each.data_ptr() & 15 for each in given):
            known = row_norms.known_call(x, residual, weight, bias, name, eps, offset, dtype, trained)
            _known_norms.keep(kind, given, known)
    return y if residual is None else (y, summed)


def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None, log: bool, key: Any) -> Tensor:
    name = softmaxes.name_of(log)
    known = None if is_tracing() else _known_softmaxes.find((key, torch.is_grad_enabled()), (x,))
    if known is not None and not x.data_ptr() & 15:
        return softmaxes.Eager.apply(x, known)  # type: ignore[no-any-return, no-untyped-call]
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; expected a torch.Tensor")
    if not isinstance(dim, int | torch.SymInt):
        raise TypeError(f"dim is a {type(dim).__name__}; expected an int")
    if not -max(x.ndim, 1) <= dim < max(x.ndim, 1):
        raise ValueError(f"dim is {dim}; x has {x.ndim} dimensions")
    given = x
    if dtype is not None and dtype is not x.dtype:
        if dtype not in ACCEPTED:
            raise ValueError(f"dtype is {dtype}; accepted: {', '.join(map(str, ACCEPTED))}")
        # Widening is exact, in the kernel.
        x = x if dtype is torch.float32 and x.dtype in (torch.float16, torch.bfloat16) else x.to(dtype)
    _require_dtype("x", x)
    if x.dtype is torch.float64:
        _record_float64(name, x)
        return functional.log_softmax(x, dim) if log else functional.softmax(x, dim)
    if x.ndim == 0:
        return _softmax(x[None], 0, dtype, log, None)[0]
    moved = x if dim in (-1, x.ndim - 1) else x.movedim(dim, -1)
    result_dtype = dtype or _result_dtype(x)
    y = softmaxes.softmax_operator(moved, log, result_dtype)
    if moved is given and _can_be_known(given):
        plan = softmaxes.plan_of(given, log, result_dtype)
        if not y.requires_grad:
            _known.keep(key, (given,), plan)
        elif not given.data_ptr() & 15:
            _known_softmaxes.keep((key, True), (given,), softmaxes.Known(plan, log, given.dtype))
    return y if moved is x else y.movedim(-1, dim)


def _result_dtype(x: Tensor) -> torch.dtype:
    """x's dtype, or that of torch's results under autocast, which on a GPU computes norms and softmaxes in float32."""
    return torch.float32 if x.is_cuda and autocast_dtype(x) is not None else x.dtype


def _can_be_known(*tensors: Tensor) -> bool:
    """Whether an eager call on these may go straight to its plan the next time."""
    x = tensors[0]
    if is_compiling() or not x.is_cuda or not x.numel() or autocast_dtype(x) is not None:
        return False
    return all(each.is_contiguous() for each in tensors) and not through_dispatcher(*tensors)


def _require_rows(x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; expected a torch.Tensor [..., D]")
    if x.ndim < 1:
        raise ValueError("x has no dimensions; expected [..., D]")
    _require_dtype("x", x)


def _require_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in ACCEPTED:
        raise TypeError(f"{name} has dtype {x.dtype}; accepted: {', '.join(map(str, ACCEPTED))}")
    if x.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{name} is on {x.device}; accepted: cpu and cuda")


def _float64_norm(
    name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float
) -> Tensor:
    if name == "layer_norm":
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * (offset + weight)


def _record_float64(name: str, x: Tensor) -> None:
    if dispatch.active and not is_compiling():
        dispatch.record(Dispatch(name, "torch", f"{list(x.shape)} float64", "", "float64"))
