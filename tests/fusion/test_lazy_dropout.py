"""Dropout inside `isogemm.autofuse`: one call has one mask."""

import pytest
import torch
import torch.nn.functional as F
from deferring import assert_same, in_another_thread, leaves_of, steps_of

from isogemm.fusion import autofuse


def test_dropout():
    leaves = leaves_of()
    x = torch.ones(64, 8)
    with autofuse() as report:
        torch.manual_seed(0)
        y = F.dropout(torch.relu(x @ leaves["w"]), 0.5)
    torch.manual_seed(0)
    assert_same(y, F.dropout(torch.relu(x @ leaves["w"]), 0.5))
    assert steps_of(report) == [("relu",)]
    with autofuse(dropout=True) as report:
        y = F.dropout(torch.sigmoid(x @ leaves["w"]), 0.5) + 1.0
        z = x @ leaves["w"]
        assert F.dropout(z, 0.0) is z
    expected = torch.sigmoid(x @ leaves["w"]) * 2
    kept = y != 1
    assert_same((y - 1)[kept], expected[kept])
    assert 0.3 < kept.float().mean() < 0.7
    assert steps_of(report) == [("sigmoid", "dropout")]


@pytest.mark.parametrize("first", ["operand", "dropout", "sums", "changed", "none"])
def test_one_call_of_dropout_has_one_mask(first):
    leaves = {name: leaf.detach() for name, leaf in leaves_of(torch.float64).items()}
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
            assert_same(a - kept, r)
            h = kept
        b = h + s
    assert_same(a - b, r - s)
    assert_same(a - h, r)
    assert (h == 0).any()


def test_dropout_fuses_with_the_residual_where_nobody_else_reads_it():
    leaves = leaves_of()
    with autofuse(dropout=True) as report:
        y = leaves["r"] + F.dropout(leaves["x"] @ leaves["w"] + leaves["b"], 0.5)
        in_place = F.dropout(torch.tanh(leaves["x"] @ leaves["w"]), 0.5)
        in_place += leaves["r"]
        held = F.dropout(torch.sigmoid(leaves["x"] @ leaves["w"]), 0.5)
        z = held + leaves["r"]
    assert_same(z - held, leaves["r"])
    assert y.requires_grad
    assert in_place.requires_grad
    assert steps_of(report) == [
        ("bias", "dropout", "residual"),
        ("tanh", "dropout", "residual"),
        ("sigmoid", "dropout"),
    ]


def test_a_dropout_changed_unseen_raises():
    leaves = {name: leaf.detach() for name, leaf in leaves_of().items()}
    with autofuse(dropout=True):
        h = F.dropout(leaves["x"] @ leaves["w"], 0.5)
        y = h + leaves["r"]
        h.sum()
        in_another_thread(lambda: h.add_(1))
        with pytest.raises(RuntimeError, match="was changed in place"):
            y.sum()


def test_a_second_dropout_is_torchs():
    leaves = leaves_of()
    with autofuse(dropout=True) as report:
        F.dropout(F.dropout(leaves["x"] @ leaves["w"], 0.5), 0.5).sum()
    assert steps_of(report) == [("dropout",)]
