"""`isogemm train-patchtst`: train a forecaster, or one with each backend, and show the runs."""

from __future__ import annotations

import argparse
import gc
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from isogemm.bench import runner
from isogemm.cli.common import FAILED, INTERRUPTED, OK, UsageError, describe, find_device, in_words, values_as_usage
from isogemm.cli.terminal import STANDARD_OUTPUT, Terminal
from isogemm.training import folder, loop, report, results, world
from isogemm.training.series import Series, read_csv, synthetic
from isogemm_options import BACKENDS, PRESETS, Config


def train_patchtst(args: argparse.Namespace, terminal: Terminal) -> int:
    """Train a PatchTST forecaster, or one with each backend."""
    with values_as_usage():
        config, plan, series = _asked(args)
    with (
        world.entered(find_device(args.device)) as here,
        _stop_requests(here.size == 1) as stop,
        _claimed(args.out, here),
    ):
        try:
            code = _train(args, config, plan, series, here, stop, terminal)
        except OSError as error:
            is_of_run = error.errno is not None and error.filename not in (None, STANDARD_OUTPUT)
            if not (is_of_run and plan.folder and (args.out / folder.CHECKPOINT).exists()):
                raise
            raise UsageError(f"{in_words(error)}; --resume then continues from the last checkpoint") from error
    if stop() and code == OK:
        terminal.line("stopped after the run had ended; it is recorded")
        return INTERRUPTED
    return code


def _asked(args: argparse.Namespace) -> tuple[Config, loop.Plan, Series]:
    """Turn the arguments into a run; ValueError names the option that cannot be served, and its value."""
    preset = PRESETS[args.preset]
    given = {name: getattr(args, name) for name in preset.config.flat() if getattr(args, name) is not None}
    for option in ("resume", "overwrite"):
        if getattr(args, option) and args.compare is not None:
            raise ValueError(f"--{option}: not with --compare, which writes no checkpoints")
    if args.resume and args.overwrite:
        raise ValueError("--overwrite: not with --resume, which continues the run that is there")
    if args.resume and not (args.out / folder.CHECKPOINT).exists():
        raise ValueError(f"{args.out / folder.CHECKPOINT}: no such file; leave out --resume to start a run there")
    if args.backend is not None and args.compare is not None:
        raise ValueError("--backend: not with --compare, which names those to compare")
    if args.csv is not None:
        if args.rows is not None or args.channels is not None:
            raise ValueError("--rows, --channels: only for synthetic data, not with --csv")
        series = read_csv(args.csv)
        config = preset.with_options({**given, "channels": len(series.channels)})
    else:
        config = preset.with_options(given)
        rows = preset.rows if args.rows is None else args.rows
        if rows < 1:
            raise ValueError(f"rows is {rows}; expected at least 1")
        series = synthetic(rows, config.model.channels)
    epochs = preset.epochs if args.epochs is None else args.epochs
    out = None if args.compare is not None else args.out
    plan = loop.Plan(epochs, args.patience, out, args.checkpoint_epochs, args.checkpoint_steps)
    return config, plan, series


@contextmanager
def _stop_requests(noted: bool) -> Iterator[Callable[[], bool]]:
    """Catch the first SIGINT or SIGTERM; yield a function that says whether it came. A second one acts as usual."""
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
    """Free what a run's graphs and compiled code hold, before the next run's memory is measured."""
    if compiled:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _claimed(out: Path, here: world.World) -> Iterator[None]:
    """Hold the lock of a run's folder, in the process that writes there."""
    with ExitStack() as held:
        with here.together():
            if here.leads:
                held.enter_context(folder.claimed(out))
        yield


def _train(
    args: argparse.Namespace, config: Config, plan: loop.Plan, series: Series, here: world.World,
    stop: Callable[[], bool], terminal: Terminal,
) -> int:  # fmt: skip
    """Train with each backend, record and show the runs that ended; return the exit status."""
    file = args.out / folder.RESULTS
    with values_as_usage(), here.together():
        earlier = results.read(file) if here.leads else []  # finds a broken line before training, not after
        if here.leads and plan.folder and not (args.resume or args.overwrite):
            folder.require_no_run(args.out)
    records, code = [], OK
    for backend in [config.backend] if args.compare is None else args.compare or BACKENDS:
        if stop():
            terminal.line(f"stopped before {backend} began")
            code = INTERRUPTED
            break
        with values_as_usage(), here.together():
            run = loop.Run(replace(config, backend=backend), series, here)
            if args.resume:
                run.resume(args.out / folder.CHECKPOINT)
            if args.overwrite and here.leads:
                folder.discard_run(args.out)
        if run.ended(plan) and (known := here.of_each(results.of_run(earlier, run))[0]):
            if here.leads:
                run.mend_best(args.out)
                more = f"--epochs above {len(run.epochs)} continues it"
                terminal.line(f"{args.out}: this run has ended and is recorded; {more}")
                _show_training([known], args.out, terminal, describe(here.device))
            return OK
        try:
            with terminal.progress(here.leads) as progress:
                outcome = run.fit(plan, _prefixed(f"{backend}: ", progress), stop)
        except loop.Stopped as stopped:
            terminal.line(f"stopped {stopped}{'; --resume continues from there' if plan.folder else ''}")
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
            _show_training(records, args.out, terminal, describe(here.device))
    return code


def _prefixed(prefix: str, progress: runner.Progress) -> runner.Progress:
    return lambda done, total, step: progress(done, total, prefix + step)


def _show_training(records: Sequence[results.Record], out: Path, terminal: Terminal, device: str) -> None:
    written, unplotted = [out / folder.RESULTS], ""
    try:  # before the tables: whoever reads those may stop
        for name, draw in report.PLOTS.items():
            written += report.save(out / name, draw, records)
    except ModuleNotFoundError as error:
        unplotted = f"no plots: {error}"
    for record in records:
        terminal.table(f"{results.backend(record)}, epochs", *results.epochs(record))
    terminal.table(f"Training on {device}", *results.comparison(records))
    if unplotted:
        terminal.line(unplotted)
    terminal.line(f"written: {', '.join(map(str, written))}")
