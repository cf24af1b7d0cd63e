"""The folder of a run: one process at a time writes there, and no run's files replace another's unasked."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isogemm.core import files
from isogemm.core.files import FileError

CHECKPOINT, BEST, RESULTS = "checkpoint.pt", "best.pt", "results.jsonl"
PLOTS = "losses", "forecast"

_LOCK = ".lock"
_NAMES = (CHECKPOINT, BEST, RESULTS, *(f"{plot}{suffix}" for plot in PLOTS for suffix in (".svg", ".png")))
# As `files.write` and `files.require_writable` call them.
_UNFINISHED = re.compile(rf"\.({'|'.join(map(re.escape, _NAMES))})\.\d+\.\d+|\.probe\.\d+")


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. It is made, found writable, and rid of the temporary files of a killed process."""
    files.require_writable(folder)
    with (folder / _LOCK).open("a+b") as lock:
        try:
            files.lock(lock, wait=False)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().decode(errors="replace").strip() or "another process"
            raise FileError(f"{folder}: {holder} is training there; wait for it, or choose another --out") from error
        with files.naming(folder / _LOCK):
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {platform.node()}\n".encode())
            lock.flush()
        for name in _NAMES:
            path = folder / name
            is_loop = Path(os.path.realpath(path)).is_symlink()
            if is_loop or (path.exists() and not (path.is_file() and os.access(path, os.W_OK))):
                raise FileError(f"{path}: not a file that can be written; choose another --out")
        for path in folder.iterdir():
            if _UNFINISHED.fullmatch(path.name) and path.is_file():
                path.unlink()
        yield


def require_no_run(folder: Path) -> None:
    if there := [name for name in (CHECKPOINT, BEST) if (folder / name).exists()]:
        resumed = "--resume continues it, " if CHECKPOINT in there else ""
        raise FileError(
            f"{folder}: holds {' and '.join(there)} of another run; {resumed}--overwrite discards it, "
            "--out names another folder"
        )


def discard_run(folder: Path) -> None:
    """Delete the run's weights; recorded results are kept."""
    for name in (CHECKPOINT, BEST):
        (folder / name).unlink(missing_ok=True)
