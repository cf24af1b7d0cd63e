"""What a run is made of, and the runs that have a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from isogemm.training.model import Architecture
from isogemm.training.series import synthetic_rows

BACKENDS = ("torch", "compile", "isogemm")
PRECISIONS = ("ieee", "tf32", "bf16")


@dataclass(frozen=True)
class Config:
    """All that the bits of the trained weights depend on, besides the data and the device."""

    model: Architecture
    batch: int = 128
    lr: float = 1e-4
    weight_decay: float = 0.01
    seed: int = 0
    backend: str = "isogemm"
    precision: str = "tf32"
    compile_rest: bool = False
    graph: bool | None = None
    graph_steps: int = 1

    def __post_init__(self) -> None:
        for name, accepted in (("backend", BACKENDS), ("precision", PRECISIONS)):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} is {getattr(self, name)!r}; accepted: {', '.join(accepted)}")
        for name in ("batch", "graph_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
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


@dataclass(frozen=True)
class Preset:
    """A named run, described in `isogemm_cli.PRESETS`. Without a CSV, `rows` of synthetic data."""

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

PRESETS = {
    "reference": Preset(
        Config(_REFERENCE, batch=64, lr=1e-3), rows=synthetic_rows(28_000, _REFERENCE.inputs + _REFERENCE.horizon)
    ),
    "ettm1": Preset(Config(_ETTM1), rows=69_680),
    "etth1": Preset(Config(replace(_ETTM1, d_model=16, nhead=4, dim_feedforward=128, dropout=0.3)), rows=17_420),
    "weather": Preset(Config(replace(_ETTM1, channels=21)), rows=52_696),
    "electricity": Preset(Config(replace(_ETTM1, channels=321), batch=32), rows=26_304),
    "patchtst64": Preset(Config(replace(_ETTM1, inputs=512)), rows=69_680),
}
