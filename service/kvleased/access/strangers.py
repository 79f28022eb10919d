"""Own the log lines about refused callers: for each kind at most one line in ten seconds, however many there are.

Such callers choose what they send, so the log repeats nothing of it, and never a token.
"""

import asyncio
from time import monotonic
from typing import Final

import structlog

from kvleased.access.callers import Caller

SECONDS_APART: Final = 10.0
"""Seconds between two lines of one kind."""
_LOG = structlog.get_logger()


class Seldom:
    """Lines of one kind: the first at once, then one in ten seconds, with the count and the fields of the last."""

    def __init__(self, event: str) -> None:
        """Take the name of the event."""
        self._event = event
        self._num_held_back = 0
        self._fields: dict[str, object] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = -SECONDS_APART

    def __repr__(self) -> str:
        """Show life."""
        return f"<Seldom {self._event}, {self._num_held_back} held back>"

    def tell(self, **fields: object) -> None:
        """Write a line, or hold it back; called on the loop."""
        self._num_held_back += 1
        self._fields = fields
        seconds_left = self._told_at + SECONDS_APART - monotonic()
        if seconds_left <= 0:
            self.tell_held_back()
        elif self._timer is None:
            # Otherwise the last of a flood would be logged only when the next one comes, or never.
            self._timer = asyncio.get_running_loop().call_later(seconds_left, self.tell_held_back)

    def tell_held_back(self) -> None:
        """Write one line for all that were held back, if there are any."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._num_held_back:
            _LOG.warning(self._event, count=self._num_held_back, **self._fields)
            self._num_held_back = 0
            self._told_at = monotonic()


class Strangers:
    """Callers that were refused because of who they are, told apart by what they asked for."""

    def __init__(self) -> None:
        """Start with nobody."""
        self._refused: dict[str, Seldom] = {}

    def __repr__(self) -> str:
        """Show life."""
        return f"<Strangers {len(self._refused)} kinds of calls>"

    def refused(self, asked: str, caller: Caller, code: str, *, has_token: bool) -> None:
        """Log a refusal; `asked` is a verb or a path of ours, so that there are only few kinds."""
        seldom = self._refused.get(asked)
        if seldom is None:
            seldom = self._refused[asked] = Seldom("caller_refused")
        seldom.tell(verb=asked, code=code, has_token=has_token, **caller.who)
