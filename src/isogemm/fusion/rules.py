"""Which calls of torch become the epilogue of a product, in eager mode and in a graph alike.

A chain is a `Product` and the keyword arguments that `isogemm.linear` or `isogemm.matmul_fused` would get for what
follows it. Each rule takes a chain and one step and returns the longer chain's arguments, or a sentence that says why
the step does not fit. Operands are the caller's: tensors, or a graph's nodes; `like` gives shape, dtype and device.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from isogemm.epilogues import ACTIVATIONS

Function = Callable[..., Any]
Arguments = dict[str, Any]
Tensor = torch.Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
GATED = {entry.gate: entry.name for entry in ACTIVATIONS.values() if entry.gate}  # from the gate's activation

_SCALES = frozenset({"alpha", "row_scale", "col_scale"})
_AFTER_SUM = frozenset({"activation", "dropout_p", "residual"})
_LEAST, _MOST = 1e-30, 1e30  # of scalar factors: their products stay far from float32's ends


class Product:
    """x @ weight.T where `is_linear`, else a @ b. `shape`, `dtype` and `device` are the result's."""

    __slots__ = ("a", "b", "device", "dtype", "is_linear", "shape")

    def __init__(self, a: Any, b: Any, is_linear: bool, shape: Any, dtype: torch.dtype, device: Any) -> None:
        self.a, self.b, self.is_linear = a, b, is_linear
        self.shape, self.dtype, self.device = shape, dtype, device


class ProductCall(NamedTuple):
    """alpha * (a @ b) + beta * c, or alpha * (a @ b.T) + beta * c where `is_linear`; c broadcasts."""

    a: Any
    b: Any
    is_linear: bool
    c: Any = None
    beta: Any = 1
    alpha: Any = 1


class Sum(NamedTuple):
    left: Any
    right: Any
    left_scale: Any = 1
    right_scale: Any = 1


class Factors(NamedTuple):
    left: Any
    right: Any
    divides: bool = False  # left / right


def _matmul(a: Any, b: Any) -> ProductCall:
    return ProductCall(a, b, False)


def _matmul_named(input: Any, other: Any) -> ProductCall:
    return ProductCall(input, other, False)


def _mm(input: Any, mat2: Any) -> ProductCall:
    return ProductCall(input, mat2, False)


def _linear(input: Any, weight: Any, bias: Any = None) -> ProductCall:
    return ProductCall(input, weight, True, bias)


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> ProductCall:
    return ProductCall(mat1, mat2, False, input, beta, alpha)


def _add(input: Any, other: Any, *, alpha: Any = 1) -> Sum:
    return Sum(input, other, 1, alpha)


def _sub(input: Any, other: Any, *, alpha: Any = 1) -> Sum:
    return Sum(input, other, 1, _negative(alpha))


def _rsub(input: Any, other: Any, *, alpha: Any = 1) -> Sum:
    return Sum(input, other, _negative(alpha), 1)


def _negative(alpha: Any) -> Any:
    return alpha if isinstance(alpha, bool) else -alpha  # torch takes no bool: it stays one, to be refused


def _mul(input: Any, other: Any) -> Factors:
    return Factors(input, other)


def _div(input: Any, other: Any) -> Factors:
    return Factors(input, other, True)


def _neg(input: Any) -> Factors:
    return Factors(input, -1)


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> float:
    return p if training or not 0 <= p <= 1 else 0.0


def _torch_dropout(input: Any, p: float, train: bool) -> float:
    return _dropout(input, p, train)


def _table(*rows: tuple[Function, Sequence[Function]]) -> dict[Function, Function]:
    return {function: parser for parser, functions in rows for function in functions}


# From a function to one that takes its arguments and returns the call in its normal form; TypeError where they are not
# what torch's function takes in that form.
PRODUCTS = _table(
    (_matmul, (operator.matmul, Tensor.__matmul__)),
    (_matmul_named, (torch.matmul, Tensor.matmul)),
    (_mm, (torch.mm, Tensor.mm)),
    (_linear, (F.linear,)),
    (_addmm, (torch.addmm, Tensor.addmm)),
)
REVERSED: frozenset[Function] = frozenset({torch.rsub, Tensor.__rsub__})  # the second argument comes first
SUMS = _table(
    (_add, (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, operator.add)),
    (_sub, (torch.sub, torch.subtract, Tensor.sub, Tensor.subtract, Tensor.__sub__, operator.sub)),
    (_rsub, tuple(REVERSED)),
)
FACTORS = _table(
    (_mul, (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__, operator.mul)),
    (_div, (torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.true_divide)),
    (_div, (Tensor.__truediv__, operator.truediv)),
    (_neg, (torch.neg, torch.negative, Tensor.neg, Tensor.negative, Tensor.__neg__, operator.neg)),
)
DROPOUTS = _table((_dropout, (F.dropout,)), (_torch_dropout, (torch.dropout,)))  # its probability, 0 where it is off
SQUARES: frozenset[Function] = frozenset(
    {torch.square, Tensor.square, torch.pow, Tensor.pow, Tensor.__pow__, operator.pow}
)
ACTIVATION_FUNCTIONS = frozenset(function for entry in ACTIVATIONS.values() for function in entry.functions)

# In place, and the function that gives the same as a new tensor.
OUT_OF_PLACE: dict[Function, Function] = {
    Tensor.add_: torch.add,
    Tensor.__iadd__: torch.add,
    operator.iadd: torch.add,
    Tensor.sub_: torch.sub,
    Tensor.__isub__: torch.sub,
    operator.isub: torch.sub,
    Tensor.mul_: torch.mul,
    Tensor.__imul__: torch.mul,
    operator.imul: torch.mul,
    Tensor.div_: torch.div,
    Tensor.__itruediv__: torch.div,
    operator.itruediv: torch.div,
    Tensor.neg_: torch.neg,
    torch.relu_: torch.relu,
    Tensor.relu_: torch.relu,
    torch.sigmoid_: torch.sigmoid,
    Tensor.sigmoid_: torch.sigmoid,
    torch.tanh_: torch.tanh,
    Tensor.tanh_: torch.tanh,
}


def start(a: Any, b: Any, is_linear: bool, like_a: Any, like_b: Any, dtype: torch.dtype) -> Product | str:
    """The product as a chain's beginning; `dtype` is the result's, which autocast may have chosen."""
    shape = _product_shape(like_a.shape, like_b.shape, is_linear)
    if isinstance(shape, str):
        return shape
    if dtype not in DTYPES:
        return f"{name_of(dtype)} is not fused"
    return Product(a, b, is_linear, shape, dtype, like_a.device)


@functools.lru_cache
def _product_shape(rows: Sequence[Any], columns: Sequence[Any], is_linear: bool) -> tuple[Any, ...] | str:
    if len(columns) != 2:
        return f"the right operand has {len(columns)} dimensions: 2 are fused"
    if len(rows) < 2:
        return f"the left operand has {len(rows)} dimension: 2 or more are fused"
    inner, n = reversed(columns) if is_linear else columns
    return (*rows[:-1], n) if rows[-1] == inner else "the operands' sizes differ"


def with_addend(product: Product, call: ProductCall, like: Any) -> Arguments | str:
    """The product's own alpha, beta and c: a linear's bias, or what addmm takes."""
    arguments: Arguments | str = {}
    if call.alpha != 1:
        arguments = scaled(product, {}, call.alpha, call.alpha)
    if isinstance(arguments, str) or call.c is None:
        return arguments
    if call.is_linear:  # autocast casts it, and so does isogemm.linear
        if tuple(like.shape) != (product.shape[-1],):
            return "the bias has another shape than [N]"
        return {**arguments, "bias": call.c}
    return added(product, arguments, call.c, like, call.beta)


def scaled(product: Product, arguments: Arguments, factor: Any, like: Any, *, divides: bool = False) -> Arguments | str:
    """The chain times a scalar or a scale vector, or divided by a scalar."""
    if not _SCALES.issuperset(arguments):
        return "a factor comes after the sum"
    if isinstance(like, int | float):
        return _scaled_by_number(arguments, like, divides)
    if not _is_operand(like):
        return "the factor is neither a number nor a tensor"
    if divides:
        return "it is divided by a tensor"
    is_scalar = len(like.shape) == 0
    # A float32 scalar is no wider than the numbers that torch multiplies 16-bit tensors by.
    if reason := _unlike(product, like, torch.float32 if is_scalar else None):
        return f"the factor {reason}"
    if is_scalar:
        return "it has two scalar factors" if "alpha" in arguments else {**arguments, "alpha": factor}
    by_columns, by_rows, _ = _fit(like.shape, product.shape)
    if by_columns:
        return _once(arguments, "col_scale", factor)
    if by_rows:
        return _once(arguments, "row_scale", factor)
    return "the factor is neither a scalar, a row nor a column"


def added(product: Product, arguments: Arguments, addend: Any, like: Any, scale: Any = 1) -> Arguments | str:
    """The chain plus `scale` times a bias, a column bias or a tensor of its own shape."""
    if not _is_operand(like):
        return "a number is added"
    if (type(scale) is not int or scale != 1) and not _is_factor(scale):
        return f"the addend's factor is {scale!r}"
    if reason := _unlike(product, like):
        return f"the addend {reason}"
    if "residual" in arguments:
        return "more is added after the residual"
    before_activation = _AFTER_SUM.isdisjoint(arguments)
    by_columns, by_rows, is_whole = _fit(like.shape, product.shape)
    if before_activation and scale == 1 and "bias" not in arguments and (by_columns or by_rows):
        return {**arguments, "bias": addend} if by_columns else {**arguments, "bias": addend, "bias_dim": -2}
    if not is_whole:
        kind = "a second, a late or a scaled bias" if by_columns or by_rows else "neither a bias nor of its shape"
        return f"the addend is {kind}"
    if before_activation and "c" not in arguments:
        return {**arguments, "c": addend, "beta": scale}
    if scale != 1:
        return "the residual has a factor"
    return {**arguments, "residual": addend}


def added_to_scaled(
    product: Product, arguments: Arguments, scale: Any, addend: Any, like: Any, addend_scale: Any
) -> Arguments | str:
    """scale * chain + addend_scale * addend."""
    longer = arguments if scale == 1 else scaled(product, arguments, scale, scale)
    return longer if isinstance(longer, str) else added(product, longer, addend, like, addend_scale)


def activated(product: Product, arguments: Arguments, name: str, values: Mapping[str, float]) -> Arguments | str:
    if not _AFTER_SUM.isdisjoint(arguments):
        return f"{name} comes after the activation or the residual"
    return {**arguments, "activation": name, "activation_args": values} if values else {**arguments, "activation": name}


def squared(arguments: Arguments) -> Arguments | str:
    """relu(z) ** 2."""
    if arguments.get("activation") == "relu" and not arguments.keys() & {"dropout_p", "residual"}:
        return {**arguments, "activation": "relu2"}
    return "it is squared, and is not a relu"


def dropped(arguments: Arguments, p: float) -> Arguments | str:
    if not 0 <= p <= 1:
        return f"the probability of dropout is {p}"
    if "dropout_p" in arguments or "residual" in arguments:
        return "dropout comes after dropout or the residual"
    return {**arguments, "dropout_p": p}


def gated(gate: Product, gate_arguments: Arguments, up: Product, up_arguments: Arguments) -> Arguments | str:
    """act(x @ gate) * (x @ up), as arguments of the gate's chain; the gate's b and weight_up are to be [N, K]."""
    name = GATED.get(gate_arguments.get("activation", ""))
    if name is None or gate_arguments.keys() - {"activation", "bias"} or up_arguments.keys() - {"bias"}:
        return f"of two products only a gate ({', '.join(GATED)}) and a plain one are fused"
    if gate.a is not up.a or gate.shape != up.shape or gate.dtype != up.dtype:
        return "the two products have different left operands"
    arguments = {**gate_arguments, "activation": name, "weight_up": up.b}
    if "bias" in up_arguments:
        arguments["bias_up"] = up_arguments["bias"]
    return arguments


@functools.lru_cache
def _fit(shape: Sequence[Any], of: Sequence[Any]) -> tuple[bool, bool, bool]:
    """Whether it is a row ([N], or [1, ..., N]), a column ([..., M, 1]), and of the very shape."""
    is_row = 0 < len(shape) <= len(of) and shape[-1] == of[-1] and all(size == 1 for size in shape[:-1])
    return is_row, tuple(shape) == (*of[:-1], 1), tuple(shape) == tuple(of)


def steps(arguments: Arguments) -> tuple[str, ...]:
    """The chain's steps by name, in the order of the computation."""
    found: list[str] = [name for name in ("alpha", "row_scale", "col_scale") if name in arguments]
    if "bias" in arguments:
        found.append("bias" if arguments.get("bias_dim", -1) == -1 else "column bias")
    found += [name for name in ("bias_up", "c") if name in arguments]
    found += [arguments["activation"]] if "activation" in arguments else []
    found += ["dropout"] if "dropout_p" in arguments else []
    return (*found, "residual") if "residual" in arguments else tuple(found)


def final(arguments: Arguments) -> Arguments:
    """What the fused function is called with: c where nothing follows it is a residual."""
    if arguments.get("beta") == 1 and _AFTER_SUM.isdisjoint(arguments):
        rest = {name: value for name, value in arguments.items() if name not in ("beta", "c")}
        return {**rest, "residual": arguments["c"]}
    return arguments


def describe(is_linear: bool, like_a: Any, like_b: Any) -> str:
    return _describe(is_linear, like_a.shape, like_b.shape, like_a.dtype)


@functools.lru_cache
def _describe(is_linear: bool, a: Sequence[int], b: Sequence[int], dtype: torch.dtype) -> str:
    return f"{'linear' if is_linear else 'matmul'} {list(a)} x {list(b)} {name_of(dtype)}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _scaled_by_number(arguments: Arguments, factor: float, divides: bool) -> Arguments | str:
    before = arguments.get("alpha", 1.0)
    if isinstance(factor, bool) or not _is_moderate(factor):
        return f"the factor is {factor!r}"
    if not isinstance(before, float):
        return "it has two scalar factors"
    alpha = before / factor if divides else before * factor
    return {**arguments, "alpha": float(alpha)} if _is_moderate(alpha) else f"its factors come to {alpha!r}"


def _is_moderate(factor: float) -> bool:
    return math.isfinite(factor) and _LEAST <= abs(factor) <= _MOST


def _is_factor(scale: Any) -> bool:
    return isinstance(scale, int | float) and not isinstance(scale, bool) and _is_moderate(scale)


def _is_operand(like: Any) -> bool:
    return hasattr(like, "shape")


def _unlike(product: Product, like: Any, also: torch.dtype | None = None) -> str:
    if like.dtype not in (product.dtype, also):
        return f"is {name_of(like.dtype)} and the product {name_of(product.dtype)}"
    return "is on another device" if like.device != product.device else ""


def _once(arguments: Arguments, name: str, value: Any) -> Arguments | str:
    return f"it has two factors as {name}" if name in arguments else {**arguments, name: value}
