"""Inputs that break kernels: odd sizes, hard data, awkward strides. All seeded, no global RNG touched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isogemm.verify.poison import poison_value


def make_data(
    kind: str, shape: tuple[int, ...], *, seed: int, dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu", reduce_dim: int = -1, pair_sign: int = -1,
) -> Tensor:  # fmt: skip
    """Random floating-point data of one of `DATA_KINDS`; the bits depend on the seed and the device type.

    normal: standard normal.
    wide: signs and mantissas uniform, exponents uniform over 2^-20..2^20 (fp16: 2^-5..2^5, so that dot
    products of a thousand elements stay finite).
    cancelling: along `reduce_dim` the second half repeats the first times `pair_sign`, a few ulp off. A
    product cancels when one operand has `pair_sign` -1 and the other +1: see `make_operands`.
    model: as in a trained network. With `pair_sign` -1 activations, a few of whose channels (along `reduce_dim`)
    are 50 times the others; with +1 weights of standard deviation 0.02, each output with a scale of its own.
    """
    if kind not in _MAKERS:
        raise ValueError(f"kind: got {kind!r}, expected one of {', '.join(DATA_KINDS)}")
    if not dtype.is_floating_point:
        raise TypeError(f"dtype: got {dtype}, expected a floating-point dtype")
    draw = _Draw(shape, dtype, torch.Generator(device).manual_seed(seed))
    return _MAKERS[kind](draw, reduce_dim, pair_sign).to(dtype)


def make_operands(
    kind: str, a_shape: tuple[int, ...], b_shape: tuple[int, ...], *, seed: int, dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Operands [..., M, K] and [..., K, N] of a product; "cancelling" ones cancel in the product."""
    a = make_data(kind, a_shape, seed=2 * seed, dtype=dtype, device=device, reduce_dim=-1)
    b = make_data(kind, b_shape, seed=2 * seed + 1, dtype=dtype, device=device, reduce_dim=-2, pair_sign=1)
    return a, b


class _Draw:
    """Random tensors of one shape from one generator, in fp32 or wider; `dtype` is what they are rounded to."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> None:
        self.shape, self.dtype = shape, dtype
        self._how: Any = {"device": generator.device, "generator": generator}
        wide = self._how | {"dtype": torch.promote_types(dtype, torch.float32)}
        self.normal, self.uniform = (partial(draw, shape, **wide) for draw in (torch.randn, torch.rand))

    def integers(self, low: int, high: int) -> Tensor:
        return torch.randint(low, high + 1, self.shape, **self._how)


def _normal(draw: _Draw, reduce_dim: int, pair_sign: int) -> Tensor:
    return draw.normal()


def _wide(draw: _Draw, reduce_dim: int, pair_sign: int) -> Tensor:
    limit = 5 if draw.dtype == torch.float16 else 20
    sign = 2 * draw.integers(0, 1) - 1
    return torch.ldexp(sign * (1 + draw.uniform()), draw.integers(-limit, limit - 1))


def _cancelling(draw: _Draw, reduce_dim: int, pair_sign: int) -> Tensor:
    data = draw.normal()
    eps = torch.finfo(draw.dtype).eps
    near_one = 1 + 4 * eps * draw.normal()
    pairs = draw.shape[reduce_dim] // 2
    second = data.narrow(reduce_dim, 0, pairs) * near_one.narrow(reduce_dim, 0, pairs) * pair_sign
    data.narrow(reduce_dim, pairs, pairs).copy_(second)
    if draw.shape[reduce_dim] % 2:  # the one without a partner stays below what the pairs leave
        data.narrow(reduce_dim, 2 * pairs, 1).mul_(eps)
    return data


def _model(draw: _Draw, reduce_dim: int, pair_sign: int) -> Tensor:
    data, chance = draw.normal(), draw.uniform()
    if pair_sign > 0:
        return 0.02 * data * torch.exp2(4 * chance.narrow(reduce_dim, 0, min(1, chance.shape[reduce_dim])) - 2)
    for axis in range(data.dim()):  # one draw per channel
        if axis != reduce_dim % data.dim():
            chance = chance.narrow(axis, 0, min(1, chance.shape[axis]))
    rank = chance.argsort(reduce_dim).argsort(reduce_dim)
    return torch.where(rank * 100 < data.shape[reduce_dim], 50 * data, data)


_MAKERS = {"normal": _normal, "wide": _wide, "cancelling": _cancelling, "model": _model}
DATA_KINDS = tuple(_MAKERS)


def with_layout(tensor: Tensor, layout: str) -> Tensor:
    """The same shape and values in other memory, one of `LAYOUTS`; what lies outside the view is poison."""
    if layout not in _LAYOUTS:
        raise ValueError(f"layout: got {layout!r}, expected one of {', '.join(LAYOUTS)}")
    return _LAYOUTS[layout](tensor.detach())


def _poisoned_buffer(like: Tensor, shape: list[int]) -> Tensor:
    return torch.full(shape, poison_value(like.dtype), dtype=like.dtype, device=like.device)


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _sliced(tensor: Tensor) -> Tensor:
    buffer = _poisoned_buffer(tensor, [size + 3 for size in tensor.shape])
    return buffer[tuple(slice(1, 1 + size) for size in tensor.shape)].copy_(tensor)


def _strided(tensor: Tensor) -> Tensor:
    return _poisoned_buffer(tensor, [*tensor.shape[:-1], 2 * tensor.shape[-1]])[..., ::2].copy_(tensor)


def _misaligned(tensor: Tensor) -> Tensor:
    return _poisoned_buffer(tensor, [tensor.numel() + 2])[1:-1].view(tensor.shape).copy_(tensor)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": _contiguous,
    "transposed": lambda tensor: _contiguous(tensor.mT).mT,
    "sliced": _sliced,
    "strided": _strided,
    "misaligned": _misaligned,
}
LAYOUTS = tuple(_LAYOUTS)
