"""Chains without tensors: what the rules say to a pattern of calls, said once and remembered.

A `Chain` is a product and its epilogue whose operands are places among the tensors that a node holds. What a call makes
of it depends on the function, on the shapes, dtypes, devices and, beside a product, layouts of the tensors and on the
other arguments: the key that `remembered` looks it up by.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from isogemm.epilogues import recognise
from isogemm.fusion import questions, rules
from isogemm.fusion.report import Fused
from isogemm.fusion.rules import Arguments, Function, Product

Kwargs = Mapping[str, Any]
View = Callable[[torch.Tensor], torch.Tensor]

UNKNOWN_FORM = "it is called in a form that is not fused"
NOT_PLAIN = "an operand is no plain strided tensor"
_CASTABLE = (torch.bfloat16, torch.float16, torch.float32)  # by autocast
_DEVICES = ("cpu", "cuda")
_LONGEST = 64  # steps of a chain


class Operand(NamedTuple):
    """A tensor as far as the rules look at it."""

    place: int  # among the inputs of its chain
    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    is_transposed: bool = False  # before it is used
    is_in_order: bool = True  # a result whose layout it gives is contiguous


class Launch(NamedTuple):
    """The call that computes a chain of the tensors at its places."""

    by_rows: bool  # isogemm.linear, else isogemm.matmul_fused
    a: int
    b: int
    transposes_b: bool
    constants: Arguments
    operands: Sequence[tuple[str, int, View | None]]


class Chain:
    """A product and its epilogue. Shared by all the nodes of one pattern."""

    def __init__(
        self, product: Product, arguments: Arguments, inputs: int, depth: int, autocast: torch.dtype | None
    ) -> None:
        self.product, self.arguments = product, arguments
        self.inputs = inputs  # how many
        self.depth = depth  # calls on the longest way from a product
        self.autocast = autocast
        self.shape, self.dtype, self.device = product.shape, product.dtype, product.device
        self.has_precision = product.dtype is torch.float32 and product.device.type == "cuda"  # to be set
        # Computed twice, the result of a dropout would be two.
        self.is_drawn = "dropout_p" in arguments and "residual" not in arguments

    @cached_property
    def description(self) -> str:
        return rules.describe(self.product.is_linear, self.product.a, self.product.b)

    @cached_property
    def fused(self) -> Fused:
        """As the report has it."""
        return Fused(self.description, rules.steps(rules.final(self.arguments)))

    @cached_property
    def launch(self) -> Launch:
        product, arguments = self.product, rules.final(self.arguments)
        column_bias = arguments.get("bias_dim") == -2
        by_rows = "weight_up" in arguments or (product.is_linear and not column_bias)
        operands = {name: value for name, value in arguments.items() if type(value) is Operand}
        return Launch(
            by_rows,
            product.a.place,
            product.b.place,
            by_rows != product.is_linear,
            {name: value for name, value in arguments.items() if name not in operands},
            [(name, value.place, _view(name, value, column_bias)) for name, value in operands.items()],
        )

    def as_operand(self, place: int) -> Operand:
        return Operand(place, self.shape, self.dtype, self.device)


def _view(name: str, operand: Operand, column_bias: bool) -> View | None:
    """Of an operand, as the launch takes it."""
    if operand.is_transposed:
        return torch.Tensor.t
    if name == "row_scale" or (name == "bias" and column_bias):
        return _without_last
    return torch.Tensor.flatten if name in _VECTORS and len(operand.shape) > 1 else None


def _without_last(x: torch.Tensor) -> torch.Tensor:
    return x.squeeze(-1)


_VECTORS = frozenset({"bias", "bias_up", "col_scale"})


class Part(NamedTuple):
    """A deferred tensor among the arguments of a call."""

    number: int  # the first or the second
    chain: Chain


class Pair(NamedTuple):
    """How two deferred arguments of a call stand to each other."""

    are_related: bool  # one is made of the other: computing that one once serves both
    second_of_first: bool  # the second is what a step made of the first
    first_of_second: bool
    same_left: bool  # their products' left operands are one tensor


class Step(NamedTuple):
    """A longer chain, and what it is made of."""

    chain: Chain
    number: int  # of the part that goes on
    reads_other: bool = False  # the value of the other part is an operand
    takes_other: bool = False  # the other part's inputs are inputs


class _Grown(NamedTuple):
    """A part with more arguments."""

    part: Part
    arguments: Arguments
    other: Part | None = None  # that it reads
    taken: Part | None = None  # whose inputs it takes


# The memory.

_MOST_REMEMBERED = 4096
_memory: dict[Hashable, Any] = {}
remembered = _memory.get


def remember(pattern: Hashable, decision: Chain | Step) -> None:
    """What was decided, under a pattern if there is one. Bounded: what never comes again goes, with all the rest."""
    if pattern is not None:
        if len(_memory) >= _MOST_REMEMBERED:
            _memory.clear()
        _memory[pattern] = decision


# The decisions. Tensors among the arguments are given as operands, deferred ones as parts.


def start(function: Function, args: Sequence[Any], kwargs: Kwargs, autocast: torch.dtype | None) -> Chain | str:
    """What a call of one of rules.PRODUCTS begins."""
    try:
        call = rules.PRODUCTS[function](*args, **kwargs)
    except TypeError:
        return UNKNOWN_FORM
    a, b, c = call.a, call.b, call.c
    others = (b,) if c is None else (b, c)
    if any(type(x) is not Operand for x in (a, *others)) or a.device.type not in _DEVICES:
        return NOT_PLAIN
    if type(call.alpha) is Operand or type(call.beta) is Operand:
        return UNKNOWN_FORM
    dtype = a.dtype
    dtypes = {x.dtype for x in others}
    if autocast is not None and dtype in _CASTABLE:
        dtype = autocast
        same = dtypes.issubset(_CASTABLE)
    else:
        same = dtypes == {dtype}
    if not same or any(x.device != a.device for x in others):
        return "the operands' dtypes or devices differ"
    product = rules.start(a, b, call.is_linear, a, b, dtype)
    if isinstance(product, str):
        return product
    arguments = rules.with_addend(product, call, c)
    return arguments if isinstance(arguments, str) else Chain(product, arguments, _operands(args, kwargs), 1, autocast)


def step(function: Function, args: Sequence[Any], kwargs: Kwargs, may_draw: bool, pair: Pair | None) -> Step | str:
    """What a call of one of STEPS makes of a part, or of the two of a pair."""
    if function in rules.DROPOUTS and not may_draw:
        return "dropout follows, whose mask is torch's; autofuse(dropout=True) draws one of its own"
    grown = STEPS[function](function, args, kwargs, pair)
    if isinstance(grown, str):
        return grown
    part, arguments, other, taken = grown
    before = part.chain
    depth = 1 + max(x.chain.depth for x in args if type(x) is Part and x is not other)
    if depth > _LONGEST:
        return f"it is the end of {_LONGEST} steps"
    inputs = before.inputs + _operands(args, kwargs) + (other is not None) + (taken.chain.inputs if taken else 0)
    chain = Chain(before.product, arguments, inputs, depth, before.autocast)
    return Step(chain, part.number, other is not None, taken is not None)


def _operands(args: Sequence[Any], kwargs: Kwargs) -> int:
    return sum(type(x) is Operand for x in (*args, *kwargs.values()))


def _sum(function: Function, args: Sequence[Any], kwargs: Kwargs, pair: Pair | None) -> _Grown | str:
    try:
        left, right, left_scale, right_scale = rules.SUMS[function](*args, **kwargs)
    except TypeError:
        return UNKNOWN_FORM
    if type(left_scale) is Operand or type(right_scale) is Operand:
        return UNKNOWN_FORM
    if gives_layout := _gives_layout(right if function in rules.REVERSED else left):
        return gives_layout
    if type(left) is not Part:
        return _added(right, right_scale, left, left_scale) if type(right) is Part else UNKNOWN_FORM
    if type(right) is not Part:
        return _added(left, left_scale, right, right_scale)
    if pair is None or pair.are_related:
        return "it is added to what was made of it"
    # The one with less behind it takes the other, which keeps its own epilogue.
    if len(left.chain.arguments) < len(right.chain.arguments):
        left, left_scale, right, right_scale = right, right_scale, left, left_scale
    grown = _added(right, right_scale, left, left_scale)
    return _added(left, left_scale, right, right_scale) if isinstance(grown, str) else grown


def _gives_layout(first: Any) -> str:
    """Why an operation of this operand and a product is not fused: torch gives its result the first one's layout."""
    is_another = type(first) is Operand and not first.is_in_order
    return "the first operand is no contiguous tensor, and gives the result its layout" if is_another else ""


def _added(part: Part, scale: Any, addend: Any, addend_scale: Any) -> _Grown | str:
    chain, other = part.chain, addend if type(addend) is Part else None
    operand = addend if other is None else other.chain.as_operand(chain.inputs)
    arguments = rules.added_to_scaled(chain.product, chain.arguments, scale, operand, operand, addend_scale)
    return arguments if isinstance(arguments, str) else _Grown(part, arguments, other)


def _factor(function: Function, args: Sequence[Any], kwargs: Kwargs, pair: Pair | None) -> _Grown | str:
    try:
        left, right, divides = rules.FACTORS[function](*args, **kwargs)
    except TypeError:
        return UNKNOWN_FORM
    if type(left) is Part and type(right) is Part:
        return "it is divided by a product" if divides or pair is None else _two_products(left, right, pair)
    if gives_layout := _gives_layout(left):
        return gives_layout
    if type(left) is Part:
        part, operand = left, right
    elif type(right) is Part and not divides:
        part, operand = right, left
    else:
        return "something is divided by it"
    arguments = rules.scaled(part.chain.product, part.chain.arguments, operand, operand, divides=divides)
    return arguments if isinstance(arguments, str) else _Grown(part, arguments)


def _two_products(left: Part, right: Part, pair: Pair) -> _Grown | str:
    """A gate and what it lets through, or z * sigmoid(z)."""
    for z, other, is_step in ((left, right, pair.second_of_first), (right, left, pair.first_of_second)):
        if is_step and other.chain.arguments.get("activation") == "sigmoid":
            arguments = rules.activated(z.chain.product, z.chain.arguments, "silu", {})
            if not isinstance(arguments, str):
                return _Grown(z, arguments)
    gate, up = (left, right) if "activation" in left.chain.arguments else (right, left)
    up_product, up_arguments = _moved(up.chain, gate.chain, same_left=pair.same_left)
    arguments = rules.gated(gate.chain.product, gate.chain.arguments, up_product, up_arguments)
    if isinstance(arguments, str):
        return arguments
    if not up_product.is_linear:
        arguments["weight_up"] = up_product.b._replace(is_transposed=True)
    return _Grown(gate, arguments, taken=up)


def _moved(chain: Chain, after: Chain, *, same_left: bool) -> tuple[Product, Arguments]:
    """The chain with its inputs behind another's."""

    def moved(value: Any) -> Any:
        return value._replace(place=value.place + after.inputs) if type(value) is Operand else value

    product = chain.product
    a = after.product.a if same_left else moved(product.a)
    arguments = {name: moved(value) for name, value in chain.arguments.items()}
    return Product(a, moved(product.b), product.is_linear, product.shape, product.dtype, product.device), arguments


def _square(function: Function, args: Sequence[Any], kwargs: Kwargs, pair: Pair | None) -> _Grown | str:
    exponents = (2,) if function in (torch.square, torch.Tensor.square) else args[1:]
    if type(args[0]) is not Part or kwargs or [type(e) for e in exponents] not in ([int], [float]):
        return UNKNOWN_FORM
    chain = args[0].chain
    if chain.autocast is not None and chain.device.type == "cuda":
        return "autocast squares in float32"
    arguments = rules.squared(chain.arguments) if exponents[0] == 2 else f"its power is {exponents[0]}"
    return arguments if isinstance(arguments, str) else _Grown(args[0], arguments)


def _activation(function: Function, args: Sequence[Any], kwargs: Kwargs, pair: Pair | None) -> _Grown | str:
    if not args or type(args[0]) is not Part:
        return UNKNOWN_FORM
    found = recognise(function, args, kwargs)
    if found is None or any(isinstance(value, Operand) for value in found[1].values()):
        return f"{questions.name(function)} has options that are not fused"
    chain = args[0].chain
    arguments = rules.activated(chain.product, chain.arguments, *found)
    return arguments if isinstance(arguments, str) else _Grown(args[0], arguments)


def _dropout(function: Function, args: Sequence[Any], kwargs: Kwargs, pair: Pair | None) -> _Grown | str:
    p = dropout_probability(function, args, kwargs)
    if not isinstance(p, int | float) or not args or type(args[0]) is not Part:
        return UNKNOWN_FORM
    arguments = rules.dropped(args[0].chain.arguments, p)
    return arguments if isinstance(arguments, str) else _Grown(args[0], arguments)


def dropout_probability(function: Function, args: Sequence[Any], kwargs: Kwargs) -> float | None:
    """None where a dropout is called in no known form."""
    try:
        p: float = rules.DROPOUTS[function](*args, **kwargs)
    except TypeError:
        return None
    return p


STEPS: dict[Function, Callable[[Function, Sequence[Any], Kwargs, Pair | None], _Grown | str]] = {
    **dict.fromkeys(rules.SUMS, _sum),
    **dict.fromkeys(rules.FACTORS, _factor),
    **dict.fromkeys(rules.SQUARES, _square),
    **dict.fromkeys(rules.ACTIVATION_FUNCTIONS, _activation),
    **dict.fromkeys(rules.DROPOUTS, _dropout),
}
