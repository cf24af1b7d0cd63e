import subprocess
import sys

import isogemm

EXTRAS = ["rich", "jinja2", "matplotlib", "hypothesis"]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_after(statement: str) -> set[str]:
    return set(run(f"import sys; {statement}; print(*sys.modules)").split())


def test_import_needs_torch_alone():
    added = modules_after("import isogemm") - modules_after("import torch")
    assert not added & {"triton", *EXTRAS}


def test_a_first_call_imports_no_sympy():
    """It takes 0.4 s, and torch's broadcast_shapes needs it."""
    calls = "isogemm.linear(a(2, 4), a(3, 4)); isogemm.linear(a(2, 5, 4), a(3, 4), a(3)); isogemm.mm(a(2, 4), a(4, 3))"
    assert "sympy" not in modules_after(f"import torch, isogemm; a = torch.ones; {calls}")


def test_command_works_without_triton_and_extras():
    absent = dict.fromkeys(["triton", *EXTRAS])
    run(f"import sys; sys.modules.update({absent}); from isogemm.cli import main; sys.exit(main(['doctor']))")


def test_public_names():
    assert {"__version__", "bmm", "dispatch_log"} <= set(isogemm.__all__)
    assert all(hasattr(isogemm, name) for name in isogemm.__all__)
