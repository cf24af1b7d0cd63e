"""What is kept for the backward: no more than torch keeps, for every choice of inputs that need a gradient."""

import functools
import gc
import itertools
import weakref

import pytest
import torch
import triton
from dispatching import ThroughOperators
from torch.nn import functional as F

import isogemm
from isogemm.epilogues import register, spec
from isogemm.gemm.api import mlp
from isogemm.verify.inputs import make_data

T, K, N = 64, 40, 56  # tokens are most: a kept result shows
SHAPES = {
    "a": (T, K), "b": (K, N), "x": (T, K), "weight": (N, K), "bias": (N,), "weight_up": (N, K), "bias_up": (N,),
    "residual": (T, N), "c": (T, N), "beta": (), "alpha": (), "row_scale": (T,), "col_scale": (N,),
    "weight_down": (K, N), "bias_down": (K,),
}  # fmt: skip


def _tensors(names, needed, dtype=torch.float32):
    return {
        name: make_data("normal", SHAPES[name], seed=seed, dtype=dtype, device="cpu").requires_grad_(name in needed)
        for seed, name in enumerate(names)
    }


class Kept:
    """By a call: the operands that it keeps, the bytes of what else, and its result."""

    def __init__(self, function, operands):
        kept = {}

        def pack(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self.result = function(**operands)
        named = {each.untyped_storage().data_ptr(): name for name, each in operands.items()}
        self.operands = {named[at] for at in kept if at in named}
        self.bytes = sum(storage.nbytes() for at, storage in kept.items() if at not in named)


def _subsets(names):
    return itertools.chain.from_iterable(itertools.combinations(names, size) for size in range(len(names) + 1))


LAYER = ("x", "weight", "bias")
GATE = ("x", "weight", "bias", "weight_up", "bias_up")


def _linear(activation):
    return functools.partial(isogemm.linear, activation=activation)


def _torch_linear(activation):
    form = spec.ACTIVATIONS[activation].torch
    return lambda x, weight, bias=None, residual=0: form(F.linear(x, weight, bias)) + residual


def _autofused(x, weight, bias, residual):
    with isogemm.autofuse():
        return torch.relu(F.linear(x, weight, bias)) + residual


def _module(activation=None, factory=isogemm.nn.Linear):
    layer = factory(K, N) if activation is None else factory(K, N, activation=activation)
    return lambda x, **parameters: torch.func.functional_call(layer, parameters, x)


def _mlp(x, weight, bias, weight_down, bias_down):
    return F.linear(F.gelu(F.linear(x, weight, bias)), weight_down, bias_down)


CASES = {  # names of operands, isogemm's and torch's
    "mm": (("a", "b"), isogemm.mm, lambda a, b: torch.mm(a, b)),
    "matmul": (("a", "b"), isogemm.matmul, lambda a, b: torch.matmul(a, b)),
    "linear": (LAYER, isogemm.linear, F.linear),
    "nn.Linear": (LAYER, _module(), _module(factory=torch.nn.Linear)),
    "nn.Linear gelu": (LAYER, _module("gelu"), _torch_linear("gelu")),
    **{name: ((*LAYER, "residual"), _linear(name), _torch_linear(name)) for name in ("relu", "gelu", "tanh", "relu2")},
    "residual": (
        (*LAYER, "residual"), isogemm.linear, lambda x, weight, bias, residual: F.linear(x, weight, bias) + residual
    ),
    "autofuse": ((*LAYER, "residual"), _autofused, _torch_linear("relu")),
    "swiglu": (
        GATE, _linear("swiglu"),
        lambda x, weight, bias, weight_up, bias_up: F.silu(F.linear(x, weight, bias)) * F.linear(x, weight_up, bias_up),
    ),
    "addmm": (
        ("a", "b", "c", "bias"), functools.partial(isogemm.matmul_fused, beta=2.0, alpha=0.5, activation="gelu"),
        lambda a, b, c, bias: F.gelu(torch.addmm(c, a, b, beta=2.0, alpha=0.5) + bias),
    ),
    "mlp": ((*LAYER, "weight_down", "bias_down"), mlp, _mlp),
    "mlp swiglu": (
        (*GATE, "weight_down"), lambda **operands: mlp(**operands, activation="swiglu") * 2**-6,
        lambda x, weight, bias, weight_up, bias_up, weight_down: 2**-6
        * F.linear(F.silu(F.linear(x, weight, bias)) * F.linear(x, weight_up, bias_up), weight_down),
    ),
}  # fmt: skip


WAYS = [(name, through) for name in CASES for through in ("eager", "operators")]
WAYS.remove(("autofuse", "operators"))  # a dispatch mode keeps it off


@pytest.mark.parametrize(("name", "through"), WAYS)
def test_no_more_is_kept_than_by_torch(name, through):
    """Operands: a subset of those. Besides them no more bytes.

    But for a gated nn.MLP of which up alone is trained: its first layer keeps both products, where torch keeps one.
    """
    names, ours, theirs = CASES[name]
    for needed in _subsets(names):
        operands = _tensors(names, needed)
        right = Kept(theirs, operands)
        if through == "operators":
            with ThroughOperators():
                kept = Kept(ours, operands)
        else:
            kept = Kept(ours, operands)
        assert kept.operands <= right.operands, needed
        of_up_alone = name == "mlp swiglu" and not {"x", "weight", "bias"}.intersection(needed)
        both_halves = T * N * 4 if of_up_alone and {"weight_up", "bias_up"}.intersection(needed) else 0
        assert kept.bytes <= right.bytes + both_halves, needed
        assert kept.result.requires_grad == bool(needed)
        if needed:  # and it is enough
            leaves = [operands[each] for each in needed]
            grad = make_data("normal", kept.result.shape, seed=9, device="cpu")
            found = torch.autograd.grad(kept.result, leaves, grad)
            torch.testing.assert_close(found, torch.autograd.grad(right.result, leaves, grad), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name, (names, *_) in CASES.items() if "bias" in names])
def test_no_bias_is_kept(name):
    """By no other way either: saved-tensor hooks see what is saved, not what a node holds."""
    names, ours, _ = CASES[name]
    operands = _tensors(names, names[:1])
    watched = {each: weakref.ref(operands[each]) for each in names if each.startswith("bias")}
    result = ours(**operands)
    for each in watched:
        del operands[each]
    gc.collect()
    assert {each for each, bias in watched.items() if bias() is not None} == set()
    result.sum().backward()


READ_BY = {  # the product is computed again
    "alpha": {"x", "weight", "row_scale", "col_scale"}, "row_scale": {"x", "weight", "alpha", "col_scale"},
    "col_scale": {"x", "weight", "alpha", "row_scale"}, "beta": {"c"}, "c": {"beta"}, "bias": set(),
    "x": {"weight", "alpha", "row_scale", "col_scale"}, "weight": {"x", "alpha", "row_scale", "col_scale"},
}  # fmt: skip


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_what_scales_keep(activation):
    """What each gradient reads is kept, and nothing else."""
    for needed in _subsets(READ_BY):
        if len(needed) in (1, 2, len(READ_BY)):
            kept = Kept(_linear(activation), _tensors(READ_BY, needed))
            assert kept.operands == set().union(*(READ_BY[each] for each in needed)), needed
            assert kept.bytes == (T * N * 4 if activation else 0)


@triton.jit
def _declared(acc, col, row, factor):
    return acc * factor


def test_what_a_registered_epilogue_keeps(monkeypatch):
    """Its pre-activation and its aux, unless the residual's gradient alone is wanted."""
    monkeypatch.setattr(spec, "REGISTERED", {})
    register("scaled", _declared, lambda acc, col, row, factor: acc * factor)

    def scaled(x, weight, residual, bias):
        return isogemm.linear(x, weight, residual=residual, epilogue="scaled", aux=(bias,))

    names = ("x", "weight", "residual", "bias")
    for needed, operands in (
        ("residual", set()),
        ("x", {"weight", "bias"}),
        ("weight", {"x", "bias"}),
        ("bias", {"bias"}),
    ):
        kept = Kept(scaled, _tensors(names, (needed,)))
        assert kept.operands == operands
        assert kept.bytes == (0 if needed == "residual" else T * N * 4)


@pytest.mark.parametrize("name", ["mm", "linear", "nn.Linear gelu", "relu", "swiglu", "mlp", "autofuse"])
def test_x_may_be_changed_where_weights_are_frozen(name):
    """In place, before the backward, as with torch: it is not read again. A second derivative neither reads it."""
    names, ours, _ = CASES[name]
    operands = _tensors(names, names[:1])
    leaf = operands[names[0]]
    for create_graph in (False, True):
        given = leaf.clone()
        (expected,) = torch.autograd.grad(ours(**operands).sin().sum(), leaf)
        result = ours(**(operands | {names[0]: given}))
        with torch.no_grad():
            given.add_(1)
        (found,) = torch.autograd.grad(result.sin().sum(), leaf, create_graph=create_graph)
        torch.testing.assert_close(found, expected)


def test_a_frozen_weight_may_be_changed_where_x_needs_no_gradient():
    operands = _tensors(LAYER, ("bias",))
    for function in (isogemm.linear, _linear("gelu"), _linear("relu")):
        result = function(**operands)
        operands["weight"].add_(1)
        result.sum().backward()
