"""Products and token sums without autograd.

A call's key determines its plan. Finding it is a dictionary look-up; making it (validating, choosing, compiling)
happens once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from isogemm.core import device as devices
from isogemm.core import dispatch, private
from isogemm.core.dispatch import Dispatch
from isogemm.core.errors import require_precision, require_same, require_tensor
from isogemm.core.plan import plans
from isogemm.gemm import configs, cpu, describe
from isogemm.gemm.configs import Config, Problem
from isogemm.gemm.plan import bias_grad_plan, gemm_plan

SERVED = tuple(getattr(torch, name) for name in configs.DTYPES)
ACCEPTED = (*SERVED, torch.float64)


def product(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, precision: str | None) -> Tensor:
    """Multiply [*, M, K] @ [*, K, N] (+ [N]) -> [*, M, N]; the leading sizes are broadcast."""
    bias = None if bias is None else bias.contiguous()
    if not a.is_cuda or a.dtype is torch.float64:
        validate(a, b, bias, out_dtype, precision)
        return _elsewhere("matmul", a, lambda: _product_elsewhere(a, b, bias, out_dtype))
    key = plan_key("matmul", a, b, bias, out_dtype, precision)
    plan = plans.get(key)
    if plan is not None:
        return plan.run((a, b, None, bias))
    validate(a, b, bias, out_dtype, precision)
    return _multiply(key, a, b, bias, out_dtype, precision)


def plan_key(
    name: str, a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, precision: str | None
) -> tuple[Any, ...]:
    """All that a product's plan depends on, including the arguments' validity and what Triton specialises on."""
    return (
        name, a.dtype, b.dtype, a.shape, b.shape, a.stride(), b.stride(), a.data_ptr() & 15, b.data_ptr() & 15,
        a.get_device(), b.get_device(),
        None if bias is None else (bias.dtype, bias.shape, bias.stride(), bias.get_device()), out_dtype,
        devices.resolve_precision(a, precision),
    )  # fmt: skip


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, precision: str | None
) -> Tensor:
    """Multiply [*, K] @ [N, K]^T (+ [N]) -> [*, N]."""
    bias = None if bias is None else bias.contiguous()
    if x.is_cuda:
        key = plan_key("linear", x, weight, bias, out_dtype, precision)
        plan = plans.get(key)
        if plan is not None:
            return plan.run((x, weight, None, bias))
    validate_linear(x, weight, bias, out_dtype, precision)
    if x.ndim == 1:
        return linear(x[None], weight, bias, out_dtype, precision)[0]
    if not x.is_cuda or x.dtype is torch.float64:
        return _elsewhere("matmul", x, lambda: _product_elsewhere(x, weight.mT, bias, out_dtype))
    return _multiply(key, x, weight.mT, bias, out_dtype, precision)


def weight_grad(grad: Tensor, x: Tensor, total: Tensor | None, dtype: torch.dtype, precision: str | None) -> Tensor:
    """Multiply grad [*, N]^T @ x [*, K] -> [N, K], a sum over all tokens in chunks; added to `total` where given."""
    if grad.shape[:-1] != x.shape[:-1]:
        validate_token_sum(grad, x, precision)
    grad, x = describe.by_token(grad, x)
    n, k = grad.shape[-1], x.shape[-1]
    chunk = configs.token_chunk(n, k, describe.dtype_name(x.dtype))
    if not x.is_cuda or x.dtype is torch.float64:
        validate_token_sum(grad, x, precision)
        rows, tokens = describe.flat(grad), describe.flat(x)
        if x.dtype is torch.float64:
            return _elsewhere("weight_grad", x, lambda: _added(rows.mT @ tokens, total))
        return _elsewhere("weight_grad", x, lambda: cpu.weight_grad(rows, tokens, total, dtype, chunk))
    key = *plan_key("weight_grad", grad, x, None, dtype, precision), describe.layout(total)
    plan = plans.get(key)
    if plan is None:
        validate_token_sum(grad, x, precision)
        problem = describe.weight_grad(grad, x, total, dtype, devices.resolve_precision(x, precision), chunk)
        out = torch.empty(n, k, dtype=dtype, device=x.device) if total is None else total
        if problem.k == 0 or out.numel() == 0:
            return out if total is not None else out.zero_()
        plan = plans.keep(key, gemm_plan("weight_grad", (n, k), out.dtype, x.device, problem))
    return plan.run((grad, x), total)


def bias_grad(grad: Tensor, total: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sum grad [*, N] over all tokens in chunks -> [N]; added to `total` where given."""
    grad, _ = describe.by_token(grad, grad)
    n = grad.shape[-1]
    if not grad.is_cuda or grad.dtype is torch.float64:
        rows = describe.flat(grad)
        if grad.dtype is torch.float64:
            return _elsewhere("bias_grad", grad, lambda: _added(rows.sum(0), total))
        return _elsewhere("bias_grad", grad, lambda: cpu.bias_grad(rows, total, dtype, configs.BIAS_CHUNK))
    key = "bias_grad", describe.layout(grad), dtype, describe.layout(total)
    plan = plans.get(key)
    if plan is None:
        if grad.numel() == 0:
            return torch.zeros(n, dtype=dtype, device=grad.device) if total is None else total
        plan = plans.keep(key, bias_grad_plan(describe.bias_grad(grad, total, dtype), grad.device))
    return plan.run((grad,), total)


def gemm(a: Tensor, b: Tensor, *, config: Config | None = None, **how: Any) -> Tensor:
    """Multiply with a given configuration, on a GPU, with at most two batch levels: for tests and `verify`.

    how: as in `problem_of`; a `total` is accumulated into and returned.
    """
    problem = problem_of(a, b, **how)
    shape = (*describe.broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    plan = gemm_plan("matmul", shape, getattr(torch, problem.out_dtype), a.device, problem, config)
    return plan.run((a, b, None, how.get("bias")), how.get("total"))


def problem_of(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    chunk: int | None = 0,
    total: Tensor | None = None,
) -> Problem:
    """Describe the product of these tensors; `chunk` as in `describe.product`; `total`: float32 [M, N] to add to."""
    batch = describe.broadcast(a.shape[:-2], b.shape[:-2])
    a, b = (x.expand(*batch, *x.shape[-2:]) for x in (a, b))
    problem = describe.product(a, b, bias, out_dtype or a.dtype, devices.resolve_precision(a, precision), chunk)
    if problem is None:
        raise ValueError(f"a and b have more than two levels of batch: {list(a.shape)} @ {list(b.shape)}")
    if total is None:
        return problem
    strides, aligned = (total.stride(0), total.stride(1)), describe.aligned(total)
    return replace(problem, accumulate=True, out_dtype="float32", c_strides=strides, c_aligned=aligned)


def require_total(name: str, total: Tensor, shape: Sequence[int], device: torch.device) -> None:
    """Raise unless gradients can be accumulated into `total`: float32, of the parameter's shape."""
    if not isinstance(total, Tensor):
        raise TypeError(f"{name} is a {type(total).__name__}; expected a torch.Tensor")
    if total.dtype is not torch.float32:
        raise TypeError(f"{name} has dtype {total.dtype}; expected torch.float32")
    if tuple(total.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(total.shape)}; expected {list(shape)}")
    require_same("device", (name, "the gradient"), (total.device, device))


def accumulates(parameter: Tensor) -> bool:
    """Whether the running backward accumulates the gradient of a leaf; raises where torch.autograd.grad returns it.

    It asks for the leaf's own node, since under autocast a cast lies between the leaf and the product.
    """
    return _will_execute is None or bool(_will_execute(get_gradient_edge(parameter).node))


def has_hooks(parameter: Tensor) -> bool:
    """Whether the parameter has tensor hooks, which see its gradient and may change it."""
    return bool(getattr(parameter, "_backward_hooks", None))


_will_execute = private.find("torch._C:_will_engine_execute_node")
_graph_task = private.find("torch._C:_current_graph_task_id")
_CAN_ASK = _graph_task is not None and not private.missing(private.EPILOGUES)


def is_added(name: str, owner: Tensor) -> bool:
    """In an operator: whether to add to the owner's main_grad. A compiled backward adds for every parameter it has."""
    if has_hooks(owner):
        raise RuntimeError(
            f"{name} has a main_grad and a hook, which would see no gradient: it was compiled to be added to that. "
            "Remove the hook, or compile without the main_grad"
        )
    if not _CAN_ASK or _graph_task() < 0:  # called by the user, outside of a backward
        return True
    with private.autograd_below_dispatcher():
        try:
            return accumulates(owner)
        except RuntimeError:
            raise RuntimeError(
                f"torch.autograd.grad cannot return the gradient of {name}, which has a main_grad: it was compiled to "
                "be added to that. Call backward, or compile without the main_grad"
            ) from None


def validate(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, precision: str | None) -> None:
    """Raise where an argument of `product` does not fit."""
    require_operands(("a", a), ("b", b), out_dtype, precision)
    require_same("K (a is [..., M, K], b is [..., K, N])", ("a", "b"), (a.shape[-1], b.shape[-2]))
    try:
        describe.broadcast(a.shape[:-2], b.shape[:-2])
    except RuntimeError as error:
        raise ValueError(f"a has shape {list(a.shape)}, b {list(b.shape)}: leading sizes do not broadcast") from error
    require_bias(bias, a, b.shape[-1])


def validate_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, precision: str | None
) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}; expected a torch.Tensor [..., K]")
    require_tensor("weight", weight, 2, "[N, K]")
    if x.ndim < 1:
        raise ValueError("x has no dimensions; expected [..., K]")
    require_operands(("x", x), ("weight", weight), out_dtype, precision)
    require_same("K (x is [..., K], weight is [N, K])", ("x", "weight"), (x.shape[-1], weight.shape[-1]))
    require_bias(bias, x, weight.shape[0])


def validate_token_sum(grad: Tensor, x: Tensor, precision: str | None) -> None:
    """Raise where an argument of `weight_grad` does not fit."""
    require_operands(("grad", grad), ("x", x), None, precision)
    require_same("tokens (grad is [..., N], x is [..., K])", ("grad", "x"), (grad.shape[:-1], x.shape[:-1]))


def require_operands(
    left: tuple[str, Tensor], right: tuple[str, Tensor], out_dtype: torch.dtype | None, precision: str | None
) -> None:
    names, (a, b) = (left[0], right[0]), (left[1], right[1])
    for name, x in (left, right):
        if x.dtype not in ACCEPTED:
            raise TypeError(f"{name} has dtype {x.dtype}; accepted: {', '.join(map(str, ACCEPTED))}")
    require_same("dtype", names, (a.dtype, b.dtype))
    require_same("device", names, (a.device, b.device))
    if a.device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"{names[0]} is on {a.device}; accepted: cpu and cuda")
    require_precision(precision, a.dtype)
    require_out_dtype(out_dtype, a.dtype)


def require_some_out_dtype(out_dtype: torch.dtype | None) -> None:
    """Raise unless inputs of some dtype can have this out_dtype; which dtype may not be known yet."""
    if out_dtype is not None and out_dtype not in ACCEPTED:
        raise ValueError(f"out_dtype is {out_dtype!r}; accepted: {', '.join(map(str, ACCEPTED))}")


def require_out_dtype(out_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    if out_dtype is not None and out_dtype is not dtype and (out_dtype is not torch.float32 or dtype.itemsize != 2):
        raise ValueError(
            f"out_dtype is {out_dtype}; accepted for {dtype} inputs: {dtype}"
            + " or torch.float32" * (dtype.itemsize == 2)
        )


def require_bias(bias: Tensor | None, like: Tensor, n: int, name: str = "bias") -> None:
    if bias is None:
        return
    require_tensor(name, bias, 1, "[N]")
    require_same("dtype", (name, "the inputs"), (bias.dtype, like.dtype))
    require_same("device", (name, "the inputs"), (bias.device, like.device))
    if bias.shape[0] != n:
        raise ValueError(f"{name} has shape {list(bias.shape)}; expected [{n}]")


def _multiply(
    key: tuple[Any, ...],
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    precision: str | None,
) -> Tensor:
    """Multiply where no plan is known yet, or several plans are needed."""
    precision = devices.resolve_precision(a, precision)
    shape = (*describe.broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    dtype = out_dtype or a.dtype
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=a.device)
    if a.shape[-1] == 0:
        empty = torch.zeros(shape, dtype=dtype, device=a.device)
        return empty if bias is None else empty.copy_(bias)
    a, b = (x.expand(*shape[:-2], *x.shape[-2:]) for x in (a, b))
    problem = describe.product(a, b, bias, dtype, precision)
    if problem is not None:
        plan = plans.keep(key, gemm_plan("matmul", shape, dtype, a.device, problem))
        return plan.run((a, b, None, bias))
    out = torch.empty(shape, dtype=dtype, device=a.device)
    _multiply_into(out, a, b, bias, precision)
    return out


def _multiply_into(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, precision: str | None) -> None:
    """Multiply with more than two batch levels: a launch for each index of the outer ones."""
    key = *plan_key("into", a, b, bias, out.dtype, precision), describe.aligned(out)
    plan = plans.get(key)
    if plan is None:
        problem = describe.product(a, b, bias, out.dtype, precision)
        if problem is None:
            for places in zip(out, a, b, strict=True):
                _multiply_into(*places, bias, precision)
            return
        problem = replace(problem, c_aligned=describe.aligned(out))
        plan = plans.keep(key, gemm_plan("matmul", out.shape, out.dtype, a.device, problem))
    plan.run((a, b, None, bias), out)


# Where no kernel of isogemm serves: the CPU backend, and torch for float64.


def _elsewhere(name: str, x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    result = compute()
    record_elsewhere(name, x)
    return result


def record_elsewhere(name: str, x: Tensor, config: str = "") -> None:
    """Record a call on x that no single kernel of isogemm serves."""
    if dispatch.active:
        path, reason = "cpu", "not on a GPU"
        if x.is_cuda or x.dtype is torch.float64:
            path = "torch"
            reason = "float64" if x.dtype is torch.float64 else "torch's own operations follow the product"
        problem = f"{list(x.shape)} {describe.dtype_name(x.dtype)}"
        dispatch.record(Dispatch(name, path, problem, config, reason))


def _product_elsewhere(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    if a.dtype is not torch.float64:
        return cpu.product(a, b, bias, out_dtype or a.dtype)
    result = torch.matmul(a, b).contiguous()  # torch folds [M, K] @ [B, K, N] into one product, transposed
    return result if bias is None else result.add_(bias)


def _added(result: Tensor, total: Tensor | None) -> Tensor:
    return result if total is None else total.add_(result)
