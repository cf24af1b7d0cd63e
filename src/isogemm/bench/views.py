"""How a family's points are laid out in tables and plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from isogemm.bench.store import Row

Params = Mapping[str, int | str]

_SHORT_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True)
class FamilyView:
    """`shape` parameters label a table's lines, `column` its columns; the others each choose a table.

    With `against` every other variant is a rival: a table's columns are isogemm's speed-up over each. With `steps` the
    points are training steps, in a CUDA graph and eager: of each, times, memory and the distance from its arithmetic.
    """

    family: str
    title: str
    shape: tuple[str, ...]
    column: str = "batch"
    against: bool = False
    steps: bool = False

    def shape_label(self, params: Params) -> str:
        """The shape as text such as 12x12x64, with names first."""
        values = [params[name] for name in self.shape if name in params]
        names = [each for each in values if isinstance(each, str)]
        sizes = "x".join(str(each) for each in values if isinstance(each, int))
        return " ".join([*names, *([sizes] if sizes else [])])

    def column_value(self, params: Params) -> int | str:
        """The point's column; "" for points without the parameter."""
        return params.get(self.column, "")

    def group_label(self, op: str, params: Params) -> str:
        """The group's name, such as "bmm, fp32 ieee, cold"."""
        placed = {*self.shape, self.column, "dtype", "precision"}
        others = (v if isinstance(v, str) else f"{n}={v}" for n, v in params.items() if n not in placed)
        return ", ".join(part for part in (op, number_type(params), *others) if part)

    def peer_label(self, peer: str) -> str:
        """The column name of a peer: isogemm's speed-up over it, or its own over torch."""
        return f"over {peer}" if self.against else peer


def number_type(params: Params) -> str:
    """The arithmetic of a point, such as "bf16" or "fp32 tf32"; "" where the parameters do not tell."""
    if "dtype" not in params:
        return ""
    dtype = _SHORT_DTYPES.get(str(params["dtype"]), str(params["dtype"]))
    return f"{dtype} {params.get('precision') or 'ieee'}" if dtype == "fp32" else dtype


def view_of(family: str, rows: Iterable[Row], views: Iterable[FamilyView] = ()) -> FamilyView:
    """The family's view among `views`, or one whose shape is every integer parameter but the batch."""
    for view in views:
        if view.family == family:
            return view
    sizes = {n: None for row in rows for n, v in row.params.items() if isinstance(v, int) and n != "batch"}
    return FamilyView(family, family, tuple(sizes))
