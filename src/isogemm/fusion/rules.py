"""Which torch calls become the epilogue of a product, in eager mode and in a graph alike.

A chain is a `Product` and the keyword arguments that `isogemm.linear` or `isogemm.matmul_fused` would get for what
follows it. Each rule takes a chain and one step. It returns the longer chain's arguments, or a sentence that says why
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
from torch import Tensor

from isogemm.epilogues import ACTIVATIONS, recognise
from isogemm.gemm.describe import dtype_name

Function = Callable[..., Any]
Arguments = dict[str, Any]

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
GATED = {entry.gate: entry.name for entry in ACTIVATIONS.values() if entry.gate}  # from the gate's activation
ACTIVATION_FUNCTIONS = frozenset(function for entry in ACTIVATIONS.values() for function in entry.functions)

_SCALES = frozenset({"alpha", "row_scale", "col_scale"})
_AFTER_SUM = frozenset({"activation", "dropout_p", "residual"})
_LEAST, _MOST = 1e-30, 1e30  # scalar factors: their products stay far from the ends of float32's range


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


def _negative(alpha: Any) -> Any:
    return alpha if isinstance(alpha, bool) else -alpha  # torch takes no bool: it stays one, to be refused


def _dropout_p(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> float:
    return p if training or not 0 <= p <= 1 else 0.0


def _table(*rows: tuple[Sequence[Function], Function]) -> dict[Function, Function]:
    return {function: parser for functions, parser in rows for function in functions}


# Each table maps a torch function to one with the same parameters that returns the call in its normal form.
PRODUCTS = _table(
    ((operator.matmul, Tensor.__matmul__), lambda a, b: ProductCall(a, b, False)),
    ((torch.matmul, Tensor.matmul), lambda input, other: ProductCall(input, other, False)),
    ((torch.mm, Tensor.mm), lambda input, mat2: ProductCall(input, mat2, False)),
    ((F.linear,), lambda input, weight, bias=None: ProductCall(input, weight, True, bias)),
    (
        (torch.addmm, Tensor.addmm),
        lambda input, mat1, mat2, *, beta=1, alpha=1: ProductCall(mat1, mat2, False, input, beta, alpha),
    ),
)
REVERSED: frozenset[Function] = frozenset({torch.rsub, Tensor.__rsub__})  # the second argument comes first
SUMS = _table(
    (
        (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, operator.add),
        lambda input, other, *, alpha=1: Sum(input, other, 1, alpha),
    ),
    (
        (torch.sub, torch.subtract, Tensor.sub, Tensor.subtract, Tensor.__sub__, operator.sub),
        lambda input, other, *, alpha=1: Sum(input, other, 1, _negative(alpha)),
    ),
    (tuple(REVERSED), lambda input, other, *, alpha=1: Sum(input, other, _negative(alpha), 1)),
)
FACTORS = _table(
    (
        (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__, operator.mul),
        lambda input, other: Factors(input, other),
    ),
    (
        (
            *(torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.true_divide),
            *(Tensor.__truediv__, operator.truediv),
        ),
        lambda input, other: Factors(input, other, True),
    ),
    (
        (torch.neg, torch.negative, Tensor.neg, Tensor.negative, Tensor.__neg__, operator.neg),
        lambda input: Factors(input, -1),
    ),
)
# To the probability of dropout, 0 where it is off.
DROPOUTS = _table(((F.dropout,), _dropout_p), ((torch.dropout,), lambda input, p, train: _dropout_p(input, p, train)))
SQUARES: frozenset[Function] = frozenset(
    {torch.square, Tensor.square, torch.pow, Tensor.pow, Tensor.__pow__, operator.pow}
)

# From a function that works in place to the one that returns a new tensor.
OUT_OF_PLACE: dict[Function, Function] = {
    **{getattr(Tensor, f"{name}_"): getattr(torch, name) for name in ("add", "sub", "mul", "div", "neg")},
    **{
        augmented: function
        for name, function in (("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("truediv", torch.div))
        for augmented in (getattr(Tensor, f"__i{name}__"), getattr(operator, f"i{name}"))
    },
    **{
        getattr(where, f"{function.__name__}_"): function
        for entry in ACTIVATIONS.values()
        for function in reversed(entry.functions)  # torch's own is the first
        for where in (torch, Tensor)
        if hasattr(where, f"{function.__name__}_")
    },
}


def parse(
    table: Mapping[Function, Function], function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Return the call in the table's normal form, or None where the arguments are not those of a known form."""
    try:
        return table[function](*args, **kwargs)
    except (KeyError, TypeError):
        return None


def start(
    call: ProductCall, like_a: Any, like_b: Any, like_c: Any, dtype: torch.dtype
) -> tuple[Product, Arguments] | str:
    """Begin a chain; `dtype` is the result's, which autocast may have chosen."""
    shape = _product_shape(like_a.shape, like_b.shape, call.is_linear)
    if isinstance(shape, str):
        return shape
    if dtype not in DTYPES:
        return f"{dtype_name(dtype)} is not fused"
    product = Product(call.a, call.b, call.is_linear, shape, dtype, like_a.device)
    arguments = _with_addend(product, call, like_c)
    return arguments if isinstance(arguments, str) else (product, arguments)


@functools.lru_cache
def _product_shape(rows: Sequence[Any], columns: Sequence[Any], is_linear: bool) -> tuple[Any, ...] | str:
    if len(columns) != 2:
        return f"the right operand has {len(columns)} dimensions: 2 are fused"
    if len(rows) < 2:
        return f"the left operand has {len(rows)} dimension: 2 or more are fused"
    inner, n = reversed(columns) if is_linear else columns
    return (*rows[:-1], n) if rows[-1] == inner else "the operands' sizes differ"


def _with_addend(product: Product, call: ProductCall, like: Any) -> Arguments | str:
    """Begin the arguments with the product's own alpha, beta and c: a linear's bias, or what addmm takes."""
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
    """Multiply the chain by a scalar or a scale vector, or divide it by a scalar."""
    if not _SCALES.issuperset(arguments):
        return "a factor comes after the sum"
    if isinstance(like, int | float):
        return _scaled_by_number(arguments, like, divides)
    if not hasattr(like, "shape"):
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
    if not (by_columns or by_rows):
        return "the factor is neither a scalar, a row nor a column"
    name = "col_scale" if by_columns else "row_scale"
    return f"it has two factors as {name}" if name in arguments else {**arguments, name: factor}


def added(product: Product, arguments: Arguments, addend: Any, like: Any, scale: Any = 1) -> Arguments | str:
    """Add `scale` times a bias, a column bias or a tensor of the chain's shape."""
    if not hasattr(like, "shape"):
        return "a number is added"
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not _is_moderate(scale):
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


def extended(
    product: Product,
    arguments: Arguments,
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    value: Any,
    look: Callable[[Any], Any],
) -> Arguments | str | None:
    """Add a call that has the chain's `value` among its arguments; None where it is no step of an epilogue.

    `look` takes an operand and returns what has its shape, dtype and device. It returns a number as it is.
    """
    if (call := parse(SUMS, function, args, kwargs)) is not None:
        own, addend, scale = call.left_scale, call.right, call.right_scale
        if call.left is not value:
            own, addend, scale = scale, call.left, own
        longer = arguments if own == 1 else scaled(product, arguments, own, own)
        return longer if isinstance(longer, str) else added(product, longer, addend, look(addend), scale)
    if (call := parse(FACTORS, function, args, kwargs)) is not None:
        if call.divides and call.left is not value:
            return "something is divided by it"
        factor = call.right if call.left is value else call.left
        return scaled(product, arguments, factor, look(factor), divides=call.divides)
    if not args or args[0] is not value:
        return None
    if found := recognise(function, args, kwargs):
        return activated(arguments, *found)
    if function in SQUARES:
        exponents = (2,) if function in (torch.square, Tensor.square) else tuple(args[1:])
        return squared(arguments) if exponents == (2,) and not kwargs else None
    p = parse(DROPOUTS, function, args, kwargs)
    if p is None:
        return None
    return dropped(arguments, p) if p else arguments


def activated(arguments: Arguments, name: str, values: Mapping[str, float]) -> Arguments | str:
    if not _AFTER_SUM.isdisjoint(arguments):
        return f"{name} comes after the activation or the residual"
    if not all(isinstance(value, int | float) for value in values.values()):
        return f"{name} has options that are not fused"
    return {**arguments, "activation": name, "activation_args": values} if values else {**arguments, "activation": name}


def squared(arguments: Arguments) -> Arguments | str:
    """Square the chain, which must be a relu."""
    if arguments.get("activation") == "relu" and not arguments.keys() & {"dropout_p", "residual"}:
        return {**arguments, "activation": "relu2"}
    return "it is squared, and is not a relu"


def dropped(arguments: Arguments, p: float) -> Arguments | str:
    if not isinstance(p, int | float):
        return "it is called in a form that is not fused"
    if not 0 <= p <= 1:
        return f"the probability of dropout is {p}"
    if "dropout_p" in arguments or "residual" in arguments:
        return "dropout comes after dropout or the residual"
    return {**arguments, "dropout_p": p}


def gated(gate: Product, gate_arguments: Arguments, up: Product, up_arguments: Arguments) -> Arguments | str:
    """Compute act(x @ gate) * (x @ up) in the gate's chain; the gate's b and weight_up must be [N, K]."""
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
    """Whether a shape is a row ([N] or [1, ..., N]), a column ([..., M, 1]), the same shape."""
    is_row = 0 < len(shape) <= len(of) and shape[-1] == of[-1] and all(size == 1 for size in shape[:-1])
    return is_row, tuple(shape) == (*of[:-1], 1), tuple(shape) == tuple(of)


def steps(arguments: Arguments) -> tuple[str, ...]:
    """Name the chain's steps, in the order of the computation."""
    shown = {"bias": "column bias" if "bias_dim" in arguments else "bias", "dropout_p": "dropout"}
    shown["activation"] = arguments.get("activation", "")
    order = ("alpha", "row_scale", "col_scale", "bias", "bias_up", "c", "activation", "dropout_p", "residual")
    return tuple(shown.get(name, name) for name in order if name in arguments)


def final(arguments: Arguments) -> Arguments:
    """Return the fused function's arguments: an addend c that nothing follows is a residual."""
    if arguments.get("beta") == 1 and _AFTER_SUM.isdisjoint(arguments):
        rest = {name: value for name, value in arguments.items() if name not in ("beta", "c")}
        return {**rest, "residual": arguments["c"]}
    return arguments


def is_by_rows(product: Product, arguments: Arguments) -> bool:
    """Whether isogemm.linear computes the chain, with weights [N, K]; else isogemm.matmul_fused does."""
    return "weight_up" in arguments or (product.is_linear and "bias_dim" not in arguments)


def view(name: str, ndim: int, arguments: Arguments, *, flat: bool = False) -> tuple[Any, ...] | None:
    """Return the tensor method, with arguments, that gives an operand the shape the fused function takes.

    None where it has that shape. flat: the product is [B T, N], and the operand has the shape of its view [B, T, N].
    """
    if name == "row_scale" or (name == "bias" and "bias_dim" in arguments):  # [..., M, 1]
        return ("flatten",) if flat else ("squeeze", -1)
    if name in ("bias", "bias_up", "col_scale"):  # [1, ..., N]
        return ("flatten",) if ndim > 1 else None
    return ("flatten", 0, -2) if flat and name in ("c", "residual") and ndim > 2 else None


def describe(is_linear: bool, like_a: Any, like_b: Any) -> str:
    return _describe(is_linear, like_a.shape, like_b.shape, like_a.dtype)


@functools.lru_cache
def _describe(is_linear: bool, a: Sequence[int], b: Sequence[int], dtype: torch.dtype) -> str:
    return f"{'linear' if is_linear else 'matmul'} {list(a)} x {list(b)} {dtype_name(dtype)}"


def _scaled_by_number(arguments: Arguments, factor: float, divides: bool) -> Arguments | str:
    """Fold a number into alpha."""
    before = arguments.get("alpha", 1.0)
    if isinstance(factor, bool) or not _is_moderate(factor):
        return f"the factor is {factor!r}"
    if not isinstance(before, float):
        return "it has two scalar factors"
    alpha = before / factor if divides else before * factor
    return {**arguments, "alpha": float(alpha)} if _is_moderate(alpha) else f"its factors come to {alpha!r}"


def _is_moderate(factor: float) -> bool:
    return math.isfinite(factor) and _LEAST <= abs(factor) <= _MOST


def _unlike(product: Product, like: Any, also: torch.dtype | None = None) -> str:
    if like.dtype not in (product.dtype, also):
        return f"is {dtype_name(like.dtype)} and the product {dtype_name(product.dtype)}"
    return "is on another device" if like.device != product.device else ""
