"""Own the order of turns among peers that have sent more than is served at once; they know what to serve."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from kvleased.system.next_turn import in_next_turn

TO_WAKE: Final = 2
"""Turns that waking a task takes; the task goes on in the second of them."""
REST_SECONDS: Final = 0.001
"""How long everybody else is served between two acts that nobody waits for."""


class Talker(Protocol):
    """A peer that may have sent much at once."""

    def go_on(self) -> bool:
        """Serve a little of what it sent; tell whether there is more."""
        ...


class Turns:
    """A line of talkers: one goes on in each turn of the event loop, so that all other peers are heard in between."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self._line: deque[Talker] = deque()

    def __repr__(self) -> str:
        """Show life."""
        return f"<Turns {len(self._line)} in line>"

    def take(self, talker: Talker) -> bool:
        """Let a talker go on, at once if nobody is in line; tell whether it is now in line itself."""
        if not self._line:
            if not talker.go_on():
                return False
            asyncio.get_running_loop().call_soon(self._next)
        self._line.append(talker)
        return True

    def _next(self) -> None:
        talker = self._line.popleft()
        if talker.go_on():
            self._line.append(talker)
        if self._line:
            asyncio.get_running_loop().call_soon(self._next)


Act = Callable[[], int]
"""Does or starts something; returns how many turns that takes, 0 if nothing was left to do."""


class Line:
    """A line of acts that peers caused; one is done in each turn of the event loop.

    No act is done while the loop reads from its peers: those that were read in the same turn are served first.
    """

    def __init__(self) -> None:
        """Begin with nobody."""
        self._acts: deque[Act] = deque()
        self._num_turns = 0
        """Turns that the last act still takes."""
        self._is_taken = False
        """Whether this turn is taken, or an act is in line."""
        self._unhurried: deque[Act] = deque()
        """Acts that nobody waits for; while there are any, the loop has a rest before the first of them."""

    def __repr__(self) -> str:
        """Show life."""
        return f"<Line of {len(self._acts)}>"

    def take(self, act: Act) -> bool:
        """Have an act done when it is its turn; tell whether that is before the loop reads from its peers again."""
        self._acts.append(act)
        return self.begin()

    def wait(self, act: Act) -> None:
        """Have an act done in a later turn than this one."""
        self._acts.append(act)
        if not self._is_taken:
            self._is_taken = True
            in_next_turn(self._next)

    def rest(self, act: Act) -> None:
        """Have an act done that nobody waits for: one in a rest, however many there are."""
        self._unhurried.append(act)
        if len(self._unhurried) == 1:
            asyncio.get_running_loop().call_later(REST_SECONDS, self._rested)

    def begin(self) -> bool:
        """Take this turn; return false if it is taken already."""
        if self._is_taken:
            return False
        self._is_taken = True
        asyncio.get_running_loop().call_soon(self._next)
        return True

    async def breathe(self, is_needless: Callable[[], bool] = lambda: False) -> None:
        """Wait for a turn behind those in line; if `is_needless` says so then, the turn is left to the next in line."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def go_on() -> int:
            if turn.done():
                return 0
            turn.set_result(None)
            # The waiting task goes on in the next turn. Peers that have gone get none: the line would grow without end.
            return 0 if is_needless() else TO_WAKE

        self.wait(go_on)
        await turn

    def _next(self) -> None:
        self._num_turns = max(0, self._num_turns - 1)
        if not (self._num_turns or self._acts):
            self._is_taken = False
            return
        # Scheduled before the act, so that what the act begins finds the next turn free if nobody is in line.
        asyncio.get_running_loop().call_soon(self._next)
        while self._acts and not self._num_turns:
            self._num_turns = self._acts.popleft()()

    def _rested(self) -> None:
        is_done = False
        while self._unhurried and not is_done:
            is_done = bool(self._unhurried[0]())
            self._unhurried.popleft()
        if self._unhurried:
            asyncio.get_running_loop().call_later(REST_SECONDS, self._rested)


class OneATurn:
    """An app that begins one request in each turn of the event loop, so that many at once hold up nobody else."""

    def __init__(self, app: ASGIApp, line: Line) -> None:
        """Take the app, and the line that its requests share with everything else that strangers cause."""
        self._app = app
        self._line = line

    def __repr__(self) -> str:
        """Show life."""
        return f"<OneATurn in {self._line!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request when it is its turn, unless its connection has ended in line."""
        if not self._line.begin():
            await self._line.breathe(lambda: _is_lost(scope))
            if _is_lost(scope):
                return
        await self._app(scope, receive, send)


def _is_lost(scope: Scope) -> bool:
    """Tell whether the connection of a request has ended."""
    return bool(scope.get("extensions", {}).get("is_lost"))
