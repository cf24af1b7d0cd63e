from __future__ import annotations

from collections.abc import Callable

from isogemm.bench import summary
from isogemm.bench.store import Row
from isogemm.bench.views import FamilyView

VIEW = FamilyView("tiny", "Tiny batched GEMM", ("m", "n", "k"))


def test_cpu_time_is_that_of_the_smallest_batch(make_row: Callable[..., Row]) -> None:
    """A large batch, where both variants wait for the device, does not flatter the mean."""
    rows = [
        make_row(256, (8, 8, 8), cpu={"isogemm": [30.0], "torch": [20.0]}),
        make_row(256, (3, 5, 7), cpu={"isogemm": [48.0], "torch": [20.0]}),
        make_row(65536, (8, 8, 8), cpu={"isogemm": [50.0], "torch": [100.0]}),
    ]
    assert summary.host_cell(rows, VIEW).text == "1.90x (worst 2.40x) at batch 256"
