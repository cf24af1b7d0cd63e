"""isogemm.nn.EncoderLayer in stacks, with masks, compiled, checkpointed, under autocast and DDP."""

import copy
import warnings

import pytest
import torch
from encoder_layers import F_, HEADS, PADDED, TOKENS, D, call_function, make_input, make_layer, make_torch_layer, train
from ranks import run_ranks
from torch.nn import GELU, LayerNorm, TransformerEncoder
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm.nn import EncoderLayer
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data


def test_masks():
    layer, theirs, x = make_layer(), make_torch_layer(), make_input()
    causal = torch.nn.Transformer.generate_square_subsequent_mask(TOKENS)
    expected = layer(x, is_causal=True)
    torch.testing.assert_close(expected, theirs(x, causal, is_causal=True))
    for mask in (causal, causal.isinf()):
        assert_bitwise_equal(layer(x, mask, is_causal=True), expected)
        with pytest.raises(ValueError, match=r"src_mask needs is_causal=True; other masks"):
            layer(x, mask)
    padding = torch.zeros(PADDED.shape).masked_fill_(PADDED, -torch.inf)
    assert_bitwise_equal(
        layer(x, src_key_padding_mask=padding)[~PADDED], layer(x, src_key_padding_mask=PADDED)[~PADDED]
    )
    additive = make_data("normal", PADDED.shape, seed=2)
    torch.testing.assert_close(layer(x, src_key_padding_mask=additive), theirs(x, src_key_padding_mask=additive))
    torch.testing.assert_close(
        layer(x, causal, PADDED, True)[~PADDED], theirs(x, causal.isinf(), PADDED, True)[~PADDED]
    )


def test_a_nested_tensor():
    nested = torch.nested.nested_tensor([torch.zeros(3, D), torch.zeros(2, D)])
    with pytest.raises(ValueError, match=r"src is a NestedTensor; .*set its use_nested_tensor to False"):
        make_layer()(nested)


def _stack(layer, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True")
        return TransformerEncoder(layer, 2, LayerNorm(D), **options)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("mask", [None, PADDED, PADDED.flip(1)], ids=["unpadded", "padded right", "padded left"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_in_a_stack(training, norm_first, mask, nested):
    """With torch's nested tensors asked for or not: the layers see none."""
    options = {"norm_first": norm_first, "activation": "gelu"}
    ours = _stack(make_layer(**options), enable_nested_tensor=nested, mask_check=nested).train(training)
    theirs = _stack(make_torch_layer(**options), enable_nested_tensor=False).train(training)
    theirs.load_state_dict(ours.state_dict())
    assert not ours.use_nested_tensor
    x = make_input()
    seen = slice(None) if mask is None else ~mask
    with torch.set_grad_enabled(training), isogemm.dispatch_log() as log:
        result = ours(x, src_key_padding_mask=mask)
    assert [entry.op for entry in log].count("encoder_layer") == 2
    torch.testing.assert_close(result[seen], theirs(x, src_key_padding_mask=mask)[seen])


def test_put_into_torchs_stack_by_hand():
    stack = TransformerEncoder(make_torch_layer(), 2).eval()
    stack.layers[0] = EncoderLayer.from_torch(stack.layers[0])
    with torch.no_grad(), pytest.raises(ValueError, match="set its use_nested_tensor to False"):
        stack(make_input(), src_key_padding_mask=PADDED)
    stack.use_nested_tensor = False
    stack(make_input(), src_key_padding_mask=PADDED)


def test_in_a_stack_with_a_causal_mask():
    ours, theirs = _stack(make_layer()), _stack(make_torch_layer())
    theirs.load_state_dict(ours.state_dict())
    causal, x = torch.nn.Transformer.generate_square_subsequent_mask(TOKENS), make_input()
    torch.testing.assert_close(ours(x, causal), theirs(x, causal))
    torch.testing.assert_close(ours(x, causal, is_causal=True), theirs(x, causal))
    torch.testing.assert_close(ours(x[0], causal), theirs(x[0], causal))
    with pytest.raises(ValueError, match="src_mask needs is_causal=True"):
        ours(x, causal.roll(1, 0))


def test_in_torchs_transformer():
    ours = torch.nn.Transformer(D, HEADS, 1, 1, F_, 0.0, batch_first=True)
    theirs = copy.deepcopy(ours)
    report = isogemm.nn.swap(ours)
    assert "encoder.layers.0" in report.swapped
    x = make_input()
    torch.testing.assert_close(ours(x, x), theirs(x, x))


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": GELU("tanh"), "bias": False}], ids=str)
def test_compiled(options):
    torch._dynamo.reset()
    layer = make_layer(**options)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    masks = {"src_key_padding_mask": PADDED}
    for eager, traced in zip(train(layer, **masks), train(compiled, **masks), strict=True):
        assert_bitwise_equal(traced, eager)


def test_a_stack_compiled():
    torch._dynamo.reset()
    stack = _stack(make_layer())
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    masks = {"src_key_padding_mask": PADDED}
    for eager, traced in zip(train(stack, **masks), train(compiled, **masks), strict=True):
        assert_bitwise_equal(traced, eager)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant):
    layer = make_layer()

    def recomputed(x, **masks):
        return checkpoint(lambda x: layer(x, **masks), x, use_reentrant=reentrant)

    recomputed.zero_grad, recomputed.parameters = layer.zero_grad, layer.parameters
    masks = {"src_key_padding_mask": PADDED}
    for kept, again in zip(train(layer, **masks), train(recomputed, **masks), strict=True):
        assert_bitwise_equal(again, kept)


def test_under_autocast():
    layer, x = make_layer(), make_input()
    with torch.autocast("cpu", torch.bfloat16):
        result = layer(x)
        assert_bitwise_equal(result, call_function(layer, x))
    assert result.dtype == torch.float32
    result.sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


def test_main_grad():
    layer, x = make_layer(), make_input()
    layer(x).sum().backward()
    expected = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    layer(x).sum().backward()
    for parameter, grad in zip(layer.parameters(), expected, strict=True):
        assert parameter.grad is None
        assert_bitwise_equal(parameter.main_grad, grad)


PROGRAM = """
from torch.nn.parallel import DistributedDataParallel

import isogemm


def stack():
    torch.manual_seed(0)
    layers = (isogemm.nn.EncoderLayer(16, 4, 24, 0.0, norm_first=first) for first in (True, False))
    return torch.nn.Sequential(*layers)


def gradients(model, x):
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


batches = [torch.randn(5, 7, 16, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
alone = [gradients(stack(), x) for x in batches]
for static_graph in (False, True):
    parallel = DistributedDataParallel(stack(), static_graph=static_graph)
    for step in range(2):
        for got, first, second in zip(gradients(parallel, batches[rank]), *alone, strict=True):
            assert torch.equal(got, first / 2 + second / 2), (rank, static_graph, step)
"""


def test_gradients_under_ddp_are_the_mean(tmp_path):
    run_ranks(PROGRAM, tmp_path)
