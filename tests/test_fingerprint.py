"""`benchmarks/fingerprint.py` on a simulated GPU: the same launches again, and a change that shows."""

import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import geometric_mean

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "fingerprint.py"


@pytest.fixture
def fingerprint():
    spec = importlib.util.spec_from_file_location("fingerprint", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def _bits(path, **cases):
    path.write_text(json.dumps({"simulated": False, "torch": "2.11.0", "cases": cases}))
    return path


def test_other_bits_show(tmp_path):
    before = _bits(tmp_path / "before", linear="a", bmm="b", old="c")
    after = _bits(tmp_path / "after", linear="z", bmm="b")
    compared = _run("compare", before, after)
    assert compared.returncode == 1
    assert compared.stdout.splitlines() == ["old: in one record only", "linear: bits", "2 cases, 1 with other bits"]
    assert _run("compare", before, before).returncode == 0


def test_the_least_times_count(fingerprint):
    timed = fingerprint.Timed
    found = {
        "linear": {"before": timed([10.0, 11.0], [5.0]), "after": timed([11.0, 10.1], [5.0])},
        "bmm": {"before": timed([4.0], [3.0]), "after": timed([4.2], [3.0])},
    }
    assert [name for name, times in found.items() if fingerprint.slower(times)] == ["bmm"]
    assert list(fingerprint.summary(found)) == [
        "bmm: us 4.00, now 4.20 (1.050x)",
        "us: 1.030x (geometric mean of 2 cases), 1.010 to 1.050, 1 over 1.02x",
        "host_us: 1.000x (geometric mean of 2 cases), 1.000 to 1.000, 0 over 1.02x",
    ]


def test_two_checkouts_are_timed_in_turn(tmp_path, fingerprint, monkeypatch):
    """By processes of their own; a case that is slower afterwards is timed again, one that fails is left out."""
    server = tmp_path / "server.py"
    server.write_text(
        "import os, sys\n"
        "slow = os.environ['PYTHONPATH'] == 'new/src'\n"
        "for line in sys.stdin:\n"
        "    times = [[2.0 if slow and line == 'bmm\\n' else 1.0], [1.0]]\n"
        "    print('null' if slow and line == 'fails\\n' else times, flush=True)\n"
    )
    monkeypatch.setattr(fingerprint, "__file__", str(server))
    path = tmp_path / "times.json"
    fingerprint.record_times(
        path, {"linear": None, "fails": None, "bmm": None}, {"before": "old", "after": "new"}, 60.0
    )
    found = json.loads(path.read_text())
    assert "fails" not in found
    assert found["linear"] == {version: {"us": [1.0] * 2, "host_us": [1.0] * 2} for version in ("before", "after")}
    assert found["bmm"]["before"]["us"] == [1.0] * 4
    assert found["bmm"]["after"]["us"] == [2.0] * 4


def test_what_is_said_of_the_recorded_runs(fingerprint):
    """The figures of the README beside them."""
    folder = ROOT / "benchmarks" / "results" / "h200" / "fingerprint"
    first, second, same, times = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("bits-3905ba9.json", "bits-79e0ef4.json", "same-launches.json", "times.json")
    )
    equal = [name for name, bits in first["cases"].items() if second["cases"][name] == bits]
    ratios = {
        kind: {name: min(of["after"][kind]) / min(of["before"][kind]) for name, of in times.items()}
        for kind in fingerprint.Timed._fields
    }
    of_same = [ratio for name, ratio in ratios["us"].items() if name in same]
    others = [ratio for name, ratio in ratios["us"].items() if name not in same]
    host = ratios["host_us"].values()
    runs = (folder / "gpu-tests.txt").read_text(encoding="utf-8")
    counts = Counter()
    for outcome in dict(re.findall(r" s  (.*?): (.*)", runs)).values():  # a slice in both runs counts once
        for count, kind in re.findall(r"(\d+) (passed|failed|skipped|xfailed)", outcome):
            counts[kind] += int(count)
    text = " ".join((folder / "README.md").read_text(encoding="utf-8").split())
    for said in (
        f"equal in {len(equal)} of {len(first['cases'])} cases", f"{len(same)} cases launch the same machine code",
        f"{len(times)} cases, drawn", f"is {min(of_same):.3f} to {max(of_same):.3f} times", f"the {len(of_same)} cases",
        f"{min(others):.3f} to {max(others):.3f} in the other {len(others)}", f"is {geometric_mean(host):.3f} times",
        f"{min(host):.3f} to {max(host):.3f}, {sum(each > 1.02 for each in host)} cases over",
        f"{counts['passed']} passed, {counts['skipped']} skipped, {counts['xfailed']} expected to fail, none failed",
    ):  # fmt: skip
        assert said in text, said
    assert not counts["failed"]
