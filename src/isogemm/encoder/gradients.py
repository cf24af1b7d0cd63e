"""Memory for the parameters' gradients: parts of one allocation, or a tensor each."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from isogemm.encoder.schedule import Part, addresses_of

_TOGETHER = "gradients"


class Gradients(NamedTuple):
    """In the order of the parameters, None where nothing is wanted or there is no parameter."""

    tensors: Sequence[Tensor | None]
    added: tuple[bool, ...]  # to which the sums are added
    memory: Sequence[Tensor | None]  # the tensors, or one that holds them all
    kind: Hashable  # all that launches which write there depend on

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], added: tuple[bool, ...]) -> Gradients:
        aligned = [each and each % 16 + 1 for each in addresses_of(tensors)]
        return cls(
            tensors, added, tensors, (added, *aligned, *[each if each is None else each.dtype for each in tensors])
        )

    def given(self, names: Sequence[str]) -> tuple[tuple[str, ...], dict[str, Part]]:
        """What a schedule is given by `memory`, and which parts of it bear these names."""
        if self.memory is self.tensors:
            return tuple(names), {}
        wanted = [(name, each) for name, each in zip(names, self.tensors, strict=True) if each is not None]
        firsts = accumulate((each.numel() for _, each in wanted), initial=0)
        parts = {
            name: Part(each.dtype, each.numel(), _TOGETHER, first)
            for (name, each), first in zip(wanted, firsts, strict=False)
        }
        return (_TOGETHER,), parts


class Division:
    """Of one allocation into tensors of these shapes; of several where it would leave one unaligned."""

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
        """Unwritten. Each tensor counts its own changes, as if it were alone."""
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
