from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from isogemm.bench import timer

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def test_samples_are_interleaved_and_the_warmup_does_not_count() -> None:
    order: list[str] = []

    def sampler(name: str) -> timer.Sampler:
        return lambda: (order.append(name), float(len(order)))[1]

    times = timer.interleave({"isogemm": sampler("isogemm"), "torch": sampler("torch")}, repeats=3, warmup=1)
    assert order == ["isogemm", "torch"] * 4
    assert times == {"isogemm": [3.0, 5.0, 7.0], "torch": [4.0, 6.0, 8.0]}


class Clock:
    """Time that passes in calls alone: how long a busy machine sleeps is anybody's guess."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(timer, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def sleep(self, seconds: float) -> torch.Tensor:
        self.now += seconds
        return torch.empty(0)


def test_measure_on_cpu_gives_microseconds_per_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    variants = {"isogemm": [lambda: clock.sleep(2**-10)] * 2, "torch": [lambda: clock.sleep(2**-8)] * 2}
    times = timer.measure(variants, CPU, repeats=3, warmup=0)
    assert times == {"isogemm": [1e6 * 2**-10] * 3, "torch": [1e6 * 2**-8] * 3}


def test_measure_walks_every_rotated_set_equally() -> None:
    calls = [0, 0, 0]

    def thunk(index: int) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            calls[index] += 1
            return torch.empty(0)

        return call

    timer.measure({"torch": [thunk(i) for i in range(3)]}, CPU, repeats=2)
    assert len(set(calls)) == 1


@pytest.mark.parametrize(
    ("call_us", "calls", "passes"),
    [(50.0, 1, 4), (50.0, 8, 1), (1000.0, 1, 1), (0.001, 1, 4096), (0.001, 100, 40), (0.001, 5000, 1)],
)
def test_passes_fill_the_sample_within_the_cap(call_us: float, calls: int, passes: int) -> None:
    assert timer._passes(call_us, calls, sample_us=200.0) == passes


@pytest.mark.parametrize(("budget_us", "repeats"), [(1e9, 8), (75_000.0, 7), (1.0, 5)])
def test_slow_walks_are_measured_fewer_times(budget_us: float, repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(call_ms=2.5)
    cuda.install(monkeypatch)

    def thunk() -> torch.Tensor:
        if cuda.capturing:
            cuda.capturing.recorded.append("call")
        return torch.empty(0)

    times = timer.measure({"isogemm": [thunk], "torch": [thunk]}, CUDA, repeats=8, budget_us=budget_us)
    assert times == {"isogemm": [2500.0] * repeats, "torch": [2500.0] * repeats}


def test_host_time_is_per_call_and_interleaved() -> None:
    order: list[str] = []

    def thunk(name: str) -> Callable[[], torch.Tensor]:
        return lambda: (order.append(name), torch.empty(0))[1]

    variants = {"isogemm": [thunk("i")], "torch": [thunk("t")]}
    times = timer.host_time(variants, CPU, bursts=2, burst=3, warmup=1)
    assert order == (["i"] * 3 + ["t"] * 3) * 3
    assert [len(raw) for raw in times.values()] == [2, 2]
    assert all(us > 0 for raw in times.values() for us in raw)


def test_the_collector_is_back_on_after_an_error() -> None:
    def broken() -> torch.Tensor:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        timer.host_time({"torch": [broken]}, CPU)
    assert gc.isenabled()


@pytest.mark.parametrize("variants", [{}, {"torch": []}])
def test_variants_without_thunks_are_refused(variants: dict[str, list[Callable[[], torch.Tensor]]]) -> None:
    with pytest.raises(ValueError, match="variants"):
        timer.measure(variants, CPU)


def test_no_repeats_are_refused() -> None:
    with pytest.raises(ValueError, match="repeats: expected at least 1, got 0"):
        timer.measure({"torch": [lambda: torch.empty(0)]}, CPU, repeats=0)


def test_rotations_on_cpu_exceed_the_cache_within_the_cap() -> None:
    assert timer.rotations(1 << 20, CPU) == 128
    assert timer.rotations(1 << 40, CPU) == 1
    assert timer.rotations(16, CPU, most=10) == 10
    assert timer.rotations(0, CPU) == 1


class FakeCuda:
    """Stands for torch.cuda: a graph records the calls it captures; a replay takes `call_ms` for each."""

    def __init__(self, call_ms: float) -> None:
        self.call_ms = call_ms
        self.clock = 0.0
        self.capturing: FakeGraph | None = None
        self.replays: list[FakeGraph] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = cuda.clock

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        stream = SimpleNamespace(wait_stream=lambda other: None)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "Stream", lambda: stream)
        patch.setattr(torch.cuda, "current_stream", lambda: stream)
        patch.setattr(torch.cuda, "stream", nothing)
        patch.setattr(torch.cuda, "device", nothing)
        patch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self))
        patch.setattr(torch.cuda, "graph", self.capture)

    @contextmanager
    def capture(self, graph: FakeGraph) -> Iterator[None]:
        self.capturing = graph
        yield
        self.capturing = None


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.recorded: list[str] = []

    def replay(self) -> None:
        self.cuda.replays.append(self)
        self.cuda.clock += self.cuda.call_ms * len(self.recorded)


@contextmanager
def nothing(_: object) -> Iterator[None]:
    yield


def test_cuda_variants_are_one_graph_each_replayed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(call_ms=2**-7)  # exact in binary
    cuda.install(monkeypatch)
    eager: list[str] = []

    def thunk(name: str) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            (cuda.capturing.recorded if cuda.capturing else eager).append(name)
            return torch.empty(0)

        return call

    variants = {"isogemm": [thunk("i0"), thunk("i1")], "torch": [thunk("t0"), thunk("t1")]}
    times = timer.measure(variants, CUDA, repeats=2, warmup=1, sample_us=200.0)
    assert eager == ["i0", "i1", "t0", "t1"]
    timed = cuda.replays[-12:]
    ours, theirs = timed[0], timed[2]
    assert timed == [ours, ours, theirs, theirs] * 3
    assert ours.recorded == ["i0", "i1"] * 13
    assert theirs.recorded == ["t0", "t1"] * 13
    assert times == {"isogemm": [7.8125, 7.8125], "torch": [7.8125, 7.8125]}


def test_eager_variants_are_launched_again_beside_the_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(call_ms=1.0)
    cuda.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    clock = Clock(monkeypatch)
    order: list[str] = []

    def graphed() -> torch.Tensor:
        if cuda.capturing:
            cuda.capturing.recorded.append("call")
        else:
            order.append("graphed")
        return torch.empty(0)

    def eager() -> torch.Tensor:
        assert cuda.capturing is None
        order.append("eager")
        return clock.sleep(2**-7)

    times = timer.measure(
        {"torch": [graphed], "torch eager": [eager]}, CUDA, repeats=2, warmup=1, eager=["torch eager"]
    )
    assert order == ["graphed", *["eager"] * (2 + 3 * 2)]
    assert times == {"torch": [1000.0] * 2, "torch eager": [1e6 * 2**-7] * 2}


def test_cuda_outputs_of_a_walk_are_alive_together(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(call_ms=1.0).install(monkeypatch)
    graph = timer._Graph([lambda: torch.zeros(4), lambda: torch.ones(4)], passes=3)
    assert graph.calls == 6
    assert [output.sum().item() for output in graph.outputs if output is not None] == [0.0, 4.0]


@pytest.mark.parametrize(
    ("bytes_per_set", "free", "expected"),
    [(1 << 20, 1 << 40, 200), (1 << 30, 1 << 40, 1), (1 << 20, 1 << 25, 8), (1 << 20, 0, 1), (64, 1 << 40, 2048)],
)
def test_rotations_on_cuda(monkeypatch: pytest.MonkeyPatch, bytes_per_set: int, free: int, expected: int) -> None:
    properties = SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 1 << 41))
    assert timer.rotations(bytes_per_set, CUDA) == expected
