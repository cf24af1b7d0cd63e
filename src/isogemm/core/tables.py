"""Loader of the measured configurations: isogemm/<family>/tables/<arch>.py, one module per family and architecture.

Every such module has a literal TABLE: {key: ((up to, config), ...)}. A key names what was measured (arithmetic,
launch or layout, fixed sizes). Its steps ascend: each has the largest size that it serves, and the field values of the
family's config. gemm's and tiny's modules also have MODEL: {key: ((config, above, most, coefficients), ...)}, see
`isogemm.gemm.selection` and `isogemm.tiny.model`. tiny's steps are of batches and name an entry of its menu.
`benchmarks/tune.py` writes these files; a new architecture is one new file per family.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Mapping
from typing import Any, TypeVar

Table = Mapping[tuple[Any, ...], tuple[tuple[int, Any], ...]]
_Config = TypeVar("_Config")


@functools.cache
def architectures(family: str) -> tuple[str, ...]:
    """Names of the architectures that a family has a table of."""
    package = importlib.import_module(f"isogemm.{family}.tables")
    return tuple(sorted(module.name for module in pkgutil.iter_modules(package.__path__)))


def measured(family: str, arch: str) -> bool:
    """Whether an architecture has a table of its own."""
    return arch in architectures(family)


@functools.cache
def load(family: str, arch: str, name: str = "TABLE") -> Any:
    """A family's table for an architecture: its own, or the nearest one's, of the same vendor where there is one."""
    vendor, number = _parsed(arch)
    known = {each: _parsed(each) for each in architectures(family)}
    nearest = min(known, key=lambda each: (known[each][0] != vendor, abs(known[each][1] - number)))
    return getattr(importlib.import_module(f"isogemm.{family}.tables.{nearest}"), name, {})


def at(steps: tuple[tuple[int, _Config], ...], size: int) -> _Config:
    """The config of the first step that serves `size`."""
    for most, config in steps:
        if size <= most:
            return config
    raise LookupError(f"size {size} is past the last step, {steps[-1][0]}")


def _parsed(arch: str) -> tuple[str, int]:
    """Vendor prefix and number: ("sm", 0x90) for sm_90, ("gfx", 0x942) for gfx942."""
    found = re.fullmatch(r"([a-z]+)_?([0-9][0-9a-f]*)", arch)
    return (found[1], int(found[2], 16)) if found else ("", 0)
