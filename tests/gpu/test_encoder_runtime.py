"""How an encoder layer is served: launches, memory, the log, streams, graphs, torch.compile, autocast, threads."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from encoder_oracle import assert_encoder_no_worse, isogemm_encoder
from gradients import gradients_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.encoder_reference import EncoderShape, encoder_parameters, encoder_tensors, torch_encoder
from isogemm.verify.inputs import make_data

DEVICE = "cuda"
NUMBERS = {"ieee": (torch.float32, "ieee"), "tf32": (torch.float32, "tf32"), "bf16": (torch.bfloat16, None)}
SMALL = EncoderShape(112, 42, 16, 4, 128)
SHORT = EncoderShape(1280, 5, 64, 4, 256)
WIDE = EncoderShape(896, 42, 128, 16, 256)
PRE = {"norm_first": True, "activation": "gelu"}


def _tensors(shape=SMALL, number="tf32", device=DEVICE, **options):
    """In the number's dtype; torch's setting, until the test is over, is its precision."""
    dtype, precision = NUMBERS[number]
    torch.backends.cuda.matmul.fp32_precision = precision or "ieee"
    return encoder_tensors(shape, dtype, device=device, **options)


def _normal(*shape, seed=0, dtype=torch.float32, device=DEVICE):
    return make_data("normal", shape, seed=seed, dtype=dtype, device=device)


def _leaves(tensors):
    return {name: each.detach().clone().requires_grad_() for name, each in tensors.items()}


def _call(tensors, nhead=4, **options):
    return isogemm_encoder(**tensors, nhead=nhead, **PRE, **options)


def _loss(tensors, **options):
    result = _call(tensors, **options)
    return result, torch.autograd.grad(result.float().square().sum(), list(tensors.values()))


def _assert_same(actual, expected):
    assert_bitwise_equal(actual[0], expected[0])
    for got, same in zip(actual[1], expected[1], strict=True):
        assert_bitwise_equal(got, same)


# Launches and memory

FUSED = [(SMALL, "tf32"), (SHORT, "tf32"), (WIDE, "tf32"), (EncoderShape(64, 64, 128, 16, 512), "tf32"), (WIDE, "bf16")]


def _own(parameters):
    """The same parameters, each a leaf of its own, and the list of them."""
    leaves = []

    def leaf(value):
        if isinstance(value, tuple):
            return tuple(map(leaf, value))
        leaves.append(nn.Parameter(value.detach().clone()))
        return leaves[-1]

    return isogemm.EncoderParameters(*map(leaf, parameters)), leaves


@pytest.mark.parametrize("form", ["stacked", "masked", "separate"])
@pytest.mark.parametrize(("shape", "number"), FUSED, ids=str)
def test_launches(shape, number, form, on_device):
    """At most 3 forward and 8 backward, copies and fills among them, in training and in inference."""
    tensors = _tensors(shape, number)
    x = tensors["x"].requires_grad_()
    parameters, leaves = _own(encoder_parameters(tensors, separate=form == "separate"))
    lengths = torch.arange(shape.sequences, device=DEVICE) % shape.tokens + 1
    mask = torch.arange(shape.tokens, device=DEVICE) >= lengths[:, None] if form == "masked" else None
    grad = _normal(*x.shape, seed=9, dtype=x.dtype)

    def forward():
        return isogemm.encoder_layer(x, parameters, nhead=shape.nhead, key_padding_mask=mask, **PRE)

    with torch.no_grad():
        forward()
        names = on_device(forward)
    assert len(names) <= 3, names
    result = forward()
    names = on_device(forward)
    assert len(names) <= 3, names

    def backward():
        return torch.autograd.grad(result, [x, *leaves], grad, retain_graph=True)

    backward()
    names = on_device(backward)
    assert len(names) <= 8, names


def _peak(step):
    """Bytes beyond what is there before."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    step()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


_MEASURED = pytest.mark.xfail(strict=True, reason="0.35 of torch's on an H200")


@pytest.mark.parametrize(
    ("shape", "number"), [(SHORT, "tf32"), (WIDE, "tf32"), pytest.param(WIDE, "bf16", marks=_MEASURED)], ids=str
)
def test_peak_memory_of_a_step_is_at_most_a_third_of_torchs(shape, number):
    layers = [_leaves(_tensors(shape, number, seed=seed)) for seed in range(3)]
    x = layers[0]["x"].detach()

    def step(function):
        y = x.requires_grad_()
        for tensors in layers:
            y = function(**{**tensors, "x": y}, nhead=shape.nhead, **PRE)
        y.float().square().mean().backward()
        x.grad = None
        for tensors in layers:
            for each in tensors.values():
                each.grad = None

    assert _peak(lambda: step(isogemm_encoder)) <= _peak(lambda: step(torch_encoder)) / 3


def test_no_attention_matrix_in_memory():
    """What one layer keeps and takes grows with the tokens, not with their square."""
    peaks = []
    for sequences, tokens in ((1024, 32), (256, 128)):
        leaves = _leaves(_tensors(EncoderShape(sequences, tokens, 16, 4, 128)))
        grad = _normal(sequences, tokens, 16, seed=9)
        peaks.append(_peak(lambda leaves=leaves, grad=grad: _call(leaves).backward(grad)))
    matrix = 256 * 4 * 128 * 128 * 4
    assert peaks[1] - peaks[0] < matrix // 4


def test_a_call_does_not_wait():
    leaves = _leaves(_tensors())
    mask = torch.zeros(SMALL[:2], dtype=torch.bool, device=DEVICE)
    grad = _normal(*leaves["x"].shape, seed=9)

    def step():
        torch.autograd.grad(_call(leaves, key_padding_mask=mask), list(leaves.values()), grad)

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# The log


@pytest.mark.parametrize(
    ("shape", "path"),
    [
        (SMALL, "fused"),
        (SHORT, "fused"),
        (WIDE, "fused"),
        (EncoderShape(64, 64, 128, 16, 512), "fused"),
        (EncoderShape(13, 2, 16, 4, 4), "fused"),
        (EncoderShape(3, 128, 16, 4, 32), "fused"),
        (EncoderShape(3, 20, 512, 8, 64), "composed"),
    ],
    ids=str,
)
def test_dispatch_log(shape, path):
    tensors = _tensors(shape)
    with isogemm.dispatch_log() as log:
        _call(tensors, shape.nhead)
    (entry,) = [entry for entry in log if entry.op == "encoder_layer"]
    assert entry.path == path
    assert entry.config or entry.reason
    assert all(str(size) in entry.problem for size in shape)


def test_more_tokens_than_the_fused_kernels_take():
    shape = EncoderShape(3, 200, 16, 4, 128)
    tensors = _tensors(shape, "ieee")
    with isogemm.dispatch_log() as log:
        result = _call(tensors)
    assert {entry.path for entry in log if entry.op == "encoder_layer"} <= {"fused", "composed"}
    assert float((result - torch_encoder(**tensors, nhead=4, **PRE)).abs().max()) <= 1e-4


def test_devices_must_agree():
    tensors = _tensors()
    for name in ("linear1_weight", "in_proj_bias", "norm2_weight"):
        with pytest.raises(ValueError, match=f"{name}.*cpu"):
            _call(tensors | {name: tensors[name].cpu()})
    with pytest.raises(ValueError, match=r"key_padding_mask.*cpu"):
        _call(tensors, key_padding_mask=torch.zeros(SMALL[:2], dtype=torch.bool))


# Streams and graphs


def test_runs_on_the_current_stream():
    tensors = _tensors()
    grad = _normal(*tensors["x"].shape, seed=9)
    expected = _call(tensors), *gradients_of(isogemm_encoder, tensors, grad, nhead=4, **PRE).values()
    late, late_grad = torch.full_like(tensors["x"], torch.nan), torch.full_like(grad, torch.nan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        leaves = _leaves(tensors | {"x": late})
        torch.cuda._sleep(50_000_000)  # tens of ms: a launch on another stream would read the NaN
        with torch.no_grad():
            leaves["x"].copy_(tensors["x"])
        result = _call(leaves)
        late_grad.copy_(grad)
        found = torch.autograd.grad(result, list(leaves.values()), late_grad)
    stream.synchronize()
    for got, same in zip((result, *found), expected, strict=True):
        assert_bitwise_equal(got, same)


class Stack(nn.Module):
    """Encoder layers and a head, trained as one captured step or eagerly."""

    def __init__(self, shape, number, layers=2):
        super().__init__()
        made = [_tensors(shape, number, seed=seed) for seed in range(layers)]
        self.names = [name for name in made[0] if name != "x"]
        self.parts = nn.ModuleList(
            nn.ParameterDict({name: nn.Parameter(tensors[name]) for name in self.names}) for tensors in made
        )
        self.head = nn.Parameter(_normal(shape.d_model, seed=77, dtype=made[0]["x"].dtype))
        self.nhead = shape.nhead

    def forward(self, x):
        for part in self.parts:
            x = isogemm_encoder(x, **{name: part[name] for name in self.names}, nhead=self.nhead, **PRE)
        return (x.float() * self.head.float()).sum(-1)


def _training(model, x, target):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True, foreach=True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize(("shape", "number"), [(SMALL, "tf32"), (SHORT, "tf32"), (WIDE, "bf16")], ids=str)
def test_graph_capture_of_a_training_step(shape, number):
    """Forward, backward and optimizer; replays on new batches have the bits of the eager steps."""
    shape = shape._replace(sequences=min(shape.sequences, 128))
    captured = Stack(shape, number)
    eager = copy.deepcopy(captured)
    batches = [_normal(*shape[:3], seed=seed, dtype=NUMBERS[number][0]) for seed in range(6)]
    x, target = batches[0].clone(), _normal(*shape[:2], seed=50)
    other = x.clone()
    step, same = _training(captured, x, target), _training(eager, other, target)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(2):
        same()
    for batch in batches:
        x.copy_(batch)
        other.copy_(batch)
        graph.replay()
        assert_bitwise_equal(loss, same().detach())
    for (name, got), expected in zip(captured.named_parameters(), eager.parameters(), strict=True):
        assert_bitwise_equal(got, expected, name)


def test_graph_capture_with_main_grad():
    tensors = _tensors(SMALL, "bf16")
    leaves = {name: nn.Parameter(each) for name, each in tensors.items() if name != "x"}
    for leaf in leaves.values():
        leaf.main_grad = torch.zeros(leaf.shape, device=DEVICE)
    grad = _normal(*tensors["x"].shape, seed=9, dtype=torch.bfloat16)

    def step():
        _call({**leaves, "x": tensors["x"]}).backward(grad)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    once = {name: leaf.main_grad.clone() for name, leaf in leaves.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for leaf in leaves.values():
        leaf.main_grad.zero_()
    graph.replay()
    for name, leaf in leaves.items():
        assert leaf.grad is None
        assert_bitwise_equal(leaf.main_grad, once[name], name)


# torch.compile, autocast, checkpointing, determinism


def test_compiled_of_a_transposed_input():
    """Its result and the gradient of x are contiguous, as the fakes say; Inductor asserts it."""
    tensors = _tensors(SMALL)
    transposed = tensors["x"].transpose(0, 1).contiguous().transpose(0, 1)

    def loss(function, x):
        leaf = x.detach().requires_grad_()
        result = function(tensors | {"x": leaf})
        return result, torch.autograd.grad(result.square().sum(), [leaf])

    actual, expected = loss(torch.compile(_call), transposed), loss(_call, tensors["x"])
    assert actual[0].is_contiguous()
    _assert_same(actual, expected)


def _layer(x, parameters, mask=None):
    return isogemm.encoder_layer(x, parameters, nhead=4, key_padding_mask=mask, **PRE)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("shape", [SMALL, EncoderShape(3, 20, 512, 8, 64)], ids=["fused", "composed"])
def test_compiled(shape, backend):
    torch._dynamo.reset()
    leaves = _leaves(_tensors(shape, "bf16"))
    compiled = torch.compile(_layer, fullgraph=True, backend=backend)
    wanted = list(leaves.values())
    grad = _normal(*leaves["x"].shape, seed=9, dtype=torch.bfloat16)
    mask = torch.arange(shape.tokens, device=DEVICE).expand(shape.sequences, -1) > 15
    for each in (None, mask):
        found = compiled(leaves["x"], encoder_parameters(leaves), each)
        same = _layer(leaves["x"], encoder_parameters(leaves), each)
        assert_bitwise_equal(found, same)
        gradients = (torch.autograd.grad(result, wanted, grad) for result in (found, same))
        for name, got, expected in zip(leaves, *gradients, strict=True):
            assert_bitwise_equal(got, expected, name)


def test_compiled_with_graphs():
    """mode="reduce-overhead": CUDA graphs around our kernels."""
    torch._dynamo.reset()
    tensors = _tensors(SMALL, "bf16")
    compiled = torch.compile(_layer, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(4):
            x = _normal(*SMALL[:3], seed=seed, dtype=torch.bfloat16)
            torch.compiler.cudagraph_mark_step_begin()
            result = compiled(x, encoder_parameters(tensors)).clone()
            assert_bitwise_equal(result, _layer(x, encoder_parameters(tensors)))


def test_main_grad_in_a_graph():
    torch._dynamo.reset()
    found = []
    for call in (torch.compile(_layer, fullgraph=True, backend="aot_eager"), _layer):
        tensors = _tensors(SMALL, "bf16")
        leaves = {name: nn.Parameter(each) for name, each in tensors.items() if name != "x"}
        for leaf in leaves.values():
            leaf.main_grad = torch.ones(leaf.shape, device=DEVICE)
        for _ in range(2):
            call(tensors["x"], encoder_parameters(leaves)).float().square().sum().backward()
        assert all(leaf.grad is None for leaf in leaves.values())
        found.append([leaf.main_grad for leaf in leaves.values()])
    for got, same in zip(*found, strict=True):
        assert_bitwise_equal(got, same)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    """fp32 parameters, 16-bit products, no worse than torch's own autocast."""
    tensors = _tensors(SMALL, "ieee")
    assert_encoder_no_worse(tensors, nhead=4, autocast=dtype, **PRE)
    with torch.autocast(DEVICE, dtype):
        result = _call(tensors)
    assert result.dtype == torch.float32
    assert bool((result != _call(tensors)).any()), "products were not in 16 bits"


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", ""])
def test_checkpointing(use_reentrant):
    found = []
    for saved in (True, False):
        leaves = _leaves(_tensors(SMALL, "bf16"))
        parameters = encoder_parameters(leaves)
        if saved:
            result = checkpoint(_layer, leaves["x"], parameters, use_reentrant=use_reentrant)
        else:
            result = _layer(leaves["x"], parameters)
        result.float().square().sum().backward()
        found.append([result, *(leaf.grad for leaf in leaves.values())])
    for got, same in zip(*found, strict=True):
        assert_bitwise_equal(got, same)


@pytest.mark.parametrize(("shape", "number"), [(SMALL, "tf32"), (EncoderShape(3, 20, 512, 8, 64), "bf16")], ids=str)
def test_deterministic_algorithms(shape, number):
    leaves = _leaves(_tensors(shape, number))
    expected = _loss(leaves, nhead=shape.nhead)
    torch.use_deterministic_algorithms(True)
    try:
        actual = _loss(leaves, nhead=shape.nhead)
    finally:
        torch.use_deterministic_algorithms(False)
    _assert_same(actual, expected)


def test_the_graph_kept_for_another_backward():
    leaves = _leaves(_tensors())
    wanted = list(leaves.values())
    loss = _call(leaves).square().sum()
    first = torch.autograd.grad(loss, wanted, retain_graph=True)
    for got, same in zip(torch.autograd.grad(loss, wanted), first, strict=True):
        assert_bitwise_equal(got, same)


def test_second_derivatives_are_refused():
    leaves = _leaves(_tensors(EncoderShape(6, 9, 16, 4, 128), "ieee"))
    loss = isogemm_encoder(**leaves, nhead=4, **PRE).square().sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, leaves.values(), create_graph=True)


def test_parameters_changed_in_place_are_seen():
    """Nothing prepared from a weight outlives a call."""
    tensors = _tensors()
    _loss(_leaves(tensors))
    leaves = _leaves(tensors)
    _loss(leaves)
    with torch.no_grad():
        for leaf in leaves.values():
            leaf.mul_(1.25)
    _assert_same(_loss(leaves), _loss(_leaves(leaves)))


def test_negated_views():
    """A view whose negation torch has only noted down: the kernel must not read it as it lies in memory."""
    tensors = _tensors()
    for name in ("x", "in_proj_weight", "linear1_bias", "norm1_weight"):
        expected = _call(tensors | {name: -tensors[name]})
        assert_bitwise_equal(_call(tensors | {name: torch._neg_view(tensors[name])}), expected, name)


def test_first_calls_from_several_threads():
    """All compile or wait, none fails, and the bits are one thread's."""
    tensors = _tensors(EncoderShape(40, 11, 32, 4, 48), "bf16")
    sizes = [1, 1, 17, 17, 40, 40]
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda count: _call(tensors | {"x": tensors["x"][:count]}), sizes))
    torch.cuda.synchronize()
    whole = _call(tensors)
    for count, result in zip(sizes, results, strict=True):
        assert_bitwise_equal(result, whole[:count], f"{count} sequences")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current():
    expected = _loss(_leaves(_tensors(device="cuda:0")))
    leaves = _leaves(_tensors(device="cuda:1"))
    with torch.cuda.device(0):
        found = _loss(leaves)
    assert found[0].device == leaves["x"].device
    _assert_same(found, expected)
