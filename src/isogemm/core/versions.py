"""The releases of torch and Triton on which the whole test suite passed; pyproject.toml has the bounds."""

from __future__ import annotations

import re

TORCH = "2.11.0", "2.13.0", "2.15.0"
TRITON = "3.6.0", "3.7.1", "3.9.0"


def untested(package: str, version: str) -> str:
    """A warning where this torch or triton is newer than the last one tested, by its minor version; else empty."""
    last = {"torch": TORCH, "triton": TRITON}[package][-1]
    if _minor(version) <= _minor(last):
        return ""
    return f"{package} {version} is newer than {last}, the last release isogemm was tested with: run `isogemm verify`"


def _minor(version: str) -> tuple[int, ...]:
    """The first two numbers; none in what is no version."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
