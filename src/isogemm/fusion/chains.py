"""What a pattern of calls fuses to: decided once by the rules, without tensors, and remembered.

A `Chain` is a product and its epilogue. Its operands are indices into the tensors that a node holds. How a call changes
it depends on the function, on the shapes, dtypes, devices and (in a step) layouts of the tensors, and on the other
arguments. These are the key of `remembered`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from operator import methodcaller
from typing import Any, NamedTuple

import torch

from isogemm.fusion import rules
from isogemm.fusion.report import Fused
from isogemm.fusion.rules import Arguments, Function, Product
from isogemm.gemm import api

Kwargs = Mapping[str, Any]

UNKNOWN_FORM = "it is called in a form that is not fused"
NOT_PLAIN = "an operand is no plain strided tensor"
_CASTABLE = (torch.bfloat16, torch.float16, torch.float32)  # by autocast
_LONGEST = 64  # steps of a chain


class Operand(NamedTuple):
    """What the rules read of a tensor."""

    place: int  # among the inputs of its chain
    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device
    is_transposed: bool = False  # before it is used
    is_in_order: bool = True  # a result that takes its layout is contiguous


class Chain:
    """A product and its epilogue, shared by all nodes of one pattern."""

    def __init__(
        self, product: Product, arguments: Arguments, inputs: int, depth: int, autocast: torch.dtype | None
    ) -> None:
        self.product, self.arguments = product, arguments
        self.inputs = inputs  # how many
        self.depth = depth  # number of calls on the longest path from a product
        self.autocast = autocast
        self.shape, self.dtype, self.device = product.shape, product.dtype, product.device
        self.has_precision = product.dtype is torch.float32 and product.device.type == "cuda"
        # A dropout that was computed twice would have two masks.
        self.is_drawn = "dropout_p" in arguments and "residual" not in arguments

    @cached_property
    def description(self) -> str:
        return rules.describe(self.product.is_linear, self.product.a, self.product.b)

    @cached_property
    def fused(self) -> Fused:
        """The report's entry."""
        return Fused(self.description, rules.steps(rules.final(self.arguments)))

    @cached_property
    def compute(self) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
        """The fused call: takes the inputs of a node and returns its value."""
        product, arguments = self.product, rules.final(self.arguments)
        by_rows = rules.is_by_rows(product, arguments)
        a, b, transposes_b = product.a.place, product.b.place, by_rows != product.is_linear
        constants = {name: value for name, value in arguments.items() if type(value) is not Operand}
        operands: list[tuple[str, int, Callable[[torch.Tensor], torch.Tensor] | None]] = []
        for name, x in arguments.items():
            if type(x) is Operand:
                view = ("t",) if x.is_transposed else rules.view(name, len(x.shape), arguments)
                operands.append((name, x.place, methodcaller(*view) if view else None))

        def compute(inputs: Sequence[torch.Tensor]) -> torch.Tensor:
            given = {**constants}
            for name, place, view in operands:
                given[name] = inputs[place] if view is None else view(inputs[place])
            right = inputs[b].t() if transposes_b else inputs[b]
            return (api.linear if by_rows else api.matmul_fused)(inputs[a], right, **given)

        return compute


class Part(NamedTuple):
    """A deferred tensor among the arguments of a call."""

    number: int  # the first or the second
    chain: Chain


class Pair(NamedTuple):
    """How two deferred arguments of a call are related."""

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


_MOST_REMEMBERED = 4096
_memory: dict[Hashable, Any] = {}
remembered = _memory.get


def remember(pattern: Hashable, decision: Chain | Step) -> None:
    """Keep a decision under its pattern, if it has one. Bounded: a full memory is cleared."""
    if pattern is not None:
        if len(_memory) >= _MOST_REMEMBERED:
            _memory.clear()
        _memory[pattern] = decision


# The decisions. Tensors among the arguments are given as operands, deferred ones as parts.


def start(function: Function, args: Sequence[Any], kwargs: Kwargs, autocast: torch.dtype | None) -> Chain | str:
    """Begin a chain with a call of one of rules.PRODUCTS, or say why not."""
    call = rules.parse(rules.PRODUCTS, function, args, kwargs)
    if call is None:
        return UNKNOWN_FORM
    a, b, c = call.a, call.b, call.c
    others = (b,) if c is None else (b, c)
    if any(type(x) is not Operand for x in (a, *others)) or a.device.type not in ("cpu", "cuda"):
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
    begun = rules.start(call, a, b, c, dtype)
    return begun if isinstance(begun, str) else Chain(*begun, _operands(args, kwargs), 1, autocast)


def step(function: Function, args: Sequence[Any], kwargs: Kwargs, may_draw: bool, pair: Pair | None) -> Step | str:
    """Make a part, or the two of a pair, longer by a call of one of STEPS, or say why not."""
    if function in rules.DROPOUTS and not may_draw:
        return "dropout follows, whose mask is torch's; autofuse(dropout=True) draws one of its own"
    call = rules.parse(rules.SUMS, function, args, kwargs) or rules.parse(rules.FACTORS, function, args, kwargs)
    grown = (
        _extend_one(function, args, kwargs, call) if pair is None else _extend_pair(function, args, kwargs, call, pair)
    )
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


def _extend_one(function: Function, args: Sequence[Any], kwargs: Kwargs, call: Any) -> _Grown | str:
    """Add a call that has one part to its chain; `call` is its normal form where it is a sum or a product."""
    part = next(x for x in args if type(x) is Part)
    first = None if call is None else call.right if function in rules.REVERSED else call.left
    if type(first) is Operand and not first.is_in_order:
        return "the first operand is no contiguous tensor, and gives the result its layout"
    if function in rules.SUMS and (call is None or Operand in (type(call.left_scale), type(call.right_scale))):
        return UNKNOWN_FORM
    if function in rules.SQUARES and part.chain.autocast is not None and part.chain.device.type == "cuda":
        return "autocast squares in float32"
    return _extended(part, function, args, kwargs)


def _extend_pair(function: Function, args: Sequence[Any], kwargs: Kwargs, call: Any, pair: Pair) -> _Grown | str:
    """Add a call that has two parts to a chain: a sum, act(gate) * up, or z * sigmoid(z)."""
    if call is None or (function in rules.SUMS and Operand in (type(call.left_scale), type(call.right_scale))):
        return UNKNOWN_FORM
    if function in rules.FACTORS:
        return "it is divided by a product" if call.divides else _two_products(call.left, call.right, pair)
    if pair.are_related:
        return "it is added to what was made of it"
    # One chain adds the other's result, which keeps its own epilogue. The chain with fewer steps is tried first.
    left, right = call.left, call.right
    if len(left.chain.arguments) < len(right.chain.arguments):
        left, right = right, left
    grown: _Grown | str = ""
    for part, other in ((right, left), (left, right)):
        operand = Operand(part.chain.inputs, other.chain.shape, other.chain.dtype, other.chain.device)
        given = [operand if x is other else x for x in args]
        grown = _extended(part, function, given, kwargs, other)
        if not isinstance(grown, str):
            break
    return grown


def _extended(
    part: Part, function: Function, args: Sequence[Any], kwargs: Kwargs, other: Part | None = None
) -> _Grown | str:
    chain = part.chain
    found = rules.extended(chain.product, chain.arguments, function, args, kwargs, part, lambda operand: operand)
    if found is None:
        return UNKNOWN_FORM
    return found if isinstance(found, str) else _Grown(part, found, other)


def _two_products(left: Part, right: Part, pair: Pair) -> _Grown | str:
    """Multiply act(gate) and up, or z and sigmoid(z)."""
    for z, other, is_step in ((left, right, pair.second_of_first), (right, left, pair.first_of_second)):
        if is_step and other.chain.arguments.get("activation") == "sigmoid":
            arguments = rules.activated(z.chain.arguments, "silu", {})
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
    """Return the chain's product and arguments, with its inputs counted after another chain's."""

    def moved(value: Any) -> Any:
        return value._replace(place=value.place + after.inputs) if type(value) is Operand else value

    product = chain.product
    a = after.product.a if same_left else moved(product.a)
    arguments = {name: moved(value) for name, value in chain.arguments.items()}
    return Product(a, moved(product.b), product.is_linear, product.shape, product.dtype, product.device), arguments


STEPS = frozenset({*rules.SUMS, *rules.FACTORS, *rules.SQUARES, *rules.ACTIVATION_FUNCTIONS, *rules.DROPOUTS})
