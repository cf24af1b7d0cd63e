"""isogemm.nn.swap: a model's linears and encoder layers replaced in place, and what it says of the others."""

import copy
import sys

import pytest
import torch
from torch.nn import TransformerEncoder, TransformerEncoderLayer

import isogemm
from isogemm.gemm.api import linear
from isogemm.nn import EncoderLayer, Kept, Linear, Note, restore, swap
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data


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
        ValueError,
        match=r"only has 'heads', which names no Linear or encoder layer; there are layers\.\*\.up x 2, .*head",
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


@pytest.mark.parametrize(
    ("model", "says"),
    [("gpt2", "a str"), (None, "a NoneType"), (torch.zeros(2), "a Tensor"), (_Tied, "the class _Tied")],
)
@pytest.mark.parametrize("function", [swap, restore])
def test_no_model(function, model, says):
    with pytest.raises(TypeError, match=rf"^model is {says}; expected a torch\.nn\.Module$"):
        function(model)


def test_options_that_no_layer_can_have_change_nothing():
    for dtype, out_dtype in (
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.int8),
    ):
        model = _Tied().to(dtype)
        with pytest.raises(ValueError, match=rf"layers\.0\.up: out_dtype is {out_dtype}; accepted for {dtype} inputs"):
            swap(model, out_dtype=out_dtype)
        assert {type(layer.up) for layer in model.layers} == {torch.nn.Linear}
    with pytest.raises(ValueError, match="precision is 'fp8'"):
        swap(torch.nn.Sequential(), precision="fp8")
    model = _Tied().bfloat16()
    swap(model, "head", out_dtype=torch.float32)
    assert model(torch.tensor([1, 2])).dtype is torch.float32


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
    model = torch.nn.Sequential(TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.nn.Linear(8, 8))
    report = swap(model, ["1", "0.*"])
    assert report.swapped == ("1",)
    assert _reason(report, "0") == "not selected by only"
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


@pytest.mark.parametrize(
    ("d_model", "dtype", "noted"),
    [
        (768, torch.float32, "on a GPU: it is composed (d_model is 768"),
        (384, torch.bfloat16, "on a GPU: it is composed (d_model is 384"),
        (96, torch.float32, "on a GPU outside of a CUDA graph: it is composed (d_model is 96"),
        (128, torch.float32, ""),
    ],
)
def test_note_on_layers_that_are_slower_than_torchs(d_model, dtype, noted):
    layer = TransformerEncoderLayer(d_model, 6 if d_model % 6 == 0 else 4, 8, batch_first=True, dtype=dtype)
    report = swap(torch.nn.Sequential(layer, torch.nn.Linear(2, 2, dtype=dtype)))
    assert report.swapped == ("0", "1")
    assert [note.name for note in report.notes] == ["0"] * bool(noted)
    assert f"note on 0: slower than torch's {noted}" in str(report) or not noted


def test_notes_in_words(monkeypatch):
    monkeypatch.setattr(
        sys.modules[swap.__module__], "slower_than_torch", lambda d_model, nhead, dtype: f"{d_model} {nhead} {dtype}"
    )
    report = swap(_Encoded())
    assert report.notes == tuple(Note(name, "TransformerEncoderLayer", "8 2 torch.float32") for name in LAYERS)
    assert "  note on encoder.layers.* x 2: 8 2 torch.float32" in str(report).splitlines()


class _Encoded(torch.nn.Module):
    def __init__(self, dropout=0.0, **options):
        super().__init__()
        self.up = torch.nn.Linear(3, 8)
        layer = TransformerEncoderLayer(8, 2, 16, dropout, **({"batch_first": True} | options))
        nested = not layer.norm_first  # torch warns where it does not do it
        self.encoder = TransformerEncoder(layer, 2, torch.nn.LayerNorm(8), enable_nested_tensor=nested)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x, mask=None):
        return self.head(self.encoder(self.up(x), src_key_padding_mask=mask))


ENCODED = ("up", "encoder.layers.0", "encoder.layers.1", "head")
LAYERS = ENCODED[1:3]
PADDED = torch.arange(5) >= torch.tensor([5, 2, 4])[:, None]


def _kinds(model):
    return {name: type(model.get_submodule(name)) for name in ENCODED}


def test_encoder_layers():
    model = _Encoded()
    before, names = dict(model.named_parameters()), [name for name, _ in model.named_modules()]
    report = swap(model, precision="ieee")
    assert (report.swapped, report.kept) == (ENCODED, ())
    assert _kinds(model) == dict(zip(ENCODED, (Linear, EncoderLayer, EncoderLayer, Linear), strict=True))
    assert {model.get_submodule(name).precision for name in ENCODED} == {"ieee"}
    assert [name for name, _ in model.named_modules()] == names
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in after)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mask", [None, PADDED], ids=["unpadded", "padded"])
def test_encoder_layers_compute_through_isogemm(training, mask):
    theirs = _Encoded().train(training)
    ours = copy.deepcopy(theirs)
    assert swap(ours).unnested == ("encoder",)
    x, seen = make_data("normal", (3, 5, 3), seed=0), slice(None) if mask is None else ~mask
    with torch.set_grad_enabled(training), isogemm.dispatch_log() as log:
        result = ours(x, mask)
    assert [entry.op for entry in log].count("encoder_layer") == 2
    torch.testing.assert_close(result[seen], theirs(x, mask)[seen])


def test_no_nested_tensors_where_one_layer_is_new():
    model = _Encoded().eval()
    assert swap(model, LAYERS[1]).unnested == ("encoder",)
    with torch.no_grad():
        assert model(make_data("normal", (3, 5, 3), seed=0), PADDED).shape == (3, 5, 3)
    assert swap(_Encoded(norm_first=True)).unnested == ()
    assert swap(_Encoded(), "head").unnested == ()


def test_only_some_encoder_layers():
    model = _Encoded()
    report = swap(model, "encoder.layers.1")
    assert report.swapped == LAYERS[1:]
    assert {name for name, kind, _ in report.kept if kind == "TransformerEncoderLayer"} == {LAYERS[0]}
    assert {_reason(report, name) for name in ("up", "head", LAYERS[0])} == {"not selected by only"}
    assert not any(kept.name.startswith(LAYERS[1]) for kept in report.kept)
    report = swap(model, lambda name, module: isinstance(module, TransformerEncoderLayer))
    assert report.swapped == LAYERS[:1]
    assert _reason(report, LAYERS[1]) == "is an isogemm.nn.EncoderLayer already"


@pytest.mark.parametrize("kind", [TransformerEncoderLayer, EncoderLayer])
def test_an_encoder_layer_itself_is_refused(kind):
    with pytest.raises(ValueError, match=r"use isogemm\.nn\.EncoderLayer\.from_torch"):
        swap(kind(8, 2, batch_first=True))


def test_a_stack_itself():
    model = _Encoded().encoder
    assert str(swap(model)).splitlines() == [
        "swapped 2, kept 0",
        "  swapped layers.* x 2",
        "  no nested tensors in the model",
    ]


def test_encoder_layers_twice():
    model = _Encoded()
    swap(model)
    layers = [*model.encoder.layers]
    report = swap(model)
    assert (report.swapped, report.unnested) == ((), ())
    assert {(kept.name, kept.reason) for kept in report.kept if kept.name in LAYERS} == {
        (name, "is an isogemm.nn.EncoderLayer already") for name in LAYERS
    }
    assert len(report.kept) == 4
    assert [*model.encoder.layers] == layers


def test_one_encoder_layer_under_two_names_stays_one():
    model = torch.nn.Module()
    model.first = model.second = TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    assert swap(model, "second").swapped == ("first", "second")
    assert type(model.first) is EncoderLayer
    assert model.first is model.second


def test_dropout_is_swapped_and_drops():
    model = _Encoded(dropout=0.5)
    assert swap(model).swapped == ENCODED
    x = make_data("normal", (3, 5, 3), seed=0)
    assert not torch.equal(model(x), model(x))
    assert_bitwise_equal(model.eval()(x), model(x))


class _Subclass(TransformerEncoderLayer):
    pass


class _Doubled(TransformerEncoderLayer):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


def _layer(kind=TransformerEncoderLayer, **options):
    return kind(8, 2, 16, 0.0, **({"batch_first": True} | options))


def _changed(change):
    layer = _layer()
    change(layer)
    return layer


@pytest.mark.parametrize(
    ("reason", "layer"),
    [
        ("self_attn is batch_first=False", _layer(batch_first=False)),
        ("torch.float64 has no contract", _layer(dtype=torch.float64)),
        ("its activation is ", _layer(activation=torch.nn.ELU())),
        ("_Doubled has a forward of its own", _layer(_Doubled)),
        ("is a subclass of torch.nn.TransformerEncoderLayer", _layer(_Subclass)),
        ("linear1 has hooks", _changed(lambda layer: layer.linear1.register_forward_hook(print))),
        (
            "linear1: its weight is made",
            _changed(lambda layer: torch.nn.utils.parametrizations.weight_norm(layer.linear1)),
        ),
        ("it is compiled", _changed(lambda layer: layer.compile(backend="eager"))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_encoder_layers_that_stay(reason, layer):
    model = torch.nn.Sequential(layer)
    report = swap(model)
    assert (report.swapped, model[0]) == ((), layer)
    assert reason in _reason(report, "0")


def test_a_compiled_encoder_layer():
    compiled = torch.compile(_layer(), backend="eager")
    assert _reason(swap(compiled), "_orig_mod") == "is compiled: swap first, then compile"


def test_a_linear_in_an_encoder_layer_and_elsewhere():
    model = _Encoded()
    model.twin = model.encoder.layers[0].linear1
    report = swap(model)
    assert report.swapped == (*ENCODED, "twin")
    assert model.twin.weight is model.encoder.layers[0].linear1.weight
    model(make_data("normal", (3, 5, 3), seed=0))


def test_weights_tied_between_encoder_layers():
    model = _Encoded()
    first, second = model.encoder.layers
    second.linear1.weight = first.linear1.weight
    swap(model)
    first, second = model.encoder.layers
    assert second.linear1.weight is first.linear1.weight
    model(make_data("normal", (3, 5, 3), seed=0)).sum().backward()
    assert first.linear1.weight.grad is not None


def test_encoder_layers_in_words():
    model = _Encoded()
    model.encoder.layers[0] = _Subclass(8, 2, 16, 0.0, batch_first=True)
    assert str(swap(model)).splitlines() == [
        "swapped 3, kept 5",
        "  swapped up",
        "  swapped encoder.layers.1",
        "  swapped head",
        "  no nested tensors in encoder",
        "  kept encoder.layers.0 (_Subclass): is a subclass of torch.nn.TransformerEncoderLayer, whose modules may be "
        "called past its forward",
        "  kept encoder.layers.0.self_attn (MultiheadAttention): is no Linear: torch computes products with its "
        "in_proj_weight",
        "  kept encoder.layers.0.self_attn.out_proj (NonDynamicallyQuantizableLinear): is a subclass of "
        "torch.nn.Linear, whose weight may be read past its forward",
        "  kept encoder.layers.0.linear1 (Linear): torch's fast path for inference reads its weight past its forward",
        "  kept encoder.layers.0.linear2 (Linear): torch's fast path for inference reads its weight past its forward",
    ]


def test_a_layer_with_a_product_of_its_own_stays():
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    layer.register_parameter("extra", torch.nn.Parameter(torch.zeros(2, 2)))
    model = torch.nn.Sequential(layer, torch.nn.Linear(16, 16))
    report = isogemm.nn.swap(model)
    assert model[0] is layer
    assert "extra" in str(report)
