import os
from dataclasses import replace

import interpreted_ptx
import numpy as np
import pytest
from interpreting import require_interpreter


def pytest_collect_file():
    require_interpreter(strict=bool(os.environ.get("CI")))


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter():
    """Triton's interpreter without what it does in vain: half the time.

    It puts its own functions into the language again at each call of a function in a kernel, though once a launch and
    module is enough, and it computes whether integers overflow, but asserts it only in a debug mode it does not have.
    """
    from triton.runtime import interpreter

    builder, patch, launch = interpreter.interpreter_builder, interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()
    assert not builder.options.debug

    def patch_once(function):
        if (module := id(function.__globals__)) in patched:
            return None
        patched.add(module)
        return patch(function)

    def launch_anew(*arguments, **named):
        patched.clear()
        launch(*arguments, **named)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture(scope="session", autouse=True)
def sound_interpreter():
    """Triton's interpreter without two of its faults.

    It broadcasts a comparison of scalars as int32, which Triton 3.9 refuses as a mask. Before 3.7 it makes an integer
    of an array of one element, which NumPy 2.4 refuses.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder, patch = interpreter.interpreter_builder, interpreter._patch_lang_tensor
    splat = builder.create_splat

    def create_splat(result, value):
        return splat(result, replace(value, dtype=tl.int1) if value.data.dtype == bool else value)

    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(builder, "create_splat", create_splat)
        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
        yield


@pytest.fixture(scope="session", autouse=True)
def interpreted_assembly():
    """Triton's interpreter with the inline assembly that kernels here use.

    Several results are a tuple of the language, which Python's own tuples refuse to take in by `+`.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    def add_to(self, other):
        return (*other, *self.values)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", interpreted_ptx.run)
        monkeypatch.setattr(tl.core.tuple, "__radd__", add_to, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def placeless_dot():
    """`tl.dot` whose elements depend on their row and column alone, as a tensor core's do.

    The interpreter's is NumPy's matmul. Where OpenBLAS serves an edge of a tile by another kernel (AMD Zen 5), the same
    row has other bits at another place in the tile.
    """

    def matmul(a, b, dtype):
        a, b = a.astype(np.float64), b.astype(np.float64)
        total = np.zeros((*a.shape[:-1], b.shape[-1]))
        for k in range(a.shape[-1]):
            total += a[..., k, None] * b[..., None, k, :]
        return total.astype(dtype)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(np, "matmul", matmul)
        yield


@pytest.fixture
def interpreted_schedules(monkeypatch):
    """A fused layer's launches one after another in the interpreter."""
    from isogemm.encoder import schedule

    def run(self, tensors, addresses=()):
        for step, places in zip(self._steps, self._places, strict=True):
            step.describe().run(*self._arguments(step, places, tensors))

    monkeypatch.setattr(schedule.Schedule, "run", run)
