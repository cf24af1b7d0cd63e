"""The buffers of a fused layer: every argument of its launches, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from isogemm.encoder import configs, layout
from isogemm.encoder.attention.configs import MOST_FACTORS
from isogemm.encoder.configs import Layer
from isogemm.encoder.schedule import Argument, Buffer
from isogemm.norm.configs import TILE_ROWS, groups

# The parameters in the order of EncoderParameters, with one in_proj or three. g and s: a norm's weight and bias.
STACKED = ("wq", "wo", "w1", "w2", "g1", "g2", "bq", "bo", "b1", "b2", "s1", "s2")
SEPARATE = ("wq", "wk", "wv", "wo", "w1", "w2", "g1", "g2", "bq", "bk", "bv", "bo", "b1", "b2", "s1", "s2")
# Parameters whose gradients the row kernels sum per tile, in this order.
TILE_SUMS = ("g1", "s1", "g2", "s2", "b2", "bo")


class ExtraInputs(NamedTuple):
    """A call's tensors besides x and the parameters."""

    mask: Tensor | None = None
    seed: Tensor | None = None  # of dropout, int64, one element
    previous: Tensor | None = None  # scores of the layer before [S, H, T, T], contiguous
    factor0: Tensor | None = None  # queries and keys of the first layer [2, H, S, T, d]: factors of scores
    factor1: Tensor | None = None
    factor2: Tensor | None = None
    factor3: Tensor | None = None
    mean1: Tensor | None = None  # running statistics of the batch norms
    var1: Tensor | None = None
    mean2: Tensor | None = None
    var2: Tensor | None = None

    @property
    def read_again(self) -> tuple[Tensor | None, ...]:
        """The ones that the backward reads."""
        return tuple(self)[: ADDED_INPUTS.stop]

    @property
    def added(self) -> tuple[Tensor | None, ...]:
        """The differentiable ones: scores, or queries and keys for them."""
        return tuple(self)[ADDED_INPUTS]


EXTRA = ExtraInputs._fields
ADDED_INPUTS = slice(EXTRA.index("previous"), EXTRA.index("previous") + 1 + MOST_FACTORS)
ADDED = EXTRA[ADDED_INPUTS]


class Norm(NamedTuple):
    """A norm's parameters, and a batch norm's statistics."""

    weight: Buffer
    bias: Buffer
    statistics: Buffer  # [4, D]
    mean: Buffer  # running
    var: Buffer


class Kept(NamedTuple):
    """What a forward saves for its backward, in one tensor."""

    o: Buffer
    lse: Buffer
    s: Argument  # the sum before the second norm
    total: Argument  # the sum before the last norm
    packed: Argument  # the weights as operands, and their transposes

    @classmethod
    def of(cls, layer: Layer) -> Kept:
        of_x, operand, rows = getattr(torch, layer.dtype), getattr(torch, layer.operand), layer.rows
        return cls(
            Buffer("o", operand, rows * layer.d_model),
            Buffer("lse", torch.float32, rows * layer.nhead),
            Buffer("s", of_x, rows * layer.d_model) if layer.split_at_norm else None,
            None if layer.norm_first else Buffer("total", of_x, rows * layer.d_model),
            Buffer("packed", operand, _packed_size(layer)) if layer.packed_weights or layer.narrow else None,
        )

    def offsets(self) -> tuple[dict[Buffer, int], int]:
        """Offsets in the tensor, and its size in bytes."""
        return layout.in_a_row({each: each.size for each in self if each is not None})


class Operands(NamedTuple):
    """The weights as products read them: packed, or the parameters themselves."""

    wo: Buffer
    w1: Buffer
    w2: Buffer
    wqkv: Buffer
    w2_t: Buffer  # transposed
    w1_t: Buffer
    wo_t: Buffer
    wqkv_t: Buffer


class Partials(NamedTuple):
    """A chunk's partial sums of some parameters' gradients."""

    buffer: Buffer
    offsets: Mapping[str, int]
    size: int

    @classmethod
    def of(cls, name: str, layer: Layer, sizes: Mapping[str, int]) -> Partials:
        offsets, size = layout.in_a_row(sizes, alignment=1)
        return cls(Buffer(name, torch.float32, layer.chunks * size), offsets, size)


class Pair(NamedTuple):
    """Queries and keys of a layer [2, H, S, T, d], given as one tensor."""

    tensor: Buffer
    queries: Buffer
    keys: Buffer

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, elements: int) -> Pair:
        tensor = Buffer(name)
        queries = Buffer(f"{name} queries", dtype, elements, tensor)
        return cls(tensor, queries, Buffer(f"{name} keys", dtype, elements, tensor, elements))


class Buffers:
    """The buffers of one layer's calls. Scratch buffers hold as many elements as the launches write."""

    def __init__(self, layer: Layer) -> None:
        d, f, rows = layer.d_model, layer.dim_feedforward, layer.rows
        of_x, operand = getattr(torch, layer.dtype), getattr(torch, layer.operand)
        weights: torch.dtype = getattr(torch, layer.weights)
        padded = layer.ld if layer.transposed else rows  # rows of what may be transposed
        of_tile_sums = -(-rows // TILE_ROWS) * (TILE_ROWS // configs.tile_rows(layer)) * len(TILE_SUMS) * d

        # given tensors
        self.x, self.y, self.kept_tensor, self.work = map(Buffer, ("x", "y", "kept", "work"))
        self.scores, self.statistics = Buffer("scores"), Buffer("statistics")
        self.qk, self.d_qk = Pair.of("qk", operand, rows * d), Pair.of("d_qk", operand, rows * d)
        self.extra = {name: Buffer(name) for name in EXTRA}
        self.mask, self.seed, self.previous = (self.extra[name] for name in EXTRA[:3])
        self.factors = [Pair.of(name, operand, rows * d) for name in ADDED[1:]]
        self.extra |= {name: pair.tensor for name, pair in zip(ADDED[1:], self.factors, strict=True)}
        self.dy, self.d_scores, self.d_previous = map(Buffer, ("dy", "d_scores", "d_previous"))
        self.d_factors = [Pair.of(f"d_{name}", operand, rows * d) for name in ADDED[1:]]

        # parameters
        names = STACKED if layer.stacked else SEPARATE
        self.parameters = {name: Buffer(name) for name in names}
        of = dict(self.parameters)
        if layer.stacked:  # each is the whole weight: the kernels add a part's offset
            of |= {name: Buffer(name, weights, 3 * d * d, of["wq"]) for name in ("wk", "wv")}
            of |= {name: Buffer(name, weights, 3 * d, of["bq"]) for name in ("bk", "bv")}
        self.wqkv, self.bqkv = (of["wq"], of["wk"], of["wv"]), (of["bq"], of["bk"], of["bv"])
        self.wo, self.w1, self.w2, self.bo, self.b1, self.b2 = (of[n] for n in ("wo", "w1", "w2", "bo", "b1", "b2"))
        self.norms = {
            n: Norm(
                of[f"g{n}"], of[f"s{n}"],
                Buffer(f"statistics{n}", torch.float32, 4 * d, self.statistics, 4 * d * (n - 1)),
                self.extra[f"mean{n}"], self.extra[f"var{n}"],
            )
            for n in (1, 2)
        }  # fmt: skip

        # kept for the backward
        self.kept = Kept.of(layer)
        self.operands = Operands(self.wo, self.w1, self.w2, of["wq"], self.w2, self.w1, self.wo, of["wq"])
        if layer.packed_weights:
            square, long = d * d, d * f
            sizes = (square, long, long, 3 * square, long, long, square, 3 * square)
            offsets, size = layout.in_a_row(dict(zip(Operands._fields, sizes, strict=True)), alignment=1)
            self.operands = Operands(
                *(Buffer(f"packed {name}", operand, size - at, self.kept.packed, at) for name, at in offsets.items())
            )

        # scratch of both ways
        self.normed = Buffer("normed", of_x, rows * d)
        self.moments = Buffer("moments", torch.float32, -(-rows // TILE_ROWS) * 3 * d)
        self.groups = Buffer("groups", torch.float32, groups(rows) * 3 * d)
        self.coefficients = Buffer("coefficients", torch.float32, 2 * d)
        next_part = rows * d if layer.by_head else d  # elements from q to k, and from k to v
        self.q, self.k, self.v = _views(Buffer("qkv", operand, rows * 3 * d), next_part)
        if layer.returns_qk:
            self.q, self.k, self.v = self.qk.queries, self.qk.keys, Buffer("v", operand, rows * d)

        # scratch of the backward
        self.u = Buffer("u", operand, padded * d)
        self.act, self.dz = Buffer("act", operand, padded * f), Buffer("dz", operand, padded * f)
        self.dlast = Buffer("dlast", of_x, rows * d)  # gradient of the last sum
        self.dlast_t = Buffer("dlast_t", operand, padded * d)
        self.dlast_dropped = Buffer("dlast dropped", operand, rows * d)
        self.feedforward_sums = Buffer("feedforward sums", torch.float32, of_tile_sums)
        self.attention_sums = Buffer("attention sums", torch.float32, of_tile_sums)
        self.do = Buffer("do", operand, rows * d)
        self.dqkv = Buffer("dqkv", operand, padded * 3 * d)
        self.dq, self.dk, self.dv = _views(self.dqkv, (layer.ld if layer.transposed else 1) * d)
        self.n = Buffer("n", operand, padded * d)
        self.ds_operand = Buffer("ds operand", operand, padded * d)
        self.o_t = Buffer("o_t", operand, padded * d)
        self.dx = Buffer("dx", of_x, rows * d)
        # If transposed, ds and dx are one buffer: the last reader of ds overwrites it row by row.
        self.ds = Buffer("ds", of_x, rows * d, self.dx if layer.transposed else None)
        self.ds_dropped = Buffer("ds dropped", of_x, rows * d)
        self.d_normed = Buffer("d_normed", of_x, rows * d)
        done = 2 if layer.norm_first else 0  # norm1's sums are complete only with the attention's
        self.feedforward_partials = Partials.of(
            "feedforward partials", layer, {"w1": f * d, "b1": f, "w2": d * f} | dict.fromkeys(TILE_SUMS[done:5], d)
        )
        self.attention_partials = Partials.of(
            "attention partials",
            layer,
            {"wqkv": 3 * d * d, "bqkv": 3 * d, "wo": d * d} | dict.fromkeys((*TILE_SUMS[:done], "bo"), d),
        )


def _views(whole: Buffer, step: int) -> list[Buffer]:
    """Three buffers inside `whole`, `step` elements apart, each up to its end."""
    return [
        Buffer(f"{whole.name}[{i}]", whole.dtype, whole.elements - i * step, whole, i * step) for i in range(3)
    ]  # fmt: skip


def _packed_size(layer: Layer) -> int:
    return 8 * layer.d_model * layer.d_model + 4 * layer.d_model * layer.dim_feedforward


def kept_size(layer: Layer) -> int:
    """Bytes that a forward saves for its backward."""
    return Kept.of(layer).offsets()[1]


def parameter_shape(layer: Layer, name: str) -> tuple[int, ...]:
    """The shape of a parameter in STACKED or SEPARATE."""
    d, f = layer.d_model, layer.dim_feedforward
    in_proj = 3 * d if layer.stacked else d
    weights = {"wq": (in_proj, d), "wk": (d, d), "wv": (d, d), "wo": (d, d), "w1": (f, d), "w2": (d, f)}
    return weights.get(name) or {"bq": (in_proj,), "b1": (f,)}.get(name, (d,))
