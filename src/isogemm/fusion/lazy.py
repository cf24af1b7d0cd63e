"""`isogemm.autofuse`: inside the block products are deferred, and what follows one is computed with it in one launch.

A torch function mode sees every call. A product becomes a `Deferred`: a tensor of the right shape and dtype without
data, and a node that says how to compute it. A step that fits the epilogue (rules.py) gives another one. Whatever else
looks at a deferred tensor makes it compute, and turns the very same object into a plain torch.Tensor.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch._functorch.utils
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

from isogemm.core.eager import PLAIN
from isogemm.epilogues import recognise
from isogemm.fusion import ambient, questions, rules
from isogemm.fusion.ambient import Ambient
from isogemm.fusion.report import Report
from isogemm.fusion.rules import Arguments, Function, Product, ProductCall
from isogemm.gemm import api

_C: Any = torch._C
_P = ParamSpec("_P")
_R = TypeVar("_R")
Kwargs = Mapping[str, Any]

_UNKNOWN_FORM = "it is called in a form that is not fused"
_NOT_PLAIN = "an operand is no plain strided tensor"
_NO_KWARGS: Kwargs = {}
_LONGEST = 64  # steps of a chain
_CASTABLE = (torch.bfloat16, torch.float16, torch.float32)  # by autocast


class _Thread(threading.local):
    computing = False  # what is called now is not to be deferred


_thread = _Thread()


class autofuse:
    """Fuse products with what follows them, in plain torch code: a `with` block or a decorator.

    Args:
        dropout: fuse dropout as well; each call then has one mask of isogemm's, another than torch's, whose seed is
            drawn from torch's generator when the result is computed.

    The block gives a `Report` of what was fused and, for the products left, why not (of a decorator: its `report`).
    Values and gradients are those of the plain code within rounding.
    """

    def __init__(self, *, dropout: bool = False) -> None:
        self.dropout = dropout
        self.report = Report()
        self._mode: _Mode | None = None
        self._block: _Block | None = None

    def __enter__(self) -> Report:
        if is_compiling():
            return self.report
        if self._mode is not None:
            raise RuntimeError("this autofuse() is entered already; expected one for each block")
        _listen()
        stack: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        active = [mode for mode in stack if isinstance(mode, _Mode)]
        self._mode = active[-1] if active else _Mode()
        self._block = _Block(self.report, self.dropout)
        self._mode.blocks.append(self._block)
        if not active:
            self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self.report

    def __exit__(self, kind: type[BaseException] | None, exception: BaseException | None, traceback: Any) -> None:
        if is_compiling() or self._mode is None or self._block is None:
            return
        mode, block = self._mode, self._block
        self._mode = self._block = None
        if len(mode.blocks) == 1:
            mode.__exit__(kind, exception, traceback)  # type: ignore[no-untyped-call]
        try:
            mode.compute_pending("the block ended", of=block, failing=exception is not None)
        finally:
            mode.blocks.remove(block)

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            raise TypeError(f"{function.__name__} is a generator or a coroutine; use a with block inside it")

        @functools.wraps(function)
        def fused(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            block = autofuse(dropout=self.dropout)
            block.report = self.report
            with block:
                return function(*args, **kwargs)

        return fused


class Deferred(torch.Tensor):
    """A product and its epilogue, not yet computed: it tells its shape, dtype and device; all else computes it."""

    _node: _Node

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Kwargs | None = None
    ) -> Any:
        if function in _METADATA:
            if function == _REQUIRES_GRAD:
                return args[0]._node.requires_grad
            with _C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or _NO_KWARGS))
        if is_compiling():
            torch._dynamo.graph_break(msg="a deferred tensor of isogemm.autofuse() is computed outside the graph")
        for x in _deferred_in((args, kwargs)):
            _materialise(x, f"{questions.name(function)} reads it")
        return function(*args, **(kwargs or _NO_KWARGS))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Kwargs | None = None
    ) -> Any:
        """C++ code has got hold of it, past __torch_function__ and past autograd."""
        for x in _deferred_in((args, kwargs)):
            if x._node.requires_grad:
                raise RuntimeError(
                    f"{function} was called from C++ with a deferred tensor that requires grad, and would lose its "
                    "gradient; let a torch function look at the tensor first, or leave isogemm.autofuse()"
                )
            _materialise(x, f"{function} reads it")
        return function(*args, **(kwargs or _NO_KWARGS))


class _Block:
    """One entered `autofuse`."""

    __slots__ = ("_clear", "_entered", "dropout", "report")

    def __init__(self, report: Report, dropout: bool) -> None:
        self.report, self.dropout = report, dropout
        self._entered = ambient.read_enclosure()
        self._clear: Ambient | None = None  # the last one that was no obstacle

    def obstacle(self, now: Ambient) -> str:
        """Why no call may be deferred now; else empty."""
        if now == self._clear:
            return ""
        reason = ambient.obstacle(self._entered, now)
        if not reason:
            self._clear = now
        return reason


class _Node:
    """How a deferred tensor is computed. It holds the operands and not the tensor, which may die unread."""

    __slots__ = (
        "ambient",
        "args",
        "arguments",
        "block",
        "consumed",
        "depth",
        "function",
        "inputs",
        "kept",
        "kwargs",
        "mode",
        "parents",
        "product",
        "requires_grad",
        "stamps",
        "stepped",
        "tensor",
        "version",
    )

    def __init__(
        self,
        mode: _Mode,
        function: Function,
        args: tuple[Any, ...],
        kwargs: Kwargs,
        parents: tuple[_Node, ...],
        product: Product,
        arguments: Arguments,
        inputs: tuple[torch.Tensor, ...],
        stamps: tuple[int, ...],
        now: Ambient,
        requires_grad: bool,
    ) -> None:
        self.mode, self.block = mode, mode.blocks[-1]
        self.function, self.args, self.kwargs = function, args, kwargs  # as called; nodes stand for deferred operands
        self.product, self.arguments = product, arguments  # as fused
        self.inputs, self.stamps = inputs, stamps
        self.ambient, self.requires_grad = now, requires_grad
        self.parents, self.depth = parents, 1  # nodes among args; the longest way to a product
        self.stepped = False  # another node has it as a parent
        self.consumed = False  # by a fused launch that went past it
        self.kept: torch.Tensor | None = None  # the value, for another tensor of this node, or as the only one drawn
        self.tensor: _Ref | None = None  # that has this node, or is computed
        self.version: int | None = None  # of the tensor when it was computed
        for parent in parents:
            parent.stepped = True
            self.depth = max(self.depth, parent.depth + 1)

    def is_stale(self) -> bool:
        """Whether an operand is no longer what it was at the time of the call."""
        return questions.stamps(self.inputs) != self.stamps

    def computed(self) -> torch.Tensor | None:
        """The tensor once computed, if it is alive."""
        return None if self.version is None or self.tensor is None else self.tensor()

    def plain(self) -> torch.Tensor | None:
        """The tensor once computed, if it is alive and still is what it was."""
        x = self.computed()
        return x if x is not None and x._version == self.version else None

    def ancestors(self) -> Iterator[_Node]:
        todo = [*self.parents]
        while todo:
            node = todo.pop()
            yield node
            todo += node.parents

    def comes_from(self, other: _Node) -> bool:
        return any(node is other for node in self.ancestors())

    def is_drawn(self) -> bool:
        """Whether it is the result of a dropout: computed twice it would be two."""
        return "dropout_p" in self.arguments and "residual" not in self.arguments

    def describe(self) -> str:
        return rules.describe(self.product.is_linear, self.product.a, self.product.b)


class _Step(NamedTuple):
    """A node with more arguments."""

    node: _Node
    arguments: Arguments
    operand: Any = None  # that the step adds
    also: _Node | None = None  # whose inputs it reads as well


class _Ref(weakref.ref[torch.Tensor]):
    __slots__ = ("key", "number")
    key: int  # its id
    number: int  # in the order of the calls


class _Mode(TorchFunctionMode):
    """Defers, on one thread. Blocks inside a block share its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[_Block] = []
        self.pending: dict[int, _Ref] = {}  # by id, in the order of the calls
        self.repeated = WeakIdKeyDictionary()  # tensors computed again, which have a part of their gradient only
        self._numbers = itertools.count()
        self._readers: dict[int, list[_Ref]] = {}  # by the storage of an operand; some are dead
        self._unindexed: list[_Ref] = []  # not yet among them
        self._results: set[int] = set()  # storages of computed ones, which later steps read
        pending = self.pending
        self.lock = threading.RLock()  # one thread turns a deferred tensor into its value, another waits for it
        self._forget: Callable[[_Ref], Any] = lambda ref: pending.pop(ref.key, None)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Kwargs | None = None
    ) -> Any:
        if is_compiling() or _thread.computing:
            return function(*args, **(kwargs or _NO_KWARGS))
        handler = _HANDLERS.get(function) if not kwargs or "out" not in kwargs else None
        if handler is not None:
            return handler(self, function, args, kwargs or _NO_KWARGS)
        if self.pending and questions.may_write(function, args, kwargs or _NO_KWARGS):
            self.compute_readers((args, kwargs), f"{questions.name(function)} changes an operand")
        return function(*args, **kwargs) if kwargs else function(*args)

    def wrap(self, node: _Node) -> Deferred:
        product = node.product
        x: Deferred = _MAKE(Deferred, product.shape, dtype=product.dtype, device=product.device)
        _THROW_ON_DATA_PTR(x)
        ref = _Ref(x, self._forget)
        ref.key, ref.number = id(x), next(self._numbers)
        self.pending[ref.key] = ref
        self.assign(x, node, ref)
        return x

    def assign(self, x: Deferred, node: _Node, ref: _Ref) -> None:
        """Make x the node's tensor."""
        x._node, node.tensor = node, ref
        self._unindexed.append(ref)
        if len(self._unindexed) > 64 + 2 * len(self.pending):  # most are dead
            self._unindexed = [each for each in self._unindexed if each() is not None]

    def settle(self, x: torch.Tensor, node: _Node) -> None:
        """x is computed."""
        self.pending.pop(id(x), None)
        node.version = x._version
        if node.stepped and self.pending:
            self._results.add(questions.storage(x))
        if not self.pending:
            self._readers.clear()
            self._unindexed.clear()
            self._results.clear()

    def compute_pending(self, reason: str, *, of: _Block | None = None, failing: bool = False) -> None:
        """Those alive, in the order of the calls; while an exception is on its way, those that can be."""
        for x in self._alive(self.pending.values()):
            if of is not None and x._node.block is not of:
                continue
            try:
                _materialise(x, reason)
            except _OperandChanged:  # an error for whoever reads it
                continue
            except Exception:
                if not failing:
                    raise

    def compute_readers(self, written: Any, reason: str) -> None:
        """Those that read memory which the tensors in `written` share."""
        storages = set(map(questions.storage, questions.tensors_in(written)))
        if not self._results.isdisjoint(storages):
            for x in self._alive(self.pending.values()):
                if not storages.isdisjoint(map(questions.storage, _read_by(x._node))):
                    _materialise(x, reason)
            return
        self._index()
        found = [ref for each in storages for ref in self._readers.get(each, ())]
        for x in self._alive(sorted(set(found), key=lambda ref: ref.number)):
            _materialise(x, reason)

    def _index(self) -> None:
        for x in self._alive(self._unindexed):
            ref = self.pending[id(x)]
            for each in set(map(questions.storage, x._node.inputs)):
                readers = self._readers.setdefault(each, [])
                if len(readers) > 2 * len(self.pending):
                    readers[:] = [other for other in readers if other() is not None]
                readers.append(ref)
        self._unindexed.clear()

    @staticmethod
    def _alive(refs: Iterable[_Ref]) -> Iterator[Deferred]:
        for ref in list(refs):
            x = ref()
            if type(x) is Deferred:
                yield x


class _OperandChanged(RuntimeError):
    """Unseen, before the product was computed."""


_MAKE: Any = torch.Tensor._make_wrapper_subclass
_THROW_ON_DATA_PTR: Any = _C._set_throw_on_mutable_data_ptr  # else C++ that asks for the memory would get address 0


# Deferring.


def _on_product(mode: _Mode, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    try:
        call = rules.PRODUCTS[function](*args, **kwargs)
    except TypeError:  # torch will say what is wrong, or knows a form that is not fused
        return function(*args, **kwargs)
    for x in (call.a, call.b, call.c):
        if type(x) is Deferred:
            _materialise(x, f"{questions.name(function)} reads it")
    node = _product(mode, function, args, kwargs, call)
    if isinstance(node, _Node):
        return mode.wrap(node)
    if isinstance(call.a, torch.Tensor) and isinstance(call.b, torch.Tensor):
        mode.blocks[-1].report.add_left(rules.describe(call.is_linear, call.a, call.b), node)
    return function(*args, **kwargs)


def _product(mode: _Mode, function: Function, args: tuple[Any, ...], kwargs: Kwargs, call: ProductCall) -> _Node | str:
    a, b, c, alpha = call.a, call.b, call.c, call.alpha
    if type(a) not in PLAIN:
        return _NOT_PLAIN
    now = ambient.read(a)
    if reason := mode.blocks[-1].obstacle(now):
        return reason
    if not (questions.is_plain(a) and questions.is_plain(b) and (c is None or questions.is_plain(c))):
        return _NOT_PLAIN
    if hasattr(b, "main_grad") or hasattr(c, "main_grad"):
        return "a weight has a main_grad, which isogemm.linear would accumulate into"
    dtype = a.dtype
    if now.autocast is not None and dtype in _CASTABLE:
        dtype = now.autocast
        same = b.dtype in _CASTABLE and (c is None or c.dtype in _CASTABLE)
    else:
        same = b.dtype == dtype and (c is None or c.dtype == dtype)
    if not same or b.device != a.device:
        return "the operands' dtypes or devices differ"
    product = rules.start(a, b, call.is_linear, a, b, dtype)
    if isinstance(product, str):
        return product
    arguments = rules.with_addend(product, call, c) if c is not None or alpha != 1 else {}
    if isinstance(arguments, str):
        return arguments
    inputs: tuple[torch.Tensor, ...] = (a, b) if c is None else (a, b, c)
    requires_grad = now.grad and (a.requires_grad or b.requires_grad or (c is not None and c.requires_grad))
    stamps = questions.stamps(inputs)
    return _Node(mode, function, args, kwargs, (), product, arguments, inputs, stamps, now, requires_grad)


def _on_step(mode: _Mode, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    for x in args:
        if type(x) is Deferred:
            break
    else:
        if mode.pending and questions.may_write(function, args, kwargs):
            mode.compute_readers((args, kwargs), f"{questions.name(function)} changes an operand")
        return function(*args, **kwargs)
    if kwargs.get("inplace"):
        return _on_step_in_place(mode, function, args, kwargs)
    step = _STEPS[function](mode, function, args, kwargs)
    node = _grown(mode, step, function, args, kwargs)
    if isinstance(node, _Node):
        return mode.wrap(node)
    _materialise_all((args, kwargs), node)
    return function(*args, **kwargs)


def _on_step_in_place(mode: _Mode, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """The same tensor, with a longer chain."""
    x = args[0] if args else None
    if type(x) is Deferred:
        plain = rules.OUT_OF_PLACE.get(function, function)
        plain_kwargs = {name: value for name, value in kwargs.items() if name != "inplace"}
        step = _STEPS[plain](mode, plain, args, plain_kwargs)
        if isinstance(step, _Step) and step.operand is x:
            step = "it is changed in place by another product"
        node = _grown(mode, step, plain, args, plain_kwargs)
        if isinstance(node, _Node):
            mode.assign(x, node, mode.pending[id(x)])
            return x
        _materialise_all((args, kwargs), node)
    if mode.pending:
        mode.compute_readers((args, kwargs), f"{questions.name(function)} changes an operand")
    return function(*args, **kwargs)


def _on_dropout(mode: _Mode, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    is_off = args and type(args[0]) is Deferred and _probability(function, args, kwargs) == 0
    return args[0] if is_off else _on_step(mode, function, args, kwargs)


def _probability(function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> float | None:
    """Of a dropout; None where it is called in no known form."""
    try:
        return cast(float, rules.DROPOUTS[function](*args, **kwargs))
    except TypeError:
        return None


def _on_hook(mode: _Mode, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    _refuse_lost_gradient(mode, function, args[:1])
    return function(*args, **kwargs)


def _refuse_lost_gradient(mode: _Mode, function: Function, wanted: Any) -> None:
    """A gradient of what a fused launch went past: its backward has no such value."""
    for x in questions.tensors_in(wanted):
        is_lost = x._node.consumed and x._node.requires_grad if type(x) is Deferred else x in mode.repeated
        if is_lost:
            raise RuntimeError(
                f"{questions.name(function)} asks for the gradient of a product whose next step was computed with it "
                "in one launch, without it; look at the product before that step, or leave isogemm.autofuse()"
            )


def _on_backward(mode: _Mode, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> Any:
    """Hooks and accumulation may change what the pending ones read."""
    position = 1 if function is torch.autograd.grad else 4
    _refuse_lost_gradient(mode, function, (args[position : position + 1], kwargs.get("inputs")))
    mode.compute_pending("a backward begins")
    return function(*args, **kwargs)


def _grown(mode: _Mode, step: _Step | str, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> _Node | str:
    """The step as a node, if all is still as it was when the product was called."""
    if isinstance(step, str):
        return step
    if kwargs and _deferred_in(kwargs):
        return _UNKNOWN_FORM
    node, arguments, operand, also = step
    if node.mode is not mode or (also is not None and also.mode is not mode):
        return "it was deferred on another thread or in another block"
    if node.depth >= _LONGEST:
        return f"it is the end of {_LONGEST} steps"
    if node.stepped and node.is_drawn():
        return "the result of a dropout is read twice"
    now = ambient.read(node.product.a)
    if reason := mode.blocks[-1].obstacle(now):
        return reason
    if now != node.ambient or (also is not None and now != also.ambient):
        return "the grad mode, autocast, stream or hooks changed before the next step"
    inputs, stamps, requires_grad = node.inputs, node.stamps, node.requires_grad
    if isinstance(operand, torch.Tensor):
        if type(operand) is Deferred:
            _materialise(operand, "it is added to another product")
        elif not questions.is_plain(operand):
            return _NOT_PLAIN
        inputs, stamps = (*inputs, operand), stamps + questions.stamps((operand,))
        requires_grad = requires_grad or (now.grad and operand.requires_grad)
    if also is not None:
        inputs, stamps = inputs + also.inputs, stamps + also.stamps
        requires_grad = requires_grad or also.requires_grad
    args = tuple([x._node if type(x) is Deferred else x for x in args])
    parents = tuple([x for x in args if type(x) is _Node])
    return _Node(mode, function, args, kwargs, parents, node.product, arguments, inputs, stamps, now, requires_grad)


def _sum(mode: _Mode, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> _Step | str:
    try:
        left, right, left_scale, right_scale = rules.SUMS[function](*args, **kwargs)
    except TypeError:
        return _UNKNOWN_FORM
    if type(left) is not Deferred:
        if type(right) is not Deferred:
            return _UNKNOWN_FORM
        return _added(right._node, right_scale, left, left_scale)
    if type(right) is not Deferred:
        return _added(left._node, left_scale, right, right_scale)
    if left is right or _related(left._node, right._node):
        return "it is added to what was made of it"
    # The one with less behind it takes the other, which keeps its own epilogue.
    if len(left._node.arguments) < len(right._node.arguments):
        left, left_scale, right, right_scale = right, right_scale, left, left_scale
    step = _added(right._node, right_scale, left, left_scale)
    return _added(left._node, left_scale, right, right_scale) if isinstance(step, str) else step


def _added(node: _Node, scale: Any, operand: Any, operand_scale: Any) -> _Step | str:
    like = operand._node.product if type(operand) is Deferred else operand
    arguments = rules.added_to_scaled(node.product, node.arguments, scale, operand, like, operand_scale)
    return arguments if isinstance(arguments, str) else _Step(node, arguments, operand)


def _factor(mode: _Mode, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> _Step | str:
    try:
        left, right, divides = rules.FACTORS[function](*args, **kwargs)
    except TypeError:
        return _UNKNOWN_FORM
    if type(left) is Deferred and type(right) is Deferred:
        if divides:
            return "it is divided by a product"
        return _two_products(left._node, right._node)
    if type(left) is Deferred:
        x, operand = left._node, right
    elif type(right) is Deferred and not divides:
        x, operand = right._node, left
    else:
        return "something is divided by it"
    arguments = rules.scaled(x.product, x.arguments, operand, operand, divides=divides)
    return arguments if isinstance(arguments, str) else _Step(x, arguments, operand)


def _related(left: _Node, right: _Node) -> bool:
    """Whether one is made of the other: computing that one once serves both."""
    return left.comes_from(right) or right.comes_from(left)


def _two_products(left: _Node, right: _Node) -> _Step | str:
    """A gate and what it lets through, or z * sigmoid(z)."""
    for z, sigmoid in ((left, right), (right, left)):
        if sigmoid.arguments.get("activation") == "sigmoid" and sigmoid.args[0] is z:
            arguments = rules.activated(z.product, z.arguments, "silu", {})
            if not isinstance(arguments, str):
                return _Step(z, arguments)
    gate, up = (left, right) if "activation" in left.arguments else (right, left)
    arguments = rules.gated(gate.product, gate.arguments, up.product, up.arguments)
    if isinstance(arguments, str):
        return arguments
    if not up.product.is_linear:
        arguments["weight_up"] = up.product.b.t()
    return _Step(gate, arguments, also=up)


def _square(mode: _Mode, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> _Step | str:
    exponents = (2,) if function in (torch.square, torch.Tensor.square) else args[1:]
    if type(args[0]) is not Deferred or kwargs or [type(e) for e in exponents] not in ([int], [float]):
        return _UNKNOWN_FORM
    node = args[0]._node
    if node.ambient.autocast is not None and node.product.device.type == "cuda":
        return "autocast squares in float32"
    arguments = rules.squared(node.arguments) if exponents[0] == 2 else f"its power is {exponents[0]}"
    return arguments if isinstance(arguments, str) else _Step(node, arguments)


def _activation(mode: _Mode, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> _Step | str:
    if not args or type(args[0]) is not Deferred:
        return _UNKNOWN_FORM
    found = recognise(function, args, kwargs) if kwargs or len(args) > 1 else _by_default(function)
    if found is None:
        return f"{questions.name(function)} has options that are not fused"
    node = args[0]._node
    arguments = rules.activated(node.product, node.arguments, *found)
    return arguments if isinstance(arguments, str) else _Step(node, arguments)


@functools.cache
def _by_default(function: Function) -> tuple[str, dict[str, float]] | None:
    return recognise(function, (None,), {})


def _dropout(mode: _Mode, function: Function, args: tuple[Any, ...], kwargs: Kwargs) -> _Step | str:
    if not mode.blocks[-1].dropout:
        return "dropout follows, whose mask is torch's; autofuse(dropout=True) draws one of its own"
    p = _probability(function, args, kwargs)
    if p is None or not args or type(args[0]) is not Deferred:
        return _UNKNOWN_FORM
    node = args[0]._node
    arguments = rules.dropped(node.arguments, p)
    return arguments if isinstance(arguments, str) else _Step(node, arguments)


_STEPS: dict[Function, Callable[[_Mode, Function, tuple[Any, ...], Kwargs], _Step | str]] = {
    **dict.fromkeys(rules.SUMS, _sum),
    **dict.fromkeys(rules.FACTORS, _factor),
    **dict.fromkeys(rules.SQUARES, _square),
    **dict.fromkeys(rules.ACTIVATION_FUNCTIONS, _activation),
    **dict.fromkeys(rules.DROPOUTS, _dropout),
}

_HANDLERS: dict[Function, Callable[[_Mode, Function, tuple[Any, ...], Kwargs], Any]] = {
    **dict.fromkeys(rules.PRODUCTS, _on_product),
    **dict.fromkeys(_STEPS, _on_step),
    **dict.fromkeys(rules.OUT_OF_PLACE, _on_step_in_place),
    **dict.fromkeys(rules.DROPOUTS, _on_dropout),
    **dict.fromkeys((torch.Tensor.retain_grad, torch.Tensor.register_hook), _on_hook),
    **dict.fromkeys((torch.Tensor.backward, torch.autograd.grad), _on_backward),
}


# Computing.


def _materialise(x: Deferred, reason: str) -> None:
    """Turn x into its value; `reason` is who asks."""
    node = x.__dict__.get("_node")
    if node is None:  # another thread was faster
        return
    with node.mode.lock:
        if type(x) is not Deferred:
            return
        node = x._node
        value = _compute(node, reason)
        with _C.DisableTorchFunction():
            is_held = x._use_count() > 1  # type: ignore[attr-defined]  # by C++, such as a checkpoint that saved it
            _C._swap_tensor_impl(x, value)
            x.__class__ = torch.Tensor  # type: ignore[assignment]
            del x._node
            if is_held:  # the empty one lives on there, as a deferred tensor of the same value
                value.__class__ = Deferred
                value._node = node  # type: ignore[attr-defined]
            if is_held or (node.stepped and node.is_drawn()):
                node.kept = x
            node.mode.settle(x, node)
            if node.consumed and node.requires_grad:
                node.mode.repeated[x] = True


def _materialise_all(operands: Any, reason: str) -> None:
    for x in sorted(_deferred_in(operands), key=lambda x: x._node.depth):  # what the others may be computed from
        _materialise(x, reason)


def _compute(node: _Node, reason: str) -> torch.Tensor:
    if node.kept is not None:
        return node.kept.view_as(node.kept)
    if node.is_stale():
        raise _OperandChanged(
            f"an operand of a deferred {node.describe()} was changed in place, unseen, before the product was "
            "computed; let a torch function look at the product before that, or leave isogemm.autofuse()"
        )
    before, _thread.computing = _thread.computing, True
    try:
        now = ambient.read(node.product.a)
        if now == node.ambient:
            return _evaluate(node, reason, now)
        with ambient.restored(node.ambient, now, node.product.device):
            return _evaluate(node, reason, now)
    finally:
        _thread.computing = before


def _evaluate(node: _Node, reason: str, now: Ambient) -> torch.Tensor:
    report = node.block.report
    if node.consumed:
        report.add_repeated(node.describe(), reason)
    if not node.parents:
        report.add_left(node.describe(), reason)
        return _call(node)
    for parent in node.parents:
        if parent.is_drawn():
            _draw_for_others(parent)
    if _has_result(node) or now.transform:
        return _call(node)
    arguments = rules.final(node.arguments)
    report.add_fused(node.describe(), rules.steps(arguments))
    for each in node.ancestors():
        each.consumed = True
    return _launch(node.product, arguments)


def _draw_for_others(node: _Node) -> None:
    """Compute a dropout on its own, where somebody else may still read it: one call has one mask."""
    x = None if node.tensor is None else node.tensor()
    if type(x) is Deferred and x._node is node:
        _materialise(x, "the result of a dropout is held")
    if node.version is not None and node.plain() is None:
        raise _OperandChanged("the result of a dropout was changed in place, unseen, before the next step was computed")


def _call(node: _Node) -> torch.Tensor:
    """As the user wrote it, from what is there of the operands."""
    args = [x if type(x) is not _Node else _result(x) for x in node.args]
    return cast(torch.Tensor, node.function(*args, **node.kwargs))


def _result(node: _Node) -> torch.Tensor:
    found = node.plain()
    return _call(node) if found is None else found


def _has_result(node: _Node) -> bool:
    """Whether an operand, or an operand of one, has been computed on its own."""
    return any(each.version is not None and each.plain() is not None for each in node.ancestors())


def _launch(product: Product, arguments: Arguments) -> torch.Tensor:
    a, b, by_rows = product.a, product.b, arguments.get("bias_dim") == -2
    for name in arguments.keys() & _VECTORS:
        along_rows = name == "row_scale" or (name == "bias" and by_rows)
        vector = arguments[name]
        if along_rows or vector.ndim > 1:
            arguments = {**arguments, name: vector.squeeze(-1) if along_rows else vector.flatten()}
    if "weight_up" in arguments or (product.is_linear and not by_rows):
        return api.linear(a, b if product.is_linear else b.t(), **arguments)
    return api.matmul_fused(a, b.t() if product.is_linear else b, **arguments)


_VECTORS = frozenset({"bias", "bias_up", "col_scale", "row_scale"})


_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_PROPERTIES = ("device", "dtype", "is_cpu", "is_cuda", "itemsize", "layout", "ndim", "requires_grad", "shape")
_METHODS = (
    "__len__",
    "dim",
    "element_size",
    "get_device",
    "is_floating_point",
    "ndimension",
    "nelement",
    "numel",
    "size",
)
_METADATA = frozenset(
    {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES}
    | {getattr(torch.Tensor, name) for name in _METHODS}
    | {torch.numel, torch.is_floating_point}
)


def _deferred_in(values: Any) -> list[Deferred]:
    return [x for x in questions.tensors_in(values) if type(x) is Deferred]


def _read_by(node: _Node) -> Iterator[torch.Tensor]:
    """The operands of a node, and the results it may be computed from."""
    yield from node.inputs
    for each in node.ancestors():
        x = each.computed()
        if x is not None:
            yield x


@functools.cache
def _listen() -> None:
    """Compute the deferred arguments of what does not ask __torch_function__, from the first block on.

    autograd.Function.apply unwraps those that outlived a functorch transform before autograd looks at them, and so does
    this; nn.Parameter makes a subclass's data into no nn.Parameter.
    """
    if "unwrap_dead_wrappers" not in torch.autograd.Function.apply.__func__.__code__.co_names:  # type: ignore[attr-defined]
        raise RuntimeError(f"isogemm.autofuse() does not know the autograd.Function of torch {torch.__version__}")
    unwrap, new = torch._functorch.utils.unwrap_dead_wrappers, torch.nn.Parameter.__new__

    @functools.wraps(unwrap)
    def unwrap_and_compute(args: tuple[Any, ...]) -> tuple[Any, ...]:
        for x in args:
            if type(x) is Deferred:
                _materialise(x, "an autograd.Function reads it")
        return unwrap(args)

    @functools.wraps(new)
    def compute_and_new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) is Deferred:
            _materialise(data, "a parameter is made of it")
        return new(cls, data, requires_grad)

    torch._functorch.utils.unwrap_dead_wrappers = unwrap_and_compute
    torch.nn.Parameter.__new__ = compute_and_new  # type: ignore[method-assign]
