"""Context managers that change torch's precision of float32 products and restore it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from isogemm.core.device import matmul_precision

_changing = threading.Lock()  # held while a setting is changed, not while it is used
_turn = threading.RLock()  # held by the caller that needs one precision of CUDA's products


@contextmanager
def of_cuda_products(precision: str | None) -> Iterator[None]:
    """Compute torch's float32 products on a GPU in "tf32", or in "ieee" for any other name; None changes nothing.

    The setting is the process's. Callers wait for each other; other threads can see it changed.
    """
    if precision is None:
        yield
        return
    wanted = "tf32" if precision == "tf32" else "ieee"
    with _turn:
        if matmul_precision() == wanted:
            yield
            return
        with overridden("cuda", wanted):
            yield


@contextmanager
def overridden(backend: str, precision: str) -> Iterator[None]:
    """Change the precision of a backend's products ("cuda" or "mkldnn"), then restore it, whether set or inherited."""
    levels = _LEVELS[backend]
    with _changing:
        before = _own_setting(levels)
        levels[-1].fp32_precision = precision
    try:
        yield
    finally:
        with _changing:
            levels[-1].fp32_precision = before


def _own_setting(levels: Sequence[Any]) -> str:
    """Return what was set at the last level itself, "none" where it inherits from those before.

    torch shows only what is in effect. A value that differs from the level before was set here. An equal one is
    inherited if it changes with that level, which is tried: other threads can see that change.
    """
    *before, level = levels
    effective = cast(str, level.fp32_precision)
    if not before or effective != before[-1].fp32_precision:
        return effective
    inherited, seen = _own_setting(before), set()
    try:
        for precision in ("ieee", "tf32"):
            before[-1].fp32_precision = precision
            seen.add(level.fp32_precision)
    finally:
        before[-1].fp32_precision = inherited
    return seen.pop() if len(seen) == 1 else "none"


class _Mkldnn:
    """torch.backends.mkldnn, whose own attribute sets the generic level (torch 2.11 to 2.15)."""

    @property
    def fp32_precision(self) -> str:
        return torch.backends.mkldnn.fp32_precision

    @fp32_precision.setter
    def fp32_precision(self, precision: str) -> None:
        torch.backends.mkldnn.set_flags(_fp32_precision=precision)  # type: ignore[no-untyped-call]


_LEVELS: dict[str, tuple[Any, ...]] = {  # each inherits from the one before
    "cuda": (torch.backends, torch.backends.cudnn, torch.backends.cuda.matmul),
    "mkldnn": (torch.backends, _Mkldnn(), torch.backends.mkldnn.matmul),  # type: ignore[attr-defined]
}
