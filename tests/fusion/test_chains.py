"""What is remembered of a call serves calls of its pattern only, and does not pile up."""

import pytest
import torch
import torch.nn.functional as F
from deferring import assert_as_plain, square_leaves, steps_of

from isogemm.fusion import autofuse, chains, lazy


def test_long_chains():
    def compute(x, w, **_):
        z = x @ w
        for _ in range(2000):
            z = -z
        return z

    report = assert_as_plain(compute)
    assert set(steps_of(report)) <= {("alpha",)}


@pytest.fixture(autouse=True)
def _fresh_memory():
    chains._memory.clear()


DIFFERENT = {
    "shape of the addend": [
        (lambda z, b, **_: z + b, ("bias",)),
        (lambda z, col, **_: z + col, ("column bias",)),
        (lambda z, r, **_: z + r, ("residual",)),
        (lambda z, s, **_: z + s, None),
    ],
    "shape of the product": [
        (lambda x, w, b, **_: x @ w + b, ("bias",)),
        (lambda x, w, b, **_: x[:3] @ w + b, ("bias",)),
        (lambda x, w, b, **_: x[:, :4] @ w[:4] + b, ("bias",)),
        (lambda x, w, b, **_: x.view(2, 3, 6) @ w + b, ("bias",)),
    ],
    "dtype of the addend": [
        (lambda z, b, **_: z + b, ("bias",)),
        (lambda z, b, **_: z + b.double(), None),
    ],
    "dtype of the product": [
        (lambda x, w, b, **_: x @ w + b, ("bias",)),
        (lambda x, w, b, **_: x.double() @ w.double() + b.double(), ("bias",)),
        (lambda x, w, b, **_: (x.double() @ w.double()) + b, None),
    ],
    "order of the operands": [
        (lambda z, r, **_: torch.sub(z, r), ("c",)),
        (lambda z, r, **_: torch.sub(r, z), ("alpha", "residual")),
        (lambda z, r, **_: torch.add(z, r, alpha=2), ("c",)),
        (lambda z, r, **_: torch.add(r, z, alpha=2), ("alpha", "residual")),
        (lambda z, s, **_: z * s, ("alpha",)),
        (lambda z, s, **_: s * z, ("alpha",)),
    ],
    "division": [
        (lambda z, **_: z / 4, ("alpha",)),
        (lambda z, **_: 4 / z, None),
        (lambda z, **_: z * 4, ("alpha",)),
    ],
    "a factor by keyword": [
        (lambda z, r, **_: torch.add(z, r, alpha=2), ("c",)),
        (lambda z, r, **_: torch.add(z, r, alpha=3), ("c",)),
        (lambda z, r, **_: torch.add(z, other=r, alpha=3), ("c",)),
        (lambda z, r, **_: torch.sub(z, r, alpha=3), ("c",)),
        (lambda z, r, **_: torch.add(z, r), ("residual",)),
        (lambda z, r, **_: torch.add(z, r, alpha=0), None),
    ],
    "a product's factors": [
        (lambda x, w, r, **_: torch.addmm(r, x, w).relu(), ("c", "relu")),
        (lambda x, w, r, **_: torch.addmm(r, x, w, beta=2).relu(), ("c", "relu")),
        (lambda x, w, r, **_: torch.addmm(r, x, w, alpha=2).relu(), ("alpha", "c", "relu")),
        (lambda x, w, r, **_: torch.addmm(r, x, w, beta=3, alpha=2).relu(), ("alpha", "c", "relu")),
        (lambda x, w, r, **_: torch.addmm(r, x, w, alpha=3, beta=2).relu(), ("alpha", "c", "relu")),
    ],
    "a number's value": [
        (lambda z, **_: z * 2, ("alpha",)),
        (lambda z, **_: z * 3, ("alpha",)),
        (lambda z, **_: z * 2.5, ("alpha",)),
        (lambda z, **_: 3 * z, ("alpha",)),
    ],
    "a number's type": [
        (lambda z, **_: z * 1, ("alpha",)),
        (lambda z, **_: z * 1.0, ("alpha",)),
        (lambda z, **_: z * True, None),
    ],
    "an option": [
        (lambda z, **_: F.leaky_relu(z, 0.5), ("leaky_relu",)),
        (lambda z, **_: F.leaky_relu(z, 0.25), ("leaky_relu",)),
        (lambda z, **_: F.leaky_relu(z, negative_slope=0.75), ("leaky_relu",)),
        (lambda z, **_: F.leaky_relu(z), ("leaky_relu",)),
        (lambda z, **_: F.leaky_relu(z, 0.0), ("leaky_relu",)),
        (lambda z, **_: F.leaky_relu(z, -0.0), ("leaky_relu",)),
        (lambda z, **_: F.gelu(z), ("gelu",)),
        (lambda z, **_: F.gelu(z, approximate="tanh"), ("gelu_tanh",)),
        (lambda z, **_: F.gelu(z, approximate="none"), ("gelu",)),
    ],
    "an exponent": [
        (lambda z, **_: torch.relu(z) ** 2, ("relu2",)),
        (lambda z, **_: torch.relu(z) ** 3, ("relu",)),
    ],
    "the left operands of a gate": [
        (lambda x, w, w3, **_: F.silu(x @ w) * (x @ w3), ("swiglu",)),
        (lambda x, w, w3, **_: F.silu(x @ w) * (x.clone() @ w3), ("silu",)),
        (lambda x, w, w3, **_: (x @ w3) * F.silu(x @ w), ("swiglu",)),
    ],
    "what a sigmoid is of": [
        (lambda z, **_: z * torch.sigmoid(z), ("silu",)),
        (lambda x, w, **_: (x @ w) * torch.sigmoid(x @ w), ("sigmoid",)),
    ],
    "what is added to itself": [
        (lambda x, w, **_: (x @ w) + (x @ w), ("residual",)),
        (lambda z, **_: z + z, None),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("reverse", [False, True])
def test_a_decision_serves_its_own_pattern_only(name, reverse):
    calls = DIFFERENT[name][::-1] if reverse else DIFFERENT[name]
    leaves = square_leaves()
    for _ in range(3):
        for compute, steps in calls:
            expected = compute(z=leaves["x"] @ leaves["w"], **leaves)
            with autofuse() as report:
                result = compute(z=leaves["x"] @ leaves["w"], **leaves)
            assert result.dtype == expected.dtype
            torch.testing.assert_close(result, expected)
            assert torch.equal(torch.signbit(result), torch.signbit(expected)) or "leaky" not in str(steps)
            assert steps_of(report) == ([] if steps is None else [steps])


def test_gradients_are_those_of_the_call():
    leaves = square_leaves()
    for needing in ((), ("b",), ("x", "w"), (), ("w", "b")):
        given = {name: leaf.clone().requires_grad_(name in needing) for name, leaf in leaves.items()}
        with autofuse():
            y = torch.relu(given["x"] @ given["w"] + given["b"])
            assert y.requires_grad == bool(needing)
            with torch.no_grad():
                assert not (given["x"] @ given["w"] + given["b"]).requires_grad
        assert y.requires_grad == bool(needing)
        if needing:
            y.sum().backward()
        assert {name for name, leaf in given.items() if leaf.grad is not None} == set(needing)


def test_autocast_is_a_part_of_the_pattern():
    leaves = square_leaves()
    for dtype in (torch.bfloat16, None, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None), autofuse() as report:
            y = torch.relu(leaves["x"] @ leaves["w"])
        assert y.dtype == (dtype or torch.float32)
        assert steps_of(report) == [("relu",)]


def test_dropout_is_asked_for_in_each_block():
    leaves = square_leaves()
    for dropout in (True, False, True):
        with autofuse(dropout=dropout) as report:
            F.dropout(torch.relu(leaves["x"] @ leaves["w"]), 0.5).sum()
        assert steps_of(report) == [("relu", "dropout") if dropout else ("relu",)]


def test_the_device_is_a_part_of_the_pattern():
    leaves = square_leaves()
    for _ in range(2):
        with autofuse() as report:
            torch.relu(leaves["x"] @ leaves["w"]).sum()
            torch.relu(leaves["x"].to("meta") @ leaves["w"].to("meta"))
            with pytest.raises(RuntimeError):
                (leaves["x"] @ leaves["w"] + leaves["b"].to("meta")).sum()
        assert steps_of(report) == [("relu",)]


def test_remembered_patterns_are_bounded(monkeypatch):
    monkeypatch.setattr(chains, "_MOST_REMEMBERED", 16)
    leaves = square_leaves()
    product = leaves["x"] @ leaves["w"]
    with autofuse() as report:
        z = leaves["x"] @ leaves["w"]
        for number in range(1, 100):
            torch.testing.assert_close(z * float(number), product * number)
            torch.relu(torch.ones(number, 6) @ leaves["w"]).sum()
            assert len(chains._memory) <= 16
    assert report.fused.total() == 2 * 99


def test_what_has_no_pattern_is_not_remembered():
    leaves = square_leaves()
    numpy = pytest.importorskip("numpy")
    before = None
    for _ in range(3):
        with autofuse() as report:
            y = leaves["x"] @ leaves["w"] * numpy.float64(2.0)
        torch.testing.assert_close(y, leaves["x"] @ leaves["w"] * 2)
        assert steps_of(report) == [("alpha",)]
        assert before in (None, len(chains._memory))
        before = len(chains._memory)


OPERANDS = {
    "as is": lambda shape: torch.randn(shape),
    "turned": lambda shape: torch.randn(shape[::-1]).permute(*reversed(range(len(shape)))),
    "half": lambda shape: torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
    "wide": lambda shape: torch.randn(*shape[:-1], 1).expand(shape),
    "column": lambda shape: torch.randn(*shape[:-1], 1),
    "turned column": lambda shape: torch.randn(*shape[-2::-1], 1).permute(*reversed(range(len(shape) - 1)), -1),
    "row": lambda shape: torch.randn(shape[-1]),
}
OPERATIONS = {
    "add": lambda y, r: y + r,
    "scaled": lambda y, r: torch.add(y, r, alpha=0.5),
    "sub": lambda y, r: y - r,
    "rsub": lambda y, r: torch.rsub(y, r),
    "mul": lambda y, r: y * r,
    "reversed add": lambda y, r: r + y,
    "reversed scaled": lambda y, r: torch.add(r, y, alpha=0.5),
    "reversed sub": lambda y, r: r - y,
    "reversed rsub": lambda y, r: torch.rsub(r, y),
    "reversed mul": lambda y, r: torch.mul(r, y),
}


@pytest.mark.parametrize("rows", [(6,), (3, 4)], ids=["matrix", "batch"])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("operand", OPERANDS.values(), ids=OPERANDS)
def test_results_have_the_layout_that_torch_gives_them(operand, operation, rows):
    x, w, r = torch.randn(*rows, 8), torch.randn(8, 6), operand((*rows, 6))
    for between in (lambda y: y, torch.relu):
        plain = operation(between(x @ w), r)
        for _ in range(2):  # the second by what is remembered of the first
            with autofuse():
                fused = operation(between(x @ w), r)
                strides = fused.stride()
            assert strides == plain.stride()
            torch.testing.assert_close(fused, plain)


def test_a_layout_is_remembered_with_its_pattern():
    """A contiguous operand's decision is not a turned one's."""
    x, w, r = torch.randn(6, 8), torch.randn(8, 6), torch.randn(6, 6)
    for operand in (r, r.t(), r, torch.randn(6, 12)[:, ::2], r.t()):
        with autofuse():
            assert (operand + x @ w).stride() == (operand + torch.zeros(6, 6)).stride()


def test_a_call_seen_before_takes_the_short_way(monkeypatch):
    x, w, b, r = torch.randn(6, 8), torch.randn(8, 6), torch.randn(6), torch.randn(6, 6)

    def program():
        return r + torch.relu(x @ w + b), torch.rsub(F.linear(x, w.t()), r), F.gelu(x @ w + r.t())

    with autofuse() as report:
        held = [program()]
        for name in ("_product", "_step"):
            monkeypatch.setattr(lazy, name, lambda *args: pytest.fail(f"{args[1]} took the long way"))
        held.append(program())
    assert report.fused.total() == 6
