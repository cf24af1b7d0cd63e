"""python -m compile_matrix module:attribute ... [--target sm_90 ...]"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from compile_matrix import TARGETS, CompileJob, Outcome, Reference, run_matrix


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m compile_matrix",
        description="Compile kernels without a GPU; report registers, spills, shared memory, instructions.",
    )
    parser.add_argument(
        "jobs", nargs="+", metavar="module:attribute", help="a list of CompileJob, or a function that returns one"
    )
    parser.add_argument("--target", action="append", choices=TARGETS, help="repeatable; default: all")
    parser.add_argument("--workers", type=int, help="processes; default: the CPUs available")
    arguments = parser.parse_args(argv)

    jobs = [job for path in arguments.jobs for job in _load(path)]
    if not jobs:
        print("no jobs", file=sys.stderr)
        return 2
    outcomes = run_matrix(jobs, arguments.target or TARGETS, arguments.workers)
    print(_triton_version())
    print(_table(outcomes))
    failed = [outcome for outcome in outcomes if not outcome.ok]
    for outcome in failed:
        print(f"\nFAILED {outcome}")
    print(f"\n{len(outcomes) - len(failed)} of {len(outcomes)} ok")
    return 1 if failed else 0


def _load(path: str) -> Iterable[CompileJob]:
    found = Reference(path).resolve()
    jobs: Iterable[CompileJob] = found() if callable(found) else found
    return jobs


def _triton_version() -> str:
    import triton

    return f"Triton {triton.__version__}"


def _table(outcomes: Iterable[Outcome]) -> str:
    rows = [("job", "target", "registers", "spill", "shared", "instructions", "")]
    for outcome in outcomes:
        verdict = "ok" if outcome.ok else "FAILED"
        used = outcome.resources
        if used is None:
            rows.append((outcome.job, outcome.target, "-", "-", "-", "-", verdict))
            continue
        numbers = (str(used.registers), str(used.spill_bytes), str(used.shared_bytes))
        instructions = " ".join(sorted(used.instructions)) or "-"
        rows.append((outcome.job, outcome.target, *numbers, instructions, verdict))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
