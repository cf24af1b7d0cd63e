"""The store of tuned configs: what is kept is served, and what cannot be used is ignored with one warning."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from isogemm.core import env, files, tuned
from isogemm.gemm.configs import Config

GPU = "NVIDIA H200"
KEY = ("half", "nt", 4096, 14336)
SMALL, LARGE = (
    astuple(Config(64, 16, 128, 4, 3, swapped=True, pdl=True)),
    astuple(Config(128, 256, 64, 8, 3, "stream", persistent=True, parts=2)),
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setattr(env, "settings", replace(env.settings, tuned=True, cache=tmp_path))
    tuned._tables.cache_clear()
    yield tmp_path
    tuned._tables.cache_clear()


def forget():
    """What a new process would know."""
    tuned._tables.cache_clear()


def content(**changes):
    record = json.loads(tuned._text({"gemm": {KEY: ((16, SMALL), (8192, LARGE))}}, GPU))
    return files.sealed(json.dumps(record | changes).encode())


def place(data):
    file = tuned.path(GPU)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    forget()
    return file


def test_what_is_kept_is_served():
    assert tuned.load("gemm", GPU) == {}
    table = {KEY: ((16, SMALL), (8192, LARGE)), ("tf32", "tn", 512, 2048): ((256, LARGE),)}
    file = tuned.keep("gemm", GPU, table)
    assert tuned.load("gemm", GPU) == table
    forget()
    assert tuned.load("gemm", GPU) == table
    assert Config(*tuned.load("gemm", GPU)[KEY][0][1]).swapped
    assert tuned.load("gemm", "NVIDIA B200") == tuned.load("encoder", GPU) == {}
    assert tuned.summary(GPU) == tuned.Summary(file, entries=2, points=3)


def test_the_file_is_of_the_gpu_triton_and_version(cache, monkeypatch):
    expected = f"isogemm/tuned/nvidia-h200-triton-{tuned._triton()}-v{tuned.VERSION}.txt"
    assert tuned.path(GPU) == cache / expected
    tuned.keep("gemm", GPU, {KEY: ((16, SMALL),)})
    monkeypatch.setattr(tuned, "VERSION", tuned.VERSION + 1)
    assert tuned.load("gemm", GPU) == {}


def test_steps_are_merged():
    tuned.keep("gemm", GPU, {KEY: ((16, SMALL), (8192, SMALL))})
    tuned.keep("gemm", GPU, {KEY: ((512, LARGE), (8192, LARGE)), ("ieee", "nn", 8, 8): ((1, SMALL),)})
    assert tuned.load("gemm", GPU) == {
        KEY: ((16, SMALL), (512, LARGE), (8192, LARGE)),
        ("ieee", "nn", 8, 8): ((1, SMALL),),
    }


def test_processes_that_write_at_once_lose_nothing(cache):
    code = (
        "import sys; from isogemm.core import tuned\n"
        "key = 'half', 'nt', int(sys.argv[1]), 1\n"
        f"for size in range(1, 9): tuned.keep('gemm', {GPU!r}, {{key: ((size, {SMALL}),)}})"
    )
    given = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    running = [subprocess.Popen([sys.executable, "-c", code, str(each)], env=given) for each in range(1, 4)]
    assert [each.wait() for each in running] == [0, 0, 0]
    expected = tuple((size, SMALL) for size in range(1, 9))
    assert tuned.load("gemm", GPU) == {("half", "nt", each, 1): expected for each in range(1, 4)}
    left = {each.name for each in tuned.path(GPU).parent.iterdir()}
    assert left == {tuned.path(GPU).name, f"{tuned.path(GPU).name}.lock"}


WHOLE = content()
BEFORE = (
    "block_m: int, block_n: int, block_k: int, num_warps: int, num_stages: int, "
    "kernel: Literal['pointer', 'tma', 'stream'], swapped: bool, group: int, persistent: bool, parts: int, "
    "rest_n: int, residents: int, parallel_chunks: bool, pdl: bool"
)
UNUSABLE = {
    "empty": b"",
    "truncated": WHOLE[:-40],
    "without a checksum": WHOLE[:-79],
    "a config edited by hand": WHOLE.replace(b"[64, 16, 128,", b"[64, 16, 512,"),
    "not text": b"\x80",
    "another GPU's": content(gpu="NVIDIA H100"),
    "another Triton's": content(triton="1.0.0"),
    "another version's": content(version=tuned.VERSION + 1),
    "a config whose field has other values": content(
        configs={"gemm": tuned._fields("gemm").replace("'gathered'", "'collected'")}
    ),
    "configs of before a change of Config": content(
        configs={"gemm": BEFORE}, families={"gemm": [[KEY, [[16, [64, 16, 128, 4, 3, "pointer", *[True] * 8]]]]]}
    ),
    "another structure": files.sealed(b'{"tables": {}}'),
    "a list": files.sealed(b"[]"),
    "nested without end": files.sealed(b"[" * 100_000),
    "configs of other fields": content(configs={"gemm": tuned._fields("gemm").rpartition(", ")[0]}),
    "an unknown family": content(families={"os": []}),
    "a family without a Config": content(families={"encoder": []}),
    "a family whose configs are of two kinds": content(families={"tiny": []}),
}


def test_the_unusable_files_differ_from_a_usable_one():
    assert WHOLE not in UNUSABLE.values()
    assert len(files.unsealed(WHOLE)) == len(WHOLE) - 79


@pytest.mark.parametrize("data", UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_file_is_ignored_with_one_warning(data):
    file = place(data)
    with pytest.warns(RuntimeWarning) as warned:
        assert [tuned.load("gemm", GPU) for _ in range(3)] == [{}] * 3
    assert len(warned) == 1
    assert str(file) in str(warned[0].message)
    assert len(str(warned[0].message)) < len(str(file)) + 200
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned.keep("gemm", GPU, {KEY: ((16, SMALL),)})
        assert tuned.load("gemm", GPU) == {KEY: ((16, SMALL),)}


def test_the_file_that_the_unusable_ones_were_made_from_is_usable():
    place(WHOLE)
    assert tuned.load("gemm", GPU) == {KEY: ((16, SMALL), (8192, LARGE))}


def test_a_file_that_cannot_be_read_is_ignored_with_one_warning():
    tuned.path(GPU).mkdir(parents=True)
    with pytest.warns(RuntimeWarning) as warned:
        assert tuned.load("gemm", GPU) == tuned.load("gemm", GPU) == {}
    assert len(warned) == 1


def test_a_folder_of_another_kind_is_no_file(cache):
    """As the home of another user, in which nothing can be found."""
    (cache / "isogemm").write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned.load("gemm", GPU) == {}


def test_nothing_applies_where_it_is_off_or_there_is_no_gpu(monkeypatch):
    tuned.keep("gemm", GPU, {KEY: ((16, SMALL),)})

    def read(file, gpu):
        raise AssertionError("the disk is not touched")

    monkeypatch.setattr(tuned, "_parsed", read)
    assert tuned.load("gemm", "") == {}
    monkeypatch.setattr(env, "settings", replace(env.settings, tuned=False))
    assert tuned.load("gemm", GPU) == {}
    assert tuned.summary(GPU).points == 0


def test_a_file_is_read_once(monkeypatch):
    file = place(WHOLE)
    tuned.load("gemm", GPU)
    file.unlink()
    assert KEY in tuned.load("gemm", GPU)


def test_importing_isogemm_reads_nothing(cache):
    code = (
        "import sys\n"
        f"sys.addaudithook(lambda event, given: print(event, *given) if {str(cache)!r} in str(given) else None)\n"
        "import isogemm"
    )
    given = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=given)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_write_that_fails_leaves_the_file(monkeypatch):
    tuned.keep("gemm", GPU, {KEY: ((16, SMALL),)})
    file = tuned.path(GPU)
    before = file.read_bytes()

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as error:
        tuned.keep("gemm", GPU, {KEY: ((64, LARGE),)})
    assert error.value.filename == str(file)
    assert file.read_bytes() == before
    assert [each.name for each in file.parent.iterdir() if each.name.startswith(".")] == []


def test_a_process_that_is_killed_while_it_writes_leaves_the_file(cache):
    """At the worst moment: all is written, and not yet moved to its place."""
    tuned.keep("gemm", GPU, {KEY: ((16, SMALL),)})
    before = tuned.path(GPU).read_bytes()
    code = (
        "import os, signal; from isogemm.core import tuned\n"
        "os.replace = lambda *given: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"tuned.keep('gemm', {GPU!r}, {{{KEY}: ((64, {LARGE}),)}})"
    )
    given = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    assert subprocess.run([sys.executable, "-c", code], env=given).returncode == -9
    assert tuned.path(GPU).read_bytes() == before
    tuned.keep("gemm", GPU, {KEY: ((128, LARGE),)})  # the lock is free
    assert tuned.load("gemm", GPU) == {KEY: ((16, SMALL), (128, LARGE))}


def test_a_folder_that_cannot_be_written(cache):
    (cache / "isogemm").write_text("a file")
    with pytest.raises(OSError, match="tuned") as error:
        tuned.keep("gemm", GPU, {KEY: ((16, SMALL),)})
    assert error.value.filename == str(tuned.path(GPU))
    with pytest.raises(OSError, match="tuned"):
        tuned.require_writable(GPU)


def test_what_could_be_kept_can_be_asked(cache):
    tuned.require_writable(GPU)
    assert not tuned.path(GPU).exists()
    tuned.keep("gemm", GPU, {KEY: ((16, SMALL),)})
    tuned.require_writable(GPU)
    assert KEY in tuned.load("gemm", GPU)
    tuned.path(GPU).unlink()
    tuned.path(GPU).mkdir()
    with pytest.raises(IsADirectoryError, match="Is a directory") as error:
        tuned.require_writable(GPU)
    assert error.value.filename == str(tuned.path(GPU))


def test_nothing_is_summed_up_where_nothing_is_served(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(env, "settings", replace(env.settings, cache=Path("~/.cache")))
    place(WHOLE)
    assert tuned.summary(GPU).points == 0


def test_a_user_without_a_home(tmp_path, monkeypatch):
    """No folder "~" is made in the working directory, and none is read there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(env, "settings", replace(env.settings, cache=Path("~/.cache")))
    with pytest.raises(OSError, match="set XDG_CACHE_HOME"):
        tuned.require_writable(GPU)
    assert list(tmp_path.iterdir()) == []
    place(WHOLE)
    assert tuned.load("gemm", GPU) == {}


@pytest.mark.skipif(files.fcntl is None, reason="needs flock")
def test_a_file_system_without_locks(monkeypatch):
    def refuse(*given):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    tuned.keep("gemm", GPU, {KEY: ((16, SMALL),)})
    assert tuned.load("gemm", GPU) == {KEY: ((16, SMALL),)}


def test_triton_is_not_imported():
    code = "import sys; from isogemm.core import tuned; tuned.load('gemm', 'GPU'); print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
