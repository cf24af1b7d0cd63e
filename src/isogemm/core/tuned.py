"""Store of the configs that `isogemm tune` measured on this machine's GPUs: a file in the user's cache folder.

There is one file per GPU name, Triton version and VERSION. It holds a table for each family, with the meaning of
`core.tables`. A config never changes bits, so a file may be lost, ignored or replaced at any time.
"""

from __future__ import annotations

import errno
import functools
import importlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any, get_type_hints

from isogemm.core import env, files
from isogemm.core.tables import Table

# Version of the file's format and of what a config means. Raise it where a kernel changes what a config is good for.
VERSION = 4

_NOTHING: Table = {}
# What reading a damaged or foreign file raises: one of another structure, or of a family without a single Config here.
_UNUSABLE = (OSError, ValueError, LookupError, RecursionError, ImportError, AttributeError, TypeError)


@dataclass(frozen=True)
class Summary:
    """How much is kept for a GPU."""

    path: Path
    entries: int  # weights, each with one kind of problem
    points: int  # numbers of tokens, over all entries


def path(gpu: str) -> Path:
    """The file of a GPU, whether it exists or not."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return env.settings.cache / "isogemm" / "tuned" / f"{name}-triton-{_triton()}-v{VERSION}.txt"


def load(family: str, gpu: str) -> Table:
    """The tuned table of a family; empty for gpu "", where ISOGEMM_TUNED=0, and where there is no usable file.

    The file is read once per process, at the first call. One that cannot be used gives one warning.
    """
    return _served(gpu).get(family, _NOTHING)


def require_writable(gpu: str) -> None:
    """Raise an OSError if `keep` could not write, before minutes of work."""
    file = path(gpu)
    if not file.is_absolute():
        raise files.FileError(f"there is no home folder for {file}: set XDG_CACHE_HOME")
    with files.naming(file):
        files.require_writable(file.parent)
        with _lock_file(file).open("ab"):
            pass
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


def keep(family: str, gpu: str, table: Table) -> Path:
    """Add the steps of a table to the file; return its path.

    They replace the file's steps of the same size.
    Safe with several processes: each one's steps stay. OSError names the file where it cannot be written.
    """
    file = path(gpu)
    with files.naming(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with files.locked(_lock_file(file)):
            try:
                known = _parsed(file, gpu)
            except _UNUSABLE:
                known = {}
            known[family] = _merged(known.get(family, _NOTHING), table)
            files.write(file, files.sealed(_text(known, gpu).encode()))
    _tables.cache_clear()
    return file


def _lock_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.lock")


def summary(gpu: str) -> Summary:
    """How much `load` serves, over all families."""
    entries = [steps for table in _served(gpu).values() for steps in table.values()]
    return Summary(path(gpu), len(entries), sum(map(len, entries)))


def _served(gpu: str) -> Mapping[str, Table]:
    if not gpu or not env.settings.tuned or not path(gpu).is_absolute():
        return {}
    return _tables(path(gpu), gpu)


@functools.cache
def _tables(file: Path, gpu: str) -> Mapping[str, Table]:
    """The tables of a file by family."""
    try:
        return _parsed(file, gpu)
    except _UNUSABLE as error:
        if os.path.lexists(file):  # else nothing was tuned, or the folder is not this user's
            warnings.warn(f"isogemm ignores {file}: {error}; `isogemm tune` replaces it", RuntimeWarning, stacklevel=3)
        return {}


def _merged(*tables: Table) -> Table:
    """All steps; a later table's replace those of the same size."""
    steps: dict[tuple[Any, ...], dict[int, Any]] = {}
    for table in tables:
        for key, by_size in table.items():
            steps.setdefault(key, {}).update(by_size)
    return {key: tuple(sorted(by_size.items())) for key, by_size in steps.items()}


def _text(tables: Mapping[str, Table], gpu: str) -> str:
    families = {family: list(table.items()) for family, table in tables.items()}
    return json.dumps({**_header(gpu, families), "families": families}) + "\n"


def _header(gpu: str, families: Iterable[str]) -> dict[str, object]:
    """What a file must have been written for; `configs` has the fields of each family's Config."""
    return {"gpu": gpu, "triton": _triton(), "version": VERSION, "configs": {each: _fields(each) for each in families}}


def _fields(family: str) -> str:
    """The names and types of a config's fields, with the values of those that have a few."""
    config = importlib.import_module(f"isogemm.{family}.configs").Config
    types = get_type_hints(config)
    return ", ".join(f"{each.name}: {types[each.name]}" for each in fields(config))


def _parsed(file: Path, gpu: str) -> dict[str, Table]:
    """A file's tables by family; ValueError says what is wrong with it.

    The checksum shows that `keep` wrote the content, so beyond the header nothing is validated.
    """
    record = json.loads(files.unsealed(file.read_bytes()))
    for name, expected in _header(gpu, record["families"]).items():
        if record.get(name) != expected and name == "configs":
            raise ValueError("its configurations are of another version of isogemm")
        if record.get(name) != expected:
            raise ValueError(f"its {name} is {record.get(name)!r}; expected {expected!r}")
    return {
        family: {tuple(key): tuple((size, tuple(config)) for size, config in steps) for key, steps in entries}
        for family, entries in record["families"].items()
    }


@functools.cache
def _triton() -> str:
    """The version of the installed Triton, which this does not import."""
    for package in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "none"
