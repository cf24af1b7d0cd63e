from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_runs import DATA, TINY, final, recorded, same, train

from isogemm.training import report, results
from isogemm.training.loop import BEST, CHECKPOINT, Diverged, Run, Stopped
from isogemm.training.series import synthetic
from isogemm.training.steps import Training

ROOT = Path(__file__).parents[2]
SAVE = report.save


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty one, and no plots: they take longer than a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "save", lambda path, draw, records: [])


@pytest.fixture
def drawn(folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "save", SAVE)


def write_csv(rows: int = 240) -> Path:
    values = synthetic(rows, 3).values.tolist()
    lines = [
        f"2016-07-{1 + hour // 24:02} {hour % 24:02}:00:00,{','.join(map(str, row))}" for hour, row in enumerate(values)
    ]
    path = Path("ETT.csv")
    path.write_text("\n".join(["date,a,b,c", *lines]) + "\n")
    return path


@pytest.mark.usefixtures("drawn")
def test_a_csv_end_to_end(capsys):
    assert train("--csv", str(write_csv()), "--backend", "isogemm", "--out", "run") == 0
    (row,) = recorded("run")
    assert row["run"]["channels"] == 3
    assert row["series"] == "ETT.csv"
    assert len(row["epochs"]) == 2
    assert row["forecast"]["channels"] == ["a", "b", "c"]
    for name in (CHECKPOINT, BEST, "losses.svg", "losses.png", "forecast.svg", "forecast.png"):
        assert (Path("run") / name).stat().st_size > 1000
    captured = capsys.readouterr()
    assert f"{row['test_mse']:.5f}" in captured.out
    assert "isogemm: preparing" in captured.err
    assert "isogemm: epoch 2/2, train MSE" in captured.err


def test_resume_from_the_command_line(monkeypatch, capsys):
    common = [*DATA, "--dropout", "0.1", "--backend", "torch", "--epochs", "3"]
    assert train(*common, "--out", "whole") == 0
    advance, taken = Training.advance, 0

    def interrupted(self: Training, most: int) -> int:
        nonlocal taken
        taken += 1
        if taken == 13:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(self, most)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "advance", interrupted)
        assert train(*common, "--out", "parts") == 130
    assert "stopped after step 4 of epoch 2" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert train(*common, "--out", "parts", "--resume") == 0
    assert same(final("parts"), final("whole"))


def test_compare(capsys):
    assert train(*DATA, "--compare", "torch", "isogemm") == 0
    torchs, ours = recorded()
    assert (torchs["run"]["backend"], ours["run"]["backend"]) == ("torch", "isogemm")
    assert ours["epochs"][-1]["val_mse"] == pytest.approx(torchs["epochs"][-1]["val_mse"], rel=1e-3)
    out = capsys.readouterr().out
    assert "over torch" in out
    assert f"{results.speedup(ours, torchs):.2f}x" in out
    assert not list(Path().rglob(CHECKPOINT))


def test_errors_in_the_table_are_of_the_best_epoch():
    assert train(*DATA, "--backend", "torch") == 0
    (made,) = recorded()
    columns, (line,) = results.comparison([{**made, "best_epoch": 1}])
    assert line[columns.index("val MSE")] == f"{made['epochs'][0]['val_mse']:.5f}"


def test_compare_shows_what_there_is(monkeypatch, capsys):
    """Where a run was stopped, or another one's loss is not finite."""
    fit = Run.fit

    def ends(error: Exception, of: str) -> None:
        def raising(self: Run, *args):
            if self.config.backend == of:
                raise error
            return fit(self, *args)

        monkeypatch.setattr(Run, "fit", raising)

    ends(Stopped("after step 1 of epoch 1"), of="isogemm")
    assert train(*DATA, "--compare", "torch", "isogemm", "--out", "stopped") == 130
    assert [each["run"]["backend"] for each in recorded("stopped")] == ["torch"]
    out = capsys.readouterr().out
    assert "stopped after step 1 of epoch 1\n" in out  # there is no checkpoint to resume
    assert "Training on" in out
    ends(Diverged("the loss is not finite"), of="torch")
    assert train(*DATA, "--compare", "torch", "isogemm", "--out", "diverged") == 1
    assert [each["run"]["backend"] for each in recorded("diverged")] == ["isogemm"]


@pytest.mark.usefixtures("drawn")
def test_without_the_extra(monkeypatch, capsys):
    for package in ("rich", "matplotlib"):
        for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
            monkeypatch.setitem(sys.modules, name, None)
    assert train(*DATA, "--backend", "torch") == 0
    assert "no plots: matplotlib is not installed" in capsys.readouterr().out
    assert len(recorded()) == 1


def test_a_forecast_as_the_guide_makes_it():
    assert train("--csv", str(write_csv()), "--backend", "torch", "--out", "build/ettm1") == 0
    guide = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
    (code,) = (each for each in re.findall("```python\n(.*?)```", guide, re.S) if "best_forecaster" in each)
    shown = recorded("build/ettm1")[0]["forecast"]
    names = {"x": torch.tensor(shown["history"])[None]}
    with torch.no_grad():
        exec(code, names)
    torch.testing.assert_close(
        names["forecast"][0], torch.tensor(shown["forecast"], dtype=torch.float64), rtol=1e-4, atol=1e-4
    )


def test_broken_csv(capsys):
    path = write_csv(rows=240)
    lines = path.read_text().splitlines()
    lines[100] = lines[100].replace(",", ",cold ", 1)
    path.write_text("\n".join(lines))
    assert train("--csv", str(path)) == 2
    error = capsys.readouterr().err
    assert error.startswith("isogemm train-patchtst: error: ETT.csv, line 101, column 'a': 'cold ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--csv", "missing.csv"], "missing.csv"),
        ([*DATA, "--rows", "20"], "synthetic, seed 0: too short: its 20 rows leave no window of 16 + 4 rows"),
        ([*DATA, "--batch", "500"], "149 training windows, fewer than a batch of 500"),
        ([*DATA, "--nhead", "3"], "nhead is 3, which does not divide d_model 8"),
        ([*DATA, "--epochs", "0"], "epochs is 0; expected at least 1"),
        ([*DATA, "--resume"], "checkpoint.pt: no such file"),
        ([*DATA, "--resume", "--compare"], "--resume: not with --compare"),
        ([*DATA, "--backend", "torch", "--compare", "isogemm"], "--backend: not with --compare"),
        (["--rows", "0"], "rows is 0"),
        ([*DATA, "--graph"], "graph is True; expected one process with a GPU, not 1 on cpu"),
    ],
)
def test_impossible_requests_are_one_line(arguments, message, capsys):
    assert train(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("isogemm train-patchtst: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_data_that_is_not_synthetic_has_its_own_sizes(capsys):
    assert train("--csv", str(write_csv()), "--channels", "2") == 2
    assert "--rows, --channels: only for synthetic data, not with --csv" in capsys.readouterr().err


def test_another_configuration_is_not_resumed(capsys):
    assert train(*DATA, "--backend", "torch") == 0
    assert train(*DATA, "--backend", "torch", "--lr", "0.5", "--resume") == 2
    assert "of another run: lr is 0.5, in the checkpoint 0.001" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_fails(capsys):
    assert train(*DATA, "--backend", "torch", "--lr", "1e30") == 1
    assert "torch: the loss is not finite in epoch" in capsys.readouterr().out


def test_two_processes_train_like_one():
    """By torchrun: each with half of every batch, the gradients averaged."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = ["-m", "isogemm", "train-patchtst", *TINY, *DATA, "--backend", "isogemm", "--out", "two"]
    Path("matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')")  # no plots: they take seconds
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{Path.cwd()}", "OMP_NUM_THREADS": "1"}
    with Path("two.log").open("w") as log:
        processes = subprocess.Popen([*torchrun, *arguments], env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            code = processes.wait(timeout=90)
        except subprocess.TimeoutExpired:
            os.killpg(processes.pid, signal.SIGKILL)
            raise
    assert code == 0, Path("two.log").read_text()[-3000:]
    assert train(*DATA, "--backend", "isogemm", "--out", "one") == 0
    (two,), (one,) = recorded("two"), recorded("one")
    assert two["run"]["processes"] == 2
    for together, alone in zip(two["epochs"], one["epochs"], strict=True):
        for name in ("train_mse", "val_mse", "val_mae"):
            assert together[name] == pytest.approx(alone[name], rel=1e-4)  # of rounding alone
    assert Path("two.log").read_text().count("Training on") == 1


def test_the_example_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_patchtst.py", "--help"])
    source = (ROOT / "examples" / "train_patchtst.py").read_text()
    with pytest.raises(SystemExit) as exit:
        exec(compile(source, "train_patchtst.py", "exec"), {"__name__": "__main__"})
    assert exit.value.code == 0
    assert "usage: isogemm train-patchtst" in capsys.readouterr().out
