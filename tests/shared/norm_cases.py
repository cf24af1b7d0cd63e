"""Norms, softmax, log-softmax and embedding beside torch's, and the properties that hold of them on every device."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from promises.main_grads import accumulate, assert_same, starts
from promises.rows import RowFunction, join_rows, slice_rows
from torch.nn import functional as F

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations

CHUNK = 1024  # tokens: micro-batches cut at its multiples have the bits of one pass
EPS = 1e-5


class Operation(NamedTuple):
    """An operation by isogemm and by torch: tensors by name -> one result or several."""

    ours: Callable
    theirs: Callable
    rows: tuple[str, ...] = ("x",)
    weights: tuple[str, ...] = ()


def _wide(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _residual_first(norm):
    """A norm computed in fp32 or wider and rounded once, of x or of x + residual, which is then returned too."""

    def call(x, residual=None, **weights):
        total = x if residual is None else x + residual
        y = norm(_wide(total), **{name: _wide(each) for name, each in weights.items()}).to(x.dtype)
        return y if residual is None else (y, total)

    return call


@_residual_first
def _rms_norm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


@_residual_first
def _rms_norm_of_gemma(x, weight):
    return F.rms_norm(x, x.shape[-1:], None, EPS) * (1.0 + weight)


@_residual_first
def _layer_norm(x, weight=None, bias=None):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


OPERATIONS = {
    "rms_norm": Operation(lambda **t: isogemm.rms_norm(**t, eps=EPS), _rms_norm, weights=("weight",)),
    "rms_norm_gemma": Operation(
        lambda **t: isogemm.rms_norm(**t, eps=EPS, offset=1.0), _rms_norm_of_gemma, ("x", "residual"), ("weight",)
    ),
    "layer_norm": Operation(lambda **t: isogemm.layer_norm(**t, eps=EPS), _layer_norm, weights=("weight", "bias")),
    "layer_norm_residual": Operation(
        lambda **t: isogemm.layer_norm(**t, eps=EPS), _layer_norm, ("x", "residual"), ("weight", "bias")
    ),
    "layer_norm_plain": Operation(lambda **t: isogemm.layer_norm(**t, eps=EPS), _layer_norm),
    "softmax": Operation(lambda **t: isogemm.softmax(**t), lambda x: F.softmax(x, -1)),
    "log_softmax": Operation(lambda **t: isogemm.log_softmax(**t), lambda x: F.log_softmax(x, -1)),
}
WEIGHTED = [name for name, operation in OPERATIONS.items() if operation.weights]
RESIDUAL = [name for name, operation in OPERATIONS.items() if "residual" in operation.rows]


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


class Case:
    """An operation with its weights, and rows of n for it with the gradients of its results.

    The rows are of one kind of data, or by default half of them normal and the others of wide exponents.
    """

    def __init__(self, name, n, dtype, count, *, device="cpu", kind=None):
        self.name, self.n, self.dtype, self.operation = name, n, dtype, OPERATIONS[name]
        self.inputs = self.operation.rows
        self.grads = ("grad", "grad_total")[: len(self.inputs)]
        self.rows = {}
        for seed, each in enumerate((*self.inputs, *self.grads)):
            kinds = (kind, kind) if kind else ("normal", "wide")
            halves = [self._data(of, (half, n), 2 * seed + i, device) for i, of, half in _halves(kinds, count)]
            self.rows[each] = torch.cat(halves)
        self.weights = {
            each: 1 + self._data("normal", (n,), seed, device) / 4
            for seed, each in enumerate(self.operation.weights, 50)
        }

    def __str__(self):
        return f"{self.name} of {self.n}, {str(self.dtype).removeprefix('torch.')}"

    def _data(self, kind, shape, seed, device):
        if kind == "shifted":  # a mean that a careless variance loses
            return make_data("normal", shape, seed=seed, dtype=self.dtype, device=device) + 100
        return make_data(kind, shape, seed=seed, dtype=self.dtype, device=device)

    def results(self, rows, *, trained=True):
        """Results and gradients of the row inputs, stacked as [..., results and gradients, n]."""
        leaves = {name: rows[name].detach().requires_grad_() for name in self.inputs}
        weights = {name: each.detach().requires_grad_(trained) for name, each in self.weights.items()}
        with poisoned_allocations():
            results = as_tuple(self.operation.ours(**leaves, **weights))
            asked = [*leaves.values(), *(weights.values() if trained else ())]
            found = torch.autograd.grad(results, asked, [rows[name] for name in self.grads])
        return torch.stack([*(each.detach() for each in results), *found[: len(leaves)]], -2)

    def function(self, grid=None, row_layouts=()):
        whole = self.results(self.rows)
        return RowFunction(self.results, self.rows, str(self), whole, grid, vectors=True, row_layouts=row_layouts)

    def main_grads(self, rows=None, cuts=(), start=None):
        """The weights' main_grads after a backward for each micro-batch."""
        rows = self.rows if rows is None else rows
        parameters = {name: torch.nn.Parameter(each.clone()) for name, each in self.weights.items()}

        def step(first, last):
            part = slice_rows(rows, first, last)
            leaves = {name: part[name].detach().requires_grad_() for name in self.inputs}
            results = as_tuple(self.operation.ours(**leaves, **parameters))
            torch.autograd.backward(results, [part[name] for name in self.grads])

        return accumulate(parameters, step, len(rows["x"]), cuts, start)

    def gradients(self, function, dtype=None):
        """Results and the gradients of all inputs, by name."""
        tensors = {name: self.rows[name] for name in self.inputs} | self.weights
        leaves = {name: each.detach().to(dtype or each.dtype).requires_grad_() for name, each in tensors.items()}
        results = as_tuple(function(**leaves))
        grads = [self.rows[name].to(each.dtype) for name, each in zip(self.grads, results, strict=False)]
        found = torch.autograd.grad(results, list(leaves.values()), grads)
        named = {("y", "total")[i]: each.detach() for i, each in enumerate(results)}
        return named | {f"gradient of {name}": each for name, each in zip(leaves, found, strict=True)}

    def error_sizes(self):
        """The natural sizes of the gradients' rounding errors: those of the terms that each is the sum of."""
        x, grad = (self.rows[name].double() for name in ("x", "grad"))
        weights = {}
        if self.name == "softmax":
            y = x.softmax(-1)
            size = y * (grad.abs() + (grad * y).abs().sum(-1, keepdim=True))
        elif self.name == "log_softmax":
            size = grad.abs() + x.softmax(-1) * grad.abs().sum(-1, keepdim=True)
        else:
            if "residual" in self.inputs:
                x = x + self.rows["residual"].double()
            error = x.abs()  # of the centred x, but for a factor
            if "rms" not in self.name:
                error = error + error.mean(-1, keepdim=True)
                x = x - x.mean(-1, keepdim=True)
            factor = self.weights["weight"].double().abs() if self.weights else 1.0
            scale = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
            size = scale * (grad.abs() * (factor + 1)).amax(-1, keepdim=True)
            terms = {"weight": grad.abs() * error * scale, "bias": grad.abs()}
            weights = {name: terms[name].flatten(0, -2).sum(0) for name in self.weights}
            if "grad_total" in self.rows:
                size = size + self.rows["grad_total"].double().abs()
        return dict.fromkeys(self.inputs, size.amax(-1, keepdim=True).expand(x.shape)) | weights


def _halves(kinds, count):
    half = (count + 1) // 2
    return zip(range(2), kinds, (half, count - half), strict=True)


def assert_right(case):
    """Results and gradients at most twice as wrong as torch's."""
    with poisoned_allocations():
        actual = case.gradients(case.operation.ours)
    theirs = case.gradients(case.operation.theirs)
    exact = case.gradients(case.operation.theirs, torch.float64)
    sizes = case.error_sizes()
    for name, right in exact.items():
        scale = sizes.get(name.removeprefix("gradient of "))
        if name == "gradient of bias":  # a sum over rows, whose terms may cancel
            scale = case.rows["grad"].double().abs().flatten(0, -2).sum(0)
        ulps = 1 if right.numel() >= 64 else 8  # the error of few sums is a draw, not a largest of many
        assert_no_worse_than_torch(actual[name], theirs[name], right, scale=scale, ulps=ulps, what=f"{case}: {name}")


def assert_frozen_weights_change_nothing(case):
    """dX has the same bits whether the weights are trained or not, and so has the result without any gradient."""
    expected = case.results(case.rows)
    assert_bitwise_equal(case.results(case.rows, trained=False), expected, f"{case}: frozen weights")
    if case.weights:
        weights = {name: each.detach().requires_grad_() for name, each in case.weights.items()}
        results = as_tuple(case.operation.ours(**{name: case.rows[name] for name in case.inputs}, **weights))
        found = torch.autograd.grad(results[0], list(weights.values()), case.rows["grad"])
        trained = case.gradients(case.operation.ours)
        for name, each in zip(weights, found, strict=True):
            assert_bitwise_equal(each, trained[f"gradient of {name}"], f"{case}: {name}, frozen x")
    with torch.no_grad():
        results = as_tuple(case.operation.ours(**{name: case.rows[name] for name in case.inputs}, **case.weights))
    for i, each in enumerate(results):
        assert_bitwise_equal(each, expected[..., i, :], f"{case}: no gradients")


def assert_layouts_change_nothing(case, layouts):
    """`layouts` is a function tensor -> (what, the same tensor in other memory) pairs, for every argument in turn."""
    expected = case.results(case.rows)
    for name in case.rows:
        for what, each in layouts(case.rows[name]):
            assert_bitwise_equal(case.results(case.rows | {name: each}), expected, f"{case}: {name} {what}")
    weights = case.weights
    for name in weights:
        for what, each in layouts(weights[name]):
            case.weights = weights | {name: each}
            assert_bitwise_equal(case.results(case.rows), expected, f"{case}: {name} {what}")
    case.weights = weights


def assert_micro_batches_add_up(case):
    """Weight gradients through main_grad: in micro-batches at multiples of the chunk the bits of one pass."""
    count = len(case.rows["x"])
    assert count > 3 * CHUNK
    whole = case.main_grads()
    for start in starts(case.weights):
        expected = whole if start is None else case.main_grads(start=start)
        for cuts in ([CHUNK], [2 * CHUNK], [CHUNK, 2 * CHUNK, 3 * CHUNK]):
            what = f"{case}: cut at {cuts}{'' if start is None else ', onto others'}"
            assert_same(case.main_grads(None, cuts, start), expected, what)
    for more in (1, CHUNK + 1):
        others = {name: each[:more] for name, each in case.rows.items()}
        others |= {name: torch.zeros_like(others[name]) for name in case.grads}
        assert_same(case.main_grads(join_rows(case.rows, others)), whole, f"{case}: {more} rows without a gradient")
    found = case.gradients(case.operation.ours)
    for name, each in whole.items():
        assert_bitwise_equal(found[f"gradient of {name}"], each.to(case.dtype), f"{case}: {name}.grad, rounded once")


class Lookup:
    """An embedding: a table [vocab, n], ids with repetitions, and the gradient of the result."""

    def __init__(self, vocab, n, dtype, count, *, device="cpu", padding_idx=None, index=torch.int64):
        self.weight = make_data("normal", (vocab, n), seed=0, dtype=dtype, device=device)
        self.grad = make_data("normal", (count, n), seed=1, dtype=dtype, device=device)
        generator = torch.Generator().manual_seed(2)
        some = torch.randint(vocab, (count,), generator=generator)
        few = torch.randint(min(3, vocab), (count,), generator=generator)
        self.ids = torch.where(torch.rand(count, generator=generator) < 0.5, some, few).to(device, index)
        self.padding_idx = padding_idx

    def __str__(self):
        return f"embedding of {len(self.ids)} ids in {list(self.weight.shape)}, {self.weight.dtype}"

    def gradient(self, ids=None, grad=None, function=None, dtype=None):
        """The gradient of the table, and the result."""
        ids, grad = self.ids if ids is None else ids, self.grad if grad is None else grad
        weight = self.weight.detach().to(dtype or self.weight.dtype).requires_grad_()
        result = (function or isogemm.embedding)(ids, weight, padding_idx=self.padding_idx)
        (found,) = torch.autograd.grad(result, weight, grad.to(result.dtype))
        return found, result.detach()

    def main_grad(self, cuts=(), start=None, ids=None, grad=None):
        ids, grad = self.ids if ids is None else ids, self.grad if grad is None else grad
        parameters = {"weight": torch.nn.Parameter(self.weight.clone())}

        def step(first, last):
            part = isogemm.embedding(ids[first:last], parameters["weight"], padding_idx=self.padding_idx)
            part.backward(grad[first:last])

        return accumulate(parameters, step, len(ids), cuts, start)

    def assert_right(self):
        """The rows of the table, bit for bit; its gradient at most twice as wrong as torch's."""
        with poisoned_allocations():
            found, result = self.gradient()
        theirs, rows = self.gradient(function=F.embedding)
        exact, _ = self.gradient(function=F.embedding, dtype=torch.float64)
        assert_bitwise_equal(result, rows, str(self))
        assert_no_worse_than_torch(found, theirs, exact, what=f"{self}: dweight")

    def assert_micro_batches_add_up(self):
        assert len(self.ids) > 3 * CHUNK
        whole = self.main_grad()
        for start in starts({"weight": self.weight}):
            expected = whole if start is None else self.main_grad(start=start)
            for cuts in ([CHUNK], [2 * CHUNK], [CHUNK, 2 * CHUNK, 3 * CHUNK]):
                what = f"{self}: cut at {cuts}{'' if start is None else ', onto others'}"
                assert_same(self.main_grad(cuts, start), expected, what)
        assert_bitwise_equal(self.gradient()[0], whole["weight"].to(self.weight.dtype), f"{self}: .grad, rounded once")
        zeros = torch.zeros_like(self.grad[: CHUNK + 1])
        padded = self.main_grad(ids=torch.cat([self.ids, self.ids[: CHUNK + 1]]), grad=torch.cat([self.grad, zeros]))
        assert_same(padded, whole, f"{self}: more tokens without a gradient")

    def assert_a_row_depends_on_its_own_tokens(self):
        """The gradient of a table's row: other tokens may have any other ids and gradients, also NaN."""
        expected, _ = self.gradient()
        for row in (0, 1, len(self.weight) - 1):
            own = self.ids == row
            other = 2 if row == 1 else 1
            ids = torch.where(own, self.ids, torch.full_like(self.ids, other))
            grad = torch.where(own[:, None], self.grad, torch.full_like(self.grad, torch.nan))
            found, _ = self.gradient(ids, grad)
            assert_bitwise_equal(found[row], expected[row], f"{self}: row {row}, the others garbage")
