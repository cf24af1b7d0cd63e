"""Tests of the README's table of promises, one per cell, on any device.

`tests/test_promises.py` runs them on the CPU and `tests/gpu/test_promises.py` on a GPU. A test is named
test_<stem of the table's row>_<column>. Each states that bits do not change, and that the values are right: an error
against float64 of at most twice torch's.

The modules that run them give the fixtures `scale` (sizes), `product` (an operation and its precision) and `number` (a
precision).
"""

import contextlib
import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from arithmetic import NUMBERS
from encoder_oracle import assert_encoder_no_worse
from gradients import gradients_of
from tensor_cases import NEARBY, nearby
from torch.nn import functional as F

import isogemm
import isogemm.nn
from isogemm.encoder import reference
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.encoder_reference import EncoderShape, encoder_tensors, products_of_tf32, torch_encoder
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data, with_layout
from isogemm.verify.poison import poisoned_allocations


class Sizes(NamedTuple):
    """A weight [n, k] and how it and x lie in memory."""

    k: int
    n: int
    weight_layout: str = "contiguous"
    kind: str = "normal"  # of the weight's data

    def __str__(self):
        return f"{self.n}x{self.k} {self.weight_layout} {self.kind}"


class Scale(NamedTuple):
    """The sizes that one device can afford."""

    device: str
    rows: tuple[int, int]  # B, T: B * T rows
    weights: tuple[Sizes, ...]  # of linear
    few_weights: tuple[Sizes, ...]  # of the other operations
    batches: tuple[int, ...]  # rows in a call
    positions: tuple[int, ...]  # batches at every position of which a row is tried
    gradient_weights: tuple[Sizes, ...]
    encoders: tuple[tuple[EncoderShape, dict], ...]
    encoder_gradients: tuple[tuple[EncoderShape, dict], ...]  # the number of sequences is ignored

    def weights_of(self, operation):
        return self.weights if operation == "linear" else self.few_weights


# Rows: named tensors whose axis 0 is the rows, the tokens or the sequences that a result is promised for.


def _map(rows, change):
    return {name: change(each) for name, each in rows.items()}


def _slice(rows, first, last):
    return _map(rows, lambda each: each[first:last])


def _cat(*parts, dim=0):
    return {name: torch.cat([part[name] for part in parts], dim) for name in parts[0]}


def _count(rows):
    return len(next(iter(rows.values())))


def _garbage(rows, count):
    """Rows of NaN, infinities, huge and ordinary numbers and zeros, in turn; a mask leaves nothing out."""

    def fill(each):
        if each.dtype == torch.bool:
            return torch.zeros(count, *each.shape[1:], dtype=torch.bool, device=each.device)
        kinds = (torch.nan, torch.inf, torch.finfo(each.dtype).max, 1.5, -torch.inf, 0.0)
        values = torch.tensor(kinds, dtype=each.dtype, device=each.device).repeat(count // len(kinds) + 1)[:count]
        return values.view(count, *(1,) * (each.dim() - 1)).repeat(1, *each.shape[1:])

    return _map(rows, fill)


def _zeros(rows, count):
    return _map(rows, lambda each: torch.zeros(count, *each.shape[1:], dtype=each.dtype, device=each.device))


def _cuts(count, seed, pieces):
    """Bounds of up to `pieces` contiguous pieces, at random."""
    inner = random.Random(seed).sample(range(1, count), min(pieces, count) - 1)
    return list(itertools.pairwise([0, *sorted(inner), count]))


class RowFunction(NamedTuple):
    """A function whose result has one row for each row of its arguments, and must depend on nothing else."""

    call: Callable  # rows -> tensor
    rows: dict
    what: str
    whole: torch.Tensor  # call(rows)
    grid: tuple[int, int] | None = None  # B, T where rows may also come as [B, T, ...]
    vectors: bool = False  # may also come as [...]
    row_layouts: tuple[str, ...] = ()  # of x that must not matter

    def assert_rows(self, rows, expected, what):
        assert_bitwise_equal(self.call(rows), expected, f"{self.what}: {what}")

    def grid_rows(self):
        return _map(self.rows, lambda each: each.unflatten(0, self.grid))

    def grid_whole(self):
        return self.whole.unflatten(0, self.grid)


def _assert_batch(f, batches, positions):
    """Alone, in batches of every size, at every place, beside any neighbours, in any shape and strides."""
    count = _count(f.rows)
    f.assert_rows(f.rows, f.whole, "again")
    for i in {0, 1, count // 2, count - 1}:
        f.assert_rows(_slice(f.rows, i, i + 1), f.whole[i : i + 1], f"row {i} alone")
    for size in batches:
        if size < count:
            f.assert_rows(_slice(f.rows, 0, size), f.whole[:size], f"the first {size}")
            f.assert_rows(_slice(f.rows, count - size, count), f.whole[count - size :], f"the last {size}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(f.whole.device)
    f.assert_rows(_map(f.rows, lambda each: each[order]), f.whole[order], "permuted")
    for size in positions:
        for position in range(size) if size < 64 else (0, 1, size // 2, size - 1):
            row = position % count
            others = _garbage(f.rows, size - 1)
            rows = _cat(_slice(others, 0, position), _slice(f.rows, row, row + 1), _slice(others, position, size - 1))
            found = f.call(rows)[position]
            assert_bitwise_equal(found, f.whole[row], f"{f.what}: at {position} of {size}, the others garbage")
    sick, garbage = _map(f.rows, torch.clone), _garbage(f.rows, count)
    for name, each in sick.items():
        each[1::2] = garbage[name][1::2]
    assert_bitwise_equal(f.call(sick)[::2], f.whole[::2], f"{f.what}: every other row garbage")
    if f.grid:
        assert_bitwise_equal(f.call(f.grid_rows()), f.grid_whole(), f"{f.what}: as {list(f.grid)} rows")
        batch, tokens = f.grid
        repeated = _map(f.rows, lambda each: each[:tokens].expand(batch, *each[:tokens].shape))
        found = f.call(repeated)
        for at in range(batch):
            assert_bitwise_equal(found[at], f.whole[:tokens], f"{f.what}: expanded, at {at}")
    for layout in f.row_layouts:
        f.assert_rows(f.rows | {"x": with_layout(f.rows["x"], layout)}, f.whole, f"x {layout}")


def _assert_padding(f):
    """Rows of garbage or zeros before and after, of a matrix and of every matrix in a batch."""
    count = _count(f.rows)
    for before, after in ((0, 1), (1, 0), (0, 63), (17, 3), (130, 65)):
        for kind in (_garbage, _zeros):
            rows = _cat(kind(f.rows, before), f.rows, kind(f.rows, after))
            found = f.call(rows)[before : before + count]
            assert_bitwise_equal(found, f.whole, f"{f.what}: {before} rows of {kind.__name__} before, {after} after")
    if f.grid:
        batch, tokens = f.grid
        for before, after in ((0, 3), (5, 0), (7, 64 - tokens % 64)):
            for kind in (_garbage, _zeros):
                head, tail = (
                    _map(kind(f.rows, batch * max(pad, 1)), lambda each: each.unflatten(0, (batch, -1)))
                    for pad in (before, after)
                )
                head, tail = _map(head, lambda each: each[:, :before]), _map(tail, lambda each: each[:, :after])  # noqa: B023
                found = f.call(_cat(head, f.grid_rows(), tail, dim=1))[:, before : before + tokens]
                what = f"{f.what}: sequences with {before} tokens of {kind.__name__} before, {after} after"
                assert_bitwise_equal(found, f.grid_whole(), what)


def _assert_chunks(f):
    """In one call or several, cut at random: rows of a matrix, and tokens of a batch of sequences."""
    for seed, pieces in enumerate((2, 3, 5, 9)):
        cuts = _cuts(_count(f.rows), seed, pieces)
        found = torch.cat([f.call(_slice(f.rows, first, last)) for first, last in cuts])
        assert_bitwise_equal(found, f.whole, f"{f.what}: in chunks {cuts}")
    if f.grid:
        for seed, pieces in enumerate((2, 3)):
            cuts = _cuts(f.grid[1], seed, pieces)
            tokens = f.grid_rows()
            parts = [f.call(_map(tokens, lambda each: each[:, first:last])) for first, last in cuts]  # noqa: B023
            assert_bitwise_equal(torch.cat(parts, 1), f.grid_whole(), f"{f.what}: tokens in chunks {cuts}")


def _assert_decode(f, most):
    """One row at a time, or one token of every sequence at a time, as all at once."""
    count = min(_count(f.rows), most)
    found = torch.cat([f.call(_slice(f.rows, i, i + 1)) for i in range(count)])
    assert_bitwise_equal(found, f.whole[:count], f"{f.what}: row by row")
    if f.vectors:
        found = torch.stack([f.call(_map(f.rows, lambda each: each[i])) for i in range(count)])  # noqa: B023
        assert_bitwise_equal(found, f.whole[:count], f"{f.what}: vector by vector")
    if f.grid:
        tokens, steps = f.grid_rows(), min(f.grid[1], most)
        parts = [f.call(_map(tokens, lambda each: each[:, i : i + 1])) for i in range(steps)]  # noqa: B023
        assert_bitwise_equal(torch.cat(parts, 1), f.grid_whole()[:, :steps], f"{f.what}: token by token")


def _assert_micro_batches(f):
    """In equal parts, and in unequal ones, of rows or of whole sequences."""
    rows, whole = (f.grid_rows(), f.grid_whole()) if f.grid else (f.rows, f.whole)
    count = len(whole)
    parts = [[*range(0, count, size), count] for size in {1, 2, (count + 1) // 2, count}]
    parts += [[0, 1, count], [0, count - 1, count]]
    for bounds in parts:
        found = [f.call(_slice(rows, *ends)) for ends in itertools.pairwise(bounds)]
        assert_bitwise_equal(torch.cat(found), whole, f"{f.what}: micro-batches {bounds}")


# The products


def _plain(t, act):
    return F.linear(t["x"], t["weight"], t["bias"])


def _product(t, act):
    return t["x"] @ t["b"]


def _fused(t, act):
    return act(t["x"] @ t["b"] + t["bias"]) + t["residual"]


def _gated(t, act):
    return act(F.linear(t["x"], t["weight"], t["bias"])) * F.linear(t["x"], t["weight_up"], t["bias_up"])


def _mlp(t, act):
    return F.linear(act(F.linear(t["x"], t["up"], t["up_bias"])), t["down"], t["down_bias"])


def _gated_mlp(t, act):
    hidden = act(F.linear(t["x"], t["gate"], t["gate_bias"])) * F.linear(t["x"], t["up"], t["up_bias"])
    return F.linear(hidden, t["down"], t["down_bias"])


class Operation(NamedTuple):
    form: Callable  # by torch: tensors, activation -> result
    activation: Callable | None = None
    matrices_only: bool = False
    vectors: bool = True
    weights: tuple[str, ...] = ()  # whose gradient is promised through main_grad


OPERATIONS = {
    "linear": Operation(_plain, weights=("weight", "bias")),
    "linear_float32": Operation(_plain),
    "mm": Operation(_product, matrices_only=True, vectors=False),
    "matmul": Operation(_product),
    "matmul_fused": Operation(_fused, F.gelu, vectors=False),
    "swiglu": Operation(_gated, F.silu, weights=("weight", "bias", "weight_up", "bias_up")),
    "nn_linear": Operation(_plain, weights=("weight", "bias")),
    "nn_mlp": Operation(_mlp, F.gelu, weights=("up", "up_bias", "down", "down_bias")),
    "nn_mlp_gated": Operation(_gated_mlp, F.silu, weights=("gate", "gate_bias", "up", "up_bias", "down", "down_bias")),
}
MLP_OUT = 9  # features of an MLP's result; its hidden layer has n


def product_cases(numbers, few=None):
    """(operation, number): every operation with each of `numbers`, and those of `few` with its numbers."""
    cases = [(operation, number) for number in numbers for operation in OPERATIONS]
    cases += [(operation, number) for number, operations in (few or {}).items() for operation in operations]
    return [case for case in cases if case[0] != "linear_float32" or case[1] in ("bf16", "fp16")]


def _identity(z):
    return z


class Product:
    """An operation with its weights, and rows for it: the first half of normal numbers, the others of wide ones."""

    def __init__(self, operation, number, sizes, count, device):
        self.name, self.number, self.sizes, self.device = operation, number, sizes, device
        self.operation = OPERATIONS[operation]
        self.dtype, self.precision = NUMBERS[number]
        self.result_dtype = torch.float32 if operation == "linear_float32" else self.dtype
        k, n = sizes.k, sizes.n
        self.out = MLP_OUT if operation.startswith("nn_mlp") else n
        self.rows = {"x": self._rows((count, k), 0)}
        if operation == "matmul_fused":
            self.rows["residual"] = self._rows((count, n), 1)
        self.parameters = {}
        shapes = dict.fromkeys(("weight", "weight_up", "gate", "up"), (n, k)) | {"b": (k, n), "down": (MLP_OUT, n)}
        shapes |= dict.fromkeys(("bias", "bias_up", "gate_bias", "up_bias"), (n,)) | {"down_bias": (MLP_OUT,)}
        for seed, name in enumerate(self._names(), 10):
            each = self._data(sizes.kind if name in ("weight", "b") else "normal", shapes[name], seed)
            if each.dim() == 2:
                each = with_layout((each / each.shape[-1 if name != "b" else 0] ** 0.5), sizes.weight_layout)
            self.parameters[name] = each
        self.call = self._bind(self.parameters)

    def __str__(self):
        return f"{self.name} {self.number} {self.sizes}"

    def _names(self):
        if self.operation.weights:
            return self.operation.weights
        return {"linear_float32": ("weight", "bias"), "matmul_fused": ("b", "bias")}.get(self.name, ("b",))

    def _data(self, kind, shape, seed):
        return make_data(kind, shape, seed=seed, dtype=self.dtype, device=self.device)

    def _rows(self, shape, seed):
        half = (shape[0] + 1) // 2
        normal, wide = (self._data(kind, shape, 2 * seed + i) for i, kind in enumerate(("normal", "wide")))
        return torch.cat([normal[:half], wide[half:]])

    def _bind(self, p):
        """The operation on parameters: (x, residual) -> result."""
        k, n, precision = self.sizes.k, self.sizes.n, self.precision
        options = {"precision": precision}
        if self.name in ("linear", "linear_float32"):
            out = torch.float32 if self.name == "linear_float32" else None
            return lambda x: isogemm.linear(x, p["weight"], p["bias"], out_dtype=out, **options)
        if self.name in ("mm", "matmul"):
            return lambda x: getattr(isogemm, self.name)(x, p["b"], **options)
        if self.name == "matmul_fused":
            return lambda x, residual: isogemm.matmul_fused(
                x, p["b"], bias=p["bias"], activation="gelu", residual=residual, **options
            )
        if self.name == "swiglu":
            gate = {"activation": "swiglu", "weight_up": p["weight_up"], "bias_up": p["bias_up"]}
            return lambda x: isogemm.linear(x, p["weight"], p["bias"], **gate, **options)
        options |= {"device": self.device, "dtype": self.dtype}
        if self.name == "nn_linear":
            module = isogemm.nn.Linear(k, n, **options)
            _set(module, p["weight"], p["bias"])
            return module
        module = isogemm.nn.MLP(k, n, MLP_OUT, activation="swiglu" if "gate" in p else "gelu", **options)
        for name in ("gate", "up", "down"):
            if name in p:
                _set(getattr(module, name), p[name], p[f"{name}_bias"])
        return module

    def forward(self, rows):
        with poisoned_allocations(), torch.no_grad():
            return self.call(*rows.values())

    def input_gradient(self, rows):
        """The gradient of x, of rows that have the result's gradient as "grad"."""
        leaf = rows["x"].detach().requires_grad_()
        others = {name: each for name, each in rows.items() if name not in ("x", "grad")}
        with poisoned_allocations():
            result = self.call(leaf, *others.values())
            return torch.autograd.grad(result, leaf, rows["grad"])[0]

    def _torch(self, rows, parameters, act):
        """torch's result, or, of rows with "grad", its gradients of x and of the parameters."""
        leaves = _map({**rows, **parameters}, lambda each: each.detach().clone().requires_grad_("grad" in rows))
        grad = leaves.pop("grad", None)
        result = self.operation.form(leaves, act)
        if grad is None:
            return {"result": result}
        wanted = {name: each for name, each in leaves.items() if name != "residual"}
        return dict(zip(wanted, torch.autograd.grad(result, list(wanted.values()), grad.detach()), strict=True))

    def assert_right(self, found, rows):
        """`found`, the result or gradients under their names, has at most twice torch's error at the dtype.

        An element's error is measured against the same form of absolute values, without the activation. Wide rows are
        left out behind an activation: near its bend, the error of a sum that cancelled is chance. torch has no tf32x3;
        it is held to an eighth of the bound for TF32, as in test_gemm_parity.
        """
        act = self.operation.activation or _identity
        tf32 = self.number.startswith("tf32") and self.device != "cpu"
        rows = {name: each.to(self.dtype) for name, each in rows.items()}
        draws = [(rows, self.parameters)]
        if max(each.numel() for each in found.values()) <= 4096:  # the largest error of few sums is a draw
            draws += [
                (_map(rows, lambda e, i=i: nearby(e, i)), _map(self.parameters, lambda e, i=i: nearby(e, i)))
                for i in range(NEARBY)
            ]
        compared = {name: [] for name in found}
        for i, (inputs, parameters) in enumerate(draws):
            with products_of_tf32() if tf32 else contextlib.nullcontext():
                theirs = self._torch(inputs, parameters, act)
            exact = self._torch(_map(inputs, torch.Tensor.double), _map(parameters, torch.Tensor.double), act)
            positive = [_map(each, lambda e: e.double().abs()) for each in (inputs, parameters)]
            scales = self._torch(*positive, _identity)
            for name, each in found.items():
                ours = each.to(self.dtype) if i == 0 else exact[name].to(self.dtype)
                compared[name].append((ours, theirs[name], exact[name], scales[name]))
        for name, each in compared.items():
            ours, theirs, exact, scale = (torch.stack(every) for every in zip(*each, strict=True))
            if name in ("result", "x") and self.operation.activation:
                half = (ours.shape[1] + 1) // 2
                ours, theirs, exact, scale = (every[:, :half] for every in (ours, theirs, exact, scale))
            factor = 2 / 8 if self.number == "tf32x3" and tf32 and "bias" not in name else 2
            assert_no_worse_than_torch(ours, theirs, exact, scale=scale, factor=factor, what=f"{self}: {name}")


def _set(module, weight, bias):
    """Give a module these parameters themselves, with their strides and main_grads."""
    module.weight, module.bias = (
        each if isinstance(each, torch.nn.Parameter) else torch.nn.Parameter(each) for each in (weight, bias)
    )


def _functions(scale, case, gradient):
    """The operation, or the gradient of its x, with every weight, its values checked."""
    operation, number = case
    batch, tokens = scale.rows
    for sizes in scale.weights_of(operation):
        product = Product(operation, number, sizes, batch * tokens, scale.device)
        call, rows = product.forward, product.rows
        if gradient:
            call = product.input_gradient
            grad = product._rows((batch * tokens, product.out), 5)
            rows = {**rows, "grad": grad.to(product.result_dtype)}
        whole = call(rows)
        product.assert_right({"x" if gradient else "result": whole}, rows)
        kind = OPERATIONS[operation]
        yield RowFunction(
            call, rows, f"{'dX of ' if gradient else ''}{product}", whole,
            grid=None if kind.matrices_only else scale.rows, vectors=kind.vectors,
            row_layouts=("transposed", "sliced", "strided", "misaligned") if sizes.k * sizes.n < 2**18 else (),
        )  # fmt: skip


# Gradients of parameters, accumulated into main_grad


def _accumulate(parameters, step, count, cuts, start):
    """The main_grads after a backward for each of the micro-batches that `cuts` makes of `count` rows."""
    for each in parameters.values():
        each.main_grad = torch.zeros(each.shape, device=each.device)
    if start is not None:
        for name, each in parameters.items():
            each.main_grad.copy_(start[name])
    for first, last in itertools.pairwise([0, *cuts, count]):
        with poisoned_allocations():
            step(first, last)
    for name, each in parameters.items():
        assert each.grad is None, name
        assert each.grad_added_to_main_grad is True, name
    return _map(parameters, lambda each: each.main_grad)


def _assert_same(actual, expected, what):
    for name, each in expected.items():
        assert_bitwise_equal(actual[name], each, f"{name}, {what}")


def _starts(parameters):
    """main_grads to begin with: zeros, and what earlier micro-batches could have left."""
    yield None
    yield {
        name: make_data("normal", tuple(each.shape), seed=70 + i, device=each.device)
        for i, (name, each) in enumerate(parameters.items())
    }


class WeightGradients:
    """A product to train; the main_grads of its parameters after micro-batches."""

    def __init__(self, operation, number, sizes, device, chunks):
        self.product = Product(operation, number, sizes, 1, device)
        self.parameters = _map(self.product.parameters, lambda each: torch.nn.Parameter(each.clone()))
        self.chunk = max(isogemm.token_chunk(each) for each in self.parameters.values() if each.dim() == 2)
        self.count = chunks * self.chunk + 5
        self.rows = {"x": self._data(sizes.k, 20), "grad": self._data(self.product.out, 21)}
        self.call = self.product._bind(self.parameters)

    def __str__(self):
        return str(self.product)

    def _data(self, width, seed):
        """Normal numbers and, every third token, wide ones."""
        shape = (self.count, width)
        made, wide = self.product._data("normal", shape, seed), self.product._data("wide", shape, seed)
        made[::3] = wide[::3]
        return made if not self.product.operation.activation else self.product._data("normal", shape, seed)

    def __call__(self, rows, cuts=(), start=None):
        def step(first, last):
            self.call(rows["x"][first:last]).backward(rows["grad"][first:last])

        return _accumulate(self.parameters, step, _count(rows), cuts, start)

    def whole(self):
        found = self(self.rows)
        self.product.assert_right(found, self.rows)
        return found


def _weight_gradients(scale, number, chunks):
    for operation, kind in OPERATIONS.items():
        if kind.weights:
            for sizes in scale.gradient_weights if operation == "linear" else scale.gradient_weights[:1]:
                yield WeightGradients(operation, number, sizes, scale.device, chunks)


# The encoder layer


class Encoder:
    """A layer and sequences for it: results and the gradients of x, and the main_grads of its parameters."""

    def __init__(self, shape, number, options, device):
        dtype, precision = NUMBERS[number]
        self.shape, self.number, self.what = shape, number, f"{shape} {number} {options}"
        shown = {name: options[name] for name in ("norm", "activation") if name in options}
        self.tensors = encoder_tensors(shape, dtype, device=device, **({"activation": "relu"} | shown))
        grad = make_data("normal", tuple(self.tensors["x"].shape), seed=9, dtype=dtype, device=device)
        self.rows = {"x": self.tensors["x"], "grad": grad}
        self.options = {"nhead": shape.nhead, "precision": precision, **options}
        if options.get("norm") == "batch_norm":  # in eval mode: by statistics that are there
            d = shape.d_model
            mean, var = (make_data("normal", (d,), seed=seed, device=device) / 8 for seed in (40, 41))
            batches = torch.zeros((), dtype=torch.int64, device=device)
            running = isogemm.RunningStatistics(mean, 1 + var.abs(), batches)
            self.options |= {"training": False, "running": (running, running)}
        self.parameters = {name: torch.nn.Parameter(each) for name, each in self.tensors.items() if name != "x"}

    def __call__(self, rows):
        """[S, 2, T, D]: the result, and the gradient of x."""
        leaf = rows["x"].detach().clone().requires_grad_()
        params = isogemm.EncoderParameters(**_map(self.parameters, torch.Tensor.detach))
        with poisoned_allocations():
            result = isogemm.encoder_layer(leaf, params, key_padding_mask=rows.get("mask"), **self.options)
            (dx,) = torch.autograd.grad(result, leaf, rows["grad"])
        return torch.stack([result.detach(), dx], 1)

    def main_grads(self, rows, cuts=(), start=None):
        params = isogemm.EncoderParameters(**self.parameters)

        def step(first, last):
            isogemm.encoder_layer(rows["x"][first:last], params, **self.options).backward(rows["grad"][first:last])

        return _accumulate(self.parameters, step, _count(rows), cuts, start)

    def assert_right(self):
        if self.options.get("norm") == "batch_norm" or self.number == "tf32x3":
            self._assert_right_by_reference()
            return
        sequences = 3  # of which several are drawn
        options = {name: each for name, each in self.options.items() if name not in ("precision", "nhead")}
        tensors = self.tensors | {"x": self.tensors["x"][:sequences]}
        precision = self.options["precision"]
        assert_encoder_no_worse(tensors, nhead=self.shape.nhead, precision=precision, **options)

    def _assert_right_by_reference(self):
        """For batch norm, which torch's layer does not have, and tf32x3, which torch does not have.

        At most twice the error of the layer in plain torch, against the same in float64; tf32x3 is held to an eighth of
        the bound for TF32, as products are.
        """
        tf32 = self.number.startswith("tf32") and self.rows["x"].device.type != "cpu"
        compared = []
        for i in range(1 + NEARBY):
            rows = self.rows if i == 0 else _map(self.rows, lambda each, i=i: nearby(each, i - 1))
            with products_of_tf32() if tf32 else contextlib.nullcontext():
                theirs = self._reference(rows, self.rows["x"].dtype)
            exact = self._reference(rows, torch.float64)
            ours = self(rows) if i == 0 else exact.to(theirs.dtype)
            compared.append((ours, theirs, exact, exact.abs().amax((0, 2, 3), keepdim=True).expand_as(exact)))
        ours, theirs, exact, scale = (torch.stack(each) for each in zip(*compared, strict=True))
        factor = 2 / 8 if self.number == "tf32x3" else 2
        assert_no_worse_than_torch(ours, theirs, exact, scale=scale, factor=factor, what=self.what)

    def _reference(self, rows, dtype):
        """As __call__, in plain torch."""
        options = {name: each for name, each in self.options.items() if name != "precision"}
        if "running" in options:
            statistics = options["running"][0]
            wide = statistics._replace(mean=statistics.mean.to(dtype), var=statistics.var.to(dtype))
            options["running"] = (wide, wide)
        leaf = rows["x"].detach().to(dtype).requires_grad_()
        params = isogemm.EncoderParameters(**_map(self.parameters, lambda each: each.detach().to(dtype)))
        result = reference.encoder_layer(leaf, params, **options)
        (dx,) = torch.autograd.grad(result, leaf, rows["grad"].to(dtype))
        return torch.stack([result.detach(), dx], 1)

    def assert_main_grads_right(self, found):
        """At most twice torch's error; torch's is the largest over several batches, as in `assert_encoder_no_worse`."""
        options = {name: each for name, each in self.options.items() if name != "precision"}
        tf32 = self.number.startswith("tf32") and self.rows["x"].device.type != "cpu"
        draws = [self.tensors, *(_map(self.tensors, lambda e, i=i: nearby(e, i)) for i in range(NEARBY))]
        compared = {name: [] for name in found}
        for i, tensors in enumerate(draws):
            with products_of_tf32() if tf32 else contextlib.nullcontext():
                theirs = gradients_of(torch_encoder, tensors, self.rows["grad"], **options)
            exact = gradients_of(torch_encoder, tensors, self.rows["grad"], torch.float64, **options)
            for name, each in found.items():
                ours = (each if i == 0 else exact[name]).to(theirs[name].dtype)
                compared[name].append((ours, theirs[name], exact[name], exact[name].abs().amax().expand_as(each)))
        for name, each in compared.items():
            ours, theirs, exact, scale = (torch.stack(every) for every in zip(*each, strict=True))
            assert_no_worse_than_torch(ours, theirs, exact, scale=scale, what=f"{self.what}: {name}")

    def function(self, mask=None):
        rows = self.rows if mask is None else {**self.rows, "mask": mask}
        return RowFunction(self, rows, f"{self.what}{'' if mask is None else ', masked'}", self(rows))


def _encoders(scale, number):
    for shape, options in scale.encoders:
        yield Encoder(shape, number, options, scale.device)


def _encoder_functions(scale, number):
    """Each layer without a mask, and with one by which every sequence has another length."""
    for layer in _encoders(scale, number):
        layer.assert_right()
        yield layer.function()
        yield layer.function(_lengths(layer)[:, None] <= torch.arange(layer.shape.tokens, device=scale.device))


def _lengths(layer):
    draw = random.Random(layer.shape.tokens)
    made = [draw.randint(1, layer.shape.tokens) for _ in range(layer.shape.sequences)]
    return torch.tensor(made, device=layer.rows["x"].device)


def _encoder_gradients(scale, number, chunks):
    """(layer of a little more than `chunks` chunks of sequences, chunk)"""
    for shape, options in scale.encoder_gradients:
        chunk = isogemm.encoder_chunk(*shape[1:], NUMBERS[number][0], device=scale.device)
        assert chunk >= 1
        yield Encoder(shape._replace(sequences=chunks * chunk + 3), number, options, scale.device), chunk


# Fusion of plain code


def _autofuse_chains(precision):
    """name: (plain code, the explicit call), of the same tensors."""
    options = {"precision": precision}
    return {
        "relu": (
            lambda x, t: torch.relu(x @ t["b"] + t["bias"]),
            lambda x, t: isogemm.matmul_fused(x, t["b"], bias=t["bias"], activation="relu", **options),
        ),
        "linear gelu": (
            lambda x, t: F.gelu(F.linear(x, t["weight"], t["bias"])),
            lambda x, t: isogemm.linear(x, t["weight"], t["bias"], activation="gelu", **options),
        ),
        "residual": (
            lambda x, t: t["residual"][: len(x)] + F.silu(x @ t["b"]),
            lambda x, t: isogemm.matmul_fused(
                x, t["b"], activation="silu", residual=t["residual"][: len(x)], **options
            ),
        ),
        "gate": (
            lambda x, t: F.silu(F.linear(x, t["weight"])) * F.linear(x, t["weight_up"]),
            lambda x, t: isogemm.linear(x, t["weight"], weight_up=t["weight_up"], activation="swiglu", **options),
        ),
    }


class Promises:
    # products

    def test_products_batch(self, scale, product):
        for f in _functions(scale, product, gradient=False):
            _assert_batch(f, scale.batches, scale.positions)

    def test_products_padding(self, scale, product):
        for f in _functions(scale, product, gradient=False):
            _assert_padding(f)

    def test_products_chunks(self, scale, product):
        for f in _functions(scale, product, gradient=False):
            _assert_chunks(f)

    def test_products_decode(self, scale, product):
        for f in _functions(scale, product, gradient=False):
            _assert_decode(f, most=17)

    def test_products_micro_batches(self, scale, product):
        for f in _functions(scale, product, gradient=False):
            _assert_micro_batches(f)

    # input_gradients

    def test_input_gradients_batch(self, scale, product):
        for f in _functions(scale, product, gradient=True):
            _assert_batch(f, scale.batches, scale.positions[:2])

    def test_input_gradients_padding(self, scale, product):
        for f in _functions(scale, product, gradient=True):
            _assert_padding(f)

    def test_input_gradients_chunks(self, scale, product):
        for f in _functions(scale, product, gradient=True):
            _assert_chunks(f)

    def test_input_gradients_micro_batches(self, scale, product):
        for f in _functions(scale, product, gradient=True):
            _assert_micro_batches(f)

    # weight_gradients

    def test_weight_gradients_padding(self, scale, number):
        """Trailing rows whose gradient is zero, whatever x they have."""
        for trained in _weight_gradients(scale, number, chunks=1):
            whole = trained.whole()
            for more in (1, 63, trained.chunk + 1):
                for kind in ("zeros", "normal"):
                    rows = _cat(trained.rows, _zeros(trained.rows, more))
                    if kind == "normal":
                        rows["x"][-more:] = trained.product._data("normal", rows["x"][-more:].shape, 30)
                    _assert_same(trained(rows), whole, f"{trained}: {more} rows without a gradient, x {kind}")

    def test_weight_gradients_micro_batches(self, scale, number):
        for trained in _weight_gradients(scale, number, chunks=3):
            whole, chunk = trained.whole(), trained.chunk
            for start in _starts(trained.parameters):
                expected = whole if start is None else trained(trained.rows, start=start)
                for cuts in ([chunk], [2 * chunk], [chunk, 2 * chunk, 3 * chunk]):
                    what = f"{trained}: cut at {cuts}{'' if start is None else ', onto others'}"
                    _assert_same(trained(trained.rows, cuts, start), expected, what)

    def test_weight_gradients_token_chunk(self, scale, number):
        """A positive int, of the weight or of its module, of shape and dtype alone."""
        dtype, _ = NUMBERS[number]
        for sizes in scale.gradient_weights:
            weight = torch.zeros(sizes.n, sizes.k, dtype=dtype, device=scale.device)
            chunk = isogemm.token_chunk(weight)
            assert type(chunk) is int
            assert chunk > 0
            options = {"device": scale.device, "dtype": dtype}
            for module in (isogemm.nn.Linear, torch.nn.Linear):
                assert isogemm.token_chunk(module(sizes.k, sizes.n, **options)) == chunk
            assert isogemm.token_chunk(torch.nn.Parameter(weight)) == chunk

    # encoder_layer

    def test_encoder_layer_batch(self, scale, number):
        for f in _encoder_functions(scale, number):
            _assert_batch(f, scale.batches, scale.positions[:2])

    def test_encoder_layer_padding(self, scale, number):
        """Tokens after a sequence's own, which a mask leaves out and whose result nobody reads."""
        for layer in _encoders(scale, number):
            layer.assert_right()
            tokens, count = layer.shape.tokens, layer.shape.sequences
            expected, device = layer(layer.rows), scale.device
            for wide in (tokens + 1, 64, 128):
                for value in (0.0, 100.0):
                    more = torch.full((count, wide - tokens, layer.shape.d_model), value, dtype=expected.dtype)
                    more = more.to(device)
                    rows = _cat(layer.rows, {"x": more, "grad": torch.zeros_like(more)}, dim=1)
                    left_out = (torch.arange(wide, device=device) >= tokens).expand(count, -1)
                    scores = torch.zeros(count, wide, dtype=expected.dtype, device=device)
                    for mask in (left_out, scores.masked_fill(left_out, -torch.inf)):
                        found = layer({**rows, "mask": mask})[:, :, :tokens]
                        what = f"{layer.what}: {tokens} tokens in {wide}, {value} behind, mask {mask.dtype}"
                        assert_bitwise_equal(found, expected, what)
            lengths = _lengths(layer)
            mask = torch.arange(tokens, device=device) >= lengths[:, None]
            rows = {**layer.rows, "grad": layer.rows["grad"].masked_fill(mask[..., None], 0), "mask": mask}
            found = layer(rows)
            for i, own in enumerate(lengths[:5].tolist()):
                alone = layer(_map(layer.rows, lambda each: each[i : i + 1, :own]))  # noqa: B023
                what = f"{layer.what}: sequence {i} with {own} of {tokens} tokens"
                assert_bitwise_equal(found[i : i + 1, :, :own], alone, what)

    def test_encoder_layer_micro_batches(self, scale, number):
        for f in _encoder_functions(scale, number):
            _assert_micro_batches(f)

    # encoder_gradients

    def test_encoder_gradients_padding(self, scale, number):
        """Trailing sequences whose gradient is zero."""
        for layer, chunk in _encoder_gradients(scale, number, chunks=1):
            whole = layer.main_grads(layer.rows)
            layer.assert_main_grads_right(whole)
            for more in (1, chunk + 1):
                shape = (more, *layer.rows["x"].shape[1:])
                other = make_data("normal", shape, seed=more, dtype=layer.rows["x"].dtype, device=scale.device)
                rows = _cat(layer.rows, {"x": other, "grad": torch.zeros_like(other)})
                _assert_same(layer.main_grads(rows), whole, f"{layer.what}: {more} sequences without a gradient")

    def test_encoder_gradients_micro_batches(self, scale, number):
        for layer, chunk in _encoder_gradients(scale, number, chunks=2):
            for start in _starts(layer.parameters):
                whole = layer.main_grads(layer.rows, start=start)
                if start is None:
                    layer.assert_main_grads_right(whole)
                for cuts in ([chunk], [2 * chunk], [chunk, 2 * chunk]):
                    what = f"{layer.what}: cut at {cuts}{'' if start is None else ', onto others'}"
                    _assert_same(layer.main_grads(layer.rows, cuts, start), whole, what)

    # autofuse

    def test_autofuse_batch(self, scale, number):
        """A fused chain has the bits of the explicit call, and so those of a row alone."""
        precision = NUMBERS[number][1]
        if precision == "tf32x3":  # no setting of torch's, which plain code has its precision from
            precision = "ieee"
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = precision or "ieee"
        try:
            self._assert_autofuse(scale, number, precision)
        finally:
            torch.backends.cuda.matmul.fp32_precision = before

    def _assert_autofuse(self, scale, number, precision):
        for sizes in scale.few_weights:
            tensors = Product("swiglu", number, sizes, max(scale.batches), scale.device)
            named = {**tensors.rows, **tensors.parameters}
            named["b"] = named["weight"].mT.contiguous()
            named["residual"] = tensors._rows((max(scale.batches), sizes.n), 3)
            for name, (plain, explicit) in _autofuse_chains(precision).items():
                for size in (*scale.batches, 1):
                    x = named["x"][:size]
                    with torch.no_grad():
                        expected = explicit(x, named)
                        with isogemm.autofuse() as report:
                            found = plain(x, named)
                        assert sum(report.fused.values()) == 1, f"{name}: {report}"
                        assert_bitwise_equal(found, expected, f"{name} {number} {sizes}: {size} rows")
                        alone = explicit(x[:1], named)
                    assert_bitwise_equal(found[:1], alone, f"{name} {number} {sizes}: row 0 of {size}")


class TinyPromises:
    """Promised where the tiny kernels serve, which is on a GPU."""

    def test_bmm_batch(self, number):
        dtype, precision = NUMBERS[number]
        served = 0
        for m, k, n, layout in ((12, 64, 12, "transposed"), (3, 7, 5, "contiguous"), (17, 17, 17, "contiguous")):
            a = make_data("normal", (1000, m, k), seed=0, dtype=dtype, device="cuda")
            b = with_layout(make_data("wide", (1000, k, n), seed=1, dtype=dtype, device="cuda"), layout)
            with isogemm.dispatch_log() as log:
                whole = isogemm.bmm(a, b, precision=precision)
            if log[-1].path != "tiny":
                continue
            served += 1
            exact, size = torch.bmm(a.double(), b.double()), torch.bmm(a.double().abs(), b.double().abs())
            with products_of_tf32() if number == "tf32" else contextlib.nullcontext():
                theirs = torch.bmm(a, b)
            assert_no_worse_than_torch(whole, theirs, exact, scale=size, what=f"bmm {m}x{k}x{n} {number}")

            def call(rows):
                with poisoned_allocations():
                    return isogemm.bmm(rows["a"], rows["b"], precision=precision)

            with isogemm.dispatch_log() as log:
                for first, last in ((0, 2), (1, 3), (998, 1000), (500, 517), (0, 127), (3, 1000)):
                    found = call({"a": a[first:last], "b": b[first:last]})
                    assert_bitwise_equal(found, whole[first:last], f"matrices {first} to {last}")
                for count in (2, 3, 17):
                    for position in range(count):
                        others = _garbage({"a": a, "b": b}, count)
                        others["a"][position], others["b"][position] = a[position], b[position]
                        found = call(others)[position]
                        assert_bitwise_equal(found, whole[position], f"at {position} of {count}")
            assert {entry.path for entry in log} == {"tiny"}
        assert served
