"""Markdown tables made from measurements, and kept in place between markers in a document.

A document says where: everything between `<!-- figures:NAME -->` and `<!-- /figures -->` is generated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from isogemm.bench import ceilings, summary
from isogemm.bench.store import Row, newest
from isogemm.bench.views import FamilyView, number_type, view_of

_MARKED = re.compile(r"(<!-- figures:(?P<name>[\w.-]+) -->\n)(?P<body>.*?)(<!-- /figures -->)", re.DOTALL)
_ANY_MARKER = re.compile(r"<!-- /?figures\b.*?-->")


def tables(rows: Iterable[Row], views: Iterable[FamilyView] = ()) -> dict[str, str]:
    """The tables by name, per family: `FAMILY-headline`, `-speedup`, `-bandwidth`, `-errors`, and `-PEER` (such as
    `gemm-fixed-tile`) for each variant beside isogemm and torch, unless `-speedup` has them; `-deferred` and `-steps`
    where they were measured. And `ceilings`.
    """
    latest, views = newest(rows), tuple(views)
    made: dict[str, str] = {}
    for family, mine in summary.by_family(latest).items():
        view = view_of(family, mine, views)
        for gpu, part in summary.by_gpu(mine).items():
            limits, measured_on = ceilings.read(latest, gpu), source(gpu, [row.env for row in part])
            parts = {
                "headline": headline(part, view, limits),
                "speedup": against(part, view) if view.against else speedup(part, view),
                "bandwidth": bandwidth(part, view, limits),
                "errors": errors(part, view),
            }
            if not view.against:
                parts |= {peer.replace(" ", "-"): speedup(part, view, peer) for peer in summary.peers(part)}
            if cost := deferred(part):
                parts["deferred"] = cost
            if view.steps:
                parts["steps"] = steps(part, view, limits)
            for name, text in parts.items():
                before = made.get(f"{family}-{name}")
                made[f"{family}-{name}"] = ("" if before is None else f"{before}\n") + f"{measured_on}\n\n{text}"
    measured = [row for row in latest if row.family == ceilings.FAMILY]
    if measured:
        made["ceilings"] = _ceilings(measured)
    return made


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


def headline(rows: Sequence[Row], view: FamilyView, limits: ceilings.Ceilings) -> str:
    """One line per group: speed-up over torch, the peers', bandwidth at the largest column, memory, CPU time."""
    head = ["", "torch's call", "points", "geomean", "min", "max"]
    head += [f"{view.peer_label(peer)}, geomean (min)" for peer in summary.peers(rows)]
    head += ["of copy bandwidth, median (range)", "peak memory", "CPU time per call"]
    lines = ([each.text for each in line] for line in headline_cells(rows, view, limits))
    return markdown(head, ([*line[:6], *line[7:]] for line in lines))


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


def speedup(rows: Sequence[Row], view: FamilyView, variant: str = "isogemm") -> str:
    """One table per group: a line per shape, a column per column value, speed-up over torch in the cells."""

    def table(group: Sequence[Row]) -> str:
        cells = {
            (view.shape_label(row.params), view.column_value(row.params)): f"{ratio:.2f}x"
            for row in group
            if (ratio := row.speedup_of(variant)) is not None
        }
        columns = summary.columns(group, view)
        head = [" x ".join(view.shape), *(f"{view.column} {column}".strip() for column in columns)]
        body = [
            [shape, *(cells.get((shape, column), "") for column in columns)] for shape in summary.shapes(group, view)
        ]
        return markdown(head, body)

    return _by_group((row for row in rows if variant in row.times_us), view, table)


def _by_group(rows: Iterable[Row], view: FamilyView, table: Callable[[Sequence[Row]], str]) -> str:
    """A table for each group, with its name above it."""
    return "\n".join(f"**{label}**\n\n{table(group)}" for label, group in summary.by_group(rows, view).items())


def against(rows: Sequence[Row], view: FamilyView) -> str:
    """One table per group: a line per shape, a column per rival, isogemm's speed-up over it in the cells."""

    def table(group: Sequence[Row]) -> str:
        rivals = [name for name in ("torch", *summary.peers(group)) if any(name in row.times_us for row in group)]
        body = []
        for row in group:
            cells = (ratio_cell(_in_torchs_place(row, rival).speedup).text for rival in rivals)
            body.append([view.shape_label(row.params), *cells])
        return markdown([" x ".join(view.shape), *map(view.peer_label, rivals)], body)

    return _by_group(rows, view, table)


def _peer_cell(rows: Iterable[Row], peer: str, view: FamilyView) -> Cell:
    """isogemm's speed-up over the peer, or the peer's over torch, as the view has it."""
    if view.against:
        speed = summary.speedups(_in_torchs_place(row, peer) for row in rows)
    else:
        speed = summary.speedups(rows, peer)
    return Cell("") if speed is None else Cell(f"{speed.geomean:.2f}x ({speed.least:.2f}x)", speed.geomean)


def _in_torchs_place(row: Row, rival: str) -> Row:
    """The row as if `rival` were torch; without torch where it has none."""
    times = {name: each for name, each in row.times_us.items() if name != "torch"}
    if rival in row.times_us:
        times["torch"] = row.times_us[rival]
    return replace(row, times_us=times)


def deferred(rows: Iterable[Row]) -> str:
    """The cost of deferring: CPU time of each variant, and the extra time per deferred operation."""
    body = []
    names = ("isogemm", "torch", "fused calls")
    for row in rows:
        if "deferred" not in row.info:
            continue
        cpu_us = [median((row.cpu_us or row.times_us)[name]) for name in names]
        extra = ((cpu_us[0] - other) / int(row.info["deferred"]) for other in cpu_us[1:])
        label = f"{row.info['torch call']}, {number_type(row.params)}"
        body.append([label, *(f"{us:.1f} us" for us in cpu_us), *(f"{us:.1f} us" for us in extra)])
    if not body:
        return ""
    head = ["CPU time", "autofuse", "plain code", "fused calls"]
    head += [f"more per deferred operation than {other}" for other in head[2:]]
    return markdown(head, body)


def steps(rows: Sequence[Row], view: FamilyView, limits: ceilings.Ceilings) -> str:
    """One table per group, a line per training step: times, speed-ups, memory, and the distance from its arithmetic."""

    def table(group: Sequence[Row]) -> str:
        call = group[0].info.get("torch call", "torch")
        ours = ("isogemm", "isogemm eager", "isogemm + compile")
        names = {name: name for name in ours} | {"torch": call, "torch eager": "torch eager"}
        head = [" x ".join(view.shape), *(f"{name}, ms" for name in names.values())]
        head += [f"over {call}" if variant == "isogemm" else f"{variant} over {call}" for variant in ours]
        head += ["over torch eager", "peak MiB", f"of {call}'s", "of torch eager's"]
        head += ["kept, bytes a token and layer", "arithmetic, ms", "times its arithmetic"]
        body = []
        for row in group:
            times = (summary.digits(row.us[name] / 1e3) if name in row.us else "" for name in names)
            ratios = [row.speedup_of(variant) for variant in ours] + [_in_torchs_place(row, "torch eager").speedup]
            peak, kept = (row.info.get(f"isogemm {name}", "") for name in ("peak MiB", "kept bytes"))
            memory = peak, *(memory_text([row], rival) for rival in ("torch", "torch eager")), kept
            floor = limits.arithmetic_us(row)
            arithmetic = ("", "") if floor is None else (summary.digits(floor / 1e3), f"{row.best_us / floor:.1f}x")
            shown = (ratio_cell(ratio).text for ratio in ratios)
            body.append([view.shape_label(row.params), *times, *shown, *memory, *arithmetic])
        return markdown(head, body)

    return _by_group(rows, view, table)


def bandwidth(rows: Sequence[Row], view: FamilyView, limits: ceilings.Ceilings) -> str:
    """Fractions of copy bandwidth at the largest column: a line per shape, a column per group."""
    largest = max((view.column_value(row.params) for row in rows), key=summary.sort_key, default="")
    cells: dict[str, dict[str, str]] = {}
    for label, group in summary.by_group(rows, view).items():
        for row in group:
            reached = limits.bandwidth_fraction(row)
            if view.column_value(row.params) == largest and reached is not None:
                cells.setdefault(view.shape_label(row.params), {})[label] = f"{reached:.0%}"
    labels = list(dict.fromkeys(label for line in cells.values() for label in line))
    head = [f"{' x '.join(view.shape)}, {view.column} {largest}", *labels]
    return markdown(head, ([shape, *(line.get(label, "") for label in labels)] for shape, line in cells.items()))


def errors(rows: Sequence[Row], view: FamilyView) -> str:
    """One line per group: the largest error of each variant against fp64, as the family's check measures it."""
    groups = summary.by_group((row for row in rows if row.error), view)
    variants = list(dict.fromkeys(name for group in groups.values() for row in group for name in row.error))
    body = []
    for label, group in groups.items():
        largest = (max((row.error[name] for row in group if name in row.error), default=None) for name in variants)
        body.append([label, *(cell(each, ".1e").text for each in largest)])
    return markdown(["", *variants], body)


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


def rendered(text: str, tables: Mapping[str, str]) -> str:
    """Return the document with every marked place filled in."""

    def fill(match: re.Match[str]) -> str:
        name, body = match["name"], match["body"]
        if _ANY_MARKER.search(body):
            raise ValueError(f"figures:{name} has no closing <!-- /figures -->")
        if name not in tables:
            raise ValueError(f"figures:{name} is not measured; there are: {', '.join(tables) or 'none'}")
        return f"{match[1]}\n{tables[name].strip()}\n\n{match[4]}"

    filled = _MARKED.sub(fill, text)
    stray = _ANY_MARKER.search(_MARKED.sub("", filled))
    if stray:
        raise ValueError(f"{stray[0]} stands alone; expected <!-- figures:NAME --> ... <!-- /figures -->")
    return filled


def source(gpu: str, environments: Sequence[Mapping[str, str]]) -> str:
    """The device, versions, commits and dates of measurements, in one line."""
    facts = [
        f"{name} {' and '.join(sorted({env[name] for env in environments}))}"
        for name in ("torch", "triton", "driver", "commit")
    ]
    dates = sorted({env["date"][:10] for env in environments})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{gpu}: {', '.join([*facts, span])}."


def _ceilings(rows: Sequence[Row]) -> str:
    limits = {gpu: ceilings.read(rows, gpu) for gpu in summary.by_gpu(rows)}
    numbers = list(dict.fromkeys(number for limit in limits.values() for number in limit.flops_per_s))
    head = ["", "copy, read + write", *(f"mm {number}" for number in numbers)]
    body = []
    for gpu, limit in limits.items():
        copy = "" if limit.bytes_per_s is None else f"{limit.bytes_per_s / 1e9:.0f} GB/s"
        rates = (limit.flops_per_s.get(number) for number in numbers)
        body.append([gpu, copy, *("" if rate is None else summary.rate_text(rate) for rate in rates)])
    return markdown(head, body)
