"""How a log-probability of the head is served on the GPU: blocks, memory, graphs, streams, other offsets."""

import pytest
import torch

import isogemm
from isogemm.gemm.configs import token_chunk
from isogemm.loss import configs, plan
from isogemm.loss.api import linear_cross_entropy, linear_logprob
from isogemm.loss.configs import Blocks, How
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cuda"
ALL = How(softcap=5.0, temperature=0.55, entropy=True, mean=True, lse=True)


def _head(tokens, k, vocabulary, dtype=torch.bfloat16, seed=0):
    hidden = make_data("normal", (tokens, k), seed=seed, dtype=dtype, device=DEVICE)
    weight = (make_data("normal", (vocabulary, k), seed=seed + 1, device=DEVICE) / k**0.5).to(dtype)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    targets = torch.randint(vocabulary, (tokens,), device=DEVICE, generator=generator)
    targets[1::7] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocabulary", [1000, 50257])
def test_blocks_change_no_bits(vocabulary, dtype):
    hidden, weight, targets = _head(700, 264, vocabulary, dtype)
    bias = make_data("normal", (vocabulary,), seed=5, dtype=dtype, device=DEVICE)
    precision = "tf32" if dtype is torch.float32 else None
    how = ALL._replace(precision=precision)
    head, results = (hidden, weight, targets, bias), []
    chunk = token_chunk(*weight.shape, "bfloat16")
    grad = make_data("normal", (4, 700), seed=6, device=DEVICE)
    for tokens, columns in ((700, vocabulary), (64, vocabulary), (700, 16384), (1024, 32768)):
        blocks = Blocks(tokens, min(columns, vocabulary))
        with poisoned_allocations():
            values, stats = plan.forward(*head, how, blocks)
            into = tuple(torch.empty_like(each) for each in (hidden, weight, bias))
            wanted = into if tokens >= 700 else (into[0], None, None)  # of few tokens a chunk would be cut
            plan.backward(grad, *head, values, stats, how, chunk, wanted, (None, None), blocks)
        results.append((values, stats, *(each for each in wanted if each is not None)))
    for each in results[1:]:
        for got, right in zip(each, results[0], strict=False):
            assert_bitwise_equal(got, right)


def test_many_blocks_of_tokens(monkeypatch):
    """Without a main_grad the weight's gradient is rounded once."""
    hidden, weight, targets = _head(5000, 256, 3000)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    grad = make_data("normal", (5000,), seed=7, device=DEVICE)
    expected = torch.autograd.grad(linear_logprob(*leaves, targets), leaves, grad)
    monkeypatch.setattr(configs, "MOST_TOKENS", 2048)
    result = linear_logprob(*leaves, targets)
    with poisoned_allocations():
        found = torch.autograd.grad(result, leaves, grad)
    for got, right in zip(found, expected, strict=True):
        assert_bitwise_equal(got, right)


def test_targets_outside_give_nan():
    hidden, weight, targets = _head(20, 64, 100)
    targets[3], targets[5] = 100, -1
    hidden.requires_grad_()
    result = linear_logprob(hidden, weight, targets)
    assert result.isnan().nonzero()[:, 0].tolist() == [3, 5]
    (gradient,) = torch.autograd.grad(result.nansum(), hidden)
    assert gradient.isnan().any(1).nonzero()[:, 0].tolist() == [3, 5]


def test_graph_capture():
    hidden, weight, targets = _head(300, 256, 40000)
    hidden.requires_grad_()
    weight.requires_grad_()

    def step():
        loss = linear_cross_entropy(hidden, weight, targets, label_smoothing=0.1, z_loss=1e-3)
        return loss, *torch.autograd.grad(loss, [hidden, weight])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(2):
        for each in found:
            each.detach().fill_(torch.nan)
        graph.replay()
        for got, right in zip(found, expected, strict=True):
            assert_bitwise_equal(got.detach(), right.detach())


def test_runs_on_the_current_stream():
    hidden, weight, targets = _head(64, 256, 5000)
    expected = linear_logprob(hidden, weight, targets)
    late = torch.full_like(hidden, torch.nan)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of ms: a launch on another stream would read the NaN
        late.copy_(hidden)
        found = linear_logprob(late, weight, targets)
    stream.synchronize()
    assert_bitwise_equal(found, expected)


def test_the_log_names_the_blocks():
    hidden, weight, targets = _head(8, 64, 50257)
    with isogemm.dispatch_log() as log:
        linear_logprob(hidden, weight, targets)
    assert str(log[0]) == "isogemm.linear_logprob [8,50257,64] bfloat16: loss 8 x 50257 logits at a time"
    assert {each.path for each in log} == {"loss", "gemm"}


@pytest.mark.alone
def test_memory_is_bounded():
    tokens, k, vocabulary = 4096, 1024, 128256
    hidden, weight, targets = _head(tokens, k, vocabulary)
    hidden.requires_grad_()
    weight.requires_grad_()
    weight.main_grad = torch.zeros(weight.shape, device=DEVICE)
    linear_logprob(hidden, weight, targets).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    linear_logprob(hidden, weight, targets).sum().backward()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    logits = 4 * configs.LOGITS
    assert taken < 1.5 * logits + 4 * tokens * k + 2 * tokens * k + (32 << 20)
    assert 4 * tokens * vocabulary > 7 * logits


@pytest.mark.alone
def test_offsets_beyond_32_bits():
    """A weight of more than 2^31 elements: its last rows."""
    vocabulary, k = 262144 + 4096, 8192
    weight = torch.zeros(vocabulary, k, dtype=torch.bfloat16, device=DEVICE)
    hidden, last, _ = _head(3, k, 5000)
    weight[-5000:] = last
    targets = torch.tensor([vocabulary - 1, vocabulary - 5000, 0], device=DEVICE)
    logits = isogemm.linear(hidden, weight, out_dtype=torch.float32)
    expected = isogemm.log_softmax(logits).gather(1, targets[:, None])[:, 0]
    assert_bitwise_equal(linear_logprob(hidden, weight, targets), expected)
    del logits
    weight.requires_grad_()
    result = linear_logprob(hidden, weight, targets)
    (of_weight,) = torch.autograd.grad(result.sum(), weight)
    part = of_weight[-5000:].double()
    weights = torch.softmax((hidden.double() @ weight.detach().double().t()), -1)[:, -5000:]
    exact = -weights
    exact[0, -1] += 1
    exact[1, 0] += 1
    right = exact.t() @ hidden.double()
    assert (part - right).abs().max() < 2e-2 * right.abs().max()
