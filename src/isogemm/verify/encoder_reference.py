"""torch's encoder layer on named tensors, which isogemm's is compared with, and the shapes that are tested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from isogemm.core.precision import of_cuda_products
from isogemm.encoder.parameters import EncoderParameters
from isogemm.gemm.reference import round_to_tf32
from isogemm.verify.activations import ACTIVATION_FORMS
from isogemm.verify.inputs import make_data


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
        (1280, 5, 64, 4, 256), (896, 42, 16, 4, 128), (896, 42, 128, 16, 256), (112, 42, 16, 4, 128),
        (64, 64, 128, 16, 512), (13, 2, 16, 4, 4), (1, 1, 16, 4, 32), (7, 128, 256, 8, 1024), (33, 17, 48, 3, 100),
    )
)  # fmt: skip


def _torch_name(field: str) -> str:
    """The name in torch's layer of a field of `EncoderParameters`."""
    module, _, kind = field.rpartition("_")
    nested = {"in_proj": "self_attn.in_proj_", "out_proj": "self_attn.out_proj."}
    return nested.get(module, f"{module}.") + kind


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
    shape: EncoderShape, dtype: torch.dtype = torch.float32, *, device: torch.device | str = "cpu", seed: int = 0,
    norm: str = "layer_norm", activation: str = "gelu",
) -> dict[str, Tensor]:  # fmt: skip
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


def encoder_parameters(tensors: Mapping[str, Tensor], *, separate: bool = False) -> EncoderParameters:
    """Take all tensors but x as parameters; `separate` gives q, k and v as views of the stacked input projection."""
    named: dict[str, Any] = {name: each for name, each in tensors.items() if name != "x"}
    if separate:
        named |= {name: tuple(each.chunk(3)) for name, each in named.items() if name.startswith("in_proj")}
    return EncoderParameters(**named)


def torch_encoder(
    x: Tensor, *, nhead: int, norm_first: bool = False, activation: str = "relu", norm: str = "layer_norm",
    eps: float = 1e-5, key_padding_mask: Tensor | None = None, is_causal: bool = False, **parameters: Tensor,
) -> Tensor:  # fmt: skip
    """nn.TransformerEncoderLayer in training mode without dropout, on named tensors; an absent bias is 0, a scale 1."""
    d, f = x.shape[-1], len(parameters["linear1_weight"])
    layer = nn.TransformerEncoderLayer(
        d, nhead, f, 0.0, ACTIVATION_FORMS[activation], eps, batch_first=True, norm_first=norm_first,
        device="meta", dtype=x.dtype,
    )  # fmt: skip
    if norm == "rms_norm":
        layer.norm1, layer.norm2 = (cast(Any, nn.RMSNorm(d, eps, device="meta", dtype=x.dtype)) for _ in range(2))
    given = {_torch_name(name): each for name, each in parameters.items()}
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
    return cast(Tensor, torch.func.functional_call(layer, absent | given, (x,), masks))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores: both of torch's masks must be of one kind."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)
