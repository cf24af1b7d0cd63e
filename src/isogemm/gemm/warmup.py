"""`isogemm.warmup`: compilation in advance of every kernel that calls with given weights will need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isogemm.core.eager import autocast_dtype
from isogemm.core.plan import compiled
from isogemm.epilogues import spec
from isogemm.epilogues.operands import Epilogue, Operands
from isogemm.gemm import configs, fused, fused_autograd, mlp_autograd, op, plan, selection
from isogemm.gemm.configs import Problem
from isogemm.gemm.describe import layout
from isogemm.gemm.fused import Call
from isogemm.gemm.gradient_problems import BiasGradProblem

Weights = Tensor | Iterable[Tensor] | torch.nn.Module


def warmup(
    weights: Weights,
    *,
    tokens: int = 8192,
    backward: bool = False,
    bias: bool = False,
    activation: str | None = None,
    activation_args: Mapping[str, float] | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> int:
    """Compile all that `linear` will need for these weights: nothing is compiled later, in a server or a graph capture.

    Args:
        weights: [N, K] weights on a GPU, or a module, of which every linear and every isogemm.nn.MLP is taken.
        tokens: the most rows of x; every number up to it is covered.
        backward: the gradients too, of up to `tokens` rows.
        bias: with a bias; a module's linears are taken as they are.
        activation, activation_args: also followed by it; a module's are known.
        out_dtype, precision: as in the calls to come.

    Returns:
        The number of kernels that were compiled or found in Triton's cache. x, outputs and gradients are taken to be
        contiguous and aligned to 16 bytes, as torch allocates them.
    """
    if not isinstance(weights, Tensor | torch.nn.Module | Iterable):
        raise TypeError(f"weights is a {type(weights).__name__}; expected [N, K] tensors or a module")
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}; expected at least 1")
    before = compiled()
    layers = {layer.key: layer for layer in _layers(weights, bias, activation, activation_args)}
    for layer in layers.values():
        if not layer.weight.is_cuda or layer.weight.dtype not in op.SERVED:
            continue  # nothing is compiled for the CPU and for float64
        compile_layer = _fused if layer.activation else _plain
        compile_layer(layer, tokens, backward, out_dtype, precision)
    return compiled() - before


class _Layer(NamedTuple):
    """A layer, the activation that follows it, and the layer after that inside an mlp."""

    weight: Tensor
    weight_up: Tensor | None = None
    bias: Tensor | None = None
    bias_up: Tensor | None = None
    activation: str = ""
    arguments: tuple[float, ...] = ()
    down: Tensor | None = None
    bias_down: Tensor | None = None
    dropouts: tuple[float, float] = (0, 0)  # of an mlp: of its hidden value, and after it

    @property
    def key(self) -> tuple[object, ...]:
        """All that its kernels depend on."""
        tensors = (each for each in self if each is None or isinstance(each, Tensor))
        return self.activation, self.arguments, tuple(p > 0 for p in self.dropouts), *map(layout, tensors)


def _layers(
    weights: Weights, bias: bool, activation: str | None, activation_args: Mapping[str, float] | None
) -> Iterator[_Layer]:
    """Yield each layer without its activation, and with it."""
    if isinstance(weights, torch.nn.Module):
        module: Any  # an isogemm.nn.Linear or MLP, which are above here
        for module in weights.modules():
            if isinstance(module, torch.nn.Linear):
                yield _Layer(module.weight, bias=module.bias)
            name = getattr(module, "activation", None)
            if not isinstance(name, str) or name not in spec.ACTIVATIONS:
                continue
            arguments = spec.argument_values(spec.activation(name), getattr(module, "activation_args", None))
            if isinstance(module, torch.nn.Linear):
                yield _Layer(module.weight, None, module.bias, None, name, arguments)
            elif hasattr(module, "hidden_dropout_p"):
                first, second = (module.up, None) if module.gate is None else (module.gate, module.up)
                weight_up, bias_up = (None, None) if second is None else (second.weight, second.bias)
                yield _Layer(
                    first.weight, weight_up, first.bias, bias_up, name, arguments, module.down.weight,
                    module.down.bias, (module.hidden_dropout_p, module.dropout_p),
                )  # fmt: skip
        return
    arguments = ()
    if activation is not None:
        entry = spec.activation(activation)
        if entry.gate:
            raise ValueError(f"activation is {activation!r}, of two weights; expected one of one, or a module")
        arguments = spec.argument_values(entry, activation_args)
    for weight in (weights,) if isinstance(weights, Tensor) else weights:
        if not isinstance(weight, Tensor) or weight.ndim != 2:
            got = f"tensor {list(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
            raise ValueError(f"weights: got a {got}; expected [N, K] tensors or a module")
        like = torch.empty(weight.shape[0], dtype=weight.dtype, device=weight.device) if bias else None
        yield _Layer(weight, bias=like)
        if activation is not None:
            yield _Layer(weight, None, like, None, activation, arguments)


def _fused(layer: _Layer, tokens: int, backward: bool, out_dtype: torch.dtype | None, precision: str | None) -> None:
    """Compile a layer with its activation: call it on empty tensors, forward and backward."""
    dtype = autocast_dtype(layer.weight) or layer.weight.dtype
    weight, weight_up, bias, bias_up, down, bias_down = (
        None if each is None else each.detach().to(dtype).detach().requires_grad_(backward)
        for each in (layer.weight, layer.weight_up, layer.bias, layer.bias_up, layer.down, layer.bias_down)
    )
    assert weight is not None
    x = torch.empty((tokens, weight.shape[1]), dtype=dtype, device=weight.device)
    operands = Operands(bias, bias_up, activation=layer.activation, arguments=layer.arguments)
    b_up = None if weight_up is None else weight_up.mT
    problem = fused.problem_of(x[:1], weight.mT, b_up, operands, precision=precision)
    modes = [(False, False, (0.0, 0.0))]
    if backward:  # with frozen biases the gradient kernel writes no sums
        trained = (True,) if bias is None and bias_up is None else (True, False)
        modes += product((True,), trained, dict.fromkeys(((0.0, 0.0), layer.dropouts)))
    for edge, (differentiated, biased, dropouts) in product(selection.token_edges(problem, tokens), modes):
        rows = x[:edge].detach().requires_grad_(differentiated)
        of_gate, of_up = (each if each is None or biased else each.detach() for each in (bias, bias_up))
        first = Operands(
            of_gate, of_up, activation=layer.activation, arguments=layer.arguments, **_dropout(dropouts[0], x.device)
        )
        call = Call(rows, weight, weight_up, first, precision=precision)
        with torch.set_grad_enabled(differentiated):
            if down is None:
                result = fused_autograd.run(call._replace(out_dtype=out_dtype))
            else:
                second = Operands(bias_down, **_dropout(dropouts[1], x.device))
                after = Call(rows, down, None, second, out_dtype=out_dtype, precision=precision)
                result = mlp_autograd.run(call, after)
        if differentiated:
            leaves = (rows, weight, weight_up, of_gate, of_up, down, bias_down)
            inputs = [each for each in leaves if each is not None and each.requires_grad]
            torch.autograd.grad(result, inputs, torch.empty_like(result))
    if backward and bias is not None:  # a bias gradient added to a main_grad
        sums = torch.zeros((1, weight.shape[0]), dtype=torch.float32, device=x.device)
        together = 1 if down is None else configs.BIAS_BLOCKS
        fused.chunk_sums(sums, together, torch.zeros_like(sums[0]), torch.float32)


def _dropout(p: float, device: torch.device) -> dict[str, Any]:
    return {"dropout_p": p, "seed": fused.new_seed(device) if p else None}


def _plain(layer: _Layer, tokens: int, backward: bool, out_dtype: torch.dtype | None, precision: str | None) -> None:
    """Compile a layer without an activation."""
    weight, biased = layer.weight, layer.bias is not None
    forward = _forward(weight, biased, out_dtype, precision)
    for problem in (*_every(forward, tokens), *(_gradients(forward, tokens) if backward else ())):
        plan.plan_for(problem, weight.device)
    if backward and biased:
        for bias_gradient in _bias_gradients(forward, tokens):
            plan.bias_grad_plan(bias_gradient, weight.device)


def _forward(weight: Tensor, bias: bool, out_dtype: torch.dtype | None, precision: str | None) -> Problem:
    """The problem of one token."""
    x = torch.empty((1, weight.shape[1]), dtype=weight.dtype, device=weight.device)
    op.validate_linear(x, weight, None, out_dtype, precision)
    problem = op.problem_of(x, weight.mT, out_dtype=out_dtype, precision=precision)
    cast = autocast_dtype(weight)
    if cast is not None:  # the copies that autocast makes are contiguous
        dtype = str(cast).removeprefix("torch.")
        wide = out_dtype is torch.float32
        problem = replace(problem, dtype=dtype, out_dtype="float32" if wide else dtype, b_strides=(1, problem.k))
    epilogue = Epilogue(bias="n" if bias else "")
    return replace(problem, epilogue=epilogue, chunk=configs.accumulation_chunk(problem))


def _every(problem: Problem, tokens: int) -> Iterator[Problem]:
    """The problem at every number of tokens from which on another kernel may be chosen."""
    for edge in selection.token_edges(problem, tokens):
        yield replace(problem, m=edge)


def _gradients(forward: Problem, tokens: int) -> Iterator[Problem]:
    """dX, and dW with and without a main_grad."""
    n, k, dtype = forward.n, forward.k, forward.dtype
    bk, bn = forward.b_strides
    dx = replace(
        forward, n=k, k=n, out_dtype=dtype, a_strides=(n, 1), b_strides=(bn, bk), c_strides=(k, 1), epilogue=Epilogue()
    )  # fmt: skip
    yield from _every(replace(dx, chunk=configs.accumulation_chunk(dx)), tokens)
    dw = replace(
        forward, m=n, n=k, k=1, out_dtype=dtype, a_strides=(1, n), b_strides=(k, 1), c_strides=(k, 1), b_aligned=True,
        epilogue=Epilogue(), chunk=configs.token_chunk(n, k, dtype),
    )  # fmt: skip
    for edge in selection.token_edges(dw, tokens):
        yield replace(dw, k=edge)
        yield replace(dw, k=edge, out_dtype="float32", accumulate=True)


def _bias_gradients(forward: Problem, tokens: int) -> Iterator[BiasGradProblem]:
    """Bias gradients up to `tokens`: chunks in turn, chunks in parallel, and offsets beyond int32."""
    for edge, accumulate in product({*(1 << power for power in range(tokens.bit_length())), tokens}, (False, True)):
        yield BiasGradProblem(
            t=edge, n=forward.n, dtype=forward.dtype, out_dtype="float32" if accumulate else forward.dtype,
            strides=(forward.n, 1), chunk=configs.BIAS_CHUNK, accumulate=accumulate, arch=forward.arch,
        )  # fmt: skip
