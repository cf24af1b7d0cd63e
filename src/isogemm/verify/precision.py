"""torch's fp32 matmul precision, set for torch and isogemm alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from isogemm.core.precision import overridden


@contextmanager
def fp32_precision(precision: str) -> Iterator[None]:
    """Set the precision to "ieee" or "tf32" inside the block; "" leaves it as it is."""
    if not precision:
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # this one was never changed, the newer setting was
        before = "highest"
    with overridden("cuda", precision), overridden("mkldnn", "ieee"):
        set_fp32_precision(precision)
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def set_fp32_precision(precision: str) -> None:
    """Use both of torch's setters: its getters raise where the two disagree."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cuda.matmul.fp32_precision = precision
