"""What a report lists and counts."""

import torch
import torch.nn.functional as F
from deferring import leaves_of, square_leaves

from isogemm.fusion import autofuse
from isogemm.fusion.report import MOST_ENTRIES


def test_a_long_report_counts():
    leaves = square_leaves()
    with autofuse() as report:
        for _ in range(2500):
            torch.relu(leaves["x"] @ leaves["w"]).sum()
    assert report.fused.total() == 2500
    assert report.fused is report.fused


def test_a_report_counts_what_it_no_longer_lists():
    weight, counted = torch.randn(8, 8), MOST_ENTRIES + 50

    @(fuse := autofuse())
    def layer(x):
        z = x @ weight
        return torch.relu(z).sum(), z.sum(), (x @ weight).sum()

    for rows in range(1, counted + 1):
        for _ in range(2):
            layer(torch.ones(rows, 8))
    for entries, times in ((fuse.report.fused, 2), (fuse.report.repeated, 2), (fuse.report.left, 4)):
        assert entries.total() == times * counted
        assert len(entries) == MOST_ENTRIES + 1
    assert f"fused products beyond the first {MOST_ENTRIES} entries (x 100)" in str(fuse.report)


def test_report_is_live():
    leaves = leaves_of()
    with autofuse() as report:
        fused = report.fused
        torch.relu(leaves["x"] @ leaves["w"]).sum()
        assert fused.total() == 1


def test_report():
    leaves = leaves_of()
    with autofuse() as report:
        for _ in range(2):
            torch.relu(leaves["x"] @ leaves["w"] + leaves["b"]).sum()
        F.linear(leaves["x"], leaves["w"].t()).sum()
    assert str(report).splitlines() == [
        "fused 2, left 1",
        "  fused matmul [6, 8] x [8, 5] float32 + bias + relu (x 2)",
        "  left linear [6, 8] x [5, 8] float32: sum reads it",
    ]
