"""Raw measurements as JSON lines: one object per measured point."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from isogemm.core import files
from isogemm.core.files import AnyPath

SCHEMA = 1
ENV_KEYS = ("commit", "date", "gpu", "driver", "torch", "triton", "python")


@dataclass(frozen=True)
class Row:
    """One measured point."""

    family: str
    op: str
    params: Mapping[str, int | str]
    flops: float
    bytes: float
    info: Mapping[str, str]
    error: Mapping[str, float]
    times_us: Mapping[str, list[float]]  # raw, per repeat, per call
    env: Mapping[str, str]
    cpu_us: Mapping[str, list[float]] = field(default_factory=dict)

    @property
    def gpu(self) -> str:
        return self.env["gpu"]

    @cached_property
    def key(self) -> tuple[str, str, str, str]:
        """Identity of the point: rows with the same key measure the same point."""
        return self.family, self.op, json.dumps(dict(self.params), sort_keys=True), self.gpu

    @cached_property
    def us(self) -> dict[str, float]:
        """Median time by variant."""
        return {variant: median(times) for variant, times in self.times_us.items()}

    @property
    def best_us(self) -> float:
        """Median time of what the row is about: isogemm, or torch where it stands alone (ceilings)."""
        return self.us.get("isogemm", self.us.get("torch", min(self.us.values())))

    @property
    def speedup(self) -> float | None:
        """torch's time over isogemm's, where both were measured."""
        return self.speedup_of("isogemm")

    def speedup_of(self, variant: str) -> float | None:
        """torch's time over that of a variant, where both were measured."""
        if variant not in self.us or "torch" not in self.us:
            return None
        return self.us["torch"] / self.us[variant]

    @property
    def cpu_ratio(self) -> float | None:
        """isogemm's CPU time per call over torch's, where both were measured."""
        ours, torchs = (self.cpu_us.get(name) for name in ("isogemm", "torch"))
        return median(ours) / median(torchs) if ours and torchs else None

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.best_us * 1e6

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.best_us * 1e6


def append(path: AnyPath, rows: Iterable[Row]) -> int:
    """Append rows as they come, each on disk before the next is asked for; returns how many."""
    count = 0
    for row in rows:
        files.append(path, dumps(row))
        count += 1
    return count


def read(*paths: AnyPath) -> list[Row]:
    """Every row of the files, in order. ValueError for a bad line names its file and line."""
    return [row for path in paths for row in files.read_lines(path, parse)]


def newest(rows: Iterable[Row]) -> list[Row]:
    """The newest row of every point, points in order of first appearance."""
    latest: dict[tuple[str, str, str, str], Row] = {}
    for row in rows:
        known = latest.get(row.key)
        if known is None or row.env["date"] >= known.env["date"]:
            latest[row.key] = row
    return list(latest.values())


def results_file(root: AnyPath, gpu: str, family: str) -> Path:
    """The file of a family's measurements on a GPU: `<root>/<gpu>/<family>.jsonl`, such as h200/tiny.jsonl."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")
    return Path(root) / name / f"{family}.jsonl"


def dumps(row: Row) -> str:
    """The row as one line of JSON; ValueError for a row that `parse` would refuse."""
    _check(row)
    record = {"schema": SCHEMA, **asdict(row)}
    if not row.cpu_us:
        del record["cpu_us"]
    return json.dumps(record, allow_nan=False)


def parse(record: Any) -> Row:
    """The row of a line's JSON; ValueError if it is none."""
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got {type(record).__name__}")
    if record.get("schema") != SCHEMA:
        raise ValueError(f"schema: expected {SCHEMA}, got {record.get('schema')!r}")
    try:
        row = Row(**{name: value for name, value in record.items() if name != "schema"})
        _check(row)
    except (TypeError, AttributeError) as error:  # fields missing, unknown or of another type
        raise ValueError(f"not a measurement: {error}") from error
    return row


def _check(row: Row) -> None:
    for times in (row.times_us, row.cpu_us):
        if not all(each and min(each) > 0 for each in times.values()):
            raise ValueError(f"expected lists of positive times by variant, got {times!r}")
    if not row.times_us:
        raise ValueError("times_us: expected at least one variant")
    if set(row.env) != set(ENV_KEYS):
        raise ValueError(f"env: expected {', '.join(ENV_KEYS)}, got {', '.join(row.env)}")
