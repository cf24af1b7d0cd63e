"""`isogemm.nn.swap`: an existing model's linears through isogemm, in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch.nn.parameter import is_lazy

from isogemm.epilogues import of_module
from isogemm.gemm.configs import DTYPES
from isogemm.nn.linear import Linear, in_words, obstacle

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


class Folded(NamedTuple):
    linear: str
    activation: str  # the module that is now a torch.nn.Identity
    epilogue: str  # what the Linear computes in its place


class Unfolded(NamedTuple):
    linear: str
    activation: str
    epilogue: str
    reason: str


@dataclass(frozen=True)
class SwapReport:
    """What `swap` did, by the modules' names in the model; a module under two names is listed under both."""

    swapped: tuple[str, ...]
    kept: tuple[Kept, ...]  # linears that stay, and other modules with matrices that torch multiplies
    folded: tuple[Folded, ...] = ()  # of the swapped
    unfolded: tuple[Unfolded, ...] = ()  # of the swapped, those with an activation after them that stays

    def __str__(self) -> str:
        folded = f"folded {len(self.folded)}, " if self.folded else ""
        lines = [f"swapped {len(self.swapped)}, {folded}kept {len(self.kept)}"]
        lines += [f"  swapped {words}" for words in summarize(self.swapped)]
        for epilogue, words in _grouped((pair.epilogue, pair.linear) for pair in self.folded):
            lines.append(f"  folded {epilogue} into {words}")
        for (epilogue, reason), words in _grouped(
            ((pair.epilogue, pair.reason), pair.linear) for pair in self.unfolded
        ):
            lines.append(f"  not folded {epilogue} into {words}: {reason}")
        for (kind, reason), words in _grouped(((kind, reason), name) for name, kind, reason in self.kept):
            lines.append(f"  kept {words} ({kind}): {reason}")
        return "\n".join(lines)


def swap(
    model: torch.nn.Module,
    only: str | Sequence[str] | Predicate | None = None,
    *,
    fold: bool = True,
    precision: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> SwapReport:
    """Replace the torch.nn.Linear modules of a model by isogemm.nn.Linear, in place.

    Args:
        model: changed in place. Parameters stay the very same objects: tied weights stay tied, optimizers valid.
        only: the linears to replace: a name or glob pattern as in model.named_modules(), several of them, or a
            predicate (name, module) -> bool; None for all.
        fold: in a torch.nn.Sequential, let a linear compute the activation after it too, whose place a
            torch.nn.Identity takes: names and state_dict stay. Code that calls the two by themselves, or hooks that
            come later, see the linear's output activated.
        precision, out_dtype: of the new modules, see isogemm.linear.

    Returns:
        What was swapped and folded, what was not, and why.

    Swap before compiling, sharding or parametrizing. Code that reads a linear's weight past its forward is not reached.
    """
    if isinstance(model, torch.nn.Linear):
        raise ValueError("model is itself a Linear and cannot be replaced in place; use isogemm.nn.Linear.from_torch")
    places = list(_places(model))
    reasons = _reasons_to_keep(places, _selector(only, places))
    linears = dict.fromkeys(
        module for place in places if isinstance(module := place.module, torch.nn.Linear) and module not in reasons
    )
    pairs = _pairs(places, linears) if fold else []
    unfolded = _reasons_not_to_fold(places, pairs)
    folded = [pair for pair in pairs if pair.linear.name not in unfolded]
    activations = {pair.linear.module: pair.epilogue for pair in folded}
    made = {}
    for module in linears:
        activation, arguments = activations.get(module, (None, None))
        made[module] = Linear.from_torch(
            module, activation=activation, activation_args=arguments, precision=precision, out_dtype=out_dtype
        )
    for place in places:
        if place.module in made:
            setattr(place.parent, place.attribute, made[place.module])
    for _, place, _ in folded:
        setattr(place.parent, place.attribute, torch.nn.Identity().train(place.module.training))
    return SwapReport(
        swapped=tuple(place.name for place in places if place.module in made),
        kept=tuple(
            Kept(place.name, type(place.module).__name__, reasons[place.module])
            for place in places
            if place.module in reasons
        ),
        folded=tuple(Folded(*pair.in_words()) for pair in folded),
        unfolded=tuple(
            Unfolded(*pair.in_words(), unfolded[pair.linear.name]) for pair in pairs if pair.linear.name in unfolded
        ),
    )


class _Place(NamedTuple):
    name: str
    parent: torch.nn.Module
    attribute: str
    module: torch.nn.Module


class _Pair(NamedTuple):
    linear: _Place
    activation: _Place
    epilogue: tuple[str, dict[str, float]]  # name, arguments

    def in_words(self) -> tuple[str, str, str]:
        return self.linear.name, self.activation.name, in_words(*self.epilogue)


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


def _pairs(places: list[_Place], linears: Container[torch.nn.Module]) -> list[_Pair]:
    """The linears that an activation follows in a Sequential."""
    found = []
    for first, second in pairwise(places):  # a Linear has no children: what comes next is its neighbour, or elsewhere
        if first.module in linears and second.parent is first.parent and isinstance(first.parent, torch.nn.Sequential):
            epilogue = of_module(second.module)
            if epilogue is not None:
                found.append(_Pair(first, second, epilogue))
    return found


def _reasons_not_to_fold(places: list[_Place], pairs: list[_Pair]) -> dict[str, str]:
    """By the linear's name."""
    reasons = {pair.linear.name: reason for pair in pairs if (reason := _unfoldable(pair))}
    after = {pair.linear.name: pair.epilogue for pair in pairs if pair.linear.name not in reasons}
    names: defaultdict[torch.nn.Module, list[str]] = defaultdict(list)
    for place in places:
        names[place.module].append(place.name)
    for linear, _, epilogue in pairs:
        others = [name for name in names[linear.module] if after.get(name) != epilogue]
        if others and linear.name not in reasons:
            reasons[linear.name] = f"the same Linear is {', '.join(summarize(others))}, where it cannot be folded"
    return reasons


def _unfoldable(pair: _Pair) -> str:
    (_, parent, _, linear), (_, _, _, activation), _ = pair
    if type(parent) is not torch.nn.Sequential:
        return f"{type(parent).__name__} is a subclass of torch.nn.Sequential, which may call its modules otherwise"
    if "forward" in parent.__dict__:
        return "the forward of its Sequential was replaced on the instance"
    if linear._forward_hooks or linear._backward_pre_hooks or linear._backward_hooks:
        return "the Linear has hooks that see its output or the gradient of it"
    if any(value for name, value in vars(activation).items() if name.endswith("_hooks")):
        return f"the {type(activation).__name__} has hooks"
    if "forward" in activation.__dict__:
        return f"the forward of the {type(activation).__name__} was replaced on the instance"
    if activation._compiled_call_impl is not None:
        return f"the {type(activation).__name__} is compiled: swap first, then compile"
    if activation._parameters or activation._buffers or activation._modules:
        return f"the {type(activation).__name__} holds parameters, buffers or modules"
    return ""


_Key = TypeVar("_Key")


def _grouped(items: Iterable[tuple[_Key, str]]) -> Iterator[tuple[_Key, str]]:
    """The names under each key, summarized."""
    groups: defaultdict[_Key, list[str]] = defaultdict(list)
    for key, name in items:
        groups[key].append(name)
    for key, names in groups.items():
        yield from ((key, words) for words in summarize(names))


def summarize(names: Iterable[str]) -> list[str]:
    """The names without their indices, and how many have each: "layers.*.up x 2"."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[without_indices(name)].append(name)
    return [group[0] if len(group) == 1 else f"{pattern} x {len(group)}" for pattern, group in groups.items()]


def without_indices(name: str) -> str:
    """The glob pattern of a name's kind: "layers.0.up" is one of "layers.*.up"."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
