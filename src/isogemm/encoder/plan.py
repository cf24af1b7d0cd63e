"""A fused layer's call: what it allocates and launches, forward and backward.

Kept for the backward, per token: x, o and log-sums (and with the norms last the sum before the last one); the rest is
computed again. What a launch writes for a later one is dropped as soon as that has read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from isogemm.core import device as devices
from isogemm.encoder import configs, configs_attention
from isogemm.encoder.configs import SHORT_HEAD, Layer
from isogemm.encoder.configs_attention import Attention

if TYPE_CHECKING:
    from isogemm.core.launch import BoundKernel, Launch


class Slots(NamedTuple):
    """The parameters by their places; a stacked in_proj is three times the same tensor."""

    wq: Tensor
    wk: Tensor
    wv: Tensor
    bq: Tensor | None
    bk: Tensor | None
    bv: Tensor | None
    wo: Tensor
    bo: Tensor | None
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    g1: Tensor | None
    s1: Tensor | None
    g2: Tensor | None
    s2: Tensor | None
    b2: Tensor | None


class Saved(NamedTuple):
    """What a forward leaves for its backward."""

    o: Tensor  # [S, T, D]
    lse: Tensor  # [S, T, H]
    total: Tensor | None  # [S, T, D], the sum before the last norm, where that is last
    ready: Tensor | None  # the weights as operands, and their transposes


class _Part(NamedTuple):
    """Of a tensor, from its `first` element on: an argument without the cost of a view."""

    base: Tensor
    first: int


_Argument = Tensor | _Part | None


class Plan:
    """Of one layer on one device."""

    def __init__(self, layer: Layer, device: torch.device, eps: float, slots: Slots) -> None:
        self.layer, self.eps, self.device = layer, eps, device
        self.index = device.index or 0
        self.configs = configs.choose(layer)
        self.biases = slots.bq is not None
        self._steps: dict[object, tuple[BoundKernel, int, tuple[Any, ...]]] = {}
        d, f = layer.d_model, layer.dim_feedforward
        self._offsets, self._size = _laid_out(
            wqkv=3 * d * d, bqkv=3 * d, wo=d * d, w1=f * d, b1=f, w2=d * f, norms=6 * d
        )
        self._ready_offsets, self._ready_size = _laid_out(
            wo=d * d, w1=f * d, w2=d * f, wqkv=3 * d * d,
            w2_turned=d * f, w1_turned=f * d, wo_turned=d * d, wqkv_turned=3 * d * d,
        )  # fmt: skip

    def forward(self, x: Tensor, mask: Tensor | None, p: Slots, keep: bool) -> tuple[Tensor, Saved]:
        """y [S, T, D], and what a backward needs of the rest (keep)."""
        layer, d = self.layer, self.layer.d_model
        ready = self._empty(self._ready_size) if layer.ready else None
        qkv = self._empty(layer.rows, 3 * d)
        norm1 = (p.g1, p.s1) if layer.norm_first else (None, None)
        weights = (p.wq, p.wk, p.wv, p.bq, p.bk, p.bv)
        self._run(
            ("project", keep), partial(self._describe_project, False, keep),
            x, *norm1, *weights, qkv, None, p.wo, None, p.w1, p.w2, ready,
        )  # fmt: skip
        o = self._empty(*x.shape)
        lse = torch.empty((*x.shape[:2], layer.nhead), dtype=torch.float32, device=self.device)
        self._run("attention", self._describe_attention, *self._parts(qkv), mask, o, lse)
        y = torch.empty_like(x)
        total = torch.empty_like(x) if keep and not layer.norm_first else None
        wo, w1, w2 = self._weights(p, ready, "wo", "w1", "w2")
        first, last = ((p.g2, p.s2), (None, None)) if layer.norm_first else ((p.g1, p.s1), (p.g2, p.s2))
        self._run(
            ("feedforward", keep), self._describe_feedforward,
            x, o, wo, p.bo, w1, p.b1, w2, p.b2, *first, *last, y, total,
        )  # fmt: skip
        return y, Saved(o, lse, total, ready)

    def backward(
        self, dy: Tensor, x: Tensor, mask: Tensor | None, p: Slots, saved: Saved, gradients: Sequence[Tensor | None],
        added: Sequence[bool],
    ) -> Tensor:  # fmt: skip
        """dx; the parameters' gradients are written to `gradients`, or added to those of `added`, in Slots' order."""
        layer, d, f = self.layer, self.layer.d_model, self.layer.dim_feedforward
        o, lse, total, ready = saved
        slots = -(-layer.rows // configs.TILE_ROWS) * (configs.TILE_ROWS // self.configs.tile_rows)
        partials = torch.empty((layer.chunks, self._size), dtype=torch.float32, device=self.device)
        sums = torch.empty((slots, 6 * d), dtype=torch.float32, device=self.device)

        u, act, dz = self._operand(d), self._operand(f), self._operand(f)
        dlast = None if layer.norm_first else torch.empty_like(x)
        dlast_turned = self._operand(d) if layer.turned else None
        ds = torch.empty_like(x)
        wo, w1, w1_turned, w2_turned = self._weights(p, ready, "wo", "w1", "w1_turned", "w2_turned")
        first, last = ((p.g2, p.s2), None) if layer.norm_first else ((p.g1, p.s1), p.g2)
        self._run(
            "feedforward_backward", self._describe_feedforward_backward,
            x, o, wo, p.bo, w1, p.b1, w1_turned, w2_turned, *first, last, dy, total,
            u, act, dz, dlast, dlast_turned, ds, sums,
        )  # fmt: skip
        left = dlast_turned if layer.turned else dlast if dlast is not None else dy
        self._run(
            "feedforward weights",
            partial(self._describe_weight_grads, (f, d, d, f), ("w1", "b1", "w2", "norms"), False),
            dz, u, left, act, None, partials,
        )  # fmt: skip
        del u, act, dz, dlast, dlast_turned, left

        qkv, do = self._empty(layer.rows, 3 * d), self._empty(layer.rows, d)
        norm1 = (p.g1, p.s1) if layer.norm_first else (None, None)
        wqkv, wo_turned, wqkv_turned = self._weights(p, ready, "wqkv", "wo_turned", "wqkv_turned")
        weights = (wqkv, wqkv, wqkv) if layer.ready else (p.wq, p.wk, p.wv)
        self._run(
            "project again", partial(self._describe_project, True, True),
            x, *norm1, *weights, p.bq, p.bk, p.bv, qkv, ds, wo_turned, do, None, None, None,
        )  # fmt: skip
        dqkv = self._operand(3 * d)
        self._run(
            "attention_backward", self._describe_attention_backward,
            *self._parts(qkv), mask, o, lse, do, *self._grad_parts(dqkv),
        )  # fmt: skip
        del qkv, do
        n = self._operand(d) if layer.norm_first or layer.turned else None
        ds_turned, o_turned = (self._operand(d), self._operand(d)) if layer.turned else (None, None)
        dx = torch.empty_like(x)
        self._run(
            "input_grad", self._describe_input_grad,
            x, *norm1, wqkv_turned, dqkv, ds, o, n, ds_turned, o_turned, dx, sums,
        )  # fmt: skip
        self._run(
            "attention weights",
            partial(self._describe_weight_grads, (3 * d, d, d, d), ("wqkv", "bqkv", "wo", "norms"), True),
            dqkv, x if n is None else n, ds_turned if layer.turned else ds, o_turned if layer.turned else o,
            sums, partials,
        )  # fmt: skip
        aligned = tuple(each is None or each.data_ptr() % 16 == 0 for each in gradients)
        self._run(("sum", *added, *aligned), partial(self._describe_sum, gradients, added), partials, *gradients)
        return dx

    # the launches, described when first needed

    def _describe_project(self, backward: bool, turn: bool) -> Launch:
        from isogemm.encoder import kernels

        config = self.configs.project
        parts = (4 if backward else 3) * -(-self.layer.d_model // config.block)
        walkers = configs.walkers(self.layer, config, parts, devices.facts(self.device).sm_count)
        return kernels.describe_project(self.layer, config, self.eps, walkers, self.biases, backward, turn)

    def _describe_feedforward(self) -> Launch:
        from isogemm.encoder import kernels

        return kernels.describe_feedforward(self.layer, self.configs.feedforward, self.eps)

    def _describe_feedforward_backward(self) -> Launch:
        from isogemm.encoder import kernels

        config, rows = self.configs.feedforward_backward, self.configs.tile_rows
        return kernels.describe_feedforward_backward(self.layer, config, rows, self.eps)

    def _describe_input_grad(self) -> Launch:
        from isogemm.encoder import kernels

        return kernels.describe_input_grad(self.layer, self.configs.input_grad, self.configs.tile_rows, self.eps)

    def _describe_weight_grads(self, shapes: Sequence[int], names: Sequence[str], norms: bool) -> Launch:
        from isogemm.encoder import kernels

        offsets = [self._offsets[name] for name in names]
        return kernels.describe_weight_grads(
            self.layer, self.configs.weight_grads, self.configs.tile_rows, shapes, offsets, self._size, norms
        )

    def _describe_sum(self, gradients: Sequence[Tensor | None], added: Sequence[bool]) -> Launch:
        from isogemm.encoder import kernels

        d, at = self.layer.d_model, self._offsets
        square = d * d
        offsets = (
            *(at["wqkv"] + i * square for i in range(3)), *(at["bqkv"] + i * d for i in range(3)), at["wo"],
            at["norms"] + 5 * d,
            at["w1"], at["b1"], at["w2"], *(at["norms"] + i * d for i in range(5)),
        )  # fmt: skip
        segments = [
            None if into is None else (offset, into.numel(), more)
            for offset, into, more in zip(offsets, gradients, added, strict=True)
        ]
        return kernels.describe_sum_chunks(self.layer, segments, self._size)

    def _describe_attention(self) -> Launch:
        return describe_attention(self._attention(backward=False))

    def _describe_attention_backward(self) -> Launch:
        return describe_attention_backward(self._attention(backward=True))

    def _attention(self, backward: bool) -> Attention:
        layer = self.layer
        width = 3 * layer.d_model
        grads = (layer.ld if layer.turned else width,) * 3 if backward else ()
        return Attention(
            layer.sequences, layer.tokens, layer.nhead, layer.head, layer.operand, layer.precision or "ieee",
            (width,) * 3 + grads, layer.causal, layer.mask, layer.mask_strides,
            backend(), layer.early, backward and layer.turned,
        )  # fmt: skip

    # arguments

    def _run(self, name: object, describe: Callable[[], Launch], *arguments: _Argument) -> None:
        step = self._steps.get(name)
        if step is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("nothing can be compiled while a CUDA graph is captured: call the layer before")
            launch = describe()
            step = self._steps[name] = launch.bind(*map(_tensor, arguments)), launch.programs, launch.scalars
        kernel, programs, scalars = step
        kernel(self.index, programs, *map(_address, arguments), *scalars)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=getattr(torch, self.layer.operand), device=self.device)

    def _operand(self, columns: int) -> Tensor:
        """What the weights' gradients read: [rows, columns], or turned."""
        return self._empty(columns, self.layer.ld) if self.layer.turned else self._empty(self.layer.rows, columns)

    def _weights(self, p: Slots, ready: Tensor | None, *names: str) -> list[_Argument]:
        """The weights as products read them: prepared, or as they are."""
        if ready is not None:
            return [_Part(ready, self._ready_offsets[name]) for name in names]
        plain = {"wqkv": p.wq, "wo": p.wo, "w1": p.w1, "w2": p.w2}
        return [plain[name.removesuffix("_turned")] for name in names]

    def _parts(self, qkv: Tensor) -> tuple[_Argument, ...]:
        d = self.layer.d_model
        return qkv, _Part(qkv, d), _Part(qkv, 2 * d)

    def _grad_parts(self, dqkv: Tensor) -> tuple[_Argument, ...]:
        step = self.layer.d_model * (self.layer.ld if self.layer.turned else 1)
        return dqkv, _Part(dqkv, step), _Part(dqkv, 2 * step)


def backend() -> str:
    return "hip" if torch.version.hip else "cuda"


def describe_attention(problem: Attention) -> Launch:
    """The forward's launch, by the size of the heads."""
    from isogemm.encoder import kernels_attention, kernels_attention_dot

    if problem.head <= SHORT_HEAD:
        return kernels_attention.describe_attention(problem, configs_attention.choose_registers(problem))
    return kernels_attention_dot.describe_attention_dot(problem, configs_attention.choose(problem))


def describe_attention_backward(problem: Attention) -> Launch:
    from isogemm.encoder import kernels_attention, kernels_attention_dot

    if problem.head <= SHORT_HEAD:
        config = configs_attention.choose_registers_backward(problem)
        return kernels_attention.describe_attention_backward(problem, config)
    config_dot = configs_attention.choose_backward(problem)
    return kernels_attention_dot.describe_attention_dot_backward(problem, config_dot)


def _laid_out(**sizes: int) -> tuple[dict[str, int], int]:
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += size
    return offsets, end


def _tensor(argument: _Argument) -> Tensor | None:
    if isinstance(argument, _Part):
        return argument.base.view(-1)[argument.first :]
    return argument


def _address(argument: _Argument) -> int | None:
    if argument is None:
        return None
    if isinstance(argument, _Part):
        return argument.base.data_ptr() + argument.first * argument.base.element_size()
    return argument.data_ptr()
