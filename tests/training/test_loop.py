from __future__ import annotations

import math
import random
import re
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isogemm.training import checkpoints, results
from isogemm.training.checkpoints import CheckpointError
from isogemm.training.loop import BEST, CHECKPOINT, Diverged, Plan, Run, Stopped, best_forecaster
from isogemm.training.series import SeriesError, read_csv, synthetic

ALL_RANDOM = {"norm": "batch", "res_attention": True, "dropout": 0.2, "attention_dropout": 0.1, "affine": True}
BACKENDS = ["torch", "isogemm"]


def weights(run):
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    differing = [name for name in found if not torch.equal(found[name], expected[name])]
    assert not differing


class StopAfter:
    """Asks to stop once so many steps were done."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


def test_the_loss_goes_down(start):
    outcome = start(lr=3e-3).fit(Plan(epochs=6))
    first, last = outcome.epochs[0], outcome.epochs[-1]
    assert last.train_mse < 0.6 * first.train_mse
    assert last.val_mse < 0.7 * first.val_mse
    assert outcome.best_epoch == min(range(1, 7), key=lambda number: outcome.epochs[number - 1].val_mse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_seed_decides_the_bits(start, backend):
    runs = [start(**ALL_RANDOM, backend=backend, seed=seed) for seed in (1, 1, 2)]
    for run in runs:
        torch.rand(3)  # whatever was drawn before
        run.fit(Plan(epochs=1))
    one, again, other = map(weights, runs)
    assert_same_bits(again, one)
    assert not torch.equal(other["head.weight"], one["head.weight"])


def test_backends_begin_alike_and_see_the_same_batches(start):
    torchs, ours = (start(backend=backend) for backend in BACKENDS)
    assert_same_bits(weights(ours), weights(torchs))
    found, expected = (run.fit(Plan(epochs=2)) for run in (ours, torchs))
    for one, other in zip(found.epochs, expected.epochs, strict=True):
        assert one.train_mse == pytest.approx(other.train_mse, rel=1e-4)  # of rounding alone
        assert one.val_mse == pytest.approx(other.val_mse, rel=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stopped_after", [1, 14])
def test_a_stopped_run_goes_on_to_the_same_bits(start, tmp_path, backend, stopped_after):
    """Stop in epochs of 9 steps: inside the first, and inside the second."""
    whole = start(**ALL_RANDOM, backend=backend)
    expected = whole.fit(Plan(epochs=2))
    plan = Plan(epochs=2, folder=tmp_path)
    with pytest.raises(Stopped, match="after step"):
        start(**ALL_RANDOM, backend=backend).fit(plan, stop=StopAfter(stopped_after))
    resumed = start(**ALL_RANDOM, backend=backend)
    resumed.resume(tmp_path / CHECKPOINT)
    found = resumed.fit(plan)
    assert_same_bits(weights(resumed), weights(whole))
    assert found.test_mse == expected.test_mse
    assert found.best_epoch == expected.best_epoch
    assert found.total_s >= sum(each.train_s + each.val_s for each in found.epochs)  # not of its last part alone
    assert [replace(each, train_s=0, val_s=0) for each in found.epochs] == [
        replace(each, train_s=0, val_s=0) for each in expected.epochs
    ]


def test_more_epochs_are_those_of_a_longer_run(start, tmp_path):
    whole = start(**ALL_RANDOM)
    whole.fit(Plan(epochs=3))
    start(**ALL_RANDOM).fit(Plan(epochs=2, folder=tmp_path))
    resumed = start(**ALL_RANDOM)
    resumed.resume(tmp_path / CHECKPOINT)
    resumed.fit(Plan(epochs=3, folder=tmp_path))
    assert_same_bits(weights(resumed), weights(whole))


def test_a_finished_run_resumed_is_only_tested_again(start, tmp_path):
    plan = Plan(epochs=2, folder=tmp_path)
    run = start()
    expected = run.fit(plan)
    again = start()
    again.resume(tmp_path / CHECKPOINT)
    found = again.fit(plan)
    assert found.test_mae == expected.test_mae
    assert found.total_s >= sum(each.train_s for each in found.epochs)
    assert_same_bits(weights(again), weights(run))


def test_checkpoints_inside_an_epoch(start, tmp_path, monkeypatch):
    done = []
    save = checkpoints.save

    def seen(path: Path, state):
        if path.name == CHECKPOINT:
            done.append((len(state["epochs"]), len(state["losses"])))
        save(path, state)

    monkeypatch.setattr(checkpoints, "save", seen)
    run = start()
    assert run.steps == 9
    run.fit(Plan(epochs=2, folder=tmp_path, checkpoint_epochs=2, checkpoint_steps=4))
    assert done == [(0, 4), (0, 8), (1, 4), (1, 8), (2, 0)]


def test_best_weights_are_kept(start, series, tmp_path):
    """Also where no checkpoint was due after the best epoch."""
    run = start(lr=0.1)
    outcome = run.fit(Plan(epochs=5, folder=tmp_path, checkpoint_epochs=5))
    assert outcome.best_epoch < 5
    assert checkpoints.load(tmp_path / BEST)["epoch"] == outcome.best_epoch
    model, mean, std = best_forecaster(tmp_path / BEST)
    x, y = (run.windows.all[run.windows.test.first :][..., part] for part in (slice(16), slice(16, None)))
    with torch.no_grad():
        mse = (model(x) - y).square().mean().item()
    assert mse == pytest.approx(outcome.test_mse, rel=1e-5)  # in another order
    torch.testing.assert_close((series.values - mean) / std, run.windows.values.T.double(), rtol=1e-6, atol=1e-6)


def test_patience(start):
    outcome = start(lr=0.1).fit(Plan(epochs=50, patience=2))
    assert len(outcome.epochs) == outcome.best_epoch + 2 < 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.5}, "lr is 0.5, in the checkpoint 0.001"),
        ({"d_model": 16, "seed": 3}, "d_model is 16, in the checkpoint 8; seed is 3, in the checkpoint 0"),
        ({"backend": "isogemm"}, "backend is 'isogemm', in the checkpoint 'torch'"),
    ],
)
def test_another_runs_checkpoint_is_refused(start, tmp_path, options, message):
    start().fit(Plan(epochs=1, folder=tmp_path))
    with pytest.raises(CheckpointError, match=message):
        start(**options).resume(tmp_path / CHECKPOINT)


def test_other_data_is_refused(start, tmp_path):
    start().fit(Plan(epochs=1, folder=tmp_path))
    run = start()
    run.series = synthetic(240, 2, seed=9)
    with pytest.raises(CheckpointError, match="of another run: data is"):
        run.resume(tmp_path / CHECKPOINT)


@pytest.mark.parametrize("content", [None, b"", b"no checkpoint", b"PK\x03\x04"])
def test_files_that_are_no_checkpoint(start, tmp_path, content):
    path = tmp_path / CHECKPOINT
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt: (no such file|not a checkpoint)"):
        start().resume(path)


def test_a_flipped_bit_is_refused(start, tmp_path):
    """Wherever it is: in the weights, the archive's tables or the checksum itself."""
    start().fit(Plan(epochs=1, folder=tmp_path))
    path = tmp_path / CHECKPOINT
    good = path.read_bytes()
    bits = range(8 * len(good))
    for bit in [*random.Random(0).sample(bits, 100), *bits[-8 * 120 :: 5]]:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"\.pt: not a checkpoint, or damaged"):
            checkpoints.load(path)
    path.write_bytes(good)
    checkpoints.load(path)


def test_a_file_that_was_cut_off_is_refused(start, tmp_path):
    start().fit(Plan(epochs=1, folder=tmp_path))
    path = tmp_path / CHECKPOINT
    good = path.read_bytes()
    for length in (0, 1, 60, 79, 80, len(good) // 2, len(good) - 80, len(good) - 79, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError, match=r"\.pt: not a checkpoint, or damaged"):
            checkpoints.load(path)


def test_torch_reads_a_checkpoint(tmp_path):
    checkpoints.save(tmp_path / "x.pt", {"value": torch.arange(3)})
    assert torch.load(tmp_path / "x.pt", weights_only=True)["value"].tolist() == [0, 1, 2]
    assert zipfile.ZipFile(tmp_path / "x.pt").testzip() is None


def spoiled(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The value with one entry missing, of another type or of another shape; of equal entries the first two."""
    if isinstance(value, dict):
        for key in list(value)[:2] if len(value) > 10 else value:
            yield f"{name}/{key} missing", {k: v for k, v in value.items() if k != key}
            for what, entry in spoiled(value[key], f"{name}/{key}"):
                yield what, {**value, key: entry}
        yield f"{name} unknown", {**value, "other": 1}
    elif isinstance(value, list):
        for index in range(min(2, len(value))):
            for what, entry in spoiled(value[index], f"{name}/{index}"):
                yield what, [*value[:index], entry, *value[index + 1 :]]
    elif isinstance(value, torch.Tensor):
        yield f"{name} longer", torch.zeros(value.numel() + 9, dtype=value.dtype)
        yield f"{name} dtype", value.to(torch.complex64)
        yield f"{name} sparse", value.to_sparse()
        yield f"{name} meta", value.to("meta")
    elif isinstance(value, float):
        yield f"{name} nan", math.nan
        yield f"{name} too large", 10**400
    yield f"{name} text", "no"


def test_a_checkpoint_that_lacks_or_misshapes_an_entry_is_refused(start, tmp_path, monkeypatch):
    with pytest.raises(Stopped):
        start().fit(Plan(epochs=2, folder=tmp_path), stop=StopAfter(13))
    state = checkpoints.load(tmp_path / CHECKPOINT)
    bests = [("best", {**state, "best": {**state["best"], "epoch": epoch}}) for epoch in (0, 2, 1.0)]
    cases = [
        (what, bad)
        for what, bad in [*spoiled(state), *bests]
        if not what.startswith(("/schema", "/optimizer/param_groups/", " text"))  # `load` looks; the run has its own
    ]
    assert len(cases) > 60
    run, accepted = start(), []
    for what, bad in cases:
        monkeypatch.setattr(checkpoints, "load", lambda path, bad=bad: bad)
        try:
            run.resume("spoiled.pt")
        except CheckpointError as error:
            assert re.match(r"spoiled\.pt: (not a checkpoint of this|of another) run: ", str(error))  # noqa: PT017
        else:
            accepted.append(what)
    assert not accepted


def test_random_states_that_torch_refuses(start, tmp_path):
    start().fit(Plan(epochs=1, folder=tmp_path))
    state = checkpoints.load(tmp_path / CHECKPOINT)
    checkpoints.save(tmp_path / CHECKPOINT, {**state, "random": [[torch.zeros_like(state["random"][0][0])]]})
    with pytest.raises(CheckpointError, match="not a checkpoint of this run"):
        start().resume(tmp_path / CHECKPOINT)


def test_best_weights_that_lack_an_entry_are_refused(start, tmp_path, monkeypatch):
    start().fit(Plan(epochs=1, folder=tmp_path))
    state = checkpoints.load(tmp_path / BEST)
    cases = [bad for what, bad in spoiled(state) if not what.startswith(("/schema", "/run", " text"))]
    runs = [{**state, "run": run} for run in (None, {}, {**state["run"], "d_model": "8"})]
    for bad in [*cases, *runs]:
        monkeypatch.setattr(checkpoints, "load", lambda path, bad=bad: bad)
        with pytest.raises(CheckpointError, match="not a checkpoint of this run"):
            best_forecaster("spoiled.pt")


class Named:
    """What os.PathLike asks for, and no more."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


@pytest.mark.parametrize("path", [str, Named], ids=["str", "PathLike"])
def test_paths_of_any_kind(start, tmp_path, path):
    run = start()
    run.fit(Plan(epochs=1, folder=path(tmp_path)))
    start().resume(path(tmp_path / CHECKPOINT))
    model, _, _ = best_forecaster(path(tmp_path / BEST))
    assert_same_bits(model.state_dict(), weights(run))
    data = tmp_path / "data.csv"
    data.write_text("date,a\n2016-07-01,1\n")
    assert read_csv(path(data)).values.tolist() == [[1.0]]
    assert results.read(path(tmp_path / "none")) == []


def test_a_test_error_that_is_not_finite_ends_the_run(start, monkeypatch):
    """It could not be recorded."""
    errors = iter([(1.0, 1.0), (math.inf, 1.0)])
    monkeypatch.setattr(Run, "_errors", lambda self, evaluation: next(errors))
    with pytest.raises(Diverged, match="the test error is not finite"):
        start().fit(Plan(epochs=1))


def test_a_loss_that_is_not_finite_ends_the_run(start):
    run = start()
    with torch.no_grad():
        run.model.head.weight.fill_(1e30)
    with pytest.raises(Diverged, match="epoch 1"):
        run.fit(Plan(epochs=2))


def test_fewer_windows_than_a_batch(start):
    with pytest.raises(SeriesError, match="149 training windows, fewer than a batch of 150"):
        start(batch=150)


def test_a_compiled_step_is_one_graph(start, monkeypatch):
    """Traced alone: fullgraph raises where the tracer has to leave the graph."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compile(*args, backend="eager", **options))
    expected, found = (
        start(layers=1, backend="isogemm", compile_rest=rest).fit(Plan(epochs=1)).epochs[0] for rest in (False, True)
    )
    torch.compiler.reset()
    assert found.train_mse == pytest.approx(expected.train_mse, rel=1e-4)  # of rounding alone
    assert found.val_mse == pytest.approx(expected.val_mse, rel=1e-4)


def test_all_of_a_bfloat16_run_is_in_autocast(start):
    run = start(precision="bf16")
    seen = set()
    run.model.head.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    run.fit(Plan(epochs=1))
    assert seen == {torch.bfloat16}


def test_the_checkpoint_is_written_last(start, tmp_path, monkeypatch):
    """A stop between the files leaves a checkpoint from which the other one is written again."""
    written = []
    monkeypatch.setattr(checkpoints, "save", lambda path, state: written.append(path.name))
    start().fit(Plan(epochs=1, folder=tmp_path))
    assert written == [BEST, CHECKPOINT]


def test_forecasts_are_in_the_datas_units(start, series):
    outcome = start().fit(Plan(epochs=1))
    shown = outcome.forecast
    first = 240 - 48 - 16 + 45 // 2  # the middle of 45 test windows
    for channel, name in enumerate(shown.channels):
        assert name == series.channels[channel]
        seen = shown.history[channel] + shown.truth[channel]
        assert seen == pytest.approx(series.values[first : first + 20, channel].tolist(), rel=1e-4)
        assert len(shown.forecast[channel]) == 4
