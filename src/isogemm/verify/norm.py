"""What `isogemm verify --family norm` tries: the contract of norms, softmaxes and embedding, on a GPU as on the CPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from isogemm.norm import configs
from isogemm.norm.api import embedding, layer_norm, log_softmax, rms_norm, softmax
from isogemm.verify.checks import NO_TILES, Check
from isogemm.verify.compare import BitDiff, compare_bits
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import LAYOUTS, make_data, with_layout
from isogemm.verify.trials import THREADS, other_work, training_step

EPS = 1e-5
NAMES = ("rms_norm", "layer_norm", "softmax", "log_softmax")
_WIDTHS = (1, 3, 17, 64, 100, 896, 1000, 1024, 1025, 2048, 3072, 4096, 5120, 8192, 16384, 50257, 131072)
_MOST_NORM = 20000  # columns of a norm's rows
_CPU_WIDTHS = _WIDTHS[:10]
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}  # of x


class Setting:
    """An operation on rows of one width and dtype, and its data, drawn from the seed: the same in every check."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device, self.rng = seed, device, random.Random(seed)
        self.name = NAMES[seed % len(NAMES)]
        self.dtype = (torch.bfloat16, torch.float32, torch.float16)[seed // len(NAMES) % 3]
        widths = _WIDTHS if device.type == "cuda" else _CPU_WIDTHS
        self.width = self.rng.choice([each for each in widths if "softmax" in self.name or each < _MOST_NORM])
        self.kind = self.rng.choice(("normal", "normal", "wide"))
        self.layout = self.rng.choice(LAYOUTS)
        self.threads = (*THREADS, torch.get_num_threads())[seed % (len(THREADS) + 1)]
        self.most = max(8, min(4097, _ELEMENTS[device.type] // self.width))

    def data(self, *shape: int, seed: int = 0, kind: str = "") -> Tensor:
        kind = kind or self.kind
        return make_data(kind, shape, seed=100 * self.seed + seed, dtype=self.dtype, device=self.device)

    def rows(self, count: int, kind: str = "") -> tuple[Tensor, Tensor]:
        """x and the gradient of the result."""
        return self.data(count, self.width, kind=kind), self.data(count, self.width, seed=1)

    def weights(self) -> list[Tensor]:
        count = {"rms_norm": 1, "layer_norm": 2}.get(self.name, 0)
        return [1 + self.data(self.width, seed=2 + i, kind="normal") / 4 for i in range(count)]

    def step(self, x: Tensor, grad: Tensor) -> Tensor:
        """The result and dx, [rows, 2, width]."""
        x = with_layout(x, self.layout)
        return torch.stack(training_step(self.function(), [x, *self.weights()], grad)[:2], 1)

    def function(self) -> Callable[..., Tensor]:
        norms = {"rms_norm": partial(rms_norm, eps=EPS), "layer_norm": partial(layer_norm, eps=EPS)}
        return norms.get(self.name) or {"softmax": softmax, "log_softmax": log_softmax}[self.name]

    def in_torch(self, x: Tensor, *weights: Tensor) -> Tensor:
        """torch's, computed in fp32 at least and rounded once."""
        wide = torch.promote_types(x.dtype, torch.float32)
        x, *weights = (each.to(wide) for each in (x, *weights))  # type: ignore[assignment]
        if self.name == "rms_norm":
            return F.rms_norm(x, x.shape[-1:], weights[0], EPS)
        if self.name == "layer_norm":
            return F.layer_norm(x, x.shape[-1:], weights[0], weights[1], EPS)
        return F.softmax(x, -1) if self.name == "softmax" else F.log_softmax(x, -1)


def _batch_invariance(each: Setting) -> Iterator[BitDiff]:
    x, grad = each.rows(each.most)
    whole = each.step(x, grad)
    for count in {1, 2, 3, 17, each.most // 2}:
        first = each.rng.randint(0, each.most - count)
        part = slice(first, first + count)
        yield compare_bits(each.step(x[part], grad[part]), whole[part])


def _run_to_run(each: Setting) -> Iterator[BitDiff]:
    x, grad = each.rows(each.most)
    first = each.step(x, grad)
    with other_work(each.device):
        for _ in range(3):
            yield compare_bits(each.step(x, grad), first)


def _micro_batches(each: Setting) -> Iterator[BitDiff]:
    """Gradients of a norm's weights and of an embedding's are the same in micro-batches."""
    chunk = configs.EMBEDDING_CHUNK
    tokens = 2 * chunk + each.rng.randint(1, chunk)
    width = min(each.width, 100 if each.device.type == "cpu" else 4096)
    each.width = width
    x, grad = each.rows(tokens)
    vocabulary = each.rng.choice((1, 7, 1000))
    ids = (x[:, 0].float().abs() * 1000).nan_to_num(0, 0, 0).long() % vocabulary
    weights = each.weights()
    functions: list[tuple[Callable[..., Tensor], Sequence[Tensor], Tensor]] = [
        (embedding, [each.data(vocabulary, width, seed=9)], ids)
    ]
    if weights:
        norm = each.function()
        functions.append((lambda x, *weights: norm(x, *weights), weights, x))
    for function, values, rows in functions:
        whole = _main_grads(function, values, rows, grad, (0, tokens))
        for cuts in ((0, chunk, tokens), (0, chunk, 2 * chunk, tokens)):
            for found, expected in zip(_main_grads(function, values, rows, grad, cuts), whole, strict=True):
                yield compare_bits(found, expected)


def _main_grads(
    function: Callable[..., Tensor], values: Sequence[Tensor], rows: Tensor, grad: Tensor, cuts: Sequence[int]
) -> list[Tensor]:
    """The main_grads after a backward for each micro-batch between two cuts."""
    parameters = [torch.nn.Parameter(each.clone()) for each in values]
    totals = [torch.zeros(each.shape, device=each.device) for each in values]
    for parameter, total in zip(parameters, totals, strict=True):
        parameter.main_grad = total  # type: ignore[attr-defined]
    for first, last in itertools.pairwise(cuts):
        function(rows[first:last], *parameters).backward(grad[first:last])  # type: ignore[no-untyped-call]
    return totals


def _any_tile(each: Setting) -> Iterator[BitDiff]:
    """Other tiles of the softmaxes' kernels give the same bits; a norm's tile depends on its rows' width alone."""
    from isogemm.core.plan import run_launch
    from isogemm.norm.kernels import softmax as kernels

    count = min(each.most, 100)
    x, grad = each.rows(count)
    log = each.name == "log_softmax"
    y = log_softmax(x) if log else softmax(x)
    (dx,) = training_step(log_softmax if log else softmax, [x], grad)[1:]
    config = configs.choose_softmax(each.width, each.dtype.itemsize)
    others = [replace(config, rows=1), replace(config, num_warps=max(1, config.num_warps // 2))]
    if config.steps:
        others.append(replace(config, blocks=config.blocks // 2, steps=2 * config.steps))
    elif config.blocks > 1:
        others.append(replace(config, rows=1, blocks=config.blocks // 2, steps=2))
    for other in others:
        again = torch.empty_like(y)
        run_launch(kernels.describe_softmax(count, each.width, log, other), (x, again))
        yield compare_bits(again, y)
        run_launch(kernels.describe_softmax_backward(count, each.width, log, other), (grad, y, again))
        yield compare_bits(again, dx)


def _accuracy(each: Setting) -> Iterator[BitDiff]:
    """Raises where a result is not accurate; there are no bits to compare."""
    x, grad = each.rows(min(each.most, 65), "normal")
    operands = [x, *each.weights()]
    found = training_step(each.function(), operands, grad)[:2]

    def rounded(*operands: Tensor) -> Tensor:
        return each.in_torch(*operands).to(x.dtype)

    theirs = training_step(rounded, operands, grad)[:2]
    exact = training_step(each.in_torch, [operand.double() for operand in operands], grad.double())[:2]
    for actual, torchs, right in zip(found, theirs, exact, strict=True):
        assert_no_worse_than_torch(actual, torchs, right, ulps=8)
    yield from ()


_check = partial(Check, Setting)

CHECKS = (
    _check(
        "batch invariance", "a row's result and gradient have the same bits in any batch, at any position",
        _batch_invariance, "1 to 4097 rows of 1 to 131072 columns, any position",
    ),
    _check("run to run", "a call has the same bits every time", _run_to_run, "4 runs, other work beside"),
    _check(
        "micro-batches", "weight gradients accumulated over multiples of 1024 tokens have the bits of one batch",
        _micro_batches, "two cuts of 2049 to 3072 tokens, norms and embedding",
    ),
    _check(
        "any tile", "every tile of a softmax gives the same bits", _any_tile, "two or three other tiles",
        gpu_only=NO_TILES,
    ),
    _check(
        "accuracy", "the error is at most twice torch's and eight ulps", _accuracy,
        "65 rows, result and gradient, against fp64",
    ),
)  # fmt: skip
