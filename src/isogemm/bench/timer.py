"""Times variants in turn: on the device (CUDA graphs), in eager calls, on the host. And measures peak memory."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from isogemm.bench.cases import Thunk

Sampler = Callable[[], float]  # one measurement, in microseconds per call
_Walk = tuple[Sampler, float]  # and what a measurement costs, in microseconds

_CPU_CACHE_BYTES = 32 << 20  # torch does not know the CPU's cache; larger than most per-core shares
_MOST_ROTATIONS = 2048
_LEAST_REPEATS = 5
_EAGER_SAMPLE_US = 10_000.0  # so long that waiting for the last call does not matter
_MOST_CALLS = 4096  # in a measurement
_CACHE_MULTIPLE = 4  # a cyclic walk over 4x the cache finds ~2 % of it there, even under random replacement


def rotations(bytes_per_set: float, device: torch.device, most: int = _MOST_ROTATIONS) -> int:
    """Number of input sets to rotate so that each is cold in the last-level cache when its turn comes.

    Bounded by `most` and by a quarter of the device's free memory.
    """
    if bytes_per_set <= 0:
        return 1
    cache: float = _CPU_CACHE_BYTES
    memory = math.inf
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        memory = torch.cuda.mem_get_info(device)[0] / 4
    wanted = math.ceil(_CACHE_MULTIPLE * cache / bytes_per_set)
    return int(max(1, min(wanted, most, memory // bytes_per_set)))


def measure(
    variants: Mapping[str, Sequence[Thunk]], device: torch.device, *, repeats: int = 20, warmup: int = 3,
    sample_us: float = 200.0, budget_us: float = 250_000.0, eager: Collection[str] = (),
) -> dict[str, list[float]]:  # fmt: skip
    """Time every variant: `repeats` raw measurements each, in microseconds per call.

    A measurement walks the variant's thunks as often as it takes to last `sample_us`, within 4096 calls. On
    CUDA the walk is one graph; elsewhere, and for the variants in `eager`, it is a loop, timed to the end of its work.
    Where all variants together would pass `budget_us`, they are measured fewer times, but at least 5 where `repeats`
    allows.
    """
    _require_thunks(variants)
    gpu = device.type == "cuda"
    with torch.cuda.device(device) if gpu else nullcontext(), _collector_paused():
        walks = {
            name: _graph_walk(thunks, sample_us)
            if gpu and name not in eager
            else _loop_walk(thunks, device, _EAGER_SAMPLE_US if gpu else sample_us)
            for name, thunks in variants.items()
        }
        round_us = sum(cost_us for _, cost_us in walks.values())
        affordable = max(_LEAST_REPEATS, int(budget_us / max(round_us, 1e-3)))
        if affordable < repeats:
            repeats, warmup = affordable, min(warmup, 1)
        return interleave({name: sample for name, (sample, _) in walks.items()}, repeats, warmup)


def host_time(
    variants: Mapping[str, Sequence[Thunk]], device: torch.device, *, bursts: int = 30, burst: int = 50, warmup: int = 2
) -> dict[str, list[float]]:
    """CPU time of an eager call of each variant's first thunk: one value per burst, in microseconds per call.

    A burst stays well below the depth of the launch queue (1024), so that no call waits for the device.
    """
    _require_thunks(variants)
    samplers = {name: partial(_loop_us, [thunks[0]] * burst, device, wait=False) for name, thunks in variants.items()}
    with _collector_paused():
        times = interleave(samplers, bursts, warmup)
    _synchronize(device)
    return times


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Peak memory that a step allocates, beyond what was allocated before it."""
    step()  # libraries' workspaces, and compilation
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def interleave(samplers: Mapping[str, Sampler], repeats: int, warmup: int) -> dict[str, list[float]]:
    """Sample the variants in turn, `repeats` rounds, after `warmup` rounds that do not count."""
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1, got {repeats}")
    times: dict[str, list[float]] = {name: [] for name in samplers}
    for turn in range(warmup + repeats):
        for name, sample in samplers.items():
            elapsed = sample()
            if turn >= warmup:
                times[name].append(elapsed)
    return times


class _Graph:
    """`passes` walks over the thunks, captured in one CUDA graph."""

    def __init__(self, thunks: Sequence[Thunk], passes: int) -> None:
        self.calls = passes * len(thunks)
        self.graph = torch.cuda.CUDAGraph()
        # Every set keeps its own output through a walk: were it dropped at once, the next set would write to
        # the same memory, hot in the cache.
        self.outputs: list[Tensor | None] = [None] * len(thunks)
        with torch.cuda.graph(self.graph):
            for _ in range(passes):
                for index, thunk in enumerate(thunks):
                    self.outputs[index] = thunk()
        self.start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def sample(self) -> float:
        # The first replay hides the launch of the timed one and sets the caches as this variant leaves them.
        self.graph.replay()
        self.start.record()
        self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end)) * 1e3 / self.calls


def _graph_walk(thunks: Sequence[Thunk], sample_us: float) -> _Walk:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile, and let libraries initialise, outside the capture
        for thunk in thunks:
            thunk()
    torch.cuda.current_stream().wait_stream(stream)
    graph = _Graph(thunks, 1)
    graph.sample()
    call_us = graph.sample()
    passes = _passes(call_us, len(thunks), sample_us)
    if passes > 1:
        del graph  # its memory, before the next is captured
        graph = _Graph(thunks, passes)
    return graph.sample, 2 * call_us * graph.calls


def _loop_walk(thunks: Sequence[Thunk], device: torch.device, sample_us: float) -> _Walk:
    _loop_us(thunks, device)
    call_us = _loop_us(thunks, device)
    walk = list(thunks) * _passes(call_us, len(thunks), sample_us)
    return partial(_loop_us, walk, device), call_us * len(walk)


def _loop_us(thunks: Sequence[Thunk], device: torch.device, *, wait: bool = True) -> float:
    """Call the thunks, with `wait` also for the end of their work; return microseconds per call."""
    _synchronize(device)
    start = time.perf_counter()
    for thunk in thunks:
        thunk()
    if wait:
        _synchronize(device)
    return (time.perf_counter() - start) * 1e6 / len(thunks)


def _passes(call_us: float, calls: int, sample_us: float) -> int:
    wanted = math.ceil(sample_us / max(call_us * calls, 1e-3))
    return max(1, min(wanted, _MOST_CALLS // calls))


def _require_thunks(variants: Mapping[str, Sequence[Thunk]]) -> None:
    empty = [name for name, thunks in variants.items() if not thunks]
    if empty or not variants:
        raise ValueError(f"variants: expected a thunk or more for each, got none for {', '.join(empty) or 'any'}")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _collector_paused() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
