"""Memory for the parameters' gradients: parts of one allocation, or a tensor each."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from isogemm.encoder.schedule import Buffer, addresses_of


class Gradients(NamedTuple):
    """Memory of the parameters' gradients, in order; None if not wanted, or if there is no such parameter."""

    tensors: Sequence[Tensor | None]
    added: tuple[bool, ...]  # whether the sums are added to what is there
    memory: Sequence[Tensor | None]  # the tensors, or one that holds them all
    kind: Hashable  # all that the launches depend on

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], added: tuple[bool, ...]) -> Gradients:
        aligned = [each and each % 16 + 1 for each in addresses_of(tensors)]
        return cls(
            tensors, added, tensors, (added, *aligned, *[each if each is None else each.dtype for each in tensors])
        )

    def buffers(self, names: Sequence[str]) -> tuple[list[Buffer], list[Buffer | None]]:
        """The buffers of `memory`, and each named parameter's buffer in them."""
        if self.memory is self.tensors:
            apart = [Buffer(f"d{name}") for name in names]
            return apart, [None if each is None else buffer for buffer, each in zip(apart, self.tensors, strict=True)]
        together = Buffer("gradients")
        firsts = accumulate((0 if each is None else each.numel() for each in self.tensors), initial=0)
        found = [
            None if each is None else Buffer(f"d{name}", each.dtype, each.numel(), together, first)
            for name, each, first in zip(names, self.tensors, firsts, strict=False)
        ]
        return [together], found


class Division:
    """How gradients of these shapes are allocated: together, or one by one if some would be unaligned."""

    def __init__(self, shapes: Sequence[tuple[int, ...] | None], dtype: torch.dtype) -> None:
        self._shapes, self._dtype = shapes, dtype
        wanted = [shape for shape in shapes if shape is not None]
        self._sizes = [math.prod(shape) for shape in wanted]
        self._elements = sum(self._sizes)
        self._matrices = [(place, shape) for place, shape in enumerate(wanted) if len(shape) > 1]
        self._absent = [place for place, shape in enumerate(shapes) if shape is None]
        self._aligned = not any(size * dtype.itemsize % 16 for size in self._sizes)
        self._added = (False,) * len(shapes)
        self._kind = tuple(shape is not None for shape in shapes)

    def allocated(self, device: torch.device) -> Gradients:
        """Uninitialised gradients. Each tensor has its own version counter, as if it were alone."""
        if not self._aligned:
            apart = [
                None if each is None else torch.empty(each, dtype=self._dtype, device=device) for each in self._shapes
            ]
            return Gradients.of(apart, self._added)
        together = torch.empty(self._elements, dtype=self._dtype, device=device)
        tensors: list[Tensor | None] = list(together.unsafe_split_with_sizes(self._sizes))
        for place, shape in self._matrices:
            tensors[place] = tensors[place].view(*shape)  # type: ignore[union-attr]
        for place in self._absent:
            tensors.insert(place, None)
        return Gradients(tensors, self._added, (together,), self._kind)
