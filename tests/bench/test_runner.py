from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from isogemm.bench import ceilings, runner, store
from isogemm.bench.cases import Case, CaseRun
from isogemm.verify.precision import fp32_precision

CPU = torch.device("cpu")


def case(name: str, check: Callable[[], dict[str, float]], log: list[str]) -> Case:
    def build(device: torch.device) -> CaseRun:
        def thunk() -> torch.Tensor:
            log.append(f"{name} timed")
            return torch.empty(0, device=device)

        def logged_check() -> dict[str, float]:
            log.append(f"{name} checked")
            return check()

        return CaseRun({"isogemm": [thunk], "torch": [thunk]}, logged_check, {"path": "tiny"})

    return Case("tiny", "bmm", {"name": name}, 1.0, 2.0, build)


def passes() -> dict[str, float]:
    return {"isogemm": 0.0, "torch": 0.0}


def fails() -> dict[str, float]:
    raise AssertionError("3 of 144 elements differ")


def test_a_case_is_checked_before_it_is_timed() -> None:
    log: list[str] = []
    (row,) = runner.Runner(CPU, repeats=2).rows([case("a", passes, log)])
    assert log[0] == "a checked"
    assert set(log[1:]) == {"a timed"}
    assert row.error == {"isogemm": 0.0, "torch": 0.0}
    assert [len(times) for times in row.times_us.values()] == [2, 2]
    assert not row.cpu_us
    assert store.parse(json.loads(store.dumps(row))) == row


def test_a_failing_check_gives_no_time_and_the_others_still_run() -> None:
    log: list[str] = []
    run = runner.Runner(CPU, repeats=1)
    rows = list(run.rows([case("a", passes, log), case("b", fails, log), case("c", passes, log)]))
    assert [row.params["name"] for row in rows] == ["a", "c"]
    assert "b timed" not in log
    assert run.failures == [runner.Failure("tiny bmm name=b", "check", "AssertionError: 3 of 144 elements differ")]
    assert run.failures


@pytest.mark.parametrize(
    ("slowest_us", "burst", "bursts"), [(10.0, 50, 15), (40.0, 50, 15), (1000.0, 20, 5), (2001.0, None, None)]
)
def test_cpu_time_is_bounded(
    slowest_us: float, burst: int | None, bursts: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the device does meanwhile; beside a long call it is not measured."""
    asked: dict[str, int] = {}
    monkeypatch.setattr(runner.timer, "host_time", lambda variants, device, **how: asked.update(how) or {})
    runner.Runner(torch.device("cuda", 0))._host_time({}, slowest_us)
    assert (asked.get("burst"), asked.get("bursts")) == (burst, bursts)


def test_cpu_time_is_not_measured_where_a_case_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.Runner, "_host_time", lambda self, variants, slowest: {"isogemm": [1.0]})
    whole = case("a", passes, [])
    without = replace(whole, build=lambda device: replace(whole.build(device), cpu_time=False))
    rows = runner.Runner(CPU, repeats=1).rows([whole, without])
    assert [dict(row.cpu_us) for row in rows] == [{"isogemm": [1.0]}, {}]


def test_a_case_that_cannot_be_built_is_a_failure() -> None:
    def build(device: torch.device) -> CaseRun:
        raise MemoryError("no room")

    run = runner.Runner(CPU)
    assert list(run.rows([Case("tiny", "bmm", {}, 1.0, 1.0, build)])) == []
    assert run.failures == [runner.Failure("tiny bmm", "build", "MemoryError: no room")]


def test_progress_names_the_case_about_to_run() -> None:
    seen: list[tuple[int, int, str]] = []
    run = runner.Runner(CPU, repeats=1, progress=lambda *step: seen.append(step))
    list(run.rows([case("a", passes, []), case("b", passes, [])]))
    assert seen == [(0, 2, "tiny bmm name=a"), (1, 2, "tiny bmm name=b"), (2, 2, "")]
    assert not run.failures


def test_environment_has_the_stored_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    env = runner.environment(CPU, commit="abc")
    assert tuple(env) == store.ENV_KEYS
    assert all(isinstance(value, str) and value for value in env.values())
    assert (env["commit"], env["driver"], env["torch"]) == ("abc", "none", torch.__version__)
    monkeypatch.setattr(runner, "_output", lambda *command: "")
    assert runner.environment(CPU)["commit"] == "unknown"


def test_a_missing_program_prints_nothing() -> None:
    assert runner._output("isogemm-no-such-program") == ""


def test_ceilings_are_measured_like_any_case() -> None:
    cases = [ceilings._copy(1 << 16), ceilings._mm(64, "float32", "ieee")]
    run = runner.Runner(CPU, repeats=3)
    rows = list(run.rows(cases))
    assert run.failures == []
    limits = ceilings.read(rows, rows[0].gpu)
    assert limits.bytes_per_s == 2 * (1 << 16) / rows[0].us["torch"] * 1e6
    assert limits.flops_per_s == {"fp32 ieee": 2 * 64**3 / rows[1].us["torch"] * 1e6}
    assert ceilings.read(rows, "another GPU") == ceilings.Ceilings(None, {})


def test_the_cpu_ceilings_are_small() -> None:
    assert [(case.op, case.bytes) for case in ceilings.cases(CPU)] == [
        ("copy", 2.0 * (64 << 20)),
        ("mm", 12.0 * (1 << 20)),
    ]


def test_precision_is_set_where_both_of_torchs_getters_find_it() -> None:
    """Inductor asks the older one, which raises after the newer setter alone."""
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    with fp32_precision("tf32"):
        assert (torch.get_float32_matmul_precision(), matmul.fp32_precision) == ("high", "tf32")
        with fp32_precision("ieee"), fp32_precision(""):
            assert (torch.get_float32_matmul_precision(), matmul.fp32_precision) == ("highest", "ieee")
        assert (torch.get_float32_matmul_precision(), matmul.fp32_precision) == ("high", "tf32")
    assert (torch.get_float32_matmul_precision(), matmul.fp32_precision) == ("highest", before)
