"""What `isogemm verify --family gemm` tries: the contract of forward, dX, dW and db, on a GPU as on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from isogemm.bench.cases import fp32_precision
from isogemm.core import device as devices
from isogemm.families.ahead import run_ahead
from isogemm.gemm import configs, op, reference
from isogemm.gemm.api import linear
from isogemm.testing.cases import DATA_KINDS, make_data, make_operands, with_layout
from isogemm.testing.checks import Check, CheckResult, run_trials, skip
from isogemm.testing.compare import BitDiff, compare_bits
from isogemm.testing.error import Errors, assert_no_worse_than_torch, measure_errors
from isogemm.testing.poison import poisoned_allocations

NUMBERS = (("bfloat16", ""), ("float16", ""), ("float32", "ieee"), ("float32", "tf32"), ("float32", "tf32x3"))
LAYOUTS = ("contiguous", "transposed", "sliced", "strided", "misaligned")

Rows = Callable[[torch.Tensor], torch.Tensor]  # [rows, ...] -> [rows, ...], each row on its own
Property = Callable[[Rows, torch.Tensor, random.Random], Iterator[BitDiff]]
Trial = Callable[["_Setting"], Iterator[BitDiff]]


@dataclass(frozen=True)
class _Sizes:
    """What a device takes in a moment."""

    weights: tuple[tuple[int, int], ...]  # n, k
    edges: tuple[int, ...]  # batch sizes beside which configurations may change
    most: int  # rows
    most_tokens: int  # elements of those of a weight's gradient, beyond two chunks


_GPU = _Sizes(
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
_CPU = _Sizes(
    weights=((96, 64), (64, 300), (17, 127), (33, 65), (1, 65), (129, 3)),
    edges=(1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257),
    most=300,
    most_tokens=1 << 18,
)


def _sizes(device: torch.device) -> _Sizes:
    return _GPU if device.type == "cuda" else _CPU


class _Setting:
    """One weight's shape with its numbers, data and strides, all from the seed: the same in every check."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.rng = random.Random(seed)
        self.seed, self.device = seed, device
        self.sizes = _sizes(device)
        group, number = divmod(seed, len(NUMBERS))
        name, self.precision = NUMBERS[number]
        self.kind = DATA_KINDS[group % len(DATA_KINDS)]
        self.n, self.k = self.sizes.weights[seed % len(self.sizes.weights)]
        self.dtype: torch.dtype = getattr(torch, name)
        self.wide = None if self.dtype == torch.float32 else torch.float32  # out_dtype of an fp32 result
        self.layouts = "contiguous", "contiguous"
        if (group + number) % 2:
            self.layouts = self.rng.choice(LAYOUTS), self.rng.choice(LAYOUTS)

    def walk_chunk(self, k: int, out_dtype: torch.dtype | None) -> int:
        """Of a product over k."""
        names = [str(dtype).removeprefix("torch.") for dtype in (self.dtype, out_dtype or self.dtype)]
        return configs.walk_chunk(k, *names)

    def batch_sizes(self) -> list[int]:
        """Every edge is met within four trials."""
        return [*self.sizes.edges[self.seed % 4 :: 4], *(self.rng.randint(1, self.sizes.most) for _ in range(2))]

    def operands(self, m: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[m, k] and [k, n]."""
        return make_operands(self.kind, (m, k), (k, n), seed=self.seed, dtype=self.dtype, device=self.device)

    def forward(self, m: int) -> tuple[torch.Tensor, list[Rows]]:
        """x, and the ways to multiply it: with an fp32 result, and with one of its own dtype."""
        x, b = self.operands(m, self.k, self.n)
        weight = with_layout(b.mT, self.layouts[1])
        bias = make_data("normal", (self.n,), seed=self.seed, dtype=self.dtype, device=self.device)
        return x, [self._linear(weight, bias, out) for out in dict.fromkeys((self.wide, None))]

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor, out_dtype: torch.dtype | None) -> Rows:
        def way(x: torch.Tensor) -> torch.Tensor:
            laid_out = with_layout(x, self.layouts[0])
            return linear(laid_out, weight, bias, out_dtype=out_dtype, precision=self.precision or None)

        return way

    def input_gradient(self, m: int) -> tuple[torch.Tensor, list[Rows]]:
        """grad, and the ways to its dX: the product itself with an fp32 result, and autograd's."""
        grad, weight = self.operands(m, self.n, self.k)
        weight = with_layout(weight, self.layouts[1])
        precision = self.precision or None

        def product(grad: torch.Tensor) -> torch.Tensor:
            return op.product(with_layout(grad, self.layouts[0]), weight, None, self.wide, precision)

        def backward(grad: torch.Tensor) -> torch.Tensor:
            x = torch.ones((len(grad), self.k), dtype=self.dtype, device=self.device, requires_grad=True)
            return torch.autograd.grad(linear(x, weight, precision=precision), x, with_layout(grad, self.layouts[0]))[0]

        return grad, [product, backward]

    def tokens(self) -> tuple[int, int]:
        """How many, some chunks and a part of one; and the chunk."""
        chunk = configs.token_chunk(self.n, self.k, str(self.dtype).removeprefix("torch."))
        most = self.sizes.most_tokens // (chunk * max(self.n, self.k))
        return chunk * self.rng.randint(2, min(max(most, 2), 5)) + self.rng.randrange(chunk), chunk

    def weight_operands(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """grad [tokens, n] and x [tokens, k]."""
        left, x = self.operands(self.n, tokens, self.k)
        return left.mT.contiguous(), x


# What is true of each row, however its batch is made.


def _needle(way: Rows, rows: torch.Tensor, rng: random.Random) -> Iterator[BitDiff]:
    """The first row at every position: at a random half of them, then at the others."""
    alone, others = way(rows[:1]), rows.flip(0)
    half = torch.tensor([rng.random() < 0.5 for _ in range(len(rows))], device=rows.device)
    for there in (half, ~half):
        found = way(torch.where(there[:, None], rows[:1], others))[there]
        yield compare_bits(found, alone.expand_as(found))


def _cut(way: Rows, rows: torch.Tensor, rng: random.Random) -> Iterator[BitDiff]:
    cuts = sorted(rng.randint(0, len(rows)) for _ in range(rng.randint(1, 6)))
    parts = [way(rows[start:end]) for start, end in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    yield compare_bits(torch.cat(parts), way(rows))


def _padded(way: Rows, rows: torch.Tensor, rng: random.Random) -> Iterator[BitDiff]:
    expected, huge = way(rows), torch.finfo(rows.dtype).max
    for value in (*rng.sample((torch.nan, torch.inf, -torch.inf, huge, 0.0), 2), None):
        other = 3 * rows.flip(0) if value is None else torch.full_like(rows, value)
        before, after = other[: rng.randint(0, 40)], other[: rng.randint(0, len(rows))]
        found = way(torch.cat([before, rows, after]))
        yield compare_bits(found[len(before) : len(before) + len(rows)], expected)


def _permuted(way: Rows, rows: torch.Tensor, rng: random.Random) -> Iterator[BitDiff]:
    order = torch.tensor(rng.sample(range(len(rows)), len(rows)), device=rows.device)
    yield compare_bits(way(rows[order]), way(rows)[order])


def _repeated(way: Rows, rows: torch.Tensor, rng: random.Random) -> Iterator[BitDiff]:
    first = way(rows)
    with _other_work(rows.device):
        for _ in range(3):
            yield compare_bits(way(rows), first)


@contextmanager
def _other_work(device: torch.device) -> Iterator[None]:
    """On a GPU, load on another stream."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        load = torch.randn(4096, 4096, device=device)
        for _ in range(8):
            load = torch.sin(load @ load)
    yield
    torch.cuda.synchronize(device)


def _rows(holds: Property) -> Trial:
    def trial(each: _Setting) -> Iterator[BitDiff]:
        sizes = each.batch_sizes() if holds is _needle else [each.rng.randint(2, each.sizes.most)]
        x, ways = each.forward(max(sizes))
        for m in sizes:
            for way in ways:
                yield from holds(way, x[:m], each.rng)

    return trial


def _input_gradient(each: _Setting) -> Iterator[BitDiff]:
    sizes = each.rng.sample(each.batch_sizes(), 2)
    grad, ways = each.input_gradient(max(sizes))
    for m in sizes:
        for way in ways:
            for holds in (_needle, _cut, _padded, _permuted, _repeated):
                yield from holds(way, grad[:m], each.rng)


def _any_tile(each: _Setting) -> Iterator[BitDiff]:
    m, (tokens, chunk), layouts = each.rng.choice(each.sizes.edges), each.tokens(), each.layouts
    x, b = each.operands(m, each.k, each.n)
    grad, weight = each.operands(m, each.n, each.k)
    token_grad, token_x = each.weight_operands(tokens)
    way = each.seed % 3  # as it is served; bits before rounding, in one walk; with an fp32 result
    out_dtype = None if way == 0 else each.wide
    chunks = [each.walk_chunk(k, out_dtype) if way != 1 else 0 for k in (each.k, each.n)]
    total = torch.randn(each.n, each.k, device=each.device) if way == 1 else None
    for left, right, cut, sums in (
        (with_layout(x, layouts[0]), with_layout(b.mT, layouts[1]).mT, chunks[0], None),
        (with_layout(grad, layouts[0]), with_layout(weight, layouts[1]), chunks[1], None),
        (token_grad.mT, token_x, chunk, total),
    ):
        how: Any = {"out_dtype": out_dtype, "precision": each.precision or None, "chunk": cut}

        problem = op.describe(left, right, **how, total=sums)
        results = (
            op.gemm(left, right, **how, total=None if sums is None else sums.clone(), config=config)
            for config in (configs.canonical(problem), *configs.candidates(problem))
        )
        expected = next(results)
        yield from (compare_bits(result, expected) for result in results)


# dW and db.


def _gradients(
    each: _Setting, grad: torch.Tensor, x: torch.Tensor, cuts: Sequence[int] = (), *, main_grad: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """dW and db of micro-batches cut there: what is in main_grad afterwards, or in .grad."""
    start = make_data("normal", (each.n, each.k), seed=each.seed, device=each.device)
    weight = torch.zeros((each.n, each.k), dtype=each.dtype, device=each.device).requires_grad_()
    bias = torch.zeros((each.n,), dtype=each.dtype, device=each.device).requires_grad_()
    parameters: tuple[Any, Any] = weight, bias
    if main_grad:
        parameters[0].main_grad, parameters[1].main_grad = start, start[:, 0].clone()
    for first, last in zip([0, *cuts], [*cuts, len(x)], strict=True):
        out = linear(x[first:last], weight, bias, precision=each.precision or None)
        torch.autograd.backward(out, grad[first:last])
    dw, db = ((p.main_grad if main_grad else p.grad) for p in parameters)
    return dw, db


def _weight_gradient(each: _Setting) -> Iterator[BitDiff]:
    tokens, chunk = each.tokens()
    grad, x = each.weight_operands(tokens)
    places = range(chunk, tokens, chunk)
    cuts = sorted(each.rng.sample(places, each.rng.randint(1, len(places))))
    zeros = each.rng.randint(1, 2 * chunk)
    longer_grad, longer_x = (torch.cat([rows, rows.new_zeros(zeros, rows.shape[1])]) for rows in (grad, x))
    whole = _gradients(each, grad, x)
    alone = _gradients(each, grad, x, main_grad=False)
    yield from _same(_gradients(each, grad, x, cuts), whole)
    yield from _same(_gradients(each, longer_grad, longer_x), whole)
    yield from _same(_gradients(each, longer_grad, longer_x, main_grad=False), alone)
    with _other_work(each.device):
        yield from _same(_gradients(each, grad, x), whole)
        yield from _same(_gradients(each, grad, x, main_grad=False), alone)


def _same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Iterator[BitDiff]:
    return (compare_bits(one, other) for one, other in zip(found, expected, strict=True))


# Accuracy.


def assert_accurate(
    found: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    precision: str,
    *,
    bias: torch.Tensor | None = None,
    torchs: torch.Tensor | None = None,
    what: str = "",
) -> Errors:
    """`found` is a @ b (+ bias) to the family's bound; `torchs` is what torch gives, where it is known already.

    Twice torch's error and one ulp. Four times where tensor cores sum an fp32 result: of 16-bit operands, and in
    tf32x3. So that a few elements on which torch is lucky are no measure, torch's error is also that of 64 more rows,
    the given ones with other signs.
    """
    signs = torch.randint(2, (64, a.shape[1]), device=a.device, generator=torch.Generator(a.device).manual_seed(0))
    more = (2 * signs - 1) * a[torch.arange(64, device=a.device) % len(a)]
    torchs = _torch_product(a, b, bias, found.dtype, precision) if torchs is None else torchs
    torchs_more = _torch_product(more, b, bias, found.dtype, precision)
    all_a = torch.cat([a, more])
    exact, scale = reference.matmul(all_a, b, bias), reference.matmul_scale(all_a, b)
    if bias is not None:
        scale = scale + bias.double().abs()
    assert_no_worse_than_torch(
        torch.cat([found, torchs_more]),
        torch.cat([torchs, torchs_more]),
        exact,
        scale=scale,
        factor=2 if found.dtype == a.dtype and precision != "tf32x3" else 4,
        what=what,
    )
    return measure_errors(found, exact[: len(a)], scale=scale[: len(a)])


def _torch_product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, precision: str
) -> torch.Tensor:
    # cuBLAS takes TF32 or not as it likes; the exact product of rounded operands is TF32's own error.
    if precision == "tf32" and a.is_cuda:
        return reference.matmul(reference.round_to_tf32(a), reference.round_to_tf32(b), bias).float()
    if out_dtype == a.dtype:
        with fp32_precision("ieee" if a.is_cuda and a.dtype == torch.float32 else ""):
            product = a @ b
    elif a.is_cuda:
        product = torch.mm(a, b, out_dtype=out_dtype)
    else:  # torch has no such product there
        product = a.to(out_dtype) @ b.to(out_dtype)
    return product if bias is None else product + bias


def _accuracy(each: _Setting) -> Iterator[BitDiff]:
    """Raises where a result is not accurate; there are no bits to compare."""
    m, precision = min(each.rng.choice(each.sizes.edges), 1000), each.precision
    x, b = each.operands(m, each.k, each.n)
    grad = make_data(each.kind, (m, each.n), seed=each.seed, dtype=each.dtype, device=each.device)
    bias = make_data("normal", (each.n,), seed=each.seed, dtype=each.dtype, device=each.device)
    inputs = [with_layout(x, each.layouts[0]), with_layout(b.mT, each.layouts[1]), bias]
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = linear(*leaves, precision=precision or None)
    dx, dw, db = torch.autograd.grad(out, leaves, grad)
    wide = linear(*inputs, out_dtype=each.wide, precision=precision or None)
    x, weight = inputs[0], inputs[1]
    assert_accurate(out.detach(), x, weight.mT, precision, bias=bias, what="forward")
    assert_accurate(wide, x, weight.mT, precision, bias=bias, what="forward to fp32")
    assert_accurate(dx, grad, weight, precision, what="dX")
    assert_accurate(dw, grad.mT, x, precision, what="dW")
    ones = torch.ones((1, m), dtype=grad.dtype, device=each.device)
    assert_accurate(db[None], ones, grad, "ieee" if precision else "", what="db")
    yield from ()


# (name, what it says, what a trial does, what was covered)
_CHECKS: tuple[tuple[str, str, Trial, str], ...] = (
    (
        "any tile",
        "every configuration of the tables gives the same bits",
        _any_tile,
        "every configuration for forward, dX and dW",
    ),
    (
        "needle",
        "a row has the same bits at every position of any batch",
        _rows(_needle),
        "every position of 1 .. {most} rows",
    ),
    ("prefill cuts", "rows have the same bits in parts as at once", _rows(_cut), "random cuts"),
    ("padding", "other rows change nothing", _rows(_padded), "random, NaN, Inf, huge and zero rows at both ends"),
    ("permutation", "rows in another order have the same bits", _rows(_permuted), "random orders"),
    ("run to run", "a call has the same bits every time", _rows(_repeated), "4 runs, other work beside"),
    (
        "dX",
        "the input's gradient has the forward's contract",
        _input_gradient,
        "every position, cuts, garbage rows, permutations, runs under load",
    ),
    (
        "dW, db",
        "micro-batches cut at chunks have the bits of one pass",
        _weight_gradient,
        "cuts at multiples of the chunk into main_grad, trailing zeros, runs under load",
    ),
    (
        "accuracy",
        "the error is at most twice torch's and one ulp",
        _accuracy,
        "forward and gradients, against fp64; 4x torch's error for fp32 of 16-bit inputs and for tf32x3",
    ),
)


def _check(name: str, what: str, trial: Trial, covered: str) -> Check:
    def run(device: torch.device, trials: int) -> CheckResult:
        if device.type == "cuda":
            reason = configs.usable(devices.facts(device).arch)
        else:
            reason = "there are no tiles to choose from on the CPU" if trial is _any_tile else ""
        if reason:
            return skip(name, reason)
        detail = covered.format(most=_sizes(device).most)
        return run_trials(name, trials, lambda seed: _poisoned(trial, _Setting(seed, device)), covered=detail)

    return Check(name, what, run)


def _poisoned(trial: Trial, each: _Setting) -> Iterator[BitDiff]:
    with poisoned_allocations():
        yield from trial(each)


CHECKS = tuple(_check(*fields) for fields in _CHECKS)


def ahead_of_checks(device: torch.device, trials: int) -> None:
    if not configs.usable(devices.facts(device).arch):
        run_ahead(_rehearse, device, [(seed, place) for seed in range(trials) for place in range(len(_CHECKS))])


def _rehearse(device: str, job: tuple[int, int]) -> None:
    seed, place = job
    for _ in _CHECKS[place][2](_Setting(seed, torch.device(device))):
        pass
