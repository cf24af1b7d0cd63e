"""The documents' tables of measurements, in Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from isogemm.bench import ceilings, summary
from isogemm.bench.store import Row, newest
from isogemm.bench.summary import cell, headline_cells, in_torchs_place, markdown, memory_text, ratio_cell
from isogemm.bench.views import FamilyView, number_type, view_of
from isogemm.training import report, results
from isogemm.training.results import Record

_SWAPPED = (("train", "wall", "training step"), ("decode", "host", "decoded token, host"))


def tables(rows: Iterable[Row], views: Iterable[FamilyView] = ()) -> dict[str, str]:
    """The tables by name, per family: `FAMILY-headline`, `-speedup`, `-bandwidth`, `-errors`, and `-PEER` (such as
    `gemm-fixed-tile`) for each variant beside isogemm and torch, unless `-speedup` has them; `-float32`, `-deferred`
    and `-steps` where they were measured. And `ceilings`.
    """
    latest, views = newest(rows), tuple(views)
    made: dict[str, str] = {}
    for family, mine in summary.by_family(latest).items():
        view = view_of(family, mine, views)
        for gpu, part in summary.by_gpu(mine).items():
            limits, measured_on = ceilings.read(latest, gpu), source(gpu, [row.env for row in part])
            parts = {
                "headline": headline(part, view, limits),
                "speedup": against(part, view) if view.against else speedup(part, view),
                "bandwidth": bandwidth(part, view, limits),
                "errors": errors(part, view),
            }
            if not view.against:
                parts |= {peer.replace(" ", "-"): speedup(part, view, peer) for peer in summary.peers(part)}
            if split := float32_by_tensor_cores(part):
                parts["float32"] = split
            if cost := deferred(part):
                parts["deferred"] = cost
            if view.steps:
                parts["steps"] = steps(part, view, limits)
            for name, text in parts.items():
                before = made.get(f"{family}-{name}")
                made[f"{family}-{name}"] = ("" if before is None else f"{before}\n") + f"{measured_on}\n\n{text}"
    measured = [row for row in latest if row.family == ceilings.FAMILY]
    if measured:
        made["ceilings"] = _ceilings(measured)
    return made


def float32_by_tensor_cores(rows: Sequence[Row]) -> str:
    """Times and errors of products in tf32x3 beside torch's in ieee; empty if there are none."""
    lines = [
        [
            f"{row.op}, {row.params['m']} x {row.params['n']} x {row.params['k']}",
            *(f"{row.us[name]:.1f}" for name in ("torch", "isogemm")),
            f"{row.speedup:.2f}x",
            *(f"{row.error[name]:.1e}" for name in ("torch", "isogemm")),
        ]
        for row in rows
        if row.params.get("precision") == "tf32x3"
    ]
    head = ["product, tokens x n x k", "torch ieee, us", "tf32x3, us", "speed-up", "error of ieee", "error of tf32x3"]
    return markdown(head, lines) if lines else ""


def headline(rows: Sequence[Row], view: FamilyView, limits: ceilings.Ceilings) -> str:
    """One line per group: speed-up over torch, the peers', bandwidth at the largest column, memory, CPU time."""
    head = ["", "torch's call", "points", "geomean", "min", "max"]
    head += [f"{view.peer_label(peer)}, geomean (min)" for peer in summary.peers(rows)]
    head += ["of copy bandwidth, median (range)", "peak memory", "CPU time per call"]
    lines = ([each.text for each in line] for line in headline_cells(rows, view, limits))
    return markdown(head, ([*line[:6], *line[7:]] for line in lines))


def speedup(rows: Sequence[Row], view: FamilyView, variant: str = "isogemm") -> str:
    """One table per group: a line per shape, a column per column value, speed-up over torch in the cells."""

    def table(group: Sequence[Row]) -> str:
        cells = {
            (view.shape_label(row.params), view.column_value(row.params)): f"{ratio:.2f}x"
            for row in group
            if (ratio := row.speedup_of(variant)) is not None
        }
        columns = summary.columns(group, view)
        head = [" x ".join(view.shape), *(f"{view.column} {column}".strip() for column in columns)]
        body = [
            [shape, *(cells.get((shape, column), "") for column in columns)] for shape in summary.shapes(group, view)
        ]
        return markdown(head, body)

    return _by_group((row for row in rows if variant in row.times_us), view, table)


def against(rows: Sequence[Row], view: FamilyView) -> str:
    """One table per group: a line per shape, a column per rival, isogemm's speed-up over it in the cells."""

    def table(group: Sequence[Row]) -> str:
        rivals = [name for name in ("torch", *summary.peers(group)) if any(name in row.times_us for row in group)]
        body = []
        for row in group:
            cells = (ratio_cell(in_torchs_place(row, rival).speedup).text for rival in rivals)
            body.append([view.shape_label(row.params), *cells])
        return markdown([" x ".join(view.shape), *map(view.peer_label, rivals)], body)

    return _by_group(rows, view, table)


def deferred(rows: Iterable[Row]) -> str:
    """The cost of deferring: CPU time of each variant, and the extra time per deferred operation."""
    body = []
    names = ("isogemm", "torch", "fused calls")
    for row in rows:
        if "deferred" not in row.info:
            continue
        cpu_us = [median((row.cpu_us or row.times_us)[name]) for name in names]
        extra = ((cpu_us[0] - other) / int(row.info["deferred"]) for other in cpu_us[1:])
        label = f"{row.info['torch call']}, {number_type(row.params)}"
        body.append([label, *(f"{us:.1f} us" for us in cpu_us), *(f"{us:.1f} us" for us in extra)])
    if not body:
        return ""
    head = ["CPU time", "autofuse", "plain code", "fused calls"]
    head += [f"more per deferred operation than {other}" for other in head[2:]]
    return markdown(head, body)


def steps(rows: Sequence[Row], view: FamilyView, limits: ceilings.Ceilings) -> str:
    """One table per group, a line per training step: times, speed-ups, memory, and the distance from its arithmetic."""

    def table(group: Sequence[Row]) -> str:
        call = group[0].info.get("torch call", "torch")
        ours = ("isogemm", "isogemm eager", "isogemm + compile")
        names = {name: name for name in ours} | {"torch": call, "torch eager": "torch eager"}
        head = [" x ".join(view.shape), *(f"{name}, ms" for name in names.values())]
        head += [f"over {call}" if variant == "isogemm" else f"{variant} over {call}" for variant in ours]
        head += ["over torch eager", "peak MiB", f"of {call}'s", "of torch eager's"]
        head += ["kept, bytes a token and layer", "arithmetic, ms", "times its arithmetic"]
        body = []
        for row in group:
            times = (summary.digits(row.us[name] / 1e3) if name in row.us else "" for name in names)
            ratios = [row.speedup_of(variant) for variant in ours] + [in_torchs_place(row, "torch eager").speedup]
            peak, kept = (row.info.get(f"isogemm {name}", "") for name in ("peak MiB", "kept bytes"))
            memory = peak, *(memory_text([row], rival) for rival in ("torch", "torch eager")), kept
            floor = limits.arithmetic_us(row)
            arithmetic = ("", "") if floor is None else (summary.digits(floor / 1e3), f"{row.best_us / floor:.1f}x")
            shown = (ratio_cell(ratio).text for ratio in ratios)
            body.append([view.shape_label(row.params), *times, *shown, *memory, *arithmetic])
        return markdown(head, body)

    return _by_group(rows, view, table)


def bandwidth(rows: Sequence[Row], view: FamilyView, limits: ceilings.Ceilings) -> str:
    """Fractions of copy bandwidth at the largest column: a line per shape, a column per group."""
    largest = max((view.column_value(row.params) for row in rows), key=summary.sort_key, default="")
    cells: dict[str, dict[str, str]] = {}
    for label, group in summary.by_group(rows, view).items():
        for row in group:
            reached = limits.bandwidth_fraction(row)
            if view.column_value(row.params) == largest and reached is not None:
                cells.setdefault(view.shape_label(row.params), {})[label] = f"{reached:.0%}"
    labels = list(dict.fromkeys(label for line in cells.values() for label in line))
    head = [f"{' x '.join(view.shape)}, {view.column} {largest}", *labels]
    return markdown(head, ([shape, *(line.get(label, "") for label in labels)] for shape, line in cells.items()))


def errors(rows: Sequence[Row], view: FamilyView) -> str:
    """One line per group: the largest error of each variant against fp64, as the family's check measures it."""
    groups = summary.by_group((row for row in rows if row.error), view)
    variants = list(dict.fromkeys(name for group in groups.values() for row in group for name in row.error))
    body = []
    for label, group in groups.items():
        largest = (max((row.error[name] for row in group if name in row.error), default=None) for name in variants)
        body.append([label, *(cell(each, ".1e").text for each in largest)])
    return markdown(["", *variants], body)


def training(runs: Iterable[Record]) -> dict[str, str]:
    """Tables by the name of a document's marker, `training-PRESET`."""
    made = {}
    for preset, compared in report.by_preset(runs).items():
        columns, lines = results.comparison(compared)
        made[f"training-{preset}"] = f"{report.source(compared)}\n\n{markdown(columns, lines)}"
    return made


def swapped_models(folder: Path) -> dict[str, str]:
    """`swapped-models`: by GPU, median times of the models that benchmarks/swap_causal_lm.py measured."""
    by_gpu: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*/swap/*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        by_gpu.setdefault(record["environment"]["gpu"], []).append(record)
    made = [
        f"{source(gpu, [each['environment'] for each in records])}\n\n{_swapped(records)}"
        for gpu, records in by_gpu.items()
    ]
    return {"swapped-models": "\n".join(made)} if made else {}


def source(gpu: str, environments: Sequence[Mapping[str, str]]) -> str:
    """The device, versions, commits and dates of measurements, in one line."""
    facts = [
        f"{name} {' and '.join(sorted({env[name] for env in environments}))}"
        for name in ("torch", "triton", "driver", "commit")
    ]
    dates = sorted({env["date"][:10] for env in environments})
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{gpu}: {', '.join([*facts, span])}."


def _by_group(rows: Iterable[Row], view: FamilyView, table: Callable[[Sequence[Row]], str]) -> str:
    """A table for each group, with its name above it."""
    return "\n".join(f"**{label}**\n\n{table(group)}" for label, group in summary.by_group(rows, view).items())


def _ceilings(rows: Sequence[Row]) -> str:
    limits = {gpu: ceilings.read(rows, gpu) for gpu in summary.by_gpu(rows)}
    numbers = list(dict.fromkeys(number for limit in limits.values() for number in limit.flops_per_s))
    head = ["", "copy, read + write", *(f"mm {number}" for number in numbers)]
    body = []
    for gpu, limit in limits.items():
        copy = "" if limit.bytes_per_s is None else f"{limit.bytes_per_s / 1e9:.0f} GB/s"
        rates = (limit.flops_per_s.get(number) for number in numbers)
        body.append([gpu, copy, *("" if rate is None else summary.rate_text(rate) for rate in rates)])
    return markdown(head, body)


def _swapped(records: list[dict[str, Any]]) -> str:
    head = [""]
    for *_, label in _SWAPPED:
        head += [f"{label}: stock, ms", "swapped, ms", "speed-up"]
    body = []
    for record in records:
        line = [record["model"]]
        for kind, part, _ in _SWAPPED:
            stock, swapped = (
                median(each[part] for each in record["ms"][f"{kind} {model}"]) for model in ("stock", "swapped")
            )
            line += [f"{stock:.1f}", f"{swapped:.1f}", f"{stock / swapped:.2f}x"]
        body.append(line)
    return markdown(head, body)
