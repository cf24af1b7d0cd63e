"""What a deferred tensor is to the code that reads it."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
from deferring import assert_as_plain, assert_same, leaves_of, square_leaves, steps_of

from isogemm.fusion import autofuse
from isogemm.fusion.deferred import Deferred


def test_metadata_computes_nothing():
    leaves = leaves_of()
    with autofuse() as report:
        z = torch.relu(leaves["x"] @ leaves["w"])
        assert (z.shape, z.size(), z.size(0), z.ndim, z.dim(), len(z)) == ((6, 5), (6, 5), 6, 2, 2, 6)
        assert (z.dtype, z.device, z.requires_grad) == (torch.float32, torch.device("cpu"), True)
        assert (z.numel(), torch.numel(z), z.is_cuda, z.element_size()) == (30, 30, False, 4)
        assert torch.is_tensor(z)
        assert isinstance(z, torch.Tensor)
        assert z.is_floating_point()
        hash(z)
        assert type(z) is Deferred
    assert report.fused.total() == 1


def _roundtrip(z):
    buffer = io.BytesIO()
    torch.save(z, buffer)
    buffer.seek(0)
    return torch.load(buffer)


LOOKS = {
    "repr": repr,
    "str": str,
    "item": lambda z: z[0, 0].item(),
    "tolist": torch.Tensor.tolist,
    "numpy": lambda z: z.detach().numpy(),
    "format": lambda z: f"{z}",
    "bool": lambda z: bool((z == z).all()),
    "iteration": list,
    "contains": lambda z: 0.5 in z,
    "data_ptr": lambda z: z.data_ptr(),
    "storage": lambda z: z.untyped_storage(),
    "data": lambda z: z.data,
    "detach": lambda z: z.detach(),
    "view": lambda z: z.view(-1),
    "index": lambda z: z[..., 0],
    "stride": lambda z: z.stride(),
    "is_contiguous": lambda z: z.is_contiguous(),
    "grad_fn": lambda z: z.grad_fn.name(),
    "is_leaf": lambda z: z.is_leaf,
    "version": lambda z: z._version,
    "grad": lambda z: z.retain_grad(),
    "hook": lambda z: z.register_hook(lambda grad: grad),
    "deepcopy": lambda z: copy.deepcopy(z.detach()),
    "copy": copy.copy,
    "pickle": lambda z: pickle.loads(pickle.dumps(z.detach())),
    "save": _roundtrip,
    "cat": lambda z: torch.cat([z, z]),
    "stack": lambda z: torch.stack((z, z)),
    "out": lambda z: torch.add(z.detach(), 1, out=torch.empty(6, 5)),
    "equality": lambda z: z == z,
    "compare": lambda z: torch.equal(z, z),
    "to": lambda z: z.to(torch.float64),
    "in place": lambda z: z.add_(1),
    "setitem": lambda z: z.__setitem__(0, 1.0),
    "parameter": lambda z: torch.nn.Parameter(z.detach()),
    "operator": lambda z: torch.ops.aten.mul.Tensor(z, z),
    "backward": lambda z: z.sum().backward(),
    "autograd": lambda z: torch.autograd.backward(z.sum()),
    "dlpack": lambda z: torch.from_dlpack(z.detach()),
    "new parameter": torch.nn.Parameter,
    "requires_grad_": lambda z: z.requires_grad_(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_looking_makes_it_plain(look):
    leaves = leaves_of()
    expected = torch.relu(leaves["x"] @ leaves["w"] + leaves["b"])
    with autofuse() as report:
        z = torch.relu(leaves["x"] @ leaves["w"] + leaves["b"])
        identity = id(z)
        assert type(z) is Deferred
        LOOKS[look](z)
        assert type(z) is torch.Tensor
    assert id(z) == identity
    assert "_node" not in z.__dict__
    assert z.requires_grad
    assert z.grad_fn is not None
    assert steps_of(report) == [("bias", "relu")]
    if look not in ("in place", "setitem"):
        torch.testing.assert_close(z, expected)


def test_attributes_and_weak_references_stay():
    leaves = leaves_of()
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        z.tag = "mine"
        reference, key = weakref.ref(z), {z: 1}
        z.sum()
    assert type(z) is torch.Tensor
    assert (z.tag, reference() is z, key[z]) == ("mine", True, 1)


def test_retain_grad_and_hooks():
    leaves = leaves_of()
    with autofuse():
        z = leaves["x"] @ leaves["w"] + leaves["b"]
        z.retain_grad()
        seen = []
        z.register_hook(seen.append)
        torch.relu(z).sum().backward()
    assert torch.equal(z.grad, (z > 0).float())
    assert torch.equal(seen[0], z.grad)


@pytest.mark.parametrize(
    "ask",
    [
        lambda z, loss: z.retain_grad(),
        lambda z, loss: z.register_hook(print),
        lambda z, loss: torch.autograd.grad(loss, z),
        lambda z, loss: torch.autograd.grad(loss, inputs=[z]),
        lambda z, loss: torch.autograd.grad(loss, iter([z])),
        lambda z, loss: loss.backward(inputs=[z]),
        lambda z, loss: loss.backward(inputs={"z": z}.values()),
        lambda z, loss: loss.backward(None, None, False, iter([z])),
        lambda z, loss: torch.autograd.backward(loss, inputs=[z]),
        lambda z, loss: torch.autograd.backward([loss], inputs=z),
        lambda z, loss: torch.autograd.graph.register_multi_grad_hook([z], print),
    ],
)
def test_a_gradient_that_a_fused_step_lost_raises(ask):
    leaves = leaves_of()
    for is_read in (False, True):
        with autofuse():
            z = leaves["x"] @ leaves["w"] + leaves["b"]
            loss = torch.relu(z).square().sum()
            if is_read:
                z.sum()
            with pytest.raises(RuntimeError, match="look at the product before that step"):
                ask(z, loss)
    with autofuse():
        z = leaves["x"] @ leaves["w"] + leaves["b"]
        z.sum()
        ask(z, torch.relu(z).square().sum())


def test_a_parameter_is_one():
    leaves = leaves_of()
    module = torch.nn.Module()
    with autofuse():
        module.weight = torch.nn.Parameter(leaves["x"] @ leaves["w"])
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        ((name, parameter),) = each.named_parameters()
        assert name == "weight"
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert_same(parameter.detach(), (leaves["x"] @ leaves["w"]).detach())
    expected = module.weight.detach() - 1
    module.weight.sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert_same(module.weight.detach(), expected)


def test_torch_is_left_as_it_is():
    """No name of torch's is replaced, in a process that has fused."""
    program = """
import sys, torch, torch.utils.checkpoint
def names():
    roots = torch, torch.nn, torch.nn.Parameter, torch.Tensor, torch.autograd.Function, torch.autograd.function
    more = [module for name, module in sys.modules.items() if name.startswith("torch._functorch")]
    return {(str(root), name): id(value) for root in (*roots, *more) for name, value in vars(root).items()}
x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
import isogemm
torch.relu(x @ w).sum().backward()
before = names()
with isogemm.autofuse():
    torch.relu(x @ w).sum().backward()
    torch.nn.Parameter(x @ w)
changed = {key for key, value in names().items() if before.get(key, value) != value}
assert not changed, changed
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_memory_is_not_given_away_before_it_is_there():
    leaves = {name: leaf.detach() for name, leaf in leaves_of().items()}
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        with pytest.raises(RuntimeError, match="data pointer"):
            torch.utils.dlpack.to_dlpack(z)
        assert torch.from_dlpack(z).data_ptr() == z.data_ptr()
    assert_same(z, leaves["x"] @ leaves["w"])


def test_past_torch_functions():
    """C++ code calls operators this way."""

    def compute(x, w, b, **_):
        y = torch.relu(x @ w + b)
        with torch._C.DisableTorchFunction():
            more = y + 1
        return more * y

    leaves = leaves_of()
    with autofuse(), torch.no_grad():
        fused = compute(**leaves)
    assert_same(fused, compute(**leaves).detach())
    assert_as_plain(compute)


def test_autograd_backward_of_a_deferred_tensor():
    leaves = leaves_of()
    with autofuse():
        z = torch.relu(leaves["x"] @ leaves["w"])
        torch.autograd.backward(z, torch.ones(6, 5))
    expected = torch.autograd.grad(torch.relu(leaves["x"] @ leaves["w"]).sum(), leaves["w"])
    assert_same(leaves["w"].grad, expected[0])


def test_double_backward():
    def compute(x, w, b, **_):
        y = torch.tanh(x @ w + b).square().sum()
        (gradient,) = torch.autograd.grad(y, w, create_graph=True)
        return gradient * 2

    assert_as_plain(compute)


def test_results_are_their_own():
    leaves = square_leaves()
    kept = []
    for number in range(6):
        with autofuse():
            ys = [torch.relu(leaves["x"] @ leaves["w"] + number * leaves["b"]) for _ in range(3)]
            for y in ys:
                assert "tag" not in y.__dict__
                y.tag = number
        kept += [(y, y.clone()) for y in ys]
    assert len({y.data_ptr() for y, _ in kept}) == len(kept)
    assert all(torch.equal(y, value) for y, value in kept)
    assert [y.tag for y, _ in kept] == [number for number in range(6) for _ in range(3)]


def test_a_value_that_somebody_else_holds_stays_what_it_is(monkeypatch):
    from isogemm.gemm import api

    leaves = square_leaves()
    computed, real = [], api.matmul_fused

    def matmul_fused(*args, **kwargs):
        computed.append(real(*args, **kwargs))
        return computed[-1]

    monkeypatch.setattr(api, "matmul_fused", matmul_fused)
    for _ in range(3):
        with autofuse():
            torch.relu(leaves["x"] @ leaves["w"]).sum()
    assert all(type(each) is torch.Tensor for each in computed)


def test_unread_results_do_not_pile_up():
    leaves = square_leaves()
    block = autofuse()
    with block:
        z = leaves["x"] @ leaves["w"]
        for _ in range(1000):
            torch.relu(z)
        assert len(block._mode.ledger._refs) < 200
    assert not block.report.fused


def test_hooks_are_not_held_after_the_block():
    class Pack:
        def __call__(self, x):
            return x

    leaves = square_leaves()
    pack = Pack()
    watched = weakref.ref(pack)
    with torch.autograd.graph.saved_tensors_hooks(pack, pack), autofuse() as report:
        torch.relu(leaves["x"] @ leaves["w"]).sum()
    assert report.fused
    del pack
    gc.collect()
    assert watched() is None
