"""What the families' tuners share: raw measurements (JSON lines), and tables as source."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from isogemm.core import files
from isogemm.core.tables import Table
from isogemm.verify.parallel import retried_in_processes

ROOT = Path(__file__).resolve().parents[2]
_LONG = 6  # values of a config above which it gets a name, so that a step stays short


def table_path(family: str, arch: str) -> Path:
    return ROOT / "src" / "isogemm" / family.replace(".", "/") / "tables" / f"{arch}.py"


def raw_files(family: str, gpu: str) -> list[Path]:
    """The family's recorded measurements on a GPU, in the order in which they are read."""
    folder = ROOT / "benchmarks" / "tuning" / gpu
    return sorted({*folder.glob(f"{family}.jsonl"), *folder.glob(f"{family}_*.jsonl")})


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def append(path: Path, row: dict[str, Any]) -> None:
    files.append(path, json.dumps(row))


def source(command: str, arch: str, table: Table, model: Mapping[Any, Any] | None = None) -> str:
    """The text of a table's module."""
    configs = dict.fromkeys(config for steps in table.values() for _, config in steps)
    configs |= dict.fromkeys(config for menu in (model or {}).values() for config, *_ in menu)
    long = [config for config in configs if isinstance(config, tuple) and len(config) > _LONG]
    names = {config: f"C{index}" for index, config in enumerate(long)}
    lines = [
        f'"""Configurations for {arch}; benchmarks/tune.py {command} writes this file. Format: isogemm.core.tables."""',
        "",
        "from isogemm.core.tables import Table",
        "",
        "# fmt: off",
        *(f"{name} = {config!r}" for config, name in names.items()),
        "TABLE: Table = {",
    ]
    for key, steps in table.items():
        written = ", ".join(f"({most}, {names.get(config) or repr(config)})" for most, config in steps)
        lines.append(f"    {key!r}: ({written},),")
    if model:
        lines += ["}", "", "MODEL = {"]
        for key, menu in model.items():
            lines.append(f"    {key!r}: (")
            lines += [
                f"        ({', '.join([names.get(config) or repr(config), *map(repr, measured)])}),"
                for config, *measured in menu
            ]
            lines.append("    ),")
    return "\n".join([*lines, "}", ""])


def compile_ahead(compile_one: Callable[[Any], str], jobs: list[Any], workers: int) -> list[str]:
    """Compile in parallel; say how long it took, and what failed."""
    begun = time.perf_counter()
    results = retried_in_processes(compile_one, jobs, workers)
    failures = [failure for failure in results if failure]
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - begun:.0f} s, {len(failures)} failed", flush=True)
    for failure in failures[:5]:
        print("failed:", failure, flush=True)
    return results
