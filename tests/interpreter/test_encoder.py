"""The fused layer's kernels on the CPU, through its own plan and autograd: poisoned memory, against float64."""

from functools import partial

import pytest
import torch
from encoder_oracle import with_gradients

from isogemm.core import operator
from isogemm.core.plan import Cache
from isogemm.encoder import buffers, configs, fused, layout
from isogemm.encoder.kernels import tiles
from isogemm.encoder.parameters import Options
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.encoder_reference import EncoderShape, encoder_parameters, encoder_tensors, torch_encoder
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations

pytestmark = pytest.mark.usefixtures("interpreted_schedules")
SHAPES = [EncoderShape(20, 5, 16, 4, 32), EncoderShape(2, 17, 48, 3, 36), EncoderShape(8, 3, 24, 6, 20)]
NARROW = EncoderShape(6, 3, 16, 2, 16)  # a warp's sixteen rows end within a sequence


def _fused(
    x, *, nhead, norm_first=True, activation="gelu", norm="layer_norm", key_padding_mask=None, is_causal=False,
    separate=False, precision="ieee", operand=None, eps=1e-5, **parameters,
):  # fmt: skip
    operand = operand or x.dtype
    precision = precision if operand is torch.float32 else None
    options = Options(nhead, norm_first, False, activation, norm, eps, is_causal, precision, operand)
    given = buffers.ExtraInputs(key_padding_mask)
    return fused.encoder_layer(x, encoder_parameters(parameters, separate=separate), given, options).y


def _grad(tensors):
    x = tensors["x"]
    return make_data("normal", x.shape, seed=99, dtype=x.dtype, device="cpu")


def _assert_close(shape, tensors=None, *, bound=None, **options):
    """For the result and every gradient; `bound` relative to the largest of each."""
    dtype = options.pop("dtype", torch.float32)
    bound = bound or {torch.float32: 3e-6, torch.float16: 1e-2}[dtype]
    if options.get("precision") == "tf32":
        bound = 3e-3
    tensors = tensors or encoder_tensors(shape, dtype, norm=options.get("norm", "layer_norm"), activation="gelu")
    ours = partial(_fused, nhead=shape.nhead, **options)
    theirs = {name: each for name, each in options.items() if name not in ("separate", "precision", "operand")}
    with poisoned_allocations():
        found = with_gradients(ours, tensors, _grad(tensors))
    oracle = partial(torch_encoder, nhead=shape.nhead, **{"norm_first": True, "activation": "gelu"} | theirs)
    exact = with_gradients(oracle, tensors, _grad(tensors), torch.float64)
    for name, expected in exact.items():
        error = (found[name].double() - expected).abs().max() / exact[name].abs().max().clamp_min(1e-3)
        assert error < bound, f"{name}: {error:.1e}"


CASES = [
    (SHAPES[0], True, "ieee"), (NARROW, False, "tf32"), (SHAPES[1], True, "tf32"), (SHAPES[2], False, "ieee"),
    (SHAPES[2], True, "tf32x3"), (EncoderShape(3, 5, 64, 4, 48), True, "tf32"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "norm_first", "precision"), CASES, ids=str)
def test_float32(shape, norm_first, precision):
    _assert_close(shape, norm_first=norm_first, precision=precision)


def test_float16():
    _assert_close(NARROW, dtype=torch.float16)


def test_autocast():
    """float32 parameters and sums, 16-bit products."""
    _assert_close(NARROW, operand=torch.float16, bound=1e-2)


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu_tanh"])
def test_activations(activation):
    shape = EncoderShape(3, 5, 16, 4, 32)
    tensors = encoder_tensors(shape, activation=activation)
    _assert_close(shape, tensors, activation=activation, norm="layer_norm")


@pytest.mark.parametrize("norm_first", [True, False])
def test_rms_norm(norm_first):
    _assert_close(SHAPES[2], norm="rms_norm", norm_first=norm_first)


def test_separate_projections():
    _assert_close(SHAPES[2], separate=True)


@pytest.mark.parametrize("which", [(0, 0, 0), (0, 0, 1), (0, 1, 0)])
def test_projections_that_are_one_tensor(which):
    """Shared queries and keys, say: each is added up, and none is taken for a stacked one."""
    shape = EncoderShape(3, 5, 16, 4, 32)
    tensors = encoder_tensors(shape)
    weights, biases = tensors["in_proj_weight"].chunk(3), tensors["in_proj_bias"].chunk(3)

    def stacked(x, weight, bias, other=None, others_bias=None, **rest):
        rest |= {"in_proj_weight": torch.cat([(weight, other)[i] for i in which])}
        rest |= {"in_proj_bias": torch.cat([(bias, others_bias)[i] for i in which])}
        return torch_encoder(x, nhead=4, norm_first=True, activation="gelu", **rest)

    def separate(x, weight, bias, other=None, others_bias=None, **rest):
        params = encoder_parameters(rest | {"in_proj_weight": (), "in_proj_bias": ()})._replace(
            in_proj_weight=tuple((weight, other)[i] for i in which),
            in_proj_bias=tuple((bias, others_bias)[i] for i in which),
        )
        options = Options(4, True, False, "gelu", "layer_norm", 1e-5, False, "ieee", x.dtype)
        return fused.encoder_layer(x, params, buffers.ExtraInputs(), options).y

    given = {name: each for name, each in tensors.items() if "in_proj" not in name}
    given |= {"weight": weights[0], "bias": biases[0]}
    given |= {"other": weights[1], "others_bias": biases[1]} if 1 in which else {}
    found = with_gradients(separate, given, _grad(tensors))
    for name, right in with_gradients(stacked, given, _grad(tensors), torch.float64).items():
        assert (found[name].double() - right).abs().max() <= 3e-6 * right.abs().max().clamp_min(1.0), name


@pytest.mark.parametrize("norm_first", [True, False])
def test_no_eps(norm_first):
    """Rows of a tile beyond the last one have no variance at all."""
    tensors = encoder_tensors(EncoderShape(3, 5, 16, 4, 32))
    del tensors["out_proj_bias"]
    found = with_gradients(partial(_fused, nhead=4, norm_first=norm_first, eps=0.0), tensors, _grad(tensors))
    assert [name for name, each in found.items() if not bool(each.isfinite().all())] == []


def test_without_biases_and_scales():
    tensors = encoder_tensors(SHAPES[0])
    bare = {name: each for name, each in tensors.items() if "bias" not in name and "norm" not in name}
    _assert_close(SHAPES[0], bare)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masks(kind):
    shape = EncoderShape(6, 7, 16, 4, 32)
    mask = torch.zeros(6, 7, dtype=torch.bool)
    mask[::2, 4:] = True
    given = mask if kind is torch.bool else torch.zeros(6, 7).masked_fill(mask, float("-inf"))
    _assert_close(shape, key_padding_mask=given)
    _assert_close(shape, key_padding_mask=given, is_causal=True)


def test_a_sequence_without_keys_attends_to_nothing():
    shape = EncoderShape(2, 3, 16, 4, 32)
    tensors = encoder_tensors(shape)
    mask = torch.tensor([[False] * 3, [True] * 3])
    found = with_gradients(partial(_fused, nhead=4, key_padding_mask=mask), tensors, _grad(tensors))
    assert all(bool(each.isfinite().all()) for each in found.values())


@pytest.mark.parametrize(("shape", "precision"), [(EncoderShape(9, 5, 16, 4, 32), "ieee"), (NARROW, "tf32")], ids=str)
def test_programs_and_places_change_no_bit(monkeypatch, shape, precision):
    tensors = encoder_tensors(shape)
    run = partial(_fused, nhead=shape.nhead, precision=precision)
    grad = _grad(tensors)
    whole = with_gradients(run, tensors, grad)
    monkeypatch.setattr(tiles, "programs_per_part", lambda *args: 3)
    monkeypatch.setattr(configs, "row_warps", lambda *args: 2)
    again = with_gradients(run, tensors, grad)
    for name, each in whole.items():
        assert_bitwise_equal(again[name], each)
    part = with_gradients(run, tensors | {"x": tensors["x"][1:3].clone()}, grad[1:3].clone())
    beside = tensors["x"].clone()
    beside[1::2] = torch.nan
    others = with_gradients(run, tensors | {"x": beside}, grad)
    for name in ("the layer", "gradient of x"):
        assert_bitwise_equal(part[name], whole[name][1:3])
        assert_bitwise_equal(others[name][::2], whole[name][::2], "beside NaN")


@pytest.mark.parametrize(
    ("shape", "norm_first", "precision"), [(NARROW, True, "ieee"), (NARROW, False, "ieee")], ids=str
)
def test_shared_memory_changes_no_bit(monkeypatch, shape, norm_first, precision):
    """Nor is anything read before it is written where no part has another's bytes."""
    tensors = encoder_tensors(shape)
    run = partial(_fused, nhead=shape.nhead, norm_first=norm_first, precision=precision)
    shared = with_gradients(run, tensors, _grad(tensors))

    def apart(spans, limit=None):
        spans = spans if limit is None else {each: span for each, span in spans.items() if each.name == "dx"}
        return layout.in_a_row({name: span.size for name, span in spans.items()})

    monkeypatch.setattr(layout, "sharing", apart)
    monkeypatch.setattr(fused, "_plans", Cache())
    with poisoned_allocations():
        found = with_gradients(run, tensors, _grad(tensors))
    for name, each in shared.items():
        assert_bitwise_equal(found[name], each, name)


def test_main_grad_is_added_to():
    shape = EncoderShape(6, 5, 16, 4, 32)
    tensors = {name: each.requires_grad_() for name, each in encoder_tensors(shape).items()}
    y = _fused(nhead=4, **tensors)
    y.sum().backward()
    expected = {name: each.grad.clone() for name, each in tensors.items() if name != "x"}
    for name, each in tensors.items():
        each.grad = None
        if name != "x":
            each.main_grad = torch.ones_like(each)
    _fused(nhead=4, **tensors).sum().backward()
    for name, each in expected.items():
        torch.testing.assert_close(tensors[name].main_grad, each + 1)
        assert tensors[name].grad is None
        assert tensors[name].grad_added_to_main_grad


def test_the_main_grad_of_a_parameter_in_two_places():
    tensors = {name: each.requires_grad_() for name, each in encoder_tensors(EncoderShape(6, 5, 16, 4, 32)).items()}
    tensors["norm2_weight"] = tensors["norm1_weight"]
    _fused(nhead=4, **tensors).sum().backward()
    expected = tensors["norm1_weight"].grad.clone()
    for main_grad in (torch.zeros(16), torch.zeros(32)[::2]):
        tensors["norm1_weight"].main_grad = main_grad
        _fused(nhead=4, **tensors).sum().backward()
        torch.testing.assert_close(main_grad, expected)


@pytest.mark.parametrize("accumulated", [False, True])
def test_compiled(accumulated):
    """The registered operators, as torch.compile calls them; on a GPU they are the same functions."""
    for name in ("encoder_layer", "encoder_layer_backward", "encoder_layer_backward_into"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"isogemm::{name}", "CPU"):
            operator._library.impl(name, getattr(fused, f"_{name}"), "CPU")
    tensors = encoder_tensors(EncoderShape(6, 5, 16, 4, 32))
    expected = with_gradients(partial(_fused, nhead=4), tensors, _grad(tensors))
    leaves = {name: each.clone().requires_grad_() for name, each in tensors.items()}
    if accumulated:
        leaves["linear1_weight"].main_grad = torch.zeros_like(tensors["linear1_weight"])
        frozen = leaves["linear2_weight"] = leaves["linear2_weight"].detach()
        frozen.main_grad = torch.zeros_like(frozen)

    @partial(torch.compile, backend="aot_eager", fullgraph=True)
    def compiled(leaves):
        return _fused(nhead=4, **leaves)

    y = compiled(leaves)
    y.backward(_grad(tensors))
    assert_bitwise_equal(y, expected["the layer"])
    for name, leaf in leaves.items():
        if leaf.requires_grad:
            found = leaf.main_grad if accumulated and name == "linear1_weight" else leaf.grad
            assert_bitwise_equal(found, expected[f"gradient of {name}"], name)
    assert not accumulated or not frozen.main_grad.any()


@pytest.mark.parametrize("tokens", [1, 5, 42, 64, 127, 128, 200])
def test_chunks_are_whole_sequences_and_whole_tiles(tokens):
    assert configs.chunk_of(tokens) * tokens % 64 == 0
