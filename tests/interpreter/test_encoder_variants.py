"""Layers split at a norm, through their plan and autograd: batch norms, places of norms, dropout, residual scores."""

import plain_encoder_oracle
import pytest
import torch

from isogemm.encoder import buffers, fused
from isogemm.encoder.parameters import EncoderDropout, Options, RunningStatistics
from isogemm.epilogues import random
from isogemm.verify.encoder_reference import EncoderShape, encoder_parameters, encoder_tensors
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations

pytestmark = pytest.mark.usefixtures("interpreted_schedules")
SEED = torch.tensor([0x1234_5678_9ABC])


def _options(shape, dtype=torch.float32, **options):
    defaults = {
        "norm_first": False, "residual_normed": False, "activation": "gelu", "norm": "layer_norm", "eps": 1e-5,
        "is_causal": False, "precision": "ieee" if dtype is torch.float32 else None, "operand": dtype,
        "dropout": EncoderDropout(), "from_batch": False, "return_scores": False,
    }  # fmt: skip
    return Options(shape.nhead, **defaults | options)


def _keeping(shape, dropout):
    rows = shape.sequences * shape.tokens

    def of_rows(place, columns):
        p = dropout[place]
        kept = random.kept(SEED + place, rows, columns, p) * random.scale(p)
        return kept.view(shape.sequences, shape.tokens, columns).double()

    p, heads = dropout.attention, shape.sequences * shape.nhead
    weights = (random.kept_weights(SEED, heads, shape.tokens, p) * random.scale(p)).double()
    weights = weights.view(shape.sequences, shape.nhead, shape.tokens, shape.tokens)
    return weights, of_rows(1, shape.d_model), of_rows(2, shape.dim_feedforward), of_rows(3, shape.d_model)


def _results(function, tensors, dtype, grads):
    """The layer's, and the gradients of every tensor."""
    leaves = {name: each.to(dtype).requires_grad_() for name, each in tensors.items()}
    results = [each for each in function(**leaves) if each is not None]
    total = sum((each * grad.to(each)).sum() for each, grad in zip(results, grads, strict=False))
    found = torch.autograd.grad(total, list(leaves.values()))
    named = {f"result {index}": each.detach() for index, each in enumerate(results)}
    return named | {f"gradient of {name}": each for name, each in zip(leaves, found, strict=True)}


def _assert_close(shape, bound=3e-6, dtype=torch.float32, previous=False, mask=None, running=None, **options):
    """The results, the batch norms' statistics and every gradient, against float64."""
    options = _options(shape, dtype, **options)
    tensors = encoder_tensors(shape, dtype)
    scores = (shape.sequences, shape.nhead, shape.tokens, shape.tokens)
    if previous:
        tensors["scores"] = make_data("normal", scores, seed=7, dtype=dtype, device="cpu")
    grads = [make_data("normal", size, seed=9, dtype=dtype, device="cpu") for size in (tensors["x"].shape, scores)]
    statistics = []

    def ours(x, scores=None, **parameters):
        of_norms = dict(zip(("mean1", "var1", "mean2", "var2"), running or (), strict=False))
        given = buffers.ExtraInputs(mask, SEED if any(options.dropout) else None, scores, **of_norms)
        results = fused.encoder_layer(x, encoder_parameters(parameters), given, options)
        statistics.append(results.statistics)
        return results.y, results.scores

    def theirs(x, scores=None, **parameters):
        of_norms = None
        if running is not None:
            wide = [each.double() for each in running]
            of_norms = RunningStatistics(*wide[:2]), RunningStatistics(*wide[2:])
        return plain_encoder_oracle.encoder_layer(
            x, encoder_parameters(parameters), nhead=shape.nhead, norm_first=options.norm_first,
            residual_normed=options.residual_normed, activation=options.activation, norm=options.norm,
            key_padding_mask=mask, is_causal=options.is_causal, running=of_norms, training=running is None,
            keeping=_keeping(shape, options.dropout) if any(options.dropout) else None, scores=scores,
            return_scores=True,
        )[: 1 + options.return_scores]  # fmt: skip

    with poisoned_allocations():
        found = _results(ours, tensors, dtype, grads)
    exact = _results(theirs, tensors, torch.float64, grads)
    assert found.keys() == exact.keys()
    for name, expected in exact.items():
        live = expected.isfinite()
        assert torch.equal(live, found[name].isfinite()), name
        # that of a bias before a batch norm is 0, a sum of what its weight's is a sum of
        scale = max(exact[each][exact[each].isfinite()].abs().max() for each in (name, name.replace("bias", "weight")))
        error = (found[name].double() - expected)[live].abs().max() / scale
        assert error < bound, f"{name}: {error:.1e}"
    return statistics[0]


SHAPE = EncoderShape(7, 5, 16, 4, 36)
DROPPED = EncoderDropout(0.2, 0.3, 0.25, 0.4)
PLACEMENTS = {"post": {}, "pre": {"norm_first": True}, "normed": {"norm_first": True, "residual_normed": True}}
PARTED = [(norm, placement, DROPPED) for norm in ("layer_norm", "batch_norm") for placement in PLACEMENTS]
PARTED += [
    (*each, EncoderDropout()) for each in (("layer_norm", "normed"), ("batch_norm", "post"), ("batch_norm", "normed"))
]


@pytest.mark.parametrize(("norm", "placement", "dropout"), PARTED)
def test_norms_and_their_places(norm, placement, dropout):
    _assert_close(SHAPE, norm=norm, from_batch=norm == "batch_norm", dropout=dropout, **PLACEMENTS[placement])


@pytest.mark.parametrize("norm_first", [False, True])
def test_running_statistics(norm_first):
    running = [make_data("normal", (16,), seed=i, dtype=torch.float32, device="cpu") for i in range(4)]
    running = [each.abs() + 0.5 if i % 2 else each for i, each in enumerate(running)]
    _assert_close(SHAPE, norm="batch_norm", norm_first=norm_first, running=running)


def test_statistics():
    statistics = _assert_close(SHAPE, norm="batch_norm", norm_first=True, from_batch=True)
    rows = encoder_tensors(SHAPE)["x"].view(-1, 16).double()
    torch.testing.assert_close(statistics[0, 0].double(), rows.mean(0), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(statistics[0, 3].double(), rows.var(0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", [EncoderShape(3, 17, 48, 3, 36), EncoderShape(5, 3, 24, 6, 20)], ids=str)
def test_sizes(shape):
    """Rows that only fill a tile are in no statistic, and in no gradient."""
    placed = {"norm_first": shape.tokens == 3, "previous": True, "return_scores": True}
    _assert_close(shape, norm="batch_norm", from_batch=True, dropout=DROPPED, **placed)


def test_tf32():
    shape = EncoderShape(9, 8, 64, 4, 32)
    _assert_close(shape, bound=3e-3, norm="batch_norm", from_batch=True, dropout=DROPPED, precision="tf32")


def test_float16():
    _assert_close(SHAPE, bound=2e-2, dtype=torch.float16, norm="batch_norm", from_batch=True, dropout=DROPPED)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dropout", [EncoderDropout(), DROPPED], ids=["kept", "dropped"])
def test_autocast(placement, dropout):
    """Products in float16: what the weights' gradients read is cast before."""
    shape, norm = EncoderShape(5, 5, 40, 5, 20), "batch_norm" if dropout is DROPPED else "layer_norm"
    options = {"operand": torch.float16, "precision": None, **PLACEMENTS[placement]}
    _assert_close(shape, bound=1e-2, norm=norm, from_batch=norm == "batch_norm", dropout=dropout, **options)


# By fragments: the rows end within a warp's sixteen; hidden columns are half of the generator's 32, all, or one and a
# half times as many.
NARROW = [
    (EncoderShape(5, 2, 16, 2, 32), "layer_norm", "normed", "tf32"),
    (EncoderShape(5, 2, 32, 2, 16), "layer_norm", "pre", None),
    (EncoderShape(5, 2, 16, 2, 48), "layer_norm", "post", None),
    (EncoderShape(5, 2, 32, 2, 16), "batch_norm", "pre", None),
    (EncoderShape(3, 6, 16, 2, 16), "batch_norm", "post", None),
]


@pytest.mark.parametrize(("shape", "norm", "placement", "precision"), NARROW, ids=str)
def test_narrow(shape, norm, placement, precision):
    numbers = {"precision": precision, "bound": 3e-3} if precision else {"dtype": torch.float16, "bound": 1e-2}
    from_batch = norm == "batch_norm"
    _assert_close(shape, norm=norm, from_batch=from_batch, dropout=DROPPED, **numbers, **PLACEMENTS[placement])


STACKS = {  # of shape, dtype, precision, bound, whether masked
    "tf32, transposes": (EncoderShape(3, 10, 64, 8, 32), torch.float32, "tf32", 3e-3, False),
    "tf32": (EncoderShape(2, 5, 48, 6, 20), torch.float32, "tf32", 3e-3, True),
    "float16": (EncoderShape(2, 9, 40, 5, 20), torch.float16, None, 1e-2, False),
    "narrow": (EncoderShape(3, 6, 16, 4, 16), torch.float32, "tf32", 3e-3, False),
    "narrow float16": (EncoderShape(2, 9, 32, 4, 16), torch.float16, None, 1e-2, True),
}


@pytest.mark.parametrize("stack", STACKS)
def test_scores_by_factors(stack):
    """Three layers of the same parameters, the last of which gives none on."""
    shape, dtype, precision, bound, masked = STACKS[stack]
    options = _options(shape, dtype, precision=precision, norm="batch_norm", from_batch=True, return_factors=True)
    tensors = encoder_tensors(shape, dtype)
    mask = torch.arange(shape.tokens).expand(shape.sequences, -1) > 3 if masked else None

    def ours(x, **parameters):
        factors = ()
        for layer in range(3):
            given = buffers.ExtraInputs(mask, None, None, *factors)
            results = fused.encoder_layer(
                x, encoder_parameters(parameters), given, options._replace(return_factors=layer < 2)
            )
            x, factors = results.y, (*factors, results.qk)
        assert factors[2] is None
        return x, factors[0], factors[1]

    def theirs(x, **parameters):
        scores = None
        for _ in range(3):
            x, scores = plain_encoder_oracle.encoder_layer(
                x, encoder_parameters(parameters), nhead=shape.nhead, activation="gelu", norm="batch_norm",
                key_padding_mask=mask, scores=scores, return_scores=True,
            )  # fmt: skip
        return (x,)

    grads = [make_data("normal", tensors["x"].shape, seed=9, dtype=dtype, device="cpu")]
    with poisoned_allocations():
        found = _results(ours, tensors, dtype, grads)
    exact = _results(theirs, tensors, torch.float64, grads)
    for name, expected in exact.items():
        scale = max(exact[each].abs().max() for each in (name, name.replace("bias", "weight")))
        error = (found[name].double() - expected).abs().max() / scale
        assert error < bound, f"{name}: {error:.1e}"
    q, k = found["result 1"]
    assert q.shape == (shape.nhead, shape.sequences, shape.tokens, shape.d_model // shape.nhead)
    weight, bias = tensors["in_proj_weight"].double(), tensors["in_proj_bias"].double()
    for own, part in ((q, slice(0, shape.d_model)), (k, slice(shape.d_model, 2 * shape.d_model))):
        right = (tensors["x"].double() @ weight[part].mT + bias[part]).unflatten(-1, (shape.nhead, -1))
        torch.testing.assert_close(own.double(), right.permute(2, 0, 1, 3), rtol=bound, atol=bound)
