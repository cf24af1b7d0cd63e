"""isogemm.autofuse on models as people write them: values and gradients of the plain run, and what was fused."""

import copy

import pytest
import torch
import torch.nn.functional as F

from isogemm.fusion import autofuse


class _Decorated(torch.nn.Module):
    """Gradients are computed outside of the block."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    @autofuse()
    def forward(self, *inputs):
        return self.model(*inputs)


def _run(model, inputs, dropout_seed=0):
    model = copy.deepcopy(model)
    inputs = [x.clone().requires_grad_() for x in inputs]
    torch.manual_seed(dropout_seed)
    result = model(*inputs)
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
    if result.requires_grad:
        (result * weights).sum().backward()
    return result, [x.grad for x in (*inputs, *model.parameters())]


def _compare(model, *inputs):
    plain, plain_gradients = _run(model, inputs)
    with autofuse() as report:
        fused, gradients = _run(model, inputs)
    outside, outside_gradients = _run(_Decorated(model), inputs)
    for result, found in ((fused, gradients), (outside, outside_gradients)):
        assert type(result) is torch.Tensor
        torch.testing.assert_close(result, plain)
        for left, right in zip(found, plain_gradients, strict=True):
            assert (left is None) == (right is None)
            if left is not None:
                torch.testing.assert_close(left, right)
    return [entry.steps for entry in report.fused.elements()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_transformer_encoder_layer(training, activation, norm_first, dropout):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        16, 4, 32, dropout, activation, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    layer.train(training)
    steps = _compare(layer, torch.randn(2, 5, 16, dtype=torch.float64))
    assert ("bias", activation) in steps
    assert (("bias", "residual") in steps) == (not training or dropout == 0)


def test_transformer_encoder_layers_fast_path():
    """In eval without gradients torch computes it in C++, from the weights."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    embed = torch.nn.Linear(8, 16)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        expected = encoder(embed(x))
        with autofuse():
            result = encoder(embed(x))
    torch.testing.assert_close(result, expected)


class _MixerBlock(torch.nn.Module):
    def __init__(self, tokens, channels):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(channels) for _ in range(2))
        self.across = self._mlp(tokens, 2 * tokens)
        self.within = self._mlp(channels, 4 * channels)

    def _mlp(self, size, hidden):
        return torch.nn.Sequential(
            torch.nn.Linear(size, hidden), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(hidden, size)
        )

    def forward(self, x):
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norms[1](x))


@pytest.mark.parametrize("training", [True, False])
def test_mixer_block(training):
    torch.manual_seed(0)
    block = _MixerBlock(6, 8).train(training).double()
    steps = _compare(block, torch.randn(3, 6, 8, dtype=torch.float64))
    assert steps.count(("bias", "gelu")) == 2
    assert ("bias", "residual") in steps


class _Written(torch.nn.Module):
    """Gates, scales, residuals and in-place activations, in several spellings."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (torch.nn.Linear(8, 8) for _ in range(3))
        self.scale = torch.nn.Parameter(torch.randn(8))
        self.act = torch.nn.ReLU(inplace=True)

    def forward(self, x):
        hidden = F.silu(self.gate(x)) * self.up(x)
        x = x + self.down(hidden)
        x = x + self.act(self.down(x))
        return torch.sigmoid((x @ self.gate.weight) * self.scale) + x


def test_written_by_hand():
    torch.manual_seed(0)
    steps = _compare(_Written().double(), torch.randn(4, 8, dtype=torch.float64))
    assert steps == [
        ("bias", "bias_up", "swiglu"),
        ("bias", "residual"),
        ("bias", "relu", "residual"),
        ("col_scale", "sigmoid", "residual"),
    ]


def test_convolutional_and_recurrent_models_are_left_alone():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv1d(3, 4, 3), torch.nn.BatchNorm1d(4), torch.nn.ReLU(inplace=True), torch.nn.Flatten(),
        torch.nn.Linear(16, 4), torch.nn.LayerNorm(4), torch.nn.Softmax(-1),
    ).double()  # fmt: skip
    assert _compare(model, torch.randn(2, 3, 6, dtype=torch.float64)) == []
    gru = torch.nn.GRU(4, 5, batch_first=True).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    with autofuse():
        result = gru(x)[0]
    torch.testing.assert_close(result, gru(x)[0])


@pytest.mark.parametrize("hidden_act", ["silu", "gelu_pytorch_tanh", "relu2", "quick_gelu"])
def test_llama_mlp(hidden_act):
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=32, intermediate_size=48, hidden_act=hidden_act, mlp_bias=hidden_act != "silu")
    steps = _compare(LlamaMLP(config).double(), torch.randn(2, 3, 32, dtype=torch.float64))
    if hidden_act == "silu":
        assert steps == [("swiglu",)]


@pytest.mark.parametrize("function", ["gelu_new", "gelu", "relu"])
@pytest.mark.parametrize("training", [True, False])
def test_gpt2_mlp(function, training):
    pytest.importorskip("transformers")
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    torch.manual_seed(0)
    config = GPT2Config(n_embd=16, activation_function=function)
    _compare(GPT2MLP(64, config).train(training).double(), torch.randn(2, 3, 16, dtype=torch.float64))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_language_models(family):
    transformers = pytest.importorskip("transformers")

    torch.manual_seed(0)
    if family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
        )
        model = transformers.LlamaForCausalLM(config).double()
    else:
        config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=32)
        model = transformers.GPT2LMHeadModel(config).double().eval()
    ids = torch.randint(0, 50, (2, 7))

    def loss():
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), [parameter.grad for parameter in model.parameters()]

    expected = loss()
    with autofuse() as report:
        found = loss()
    torch.testing.assert_close(found, expected)
    if family == "llama":
        assert [entry.steps for entry in report.fused.elements()].count(("swiglu",)) == 2
    with torch.no_grad():
        expected = model.generate(ids, max_new_tokens=3, do_sample=False)
        with autofuse():
            found = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(found, expected)
