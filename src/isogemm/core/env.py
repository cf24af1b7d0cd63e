"""Settings from environment variables, read once at import. No other module reads the environment."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    disable_tiny: bool  # ISOGEMM_DISABLE_TINY=1: bmm always takes torch.bmm
    log: bool  # ISOGEMM_LOG=1: one line per dispatch, on stderr
    tuned: bool  # ISOGEMM_TUNED=0: what `isogemm tune` kept is ignored
    cache: Path  # the user's folder for caches; not absolute where the user has no home


def _flag(name: str, default: bool = False) -> bool:
    value = os.environ.get(name, "").strip().lower()
    if value == "":
        return default
    if value in ("0", "false", "off", "no"):
        return False
    if value in ("1", "true", "on", "yes"):
        return True
    raise ValueError(f"{name} is {value!r}; accepted: 1 or 0")


def _cache_folder() -> Path:
    """The user's folder for caches: XDG_CACHE_HOME, else what the platform has."""
    given = os.path.expanduser(os.environ.get("XDG_CACHE_HOME", ""))  # noqa: PTH111  Path's raises where there is no home
    if not os.path.isabs(given):  # noqa: PTH117  to be ignored, says the specification: it would change with the folder
        given = ""
    if sys.platform == "win32":
        given = given or os.environ.get("LOCALAPPDATA", "")
    default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return Path(os.path.expanduser(given or default))  # noqa: PTH111


def read() -> Settings:
    return Settings(
        disable_tiny=_flag("ISOGEMM_DISABLE_TINY"),
        log=_flag("ISOGEMM_LOG"),
        tuned=_flag("ISOGEMM_TUNED", default=True),
        cache=_cache_folder(),
    )


settings = read()
