"""Figures over many points, shared by the report and the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from isogemm.bench.ceilings import FAMILY as CEILINGS
from isogemm.bench.store import Row
from isogemm.bench.views import FamilyView


@dataclass(frozen=True)
class Speedups:
    """Speed-up over torch of a set of points."""

    points: int
    geomean: float
    least: float
    most: float
    worst: Row
    best: Row
    behind: int  # points below 1.00x


def is_behind(ratio: float) -> bool:
    """Whether the ratio prints as below 1.00x."""
    return round(ratio, 2) < 1


def geomean(values: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def speedups(rows: Iterable[Row], variant: str = "isogemm") -> Speedups | None:
    """The variant's speed-ups over torch; None where no row has both."""
    compared = [(row, ratio) for row in rows if (ratio := row.speedup_of(variant)) is not None]
    if not compared:
        return None
    values = [ratio for _, ratio in compared]
    least, most = min(values), max(values)
    worst, best = (compared[values.index(each)][0] for each in (least, most))
    return Speedups(len(values), geomean(values), least, most, worst, best, sum(map(is_behind, values)))


def peers(rows: Iterable[Row]) -> list[str]:
    """The variants measured beside isogemm and torch."""
    return list(dict.fromkeys(name for row in rows for name in row.times_us if name not in ("isogemm", "torch")))


def by_gpu(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by device, CPUs last."""
    return dict(sorted(_split(rows, lambda row: row.gpu).items(), key=lambda item: item[0].startswith("CPU")))


def by_family(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by family, the ceilings left out."""
    return _split((row for row in rows if row.family != CEILINGS), lambda row: row.family)


def by_group(rows: Iterable[Row], view: FamilyView) -> dict[str, list[Row]]:
    return _split(rows, lambda row: view.group_label(row.op, row.params))


def _split(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def columns(rows: Iterable[Row], view: FamilyView) -> list[int | str]:
    return sorted({view.column_value(row.params) for row in rows}, key=sort_key)


def shapes(rows: Iterable[Row], view: FamilyView) -> list[str]:
    """Labels in order of first appearance, which is the order the family measures them in."""
    return list(dict.fromkeys(view.shape_label(row.params) for row in rows))


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def rate_text(flops_per_s: float) -> str:
    """Text such as 4.25 TFLOP/s."""
    for unit, name in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if flops_per_s >= unit:
            return f"{flops_per_s / unit:.3g} {name}FLOP/s"
    return f"{flops_per_s:.3g} FLOP/s"


def sort_key(value: int | str) -> tuple[bool, float, str]:
    """Numbers in order, then text."""
    return (False, value, "") if isinstance(value, int) else (True, 0, value)
