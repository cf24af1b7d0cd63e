"""What becomes of each call inside a block: a product and the steps that fit it are deferred, the rest is torch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from isogemm.core.device import matmul_precision
from isogemm.core.eager import PLAIN
from isogemm.fusion import ambient, chains, questions, rules
from isogemm.fusion.chains import CONSTANTS, NOT_PLAIN, STEPS, UNKNOWN_FORM, Chain, Kwargs, Operand, Pair, Part, Step
from isogemm.fusion.deferred import Deferred, Ledger, Node, deferred_in, materialise, materialise_all
from isogemm.fusion.rules import Function

_LONGEST = 64  # steps of a chain
_AMBIENT_CHANGED = "the grad mode, autocast, stream or hooks changed before the next step"


def on_product(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    for x in (*args, *kwargs.values()) if kwargs else args:
        if type(x) is Deferred:
            materialise(x, f"{questions.name(function)} reads it")
    node = _product(ledger, function, args, kwargs)
    if not isinstance(node, str):
        return ledger.wrap(node)
    try:
        call = rules.PRODUCTS[function](*args, **kwargs)
    except TypeError:  # torch will say what is wrong, or knows a form that is not fused
        return function(*args, **kwargs)
    if isinstance(call.a, torch.Tensor) and isinstance(call.b, torch.Tensor):
        ledger.blocks[-1].report.add_left(rules.describe(call.is_linear, call.a, call.b), node)
    return function(*args, **kwargs)


def _product(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Node | str:
    pattern, tensors, _ = _seen(function, args, kwargs)
    if not tensors:
        return NOT_PLAIN
    now = ledger.blocks[-1].moment(_device(tensors[0]))
    if isinstance(now, str):
        return now
    key = None if pattern is None else (*pattern, now.autocast)
    chain: Chain | None = chains.remembered(key)
    if chain is None:
        symbols = _symbols(args, kwargs, 0)
        begun = symbols if isinstance(symbols, str) else chains.start(function, *symbols, now.autocast)
        if isinstance(begun, str):
            return begun
        chain = begun
        chains.remember(key, chain)
    inputs = _as_inputs(tensors, now.grad)
    if isinstance(inputs, str):
        return inputs
    stamps, requires_grad = inputs
    precision = matmul_precision() if now.device >= 0 and chain.dtype is torch.float32 else ""
    return Node(
        ledger, chain, function, args, kwargs, (), tuple(tensors), stamps, now, precision, requires_grad, 1
    )  # fmt: skip


def on_step(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    for x in args:
        if type(x) is Deferred:
            break
    else:
        if ledger.pending and questions.may_write(function, args, kwargs):
            ledger.compute_readers((args, kwargs), f"{questions.name(function)} changes an operand")
        return function(*args, **kwargs)
    if kwargs and kwargs.get("inplace"):
        return on_step_in_place(ledger, function, args, kwargs)
    node = _step(ledger, function, args, kwargs)
    if not isinstance(node, str):
        return ledger.wrap(node)
    materialise_all((args, kwargs), node)
    return function(*args, **kwargs)


def on_step_in_place(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """The same tensor, with a longer chain."""
    x = args[0] if args else None
    if type(x) is Deferred:
        plain = rules.OUT_OF_PLACE.get(function, function)
        node = _step(ledger, plain, args, {name: kwargs[name] for name in kwargs if name != "inplace"}, in_place=True)
        if not isinstance(node, str):
            ledger.regrow(x, node)
            return x
        materialise_all((args, kwargs), node)
    if ledger.pending:
        ledger.compute_readers((args, kwargs), f"{questions.name(function)} changes an operand")
    return function(*args, **kwargs)


def _step(
    ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs, *, in_place: bool = False
) -> Node | str:
    """The step as a node, if all is still as it was when the product was called."""
    if kwargs and deferred_in(kwargs):
        return UNKNOWN_FORM
    block = ledger.blocks[-1]
    pattern, tensors, deferred = _seen(function, args, kwargs)
    pair = _pair(deferred[0]._node, deferred[1]._node) if len(deferred) == 2 else None
    key = None if pattern is None else (*pattern, block.dropout, pair)
    step: Step | None = chains.remembered(key)
    if step is None:
        symbols = _symbols(args, kwargs, deferred[0]._node.chain.inputs)
        found = symbols if isinstance(symbols, str) else chains.step(function, *symbols, block.dropout, pair)
        if isinstance(found, str):
            return found
        step = found
        chains.remember(key, step)
    chain, number, reads_other, takes_other = step
    node = deferred[number]._node
    if node.ledger is not ledger:
        return "it was deferred on another thread or in another block"
    if node.depth >= _LONGEST:
        return f"it is the end of {_LONGEST} steps"
    if node.stepped and node.chain.is_drawn:
        return "the result of a dropout is read twice"
    if node.block is not block or not ambient.is_still(node.ambient):
        now = block.moment(node.ambient.device)
        if now != node.ambient:
            return now if isinstance(now, str) else _AMBIENT_CHANGED
    parents: tuple[Node, ...] = (node,)
    inputs, stamps, requires_grad = node.inputs, node.stamps, node.requires_grad
    if pair is not None:
        other = deferred[1 - number]
        if reads_other:
            if in_place and number == 1:
                return "it is changed in place by another product"
            materialise(other, "it is added to another product")
            tensors = [other]
        else:
            parents = (deferred[0]._node, deferred[1]._node)
            if other._node.ledger is not ledger:
                return "it was deferred on another thread or in another block"
            if other._node.ambient != node.ambient or other._node.precision != node.precision:
                return _AMBIENT_CHANGED
        if takes_other:
            inputs, stamps = inputs + other._node.inputs, stamps + other._node.stamps
            requires_grad = requires_grad or other._node.requires_grad
    if tensors:
        added = _as_inputs(tensors, node.ambient.grad)
        if isinstance(added, str):
            return added
        inputs, stamps = (*inputs, *tensors), stamps + added[0]
        requires_grad = requires_grad or added[1]
    depth = 1
    for parent in parents:
        parent.stepped = True
        depth = max(depth, parent.depth + 1)
    args = tuple([x._node if type(x) is Deferred else x for x in args])
    return Node(
        ledger, chain, function, args, kwargs, parents, inputs, stamps, node.ambient, node.precision, requires_grad,
        depth,
    )  # fmt: skip


def _device(x: torch.Tensor) -> int:
    """CUDA's number, or a negative one."""
    return x.get_device() if x.is_cuda else -1


def _pair(first: Node, second: Node) -> Pair:
    return Pair(
        first is second or first.comes_from(second) or second.comes_from(first),
        bool(second.args) and second.args[0] is first,
        bool(first.args) and first.args[0] is second,
        first.inputs[first.chain.product.a.place] is second.inputs[second.chain.product.a.place],
    )


def _seen(
    function: Function, args: tuple[Any, ...], kwargs: Kwargs
) -> tuple[list[Any] | None, list[torch.Tensor], list[Deferred]]:
    """A call as a pattern (None: it has none), its tensors and its deferred tensors."""
    pattern: list[Any] = [function, *kwargs] if kwargs else [function]
    tensors: list[torch.Tensor] = []
    deferred: list[Deferred] = []
    is_known = True
    for x in (*args, *kwargs.values()) if kwargs else args:
        kind = type(x)
        if kind is Deferred:
            deferred.append(x)
            pattern.append(x._node.chain)
        elif kind in PLAIN and not x.is_nested:
            tensors.append(x)
            pattern += (x.shape, x.dtype, x.device)
        elif kind in CONSTANTS:
            pattern += (kind, x or repr(x))  # 0.0 and -0.0 are equal
        else:
            is_known = False
    return pattern if is_known else None, tensors, deferred


def _symbols(args: tuple[Any, ...], kwargs: Kwargs, inputs: int) -> tuple[Sequence[Any], Kwargs] | str:
    """The arguments as chains.py takes them, behind a number of inputs; or why it does not."""
    numbers = itertools.count()
    places = itertools.count(inputs)

    def symbol(x: Any) -> Any:
        if type(x) is Deferred:
            return Part(next(numbers), x._node.chain)
        return Operand(next(places), x.shape, x.dtype, x.device) if type(x) in PLAIN and not x.is_nested else x

    symbols = [symbol(x) for x in args], {name: symbol(x) for name, x in kwargs.items()}
    return NOT_PLAIN if questions.tensors_in(symbols) else symbols


def _as_inputs(tensors: Sequence[torch.Tensor], grad: bool) -> tuple[tuple[questions.Stamp, ...], bool] | str:
    """Their stamps, and whether one requires grad; or why they are not read later."""
    stamps, requires_grad = [], False
    for x in tensors:
        stamp = questions.stamp(x)
        if stamp is None:
            return NOT_PLAIN
        if hasattr(x, "main_grad"):
            return "a weight has a main_grad, which isogemm.linear would accumulate into"
        stamps.append(stamp)
        requires_grad = requires_grad or x.requires_grad
    return tuple(stamps), grad and requires_grad


def on_dropout(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    is_off = args and type(args[0]) is Deferred and chains.dropout_probability(function, args, kwargs) == 0
    return args[0] if is_off else on_step(ledger, function, args, kwargs)


def on_hook(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    _refuse_lost_gradient(ledger, function, args[:1])
    return function(*args, **kwargs)


def on_backward(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Hooks and accumulation may change what the pending ones read."""
    position = 1 if function is torch.autograd.grad else 4
    _refuse_lost_gradient(ledger, function, (args[position : position + 1], kwargs.get("inputs")))
    ledger.compute_pending("a backward begins")
    return function(*args, **kwargs)


def _refuse_lost_gradient(ledger: Ledger, function: Function, wanted: Any) -> None:
    """A gradient of what a fused launch went past: its backward has no such value."""
    if any(map(ledger.lost_gradient, questions.tensors_in(wanted))):
        raise RuntimeError(
            f"{questions.name(function)} asks for the gradient of a product whose next step was computed with it "
            "in one launch, without it; look at the product before that step, or leave isogemm.autofuse()"
        )


HANDLERS: dict[Function, Callable[[Ledger, Function, tuple[Any, ...], Kwargs], Any]] = {
    **dict.fromkeys(rules.PRODUCTS, on_product),
    **dict.fromkeys(STEPS, on_step),
    **dict.fromkeys(rules.OUT_OF_PLACE, on_step_in_place),
    **dict.fromkeys(rules.DROPOUTS, on_dropout),
    **dict.fromkeys((torch.Tensor.retain_grad, torch.Tensor.register_hook), on_hook),
    **dict.fromkeys((torch.Tensor.backward, torch.autograd.grad), on_backward),
}
