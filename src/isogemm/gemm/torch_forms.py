"""Epilogues and their gradients in torch's operations, for the CPU and for second derivatives.

They are computed in the sums' dtype, which with rounding="eager" is the result's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isogemm.core import private
from isogemm.epilogues import random, spec
from isogemm.epilogues.operands import Operands
from isogemm.gemm import cpu


def saved_dtype(activation: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a pre-activation is saved, for operands in `dtype`; activation: "" for a registered epilogue.

    float32 sums may leave float16's range where the result does not. That does not change a derivative that is constant
    outside of it; for the others the pre-activation is saved in float32.
    """
    return torch.float32 if dtype is torch.float16 and not spec.levels_off(activation) else dtype


def kept(z: Tensor, dtype: torch.dtype) -> Tensor:
    """z as it is saved for the backward: finite values stay finite in float16."""
    most = torch.finfo(torch.float16).max
    return (torch.where(z.isfinite(), z.clamp(-most, most), z) if dtype is torch.float16 else z).to(dtype)


def before_activation(sums: Tensor, up: Tensor | None, operands: Operands) -> tuple[Tensor, Tensor | None]:
    """alpha row_scale col_scale sums + beta c + bias; and up + bias_up."""
    dtype, z = sums.dtype, sums
    for scale in (
        operands.alpha if operands.alpha is not None else operands.alpha_value if operands.alpha_value != 1 else None,
        None if operands.row_scale is None else operands.row_scale[..., None],
        operands.col_scale,
    ):
        if scale is not None:
            z = (z * scale).to(dtype)
    if operands.c is not None and (operands.beta is not None or operands.beta_value):
        z = z + (operands.c.to(dtype) * (operands.beta_value if operands.beta is None else operands.beta)).to(dtype)
    if operands.bias is not None:
        z = z + (operands.bias if operands.bias_dim == -1 else operands.bias[..., None]).to(dtype)
    if up is not None and operands.bias_up is not None:
        up = up + operands.bias_up.to(dtype)
    return z, up


def after_activation(z: Tensor, up: Tensor | None, operands: Operands) -> Tensor:
    """residual + dropout(act(z))."""
    dtype, value = z.dtype, z
    if operands.epilogue:
        value = _user_form(z, operands).to(dtype)
    elif operands.activation:
        entry = spec.ACTIVATIONS[operands.activation]
        value = entry.torch(z, *operands.arguments)
        if up is not None:
            value = value * up
    if operands.dropout_p:
        value = dropped(value, operands)
    if operands.residual is not None:
        value = value + operands.residual.to(torch.promote_types(dtype, operands.residual.dtype))
    return value


def dropped(value: Tensor, operands: Operands) -> Tensor:
    """Apply dropout to a value or a gradient."""
    assert operands.seed is not None
    n = value.shape[-1]
    kept = random.kept(operands.seed, value.numel() // max(n, 1), n, operands.dropout_p).view(value.shape)
    scaled = value.to(cpu.sums_dtype(value.dtype)) * random.scale(operands.dropout_p)
    return torch.where(kept, scaled, 0.0).to(value.dtype)


def _user_form(z: Tensor, operands: Operands) -> Tensor:
    rows, n = math.prod(z.shape[:-1]), z.shape[-1]
    col, row = torch.arange(n, device=z.device)[None, :], torch.arange(rows, device=z.device)[:, None]
    aux = (each.expand(z.shape).reshape(rows, n).to(z.dtype) for each in operands.aux)
    return spec.registered(operands.epilogue).torch(z.reshape(rows, n), col, row, *aux).reshape(z.shape)


def packed(bits: Tensor) -> Tensor:
    """[..., N] bool -> [..., ceil(N / 8)] uint8, the first of eight in the lowest bit."""
    n = bits.shape[-1]
    padded = torch.nn.functional.pad(bits, (0, -n % 8))
    eights = padded.view(*bits.shape[:-1], -(-n // 8), 8).to(torch.uint8)
    shifted: Tensor = eights << torch.arange(8, dtype=torch.uint8, device=bits.device)
    return shifted.sum(-1, dtype=torch.uint8)


def unpacked(mask: Tensor, n: int) -> Tensor:
    bits = mask[..., None] >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1
    return bits.flatten(-2)[..., :n].bool()


def derivative(saved: Tensor, kind: str, operands: Operands, n: int, dtype: torch.dtype) -> Tensor:
    """act'(z) [..., N]; gated: the derivatives of both factors, [2, ..., N]."""
    entry = spec.ACTIVATIONS[operands.activation]
    if operands.gated:
        gate, up = saved.to(dtype)
        return torch.stack((up * entry.derivative(gate), entry.torch(gate)))
    if kind == "mask":
        saved = unpacked(saved, n).to(dtype) * 2 - 1  # numbers with these signs
    form = entry.of_output if kind == "out" else entry.derivative
    assert form is not None
    return form(saved.to(dtype), *operands.arguments)


def activation_grad(grad: Tensor, saved: Tensor | None, kind: str, operands: Operands, dtype: torch.dtype) -> Tensor:
    """dz [..., N] (gated: [2, ..., N]), contiguous; differentiable."""
    wide = grad.to(cpu.sums_dtype(dtype))
    if operands.dropout_p:
        wide = dropped(wide, operands)
    if operands.activation:
        assert saved is not None
        wide = derivative(saved, kind, operands, grad.shape[-1], wide.dtype) * wide
    return wide.to(dtype).contiguous()


def epilogue_grad(
    grad: Tensor,
    saved: Tensor,
    operands: Operands,
    dtype: torch.dtype,
    wanted: Sequence[bool],
    *,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """A registered epilogue's gradients, from its torch form: dz in `dtype` and, where wanted, the aux tensors'."""

    def operand(x: Tensor, want: bool) -> Tensor:
        # An alias: one operand may be computed from another, and autograd handles that.
        return x.view_as(x) if create_graph else x.detach().requires_grad_(want)

    with torch.enable_grad(), private.autograd_below_dispatcher():
        z = operand(saved.to(cpu.sums_dtype(saved.dtype)), True)
        aux = tuple(operand(each, want) for each, want in zip(operands.aux, wanted, strict=True))
        value = _user_form(z, operands._replace(aux=aux))
        if operands.dropout_p:
            value = dropped(value, operands)
        inputs = [z, *(each for each, want in zip(aux, wanted, strict=True) if want)]
        found = iter(
            torch.autograd.grad(value, inputs, grad.to(value.dtype), create_graph=create_graph, allow_unused=True)
        )
    dz = next(found)
    gradients: list[Tensor | None] = [torch.zeros_like(z, dtype=dtype) if dz is None else dz.to(dtype)]
    for each, want in zip(aux, wanted, strict=True):
        of_aux = next(found) if want else None
        gradients.append(torch.zeros_like(each) if want and of_aux is None else of_aux)
    return [None if each is None else each.contiguous() for each in gradients]


# Which gradients read an argument's value. Those of the scales recompute the product.
READ_BY = {
    "x": ("weight", "weight_up", "alpha", "row_scale", "col_scale"),
    "weight": ("x", "alpha", "row_scale", "col_scale"),
    "weight_up": ("x",),
    "c": ("beta",),
    "beta": ("c",),
    "alpha": ("x", "weight", "row_scale", "col_scale"),
    "row_scale": ("x", "weight", "alpha", "col_scale"),
    "col_scale": ("x", "weight", "alpha", "row_scale"),
}


def operand_gradients(
    operands: Operands,
    dz: Tensor,
    needed: Mapping[str, bool],
    dtypes: Mapping[str, torch.dtype],
    product: Callable[[torch.dtype | None], Tensor],
    over_rows: Callable[[Tensor], Tensor],
    over_columns: Callable[[Tensor], Tensor],
) -> dict[str, Tensor | None]:
    """The gradients of c and the scales, from that of the pre-activation, dz.

    product: recomputes it in a dtype (None: the operands'). over_rows, over_columns: sums [..., N] -> [N] and [...].
    """
    found: dict[str, Tensor | None] = {}
    wide = cpu.sums_dtype(dz.dtype)
    if needed["c"]:
        found["c"] = (dz * (operands.beta_value if operands.beta is None else operands.beta)).to(dtypes["c"])
    if needed["beta"]:
        assert operands.c is not None
        found["beta"] = (dz.to(wide) * operands.c.to(wide)).sum().to(dtypes["beta"])
    sums: dict[str, Callable[[Tensor], Tensor]] = {
        "alpha": torch.sum,
        "row_scale": over_columns,
        "col_scale": over_rows,
    }
    if not any(needed[name] for name in sums):
        return found
    weighed = dz.to(wide) * product(wide if wide is not dz.dtype else None).view(dz.shape)
    factors: dict[str, Any] = {
        "alpha": operands.alpha_value if operands.alpha is None else operands.alpha.to(wide),
        "row_scale": 1 if operands.row_scale is None else operands.row_scale.to(wide)[..., None],
        "col_scale": 1 if operands.col_scale is None else operands.col_scale.to(wide),
    }
    for name in sums:
        if not needed[name]:
            continue
        of_others = weighed
        for other, factor in factors.items():
            if other != name and not (isinstance(factor, int | float) and factor == 1):
                of_others = of_others * factor
        found[name] = sums[name](of_others).to(dtypes[name])
    return found


def scaled(dz: Tensor, operands: Operands) -> Tensor:
    """The gradient of the product itself: dz times alpha, row_scale and col_scale."""
    row_scale, col_scale, alpha, value = operands.row_scale, operands.col_scale, operands.alpha, operands.alpha_value
    if row_scale is None and col_scale is None and alpha is None and value == 1:
        return dz
    scales = Operands(row_scale=row_scale, col_scale=col_scale, alpha=alpha, alpha_value=value)
    return before_activation(dz.to(cpu.sums_dtype(dz.dtype)), None, scales)[0].to(dz.dtype)
