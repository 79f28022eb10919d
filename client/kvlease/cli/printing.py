"""Own how others' text is printed: readable, and without anything that a terminal would obey as a command."""

import os
import sys
from typing import Final

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

_WIDE: Final = 1 << 14
"""Columns where no terminal has a width: more than any row has."""


class PlainTable(Table):
    """A table whose cells are plain text, without markup, below a heading that may be wider than they are."""

    heading = Text()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the heading, then the table, no narrower than it must be: print it uncropped.

        As rich's title the heading would be folded at the table's width.
        """
        yield self.heading
        width = max(options.max_width, self._columns_min())
        yield from super().__rich_console__(console, options.update_width(width))

    def add_row(self, *cells: str) -> None:  # type: ignore[override]  # ours have nothing but texts
        """Add a row of texts."""
        super().add_row(*map(cell, cells))

    def _columns_min(self) -> int:
        """Return the least columns of a terminal in which all is whole that is not folded; rich would cut it."""
        gap = 1 + self.padding[1]
        return sum(_columns_min(column) for column in self.columns) + gap * (len(self.columns) - 1)


def _columns_min(column: Column) -> int:
    texts = (str(text).splitlines() for text in (column.header, *column.cells))
    widest = max((cell_len(line) for lines in texts for line in lines), default=0)
    return widest if column.no_wrap else min(widest, column.min_width or 1)


def console() -> Console:
    """Return a console for output: as wide as its terminal or COLUMNS, or so wide that no row folds."""
    found = Console()
    is_for_people = found.is_terminal or os.environ.get("COLUMNS")
    return found if is_for_people else Console(width=_WIDE)


def say(text: str) -> None:
    """Print a line that contains text of others."""
    typer.echo(printable(text))


def has_terminal() -> bool:
    """Tell whether input and output are a terminal, for a screen and keys."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def printable(text: str) -> str:
    """Return a text with unprintable characters escaped as in Python, except line ends."""
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode()
        for one in text
    )


def counted(count: int, what: str) -> str:
    """Return a count with its noun, whose singular is `what`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def show_age(milliseconds: int) -> str:
    """Return a span of time in its largest whole unit."""
    seconds = milliseconds // 1000
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def cell(text: str) -> Text:
    """Return a table cell with exactly this text, even if it looks like markup."""
    return Text(printable(text))
