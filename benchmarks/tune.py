"""Times a family's configurations on this GPU and writes its table, src/isogemm/<family>/tables/<arch>.py.

    python benchmarks/tune.py gemm --kinds linear dx dw     # measure, then write the table
    python benchmarks/tune.py encoder --dry-run             # list what would be timed; needs no GPU
    python benchmarks/tune.py tiny --only write             # the table again, from what is recorded; needs no GPU
    python benchmarks/tune.py gemm --only judge             # how the model chooses for weights it never saw

Times are appended to benchmarks/tuning/<gpu>/<family>.jsonl. A table is made from all files of that folder whose names
are the family's or begin with it.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from pathlib import Path

import torch

from isogemm.bench import store
from isogemm.core import device as devices
from tuners import common, cost, encoder, gemm, tiny

TUNERS = {"gemm": gemm, "tiny": tiny, "encoder": encoder}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    tuner, family = TUNERS[options.family], options.family
    if options.dry_run:
        points = tuner.points(options)
        for point in points:
            print(*point if isinstance(point, tuple) else (point,))
        print(f"{len(points)} points, to {_raw_file(options)}")
        return
    if options.only in (None, "measure"):
        tuner.sweep(options, _raw_file(options))
    if options.only == "measure":
        return
    rows = common.read(common.raw_files(family, _raw_file(options).parent.name))
    if options.only == "judge":
        print(tiny.report(rows, options.arch) if tuner is tiny else cost.report(gemm.samples(rows, options.arch)))
    else:
        model = tuner.model(rows, options.arch) if tuner is not encoder else None
        for of, table in tuner.tables(rows, options.arch).items():
            path = common.table_path(of, options.arch)
            path.write_text(common.source(family, options.arch, table, model), encoding="utf-8")
            print(f"wrote {path.relative_to(common.ROOT)}")


def _parser() -> argparse.ArgumentParser:
    facts = devices.facts(torch.device("cuda")) if torch.cuda.is_available() else None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="family", required=True)
    for name, tuner in TUNERS.items():
        command = commands.add_parser(name, help=tuner.__doc__.splitlines()[0])
        steps = ("measure", "write", *(("judge",) if tuner is not encoder else ()))
        command.add_argument("--only", choices=steps, help="this step alone, of measuring and writing the table")
        command.add_argument("--dry-run", action="store_true", help="list what would be timed")
        command.add_argument("--gpu", default=facts.name if facts else "h200", help="whose folder the times are in")
        command.add_argument("--arch", default=facts.arch if facts else "sm_90", help="whose table is written")
        command.set_defaults(sm_count=facts.sm_count if facts else 132)
        command.add_argument("--workers", type=int, default=max(1, multiprocessing.cpu_count() - 1))
        tuner.add_arguments(command)
    return parser


def _raw_file(options: argparse.Namespace) -> Path:
    return store.results_file(common.ROOT / "benchmarks" / "tuning", options.gpu, options.family)


if __name__ == "__main__":
    main()
