"""Functions of rows, and that a row's bits depend on nothing but the row."""

import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

import torch

from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import with_layout


def map_rows(rows, change):
    return {name: change(each) for name, each in rows.items()}


def slice_rows(rows, first, last):
    return map_rows(rows, lambda each: each[first:last])


def join_rows(*parts, dim=0):
    return {name: torch.cat([part[name] for part in parts], dim) for name in parts[0]}


def count_rows(rows):
    return len(next(iter(rows.values())))


def garbage_rows(rows, count):
    """Rows of NaN, infinities, huge and ordinary numbers and zeros, in turn; a mask leaves nothing out."""

    def fill(each):
        if each.dtype == torch.bool:
            return torch.zeros(count, *each.shape[1:], dtype=torch.bool, device=each.device)
        kinds = (torch.nan, torch.inf, torch.finfo(each.dtype).max, 1.5, -torch.inf, 0.0)
        values = torch.tensor(kinds, dtype=each.dtype, device=each.device).repeat(count // len(kinds) + 1)[:count]
        return values.view(count, *(1,) * (each.dim() - 1)).repeat(1, *each.shape[1:])

    return map_rows(rows, fill)


def zero_rows(rows, count):
    return map_rows(rows, lambda each: torch.zeros(count, *each.shape[1:], dtype=each.dtype, device=each.device))


def random_cuts(count, seed, pieces):
    """Bounds of up to `pieces` contiguous pieces, at random."""
    inner = random.Random(seed).sample(range(1, count), min(pieces, count) - 1)
    return list(itertools.pairwise([0, *sorted(inner), count]))


class RowFunction(NamedTuple):
    """A function whose result has one row for each row of its arguments, and must depend on nothing else."""

    call: Callable  # rows -> tensor
    rows: dict
    what: str
    whole: torch.Tensor  # call(rows)
    grid: tuple[int, int] | None = None  # B, T where rows may also come as [B, T, ...]
    vectors: bool = False  # may also come as [...]
    row_layouts: tuple[str, ...] = ()  # of x that must not matter

    def assert_rows(self, rows, expected, what):
        assert_bitwise_equal(self.call(rows), expected, f"{self.what}: {what}")

    def grid_rows(self):
        return map_rows(self.rows, lambda each: each.unflatten(0, self.grid))

    def grid_whole(self):
        return self.whole.unflatten(0, self.grid)


def assert_batch(f, batches, positions):
    """Alone, in batches of every size, at every place, beside any neighbours, in any shape and strides."""
    count = count_rows(f.rows)
    f.assert_rows(f.rows, f.whole, "again")
    for i in {0, 1, count // 2, count - 1}:
        f.assert_rows(slice_rows(f.rows, i, i + 1), f.whole[i : i + 1], f"row {i} alone")
    for size in batches:
        if size < count:
            f.assert_rows(slice_rows(f.rows, 0, size), f.whole[:size], f"the first {size}")
            f.assert_rows(slice_rows(f.rows, count - size, count), f.whole[count - size :], f"the last {size}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(f.whole.device)
    f.assert_rows(map_rows(f.rows, lambda each: each[order]), f.whole[order], "permuted")
    for size in positions:
        for position in range(size) if size < 64 else (0, 1, size // 2, size - 1):
            row = position % count
            others = garbage_rows(f.rows, size - 1)
            rows = join_rows(
                slice_rows(others, 0, position),
                slice_rows(f.rows, row, row + 1),
                slice_rows(others, position, size - 1),
            )
            found = f.call(rows)[position]
            assert_bitwise_equal(found, f.whole[row], f"{f.what}: at {position} of {size}, the others garbage")
    sick, garbage = map_rows(f.rows, torch.clone), garbage_rows(f.rows, count)
    for name, each in sick.items():
        each[1::2] = garbage[name][1::2]
    assert_bitwise_equal(f.call(sick)[::2], f.whole[::2], f"{f.what}: every other row garbage")
    if f.grid:
        assert_bitwise_equal(f.call(f.grid_rows()), f.grid_whole(), f"{f.what}: as {list(f.grid)} rows")
        batch, tokens = f.grid
        repeated = map_rows(f.rows, lambda each: each[:tokens].expand(batch, *each[:tokens].shape))
        found = f.call(repeated)
        for at in range(batch):
            assert_bitwise_equal(found[at], f.whole[:tokens], f"{f.what}: expanded, at {at}")
    for layout in f.row_layouts:
        f.assert_rows(f.rows | {"x": with_layout(f.rows["x"], layout)}, f.whole, f"x {layout}")


def assert_padding(f):
    """Rows of garbage or zeros before and after, of a matrix and of every matrix in a batch."""
    count = count_rows(f.rows)
    for before, after in ((0, 1), (1, 0), (0, 63), (17, 3), (130, 65)):
        for kind in (garbage_rows, zero_rows):
            rows = join_rows(kind(f.rows, before), f.rows, kind(f.rows, after))
            found = f.call(rows)[before : before + count]
            assert_bitwise_equal(found, f.whole, f"{f.what}: {before} rows of {kind.__name__} before, {after} after")
    if f.grid:
        batch, tokens = f.grid
        for before, after in ((0, 3), (5, 0), (7, 64 - tokens % 64)):
            for kind in (garbage_rows, zero_rows):
                head, tail = (
                    map_rows(kind(f.rows, batch * max(pad, 1)), lambda each: each.unflatten(0, (batch, -1)))
                    for pad in (before, after)
                )
                head, tail = map_rows(head, lambda each: each[:, :before]), map_rows(tail, lambda each: each[:, :after])  # noqa: B023
                found = f.call(join_rows(head, f.grid_rows(), tail, dim=1))[:, before : before + tokens]
                what = f"{f.what}: sequences with {before} tokens of {kind.__name__} before, {after} after"
                assert_bitwise_equal(found, f.grid_whole(), what)


def assert_chunks(f):
    """In one call or several, cut at random: rows of a matrix, and tokens of a batch of sequences."""
    for seed, pieces in enumerate((2, 3, 5, 9)):
        cuts = random_cuts(count_rows(f.rows), seed, pieces)
        found = torch.cat([f.call(slice_rows(f.rows, first, last)) for first, last in cuts])
        assert_bitwise_equal(found, f.whole, f"{f.what}: in chunks {cuts}")
    if f.grid:
        for seed, pieces in enumerate((2, 3)):
            cuts = random_cuts(f.grid[1], seed, pieces)
            tokens = f.grid_rows()
            parts = [f.call(map_rows(tokens, lambda each: each[:, first:last])) for first, last in cuts]  # noqa: B023
            assert_bitwise_equal(torch.cat(parts, 1), f.grid_whole(), f"{f.what}: tokens in chunks {cuts}")


def assert_decode(f, most):
    """One row at a time, or one token of every sequence at a time, as all at once."""
    count = min(count_rows(f.rows), most)
    found = torch.cat([f.call(slice_rows(f.rows, i, i + 1)) for i in range(count)])
    assert_bitwise_equal(found, f.whole[:count], f"{f.what}: row by row")
    if f.vectors:
        found = torch.stack([f.call(map_rows(f.rows, lambda each: each[i])) for i in range(count)])  # noqa: B023
        assert_bitwise_equal(found, f.whole[:count], f"{f.what}: vector by vector")
    if f.grid:
        tokens, steps = f.grid_rows(), min(f.grid[1], most)
        parts = [f.call(map_rows(tokens, lambda each: each[:, i : i + 1])) for i in range(steps)]  # noqa: B023
        assert_bitwise_equal(torch.cat(parts, 1), f.grid_whole()[:, :steps], f"{f.what}: token by token")


def assert_micro_batches(f):
    """In equal parts, and in unequal ones, of rows or of whole sequences."""
    rows, whole = (f.grid_rows(), f.grid_whole()) if f.grid else (f.rows, f.whole)
    count = len(whole)
    parts = [[*range(0, count, size), count] for size in {1, 2, (count + 1) // 2, count}]
    parts += [[0, 1, count], [0, count - 1, count]]
    for bounds in parts:
        found = [f.call(slice_rows(rows, *ends)) for ends in itertools.pairwise(bounds)]
        assert_bitwise_equal(torch.cat(found), whole, f"{f.what}: micro-batches {bounds}")
