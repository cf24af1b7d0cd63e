"""The families of isogemm. An entry in FAMILIES puts a family into every command."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch

from isogemm.bench.cases import attention, encoder, fused, gemm, loss, norm, tiny
from isogemm.training import benchmark as patchtst
from isogemm.verify import attention as attention_checks
from isogemm.verify import encoder as encoder_checks
from isogemm.verify import fused as fused_checks
from isogemm.verify import gemm as gemm_checks
from isogemm.verify import loss as loss_checks
from isogemm.verify import norm as norm_checks
from isogemm.verify import tiny as tiny_checks
from isogemm.verify import usability
from isogemm.verify.usability import Usability


@dataclass(frozen=True)
class Family:
    """A family's entry for `doctor`, `verify`, `bench`, `report` and `demo`."""

    name: str
    summary: str
    usability: Callable[[torch.device], Sequence[Usability]]
    bench: ModuleType  # with cases, demo and VIEW, and compile_cases if they are compiled ahead
    verify: ModuleType | None = None  # with CHECKS


FAMILIES: tuple[Family, ...] = (
    Family(
        "gemm", "matmul and linear whose rows have the same bits in any batch, forward and backward",
        usability.gemm, gemm, gemm_checks,
    ),
    Family(
        "fused", "the GEMM with bias, activation, residual and more in its one launch, and trained so",
        usability.fused, fused, fused_checks,
    ),
    Family("tiny", "strided-batched GEMM of matrices up to 64, one launch", usability.tiny, tiny, tiny_checks),
    Family(
        "attention", "softmax attention with the same bits padded, packed, in chunks and from any cache",
        usability.attention, attention, attention_checks,
    ),
    Family(
        "norm", "norms, softmax and embedding of rows, forward and backward", usability.norm, norm, norm_checks
    ),
    Family(
        "loss", "log-probabilities and cross-entropy from the LM head, without logits in memory",
        usability.loss, loss, loss_checks,
    ),
    Family(
        "encoder", "a transformer's encoder layer, one call forward and one backward",
        usability.encoder, encoder, encoder_checks,
    ),
    Family(
        "patchtst", "a forecaster's whole training step, its encoder layers accelerated", usability.encoder, patchtst
    ),
)  # fmt: skip


def get(names: Iterable[str] = ()) -> list[Family]:
    """The families of these names, in the order of FAMILIES; all of them when none is named."""
    wanted = set(names)
    known = [family.name for family in FAMILIES]
    if unknown := sorted(wanted.difference(known)):
        raise ValueError(f"--family: got {', '.join(map(repr, unknown))}, expected any of {', '.join(known)}")
    return [family for family in FAMILIES if not wanted or family.name in wanted]
