"""How a GEMM call is served: the log, streams, graphs, warmup, torch.compile, autocast, threads, devices, memory."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.core.plan import plans
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

DEVICE = "cuda"
SOURCE = Path(__file__).parents[2] / "src"


def _normal(*shape, seed=0, dtype=torch.bfloat16, device=DEVICE):
    return make_data("normal", shape, seed=seed, dtype=dtype, device=device)


def _layer(m=64, k=256, n=192, dtype=torch.bfloat16, device=DEVICE):
    shapes = (m, k), (n, k), (n,)
    return [_normal(*shape, seed=seed, dtype=dtype, device=device) for seed, shape in enumerate(shapes)]


@contextmanager
def _loaded_kernels():
    """The names of the Triton kernels that are compiled or loaded meanwhile."""
    from triton import knobs

    names = []

    def note(module, function, name, metadata_group, hash):
        names.append(name)

    knobs.runtime.kernel_load_start_hook.add(note)
    try:
        yield names
    finally:
        knobs.runtime.kernel_load_start_hook.remove(note)


def test_dispatch_log():
    x, weight, bias = (tensor.requires_grad_() for tensor in _layer())
    with isogemm.dispatch_log() as log:
        isogemm.linear(x, weight, bias).float().sum().backward()
    assert sorted(entry.op for entry in log) == ["bias_grad", "matmul", "matmul", "weight_grad"]
    assert {entry.path for entry in log} == {"gemm"}
    assert log[0].config
    assert "bfloat16" in log[0].problem
    assert all(str(size) in log[0].problem for size in (64, 192, 256))
    assert log[0].source in ("table", "model")
    assert str(log[0]) == f"isogemm.matmul {log[0].problem}: gemm {log[0].config} ({log[0].source})"


def test_float64_is_torch():
    x, weight, bias = _layer(dtype=torch.float64)
    with isogemm.dispatch_log() as log:
        result = isogemm.linear(x, weight, bias)
    assert [entry.path for entry in log] == ["torch"]
    torch.testing.assert_close(result, F.linear(x, weight, bias))


def test_devices_must_agree():
    x, weight, bias = _layer()
    with pytest.raises(ValueError, match=r"^x and weight must .*cuda:0.*cpu"):
        isogemm.linear(x, weight.cpu(), bias)
    with pytest.raises(ValueError, match=r"bias .*cpu"):
        isogemm.linear(x, weight, bias.cpu())


def test_runs_on_the_current_stream():
    x, weight, bias = _layer()
    expected = isogemm.linear(x, weight, bias)
    late = torch.full_like(x, torch.nan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of ms: a launch on another stream would read the NaN
        late.copy_(x)
        result = isogemm.linear(late, weight, bias)
    stream.synchronize()
    assert_bitwise_equal(result, expected)


def _chain(x, rotation, steps=32, pause=lambda: None):
    for step in range(steps):
        x = isogemm.mm(x, rotation)
        if step % 8 == 7:
            x = x * 1.0  # a kernel of torch's between
        pause()
    return x


@pytest.mark.parametrize("m", [1, 256])
def test_each_launch_waits_for_the_one_before(m):
    """Launches may overlap their neighbours' ends, never read what is not yet written."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(1024, 1024, device=DEVICE, generator=generator)).Q.bfloat16().contiguous()
    x = _normal(m, 1024)
    expected = _chain(x, rotation, pause=torch.cuda.synchronize)
    for _ in range(5):
        assert_bitwise_equal(_chain(x, rotation), expected)


@pytest.mark.parametrize("m", [1, 300])
def test_graph_capture(m):
    x, weight, bias = _layer(m)
    isogemm.linear(x, weight, bias)  # compiles
    graph = torch.cuda.CUDAGraph()
    with isogemm.dispatch_log() as log, torch.cuda.graph(graph):
        result = isogemm.linear(x, weight, bias)
    assert [entry.path for entry in log] == ["gemm"]
    for seed in range(3):
        x.copy_(_normal(*x.shape, seed=10 + seed))
        weight.copy_(_normal(*weight.shape, seed=20 + seed))
        result.fill_(torch.nan)
        graph.replay()
        assert_bitwise_equal(result, isogemm.linear(x, weight, bias))


def test_graph_capture_of_a_training_step():
    """Forward, dX, and dW and db into main_grad, again and again."""
    x, weight, bias = (tensor.requires_grad_() for tensor in _layer(2100))
    weight.main_grad, bias.main_grad = (torch.zeros_like(p, dtype=torch.float32) for p in (weight, bias))
    grad = _normal(2100, 192, seed=9)

    def step():
        x.grad = None
        isogemm.linear(x, weight, bias).backward(grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    once = weight.main_grad.clone(), bias.main_grad.clone(), x.grad.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for main_grad in (weight.main_grad, bias.main_grad):
        main_grad.zero_()
    graph.replay()
    for got, same in zip((weight.main_grad, bias.main_grad, x.grad), once, strict=True):
        assert_bitwise_equal(got, same)
    graph.replay()
    torch.testing.assert_close(weight.main_grad, 2 * once[0])


COLD_CAPTURE = """
import torch, isogemm

x = torch.randn(9, 48, device="cuda", dtype=torch.bfloat16)
weight = torch.randn(80, 48, device="cuda", dtype=torch.bfloat16)
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        isogemm.linear(x, weight)
except RuntimeError as error:
    assert "warmup" in str(error), error
else:
    raise AssertionError("compiled inside a capture")
result = isogemm.linear(x, weight)
exact = x.double() @ weight.double().T
assert (result.double() - exact).abs().max() <= 0.01 * exact.abs().max()
"""

WARM_CAPTURE = """
import torch, isogemm
from triton import knobs

weight, bias = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((192, 256), (192,)))
weight, bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
assert isogemm.warmup(weight, tokens=300, backward=True, bias=True) > 0
assert isogemm.warmup(weight, tokens=300, backward=True, bias=True) == 0
loaded = []
knobs.runtime.kernel_load_start_hook.add(lambda module, function, name, metadata_group, hash: loaded.append(name))
for m in (1, 2, 6, 7, 17, 64, 65, 131, 300):
    x = torch.randn(m, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = isogemm.linear(x, weight, bias)
    captured.fill_(torch.nan)
    graph.replay()
    exact = x.double() @ weight.double().T + bias.double()
    assert (captured.double() - exact).abs().max() <= 0.01 * exact.abs().max()
    grad = torch.randn_like(captured)
    isogemm.linear(x.requires_grad_(), weight, bias).backward(grad)
    weight.main_grad, bias.main_grad = torch.zeros(192, 256, device="cuda"), torch.zeros(192, device="cuda")
    isogemm.linear(x, weight, bias).backward(grad)
    del weight.main_grad, bias.main_grad
assert not loaded, loaded
"""


@pytest.mark.parametrize("program", [COLD_CAPTURE, WARM_CAPTURE], ids=["cold", "warm"])
def test_capture_in_a_new_process(program):
    """Nothing is compiled in a capture: an error that says what to do, or, after warmup, a graph at once."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_nothing_is_loaded_twice():
    x, weight, bias = _layer(m=77, k=224, n=144)
    isogemm.linear(x, weight, bias)
    with _loaded_kernels() as names:
        isogemm.linear(x.clone(), weight.clone(), bias.clone())
    assert names == []


def test_first_calls_from_several_threads():
    """All compile or wait, none fails, and the bits are one thread's."""
    x, weight, bias = _layer(m=96, k=160, n=112)
    sizes = [1, 1, 17, 17, 64, 64, 96, 96]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda m: isogemm.linear(x[:m], weight, bias), sizes))
    torch.cuda.synchronize()
    whole = isogemm.linear(x, weight, bias)
    for m, result in zip(sizes, results, strict=True):
        assert_bitwise_equal(result, whole[:m], f"{m} rows")


def _loss(x, weight, bias):
    return isogemm.linear(torch.relu(x), weight, bias).float().square().sum()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    torch._dynamo.reset()
    inputs = [tensor.requires_grad_() for tensor in _layer()]
    compiled = torch.compile(_loss, fullgraph=True, backend=backend)
    with isogemm.dispatch_log() as log:
        loss = compiled(*inputs)
        actual = torch.autograd.grad(loss, inputs)
    assert sorted(entry.op for entry in log) == ["bias_grad", "matmul", "matmul", "weight_grad"]
    assert {entry.path for entry in log} == {"gemm"}
    expected = _loss(*inputs)
    torch.testing.assert_close(loss, expected)  # inductor has an order of sums of its own
    for got, same in zip(actual, torch.autograd.grad(expected, inputs), strict=True):
        assert_bitwise_equal(got, same)


def test_a_graph_chooses_its_configuration_at_run_time():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(isogemm.linear, fullgraph=True, backend=counter)
    weight = _normal(1024, 1024, seed=1)
    chosen = {}
    for m in (8, 2000, 300):
        x = _normal(m, 1024)
        torch._dynamo.mark_dynamic(x, 0)
        with isogemm.dispatch_log() as log:
            result = compiled(x, weight)
        chosen[m] = log[-1].config
        with isogemm.dispatch_log() as log:
            assert_bitwise_equal(result, isogemm.linear(x, weight))
        assert chosen[m] == log[-1].config
    assert counter.frame_count == 1
    assert chosen[8] != chosen[2000]


def test_compiled_with_graphs():
    """mode="reduce-overhead": CUDA graphs around our kernels."""
    torch._dynamo.reset()
    _, weight, bias = _layer()
    compiled = torch.compile(isogemm.linear, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(5):
            x = _normal(64, 256, seed=seed)
            torch.compiler.cudagraph_mark_step_begin()
            assert_bitwise_equal(compiled(x, weight, bias).clone(), isogemm.linear(x, weight, bias))


def test_main_grad_in_a_graph():
    torch._dynamo.reset()
    compiled = torch.compile(isogemm.linear, fullgraph=True, backend="aot_eager")
    parameters = []
    for function in (compiled, isogemm.linear):
        x, weight, bias = _layer()
        weight, bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
        weight.main_grad, bias.main_grad = (torch.ones_like(p, dtype=torch.float32) for p in (weight, bias))
        for _ in range(2):
            function(x, weight, bias).sum().backward()
        parameters.append((weight, bias))
    for got, same in zip(*parameters, strict=True):
        assert got.grad is None
        assert got.grad_added_to_main_grad is True
        assert_bitwise_equal(got.main_grad, same.main_grad)


def test_opcheck():
    x, weight, bias = (tensor.requires_grad_() for tensor in _layer(dtype=torch.float32))
    grad = _normal(64, 192, dtype=torch.float32)
    operators = torch.ops.isogemm
    close = {"rtol": 1e-4, "atol": 1e-3}  # of sums of 256 terms, in two orders
    torch.library.opcheck(operators.linear.default, (x, weight, bias, *(None,) * 4, None, "ieee"), **close)
    torch.library.opcheck(operators.matmul.default, (x, weight.T.detach().requires_grad_(), None, "ieee"), **close)
    torch.library.opcheck(operators.weight_grad.default, (grad, x.detach(), "ieee"), **close)
    torch.library.opcheck(operators.bias_grad.default, (grad,), **close)
    main_grad = torch.zeros_like(weight)
    torch.library.opcheck(operators.add_weight_grad.default, (main_grad, weight.detach(), grad, x.detach()), **close)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    inputs = [tensor.requires_grad_() for tensor in _layer(dtype=torch.float32)]
    with torch.autocast(DEVICE, dtype):
        result = isogemm.linear(*inputs)
        theirs = F.linear(*inputs)
    assert result.dtype == theirs.dtype == dtype
    assert_bitwise_equal(result, isogemm.linear(*(tensor.detach().to(dtype) for tensor in inputs)))
    result.float().square().mean().backward()
    assert [tensor.grad.dtype for tensor in inputs] == [torch.float32] * 3
    assert all(bool(tensor.grad.isfinite().all()) for tensor in inputs)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant):
    inputs = [tensor.requires_grad_() for tensor in _layer()]
    expected = torch.autograd.grad(isogemm.linear(*inputs).float().square().sum(), inputs)
    result = checkpoint(isogemm.linear, *inputs, use_reentrant=use_reentrant)
    result.float().square().sum().backward()
    for tensor, same in zip(inputs, expected, strict=True):
        assert_bitwise_equal(tensor.grad, same)


def test_deterministic_algorithms():
    inputs = [tensor.requires_grad_() for tensor in _layer(2100)]
    expected = torch.autograd.grad(isogemm.linear(*inputs).float().square().sum(), inputs)
    torch.use_deterministic_algorithms(True)
    try:
        actual = torch.autograd.grad(isogemm.linear(*inputs).float().square().sum(), inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    for got, same in zip(actual, expected, strict=True):
        assert_bitwise_equal(got, same)


def test_negated_views():
    """A view whose negation torch has only noted down: the kernel must not read it as it lies in memory."""
    x, weight, bias = _layer()
    expected = isogemm.linear(-x, weight, bias)
    assert_bitwise_equal(isogemm.linear(torch._neg_view(x), weight, bias), expected)
    assert_bitwise_equal(isogemm.linear(x, torch._neg_view(weight), bias), expected)
    assert_bitwise_equal(isogemm.linear(x, weight, torch._neg_view(bias)), isogemm.linear(x, weight, -bias))


def test_no_hidden_copies():
    """Every layout is read where it lies: a call takes its output's memory and no more."""
    x, weight, _ = _layer(1024, 1024, 1024)
    halves = _normal(1024, 2048)
    for a, b in ((x, weight.T), (x, weight), (x.T, weight), (halves[:, ::2], weight), (x, halves[:, 1:1025].T)):
        isogemm.mm(a, b)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        result = isogemm.mm(a, b)
        assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == result.nbytes
        del result


def test_plans_are_found_again():
    x, weight, bias = _layer(m=50)
    isogemm.linear(x, weight, bias)
    before = len(plans)
    isogemm.linear(x.clone(), weight.clone(), bias.clone())
    assert len(plans) == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current():
    expected = isogemm.linear(*_layer(device="cuda:0"))
    inputs = _layer(device="cuda:1")
    with torch.cuda.device(0):
        result = isogemm.linear(*inputs)
    assert result.device == inputs[0].device
    assert_bitwise_equal(result, expected)


def test_forward_mode_is_refused():
    x, weight, _ = _layer()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.randn_like(x))
        with pytest.raises(RuntimeError, match="has no rule for forward-mode AD"):
            isogemm.linear(dual, weight)
