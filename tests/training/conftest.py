from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from isogemm.training.loop import Run
from isogemm.training.series import Series, synthetic
from isogemm.training.world import World
from isogemm_options import PRESETS, Config

TINY = {
    "channels": 2, "inputs": 16, "horizon": 4, "patch": 4, "stride": 4, "d_model": 8, "nhead": 2,
    "dim_feedforward": 16, "batch": 16, "backend": "torch",
}  # fmt: skip


@pytest.fixture
def config() -> Callable[..., Config]:
    """The smallest run, with changes."""
    return lambda **options: PRESETS["reference"].with_options({**TINY, **options})


@pytest.fixture
def series() -> Series:
    return synthetic(240, TINY["channels"])


@pytest.fixture
def start(config: Callable[..., Config], series: Series) -> Callable[..., Run]:
    """A run on the CPU that has not begun."""

    def start(**options: Any) -> Run:
        return Run(config(**options), series, World(torch.device("cpu")))

    return start
