"""Own what of somebody else's text reaches a terminal: what can be read, and nothing that the terminal would obey."""

import sys

import typer
from rich.text import Text


def say(text: str) -> None:
    """Print a line that has somebody else's text in it."""
    typer.echo(printable(text))


def has_terminal() -> bool:
    """Tell whether somebody can look at a screen and press keys."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def printable(text: str) -> str:
    """Return a text in which every character that does not print is written as in Python, but the end of a line."""
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode()
        for one in text
    )


def counted(count: int, what: str) -> str:
    """Return a count of things, of which one is called `what`."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def cell(text: str) -> Text:
    """Return a cell of a table that says just this, whatever looks like markup in it."""
    return Text(printable(text))
