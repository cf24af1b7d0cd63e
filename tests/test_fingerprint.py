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
    same = _run("compare", first, second)
    assert (same.returncode, same.stdout.splitlines()[-1].split(",")[:2]) == (0, ["5 cases", " 0 with other launches"])
    record = json.loads(second.read_text())
    name, launches = next(iter(record["cases"].items()))
    launches[0][1] = [1, 1, 1]
    second.write_text(json.dumps(record))
    changed = _run("compare", first, second)
    assert changed.returncode == 1
    assert f"{name}: launch 0: grid" in changed.stdout
