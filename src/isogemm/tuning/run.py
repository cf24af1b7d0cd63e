"""A tuning run: measures one point after another and keeps the fastest config of each at once."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

import torch

from isogemm.bench.runner import Progress
from isogemm.core import device as devices
from isogemm.core import plan, tuned
from isogemm.gemm import configs, selection
from isogemm.gemm.configs import Config
from isogemm.tuning import gemm
from isogemm.tuning.gemm import Job, Measured, Point
from isogemm.tuning.report import Report, Row
from isogemm.tuning.weights import Weight
from isogemm.verify.parallel import process_count, retried_in_processes

TOKENS = (1, 4096, 64, 512, 16, 2048, 256, 8192, 128, 1024)  # most useful first: a run may end early
FEWEST_BACKWARD = 256  # least of TOKENS at which gradients are measured
# times the shortest predicted time; on weights that the model never saw, 0.995 of the best speed is within it
LIKELY = 1.3
FEWEST_LIKELY = 4  # where the model knows fewer configs for so many tokens, all are measured
GAIN = 1.015  # least speed-up for which a point's config is replaced: times vary by about as much

_PROCESS_BYTES = 2 << 30  # device memory of a process that compiles


def points(
    weights: Sequence[Weight], tokens: Sequence[int] | None, backward: bool, arch: str, sm_count: int, gpu: str
) -> list[Point]:
    """The points of a run, in its order: every weight at the first number of tokens, then at the next.

    tokens: None takes TOKENS.
    """
    if tokens is not None and (not tokens or not all(type(each) is int and each > 0 for each in tokens)):
        raise ValueError(f"tokens is {tokens!r}; expected numbers of tokens, each at least 1")
    return [
        Point(kind, each.number, count, each.n, each.k, arch, sm_count, gpu, half=each.half)
        for count in dict.fromkeys(TOKENS if tokens is None else tokens)
        for each in weights
        for kind in (*each.forward, *(each.backward if backward else ()))
        if tokens is not None or kind in each.forward or count >= FEWEST_BACKWARD
    ]


@dataclass
class Run:
    """Measures points until all are done or time is up. Whatever ends it, what was measured is kept."""

    points: Sequence[Point]
    measure: Callable[[Point, Sequence[Config]], Measured]
    precompile: Callable[[Sequence[Job]], object]
    seconds: float = math.inf
    progress: Progress = lambda done, total, step: None
    clock: Callable[[], float] = time.perf_counter
    rows: list[Row] = field(default_factory=list, init=False)
    skipped: list[str] = field(default_factory=list, init=False)
    path: Path | None = field(default=None, init=False)
    _visited: int = field(default=0, init=False)

    def run(self) -> Report:
        """Measure the points and report them. OSError, before measuring, if results could not be kept."""
        tuned.require_writable(self.points[0].gpu)
        end = self.clock() + self.seconds
        try:
            for point, chosen in self._prepared(end):
                if self.clock() >= end:
                    break
                self.progress(self._visited, len(self.points), str(point))
                self._visit(point, chosen)
                self._visited += 1
        finally:
            plan.clear_caches()  # this process's next calls choose again
        return self.report()

    def report(self) -> Report:
        """What was measured so far, weight by weight."""
        weights = list(dict.fromkeys(map(_weight, self.points)))

        def place(row: Row) -> tuple[int, int, int]:
            return weights.index(_weight(row.point)), gemm.KINDS.index(row.point.kind), row.point.tokens

        rows, left = sorted(self.rows, key=place), len(self.points) - self._visited
        return Report(self.points[0].gpu, tuple(rows), tuple(self.skipped), left, self.path)

    def _prepared(self, end: float) -> Iterator[tuple[Point, list[Config]]]:
        """Yield points with their compiled candidates; points with the same number of tokens are compiled together."""
        compiled: set[tuple[object, ...]] = set()
        for tokens, together in itertools.groupby(self.points, key=lambda point: point.tokens):
            chosen = {}
            for point in together:
                try:
                    chosen[point] = _candidates(point)
                except ValueError as error:  # nothing is legal
                    self.skipped.append(f"{point}: {error}")
                    self._visited += 1
            if self.clock() >= end:
                return
            jobs = {key: job for key, job in gemm.jobs(chosen).items() if key not in compiled}
            self.progress(self._visited, len(self.points), f"compiling {len(jobs)} kernels for {tokens} tokens")
            self.precompile(list(jobs.values()))
            compiled |= jobs.keys()
            yield from chosen.items()

    def _visit(self, point: Point, chosen: list[Config]) -> None:
        """Measure a point; keep the fastest config."""
        try:
            measured = self.measure(point, chosen)
        except Exception as error:  # whatever one point raises, the others are still measured
            self.skipped.append(f"{point}: {type(error).__name__}: {error}")
            return
        self.skipped += [f"{point}: {each}" for each in measured.differing]
        row = _row(point, chosen, measured)
        if row is None:
            self.skipped.append(f"{point}: no configuration could be measured")
            return
        self.rows.append(row)
        kept = {point.key: ((point.tokens, astuple(row.after)),)}
        self.path = tuned.keep("gemm", point.gpu, kept)


def on_current_gpu(points: Sequence[Point], seconds: float | None, progress: Progress) -> Run:
    """Make a run that measures on torch's current GPU."""
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds is {seconds}; expected a time above 0")
    index = torch.cuda.current_device()

    def precompile(jobs: Sequence[Job]) -> None:
        processes = process_count(len(jobs), torch.device("cuda", index), _PROCESS_BYTES)
        retried_in_processes(functools.partial(gemm.precompile, index=index), jobs, processes)

    return Run(points, gemm.Bench().measure, precompile, math.inf if seconds is None else seconds, progress)


def current_gpu() -> devices.DeviceFacts:
    """Return facts about torch's current GPU; RuntimeError if the kernels cannot run on it, or there is none."""
    if not torch.cuda.is_available():
        raise RuntimeError("isogemm.tune needs a GPU, and torch.cuda is not available here")
    facts = devices.facts(torch.device("cuda"))
    if reason := configs.usable(facts.arch):
        raise RuntimeError(f"isogemm.tune cannot serve {facts.name}: {reason}")
    return facts


def _weight(point: Point) -> tuple[str, int, int]:
    return point.number, point.n, point.k


def _candidates(point: Point) -> list[Config]:
    """The legal configs to measure; the first serves the point now.

    Where the model knows such problems, those that it predicts to be nearly the fastest: a third of all, or fewer.
    """
    problem = point.problem
    modelled = selection.within(LIKELY, problem, selection.menu(problem))
    likely = [configs.fitted(problem, config) for config in modelled]
    if len(likely) < FEWEST_LIKELY:
        likely += (*selection.candidates(problem), *gemm.candidates(point))
    return list(dict.fromkeys((selection.choose(problem).config, *likely)))


def _row(point: Point, chosen: Sequence[Config], measured: Measured) -> Row | None:
    """Make the report's row: times before and after, and the config to keep; None if no config could be measured."""
    before, us = chosen[0], measured.us
    times = {config: us[str(config)] for config in chosen if str(config) in us}
    if not times:
        return None
    after = min(times, key=times.__getitem__)
    if before in times and times[before] <= GAIN * times[after]:
        after = before
    return Row(point, before, after, times.get(before), times[after], us["torch"])
