"""The README's and the guide's first examples run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _snippets(document, section=""):
    text = (ROOT / document).read_text(encoding="utf-8")
    start = text.index(section)
    end = re.compile(r"^#+ ", re.MULTILINE).search(text, start + len(section)) if section else None
    return re.findall(r"^```python\n(.*?)^```$", text[start : end.start() if end else None], re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("document", "section"), [("README.md", ""), ("docs/guide.md", "### Micro-batches that agree to the bit\n")]
)
def test_snippets_run(document, section):
    names = {}
    snippets = _snippets(document, section)
    assert snippets
    for snippet in snippets:
        exec(compile("import torch, isogemm\n" + snippet, document, "exec"), names)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert (ROOT / link).exists(), link
