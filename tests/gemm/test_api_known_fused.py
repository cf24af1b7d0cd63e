"""Calls with an epilogue that go to a plan at once: with the launches that they would have had without being known."""

import itertools
from decimal import Decimal

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

import triton
from idle_gpu import idle_gpu  # noqa: F401

import isogemm
from isogemm.core.plan import clear_caches
from isogemm.epilogues import random, spec
from isogemm.gemm import api


@triton.jit
def _twice(acc, col, row, aux):
    return acc + aux


M = N = 16  # a row_scale and a col_scale look the same
K = 32


def _tensor(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


def _linear(**options):
    return lambda: ((_tensor(M, K), _tensor(N, K)), {"bias": _tensor(N), **_made(options)}, isogemm.linear)


def _fused(**options):
    return lambda: ((_tensor(M, K), _tensor(K, N)), _made(options), isogemm.matmul_fused)


def _made(options):
    return {name: value() if callable(value) else value for name, value in options.items()}


def _vector():
    return _tensor(M)


def _matrix():
    return _tensor(M, N)


CALLS = {
    "gelu": _linear(activation="gelu"),
    "relu": _linear(activation="relu"),
    "leaky": _linear(activation="leaky_relu", activation_args={"negative_slope": 0.1}),
    "leakier": _linear(activation="leaky_relu", activation_args={"negative_slope": 0.2}),
    "residual": _linear(residual=_matrix),
    "residual and gelu": _linear(residual=_matrix, activation="gelu"),
    "float32 residual": _linear(residual=lambda: _tensor(M, N, dtype=torch.float32)),
    "strided residual": _linear(residual=lambda: _tensor(M, 2 * N)[:, ::2]),
    "c": _linear(c=_matrix),
    "c, half": _linear(c=_matrix, beta=0.5),
    "c, a third": _linear(c=_matrix, beta=0.25),
    "row_scale": _linear(row_scale=_vector),
    "col_scale": _linear(col_scale=_vector),
    "row_scale, the other None": _linear(row_scale=_vector, col_scale=None),
    "col_scale, the other None": _linear(row_scale=None, col_scale=_vector),
    "both scales": _linear(row_scale=_vector, col_scale=_vector),
    "alpha": _linear(alpha=2.0),
    "other alpha": _linear(alpha=3.0),
    "alpha on the device": _linear(alpha=lambda: torch.ones((), dtype=torch.float32)),
    "swiglu": _linear(weight_up=lambda: _tensor(N, K), activation="swiglu"),
    "dropout": _linear(activation="gelu", dropout_p=0.5),
    "eager": _linear(activation="relu", rounding="eager"),
    "float32 result": _linear(activation="relu", out_dtype=torch.float32),
    "fused": _fused(activation="gelu"),
    "fused, bias along rows": _fused(bias=_vector, bias_dim=-2),
    "fused, bias along columns": _fused(bias=_vector, bias_dim=-1),
}


def _launches(launched, call):
    """The launches of a call, without the address of what it allocates: that stands for None."""
    operands, options, function = call
    launched.clear()
    result = function(*operands, **options)
    return [
        (name, programs, tuple(None if each == result.data_ptr() else each for each in arguments))
        for name, programs, arguments in launched
    ]


@torch.no_grad()
def test_a_known_call_launches_what_an_unknown_one_does(idle_gpu):  # noqa: F811
    """Whatever was called before it: all of these calls are known when each is made again, with other tensors."""
    for _, make in itertools.product(range(3), CALLS.values()):
        call = make()
        _launches(idle_gpu, call)
    known = {name: make() for name, make in CALLS.items()}
    warm = {name: _launches(idle_gpu, call) for name, call in known.items()}
    for name, call in known.items():
        clear_caches()
        expected = _launches(idle_gpu, call)
        if name in ("dropout", "strided residual"):  # with memory of their own besides the result
            assert [each[:2] for each in warm[name]] == [each[:2] for each in expected]
        else:
            assert warm[name] == expected, name


@torch.no_grad()
def test_which_calls_are_known(idle_gpu):  # noqa: F811
    """All but those that read a copy."""
    unknown = []
    for name, make in CALLS.items():
        clear_caches()
        operands, options, function = make()
        for _ in range(3):
            function(*operands, **options)
        if not [known for alike in api._known_fused._cache.values() for *_, known in alike if known.plan]:
            unknown.append(name)
    assert unknown == ["strided residual"]


@torch.no_grad()
@pytest.mark.parametrize("operation", [isogemm.linear, isogemm.matmul_fused])
def test_float64_on_a_gpu_is_torchs(idle_gpu, operation):  # noqa: F811
    """Also where a call would be known after it."""
    x, square = torch.ones(M, N, dtype=torch.float64), torch.eye(N, dtype=torch.float64)
    for _ in range(3):
        assert torch.equal(operation(x, square, bias=square[0], activation="relu", residual=x), 2 * x + square[0])
    assert not idle_gpu


@torch.no_grad()
def test_two_weights_in_the_other_order(idle_gpu):  # noqa: F811
    """A kernel that reads both by one map is compiled for their order in memory."""
    x, both = _tensor(M, K), _tensor(2, N, K)
    for weight, up in ((both[0], both[1]), (both[1], both[0])):
        for _ in range(3):
            result = isogemm.linear(x, weight, weight_up=up, activation="swiglu")
        (_, _, arguments) = idle_gpu[-1]
        assert {weight.data_ptr(), up.data_ptr(), result.data_ptr()} <= set(arguments)
    assert [len(alike) for alike in api._known_fused._cache.values()] == [1, 1]


@torch.no_grad()
def test_two_weights_at_one_place(idle_gpu):  # noqa: F811
    """One of them is copied, known or not: a map of both has a distance."""
    x, weight = _tensor(M, K), _tensor(N, K)
    for up in (_tensor(N, K), _tensor(N, K), _tensor(N, K), weight.view(N, K), weight):
        isogemm.linear(x, weight, weight_up=up, activation="swiglu")
        arguments = idle_gpu[-1][2]
        assert arguments.count(weight.data_ptr()) == 1


@torch.no_grad()
def test_numbers_are_those_of_the_call(idle_gpu):  # noqa: F811
    """Zero's sign counts, and what is no number is refused whatever was called before."""
    x, weight, c = _tensor(M, K), _tensor(N, K), _tensor(M, N)
    for alpha, beta in ((2.0, 3.0), (2.0, 3.0), (0.0, 2.0), (-0.0, 2.0), (4, 5)):
        isogemm.linear(x, weight, alpha=alpha, beta=beta, c=c)
        found = [each for each in idle_gpu[-1][2] if type(each) is float]
        assert [str(each) for each in found] == [str(float(alpha)), str(float(beta))]
    for wrong in (Decimal(2), 2 + 0j, "2"):
        with pytest.raises(TypeError, match="alpha is"):
            isogemm.linear(x, weight, alpha=wrong)


@torch.no_grad()
@pytest.mark.parametrize("call", [
    lambda x, w: isogemm.matmul(x, w.mT), lambda x, w: isogemm.linear(x, w), lambda x, w: isogemm.mm(x, w.mT),
    lambda x, w: isogemm.linear(x, w, activation="gelu"), lambda x, w: isogemm.bmm(x[None], w.mT[None]),
])  # fmt: skip
def test_a_tracer_sees_a_known_call(idle_gpu, call):  # noqa: F811
    """Its mode is no dispatch key of the tensors: a plan would run past it, and the graph be empty."""
    x, weight = _tensor(M, K), _tensor(N, K)
    for _ in range(3):
        call(x, weight)
    graph = make_fx(call)(x, weight).graph
    assert any("isogemm" in str(node.target) or "bmm" in str(node.target) for node in graph.nodes)


def test_gradients_are_never_skipped(idle_gpu):  # noqa: F811
    x, weight, residual = _tensor(M, K), _tensor(N, K), _tensor(M, N).requires_grad_()
    with torch.no_grad():
        for _ in range(3):
            isogemm.linear(x, weight, residual=residual)
    assert isogemm.linear(x, weight, residual=residual).requires_grad
    with torch.no_grad():
        assert not isogemm.linear(x, weight, residual=residual).requires_grad


@torch.no_grad()
def test_a_known_call_draws_a_new_seed(idle_gpu, monkeypatch):  # noqa: F811
    """One for each call, which the kernel reads; with the probability of this call, not of another one."""
    seeds = []

    def new_seed(device):
        seeds.append(torch.empty(1, dtype=torch.int64, device=device))
        return seeds[-1]

    monkeypatch.setattr(api, "new_seed", new_seed)
    x, weight = _tensor(M, K), _tensor(N, K)
    for count, p in enumerate((0.5, 0.5, 0.5, 0.25, 0.5, 0.25), 1):
        isogemm.linear(x, weight, activation="gelu", dropout_p=p)
        arguments = idle_gpu[-1][2]
        assert len(seeds) == count
        assert [each.data_ptr() in arguments for each in seeds] == [False] * (count - 1) + [True]
        assert random.threshold(p) in arguments
        assert random.scale(p) in arguments


@torch.no_grad()
def test_nothing_is_kept_of_calls_that_are_never_known(idle_gpu, monkeypatch):  # noqa: F811
    """A key would keep aux tensors alive."""
    monkeypatch.setitem(spec.REGISTERED, "twice", spec.UserEpilogue("twice", _twice, lambda acc, col, row, aux: acc, 1))
    x, weight = _tensor(M, K), _tensor(K, N)
    for _ in range(3):
        isogemm.matmul_fused(x, weight, epilogue="twice", aux=(_tensor(M, N),))
    assert not api._known_fused._cache


@pytest.mark.parametrize("wrong", [torch.ones(2), [0.5], "0"])
def test_a_wrong_dropout_is_named(idle_gpu, wrong):  # noqa: F811
    with pytest.raises(TypeError, match="dropout_p is"):
        isogemm.linear(_tensor(M, K), _tensor(N, K), activation="relu", dropout_p=wrong)
