"""Files are written whole or not at all: on a full disk, and where one was cut off before."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from isogemm.core import files


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes beyond that fail half-way, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fails(*args: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_write_makes_folders_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a" / "b"
    for content in (b"one", b"two"):
        files.write(str(path), content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("at", ["write", "sync", "rename"])
def test_a_write_that_fails_leaves_the_file(at, tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write(path, b"old")
    if at != "write":
        monkeypatch.setattr(os, {"sync": "fsync", "rename": "replace"}[at], fails)
    with largest_file(10_000), pytest.raises(OSError) as error:  # noqa: PT011
        files.write(path, bytes(20_000 if at == "write" else 3))
    assert error.value.filename == str(path)
    assert error.value.errno == (errno.EFBIG if at == "write" else errno.ENOSPC)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "disk").mkdir()
    link, target = tmp_path / "link", tmp_path / "disk" / "file"
    link.symlink_to(target)
    files.write(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize("at", ["write", "sync"])
def test_a_line_that_does_not_fit_leaves_the_file(at, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    files.append(path, "1")
    if at == "sync":
        monkeypatch.setattr(os, "fsync", fails)
    with largest_file(10_000), pytest.raises(OSError) as error:  # noqa: PT011
        files.append(path, "2" * (20_000 if at == "write" else 1))
    assert error.value.filename == str(path)
    assert path.read_bytes() == b"1\n"
    monkeypatch.undo()
    files.append(path, "3")
    assert path.read_bytes() == b"1\n3\n"


def test_nothing_is_added_to_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a"')
    with pytest.raises(files.FileError, match=r"rows\.jsonl: the last line is cut off; remove it"):
        files.append(path, '{"a": 2}')
    assert path.read_bytes() == b'{"a": 1}\n{"a"'


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_where_no_folder_can_be(place, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        files.require_writable(tmp_path / place)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    files.require_writable(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []

    def denied(path: Path, *args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "touch", denied)
    with pytest.raises(PermissionError) as error:
        files.require_writable(tmp_path)
    assert error.value.filename == str(tmp_path)


def test_a_replaced_file_keeps_its_mode(tmp_path):
    path = tmp_path / "private"
    path.write_bytes(b"")
    path.chmod(0o600)
    files.write(path, b"new")
    assert path.stat().st_mode & 0o777 == 0o600


def test_threads_replace_one_file(tmp_path):
    contents = {bytes([each]) * 1000 for each in range(8)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda content: files.write(tmp_path / "shared", content), [*contents] * 5))
    assert (tmp_path / "shared").read_bytes() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["shared"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    """As /dev/stdout, and /dev/null, which must not become a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_bytes)
        files.write(pipe, b"report")
        assert read.result(timeout=10) == b"report"
    assert pipe.is_fifo()


@pytest.mark.parametrize("content", [b"", b"one line\n"])
def test_a_seal_shows_any_change(content):
    data = files.sealed(content)
    assert files.unsealed(data) == content
    for place in range(len(data)):
        for changed in (data[:place], data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]):
            with pytest.raises(ValueError, match="checksum"):
                files.unsealed(changed)


@pytest.mark.skipif(files.fcntl is None, reason="needs flock")
def test_a_child_does_not_keep_the_lock(tmp_path):
    """As a data loader's worker, forked by another thread while this one held it."""
    path = tmp_path / "lock"
    with files.locked(path) as held:
        child = subprocess.Popen(["sleep", "60"], pass_fds=[held.fileno()])
        with path.open("ab") as other, pytest.raises(BlockingIOError):
            files.lock(other, wait=False)
    try:
        with path.open("ab") as other:
            files.lock(other, wait=False)
    finally:
        child.kill()
        child.wait()


@pytest.mark.skipif(files.fcntl is None, reason="needs flock")
def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(number):
        def flock(*args):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(files.fcntl, "flock", flock)

    refuse(errno.ENOSYS)
    files.append(tmp_path / "rows", "1")
    assert (tmp_path / "rows").read_text() == "1\n"
    refuse(errno.EIO)
    with pytest.raises(OSError, match="rows"):
        files.append(tmp_path / "rows", "2")


@pytest.mark.parametrize(
    ("line", "message"), [("{", "not JSON: "), ("", "not JSON: "), ("[NaN]", "got NaN"), ("[]", "no object")]
)
def test_a_bad_line_is_named(tmp_path, line, message):
    def parse(value):
        if not isinstance(value, dict):
            raise ValueError("no object")
        return value

    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{}\n')
    assert files.read_lines(path, parse) == [{"a": 1}, {}]
    path.write_text(f"{{}}\n{line}\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{message}"):
        files.read_lines(path, parse)
