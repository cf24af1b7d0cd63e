"""The encoder's tuner on interpreted kernels: candidates run, and those with other bits do not count."""

import pytest
import torch

from isogemm.bench import timer
from isogemm.verify.compare import BitDiff
from isogemm.verify.encoder_reference import EncoderShape
from tuners import encoder
from tuners.encoder import Point

pytestmark = pytest.mark.usefixtures("interpreted_schedules")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Small layers, each candidate called once; the later one is the faster."""
    monkeypatch.setattr(encoder, "SHAPES", {32: EncoderShape(4, 5, 24, 3, 40)})
    monkeypatch.setattr(encoder, "BATCH", 2)

    def measure(runs, device, **options):
        for (run,) in runs.values():
            assert run().isfinite().all()
        return {name: [10.0 - place] for place, name in enumerate(runs)}

    monkeypatch.setattr(timer, "measure", measure)


def _measure(point, chosen, any_bits=False):
    return encoder.measure(point, point.layer("sm_80"), chosen, CPU, any_bits)


@pytest.mark.parametrize(
    ("launch", "chosen"),
    [
        ("project", [(32, 32, 4, 1), (32, 16, 4, 1), (64, 16, 4, 2), (16, 32, 8, 1)]),
        ("feedforward", [(16, 16, 4, 1)]),
        ("feedforward_backward", [(16, 32, 4, 1)]),
        ("weight_grads", [(16, 32, 32, 1, 1)]),
    ],
)
def test_candidates_are_run_and_timed(launch, chosen):
    point = Point(launch, "ieee", 32)
    assert set(chosen) <= set(encoder.candidates(point))
    row = _measure(point, chosen, any_bits=True)
    names = [encoder._name(values) for values in chosen if values != row["now"]]
    assert list(row["us"]) == ["now", *names]
    assert row["failed"] == []
    assert {"launch": launch, "number": "ieee", "width": 32}.items() <= row.items()


def test_a_candidate_with_other_bits_does_not_count(monkeypatch):
    monkeypatch.setattr(encoder, "compare_bits", lambda a, b: BitDiff(1, 1))
    row = _measure(Point("feedforward", "ieee", 32), [(16, 16, 4, 1)])
    assert row["differing"] == ["16 16 4 1"]
    assert list(row["us"]) == ["now"]


def test_a_candidate_that_fails_does_not_count():
    row = _measure(Point("feedforward", "ieee", 32), [(48, 16, 4, 1)])  # not a power of two
    assert len(row["failed"]) == 1
    assert row["failed"][0].startswith("48 16 4 1: ")
    assert list(row["us"]) == ["now"]


@pytest.mark.parametrize("launch", encoder.ATTENTION)
def test_attention_s_blocks_are_replaced(launch, monkeypatch):
    monkeypatch.setattr(Point, "shape", EncoderShape(2, 5, 64, 2, 16))
    row = _measure(Point(launch, "ieee", 32), [(16, 16, 32, 16, 4, 1)], any_bits=True)
    assert list(row["us"]) == ["now", "16 16 32 16 4 1"]
