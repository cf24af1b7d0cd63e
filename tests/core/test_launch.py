import ast
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import triton
import triton.language as tl
from interpreting import interpreting
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

import isogemm
from isogemm.core import launch
from isogemm.core.launch import BoundKernel, Launch, TensorMap

OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def scale(x, n, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(x + index, tl.load(x + index) * FACTOR, mask=index < n)


def test_only_compiled_kernels_bind():
    with pytest.raises(TypeError, match=r"^kernel is a function; expected a compiled @triton\.jit function"):
        Launch(lambda: None, 1, (), {}, {}).bind()


@pytest.mark.skipif(interpreting(), reason="the interpreter is on")
@pytest.mark.parametrize("constants", [{}, {"FACTOR": 2}, {"BLOCK": 8, "FACTOR": 2}, {"FACTOR": 2, "SIZE": 8}])
def test_constants_must_match_the_kernel(constants):
    with pytest.raises(TypeError, match=r"^constants are .*; scale expects \['FACTOR', 'BLOCK'\]"):
        Launch(scale, 1, (2,), constants, OPTIONS).bind(1)
    with pytest.raises(TypeError, match=r"scale expects \['FACTOR', 'BLOCK'\]"):
        Launch(scale, 1, (2,), constants, OPTIONS).check(tensors=1)


@pytest.mark.skipif(interpreting(), reason="the interpreter is on")
def test_too_few_arguments():
    with pytest.raises(TypeError, match=r"scale expects \['n', 'FACTOR', 'BLOCK'\]"):
        Launch(scale, 1, (), {"FACTOR": 2, "BLOCK": 8}, OPTIONS).bind(1)


@pytest.mark.skipif(interpreting(), reason="the interpreter is on")
def test_fusion_of_multiply_adds_is_never_left_to_triton():
    """Bits depend on it, and its default on Triton's version: no way to compile or launch a kernel leaves it open."""
    constants = {"FACTOR": 2, "BLOCK": 8}
    open_launch = Launch(scale, 1, (2,), constants, {"num_warps": 4})
    for way in (lambda: open_launch.check(tensors=1), lambda: open_launch.run(None), lambda: open_launch.bind(None)):
        with pytest.raises(TypeError, match=r"^options of scale are \['num_warps'\]; expected enable_fp_fusion"):
            way()


def test_kernels_are_launched_with_options_that_were_checked():
    """`kernel[grid](...)` stands where the options of a launch are passed on, and nowhere else in the library."""
    root, passed = Path(isogemm.__file__).parent, set()
    for file in root.rglob("*.py"):
        text = file.read_text()
        for call in ast.walk(ast.parse(text)) if "import triton" in text or "from triton" in text else ():
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript):
                unpacked = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is None]
                passed.add((str(file.relative_to(root)), *unpacked[-1:]))
    assert passed == {("core/launch.py", "self.options"), ("bench/fixed_tile.py", "OPTIONS")}


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
    assert not launch.has_launch_hooks()
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", repr)
    assert launch.has_launch_hooks()


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


class Installed:
    """A kernel with the launcher of the installed Triton, which notes what the innermost one is called with."""

    packed_metadata, name = (4, 1, 0), "kernel"

    def __init__(self, signature=("*fp32", "i32", "constexpr", "constexpr"), descriptors=(), **changes):
        self.launched, self.function = [], None
        self.metadata = SimpleNamespace(tensordesc_meta=list(descriptors))
        self.run = object.__new__(nvidia.CudaLauncher)
        innermost = lambda *args: self.launched.append(tuple(map(_as_tuple, args)))  # noqa: E731
        vars(self.run).update(
            launch=nvidia.wrap_handle_tensordesc(innermost, dict(enumerate(signature)), list(descriptors)),
            arg_annotations=["annotations"], kernel_signature=b"signature", num_ctas=1, gsan_enabled=False,
            global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0, profile_scratch_align=1,
            launch_cooperative_grid=False, launch_pdl=True,
        )  # fmt: skip
        vars(self.run).update(changes)

    def _init_handles(self):
        self.function = "handle"

    def launch_metadata(self, grid, stream, *args):
        return "described"

    def launch(self, programs, stream, *args):
        """As Triton's JIT does."""
        hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        hooks = tuple(hook if getattr(hook, "calls", True) else None for hook in hooks)
        described = "described" if hooks[0] else None
        self.run(programs, 1, 1, stream, self.function, self.packed_metadata, described, *hooks, *args)


def _as_tuple(arguments):
    return tuple(arguments) if isinstance(arguments, list) else arguments


@pytest.fixture
def cuda(monkeypatch):
    """A driver whose descriptors are what they were made of."""

    def encode(*args):
        return tuple(map(_as_tuple, args))

    utils = SimpleNamespace(fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode)
    active = SimpleNamespace(utils=utils, get_current_target=lambda: SimpleNamespace(backend="cuda"))
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(launch, "_enter_context", lambda device: None)
    monkeypatch.setattr(launch, "current_stream", lambda device: 103)
    launch._internals.cache_clear()
    launch.descriptors_usable.cache_clear()
    launch._warn_of_slow_launches.cache_clear()
    yield
    launch._internals.cache_clear()
    launch.descriptors_usable.cache_clear()


@pytest.mark.parametrize("hooks", [(None, None), (print, repr)])
def test_a_direct_launch_is_tritons_own(cuda, monkeypatch, hooks):
    """What the installed Triton's innermost launcher is called with, is the same past the outer one."""
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", hooks[0])
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", hooks[1])
    compiled = Installed()
    kernel = BoundKernel(compiled, [2, 8])
    assert kernel.direct
    assert compiled.launched == []  # by looking at the launcher
    kernel(0, 64, 4096, 7)
    compiled.launch(64, 103, 4096, 7, 2, 8)
    if hooks[0] is None:
        kernel.prepared(103, 64, (4096, 7))()
    assert len(compiled.launched) >= 2
    assert len(set(map(repr, compiled.launched))) == 1
    assert True in compiled.launched[0]  # launch_pdl


TF32 = pytest.param(True, id="tf32")
if "round_f32_to_tf32" not in TensorDescriptor.__dataclass_fields__:
    TF32 = pytest.param(True, id="tf32", marks=pytest.mark.skip(reason="Triton's own descriptors do not round here"))


@pytest.mark.parametrize("rounded", [pytest.param(False, id="float32"), TF32])
@pytest.mark.parametrize("direct", [True, False])
def test_descriptors_are_tritons_own(cuda, monkeypatch, rounded, direct):
    """Encoded once per address, or at every launch by Triton's launcher: the same arguments either way."""
    meta = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [64, 32], "fp4_padded": False}
    compiled = Installed(("tensordesc<fp32[64, 32]>", "i32", "constexpr"), [meta])
    if not direct:
        monkeypatch.setattr(launch, "_below_descriptors", lambda launch: {}["launcher"])
    with warnings.catch_warnings(action="ignore"):
        kernel = BoundKernel(compiled, [2])
    assert kernel.direct == direct
    seen = TensorMap((100, 96), (128, 1), (64, 32), rounded)
    kernel(0, 64, *kernel.describer(0, seen, 0)(4096), 7)
    base = SimpleNamespace(data_ptr=lambda: 4096, dtype=launch._OF_SIZE[4])
    rounding = {"round_f32_to_tf32": True} if rounded else {}
    described = TensorDescriptor(base, [100, 96], [128, 1], [64, 32], **rounding)
    compiled.launch(64, 103, described, 7, 2)
    assert compiled.launched[0] == compiled.launched[1]


def test_constants_are_left_out_where_triton_would_skip_them(cuda):
    """The same annotations beside the same arguments, but for the constants, however the kernel is launched."""
    meta = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [64, 32], "fp4_padded": False}
    signature = ("*fp32", "constexpr", "tensordesc<fp32[64, 32],#layout>", "i32", "constexpr", "constexpr")
    annotations = ["out", "constexpr", "map", "height", "width", "pitch", "one", "size", "constexpr", "constexpr"]
    compiled = Installed(signature, [meta], arg_annotations=annotations)
    compiled.src = SimpleNamespace(signature=dict(enumerate(signature)))
    kernel = BoundKernel(compiled, [2, 8])
    arguments = (512, None, *kernel.describer(0, TensorMap((100, 96), (128, 1), (64, 32)), 0)(4096), 7)
    kernel(0, 64, *arguments)
    kernel.prepared(103, 64, arguments)()
    base = SimpleNamespace(data_ptr=lambda: 4096, dtype=launch._OF_SIZE[4])
    described = TensorDescriptor(base, [100, 96], [128, 1], [64, 32])
    compiled.launch(64, 103, 512, None, described, 7, 2, 8)
    direct, prepared, tritons = compiled.launched
    assert direct == prepared
    if not kernel._grouped:  # before Triton 3.7
        assert direct == tritons
        return
    at = tritons.index(tuple(annotations))
    assert (*direct[:at], *direct[at + 1 : -1]) == (*tritons[:at], *tritons[at + 1 : -1])
    read = [each for each in zip(annotations, tritons[-1], strict=True) if each[0] != "constexpr"]
    assert list(zip(direct[at], direct[-1], strict=True)) == read


def test_this_tritons_descriptors_are_known(cuda):
    assert launch.descriptors_usable()


@pytest.mark.parametrize(
    ("changes", "call"),
    [
        ({"global_scratch_size": 8}, None),
        ({"profile_scratch_size": 8}, None),
        ({}, lambda self, *args: self.launch(*reversed(args))),
        ({}, lambda self, *args: self.launch(*args[:5], args[3], *args[5:])),
        ({}, lambda self, *args: None),
    ],
    ids=["scratch", "profile", "another order", "the stream twice", "another launcher"],
)
def test_what_is_not_known_is_left_to_triton(cuda, monkeypatch, changes, call):
    if call:
        monkeypatch.setattr(nvidia.CudaLauncher, "__call__", call)
    compiled = Installed(**changes)
    with pytest.warns(RuntimeWarning, match="launched by Triton's own launcher, which takes longer"):
        kernel = BoundKernel(compiled, [2])
    assert not kernel.direct
    assert kernel._launch is compiled.run
