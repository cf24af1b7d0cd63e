"""`isogemm::bmm` and `isogemm::bmm_sum`: plans, execution, fallback, and their registration with torch.library.

A plan is everything about a call that its key determines: the path, the compiled kernel, its arguments. Finding it is
a dictionary look-up; making it (choosing, compiling) happens once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from isogemm.core import device as devices
from isogemm.core import dispatch, env
from isogemm.core.dispatch import Dispatch
from isogemm.tiny import configs, cpu
from isogemm.tiny.configs import Config, Problem

if TYPE_CHECKING:
    from isogemm.core.launch import BoundKernel

_MOST_PLANS = 8192  # a serving process sees many batch sizes; past this the plans are made again


@dataclass(frozen=True, slots=True)
class Plan:
    dispatch: Dispatch
    precision: str | None  # of torch's product, where torch serves float32 on a GPU
    kernel: BoundKernel | None = None  # None: torch serves
    programs: int = 0
    scalars: tuple[int, ...] = ()
    shape: tuple[int, int, int] = (0, 0, 0)
    strides: tuple[int, int, int] = (0, 0, 0)
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    index: int = -1


plans: dict[tuple[Any, ...], Plan] = {}
_warned: set[str] = set()


def bmm(a: torch.Tensor, b: torch.Tensor, precision: str | None = None) -> torch.Tensor:
    """[B or 1, M, K] @ [B or 1, K, N] -> [B, M, N], without autograd. Arguments are valid."""
    return run(plan("bmm", a, b, precision), a, b)


def bmm_sum(a: torch.Tensor, b: torch.Tensor, precision: str | None = None) -> torch.Tensor:
    """The sum over the batch of a[i] b[i], [1, M, N]: the gradient of an operand that the batch shares.

    Chunks of SUM_CHUNK matrices are each added up in order by one program, then the chunks by torch.sum, which is
    deterministic. The chunks' float32 sums are the only workspace: 4 m n bytes per SUM_CHUNK matrices.
    """
    chosen = plan("bmm_sum", a, b, precision)
    result = run(chosen, a, b)
    return result if chosen.kernel is None else result.sum(0, keepdim=True).to(a.dtype)


def key(op: str, a: torch.Tensor, b: torch.Tensor, precision: str | None) -> tuple[Any, ...]:
    """All that a plan depends on: the arguments' validity and Triton's specialisation of them included."""
    if precision is None and a.dtype is torch.float32:
        precision = devices.matmul_precision()
    return (
        op, a.dtype, b.dtype, a.shape, b.shape, a.stride(), b.stride(), a.data_ptr() & 15, b.data_ptr() & 15,
        a.get_device(), b.get_device(), precision, env.settings.disable_tiny,
    )  # fmt: skip


def run(plan: Plan, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What the plan's kernel writes, or torch's product where it has none or its launch fails."""
    if dispatch.active:
        dispatch.record(plan.dispatch)
    kernel, index = plan.kernel, plan.index
    if kernel is None:
        return _torch(plan, a, b)
    out = torch.empty_strided(plan.shape, plan.strides, dtype=plan.dtype, device=plan.device)
    try:
        if index == torch.cuda.current_device():
            kernel(index, plan.programs, a.data_ptr(), b.data_ptr(), out.data_ptr(), *plan.scalars)
        else:
            with torch.cuda.device(index):
                kernel(index, plan.programs, a.data_ptr(), b.data_ptr(), out.data_ptr(), *plan.scalars)
    except Exception as error:
        return _after_failure(plan, a, b, error)
    return out


def torch_bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.bmm, with torch's own autograd, where the tiny family has no part."""
    if dispatch.active and not torch.compiler.is_compiling():
        problem = describe(a, b, "ieee")
        reason = unserved(problem, a.is_cuda) or "inside forward-mode AD or a torch.func transform"
        dispatch.record(Dispatch("bmm", "torch", str(problem), "", reason))
    return cpu.bmm(a, b)


def resolve_precision(a: torch.Tensor, precision: str | None) -> str | None:
    """None becomes torch's setting of this moment, where it matters: float32 on a GPU."""
    if precision is None and a.dtype is torch.float32 and a.is_cuda:
        return devices.matmul_precision()
    return precision


def plan(op: str, a: torch.Tensor, b: torch.Tensor, precision: str | None) -> Plan:
    wanted = key(op, a, b, precision)
    found = plans.get(wanted)
    if found is None:
        found = _make_plan(op, a, b, resolve_precision(a, precision))
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        # A plan that failed inside a graph capture, where nothing can be compiled, may succeed outside it.
        if found.kernel is not None or not (a.is_cuda and torch.cuda.is_current_stream_capturing()):
            plans[wanted] = found
    return found


def _make_plan(op: str, a: torch.Tensor, b: torch.Tensor, precision: str | None) -> Plan:
    problem = describe(a, b, precision or "ieee")
    kernel, reason = "dot", unserved(problem, a.is_cuda)
    if not reason and op == "bmm":
        kernel = configs.gate(problem)
        reason = "" if kernel else "torch.bmm was measured faster"
    if not reason:
        try:
            return _tiny_plan(op, a, b, problem, configs.choose(problem, kernel))
        except Exception as error:
            reason = _warn(str(problem), error)
    return Plan(Dispatch(op, "torch", str(problem), "", reason), precision if a.is_cuda else None)


def describe(a: torch.Tensor, b: torch.Tensor, precision: str, a_address: int = 0, b_address: int = 0) -> Problem:
    """The problem of multiplying these tensors; an operand the batch shares has batch stride 0."""
    facts = devices.facts(a.device)
    a_strides, b_strides = a.stride(), b.stride()
    return Problem(
        batch=max(a.shape[0], b.shape[0]),
        m=a.shape[1],
        n=b.shape[2],
        k=a.shape[2],
        dtype=str(a.dtype).removeprefix("torch."),
        precision=precision if a.dtype is torch.float32 else "ieee",
        a_strides=(a_strides[0] if a.shape[0] > 1 else 0, a_strides[1], a_strides[2]),
        b_strides=(b_strides[0] if b.shape[0] > 1 else 0, b_strides[1], b_strides[2]),
        a_alignment=math.gcd(a.data_ptr(), 16),
        b_alignment=math.gcd(b.data_ptr(), 16),
        arch=facts.arch,
        sm_count=facts.sm_count,
    )


def unserved(problem: Problem, on_gpu: bool) -> str:
    """Why the tiny kernels cannot serve here, whatever the gate says; empty where they can."""
    if env.settings.disable_tiny:
        return "ISOGEMM_DISABLE_TINY is set"
    if not on_gpu:
        return "not on a GPU"
    return configs.eligible(problem)


def _tiny_plan(op: str, a: torch.Tensor, b: torch.Tensor, problem: Problem, config: Config) -> Plan:
    from isogemm.tiny import kernels

    chunk, dtype = (configs.SUM_CHUNK, torch.float32) if op == "bmm_sum" else (1, a.dtype)
    launch = kernels.describe_bmm(problem, config, chunk)
    with torch.cuda.device(a.device):
        out = torch.empty((1,), dtype=dtype, device=a.device)
        bound = kernels.bind_bmm(out, a, b, launch)
    m, n = problem.m, problem.n
    return Plan(
        dispatch=Dispatch(op, "tiny", str(problem), str(config), ""),
        precision=problem.precision if a.dtype is torch.float32 else None,
        kernel=bound,
        programs=launch.programs,
        scalars=launch.scalars,
        shape=(-(-problem.batch // chunk), m, n),
        strides=(m * n, n, 1),
        dtype=dtype,
        device=a.device,
        index=a.get_device(),
    )


def _after_failure(plan: Plan, a: torch.Tensor, b: torch.Tensor, error: Exception) -> torch.Tensor:
    """A launch failed: torch serves this call, and this problem from now on."""
    failed = plan.dispatch
    reason = _warn(failed.problem, error)
    instead = Plan(Dispatch(failed.op, "torch", failed.problem, "", reason), plan.precision)
    if not torch.cuda.is_current_stream_capturing():
        plans[key(failed.op, a, b, plan.precision)] = instead
    return run(instead, a, b)  # of bmm_sum: the whole sum, which bmm_sum takes as its only chunk


def _torch(plan: Plan, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch_precision(plan.precision):
        return cpu.bmm_sum(a, b) if plan.dispatch.op == "bmm_sum" else cpu.bmm(a, b)


def _warn(problem: str, error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}".strip()
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"isogemm.bmm {problem} is served by torch.bmm: {reason}", RuntimeWarning, stacklevel=2)
    return reason


@contextmanager
def torch_precision(precision: str | None) -> Iterator[None]:
    """torch's fp32 matmul precision set to what was asked for; torch has no tf32x3 and takes ieee for it."""
    wanted = "tf32" if precision == "tf32" else "ieee"
    if precision is None or devices.matmul_precision() == wanted:
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = wanted
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


# torch.library is not typed.
_library: Any = torch.library.Library("isogemm", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name, _function in (("bmm", bmm), ("bmm_sum", bmm_sum)):
    _library.define(f"{_name}(Tensor a, Tensor b, str? precision=None) -> Tensor")
    for _key_name in ("CPU", "CUDA"):
        _library.impl(_name, _function, _key_name)


@torch.library.register_fake("isogemm::bmm", lib=_library)  # type: ignore[untyped-decorator]
def _bmm_fake(a: torch.Tensor, b: torch.Tensor, precision: str | None = None) -> torch.Tensor:
    return a.new_empty((_batch(a, b), a.shape[1], b.shape[2]))


@torch.library.register_fake("isogemm::bmm_sum", lib=_library)  # type: ignore[untyped-decorator]
def _bmm_sum_fake(a: torch.Tensor, b: torch.Tensor, precision: str | None = None) -> torch.Tensor:
    return a.new_empty((1, a.shape[1], b.shape[2]))


def _batch(a: torch.Tensor, b: torch.Tensor) -> int:
    return b.shape[0] if a.shape[0] == 1 else a.shape[0]
