"""isogemm.autofuse: plain torch code, deferred and fused, against itself without."""

import copy
import io
import pickle
import subprocess
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from deferring import assert_as_plain, assert_same, augmented, leaves_of, steps_of
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.fusion import autofuse
from isogemm.fusion.deferred import Deferred

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
    "augmented": (lambda x, w, b, **_: augmented(x @ w, b).relu_(), ["bias", "relu"]),
    "eval dropout": (lambda x, w, b, **_: F.dropout(F.relu(x @ w + b), 0.5, training=False), ["bias", "relu"]),
    "batched": (lambda x, w, b, **_: torch.relu(x.view(2, 3, 8) @ w + b), ["bias", "relu"]),
    "transposed": (lambda x, w, **_: torch.relu(w.t() @ x.t()), ["relu"]),
}  # fmt: skip


def _silu(x, w, b, **_):
    z = x @ w + b
    return z * torch.sigmoid(z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling, dtype):
    compute, steps = SPELLINGS[spelling]
    leaves = leaves_of(dtype)
    with isogemm.dispatch_log() as log, autofuse() as report:
        fused = compute(**leaves)
        assert type(fused) is Deferred
    assert steps_of(report) == [tuple(steps)]
    assert not report.left
    if dtype is not torch.float64:
        assert len(log) == 1
    if dtype is torch.bfloat16:  # rounds once where the plain code rounds at each step
        exact = compute(**leaves_of(torch.float64))
        plain = compute(**leaves)
        assert fused.dtype == plain.dtype
        assert (fused - exact).abs().max() <= 2 * (plain - exact).abs().max() + 2**-8 * exact.abs().max()
    else:
        assert_as_plain(compute, dtype)


def test_silu_by_hand():
    assert steps_of(assert_as_plain(_silu)) == [("bias", "silu")]


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
    report = assert_as_plain(compute)
    assert [entry.reason for entry in report.left.elements()] == [reason]
    assert not report.fused


def test_a_product_alone_has_torchs_bits():
    leaves = leaves_of()
    x, w, b = leaves["x"], leaves["w"], leaves["b"]
    with autofuse():
        results = x @ w, F.linear(x, w.t(), b), torch.addmm(b, x, w)
    expected = x @ w, F.linear(x, w.t(), b), torch.addmm(b, x, w)
    assert all(map(torch.equal, results, expected))
    assert results[1].grad_fn.name() == expected[1].grad_fn.name()


def test_operands_by_keyword():
    assert_as_plain(lambda x, w, w3, **_: torch.mul(F.silu(x @ w), other=x @ w3))
    assert_as_plain(lambda x, w, w3, **_: torch.add(input=x @ w, other=F.relu(x @ w3)))
    assert_as_plain(lambda x, w, b, **_: torch.relu(input=x @ w + b))


def test_a_chain_that_does_not_go_on_is_an_operand():
    report = assert_as_plain(lambda x, w, b, r, **_: torch.relu(torch.relu(x @ w + b) * r) @ w.t() + x)
    assert steps_of(report) == [("bias", "relu"), ("residual",)]
    report = assert_as_plain(lambda x, w, b, r, **_: torch.relu(x @ w + b) * 3)
    assert steps_of(report) == [("bias", "relu")]


def test_sum_of_two_products():
    report = assert_as_plain(lambda x, w, w3, **_: F.silu(x @ w) + x @ w3)
    assert steps_of(report) == [("silu",), ("residual",)]


def test_powers():
    assert_as_plain(lambda x, w, r, **_: torch.relu(x @ w + 3) ** 2.0)
    assert_as_plain(lambda x, w, r, **_: torch.relu(x @ w) ** 3)
    assert_as_plain(lambda x, w, r, **_: torch.relu(x @ w) ** (r.detach() * 0 + 2))


def test_scalar_tensor_of_float32():
    scale = torch.tensor(0.3)
    x, w = torch.randn(4, 4).bfloat16(), torch.randn(4, 4).bfloat16()
    with autofuse() as report:
        y = (x @ w) * scale
    assert y.dtype == ((x @ w) * scale).dtype == torch.bfloat16
    torch.testing.assert_close(y, (x @ w) * scale)
    assert steps_of(report) == [("alpha",)]


def test_errors_are_torchs():
    leaves = leaves_of()
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


def test_long_chains():
    def compute(x, w, **_):
        z = x @ w
        for _ in range(2000):
            z = -z
        return z

    report = assert_as_plain(compute)
    assert set(steps_of(report)) <= {("alpha",)}


# What a result depends on beside its operands.


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


def test_squares_under_autocast_of_cuda_are_float32():
    leaves = leaves_of()
    with torch.autocast("cpu", torch.bfloat16), autofuse() as report:
        z = torch.relu(leaves["x"] @ leaves["w"])
        z._node.chain = copy.copy(z._node.chain)
        z._node.chain.device = torch.device("cuda")  # which is all that the rule looks at
        for square in (torch.square, lambda z: z**2):
            square(z)
            assert type(z) is torch.Tensor
    assert steps_of(report) == [("relu",)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_squares_under_autocast_on_cuda():
    x, w = torch.randn(16, 16, device="cuda"), torch.randn(16, 16, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        with autofuse():
            y = torch.relu(x @ w) ** 2
        assert y.dtype == (torch.relu(x @ w) ** 2).dtype


def test_autocast_left_before_the_next_step():
    leaves = leaves_of()
    with autofuse():
        with torch.autocast("cpu", torch.bfloat16):
            z = leaves["x"] @ leaves["w"]
        y = torch.relu(z)
    assert (z.dtype, y.dtype) == (torch.bfloat16, torch.bfloat16)


def test_past_torch_functions():
    """As C++ code would."""

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
    leaves = leaves_of()
    weight = leaves["w"].detach().t().contiguous().requires_grad_()
    weight.main_grad = torch.zeros_like(weight)
    with autofuse():
        y = torch.relu(F.linear(leaves["x"], weight))
    y.sum().backward()
    assert weight.grad is not None
    assert not weight.main_grad.any()
