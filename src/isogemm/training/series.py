"""A multivariate series: read from a CSV or synthetic, split in three parts, cut into windows."""

from __future__ import annotations

import csv
import ctypes
import hashlib
import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
from torch import Tensor

from isogemm.core.files import AnyPath

_DATE_FORMATS = ("%Y/%m/%d %H:%M", "%Y/%m/%d %H:%M:%S", "%Y/%m/%d")  # beside ISO 8601
_ABSENT = frozenset({"", "na", "n/a", "null", "none", "-"})
_CONSTANT = 1e-10  # a deviation, relative to the mean, that is rounding
_LARGEST = 1e16  # of a scaled value: a window's sum of squares is finite in float32
_DAY, _WEEK = 24, 168  # rows: the synthetic series is hourly


class SeriesError(ValueError):
    """Data that cannot be trained on; the message names the line and the column."""


@dataclass(frozen=True)
class Series:
    """Rows in order of time; `name` is the file's, or says how they were made."""

    name: str
    channels: tuple[str, ...]
    values: Tensor  # [rows, channels] float64, finite
    lines: Sequence[int] = ()  # of a file: where each row begins

    def place(self, row: int, channel: int) -> str:
        """The place of a value, for error messages."""
        line = f"line {self.lines[row]}" if self.lines else f"row {row + 1}"
        return f"{self.name}, {line}, column {self.channels[channel]!r}"

    @property
    def fingerprint(self) -> str:
        """A hash of the values: series with the same hash train alike."""
        values = self.values.contiguous()
        return hashlib.sha256(ctypes.string_at(values.data_ptr(), values.nbytes)).hexdigest()[:16]


def read_csv(path: AnyPath) -> Series:
    """Read a header, then a date and a number per channel in each line, as in the ETT files."""
    path = Path(path)
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:  # invalid bytes are no number
        return _Csv(path, file).series()


def synthetic(rows: int, channels: int, seed: int = 0) -> Series:
    """Make hourly channels, each with its own daily and weekly season, trend and noise."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(channels, generator=generator, dtype=torch.float64)

    hours = torch.arange(rows, dtype=torch.float64)[:, None]
    values = drawn(-5, 5) + drawn(-1, 1) * hours / rows
    for period, low, high in ((_DAY, 0.6, 1.4), (_DAY // 2, 0.1, 0.5), (_WEEK, 0.2, 0.8)):
        values = values + drawn(low, high) * torch.sin(2 * math.pi * (hours / period + drawn(0, 1)))
    noise = torch.randn(rows, channels, generator=generator, dtype=torch.float64)
    values = values + drawn(0.1, 0.4) * noise
    return Series(f"synthetic, seed {seed}", tuple(f"channel {index}" for index in range(channels)), values)


def synthetic_rows(train_windows: int, window: int) -> int:
    """Number of rows whose training part has this many windows."""
    return -(-(train_windows + window - 1) * 10 // 7)


@dataclass(frozen=True)
class Part:
    """The windows of a part: the row of the first one, and their number, one per row."""

    first: int
    count: int


class Windows(NamedTuple):
    """Scaled values and the windows of each part: `inputs` rows, then the `horizon` rows to forecast."""

    values: Tensor  # [channels, rows] float32
    inputs: int
    horizon: int
    train: Part
    val: Part
    test: Part
    mean: Tensor  # [channels] float64, of the training rows
    std: Tensor

    @property
    def all(self) -> Tensor:
        """[rows - inputs - horizon + 1, channels, inputs + horizon]: a view, window i begins at row i."""
        return self.values.unfold(1, self.inputs + self.horizon, 1).transpose(0, 1)

    def to(self, device: torch.device) -> Windows:
        return self._replace(values=self.values.to(device))


def cut(series: Series, inputs: int, horizon: int) -> Windows:
    """Split a series: 70% of the rows to train on, the last 20% to test, those between to validate.

    A validation or test window may begin in the part before, but what it forecasts is its own part's. Each channel is
    scaled by the mean and standard deviation of its training rows; one that is constant there is only shifted.
    SeriesError where there are too few rows, or a value so large that these or a window's squares overflow, or so far
    out that most of the others are one number beside it.
    """
    rows = len(series.values)
    parts = _parts(rows, inputs, horizon)
    for name, part in parts.items():
        if part.count < 1:
            needed = next(n for n in count(rows) if min(each.count for each in _parts(n, inputs, horizon).values()) > 0)
            raise SeriesError(
                f"{series.name}: too short: its {rows} rows leave no window of {inputs} + {horizon} rows in the "
                f"{name} part; {needed} rows would do"
            )
    trained = series.values[: rows * 7 // 10]
    mean, std = _scaling(trained)
    for wrong, reason in (
        (~(mean + std).isfinite(), "is too large: the channel's deviation overflows"),
        (_is_lost(trained, mean, std), "is so far from the channel's other rows that float32 cannot tell those apart"),
    ):
        for channel in wrong.nonzero()[:1, 0].tolist():
            values = trained[:, channel]
            row = int((values - values.median()).abs().argmax())
            raise SeriesError(f"{series.place(row, channel)}: {values[row]:g} {reason}")
    std = torch.where(std > _CONSTANT * mean.abs(), std, 1.0)
    scaled = ((series.values - mean) / std).float()
    for row, channel in (~(scaled.abs() < _LARGEST)).nonzero()[:1].tolist():
        raise SeriesError(
            f"{series.place(row, channel)}: {series.values[row, channel]:g} is out of range beside the training rows"
        )
    return Windows(scaled.T.contiguous(), inputs, horizon, **parts, mean=mean, std=std)


def _scaling(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each column; exact for constant columns, safe where squares under- or overflow."""
    mean = values[0] + (values - values[0]).mean(0)
    centred = values - mean
    _, exponent = torch.frexp(centred.abs().amax(0))
    return mean, torch.ldexp(torch.ldexp(centred, -exponent).square().mean(0).sqrt(), exponent)


def _is_lost(values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Find columns in which over half of the distinct values coincide when scaled to float32."""
    ordered = values.sort(0).values
    scaled = ((ordered - mean) / std).float()
    steps, left = ((each[1:] != each[:-1]).sum(0) for each in (ordered, scaled))
    return (std > _CONSTANT * mean.abs()) & (left < steps // 2)


def _parts(rows: int, inputs: int, horizon: int) -> dict[str, Part]:
    trained, tested = rows * 7 // 10, rows * 2 // 10
    return {
        "train": Part(0, trained - inputs - horizon + 1),
        "val": Part(trained - inputs, rows - tested - trained - horizon + 1),
        "test": Part(rows - tested - inputs, tested - horizon + 1),
    }


class _Csv:
    """A file being read: every error names the line and, where there is one, the column."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path, self._reader, self.line = path, csv.reader(file, strict=True), 0

    def refused(self, problem: object, column: str = "", line: int = 0) -> SeriesError:
        return SeriesError(f"{self.path}, line {line or self.line}{column and f', column {column}'}: {problem}")

    def lines(self) -> Iterator[list[str]]:
        """The cells of each line; `line` is its number, or that of the first line that quoted cells span."""
        following = 1
        try:
            for cells in self._reader:
                self.line, following = following, self._reader.line_num + 1
                yield cells
        except csv.Error as error:
            raise self.refused(error, line=following) from error

    def series(self) -> Series:
        lines = self.lines()
        header = next(lines, [])
        if not header:
            raise self.refused("empty; expected a header, then a date and numbers in each line", line=1)
        dates, *channels = self._header(header)
        values, numbers, before = array("d"), array("q"), None
        blank = 0  # a line without any cell: only at the end
        for cells in lines:
            if not cells:
                blank = blank or self.line
                continue
            if blank:
                raise self.refused("empty, though lines follow", line=blank)
            if len(cells) != len(channels) + 1:
                raise self.refused(f"{len(cells)} columns; expected {len(channels) + 1} as in the header")
            before = self._date(repr(dates), cells[0].strip(), before)
            values.extend(self._numbers(channels, cells[1:]))
            numbers.append(self.line)
        if not values:
            raise self.refused("no rows after the header", line=self.line + 1)
        rows = torch.frombuffer(values, dtype=torch.float64).view(-1, len(channels)).clone()
        return Series(str(self.path), tuple(channels), rows, numbers)

    def _header(self, cells: Sequence[str]) -> list[str]:
        names = [name.strip() for name in cells]
        if len(names) < 2:
            raise self.refused("no channels; expected a date column and others, separated by commas")
        for place, name in enumerate(names, 1):
            if not name:
                raise self.refused("without a name; expected a header", str(place))
            if name in names[: place - 1]:
                raise self.refused(f"{name!r} is the name of another one too", str(place))
        if all(_is_number(name) for name in names[1:]):
            raise self.refused("numbers where the header is expected")
        return names

    def _date(self, column: str, text: str, before: datetime | None) -> datetime:
        """Parse a date; it must be later than the one before."""
        date = _date(text)
        if date is None:
            problem = "is missing" if text.lower() in _ABSENT else f"{text!r} is no date such as 2016-07-01 00:00:00"
            raise self.refused(problem, column)
        if before is None:
            return date
        if (date.tzinfo is None) != (before.tzinfo is None):
            raise self.refused(f"{text!r}: an offset from UTC is expected in every line or in none", column)
        if date == before:
            raise self.refused(f"{text!r} is the date of the line before as well", column)
        if date < before:
            raise self.refused(f"{text!r} is before the line before; expected ascending dates", column)
        return date

    def _numbers(self, channels: Sequence[str], cells: Sequence[str]) -> list[float]:
        try:
            numbers = list(map(float, cells))
            if math.isfinite(sum(numbers)) and "_" not in "".join(cells):  # float() takes 1_000
                return numbers
        except ValueError:
            pass
        for channel, text in zip(channels, map(str.strip, cells), strict=True):
            if text.lower() in _ABSENT:
                raise self.refused("is missing", repr(channel))
            if "_" in text or not _is_number(text):
                raise self.refused(f"{text!r} is not a number", repr(channel))
            if not math.isfinite(float(text)):
                raise self.refused(f"{text!r} is not finite", repr(channel))
        return numbers


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _date(text: str) -> datetime | None:
    for form in ("", *_DATE_FORMATS):
        with suppress(ValueError):
            return datetime.strptime(text, form) if form else datetime.fromisoformat(text)
    return None
