"""Fusion under torch.compile: an Inductor pass over the graphs that Dynamo captured, before autograd sees them.

A product and what follows it become one call of `isogemm.linear` or `isogemm.matmul_fused`, whose operators have their
own gradients; two layers in a row become one call of `mlp`. These graphs are not functional: tensors are views of each
other and are modified in place. So a chain is fused only if no node between its first and its last could observe it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.node import map_arg

from isogemm.core import private
from isogemm.epilogues import ACTIVATIONS
from isogemm.fusion import rules, tensor_checks
from isogemm.fusion.report import Fused, Report
from isogemm.fusion.rules import Arguments, Function, Product
from isogemm.gemm import api
from isogemm.gemm.describe import dtype_name

config: Any = private.find("torch._inductor:config")
CustomGraphPass: Any = private.find("torch._inductor.custom_graph_pass:CustomGraphPass") or object
FakeTensor: Any = private.find("torch._subclasses.fake_tensor:FakeTensor")
_without_modes: Any = private.find("torch.utils._python_dispatch:_disable_current_modes")

Pass = Callable[[Graph], None]
Passes = Pass | Sequence[Pass] | None

_PASS = "pre_grad_custom_pass"
# The pass runs before the caches are asked: their keys depend on its result, and the report is whole even where the
# compiled graph comes from a cache. torch 2.11 has no other time, and no setting.
_TIMING = "pre_grad_pass_timing"
_CACHEABLE = "unsafe_marked_cacheable_functions"


class compile_fusion:
    """Turn fusion under torch.compile on or off; as a `with` block, until its end.

    `report` (also what the block returns) says what was fused in the graphs compiled since, and why not the other
    candidates. A function that was compiled before keeps its graph until torch.compiler.reset(). This is a setting of
    Inductor, which newer torch keeps by thread. A pre_grad_custom_pass of yours stays, and sees the graphs first.
    """

    def __init__(self, enabled: bool = True) -> None:
        self._before: dict[str, Any] = {}
        self.report = Report()
        if private.is_off(private.COMPILE_FUSION):
            return
        self._before = {name: getattr(config, name) for name in (_PASS, _TIMING, _CACHEABLE) if hasattr(config, name)}
        _uninstall()
        if not enabled:
            return
        installed = FusionPass(getattr(config, _PASS), getattr(config, _TIMING, ""))
        self.report = installed.report
        setattr(config, _PASS, installed)
        if installed.timing:
            setattr(config, _TIMING, "early")
        setattr(config, _CACHEABLE, {**getattr(config, _CACHEABLE), **dict.fromkeys(_TRACED, _code_hash())})

    def __enter__(self) -> Report:
        return self.report

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for name, value in self._before.items():
            setattr(config, name, value)


class FusionPass(CustomGraphPass):  # type: ignore[misc]
    """The pre_grad_custom_pass that `compile_fusion` installs."""

    def __init__(self, before: Passes = None, timing: str = "") -> None:
        self.before, self.timing = before, timing  # the passes that were installed, and their time
        self.report = Report()

    def __call__(self, graph: Graph) -> None:
        for other in _passes(self.before):
            other(graph)
        fuse(graph, self.report)

    def uuid(self) -> Any:
        """Identify the code that decides and the code that is traced; None where another's pass has no uuid."""
        others = [other.uuid() if isinstance(other, CustomGraphPass) else None for other in _passes(self.before)]
        return None if None in others else (_code_hash(), *others)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out the report: torch 2.11 pickles the pass into its caches' keys."""
        return FusionPass, (self.before, self.timing)


def _uninstall() -> None:
    passes = _passes(getattr(config, _PASS))
    ours = [each for each in passes if isinstance(each, FusionPass)]
    if not ours:
        return
    rest = [other for each in passes for other in (_passes(each.before) if isinstance(each, FusionPass) else (each,))]
    setattr(config, _PASS, rest if len(rest) > 1 else next(iter(rest), None))
    if ours[0].timing:
        setattr(config, _TIMING, ours[0].timing)
    marks = getattr(config, _CACHEABLE)
    setattr(config, _CACHEABLE, {name: mark for name, mark in marks.items() if name not in _TRACED})


def _passes(given: Passes) -> tuple[Pass, ...]:
    if given is None:
        return ()
    return (given,) if callable(given) else tuple(given)


_TRACED = tuple(f"{function.__module__}.{function.__name__}" for function in (api.linear, api.matmul_fused, api.mlp))


@cache
def _code_hash() -> str:
    package = Path(__file__).parent.parent
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))).hexdigest()


def fuse(graph: Graph, report: Report) -> None:
    """Fuse what can be fused, in place."""
    if any(map(_is_transform, graph.nodes)):
        if any(_parse(_PRODUCTS, _call(node)) for node in graph.nodes):
            report.add_left("all products", "the graph is of torch.func or forward-mode AD")
        return
    for gated in (True, False):  # gates first: the product that a gate multiplies must not be fused yet
        for node in list(graph.nodes):
            if not node._erased and (start := _begin(node)) is not None:
                _fuse_from(graph, start, report, gated)


def _fuse_from(graph: Graph, start: _Chain, report: Report, gated: bool) -> None:
    """Fuse the longest possible chain from this product on."""
    chains, reason = _grow(start)
    chains = [
        chain
        for chain in chains
        if chain.steps() != start.steps() and chain.nodes[-1] is not chain.view and (chain.up is not None or not gated)
    ]
    if gated and not chains:
        return
    what = start.describe()
    if start.unfit:
        chains, reason = [], start.unfit if chains or reason else ""
    refusals = []
    while chains and (refused := _fuse_chain(graph, chains.pop(), report)):
        refusals.append(refused)
        if gated and not chains:
            return  # the second round fuses what it can of it, and reports why not more
    if reason := next(iter(refusals), reason):
        report.add_left(what, reason)


def _fuse_chain(graph: Graph, chain: _Chain, report: Report) -> str:
    what, below = chain.describe(), _layer_below(chain)
    if below is not None and not _replace(graph, chain, below):
        report.add_fused(Fused(what, (*chain.steps(), below.describe(), *below.steps())))
        return ""
    refused = _replace(graph, chain)
    if not refused:
        report.add_fused(Fused(what, tuple(chain.steps())))
    return refused


@dataclass(frozen=True)
class _Chain:
    """A product and what follows it: the nodes, and the arguments of the call that would replace them."""

    product: Product
    arguments: Arguments
    nodes: tuple[Node, ...]  # the value of the last one is the chain's
    up: Product | None = None  # of a gated activation
    view: Node | None = None  # that unflattens a flat product's rows
    unfit: str = ""  # why the product itself cannot be fused

    def describe(self) -> str:
        return rules.describe(self.product.is_linear, _like(self.product.a), _like(self.product.b))

    def steps(self) -> tuple[str, ...]:
        return rules.steps(rules.final(self.arguments))


def _begin(node: Node) -> _Chain | None:
    parsed = _parse(_PRODUCTS, _call(node))
    if parsed is None:
        return None
    a, b, result, addend = map(_like, (parsed.a, parsed.b, node, parsed.c))
    if not (isinstance(a, _Like) and isinstance(b, _Like) and isinstance(result, _Like)):
        return None
    begun = rules.start(parsed, a, b, addend, result.dtype)
    if isinstance(begun, str):
        product = Product(parsed.a, parsed.b, parsed.is_linear, result.shape, result.dtype, result.device)
        return _Chain(product, {}, (node,), unfit=begun)
    return _Chain(*begun, (node,))


def _grow(start: _Chain) -> tuple[list[_Chain], str]:
    """Return chains, each longer by one step, and why there are no more where another candidate follows."""
    chains = [start]
    while True:
        chain = chains[-1]
        users = chain.nodes[-1].users
        steps = {user: step for user in users if (step := _followed(chain, user)) is not None}
        step = next(iter(steps.values()), "")
        if len(users) > 1:
            candidate = next((_name(user) for user, each in steps.items() if isinstance(each, _Chain)), "")
            reason = f"the value before {candidate} is read {len(users)} times" if candidate else ""
            step = _written_out(chain) or reason
        if isinstance(step, str):
            return chains, step
        chains.append(step)


def _followed(chain: _Chain, user: Node) -> _Chain | str | None:
    """Add one of the value's users to the chain, or say why not; None where it is no step of an epilogue."""
    call = _call(user)
    if call is None:
        return None
    longer = _viewed(chain, user) if call.function in _VIEWS else _extended(chain, call, user)
    if not isinstance(longer, _Chain) or longer.nodes[-1] is longer.view:
        return longer
    if call.in_place and call.args[0] is not chain.nodes[-1]:
        return "it goes into another tensor in place"
    result, product = _like(user), chain.product
    if not isinstance(result, _Like) or result.shape != product.shape:
        return "the result has another shape"
    if result.dtype != product.dtype:
        return f"the result is {dtype_name(result.dtype)} and the product {dtype_name(product.dtype)}"
    return longer


def _extended(chain: _Chain, call: _Call, user: Node) -> _Chain | str | None:
    value, arguments = chain.nodes[-1], None
    factors, sums = _parse(rules.FACTORS, call), _parse(rules.SUMS, call)
    if factors is not None:
        if factors.divides and factors.right is value:
            return "it divides"
        factor = factors.right if factors.left is value else factors.left
        like = _like(factor)
        if factor is value:
            arguments = rules.squared(chain.arguments)
        elif isinstance(like, _Like) and like.shape == chain.product.shape and not factors.divides:
            return _gated(chain, factor, user)
    elif sums is not None and sums.left is sums.right:
        return "it is added to itself"
    elif call.function in rules.DROPOUTS and config.fallback_random:
        return "fallback_random asks for torch's own random numbers"
    if arguments is None:
        arguments = rules.extended(chain.product, chain.arguments, *call[:3], value, _like)
    return replace(chain, arguments=arguments, nodes=(*chain.nodes, user)) if isinstance(arguments, dict) else arguments


def _gated(gate: _Chain, factor: Node, user: Node) -> _Chain | str:
    """Add act(x @ gate) * (x @ up), if nothing else reads the two products and the sum of the second's bias."""
    up = _begin(factor)
    for operand in factor.all_input_nodes if up is None else ():
        start = _begin(operand) if len(operand.users) == 1 else None
        longer = None if start is None else _followed(start, factor)
        up = longer if isinstance(longer, _Chain) else up
    if up is None or up.unfit or len(factor.users) > 1:
        return "it is multiplied by a tensor of its own shape"
    arguments = rules.gated(gate.product, gate.arguments, up.product, up.arguments)
    if isinstance(arguments, str):
        return arguments
    return replace(gate, arguments=arguments, nodes=(*gate.nodes, *up.nodes, user), up=up.product)


def _viewed(chain: _Chain, user: Node) -> _Chain | None:
    """Add the view of a flat product [B T, N] as [B, T, N]: the steps after it work on either."""
    like, product = _like(user), chain.product
    if chain.view is not None or len(product.shape) != 2 or not isinstance(like, _Like):
        return None
    if like.dtype != product.dtype or len(like.shape) < 3 or like.shape[-1] != product.shape[-1]:
        return None
    shaped = Product(product.a, product.b, product.is_linear, like.shape, product.dtype, product.device)
    return replace(chain, product=shaped, nodes=(*chain.nodes, user), view=user)


_LONGEST = 32  # nodes from a value to the end of an activation written out
_TOLERANCE = 1e-8  # of its constants


def _written_out(chain: _Chain) -> _Chain | None:
    """Add an activation written as a formula: the nodes computed from the value and numbers alone.

    Only analytic functions are taken: two that agree on an interval agree everywhere.
    """
    value = node = chain.nodes[-1]
    inside = {value}
    for _ in range(_LONGEST):
        node = node.next
        if node.op == "output":
            return None
        call = _call(node)
        if call is None or not node.all_input_nodes or not inside.issuperset(node.all_input_nodes):
            continue
        if call.in_place or call.function not in _ANALYTIC or call.kwargs.keys() - {"alpha"}:
            return None
        inside.add(node)
        if all(inside.issuperset(each.users) for each in inside if each is not node):
            return _recognised_formula(chain, [each for each in sorted(inside) if each is not value])
    return None


def _recognised_formula(chain: _Chain, nodes: Sequence[Node]) -> _Chain | None:
    with _without_modes():
        sample = torch.linspace(-6, 6, 97, dtype=torch.float64, device="cpu")
        values: dict[Node, Any] = {chain.nodes[-1]: sample}
        for node in nodes:
            call = cast(_Call, _call(node))
            args, kwargs = map_arg((call.args, call.kwargs), values.__getitem__)
            values[node] = call.function(*args, **kwargs)
        result = values[nodes[-1]]
        names = [name for name in _FORMULAS if _agree(ACTIVATIONS[name].torch(sample), result)]
    if not names or _like(nodes[-1]) != _like(chain.nodes[-1]):
        return None
    arguments = rules.activated(chain.arguments, names[0], {})
    return None if isinstance(arguments, str) else replace(chain, arguments=arguments, nodes=(*chain.nodes, *nodes))


def _agree(a: torch.Tensor, b: Any) -> bool:
    return isinstance(b, torch.Tensor) and torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE)


# Activations that models write out. Not those that torch has one function for: their formulas differ at the ends.
_FORMULAS = ("gelu", "gelu_tanh", "quick_gelu", "silu")
_ANALYTIC = {*rules.SUMS, *rules.FACTORS, *rules.SQUARES}
_ANALYTIC |= {function for name in ("tanh", "sigmoid") for function in ACTIVATIONS[name].functions}
_ANALYTIC |= {torch.erf, torch.Tensor.erf, torch.special.erf, torch.exp, torch.Tensor.exp}

_VIEWS = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape}

_HIDDEN = frozenset({"bias", "activation", "activation_args", "dropout_p", "weight_up", "bias_up"})
_OUTPUT = frozenset({"bias", "dropout_p", "residual"})


def _layer_below(chain: _Chain) -> _Chain | None:
    """Return the layer whose only input is this one, where `mlp` computes both."""
    if "activation" not in chain.arguments or chain.arguments.keys() - _HIDDEN:
        return None
    hidden = chain.nodes[-1]
    between: tuple[Node, ...] = ()
    if chain.view is not None:  # it is flattened again for the next product
        flat = _only_user(hidden)
        call = None if flat is None else _call(flat)
        if flat is None or call is None or call.function not in _VIEWS or _like(flat) != _like(chain.view.args[0]):
            return None
        hidden, between = flat, (flat,)
    user = _only_user(hidden)
    below = None if user is None else _begin(user)
    if below is None or below.unfit or below.product.a is not hidden or below.product.b is hidden:
        return None
    below = _grow(below)[0][-1]
    if rules.final(below.arguments).keys() - _OUTPUT or below.nodes[-1] is below.view:
        return None
    return replace(below, nodes=(*between, *below.nodes))


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


class _View(NamedTuple):
    """An operand as the fused function takes it."""

    of: Node
    method: str
    args: tuple[Any, ...] = ()


def _call_of(chain: _Chain, below: _Chain | None) -> tuple[Function, tuple[Any, ...], Arguments]:
    """Return the function that computes the chain, or both layers, and its arguments."""
    product, arguments = chain.product, _operands(chain)
    if below is not None:
        output = _operands(below)
        if "dropout_p" in arguments:
            arguments["hidden_dropout_p"] = arguments.pop("dropout_p")
        if "bias" in output:
            output["bias_down"] = output.pop("bias")
        return api.mlp, (product.a, _weight(product), _weight(below.product)), arguments | output
    by_rows = rules.is_by_rows(product, arguments)
    b = product.b if by_rows == product.is_linear else _View(product.b, "t")
    return api.linear if by_rows else api.matmul_fused, (product.a, b), arguments


def _weight(product: Product) -> Any:
    return product.b if product.is_linear else _View(product.b, "t")


def _operands(chain: _Chain) -> Arguments:
    """Return the arguments with columns [..., M], rows [N] and, before a view, addends as flat as the product."""
    arguments = dict(rules.final(chain.arguments))
    if chain.up is not None:
        arguments["weight_up"] = _weight(chain.up)
    for name, operand in arguments.items():
        like = _like(operand) if isinstance(operand, Node) else None
        method = like and rules.view(name, len(like.shape), arguments, flat=chain.view is not None)
        if method:
            arguments[name] = _View(operand, method[0], method[1:])
    return arguments


def _replace(graph: Graph, chain: _Chain, below: _Chain | None = None) -> str:
    """Replace the nodes of the chain, and of the layer below it, by one call; or leave the graph and say why not."""
    nodes = sorted(chain.nodes if below is None else (*chain.nodes, *below.nodes))
    if reason := _disturbance(nodes):
        return reason
    function, args, kwargs = _call_of(chain, below)
    view = chain.view if below is None else below.view  # to repeat on the result
    last = nodes[-1]
    like = last.meta["example_value"]
    cast_to = None if _like(chain.product.a).dtype == chain.product.dtype else chain.product.dtype  # by autocast
    autocast = torch.autocast(like.device.type, cast_to, enabled=cast_to is not None)
    try:
        with like.fake_mode, torch.no_grad(), autocast:
            value = function(*map(_value, args), **{name: _value(arg) for name, arg in kwargs.items()})
            shaped = value if view is None else value.view(like.shape)
    except (TypeError, ValueError, GuardOnDataDependentSymNode) as error:
        return str(error)
    if _like_value(shaped) != _like(last):
        return f"isogemm gives {_like_value(shaped)} and torch {_like(last)}"
    if _layout(shaped) != _layout(like):
        return "torch's result has another layout: that of a tensor it is added to"
    with graph.inserting_before(last):
        args = tuple(_placed(graph, arg) for arg in args)
        result = graph.call_function(function, args, {name: _placed(graph, arg) for name, arg in kwargs.items()})
        result.meta = {**last.meta, "example_value": value}
        if view is not None:
            result = graph.create_node(view.op, view.target, (result, *view.args[1:]), view.kwargs)
            result.meta = {**view.meta, "example_value": shaped}
    last.replace_all_uses_with(result)
    for node in reversed(nodes):
        graph.erase_node(node)
    return ""


def _value(argument: Any) -> Any:
    if isinstance(argument, _View):
        return getattr(_value(argument.of), argument.method)(*argument.args)
    return argument.meta["example_value"] if isinstance(argument, Node) else argument


def _placed(graph: Graph, argument: Any) -> Any:
    if not isinstance(argument, _View):
        return argument
    node = graph.call_method(argument.method, (argument.of, *argument.args))
    with argument.of.meta["example_value"].fake_mode, torch.no_grad():
        node.meta["example_value"] = _value(argument)
    return node


# What the graph says.


class _Like(NamedTuple):
    """Shape, dtype and device of a value. Sizes are numbers or expressions: comparing those adds no guard."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


def _like(operand: Any) -> Any:
    """Return a node's shape, dtype and device, None if it is no plain tensor; return anything else as it is."""
    return _like_value(operand.meta.get("example_value")) if isinstance(operand, Node) else operand


def _like_value(value: Any) -> _Like | None:
    if not isinstance(value, FakeTensor) or value.layout is not torch.strided or value.is_nested:
        return None
    return _Like(_expressions(value.shape), value.dtype, value.device)


def _expressions(sizes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    """Return a tensor's strides, None for sizes of 1."""
    pairs = zip(_expressions(value.shape), _expressions(value.stride()), strict=True)
    return tuple(None if size == 1 else stride for size, stride in pairs)


class _Call(NamedTuple):
    """A call of a function or method, in its out-of-place form."""

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    in_place: bool


def _call(node: Node) -> _Call | None:
    if node.op == "call_method":
        function = getattr(torch.Tensor, str(node.target), None)
    else:
        function = node.target if node.op == "call_function" else None
    if function is None:
        return None
    if function in rules.OUT_OF_PLACE:
        return _Call(rules.OUT_OF_PLACE[function], node.args, dict(node.kwargs), True)
    bound = tensor_checks.bound_in_place(function, node.args, node.kwargs)
    if bound is not None:
        bound.arguments["inplace"] = False
        return _Call(function, bound.args, bound.kwargs, True)
    return _Call(function, node.args, dict(node.kwargs), False)


def _parse(table: Mapping[Function, Function], call: _Call | None) -> Any:
    return None if call is None else rules.parse(table, call.function, call.args, call.kwargs)


def _plain(call: rules.ProductCall, settings: Sequence[Any]) -> rules.ProductCall | None:
    """Return a call of isogemm's own product if it has no main_grad, out_dtype or precision."""
    return call if all(setting is None for setting in settings) else None


_PRODUCTS: dict[Function, Function] = {
    **rules.PRODUCTS,
    torch.ops.isogemm.linear: lambda x, w, bias, *rest: _plain(rules.ProductCall(x, w, True, bias), rest),
    torch.ops.isogemm.matmul: lambda a, b, *rest: _plain(rules.ProductCall(a, b, False), rest),
}


_MODE = re.compile(r"(^|_)(set|enter|exit|seed)(_|$)")  # autocast, grad mode and their kin


def _disturbance(nodes: Sequence[Node]) -> str:
    """Say which node between the first and the last may not be reordered with them; empty if none."""
    members = set(nodes)
    memory = {_memory(operand) for node in nodes for operand in node.all_input_nodes if operand not in members}
    node = nodes[0]
    while (node := node.next) is not nodes[-1]:
        if node in members:
            continue
        if node.op == "call_function" and _MODE.search(_name(node)):
            return f"{_name(node)} stands between the product and what follows it"
        if _writes(node) and not memory.isdisjoint(map(_memory, node.all_input_nodes)):
            return f"{_name(node)} may modify an operand between the product and what follows it"
    return ""


def _memory(node: Node) -> int | None:
    """Return the storage of a node's value, the same for its views; None where it is unknown."""
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, FakeTensor) else None


def _writes(node: Node) -> bool:
    """Whether a node may write to its arguments."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    target: Any = node.target
    if node.op == "call_module" or getattr(target, "namespace", "") == "higher_order":
        return True
    if isinstance(target, tensor_checks.OPERATOR_TYPES):
        return any(each.is_mutable for each in tensor_checks.schemas(target)) or tensor_checks.writes_by_name(target)
    function = getattr(torch.Tensor, target, None) if isinstance(target, str) else target
    return function is None or tensor_checks.may_write(function, node.args, node.kwargs)


def _name(node: Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _is_transform(node: Node) -> bool:
    """Whether a node belongs to torch.func or forward-mode AD, for which isogemm's operators have no rules."""
    module = getattr(node.target, "__module__", None) or ""
    return "_functorch" in module or "forward_ad" in module or "dual_level" in _name(node)
