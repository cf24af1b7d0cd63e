"""Recorded runs, one line of JSON each, and the table that compares backends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any

from isogemm.core import files
from isogemm.core.files import AnyPath
from isogemm.training.loop import Outcome, Run

SCHEMA = 1
Record = dict[str, Any]

_FIELDS = ("schema", "env", "preset", "run", "graph", *(each.name for each in fields(Outcome)))

COLUMNS = (
    "backend", "train s / epoch", "total s", "setup s", "samples/s", "peak MiB",
    "val MSE", "val MAE", "test MSE", "test MAE",
)  # fmt: skip


def record(run: Run, outcome: Outcome, env: Mapping[str, str], preset: str) -> Record:
    """Everything about a run but its weights."""
    return {
        "schema": SCHEMA,
        "env": dict(env),
        "preset": preset,
        "run": run.identity,
        "graph": run.captured,
        "graph_steps": run.config.graph_steps,
        "series": Path(run.series.name).name,
        "parameters": sum(each.numel() for each in run.model.parameters() if each.requires_grad),
        "steps": run.steps,
        **asdict(outcome),
    }


def append(path: AnyPath, made: Record) -> None:
    """Add a run, whole or not at all. No other process writes the file: `folder.claimed`."""
    path = Path(path)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    files.write(path, "".join(f"{line}\n" for line in (*lines, json.dumps(made, allow_nan=False))).encode())


def read(path: AnyPath) -> list[Record]:
    """The runs recorded there, none where there is no file. ValueError for a line that is not one names it."""
    return files.read_lines(path, _parse) if Path(path).exists() else []


def holds_runs(path: AnyPath) -> bool:
    """Whether a file's first line is of a run, and not a measurement."""
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        return '"epochs":' in file.readline()


def _parse(made: Any) -> Record:
    missing = [name for name in _FIELDS if name not in made] if isinstance(made, dict) else ["epochs"]
    if missing:
        raise ValueError(f"not a recorded run: it has no {missing[0]!r}; remove the line, or choose another folder")
    if made["schema"] != SCHEMA:
        raise ValueError(f"schema {made['schema']!r}; expected {SCHEMA}")
    return dict(made)


def of_run(records: Sequence[Record], run: Run) -> Record | None:
    """Find the record of this run, with the same times and errors in all epochs."""
    epochs = [asdict(epoch) for epoch in run.epochs]
    return next((each for each in records if each["run"] == run.identity and each["epochs"] == epochs), None)


def backend(made: Record) -> str:
    """The backend in words, with how a step was launched."""
    run = made["run"]
    rest = " + compile" if run["compile_rest"] and run["backend"] == "isogemm" else ""
    return f"{run['backend']}{rest}{' + graph' if made['graph'] else ''}"


def epochs(made: Record) -> tuple[list[str], list[list[str]]]:
    """Columns and lines: a line per epoch, the best one marked."""
    names = ("train_mse", "val_mse", "val_mae", "train_s", "val_s")
    lines = [
        [f"{number}{' *' if number == made['best_epoch'] else ''}", *(f"{epoch[name]:.5f}" for name in names)]
        for number, epoch in enumerate(made["epochs"], 1)
    ]
    return ["epoch", "train MSE", "val MSE", "val MAE", "train s", "val s"], lines


def comparison(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Columns and lines: a line per run, and its speed in training over that of torch's backends.

    Times of an epoch are of its training, errors of the weights of the best epoch.
    """
    rivals = [each for each in records if each["run"]["backend"] != "isogemm"] if len(records) > 1 else []
    columns = [*COLUMNS, *(f"over {backend(rival)}" for rival in rivals)]
    return columns, [[*_line(each), *(f"{speedup(each, rival):.2f}x" for rival in rivals)] for each in records]


def speedup(ours: Record, theirs: Record) -> float:
    """Speed-up by the median training time of an epoch."""
    return epoch_s(theirs) / epoch_s(ours)


def epoch_s(made: Record) -> float:
    return float(median(epoch["train_s"] for epoch in made["epochs"]))


def _line(made: Record) -> list[str]:
    best, peak = made["epochs"][made["best_epoch"] - 1], made["peak_bytes"]
    seconds = (f"{each:.3f}" for each in (epoch_s(made), made["total_s"], made["setup_s"]))
    errors = (f"{each:.5f}" for each in (best["val_mse"], best["val_mae"], made["test_mse"], made["test_mae"]))
    speed, memory = f"{made['samples_per_s']:,.0f}", "" if peak is None else f"{peak / 2**20:.1f}"
    return [backend(made), *seconds, speed, memory, *errors]
