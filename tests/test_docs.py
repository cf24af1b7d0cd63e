"""The documents' tables are those of the recorded measurements, and the gate is that of the recorded tuning."""

import importlib.util
import json
from pathlib import Path

import pytest

from isogemm.bench import store, tables
from isogemm.families import FAMILIES
from isogemm.tiny import gate

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_figures_are_the_measured_ones(document):
    rows = store.read(*sorted(ROOT.glob("benchmarks/results/*/*.jsonl")))
    views = [family.view for family in FAMILIES if family.view]
    text = document.read_text(encoding="utf-8")
    assert tables.rendered(text, tables.tables(rows, views)) == text, "run make docs"


def test_gate_is_the_measured_one():
    spec = importlib.util.spec_from_file_location("tune_tiny", ROOT / "benchmarks" / "tune_tiny.py")
    tune = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tune)
    raw = (ROOT / "benchmarks" / "tuning" / "h200" / "tiny.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in raw.splitlines()]
    assert tune.gate_source(tune.decide(rows)) == Path(gate.__file__).read_text(encoding="utf-8")
