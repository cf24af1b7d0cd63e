"""`isogemm.nn.swap` replaces the linears and encoder layers of an existing model, in place; `restore` undoes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch.nn.parameter import is_lazy

from isogemm.core.errors import require_module, require_precision
from isogemm.epilogues import of_module, options_of
from isogemm.gemm.configs import DTYPES
from isogemm.gemm.describe import dtype_name
from isogemm.nn.encoder_layer import EncoderLayer, slower_than_torch
from isogemm.nn.encoder_layer import as_torch as layer_as_torch
from isogemm.nn.encoder_layer import obstacle as layer_obstacle
from isogemm.nn.linear import Linear, in_words
from isogemm.nn.linear import as_torch as linear_as_torch
from isogemm.nn.linear import obstacle as linear_obstacle
from isogemm.nn.sharing import PastForwards, module_obstacle, shared

Predicate = Callable[[str, torch.nn.Module], bool]

_KINDS = (torch.nn.Linear, torch.nn.TransformerEncoderLayer)
_AS_TORCH: dict[type, Callable[[Any], torch.nn.Module]] = {Linear: linear_as_torch, EncoderLayer: layer_as_torch}

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
    activation: str  # the module that is now a FoldedActivation
    epilogue: str  # what the Linear computes in its place


class Unfolded(NamedTuple):
    linear: str
    activation: str
    epilogue: str
    reason: str


class Note(NamedTuple):
    name: str
    type: str
    text: str  # what to know of the module that was swapped


class FoldedActivation(torch.nn.Identity):
    """An identity in the place of an activation that the isogemm.nn.Linear before it computes."""

    activation: torch.nn.Module

    @classmethod
    def of(cls, activation: torch.nn.Module) -> Self:
        made = shared(cls, activation)
        made.__dict__["activation"] = activation  # no submodule
        return made

    def unfolded(self) -> torch.nn.Module:
        """Return the activation, with the mode, hooks and other attributes of this module."""
        self.activation.__dict__.update({name: each for name, each in self.__dict__.items() if name != "activation"})
        return self.activation

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to change an option of the activation: the linear before it got its value at `swap`."""
        activation: Any = self.__dict__.get("activation")
        if activation is not None and name in options_of(type(activation)) and value != getattr(activation, name):
            raise AttributeError(
                f"{name} was folded into the isogemm.nn.Linear before this {type(activation).__name__}, which computes "
                "it; call isogemm.nn.restore first"
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return repr(self.activation)


@dataclass(frozen=True)
class SwapReport:
    """What `swap` did, by the names of the modules; a module under two names is listed under both."""

    swapped: tuple[str, ...]
    kept: tuple[Kept, ...]  # linears and encoder layers that stay, and others with matrices that torch multiplies
    folded: tuple[Folded, ...] = ()  # of the swapped
    unfolded: tuple[Unfolded, ...] = ()  # of the swapped, those with an activation after them that stays
    unnested: tuple[str, ...] = ()  # torch.nn.TransformerEncoder modules whose use_nested_tensor is now False
    notes: tuple[Note, ...] = ()  # on some of the swapped

    def __str__(self) -> str:
        folded = f"folded {len(self.folded)}, " if self.folded else ""
        lines = [f"swapped {len(self.swapped)}, {folded}kept {len(self.kept)}"]
        lines += [f"  swapped {words}" for words in summarize(self.swapped)]
        for text, words in grouped((text, name) for name, _, text in self.notes):
            lines.append(f"  note on {words or 'the model'}: {text}")
        lines += [f"  no nested tensors in {words or 'the model'}" for words in summarize(self.unnested)]
        for epilogue, words in grouped((pair.epilogue, pair.linear) for pair in self.folded):
            lines.append(f"  folded {epilogue} into {words}")
        for (epilogue, reason), words in grouped(((pair.epilogue, pair.reason), pair.linear) for pair in self.unfolded):
            lines.append(f"  not folded {epilogue} into {words}: {reason}")
        for (kind, reason), words in grouped(((kind, reason), name) for name, kind, reason in self.kept):
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
    """Replace a model's torch.nn.Linear by isogemm.nn.Linear, its torch.nn.TransformerEncoderLayer by EncoderLayer.

    Args:
        model: changed in place. Parameters stay the same objects: tied weights stay tied, optimizers valid.
        only: the linears and encoder layers to replace: a name or glob pattern as in model.named_modules(), several of
            them, or a predicate (name, module) -> bool; None for all.
        fold: in a torch.nn.Sequential, let a linear compute the activation after it too; an identity takes its place,
            so names and state_dict stay. Code that calls the two by themselves, and hooks added later, see the
            linear's output activated.
        precision: of the new modules, see isogemm.linear.
        out_dtype: of the new linears, see isogemm.linear.

    Returns:
        What was swapped and folded, what was not, and why.

    `isogemm.nn.restore` undoes it. Swap before compiling, sharding or parametrizing. Code that reads a linear's weight
    and does not call it is not affected. A torch.nn.TransformerEncoder with new layers no longer packs padded batches
    into nested tensors for inference, which also set its result at padded tokens to 0.
    """
    require_module("model", model)
    require_precision(precision, torch.float32)  # the name alone: the dtype is known when called
    if isinstance(model, _KINDS):
        kind = "Linear" if isinstance(model, torch.nn.Linear) else "EncoderLayer"
        raise ValueError(
            f"model is itself a {type(model).__name__} and cannot be replaced in place; "
            f"use isogemm.nn.{kind}.from_torch"
        )
    places = list(_places_in(model))
    selects = _selector(only, places)
    selected = {
        place.module for place in places if isinstance(place.module, _KINDS) and selects(place.name, place.module)
    }  # under any of its names
    layers = [place for place in places if isinstance(place.module, torch.nn.TransformerEncoderLayer)]
    kept_layers = _reasons_to_keep(layers, selected)
    places = _outside(places, kept_layers)
    reasons = kept_layers | _reasons_to_keep(places, selected)
    for place in layers:  # one with a product of its own is none that is replaced
        if place in places and (reason := _multiplied_by_torch(place.module)):
            reasons[place.module] = reason
    new = [module for module in dict.fromkeys(place.module for place in places) if module not in reasons]
    linears = [module for module in new if isinstance(module, torch.nn.Linear)]
    pairs = _pairs(places, linears) if fold else []
    unfolded = _reasons_not_to_fold(places, pairs)
    folded = [pair for pair in pairs if pair.linear.name not in unfolded]
    activations = {pair.linear.module: pair.epilogue for pair in folded}
    made: dict[torch.nn.Module, Linear | EncoderLayer] = {
        module: EncoderLayer.from_torch(module, precision=precision)
        for module in new
        if isinstance(module, torch.nn.TransformerEncoderLayer)
    }
    for module in linears:
        activation, arguments = activations.get(module, (None, None))
        try:
            made[module] = Linear.from_torch(
                module, activation=activation, activation_args=arguments, precision=precision, out_dtype=out_dtype
            )
        except ValueError as error:
            name = next(place.name for place in places if place.module is module)
            raise ValueError(f"{name}: {error}") from None
    for place in places:
        if place.module in made:
            made[place.module].is_swapped = True
            setattr(place.parent, place.attribute, made[place.module])
    stand_ins = {module: FoldedActivation.of(module) for module in {pair.activation.module for pair in folded}}
    for _, place, _ in folded:
        setattr(place.parent, place.attribute, stand_ins[place.module])
    return SwapReport(
        swapped=tuple(place.name for place in places if place.module in made),
        notes=tuple(
            Note(place.name, type(place.module).__name__, text)
            for place in places
            if place.module in made and (text := _note(place.module))
        ),
        kept=tuple(
            Kept(place.name, type(place.module).__name__, reasons[place.module])
            for place in places
            if place.module in reasons
        ),
        folded=tuple(Folded(*pair.in_words()) for pair in folded),
        unnested=_unnest(model),
        unfolded=tuple(
            Unfolded(*pair.in_words(), unfolded[pair.linear.name]) for pair in pairs if pair.linear.name in unfolded
        ),
    )


def restore(model: torch.nn.Module) -> tuple[str, ...]:
    """Undo `isogemm.nn.swap`.

    Args:
        model: changed in place. Parameters stay the same objects under the same names, with their present values, so
            optimizers and state_dicts stay valid. Hooks that the modules had or got since stay on them.

    Returns:
        The names of the modules that are torch's again; none if nothing was swapped. Modules of isogemm.nn that `swap`
        did not make stay.

    The linears and encoder layers are new modules: references to the swapped ones, or to those from before, are stale.
    Folded activations come back as the modules they were. Restore before compiling or sharding, or after undoing it.
    What cannot be restored raises RuntimeError, and nothing is changed.
    """
    require_module("model", model)
    if _is_swapped(model):
        raise ValueError(
            f"model is itself a swapped {type(model).__name__} and cannot be replaced in place; "
            "restore the model around it"
        )
    places = list(_places_in(model))
    swapped = [place for place in places if _is_swapped(place.module)]
    accelerated = tuple(f"{place.name}." for place in places if isinstance(place.module, PastForwards))
    for place in swapped:
        reason = module_obstacle(place.module)
        if type(place.module) not in _AS_TORCH:
            reason = f"it has become a {type(place.module).__name__}: undo that first"
        if place.name.startswith(accelerated):
            reason = "it is in an accelerated layer: isogemm.integrations.patchtst.restore comes first"
        if reason:
            raise RuntimeError(f"{place.name} cannot be restored: {reason}")
    _require_pairs(places)
    made = {module: _AS_TORCH[type(module)](module) for module in dict.fromkeys(place.module for place in swapped)}
    for place in swapped:
        setattr(place.parent, place.attribute, made[place.module])
    for place in places:
        if isinstance(place.module, FoldedActivation):
            setattr(place.parent, place.attribute, place.module.unfolded())
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoder) and module.__dict__.pop("isogemm_unnested", False):
            module.use_nested_tensor = True
    return tuple(place.name for place in swapped)


class _Place(NamedTuple):
    """A module under one of its names in a model."""

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


def _places_in(model: torch.nn.Module) -> Iterator[_Place]:
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
    names = [place.name for place in places if isinstance(place.module, _KINDS)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            there = ", ".join(summarize(names))
            raise ValueError(f"only has {pattern!r}, which names no Linear or encoder layer; there are {there}")
    return lambda name, module: any(fnmatchcase(name, pattern) for pattern in patterns)


def _reasons_to_keep(places: list[_Place], selected: Container[torch.nn.Module]) -> dict[torch.nn.Module, str]:
    """Return why modules that compute matrix products are not replaced."""
    return {place.module: reason for place in places if (reason := _reason_to_keep(place, selected))}


def _reason_to_keep(place: _Place, selected: Container[torch.nn.Module]) -> str:
    module = place.module
    if not isinstance(module, _KINDS):
        return _multiplied_by_torch(module)
    if module not in selected:
        return "not selected by only"
    return _unfit_linear(place, module) if isinstance(module, torch.nn.Linear) else _unfit_layer(place, module)


def _outside(places: list[_Place], kept_layers: Container[torch.nn.Module]) -> list[_Place]:
    """Return the places that are not inside of a layer that reads, or will read, their parameters itself."""
    inside = tuple(
        f"{name}."
        for name, _, _, module in places
        if isinstance(module, EncoderLayer | PastForwards)
        or (isinstance(module, torch.nn.TransformerEncoderLayer) and module not in kept_layers)
    )
    return [place for place in places if not place.name.startswith(inside)]


def _unfit_layer(place: _Place, layer: torch.nn.TransformerEncoderLayer) -> str:
    if isinstance(layer, EncoderLayer):
        return "is an isogemm.nn.EncoderLayer already"
    if reason := layer_obstacle(layer):
        return reason
    if type(layer) is not torch.nn.TransformerEncoderLayer:
        return "is a subclass of torch.nn.TransformerEncoderLayer, whose modules may be called past its forward"
    return _unfit(place, *layer.parameters())


def _unfit_linear(place: _Place, module: torch.nn.Linear) -> str:
    if isinstance(module, Linear):
        return "is an isogemm.nn.Linear already"
    if reason := linear_obstacle(module):
        return reason
    if type(module) is not torch.nn.Linear:
        return "is a subclass of torch.nn.Linear, whose weight may be read past its forward"
    if isinstance(place.parent, torch.nn.TransformerEncoderLayer):
        return "torch's fast path for inference reads its weight past its forward"
    return _unfit(place, module.weight)


def _unfit(place: _Place, *parameters: torch.Tensor) -> str:
    for parameter in parameters:
        if dtype_name(parameter.dtype) not in DTYPES:
            return f"{parameter.dtype} has no contract; those with one: {', '.join(DTYPES)}"
    if place.attribute == "_orig_mod":
        return "is compiled: swap first, then compile"
    return ""


def _multiplied_by_torch(module: torch.nn.Module) -> str:
    if isinstance(module, _NO_PRODUCT):
        return ""
    parameters = module.named_parameters(recurse=False)
    matrices = [name for name, parameter in parameters if is_lazy(parameter) or parameter.ndim >= 2]
    return f"is no Linear: torch computes products with its {', '.join(matrices)}" if matrices else ""


def _note(module: torch.nn.Module) -> str:
    if isinstance(module, torch.nn.TransformerEncoderLayer):
        attention = module.self_attn
        return slower_than_torch(attention.embed_dim, attention.num_heads, module.linear1.weight.dtype)
    return ""


def _unnest(model: torch.nn.Module) -> tuple[str, ...]:
    """Keep encoders from giving nested tensors to an EncoderLayer; mark them for `restore`."""
    encoders = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, torch.nn.TransformerEncoder)
        and getattr(module, "use_nested_tensor", False)
        and any(isinstance(layer, EncoderLayer) for layer in module.layers)
    }
    for encoder in encoders.values():
        encoder.use_nested_tensor = False
        encoder.__dict__["isogemm_unnested"] = True
    return tuple(encoders)


def _pairs(places: list[_Place], linears: Container[torch.nn.Module]) -> list[_Pair]:
    """Find the linears with an activation after them in a Sequential."""
    found = []
    for first, second in pairwise(places):  # a Linear has no children: what comes next is its neighbour, or elsewhere
        if first.module in linears and second.parent is first.parent and isinstance(first.parent, torch.nn.Sequential):
            epilogue = of_module(second.module)
            if epilogue is not None:
                found.append(_Pair(first, second, epilogue))
    return found


def _reasons_not_to_fold(places: list[_Place], pairs: list[_Pair]) -> dict[str, str]:
    """Return why pairs are not folded, by the linear's name."""
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


def _is_swapped(module: torch.nn.Module) -> bool:
    return isinstance(module, Linear | EncoderLayer) and module.is_swapped


def _require_pairs(places: list[_Place]) -> None:
    """Raise unless every linear with a folded activation has that after it, and every folded activation its linear."""
    following = {
        (first.parent, first.attribute): second.module
        for first, second in pairwise(places)
        if second.parent is first.parent
    }
    folded = [place.module for place in places if isinstance(place.module, FoldedActivation)]
    for place in places:
        if isinstance(place.module, Linear) and place.module.is_swapped and place.module.activation is not None:
            after = following.get((place.parent, place.attribute))
            if not isinstance(after, FoldedActivation):
                raise RuntimeError(
                    f"{place.name} cannot be restored: its folded activation's place is no longer after it"
                )
            folded.remove(after)
    if folded:
        raise RuntimeError(f"{folded[0]} cannot be restored: the linear that computes it is no longer before it")


_Key = TypeVar("_Key")


def grouped(items: Iterable[tuple[_Key, str]]) -> Iterator[tuple[_Key, str]]:
    """Summarize the names under each key."""
    groups: defaultdict[_Key, list[str]] = defaultdict(list)
    for key, name in items:
        groups[key].append(name)
    for key, names in groups.items():
        yield from ((key, words) for words in summarize(names))


def summarize(names: Iterable[str]) -> list[str]:
    """Group names that differ in indices alone, with their count: "layers.*.up x 2"."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[without_indices(name)].append(name)
    return [group[0] if len(group) == 1 else f"{pattern} x {len(group)}" for pattern, group in groups.items()]


def without_indices(name: str) -> str:
    """Return the glob pattern of a name: "layers.*.up" for "layers.0.up"."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
