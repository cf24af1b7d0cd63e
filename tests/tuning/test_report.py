"""What a report says."""

from pathlib import Path

import pytest

from isogemm.gemm.configs import Config
from isogemm.tuning.gemm import OTHER_BITS, Point
from isogemm.tuning.report import COLUMNS, Report, Row

POINT = Point("linear", "half", 64, 4096, 14336)
OLD, NEW = Config(64, 64, 64, 4, 3), Config(128, 128, 64, 8, 3)
FASTER = Row(POINT, OLD, NEW, before_us=40.0, after_us=10.0, torch_us=20.0)
SAME = Row(POINT, OLD, OLD, before_us=10.0, after_us=10.0, torch_us=5.0)
UNKNOWN = Row(POINT, OLD, NEW, before_us=None, after_us=10.0, torch_us=80.0)


def test_the_means_are_geometric():
    report = Report("GPU", (FASTER, SAME, UNKNOWN), (), 0, Path("file.json"))
    assert report.gain == pytest.approx(2.0)  # of 4 and 1
    assert report.speedup == pytest.approx(2.0)  # of 2, 1/2 and 8
    assert report.summary == [
        "points on GPU: 3 measured, 2 faster now, 0 not reached",
        "geometric mean speed-up: 2.00x over before, 2.00x over torch",
        "kept in file.json",
    ]


def test_it_prints_as_a_table():
    lines = str(Report("GPU", (FASTER, UNKNOWN), (), 0, None)).splitlines()
    assert lines[0].split(" | ") == ["| weight", *COLUMNS[1:-1], "torch / after |"]
    assert lines[2] == "| 4096 x 14336 half | linear | 64 | 40.0 | 10.0 | 20.0 | 4.00x | 2.00x |"
    assert lines[3] == "| 4096 x 14336 half | linear | 64 |  | 10.0 | 80.0 |  | 8.00x |"


def test_other_bits_are_said_loudly():
    skipped = "linear half 64: a: RuntimeError", f"linear half 64: b: {OTHER_BITS}"
    report = Report("GPU", (SAME,), skipped, 0, None)
    assert report.differing == (skipped[1],)
    assert report.summary[-1].startswith("The contract does not hold here; run `isogemm verify`")
    assert skipped[1] in report.summary[-1]
    assert not Report("GPU", (SAME,), skipped[:1], 0, None).differing


def test_what_is_missing_is_said():
    report = Report("GPU", (), ("linear: RuntimeError", "dx: ValueError"), 7, None)
    assert report.gain is report.speedup is None
    assert report.summary == [
        "points on GPU: 0 measured, 0 faster now, 7 not reached",
        "2 not counted, such as linear: RuntimeError",
    ]
