from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton import knobs

from isogemm.core import launch
from isogemm.core.launch import BoundKernel, Launch, bind
from isogemm.testing import interpreting


@triton.jit
def scale(x, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(x + index, tl.load(x + index) * FACTOR, mask=index < n)


def test_only_compiled_kernels_bind():
    with pytest.raises(TypeError, match=r"^kernel is a function; expected a compiled @triton\.jit function"):
        bind(lambda: None, (), {}, {})


@pytest.mark.skipif(interpreting(), reason="the interpreter is on")
@pytest.mark.parametrize("constants", [{}, {"FACTOR": 2}, {"BLOCK": 8, "FACTOR": 2}, {"FACTOR": 2, "SIZE": 8}])
def test_constants_must_match_the_kernel(constants):
    with pytest.raises(TypeError, match=r"^constants are .*; scale expects \['FACTOR', 'BLOCK'\]"):
        bind(scale, (1, 2), constants, {})
    with pytest.raises(TypeError, match=r"scale expects \['FACTOR', 'BLOCK'\]"):
        Launch(scale, 1, (2,), constants, {}).check(tensors=1)


@pytest.mark.skipif(interpreting(), reason="the interpreter is on")
def test_too_few_arguments():
    with pytest.raises(TypeError, match=r"scale expects \['n', 'FACTOR', 'BLOCK'\]"):
        bind(scale, (1,), {"FACTOR": 2, "BLOCK": 8}, {})


class Compiled:
    """What Triton's compiled kernel shows of itself, and what it was launched with."""

    packed_metadata = "metadata"

    def __init__(self):
        self.launched = []
        self.function = None
        self.name = "scale"

    def _init_handles(self):
        self.function = "handle"

    def run(self, *args):
        self.launched.append(args)

    def launch_metadata(self, grid, stream, *args):
        return SimpleNamespace(grid=grid, stream=stream, args=args)


def test_launch_passes_grid_stream_and_arguments_in_order(monkeypatch):
    monkeypatch.setattr(launch, "current_stream", lambda device: 100 + device)
    compiled = Compiled()
    BoundKernel(compiled, [2, 8])(3, 64, 4096, 7)
    assert compiled.launched == [(64, 1, 1, 103, "handle", "metadata", None, None, None, 4096, 7, 2, 8)]


def test_a_prepared_launch_is_the_same_launch(monkeypatch):
    monkeypatch.setattr(launch, "current_stream", lambda device: 103)
    compiled = Compiled()
    kernel = BoundKernel(compiled, [2, 8])
    kernel(3, 64, 4096, 7)
    kernel.prepared(103, 64, (4096, 7))()
    assert compiled.launched[0] == compiled.launched[1]


def test_hooks_are_noticed(monkeypatch):
    assert not launch.is_heard()
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", repr)
    assert launch.is_heard()


def test_launch_tells_profilers(monkeypatch):
    """Triton's launch hooks, by which its profiler names kernels, see every launch."""
    monkeypatch.setattr(launch, "current_stream", lambda device: 100)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", print)
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", repr)
    compiled = Compiled()
    BoundKernel(compiled, [2])(0, 64, 4096)
    (launched,) = compiled.launched
    described, enter, leave = launched[6:9]
    assert (enter, leave) == (print, repr)
    assert (described.grid, described.stream, described.args) == ((64, 1, 1), 100, (4096, 2))


def test_a_kernel_that_was_not_loaded_is_refused():
    compiled = Compiled()
    compiled._init_handles = lambda: None
    with pytest.raises(RuntimeError, match="scale was compiled but not loaded"):
        BoundKernel(compiled, [])
