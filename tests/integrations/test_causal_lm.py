"""The report on a causal LM: it finds what varies and that alone, and isogemm's linears do not.

`_Toy` is built of elementwise operations, which are the same for any shape, so that what varies is known. On models of
transformers torch's own operations are measured, and nothing is asserted of them.
"""

import pytest
import torch

from isogemm import nn
from isogemm.integrations.causal_lm import invariance_report

WAYS = {"batch", "padded", "chunked"}
IDS = torch.randint(1, 50, (13,), generator=torch.Generator().manual_seed(0))
CHUNKS = (5, 1, 7)


class _Plus(torch.nn.Module):
    """Adds 1/8 for each element of one axis: 0 the sequences of the batch, 1 the tokens."""

    def __init__(self, axis=None):
        super().__init__()
        self.axis = axis

    def forward(self, x):
        return x if self.axis is None else x + x.shape[self.axis] / 8


class _Layer(torch.nn.Module):
    """A residual block whose own operations, before its modules or after them, may vary too."""

    def __init__(self):
        super().__init__()
        self.first = _Plus()
        self.second = _Plus()
        self.before = self.after = _Plus().forward  # functions, no modules

    def forward(self, x, *, scale):
        hidden = self.second(self.before(self.first(x) * scale))
        return self.after(x + hidden), {"not a tensor": object()}


class _Output(dict):
    def __init__(self, **values):
        super().__init__(values)

    @property
    def logits(self):
        return self["logits"]

    @property
    def past_key_values(self):
        return self["past_key_values"]


class _Toy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(50, 8)
        self.layers = torch.nn.ModuleList(_Layer() for _ in range(3))
        self.flat = _Plus()
        self.head = nn.Linear(8, 50)

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=False):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x, _ = layer(x, scale=torch.full((1, x.shape[1], 1), 0.5))
        x = self.flat(x.flatten(0, 1)).view_as(x)
        return _Output(logits=self.head(x), past_key_values=(past_key_values or 0) + 1)


def _report(model, **changed):
    return invariance_report(model, IDS, **{"batch": 3, "pad": 4, "chunks": CHUNKS, **changed})


def _varying(report):
    return {(part.way, part.part, part.module) for part in report.varying}


def test_nothing_varies_where_nothing_does():
    report = _report(_Toy())
    assert report.varying == ()
    assert all(part.equal for part in (*report.logits, *report.parts))
    assert {part.way for part in report.logits} == {part.way for part in report.covered} == WAYS
    assert {part.module for part in report.covered} == {"head"}
    assert report.covered[0].total == 13 * 50
    assert report.bypassed == ()


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_an_mlp_is_one_covered_part(activation):
    model = _Toy()
    for layer in model.layers:
        layer.second = nn.MLP(8, 24, activation=activation)
    model.spare = nn.MLP(8, 24)
    report = _report(model)
    assert report.varying == ()
    mlps = {f"layers.{index}.second" for index in range(3)}
    assert {part.module for part in report.covered} == {"head", *mlps}
    assert {part.module for part in report.parts if ".second" in part.module} == mlps
    assert all(part.total for part in report.covered)
    assert report.bypassed == ("spare",)


class _Turned(torch.nn.Module):
    """Complex numbers, as of rotary positions, whose parts both vary with the rows."""

    def __init__(self):
        super().__init__()
        self.join = torch.nn.Module()
        self.join.forward = lambda x: torch.complex(x + x.shape[0], x - x.shape[0])

    def forward(self, x):
        return self.join(x).conj().imag  # a view that torch marks as negated


def test_a_complex_element_counts_once():
    model = _Toy()
    model.flat = _Turned()
    parts = [part for part in _report(model).parts if part.module == "flat.join" and part.part == "module"]
    assert {part.way: (part.differing, part.total) for part in parts} == dict.fromkeys(WAYS, (13 * 8, 13 * 8))


def test_finds_what_enters_an_mlp():
    model = _Toy()
    model.layers[1].second, model.layers[1].before = nn.MLP(8, 24), _Plus(0).forward
    assert _varying(_report(model)) == {("batch", "ops before", "layers.1.second")}


AXES = pytest.mark.parametrize(("axis", "ways"), [(0, {"batch"}), (1, {"padded", "chunked"})])


@AXES
def test_finds_a_varying_module_and_it_alone(axis, ways):
    model = _Toy()
    model.layers[1].first.axis = axis
    report = _report(model)
    assert _varying(report) == {(way, "module", "layers.1.first") for way in ways}
    assert {part.way for part in report.logits if part.differing} == ways


@AXES
def test_finds_varying_operations_before_a_module(axis, ways):
    model = _Toy()
    model.layers[1].before = _Plus(axis).forward
    assert _varying(_report(model)) == {(way, "ops before", "layers.1.second") for way in ways}


@AXES
def test_finds_varying_operations_after_the_last_module(axis, ways):
    """Not handed on by the residual stream either."""
    model = _Toy()
    model.layers[1].after = _Plus(axis).forward
    assert _varying(_report(model)) == {(way, "ops inside", "layers.1") for way in ways}


def test_tokens_of_all_sequences_on_one_axis():
    model = _Toy()
    model.flat.axis = 0
    assert _varying(_report(model)) == {(way, "module", "flat") for way in WAYS}


@pytest.mark.parametrize(("axis", "ways"), [(0, {"batch"}), (2, {"padded", "chunked"})])
def test_tokens_on_a_later_axis(axis, ways):
    """[B, heads, T, d] with as many heads as tokens."""

    class Split(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = _Plus(axis)

        def forward(self, x):
            heads = x[:, None].repeat(1, len(IDS), 1, 1)
            return self.inner(heads)[:, 3]

    model = _Toy()
    model.layers[2].first = Split()
    assert _varying(_report(model)) == {(way, "module", "layers.2.first.inner") for way in ways}


def test_a_module_called_twice():
    model = _Toy()
    model.layers[2].first = model.layers[0].first
    model.layers[0].first.axis = 0
    assert _varying(_report(model)) == {("batch", "module", "layers.0.first")}


def test_gathered_rows_are_not_compared():
    """As of an expert: which tokens they are cannot be told; the operations around it are compared."""

    class Expert(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = _Plus(0)

        def forward(self, x):
            chosen = x[..., 0] > 0
            result = x.clone()
            result[chosen] = self.inner(x[chosen])
            return result

    model = _Toy()
    model.embedding.weight.data[:, 0] = 1.0 - torch.arange(50) % 2  # even tokens, the padding's among them
    model.layers[0].first = Expert()
    report = _report(model)
    inner = [part for part in report.parts if part.module == "layers.0.first.inner"]
    assert {(part.way, part.part, part.total) for part in inner} == {(way, "module", 0) for way in WAYS}
    assert _varying(report) == {(way, "ops inside", "layers.0.first") for way in WAYS}
    assert str(report).count("not compared") == 3


def test_a_linear_whose_forward_is_passed_by():
    class Past(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return x + self.linear.bias

    model = _Toy()
    model.layers[0].first = Past()
    report = _report(model)
    assert report.bypassed == ("layers.0.first.linear",)
    assert "isogemm never called: layers.0.first.linear" in str(report)


def test_the_model_is_left_as_it_was():
    model = _Toy()
    model.layers[0].eval()
    training = [module.training for module in model.modules()]

    class Broken(torch.nn.Module):
        def forward(self, x):
            raise ArithmeticError

    _report(model)
    kept = model.layers[1].second
    model.layers[1].second = Broken()
    with pytest.raises(ArithmeticError):
        _report(model)
    model.layers[1].second = kept
    assert [module.training for module in model.modules()] == training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_ways_can_be_left_out():
    report = _report(_Toy(), pad=None, chunks=None)
    assert list(report.ways) == ["batch"]
    assert {part.way for part in report.parts} == {"batch"}
    assert _report(_Toy(), chunks=4).ways["chunked"] == "prefilled 3 + 3 + 3 + 4 tokens"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch": 1}, "batch is 1; expected at least 2"),
        ({"pad": 0}, "pad is 0; expected at least 1"),
        ({"chunks": 1}, "chunks is 1; expected 2 to 13"),
        ({"chunks": 14}, "chunks is 14; expected 2 to 13"),
        ({"chunks": (5, 7)}, r"chunks is \[5, 7\]; expected .* the sum 13"),
        ({"chunks": (13, 0)}, r"chunks is \[13, 0\]; expected 2 or more positive lengths"),
        ({"chunks": (13,)}, r"chunks is \[13\]; expected 2 or more"),
    ],
)
def test_bad_ways(changed, message):
    with pytest.raises(ValueError, match=message):
        _report(_Toy(), **changed)


@pytest.mark.parametrize("ids", [torch.zeros(2, 3, dtype=torch.long), torch.zeros(0, dtype=torch.long)])
def test_more_or_less_than_one_sequence(ids):
    with pytest.raises(ValueError, match=r"input_ids has shape .*; expected one sequence, \[L\] or \[1, L\]"):
        invariance_report(_Toy(), ids)


@pytest.mark.parametrize("ids", [torch.zeros(3), [1, 2, 3]])
def test_ids_that_are_none(ids):
    with pytest.raises(TypeError, match=r"input_ids is .*; expected a tensor of token ids"):
        invariance_report(_Toy(), ids)


@pytest.mark.parametrize(
    "changed", [{"batch": "4"}, {"batch": 2.0}, {"pad": 1.5}, {"chunks": 2.5}, {"chunks": ["a", 3]}]
)
def test_ways_of_another_type(changed):
    [(name, _)] = changed.items()
    with pytest.raises(TypeError, match=rf"^{name} is .*; expected .* or None"):
        _report(_Toy(), **changed)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt2", r"^model is a str; expected a torch\.nn\.Module$"),
        (_Toy, r"^model is the class _Toy; expected a torch\.nn\.Module$"),
        (torch.nn.Linear(2, 2), r"^model is a Linear; expected a causal LM as of transformers: its forward takes no"),
        (_Plus(), r"^model is a _Plus; expected a causal LM as of transformers: its forward takes no input_ids="),
    ],
)
def test_what_is_no_causal_lm(model, message):
    with pytest.raises(TypeError, match=message):
        invariance_report(model, IDS)


def test_a_model_without_parameters():
    class Empty(torch.nn.Module):
        def forward(self, input_ids, **options):
            return input_ids

    with pytest.raises(TypeError, match=r"model is a Empty; expected a causal LM .*: it has no parameters"):
        invariance_report(Empty(), IDS)


def test_a_model_without_logits():
    with pytest.raises(TypeError, match="model gave a Tensor; expected a causal LM's output"):
        invariance_report(_Logitless(), IDS)


class _Logitless(_Toy):
    def forward(self, input_ids, use_cache):
        return self.embedding(input_ids)


def test_report_in_words():
    model = _Toy()
    model.layers[1].first.axis = 0
    text = str(_report(model)).splitlines()
    assert text[:4] == [
        "_Toy, 13 tokens, torch.float32 on cpu: bits against those alone",
        "  batch: sequence 1 of 3",
        "  padded: 4 tokens to the right",
        "  chunked: prefilled 5 + 1 + 7 tokens",
    ]
    assert [line.split() for line in text[4:]] == [
        ["batch", "padded", "chunked"],
        *(line.split() for line in (
            "logits, end to end 650 of 650 differ equal equal",
            "embedding (Embedding) torch equal equal equal",
            "layers.*.first x 3 (_Plus) torch 104 of 312 differ equal equal",
            "layers.*.second x 3 (_Plus) torch equal equal equal",
            "flat (_Plus) torch equal equal equal",
            "head (Linear) isogemm equal equal equal",
            "still varies: layers.*.first x 3 (_Plus)",
        )),
    ]  # fmt: skip


def _causal_lm(name="Llama", **changed):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **{
            "hidden_size": 64,
            "intermediate_size": 172,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 1000,
            "max_position_embeddings": 64,
            **changed,
        }
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def _assert_linears_equal(report, linears):
    """Every isogemm linear, in every way, all of its elements."""
    assert {(part.way, part.module) for part in report.covered} == {(way, name) for way in WAYS for name in linears}
    assert [part for part in report.covered if not part.equal] == []


@pytest.mark.parametrize(("attention", "dtype"), [("sdpa", torch.float32), ("eager", torch.bfloat16)], ids=str)
def test_llama_with_its_head_and_then_every_linear(attention, dtype):
    model = _causal_lm().to(dtype)
    model.set_attn_implementation(attention)
    linears = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    plain = _report(model)
    assert plain.covered == ()
    assert {part.module for part in plain.parts if part.type == "Linear" and part.part == "module"} == {*linears}

    assert nn.swap(model, only="lm_head").swapped == ("lm_head",)
    _assert_linears_equal(_report(model), ["lm_head"])

    assert [*nn.swap(model).swapped, "lm_head"] == linears
    report = _report(model)
    _assert_linears_equal(report, linears)
    for part in report.varying:
        assert part.module.split(".")[-1] in str(report)
    # Attention's operations are no modules: they are judged where they feed the output projection.
    assert ("chunked", "ops before", "model.layers.1.self_attn.o_proj") in {
        (part.way, part.part, part.module) for part in report.parts
    }


def test_llama_logits_vary_by_what_the_report_names():
    """Where they vary from end to end, some part does by itself."""
    model = _causal_lm()
    nn.swap(model)
    report = _report(model)
    assert {part.way for part in report.logits if part.differing} <= {part.way for part in report.varying}


@AXES
def test_llama_with_a_varying_module(axis, ways):
    model = _causal_lm()
    linears = nn.swap(model).swapped
    model.model.layers[1].mlp.act_fn = _Plus(axis)
    report = _report(model)
    assert {part.way for part in report.varying if part.module.endswith("1.mlp.act_fn")} == ways
    _assert_linears_equal(report, linears)


def test_tied_llama_stays_tied():
    model = _causal_lm(tie_word_embeddings=True)
    assert "lm_head" in nn.swap(model).swapped
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    _assert_linears_equal(_report(model), [name for name, module in model.named_modules() if type(module) is nn.Linear])


@pytest.mark.parametrize(
    ("name", "changed"), [("Qwen3", {"head_dim": 16}), ("GPTNeoX", {}), ("Mixtral", {"num_local_experts": 4})]
)
def test_other_models(name, changed):
    model = _causal_lm(name, **changed)
    linears = nn.swap(model).swapped
    assert len(linears) >= 9
    report = _report(model)
    _assert_linears_equal(report, linears)
    assert report.bypassed == ()


def test_gpt2_keeps_its_products_and_says_so():
    model = _causal_lm("GPT2", bos_token_id=0, eos_token_id=0)
    report = nn.swap(model)
    assert report.swapped == ("lm_head",)
    assert {kept.type for kept in report.kept} == {"Conv1D"}
    _assert_linears_equal(_report(model), ["lm_head"])
