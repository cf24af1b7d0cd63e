"""Problems of the passes over a gradient's tokens: a bias gradient's sums, and an activation's derivative. Pure.

Their bits depend on chunks, which depend on nothing (`configs.BIAS_CHUNK`).
"""

from __future__ import annotations

from dataclasses import dataclass

from isogemm.core.problems import unit
from isogemm.epilogues.operands import Epilogue
from isogemm.gemm.configs import BIAS_CHUNK, WORKSPACE

BIAS_BLOCK_N, BIAS_BLOCK_T = 32, 64  # columns and tokens of a tile in the kernels; a bias gradient's bits depend on T
_SPLIT_CHUNKS = 3  # least number of chunks that a bias gradient sums in parallel
_SPLIT_COLUMNS = 8192  # from this many columns on, chunks are summed one after another
_FEW_PROGRAMS = 128  # about one a multiprocessor


@dataclass(frozen=True)
class BiasGradProblem:
    """The sum of a [t, n] gradient over its rows."""

    t: int
    n: int
    dtype: str
    out_dtype: str
    strides: tuple[int, int]  # t, n
    chunk: int
    t_inner: int = 0  # 0: t has one level
    t_outer: int = 0  # stride of the outer level
    out_stride: int = 1
    accumulate: bool = False
    aligned: bool = True  # its address is a multiple of 16 bytes
    out_aligned: bool = True
    arch: str = "sm_90"

    def __str__(self) -> str:
        return f"[{self.t},{self.n}] {self.dtype} chunk {self.chunk}" + " accumulated" * self.accumulate

    @property
    def chunks(self) -> int:
        return -(-self.t // self.chunk)

    @property
    def split(self) -> bool:
        """Whether chunks are summed in parallel and then added by a second launch, since there are few columns."""
        fits = 4 * self.chunks * self.n <= WORKSPACE
        return self.chunks >= _SPLIT_CHUNKS and self.n < _SPLIT_COLUMNS and fits

    @property
    def vectors(self) -> bool:
        """Whether a thread may read several neighbours of a row at once."""
        if self.strides[1] != 1 or self.t_outer % 16:
            return False
        return self.aligned and min(unit(self.n), unit(self.strides[0])) > 1

    @property
    def reach(self) -> int:
        """The largest offset, in elements."""
        outer = -(-self.t // self.t_inner) * self.t_outer if self.t_inner else 0
        rows = (self.t + self.chunk) * max(self.strides[0], 1)
        return outer + rows + self.n * max(self.strides[1], self.out_stride)


@dataclass(frozen=True)
class ActivationGradProblem:
    """dz [t, n] of a gradient with rows `stride` apart, and the sums of its chunks of rows."""

    t: int
    n: int
    dtype: str  # of dz
    epilogue: Epilogue
    stride: int
    sums: bool = False
    aligned: bool = True  # the gradient's address is a multiple of 16 bytes
    arch: str = "sm_90"

    def __str__(self) -> str:
        return f"[{self.t},{self.n}] {self.dtype} {self.epilogue.activation or 'dropout'}" + " + sums" * self.sums

    @property
    def chunk(self) -> int:
        """Rows of a program: with sums those of one sum."""
        return BIAS_CHUNK if self.sums else 2 * BIAS_BLOCK_T

    @property
    def block_n(self) -> int:
        """Columns of a program: fewer where SMs would be idle, or registers too few."""
        narrow, wide = BIAS_BLOCK_N, 2 * BIAS_BLOCK_N
        if self.epilogue.gated and self.dtype != "bfloat16":  # both factors are kept in float32
            return narrow
        return wide if -(-self.n // wide) * -(-self.t // self.chunk) > _FEW_PROGRAMS else narrow

    @property
    def vectors(self) -> bool:
        """Whether a thread may read several neighbours of a row at once."""
        return self.aligned and min(unit(self.n), unit(self.stride)) > 1

    @property
    def reach(self) -> int:
        return self.t * max(self.stride, 2 * self.n)
