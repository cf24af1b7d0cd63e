"""An encoder layer and its gradients compared with torch's layer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import torch
from gradients import Function, Tensors, gradients_of
from tensor_cases import NEARBY, nearby

import isogemm
from isogemm.verify.encoder_reference import encoder_parameters, products_of_tf32, torch_encoder
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations


def isogemm_encoder(x: torch.Tensor, *, separate: bool = False, **arguments: Any) -> torch.Tensor:
    """isogemm.encoder_layer on named tensors, its options among them."""
    named = {name: arguments.pop(name) for name in isogemm.EncoderParameters._fields if name in arguments}
    return cast(torch.Tensor, isogemm.encoder_layer(x, encoder_parameters(named, separate=separate), **arguments))


def assert_encoder_no_worse(
    tensors: Tensors,
    *,
    precision: str | None = None,
    separate: bool = False,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> None:
    """The layer and every gradient by `assert_no_worse_than_torch`, and in fp32, ieee, within 1e-4 of torch's layer.

    Errors are the largest over several x, the more the narrower the layer, and torch's over what is `nearby` too: that
    of a few sums is a draw.
    """
    shape, dtype, device = tuple(tensors["x"].shape), tensors["x"].dtype, tensors["x"].device

    def ours(x: torch.Tensor, **named: Any) -> torch.Tensor:
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            return isogemm_encoder(x, precision=precision, separate=separate, **named, **options)

    def theirs(x: torch.Tensor, **named: Any) -> torch.Tensor:
        with torch.autocast(device.type, autocast, enabled=autocast is not None and x.dtype == dtype):
            return torch_encoder(x, **named, **options).to(x.dtype)

    found: dict[str, list[tuple[torch.Tensor, ...]]] = {}
    for draw in range(max(2, min(8, 256 // shape[-1]))):
        more = {"x": make_data("normal", shape, seed=1000 + draw, dtype=dtype, device=device)} if draw else {}
        grad = make_data("normal", shape, seed=99 + draw, dtype=dtype, device=device)
        with poisoned_allocations():
            actual = with_gradients(ours, {**tensors, **more}, grad)
        with products_of_tf32() if precision == "tf32" and device.type == "cuda" else nullcontext():
            torchs = with_gradients(theirs, {**tensors, **more}, grad)
        exact = with_gradients(theirs, {**tensors, **more}, grad, torch.float64)
        for name, right in exact.items():
            found.setdefault(name, []).append((actual[name], torchs[name], right))
        for which in range(NEARBY):
            close = {name: nearby(each, which) for name, each in {**tensors, **more}.items()}
            with products_of_tf32() if precision == "tf32" and device.type == "cuda" else nullcontext():
                torchs_too = with_gradients(theirs, close, grad)
            for name, right in with_gradients(theirs, close, grad, torch.float64).items():
                found[name].append((right.to(dtype), torchs_too[name], right))
        if dtype == torch.float32 and precision in (None, "ieee") and autocast is None:
            assert float((actual["the layer"] - torchs["the layer"]).abs().amax()) <= 1e-4
    for name, draws in found.items():
        got, torch_result, right = map(torch.stack, zip(*draws, strict=True))
        assert got.dtype == dtype
        scale = torch.stack([each.abs().amax().expand_as(each) for each in right])
        assert_no_worse_than_torch(got, torch_result, right, scale=scale, what=name)


def with_gradients(
    function: Function, tensors: Tensors, grad: torch.Tensor, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """What a function of named tensors gives, under "the layer", and the gradient of each."""
    results = []

    def noting(**leaves: torch.Tensor) -> torch.Tensor:
        results.append(function(**leaves))
        return results[0]

    gradients = gradients_of(noting, tensors, grad, dtype)
    return {"the layer": results[0].detach(), **{f"gradient of {name}": each for name, each in gradients.items()}}
