"""isogemm.nn.swap: a model's linears replaced in place, and what it says of the others."""

import pytest
import torch

from isogemm.gemm.api import linear
from isogemm.nn import Kept, Linear, swap
from isogemm.testing import assert_bitwise_equal, make_data


class _Block(torch.nn.Module):
    def __init__(self, dtype=None):
        super().__init__()
        self.up = torch.nn.Linear(8, 16, dtype=dtype)
        self.down = torch.nn.Linear(16, 8, bias=False, dtype=dtype)

    def forward(self, x):
        return self.down(self.up(x).relu())


class _Tied(torch.nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 8)
        self.layers = torch.nn.ModuleList(_Block() for _ in range(layers))
        self.head = torch.nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


LINEARS = ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head")


def _reason(report, name):
    [reason] = [kept.reason for kept in report.kept if kept.name == name]
    return reason


def test_all_linears():
    model = _Tied()
    before = dict(model.named_parameters())
    assert swap(model).swapped == LINEARS
    assert {name for name, module in model.named_modules() if type(module) is Linear} == {*LINEARS}
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in after)


def test_the_model_computes_through_isogemm():
    model = _Block()
    swap(model)
    x = make_data("normal", (3, 8), seed=0)
    hidden = linear(x, model.up.weight, model.up.bias).relu()
    assert_bitwise_equal(model(x), linear(hidden, model.down.weight))


def test_tied_weights_stay_tied():
    model = _Tied()
    swap(model)
    assert model.head.weight is model.embedding.weight
    model(torch.tensor([1, 2, 3])).sum().backward()
    assert model.embedding.weight.grad is model.head.weight.grad is not None


def test_optimizer_made_before_still_trains_it():
    model = _Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    swap(model)
    before = model.layers[0].up.weight.clone()
    model(torch.tensor([1, 2, 3])).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.layers[0].up.weight, before)


@pytest.mark.parametrize("only", [None, "first", "second"])
def test_one_module_under_two_names_stays_one(only):
    model = torch.nn.Module()
    model.first = model.second = torch.nn.Linear(8, 8)
    assert swap(model, only).swapped == ("first", "second")
    assert type(model.first) is Linear
    assert model.first is model.second


@pytest.mark.parametrize(
    ("only", "swapped"),
    [
        ("head", ["head"]),
        ("layers.*", LINEARS[:4]),
        ("*.up", ["layers.0.up", "layers.1.up"]),
        (["head", "layers.1.?p"], ["layers.1.up", "head"]),
        (lambda name, module: module.bias is None, ["layers.0.down", "layers.1.down", "head"]),
        (lambda name, module: False, []),
    ],
)
def test_only(only, swapped):
    model = _Tied()
    report = swap(model, only)
    assert report.swapped == tuple(swapped)
    assert [kept.name for kept in report.kept] == [name for name in LINEARS if name not in swapped]
    assert {kept.reason for kept in report.kept} == {"not selected by only"}


def test_numerics_of_the_new_modules():
    model = _Tied()
    swap(model, "head", precision="tf32", out_dtype=torch.float32)
    assert (model.head.precision, model.head.out_dtype) == ("tf32", torch.float32)


def test_pattern_that_names_no_linear_changes_nothing():
    model = _Tied()
    with pytest.raises(
        ValueError, match=r"only has 'heads', which names no Linear; there are layers\.\*\.up x 2, .*head"
    ):
        swap(model, ["head", "heads"])
    assert type(model.head) is torch.nn.Linear


@pytest.mark.parametrize("only", [3, [3], {"head": 1}])
def test_only_of_another_type(only):
    with pytest.raises(TypeError, match=r"only is .*; expected a name or glob pattern"):
        swap(_Tied(), only)


@pytest.mark.parametrize("kind", [torch.nn.Linear, Linear])
def test_a_linear_itself_is_refused(kind):
    with pytest.raises(ValueError, match=r"use isogemm\.nn\.Linear\.from_torch"):
        swap(kind(2, 2))


def test_swapping_twice():
    model = _Tied()
    swap(model, "head")
    head = model.head
    report = swap(model)
    assert model.head is head
    assert report.swapped == LINEARS[:4]
    assert _reason(report, "head") == "is an isogemm.nn.Linear already"
    assert swap(model, "head").swapped == ()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_dtypes_without_a_contract_stay(dtype):
    model = _Block(dtype)
    report = swap(model)
    assert report.swapped == ()
    assert str(dtype) in _reason(report, "up")
    assert type(model.up) is torch.nn.Linear


def test_what_cannot_be_swapped_stays_with_the_reason():
    model = _Tied()
    torch.nn.utils.parametrizations.weight_norm(model.layers[0].up)
    model.layers[1].up.forward = torch.nn.functional.relu
    report = swap(model)
    assert report.swapped == ("layers.0.down", "layers.1.down", "head")
    assert [kept.name for kept in report.kept] == ["layers.0.up", "layers.1.up"]
    assert "made from other parameters" in _reason(report, "layers.0.up")
    assert "replaced on the instance" in _reason(report, "layers.1.up")


def test_weights_that_torch_reads_past_the_forward_stay():
    model = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.nn.Linear(8, 8))
    report = swap(model)
    assert report.swapped == ("1",)
    assert "fast path" in _reason(report, "0.linear1")
    assert "subclass" in _reason(report, "0.self_attn.out_proj")
    assert "in_proj_weight" in _reason(report, "0.self_attn")


def test_inside_a_compiled_model():
    compiled = torch.compile(torch.nn.Linear(8, 8), backend="eager")
    assert "compiled" in _reason(swap(compiled), "_orig_mod")
    compiled = torch.compile(_Block(), backend="eager")
    assert swap(compiled).swapped == ("_orig_mod.up", "_orig_mod.down")


def test_other_modules_with_products_are_named():
    model = torch.nn.Module()
    model.conv = torch.nn.Conv1d(2, 2, 3)
    model.lazy = torch.nn.LazyConv1d(2, 3)
    model.bilinear = torch.nn.Bilinear(2, 2, 2)
    model.recurrent = torch.nn.GRU(2, 2)
    model.norm = torch.nn.LayerNorm((2, 2))
    model.embedding = torch.nn.Embedding(2, 2)
    report = swap(model)
    assert [kept.name for kept in report.kept] == ["conv", "lazy", "bilinear", "recurrent"]
    assert report.kept[0] == Kept("conv", "Conv1d", "is no Linear: torch computes products with its weight")


def test_report_in_words():
    model = _Tied()
    model.conv = torch.nn.Conv1d(2, 2, 3)
    assert str(swap(model, "*.up")).splitlines() == [
        "swapped 2, kept 4",
        "  swapped layers.*.up x 2",
        "  kept layers.*.down x 2 (Linear): not selected by only",
        "  kept head (Linear): not selected by only",
        "  kept conv (Conv1d): is no Linear: torch computes products with its weight",
    ]
