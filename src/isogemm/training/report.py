"""Recorded runs in the HTML report: a table that compares backends, losses and a forecast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isogemm.bench.cells import Cell
from isogemm.bench.extras import need
from isogemm.bench.plots import svg
from isogemm.bench.report import Plot, Section, Table
from isogemm.training import plots, results
from isogemm.training.results import Record


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
        with need("matplotlib").rc_context(plots.STYLE):
            drawn = [Plot(name, svg(draw(runs), f"{preset}: {name}"), []) for name, draw in plots.PLOTS.items()]
        made.append(Section(f"Training run: {preset}", source(runs), table, drawn))
    return made


def source(runs: Sequence[Record]) -> str:
    env = runs[0]["env"]
    facts = [f"{name} {env[name]}" for name in ("torch", "triton", "driver")]
    commits = " and ".join(dict.fromkeys(each["env"]["commit"] for each in runs))
    return f"{env['gpu']}: {', '.join([*facts, f'commit {commits}', env['date'][:10]])}."
