"""`isogemm tune`: measures configs for a model's weights on this GPU. And what `doctor` shows of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch

from isogemm.cli.common import FAILED, INTERRUPTED, OK, UsageError, values_as_usage
from isogemm.cli.terminal import Terminal
from isogemm.core import env, tuned
from isogemm.core.device import DeviceFacts, facts
from isogemm.tuning import report, run, weights
from isogemm.tuning.weights import Weight

COMMAND = "isogemm tune --config config.json"


def tune(args: argparse.Namespace, terminal: Terminal) -> int:
    """Tune the weights of a config, a list or a file."""
    with values_as_usage():
        found = _weights(args)
        gpu = _gpu(args.dry_run)
        points = run.points(found, args.tokens, args.backward, gpu.arch, gpu.sm_count, gpu.name)
    if args.dry_run:
        for point in points:
            terminal.line(str(point))
        terminal.line(f"{len(points)} points")
        return OK
    code, failure = OK, None
    with terminal.progress() as progress:
        with values_as_usage():
            tuning = run.on_current_gpu(points, args.seconds, progress)
        try:
            tuning.run()
        except KeyboardInterrupt:
            code = INTERRUPTED
        except OSError as error:  # such as a full disk: what was kept before is shown first
            failure = error
    made = tuning.report()
    if failure is not None and not made.rows:
        raise failure
    terminal.table(f"Tuned for {made.gpu}", report.COLUMNS, (row.cells for row in made.rows), key=3)
    for line in made.summary:
        terminal.line(line)
    if not env.settings.tuned:
        terminal.line("ISOGEMM_TUNED=0: calls ignore it")
    if failure is not None:
        raise failure
    return FAILED if made.differing else code


def show_tuned(gpus: Iterable[torch.device], terminal: Terminal) -> None:
    """Print what is tuned for these GPUs."""
    for name in dict.fromkeys(facts(device).name for device in gpus):
        kept = tuned.summary(name)
        if not env.settings.tuned:
            terminal.line(f"tuned: ignored for {name}, since ISOGEMM_TUNED=0")
        elif not kept.points:
            terminal.line(f"tuned: nothing for {name}; `{COMMAND}` measures a model's weights")
        else:
            counts = f"{kept.points} points of {kept.entries} weights and passes"
            terminal.line(f"tuned: {counts} for {name}, in {kept.path}")


def _weights(args: argparse.Namespace) -> list[Weight]:
    if args.config is not None:
        found = weights.from_config(args.config)
    elif args.safetensors is not None:
        found = weights.from_safetensors(args.safetensors)
    else:
        found = weights.from_text(args.weights)
    return weights.listed(found, args.dtype and getattr(torch, args.dtype), args.precision)


def _gpu(dry_run: bool) -> DeviceFacts:
    """Return facts about the GPU to tune for; a dry run needs none."""
    try:
        return run.current_gpu()
    except RuntimeError as error:
        if dry_run:
            return DeviceFacts("", "sm_90", 132, 0, 0)
        raise UsageError(f"{error}; --dry-run lists what would be measured") from error
