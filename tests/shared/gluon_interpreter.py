"""Kernels in Gluon in Triton's interpreter, which does not know that language: layouts are ignored.

Roles run one after another, those that load first. What a role loads into shared memory is kept in a queue for each
barrier, and comes out where another role waits for that barrier; so nothing really waits.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import triton
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

_NUMPY = {tl.float32: np.float32, tl.float16: np.float16, tl.int64: np.int64}
_REPLACED = (
    ("import triton.experimental.gluon.language as gl\n", "import triton\n"),
    ("from triton.experimental import gluon\n", ""),
    ("from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2\n", ""),
    ("from triton.experimental.gluon.language.nvidia.hopper import mbarrier\n", ""),
    ("@gluon.jit", "@triton.jit"),
    (": gl.constexpr", ": tl.constexpr"),
)


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, dtype, data, whole=None, place=None):
        self.dtype, self.data, self.whole, self.place = dtype, data, whole, place
        self.type = SimpleNamespace(layout=None)

    @property
    def shape(self):
        return self.data.shape

    def index(self, place):
        return Shared(self.dtype, self.data[int(place)], self, int(place))

    def slice(self, start, length, dim=0):
        at = [slice(None)] * dim + [slice(int(start), int(start) + int(length))]
        return Shared(self.dtype, self.data[tuple(at)])

    def permute(self, order):
        return Shared(self.dtype, self.data.transpose(order))

    def _reinterpret(self, dtype, shape, layout):
        if dtype is self.dtype:
            return Shared(dtype, self.data.reshape(shape))
        return Shared(dtype, np.full(tuple(map(int, shape)), np.nan, _NUMPY[dtype]))

    def load(self, layout):
        data = np.ascontiguousarray(self.data)
        return tl.core.tensor(TensorHandle(data, self.dtype), tl.block_type(self.dtype, list(data.shape)))

    def store(self, value):
        assert value.dtype == self.dtype
        self.data[...] = value.handle.data


class _Barriers:
    """`mbarrier`, of shared memory that `loads` fills."""

    MBarrierLayout = staticmethod(lambda: None)
    init = arrive = staticmethod(lambda *_, **__: None)

    def __init__(self):
        self.filled = {}

    def wait(self, barrier, phase):
        tiles = getattr(barrier.whole, "tiles", None)
        if tiles is not None:
            tiles.data[barrier.place] = self.filled[barrier.place].pop(0)


class _Copies:
    """`async_copy`: a copy is in the queue when its barrier is told."""

    def __init__(self, barriers):
        self.barriers = barriers

    def async_copy_global_to_shared(self, tile, pointers, mask=None):
        tile.store(tl.load(pointers, mask=mask, other=0.0))

    def mbarrier_arrive(self, barrier, increment_count=True):
        data = barrier.whole.tiles.data[barrier.place].copy()
        self.barriers.filled.setdefault(barrier.place, []).append(data)


class _Gluon(ModuleType):
    """Gluon's language by Triton's."""

    def __init__(self, barriers):
        super().__init__("gl")
        self.barriers, self.shared_memory_descriptor = barriers, Shared

    def __getattr__(self, name):
        return getattr(tl, name)

    def SliceLayout(self, *_):
        return None

    BlockedLayout = SwizzledSharedLayout = NVMMADistributedLayout = DotOperandLayout = SliceLayout

    def arange(self, start, end, layout=None):
        return tl.arange(start, end)

    def zeros(self, shape, dtype, layout=None):
        return self.full(shape, 0, dtype)

    def full(self, shape, value, dtype, layout=None):
        return tl.full([int(size) for size in shape], value, dtype)

    def full_like(self, like, value, dtype=None):
        return tl.zeros_like(like).to(dtype or like.dtype) + value

    def convert_layout(self, x, layout, assert_trivial=False):
        return x

    def associative_scan(self, x, axis, add):
        return tl.cumsum(x, axis)

    def allocate_shared_memory(self, dtype, shape, layout):
        return Shared(dtype, np.zeros([int(getattr(size, "value", size)) for size in shape], _NUMPY[dtype]))

    def warp_specialize(self, roles, worker_num_warps, worker_num_regs):
        for role, arguments in reversed(roles):
            role(*arguments)
        assert not any(self.barriers.filled.values()), "loaded, and not read"


def interpreted(name, replaced, monkeypatch, **functions):
    """Import a module in Gluon once more, for the interpreter; `functions` are put in the place of its own.

    replaced: pairs of texts, of which the second tells a barrier which tiles it is of.
    """
    for kind in (tl.block_type, tl.dtype):
        monkeypatch.setattr(kind, "layout", None, raising=False)
    source = Path(importlib.util.find_spec(name).origin).read_text()
    for old, new in (*_REPLACED, *replaced):
        assert old in source, old
        source = source.replace(old, new)
    path = Path(tempfile.mkdtemp()) / "interpreted_gluon.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    barriers = _Barriers()
    module.gl, module.mbarrier, module.async_copy = _Gluon(barriers), barriers, _Copies(barriers)
    module.mma_v2 = lambda a, b, acc: tl.dot(a, b, acc)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    vars(module).update(functions)
    return module


@triton.jit
def set_flag(flag, stamp):
    """Stands for a function of the kernel."""
    tl.store(flag, stamp)


def await_flags(flags, stamps, waits):
    """Stands for a function of the kernel: programs run one after another, so what it waits for is there."""
    seen = tl.load(flags, mask=waits != 0, other=0)
    assert np.array_equal((waits * seen).handle.data, (waits * stamps).handle.data)
    tl.store(flags, stamps * 0, mask=waits != 0)
