"""The lists of `make mutants` fit the source; whether each mutant is caught is for `make mutants` to say."""

import runpy
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MUTANTS = runpy.run_path(str(HERE / "mutants/__main__.py"))["read"]()


def test_each_family_has_mutants():
    assert {"encoder", "fusion", "gemm", "integrations", "loss", "nn", "norm", "tiny", "training"} <= {
        each.family for each in MUTANTS
    }


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{each.family}: {each.name}" for each in MUTANTS])
def test_a_mutant_fits_the_source(mutant):
    source = (HERE.parent / "src/isogemm" / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1
    assert mutant.old != mutant.new
    for each in mutant.tests:
        assert (HERE / each.partition("::")[0].partition(" ")[0]).exists(), each
