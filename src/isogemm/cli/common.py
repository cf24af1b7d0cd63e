"""What all commands share: exit codes, errors in words, devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from isogemm.bench import runner
from isogemm.core.device import facts

OK, FAILED, USAGE, NOTHING_PROVEN, INTERRUPTED = 0, 1, 2, 3, 130


class UsageError(Exception):
    """A request that cannot be served here; the message is one line."""


def in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


@contextmanager
def values_as_usage() -> Iterator[None]:
    """Raise a ValueError of the block as a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def all_devices() -> list[torch.device]:
    """This machine's devices, the best first."""
    return [*(torch.device("cuda", index) for index in range(torch.cuda.device_count())), torch.device("cpu")]


def find_device(name: str | None) -> torch.device:
    """The device of that name, or this machine's best."""
    present = {str(device): device for device in all_devices()}
    wanted = next(iter(present)) if name is None else "cuda:0" if name == "cuda" else name
    if wanted not in present:
        raise UsageError(f"--device: got {name!r}, this machine has {', '.join(present)}")
    return present[wanted]


def describe(device: torch.device) -> str:
    if device.type == "cpu":
        return runner.environment(device)["gpu"]
    return f"{facts(device).name} ({device})"
