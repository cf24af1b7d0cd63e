"""Which formulation of a kernel serves a layer, and what its launches are given."""

import importlib
from dataclasses import replace

import pytest

pytest.importorskip("triton")

import torch

from isogemm.encoder import configs
from isogemm.encoder.buffers import Buffers, kept_size
from isogemm.encoder.configs import Layer
from isogemm.encoder.parameters import EncoderDropout
from isogemm.encoder.plan import Plan, choose_formulation

KERNELS = ("project", "out_project", "feedforward", "feedforward_backward", "input_grad", "weight_grads")


def _layer(d_model, number, **options):
    dtype = "float32" if number in ("tf32", "ieee") else number
    return Layer(
        896, 42, d_model, 4, 256, dtype, dtype, dtype, number if dtype == "float32" else "",
        "layer_norm", True, "gelu", False, "", (0, 0), True, **{"mma": True, "wgmma": True} | options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (_layer(16, "tf32"), "fragments fragments fragments fragments fragments fragments"),
        (_layer(16, "bfloat16"), "fragments fragments fragments fragments fragments tiles"),
        (_layer(16, "ieee"), "tiles tiles tiles tiles tiles tiles"),
        (_layer(16, "tf32", mma=False), "tiles tiles tiles tiles tiles tiles"),
        (_layer(128, "tf32"), "warpgroups tiles warpgroups warpgroups warpgroups tiles"),
        (_layer(128, "tf32", wgmma=False), "tiles tiles tiles tiles tiles tiles"),
        (_layer(64, "float16"), "warpgroups tiles tiles tiles tiles tiles"),
        (_layer(128, "float16"), "warpgroups tiles warpgroups tiles tiles tiles"),
    ],
    ids=str,
)
def test_each_kernel_has_one_formulation(layer, expected):
    chosen = [choose_formulation(layer, kernel, sm_count=132)[0] for kernel in KERNELS]
    assert " ".join(chosen) == expected
    for kernel, formulation in zip(KERNELS, chosen, strict=True):
        module = importlib.import_module(f"isogemm.encoder.kernels.{formulation}")
        assert kernel in module.KERNELS


def test_a_misspelt_buffer_is_an_error():
    buffers = Buffers(_layer(128, "tf32"))
    assert buffers.dlast.name == "dlast"
    with pytest.raises(AttributeError, match="dlats"):
        buffers.dlats  # noqa: B018


def test_out_project_reads_its_weight_as_it_is_given(monkeypatch):
    """Packed or not, also where another config than the table's is tried."""
    layer = _layer(128, "tf32", dropout=EncoderDropout(projection=0.1))
    for groups in (configs.choose_warpgroup(layer), configs.WarpgroupConfigs()):
        monkeypatch.setattr(configs, "choose_warpgroup", lambda _, groups=groups: groups)
        plan = Plan(layer, torch.device("cpu"), 1e-5, biases=True)
        steps = plan._forwards[True][0]._steps
        weight, launch = next(
            (step.arguments[2], step.describe())
            for step in steps
            if step.describe().kernel.__name__ == "_out_project_kernel"
        )
        assert launch.constants["PACKED"] == (weight is plan.buffers.operands.wo)
        assert launch.constants["PACKED"] == (groups.project is None)


@pytest.mark.parametrize("number", ["tf32", "ieee", "bfloat16"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_what_is_kept_has_the_size_that_compilers_are_told(number, norm_first):
    layer = replace(_layer(64, number), norm_first=norm_first)
    assert Plan(layer, torch.device("cpu"), 1e-5, biases=True)._kept_size == kept_size(layer)
