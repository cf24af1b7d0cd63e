import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from compile_matrix import TARGETS, CompileJob, Reference, compile_job, disassemble, limit_violations, run_matrix

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"

triton = pytest.importorskip("triton")


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("matrix_kernels")


@pytest.mark.parametrize("target", TARGETS)
def test_sound_kernel(kernels, target):
    used = compile_job(kernels.MATMUL, target)
    assert limit_violations(kernels.MATMUL, target, used) == ()
    assert 16 <= used.registers <= 255
    assert used.spill_bytes == 0
    assert 0 < used.shared_bytes <= TARGETS[target].shared_limit
    assert used.binary == ("hsaco" if target.startswith("gfx") else "cubin")


@pytest.mark.parametrize("target", TARGETS)
def test_fusion_option_reaches_the_compiler(kernels, target):
    assert "fma" in compile_job(kernels.AXPY, target).instructions
    assert "fma" not in compile_job(kernels.AXPY_UNFUSED, target).instructions


def test_alignment_reaches_the_compiler(kernels):
    assert "cp.async" in compile_job(kernels.MATMUL, "sm_80").instructions
    assert "cp.async" not in compile_job(replace(kernels.MATMUL, attrs={}), "sm_80").instructions


def test_disassembly_is_machine_code(kernels):
    assert "HGMMA" in disassemble(kernels.MATMUL, "sm_90")
    assert "HMMA" in disassemble(kernels.MATMUL, "sm_80")


def test_matrix_reports_each_kind_of_failure(kernels):
    jobs = [kernels.AXPY, kernels.SPILLING, kernels.BROKEN, CompileJob("fatal", "matrix_fatal:kernel", {})]
    outcomes = run_matrix(jobs, ["sm_90", "gfx942"], workers=2)
    assert [(outcome.job, outcome.target) for outcome in outcomes] == [
        (job.name, target) for job in jobs for target in ("sm_90", "gfx942")
    ]
    sound, spilling, broken, fatal = (outcomes[at : at + 2] for at in (0, 2, 4, 6))
    assert all(outcome.ok for outcome in sound)
    for outcome in spilling:
        assert outcome.resources.spill_bytes > 0
        assert "spills" in str(outcome)
    for outcome in broken:
        assert outcome.resources is None
        assert "undefined_name" in outcome.error
    for outcome in fatal:
        assert str(outcome).endswith("the compiler process died")


def test_limits(kernels):
    used = compile_job(kernels.OVERSIZED, "sm_80")
    (violation,) = limit_violations(kernels.OVERSIZED, "sm_80", replace(used, spill_bytes=0))
    assert violation == f"needs {used.shared_bytes} bytes of shared memory, 166912 there are"
    spilled = replace(used, shared_bytes=0, spill_bytes=8)
    assert limit_violations(kernels.OVERSIZED, "sm_80", spilled) == ("spills 8 bytes",)
    lenient = replace(kernels.OVERSIZED, allowed_spill_bytes=8)
    assert limit_violations(lenient, "sm_80", spilled) == ()
    picky = replace(lenient, uses={"sm_80": ["mma", "wgmma"]})
    assert limit_violations(picky, "sm_80", spilled) == ("has no wgmma",)
    tensor_memory = replace(used, spill_bytes=0, shared_bytes=0, tensor_memory=1024)
    (violation,) = limit_violations(kernels.OVERSIZED, "sm_100", tensor_memory)
    assert violation == "needs 1024 columns of tensor memory, 512 there are"


@pytest.mark.parametrize("target", ["sm_80", "sm_100"])
def test_without_cuobjdump_ptxas_tells(kernels, target, monkeypatch):
    from triton import knobs

    class Missing(type(knobs.nvidia)):
        @property
        def cuobjdump(self):
            raise RuntimeError("Cannot find cuobjdump")

    jobs = (kernels.AXPY, kernels.SPILLING)
    expected = [compile_job(job, target) for job in jobs]
    monkeypatch.setattr(knobs.nvidia, "__class__", Missing)
    assert [compile_job(job, target) for job in jobs] == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"signature": {"x": "*fp32"}}, "argument y of matrix_kernels:axpy is in neither"),
        ({"constexprs": {"z": 1}}, "constexprs: z not among the arguments x, y, n"),
        ({"options": {"fp_fusion": True}}, "options: fp_fusion unknown to Triton"),
        ({"options": {}}, "options: got num_warps, num_stages, expected enable_fp_fusion among them"),
        ({"kernel": "matrix_kernels:nothing"}, "module 'matrix_kernels' has no 'nothing'"),
        ({"kernel": "matrix_kernels"}, "expected 'package.module:name'"),
    ],
)
def test_bad_jobs(kernels, change, message):
    with pytest.raises(ValueError, match=message):
        compile_job(replace(kernels.AXPY, **change), "sm_90")


def test_bad_references_and_targets(kernels):
    @triton.jit
    def nested(x):
        pass

    with pytest.raises(TypeError, match="matrix_kernels:bad is no compilable"):
        compile_job(replace(kernels.AXPY, kernel="matrix_kernels:bad"), "sm_90")
    with pytest.raises(ValueError, match="target: got 'sm_1', expected one of sm_80"):
        run_matrix([kernels.AXPY], ["sm_1"])
    with pytest.raises(ValueError, match="not importable; define it at the top of a module"):
        Reference.to(nested)


def _command(*arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE)])}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-W", "error", "-m", "compile_matrix", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_command_line():
    good = _command("matrix_kernels:GOOD", "--target", "sm_90", "--workers", "1")
    assert good.returncode == 0, good.stderr
    assert "wgmma" in good.stdout
    assert "2 of 2 ok" in good.stdout
    bad = _command("matrix_kernels:bad", "--target", "sm_90", "--workers", "1")
    assert bad.returncode == 1, bad.stderr
    assert "FAILED spilling on sm_90: spills" in bad.stdout
    assert "1 of 3 ok" in bad.stdout
