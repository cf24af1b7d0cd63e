"""Runs cases: each is built, checked, and only then timed."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from isogemm.bench import timer
from isogemm.bench.cases import Case, Thunk
from isogemm.bench.store import Row

Progress = Callable[[int, int, str], None]  # cases done, cases in all, the one about to run ("" at the end)

_MOST_BURSTS = 15
_BURST_US = 20_000.0  # at most this long: fewer slow calls to a burst
_HOST_US = 100_000.0  # about the longest for all bursts of a variant
_LONGEST_CALL_US = 2_000.0  # of a longer call the CPU time does not matter


class Failure(NamedTuple):
    """A case that could not be measured, and why."""

    label: str
    stage: str  # "build", "check" or "time"
    message: str


@dataclass
class Runner:
    """Measures cases on a device; `failures` collects those that could not be measured."""

    device: torch.device
    repeats: int = 12
    progress: Progress = lambda done, total, step: None
    env: Mapping[str, str] | None = None
    failures: list[Failure] = field(default_factory=list)

    def rows(self, cases: Sequence[Case]) -> Iterator[Row]:
        """Yield a row for each case whose check passed, as soon as it is measured."""
        env = environment(self.device) if self.env is None else self.env
        for done, case in enumerate(cases):
            self.progress(done, len(cases), case.label)
            if self.device.type == "cuda":  # what the last case's graphs held is else not free for this one
                torch.cuda.empty_cache()
            row = self._row(case, env)
            if row is not None:
                yield row
        self.progress(len(cases), len(cases), "")

    def _row(self, case: Case, env: Mapping[str, str]) -> Row | None:
        stage = "build"
        try:
            run = case.build(self.device)
            stage = "check"
            errors = run.check()
            stage = "time"
            times = timer.measure(run.variants, self.device, repeats=self.repeats, eager=run.eager)
            slowest_us = max(median(raw) for raw in times.values())
            host = self._host_time(run.variants, slowest_us) if run.cpu_time else {}
        except Exception as error:  # whatever a case raises, the other cases still run
            self.failures.append(Failure(case.label, stage, f"{type(error).__name__}: {error}"))
            return None
        what = case.family, case.op, dict(case.params), case.flops, case.bytes
        return Row(*what, info=run.info, error=errors, times_us=times, cpu_us=host, env=dict(env))

    def _host_time(self, variants: Mapping[str, Sequence[Thunk]], slowest_us: float) -> dict[str, list[float]]:
        if self.device.type != "cuda" or slowest_us > _LONGEST_CALL_US:  # on a CPU a call ends when its work does
            return {}
        burst = round(min(50, max(5, _BURST_US / slowest_us)))
        bursts = round(min(_MOST_BURSTS, max(5, _HOST_US / (burst * slowest_us))))
        return timer.host_time(variants, self.device, bursts=bursts, burst=burst)


def environment(device: torch.device, commit: str | None = None) -> dict[str, str]:
    """Versions, device, commit and date, to store with a measurement; pass `commit` where git cannot tell it."""
    return {
        "commit": commit or _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {_cpu_name()}".strip(),
        "driver": _driver(device) if device.type == "cuda" else "none",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
    }


def _commit() -> str:
    """Return the commit these sources are tracked at; "unknown" for a copy that git does not track."""
    here = Path(__file__).resolve()
    if not _output("git", "-C", str(here.parent), "ls-files", "--error-unmatch", here.name):
        return "unknown"
    describe = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return _output("git", "-C", str(here.parent), *describe) or "unknown"


def _driver(device: torch.device) -> str:
    index = torch.cuda.current_device() if device.index is None else device.index
    uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    query = ("--query-gpu=driver_version", "--format=csv,noheader", f"--id={uuid}")
    return _output("nvidia-smi", *query) or "unknown"


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    except OSError:
        found = None
    return found.group(1).strip() if found else platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _output(*command: str) -> str:
    """A command's standard output; empty where it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
