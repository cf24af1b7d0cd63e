"""Cases and demo of the tiny family."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from isogemm.bench import demo as demos
from isogemm.bench import timer
from isogemm.bench.cases import Case, CaseRun, first, make_params, rotated, served_by, use_precision
from isogemm.bench.demo import Bits, DemoResult
from isogemm.bench.views import FamilyView
from isogemm.tiny import configs
from isogemm.tiny.api import bmm
from isogemm.verify.inputs import make_operands
from isogemm.verify.tiny import largest_errors

VIEW = FamilyView("tiny", "Tiny batched GEMM", ("m", "n", "k"))

SHAPES = (  # m, n, k
    (12, 12, 64), (12, 64, 12), (16, 16, 16), (32, 32, 32), (64, 64, 64), (42, 42, 8), (42, 8, 42), (42, 42, 4),
    (5, 5, 16), (5, 16, 5), (3, 5, 7), (48, 24, 40), (8, 8, 8), (64, 64, 16),
)  # fmt: skip
BATCHES = (256, 1024, 14336, 65536)
NUMBERS = (("float32", "ieee"), ("float32", "tf32"), ("bfloat16", ""))
RANDOM_SHAPES = 60  # besides the chosen ones: what the gate gives where nobody looked
NAMED_SHAPES = ((20, 20, 20), (17, 50, 33))  # as the random ones, in every number and batch
RANDOM_BATCHES = (300, 3000, 30000)

Function = Callable[..., Tensor]


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    if quick:
        points = ((12, 12, 64), (42, 42, 8), (8, 8, 8))
        return [_case(256, *shape, "float32", "ieee", "nn", "cold") for shape in points]
    chosen = [
        _case(batch, *shape, dtype, precision, "nn", cache)
        for dtype, precision in NUMBERS
        for cache in (("cold", "hot") if precision == "ieee" else ("cold",))
        for shape in SHAPES
        for batch in BATCHES
    ]
    return [*chosen, *_random_cases()]


def _random_cases() -> Iterator[Case]:
    rng = random.Random(2)
    for index in range(RANDOM_SHAPES):
        dtype, precision = NUMBERS[index % len(NUMBERS)]
        m, n, k = (rng.randint(1, configs.MAX_SIZE) for _ in range(3))
        batch = rng.choice(RANDOM_BATCHES)
        yield _case(batch, m, n, k, dtype, precision, rng.choice(("nn", "nt", "tn")), "cold", name="bmm random")
    for shape, (dtype, precision), batch in product(NAMED_SHAPES, NUMBERS, RANDOM_BATCHES):
        yield _case(batch, *shape, dtype, precision, "nn", "cold", name="bmm random")


def unfitted_shapes() -> set[tuple[int | str, ...]]:
    """m, n and k of the random cases: the tuner fits no rule on them."""
    return {tuple(case.params[axis] for axis in ("m", "n", "k")) for case in _random_cases()}


def _case(
    batch: int, m: int, n: int, k: int, dtype: str, precision: str, layout: str, cache: str, name: str = "bmm"
) -> Case:
    element = getattr(torch, dtype)
    size = element.itemsize * (m * k + k * n + m * n) * batch
    params = make_params(dtype, precision, batch=batch, m=m, n=n, k=k) | {"layout": layout, "cache": cache}

    def build(device: torch.device) -> CaseRun:
        sets = timer.rotations(size, device, most=512) if cache == "cold" else 1
        pairs = list(_rotated(sets, batch, m, n, k, element, layout, device))
        use_precision(precision or "ieee", device)
        variants = rotated({"isogemm": bmm, "torch": torch.bmm}, pairs)
        return CaseRun(variants, lambda: largest_errors(*pairs[0], precision), served_by(variants["isogemm"][0]))

    return Case("tiny", name, params, 2.0 * batch * m * n * k, float(size), build)


def _rotated(
    sets: int, batch: int, m: int, n: int, k: int, dtype: torch.dtype, layout: str, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Operand pairs of their own memory, cut from one random buffer at 256-byte steps."""
    a_size, b_size = (-(-batch * size // 128) * 128 for size in (m * k, k * n))
    buffer = torch.randn(sets * (a_size + b_size), device=device, dtype=dtype)

    def view(at: int, rows: int, columns: int, letter: str) -> Tensor:
        x = buffer[at : at + batch * rows * columns]
        return x.view(batch, columns, rows).mT if letter == "t" else x.view(batch, rows, columns)

    for at in range(0, buffer.numel(), a_size + b_size):
        yield view(at, m, k, layout[0]), view(at + a_size, k, n, layout[1])


def demo(device: torch.device) -> DemoResult:
    """Attention scores of a small model: 1024 products of 12 x 64 and 64 x 12."""
    batch, precision = 1024, "ieee"
    a, b = make_operands("normal", (batch, 12, 64), (batch, 64, 12), seed=0, device=device)
    functions: dict[str, Function] = {"isogemm": partial(bmm, precision=precision), "torch": torch.bmm}
    use_precision(precision, device)
    thunks = first(rotated(functions, [(a, b)]))
    bits: Bits | str = "torch.bmm serves this call, and promises nothing about bits"
    if device.type != "cuda":
        bits = "on a CPU isogemm.bmm is torch.bmm, which promises nothing about bits"
    elif served_by(thunks["isogemm"])["path"] == "tiny":  # alone, a matrix has torch's bits
        bits = demos.count_changes(
            functions, lambda call, at: call(a[at], b[at]), "matrices", batch=batch, sizes=(2, 7)
        )
    title, errors = "bmm [1024, 12, 64] x [1024, 64, 12], fp32 ieee", partial(largest_errors, a, b, precision)
    return demos.result(title, bits, errors, "|A| |B|", thunks, "torch.bmm", device)
