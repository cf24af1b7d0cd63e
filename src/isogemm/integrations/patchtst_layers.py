"""The encoder layers of a PatchTST, Hugging Face's and the official ones: their modules by what they compute."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from isogemm.encoder.parameters import EncoderDropout, EncoderParameters
from isogemm.nn.encoder_layer import encoder_parameters, norm_options, probability
from isogemm.nn.linear import read_past_forward
from isogemm.nn.sharing import needs_its_forward, parameter
from isogemm.nn.swap import FoldedActivation

_NORM = (torch.nn.LayerNorm.forward, torch.nn.BatchNorm1d.forward)
_DROPOUT = (torch.nn.Dropout.forward, torch.nn.Identity.forward)

UNUSUAL_SCALE = "its attention's scale is not 1 / sqrt(d_k)"

_ATTENTIONS = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


class Parts(NamedTuple):
    """The modules of a layer, by what they compute."""

    q: Any
    k: Any
    v: Any
    out_proj: Any
    linear1: Any
    linear2: Any
    norm1: Any
    norm2: Any
    activation: Any
    projection_dropouts: tuple[Any, ...]
    activation_dropout: Any
    output_dropout: Any
    others: tuple[Any, ...]  # all other modules that are called
    attention_dropout: float  # in its present mode
    nhead: int

    @property
    def with_parameters(self) -> tuple[Any, ...]:
        return self[:8]

    @property
    def dropouts(self) -> tuple[Any, ...]:
        return (*self.projection_dropouts, self.activation_dropout, self.output_dropout)

    @property
    def folded(self) -> bool:
        """Whether linear1 is an isogemm.nn.Linear that computes the activation, as isogemm.nn.swap leaves it."""
        return isinstance(self.activation, FoldedActivation)

    @property
    def known_by_type(self) -> tuple[Any, ...]:
        """The modules that are no torch.nn.Linear, norm or dropout."""
        return (self.activation, *self.others)


class HuggingFace:
    """Hugging Face's layers.

    resembles: whether a module has the submodules that tell such a layer from others.
    parts: its modules; KeyError or AttributeError where one is missing.
    obstacle: which of its options isogemm.encoder_layer would not compute; empty if none.
    trial: prepares a copy of a layer to be tried, and returns the arguments to call it with.
    """

    def resembles(self, layer: torch.nn.Module) -> bool:
        names = ("norm_sublayer1", "norm_sublayer3", "ff")
        return _has(layer, *names) and _has(layer._modules.get("self_attn"), "q_proj", "k_proj", "v_proj", "out_proj")

    def parts(self, layer: torch.nn.Module) -> Parts:
        modules: Mapping[str, Any] = layer._modules
        attention, ff = modules["self_attn"], modules["ff"]
        projections, feedforward = attention._modules, ff._modules
        wrapped1, wrapped2 = modules["norm_sublayer1"], modules["norm_sublayer3"]
        norm1, norm2 = wrapped1._modules.get("batchnorm", wrapped1), wrapped2._modules.get("batchnorm", wrapped2)
        return Parts(
            q=projections["q_proj"],
            k=projections["k_proj"],
            v=projections["v_proj"],
            out_proj=projections["out_proj"],
            linear1=feedforward["0"],
            linear2=feedforward["3"],
            norm1=norm1,
            norm2=norm2,
            activation=feedforward["1"],
            projection_dropouts=(modules["dropout_path1"],),
            activation_dropout=feedforward["2"],
            output_dropout=modules["dropout_path3"],
            others=(attention, ff) if norm1 is wrapped1 else (attention, ff, wrapped1, wrapped2),
            attention_dropout=attention.dropout if attention.training else 0.0,
            nhead=attention.num_heads,
        )

    def obstacle(self, layer: Any, parts: Parts) -> str:
        attention = layer._modules["self_attn"]
        if layer.channel_attention:
            return "it attends across channels too (channel_attention)"
        if attention.is_causal:
            return "its attention is causal"
        if attention.scaling != attention.head_dim**-0.5:
            return "its attention's scale is not 1 / sqrt(head_dim)"
        implementation = getattr(attention.config, "_attn_implementation", None)
        if implementation not in _ATTENTIONS:
            return f"its attention is {implementation!r}, none of {', '.join(_ATTENTIONS[1:])}"
        return ""

    def trial(self, layer: Any, random: Callable[..., Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        attention = layer.self_attn
        attention.dropout = 0.0
        if attention.config is not None:
            attention.config._attn_implementation = "eager"  # the CPU may lack the others
        return (), {"hidden_state": random(2, 2, 3, attention.embed_dim), "output_attentions": None}


class Official:
    """The official implementation's layers, with the methods of HuggingFace."""

    def resembles(self, layer: torch.nn.Module) -> bool:
        names = ("norm_attn", "norm_ffn", "ff")
        return _has(layer, *names) and _has(layer._modules.get("self_attn"), "W_Q", "W_K", "W_V", "to_out")

    def parts(self, layer: torch.nn.Module) -> Parts:
        modules: Mapping[str, Any] = layer._modules
        attention, ff = modules["self_attn"], modules["ff"]
        projections, feedforward = attention._modules, ff._modules
        attend, to_out = projections["sdp_attn"], projections["to_out"]
        attention_dropout = attend._modules["attn_dropout"]
        others = [attention, attend, attention_dropout, to_out, ff]
        norm1 = wrapped1 = modules["norm_attn"]
        norm2 = wrapped2 = modules["norm_ffn"]
        if wrapped1._modules:  # transposed, normalized, transposed back
            norm1, norm2 = wrapped1._modules["1"], wrapped2._modules["1"]
            for wrapped in (wrapped1, wrapped2):
                others += (wrapped, wrapped._modules["0"], wrapped._modules["2"])
        return Parts(
            q=projections["W_Q"],
            k=projections["W_K"],
            v=projections["W_V"],
            out_proj=to_out._modules["0"],
            linear1=feedforward["0"],
            linear2=feedforward["3"],
            norm1=norm1,
            norm2=norm2,
            activation=feedforward["1"],
            projection_dropouts=(to_out._modules["1"], modules["dropout_attn"]),
            activation_dropout=feedforward["2"],
            output_dropout=modules["dropout_ffn"],
            others=tuple(others),
            attention_dropout=probability(attention_dropout),
            nhead=attention.n_heads,
        )

    def obstacle(self, layer: Any, parts: Parts) -> str:
        attention = layer._modules["self_attn"]
        attend = attention._modules["sdp_attn"]
        if layer.store_attn:
            return "it keeps its attention's weights (store_attn)"
        if not attention.n_heads * attention.d_k == attention.n_heads * attention.d_v == parts.q.in_features:
            return f"its heads of {attention.d_k} and {attention.d_v} do not make up d_model (d_k, d_v)"
        scale = parameter(attend, "scale")
        if attend.lsa or scale.requires_grad:
            return "its attention learns its scale (lsa)"
        if not _is_usual(scale, attention.d_k):
            return UNUSUAL_SCALE
        if not layer.res_attention == attention.res_attention == attend.res_attention:
            return "it has residual attention in one of its modules and none in another"
        return ""

    def trial(self, layer: Any, random: Callable[..., Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        attention = layer.self_attn
        attention.sdp_attn.scale.fill_(attention.d_k**-0.5)
        return (random(2, 3, attention.W_Q.in_features),), {"prev": random(2, attention.n_heads, 3, 3)}


Family = HuggingFace | Official


def inspect_layer(family: Family, layer: torch.nn.Module) -> tuple[Parts | None, str]:
    """Return a layer's modules, and what in them and its options isogemm.encoder_layer would not compute now."""
    try:
        parts = family.parts(layer)
        return parts, family.obstacle(layer, parts) or _unlike(layer, parts)
    except (AttributeError, KeyError) as error:
        return None, f"it lacks what such a layer has: {error}"


def name_in(layer: torch.nn.Module, module: torch.nn.Module) -> str:
    """Return a module's name in the layer."""
    names: dict[torch.nn.Module, str] = {each: name for name, each in layer.named_modules()}
    return names[module]


def encoder_arguments(parts: Parts) -> tuple[EncoderParameters, dict[str, Any]]:
    """Return the arguments of isogemm.encoder_layer that the modules determine."""
    parameters = encoder_parameters(
        (parameter(parts.q, "weight"), parameter(parts.k, "weight"), parameter(parts.v, "weight")),
        (parameter(parts.q, "bias"), parameter(parts.k, "bias"), parameter(parts.v, "bias")),
        *parts.with_parameters[3:],
    )
    return parameters, {"nhead": parts.nhead, "dropout": _dropout(parts), **norm_options(parts.norm1, parts.norm2)}


def _has(module: torch.nn.Module | None, *names: str) -> bool:
    return module is not None and module._modules.keys() >= set(names)


def _unlike(layer: torch.nn.Module, parts: Parts) -> str:
    """Say what in the modules isogemm.encoder_layer would not compute; empty if nothing."""
    for module in parts.with_parameters[:6]:
        folded = parts.folded and module is parts.linear1  # it computes the activation after it too
        if folded and getattr(module, "activation", None) is None:
            return f"{name_in(layer, module)} lacks the activation that was folded into it"
        if reason := read_past_forward(module, activated=folded):
            return f"{name_in(layer, module)} {reason}"
    for forwards, modules in (
        (_NORM, parts.with_parameters[6:]),
        (_DROPOUT, parts.dropouts),
        (None, parts.known_by_type),
    ):
        for module in modules:
            if reason := needs_its_forward(module, forwards):
                return f"{name_in(layer, module)} {reason}"
    norm1, norm2 = parts.norm1, parts.norm2
    if type(norm1).forward is not type(norm2).forward or norm1.eps != norm2.eps:
        return "its norms are not of one kind and eps"
    if isinstance(norm1, torch.nn.LayerNorm):
        if not norm1.normalized_shape == norm2.normalized_shape == (parts.q.in_features,):
            return "its norms normalize other dimensions than the last"
    elif norm1 is norm2:
        return "its norms are one batch norm, whose running statistics are updated twice"
    elif _from_batch(norm1) != _from_batch(norm2):
        return "one of its batch norms takes the batch's statistics and the other does not"
    return ""


def _dropout(parts: Parts) -> EncoderDropout:
    projection = 0.0
    for each in parts.projection_dropouts:  # one after the other: the first or, of the rest, the second
        projection += (1.0 - projection) * probability(each)
    return EncoderDropout(
        attention=parts.attention_dropout,
        projection=projection,
        activation=probability(parts.activation_dropout),
        output=probability(parts.output_dropout),
    )


def _from_batch(norm: torch.nn.BatchNorm1d) -> bool:
    """Whether a norm uses the batch's statistics."""
    return norm.training or (norm.running_mean is None and norm.running_var is None)


# Scales known to be usual, by id: the tensor, its address and its version.
_usual_scales: dict[int, tuple[weakref.ref[Tensor], tuple[int, int]]] = {}


def _is_usual(scale: Tensor, head: int) -> bool:
    """Whether a scale is 1 / sqrt(head). Its value, which waits for the device, is read only if its version changed."""
    if is_compiling() or scale.is_meta:
        return is_usual_now(scale, head)
    try:
        value = scale.data_ptr(), 0 if scale.is_inference() else scale._version
    except RuntimeError:  # inside a torch.func transform
        return is_usual_now(scale, head)
    seen, then = _usual_scales.get(id(scale), (None, None))
    if seen is not None and seen() is scale and then == value:
        return True
    if not is_usual_now(scale, head):
        return False
    address = id(scale)
    _usual_scales[address] = weakref.ref(scale, lambda _: _usual_scales.pop(address, None)), value
    return True


def is_usual_now(scale: Tensor, head: int) -> bool:
    """Read whether a scale is 1 / sqrt(head); True where it has no value, as in torch.export.

    torch.compile calls this once, when it makes a graph.
    """
    try:
        return torch.equal(scale.detach().cpu(), torch.tensor(head**-0.5, dtype=scale.dtype, device="cpu"))
    except RuntimeError:
        return True


# What torch.compiler.assume_constant_result does, which imports all of torch.compile.
is_usual_now._dynamo_marked_constant = True  # type: ignore[attr-defined]
