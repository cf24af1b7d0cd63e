"""How attention is served on a GPU: the log, streams, graphs, memory, threads, torch.compile, autocast, devices."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from attention_cases import Case, Pages, alone, attend, offsets, packed
from attention_promises import assert_same
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.core.plan import plans
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

SOURCE = Path(__file__).parents[2] / "src"
CASE = Case("bf16", 8, 2, 64, device="cuda")


def _normal(*shape, seed=0, dtype=torch.bfloat16):
    return make_data("normal", shape, seed=seed, dtype=dtype, device="cuda")


def _operands(batch=2, heads=8, kv_heads=2, queries=100, keys=100, head=64, dtype=torch.bfloat16, seed=0):
    """q, k, v."""
    shapes = (heads, queries), (kv_heads, keys), (kv_heads, keys)
    return [_normal(batch, *shape, head, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


def _leaves(tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def _gradients(function, leaves):
    result = function(*leaves)
    return result.detach(), *torch.autograd.grad(result.float().square().sum(), leaves)  # its graph would pin a stream


def _assert_all_equal(found, expected):
    for got, same in zip(found, expected, strict=True):
        assert_bitwise_equal(got, same)


def _causal(q, k, v):
    return isogemm.attention(q, k, v, causal=True)


def test_dispatch_log():
    leaves = _leaves(_operands())
    with isogemm.dispatch_log() as log:
        _causal(*leaves).sum().backward()
    assert next(entry.op for entry in log) == "attention"
    assert "attention_backward" in [entry.op for entry in log]
    assert all(entry.path != "torch" for entry in log)
    assert all(entry.config for entry in log)
    assert "bfloat16" in log[0].problem


def test_float64_is_torch():
    q, k, v = _operands(dtype=torch.float64)
    with isogemm.dispatch_log() as log:
        result = _causal(q, k, v)
    assert [entry.path for entry in log] == ["torch"]
    torch.testing.assert_close(result, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))


def test_devices_must_agree():
    q, k, v = _operands()
    for changed, name in (((q, k.cpu(), v), "k"), ((q, k, v.cpu()), "v")):
        with pytest.raises(ValueError, match=name):
            isogemm.attention(*changed)
    for name in ("kv_lengths", "kv_starts", "kv_offsets"):
        with pytest.raises(ValueError, match=name):
            isogemm.attention(q, k, v, **{name: torch.tensor([100, 100])})
    with pytest.raises(ValueError, match="sinks"):
        isogemm.attention(q, k, v, sinks=torch.zeros(8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="attn_mask"):
        isogemm.attention(q, k, v, attn_mask=torch.ones(1, 1, 100, 100, dtype=torch.bool))


def test_lengths_are_not_read_on_the_host():
    """No synchronisation, whatever says where sequences lie."""
    lengths = torch.tensor([77, 100], device="cuda")
    leaves = _leaves(_operands())
    decode = _operands(queries=1, keys=3000)
    pack = _operands(1)[0][0].transpose(0, 1).contiguous(), *(x[0].transpose(0, 1) for x in _operands(1)[1:])
    ends = offsets([30, 70], "cuda")
    sequences = [CASE.sequence(n, seed=n) for n in (100, 40)]
    pages, counts = Pages.of(CASE, sequences, 16), [offsets(each, "cuda") for each in ([1, 1], [100, 40])]
    few = torch.cat([each.q[:, -1:].transpose(0, 1) for each in sequences])

    def calls():
        isogemm.attention(*leaves, causal=True, kv_lengths=lengths).sum().backward()
        isogemm.attention(*leaves, causal=True, kv_starts=lengths - 70, window=5).sum().backward()
        isogemm.attention(*decode, causal=True, kv_lengths=lengths, kv_offsets=lengths)
        isogemm.attention_varlen(*_leaves(pack), ends, ends, causal=True).sum().backward()
        isogemm.attention_varlen(few, pages.k, pages.v, *counts, causal=True, block_table=pages.table)

    calls()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_runs_on_the_current_stream():
    operands = _operands()
    expected = _gradients(_causal, _leaves(operands))
    late = [torch.full_like(x, torch.nan) for x in operands]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of ms: a launch on another stream would read the NaN
        for each, x in zip(late, operands, strict=True):
            each.copy_(x)
        found = _gradients(_causal, [x.requires_grad_() for x in late])
    stream.synchronize()
    _assert_all_equal(found, expected)


def test_two_streams_at_once():
    """Scratch memory of one stream's call is not another's."""
    first, second = _operands(4, queries=1, keys=9000), _operands(3, queries=1, keys=20_000, seed=5)
    expected = [_causal(*each) for each in (first, second)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(10):
        results = []
        for stream, operands in zip(streams, (first, second), strict=True):
            with torch.cuda.stream(stream):
                results.append([_causal(*operands) for _ in range(5)])
        torch.cuda.synchronize()
        for found, same in zip(results, expected, strict=True):
            for each in found:
                assert_bitwise_equal(each, same)


@pytest.mark.parametrize("queries", [1, 100, 3000])
def test_the_same_memory_again(queries):
    """Call after call on what the ones before left behind, of other sizes between."""
    operands, other = _operands(2, queries=queries, keys=3000), _operands(3, queries=7, keys=5000, seed=3)
    expected, also = _causal(*operands).clone(), _causal(*other).clone()
    trained = _gradients(_causal, _leaves(operands))
    for _ in range(5):
        assert_bitwise_equal(_causal(*operands), expected)
        assert_bitwise_equal(_causal(*other), also)
        _assert_all_equal(_gradients(_causal, _leaves(operands)), trained)


# CUDA graphs


@pytest.mark.parametrize("queries", [1, 100, 1000])
def test_graph_capture(queries):
    operands = _operands(queries=queries, keys=2000)
    _causal(*operands)  # compiles
    graph = torch.cuda.CUDAGraph()
    with isogemm.dispatch_log() as log, torch.cuda.graph(graph):
        result = _causal(*operands)
    assert {entry.op for entry in log} == {"attention"}
    for seed in range(3):
        for x, new in zip(operands, _operands(queries=queries, keys=2000, seed=10 * seed + 10), strict=True):
            x.copy_(new)
        result.fill_(torch.nan)
        graph.replay()
        assert_bitwise_equal(result, _causal(*operands))


def test_decode_in_a_graph():
    """One captured step serves every length of a static cache: lengths are read on the device, splits are as needed."""
    whole = [CASE.sequence(2100, seed=i) for i in range(2)]
    expected = [alone(CASE, each)[0] for each in whole]
    q = torch.empty(2, 8, 1, 64, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.full((2, 2, 2500, 64), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    lengths = torch.ones(2, dtype=torch.int32, device="cuda")
    k[:, :, :1], v[:, :, :1], q[:] = whole[0].k[:, :1], whole[0].v[:, :1], whole[0].q[:, :1]
    isogemm.attention(q, k, v, causal=True, kv_lengths=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = isogemm.attention(q, k, v, causal=True, kv_lengths=lengths)
    for n in (1, 2, 64, 65, 511, 512, 513, 1024, 1025, 2000, 2099):
        ends = n, n + 1
        for i, (each, end) in enumerate(zip(whole, ends, strict=True)):
            q[i], k[i, :, :end], v[i, :, :end] = each.q[:, end - 1 : end], each.k[:, :end], each.v[:, :end]
        lengths.copy_(torch.tensor(ends))
        result.fill_(torch.nan)
        graph.replay()
        for i, end in enumerate(ends):
            assert_bitwise_equal(result[i], expected[i][:, end - 1 : end], f"sequence {i} of {end} tokens")


def test_packed_lengths_in_a_graph():
    """Offsets that change between replays, with the same number of tokens and of sequences."""
    sequences = [CASE.sequence(n, seed=n) for n in (300, 33, 67)]
    expected = {id(each): alone(CASE, each, train=True) for each in sequences}
    tokens = [torch.cat([each[n].transpose(0, 1) for each in sequences]).contiguous() for n in range(4)]
    leaves, ends = [x.requires_grad_() for x in tokens[:3]], offsets([300, 33, 67], "cuda")

    def step():
        o = isogemm.attention_varlen(*leaves, ends, ends, causal=True)
        return o, *torch.autograd.grad(o, leaves, tokens[3])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        own = [sequences[i] for i in order]
        lengths = [each.keys for each in own]
        with torch.no_grad():
            for n, x in enumerate(tokens):
                x.copy_(torch.cat([each[n].transpose(0, 1) for each in own]))
        ends.copy_(offsets(lengths, "cuda"))
        for x in results:
            x.detach().fill_(torch.nan)
        graph.replay()
        found = zip(*([part.transpose(0, 1) for part in x.split(lengths)] for x in results), strict=True)
        assert_same(found, [expected[id(each)] for each in own], f"packed as {order}")


def test_graph_capture_of_a_training_step():
    leaves = _leaves(_operands(queries=700, keys=700))
    expected = _gradients(_causal, leaves)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        _gradients(_causal, leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _gradients(_causal, leaves)
    for _ in range(2):
        for x in found:
            x.detach().fill_(torch.nan)
        graph.replay()
        _assert_all_equal(found, expected)


COLD_CAPTURE = """
import torch, isogemm

q, k, v = (torch.randn(1, 2, 48, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        isogemm.attention(q, k, v, causal=True)
except RuntimeError as error:
    assert "captur" in str(error) or "warm" in str(error), error
else:
    raise AssertionError("compiled inside a capture")
result = isogemm.attention(q, k, v, causal=True)
exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
assert (result.double() - exact).abs().max() <= 0.02 * exact.abs().max()
"""


def test_capture_in_a_new_process():
    """Nothing is compiled in a capture: an error that says so, and the process goes on."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", COLD_CAPTURE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# memory


def _peak(call):
    """Bytes beyond what was there, at the most, and after the call with its result alive."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = call()
    stats = torch.cuda.memory_stats()
    del result
    return stats["requested_bytes.all.peak"] - before, stats["requested_bytes.all.current"] - before


@pytest.mark.parametrize("layout", ["contiguous", "[B, T, H, D]", "static cache"])
def test_inference_takes_no_more_than_its_result(layout):
    q, k, v = _operands(8, queries=2048, keys=2048, head=128)  # enough programs for the GPU
    if layout == "[B, T, H, D]":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif layout == "static cache":
        k, v = (torch.cat([x, x], 2)[:, :, :2048] for x in (k, v))
    peak, _ = _peak(lambda: _causal(q, k, v))
    assert peak == q.nbytes


def test_training_keeps_no_more_than_flash_attention():
    """The operands, the result and a number per row; in the backward the gradients and a few rows more."""
    leaves = _leaves(_operands(2, heads=8, kv_heads=8, queries=2048, keys=2048, head=128))
    nbytes, rows = leaves[0].nbytes, 2 * 8 * 2048 * 4
    _, kept = _peak(lambda: _causal(*leaves))
    assert kept <= nbytes + rows + 1024
    result = _causal(*leaves)
    grad = torch.randn_like(result)
    peak, _ = _peak(lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True))
    assert peak <= 3 * nbytes + 2 * rows + 1024


def test_decode_takes_little():
    """Partial results of splits: a small part of the keys and values that are read."""
    q, k, v = _operands(1, heads=32, kv_heads=8, queries=1, keys=65_536, head=128)
    peak, _ = _peak(lambda: _causal(q, k, v))
    assert peak <= 0.05 * (k.nbytes + v.nbytes)


# many callers


def test_first_calls_from_several_threads():
    """All compile or wait, none fails, and the bits are one thread's."""
    q, k, v = _operands(queries=96, keys=96, head=48)
    sizes = [1, 1, 17, 17, 64, 64, 96, 96]
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: _causal(*(x[:, :, :n] for x in (q, k, v))), sizes))
    torch.cuda.synchronize()
    whole = _causal(q, k, v)
    for n, result in zip(sizes, results, strict=True):
        assert_bitwise_equal(result, whole[:, :, :n], f"{n} tokens")


def test_nothing_is_loaded_twice():
    from triton import knobs

    names = []

    def note(module, function, name, metadata_group, hash):
        names.append(name)

    leaves = _leaves(_operands(queries=77, keys=90))
    _gradients(_causal, leaves)
    knobs.runtime.kernel_load_start_hook.add(note)
    try:
        _gradients(_causal, _leaves(leaves))
    finally:
        knobs.runtime.kernel_load_start_hook.remove(note)
    assert names == []


def test_a_growing_cache_compiles_nothing_new():
    """Kernels are those of a few lengths; every further one is served without a compiler."""
    from triton import knobs

    q, k, v = _operands(1, queries=1, keys=4096)
    for n in (1, 16, 100, 512, 1000, 1024, 2000, 4096):
        _causal(q, k[:, :, :n], v[:, :, :n])
    names = []

    def note(module, function, name, metadata_group, hash):
        names.append(name)

    knobs.runtime.kernel_load_start_hook.add(note)
    try:
        for n in range(1, 4096, 37):
            _causal(q, k[:, :, :n], v[:, :, :n])
    finally:
        knobs.runtime.kernel_load_start_hook.remove(note)
    assert names == []


def test_plans_are_found_again():
    operands = _operands(queries=50)
    _causal(*operands)
    before = len(plans)
    _causal(*(x.clone() for x in operands))
    assert len(plans) == before


# torch.compile, autocast, checkpoints


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    torch._dynamo.reset()
    sinks, lengths = _normal(8, seed=9), torch.tensor([100, 61], device="cuda")

    def call(q, k, v, sinks):
        return isogemm.attention(q, k, v, causal=True, window=40, sinks=sinks, kv_lengths=lengths)

    leaves = _leaves([*_operands(), sinks])
    compiled = torch.compile(call, fullgraph=True, backend=backend)
    with isogemm.dispatch_log() as log:
        found = _gradients(compiled, leaves)
    assert {"attention", "attention_backward"} <= {entry.op for entry in log}
    expected = _gradients(call, leaves)
    assert_bitwise_equal(found[0], expected[0])
    for got, same in zip(found[1:], expected[1:], strict=True):
        assert_bitwise_equal(got, same)


def test_compiled_for_any_length():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_causal, fullgraph=True, dynamic=True, backend=counter)
    for batch, queries, keys in ((3, 9, 13), (7, 70, 75), (5, 3, 3000)):
        operands = _operands(batch, queries=queries, keys=keys)
        assert_bitwise_equal(compiled(*operands), _causal(*operands))
    assert counter.frame_count == 1


def test_compiled_with_graphs():
    """mode="reduce-overhead": CUDA graphs around our kernels."""
    torch._dynamo.reset()
    compiled = torch.compile(_causal, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for seed in range(4):
            operands = _operands(seed=10 * seed)
            torch.compiler.cudagraph_mark_step_begin()
            assert_bitwise_equal(compiled(*operands).clone(), _causal(*operands))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    leaves = _leaves(_operands(dtype=torch.float32))
    with torch.autocast("cuda", dtype):
        result = _causal(*leaves)
    assert result.dtype == dtype
    assert_bitwise_equal(result, _causal(*(x.detach().to(dtype) for x in leaves)))
    found = torch.autograd.grad(result.float().square().mean(), leaves)
    assert [x.dtype for x in found] == [torch.float32] * 3


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(use_reentrant):
    leaves = _leaves(_operands())
    expected = _gradients(_causal, leaves)[1:]
    checkpoint(_causal, *leaves, use_reentrant=use_reentrant).float().square().sum().backward()
    _assert_all_equal([leaf.grad for leaf in leaves], expected)


def test_deterministic_algorithms():
    leaves = _leaves(_operands(queries=700, keys=700))
    expected = _gradients(_causal, leaves)
    torch.use_deterministic_algorithms(True)
    try:
        found = _gradients(_causal, leaves)
    finally:
        torch.use_deterministic_algorithms(False)
    _assert_all_equal(found, expected)


def test_gradients_that_are_not_contiguous():
    """Gradients of a sum (one number repeated), of a transposed result, and of one out of alignment."""
    leaves = _leaves(_operands())
    grad = torch.ones(2, 8, 100, 64, dtype=torch.bfloat16, device="cuda")
    expected = torch.autograd.grad(_causal(*leaves), leaves, grad)
    shifted = torch.ones(grad.numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view_as(grad)
    for other in (grad[:1, :1, :1, :1].expand_as(grad), grad.mT.contiguous().mT, shifted):
        _assert_all_equal(torch.autograd.grad(_causal(*leaves), leaves, other), expected)


def test_negated_views():
    """A view whose negation torch has only noted down: the kernel must not read it as it lies in memory."""
    q, k, v = _operands()
    expected = _causal(-q, k, v)
    assert_bitwise_equal(_causal(torch._neg_view(q), k, v), expected)
    assert_bitwise_equal(_causal(q, torch._neg_view(k), v), expected)
    assert_bitwise_equal(_causal(q, k, torch._neg_view(v)), _causal(q, k, -v))


def test_second_backward():
    """retain_graph: what was kept is not written to."""
    leaves = _leaves(_operands())
    result = _causal(*leaves)
    grad = _normal(*result.shape, seed=8)
    first = torch.autograd.grad(result, leaves, grad, retain_graph=True)
    _assert_all_equal(torch.autograd.grad(result, leaves, grad), first)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current():
    expected = _causal(*_operands())
    with torch.cuda.device(0):
        result = _causal(*(x.to("cuda:1") for x in _operands()))
    assert result.device.index == 1
    assert_bitwise_equal(result, expected)


def test_many_sequences_and_many_heads():
    """More sequences times heads than 65535, dense and packed."""
    case = Case("bf16", 2, 2, 16, device="cuda")
    own = case.sequence(5)
    expected = alone(case, own, train=True)
    count = 40_000
    found = attend(case, *(x[None].expand(count, -1, -1, -1) for x in own))
    for i in (0, 32_767, 32_768, 39_999):
        assert_same([tuple(x[i] for x in found)], [expected], f"sequence {i} of {count}")
    pack = packed(case, [own] * 35_000, train=True)
    for i in (0, 32_767, 32_768, 34_999):
        assert_same([pack[i]], [expected], f"packed sequence {i}")
