from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from figures import tables
from isogemm.bench import ceilings, demo, headline, report
from isogemm.bench.demo import Accuracy, Bits, DemoResult
from isogemm.bench.extras import need
from isogemm.bench.headline import Recorded
from isogemm.bench.store import Row
from isogemm.bench.views import FamilyView

VIEW = FamilyView("tiny", "Tiny batched GEMM", ("m", "n", "k"))


class Page(HTMLParser):
    """Collects the cells of every table, the ids, and every attribute that could load something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for n, v in attrs if n in ("src", "href", "xlink:href", "srcset", "action")]
        self.ids += [v or "" for n, v in attrs if n == "id"]
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


@pytest.fixture
def rows(make_row: Callable[..., Row], ceiling_rows: list[Row]) -> list[Row]:
    return [
        *ceiling_rows,
        make_row(256, (12, 12, 64), us=4.0, ratio=4.0, cache="cold"),
        make_row(1024, (12, 12, 64), us=12.3, ratio=0.5, cache="cold"),
        make_row(256, (8, 8, 8), us=2.0, ratio=4.0, cache="hot", cpu={"isogemm": [31.0], "torch": [24.0]}),
        make_row(256, (8, 8, 8), us=2.0, ratio=3.0, cache="hot", env={"gpu": "GPU <Y>"}),
    ]


def test_the_report_has_the_numbers(rows: list[Row]) -> None:
    html = report.render(rows, [VIEW])
    cells = Page(html).cells
    for text in ("4.00x", "0.50x", "12.3", "6.15", "1.5e-07", "2.5e-07", "31.0", "24.0", "0123456789ab"):
        assert text in cells
    assert "Tiny batched GEMM" in html
    assert "2.00x <span>geometric mean of 3 points" in html
    assert "12x12x64, batch 1024 (bmm, fp32 ieee, cold): 12.3 us, 0.50x" in html
    assert "copy, read + write: 1000 GB/s; mm fp32 ieee: 10 TFLOP/s" in html
    assert "GPU &lt;Y&gt;" in html
    assert "GPU <Y>" not in html


def test_peers_stand_beside_isogemm(make_row: Callable[..., Row]) -> None:
    rows = [make_row(256, peer=0.5), make_row(1024, peer=0.125), make_row(cache="hot")]
    cells = [cell.strip() for cell in Page(report.render(rows, [VIEW])).cells]
    for text in ("fixed tile (min)", "0.25x (0.12x)", "fixed tile us", "16.0", "64.0"):
        assert text in cells


def test_against_rivals_the_report_says_what_the_tables_say(make_row: Callable[..., Row]) -> None:
    rows = [make_row(256, peer=0.5), make_row(1024, peer=0.125), make_row(cache="hot")]  # torch takes twice our time
    for row, ours in zip(rows[:2], ("70", "50"), strict=True):
        row.info.update({"isogemm peak MiB": ours, "torch peak MiB": "100"})
    view = replace(VIEW, against=True)
    cells = [cell.strip() for cell in Page(report.render(rows, [view])).cells]
    line = tables.headline(rows, view, ceilings.Ceilings(None, {}))
    for text in ("8.00x (4.00x)", "0.70x"):
        assert text in cells
        assert f"| {text} |" in line
    assert {"over fixed tile (min)", "peak memory"} <= set(cells)


def test_the_report_loads_nothing(rows: list[Row]) -> None:
    html = report.render(rows, [VIEW])
    page = Page(html)
    assert page.links
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"https?:|//\w|@import|url\((?!#)", html)
    assert not {"link", "img", "iframe", "object"} & set(page.tags)


def test_plots_share_no_ids(rows: list[Row]) -> None:
    ids = Page(report.render(rows, [VIEW])).ids
    assert ids
    assert len(ids) == len(set(ids))


def test_plots_and_their_keys_are_inverted_for_the_dark_scheme(rows: list[Row]) -> None:
    html = report.render(rows, [VIEW])
    dark = html[html.index("@media (prefers-color-scheme: dark)") :]
    assert "figure svg, .keys i { filter: invert(1)" in dark[: dark.index("@media (min-width")]
    figures = re.findall(r"<figure>.*?</figure>", html, re.DOTALL)
    assert len(figures) == 4  # a roofline and two groups; one group where there are no ceilings
    for figure in figures:
        colours = re.findall(r'style="background: (#\w+)"', figure)
        svg = figure[figure.index("<svg") :]
        assert colours
        assert all(colour in svg for colour in colours)


def test_points_have_tooltips(rows: list[Row]) -> None:
    html = report.render(rows, [VIEW])
    assert html.count("<title>12x12x64, batch 1024 (bmm, fp32 ieee, cold): 12.3 us, 0.50x</title>") == 3


def test_the_report_is_reproducible(rows: list[Row]) -> None:
    assert report.render(rows, [VIEW]) == report.render(rows, [VIEW])


def test_the_newest_measurement_is_shown(make_row: Callable[..., Row]) -> None:
    old = make_row(us=77.7, env={"date": "2025-01-01T00:00:00Z"})
    cells = Page(report.render([old, make_row(us=33.3)])).cells
    assert "33.3" in cells
    assert "77.7" not in cells


def test_points_without_torch_or_ceilings_or_batch(make_row: Callable[..., Row]) -> None:
    row = make_row()
    alone = Row("other", "op", {"n": 3}, 0.0, 0.0, {}, {}, {"isogemm": [1.0]}, row.env)
    html = report.render([alone])
    assert "No point has both" in html
    assert "Ceilings were not measured." in html


def test_an_empty_report_says_so(tmp_path: Path) -> None:
    path = report.write(tmp_path / "build" / "report.html", [])
    assert "no measurements were given" in path.read_text()


def test_a_report_of_training_runs_alone_is_not_empty() -> None:
    runs = report.Section("Training run", "GPU X", report.Table(["backend"], [[report.Cell("torch")]]), [])
    html = report.render([], sections=[runs])
    assert "Training run" in html
    assert "nothing to show" not in html


def test_bench_imports_without_its_extras() -> None:
    code = (
        "import sys\n"
        "for name in ('rich', 'jinja2', 'matplotlib'): sys.modules[name] = None\n"
        "from isogemm.bench import plots, report, runner, timer\n"
        "try: report.render([])\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "jinja2 is not installed; it comes with: pip install isogemm[bench]\n"


def test_an_extra_that_fails_to_import_is_not_called_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "brokenextra.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        need("brokenextra")


def test_training_steps_are_drawn_with_their_memory_and_arithmetic(
    step_rows: list[Row], ceiling_rows: list[Row]
) -> None:
    view = FamilyView("encoder", "Encoder layer", ("layers", "tokens"), against=True, steps=True)
    html = report.render([*step_rows, *ceiling_rows], [view])
    assert "training step, fp32 ieee: time and memory" in html
    for tip in ("2x5, torch eager: 8.00 ms", "2x5, isogemm: 30.0 MiB", "3x5, torch: 1.50 ms"):
        assert f"<title>{tip}</title>" in html
    assert "time of a step, ms" in html
    assert report.render(step_rows, [view])  # no ceilings: no tick


RECORDED = Recorded(
    "GPU X", "GPU X: torch 2.11.0, Triton 3.6.0.", [["linear", "torch (cuBLAS)", "1.25x", "0.50x to 2.00x", "4"]]
)


def demo_page(**fields: object) -> report.DemoPage:
    shown = [
        ("gemm", DemoResult("linear [64, 8]", Bits("64 rows", 4096, 3000, 0), accuracy=Accuracy("|x|", 2e-7, 1e-7),
                            torch_call="F.linear", torch_us=5.0, isogemm_us=50.0)),
        ("tiny", DemoResult("bmm", no_promise="torch <serves>")),
        ("encoder", DemoResult("layer", Bits("8 rows", 100, 0, 7), failure="error 1")),
    ]  # fmt: skip
    return replace(report.DemoPage("CPU X", "torch 2.13", shown), **fields)


def test_a_demo_leads_with_bits() -> None:
    html = report.render([], page=demo_page())
    words = [
        "<h1>isogemm demo</h1>",
        'isogemm changed <b class="bad">7</b> and torch <b>3,000</b>',
        "3,000 (73%)",
        "Not promised: torch &lt;serves&gt;.",
        "FAIL: isogemm changed 7 of 100 elements, expected 0",
        "FAIL: error 1",
        "<h2>Accuracy</h2>",
        "2.0e-07",
        "<h2>Speed</h2>",
        "0.10x",
    ]
    places = [html.find(each) for each in words]
    assert -1 not in places
    assert places == sorted(places)
    assert "recorded on" not in html
    assert "no measurements were given" not in html


def test_on_a_cpu_local_times_are_small_print(rows: list[Row]) -> None:
    page = demo_page(banner=demo.CPU_BANNER, recorded=[RECORDED])
    html = report.render([], page=page)
    words = [
        demo.CPU_BANNER.replace("'", "&#39;"),
        "<h2>Bits</h2>",
        "Speed, recorded on GPU X",
        "1.25x",
        "0.50x to 2.00x",
    ]
    words += [RECORDED.source, '<section class="small">', "say nothing about a GPU", "0.10x"]
    places = [html.find(each) for each in words]
    assert -1 not in places
    assert places == sorted(places)
    assert 'class="figure' not in html
    assert "<details>" not in html
    measured = report.render(rows, [VIEW], page=page)  # folded away
    assert measured.index("<details>") < measured.index('class="figure') < measured.index("</details>")


def test_a_report_of_measurements_has_no_demo(rows: list[Row]) -> None:
    html = report.render(rows, [VIEW])
    assert "<h1>isogemm benchmarks</h1>" in html
    assert not {"<details>", "<h2>Bits</h2>"} & set(html.splitlines())
    assert headline.MEANING not in html
