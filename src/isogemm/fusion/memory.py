"""Address ranges of tensors, and an index from memory to the pending products that read it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

import torch

Memory = tuple[int, int]  # the addresses of its first byte and of the one after its last
_Note = TypeVar("_Note")


def memory_of(x: torch.Tensor) -> Memory:
    """The address range of x's storage. Aliases made by NumPy and DLPack overlap it, with storages of their own."""
    try:
        storage = x.untyped_storage()
        start = storage.data_ptr()
        return start, start + max(storage.nbytes(), 1)  # empty storages share one range, at address 0
    except (NotImplementedError, RuntimeError, ValueError):  # it has no storage, or not yet
        return -id(x), -id(x) + 1


class Pieces(Generic[_Note]):
    """Disjoint address ranges in ascending order, each with a list of notes; lookup by bisection."""

    __slots__ = ("_ends", "_starts", "notes")

    def __init__(self, noted: Iterable[tuple[Memory, _Note]] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.notes: list[list[_Note]] = []
        for memory, note in noted:
            self.add(memory, note)

    def add(self, memory: Memory, note: _Note) -> None:
        """Add a note to a range. Pieces that it overlaps are merged."""
        start, end = memory
        those = self._overlapping(memory)
        if those:
            start, end = min(start, self._starts[those.start]), max(end, self._ends[those.stop - 1])
        notes = [note]
        if len(those) == 1:  # the usual case: one storage
            notes = self.notes[those.start]
            notes.append(note)
        elif those:
            notes = [each for those_of_one in self.notes[those.start : those.stop] for each in those_of_one] + notes
        part = slice(those.start, those.stop)
        self._starts[part], self._ends[part], self.notes[part] = [start], [end], [notes]

    def overlap(self, memory: Memory) -> bool:
        return bool(self._overlapping(memory))

    def on(self, memory: Memory) -> Iterator[_Note]:
        """Yield the notes on the pieces that a range overlaps."""
        for index in self._overlapping(memory):
            yield from self.notes[index]

    def _overlapping(self, memory: Memory) -> range:
        first = bisect_right(self._ends, memory[0])
        return range(first, max(first, bisect_left(self._starts, memory[1])))
