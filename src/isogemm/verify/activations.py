"""Activations as torch's own functions, independent of isogemm's, which are compared with them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Form = Callable[..., Tensor]

ACTIVATION_FORMS: dict[str, Form] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu2": lambda z: torch.square(torch.relu(z)),
    "leaky_relu": F.leaky_relu,
}
GATE_FORMS: dict[str, Form] = {"swiglu": F.silu, "geglu": F.gelu, "reglu": torch.relu}
