"""A self-contained HTML report of a demo and of stored measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from isogemm.bench import ceilings, demo, headline, plots, summary
from isogemm.bench.extras import need
from isogemm.bench.plots import Plot
from isogemm.bench.store import Row, newest
from isogemm.bench.summary import Cell
from isogemm.bench.views import FamilyView, view_of
from isogemm.core import files
from isogemm.core.files import AnyPath

Views = Iterable[FamilyView]
Columns = list[tuple[str, Callable[[Row], Cell]]]  # names, and the cell of a point


@dataclass(frozen=True)
class Table:
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Section:
    """A table and plots that are not made of points."""

    title: str
    text: str
    table: Table
    plots: list[Plot]


@dataclass(frozen=True)
class DemoPage:
    """A demo's results on a device; the report starts with them."""

    device: str
    versions: str
    shown: demo.Shown
    banner: str = ""
    recorded: Sequence[headline.Recorded] = ()  # speed of a GPU, where this is none


def write(
    path: AnyPath, rows: Iterable[Row], views: Views = (), sections: Sequence[Section] = (),
    page: DemoPage | None = None,
) -> Path:  # fmt: skip
    """Render the rows to a file."""
    files.write(path, render(rows, views, sections, page).encode())
    return Path(path)


def render(
    rows: Iterable[Row], views: Views = (), sections: Sequence[Section] = (), page: DemoPage | None = None
) -> str:
    """The report as HTML; of points measured more than once, the newest.

    sections: after the devices'. page: before them.
    """
    latest, views = newest(rows), tuple(views)
    jinja2 = need("jinja2")
    source = (resources.files("isogemm.bench") / "templates" / "report.html.j2").read_text(encoding="utf-8")
    env = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    html: str = env.from_string(source).render(
        page=page,
        demo=demo,
        meaning=headline.MEANING,
        devices=[_device(gpu, mine, views) for gpu, mine in summary.by_gpu(latest).items()],
        sections=sections,
        environments=_environments(latest),
        points=sum(row.family != ceilings.FAMILY for row in latest),
    )
    return html


def _device(gpu: str, rows: Sequence[Row], views: Sequence[FamilyView]) -> dict[str, Any]:
    limits = ceilings.read(rows, gpu)
    facts = [f"mm {number}: {summary.rate_text(rate)}" for number, rate in limits.flops_per_s.items()]
    if limits.bytes_per_s is not None:
        facts.insert(0, f"copy, read + write: {limits.bytes_per_s / 1e9:.0f} GB/s")
    families = [_family(mine, view_of(family, mine, views), limits) for family, mine in summary.by_family(rows).items()]
    return {"gpu": gpu, "ceilings": facts, "families": families}


def _family(rows: Sequence[Row], view: FamilyView, limits: ceilings.Ceilings) -> dict[str, Any]:
    speed = summary.speedups(rows)
    return {
        "title": view.title,
        "speed": speed,
        "worst": "" if speed is None else plots.point_label(speed.worst, view),
        "best": "" if speed is None else plots.point_label(speed.best, view),
        "bandwidth": summary.bandwidth_cell(rows, view, limits).text,
        "headline": _headline(rows, view, limits),
        "plots": _plots(rows, view, limits),
        "points": _points(rows, limits),
    }


def _plots(rows: Sequence[Row], view: FamilyView, limits: ceilings.Ceilings) -> list[Plot]:
    made = []
    with need("matplotlib").rc_context(plots.STYLE):
        if limits.bytes_per_s is not None and any(row.flops and row.bytes for row in rows):
            made.append(plots.roofline(rows, view, limits.bytes_per_s, limits.flops_per_s))
        for group in summary.by_group(rows, view).values():
            if summary.speedups(group) is not None:
                made.append(plots.speedup(group, view, limits))
                if view.steps:
                    made.append(plots.steps(group, view, limits))
    return made


def _headline(rows: Sequence[Row], view: FamilyView, limits: ceilings.Ceilings) -> Table:
    names = ["", "points", "geomean", "min", "max", "below 1x"]
    names += [f"{view.peer_label(peer)} (min)" for peer in summary.peers(rows)]
    names += ["of copy bandwidth", "peak memory", "CPU time per call"]
    return _without_empty(
        Table(names, [[label, *rest] for label, _, *rest in summary.headline_cells(rows, view, limits)])
    )


def _points(rows: Sequence[Row], limits: ceilings.Ceilings) -> Table:
    """A line per point, with all that was measured and recorded of it."""

    def by_name(field: str, suffix: str, cell: Callable[[Any], Cell]) -> Columns:
        leading = ("isogemm", "torch")
        found = dict.fromkeys(name for row in rows for name in getattr(row, field))
        names = sorted(found, key=lambda name: leading.index(name) if name in leading else len(leading))
        return [(name + suffix, lambda row, name=name: cell(getattr(row, field).get(name))) for name in names]  # type: ignore[misc]

    columns: Columns = [
        ("op", lambda row: Cell(row.op)),
        *by_name("params", "", lambda value: summary.cell(value, "") if isinstance(value, int) else Cell(value or "")),
        *by_name("times_us", " us", _times),
        ("speed-up", lambda row: summary.ratio_cell(row.speedup)),
        ("GB/s", lambda row: _figure(row.bytes_per_s / 1e9)),
        ("of copy", lambda row: summary.cell(limits.bandwidth_fraction(row), ".0%")),
        ("GFLOP/s", lambda row: _figure(row.flops_per_s / 1e9)),
        *by_name("cpu_us", " CPU us", _times),
        *by_name("error", " error", lambda value: summary.cell(value, ".1e")),
        *by_name("info", "", lambda value: Cell(value or "")),
    ]
    return _without_empty(Table([name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows]))


def _environments(rows: Sequence[Row]) -> Table:
    """The distinct environments, with the points and dates of each."""
    facts = ("gpu", "driver", "torch", "triton", "python", "commit")
    seen: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        seen.setdefault(tuple(row.env[name] for name in facts), []).append(row.env["date"])
    lines = []
    for values, dates in seen.items():
        span = " to ".join(dict.fromkeys((min(dates), max(dates))))
        lines.append([*map(Cell, (*values, span)), summary.cell(len(dates), "")])
    return Table([*facts, "measured", "rows"], lines)


def _without_empty(table: Table) -> Table:
    kept = [i for i, _ in enumerate(table.columns) if any(line[i].text for line in table.rows)]
    return Table([table.columns[i] for i in kept], [[line[i] for i in kept] for line in table.rows])


def _times(values: Sequence[float] | None) -> Cell:
    if values is None:
        return Cell("")
    span = f"{summary.digits(min(values))} to {summary.digits(max(values))} in {len(values)} repeats"
    return Cell(summary.digits(median(values)), median(values), span)


def _figure(value: float) -> Cell:
    return Cell(summary.digits(value), value) if value else Cell("")
