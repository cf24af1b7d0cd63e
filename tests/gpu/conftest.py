"""All of this folder needs a CUDA device."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from profiling import device_work

from isogemm.core import env
from isogemm.core.eager import KnownCalls
from isogemm.core.plan import Cache
from isogemm.tiny import api, configs, op
from isogemm.verify.errors import assert_no_worse_than_torch

MOST_RESERVED = 2 * 2**30  # bytes that a process keeps between tests


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch.cuda is not available; on a GPU machine run make gpu-test")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def default_settings(monkeypatch):
    """The tiny path on, what was tuned here ignored, and torch's fp32 precision as it was once the test is over."""
    monkeypatch.setattr(env, "settings", replace(env.settings, disable_tiny=False, log=False, tuned=False))
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.fixture(autouse=True)
def share_memory():
    """Give memory back that a test needed: other processes share the GPU."""
    yield
    if torch.cuda.memory_reserved() > MOST_RESERVED:
        torch.cuda.empty_cache()


@pytest.fixture
def through(monkeypatch):
    """through(kernel): from now on that kernel serves all that the tiny kernels can, whatever was measured."""

    def force(kernel):
        monkeypatch.setattr(configs, "gate", lambda problem: kernel)
        monkeypatch.setattr(op, "served", Cache())
        monkeypatch.setattr(api, "_known", KnownCalls())
        monkeypatch.setattr(op, "_warned", set())

    return force


@pytest.fixture(params=configs.KERNELS)
def forced(request, through):
    """Each kernel in turn behind isogemm.bmm; its name."""
    through(request.param)
    return request.param


@pytest.fixture(scope="session")
def launch():
    """launch(kernel, a, b): the kernel itself, past the gate, on a poisoned output."""

    def launch(kernel, a, b, precision="ieee", config=None):
        from isogemm.tiny.kernels import launch_bmm

        problem = op.problem_of(a, b, precision)
        assert configs.eligible(problem) == ""
        shape = (problem.batch, problem.m, problem.n)
        out = torch.full(shape, torch.nan, dtype=a.dtype, device=a.device)
        launch_bmm(out, a, b, problem, config or configs.choose(problem, kernel))
        return out

    return launch


@pytest.fixture(scope="session")
def exact():
    """exact(a, b): the product in fp64, and |A| |B|, the natural size of an element's rounding error."""

    def exact(a, b):
        a, b = a.detach().double(), b.detach().double()
        return torch.matmul(a, b), torch.matmul(a.abs(), b.abs())

    return exact


@pytest.fixture(scope="session")
def assert_parity(exact):
    """The issue's bounds: 1e-3 absolute and 1e-4 relative for f32, and twice torch's error plus one ulp."""

    def assert_parity(actual, a, b):
        reference, scale = exact(a, b)
        assert int(actual.isnan().sum()) == 0, "NaN: poison was left or read"
        batch = reference.shape[0]
        theirs = torch.bmm(a.detach().expand(batch, -1, -1), b.detach().expand(batch, -1, -1))
        if actual.dtype == torch.float32:
            error, rms = (actual.double() - reference).abs(), reference.square().mean().sqrt()
            assert bool((error <= 1e-3).all())
            assert bool((error <= 1e-4 * reference.abs().clamp_min(rms)).all())
        assert_no_worse_than_torch(actual, theirs, reference, scale=scale)

    return assert_parity


@pytest.fixture(scope="session")
def on_device():
    """profiling.device_work, where torch's profiler works."""
    x = torch.ones(64, device="cuda")
    x.relu()
    if len(device_work(x.relu)) != 1:
        pytest.skip("the profiler sees no kernels here")
    return device_work
