"""What the commands of `isogemm` do: doctor | verify | bench | report | demo | train-patchtst.

Their arguments are in `isogemm_cli`, which needs no torch.
"""

from __future__ import annotations

import argparse
import gc
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch

import isogemm
from isogemm import families
from isogemm.bench import ceilings, files, headline, report, runner, store, summary, swapped_models, tables
from isogemm.bench import demo as demos
from isogemm.bench.cases import Case
from isogemm.bench.store import Row
from isogemm.bench.views import FamilyView, view_of
from isogemm.core import private, versions
from isogemm.core.device import facts
from isogemm.families import DemoResult, Family
from isogemm.testing.checks import Check, CheckResult
from isogemm.training import folder, loop, options, plots, results, world
from isogemm.training import report as training_report
from isogemm.training.config import BACKENDS
from isogemm_cli import BUILD, RECORDED
from isogemm_cli import main as main

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    Command = Callable[[argparse.Namespace, "Terminal"], int]

OK, FAILED, USAGE, NOTHING_PROVEN, INTERRUPTED = 0, 1, 2, 3, 130

_NARROWEST = 20  # characters of a column of words
_NUMBER = re.compile(r"\d\S*( to \d\S*| \(\S+\)| [KMG]iB| \*)?")  # a cell to align to the right

IMAGES = Path("docs/images")
HEADLINE = Path("src/isogemm/bench") / headline.FILE
STYLES = {"yes": "green", "pass": "green", "no": "yellow", "skipped": "yellow", "FAIL": "bold red"}


class UsageError(Exception):
    """What was asked for cannot be done here; the message is one line."""


def run(args: argparse.Namespace) -> int:
    """Run the command that was parsed; its exit status."""
    try:
        return COMMANDS[args.name](args, Terminal())
    except (UsageError, OSError, ModuleNotFoundError) as error:
        print(f"isogemm {args.name}: error: {_in_words(error)}", file=sys.stderr)
        return USAGE
    except world.FailedElsewhere:
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def doctor(args: argparse.Namespace, terminal: Terminal) -> int:
    """Versions, devices, and which kernels serve calls on them."""
    devices = _all_devices()
    env = runner.environment(devices[0])
    terminal.line(f"isogemm {isogemm.__version__}")
    terminal.line(", ".join(f"{name} {env[name]}" for name in ("python", "torch", "triton", "driver")))
    for warning in (versions.untested("torch", env["torch"]), versions.untested("triton", env["triton"])):
        if warning:
            terminal.line(f"warning: {warning}")
    for feature in (private.FAST_PATH, private.AUTOFUSE, private.COMPILE_FUSION):
        if lacking := private.missing(feature):
            terminal.line(f"warning: {feature} is off: torch {env['torch']} has no {', '.join(lacking)}")
    terminal.table("Devices", ["device", "name", "arch", "SMs", "shared memory", "L2"], map(_device_row, devices))
    terminal.table(
        "Kernels",
        ["family", "device", "kernel", "usable", "reason"],
        (
            [family.name, str(device), each.kernel, "yes" if each.usable else "no", each.reason]
            for family in families.get()
            for device in devices
            for each in family.usability(device)
        ),
        key=3,
    )
    return OK


def verify(args: argparse.Namespace, terminal: Terminal) -> int:
    """Try the contract of each family on a device."""
    device = _device(args.device)
    if args.trials < 1:
        raise UsageError(f"--trials: got {args.trials}, expected at least 1")
    checks = [(family, check) for family in _families(args.family) for check in family.checks]
    results = []
    for family in _families(args.family):
        if family.ahead_of_checks is not None:
            family.ahead_of_checks(device, args.trials)
    with terminal.progress() as progress:
        for done, (family, check) in enumerate(checks):
            progress(done, len(checks), f"{family.name}: {check.name}")
            results.append(_run_check(check, device, args.trials))
    terminal.table(
        f"Checks on {_describe(device)}",
        ["family", "check", "result", "trials", "failures", "differing", "detail"],
        (
            [
                family.name,
                check.name,
                "skipped" if result.skipped else "pass" if result.passed else "FAIL",
                *map(str, (result.trials, result.failures, result.differing)),
                result.skipped or result.detail or check.what,
            ]
            for (family, check), result in zip(checks, results, strict=True)
        ),
        key=2,
    )
    passed = sum(result.passed for result in results)
    skipped = sum(bool(result.skipped) for result in results)
    failed = len(results) - passed - skipped
    terminal.line(f"{passed} passed, {failed} failed, {skipped} skipped")
    if failed:
        return FAILED
    if not passed:
        terminal.line(f"Nothing was proven: no check ran on {_describe(device)}.")
        return NOTHING_PROVEN
    return OK


def bench(args: argparse.Namespace, terminal: Terminal) -> int:
    """Measure the cases of each family, and the ceilings of the device, into JSON lines."""
    device = _device(args.device)
    cases = _cases(_families(args.family), device, args.quick)
    if args.only:
        cases = [case for case in cases if any(text in case.label for text in args.only)]
        if not cases:
            raise UsageError(f"--only: no case has {' or '.join(map(repr, args.only))} in its label")
    files.require_writable(args.out.parent if args.out.suffix == ".jsonl" else args.out)
    for family in _families(args.family):
        mine = [case for case in cases if case.family == family.name]
        if family.ahead_of_cases is not None:
            family.ahead_of_cases(device, mine)
    rows, failures = _measure(cases, device, args.out, terminal, args.commit)
    _speed_table(rows, terminal)
    terminal.line(f"{args.out}: {len(rows)} rows appended")
    return _failure_table(failures, terminal)


def make_report(args: argparse.Namespace, terminal: Terminal) -> int:
    """Make the HTML report, or the tables of the documents, from JSON lines."""
    rows, runs = _recorded(args.results or [path for path in (RECORDED, BUILD) if any(path.rglob("*.jsonl"))][:1])
    if not args.docs:
        report.write(args.out, rows, _views(), training_report.sections(runs))
        terminal.line(f"report: {args.out}")
        return OK
    recorded = headline.recorded(rows, training_report.figures(runs))
    made = tables.tables(rows, _views()) | training_report.tables(runs) | swapped_models.tables(RECORDED)
    if recorded:
        made["headline"] = headline.table(recorded)
    training_report.save_plots(runs, IMAGES)
    rewritten = []
    for document in [Path("README.md"), *sorted(Path("docs").rglob("*.md")), *sorted(Path("src").rglob("*.md"))]:
        try:
            rewritten += [document] if tables.refresh(document, made) else []
        except ValueError as error:
            raise UsageError(f"{document}: {error}") from error
    if recorded and HEADLINE.parent.is_dir():
        rewritten += [HEADLINE] if headline.refresh(HEADLINE, recorded) else []
    for file in rewritten:
        terminal.line(f"rewritten: {file}")
    return OK


def demo(args: argparse.Namespace, terminal: Terminal) -> int:
    """Bits, accuracy and speed of every family, and a report."""
    device = _device(args.device)
    files.require_writable(args.out.parent)  # before minutes of work
    on_cpu = device.type == "cpu"
    env = runner.environment(device)
    versions = ", ".join(f"{name} {env[name]}" for name in ("python", "torch", "triton"))
    terminal.line(f"isogemm {isogemm.__version__} on {_describe(device)}; {versions}")
    if on_cpu:
        terminal.line(f"\n{demos.CPU_BANNER}")
    shown = _run_demos(device, terminal)
    terminal.table(demos.BITS, *demos.bits_table(shown), styles={"0": "bold green"})
    for line in (demos.total_text(shown), *demos.notes(shown)):
        terminal.line(line)
    terminal.table(demos.ACCURACY, *demos.accuracy_table(shown))
    recorded = headline.shipped() if on_cpu else []
    for gpu in recorded:
        terminal.table(f"Speed, recorded on {gpu.gpu}", headline.COLUMNS, (each.cells for each in gpu.figures))
        terminal.line(f"{headline.MEANING}\n{gpu.source}")
    local = f"Speed on this CPU, which says nothing about a GPU ({_describe(device)})" if on_cpu else "Speed"
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
        page = report.DemoPage(_describe(device), versions, shown, demos.CPU_BANNER if on_cpu else "", recorded)
        report.write(args.out, rows, _views(), page=page)
    except ModuleNotFoundError as error:
        terminal.line(f"no HTML report: {error}")
    else:
        terminal.line(f"report: {args.out}")
    return code if all(result.ok for _, result in shown) else FAILED


def train_patchtst(args: argparse.Namespace, terminal: Terminal) -> int:
    """Train a PatchTST forecaster, or one with each backend."""
    with _values_as_usage():
        asked = options.asked(args)
    with (
        world.entered(_device(args.device)) as here,
        _stop_requests(here.size == 1) as stop,
        _claimed(args.out, here),
    ):
        try:
            code = _train(args, asked, here, stop, terminal)
        except OSError as error:
            is_of_run = error.errno is not None and error.filename not in (None, _STANDARD_OUTPUT)
            if not (is_of_run and asked.plan.folder and (args.out / folder.CHECKPOINT).exists()):
                raise
            raise UsageError(f"{_in_words(error)}; --resume then goes on from the last checkpoint") from error
    if stop() and code == OK:
        terminal.line("stopped, after the run had ended: it is recorded")
        return INTERRUPTED
    return code


_STANDARD_OUTPUT = "standard output"  # where an error of a file is named


class Terminal:
    """Lines, tables and progress: with rich where it is installed, as plain text elsewhere."""

    def __init__(self) -> None:
        self._out = _rich_console(sys.stdout)
        self._err = _rich_console(sys.stderr)

    def line(self, text: str) -> None:
        with files.naming(_STANDARD_OUTPUT):
            if self._out is None:
                print(text, flush=True)
            else:
                self._out.print(text, soft_wrap=True)

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        styles: Mapping[str, str] = STYLES,
        key: int = 1,
    ) -> None:
        """Nothing where there are no rows. styles: rich's, by a cell's text.

        In a narrow terminal several tables, one below the other: each has the first `key` columns, which name a line.
        """
        lines = [[" ".join(cell.split()) for cell in row] for row in rows]
        if not lines:
            return
        made = [Column(name, cells) for name, *cells in zip(columns, *lines, strict=True)]
        with files.naming(_STANDARD_OUTPUT):
            self._show(title, made, styles, key)

    def _show(self, title: str, made: Sequence[Column], styles: Mapping[str, str], key: int) -> None:
        if self._out is None:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNSEEN_WIDTH
            for piece in _pieces(made, key, width + 2, gap=2):
                print(f"\n{title}\n{_plain_table(piece)}" if title else f"\n{_plain_table(piece)}")
                title = ""
            print()
            return
        for piece in _pieces(made, key, self._out.width - 1, gap=3):
            self._out.print()
            self._out.print(_rich_table(title, piece, styles))
            title = ""

    @contextmanager
    def progress(self, shown: bool = True) -> Iterator[runner.Progress]:
        """Shows how many steps are done and which one begins: a bar on a terminal, lines elsewhere."""
        if not shown or self._err is None or not self._err.is_terminal:
            yield _line_per_step() if shown else lambda done, total, step: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        text = TextColumn("{task.description}", markup=False)
        columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text
        with Progress(*columns, console=self._err, transient=True) as bar:
            task = bar.add_task("")
            yield lambda done, total, step: bar.update(task, completed=done, total=total, description=step)


def _prefixed(prefix: str, progress: runner.Progress) -> runner.Progress:
    return lambda done, total, step: progress(done, total, prefix + step)


def _line_per_step() -> runner.Progress:
    last = ""

    def show(done: int, total: int, step: str) -> None:
        nonlocal last
        if step and step != last:
            print(f"[{min(done + 1, total)}/{total}] {step}", file=sys.stderr, flush=True)
        last = step

    return show


_UNSEEN_WIDTH = 140  # of tables in a file or a pipe


def _rich_console(stream: TextIO) -> Console | None:
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    width = None if stream.isatty() else _UNSEEN_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


@dataclass(frozen=True)
class Column:
    name: str
    cells: Sequence[str]
    width: int = 0

    @property
    def numeric(self) -> bool:
        return all(_NUMBER.fullmatch(cell) for cell in self.cells if cell)

    @property
    def least(self) -> int:
        """The width at which no number is broken, and no word but a long one."""
        words = " ".join((self.name, *self.cells)).split()
        return max(*map(len, self.cells if self.numeric else ()), min(_NARROWEST, max(map(len, words), default=1)), 1)

    @property
    def most(self) -> int:
        return max(1, *map(len, (self.name, *self.cells)))


def _pieces(columns: Sequence[Column], key: int, most: int, gap: int) -> Iterator[list[Column]]:
    """As few tables as `most` characters allow: the first `key` columns, some of the others, and their widths."""
    pieces: list[list[Column]] = []
    for column in columns[key:]:
        if not pieces or sum(each.least + gap for each in (*pieces[-1], column)) > most:
            pieces.append(list(columns[:key]))
        pieces[-1].append(column)
    for piece in pieces or [list(columns)]:
        widths = [each.most for each in piece]
        while sum(widths) + gap * len(widths) > most:
            shrinkable = [width if width > each.least else 0 for width, each in zip(widths, piece, strict=True)]
            if not any(shrinkable):
                break
            widths[shrinkable.index(max(shrinkable))] -= 1
        yield [replace(each, width=width) for each, width in zip(piece, widths, strict=True)]


def _rich_table(title: str, columns: Sequence[Column], styles: Mapping[str, str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", title_style="bold")
    for each in columns:
        table.add_column(
            each.name, justify="right" if each.numeric else "left", width=each.width, overflow="fold"
        )  # fmt: skip
    for line in zip(*(each.cells for each in columns), strict=True):
        table.add_row(*(Text(cell, styles.get(cell, "")) for cell in line))
    return table


def _plain_table(columns: Sequence[Column]) -> str:
    widths = [each.width for each in columns]
    wrapped: list[tuple[str, ...]] = []
    for line in zip(*((each.name, "-" * each.width, *each.cells) for each in columns), strict=True):
        cells = [textwrap.wrap(cell, width) for cell, width in zip(line, widths, strict=True)]
        wrapped += zip_longest(*cells, fillvalue="")
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in wrapped)


def _families(names: Sequence[str]) -> list[Family]:
    try:
        return families.get(names)
    except ValueError as error:
        raise UsageError(f"--{error}") from error


def _views() -> list[FamilyView]:
    return [family.view for family in families.get() if family.view is not None]


def _all_devices() -> list[torch.device]:
    """This machine's devices, the best first."""
    return [*(torch.device("cuda", index) for index in range(torch.cuda.device_count())), torch.device("cpu")]


def _device(name: str | None) -> torch.device:
    """The device of that name, or this machine's best."""
    present = _all_devices()
    if name is None:
        return present[0]
    wanted = "cuda:0" if name == "cuda" else name
    for device in present:
        if str(device) == wanted:
            return device
    raise UsageError(f"--device: got {name!r}, this machine has {', '.join(map(str, present))}")


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return runner.environment(device)["gpu"]
    return f"{facts(device).name} ({device})"


def _device_row(device: torch.device) -> list[str]:
    if device.type == "cpu":
        return [str(device), _describe(device), "", "", "", ""]
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
                result = family.demo(device)
            except Exception as error:  # whatever a family raises, the others are still shown
                result = DemoResult(family.summary, failure=f"{type(error).__name__}: {error}")
            shown.append((family.name, result))
    return shown


def _cases(chosen: Sequence[Family], device: torch.device, quick: bool) -> list[Case]:
    return [*ceilings.cases(device), *(case for family in chosen for case in family.cases(device, quick))]


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
    """The measurements, and the training runs, of these files and of those below these folders."""
    rows: list[Row] = []
    runs: list[results.Record] = []
    with _values_as_usage():
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
    """Show the cases that gave no time; the exit code they call for."""
    lines = [[failure.label, failure.stage, failure.message] for failure in failures]
    terminal.table("Failures", ["case", "stage", "message"], lines)
    return FAILED if failures else OK


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


@contextmanager
def _values_as_usage() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


@contextmanager
def _stop_requests(noted: bool) -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM came: the first is noted, the second acts as it would have."""
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        came.append(number)
        restore()

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)} if noted else {}
    try:
        yield lambda: bool(came)
    finally:
        restore()


def _free_memory(compiled: bool) -> None:
    """What a run's graphs and compiled code hold, before the next one's is measured."""
    if compiled:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _claimed(out: Path, here: world.World) -> Iterator[None]:
    """The folder of a run, for the process that writes there."""
    with ExitStack() as held:
        with here.together():
            if here.leads:
                held.enter_context(folder.claimed(out))
        yield


def _train(
    args: argparse.Namespace, asked: options.Asked, here: world.World, stop: Callable[[], bool], terminal: Terminal
) -> int:
    """Train with each backend, record and show the runs that ended; the exit status."""
    config, plan, series = asked
    file = args.out / folder.RESULTS
    with _values_as_usage(), here.together():
        earlier = results.read(file) if here.leads else []  # which also finds a torn line before, not after training
        if here.leads and plan.folder and not (args.resume or args.overwrite):
            folder.require_no_run(args.out)
    records, code = [], OK
    for backend in [config.backend] if args.compare is None else args.compare or BACKENDS:
        if stop():
            terminal.line(f"stopped before {backend} began")
            code = INTERRUPTED
            break
        with _values_as_usage(), here.together():
            run = loop.Run(replace(config, backend=backend), series, here)
            if args.resume:
                run.resume(args.out / folder.CHECKPOINT)
            if args.overwrite and here.leads:
                folder.discard_run(args.out)
        if run.ended(plan) and (known := here.of_each(results.of_run(earlier, run))[0]):
            if here.leads:
                run.mend_best(args.out)
                terminal.line(
                    f"{args.out}: this run has ended and is recorded; --epochs above {len(run.epochs)} goes on"
                )
                _show_training([known], args.out, terminal, _describe(here.device))
            return OK
        try:
            with terminal.progress(here.leads) as progress:
                outcome = run.fit(plan, _prefixed(f"{backend}: ", progress), stop)
        except loop.Stopped as stopped:
            terminal.line(f"stopped {stopped}{'; --resume goes on from there' if plan.folder else ''}")
            code = INTERRUPTED
            break
        except loop.Diverged as diverged:
            if here.leads:
                terminal.line(f"{backend}: {diverged}")
            code = FAILED
        else:
            made = results.record(run, outcome, runner.environment(here.device, args.commit), args.preset)
            with here.together():
                if here.leads:
                    results.append(file, made)
            records.append(made)
            del outcome
        compiled = run.config.compiles
        del run
        _free_memory(compiled)
    with here.together():
        if here.leads and records:
            _show_training(records, args.out, terminal, _describe(here.device))
    return code


def _show_training(records: Sequence[results.Record], out: Path, terminal: Terminal, device: str) -> None:
    written, unplotted = [out / folder.RESULTS], ""
    try:  # before the tables: whoever reads those may stop
        written += plots.save(out / "losses", plots.losses(records))
        written += plots.save(out / "forecast", plots.forecast(records))
    except ModuleNotFoundError as error:
        unplotted = f"no plots: {error}"
    for record in records:
        terminal.table(f"{results.backend(record)}, epochs", *results.epochs(record))
    terminal.table(f"Training on {device}", *results.comparison(records))
    if unplotted:
        terminal.line(unplotted)
    terminal.line(f"written: {', '.join(map(str, written))}")


COMMANDS: dict[str, Command] = {
    "doctor": doctor,
    "verify": verify,
    "bench": bench,
    "report": make_report,
    "demo": demo,
    "train-patchtst": train_patchtst,
}
