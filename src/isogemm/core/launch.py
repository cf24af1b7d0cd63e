"""Launching a compiled kernel by its handle, past the JIT's per-call work.

Triton's JIT spends 31 us a call (H200 host) on binding arguments and finding the compiled kernel again. A caller that
keeps a `BoundKernel` per problem, with everything Triton specialises on in its own key, pays 7 us.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

# The raw handle of torch's current stream on a device: what Triton's own launcher asks for.
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class BoundKernel:
    """A kernel compiled for one specialisation on one device."""

    __slots__ = ("_compiled", "_constants", "_function", "_metadata", "_run")

    def __init__(self, compiled: Any, constants: Sequence[object]) -> None:
        compiled._init_handles()  # load the module; `run` would take a load that failed before for one that succeeded
        if compiled.function is None:
            raise RuntimeError(f"{compiled.name} was compiled but not loaded")
        self._compiled = compiled
        self._run = compiled.run
        self._function = compiled.function
        self._metadata = compiled.packed_metadata
        self._constants = tuple(constants)

    def __call__(self, device: int, programs: int, *args: int) -> None:
        """Launch on `device`'s current stream. Tensors are given by address; `device` must be current."""
        stream = _current_stream(device)
        enter, leave, described = _listening(knobs.runtime.launch_enter_hook), knobs.runtime.launch_exit_hook, None
        if enter is not None:
            described = self._compiled.launch_metadata((programs, 1, 1), stream, *args, *self._constants)
        self._run(
            programs, 1, 1, stream, self._function, self._metadata, described, enter, _listening(leave),
            *args, *self._constants,
        )  # fmt: skip


def _listening(hook: Any) -> Any:
    """A launch hook, or None where nobody listens: Triton calls even an empty chain."""
    return hook if hook is not None and getattr(hook, "calls", True) else None


def bind(
    kernel: Any, args: Sequence[object], constants: Mapping[str, object], options: Mapping[str, object]
) -> BoundKernel:
    """Compile `kernel` on the current device for arguments like `args`.

    `args` come first in the kernel's signature, `constants` (its constexprs) last and in the same order.
    """
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"kernel is a {type(kernel).__name__}; expected a compiled @triton.jit function")
    names = list(kernel.arg_names[len(args) :])
    if names != list(constants):
        raise TypeError(f"constants are {list(constants)}; {kernel.__name__} expects {names}")
    compiled = kernel.warmup(*args, grid=(1,), **constants, **options)
    return BoundKernel(compiled, list(constants.values()))
