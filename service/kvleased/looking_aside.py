"""Own questions to a file system that may never answer: the loop waits for none of them longer than it is told.

A call into the kernel that hangs can be neither cancelled nor killed, so it gets a thread that nobody has to wait for,
also not at the end of the process; and there is one at a time, however often it is asked.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable


class LookingAside:
    """Ask one question, again and again, in a thread."""

    def __init__(self, look: Callable[[], int], seconds_max: float) -> None:
        """Take what asks, and the seconds that a caller waits for its answer."""
        self._look = look
        self._seconds_max = seconds_max
        self._pending: asyncio.Future[int] | None = None

    async def answer(self) -> int:
        """Return the answer; that of an earlier question which is still under way is as good.

        Raises:
            TimeoutError: there is none yet.
            OSError: what the file system says.
        """
        if self._pending is None or self._pending.done():
            self._pending = asyncio.get_running_loop().create_future()
            self._pending.add_done_callback(_take_note)
            thread = threading.Thread(target=self._ask, args=(self._pending,), daemon=True)
            thread.start()
        async with asyncio.timeout(self._seconds_max):
            return await asyncio.shield(self._pending)

    def _ask(self, pending: asyncio.Future[int]) -> None:
        loop = pending.get_loop()
        # When the loop is over, nobody waits any more.
        with contextlib.suppress(RuntimeError):
            try:
                found = self._look()
            except OSError as error:
                loop.call_soon_threadsafe(pending.set_exception, error)
            else:
                loop.call_soon_threadsafe(pending.set_result, found)


def _take_note(pending: asyncio.Future[int]) -> None:
    """Look at an error that may come when nobody waits for it any more, or asyncio would complain of it."""
    if not pending.cancelled():
        pending.exception()
