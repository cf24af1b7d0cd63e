"""Times the launches of a fused encoder layer, attention's included, one by one.

A point is one launch at one width. Each of its candidates replaces one config while the other launches keep theirs, and
the passes that have the launch are timed as a CUDA graph: launches overlap, so that one alone would tell less. Row sums
and attention's blocks may round in an order that depends on the tile. So a candidate counts only where y, dx and every
gradient keep their bits; --any-bits takes faster ones all the same.

The formulation is how many of the row kernels are by warpgroups: time it again once their configs are in the table.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from isogemm.bench import timer
from isogemm.core import tables as loader
from isogemm.core.tables import Table
from isogemm.encoder import configs
from isogemm.encoder.attention import configs as attention_configs
from isogemm.encoder.buffers import ExtraInputs
from isogemm.encoder.configs import Configs, Layer, ProjectConfig, RowConfig, WarpgroupConfig, WarpgroupConfigs
from isogemm.encoder.plan import IncomingGrads, Plan, SavedForBackward
from isogemm.tuning.gemm import ARITHMETIC
from isogemm.verify.compare import compare_bits
from isogemm.verify.encoder_reference import EncoderShape, encoder_parameters, encoder_tensors
from isogemm.verify.inputs import make_data
from tuners import common

NUMBERS = ("tf32", "half", "ieee")
WIDTHS = (16, 32, 64, 128, 256)  # padded d_model: the table's steps
HEADS = (32, 64, 128, 256)  # padded head: those of attention's table
GROUP_WIDTHS = (64, 128)  # d_model of the kernels by warpgroups
SHAPES = {  # what is timed for a width by tiles; of 16 and 32, sizes that fragments do not serve
    16: EncoderShape(896, 42, 12, 3, 120),
    32: EncoderShape(896, 42, 24, 3, 120),
    64: EncoderShape(1280, 5, 64, 4, 256),
    128: EncoderShape(896, 42, 128, 16, 256),
    256: EncoderShape(448, 42, 256, 16, 512),
}
ROWS = ("project", "feedforward", "feedforward_backward", "input_grad")
GROUPS = tuple(f"{name} warpgroup" for name in ROWS)
_PASS = {"attention": "forward", "attention_backward": "backward"}  # their names in attention's table
ATTENTION = tuple(_PASS)
FORMULATION = "formulation"
LAUNCHES = (*ROWS, "weight_grads", *GROUPS, FORMULATION, *ATTENTION)
WIN = 1.015  # below this a candidate does not replace what is there
BATCH = 16  # candidates that are timed together: each keeps a layer's memory
_EPS = 1e-5
_Values = tuple[int, ...]


@dataclass(frozen=True)
class Point:
    launch: str
    number: str
    width: int  # of attention the head's

    def __str__(self) -> str:
        return f"{self.launch} {self.number} {self.width}: {len(candidates(self))} candidates"

    @property
    def shape(self) -> EncoderShape:
        if self.launch in ATTENTION:
            d_model = max(64, self.width)
            return EncoderShape(256, 64, d_model, d_model // self.width, 256)
        return SHAPES[self.width]

    @property
    def passes(self) -> str:
        """Which of the layer's passes have the launch."""
        if self.launch.startswith(("project", FORMULATION)):
            return "both"
        backward = "backward" in self.launch or self.launch.startswith(("input_grad", "weight_grads"))
        return "backward" if backward else "forward"

    @property
    def groups(self) -> tuple[int, ...]:
        """How many of ROWS may be by warpgroups: in TF32 weights are prepared for all four or for none."""
        if self.number == "ieee" or self.width not in GROUP_WIDTHS:
            return (0,)
        return (0, 1, 2) if self.number == "half" else (0, 4)

    def layer(self, arch: str) -> Layer:
        dtype, precision = ARITHMETIC[self.number]
        sm = int(arch.removeprefix("sm_")) if arch.startswith("sm_") else 0
        return Layer(
            *self.shape, dtype, dtype, dtype, precision if dtype == "float32" else "", "layer_norm", False, "gelu",
            False, "", (0, 0), True, supports_pdl=sm >= 90, mma=sm >= 80, wgmma=sm == 90, arch=arch,
        )  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """Configs of a layer's launches; None: attention's are the table's."""

    tiles: Configs
    groups: WarpgroupConfigs
    attention: attention_configs.DotConfig | None = None
    attention_backward: attention_configs.DotConfig | None = None


def points(options: argparse.Namespace) -> list[Point]:
    """Those of the row kernels and the weights' gradients by width, then those of attention by head."""
    rows = [each for each in options.launches if each not in ATTENTION]
    if options.arch != "sm_90":  # which alone has the warpgroups' instructions
        rows = [each for each in rows if each not in (*GROUPS, FORMULATION)]
    heads = [each for each in options.launches if each in ATTENTION]
    places = [*itertools.product(rows, options.numbers, options.widths)]
    places += itertools.product(heads, options.numbers, HEADS)
    return [point for point in itertools.starmap(Point, places) if candidates(point)]


def candidates(point: Point) -> list[_Values]:
    """Field values of every config that a launch may have; of the formulation, how many of ROWS are by warpgroups."""
    half = point.number == "half"
    launch = point.launch.removesuffix(" warpgroup")
    if point.launch == FORMULATION:
        return [(count,) for count in point.groups] if len(point.groups) > 1 else []
    if point.launch in GROUPS:
        if GROUPS.index(point.launch) >= max(point.groups):
            return []
        if launch == "project":
            return list(itertools.product((4, 8), (1, 2, 3, 4)))
        warps = (4, 8) if launch == "feedforward" else (4,)  # sums over rows are left by tiles of GROUP_ROWS
        stages = (1,) if launch == "feedforward_backward" else (1, 2, 3, 4)
        made = itertools.product(warps, (16, 32, 64), stages)
        least = max(2 * configs.GROUP_ROWS, point.width) if launch == "input_grad" else 0  # rows wait in its stages
        return [(warps, block, stages) for warps, block, stages in made if stages * block >= least]
    if point.launch in ATTENTION:
        if half and point.width > configs.LONGEST_HALF_HEAD:
            return []
        blocks = (16, 32, 64)
        chunks = [size for size in (16, 32, 64, 128, 256) if size <= point.width]
        stages = (1, 2, 3) if point.launch == "attention" else (1,)  # see attention_configs.choose
        return list(itertools.product(blocks, blocks, (point.width,), chunks, (4, 8), stages))
    if point.launch == "weight_grads":
        sizes = [size for size in (16, 32, 64, 128) if size <= max(64, point.width)]
        made = itertools.product(sizes, sizes, (32, 64), (1, 4, 8), (1, 2, 3, 4))
        return [values for values in made if values[0] * values[1] >= 256 * values[3] or values[3] == 1]
    most = point.width if launch in ("project", "input_grad") else max(16, point.shape.dim_feedforward)
    made = itertools.product((16, 32, 64), (16, 32, 64, 128), (4, 8), (1, 2, 3))
    # Eight warps on tiles of 64 features fail with illegal accesses (Triton 3.6).
    return [each for each in made if each[1] <= most and not (each[1] == 64 and each[2] == 8)]


def variant(point: Point, layer: Layer, values: _Values | None = None) -> Variant:
    """The table's configs, one of them replaced by `values`. Warpgroups are timed with all that there may be, tiles
    with none."""
    tiles, groups = configs.choose(layer), configs.choose_warpgroup(layer)
    launch = point.launch.removesuffix(" warpgroup")
    if point.launch == FORMULATION:
        return Variant(tiles, groups if values is None else _groups(point, groups, values[0]))
    if point.launch in GROUPS:
        groups = _groups(point, groups, max(point.groups))
        return Variant(tiles, groups if values is None else replace(groups, **{launch: _kind(launch)(*values)}))
    if point.launch in ATTENTION:
        return Variant(tiles, groups, **({} if values is None else {launch: attention_configs.DotConfig(*values)}))
    if values is not None:
        kind = RowConfig if launch in ROWS else configs.WeightConfig
        tiles = replace(tiles, **{launch: kind(*values)})
    return Variant(tiles, WarpgroupConfigs() if launch in ROWS else groups)


def _groups(point: Point, groups: WarpgroupConfigs, count: int) -> WarpgroupConfigs:
    """The first `count` of the row kernels by warpgroups: as they are now, or by a first candidate."""
    found: dict[str, Any] = {}
    for name in ROWS[:count]:
        first = candidates(replace(point, launch=f"{name} warpgroup"))[0]
        found[name] = getattr(groups, name) or _kind(name)(*first)
    return WarpgroupConfigs(**found)


def _kind(launch: str) -> type[ProjectConfig] | type[WarpgroupConfig]:
    return ProjectConfig if launch == "project" else WarpgroupConfig


def values_now(point: Point, layer: Layer) -> _Values:
    """What candidates of a point are compared with."""
    now = variant(point, layer)
    if point.launch == FORMULATION:
        return (sum(getattr(now.groups, name) is not None for name in ROWS),)
    if point.launch in ATTENTION:
        return loader.at(loader.load("encoder.attention", layer.arch)[point.number, _PASS[point.launch]], point.width)
    of = now.groups if point.launch in GROUPS else now.tiles
    return astuple(getattr(of, point.launch.removesuffix(" warpgroup")))


class Pass:
    """A layer's forward and backward with given configs."""

    def __init__(self, layer: Layer, made: Variant, device: torch.device) -> None:
        shape = EncoderShape(layer.sequences, layer.tokens, layer.d_model, layer.nhead, layer.dim_feedforward)
        tensors = encoder_tensors(shape, getattr(torch, layer.dtype), device=device)
        self.x = tensors.pop("x")
        self.dy = make_data("normal", tuple(self.x.shape), seed=99, dtype=self.x.dtype, device=device)
        self.given = (*ExtraInputs(), *encoder_parameters(tensors).flat())
        with _chosen(made):
            self.plan = Plan(layer, device, _EPS, biases=True)
            y = self.forward()
            self.results = [y, *self.backward()]

    def thunk(self, passes: str) -> Callable[[], torch.Tensor]:
        def both() -> torch.Tensor:
            self.forward()
            return self.backward()[0]

        return {"forward": self.forward, "backward": lambda: self.backward()[0], "both": both}[passes]

    def forward(self) -> torch.Tensor:
        made = self.plan.forward(self.x, self.given, keep=True)
        self.left = SavedForBackward(made.kept, made.statistics, made.qk)
        return made.y

    def backward(self) -> list[torch.Tensor]:
        """dx and the parameters' gradients."""
        gradients = self.plan.gradients((True,) * len(self.plan.names))
        above = IncomingGrads(self.dy, None, None)
        dx, _ = self.plan.backward(above, self.left, self.x, self.given, (), gradients)
        return [dx, *(each for each in gradients.tensors if each is not None)]


@contextlib.contextmanager
def _chosen(made: Variant) -> Iterator[None]:
    """The variant's configs instead of the tables'."""
    choose = attention_configs.choose

    def choose_attention(problem: attention_configs.Attention) -> attention_configs.DotConfig:
        return (made.attention_backward if problem.backward else made.attention) or choose(problem)

    with (
        mock.patch.object(configs, "choose", return_value=made.tiles),
        mock.patch.object(configs, "choose_warpgroup", return_value=made.groups),
        mock.patch.object(attention_configs, "choose", choose_attention),
    ):
        yield


def measure(point: Point, layer: Layer, chosen: list[_Values], device: torch.device, any_bits: bool) -> dict[str, Any]:
    """Microseconds with the config of now and with each candidate that may replace it."""
    now = values_now(point, layer)
    canonical = Pass(layer, variant(point, layer), device)
    differing: list[str] = []
    failed: list[str] = []
    us: dict[str, float] = {}
    others = [values for values in chosen if values != now]
    for first in range(0, max(1, len(others)), BATCH):
        runs = {"now": [canonical.thunk(point.passes)]}
        for values in others[first : first + BATCH]:
            try:
                run = Pass(layer, variant(point, layer, values), device)
            except Exception as error:
                failed.append(f"{_name(values)}: {type(error).__name__}")
                continue
            if not all(compare_bits(*pair).equal for pair in zip(run.results, canonical.results, strict=True)):
                differing.append(_name(values))
                if not any_bits:
                    continue
            runs[_name(values)] = [run.thunk(point.passes)]
        medians = {name: statistics.median(raw) for name, raw in timer.measure(runs, device, warmup=1).items()}
        scale = us.setdefault("now", medians["now"]) / medians["now"]  # a batch relative to what is in every one
        us |= {name: round(scale * each, 3) for name, each in medians.items()}
    place = {"launch": point.launch, "number": point.number, "width": point.width}
    return place | {"now": now, "us": us, "differing": differing, "failed": failed}


def tables(rows: list[dict[str, Any]], arch: str) -> dict[str, Table]:
    """The tables that serve an architecture now, with what was measured faster; the newest row of a point counts."""
    table, attention = dict(loader.load("encoder", arch)), dict(loader.load("encoder.attention", arch))
    faster: dict[Point, _Values] = {}
    for row in rows:
        point, us = Point(row["launch"], row["number"], row["width"]), row["us"]
        best = min(us, key=us.__getitem__)
        won = us["now"] >= WIN * us[best]
        faster[point] = tuple(map(int, best.split())) if won else tuple(row["now"])
    for point, values in faster.items():
        if point.launch in ATTENTION:
            _replace(attention, (point.number, _PASS[point.launch]), point.width, values)
        elif point.launch not in (*GROUPS, FORMULATION):
            _replace(table, (point.number, point.launch), point.width, values)
    for number, width in itertools.product(NUMBERS, GROUP_WIDTHS):
        steps = {launch: dict(table.get((number, launch), ())).get(width) for launch in GROUPS}
        count = sum(each is not None for each in steps.values())
        (count,) = faster.get(Point(FORMULATION, number, width), (count,))
        for launch in GROUPS[:count]:
            point = Point(launch, number, width)
            _replace(table, (number, launch), width, faster.get(point) or steps[launch] or candidates(point)[0])
        for launch in GROUPS[count:]:
            _replace(table, (number, launch), width, None)
    return {"encoder": table, "encoder.attention": attention}


def _replace(table: dict[Any, Any], key: tuple[str, str], width: int, values: _Values | None) -> None:
    """One step of a key's; without values it is left out."""
    steps = dict(table.get(key, ())) | {width: values}
    table[key] = tuple((size, steps[size]) for size in sorted(steps) if steps[size])
    if not table[key]:
        del table[key]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--launches", nargs="+", choices=LAUNCHES, default=LAUNCHES)
    parser.add_argument("--numbers", nargs="+", choices=NUMBERS, default=NUMBERS)
    parser.add_argument("--widths", nargs="+", type=int, choices=WIDTHS, default=WIDTHS, help="padded d_model")
    parser.add_argument("--any-bits", action="store_true", help="also take configs that change the layer's bits")


def precompile(job: tuple[Point, str, _Values]) -> str:
    """Run a candidate once, in a process of its own."""
    point, arch, values = job
    layer = point.layer(arch)
    try:
        Pass(layer, variant(point, layer, values), torch.device("cuda", 0))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{point.launch} {point.number} {point.width} {_name(values)}: {type(error).__name__}"
    return ""


def sweep(options: argparse.Namespace, raw: Path) -> None:
    device, arch = torch.device("cuda", 0), options.arch
    jobs = [(point, arch, values) for point in points(options) for values in candidates(point)]
    failures = common.compile_ahead(precompile, jobs, options.workers)
    compiled = [job for job, failure in zip(jobs, failures, strict=True) if not failure]
    for point in points(options):
        layer = point.layer(arch)
        chosen = [values for of, _, values in compiled if of == point]
        common.append(raw, measure(point, layer, chosen, device, options.any_bits))


def _name(values: _Values) -> str:
    return " ".join(map(str, values))
