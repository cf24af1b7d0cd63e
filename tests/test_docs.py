"""The documents' tables are those of the recorded measurements, and configurations are those of the recorded tuning."""

import json
from pathlib import Path
from statistics import median

import pytest

import documents
from isogemm.bench import headline, store
from isogemm.core import tables as measured

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def generated():
    return documents.generated(documents.RESULTS)


@pytest.mark.parametrize("document", documents.documents(ROOT), ids=lambda path: str(path.relative_to(ROOT)))
def test_figures_are_the_measured_ones(document, generated):
    text = document.read_text(encoding="utf-8")
    assert documents.rendered(text, generated[0]) == text, "run make docs"


def test_headline_figures_in_the_package_are_the_measured_ones(generated):
    assert headline.shipped() == generated[1], "run make docs"


@pytest.mark.parametrize("family", ["gemm", "tiny"])
def test_tables_are_the_measured_ones(family):
    pytest.importorskip("triton")  # the tuners'
    from tuners import common, gemm, tiny

    rows = common.read(common.raw_files(family, "h200"))
    tuner = {"gemm": gemm, "tiny": tiny}[family]
    model = dict(measured.load(family, "sm_90", "MODEL"))  # tests/test_tune.py fits it again
    text = common.table_path(family, "sm_90").read_text(encoding="utf-8")
    assert common.source(family, "sm_90", tuner.tables(rows, "sm_90")[family], model) == text


def test_the_encoder_s_launches_are_the_measured_ones():
    """What encoder/README.md says of the third and fourth stack."""
    ceilings = store.newest(store.read(ROOT / "benchmarks" / "results" / "h200" / "ceilings.jsonl"))
    copy = next(row for row in ceilings if row.op == "copy")
    bandwidth = copy.bytes / median(copy.times_us["torch"])  # bytes a us
    path = ROOT / "benchmarks" / "tuning" / "h200" / "trials" / "encoder_launches.jsonl"
    third, fourth = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    of_a_layer = {
        name: round(each["per_step"] * each["us"] / 3) for name, each in third["launches"].items()
    }  # fmt: skip
    copied = []
    for sequences, tokens, d_model, _, dim_feedforward in (third["layer"], fourth["layer"]):
        passed_on = 3 * 4 * (50 * d_model + 4 * dim_feedforward) * sequences * tokens
        copied.append(passed_on / bandwidth / 1e3)
    text = " ".join((ROOT / "src" / "isogemm" / "encoder" / "README.md").read_text(encoding="utf-8").split())
    for said in (
        f"{copied[0]:.2f} ms of its", f"{copied[1]:.1f} of the fourth's", f"Of a layer's {sum(of_a_layer.values())} us",
        f"feedforward_backward takes {of_a_layer['feedforward_backward_warpgroup']}:",
        f"attention_backward {of_a_layer['attention_mma_backward']},",
        f"both projections {of_a_layer['project_warpgroup']},", f"both weight_grads {of_a_layer['weight_grads']},",
        f"input_grad {of_a_layer['input_grad_warpgroup']},", f"feedforward {of_a_layer['feedforward_warpgroup']},",
        f"attention {of_a_layer['attention_mma']},", f"sum_chunks {of_a_layer['sum_chunks']}.",
    ):  # fmt: skip
        assert said in text
