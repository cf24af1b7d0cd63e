"""Which kernels serve a layer: a function of its sizes and number types, never of the batch."""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from isogemm.encoder import configs
from isogemm.encoder.configs import Layer
from isogemm.encoder.plan import Plan

TILES = ("BM", "BN", "BF", "BK", "STAGES", "KIND", "TRANSPOSED", "BY_HEAD")


def _layer(sequences, d_model, nhead, dim_feedforward, number, **options):
    dtype = "float32" if number in ("tf32", "ieee") else number
    options = {"supports_pdl": True, "mma": True, "wgmma": True} | options
    return Layer(
        sequences, 42, d_model, nhead, dim_feedforward, dtype, dtype, dtype, number if dtype == "float32" else "",
        "layer_norm", True, "gelu", False, "", (0, 0), True, **options,
    )  # fmt: skip


def _kernels(layer):
    plan = Plan(layer, torch.device("cpu"), 1e-5, biases=True)
    forward, _ = plan._forwards[True]
    backward, _ = plan._backward_schedule(plan.gradients((True,) * len(plan.names)))
    launches = [step.describe() for step in (*forward._steps, *backward._steps)]
    return [(launch.kernel.__name__, [launch.constants.get(name) for name in TILES]) for launch in launches]


@pytest.mark.parametrize("number", ["tf32", "bfloat16", "ieee"])
@pytest.mark.parametrize("sizes", [(16, 4, 128), (64, 8, 256), (128, 16, 256), (128, 2, 256)], ids=str)
def test_the_batch_chooses_nothing(sizes, number):
    alone, some, many = (_kernels(_layer(sequences, *sizes, number)) for sequences in (1, 130, 2688))
    assert alone == some == many


@pytest.mark.parametrize(
    ("layer", "groups"),
    [
        (_layer(3, 128, 16, 256, "tf32"), 4),
        (_layer(3, 64, 4, 128, "tf32"), 4),
        (_layer(3, 128, 16, 256, "float16"), 2),
        (_layer(3, 128, 16, 256, "ieee"), 0),
        (_layer(3, 128, 16, 256, "tf32", wgmma=False), 0),
        (_layer(3, 128, 16, 64, "tf32"), 0),  # a single block of features
        (_layer(3, 128, 16, 200, "tf32"), 0),
        (_layer(3, 256, 16, 256, "tf32"), 0),
    ],
    ids=str,
)
def test_warpgroups_serve_what_they_were_measured_for(layer, groups):
    chosen = configs.choose_warpgroup(layer)
    served = (chosen.project, chosen.feedforward, chosen.feedforward_backward, chosen.input_grad)
    assert sum(each is not None for each in served) == groups


@pytest.mark.parametrize(
    ("layer", "served"),
    [
        (_layer(3, 128, 16, 256, "tf32"), True),
        (_layer(3, 16, 4, 128, "tf32"), True),
        (_layer(3, 32, 4, 128, "bfloat16"), True),
        (_layer(3, 48, 12, 100, "tf32"), True),
        (_layer(3, 16, 8, 128, "tf32"), False),  # a lane's four columns are two heads'
        (_layer(3, 128, 4, 256, "tf32"), False),
        (_layer(3, 128, 16, 256, "ieee"), False),
        (_layer(3, 128, 16, 256, "tf32", mma=False), False),
    ],
    ids=str,
)
def test_all_layers_of_a_stack_take_factors_or_none(layer, served):
    stack = [replace(layer, factors=before, returns_qk=before < 4) for before in range(5)]
    assert {each.by_head for each in stack} == {served}
