"""A fixed sweep of calls over every family, recorded, so that two versions of the library can be compared.

    python benchmarks/fingerprint.py record before.json              # on a GPU: bits, device time and host time
    python benchmarks/fingerprint.py record before.json --simulated  # without one: machine code, grids and arguments
    python benchmarks/fingerprint.py compare --before before.json --after after.json

A refactoring changes none of them. Results are hashed with their gradients; inputs are drawn from a seed. On a GPU all
processes compile and hash side by side first; then one process times. Record both versions twice, in turn, and compare
with several files a side: the least of a case's times counts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NUMBERS = ((BF16, None), (F16, None), (F32, "ieee"), (F32, "tf32"))
_SLOWER = 1.02  # of device time: what counts as a difference

Run = Callable[[], tuple[torch.Tensor, ...]]
allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def tensor(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
    return allocate(shape, dtype).requires_grad_(grad)


def trained(result: Any, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results and the gradients of the leaves."""
    results = [each for each in (result if isinstance(result, tuple) else (result,)) if isinstance(each, torch.Tensor)]
    differentiable = [each for each in results if each.requires_grad]
    grads = torch.autograd.grad(differentiable, leaves, [torch.ones_like(each) for each in differentiable])
    return *[each.detach() for each in results], *grads


def cases() -> Iterator[tuple[str, Callable[[], Run]]]:
    """Name, and what makes the call: its tensors are made once."""
    import isogemm

    for n, k in ((4096, 4096), (1024, 4096), (1536, 8960), (14336, 4096), (5003, 768), (96, 72), (576, 1536)):
        for m in (1, 4, 16, 64, 256, 1000, 4096):
            yield f"gemm linear {m}x{n}x{k}", partial(_linear, m, n, k, BF16, None, False)
    for dtype, precision in (*NUMBERS[1:], (F32, "tf32x3")):
        for m, n, k in ((1, 1024, 4096), (300, 5003, 768), (4096, 1024, 4096)):
            yield f"gemm linear {m}x{n}x{k} {dtype} {precision}", partial(_linear, m, n, k, dtype, precision, False)
    for dtype, precision in NUMBERS:
        for m, n, k in ((64, 512, 768), (3000, 1024, 4096), (9000, 96, 72), (130, 4096, 1024)):
            yield f"gemm step {m}x{n}x{k} {dtype} {precision}", partial(_linear, m, n, k, dtype, precision, True)
    for name, entry in isogemm.epilogues.ACTIVATIONS.items():
        for dtype, precision in NUMBERS[:3]:
            for dropout in (0.0, 0.25):
                make = partial(_activated, name, bool(entry.gate), dtype, precision, dropout)
                yield f"fused {name} {dtype} dropout {dropout}", make
    for m in (1, 40, 2000):
        yield f"fused operands {m}", partial(_operands, m)
        for activation in ("gelu", "relu", "swiglu"):
            yield f"fused mlp {activation} {m}", partial(_mlp, m, activation)
    for dtype, precision in NUMBERS:
        for sizes in ((1024, 12, 12, 64), (65536, 12, 64, 12), (500, 32, 32, 32), (1000, 64, 64, 64), (7, 5, 3, 2)):
            yield f"tiny {sizes} {dtype} {precision}", partial(_bmm, *sizes, dtype, precision)
    for sizes in (
        (1280, 5, 64, 4, 256), (896, 42, 16, 4, 128), (896, 42, 128, 16, 256), (64, 64, 128, 16, 512),
        (13, 2, 16, 4, 4), (7, 128, 256, 8, 1024), (33, 17, 48, 3, 100), (448, 21, 96, 6, 384),
        (32, 197, 384, 6, 1536), (512, 11, 192, 8, 384),
    ):  # fmt: skip
        for dtype, precision in NUMBERS:
            yield f"encoder {sizes} {dtype} {precision}", partial(_layer, sizes, dtype, precision, {})
    dropout = isogemm.EncoderDropout
    for sizes in ((896, 42, 16, 4, 128), (1280, 5, 64, 4, 256), (64, 64, 128, 16, 512), (12, 128, 256, 8, 1024)):
        for options in (
            {"norm": "rms_norm"}, {"norm_first": True}, {"norm_first": True, "residual_normed": True},
            {"activation": "gelu"}, {"activation": "silu"}, {"dropout": 0.1}, {"dropout": dropout(0.1)},
            {"dropout": dropout(0, 0.1, 0, 0.2), "norm_first": True}, {"is_causal": True}, {"return_scores": True},
            {"return_scores": "factors"}, {"norm": "batch_norm"}, {"norm": "batch_norm", "norm_first": True},
        ):  # fmt: skip
            for dtype, precision in (NUMBERS[0], NUMBERS[3]):
                named = " ".join(f"{name}={value}" for name, value in options.items())
                yield f"encoder {sizes} {dtype} {named}", partial(_layer, sizes, dtype, precision, options)


def _linear(m: int, n: int, k: int, dtype: torch.dtype, precision: str | None, train: bool) -> Run:
    import isogemm

    x, weight, bias = (tensor(*shape, dtype=dtype, grad=train) for shape in ((m, k), (n, k), (n,)))
    if not train:
        return lambda: (isogemm.linear(x, weight, bias, precision=precision),)
    return lambda: trained(isogemm.linear(x, weight, bias, precision=precision), x, weight, bias)


def _activated(activation: str, gated: bool, dtype: torch.dtype, precision: str | None, dropout_p: float) -> Run:
    import isogemm

    x, weight, bias = (tensor(*shape, dtype=dtype, grad=True) for shape in ((500, 512), (256, 512), (256,)))
    up = {"weight_up": tensor(256, 512, dtype=dtype, grad=True)} if gated else {}
    options: Any = {"activation": activation, "dropout_p": dropout_p, "precision": precision, **up}

    def run() -> tuple[torch.Tensor, ...]:
        return trained(isogemm.linear(x, weight, bias, **options), x, weight, bias, *up.values())

    return run


def _operands(m: int) -> Run:
    import isogemm

    a, b, bias, c, col_scale = (tensor(*shape, grad=True) for shape in ((m, 512), (512, 256), (256,), (m, 256), (256,)))
    row_scale, residual = (tensor(*shape, dtype=F32, grad=True) for shape in ((m,), (m, 256)))
    leaves = (a, b, bias, c, col_scale, row_scale, residual)

    def run() -> tuple[torch.Tensor, ...]:
        result = isogemm.matmul_fused(
            a, b, bias=bias, activation="gelu", alpha=2.0, beta=0.5, c=c, row_scale=row_scale, col_scale=col_scale,
            residual=residual,
        )  # fmt: skip
        return trained(result, *leaves)

    return run


def _mlp(m: int, activation: str) -> Run:
    from isogemm.gemm.api import mlp

    x, weight, down = (tensor(*shape, grad=True) for shape in ((m, 256), (1024, 256), (256, 1024)))
    up = {"weight_up": tensor(1024, 256, grad=True)} if activation == "swiglu" else {}
    return lambda: trained(mlp(x, weight, down, activation=activation, **up), x, weight, down, *up.values())  # type: ignore[arg-type]


def _bmm(batch: int, m: int, n: int, k: int, dtype: torch.dtype, precision: str | None) -> Run:
    import isogemm

    a, b = tensor(batch, m, k, dtype=dtype, grad=True), tensor(batch, k, n, dtype=dtype, grad=True)
    return lambda: trained(isogemm.bmm(a, b, precision=precision), a, b)


def _layer(sizes: tuple[int, ...], dtype: torch.dtype, precision: str | None, options: dict[str, Any]) -> Run:
    import isogemm

    sequences, tokens, d, heads, f = sizes
    shapes = [(3 * d, d), (d, d), (f, d), (d, f), (d,), (d,), (3 * d,), (d,), (f,), (d,), (d,), (d,)]
    shapes = shapes[:-2] if options.get("norm") == "rms_norm" else shapes
    x, *parameters = (tensor(*shape, dtype=dtype, grad=True) for shape in ((sequences, tokens, d), *shapes))
    given = isogemm.EncoderParameters(*parameters)

    def run() -> tuple[torch.Tensor, ...]:
        result = isogemm.encoder_layer(x, given, nhead=heads, precision=precision, **options)
        return trained(result[0] if options.get("return_scores") == "factors" else result, x, *parameters)

    return run


def record_simulated(path: Path, chosen: dict[str, Callable[[], Run]]) -> None:
    global allocate
    import simulated_gpu

    simulated_gpu.install()
    allocate = simulated_gpu.allocate
    found: dict[str, Any] = {}
    for name, make in chosen.items():
        simulated_gpu.restart()
        make()()
        found[name] = simulated_gpu.launches()
        print(name, flush=True)
    _write(path, True, found)


def record_measured(path: Path, chosen: dict[str, Callable[[], Run]], jobs: int, seconds: float) -> None:
    """Hash the results in parallel, for at most so many seconds; then time those cases."""
    end, found = time.monotonic() + seconds, dict[str, Any]()
    with multiprocessing.get_context("spawn").Pool(jobs, _use_gpu) as pool:
        hashed = pool.imap_unordered(_hashed, chosen.items())
        for _ in chosen:
            try:
                name, bits, failure = hashed.next(max(end - time.monotonic(), 0.0))
            except multiprocessing.TimeoutError:
                break
            if failure:
                print(f"failed: {name}: {failure}", flush=True)
            else:
                found[name] = {"bits": bits}
        pool.terminate()
    print(f"{len(found)} of {len(chosen)} cases hashed", flush=True)
    _write(path, False, found)
    _use_gpu()
    for name, make in chosen.items():
        if name in found:
            found[name] |= _times(make())
    _write(path, False, found)


def _write(path: Path, simulated: bool, found: dict[str, Any]) -> None:
    path.write_text(json.dumps({"simulated": simulated, "torch": torch.__version__, "cases": found}, indent=0))


def _use_gpu() -> None:
    global allocate
    allocate = _on_gpu


def _on_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") / max(shape[-1] if shape else 1, 1) ** 0.5).to(dtype)


def _hashed(case: tuple[str, Callable[[], Run]]) -> tuple[str, str, str]:
    """A case's name, a hash of its results, and why it failed if it did."""
    name, make = case
    bits = hashlib.sha256()
    torch.manual_seed(0)
    try:
        run = make()
        torch.manual_seed(0)  # of dropout
        for each in run():
            bits.update(each.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
    except Exception as error:  # the other cases count all the same
        return name, "", repr(error)
    return name, bits.hexdigest(), ""


def _times(run: Run) -> dict[str, Any]:
    """Device time of a call, in a CUDA graph, and host time."""
    from isogemm.bench import timer

    def launch() -> None:
        run()

    device = torch.device("cuda")
    us = timer.measure({"call": [launch]}, device, repeats=7, budget_us=50_000.0)["call"]
    return {"us": us, "host_us": timer.host_time({"call": [launch]}, device, bursts=10)["call"]}


def compare(before: list[Path], after: list[Path]) -> int:
    """Print what differs; the number of cases whose bits or launches do."""
    (old, *old_again), (new, *new_again) = (
        [json.loads(path.read_text()) for path in paths] for paths in (before, after)
    )
    names = [name for name in old["cases"] if name in new["cases"]]
    differing, slower = [], []
    ratios: dict[str, list[float]] = {"us": [], "host_us": []}
    for name in names:
        first, second = old["cases"][name], new["cases"][name]
        if old["simulated"]:
            if first != second:
                differing.append(f"{name}: {_difference(first, second)}")
            continue
        runs = [[record["cases"][name] for record in records if name in record["cases"]] for records in
                ((old, *old_again), (new, *new_again))]  # fmt: skip
        if len({run["bits"] for run in (*runs[0], *runs[1])}) > 1:
            differing.append(f"{name}: bits")
        for what in ("us", "host_us"):
            times = [min(min(run[what]) for run in of if what in run) for of in runs]
            ratios[what].append(times[1] / times[0])
            if times[1] > _SLOWER * times[0]:
                slower.append(f"{name}: {what} {times[0]:.2f}, now {times[1]:.2f} ({times[1] / times[0]:.3f}x)")
    alone = [f"{name}: in one record only" for name in old["cases"].keys() ^ new["cases"].keys()]
    for line in (*alone, *differing, *slower):
        print(line)
    for what, values in ratios.items():
        if values:
            mean = math.exp(sum(map(math.log, values)) / len(values))
            print(f"{what}: {mean:.3f}x (geometric mean), {min(values):.3f} to {max(values):.3f}")
    what = "launches" if old["simulated"] else "bits"
    print(f"{len(names)} cases, {len(differing)} with other {what}, {len(slower)} times over {_SLOWER}x")
    return len(differing)


def _difference(first: list[Any], second: list[Any]) -> str:
    if len(first) != len(second):
        return f"{len(first)} launches, now {len(second)}"
    place = next(place for place, (one, other) in enumerate(zip(first, second, strict=True)) if one != other)
    parts = ("machine code", "grid", "PDL", "warps and shared memory", "arguments")
    changed = [part for part, *pair in zip(parts, first[place], second[place], strict=True) if pair[0] != pair[1]]
    return f"launch {place}: {', '.join(changed)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the sweep")
    recording.add_argument("path", type=Path)
    recording.add_argument("--simulated", action="store_true", help="record launches on a simulated H200")
    recording.add_argument("--only", nargs="*", default=[], help="parts of the names of cases")
    recording.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="processes that hash")
    recording.add_argument("--seconds", type=float, default=3600.0, help="for how long to hash")
    comparing = commands.add_parser("compare", help="compare two versions' records")
    comparing.add_argument("--before", type=Path, nargs="+", required=True)
    comparing.add_argument("--after", type=Path, nargs="+", required=True)
    options = parser.parse_args()
    if options.command == "compare":
        return min(compare(options.before, options.after), 1)
    chosen = {name: make for name, make in cases() if not options.only or any(each in name for each in options.only)}
    if options.simulated:
        record_simulated(options.path, chosen)
    else:
        record_measured(options.path, chosen, options.jobs, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
