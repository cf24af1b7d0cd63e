"""A run's folder is its user's: what is there is neither lost, torn nor mixed, however a run ends."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import re
import signal
import stat
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from training_runs import DATA, TINY, final, recorded, same, train

from isogemm.training import checkpoints, folder, report, results
from isogemm.training.folder import BEST, CHECKPOINT, RESULTS
from isogemm.training.loop import Run
from isogemm.training.series import synthetic
from isogemm.training.steps import Evaluation, Training

ROOT = Path(__file__).parents[2]
RUN = [*DATA, "--backend", "torch", "--dropout", "0.1", "--checkpoint-steps", "5"]  # of 9 steps an epoch


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And no plots: they take longer than a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "save", lambda path, draw, records: [])


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Also where the tests run in the background, whose processes ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of an uninterrupted run."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "save", lambda path, draw, records: [])
        assert train(*RUN, "--out", str(out)) == 0
    return final(str(out))


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("isogemm train-patchtst: error: ")
    return error.removeprefix("isogemm train-patchtst: error: ")


def contents(out: str = "out") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(out).iterdir() if path.name != folder._LOCK}


def go_on() -> int:
    """As the message says: with --resume where there is a checkpoint."""
    return train(*RUN, "--out", "out", *(["--resume"] if Path("out", CHECKPOINT).exists() else ["--overwrite"]))


def assert_ended_once(whole: dict[str, torch.Tensor], out: str = "out") -> None:
    assert same(final(out), whole)
    assert len(recorded(out)) == 1
    assert contents(out).keys() == {CHECKPOINT, BEST, RESULTS}


# What is there


def test_another_runs_checkpoints_are_not_replaced_unasked(whole, capsys):
    assert train(*RUN, "--out", "out") == 0
    before = contents()
    assert train(*RUN, "--out", "out", "--seed", "1") == 2
    assert re.fullmatch(r"out: holds .* of another run; --resume .*, --overwrite .*, --out .*", error_of(capsys))
    assert contents() == before
    assert train(*RUN, "--out", "out", "--batch", "500", "--overwrite") == 2  # cannot be: discards nothing
    assert contents() == before
    assert train(*RUN, "--out", "out", "--seed", "1", "--overwrite") == 0
    assert [each["run"]["seed"] for each in recorded("out")] == [0, 1]
    assert not same(final("out"), whole)
    Path("out", CHECKPOINT).unlink()
    assert train(*RUN, "--out", "out") == 2
    assert "--resume" not in error_of(capsys)  # there is nothing to resume


def test_overwriting_begins_without_the_other_runs_files(monkeypatch):
    assert train(*RUN, "--out", "out") == 0
    monkeypatch.setattr(Run, "fit", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error", "x")))
    assert train(*RUN, "--out", "out", "--seed", "1", "--overwrite") == 2
    assert contents().keys() == {RESULTS}


def test_a_run_that_ended_is_not_recorded_again(whole, capsys):
    assert train(*RUN, "--out", "out") == 0
    shown, before = capsys.readouterr().out, contents()
    assert train(*RUN, "--out", "out", "--resume") == 0
    out = capsys.readouterr().out
    assert "out: this run has ended and is recorded; --epochs above 2 continues it" in out
    assert shown.splitlines()[-3] in out  # the table
    assert contents() == before
    assert train(*RUN, "--out", "other", "--seed", "1") == 0
    others = Path("other", BEST).read_bytes()
    for damage in (Path.unlink, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(others)):
        damage(Path("out", BEST))
        assert train(*RUN, "--out", "out", "--resume") == 0
        assert contents() == before
    assert train(*RUN, "--out", "out", "--resume", "--epochs", "3") == 0
    assert [len(each["epochs"]) for each in recorded("out")] == [2, 3]


@pytest.mark.parametrize("options", [["--resume", "--overwrite"], ["--overwrite", "--compare", "torch"]])
def test_overwrite_with_another_option(options, capsys):
    assert train(*DATA, *options) == 2
    assert error_of(capsys).startswith("--overwrite: not with --")


@pytest.mark.parametrize("tail", ['{"schema": 1, "env": {"com', "[]", "{}"])
def test_nothing_is_added_to_a_torn_line(tail, monkeypatch, capsys):
    assert train(*RUN, "--out", "out") == 0
    file = Path("out", RESULTS)
    file.write_text(file.read_text() + tail)
    before = contents()
    monkeypatch.setattr(Training, "advance", None)  # not after hours of training
    for options in (["--resume", "--epochs", "3"], ["--overwrite"], ["--compare", "torch"]):
        compared = [each for each in RUN if each not in ("--backend", "torch")] if "--compare" in options else RUN
        assert train(*compared, "--out", "out", *options) == 2
        assert re.match(r"out/results\.jsonl:2: not (a recorded run|JSON): ", error_of(capsys))
        assert contents() == before


def test_a_line_that_lacks_its_end_alone_is_completed():
    assert train(*RUN, "--out", "out") == 0
    file = Path("out", RESULTS)
    file.write_text(file.read_text().rstrip())
    assert train(*RUN, "--out", "out", "--overwrite") == 0
    assert len(recorded("out")) == 2


def test_a_checkpoint_that_lacks_an_entry_is_one_line(capsys):
    assert train(*RUN, "--out", "out") == 0
    state = checkpoints.load(Path("out", CHECKPOINT))
    del state["random"]
    checkpoints.save(Path("out", CHECKPOINT), state)
    assert train(*RUN, "--out", "out", "--resume") == 2
    assert error_of(capsys) == "out/checkpoint.pt: not a checkpoint of this run: state has no 'random'"


# Who writes


def test_two_processes_do_not_share_a_folder(capsys):
    with folder.claimed(Path("out")):
        assert train(*RUN, "--out", "out") == 2
        assert error_of(capsys).startswith(f"out: process {os.getpid()} on ")
        assert train(*DATA, "--compare", "torch", "--out", "out") == 2
    assert train(*RUN, "--out", "out") == 0


@pytest.mark.parametrize("place", ["file", "file/below", "taken", "looped"])
def test_a_folder_that_cannot_be_written_is_noticed_at_once(place, monkeypatch, capsys):
    Path("file").write_text("mine")
    Path("taken", CHECKPOINT).mkdir(parents=True)
    Path("looped").mkdir()
    Path("looped", BEST).symlink_to(BEST)
    monkeypatch.setattr(Run, "__init__", None)
    assert train(*RUN, "--out", place) == 2
    assert place.partition("/")[0] in error_of(capsys)
    assert Path("file").read_text() == "mine"


def test_only_our_temporary_files_are_removed():
    Path("out").mkdir()
    ours = {f".{name}.123.456" for name in (CHECKPOINT, BEST, RESULTS, "losses.svg", "forecast.png")} | {".probe.77"}
    others = {".notes.txt.123", ".checkpoint.pt.swp", "checkpoint.pt.123", ".gitignore"}
    for name in ours | others:
        Path("out", name).write_text("x")
    assert train(*RUN, "--out", "out") == 0
    assert contents().keys() == others | {CHECKPOINT, BEST, RESULTS}


def test_one_process_fails_and_the_others_with_it(tmp_path):
    """Over gloo: the first cannot write its checkpoint, the others end as well; then a file that the second lacks."""
    program = """
from isogemm.training import checkpoints
from isogemm_options import PRESETS
from isogemm.training.loop import Plan, Run
from isogemm.training.series import synthetic
from isogemm.training.world import FailedElsewhere, World

def full(path, state):
    raise OSError(28, "No space left on device", path)

checkpoints.save = full
sizes = {"channels": 2, "inputs": 16, "horizon": 4, "patch": 4, "stride": 4, "d_model": 8, "nhead": 2}
config = PRESETS["reference"].with_options({**sizes, "dim_feedforward": 16, "batch": 16, "backend": "torch"})
world = World(torch.device("cpu"), rank, 2)
try:
    Run(config, synthetic(240, 2), world)._save(Plan(folder="nowhere"))
except (OSError, FailedElsewhere) as error:
    assert isinstance(error, OSError) == (rank == 0), error
else:
    raise AssertionError("no error")
try:
    with world.together():
        if rank == 1:
            raise FileNotFoundError("checkpoint.pt")
except (OSError, FailedElsewhere) as error:
    assert isinstance(error, OSError) == (rank == 1), error
else:
    raise AssertionError("no error")
"""
    run_ranks(program, tmp_path, timeout=60)


# How a run may end


def test_a_full_disk_at_each_write(whole, monkeypatch, capsys):
    sync, failed = os.fsync, 0
    for failing in range(1, 20):
        left = failing

        def full(descriptor: int) -> None:
            nonlocal left
            left -= stat.S_ISREG(os.fstat(descriptor).st_mode)
            if left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            sync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            code = train(*RUN, "--out", "out")
        if code == 0:
            break
        failed += 1
        assert code == 2
        error = error_of(capsys)
        assert re.match(r"out/(checkpoint\.pt|best\.pt|results\.jsonl): No space left on device", error)
        assert ("--resume" in error) == Path("out", CHECKPOINT).exists()
        assert not recorded("out")
        assert go_on() == 0
        assert_ended_once(whole)
        for name in (CHECKPOINT, BEST, RESULTS):
            Path("out", name).unlink()
    assert failed >= 6  # 2 checkpoints of each epoch, the best weights, the record


KILLED = """
import os, signal, sys
from isogemm import cli
from isogemm.training import report

report.save = lambda path, draw, records: []
replace = os.replace

def run(out, *arguments, kill_at=0):
    pid = os.fork()
    if not pid:
        left = [kill_at]

        def dying(*args, **options):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*args, **options)

        os.replace = dying
        os._exit(cli.main(["train-patchtst", *sys.argv[1:], "--out", out, *arguments]))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

cli.main(["train-patchtst", *sys.argv[1:], "--out", "whole"])  # what it imports, the others find
for kill_at in (1, 4, 6):
    out = f"killed{kill_at}"
    assert run(out, kill_at=kill_at) == -signal.SIGKILL
    assert any(name.startswith((".checkpoint", ".best", ".results")) for name in os.listdir(out))
    there = os.path.exists(f"{out}/checkpoint.pt")
    assert run(out, "--resume" if there else "--overwrite") == 0
"""


def test_killed_at_each_write():
    """With SIGKILL, between a temporary file and its renaming: nothing is lost, and no lock or file is left."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *TINY, *RUN], env=env, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for killed in (1, 4, 6):
        assert_ended_once(final("whole"), f"killed{killed}")


@pytest.mark.parametrize(
    ("owner", "name", "call", "ended"),
    [
        (Run, "__init__", 1, False),
        (Training, "prepare", 1, False),
        (Training, "advance", 9, False),
        (Training, "advance", 18, False),
        (checkpoints, "save", 1, False),
        (checkpoints, "save", 6, False),
        (Evaluation, "sums", 2, False),
        (Evaluation, "sums", 3, True),  # the test
        (results, "append", 1, True),
        (gc, "collect", 1, True),
        (report, "save", 2, True),
    ],
)
def test_a_stop_at_each_point(owner, name, call, ended, whole, monkeypatch, capsys):
    """The first Ctrl-C is never lost: status 130, and the run goes on, or is complete, to the same bits."""
    original, left = getattr(owner, name), call

    def stopped(*args, **options):
        nonlocal left
        left -= 1
        made = original(*args, **options)
        if not left:
            os.kill(os.getpid(), signal.SIGINT)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stopped)
        assert train(*RUN, "--out", "out") == 130
    assert left <= 0
    assert "\nstopped" in f"\n{capsys.readouterr().out}"
    assert bool(recorded("out")) == ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert go_on() == 0
    assert_ended_once(whole)


def test_a_stop_in_a_weak_references_callback(whole, monkeypatch):
    """Where Python drops exceptions, a KeyboardInterrupt as well."""
    references, begin = [], Run.__init__

    def watched(self: Run, *args) -> None:
        begin(self, *args)
        references.append(weakref.ref(self, lambda _: os.kill(os.getpid(), signal.SIGINT)))

    with monkeypatch.context() as patch:
        patch.setattr(Run, "__init__", watched)
        assert train(*RUN, "--out", "out") == 130
    assert go_on() == 0
    assert_ended_once(whole)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_named(capsys):
    """The run is recorded, with its plots: there is nothing to resume."""
    saved = []
    with pytest.MonkeyPatch.context() as patch, Path("/dev/full").open("w") as full:
        patch.setattr(report, "save", lambda path, draw, records: saved.append(path) or [])
        patch.setattr(sys, "stdout", full)
        assert train(*RUN, "--out", "out") == 2
        with contextlib.suppress(OSError):
            full.close()
    assert error_of(capsys) == "standard output: No space left on device"
    assert len(recorded("out")) == 1
    assert len(saved) == 2


# What is read


def csv_of(values: torch.Tensor) -> str:
    lines = [f"2016-07-{1 + row // 24:02} {row % 24:02}:00,{','.join(map(repr, cells))}" for row, cells in values]
    Path("data.csv").write_text("\n".join(["date,a,b", *lines]) + "\n")
    return "data.csv"


@pytest.mark.parametrize(("row", "value"), [(60, 1e155), (60, -1.7e308), (230, 1e155), (230, 1e25), (60, 1e308)])
def test_a_value_that_cannot_be_scaled_is_named_at_the_start(row, value, monkeypatch, capsys):
    values = synthetic(240, 2).values
    values[row, 1] = value
    monkeypatch.setattr(Training, "advance", None)
    data = csv_of(enumerate(values.tolist()))
    assert train("--csv", data, "--backend", "torch", "--out", "out") == 2
    assert error_of(capsys).startswith(f"data.csv, line {row + 2}, column 'b': {value:g} is ")
    assert not Path("out", RESULTS).exists()


def test_large_values_that_can_be_scaled_are_trained_on():
    values = synthetic(240, 2).values * 1e140
    assert train("--csv", csv_of(enumerate(values.tolist())), "--backend", "torch", "--out", "out") == 0
    assert len(recorded("out")) == 1
