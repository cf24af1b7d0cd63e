"""isogemm's own functions and modules inside of a block run as outside: a block fuses plain torch code alone."""

import pytest
import torch

import isogemm
from isogemm.fusion import autofuse, lazy
from isogemm.fusion.lazy import OWN
from isogemm.gemm.api import mlp
from isogemm.verify.encoder_reference import EncoderShape, encoder_parameters, encoder_tensors


def layer_parameters():
    tensors = encoder_tensors(EncoderShape(1, 5, 8, 2, 16))
    return encoder_parameters({name: each.requires_grad_() for name, each in tensors.items()})


def running(d):
    return tuple(isogemm.RunningStatistics(torch.zeros(d), torch.ones(d), None, 0.1) for _ in range(2))


CALLS = {
    "mm": lambda x, w: isogemm.mm(x, w),
    "matmul": lambda x, w: isogemm.matmul(x, w),
    "linear": lambda x, w: isogemm.linear(x, w),
    "linear, fused": lambda x, w: isogemm.linear(x, w, w[0], activation="gelu", residual=x),
    "matmul_fused": lambda x, w: isogemm.matmul_fused(x, w, bias=w[0], activation="silu"),
    "mlp": lambda x, w: mlp(x, w, w, activation="relu"),
    "bmm": lambda x, w: isogemm.bmm(x[None], w[None]),
    "encoder_layer": lambda x, w: isogemm.encoder_layer(x, layer_parameters(), nhead=2),
}


@pytest.fixture
def seen(monkeypatch):
    """The functions that blocks were shown."""
    found = []
    original = lazy._Mode.__torch_function__

    def watched(mode, function, *args):
        found.append(function)
        return original(mode, function, *args)

    monkeypatch.setattr(lazy._Mode, "__torch_function__", watched)
    return found


def run(call, block, is_deferred):
    torch.manual_seed(0)
    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    before = torch.randn(8, 8, requires_grad=True)
    with isogemm.dispatch_log() as log:
        if block is None:
            y = call(x @ before if is_deferred else x, w)
        else:
            with block:
                y = call(x @ before if is_deferred else x, w)
    grads = torch.autograd.grad(y.square().sum(), [x, w, before], allow_unused=True)
    return y, grads, [str(entry) for entry in log]


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_the_same_as_outside(name, is_deferred):
    y, grads, log = run(CALLS[name], None, is_deferred)
    block = autofuse()
    y_inside, grads_inside, log_inside = run(CALLS[name], block, is_deferred)
    assert log_inside == log
    assert torch.equal(y_inside, y)
    for left, right in zip(grads_inside, grads, strict=True):
        assert left is right is None or torch.equal(left, right)
    assert not block.report.fused
    assert block.report.left.total() == is_deferred


def test_a_block_is_shown_the_call_alone(seen):
    x, w = torch.randn(5, 8), torch.randn(8, 8)
    bias, params = w[0], layer_parameters()
    calls = {
        isogemm.mm: lambda: isogemm.mm(x, w),
        isogemm.matmul: lambda: isogemm.matmul(x, w),
        isogemm.linear: lambda: isogemm.linear(x, w, bias, activation="gelu"),
        isogemm.matmul_fused: lambda: isogemm.matmul_fused(x, w, bias=bias, activation="silu"),
        mlp: lambda: mlp(x, w, w, activation="relu"),
        isogemm.bmm: lambda: isogemm.bmm(w.view(1, 8, 8), w.view(1, 8, 8)),
        isogemm.encoder_layer: lambda: isogemm.encoder_layer(x, params, nhead=2),
    }
    assert set(calls) == set(OWN)
    with autofuse():
        for function, call in calls.items():
            seen.clear()
            call()
            assert [each for each in seen if each is not torch.Tensor.view] == [function]


@pytest.mark.parametrize(
    "module", [isogemm.nn.Linear(8, 8), isogemm.nn.Linear(8, 8, activation="gelu"), isogemm.nn.MLP(8, 16)]
)
def test_a_module_shows_a_block_one_call(seen, module):
    x = torch.randn(5, 8)
    plain = module(x)
    with autofuse():
        inside = module(x)
    assert torch.equal(inside, plain)
    assert len(seen) == 1


def test_changed_statistics_are_read_before():
    x, w = torch.randn(3, 5, 8), torch.randn(8, 8)
    expected = torch.relu(running(8)[0].mean[None] @ w + 1)
    statistics = running(8)
    mean = statistics[0].mean
    with autofuse() as report:
        z = mean[None] @ w
        isogemm.encoder_layer(x, layer_parameters(), nhead=2, norm="batch_norm", running=statistics)
        y = torch.relu(z + 1)
    assert mean.any()
    torch.testing.assert_close(y, expected)
    assert [entry.reason for entry in report.left] == ["isogemm.encoder_layer changes an operand"]


def test_other_modes_see_a_call_as_one():
    shown = []

    class Listening(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            shown.append(function)
            return function(*args, **(kwargs or {}))

    x, w = torch.randn(5, 8), torch.randn(8, 8)
    with Listening(), autofuse():
        isogemm.linear(x, w, activation="gelu")
    assert shown == [isogemm.linear]
