"""isogemm.autofuse: plain torch code, deferred and fused, against itself without."""

import contextlib
import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.fusion import autofuse, deferred
from isogemm.fusion.deferred import Deferred


def _leaves(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (6, 8), "w": (8, 5), "w3": (8, 5), "b": (5,), "col": (6, 1), "r": (6, 5), "s": ()}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def _gradients(result, leaves):
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
    return torch.autograd.grad((result * weights).sum(), list(leaves.values()), allow_unused=True)


def _same(left, right):
    if left is None or right is None:
        assert left is right
    else:
        torch.testing.assert_close(left, right)


def _compare(compute, dtype=torch.float32):
    """The report of `compute` fused, having checked values and gradients against the plain run."""
    leaves = _leaves(dtype)
    with autofuse() as report:
        fused = compute(**leaves)
    assert type(fused) is torch.Tensor
    plain = compute(**leaves)
    assert fused.dtype == plain.dtype
    _same(fused, plain)
    for left, right in zip(_gradients(fused, leaves), _gradients(plain, leaves), strict=True):
        _same(left, right)
    return report


def _steps(report):
    return [entry.steps for entry in report.fused.elements()]


SPELLINGS = {
    "operator": (lambda x, w, b, **_: torch.relu(x @ w + b), ["bias", "relu"]),
    "reflected": (lambda x, w, b, **_: torch.relu(b + x @ w), ["bias", "relu"]),
    "method": (lambda x, w, b, **_: x.mm(w).add(b).relu(), ["bias", "relu"]),
    "matmul": (lambda x, w, b, **_: F.relu(torch.matmul(x, w) + b), ["bias", "relu"]),
    "keywords": (lambda x, w, b, **_: torch.matmul(input=x, other=w).add(other=b).sigmoid(), ["bias", "sigmoid"]),
    "linear": (lambda x, w, b, **_: F.gelu(F.linear(x, w.t(), b)), ["bias", "gelu"]),
    "gelu_tanh": (lambda x, w, b, **_: F.gelu(F.linear(x, w.t(), bias=b), approximate="tanh"), ["bias", "gelu_tanh"]),
    "addmm": (lambda x, w, b, **_: torch.addmm(b, x, w).tanh(), ["bias", "tanh"]),
    "addmm scaled": (lambda x, w, r, **_: r.addmm(x, w, beta=0.5, alpha=3).relu(), ["alpha", "c", "relu"]),
    "residual": (lambda x, w, r, **_: x @ w + r, ["residual"]),
    "residual first": (lambda x, w, r, **_: r + x @ w, ["residual"]),
    "minus": (lambda x, w, r, **_: x @ w - r, ["c"]),
    "from": (lambda x, w, r, **_: r - x @ w, ["alpha", "residual"]),
    "add alpha": (lambda x, w, r, **_: torch.add(x @ w, r, alpha=2), ["c"]),
    "alpha add": (lambda x, w, r, **_: torch.add(r, x @ w, alpha=2), ["alpha", "residual"]),
    "rsub": (lambda x, w, r, **_: torch.rsub(x @ w, r), ["alpha", "residual"]),
    "scalar": (lambda x, w, b, **_: 2 * (x @ w) / 4 + b, ["alpha", "bias"]),
    "negative": (lambda x, w, **_: -(x @ w), ["alpha"]),
    "scalar tensor": (lambda x, w, s, **_: (x @ w) * s, ["alpha"]),
    "scales": (lambda x, w, b, col, **_: (x @ w) * col * b, ["row_scale", "col_scale"]),
    "column": (lambda x, w, col, **_: F.silu(x @ w + col), ["column bias", "silu"]),
    "column linear": (lambda x, w, col, **_: F.silu(F.linear(x, w.t()) + col), ["column bias", "silu"]),
    "row": (lambda x, w, b, **_: x @ w + b[None], ["bias"]),
    "both": (lambda x, w, b, r, **_: F.leaky_relu(x @ w + r + b, 0.2) + r, ["bias", "c", "leaky_relu", "residual"]),
    "swiglu": (lambda x, w, w3, **_: F.silu(x @ w) * (x @ w3), ["swiglu"]),
    "geglu": (lambda x, w, w3, b, **_: (x @ w3 + b) * F.gelu(F.linear(x, w.t(), b)), ["bias", "bias_up", "geglu"]),
    "reglu": (lambda x, w, w3, r, **_: torch.relu(F.linear(x, w.t())) * (x @ w3) + r, ["reglu", "residual"]),
    "relu2": (lambda x, w, **_: torch.square(F.relu(x @ w)), ["relu2"]),
    "power": (lambda x, w, **_: F.relu(x @ w) ** 2, ["relu2"]),
    "in place": (lambda x, w, b, **_: F.relu((x @ w).add_(b), inplace=True), ["bias", "relu"]),
    "augmented": (lambda x, w, b, **_: _augmented(x @ w, b).relu_(), ["bias", "relu"]),
    "eval dropout": (lambda x, w, b, **_: F.dropout(F.relu(x @ w + b), 0.5, training=False), ["bias", "relu"]),
    "batched": (lambda x, w, b, **_: torch.relu(x.view(2, 3, 8) @ w + b), ["bias", "relu"]),
    "transposed": (lambda x, w, **_: torch.relu(w.t() @ x.t()), ["relu"]),
}  # fmt: skip


def _augmented(z, b):
    z += b
    return z


def _silu(x, w, b, **_):
    z = x @ w + b
    return z * torch.sigmoid(z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling, dtype):
    compute, steps = SPELLINGS[spelling]
    leaves = _leaves(dtype)
    with isogemm.dispatch_log() as log, autofuse() as report:
        fused = compute(**leaves)
        assert type(fused) is Deferred
    assert _steps(report) == [tuple(steps)]
    assert not report.left
    if dtype is not torch.float64:
        assert len(log) == 1
    if dtype is torch.bfloat16:  # rounds once where the plain code rounds at each step
        exact = compute(**_leaves(torch.float64))
        plain = compute(**leaves)
        assert fused.dtype == plain.dtype
        assert (fused - exact).abs().max() <= 2 * (plain - exact).abs().max() + 2**-8 * exact.abs().max()
    else:
        _compare(compute, dtype)


def test_silu_by_hand():
    assert _steps(_compare(_silu)) == [("bias", "silu")]


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda x, w, **_: x @ w, "the block ended"),
        (lambda x, w, **_: (x @ w).softmax(-1), "softmax reads it"),
        (lambda x, w, **_: (x @ w) + 1, "a number is added"),
        (lambda x, w, **_: (x @ w)[1:], "__getitem__ reads it"),
        (lambda x, w, r, **_: (x @ w) * r, "the factor is neither a scalar, a row nor a column"),
        (lambda x, w, b, **_: x @ w - b, "the addend is a second, a late or a scaled bias"),
        (lambda x, w, b, **_: F.dropout(x @ w, 0.0) / b, "it is divided by a tensor"),
        (lambda x, w, r, **_: r / (x @ w), "something is divided by it"),
        (lambda x, w, **_: (x @ w) * 0.0, "the factor is 0.0"),
        (lambda x, w, r, **_: r.addmm(x, w, beta=0).relu(), "the addend's factor is 0"),
        (lambda x, w, s, **_: (x @ w) + s, "the addend is neither a bias nor of its shape"),
        (lambda x, w, r, **_: (x @ w).double() + r, "double reads it"),
        (lambda x, w, r, **_: x @ w + r.double(), "the addend is float64 and the product float32"),
        (lambda x, w, **_: (x @ w) ** 2, "it is squared, and is not a relu"),
        (lambda x, w, **_: x[0] @ w, "the left operand has 1 dimension: 2 or more are fused"),
        (lambda x, w, **_: x @ w.expand(2, 8, 5), "the right operand has 3 dimensions: 2 are fused"),
        (lambda x, w, b, **_: F.rrelu(x @ w), "rrelu reads it"),
    ],
)
def test_left(compute, reason):
    report = _compare(compute)
    assert [entry.reason for entry in report.left.elements()] == [reason]
    assert not report.fused


def test_a_product_alone_has_torchs_bits():
    leaves = _leaves()
    x, w, b = leaves["x"], leaves["w"], leaves["b"]
    with autofuse():
        results = x @ w, F.linear(x, w.t(), b), torch.addmm(b, x, w)
    expected = x @ w, F.linear(x, w.t(), b), torch.addmm(b, x, w)
    assert all(map(torch.equal, results, expected))
    assert results[1].grad_fn.name() == expected[1].grad_fn.name()


def test_operands_by_keyword():
    _compare(lambda x, w, w3, **_: torch.mul(F.silu(x @ w), other=x @ w3))
    _compare(lambda x, w, w3, **_: torch.add(input=x @ w, other=F.relu(x @ w3)))
    _compare(lambda x, w, b, **_: torch.relu(input=x @ w + b))


def test_a_chain_that_does_not_go_on_is_an_operand():
    report = _compare(lambda x, w, b, r, **_: torch.relu(torch.relu(x @ w + b) * r) @ w.t() + x)
    assert _steps(report) == [("bias", "relu"), ("residual",)]
    report = _compare(lambda x, w, b, r, **_: torch.relu(x @ w + b) * 3)
    assert _steps(report) == [("bias", "relu")]


def test_sum_of_two_products():
    report = _compare(lambda x, w, w3, **_: F.silu(x @ w) + x @ w3)
    assert _steps(report) == [("silu",), ("residual",)]


def test_powers():
    _compare(lambda x, w, r, **_: torch.relu(x @ w + 3) ** 2.0)
    _compare(lambda x, w, r, **_: torch.relu(x @ w) ** 3)
    _compare(lambda x, w, r, **_: torch.relu(x @ w) ** (r.detach() * 0 + 2))


def test_scalar_tensor_of_float32():
    scale = torch.tensor(0.3)
    x, w = torch.randn(4, 4).bfloat16(), torch.randn(4, 4).bfloat16()
    with autofuse() as report:
        y = (x @ w) * scale
    assert y.dtype == ((x @ w) * scale).dtype == torch.bfloat16
    torch.testing.assert_close(y, (x @ w) * scale)
    assert _steps(report) == [("alpha",)]


def test_errors_are_torchs():
    leaves = _leaves()
    with autofuse():
        for bad in (lambda: leaves["x"] @ leaves["x"], lambda: leaves["x"] @ leaves["w"].double()):
            with pytest.raises(RuntimeError):
                bad()
        with pytest.raises(RuntimeError):
            (leaves["x"] @ leaves["w"]) + torch.ones(3)
        with pytest.raises(TypeError):
            torch.matmul(leaves["x"])
        with pytest.raises(TypeError):
            torch.pow(torch.relu(leaves["x"] @ leaves["w"]))
        for training in (True, False):
            with pytest.raises(ValueError, match="dropout probability"):
                F.dropout(leaves["x"] @ leaves["w"], 2.0, training)
        with pytest.raises(TypeError):
            F.dropout(leaves["x"] @ leaves["w"], train=False)


# What a deferred tensor is to those who look at it.


def test_metadata_computes_nothing():
    leaves = _leaves()
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
    leaves = _leaves()
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
    assert _steps(report) == [("bias", "relu")]
    if look not in ("in place", "setitem"):
        torch.testing.assert_close(z, expected)


def test_attributes_and_weak_references_stay():
    leaves = _leaves()
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        z.tag = "mine"
        reference, key = weakref.ref(z), {z: 1}
        z.sum()
    assert type(z) is torch.Tensor
    assert (z.tag, reference() is z, key[z]) == ("mine", True, 1)


def test_retain_grad_and_hooks():
    leaves = _leaves()
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
        lambda z, loss: loss.backward(inputs=[z]),
    ],
)
def test_a_gradient_that_a_fused_step_lost_raises(ask):
    leaves = _leaves()
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
    leaves = _leaves()
    module = torch.nn.Module()
    with autofuse():
        module.weight = torch.nn.Parameter(leaves["x"] @ leaves["w"])
    for each in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        ((name, parameter),) = each.named_parameters()
        assert name == "weight"
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.is_leaf
        assert parameter.requires_grad
        _same(parameter.detach(), (leaves["x"] @ leaves["w"]).detach())
    expected = module.weight.detach() - 1
    module.weight.sum().backward()
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    _same(module.weight.detach(), expected)


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
    leaves = {name: leaf.detach() for name, leaf in _leaves().items()}
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        with pytest.raises(RuntimeError, match="data pointer"):
            torch.utils.dlpack.to_dlpack(z)
        assert torch.from_dlpack(z).data_ptr() == z.data_ptr()
    _same(z, leaves["x"] @ leaves["w"])


def test_long_chains():
    def compute(x, w, **_):
        z = x @ w
        for _ in range(2000):
            z = -z
        return z

    report = _compare(compute)
    assert set(_steps(report)) <= {("alpha",)}


# Used twice.


def test_used_twice():
    def compute(x, w, b, **_):
        z = x @ w + b
        return torch.relu(z) + z

    report = _compare(compute)
    assert _steps(report) == [("bias",)]
    assert not report.repeated


def test_a_step_after_its_operand_was_computed_reads_the_value():
    leaves = _leaves()
    with autofuse() as report:
        z = leaves["x"] @ leaves["w"]
        y = torch.relu(z)
        z.sum()
    assert torch.equal(y, torch.relu(z))
    assert not report.fused
    assert report.left.total() == 1


def test_an_operand_read_after_its_fused_step_is_computed_again():
    leaves = _leaves()
    with autofuse() as report:
        z = leaves["x"] @ leaves["w"]
        y = torch.relu(z)
        y.sum()
        z.sum()
    torch.testing.assert_close(y, torch.relu(z))
    assert _steps(report) == [("relu",)]
    assert [entry.reason for entry in report.repeated] == ["sum reads it"]
    assert "computed twice" in str(report)


def test_an_operand_changed_after_the_step():
    leaves = _leaves()
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        y = torch.relu(z)
        z.add_(1)
        before = torch.relu(z)
        z.mul_(2)
        z.data.add_(1)
    expected = leaves["x"] @ leaves["w"]
    torch.testing.assert_close(y, torch.relu(expected))
    torch.testing.assert_close(before, torch.relu(expected + 1))
    torch.testing.assert_close(z, (expected + 1) * 2 + 1)


def test_an_operand_of_an_operand_changed_after_the_step():
    leaves = _leaves()
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        y = torch.relu(z + leaves["b"])
        z.sum()
        z.data.add_(1)
    torch.testing.assert_close(y, torch.relu(leaves["x"] @ leaves["w"] + leaves["b"]))


def test_an_operand_changed_unseen_after_the_step():
    leaves = {name: leaf.detach() for name, leaf in _leaves().items()}
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        y = torch.relu(z)
        z.sum()
        _elsewhere(lambda: z.add_(1))
    torch.testing.assert_close(y, torch.relu(leaves["x"] @ leaves["w"]))


def _elsewhere(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_in_place_keeps_the_object_and_leaves_earlier_steps_alone():
    leaves = _leaves()
    with autofuse() as report:
        z = leaves["x"] @ leaves["w"]
        y = torch.sigmoid(z)
        same = z.add_(leaves["b"])
        assert same is z
        assert type(z) is Deferred
    expected = leaves["x"] @ leaves["w"]
    torch.testing.assert_close(y, torch.sigmoid(expected))
    torch.testing.assert_close(z, expected + leaves["b"])
    assert sorted(_steps(report)) == [("bias",), ("sigmoid",)]


def test_in_place_by_another_product():
    leaves = _leaves()
    with autofuse():
        z, other = leaves["x"] @ leaves["w"] + leaves["b"], leaves["x"] @ leaves["w3"]
        same = z.add_(other)
        assert same is z
    torch.testing.assert_close(z, leaves["x"] @ leaves["w"] + leaves["b"] + leaves["x"] @ leaves["w3"])


# Operands that change before the product is computed.

CHANGES = {
    "add_": lambda t: t.add_(1),
    "augmented": lambda t: _augmented(t, 1),
    "setitem": lambda t: t.__setitem__(0, 7.0),
    "view": lambda t: t.view(-1).mul_(2),
    "slice": lambda t: t[..., :1].zero_(),
    "data": lambda t: t.data.add_(1),
    "assigned data": lambda t: setattr(t, "data", torch.ones_like(t)),
    "detached": lambda t: t.detach().add_(1),
    "out": lambda t: torch.add(torch.ones_like(t), 1, out=t),
    "copy_": lambda t: t.copy_(torch.ones_like(t)),
    "foreach": lambda t: torch._foreach_add_([t], 1.0),
    "functional": lambda t: F.relu(t, inplace=True),
    "operator": lambda t: torch.ops.aten.add_.Tensor(t, 1),
    "init": lambda t: torch.nn.init.zeros_(t),
    "positional": lambda t: F.leaky_relu(t, 0.5, True),
    "batch_norm": lambda t: F.batch_norm(torch.randn(4, t.shape[-1]), _last(t), torch.ones(t.shape[-1]), training=True),
    "torch.batch_norm": lambda t: torch.batch_norm(
        torch.randn(4, t.shape[-1]), None, None, _last(t), torch.ones(t.shape[-1]), True, 0.1, 1e-5, False
    ),
    "batch_norm operator": lambda t: torch.ops.aten.native_batch_norm(
        torch.randn(4, t.shape[-1]), None, None, _last(t), torch.ones(t.shape[-1]), True, 0.1, 1e-5
    ),
    "instance_norm": lambda t: F.instance_norm(torch.randn(4, t.shape[-1], 3), _last(t), torch.ones(t.shape[-1])),
    "embedding": lambda t: F.embedding(torch.tensor([0]), torch.atleast_2d(t), max_norm=0.1),
    "embedding_bag": lambda t: F.embedding_bag(torch.tensor([[0]]), torch.atleast_2d(t), max_norm=0.1),
    "optimizer": lambda t: _step_of_sgd(t),
    "deferred": lambda t: t.copy_(torch.ones(t.shape[0], 3) @ torch.ones(3, t.shape[-1])) if t.ndim == 2 else t.add_(1),
}


def _last(t):
    """A row of t, as a buffer."""
    return t if t.ndim == 1 else t[-1]


def _step_of_sgd(t):
    t.grad = torch.ones_like(t)
    torch.optim.SGD([t], lr=0.5).step()


@pytest.mark.parametrize("operand", ["x", "w", "b", "r"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_inside_the_block_come_after(change, operand):
    leaves = {name: leaf.detach() for name, leaf in _leaves().items()}
    expected = torch.relu(leaves["x"] @ leaves["w"] + leaves["b"]) + leaves["r"]
    with autofuse():
        y = torch.relu(leaves["x"] @ leaves["w"] + leaves["b"]) + leaves["r"]
        CHANGES[change](leaves[operand])
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize(
    "write",
    [
        lambda out: torch.mm(torch.ones(6, 6), torch.ones(6, 8), out=out),
        lambda out: torch.matmul(torch.ones(6, 6) @ torch.ones(6, 6), torch.ones(6, 8), out=out),
        lambda out: torch.add(torch.ones(6, 6) @ torch.ones(6, 8), 1, out=out),
        lambda out: torch.mul(out, 2, out=out),
        lambda out: F.leaky_relu(out, 0.5, inplace=True),
        lambda out: torch.dropout_(out, 0.5, True),
    ],
)
def test_results_written_into_an_operand(write):
    leaves = {name: leaf.detach() for name, leaf in _leaves().items()}
    expected = torch.relu(leaves["x"] @ leaves["w"])
    with autofuse():
        y = torch.relu(leaves["x"] @ leaves["w"])
        write(leaves["x"])
    torch.testing.assert_close(y, expected)


def test_a_write_computes_the_readers_of_that_memory_only():
    leaves = {name: leaf.detach() for name, leaf in _leaves().items()}
    other = leaves["x"].clone()
    with autofuse():
        read, unread = torch.relu(leaves["x"] @ leaves["w"]), torch.relu(other @ leaves["w"])
        in_place = other @ leaves["w3"]
        leaves["x"].add_(1)
        assert (type(read), type(unread)) == (torch.Tensor, Deferred)
        in_place += leaves["b"]
        leaves["b"].add_(1)
        assert (type(in_place), type(unread)) == (torch.Tensor, Deferred)
        leaves["w"].add_(1)
        assert type(unread) is torch.Tensor
    _same(read, unread)


@pytest.mark.parametrize("operand", ["x", "w", "b", "r"])
def test_unseen_changes_raise(operand):
    leaves = {name: leaf.detach() for name, leaf in _leaves().items()}

    with autofuse():
        y = torch.relu(leaves["x"] @ leaves["w"] + leaves["b"]) + leaves["r"]
        _elsewhere(lambda: leaves[operand].add_(1))
        with pytest.raises(RuntimeError, match="was changed in place"):
            y.sum()
    assert type(y) is Deferred
    with pytest.raises(RuntimeError, match="was changed in place"):
        y.sum()
    assert y.shape == (6, 5)


def test_new_memory_raises():  # set_ does not ask __torch_function__
    leaves = {name: leaf.detach() for name, leaf in _leaves().items()}
    with autofuse():
        y = torch.relu(leaves["x"] @ leaves["w"])
        leaves["w"].set_(torch.ones(8, 5))
        with pytest.raises(RuntimeError, match="was changed in place"):
            y.sum()


def test_swapped_operand_raises():
    leaves = {name: leaf.detach() for name, leaf in _leaves().items()}
    with autofuse():
        y = torch.relu(leaves["x"] @ leaves["w"])
        with torch._C.DisableTorchFunction():
            torch.utils.swap_tensors(leaves["w"], torch.ones(8, 5))
        with pytest.raises(RuntimeError, match="was changed in place"):
            y.sum()


def test_gate_of_another_input():
    report = _compare(lambda x, w, w3, **_: F.silu(x @ w) * ((x + 1) @ w3))
    assert _steps(report) == [("silu",)]
    assert [entry.reason for entry in report.left] == ["the two products have different left operands"]


def test_gate_whose_input_changed_in_between():
    leaves = {name: leaf.detach() for name, leaf in _leaves().items()}
    x, w, w3 = leaves["x"], leaves["w"], leaves["w3"]
    gate = F.silu(x @ w)
    expected = gate * ((x + 1) @ w3)
    with autofuse():
        gate = F.silu(x @ w)
        x.add_(1)
        y = gate * (x @ w3)
    torch.testing.assert_close(y, expected)


def test_training_loop_inside_the_block():
    def train(block):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(inplace=True), torch.nn.Linear(16, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        losses = []
        with block:
            for _ in range(5):
                loss = (model(torch.ones(3, 8)) - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss)
        return torch.stack(losses)

    block = autofuse()
    torch.testing.assert_close(train(block), train(torch.enable_grad()))
    assert _steps(block.report) == [("bias", "relu")] * 5


# What a result depends on beside its operands.


def test_grad_mode_is_that_of_the_call():
    leaves = _leaves()
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
    _same(torch.autograd.grad(enabled.sum(), leaves["r"])[0], torch.ones(6, 5))


def test_step_in_another_grad_mode():
    leaves = _leaves()
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        with torch.no_grad():
            y = torch.relu(z)
    assert z.requires_grad
    assert not y.requires_grad


def test_inference_mode():
    leaves = _leaves()
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
    leaves = _leaves()

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
        _same(*(torch.autograd.grad(each.sum(), leaves["b"], retain_graph=True)[0] for each in (result, plain)))
    assert ("bias", "relu", "residual") in _steps(report) if inside else ("bias", "relu") in _steps(report)
    assert any("float32 and the product bfloat16" in entry.reason for entry in report.left)


def test_squares_under_autocast_of_cuda_are_float32():
    leaves = _leaves()
    with torch.autocast("cpu", torch.bfloat16), autofuse() as report:
        z = torch.relu(leaves["x"] @ leaves["w"])
        z._node.chain = copy.copy(z._node.chain)
        z._node.chain.device = torch.device("cuda")  # which is all that the rule looks at
        for square in (torch.square, lambda z: z**2):
            square(z)
            assert type(z) is torch.Tensor
    assert _steps(report) == [("relu",)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_squares_under_autocast_on_cuda():
    x, w = torch.randn(16, 16, device="cuda"), torch.randn(16, 16, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        with autofuse():
            y = torch.relu(x @ w) ** 2
        assert y.dtype == (torch.relu(x @ w) ** 2).dtype


def test_autocast_left_before_the_next_step():
    leaves = _leaves()
    with autofuse():
        with torch.autocast("cpu", torch.bfloat16):
            z = leaves["x"] @ leaves["w"]
        y = torch.relu(z)
    assert (z.dtype, y.dtype) == (torch.bfloat16, torch.bfloat16)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        return z * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.relu(x @ w)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        grad = grad * (x @ w > 0)
        return grad @ w.t(), x.t() @ grad


_double = _Double.apply


def test_autograd_functions():
    """Their apply does not ask __torch_function__: gradients must not get lost on the way."""
    _compare(lambda x, w, b, **_: _double(x @ w + b))
    _compare(lambda x, w, b, **_: _Double.apply(torch.relu(x @ w + b)))
    _compare(lambda x, w, **_: _Product.apply(x, w) + x @ w)


def test_backward_of_a_function_inside_the_block():
    leaves = _leaves()
    expected = torch.autograd.grad(_Product.apply(leaves["x"], leaves["w"]).sum(), [leaves["x"], leaves["w"]])
    with autofuse():
        y = _Product.apply(leaves["x"], leaves["w"])
        torch.autograd.backward(y, torch.ones_like(y))
    assert type(leaves["x"].grad) is torch.Tensor
    _same(leaves["x"].grad, expected[0])
    _same(leaves["w"].grad, expected[1])


def test_autograd_backward_of_a_deferred_tensor():
    leaves = _leaves()
    with autofuse():
        z = torch.relu(leaves["x"] @ leaves["w"])
        torch.autograd.backward(z, torch.ones(6, 5))
    expected = torch.autograd.grad(torch.relu(leaves["x"] @ leaves["w"]).sum(), leaves["w"])
    _same(leaves["w"].grad, expected[0])


class _Identity(torch.autograd.Function):
    """As torch's own for distributed training: gives its argument back without a look at it."""

    @staticmethod
    def forward(ctx, z):
        return z

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class _Blind(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.shape = z.shape
        return torch.ones(6, 5)

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(ctx.shape)


class _Scaled(torch.autograd.Function):
    """Takes two arguments, has a setup_context, and asks which arguments require gradients."""

    @staticmethod
    def forward(z, s):
        return z * s

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        z, s = ctx.saved_tensors
        return grad * s if ctx.needs_input_grad[0] else None, (grad * z).sum() if ctx.needs_input_grad[1] else None


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.mark_dirty(z)
        return z.mul_(3)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class _Returns(torch.autograd.Function):
    """Reads its argument, saves it and gives it back."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        ctx.total = z.sum()
        return z

    @staticmethod
    def backward(ctx, grad):
        (z,) = ctx.saved_tensors
        return grad * z * ctx.total


FUNCTIONS = {
    "in place itself": lambda x, w, b, **_: _InPlace.apply(x @ w + b),
    "in place itself, and read": lambda x, w, b, **_: _InPlace.apply(z := x @ w + b) + torch.relu(z),
    "given back": lambda x, w, b, **_: _Returns.apply(z := torch.tanh(x @ w + b)) * z,
    "under vmap": lambda x, w, b, **_: torch.vmap(lambda row: row * 2)(torch.tanh(x @ w + b)),
    "identity": lambda x, w, b, **_: _Identity.apply(torch.relu(x @ w + b)),
    "identity of a product": lambda x, w, **_: _Identity.apply(x @ w),
    "blind": lambda x, w, b, **_: _Blind.apply(torch.tanh(x @ w + b)),
    "two arguments": lambda x, w, s, **_: _Scaled.apply(torch.sigmoid(x @ w), s),
    "of a gate": lambda x, w, w3, s, **_: _Scaled.apply(F.silu(x @ w) * (x @ w3), s),
    "in place": lambda x, w, b, s, **_: _Scaled.apply((x @ w).add_(b), s),
    "in place, read before": lambda x, w, b, s, **_: _Blind.apply(z := x @ w) + z.add_(b) * s,
    "twice": lambda x, w, b, **_: _double(z := torch.relu(x @ w + b)) * _Identity.apply(z) + z,
    "and read": lambda x, w, b, **_: _Identity.apply(z := x @ w + b) + torch.relu(z),
    "blind, of a product": lambda x, w, **_: _Blind.apply(x @ w),
    "blind, and read": lambda x, w, b, **_: _Blind.apply(z := x @ w + b) + torch.relu(z),
    "read, then taken": lambda x, w, b, **_: (z := x @ w + b).sum() + _Identity.apply(z),
    "inputs of one another": lambda x, w, r, **_: _double((x @ w) + (x * 2) @ (w * 3)),
    "a residual of an input": lambda x, **_: _double(torch.relu(x @ (w := x.t() @ x)) + x @ w + x * 2),
    "a residual of x": lambda x, w, **_: _double(torch.tanh(x @ (w @ w.t())) + torch.sin(x)),
    "read, then a step taken": lambda x, w, b, **_: (z := x @ w + b).sum() * _double(torch.relu(z)) + z,
    "a step taken, then read": lambda x, w, b, **_: _double(torch.relu(z := x @ w + b)) * z,
    "x and its transpose": lambda x, **_: _Identity.apply(x @ x.t()),
    "a bias of x": lambda x, w, **_: _Returns.apply(x @ w + (x @ w).sum(0)),
    "a step after one in place": lambda x, w, b, **_: torch.relu(_InPlace.apply(x @ w) + b),
    "a step before one in place": lambda x, w, **_: torch.tanh(z := x @ w) + _InPlace.apply(z),
    "changed in place after": lambda x, w, b, **_: _double(z := F.linear(x, w.t(), b)) + z.sin_() + z.add_(1),
    "an operand changed in place after": lambda x, w, r, **_: _double(x @ w + (h := r * 2)) * h.sin_(),
    "in a row": lambda x, w, b, **_: _double(_double(torch.relu(x @ w + b)) @ w.t()) @ w,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_take_deferred_tensors(name):
    """Their results are connected to the arguments' gradients before they look at them."""
    _compare(FUNCTIONS[name])
    _compare(FUNCTIONS[name], torch.float64)


def test_gradients_through_a_function_taken_again():
    def compute(x, w, b, **_):
        return _double(torch.tanh(x @ w + b))

    leaves = _leaves(torch.float64)
    wanted = [leaves["x"], leaves["w"], leaves["b"]]
    found = []
    for block in (autofuse(), contextlib.nullcontext()):
        with block:
            y = compute(**leaves)
        first = torch.autograd.grad(y.sum(), wanted, retain_graph=True)
        again = torch.autograd.grad(y.sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in again), wanted)
        found.append((*first, *again, *second))
    for left, right in zip(*found, strict=True):
        _same(left, right)


@pytest.mark.parametrize("function", [_Double, _Identity, _Returns, _Blind, _InPlace])
def test_a_function_keeps_what_plain_code_keeps(function):
    """Until the backward, and no longer; whether the result is held or not."""
    w = torch.randn(8, 5, requires_grad=True)
    for is_read in (False, True):
        activation = torch.randn(6, 8).exp()
        kept = weakref.ref(activation)
        with autofuse():
            z = activation @ w
            y = function.apply(z)
            if is_read:
                y = y + z
        del z, activation
        total = y.sum()
        assert kept() is not None
        total.backward()
        gc.collect()
        assert kept() is None
        del y, total
    gc.collect()
    assert not any(isinstance(each, deferred.Node) for each in gc.get_objects())


def test_hooks_on_operands_of_a_taken_tensor():
    """They see a gradient once."""
    calls = []

    def compute(x, w, b, **_):
        h = x.sin()
        h.retain_grad()
        h.register_hook(lambda grad: calls.append(1) or grad * 2)
        w.register_hook(lambda grad: grad * 0.5)
        return _double(torch.relu(h @ w + b)), h

    found = []
    for block in (autofuse(), contextlib.nullcontext()):
        leaves = _leaves(torch.float64)
        with block:
            y, h = compute(**leaves)
        y.square().sum().backward()
        found.append([h.grad, *(leaves[name].grad for name in ("x", "w", "b"))])
    assert len(calls) == 2
    for left, right in zip(*found, strict=True):
        _same(left, right)


def test_gradient_of_a_taken_tensor_is_refused():
    """What the Function got of it goes another way."""
    leaves = _leaves()
    with autofuse():
        z = torch.relu(leaves["x"] @ leaves["w"])
        y = _double(z)
        for ask in (z.retain_grad, lambda: z.register_hook(print), lambda: torch.autograd.grad(y.sum(), z)):
            with pytest.raises(RuntimeError, match=r"an autograd\.Function took"):
                ask()
        z = torch.relu(leaves["x"] @ leaves["w"])
        z.retain_grad()  # computes it
        _double(z).sum().backward()
    _same(z.grad, torch.full((6, 5), 2.0))


def test_a_view_of_a_taken_tensor_is_read_before_that_changes():
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    found = []
    for block in (autofuse(), contextlib.nullcontext()):
        with block:
            z = x @ w
            y = torch.relu(_Identity.apply(z) @ w)
            z.sin_()
        found.append((y, z))
    for left, right in zip(*found, strict=True):
        _same(left, right)


def test_gradients_of_gradients_beside_a_second_reader():
    """The graph of the taken value is used by both orders."""
    leaves = _leaves(torch.float64)
    wanted = [leaves["x"], leaves["w"]]
    found = []
    for block in (autofuse(), contextlib.nullcontext()):
        with block:
            z = leaves["x"] @ leaves["w"]
            y = torch.tanh(z)
            y = _double(y) * (z @ leaves["w"].t() @ leaves["w"]) + y
        first = torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
        (y.sum() + sum(each.square().sum() for each in first)).backward()
        found.append([*first, *(each.grad for each in wanted)])
        for each in wanted:
            each.grad = None
    for left, right in zip(*found, strict=True):
        _same(left, right)


def test_hooks_on_what_a_taken_tensor_was_made_of_are_refused():
    leaves = _leaves()
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        y = torch.tanh(z)
        z.register_hook(lambda grad: grad * 2)  # computes z
        with pytest.raises(RuntimeError, match="has hooks"):
            _double(y)
        y.sum()
        z = leaves["x"] @ leaves["w"]
        y = torch.tanh(z)
        z.sum()
        _double(y)
        with pytest.raises(RuntimeError, match="asks for the gradient"):
            z.retain_grad()


def test_a_taken_dropout_that_is_held():
    leaves = _leaves()
    with autofuse(dropout=True), torch.no_grad():
        z = F.dropout(leaves["x"] @ leaves["w"], 0.5)
        y = _Identity.apply(z + leaves["r"])
    _same(y, (z + leaves["r"]).detach())
    with autofuse(dropout=True):
        z = F.dropout(leaves["x"] @ leaves["w"], 0.5)
        y = z + leaves["r"]
        with pytest.raises(RuntimeError, match="which is held"):
            _Identity.apply(y)
        y.sum()
    _same(y, z + leaves["r"])


def test_a_saved_tensor_that_is_changed_later():
    leaves = _leaves()
    for block in (autofuse(), contextlib.nullcontext()):
        with block:
            z = leaves["x"] @ leaves["w"]
            y = _Scaled.apply(z, leaves["s"])
            z.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_past_torch_functions():
    """As C++ code would."""

    def compute(x, w, b, **_):
        y = torch.relu(x @ w + b)
        with torch._C.DisableTorchFunction():
            more = y + 1
        return more * y

    leaves = _leaves()
    with autofuse(), torch.no_grad():
        fused = compute(**leaves)
    _same(fused, compute(**leaves).detach())
    _compare(compute)


def test_held_by_c_plus_plus():
    leaves = _leaves()
    z = None

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(z)  # not an argument
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0].sum()

    with autofuse(), torch.no_grad():
        z = torch.relu(leaves["x"] @ leaves["w"])
        with torch.enable_grad():
            y = Saves.apply(leaves["r"])
        value = z.sum()
    assert type(z) is torch.Tensor
    _same(torch.autograd.grad(y.sum(), leaves["r"])[0], value.expand(6, 5))


def test_double_backward():
    def compute(x, w, b, **_):
        y = torch.tanh(x @ w + b).square().sum()
        (gradient,) = torch.autograd.grad(y, w, create_graph=True)
        return gradient * 2

    _compare(compute)


def test_checkpoint():
    def body(x, w, b):
        return torch.relu(torch.relu(x @ w + b) @ w.t())

    report = _compare(lambda x, w, b, **_: checkpoint(body, x @ (w @ w.t()), w, b, use_reentrant=False) * 2)
    assert not report.fused
    fuse = autofuse()
    _compare(lambda x, w, b, **_: checkpoint(fuse(body), x, w, b, use_reentrant=False))
    assert set(_steps(fuse.report)) == {("bias", "relu"), ("relu",)}


def test_reentrant_checkpoint():
    def gradients(compute):
        leaves = _leaves()
        hidden = compute(leaves["x"] @ leaves["w"] + leaves["b"])
        hidden.sum().backward()
        return [leaves[name].grad for name in ("x", "w", "b")]

    def run(z):
        return checkpoint(lambda z: torch.relu(z @ z.t()), z, use_reentrant=True)

    expected = gradients(run)
    with autofuse():
        found = gradients(run)
    for left, right in zip(found, expected, strict=True):
        _same(left, right)


def test_checkpoint_reads_what_was_deferred_before_it():
    def compute(x, w, b, **_):
        z = torch.relu(x @ w + b)
        return checkpoint(lambda w: torch.sigmoid(z @ w.t()) * z.sum(), w, use_reentrant=False)

    _compare(compute)


def test_transforms():
    leaves = {name: leaf.detach() for name, leaf in _leaves().items()}
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
        _same(result, plain)
    _same(inside, x + torch.relu(x @ w).sum())


def test_no_plain_operands():
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    with autofuse() as report:
        torch.relu(x.to_sparse() @ w)
        torch.relu(torch._neg_view(x) @ w)
        torch.relu(x.to("meta") @ w.to("meta"))
        assert type(torch.relu(x.to(torch.complex64).real @ w)) is Deferred
    assert {entry.reason for entry in report.left} >= {"an operand is no plain strided tensor"}
    assert report.left.total() == 3


def test_integers_are_torchs():
    x = torch.arange(4).view(2, 2)
    with autofuse() as report:
        assert torch.equal(torch.relu(x @ x), torch.tensor([[2, 3], [6, 11]]))
    assert [entry.reason for entry in report.left] == ["int64 is not fused"]


def test_main_grad_stays_torchs_business():
    leaves = _leaves()
    weight = leaves["w"].detach().t().contiguous().requires_grad_()
    weight.main_grad = torch.zeros_like(weight)
    with autofuse():
        y = torch.relu(F.linear(leaves["x"], weight))
    y.sum().backward()
    assert weight.grad is not None
    assert not weight.main_grad.any()


# Blocks.


def test_exception_leaves_usable_tensors():
    leaves = _leaves()
    kept = []

    def fail():
        with autofuse():
            kept.append(torch.relu(leaves["x"] @ leaves["w"]))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert type(kept[0]) is torch.Tensor
    _same(kept[0], torch.relu(leaves["x"] @ leaves["w"]))


def test_the_mode_is_gone_after_the_block():
    leaves = _leaves()
    with pytest.raises(KeyError), autofuse():
        raise KeyError
    with autofuse():
        pass
    assert type(leaves["x"] @ leaves["w"]) is torch.Tensor


def test_nested_blocks():
    leaves = _leaves()
    with autofuse() as outer:
        y = torch.relu(leaves["x"] @ leaves["w"])
        with autofuse() as inner:
            z = torch.sigmoid(leaves["x"] @ leaves["w"])
            assert type(z) is Deferred
        assert type(z) is torch.Tensor
        assert type(y) is Deferred  # the outer block's
        again = torch.tanh(leaves["x"] @ leaves["w"])
        assert type(again) is Deferred
    assert _steps(inner) == [("sigmoid",)]
    assert _steps(outer) == [("relu",), ("tanh",)]


def test_a_block_is_entered_once():
    block = autofuse()
    with block, pytest.raises(RuntimeError, match="entered already"), block:
        pass
    with block as report:
        pass
    assert report is block.report


def test_decorator():
    leaves = _leaves()
    fuse = autofuse()

    @fuse
    def layer(x, w, *, depth=0):
        """A layer."""
        return layer(x, w, depth=depth - 1) if depth else torch.relu(x @ w)

    result = layer(leaves["x"], leaves["w"], depth=2)
    assert type(result) is torch.Tensor
    assert (layer.__name__, layer.__doc__) == ("layer", "A layer.")
    layer(leaves["x"], leaves["w"])
    assert _steps(fuse.report) == [("relu",)] * 2


def test_decorator_of_a_generator_is_refused():
    with pytest.raises(TypeError, match="generator"):

        @autofuse()
        def generate():
            yield 1


def test_other_modes_see_what_is_computed():
    class Names(torch.overrides.TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    leaves = _leaves()
    with Names() as outer, autofuse():
        y = torch.relu(leaves["x"] @ leaves["w"])
    _same(y, torch.relu(leaves["x"] @ leaves["w"]))
    with autofuse(), Names() as inner:
        y = torch.relu(leaves["x"] @ leaves["w"])
    assert inner.names[:2] == ["__matmul__", "relu"] or "relu" in inner.names
    assert outer.names
    _same(y, torch.relu(leaves["x"] @ leaves["w"]))


def test_dispatch_modes():
    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **(kwargs or {}))

    leaves = _leaves()
    with Count() as plain:
        torch.relu(leaves["x"] @ leaves["w"]).sum()
    with autofuse() as report:
        z = torch.relu(leaves["x"] @ leaves["w"])
        with Count() as count:
            inside = torch.relu(leaves["x"] @ leaves["w"])
            total = z.sum()
        assert count.calls == plain.calls  # and what was called before it is not its business
    _same(z, inside)
    _same(total, inside.sum())
    assert "a dispatch mode or a tracer listens" in {entry.reason for entry in report.left}


def test_dropout():
    leaves = _leaves()
    x = torch.ones(64, 8)
    with autofuse() as report:
        torch.manual_seed(0)
        y = F.dropout(torch.relu(x @ leaves["w"]), 0.5)
    torch.manual_seed(0)
    _same(y, F.dropout(torch.relu(x @ leaves["w"]), 0.5))
    assert _steps(report) == [("relu",)]
    with autofuse(dropout=True) as report:
        y = F.dropout(torch.sigmoid(x @ leaves["w"]), 0.5) + 1.0
        z = x @ leaves["w"]
        assert F.dropout(z, 0.0) is z
    expected = torch.sigmoid(x @ leaves["w"]) * 2
    kept = y != 1
    _same((y - 1)[kept], expected[kept])
    assert 0.3 < kept.float().mean() < 0.7
    assert _steps(report) == [("sigmoid", "dropout")]


@pytest.mark.parametrize("first", ["operand", "dropout", "sums", "changed", "none"])
def test_one_call_of_dropout_has_one_mask(first):
    leaves = {name: leaf.detach() for name, leaf in _leaves(torch.float64).items()}
    r, s = leaves["r"], leaves["r"] * 3
    with autofuse(dropout=True):
        z = torch.tanh(leaves["x"] @ leaves["w"])
        h = F.dropout(z, 0.5)
        a = h + r
        if first == "operand":
            z.sum()
        elif first == "dropout":
            h.sum()
        elif first == "sums":
            a.sum()
        elif first == "changed":
            kept = h.clone()
            h.add_(1)
            _same(a - kept, r)
            h = kept
        b = h + s
    _same(a - b, r - s)
    _same(a - h, r)
    assert (h == 0).any()


def test_dropout_fuses_with_the_residual_where_nobody_else_reads_it():
    leaves = _leaves()
    with autofuse(dropout=True) as report:
        y = leaves["r"] + F.dropout(leaves["x"] @ leaves["w"] + leaves["b"], 0.5)
        in_place = F.dropout(torch.tanh(leaves["x"] @ leaves["w"]), 0.5)
        in_place += leaves["r"]
        held = F.dropout(torch.sigmoid(leaves["x"] @ leaves["w"]), 0.5)
        z = held + leaves["r"]
    _same(z - held, leaves["r"])
    assert y.requires_grad
    assert in_place.requires_grad
    assert _steps(report) == [("bias", "dropout", "residual"), ("tanh", "dropout", "residual"), ("sigmoid", "dropout")]


def test_a_dropout_changed_unseen_raises():
    leaves = {name: leaf.detach() for name, leaf in _leaves().items()}
    with autofuse(dropout=True):
        h = F.dropout(leaves["x"] @ leaves["w"], 0.5)
        y = h + leaves["r"]
        h.sum()
        _elsewhere(lambda: h.add_(1))
        with pytest.raises(RuntimeError, match="was changed in place"):
            y.sum()


def test_threads():
    leaves = _leaves()
    expected = torch.relu(leaves["x"] @ leaves["w"])
    results, failures = [], []

    def work():
        try:
            assert type(leaves["x"] @ leaves["w"]) is torch.Tensor
            with autofuse():
                results.extend(torch.relu(leaves["x"] @ leaves["w"]) for _ in range(20))
        except BaseException as failure:
            failures.append(failure)

    with autofuse():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert len(results) == 80
    for result in results:
        assert type(result) is torch.Tensor
        _same(result, expected)


@pytest.mark.parametrize("in_block", [False, True])
def test_handed_to_another_thread(in_block):
    leaves = _leaves()
    expected = torch.relu(leaves["x"] @ leaves["w"])
    sums, failures = [], []
    barrier = threading.Barrier(4)

    def read(y):
        try:
            barrier.wait()
            if in_block:
                with autofuse():
                    sums.append(y + leaves["b"])
            else:
                sums.append(y + leaves["b"])
        except BaseException as failure:
            failures.append(failure)

    with autofuse():
        y = torch.relu(leaves["x"] @ leaves["w"])
        threads = [threading.Thread(target=read, args=(y,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert type(y) is torch.Tensor
    assert not failures
    for result in sums:
        assert type(result) is torch.Tensor
        _same(result, expected + leaves["b"])


def test_in_place_while_another_thread_computes_it(monkeypatch):
    leaves = {name: leaf.detach() for name, leaf in _leaves().items()}
    started, go_on = threading.Event(), threading.Event()
    compute = deferred._compute

    def slowly(*args):
        started.set()
        go_on.wait(5)
        return compute(*args)

    monkeypatch.setattr(deferred, "_compute", slowly)
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        reader = threading.Thread(target=lambda: z.sum())
        reader.start()
        started.wait(5)
        threading.Timer(0.05, go_on.set).start()
        z.relu_()
        reader.join()
    _same(z, torch.relu(leaves["x"] @ leaves["w"]))


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
        _same(got, same)
        _same(other, same)


def test_a_write_looks_at_what_reads_its_memory_alone(monkeypatch):
    leaves, other = _leaves(), torch.zeros(3)
    looked = []
    found = deferred._deferred_at
    monkeypatch.setattr(deferred, "_deferred_at", lambda refs: found(looked.append(ref) or ref for ref in refs))
    with autofuse():
        held = []
        for _ in range(200):
            held.append(leaves["x"] @ leaves["w"])
            other.add_(1)
        assert len(looked) < 1000


def test_report_is_live():
    leaves = _leaves()
    with autofuse() as report:
        fused = report.fused
        torch.relu(leaves["x"] @ leaves["w"]).sum()
        assert fused.total() == 1


# Leaks.


def test_unread_results_are_freed_at_once_and_never_computed():
    leaves = _leaves()
    gc.disable()
    try:
        with autofuse() as report:
            operand = leaves["x"] * 2
            watched = weakref.ref(operand)
            z = operand @ leaves["w"]
            y = torch.relu(z)
            references = weakref.ref(z), weakref.ref(y)
            del operand, z
            assert references[0]() is None
            assert watched() is not None
            del y
            assert references[1]() is None
            assert watched() is None
        assert not report.fused
        assert not report.left
    finally:
        gc.enable()


def test_computed_results_hold_what_plain_ones_hold():
    leaves = _leaves()
    gc.disable()
    try:
        with autofuse() as report, torch.no_grad():
            operand = leaves["x"] * 2
            watched = weakref.ref(operand)
            y = torch.relu(operand @ leaves["w"])
            y.sum()
            del operand
            assert watched() is None
        mode = weakref.ref(report)
        tracked = leaves["x"] * 2
        watched = weakref.ref(tracked)
        with autofuse():
            y = torch.relu(tracked @ leaves["w"])
        del tracked
        assert watched() is not None  # saved for the backward
        del y, report
        assert watched() is None
        assert mode() is None
    finally:
        gc.enable()


def test_no_garbage():
    leaves = _leaves()
    with autofuse():
        torch.relu(leaves["x"] @ leaves["w"] + leaves["b"]).sum()
    while gc.collect():  # what other tests left may have finalisers, which leave more
        pass
    gc.disable()
    try:
        for _ in range(10):
            with autofuse():
                z = leaves["x"] @ leaves["w"]
                y = torch.relu(z + leaves["b"]) * 3
                del z, y
                F.silu(leaves["x"] @ leaves["w"]) * (leaves["x"] @ leaves["w3"])
        found = gc.collect()
        tensors = [each for each in gc.garbage if isinstance(each, torch.Tensor)]
    finally:
        gc.enable()
    assert not tensors
    assert found < 10  # none per pass


# Compiling.


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_code_is_left_alone(fullgraph):
    leaves = _leaves()

    def compute(x, w):
        return torch.relu(x @ w + leaves["b"])

    def with_block(x, w):
        with autofuse():
            return compute(x, w)

    torch._dynamo.reset()
    expected = compute(leaves["x"], leaves["w"])
    for function in (compute, with_block, autofuse()(compute)):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=fullgraph)
        with autofuse() as report:
            result = compiled(leaves["x"], leaves["w"])
        _same(result, expected)
        _same(compiled(leaves["x"], leaves["w"]), expected)
        assert not report.fused


def test_deferred_tensor_given_to_compiled_code():
    leaves = _leaves()

    def after(z):
        return torch.relu(z + leaves["b"])

    torch._dynamo.reset()
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        result = torch.compile(after, backend="aot_eager")(z)
    _same(result, after(leaves["x"] @ leaves["w"]))
    _same(
        torch.autograd.grad(result.sum(), leaves["w"])[0],
        torch.autograd.grad(after(leaves["x"] @ leaves["w"]).sum(), leaves["w"])[0],
    )
    torch._dynamo.reset()
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"isogemm\.autofuse"):
            torch.compile(after, backend="aot_eager", fullgraph=True)(z)


def test_report():
    leaves = _leaves()
    with autofuse() as report:
        for _ in range(2):
            torch.relu(leaves["x"] @ leaves["w"] + leaves["b"]).sum()
        F.linear(leaves["x"], leaves["w"].t()).sum()
    assert str(report).splitlines() == [
        "fused 2, left 1",
        "  fused matmul [6, 8] x [8, 5] float32 + bias + relu (x 2)",
        "  left linear [6, 8] x [5, 8] float32: sum reads it",
    ]
