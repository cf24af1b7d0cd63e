"""How norms, softmaxes and embedding are served on a GPU: known calls, tiles, sums, memory, CPU time."""

from dataclasses import replace

import pytest
import torch

import isogemm
from isogemm.core.plan import run_launch
from isogemm.norm import api, configs
from isogemm.norm import row_norm as row_norms
from isogemm.norm.kernels import row_norm as row_kernels
from isogemm.norm.kernels import softmax as softmax_kernels
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

CALLS = {
    "rms_norm": lambda x, w, b: isogemm.rms_norm(x, w),
    "rms_norm residual": lambda x, w, b: isogemm.rms_norm(x, w, residual=x)[0],
    "layer_norm": lambda x, w, b: isogemm.layer_norm(x, w, b),
    "softmax": lambda x, w, b: isogemm.softmax(x),
    "log_softmax": lambda x, w, b: isogemm.log_softmax(x),
}


def _normal(*shape, seed=0, dtype=torch.bfloat16):
    return make_data("normal", shape, seed=seed, dtype=dtype, device="cuda")


def _forget():
    for known in (api._known, api._known_norms, api._known_softmaxes):
        known.clear()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("d", [64, 1000, 4096, 40000])
def test_a_known_call_has_the_bits_of_the_first(name, d):
    w, b = _normal(d, seed=1), _normal(d, seed=2)
    for trained in (False, True):
        _forget()
        first = None
        for _ in range(3):
            x = _normal(33, d).requires_grad_(trained)
            y = CALLS[name](x, w, b)
            found = [y.detach(), *(torch.autograd.grad(y, x, _normal(33, d, seed=3)) if trained else ())]
            for each, expected in zip(found, first or found, strict=True):
                assert_bitwise_equal(each, expected)
            first = found


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("d", [64, 1000, 4096])
def test_alignment_does_not_change_the_bits(name, d):
    """Rows that begin at a multiple of 2 bytes instead of 16."""
    w, b, x, grad = _normal(d, seed=1), _normal(d, seed=2), _normal(33, d), _normal(33, d, seed=3)

    def step(x, w, b, grad):
        leaf = x.detach().requires_grad_()
        y = CALLS[name](leaf, w, b)
        return y.detach(), *torch.autograd.grad(y, leaf, grad)

    def moved(x):
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    for found, expected in zip(step(*map(moved, (x, w, b, grad))), step(x, w, b, grad), strict=True):
        assert_bitwise_equal(found, expected)


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("d", [1025, 2048, 4096, 5120, 8192, 16384])
def test_rows_per_sum_do_not_change_the_bits(kind, d):
    rows = 3000
    x, w, grad = _normal(rows, d), _normal(d, seed=1), _normal(rows, d, seed=2)
    statistics = row_norms._norm(x, None, w, None, *[None] * 4, kind, 1e-5, 0.0, x.dtype, True)[2]
    sub, results = configs.choose_backward(d, 2).sub, []
    for block in (sub, configs.SUM_ROWS):
        dx, partial = row_norms._norm_backward(grad, None, x, w, statistics, kind, 0.0, True, True, block)
        sums = [row_norms._weight_sums(each, configs.SUM_ROWS // block, torch.float32) for each in partial]
        results.append((dx, *sums))
    for found, expected in zip(*results, strict=True):
        assert_bitwise_equal(found, expected)
    torch.testing.assert_close(results[0][2].double(), grad.double().sum(0), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("d", [1024, 4096, 16384])
def test_a_norms_warps_do_not_change_the_bits(d):
    """Sums are by halves, in any layout."""
    x, expected = _normal(33, d), None
    config = configs.choose(d, 2)
    for warps in (1, 2, 4, 8, 16):
        out = torch.empty_like(x)
        launch = row_kernels.describe_norm(33, d, "layer_norm", 1e-5, 0.0, replace(config, num_warps=warps))
        run_launch(launch, (x, None, None, None, out, None, None))
        expected = out if expected is None else expected
        assert_bitwise_equal(out, expected, f"{warps} warps")


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("v", [40, 1000, 4096, 16384, 50257, 131072])
def test_a_softmaxs_tile_does_not_change_the_bits(log, v):
    x, grad = _normal(9, v), _normal(9, v, seed=1)
    config = configs.choose_softmax(v, 2)
    others = [config, *(replace(config, num_warps=warps) for warps in (4, 8))]
    if not config.steps:
        others.append(replace(config, rows=2))
        if config.blocks > 1:
            others.append(replace(config, blocks=config.blocks // 2, steps=2))
    else:
        others.append(replace(config, blocks=config.blocks // 2, steps=2 * config.steps, num_stages=3))
    results = []
    for other in others:
        y, dx = torch.empty_like(x), torch.empty_like(x)
        run_launch(softmax_kernels.describe_softmax(9, v, log, other), (x, y))
        run_launch(softmax_kernels.describe_softmax_backward(9, v, log, other), (grad, y, dx))
        results.append((y, dx))
        for found, expected in zip(results[-1], results[0], strict=True):
            assert_bitwise_equal(found, expected, str(other))


def test_an_id_of_many_tokens_is_not_slow():
    """65536 tokens of one id take at most 20 times as long as of as many ids."""
    weight, grad = _normal(65536, 1024).requires_grad_(), _normal(65536, 1024, seed=1)

    def milliseconds(ids):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(3):
            y = isogemm.embedding(ids, weight)
            start.record()
            torch.autograd.grad(y, weight, grad)
            end.record()
        end.synchronize()
        return start.elapsed_time(end)

    every = torch.arange(65536, device="cuda")
    assert milliseconds(torch.zeros_like(every)) < 20 * milliseconds(every)


def test_a_norm_keeps_x_and_statistics_only():
    x, w = _normal(4096, 4096).requires_grad_(), _normal(4096, seed=1).requires_grad_()
    isogemm.rms_norm(x, w)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = isogemm.rms_norm(x, w)
    assert torch.cuda.memory_allocated() - before <= y.numel() * 2 + 4096 * 4 + 4096
