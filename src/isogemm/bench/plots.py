"""The report's plots, as SVG to inline in HTML. Their colours are of the light theme; the page inverts them in dark."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from isogemm.bench import summary
from isogemm.bench.ceilings import Ceilings
from isogemm.bench.extras import need
from isogemm.bench.store import Row
from isogemm.bench.views import FamilyView, number_type

INK, MUTED, LINE, BAD = "#1a1f26", "#616b78", "#e1e5ea", "#c02b3c"
SERIES = ("#2563eb", "#d9730d", "#16885a", "#8b46c9", "#c7305f", "#0e7c93")  # of categories
_RAMP = ("#86b4f5", "#0b2c66")  # of ordered values, the faintest first

STYLE: dict[str, Any] = {  # for matplotlib's rc_context, until a figure is written
    "svg.fonttype": "none", "font.size": 8.0, "text.color": INK,
    "axes.labelcolor": MUTED, "axes.edgecolor": LINE, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "grid.color": LINE, "grid.linewidth": 0.6,
    "xtick.color": LINE, "ytick.color": LINE, "xtick.labelcolor": MUTED, "ytick.labelcolor": INK,
}  # fmt: skip

_WIDTH = 6.0  # inches
_TICK_STEPS = ((10, (1, 1.5, 2, 3, 4, 6, 8)), (30, (1, 2, 3, 5)), (1000, (1, 3)), (math.inf, (1,)))


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


def _category_colours(names: Iterable[str]) -> dict[str, str]:
    """Colours by name, in order of first appearance."""
    return {name: SERIES[index % len(SERIES)] for index, name in enumerate(dict.fromkeys(names))}


def _ramp_colours(values: Sequence[int | str]) -> dict[int | str, str]:
    """Colours for ordered values, from faint to strong."""
    colours = need("matplotlib.colors")
    ramp = colours.LinearSegmentedColormap.from_list("ramp", _RAMP)
    steps = max(1, len(values) - 1)
    return {value: colours.to_hex(ramp(i / steps)) for i, value in enumerate(values)}


def speedup(rows: Sequence[Row], view: FamilyView, ceilings: Ceilings) -> Plot:
    """A line per shape, a dot per column value: speed-up over torch, and the fraction of the roof that was reached."""
    shapes = summary.shapes(rows, view)
    canvas, left, right = _two_panels(shapes)
    colours = _ramp_colours(summary.columns(rows, view))
    lines: dict[str, list[tuple[float, float]]] = {shape: [] for shape in shapes}
    for row in sorted(rows, key=lambda row: summary.sort_key(view.column_value(row.params))):
        ratio, shape = row.speedup, view.shape_label(row.params)
        if ratio is None:
            continue
        y, colour = shapes.index(shape), colours[view.column_value(row.params)]
        tip, fraction = point_label(row, view), ceilings.roof_fraction(row)
        reached = row.bytes_per_s / 1e9 if fraction is None else 100 * fraction
        lines[shape].append((ratio, reached))
        canvas.point(left, ratio, y, colour, tip)
        canvas.point(right, reached, y, colour, tip)
    for y, points in enumerate(lines.values()):
        for axes, values in zip((left, right), zip(*points, strict=True), strict=False):
            axes.plot([min(values), max(values)], [y, y], color=LINE, linewidth=2.5, zorder=1)
    ratios = [ratio for points in lines.values() for ratio, _ in points]
    most = max(reached for points in lines.values() for _, reached in points)
    left.set_xlabel("speed-up over torch")
    left.axvline(1.0, color=MUTED, linewidth=0.8)
    low, high = min(min(ratios) / 1.08, 0.92), max(max(ratios) * 1.08, 1.08)
    if high / low > 3:
        left.set_xscale("log")
        left.set_xticks(_log_ticks(low, high))
        left.minorticks_off()
    else:
        left.locator_params(axis="x", nbins=6)
    left.set_xlim(low, high)
    left.axvspan(low, 1.0, color=BAD, alpha=0.07, linewidth=0)
    left.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    if ceilings.bytes_per_s is None:
        right.set(xlabel="memory traffic, GB/s", xlim=(0, 1.08 * most))
        right.locator_params(axis="x", nbins=5)
    else:
        right.axvline(100, color=MUTED, linewidth=0.8)
        right.set(xlabel="% of the measured roof", xlim=(0, max(105.0, 1.05 * most)))
    label = view.group_label(rows[0].op, rows[0].params)
    keys = [Key(f"{view.column} {value}", colour) for value, colour in colours.items() if value != ""]
    return Plot(label, canvas.svg(f"speed-up {view.family} {rows[0].gpu} {label}"), keys)


def steps(rows: Sequence[Row], view: FamilyView, ceilings: Ceilings) -> Plot:
    """A line per training step, a dot per variant: time, with a tick at the arithmetic's, and peak memory."""
    canvas, left, right = _two_panels([view.shape_label(row.params) for row in rows])
    colours = _category_colours(name for row in rows for name in row.times_us)
    times: list[float] = []
    sizes: list[float] = []
    for y, row in enumerate(rows):
        floor = ceilings.arithmetic_us(row)
        points = {name: row.us[name] / 1e3 for name in colours if name in row.us}
        memory = {name: float(row.info[key]) for name in colours if (key := f"{name} peak MiB") in row.info}
        for axes, measured, unit in ((left, points, "ms"), (right, memory, "MiB")):
            for name, value in measured.items():
                tip = f"{view.shape_label(row.params)}, {name}: {summary.digits(value)} {unit}"
                canvas.point(axes, value, y, colours[name], tip)
        if floor is not None:
            left.plot([floor / 1e3], [y], "|", color=MUTED, markersize=9, zorder=2)
        times += [*points.values(), *([] if floor is None else [floor / 1e3])]
        sizes += memory.values()
    for axes, values, label in ((left, times, "time of a step, ms"), (right, sizes, "peak memory, MiB")):
        low, high = min(values, default=1.0) / 1.3, max(values, default=1.0) * 1.3
        axes.set(xscale="log", xlim=(low, high), xlabel=label)
        axes.set_xticks(ticks := _log_ticks(low, high), [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    label = view.group_label(rows[0].op, rows[0].params)
    keys = [*(Key(*each) for each in colours.items()), Key("tick: the arithmetic at a matmul's rate")]
    return Plot(f"{label}: time and memory", canvas.svg(f"steps {view.family} {rows[0].gpu} {label}"), keys)


def roofline(rows: Sequence[Row], view: FamilyView, bytes_per_s: float, flops_per_s: Mapping[str, float]) -> Plot:
    """Achieved rate over arithmetic intensity, under the measured roofs; larger dots are larger batches."""
    points = [row for row in rows if row.flops and row.bytes]
    intensities = [row.flops / row.bytes for row in points]
    rates = [row.flops_per_s for row in points]
    colours, columns = _category_colours(number_type(row.params) for row in rows), summary.columns(rows, view)
    roofs = {number: flops_per_s[number] for number in colours if number in flops_per_s}
    ridges = [roof / bytes_per_s for roof in roofs.values()]
    left, right = min([*intensities, *ridges]) / 1.8, max([*intensities, *ridges]) * 1.8
    end = max(ridges, default=right)
    canvas = _Canvas(_WIDTH, 3.6)
    axes = canvas.figure.subplots()
    axes.plot([left, end], [left * bytes_per_s, end * bytes_per_s], color=MUTED, linewidth=1.2)
    for number, roof in roofs.items():
        axes.plot([roof / bytes_per_s, right], [roof, roof], color=colours[number], linewidth=1.2)
    for row, intensity, rate in zip(points, intensities, rates, strict=True):
        place = columns.index(view.column_value(row.params)) / max(1, len(columns) - 1)
        tip, colour = point_label(row, view), colours[number_type(row.params)]
        canvas.point(axes, intensity, rate, colour, tip, 3.5 + 3.5 * place)
    bottom, top = min(rates) / 2, max([*rates, end * bytes_per_s]) * 2
    label = "arithmetic intensity, FLOP per byte"
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, top), xlabel=label)
    axes.set_xticks(ticks := _log_ticks(left, right), [f"{tick:g}" for tick in ticks])
    axes.set_yticks(ticks := _log_ticks(bottom, top), [summary.rate_text(tick) for tick in ticks])
    axes.minorticks_off()
    axes.tick_params(length=0)
    axes.tick_params(axis="y", labelcolor=MUTED)
    axes.grid()
    keys = []
    for number, colour in colours.items():
        reached = f"{summary.rate_text(roofs[number])} roof" if number in roofs else "compute roof not measured"
        keys.append(Key(f"{number or 'points'} ({reached})", colour))
    keys.append(Key(f"copy bandwidth {bytes_per_s / 1e9:.0f} GB/s", MUTED, "line"))
    if len(columns) > 1:
        keys.append(Key(f"larger dot: larger {view.column}"))
    return Plot("Roofline", canvas.svg(f"roofline {view.family} {rows[0].gpu}"), keys)


def point_label(row: Row, view: FamilyView) -> str:
    """A point in words, with its time and speed-up."""
    column = view.column_value(row.params)
    where = view.shape_label(row.params) + (f", {view.column} {column}" if column != "" else "")
    ratio = "" if row.speedup is None else f", {row.speedup:.2f}x"
    return f"{where} ({view.group_label(row.op, row.params)}): {summary.digits(row.best_us)} us{ratio}"


class _Canvas:
    """A figure whose points have tooltips."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = need("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
        self._tips: list[str] = []

    def point(self, axes: Any, x: float, y: float, colour: str, tip: str, size: float = 6.0) -> None:
        gid = f"tip{len(self._tips)}"
        self._tips.append(tip)
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.6}
        axes.plot([x], [y], "o", color=colour, markersize=size, zorder=3, gid=gid, **edge)

    def svg(self, name: str) -> str:
        return svg(self.figure, name, self._tips)


def svg(figure: Any, name: str, tips: Sequence[str] = ()) -> str:
    """Return the figure as an <svg> element; `name` is its accessible name and makes its ids unique."""
    text = io.StringIO()
    with need("matplotlib").rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    made = text.getvalue()
    made = made[made.index("<svg") :]
    made = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", made, flags=re.DOTALL)
    start = rf'<svg \1 role="img" aria-label="{escape(name)}">'
    made = re.sub(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', start, made, count=1)
    made = re.sub(r'<g id="tip(\d+)">', lambda m: f"<g><title>{escape(tips[int(m[1])])}</title>", made)
    used = set(re.findall(r"#(\w+)", made))
    return re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", made)


def _two_panels(lines: Sequence[str]) -> tuple[_Canvas, Any, Any]:
    """A figure with two axes that share their lines, one per name."""
    canvas = _Canvas(_WIDTH, 0.75 + 0.21 * len(lines))
    left, right = canvas.figure.subplots(1, 2, sharey=True, width_ratios=[1.6, 1])
    canvas.figure.get_layout_engine().set(wspace=0.06)
    left.set_yticks(range(len(lines)), lines)
    left.set_ylim(len(lines) - 0.4, -0.6)
    for axes in (left, right):
        axes.grid(axis="x")
        axes.tick_params(length=0)
        axes.spines["left"].set_visible(False)
    return canvas, left, right


def _log_ticks(low: float, high: float) -> list[float]:
    """Round values between `low` and `high`, fewer to a decade where there are more decades."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = next(steps for span, steps in _TICK_STEPS if high / low < span)
    return [tick for decade in decades for step in steps if low <= (tick := step * 10.0**decade) <= high]
