"""`isogemm.autofuse`: inside the block products are deferred, and what follows one is computed with it in one launch.

A torch function mode sees every call. A product becomes a `Deferred` (deferred.py), and so does a step that fits its
epilogue (chains.py, by the rules in rules.py). Any other access computes it.

A call is known by its pattern: the function, shape, dtype and device of its tensors, in a step also their layouts, the
chains of deferred tensors and the values of other arguments. Calls whose pattern chains.py remembers take a short path.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import distributed
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from isogemm.core import private
from isogemm.core.device import matmul_precision
from isogemm.core.eager import PLAIN
from isogemm.encoder.api import encoder_layer
from isogemm.fusion import chains, execution_state, rules, tensor_checks
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
    thread,
    with_values,
)
from isogemm.fusion.report import Report
from isogemm.fusion.rules import Function
from isogemm.gemm.api import linear, matmul, matmul_fused, mlp, mm
from isogemm.tiny.api import bmm

_P = ParamSpec("_P")
_R = TypeVar("_R")

_COMPUTED = "another thread computed it"
_ELSEWHERE = "it was deferred on another thread or in another block"
_BESIDE_GROUP = "a process group exists, and torch.distributed writes tensors unseen"
_STATE_CHANGED = "the grad mode, autocast, stream or hooks changed before the next step"

# Their bodies run when they are iterated or awaited, after the call has ended.
_RUN_LATER = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
_has_group: Callable[[], bool] = distributed.is_initialized if distributed.is_available() else lambda: False


class autofuse:
    """Fuse products with what follows them, in plain torch code: a `with` block or a decorator.

    Args:
        dropout: fuse dropout as well; each call then has one mask of isogemm's, another than torch's, whose seed is
            drawn from torch's generator when the result is computed.

    The block gives a `Report` of what was fused and, for the products left, why not (of a decorator: its `report`).
    Values and gradients are those of the plain code within rounding. Nothing is fused where a torch.distributed process
    group exists. What else changes operands unseen, and so may not be used between a product and its next step, is
    listed in the README of isogemm.fusion.
    """

    def __init__(self, *, dropout: bool = False) -> None:
        self.dropout = dropout
        self.report = Report()
        self._mode: _Mode | None = None
        self._block: Block | None = None

    def __enter__(self) -> Report:
        if is_compiling():
            return self.report
        if self._mode is not None:
            raise RuntimeError("this autofuse() is entered already; expected one for each block")
        if private.is_off(private.AUTOFUSE):
            return self.report
        stack: list[TorchFunctionMode] = private.find("torch.overrides:_get_current_function_mode_stack")()
        active = next((mode for mode in reversed(stack) if isinstance(mode, _Mode)), None)
        self._mode = active or _Mode()
        self._block = Block(self._mode.ledger, self.report, self.dropout)
        self._mode.ledger.blocks.append(self._block)
        if active is None:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self.report

    def __exit__(self, kind: type[BaseException] | None, exception: BaseException | None, traceback: Any) -> None:
        if is_compiling() or self._mode is None or self._block is None:
            return
        mode, block = self._mode, self._block
        self._mode = self._block = None
        ledger = mode.ledger
        if len(ledger.blocks) == 1:
            mode.__exit__(kind, exception, traceback)  # type: ignore[no-untyped-call]
        try:
            # A checkpoint ends a recomputation by this error: computing more would save one tensor too many.
            if not isinstance(exception, private.find("torch.utils.checkpoint:_StopRecomputationError")):
                ledger.compute_pending("the block ended", of=block, failing=exception is not None)
        finally:
            ledger.blocks.remove(block)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        if not callable(function):
            raise TypeError(f"autofuse() decorates functions, not {function!r}; expected it below the other decorator")
        wrapped: Any = function
        while isinstance(wrapped, functools.partial | staticmethod):
            wrapped = wrapped.func if isinstance(wrapped, functools.partial) else wrapped.__func__
        for called in (wrapped, type(wrapped).__call__):
            if any(runs_later(called) for runs_later in _RUN_LATER):
                raise TypeError(
                    f"{tensor_checks.name(wrapped)} is a generator or a coroutine; use a with block inside it"
                )

        @functools.wraps(function)
        def fused(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            block = autofuse(dropout=self.dropout)
            block.report = self.report
            with block:
                return function(*args, **kwargs)

        return fused


class _Mode(TorchFunctionMode):
    """Defers calls on one thread. Blocks inside a block share its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Kwargs | None = None
    ) -> Any:
        if is_dynamo_compiling() or thread.computing:
            return function(*args, **(kwargs or NO_KWARGS))
        ledger = self.ledger
        handler = _HANDLERS.get(function) if not kwargs or "out" not in kwargs else None
        is_pending = handler is not None or ledger.is_pending()
        if is_pending and _has_group():
            ledger.compute_pending(_BESIDE_GROUP)  # what was deferred before the group existed
            if handler is _on_product:
                _warn_of_group()
                return _leave(ledger.blocks[-1], function, args, kwargs or NO_KWARGS, _BESIDE_GROUP)
        if handler is not None:
            return handler(ledger, function, args, kwargs or NO_KWARGS)
        if is_pending and tensor_checks.may_write(function, args, kwargs or NO_KWARGS):
            ledger.compute_readers((args, kwargs), f"{tensor_checks.name(function)} may change an operand")
        return function(*args, **kwargs) if kwargs else function(*args)


def _on_product(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    if function is F.linear and args and args[-1] is None:  # as torch.nn.Linear says that it has no bias
        args = args[:-1]
    block = ledger.blocks[-1]
    state = block.last_state
    stamps = None if kwargs or state is None else tensor_checks.stamps_of_plain(args)
    if stamps and state is not None:
        pattern: tuple[Any, ...] = (function, state.autocast)
        requires_grad = False
        for x in args:
            pattern += (x.shape, x.dtype, x.device)
            requires_grad = requires_grad or x.requires_grad
        chain: Chain | None = chains.remembered(pattern)
        if chain is not None and execution_state.read(x.get_device() if x.is_cuda else -1) == state:
            precision = matmul_precision() if chain.has_precision else ""
            return ledger.defer(
                block, chain, function, args, kwargs, (), args, stamps, state, requires_grad and state.grad, precision
            )  # fmt: skip
    for x in (*args, *kwargs.values()):
        if type(x) is Deferred:
            materialise(x, f"{tensor_checks.name(function)} reads it")
    product = _product(block, function, args, kwargs)
    return _leave(block, function, args, kwargs, product) if isinstance(product, str) else product


@functools.cache
def _warn_of_group() -> None:
    message = f"isogemm.autofuse fuses nothing for now: {_BESIDE_GROUP}. Results are not affected."
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _leave(block: Block, function: Function, args: tuple[Any, ...], kwargs: Kwargs, reason: str) -> Any:
    """Let torch compute a product, and report why."""
    call = rules.parse(rules.PRODUCTS, function, args, kwargs)  # None: torch will say what is wrong
    if call is not None and isinstance(call.a, torch.Tensor) and isinstance(call.b, torch.Tensor):
        block.report.add_left(rules.describe(call.is_linear, call.a, call.b), reason)
    return function(*args, **kwargs)


def _product(block: Block, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Deferred | str:
    """Defer the product, or say why not."""
    inputs = tuple([x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)])
    if not inputs:
        return UNKNOWN_FORM
    now = block.state_for(inputs[0].get_device() if inputs[0].is_cuda else -1)
    if isinstance(now, str):
        return now
    stamps = tensor_checks.stamps_of_plain(inputs)
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


def _on_step(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    if kwargs and kwargs.get("inplace") is False:  # as torch.nn.functional says it
        kwargs = NO_KWARGS if len(kwargs) == 1 else {name: kwargs[name] for name in kwargs if name != "inplace"}
    block = ledger.blocks[-1]
    count = 0 if kwargs else len(args)
    step: Step | None = None
    node: Node | None
    if count == 1 and type(args[0]) is Deferred:
        node = args[0].__dict__.get("_node")  # node_of, without a frame
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
            stamps = tensor_checks.stamps_of_plain(operands)
            if stamps is not None and node is not None:
                step = chains.remembered((function, block.dropout, node.chain, y.shape, y.dtype, y.device, _layout(y)))
        elif type(y) is Deferred:
            node = y.__dict__.get("_node")
            made_of, operands = (z, node), (z,)
            stamps = tensor_checks.stamps_of_plain(operands)
            if stamps is not None and node is not None:
                step = chains.remembered((function, block.dropout, z.shape, z.dtype, z.device, _layout(z), node.chain))
    if (
        step is not None and stamps is not None and node is not None and node.taken is None
        and node.block is block and not (node.stepped and node.chain.is_drawn)
    ):  # fmt: skip
        state = node.state
        if execution_state.read(state.device) == state:
            node.stepped = True
            requires_grad = node.requires_grad or (count == 2 and state.grad and operands[0].requires_grad)
            return ledger.defer(
                block, step.chain, function, made_of, kwargs, (node,), node.inputs + operands, node.stamps + stamps,
                state, requires_grad, node.precision,
            )  # fmt: skip
    for x in args:
        if type(x) is Deferred:
            break
    else:
        if ledger.is_pending() and tensor_checks.may_write(function, args, kwargs):
            ledger.compute_readers((args, kwargs), f"{tensor_checks.name(function)} may change an operand")
        return function(*args, **kwargs)
    if kwargs.get("inplace"):
        return _on_step_in_place(ledger, function, args, kwargs)
    result = _step(block, function, args, kwargs)
    if not isinstance(result, str):
        return result
    materialise_all((args, kwargs), result)
    return function(*args, **kwargs)


def _on_step_in_place(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Make the chain of the same tensor longer."""
    if args and type(args[0]) is Deferred:
        plain = rules.OUT_OF_PLACE.get(function, function)
        plain_kwargs = {name: value for name, value in kwargs.items() if name != "inplace"}
        result = _step(ledger.blocks[-1], plain, args, plain_kwargs, in_place=True)
        if not isinstance(result, str):
            return result
        materialise_all((args, kwargs), result)
    if ledger.is_pending():
        ledger.compute_readers((args, kwargs), f"{tensor_checks.name(function)} may change an operand")
    return function(*args, **kwargs)


def _step(
    block: Block, function: Function, args: tuple[Any, ...], kwargs: Kwargs, *, in_place: bool = False
) -> Deferred | str:
    """Defer the step if everything is still as when the product was called; else say why not."""
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
    added = tensor_checks.stamps_of_plain(operands)
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
    now = block.state_for(node.state.device)
    if now != node.state or isinstance(now, str):
        return now if isinstance(now, str) else _STATE_CHANGED
    parents: tuple[Node, ...] = (node,)
    inputs, stamps, requires_grad = node.inputs, node.stamps, node.requires_grad
    if step.reads_other:
        if in_place and step.number == 1:
            return "it is changed in place by another product"
        other = deferred[1 - step.number]
        materialise(other, "it is added to another product")
        operands, added = (other,), tensor_checks.stamps((other,))
        made_of = [other if x is nodes[1 - step.number] else x for x in made_of]
    elif pair is not None:
        second = nodes[1 - step.number]
        if second.block.ledger is not block.ledger:
            return _ELSEWHERE
        if second.state != now or second.precision != node.precision:
            return _STATE_CHANGED
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
        return block.ledger.defer(*arguments, x=args[0]) if node_of(args[0]) is made_of[0] else _COMPUTED


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
    """Return the arguments' part of a pattern (nodes for deferred ones); None where one cannot be remembered."""
    parts: list[Any] = []
    for x in (*args, *kwargs.values()):
        kind = type(x)
        if kind is Node:
            parts.append(x.chain)
        elif kind in PLAIN:
            parts += (x.shape, x.dtype, x.device, _layout(x)) if with_layouts else (x.shape, x.dtype, x.device)
        elif kind in tensor_checks.CONSTANTS:
            parts += (kind, x or repr(x))  # 0.0 and -0.0 are equal
        else:
            return None
    return [*parts, *kwargs]


def _symbols(args: Iterable[Any], kwargs: Kwargs, inputs: int) -> tuple[Sequence[Any], Kwargs]:
    """Return the arguments (nodes for deferred ones) as chains.py takes them; `inputs` is the first operand's place."""
    numbers, places = itertools.count(), itertools.count(inputs)

    def symbol(x: Any) -> Any:
        if type(x) is Node:
            return Part(next(numbers), x.chain)
        if type(x) not in PLAIN:
            return x
        return Operand(next(places), x.shape, x.dtype, x.device, is_in_order=tensor_checks.is_in_order(x))

    return [symbol(x) for x in args], {name: symbol(x) for name, x in kwargs.items()}


def _unreadable(tensors: Iterable[torch.Tensor]) -> str:
    """Say why these tensors have no stamps."""
    has_main_grad = any(hasattr(x, "main_grad") for x in tensors)
    return "a weight has a main_grad, which isogemm.linear would accumulate into" if has_main_grad else NOT_PLAIN


def _on_dropout(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    is_off = args and type(args[0]) is Deferred and rules.parse(rules.DROPOUTS, function, args, kwargs) == 0
    return args[0] if is_off else _on_step(ledger, function, args, kwargs)


def _on_hook(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    _refuse_lost_gradient(ledger, function, args[:1])
    return function(*args, **kwargs)


def _on_backward(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Compute what is pending first: hooks and accumulation may change what it reads."""
    position = _BACKWARDS[function]
    wanted = args[position] if len(args) > position else kwargs.get("inputs")
    if isinstance(wanted, Iterable) and not isinstance(wanted, torch.Tensor | list | tuple):
        wanted = tuple(wanted)  # an iterator can be read once
        if len(args) > position:
            args = (*args[:position], wanted, *args[position + 1 :])
        else:
            kwargs = {**kwargs, "inputs": wanted}
    _refuse_lost_gradient(ledger, function, wanted)
    ledger.compute_pending("a backward begins")
    return function(*args, **kwargs)


def _on_own_call(ledger: Ledger, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Run one of isogemm's functions as outside of a block."""
    if deferred_in((args, kwargs)):
        materialise_all((args, kwargs), f"isogemm.{tensor_checks.name(function)} reads it")
        args, kwargs = with_values(args), with_values(kwargs)
    if kwargs.get("running") is not None and ledger.is_pending():
        ledger.compute_readers(kwargs["running"], f"isogemm.{tensor_checks.name(function)} changes an operand")
    return function(*args, **kwargs)


def _refuse_lost_gradient(ledger: Ledger, function: Function, wanted: Any) -> None:
    """Raise for a gradient of a value that a fused launch does not compute on its own."""
    if any(map(ledger.lost_gradient, tensor_checks.tensors_in(wanted))):
        raise RuntimeError(
            f"{tensor_checks.name(function)} asks for the gradient of a product whose next step was computed with it "
            "in one launch, without it, or that an autograd.Function took before it was computed; look at the product "
            "before that step, or leave isogemm.autofuse()"
        )


# The position of the `inputs` argument.
_BACKWARDS: dict[Function, int] = {torch.autograd.grad: 1, torch.Tensor.backward: 4, torch.autograd.backward: 5}
OWN = (mm, matmul, linear, matmul_fused, mlp, bmm, encoder_layer)
_HANDLERS: dict[Function, Callable[[Ledger, Function, tuple[Any, ...], Kwargs], Any]] = {
    **dict.fromkeys(rules.PRODUCTS, _on_product),
    **dict.fromkeys(STEPS, _on_step),
    **dict.fromkeys(rules.OUT_OF_PLACE, _on_step_in_place),
    **dict.fromkeys(rules.DROPOUTS, _on_dropout),
    **dict.fromkeys(OWN, _on_own_call),
    **dict.fromkeys((torch.Tensor.retain_grad, torch.Tensor.register_hook), _on_hook),
    **dict.fromkeys(_BACKWARDS, _on_backward),
}
