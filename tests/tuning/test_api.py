"""isogemm.tune: what it passes on, and what it refuses."""

import subprocess
import sys

import pytest
import torch

import isogemm
from isogemm.core.device import DeviceFacts
from isogemm.tuning import run


@pytest.fixture
def asked(monkeypatch):
    """The arguments of the runs that were begun, on a GPU that is not there."""
    begun = []

    class Begun:
        def __init__(self, *given):
            begun.append(given)

        def run(self):
            return "report"

    monkeypatch.setattr(run, "current_gpu", lambda: DeviceFacts("GPU", "sm_80", 108, 0, 0))
    monkeypatch.setattr(run, "on_current_gpu", Begun)
    return begun


def test_a_model_is_tuned_for_the_current_gpu(asked):
    model = isogemm.nn.MLP(64, 128, activation="swiglu", dtype=torch.bfloat16)
    assert isogemm.tune(model, tokens=iter([512]), backward=True, seconds=3.5) == "report"
    ((points, seconds, _),) = asked
    assert [(each.n, each.k, each.kind) for each in points] == [
        (128, 64, "gated"), (128, 64, "dx"), (128, 64, "dw"),
        (64, 128, "linear"), (64, 128, "gated gradient"), (64, 128, "dw"),
    ]  # fmt: skip
    assert {(each.tokens, each.number, each.arch, each.sm_count, each.gpu) for each in points} == {
        (512, "half", "sm_80", 108, "GPU")
    }
    assert seconds == 3.5


def test_sizes_and_tensors_are_tuned(asked):
    isogemm.tune("8x16", dtype=torch.float32, precision="tf32x3")
    isogemm.tune([torch.empty(8, 16, dtype=torch.float16)])
    assert [{(each.n, each.k, each.number) for each in points} for points, *_ in asked] == [
        {(8, 16, "tf32x3")},
        {(8, 16, "half")},
    ]
    assert {len(points) for points, *_ in asked} == {len(run.TOKENS)}


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"isogemm\.tune needs a GPU"):
        isogemm.tune("8x16")


@pytest.mark.parametrize(
    ("given", "how", "words"),
    [
        ("8", {}, "weights is '8'"),
        (None, {}, "weights is a NoneType"),
        ("8x8", {"tokens": [0]}, r"tokens is \[0\]"),
        ("8x8", {"dtype": torch.int8}, "dtype is"),
        ("8x8", {"precision": "high"}, "precision is 'high'"),
    ],
)
def test_what_cannot_be_tuned(given, how, words, asked):
    with pytest.raises(ValueError, match=words):
        isogemm.tune(given, **how)
    assert asked == []


def test_the_tuner_is_imported_when_it_is_called():
    code = "import sys; from isogemm import tune; print(*(name for name in sys.modules if name.startswith('isogemm.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    imported = set(done.stdout.split())
    assert "isogemm.tuning.api" in imported
    assert not {name for name in imported if name.startswith(("isogemm.bench", "isogemm.verify"))}
    assert {name for name in imported if name.startswith("isogemm.tuning.")} == {"isogemm.tuning.api"}
