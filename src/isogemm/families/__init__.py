"""The families of isogemm. An entry in FAMILIES puts a family into every command of the CLI."""

from collections.abc import Iterable

from isogemm.bench.demo import DemoResult
from isogemm.families.base import Family, Usability
from isogemm.families.encoder import FAMILY as ENCODER
from isogemm.families.fused import FAMILY as FUSED
from isogemm.families.gemm import FAMILY as GEMM
from isogemm.families.patchtst import FAMILY as PATCHTST
from isogemm.families.tiny import FAMILY as TINY

FAMILIES: tuple[Family, ...] = (GEMM, FUSED, TINY, ENCODER, PATCHTST)

__all__ = ["FAMILIES", "DemoResult", "Family", "Usability", "get"]


def get(names: Iterable[str] = ()) -> list[Family]:
    """The families of these names, in the order of FAMILIES; all of them when none is named."""
    wanted = set(names)
    known = [family.name for family in FAMILIES]
    if unknown := sorted(wanted.difference(known)):
        raise ValueError(f"family: got {', '.join(map(repr, unknown))}, expected any of {', '.join(known)}")
    return [family for family in FAMILIES if not wanted or family.name in wanted]
