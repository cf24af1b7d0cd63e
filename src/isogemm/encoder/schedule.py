"""Launches one after another over named arguments, which lie in tensors that are given.

A step names its arguments; a name is a given tensor's, or that of a part of one. What a launcher takes is kept by the
tensors' addresses: a training loop's allocations come back to the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from isogemm.core import device as devices
from isogemm.encoder.layout import Span

if TYPE_CHECKING:
    from isogemm.core.launch import BoundKernel, Launch

_MOST_KEPT = 128  # sets of addresses: the layers of a model that share a plan, and what they pass on


class Part(NamedTuple):
    """Of a buffer, or of another part's bytes."""

    dtype: torch.dtype
    elements: int
    inside: str = ""
    first: int = 0  # element, of its own size, inside that

    @property
    def size(self) -> int:
        return self.elements * self.dtype.itemsize


class Step(NamedTuple):
    """A launch; `name` tells its variants apart, which are compiled for themselves."""

    name: Hashable
    describe: Callable[[], Launch]
    arguments: tuple[str, ...]  # empty for none


_Kernel = tuple["BoundKernel", int, tuple[Any, ...]]  # compiled, its programs and scalars
_Place = tuple[int, int] | None  # which of the given tensors, and the bytes before it there
Bound = dict[Hashable, _Kernel]  # by a step's name


class Schedule:
    """Of one plan; `bound` is what its schedules have compiled."""

    def __init__(
        self, steps: Sequence[Step], given: Sequence[str], parts: Mapping[str, Part],
        buffers: Mapping[str, Mapping[str, int]], index: int, bound: Bound,
    ) -> None:  # fmt: skip
        """buffers: of some that are given, the offsets of the parts in them."""
        from isogemm.core import launch

        self._launching = launch
        self._steps, self._parts, self._index, self._bound = steps, parts, index, bound
        starts = {part: (buffer, at) for buffer, offsets in buffers.items() for part, at in offsets.items()}
        self._places = [[_place(name, parts, starts, given) for name in step.arguments] for step in steps]
        self._pointers = list(dict.fromkeys(place for places in self._places for place in places if place))
        numbers = {place: number for number, place in enumerate([*self._pointers, None])}
        self._pick = [itemgetter(*(numbers[place] for place in places)) for places in self._places]
        self._kernels: list[_Kernel] = []
        self._kept: dict[tuple[int, tuple[int, ...]], list[Callable[[], None]]] = {}

    def run(self, addresses: tuple[int, ...], *tensors: Sequence[Tensor | None]) -> None:
        """On those given, in groups that follow on one another; `addresses_of` them all."""
        launching = self._launching
        if devices.current_device() != self._index:
            with torch.cuda.device(self._index):
                self.run(addresses, *tensors)
            return
        key = launching.current_stream(self._index), addresses
        launches = self._kept.get(key)
        if launches is None or launching.is_heard():
            self._run_anew(key, [each for group in tensors for each in group])
            return
        for launch in launches:
            launch()

    def _run_anew(self, key: tuple[int, tuple[int, ...]], tensors: Sequence[Tensor | None]) -> None:
        stream, addresses = key
        heard, launches = self._launching.is_heard(), []
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
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[key] = launches

    def _compiled(self, step: Step, places: Sequence[_Place], tensors: Sequence[Tensor | None]) -> _Kernel:
        found = self._bound.get(step.name)
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("nothing can be compiled while a CUDA graph is captured: call the layer before")
            launch = step.describe()
            found = launch.bind(*self._arguments(step, places, tensors)), launch.programs, launch.scalars
            self._bound[step.name] = found
        return found

    def _arguments(self, step: Step, places: Sequence[_Place], tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """As tensors, by whose types and alignment Triton compiles."""
        found: list[Tensor | None] = []
        for name, place in zip(step.arguments, places, strict=True):
            given, part = None if place is None else tensors[place[0]], self._parts.get(name)
            if given is not None and place is not None and part is not None:
                given = given.view(-1).view(torch.uint8)[place[1] : place[1] + part.size].view(part.dtype)
            elif given is not None and given.dtype is torch.bool:
                given = given.view(torch.uint8)
            found.append(given)
        return found


def _place(name: str, parts: Mapping[str, Part], starts: Mapping[str, tuple[str, int]], given: Sequence[str]) -> _Place:
    if not name:
        return None
    root, offset = _root(name, parts)
    buffer, start = starts.get(root, (root, 0))
    return given.index(buffer), start + offset


def _root(name: str, parts: Mapping[str, Part]) -> tuple[str, int]:
    """The part or tensor that holds a part, and the bytes before it there."""
    offset = 0
    while name in parts and parts[name].inside:
        part = parts[name]
        name, offset = part.inside, offset + part.first * part.dtype.itemsize
    return name, offset


def spans(steps: Sequence[Step], parts: Mapping[str, Part]) -> dict[str, Span]:
    """Of the parts that are inside no other: when they or what is inside them are needed."""
    touched: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for index, step in enumerate(steps):
        for name in step.arguments:
            root, offset = _root(name, parts)
            if root in parts:
                touched.setdefault(root, []).append(index)
                sizes[root] = max(sizes.get(root, 0), parts[root].size, offset + parts[name].size)
    return {name: Span(sizes[name], found[0], found[-1]) for name, found in touched.items()}


def addresses_of(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    """0 for None."""
    return tuple([0 if each is None else each.data_ptr() for each in tensors])
