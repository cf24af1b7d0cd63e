"""Cells of the tables that the HTML report and the documents share, and tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from isogemm.bench import ceilings, summary
from isogemm.bench.store import Row
from isogemm.bench.views import FamilyView


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
    return Cell("") if ratio is None else Cell(f"{ratio:.2f}x", ratio, bad=summary.is_behind(ratio))


def headline_cells(rows: Sequence[Row], view: FamilyView, limits: ceilings.Ceilings) -> list[list[Cell]]:
    """A line per group: name, torch's call, points, geomean, min, max, below 1x, peers, bandwidth, memory, CPU time."""
    lines, peers = [], summary.peers(rows)
    for label, group in summary.by_group(rows, view).items():
        if (speed := summary.speedups(group)) is None:
            continue
        lines.append(
            [
                Cell(label),
                Cell(" or ".join(dict.fromkeys(row.info.get("torch call", "") for row in group))),
                cell(speed.points, ""),
                *map(ratio_cell, (speed.geomean, speed.least, speed.most)),
                cell(speed.behind, ""),
                *(_peer_cell(group, peer, view) for peer in peers),
                bandwidth_cell(group, view, limits),
                Cell(memory_text(group)),
                host_cell(group, view),
            ]
        )
    return lines


def _peer_cell(rows: Iterable[Row], peer: str, view: FamilyView) -> Cell:
    """isogemm's speed-up over the peer if the view is `against` it, else the peer's over torch."""
    if view.against:
        speed = summary.speedups(in_torchs_place(row, peer) for row in rows)
    else:
        speed = summary.speedups(rows, peer)
    return Cell("") if speed is None else Cell(f"{speed.geomean:.2f}x ({speed.least:.2f}x)", speed.geomean)


def in_torchs_place(row: Row, rival: str) -> Row:
    """Return the row with the rival's times as torch's; without torch's if the rival was not measured."""
    times = {name: each for name, each in row.times_us.items() if name != "torch"}
    if rival in row.times_us:
        times["torch"] = row.times_us[rival]
    return replace(row, times_us=times)


def bandwidth_cell(rows: Iterable[Row], view: FamilyView, limits: ceilings.Ceilings) -> Cell:
    """The fraction of copy bandwidth of the memory-bound points at the largest column: median and range."""
    bound = [(view.column_value(row.params), row) for row in rows if limits.bandwidth_limit(row) == 1.0]
    largest = max((column for column, _ in bound), key=summary.sort_key, default="")
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
    smallest = min((column for column, _ in measured), key=summary.sort_key)
    ratios = [ratio for column, ratio in measured if column == smallest]
    mean, worst = f"{summary.geomean(ratios):.2f}x", f"{max(ratios):.2f}x"
    text = mean if mean == worst else f"{mean} (worst {worst})"
    return Cell(f"{text}{_at(smallest, view)}", summary.geomean(ratios))


def _at(column: int | str, view: FamilyView) -> str:
    return "" if column == "" else f" at {view.column} {column}"


def markdown(head: Sequence[str], body: Iterable[Sequence[str]], *, texts: int = 1) -> str:
    """A table, the first `texts` columns to the left and the others to the right; empty columns are left out."""
    lines = list(body)
    kept = [i for i, name in enumerate(head) if i == 0 or not lines or any(line[i] for line in lines)]
    marks = [":--" if i < texts else "--:" for i in kept]
    grid = [[head[i] for i in kept], marks, *([line[i] for i in kept] for line in lines)]
    return "".join(f"| {' | '.join(line)} |\n" for line in grid)
