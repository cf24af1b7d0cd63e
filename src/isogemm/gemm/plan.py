"""From problems to plans: all that a call's problem determines, down to the compiled kernel and its arguments."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from isogemm.core import dispatch
from isogemm.core.dispatch import Dispatch
from isogemm.gemm import configs
from isogemm.gemm.configs import BiasGradProblem, Config, Problem

if TYPE_CHECKING:
    from isogemm.core.launch import BoundKernel
    from isogemm.gemm.kernels import Launch

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


def plan_for(problem: Problem, config: Config, device: torch.device) -> Plan:
    """The plan of a problem without a batch, from its description alone: what is not compiled yet is compiled."""
    return gemm_plan("matmul", (problem.m, problem.n), getattr(torch, problem.out_dtype), device, problem, config)


def gemm_plan(
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


def bias_grad_plan(problem: BiasGradProblem, device: torch.device) -> Plan:
    from isogemm.gemm import kernels

    if reason := configs.usable(problem.arch):
        raise RuntimeError(f"isogemm bias gradient {problem}: {reason}")
    operand, dtype = getattr(torch, problem.dtype), getattr(torch, problem.out_dtype)
    places = ((operand, problem.aligned), 0), ((dtype, problem.out_aligned), 2)
    step = _step(kernels.describe_bias_grad(problem), places, device)
    served = Dispatch("bias_grad", "gemm", str(problem), "", "")
    return Plan(served, (problem.n,), (1,), dtype, device, _index(device), 0, (step,))


def compiled() -> int:
    """How many kernels are ready to launch."""
    return len(_bound)


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
