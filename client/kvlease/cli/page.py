"""Own `kvlease ui`: the address of the web page, with a token that the daemon accepts."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import quote

import typer

from kvlease._runtime import ADDRESS_VARIABLE, PAGE_FILE, runtime_directory
from kvlease.cli.connecting import CONNECT_SECONDS, told
from kvlease.client import Client
from kvlease.credentials import from_environment, readers_file, token_in
from kvlease.errors import InvalidError, NotYoursError, UnknownWorkerError
from kvlease.transports.base import Address, parse_address

DEFAULT: Final = "http://127.0.0.1:7070"
"""Where a daemon serves the page by default."""


def ui(
    *,
    address: Annotated[
        str,
        typer.Option(
            help="Where the daemon serves REST over TCP.",
            show_default=f"{ADDRESS_VARIABLE} if it is http or https, else the one in {PAGE_FILE} beside the socket",
        ),
    ] = "",
    token_file: Annotated[
        str,
        typer.Option(
            help="The file with the reader's token.",
            show_default="KVLEASE_TOKEN_FILE, else reader.token beside the daemon's socket",
        ),
    ] = "",
) -> None:
    """Print the address of the web page, with a reader's token in it, for your browser.

    The daemon is asked first: if it does not answer, or does not accept the token, no address is printed.
    """
    with told(status=1):
        typer.echo(_address_with_token(address, token_file))


def _address_with_token(written: str, token_file: str) -> str:
    """Return the page's address with the token.

    Raises:
        InvalidError: it is no address of the page, or the token cannot be read or is not the daemon's.
        UnavailableError: no daemon answers there.
    """
    known = os.environ.get(ADDRESS_VARIABLE, "")
    directory = _directory(known)
    page = _page(written, known, directory)
    file = readers_file(token_file, page.host, page.port, directory)
    try:
        token = token_in(file)
    except InvalidError as error:
        message = (
            f"{error.message}; name the file of the daemon's --reader-token-file with --token-file"
        )
        raise InvalidError(message, resource=error.resource) from error
    shown = replace(from_environment(), token=token)
    with Client(str(page), deadline_seconds=CONNECT_SECONDS, credentials=shown) as client:
        try:
            client.stats()
        except (UnknownWorkerError, NotYoursError) as error:
            message = (
                f"the daemon at {page} does not accept the token in {file}; name the file of its token with "
                f"--token-file, or its socket with {ADDRESS_VARIABLE}=unix:///…/kvlease.sock"
            )
            raise InvalidError(message, resource="token") from error
    return f"{page}/ui#token={quote(token, safe='')}"


def _page(written: str, known: str, directory: Path) -> Address:
    """Return where the page is; `known` is the address that the environment sets for all commands."""
    is_elsewhere = not written and known and not parse_address(known).path
    page = parse_address(written or (known if is_elsewhere else _left_in(directory)))
    if page.protocol != "http" or page.path:
        message = (
            f"a browser cannot open the page at {page}; use --address http://host:port, or https://"
        )
        raise InvalidError(message, resource="address")
    return page


def _left_in(directory: Path) -> str:
    """Return the address that a daemon left in its directory, where only its user can write."""
    try:
        return (directory / PAGE_FILE).read_text(encoding="utf-8").strip() or DEFAULT
    except (OSError, UnicodeDecodeError):
        return DEFAULT


def _directory(known: str) -> Path:
    """Return where the daemon that the environment names has its sockets and tokens."""
    path = parse_address(known).path if known else ""
    return Path(path).parent if path else runtime_directory()
