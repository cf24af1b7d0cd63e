"""What `isogemm verify --family gemm` tries: the contract of forward, dX, dW and db, on a GPU as on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isogemm.gemm import configs, op, reference, selection
from isogemm.gemm.api import linear
from isogemm.verify import trials
from isogemm.verify.checks import NO_TILES, Check
from isogemm.verify.compare import BitDiff, compare_bits
from isogemm.verify.errors import assert_no_worse_than_torch, scaled_error
from isogemm.verify.inputs import make_data, with_layout
from isogemm.verify.trials import Rows, Trained, torch_product, training_step


class Setting(trials.Setting):
    """Products and their gradients."""

    def forward(self, m: int) -> tuple[Tensor, list[Rows]]:
        """Return x, and the ways to multiply it: with an fp32 result, and with one of its own dtype."""
        x, b = self.operands(m, self.k, self.n)
        weight, bias = with_layout(b.mT, self.layouts[1]), self.normal(self.n)

        def way(out_dtype: torch.dtype | None) -> Rows:
            how: Any = {"out_dtype": out_dtype, "precision": self.asked}
            return lambda x: linear(with_layout(x, self.layouts[0]), weight, bias, **how)

        return x, [way(out) for out in dict.fromkeys((self.wide, None))]

    def input_gradient(self, m: int) -> tuple[Tensor, list[Rows]]:
        """Return grad, and the ways to compute dX: the product with an fp32 result, and autograd."""
        grad, weight = self.operands(m, self.n, self.k)
        weight = with_layout(weight, self.layouts[1])

        def product(grad: Tensor) -> Tensor:
            return op.product(with_layout(grad, self.layouts[0]), weight, None, self.wide, self.asked)

        def backward(grad: Tensor) -> Tensor:
            x = torch.ones((len(grad), self.k), dtype=self.dtype, device=self.device)
            grad = with_layout(grad, self.layouts[0])
            return training_step(lambda x: linear(x, weight, precision=self.asked), [x], grad)[1]

        return grad, [product, backward]

    def trained(self, tokens: int) -> Sequence[Trained]:
        grad, x = self.weight_operands(tokens)

        def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return linear(x, weight, bias, precision=self.asked)

        shapes = ((self.n, self.k), (self.n,))
        parameters = [torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes]
        return [Trained(layer, parameters, x, grad)]


def _any_tile(each: Setting) -> Iterator[BitDiff]:
    m, (tokens, chunk), layouts = each.rng.choice(each.sizes.edges), each.tokens(), each.layouts
    x, b = each.operands(m, each.k, each.n)
    grad, weight = each.operands(m, each.n, each.k)
    token_grad, token_x = each.weight_operands(tokens)
    way = each.seed % 3  # as it is served; bits before rounding, in one walk; with an fp32 result
    out_dtype = None if way == 0 else each.wide
    as_served = None if way != 1 else 0
    total = torch.randn(each.n, each.k, device=each.device) if way == 1 else None
    for left, right, cut, sums in (
        (with_layout(x, layouts[0]), with_layout(b.mT, layouts[1]).mT, as_served, None),
        (with_layout(grad, layouts[0]), with_layout(weight, layouts[1]), as_served, None),
        (token_grad.mT, token_x, chunk, total),
    ):
        how: Any = {"out_dtype": out_dtype, "precision": each.asked, "chunk": cut}
        problem = op.problem_of(left, right, **how, total=sums)
        results = (
            op.gemm(left, right, **how, total=None if sums is None else sums.clone(), config=config)
            for config in (configs.canonical(problem), *selection.candidates(problem))
        )
        expected = next(results)
        yield from (compare_bits(result, expected) for result in results)


def assert_accurate(
    found: Tensor, a: Tensor, b: Tensor, precision: str, *,
    bias: Tensor | None = None, torchs: Tensor | None = None, what: str = "",
) -> float:  # fmt: skip
    """Assert that `found` is a @ b (+ bias) to within twice torch's error and one ulp, or four times where tensor cores
    sum an fp32 result: of 16-bit operands, and in tf32x3. torchs: torch's result, if it is known already.

    torch's error is measured on 64 more rows too, the given ones with other signs: on few it may be 0 by chance.
    """
    signs = torch.randint(2, (64, a.shape[1]), device=a.device, generator=torch.Generator(a.device).manual_seed(0))
    more = (2 * signs - 1) * a[torch.arange(64, device=a.device) % len(a)]

    def of_torch(rows: Tensor) -> Tensor:
        product = torch_product(rows, b, found.dtype, precision)
        return product if bias is None else product + bias

    torchs, torchs_more = of_torch(a) if torchs is None else torchs, of_torch(more)
    all_a = torch.cat([a, more])
    exact, scale = reference.matmul(all_a, b, bias), reference.matmul_scale(all_a, b)
    if bias is not None:
        scale = scale + bias.double().abs()
    ours, theirs = (torch.cat([each, torchs_more]) for each in (found, torchs))
    factor = 2 if found.dtype == a.dtype and precision != "tf32x3" else 4
    assert_no_worse_than_torch(ours, theirs, exact, scale=scale, factor=factor, what=what)
    return scaled_error(found, exact[: len(a)], scale[: len(a)])


def _accuracy(each: Setting) -> Iterator[BitDiff]:
    """Raise where a result is not accurate; there are no bits to compare."""
    m, precision = min(each.rng.choice(each.sizes.edges), 1000), each.precision
    x, b = each.operands(m, each.k, each.n)
    grad = make_data(each.kind, (m, each.n), seed=each.seed, dtype=each.dtype, device=each.device)
    inputs = [with_layout(x, each.layouts[0]), with_layout(b.mT, each.layouts[1]), each.normal(each.n)]
    out, dx, dw, db = training_step(lambda *leaves: linear(*leaves, precision=each.asked), inputs, grad)
    wide = linear(*inputs, out_dtype=each.wide, precision=each.asked)
    x, weight, bias = inputs
    assert_accurate(out, x, weight.mT, precision, bias=bias, what="forward")
    assert_accurate(wide, x, weight.mT, precision, bias=bias, what="forward to fp32")
    assert_accurate(dx, grad, weight, precision, what="dX")
    assert_accurate(dw, grad.mT, x, precision, what="dW")
    ones = torch.ones((1, m), dtype=grad.dtype, device=each.device)
    assert_accurate(db[None], ones, grad, "ieee" if precision else "", what="db")
    yield from ()


_check = partial(Check, Setting)

CHECKS = (
    _check(
        "any tile", "every configuration of the tables gives the same bits", _any_tile,
        "every configuration for forward, dX and dW", gpu_only=NO_TILES,
    ),
    _check(
        "needle", "a row has the same bits at every position of any batch", trials.of_rows(trials.needle),
        "every position of 1 .. {most} rows",
    ),
    _check("prefill cuts", "rows have the same bits in parts as at once", trials.of_rows(trials.cut), "random cuts"),
    _check(
        "padding", "other rows change nothing", trials.of_rows(trials.padded),
        "random, NaN, Inf, huge and zero rows at both ends",
    ),
    _check("permutation", "rows in another order have the same bits", trials.of_rows(trials.permuted), "random orders"),
    _check(
        "run to run", "a call has the same bits every time", trials.of_rows(trials.repeated),
        "4 runs, other work beside",
    ),
    _check(
        "dX", "the input's gradient has the forward's contract", trials.input_gradient,
        "every position, cuts, garbage rows, permutations, runs under load",
    ),
    _check(
        "dW, db", "micro-batches cut at chunks have the bits of one pass", trials.micro_batches,
        "cuts at multiples of the chunk into main_grad, trailing zeros, runs under load",
    ),
    _check(
        "accuracy", "the error is at most twice torch's and one ulp", _accuracy,
        "forward and gradients, against fp64; 4x torch's error for fp32 of 16-bit inputs and for tf32x3",
    ),
)  # fmt: skip
