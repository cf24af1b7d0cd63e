"""Attention problems and the tiles of its kernels. Pure: no device, no tensors.

What affects a sequence's bits depends on the head's size and dtype alone, never on the number of sequences or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from isogemm.core import tables
from isogemm.epilogues import random

CACHED = 16 << 20  # bytes of q, k and v up to which prefetching does not pay (H200)
SHORT_HEAD = 16  # longest head that is computed in registers
LONGEST_HALF_HEAD = 64  # longest head with 16-bit operands; longer ones are widened to float32, which is exact
MOST_FACTORS = 4  # earlier layers whose queries and keys an attention reads


@dataclass(frozen=True)
class Attention:
    """softmax(Q K^T / sqrt(head) + mask) V of `heads` heads of `sequences` sequences of `tokens` tokens.

    Each of Q, K, V and their gradients is [sequences * tokens, heads * head] with a row stride. O and its gradient are
    contiguous, and so are scores, [sequences, heads, tokens, tokens]. Factors (earlier layers' q and k) are contiguous
    by head, [heads, sequences * tokens, head]; so are their gradients, and later layers' gradients of this layer's q
    and k.
    """

    sequences: int
    tokens: int
    heads: int
    head: int
    dtype: str
    precision: str  # of float32: ieee, tf32 or tf32x3 (as ieee); ieee for the 16-bit types
    row_strides: tuple[int, ...]  # of q, k, v; in the backward also of dq, dk, dv
    causal: bool = False
    mask: str = ""  # none, "bool" (True leaves a key out) or "additive"
    mask_strides: tuple[int, int] = (0, 0)  # sequence, token
    backend: str = "cuda"
    pdl: bool = False  # whether the launch overlaps with its neighbours
    by_head: bool = False  # whether q, k, v, do and the log-sums are stored head by head, [heads, rows, ...]
    transposed: bool = False  # whether dq, dk and dv are written transposed, rounded to TF32
    dropout: float = 0.0  # probability of the weights' dropout
    previous: bool = False  # whether the previous layer's scores are added
    scores: bool = False  # whether the scores are written; in the backward, whether their gradient is given
    factors: int = 0  # number of earlier layers whose q k^T are added
    added: bool = False  # in the backward: whether later layers' gradients of q and k are added
    arch: str = "sm_90"  # whose table has the blocks

    def __post_init__(self) -> None:
        if (self.factors or self.added) and (not self.by_head or self.residual or not fits_mma(self)):
            raise ValueError(f"factors need fragments, q and k by head and no scores in memory; got {self}")
        if not 0 <= self.factors <= MOST_FACTORS:
            raise ValueError(f"factors: got {self.factors}, expected 0 to {MOST_FACTORS}")

    @property
    def backward(self) -> bool:
        return len(self.row_strides) > 3

    @property
    def width(self) -> int:
        return self.heads * self.head

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def bytes_read(self) -> int:
        """Size of q, k and v, and of the factors."""
        return (3 + 2 * self.factors) * self.sequences * self.tokens * self.width * self.itemsize

    @property
    def reach(self) -> int:
        """Upper bound of the offsets of all elements."""
        written = () if self.transposed else self.row_strides[3:]
        reach = self.sequences * self.tokens * max(*self.row_strides[:3], *written, self.width)
        if self.transposed:
            reach = max(reach, self.width * self.row_strides[3])
        return max(reach, self.sequences * self.heads * self.tokens**2) if self.residual else reach

    @property
    def residual(self) -> bool:
        """Whether there are scores in memory."""
        return self.previous or self.scores

    @property
    def masking(self) -> tuple[int, int] | tuple[None, None]:
        """The mask's strides, None without a mask."""
        return self.mask_strides if self.mask else (None, None)

    @property
    def dropping(self) -> tuple[int, float] | tuple[None, None]:
        """Dropout's threshold and scale, None without dropout."""
        return (random.threshold(self.dropout), random.scale(self.dropout)) if self.dropout else (None, None)


# Configs: `constants` are a kernel's; `programs` is the number that a launch has.


@dataclass(frozen=True)
class RegistersConfig:
    """A thread owns `own` tokens of one head and reads `block` of the others per step.

    `block` keys share one rescaling of the forward's sums, so it never depends on the tokens. `own` does not affect the
    result.
    """

    own: int
    block: int
    num_warps: int = 4
    num_stages: int = 1

    def programs(self, problem: Attention) -> int:
        return _of_threads(problem, self.own, self.num_warps)

    @property
    def constants(self) -> dict[str, int]:
        return {"OWN": self.own, "KEYS": self.block, "BLOCK": 32 * self.num_warps}


@dataclass(frozen=True)
class RegistersBackwardConfig:
    """The same for threads that own queries and for those that own keys. Does not affect the result."""

    own_queries: int
    own_keys: int
    keys: int
    queries: int
    num_warps: int = 4
    num_stages: int = 1

    def query_programs(self, problem: Attention) -> int:
        return _of_threads(problem, self.own_queries, self.num_warps)

    def programs(self, problem: Attention) -> int:
        return self.query_programs(problem) + _of_threads(problem, self.own_keys, self.num_warps)

    @property
    def constants(self) -> dict[str, int]:
        steps = {"KEYS": self.keys, "QUERIES": self.queries, "BLOCK": 32 * self.num_warps}
        return {"OWN_Q": self.own_queries, "OWN_K": self.own_keys} | steps


@dataclass(frozen=True)
class MmaConfig:
    """A warp owns 16 `tiles` tokens of one head. Does not affect the result."""

    tiles: int
    num_warps: int = 4
    num_stages: int = 1

    def programs(self, problem: Attention) -> int:
        """In the backward by turns of queries and of keys."""
        warps = problem.sequences * problem.heads * -(-problem.tokens // (16 * self.tiles))
        return -(-warps // self.num_warps) * (2 if problem.backward else 1)

    @property
    def constants(self) -> dict[str, int]:
        return {"TILES": self.tiles, "BLOCK": 32 * self.num_warps}


@dataclass(frozen=True)
class DotConfig:
    """Blocks of block_q queries and block_k keys, the head padded to block_d and multiplied by chunks of chunk_d."""

    block_q: int
    block_k: int
    block_d: int
    chunk_d: int
    num_warps: int
    num_stages: int

    def programs(self, problem: Attention) -> int:
        blocks = -(-problem.tokens // self.block_q)
        if problem.backward:
            blocks += -(-problem.tokens // self.block_k)
        return problem.sequences * problem.heads * blocks

    @property
    def constants(self) -> dict[str, int]:
        return {"BQ": self.block_q, "BK": self.block_k, "BD": self.block_d, "CHUNK": self.chunk_d}

    def __str__(self) -> str:
        return f"dot {self.block_q}x{self.block_k}x{self.block_d}/{self.chunk_d} w{self.num_warps} s{self.num_stages}"


Config = RegistersConfig | RegistersBackwardConfig | MmaConfig | DotConfig


def choose_any(problem: Attention) -> Config:
    if fits_mma(problem):
        return choose_mma(problem)
    if problem.head > SHORT_HEAD:
        return choose(problem)
    return choose_registers_backward(problem) if problem.backward else choose_registers(problem)


def choose(problem: Attention) -> DotConfig:
    """Blocks of a long head: large ones that spill nothing and fit 99 KB of shared memory.

    In the backward one stage: Triton 3.6 refills the buffer of a tile that is also read into registers (do, q) while
    wgmma reads it.
    """
    number = "half" if problem.dtype != "float32" else "tf32" if problem.precision == "tf32" else "ieee"
    table = tables.load("encoder.attention", problem.arch)[number, "backward" if problem.backward else "forward"]
    config = DotConfig(*tables.at(table, problem.head))
    shrink = _too_many(problem, config)
    if problem.backward:
        return replace(config, block_q=config.block_q // shrink)
    return replace(config, block_k=config.block_k // shrink)


def _too_many(problem: Attention, config: DotConfig) -> int:
    """Factor by which blocks shrink with scores in memory, which take registers."""
    most = 512 * config.num_warps
    return max(1, config.block_q * config.block_k // most) if problem.residual else 1


def fits_mma(problem: Attention) -> bool:
    """Whether the problem's heads are computed by fragments."""
    shortest = 2 if problem.residual or problem.by_head else 6
    return problem.backend == "cuda" and fragments_hold(problem.head, problem.dtype, problem.precision, shortest)


def fragments_hold(head: int, dtype: str, precision: str, shortest: int = 6) -> bool:
    """Whether fragments serve heads of this length: even, from `shortest` to 16, in TF32 or 16 bits.

    A head of up to four would be half padding, and fp32 is as fast. It pays with scores in memory, of which a warp's
    fragments read and write eight neighbours; and only fragments take factors.
    """
    return shortest <= head <= 16 and head % 2 == 0 and (dtype != "float32" or precision == "tf32")


def choose_mma(problem: Attention) -> MmaConfig:
    """Tokens per warp for a short head: as many as registers allow. Times in comments: us on an H200."""
    most = 4 if problem.head <= 8 else 2
    if problem.factors:
        most = min(most, _most_with_factors(problem))
    elif problem.added and problem.dropout:
        most = 1  # of 42 tokens 169, by two 191, by three 211
    elif problem.added or not problem.backward:
        most = min(most, 3)  # of 64 tokens: by two 55 forward and 164 backward, by four 68 and 175
    if problem.dropout and problem.residual:
        most = 1
    elif problem.scores and not problem.backward:
        most = min(most, 2)  # of 42 tokens 115, by three 132; where scores are read, too, 121 and 151
    elif problem.dropout or problem.residual:
        most = min(most, 3)
    blocks = -(-problem.tokens // (16 * most))
    return MmaConfig(-(-problem.tokens // (16 * blocks)))


def _most_with_factors(problem: Attention) -> int:
    """Most tiles whose operands of all layers (in the backward their sums, too) fit in registers.

    With three, a backward of two factors takes 149 us where two take 182 and one 216.
    """
    fragments = (problem.factors + 1) * -(-problem.head // 8)
    held = 9 if problem.backward or problem.dropout else 15
    return max(1, min(3, held // fragments) if problem.backward else held // fragments)


def choose_registers(problem: Attention) -> RegistersConfig:
    """Tokens per thread for a short head: of the numbers that fit in registers, the one that wastes the least."""
    if problem.head <= 8:
        return RegistersConfig(_own(problem, most=4), 4)
    return RegistersConfig(_own(problem, most=2), 2)


def choose_registers_backward(problem: Attention) -> RegistersBackwardConfig:
    queries = 2 if problem.head <= 8 or problem.dropout else 1
    if problem.head <= 8:
        return RegistersBackwardConfig(_own(problem, most=4), _own(problem, most=3), keys=2, queries=queries)
    return RegistersBackwardConfig(_own(problem, most=2), _own(problem, most=2), keys=2, queries=queries)


def _own(problem: Attention, most: int) -> int:
    """Tokens per thread. Reading the other tokens costs about as much as the arithmetic of one that it owns."""
    fewest, step = (2, 2) if problem.dropout else (1, 1)
    return min(range(most // step * step, fewest - 1, -step), key=lambda own: threads(problem, own) * (own + 1))


def threads(problem: Attention, own: int) -> int:
    """Threads per head if each owns `own` tokens; with dropout, pairs of tokens that are eight apart."""
    if not problem.dropout:
        return -(-problem.tokens // own)
    pairs = problem.tokens // 16 * 8 + min(problem.tokens % 16, 8)
    return -(-pairs // (own // 2))


def _of_threads(problem: Attention, own: int, num_warps: int) -> int:
    """Programs whose threads own `own` tokens each."""
    return -(-problem.sequences * problem.heads * threads(problem, own) // (32 * num_warps))
