"""Encoder layers by named tensors: the shapes that are tested, and torch's own layer to hold isogemm's against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import isogemm
from isogemm.core.precision import of_cuda_products
from isogemm.gemm.reference import round_to_tf32
from isogemm.testing.cases import NEARBY, make_data, nearby
from isogemm.testing.error import assert_no_worse_than_torch
from isogemm.testing.forms import ACTIVATION_FORMS
from isogemm.testing.gradients import Function, Tensors, gradients_of
from isogemm.testing.poison import poisoned_allocations


class EncoderShape(NamedTuple):
    sequences: int
    tokens: int
    d_model: int
    nhead: int
    dim_feedforward: int

    def __str__(self) -> str:
        return f"{self.sequences}x{self.tokens}-{self.d_model}-{self.nhead}-{self.dim_feedforward}"


ENCODER_SHAPES = tuple(
    EncoderShape(*sizes)
    for sizes in (
        (1280, 5, 64, 4, 256),
        (896, 42, 16, 4, 128),
        (896, 42, 128, 16, 256),
        (112, 42, 16, 4, 128),
        (64, 64, 128, 16, 512),
        (13, 2, 16, 4, 4),
        (1, 1, 16, 4, 32),
        (7, 128, 256, 8, 1024),
        (33, 17, 48, 3, 100),
    )
)

_NAMES = {  # of EncoderParameters' fields in torch's layer
    "in_proj_weight": "self_attn.in_proj_weight",
    "in_proj_bias": "self_attn.in_proj_bias",
    "out_proj_weight": "self_attn.out_proj.weight",
    "out_proj_bias": "self_attn.out_proj.bias",
    **{
        f"{module}_{kind}": f"{module}.{kind}"
        for module in ("linear1", "linear2", "norm1", "norm2")
        for kind in ("weight", "bias")
    },
}


class _RoundedToTf32(TorchDispatchMode):  # type: ignore[no-untyped-call]
    _PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in self._PRODUCTS:
            args = [*args[:-2], *(round_to_tf32(each) for each in args[-2:])]
        return func(*args, **(kwargs or {}))


@contextmanager
def products_of_tf32() -> Iterator[None]:
    """torch's float32 products with operands rounded as TF32 has them: cuBLAS takes TF32 or not as it likes."""
    with of_cuda_products("ieee"), sdpa_kernel(SDPBackend.MATH), _RoundedToTf32():  # type: ignore[no-untyped-call]
        yield


def encoder_tensors(
    shape: EncoderShape,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    norm: str = "layer_norm",
    activation: str = "gelu",
) -> dict[str, torch.Tensor]:
    """x, and every parameter under its name in `EncoderParameters`, of the sizes they have in a network.

    For "relu" every hidden unit is far from 0, on or off: near it a rounding decides the gradient, torch's or ours.
    """
    d, f = shape.d_model, shape.dim_feedforward
    shapes = {"x": (shape.sequences, shape.tokens, d), "in_proj_weight": (3 * d, d), "in_proj_bias": (3 * d,)}
    shapes |= {"out_proj_weight": (d, d), "out_proj_bias": (d,), "linear1_weight": (f, d), "linear1_bias": (f,)}
    shapes |= {"linear2_weight": (d, f), "linear2_bias": (d,), "norm1_weight": (d,), "norm2_weight": (d,)}
    shapes |= {"norm1_bias": (d,), "norm2_bias": (d,)} if norm == "layer_norm" else {}
    made = {}
    for i, (name, size) in enumerate(shapes.items()):
        each = make_data("normal", size, seed=100 * seed + i, dtype=torch.float32, device=device)
        if name.startswith("norm") and name.endswith("weight"):
            each = 1 + each / 8
        elif name.endswith("weight"):
            each = each / size[-1] ** 0.5
        elif name.endswith("bias"):
            each = each / 8
        if activation == "relu" and name.startswith("linear1"):
            each = each / 16 if name.endswith("weight") else each / 8 + 1 - 2 * (torch.arange(f, device=device) % 2)
        made[name] = each.to(dtype)
    return made


def encoder_parameters(tensors: Tensors, *, separate: bool = False) -> isogemm.EncoderParameters:
    """Of the tensors but x; with `separate` the input projection in three, views of the stacked one."""
    named: dict[str, Any] = {name: each for name, each in tensors.items() if name != "x"}
    if separate:
        thirds = [name for name in ("in_proj_weight", "in_proj_bias") if name in named]
        named |= {name: tuple(named[name].chunk(3)) for name in thirds}
    return isogemm.EncoderParameters(**named)


def isogemm_encoder(x: torch.Tensor, *, separate: bool = False, **arguments: Any) -> torch.Tensor:
    """isogemm.encoder_layer on named tensors, its options among them."""
    named = {name: arguments.pop(name) for name in isogemm.EncoderParameters._fields if name in arguments}
    return cast(torch.Tensor, isogemm.encoder_layer(x, encoder_parameters(named, separate=separate), **arguments))


def torch_encoder(
    x: torch.Tensor,
    *,
    nhead: int,
    norm_first: bool = False,
    activation: str = "relu",
    norm: str = "layer_norm",
    eps: float = 1e-5,
    key_padding_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    **parameters: torch.Tensor,
) -> torch.Tensor:
    """nn.TransformerEncoderLayer in training mode without dropout, on named tensors; an absent bias is 0, a scale 1."""
    d, f = x.shape[-1], len(parameters["linear1_weight"])
    layer = nn.TransformerEncoderLayer(
        d, nhead, f, 0.0, ACTIVATION_FORMS[activation], eps, batch_first=True, norm_first=norm_first,
        device="meta", dtype=x.dtype,
    )  # fmt: skip
    if norm == "rms_norm":
        layer.norm1, layer.norm2 = (cast(Any, nn.RMSNorm(d, eps, device="meta", dtype=x.dtype)) for _ in range(2))
    given = {_NAMES[name]: each for name, each in parameters.items()}
    absent = {
        name: torch.full(each.shape, float("norm" in name and "weight" in name), dtype=x.dtype, device=x.device)
        for name, each in layer.named_parameters()
        if name not in given
    }
    masks: dict[str, Any] = {}
    if key_padding_mask is not None:
        masks["src_key_padding_mask"] = _additive(key_padding_mask, x.dtype)
    if is_causal:
        later = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1)
        masks |= {"src_mask": _additive(later, x.dtype), "is_causal": True}
    return cast(torch.Tensor, torch.func.functional_call(layer, absent | given, (x,), masks))


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores: both of torch's masks must be of one kind."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)


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
