"""Which path and configuration served each call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from isogemm.core import env


@dataclass(frozen=True)
class Dispatch:
    op: str  # bmm
    path: str  # tiny, torch
    problem: str
    config: str  # empty where torch served
    reason: str  # why torch served, else empty
    source: str = ""  # where the config came from: tuned, table, model or default; empty where none was chosen

    def __str__(self) -> str:
        served = " ".join(filter(None, (self.path, self.config)))
        note = self.reason or self.source
        return f"isogemm.{self.op} {self.problem}: {served}" + (f" ({note})" if note else "")


_logs: list[list[Dispatch]] = []

# Whether dispatches are recorded. Calls check only this.
active = env.settings.log


@contextmanager
def dispatch_log() -> Iterator[list[Dispatch]]:
    """Collect one entry per call made inside, on any thread, the backward's included."""
    global active
    log: list[Dispatch] = []
    _logs.append(log)
    active = True
    try:
        yield log
    finally:
        _logs[:] = [other for other in _logs if other is not log]
        active = bool(_logs) or env.settings.log


def record_operator(name: str, x: Any) -> None:
    """Record a call of an encoder operator on x."""
    if active:
        path, reason = ("encoder", "on a GPU") if x.is_cuda else ("cpu", "not on a GPU")
        record(Dispatch(name, path, f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}", "", reason))


def record(dispatch: Dispatch) -> None:
    if env.settings.log:
        print(dispatch, file=sys.stderr)
    for log in _logs:
        log.append(dispatch)
