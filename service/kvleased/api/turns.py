"""Own whose turn it is where several peers have sent more than is served at once; what is served is theirs to know."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from kvleased.next_turn import in_next_turn


class Talker(Protocol):
    """A peer that may have sent much at once."""

    def go_on(self) -> bool:
        """Serve a little of it; tell whether there is more."""
        ...


class Turns:
    """A line of talkers, of whom one goes on in each turn of the event loop, so that all others are heard between."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self._line: deque[Talker] = deque()

    def __repr__(self) -> str:
        """Show life."""
        return f"<Turns {len(self._line)} in line>"

    def take(self, talker: Talker) -> bool:
        """Let a talker go on, at once where nobody is in line; tell whether it now is in line itself."""
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


class Line:
    """A line of acts that peers caused, of which one is done in each turn of the event loop."""

    def __init__(self) -> None:
        """Begin with nobody."""
        self._acts: deque[Callable[[], object]] = deque()
        self._is_taken = False
        """Whether something was done in this turn, or somebody is in line."""

    def __repr__(self) -> str:
        """Show life."""
        return f"<Line of {len(self._acts)}>"

    def take(self, act: Callable[[], object]) -> bool:
        """Do something, at once where nobody has had this turn; tell whether it is done, rather than in line."""
        if self._is_taken:
            self._acts.append(act)
            return False
        self._is_taken = True
        in_next_turn(self._next)
        act()
        return True

    def wait(self, act: Callable[[], object]) -> None:
        """Have something done in another turn than this one."""
        self._acts.append(act)
        if not self._is_taken:
            self._is_taken = True
            in_next_turn(self._next)

    async def breathe(self) -> None:
        """Go on in another turn than this one, after those in line; for who has said much without a pause."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def go_on() -> None:
            if not turn.done():
                turn.set_result(None)

        self.wait(go_on)
        await turn

    def _next(self) -> None:
        if not self._acts:
            self._is_taken = False
            return
        in_next_turn(self._next)
        self._acts.popleft()()


class OneATurn:
    """An app whose requests begin one in each turn of the event loop, so that many at once hold up nobody else."""

    def __init__(self, app: ASGIApp) -> None:
        """Take the app."""
        self._app = app
        self._line: deque[tuple[asyncio.Future[None], Scope]] = deque()
        self._has_begun = False

    def __repr__(self) -> str:
        """Show life."""
        return f"<OneATurn {len(self._line)} in line>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, when it is its turn; not one whose connection has ended in line."""
        loop = asyncio.get_running_loop()
        if self._has_begun:
            turn: asyncio.Future[None] = loop.create_future()
            self._line.append((turn, scope))
            await turn
            if _is_lost(scope):
                return
        else:
            self._has_begun = True
            loop.call_soon(self._next)
        await self._app(scope, receive, send)

    def _next(self) -> None:
        while self._line:
            turn, scope = self._line.popleft()
            if turn.done():
                continue
            turn.set_result(None)
            if not _is_lost(scope):
                # Those that are take no turn: connections that come and go would make the line ever longer.
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._has_begun = False


def _is_lost(scope: Scope) -> bool:
    """Tell whether nobody is there any more to be answered."""
    return bool(scope.get("extensions", {}).get("is_lost"))
