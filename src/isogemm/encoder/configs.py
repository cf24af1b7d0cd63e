"""Which layers the fused kernels serve, and with which tiles. Pure: no device, no tensors.

A row's norms are summed in an order that follows the tile, so the tiles are a function of the layer's sizes and number
types alone, never of the batch. How many programs share the rows changes no bit, and may follow it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from isogemm.attention.configs import LONGEST_HALF_HEAD, fragments_hold
from isogemm.core import tables
from isogemm.encoder.parameters import NOTHING_DROPPED, EncoderDropout
from isogemm.norm.configs import TILE_ROWS  # every tile's rows divide it

WIDEST = 256  # d_model of a row that a program keeps
_WIDEST_FRAGMENTS = 32  # d_model of rows that lanes hold: wider ones leave no registers for weights on their way
FRAGMENT_ROWS = 16  # of a warp
GROUP_ROWS = 64  # of a warpgroup
_CHUNK_ROWS = 512  # of one sum in the parameters' gradients, at least
_MOST_CHUNK_ROWS = 8192  # tokens that no shorter chunk divides would make the sums long and few


@dataclass(frozen=True)
class Layer:
    """One call: S sequences of T tokens through a layer."""

    sequences: int
    tokens: int
    d_model: int
    nhead: int
    dim_feedforward: int
    dtype: str  # of x, the residual sums and the result
    operand: str  # of the products
    weights: str
    precision: str  # of float32 products: ieee, tf32 or tf32x3; else empty
    norm: str
    norm_first: bool
    activation: str
    causal: bool
    mask: str  # none, "bool" (True leaves a key out) or "additive"
    mask_strides: tuple[int, int]
    stacked: bool  # whether in_proj is one weight
    supports_pdl: bool = False  # whether the device lets a launch begin before the last one ends (sm_90 and later)
    mma: bool = False  # whether it has the instructions that fragments are made for (NVIDIA's from sm_80 on)
    wgmma: bool = False  # whether it has those of warpgroups (sm_90 alone)
    residual_normed: bool = False  # with norm_first: the residual sums begin with what is normed
    dropout: EncoderDropout = NOTHING_DROPPED
    from_batch: bool = False  # whether a batch norm takes the batch's statistics
    previous: bool = False  # whether another layer's scores are added
    scores: bool = False  # whether the scores are a result
    factors: int = 0  # earlier layers whose queries and keys are given for their scores
    returns_qk: bool = False  # whether its queries and keys are a result
    arch: str = "sm_90"  # whose table has its tiles

    @cached_property
    def head(self) -> int:
        return self.d_model // self.nhead

    @cached_property
    def batch_norm(self) -> bool:
        return self.norm == "batch_norm"

    @cached_property
    def split_at_norm(self) -> bool:
        """Whether s is in memory: what comes of it needs all rows first, or other launches need it again."""
        return self.batch_norm or self.residual_normed or any(self.dropout[1:])

    @cached_property
    def norm_last(self) -> bool:
        """Whether the feed-forward's launches norm their own sums."""
        return not (self.norm_first or self.batch_norm)

    @cached_property
    def row_norm(self) -> str:
        """The norm before the projections that their launches compute themselves."""
        return self.norm if self.norm_first and not self.batch_norm else ""

    @cached_property
    def rows(self) -> int:
        return self.sequences * self.tokens

    @cached_property
    def padded(self) -> int:
        """d_model as a tile's side."""
        return max(16, 1 << (self.d_model - 1).bit_length())

    @cached_property
    def ld(self) -> int:
        """Distance between the rows of a transpose."""
        return -(-self.rows // 16) * 16

    @cached_property
    def narrow(self) -> bool:
        """Whether a warp's lanes hold sixteen of its rows, in numbers that tensor cores take."""
        return _is_narrow(self.d_model, self.dim_feedforward) and not self.exact

    @cached_property
    def fragments(self) -> bool:
        """Whether its row kernels are those in which a warp owns sixteen rows."""
        return self.mma and self.narrow

    @cached_property
    def by_head(self) -> bool:
        """Whether q, k, v and do are passed on head by head: a head's tokens are then next to each other."""
        if self.factors or self.returns_qk:
            sizes = self.d_model, self.nhead, self.dim_feedforward
            return self.mma and takes_factors(*sizes, self.operand, self.precision)
        return self.mma and not self.fragments and fragments_hold(self.head, self.operand, self.precision)

    @cached_property
    def shape_of_factor(self) -> tuple[int, ...]:
        return (2, self.nhead, self.sequences, self.tokens, self.head)

    @cached_property
    def packed_weights(self) -> bool:
        """Whether the products read packed weights: rounded, cast, three made one, or in fragments."""
        return self.fragments or self.precision == "tf32" or self.weights != self.operand or not self.stacked

    @cached_property
    def transposed(self) -> bool:
        """Whether the weights' gradients read transposes: TF32 tensor cores want both operands along the sum."""
        return self.precision == "tf32" and self.by_head and self.padded >= _TRANSPOSED_FROM

    @cached_property
    def cast(self) -> bool:
        """Whether operands of the weights' gradients are cast by who writes them: reading wide ones is slow."""
        return self.dtype != self.operand and not self.fragments

    @cached_property
    def pdl(self) -> bool:
        """Whether launches overlap (programmatic dependent launch). It pays for small ones; large ones would wait."""
        return self.supports_pdl and self.rows * self.d_model <= _SMALL

    @cached_property
    def exact(self) -> bool:
        """Whether an activation's error would show: not in what is rounded to TF32 or 16 bits next."""
        return self.operand == "float32" and self.precision != "tf32"

    @cached_property
    def wide(self) -> bool:
        """Whether an offset passes 32 bits."""
        return self.ld * max(3 * self.d_model, self.dim_feedforward) >= 2**31

    @cached_property
    def parts(self) -> int:
        """Number of partial sums per chunk. More than one for small weights, which leave few programs."""
        rows, most = self.tokens * chunk_of(self.tokens), _MOST_PARTS if self.fragments else 1
        return max(parts for parts in range(1, most + 1) if rows % (FRAGMENT_ROWS * parts) == 0)

    @cached_property
    def chunk(self) -> int:
        """Rows of one sum in the parameters' gradients."""
        return self.tokens * chunk_of(self.tokens) // self.parts

    @cached_property
    def chunks(self) -> int:
        return -(-self.rows // self.chunk)

    def __str__(self) -> str:
        sizes = [self.sequences, self.tokens, self.d_model, self.nhead, self.dim_feedforward]
        number = f"{self.operand}/{self.precision}" if self.precision else self.operand
        return f"{sizes} {number}"


_SMALL = 1 << 20  # elements of x
_MOST_PARTS = 7
_TRANSPOSED_FROM = 64  # padded d_model from which transposes pay


def projected_parts(layer: Layer, backward: bool) -> range:
    """Numbers of those of q, k, v and do that a projection computes. A backward has q and k that are a result."""
    return range(2 if backward and layer.returns_qk else 0, 4 if backward else 3)


def chunk_of(tokens: int) -> int:
    """Sequences of one sum: the fewest that tiles divide and that have _CHUNK_ROWS tokens."""
    least = TILE_ROWS // math.gcd(tokens, TILE_ROWS)
    return least * -(-_CHUNK_ROWS // (least * tokens))


def chunk(tokens: int, d_model: int, nhead: int, dim_feedforward: int, dtype: str) -> int:
    """Sequences of one sum in the parameters' gradients of a fused layer; 0 where it is not fused."""
    return 0 if unserved(tokens, d_model, nhead, dtype) else chunk_of(tokens)


def unserved(tokens: int, d_model: int, nhead: int, operand: str) -> str:
    """Why the fused kernels do not serve, empty where they do."""
    if d_model > WIDEST:
        return f"d_model is {d_model}; a program keeps rows of at most {WIDEST}"
    if d_model > 64 and d_model & (d_model - 1):
        return f"d_model is {d_model}; above 64, tiles were verified for powers of two"
    if operand != "float32" and d_model // nhead > LONGEST_HALF_HEAD:
        return f"heads are {d_model // nhead} long; in 16 bits they were verified up to {LONGEST_HALF_HEAD}"
    if tokens * chunk_of(tokens) > _MOST_CHUNK_ROWS:
        return f"no chunk of at most {_MOST_CHUNK_ROWS} tokens is whole sequences of {tokens} and whole tiles"
    return ""


def takes_factors(d_model: int, nhead: int, dim_feedforward: int, operand: str, precision: str) -> bool:
    """Whether attention by fragments, which alone takes factors of scores, has a layer's heads, short ones included."""
    head = d_model // nhead
    in_lanes = head % 4 == 0 or not _is_narrow(d_model, dim_feedforward)  # four columns of a narrow row are one head's
    return in_lanes and fragments_hold(head, operand, precision, shortest=2)


def _is_narrow(d_model: int, dim_feedforward: int) -> bool:
    return d_model <= _WIDEST_FRAGMENTS and d_model % 16 == 0 and dim_feedforward % 16 == 0


@dataclass(frozen=True)
class RowConfig:
    """A program's rows, and the columns or the depth of a product that it takes at once."""

    rows: int
    block: int
    num_warps: int
    num_stages: int

    def programs(self, layer: Layer) -> int:
        return -(-layer.rows // self.rows)

    def __str__(self) -> str:
        return f"{self.rows}x{self.block} w{self.num_warps} s{self.num_stages}"


@dataclass(frozen=True)
class WalkConfig:
    """Programs that keep weights and walk over rows, sixteen per warp; `at_once` of them per multiprocessor."""

    warps: int
    at_once: int


@dataclass(frozen=True)
class WarpgroupConfig:
    """A program's warps, of sixteen rows each, the features that it takes at once, and how many such blocks of a weight
    are there or on their way: in feedforward_backward one."""

    warps: int
    block: int
    stages: int = 1

    def programs(self, layer: Layer) -> int:
        return -(-layer.rows // (FRAGMENT_ROWS * self.warps))


@dataclass(frozen=True)
class WarpgroupConfigs:
    """None: by tiles."""

    project: WalkConfig | None = None
    feedforward: WarpgroupConfig | None = None
    feedforward_backward: WarpgroupConfig | None = None
    input_grad: WarpgroupConfig | None = None


@dataclass(frozen=True)
class WeightConfig:
    """A tile of a weight's gradient, and the rows that it takes at once."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def tiles(self, m: int, n: int) -> int:
        return -(-m // self.block_m) * -(-n // self.block_n)


class WeightSums(NamedTuple):
    """Two weights' gradients that one launch computes, and where a chunk's partial sums lie."""

    shapes: tuple[int, int, int, int]  # M, N, M, N of left^T right
    offsets: tuple[int, ...]  # of the first weight, its bias, the second weight, and the tiles' sums
    size: int  # elements of a chunk's partial sums
    added: tuple[int, ...]  # which of the tiles' six sums are added up


@dataclass(frozen=True)
class Configs:
    project: RowConfig
    feedforward: RowConfig
    feedforward_backward: RowConfig
    input_grad: RowConfig
    weight_grads: WeightConfig

    @property
    def out_project(self) -> RowConfig:
        return self.feedforward

    @property
    def tile_rows(self) -> int:
        """Rows of the smallest tile that leaves its part of a norm's gradients."""
        return min(self.feedforward_backward.rows, self.input_grad.rows)


_ROW_LAUNCHES = ("project", "feedforward", "feedforward_backward", "input_grad")


def choose_warpgroup(layer: Layer) -> WarpgroupConfigs:
    """Configurations of the row kernels by warpgroups, both of the backward's or none. Do not affect the result."""
    number = _number(layer)
    # Of a single block of features Triton compiles the copies ahead, which do not happen, as unaligned ones.
    features = layer.dim_feedforward % 64 == 0 and layer.dim_feedforward >= 128
    numbers = number != "tf32" or layer.dtype == "float32"
    if not (layer.wgmma and features and numbers):
        return WarpgroupConfigs()
    table = tables.load("encoder", layer.arch)
    project, *others = (
        dict(table.get((number, f"{launch} warpgroup"), ())).get(layer.d_model) for launch in _ROW_LAUNCHES
    )
    groups = (None if values is None else WarpgroupConfig(*values) for values in others)
    return WarpgroupConfigs(None if project is None else WalkConfig(*project), *groups)


def tile_rows(layer: Layer) -> int:
    """Rows of the smallest tile that leaves its part of the norms' and biases' gradients."""
    if layer.fragments:
        return FRAGMENT_ROWS
    return GROUP_ROWS if choose_warpgroup(layer).feedforward_backward else choose(layer).tile_rows


def choose(layer: Layer) -> Configs:
    """The tiles of the row kernels and of the weights' gradients."""
    table, number = tables.load("encoder", layer.arch), _number(layer)
    *rows, weights = (tables.at(table[number, launch], layer.padded) for launch in (*_ROW_LAUNCHES, "weight_grads"))
    project, feedforward, feedforward_backward, input_grad = (RowConfig(*values) for values in rows)
    return Configs(project, feedforward, feedforward_backward, input_grad, WeightConfig(*weights))


def _number(layer: Layer) -> str:
    if layer.operand != "float32":
        return "half"
    return "tf32" if layer.precision == "tf32" else "ieee"


def row_warps(layer: Layer, sm_count: int) -> int:
    """Warps per program by fragments: as many as leave two programs per multiprocessor. Does not affect the result."""
    tiles = -(-layer.rows // FRAGMENT_ROWS)
    return max(warps for warps in (1, 2, 4, 8) if warps == 1 or tiles >= 2 * max(1, sm_count) * warps)


def walkers(layer: Layer, tile_rows: int, parts: int, at_once: int) -> int:
    """Programs that share the rows of one part of in_proj, as many as run at once."""
    return min(-(-layer.rows // tile_rows), max(1, -(-at_once // parts)))
