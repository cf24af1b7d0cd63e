"""Files that are written whole or not at all, and errors that name the file."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

try:
    import fcntl
except ModuleNotFoundError:  # Windows: locks are not taken there
    fcntl = None  # type: ignore[assignment]

_SEAL = b"isogemm sha256 "  # then the digest of all before it
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)  # of a file system without them

AnyPath = str | os.PathLike[str]
Parsed = TypeVar("Parsed")


class FileError(OSError):
    """A file or folder that cannot be used as it is; the message says what to do."""


@contextmanager
def naming(path: AnyPath) -> Iterator[None]:
    """Let an OSError name this path. Those of a write or a sync name none, those of `write` a temporary file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def write(path: AnyPath, content: bytes) -> None:
    """Replace a file. Whoever reads it, or kills this process, finds all of the old content or all of the new."""
    target = Path(os.path.realpath(path))  # the file that a link points to
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    with naming(path):
        if Path(path).exists() and not Path(path).is_file():  # a device or a pipe, which keeps no content
            Path(path).write_bytes(content)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("wb") as file:
                if target.exists():
                    unfinished.chmod(target.stat().st_mode & 0o777)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(target)
        finally:
            with suppress(OSError):
                unfinished.unlink()
        _sync_folder(target.parent)


def sealed(content: bytes) -> bytes:
    """The content with a checksum at its end, which `unsealed` compares."""
    return content + _SEAL + hashlib.sha256(content).hexdigest().encode()


def unsealed(data: bytes) -> bytes:
    """The content that was given to `sealed`; ValueError where the checksum differs or is missing."""
    content = data[: -len(_SEAL) - 64]
    if data != sealed(content):
        raise ValueError("it is damaged: its checksum differs")
    return content


def read_lines(path: AnyPath, parse: Callable[[Any], Parsed]) -> list[Parsed]:
    """Parse the JSON value on each line of a file. A ValueError, also one of `parse`, names the file and the line."""
    parsed = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            parsed.append(parse(json.loads(line, parse_constant=_refuse)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}; if the line is cut off, remove it") from error
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    return parsed


def _refuse(name: str) -> None:
    raise ValueError(f"expected finite numbers, got {name}")


def append(path: AnyPath, line: str) -> None:
    """Append a line; several processes may do so. Where that fails, the file is left as it was."""
    with naming(path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a+b", buffering=0) as file:
            lock(file)
            end = file.seek(0, os.SEEK_END)
            file.seek(max(end - 1, 0))
            if file.read(1) not in (b"", b"\n"):
                raise FileError(f"{path}: the last line is cut off; remove it, then try again")
            left = memoryview(f"{line}\n".encode())
            try:
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except BaseException:
                file.truncate(end)
                raise


def require_writable(folder: AnyPath) -> None:
    """Raise an OSError where no file can be written in the folder, before the work is done; create the folder."""
    probe = Path(folder) / f".probe.{os.getpid()}"
    with naming(folder):
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()


def lock(file: BinaryIO, wait: bool = True) -> None:
    """Lock a file until it is closed or the process ends. Without `wait`, BlockingIOError if it is locked."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


@contextmanager
def locked(path: AnyPath) -> Iterator[BinaryIO]:
    """Create a file and hold its lock until the block ends, even where a child was forked inside."""
    with Path(path).open("ab") as file:
        lock(file)
        try:
            yield file
        finally:
            if fcntl is not None:
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_UN)


def _sync_folder(folder: Path) -> None:
    """Let a renaming survive a power failure, on file systems that can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
