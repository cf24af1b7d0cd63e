"""`isogemm.nn.restore`: undoes `isogemm.nn.swap`."""

from __future__ import annotations

from itertools import pairwise

import torch

from isogemm.core.errors import require_module
from isogemm.nn.encoder_layer import EncoderLayer
from isogemm.nn.encoder_layer import as_torch as torch_layer
from isogemm.nn.linear import Linear
from isogemm.nn.linear import as_torch as torch_linear
from isogemm.nn.sharing import PastForwards, module_obstacle
from isogemm.nn.swap import FoldedActivation, Place, places_in


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
    places = list(places_in(model))
    swapped = [place for place in places if _is_swapped(place.module)]
    accelerated = tuple(f"{place.name}." for place in places if isinstance(place.module, PastForwards))
    for place in swapped:
        reason = _obstacle(place.module)
        if place.name.startswith(accelerated):
            reason = "it is in an accelerated layer: isogemm.integrations.patchtst.restore comes first"
        if reason:
            raise RuntimeError(f"{place.name} cannot be restored: {reason}")
    _require_pairs(places)
    made: dict[torch.nn.Module, torch.nn.Module] = {}
    for module in dict.fromkeys(place.module for place in swapped):
        if isinstance(module, Linear):
            made[module] = torch_linear(module)
        elif isinstance(module, EncoderLayer):
            made[module] = torch_layer(module)
    for place in swapped:
        setattr(place.parent, place.attribute, made[place.module])
    for place in places:
        if isinstance(place.module, FoldedActivation):
            setattr(place.parent, place.attribute, place.module.unfolded())
    for module in model.modules():
        if isinstance(module, torch.nn.TransformerEncoder) and module.__dict__.pop("isogemm_unnested", False):
            module.use_nested_tensor = True
    return tuple(place.name for place in swapped)


def _is_swapped(module: torch.nn.Module) -> bool:
    return isinstance(module, Linear | EncoderLayer) and module.is_swapped


def _obstacle(module: torch.nn.Module) -> str:
    if type(module) not in (Linear, EncoderLayer):
        return f"it has become a {type(module).__name__}: undo that first"
    return module_obstacle(module)


def _require_pairs(places: list[Place]) -> None:
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
