"""Recorded runs in plots and in the HTML report: losses, a forecast beside the truth, and a table of backends."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from isogemm.bench import plots as bench
from isogemm.bench.extras import need
from isogemm.bench.plots import INK, MUTED, SERIES, Plot, svg
from isogemm.bench.report import Section, Table
from isogemm.bench.summary import Cell
from isogemm.core import files
from isogemm.core.files import AnyPath
from isogemm.training import results
from isogemm.training.results import Record, backend

STYLE = {  # for matplotlib's rc_context, until a figure is written
    **bench.STYLE, "ytick.labelcolor": MUTED, "axes.titlesize": 8.0, "axes.grid": True,
    "legend.frameon": False, "lines.linewidth": 1.4,
}  # fmt: skip


def losses(records: Sequence[Record]) -> Any:
    """A figure of training and validation errors by epoch, and validation errors by time: a colour per run."""
    figure = _figure(2.6)
    by_epoch, by_time = figure.subplots(1, 2, sharey=True, width_ratios=[1.3, 1])
    for each, line in zip(records, _lines(records), strict=True):
        epochs = each["epochs"]
        numbers = range(1, len(epochs) + 1)
        val = [epoch["val_mse"] for epoch in epochs]
        train = [epoch["train_mse"] for epoch in epochs]
        seconds = list(accumulate(epoch["train_s"] + epoch["val_s"] for epoch in epochs))
        by_epoch.plot(numbers, val, marker="o", markersize=2.5, label=f"{backend(each)}, validation", **line)
        by_epoch.plot(numbers, train, linestyle=":", label=f"{backend(each)}, training", **line)
        by_time.plot(seconds, val, marker="o", markersize=2.5, color=line["color"])
    by_epoch.set(xlabel="epoch", ylabel="MSE, scaled", yscale="log")
    by_epoch.xaxis.get_major_locator().set_params(integer=True)
    by_epoch.legend(fontsize=7)
    by_time.set(xlabel="seconds", xscale="log" if len(records) > 1 else "linear")
    for axis, limits in ((by_epoch.yaxis, by_epoch.get_ylim()), (by_time.xaxis, by_time.get_xlim())):
        if axis.get_scale() == "log":
            subs = (1, 2, 5) if limits[1] / limits[0] < 300 else (1,)  # even steps where these are too few
            axis.set_major_locator(need("matplotlib.ticker").LogLocator(subs=subs))
            axis.set_minor_locator(need("matplotlib.ticker").NullLocator())
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    for axes in (by_epoch, by_time):
        axes.tick_params(which="both", length=0)
    return figure


def forecast(records: Sequence[Record]) -> Any:
    """A figure of a test window's channels, the end of what was seen and then the truth; a colour per forecast."""
    shown = records[0]["forecast"]
    figure = _figure(0.6 + 1.1 * len(shown["channels"]))
    rows = figure.subplots(len(shown["channels"]), 1, sharex=True, squeeze=False)[:, 0]
    for channel, axes in enumerate(rows):
        truth = shown["truth"][channel]
        history = shown["history"][channel][-3 * len(truth) :]
        axes.plot(range(1 - len(history), 1), history, color=MUTED)
        axes.plot(range(len(truth) + 1), [history[-1], *truth], color=INK, label="truth")
        for each, line in zip(records, _lines(records), strict=True):
            values = [history[-1], *each["forecast"]["forecast"][channel]]
            axes.plot(range(len(values)), values, linestyle="--", label=backend(each), **line)
        axes.axvline(0, color=MUTED, linewidth=0.8)
        axes.set_title(shown["channels"][channel], loc="left")
        axes.tick_params(length=0)
    rows[0].legend(fontsize=7, ncols=len(records) + 1, loc="lower right", bbox_to_anchor=(1, 1))
    rows[-1].set_xlabel("rows from the forecast's begin")
    return figure


PLOTS: dict[str, Callable[[Sequence[Record]], Any]] = {"losses": losses, "forecast": forecast}


def save(path: AnyPath, draw: Callable[[Sequence[Record]], Any], records: Sequence[Record]) -> list[Path]:
    """Write a plot of PLOTS as .svg and .png; returns both paths."""
    path = Path(path)
    written = [path.with_suffix(suffix) for suffix in (".svg", ".png")]
    with need("matplotlib").rc_context({**STYLE, "svg.hashsalt": path.name}):
        figure = draw(records)
        for file in written:
            image, form = io.BytesIO(), file.suffix[1:]
            figure.savefig(image, format=form, dpi=160, metadata={"Date": None} if form == "svg" else {})
            files.write(file, image.getvalue())
    return written


def _figure(height: float) -> Any:
    return need("matplotlib.figure").Figure(figsize=(7.0, height), layout="constrained", facecolor="white")


def _lines(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Line style of each run: earlier ones are wider, since runs with the same seed coincide."""
    count = len(records)
    return [{"color": SERIES[index % len(SERIES)], "linewidth": 1.4 * (count - index)} for index in range(count)]


def by_preset(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Runs by preset: the newest run of each backend, of those with the newest run's other options and environment."""
    runs: dict[str, list[Record]] = {}
    for each in records:
        runs.setdefault(each["preset"], []).append(each)
    return {
        preset: list(
            {results.backend(each): each for each in of_it if _but_backend(each) == _but_backend(of_it[-1])}.values()
        )
        for preset, of_it in runs.items()
    }


def _but_backend(made: Record) -> tuple[object, ...]:
    options = {name: value for name, value in made["run"].items() if name not in ("backend", "compile_rest")}
    return options, len(made["epochs"]), [made["env"][name] for name in ("gpu", "torch", "triton", "driver")]


def sections(records: Iterable[Record]) -> list[Section]:
    made = []
    for preset, runs in by_preset(records).items():
        columns, lines = results.comparison(runs)
        table = Table(columns, [[Cell(text) for text in line] for line in lines])
        with need("matplotlib").rc_context(STYLE):
            drawn = [Plot(name, svg(draw(runs), f"{preset}: {name}"), []) for name, draw in PLOTS.items()]
        made.append(Section(f"Training run: {preset}", source(runs), table, drawn))
    return made


def source(runs: Sequence[Record]) -> str:
    env = runs[0]["env"]
    facts = [f"{name} {env[name]}" for name in ("torch", "triton", "driver")]
    commits = " and ".join(dict.fromkeys(each["env"]["commit"] for each in runs))
    return f"{env['gpu']}: {', '.join([*facts, f'commit {commits}', env['date'][:10]])}."
