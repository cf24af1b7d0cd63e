"""A fixed sweep of calls over every family, recorded, so that two versions of the library can be compared.

    python benchmarks/fingerprint.py record before.json              # on a GPU: hashes of results and gradients
    python benchmarks/fingerprint.py record before.json --simulated  # without one: machine code, grids and arguments
    python benchmarks/fingerprint.py compare before.json after.json
    python benchmarks/fingerprint.py time times.json --before TREE --after TREE  # on a GPU: device and host time

A refactoring changes none of them. Inputs are drawn from a seed. `time` takes two checkouts: a process for each, which
time every case in turn. The least of a case's times counts; a case that is slower afterwards is timed again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

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


def record_bits(path: Path, chosen: dict[str, Callable[[], Run]], jobs: int, seconds: float) -> None:
    """Hash the results, in parallel, for at most so many seconds."""
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
                found[name] = bits
        pool.terminate()
    print(f"{len(found)} of {len(chosen)} cases hashed", flush=True)
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


class Timed(NamedTuple):
    """Microseconds per call: in a CUDA graph, where launches do not count, and of the host."""

    us: list[float]
    host_us: list[float]


def serve(chosen: dict[str, Callable[[], Run]]) -> None:
    """Time the cases whose names come in. Answers with `Timed`, or null for a case that fails."""
    from isogemm.bench import timer

    _use_gpu()
    device = torch.device("cuda")
    for line in sys.stdin:
        try:
            call: dict[str, Any] = {"call": [chosen[line.rstrip("\n")]()]}
            us = timer.measure(call, device, repeats=5, budget_us=20_000.0)["call"]
            print(json.dumps([us, timer.host_time(call, device, bursts=4)["call"]]), flush=True)
        except Exception as error:  # the other cases count all the same
            print(f"failed: {line.rstrip()}: {error!r}", file=sys.stderr)
            print("null", flush=True)


def record_times(path: Path, chosen: dict[str, Callable[[], Run]], trees: dict[str, Path], seconds: float) -> None:
    """Time both versions in turn, two rounds, then twice more what was slower, for at most so many seconds.

    In a random order: what the limit leaves is a fair sample.
    """
    end = time.monotonic() + seconds
    servers = {
        version: subprocess.Popen(
            ["env", f"PYTHONPATH={tree}/src", sys.executable, __file__, "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for version, tree in trees.items()
    }
    found: dict[str, dict[str, Timed]] = {}
    order = random.Random(0).sample(list(chosen), len(chosen))
    for again in (False, True):
        names = [name for name in found if slower(found[name])] if again else order
        for name in names:
            if time.monotonic() > end:
                break
            of_case = found.get(name) or {version: Timed([], []) for version in trees}
            for version in [*trees, *trees]:
                stdin, stdout = cast(IO[str], servers[version].stdin), cast(IO[str], servers[version].stdout)
                print(name, file=stdin, flush=True)
                answer = json.loads(stdout.readline())
                if answer is None:
                    break
                for times, more in zip(of_case[version], answer, strict=True):
                    times += more
            else:
                found[name] = of_case
    path.write_text(json.dumps({name: {v: t._asdict() for v, t in of.items()} for name, of in found.items()}, indent=0))
    print(*summary(found), sep="\n")


def slower(of_case: dict[str, Timed]) -> dict[str, tuple[float, float]]:
    """The kinds of time that are longer afterwards: the least before and after."""
    least = {
        kind: (min(getattr(of_case["before"], kind)), min(getattr(of_case["after"], kind))) for kind in Timed._fields
    }
    return {kind: times for kind, times in least.items() if times[1] > _SLOWER * times[0]}


def summary(found: dict[str, dict[str, Timed]]) -> Iterator[str]:
    for name, of_case in found.items():
        for kind, (before, after) in slower(of_case).items():
            yield f"{name}: {kind} {before:.2f}, now {after:.2f} ({after / before:.3f}x)"
    for kind in Timed._fields:
        ratios = [min(getattr(of["after"], kind)) / min(getattr(of["before"], kind)) for of in found.values()]
        over = sum(ratio > _SLOWER for ratio in ratios)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        yield (
            f"{kind}: {mean:.3f}x (geometric mean of {len(ratios)} cases), {min(ratios):.3f} to {max(ratios):.3f}, "
            f"{over} over {_SLOWER}x"
        )


def compare(before: Path, after: Path) -> int:
    """Print what differs; the number of cases whose bits or launches do."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    names = [name for name in old["cases"] if name in new["cases"]]
    differing = [name for name in names if old["cases"][name] != new["cases"][name]]
    for name in old["cases"].keys() ^ new["cases"].keys():
        print(f"{name}: in one record only")
    for name in differing:
        print(f"{name}: {_difference(old['cases'][name], new['cases'][name]) if old['simulated'] else 'bits'}")
    print(f"{len(names)} cases, {len(differing)} with other {'launches' if old['simulated'] else 'bits'}")
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
    recording = commands.add_parser("record", help="hash the sweep's results, or record its launches")
    recording.add_argument("--simulated", action="store_true", help="record launches on a simulated H200")
    recording.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="processes that hash")
    timing = commands.add_parser("time", help="time two checkouts of the library in turn")
    for version in ("before", "after"):
        timing.add_argument(f"--{version}", type=Path, required=True, help="a checkout")
    for each in (recording, timing):
        each.add_argument("path", type=Path)
        each.add_argument("--only", nargs="*", default=[], help="parts of the names of cases")
        each.add_argument("--seconds", type=float, default=3600.0, help="for how long")
    comparing = commands.add_parser("compare", help="compare two records")
    for version in ("before", "after"):
        comparing.add_argument(version, type=Path)
    commands.add_parser("serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.command == "compare":
        return min(compare(options.before, options.after), 1)
    only = getattr(options, "only", [])
    chosen = {name: make for name, make in cases() if not only or any(each in name for each in only)}
    if options.command == "serve":
        serve(chosen)
    elif options.command == "time":
        record_times(options.path, chosen, {"before": options.before, "after": options.after}, options.seconds)
    elif options.simulated:
        record_simulated(options.path, chosen)
    else:
        record_bits(options.path, chosen, options.jobs, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
