"""Own how others' text is printed: readable, and without anything that a terminal would obey as a command."""

import sys

import typer
from rich.text import Text


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


def cell(text: str) -> Text:
    """Return a table cell with exactly this text, even if it looks like markup."""
    return Text(printable(text))
