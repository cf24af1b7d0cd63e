"""Deferred tensors, what is known of those not yet computed, and how they are computed.

A `Deferred` is a tensor of the right shape and dtype without data, and a `Node` that says how to compute it. Whatever
looks at one makes it compute, and turns the very same object into a plain torch.Tensor.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch.compiler import is_compiling
from torch.utils.weak import WeakIdKeyDictionary

from isogemm.core.device import matmul_precision
from isogemm.fusion import ambient, questions
from isogemm.fusion.ambient import Ambient
from isogemm.fusion.chains import Chain, Kwargs
from isogemm.fusion.report import Report
from isogemm.fusion.rules import Function
from isogemm.gemm import api

_C: Any = torch._C
NO_KWARGS: Kwargs = {}


class _Thread(threading.local):
    computing = False  # what is called now is not to be deferred


thread = _Thread()


class Deferred(torch.Tensor):
    """A product and its epilogue, not yet computed: it tells its shape, dtype and device; all else computes it."""

    _node: Node

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Kwargs | None = None
    ) -> Any:
        if function in _METADATA:
            if function == _REQUIRES_GRAD:
                return args[0]._node.requires_grad
            with _C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or NO_KWARGS))
        if is_compiling():
            torch._dynamo.graph_break(msg="a deferred tensor of isogemm.autofuse() is computed outside the graph")
        for x in deferred_in((args, kwargs)):
            materialise(x, f"{questions.name(function)} reads it")
        return function(*args, **(kwargs or NO_KWARGS))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Kwargs | None = None
    ) -> Any:
        """C++ code has got hold of it, past __torch_function__ and past autograd."""
        for x in deferred_in((args, kwargs)):
            if x._node.requires_grad:
                raise RuntimeError(
                    f"{function} was called from C++ with a deferred tensor that requires grad, and would lose its "
                    "gradient; let a torch function look at the tensor first, or leave isogemm.autofuse()"
                )
            materialise(x, f"{function} reads it")
        return function(*args, **(kwargs or NO_KWARGS))


class Block:
    """One entered `autofuse`."""

    __slots__ = ("clear", "dropout", "entered", "report")

    def __init__(self, report: Report, dropout: bool) -> None:
        self.report, self.dropout = report, dropout
        self.entered = ambient.read_enclosure()
        self.clear: Ambient | None = None  # the last one that was no obstacle

    def moment(self, device: int) -> Ambient | str:
        """What is around a product on a device (a negative number: the CPU) now, or why it may not be deferred."""
        clear = self.clear
        if clear is not None and clear.device == device and ambient.is_still(clear):
            return clear
        now = ambient.read(device)
        reason = ambient.obstacle(self.entered, now)
        if reason:
            return reason
        self.clear = now
        return now


class Node:
    """How a deferred tensor is computed. It holds the operands and not the tensor, which may die unread."""

    stepped = False  # another node has it as a parent
    consumed = False  # by a fused launch that went past it
    kept: torch.Tensor | None = None  # the value, for another tensor of this node, or as the only one drawn
    version: int | None = None  # of the tensor when it was computed
    tensor: Ref  # that has this node, or is computed

    def __init__(
        self,
        ledger: Ledger,
        chain: Chain,
        function: Function,
        args: tuple[Any, ...],
        kwargs: Kwargs,
        parents: tuple[Node, ...],
        inputs: tuple[torch.Tensor, ...],
        stamps: tuple[questions.Stamp, ...],
        ambient: Ambient,
        precision: str,
        requires_grad: bool,
        depth: int,
    ) -> None:
        self.ledger, self.block = ledger, ledger.blocks[-1]
        self.chain = chain  # as fused
        self.function, self.args, self.kwargs = function, args, kwargs  # as called; nodes stand for deferred operands
        self.parents, self.depth = parents, depth  # nodes among args; the longest way to a product
        self.inputs, self.stamps = inputs, stamps
        self.ambient, self.precision, self.requires_grad = ambient, precision, requires_grad

    def computed(self) -> torch.Tensor | None:
        """The tensor once computed, if it is alive."""
        return None if self.version is None else self.tensor()

    def plain(self) -> torch.Tensor | None:
        """The tensor once computed, if it is alive and still is what it was."""
        x = self.computed()
        return x if x is not None and x._version == self.version else None

    def ancestors(self) -> list[Node]:
        found = [*self.parents]
        for node in found:
            found += node.parents
        return found

    def comes_from(self, other: Node) -> bool:
        return any(node is other for node in self.ancestors())

    def reads(self) -> Iterator[torch.Tensor]:
        """The operands, and the results it may be computed from."""
        yield from self.inputs
        for each in self.ancestors():
            x = each.computed()
            if x is not None:
                yield x


class Ref(weakref.ref[torch.Tensor]):
    __slots__ = ("number",)
    number: int  # in the order of the calls


class Ledger:
    """What one thread has deferred, in its blocks."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.pending: dict[int, Ref] = {}  # by number
        self.lock = threading.RLock()  # one thread turns a deferred tensor into its value, another waits for it
        self._repeated: WeakIdKeyDictionary | None = None  # tensors computed again
        self._numbers = itertools.count(1)
        self._readers: dict[int, list[Ref]] = {}  # by the storage of an operand; some are dead
        self._indexed = 0  # the last number among them
        self._regrown: dict[int, Ref] = {}  # have more operands since, by number; some are dead
        self._results: set[int] = set()  # storages of computed ones, which later steps read
        pending = self.pending
        self._forget: Callable[[Ref], Any] = lambda ref: pending.pop(ref.number, None)

    def wrap(self, node: Node) -> Deferred:
        chain = node.chain
        # By position: by name it takes a third longer.
        x: Deferred = _MAKE(Deferred, chain.shape, None, None, None, chain.dtype, _STRIDED, chain.device)
        _THROW_ON_DATA_PTR(x)
        ref = node.tensor = Ref(x, self._forget)
        number = ref.number = next(self._numbers)
        self.pending[number] = ref
        x._node = node
        return x

    def regrow(self, x: Deferred, node: Node) -> None:
        """Make x that node's tensor."""
        node.tensor = x._node.tensor
        x._node = node
        self._regrown[node.tensor.number] = node.tensor
        if len(self._regrown) > 64 + 2 * len(self.pending):  # most are dead
            self._regrown = {number: ref for number, ref in self._regrown.items() if ref() is not None}

    def settle(self, x: torch.Tensor, node: Node) -> None:
        """x is computed."""
        pending = self.pending
        pending.pop(node.tensor.number, None)
        node.version = x._version
        if not pending:
            self._readers.clear()
            self._regrown.clear()
            self._results.clear()
        elif node.stepped:
            self._results.add(questions.storage(x))
        if node.consumed and node.requires_grad:
            self._repeated = WeakIdKeyDictionary() if self._repeated is None else self._repeated
            self._repeated[x] = True

    def lost_gradient(self, x: torch.Tensor) -> bool:
        """Whether a fused launch went past x: it has a part of its gradient only."""
        if type(x) is Deferred:
            return x._node.consumed and x._node.requires_grad
        return self._repeated is not None and x in self._repeated

    def compute_pending(self, reason: str, *, of: Block | None = None, failing: bool = False) -> None:
        """Those alive, in the order of the calls; while an exception is on its way, those that can be."""
        for x in _alive(self.pending.values()):
            if of is not None and x._node.block is not of:
                continue
            try:
                materialise(x, reason)
            except OperandChanged:  # an error for whoever reads it
                continue
            except Exception:
                if not failing:
                    raise

    def compute_readers(self, written: Any, reason: str) -> None:
        """Those that read memory which the tensors in `written` share."""
        storages = set(map(questions.storage, questions.tensors_in(written)))
        if not self._results.isdisjoint(storages):
            for x in _alive(self.pending.values()):
                if not storages.isdisjoint(map(questions.storage, x._node.reads())):
                    materialise(x, reason)
            return
        self._index()
        found = [ref for each in storages for ref in self._readers.get(each, ())]
        for x in _alive(sorted(set(found), key=lambda ref: ref.number)):
            materialise(x, reason)

    def _index(self) -> None:
        """Enter those into `_readers` that came since."""
        new = itertools.takewhile(lambda ref: ref.number > self._indexed, reversed(list(self.pending.values())))
        for x in _alive([*new, *self._regrown.values()]):
            ref = x._node.tensor
            self._indexed = max(self._indexed, ref.number)
            for each in set(map(questions.storage, x._node.inputs)):
                readers = self._readers.setdefault(each, [])
                if len(readers) > 2 * len(self.pending):
                    readers[:] = [other for other in readers if other() is not None]
                readers.append(ref)
        self._regrown.clear()


def _alive(refs: Iterable[Ref]) -> Iterator[Deferred]:
    for ref in list(refs):
        x = ref()
        if type(x) is Deferred:
            yield x


class OperandChanged(RuntimeError):
    """Unseen, before the product was computed."""


_MAKE: Any = torch.Tensor._make_wrapper_subclass
_THROW_ON_DATA_PTR: Any = _C._set_throw_on_mutable_data_ptr  # else C++ that asks for the memory would get address 0
_STRIDED = torch.strided


# Computing.


def materialise(x: Deferred, reason: str) -> None:
    """Turn x into its value; `reason` is who asks."""
    node = x.__dict__.get("_node")
    if node is None:  # another thread was faster
        return
    with node.ledger.lock:
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
            if is_held or (node.stepped and node.chain.is_drawn):
                node.kept = x
            node.ledger.settle(x, node)


def materialise_all(operands: Any, reason: str) -> None:
    for x in sorted(deferred_in(operands), key=lambda x: x._node.depth):  # what the others may be computed from
        materialise(x, reason)


def _compute(node: Node, reason: str) -> torch.Tensor:
    if node.kept is not None:
        return node.kept.view_as(node.kept)
    if questions.stamps(node.inputs) != node.stamps:
        raise OperandChanged(
            f"an operand of a deferred {node.chain.description} was changed in place, unseen, before the product was "
            "computed; let a torch function look at the product before that, or leave isogemm.autofuse()"
        )
    before, thread.computing = thread.computing, True
    try:
        if ambient.is_still(node.ambient) and (not node.precision or node.precision == matmul_precision()):
            return _evaluate(node, reason)
        now = ambient.read(node.ambient.device)
        with ambient.restored(node.ambient, now, node.precision):
            return _evaluate(node, reason, in_transform=now.transform)
    finally:
        thread.computing = before


def _evaluate(node: Node, reason: str, *, in_transform: bool = False) -> torch.Tensor:
    chain, report = node.chain, node.block.report
    if node.consumed:
        report.add_repeated(chain.description, reason)
    if not node.parents:
        report.add_left(chain.description, reason)
        return _call(node)
    for parent in node.parents:
        if parent.chain.is_drawn:
            _draw_for_others(parent)
    ancestors = node.ancestors()
    for each in ancestors:
        if each.version is not None and each.plain() is not None:  # it has been computed on its own
            return _call(node)
    if in_transform:
        return _call(node)
    report.add_fused(chain.fused)
    for each in ancestors:
        each.consumed = True
    return _launch(chain, node.inputs)


def _draw_for_others(node: Node) -> None:
    """Compute a dropout on its own, where somebody else may still read it: one call has one mask."""
    x = node.tensor()
    if type(x) is Deferred and x._node is node:
        materialise(x, "the result of a dropout is held")
    if node.version is not None and node.plain() is None:
        raise OperandChanged("the result of a dropout was changed in place, unseen, before the next step was computed")


def _call(node: Node) -> torch.Tensor:
    """As the user wrote it, from what is there of the operands."""
    args = [x if type(x) is not Node else _result(x) for x in node.args]
    return cast(torch.Tensor, node.function(*args, **node.kwargs))


def _result(node: Node) -> torch.Tensor:
    found = node.plain()
    return _call(node) if found is None else found


def _launch(chain: Chain, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    by_rows, a, b, transposes_b, constants, operands = chain.launch
    arguments = {**constants}
    for name, place, view in operands:
        arguments[name] = inputs[place] if view is None else view(inputs[place])
    right = inputs[b].t() if transposes_b else inputs[b]
    return (api.linear if by_rows else api.matmul_fused)(inputs[a], right, **arguments)


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


def deferred_in(values: Any) -> list[Deferred]:
    return [x for x in questions.tensors_in(values) if type(x) is Deferred]
