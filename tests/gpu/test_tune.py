"""Tuning on this GPU: choices are served, results keep their bits, and ISOGEMM_TUNED=0 ignores them."""

import json
import os
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch

import isogemm
from isogemm.core import env, tuned
from isogemm.core.plan import clear_caches
from isogemm.gemm import selection
from isogemm.tuning import gemm, run
from isogemm.tuning.weights import from_torch, listed
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

DEVICE = "cuda"
SOURCE = Path(__file__).parents[2] / "src"
SHAPES = (512, 256), (192, 384)  # N, K: small, so that few kernels are compiled for long
TOKENS = (1, 300)

pytestmark = pytest.mark.alone  # each run starts a process per core, to compile


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder that is read."""
    monkeypatch.setattr(env, "settings", replace(env.settings, tuned=True, cache=tmp_path))
    tuned._tables.cache_clear()
    clear_caches()
    yield tmp_path
    tuned._tables.cache_clear()
    clear_caches()


def _weights():
    return [make_data("normal", shape, seed=n, dtype=torch.bfloat16, device=DEVICE) for n, shape in enumerate(SHAPES)]


def _results(weights):
    """Outputs and gradients for the tuned numbers of tokens, and for others."""
    made = []
    for weight in weights:
        for tokens in (*TOKENS, 2, 17, 1000):
            x = make_data("normal", (tokens, weight.shape[1]), seed=tokens, dtype=weight.dtype, device=DEVICE)
            x, leaf = x.requires_grad_(), weight.detach().requires_grad_()
            out = isogemm.linear(x, leaf)
            made += [out.detach(), *torch.autograd.grad(out, (x, leaf), torch.ones_like(out))]
    return made


def _served(weight, tokens):
    """The log's text of the config that serves a product."""
    x = torch.zeros(tokens, weight.shape[1], dtype=weight.dtype, device=DEVICE)
    with isogemm.dispatch_log() as log:
        isogemm.linear(x, weight)
    return log[0].config


def test_tuning_changes_what_serves_and_no_bit(cache):
    weights = _weights()
    before = _results(weights)
    torch.manual_seed(7)
    state, precision = torch.cuda.get_rng_state(), torch.backends.cuda.matmul.fp32_precision
    report = isogemm.tune(weights, tokens=TOKENS, backward=True)
    print(report)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.backends.cuda.matmul.fp32_precision == precision
    assert len(report.rows) == len(SHAPES) * len(TOKENS) * 3
    assert report.unvisited == 0
    assert report.path == tuned.path(torch.cuda.get_device_name())
    assert all(row.before_us is not None and row.after_us <= row.before_us for row in report.rows)
    table = tuned.load("gemm", torch.cuda.get_device_name())
    for row in report.rows:
        assert dict(table[row.point.key])[row.point.tokens] == astuple(row.after)
        if row.point.kind == "linear":
            weight = weights[SHAPES.index((row.point.n, row.point.k))]
            assert _served(weight, row.point.tokens) == str(row.after)
    for now, then in zip(_results(weights), before, strict=True):
        assert_bitwise_equal(now, then, "tuning changes no bit")


def test_every_tuned_config_has_the_canonical_bits(cache):
    """Also on data that the tuner has not seen, with what a call may add: a bias, float32 results."""
    (weight, _) = _weights()
    report = isogemm.tune(weight, tokens=[64])
    (row,) = report.rows
    x = make_data("normal", (64, weight.shape[1]), seed=9, dtype=weight.dtype, device=DEVICE)
    bias = make_data("normal", (weight.shape[0],), seed=10, dtype=weight.dtype, device=DEVICE)
    for how in ({}, {"bias": bias}, {"out_dtype": torch.float32}):
        clear_caches()
        served = isogemm.linear(x, weight, **how)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(env, "settings", replace(env.settings, tuned=False))
            clear_caches()
            assert_bitwise_equal(served, isogemm.linear(x, weight, **how), f"{row.after} {how}")


def _forced(cache, weight, tokens):
    """Keep a config that would not be chosen; its text."""
    (point,) = run.points(listed(from_torch(weight), None, None), [tokens], False, *_gpu())
    chosen = selection.choose(point.problem).config
    config = next(each for each in gemm.candidates(point) if each != chosen)
    tuned.keep("gemm", point.gpu, {point.key: ((tokens, astuple(config)),)})
    return str(config)


def _gpu():
    facts = run.current_gpu()
    return facts.arch, facts.sm_count, facts.name


def test_the_file_serves_other_processes_unless_it_is_ignored(cache):
    (weight, _) = _weights()
    forced = _forced(cache, weight, 64)
    code = (
        "import json, torch, isogemm\n"
        f"weight = torch.ones({SHAPES[0]}, dtype=torch.bfloat16, device='cuda')\n"
        f"x = torch.ones(64, {SHAPES[0][1]}, dtype=torch.bfloat16, device='cuda')\n"
        "with isogemm.dispatch_log() as log: out = isogemm.linear(x, weight)\n"
        "print(json.dumps([log[0].config, out.float().sum().item()]))"
    )

    def served(**settings):
        given = {**os.environ, "PYTHONPATH": str(SOURCE), "XDG_CACHE_HOME": str(cache), **settings}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=given)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    config, total = served()
    ignored, same_total = served(ISOGEMM_TUNED="0")
    assert config == forced != ignored
    assert total == same_total


def test_a_corrupt_file_changes_nothing(cache):
    (weight, _) = _weights()
    forced = _forced(cache, weight, 64)
    assert _served(weight, 64) == forced
    tuned.path(torch.cuda.get_device_name()).write_text("{")
    tuned._tables.cache_clear()
    clear_caches()
    with pytest.warns(RuntimeWarning, match="isogemm ignores"):
        assert _served(weight, 64) != forced


def test_the_time_is_bounded(cache):
    report = isogemm.tune(_weights()[0], seconds=1e-3)
    assert report.rows == ()
    assert report.unvisited == len(run.TOKENS)
    assert report.path is None


def test_a_gated_mlp_is_tuned_for_what_it_runs(cache):
    model = isogemm.nn.MLP(128, 256, activation="swiglu", device=DEVICE, dtype=torch.bfloat16)
    x = make_data("normal", (300, 128), seed=1, dtype=torch.bfloat16, device=DEVICE)
    before = model(x)
    report = isogemm.tune(model, tokens=[300], backward=True)
    assert {row.point.kind for row in report.rows} == {"gated", "linear", "dx", "dw", "gated gradient"}
    assert_bitwise_equal(model(x), before, "tuning changes no bit")
