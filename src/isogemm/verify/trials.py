"""Seeded trials, and the properties that rows and micro-batches must have."""

from __future__ import annotations

import abc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isogemm.gemm import configs, reference
from isogemm.verify.compare import BitDiff, compare_bits
from isogemm.verify.inputs import DATA_KINDS, LAYOUTS, make_data, make_operands
from isogemm.verify.precision import fp32_precision

NUMBERS = (("bfloat16", ""), ("float16", ""), ("float32", "ieee"), ("float32", "tf32"), ("float32", "tf32x3"))
THREADS = (1, 2, 3, 4, 8, 16)  # CPU threads, besides the default; 20 trials use each with float32

Rows = Callable[[Tensor], Tensor]  # [rows, ...] -> [rows, ...], each row on its own
Property = Callable[[Rows, Tensor, random.Random], Iterator[BitDiff]]


@dataclass(frozen=True)
class Sizes:
    """Problem sizes that a device computes quickly."""

    weights: tuple[tuple[int, int], ...]  # n, k
    edges: tuple[int, ...]  # batch sizes at which configurations may change
    most: int  # rows
    most_tokens: int  # largest number of elements of a weight gradient's operand, beyond two chunks


GPU = Sizes(
    weights=(
        (4096, 4096), (1024, 4096), (4096, 1024), (2048, 2048), (1536, 512), (512, 14336),
        (1000, 1000), (17, 127), (63, 257), (1, 65), (129, 3), (64, 20000),
    ),
    edges=(
        1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513,
        1000, 1023, 1024, 1025, 2048, 3000, 4095, 4096,
    ),
    most=4096,
    most_tokens=1 << 26,
)  # fmt: skip
CPU = Sizes(
    weights=((96, 64), (64, 300), (17, 127), (33, 65), (1, 65), (129, 3)),
    edges=(1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257),
    most=300,
    most_tokens=1 << 18,
)


@dataclass(frozen=True)
class Trained:
    """A layer, the values of its parameters, and a batch."""

    layer: Callable[..., Tensor]  # (rows, *parameters)
    parameters: Sequence[Tensor]
    rows: Tensor
    grad: Tensor  # gradient of the result


class Setting(abc.ABC):
    """Shape, dtype, data and strides of one weight, drawn from the seed: the same in every check.

    Subclasses say what is computed.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.rng = random.Random(seed)
        self.seed, self.device = seed, device
        self.sizes = GPU if device.type == "cuda" else CPU
        group, number = divmod(seed, len(NUMBERS))
        threads = tuple(dict.fromkeys((*THREADS, torch.get_num_threads())))
        self.threads = threads[(group + 2 * number) % len(threads)]
        name, self.precision = NUMBERS[number]
        self.asked = self.precision or None  # as an argument of the API
        self.kind = DATA_KINDS[group % len(DATA_KINDS)]
        self.n, self.k = self.sizes.weights[seed % len(self.sizes.weights)]
        self.dtype: torch.dtype = getattr(torch, name)
        self.wide = None if self.dtype == torch.float32 else torch.float32  # out_dtype of an fp32 result
        self.layouts = "contiguous", "contiguous"
        if (group + number) % 2:
            self.layouts = self.rng.choice(LAYOUTS), self.rng.choice(LAYOUTS)

    @abc.abstractmethod
    def forward(self, m: int) -> tuple[Tensor, list[Rows]]:
        """Return m rows, and the functions that must treat each row alone."""

    @abc.abstractmethod
    def input_gradient(self, m: int) -> tuple[Tensor, list[Rows]]:
        """Return m rows with their gradients, and the functions that compute the gradient of their input."""

    @abc.abstractmethod
    def trained(self, tokens: int) -> Sequence[Trained]:
        """Return the layers whose parameters get gradients, each with a batch of this many tokens."""

    def batch_sizes(self) -> list[int]:
        """Draw batch sizes; four trials meet every edge."""
        return [*self.sizes.edges[self.seed % 4 :: 4], *(self.rng.randint(1, self.sizes.most) for _ in range(2))]

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        return make_data("normal", shape, seed=self.seed + seed, dtype=self.dtype, device=self.device)

    def operands(self, m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
        """[m, k] and [k, n]."""
        return make_operands(self.kind, (m, k), (k, n), seed=self.seed, dtype=self.dtype, device=self.device)

    def tokens(self) -> tuple[int, int]:
        """Draw a number of tokens (whole chunks and a part of one); return it and the chunk."""
        chunk = configs.token_chunk(self.n, self.k, str(self.dtype).removeprefix("torch."))
        most = self.sizes.most_tokens // (chunk * max(self.n, self.k))
        return chunk * self.rng.randint(2, min(max(most, 2), 5)) + self.rng.randrange(chunk), chunk

    def weight_operands(self, tokens: int) -> tuple[Tensor, Tensor]:
        """grad [tokens, n] and x [tokens, k]."""
        left, x = self.operands(self.n, tokens, self.k)
        return left.mT.contiguous(), x


# Properties of each row, in any batch.


def needle(way: Rows, rows: Tensor, rng: random.Random) -> Iterator[BitDiff]:
    """Check the first row at a random half of all positions, then at the others."""
    alone, others = way(rows[:1]), rows.flip(0)
    half = torch.tensor([rng.random() < 0.5 for _ in range(len(rows))], device=rows.device)
    for there in (half, ~half):
        found = way(torch.where(there[:, None], rows[:1], others))[there]
        yield compare_bits(found, alone.expand_as(found))


def cut(way: Rows, rows: Tensor, rng: random.Random) -> Iterator[BitDiff]:
    cuts = sorted(rng.randint(0, len(rows)) for _ in range(rng.randint(1, 6)))
    yield compare_bits(torch.cat([way(part) for part in rows.tensor_split(cuts)]), way(rows))


def padded(way: Rows, rows: Tensor, rng: random.Random) -> Iterator[BitDiff]:
    expected, huge = way(rows), torch.finfo(rows.dtype).max
    for value in (*rng.sample((torch.nan, torch.inf, -torch.inf, huge, 0.0), 2), None):
        other = 3 * rows.flip(0) if value is None else torch.full_like(rows, value)
        before, after = other[: rng.randint(0, 40)], other[: rng.randint(0, len(rows))]
        found = way(torch.cat([before, rows, after]))
        yield compare_bits(found[len(before) : len(before) + len(rows)], expected)


def permuted(way: Rows, rows: Tensor, rng: random.Random) -> Iterator[BitDiff]:
    order = torch.tensor(rng.sample(range(len(rows)), len(rows)), device=rows.device)
    yield compare_bits(way(rows[order]), way(rows)[order])


def repeated(way: Rows, rows: Tensor, rng: random.Random) -> Iterator[BitDiff]:
    first = way(rows)
    with other_work(rows.device):
        for _ in range(3):
            yield compare_bits(way(rows), first)


@contextmanager
def other_work(device: torch.device) -> Iterator[None]:
    """Keep another stream of a GPU busy inside the block."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        load = torch.randn(4096, 4096, device=device)
        for _ in range(8):
            load = torch.sin(load @ load)
    yield
    torch.cuda.synchronize(device)


def of_rows(*properties: Property, gradient: bool = False) -> Callable[[Setting], Iterator[BitDiff]]:
    """Make a trial of these properties, for the forward or for the input's gradient."""

    def trial(each: Setting) -> Iterator[BitDiff]:
        if len(properties) > 1:
            sizes = each.rng.sample(each.batch_sizes(), 2)
        else:
            sizes = each.batch_sizes() if properties == (needle,) else [each.rng.randint(2, each.sizes.most)]
        rows, ways = (each.input_gradient if gradient else each.forward)(max(sizes))
        for m in sizes:
            for way in ways:
                for holds in properties:
                    yield from holds(way, rows[:m], each.rng)

    return trial


forward = of_rows(needle, cut, padded, permuted, repeated)
input_gradient = of_rows(needle, cut, padded, permuted, repeated, gradient=True)


# Gradients of parameters.


def micro_batches(each: Setting) -> Iterator[BitDiff]:
    tokens, chunk = each.tokens()
    places = range(chunk, tokens, chunk)
    cuts = sorted(each.rng.sample(places, each.rng.randint(1, len(places))))
    zeros = each.rng.randint(1, 2 * chunk)
    for trained in each.trained(tokens):
        rows, grad = (torch.cat([x, x.new_zeros(zeros, x.shape[1])]) for x in (trained.rows, trained.grad))
        longer = replace(trained, rows=rows, grad=grad)
        whole, alone = gradients(each, trained), gradients(each, trained, main_grad=False)
        yield from same(gradients(each, trained, cuts), whole)
        yield from same(gradients(each, longer), whole)
        yield from same(gradients(each, longer, main_grad=False), alone)
        with other_work(each.device):
            yield from same(gradients(each, trained), whole)
            yield from same(gradients(each, trained, main_grad=False), alone)


def gradients(each: Setting, trained: Trained, cuts: Sequence[int] = (), *, main_grad: bool = True) -> list[Tensor]:
    """The gradients of the parameters after micro-batches with these cuts: from main_grad, or from .grad."""
    parameters: list[Any] = [value.clone().requires_grad_() for value in trained.parameters]
    if main_grad:
        for parameter in parameters:
            parameter.main_grad = make_data("normal", parameter.shape, seed=each.seed, device=each.device)
    for rows, grad in zip(trained.rows.tensor_split(cuts), trained.grad.tensor_split(cuts), strict=True):
        torch.autograd.backward(trained.layer(rows, *parameters), grad)
    return [parameter.main_grad if main_grad else parameter.grad for parameter in parameters]


def training_step(function: Callable[..., Tensor], operands: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    """Return the result and every operand's gradient."""
    leaves = [operand.detach().requires_grad_() for operand in operands]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


Measure = tuple[float, Sequence[Tensor]]  # how many times torch's errors are allowed, and torch's results


def assert_step_accurate(
    found: Sequence[Tensor], torchs: Sequence[Measure], exact: Sequence[Tensor], names: Sequence[str], *,
    ulps: tuple[float, float] = (1, 1), least: float = 0, what: str = "",
) -> float:  # fmt: skip
    """Assert that each error, by largest element and by norm, is at most a factor times torch's and ulps of `exact`.

    ulps: of the largest element, and of the norm. least: ulps of the norm that are allowed even if torch has no error.

    Returns the largest norm of an error relative to that of `exact`.
    """

    def sizes(x: Tensor) -> tuple[float, float]:
        return float(x.abs().max()), float(x.norm())

    relative = [0.0]
    for index, (name, mine, right) in enumerate(zip(names, found, exact, strict=True)):
        whole, errors = sizes(right), sizes(mine.double() - right)
        torchs_errors = [(factor, sizes(results[index].double() - right)) for factor, results in torchs]
        for place, kind in enumerate(("error of an element", "norm of the errors")):
            most = max(factor * theirs[place] for factor, theirs in torchs_errors)
            ulp = torch.finfo(mine.dtype).eps * whole[place]
            most = max(most + ulps[place] * ulp, least * ulp if place else 0.0)
            if not errors[place] <= most:
                text = f"{kind} {errors[place]:.2e}, expected at most {most:.2e}, by torch's"
                raise AssertionError(f"{what}{name}: {text}")
        relative.append(errors[1] / whole[1] if whole[1] else 0.0)
    return max(relative)


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Iterator[BitDiff]:
    return (compare_bits(one, other) for one, other in zip(found, expected, strict=True))


def torch_product(a: Tensor, b: Tensor, out_dtype: torch.dtype, precision: str) -> Tensor:
    """Multiply with torch, whose error ours is compared with."""
    # cuBLAS takes TF32 or not as it likes; the exact product of rounded operands is TF32's own error.
    if precision == "tf32" and a.is_cuda:
        return reference.matmul(reference.round_to_tf32(a), reference.round_to_tf32(b)).float()
    if out_dtype == a.dtype:
        with fp32_precision("ieee" if a.is_cuda and a.dtype == torch.float32 else ""):
            return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=out_dtype)
    return a.to(out_dtype) @ b.to(out_dtype)  # torch has no such product there


def sampled(size: int, most: int, rng: random.Random, device: torch.device) -> Tensor:
    """At most `most` indices below `size`, the first and the last among them."""
    chosen = range(size) if size <= most else sorted({0, size - 1, *rng.sample(range(size), most - 2)})
    return torch.tensor(list(chosen), device=device)
