"""warmup compiles for every number of tokens: nothing is bound later. Without a GPU: binding is only counted."""

from contextlib import nullcontext
from dataclasses import astuple, replace

import pytest
import torch

pytest.importorskip("triton")

import isogemm
from isogemm.core import device as devices
from isogemm.core import plan as runtime
from isogemm.core import tuned
from isogemm.core.launch import Launch
from isogemm.epilogues.operands import Epilogue
from isogemm.gemm import configs, describe, plan
from isogemm.gemm import warmup as ahead
from isogemm.gemm.api import linear, mlp
from isogemm.gemm.configs import Config, Problem

DEVICE = torch.device("cuda", 0)
TOKENS = 300
W, BIAS = torch.ones(5, 4), torch.ones(5)


@pytest.fixture
def bound(monkeypatch):
    """The launches that were bound, in order."""
    launches = []

    class Bound:
        constants = ()

        def taken(self, arguments):
            return arguments

        def described_by(self, seen):
            return 1

        def describer(self, *seen):
            return lambda address: (address,)

        def launch(self, *args):
            """Nothing is launched."""

    monkeypatch.setattr(runtime, "_kernels", runtime.Cache())
    monkeypatch.setattr(Launch, "bind", lambda launch, *dummies: launches.append(launch) or Bound())
    monkeypatch.setattr(runtime, "_dummy", lambda *seen: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    return launches


def _forward(n, k, dtype, precision, out_dtype):
    problem = Problem(1, n, k, dtype, out_dtype, precision, (k, 1), (1, k), (n, 1), epilogue=Epilogue(bias="n"))
    return replace(problem, chunk=configs.accumulation_chunk(problem))


@pytest.mark.parametrize(
    "number", [("bfloat16", "ieee", "bfloat16"), ("float16", "ieee", "float32"), ("float32", "tf32", "float32")]
)
@pytest.mark.parametrize(("n", "k"), [(192, 256), (1000, 999), (4096, 2048), (64, 20000)])
def test_no_number_of_tokens_is_left_out(bound, n, k, number):
    forward = _forward(n, k, *number)
    warmed = [*ahead._every(forward, TOKENS), *ahead._gradients(forward, TOKENS)]
    for problem in warmed:
        plan.plan_for(problem, DEVICE)
    bias_gradients = list(ahead._bias_gradients(forward, 2**21))
    for problem in bias_gradients:
        plan.bias_grad_plan(problem, DEVICE)
    count = len(bound)
    assert 0 < count < 150
    dx = next(problem for problem in warmed if problem.n == k and problem.layout != "tn" and problem.k == n)
    weight_gradients = [problem for problem in warmed if problem.layout == "tn"][:2]
    for tokens in range(1, TOKENS + 1):
        for problem in (replace(forward, m=tokens), replace(dx, m=tokens)):
            plan.plan_for(problem, DEVICE)
        for problem in weight_gradients:
            plan.plan_for(replace(problem, k=tokens), DEVICE)
    for tokens in (1, 7, 64, 65, 1024, 2048, 2049, 5000, 100_000, 2**20, 2**21 - 1):
        for problem in bias_gradients[:2]:
            plan.bias_grad_plan(replace(problem, t=tokens), DEVICE)
    assert [str(launch.scalars) for launch in bound[count:]] == []


@pytest.mark.parametrize("frozen", [(), ("bias",), ("bias", "bias_up"), ("weight", "bias")])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("operation", [linear, mlp])
def test_an_activated_layer_binds_nothing_later(bound, operation, activation, frozen, monkeypatch):
    """Whatever of it is trained."""
    runtime.plans.clear()
    monkeypatch.setattr(devices, "index_of", lambda device: 0)
    monkeypatch.setattr(describe, "_tma", lambda: True)
    monkeypatch.setattr(devices, "facts", lambda device: devices.DeviceFacts("", "sm_90", 132, 232448, 0))
    monkeypatch.setattr(devices, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    shapes = {"weight": (96, 64), "bias": (96,)}
    shapes |= {"weight_up": (96, 64), "bias_up": (96,)} if activation == "swiglu" else {}
    shapes |= {"weight_down": (64, 96), "bias_down": (64,)} if operation is mlp else {}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    order = ("weight", "weight_up", "bias", "bias_up", "weight_down", "bias_down")
    first, down = [tensors.get(name) for name in order[:4]], [tensors.get(name) for name in order[4:]]
    ahead._fused(ahead._Layer(*first, activation, (), *down), TOKENS, True, None, None)
    count = len(bound)
    assert count > 0
    trained = {name: each.requires_grad_(name not in frozen) for name, each in tensors.items()}
    for tokens in (1, 5, 64, 100, TOKENS):
        x = torch.zeros(tokens, 64, dtype=torch.bfloat16, requires_grad=True)
        result = operation(x, **trained, activation=activation)
        result.backward(torch.zeros(result.shape, dtype=result.dtype))
    assert [launch.kernel.__name__ for launch in bound[count:]] == []


@pytest.mark.parametrize("kind", ["nt", "nt activated", "nn", "nn gradient", "tn"])
def test_tuned_steps_of_one_product_are_edges_of_its_layer(bound, kind, monkeypatch):
    """Also a step between two powers of two, of the gradient or of the second weight alone."""
    runtime.plans.clear()
    facts = devices.DeviceFacts("here", "sm_90", 132, 232448, 0)
    configs_of = (37, Config(64, 64, 64, 4, 3)), (97, Config(64, 64, 64, 4, 2)), (100, Config(64, 64, 64, 4, 4))
    steps = tuple((tokens, astuple(config)) for tokens, config in configs_of)
    table = {("half", kind, *sizes): steps for sizes in ((96, 64), (64, 96))}
    monkeypatch.setattr(tuned, "load", lambda family, gpu: table if gpu == "here" else {})
    monkeypatch.setattr(devices, "index_of", lambda device: 0)
    monkeypatch.setattr(devices, "facts", lambda device: facts)
    monkeypatch.setattr(devices, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
    layer = isogemm.nn.MLP(64, 96, activation="gelu").to(torch.bfloat16)
    isogemm.warmup(layer, tokens=128, backward=True)
    count = len(bound)
    for tokens in range(1, 129):
        for trained in (False, True):
            x = torch.zeros(tokens, 64, dtype=torch.bfloat16, requires_grad=trained)
            with torch.set_grad_enabled(trained):
                result = layer(x)
            if trained:
                result.backward(torch.zeros_like(result))
    assert [str(launch.scalars) for launch in bound[count:]] == []


def test_weights_that_come_one_by_one():
    """A generator's are all seen, as plain layers and as activated ones."""
    weights = [torch.zeros(8, 16), torch.zeros(16, 8)]
    layers = ahead._layers((each for each in weights), True, "relu", None)
    seen = [(layer.weight, layer.activation, layer.bias.shape) for layer in layers]
    assert seen == [(each, name, each.shape[:1]) for each in weights for name in ("", "relu")]


def test_warmup_has_nothing_to_do_on_the_cpu():
    for weights in (W, [W, W.half()], torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU())):
        assert isogemm.warmup(weights, backward=True) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([BIAS],), r"^weights.*\[5\]"),
        ((["W"],), "^weights.*str"),
        ((None,), r"^weights is a NoneType; expected \[N, K\] tensors or a module"),
        ((W, 0), "^tokens.*0"),
    ],
    ids=["rank", "no tensor", "nothing", "tokens"],
)
def test_wrong_warmup(arguments, says):
    weights, *tokens = arguments
    with pytest.raises((TypeError, ValueError), match=says):
        isogemm.warmup(weights, **({"tokens": tokens[0]} if tokens else {}))
