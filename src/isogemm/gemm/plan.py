"""From problems to plans: all that a call's problem determines, down to the compiled kernel and its arguments."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from isogemm.core import device as devices
from isogemm.core import dispatch
from isogemm.core.dispatch import Dispatch
from isogemm.gemm import configs
from isogemm.gemm.configs import ActivationGradProblem, BiasGradProblem, Config, Problem

if TYPE_CHECKING:
    from isogemm.core.launch import BoundKernel
    from isogemm.gemm.kernels import Launch

Describer = Callable[[Any], Sequence[Any]]  # from an address to a kernel's arguments for it
Seen = tuple[torch.dtype, bool]  # all that Triton sees of a tensor: its dtype, and whether it is aligned to 16 bytes

_NO_NUMBERS = (None, None, None, None)

# Places of a call's addresses; what an epilogue reads follows.
_A, _B, _OUT, _SCRATCH, _B_UP, _PAIR, _READ = range(7)


@dataclass(frozen=True, slots=True)
class Step:
    """One launch. A call fills in what its arguments leave open."""

    kernel: BoundKernel
    programs: int
    arguments: tuple[Any, ...]  # all of the kernel's
    addressed: tuple[tuple[int, int], ...]  # which of them are addresses, and of those of a call which
    described: tuple[tuple[slice, int, Describer], ...]  # and which are made of one
    numbered: slice | None  # and which are a call's numbers

    def run(self, index: int, addresses: tuple[Any, ...], numbers: tuple[float | None, ...]) -> None:
        arguments = list(self.arguments)
        for at, place in self.addressed:
            arguments[at] = addresses[place]
        for those, place, describe in self.described:
            arguments[those] = describe(addresses[place])
        if self.numbered is not None and numbers is not _NO_NUMBERS:
            arguments[self.numbered] = numbers
        self.kernel.launch(index, self.programs, arguments)


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
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        read: Sequence[torch.Tensor | None],
        total: torch.Tensor | None,
        b_up: torch.Tensor | None = None,
        numbers: tuple[float | None, ...] = _NO_NUMBERS,
    ) -> torch.Tensor:
        """Into `total` where it is given, else into new memory.

        read: what the epilogue reads, in its order, as far as there is something; numbers: alpha, beta and dropout's.
        """
        out = (
            torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
            if total is None
            else total
        )
        scratch = torch.empty(self.scratch, dtype=torch.float32, device=self.device) if self.scratch else None
        at = b.data_ptr()
        up = None if b_up is None else b_up.data_ptr()
        addresses = (
            a.data_ptr(),
            at,
            out.data_ptr(),
            None if scratch is None else scratch.data_ptr(),
            up,
            None if up is None else (at, up),
            *[None if each is None else each.data_ptr() for each in read],
        )
        if 0 in addresses:
            raise RuntimeError(f"isogemm.{self.dispatch.op}: an operand has no memory: its storage was freed")
        if self.index == devices.current_device():
            for step in self.steps:
                step.run(self.index, addresses, numbers)
        else:
            with torch.cuda.device(self.index):
                for step in self.steps:
                    step.run(self.index, addresses, numbers)
        if dispatch.active:
            dispatch.record(self.dispatch)
        return out


def plan_for(problem: Problem, config: Config, device: torch.device) -> Plan:
    """The plan of a problem without a batch, from its description alone: what is not compiled yet is compiled."""
    return gemm_plan("matmul", (problem.m, problem.n), getattr(torch, problem.out_dtype), device, problem, config)


def gemm_plan(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    problem: Problem,
    config: Config,
    read: Sequence[Seen | None] = (),
) -> Plan:
    """read: how Triton sees what the epilogue reads; by default its bias alone."""
    from isogemm.gemm import kernels

    if reason := configs.usable(problem.arch):
        raise RuntimeError(f"isogemm.{name} {problem}: {reason}")
    walk = configs.walk(problem, config)
    operand = getattr(torch, problem.dtype)
    launch = kernels.describe_gemm(problem, config)
    sums = torch.float32
    a, b = ((operand, problem.a_aligned), _A), ((operand, problem.b_aligned), _B)
    second = None
    if problem.weights > 1:
        if configs.reads_b_by_tma(problem, config):
            b = (operand, problem.b_aligned), _PAIR
        else:
            second = (operand, problem.b_aligned), _B_UP
    left, right = (b, a) if config.swapped else (a, b)
    out = ((sums, True), _SCRATCH) if walk == "partials" else ((dtype, problem.c_aligned), _OUT)
    scratch = ((sums, True), _SCRATCH) if walk == "scratch" else None
    rest = () if config.kernel == "stream" else (right if config.rest_n else second,)
    if problem.epilogue.bias and not read:
        read = ((operand, False),)
    reads = [None if seen is None else (seen, _READ + index) for index, seen in enumerate(read)]
    bias = reads[0] if reads else None
    if walk == "partials":
        reads = []
    reads += [None] * (len(kernels.READ) - len(reads))
    steps = [_step(launch, (left, right, *rest, out, scratch, *reads), device)]
    if walk == "partials":
        adding = kernels.describe_add_partials(problem)
        steps.append(_step(adding, (((sums, True), _SCRATCH), ((dtype, problem.c_aligned), _OUT), bias), device))
    scratch_elements = configs.workspace(problem, config) // 4
    served = Dispatch(name, "gemm", str(problem), str(config), "")
    return Plan(served, *_contiguous(shape), dtype, device, _index(device), scratch_elements, tuple(steps))


def bias_grad_plan(problem: BiasGradProblem, device: torch.device) -> Plan:
    from isogemm.gemm import kernels_gradients as kernels

    if reason := configs.usable(problem.arch):
        raise RuntimeError(f"isogemm bias gradient {problem}: {reason}")
    operand, dtype = getattr(torch, problem.dtype), getattr(torch, problem.out_dtype)
    grad, out = ((operand, problem.aligned), _A), ((dtype, problem.out_aligned), _OUT)
    summing = kernels.describe_bias_grad(problem)
    scratch = 0
    if problem.split:
        scratch = problem.chunks * problem.n
        sums = (torch.float32, False), _SCRATCH
        adding = kernels.describe_chunk_sums(problem.chunks, problem.n, 1, problem.out_stride, problem.accumulate)
        steps = [_step(summing, (grad, sums), device), _step(adding, (sums, ((dtype, False), _OUT)), device)]
    else:
        steps = [_step(summing, (grad, out), device)]
    served = Dispatch("bias_grad", "gemm", str(problem), "", "")
    return Plan(served, (problem.n,), (1,), dtype, device, _index(device), scratch, tuple(steps))


def activation_grad_plan(
    problem: ActivationGradProblem, shape: Sequence[int], device: torch.device, seen: Sequence[Seen | None]
) -> Plan:
    """seen: the gradient, what was saved, the seed and the sums, as Triton sees them."""
    from isogemm.gemm import kernels_gradients as kernels

    if reason := configs.usable(problem.arch):
        raise RuntimeError(f"isogemm activation gradient {problem}: {reason}")
    dtype = getattr(torch, problem.dtype)
    grad, saved, seed, sums = seen
    places = (
        (cast(Seen, grad), _A), saved and (saved, _READ), seed and (seed, _READ + 1), ((dtype, True), _OUT),
        sums and (sums, _READ + 2),
    )  # fmt: skip
    step = _step(kernels.describe_activation_grad(problem), places, device)
    served = Dispatch("activation_grad", "gemm", str(problem), "", "")
    return Plan(served, *_contiguous(shape), dtype, device, _index(device), 0, (step,))


def chunk_sums_plan(
    count: int, n: int, together: int, dtype: torch.dtype, stride: int | None, device: torch.device
) -> Plan:
    """The sum of [count, n] sums, `together` to a chunk; added to what there is, `stride` apart, where given."""
    from isogemm.gemm import kernels_gradients as kernels

    launch = kernels.describe_chunk_sums(count, n, together, stride or 1, stride is not None)
    step = _step(launch, (((torch.float32, False), _A), ((dtype, False), _OUT)), device)
    served = Dispatch("bias_grad", "gemm", f"[{count},{n}] sums", "", "")
    return Plan(served, (n,), (1,), dtype, device, _index(device), 0, (step,))


def compiled() -> int:
    """How many kernels are ready to launch."""
    return len(_bound)


_Place = tuple[Seen, int]  # and which address it is

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
    arguments: list[Any] = []
    addressed: list[tuple[int, int]] = []
    described: list[tuple[slice, int, Describer]] = []
    for place, seen in itertools.zip_longest(places, launch.maps):
        at = len(arguments)
        arguments += [None] * (1 if seen is None else bound.described_by(seen))
        if place is not None and seen is not None:
            describe = bound.describer(len(described), seen, _index(device))
            described.append((slice(at, len(arguments)), place[1], describe))
        elif place is not None:
            addressed.append((at, place[1]))
    arguments += launch.scalars
    numbered = slice(len(arguments), len(arguments) + len(launch.numbers)) if launch.numbers else None
    arguments += [None] * len(launch.numbers)
    return Step(
        bound, launch.programs, (*arguments, *bound.constants), tuple(addressed), tuple(described), numbered
    )  # fmt: skip


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
