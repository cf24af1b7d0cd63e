"""Fused products on a GPU with what torch offers: CUDA graphs, torch.compile, autocast, checkpointing."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.gemm.api import mlp
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

DEVICE = "cuda"
SOURCE = Path(__file__).parents[2] / "src"


def _normal(*shape, seed=0, dtype=torch.bfloat16, device=DEVICE):
    return make_data("normal", shape, seed=seed, dtype=dtype, device=device)


def _mlp(m=64, k=256, h=320, gated=False, dtype=torch.bfloat16):
    shapes = {"x": (m, k), "weight": (h, k), "weight_down": (k, h), "bias": (h,), "bias_down": (k,)}
    shapes |= {"weight_up": (h, k), "bias_up": (h,)} if gated else {}
    made = {name: _normal(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}
    return {name: each / each.shape[-1] ** 0.5 if "weight" in name else each for name, each in made.items()}


@pytest.mark.parametrize("m", [1, 300])
@pytest.mark.parametrize("name", ["gelu", "swiglu", "mlp"])
def test_graph_capture(m, name):
    layer = _mlp(m, gated=name != "gelu")
    if name != "mlp":
        layer = {each: tensor for each, tensor in layer.items() if not each.endswith("down")}
    function, activation = mlp if name == "mlp" else isogemm.linear, "gelu" if name == "gelu" else "swiglu"
    function(**layer, activation=activation)  # compiles
    graph = torch.cuda.CUDAGraph()
    with isogemm.dispatch_log() as log, torch.cuda.graph(graph):
        result = function(**layer, activation=activation)
    assert {entry.path for entry in log} == {"gemm"}
    for seed in range(3):
        for each, tensor in layer.items():
            tensor.copy_(_normal(*tensor.shape, seed=10 + seed) / (16 if "weight" in each else 1))
        result.fill_(torch.nan)
        graph.replay()
        assert_bitwise_equal(result, function(**layer, activation=activation))


def _captured(step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@pytest.mark.parametrize("gated", [False, True])
def test_graph_capture_of_a_training_step(gated):
    """Forward, dX, and the weights' and biases' gradients into main_grad, again and again."""
    operands = _mlp(1100, gated=gated)
    x, grad = operands.pop("x").requires_grad_(), _normal(1100, 256, seed=9)
    parameters = {name: torch.nn.Parameter(each) for name, each in operands.items()}
    for parameter in parameters.values():
        parameter.main_grad = torch.zeros(parameter.shape, device=DEVICE)

    def step():
        x.grad = None
        mlp(x, **parameters, activation="swiglu" if gated else "gelu").backward(grad)

    step()
    once = [x.grad.clone(), *(parameter.main_grad.clone() for parameter in parameters.values())]
    graph = _captured(step)
    for parameter in parameters.values():
        parameter.main_grad.zero_()
    graph.replay()
    for got, same in zip([x.grad, *(each.main_grad for each in parameters.values())], once, strict=True):
        assert_bitwise_equal(got, same)
    graph.replay()
    torch.testing.assert_close(parameters["weight"].main_grad, 2 * once[1])


def _positive(m=256, k=64, n=512):
    return torch.ones(m, k, dtype=torch.bfloat16, device=DEVICE), torch.ones(n, k, dtype=torch.bfloat16, device=DEVICE)


def test_replays_of_a_captured_training_step_have_masks_of_their_own():
    """Another at each replay, the backward's the forward's; torch.manual_seed reproduces the run."""
    x, weight = _positive()
    c = torch.ones(256, 512, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    grad = torch.ones(256, 512, dtype=torch.bfloat16, device=DEVICE)
    kept = torch.empty(256, 512, dtype=torch.bfloat16, device=DEVICE)

    def step():
        result = isogemm.linear(x, weight, beta=1.0, c=c, activation="relu", dropout_p=0.5)
        kept.copy_(result.detach())
        (found,) = torch.autograd.grad(result, c, grad)
        return found

    found = None

    def noted():
        nonlocal found
        found = step()

    graph = _captured(noted)
    runs = []
    for _ in range(2):
        torch.manual_seed(13)
        masks = []
        for _ in range(3):
            graph.replay()
            assert torch.equal(found != 0, kept != 0), "forward and backward"
            masks.append((kept != 0).clone())
        runs.append(masks)
    first = runs[0]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    assert 0.49 < float((first[0] == first[1]).float().mean()) < 0.51
    for got, same in zip(runs[1], first, strict=True):
        assert torch.equal(got, same), "the same run again"
    torch.manual_seed(14)
    graph.replay()
    assert not torch.equal(kept != 0, first[0])


def test_replays_of_a_captured_mlp_have_masks_of_their_own():
    operands = {name: each.requires_grad_() for name, each in _mlp(256, gated=True).items()}
    grad = _normal(256, 256, seed=9)

    def step():
        for each in operands.values():
            each.grad = None
        mlp(**operands, activation="swiglu", hidden_dropout_p=0.3, dropout_p=0.3).backward(grad)

    graph = _captured(step)
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        gradients = []
        for _ in range(2):
            graph.replay()
            gradients.append(operands["weight"].grad.clone())
        assert not torch.equal(*gradients)
        runs.append(gradients)
    for got, same in zip(*runs, strict=True):
        assert_bitwise_equal(got, same)


COLD_CAPTURE = """
import torch, isogemm

x = torch.randn(9, 48, device="cuda", dtype=torch.bfloat16)
weight = torch.randn(80, 48, device="cuda", dtype=torch.bfloat16)
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        isogemm.linear(x, weight, activation="gelu")
except RuntimeError as error:
    assert "warm" in str(error), error
else:
    raise AssertionError("compiled inside a capture")
result = isogemm.linear(x, weight, activation="gelu")
exact = torch.nn.functional.gelu(x.double() @ weight.double().T)
assert (result.double() - exact).abs().max() <= 0.01 * exact.abs().max()
"""


def test_capture_in_a_new_process():
    """Nothing is compiled in a capture: an error that says what to do."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", COLD_CAPTURE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# torch.compile, autocast, determinism

COMPILED = {
    "relu": lambda x, w, b, u, d: isogemm.linear(x, w, b, activation="relu"),
    "gelu": lambda x, w, b, u, d: isogemm.linear(x, w, b, activation="gelu", residual=isogemm.linear(x, u)),
    "swiglu": lambda x, w, b, u, d: isogemm.linear(x, w, b, weight_up=u, activation="swiglu"),
    "mlp": lambda x, w, b, u, d: mlp(x, w, d, bias=b, weight_up=u, activation="swiglu", residual=x),
}


def _compiled_inputs(m=64):
    operands = _mlp(m, gated=True)
    return [operands[name].requires_grad_() for name in ("x", "weight", "bias", "weight_up", "weight_down")]


def _loss(function, inputs):
    result = function(*inputs)
    return result, torch.autograd.grad(result.float().square().sum(), inputs, allow_unused=True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name, backend):
    torch._dynamo.reset()
    function, inputs = COMPILED[name], _compiled_inputs()
    with isogemm.dispatch_log() as log:
        result, gradients = _loss(torch.compile(function, fullgraph=True, backend=backend), inputs)
    assert {entry.path for entry in log} == {"gemm"}
    expected, eager = _loss(function, inputs)
    assert_bitwise_equal(result, expected)
    for got, same in zip(gradients, eager, strict=True):
        assert (got is None) == (same is None)
        if same is not None:
            assert_bitwise_equal(got, same)


def test_a_graph_chooses_its_configuration_at_run_time():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def function(x, weight):
        return isogemm.linear(x, weight, activation="gelu")

    compiled = torch.compile(function, fullgraph=True, backend=counter)
    weight, chosen = _normal(1024, 1024, seed=1), set()
    for m in (8, 2000, 300):
        x = _normal(m, 1024)
        torch._dynamo.mark_dynamic(x, 0)
        with isogemm.dispatch_log() as log:
            result = compiled(x, weight)
        chosen.add(log[-1].config)
        assert_bitwise_equal(result, function(x, weight))
    assert counter.frame_count == 1
    assert len(chosen) > 1


def test_compiled_with_graphs():
    """mode="reduce-overhead": CUDA graphs around our kernels, masks changing."""
    torch._dynamo.reset()
    x, weight = _positive()

    def function(x):
        return isogemm.linear(x, weight, activation="relu", dropout_p=0.5)

    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    seen = []
    with torch.no_grad():
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            seen.append((compiled(x) != 0).clone())
    for before, after in itertools.pairwise(seen):
        assert not torch.equal(before, after)


def test_main_grad_in_a_graph():
    torch._dynamo.reset()

    def function(x, parameters):
        return mlp(x, **parameters, activation="swiglu")

    both = []
    for call in (torch.compile(function, fullgraph=True, backend="aot_eager"), function):
        operands = _mlp(gated=True)
        x = operands.pop("x")
        parameters = {name: torch.nn.Parameter(each) for name, each in operands.items()}
        for parameter in parameters.values():
            parameter.main_grad = torch.ones(parameter.shape, device=DEVICE)
        for _ in range(2):
            call(x, parameters).sum().backward()
        both.append(parameters)
    for name, got in both[0].items():
        assert got.grad is None
        assert_bitwise_equal(got.main_grad, both[1][name].main_grad, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", COMPILED)
def test_autocast(name, dtype):
    inputs = [each.detach().float().requires_grad_() for each in _compiled_inputs()]
    with torch.autocast(DEVICE, dtype):
        result = COMPILED[name](*inputs)
    assert result.dtype == dtype
    cast = [each.detach().to(dtype) for each in inputs]
    if name != "mlp":  # whose residual is x itself, added as it is
        assert_bitwise_equal(result, COMPILED[name](*cast))
    gradients = torch.autograd.grad(result.float().square().mean(), inputs, allow_unused=True)
    assert {each.dtype for each in gradients if each is not None} == {torch.float32}
    assert all(bool(each.isfinite().all()) for each in gradients if each is not None)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant):
    """Recomputed, the masks are those of the first time."""

    def gradients(function):
        inputs = [each.detach().clone().requires_grad_() for each in _compiled_inputs()]
        torch.manual_seed(6)
        function(*inputs).float().square().sum().backward()
        return [each.grad for each in inputs]

    def block(x, w, b, u, d):
        return mlp(x, w, d, bias=b, weight_up=u, activation="swiglu", hidden_dropout_p=0.3, dropout_p=0.3)

    saved = gradients(lambda *inputs: checkpoint(block, *inputs, use_reentrant=use_reentrant))
    for got, same in zip(saved, gradients(block), strict=True):
        assert_bitwise_equal(got, same)


@pytest.mark.parametrize("name", COMPILED)
def test_deterministic_algorithms(name):
    inputs = _compiled_inputs(2100)
    _, expected = _loss(COMPILED[name], inputs)
    torch.use_deterministic_algorithms(True)
    try:
        _, actual = _loss(COMPILED[name], inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    for got, same in zip(actual, expected, strict=True):
        if same is not None:
            assert_bitwise_equal(got, same)


def test_opcheck_of_the_kernels():
    """The registered operators on the device, by what a compiled call of each makes of them."""
    inputs = _compiled_inputs()
    fused = torch.ops.isogemm.fused.default
    x, weight, bias, up, down = inputs
    close = {"rtol": 1e-2, "atol": 1e-2}  # of 16-bit sums in two orders
    tail = ([], None, 1.0, 0.0, 0.0, "swiglu", [], "", -1, False, True, "pre", [None] * 4, [None] * 4, None, None)
    torch.library.opcheck(fused, (x, weight, up, bias, None, *(None,) * 6, *tail), **close)
    tail = ([], None, 1.0, 0.0, 0.0, "relu", [], "", -1, False, True, "mask", [None] * 4, [None] * 4, None, None)
    torch.library.opcheck(fused, (x, weight, None, bias, None, *(None,) * 6, *tail), **close)
    tail = ("gelu", [], 0.0, 0.0, True, [None] * 6, [None] * 6, None, None)
    torch.library.opcheck(
        torch.ops.isogemm.mlp.default, (x, weight, None, bias, None, down, None, None, None, None, *tail), **close
    )
