"""Attention problems, their order of summation, and the tiles of its kernels. Pure: no device, no tensors."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from isogemm.core.problems import ITEMSIZE, next_power_of_two, sm

DTYPES = tuple(ITEMSIZE)
MOST_HEAD = 256  # elements of a head
KINDS = ("dense", "packed", "paged")
LOG2E = math.log2(math.e)
WORKSPACE = 256 << 20  # bytes of partial results, where splits are computed side by side
CACHED = 24 << 20  # bytes of keys and values that programs running at the same time should share


class Order(NamedTuple):
    """How the keys of a sequence are summed: blocks and splits, counted from the sequence's position 0."""

    block_n: int  # keys per block: they share one rescaling
    split: int  # keys per split: summed from zero, then added to the splits before


@functools.cache
def order(head: int, value_head: int, dtype: str) -> Order:
    """The order depends on the head's sizes and dtype alone, never on a length or on the batch."""
    widest = next_power_of_two(max(head, value_head), 16)
    if dtype == "float32":
        return Order(32, 256) if widest > 128 else Order(64, 512)
    if widest <= 64:
        return Order(128, 1024)
    return Order(64, 512 if widest == 128 else 256)


@dataclass(frozen=True)
class Problem:
    """softmax(scale q k^T + mask) v for `sequences` sequences.

    dense: q [B, H, T, D], k [B, Hkv, S, D]. packed: q [tokens, H, D], k [tokens_k, Hkv, D]. paged: k is
    [pages, page, Hkv, D]. Strides are (sequence or page, token, head), in elements; the last axis is contiguous.
    """

    kind: str
    sequences: int
    queries: int  # T; of a packed problem all tokens
    keys: int  # S; of a packed problem all keys; of a paged one the most that a row of the block table can hold
    heads: int
    kv_heads: int
    head: int
    value_head: int
    dtype: str
    precision: str = ""  # of float32: ieee or tf32
    q_strides: tuple[int, int, int] = (0, 0, 0)
    k_strides: tuple[int, int, int] = (0, 0, 0)
    v_strides: tuple[int, int, int] = (0, 0, 0)
    o_strides: tuple[int, int, int] = (0, 0, 0)
    causal: bool = False
    left: int = -1  # keys that a query sees before its own position; -1: all
    right: int = -1  # and after it
    scale: float = 1.0
    softcap: float = 0.0
    sinks: bool = False
    mask: str = ""  # "", bool or added
    mask_strides: tuple[int, int, int, int] = (0, 0, 0, 0)  # sequence, head, query, key
    placed: tuple[bool, bool, bool] = (False, False, False)  # whether lengths, starts and offsets are given
    page: int = 0  # keys per page
    table_stride: int = 0
    aligned: bool = True  # whether q, k, v and o begin at multiples of 16 bytes
    lse: bool = False  # whether the log-sums are written
    arch: str = "sm_90"
    sm_count: int = 132

    @property
    def group(self) -> int:
        """Query heads per key head: they share a tile."""
        return self.heads // self.kv_heads

    @property
    def order(self) -> Order:
        return order(self.head, self.value_head, self.dtype)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def is_general(self) -> bool:
        """Whether scores are scaled before they are compared: soft-capped, or with a mask added."""
        return bool(self.softcap) or self.mask == "added"

    @property
    def factors(self) -> tuple[float, float]:
        """What scores are multiplied by before exp2, and before they are soft-capped or a mask is added."""
        return (LOG2E if self.is_general else self.scale * LOG2E), self.scale

    @property
    def most_splits(self) -> int:
        """Splits of a sequence, at most; one more where its first key may lie inside a split."""
        return -(-self.keys // self.order.split) + (self.placed[2])

    @property
    def wide(self) -> bool:
        """Whether offsets within a sequence or a page need 64 bits."""
        mask = 1, self.heads, self.queries, self.keys
        reach = [
            self.queries * abs(self.q_strides[1]) + self.heads * abs(self.q_strides[2]),
            self.keys * max(abs(self.k_strides[1]), abs(self.v_strides[1])),
            self.kv_heads * max(abs(self.k_strides[2]), abs(self.v_strides[2])),
            self.queries * abs(self.o_strides[1]) + self.heads * abs(self.o_strides[2]),
            sum(size * abs(stride) for size, stride in zip(mask, self.mask_strides, strict=True)),
        ]
        return max(reach) >= 2**31


@dataclass(frozen=True)
class Config:
    """Tile of the forward. Does not affect the result."""

    block_m: int  # rows: queries times heads of a group
    num_warps: int
    num_stages: int
    split: bool = False  # whether splits are computed side by side, and merged by a second launch
    roles: bool = False  # a kernel whose warps have roles: with split that for few rows
    pdl: bool = False  # whether launches overlap with their neighbours (programmatic dependent launch)


def row_blocks(problem: Problem, block_m: int) -> int:
    """Number of row blocks; of a packed problem an upper bound, of which some may be empty."""
    rows = problem.queries * problem.group
    return rows // block_m + problem.sequences if problem.kind != "dense" else problem.sequences * -(-rows // block_m)


def partial_elements(problem: Problem, config: Config) -> int:
    """float32 elements of partial results: sums, and a maximum and a sum of weights for each row."""
    slots = row_blocks(problem, config.block_m) * problem.kv_heads * problem.most_splits
    return slots * config.block_m * (next_power_of_two(problem.value_head, 16) + 2)


def choose(problem: Problem) -> Config:
    """The tile by rules: few rows take the smallest, whose splits run side by side."""
    queries = problem.queries
    if problem.kind != "dense":  # a sequence's in the mean
        queries = max(1, queries // max(problem.sequences, 1))
    rows = problem.group * queries
    few = Config(16 if rows <= 16 else 32, 4, 3, split=True, roles=True, pdl=True)
    if rows <= 32 and not illegal_decode(problem, few):
        return few
    roles = Config(128, 4, 2, roles=True)
    programs = row_blocks(problem, roles.block_m) * problem.kv_heads
    fills = 4 * programs >= 3 * problem.sm_count or problem.most_splits == 1  # more programs would not be faster
    if rows > 64 and fills and not illegal_roles(problem, roles):
        return roles
    widest = next_power_of_two(max(problem.head, problem.value_head), 16)
    if rows <= 16:
        config = Config(16, 4, 3 if widest <= 128 else 2)
    elif rows <= 64 or problem.dtype == "float32" or widest > 128:
        config = Config(64, 4, 2)
    else:
        config = Config(128, 8, 3 if widest <= 64 else 2)
    if problem.dtype == "float32":
        config = replace(config, block_m=min(config.block_m, 64 if widest <= 64 else 32), num_stages=1)
    programs = row_blocks(problem, config.block_m) * problem.kv_heads
    if problem.most_splits > 1 and programs < 2 * problem.sm_count:
        split = replace(config, split=True, pdl=sm(problem.arch) >= 90)
        if 4 * partial_elements(problem, split) <= WORKSPACE:
            return split
    return config


def heads_together(problem: Problem) -> int:
    """Number of (sequence, key head) pairs whose programs run next to each other, so that their keys stay in L2."""
    per_head = problem.keys * (problem.head + problem.value_head) * problem.itemsize
    return max(1, min(problem.sequences * problem.kv_heads, CACHED // max(per_head, 1)))


def is_hopper(problem: Problem) -> bool:
    return sm(problem.arch) == 90


# The backward: one launch for the gradient of q, by blocks of rows, and one for those of k and v, by blocks of keys.

PADDED_ROWS = 128  # a dense sequence's rows are padded to a multiple in the statistics; no tile has more


@dataclass(frozen=True)
class BackwardProblem:
    """The gradients of a dense or packed problem. Strides as in Problem: (sequence, token, head), in elements."""

    forward: Problem
    do_strides: tuple[int, int, int]
    dq_strides: tuple[int, int, int] = (0, 0, 0)
    dk_strides: tuple[int, int, int] = (0, 0, 0)
    dv_strides: tuple[int, int, int] = (0, 0, 0)
    aligned: bool = True  # whether do begins at a multiple of 16 bytes

    @property
    def wide(self) -> bool:
        """Whether offsets within a sequence need 64 bits."""
        forward = self.forward
        reach = [
            size * abs(strides[1]) + heads * abs(strides[2])
            for strides, size, heads in (
                (self.do_strides, forward.queries, forward.heads),
                (self.dq_strides, forward.queries, forward.heads),
                (self.dk_strides, forward.keys, forward.kv_heads),
                (self.dv_strides, forward.keys, forward.kv_heads),
            )
        ]
        return forward.wide or max(reach) >= 2**31


@dataclass(frozen=True)
class BackwardTile:
    """Tile of one launch of the backward."""

    rows: int  # queries times heads of a group
    keys: int
    num_warps: int
    num_stages: int
    tma: bool = False  # whether the operands of the loop are loaded by TMA


@dataclass(frozen=True)
class BackwardConfig:
    """Tiles of the backward. They do not affect the result."""

    query: BackwardTile  # has at least as many rows as the other, for which it leaves the statistics of whole blocks
    key: BackwardTile


def statistics_elements(problem: Problem) -> int:
    """float32 elements that the first launch of the backward leaves for the second: two for each row."""
    if problem.kind != "dense":
        return 2 * problem.queries * problem.heads
    rows = -(-problem.queries * problem.group // PADDED_ROWS) * PADDED_ROWS
    return 2 * problem.sequences * problem.kv_heads * rows


def tma_usable(problem: BackwardProblem) -> tuple[bool, bool]:
    """Whether TMA can load k and v for blocks of rows, and q and do for blocks of keys.

    It fills what is beyond the buffer with zeros, not what is beyond a sequence in it.
    """
    forward = problem.forward
    unit = 16 // forward.itemsize

    def fits(sizes: tuple[int, int, int], *operands: tuple[int, int, int]) -> bool:
        pairs = [(size, stride) for strides in operands for size, stride in zip(sizes, strides, strict=True)]
        return all(size == 1 or (stride > 0 and stride % unit == 0) for size, stride in pairs)

    group = forward.group
    if (
        sm(forward.arch) < 90
        or forward.kind != "dense"
        or forward.dtype == "float32"
        or any(forward.placed)
        or not (forward.aligned and problem.aligned)
        or forward.head % unit
        or forward.value_head % unit
        or not 0 < forward.queries <= forward.keys
        or not forward.sequences
    ):
        return False, False
    keys = fits((forward.sequences, forward.keys, forward.kv_heads), forward.k_strides, forward.v_strides)
    rows = fits((forward.sequences, forward.queries, forward.heads), forward.q_strides, problem.do_strides)
    return keys, rows and group & (group - 1) == 0 and group <= 16


def choose_backward(problem: BackwardProblem) -> BackwardConfig:
    """The tiles by rules, from the size of a head and the dtype."""
    forward = problem.forward
    widest = next_power_of_two(max(forward.head, forward.value_head), 16)
    if forward.dtype == "float32":
        size = 16 if forward.precision == "ieee" and widest > 64 else 32
        return BackwardConfig(BackwardTile(size, size, 8, 1), BackwardTile(size, size, 8, 1))
    keys_tma, rows_tma = tma_usable(problem)
    if forward.is_general or forward.mask or widest > 128:
        query, key = BackwardTile(64, 32, 8, 1, keys_tma), BackwardTile(32, 64, 8, 1, rows_tma)
    elif sm(forward.arch) < 90:
        query, key = BackwardTile(64, 32, 4, 1), BackwardTile(32, 64, 4, 1)
    else:
        query = BackwardTile(128, 64, 8, 3 if keys_tma else 2, keys_tma)
        key = BackwardTile(128 if widest <= 64 else 64, 64, 4, 2, rows_tma)
    return BackwardConfig(query, key)


def queries_by_tma(problem: Problem) -> bool:
    """Whether TMA reads queries and writes results: 64 rows are a box of whole tokens, and strides are legal."""
    strides = (*problem.q_strides, *problem.o_strides)
    is_dense = problem.kind == "dense"
    return is_dense and 64 % problem.group == 0 and _tma_strides(problem, strides, (problem.queries, problem.heads))


def illegal_roles(problem: Problem, config: Config) -> str:
    """The rule that the forward with roles would break, or ""."""
    widest = max(problem.head, problem.value_head)
    if not is_hopper(problem) or problem.dtype not in ("float16", "bfloat16"):
        return "roles are for 16-bit operands on sm_90"
    if not 32 < widest <= 128 or problem.head % 8 or problem.value_head % 8:
        return f"roles have heads of 33 to 128 elements, multiples of 8; got {problem.head} and {problem.value_head}"
    if problem.kind == "paged" or problem.mask:
        return "roles have dense or packed sequences without a mask"
    if problem.placed[1] and not problem.causal:
        return "roles see to padding rows by a causal mask"
    if not (problem.sequences and problem.queries and problem.keys):
        return "roles have at least a sequence, a query and a key"
    strides = (*problem.k_strides, *problem.v_strides)
    if not problem.aligned or not _tma_strides(problem, strides, (problem.keys, problem.kv_heads)):
        return "TMA reads keys at multiples of 16 bytes"
    if config.block_m != 128 or config.split or config.pdl or not 2 <= config.num_stages <= (4 if widest <= 64 else 2):
        return "roles have tiles of 128 rows and 2 stages (to 4 of small heads), neither splits side by side nor PDL"
    return ""


def _tma_strides(problem: Problem, strides: tuple[int, ...], sizes: tuple[int, int]) -> bool:
    """Whether strides of (sequence, token, head) are positive and multiples of 16 bytes, where there are steps."""
    axes = (problem.sequences if problem.kind == "dense" else 1, *sizes)
    return all(
        size == 1 or (stride > 0 and stride * problem.itemsize % 16 == 0)
        for size, stride in zip(axes * (len(strides) // 3), strides, strict=True)
    )


MOST_SEQUENCES = 1024  # of uneven lengths that one program adds up


def illegal_decode(problem: Problem, config: Config) -> str:
    """The rule that the kernel for few rows with roles would break, or ""."""
    widest = max(problem.head, problem.value_head)
    if not is_hopper(problem) or problem.dtype not in ("float16", "bfloat16"):
        return "roles are for 16-bit operands on sm_90"
    if not 32 < widest <= 128 or problem.head % 8 or problem.value_head % 8:
        return f"roles have heads of 33 to 128 elements, multiples of 8; got {problem.head} and {problem.value_head}"
    if problem.mask:
        return "the kernel for few rows has no mask"
    if not (problem.sequences and problem.queries and problem.keys) or problem.sequences > MOST_SEQUENCES:
        return f"the kernel for few rows has 1 to {MOST_SEQUENCES} sequences, queries and keys"
    if not problem.aligned or any(stride % 16 for stride in (*problem.k_strides, *problem.v_strides)):
        return "keys and values are loaded from multiples of 16 elements"
    if config.block_m not in (16, 32) or config.num_stages != 3 or not config.split:
        return "tiles have 16 or 32 rows, 3 buffers, and splits side by side"
    if config.block_m == 32 and problem.order.block_n > 64:
        return "32 rows of 4 blocks of keys have no room in shared memory"
    return ""
