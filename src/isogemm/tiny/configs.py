"""Which problems the tiny kernels serve, with which kernel and which tile. Pure: no device, no tensors.

The path depends on (m, n, k, number type, layout) alone, and a matrix's bits never depend on the batch around it. The
tile, warps and stages do not change bits and may depend on the batch. So may the kernel where both give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from isogemm.core import tables
from isogemm.core.problems import ITEMSIZE, layout_letter, next_power_of_two, power_of_two, sm
from isogemm.core.problems import unit as unit
from isogemm.core.problems import usable as usable
from isogemm.tiny import model

MAX_SIZE = 64
KERNELS = ("registers", "dot", "whole")

JUDGED = (300, 3000, 30000)  # batches over which the model compares with torch.bmm
JUDGED_SMS = 132  # of the GPU whose times were measured: the path depends on the matrices alone
WIN = 1.03  # below this a win is within the errors of measurement

DTYPES = tuple(ITEMSIZE)
K_STEP = 16  # the least k of tl.dot, to which k is padded
_MOST_OUTPUTS = 2048  # of a warp: more spill


@dataclass(frozen=True)
class Problem:
    """C[b] = A[b] B[b] for `batch` matrices: A [m, k], B [k, n], C [m, n] contiguous."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    precision: str  # of float32: ieee or tf32; ieee for the 16-bit types
    a_strides: tuple[int, int, int]  # batch, m, k; in elements, batch 0 where shared
    b_strides: tuple[int, int, int]  # batch, k, n
    a_alignment: int = 16  # bytes, of the address; 16 counts as aligned
    b_alignment: int = 16
    arch: str = "sm_90"
    sm_count: int = 132

    def __str__(self) -> str:
        number = self.dtype if self.dtype != "float32" else f"float32/{self.precision}"
        return f"[{self.batch}; {self.m},{self.n},{self.k}] {number} {self.layout}"

    @property
    def layout(self) -> str:
        """n or t for each operand as BLAS has it; x where no axis is contiguous."""
        return layout_letter(self.a_strides[2], self.a_strides[1]) + layout_letter(self.b_strides[2], self.b_strides[1])


@dataclass(frozen=True)
class RegistersConfig:
    """Each thread holds rows x (cols * vec) sums and reads its operands from L1; no shared memory."""

    rows: int
    cols: int
    vec: int  # adjacent columns, one vector load of B and store of C
    a_vec: int  # adjacent k in one load of A
    b_vec: int  # adjacent k in one load of B
    unroll: int  # k per iteration
    num_warps: int
    pdl: bool = False  # let the next kernel's launch overlap this one's end
    kernel: Literal["registers"] = "registers"

    def __str__(self) -> str:
        return (
            f"registers {self.rows}x{self.cols * self.vec} a{self.a_vec} b{self.b_vec}"
            f" u{self.unroll} w{self.num_warps}{' early' if self.pdl else ''}"
        )


@dataclass(frozen=True)
class DotConfig:
    """Each program computes one block_m x block_n tile of one matrix with tl.dot."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    pdl: bool = False
    kernel: Literal["dot"] = "dot"

    def __str__(self) -> str:
        return (
            f"dot {self.block_m}x{self.block_n}x{self.block_k}"
            f" w{self.num_warps} s{self.num_stages}{' early' if self.pdl else ''}"
        )


@dataclass(frozen=True)
class WholeConfig:
    """Each program computes whole matrices with tl.dot, in parts that are powers of two. All loads come first."""

    unit_m: int  # m is padded to a multiple of it
    unit_n: int
    block_k: int  # the longest part of k
    matrices: int  # at once
    num_warps: int
    ordered: bool = False  # by inline assembly: wait once, not for each load
    pdl: bool = False
    kernel: Literal["whole"] = "whole"

    def __str__(self) -> str:
        return (
            f"whole {self.unit_m}x{self.unit_n}x{self.block_k} p{self.matrices} w{self.num_warps}"
            f"{' ordered' if self.ordered else ''}{' early' if self.pdl else ''}"
        )


Config = RegistersConfig | DotConfig | WholeConfig


def eligible(problem: Problem) -> str:
    """Empty where the tiny kernels can serve; else the reason why not."""
    if problem.batch < 2:
        return f"batch is {problem.batch}"
    if max(problem.m, problem.n, problem.k) > MAX_SIZE:
        return f"m, n or k is above {MAX_SIZE}"
    if min(problem.m, problem.n, problem.k) < 1:
        return "an empty size"
    if problem.dtype not in DTYPES:
        return f"dtype {problem.dtype} is not one of {', '.join(DTYPES)}"
    return usable(problem.arch)


def gate(problem: Problem) -> str:
    """The entry of the menu that serves this problem, or empty where torch.bmm is faster.

    A measured problem's entry is in the table; others have the least modelled time. Entries with the same bits may
    serve different batches of the same matrices; whether torch does may not depend on the batch.
    """
    measured = tables.load("tiny", problem.arch)
    steps = measured.get((arithmetic(problem), problem.layout, problem.m, problem.n, problem.k))
    if steps:
        entry: str = tables.at(steps, problem.batch)
        return entry
    return fastest(problem, tables.load("tiny", problem.arch, "MODEL").get(arithmetic(problem), ()))


def choose(problem: Problem, entry: str) -> Config:
    """The configuration of an entry of the menu, or of a kernel by its rules, for an eligible problem."""
    config = MENU[entry](problem)
    reason = illegal(problem, config)
    if reason:
        raise ValueError(f"config {config} for problem {problem}: {reason}")
    return config


def fastest(problem: Problem, fitted: Sequence[tuple[str, int, int, Sequence[float]]]) -> str:
    """The entry of the least modelled time, among those with the bits that win over small and large batches."""
    if not fitted:  # nobody measured this kind of number
        return ""
    coefficients = {entry: found for entry, _, _, found in fitted}
    layouts = _measured_layouts(problem.layout)

    def microseconds(entry: str, batch: int, sm_count: int) -> list[float]:
        found = []
        for layout in layouts:
            place = _plain(problem, layout, batch, sm_count)
            config = None if entry == "torch" else MENU[entry](place)
            found.append(model.predicted(coefficients[entry], model.terms(place, config)))
        return found

    groups: dict[str, list[str]] = {}
    for entry in coefficients:
        if entry != "torch":
            groups.setdefault(bits(arithmetic(problem), entry), []).append(entry)
    gains = dict.fromkeys(groups, 1.0)
    for batch in JUDGED:
        torch = microseconds("torch", batch, JUDGED_SMS)
        for group, entries in groups.items():
            times = zip(*(microseconds(entry, batch, JUDGED_SMS) for entry in entries), strict=True)
            gains[group] *= min(theirs / min(ours) for theirs, ours in zip(torch, times, strict=True))
    group = max(gains, key=lambda group: gains[group])
    if gains[group] < WIN ** len(JUDGED):
        return ""
    return min(groups[group], key=lambda entry: max(microseconds(entry, problem.batch, problem.sm_count)))


def bits(number: str, entry: str) -> str:
    """Entries with the same name here give the same bits: all of ieee float32, else those that use tl.dot."""
    return "fma" if entry.startswith("registers") and number != "ieee" else "dot"


def _plain(problem: Problem, layout: str, batch: int, sm_count: int) -> Problem:
    """The same matrices one after another and aligned: the model knows no other addresses."""
    m, n, k = problem.m, problem.n, problem.k
    a = (m * k, k, 1) if layout[0] == "n" else (m * k, 1, m)
    b = (k * n, n, 1) if layout[1] == "n" else (k * n, 1, k)
    return Problem(batch, m, n, k, problem.dtype, problem.precision, a, b, arch=problem.arch, sm_count=sm_count)


def programs(problem: Problem, config: Config) -> int:
    if isinstance(config, DotConfig):
        return problem.batch * _ceil(problem.m, config.block_m) * _ceil(problem.n, config.block_n)
    if isinstance(config, WholeConfig):
        return _ceil(problem.batch, config.matrices)
    threads = _ceil(problem.m, config.rows) * _ceil(problem.n, config.cols * config.vec)
    return _ceil(problem.batch * threads, 32 * config.num_warps)


def illegal(problem: Problem, config: Config) -> str:
    """Empty where `config` computes `problem`; else the rule it breaks. The one statement of legality."""
    if config.num_warps not in (1, 2, 4, 8):
        return "num_warps is not 1, 2, 4 or 8"
    if isinstance(config, DotConfig):
        if config.block_k < K_STEP or not power_of_two(config.block_m, config.block_n, config.block_k):
            return f"blocks are powers of two, block_k at least {K_STEP}"
        if problem.k % K_STEP == 0 and problem.k % config.block_k:
            return "block_k pads a k that needs no padding: a zero's sign could depend on it"
        return ""
    if isinstance(config, WholeConfig):
        blocks = config.unit_m, config.unit_n, config.block_k
        if not power_of_two(*blocks, config.matrices) or max(blocks) > MAX_SIZE or config.block_k < K_STEP:
            return f"units, matrices and block_k are powers of two up to {MAX_SIZE}, block_k at least {K_STEP}"
        if config.ordered and not sm(problem.arch):
            return "ordered is NVIDIA's assembly"
        return ""
    if not power_of_two(config.vec, config.a_vec, config.b_vec) or max(config.a_vec, config.b_vec) > 4:
        return "vector widths are 1, 2 or 4"
    if problem.k % config.a_vec or problem.k % config.b_vec or config.unroll % _k_step(config):
        return "k and unroll are multiples of the vector widths"
    a_widest, b_widest, n_widest = vectors(problem)
    if config.a_vec > a_widest or config.b_vec > b_widest:
        return "an operand is not contiguous and aligned along k as its vector width needs"
    if config.vec > 1 and (config.b_vec > 1 or config.vec > n_widest):
        return "B is not contiguous and aligned along n as vec needs"
    return ""


def parts(size: int, unit: int, most: int = MAX_SIZE) -> tuple[tuple[int, int], ...]:
    """Start and length of an axis's parts, padded to a multiple of `unit`: powers of two up to `most`, descending."""
    found: list[tuple[int, int]] = []
    start, end = 0, _ceil(size, unit) * unit
    while start < end:
        length = min(most, 1 << ((end - start).bit_length() - 1))
        found.append((start, length))
        start += length
    return tuple(found)


def vectors(problem: Problem) -> tuple[int, int, int]:
    """The widest loads of A along k, of B along k, and of B along n. C, contiguous, can be stored as wide as B."""
    (a_batch, a_m, a_k), (b_batch, b_k, b_n) = problem.a_strides, problem.b_strides
    return (
        _vector(problem.k, a_k, (a_batch, a_m), problem.a_alignment, problem.dtype),
        _vector(problem.k, b_k, (b_batch, b_n), problem.b_alignment, problem.dtype),
        _vector(problem.n, b_n, (b_batch, b_k), problem.b_alignment, problem.dtype),
    )


def _registers(problem: Problem) -> Config:
    k = problem.k
    rows, cols, vec = _registers_tile(problem)
    while rows * cols > 1 and not _fills(problem, rows, cols * vec):
        rows, cols = (rows // 2, cols) if rows >= cols else (rows, cols // 2)
    a_vec, b_vec, _ = vectors(problem)
    b_vec = b_vec if vec == 1 else 1
    # A program of one warp has registers for all loads at once. Four fill the SM where a thread has little to do.
    many = _fills(problem, rows, cols * vec, warps=32)
    num_warps = 4 if k <= 4 or (many and rows * cols * vec * k < 64) else 1
    config = RegistersConfig(rows, cols, vec, a_vec, b_vec, _unroll(k, max(a_vec, b_vec)), num_warps)
    return with_pdl(problem, config)


def _registers_tile(problem: Problem) -> tuple[int, int, int]:
    """Rows, columns and vector width of a thread's tile where there are enough matrices."""
    m, n, k = problem.m, problem.n, problem.k
    _, along_k, vec = vectors(problem)
    if vec > 1:
        sums = 8 if m * n < 256 or n <= 8 or k <= 4 else 16
        rows, cols = (2, 2) if sums == 8 and vec == 2 else (sums // vec, 1)
    elif along_k == 1:
        rows, cols = (1, 1) if m * n < 64 else (4, 4)
    elif m * n < 64 or k <= 4:  # both operands along k: square tiles
        rows, cols = 2, 2
    elif m * n < 256 and k >= 32:
        rows, cols = 4, 8
    elif m * n * k < 32**3:
        rows, cols = 4, 4
    else:
        rows, cols = 8, 8
    return _at_most(rows, m), _at_most(cols, _ceil(n, vec)), vec


def _fills(problem: Problem, rows: int, columns: int, warps: int = 16) -> bool:
    """Whether threads with such tiles give every SM that many warps; 16 hide the latency of memory."""
    threads = problem.batch * _ceil(problem.m, rows) * _ceil(problem.n, columns)
    return threads >= 32 * warps * problem.sm_count


def _unroll(k: int, step: int) -> int:
    """Steps of k per iteration: all of a short k, else about 8, without a remainder where possible."""
    if k <= 16:
        return k
    whole = max((u for u in range(step, 11, step) if k % u == 0), default=1)
    return whole if whole >= 6 else 8


def _dot(problem: Problem) -> Config:
    m, n, k = problem.m, problem.n, problem.k
    block_m, block_n, block_k = next_power_of_two(m, 16), next_power_of_two(n, 8), K_STEP
    few, many = 4 * problem.sm_count, problem.batch > 16 * problem.sm_count
    if block_m == 64 and (k <= block_k or block_n == 8):  # a short loop over k: smaller tiles, less padding of m
        block_m = 16 if m <= 48 or 2 * problem.batch < few else 32
    if k == 64 and block_m * block_n <= 256:
        block_k = 64 if many else 32
    elif k == 64 and block_m * block_n == 4096:
        block_k = 32
    steps = _ceil(k, block_k)
    num_warps = max(1, block_m * block_n // (1024 if block_m <= block_n else 2048))
    num_stages = {1: 1, 2: 3 if many or block_m == 64 else 2, 3: 2 if many else 3, 4: 3}[steps]
    config = DotConfig(block_m, block_n, block_k, num_warps, num_stages)
    if programs(problem, config) * num_warps < few and block_m * block_n >= 1024 * num_warps:
        config = replace(config, num_warps=2 * num_warps)
    return with_pdl(problem, config)


def _whole(problem: Problem) -> Config:
    m, n, k = problem.m, problem.n, problem.k
    tensor_cores = arithmetic(problem) != "ieee"
    unit_m, unit_n = 16 if tensor_cores else 8, 8
    outputs = math.prod(sum(length for _, length in parts(*axis)) for axis in ((m, unit_m), (n, unit_n)))
    matrices = min(8, max(1, 512 // outputs))
    while matrices > 1 and problem.batch < 16 * problem.sm_count * matrices:
        matrices //= 2
    num_warps = 4 if outputs > 2048 or (problem.batch < 4 * problem.sm_count and outputs >= 512) else 1
    num_warps = 2 if num_warps == 1 and outputs >= 1024 else num_warps
    block_k = 64 if tensor_cores or k <= 16 else 16
    ordered = tensor_cores and sm(problem.arch) >= 80
    config = WholeConfig(unit_m, unit_n, block_k, matrices, num_warps, ordered=ordered)
    return with_pdl(problem, config)


def with_pdl(problem: Problem, config: Config) -> Config:
    """Use PDL in small grids: it saves 0.5 us each; in large ones waiting programs displace working ones."""
    return replace(config, pdl=sm(problem.arch) >= 90 and programs(problem, config) <= 16 * problem.sm_count)


def arithmetic(problem: Problem) -> str:
    """The kind of number in tables: ieee, tf32 or half."""
    return problem.precision if problem.dtype == "float32" else "half"


def _measured_layouts(layout: str) -> tuple[str, ...]:
    """tt and strided operands were not measured: nt and tn must both win."""
    return (layout,) if layout in ("nn", "nt", "tn") else ("nt", "tn")


def _vector(size: int, stride: int, others: tuple[int, ...], alignment: int, dtype: str) -> int:
    aligned = alignment // ITEMSIZE[dtype]
    return min(4, math.gcd(size, *others, aligned)) if stride == 1 and aligned else 1


def _k_step(config: RegistersConfig) -> int:
    return max(config.a_vec, config.b_vec)


def _at_most(tile: int, size: int) -> int:
    while tile > 1 and tile >= 2 * size:
        tile //= 2
    return tile


def _ceil(size: int, block: int) -> int:
    return -(-size // block)


def _blocks(square: bool, num_warps: int) -> Callable[[Problem], Config]:
    """Builds a WholeConfig of one matrix per program: one block of powers of two (square), or parts."""

    def build(problem: Problem) -> Config:
        tensor_cores = arithmetic(problem) != "ieee"
        sizes = (problem.m, 16), (problem.n, 8)
        unit_m, unit_n = (next_power_of_two(*size) if square else size[1] for size in sizes)
        outputs = _ceil(problem.m, unit_m) * unit_m * _ceil(problem.n, unit_n) * unit_n
        warps = max(num_warps, next_power_of_two(outputs, 1) // _MOST_OUTPUTS)
        ordered = tensor_cores and sm(problem.arch) >= 80
        config = WholeConfig(unit_m, unit_n, 64 if tensor_cores else 16, matrices=1, num_warps=warps, ordered=ordered)
        return with_pdl(problem, config)

    return build


def _early(problem: Problem) -> Config:
    """The tile of the rules, with PDL in any grid: one measured problem gains by it."""
    return replace(_registers(problem), pdl=sm(problem.arch) >= 90)


MENU: Mapping[str, Callable[[Problem], Config]] = {
    "registers": _registers,
    "registers early": _early,
    "dot": _dot,
    "whole": _whole,
    "whole parts w1": _blocks(False, 1),
    "whole parts w2": _blocks(False, 2),
    "whole parts w4": _blocks(False, 4),
    "whole square w1": _blocks(True, 1),
    "whole square w2": _blocks(True, 2),
    "whole square w4": _blocks(True, 4),
}
