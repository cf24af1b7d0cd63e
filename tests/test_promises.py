"""The README's table of promises on the CPU: see tests/shared/promises."""

import importlib.util
import re
from pathlib import Path

import promises
import pytest
import torch
from promises import Sizes

import isogemm
from isogemm.verify.encoder_reference import EncoderShape
from isogemm.verify.inputs import make_data

TESTS = Path(__file__).parent
PRE = {"norm_first": True, "activation": "gelu"}

SCALE = promises.Scale(
    device="cpu",
    rows=(5, 13),
    weights=(
        Sizes(63, 17),
        Sizes(1000, 65, "transposed", "wide"),
        Sizes(127, 1000),
        Sizes(1, 3, "strided"),
        Sizes(65, 1),
        Sizes(16500, 3),
    ),
    few_weights=(Sizes(63, 127), Sizes(1000, 17, "transposed")),
    batches=(1, 2, 3, 17, 63, 64),
    positions=(3, 17, 65),
    gradient_weights=(Sizes(65, 33), Sizes(17, 127, "transposed"), Sizes(3, 1)),
    encoders=(
        (EncoderShape(5, 17, 96, 3, 100), PRE),
        (EncoderShape(7, 5, 128, 4, 65), {"activation": "relu"}),
        (EncoderShape(4, 33, 64, 4, 32), {**PRE, "norm": "rms_norm", "is_causal": True}),
        (EncoderShape(5, 3, 16, 2, 17), {"norm": "batch_norm", "activation": "gelu"}),
    ),
    encoder_gradients=((EncoderShape(0, 5, 8, 2, 8), PRE), (EncoderShape(0, 128, 8, 2, 16), {"activation": "gelu"})),
    attentions=((70, 24, {}), (67, 16, {"window": 9, "softcap": 5.0})),
)
NUMBERS = ("ieee", "bf16", "fp16")


@pytest.fixture
def scale():
    return SCALE


@pytest.fixture(params=promises.product_cases(NUMBERS), ids="-".join)
def product(request):
    return request.param


@pytest.fixture(params=NUMBERS)
def number(request):
    return request.param


class TestPromises(promises.Promises):
    def test_bmm_is_torchs(self, number):
        """No promise on the CPU: torch serves, and the log says so."""
        a, b = (make_data("normal", (5, 7, 7), seed=i, dtype=promises.NUMBERS[number][0]) for i in range(2))
        with isogemm.dispatch_log() as log:
            result = isogemm.bmm(a, b)
        assert [entry.path for entry in log] == ["torch"]
        assert torch.equal(result, torch.bmm(a, b))


COLUMNS = ["batch", "padding", "chunks", "decode", "micro-batches"]


def _promised(readme):
    """Names of the tests that the table under "## What is promised" asks for."""
    section = re.search(r"^## What is promised\n(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL)
    assert section, "README.md has no section titled ## What is promised"
    lines = [line.strip() for line in section[1].splitlines() if line.strip().startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert header[1:] == COLUMNS
    names = []
    for operation, *cells in rows:
        assert len(cells) == len(COLUMNS), operation
        stem = re.search(r"<!--\s*(\w+)\s*-->$", operation)
        yes = [column.replace("-", "_") for column, cell in zip(COLUMNS, cells, strict=True) if _is_yes(cell)]
        assert stem or not yes, f"{operation!r} promises {yes} and names no tests"
        names += [f"test_{stem[1]}_{column}" for column in yes]
    return names


def _is_yes(cell):
    return re.search(r"\byes\b", cell) is not None


def _tests(cls):
    ends = tuple(f"_{column.replace('-', '_')}" for column in COLUMNS)
    return {name for name in dir(cls) if name.startswith("test_") and name.endswith(ends)}


def test_every_promise_has_its_test():
    """And every test of the table's columns its promise; on the CPU all but those that are a GPU's."""
    named = _promised((TESTS.parent / "README.md").read_text())
    assert len(named) == len(set(named))
    spec = importlib.util.spec_from_file_location("gpu_promises", TESTS / "gpu" / "test_promises.py")
    on_gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(on_gpu)
    assert set(named) == _tests(on_gpu.TestPromises)
    assert set(named) - _tests(promises.TinyPromises) == _tests(TestPromises)


TABLE = """
## What is promised

| operation | batch | padding | chunks | decode | micro-batches |
| --- | --- | --- | --- | --- | --- |
| `linear` <!-- products --> | yes | yes [^1] | - | yes<sup>1</sup> | yes |
| attention, planned | | no | planned | | |

## Another

| x | yes |
"""


def test_the_table_is_read():
    expected = ["test_products_batch", "test_products_padding", "test_products_decode", "test_products_micro_batches"]
    assert _promised(TABLE) == expected
    for wrong in (TABLE.replace("| planned", "| yes", 1), TABLE.replace("decode", "serve"), "## Another"):
        with pytest.raises(AssertionError):
            _promised(wrong)
