"""Deferred tensors, the record of those not yet computed, and how they are computed.

A `Deferred` is a tensor of the right shape and dtype without data. Its `Node` says how to compute it. Any other access
computes it and turns the same object into a plain torch.Tensor.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.compiler import is_compiling
from torch.utils.weak import WeakIdKeyDictionary

from isogemm.core import private
from isogemm.core.device import matmul_precision
from isogemm.fusion import execution_state, tensor_checks
from isogemm.fusion.chains import Chain, Kwargs
from isogemm.fusion.execution_state import ExecutionState
from isogemm.fusion.memory import Memory, Pieces, memory_of
from isogemm.fusion.report import Report
from isogemm.fusion.rules import Function

NO_KWARGS: Kwargs = {}
Ref = weakref.ref[Any]
Aliases = dict[int, torch.Tensor]  # of inputs that require grad, by the id of the input
_FEW = 64


class _Thread(threading.local):
    computing = False  # calls are not deferred now
    last_state: ExecutionState | None = None  # the last state without an obstacle


thread = _Thread()


class Deferred(torch.Tensor):
    """A product and its epilogue, not yet computed. Reading its shape, dtype or device does not compute it."""

    _node: Node

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Kwargs | None = None
    ) -> Any:
        if function in _METADATA:
            node = node_of(args[0]) if function == _REQUIRES_GRAD else None
            if node is not None:
                return node.requires_grad
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or NO_KWARGS))
        if is_compiling():
            torch._dynamo.graph_break(msg="a deferred tensor of isogemm.autofuse() is computed outside the graph")
        for x in deferred_in((args, kwargs)):
            materialise(x, f"{tensor_checks.name(function)} reads it")
        taken = deferred_in((args, kwargs))
        result = function(*with_values(args), **with_values(kwargs or NO_KWARGS))
        in_place = [x for x in taken if result is with_values(x)]
        return in_place[0] if in_place else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Kwargs | None = None
    ) -> Any:
        """Compute a tensor with which C++ code called an operator, past __torch_function__."""
        with private.autograd_below_dispatcher():
            for x in deferred_in((args, kwargs)):
                _compute_taken(x, f"{function} reads it")
        return function(*with_values(args), **with_values(kwargs or NO_KWARGS))


class Taken(NamedTuple):
    """The value of a deferred tensor that an autograd.Function or C++ code has taken past torch functions.

    It is computed from aliases of the inputs, in a graph of its own: its gradients are those of each input alone, also
    where one input was computed from another, and hooks on the inputs do not see them.
    """

    value: torch.Tensor
    aliases: Aliases
    version: int  # of the value when it was computed
    read_version: int | None = None  # when the tensor got it


class _Pending(torch.autograd.Function):
    """The grad_fn of a deferred tensor until it is computed.

    An autograd.Function's apply connects its result to the arguments' gradients before its forward runs. A tensor that
    was taken that way keeps this grad_fn; others get the grad_fn of their value.
    """

    @staticmethod
    def forward(ctx: Any, node: Node, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.node = node
        return _make(node.chain)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        node: Node | None = ctx.node
        if node is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: what a deferred product kept was freed by the "
                "first backward; specify retain_graph=True there"
            )
        taken, again = node.taken, torch.is_grad_enabled()
        if taken is None and node.chain.is_drawn:
            raise RuntimeError("an autograd.Function that did not read it took the result of a deferred dropout")
        if taken is None or (again and not node.chain.is_drawn):  # again, with a graph for second derivatives
            taken = _compute_apart(node, "a backward reads it")
        is_kept = again or _keeps_graph()
        found = torch.autograd.grad(
            taken.value, list(taken.aliases.values()), grad, retain_graph=is_kept, create_graph=again,
            allow_unused=True,
        )  # fmt: skip
        grads = dict(zip(taken.aliases, found, strict=True))
        if not is_kept:
            ctx.node = None
        return None, *(grads.pop(id(x), None) for x in node.inputs)  # an input that occurs twice gets it once


class _Carrier(torch.autograd.Function):
    """The identity function of x. Its result is given: a deferred tensor's value, or x's own memory for an alias."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, memory: Sequence[torch.Tensor]) -> torch.Tensor:
        return memory[0]  # as an argument of its own, the result would be a view of it

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Block:
    """An `autofuse` block that was entered."""

    __slots__ = ("_entered", "dropout", "last_state", "ledger", "report")

    def __init__(self, ledger: Ledger, report: Report, dropout: bool) -> None:
        self.ledger, self.report, self.dropout = ledger, report, dropout
        self._entered = execution_state.read_enclosure()
        last = thread.last_state
        self.last_state = last if last is not None and execution_state.is_inside(self._entered, last) else None

    def state_for(self, device: int) -> ExecutionState | str:
        """Return the state for a call on a device (negative: the CPU) now, or why it may not be deferred."""
        found = execution_state.read(device)
        if found == self.last_state:
            return self.last_state
        now = ExecutionState._make(found)
        reason = execution_state.obstacle(self._entered, now)
        if reason:
            return reason
        self.last_state = now
        thread.last_state = now if now.hooks is None else None  # hooks may hold anything
        return now


class Node:
    """How a deferred tensor is computed. It holds the operands and not the tensor, which may die unread."""

    # The arguments of Ledger.defer, in its order.
    block: Block
    chain: Chain  # as fused
    function: Function  # as called
    args: Sequence[Any]  # with nodes in place of deferred operands
    kwargs: Kwargs
    parents: Sequence[Node]  # among args
    inputs: tuple[torch.Tensor, ...]
    stamps: tuple[int, ...]
    state: ExecutionState
    requires_grad: bool
    precision: str  # of a float32 product on CUDA, else empty

    tensor: Ref  # that has this node, or is computed
    stepped = False  # another node has it as a parent
    consumed = False  # a fused launch computed it on the way to another
    kept: torch.Tensor | None = None  # the value, for another tensor of this node, or of a dropout
    version: int | None = None  # of the tensor when it was computed
    taken: Taken | None = None

    def computed(self) -> torch.Tensor | None:
        """Return the tensor if it is computed and alive."""
        return None if self.version is None else self.tensor()

    def plain(self) -> torch.Tensor | None:
        """Return the tensor if it is computed, alive and unchanged since."""
        x, version = self.computed(), self.version
        if self.taken is not None:  # whoever took it may have changed it
            x = self.taken.value if x is None and not self.requires_grad else x
            version = self.taken.version
        return x if x is not None and x._version == version else None

    def ancestors(self) -> list[Node]:
        """Return the nodes it was made of, its parents first."""
        found = [*self.parents]
        for node in found:
            found += node.parents
        return found

    def comes_from(self, other: Node) -> bool:
        return any(node is other for node in self.ancestors())

    @functools.cached_property
    def memories(self) -> frozenset[Memory]:
        """The operands' address ranges."""
        return frozenset(map(memory_of, self.inputs))

    def reads_from(self, written: Pieces[None]) -> bool:
        """Whether this memory holds an operand, or a result from which the node may be computed."""
        results = [memory_of(x) for each in self.ancestors() if (x := each.computed()) is not None]
        return any(map(written.overlap, (*self.memories, *results)))


class Ledger:
    """The record of what one thread has deferred in its blocks."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.lock = threading.RLock()  # one thread turns a deferred tensor into its value, another waits for it
        self._repeated: WeakIdKeyDictionary | None = None  # tensors that have a part of their gradient only
        # Bounded by what is pending, not by what a block has done: `_tidy` drops the rest.
        self._refs: list[Ref] = []  # deferred tensors in the order of the calls; some are dead or computed
        self._results: set[Memory] = set()  # of computed ones, which pending steps may read
        self._most = _FEW  # entries of these two before they are tidied
        self._readers: Pieces[tuple[int, Ref]] = Pieces()  # by operand's memory: index into _refs, and the entry there
        self._indexed = 0  # how many of _refs are in _readers
        self._entries = 0  # of _readers
        self._most_entries = _FEW

    def defer(self, *fields: Any, x: Deferred | None = None) -> Deferred:
        """Return a tensor with a node of these fields; x itself if given. One frame, since every call comes here."""
        node = Node()
        (
            node.block, node.chain, node.function, node.args, node.kwargs, node.parents, node.inputs, node.stamps,
            node.state, node.requires_grad, node.precision,
        ) = fields  # fmt: skip
        if x is not None:
            if node.requires_grad:
                with torch._C.DisableTorchFunction():
                    _swap(x, _pending(node, *node.inputs))
                _throw_on_data_ptr(x)
            node.tensor = x._node.tensor
            x._node = node
            self._refs.append(node.tensor)  # once more: it reads more
            return x
        made = cast(Deferred, _pending(node, *node.inputs) if node.requires_grad else _make(node.chain))
        _throw_on_data_ptr(made)
        made._node = node
        node.tensor = ref = weakref.ref(made)
        refs = self._refs
        refs.append(ref)
        if len(refs) + len(self._results) > self._most:
            self._tidy()
        return made

    def settle(self, x: torch.Tensor, node: Node) -> None:
        """Record that x is computed."""
        node.version = x._version
        if node.stepped:
            self._results.add(memory_of(x))
        if (node.consumed or node.taken is not None) and node.requires_grad:
            self._note_lost(x)

    def pass_by(self, node: Node, x: torch.Tensor | None) -> None:
        """Record that a value is computed without x, the tensor of an ancestor: x gets only a part of its gradient."""
        node.consumed = True
        if x is None or type(x) is Deferred:
            return
        if x.retains_grad or x._backward_hooks:
            raise RuntimeError(
                f"an autograd.Function took what was made of a deferred {node.chain.description} that has hooks or "
                "retains its gradient; let a torch function look at its argument first, or leave isogemm.autofuse()"
            )
        self._note_lost(x)

    def _note_lost(self, x: torch.Tensor) -> None:
        self._repeated = self._repeated or WeakIdKeyDictionary()
        self._repeated[x] = True

    def lost_gradient(self, x: torch.Tensor) -> bool:
        """Whether x has only a part of its gradient, since a fused launch does not go through it."""
        node = node_of(x) if type(x) is Deferred else None
        if node is not None:
            return (node.consumed or node.taken is not None) and node.requires_grad
        return self._repeated is not None and x in self._repeated

    def is_pending(self) -> bool:
        """Whether anything is pending; called on the blocks' thread."""
        refs = self._refs
        while refs and type(refs[-1]()) is not Deferred:
            refs.pop()
        self._indexed = min(self._indexed, len(refs))
        return bool(refs)

    def compute_pending(self, reason: str, *, of: Block | None = None, failing: bool = False) -> None:
        """Compute what is alive, in the order of the calls; while an exception is raised, what can be computed."""
        still = None
        for x, node in _deferred_at(self._refs):
            if of is not None and node.block is not of:
                continue
            if node.state is not still and execution_state.read(node.state.device) == node.state:
                still = node.state
            try:
                materialise(x, reason, still)
            except OperandChanged:  # raised where it is read
                continue
            except Exception:
                if not failing:
                    raise

    def compute_readers(self, written: Any, reason: str) -> None:
        """Compute what reads memory that the tensors in `written` share, in the order of the calls."""
        tensors = tensor_checks.tensors_in(with_values(written))
        memories = {memory_of(x) for x in tensors if type(x) is not Deferred}
        pieces = Pieces((each, None) for each in memories)
        if not any(map(pieces.overlap, tuple(self._results))):  # to which other threads may add
            self._index()
            found = [each for memory in memories for each in self._readers.on(memory)]
            for x, _ in _deferred_at(ref for _, ref in sorted(found, key=operator.itemgetter(0))):
                materialise(x, reason)
            return
        self._tidy()
        for x, node in _deferred_at(self._refs):
            if node.reads_from(pieces):
                materialise(x, reason)

    def _index(self) -> None:
        """Add the new entries of _refs to the readers; if most readers are stale, rebuild them."""
        is_stale = self._entries > self._most_entries
        if is_stale:
            self._tidy()
        for place in range(self._indexed, len(self._refs)):
            ref = self._refs[place]
            for _, node in _deferred_at((ref,)):
                for memory in node.memories:
                    self._readers.add(memory, (place, ref))
                    self._entries += 1
        self._indexed = len(self._refs)
        if is_stale:
            self._most_entries = _FEW + 2 * self._entries

    def _tidy(self) -> None:
        """Drop all that is dead or computed."""
        with self.lock:  # another thread may be settling one
            self._refs = [ref for ref in self._refs if type(ref()) is Deferred]
            results = (each.computed() for _, node in _deferred_at(self._refs) for each in node.ancestors())
            self._results = {memory_of(x) for x in results if x is not None}
        self._most = _FEW + 2 * (len(self._refs) + len(self._results))
        self._readers = Pieces()
        self._indexed = self._entries = 0


def _deferred_at(refs: Iterable[Ref]) -> Iterator[tuple[Deferred, Node]]:
    for ref in refs:
        x = ref()
        node = node_of(x) if type(x) is Deferred else None
        if node is not None:
            yield cast(Deferred, x), node


class OperandChanged(RuntimeError):
    """An operand was changed, unseen, before the product was computed."""


def _make(chain: Chain) -> torch.Tensor:
    """Make an empty tensor; arguments by name would take a third longer."""
    x: torch.Tensor = _make_wrapper(Deferred, chain.shape, None, None, None, chain.dtype, torch.strided, chain.device)
    return x


_make_wrapper: Any = private.find("torch:Tensor._make_wrapper_subclass")
_throw_on_data_ptr: Any = private.find("torch._C:_set_throw_on_mutable_data_ptr")  # else C++ would get address 0
_swap: Any = private.find("torch._C:_swap_tensor_impl")
_use_count: Any = private.find("torch:Tensor._use_count")
_keeps_graph: Any = private.find("torch._C:_autograd._get_current_graph_task_keep_graph") or (lambda: True)
_pending: Any = super(torch.autograd.Function, _Pending).apply  # without what torch does for functorch: 3 us
_carrier: Any = _Carrier.apply


# Computing.


def materialise(x: Deferred, reason: str, still: ExecutionState | None = None) -> None:
    """Turn x into its value; `reason` goes into the report. `still` is a state known to be the present one."""
    node = node_of(x)
    if node is None:
        return
    ledger = node.block.ledger
    with ledger.lock:
        if type(x) is not Deferred:
            return
        node = x._node
        if node.state.forward_ad != execution_state.is_forward_ad_enabled():
            # Inside an autograd.Function, which may have taken it and may return it: it stays as it is.
            _compute_taken(x, reason)
            return
        value = _compute(node, reason, still) if node.taken is None else _carried(x, node, node.taken)
        with torch._C.DisableTorchFunction():
            is_held = _use_count(x) > 1  # by C++, such as a checkpoint that saved it
            _swap(x, value)
            x.__class__ = torch.Tensor  # type: ignore[assignment]
            del x._node
            if is_held:  # the empty one lives on there, as a deferred tensor of the same value
                value.__class__ = Deferred
                value._node = node  # type: ignore[attr-defined]
            if node.taken is None and (is_held or (node.stepped and node.chain.is_drawn)):
                node.kept = x
            ledger.settle(x, node)


def _compute_taken(x: Deferred, reason: str) -> None:
    """Compute the value of x and leave x deferred: `with_values` puts the value in its place."""
    node = node_of(x)
    if node is not None:
        with node.block.ledger.lock:
            if node.taken is None:
                node.taken = _compute_apart(node, reason)


def _compute_apart(node: Node, reason: str) -> Taken:
    if not node.requires_grad:
        value = _compute(node, reason, None)
        return Taken(value, {}, value._version)
    for each in node.ancestors():
        x = each.tensor()
        if x is not None and each.chain.is_drawn:
            raise RuntimeError(
                "an autograd.Function took a deferred tensor that reads a dropout's result, which is held"
            )
        node.block.ledger.pass_by(each, x)
    with torch._C.DisableTorchFunction(), torch.enable_grad():
        # No views: an operand that is changed in place later would change the grad_fn of its views.
        aliases = {id(x): _carrier(x, (x.detach(),)) for x in node.inputs if x.requires_grad}
    value = _compute(node, reason, None, aliases)
    return Taken(value, aliases, value._version)


def _carried(x: Deferred, node: Node, taken: Taken) -> torch.Tensor:
    """Return a taken value's memory as a tensor of its own, connected to the grad_fn of x."""
    if taken.read_version is None:
        node.taken = taken._replace(read_version=taken.value._version)
    elif taken.read_version != taken.value._version:  # x is a copy that C++ saved
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: the "
            f"result of a deferred {node.chain.description}, after an autograd.Function had saved it"
        )
    with torch._C.DisableTorchFunction(), torch.enable_grad():
        memory = taken.value.detach()
        return cast(torch.Tensor, _carrier(x, (memory,))) if node.requires_grad else memory


def with_values(values: Any) -> Any:
    """Replace deferred tensors that were taken by their values."""
    kind = type(values)
    if kind is Deferred:
        node = node_of(values)
        return values if node is None or node.taken is None else node.taken.value
    if kind is dict:
        return {name: with_values(value) for name, value in values.items()} if deferred_in(values) else values
    return kind(map(with_values, values)) if kind in (list, tuple) and deferred_in(values) else values


def materialise_all(operands: Any, reason: str) -> None:
    """Compute all deferred operands, first those from which the others may be computed."""
    depths = {x: node.chain.depth for x in deferred_in(operands) if (node := node_of(x)) is not None}
    for x in sorted(depths, key=depths.__getitem__):
        materialise(x, reason)


def _compute(node: Node, reason: str, still: ExecutionState | None, aliases: Aliases | None = None) -> torch.Tensor:
    """Return the value, computed in the state of the call; with aliases, from these alone."""
    if node.kept is not None and aliases is None:
        return node.kept.view_as(node.kept)
    before, thread.computing = thread.computing, True
    try:
        if tensor_checks.stamps(node.inputs) != node.stamps:
            raise OperandChanged(
                f"an operand of a deferred {node.chain.description} was changed in place, unseen, before the product "
                "was computed; let a torch function look at the product before that, or leave isogemm.autofuse()"
            )
        then = node.state
        now = then if then is still else ExecutionState._make(execution_state.read(then.device))
        if now == then and (not node.precision or node.precision == matmul_precision()):
            return _evaluate(node, reason, aliases)
        with execution_state.restored(then, now, node.precision):
            return _evaluate(node, reason, aliases, in_transform=now.transform)
    finally:
        thread.computing = before


def _evaluate(node: Node, reason: str, aliases: Aliases | None, *, in_transform: bool = False) -> torch.Tensor:
    """Launch the fused chain, or call what the user called where something of it is computed already."""
    chain, report = node.chain, node.block.report
    if node.consumed:
        report.add_repeated(chain.description, reason)
    if not node.parents:
        report.add_left(chain.description, reason)
        return _call(node, aliases)
    for parent in node.parents:
        if parent.chain.is_drawn:
            _draw_for_others(parent)
    ancestors = node.ancestors()
    if in_transform or any(each.plain() is not None for each in ancestors):
        return _call(node, aliases)
    report.add_fused(chain.fused)
    for each in ancestors:
        each.consumed = True
    return chain.compute(node.inputs if not aliases else [aliases.get(id(x), x) for x in node.inputs])


def _draw_for_others(node: Node) -> None:
    """Compute a dropout on its own where something else may still read it: one call has one mask."""
    x = node.tensor()
    if type(x) is Deferred and node_of(x) is node:
        materialise(x, "the result of a dropout is held")
    if node.version is not None and node.plain() is None:
        raise OperandChanged("the result of a dropout was changed in place, unseen, before the next step was computed")


def _call(node: Node, aliases: Aliases | None = None) -> torch.Tensor:
    """Call what the user called, with the operands that are computed; with aliases, with these alone."""

    def argument(x: Any) -> Any:
        if type(x) is not Node:
            return x if not aliases else aliases.get(id(x), x)
        found = x.plain() if aliases is None else None
        return _call(x, aliases) if found is None else found

    kwargs = {name: argument(x) for name, x in node.kwargs.items()} if node.kwargs else node.kwargs
    return cast(torch.Tensor, node.function(*map(argument, node.args), **kwargs))


_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_PROPERTIES = "device dtype is_cpu is_cuda itemsize layout ndim shape"
_METHODS = "__len__ dim element_size get_device is_floating_point ndimension nelement numel size"
_METADATA = frozenset(
    {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()}
    | {getattr(torch.Tensor, name) for name in _METHODS.split()}
    | {_REQUIRES_GRAD, torch.numel, torch.is_floating_point}
    | {getattr(private.find("torch:Tensor._backward_hooks"), "__set__", None)}  # set after a Function's in-place change
)


def node_of(x: torch.Tensor) -> Node | None:
    """Return the node; None once x is computed, which another thread may do at any time."""
    return cast("Node | None", x.__dict__.get("_node"))


def deferred_in(values: Any) -> list[Deferred]:
    return [x for x in tensor_checks.tensors_in(values) if type(x) is Deferred]
