"""Checks of arguments. Every message names the argument, its value and what is accepted."""

from __future__ import annotations

import torch
from torch import Tensor

PRECISIONS = ("ieee", "tf32", "tf32x3")


def require_tensor(name: str, value: object, ndim: int, shape: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a torch.Tensor {shape}")
    if value.ndim != ndim:
        raise ValueError(f"{name} has shape {list(value.shape)}; expected {ndim} dimensions {shape}")


def require_module(name: str, value: object) -> None:
    if not isinstance(value, torch.nn.Module):
        came = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
        raise TypeError(f"{name} is {came}; expected a torch.nn.Module")


def require_same(what: str, names: tuple[str, str], values: tuple[object, object]) -> None:
    if values[0] != values[1]:
        raise ValueError(
            f"{names[0]} and {names[1]} must have the same {what}; "
            f"{names[0]} has {values[0]}, {names[1]} has {values[1]}"
        )


def require_precision(precision: str | None, dtype: torch.dtype) -> None:
    if precision is None:
        return
    if precision not in PRECISIONS:
        accepted = ", ".join(map(repr, PRECISIONS))
        raise ValueError(f"precision is {precision!r}; accepted: {accepted} or None")
    if dtype != torch.float32:
        raise ValueError(f"precision is {precision!r}, which applies to torch.float32 inputs; got {dtype}")
