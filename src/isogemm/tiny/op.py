"""`isogemm::bmm` without autograd: what serves a call, and the fallback to torch.bmm.

A call's key finds what serves it, by a dictionary look-up. Choosing and compiling happen once per key.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isogemm.core import device as devices
from isogemm.core import dispatch, env
from isogemm.core.device import resolve_precision
from isogemm.core.dispatch import Dispatch
from isogemm.core.errors import require_precision, require_same, require_tensor
from isogemm.core.plan import INPUTS, OUT, Cache, FreedOperandError, Plan, Seen, make_step
from isogemm.core.precision import of_cuda_products
from isogemm.tiny import configs
from isogemm.tiny.configs import Config, Problem


class Served(NamedTuple):
    """What serves a call: a plan of the tiny kernels, or torch.bmm."""

    plan: Plan | None  # None: torch serves
    dispatch: Dispatch
    precision: str | None  # of torch's product, where torch serves float32 on a GPU


served: Cache[Served] = Cache()
_warned: set[str] = set()


def validate(a: Tensor, b: Tensor, precision: str | None) -> None:
    require_tensor("a", a, 3, "[B or 1, M, K]")
    require_tensor("b", b, 3, "[B or 1, K, N]")
    require_same("dtype", ("a", "b"), (a.dtype, b.dtype))
    require_same("device", ("a", "b"), (a.device, b.device))
    require_same("K (a is [B, M, K], b is [B, K, N])", ("a", "b"), (a.shape[2], b.shape[1]))
    if a.shape[0] != 1 and b.shape[0] != 1:
        require_same("batch, or one of them batch 1", ("a", "b"), (a.shape[0], b.shape[0]))
    require_precision(precision, a.dtype)


def bmm(a: Tensor, b: Tensor, precision: str | None = None) -> Tensor:
    """[B or 1, M, K] @ [B or 1, K, N] -> [B, M, N], without autograd."""
    found = served.get(key(a, b, precision)) or _find(a, b, precision)
    if found.plan is None:
        return _run_torch(found, a, b)
    try:
        return found.plan.run((a, b))
    except (torch.OutOfMemoryError, FreedOperandError):
        raise
    except Exception as error:
        return _run_torch(_after_failure(found, a, b, error), a, b)


def torch_bmm(a: Tensor, b: Tensor, precision: str | None) -> Tensor:
    """Call torch.bmm, with torch's own autograd, where no tiny kernel may serve."""
    if dispatch.active and not torch.compiler.is_compiling():
        problem = problem_of(a, b, precision, placed=False)
        reason = unserved(problem, a.is_cuda) or "inside a transform"
        dispatch.record(Dispatch("bmm", "torch", str(problem), "", reason))
    with of_cuda_products(precision if a.is_cuda else None):
        return _product(a, b)


def key(a: Tensor, b: Tensor, precision: str | None) -> tuple[Any, ...]:
    """All that a plan depends on, including the arguments' validity and what Triton specialises on."""
    return (
        a.dtype, b.dtype, a.shape, b.shape, a.stride(), b.stride(), a.data_ptr() & 15, b.data_ptr() & 15,
        a.get_device(), b.get_device(), resolve_precision(a, precision), env.settings.disable_tiny,
    )  # fmt: skip


def _find(a: Tensor, b: Tensor, precision: str | None) -> Served:
    """Choose what serves such calls from now on."""
    validate(a, b, precision)
    found = _choose(a, b, resolve_precision(a, precision))
    # A plan that failed inside a graph capture, where nothing can be compiled, may succeed outside it.
    if found.plan is not None or not (a.is_cuda and torch.cuda.is_current_stream_capturing()):
        served.keep(key(a, b, precision), found)
    return found


def problem_of(a: Tensor, b: Tensor, precision: str | None, *, placed: bool = True) -> Problem:
    """The problem of multiplying these tensors; an operand the batch shares has batch stride 0.

    placed: whether they have addresses, which show their alignment.
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
    """Why the tiny kernels cannot serve here, regardless of the gate; empty where they can."""
    if env.settings.disable_tiny:
        return "ISOGEMM_DISABLE_TINY is set"
    if not on_gpu:
        return "not on a GPU"
    return configs.eligible(problem)


def _choose(a: Tensor, b: Tensor, precision: str | None) -> Served:
    problem = problem_of(a, b, precision)
    reason = unserved(problem, a.is_cuda)
    if not reason:
        kernel = configs.gate(problem)
        reason = "" if kernel else "torch.bmm was measured faster"
    if not reason:
        try:
            plan = tiny_plan(problem, configs.choose(problem, kernel), a.device)
            return Served(plan, plan.dispatch, precision if a.is_cuda else None)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = _warn(str(problem), error)
    return Served(None, Dispatch("bmm", "torch", str(problem), "", reason), precision if a.is_cuda else None)


def tiny_plan(problem: Problem, config: Config, device: torch.device) -> Plan:
    """Plan of the inputs (a, b)."""
    from isogemm.tiny import kernels

    dtype: torch.dtype = getattr(torch, problem.dtype)
    a, b = ((dtype, alignment == 16) for alignment in (problem.a_alignment, problem.b_alignment))
    places: tuple[tuple[Seen, int], ...] = (a, INPUTS), (b, INPUTS + 1), ((dtype, True), OUT)
    step = make_step(kernels.describe_bmm(problem, config), places, device, in_capture=True)
    dispatched = Dispatch("bmm", "tiny", str(problem), str(config), "")
    shape = (problem.batch, problem.m, problem.n)
    return Plan.of(dispatched, shape, dtype, device, (step,))


def _after_failure(found: Served, a: Tensor, b: Tensor, error: Exception) -> Served:
    """Let torch serve this problem from now on, after a launch failed."""
    problem = found.dispatch.problem
    instead = Served(None, Dispatch("bmm", "torch", problem, "", _warn(problem, error)), found.precision)
    if not torch.cuda.is_current_stream_capturing():
        served.keep(key(a, b, found.precision), instead)
    return instead


def _run_torch(found: Served, a: Tensor, b: Tensor) -> Tensor:
    if dispatch.active:
        dispatch.record(found.dispatch)
    with of_cuda_products(found.precision):
        return _product(a, b)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """torch.bmm, with an operand that the batch shares expanded."""
    if a.shape[0] == b.shape[0]:
        return torch.bmm(a, b)
    batch = b.shape[0] if a.shape[0] == 1 else a.shape[0]
    return torch.bmm(a.expand(batch, -1, -1), b.expand(batch, -1, -1))


def _warn(problem: str, error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}".strip()
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"isogemm.bmm {problem} is served by torch.bmm: {reason}", RuntimeWarning, stacklevel=2)
    return reason
