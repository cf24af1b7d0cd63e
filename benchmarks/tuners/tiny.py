"""Times the menu of the tiny kernels against torch.bmm, fits the model of times to them, and judges it.

The table has the fastest entry of every problem whose menu was measured; MODEL serves the others. Shapes of the bench's
"bmm random" cases stay out of both, so that those figures are of shapes that no rule was fitted on.
"""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from isogemm.bench import timer
from isogemm.bench.cases.tiny import unfitted_shapes
from isogemm.core.precision import of_cuda_products
from isogemm.core.tables import Table
from isogemm.tiny import configs, kernels, op
from isogemm.tiny import model as model_
from isogemm.tiny.configs import WIN, Problem
from isogemm.tuning.gemm import ARITHMETIC
from tuners import common

EDGES = (8, 16, 32, 48, 64)  # sizes that are timed
REPRESENTATIVES = {48: (42, 48)}
LAYOUTS = ("nn", "nt", "tn")
NUMBERS = {name: ARITHMETIC[name] for name in ("ieee", "tf32", "half")}
BATCHES = (512, 16384)
ENTRIES = {  # modelled: what won somewhere and loses little where the model is wrong. Shapes left out decided
    "ieee": ("registers", "dot", "whole square w1", "whole square w2"),
    "tf32": ("registers", "whole parts w2", "whole square w4"),
    "half": ("registers", "whole", "whole parts w1", "whole square w4"),
}
NEARNESS = 0.1  # weight of the coefficients' distance from those of an entry that was measured more often
CAUTION = 0.3  # of an entry's rms error, by which its modelled time is raised: a loss is worse than a missed gain
LEAST = 20  # measurements of an entry that is fitted


def problem(number: str, layout: str, batch: int, m: int, n: int, k: int, arch: str, sm_count: int) -> Problem:
    dtype, precision = NUMBERS[number]
    a = (m * k, k, 1) if layout[0] == "n" else (m * k, 1, m)
    b = (k * n, n, 1) if layout[1] == "n" else (k * n, 1, k)
    return Problem(batch, m, n, k, dtype, precision, a, b, arch=arch, sm_count=sm_count)


def precompile(job: tuple[str, str, int, int, int, int, str, int, str]) -> str:
    *place, kernel = job
    target = problem(*place)
    launch = kernels.describe_bmm(target, configs.choose(target, kernel))
    dtype = getattr(torch, target.dtype)
    try:
        launch.kernel.warmup(dtype, dtype, dtype, *launch.scalars, grid=(1,), **launch.constants, **launch.options)
    except Exception as error:
        return f"{target} {kernel}: {error}"
    return ""


def measure(target: Problem, names: list[str]) -> dict[str, float]:
    """Median microseconds of torch and of each kernel, inputs cold."""
    device = torch.device("cuda")
    dtype = getattr(torch, target.dtype)
    batch, m, n, k = target.batch, target.m, target.n, target.k
    sets = timer.rotations(dtype.itemsize * (m * k + k * n + m * n) * batch, device, most=48)
    a = torch.randn(sets, batch * m * k, device=device, dtype=dtype)
    b = torch.randn(sets, batch * k * n, device=device, dtype=dtype)
    out = torch.empty(sets, batch, m, n, device=device, dtype=dtype)
    operands = [
        (x.as_strided((batch, m, k), target.a_strides, x.storage_offset()),
         y.as_strided((batch, k, n), target.b_strides, y.storage_offset()), z)
        for x, y, z in zip(a, b, out, strict=True)
    ]  # fmt: skip
    variants = {"torch": [lambda x=x, y=y, z=z: torch.bmm(x, y, out=z) for x, y, z in operands]}
    exact = torch.matmul(operands[0][0][:64].double(), operands[0][1][:64].double())
    for name in names:
        plan = op.tiny_plan(target, configs.choose(target, name), device)

        def call(x, y, z, plan=plan):
            return plan.run((x, y), z)

        out[0].fill_(torch.nan)
        error = (call(*operands[0])[:64].double() - exact).abs().max().item()
        if not error <= 0.05 * math.sqrt(k):
            raise AssertionError(f"{name} {target}: error {error}")
        variants[name] = [lambda o=o, call=call: call(*o) for o in operands]
    with of_cuda_products(target.precision if target.dtype == "float32" else None):
        times = timer.measure(variants, device, repeats=4, warmup=1)
    return {name: median(raw) for name, raw in times.items()}


Samples = list[tuple[Problem, dict[str, float]]]  # microseconds of torch, the menu's entries and the best of all


def samples(rows: list[dict[str, Any]], arch: str) -> Samples:
    """The newest times of every problem; rows name a configuration by its entry or as it prints."""
    found: dict[Problem, dict[str, float]] = {}
    for row in rows:
        sizes = row["batch"], row["m"], row["n"], row["k"]
        place = problem(row["number"], row["layout"], *sizes, arch, sm_count=132)
        us = {_printed(name): time for name, time in row["us"].items()}
        us |= {_printed(name): us[entry] for entry, name in row.get("configs", {}).items()}
        named = {"torch": "torch"} | {entry: str(build(place)) for entry, build in configs.MENU.items()}
        times = {entry: us.get(entry, us.get(name)) for entry, name in named.items()}
        found.setdefault(place, {}).update({entry: time for entry, time in times.items() if time})
        if "configs" in row:
            found[place]["best"] = min(time for name, time in us.items() if name != "torch")
    return list(found.items())


def _printed(name: str) -> str:
    """A configuration as it prints now: rows of November 2026 also say that it has no loop and one stage."""
    return re.sub(r"(p\d+)x1 (w\d) s1", r"\1 \2", name)


def fit(measured: Samples, number: str) -> tuple[tuple[str, int, int, tuple[float, ...]], ...]:
    """Coefficients of torch.bmm and of every entry that was measured often enough."""
    priors = {entry: _fit_one(measured, number, entry) for entry in ("registers", "dot")}
    fitted = []
    for entry in ("torch", *ENTRIES[number]):
        prior = priors["dot"] if entry.startswith("whole") else None
        found = priors[entry] if entry in priors else _fit_one(measured, number, entry, prior)
        if found:
            raised = found.coefficients * (1 + (CAUTION * found.error if entry != "torch" else 0))
            fitted.append((entry, 0, 0, tuple(float(f"{c:.4g}") for c in raised.tolist())))
    return tuple(fitted)


class _Fitted(NamedTuple):
    coefficients: torch.Tensor
    sizes: torch.Tensor  # of the terms, over the microseconds: root mean squares
    error: float  # of log(us), root mean square


def _fit_one(measured: Samples, number: str, entry: str, prior: _Fitted | None = None) -> _Fitted | None:
    """Non-negative least squares of relative errors, near the coefficients of an entry that was measured more often."""
    own = [(place, us[entry]) for place, us in measured if configs.arithmetic(place) == number and entry in us]
    if len(own) < LEAST:
        return None
    terms = [model_.terms(place, configs.MENU[entry](place) if entry != "torch" else None) for place, _ in own]
    x = torch.tensor(terms, dtype=torch.float64) / torch.tensor([[us] for _, us in own], dtype=torch.float64)
    y = torch.ones(len(own), dtype=torch.float64)
    sizes = x.square().mean(0).sqrt().clamp(min=1e-30)
    rows, right = x, y
    if prior is not None:
        sizes = torch.maximum(sizes, prior.sizes)
        near = (NEARNESS * len(own)) ** 0.5 * sizes
        rows, right = torch.cat([x, torch.diag(near)]), torch.cat([y, near * prior.coefficients])
    found = _non_negative_least_squares(rows, right)
    return _Fitted(found, sizes, (x @ found).clamp(min=1e-9).log().square().mean().sqrt().item())


def _non_negative_least_squares(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The non-negative c with the least |x c - y|, by Lawson and Hanson's active sets."""
    scale = x.square().sum(0).sqrt().clamp(min=1e-30)
    gram, right = (x / scale).T @ (x / scale), (x / scale).T @ y
    found, free = torch.zeros_like(right), torch.zeros(len(right), dtype=torch.bool)
    for _ in range(10 * len(right)):
        gradient = (right - gram @ found).masked_fill(free, -1.0)
        if gradient.max() < 1e-9:
            break
        free[gradient.argmax()] = True
        while True:
            at = free.nonzero()[:, 0]
            solved = torch.zeros_like(found)
            solved[at] = torch.linalg.solve(gram[at][:, at] + 1e-10 * torch.eye(len(at), dtype=x.dtype), right[at])
            negative = at[solved[at] <= 0]
            if not len(negative):
                break
            step = (found[negative] / (found[negative] - solved[negative] + 1e-30)).min()
            found = found + step * (solved - found)
            free &= found > 1e-12
            found[~free] = 0.0
        found = solved
    return found / scale


def fitted_samples(rows: list[dict[str, Any]], arch: str) -> Samples:
    """The times that rules may be fitted to."""
    held_out = unfitted_shapes()
    return [(place, us) for place, us in samples(rows, arch) if (place.m, place.n, place.k) not in held_out]


def model(rows: list[dict[str, Any]], arch: str) -> dict[str, Any]:
    measured = fitted_samples(rows, arch)
    return {number: fitted for number in NUMBERS if (fitted := fit(measured, number))}


def tables(rows: list[dict[str, Any]], arch: str) -> dict[str, Table]:
    """The entries of problems whose menu was measured."""
    modelled = model(rows, arch)
    batches: dict[tuple[Any, ...], Samples] = {}
    for place, us in fitted_samples(rows, arch):
        if "best" in us:
            key = (configs.arithmetic(place), place.layout, place.m, place.n, place.k)
            batches.setdefault(key, []).append((place, us))
    return {"tiny": {key: _steps(sorted(some, key=_batch), modelled[key[0]]) for key, some in batches.items()}}


def _batch(sample: tuple[Problem, dict[str, float]]) -> int:
    return sample[0].batch


def _steps(measured: Samples, fitted: Any) -> tuple[tuple[int, str], ...]:
    """The best entry up to the middle of two batches, all of the bits that win over all; the model's in small ones."""
    number = configs.arithmetic(measured[0][0])
    groups: dict[str, list[str]] = {}
    for entry in configs.MENU:
        if all(entry in us for _, us in measured):
            groups.setdefault(configs.bits(number, entry), []).append(entry)

    def best(us: dict[str, float], group: str) -> str:
        return min(groups[group], key=us.__getitem__)

    gains = {group: math.prod(us["torch"] / us[best(us, group)] for _, us in measured) for group in groups}
    group = max(gains, key=gains.__getitem__)
    if gains[group] < WIN ** len(measured):
        return ((_ANY, ""),)
    chosen = [(place.batch, best(us, group)) for place, us in measured]
    if chosen[0][0] > 8 * min(configs.JUDGED):
        allowed = [each for each in fitted if each[0] == "torch" or configs.bits(number, each[0]) == group]
        free = [("torch", 0, 0, [10 * c for c in each[3]]) if each[0] == "torch" else each for each in allowed]
        chosen.insert(0, (chosen[0][0] // 64, configs.fastest(replace(measured[0][0], batch=1024), free)))
    steps: list[tuple[int, str]] = []
    for at, (batch, entry) in enumerate(chosen):
        most = round(math.sqrt(batch * chosen[at + 1][0])) if at + 1 < len(chosen) else _ANY
        if steps and steps[-1][1] == entry:
            steps.pop()
        steps.append((most, entry))
    return tuple(steps)


_ANY = 2**62  # batches


def report(rows: list[dict[str, Any]], arch: str) -> str:
    """What the model chooses for shapes left out of its fit: torch's time over the chosen one's, and over the best."""
    measured = [(place, us) for place, us in samples(rows, arch) if "best" in us]
    fitted = fitted_samples(rows, arch)
    gains: dict[str, list[tuple[float, float, Problem, str]]] = {number: [] for number in NUMBERS}
    for shape in sorted({(place.m, place.n, place.k) for place, _ in measured}):
        kept = [(place, us) for place, us in fitted if (place.m, place.n, place.k) != shape]
        models = {number: fit(kept, number) for number in NUMBERS}
        for place, us in measured:
            if (place.m, place.n, place.k) == shape:
                number = configs.arithmetic(place)
                entry = configs.fastest(place, models[number]) or "torch"
                gains[number].append((us["torch"] / us[entry], us["torch"] / us["best"], place, entry))
    held_out, lines = unfitted_shapes(), []
    for number, found in gains.items():
        for name, some in (
            ("all", found),
            ("batch <= 1024", [gain for gain in found if gain[2].batch <= 1024]),
            ("batch > 1024", [gain for gain in found if gain[2].batch > 1024]),
            ("never fitted", [gain for gain in found if (gain[2].m, gain[2].n, gain[2].k) in held_out]),
        ):
            if some:
                lines.append(f"{number:5} {name:14} {_summary(some)}")
        worst = sorted(found, key=lambda gain: gain[0] / gain[1])[:5]
        lines += [f"  {gain[2]}: {gain[3]} {gain[0]:.2f}x, best {gain[1]:.2f}x" for gain in worst]
    return "\n".join(lines)


def _summary(gains: list[tuple[float, float, Problem, str]]) -> str:
    chosen, best = (math.prod(gain[at] for gain in gains) ** (1 / len(gains)) for at in (0, 1))
    lost = sum(gain[0] < 1 for gain in gains)
    return (
        f"{len(gains):4} points: chosen {chosen:.2f}x, best {best:.2f}x of torch ({chosen / best:.3f});"
        f" {lost} lose, least {min(gain[0] for gain in gains):.2f}x"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--numbers", nargs="+", choices=list(NUMBERS), default=list(NUMBERS))
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)


def points(options: argparse.Namespace) -> list[tuple[str, str, int, int, int, int]]:
    """Arithmetic, layout, batch, m, n, k."""
    sizes = [size for edge in EDGES for size in REPRESENTATIVES.get(edge, (edge,))]
    shapes = [shape for shape in product(sizes, sizes, sizes) if len({42, 48} & set(shape)) < 2]  # not both
    places = product(options.numbers, options.layouts, shapes, BATCHES)
    return [(number, layout, batch, *shape) for number, layout, shape, batch in places]


def sweep(options: argparse.Namespace, raw: Path) -> None:
    places = [(*point, options.arch, options.sm_count) for point in points(options)]
    jobs = [(*place, entry) for place in places for entry in ENTRIES[place[0]]]
    common.compile_ahead(precompile, jobs, options.workers)
    for place in places:
        number, layout, batch, m, n, k = place[:6]
        target = problem(*place)
        row = {"number": number, "layout": layout, "batch": batch, "m": m, "n": n, "k": k}
        row["us"] = measure(target, list(ENTRIES[number]))
        row["configs"] = {entry: str(configs.choose(target, entry)) for entry in ENTRIES[number]}
        common.append(raw, row)
