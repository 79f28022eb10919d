"""Own the magazine of an engine that keeps its own block tables: the blocks that it holds by id, outside any lease.

An exchange whose answer is lost may have been carried out. So a retry is sent only under the same sequence, and after a
call that ended without an answer, the caller must ask for the inventory before the next exchange.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvlease._bound import Bound
from kvlease._calling import exchanges, flows
from kvlease._calling.flows import Flow
from kvlease.errors import InvalidError, RefusedError, WrongStateError
from kvlease.exchanges import Exchanged, ExchangeOrder, Inventory

if TYPE_CHECKING:
    from kvlease._calling.async_port import AsyncPort
    from kvlease._calling.session import Session
    from kvlease.worker import Port

__all__ = ["AsyncMagazine", "ExchangeOrder", "Exchanged", "Inventory", "Magazine"]

NOTHING: Final = ExchangeOrder()


class MagazineView(Bound):
    """What a process knows of its magazine: how far its exchanges have come."""

    def __init__(self, session: "Session") -> None:
        """Show the magazine of an attached session.

        Raises:
            WrongStateError: the session attached without a magazine.
        """
        if not session.request.magazine:
            message = "the worker attached without a magazine; attach with magazine=..."
            raise WrongStateError(message, resource="magazine", rule="no_magazine")
        self._session = session
        self._sequence: int | None = None
        self._is_in_doubt = False

    def __repr__(self) -> str:
        """Show life: its name and how far it has come."""
        state = "in doubt" if self._is_in_doubt else f"after {self._sequence or 0} exchanges"
        return f"<{type(self).__name__} {self.name!r}, {state}>"

    @property
    def name(self) -> str:
        """The name under which the engine's processes attached."""
        return self._session.request.magazine

    def _exchanging(self, order: ExchangeOrder) -> Flow[Exchanged]:
        if self._is_in_doubt:
            message = "an exchange has no answer yet, or ended without one; call inventory() first"
            raise WrongStateError(message, resource="sequence", rule="inventory_first")
        if self._sequence is None:
            yield from self._taking_stock()
        assert self._sequence is not None, "an inventory tells it"
        sequence = self._sequence + 1
        try:
            ask = exchanges.exchange(order, sequence)
            # From here on, any end of the call other than an answer or a refusal leaves the exchange in doubt.
            self._is_in_doubt = True
            exchanged = yield from flows.told(self._session.link, ask)
        except (InvalidError, RefusedError):
            self._is_in_doubt = False
            raise
        if self._sequence != sequence - 1:
            message = "the magazine's inventory was taken before the exchange's answer, and tells what became of it"
            raise WrongStateError(message, resource="sequence", rule="answer_first")
        self._sequence, self._is_in_doubt = sequence, False
        return exchanged

    def _taking_stock(self) -> Flow[Inventory]:
        found = yield from flows.told(self._session.link, exchanges.inventory())
        self._sequence, self._is_in_doubt = found.sequence, False
        return found


class Magazine(MagazineView):
    """The blocks that an engine holds by id; threads may share it, and exchanges go one after another."""

    def __init__(self, session: "Session", port: "Port") -> None:
        """Join the magazine of an attached session to its connection."""
        super().__init__(session)
        self._port = port
        self._turn = threading.Lock()

    def exchange(self, order: ExchangeOrder = NOTHING) -> Exchanged:
        """Publish, retract, drop, hold and take blocks, in one call.

        Raises:
            WrongStateError: the last exchange ended without an answer; ask for the inventory first.
            UnavailableError: the daemon cannot be reached, and the exchange may have been carried out.
            DeadlineError: the same, because the answer did not come in time.
            StaleError: the magazine has gone on without this process, or has ended; ask for the inventory.
        """
        with self._turn:
            return self._port.run(self._exchanging(order))

    def begin(self, order: ExchangeOrder) -> Callable[[], Exchanged]:
        """Send an exchange, and return the function that waits for its answer, which raises what `exchange` does.

        So the daemon works while the caller does something else. Ask for the answer once, and before anything else of
        the magazine; if nobody does, the exchange has ended without an answer. Only over the local socket is it on its
        way meanwhile; another transport sends it when the answer is asked for.

        Raises:
            WrongStateError: the last exchange has no answer yet, or ended without one; ask for the inventory first.
        """
        with self._turn:
            if self._sequence is None and not self._is_in_doubt:
                self._port.run(self._taking_stock())
            answer = self._port.begin(self._exchanging(order))

        def exchanged() -> Exchanged:
            with self._turn:
                return answer()

        return exchanged

    def inventory(self) -> Inventory:
        """Tell what is in the magazine; the next exchange goes on from there."""
        with self._turn:
            return self._port.run(self._taking_stock())


class AsyncMagazine(MagazineView):
    """The same as `Magazine`, for an event loop."""

    def __init__(self, session: "Session", port: "AsyncPort") -> None:
        """Join the magazine of an attached session to its connection."""
        super().__init__(session)
        self._port = port
        self._turn = asyncio.Lock()

    async def exchange(self, order: ExchangeOrder = NOTHING) -> Exchanged:
        """Publish, retract, drop, hold and take blocks, in one call; raises what `Magazine.exchange` does."""
        async with self._turn:
            return await self._port.run(self._exchanging(order))

    async def inventory(self) -> Inventory:
        """Tell what is in the magazine; the next exchange goes on from there."""
        async with self._turn:
            return await self._port.run(self._taking_stock())
