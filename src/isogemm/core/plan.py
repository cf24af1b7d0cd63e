"""Plans: what a call allocates and launches, made once per problem and then only run.

`compiled_for` compiles a launch's kernel once for everything that Triton specialises on. A `Plan` is one call's
launches with all arguments filled in but the addresses. Both are kept in a `Cache`.
"""

from __future__ import annotations

import itertools
import operator
import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from isogemm.core import device as devices
from isogemm.core import dispatch, private
from isogemm.core.dispatch import Dispatch

if TYPE_CHECKING:
    from isogemm.core.launch import BoundKernel, Launch

Value = TypeVar("Value")
Seen = tuple[torch.dtype, bool]  # all that Triton sees of a tensor: its dtype, and whether it is aligned to 16 bytes
Place = tuple[Seen, int] | tuple[Seen, int, int]  # a tensor (or a pair with one TMA map) and its place in a plan
STAMP = 1 << 61  # among a launch's scalars: stands for a number that no other launch has
NO_NUMBERS: tuple[float | None, ...] = ()

# The places of a plan's tensors: its result, its scratch memory, and then the call's inputs. Further parts of the
# scratch memory come last, and are counted from the end: -1 is the last.
OUT, SCRATCH, INPUTS = range(3)


class FreedOperandError(RuntimeError):
    """An operand's storage was freed, as a sharded parameter's is between its uses."""


class Cache(dict[Any, Value]):
    """A dictionary that is emptied when it is full, since entries can be made again. `clear_caches` empties all."""

    __slots__ = ("_most",)
    _all: list[Cache[Any]] = []  # noqa: RUF012

    def __init__(self, most: int = 8192, *, listed: bool = True) -> None:
        """most: entries. listed: whether `clear_caches` empties it; False for a cache that another one holds."""
        super().__init__()
        self._most = most
        if listed:
            Cache._all.append(self)

    def keep(self, key: Hashable, value: Value) -> Value:
        if len(self) >= self._most:
            self.clear()
        self[key] = value
        return value


def clear_caches() -> None:
    """Forget every plan and every bound kernel of this process."""
    for cache in Cache._all:
        cache.clear()


@dataclass(frozen=True, slots=True)
class Step:
    """One launch. A call fills in the addresses and numbers."""

    kernel: BoundKernel
    programs: int
    arguments: tuple[Any, ...]  # all that the kernel's launcher takes
    addressed: tuple[tuple[int, int], ...]  # which of them are addresses, and the places of those tensors
    described: tuple[tuple[slice, tuple[int, ...], Callable[..., Sequence[Any]]], ...]  # and which are TMA maps
    numbered: tuple[tuple[int, int], ...]  # and which are a call's numbers
    stamped: int | None = None  # and which is this launch's stamp


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches of one problem on one device."""

    dispatch: Dispatch
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    index: int
    scratch: int  # float32 elements
    steps: tuple[Step, ...]
    parts: tuple[int, ...] = ()  # of the scratch memory: where they begin, in bytes
    is_cuda: bool = False  # and no GPU is simulated

    @classmethod
    def of(
        cls, dispatch: Dispatch, shape: Sequence[int], dtype: torch.dtype, device: torch.device, steps: Sequence[Step],
        scratch: int = 0, parts: Sequence[int] = (),
    ) -> Plan:  # fmt: skip
        """Make a plan whose result is contiguous."""
        index, is_cuda = devices.index_of(device), device.type == "cuda"
        return cls(dispatch, *contiguous(shape), dtype, device, index, scratch, tuple(steps), tuple(parts), is_cuda)

    def run(
        self, inputs: Sequence[Tensor | None], out: Tensor | None = None, numbers: tuple[float | None, ...] = NO_NUMBERS
    ) -> Tensor:
        """Launch on these inputs and return `out`, or new memory where it is None."""
        index = self.index
        if index != devices.current_device():
            with torch.cuda.device(index):
                return self.run(inputs, out, numbers)
        if out is None and self.is_cuda:
            out = _empty_strided_cuda(self.shape, self.strides, self.dtype)
        elif out is None:
            out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        scratch = torch.empty(self.scratch, dtype=torch.float32, device=self.device) if self.scratch else None
        tensors: Any = (out, scratch, *inputs)
        if self.parts and scratch is not None:
            tensors += tuple([scratch[begin // 4 :] for begin in self.parts])
        for step in self.steps:
            arguments = list(step.arguments)
            for at, place in step.addressed:
                arguments[at] = address = tensors[place].data_ptr()
                if not address:
                    raise self._freed()
            for those, places, describe in step.described:
                address = tensors[places[0]].data_ptr()
                pair = (address, tensors[places[1]].data_ptr()) if len(places) > 1 else None
                if not address or (pair and not pair[1]):
                    raise self._freed()
                arguments[those] = describe(pair or address)
            if numbers:
                for at, which in step.numbered:
                    arguments[at] = numbers[which]
            if step.stamped is not None:
                arguments[step.stamped] = next(_stamps)
            step.kernel.launch(index, step.programs, arguments)
        if dispatch.active:
            dispatch.record(self.dispatch)
        return out

    def _freed(self) -> FreedOperandError:
        return FreedOperandError(f"isogemm.{self.dispatch.op}: an operand has no memory: its storage was freed")

    def of_inputs(self, places: Sequence[int | None]) -> Plan:
        """The same launches of other inputs, among which the plan's own are at these places."""

        def moved(place: int) -> int:
            return place if place < INPUTS else INPUTS + cast(int, places[place - INPUTS])

        steps = [
            replace(
                step,
                addressed=tuple((at, moved(place)) for at, place in step.addressed),
                described=tuple((at, tuple(map(moved, those)), describe) for at, those, describe in step.described),
            )
            for step in self.steps
        ]
        return replace(self, steps=tuple(steps))


# Begins anywhere, so that nothing left in memory by another process is taken for a stamp. A launch may count up from
# its stamp to the next one.
_stamps = itertools.count(STAMP + (secrets.randbits(38) << 22), 1 << 22)
plans: Cache[Plan] = Cache()  # by operation and all that its plan depends on
_kernels: Cache[BoundKernel] = Cache(1 << 16)

# As torch.empty_strided on the current GPU, at half its cost.
_empty_strided_cuda: Callable[..., Tensor] = private.find("torch._C._dynamo.guards:_empty_strided_cuda") or (
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device="cuda")
)


def compiled() -> int:
    """Number of kernels that are ready to launch."""
    return len(_kernels)


def make_step(
    launch: Launch, places: Sequence[Place | None], device: torch.device, *, in_capture: bool = False
) -> Step:
    """Return one launch of a plan, compiled if needed; `places` are the kernel's first arguments."""
    index = devices.index_of(device)
    bound = compiled_for(launch, [place and place[0] for place in places], device, in_capture=in_capture)
    arguments: list[Any] = []
    addressed: list[tuple[int, int]] = []
    described: list[tuple[slice, tuple[int, ...], Callable[..., Sequence[Any]]]] = []
    for place, seen in itertools.zip_longest(places, launch.maps):
        at = len(arguments)
        arguments += [None] * (1 if seen is None else bound.described_by(seen))
        if place is None:
            continue
        if seen is not None:
            described.append((slice(at, len(arguments)), place[1:], bound.describer(len(described), seen, index)))
        else:
            addressed.append((at, place[1]))
    stamped = len(arguments) + launch.scalars.index(STAMP) if STAMP in launch.scalars else None
    first_number = len(arguments) + len(launch.scalars)
    arguments += (*launch.scalars, *launch.numbers, *bound.constants)
    new = {at: place for place, at in enumerate(bound.taken(range(len(arguments))))}
    numbered = [(first_number + which, which) for which, _ in enumerate(launch.numbers)]
    return Step(
        bound,
        launch.programs,
        tuple(bound.taken(arguments)),
        tuple((new[at], place) for at, place in addressed),
        tuple((slice(new[at.start], new[at.stop - 1] + 1), those, describe) for at, those, describe in described),
        tuple((new[at], which) for at, which in numbered if at in new),
        None if stamped is None else new[stamped],
    )


def compiled_for(
    launch: Launch, seen: Sequence[Seen | None], device: torch.device, *, tensors: Sequence[Tensor | None] = (),
    in_capture: bool = False,
) -> BoundKernel:  # fmt: skip
    """Return the launch's kernel, compiled for tensors of these dtypes and alignments.

    tensors: to compile for, instead of dummies. in_capture: also compile while a CUDA graph is captured, for operations
    that have a fallback.
    """
    parameters = launch.kernel.params[len(seen) : len(seen) + len(launch.scalars)]
    key = (
        launch.kernel, devices.index_of(device), tuple(launch.constants.values()), tuple(launch.options.items()),
        tuple(seen), tuple(each and each.block for each in launch.maps),
        tuple(itertools.starmap(_seen_by_triton, zip(parameters, launch.scalars, strict=True))),
    )  # fmt: skip
    bound = _kernels.get(key)
    if bound is None:
        if not in_capture and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "nothing can be compiled while a CUDA graph is captured: call isogemm.warmup, or the operation, before"
            )
        with torch.cuda.device(device):
            like = tensors or [each and _dummy(*each, device) for each in seen]
            bound = _kernels.keep(key, launch.bind(*like))
    return bound


def _seen_by_triton(parameter: Any, scalar: object) -> object:
    """What Triton specialises on in a scalar: its type, and unless opted out whether it is 1 or a multiple of 16."""
    if not isinstance(scalar, int):
        return type(scalar)
    wide = scalar >= 2**31
    return wide if parameter.do_not_specialize else (scalar == 1, scalar % 16 == 0, wide)


def _dummy(dtype: torch.dtype, aligned: bool, device: torch.device) -> Tensor:
    """Dummy tensor used for specialisation."""
    some = torch.empty(16, dtype=dtype, device=device)
    return some if aligned else some[1:]


def run_launch(launch: Launch, tensors: Sequence[Tensor | None]) -> None:
    """Run one launch on the tensors' device."""
    device = next(each for each in tensors if each is not None).device
    index = devices.index_of(device)
    seen = [each if each is None else seen_of(each) for each in tensors]
    bound = compiled_for(launch, seen, device, tensors=tensors)
    addresses = [each if each is None else each.data_ptr() for each in tensors]
    with torch.cuda.device(index):
        bound(index, launch.programs, *addresses, *launch.scalars)


def seen_of(x: Tensor) -> Seen:
    return x.dtype, x.data_ptr() % 16 == 0


def placed(x: Tensor) -> Tensor:
    """Return x contiguous and 16-byte aligned: the order of a row's sums depends on how it is loaded."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def contiguous(shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a shape and its contiguous strides."""
    strides = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)
    return tuple(shape), tuple(strides)[::-1]
