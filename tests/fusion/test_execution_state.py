"""What a result depends on besides its operands: grad mode, autocast, checkpoints, transforms, captures."""

import pytest
import torch
import torch.nn.functional as F
from deferring import assert_as_plain, assert_same, leaves_of, steps_of
from torch.utils.checkpoint import checkpoint

from isogemm.fusion import autofuse, execution_state


def test_grad_mode_is_that_of_the_call():
    leaves = leaves_of()
    with autofuse():
        with torch.no_grad():
            without = leaves["x"] @ leaves["w"]
            assert not without.requires_grad
        tracked = torch.relu(leaves["x"] @ leaves["w"])
        assert tracked.requires_grad
        with torch.no_grad():
            tracked.sum()
            after = torch.relu(without)
            mixed = torch.sigmoid(leaves["x"] @ leaves["w"] + leaves["b"])
            with torch.enable_grad():
                enabled = mixed + leaves["r"]
    assert not without.requires_grad
    assert not after.requires_grad
    assert not mixed.requires_grad
    assert tracked.grad_fn is not None
    assert_same(torch.autograd.grad(enabled.sum(), leaves["r"])[0], torch.ones(6, 5))


def test_step_in_another_grad_mode():
    leaves = leaves_of()
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        with torch.no_grad():
            y = torch.relu(z)
    assert z.requires_grad
    assert not y.requires_grad


def test_inference_mode():
    leaves = leaves_of()
    with autofuse() as report:
        z = leaves["x"] @ leaves["w"]
        with torch.inference_mode():
            inside = torch.relu(leaves["x"] @ leaves["w"])
            assert inside.is_inference()
            z.add(1)
            assert not z.is_inference()
            made_inside = leaves["x"] * 2
        with torch.no_grad():
            torch.relu(made_inside @ leaves["w"])
    assert z.requires_grad
    reasons = [entry.reason for entry in report.left]
    assert "changes of an input cannot be seen in inference mode; torch.no_grad() would do" in reasons
    assert "an operand is no plain strided tensor" in reasons


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside):
    leaves = leaves_of()

    def compute():
        with torch.autocast("cpu", torch.bfloat16):
            z = F.relu(F.linear(leaves["x"], leaves["w"].t(), leaves["b"]))
            if inside:
                z = z + leaves["r"].bfloat16()
            wide = leaves["x"] @ leaves["w"] + leaves["b"]
        return z, wide

    expected = compute()
    with autofuse() as report:
        results = compute()
    for result, plain in zip(results, expected, strict=True):
        assert result.dtype == plain.dtype
        torch.testing.assert_close(result, plain, atol=0.05, rtol=0.02)  # bfloat16, of values near 4
        assert_same(*(torch.autograd.grad(each.sum(), leaves["b"], retain_graph=True)[0] for each in (result, plain)))
    assert ("bias", "relu", "residual") in steps_of(report) if inside else ("bias", "relu") in steps_of(report)
    assert any("float32 and the product bfloat16" in entry.reason for entry in report.left)


def test_autocast_left_before_the_next_step():
    leaves = leaves_of()
    with autofuse():
        with torch.autocast("cpu", torch.bfloat16):
            z = leaves["x"] @ leaves["w"]
        y = torch.relu(z)
    assert (z.dtype, y.dtype) == (torch.bfloat16, torch.bfloat16)


def test_checkpoint():
    def body(x, w, b):
        return torch.relu(torch.relu(x @ w + b) @ w.t())

    report = assert_as_plain(lambda x, w, b, **_: checkpoint(body, x @ (w @ w.t()), w, b, use_reentrant=False) * 2)
    assert not report.fused
    fuse = autofuse()
    assert_as_plain(lambda x, w, b, **_: checkpoint(fuse(body), x, w, b, use_reentrant=False))
    assert set(steps_of(fuse.report)) == {("bias", "relu"), ("relu",)}


def test_reentrant_checkpoint():
    def gradients(compute):
        leaves = leaves_of()
        hidden = compute(leaves["x"] @ leaves["w"] + leaves["b"])
        hidden.sum().backward()
        return [leaves[name].grad for name in ("x", "w", "b")]

    def run(z):
        return checkpoint(lambda z: torch.relu(z @ z.t()), z, use_reentrant=True)

    expected = gradients(run)
    with autofuse():
        found = gradients(run)
    for left, right in zip(found, expected, strict=True):
        assert_same(left, right)


def test_checkpoint_reads_what_was_deferred_before_it():
    def compute(x, w, b, **_):
        z = torch.relu(x @ w + b)
        return checkpoint(lambda w: torch.sigmoid(z @ w.t()) * z.sum(), w, use_reentrant=False)

    assert_as_plain(compute)


def test_transforms():
    leaves = {name: leaf.detach() for name, leaf in leaves_of().items()}
    x, w = leaves["x"], leaves["w"]

    def loss(w):
        return torch.relu(x @ w).sum()

    expected = torch.func.grad(loss)(w), torch.vmap(lambda row: torch.relu(row[None] @ w))(x)
    jvp = torch.func.jvp(loss, (w,), (torch.ones_like(w),))
    with autofuse():
        z = torch.relu(x @ w)
        results = torch.func.grad(loss)(w), torch.vmap(lambda row: torch.relu(row[None] @ w))(x)
        inside = torch.vmap(lambda row: row + z.sum())(x)
        fused_jvp = torch.func.jvp(loss, (w,), (torch.ones_like(w),))
    for result, plain in zip((*results, *fused_jvp), (*expected, *jvp), strict=True):
        assert_same(result, plain)
    assert_same(inside, x + torch.relu(x @ w).sum())


@pytest.mark.parametrize(("stream", "asks"), [((0, 0, 1), False), ((7, 0, 1), True)])
def test_capture_is_asked_of_streams_that_can_be(monkeypatch, stream, asks):
    asked = []
    monkeypatch.setattr(execution_state, "_current_stream", lambda device: stream)
    monkeypatch.setattr(execution_state, "_is_capturing", lambda: asked.append(True) or True)
    now = execution_state.ExecutionState._make(execution_state.read(0))
    assert (now.device, now.stream, now.capturing, bool(asked)) == (0, stream, asks, asks)
    assert execution_state.read(0) == now
    assert execution_state.read(-1) != now
    inside = (now.hooks, now.backward, now.forward_ad, asks)
    outside = (now.hooks, now.backward, now.forward_ad, not asks)
    assert not execution_state.obstacle(inside, now)
    assert "capture began inside the block" in execution_state.obstacle(outside, now)


def test_dispatch_modes():
    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **(kwargs or {}))

    leaves = leaves_of()
    with Count() as plain:
        torch.relu(leaves["x"] @ leaves["w"]).sum()
    with autofuse() as report:
        z = torch.relu(leaves["x"] @ leaves["w"])
        with Count() as count:
            inside = torch.relu(leaves["x"] @ leaves["w"])
            total = z.sum()
        assert count.calls == plain.calls  # and what was called before it is not its business
    assert_same(z, inside)
    assert_same(total, inside.sum())
    assert "a dispatch mode or a tracer listens" in {entry.reason for entry in report.left}


@pytest.mark.parametrize("end", [lambda z: z.view(-1), lambda z: z * 2, lambda z: z.sum(), lambda z: z])
def test_block_inside_a_checkpoint(end):
    """Which leaves the block by an exception when it has recomputed enough."""
    torch.manual_seed(0)
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    x = torch.randn(4, 8, requires_grad=True)

    def layer(x):
        return end(second(F.gelu(first(x))))

    expected = torch.autograd.grad(layer(x).sum(), [x, *first.parameters()])
    with autofuse():
        actual = torch.autograd.grad(
            checkpoint(autofuse()(layer), x, use_reentrant=False).sum(), [x, *first.parameters()]
        )
    outside = torch.autograd.grad(checkpoint(autofuse()(layer), x, use_reentrant=False).sum(), [x, *first.parameters()])
    for got, other, same in zip(actual, outside, expected, strict=True):
        assert_same(got, same)
        assert_same(other, same)
