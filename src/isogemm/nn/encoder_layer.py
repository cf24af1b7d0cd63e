"""`isogemm.nn.EncoderLayer`: torch.nn.TransformerEncoderLayer through `isogemm.encoder_layer`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch.nn import functional

from isogemm.core.errors import require_precision
from isogemm.encoder.api import encoder_layer
from isogemm.encoder.configs import WIDEST, unserved
from isogemm.encoder.parameters import ACTIVATIONS, NORMS, EncoderDropout, EncoderParameters, RunningStatistics
from isogemm.epilogues import of_module, recognise, spec
from isogemm.gemm.describe import dtype_name
from isogemm.nn.sharing import module_obstacle, needs_its_forward, parameter, parameter_obstacle, shared, shown_name

Activation = Callable[[torch.Tensor], torch.Tensor]

# The forwards of the submodules that isogemm.encoder_layer computes.
_LINEAR = (torch.nn.Linear.forward,)
_NORM = (torch.nn.LayerNorm.forward, torch.nn.RMSNorm.forward, torch.nn.BatchNorm1d.forward)
_DROPOUT = (torch.nn.Dropout.forward, torch.nn.Identity.forward)
_FORWARDS: dict[str, tuple[Callable[..., Any], ...]] = {
    "self_attn": (torch.nn.MultiheadAttention.forward,),
    **dict.fromkeys(("linear1", "linear2"), _LINEAR),
    **dict.fromkeys(("norm1", "norm2"), _NORM),
    **dict.fromkeys(("dropout", "dropout1", "dropout2"), _DROPOUT),
}
_PARAMETERS = {
    "self_attn": ("in_proj_weight", "in_proj_bias"),
    **dict.fromkeys(("self_attn.out_proj", "linear1", "linear2"), ("weight", "bias")),
    **dict.fromkeys(("norm1", "norm2"), ("weight", "bias")),  # no bias in torch.nn.RMSNorm
}


class EncoderLayer(torch.nn.TransformerEncoderLayer):
    """torch.nn.TransformerEncoderLayer in one call each way, a sequence's bits independent of the others in the batch.

    Args:
        d_model .. dtype: those of torch.nn.TransformerEncoderLayer, in its order. The state_dict is torch's.
        activation: "relu", "gelu", "gelu_tanh" or "silu", or torch's function or module for it.
        batch_first: must be True.
        norm: "layer_norm"; "rms_norm": two torch.nn.RMSNorm, which have no bias; or "batch_norm": two
            torch.nn.BatchNorm1d, over all sequences and tokens.
        precision: of float32 inputs, see isogemm.encoder_layer.

    The submodules hold the parameters, which may be parametrized or tied, but their forwards do not run. Where these
    would be needed (hooks, another module in their place) the layer raises RuntimeError.
    """

    precision: str | None
    is_swapped: bool = False  # `isogemm.nn.swap` put it in the place of a torch.nn.TransformerEncoderLayer
    _activation: str  # the name of `activation` where that is a function: a module's options may change

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Activation = functional.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = True,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm: str = "layer_norm",
        precision: str | None = None,
    ) -> None:
        if not batch_first:
            raise ValueError("batch_first is False; expected True, and x of [sequences, tokens, d_model]")
        if norm not in NORMS:
            raise ValueError(f"norm is {norm!r}; accepted: {', '.join(NORMS)}")
        if isinstance(activation, str):
            if activation not in ACTIVATIONS:
                raise _unknown(activation)
            activation = _function(activation)
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias,
            device, dtype,
        )  # fmt: skip
        if norm != "layer_norm":
            of_kind = torch.nn.RMSNorm if norm == "rms_norm" else torch.nn.BatchNorm1d
            for name in ("norm1", "norm2"):
                self.add_module(name, of_kind(d_model, layer_norm_eps, device=device, dtype=dtype))
        self._set_options(precision)

    @classmethod
    def from_torch(cls, layer: torch.nn.TransformerEncoderLayer, *, precision: str | None = None) -> Self:
        """Make an EncoderLayer that shares the layer's submodules, parameters, hooks and other attributes.

        In a torch.nn.TransformerEncoder that was made with torch's layers, set its use_nested_tensor to False as well.
        """
        if not isinstance(layer, torch.nn.TransformerEncoderLayer):
            raise TypeError(f"layer is a {type(layer).__name__}; expected a torch.nn.TransformerEncoderLayer")
        if reason := obstacle(layer):
            raise ValueError(f"layer cannot become an isogemm.nn.EncoderLayer: {reason}")
        made = shared(cls, layer, ("is_swapped",))
        made._activation = activation_name(layer.activation)
        made._set_options(precision)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "activation":
            recognised = activation_name(value)
            if not recognised:
                raise _unknown(value)
            self._activation = recognised
        super().__setattr__(name, value)

    def forward(
        self,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Compute the layer: src [sequences, tokens, d_model] or [tokens, d_model], and a result of that shape.

        Args:
            src_mask: None, or a causal mask together with is_causal=True; its values are not read.
            src_key_padding_mask: [sequences, tokens] or [tokens], see isogemm.encoder_layer.
            is_causal: attend to no later token.
        """
        if reason := _unlike(self):
            raise RuntimeError(f"this EncoderLayer does not call its submodules, but {reason}")
        if src_mask is not None and not is_causal:
            raise ValueError("src_mask needs is_causal=True; other masks are not supported")
        if src.is_nested:
            raise ValueError(
                "src is a NestedTensor; expected a padded one and src_key_padding_mask "
                "(in a torch.nn.TransformerEncoder, set its use_nested_tensor to False)"
            )
        modules: dict[str, Any] = self._modules
        attention, norm1, norm2 = modules["self_attn"], modules["norm1"], modules["norm2"]
        result: torch.Tensor = encoder_layer(
            src,
            encoder_parameters(
                parameter(attention, "in_proj_weight"),
                parameter(attention, "in_proj_bias"),
                attention._modules["out_proj"],
                modules["linear1"],
                modules["linear2"],
                norm1,
                norm2,
            ),
            nhead=attention.num_heads,
            norm_first=self.norm_first,
            activation=_activation_now(self),
            key_padding_mask=src_key_padding_mask,
            is_causal=is_causal,
            dropout=_dropout(modules),
            precision=self.precision,
            **norm_options(norm1, norm2),
        )
        return result

    _get_name = shown_name

    def extra_repr(self) -> str:
        activation = activation_name(self.activation) or repr(self.activation)
        options = {"nhead": self.self_attn.num_heads, "activation": activation, "norm_first": self.norm_first}
        if self.precision is not None:
            options["precision"] = self.precision
        return ", ".join(f"{name}={value}" for name, value in options.items())

    def _set_options(self, precision: str | None) -> None:
        require_precision(precision, torch.float32)  # the name alone: the dtype is known when called
        self.precision = precision
        self.activation_relu_or_gelu = 0  # tells a torch.nn.TransformerEncoder not to pack the batch


def encoder_parameters(
    in_proj_weight: Any, in_proj_bias: Any, out_proj: Any, linear1: Any, linear2: Any, norm1: Any, norm2: Any
) -> EncoderParameters:
    """Collect the parameters of a layer's modules."""
    return EncoderParameters(
        in_proj_weight, parameter(out_proj, "weight"), parameter(linear1, "weight"), parameter(linear2, "weight"),
        parameter(norm1, "weight"), parameter(norm2, "weight"),
        in_proj_bias, parameter(out_proj, "bias"), parameter(linear1, "bias"), parameter(linear2, "bias"),
        parameter(norm1, "bias"), parameter(norm2, "bias"),
    )  # fmt: skip


def _function(name: str) -> Activation:
    """Return torch's function for an activation, with its options where they are not the default."""
    entry = spec.ACTIVATIONS[name]
    function = entry.functions[-1]
    return function if activation_name(function) == name else partial(function, **entry.options)


def _activation_now(layer: EncoderLayer) -> str:
    module = layer._modules.get("activation")
    if module is None:
        return layer._activation
    name = activation_name(module)
    if not name:
        raise RuntimeError(f"this EncoderLayer's activation has become {module!r}, none of {', '.join(ACTIVATIONS)}")
    return name


def _unknown(activation: object) -> ValueError:
    return ValueError(
        f"activation is {activation!r}; accepted: {', '.join(ACTIVATIONS)}, or torch's function or module for one"
    )


def as_torch(layer: EncoderLayer) -> torch.nn.TransformerEncoderLayer:
    """Make a torch.nn.TransformerEncoderLayer of the same submodules, hooks and other attributes."""
    made = shared(torch.nn.TransformerEncoderLayer, layer, ("precision", "is_swapped", "_activation"))
    activation = made.activation
    relu = activation is functional.relu or isinstance(activation, torch.nn.ReLU)
    gelu = activation is functional.gelu or isinstance(activation, torch.nn.GELU)
    made.activation_relu_or_gelu = 1 if relu else 2 if gelu else 0  # as in torch's constructor
    return made


def slower_than_torch(d_model: int, nhead: int, dtype: torch.dtype) -> str:
    """Say that a layer is known to be slower on a GPU than torch's; empty for others.

    Composed layers (H200, TF32 and bf16): in a CUDA graph 1.4 to 1.6 of torch.compile's speed at d_model 96, 0.75 to
    0.98 at 384 and 768; launched one by one 0.68 to 0.78 of eager torch's.
    """
    reason = unserved(1, d_model, nhead, dtype_name(dtype))
    if not reason:
        return ""
    where = "on a GPU" if d_model > WIDEST else "on a GPU outside of a CUDA graph"
    return f"slower than torch's {where}: it is composed ({reason})"


def obstacle(layer: torch.nn.TransformerEncoderLayer) -> str:
    """Say why an isogemm.nn.EncoderLayer of the same parameters would compute something else; empty if it would not."""
    for method in ("forward", "_sa_block", "_ff_block"):
        ours = (getattr(torch.nn.TransformerEncoderLayer, method), getattr(EncoderLayer, method))
        if getattr(type(layer), method) not in ours:
            return f"{type(layer).__name__} has a {method} of its own"
    if reason := module_obstacle(layer) or _unlike(layer):
        return reason
    if isinstance(layer.norm1, torch.nn.BatchNorm1d) and not isinstance(layer, EncoderLayer):
        return "norm1 is a BatchNorm1d, which there takes the tokens for its features"
    if not activation_name(layer.activation):
        return f"its activation is {layer.activation!r}, none of {', '.join(ACTIVATIONS)}"
    for name, parameters in _PARAMETERS.items():
        module = layer.get_submodule(name)
        if reason := parameter_obstacle(module, *(each for each in parameters if hasattr(module, each))):
            return f"{name}: {reason}"
    return ""


def _dropout(modules: dict[str, Any]) -> EncoderDropout:
    """Return the probabilities of the next call."""
    attention = modules["self_attn"]
    return EncoderDropout(
        attention.dropout if attention.training else 0.0,
        *[probability(modules[name]) for name in ("dropout1", "dropout", "dropout2")],
    )


def probability(module: torch.nn.Module) -> float:
    """Return the probability of a torch.nn.Dropout in its present mode; 0 for a torch.nn.Identity."""
    return float(module.p) if module.training and isinstance(module, torch.nn.Dropout) else 0.0


def norm_options(norm1: Any, norm2: Any) -> dict[str, Any]:
    """Return the options of isogemm.encoder_layer that a layer's two norms determine."""
    if isinstance(norm1, torch.nn.BatchNorm1d):
        return {"norm": "batch_norm", "eps": norm1.eps, "running": (_running(norm1), _running(norm2))}
    return {"norm": "layer_norm" if isinstance(norm1, torch.nn.LayerNorm) else "rms_norm", "eps": norm1.eps}


def _running(norm: Any) -> RunningStatistics:
    if norm.training and not norm.track_running_stats:
        return RunningStatistics()
    buffers = norm._buffers  # ten times faster than attributes
    mean, var, batches = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
    return RunningStatistics(mean, var, batches, norm.momentum, not norm.training)


def _unlike(layer: torch.nn.TransformerEncoderLayer) -> str:
    """Say what in the layer's submodules isogemm.encoder_layer would not compute; empty if nothing."""
    modules: dict[str, Any] = layer._modules
    for name, forwards in _FORWARDS.items():
        if reason := needs_its_forward(modules[name], forwards):
            return f"{name} {reason}"
    if "activation" in modules and (reason := needs_its_forward(modules["activation"])):
        return f"activation {reason}"
    attention, norm1, norm2 = modules["self_attn"], modules["norm1"], modules["norm2"]
    if reason := needs_its_forward(attention._modules["out_proj"], _LINEAR):
        return f"self_attn.out_proj {reason}"
    if not attention.batch_first:
        return "self_attn is batch_first=False"
    if not attention._qkv_same_embed_dim:
        return "self_attn has keys or values of another size (kdim, vdim)"
    if attention.bias_k is not None or attention.bias_v is not None or attention.add_zero_attn:
        return "self_attn attends to keys that are no tokens (add_bias_kv, add_zero_attn)"
    if type(norm1).forward is not type(norm2).forward or norm1.eps != norm2.eps:
        return "norm1 and norm2 are not of one kind and eps"
    if norm1.eps is None:
        return "norm1 has no eps"
    if not isinstance(norm1, torch.nn.BatchNorm1d):
        of_features = norm1.normalized_shape == norm2.normalized_shape == (attention.embed_dim,)
        return "" if of_features else "norm1 or norm2 normalizes other dimensions than the last"
    if not norm1.num_features == norm2.num_features == attention.embed_dim:
        return "norm1 or norm2 is not of d_model features"
    if (norm1.training, norm1.running_mean is None) != (norm2.training, norm2.running_mean is None):
        return "norm1 and norm2 do not both take the batch's statistics, or both the running ones"
    return ""


def activation_name(activation: object) -> str:
    """Return isogemm.encoder_layer's name of an activation; empty if it has none."""
    if isinstance(activation, torch.nn.Module):
        found = of_module(activation)
    elif isinstance(activation, partial):
        found = recognise(activation.func, (None, *activation.args), activation.keywords)
    elif callable(activation):
        found = recognise(activation, (None,), {})
    else:
        return ""
    return found[0] if found and found[0] in ACTIVATIONS else ""
