"""How fast the command and the package start."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import isogemm_cli
from isogemm.core.errors import PRECISIONS
from isogemm.gemm.configs import DTYPES
from isogemm_options import Architecture, Config

COMMANDS = ["doctor", "verify", "bench", "report", "demo", "tune", "train-patchtst"]
BOUND_S = 0.3  # of CPU time: other processes do not count
TRIALS = 5


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with their bytecode, as pip leaves them."""
    folder = tmp_path_factory.mktemp("installed")
    sources = Path(isogemm_cli.__file__).parent
    for module in sources.glob("isogemm_*.py"):
        shutil.copy(module, folder)
    shutil.copytree(sources / "isogemm", folder / "isogemm")
    compileall.compile_dir(folder, quiet=2)
    return folder


def python(code: str, folder: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", [[], *([command] for command in COMMANDS)])
def test_help_imports_no_torch(command, installed):
    code = (
        "import sys, isogemm_cli\n"
        f"try: isogemm_cli.main([*{command}, '--help'])\n"
        "except SystemExit: print('imported:', *sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    shown, _, imported = python(code, installed).rpartition("imported:")
    assert shown.startswith("usage: isogemm")
    assert not {"torch", "numpy", "isogemm", "triton"} & set(imported.split())


def test_help_is_fast(installed):
    code = (
        "import time\n"
        "start = time.process_time()\n"
        "import isogemm_cli\n"
        "try: isogemm_cli.main(['--help'])\n"
        "except SystemExit: print('took:', time.process_time() - start)"
    )
    assert any(float(python(code, installed).rpartition("took:")[2]) < BOUND_S for _ in range(TRIALS))


def test_ctrl_c_while_torch_is_imported(installed):
    code = (
        "import builtins, sys, isogemm_cli\n"
        "imported = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name == 'torch': raise KeyboardInterrupt\n"
        "    return imported(name, *rest)\n"
        "builtins.__import__ = interrupted\n"
        "print(isogemm_cli.main(['doctor']))"
    )
    assert python(code, installed).strip() == "130"


def test_import_is_fast(installed):
    """Beyond torch's import."""
    code = "import time, torch\nstart = time.process_time()\nimport isogemm\nprint(time.process_time() - start)"
    assert any(float(python(code, installed)) < BOUND_S for _ in range(TRIALS))


def test_choices_are_those_of_a_product():
    assert set(isogemm_cli.DTYPES) == set(DTYPES)
    assert isogemm_cli.PRECISIONS == PRECISIONS


def test_every_option_of_a_run_can_be_given():
    run = isogemm_cli.parser().parse_args(["train-patchtst"])
    names = {each.name for each in (*fields(Architecture), *fields(Config))} - {"model"}
    assert {name: getattr(run, name) for name in names} == dict.fromkeys(names)
