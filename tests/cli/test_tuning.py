"""`isogemm tune`, and doctor's lines about it, on a GPU that is not there."""

import errno
from dataclasses import replace

import pytest
import torch

from isogemm.bench import ceilings, store
from isogemm.cli import families
from isogemm.core import env, tuned
from isogemm.core.device import DeviceFacts
from isogemm.gemm import configs
from isogemm.tuning import gemm, run
from isogemm_cli import main

GPU = "Some GPU"
FACTS = DeviceFacts(GPU, "sm_80", 108, 166_912, 40 << 20)


@pytest.fixture(autouse=True)
def sandbox(monkeypatch, tmp_path):
    """No GPU, no families, an empty cache folder and working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(families, "FAMILIES", ())
    monkeypatch.setattr(ceilings, "cases", lambda device: [])
    monkeypatch.setattr(env, "settings", replace(env.settings, tuned=True, cache=tmp_path / "cache"))
    tuned._tables.cache_clear()
    yield
    tuned._tables.cache_clear()


@pytest.fixture
def measuring(monkeypatch):
    """measuring(raising): a GPU where the last candidate is twice as fast; `raising` by the number of the point.

    differing: configs that do not count.
    """
    pytest.importorskip("triton")

    def use(raising=None, differing=()):
        count = []

        def measure(point, chosen):
            count.append(point)
            if raising and len(count) in raising:
                raise raising[len(count)]
            us = {str(config): 10.0 for config in chosen} | {str(chosen[-1]): 5.0, "torch": 15.0}
            return gemm.Measured(us, [*differing])

        def on_gpu(points, seconds, progress):
            return run.Run(points, measure, lambda jobs: None, seconds or 1e9, progress)

        monkeypatch.setattr(run, "current_gpu", lambda: FACTS)
        monkeypatch.setattr(run, "on_current_gpu", on_gpu)

    return use


def test_what_would_be_measured(capsys):
    assert main(["tune", "--weights", "4096x14336", "--tokens", "1", "512", "--backward", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        *(
            f"{kind} half {tokens} tokens, weight 4096 x 14336"
            for tokens in (1, 512)
            for kind in ("linear", "dx", "dw")
        ),
        "6 points",
    ]
    assert not env.settings.cache.exists()


def test_the_dtype_and_precision(capsys):
    arguments = ["--weights", "8x16", "--tokens", "1", "--dtype", "float32", "--precision", "tf32x3", "--dry-run"]
    assert main(["tune", *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "linear tf32x3 1 tokens, weight 8 x 16"


def test_a_run_is_shown_and_kept(measuring, capsys):
    measuring()
    assert main(["tune", "--weights", "4096x14336", "--tokens", "64", "512"]) == 0
    shown = capsys.readouterr()
    assert f"Tuned for {GPU}" in shown.out
    assert "4096 x 14336 half" in shown.out
    assert shown.out.count("3.00x") == 3
    assert "points on Some GPU: 2 measured, 2 faster now, 0 not reached" in shown.out
    assert "geometric mean speed-up: 2.00x over before, 3.00x over torch" in shown.out
    assert f"kept in {tuned.path(GPU)}" in shown.out
    assert "[2/2] linear half 512 tokens, weight 4096 x 14336" in shown.err
    (steps,) = tuned.load("gemm", GPU).values()
    point = gemm.Point("linear", "half", 64, 4096, 14336, FACTS.arch, FACTS.sm_count)
    assert configs.Config(*dict(steps)[64]) == run._candidates(point)[-1]


def test_a_config_with_other_bits_fails_the_command(measuring, capsys):
    """It is not kept, but the contract does not hold on this GPU: nobody must miss that."""
    measuring(differing=[f"tile: {gemm.OTHER_BITS}"])
    assert main(["tune", "--weights", "4096x14336", "--tokens", "64"]) == 1
    assert "run `isogemm verify`" in capsys.readouterr().out
    measuring(differing=["tile: RuntimeError"])
    assert main(["tune", "--weights", "4096x14336", "--tokens", "64"]) == 0


def test_an_interrupt_shows_and_keeps_what_was_measured(measuring, capsys):
    measuring({2: KeyboardInterrupt()})
    assert main(["tune", "--weights", "4096x14336", "--tokens", "64", "512"]) == 130
    shown = capsys.readouterr().out
    assert "1 measured, 1 faster now, 1 not reached" in shown
    assert tuned.summary(GPU).entries == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--weights", "4x4"], "isogemm.tune needs a GPU, and torch.cuda is not available here; --dry-run lists"),
        (["--weights", "4"], "weights is '4'; expected sizes N x K"),
        (["--weights", "4x4", "--tokens", "0"], "tokens is [0]; expected"),
        (["--config", "missing"], "config is missing; expected a Hugging Face config.json"),
        (["--safetensors", "missing"], "safetensors: missing: No such file"),
    ],
)
def test_impossible_requests_are_one_line(arguments, words, capsys, request):
    if "--tokens" in arguments:
        request.getfixturevalue("measuring")()
    assert main(["tune", *arguments]) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith("isogemm tune: error: ")
    assert words in stderr
    assert stderr.count("\n") == 1


def test_a_cache_that_cannot_be_written_is_noticed_at_once(measuring, capsys):
    measuring({1: AssertionError("measured")})
    env.settings.cache.write_text("a file")
    assert main(["tune", "--weights", "4x4"]) == 2
    assert str(tuned.path(GPU).parent) in capsys.readouterr().err


def test_a_disk_that_becomes_full_ends_the_run_after_its_table(measuring, monkeypatch, capsys):
    measuring()
    keep, calls = tuned.keep, []

    def fill(*given):
        calls.append(given)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device", "file")
        return keep(*given)

    monkeypatch.setattr(tuned, "keep", fill)
    assert main(["tune", "--weights", "4096x14336", "--tokens", "64", "512"]) == 2
    shown = capsys.readouterr()
    assert "file: No space left on device" in shown.err
    assert "4096 x 14336 half" in shown.out
    assert tuned.summary(GPU).points == 1


def test_a_run_that_calls_will_ignore_says_so(measuring, monkeypatch, capsys):
    monkeypatch.setattr(env, "settings", replace(env.settings, tuned=False))
    measuring()
    assert main(["tune", "--weights", "4096x14336", "--tokens", "64"]) == 0
    assert "ISOGEMM_TUNED=0: calls ignore it" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[], ["--weights", "4x4", "--config", "a"], ["--weights", "4x4", "--precision", "low"]]
)
def test_arguments_that_do_not_parse(arguments):
    with pytest.raises(SystemExit) as error:
        main(["tune", *arguments])
    assert error.value.code == 2


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs of one name."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("isogemm.bench.runner.environment", lambda device: dict.fromkeys(store.ENV_KEYS, "1.0"))
    for module in ("isogemm.cli", "isogemm.cli.tuning"):
        monkeypatch.setattr(f"{module}.facts", lambda device: FACTS)


def test_doctor_without_a_gpu(capsys):
    assert main(["doctor"]) == 0
    assert "uned" not in capsys.readouterr().out


def test_doctor_where_nothing_is_tuned(gpus, capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.count("tuned: nothing for Some GPU; `isogemm tune --config config.json` measures") == 1


def test_doctor_shows_what_is_tuned(gpus, capsys):
    values = (64, 64, 64, 4, 3, "pointer", False, 8, False, 1, 0, 1, False, False)
    tuned.keep("gemm", GPU, {("half", "nt", size, 64): ((1, values), (64, values)) for size in (512, 1024, 2048)})
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.count(f"tuned: 6 points of 3 weights and passes for Some GPU, in {tuned.path(GPU)}\n") == 1


def test_doctor_where_it_is_ignored(gpus, monkeypatch, capsys):
    monkeypatch.setattr(env, "settings", replace(env.settings, tuned=False))
    assert main(["doctor"]) == 0
    assert "tuned: ignored for Some GPU, since ISOGEMM_TUNED=0" in capsys.readouterr().out
