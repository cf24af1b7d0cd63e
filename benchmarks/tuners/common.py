"""What the families' tuners share: kernels compiled ahead, raw measurements (JSON lines), and tables as source."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from isogemm.core.tables import Table

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = {  # arithmetic: dtype, precision
    "half": ("bfloat16", "ieee"),
    "tf32": ("float32", "tf32"),
    "tf32x3": ("float32", "tf32x3"),
    "ieee": ("float32", "ieee"),
}
_LONG = 6  # values of a config above which it gets a name, so that a step stays short


def table_path(family: str, arch: str) -> Path:
    return ROOT / "src" / "isogemm" / family / "tables" / f"{arch}.py"


def raw_files(family: str, gpu: str) -> list[Path]:
    """The family's recorded measurements on a GPU, in the order in which they are read."""
    folder = ROOT / "benchmarks" / "tuning" / gpu
    return sorted({*folder.glob(f"{family}.jsonl"), *folder.glob(f"{family}_*.jsonl")})


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]


def append(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


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
            lines += [f"        ({names[config]}, {above}, {most}, {fitted})," for config, above, most, fitted in menu]
            lines.append("    ),")
    return "\n".join([*lines, "}", ""])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


def compile_ahead(compile_one: Callable[[Any], str], jobs: list[Any], workers: int) -> list[str]:
    """Fill Triton's cache in parallel processes; `compile_one` returns why a job failed, or nothing."""
    begun, spawn = time.perf_counter(), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        results = list(pool.map(compile_one, jobs, chunksize=4))
    # After an illegal access nothing works in a process any more: what failed is tried again, each in a new one.
    again = [index for index, failure in enumerate(results) if failure]
    with ProcessPoolExecutor(workers, mp_context=spawn, max_tasks_per_child=1) as pool:
        for index, failure in zip(again, pool.map(compile_one, [jobs[index] for index in again]), strict=True):
            results[index] = failure
    failures = [failure for failure in results if failure]
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - begun:.0f} s, {len(failures)} failed", flush=True)
    for failure in failures[:5]:
        print("failed:", failure, flush=True)
    return results
