"""Rewrites what is generated from benchmarks/results, as `make docs` does.

    python benchmarks/documents.py

These are the tables of the Markdown files, the plots in docs/images, and src/isogemm/bench/headline.json, which the
package ships. In a document everything between `<!-- figures:NAME -->` and `<!-- /figures -->` is generated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from figures import headline, tables
from isogemm.bench import store
from isogemm.bench.headline import FILE, Recorded
from isogemm.cli.families import FAMILIES
from isogemm.core import files
from isogemm.training import report, results

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
HEADLINE = Path("src/isogemm/bench") / FILE

_MARKED = re.compile(r"(<!-- figures:(?P<name>[\w.-]+) -->\n)(?P<body>.*?)(<!-- /figures -->)", re.DOTALL)
_ANY_MARKER = re.compile(r"<!-- /?figures\b.*?-->")


def main() -> None:
    made, measured = generated(RESULTS)
    for file in write(ROOT, made, measured):
        print(f"rewritten: {file.relative_to(ROOT)}")
    save_plots(_runs(RESULTS), ROOT / "docs" / "images")


def generated(folder: Path) -> tuple[dict[str, str], list[Recorded]]:
    """The tables by name, and the headline figures, of a folder of results."""
    rows, runs = store.read(*sorted(folder.glob("*/*.jsonl"))), _runs(folder)
    views = [family.bench.VIEW for family in FAMILIES]
    made = tables.tables(rows, views) | tables.training(runs) | tables.swapped_models(folder)
    measured = headline.recorded(rows, headline.of_training(runs))
    if measured:
        made["headline"] = headline.table(measured)
    return made, measured


def write(root: Path, made: Mapping[str, str], measured: list[Recorded]) -> list[Path]:
    """Rewrite the documents below a folder, and the figures to ship; returns the files that changed."""
    texts = {root / HEADLINE: headline.dumps(measured)}
    for document in documents(root):
        try:
            texts[document] = rendered(document.read_text(encoding="utf-8"), made)
        except ValueError as error:
            raise SystemExit(f"{document}: {error}") from error
    changed = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in changed:
        files.write(path, texts[path].encode())
    return changed


def documents(root: Path) -> list[Path]:
    return [*sorted(root.glob("*.md")), *sorted(root.glob("docs/**/*.md")), *sorted(root.glob("src/**/*.md"))]


def rendered(text: str, tables: Mapping[str, str]) -> str:
    """Return the document with every marked place filled in."""

    def fill(match: re.Match[str]) -> str:
        name, body = match["name"], match["body"]
        if _ANY_MARKER.search(body):
            raise ValueError(f"figures:{name} has no closing <!-- /figures -->")
        if name not in tables:
            raise ValueError(f"figures:{name} is not measured; there are: {', '.join(tables) or 'none'}")
        return f"{match[1]}\n{tables[name].strip()}\n\n{match[4]}"

    filled = _MARKED.sub(fill, text)
    stray = _ANY_MARKER.search(_MARKED.sub("", filled))
    if stray:
        raise ValueError(f"{stray[0]} stands alone; expected <!-- figures:NAME --> ... <!-- /figures -->")
    return filled


def save_plots(records: Iterable[results.Record], folder: Path) -> None:
    """Write the plots as images for the documents."""
    for preset, runs in report.by_preset(records).items():
        for name, draw in report.PLOTS.items():
            report.save(folder / f"{preset}-{name}", draw, runs)


def _runs(folder: Path) -> list[results.Record]:
    return [run for file in sorted(folder.glob("*/training/*.jsonl")) for run in results.read(file)]


if __name__ == "__main__":
    main()
