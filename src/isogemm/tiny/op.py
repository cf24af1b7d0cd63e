"""`isogemm::bmm`: plans, execution, fallback, and the registration with torch.library.

A plan is everything about a call that its key determines: the path, the compiled kernel, its arguments. Finding it is
a dictionary look-up; making it (validating, choosing, compiling) happens once.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from isogemm.core import device as devices
from isogemm.core import dispatch, env
from isogemm.core.dispatch import Dispatch
from isogemm.core.errors import require_precision, require_same, require_tensor
from isogemm.core.precision import of_cuda_products
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


def validate(a: torch.Tensor, b: torch.Tensor, precision: str | None) -> None:
    require_tensor("a", a, 3, "[B or 1, M, K]")
    require_tensor("b", b, 3, "[B or 1, K, N]")
    require_same("dtype", ("a", "b"), (a.dtype, b.dtype))
    require_same("device", ("a", "b"), (a.device, b.device))
    require_same("K (a is [B, M, K], b is [B, K, N])", ("a", "b"), (a.shape[2], b.shape[1]))
    if a.shape[0] != 1 and b.shape[0] != 1:
        require_same("batch, or one of them batch 1", ("a", "b"), (a.shape[0], b.shape[0]))
    require_precision(precision, a.dtype)


def bmm(a: torch.Tensor, b: torch.Tensor, precision: str | None = None) -> torch.Tensor:
    """[B or 1, M, K] @ [B or 1, K, N] -> [B, M, N], without autograd."""
    return run(plan(a, b, precision), a, b)


def torch_bmm(a: torch.Tensor, b: torch.Tensor, precision: str | None) -> torch.Tensor:
    """torch.bmm, with torch's own autograd, where the tiny family has no part."""
    if dispatch.active and not torch.compiler.is_compiling():
        problem = describe(a, b, precision, placed=False)
        reason = unserved(problem, a.is_cuda) or "inside a transform"
        dispatch.record(Dispatch("bmm", "torch", str(problem), "", reason))
    with of_cuda_products(precision if a.is_cuda else None):
        return cpu.bmm(a, b)


def key(a: torch.Tensor, b: torch.Tensor, precision: str | None) -> tuple[Any, ...]:
    """All that a plan depends on: the arguments' validity and Triton's specialisation of them included."""
    return (
        a.dtype, b.dtype, a.shape, b.shape, a.stride(), b.stride(), a.data_ptr() & 15, b.data_ptr() & 15,
        a.get_device(), b.get_device(), resolve_precision(a, precision), env.settings.disable_tiny,
    )  # fmt: skip


def plan(a: torch.Tensor, b: torch.Tensor, precision: str | None) -> Plan:
    wanted = key(a, b, precision)
    found = plans.get(wanted)
    if found is None:
        validate(a, b, precision)
        found = _make_plan(a, b, resolve_precision(a, precision))
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        # A plan that failed inside a graph capture, where nothing can be compiled, may succeed outside it.
        if found.kernel is not None or not (a.is_cuda and torch.cuda.is_current_stream_capturing()):
            plans[wanted] = found
    return found


def run(plan: Plan, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What the plan's kernel writes, or torch's product where it has none or its launch fails."""
    kernel, index = plan.kernel, plan.index
    if kernel is None:
        return _run_torch(plan, a, b)
    out = torch.empty_strided(plan.shape, plan.strides, dtype=plan.dtype, device=plan.device)
    try:
        if index == devices.current_device():
            kernel(index, plan.programs, a.data_ptr(), b.data_ptr(), out.data_ptr(), *plan.scalars)
        else:
            with torch.cuda.device(index):
                kernel(index, plan.programs, a.data_ptr(), b.data_ptr(), out.data_ptr(), *plan.scalars)
    except Exception as error:
        return _run_torch(_after_failure(plan, a, b, error), a, b)
    if dispatch.active:
        dispatch.record(plan.dispatch)
    return out


def resolve_precision(a: torch.Tensor, precision: str | None) -> str | None:
    """None becomes torch's setting of this moment, where it matters: float32 on a GPU."""
    if precision is None and a.dtype is torch.float32 and a.is_cuda:
        return devices.matmul_precision()
    return precision


def describe(a: torch.Tensor, b: torch.Tensor, precision: str | None, *, placed: bool = True) -> Problem:
    """The problem of multiplying these tensors; an operand the batch shares has batch stride 0.

    `placed`: whether they have an address, by which their alignment is known.
    """
    facts = devices.facts(a.device)
    a_strides, b_strides = a.stride(), b.stride()
    return Problem(
        batch=b.shape[0] if a.shape[0] == 1 else a.shape[0],
        m=a.shape[1],
        n=b.shape[2],
        k=a.shape[2],
        dtype=str(a.dtype).removeprefix("torch."),
        precision="tf32" if precision == "tf32" else "ieee",  # tf32x3: as accurate, and Triton's makes NaN of Inf
        a_strides=(a_strides[0] if a.shape[0] > 1 else 0, a_strides[1], a_strides[2]),
        b_strides=(b_strides[0] if b.shape[0] > 1 else 0, b_strides[1], b_strides[2]),
        a_alignment=math.gcd(a.data_ptr(), 16) if placed else 16,
        b_alignment=math.gcd(b.data_ptr(), 16) if placed else 16,
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


def _make_plan(a: torch.Tensor, b: torch.Tensor, precision: str | None) -> Plan:
    problem = describe(a, b, precision)
    reason = unserved(problem, a.is_cuda)
    if not reason:
        kernel = configs.gate(problem)
        reason = "" if kernel else "torch.bmm was measured faster"
    if not reason:
        try:
            return _tiny_plan(a, b, problem, configs.choose(problem, kernel))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = _warn(str(problem), error)
    return Plan(Dispatch("bmm", "torch", str(problem), "", reason), precision if a.is_cuda else None)


def _tiny_plan(a: torch.Tensor, b: torch.Tensor, problem: Problem, config: Config) -> Plan:
    from isogemm.tiny import kernels

    launch = kernels.describe_bmm(problem, config)
    with torch.cuda.device(a.device):
        out = torch.empty((1,), dtype=a.dtype, device=a.device)
        bound = kernels.bind_bmm(out, a, b, launch)
    return Plan(
        dispatch=Dispatch("bmm", "tiny", str(problem), str(config), ""),
        precision=problem.precision if a.dtype is torch.float32 else None,
        kernel=bound,
        programs=launch.programs,
        scalars=launch.scalars,
        shape=(problem.batch, problem.m, problem.n),
        strides=(problem.m * problem.n, problem.n, 1),
        dtype=a.dtype,
        device=a.device,
        index=a.get_device(),
    )


def _after_failure(plan: Plan, a: torch.Tensor, b: torch.Tensor, error: Exception) -> Plan:
    """A launch failed: torch serves this problem from now on."""
    problem = plan.dispatch.problem
    instead = Plan(Dispatch("bmm", "torch", problem, "", _warn(problem, error)), plan.precision)
    if not torch.cuda.is_current_stream_capturing():
        plans[key(a, b, plan.precision)] = instead
    return instead


def _run_torch(plan: Plan, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if dispatch.active:
        dispatch.record(plan.dispatch)
    with of_cuda_products(plan.precision):
        return cpu.bmm(a, b)


def _warn(problem: str, error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}".strip()
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"isogemm.bmm {problem} is served by torch.bmm: {reason}", RuntimeWarning, stacklevel=2)
    return reason


# torch.library is not typed.
_library: Any = torch.library.Library("isogemm", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("bmm(Tensor a, Tensor b, str? precision=None) -> Tensor")
_library.impl("bmm", bmm, "CPU")
_library.impl("bmm", bmm, "CUDA")


@torch.library.register_fake("isogemm::bmm", lib=_library)  # type: ignore[untyped-decorator]
def _bmm_fake(a: torch.Tensor, b: torch.Tensor, precision: str | None = None) -> torch.Tensor:
    validate(a, b, precision)
    return a.new_empty((b.shape[0] if a.shape[0] == 1 else a.shape[0], a.shape[1], b.shape[2]))
