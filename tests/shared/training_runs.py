"""The smallest runs of `isogemm train-patchtst`."""

from __future__ import annotations

from pathlib import Path

import torch

from isogemm.training import results
from isogemm.training.folder import CHECKPOINT, RESULTS
from isogemm_cli import main

DATA = ["--rows", "240", "--channels", "2"]
TINY = [
    "--device", "cpu", "--inputs", "16", "--horizon", "4", "--patch", "4", "--d-model", "8", "--nhead", "2",
    "--dim-feedforward", "16", "--layers", "1", "--batch", "16", "--epochs", "2",
]  # fmt: skip


def train(*arguments: str) -> int:
    return main(["train-patchtst", *TINY, *arguments])


def recorded(folder: str = "build/train-patchtst") -> list[results.Record]:
    return results.read(Path(folder) / RESULTS)


def final(folder: str) -> dict[str, torch.Tensor]:
    return torch.load(Path(folder) / CHECKPOINT, weights_only=True)["model"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
