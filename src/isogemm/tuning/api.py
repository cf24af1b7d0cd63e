"""`isogemm.tune`. What it does is imported when it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from isogemm.tuning.report import Report


def tune(
    weights: Tensor | Iterable[Tensor] | torch.nn.Module | str,
    *,
    tokens: Iterable[int] | None = None,
    backward: bool = False,
    seconds: float | None = None,
    dtype: torch.dtype | None = None,
    precision: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Measure kernel configurations for these weights on the current GPU, and keep the fastest for later calls.

    Results do not change: a configuration counts only if it gives the bits of the canonical one, here, on this GPU. The
    choices are kept in the user's cache folder; ISOGEMM_TUNED=0 ignores them.

    Args:
        weights: a module, whose linear layers and isogemm.nn.MLPs are taken; [N, K] tensors; or sizes, "4096x14336".
            Only shapes and dtypes are read: they may be on any device, "meta" too.
        tokens: numbers of rows of x, the most useful first; by default ten from 1 to 8192.
        backward: the gradients too; by default of 256 tokens and more.
        seconds: begin no other point after so long; what was measured by then is kept.
        dtype: of all weights, in the place of their own, as under autocast.
        precision: of float32 weights whose module has none of its own, see isogemm.linear.
        progress: called with the number of points that are done, that of all, and what comes next.

    Returns:
        A report, which prints as a table: the time of each point before, after, and of torch. An interrupt
        (KeyboardInterrupt) is raised after what was measured is kept.
    """
    from isogemm.tuning import run
    from isogemm.tuning.weights import from_text, from_torch, listed

    found = listed(from_text(weights) if isinstance(weights, str) else from_torch(weights), dtype, precision)
    gpu = run.current_gpu()
    points = run.points(found, None if tokens is None else list(tokens), backward, gpu.arch, gpu.sm_count, gpu.name)
    return run.on_current_gpu(points, seconds, progress or (lambda done, total, step: None)).run()
