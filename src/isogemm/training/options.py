"""The options of `isogemm train-patchtst`, and the run that they ask for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from isogemm.training.config import BACKENDS, PRECISIONS, PRESETS, Config
from isogemm.training.loop import Plan
from isogemm.training.model import ACTIVATIONS, NORMS, Architecture
from isogemm.training.series import Series, read_csv, synthetic

_CHOICES = {"norm": NORMS, "activation": ACTIVATIONS, "backend": BACKENDS, "precision": PRECISIONS}
_MODEL = {
    "channels": "of the synthetic data; a CSV has its own",
    "inputs": "rows that a forecast sees",
    "horizon": "rows to forecast",
    "patch": "rows in a patch",
    "stride": "rows from one patch to the next",
    "pad_end": "one more patch, of the last value repeated",
    "layers": "encoder layers",
    "d_model": "width of a layer",
    "nhead": "attention heads",
    "dim_feedforward": "width of its feed-forward part",
    "norm": "BatchNorm1d or LayerNorm",
    "activation": "of the feed-forward part",
    "pre_norm": "norms before the attention and the feed-forward part; residuals start after them",
    "res_attention": "a layer adds its attention scores to those of the one before",
    "dropout": "in the embedding and the layers",
    "attention_dropout": "of the attention's weights",
    "head_dropout": "of the forecast",
    "revin": "normalise each window by its own mean and deviation",
    "affine": "with a learned scale and shift of each channel",
    "subtract_last": "its last value instead of its mean",
}
_RUN = {
    "backend": "torch, torch.compile, or torch with isogemm's encoder layers",
    "batch": "windows of a step, over all processes; in training an incomplete last one is dropped",
    "lr": "AdamW's learning rate",
    "weight_decay": "AdamW's",
    "seed": "of the weights, the order of windows and dropout",
    "precision": "of products on a GPU: float32, rounded to TF32, or in bfloat16 by autocast (that on the CPU too)",
    "compile_rest": "with isogemm, torch.compile of what is around the layers",
    "graph": "a step is a CUDA graph (on a GPU: default for compile and isogemm, not for torch)",
    "graph_steps": "or a graph is so many steps",
}


class Asked(NamedTuple):
    config: Config
    plan: Plan
    series: Series


def add_arguments(parser: argparse.ArgumentParser, folder: Path) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--csv", type=Path, metavar="FILE", help="a header, then a date and numbers in each line (ETT)")
    data.add_argument(
        "--rows", type=int, metavar="N", help="of synthetic data, where there is no CSV (default: preset's)"
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--preset",
        choices=PRESETS,
        default="reference",
        help="; ".join(f"{name}: {preset.summary}" for name, preset in PRESETS.items()) + " (default: %(default)s)",
    )
    _add_fields(run, Config, _RUN)
    run.add_argument(
        "--compare",
        nargs="*",
        choices=BACKENDS,
        metavar="BACKEND",
        help=f"train with each of these backends, without checkpoints (default: {' '.join(BACKENDS)})",
    )
    run.add_argument("--epochs", type=int, metavar="N", help="(default: preset's)")
    run.add_argument("--patience", type=int, metavar="N", help="end after N epochs without a lower validation error")
    out = parser.add_argument_group("output")
    out.add_argument(
        "--out", type=Path, default=folder, metavar="DIR", help="of all that is written (default: %(default)s)"
    )
    out.add_argument("--resume", action="store_true", help="go on from DIR/checkpoint.pt, to the bits of one long run")
    out.add_argument("--checkpoint-epochs", type=int, default=1, metavar="N", help="from one to the next (default: 1)")
    out.add_argument("--checkpoint-steps", type=int, metavar="N", help="and one every N steps of an epoch")
    out.add_argument("--commit", metavar="HASH", help="the commit to record, where git cannot tell")
    _add_fields(parser.add_argument_group("model"), Architecture, _MODEL)


def asked(args: argparse.Namespace) -> Asked:
    """What the arguments ask for. ValueError where that cannot be, which names the option and what came."""
    preset = PRESETS[args.preset]
    given = {name: getattr(args, name) for name in (*_MODEL, *_RUN) if getattr(args, name) is not None}
    if args.resume and args.compare is not None:
        raise ValueError("--resume: not with --compare, which writes no checkpoints")
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


def _add_fields(group: Any, of: type, helps: dict[str, str]) -> None:
    """An option per field of a dataclass, None where it is not given."""
    types = get_type_hints(of)
    for name in helps:
        option = f"--{name.replace('_', '-')}"
        if types[name] in (bool, bool | None):
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=helps[name])
        elif name in _CHOICES:
            group.add_argument(option, choices=_CHOICES[name], help=helps[name])
        else:
            metavar = "P" if types[name] is float else "N"
            group.add_argument(option, type=types[name], metavar=metavar, help=helps[name])
