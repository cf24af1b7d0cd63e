from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isogemm.bench import store
from isogemm.bench.store import Row


def test_rows_survive_a_round_trip(make_row: Callable[..., Row], tmp_path: Path) -> None:
    path = tmp_path / "results" / "tiny.jsonl"
    rows = [make_row(256), make_row(1024, cpu={"isogemm": [30.0], "torch": [20.0]}, cache="cold")]
    assert store.append(path, rows[:1]) == 1
    assert store.append(path, rows[1:]) == 1
    assert store.read(path) == rows


def test_a_line_has_the_documented_fields(make_row: Callable[..., Row]) -> None:
    record = json.loads(store.dumps(make_row()))
    fields = ["schema", "family", "op", "params", "flops", "bytes", "info", "error", "times_us", "env"]
    assert list(record) == fields
    assert record["schema"] == 1
    assert list(record["env"]) == ["commit", "date", "gpu", "driver", "torch", "triton", "python"]


def test_rows_before_a_crash_are_kept(make_row: Callable[..., Row], tmp_path: Path) -> None:
    def rows() -> Any:
        yield make_row(256)
        raise RuntimeError("out of memory")

    path = tmp_path / "tiny.jsonl"
    with pytest.raises(RuntimeError, match="out of memory"):
        store.append(path, rows())
    assert store.read(path) == [make_row(256)]


def test_the_newest_row_of_a_point_wins_in_the_order_of_first_appearance(make_row: Callable[..., Row]) -> None:
    old, new = {"date": "2026-01-01T00:00:00Z"}, {"date": "2026-02-01T00:00:00Z"}
    rows = [
        make_row(256, us=3.0, env=new),
        make_row(1024, env=old),
        make_row(256, us=5.0, env=old),
        make_row(256, us=7.0, env={**old, "gpu": "GPU Y"}),
        make_row(1024, us=9.0, env=old),
    ]
    assert store.newest(rows) == [rows[0], rows[4], rows[3]]


def test_params_in_another_order_are_the_same_point(make_row: Callable[..., Row]) -> None:
    row = make_row()
    other = replace(row, params=dict(reversed(row.params.items())))
    assert store.newest([row, other]) == [other]


def test_derived_figures(make_row: Callable[..., Row]) -> None:
    row = make_row(us=4.0, ratio=2.5, cpu={"isogemm": [30.0, 31.0, 90.0], "torch": [20.0, 10.0, 62.0]})
    assert row.us == {"isogemm": 4.0, "torch": 10.0}
    assert row.speedup == row.speedup_of("isogemm") == 2.5
    assert row.speedup_of("fixed tile") is None
    assert make_row(us=4.0, ratio=2.0, peer=0.5).speedup_of("fixed tile") == 0.5
    assert row.cpu_ratio == 31.0 / 20.0
    assert row.bytes_per_s == row.bytes / 4e-6
    assert row.flops_per_s == row.flops / 4e-6


def change(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda record: {**record, **fields}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change(schema=2), "schema: expected 1, got 2"),
        (change(extra=1), "unexpected keyword argument 'extra'"),
        (lambda record: {k: v for k, v in record.items() if k != "env"}, "missing .* 'env'"),
        (change(flops=math.inf), "expected finite numbers, got Infinity"),
        (change(times_us={"torch": []}), "expected lists of positive times"),
        (change(times_us={"torch": [0.0]}), "expected lists of positive times"),
        (change(times_us={}), "times_us: expected at least one variant"),
        (change(times_us=[1.0]), "not a measurement"),
        (change(cpu_us={"torch": 1.0}), "not a measurement"),
        (change(env={"gpu": "GPU X"}), "env: expected commit, date"),
        (change(error={"torch": math.nan}), "expected finite numbers, got NaN"),
        (lambda record: [record], "expected an object, got list"),
    ],
)
def test_a_bad_row_is_refused_with_its_file_and_line(
    make_row: Callable[..., Row], tmp_path: Path, spoil: Callable[[dict[str, Any]], Any], message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    good = store.dumps(make_row())
    path.write_text(f"{good}\n{json.dumps(spoil(json.loads(good)))}\n")
    with pytest.raises(ValueError, match=rf"bad\.jsonl:2: .*{message}"):
        store.read(path)


@pytest.mark.parametrize("line", ["{", "", '{"schema": 1'])
def test_a_line_that_is_not_json_is_refused(make_row: Callable[..., Row], tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{store.dumps(make_row())}\n{line}\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: not JSON"):
        store.read(path)


def test_a_bad_row_is_not_written(make_row: Callable[..., Row], tmp_path: Path) -> None:
    path = tmp_path / "tiny.jsonl"
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.append(path, [replace(make_row(), error={"isogemm": math.nan})])
    with pytest.raises(ValueError, match="positive times"):
        store.append(path, [replace(make_row(), times_us={"isogemm": [0.0]})])
    assert not path.exists()


def test_results_are_kept_by_gpu_and_family() -> None:
    path = store.results_file(Path("results"), "NVIDIA H200 (80GB)", "tiny")
    assert path == Path("results/h200-80gb/tiny.jsonl")
