"""Own how a command reaches the daemon, and what it says if that fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final, TypeAlias

import typer
from rich.console import Console

from kvlease.cli.printing import printable
from kvlease.client import Client, OnDoubt
from kvlease.errors import InvalidError, KVLeaseError, UnknownCacheError

CONNECT_SECONDS: Final = 5.0
"""Seconds that a command waits for the daemon."""
_STATUS_INVALID: Final = 2

Address: TypeAlias = Annotated[
    str,
    typer.Option(
        envvar="KVLEASE_ADDRESS",
        help="Where the daemon is, such as unix:///path/kvlease.sock or http://127.0.0.1:7070.",
        show_default="the user's own local socket",
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@contextmanager
def connected(address: str, on_doubt: OnDoubt = "miss") -> Iterator[Client]:
    """Open a client, and turn what it raises into a sentence and an exit status: 2 if the input makes no sense."""
    with (
        told(status=1),
        Client(address or None, deadline_seconds=CONNECT_SECONDS, on_doubt=on_doubt) as client,
    ):
        yield client


@contextmanager
def told(*, status: int) -> Iterator[None]:
    """Turn an error into a sentence and an exit status."""
    try:
        yield
    except KVLeaseError as error:
        said = printable(f"{error.code}: {error.message}")
        if isinstance(error, UnknownCacheError):
            said += "; kvlease caches lists all caches"
        # Logs and searches want the sentence in one line; a terminal wraps it by itself.
        Console(stderr=True).print(said, style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(_STATUS_INVALID if isinstance(error, InvalidError) else status) from error
    except (BrokenPipeError, KeyboardInterrupt):
        # Whoever reads the stream has stopped.
        raise typer.Exit(0) from None
