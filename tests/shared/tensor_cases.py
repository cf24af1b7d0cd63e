"""Sizes, dtypes and tensors that tests draw from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from layouts import with_layout

from isogemm.verify.inputs import make_data

ODD_SIZES = (1, 3, 17, 63, 65, 127, 1000)


FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


NEARBY = 3


def nearby(x: torch.Tensor, which: int) -> torch.Tensor:
    """x with every element up to 2 % off: as well or badly conditioned, and rounded otherwise.

    Of few and badly conditioned sums the largest rounding error is a draw, by which even equal methods differ three
    times and more. What a method makes of NEARBY such inputs as well tells what it is.
    """
    noise = make_data("normal", tuple(x.shape), seed=which, device=x.device).clamp(-2, 2)
    return (x.detach() * (1 + noise / 100)).to(x.dtype)


@dataclass(frozen=True)
class TensorCase:
    """A tensor in words, small enough for a test id; `build` makes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    kind: str = "normal"
    layout: str = "contiguous"
    seed: int = 0

    def build(self, device: torch.device | str = "cpu") -> torch.Tensor:
        data = make_data(self.kind, self.shape, seed=self.seed, dtype=self.dtype, device=device)
        return with_layout(data, self.layout)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{shape}-{dtype}-{self.kind}-{self.layout}-{self.seed}"
