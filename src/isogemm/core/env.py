"""The only reader of the process environment. Read once, at import: a call pays nothing for it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    disable_tiny: bool  # ISOGEMM_DISABLE_TINY=1: bmm always takes torch.bmm
    log: bool  # ISOGEMM_LOG=1: one line per dispatch, on stderr


def _flag(name: str) -> bool:
    value = os.environ.get(name, "0").strip().lower()
    if value in ("", "0", "false", "off", "no"):
        return False
    if value in ("1", "true", "on", "yes"):
        return True
    raise ValueError(f"{name} is {value!r}; accepted: 1 or 0")


def read() -> Settings:
    return Settings(disable_tiny=_flag("ISOGEMM_DISABLE_TINY"), log=_flag("ISOGEMM_LOG"))


settings = read()
