"""Own how rows are shown at any width: as a table if every number fits, else one value below the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvlease.cli.printing import cell

_GAP: Final = 3
"""Columns of the terminal between two columns of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """What one column of a sheet shows."""

    name: str
    is_number: bool = True
    """Whether it is aligned to the right, in one line."""
    wrapped_columns: int = 0
    """The least columns of the terminal for a sentence, which may wrap; 0: no sentence."""


def sheet(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, *, bold: int | None = None
) -> RenderableType:
    """Return rows as a table if that fits in `width`, else as records with one line for each value."""
    if _least_width(columns, rows) > width:
        return _records(columns, rows, bold)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column, least in zip(columns, _least_widths(columns, rows), strict=True):
        table.add_column(
            column.name,
            justify="right" if column.is_number else "left",
            no_wrap=not column.wrapped_columns,
            min_width=least,
            overflow="fold",
        )
    for index, row in enumerate(rows):
        table.add_row(*map(cell, row), style="bold" if index == bold else "")
    return table


def pairs(rows: Sequence[tuple[str, str]], *, name_style: str = "bold") -> Table:
    """Return names and what they stand for, one below the other; long texts wrap."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style=name_style, no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(cell, row))
    return table


def _records(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], bold: int | None
) -> RenderableType:
    names = max(len(column.name) for column in columns)
    parts: list[RenderableType] = []
    for index, row in enumerate(rows):
        said = [(column.name, value) for column, value in zip(columns, row, strict=True)]
        said[0] = (said[0][0].ljust(names), said[0][1])
        parts += [Text("")] if index else []
        table = pairs(said, name_style="dim")
        table.style = "bold" if index == bold else ""
        parts.append(table)
    return Group(*parts)


def _least_widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    least = []
    for index, column in enumerate(columns):
        longest = max((len(row[index]) for row in rows), default=0)
        shown = min(longest, column.wrapped_columns or longest)
        least.append(max(shown, len(column.name)))
    return least


def _least_width(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    return sum(_least_widths(columns, rows)) + _GAP * (len(columns) - 1)
