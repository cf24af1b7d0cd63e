"""The promises' products: operations, their gradients, what torch computes, and chains that autofuse finds."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from arithmetic import NUMBERS
from tensor_cases import NEARBY, nearby
from torch.nn import functional as F

import isogemm
import isogemm.nn
from isogemm.verify.encoder_reference import products_of_tf32
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data, with_layout
from isogemm.verify.poison import poisoned_allocations
from promises.main_grads import accumulate
from promises.rows import RowFunction, count_rows, map_rows


class Sizes(NamedTuple):
    """A weight [n, k] and how it and x lie in memory."""

    k: int
    n: int
    weight_layout: str = "contiguous"
    kind: str = "normal"  # of the weight's data

    def __str__(self):
        return f"{self.n}x{self.k} {self.weight_layout} {self.kind}"


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
        leaves = map_rows({**rows, **parameters}, lambda each: each.detach().clone().requires_grad_("grad" in rows))
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
                (map_rows(rows, lambda e, i=i: nearby(e, i)), map_rows(self.parameters, lambda e, i=i: nearby(e, i)))
                for i in range(NEARBY)
            ]
        compared = {name: [] for name in found}
        for i, (inputs, parameters) in enumerate(draws):
            with products_of_tf32() if tf32 else contextlib.nullcontext():
                theirs = self._torch(inputs, parameters, act)
            exact = self._torch(map_rows(inputs, torch.Tensor.double), map_rows(parameters, torch.Tensor.double), act)
            positive = [map_rows(each, lambda e: e.double().abs()) for each in (inputs, parameters)]
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


def row_functions(scale, case, gradient):
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


class WeightGradients:
    """A product to train; the main_grads of its parameters after micro-batches."""

    def __init__(self, operation, number, sizes, device, chunks):
        self.product = Product(operation, number, sizes, 1, device)
        self.parameters = map_rows(self.product.parameters, lambda each: torch.nn.Parameter(each.clone()))
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

        return accumulate(self.parameters, step, count_rows(rows), cuts, start)

    def whole(self):
        found = self(self.rows)
        self.product.assert_right(found, self.rows)
        return found


def weight_gradients(scale, number, chunks):
    for operation, kind in OPERATIONS.items():
        if kind.weights:
            for sizes in scale.gradient_weights if operation == "linear" else scale.gradient_weights[:1]:
                yield WeightGradients(operation, number, sizes, scale.device, chunks)


def autofuse_chains(precision):
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
