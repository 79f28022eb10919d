"""Own a probe in an event loop that is not ours to change: Python imports this file first where it is on PYTHONPATH.

Where the process is a control process, or is told to be a bare loop, its loop notes how late each of its timers is, in
the file that the environment names: the number of notes, then the notes, in seconds.
"""

import mmap
import os
import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

FILE: Final = "KVLEASE_BENCH_LAG"
SECONDS_BETWEEN_TIMERS: Final = 0.002
NOTES_MAX: Final = 1 << 20
BYTES_PER_NOTE: Final = 8


class Probe:
    """A timer that starts anew each time."""

    def __init__(self, loop: "asyncio.AbstractEventLoop", path: str) -> None:
        """Open the file."""
        self._loop = loop
        with open(path, "r+b") as file:  # noqa: PTH123 - pathlib is slow to import, and this comes before all else
            mapping = mmap.mmap(file.fileno(), NOTES_MAX * BYTES_PER_NOTE)
        self._count = memoryview(mapping).cast("q")
        self._notes = memoryview(mapping).cast("d")

    def start(self) -> None:
        """Set the timer."""
        self._set_at = time.perf_counter()
        self._loop.call_later(SECONDS_BETWEEN_TIMERS, self._note)

    def _note(self) -> None:
        late = time.perf_counter() - self._set_at - SECONDS_BETWEEN_TIMERS
        number = self._count[0] + 1
        if number < NOTES_MAX:
            self._notes[number] = late
            self._count[0] = number
            self.start()


def _install(path: str) -> None:
    import uvloop  # noqa: PLC0415 - other processes shall not import it

    make = uvloop.new_event_loop

    def probed() -> "asyncio.AbstractEventLoop":
        loop = make()
        loop.call_soon(Probe(loop, path).start)
        return loop

    uvloop.new_event_loop = probed


if FILE in os.environ and {"control", "bare"} & set(sys.orig_argv):
    _install(os.environ[FILE])
