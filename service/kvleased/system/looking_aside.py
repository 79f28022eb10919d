"""Own questions to a file system that may never answer: a caller waits for an answer only for a limited time.

A call into the kernel that hangs can be neither cancelled nor killed. So it gets a thread that nobody has to wait for,
not even the end of the process; and there is one such thread at a time, however often the question is asked.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable


class LookingAside:
    """Ask one question, again and again, in a thread."""

    def __init__(self, look: Callable[[], int], seconds_max: float) -> None:
        """Take the function that asks, and the seconds that a caller waits for its answer."""
        self._look = look
        self._seconds_max = seconds_max
        self._pending: asyncio.Future[int] | None = None

    async def answer(self) -> int:
        """Return the answer; if an earlier question is still under way, wait for its answer instead.

        Raises:
            TimeoutError: there is no answer yet.
            OSError: the file system refuses.
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
        # A loop that is closed raises RuntimeError; then nobody waits any more.
        with contextlib.suppress(RuntimeError):
            try:
                found = self._look()
            except OSError as error:
                loop.call_soon_threadsafe(pending.set_exception, error)
            else:
                loop.call_soon_threadsafe(pending.set_result, found)


def _take_note(pending: asyncio.Future[int]) -> None:
    """Retrieve an error that nobody may wait for any more, so that asyncio does not complain of it."""
    if not pending.cancelled():
        pending.exception()
