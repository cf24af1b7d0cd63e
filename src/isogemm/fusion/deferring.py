"""What becomes of each call inside a block: a product and the steps that fit it are deferred, the rest is torch's.

A call is known by its pattern: the function, what the rules look at in its arguments (shape, dtype and device of a
tensor, in a step also its layout, the chain of a deferred one, the value of anything else) and what else they ask for.
The calls of patterns that chains.py remembers take a short way, which asks what depends on the moment, as the general
one does after the rules.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from isogemm.core.device import matmul_precision
from isogemm.core.eager import PLAIN
from isogemm.encoder.api import encoder_layer
from isogemm.fusion import ambient, chains, questions, rules
from isogemm.fusion.chains import NOT_PLAIN, STEPS, UNKNOWN_FORM, Chain, Kwargs, Operand, Pair, Part, Step
from isogemm.fusion.deferred import (
    NO_KWARGS,
    Block,
    Deferred,
    Ledger,
    Node,
    deferred_in,
    materialise,
    materialise_all,
    node_of,
    with_values,
)
from isogemm.fusion.rules import Function
from isogemm.gemm.api import linear, matmul, matmul_fused, mlp, mm
from isogemm.tiny.api import bmm

_COMPUTED = "another thread computed it"
_ELSEWHERE = "it was deferred on another thread or in another block"
BESIDE_GROUP = "a process group exists, and torch.distributed writes tensors unseen"
_AMBIENT_CHANGED = "the grad mode, autocast, stream or hooks changed before the next step"


def on_product(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    if function is F.linear and args and args[-1] is None:  # as torch.nn.Linear says that it has no bias
        args = args[:-1]
    block = ledger.blocks[-1]
    clear = block.clear
    stamps = None if kwargs or clear is None else questions.stamps_of_plain(args)
    if stamps and clear is not None:
        pattern: tuple[Any, ...] = (function, clear.autocast)
        requires_grad = False
        for x in args:
            pattern += (x.shape, x.dtype, x.device)
            requires_grad = requires_grad or x.requires_grad
        chain: Chain | None = chains.remembered(pattern)
        if chain is not None and ambient.read(x.get_device() if x.is_cuda else -1) == clear:
            precision = matmul_precision() if chain.has_precision else ""
            return ledger.defer(
                block, chain, function, args, kwargs, (), args, stamps, clear, requires_grad and clear.grad, precision
            )  # fmt: skip
    for x in (*args, *kwargs.values()):
        if type(x) is Deferred:
            materialise(x, f"{questions.name(function)} reads it")
    product = _product(block, function, args, kwargs)
    return _leave(block, function, args, kwargs, product) if isinstance(product, str) else product


def on_product_beside_group(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    _warn_of_group()
    return _leave(ledger.blocks[-1], function, args, kwargs, BESIDE_GROUP)


@functools.cache
def _warn_of_group() -> None:
    message = f"isogemm.autofuse fuses nothing for now: {BESIDE_GROUP}. Results are not affected."
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def _leave(block: Block, function: Function, args: tuple[Any, ...], kwargs: Kwargs, reason: str) -> Any:
    """A product that is torch's."""
    try:
        call = rules.PRODUCTS[function](*args, **kwargs)
    except TypeError:  # torch will say what is wrong, or knows a form that is not fused
        return function(*args, **kwargs)
    if isinstance(call.a, torch.Tensor) and isinstance(call.b, torch.Tensor):
        block.report.add_left(rules.describe(call.is_linear, call.a, call.b), reason)
    return function(*args, **kwargs)


def _product(block: Block, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Deferred | str:
    """The product, deferred, or why not."""
    inputs = tuple([x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)])
    if not inputs:
        return UNKNOWN_FORM
    now = block.surroundings(inputs[0].get_device() if inputs[0].is_cuda else -1)
    if isinstance(now, str):
        return now
    stamps = questions.stamps_of_plain(inputs)
    if stamps is None:
        return _unreadable(inputs)
    seen = _seen(args, kwargs, with_layouts=False)
    pattern = None if seen is None else (function, now.autocast, *seen)
    known: Chain | None = chains.remembered(pattern)
    chain = known or chains.start(function, *_symbols(args, kwargs, 0), now.autocast)
    if isinstance(chain, str):
        return chain
    if known is None:
        chains.remember(pattern, chain)
    requires_grad = now.grad and any(x.requires_grad for x in inputs)
    precision = matmul_precision() if chain.has_precision else ""
    return block.ledger.defer(
        block, chain, function, args, kwargs, (), inputs, stamps, now, requires_grad, precision
    )  # fmt: skip


def on_step(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    if kwargs and kwargs.get("inplace") is False:  # as torch.nn.functional says it
        kwargs = NO_KWARGS if len(kwargs) == 1 else {name: kwargs[name] for name in kwargs if name != "inplace"}
    block = ledger.blocks[-1]
    count = 0 if kwargs else len(args)
    step: Step | None = None
    node: Node | None
    if count == 1 and type(args[0]) is Deferred:
        node = args[0].__dict__.get("_node")  # as node_of has it
        made_of: tuple[Any, ...] = (node,)
        operands: tuple[torch.Tensor, ...] = ()
        stamps: tuple[int, ...] | None = ()
        if node is not None:
            step = chains.remembered((function, block.dropout, node.chain))
    elif count == 2:
        z, y = args
        if type(z) is Deferred:
            node = z.__dict__.get("_node")
            made_of, operands = (node, y), (y,)
            stamps = questions.stamps_of_plain(operands)
            if stamps is not None and node is not None:
                step = chains.remembered((function, block.dropout, node.chain, y.shape, y.dtype, y.device, _layout(y)))
        elif type(y) is Deferred:
            node = y.__dict__.get("_node")
            made_of, operands = (z, node), (z,)
            stamps = questions.stamps_of_plain(operands)
            if stamps is not None and node is not None:
                step = chains.remembered((function, block.dropout, z.shape, z.dtype, z.device, _layout(z), node.chain))
    if (
        step is not None and stamps is not None and node is not None and node.taken is None
        and node.block is block and not (node.stepped and node.chain.is_drawn)
    ):  # fmt: skip
        around = node.ambient
        if ambient.read(around.device) == around:
            node.stepped = True
            requires_grad = node.requires_grad or (count == 2 and around.grad and operands[0].requires_grad)
            return ledger.defer(
                block, step.chain, function, made_of, kwargs, (node,), node.inputs + operands, node.stamps + stamps,
                around, requires_grad, node.precision,
            )  # fmt: skip
    for x in args:
        if type(x) is Deferred:
            break
    else:
        if ledger.is_pending() and questions.may_write(function, args, kwargs):
            ledger.compute_readers((args, kwargs), f"{questions.name(function)} may change an operand")
        return function(*args, **kwargs)
    if kwargs.get("inplace"):
        return on_step_in_place(ledger, function, args, kwargs)
    result = _step(block, function, args, kwargs)
    if not isinstance(result, str):
        return result
    materialise_all((args, kwargs), result)
    return function(*args, **kwargs)


def on_step_in_place(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """The same tensor, with a longer chain."""
    if args and type(args[0]) is Deferred:
        plain = rules.OUT_OF_PLACE.get(function, function)
        plain_kwargs = {name: value for name, value in kwargs.items() if name != "inplace"}
        result = _step(ledger.blocks[-1], plain, args, plain_kwargs, in_place=True)
        if not isinstance(result, str):
            return result
        materialise_all((args, kwargs), result)
    if ledger.is_pending():
        ledger.compute_readers((args, kwargs), f"{questions.name(function)} may change an operand")
    return function(*args, **kwargs)


def _step(
    block: Block, function: Function, args: tuple[Any, ...], kwargs: Kwargs, *, in_place: bool = False
) -> Deferred | str:
    """The step, deferred, if all is still as it was when the product was called; else why not."""
    if kwargs and deferred_in(kwargs):
        return UNKNOWN_FORM
    made_of = [node_of(x) if type(x) is Deferred else x for x in args]
    nodes = [x for x in made_of if type(x) is Node]
    deferred = [x for x, node in zip(args, made_of, strict=True) if type(node) is Node]
    operands = tuple([x for x in (*made_of, *kwargs.values()) if isinstance(x, torch.Tensor)])
    if not nodes or any(x is not None and node is None for x, node in zip(args, made_of, strict=True)):
        return _COMPUTED
    if any(node.taken is not None for node in nodes):
        return "an autograd.Function has taken it"
    added = questions.stamps_of_plain(operands)
    if added is None:
        return _unreadable(operands)
    first = nodes[0]
    pair = _pair(first, nodes[1]) if len(nodes) == 2 else None
    seen = _seen(made_of, kwargs, with_layouts=True)
    pattern = None if seen is None else (function, block.dropout, *seen, *(pair or ()))
    known: Step | None = chains.remembered(pattern)
    step = known or chains.step(function, *_symbols(made_of, kwargs, first.chain.inputs), block.dropout, pair)
    if isinstance(step, str):
        return step
    if known is None:
        chains.remember(pattern, step)
    node = nodes[step.number]
    if node.block.ledger is not block.ledger:
        return _ELSEWHERE
    if node.stepped and node.chain.is_drawn:
        return "the result of a dropout is read twice"
    now = block.surroundings(node.ambient.device)
    if now != node.ambient or isinstance(now, str):
        return now if isinstance(now, str) else _AMBIENT_CHANGED
    parents: tuple[Node, ...] = (node,)
    inputs, stamps, requires_grad = node.inputs, node.stamps, node.requires_grad
    if step.reads_other:
        if in_place and step.number == 1:
            return "it is changed in place by another product"
        other = deferred[1 - step.number]
        materialise(other, "it is added to another product")
        operands, added = (other,), questions.stamps((other,))
        made_of = [other if x is nodes[1 - step.number] else x for x in made_of]
    elif pair is not None:
        second = nodes[1 - step.number]
        if second.block.ledger is not block.ledger:
            return _ELSEWHERE
        if second.ambient != now or second.precision != node.precision:
            return _AMBIENT_CHANGED
        parents = (node, second)
        if step.takes_other:
            inputs, stamps = inputs + second.inputs, stamps + second.stamps
            requires_grad = requires_grad or second.requires_grad
    for parent in parents:
        parent.stepped = True
    requires_grad = requires_grad or (now.grad and any(x.requires_grad for x in operands))
    arguments = (
        block, step.chain, function, made_of, kwargs, parents, inputs + operands, stamps + added, now, requires_grad,
        node.precision,
    )  # fmt: skip
    if not in_place:
        return block.ledger.defer(*arguments)
    with block.ledger.lock:  # another thread may be computing it
        return block.ledger.defer(*arguments, args[0]) if node_of(args[0]) is made_of[0] else _COMPUTED


def _pair(first: Node, second: Node) -> Pair:
    return Pair(
        first is second or first.comes_from(second) or second.comes_from(first),
        bool(second.args) and second.args[0] is first,
        bool(first.args) and first.args[0] is second,
        first.inputs[first.chain.product.a.place] is second.inputs[second.chain.product.a.place],
    )


def _layout(x: torch.Tensor) -> bool | tuple[int, ...]:
    return x.is_contiguous() or x.stride()


def _seen(args: Iterable[Any], kwargs: Kwargs, *, with_layouts: bool) -> list[Any] | None:
    """The arguments, nodes for deferred ones, as parts of a pattern; None where one is nothing to remember."""
    parts: list[Any] = []
    for x in (*args, *kwargs.values()):
        kind = type(x)
        if kind is Node:
            parts.append(x.chain)
        elif kind in PLAIN:
            parts += (x.shape, x.dtype, x.device, _layout(x)) if with_layouts else (x.shape, x.dtype, x.device)
        elif kind in questions.CONSTANTS:
            parts += (kind, x or repr(x))  # 0.0 and -0.0 are equal
        else:
            return None
    return [*parts, *kwargs]


def _symbols(args: Iterable[Any], kwargs: Kwargs, inputs: int) -> tuple[Sequence[Any], Kwargs]:
    """The arguments, nodes for deferred ones, as chains.py takes them, behind a number of inputs."""
    numbers, places = itertools.count(), itertools.count(inputs)

    def symbol(x: Any) -> Any:
        if type(x) is Node:
            return Part(next(numbers), x.chain)
        if type(x) not in PLAIN:
            return x
        return Operand(next(places), x.shape, x.dtype, x.device, is_in_order=questions.is_in_order(x))

    return [symbol(x) for x in args], {name: symbol(x) for name, x in kwargs.items()}


def _unreadable(tensors: Iterable[torch.Tensor]) -> str:
    """Why they have no stamps."""
    has_main_grad = any(hasattr(x, "main_grad") for x in tensors)
    return "a weight has a main_grad, which isogemm.linear would accumulate into" if has_main_grad else NOT_PLAIN


def on_dropout(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    is_off = args and type(args[0]) is Deferred and chains.dropout_probability(function, args, kwargs) == 0
    return args[0] if is_off else on_step(ledger, function, args, kwargs)


def on_hook(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    _refuse_lost_gradient(ledger, function, args[:1])
    return function(*args, **kwargs)


def on_backward(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Hooks and accumulation may change what the pending ones read."""
    position = _BACKWARDS[function]
    wanted = args[position] if len(args) > position else kwargs.get("inputs")
    if isinstance(wanted, Iterable) and not isinstance(wanted, torch.Tensor | list | tuple):
        wanted = tuple(wanted)  # of an iterator, which can be read once
        if len(args) > position:
            args = (*args[:position], wanted, *args[position + 1 :])
        else:
            kwargs = {**kwargs, "inputs": wanted}
    _refuse_lost_gradient(ledger, function, wanted)
    ledger.compute_pending("a backward begins")
    return function(*args, **kwargs)


def on_own_call(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """One of isogemm's functions: as outside of a block."""
    if deferred_in((args, kwargs)):
        materialise_all((args, kwargs), f"isogemm.{questions.name(function)} reads it")
        args, kwargs = with_values(args), with_values(kwargs)
    if kwargs.get("running") is not None and ledger.is_pending():
        ledger.compute_readers(kwargs["running"], f"isogemm.{questions.name(function)} changes an operand")
    return function(*args, **kwargs)


def _refuse_lost_gradient(ledger: Ledger, function: Function, wanted: Any) -> None:
    """A gradient of what a fused launch went past: its backward has no such value."""
    if any(map(ledger.lost_gradient, questions.tensors_in(wanted))):
        raise RuntimeError(
            f"{questions.name(function)} asks for the gradient of a product whose next step was computed with it in "
            "one launch, without it, or that an autograd.Function took before it was computed; look at the product "
            "before that step, or leave isogemm.autofuse()"
        )


# Where among the arguments the inputs are.
_BACKWARDS: dict[Function, int] = {torch.autograd.grad: 1, torch.Tensor.backward: 4, torch.autograd.backward: 5}
OWN = (mm, matmul, linear, matmul_fused, mlp, bmm, encoder_layer)
HANDLERS: dict[Function, Callable[[Ledger, Function, tuple[Any, ...], Kwargs], Any]] = {
    **dict.fromkeys(rules.PRODUCTS, on_product),
    **dict.fromkeys(STEPS, on_step),
    **dict.fromkeys(rules.OUT_OF_PLACE, on_step_in_place),
    **dict.fromkeys(rules.DROPOUTS, on_dropout),
    **dict.fromkeys(OWN, on_own_call),
    **dict.fromkeys((torch.Tensor.retain_grad, torch.Tensor.register_hook), on_hook),
    **dict.fromkeys(_BACKWARDS, on_backward),
}
