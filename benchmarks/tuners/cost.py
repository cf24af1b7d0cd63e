"""Fits the model of a GEMM configuration's time (`isogemm.gemm.selection`) to recorded times, and judges it
on weights that the fit has not seen."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isogemm.gemm import selection
from isogemm.gemm.configs import Config, Problem
from isogemm.gemm.selection import Measured

Times = Mapping[Config, float]  # of one point, us
Array = NDArray[np.float64]
Weight = tuple[int, int]
Choose = Callable[["Sample"], Config | None]
Rule = Callable[[Collection["Sample"]], Choose]

_START = np.log([2, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.25, 1, 1, 1, 0.7])  # about what an H200 has
_SHARED = 0.04  # how strongly a configuration's coefficients are drawn to those of all: they have few points each
_LEAST_GAIN = 0.02  # what a configuration adds to the menu, in points whose speed goes from nothing to the best
LEAST_TRIED = 4  # configurations measured at a point of which one may be called the best
_UNBOUNDED = 2048  # rows: who was measured at so many serves any number
_DIGITS = 3


@dataclass(frozen=True)
class Sample:
    """One recorded point."""

    problem: Problem
    weight: Weight
    times: Times


def model(samples: Iterable[Sample]) -> dict[tuple[str, str], tuple[Measured, ...]]:
    """The menu of each kind of problem, with fitted coefficients."""
    by_key: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        by_key[selection.model_key(sample.problem)].append(sample)
    return {key: _fitted(by_key[key]) for key in sorted(by_key)}


def modelled(known: Collection[Sample]) -> Choose:
    """Choose as the library does where a weight was not measured."""
    made = model(known)

    def choose(sample: Sample) -> Config | None:
        menu = made.get(selection.model_key(sample.problem), ())
        return selection.fastest(sample.problem, [each for each in menu if each.config in sample.times])

    return choose


def nearest(known: Collection[Sample]) -> Choose:
    """Choose what was fastest for the nearest weight, at the next larger number of tokens."""

    def choose(sample: Sample) -> Config | None:
        of_kind = [each for each in known if _kind(each) == _kind(sample)]
        if not of_kind:
            return None
        weight = min(
            (each.weight for each in of_kind), key=lambda weight: math.dist(*map(_logs, (weight, sample.weight)))
        )
        by_tokens = {_tokens(each): each.times for each in of_kind if each.weight == weight}
        larger = [tokens for tokens in by_tokens if tokens >= _tokens(sample)]
        times = by_tokens[min(larger) if larger else max(by_tokens)]
        return min(times, key=times.__getitem__)

    return choose


def report(samples: Collection[Sample]) -> str:
    """How fast the choices for weights that were never seen are, as a table in Markdown: best time over chosen time."""
    chosen = [(judge(samples), "the model"), (judge(samples, nearest), "the nearest weight's best")]
    lines = ["| arithmetic, layout | choice | points | geomean | lowest | at 0.95 or more |"]
    lines.append("| :-- | :-- | --: | --: | --: | --: |")
    for key in sorted(chosen[0][0]):
        for judged, name in chosen:
            found = judged[key]
            mean, share = statistics.geometric_mean(found), sum(ratio >= 0.95 for ratio in found) / len(found)
            lines.append(f"| {', '.join(key)} | {name} | {len(found)} | {mean:.2f} | {min(found):.2f} | {share:.0%} |")
    return "\n".join(lines)


def judge(samples: Collection[Sample], rule: Rule = modelled) -> dict[tuple[str, str], list[float]]:
    """The best measured time over that of the configuration which a rule chooses, knowing all weights but this one.

    Without the points where that configuration was not measured, or few others.
    """
    judged = defaultdict(list)
    for weight in sorted({sample.weight for sample in samples}):
        choose = rule([sample for sample in samples if sample.weight != weight])
        for sample in samples:
            if sample.weight != weight or len(sample.times) < LEAST_TRIED:
                continue
            if (chosen := choose(sample)) in sample.times:
                ratio = min(sample.times.values()) / sample.times[chosen]
                judged[selection.model_key(sample.problem)].append(ratio)
    return judged


def _fitted(samples: Collection[Sample]) -> tuple[Measured, ...]:
    by_config: dict[Config, list[tuple[Problem, float]]] = defaultdict(list)
    for sample in samples:
        for config, us in sample.times.items():
            by_config[config].append((sample.problem, us))
    arrays = {
        config: (np.array([selection.terms(problem, config) for problem, _ in rows]), np.log([us for _, us in rows]))
        for config, rows in by_config.items()
    }
    shared = _fit(*map(np.concatenate, zip(*arrays.values(), strict=True)), _START, 1e-3)
    sizes = sorted({sample.problem.m for sample in samples})
    made = []
    for config in _menu(samples):
        measured = [problem.m for problem, _ in by_config[config]]
        below = [size for size in sizes if size < min(measured)]
        most = 0 if max(measured) >= min(_UNBOUNDED, sizes[-1]) else max(measured)
        coefficients = np.exp(_fit(*arrays[config], shared, _SHARED))
        several = {problem.chunks > 1 for problem, _ in by_config[config]}
        sums = "both" if len(several) > 1 else "several" if several == {True} else "one"
        made.append(Measured(config, below[-1] if below else 0, most, sums, tuple(map(_rounded, coefficients))))
    return tuple(made)


def _menu(samples: Collection[Sample]) -> list[Config]:
    """As few configurations as cover all points, those that help most first."""
    speeds = [{config: min(sample.times.values()) / us for config, us in sample.times.items()} for sample in samples]
    best, menu = [0.0] * len(speeds), list[Config]()
    while True:
        gains: dict[Config, float] = defaultdict(float)
        for reached, speed in zip(best, speeds, strict=True):
            for config, each in speed.items():
                gains[config] += max(0.0, each**4 - reached**4)
        config = max(sorted(gains, key=str), key=gains.__getitem__)
        if gains[config] < _LEAST_GAIN:
            return menu
        menu.append(config)
        best = [max(reached, speed.get(config, 0.0)) for reached, speed in zip(best, speeds, strict=True)]


def _fit(terms: Array, wanted: Array, start: Array, weight: float) -> Array:
    """Logarithms of coefficients, by Levenberg and Marquardt: least squares of log time, drawn to `start`."""
    found, damping = start.copy(), 1e-2
    least = _loss(found, terms, wanted, start, weight)
    for _ in range(60):
        parts = terms * np.exp(found)
        overlapped = np.sqrt((parts[:, selection.ADDED :] ** 2).sum(1))
        predicted = parts[:, : selection.ADDED].sum(1) + overlapped
        parts[:, selection.ADDED :] **= 2
        parts[:, selection.ADDED :] /= overlapped[:, None]
        slopes = parts / predicted[:, None]
        curvature = slopes.T @ slopes + weight * np.eye(len(found))
        gradient = slopes.T @ (np.log(predicted) - wanted) + weight * (found - start)
        before = least
        for _ in range(8):
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            tried = found - np.clip(step, -2, 2)
            loss = _loss(tried, terms, wanted, start, weight)
            if loss < least:
                found, least, damping = tried, loss, max(damping / 3, 1e-9)
                break
            damping *= 4
        if before - least <= 1e-7 * before:
            break
    return found


def _loss(found: Array, terms: Array, wanted: Array, start: Array, weight: float) -> float:
    parts = terms * np.exp(found)
    predicted = parts[:, : selection.ADDED].sum(1) + np.sqrt((parts[:, selection.ADDED :] ** 2).sum(1))
    return float(((np.log(predicted) - wanted) ** 2).sum() + weight * ((found - start) ** 2).sum())


def _kind(sample: Sample) -> tuple[str, str]:
    return sample.problem.number, sample.problem.kind


def _tokens(sample: Sample) -> int:
    return sample.problem.k if sample.problem.layout == "tn" else sample.problem.m


def _logs(weight: Weight) -> list[float]:
    return [math.log(size) for size in weight]


def _rounded(value: float) -> float:
    return round(float(value), _DIGITS - 1 - math.floor(math.log10(value)))
