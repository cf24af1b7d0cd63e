"""Private names of torch: listed in one place, and nothing but a feature is lost with one. And tested releases."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from isogemm.core import private

PACKAGE = Path(private.__file__).parents[1]
DOCUMENTED = {
    "torch._C.DisableTorchFunction", "torch._C.DisableTorchFunctionSubclass",
    "torch.utils._python_dispatch.TorchDispatchMode",
}  # fmt: skip
WRITTEN_OUT = {"torch._dynamo.graph_break"}  # listed, but Dynamo must see it by its name


def test_names_are_there():
    """All but those that a build for the CPU does not have."""
    absent = {path for path in private.NAMES if private.find(path) is None}
    assert absent <= {path for path in private.NAMES if "_cuda_" in path}
    assert not absent or not torch.backends.cuda.is_built()


def test_names_are_few():
    assert len(private.NAMES) < 35


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_uses_private_names(file):
    if file == Path(private.__file__):
        return
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    used = {name for name in found if name.startswith("torch.") and _is_private(name)}
    assert used <= {part for name in DOCUMENTED | WRITTEN_OUT for part in _prefixes(name)}


def _is_private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _prefixes(name):
    parts = name.split(".")
    return {".".join(parts[: end + 1]) for end in range(1, len(parts))}


def test_names_that_are_not_listed():
    with pytest.raises(KeyError, match="not listed"):
        private.find("torch:_foo")


PROGRAM = """
import importlib.util, sys, warnings
import torch
import torch.nn.functional as F

class Lose:  # loads isogemm.core.private without the names of a feature
    def find_spec(self, name, path=None, target=None):
        if name != "isogemm.core.private":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(private):
            execute(private)
            lost = {{path for path, needed_by in private.NAMES.items() if {feature!r} in needed_by}}
            find = private.find
            private.find = lambda path: None if path in lost else find(path)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Lose())
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import isogemm
    x, w, b = torch.randn(4, 8), torch.randn(5, 8, requires_grad=True), torch.randn(5, requires_grad=True)
    def check(y, plain):
        torch.testing.assert_close(y, plain)
        for ours, theirs in zip(torch.autograd.grad(y.sum(), (w, b)), torch.autograd.grad(plain.sum(), (w, b))):
            torch.testing.assert_close(ours, theirs)
    check(isogemm.linear(x, w, b), F.linear(x, w, b))
    check(isogemm.linear(x, w, b, activation="gelu"), F.gelu(F.linear(x, w, b)))
    w.main_grad = torch.zeros(5, 8)
    isogemm.linear(x, w, b).sum().backward()
    torch.testing.assert_close(w.main_grad, x.sum(0).expand(5, 8))
    del w.main_grad
    for _ in range(2):
        with isogemm.autofuse() as report:
            y = torch.relu(F.linear(x, w, b))
        check(y, torch.relu(F.linear(x, w, b)))
    layer = isogemm.nn.EncoderLayer(16, 2, 32, dropout=0.0)
    plain = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    plain.load_state_dict(layer.state_dict())
    tokens = torch.randn(3, 5, 16)
    for _ in range(2):
        torch.testing.assert_close(layer(tokens), plain(tokens))
    if {compiles!r}:
        with isogemm.fusion.compile_fusion() as compiled:
            check(torch.compile(lambda: torch.relu(F.linear(x, w, b)))(), torch.relu(F.linear(x, w, b)))
        print("compiled", bool(compiled.fused))
print("fused", bool(report.fused))
print(*(str(each.message) for each in said if "isogemm" in str(each.message)), sep="\\n")
"""


@pytest.mark.parametrize("feature", [private.FAST_PATH, private.AUTOFUSE, private.COMPILE_FUSION, private.FALLBACK])
def test_results_without_the_names_of(feature):
    compiles = feature == private.COMPILE_FUSION
    program = PROGRAM.format(feature=feature, compiles=compiles)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert f"fused {feature not in (private.AUTOFUSE, private.FAST_PATH, private.COMPILE_FUSION)}" in lines or compiles
    off = [line for line in lines if line.startswith(f"isogemm: {feature} is off: torch {torch.__version__} has no ")]
    assert len(off) == (feature != private.FALLBACK)  # said once
    if compiles:
        assert "compiled False" in lines


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_bounds_of_the_package_are_the_tested_releases(package):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (bounds,) = (each for each in project["dependencies"] if each.startswith(package))
    tested = getattr(private, package.upper())
    first, last = (version.split(".") for version in (tested[0], tested[-1]))
    assert bounds.partition(";")[0] == f"{package}>={first[0]}.{first[1]},<{last[0]}.{int(last[1]) + 1}"


@pytest.mark.parametrize(
    ("package", "version", "is_newer"),
    [
        ("torch", "2.11.0+cu130", False),
        ("torch", "2.15.0", False),
        ("torch", "2.15.9+cpu", False),
        ("torch", "2.16.0a0+git123", True),
        ("torch", "3.0", True),
        ("triton", "3.9.1", False),
        ("triton", "3.10.0", True),
        ("triton", "none", False),
    ],
)
def test_newer_releases_are_named(package, version, is_newer):
    said = private.untested(package, version)
    assert bool(said) == is_newer
    assert not said or (said.startswith(f"{package} {version} is newer than ") and "isogemm verify" in said)
