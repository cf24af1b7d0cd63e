"""Fused layers whose launches end before the norm, through their own plan: dropout, batch norm, normed residuals."""

from functools import partial

import pytest
import torch

from isogemm.encoder import fused, reference
from isogemm.encoder.parameters import EncoderDropout, Options
from isogemm.epilogues import random
from isogemm.testing import (
    EncoderShape,
    encoder_parameters,
    encoder_tensors,
    make_data,
    poisoned_allocations,
    with_gradients,
)

pytestmark = pytest.mark.usefixtures("interpreted_schedules")
DROPOUT = EncoderDropout(projection=0.3, activation=0.25, output=0.4)


def _fused(x, *, options, seed, **parameters):
    return fused.encoder_layer(x, encoder_parameters(parameters), fused.Given(seed=seed), options).y


def _reference(x, *, options, seed, **parameters):
    sequences, tokens, d_model = x.shape

    def kept(place, columns):
        p = options.dropout[place]
        mask = random.kept(seed + place, sequences * tokens, columns, p)
        return mask.view(sequences, tokens, columns) * random.scale(p)

    keeping = (1.0, kept(1, d_model), kept(2, len(parameters["linear1_weight"])), kept(3, d_model))
    return reference.encoder_layer(
        x, encoder_parameters(parameters), nhead=options.nhead, norm_first=options.norm_first,
        residual_normed=options.residual_normed, activation=options.activation, norm=options.norm, keeping=keeping,
    )  # fmt: skip


# By fragments: the rows end within a warp's sixteen; hidden columns are half of the generator's 32, all, or one and a
# half times as many.
CASES = [
    (EncoderShape(5, 2, 16, 2, 32), "layer_norm", True, True, torch.float32),
    (EncoderShape(5, 2, 32, 2, 16), "layer_norm", True, False, torch.float16),
    (EncoderShape(5, 2, 16, 2, 48), "layer_norm", False, False, torch.float16),
    (EncoderShape(5, 2, 32, 2, 16), "batch_norm", True, False, torch.float16),
    (EncoderShape(3, 6, 16, 2, 16), "batch_norm", False, False, torch.float16),
]


@pytest.mark.parametrize(("shape", "norm", "norm_first", "residual_normed", "dtype"), CASES, ids=str)
def test_narrow(shape, norm, norm_first, residual_normed, dtype):
    precision = "tf32" if dtype is torch.float32 else None
    options = Options(
        shape.nhead, norm_first, residual_normed, "gelu", norm, 1e-5, False, precision, dtype, DROPOUT, True, False
    )
    tensors = encoder_tensors(shape, dtype)
    grad = make_data("normal", tensors["x"].shape, seed=99, dtype=dtype, device="cpu")
    seed = torch.tensor([0x1234_5678_9ABC])
    with poisoned_allocations():
        found = with_gradients(partial(_fused, options=options, seed=seed), tensors, grad)
    exact = with_gradients(partial(_reference, options=options, seed=seed), tensors, grad, torch.float64)
    for name, expected in exact.items():
        error = (found[name].double() - expected).abs().max() / expected.abs().max().clamp_min(1e-3)
        assert error < (3e-3 if dtype is torch.float32 else 1e-2), f"{name}: {error:.1e}"
