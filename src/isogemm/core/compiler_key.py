"""Triton's key of itself, kept in the user's cache folder.

Triton finds a compiled kernel by a key that hashes its own sources and its 0.5 GB library: 0.25 s in every process,
most of the time to a first result. Here that hash is kept, by the size and the times of those files.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from isogemm.core import env, files

_FOLDERS = ("compiler", "backends", "language", "runtime", "_C")  # of what Triton hashes


def keep(cache: ModuleType) -> None:
    """Let `triton.runtime.cache` have the key from the user's cache folder; kept there if it is not."""
    compute: Any = getattr(cache, "triton_key", None)
    if not hasattr(compute, "cache_info") or compute.cache_info().currsize or not cache.__file__:
        return  # unknown, or this process has it already
    folder = env.settings.cache / "isogemm" / "triton"
    if not folder.is_absolute():
        return
    try:
        file = folder / f"{_state(Path(cache.__file__).parents[1])}.txt"
    except OSError:  # such as a link to nothing, left by an editor: Triton itself may not mind
        return
    with suppress(OSError, ValueError):
        key = files.unsealed(file.read_bytes()).decode()
        cache.triton_key = lambda: key  # type: ignore[attr-defined]
        return
    with suppress(OSError):
        files.write(file, files.sealed(compute().encode()))


def _state(root: Path) -> str:
    """A hash of the names, sizes and times of Triton's files, also behind links: an editable Triton's backends."""
    found, visited = [], set()
    for name in _FOLDERS:
        for folder, folders, names in os.walk(root / name, followlinks=True):
            real = os.path.realpath(folder)
            if real in visited:  # a link to a folder above would never end
                folders.clear()
                continue
            visited.add(real)
            for each in names:
                if each.endswith((".py", ".so", ".pyd")):
                    status = Path(folder, each).stat()
                    found.append((folder, each, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:32]
