"""Markdown tables made from measurements, and kept in place between markers in a document.

A document says where: everything between `<!-- figures:NAME -->` and `<!-- /figures -->` is generated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from isogemm.bench import ceilings, summary
from isogemm.bench.store import Row, newest
from isogemm.bench.views import FamilyView, view_of

_MARKED = re.compile(r"(<!-- figures:(?P<name>[\w.-]+) -->\n)(?P<body>.*?)(<!-- /figures -->)", re.DOTALL)
_ANY_MARKER = re.compile(r"<!-- /?figures\b.*?-->")


def tables(rows: Iterable[Row], views: Iterable[FamilyView] = ()) -> dict[str, str]:
    """By name: `FAMILY-headline`, `FAMILY-speedup` and `FAMILY-bandwidth` for every family, and `ceilings`."""
    latest, views = newest(rows), tuple(views)
    made = {}
    for family, mine in summary.by_family(latest).items():
        view = view_of(family, mine, views)
        heads, speeds, bandwidths = [], [], []
        for gpu, part in summary.by_gpu(mine).items():
            limits = ceilings.read(latest, gpu)
            heads.append(f"{_source(part)}\n\n{headline(part, view, limits)}")
            speeds.append(f"{_source(part)}\n\n{speedup(part, view)}")
            bandwidths.append(f"{_source(part)}\n\n{bandwidth(part, view, limits)}")
        made[f"{family}-headline"] = "\n".join(heads)
        made[f"{family}-speedup"] = "\n".join(speeds)
        made[f"{family}-bandwidth"] = "\n".join(bandwidths)
    measured = [row for row in latest if row.family == ceilings.FAMILY]
    if measured:
        made["ceilings"] = _ceilings(measured)
    return made


def headline(rows: Sequence[Row], view: FamilyView, limits: ceilings.Ceilings) -> str:
    """One line per group: speed-up over torch, bandwidth at the largest batch, CPU time per call."""
    head = ["", "points", "geomean", "min", "max", "of copy bandwidth, median (range)", "CPU time per call"]
    body = []
    for label, group in summary.by_group(rows, view).items():
        speed = summary.speedups(group)
        if speed is None:
            continue
        reached, cpu = summary.bandwidth(group, view, limits), summary.host_cost(group, view)
        body.append(
            [
                label,
                str(speed.points),
                f"{speed.geomean:.2f}x",
                f"{summary.speedup(speed.worst):.2f}x",
                f"{summary.speedup(speed.best):.2f}x",
                "" if reached is None else bandwidth_text(reached, view),
                "" if cpu is None else host_text(cpu, view),
            ]
        )
    return markdown(head, body)


def speedup(rows: Sequence[Row], view: FamilyView) -> str:
    """One table per group: a line per shape, a column per batch, speed-up over torch in the cells."""
    parts = []
    for label, group in summary.by_group(rows, view).items():
        cells = {
            (view.shape_label(row.params), view.column_value(row.params)): f"{row.speedup:.2f}x"
            for row in group
            if row.speedup is not None
        }
        columns = summary.columns(group, view)
        head = [" x ".join(view.shape), *(f"{view.column} {column}".strip() for column in columns)]
        body = [
            [shape, *(cells.get((shape, column), "") for column in columns)] for shape in summary.shapes(group, view)
        ]
        parts.append(f"**{label}**\n\n{markdown(head, body)}")
    return "\n".join(parts)


def bandwidth(rows: Sequence[Row], view: FamilyView, limits: ceilings.Ceilings) -> str:
    """At the largest batch: a line per shape, a column per group, of the copy bandwidth."""
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


def bandwidth_text(reached: summary.Bandwidth, view: FamilyView) -> str:
    where = "" if reached.column == "" else f" at {view.column} {reached.column}"
    span = "" if reached.least == reached.most else f" ({reached.least:.0%} to {reached.most:.0%})"
    return f"{reached.median:.0%}{span}{where}"


def host_text(cost: summary.HostCost, view: FamilyView) -> str:
    where = "" if cost.column == "" else f" at {view.column} {cost.column}"
    mean, worst = f"{cost.geomean:.2f}x", f"{cost.worst:.2f}x"
    return f"{mean}{where}" if mean == worst else f"{mean} (worst {worst}){where}"


def markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table, the first column to the left and the others to the right; empty columns are left out."""
    lines = list(body)
    kept = [i for i, name in enumerate(head) if i == 0 or not lines or any(line[i] for line in lines)]
    marks = [":--" if i == 0 else "--:" for i in kept]
    grid = [[head[i] for i in kept], marks, *([line[i] for i in kept] for line in lines)]
    return "".join(f"| {' | '.join(line)} |\n" for line in grid)


def rendered(text: str, tables: Mapping[str, str]) -> str:
    """The document with every marked place filled in anew."""

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


def refresh(path: Path, tables: Mapping[str, str]) -> bool:
    """Rewrite a document's tables; whether anything changed."""
    before = path.read_text(encoding="utf-8")
    after = rendered(before, tables)
    if after != before:
        path.write_text(after, encoding="utf-8")
    return after != before


def _source(rows: Sequence[Row]) -> str:
    facts = [f"{name} {_distinct(rows, name)}" for name in ("torch", "triton", "driver", "commit")]
    dates = sorted({row.env["date"][:10] for row in rows})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{rows[0].gpu}: {', '.join([*facts, span])}."


def _distinct(rows: Iterable[Row], name: str) -> str:
    return " and ".join(sorted({row.env[name] for row in rows}))


def _ceilings(rows: Sequence[Row]) -> str:
    devices = summary.by_gpu(rows)
    limits = {gpu: ceilings.read(rows, gpu) for gpu in devices}
    numbers = list(dict.fromkeys(number for limit in limits.values() for number in limit.flops_per_s))
    head = ["", "copy, read + write", *(f"mm {number}" for number in numbers)]
    body = []
    for gpu, limit in limits.items():
        copy = "" if limit.bytes_per_s is None else f"{limit.bytes_per_s / 1e9:.0f} GB/s"
        rates = (limit.flops_per_s.get(number) for number in numbers)
        body.append([gpu, copy, *("" if rate is None else summary.rate_text(rate) for rate in rates)])
    return markdown(head, body)
