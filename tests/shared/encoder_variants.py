"""Encoder layers with batch norms, dropout, residual scores and normed residuals, against torch in float64."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, NamedTuple

import plain_encoder_oracle
import torch
from tensor_cases import NEARBY, nearby
from torch import Tensor

import isogemm
from isogemm.encoder.parameters import EncoderDropout, RunningStatistics
from isogemm.epilogues import random
from isogemm.gemm.fused import new_seed
from isogemm.verify.encoder_reference import EncoderShape, encoder_parameters, encoder_tensors, products_of_tf32
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations

_SEED = 7
_Results = dict[str, Tensor]


class Variant(NamedTuple):
    """For a layer: what `isogemm.encoder_layer` is asked for."""

    norm: str = "layer_norm"
    norm_first: bool = False
    residual_normed: bool = False
    activation: str = "gelu"
    dropout: EncoderDropout = EncoderDropout()
    training: bool = True
    tracked: bool = False  # whether its batch norms have running statistics
    momentum: float | None = 0.1
    mask: str = ""  # "bool" or "additive"
    is_causal: bool = False
    previous: bool = False  # whether scores of another layer are added
    return_scores: bool = False
    stack: int = 1  # layers of the same parameters: their scores are passed on, isogemm's by factors

    def __str__(self) -> str:
        plain = Variant()
        given = {name: value for name, value in self._asdict().items() if value != getattr(plain, name)}
        dropped = "/".join(f"{p:g}" for p in self.dropout)
        return "-".join(
            f"drop {dropped}" if name == "dropout" else name if value is True else str(value)
            for name, value in given.items()
        )

    def options(self) -> dict[str, Any]:
        """Those that the reference takes as well."""
        names = ("norm", "norm_first", "residual_normed", "activation", "training", "is_causal", "return_scores")
        return {name: getattr(self, name) for name in names}


def assert_variant_no_worse(
    shape: EncoderShape,
    variant: Variant,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str = "cpu",
    precision: str | None = None,
    fused: bool = False,
) -> None:
    """The results, every gradient and the running statistics within twice torch's own error, by
    `assert_no_worse_than_torch`. fused: whether the fused kernels serve, whose places of dropout share a seed."""
    on_gpu = torch.device(device).type == "cuda"
    found: dict[str, list[tuple[Tensor, ...]]] = {}
    for draw in range(max(2, min(8, 256 // shape.d_model))):  # the largest error of a few sums is a draw
        case = _Case(shape, variant, dtype, torch.device(device), precision, fused, draw)
        with poisoned_allocations():
            actual = case.run(True, dtype)
        torchs, exact = case.run_torch(on_gpu)
        assert actual.keys() == exact.keys()
        for name, right in exact.items():
            assert actual[name].dtype == torchs[name].dtype, name
            assert torch.equal(actual[name].isfinite(), right.isfinite()), name
            found.setdefault(name, []).append((actual[name], torchs[name], right))
        for which in range(NEARBY):
            torchs, exact = case.nearby(which).run_torch(on_gpu)
            for name, right in exact.items():
                found[name].append((right.to(torchs[name].dtype), torchs[name], right))
    for name in found:
        finite = [
            torch.where(torch.stack(each).isfinite(), torch.stack(each), 0) for each in zip(*found[name], strict=True)
        ]
        # The gradient of a bias before a batch norm is 0: a sum of what its weight's is a sum of.
        alike = {name, name.replace("bias", "weight")}
        largest = max(_largest(right) for each in alike for _, _, right in found[each])
        scale = torch.full_like(finite[2], largest)
        assert_no_worse_than_torch(*finite, scale=scale, ulps=4, what=name)


class _Case:
    """One draw of a variant's tensors."""

    def __init__(
        self, shape: EncoderShape, variant: Variant, dtype: torch.dtype, device: torch.device, precision: str | None,
        fused: bool, draw: int,
    ) -> None:  # fmt: skip
        self.shape, self.variant, self.dtype, self.precision, self.draw = shape, variant, dtype, precision, draw
        tensors = encoder_tensors(shape, dtype, device=device, seed=draw)
        if variant.norm == "rms_norm":
            tensors = {name: each for name, each in tensors.items() if name not in ("norm1_bias", "norm2_bias")}
        of_scores = (shape.sequences, shape.nhead, shape.tokens, shape.tokens)
        if variant.previous:
            tensors["scores"] = self._made(of_scores, 5, device)
        self.tensors = tensors
        shapes = (tuple(tensors["x"].shape), of_scores)
        self.grads = [self._made(size, 6 + i, device) for i, size in enumerate(shapes)]
        self.mask = _mask(shape, variant, device)
        self.keeping = _keeping(shape, variant, device, fused)

    def _made(self, size: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
        return make_data("normal", size, seed=seed + 1000 * self.draw, dtype=self.dtype, device=device)

    def nearby(self, which: int) -> _Case:
        close = copy.copy(self)
        close.tensors = {name: nearby(each, which) for name, each in self.tensors.items()}
        return close

    def run_torch(self, on_gpu: bool) -> tuple[_Results, _Results]:
        """By torch in the case's numbers, and in float64."""
        with products_of_tf32() if self.precision == "tf32" and on_gpu else nullcontext():
            torchs = self.run(False, self.dtype)
        return torchs, self.run(False, torch.float64)

    def run(self, ours: bool, dtype: torch.dtype) -> _Results:
        variant, device = self.variant, self.tensors["x"].device
        leaves = {name: each.detach().to(dtype).requires_grad_() for name, each in self.tensors.items()}
        running = _running(self.shape, variant, self.dtype, device)
        if dtype is torch.float64 and running is not None:
            running = _wide(running[0]), _wide(running[1])
        parameters = encoder_parameters({name: each for name, each in leaves.items() if name != "scores"})
        given: dict[str, Any] = {"nhead": self.shape.nhead, "running": running, "scores": leaves.get("scores")}
        given |= variant.options() | {"key_padding_mask": self.mask}
        compute: Any
        if ours:
            torch.manual_seed(_SEED)
            given |= {"dropout": variant.dropout, "precision": self.precision}
            compute = isogemm.encoder_layer
        else:
            given["keeping"] = None if self.keeping is None else tuple(each.to(dtype) for each in self.keeping)
            compute = plain_encoder_oracle.encoder_layer
        x = leaves["x"]
        for _ in range(variant.stack - 1):
            passed_on = given | {"return_scores": "factors" if ours else True}
            x, given["scores"] = compute(x, parameters, **passed_on)
        return _with_gradients(compute(x, parameters, **given), leaves, self.grads, running)


def _with_gradients(found: Any, leaves: dict[str, Tensor], grads: list[Tensor], running: Any) -> _Results:
    results = found if isinstance(found, tuple) else (found,)
    named: _Results = {f"result {i}": each.detach() for i, each in enumerate(results)}
    finite = [torch.where(each.isfinite(), each, 0) for each in results]
    total = sum((each * grad.to(each)).sum() for each, grad in zip(finite, grads, strict=False))
    gradients = torch.autograd.grad(total, list(leaves.values()))  # type: ignore[arg-type]
    named |= {f"gradient of {name}": each for name, each in zip(leaves, gradients, strict=True)}
    for number, each in enumerate(running or ()):
        named |= {f"{what} {number}": value.clone() for what, value in zip(("mean", "var"), each[:2], strict=True)}
    return named


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 1.0


def _mask(shape: EncoderShape, variant: Variant, device: torch.device | str) -> Tensor | None:
    """The last keys of some sequences left out, or numbers added."""
    if not variant.mask:
        return None
    numbers = make_data("normal", (shape.sequences, shape.tokens), seed=8, dtype=torch.float32, device=device)
    return numbers if variant.mask == "additive" else numbers > 0.5


def _running(
    shape: EncoderShape, variant: Variant, dtype: torch.dtype, device: torch.device | str
) -> tuple[RunningStatistics, RunningStatistics] | None:
    if not variant.tracked:
        return None

    def made(seed: int) -> RunningStatistics:
        mean, var = (
            make_data("normal", (shape.d_model,), seed=seed + i, dtype=torch.float32, device=device) for i in range(2)
        )
        batches = torch.tensor(3, device=device)
        return RunningStatistics(mean.to(dtype) / 4, (var.abs() + 0.5).to(dtype), batches, variant.momentum)

    return made(20), made(30)


def _wide(running: RunningStatistics) -> RunningStatistics:
    assert running.mean is not None
    assert running.var is not None
    return running._replace(mean=running.mean.double(), var=running.var.double())


def _keeping(
    shape: EncoderShape, variant: Variant, device: torch.device, fused: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """What dropout multiplies with at its four places, in float64."""
    if not (variant.training and any(variant.dropout)):
        return None
    torch.manual_seed(_SEED)
    one = new_seed(device) if fused else None
    seeds = [
        torch.zeros(1, dtype=torch.int64, device=device) if not p else new_seed(device) if one is None else one + place
        for place, p in enumerate(variant.dropout)
    ]
    sequences, tokens, rows = shape.sequences, shape.tokens, shape.sequences * shape.tokens

    def of_rows(place: int, columns: int) -> Tensor:
        p = variant.dropout[place]
        kept = random.kept(seeds[place], rows, columns, p).double() * random.scale(p)
        return kept.view(sequences, tokens, columns)

    p = variant.dropout.attention
    weights = random.kept_weights(seeds[0], sequences * shape.nhead, tokens, p).double() * random.scale(p)
    weights = weights.view(sequences, shape.nhead, tokens, tokens)
    return weights, of_rows(1, shape.d_model), of_rows(2, shape.dim_feedforward), of_rows(3, shape.d_model)
