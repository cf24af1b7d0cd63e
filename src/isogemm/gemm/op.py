"""Products and token sums without autograd: from tensors to a plan, from a plan to its launch.

A plan is everything about a call that its key determines: the problem, the configuration, the compiled kernel and its
arguments. Finding it is a dictionary look-up; making it (validating, choosing, compiling) happens once.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from isogemm.core import device as devices
from isogemm.core import dispatch
from isogemm.core.dispatch import Dispatch
from isogemm.core.errors import require_precision, require_same, require_tensor
from isogemm.gemm import configs, cpu
from isogemm.gemm.configs import BiasGradProblem, Config, Problem

if TYPE_CHECKING:
    from isogemm.core.launch import BoundKernel
    from isogemm.gemm.kernels import Launch

_MOST_PLANS = 8192  # a serving process sees many numbers of tokens; past this the plans are made again

SERVED = tuple(getattr(torch, name) for name in configs.DTYPES)
ACCEPTED = (*SERVED, torch.float64)

Describer = Callable[[int], Sequence[Any]]  # from an address to a kernel's arguments for it


_NOTHING = 5  # the place of an argument that a launch has no use for


@dataclass(frozen=True, slots=True)
class Step:
    """One launch. Its addresses are picked from a, b, out, bias, scratch memory and nothing, in this order."""

    kernel: BoundKernel
    programs: int
    pick: Callable[[tuple[int | None, ...]], tuple[int | None, ...]]
    describers: tuple[Describer | None, ...]  # of each address; empty where none is described
    scalars: tuple[int | None, ...]

    def run(self, index: int, addresses: tuple[int | None, ...]) -> None:
        picked = self.pick(addresses)
        if not self.describers:
            self.kernel(index, self.programs, *picked, *self.scalars)
            return
        args: list[Any] = []
        for address, describe in zip(picked, self.describers, strict=True):
            if describe is None:
                args.append(address)
            else:
                args += describe(address)  # type: ignore[arg-type]  # what is described has an address
        self.kernel(index, self.programs, *args, *self.scalars)


@dataclass(frozen=True, slots=True)
class Plan:
    dispatch: Dispatch
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    index: int
    scratch: int  # fp32 elements
    steps: tuple[Step, ...]

    def run(
        self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, total: torch.Tensor | None
    ) -> torch.Tensor:
        """Into `total` where it is given, else into new memory."""
        out = (
            torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
            if total is None
            else total
        )
        scratch = torch.empty(self.scratch, dtype=torch.float32, device=self.device) if self.scratch else None
        addresses = (
            a.data_ptr(),
            b.data_ptr(),
            out.data_ptr(),
            None if bias is None else bias.data_ptr(),
            None if scratch is None else scratch.data_ptr(),
            None,
        )
        if self.index == torch.cuda.current_device():
            for step in self.steps:
                step.run(self.index, addresses)
        else:
            with torch.cuda.device(self.index):
                for step in self.steps:
                    step.run(self.index, addresses)
        if dispatch.active:
            dispatch.record(self.dispatch)
        return out


plans: dict[tuple[Any, ...], Plan] = {}


def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None, precision: str | None
) -> torch.Tensor:
    """[*, M, K] @ [*, K, N] (+ [N]) -> [*, M, N]; the leading sizes are broadcast."""
    bias = None if bias is None else bias.contiguous()
    if not a.is_cuda or a.dtype is torch.float64:
        validate(a, b, bias, out_dtype, precision)
        return _elsewhere("matmul", a, lambda: _product_elsewhere(a, b, bias, out_dtype))
    precision = resolve_precision(a, precision)
    key = (
        a.dtype, b.dtype, a.shape, b.shape, a.stride(), b.stride(), a.data_ptr() & 15, b.data_ptr() & 15,
        a.get_device(), b.get_device(), bias_key(bias), out_dtype, precision,
    )  # fmt: skip
    plan = plans.get(key)
    if plan is not None:
        return plan.run(a, b, bias, None)
    validate(a, b, bias, out_dtype, precision)
    return _multiply(key, a, b, bias, out_dtype, precision)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    precision: str | None,
) -> torch.Tensor:
    """[*, K] @ [N, K]^T (+ [N]) -> [*, N]."""
    bias = None if bias is None else bias.contiguous()
    if x.is_cuda:
        key = linear_key(x, weight, bias, out_dtype, precision)
        plan = plans.get(key)
        if plan is not None:
            return plan.run(x, weight, bias, None)
    validate_linear(x, weight, bias, out_dtype, precision)
    if x.ndim == 1:
        return linear(x[None], weight, bias, out_dtype, precision)[0]
    if not x.is_cuda or x.dtype is torch.float64:
        return _elsewhere("matmul", x, lambda: _product_elsewhere(x, weight.mT, bias, out_dtype))
    return _multiply(key, x, weight.mT, bias, out_dtype, resolve_precision(x, precision))


def linear_key(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    precision: str | None,
) -> tuple[Any, ...]:
    """All that a plan depends on: the arguments' validity and Triton's specialisation of them included."""
    return (
        x.dtype, weight.dtype, x.shape, weight.shape, x.stride(), weight.stride(), x.data_ptr() & 15,
        weight.data_ptr() & 15, x.get_device(), weight.get_device(), bias_key(bias), out_dtype,
        resolve_precision(x, precision), True,
    )  # fmt: skip


def bias_key(bias: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if bias is None else (bias.dtype, bias.shape, bias.stride(), bias.get_device())


def weight_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    total: torch.Tensor | None,
    dtype: torch.dtype,
    precision: str | None,
) -> torch.Tensor:
    """grad [*, N], x [*, K]: their [N, K] product over all tokens, chunk by chunk; added to `total` where given."""
    grad, x = _by_token(grad, x)
    n, k = grad.shape[-1], x.shape[-1]
    chunk = configs.token_chunk(n, k, _name(x.dtype))
    if not x.is_cuda or x.dtype is torch.float64:
        rows, tokens = _flat(grad), _flat(x)
        if x.dtype is torch.float64:
            return _elsewhere("weight_grad", x, lambda: _added(rows.mT @ tokens, total))
        return _elsewhere("weight_grad", x, lambda: cpu.weight_grad(rows, tokens, total, dtype, chunk))
    precision = resolve_precision(x, precision)
    key = (
        "weight_grad", x.dtype, grad.shape, x.shape, grad.stride(), x.stride(), grad.data_ptr() & 15, x.data_ptr() & 15,
        x.get_device(), dtype, precision, None if total is None else (total.stride(), total.data_ptr() & 15),
    )  # fmt: skip
    plan = plans.get(key)
    if plan is None:
        problem = _token_problem(grad, x, total, dtype, precision, chunk)
        out = torch.empty(n, k, dtype=dtype, device=x.device) if total is None else total
        if _is_empty(problem, out):
            return out if total is not None else out.zero_()
        plan = _keep(key, _gemm_plan("weight_grad", (n, k), out.dtype, x.device, problem, configs.choose(problem)))
    return plan.run(grad, x, None, total)


def bias_grad(grad: torch.Tensor, total: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """grad [*, N]: its [N] sum over all tokens, chunk by chunk; added to `total` where given."""
    grad, _ = _by_token(grad, grad)
    n = grad.shape[-1]
    chunk = configs.BIAS_CHUNK
    if not grad.is_cuda or grad.dtype is torch.float64:
        rows = _flat(grad)
        if grad.dtype is torch.float64:
            return _elsewhere("bias_grad", grad, lambda: _added(rows.sum(0), total))
        return _elsewhere("bias_grad", grad, lambda: cpu.bias_grad(rows, total, dtype, chunk))
    key = (
        "bias_grad", grad.dtype, grad.shape, grad.stride(), grad.data_ptr() & 15, grad.get_device(), dtype,
        None if total is None else (total.stride(), total.data_ptr() & 15),
    )  # fmt: skip
    plan = plans.get(key)
    if plan is None:
        levels = _levels(grad.shape[:-1], grad.stride()[:-1])
        if grad.numel() == 0:
            return torch.zeros(n, dtype=dtype, device=grad.device) if total is None else total
        (t, t_stride), outer = levels[-1] if levels else (1, n), levels[0][1] if len(levels) > 1 else 0
        problem = BiasGradProblem(
            t=grad.numel() // n, n=n, dtype=_name(grad.dtype), out_dtype=_name(dtype if total is None else total.dtype),
            strides=(t_stride, grad.stride(-1)), chunk=chunk, t_inner=t if len(levels) > 1 else 0, t_outer=outer,
            out_stride=1 if total is None else total.stride(0), accumulate=total is not None, aligned=aligned(grad),
            out_aligned=total is None or aligned(total), arch=devices.facts(grad.device).arch,
        )  # fmt: skip
        plan = _keep(key, _bias_grad_plan(problem, grad.device))
    return plan.run(grad, grad, None, total)


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    chunk: int = 0,
    total: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """One product by a configuration of the caller's, on a GPU, of at most two batch levels: for tests and `verify`.

    `chunk` as in Problem; `total`: float32 [M, N], accumulated into and returned.
    """
    problem = describe(a, b, bias=bias, out_dtype=out_dtype, precision=precision, chunk=chunk, total=total)
    config = configs.choose(problem) if config is None else config
    if reason := configs.illegal(problem, config):
        raise ValueError(f"config {config} for problem {problem}: {reason}")
    shape = (*_broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    dtype = getattr(torch, problem.out_dtype)
    return _gemm_plan("matmul", shape, dtype, a.device, problem, config).run(a, b, bias, total)


def describe(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    chunk: int = 0,
    total: torch.Tensor | None = None,
) -> Problem:
    """The problem of multiplying these tensors."""
    batch = _broadcast(a.shape[:-2], b.shape[:-2])
    a, b = (x.expand(*batch, *x.shape[-2:]) for x in (a, b))
    problem = _problem(a, b, bias, out_dtype or a.dtype, resolve_precision(a, precision), chunk)
    if problem is None:
        raise ValueError(f"a and b have more than two levels of batch: {list(a.shape)} @ {list(b.shape)}")
    if total is None:
        return problem
    return replace(
        problem, accumulate=True, out_dtype="float32", c_strides=_pair(total.stride()), c_aligned=aligned(total)
    )


def resolve_precision(a: torch.Tensor, precision: str | None) -> str | None:
    """None becomes torch's setting of this moment, where it matters: float32 on a GPU."""
    if precision is None and a.dtype is torch.float32 and a.is_cuda:
        return devices.matmul_precision()
    return precision


def compiled() -> int:
    """How many kernels are ready to launch."""
    return len(_bound)


def plan_for(problem: Problem, config: Config, device: torch.device) -> Plan:
    """The plan of a problem without a batch, from its description alone: what is not compiled yet is compiled."""
    return _gemm_plan("matmul", (problem.m, problem.n), getattr(torch, problem.out_dtype), device, problem, config)


def prepare_bias_grad(problem: BiasGradProblem, device: torch.device) -> None:
    _bias_grad_plan(problem, device)


def require_total(name: str, total: torch.Tensor, shape: Sequence[int], device: torch.device) -> None:
    """What gradients are accumulated into: float32, of the parameter's shape."""
    if not isinstance(total, torch.Tensor):
        raise TypeError(f"{name} is a {type(total).__name__}; expected a torch.Tensor")
    if total.dtype is not torch.float32:
        raise TypeError(f"{name} has dtype {total.dtype}; expected torch.float32")
    if tuple(total.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(total.shape)}; expected {list(shape)}")
    require_same("device", (name, "the gradient"), (total.device, device))


def validate(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None, precision: str | None
) -> None:
    """Of product's arguments."""
    _require_operands(("a", a), ("b", b), out_dtype, precision)
    require_same("K (a is [..., M, K], b is [..., K, N])", ("a", "b"), (a.shape[-1], b.shape[-2]))
    try:
        _broadcast(a.shape[:-2], b.shape[:-2])
    except RuntimeError as error:
        raise ValueError(f"a has shape {list(a.shape)}, b {list(b.shape)}: leading sizes do not broadcast") from error
    _require_bias(bias, a, b.shape[-1])


def validate_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    precision: str | None,
) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}; expected a torch.Tensor [..., K]")
    require_tensor("weight", weight, 2, "[N, K]")
    if x.ndim < 1:
        raise ValueError("x has no dimensions; expected [..., K]")
    _require_operands(("x", x), ("weight", weight), out_dtype, precision)
    require_same("K (x is [..., K], weight is [N, K])", ("x", "weight"), (x.shape[-1], weight.shape[-1]))
    _require_bias(bias, x, weight.shape[0])


def validate_token_sum(grad: torch.Tensor, x: torch.Tensor, precision: str | None) -> None:
    """Of weight_grad's arguments."""
    _require_operands(("grad", grad), ("x", x), None, precision)
    require_same("tokens (grad is [..., N], x is [..., K])", ("grad", "x"), (grad.shape[:-1], x.shape[:-1]))


def _require_operands(
    left: tuple[str, torch.Tensor],
    right: tuple[str, torch.Tensor],
    out_dtype: torch.dtype | None,
    precision: str | None,
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
    if out_dtype is not None and out_dtype is not a.dtype and (out_dtype is not torch.float32 or a.dtype.itemsize != 2):
        raise ValueError(
            f"out_dtype is {out_dtype}; accepted for {a.dtype} inputs: {a.dtype}"
            + " or torch.float32" * (a.dtype.itemsize == 2)
        )


def _require_bias(bias: torch.Tensor | None, like: torch.Tensor, n: int) -> None:
    if bias is None:
        return
    require_tensor("bias", bias, 1, "[N]")
    require_same("dtype", ("bias", "the inputs"), (bias.dtype, like.dtype))
    require_same("device", ("bias", "the inputs"), (bias.device, like.device))
    if bias.shape[0] != n:
        raise ValueError(f"bias has shape {list(bias.shape)}; expected [{n}]")


# from tensors to problems


def _multiply(
    key: tuple[Any, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    precision: str | None,
) -> torch.Tensor:
    """A product whose plan is not known yet, or has more than one."""
    shape = (*_broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    dtype = out_dtype or a.dtype
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=a.device)
    if a.shape[-1] == 0:
        empty = torch.zeros(shape, dtype=dtype, device=a.device)
        return empty if bias is None else empty.copy_(bias)
    a, b = (x.expand(*shape[:-2], *x.shape[-2:]) for x in (a, b))
    problem = _problem(a, b, bias, dtype, precision, _walk_chunk(a, dtype))
    if problem is not None:
        plan = _keep(key, _gemm_plan("matmul", shape, dtype, a.device, problem, configs.choose(problem)))
        return plan.run(a, b, bias, None)
    out = torch.empty(shape, dtype=dtype, device=a.device)
    _multiply_into(out, a, b, bias, precision)
    return out


def _multiply_into(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, precision: str | None
) -> None:
    """More than two levels of batch: a launch for each place in the outer ones."""
    key = (
        "into", a.dtype, out.dtype, a.shape, b.shape, a.stride(), b.stride(), a.data_ptr() & 15, b.data_ptr() & 15,
        out.data_ptr() & 15, a.get_device(), bias_key(bias), precision,
    )  # fmt: skip
    plan = plans.get(key)
    if plan is None:
        problem = _problem(a, b, bias, out.dtype, precision, _walk_chunk(a, out.dtype))
        if problem is None:
            for places in zip(out, a, b, strict=True):
                _multiply_into(*places, bias, precision)
            return
        problem = replace(problem, c_aligned=aligned(out))
        plan = _keep(key, _gemm_plan("matmul", out.shape, out.dtype, a.device, problem, configs.choose(problem)))
    plan.run(a, b, bias, out)


def _problem(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    precision: str | None,
    chunk: int,
) -> Problem | None:
    """Of [*, M, K] @ [*, K, N] with the same leading sizes; None where those have more than two levels."""
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    (am, ak), (bk, bn) = a.stride()[-2:], b.stride()[-2:]
    levels = _levels(a.shape[:-2], a.stride()[:-2], b.stride()[:-2])
    while levels and levels[-1][2] == 0 and (m == 1 or levels[-1][1] == m * am):  # rows of one matrix, all of them
        size, stride, _ = levels.pop()
        m, am = m * size, stride if m == 1 else am
    if len(levels) > 2:
        return None
    batch, (inner, a_inner, b_inner) = math.prod(size for size, *_ in levels), levels[-1] if levels else (1, 0, 0)
    _, a_outer, b_outer = levels[0] if len(levels) == 2 else (1, 0, 0)
    facts = devices.facts(a.device)
    return Problem(
        m=m, n=n, k=k, dtype=_name(a.dtype), out_dtype=_name(out_dtype), precision=precision or "ieee",
        a_strides=_matrix_strides((m, k), (am, ak)), b_strides=_matrix_strides((n, k), (bn, bk))[::-1],
        c_strides=(n, 1),
        a_aligned=aligned(a), b_aligned=aligned(b), batch=batch, batch_inner=inner,
        a_batch_strides=(a_outer, a_inner), b_batch_strides=(b_outer, b_inner),
        chunk=chunk, bias=bias is not None, tma=_tma(), arch=facts.arch, sm_count=facts.sm_count,
    )  # fmt: skip


def _token_problem(
    grad: torch.Tensor,
    x: torch.Tensor,
    total: torch.Tensor | None,
    dtype: torch.dtype,
    precision: str | None,
    chunk: int,
) -> Problem:
    """Of grad^T x, whose k are the tokens; `_by_token` has seen to it that these have one level or two."""
    n, k = grad.shape[-1], x.shape[-1]
    levels = _levels(grad.shape[:-1], grad.stride()[:-1], x.stride()[:-1]) or [(1, n, k)]
    inner, g_token, x_token = levels[-1]
    _, g_outer, x_outer = levels[0] if len(levels) == 2 else (1, 0, 0)
    tokens = math.prod(grad.shape[:-1])
    facts = devices.facts(x.device)
    return Problem(
        m=n, n=k, k=tokens, dtype=_name(x.dtype), out_dtype=_name(dtype if total is None else torch.float32),
        precision=precision or "ieee", a_strides=_matrix_strides((tokens, n), (g_token, grad.stride(-1)))[::-1],
        b_strides=_matrix_strides((tokens, k), (x_token, x.stride(-1))),
        c_strides=(k, 1) if total is None else _pair(total.stride()),
        a_aligned=aligned(grad), b_aligned=aligned(x), c_aligned=total is None or aligned(total),
        k_inner=inner if len(levels) == 2 else 0, k_outer_strides=(g_outer, x_outer),
        chunk=chunk, accumulate=total is not None, tma=_tma(), arch=facts.arch, sm_count=facts.sm_count,
    )  # fmt: skip


def _by_token(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same tensors, made contiguous if their leading sizes have more than the two levels a kernel walks."""
    if grad.ndim > 3 and len(_levels(grad.shape[:-1], grad.stride()[:-1], x.stride()[:-1])) > 2:
        return grad.contiguous(), x.contiguous()
    return grad, x


def _broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _flat(x: torch.Tensor) -> torch.Tensor:
    """[*, N] as [tokens, N], empty sizes too."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _levels(sizes: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """(size, stride, stride, ...) of leading dimensions, outermost first, merged where every tensor allows it."""
    levels: list[tuple[int, ...]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if levels and all(outer == size * step for outer, step in zip(levels[-1][1:], steps, strict=True)):
            levels[-1] = (levels[-1][0] * size, *steps)
        else:
            levels.append((size, *steps))
    return levels


def _matrix_strides(sizes: tuple[int, int], strides: tuple[int, int]) -> tuple[int, int]:
    """Of (rows, columns), with those of sizes of 1, which torch leaves open, as in a contiguous matrix."""
    (rows, columns), (row, column) = sizes, strides
    if columns == 1:
        column = 1 if row != 1 else rows
    if rows == 1:
        row = columns if column == 1 else 1
    return row, column


def _pair(values: Sequence[int]) -> tuple[int, int]:
    first, second = values
    return first, second


def aligned(x: torch.Tensor) -> bool:
    """To 16 bytes, as TMA and wide loads need."""
    return x.data_ptr() % 16 == 0


def _walk_chunk(a: torch.Tensor, out_dtype: torch.dtype) -> int:
    return configs.walk_chunk(a.shape[-1], _name(a.dtype), _name(out_dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tma() -> bool:
    from isogemm.core.launch import descriptors_usable

    return descriptors_usable()


def _is_empty(problem: Problem, out: torch.Tensor) -> bool:
    return problem.k == 0 or out.numel() == 0


# from problems to plans


def _keep(key: tuple[Any, ...], plan: Plan) -> Plan:
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


def _gemm_plan(
    name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, problem: Problem, config: Config
) -> Plan:
    from isogemm.gemm import kernels

    if reason := configs.usable(problem.arch):
        raise RuntimeError(f"isogemm.{name} {problem}: {reason}")
    walk = configs.walk(problem, config)
    operand = getattr(torch, problem.dtype)
    launch = kernels.describe_gemm(problem, config)
    sums = torch.float32
    a, b = ((operand, problem.a_aligned), 0), ((operand, problem.b_aligned), 1)
    left, right = (b, a) if config.swapped else (a, b)
    out = ((sums, True), 4) if walk == "partials" else ((dtype, problem.c_aligned), 2)
    bias = ((operand, False), 3) if launch.constants["BIAS"] else None
    scratch = ((sums, True), 4) if walk == "scratch" else None
    rest = () if config.kernel == "stream" else (right if config.rest_n else None,)
    steps = [_step(launch, (left, right, *rest, out, bias, scratch), device)]
    if walk == "partials":
        adding = kernels.describe_add_partials(problem)
        bias = ((operand, False), 3) if problem.bias else None
        steps.append(_step(adding, (((sums, True), 4), ((dtype, problem.c_aligned), 2), bias), device))
    scratch_elements = configs.workspace(problem, config) // 4
    served = Dispatch(name, "gemm", str(problem), str(config), "")
    return Plan(served, *_contiguous(shape), dtype, device, _index(device), scratch_elements, tuple(steps))


def _bias_grad_plan(problem: BiasGradProblem, device: torch.device) -> Plan:
    from isogemm.gemm import kernels

    if reason := configs.usable(problem.arch):
        raise RuntimeError(f"isogemm bias gradient {problem}: {reason}")
    operand, dtype = getattr(torch, problem.dtype), getattr(torch, problem.out_dtype)
    places = ((operand, problem.aligned), 0), ((dtype, problem.out_aligned), 2)
    step = _step(kernels.describe_bias_grad(problem), places, device)
    served = Dispatch("bias_grad", "gemm", str(problem), "", "")
    return Plan(served, (problem.n,), (1,), dtype, device, _index(device), 0, (step,))


_Place = tuple[tuple[torch.dtype, bool], int]  # (dtype, aligned to 16 bytes), and which address it is

_bound: dict[tuple[Any, ...], BoundKernel] = {}


def _step(launch: Launch, places: Sequence[_Place | None], device: torch.device) -> Step:
    from isogemm.gemm import kernels

    names = launch.kernel.arg_names[len(places) : len(places) + len(launch.scalars)]
    key = (
        launch.kernel, _index(device), tuple(launch.constants.values()), tuple(launch.options.items()),
        tuple(place and place[0] for place in places), tuple(seen and seen.block for seen in launch.maps),
        tuple(itertools.starmap(_seen_by_triton, zip(names, launch.scalars, strict=True))),
    )  # fmt: skip
    bound = _bound.get(key)
    if bound is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "nothing can be compiled while a CUDA graph is captured: call isogemm.warmup, or the operation, before"
            )
        with torch.cuda.device(device):
            like = tuple(_like(*place[0], device) if place else None for place in places)
            bound = _bound[key] = kernels.bind_launch(launch, like)
    maps = (*launch.maps, *(None,) * (len(places) - len(launch.maps)))
    places_of_maps = itertools.count()
    describers = tuple(
        None if seen is None else bound.describer(next(places_of_maps), seen, _index(device)) for seen in maps
    )
    pick = operator.itemgetter(*(place[1] if place else _NOTHING for place in places))
    return Step(bound, launch.programs, pick, describers if any(maps) else (), launch.scalars)


def _seen_by_triton(name: str, scalar: int | None) -> tuple[bool, ...] | None:
    """What a kernel is compiled for: of a stride more than of a size, which is not specialised on."""
    if scalar is None:
        return None
    return (scalar == 1, scalar % 16 == 0, scalar >= 2**31) if name.startswith("stride") else (scalar >= 2**31,)


def _contiguous(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape and its strides."""
    strides = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return tuple(shape), tuple(strides)[::-1]


def _like(dtype: torch.dtype, aligned: bool, device: torch.device) -> torch.Tensor:
    """A tensor by which Triton sees the dtype and the alignment of those to come."""
    some = torch.empty(16, dtype=dtype, device=device)
    return some if aligned else some[1:]


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


# where no kernel of ours serves: the CPU backend, and torch for float64


def _elsewhere(name: str, x: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    result = compute()
    if dispatch.active:
        problem = f"{list(x.shape)} {_name(x.dtype)}"
        if x.dtype is torch.float64:
            dispatch.record(Dispatch(name, "torch", problem, "", "float64"))
        else:
            dispatch.record(Dispatch(name, "cpu", problem, "", "not on a GPU"))
    return result


def _product_elsewhere(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    if a.dtype is not torch.float64:
        return cpu.product(a, b, bias, out_dtype or a.dtype)
    result = torch.matmul(a, b)
    return result if bias is None else result.add_(bias)


def _added(result: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
    return result if total is None else total.add_(result)


# registration with torch.library, for torch.compile, fake tensors and dispatch modes


def _matmul(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None, precision: str | None = None
) -> torch.Tensor:
    return product(a, b, None, out_dtype, precision)


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    owner: torch.Tensor | None,
    main_grad: torch.Tensor | None,
    bias_owner: torch.Tensor | None,
    bias_main_grad: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    return linear(x, weight, bias, out_dtype, precision)


def _weight_grad(grad: torch.Tensor, x: torch.Tensor, precision: str | None = None) -> torch.Tensor:
    validate_token_sum(grad, x, precision)
    return weight_grad(grad, x, None, x.dtype, precision)


def _bias_grad(grad: torch.Tensor) -> torch.Tensor:
    return bias_grad(grad, None, grad.dtype)


def add_weight_grad(
    main_grad: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, owner: torch.Tensor, precision: str | None = None
) -> None:
    """Accumulate into the owner's main_grad, and tell it so."""
    validate_token_sum(grad, x, precision)
    require_total("weight.main_grad", main_grad, (grad.shape[-1], x.shape[-1]), x.device)
    weight_grad(grad, x, main_grad, torch.float32, precision)
    owner.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # what Megatron-style trainers look for


def add_bias_grad(main_grad: torch.Tensor, grad: torch.Tensor, owner: torch.Tensor) -> None:
    """Accumulate into the owner's main_grad, and tell it so."""
    require_total("bias.main_grad", main_grad, grad.shape[-1:], grad.device)
    bias_grad(grad, main_grad, torch.float32)
    owner.grad_added_to_main_grad = True  # type: ignore[attr-defined]


# torch.library is not typed.
_library: Any = torch.library.Library("isogemm", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _function in (
    ("matmul(Tensor a, Tensor b, ScalarType? out_dtype=None, str? precision=None) -> Tensor", _matmul),
    (
        "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? owner, Tensor? main_grad, Tensor? bias_owner, "
        "Tensor? bias_main_grad, ScalarType? out_dtype=None, str? precision=None) -> Tensor",
        _linear,
    ),
    ("weight_grad(Tensor grad, Tensor x, str? precision=None) -> Tensor", _weight_grad),
    ("bias_grad(Tensor grad) -> Tensor", _bias_grad),
    (
        "add_weight_grad(Tensor(a!) main_grad, Tensor grad, Tensor x, Tensor owner, str? precision=None) -> ()",
        add_weight_grad,
    ),
    ("add_bias_grad(Tensor(a!) main_grad, Tensor grad, Tensor owner) -> ()", add_bias_grad),
):
    _library.define(_schema)
    for _key in ("CPU", "CUDA"):
        _library.impl(_schema.partition("(")[0], _function, _key)


def _fake(name: str) -> Any:
    return torch.library.register_fake(f"isogemm::{name}", lib=_library)


@_fake("matmul")  # type: ignore[untyped-decorator]
def _matmul_fake(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None, precision: str | None = None
) -> torch.Tensor:
    validate(a, b, None, out_dtype, precision)
    shape = (*_broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


@_fake("linear")  # type: ignore[untyped-decorator]
def _linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    owner: torch.Tensor | None,
    main_grad: torch.Tensor | None,
    bias_owner: torch.Tensor | None,
    bias_main_grad: torch.Tensor | None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    validate_linear(x, weight, bias, out_dtype, precision)
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or x.dtype)


@_fake("weight_grad")  # type: ignore[untyped-decorator]
def _weight_grad_fake(grad: torch.Tensor, x: torch.Tensor, precision: str | None = None) -> torch.Tensor:
    validate_token_sum(grad, x, precision)
    return x.new_empty((grad.shape[-1], x.shape[-1]))


@_fake("bias_grad")  # type: ignore[untyped-decorator]
def _bias_grad_fake(grad: torch.Tensor) -> torch.Tensor:
    return grad.new_empty(grad.shape[-1:])


@_fake("add_weight_grad")  # type: ignore[untyped-decorator]
def _add_weight_grad_fake(
    main_grad: torch.Tensor, grad: torch.Tensor, x: torch.Tensor, owner: torch.Tensor, precision: str | None = None
) -> None:
    require_total("weight.main_grad", main_grad, (grad.shape[-1], x.shape[-1]), x.device)


@_fake("add_bias_grad")  # type: ignore[untyped-decorator]
def _add_bias_grad_fake(main_grad: torch.Tensor, grad: torch.Tensor, owner: torch.Tensor) -> None:
    require_total("bias.main_grad", main_grad, grad.shape[-1:], grad.device)
