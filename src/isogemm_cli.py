"""The `isogemm` command: its arguments. What a command does is in `isogemm.cli`, imported once there is one to run.

This module stands outside the package because importing the package imports torch: `isogemm --help` should not.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from isogemm_options import BACKENDS, PRESETS, Architecture, Config

BUILD = Path("build")
REPORT = BUILD / "isogemm-report.html"
RECORDED = Path("benchmarks/results")

VERIFY_CODES = """\
exit status:
  0  at least one check passed and none failed
  1  a check failed
  2  wrong usage
  3  nothing was proven: every check was skipped. A machine without a GPU ends
     here for families whose contract is about a GPU kernel."""
BENCH_CODES = """\
A case is timed only after its result was checked against fp64.
exit status: 0, 1 if a case failed, 2 wrong usage"""
DEMO_CODES = """\
exit status: 0, 1 if isogemm changed a bit that it promises or an error exceeds its bound, 2 wrong usage"""
TUNE_NOTES = """\
Results do not change: a configuration counts only if it has the bits of the canonical one on this GPU.
The choices are kept in the user's cache folder and serve every later process; ISOGEMM_TUNED=0 ignores them.
exit status: 0, 1 if a configuration has other bits, 2 wrong usage, no GPU or an output that cannot be written,
130 interrupted: what was measured is kept"""
TRAINING_FILES = """\
Files in DIR: checkpoint.pt, which --resume continues; best.pt, the weights with the lowest validation error;
results.jsonl, one line per finished run; losses and forecast as .svg and .png. One process at a time trains there.
The first Ctrl-C or SIGTERM writes a checkpoint and ends the run.
torchrun --nproc-per-node N -m isogemm train-patchtst ... shares every batch among N processes.
exit status: 0, 1 if the loss is not finite, 2 wrong usage, data or files, 130 stopped"""

DTYPES = ("bfloat16", "float16", "float32")
PRECISIONS = ("ieee", "tf32", "tf32x3")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    args = parser().parse_args(argv)
    try:
        from isogemm import cli  # and torch
    except KeyboardInterrupt:  # which takes a second
        return 130

    return cli.run(args)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="isogemm", description="GEMM kernels with the same bits at any batch size.")
    made.add_argument("--version", action="version", version=f"isogemm {_version()}")
    commands = made.add_subparsers(dest="name", metavar="command", required=True)
    family = argparse.ArgumentParser(add_help=False)
    family.add_argument("--family", nargs="+", action="extend", default=[], metavar="NAME", help="only these families")
    device = argparse.ArgumentParser(add_help=False)
    device.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: the first GPU, else the CPU)")
    html = argparse.ArgumentParser(add_help=False)
    html.add_argument("--out", type=Path, default=REPORT, metavar="FILE", help="HTML file (default: %(default)s)")

    def command(name: str, summary: str, *parents: argparse.ArgumentParser, epilog: str = "") -> Any:
        description = f"{summary[0].upper()}{summary[1:]}."
        how: Any = {"epilog": epilog, "parents": parents, "formatter_class": argparse.RawDescriptionHelpFormatter}
        return commands.add_parser(name, help=summary, description=description, **how)

    command("doctor", "show versions, devices, and which kernels are usable or why not")

    added = command("verify", "run the contract checks of each family here", family, device, epilog=VERIFY_CODES)
    added.add_argument("--trials", type=int, default=20, metavar="N", help="trials of each check (default: 20)")

    added = command("bench", "measure each family against torch", family, device, epilog=BENCH_CODES)
    added.add_argument("--quick", action="store_true", help="fewer cases")
    added.add_argument(
        "--only", nargs="+", action="extend", default=[], metavar="TEXT",
        help="only cases with one of these in their label, as progress shows it, such as 'gemm linear m=1 '",
    )  # fmt: skip
    added.add_argument("--commit", metavar="HASH", help="commit to record, if git cannot tell")
    added.add_argument(
        "--out", type=Path, default=BUILD / "isogemm-bench.jsonl", metavar="PATH",
        help="append to this .jsonl file, or in this folder to one per GPU and family (default: %(default)s)",
    )  # fmt: skip

    added = command("report", "make an HTML report from measurements", html)
    added.add_argument(
        "--results", type=Path, nargs="+", default=[], metavar="PATH",
        help=f".jsonl files, or folders of them (default: {RECORDED}, or {BUILD} where there are none in that)",
    )  # fmt: skip

    text = "count bits that change with the batch, and measure errors and times, for every family"
    added = command("demo", text, device, html, epilog=DEMO_CODES)
    text = "then run the quick benchmark and add it to the report (default: on a GPU)"
    added.add_argument("--bench", action=argparse.BooleanOptionalAction, default=None, help=text)

    text = "measure kernel configurations for a model on this GPU and keep the fastest"
    _add_tuning(command("tune", text, epilog=TUNE_NOTES))

    added = command("train-patchtst", "train a PatchTST forecaster and compare backends", device, epilog=TRAINING_FILES)
    _add_training(added)
    return made


def _add_tuning(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, metavar="PATH", help="a Hugging Face config.json, or its folder")
    source.add_argument("--weights", metavar="NxK,...", help="sizes of weights, such as 4096x14336,1024x4096")
    source.add_argument("--safetensors", type=Path, metavar="PATH", help="a .safetensors file, or a folder of them")
    text = "numbers of rows of x, the most useful first (default: ten from 1 to 8192)"
    parser.add_argument("--tokens", type=int, nargs="+", metavar="N", help=text)
    text = "tune the gradients too (by default for 256 tokens and more)"
    parser.add_argument("--backward", action="store_true", help=text)
    parser.add_argument("--seconds", type=float, metavar="N", help="stop after N seconds; what was measured is kept")
    text = "dtype of all weights (default: their own; bfloat16 with --weights)"
    parser.add_argument("--dtype", choices=DTYPES, help=text)
    parser.add_argument("--precision", choices=PRECISIONS, help="for float32 weights (default: torch's setting)")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured; needs no GPU")


def _add_training(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--csv", type=Path, metavar="FILE", help="a header, then a date and numbers in each line (ETT)")
    text = "rows of synthetic data, without a CSV (default: the preset's)"
    data.add_argument("--rows", type=int, metavar="N", help=text)
    run = parser.add_argument_group("run")
    text = "; ".join(f"{name}: {preset.summary}" for name, preset in PRESETS.items()) + " (default: %(default)s)"
    run.add_argument("--preset", choices=PRESETS, default="reference", help=text)
    _add_fields(run, Config)
    text = f"train with each of these backends, without checkpoints (default: {' '.join(BACKENDS)})"
    run.add_argument("--compare", nargs="*", choices=BACKENDS, metavar="BACKEND", help=text)
    run.add_argument("--epochs", type=int, metavar="N", help="number of epochs (default: the preset's)")
    run.add_argument("--patience", type=int, metavar="N", help="stop after N epochs without a lower validation error")
    out = parser.add_argument_group("output")
    text = "folder for all output (default: %(default)s)"
    out.add_argument("--out", type=Path, default=BUILD / "train-patchtst", metavar="DIR", help=text)
    text = "continue from DIR/checkpoint.pt; the bits are those of an uninterrupted run"
    out.add_argument("--resume", action="store_true", help=text)
    out.add_argument("--overwrite", action="store_true", help="discard the checkpoints of another run in DIR")
    out.add_argument("--checkpoint-epochs", type=int, default=1, metavar="N", help="epochs per checkpoint (default: 1)")
    out.add_argument("--checkpoint-steps", type=int, metavar="N", help="also a checkpoint every N steps of an epoch")
    out.add_argument("--commit", metavar="HASH", help="commit to record, if git cannot tell")
    _add_fields(parser.add_argument_group("model"), Architecture)


def _add_fields(group: Any, options: type[Architecture] | type[Config]) -> None:
    """An option for every field that has a help, None where it is not given."""
    for each in fields(options):
        if "help" not in each.metadata:
            continue
        name, text, choices = f"--{each.name.replace('_', '-')}", each.metadata["help"], each.metadata["choices"]
        if each.type in ("bool", "bool | None"):
            group.add_argument(name, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif choices:
            group.add_argument(name, choices=choices, help=text)
        elif each.type == "float":
            group.add_argument(name, type=float, metavar="P", help=text)
        else:
            group.add_argument(name, type=int, metavar="N", help=text)


def _version() -> str:
    """The package's, read from its source as the build reads it."""
    source = (Path(__file__).parent / "isogemm" / "__init__.py").read_text(encoding="utf-8")
    return str(re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)[0])


if __name__ == "__main__":
    sys.exit(main())
