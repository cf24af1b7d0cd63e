"""Checkpoints: whole or not there, with a checksum, and only for the run that they are of."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isogemm.core import files
from isogemm.core.files import AnyPath

SCHEMA = 2

_SEAL_BYTES = len(files.sealed(b""))  # the seal is the comment that a zip archive may end with


class CheckpointError(ValueError):
    """A file that is no checkpoint, a damaged one, or one of another run; the message says what differs."""


@dataclass(frozen=True)
class Every:
    """A list of any length, each of whose entries has this structure."""

    entry: Any


def save(path: AnyPath, state: Mapping[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save({"schema": SCHEMA, **state}, buffer)
    content = buffer.getvalue()[:-2] + _SEAL_BYTES.to_bytes(2, "little")  # the comment's length is the archive's end
    files.write(path, files.sealed(content))


def load(path: AnyPath) -> dict[str, Any]:
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    data = path.read_bytes()
    try:
        files.unsealed(data)
    except ValueError as error:
        raise CheckpointError(f"{path}: not a checkpoint, or damaged: use a copy of it, or train again") from error
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # pickle's, zipfile's and torch's own
        raise CheckpointError(f"{path}: not a checkpoint: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        raise CheckpointError(f"{path}: not a checkpoint of this version")
    return state


def require_same(path: AnyPath, saved: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    names = dict.fromkeys((*saved, *asked))
    differing = [
        f"{name} is {asked.get(name)!r}, in the checkpoint {saved.get(name)!r}"
        for name in names
        if asked.get(name) != saved.get(name)
    ]
    if differing:
        raise CheckpointError(f"{path}: of another run: {'; '.join(differing)}")


def _in_words(value: Any) -> str:
    """The dtype, shape and layout of a tensor as text, or the type of another value."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    unusual = "" if value.layout is torch.strided and not value.is_meta else f" {value.layout} on {value.device}"
    return f"{value.dtype} {list(value.shape)}{unusual}"


def require_structure(path: AnyPath, found: Any, expected: Any, name: str = "state") -> None:
    """The same keys, lengths, types, and shapes and dtypes of tensors. expected: nested dicts, lists, `Every`, tensors;
    a type or a range in place of any other value.
    """

    def refuse(what: str) -> None:
        raise CheckpointError(f"{path}: not a checkpoint of this run: {name} {what}")

    if isinstance(expected, Tensor):
        if _in_words(found) != (right := _in_words(expected)):
            refuse(f"is {_in_words(found)}; expected {right}")
    elif isinstance(expected, type):
        if not isinstance(found, (int, float) if expected is float else expected):
            refuse(f"is {type(found).__name__}; expected {expected.__name__}")
        if expected is float and not abs(found) <= sys.float_info.max:
            refuse(f"is {found if isinstance(found, float) else 'too large'}; expected a finite number")
    elif isinstance(expected, range):
        if not isinstance(found, int) or found not in expected:
            refuse(f"is {found!r}; expected {expected[0]} to {expected[-1]}")
    elif isinstance(expected, Mapping):
        require_structure(path, found, dict, name)
        for key in dict.fromkeys((*expected, *found)):
            if key not in found or key not in expected:
                refuse(f"{'has no' if key in expected else 'has an unknown'} {key!r}")
            require_structure(path, found[key], expected[key], f"{name}[{key!r}]")
    else:
        require_structure(path, found, list, name)
        entries = [expected.entry] * len(found) if isinstance(expected, Every) else expected
        if len(entries) != len(found):
            refuse(f"has {len(found)} entries; expected {len(entries)}")
        for index, (one, other) in enumerate(zip(found, entries, strict=True)):
            require_structure(path, one, other, f"{name}[{index}]")
