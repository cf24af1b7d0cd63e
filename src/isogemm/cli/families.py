"""The families of isogemm. An entry in FAMILIES puts a family into every command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from isogemm.bench.cases import Case, encoder, fused, gemm, tiny
from isogemm.bench.demo import DemoResult
from isogemm.bench.views import FamilyView
from isogemm.training import benchmark as patchtst
from isogemm.verify import encoder as encoder_checks
from isogemm.verify import fused as fused_checks
from isogemm.verify import gemm as gemm_checks
from isogemm.verify import tiny as tiny_checks
from isogemm.verify import usability
from isogemm.verify.checks import Check
from isogemm.verify.trials import compile_ahead
from isogemm.verify.usability import Usability


@dataclass(frozen=True)
class Family:
    """A family's entry for `doctor`, `verify`, `bench`, `report` and `demo`."""

    name: str
    summary: str
    usability: Callable[[torch.device], Sequence[Usability]]
    checks: Sequence[Check]
    cases: Callable[[torch.device, bool], Sequence[Case]]  # (device, quick)
    demo: Callable[[torch.device], DemoResult]
    compile_checks: Callable[[torch.device, int], None] | None = None  # compiles what this many trials launch
    compile_cases: Callable[[torch.device, Sequence[Case]], None] | None = None
    view: FamilyView | None = None  # how its points are laid out; by default read from their parameters


FAMILIES: tuple[Family, ...] = (
    Family(
        "gemm", "matmul and linear whose rows have the same bits in any batch, forward and backward",
        usability.gemm, gemm_checks.CHECKS, gemm.cases, gemm.demo,
        partial(compile_ahead, gemm_checks.__name__), gemm.compile_cases, gemm.VIEW,
    ),
    Family(
        "fused", "the GEMM with bias, activation, residual and more in its one launch, and trained so",
        usability.fused, fused_checks.CHECKS, fused.cases, fused.demo,
        partial(compile_ahead, fused_checks.__name__), fused.compile_cases, fused.VIEW,
    ),
    Family(
        "tiny", "strided-batched GEMM of matrices up to 64, one launch",
        usability.tiny, tiny_checks.CHECKS, tiny.cases, tiny.demo, view=tiny.VIEW,
    ),
    Family(
        "encoder", "a transformer's encoder layer, one call forward and one backward",
        usability.encoder, encoder_checks.CHECKS, encoder.cases, encoder.demo,
        partial(compile_ahead, encoder_checks.__name__), encoder.compile_cases, encoder.VIEW,
    ),
    Family(
        "patchtst", "a forecaster's whole training step, its encoder layers accelerated",
        usability.encoder, (), patchtst.cases, patchtst.demo, None, patchtst.compile_cases, patchtst.VIEW,
    ),
)  # fmt: skip


def get(names: Iterable[str] = ()) -> list[Family]:
    """The families of these names, in the order of FAMILIES; all of them when none is named."""
    wanted = set(names)
    known = [family.name for family in FAMILIES]
    if unknown := sorted(wanted.difference(known)):
        raise ValueError(f"--family: got {', '.join(map(repr, unknown))}, expected any of {', '.join(known)}")
    return [family for family in FAMILIES if not wanted or family.name in wanted]
