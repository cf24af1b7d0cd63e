"""A self-contained HTML report of a demo and of stored measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import median

from isogemm.bench import ceilings, demo, files, headline, plots, summary, tables
from isogemm.bench.extras import need
from isogemm.bench.files import AnyPath
from isogemm.bench.store import Row, newest
from isogemm.bench.views import FamilyView, view_of


@dataclass(frozen=True)
class Cell:
    text: str
    value: float | None = None  # what a numeric column sorts by
    tip: str = ""
    bad: bool = False


@dataclass(frozen=True)
class Table:
    columns: list[str]
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Key:
    """An entry of a plot's legend."""

    text: str
    colour: str = ""
    mark: str = "dot"  # or "line"


@dataclass(frozen=True)
class Plot:
    title: str
    svg: str
    keys: list[Key]


@dataclass(frozen=True)
class FamilySection:
    title: str
    speed: summary.Speedups | None
    worst: str
    best: str
    bandwidth: str
    headline: Table
    plots: list[Plot]
    points: Table


@dataclass(frozen=True)
class Section:
    """A table and plots that are not made of points."""

    title: str
    text: str
    table: Table
    plots: list[Plot]


@dataclass(frozen=True)
class DeviceSection:
    gpu: str
    ceilings: list[str]
    families: list[FamilySection]


@dataclass(frozen=True)
class DemoPage:
    """A demo's results on a device; the report starts with them."""

    device: str
    versions: str
    shown: demo.Shown
    banner: str = ""
    recorded: Sequence[headline.Recorded] = ()  # speed of a GPU, where this is none


def write(
    path: AnyPath,
    rows: Iterable[Row],
    views: Iterable[FamilyView] = (),
    sections: Sequence[Section] = (),
    page: DemoPage | None = None,
) -> Path:
    """Render the rows to a file."""
    files.write(path, render(rows, views, sections, page).encode())
    return Path(path)


def render(
    rows: Iterable[Row],
    views: Iterable[FamilyView] = (),
    sections: Sequence[Section] = (),
    page: DemoPage | None = None,
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


def _device(gpu: str, rows: Sequence[Row], views: Sequence[FamilyView]) -> DeviceSection:
    limits = ceilings.read(rows, gpu)
    facts = [f"mm {number}: {summary.rate_text(rate)}" for number, rate in limits.flops_per_s.items()]
    if limits.bytes_per_s is not None:
        facts.insert(0, f"copy, read + write: {limits.bytes_per_s / 1e9:.0f} GB/s")
    families = [_family(mine, view_of(family, mine, views), limits) for family, mine in summary.by_family(rows).items()]
    return DeviceSection(gpu, facts, families)


def _family(rows: Sequence[Row], view: FamilyView, limits: ceilings.Ceilings) -> FamilySection:
    speed, reached = summary.speedups(rows), summary.bandwidth(rows, view, limits)
    return FamilySection(
        title=view.title,
        speed=speed,
        worst="" if speed is None else plots.point_label(speed.worst, view),
        best="" if speed is None else plots.point_label(speed.best, view),
        bandwidth="" if reached is None else tables.bandwidth_text(reached, view),
        headline=_headline(rows, view, limits),
        plots=_plots(rows, view, limits),
        points=_points(rows, limits),
    )


def _plots(rows: Sequence[Row], view: FamilyView, limits: ceilings.Ceilings) -> list[Plot]:
    made = []
    if limits.bytes_per_s is not None and any(row.flops and row.bytes for row in rows):
        keys = [
            Key(
                f"{number or 'points'} ({summary.rate_text(roof)} roof)"
                if (roof := limits.flops_per_s.get(number))
                else f"{number or 'points'} (compute roof not measured)",
                plots.series_colour(index),
            )
            for index, number in enumerate(plots.number_types(rows))
        ]
        keys.append(Key(f"copy bandwidth {limits.bytes_per_s / 1e9:.0f} GB/s", "var(--muted)", "line"))
        columns = summary.columns(rows, view)
        if len(columns) > 1:
            keys.append(Key(f"larger dot: larger {view.column}"))
        made.append(Plot("Roofline", plots.roofline(rows, view, limits.bytes_per_s, limits.flops_per_s), keys))
    for label, group in summary.by_group(rows, view).items():
        if summary.speedups(group) is None:
            continue
        ramp = plots.ramp_colours(summary.columns(group, view))
        keys = [Key(f"{view.column} {value}", colour) for value, colour in ramp.items() if value != ""]
        made.append(Plot(label, plots.speedup(group, view, limits), keys))
        if view.steps:
            keys = [Key(name, plots.series_colour(i)) for i, name in enumerate(plots.step_variants(group))]
            keys.append(Key("tick: the arithmetic at a matmul's rate"))
            made.append(Plot(f"{label}: time and memory", plots.steps(group, view, limits), keys))
    return made


def _headline(rows: Sequence[Row], view: FamilyView, limits: ceilings.Ceilings) -> Table:
    lines, peers = [], summary.peers(rows)
    for label, group in summary.by_group(rows, view).items():
        speed = summary.speedups(group)
        if speed is None:
            continue
        reached, cpu = summary.bandwidth(group, view, limits), summary.host_cost(group, view)
        lines.append(
            [
                Cell(label),
                Cell(str(speed.points), speed.points),
                *map(_speedup, (speed.geomean, speed.least, speed.most)),
                Cell(str(speed.behind), speed.behind),
                *(_peer(tables.peer_speedups(group, peer, view)) for peer in peers),
                Cell("") if reached is None else Cell(tables.bandwidth_text(reached, view), reached.median),
                Cell(tables.memory_text(group)),
                Cell("") if cpu is None else Cell(tables.host_text(cpu, view), cpu.geomean),
            ]
        )
    names = ["", "points", "geomean", "min", "max", "below 1x"]
    names += [f"{view.peer_label(peer)} (min)" for peer in peers]
    return _without_empty(Table([*names, "of copy bandwidth", "peak memory", "CPU time per call"], lines))


def _peer(speed: summary.Speedups | None) -> Cell:
    return Cell(tables.peer_text(speed), None if speed is None else speed.geomean)


def _points(rows: Sequence[Row], limits: ceilings.Ceilings) -> Table:
    params = list(dict.fromkeys(name for row in rows for name in row.params))
    info = list(dict.fromkeys(name for row in rows for name in row.info))
    variants = _variants(name for row in rows for name in row.times_us)
    checked = _variants(name for row in rows for name in row.error)
    hosts = _variants(name for row in rows for name in row.cpu_us)
    names = [
        "op",
        *params,
        *(f"{name} us" for name in variants),
        "speed-up",
        "GB/s",
        "of copy",
        "GFLOP/s",
        *(f"{name} CPU us" for name in hosts),
        *(f"{name} error" for name in checked),
        *info,
    ]
    lines = []
    for row in rows:
        fraction = limits.bandwidth_fraction(row)
        lines.append(
            [
                Cell(row.op),
                *(_param(row.params.get(name, "")) for name in params),
                *(_times(row.times_us.get(name)) for name in variants),
                _speedup(row.speedup),
                _figure(row.bytes_per_s / 1e9),
                Cell("") if fraction is None else Cell(f"{fraction:.0%}", fraction),
                _figure(row.flops_per_s / 1e9),
                *(_times(row.cpu_us.get(name)) for name in hosts),
                *(_error(row.error.get(name)) for name in checked),
                *(Cell(row.info.get(name, "")) for name in info),
            ]
        )
    return _without_empty(Table(names, lines))


def _environments(rows: Sequence[Row]) -> Table:
    """The distinct environments, with the points and dates of each."""
    facts = ("gpu", "driver", "torch", "triton", "python", "commit")
    seen: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        seen.setdefault(tuple(row.env[name] for name in facts), []).append(row.env["date"])
    lines = []
    for values, dates in seen.items():
        first, last = min(dates), max(dates)
        span = first if first == last else f"{first} to {last}"
        lines.append([*(Cell(value) for value in values), Cell(span), Cell(str(len(dates)), len(dates))])
    return Table([*facts, "measured", "rows"], lines)


def _without_empty(table: Table) -> Table:
    kept = [i for i, _ in enumerate(table.columns) if any(line[i].text for line in table.rows)]
    return Table([table.columns[i] for i in kept], [[line[i] for i in kept] for line in table.rows])


def _variants(names: Iterable[str]) -> list[str]:
    """Distinct names, isogemm and torch first."""
    leading = ("isogemm", "torch")
    return sorted(dict.fromkeys(names), key=lambda n: leading.index(n) if n in leading else len(leading))


def _param(value: int | str) -> Cell:
    return Cell(str(value), value if isinstance(value, int) else None)


def _speedup(value: float | None) -> Cell:
    return Cell("") if value is None else Cell(f"{value:.2f}x", value, bad=summary.is_behind(value))


def _error(value: float | None) -> Cell:
    return Cell("") if value is None else Cell(f"{value:.1e}", value)


def _times(values: Sequence[float] | None) -> Cell:
    if values is None:
        return Cell("")
    span = f"{summary.digits(min(values))} to {summary.digits(max(values))} in {len(values)} repeats"
    return Cell(summary.digits(median(values)), median(values), span)


def _figure(value: float) -> Cell:
    return Cell(summary.digits(value), value) if value else Cell("")
