"""The composed path on the CPU: its operators and their autograd, main_grad, autocast, torch.compile, checkpoints."""

import itertools
import math

import plain_encoder_oracle
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import isogemm
from isogemm import EncoderParameters
from isogemm.encoder import composed
from isogemm.encoder.attention.op import AttentionCall, attention
from isogemm.norm.op import encoder_norm
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.inputs import make_data

D, NHEAD, F = 24, 3, 40


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def _normal(*shape, seed=0, dtype=torch.float32):
    return make_data("normal", shape, seed=seed, dtype=dtype, device="cpu")


def _params(*, separate=False, bias=True, dtype=torch.float32, norm="layer_norm"):
    def leaf(seed, *shape):
        scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.3
        return (_normal(*shape, seed=seed) * scale).to(dtype).requires_grad_()

    in_proj = tuple(leaf(10 + part, D, D) for part in range(3)) if separate else leaf(10, 3 * D, D)
    in_proj_bias = (leaf(20, D), None, leaf(21, D)) if separate else leaf(20, 3 * D)
    return EncoderParameters(
        in_proj, leaf(13, D, D), leaf(14, F, D), leaf(15, D, F), leaf(16, D), leaf(17, D),
        in_proj_bias if bias else None, *((leaf(22, D), leaf(23, F), leaf(24, D)) if bias else (None,) * 3),
        *((leaf(25, D), leaf(26, D)) if bias and norm == "layer_norm" else (None, None)),
    )  # fmt: skip


def _cast(params, dtype):
    def copy(value):
        if isinstance(value, tuple):
            return tuple(map(copy, value))
        return None if value is None else value.detach().to(dtype).requires_grad_()

    return EncoderParameters._make(map(copy, params))


def _run(layer, x, params, grad, **options):
    """The result and the gradients, by name."""
    x = x.detach().clone().requires_grad_()
    out = layer(x, params, nhead=NHEAD, **options)
    named = {"x": x, **dict(params.named())}
    gradients = torch.autograd.grad(out, list(named.values()), grad.to(out.dtype))
    return {"out": out.detach(), **dict(zip(named, gradients, strict=True))}


def _assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_bitwise_equal(actual[name], value)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_is_as_exact_as_torch(norm_first, norm, activation, separate, dtype):
    x, grad = _normal(6, 11, D, dtype=dtype), _normal(6, 11, D, seed=1, dtype=dtype)
    params = _params(separate=separate, dtype=dtype, norm=norm)
    options = {"norm_first": norm_first, "norm": norm, "activation": activation}
    actual = _run(isogemm.encoder_layer, x, params, grad, **options)
    theirs = _run(plain_encoder_oracle.encoder_layer, x, params, grad, **options)
    exact = _run(plain_encoder_oracle.encoder_layer, x.double(), _cast(params, torch.float64), grad, **options)
    for name, value in actual.items():
        assert value.dtype is dtype
        ours, allowed = (_root_mean_square(each - exact[name]) for each in (value.double(), theirs[name].double()))
        if activation == "relu" and dtype is torch.bfloat16 and name != "out":
            continue  # values rounded across the kink make the error a draw
        # Not the largest error: a key's bias has no effect, and its gradient is nothing but rounding.
        ulp = torch.finfo(dtype).eps * _root_mean_square(exact[name])
        assert ours <= 2 * allowed + ulp, name


def _root_mean_square(x):
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"norm_first": True, "activation": "gelu"}], ids=str)
@pytest.mark.parametrize("separate", [False, True])
def test_compiled_whole_has_the_bits_of_eager(options, separate):
    x, grad, params = _normal(4, 7, D), _normal(4, 7, D, seed=1), _params(separate=separate)
    options = {**options, "key_padding_mask": torch.arange(7).expand(4, 7) >= torch.tensor([[7], [3], [5], [1]])}
    compiled = torch.compile(isogemm.encoder_layer, fullgraph=True, backend="aot_eager")
    eager = _run(isogemm.encoder_layer, x, params, grad, **options)
    _assert_same(_run(compiled, x, params, grad, **options), eager)


def test_compiled_without_recompiling_for_a_new_batch():
    params = _params()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(isogemm.encoder_layer, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for sequences in (10, 11, 50):
        x = _normal(sequences, 7, D)
        assert_bitwise_equal(compiled(x, params, nhead=NHEAD), isogemm.encoder_layer(x, params, nhead=NHEAD))
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.float16])
def test_autocast_keeps_the_stream_in_its_own_dtype(norm_first, x_dtype):
    x, grad, params = _normal(4, 7, D, dtype=x_dtype), _normal(4, 7, D, seed=1), _params(separate=True)
    inside = []

    def layer(x, *args, **options):
        with torch.autocast("cpu", torch.bfloat16), isogemm.dispatch_log() as log:
            out = isogemm.encoder_layer(x, *args, **options)
        inside.extend(log)
        return out

    actual = _run(layer, x, params, grad, norm_first=norm_first)
    assert actual.pop("out").dtype is x_dtype
    assert actual.pop("x").dtype is x_dtype
    assert {value.dtype for value in actual.values()} == {torch.float32}
    products = [entry for entry in inside if entry.op in ("matmul", "fused", "encoder_attention")]
    assert products
    assert all("bfloat16" in entry.problem for entry in products)


def test_autocast_norms_once_rounded():
    """The norm before a product reads the wide stream and rounds to the product's dtype."""
    x, weight, bias = _normal(4, 7, D), _normal(D, seed=1), _normal(D, seed=2)
    wide = encoder_norm(x, weight, bias, "layer_norm", 1e-5, torch.float32)
    assert_bitwise_equal(encoder_norm(x, weight, bias, "layer_norm", 1e-5, torch.bfloat16), wide.bfloat16())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    x, grad, params = _normal(4, 7, D), _normal(4, 7, D, seed=1), _params()

    def backward(layer):
        leaves = {"x": x.clone().requires_grad_(), **dict(params.named())}
        for leaf in leaves.values():
            leaf.grad = None
        layer(leaves["x"]).backward(grad)
        return {name: leaf.grad for name, leaf in leaves.items()}

    def layer(x):
        return isogemm.encoder_layer(x, params, nhead=NHEAD, norm_first=True)

    _assert_same(backward(lambda x: checkpoint(layer, x, use_reentrant=use_reentrant)), backward(layer))


def _with_main_grads(params, value=0.0):
    params = _cast(params, params.out_proj_weight.dtype)
    for _, each in params.named():
        each.main_grad = torch.full(each.shape, value)
    return params


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("separate", [False, True])
def test_main_grad_is_accumulated_in_place(way, dtype, separate):
    x, grad = _normal(4, 7, D, dtype=dtype), _normal(4, 7, D, seed=1, dtype=dtype)
    params = _params(separate=separate, dtype=dtype)
    expected = _run(isogemm.encoder_layer, x, params, grad)
    params = _with_main_grads(params, 0.0)
    layer = isogemm.encoder_layer
    if way == "compiled":
        layer = torch.compile(layer, fullgraph=True, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    layer(leaf, params, nhead=NHEAD).backward(grad)
    assert_bitwise_equal(leaf.grad, expected["x"])
    for name, each in params.named():
        assert each.grad is None
        assert each.grad_added_to_main_grad
        assert_bitwise_equal(each.main_grad.to(dtype), expected[name])


def test_autograd_grad_is_given_gradients_and_accumulates_none():
    x, grad = _normal(4, 7, D), _normal(4, 7, D, seed=1)
    plain = _params()
    expected = _run(isogemm.encoder_layer, x, plain, grad)
    params = _with_main_grads(plain)
    _assert_same(_run(isogemm.encoder_layer, x, params, grad), expected)
    assert not any(each.main_grad.any() for _, each in params.named())


def test_bad_main_grad_of_a_norm_is_named():
    params = _params()
    params.norm1_weight.main_grad = torch.zeros(D, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"the norm's weight.main_grad has dtype torch.float64; expected torch.float32"):
        isogemm.encoder_layer(_normal(2, 3, D), params, nhead=NHEAD).sum().backward()


@pytest.mark.parametrize("separate", [False, True])
def test_micro_batches_of_whole_chunks_add_up_to_the_batch(separate):
    tokens = 96
    chunk = isogemm.encoder_chunk(tokens, D, NHEAD, F, torch.float32, "cpu")
    assert chunk * tokens % 1024 == 0
    x, grad = _normal(2 * chunk + 3, tokens, D), _normal(2 * chunk + 3, tokens, D, seed=1)
    totals = []
    for cuts in ((0, 2 * chunk + 3), (0, chunk, 2 * chunk + 3), (0, 2 * chunk, 2 * chunk + 3)):
        params = _with_main_grads(_params(separate=separate))
        for first, last in itertools.pairwise(cuts):
            isogemm.encoder_layer(x[first:last], params, nhead=NHEAD).backward(grad[first:last])
        totals.append({name: each.main_grad for name, each in params.named()})
    _assert_same(totals[1], totals[0])
    _assert_same(totals[2], totals[0])


def test_trailing_sequences_without_gradient_change_no_parameter():
    x, grad, params = _normal(30, 40, D), _normal(30, 40, D, seed=1), _params()
    expected = _run(isogemm.encoder_layer, x[:25], params, grad[:25])
    grad[25:] = 0
    actual = _run(isogemm.encoder_layer, x, params, grad)
    for name in expected.keys() - {"out", "x"}:
        assert_bitwise_equal(actual[name], expected[name])


@pytest.mark.parametrize("tokens", [1, 5, 42, 96, 1000])
def test_chunk_is_the_least_that_all_weights_divide(tokens):
    chunk = composed.chunk(tokens, 2048, 8192, "float32")
    assert chunk * tokens % 4096 == 0
    assert all(fewer * tokens % 4096 for fewer in range(1, chunk))


def _attention_arguments(packed, mask):
    q, *rest = (_normal(3, 5, 36),) if packed else (_normal(3, 5, 12, seed=seed) for seed in range(3))
    of_keys = {"bool": torch.arange(5).expand(3, 5) > 2, "float": _normal(3, 5, seed=7), "none": None}[mask]
    return q, *(rest or (None, None)), of_keys, 3, mask == "none", None


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("mask", ["bool", "float", "none"])
@pytest.mark.parametrize("variant", ["", "residual"])
def test_opcheck_attention(packed, mask, variant):
    arguments = _attention_arguments(packed, mask)
    previous = _normal(3, 3, 5, 5, seed=8)
    arguments += (previous, torch.tensor([5]), 0.25, True) if variant else (None, None, 0.0, False)
    o, lse, scores = torch.ops.isogemm.encoder_attention(*arguments)
    given = (torch.ones_like(o), torch.ones_like(scores) if variant else None, o, lse, bool(variant), *arguments)
    torch.library.opcheck(torch.ops.isogemm.encoder_attention_backward.default, given)
    previous.requires_grad_()
    leaves = tuple(each.requires_grad_() if isinstance(each, torch.Tensor) else each for each in arguments[:3])
    torch.library.opcheck(torch.ops.isogemm.encoder_attention.default, (*leaves, *arguments[3:]))


def test_either_result_of_attention_alone_has_gradients():
    packed, previous = _normal(3, 9, 3 * D), _normal(3, NHEAD, 9, 9, seed=1)
    grad, of_scores = _normal(3, 9, D, seed=2), _normal(3, NHEAD, 9, 9, seed=3)

    def gradients(pick):
        leaves = [each.clone().requires_grad_() for each in (packed, previous)]
        call = AttentionCall(leaves[0], None, None, None, NHEAD, True, None, previous=leaves[1], scores=True)
        o, scores = attention(call)
        above = {"o": grad, "scores": of_scores}
        given = {"o": o, "scores": scores}
        return torch.autograd.grad([given[name] for name in pick], leaves, [above[name] for name in pick])

    for of_one, of_other, both in zip(gradients(["o"]), gradients(["scores"]), gradients(["o", "scores"]), strict=True):
        assert of_one.any()
        assert of_other.any()
        torch.testing.assert_close(of_one + of_other, both)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("given", ["both", "weight", "bias", "neither"])
def test_opcheck_norm(norm, given):
    x = _normal(3, 50, 12).requires_grad_()
    weight = _normal(12, seed=1).requires_grad_() if given in ("both", "weight") else None
    bias = _normal(12, seed=2).requires_grad_() if given in ("both", "bias") else None
    for residual in (None, _normal(3, 50, 12, seed=3).requires_grad_()):
        arguments = (x, residual, weight, bias, *[None] * 4, norm, 1e-5, 1.0, torch.float32, True)
        torch.library.opcheck(torch.ops.isogemm.row_norm.default, arguments)
    wanted = (weight is not None, bias is not None)
    statistics = torch.ones(2 if norm == "layer_norm" else 1, 150)
    detached = weight if weight is None else weight.detach()
    arguments = (torch.ones_like(x), None, x.detach(), detached, statistics, norm, 1.0, *wanted, 16)
    torch.library.opcheck(torch.ops.isogemm.row_norm_backward.default, arguments)


def test_packed_and_separate_attention_have_the_same_bits():
    packed, grad = _normal(3, 9, 3 * D).requires_grad_(), _normal(3, 9, D, seed=1)
    rest = (None, NHEAD, False, None)
    whole, _ = attention(AttentionCall(packed, None, None, *rest))
    parts = [each.detach().requires_grad_() for each in packed.chunk(3, -1)]
    apart, _ = attention(AttentionCall(*parts, *rest))
    assert_bitwise_equal(whole, apart)
    (of_whole,) = torch.autograd.grad(whole, packed, grad)
    assert_bitwise_equal(of_whole, torch.cat(torch.autograd.grad(apart, parts, grad), -1))


@pytest.mark.parametrize("shape", [(0, 7, D), (3, 0, D)])
def test_empty(shape):
    params = _params()
    found = _run(isogemm.encoder_layer, torch.empty(shape), params, torch.empty(shape))
    assert found["out"].shape == found["x"].shape == shape
    assert not any(found[name].any() for name, _ in params.named())


def test_no_second_derivative():
    x, params = _normal(2, 3, D).requires_grad_(), _params()
    out = isogemm.encoder_layer(x, params, nhead=NHEAD)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_dispatch_log_names_the_path_and_why():
    x, params = _normal(2, 3, D), _params()
    with isogemm.dispatch_log() as log:
        isogemm.encoder_layer(x, params, nhead=NHEAD)
    (entry,) = [entry for entry in log if entry.op == "encoder_layer"]
    assert (entry.path, entry.reason) == ("composed", "not on a GPU")
    assert entry.problem == f"[2, 3, {D}, {NHEAD}, {F}] float32"


def test_right_padding_under_a_mask_changes_no_bit():
    tokens, longer = 42, 55
    x, grad, params = _normal(5, tokens, D), _normal(5, tokens, D, seed=1), _params()
    expected = _run(isogemm.encoder_layer, x, params, grad)
    padding = (0, 0, 0, longer - tokens)
    wide, above = torch.nn.functional.pad(x, padding, value=0.5), torch.nn.functional.pad(grad, padding)
    mask = torch.arange(longer).expand(5, longer) >= tokens
    for of_keys in (mask, torch.where(mask, -math.inf, 0.0)):
        actual = _run(isogemm.encoder_layer, wide, params, above, key_padding_mask=of_keys)
        assert_bitwise_equal(actual["out"][:, :tokens], expected["out"])
        assert_bitwise_equal(actual["x"][:, :tokens], expected["x"])
