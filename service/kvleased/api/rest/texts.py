"""Own the texts in a request's path and query: what is percent-encoded is UTF-8, or the request is refused.

Bytes that are not UTF-8 must not become another text, as that could be somebody's name.
"""

from typing import Final
from urllib.parse import parse_qsl, unquote_to_bytes

from starlette.requests import Request

from kvlease.errors import InvalidError

_MARKED: Final = "surrogateescape"
"""How bytes that are not UTF-8 are kept in a text until `text` refuses it."""


def part(written: bytes) -> str:
    """Return the decoded part of a path, which `text` has still to check."""
    return unquote_to_bytes(written).decode(errors=_MARKED)


def query(request: Request) -> list[tuple[str, str]]:
    """Return the names and values in a query.

    Raises:
        InvalidError: a name or a value is not UTF-8.
    """
    written = request.scope["query_string"].decode(errors=_MARKED)
    asked = parse_qsl(written, keep_blank_values=True, errors=_MARKED)
    return [(text("query", name), text(name, value)) for name, value in asked]


def text(name: str, decoded: str) -> str:
    """Return a text; raises InvalidError with the name of its parameter if it is not UTF-8."""
    try:
        decoded.encode()
    except UnicodeEncodeError:
        message = f"{name} has bytes that are not UTF-8; send the text as UTF-8, percent-encoded"
        raise InvalidError(message, resource=name) from None
    return decoded
