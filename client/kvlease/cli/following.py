"""Own the watching of events over a restart of the daemon or of its control process."""

import time
from collections.abc import Iterator
from typing import Final

import typer

from kvlease.client import Client
from kvlease.errors import UnavailableError
from kvlease.replies import Event

RETURN_SECONDS: Final = 30.0
"""Seconds that a watch waits for a daemon that it has lost."""
_PAUSE_SECONDS: Final = 0.5


def followed(
    client: Client, *, cache: str, after: int, idle_seconds: float | None, with_snapshot: bool
) -> Iterator[Event]:
    """Yield events as `Client.watch` does, and go on after the last one if the daemon is lost and comes back.

    Raises:
        UnavailableError: there was no daemon, or it does not come back; then it says after which number to go on.
    """
    # A daemon that was never there is not waited for.
    client.stats()
    last = after
    while True:
        try:
            for event in client.watch(
                cache=cache,
                after_sequence=last,
                idle_seconds=idle_seconds,
                with_snapshot=with_snapshot,
            ):
                last = event.sequence
                yield event
        except UnavailableError as error:
            _await(client, error, last)
        else:
            return


def _await(client: Client, error: UnavailableError, last: int) -> None:
    """Wait until the daemon answers."""
    typer.echo(f"{error.message}; waiting for it to come back", err=True)
    ends_at = time.monotonic() + RETURN_SECONDS
    while True:
        try:
            client.stats()
        except UnavailableError as again:
            if time.monotonic() > ends_at:
                message = f"{again.message}; to go on later, begin with --after {last}"
                raise UnavailableError(message) from error
            time.sleep(_PAUSE_SECONDS)
        else:
            return
