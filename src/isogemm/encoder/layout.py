"""Where the parts of a buffer lie. Pure: no device, no tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

ALIGNMENT = 256  # bytes
_Key = TypeVar("_Key")


class Span(NamedTuple):
    """A part's size in bytes, and the first and the last launch that needs it."""

    size: int
    first: int
    last: int

    def overlaps(self, other: Span) -> bool:
        return self.first <= other.last and other.first <= self.last


def in_a_row(sizes: Mapping[_Key, int], alignment: int = ALIGNMENT) -> tuple[dict[_Key, int], int]:
    """Offsets of parts that lie one after another, and their total size. Sizes may be symbolic."""
    offsets: dict[_Key, int] = {}
    end = 0
    for name, size in sizes.items():
        offsets[name] = end
        end += _aligned(size, alignment)
    return offsets, end


def sharing(spans: Mapping[_Key, Span], limit: int | None = None) -> tuple[dict[_Key, int], int]:
    """Offsets of parts that share bytes if no launch needs both, and the total size.

    Largest first, each as low as it can be; one that would end above `limit` is left out.
    """
    offsets: dict[_Key, int] = {}
    for name in sorted(spans, key=lambda name: -spans[name].size):
        span = spans[name]
        taken = sorted((offsets[other], spans[other].size) for other in offsets if span.overlaps(spans[other]))
        offset = 0
        for start, size in taken:
            if offset + span.size <= start:
                break
            offset = max(offset, start + _aligned(size))
        if limit is None or offset + span.size <= limit:
            offsets[name] = offset
    return offsets, max((offset + _aligned(spans[name].size) for name, offset in offsets.items()), default=0)


def _aligned(size: int, alignment: int = ALIGNMENT) -> int:
    return -(-size // alignment) * alignment
