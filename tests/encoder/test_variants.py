"""Layers as PatchTST's users train them, by the composed path: hypothesis over their combinations, against float64."""

import pytest
import torch
from encoder_variants import Variant, assert_variant_no_worse
from hypothesis import example, given, settings
from hypothesis import strategies as st

import isogemm
from isogemm import EncoderDropout, RunningStatistics
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.encoder_reference import EncoderShape, encoder_parameters, encoder_tensors

PLACES = [(False, False), (True, False), (True, True)]
DROPPED = EncoderDropout(0.1, 0.2, 0.3, 0.4)


@st.composite
def variants(draw):
    norm = draw(st.sampled_from(["layer_norm", "rms_norm", "batch_norm"]))
    norm_first, residual_normed = draw(st.sampled_from(PLACES))
    return Variant(
        norm, norm_first, residual_normed, draw(st.sampled_from(["gelu", "silu"])),
        draw(st.sampled_from([EncoderDropout(), DROPPED, EncoderDropout(output=0.5), EncoderDropout(attention=0.3)])),
        draw(st.booleans()), norm == "batch_norm" and draw(st.booleans()), draw(st.sampled_from([0.1, None])),
        draw(st.sampled_from(["", "bool", "additive"])), draw(st.booleans()), draw(st.booleans()), draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(variants(), st.sampled_from([EncoderShape(7, 5, 16, 4, 12), EncoderShape(3, 2, 8, 2, 4)]))
@example(
    Variant("batch_norm", dropout=DROPPED, tracked=True, previous=True, return_scores=True),
    EncoderShape(6, 9, 16, 2, 24),
)
def test_combinations(variant, shape):
    assert_variant_no_worse(shape, variant)


@pytest.mark.parametrize("stack", [2, 3])
@pytest.mark.parametrize(("norm", "mask"), [("batch_norm", "bool"), ("layer_norm", "")])
def test_scores_by_factors(norm, mask, stack):
    assert_variant_no_worse(EncoderShape(7, 5, 16, 4, 12), Variant(norm, mask=mask, stack=stack))


def test_factors_of_one_sequence():
    tensors = encoder_tensors(SHAPE)
    y, scores = _layer(tensors["x"], tensors, return_scores="factors")
    y, scores = _layer(y, tensors, scores=scores, return_scores="factors")
    one, of_one = _layer(tensors["x"][1], tensors, return_scores="factors")
    one, of_one = _layer(one, tensors, scores=of_one, return_scores="factors")
    assert_bitwise_equal(one, y[1])
    for ours, all_of_them in zip(of_one, scores, strict=True):
        assert_bitwise_equal(ours, all_of_them[:, :, 1])


def test_factors_of_no_sequence():
    tensors = encoder_tensors(SHAPE)
    y, scores = _layer(tensors["x"][:0], tensors, return_scores="factors")
    y, scores = _layer(y, tensors, scores=scores, return_scores="factors")
    assert [each.shape for each in scores] == [(2, 4, 0, 5, 4)] * 2
    assert y.shape == (0, 5, 16)


def test_scores_from_factors():
    tensors = encoder_tensors(SHAPE)
    y, factors = _layer(tensors["x"], tensors, return_scores="factors")
    _, ours = _layer(y, tensors, scores=factors, return_scores=True)
    _, scores = _layer(tensors["x"], tensors, return_scores=True)
    assert_bitwise_equal(ours, _layer(y, tensors, scores=scores, return_scores=True)[1])


def test_factors_that_are_none():
    tensors = encoder_tensors(SHAPE)
    x = tensors["x"]
    _, scores = _layer(x, tensors, return_scores=True)
    _, factors = _layer(x, tensors, return_scores="factors")
    for message, wrong in (
        ("scores are given as one tensor", {"scores": scores, "return_scores": "factors"}),
        ("return_scores is 'factor'", {"return_scores": "factor"}),
        (r"scores\[1\] has shape", {"scores": (*factors, scores)}),
        (r"scores\[0\] has shape", {"scores": (factors[0][:1],)}),
    ):
        with pytest.raises(ValueError, match=message):
            _layer(x, tensors, **wrong)
    with pytest.raises(TypeError, match=r"scores\[0\] has dtype"):
        _layer(x, tensors, scores=(factors[0].double(),))
    with pytest.raises(TypeError, match="scores is a list"):
        _layer(x, tensors, scores=list(factors))
    with pytest.raises(TypeError, match=r"scores\[0\] is a NoneType"):
        _layer(x, tensors, scores=(None,))


def _layer(x, tensors, **options):
    named = {name: each for name, each in tensors.items() if name != "x"}
    return isogemm.encoder_layer(x, encoder_parameters(named), nhead=4, **options)


SHAPE = EncoderShape(6, 5, 16, 4, 12)


def test_a_batch_norm_in_training_depends_on_the_batch_alone():
    """Its bits are those of the same batch again; a mask of keys leaves rows in the statistics, as in torch."""
    tensors = encoder_tensors(SHAPE)
    x = tensors["x"]
    mask = torch.zeros(6, 5, dtype=torch.bool)
    mask[:, 3:] = True
    first = [RunningStatistics(torch.zeros(16), torch.ones(16), torch.tensor(0)) for _ in range(2)]
    y = _layer(x, tensors, norm="batch_norm", norm_first=True, running=tuple(first), key_padding_mask=mask)
    assert_bitwise_equal(_layer(x, tensors, norm="batch_norm", norm_first=True, key_padding_mask=mask), y)
    rows = x.flatten(0, 1)
    torch.testing.assert_close(first[0].mean, 0.1 * rows.mean(0), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(first[0].var, 0.9 + 0.1 * rows.var(0), rtol=1e-5, atol=0)
    assert not torch.equal(_layer(x[:3], tensors, norm="batch_norm", norm_first=True), y[:3])


def test_a_batch_norm_in_eval_mode_does_not_depend_on_the_batch():
    tensors = encoder_tensors(SHAPE)
    running = tuple(RunningStatistics(torch.full((16,), 0.25), torch.full((16,), 2.0)) for _ in range(2))
    options = {"norm": "batch_norm", "running": running, "training": False}
    whole = _layer(tensors["x"], tensors, **options)
    assert_bitwise_equal(torch.cat([_layer(one[None], tensors, **options) for one in tensors["x"]]), whole)


def test_frozen_statistics_normalise_in_training_and_stay():
    tensors = encoder_tensors(SHAPE)
    running = tuple(
        RunningStatistics(torch.full((16,), 0.25), torch.full((16,), 2.0), torch.tensor(4), frozen=True)
        for _ in range(2)
    )
    frozen = _layer(tensors["x"], tensors, norm="batch_norm", running=running)
    assert_bitwise_equal(_layer(tensors["x"], tensors, norm="batch_norm", running=running, training=False), frozen)
    assert all(int(each.batches) == 4 and torch.equal(each.mean, torch.full((16,), 0.25)) for each in running)


@pytest.mark.parametrize(("training", "frozen", "after"), [(True, False, 5), (True, True, 4), (False, False, 4)])
def test_batches_are_counted_in_training_alone(training, frozen, after):
    """Where there is no other statistic too, and the batch's normalise."""
    tensors = encoder_tensors(SHAPE)
    running = tuple(RunningStatistics(batches=torch.tensor(4), frozen=frozen) for _ in range(2))
    _layer(tensors["x"], tensors, norm="batch_norm", running=running, training=training)
    assert [int(each.batches) for each in running] == [after, after]


def test_dropout_follows_torchs_seed():
    tensors = encoder_tensors(SHAPE)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(_layer(tensors["x"], tensors, dropout=0.5))
    assert_bitwise_equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert_bitwise_equal(_layer(tensors["x"], tensors, dropout=0.5, training=False), _layer(tensors["x"], tensors))


def test_nothing_is_drawn_where_nothing_is_dropped():
    tensors = encoder_tensors(SHAPE)
    before = torch.get_rng_state()
    _layer(tensors["x"], tensors, dropout=0.0)
    _layer(tensors["x"], tensors, dropout=1e-6)  # rounds to 0: no launch writes what is dropped
    _layer(tensors["x"], tensors, dropout=0.5, training=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_projection_or_three_with_all_that_may_be_given():
    tensors = encoder_tensors(SHAPE)
    params = encoder_parameters({name: each for name, each in tensors.items() if name != "x"})
    apart = params._replace(in_proj_weight=params.in_proj_weight.chunk(3), in_proj_bias=params.in_proj_bias.chunk(3))
    given = {"nhead": 4, "key_padding_mask": torch.zeros(6, 5), "scores": torch.zeros(6, 4, 5, 5)}
    stacked = isogemm.encoder_layer(tensors["x"], params, **given)
    assert_bitwise_equal(isogemm.encoder_layer(tensors["x"], apart, **given), stacked)


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, r"dropout\.projection is 1\.5; expected", {"dropout": EncoderDropout(projection=1.5)}),
        (TypeError, "dropout is a tuple; expected a number or an isogemm.EncoderDropout", {"dropout": (0.1, 0.1)}),
        (ValueError, "residual_normed is True without norm_first", {"residual_normed": True}),
        (ValueError, "running is given; norm 'layer_norm' has no such", {"running": (RunningStatistics(),) * 2}),
        (TypeError, "expected a tuple of two isogemm.RunningStatistics", {"norm": "batch_norm", "running": ()}),
        (ValueError, r"running\[0\]\.mean has shape \[3\]; expected \[16\]",
         {"norm": "batch_norm", "running": (RunningStatistics(torch.zeros(3), torch.ones(16)),) * 2}),
        (ValueError, r"running\[0\] has one of mean and var",
         {"norm": "batch_norm", "running": (RunningStatistics(torch.zeros(16)),) * 2}),
        (ValueError, r"scores has shape \[6, 4, 5\]; expected \[6, 4, 5, 5\]", {"scores": torch.zeros(6, 4, 5)}),
        (TypeError, "scores has dtype torch.float64", {"scores": torch.zeros(6, 4, 5, 5, dtype=torch.float64)}),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(error, message, options):
    tensors = encoder_tensors(SHAPE)
    with pytest.raises(error, match=message):
        _layer(tensors["x"], tensors, **options)


def test_one_row_has_no_variance():
    tensors = encoder_tensors(EncoderShape(1, 1, 16, 4, 12))
    with pytest.raises(ValueError, match="need two rows"):
        _layer(tensors["x"], tensors, norm="batch_norm")


def test_a_sequence_alone():
    """[T, D], with scores [H, T, T]."""
    tensors = encoder_tensors(SHAPE)
    y, scores = _layer(tensors["x"], tensors, return_scores=True)
    alone, of_alone = _layer(tensors["x"][2], tensors, return_scores=True)
    assert_bitwise_equal(alone, y[2])
    assert_bitwise_equal(of_alone, scores[2])
    added = _layer(tensors["x"][2], tensors, scores=scores[2])
    assert_bitwise_equal(added, _layer(tensors["x"], tensors, scores=scores)[2])
