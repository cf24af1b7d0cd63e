"""isogemm.autofuse where a deferred tensor is used twice, or what it reads changes before it is computed."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from deferring import assert_as_plain, assert_same, in_another_thread, leaves_of, steps_of

from isogemm.fusion import autofuse
from isogemm.fusion.deferred import Deferred


def test_used_twice():
    def compute(x, w, b, **_):
        z = x @ w + b
        return torch.relu(z) + z

    report = assert_as_plain(compute)
    assert steps_of(report) == [("bias",)]
    assert not report.repeated


def test_a_step_after_its_operand_was_computed_reads_the_value():
    leaves = leaves_of()
    with autofuse() as report:
        z = leaves["x"] @ leaves["w"]
        y = torch.relu(z)
        z.sum()
    assert torch.equal(y, torch.relu(z))
    assert not report.fused
    assert report.left.total() == 1


def test_an_operand_read_after_its_fused_step_is_computed_again():
    leaves = leaves_of()
    with autofuse() as report:
        z = leaves["x"] @ leaves["w"]
        y = torch.relu(z)
        y.sum()
        z.sum()
    torch.testing.assert_close(y, torch.relu(z))
    assert steps_of(report) == [("relu",)]
    assert [entry.reason for entry in report.repeated] == ["sum reads it"]
    assert "computed twice" in str(report)


def test_an_operand_changed_after_the_step():
    leaves = leaves_of()
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
    leaves = leaves_of()
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        y = torch.relu(z + leaves["b"])
        z.sum()
        z.data.add_(1)
    torch.testing.assert_close(y, torch.relu(leaves["x"] @ leaves["w"] + leaves["b"]))


def test_an_operand_changed_unseen_after_the_step():
    leaves = {name: leaf.detach() for name, leaf in leaves_of().items()}
    with autofuse():
        z = leaves["x"] @ leaves["w"]
        y = torch.relu(z)
        z.sum()
        in_another_thread(lambda: z.add_(1))
    torch.testing.assert_close(y, torch.relu(leaves["x"] @ leaves["w"]))


def test_in_place_keeps_the_object_and_leaves_earlier_steps_alone():
    leaves = leaves_of()
    with autofuse() as report:
        z = leaves["x"] @ leaves["w"]
        y = torch.sigmoid(z)
        same = z.add_(leaves["b"])
        assert same is z
        assert type(z) is Deferred
    expected = leaves["x"] @ leaves["w"]
    torch.testing.assert_close(y, torch.sigmoid(expected))
    torch.testing.assert_close(z, expected + leaves["b"])
    assert sorted(steps_of(report)) == [("bias",), ("sigmoid",)]


def test_in_place_by_another_product():
    leaves = leaves_of()
    with autofuse():
        z, other = leaves["x"] @ leaves["w"] + leaves["b"], leaves["x"] @ leaves["w3"]
        same = z.add_(other)
        assert same is z
    torch.testing.assert_close(z, leaves["x"] @ leaves["w"] + leaves["b"] + leaves["x"] @ leaves["w3"])


ALIASES = {
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "dlpack": torch.from_dlpack,
    "view": lambda x: x.view(-1)[3:],
    "numpy, later": lambda x: torch.from_numpy(x.numpy()[2:]),
    "dlpack, later": lambda x: torch.from_dlpack(x[2:]),
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_changes_by_an_alias_come_after(alias):
    leaves = {name: leaf.detach() for name, leaf in leaves_of().items()}
    expected, other = torch.relu(leaves["x"] @ leaves["w"]), alias(leaves["x"])
    with autofuse():
        y = torch.relu(leaves["x"] @ leaves["w"])
        other.add_(1)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_changes_of_what_an_operand_is_an_alias_of_come_after(alias):
    whole, w = torch.randn(6, 8), torch.randn(8, 8)
    x = alias(whole)[-8:].view(-1, 8)
    expected = torch.relu(x @ w)
    with autofuse():
        y = torch.relu(x @ w)
        whole.add_(1)
    torch.testing.assert_close(y, expected)


def test_memory_beside_an_operand_is_not_the_operand_s():
    memory = np.zeros(64, np.float32)
    before, x, after = (torch.from_numpy(memory[first:last]) for first, last in ((0, 16), (16, 48), (48, 64)))
    with autofuse():
        y = torch.relu(x.view(4, 8) @ torch.randn(8, 8))
        before.add_(1)
        after.add_(1)
        assert type(y) is Deferred


def test_a_look_at_memory_computes_its_readers_alone():
    leaves = {name: leaf.detach() for name, leaf in leaves_of().items()}
    with autofuse() as report:
        z, other = leaves["x"] @ leaves["w"], leaves["x"] @ leaves["w3"]
        assert leaves["w"].data_ptr()
        assert (type(z), type(other)) == (torch.Tensor, Deferred)
        with autofuse():
            torch.relu(leaves["x"] @ leaves["w"])
        assert type(other) is Deferred
        assert leaves["b"].numpy().any()
        assert type(other) is Deferred
    assert "data_ptr may change an operand" in {entry.reason for entry in report.left}


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
    leaves = {name: leaf.detach() for name, leaf in leaves_of().items()}
    expected = torch.relu(leaves["x"] @ leaves["w"])
    with autofuse():
        y = torch.relu(leaves["x"] @ leaves["w"])
        write(leaves["x"])
    torch.testing.assert_close(y, expected)


def test_a_write_computes_the_readers_of_that_memory_only():
    leaves = {name: leaf.detach() for name, leaf in leaves_of().items()}
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
    assert_same(read, unread)


@pytest.mark.parametrize("operand", ["x", "w", "b", "r"])
def test_unseen_changes_raise(operand):
    leaves = {name: leaf.detach() for name, leaf in leaves_of().items()}

    with autofuse():
        y = torch.relu(leaves["x"] @ leaves["w"] + leaves["b"]) + leaves["r"]
        in_another_thread(lambda: leaves[operand].add_(1))
        with pytest.raises(RuntimeError, match="was changed in place"):
            y.sum()
    assert type(y) is Deferred
    with pytest.raises(RuntimeError, match="was changed in place"):
        y.sum()
    assert y.shape == (6, 5)


def test_new_memory_raises():  # set_ does not ask __torch_function__
    leaves = {name: leaf.detach() for name, leaf in leaves_of().items()}
    with autofuse():
        y = torch.relu(leaves["x"] @ leaves["w"])
        leaves["w"].set_(torch.ones(8, 5))
        with pytest.raises(RuntimeError, match="was changed in place"):
            y.sum()


def test_swapped_operand_raises():
    leaves = {name: leaf.detach() for name, leaf in leaves_of().items()}
    with autofuse():
        y = torch.relu(leaves["x"] @ leaves["w"])
        with torch._C.DisableTorchFunction():
            torch.utils.swap_tensors(leaves["w"], torch.ones(8, 5))
        with pytest.raises(RuntimeError, match="was changed in place"):
            y.sum()


def test_gate_of_another_input():
    report = assert_as_plain(lambda x, w, w3, **_: F.silu(x @ w) * ((x + 1) @ w3))
    assert steps_of(report) == [("silu",)]
    assert [entry.reason for entry in report.left] == ["the two products have different left operands"]


def test_gate_whose_input_changed_in_between():
    leaves = {name: leaf.detach() for name, leaf in leaves_of().items()}
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
    assert steps_of(block.report) == [("bias", "relu")] * 5
