"""Recorded training runs in the documents: a table that compares backends, a headline figure, plots."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from figures import headline
from figures.headline import Environment, Figure
from isogemm.bench.summary import markdown
from isogemm.training import report, results
from isogemm.training.results import Record


def tables(records: Iterable[Record]) -> dict[str, str]:
    """Tables by the name of a document's marker, `training-PRESET`."""
    made = {}
    for preset, runs in report.by_preset(records).items():
        columns, lines = results.comparison(runs)
        made[f"training-{preset}"] = f"{report.source(runs)}\n\n{markdown(columns, lines)}"
    return made


def figures(records: Iterable[Record]) -> list[tuple[Figure, Environment]]:
    """Headline figures: isogemm's speed in training over torch.compile's, with the run's environment."""
    made = []
    for preset, runs in report.by_preset(records).items():
        by_backend = {each["run"]["backend"]: each for each in reversed(runs)}
        ours, rival = (by_backend.get(name) for name in ("isogemm", "compile"))
        if ours is not None and rival is not None:
            what = f"PatchTST, training run of {len(ours['epochs'])} epochs ({preset})"
            made.append((headline.figure(what, headline.COMPILED, [results.speedup(ours, rival)]), ours["env"]))
    return made


def save_plots(records: Iterable[Record], folder: Path) -> list[Path]:
    """Write the plots as images for the documents."""
    written = []
    for preset, runs in report.by_preset(records).items():
        for name, draw in report.PLOTS.items():
            written += report.save(folder / f"{preset}-{name}", draw, runs)
    return written
