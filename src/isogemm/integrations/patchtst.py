"""`accelerate`: runs the encoder layers of a PatchTST through `isogemm.encoder_layer`, until `restore`.

A layer stays the same module and changes its class, to one with its own class as a base: names, state_dict, hooks and
references stay valid, what isogemm does not compute goes through the forward it had, and `restore` resets the class.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from isogemm.core import dispatch
from isogemm.core.device import resolve_precision
from isogemm.core.dispatch import Dispatch
from isogemm.core.eager import autocast_dtype, in_transform
from isogemm.core.errors import require_module, require_precision
from isogemm.encoder.api import encoder_layer, gains_by_factors
from isogemm.encoder.attention.configs import MOST_FACTORS
from isogemm.encoder.composed import scores_of
from isogemm.encoder.parameters import ACTIVATIONS
from isogemm.epilogues import spec
from isogemm.gemm.describe import dtype_name
from isogemm.gemm.op import SERVED
from isogemm.integrations.patchtst_layers import (
    UNUSUAL_SCALE,
    Family,
    HuggingFace,
    Official,
    Parts,
    encoder_arguments,
    inspect_layer,
    is_usual_now,
    name_in,
)
from isogemm.nn.encoder_layer import activation_name, slower_than_torch
from isogemm.nn.sharing import PastForwards, module_obstacle, parameter, parameter_obstacle, shared
from isogemm.nn.swap import Kept, Note, grouped, summarize


@dataclass(frozen=True)
class AccelerateReport:
    """What `accelerate` did, by the names of the modules; a module under two names is listed under both."""

    swapped: tuple[str, ...]
    kept: tuple[Kept, ...]
    without_scores: tuple[str, ...] = ()  # of the swapped, the last of a stack, whose scores nobody reads
    by_factors: tuple[str, ...] = ()  # those of such a stack that may pass scores on as queries and keys
    notes: tuple[Note, ...] = ()  # on some of the swapped

    def __str__(self) -> str:
        if not self.swapped and not self.kept:
            return "no encoder layer of a PatchTST was found; isogemm.nn.swap replaces the linears of any model"
        lines = [f"swapped {len(self.swapped)}, kept {len(self.kept)}"]
        lines += [f"  swapped {words or 'the model'}" for words in summarize(self.swapped)]
        for text, words in grouped((text, name) for name, _, text in self.notes):
            lines.append(f"  note on {words or 'the model'}: {text}")
        lines += [f"  no scores from {words}, which nobody reads" for words in summarize(self.without_scores)]
        lines += [f"  scores by factors, where these are fused, from {words}" for words in summarize(self.by_factors)]
        for (kind, reason), words in grouped(((kind, reason), name) for name, kind, reason in self.kept):
            lines.append(f"  kept {words or 'the model'} ({kind}): {reason}")
        return "\n".join(lines)


def accelerate(model: torch.nn.Module, *, precision: str | None = None) -> AccelerateReport:
    """Run a PatchTST's encoder layers through `isogemm.encoder_layer`.

    Args:
        model: Hugging Face's, the official one, or any module with their layers, changed in place. Parameters, buffers,
            modules and state_dict stay as they are. What an earlier call did is undone first.
        precision: of float32 products, see isogemm.encoder_layer.

    Returns:
        Which layers were swapped, which not, and why.

    A layer is recognised by its modules' names and types. It is swapped if its forward computes what they say, which is
    tried once on the CPU, in both modes, with random weights and no dropout. A call that isogemm cannot serve
    (output_attentions, an attn_mask, hooks that inner modules got later, norms of which one alone is in training mode
    or in another dtype than the input) goes through the forward that the layer had; `isogemm.dispatch_log` has it as
    integrations.patchtst, and why.

    The official layer's two dropouts after the attention's projection become one, of 1 - (1 - p1) (1 - p2): the same
    distribution. With residual attention, its encoder passes scores from layer to layer and does not read those of the
    last layer. Where that is so, the last layer returns None for them. Where the fused kernels take factors, the other
    layers return those (return_scores of isogemm.encoder_layer): a tuple that the next layer knows.
    """
    require_module("model", model)
    require_precision(precision, torch.float32)  # the name alone: the dtype is known when called
    restore(model)
    swapped: dict[torch.nn.Module, type[_Accelerated]] = {}
    reasons: dict[torch.nn.Module, str] = {}
    names = list(model.named_modules(remove_duplicate=False))
    for _, layer in names:
        for kind in (_HuggingFaceLayer, _OfficialLayer):
            if layer not in swapped and layer not in reasons and kind.family.resembles(layer):
                if reason := _obstacle(kind, layer):
                    reasons[layer] = reason
                else:
                    swapped[layer] = kind
    stacks = _stacks_passing_scores(names, [layer for layer, kind in swapped.items() if kind is _OfficialLayer])
    unread = {layers[-1] for layers in stacks} - {None}
    alike = [layers for layers in stacks if None not in layers and len(layers) <= MOST_FACTORS + 1]
    by_factors = {layer for layers in alike for layer in layers}
    for layer, its_kind in swapped.items():
        _change_class(layer, its_kind, precision, layer not in unread, layer in by_factors)
    return AccelerateReport(
        swapped=tuple(name for name, layer in names if layer in swapped),
        kept=tuple(Kept(name, type(layer).__name__, reasons[layer]) for name, layer in names if layer in reasons),
        without_scores=tuple(name for name, layer in names if layer in unread),
        by_factors=tuple(name for name, layer in names if layer in by_factors and layer not in unread),
        notes=tuple(
            Note(name, type(layer).__bases__[1].__name__, text)
            for name, layer in names
            if layer in swapped and (text := _note(swapped[layer].family.parts(layer)))
        ),
    )


def restore(model: torch.nn.Module) -> None:
    """Undo `accelerate`."""
    require_module("model", model)
    layers = [layer for layer in model.modules() if isinstance(layer, _Accelerated)]
    for layer in layers:
        if type(layer) not in _classes.values():
            raise RuntimeError(f"an accelerated layer has become a {type(layer).__name__}: undo that first")
    for layer in layers:
        del layer.__dict__["isogemm_choices"]
        layer.__class__ = type(layer).__bases__[1]


class _Choices(NamedTuple):
    precision: str | None
    activation: str  # isogemm.encoder_layer's name
    types: tuple[type, ...]  # of the modules that are known by type
    activation_options: tuple[tuple[str, object], ...]  # attributes of its module that identify it
    scores_read: bool
    by_factors: bool = False  # its stack only passes scores on, and is short enough to pass factors
    usual_scale: bool = True  # of the state_dict that was loaded last: torch.compile cannot read a tensor's value


class _Accelerated(PastForwards):
    """First base of an accelerated layer's class; the second is its original class."""

    family: ClassVar[Family]
    isogemm_choices: _Choices

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the bases, since pickle would not find the class by its name."""
        return _unfilled, type(self).__bases__, self.__getstate__()  # type: ignore[no-untyped-call]

    def _isogemm_parts(self, x: Tensor, reason: str) -> Parts | None:
        """Return the modules to compute this call with; None, with a record of why, if torch computes it."""
        parts = None
        if not reason:
            parts, reason = inspect_layer(self.family, self)
        if parts and not reason:
            if tuple(map(type, parts.known_by_type)) != self.isogemm_choices.types:
                reason = "a module in it was replaced by one of another type"
            elif _is_other_activation(parts, self.isogemm_choices.activation_options):
                reason = "its activation was changed"
            elif is_compiling() and not self.isogemm_choices.usual_scale:
                reason = UNUSUAL_SCALE
            elif x.dtype not in SERVED or x.device.type not in ("cpu", "cuda", "meta"):
                reason = f"its input is {dtype_name(x.dtype)} on {x.device.type}"
            elif not is_compiling() and in_transform(x):
                reason = "it is called inside forward-mode AD or a torch.func transform"
            else:
                reason = _other_dtype(parts, x)
        if not reason:
            return parts
        if not is_compiling() and dispatch.active:  # in this order graphs do not depend on it
            problem = f"{list(x.shape)} {dtype_name(x.dtype)}"
            dispatch.record(Dispatch("integrations.patchtst", "torch", problem, "", reason))
        return None

    def _isogemm_computed(self, x: Tensor, parts: Parts, **options: Any) -> Any:
        """Compute the layer of x [S, T, D]."""
        parameters, layer_options = encoder_arguments(parts)
        precision = self.isogemm_choices.precision if x.dtype is torch.float32 else None
        begins = options.get("return_scores") == "factors" and options["scores"] is None
        if begins and not gains_by_factors(x, parameters, layer_options["nhead"], precision):
            options["return_scores"] = True
        activation = self.isogemm_choices.activation
        return encoder_layer(x, parameters, activation=activation, precision=precision, **layer_options, **options)


class _HuggingFaceLayer(_Accelerated):
    family = HuggingFace()

    def forward(self, hidden_state: Tensor, output_attentions: bool | None = None) -> tuple[Tensor, ...]:
        parts = self._isogemm_parts(hidden_state, "output_attentions is True" if output_attentions else "")
        if parts is None:
            theirs: tuple[Tensor, ...] = super().forward(hidden_state, output_attentions=output_attentions)
            return theirs
        tokens = self._isogemm_computed(hidden_state.flatten(0, 1), parts, norm_first=self.pre_norm)
        return (tokens.view(hidden_state.shape),)


class _OfficialLayer(_Accelerated):
    family = Official()

    def forward(
        self,
        src: Tensor,
        prev: Tensor | tuple[Tensor, ...] | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | tuple[Tensor, ...] | None]:
        reason = ""
        if attn_mask is not None:
            reason = "it is called with an attn_mask"
        elif key_padding_mask is not None and key_padding_mask.dtype is not torch.bool:
            reason = "its key_padding_mask is not bool"
        parts = self._isogemm_parts(src, reason)
        if parts is None:
            masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
            given = {name: mask for name, mask in masks.items() if mask is not None}  # a layer may know of none
            if isinstance(prev, tuple):
                prev = self._isogemm_scores(prev)
            theirs: Tensor | tuple[Tensor, Tensor] = super().forward(src, prev, **given)
            return theirs
        residual, hooked = self.res_attention, bool(self._forward_hooks)
        scores_read, by_factors = self.isogemm_choices.scores_read or hooked, self.isogemm_choices.by_factors
        if key_padding_mask is not None or hooked:  # masks are in scores, which hooks see, and in no factors
            by_factors = False
            prev = self._isogemm_scores(prev) if isinstance(prev, tuple) else prev
        by_factors = isinstance(prev, tuple) or (by_factors and prev is None)
        result = self._isogemm_computed(
            src,
            parts,
            norm_first=self.pre_norm,
            residual_normed=self.pre_norm,
            key_padding_mask=key_padding_mask,
            scores=prev if residual else None,
            return_scores=residual and scores_read and ("factors" if by_factors else True),
        )
        return (result, None) if residual and not scores_read else result

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        loaded = state_dict.get(f"{prefix}self_attn.sdp_attn.scale")
        if isinstance(loaded, Tensor):
            attention: Any = self._modules["self_attn"]
            usual = is_usual_now(loaded.to(attention.sdp_attn.scale.dtype), attention.d_k)
            self.__dict__["isogemm_choices"] = self.isogemm_choices._replace(usual_scale=usual)

    def _isogemm_scores(self, factors: tuple[Tensor, ...]) -> Tensor:
        precision = self.isogemm_choices.precision if factors[0].dtype is torch.float32 else None
        return scores_of(factors, resolve_precision(factors[0], precision))


_classes: dict[tuple[type, type], type[torch.nn.Module]] = {}  # by their bases


def _class(kind: type[_Accelerated], original: type[torch.nn.Module]) -> type[torch.nn.Module]:
    bases = (kind, original)
    if bases not in _classes:
        _classes[bases] = type(f"Accelerated{original.__name__}", bases, {"__module__": __name__})
    return _classes[bases]


def _unfilled(kind: type[_Accelerated], original: type[torch.nn.Module]) -> torch.nn.Module:
    """Make an empty layer, whose attributes copy and pickle set."""
    made = _class(kind, original)
    return made.__new__(made)


def _change_class(
    layer: torch.nn.Module,
    kind: type[_Accelerated],
    precision: str | None,
    scores_read: bool = True,
    by_factors: bool = False,
) -> None:
    parts = kind.family.parts(layer)
    types = tuple(map(type, parts.known_by_type))
    layer.__dict__["isogemm_choices"] = _Choices(
        precision, _activation(parts), types, _activation_options(parts), scores_read, by_factors
    )
    layer.__class__ = _class(kind, type(layer))


def _obstacle(kind: type[_Accelerated], layer: torch.nn.Module) -> str:
    """Say why isogemm.encoder_layer would not compute what the layer does; empty if it would."""
    if sum("forward" in vars(cls) for cls in type(layer).__mro__ if cls is not torch.nn.Module) > 1:
        return f"{type(layer).__name__} has a forward of its own"
    if reason := module_obstacle(layer):
        return reason
    parts, reason = inspect_layer(kind.family, layer)
    if reason or parts is None:
        return reason
    if not _activation(parts):
        return f"its activation is {parts.activation!r}, none of {', '.join(ACTIVATIONS)}"
    for module in parts.with_parameters:
        if reason := parameter_obstacle(module, "weight", "bias"):
            return f"{name_in(layer, module)}: {reason}"
    known = {layer, *parts.with_parameters, *parts.dropouts, *parts.known_by_type}
    for name, module in layer.named_modules():
        if module not in known:
            return f"its {name} is no module of such a layer"
    for each in layer.parameters():
        if each.dtype not in SERVED:
            return f"{each.dtype} has no contract; those with one: {', '.join(map(dtype_name, SERVED))}"
    return _difference(kind, layer)


def _other_dtype(parts: Parts, x: Tensor) -> str:
    """Say that the norms have another dtype than the input, which isogemm takes under autocast alone; else empty."""
    for norm in (parts.norm1, parts.norm2):
        scale = parameter(norm, "weight")
        if scale is not None and scale.dtype is not x.dtype and autocast_dtype(x) is None:
            return f"its norms are {dtype_name(scale.dtype)}, its input {dtype_name(x.dtype)}"
    return ""


def _note(parts: Parts) -> str:
    weight = parameter(parts.q, "weight")
    if weight.device.type == "cpu":
        return "slower than torch's on the CPU, where isogemm gives reproducible bits and no speed"
    return slower_than_torch(weight.shape[-1], parts.nhead, weight.dtype)


def _activation_options(parts: Parts) -> tuple[tuple[str, object], ...]:
    """Return the attributes on which an activation depends, and their values."""
    if parts.folded:
        return (("activation", parts.linear1.activation),)
    options = (each for each in vars(parts.activation).items() if each[0] not in _OF_ANY_MODULE)
    return tuple((name, value) for name, value in options if isinstance(value, _PLAIN) or callable(value))


_PLAIN = (str, int, float, type(None))
_OF_ANY_MODULE = frozenset({*vars(torch.nn.Module()), "_is_hf_initialized"})


def _is_other_activation(parts: Parts, options: tuple[tuple[str, object], ...]) -> bool:
    module = parts.linear1 if parts.folded else parts.activation
    return not all(_is_same(getattr(module, name, None), value) for name, value in options)


def _is_same(value: object, before: object) -> bool:
    if isinstance(before, partial):  # torch.compile sees another object
        return isinstance(value, partial) and (value.func, value.args, value.keywords) == (
            before.func, before.args, before.keywords
        )  # fmt: skip
    return value == before if isinstance(before, _PLAIN) else value is before


def _activation(parts: Parts) -> str:
    """Return isogemm.encoder_layer's name of the activation, found by its values if it is not torch's; else empty."""
    module = parts.activation
    if parts.folded:
        folded = parts.linear1.activation
        return folded if folded in ACTIVATIONS else ""
    name = activation_name(module)
    if name or next(module.parameters(), None) is not None or next(module.buffers(), None) is not None:
        return name
    z = torch.linspace(-8, 8, 257, dtype=torch.float64, device="cpu")
    with torch.no_grad():
        try:
            values = module.forward(z.clone())
        except Exception:
            return ""
        return next((name for name in ACTIVATIONS if _close(spec.activation(name).torch(z), values, 1e-6)), "")


def _difference(kind: type[_Accelerated], layer: torch.nn.Module) -> str:
    """Try the layer without dropout, and say what isogemm.encoder_layer computes otherwise; empty if nothing."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    bare = shared(type(layer), layer)
    bare.__dict__.update({name: OrderedDict() for name in vars(bare) if name.endswith("_hooks")})
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            tried = copy.deepcopy(bare).to_empty(device="cpu").float()
        except Exception as error:
            return f"it cannot be copied to be tried: {type(error).__name__}: {error}"
        for each in tried.parameters():
            each.copy_(random(*each.shape) / (each.shape[-1] ** 0.5 if each.ndim > 1 else 1))
        for buffer in tried.buffers():
            buffer.copy_(random(*buffer.shape).square() + 1)  # a variance, too
        for module in tried.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        args, kwargs = kind.family.trial(tried, random)
        ours = copy.deepcopy(tried)
        _change_class(ours, kind, precision=None)
        for training in (False, True):
            try:
                theirs = [*_tensors(tried.train(training).forward(*args, **kwargs)), *tried.buffers()]
            except Exception as error:
                return f"its forward, tried on the CPU, raised {type(error).__name__}: {error}"
            found = [*_tensors(ours.train(training).forward(*args, **kwargs)), *ours.buffers()]
            if len(found) != len(theirs) or not all(map(_close, found, theirs)):
                mode = " in training mode" if training else ""
                return f"the forward of {type(layer).__name__} computes something else{mode}"
    return ""


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _close(ours: Tensor, theirs: object, tolerance: float = 1e-4) -> bool:
    return (
        isinstance(theirs, Tensor)
        and ours.shape == theirs.shape
        and bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())
    )


def _stacks_passing_scores(
    names: Sequence[tuple[str, torch.nn.Module]], layers: Container[torch.nn.Module]
) -> list[list[torch.nn.Module | None]]:
    """Find the stacks with residual attention that only pass scores on, and return their layers.

    None stands for a layer that is none of `layers`, or whose scores something else may see.
    """
    times = Counter(module for _, module in names)

    def known(layer: torch.nn.Module) -> bool:
        return layer in layers and times[layer] == 1 and not layer._forward_hooks and bool(layer.res_attention)

    found = []
    for encoder in times:
        stack = encoder._modules.get("layers")
        if isinstance(stack, torch.nn.ModuleList) and any(map(known, stack)) and _only_passes_scores_on(encoder):
            found.append([layer if known(layer) else None for layer in stack])
    return found


def _only_passes_scores_on(encoder: torch.nn.Module) -> bool:
    """Whether an encoder only passes scores on: its forward is run with layers that return bare objects.

    False if it calls them without gradients, as a reentrant checkpoint does, which finds no tensor inside a tuple.
    """
    if "forward" in encoder.__dict__:
        return False
    tokens = [object() for _ in range(4)]
    with_gradients = []

    def layer(given: object, *args: object, **kwargs: object) -> tuple[object, object]:
        with_gradients.append(torch.is_grad_enabled())
        return given, object()

    layers = [partial(layer, given) for given in tokens[1:]]
    stand_in = SimpleNamespace(layers=layers, res_attention=True)
    try:
        with torch.enable_grad():
            result = type(encoder).forward(stand_in, tokens[0])
    except Exception:
        return False
    alone = result is tokens[-1] and vars(stand_in) == {"layers": layers, "res_attention": True}
    return alone and all(with_gradients)
