"""How a call is served: gate, fallback, streams, graphs, torch.compile, profiler."""

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from profiling import device_work

import isogemm
from isogemm.core import env, plan
from isogemm.core.launch import Launch
from isogemm.tiny import configs, op
from isogemm.tiny.configs import DotConfig
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_operands

SOURCE = Path(__file__).parents[2] / "src"


def _operands(batch=64, m=12, k=20, n=16, seed=0, dtype=torch.float32, device="cuda"):
    return make_operands("normal", (batch, m, k), (batch, k, n), seed=seed, dtype=dtype, device=device)


def _served(a, b, **options):
    with isogemm.dispatch_log() as log:
        result = isogemm.bmm(a, b, **options)
    (entry,) = log
    return result, entry


def test_disabling_gives_torch(forced, monkeypatch, exact):
    a, b = _operands()
    ours, entry = _served(a, b)
    assert (entry.path, entry.reason) == ("tiny", "")
    assert entry.config.startswith(forced)
    monkeypatch.setattr(env, "settings", replace(env.settings, disable_tiny=True))
    theirs, entry = _served(a, b)
    assert (entry.path, entry.reason) == ("torch", "ISOGEMM_DISABLE_TINY is set")
    assert_bitwise_equal(theirs, torch.bmm(a, b))
    _, scale = exact(a, b)
    assert bool(((ours - theirs).abs() <= 2 * 20 * 2**-23 * scale).all())  # 20 roundings each
    monkeypatch.setattr(env, "settings", replace(env.settings, disable_tiny=False))
    assert_bitwise_equal(_served(a, b)[0], ours)


@pytest.mark.parametrize("axis", ["m", "k", "n"])
def test_size_boundary(axis, through):
    through("registers")
    assert _served(*_operands(**{axis: 64}))[1].path == "tiny"
    a, b = _operands(**{axis: 65})
    with isogemm.dispatch_log() as log:
        result = isogemm.bmm(a, b)
    assert [entry.path for entry in log] == ["torch"]
    assert_bitwise_equal(result, torch.bmm(a, b))


def test_batch_boundary_and_other_dtypes(forced):
    assert _served(*_operands(batch=2))[1].path == "tiny"
    for options in ({"batch": 1}, {"dtype": torch.float64}):
        a, b = _operands(**options)
        result, entry = _served(a, b)
        assert entry.path == "torch"
        assert_bitwise_equal(result, torch.bmm(a, b))


def test_precision_of_the_torch_path():
    """precision holds where torch serves, whatever its own setting, which is left as it was."""
    a, b = _operands(m=65, k=128, n=96)
    ieee = torch.bmm(a, b)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    tf32 = torch.bmm(a, b)
    assert_bitwise_equal(isogemm.bmm(a, b), tf32)
    assert_bitwise_equal(isogemm.bmm(a, b, precision="ieee"), ieee)
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert_bitwise_equal(isogemm.bmm(a, b, precision="tf32"), tf32)
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


def test_precision_follows_torch_without_a_word(through):
    through("dot")
    a, b = _operands()
    explicit = isogemm.bmm(a, b, precision="tf32")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert_bitwise_equal(isogemm.bmm(a, b), explicit)
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert_bitwise_equal(isogemm.bmm(a, b), isogemm.bmm(a, b, precision="ieee"))


def _failing_compile(*args, **kwargs):
    raise RuntimeError("injected: does not compile")


def _failing_launch(*args, **kwargs):
    def launch(*args):
        raise RuntimeError("injected: does not launch")

    return SimpleNamespace(launch=launch, constants=())


@pytest.fixture
def nothing_compiled(monkeypatch):
    monkeypatch.setattr(plan, "_kernels", plan.Cache())


@pytest.mark.parametrize("failing", [_failing_compile, _failing_launch])
def test_failure_falls_back_with_one_warning(failing, forced, nothing_compiled, monkeypatch):
    monkeypatch.setattr(Launch, "bind", failing)
    a, b = _operands()
    with pytest.warns(RuntimeWarning, match=r"served by torch\.bmm: RuntimeError: injected") as caught:
        result = isogemm.bmm(a, b)
    assert len([warning for warning in caught if "injected" in str(warning.message)]) == 1
    assert_bitwise_equal(result, torch.bmm(a, b))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*served by torch")
        again, entry = _served(a, b)
        isogemm.bmm(*_operands(m=7))  # the same failure of another problem is no news
    assert (entry.path, "injected" in entry.reason) == ("torch", True)
    assert_bitwise_equal(again, torch.bmm(a, b))


def test_failure_in_the_backward_falls_back(forced, nothing_compiled, monkeypatch):
    a, b = (x.requires_grad_() for x in _operands())
    shared = b.detach()[:1].clone().requires_grad_()
    monkeypatch.setattr(Launch, "bind", _failing_launch)
    for right in (b, shared):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            actual = torch.autograd.grad(isogemm.bmm(a, right).square().sum(), (a, right))
        exact_a, exact_b = (x.detach().double().requires_grad_() for x in (a, right))
        expected = torch.autograd.grad(torch.matmul(exact_a, exact_b).square().sum(), (exact_a, exact_b))
        for got, exact in zip(actual, expected, strict=True):  # sums of under 1000 terms of f32
            assert float((got - exact).abs().max()) <= 1000 * 2**-24 * float(exact.abs().max())


def test_kernel_that_triton_rejects_falls_back(through, monkeypatch):
    through("dot")
    monkeypatch.setattr(configs, "choose", lambda problem, kernel: DotConfig(4096, 4096, 16, 4, 1))
    a, b = _operands()
    with pytest.warns(RuntimeWarning, match=r"served by torch\.bmm"):
        result = isogemm.bmm(a, b)
    assert_bitwise_equal(result, torch.bmm(a, b))


def test_runs_on_the_current_stream(forced):
    a, b = _operands()
    expected = isogemm.bmm(a, b)
    late = torch.full_like(a, torch.nan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of ms: a launch on another stream would read the NaN
        late.copy_(a)
        result = isogemm.bmm(late, b)
    stream.synchronize()
    assert_bitwise_equal(result, expected)


def test_two_streams(forced):
    pairs = [_operands(seed=seed) for seed in (1, 2)]
    expected = [isogemm.bmm(a, b) for a, b in pairs]
    streams = [torch.cuda.Stream() for _ in pairs]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    results = [[], []]
    for _ in range(50):
        for stream, (a, b), mine in zip(streams, pairs, results, strict=True):
            with torch.cuda.stream(stream):
                mine.append(isogemm.bmm(a, b))
    torch.cuda.synchronize()
    for mine, same in zip(results, expected, strict=True):
        for result in mine:
            assert_bitwise_equal(result, same)


def _rotations():
    """Orthogonal matrices: a long product of them neither grows nor vanishes."""
    generator = torch.Generator("cuda").manual_seed(3)
    return torch.linalg.qr(torch.randn(64, 16, 16, device="cuda", generator=generator)).Q.contiguous()


def _chain(x, rotations, steps=64, pause=lambda: None):
    for step in range(steps):
        x = isogemm.bmm(x, rotations)
        if step % 8 == 7:
            x = x * 1.0  # a kernel of torch's between
        pause()
    return x


def test_each_launch_waits_for_the_one_before(forced):
    """Launches may overlap their neighbours' ends, never read what is not yet written."""
    x = rotations = _rotations()
    expected = _chain(x, rotations, pause=torch.cuda.synchronize)
    for _ in range(5):
        assert_bitwise_equal(_chain(x, rotations), expected)


def test_graph_capture(forced):
    x, rotations = _rotations(), _rotations()
    _chain(x, rotations, steps=2)  # compiles
    graph = torch.cuda.CUDAGraph()
    with isogemm.dispatch_log() as log, torch.cuda.graph(graph):
        result = _chain(x, rotations, steps=9)
    assert {entry.path for entry in log} == {"tiny"}
    for seed in range(3):
        x.copy_(torch.randn(x.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)))
        result.fill_(torch.nan)
        graph.replay()
        assert_bitwise_equal(result, _chain(x, rotations, steps=9))


COLD_CAPTURE = """
import warnings
import torch, isogemm
from isogemm.tiny import configs

warnings.simplefilter("ignore")
for n, kernel in enumerate(configs.KERNELS, start=13):
    configs.gate = lambda problem: kernel
    a, b = torch.randn(64, 9, 11, device="cuda"), torch.randn(64, 11, n, device="cuda")
    exact = torch.bmm(a.double(), b.double())
    torch.bmm(a, b)  # cuBLAS itself is warm
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = isogemm.bmm(a, b)
    captured.fill_(torch.nan)
    graph.replay()
    with isogemm.dispatch_log() as log:
        result = isogemm.bmm(a, b)
    assert ((captured.double() - exact).abs() <= 1e-4).all(), f"{kernel}: the captured call is wrong"
    assert ((result.double() - exact).abs() <= 1e-4).all(), f"{kernel}: the call after it is wrong"
    assert log[0].path == "tiny", log
"""


def test_first_call_inside_a_capture():
    """Right there, whoever serves it, and the kernel's from then on. In a process where nothing is compiled yet."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", COLD_CAPTURE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def _loss(a, b):
    return isogemm.bmm(a * 2, b).tanh().sum()


@pytest.mark.parametrize(("backend", "shared"), [("aot_eager", False), ("aot_eager", True), ("inductor", False)])
def test_compiled(backend, shared, through):
    through("registers")
    torch._dynamo.reset()
    a, b = _operands()
    a, b = a.requires_grad_(), (b[:1] if shared else b).clone().requires_grad_()
    compiled = torch.compile(_loss, fullgraph=True, backend=backend)
    with isogemm.dispatch_log() as log:
        loss = compiled(a, b)
        actual = torch.autograd.grad(loss, (a, b))
    assert [entry.path for entry in log] == ["tiny"] * 3
    expected = torch.autograd.grad(_loss(a, b), (a, b))
    # Inductor has a tanh and an order of sums of its own; the sums have 12288 terms below 1 at most.
    torch.testing.assert_close(loss, _loss(a, b), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)


def test_compiled_for_any_batch(forced):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(isogemm.bmm, fullgraph=True, dynamic=True, backend=counter)
    for batch in (4, 7, 300):
        a, b = _operands(batch=batch)
        assert_bitwise_equal(compiled(a, b), isogemm.bmm(a, b))
    assert counter.frame_count == 1


@pytest.mark.parametrize("shared", [False, True])
def test_opcheck(shared, through):
    through("dot")
    a, b = _operands()
    b = b[:1].clone() if shared else b
    operator = torch.ops.isogemm.bmm.default
    torch.library.opcheck(operator, (a, b), {"precision": None})
    torch.library.opcheck(operator, (a.requires_grad_(), b.requires_grad_(), "ieee"), rtol=1e-4, atol=1e-4)


def _kernels_of(call):
    return [name for name in device_work(call) if not name.startswith(("Memcpy", "Memset"))]


@pytest.mark.usefixtures("on_device")
def test_one_launch_per_call(forced):
    a, b = _operands()
    views = [(a, b), (a[:1], b), (a, b[:1]), (a.mT.contiguous().mT, b[:, :, ::2])]
    for left, right in views:
        isogemm.bmm(left, right)
        names = _kernels_of(lambda left=left, right=right: isogemm.bmm(left, right))
        assert len(names) == 1, names
    a, b = a.requires_grad_(), b.requires_grad_()
    result, grad = isogemm.bmm(a, b), torch.ones(64, 12, 16, device="cuda")

    def backward():
        torch.autograd.grad(result, (a, b), grad, retain_graph=True)

    backward()
    names = _kernels_of(backward)
    assert len(names) == 2, names


def test_no_workspace(forced):
    a, b = _operands(batch=4096)
    isogemm.bmm(a, b)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = isogemm.bmm(a, b)
    assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == result.nbytes


def test_autocast(forced):
    a, b = (x.requires_grad_() for x in _operands())
    expected = isogemm.bmm(a.to(torch.bfloat16), b.to(torch.bfloat16))
    with torch.autocast("cuda", torch.bfloat16):
        result = isogemm.bmm(a, b)
    assert_bitwise_equal(result, expected)
    result.float().square().sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.float32
    assert bool(a.grad.isfinite().all())


def test_negated_views(forced):
    """A view whose negation torch has only noted down: the kernel must not read it as it lies in memory."""
    a, b = _operands()
    assert_bitwise_equal(isogemm.bmm(torch._neg_view(a), b), isogemm.bmm(-a, b))
    assert_bitwise_equal(isogemm.bmm(a, torch._neg_view(b)), isogemm.bmm(a, -b))


def test_tangents_of_forward_mode_are_not_lost(forced):
    a, b = _operands()
    tangent = torch.randn_like(a)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, tangent)
        result = isogemm.bmm(dual, b)
        actual = torch.autograd.forward_ad.unpack_dual(result).tangent
    torch.testing.assert_close(actual, torch.bmm(tangent, b))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current(forced):
    a, b = _operands(device="cuda:1")
    expected = isogemm.bmm(*_operands(device="cuda:0"))
    with torch.cuda.device(0):
        result = isogemm.bmm(a, b)
    assert result.device == a.device
    assert_bitwise_equal(result, expected)


def test_devices_must_agree():
    a, b = _operands()
    with pytest.raises(ValueError, match=r"a and b must have the same device; a has cuda:0, b has cpu"):
        isogemm.bmm(a, b.cpu())


def test_plans_are_found_again(forced):
    """The same call twice makes one plan; what Triton specialises on makes another."""
    a, b = _operands()
    isogemm.bmm(a, b)
    isogemm.bmm(a, b)
    assert len(op.served) == 1
    base = torch.zeros(a.numel() + 1, device="cuda")
    isogemm.bmm(base[1:].view(a.shape).copy_(a), b)  # another alignment
    assert len(op.served) == 2
