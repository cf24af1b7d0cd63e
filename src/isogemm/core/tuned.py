"""Store of the configs that `isogemm tune` measured on this machine's GPUs: a file in the user's cache folder.

There is one file per GPU name, Triton version and VERSION. It holds a table for each family, with the meaning of
`core.tables`. A config never changes bits, so a file may be lost, ignored or replaced at any time.
"""

from __future__ import annotations

import errno
import functools
import importlib
import itertools
import json
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from isogemm.core import env, files
from isogemm.core.tables import Table

# Version of the file's format and of what a config means. Raise it where a kernel changes what a config is good for.
VERSION = 1

_NOTHING: Table = {}
_LARGEST = 4096  # of a config's numbers
_UNUSABLE = (OSError, ValueError, RecursionError)  # what reading a damaged or foreign file raises


@dataclass(frozen=True)
class Summary:
    """What is kept for a GPU."""

    path: Path
    entries: int  # weights, each with one kind of problem
    points: int  # numbers of tokens, over all entries


def path(gpu: str) -> Path:
    """The file of a GPU, whether it exists or not."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return env.settings.cache / "isogemm" / "tuned" / f"{name}-triton-{_triton()}-v{VERSION}.json"


def load(family: str, gpu: str) -> Table:
    """The tuned table of a family; empty for gpu "", where ISOGEMM_TUNED=0, and where there is no usable file.

    The file is read once per process, at the first call. One that cannot be used gives one warning.
    """
    if not gpu or not env.settings.tuned or not path(gpu).is_absolute():
        return _NOTHING
    return _tables(path(gpu), gpu).get(family, _NOTHING)


def require_writable(gpu: str) -> None:
    """Raise an OSError where `keep` could not write: before minutes of work."""
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
            files.write(file, _text(known, gpu).encode())
    _tables.cache_clear()
    return file


def _lock_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.lock")


def summary(gpu: str) -> Summary:
    """What `load` serves, over all families."""
    tables = _tables(path(gpu), gpu).values() if env.settings.tuned else ()
    entries = [steps for table in tables for steps in table.values()]
    return Summary(path(gpu), len(entries), sum(map(len, entries)))


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
    entries = {
        family: [{"key": key, "steps": steps} for key, steps in table.items()] for family, table in tables.items()
    }
    return json.dumps({**_header(gpu), "families": entries}) + "\n"


def _header(gpu: str) -> dict[str, object]:
    return {"gpu": gpu, "triton": _triton(), "version": VERSION}


def _parsed(file: Path, gpu: str) -> dict[str, Table]:
    """A file's tables by family; ValueError says what is wrong with it."""
    record = json.loads(file.read_bytes())
    _require(isinstance(record, dict), "expected an object")
    for name, expected in _header(gpu).items():
        found = record.get(name)
        _require(found == expected, f"its {name} is {found!r}; expected {expected!r}")
    families = record.get("families")
    _require(isinstance(families, dict), "expected families by name")
    return {family: dict(_entry(family, each) for each in _list(entries)) for family, entries in families.items()}


def _entry(family: str, entry: Any) -> tuple[tuple[Any, ...], tuple[tuple[int, Any], ...]]:
    _require(isinstance(entry, dict) and entry.keys() == {"key", "steps"}, "expected entries of a key and steps")
    key = _list(entry["key"])
    _require(all(type(each) is str or _size(each) for each in key), f"{key} is no key")
    steps = tuple(_step(family, *_list(step, 2)) for step in _list(entry["steps"]))
    sizes = [size for size, _ in steps]
    _require(bool(sizes) and sizes == sorted(set(sizes)), f"the sizes {sizes} of {key} do not ascend")
    return tuple(key), steps


def _step(family: str, size: Any, values: Any) -> tuple[int, tuple[Any, ...]]:
    kinds = _fields(family)
    _require(_size(size), f"{size!r} is no size")
    values = _list(values, len(kinds))
    _require(all(itertools.starmap(_accepts, zip(kinds, values, strict=True))), f"{values} is no config of {family}")
    return size, tuple(values)


@functools.cache
def _fields(family: str) -> tuple[tuple[Any, int], ...]:
    """The type of each field of a family's config, and the least number in it: 0 where that is the default."""
    try:
        config = importlib.import_module(f"isogemm.{family}.configs").Config
        hints = get_type_hints(config)
        return tuple((hints[each.name], 0 if each.default == 0 else 1) for each in fields(config))
    except (ImportError, AttributeError, TypeError) as error:  # TypeError: its Config is a union
        raise ValueError(f"{family!r} is no family with configs") from error


def _accepts(kind: tuple[Any, int], value: object) -> bool:
    expected, least = kind
    if get_origin(expected) is Literal:
        return value in get_args(expected)
    return type(value) is expected and (type(value) is not int or least <= value <= _LARGEST)


def _size(value: object) -> bool:
    return type(value) is int and value > 0


def _list(value: Any, length: int | None = None) -> list[Any]:
    _require(isinstance(value, list) and length in (None, len(value)), f"expected a list, got {value!r}")
    return list(value)


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


@functools.cache
def _triton() -> str:
    """The version of the installed Triton, which this does not import."""
    for package in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "none"
