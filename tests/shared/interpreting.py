"""Running kernels in Triton's interpreter, on the CPU.

`TRITON_INTERPRET=1` counts when a kernel is decorated, so interpreter tests are a process of their own:
`TRITON_INTERPRET=1 pytest tests/interpreter`.
"""

from __future__ import annotations

from typing import Any

import torch

EXACT_DTYPES = (torch.float32, torch.float16)
"""Operand dtypes whose `tl.dot` the interpreter computes rightly; bf16 is wrong in Triton 3.7.1."""


def interpreting() -> bool:
    """Whether kernels decorated from now on run in the interpreter."""
    try:
        from triton import knobs
    except ImportError:
        return False
    return bool(knobs.runtime.interpret)


def is_interpreted(kernel: Any) -> bool:
    """Whether this kernel was decorated for the interpreter."""
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(kernel, InterpretedFunction)


def require_interpreter(*, strict: bool = False) -> None:
    """Skip the calling pytest module when not interpreting; `strict` (CI) fails it instead."""
    import pytest

    if interpreting():
        return
    reason = "TRITON_INTERPRET is not set; run TRITON_INTERPRET=1 pytest tests/interpreter"
    if strict:
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason, allow_module_level=True)
