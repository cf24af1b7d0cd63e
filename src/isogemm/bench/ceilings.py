"""What the device was measured to reach: copy bandwidth and matmul rates, stored like any other case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isogemm.bench.cases import Case, CaseRun, make_params
from isogemm.bench.store import Row
from isogemm.bench.views import number_type
from isogemm.verify.precision import fp32_precision

FAMILY = "ceilings"

# Error relative to the largest result, about twice the rounding unit of what is multiplied or stored.
_TOLERANCE = {"bf16": 2.0**-7, "fp16": 2.0**-10, "fp32 tf32": 2.0**-9, "fp32 ieee": 2.0**-16}


@dataclass(frozen=True)
class Ceilings:
    """Measured ceilings of one device; None or absent where not measured."""

    bytes_per_s: float | None
    flops_per_s: Mapping[str, float]  # by number type

    def bandwidth_fraction(self, row: Row) -> float | None:
        """The row's traffic per second over a copy's."""
        return None if self.bytes_per_s is None else row.bytes_per_s / self.bytes_per_s

    def roof_fraction(self, row: Row) -> float | None:
        """The fraction of the roofline that the row reached."""
        reached = self.bandwidth_fraction(row)
        return None if reached is None else reached / self.bandwidth_limit(row)

    def arithmetic_us(self, row: Row) -> float | None:
        """Time of the row's arithmetic at the measured matmul rate."""
        rate = self.flops_per_s.get(number_type(row.params))
        return None if rate is None or not row.flops else row.flops / rate * 1e6

    def bandwidth_limit(self, row: Row) -> float:
        """The largest `bandwidth_fraction` that the row's arithmetic allows; 1 where memory is the bound."""
        rate = self.flops_per_s.get(number_type(row.params))
        if rate is None or self.bytes_per_s is None or not row.flops:
            return 1.0
        return min(1.0, rate / row.flops * row.bytes / self.bytes_per_s)


def read(rows: Iterable[Row], gpu: str) -> Ceilings:
    """The ceilings among the rows of a GPU."""
    mine = [row for row in rows if row.family == FAMILY and row.gpu == gpu]
    copies = [row.bytes_per_s for row in mine if row.op == "copy"]
    rates = {number_type(row.params): row.flops_per_s for row in mine if row.op == "mm"}
    return Ceilings(max(copies, default=None), rates)


def cases(device: torch.device) -> Sequence[Case]:
    """The ceilings to measure on a device; torch is the only variant."""
    if device.type != "cuda":
        return [_copy(64 << 20), _mm(1024, "float32", "ieee")]
    numbers = (8192, "bfloat16"), (8192, "float16"), (8192, "float32", "tf32"), (4096, "float32", "ieee")
    return [_copy(min(1 << 30, torch.cuda.mem_get_info(device)[0] // 8)), *(_mm(*number) for number in numbers)]


def _copy(size: int) -> Case:
    def build(device: torch.device) -> CaseRun:
        source = torch.rand(size // 4, device=device)
        target = torch.full_like(source, torch.nan)

        # Not copy_: in a graph it is a memcpy node, 2.7 TB/s on an H200 where a kernel reaches 4.3.
        def copy() -> Tensor:
            return torch.mul(source, 1.0, out=target)

        def check() -> dict[str, float]:
            if not torch.equal(copy(), source):
                raise AssertionError("the copy differs from its source")
            return {"torch": 0.0}

        return CaseRun({"torch": [copy]}, check, {"path": "mul"})

    return Case(FAMILY, "copy", {"bytes": size // 4 * 4}, 0.0, 2.0 * (size // 4 * 4), build)


def _mm(size: int, dtype: str, precision: str = "") -> Case:
    params = make_params(dtype, precision, m=size, n=size, k=size)
    number = number_type(params)

    def build(device: torch.device) -> CaseRun:
        element = getattr(torch, dtype)
        a, b = (torch.randn(size, size, device=device).to(element) for _ in range(2))
        out = torch.full((size, size), torch.nan, device=device, dtype=element)

        def multiply() -> Tensor:
            with fp32_precision(precision):
                return torch.mm(a, b, out=out)

        def check() -> dict[str, float]:
            rows = slice(0, size, size // 32)
            exact = a[rows].double() @ b.double()
            error = ((multiply()[rows].double() - exact).abs().max() / exact.abs().max()).item()
            most = _TOLERANCE[number]
            if not error <= most:
                raise AssertionError(f"mm {number}: error {error:.2e}, expected at most {most:.2e}")
            return {"torch": error}

        return CaseRun({"torch": [multiply]}, check, {"path": "mm"})

    item = 4 if dtype == "float32" else 2
    return Case(FAMILY, "mm", params, 2.0 * size**3, 3.0 * size**2 * item, build)
