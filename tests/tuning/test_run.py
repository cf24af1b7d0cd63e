"""A run's order, what it keeps and when, and how it ends; times are made up."""

import math
from dataclasses import astuple, replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from isogemm.core import tuned
from isogemm.core.plan import plans
from isogemm.gemm import configs, selection
from isogemm.gemm.kernels import products as kernels
from isogemm.tuning import run, weights
from isogemm.tuning.gemm import FORWARD, Measured
from isogemm.tuning.run import GAIN, TOKENS, Run

GPU = "Some GPU"
FOUND = weights.listed(weights.from_text("4096x14336,1024x4096"), None, None)


def points(tokens=None, backward=False, arch="sm_90", found=FOUND):
    return run.points(found, tokens, backward, arch, 132, GPU)


def last(point):
    """The candidate that Fake makes fastest, whatever was kept since."""
    return run._candidates(replace(point, gpu=""))[-1]


def untuned(point, tokens):
    """What serves where nothing is tuned."""
    return selection.choose(replace(point, tokens=tokens, gpu="").problem).config


class Fake:
    """Measures as told: every config takes 10 us, but for the present one, and the last.

    absent: places of configs without a time. raising: what the call of that number raises.
    """

    def __init__(self, before=10.0, fastest=None, absent=(), raising=None):
        self.visited, self.before, self.fastest, self.absent, self.raising = [], before, fastest, absent, raising or {}

    def __call__(self, point, chosen):
        error = self.raising.get(len(self.visited))
        self.visited.append(point)
        if error is not None:
            raise error
        us = {str(config): 10.0 for config in chosen} | {str(chosen[0]): self.before}
        if self.fastest is not None:
            us[str(last(point))] = self.fastest
        for place in self.absent:
            us.pop(str(chosen[place]), None)
        return Measured({"torch": 20.0} | us, [f"{chosen[place]}: absent" for place in self.absent])


def made(measure, given, **how):
    return Run(given, measure, how.pop("precompile", lambda jobs: None), **how)


def kept(point):
    """The steps of the file as another process reads them."""
    tuned._tables.cache_clear()
    return dict(tuned.load("gemm", GPU).get(point.key, ()))


def test_every_weight_has_its_turn_before_the_next_number_of_tokens():
    order = [(point.tokens, point.n) for point in points()]
    assert order == [(tokens, n) for tokens in TOKENS for n in (4096, 1024)]
    assert {point.kind for point in points()} == {"linear"}
    assert sorted(TOKENS) == [1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192]


def test_gradients_are_of_many_tokens_unless_they_are_asked_for():
    of_gradients = [point for point in points(backward=True) if point.kind not in FORWARD]
    assert {point.kind for point in of_gradients} == {"dx", "dw"}
    assert {point.tokens for point in of_gradients} == {tokens for tokens in TOKENS if tokens >= 256}
    asked = points(tokens=[8, 300, 8], backward=True)
    assert [point.tokens for point in asked] == [8] * 6 + [300] * 6
    assert {point.kind for point in asked[:6]} == {"linear", "dx", "dw"}


def test_float16_is_measured_in_float16():
    """Its configs are kept where bfloat16's are, but what was compared is what runs."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for forced in (None, torch.float16):
            found = weights.listed(weights.from_torch(torch.empty(64, 32, dtype=dtype)), forced, "tf32")
            (point,) = points(tokens=[64], found=found)
            assert point.problem.dtype == point.dtype == str(forced or dtype).removeprefix("torch.")
            assert point.key[0] == ("tf32" if (forced or dtype) is torch.float32 else "half")


def test_a_transposed_weight_s_forward_is_of_few_tokens_too():
    transposed = [replace(FOUND[0], forward=("dx",), backward=("linear", "dw"))]
    assert [point.kind for point in points(found=transposed, backward=True) if point.tokens == 1] == ["dx"]


@pytest.mark.parametrize("tokens", [[], [0], [-1], [True], [1.0], ["1"]])
def test_numbers_of_tokens_that_are_none(tokens):
    with pytest.raises(ValueError, match=r"tokens is .*; expected numbers of tokens, each at least 1"):
        points(tokens=tokens)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_the_fastest_is_kept(arch):
    given = points(tokens=[64, 4096], backward=True, arch=arch)
    report = made(Fake(fastest=5.0), given).run()
    assert len(report.rows) == len(given) == 12
    for row in report.rows:
        assert row.after == last(row.point) != row.before
        assert (row.before_us, row.after_us, row.torch_us) == (10.0, 5.0, 20.0)
        assert kept(row.point)[row.point.tokens] == astuple(row.after)
        assert configs.illegal(row.point.problem, row.after) == ""
    assert report.path == tuned.path(GPU)
    assert report.unvisited == 0


@pytest.mark.parametrize(("gain", "replaced"), [(GAIN - 0.001, False), (GAIN + 0.001, True), (0.5, False)])
def test_what_serves_now_stays_unless_it_is_clearly_beaten(gain, replaced):
    """Times of one config vary by about as much."""
    (row,) = made(Fake(before=5.0, fastest=5.0 / gain), points(tokens=[64])[:1]).run().rows
    assert row.before == untuned(row.point, 64)
    assert (row.after != row.before) is replaced
    assert kept(row.point)[64] == astuple(row.after)
    assert row.before_us == 5.0


def test_what_does_not_count_is_never_kept_and_is_reported():
    """A config with other bits, or one that fails, has no time."""
    point = points(tokens=[64])[0]
    fastest = last(point)
    report = made(Fake(fastest=1.0, absent=[-1]), [point]).run()
    (row,) = report.rows
    assert fastest not in (row.before, row.after)
    assert report.skipped == (f"{point}: {fastest}: absent",)


def test_where_what_serves_now_does_not_count():
    (row,) = made(Fake(absent=[0]), points(tokens=[64])[:1]).run().rows
    assert row.before_us is None
    assert row.after != row.before


def test_a_point_where_nothing_counts():
    first, second = points(tokens=[64])
    every = range(len(run._candidates(first)))
    fake = Fake(absent=every)

    def measure(point, chosen):
        return fake(point, chosen) if point == first else Fake()(point, chosen)

    report = made(measure, [first, second]).run()
    assert [row.point for row in report.rows] == [second]
    assert report.skipped[-1] == f"{first}: no configuration could be measured"
    assert kept(first) == {}


def test_a_point_that_fails_does_not_end_the_run():
    fake = Fake(raising={1: RuntimeError("out of memory")})
    report = made(fake, points(tokens=[64, 512])).run()
    assert len(fake.visited) == 4
    assert len(report.rows) == 3
    assert report.skipped == (f"{fake.visited[1]}: RuntimeError: out of memory",)
    assert report.unvisited == 0


def test_a_point_that_no_config_serves(monkeypatch):
    first, second = points(tokens=[64])
    choose = selection.choose

    def refuse(problem):
        if problem == first.problem:
            raise ValueError("no configuration serves it")
        return choose(problem)

    monkeypatch.setattr(selection, "choose", refuse)
    report = made(Fake(), [first, second]).run()
    assert [row.point for row in report.rows] == [second]
    assert report.skipped == (f"{first}: no configuration serves it",)
    assert report.unvisited == 0


def test_everything_is_saved_at_once():
    given = points(tokens=[64, 4096])
    fake = Fake(fastest=5.0)

    def measure(point, chosen):
        for earlier in fake.visited:
            assert kept(earlier)[earlier.tokens] == astuple(last(earlier))
        assert point.tokens not in kept(point) or kept(point)[point.tokens] == astuple(chosen[0])
        return fake(point, chosen)

    made(measure, given).run()
    assert fake.visited == given


@pytest.mark.parametrize(("seconds", "count"), [(0.5, 1), (25, 3), (30, 3), (math.inf, 20)])
def test_the_time_is_bounded(seconds, count):
    now = [0.0]
    fake = Fake()

    def measure(point, chosen):
        now[0] += 10
        return fake(point, chosen)

    report = made(measure, points(), seconds=seconds, clock=lambda: now[0]).run()
    assert fake.visited == points()[:count]
    assert len(report.rows) == count
    assert report.unvisited == 20 - count
    for point in fake.visited:
        assert point.tokens in kept(point)


def test_nothing_is_compiled_when_the_time_is_over():
    now, compiled = [0.0], []

    def precompile(jobs):
        compiled.append(len(jobs))
        now[0] += 10

    made(Fake(), points(), precompile=precompile, seconds=5, clock=lambda: now[0]).run()
    assert len(compiled) == 1


def test_an_interrupt_leaves_what_was_measured():
    fake = Fake(fastest=5.0, raising={2: KeyboardInterrupt()})
    tuning = made(fake, points())
    plans.keep("a plan of before", None)
    with pytest.raises(KeyboardInterrupt):
        tuning.run()
    assert [row.point for row in tuning.report().rows] == fake.visited[:2]
    assert tuning.report().unvisited == 18
    for point in fake.visited[:2]:
        assert kept(point)[point.tokens] == astuple(last(point))
    assert not plans


def test_this_process_chooses_again():
    plans.keep("a plan of before", None)
    made(Fake(), points(tokens=[1])).run()
    assert not plans


def test_other_numbers_of_tokens_are_served_as_before():
    """What was measured of 512 tokens serves 449 to 512, at once and in this process."""
    (point, _) = points(tokens=[512])
    before = {tokens: untuned(point, tokens) for tokens in (1, 16, 256, 448, 449, 512, 513, 4096, 100_000)}
    made(Fake(fastest=5.0), [point]).run()
    for tokens, config in before.items():
        chosen = selection.choose(replace(point, tokens=tokens).problem)
        if 448 < tokens <= 512:
            assert chosen == (last(point), "tuned")
            assert chosen.config != config
        else:
            assert chosen.config == config
            assert chosen.source != "tuned"


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_100", "gfx942"])
def test_on_an_architecture_without_a_table_a_run_serves_almost_all(arch):
    """All numbers of tokens but 2 are served by what the default run measured, for each pass."""
    given = points(backward=True, arch=arch, found=FOUND[:1])
    made(Fake(fastest=5.0), given).run()
    for point in (each for each in given if each.tokens == 4096):
        least = 32 if point.kind not in FORWARD else 2
        for tokens in (*range(least + 1, 300), 1000, 3000, 5000, 16384, 100_000):
            chosen = selection.choose(replace(point, tokens=tokens).problem)
            assert chosen.source == "tuned", (point, tokens)
            assert configs.illegal(replace(point, tokens=tokens).problem, chosen.config) == ""


def test_a_later_run_replaces_only_what_it_measured():
    small, large = points(tokens=[1, 4096], found=FOUND[:1])
    made(Fake(fastest=5.0), [small]).run()
    made(Fake(fastest=5.0), [large]).run()
    assert kept(small)[1] == astuple(last(small))
    assert kept(large)[4096] == astuple(last(large))


def test_kernels_are_compiled_once_and_before_they_are_measured():
    compiled = []

    def kernel(problem, config):
        launch = kernels.describe_gemm(problem, config)
        return (*launch.constants.values(), *launch.options.values())

    def measure(point, chosen):
        canonical = configs.fitted(point.problem, configs.canonical(point.problem))
        assert {kernel(point.problem, config) for config in (canonical, *chosen)} <= set(compiled)
        return Fake()(point, chosen)

    def precompile(jobs):
        compiled.extend(kernel(*job) for job in jobs)

    made(measure, points(backward=True), precompile=precompile).run()
    assert len(set(compiled)) == len(compiled) > 0


def test_progress_is_told():
    told = []
    given = points(tokens=[64, 4096])
    made(Fake(), given, progress=lambda *step: told.append(step)).run()
    steps = [step for step in told if not step[2].startswith("compiling")]
    assert steps == [(place, 4, str(point)) for place, point in enumerate(given)]
    assert [step[:2] for step in told if step not in steps] == [(0, 4), (2, 4)]


def test_the_report_is_sorted_by_weight():
    rows = made(Fake(), points(tokens=[4096, 64], backward=True)).run().rows
    assert [(row.point.n, row.point.kind, row.point.tokens) for row in rows] == [
        (n, kind, tokens) for n in (4096, 1024) for kind in ("linear", "dx", "dw") for tokens in (64, 4096)
    ]


def test_nothing_is_measured_that_could_not_be_kept(cache):
    cache.write_text("a file")
    fake, compiled = Fake(), []
    with pytest.raises(OSError, match=r"cache.*tuned|tuned.*cache"):
        made(fake, points(), precompile=compiled.append).run()
    assert fake.visited == compiled == []


def test_kernels_are_compiled_for_the_current_gpu(monkeypatch):
    """Another process's current GPU is the first, which may be of another kind, or full."""
    compiled = []
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (64 << 30, 64 << 30))
    monkeypatch.setattr("torch.cuda.set_device", compiled.append)
    monkeypatch.setattr(run.gemm, "plan", lambda problem, config: compiled.append(config))
    monkeypatch.setattr(run, "retried_in_processes", lambda one, jobs, workers: [one(job) for job in jobs])
    (point, _) = points(tokens=[64])
    run.on_current_gpu([point], None, lambda *step: None).precompile([(point.problem, "a config")])
    assert compiled == [3, "a config"]


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan])
def test_no_time(seconds):
    with pytest.raises(ValueError, match=f"seconds is {seconds}; expected a time above 0"):
        run.on_current_gpu(points(), seconds, lambda *step: None)


def test_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"isogemm\.tune needs a GPU"):
        run.current_gpu()


def test_a_gpu_that_is_too_old(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(run.devices, "facts", lambda device: SimpleNamespace(name="Tesla V100", arch="sm_70"))
    with pytest.raises(RuntimeError, match="cannot serve Tesla V100: the kernels need sm_80"):
        run.current_gpu()
