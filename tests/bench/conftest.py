from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from isogemm.bench.store import Row

ENV = {
    "commit": "0123456789ab",
    "date": "2026-01-02T03:04:05Z",
    "gpu": "GPU X",
    "driver": "1.2",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "python": "3.12.0",
}


@pytest.fixture
def make_row() -> Callable[..., Row]:
    """A bmm point: torch takes `ratio` times isogemm's `us`, and `peer` times a fixed tile's."""

    def make(
        batch: int = 256,
        shape: tuple[int, int, int] = (12, 12, 64),
        us: float = 4.0,
        ratio: float = 2.0,
        cpu: dict[str, list[float]] | None = None,
        peer: float | None = None,
        env: dict[str, str] | None = None,
        **params: int | str,
    ) -> Row:
        m, n, k = shape
        return Row(
            family="tiny",
            op="bmm",
            params={"batch": batch, "m": m, "n": n, "k": k, "dtype": "float32", "precision": "ieee", **params},
            flops=2.0 * batch * m * n * k,
            bytes=4.0 * batch * (m * k + k * n + m * n),
            info={"path": "tiny"},
            error={"isogemm": 1.5e-7, "torch": 2.5e-7},
            times_us={
                "isogemm": [us, us * 0.9, us * 1.2],
                "torch": [us * ratio] * 3,
                **({} if peer is None else {"fixed tile": [us * ratio / peer]}),
            },
            env={**ENV, **(env or {})},
            cpu_us=cpu or {},
        )

    return make


@pytest.fixture
def ceiling_rows() -> list[Row]:
    """1 TB/s of copy, 10 TFLOP/s of fp32 ieee."""

    def row(op: str, params: dict[str, int | str], flops: float, size: float, us: float) -> Row:
        return Row("ceilings", op, params, flops, size, {}, {"torch": 0.0}, {"torch": [us]}, ENV)

    mm = {"m": 1000, "n": 1000, "k": 1000, "dtype": "float32", "precision": "ieee"}
    return [row("copy", {"bytes": 500_000}, 0.0, 1e6, 1.0), row("mm", mm, 2e9, 1.2e7, 200.0)]


@pytest.fixture
def step_rows(make_row: Callable[..., Row]) -> list[Row]:
    """Training steps of two stacks, in fp32 ieee; of the second little was measured."""

    def row(layers: int, times: dict[str, float], info: dict[str, str]) -> Row:
        params = {"layers": layers, "tokens": 5, "dtype": "float32", "precision": "ieee"}
        made = {name: [us] for name, us in times.items()}
        return replace(
            make_row(), family="encoder", op="training step", params=params, flops=5e9, times_us=made, info=info
        )

    times = {"isogemm": 1000.0, "isogemm eager": 2000.0, "torch": 4000.0, "torch eager": 8000.0}
    info = {"torch call": "torch.compile + graph", "isogemm kept bytes": "512"}
    info |= {f"{name} peak MiB": size for name, size in (("isogemm", "30"), ("torch", "60"), ("torch eager", "120"))}
    return [row(2, times, info), row(3, {"isogemm": 1000.0, "torch": 1500.0}, {})]
