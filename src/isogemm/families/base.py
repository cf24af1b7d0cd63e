"""What a family of operations tells `doctor`, `verify`, `bench`, `report` and `demo` about itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from isogemm.bench.cases import Case
from isogemm.bench.demo import DemoResult
from isogemm.bench.views import FamilyView
from isogemm.testing.checks import Check


@dataclass(frozen=True)
class Usability:
    """Whether a kernel serves calls on a device, and why or why not."""

    usable: bool
    kernel: str
    reason: str


@dataclass(frozen=True)
class Family:
    name: str
    summary: str
    usability: Callable[[torch.device], Sequence[Usability]]
    checks: Sequence[Check]
    cases: Callable[[torch.device, bool], Sequence[Case]]  # (device, quick)
    demo: Callable[[torch.device], DemoResult]
    ahead_of_checks: Callable[[torch.device, int], None] | None = None  # compiles what so many trials will need
    ahead_of_cases: Callable[[torch.device, Sequence[Case]], None] | None = None
    view: FamilyView | None = None  # how its points are laid out; by default read from their parameters
