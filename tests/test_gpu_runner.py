"""`make gpu-test`'s runner on a folder of tests that need no GPU."""

import runpy
from pathlib import Path

import pytest

RUNNER = runpy.run_path(str(Path(__file__).parent / "gpu/__main__.py"))

LONG = """
import pytest

@pytest.mark.parametrize("number", range(7))
def test_number(number, pytestconfig):
    note(f"long {number} in {pytestconfig.getoption('--slice')}")
"""
SHORT = """
import atexit
import pytest

atexit.register(print, "said after the summary")

def test_together():
    note("together")

@pytest.mark.alone
def test_alone():
    note("alone")
"""
ONLY_ALONE = """
import pytest
pytestmark = pytest.mark.alone

def test_last():
    note("last")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three files of tests; each test writes a line."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the machine's may lack them
    head = f"""
def note(line):
    with open({str(tmp_path / "notes")!r}, "a") as file:
        file.write(line + "\\n")
"""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = alone\naddopts = --strict-markers\n")
    for name, text in (("test_long", LONG), ("test_short", SHORT), ("test_x", ONLY_ALONE)):
        (tmp_path / f"{name}.py").write_text(head + text)
    return tmp_path


def _run(folder, *options):
    slices = {"test_long*": 3, "*": 1}
    return RUNNER["run_all"](sorted(folder.glob("test_*.py")), 2, list(options), slices)


def test_every_test_runs_once_and_some_alone_at_the_end(folder, capfd):
    assert _run(folder)
    notes = (folder / "notes").read_text().splitlines()
    assert sorted(notes[:-2]) == sorted([f"long {i} in {1 + i % 3}/3" for i in range(7)] + ["together"])
    assert notes[-2:] == ["alone", "last"]
    shown = capfd.readouterr().out.splitlines()
    assert len(shown) == 5 + 1 + 1  # slices, those alone, the end
    assert all(line.startswith("ok ") for line in shown[:-1])
    assert "tests that run alone: 2 passed" in shown[-2]
    assert shown[-1].startswith("all passed")


def test_what_fails_is_shown_and_fails_the_run(folder, capfd):
    """A test, a file that cannot be imported, and a process that ends without a word."""
    with (folder / "test_long.py").open("a") as file:
        file.write("    assert number != 4, 'four'\n")
    (folder / "test_short.py").write_text("raise RuntimeError('broken')")
    (folder / "test_x.py").write_text("import os; os._exit(0)")
    assert not _run(folder)
    shown = capfd.readouterr().out
    assert "AssertionError: four" in shown
    assert "RuntimeError: broken" in shown
    failed, _, rest = shown.splitlines()[-1].removeprefix("failed: ").partition(" (")
    assert sorted(failed.split(", ")) == ["test_long 2/3", "test_short", "test_x", "tests that run alone"]
    assert rest.endswith(" s)")


def test_long_files_begin_first():
    files = [Path("test_fusion.py"), Path("test_encoder_bits.py")]
    parts = RUNNER["slices_of"](files, {"test_encoder_*": 8, "*": 1})
    assert [str(each) for each in parts] == [*(f"test_encoder_bits {i}/8" for i in range(1, 9)), "test_fusion"]


def test_the_command_line(folder, capfd):
    files = [str(folder / "test_short.py"), str(folder / "test_x.py")]
    assert RUNNER["main"]([*files, "--jobs", "2", "--", "-k", "together"]) == 0
    assert (folder / "notes").read_text() == "together\n"
