"""`benchmarks/fingerprint.py` on a simulated GPU: the same launches again, and a change that shows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "fingerprint.py"


def _run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True)


def test_a_record_is_repeatable_and_a_change_shows(tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    for path in (first, second):
        recorded = _run(
            "record", path, "--simulated", "--only", "gemm step 64x", "tiny (7, 5, 3, 2) torch.float32 ieee"
        )
        assert recorded.returncode == 0, recorded.stderr
    same = _run("compare", "--before", first, "--after", second)
    assert (same.returncode, same.stdout.splitlines()[-1].split(",")[:2]) == (0, ["5 cases", " 0 with other launches"])
    record = json.loads(second.read_text())
    name, launches = next(iter(record["cases"].items()))
    launches[0][1] = [1, 1, 1]
    second.write_text(json.dumps(record))
    changed = _run("compare", "--before", first, "--after", second)
    assert changed.returncode == 1
    assert f"{name}: launch 0: grid" in changed.stdout


def _measured(path, **cases):
    """A record of a GPU: of each case its bits, device times and host times."""
    found = {name: dict(zip(("bits", "us", "host_us"), values, strict=True)) for name, values in cases.items()}
    path.write_text(json.dumps({"simulated": False, "torch": "2.11.0", "cases": found}))
    return path


def test_the_least_of_several_records_counts(tmp_path):
    before = _measured(
        tmp_path / "before", linear=("a", [10.0, 11.0], [5.0]), bmm=("b", [4.0], [3.0]), old=("c", [1], [1])
    )
    slow = _measured(tmp_path / "slow", linear=("a", [11.0], [5.0]), bmm=("b", [4.2], [3.0]))
    again = _measured(tmp_path / "again", linear=("a", [10.1], [5.0]))
    compared = _run("compare", "--before", before, "--after", slow, again)
    assert compared.returncode == 0
    assert compared.stdout.splitlines() == [
        "old: in one record only",
        "bmm: us 4.00, now 4.20 (1.050x)",
        "us: 1.030x (geometric mean), 1.010 to 1.050",
        "host_us: 1.000x (geometric mean), 1.000 to 1.000",
        "2 cases, 0 with other bits, 1 times over 1.02x",
    ]
    other = _measured(tmp_path / "other", linear=("z", [10.0], [5.0]))
    assert "linear: bits" in _run("compare", "--before", before, "--after", slow, other).stdout
    assert _run("compare", "--before", before, "--after", other).returncode == 1
