"""Raw measurements as JSON lines: one object per measured point."""

from __future__ import annotations

import json
import math
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


class StoreError(ValueError):
    """A line that is not a row of this schema."""


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
    """Every row of the files, in order. A bad line raises StoreError with its file and line."""
    rows = []
    for path in paths:
        for number, line in enumerate(Path(path).read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            try:
                rows.append(loads(line))
            except StoreError as error:
                raise StoreError(f"{path}:{number}: {error}") from error
    return rows


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
    """The row as one line of JSON; raises StoreError for a row that `loads` would refuse."""
    record = {"schema": SCHEMA, **asdict(row)}
    if not row.cpu_us:
        del record["cpu_us"]
    _validate(record)
    return json.dumps(record, allow_nan=False)


def loads(line: str) -> Row:
    """The row of one line of JSON."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise StoreError(f"not JSON: {error}") from error
    _validate(record)
    del record["schema"]
    return Row(**record)


def _validate(record: Any) -> None:
    if not isinstance(record, dict):
        raise StoreError(f"expected an object, got {type(record).__name__}")
    if record.get("schema") != SCHEMA:
        raise StoreError(f"schema: expected {SCHEMA}, got {record.get('schema')!r}")
    missing = [name for name in _FIELDS if name not in record and name != "cpu_us"]
    unknown = [name for name in record if name not in _FIELDS and name != "schema"]
    if missing or unknown:
        raise StoreError(f"missing fields: {missing or 'none'}; unknown fields: {unknown or 'none'}")
    for name, (expected, valid) in _FIELDS.items():
        if name in record and not valid(record[name]):
            raise StoreError(f"{name}: expected {expected}, got {record[name]!r}")


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and bool(value >= 0)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _times(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_number(item) and item > 0 for item in value)


def _mapping(valid: Any) -> Any:
    return lambda value: isinstance(value, dict) and all(valid(item) for item in value.values())


_FIELDS: dict[str, tuple[str, Any]] = {
    "family": ("a string", _text),
    "op": ("a string", _text),
    "params": ("integers and strings by name", _mapping(lambda value: type(value) in (int, str))),
    "flops": ("a finite number >= 0", _number),
    "bytes": ("a finite number >= 0", _number),
    "info": ("strings by name", _mapping(_text)),
    "error": ("finite numbers >= 0 by variant", _mapping(_number)),
    "times_us": ("lists of positive numbers by variant", lambda value: bool(value) and _mapping(_times)(value)),
    "env": (f"strings {', '.join(ENV_KEYS)}", lambda value: _mapping(_text)(value) and set(ENV_KEYS) == set(value)),
    "cpu_us": ("lists of positive numbers by variant", _mapping(_times)),
}
