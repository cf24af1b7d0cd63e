from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import isogemm
from isogemm import cli
from isogemm.bench import ceilings, report, store
from isogemm.bench.cases import Case, CaseRun
from isogemm.bench.demo import Accuracy, Bits, DemoResult
from isogemm.bench.views import FamilyView
from isogemm.cli import families, terminal
from isogemm.cli.families import Family
from isogemm.training import report as training_report
from isogemm.training import results
from isogemm.verify.checks import CheckResult
from isogemm.verify.usability import Usability
from isogemm_cli import main

COMMANDS = ["doctor", "verify", "bench", "report", "demo", "tune", "train-patchtst"]
PASSING = CheckResult("same bits", 1, 0, 0)
FAILING = CheckResult("same bits", 1, 2, 17, detail="trial 3: first at (0, 5)")
SKIPPED = CheckResult("same bits", 0, 0, 0, skipped="no [tensor] cores")

SHOWN = DemoResult(
    "sum of 8",
    bits=Bits("64 rows: alone, against a batch of 64", 4096, torch=3000, isogemm=0),
    accuracy=Accuracy("|x|", torch=2.5e-7, isogemm=1.5e-7),
    torch_call="torch.sum",
    torch_us=5.0,
    isogemm_us=2.0,
    note="its mean is not promised",
)

VIEW = FamilyView("fake", "Fake", ("m",))

Register = Callable[..., None]


def check_giving(result: CheckResult | Exception) -> SimpleNamespace:
    def run(device: torch.device, trials: int) -> CheckResult:
        if isinstance(result, Exception):
            raise result
        return result if result.skipped else replace(result, trials=trials)

    return SimpleNamespace(name="same bits", what="a row's bits do not follow its batch", run=run)


def sum_case(correct: bool = True, **params: int) -> Case:
    def build(device: torch.device) -> CaseRun:
        x = torch.ones(8, device=device)

        def check() -> dict[str, float]:
            assert correct, "wrong sum"
            return {"isogemm": 0.0, "torch": 0.0}

        return CaseRun({"isogemm": [x.sum], "torch": [x.sum]}, check, {"path": "sum"})

    return Case("fake", "sum", {"batch": 2, "m": 8, "dtype": "float32", **params}, 8.0, 32.0, build)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Makes a fake family the only one there is; `fields` replace what its modules have."""

    def register(checks: list[SimpleNamespace] | None = None, **fields: object) -> None:
        bench = {"cases": lambda device, quick: [sum_case()], "demo": lambda device: SHOWN, "VIEW": VIEW}
        verify = SimpleNamespace(CHECKS=[check_giving(PASSING)] if checks is None else checks)
        fake = Family("fake", "sums", _no_tensor_cores, SimpleNamespace(**bench | fields), verify)
        monkeypatch.setattr(families, "FAMILIES", (fake,))
        monkeypatch.setattr(cli, "compile_ahead", lambda module, device, trials: None)

    return register


def _no_tensor_cores(device: torch.device) -> list[Usability]:
    return [Usability(False, "sum_kernel", f"{device} has no [tensor] cores")]


@pytest.fixture(autouse=True)
def sandbox(register: Register, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without GPU, a family that passes, no ceilings to measure, an empty working directory."""
    register()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(ceilings, "cases", lambda device: [])


@pytest.fixture(params=["rich", "plain"])
def style(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With rich, and as where it is not installed."""
    if request.param == "plain":
        without(monkeypatch, "rich")
    else:
        pytest.importorskip("rich")
    return request.param


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("command", [[], *([command] for command in COMMANDS)])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as exit:
        main([*command, "--help"])
    assert exit.value.code == 0
    assert "usage: isogemm" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out == f"isogemm {isogemm.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["prove"], ["verify", "--trials", "many"], ["verify", "--family"]])
def test_arguments_that_do_not_parse(arguments):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", "--family", "huge"], "--family: got 'huge', expected any of fake"),
        (["bench", "--family", "fake", "huge"], "--family: got 'huge', expected any of fake"),
        (["verify", "--device", "tpu"], "--device: got 'tpu', this machine has cpu"),
        (["demo", "--device", "cuda"], "--device: got 'cuda', this machine has cpu"),
        (["verify", "--trials", "0"], "--trials: got 0, expected at least 1"),
        (["report", "--results", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_impossible_requests_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"isogemm {arguments[0]}: error: ")
    assert message in stderr
    assert stderr.count("\n") == 1


def test_cuda_means_the_first_gpu(register, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("isogemm.cli.common.facts", lambda device: SimpleNamespace(name="GPU"))
    for name, expected in [("cuda", "GPU (cuda:0)"), ("cuda:1", "GPU (cuda:1)"), ("cpu", "CPU")]:
        assert main(["verify", "--device", name]) == 0
        assert f"Checks on {expected}" in capsys.readouterr().out
    assert main(["verify", "--device", "cuda:2"]) == 2
    assert "this machine has cuda:0, cuda:1, cpu" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [40, 60])
def test_doctor_in_a_narrow_terminal(columns, style, monkeypatch, capsys):
    """No word is cut off, and nothing is left out for three dots."""
    monkeypatch.setattr(terminal, "UNSEEN_WIDTH", columns)
    assert main(["doctor"]) == 0
    table = capsys.readouterr().out.partition("Kernels")[2]
    assert "\u2026" not in table
    assert "sum_kernel" in re.sub(r"[\s\u2500-\u257f]", "", table)


def test_doctor(style, capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"isogemm {isogemm.__version__}" in out
    assert f"torch {torch.__version__}" in out
    assert "sum_kernel" in out
    assert "cpu has no [tensor] cores" in out


@pytest.mark.parametrize(
    ("results", "code", "words"),
    [
        ([PASSING], 0, ["pass", "7", "1 passed, 0 failed, 0 skipped"]),
        ([PASSING, SKIPPED], 0, ["no [tensor] cores", "1 passed, 0 failed, 1 skipped"]),
        ([PASSING, FAILING, SKIPPED], 1, ["FAIL", "17", "first at (0, 5)", "1 passed, 1 failed, 1 skipped"]),
        ([RuntimeError("no [kernel]\nimage")], 1, ["FAIL", "RuntimeError: no [kernel] image"]),
        ([SKIPPED, SKIPPED], 3, ["0 passed, 0 failed, 2 skipped", "Nothing was proven"]),
        ([], 3, ["Nothing was proven"]),
    ],
)
def test_verify(results, code, words, register, style, capsys):
    register(checks=[check_giving(result) for result in results])
    assert main(["verify", "--trials", "7"]) == code
    out = capsys.readouterr().out
    assert [word for word in words if word not in out] == []


def test_bench_appends_what_it_measured(style, capsys):
    out = Path("measured/fake.jsonl")
    for _ in range(2):
        assert main(["bench", "--quick", "--device", "cpu", "--out", str(out)]) == 0
    assert [row.family for row in store.read(out)] == ["fake", "fake"]
    assert "measured/fake.jsonl: 1 rows appended" in capsys.readouterr().out


def test_bench_into_a_folder():
    assert main(["bench", "--out", "results"]) == 0
    (file,) = Path("results").rglob("*.jsonl")
    assert file.name == "fake.jsonl"
    assert len(store.read(file)) == 1


def test_bench_passes_quick_on(register):
    asked = []
    register(cases=lambda device, quick: asked.append((device.type, quick)) or [])
    main(["bench"])
    main(["bench", "--quick"])
    assert asked == [("cpu", False), ("cpu", True)]


def test_bench_of_a_part(register, monkeypatch, capsys):
    register(cases=lambda device, quick: [sum_case(n=n) for n in (1, 2, 3)])
    monkeypatch.setattr(ceilings, "cases", lambda device: [ceilings._copy(64)])
    assert main(["bench", "--only", "sum batch=2", "--out", "part.jsonl"]) == 0
    assert main(["bench", "--only", "n=1", "n=3", "--out", "parts.jsonl"]) == 0
    assert [row.params["n"] for row in store.read(Path("part.jsonl"))] == [1, 2, 3]
    assert [row.params["n"] for row in store.read(Path("parts.jsonl"))] == [1, 3]
    assert main(["bench", "--only", "n=4"]) == 2
    assert "--only: no case has 'n=4' in its label" in capsys.readouterr().err


def test_families_compile_ahead(register, monkeypatch):
    asked = []
    register(
        cases=lambda device, quick: [sum_case(n=n) for n in (1, 2)],
        compile_cases=lambda device, cases: asked.append([case.params["n"] for case in cases]),
    )
    monkeypatch.setattr(cli, "compile_ahead", lambda module, device, trials: asked.append(trials))
    main(["bench"])
    main(["bench", "--only", "n=2"])
    main(["verify", "--trials", "3"])
    assert asked == [[1, 2], [2], 3]


def test_bench_with_a_failing_case(register, style, capsys):
    register(cases=lambda device, quick: [sum_case(correct=False), sum_case()])
    assert main(["bench", "--out", "rows.jsonl"]) == 1
    assert "wrong sum" in capsys.readouterr().out
    assert len(store.read(Path("rows.jsonl"))) == 1


def test_report(capsys):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    main(["bench", "--out", "results"])
    assert main(["report", "--results", "results", "--out", "report.html"]) == 0
    assert "report: report.html" in capsys.readouterr().out
    assert "<html" in Path("report.html").read_text()


def test_report_of_nothing(capsys):
    Path("results").mkdir()
    assert main(["report", "--results", "results"]) == 2
    assert "no measurements in results" in capsys.readouterr().err
    assert main(["report"]) == 2
    assert "no measurements in benchmarks/results or build; `isogemm bench` makes some" in capsys.readouterr().err


def test_report_outside_the_repository(monkeypatch, capsys):
    """Reports what bench and train-patchtst left in build/, unless there are recorded results."""
    asked = []
    monkeypatch.setattr(report, "write", lambda out, rows, views, sections: asked.append((len(rows), len(sections))))
    monkeypatch.setattr(training_report, "sections", lambda runs: runs)
    Path("benchmarks/results").mkdir(parents=True)  # a user's own, of something else
    main(["bench"])
    run = dict.fromkeys(results._FIELDS, 1)
    Path("build/train-patchtst").mkdir()
    Path("build/train-patchtst/results.jsonl").write_text(json.dumps(run) + "\n")
    assert main(["report"]) == 0
    main(["bench", "--out", "benchmarks/results"])
    main(["bench", "--out", "benchmarks/results"])
    assert main(["report"]) == 0
    assert main(["report", "--results", "build/train-patchtst"]) == 0
    assert asked == [(1, 1), (2, 0), (0, 1)]


def test_report_of_a_torn_line(capsys):
    for line, name in (('{"schema": 1, "epochs": []}', "runs.jsonl"), ('{"schema"', "rows.jsonl")):
        Path(name).write_text(line)
        assert main(["report", "--results", name]) == 2
        assert re.match(rf"isogemm report: error: {name}:1: ", capsys.readouterr().err)


def test_bench_adds_nothing_to_a_torn_line(capsys):
    Path("rows.jsonl").write_text('{"schema"')
    assert main(["bench", "--out", "rows.jsonl"]) == 2
    assert "rows.jsonl: the last line is cut off" in capsys.readouterr().err
    assert Path("rows.jsonl").read_text() == '{"schema"'


@pytest.mark.parametrize(
    "arguments", [["bench", "--out", "file/rows.jsonl"], ["bench", "--out", "file"], ["demo", "--out", "file/x"]]
)
def test_an_output_that_cannot_be_written_is_noticed_at_once(arguments, register, capsys):
    Path("file").write_text("mine")
    register(cases=lambda device, quick: [], demo=None)
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"isogemm {arguments[0]}: error: file")


def test_report_of_a_bad_line(capsys):
    Path("bad.jsonl").write_text("{}\n")
    assert main(["report", "--results", "bad.jsonl"]) == 2
    assert "bad.jsonl:1" in capsys.readouterr().err


def test_report_without_its_extra(monkeypatch, capsys):
    main(["bench", "--out", "rows.jsonl"])
    without(monkeypatch, "jinja2")
    assert main(["report", "--results", "rows.jsonl"]) == 2
    assert "pip install isogemm[bench]" in capsys.readouterr().err


def test_demo(style, capsys):
    """Bits, then accuracy, then speed: recorded on a GPU, and last that of this CPU."""
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    words = [
        "This is a CPU. isogemm's CPU path is for correctness and development",
        "3,000 (73%)",
        "Of 4,096 elements compared, torch changed 3,000 and isogemm 0.",
        "fake: its mean is not promised",
        "2.5e-07",
        "Speed, recorded on NVIDIA H200",
        "linear, bf16, tuned weights",
        "NVIDIA H200, 2026-",
        "Speed on this CPU, which says nothing about a GPU",
        "2.50x",
    ]
    places = [out.find(each) for each in words]
    assert -1 not in places
    assert places == sorted(places)
    if style == "rich":  # the report's packages are there as well
        assert "report: build/isogemm-report.html" in out
        page = Path("build/isogemm-report.html").read_text()
        assert 'isogemm changed <b class="good">0</b> and torch <b>3,000</b>' in page


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_the_demo_fits_a_terminal(columns, monkeypatch, capsys):
    without(monkeypatch, "rich")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(["demo"])
    tables = [line for line in capsys.readouterr().out.splitlines() if "  " in line]
    assert tables
    assert max(map(len, tables)) <= columns


@pytest.mark.parametrize("columns", [40, 60, 80, 140])
def test_a_comparison_in_a_narrow_terminal(columns, style, monkeypatch, capsys):
    """Several tables: every figure is whole, every one has the names, nothing is wider than the terminal."""
    names = ["torch", "compile + graph", "isogemm + compile + graph"]
    header = [*results.COLUMNS, *(f"over {name}" for name in names[:2])]
    figures = [[f"{line}{column}.{line}{column}123" for column in range(11)] for line in range(1, 4)]
    monkeypatch.setattr(terminal, "UNSEEN_WIDTH", columns)
    terminal.Terminal().table("Training", header, [[name, *line] for name, line in zip(names, figures, strict=True)])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    assert [figure for line in figures for figure in line if figure not in out] == []
    assert {word for name in header for word in name.split()} <= set(out.split())
    lines = [line for line in out.splitlines() if re.search(r"\d\.\d", line)]
    assert [line for line in lines if not re.match(r"\W*(torch|compile|isogemm) ", line)] == []
    assert len(lines) == 3 * out.count("backend")
    assert (out.count("backend") == 1) == (columns == 140)


def test_lines_of_several_keys_keep_them(register, style, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "UNSEEN_WIDTH", 40)
    register(checks=[check_giving(PASSING)])
    assert main(["verify", "--trials", "7"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 40
    assert out.count("family") == out.count("check ") > 1


def test_words_that_start_with_a_number_are_wrapped(register, capsys):
    """They are not numbers, which are not: they would leave no room for the other columns."""
    pytest.importorskip("rich")
    how = f"64 rows: {' and '.join(f'in batches of {size}' for size in range(20))}"
    register(demo=lambda device: replace(SHOWN, bits=replace(SHOWN.bits, how=how)))
    main(["demo"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "sum of 8" in line]
    assert "fake" in lines[0]
    assert "4,096" in lines[0]


def test_demo_of_what_is_not_promised(register, capsys):
    register(demo=lambda device: replace(SHOWN, bits=None, no_promise="torch serves"))
    assert main(["demo"]) == 0
    assert "not promised: torch serves" in capsys.readouterr().out


@pytest.mark.parametrize("given", [["--bench"], []])
def test_demo_measures_on_a_cpu_when_asked(given):
    for _ in range(2):  # anew
        assert main(["demo", *given]) == 0
    file = Path("build/isogemm-report.jsonl")
    assert (len(store.read(file)) if file.exists() else 0) == len(given)


def test_demo_without_the_report_packages(monkeypatch, capsys):
    without(monkeypatch, "jinja2")
    assert main(["demo"]) == 0
    assert (
        "no HTML report: jinja2 is not installed; it comes with: pip install isogemm[bench]" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"bits": Bits("64 rows", 4096, torch=3000, isogemm=1)}, "isogemm changed 1 of 4,096 elements, expected 0"),
        ({"failure": "error 1e-3, expected at most 1e-6"}, "error 1e-3, expected at most 1e-6"),
        (None, "RuntimeError: no kernel image"),
    ],
    ids=["bits", "accuracy", "raises"],
)
def test_demo_of_a_failing_family(wrong, words, register, capsys):
    def demo(device: torch.device) -> DemoResult:
        if wrong is None:
            raise RuntimeError("no kernel image")
        return replace(SHOWN, **wrong)

    register(demo=demo)
    assert main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out
    assert words in out
    assert words in Path("build/isogemm-report.html").read_text()


def test_demo_when_nothing_could_be_measured(register, capsys):
    register(cases=lambda device, quick: [sum_case(correct=False)])
    assert main(["demo", "--bench"]) == 1
    assert "wrong sum" in capsys.readouterr().out


def test_get_keeps_the_order_of_registration(register):
    (fake,) = families.FAMILIES
    assert families.get() == families.get(["fake", "fake"]) == [fake]
    with pytest.raises(ValueError, match="got 'a', 'b', expected any of fake"):
        families.get(["b", "fake", "a"])


def test_doctor_names_releases_that_were_not_tested(monkeypatch, capsys):
    from isogemm.core import private

    assert main(["doctor"]) == 0
    assert "warning" not in capsys.readouterr().out
    monkeypatch.setattr(private, "TORCH", ("2.0.0", "2.1.0"))
    monkeypatch.setattr(private, "missing", lambda feature: ["torch._C:_foo"] if feature == private.AUTOFUSE else [])
    assert main(["doctor"]) == 0
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 2
    assert "is newer than 2.1.0" in warnings[0]
    assert "autofuse is off" in warnings[1]
