"""Automatic fusion on the GPU: launches, gradients, bits, autocast, changes, streams, graphs and torch.compile."""

import copy
import gc
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import isogemm
from isogemm.fusion.deferred import Deferred
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data

DEVICE = "cuda"
M, K, N = 64, 256, 192
NUMBERS = {"bf16": (torch.bfloat16, "ieee"), "ieee": (torch.float32, "ieee"), "tf32": (torch.float32, "tf32")}


def _normal(*shape, seed=0, dtype=torch.bfloat16):
    return make_data("normal", shape, seed=seed, dtype=dtype, device=DEVICE)


def _operands(m=M, dtype=torch.bfloat16):
    shapes = {"x": (m, K), "w": (K, N), "w3": (K, N), "weight": (N, K), "b": (N,), "r": (m, N)}
    made = {name: _normal(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}
    return {name: each / K**0.5 if name.startswith("w") else each for name, each in made.items()}


def _module(x, weight, b, **_):
    layer = nn.Sequential(nn.Linear(K, N, device="meta"), nn.GELU())
    return functional_call(layer, {"0.weight": weight, "0.bias": b}, x)


def _relu(x, w, b, **_):
    return torch.relu(x @ w + b)


SPELLINGS = {  # name: (function, steps)
    "operators": (_relu, "bias relu"),
    "methods": (lambda x, w, b, **_: x.matmul(w).add(b).relu(), "bias relu"),
    "in place": (lambda x, w, b, **_: F.relu(x.mm(w).add_(b), inplace=True), "bias relu"),
    "addmm": (lambda x, w, b, **_: torch.addmm(b, x, w).relu(), "bias relu"),
    "linear": (lambda x, weight, b, **_: F.gelu(F.linear(x, weight, b)), "bias gelu"),
    "module": (_module, "bias gelu"),
    "gate": (lambda x, w, w3, **_: F.silu(x @ w) * (x @ w3), "swiglu"),
    "residual": (lambda x, w, r, **_: x @ w + r, "residual"),
}
DISTINCT = ("operators", "linear", "gate", "residual")


def _fused(function, operands):
    with isogemm.autofuse():
        return function(**operands)


def _steps(report):
    return [entry.steps for entry in report.fused.elements()]


def _gradients(function, leaves):
    """The result and the leaves' gradients, None of those it does not depend on."""
    result = function()
    above = torch.arange(result.numel(), device=DEVICE).cos().view(result.shape).bfloat16().to(result.dtype)
    return [result, *torch.autograd.grad(result, list(leaves), above, allow_unused=True)]


def _module_gradients(module, x):
    parameters = list(module.parameters())
    leaf = x.detach().to(parameters[0].dtype).requires_grad_()
    return _gradients(lambda: module(leaf), [leaf, *parameters])


def _assert_no_worse(actual, expected, exact, ulps=1):
    for got, same, reference in zip(actual, expected, exact, strict=True):
        assert (got is None) == (same is None)
        if got is not None:
            assert_no_worse_than_torch(got.detach(), same.detach(), reference.detach(), ulps=ulps)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_one_launch_and_no_other_work(spelling, on_device):
    """And no memory but the result's."""
    function, _ = SPELLINGS[spelling]
    for m in (1, M):
        operands = _operands(m)
        _fused(function, operands)
        names = on_device(lambda operands=operands: _fused(function, operands))
        assert len(names) == 1, f"{m} rows: {names}"
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        result = _fused(function, operands)
        assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == result.nbytes
        del result


# Values, gradients, bits

CASES = [*((spelling, "bf16") for spelling in SPELLINGS), *itertools.product(("linear", "gate"), ("ieee", "tf32"))]


@pytest.mark.parametrize(("spelling", "number"), CASES)
def test_values_and_gradients_no_worse_than_torch(spelling, number):
    dtype, torch.backends.cuda.matmul.fp32_precision = NUMBERS[number]  # put back after the test
    function, steps = SPELLINGS[spelling]
    operands = {name: each.requires_grad_() for name, each in _operands(dtype=dtype).items()}
    wide = {name: each.detach().double().requires_grad_() for name, each in operands.items()}
    with isogemm.dispatch_log() as log, isogemm.autofuse() as report:
        result = function(**operands)
        assert type(result) is Deferred
    assert type(result) is torch.Tensor
    assert _steps(report) == [tuple(steps.split())]
    assert [entry.path for entry in log] == ["gemm"]
    actual = _gradients(lambda: result, operands.values())
    expected = _gradients(lambda: function(**operands), operands.values())
    _assert_no_worse(actual, expected, _gradients(lambda: function(**wide), wide.values()))


@pytest.mark.parametrize("spelling", DISTINCT)
def test_a_row_does_not_depend_on_its_batch(spelling):
    function, _ = SPELLINGS[spelling]
    operands = _operands()
    whole = _fused(function, operands)
    for m in (1, 7):
        rows = operands | {name: operands[name][:m] for name in ("x", "r")}
        assert_bitwise_equal(_fused(function, rows), whole[:m], f"{m} rows")


class _Mixer(nn.Module):
    def __init__(self, tokens, channels):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2))
        self.across, self.within = (
            nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
            for size in (tokens, channels)
        )

    def forward(self, x):
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norms[1](x))


def _llama():
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaMLP

    return LlamaMLP(transformers.LlamaConfig(hidden_size=K, intermediate_size=512))


def _gpt2():
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    return GPT2MLP(512, transformers.GPT2Config(n_embd=K, resid_pdrop=0.0))


MODULES = {  # name: (module, steps that are among those fused)
    "encoder": (
        lambda: nn.TransformerEncoderLayer(K, 4, 512, 0.0, "gelu", batch_first=True),
        [("bias", "gelu"), ("bias", "residual")],
    ),
    "mixer": (lambda: _Mixer(M, K), [("bias", "gelu"), ("bias", "residual")]),
    "llama": (_llama, [("swiglu",)]),
    "gpt2": (_gpt2, []),
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_no_worse_than_torch(name, training):
    make, steps = MODULES[name]
    torch.manual_seed(0)
    module = make().train(training).to(DEVICE, torch.bfloat16)
    exact = copy.deepcopy(module).double()
    x = _normal(2, M, K)
    with isogemm.autofuse() as report:
        actual = _module_gradients(module, x)
    reference = _module_gradients(exact, x)
    _assert_no_worse(actual, _module_gradients(module, x), reference, ulps=4)  # of several layers
    assert set(steps) <= set(_steps(report))
    if not training:
        with torch.no_grad():  # where torch has a fast path for the encoder
            _assert_no_worse([isogemm.autofuse()(module)(x)], [module(x)], reference[:1], ulps=4)


def test_precision_is_that_of_the_call():
    """TF32 when it was called: the bits of TF32 when it is computed."""
    operands = _operands(dtype=torch.float32)
    ieee = _fused(_relu, operands)
    with isogemm.autofuse():
        torch.backends.cuda.matmul.fp32_precision = "tf32"  # put back after the test
        result = _relu(**operands)
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert_bitwise_equal(result, _fused(_relu, operands))
    assert not torch.equal(result, ieee)


def test_autocast():
    """The operands of the product are cast, and autocast is the call's, wherever the result is computed."""
    leaves = [_operands(dtype=torch.float32)[name].requires_grad_() for name in ("x", "weight", "b")]
    wide = [each.detach().double().requires_grad_() for each in leaves]

    def function(x, weight, b):
        with torch.autocast(DEVICE, torch.bfloat16):
            return F.relu(F.linear(x, weight, b))

    with isogemm.autofuse() as report:
        result = function(*leaves)
        assert (type(result), result.dtype) == (Deferred, torch.bfloat16)
    assert _steps(report) == [("bias", "relu")]
    assert_bitwise_equal(result, isogemm.linear(*(each.bfloat16() for each in leaves), activation="relu"))
    expected = _gradients(lambda: function(*leaves), leaves)
    _assert_no_worse(_gradients(lambda: result, leaves), expected, _gradients(lambda: function(*wide), wide))


@pytest.mark.parametrize("square", [torch.square, lambda z: z**2, lambda z: z.pow(2)], ids=["square", "**", "pow"])
def test_squares_under_autocast_are_torchs(square):
    x, w = (_operands(dtype=torch.float32)[name] for name in ("x", "w"))
    with torch.autocast(DEVICE, torch.bfloat16):
        with isogemm.autofuse() as report:
            result = square(torch.relu(x @ w))
        assert result.dtype == square(torch.relu(x @ w)).dtype
        assert_bitwise_equal(result, square(isogemm.matmul_fused(x, w, activation="relu")))
    assert _steps(report) == [("relu",)]


# Who looks, and what changes in the meantime

LOOKS = {
    "item": lambda y: y[0, 0].item(),
    "printing": str,
    "cpu": lambda y: y.cpu(),
    "to the host": lambda y: torch.empty(y.shape).copy_(y),
    "dlpack": torch.from_dlpack,
    "pointer": lambda y: y.data_ptr(),
    "record_stream": lambda y: y.record_stream(torch.cuda.current_stream()),
}


@pytest.mark.parametrize("look", LOOKS)
def test_looking_makes_it_plain(look):
    operands = _operands()
    with isogemm.autofuse() as report:
        result = _relu(**operands)
        assert (type(result), result.is_cuda, result.shape) == (Deferred, True, (M, N))
        LOOKS[look](result)
        assert type(result) is torch.Tensor
    assert _steps(report) == [("bias", "relu")]
    assert_bitwise_equal(result, _fused(_relu, operands))


CHANGES = {
    "in place": lambda t: t.add_(1),
    "out": lambda t: torch.neg(t, out=t),
    "foreach": lambda t: torch._foreach_mul_([t], 2.0),
    "from the host": lambda t: t.copy_(torch.ones(t.shape, dtype=t.dtype).pin_memory(), non_blocking=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_comes_after(change):
    for name in ("x", "w", "b"):
        operands = _operands()
        expected = _fused(_relu, operands)
        with isogemm.autofuse():
            result = _relu(**operands)
            CHANGES[change](operands[name])
        assert_bitwise_equal(result, expected, name)


def test_an_unseen_change_raises():
    operands = _operands()
    with isogemm.autofuse():
        result = _relu(**operands)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(operands["w"].add_, 1).result()
        with pytest.raises(RuntimeError, match="was changed in place"):
            result.cpu()


def test_training_loop_inside_the_block():
    x = _normal(M, K, dtype=torch.float32)

    def train(block):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(K, N), nn.ReLU(inplace=True), nn.Linear(N, 8)).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
        losses = []
        with block:
            for _ in range(5):
                losses.append((model(x) - 1).square().mean())
                optimizer.zero_grad()
                losses[-1].backward()
                optimizer.step()
        return torch.stack(losses).detach()

    block = isogemm.autofuse()
    losses, expected = train(block), train(nullcontext())
    assert _steps(block.report) == [("bias", "relu")] * 5
    assert bool((expected[1:] < 0.98 * expected[:-1]).all()), "a step that was missed would show"
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)  # float32, five steps on


def test_an_exception_leaves_usable_tensors():
    operands, kept = _operands(), []

    def fail():
        with isogemm.autofuse():
            kept.append(_relu(**operands))
            kept[0] @ kept[0]

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fail()
    assert type(kept[0]) is torch.Tensor
    assert_bitwise_equal(kept[0], _fused(_relu, operands))


# Memory, streams, graphs, threads


@pytest.mark.alone
def test_nothing_is_leaked():
    operands = {name: each.requires_grad_() for name, each in _operands().items()}
    leaves = [operands[name] for name in ("x", "w", "w3", "b")]

    def block(x, w, w3, b, **_):
        with isogemm.autofuse():
            y = torch.relu(x @ w + b)
            unread = F.gelu(x @ w3)
            result = y + F.silu(x @ w) * (x @ w3)
            torch.autograd.grad(result.sum(), leaves)
            del unread

    gc.collect()
    gc.disable()
    try:
        for count in (1, 100):  # the first time workspaces are made
            torch.cuda.synchronize()
            time.sleep(0.2)  # for autograd's thread, as below
            before = torch.cuda.memory_allocated()
            for _ in range(count):
                block(**operands)
        deadline = time.monotonic() + 5  # autograd's thread lets go of the last gradients a moment after its caller
        while torch.cuda.memory_allocated() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert torch.cuda.memory_allocated() <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["clone", "step", "after the block"])
def test_read_on_another_stream(how):
    """It is computed on the stream of the call, and the reader's waits for it."""
    operands = _operands()
    expected = _fused(_relu, operands)
    late = torch.full_like(operands["x"], torch.nan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with isogemm.autofuse() as report:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # tens of ms: a launch on another stream would read the NaN
            late.copy_(operands["x"])
            result = _relu(**operands | {"x": late})
        assert type(result) is Deferred
        if how != "after the block":
            result = result.clone() if how == "clone" else result + operands["r"]
    assert_bitwise_equal(result.clone(), expected + operands["r"] if how == "step" else expected)
    assert _steps(report) == [("bias", "relu")]


@pytest.mark.parametrize("spelling", DISTINCT)
def test_graph_capture(spelling):
    """The block inside of the capture: each replay of a training step reads what the operands are then."""
    function, steps = SPELLINGS[spelling]
    operands = {name: each.requires_grad_() for name, each in _operands().items()}
    block = isogemm.autofuse()
    step = block(lambda: _gradients(lambda: function(**operands), operands.values()))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    assert _steps(block.report) == [tuple(steps.split())] * 2
    for seed in (10, 20):
        with torch.no_grad():
            for index, (name, each) in enumerate(operands.items()):
                each.copy_(_normal(*each.shape, seed=seed + index) / (16 if name.startswith("w") else 1))
        graph.replay()
        for got, same in zip(captured, step(), strict=True):
            assert (got is None) == (same is None)
            if got is not None:
                assert_bitwise_equal(got.detach(), same.detach())


def test_a_capture_that_begins_inside_the_block():
    """There nothing is deferred, and what was before is not read: it raises, and is there after the capture."""
    operands = _operands()
    expected, plain = _fused(_relu, operands), _relu(**operands)
    graph = torch.cuda.CUDAGraph()
    with isogemm.autofuse() as report:
        before = _relu(**operands)
        with torch.cuda.graph(graph):
            inside = _relu(**operands)
            with pytest.raises(RuntimeError, match="was deferred on one side of a CUDA graph"):
                before.sum()
        assert (type(before), type(inside)) == (Deferred, torch.Tensor)
    assert_bitwise_equal(before, expected)
    (left,) = report.left
    assert "a CUDA graph's capture began inside the block" in left.reason
    graph.replay()
    torch.testing.assert_close(inside, plain)


def test_threads_with_streams_of_their_own():
    w, b = (_operands()[name] for name in ("w", "b"))
    inputs = [[_normal(m, K, seed=m) for m in range(first, 41, 2)] for first in (1, 2)]
    expected = [[_fused(_relu, {"x": x, "w": w, "b": b}) for x in own] for own in inputs]
    torch.cuda.synchronize()
    barrier = threading.Barrier(2, timeout=60)

    def work(own):
        stream = torch.cuda.Stream()
        barrier.wait()
        with torch.cuda.stream(stream), isogemm.autofuse() as report:
            results = [_relu(x, w, b) for x in own]
        stream.synchronize()
        return results, report

    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(work, inputs[1])
        both = work(inputs[0]), second.result()
    for (results, report), same in zip(both, expected, strict=True):
        assert _steps(report) == [("bias", "relu")] * 20
        for got, right in zip(results, same, strict=True):
            assert_bitwise_equal(got, right)


# torch.compile


class _Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(K, 320, bias=False), nn.Linear(K, 320, bias=False)
        self.down = nn.Linear(320, K, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


MLPS = {  # name: (module, steps before the second product)
    "gelu": (lambda: nn.Sequential(nn.Linear(K, 320), nn.GELU(), nn.Linear(320, K)), ("bias", "gelu")),
    "swiglu": (_Gated, ("swiglu",)),
}


@pytest.fixture
def fresh_dynamo():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


def _mlp(name, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return MLPS[name][0]().to(DEVICE, dtype)


@pytest.mark.parametrize("name", MLPS)
def test_compiled_training_on_any_number_of_rows(name, fresh_dynamo):
    """One graph, one for rows that are one sum of a bias's gradient, one for a single row: values, gradients, bits."""
    module, steps = _mlp(name), MLPS[name][1]
    exact, x, results = copy.deepcopy(module).double(), _normal(300, K), {}
    with isogemm.fusion.compile_fusion() as report, isogemm.dispatch_log() as log:
        compiled = torch.compile(module, fullgraph=True, dynamic=True)
        for m in (300, M, 7, 1):
            results[m] = _module_gradients(compiled, x[:m])
            _assert_no_worse(results[m], _module_gradients(module, x[:m]), _module_gradients(exact, x[:m]))
            assert_bitwise_equal(results[m][0], results[300][0][:m], f"{m} rows")
    assert {entry.path for entry in log} == {"gemm"}
    assert fresh_dynamo["stats"]["unique_graphs"] <= 3
    assert {entry.steps[: len(steps)] for entry in report.fused} == {steps}
    assert not report.left


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", MLPS)
def test_compiled_launches_and_off_again(name, on_device):
    """One kernel for each layer, and torch's own once it is off."""
    module, x, names = _mlp(name), _normal(M, K), []
    for enabled in (True, False):
        torch._dynamo.reset()
        with isogemm.fusion.compile_fusion(enabled) as report, isogemm.dispatch_log() as log, torch.no_grad():
            compiled = torch.compile(module, fullgraph=True)
            compiled(x)
            names.append(on_device(lambda compiled=compiled: compiled(x)))
        assert report.fused.total() == enabled
        assert bool(log) == enabled
    assert len(names[0]) == 2, names[0]
    assert set(names[0]).isdisjoint(names[1])


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_under_autocast():
    module, x = _mlp("gelu", torch.float32), _normal(M, K, dtype=torch.float32)
    exact = copy.deepcopy(module).double()
    with isogemm.fusion.compile_fusion() as report, torch.autocast(DEVICE, torch.bfloat16):
        actual = _module_gradients(torch.compile(module, fullgraph=True), x)
        _assert_no_worse(actual, _module_gradients(module, x), _module_gradients(exact, x))
    assert actual[0].dtype == torch.bfloat16
    assert report.fused.total() == 1
