"""Own what is said of an option whose value is of the wrong kind or out of range: the value, and what to write."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from kvlease._checks import shown

_WANTED: Final = {
    "int_parsing": "a whole number",
    "float_parsing": "a number",
    "greater_than_equal": "{ge:g} or more",
}
"""What to write, by the kind of mistake, with its bound."""


class Commands(TyperGroup):
    """A group of commands that explains in our words what is wrong with an option of any command in it."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was typed."""
        with _in_our_words():
            return super().invoke(ctx)


@contextmanager
def _in_our_words() -> Iterator[None]:
    try:
        yield
    except typer.BadParameter as error:
        if isinstance(error.__cause__, ValidationError):
            error.message = _words(error.__cause__) or error.message
        raise


def _words(error: ValidationError) -> str:
    """Return what was written and what to write instead; empty if the error's own words have to do."""
    first = error.errors(include_url=False)[0]
    wanted = _WANTED.get(first["type"])
    if wanted is None:
        return ""
    return f"it is {shown(first['input'])}; it must be {wanted.format_map(first.get('ctx', {}))}"
