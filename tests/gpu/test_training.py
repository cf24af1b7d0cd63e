from __future__ import annotations

import pytest
import torch

from isogemm.training.loop import CHECKPOINT, Plan, Run, Stopped
from isogemm.training.series import cut, synthetic
from isogemm.training.steps import Objective, Training
from isogemm.training.world import World
from isogemm_options import PRESETS

SMALL = {"channels": 3, "d_model": 32, "nhead": 4, "dim_feedforward": 64, "batch": 16}
OFFICIAL = {"norm": "batch", "res_attention": True, "dropout": 0.2, "attention_dropout": 0.1}
VARIANTS = [{}, OFFICIAL, {**OFFICIAL, "pre_norm": True, "precision": "bf16"}]
SERIES = synthetic(400, 3)


def start(**options) -> Run:
    return Run(PRESETS["reference"].with_options({**SMALL, **options}), SERIES, World(torch.device("cuda", 0)))


def assert_same_bits(found: Run, expected: Run) -> None:
    found, expected = found.model.state_dict(), expected.model.state_dict()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_bits_run_to_run_in_a_graph_and_without(variant):
    runs = [
        start(**variant, graph=graph, graph_steps=steps)
        for graph, steps in ((False, 1), (True, 1), (True, 1), (True, 4))
    ]
    for run in runs:
        run.fit(Plan(epochs=2))
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


@pytest.mark.parametrize("compile_rest", [False, True])
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, compile_rest):
    options = {**OFFICIAL, "compile_rest": compile_rest, "graph": True, "graph_steps": 3}
    whole, plan = start(**options), Plan(epochs=2, folder=tmp_path)
    whole.fit(Plan(epochs=2))
    polls = iter([False, False, True])
    with pytest.raises(Stopped):
        start(**options).fit(plan, stop=lambda: next(polls))
    resumed = start(**options)
    resumed.resume(tmp_path / CHECKPOINT)
    resumed.fit(plan)
    assert_same_bits(resumed, whole)


def test_backends_have_one_loss_curve():
    curves = []
    for backend in ("torch", "compile", "isogemm"):
        outcome = start(backend=backend, precision="ieee").fit(Plan(epochs=3))
        curves.append([value for epoch in outcome.epochs for value in (epoch.train_mse, epoch.val_mse)])
        assert outcome.peak_bytes > 0
    torch.compiler.reset()
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-3)  # of rounding alone, which 42 steps carry on


def test_a_replay_waits_for_nothing():
    windows = cut(SERIES, 24, 24).to(torch.device("cuda", 0))
    run = start()
    training = Training(Objective(run.model, windows), run.optimizer, windows.values, (8, 16))
    training.prepare(run.model, 2)
    training.begin(torch.randint(windows.train.count, (8, 16)), torch.zeros(0))
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert [training.advance(most) for most in (7, 5, 3, 1)] == [2, 2, 2, 1]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    losses = training.losses(8).cpu()
    assert losses[:7].gt(0).all()
    assert losses[7] == 0
