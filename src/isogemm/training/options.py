"""The run that the options of `isogemm train-patchtst` ask for. The options themselves are in `isogemm_cli`."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import NamedTuple

from isogemm.training.config import PRESETS, Config
from isogemm.training.folder import CHECKPOINT
from isogemm.training.loop import Plan
from isogemm.training.model import Architecture
from isogemm.training.series import Series, read_csv, synthetic


class Asked(NamedTuple):
    config: Config
    plan: Plan
    series: Series


def asked(args: argparse.Namespace) -> Asked:
    """Turn the arguments into a run; ValueError names the option that cannot be served, and its value."""
    preset = PRESETS[args.preset]
    names = [each.name for each in (*fields(Architecture), *fields(Config)) if each.name != "model"]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    for option in ("resume", "overwrite"):
        if getattr(args, option) and args.compare is not None:
            raise ValueError(f"--{option}: not with --compare, which writes no checkpoints")
    if args.resume and args.overwrite:
        raise ValueError("--overwrite: not with --resume, which goes on with the run that is there")
    if args.resume and not (args.out / CHECKPOINT).exists():
        raise ValueError(f"{args.out / CHECKPOINT}: no such file; without --resume a run begins there")
    if args.backend is not None and args.compare is not None:
        raise ValueError("--backend: not with --compare, which names those to compare")
    if args.csv is not None:
        if args.rows is not None or args.channels is not None:
            raise ValueError("--rows, --channels: of synthetic data, but there is --csv")
        series = read_csv(args.csv)
        config = preset.with_options({**given, "channels": len(series.channels)})
    else:
        config = preset.with_options(given)
        rows = preset.rows if args.rows is None else args.rows
        if rows < 1:
            raise ValueError(f"rows is {rows}; expected at least 1")
        series = synthetic(rows, config.model.channels)
    plan = Plan(
        epochs=preset.epochs if args.epochs is None else args.epochs,
        patience=args.patience,
        folder=None if args.compare is not None else args.out,
        checkpoint_epochs=args.checkpoint_epochs,
        checkpoint_steps=args.checkpoint_steps,
    )
    return Asked(config, plan, series)
