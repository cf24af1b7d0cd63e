"""Speed recorded on GPUs, which `isogemm demo` shows on a machine without one. benchmarks/documents.py writes it."""

from __future__ import annotations

import json
from importlib import resources
from typing import NamedTuple

FILE = "headline.json"
COLUMNS = ("isogemm", "compared with", "speed-up", "range", "points")
MEANING = "Speed-up is the other's time / isogemm's time: larger is better. Geometric mean and range over the points."


class Recorded(NamedTuple):
    """Figures of one GPU, as text."""

    gpu: str
    source: str  # GPU, dates, versions and commits
    lines: list[list[str]]  # cells of a table with COLUMNS


def shipped() -> list[Recorded]:
    """Load the figures that came with the package."""
    text = (resources.files("isogemm.bench") / FILE).read_text(encoding="utf-8")
    return [Recorded(**each) for each in json.loads(text)]
