from __future__ import annotations

from pathlib import Path

import pytest

import documents

DOCUMENT = "# Title\n\n<!-- figures:a -->\nold\n<!-- /figures -->\n\ntext\n\n<!-- figures:b -->\n<!-- /figures -->\n"


def test_marked_places_are_filled_in() -> None:
    text = documents.rendered(DOCUMENT, {"a": "| A |\n", "b": "| B |\n", "c": "unused"})
    assert text == (
        "# Title\n\n<!-- figures:a -->\n\n| A |\n\n<!-- /figures -->\n\n"
        "text\n\n<!-- figures:b -->\n\n| B |\n\n<!-- /figures -->\n"
    )
    assert documents.rendered(text, {"a": "| A |\n", "b": "| B |\n"}) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- figures:z -->\n<!-- /figures -->", "figures:z is not measured; there are: a"),
        ("<!-- figures:a -->\n", "<!-- figures:a --> stands alone"),
        ("<!-- figures:a -->\n<!-- figures:a -->\n<!-- /figures -->", "figures:a has no closing"),
        ("<!-- /figures -->", "<!-- /figures --> stands alone"),
    ],
)
def test_bad_markers_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        documents.rendered(text, {"a": "A"})


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    readme, guide = tmp_path / "README.md", tmp_path / "docs" / "guide.md"
    guide.parent.mkdir()
    guide.write_text("no table\n")
    readme.write_text("<!-- figures:a -->\nold\n<!-- /figures -->\n")
    headline = tmp_path / documents.HEADLINE
    assert documents.write(tmp_path, {"a": "new"}, []) == [headline, readme]
    assert "new" in readme.read_text()
    assert headline.read_text() == "[]\n"
    assert documents.write(tmp_path, {"a": "new"}, []) == []


def test_a_document_with_an_unmeasured_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("<!-- figures:other -->\n<!-- /figures -->\n")
    with pytest.raises(SystemExit, match=r"README\.md: figures:other is not measured"):
        documents.write(tmp_path, {}, [])
    assert not (tmp_path / documents.HEADLINE).exists()
