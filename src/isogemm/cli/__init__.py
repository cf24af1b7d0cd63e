"""What the commands of `isogemm` do: doctor | verify | bench | report | demo | tune | train-patchtst.

Their arguments are in `isogemm_cli`, which needs no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import isogemm
from isogemm.bench import ceilings, headline, report, runner, store, summary
from isogemm.bench import demo as demos
from isogemm.bench.cases import Case
from isogemm.bench.demo import DemoResult
from isogemm.bench.store import Row
from isogemm.bench.views import FamilyView, view_of
from isogemm.cli import families
from isogemm.cli.common import (
    FAILED,
    INTERRUPTED,
    NOTHING_PROVEN,
    OK,
    USAGE,
    UsageError,
    all_devices,
    describe,
    find_device,
    in_words,
    values_as_usage,
)  # fmt: skip
from isogemm.cli.families import Family
from isogemm.cli.terminal import Terminal
from isogemm.cli.training import train_patchtst
from isogemm.cli.tuning import show_tuned, tune
from isogemm.core import files, private
from isogemm.core.device import facts
from isogemm.training import report as training_report
from isogemm.training import results, world
from isogemm.verify.checks import Check, CheckResult, compile_ahead
from isogemm_cli import BUILD, RECORDED
from isogemm_cli import main as main


def run(args: argparse.Namespace) -> int:
    """Run the command that was parsed; its exit status."""
    try:
        return COMMANDS[args.name](args, Terminal())
    except (UsageError, OSError, ModuleNotFoundError) as error:
        print(f"isogemm {args.name}: error: {in_words(error)}", file=sys.stderr)
        return USAGE
    except world.FailedElsewhere:
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def doctor(args: argparse.Namespace, terminal: Terminal) -> int:
    """Show versions, devices, and which kernels serve calls on them."""
    devices = all_devices()
    env = runner.environment(devices[0])
    terminal.line(f"isogemm {isogemm.__version__}")
    terminal.line(", ".join(f"{name} {env[name]}" for name in ("python", "torch", "triton", "driver")))
    for warning in (private.untested("torch", env["torch"]), private.untested("triton", env["triton"])):
        if warning:
            terminal.line(f"warning: {warning}")
    for feature in (private.FAST_PATH, private.AUTOFUSE, private.COMPILE_FUSION):
        if lacking := private.missing(feature):
            terminal.line(f"warning: {feature} is off: torch {env['torch']} has no {', '.join(lacking)}")
    terminal.table("Devices", ["device", "name", "arch", "SMs", "shared memory", "L2"], map(_device_row, devices))
    lines = (
        [family.name, str(device), each.kernel, "yes" if each.usable else "no", each.reason]
        for family in families.get()
        for device in devices
        for each in family.usability(device)
    )
    terminal.table("Kernels", ["family", "device", "kernel", "usable", "reason"], lines, key=3)
    show_tuned((device for device in devices if device.type == "cuda"), terminal)
    return OK


def verify(args: argparse.Namespace, terminal: Terminal) -> int:
    """Try the contract of each family on a device."""
    device = find_device(args.device)
    if args.trials < 1:
        raise UsageError(f"--trials: got {args.trials}, expected at least 1")
    with values_as_usage():
        chosen = families.get(args.family)
    results = []
    checks = []
    for family in chosen:
        if family.verify is not None:
            compile_ahead(family.verify, device, args.trials)
            checks += [(family, check) for check in family.verify.CHECKS]
    with terminal.progress() as progress:
        for done, (family, check) in enumerate(checks):
            progress(done, len(checks), f"{family.name}: {check.name}")
            results.append(_run_check(check, device, args.trials))
    lines = []
    for (family, check), result in zip(checks, results, strict=True):
        said = "skipped" if result.skipped else "pass" if result.passed else "FAIL"
        counts = map(str, (result.trials, result.failures, result.differing))
        lines.append([family.name, check.name, said, *counts, result.skipped or result.detail or check.what])
    columns = ["family", "check", "result", "trials", "failures", "differing", "detail"]
    terminal.table(f"Checks on {describe(device)}", columns, lines, key=2)
    passed = sum(result.passed for result in results)
    skipped = sum(bool(result.skipped) for result in results)
    failed = len(results) - passed - skipped
    terminal.line(f"{passed} passed, {failed} failed, {skipped} skipped")
    if failed:
        return FAILED
    if not passed:
        terminal.line(f"Nothing was proven: no check ran on {describe(device)}.")
        return NOTHING_PROVEN
    return OK


def bench(args: argparse.Namespace, terminal: Terminal) -> int:
    """Measure the cases of each family, and the ceilings of the device, into JSON lines."""
    device = find_device(args.device)
    with values_as_usage():
        chosen = families.get(args.family)
    cases = _cases(chosen, device, args.quick)
    if args.only:
        cases = [case for case in cases if any(text in case.label for text in args.only)]
        if not cases:
            raise UsageError(f"--only: no case has {' or '.join(map(repr, args.only))} in its label")
    files.require_writable(args.out.parent if args.out.suffix == ".jsonl" else args.out)
    for family in chosen:
        if hasattr(family.bench, "compile_cases"):
            family.bench.compile_cases(device, [case for case in cases if case.family == family.name])
    rows, failures = _measure(cases, device, args.out, terminal, args.commit)
    _speed_table(rows, terminal)
    terminal.line(f"{args.out}: {len(rows)} rows appended")
    return _failure_table(failures, terminal)


def make_report(args: argparse.Namespace, terminal: Terminal) -> int:
    """Make the HTML report from JSON lines."""
    rows, runs = _recorded(args.results or [path for path in (RECORDED, BUILD) if any(path.rglob("*.jsonl"))][:1])
    report.write(args.out, rows, _views(), training_report.sections(runs))
    terminal.line(f"report: {args.out}")
    return OK


def demo(args: argparse.Namespace, terminal: Terminal) -> int:
    """Show bits, accuracy and speed of every family, and write a report."""
    device = find_device(args.device)
    files.require_writable(args.out.parent)  # before minutes of work
    on_cpu = device.type == "cpu"
    env = runner.environment(device)
    versions = ", ".join(f"{name} {env[name]}" for name in ("python", "torch", "triton"))
    terminal.line(f"isogemm {isogemm.__version__} on {describe(device)}; {versions}")
    if on_cpu:
        terminal.line(f"\n{demos.CPU_BANNER}")
    shown = _run_demos(device, terminal)
    terminal.table(demos.BITS, *demos.bits_table(shown), styles={"0": "bold green"})
    for line in (demos.total_text(shown), *demos.notes(shown)):
        terminal.line(line)
    terminal.table(demos.ACCURACY, *demos.accuracy_table(shown))
    recorded = headline.shipped() if on_cpu else []
    for gpu in recorded:
        terminal.table(f"Speed, recorded on {gpu.gpu}", headline.COLUMNS, gpu.lines)
        terminal.line(f"{headline.MEANING}\n{gpu.source}")
    local = f"Speed on this CPU, which says nothing about a GPU ({describe(device)})" if on_cpu else "Speed"
    terminal.table(local, *demos.speed_table(shown))
    rows: list[Row] = []
    failures: list[runner.Failure] = []
    if not on_cpu if args.bench is None else args.bench:
        measurements = args.out.with_suffix(".jsonl")
        measurements.unlink(missing_ok=True)
        rows, failures = _measure(_cases(families.get(), device, quick=True), device, measurements, terminal)
        _speed_table(rows, terminal)
    terminal.table("Failures", *demos.failures_table(shown))
    code = _failure_table(failures, terminal)
    try:
        page = report.DemoPage(describe(device), versions, shown, demos.CPU_BANNER if on_cpu else "", recorded)
        report.write(args.out, rows, _views(), page=page)
    except ModuleNotFoundError as error:
        terminal.line(f"no HTML report: {error}")
    else:
        terminal.line(f"report: {args.out}")
    return code if all(result.ok for _, result in shown) else FAILED


def _views() -> list[FamilyView]:
    return [family.bench.VIEW for family in families.get()]


def _device_row(device: torch.device) -> list[str]:
    if device.type == "cpu":
        return [str(device), describe(device), "", "", "", ""]
    known = facts(device)
    sizes = f"{known.shared_memory / 1024:.0f} KiB", f"{known.l2_bytes / 2**20:.0f} MiB"
    return [str(device), known.name, str(known.arch), str(known.sm_count), *sizes]


def _run_check(check: Check, device: torch.device, trials: int) -> CheckResult:
    try:
        return check.run(device, trials)
    except Exception as error:  # whatever a check raises, the others still run
        return CheckResult(check.name, trials, trials, 0, detail=f"{type(error).__name__}: {error}")


def _run_demos(device: torch.device, terminal: Terminal) -> list[tuple[str, DemoResult]]:
    shown, chosen = [], families.get()
    with terminal.progress() as progress:
        for done, family in enumerate(chosen):
            progress(done, len(chosen), family.name)
            torch.manual_seed(0)
            try:
                result = family.bench.demo(device)
            except Exception as error:  # whatever a family raises, the others are still shown
                result = DemoResult(family.summary, failure=f"{type(error).__name__}: {error}")
            shown.append((family.name, result))
    return shown


def _cases(chosen: Sequence[Family], device: torch.device, quick: bool) -> list[Case]:
    return [*ceilings.cases(device), *(case for family in chosen for case in family.bench.cases(device, quick))]


def _measure(
    cases: Sequence[Case], device: torch.device, out: Path, terminal: Terminal, commit: str | None = None
) -> tuple[list[Row], list[runner.Failure]]:
    """Measure and store: in `out` if it is a .jsonl file, else below it in a file per GPU and family."""
    rows = []
    with terminal.progress() as progress:
        measuring = runner.Runner(device, progress=progress, env=runner.environment(device, commit))
        for row in measuring.rows(cases):
            file = out if out.suffix == ".jsonl" else store.results_file(out, row.gpu, row.family)
            store.append(file, [row])
            rows.append(row)
    return rows, measuring.failures


def _recorded(paths: Sequence[Path]) -> tuple[list[Row], list[results.Record]]:
    """Read the measurements and the training runs in these files, and in files below these folders."""
    rows: list[Row] = []
    runs: list[results.Record] = []
    with values_as_usage():
        for path in paths:
            for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
                if results.holds_runs(file):
                    runs += results.read(file)
                else:
                    rows += store.read(file)
    if not rows and not runs:
        searched = ", ".join(map(str, paths)) or f"{RECORDED} or {BUILD}"
        raise UsageError(f"--results: no measurements in {searched}; `isogemm bench` makes some")
    return rows, runs


def _speed_table(rows: Sequence[Row], terminal: Terminal) -> None:
    lines = []
    for name, measured in summary.by_family(rows).items():
        view = view_of(name, measured, _views())
        for label, group in summary.by_group(measured, view).items():
            if speed := summary.speedups(group):
                figures = speed.geomean, speed.least, speed.most
                lines.append([name, label, str(speed.points), *(f"{figure:.2f}x" for figure in figures)])
    terminal.table("torch's time over isogemm's", ["family", "", "points", "geomean", "min", "max"], lines, key=2)


def _failure_table(failures: Sequence[runner.Failure], terminal: Terminal) -> int:
    """Show the cases that could not be measured; return the exit status."""
    terminal.table("Failures", ["case", "stage", "message"], failures)
    return FAILED if failures else OK


COMMANDS: dict[str, Callable[[argparse.Namespace, Terminal], int]] = {
    "doctor": doctor, "verify": verify, "bench": bench, "report": make_report, "demo": demo,
    "tune": tune,
    "train-patchtst": train_patchtst,
}  # fmt: skip
