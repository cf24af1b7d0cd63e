"""Checkpoints: whole or not there, and only for the run that they are of."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1


class CheckpointError(ValueError):
    """A file that is no checkpoint, or one of another run; the message says what differs."""


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Under another name first: whoever reads `path` finds all of the old file or all of the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            torch.save({"schema": SCHEMA, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()


def load(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(f"{path}: no such file")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle's, zipfile's and torch's own
        raise CheckpointError(f"{path}: not a checkpoint: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        raise CheckpointError(f"{path}: not a checkpoint of this version")
    return state


def require_same(path: Path, saved: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    names = dict.fromkeys((*saved, *asked))
    differing = [
        f"{name} is {asked.get(name)!r}, in the checkpoint {saved.get(name)!r}"
        for name in names
        if asked.get(name) != saved.get(name)
    ]
    if differing:
        raise CheckpointError(f"{path}: of another run: {'; '.join(differing)}")
