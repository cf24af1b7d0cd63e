"""The operands of an epilogue; the epilogue and its gradients in torch's operations.

Of the sums' dtype; with rounding="eager" that is the result's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from isogemm.core import private
from isogemm.epilogues import random, spec
from isogemm.gemm import cpu


class Fusion(NamedTuple):
    """The operands of an epilogue: residual + dropout(act(alpha row_scale col_scale (x b) + beta c + bias)).

    With `bias_up` or a second weight: act(gate) * up.
    """

    bias: torch.Tensor | None = None
    bias_up: torch.Tensor | None = None
    c: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None
    col_scale: torch.Tensor | None = None
    alpha: torch.Tensor | None = None  # where it is on the device
    beta: torch.Tensor | None = None
    aux: tuple[torch.Tensor, ...] = ()
    seed: torch.Tensor | None = None  # of the dropout
    alpha_value: float = 1.0
    beta_value: float = 0.0
    dropout_p: float = 0.0
    activation: str = ""
    arguments: tuple[float, ...] = ()
    epilogue: str = ""  # the name of a registered one, in the activation's place
    bias_dim: int = -1
    eager: bool = False

    @property
    def gated(self) -> bool:
        return bool(self.activation) and bool(spec.ACTIVATIONS[self.activation].gate)

    @property
    def saved(self) -> str:
        """What the backward reads of the forward: "", mask, out or pre."""
        if self.epilogue:
            return "pre"
        if not self.activation:
            return ""
        kind = spec.ACTIVATIONS[self.activation].saved
        # The result is the activation's alone if nothing follows it.
        return "pre" if kind == "out" and (self.dropout_p or self.residual is not None) else kind

    @property
    def saved_hidden(self) -> str:
        """The same inside an mlp, which keeps the result: relu's own sign tells, through a dropout too."""
        return "out" if self.activation == "relu" else "pre"


def saved_dtype(activation: str, dtype: torch.dtype) -> torch.dtype:
    """In which a pre-activation is kept, of operands in `dtype`; activation: "" for a registered epilogue.

    Sums in float32 may leave float16's range where the result does not. That does no harm to a derivative that is
    constant outside of it; the others are read from float32.
    """
    return torch.float32 if dtype is torch.float16 and not spec.levels_off(activation) else dtype


def kept(z: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """z as it is kept for the backward: what is finite stays so in float16."""
    most = torch.finfo(torch.float16).max
    return (torch.where(z.isfinite(), z.clamp(-most, most), z) if dtype is torch.float16 else z).to(dtype)


def before_activation(
    sums: torch.Tensor, up: torch.Tensor | None, fusion: Fusion
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """alpha row_scale col_scale sums + beta c + bias; and up + bias_up."""
    dtype, z = sums.dtype, sums
    for scale in (
        fusion.alpha if fusion.alpha is not None else fusion.alpha_value if fusion.alpha_value != 1 else None,
        None if fusion.row_scale is None else fusion.row_scale[..., None],
        fusion.col_scale,
    ):
        if scale is not None:
            z = (z * scale).to(dtype)
    if fusion.c is not None and (fusion.beta is not None or fusion.beta_value):
        z = z + (fusion.c.to(dtype) * (fusion.beta_value if fusion.beta is None else fusion.beta)).to(dtype)
    if fusion.bias is not None:
        z = z + (fusion.bias if fusion.bias_dim == -1 else fusion.bias[..., None]).to(dtype)
    if up is not None and fusion.bias_up is not None:
        up = up + fusion.bias_up.to(dtype)
    return z, up


def after_activation(z: torch.Tensor, up: torch.Tensor | None, fusion: Fusion) -> torch.Tensor:
    """residual + dropout(act(z))."""
    dtype, value = z.dtype, z
    if fusion.epilogue:
        value = _user_form(z, fusion).to(dtype)
    elif fusion.activation:
        entry = spec.ACTIVATIONS[fusion.activation]
        value = entry.torch(z, *fusion.arguments)
        if up is not None:
            value = value * up
    if fusion.dropout_p:
        value = dropped(value, fusion)
    if fusion.residual is not None:
        value = value + fusion.residual.to(torch.promote_types(dtype, fusion.residual.dtype))
    return value


def dropped(value: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    """Zero, or scaled up: of a value, and of a gradient."""
    assert fusion.seed is not None
    n = value.shape[-1]
    kept = random.kept(fusion.seed, value.numel() // max(n, 1), n, fusion.dropout_p).view(value.shape)
    scaled = value.to(cpu.sums_dtype(value.dtype)) * random.scale(fusion.dropout_p)
    return torch.where(kept, scaled, 0.0).to(value.dtype)


def _user_form(z: torch.Tensor, fusion: Fusion) -> torch.Tensor:
    rows, n = math.prod(z.shape[:-1]), z.shape[-1]
    col, row = torch.arange(n, device=z.device)[None, :], torch.arange(rows, device=z.device)[:, None]
    aux = (each.expand(z.shape).reshape(rows, n).to(z.dtype) for each in fusion.aux)
    return spec.registered(fusion.epilogue).torch(z.reshape(rows, n), col, row, *aux).reshape(z.shape)


def packed(bits: torch.Tensor) -> torch.Tensor:
    """[..., N] bool -> [..., ceil(N / 8)] uint8, the first of eight in the lowest bit."""
    n = bits.shape[-1]
    padded = torch.nn.functional.pad(bits, (0, -n % 8))
    eights = padded.view(*bits.shape[:-1], -(-n // 8), 8).to(torch.uint8)
    shifted: torch.Tensor = eights << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return shifted.sum(-1, dtype=torch.uint8)


def unpacked(mask: torch.Tensor, n: int) -> torch.Tensor:
    bits = mask[..., None] >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1
    return bits.flatten(-2)[..., :n].bool()


def derivative(saved: torch.Tensor, kind: str, fusion: Fusion, n: int, dtype: torch.dtype) -> torch.Tensor:
    """act' [..., N]; gated: of both factors, [2, ..., N]."""
    entry = spec.ACTIVATIONS[fusion.activation]
    if fusion.gated:
        gate, up = saved.to(dtype)
        return torch.stack((up * entry.derivative(gate), entry.torch(gate)))
    if kind == "mask":
        saved = unpacked(saved, n).to(dtype) * 2 - 1  # any two numbers with the signs
    form = entry.of_output if kind == "out" else entry.derivative
    assert form is not None
    return form(saved.to(dtype), *fusion.arguments)


def activation_grad(
    grad: torch.Tensor, saved: torch.Tensor | None, kind: str, fusion: Fusion, dtype: torch.dtype
) -> torch.Tensor:
    """dz [..., N] (gated: [2, ..., N]), contiguous; differentiable."""
    wide = grad.to(cpu.sums_dtype(dtype))
    if fusion.dropout_p:
        wide = dropped(wide, fusion)
    if fusion.activation:
        assert saved is not None
        wide = derivative(saved, kind, fusion, grad.shape[-1], wide.dtype) * wide
    return wide.to(dtype).contiguous()


def epilogue_grad(
    grad: torch.Tensor,
    saved: torch.Tensor,
    fusion: Fusion,
    dtype: torch.dtype,
    wanted: Sequence[bool],
    *,
    create_graph: bool = False,
) -> list[torch.Tensor | None]:
    """A registered epilogue's gradients, from its torch form: dz in `dtype` and, where wanted, the aux tensors'."""

    def operand(x: torch.Tensor, want: bool) -> torch.Tensor:
        # An alias: one operand may be made from another, which is for the engine to follow.
        return x.view_as(x) if create_graph else x.detach().requires_grad_(want)

    with torch.enable_grad(), private.autograd_below_dispatcher():
        z = operand(saved.to(cpu.sums_dtype(saved.dtype)), True)
        aux = tuple(operand(each, want) for each, want in zip(fusion.aux, wanted, strict=True))
        value = _user_form(z, fusion._replace(aux=aux))
        if fusion.dropout_p:
            value = dropped(value, fusion)
        inputs = [z, *(each for each, want in zip(aux, wanted, strict=True) if want)]
        found = iter(
            torch.autograd.grad(value, inputs, grad.to(value.dtype), create_graph=create_graph, allow_unused=True)
        )
    dz = next(found)
    gradients: list[torch.Tensor | None] = [torch.zeros_like(z, dtype=dtype) if dz is None else dz.to(dtype)]
    for each, want in zip(aux, wanted, strict=True):
        of_aux = next(found) if want else None
        gradients.append(torch.zeros_like(each) if want and of_aux is None else of_aux)
    return [None if each is None else each.contiguous() for each in gradients]
