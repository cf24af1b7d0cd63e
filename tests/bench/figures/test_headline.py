from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from figures import headline
from isogemm.bench import headline as shipped
from isogemm.bench.store import Row

LATER = {"date": "2026-02-03T00:00:00Z", "commit": "fedcba987654"}


@pytest.fixture
def linear(make_row: Callable[..., Row]) -> Callable[..., Row]:
    """A point of a linear layer; times by variant."""

    def make(op: str = "linear", m: int = 1, env: dict[str, str] | None = None, **us: float) -> Row:
        params = {"m": m, "n": 8, "k": 8, "dtype": "bfloat16"}
        times = {name.replace("_", " "): [each] for name, each in us.items()}
        return replace(make_row(env=env), family="gemm", op=op, params=params, times_us=times)

    return make


def _cold(row: Row) -> Row:
    return replace(row, params={**row.params, "cache": "cold"})


def test_figures_are_ratios_of_times(linear: Callable[..., Row], make_row: Callable[..., Row]) -> None:
    rows = [
        linear(m=1, isogemm=2.0, torch=1.0, fixed_tile=8.0),
        linear(m=2, isogemm=2.0, torch=4.0, fixed_tile=8.0),
        linear("linear other", isogemm=4.0, torch=3.0, env=LATER),
        linear("dX", isogemm=4.0, torch=3.0, env={"commit": "unused"}),
        _cold(make_row(ratio=3.0)),
        make_row(ratio=9.0),
        _cold(make_row(ratio=2.0, env={"gpu": "CPU X"})),
    ]
    run = headline.figure("a training run", "eager", [3.0])
    (gpu,) = headline.recorded(rows, [(run, rows[0].env), (run, {**rows[0].env, "gpu": "GPU Y"})])
    assert gpu.lines == [
        ["linear, bf16, tuned weights", "torch (cuBLAS)", "1.00x", "0.50x to 2.00x", "2"],
        ["linear, bf16, other weights", "torch (cuBLAS)", "0.75x", "", "1"],
        ["linear, bf16", "batch-invariant kernel, one fixed tile", "4.00x", "4.00x to 4.00x", "2"],
        ["bmm of matrices up to 64 x 64", "torch.bmm", "3.00x", "", "1"],
        ["a training run", "eager", "3.00x", "", "1"],
    ]
    assert gpu.source == (
        "GPU X, 2026-01-02 to 2026-02-03: torch 2.11.0, Triton 3.6.0, commits 0123456789ab, fedcba987654."
    )


def test_a_rival_by_another_name(make_row: Callable[..., Row]) -> None:
    """Where torch has a fused call, its eager operations are a variant; elsewhere they are torch itself."""

    def row(op: str, **us: float) -> Row:
        params = {"m": 1, "n": 8, "k": 8, "dtype": "bfloat16"}
        times = {name: [each] for name, each in us.items()}
        return replace(make_row(), family="fused", op=op, params=params, times_us=times)

    rows = [row("bias relu", isogemm=1.0, torch=1.0, eager=2.0), row("bias gelu", isogemm=1.0, torch=8.0)]
    (gpu,) = headline.recorded(rows)
    ((*_, speedup, _, points),) = gpu.lines
    assert (speedup, points) == ("4.00x", "2")


def test_the_newest_measurement_counts(linear: Callable[..., Row]) -> None:
    rows = [linear(isogemm=1.0, torch=9.0), linear(isogemm=1.0, torch=2.0, env=LATER)]
    (gpu,) = headline.recorded(rows)
    assert gpu.lines[0][2] == "2.00x"
    assert gpu.source.endswith("commit fedcba987654.")


def test_a_cpu_has_no_headline(linear: Callable[..., Row]) -> None:
    assert headline.recorded([linear(isogemm=1.0, torch=2.0, env={"gpu": "CPU X"})]) == []


def test_the_table_of_a_document(linear: Callable[..., Row]) -> None:
    made = headline.recorded([linear(m=m, isogemm=1.0, torch=float(m)) for m in (1, 4)])
    assert headline.table(made) == (
        "| isogemm | compared with | speed-up | range | points |\n"
        "| :-- | :-- | --: | --: | --: |\n"
        "| linear, bf16, tuned weights | torch (cuBLAS) | 2.00x | 1.00x to 4.00x | 2 |\n"
        "\n"
        f"{shipped.MEANING}\n"
        "GPU X, 2026-01-02: torch 2.11.0, Triton 3.6.0, commit 0123456789ab.\n"
    )


def test_the_file_is_what_the_package_loads(
    linear: Callable[..., Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = headline.recorded([linear(isogemm=3.0, torch=1.0)])
    (tmp_path / shipped.FILE).write_text(headline.dumps(made))
    monkeypatch.setattr(shipped.resources, "files", lambda package: tmp_path)
    assert shipped.shipped() == made
