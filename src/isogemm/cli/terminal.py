"""Lines, tables and progress on the terminal: with rich where it is installed, as plain text elsewhere."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TextIO

from isogemm.bench.runner import Progress
from isogemm.core import files

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

STANDARD_OUTPUT = "standard output"  # where an error of a file is named
UNSEEN_WIDTH = 140  # of tables in a file or a pipe
STYLES = {"yes": "green", "pass": "green", "no": "yellow", "skipped": "yellow", "FAIL": "bold red"}

_NARROWEST = 20  # characters of a column of words
_NUMBER = re.compile(r"\d\S*( to \d\S*| \(\S+\)| [KMG]iB| \*)?")  # a cell to align to the right


class Terminal:
    """Lines, tables and progress: with rich where it is installed, as plain text elsewhere."""

    def __init__(self) -> None:
        self._out = _rich_console(sys.stdout)
        self._err = _rich_console(sys.stderr)

    def line(self, text: str) -> None:
        with files.naming(STANDARD_OUTPUT):
            if self._out is None:
                print(text, flush=True)
            else:
                self._out.print(text, soft_wrap=True)

    def table(
        self, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], styles: Mapping[str, str] = STYLES,
        key: int = 1,
    ) -> None:  # fmt: skip
        """Show a table, or nothing where there are no rows. styles: rich's, by a cell's text.

        In a narrow terminal several tables, one below the other: each has the first `key` columns, which name a line.
        """
        lines = [[" ".join(cell.split()) for cell in row] for row in rows]
        if not lines:
            return
        made = [Column(name, cells) for name, *cells in zip(columns, *lines, strict=True)]
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else UNSEEN_WIDTH
        most, gap = (width + 2, 2) if self._out is None else (self._out.width - 1, 3)
        with files.naming(STANDARD_OUTPUT):
            for place, piece in enumerate(_pieces(made, key, most, gap)):
                above = "" if place else title
                if self._out is None:
                    print("", *filter(None, (above, _plain_table(piece))), sep="\n")
                else:
                    self._out.print("", _rich_table(above, piece, styles), sep="\n")
            if self._out is None:
                print()

    @contextmanager
    def progress(self, shown: bool = True) -> Iterator[Progress]:
        """Show how many steps are done and which one begins: a bar on a terminal, lines elsewhere."""
        if not shown or self._err is None or not self._err.is_terminal:
            yield _line_per_step() if shown else lambda done, total, step: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        text = TextColumn("{task.description}", markup=False)
        columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text
        with Bar(*columns, console=self._err, transient=True) as bar:
            task = bar.add_task("")
            yield lambda done, total, step: bar.update(task, completed=done, total=total, description=step)


def _line_per_step() -> Progress:
    last = ""

    def show(done: int, total: int, step: str) -> None:
        nonlocal last
        if step and step != last:
            print(f"[{min(done + 1, total)}/{total}] {step}", file=sys.stderr, flush=True)
        last = step

    return show


def _rich_console(stream: TextIO) -> Console | None:
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    width = None if stream.isatty() else UNSEEN_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


@dataclass(frozen=True)
class Column:
    name: str
    cells: Sequence[str]
    width: int = 0

    @property
    def numeric(self) -> bool:
        return all(_NUMBER.fullmatch(cell) for cell in self.cells if cell)

    @property
    def least(self) -> int:
        """Smallest width that breaks no number, and only long words."""
        words = " ".join((self.name, *self.cells)).split()
        return max(*map(len, self.cells if self.numeric else ()), min(_NARROWEST, max(map(len, words), default=1)), 1)

    @property
    def most(self) -> int:
        return max(1, *map(len, (self.name, *self.cells)))


def _pieces(columns: Sequence[Column], key: int, most: int, gap: int) -> Iterator[list[Column]]:
    """Split columns into as few tables of `most` characters as possible, each with the first `key` columns."""
    pieces: list[list[Column]] = []
    for column in columns[key:]:
        if not pieces or sum(each.least + gap for each in (*pieces[-1], column)) > most:
            pieces.append(list(columns[:key]))
        pieces[-1].append(column)
    for piece in pieces or [list(columns)]:
        widths = [each.most for each in piece]
        while sum(widths) + gap * len(widths) > most:
            shrinkable = [width if width > each.least else 0 for width, each in zip(widths, piece, strict=True)]
            if not any(shrinkable):
                break
            widths[shrinkable.index(max(shrinkable))] -= 1
        yield [replace(each, width=width) for each, width in zip(piece, widths, strict=True)]


def _rich_table(title: str, columns: Sequence[Column], styles: Mapping[str, str]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", title_style="bold")
    for each in columns:
        justify: Any = "right" if each.numeric else "left"
        table.add_column(each.name, justify=justify, width=each.width, overflow="fold")
    for line in zip(*(each.cells for each in columns), strict=True):
        table.add_row(*(Text(cell, styles.get(cell, "")) for cell in line))
    return table


def _plain_table(columns: Sequence[Column]) -> str:
    widths = [each.width for each in columns]
    wrapped: list[tuple[str, ...]] = []
    for line in zip(*((each.name, "-" * each.width, *each.cells) for each in columns), strict=True):
        cells = [textwrap.wrap(cell, width) for cell, width in zip(line, widths, strict=True)]
        wrapped += zip_longest(*cells, fillvalue="")
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in wrapped)
