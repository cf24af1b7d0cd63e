"""What fuses with a product: plain torch code inside `isogemm.autofuse`, against itself outside."""

import copy

import pytest
import torch
import torch.nn.functional as F
from deferring import assert_as_plain, augmented, leaves_of, steps_of

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


def test_in_a_sum_of_two_products_the_shorter_chain_reads_the_other():
    for compute in (lambda x, w, w3, **_: F.silu(x @ w) + x @ w3, lambda x, w, w3, **_: x @ w3 + F.silu(x @ w)):
        assert steps_of(assert_as_plain(compute)) == [("silu",), ("residual",)]


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


def test_integers_are_torchs():
    x = torch.arange(4).view(2, 2)
    with autofuse() as report:
        assert torch.equal(torch.relu(x @ x), torch.tensor([[2, 3], [6, 11]]))
    assert [entry.reason for entry in report.left] == ["int64 is not fused"]
