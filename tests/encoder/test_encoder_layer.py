"""isogemm.encoder_layer on the CPU: the maths against torch's own layer, what it accepts and what it refuses."""

import functools
import itertools

import pytest
import torch
from encoder_oracle import assert_encoder_no_worse, isogemm_encoder
from gradients import gradients_of
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import with_layout
from strategies import float_dtypes, seeds, sizes

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.encoder_reference import (
    ENCODER_SHAPES,
    EncoderShape,
    encoder_parameters,
    encoder_tensors,
    torch_encoder,
)
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = ["relu", "gelu", "gelu_tanh", "silu"]
NORMS = ["layer_norm", "rms_norm"]
BIASES = ["in_proj_bias", "out_proj_bias", "linear1_bias", "linear2_bias", "norm1_bias", "norm2_bias"]
SMALL = EncoderShape(5, 17, 48, 3, 100)
MOST_TOKENS = 256  # of a test here: torch's float64 and 16-bit layers are slow on a CPU


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype)


def _cut(shape):
    return shape._replace(sequences=max(1, min(shape.sequences, MOST_TOKENS // shape.tokens)))


def _without(tensors, *names):
    return {name: each for name, each in tensors.items() if name not in names}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ENCODER_SHAPES, ids=str)
def test_shapes_no_worse_than_torch(shape, dtype):
    tensors = encoder_tensors(_cut(shape), dtype)
    assert_encoder_no_worse(tensors, nhead=shape.nhead, norm_first=True, activation="gelu")


VARIANTS = list(itertools.product([True, False], NORMS, ACTIVATIONS))


@pytest.mark.parametrize(
    ("norm_first", "norm", "activation", "dtype"),
    [*((*each, torch.float32) for each in VARIANTS), *((*each, half) for half in DTYPES[1:] for each in VARIANTS[::3])],
    ids=str,
)
def test_variants_no_worse_than_torch(norm_first, norm, activation, dtype):
    tensors = encoder_tensors(SMALL, dtype, norm=norm, activation=activation)
    assert_encoder_no_worse(tensors, nhead=3, norm_first=norm_first, norm=norm, activation=activation)


def test_defaults_are_those_of_torch():
    tensors = encoder_tensors(SMALL)
    given = {"norm_first": False, "activation": "relu", "norm": "layer_norm", "eps": 1e-5, "is_causal": False}
    expected = isogemm_encoder(**tensors, nhead=3, **given, key_padding_mask=None, precision=None)
    assert_bitwise_equal(isogemm_encoder(**tensors, nhead=3), expected)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
def test_eps(norm_first, norm):
    tensors = encoder_tensors(SMALL, norm=norm)
    tensors["x"] = tensors["x"] * 1e-2
    assert_encoder_no_worse(tensors, nhead=3, norm_first=norm_first, norm=norm, activation="gelu", eps=1e-2)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3"])
def test_precision_is_ieee_on_the_cpu(precision):
    tensors = encoder_tensors(SMALL)
    result = isogemm_encoder(**tensors, nhead=3, precision=precision)
    assert_bitwise_equal(result, isogemm_encoder(**tensors, nhead=3))


# Parameters


@pytest.mark.parametrize("absent", [*BIASES, "norm1_weight", "norm2_weight", "all"])
def test_absent_parameters(absent):
    names = [*BIASES, "norm1_weight", "norm2_weight"] if absent == "all" else [absent]
    tensors = _without(encoder_tensors(SMALL), *names)
    assert_encoder_no_worse(tensors, nhead=3, norm_first=True, activation="gelu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_separate_projections(bias, dtype):
    tensors = _without(encoder_tensors(SMALL, dtype), *(() if bias else ["in_proj_bias"]))
    assert_encoder_no_worse(tensors, nhead=3, norm_first=True, activation="gelu", separate=True)


@pytest.mark.parametrize("present", list(itertools.product([True, False], repeat=3)), ids=str)
def test_each_projection_may_have_a_bias(present):
    tensors = encoder_tensors(SMALL)
    zeroed = torch.where(torch.tensor(present).repeat_interleave(48), tensors["in_proj_bias"], 0)
    parameters = encoder_parameters(tensors, separate=True)
    biases = tuple(bias if there else None for bias, there in zip(parameters.in_proj_bias, present, strict=True))
    result = isogemm.encoder_layer(tensors["x"], parameters._replace(in_proj_bias=biases), nhead=3)
    theirs = torch_encoder(**tensors | {"in_proj_bias": zeroed}, nhead=3)
    assert float((result - theirs).abs().max()) <= 1e-4


def test_parameters_are_the_leaves_own_gradients():
    """Separate projections that are parameters of their own get each its own gradient."""
    tensors = encoder_tensors(SMALL)
    parameters = encoder_parameters(tensors, separate=True)
    leaves = [each.clone().requires_grad_() for each in (*parameters.in_proj_weight, *parameters.in_proj_bias)]
    own = parameters._replace(in_proj_weight=tuple(leaves[:3]), in_proj_bias=tuple(leaves[3:]))
    grad = _normal(*tensors["x"].shape, seed=9)
    found = torch.autograd.grad(isogemm.encoder_layer(tensors["x"], own, nhead=3), leaves, grad)
    views = gradients_of(functools.partial(isogemm_encoder, separate=True), tensors, grad, nhead=3)
    assert_bitwise_equal(torch.cat(found[:3]), views["in_proj_weight"])
    assert_bitwise_equal(torch.cat(found[3:]), views["in_proj_bias"])


@pytest.mark.parametrize("fixed", ["x", "in_proj_weight", "norm1_weight", "linear2_bias", "every parameter"])
def test_gradients_only_where_they_are_wanted(fixed):
    tensors = encoder_tensors(SMALL)
    grad = _normal(*tensors["x"].shape, seed=9)
    expected = gradients_of(isogemm_encoder, tensors, grad, nhead=3)
    constant = [name for name in tensors if name != "x"] if fixed == "every parameter" else [fixed]
    leaves = {name: each.clone().requires_grad_(name not in constant) for name, each in tensors.items()}
    isogemm_encoder(**leaves, nhead=3).backward(grad)
    for name, leaf in leaves.items():
        if name in constant:
            assert leaf.grad is None
        else:
            assert_bitwise_equal(leaf.grad, expected[name], name)


def test_no_graph_without_gradients():
    tensors = {name: each.requires_grad_() for name, each in encoder_tensors(SMALL).items()}
    with torch.no_grad():
        result = isogemm_encoder(**tensors, nhead=3)
    assert not result.requires_grad
    recorded = isogemm_encoder(**tensors, nhead=3)
    assert recorded.requires_grad
    assert_bitwise_equal(result, recorded)


# Masks


def _padding(sequences, tokens, seed=0):
    """True beyond each sequence's length, which is at least 1."""
    lengths = torch.randint(1, tokens + 1, (sequences, 1), generator=torch.Generator().manual_seed(seed))
    return torch.arange(tokens) >= lengths


def _added(mask, dtype=torch.float32):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -torch.inf)


MASKS = {
    "bool": lambda s, t, dtype: _padding(s, t),
    "0 and -inf": lambda s, t, dtype: _added(_padding(s, t), dtype),
    "numbers": lambda s, t, dtype: _normal(s, t, seed=5, dtype=dtype),
    "holes": lambda s, t, dtype: _normal(s, t, seed=5) > 1,
}


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("mask", [None, *MASKS])
def test_masks_no_worse_than_torch(mask, is_causal, dtype):
    mask = None if mask is None else MASKS[mask](SMALL.sequences, SMALL.tokens, dtype)
    tensors, options = encoder_tensors(SMALL, dtype), {"norm_first": True, "activation": "gelu"}
    assert_encoder_no_worse(tensors, nhead=3, key_padding_mask=mask, is_causal=is_causal, **options)


@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
def test_a_bool_mask_is_one_of_0_and_minus_inf(is_causal):
    tensors, mask = encoder_tensors(SMALL), _padding(SMALL.sequences, SMALL.tokens)
    results = [
        isogemm_encoder(**tensors, nhead=3, key_padding_mask=each, is_causal=is_causal) for each in (mask, _added(mask))
    ]
    assert_bitwise_equal(*results)


def test_a_mask_of_any_stride():
    tensors, mask = encoder_tensors(SMALL), _padding(SMALL.sequences, SMALL.tokens)
    for each in (mask, _added(mask)):
        expected = isogemm_encoder(**tensors, nhead=3, key_padding_mask=each)
        for layout in ("transposed", "sliced", "strided"):
            result = isogemm_encoder(**tensors, nhead=3, key_padding_mask=with_layout(each, layout))
            assert_bitwise_equal(result, expected, layout)


def test_left_out_keys_and_later_tokens_are_not_read_as_numbers():
    """They change nothing, however large; torch.finfo's largest would overflow a score."""
    tensors = encoder_tensors(SMALL)
    mask = torch.arange(SMALL.tokens).expand(SMALL.sequences, -1) >= 11
    expected = isogemm_encoder(**tensors, nhead=3, key_padding_mask=mask)[:, :11]
    tensors["x"] = torch.where(mask[..., None], 1e4 * tensors["x"], tensors["x"])
    assert_bitwise_equal(isogemm_encoder(**tensors, nhead=3, key_padding_mask=mask)[:, :11], expected, "padding")
    expected = isogemm_encoder(**tensors, nhead=3, is_causal=True)[:, :7]
    tensors["x"][:, 7:] = _normal(SMALL.sequences, 10, 48, seed=8)
    assert_bitwise_equal(isogemm_encoder(**tensors, nhead=3, is_causal=True)[:, :7], expected, "causal")


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
def test_a_query_without_keys_attends_to_nothing(is_causal, norm_first, dtype):
    """One sequence has no key at all, another none at or before its second token."""
    tensors = encoder_tensors(SMALL, dtype)
    mask = torch.zeros(SMALL.sequences, SMALL.tokens, dtype=torch.bool)
    mask[1], mask[3, :2] = True, True
    for each in (mask, _added(mask, dtype)):
        options = {"nhead": 3, "norm_first": norm_first, "activation": "gelu"}
        options |= {"key_padding_mask": each, "is_causal": is_causal}
        assert_encoder_no_worse(tensors, **options)
        none = tensors | {"out_proj_weight": torch.zeros_like(tensors["out_proj_weight"])}  # nobody attends
        result, alone = isogemm_encoder(**tensors, **options), isogemm_encoder(**none, **options)
        assert_bitwise_equal(result[1], alone[1])
        if is_causal:
            assert_bitwise_equal(result[3, :2], alone[3, :2])


def test_no_gradient_leaves_a_query_without_keys_for_the_projections():
    tensors = encoder_tensors(SMALL)
    mask = torch.ones(SMALL.sequences, SMALL.tokens, dtype=torch.bool)
    grad = _normal(*tensors["x"].shape, seed=9)
    found = gradients_of(isogemm_encoder, tensors, grad, nhead=3, key_padding_mask=mask)
    assert not bool(found["in_proj_weight"].any())
    assert not bool(found["in_proj_bias"].any())
    assert not bool(found["out_proj_weight"].any())
    assert all(bool(each.isfinite().all()) for each in found.values())


# Forms of x


@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_one_sequence_without_its_axis(masked, is_causal):
    tensors = encoder_tensors(SMALL._replace(sequences=1))
    mask = torch.arange(17) > 12 if masked else None
    grad = _normal(1, 17, 48, seed=9)
    batch = {"key_padding_mask": None if mask is None else mask[None], "is_causal": is_causal, "nhead": 3}
    flat = tensors | {"x": tensors["x"][0]}
    result = isogemm_encoder(**flat, nhead=3, key_padding_mask=mask, is_causal=is_causal)
    assert_bitwise_equal(result, isogemm_encoder(**tensors, **batch)[0])
    found = gradients_of(isogemm_encoder, flat, grad[0], nhead=3, key_padding_mask=mask, is_causal=is_causal)
    for name, same in gradients_of(isogemm_encoder, tensors, grad, **batch).items():
        assert_bitwise_equal(found[name], same[0] if name == "x" else same, name)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "misaligned", "broadcast"])
def test_any_strides(layout):
    """Strides of x, of the parameters and of the gradient that comes back."""
    tensors = encoder_tensors(SMALL)
    grad = with_layout(_normal(*tensors["x"].shape, seed=9), layout)
    if layout == "broadcast":
        tensors["x"] = tensors["x"][:1].expand_as(tensors["x"])
        views = tensors
    else:
        views = {name: with_layout(each, layout if each.ndim > 1 else "strided") for name, each in tensors.items()}
    contiguous = {name: each.contiguous() for name, each in tensors.items()}
    expected = isogemm_encoder(**contiguous, nhead=3, norm_first=True)
    gradients = gradients_of(isogemm_encoder, contiguous, grad.contiguous(), nhead=3, norm_first=True)
    leaves = {name: each.detach().requires_grad_() for name, each in views.items()}
    with poisoned_allocations():
        result = isogemm_encoder(**leaves, nhead=3, norm_first=True)
        found = torch.autograd.grad(result, leaves.values(), grad)
    assert_bitwise_equal(result, expected)
    for name, got in zip(leaves, found, strict=True):
        assert_bitwise_equal(got, gradients[name], name)


def test_sequences_across_the_batch_axis():
    """As a module that is not batch_first has them: [T, S, D] seen as [S, T, D]."""
    tensors = encoder_tensors(SMALL)
    expected = isogemm_encoder(**tensors, nhead=3)
    transposed = tensors["x"].transpose(0, 1).contiguous().transpose(0, 1)
    assert_bitwise_equal(isogemm_encoder(**tensors | {"x": transposed}, nhead=3), expected)


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("empty", [(0, 17), (4, 0)], ids=["no sequence", "no token"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_in_nothing_out(dtype, empty, masked):
    tensors = encoder_tensors(SMALL._replace(sequences=empty[0], tokens=empty[1]), dtype)
    mask = torch.zeros(empty, dtype=torch.bool) if masked else None
    leaves = {name: each.requires_grad_() for name, each in tensors.items()}
    with poisoned_allocations():
        result = isogemm_encoder(**leaves, nhead=3, key_padding_mask=mask)
        result.sum().backward()
    assert result.shape == tensors["x"].shape
    assert result.dtype == dtype
    for name, leaf in leaves.items():
        assert leaf.grad.shape == leaf.shape
        assert not bool(leaf.grad.any()), name


@pytest.mark.parametrize(
    "shape", [(1, 1, 16, 4, 32), (3, 1, 6, 6, 5), (3, 9, 16, 1, 24), (2, 3, 1, 1, 1), (2, 200, 16, 2, 8)], ids=str
)
def test_sizes_at_the_ends(shape):
    """One token, which attends to itself; one head; one feature, whose norm is its bias; many tokens."""
    tensors = encoder_tensors(EncoderShape(*shape))
    for norm_first in (True, False):
        result = isogemm_encoder(**tensors, nhead=shape[3], norm_first=norm_first)
        theirs = torch_encoder(**tensors, nhead=shape[3], norm_first=norm_first)
        assert float((result - theirs).abs().max()) <= 1e-4


@settings(max_examples=15, deadline=None)
@given(
    sequences=st.integers(2, 9),
    tokens=sizes(66, min_size=3),
    heads=st.sampled_from([(16, 4), (16, 1), (15, 5), (24, 2), (48, 3), (34, 2), (64, 4), (64, 16)]),
    dim_feedforward=sizes(130, min_size=16),
    dtype=float_dtypes(),
    norm_first=st.booleans(),
    norm=st.sampled_from(NORMS),
    activation=st.sampled_from(ACTIVATIONS),
    is_causal=st.booleans(),
    mask=st.sampled_from([None, *MASKS]),
    separate=st.booleans(),
    seed=seeds(),
)
def test_any_layer_no_worse_than_torch(
    sequences, tokens, heads, dim_feedforward, dtype, norm, activation, mask, separate, seed, **options
):
    d_model, nhead = heads
    shape = EncoderShape(sequences, tokens, d_model, nhead, dim_feedforward)
    tensors = encoder_tensors(shape, dtype, seed=seed % 1000, norm=norm, activation=activation)
    options["key_padding_mask"] = None if mask is None else MASKS[mask](sequences, tokens, dtype)
    assert_encoder_no_worse(tensors, nhead=nhead, norm=norm, activation=activation, separate=separate, **options)


# State


def test_nothing_is_kept_from_call_to_call():
    """Other shapes and dtypes between, and parameters changed in place: a call sees its arguments alone."""
    tensors = encoder_tensors(SMALL)
    grad = _normal(*tensors["x"].shape, seed=9)
    result = isogemm_encoder(**tensors, nhead=3)
    expected = gradients_of(isogemm_encoder, tensors, grad, nhead=3)
    for shape, dtype in ((ENCODER_SHAPES[5], torch.float32), (SMALL, torch.bfloat16), (_cut(ENCODER_SHAPES[4]), None)):
        assert bool(isogemm_encoder(**encoder_tensors(shape, dtype), nhead=shape.nhead).isfinite().all())
    with poisoned_allocations():
        assert_bitwise_equal(isogemm_encoder(**tensors, nhead=3), result)
        for name, same in gradients_of(isogemm_encoder, tensors, grad, nhead=3).items():
            assert_bitwise_equal(same, expected[name], name)
    for name, each in tensors.items():
        each.mul_(1.5)
        assert_bitwise_equal(
            isogemm_encoder(**tensors, nhead=3),
            isogemm_encoder(**{other: tensor.clone() for other, tensor in tensors.items()}, nhead=3),
            name,
        )


def test_arguments_are_left_alone():
    tensors = encoder_tensors(SMALL)
    mask = _padding(SMALL.sequences, SMALL.tokens)
    before = {name: each.clone() for name, each in tensors.items()} | {"mask": mask.clone()}
    grad = _normal(*tensors["x"].shape, seed=9)
    kept = grad.clone()
    gradients_of(isogemm_encoder, tensors, grad, nhead=3, key_padding_mask=mask)
    for name, each in (tensors | {"mask": mask}).items():
        assert_bitwise_equal(each, before[name], name)
    assert_bitwise_equal(grad, kept)


def test_a_result_may_be_changed_in_place():
    tensors = encoder_tensors(SMALL)
    leaves = [each.requires_grad_() for each in tensors.values()]
    grad = _normal(*tensors["x"].shape, seed=9)
    expected = torch.autograd.grad(2 * isogemm_encoder(**tensors, nhead=3), leaves, grad)
    result = isogemm_encoder(**tensors, nhead=3)
    result.mul_(2)
    for got, same in zip(torch.autograd.grad(result, leaves, grad), expected, strict=True):
        assert_bitwise_equal(got, same)


def test_parameters_changed_before_backward_raise():
    """torch's own check of saved tensors, which a private reference would pass by."""
    leaves = {name: each.requires_grad_() for name, each in encoder_tensors(SMALL).items()}
    result = isogemm_encoder(**leaves, nhead=3).sum()
    with torch.no_grad():
        leaves["linear2_weight"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


# Errors


def _call(tensors, nhead=3, **options):
    return isogemm_encoder(**tensors, nhead=nhead, **options)


@pytest.mark.parametrize("name", list(encoder_tensors(SMALL)))
def test_wrong_shapes_are_named(name):
    tensors = encoder_tensors(SMALL)
    for wrong in (torch.ones(7), torch.ones(2, 3, 5, 7), torch.ones(())):
        with pytest.raises(ValueError, match=name if name != "x" else r"\bx\b"):
            _call(tensors | {name: wrong})


@pytest.mark.parametrize("name", list(encoder_tensors(SMALL)))
def test_wrong_dtypes_are_named(name):
    """All but one of one dtype; when x is the one, some parameter that differs from it."""
    tensors = encoder_tensors(SMALL)
    with pytest.raises(TypeError, match=name if name != "x" else r"\bx\b|params"):
        _call(tensors | {name: tensors[name].bfloat16()})
    with pytest.raises(TypeError, match=name if name != "x" else r"\bx\b"):
        _call(tensors | {name: tensors[name].long()})


def test_wrong_separate_projections_are_named():
    tensors = encoder_tensors(SMALL)
    x, parameters = tensors["x"], encoder_parameters(tensors, separate=True)
    stacked = encoder_parameters(tensors)
    wrong = [
        (ValueError, "in_proj_weight", parameters._replace(in_proj_weight=parameters.in_proj_weight[:2])),
        (ValueError, "in_proj_bias", parameters._replace(in_proj_bias=parameters.in_proj_bias[:2])),
        (ValueError, "in_proj_weight", parameters._replace(in_proj_weight=(*parameters.in_proj_weight[:2], x[0]))),
        (ValueError, "in_proj_bias", parameters._replace(in_proj_bias=(*parameters.in_proj_bias[:2], x[0]))),
        ((TypeError, ValueError), "in_proj_bias", parameters._replace(in_proj_bias=stacked.in_proj_bias)),
        ((TypeError, ValueError), "in_proj_bias", stacked._replace(in_proj_bias=parameters.in_proj_bias)),
        (TypeError, "in_proj_weight", stacked._replace(in_proj_weight=None)),
        (TypeError, "out_proj_weight", stacked._replace(out_proj_weight=None)),
    ]
    for error, name, each in wrong:
        with pytest.raises(error, match=name):
            isogemm.encoder_layer(x, each, nhead=3)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (ValueError, "nhead.*5", {"nhead": 5}),
        (ValueError, "nhead", {"nhead": 0}),
        (ValueError, "nhead", {"nhead": -3}),
        (ValueError, "activation.*softplus", {"activation": "softplus"}),
        (ValueError, "activation.*swiglu", {"activation": "swiglu"}),
        (ValueError, "norm.*instance_norm", {"norm": "instance_norm"}),
        (ValueError, "precision.*fast", {"precision": "fast"}),
        (ValueError, "norm1_bias", {"norm": "rms_norm"}),
        (ValueError, "key_padding_mask", {"key_padding_mask": torch.zeros(17, dtype=torch.bool)}),
        (ValueError, "key_padding_mask", {"key_padding_mask": torch.zeros(5, 16, dtype=torch.bool)}),
        (ValueError, "key_padding_mask", {"key_padding_mask": torch.zeros(5, 17, 17, dtype=torch.bool)}),
        (TypeError, "key_padding_mask", {"key_padding_mask": torch.zeros(5, 17, dtype=torch.int64)}),
        (
            (TypeError, ValueError),
            "key_padding_mask.*grad",
            {"key_padding_mask": torch.zeros(5, 17, requires_grad=True)},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_options_are_named(error, match, options):
    with pytest.raises(error, match=match):
        _call(encoder_tensors(SMALL), **options)


def test_a_precision_that_does_not_apply():
    """As in isogemm.linear: tf32 is a precision of fp32 products."""
    with pytest.raises(ValueError, match=r"precision .*bfloat16"):
        _call(encoder_tensors(SMALL, torch.bfloat16), precision="tf32")


def test_accepted_names_are_in_the_error():
    with pytest.raises(ValueError, match="gleu") as caught:
        _call(encoder_tensors(SMALL), activation="gleu")
    assert all(name in str(caught.value) for name in ACTIVATIONS)
    with pytest.raises(ValueError, match=r"layer_norm.*rms_norm"):
        _call(encoder_tensors(SMALL), norm="rms")


def test_not_parameters():
    tensors = encoder_tensors(SMALL)
    with pytest.raises(TypeError, match="params"):
        isogemm.encoder_layer(tensors["x"], dict(tensors), nhead=3)


def test_public_names():
    assert {"EncoderParameters", "encoder_layer", "encoder_chunk"} <= set(isogemm.__all__)


def test_dispatch_log():
    tensors = encoder_tensors(SMALL)
    with isogemm.dispatch_log() as log:
        _call(tensors)
    entries = [entry for entry in log if entry.op == "encoder_layer"]
    assert len(entries) == 1
    assert all(str(size) in entries[0].problem for size in SMALL)
    assert "float32" in entries[0].problem
    assert entries[0].config or entries[0].reason
