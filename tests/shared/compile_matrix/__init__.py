"""Compile Triton kernels for GPUs that are not there, and read back what they need.

`python -m compile_matrix package.module:jobs --target sm_90` does it from a shell.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

    from isogemm.core.launch import Launch


@dataclass(frozen=True)
class Target:
    """A GPU architecture to compile for, and what a program may use there."""

    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int  # bytes per program
    tensor_memory_limit: int = 0  # columns per program


TARGETS: dict[str, Target] = {
    "sm_80": Target("cuda", 80, 32, shared_limit=163 * 1024),
    "sm_90": Target("cuda", 90, 32, shared_limit=227 * 1024),
    "sm_100": Target("cuda", 100, 32, shared_limit=227 * 1024, tensor_memory_limit=512),
    "gfx942": Target("hip", "gfx942", 64, shared_limit=64 * 1024),
}


@dataclass(frozen=True)
class Reference:
    """An object by where it is imported from, "package.module:name", so that it travels between processes."""

    path: str

    @classmethod
    def to(cls, obj: Any) -> Reference:
        """To a `@triton.jit` function, or a path already written out."""
        if isinstance(obj, str):
            return cls(obj)
        function = _undecorated(obj)
        if "." in function.__qualname__:
            raise ValueError(f"{function.__qualname__} is not importable; define it at the top of a module")
        return cls(f"{function.__module__}:{function.__qualname__}")

    def resolve(self) -> Any:
        module, separator, name = self.path.partition(":")
        if not (module and separator and name):
            raise ValueError(f"reference: got {self.path!r}, expected 'package.module:name'")
        found = importlib.import_module(module)
        if not hasattr(found, name):
            raise ValueError(f"reference: module {module!r} has no {name!r}")
        return getattr(found, name)


@dataclass(frozen=True)
class CompileJob:
    """One specialisation of one kernel.

    kernel: the `@triton.jit` function, or "package.module:name".
    signature: Triton's type of each run-time argument, such as "*fp32" or "i32".
    constexprs: value of each compile-time argument, and of run-time ones Triton folds in (strides of 1);
        may be `@triton.jit` functions. Arguments left out take their defaults.
    attrs: what the pointer or integer is known to be divisible by; Triton itself says 16 or nothing.
    options: further compiler options; enable_fp_fusion must be among them, since Triton's default varies by version.
    uses: instructions that must appear, by target: {"sm_90": ["wgmma"]}.
    allowed_spill_bytes: what a spill has to exceed to be a failure.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    attrs: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    uses: Mapping[str, Sequence[str]] = field(default_factory=dict)
    allowed_spill_bytes: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Reference):
            object.__setattr__(self, "kernel", Reference.to(self.kernel))
        constexprs = {
            name: Reference.to(value) if hasattr(value, "arg_names") else value
            for name, value in self.constexprs.items()
        }
        object.__setattr__(self, "constexprs", constexprs)

    @classmethod
    def of(cls, launch: Launch, pointers: Mapping[str, str | None], name: str = "") -> CompileJob:
        """A launch's; pointers: Triton's type of each of its first arguments, or None for an absent one."""
        launch.check(len(pointers))
        given = {pointer: kind for pointer, kind in pointers.items() if kind is not None}
        signature, attrs = dict(given), dict.fromkeys(given, 16)
        constexprs = dict(launch.constants) | {pointer: None for pointer in pointers if pointer not in given}
        scalars = launch.kernel.arg_names[len(pointers) :]
        for scalar, value in zip(scalars, launch.scalars, strict=False):
            if value is None:
                constexprs[scalar] = None
            else:
                signature[scalar] = "fp32" if isinstance(value, float) else "i32"
                if scalar.startswith("ld") and value % 16 == 0:
                    attrs[scalar] = 16
        options: dict[str, Any] = dict(launch.options)
        warps, stages = options.pop("num_warps", cls.num_warps), options.pop("num_stages", cls.num_stages)
        kernel = launch.kernel
        return cls(name or kernel.__name__, kernel, signature, constexprs, attrs, warps, stages, options)


@dataclass(frozen=True)
class Resources:
    """What one program of a compiled kernel needs."""

    registers: int  # per thread
    spill_bytes: int  # local memory per thread: a Triton kernel keeps nothing but spills there
    shared_bytes: int
    tensor_memory: int  # columns, on sm_100
    instructions: frozenset[str]  # of `_INSTRUCTIONS`
    binary: str  # "cubin" or "hsaco"


@dataclass(frozen=True)
class Outcome:
    """Either the resources or the compile error of a job on a target, and the limits it breaks."""

    job: str
    target: str
    resources: Resources | None
    error: str = ""
    violations: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.error and not self.violations

    def __str__(self) -> str:
        verdict = self.error or "; ".join(self.violations) or "ok"
        return f"{self.job} on {self.target}: {verdict}"


# Matched against the assembly: PTX for NVIDIA, amdgcn for AMD. None begins with \b, which takes 20 times as long.
_INSTRUCTIONS = {
    name: re.compile(pattern)
    for name, pattern in {
        "mma": r"mma\.sync",
        "wgmma": r"wgmma\.mma_async",
        "tcgen05": r"tcgen05\.mma",
        "mfma": r"v_s?mfmac?_",
        "fma": r"fma\.rn|v_(?:pk_)?fma(?:c|mk|ak)?_",
        "ldmatrix": r"ldmatrix\.",
        "cp.async": r"cp\.async\.c[ag]\.",
        "tma": r"cp\.async\.bulk\.tensor",
    }.items()
}


def compile_job(job: CompileJob, target: str) -> Resources:
    """Compile for one of `TARGETS`, no GPU needed; Triton's errors pass through."""
    goal = _target(target)
    compiled, gpu = _compile(job, goal)
    if goal.backend == "hip":
        assembly = compiled.asm["amdgcn"]
        registers, spill_bytes = _amd_usage(assembly)
    else:
        assembly = compiled.asm["ptx"]
        registers, spill_bytes = _nvidia_usage(compiled, gpu)
    return Resources(
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=compiled.metadata.shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", None) or 0,
        instructions=frozenset(name for name, pattern in _INSTRUCTIONS.items() if pattern.search(assembly)),
        binary="hsaco" if goal.backend == "hip" else "cubin",
    )


def disassemble(job: CompileJob, target: str) -> str:
    """The machine code of a job on an NVIDIA target, as text."""
    from triton import knobs

    compiled, _ = _compile(job, _target(target))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return _output([knobs.nvidia.cuobjdump.path, "-sass", file.name])


def limit_violations(job: CompileJob, target: str, resources: Resources) -> tuple[str, ...]:
    """What would make the kernel slow or unlaunchable on the target, in words."""
    goal = _target(target)
    found = []
    if resources.spill_bytes > job.allowed_spill_bytes:
        allowed = f" ({job.allowed_spill_bytes} allowed)" if job.allowed_spill_bytes else ""
        found.append(f"spills {resources.spill_bytes} bytes{allowed}")
    if resources.shared_bytes > goal.shared_limit:
        found.append(f"needs {resources.shared_bytes} bytes of shared memory, {goal.shared_limit} there are")
    if resources.tensor_memory > goal.tensor_memory_limit:
        found.append(f"needs {resources.tensor_memory} columns of tensor memory, {goal.tensor_memory_limit} there are")
    missing = [name for name in job.uses.get(target, ()) if name not in resources.instructions]
    if missing:
        found.append(f"has no {', '.join(missing)}")
    return tuple(found)


def run_matrix(
    jobs: Iterable[CompileJob], targets: Iterable[str] = tuple(TARGETS), workers: int | None = None
) -> list[Outcome]:
    """Compile every job for every target in a pool of processes; one outcome each, job by job.

    `workers` defaults to the CPUs this process may use. A compiler that crashes costs its own job alone.
    """
    targets = tuple(targets)
    for target in targets:
        _target(target)
    pairs = [(job, target) for job in jobs for target in targets]
    if not pairs:
        return []
    workers = workers or len(os.sched_getaffinity(0))
    outcomes = _run_pool(pairs, min(workers, len(pairs)))
    lost = [index for index, outcome in enumerate(outcomes) if outcome is None]
    with ThreadPoolExecutor(workers) as threads:  # again, each in a process of its own
        alone = threads.map(lambda index: _run_pool([pairs[index]], 1), lost)
        for index, (outcome,) in zip(lost, alone, strict=True):
            outcomes[index] = outcome
    return [
        outcome or Outcome(job.name, target, None, error="the compiler process died")
        for outcome, (job, target) in zip(outcomes, pairs, strict=True)
    ]


def _run_pool(pairs: Sequence[tuple[CompileJob, str]], workers: int) -> list[Outcome | None]:
    """None for a job whose process, or pool, died."""
    outcomes: list[Outcome | None] = []
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures: list[Future[Outcome]] = []
        with contextlib.suppress(BrokenProcessPool):
            futures.extend(pool.submit(_outcome, job, target) for job, target in pairs)
        for future in futures:
            try:
                outcomes.append(future.result())
            except BrokenProcessPool:
                outcomes.append(None)
    return outcomes + [None] * (len(pairs) - len(outcomes))


def _outcome(job: CompileJob, target: str) -> Outcome:
    try:
        resources = compile_job(job, target)
    except Exception as error:  # whatever stops a compilation is its outcome
        return Outcome(job.name, target, None, error=f"{type(error).__name__}: {error}")
    return Outcome(job.name, target, resources, violations=limit_violations(job, target, resources))


def _compile(job: CompileJob, goal: Target) -> tuple[Any, GPUTarget]:
    import triton
    from triton.backends.compiler import GPUTarget

    source = _source(job)
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages, **job.options}
    _check_options(options)
    gpu = GPUTarget(goal.backend, goal.arch, goal.warp_size)
    return triton.compile(source, target=gpu, options=options), gpu


def _target(name: str) -> Target:
    if name not in TARGETS:
        raise ValueError(f"target: got {name!r}, expected one of {', '.join(TARGETS)}")
    return TARGETS[name]


def _undecorated(kernel: Any) -> Any:
    """The Python function below `@triton.jit`, `@triton.autotune` and the like."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _jit_function(reference: Reference) -> Any:
    from triton.runtime.jit import JITFunction

    kernel = reference.resolve()
    while hasattr(kernel, "fn") and not isinstance(kernel, JITFunction):
        kernel = kernel.fn
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"{reference.path} is no compilable @triton.jit function (unset TRITON_INTERPRET if it is set)")
    return kernel


def _source(job: CompileJob) -> Any:
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = _jit_function(job.kernel)
    for given, name in ((job.signature, "signature"), (job.constexprs, "constexprs"), (job.attrs, "attrs")):
        unknown = [argument for argument in given if argument not in kernel.arg_names]
        if unknown:
            raise ValueError(f"{name}: {', '.join(unknown)} not among the arguments {', '.join(kernel.arg_names)}")
    defaults = {param.name: param.default for param in kernel.params if param.has_default}
    signature, constexprs = {}, {}
    for argument in kernel.arg_names:
        if argument in job.constexprs:
            value = job.constexprs[argument]
            constexprs[argument] = _jit_function(value) if isinstance(value, Reference) else value
        elif argument in job.signature:
            signature[argument] = job.signature[argument]
            continue
        elif argument in defaults:
            constexprs[argument] = defaults[argument]
        else:
            raise ValueError(f"argument {argument} of {job.kernel.path} is in neither signature nor constexprs")
        signature[argument] = "constexpr"
    attrs = {
        (kernel.arg_names.index(argument),): [["tt.divisibility", divisor]]
        for argument, divisor in job.attrs.items()
        if argument not in constexprs
    }
    return (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constexprs, attrs)


def _check_options(options: Mapping[str, Any]) -> None:
    """Triton drops options it does not know; NVIDIA's and AMD's are accepted on either.

    Bits depend on enable_fp_fusion, whose default varies by version: no kernel may leave it open.
    """
    from triton.backends.amd.compiler import HIPOptions
    from triton.backends.nvidia.compiler import CUDAOptions

    known = {*CUDAOptions.__dataclass_fields__, *HIPOptions.__dataclass_fields__}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"options: {', '.join(unknown)} unknown to Triton")
    if "enable_fp_fusion" not in options:
        raise ValueError(f"options: got {', '.join(options)}, expected enable_fp_fusion among them")


def _amd_usage(assembly: str) -> tuple[int, int]:
    registers = _number(r"\.vgpr_count:\s*(\d+)", assembly)
    return registers, _number(r"\.private_segment_fixed_size:\s*(\d+)", assembly)


def _nvidia_usage(compiled: Any, target: GPUTarget) -> tuple[int, int]:
    from triton import knobs

    try:
        cuobjdump = knobs.nvidia.cuobjdump.path
    except RuntimeError:  # not shipped with this Triton
        return _ptxas_usage(compiled, target)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _output([cuobjdump, "--dump-resource-usage", file.name])
    return _number(r"\bREG:(\d+)", usage), _number(r"\bSTACK:(\d+)", usage)


def _ptxas_usage(compiled: Any, target: GPUTarget) -> tuple[int, int]:
    """From the log of ptxas, run again by Triton so that its flags are the same."""
    from triton import knobs
    from triton.compiler import make_backend

    backend = make_backend(target)
    options = backend.parse_options(compiled.metadata._asdict())
    log = io.StringIO()
    with knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(compiled.asm["ptx"], {}, options, target.arch)
    usage = log.getvalue()
    return _number(r"Used (\d+) registers", usage), _number(r"(\d+) bytes stack frame", usage)


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stdout.strip()}")
    return done.stdout


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern!r} in the compiler's report:\n{text[-2000:]}")
    return int(match[1])
