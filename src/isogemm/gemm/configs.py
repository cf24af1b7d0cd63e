"""Problems of the GEMM family and the tiles that may serve them; `selection` chooses. Pure: no device, no tensors.

A problem's bits depend on its operands, its precision and its chunk. The chunk depends on the weight's shape and dtype.
Everything in a Config may depend on M.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from isogemm.core.problems import ITEMSIZE as ITEMSIZE
from isogemm.core.problems import layout_letter, power_of_two, sm
from isogemm.core.problems import unit as unit
from isogemm.core.problems import usable as usable
from isogemm.epilogues.operands import MATRICES, NOTHING, Epilogue
from isogemm.epilogues.spec import levels_off

DTYPES = tuple(ITEMSIZE)

WORKSPACE = 64 << 20  # bytes, the most that finished chunks may take
HALVES = 1 << 30  # bytes, the most that a tf32x3 product's operands take once they are split; larger ones are not
LONGEST_SUM = 16384  # k of one sum in a product; longer ones are cut
_CUT_SUM = 8192
_NARROW, _LONG = 4096, 4096  # weights of at most so many rows, and at least so many columns, are cut in two
_CUT_UNIT = 512  # what cuts are multiples of, so that weights share kernels
_PINNED = {"ieee": 16, "tf32x3": 32}  # block_k, where bits depend on it
BIAS_CHUNK = 1024  # tokens of one sum in a bias gradient; divides every weight's chunk
BIAS_ROWS = 64  # tokens of one sum that a product's epilogue makes for it
BIAS_BLOCKS = BIAS_CHUNK // BIAS_ROWS  # of those sums in a chunk
_LARGEST_CHUNK = 4096  # tokens of one sum in a weight gradient

_WIDE_SUM = 1024  # k of one sum in a float32 result of 16-bit operands: no rounding hides its error
_MAP_ALIGNMENT = 128  # bytes, at whose multiples the halves of an operand begin: TMA wants 16
_FLAG = 8  # bytes in which a program says that a tile's sums are ready for the next program
_REGISTERS = 64  # of a thread, for finished chunks
_REGISTERS_BESIDE = 96  # likewise, where a tile has a rest
_LEAST_REWRITTEN = 4  # sums of a thread, of which no other thread has a copy: a warp has 16 x 8 of a tile at least
_MOST_WARPS = 16
_MOST_GATHERED = 32  # chunks, as many as a warp has threads
ROLE_GROUPS = 2  # warpgroups of a kernel with roles that multiply, each 64 rows of a tile
_ROLE_WARPS, _ROLE_ROWS = 4 * ROLE_GROUPS, 64 * ROLE_GROUPS
_MOST_ALTERNATING = 160  # sums of a thread there whose warpgroup has a whole tile
_LARGEST_TEAM = 12
_BARRIERS = 512  # bytes of shared memory there, for barriers and what warps are told

Accumulation = Literal["one", "registers", "in place", "scratch", "partials", "gathered"]
# Who adds the sums of parallel chunks: a second kernel; each program, after the chunk before; the last chunk's program.
ParallelChunks = Literal["", "partials", "queued", "gathered"]

Kernel = Literal["pointer", "tma", "stream", "roles"]
Operand = Literal["a", "b"]
OPERANDS: tuple[Operand, ...] = ("a", "b")


@dataclass(frozen=True)
class Problem:
    """C = A B and its epilogue, or C += A B, for every one of a batch: A [m, k], B [k, n].

    A batch, and k, may have two levels: index i is (i // inner, i % inner), each with its own stride. An epilogue of
    two products has a second B, with the strides of the first.
    """

    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    precision: str = "ieee"  # of float32: ieee, tf32 or tf32x3
    a_strides: tuple[int, int] = (0, 1)  # m, k; in elements
    b_strides: tuple[int, int] = (1, 0)  # k, n
    c_strides: tuple[int, int] = (0, 1)  # m, n
    a_aligned: bool = True  # its address is a multiple of 16 bytes
    b_aligned: bool = True
    c_aligned: bool = True
    batch: int = 1
    batch_inner: int = 1
    a_batch_strides: tuple[int, int] = (0, 0)  # outer, inner
    b_batch_strides: tuple[int, int] = (0, 0)
    k_inner: int = 0  # 0: k has one level
    k_outer_strides: tuple[int, int] = (0, 0)  # of A, of B
    chunk: int = 0  # a new sum at every multiple of it; 0: one sum
    accumulate: bool = False
    epilogue: Epilogue = NOTHING
    read_strides: tuple[int | None, ...] = ()  # of the rows of `operands.MATRICES`, then m and n of the aux tensors
    reads_float32: bool = False  # a matrix or aux tensor of the epilogue is float32
    read_aligned: bool = True  # those matrices' addresses are multiples of 16 bytes
    up_first: bool = False  # of two weights the second lies before the first in memory
    up_near: bool = True  # and one TMA map reaches both
    tma: bool = True  # whether it can be launched here, where the architecture has it
    arch: str = "sm_90"
    sm_count: int = 132
    gpu: str = ""  # its name, by which the user's own measurements are found; empty: none are

    def __str__(self) -> str:
        number = self.dtype if self.dtype != "float32" else f"float32/{self.precision}"
        parts = [f"[{self.m},{self.n},{self.k}]", number, self.layout]
        if self.batch > 1:
            parts.insert(0, f"{self.batch} x")
        if self.out_dtype != self.dtype:
            parts.append(f"-> {self.out_dtype}")
        if self.chunk:
            parts.append(f"chunk {self.chunk}")
        if self.accumulate:
            parts.append("accumulated")
        return " ".join((*parts, *self._epilogue_names()))

    def _epilogue_names(self) -> tuple[str, ...]:
        """Names of what the epilogue does."""
        e = self.epilogue
        names = [name for name in ("alpha", "row_scale", "col_scale", "beta", "bias") if getattr(e, name)]
        names += [name for name in (e.activation, e.user) if name]
        names += [name for name in ("dropout", "residual", "gradient", "sums", "eager") if getattr(e, name)]
        return ("+", *names) if names else ()

    @property
    def layout(self) -> str:
        """n or t for each operand as BLAS has it; x where no axis is contiguous."""
        return layout_letter(self.a_strides[1], self.a_strides[0]) + layout_letter(self.b_strides[1], self.b_strides[0])

    @property
    def chunks(self) -> int:
        """Number of sums per element."""
        return -(-self.k // self.chunk) if self.chunk else 1

    @property
    def kind(self) -> str:
        """The layout and the kind of epilogue, for which configurations are measured."""
        e = self.epilogue
        followed = " gated" * e.gated + " gradient" * bool(e.gradient) + " accumulated" * self.accumulate
        return self.layout + (followed or " activated" * bool(e.activation or e.user))

    @property
    def weights(self) -> int:
        """Number of B operands."""
        return 2 if self.epilogue.paired else 1

    @property
    def number(self) -> str:
        """The kind of arithmetic, part of the tables' keys."""
        return self.precision if self.dtype == "float32" else "half"

    @property
    def keeps_float32(self) -> bool:
        """Whether a pre-activation that it writes or reads is float32, of operands in float16: `forms.saved_dtype`."""
        e = self.epilogue
        return self.dtype == "float16" and "pre" in (e.saves, e.gradient) and not levels_off(e.activation)

    def transposed(self) -> Problem:
        """The same product as C^T = B^T A^T."""
        return replace(
            self, m=self.n, n=self.m, a_strides=self.b_strides[::-1], b_strides=self.a_strides[::-1],
            c_strides=self.c_strides[::-1], a_aligned=self.b_aligned, b_aligned=self.a_aligned,
            a_batch_strides=self.b_batch_strides, b_batch_strides=self.a_batch_strides,
            k_outer_strides=self.k_outer_strides[::-1],
        )  # fmt: skip


@dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    # How operands are read. stream: TMA, across tiles. roles: likewise, by a warp of their own.
    kernel: Kernel = "pointer"
    swapped: bool = False  # computed as C^T = B^T A^T; block_m and block_n are of C^T
    group: int = 8  # rows of tiles that run one after another, for the cache
    persistent: bool = False  # a few programs per SM, several tiles each; stream is always
    parts: int = 1  # column parts that a tile is stored in
    rest_n: int = 0  # with tma: additional columns of a tile
    residents: int = 1  # programs of a persistent grid per SM
    parallel_chunks: ParallelChunks = ""  # the chunks of a tile in different programs
    pdl: bool = False  # let the next kernel's launch overlap this one's end
    balanced: bool = False  # stream, roles: the last two waves of tiles are divided evenly among the programs
    split: Literal["", "a", "b", "both"] = ""  # of tf32x3: operands whose halves a pass writes to memory beforehand
    alternating: bool = False  # with roles: a warpgroup has every other tile, instead of half of each

    def __str__(self) -> str:
        marks = (
            "swapped" * self.swapped, "persistent" * self.persistent, f"g{self.group}" * (self.group != 8),
            f"p{self.parts}" * (self.parts > 1),
            {"partials": "parallel"}.get(self.parallel_chunks, self.parallel_chunks),
            f"r{self.residents}" * (self.residents > 1), "early" * self.pdl, "balanced" * self.balanced,
            f"split {self.split}" * bool(self.split), "alternating" * self.alternating,
        )  # fmt: skip
        columns = f"{self.block_n}+{self.rest_n}" if self.rest_n else str(self.block_n)
        tile = f"{self.kernel} {self.block_m}x{columns}x{self.block_k} w{self.num_warps} s{self.num_stages}"
        return " ".join(filter(None, (tile, *marks)))

    def splits(self, operand: Operand) -> bool:
        """Whether a pass splits the operand; in tf32x3 the product splits it in registers otherwise."""
        return self.split in (operand, "both")

    @property
    def waits(self) -> bool:
        """Whether programs wait for one another."""
        return self.balanced or self.parallel_chunks in ("queued", "gathered")

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        return self.block_n + self.rest_n


def token_chunk(n: int, k: int, dtype: str) -> int:
    """Tokens of one sum in the gradients of an [n, k] weight and of its bias.

    Small weights have few tiles: shorter chunks, which run side by side, fill the chip.
    """
    tiles = -(-n // 128) * -(-k // 128)
    return _LARGEST_CHUNK if tiles >= 128 else _LARGEST_CHUNK // 2 if tiles >= 64 else _LARGEST_CHUNK // 4


def accumulation_chunk(problem: Problem) -> int:
    """k of one sum in a product; 0 where it is one sum. Depends on the weight alone.

    Tensor cores truncate, so a long sum is less exact. A long and narrow weight has few tiles where tokens are few: its
    two sums run side by side. Not in TF32 and ieee, whose results are their sums and wait in memory for the next one;
    and not where a weight is not contiguous along k, as in an input gradient, which seldom has few tokens.
    """
    n, k = problem.n, problem.k
    if problem.dtype != problem.out_dtype:
        return _WIDE_SUM if k > _WIDE_SUM else 0
    if k > LONGEST_SUM:
        return _CUT_SUM
    long_narrow = n <= _NARROW and k > 2 * n and k >= _LONG
    if long_narrow and problem.b_strides[0] == 1 and problem.number in ("half", "tf32x3"):
        return -(-k // (2 * _CUT_UNIT)) * _CUT_UNIT
    return 0


def canonical(problem: Problem) -> Config:
    """The plainest configuration: small tiles, pointer loads, no pipelining. The others are compared with it."""
    rows = BIAS_ROWS if problem.epilogue.sums else 32
    return Config(rows, 32, _PINNED.get(problem.number, 32), num_warps=4, num_stages=1)


def illegal(problem: Problem, config: Config) -> str:
    """Empty where `config` computes `problem`; else the rule it breaks. The one statement of legality."""
    if not power_of_two(config.block_m, config.block_n, config.block_k, config.num_warps, config.parts):
        return "blocks, num_warps and parts are powers of two"
    if min(config.group, config.residents, config.num_stages) < 1 or config.num_warps > _MOST_WARPS:
        return f"group, residents and num_stages are at least 1, num_warps at most {_MOST_WARPS}"
    if config.block_m < 16 or config.block_n < 8 or config.block_k < 16:
        return "blocks are at least 16 x 8 x 16"
    if config.block_k != _PINNED.get(problem.number, config.block_k):
        return f"{problem.number} has block_k {_PINNED[problem.number]}: its bits depend on it"
    if reason := _illegal_split(problem, config):
        return reason
    if problem.chunk % config.block_k:
        return "block_k divides the chunk"
    if config.kernel == "tma" and not (reads_a_by_tma(problem, config) or reads_b_by_tma(problem, config)):
        return "no operand can be read by TMA"
    by_tma = reads_a_by_tma(problem, config) and reads_b_by_tma(problem, config)
    if config.kernel in ("stream", "roles") and not by_tma:
        return "an operand cannot be read by TMA"
    if config.kernel == "roles" and (reason := _illegal_roles(problem, config)):
        return reason
    if config.alternating and config.kernel != "roles":
        return "warpgroups alternate where warps have roles"
    with_rest = config.kernel in ("tma", "roles") and power_of_two(config.rest_n) and config.rest_n <= config.block_n
    if config.rest_n and not with_rest:
        return "rest_n is a power of two up to block_n, and read by TMA"
    if config.rest_n and not by_tma:
        return "a tile with a rest has operands that TMA reads"
    if problem.weights > 1 and (config.rest_n or (config.block_m if config.swapped else config.block_n) < 32):
        return "two weights share a tile of at least 32 of their columns, without a rest"
    if problem.weights > 1 and accumulation(problem, config) in ("in place", "partials"):
        return "two weights' finished chunks wait in registers or scratch memory"
    if not problem.epilogue.plain and (problem.batch > 1 or problem.accumulate):
        return "an epilogue follows one product, of no batch, that is not accumulated"
    if not problem.epilogue.plain and config.parallel_chunks == "partials":
        return "an epilogue follows a tile's whole sums"
    if problem.epilogue.sums and (config.swapped or config.block_m % BIAS_ROWS):
        return f"sums over rows are of {BIAS_ROWS}, all in one tile that is not swapped"
    if reason := _illegal_order(problem, config):
        return reason
    if chunk_bytes(problem, config) > WORKSPACE:
        return f"finished chunks take {chunk_bytes(problem, config)} bytes, more than {WORKSPACE}"
    if shared_memory(problem, config) > _SHARED_MEMORY.get(problem.arch, _LEAST_SHARED_MEMORY):
        return f"takes about {shared_memory(problem, config)} bytes of shared memory"
    return ""


def _illegal_roles(problem: Problem, config: Config) -> str:
    """The rule that a kernel with roles breaks."""
    e = problem.epilogue
    if sm(problem.arch) != 90 or problem.number != "half" or problem.accumulate or e.sums:
        return "roles are for 16-bit operands on sm_90, and neither add to a result nor sum its rows"
    if e.user:
        return "roles have no registered epilogue: Gluon does not compile all that Triton does"
    if config.swapped or not writes_c_by_tma(problem, config):
        return "roles store by TMA, in tiles that are not swapped"
    if (config.block_m, config.num_warps) != (_ROLE_ROWS, _ROLE_WARPS) or config.num_stages < 2 or config.block_k > 64:
        return f"roles have {_ROLE_WARPS} warps that multiply, tiles of {_ROLE_ROWS} rows and 64 of k, and two stages"
    if config.columns > 256 or 0 < config.rest_n < 16 or (e.gated and e.gradient and config.columns > 128):
        return "roles have tiles of up to 256 columns, 128 for two gradients, and a rest of at least 16"
    if config.alternating and not (config.persistent and _may_alternate(problem, config)):
        return f"warpgroups alternate between tiles of one chunk, with {_MOST_ALTERNATING} sums a thread at most"
    if config.residents > 1 or config.parallel_chunks not in ("", "gathered"):
        return "roles have an SM to themselves; chunks are gathered or follow one another"
    if accumulation(problem, config) not in ("one", "registers", "gathered"):
        return "with roles finished chunks wait in registers"
    most = _REGISTERS_BESIDE if e == NOTHING else _REGISTERS
    if problem.chunks > 1 and _sums(config) > most:
        return f"with roles a thread has at most {most} sums of a chunk here"
    return ""


def _may_alternate(problem: Problem, config: Config) -> bool:
    """Whether a warpgroup has registers for the sums of a whole tile."""
    e, sums = problem.epilogue, _sums(replace(config, alternating=True))
    return problem.chunks <= 1 and sums <= _MOST_ALTERNATING and not (e.gated and e.gradient)


def _illegal_order(problem: Problem, config: Config) -> str:
    """The rule that the order of tiles and chunks breaks: which run at a time, and which wait for which."""
    if (config.kernel == "stream") > config.persistent or config.pdl * config.persistent:
        return "stream is persistent, and nothing persistent launches early"
    if config.balanced and not _may_balance(problem, config):
        return "a balanced grid is persistent: roles, or a stream of tiles of one sum each"
    if config.parallel_chunks in ("queued", "gathered") and config.persistent:
        return "programs that wait for other chunks are not persistent"
    if config.parallel_chunks == "gathered" and problem.chunks > _MOST_GATHERED:
        return f"at most {_MOST_GATHERED} chunks are gathered"
    most, with_rest = _gathered(problem, config), config.rest_n > 0 and config.kernel != "roles"
    if config.parallel_chunks == "gathered" and (with_rest or _sums(config) > most):
        return f"chunks are gathered in tiles without a rest, here of at most {most} sums per thread"
    if config.waits and not sm(problem.arch):
        return "programs wait for each other on NVIDIA GPUs alone"
    if accumulation(problem, config) == "scratch" and not (config.persistent or config.parallel_chunks):
        return "finished chunks that wait in scratch memory need a persistent grid"
    if accumulation(problem, config) == "scratch" and _sums(config, narrow=True) < _LEAST_REWRITTEN:
        return f"sums that are added to in scratch memory are at least {_LEAST_REWRITTEN} per thread: none has copies"
    if config.parallel_chunks and (problem.chunks < 2 or problem.batch > 1):
        return "parallel chunks need two chunks or more, and no batch"
    return ""


def _sums(config: Config, narrow: bool = False) -> int:
    """Sums of a thread; narrow: in the narrower of a tile's two parts."""
    columns = config.rest_n or config.block_n if narrow else config.columns
    return config.block_m * columns // (32 * config.num_warps) * (ROLE_GROUPS if config.alternating else 1)


def _gathered(problem: Problem, config: Config) -> int:
    """The most sums of a thread that adds other programs' chunks: if there is one other, it needs no more registers."""
    if config.kernel == "roles":
        return _REGISTERS_BESIDE
    return _REGISTERS if problem.chunks > 2 or problem.accumulate else 2 * _REGISTERS


def accumulation(problem: Problem, config: Config) -> Accumulation:
    """Where a tile's finished chunks wait for the next."""
    if problem.chunks <= 1:
        return "one"
    if config.parallel_chunks in ("partials", "gathered"):
        return config.parallel_chunks
    beside = config.kernel == "roles" or (config.rest_n and config.num_warps == 8)
    room = _REGISTERS_BESIDE if beside else _REGISTERS
    fits = _sums(config) <= room and config.num_warps <= 8  # of more warps a thread has too few registers
    if fits and not (problem.accumulate or config.parallel_chunks):
        return "registers"
    return "in place" if problem.out_dtype == "float32" and problem.epilogue == NOTHING else "scratch"


def workspace(problem: Problem, config: Config) -> int:
    """Bytes of scratch memory: finished chunks, then the halves of A and of B."""
    return halves_at(problem, config)[-1] if config.split else chunk_bytes(problem, config)


def halves_at(problem: Problem, config: Config) -> tuple[int, int, int]:
    """Where the halves of A and of B begin in scratch memory, and where they end, in bytes."""
    begin = _aligned(chunk_bytes(problem, config))
    middle = begin + _aligned(_halves_bytes(problem, problem.m) * config.splits("a"))
    return begin, middle, middle + _aligned(_halves_bytes(problem, problem.n) * config.splits("b"))


def split_bytes(problem: Problem, config: Config) -> int:
    """Bytes for halves."""
    begin, _, end = halves_at(problem, config)
    return end - begin


def _halves_bytes(problem: Problem, rows: int) -> int:
    return 2 * rows * halves_ld(problem) * ITEMSIZE[problem.dtype]


def _aligned(size: int) -> int:
    return -(-size // _MAP_ALIGNMENT) * _MAP_ALIGNMENT


def halves_ld(problem: Problem) -> int:
    """Elements from one row of a half to the next: TMA reads rows of 16-byte multiples."""
    return -(-problem.k // 4) * 4


def as_read(problem: Problem, config: Config) -> Problem:
    """The problem as the product reads it: operands that a pass has split are aligned, and contiguous along k."""
    if not config.split:
        return problem
    ld = halves_ld(problem)
    if config.splits("a"):
        problem = replace(problem, a_strides=(ld, 1), a_aligned=True)
    if config.splits("b"):
        problem = replace(problem, b_strides=(1, ld), b_aligned=True)
    return problem


def chunk_bytes(problem: Problem, config: Config) -> int:
    """Bytes for finished chunks."""
    kind, slots = accumulation(problem, config), programs(problem, config)
    if kind == "partials":
        return 4 * problem.chunks * problem.m * problem.n
    if config.parallel_chunks:
        slots //= problem.chunks
    if config.parallel_chunks == "gathered":
        slots *= problem.chunks - 1
    kept = 4 * config.block_m * config.columns if kind in ("scratch", "gathered") or config.balanced else 0
    kept *= 2 if config.balanced and kind == "registers" else 1  # the total, and the sum that is not finished
    flags = ROLE_GROUPS if config.kernel == "roles" else 1  # one of each warpgroup that gathers
    return slots * (kept + flags * _FLAG * config.waits)


def programs(problem: Problem, config: Config) -> int:
    tiles = tile_count(problem, config)
    return min(tiles, config.residents * problem.sm_count) if config.persistent else tiles


def tile_count(problem: Problem, config: Config) -> int:
    rows, columns = tile(problem, config)
    tiles = problem.batch * -(-problem.m // rows) * -(-problem.n // columns)
    return tiles * problem.chunks if config.parallel_chunks else tiles


def few_tiles(problem: Problem, config: Config) -> bool:
    """Whether its tiles leave the GPU idle, so that it is worth it to let a tile's chunks wait for one another."""
    return tile_count(problem, replace(config, parallel_chunks="")) < 2 * problem.sm_count


def balances(problem: Problem, config: Config) -> bool:
    """Whether it is worth balancing the grid: more than one wave of tiles, the last one not full."""
    tiles, at_once = tile_count(problem, config), config.residents * problem.sm_count
    return _may_balance(problem, config) and tiles > at_once and tiles % at_once > 0


def team(problem: Problem) -> int:
    """Programs of a balanced grid with roles that go from tile to tile together, so that they read the same operands
    at the same time: as many as divide the multiprocessors, up to 12."""
    return next(size for size in range(_LARGEST_TEAM, 0, -1) if problem.sm_count % size == 0)


def _may_balance(problem: Problem, config: Config) -> bool:
    """Whether the kernel can divide the last tiles among its programs."""
    e = problem.epilogue
    if config.kernel == "roles":  # where registers remain for the addresses of what is handed over, and in whole teams
        able = (e == NOTHING or config.alternating or _sums(config) < 128) and not (e.gated and e.gradient)
        able = able and not (config.alternating and config.rest_n and e != NOTHING)
        able = able and tile_count(problem, config) >= problem.sm_count
    else:
        able = config.kernel == "stream" and problem.chunks <= 1
    return able and config.persistent and not config.parallel_chunks


def tile(problem: Problem, config: Config) -> tuple[int, int]:
    """Rows and columns of C in a tile."""
    rows, columns = (config.columns, config.block_m) if config.swapped else (config.block_m, config.columns)
    return rows, columns // problem.weights


def tiles_move(problem: Problem, config: Config) -> bool:
    """Whether a ragged matrix's last tiles are moved inside: then some results are computed and stored twice, so
    nothing that is stored may be read, and no rows or columns be taken together."""
    e = problem.epilogue
    reads = problem.accumulate or accumulation(problem, config) == "in place" or e.beta or e.residual
    return not (reads or e.dropout or e.sums or "mask" in (e.saves, e.gradient))


def width(problem: Problem, config: Config) -> int:
    """Columns of a tile that are stored at once: not all of them if sums are read back from memory."""
    waited = config.parts == 1 and accumulation(problem, config) == "in place"
    columns = config.block_n if config.swapped else config.block_n // problem.weights
    return max(8, min(columns // (2 if waited else config.parts), config.rest_n or columns))


def warpgroups(config: Config) -> bool:
    """Whether its tiles are large enough for wgmma, the instructions of four warps."""
    return config.block_m >= 64 and config.num_warps >= 4


def _needs_transposing(problem: Problem) -> bool:
    """Whether wgmma needs an operand transposed first: in TF32 it reads only along k. mma does not."""
    return problem.number == "tf32" and problem.layout != "nt" and sm(problem.arch) >= 90


def reads_a_by_tma(problem: Problem, config: Config) -> bool:
    seen = as_read(problem, config)
    return _by_tma(problem, config, seen.a_strides, seen.a_aligned) and (
        config.splits("a") or _whole_vectors(problem, (problem.m, problem.k), seen.a_strides)
    )


def reads_b_by_tma(problem: Problem, config: Config) -> bool:
    # Two lie in one map, whose innermost axis is k.
    together = problem.weights == 1 or (problem.b_strides[0] == 1 and problem.up_near)
    seen = as_read(problem, config)
    return (
        together
        and _by_tma(problem, config, seen.b_strides, seen.b_aligned)
        and (config.splits("b") or _whole_vectors(problem, (problem.k, problem.n), seen.b_strides))
    )


def writes_c_by_tma(problem: Problem, config: Config) -> bool:
    """Whether C is stored by TMA: only where it is written once, by rows."""
    if config.swapped or problem.accumulate or accumulation(problem, config) in ("in place", "partials"):
        return False
    row, used = (size * ITEMSIZE[problem.out_dtype] for size in (problem.c_strides[0], problem.n))
    by_rows = problem.c_strides[1] == 1 and problem.c_aligned and row % 16 == 0 and used % 16 == 0 and row > 0
    return config.kernel != "pointer" and by_rows


def shared_memory(problem: Problem, config: Config) -> int:
    """Estimated bytes: the stages of both operands and, with TMA, the tile that is stored."""
    stages = max(1, config.num_stages)
    left, right = (config.splits("b"), config.splits("a"))[:: 1 if config.swapped else -1]
    tiles = config.block_m * (1 + left) + config.columns * (1 + right)
    operands = stages * tiles * config.block_k * ITEMSIZE[problem.dtype]
    part = config.block_m * width(problem, config)
    out = part * ITEMSIZE[problem.out_dtype] if writes_c_by_tma(problem, config) else 0
    if config.kernel == "stream" and not out:
        out += 4 * part  # sums on their way to memory, while the next operands are loaded
    if config.kernel == "roles":
        out = out * (ROLE_GROUPS if config.alternating else 1) + _BARRIERS
    e = problem.epilogue
    if config.kernel == "stream" and (e.residual or e.beta or e.aux or e.saves == "pre" or e.gradient):
        odd = not problem.read_aligned or any((stride or 0) % 16 for stride in problem.read_strides[: len(MATRICES)])
        # They are read an element at a time: the sums are transposed to match.
        wide = problem.reads_float32 or odd or e.aux or problem.keeps_float32
        out += part * (4 if wide else ITEMSIZE[problem.out_dtype])  # on the way to the registers
    if problem.number == "tf32" and config.kernel != "pointer" and warpgroups(config):
        # Operands are transposed, at most twice.
        transposed = config.block_m * (problem.a_strides[1] != 1) + config.columns * (problem.b_strides[0] != 1)
        out += 2 * transposed * config.block_k * ITEMSIZE[problem.dtype]
    return (operands + out) * config.residents


_SHARED_MEMORY = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "sm_103": 232_448, "gfx942": 65_536}
_LEAST_SHARED_MEMORY = 101_376  # sm_86, sm_89, sm_120


def fitted(problem: Problem, config: Config) -> Config:
    """Adapt a configuration to what the problem requires."""
    config = _with_legal_split(problem, config)
    by_tma = reads_a_by_tma(problem, config), reads_b_by_tma(problem, config)
    # Rows that TMA cannot read are read in pieces, each with an address in a register: smaller tiles.
    pieces = problem.tma and problem.batch == 1 and not problem.k_inner and sm(problem.arch) >= 90
    block_k, warps = min(config.block_k, 128 // ITEMSIZE[problem.dtype]), 2 if _needs_transposing(problem) else 4
    if config.kernel != "pointer" and not all(by_tma):
        kernel: Kernel = "tma" if any(by_tma) else "pointer"
        config = replace(config, kernel=kernel, rest_n=0, residents=1)
        if pieces:
            config = replace(
                config, block_m=64, block_n=min(config.block_n, 64), block_k=block_k, num_warps=warps, parts=1
            )  # fmt: skip
    elif config.kernel == "pointer" and pieces and problem.number not in _PINNED and not _vectors(problem):
        config = replace(
            config, block_m=min(config.block_m, 64), block_n=min(config.block_n, 64), block_k=block_k,
            num_warps=min(config.num_warps, warps),
        )  # fmt: skip
    config = replace(config, block_k=_PINNED.get(problem.number, config.block_k))
    if problem.weights > 1:
        config = replace(config, rest_n=0)
        if config.swapped:
            config = replace(config, block_m=max(config.block_m, 32))
        else:
            config = replace(config, block_n=max(config.block_n, 32))
    if problem.chunk:
        config = replace(config, block_k=min(config.block_k, problem.chunk & -problem.chunk))
    if config.parallel_chunks and (problem.chunks < 2 or problem.batch > 1):
        config = replace(config, parallel_chunks="")
    if config.parallel_chunks == "partials" and not problem.epilogue.plain:
        config = replace(config, parallel_chunks="gathered" if sm(problem.arch) else "")
    config = _with_legal_roles(problem, config) if config.kernel == "roles" else replace(config, alternating=False)
    wide = problem.dtype != problem.out_dtype and not problem.accumulate
    in_registers = problem.weights > 1 or (wide and problem.chunk == _WIDE_SUM)
    if in_registers and accumulation(problem, config) in ("in place", "scratch") and not config.parallel_chunks:
        config = Config(128, 128, config.block_k, 8, 4, "tma" if all(by_tma) else "pointer")  # chunks in registers
    if config.rest_n and accumulation(problem, config) in ("in place", "scratch"):  # too many sums wait for memory
        config = replace(config, rest_n=0)
    config = replace(config, balanced=config.balanced and _may_balance(problem, config))
    if accumulation(problem, config) == "scratch" and not config.parallel_chunks:
        config = replace(config, persistent=True, pdl=False)
    if problem.epilogue.sums and (problem.epilogue.gated or _needs_transposing(problem)):
        # Gradients and their sums: 32 of a thread at once where there are two, 64 where operands take registers too.
        at_once = (32 if problem.epilogue.gated else 64) * 32 * config.num_warps
        config = replace(config, parts=max(config.parts, config.block_m * config.block_n // at_once))
    if problem.epilogue.saves and problem.keeps_float32:
        at_once = 16 * 32 * config.num_warps // (ROLE_GROUPS if config.alternating else 1)  # 16 of a thread
        config = replace(config, parts=max(config.parts, config.block_m * config.block_n // at_once))
    while config.kernel == "stream" and config.parts < 4 and illegal(problem, config).startswith("takes"):
        config = replace(config, parts=2 * config.parts)  # store less at once, before using fewer stages
    while config.num_stages > 1 and illegal(problem, config).startswith("takes"):
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def _with_legal_roles(problem: Problem, config: Config) -> Config:
    """A narrower tile where chunks or gradients leave no registers; a stream where roles do not serve; else one wave of
    programs, or persistent ones."""
    config = replace(config, alternating=config.alternating and config.persistent and _may_alternate(problem, config))
    if _illegal_roles(problem, config):
        config = replace(config, block_n=min(config.block_n, 128), rest_n=0)
    if _illegal_roles(problem, config):
        config = replace(
            config, kernel="stream", persistent=True, pdl=False, parallel_chunks="", parts=2, alternating=False
        )
        return config
    persistent = not config.parallel_chunks and tile_count(problem, config) > problem.sm_count
    alternating = config.alternating and persistent
    e = problem.epilogue
    saves = config.balanced and e.saves == "pre" and not e.gated
    if alternating and (e.beta or e.residual or e.eager or (e.gradient and e.dropout) or saves):  # take registers too
        config = replace(config, parts=max(config.parts, 4))
    elif alternating and e.gradient:
        config = replace(config, parts=max(config.parts, 2))
    return replace(config, persistent=persistent, pdl=not persistent, alternating=alternating)


def _illegal_split(problem: Problem, config: Config) -> str:
    """The rule that operands split by a pass break, or empty."""
    if not config.split:
        return ""
    if problem.number != "tf32x3" or problem.weights > 1:
        return "split operands are those of one tf32x3 product"
    if not _has_maps(problem, config):
        return "halves are read by TMA"
    size = split_bytes(problem, config)
    return f"halves take {size} bytes, more than {HALVES}" if size > HALVES else ""


def _with_legal_split(problem: Problem, config: Config) -> Config:
    """Split in registers what no pass can split, with the same bits: both operands, or the larger one."""
    if not _illegal_split(problem, config):
        return config
    smaller = replace(config, split="a" if problem.m < problem.n else "b", rest_n=0)
    if config.split == "both" and not _illegal_split(problem, smaller):
        return smaller
    return replace(config, split="", rest_n=0)


def default(problem: Problem) -> Config:
    """The configuration without measurements: tiles that suit the problem on any architecture."""
    sums = problem.epilogue.sums
    if problem.number == "tf32x3" and problem.m > 128 and sm(problem.arch) == 90:
        split = Config(128, 128, 32, num_warps=8, num_stages=3, kernel="tma", parts=4, split="both")
        if not _illegal_split(problem, split):
            return split
    if problem.number in _PINNED:
        rows = 128 if problem.m > 128 and problem.number == "tf32x3" else 64 if problem.m > 32 or sums else 16
        return Config(rows, 64, _PINNED[problem.number], num_warps=8 if rows == 128 else 4, num_stages=2)
    if problem.m <= 16 and not sums:
        return Config(64, 16, 128 if problem.number == "half" else 64, num_warps=4, num_stages=3, swapped=True)
    if _needs_transposing(problem):
        return Config(64, 64, 32, num_warps=2, num_stages=4, kernel="tma")
    if problem.m <= 64:
        return Config(64, 64, 64 if problem.number == "half" else 32, num_warps=4, num_stages=3)
    return Config(128, 128, 64 if problem.number == "half" else 32, num_warps=8, num_stages=3, kernel="tma")


def _vectors(problem: Problem) -> bool:
    """Whether the rows of both operands can be read 16 bytes at a time, as TMA reads them."""
    by_tma = Config(64, 64, 32, 4, 1, "tma")
    operands = (problem.a_strides, problem.a_aligned), (problem.b_strides, problem.b_aligned)
    return all(_by_tma(problem, by_tma, *operand) for operand in operands)


def _by_tma(problem: Problem, config: Config, strides: tuple[int, int], aligned: bool) -> bool:
    """TMA reads rows of 16-byte multiples from an aligned address."""
    if not aligned or not _has_maps(problem, config):
        return False
    row = max(strides) * ITEMSIZE[problem.dtype]
    return min(strides) == 1 and row % 16 == 0 and row < 2**40


def _whole_vectors(problem: Problem, sizes: tuple[int, int], strides: tuple[int, int]) -> bool:
    """Whether rows end at a multiple of 16 bytes: with a part of a wider matrix that does not, the H200 reports an
    illegal instruction."""
    along = sizes[1] if strides[1] == 1 else sizes[0]
    return along * ITEMSIZE[problem.dtype] % 16 == 0


def _has_maps(problem: Problem, config: Config) -> bool:
    """Whether an operand can be read by TMA at all, if its rows allow it."""
    usable_here = config.kernel != "pointer" and problem.tma and sm(problem.arch) >= 90
    return usable_here and problem.batch == 1 and not problem.k_inner
