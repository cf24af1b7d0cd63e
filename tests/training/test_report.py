from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from figures import tables
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
    table = tables.training([old, *others, torchs, ours])["training-reference"]
    assert table.startswith("x: torch x, triton x, driver x, commit c and b, x.")
    assert "over torch" in table


def test_a_section_has_the_table_and_both_plots(made, monkeypatch):
    """Both are written in the style they are drawn in: matplotlib places ticks by the font's size at the end."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "svg", lambda figure, name: str(matplotlib.rcParams["font.size"]))
    (section,) = report.sections([made])
    size = str(report.STYLE["font.size"])
    assert [(plot.title, plot.svg) for plot in section.plots] == [("losses", size), ("forecast", size)]
    assert section.title == "Training run: reference"


@pytest.mark.parametrize(("shortest", "longest"), [(3.1, 3.9), (1210.0, 1290.0), (0.8, 70.0), (2.0, 2e4)])
def test_the_ticks_of_the_plots_have_labels(made, shortest, longest):
    """In both panels, whatever times and errors there are; none lies on another."""
    matplotlib = pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    (epoch,) = made["epochs"]
    seconds = [{"train_s": shortest, "val_s": 0.0}, {"train_s": longest - shortest, "val_s": 0.0}]
    errors = [{"train_mse": shortest, "val_mse": longest}] * 2
    record = {**made, "epochs": [{**epoch, **one, **two} for one, two in zip(seconds, errors, strict=True)]}
    with matplotlib.rc_context(report.STYLE):
        figure = report.losses([record] * 2)
        FigureCanvasAgg(figure).draw()
    by_epoch, by_time = figure.axes
    for axis, limits in ((by_epoch.yaxis, by_epoch.get_ylim()), (by_time.xaxis, by_time.get_xlim())):
        ticks = [tick for tick in axis.get_major_ticks() if limits[0] <= tick.get_loc() <= limits[1]]
        labels = [tick.label1 for tick in ticks if tick.label1.get_text()]
        assert len(labels) >= 2
        boxes = [label.get_window_extent() for label in labels]
        assert not any(one.overlaps(other) for one, other in pairwise(boxes))
