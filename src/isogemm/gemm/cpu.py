"""The CPU backend: torch's fp32 matmul, called so that a row's bits do not depend on the other rows.

torch.mm alone is not row-invariant: MKL splits K differently for other M, N and threads, and for few rows or columns it
sums in several lanes. With AVX-512 and few threads (up to 6 on an Intel CPU, 2 on an AMD one), all measured calls of
K <= 384 and at least 16 rows and columns are one ascending chain of fused multiply-adds from zero, for any height,
orientation, strides or alignment. So K is processed in steps of at most 384, whose chains are added, and fewer than 16
rows or columns are padded. Elsewhere (AVX2, more threads) bits depend on the height (number of rows) of a call, which
`_is_any_height` probes once. Then every call of a weight has one height, on x copied to one layout. Which height is
probed too: at some, bits also depend on a row's position (AVX2, 32 rows shared by three threads). 16-bit operands are
widened, a tile of the weight at a time: exact, and without bf16 units faster than torch's own product.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from contextlib import ContextDecorator, ExitStack
from typing import Any

import torch
from torch import Tensor

from isogemm.core.precision import overridden

_K_STEP = 384
_TOKEN_STEP = 64  # of dW; divides a chunk. Chains of 128 exceeded twice torch's error in 3 of 300 draws
_BIAS_STEP = 128  # of db
_LEAST = 16  # rows and columns of a call
_TRANSPOSED_BELOW = 64  # rows; with fewer, MKL is faster with the weight as the left operand
_MOST = 1024  # rows of a call
_FIXED = (32, 48, 64, 96, 128)  # rows of every call, where bits depend on the height; the first that is usable
_TILE = 1024  # columns of a 16-bit weight, widened at a time


class _Ieee(ContextDecorator):
    """Context and decorator: fp32 products in fp32, regardless of torch's setting, while any thread is inside.

    torch.set_float32_matmul_precision is overridden only where needed.
    """

    def __init__(self) -> None:
        self._lock, self._users, self._changes = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        with self._lock:
            if setting.fp32_precision not in ("none", "ieee"):
                self._changes.enter_context(overridden("mkldnn", "ieee"))
            self._users += 1

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._changes.close()


_ieee = _Ieee()


@torch.no_grad()
@_ieee
def product(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a [*, M, K] @ b [*, K, N] + bias [N], batch dimensions broadcast; fp32 sums, rounded once."""
    m, k = a.shape[-2:]
    n = b.shape[-1]
    batch = a.shape[:-2]
    if b.dim() > 2:
        batch = torch.broadcast_shapes(batch, b.shape[:-2])  # type: ignore[no-untyped-call]
    out = a.new_empty((*batch, m, n), dtype=out_dtype)
    if not out.numel():
        return out
    if b.dim() == 2 or b.shape[:-2].numel() == 1:
        if batch or b.dim() > 2:
            a, b = a.reshape(out.numel() // n, k), b.reshape(k, n)
        _multiply(a, b, bias, out.view(-1, n))
        return out
    a, b = a.expand(*batch, m, k), b.expand(*batch, k, n)
    for index in itertools.product(*map(range, batch)):
        _multiply(a[index], b[index], bias, out[index])
    return out


@torch.no_grad()
@_ieee
def weight_grad(grad: Tensor, x: Tensor, total: Tensor | None, dtype: torch.dtype, chunk: int) -> Tensor:
    """grad [T, N]^T @ x [T, K] in the chunked order: added to `total` (fp32 [N, K], in place), or in `dtype`."""
    tokens, n = grad.shape
    k = x.shape[1]
    sums = total
    step = min(_TOKEN_STEP, chunk)
    fixed = not _is_any_height(torch.get_num_threads())
    for first in range(0, tokens if n and k else 0, chunk):
        partial = grad.new_zeros((max(n, _LEAST), max(k, _LEAST)), dtype=torch.float32)
        end = min(first + chunk, tokens)
        for start in range(first, end, step):
            stop = min(start + step, end)
            # MKL fuses a single token into the sum; padded, it is a chain of its own.
            length = step if fixed else -((start - stop) // _LEAST) * _LEAST
            left = _widened(grad[start:stop], length, len(partial), copy=fixed)
            right = _widened(x[start:stop], length, partial.shape[1], copy=fixed)
            partial.addmm_(left.t(), right)
        sums = partial[:n, :k] if sums is None else sums.add_(partial[:n, :k])
    if sums is None:
        return grad.new_zeros((n, k), dtype=dtype)
    if total is not None:
        return sums
    is_padded = n < _LEAST or k < _LEAST  # a view of more memory, which should be freed
    return sums.to(dtype, memory_format=torch.contiguous_format, copy=is_padded)


@torch.no_grad()
@_ieee
def bias_grad(grad: Tensor, total: Tensor | None, dtype: torch.dtype, chunk: int) -> Tensor:
    """The sum of grad [T, N] over its tokens in the chunked order: added to `total` (fp32 [N]), or in `dtype`."""
    tokens, n = grad.shape
    sums = grad.new_zeros(n, dtype=torch.float32) if total is None else total
    step = min(_BIAS_STEP, chunk)
    for first in range(0, tokens, chunk):
        partial = grad.new_zeros(n, dtype=torch.float32)
        for start in range(first, min(first + chunk, tokens), step):
            partial += row_sums(grad[start : start + step], step)[0]
        sums += partial
    return sums.to(dtype) if total is None else sums


def row_sums(x: Tensor, height: int) -> Tensor:
    """The fp32 sums [ceil(T / height), N] of x [T, N] over blocks of rows, by halves: r and r + height / 2 first.

    Differentiable.
    """
    tokens, n = x.shape
    blocks = -(-tokens // height)
    rows = torch.nn.functional.pad(x.float(), (0, 0, 0, blocks * height - tokens)).view(blocks, height, n)
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]


def _multiply(x: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out [M, N] = x [M, K] @ b [K, N] + bias [N]; only K may be 0."""
    m, n = out.shape
    tile = n if b.dtype == torch.float32 else _TILE
    most, height = _MOST, 0
    if not _is_any_height(threads := torch.get_num_threads()):
        tile = _TILE
        most, height = _rows_and_height(threads, len(b), n)
    if m <= most and n <= tile:  # slicing would cost a small product more than the product
        return _multiply_tile(_padded(x, height), b, bias, out)
    for row in range(0, m, most):
        rows = _padded(x[row : row + most], height)
        for column in range(0, n, tile):
            columns = slice(column, column + tile)
            part = None if bias is None else bias[columns]
            _multiply_tile(rows, b[:, columns], part, out[row : row + most, columns])


def _multiply_tile(x: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`_multiply` for x in fp32, padded below, and a tile of b; K in steps."""
    rows, k = x.shape
    m, n = out.shape
    columns = max(n, _LEAST)
    own = rows < _TRANSPOSED_BELOW or n < columns or m < rows or out.dtype != torch.float32
    sums = _sums_like(x, columns) if own else out
    if k <= _K_STEP:
        torch.mm(x, _widened(b, k, columns), out=sums)
    else:
        step = _even_step(k)
        for start in range(0, k, step):
            panel = b[start : start + step]
            sums.addmm_(x[:, start : start + step], _widened(panel, len(panel), columns), beta=float(start > 0))
    result = sums if sums.shape == out.shape else sums[:m, :n]
    if bias is not None:
        result += bias
    if sums is not out:
        out.copy_(result)


def _even_step(k: int) -> int:
    """The step for as few steps of K as possible, about equal (short chains are accurate), a multiple of 32."""
    steps = -(-k // _K_STEP)
    return -(-k // (32 * steps)) * 32


def _padded(x: Tensor, height: int) -> Tensor:
    """x with the number of rows that a call needs."""
    return _widened(x, height or max(len(x), _LEAST), x.shape[1], copy=height > 0)


def _widened(x: Tensor, rows: int, columns: int, *, copy: bool = False) -> Tensor:
    """x in fp32, padded with zeros to [rows, columns]; x itself if nothing changes, unless `copy`."""
    if x.shape == (rows, columns) and not copy:
        return x if x.dtype == torch.float32 else x.float()
    wide = x.new_zeros((rows, columns), dtype=torch.float32)
    wide[: x.shape[0], : x.shape[1]].copy_(x)
    return wide


@functools.cache
def _is_any_height(threads: int) -> bool:
    """Whether a row's bits are the same in a call of any height."""
    normal = _normal()
    for columns in (_LEAST, 17, 33, 65, 256, 600):  # one more than a multiple, where a split among threads shows
        x, weight = normal(200, _K_STEP), normal(columns, _K_STEP)
        with torch.autocast("cpu", enabled=False):  # found once, also if the first call is under autocast
            low = torch.cat([torch.mm(weight, x[at : at + 20].t()).t() for at in range(0, 200, 20)])
            calls = [torch.mm(weight, x[:rows].t()).t() for rows in (_LEAST, 17, 33)]
            calls += [torch.mm(x[:rows], weight.t()) for rows in (_TRANSPOSED_BELOW, 65, 100, 200)]
        if not all(torch.equal(call, low[: len(call)]) for call in calls):
            return False
    return True


@functools.lru_cache(4096)
def _rows_and_height(threads: int, k: int, n: int) -> tuple[int, int]:
    """Rows computed per call, and the call's height, for a weight [k, n]; used where bits depend on the height.

    It is the first height at which a row's bits do not depend on its position. Where there is none, one row per call.
    """
    step = max(k, 1) if k <= _K_STEP else _even_step(k)
    depths = {min(step, k - start) for start in range(0, k, step)}
    widths = {max(min(_TILE, n - column), _LEAST) for column in range(0, n, _TILE)}
    for height in _FIXED:
        if all(_is_any_place(height, depth, width) for depth in depths for width in widths):
            return height, height
    return 1, _LEAST


def _is_any_place(height: int, depth: int, width: int) -> bool:
    """Whether a call gives equal rows of x equal results, for a weight in either layout."""
    normal = _normal()
    x = normal(1, depth).repeat(height, 1)
    sums = _sums_like(x, width)
    with torch.autocast("cpu", enabled=False):
        for b in (normal(width, depth).t(), normal(depth, width)):
            for beta in (0.0, 1.0):
                sums.addmm_(x, b, beta=beta)
                if not torch.equal(sums, sums[:1].expand_as(sums)):
                    return False
    return True


def _normal() -> Callable[..., Tensor]:
    """Return a function from a shape to normal numbers, the same in every process."""
    generator = torch.Generator("cpu").manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _sums_like(x: Tensor, columns: int) -> Tensor:
    """An empty [rows, columns] result for a product of x; stored transposed where x has few rows."""
    rows = len(x)
    return x.new_empty((columns, rows)).t() if rows < _TRANSPOSED_BELOW else x.new_empty((rows, columns))


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products of this dtype are summed, and their epilogue is computed."""
    return torch.promote_types(dtype, torch.float32)
