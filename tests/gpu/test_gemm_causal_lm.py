"""A causal LM's linears on the GPU: a sequence's rows alone, in a batch, right-padded and prefilled in chunks."""

import pytest
import torch

import isogemm
from isogemm import nn
from isogemm.integrations.causal_lm import invariance_report

WAYS = {"batch", "padded", "chunked"}
TOKENS = 83


@pytest.fixture
def llama(request):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=1000,
        max_position_embeddings=128,
        tie_word_embeddings=getattr(request, "param", False),
    )
    return transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)


def _report(model):
    ids = torch.randint(1, 1000, (TOKENS,), generator=torch.Generator().manual_seed(0))
    return invariance_report(model, ids, batch=9, pad=13, chunks=(33, 1, 1, 48))


def _linears(model):
    return [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]


def _assert_linears_equal(report, linears):
    """Every isogemm linear, in every way, all of its elements."""
    assert {(part.way, part.module) for part in report.covered} == {(way, name) for way in WAYS for name in linears}
    assert [part for part in report.covered if not part.equal] == []


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_its_head_and_then_every_linear(llama, attention):
    llama.set_attn_implementation(attention)
    assert _report(llama).covered == ()

    nn.swap(llama, only="lm_head")
    _assert_linears_equal(_report(llama), ["lm_head"])

    nn.swap(llama)
    with isogemm.dispatch_log() as log:
        report = _report(llama)
    assert {entry.path for entry in log} == {"gemm"}
    _assert_linears_equal(report, _linears(llama))
    assert report.bypassed == ()
    assert {part.way for part in report.logits if part.differing} <= {part.way for part in report.varying}


@pytest.mark.parametrize("llama", [True], indirect=True, ids=["tied"])
def test_tied_head(llama):
    nn.swap(llama)
    assert llama.lm_head.weight is llama.model.embed_tokens.weight
    _assert_linears_equal(_report(llama), _linears(llama))


def test_a_varying_module_is_found(llama):
    class PlusBatch(torch.nn.Module):
        def forward(self, x):
            return x + x.shape[0] / 8

    nn.swap(llama)
    llama.model.layers[1].mlp.act_fn = PlusBatch()
    report = _report(llama)
    assert {part.way for part in report.varying if part.type == "PlusBatch"} == {"batch"}
    _assert_linears_equal(report, _linears(llama))
