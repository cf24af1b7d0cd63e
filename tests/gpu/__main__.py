"""Run the tests of this folder side by side: one pytest process for each file, several for the long ones.

    python tests/gpu                                # all
    python tests/gpu tests/gpu/test_gemm_*.py       # some files
    python tests/gpu --jobs 4 -- -k bf16            # what follows -- is for pytest

Most tests wait for a compiler: many processes share the GPU. Tests marked `alone` run after the others, one at a time.
Needs pytest without plugins.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
JOBS = 16
SLICES = {  # processes per file: at most two minutes each on 16 cores
    "test_encoder_variants.py": 10,
    "test_encoder_attention.py": 9,
    "test_attention_*": 6,
    "test_norm_*": 6,
    "test_loss_*": 4,
    "test_promises.py": 10,
    "test_encoder_*": 5,
    "test_patchtst.py": 4,
    "test_gemm_roles*": 4,
    "test_fused_*": 3,
    "*": 2,
}
NO_TESTS = 5  # pytest's exit status


class Slice(NamedTuple):
    """One pytest process: every `count`-th test of the files, from the `number`-th on."""

    files: tuple[Path, ...]
    number: int = 1
    count: int = 1
    alone: bool = False

    def __str__(self) -> str:
        if self.alone:
            return "tests that run alone"
        return self.files[0].stem + (f" {self.number}/{self.count}" if self.count > 1 else "")


class Outcome(NamedTuple):
    status: int
    seconds: float
    output: str

    @property
    def counts(self) -> str:
        """pytest's summary, such as "17 passed, 2 skipped in 3.2s"; empty where it did not come to its end."""
        found = re.findall(r"^=* ?((?:\d+ \w+|no tests ran).* in [\d.]+s\b.*?) ?=*$", self.output, re.MULTILINE)
        return found[-1] if found else ""

    @property
    def ok(self) -> bool:
        return self.status in (0, NO_TESTS) and bool(self.counts)


def slices_of(files: list[Path], slices: dict[str, int] = SLICES) -> list[Slice]:
    """The processes for these files, those of the longest files first."""
    counts = {path: next(n for pattern, n in slices.items() if fnmatch.fnmatch(path.name, pattern)) for path in files}
    ordered = sorted(counts, key=counts.__getitem__, reverse=True)
    return [Slice((path,), 1 + place, counts[path]) for path in ordered for place in range(counts[path])]


def run(part: Slice, jobs: int, options: list[str]) -> Outcome:
    """Run one slice and wait for it."""
    paths = [str(ROOT / "src"), str(ROOT / "tests/shared"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else each process starts one compiler per core
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "slicing"]
    command += ["--slice", f"{part.number}/{part.count}", "-m", "alone" if part.alone else "not alone"]
    command += [*options, *map(str, part.files)]
    begun = time.monotonic()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return Outcome(done.returncode, time.monotonic() - begun, done.stdout)


def run_all(files: list[Path], jobs: int, options: list[str], slices: dict[str, int] = SLICES) -> bool:
    """Run all slices, `jobs` at a time, then the tests that run alone; print a line for each, and all of a failure."""
    begun, failed = time.monotonic(), []

    def show(part: Slice, outcome: Outcome) -> None:
        verdict, counts = "ok" if outcome.ok else "FAILED", outcome.counts or "ended early"
        print(f"{verdict:6}  {outcome.seconds:6.1f} s  {part}: {counts}", flush=True)
        if not outcome.ok:
            failed.append(str(part))
            print(outcome.output, flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run, part, jobs, options): part for part in slices_of(files, slices)}
        for done in as_completed(running):
            show(running[done], done.result())
    last = Slice(tuple(files), alone=True)
    show(last, run(last, 1, options))
    total = time.monotonic() - begun
    print(f"{'failed: ' + ', '.join(failed) if failed else 'all passed'} ({total:.0f} s)", flush=True)
    return not failed


def main(arguments: list[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="python tests/gpu", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=sorted(HERE.glob("test_*.py")))
    parser.add_argument("--jobs", type=int, default=min(JOBS, os.cpu_count() or 1))
    given = parser.parse_args(arguments[:at])
    return 0 if run_all(given.files, given.jobs, arguments[at + 1 :]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
