"""Which layers the fused kernels serve, and with which tiles. Pure: no device, no tensors.

The order of a row's sums depends on the tile, so tiles depend on the layer's sizes and dtypes, never on the batch. The
number of programs that share the rows does not affect the result, and may depend on the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from isogemm.core import tables
from isogemm.encoder.attention.configs import LONGEST_HALF_HEAD, fragments_hold
from isogemm.encoder.parameters import NOTHING_DROPPED, EncoderDropout
from isogemm.norm.configs import TILE_ROWS  # every tile's rows divide it

WIDEST = 256  # largest d_model: a program keeps whole rows
_WIDEST_FRAGMENTS = 32  # largest d_model by fragments: wider rows leave no registers for weights in flight
FRAGMENT_ROWS = 16  # per warp
GROUP_ROWS = 64  # per warpgroup
_CHUNK_ROWS = 512  # per partial sum of the parameters' gradients, at least
_MOST_CHUNK_ROWS = 8192  # per partial sum, at most: longer sums would be too few


@dataclass(frozen=True)
class Layer:
    """One call: S sequences of T tokens through a layer."""

    sequences: int
    tokens: int
    d_model: int
    nhead: int
    dim_feedforward: int
    dtype: str  # of x, the residual sums and the result
    operand: str  # dtype of the products' operands
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
    mma: bool = False  # whether the device has the mma.sync that fragments use (NVIDIA, sm_80 and later)
    wgmma: bool = False  # whether the device has wgmma (sm_90 alone)
    residual_normed: bool = False  # with norm_first: the residual is the normalised value
    dropout: EncoderDropout = NOTHING_DROPPED
    from_batch: bool = False  # whether a batch norm uses the batch's statistics
    previous: bool = False  # whether another layer's scores are added
    scores: bool = False  # whether the scores are returned
    factors: int = 0  # number of earlier layers whose queries and keys are given instead of scores
    returns_qk: bool = False  # whether the queries and keys are returned
    arch: str = "sm_90"  # whose table has its tiles

    @cached_property
    def head(self) -> int:
        return self.d_model // self.nhead

    @cached_property
    def batch_norm(self) -> bool:
        return self.norm == "batch_norm"

    @cached_property
    def split_at_norm(self) -> bool:
        """Whether launches end at the norm before the feed-forward, and s is in memory (README: split at norms)."""
        return self.batch_norm or self.residual_normed or any(self.dropout[1:])

    @cached_property
    def norm_last(self) -> bool:
        """Whether the feed-forward launches apply the last norm."""
        return not (self.norm_first or self.batch_norm)

    @cached_property
    def row_norm(self) -> str:
        """The norm that the projection launches compute themselves; empty if none."""
        return self.norm if self.norm_first and not self.batch_norm else ""

    @cached_property
    def rows(self) -> int:
        return self.sequences * self.tokens

    @cached_property
    def padded(self) -> int:
        """d_model as a tile's side: a power of two, at least 16."""
        return max(16, 1 << (self.d_model - 1).bit_length())

    @cached_property
    def ld(self) -> int:
        """Row stride of a transposed buffer."""
        return -(-self.rows // 16) * 16

    @cached_property
    def narrow(self) -> bool:
        """Whether a warp can hold sixteen rows in fragments: small sizes, in TF32 or 16 bits."""
        return _is_narrow(self.d_model, self.dim_feedforward) and not self.exact

    @cached_property
    def fragments(self) -> bool:
        """Whether the row kernels are those by fragments."""
        return self.mma and self.narrow

    @cached_property
    def by_head(self) -> bool:
        """Whether q, k, v and do are stored head by head, so that a head's tokens are contiguous."""
        if self.factors or self.returns_qk:
            sizes = self.d_model, self.nhead, self.dim_feedforward
            return self.mma and takes_factors(*sizes, self.operand, self.precision)
        return self.mma and not self.fragments and fragments_hold(self.head, self.operand, self.precision)

    @cached_property
    def shape_of_factor(self) -> tuple[int, ...]:
        return (2, self.nhead, self.sequences, self.tokens, self.head)

    @cached_property
    def packed_weights(self) -> bool:
        """Whether the products read packed weights: rounded, cast, stacked, or in fragment order."""
        return self.fragments or self.precision == "tf32" or self.weights != self.operand or not self.stacked

    @cached_property
    def transposed(self) -> bool:
        """Whether the weight gradients read transposes: TF32 tensor cores need both operands along the sum."""
        return self.precision == "tf32" and self.by_head and self.padded >= _TRANSPOSED_FROM

    @cached_property
    def cast(self) -> bool:
        """Whether operands of the weight gradients are cast when they are written: reading wide ones is slow."""
        return self.dtype != self.operand and not self.fragments

    @cached_property
    def pdl(self) -> bool:
        """Whether launches overlap (programmatic dependent launch). It pays for small ones; large ones would wait."""
        return self.supports_pdl and self.rows * self.d_model <= _SMALL

    @cached_property
    def exact(self) -> bool:
        """Whether activations must be exact in fp32: not if the result is then rounded to TF32 or 16 bits."""
        return self.operand == "float32" and self.precision != "tf32"

    @cached_property
    def wide(self) -> bool:
        """Whether offsets need 64 bits."""
        return self.ld * max(3 * self.d_model, self.dim_feedforward) >= 2**31

    @cached_property
    def parts(self) -> int:
        """Number of partial sums per chunk. More than one for small weights, which leave few programs."""
        rows, most = self.tokens * chunk_of(self.tokens), _MOST_PARTS if self.fragments else 1
        return max(parts for parts in range(1, most + 1) if rows % (FRAGMENT_ROWS * parts) == 0)

    @cached_property
    def chunk(self) -> int:
        """Rows per partial sum of the parameters' gradients."""
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
    """Which of q, k, v and do (0 to 3) a projection computes. A backward still has q and k if they were returned."""
    return range(2 if backward and layer.returns_qk else 0, 4 if backward else 3)


def chunk_of(tokens: int) -> int:
    """Sequences per partial sum of a fused layer's parameter gradients.

    The fewest whose tokens are whole tiles and at least _CHUNK_ROWS.
    """
    least = TILE_ROWS // math.gcd(tokens, TILE_ROWS)
    return least * -(-_CHUNK_ROWS // (least * tokens))


def unserved(tokens: int, d_model: int, nhead: int, operand: str) -> str:
    """Why the fused kernels cannot serve; empty if they can."""
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
    """Whether attention by fragments, the only one that takes factors, serves the layer's heads."""
    head = d_model // nhead
    in_lanes = head % 4 == 0 or not _is_narrow(d_model, dim_feedforward)  # a lane's four columns are one head's
    return in_lanes and fragments_hold(head, operand, precision, shortest=2)


def _is_narrow(d_model: int, dim_feedforward: int) -> bool:
    return d_model <= _WIDEST_FRAGMENTS and d_model % 16 == 0 and dim_feedforward % 16 == 0


@dataclass(frozen=True)
class RowConfig:
    """Tile of a row kernel: rows per program, and columns or depth of a product per step."""

    rows: int
    block: int
    num_warps: int
    num_stages: int

    def programs(self, layer: Layer) -> int:
        return -(-layer.rows // self.rows)

    def __str__(self) -> str:
        return f"{self.rows}x{self.block} w{self.num_warps} s{self.num_stages}"


@dataclass(frozen=True)
class ProjectConfig:
    """Programs that keep a weight and loop over rows, sixteen per warp; `at_once` programs per multiprocessor."""

    warps: int
    at_once: int


@dataclass(frozen=True)
class WarpgroupConfig:
    """Tile of a row kernel by warpgroups: warps of sixteen rows each, features per step, and pipeline stages (one in
    feedforward_backward)."""

    warps: int
    block: int
    stages: int = 1

    def programs(self, layer: Layer) -> int:
        return -(-layer.rows // (FRAGMENT_ROWS * self.warps))


@dataclass(frozen=True)
class WarpgroupConfigs:
    """Configs of the row kernels by warpgroups; None: by tiles."""

    project: ProjectConfig | None = None
    feedforward: WarpgroupConfig | None = None
    feedforward_backward: WarpgroupConfig | None = None
    input_grad: WarpgroupConfig | None = None


@dataclass(frozen=True)
class WeightConfig:
    """Tile of a weight's gradient, and rows per step."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def tiles(self, m: int, n: int) -> int:
        return -(-m // self.block_m) * -(-n // self.block_n)


class WeightSums(NamedTuple):
    """Two weight gradients that one launch computes, and the layout of a chunk's partial sums."""

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
        """Rows of the smallest tile that writes sums for a norm's gradients."""
        return min(self.feedforward_backward.rows, self.input_grad.rows)


_ROW_LAUNCHES = ("project", "feedforward", "feedforward_backward", "input_grad")


def choose_warpgroup(layer: Layer) -> WarpgroupConfigs:
    """Configs of the row kernels by warpgroups, of both backward kernels or neither. Do not affect the result."""
    number = _number(layer)
    # With a single block of features Triton compiles the prefetches, which never run, as unaligned copies.
    features = layer.dim_feedforward % 64 == 0 and layer.dim_feedforward >= 128
    numbers = number != "tf32" or layer.dtype == "float32"
    if not (layer.wgmma and features and numbers):
        return WarpgroupConfigs()
    table = tables.load("encoder", layer.arch)
    project, *others = (
        dict(table.get((number, f"{launch} warpgroup"), ())).get(layer.d_model) for launch in _ROW_LAUNCHES
    )
    groups = (None if values is None else WarpgroupConfig(*values) for values in others)
    return WarpgroupConfigs(None if project is None else ProjectConfig(*project), *groups)


def tile_rows(layer: Layer) -> int:
    """Rows of the smallest tile that writes sums for the norms' and biases' gradients."""
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
    """Warps per program by fragments: the most that leave two programs a multiprocessor. Does not affect the result."""
    tiles = -(-layer.rows // FRAGMENT_ROWS)
    return max(warps for warps in (1, 2, 4, 8) if warps == 1 or tiles >= 2 * max(1, sm_count) * warps)
