"""Gradients of two layers in one call, on the CPU: finite differences, fp64, frozen parts, dropout, what is kept."""

import functools

import pytest
import torch
from cpu_tensors import CONTRACT, normal
from gradients import (
    Kept,
    assert_gradients,
    assert_gradients_no_worse,
    gradients_of,
    make_leaves,
    make_tensors,
    plain_mlp,
)
from torch.nn import functional as F

import isogemm
from isogemm.gemm import configs, cpu, op
from isogemm.gemm.api import mlp
from isogemm.verify.activations import ACTIVATION_FORMS as ACTIVATIONS
from isogemm.verify.activations import GATE_FORMS as GATED
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch

M, K, N = 3, 4, 5
MLP_SHAPES = {"x": (M, K), "weight": (6, K), "weight_down": (N, 6)}
MLP_BIASES = {"bias": (6,), "bias_down": (N,)}
GATE = {"weight_up": (6, K), "bias_up": (6,)}


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
def test_gradcheck_of_mlp(activation):
    gate = GATE if activation in GATED else {}
    shapes = MLP_SHAPES | MLP_BIASES | gate | {"residual": (M, N)}
    assert_gradients(mlp, make_leaves(shapes), activation=activation)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu", "leaky_relu"])
@pytest.mark.parametrize("dropouts", [(0.4, 0.0), (0.0, 0.4), (0.4, 0.3)], ids=str)
def test_gradcheck_of_mlp_with_dropout(activation, dropouts):
    gate = GATE if activation in GATED else {}
    shapes = MLP_SHAPES | MLP_BIASES | gate | {"residual": (M, N)}
    inside, last = dropouts
    assert_gradients(mlp, make_leaves(shapes), activation=activation, hidden_dropout_p=inside, dropout_p=last)


def test_gradcheck_of_mlp_without_biases_and_in_a_batch():
    assert_gradients(mlp, make_leaves(MLP_SHAPES))
    assert_gradients(mlp, make_leaves(MLP_SHAPES | {"weight_up": (6, K)}), activation="swiglu")
    assert_gradients(mlp, make_leaves(MLP_SHAPES | {"x": (2, M, K), "residual": (2, M, N)}), activation="silu")


def test_second_derivatives_of_mlp_are_torch_s():
    """Mixed ones too, by the graph of a graph."""
    leaves = make_leaves(MLP_SHAPES | MLP_BIASES)

    def twice(function):
        first = torch.autograd.grad(function(**leaves).square().sum(), leaves.values(), create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), leaves.values())

    def plain(x, weight, weight_down, bias, bias_down):
        return F.linear(F.gelu(F.linear(x, weight, bias)), weight_down, bias_down)

    for got, right in zip(twice(mlp), twice(plain), strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("dtype", CONTRACT, ids=str)
@pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATED])
def test_mlp_no_worse_than_torch(activation, dtype):
    m, k, h, n = 65, 40, 100, 33
    shapes = {"x": (m, k), "weight": (h, k), "weight_down": (n, h), "bias": (h,), "bias_down": (n,), "residual": (m, n)}
    shapes |= {"weight_up": (h, k), "bias_up": (h,)} if activation in GATED else {}
    tensors = make_tensors(shapes, dtype)
    tensors["x"] = tensors["x"] / 8
    assert_gradients_no_worse(mlp, plain_mlp, tensors, normal(m, n, seed=9, dtype=dtype), activation=activation)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_x_has_its_gradient_last(activation):
    """On a GPU a weight's gradient has a workspace, which is free again when the memory of that of x is allocated."""
    leaves = make_leaves(MLP_SHAPES | MLP_BIASES | (GATE if activation in GATED else {}), torch.float32)
    result = mlp(**leaves, activation=activation).sum()
    with isogemm.dispatch_log() as log:
        result.backward()
    of_weights = [place for place, each in enumerate(log) if each.op == "weight_grad"]
    of_x = [place for place, each in enumerate(log) if each.op in ("matmul", "fused")][1:]  # the first one is dz
    assert max(of_weights) < min(of_x)


FROZEN = {  # names that are trained
    "biases": ("bias", "bias_up", "bias_down"),
    "down": ("weight_down",),
    "gate": ("weight",),
    "up": ("weight_up", "bias_up"),
    "x": ("x",),
    "residual": ("residual",),
    "x and residual": ("x", "residual"),
    "weights": ("weight", "weight_up", "weight_down"),
    "last bias": ("bias_down",),
}


@pytest.mark.parametrize(
    ("case", "activation"),
    [(case, each) for case in FROZEN for each in ("relu", "gelu", "swiglu") if case != "up" or each in GATED],
)
def test_frozen_parts_of_mlp(case, activation):
    shapes = MLP_SHAPES | MLP_BIASES | {"residual": (M, N)} | (GATE if activation in GATED else {})
    tensors, grad = make_tensors(shapes, torch.float32), normal(M, N, seed=9)
    trained = [name for name in FROZEN[case] if name in tensors]
    expected = gradients_of(mlp, tensors, grad, activation=activation)
    leaves = {name: each.requires_grad_(name in trained) for name, each in tensors.items()}
    mlp(**leaves, activation=activation).backward(grad)
    for name, leaf in leaves.items():
        assert (leaf.grad is not None) == (name in trained), name
        if name in trained:
            assert_bitwise_equal(leaf.grad, expected[name], name)


def test_mlp_masks():
    """For the last dropout as above; of the one inside, that a hidden unit dropped for a token gets nothing from it."""
    m, k, h, n, p = 64, 8, 96, 40, 0.5
    x, weight = torch.ones(m, k), torch.ones(h, k)
    down = torch.eye(h)[:n].clone()  # the first n hidden units themselves
    bias = torch.zeros(h, requires_grad=True)
    for activation in ("relu", "gelu", "silu"):
        result = mlp(x, weight, down, bias=bias, activation=activation, hidden_dropout_p=p)
        dropped = result == 0
        assert 0.4 < float(dropped.float().mean()) < 0.6
        (grad,) = torch.autograd.grad(result.sum(), bias)
        slope = {"relu": 1.0, "gelu": 1.0, "silu": 1.0}[activation]  # at 8, to three digits
        torch.testing.assert_close(grad[:n], (~dropped).sum(0) * 2 * slope, rtol=5e-3, atol=0)
        assert not bool(grad[n:].any())
    x = x.requires_grad_()
    result = mlp(x, weight, torch.ones(n, h), activation="relu", dropout_p=p)
    (grad,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(grad, ((result != 0).sum(1) * 2.0 * h)[:, None].expand(m, k))


@pytest.mark.parametrize(("activation", "tensors"), [("relu", 1), ("gelu", 2), ("silu", 2), ("swiglu", 3)])
def test_what_mlp_keeps(activation, tensors):
    """The hidden value, and where its derivative is not to be had from that, what came before it."""
    rows, width = 40, 100
    shapes = {"x": (rows, 64), "weight": (width, 64), "bias": (width,), "weight_down": (24, width)}
    shapes |= {"weight_up": (width, 64)} if activation in GATED else {}
    kept = Kept(mlp, make_leaves(shapes, torch.bfloat16), activation=activation)
    assert kept.bytes == tensors * rows * width * 2
    assert not kept.result


def _biased_mlp(activation, tokens, dtype=torch.float32):
    shapes = {"x": (tokens, 12), "weight": (24, 12), "bias": (24,), "weight_down": (7, 24)}
    shapes |= {"weight_up": (24, 12), "bias_up": (24,)} if activation in GATED else {}
    return make_leaves(shapes, dtype)


def _hidden_node(result):
    """The first layer's, whose gradient is z's."""
    return next(node for node, _ in result.grad_fn.next_functions if node is not None and "_Hidden" in node.name())


@pytest.mark.parametrize("dtype", CONTRACT)
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_bias_gradients_of_mlp_come_with_dz(activation, dtype, monkeypatch):
    """Summed by halves in blocks of rows and chunks of blocks, with no pass of their own, whoever asks."""
    leaves, grad = _biased_mlp(activation, 2100, dtype), normal(2100, 7, seed=9, dtype=dtype)
    result = mlp(**leaves, activation=activation)
    seen = []
    _hidden_node(result).register_prehook(lambda grads: seen.append(grads[1].clone()))
    monkeypatch.setattr(op, "bias_grad", None)
    result.backward(grad, retain_graph=True)
    biases = [leaf for name, leaf in leaves.items() if name.startswith("bias")]
    for dz, bias in zip(seen[0] if activation in GATED else seen, biases, strict=True):
        blocks = cpu.row_sums(dz, configs.BIAS_ROWS)
        chunks = cpu.row_sums(blocks, configs.BIAS_BLOCKS)
        assert len(chunks) == 3
        assert_bitwise_equal(bias.grad, (chunks[0] + chunks[1] + chunks[2]).to(dtype))
        assert_no_worse_than_torch(bias.grad, dz.sum(0), dz.double().sum(0))
    again = torch.autograd.grad(result, biases, grad)
    torch.compiler.reset()
    compiled = torch.compile(functools.partial(mlp, activation=activation), fullgraph=True, backend="aot_eager")
    other = torch.autograd.grad(compiled(**leaves), biases, grad)
    for bias, repeated, got in zip(biases, again, other, strict=True):
        assert_bitwise_equal(repeated, bias.grad)
        assert_bitwise_equal(got, bias.grad)


@pytest.mark.parametrize("dtype", CONTRACT)
@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_bias_gradients_of_mlp_where_their_sums_are_lost(activation, dtype):
    """To a second derivative, to inference mode, or by a hook: the same order, and the same bits of one dz."""
    leaves, grad = _biased_mlp(activation, 2100, dtype), normal(2100, 7, seed=9, dtype=dtype)
    biases = [leaf for name, leaf in leaves.items() if name.startswith("bias")]
    result = mlp(**leaves, activation=activation)
    expected = torch.autograd.grad(result, biases, grad, retain_graph=True)
    twice = torch.autograd.grad(result, biases, grad, create_graph=True)
    assert all(each.requires_grad for each in twice)
    with torch.inference_mode():
        inferred = torch.autograd.grad(result, biases, grad, retain_graph=True)
    _hidden_node(result).register_prehook(lambda grads: (grads[0], grads[1].clone(), *grads[2:]))
    hooked = torch.autograd.grad(result, biases, grad)
    for name, found in {"create_graph": twice, "inference": inferred, "hook": hooked}.items():
        for got, same in zip(found, expected, strict=True):
            assert_bitwise_equal(got.detach(), same, name)


def test_bias_gradient_of_mlp_is_in_the_log():
    leaves = _biased_mlp("gelu", 5)
    result = mlp(**leaves, activation="gelu")
    with isogemm.dispatch_log() as log:
        result.sum().backward()
    assert [entry.op for entry in log].count("bias_grad") == 1


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_bias_gradients_of_mlp_where_z_s_is_changed(activation):
    """By a hook, in place or not: the sums that came with it are not its own any more."""
    found = {}
    for name, hook in {
        "": lambda grads: None,
        "replaced": lambda grads: (grads[0], grads[1] * 2, *grads[2:]),
        "in place": lambda grads: (grads[0], grads[1].mul_(2), *grads[2:]),
    }.items():
        leaves = _biased_mlp(activation, 100)
        result = mlp(**leaves, activation=activation)
        _hidden_node(result).register_prehook(hook)
        result.sum().backward()
        found[name] = {each: leaf.grad for each, leaf in leaves.items() if each.startswith("bias")}
    for name in ("replaced", "in place"):
        for each, got in found[name].items():
            torch.testing.assert_close(got, 2 * found[""][each], msg=f"{each}, {name}")


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_bias_gradients_of_mlp_where_z_s_has_two_sources(activation):
    """A loss of the result and of its gradient: both give z one, and the second comes without sums."""

    def penalised(function, leaves):
        result = function(**leaves, activation=activation)
        of_x = torch.autograd.grad(result.sin().sum(), leaves["x"], create_graph=True)[0]
        (result.cos().sum() + of_x.square().sum()).backward()
        return {each: leaf.grad for each, leaf in leaves.items()}

    tensors = {name: leaf.detach() / 4 for name, leaf in _biased_mlp(activation, 100).items()}
    actual, expected, exact = (
        penalised(function, {name: each.to(dtype, copy=True).requires_grad_() for name, each in tensors.items()})
        for function, dtype in ((mlp, torch.float32), (plain_mlp, torch.float32), (plain_mlp, torch.float64))
    )
    for name, right in exact.items():
        assert_no_worse_than_torch(actual[name], expected[name], right, ulps=8, what=name)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
@pytest.mark.parametrize("name", ["bias", "weight", "x"])
def test_a_second_derivative_of_zero_is_not_missing(activation, name):
    """By what comes before an activation of straight lines, as torch's own."""
    leaves = make_leaves(MLP_SHAPES | MLP_BIASES)
    found = []
    for function in (mlp, plain_mlp):
        result = function(**leaves, activation=activation)
        (first,) = torch.autograd.grad(result.sum(), leaves[name], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaves[name])[0])
    torch.testing.assert_close(*found)


def test_second_derivative_where_hooks_keep_copies_of_float32_alone():
    """float16's pre-activation of a gate is float32: a copy is kept, and z itself is gone."""
    shapes = {"x": (3, 4), "weight": (8, 4), "weight_up": (8, 4), "weight_down": (5, 8)}
    leaves = make_leaves(shapes, torch.float16)

    def pack(tensor):
        return tensor.clone() if tensor.dtype is torch.float32 else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = mlp(**leaves, activation="swiglu")
    with pytest.raises(RuntimeError, match="second derivative of mlp"):
        torch.autograd.grad(result.float().sum(), leaves["weight_down"], create_graph=True)


def test_second_derivative_of_a_checkpointed_mlp_raises():
    """The hidden value would be taken for a constant."""
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight, down = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((6, 4), (4, 6)))
    result = torch.utils.checkpoint.checkpoint(mlp, x, weight, down, use_reentrant=False)
    with pytest.raises(RuntimeError, match="second derivative of mlp"):
        torch.autograd.grad(result.sum(), [x, weight, down], create_graph=True)
