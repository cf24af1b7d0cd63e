"""`isogemm.nn.swap`: an existing model's linears through isogemm, in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from isogemm.gemm.configs import DTYPES
from isogemm.nn.linear import Linear, obstacle

Predicate = Callable[[str, torch.nn.Module], bool]

# Modules that hold matrices but compute no matrix products with them.
_NO_PRODUCT = (
    torch.nn.Embedding,
    torch.nn.EmbeddingBag,
    torch.nn.LayerNorm,
    torch.nn.RMSNorm,
    torch.nn.utils.parametrize.ParametrizationList,
)


class Kept(NamedTuple):
    name: str
    type: str
    reason: str


@dataclass(frozen=True)
class SwapReport:
    """What `swap` did, by the modules' names in the model; a module under two names is listed under both."""

    swapped: tuple[str, ...]
    kept: tuple[Kept, ...]  # linears that stay, and other modules with matrices that torch multiplies

    def __str__(self) -> str:
        groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for name, kind, reason in self.kept:
            groups[kind, reason].append(name)
        lines = [f"swapped {len(self.swapped)}, kept {len(self.kept)}"]
        lines += [f"  swapped {words}" for words in summarize(self.swapped)]
        for (kind, reason), names in groups.items():
            lines += [f"  kept {words} ({kind}): {reason}" for words in summarize(names)]
        return "\n".join(lines)


def swap(
    model: torch.nn.Module,
    only: str | Sequence[str] | Predicate | None = None,
    *,
    precision: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> SwapReport:
    """Replace the torch.nn.Linear modules of a model by isogemm.nn.Linear, in place.

    Args:
        model: changed in place. Parameters stay the very same objects: tied weights stay tied, optimizers valid.
        only: the linears to replace: a name or glob pattern as in model.named_modules(), several of them, or a
            predicate (name, module) -> bool; None for all.
        precision, out_dtype: of the new modules, see isogemm.linear.

    Returns:
        What was swapped, what was not, and why.

    Swap before compiling, sharding or parametrizing. Code that reads a linear's weight past its forward is not reached.
    """
    if isinstance(model, torch.nn.Linear):
        raise ValueError("model is itself a Linear and cannot be replaced in place; use isogemm.nn.Linear.from_torch")
    places = list(_places(model))
    reasons = _reasons_to_keep(places, _selector(only, places))
    made = {
        module: Linear.from_torch(module, precision=precision, out_dtype=out_dtype)
        for module in dict.fromkeys(place.module for place in places)
        if isinstance(module, torch.nn.Linear) and module not in reasons
    }
    for place in places:
        if place.module in made:
            setattr(place.parent, place.attribute, made[place.module])
    return SwapReport(
        swapped=tuple(place.name for place in places if place.module in made),
        kept=tuple(
            Kept(place.name, type(place.module).__name__, reasons[place.module])
            for place in places
            if place.module in reasons
        ),
    )


class _Place(NamedTuple):
    name: str
    parent: torch.nn.Module
    attribute: str
    module: torch.nn.Module


def _places(model: torch.nn.Module) -> Iterator[_Place]:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if name:
            parent, _, attribute = name.rpartition(".")
            yield _Place(name, modules[parent], attribute, module)


def _selector(only: str | Sequence[str] | Predicate | None, places: list[_Place]) -> Predicate:
    if only is None:
        return lambda name, module: True
    if callable(only):
        return only
    patterns = [only] if isinstance(only, str) else only
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"only is {only!r}; expected a name or glob pattern, a sequence of them, a predicate (name, module) or None"
        )
    names = [place.name for place in places if isinstance(place.module, torch.nn.Linear)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"only has {pattern!r}, which names no Linear; there are {', '.join(summarize(names))}")
    return lambda name, module: any(fnmatchcase(name, pattern) for pattern in patterns)


def _reasons_to_keep(places: list[_Place], selects: Predicate) -> dict[torch.nn.Module, str]:
    linears = [place for place in places if isinstance(place.module, torch.nn.Linear)]
    selected = {place.module for place in linears if selects(place.name, place.module)}  # under any of its names
    reasons: dict[torch.nn.Module, str] = {}
    for place in places:
        if isinstance(place.module, torch.nn.Linear):
            reason = _unfit(place, place.module) if place.module in selected else "not selected by only"
        else:
            reason = _multiplied_by_torch(place.module)
        if reason:
            reasons[place.module] = reason
    return reasons


def _unfit(place: _Place, linear: torch.nn.Linear) -> str:
    if isinstance(linear, Linear):
        return "is an isogemm.nn.Linear already"
    if reason := obstacle(linear):
        return reason
    if type(linear) is not torch.nn.Linear:
        return "is a subclass of torch.nn.Linear, whose weight may be read past its forward"
    if str(linear.weight.dtype).removeprefix("torch.") not in DTYPES:
        return f"{linear.weight.dtype} has no contract; those with one: {', '.join(DTYPES)}"
    if isinstance(place.parent, torch.nn.TransformerEncoderLayer):
        return "torch's fast path for inference reads its weight past its forward"
    if place.attribute == "_orig_mod":
        return "is compiled: swap first, then compile"
    return ""


def _multiplied_by_torch(module: torch.nn.Module) -> str:
    if isinstance(module, _NO_PRODUCT):
        return ""
    parameters = module.named_parameters(recurse=False)
    matrices = [name for name, parameter in parameters if is_lazy(parameter) or parameter.ndim >= 2]
    return f"is no Linear: torch computes products with its {', '.join(matrices)}" if matrices else ""


def summarize(names: Iterable[str]) -> list[str]:
    """The names without their indices, and how many have each: "layers.*.up x 2"."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[without_indices(name)].append(name)
    return [group[0] if len(group) == 1 else f"{pattern} x {len(group)}" for pattern, group in groups.items()]


def without_indices(name: str) -> str:
    """The glob pattern of a name's kind: "layers.0.up" is one of "layers.*.up"."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
