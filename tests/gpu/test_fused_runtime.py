"""How a fused call is served on a GPU: launches, memory, the log, streams, threads, seeds."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
from profiling import device_work
from torch.nn import functional as F

import isogemm
from isogemm.epilogues import ACTIVATIONS, register, spec
from isogemm.gemm.api import mlp
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

DEVICE = "cuda"


PLAIN = [name for name, entry in ACTIVATIONS.items() if not entry.gate]
GATED = [name for name, entry in ACTIVATIONS.items() if entry.gate]


def _normal(*shape, seed=0, dtype=torch.bfloat16, device=DEVICE):
    return make_data("normal", shape, seed=seed, dtype=dtype, device=device)


def _layer(m=64, k=256, n=192, dtype=torch.bfloat16, device=DEVICE):
    shapes = {"x": (m, k), "weight": (n, k), "bias": (n,), "residual": (m, n)}
    return {name: _normal(*shape, seed=i, dtype=dtype, device=device) for i, (name, shape) in enumerate(shapes.items())}


def _mlp(m=64, k=256, h=320, gated=False, dtype=torch.bfloat16):
    shapes = {"x": (m, k), "weight": (h, k), "weight_down": (k, h), "bias": (h,), "bias_down": (k,)}
    shapes |= {"weight_up": (h, k), "bias_up": (h,)} if gated else {}
    made = {name: _normal(*shape, seed=i, dtype=dtype) for i, (name, shape) in enumerate(shapes.items())}
    return {name: each / each.shape[-1] ** 0.5 if "weight" in name else each for name, each in made.items()}


@triton.jit
def _shifted(acc, col, row, first):
    return acc + first


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(spec, "REGISTERED", {})
    register("shifted", _shifted, lambda acc, col, row, first: acc + first)


# Launches


def _number(value):
    return torch.tensor(value, dtype=torch.float32, device=DEVICE)


def _inference_calls(m):
    layer = _layer(m)
    x, weight, bias, residual = layer.values()
    up, column, scale = _normal(192, 256, seed=5), _normal(m, seed=6), _normal(192, seed=7)
    calls = {f"bias, {name}": lambda name=name: isogemm.linear(x, weight, bias, activation=name) for name in PLAIN}
    for name in GATED:
        keywords = {"weight_up": up, "bias_up": bias, "activation": name}
        calls[name] = lambda keywords=keywords: isogemm.linear(x, weight, bias, **keywords)
        calls[f"{name}, residual"] = lambda keywords=keywords: isogemm.linear(x, weight, residual=residual, **keywords)
    calls["bias, gelu, residual"] = lambda: isogemm.linear(**layer, activation="gelu")
    calls["residual"] = lambda: isogemm.linear(x, weight, residual=residual)
    calls["alpha and beta"] = lambda: isogemm.linear(x, weight, alpha=0.5, beta=2.0, c=residual)
    alpha, beta = _number(0.5), _number(2.0)
    calls["alpha and beta, tensors"] = lambda: isogemm.linear(x, weight, alpha=alpha, beta=beta, c=residual)
    calls["scales"] = lambda: isogemm.linear(x, weight, row_scale=column, col_scale=scale, activation="silu")
    calls["column bias"] = lambda: isogemm.matmul_fused(x, weight.T, bias=column, bias_dim=-2, activation="relu")
    calls["eager"] = lambda: isogemm.linear(**layer, activation="silu", rounding="eager")
    calls["float32 out"] = lambda: isogemm.linear(**layer, activation="gelu", out_dtype=torch.float32)
    calls["epilogue"] = lambda: isogemm.linear(x, weight, bias, epilogue="shifted", aux=(scale,))
    calls["views"] = lambda: isogemm.linear(x[:, ::2], weight[:, ::2], bias, activation="gelu", residual=residual.mT.mT)
    calls["a batch"] = lambda: isogemm.linear(x[None], weight, bias, activation="gelu", residual=residual[None])
    return calls


@pytest.mark.usefixtures("on_device", "registry")
@pytest.mark.parametrize("m", [1, 64, 1000])
def test_one_launch_and_no_other_work(m):
    """In inference: one kernel, no copy, no fill, and no memory but the result's, which is so written once."""
    for name, call in _inference_calls(m).items():
        call()
        names = device_work(call)
        assert len(names) == 1, f"{name}: {names}"
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        result = call()
        assert torch.cuda.memory_stats()["requested_bytes.all.peak"] - before == result.nbytes, name
        del result


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("gated", [False, True])
def test_launches_with_dropout(gated):
    """One more, which draws the seed."""
    layer = _layer()
    more = {"weight_up": _normal(192, 256, seed=5), "activation": "swiglu"} if gated else {"activation": "gelu"}

    def call():
        return isogemm.linear(**layer, **more, dropout_p=0.1)

    call()
    names = device_work(call)
    assert len(names) == 2, names
    with_none = device_work(lambda: isogemm.linear(**layer, **more, dropout_p=0.0))
    assert len(with_none) == 1, with_none


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize(("gated", "launches"), [(False, 2), (True, 2)])
def test_launches_of_mlp(gated, launches):
    operands = _mlp(gated=gated)

    def call():
        return mlp(**operands, activation="swiglu" if gated else "gelu", residual=operands["x"])

    call()
    names = device_work(call)
    assert len(names) == launches, names


def _step(function, leaves, grad):
    """A forward and backward, given its gradient; the leaves' own are let go first."""

    def step():
        for leaf in leaves.values():
            leaf.grad = None
        function().backward(grad)

    return step


def _foreign(names):
    """What is not a kernel of ours."""
    return [name for name in names if "at::" in name or name.startswith(("Memcpy", "Memset"))]


def _training_launches(x, weight, bias):
    """For a layer without an epilogue."""
    leaves = {"x": x, "weight": weight, "bias": bias}
    step = _step(lambda: isogemm.linear(**leaves), leaves, _normal(len(x), len(weight), seed=9))
    step()
    return device_work(step)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("of_x", [False, True], ids=["without dx", "with dx"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "leaky_relu", "swiglu"])
def test_a_training_step_of_mlp_has_the_launches_of_its_layers(activation, of_x):
    """The activation, its derivative and the biases' gradients come with the products: nothing runs between them."""
    m, k, h = 512, 256, 512
    operands = _mlp(m, k, h, gated=activation in GATED)
    leaves = {name: each.requires_grad_(of_x or name != "x") for name, each in operands.items()}
    step = _step(lambda: mlp(**leaves, activation=activation), leaves, _normal(m, k, seed=9))
    step()
    names = device_work(step)
    layers = _training_launches(leaves["x"], leaves["weight"], leaves["bias"])
    if activation in GATED:
        layers += _training_launches(leaves["x"], leaves["weight_up"], leaves["bias_up"])
    hidden = _normal(m, h, seed=8).requires_grad_()
    layers += _training_launches(hidden, leaves["weight_down"], leaves["bias_down"])
    assert len(names) <= len(layers), f"{names}, plain layers: {layers}"
    assert not _foreign(names)
    assert sum("_bias_grad_kernel" in name for name in names) == 1, names  # the second layer's
    assert sum("_chunk_sums_kernel" in name for name in names) == (2 if activation in GATED else 1), names


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
def test_a_training_step_of_a_layer_has_at_most_one_launch_more(activation):
    leaves = {name: each.requires_grad_() for name, each in _layer(512).items() if name != "residual"}
    grad = _normal(512, 192, seed=9)
    fused = _step(lambda: isogemm.linear(**leaves, activation=activation), leaves, grad)
    plain = _step(lambda: isogemm.linear(**leaves), leaves, grad)
    for step in (fused, plain):
        step()
    names, without = device_work(fused), device_work(plain)
    assert len(names) <= len(without) + 1, f"{names}, without the activation: {without}"
    assert not _foreign(names)


# The log and errors


def test_dispatch_log():
    layer = _layer()
    with isogemm.dispatch_log() as log:
        isogemm.linear(**layer, activation="gelu")
    assert [entry.path for entry in log] == ["gemm"]
    assert log[0].config
    assert "bfloat16" in log[0].problem
    assert all(str(size) in log[0].problem for size in (64, 192, 256))
    double = _layer(dtype=torch.float64)
    with isogemm.dispatch_log() as log:
        result = isogemm.linear(**double, activation="gelu")
    assert [entry.path for entry in log] == ["torch"]
    expected = double["residual"] + F.gelu(F.linear(double["x"], double["weight"], double["bias"]))
    torch.testing.assert_close(result, expected)


def test_training_goes_through_the_kernels():
    leaves = {name: each.requires_grad_() for name, each in _mlp(gated=True).items()}
    with isogemm.dispatch_log() as log:
        mlp(**leaves, activation="swiglu", hidden_dropout_p=0.1, dropout_p=0.1).sum().backward()
    assert {entry.path for entry in log} == {"gemm"}


def test_devices_must_agree():
    layer = _layer()
    for name in ("weight", "bias", "residual"):
        with isogemm.dispatch_log() as log, pytest.raises(ValueError, match=rf"{name}.*(cuda:0.*cpu|cpu.*cuda:0)"):
            isogemm.linear(**layer | {name: layer[name].cpu()}, activation="gelu")
        assert not log
    keywords = {"weight_up": layer["weight"].cpu(), "activation": "swiglu"}
    with pytest.raises(ValueError, match=r"weight_up.*cpu"):
        isogemm.linear(layer["x"], layer["weight"], **keywords)
    for name in ("alpha", "beta"):
        with pytest.raises(ValueError, match=f"{name}.*cpu"):
            isogemm.linear(layer["x"], layer["weight"], c=layer["residual"], **{"beta": 1.0, name: torch.tensor(2.0)})


# Streams, graphs


def test_runs_on_the_current_stream():
    layer = _layer()
    expected = isogemm.linear(**layer, activation="gelu")
    late = {name: torch.full_like(layer[name], torch.nan) for name in ("x", "residual")}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of ms: a launch on another stream would read the NaN
        for name, tensor in late.items():
            tensor.copy_(layer[name])
        result = isogemm.linear(**layer | late, activation="gelu")
    stream.synchronize()
    assert_bitwise_equal(result, expected)


@pytest.mark.parametrize("m", [1, 256])
def test_each_launch_waits_for_the_one_before(m):
    """Launches may overlap their neighbours' ends, never read what is not yet written: residuals and gates too."""
    weight, up = _normal(512, 512) / 32, _normal(512, 512, seed=1) / 32

    def chain(pause=lambda: None):
        x = _normal(m, 512, seed=2)
        for step in range(24):
            if step % 3:
                x = isogemm.linear(x, weight, activation="gelu", residual=x)
            else:
                x = isogemm.linear(x, weight, weight_up=up, activation="swiglu", residual=x)
            x = x * 0.5 if step % 8 == 7 else x  # a kernel of torch's between
            pause()
        return x

    expected = chain(torch.cuda.synchronize)
    for _ in range(5):
        assert_bitwise_equal(chain(), expected)


def _positive(m=256, k=64, n=512):
    return torch.ones(m, k, dtype=torch.bfloat16, device=DEVICE), torch.ones(n, k, dtype=torch.bfloat16, device=DEVICE)


def test_a_run_is_reproduced_by_its_seed():
    x, weight = _positive()
    torch.manual_seed(21)
    first = [isogemm.linear(x, weight, dropout_p=0.5) for _ in range(3)]
    assert not torch.equal(first[0], first[1])
    torch.manual_seed(21)
    for same in first:
        assert_bitwise_equal(isogemm.linear(x, weight, dropout_p=0.5), same)
    with torch.random.fork_rng(devices=[0]):
        isogemm.linear(x, weight, dropout_p=0.5)
        state = torch.cuda.get_rng_state()
        one = isogemm.linear(x, weight, dropout_p=0.5)
        torch.cuda.set_rng_state(state)
        assert_bitwise_equal(isogemm.linear(x, weight, dropout_p=0.5), one)


def test_drawing_a_seed_does_not_wait():
    """No synchronisation: under torch's watch for it, nothing is said."""
    layer = _layer()
    isogemm.linear(**layer, activation="gelu", dropout_p=0.1)
    alpha = _number(2.0)
    isogemm.linear(layer["x"], layer["weight"], alpha=alpha)
    torch.cuda.set_sync_debug_mode("error")
    try:
        isogemm.linear(**layer, activation="gelu", dropout_p=0.1)
        isogemm.linear(layer["x"], layer["weight"], alpha=alpha)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_is_loaded_twice():
    """By other tensors, another seed, or another number for alpha, beta or p: those are no constants of the kernel."""
    from triton import knobs

    layer = _layer(m=77, k=224, n=144)
    c = _normal(77, 144, seed=8)

    def call(alpha, beta, p):
        copies = {name: each.clone() for name, each in layer.items()}
        return isogemm.linear(**copies, activation="gelu", alpha=alpha, beta=beta, c=c.clone(), dropout_p=p)

    call(0.5, 2.0, 0.1)
    names = []

    def note(module, function, name, metadata_group, hash):
        names.append(name)

    knobs.runtime.kernel_load_start_hook.add(note)
    try:
        for alpha, beta, p in ((0.5, 2.0, 0.1), (0.25, 3.0, 0.2), (7.0, -1.0, 0.9)):
            call(alpha, beta, p)
    finally:
        knobs.runtime.kernel_load_start_hook.remove(note)
    assert names == []


def test_first_calls_from_several_threads():
    """All compile or wait, none fails, and the bits are one thread's."""
    layer = _layer(m=96, k=160, n=112)
    sizes = [1, 1, 17, 17, 64, 64, 96, 96]

    def call(m):
        rows = {name: layer[name][:m] for name in ("x", "residual")}
        return isogemm.linear(**layer | rows, activation="quick_gelu")

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(call, sizes))
    torch.cuda.synchronize()
    whole = call(96)
    for m, result in zip(sizes, results, strict=True):
        assert_bitwise_equal(result, whole[:m], f"{m} rows")


def test_negated_views():
    """A view whose negation torch has only noted down: the kernel must not read it as it lies in memory."""
    layer = _layer()
    for name in layer:
        expected = isogemm.linear(**layer | {name: -layer[name]}, activation="gelu")
        result = isogemm.linear(**layer | {name: torch._neg_view(layer[name])}, activation="gelu")
        assert_bitwise_equal(result, expected, name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current():
    expected = isogemm.linear(**_layer(device="cuda:0"), activation="gelu")
    layer = _layer(device="cuda:1")
    with torch.cuda.device(0):
        result = isogemm.linear(**layer, activation="gelu")
        dropped = isogemm.linear(**layer, activation="gelu", dropout_p=0.5)
    assert result.device == dropped.device == layer["x"].device
    assert_bitwise_equal(result, expected)
