"""The options of a PatchTST training run, and the runs that have a name.

This module stands outside the package, as `isogemm_cli` does: the command's options are made of it without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

BACKENDS = ("torch", "compile", "isogemm")


def option(text: str, default: Any = MISSING, choices: tuple[str, ...] = ()) -> Any:
    """A field that is an option of the command, with its help."""
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True)
class Architecture:
    """The sizes and options of a `Forecaster`; defaults are the official implementation's."""

    channels: int = option("channels of synthetic data (a CSV has its own)")
    inputs: int = option("input rows of a forecast")
    horizon: int = option("rows to forecast")
    patch: int = option("rows per patch", 16)
    stride: int = option("rows from the start of one patch to the next", 8)
    pad_end: bool = option("repeat the last value to fill one more patch", True)
    layers: int = option("number of encoder layers", 3)
    d_model: int = option("width of the model", 128)
    nhead: int = option("number of attention heads", 16)
    dim_feedforward: int = option("width of the feed-forward part", 256)
    norm: str = option("BatchNorm1d or LayerNorm", "batch", ("batch", "layer"))
    activation: str = option("activation of the feed-forward part", "gelu", ("gelu", "relu"))
    pre_norm: bool = option(
        "norms before attention and feed-forward; residuals start from the normed value", False
    )  # fmt: skip
    res_attention: bool = option("each layer adds the attention scores of the one before", True)
    dropout: float = option("dropout in the embedding and the layers", 0.0)
    attention_dropout: float = option("dropout of the attention weights", 0.0)
    head_dropout: float = option("dropout of the forecast", 0.0)
    revin: bool = option("normalise each window by its own mean and standard deviation", True)
    affine: bool = option("learn a scale and shift per channel in that normalisation", False)
    subtract_last: bool = option("subtract a window's last value instead of its mean", False)

    def __post_init__(self) -> None:
        sizes = "channels inputs horizon patch stride layers d_model nhead dim_feedforward"
        require_positive(self, *sizes.split())
        for name in ("dropout", "attention_dropout", "head_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 or more, below 1")
        if self.d_model % self.nhead:
            raise ValueError(f"nhead is {self.nhead}, which does not divide d_model {self.d_model}")
        _require_choices(self)
        if self.padded < self.patch:
            raise ValueError(f"patch is {self.patch}, longer than the input of {self.padded}")

    @property
    def padded(self) -> int:
        return self.inputs + (self.stride if self.pad_end else 0)

    @property
    def patches(self) -> int:
        return (self.padded - self.patch) // self.stride + 1


@dataclass(frozen=True)
class Config:
    """All that the bits of the trained weights depend on, besides the data and the device."""

    model: Architecture
    backend: str = option("torch, torch.compile, or torch with isogemm's encoder layers", "isogemm", BACKENDS)
    batch: int = option("windows per step, over all processes; training drops an incomplete last batch", 128)
    lr: float = option("learning rate of AdamW", 1e-4)
    weight_decay: float = option("weight decay of AdamW", 0.01)
    seed: int = option("seed of the weights, the order of windows and dropout", 0)
    precision: str = option(
        "matmuls on a GPU: in float32, in TF32, or in bfloat16 by autocast (bf16 on the CPU too)",
        "tf32", ("ieee", "tf32", "bf16"),
    )  # fmt: skip
    compile_rest: bool = option("with isogemm, torch.compile what surrounds the encoder layers", False)
    graph: bool | None = option(
        "run a step as a CUDA graph (on a GPU, default for compile and isogemm, not for torch)", None
    )  # fmt: skip
    graph_steps: int = option("steps in one graph", 1)

    def __post_init__(self) -> None:
        _require_choices(self)
        require_positive(self, "batch", "graph_steps")
        if not self.lr > 0 or self.weight_decay < 0:
            raise ValueError(f"lr is {self.lr}, weight_decay {self.weight_decay}; expected above 0, and not below")

    @property
    def compiles(self) -> bool:
        """Whether torch.compile has all but isogemm's layers."""
        return self.backend == "compile" or (self.backend == "isogemm" and self.compile_rest)

    def captures(self, device: str) -> bool:
        """Whether a step is a CUDA graph: on a GPU unless told otherwise, but not that of the torch backend."""
        wanted = self.backend != "torch" if self.graph is None else self.graph
        return wanted and device == "cuda"

    def flat(self) -> dict[str, Any]:
        """All options by name, the model's included."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "model"}
        return {**asdict(self.model), **own}


def require_positive(options: object, *names: str) -> None:
    """Raise a ValueError for an option below 1; None passes."""
    for name in names:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"{name} is {value}; expected at least 1")


def _require_choices(options: Architecture | Config) -> None:
    for each in fields(options):
        choices = each.metadata.get("choices")
        if choices and getattr(options, each.name) not in choices:
            raise ValueError(f"{each.name} is {getattr(options, each.name)!r}; accepted: {', '.join(choices)}")


@dataclass(frozen=True)
class Preset:
    """A named run. Without a CSV, `rows` of synthetic data."""

    summary: str
    config: Config
    rows: int
    epochs: int = 10

    def with_options(self, given: Mapping[str, Any]) -> Config:
        """The run with some of `Config.flat`'s options changed."""
        of_model = {each.name for each in fields(Architecture)}
        model = replace(self.config.model, **{name: value for name, value in given.items() if name in of_model})
        return replace(
            self.config, model=model, **{name: value for name, value in given.items() if name not in of_model}
        )


_REFERENCE = Architecture(
    channels=20, inputs=24, horizon=24, patch=8, stride=4, pad_end=False,
    layers=2, d_model=64, nhead=4, dim_feedforward=256, norm="layer", res_attention=False,
)  # fmt: skip
_ETTM1 = Architecture(channels=7, inputs=336, horizon=96, dropout=0.2)
_ETTH1 = replace(_ETTM1, d_model=16, nhead=4, dim_feedforward=128, dropout=0.3)

PRESETS = {
    "reference": Preset(
        "28,000 windows of 20 channels, 24 -> 24, 5 patches, d_model 64, 2 layers, LayerNorm",
        Config(_REFERENCE, batch=64, lr=1e-3), rows=40_068,
    ),
    "ettm1": Preset(
        "336 -> 96, 42 patches, d_model 128, 3 layers, BatchNorm, 7 channels", Config(_ETTM1), rows=69_680
    ),
    "etth1": Preset("ettm1 with d_model 16, 4 heads, dropout 0.3", Config(_ETTH1), rows=17_420),
    "weather": Preset("ettm1 with 21 channels", Config(replace(_ETTM1, channels=21)), rows=52_696),
    "electricity": Preset(
        "ettm1 with 321 channels, batch 32", Config(replace(_ETTM1, channels=321), batch=32), rows=26_304
    ),
    "patchtst64": Preset("ettm1 with 512 -> 96, 64 patches", Config(replace(_ETTM1, inputs=512)), rows=69_680),
}  # fmt: skip
