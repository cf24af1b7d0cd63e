from __future__ import annotations

from typing import Any

import pytest

from isogemm.training import report, results
from isogemm.training.loop import Plan
from isogemm.training.results import Record


@pytest.fixture
def made(start) -> Record:
    run = start()
    names = ("gpu", "torch", "triton", "driver", "commit", "date")
    return results.record(run, run.fit(Plan(epochs=1)), dict.fromkeys(names, "x"), "reference")


def changed(made: Record, *, commit: str = "x", gpu: str = "x", **options: Any) -> Record:
    return {**made, "env": made["env"] | {"commit": commit, "gpu": gpu}, "run": made["run"] | options}


def test_runs_are_compared_that_differ_in_the_backend_alone(made):
    old = changed(made, commit="a")
    ours = changed(made, commit="b", backend="isogemm")
    others = [
        changed(made, backend="compile", precision="bf16"),
        changed(made, backend="compile", gpu="another"),
        {**changed(made, backend="compile"), "epochs": made["epochs"] * 2},
    ]
    torchs = changed(made, commit="c")
    assert report.by_preset([old, *others, torchs, ours]) == {"reference": [torchs, ours]}
    table = report.tables([old, *others, torchs, ours])["training-reference"]
    assert table.startswith("x: torch x, triton x, driver x, commit c and b, x.")
    assert "over torch" in table


def test_a_section_has_the_table_and_both_plots(made, monkeypatch):
    monkeypatch.setattr(report.pages, "drawing", lambda name, height, draw: name)
    (section,) = report.sections([made])
    assert [plot.title for plot in section.plots] == ["losses", "forecast"]
    assert section.title == "Training run: reference"
