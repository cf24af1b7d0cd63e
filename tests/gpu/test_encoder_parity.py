"""isogemm.encoder_layer by the kernels against torch's own layer: the issue's shapes, variants, masks, strides."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from encoder_oracle import assert_encoder_no_worse, isogemm_encoder
from gradients import gradients_of

import isogemm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.encoder_reference import (
    ENCODER_SHAPES,
    EncoderShape,
    encoder_parameters,
    encoder_tensors,
    products_of_tf32,
    torch_encoder,
)
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data, with_layout
from isogemm.verify.poison import poisoned_allocations

DEVICE = "cuda"
NUMBERS = {
    "ieee": (torch.float32, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
}
# Kernels are compiled for each width, dtype and variant: the tests keep to a few.
SMALL = EncoderShape(112, 42, 16, 4, 128)
ODD = EncoderShape(33, 17, 48, 3, 100)
PRE = {"norm_first": True, "activation": "gelu"}
CASES = [
    *itertools.product(ENCODER_SHAPES, ["tf32"]),
    *itertools.product([shape for shape in ENCODER_SHAPES if shape.sequences != 896], ["bf16"]),
    *itertools.product([SMALL, ODD, *ENCODER_SHAPES[4:7]], ["ieee"]),
    *itertools.product([SMALL, ENCODER_SHAPES[4]], ["fp16"]),
]


def _tensors(shape, number, **options):
    """In the number's dtype; torch computes by its precision until the test is over."""
    dtype, precision = NUMBERS[number]
    torch.backends.cuda.matmul.fp32_precision = precision or "ieee"
    return encoder_tensors(shape, dtype, device=DEVICE, **options)


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(("shape", "number"), CASES, ids=str)
def test_shapes_no_worse_than_torch(shape, number):
    tensors = _tensors(shape, number)
    assert_encoder_no_worse(tensors, nhead=shape.nhead, precision=NUMBERS[number][1], **PRE)


VARIANTS = {
    "post, relu": ("tf32", {"norm_first": False, "activation": "relu"}),
    "post, gelu": ("bf16", {"norm_first": False, "activation": "gelu"}),
    "post, rms, gelu_tanh": ("tf32", {"norm_first": False, "norm": "rms_norm", "activation": "gelu_tanh"}),
    "pre, rms, silu": ("bf16", {"norm_first": True, "norm": "rms_norm", "activation": "silu"}),
    "pre, relu": ("fp16", {"norm_first": True, "activation": "relu"}),
    "pre, silu, eps": ("ieee", {"norm_first": True, "activation": "silu", "eps": 1e-2}),
    "pre, gelu_tanh": ("bf16", {"norm_first": True, "activation": "gelu_tanh"}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_no_worse_than_torch(name):
    number, options = VARIANTS[name]
    tensors = _tensors(SMALL, number, norm=options.get("norm", "layer_norm"), activation=options["activation"])
    assert_encoder_no_worse(tensors, nhead=4, precision=NUMBERS[number][1], **options)


def test_post_norm_of_a_wide_layer_no_worse_than_torch():
    shape = ENCODER_SHAPES[4]
    tensors = _tensors(shape, "tf32", activation="relu")
    assert_encoder_no_worse(tensors, nhead=shape.nhead, precision="tf32")


@pytest.mark.parametrize("sizes", [(128, 16, 2048), (16, 4, 2048)], ids=str)
def test_a_layer_that_adds_little_keeps_its_input(sizes):
    """Where sums are rounded toward zero, x is not to go through those of 2048 features."""
    shape = EncoderShape(19, 37, *sizes)
    tensors = _tensors(shape, "tf32")
    tensors |= {name: tensors[name] / 300 for name in ("out_proj_weight", "linear2_weight")}
    assert_encoder_no_worse(tensors, nhead=shape.nhead, precision="tf32", **PRE)


@pytest.mark.parametrize("absent", ["", "bias", "norm"])
@pytest.mark.parametrize(
    ("number", "d_model", "nhead"), [("tf32", 64, 8), ("tf32", 128, 2), ("tf32", 128, 16), ("fp16", 128, 8)]
)
def test_rows_that_fill_no_tile_of_a_wide_layer(number, d_model, nhead, absent):
    """703 rows; heads that are short and long; norms first and last; the fewest features that warpgroups take."""
    shape = EncoderShape(19, 37, d_model, nhead, 128 if absent == "bias" else 192)
    options = PRE if absent == "norm" else {"norm_first": False, "norm": "rms_norm", "activation": "silu"}
    tensors = _tensors(shape, number, norm=options.get("norm", "layer_norm"), activation=options["activation"])
    if absent:
        tensors = {name: each for name, each in tensors.items() if absent not in name}
    assert_encoder_no_worse(tensors, nhead=nhead, precision=NUMBERS[number][1], **options)


@pytest.mark.parametrize("number", ["tf32", "bf16"])
@pytest.mark.parametrize("absent", ["biases", "norms", "in_proj_bias"])
def test_absent_parameters(absent, number):
    names = {
        "biases": [name for name in isogemm.EncoderParameters._fields if name.endswith("bias")],
        "norms": ["norm1_weight", "norm2_weight", "norm1_bias", "norm2_bias"],
        "in_proj_bias": ["in_proj_bias"],
    }[absent]
    tensors = {name: each for name, each in _tensors(SMALL, number).items() if name not in names}
    assert_encoder_no_worse(tensors, nhead=4, precision=NUMBERS[number][1], **PRE)


@pytest.mark.parametrize("number", ["tf32", "bf16"])
@pytest.mark.parametrize("shape", [SMALL, ENCODER_SHAPES[4]], ids=str)
def test_separate_projections(shape, number):
    tensors = _tensors(shape, number)
    assert_encoder_no_worse(tensors, nhead=shape.nhead, precision=NUMBERS[number][1], separate=True, **PRE)


def test_each_projection_may_have_a_bias():
    tensors = _tensors(SMALL, "ieee")
    parameters = encoder_parameters(tensors, separate=True)
    for present in ((True, False, True), (False, True, False)):
        zeroed = torch.where(torch.tensor(present, device=DEVICE).repeat_interleave(16), tensors["in_proj_bias"], 0)
        biases = tuple(bias if there else None for bias, there in zip(parameters.in_proj_bias, present, strict=True))
        result = isogemm.encoder_layer(tensors["x"], parameters._replace(in_proj_bias=biases), nhead=4, **PRE)
        theirs = torch_encoder(**tensors | {"in_proj_bias": zeroed}, nhead=4, **PRE)
        assert float((result - theirs).abs().max()) <= 1e-4


# Masks


def _padding(sequences, tokens):
    """True beyond each sequence's length; the second has none of its keys, the third lacks the first two."""
    lengths = torch.randint(1, tokens + 1, (sequences, 1), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(tokens) >= lengths
    mask[1], mask[2, :2] = True, True
    return mask.to(DEVICE)


def _added(mask, dtype):
    return torch.zeros(mask.shape, dtype=dtype, device=DEVICE).masked_fill(mask, -torch.inf)


MASKS = {
    "bool": lambda s, t, dtype: _padding(s, t),
    "0 and -inf": lambda s, t, dtype: _added(_padding(s, t), dtype),
    "numbers": lambda s, t, dtype: _normal(s, t, seed=5, dtype=dtype),
}


@pytest.mark.parametrize("number", ["tf32", "bf16"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("shape", [SMALL, ODD], ids=str)
def test_masks_no_worse_than_torch(shape, mask, is_causal, number):
    tensors = _tensors(shape, number)
    if mask is not None:
        mask = MASKS[mask](shape.sequences, shape.tokens, NUMBERS[number][0])
    options = {"nhead": shape.nhead, "key_padding_mask": mask, "is_causal": is_causal}
    assert_encoder_no_worse(tensors, precision=NUMBERS[number][1], **options, **PRE)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_query_without_keys_attends_to_nothing(number):
    tensors, precision = _tensors(SMALL, number), NUMBERS[number][1]
    nobody = tensors | {"out_proj_weight": torch.zeros_like(tensors["out_proj_weight"])}
    mask = _padding(SMALL.sequences, SMALL.tokens)
    for is_causal in (False, True):
        options = {"nhead": 4, "key_padding_mask": mask, "is_causal": is_causal, "precision": precision, **PRE}
        result, alone = isogemm_encoder(**tensors, **options), isogemm_encoder(**nobody, **options)
        assert_bitwise_equal(result[1], alone[1])
        if is_causal:
            assert_bitwise_equal(result[2, :2], alone[2, :2])


@pytest.mark.parametrize("nhead", [4, 2])
@pytest.mark.parametrize("number", ["tf32", "bf16", "fp16"])
def test_all_keys_far_below_are_all_there(number, nhead):
    """A number is added to every score, so large that the scores are lost in it: all keys weigh the same."""
    tensors = _tensors(SMALL, number)
    leaves = {name: each.requires_grad_() for name, each in tensors.items()}
    zeros = leaves | {"in_proj_weight": torch.zeros_like(leaves["in_proj_weight"], requires_grad=True)}
    for far in (-1e9, -1e30):
        mask = torch.full((SMALL.sequences, SMALL.tokens), far, device=DEVICE)
        options = {"nhead": nhead, "precision": NUMBERS[number][1], **PRE}
        result = isogemm_encoder(**zeros, key_padding_mask=mask, **options)
        torch.testing.assert_close(result, isogemm_encoder(**zeros, **options))
        gradients = torch.autograd.grad(isogemm_encoder(**leaves, key_padding_mask=mask, **options).sum(), leaves["x"])
        assert bool(gradients[0].isfinite().all())
        assert gradients[0].abs().max() < 1e4


def test_a_bool_mask_is_one_of_0_and_minus_inf():
    tensors, mask = _tensors(SMALL, "bf16"), _padding(SMALL.sequences, SMALL.tokens)
    expected = isogemm_encoder(**tensors, nhead=4, key_padding_mask=mask, **PRE)
    for dtype in (torch.float32, torch.bfloat16):
        result = isogemm_encoder(**tensors, nhead=4, key_padding_mask=_added(mask, dtype), **PRE)
        assert_bitwise_equal(result, expected, str(dtype))
    for layout in ("transposed", "sliced", "strided"):
        result = isogemm_encoder(**tensors, nhead=4, key_padding_mask=with_layout(mask, layout), **PRE)
        assert_bitwise_equal(result, expected, layout)


# Beyond the fused kernels


@pytest.mark.parametrize("number", ["tf32", "bf16"])
@pytest.mark.parametrize(
    "shape",
    [EncoderShape(5, 33, 512, 8, 640), EncoderShape(3, 200, 16, 4, 128), EncoderShape(2, 150, 96, 1, 64)],
    ids=str,
)
def test_other_sizes_no_worse_than_torch(shape, number):
    """Wide ones, long ones, one head of all: whichever path serves."""
    tensors = _tensors(shape, number)
    assert_encoder_no_worse(tensors, nhead=shape.nhead, precision=NUMBERS[number][1], **PRE)


# Heads of other widths than 4 and 8, and counts that are no powers of two.
@pytest.mark.parametrize("sizes", [(6, 9, 20, 5, 24), (6, 9, 24, 1, 24), (6, 9, 30, 2, 7), (6, 3, 8, 8, 1)], ids=str)
def test_odd_heads_no_worse_than_torch(sizes):
    shape = EncoderShape(*sizes)
    tensors = _tensors(shape, "tf32")
    assert_encoder_no_worse(tensors, nhead=shape.nhead, precision="tf32", **PRE)


# Forms of x


@pytest.mark.parametrize("number", ["tf32", "bf16"])
@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "misaligned"])
def test_any_strides(layout, number):
    """Strides of x, of the parameters and of the gradient that comes back."""
    tensors, precision = _tensors(SMALL, number), NUMBERS[number][1]
    options = {"nhead": 4, "precision": precision, **PRE}
    grad = _normal(*tensors["x"].shape, seed=9, dtype=tensors["x"].dtype)
    expected = gradients_of(isogemm_encoder, tensors, grad, **options)
    views = {name: with_layout(each, layout if each.ndim > 1 else "strided") for name, each in tensors.items()}
    leaves = {name: each.requires_grad_() for name, each in views.items()}
    with poisoned_allocations():
        result = isogemm_encoder(**leaves, **options)
        found = torch.autograd.grad(result, leaves.values(), with_layout(grad, layout))
    assert_bitwise_equal(result, isogemm_encoder(**tensors, **options))
    for name, got in zip(leaves, found, strict=True):
        assert_bitwise_equal(got, expected[name], name)


def test_one_sequence_without_its_axis():
    tensors = _tensors(SMALL, "bf16")
    mask = torch.arange(42, device=DEVICE) > 30
    flat = tensors | {"x": tensors["x"][3]}
    expected = isogemm_encoder(**tensors | {"x": tensors["x"][3:4]}, nhead=4, key_padding_mask=mask[None], **PRE)
    assert_bitwise_equal(isogemm_encoder(**flat, nhead=4, key_padding_mask=mask, **PRE), expected[0])


@pytest.mark.parametrize("empty", [(0, 42), (4, 0)], ids=["no sequence", "no token"])
def test_nothing_in_nothing_out(empty):
    tensors = _tensors(SMALL._replace(sequences=empty[0], tokens=empty[1]), "bf16")
    leaves = {name: each.requires_grad_() for name, each in tensors.items()}
    with poisoned_allocations():
        result = isogemm_encoder(**leaves, nhead=4, **PRE)
        result.sum().backward()
    assert result.shape == tensors["x"].shape
    for name, leaf in leaves.items():
        assert leaf.grad.shape == leaf.shape
        assert not bool(leaf.grad.any()), name


@pytest.mark.parametrize("fixed", ["x", "in_proj_weight", "norm1_weight", "linear2_bias", "every parameter"])
def test_gradients_only_where_they_are_wanted(fixed):
    tensors = _tensors(SMALL, "bf16")
    grad = _normal(*tensors["x"].shape, seed=9, dtype=torch.bfloat16)
    expected = gradients_of(isogemm_encoder, tensors, grad, nhead=4, **PRE)
    constant = [name for name in tensors if name != "x"] if fixed == "every parameter" else [fixed]
    leaves = {name: each.clone().requires_grad_(name not in constant) for name, each in tensors.items()}
    with poisoned_allocations():
        isogemm_encoder(**leaves, nhead=4, **PRE).backward(grad)
    for name, leaf in leaves.items():
        if name in constant:
            assert leaf.grad is None
        else:
            assert_bitwise_equal(leaf.grad, expected[name], name)


# Numbers


@pytest.mark.parametrize("number", ["tf32", "bf16"])
def test_large_and_small_rows(number):
    """Scores of hundreds, of which softmax keeps one; rows of 1e-4, whose variance is near eps."""
    tensors, precision = _tensors(SMALL, number), NUMBERS[number][1]
    tensors["in_proj_weight"] *= 6
    tensors["x"][::2] *= 1e-4
    options = {"nhead": 4, **PRE}
    with torch.no_grad():
        result = isogemm_encoder(**tensors, precision=precision, **options)
        with products_of_tf32() if precision == "tf32" else nullcontext():
            theirs = torch_encoder(**tensors, **options)
        exact = torch_encoder(**{name: each.double() for name, each in tensors.items()}, **options)
    assert_no_worse_than_torch(result, theirs, exact)


def test_tf32_operands_are_rounded_to_nearest():
    """The mean error is torch's; truncated operands would have 4 to 5 times that."""
    shape = ENCODER_SHAPES[0]
    tensors = _tensors(shape, "tf32")
    grad = _normal(*tensors["x"].shape, seed=9)
    options = {"nhead": shape.nhead, **PRE}
    exact = gradients_of(torch_encoder, tensors, grad, torch.float64, **options)
    with products_of_tf32():
        theirs = gradients_of(torch_encoder, tensors, grad, **options)
    ours = gradients_of(isogemm_encoder, tensors, grad, precision="tf32", **options)
    for name, right in exact.items():
        error, allowed = ((each[name].double() - right).square().mean().sqrt() for each in (ours, theirs))
        assert float(error) <= 1.5 * float(allowed) or float(error) <= 1e-6 * float(right.square().mean().sqrt()), name


def test_precision_none_is_torchs_setting():
    tensors = _tensors(SMALL, "ieee")
    for precision in ("ieee", "tf32"):
        torch.backends.cuda.matmul.fp32_precision = precision
        result = isogemm_encoder(**tensors, nhead=4, **PRE)
        assert_bitwise_equal(result, isogemm_encoder(**tensors, nhead=4, precision=precision, **PRE), precision)


def test_tf32x3_is_nearly_ieee():
    tensors = _tensors(SMALL, "ieee")
    result = isogemm_encoder(**tensors, nhead=4, precision="tf32x3", **PRE)
    assert float((result - torch_encoder(**tensors, nhead=4, **PRE)).abs().max()) <= 1e-4
