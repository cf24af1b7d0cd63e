"""The documents' tables are those of the recorded measurements, and configurations are those of the recorded tuning."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from isogemm.bench import store, tables
from isogemm.families import FAMILIES
from isogemm.gemm import tables as gemm_tables
from isogemm.tiny import gate

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_figures_are_the_measured_ones(document):
    rows = store.read(*sorted(ROOT.glob("benchmarks/results/*/*.jsonl")))
    views = [family.view for family in FAMILIES if family.view]
    text = document.read_text(encoding="utf-8")
    assert tables.rendered(text, tables.tables(rows, views)) == text, "run make docs"


def test_gate_is_the_measured_one(monkeypatch):
    tune, (rows,) = _tuning("tiny", "tiny.jsonl", monkeypatch)
    assert tune.gate_source(tune.decide(rows)) == Path(gate.__file__).read_text(encoding="utf-8")


def test_gemm_tables_are_the_measured_ones(monkeypatch):
    pytest.importorskip("triton")  # the tuning script's
    tune, files = _tuning("gemm", "gemm_*.jsonl", monkeypatch)
    rows = [row for file in files for row in file]
    assert tune.source(tune.decide(rows)) == Path(gemm_tables.__file__).read_text(encoding="utf-8")


def _tuning(family, pattern, monkeypatch):
    """A family's tuning script as a module, and the rows of each of its recorded files."""
    spec = importlib.util.spec_from_file_location(f"tune_{family}", ROOT / "benchmarks" / f"tune_{family}.py")
    tune = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, tune)  # where dataclasses look for their annotations
    spec.loader.exec_module(tune)
    files = sorted((ROOT / "benchmarks" / "tuning" / "h200").glob(pattern))
    return tune, [[json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in files]
