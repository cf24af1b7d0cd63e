"""What automatic fusion did: the products it fused, and for the others why not."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any, NamedTuple

MOST_ENTRIES = 256  # of each kind: a decorated function whose shapes never repeat must not fill the memory


class Fused(NamedTuple):
    """One launch for a product and what follows it."""

    product: str  # linear [8, 64] x [256, 64] bfloat16
    steps: tuple[str, ...]  # bias, gelu, residual

    def __str__(self) -> str:
        return " + ".join((self.product, *self.steps))


class Left(NamedTuple):
    """A product that was a candidate and was left to torch."""

    product: str
    reason: str

    def __str__(self) -> str:
        return f"{self.product}: {self.reason}"


_REST = f"products beyond the first {MOST_ENTRIES} entries"
_FUSED_REST, _LEFT_REST = Fused(_REST, ()), Left(_REST, "not listed one by one")


class Report:
    """Counts of what was fused and what was left, in the order it first happened.

    The first `MOST_ENTRIES` different entries of each kind are listed; one more entry counts all others.
    """

    # Made on first use: most blocks need one of them.
    @cached_property
    def fused(self) -> Counter[Fused]:
        return Counter()

    @cached_property
    def left(self) -> Counter[Left]:
        return Counter()

    @cached_property
    def repeated(self) -> Counter[Left]:
        """Products computed in a fused launch and once more, since something else read them."""
        return Counter()

    def add_fused(self, entry: Fused) -> None:
        _add(self.fused, entry, _FUSED_REST)

    def add_left(self, product: str, reason: str) -> None:
        _add(self.left, Left(product, reason), _LEFT_REST)

    def add_repeated(self, product: str, reason: str) -> None:
        _add(self.repeated, Left(product, reason), _LEFT_REST)

    def __str__(self) -> str:
        kinds: dict[str, Counter[Any]] = {"fused": self.fused, "left": self.left, "computed twice": self.repeated}
        lines = [
            ", ".join(f"{verb} {entries.total()}" for verb, entries in kinds.items() if verb == "fused" or entries)
        ]
        for verb, entries in kinds.items():
            lines += [f"  {verb} {e}" + (f" (x {count})" if count > 1 else "") for e, count in entries.items()]
        return "\n".join(lines)

    __repr__ = __str__


def _add(entries: Counter[Any], entry: Fused | Left, rest: Fused | Left) -> None:
    count = entries.get(entry, 0)
    if not count and len(entries) >= MOST_ENTRIES:
        entry, count = rest, entries[rest]
    entries[entry] = count + 1
