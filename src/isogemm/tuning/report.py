"""What a tuning run measured and kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from isogemm.bench.summary import markdown
from isogemm.gemm.configs import Config
from isogemm.tuning.gemm import OTHER_BITS, Point

COLUMNS = ("weight", "kind", "tokens", "before, us", "after, us", "torch, us", "before / after", "torch / after")
TEXTS = 2  # of the columns, from the left


@dataclass(frozen=True)
class Row:
    """A point's times in microseconds per call, and the configs they are of."""

    point: Point
    before: Config  # served the point before
    after: Config  # serves it now; the same if nothing was clearly faster
    before_us: float | None  # None where it could not be measured
    after_us: float
    torch_us: float

    @property
    def gain(self) -> float | None:
        """Time before / time after."""
        return None if self.before_us is None else self.before_us / self.after_us

    @property
    def speedup(self) -> float:
        """torch's time / time after."""
        return self.torch_us / self.after_us

    @property
    def cells(self) -> list[str]:
        point, times = self.point, (self.before_us, self.after_us, self.torch_us)
        return [
            f"{point.n} x {point.k} {point.number}", point.kind, str(point.tokens),
            *("" if us is None else f"{us:.1f}" for us in times),
            *("" if ratio is None else f"{ratio:.2f}x" for ratio in (self.gain, self.speedup)),
        ]  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What `isogemm.tune` measured; prints as a table."""

    gpu: str
    rows: tuple[Row, ...]
    skipped: tuple[str, ...]  # configs and points that could not be measured, and configs with other bits
    unvisited: int  # points that were not reached
    path: Path | None  # of the file; None where nothing was kept

    @property
    def gain(self) -> float | None:
        """Geometric mean of the rows' gains; None without rows."""
        return _mean(row.gain for row in self.rows)

    @property
    def speedup(self) -> float | None:
        """Geometric mean of the rows' speed-ups over torch; None without rows."""
        return _mean(row.speedup for row in self.rows)

    @property
    def differing(self) -> tuple[str, ...]:
        """Configs whose bits differ from the canonical config's: the contract does not hold on this GPU."""
        return tuple(each for each in self.skipped if each.endswith(OTHER_BITS))

    @property
    def summary(self) -> Sequence[str]:
        """The run in a few lines."""
        changed = sum(row.before != row.after for row in self.rows)
        counts = f"{len(self.rows)} measured, {changed} faster now, {self.unvisited} not reached"
        lines = [f"points on {self.gpu}: {counts}"]
        if self.gain is not None and self.speedup is not None:
            lines.append(f"geometric mean speed-up: {self.gain:.2f}x over before, {self.speedup:.2f}x over torch")
        if self.skipped:
            lines.append(f"{len(self.skipped)} not counted, such as {self.skipped[0]}")
        if self.differing:
            lines.append(f"The contract does not hold here; run `isogemm verify`. Other bits: {self.differing[0]}")
        if self.path is not None:
            lines.append(f"kept in {self.path}")
        return lines

    def __str__(self) -> str:
        return "\n".join((markdown(COLUMNS, [row.cells for row in self.rows], texts=TEXTS), *self.summary))


def _mean(ratios: Iterable[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return geometric_mean(known) if known else None
