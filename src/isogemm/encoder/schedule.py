"""A fixed sequence of launches over buffers, which lie in a call's tensors.

Prepared launches are cached by the tensors' addresses: a training loop's allocations come back to the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from isogemm.core import device as devices
from isogemm.core.plan import Cache, compiled_for, seen_of
from isogemm.encoder.layout import Span

if TYPE_CHECKING:
    from isogemm.core.launch import BoundKernel, Launch

_MOST_KEPT = 128  # sets of addresses: layers of a model that share a plan differ in them


@dataclass(frozen=True, eq=False)
class Buffer:
    """A launch's argument: a given tensor, scratch memory, or elements inside another buffer."""

    name: str
    dtype: torch.dtype | None = None  # None: a given tensor's own
    elements: int = 0
    inside: Buffer | None = None
    first: int = 0  # offset inside that, in elements of this dtype

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.elements * self.dtype.itemsize if self.dtype else 0

    @property
    def root(self) -> tuple[Buffer, int]:
        """The outermost buffer that holds this one, and this one's offset there in bytes."""
        if self.inside is None or self.dtype is None:
            return self, 0
        root, offset = self.inside.root
        return root, offset + self.first * self.dtype.itemsize


Argument = Buffer | None


class Step(NamedTuple):
    """A launch."""

    describe: Callable[[], Launch]
    arguments: tuple[Argument, ...]  # None: absent


_Kernel = tuple["BoundKernel", int, tuple[Any, ...]]  # compiled, its programs and scalars
_Place = tuple[int, int] | None  # which of the given tensors, and the offset there in bytes


class Schedule:
    """A call's launches, with the place of every argument."""

    def __init__(
        self, steps: Sequence[Step], given: Sequence[Buffer], placed: Mapping[Buffer, Mapping[Buffer, int]], index: int
    ) -> None:
        """placed: for each given tensor, the offsets in bytes of the buffers that lie in it."""
        from isogemm.core import launch

        self._launching = launch
        self._steps, self._index = steps, index
        starts = {buffer: (tensor, at) for tensor, offsets in placed.items() for buffer, at in offsets.items()}
        self._places = [[_place(each, starts, given) for each in step.arguments] for step in steps]
        self._pointers = list(dict.fromkeys(place for places in self._places for place in places if place))
        numbers = {place: number for number, place in enumerate([*self._pointers, None])}
        self._pick = [itemgetter(*(numbers[place] for place in places)) for places in self._places]
        self._kernels: list[_Kernel] = []
        self._kept: Cache[list[Callable[[], None]]] = Cache(_MOST_KEPT, listed=False)

    def run(self, tensors: Sequence[Tensor | None], addresses: tuple[int, ...] = ()) -> None:
        """Launch on the given tensors; addresses: of the first of them, if known."""
        if devices.current_device() != self._index:
            with torch.cuda.device(self._index):
                self.run(tensors, addresses)
            return
        launching, index = self._launching, self._index
        others = tensors[len(addresses) :]
        key = (
            launching.current_stream(index),
            (*addresses, *[0 if each is None else each.data_ptr() for each in others]),
        )
        launches = self._kept.get(key)
        runtime = launching.knobs.runtime  # `launching.has_launch_hooks`, without its frame
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if launches is None or getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            self._run_anew(key, tensors)
            return
        for launch in launches:
            launch()

    def _run_anew(self, key: tuple[int, tuple[int, ...]], tensors: Sequence[Tensor | None]) -> None:
        stream, addresses = key
        heard, launches = self._launching.has_launch_hooks(), []
        if not self._kernels:
            self._kernels = [self._compiled(*each, tensors) for each in zip(self._steps, self._places, strict=True)]
        pointers = [addresses[i] + offset if addresses[i] else None for i, offset in self._pointers]
        pointers.append(None)
        for (kernel, programs, scalars), pick in zip(self._kernels, self._pick, strict=True):
            arguments = pick(pointers) + scalars
            if heard:
                kernel(self._index, programs, *arguments)
            else:
                launches.append(kernel.prepared(stream, programs, arguments))
                launches[-1]()
        if not heard:
            self._kept.keep(key, launches)

    def _compiled(self, step: Step, places: Sequence[_Place], tensors: Sequence[Tensor | None]) -> _Kernel:
        launch, device = step.describe(), next(each for each in tensors if each is not None).device
        arguments = self._arguments(step, places, tensors)
        seen = [None if each is None else seen_of(each) for each in arguments]
        return compiled_for(launch, seen, device, tensors=arguments), launch.programs, launch.scalars

    def _arguments(self, step: Step, places: Sequence[_Place], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The arguments as tensors, whose types and alignment Triton specialises on."""
        found: list[Tensor | None] = []
        for buffer, place in zip(step.arguments, places, strict=True):
            given = None if place is None else tensors[place[0]]
            if given is not None and place is not None and buffer is not None and buffer.dtype is not None:
                given = given.view(-1).view(torch.uint8)[place[1] : place[1] + buffer.size].view(buffer.dtype)
            elif given is not None and given.dtype is torch.bool:
                given = given.view(torch.uint8)
            found.append(given)
        return found


def _place(buffer: Argument, starts: Mapping[Buffer, tuple[Buffer, int]], given: Sequence[Buffer]) -> _Place:
    if buffer is None:
        return None
    root, offset = buffer.root
    tensor, start = starts.get(root, (root, 0))
    return given.index(tensor), start + offset


def spans(steps: Sequence[Step]) -> dict[Buffer, Span]:
    """Lifetimes of the scratch buffers that lie in no other buffer."""
    touched: dict[Buffer, list[int]] = {}
    sizes: dict[Buffer, int] = {}
    for index, step in enumerate(steps):
        for buffer in step.arguments:
            if buffer is None:
                continue
            root, offset = buffer.root
            if root.dtype is not None:
                touched.setdefault(root, []).append(index)
                sizes[root] = max(sizes.get(root, 0), root.size, offset + buffer.size)
    return {buffer: Span(sizes[buffer], found[0], found[-1]) for buffer, found in touched.items()}


def addresses_of(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    """The tensors' addresses, 0 for None."""
    return tuple([0 if each is None else each.data_ptr() for each in tensors])
