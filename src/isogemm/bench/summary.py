"""Figures over many points, and cells made of them: what the HTML report and the documents' tables share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from isogemm.bench.ceilings import FAMILY as CEILINGS
from isogemm.bench.ceilings import Ceilings
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


@dataclass(frozen=True)
class Cell:
    text: str
    value: float | None = None  # what a numeric column sorts by
    tip: str = ""
    bad: bool = False


def cell(value: float | None, form: str) -> Cell:
    """The value as text, by a format; empty where there is none."""
    return Cell("") if value is None else Cell(format(value, form), value)


def ratio_cell(ratio: float | None) -> Cell:
    return Cell("") if ratio is None else Cell(f"{ratio:.2f}x", ratio, bad=is_behind(ratio))


def headline_cells(rows: Sequence[Row], view: FamilyView, limits: Ceilings) -> list[list[Cell]]:
    """A line per group: name, torch's call, points, geomean, min, max, below 1x, peers, bandwidth, memory, CPU time."""
    lines = []
    for label, group in by_group(rows, view).items():
        if (speed := speedups(group)) is None:
            continue
        lines.append(
            [
                Cell(label),
                Cell(" or ".join(dict.fromkeys(row.info.get("torch call", "") for row in group))),
                cell(speed.points, ""),
                *map(ratio_cell, (speed.geomean, speed.least, speed.most)),
                cell(speed.behind, ""),
                *(_peer_cell(group, peer, view) for peer in peers(rows)),
                bandwidth_cell(group, view, limits),
                Cell(memory_text(group)),
                host_cell(group, view),
            ]
        )
    return lines


def _peer_cell(rows: Iterable[Row], peer: str, view: FamilyView) -> Cell:
    """isogemm's speed-up over the peer if the view is `against` it, else the peer's over torch."""
    speed = speedups(in_torchs_place(row, peer) for row in rows) if view.against else speedups(rows, peer)
    return Cell("") if speed is None else Cell(f"{speed.geomean:.2f}x ({speed.least:.2f}x)", speed.geomean)


def in_torchs_place(row: Row, rival: str) -> Row:
    """Return the row with the rival's times as torch's; without torch's if the rival was not measured."""
    times = {name: each for name, each in row.times_us.items() if name != "torch"}
    if rival in row.times_us:
        times["torch"] = row.times_us[rival]
    return replace(row, times_us=times)


def bandwidth_cell(rows: Iterable[Row], view: FamilyView, limits: Ceilings) -> Cell:
    """The fraction of copy bandwidth of the memory-bound points at the largest column: median and range."""
    bound = [(view.column_value(row.params), row) for row in rows if limits.bandwidth_limit(row) == 1.0]
    largest = max((column for column, _ in bound), key=sort_key, default="")
    reached = [limits.bandwidth_fraction(row) for column, row in bound if column == largest]
    fractions = [each for each in reached if each is not None]
    if not fractions:
        return Cell("")
    least, most = min(fractions), max(fractions)
    span = "" if least == most else f" ({least:.0%} to {most:.0%})"
    return Cell(f"{median(fractions):.0%}{span}{_at(largest, view)}", median(fractions))


def memory_text(rows: Iterable[Row], rival: str = "torch") -> str:
    """isogemm's peak memory over the rival's, where both were measured; the largest of the rows."""
    names = "isogemm peak MiB", f"{rival} peak MiB"
    measured = [[float(row.info[name]) for name in names] for row in rows if all(name in row.info for name in names)]
    return f"{max(ours / torchs for ours, torchs in measured):.2f}x" if measured else ""


def host_cell(rows: Iterable[Row], view: FamilyView) -> Cell:
    """CPU time over torch's at the smallest column: at larger ones the host waits for the device."""
    measured = [(view.column_value(row.params), ratio) for row in rows if (ratio := row.cpu_ratio) is not None]
    if not measured:
        return Cell("")
    smallest = min((column for column, _ in measured), key=sort_key)
    ratios = [ratio for column, ratio in measured if column == smallest]
    mean, worst = f"{geomean(ratios):.2f}x", f"{max(ratios):.2f}x"
    text = mean if mean == worst else f"{mean} (worst {worst})"
    return Cell(f"{text}{_at(smallest, view)}", geomean(ratios))


def _at(column: int | str, view: FamilyView) -> str:
    return "" if column == "" else f" at {view.column} {column}"


def markdown(head: Sequence[str], body: Iterable[Sequence[str]], *, texts: int = 1) -> str:
    """A table, the first `texts` columns to the left and the others to the right; empty columns are left out."""
    lines = list(body)
    kept = [i for i, name in enumerate(head) if i == 0 or not lines or any(line[i] for line in lines)]
    marks = [":--" if i < texts else "--:" for i in kept]
    grid = [[head[i] for i in kept], marks, *([line[i] for i in kept] for line in lines)]
    return "".join(f"| {' | '.join(line)} |\n" for line in grid)
