"""Own a probe in an event loop that is not ours to change: Python imports this file first where it is on PYTHONPATH.

Where the process is a control process, or is told to be a bare loop, its loop notes how late it hears each tick of a
clock, in the file that the environment names: the number of notes, then the notes, in seconds. The clock is a
descriptor of the kernel's: libuv's own timers go by a clock of whole milliseconds that it reads when anything happens,
so they are up to 1 ms late in a loop that hears of anything else, however idle it is when they are due.
"""

import ctypes
import mmap
import os
import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio

FILE: Final = "KVLEASE_BENCH_LAG"
NANOSECONDS_BETWEEN_TICKS: Final = 2_000_000
NOTES_MAX: Final = 1 << 20
BYTES_PER_NOTE: Final = 8
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_TFD_TIMER_ABSTIME: Final = 1
_NANOSECONDS_PER_SECOND: Final = 10**9


class Probe:
    """A clock that is set anew after each tick."""

    def __init__(self, path: str) -> None:
        """Open the file and the clock."""
        with open(path, "r+b") as file:  # noqa: PTH123 - pathlib is slow to import, and this comes before all else
            mapping = mmap.mmap(file.fileno(), NOTES_MAX * BYTES_PER_NOTE)
        self._count = memoryview(mapping).cast("q")
        self._notes = memoryview(mapping).cast("d")
        self._clock_fd = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._clock_fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._due_ns = 0

    def start(self, loop: "asyncio.AbstractEventLoop") -> None:
        """Have the loop wait for the clock, too."""
        loop.add_reader(self._clock_fd, self._note)
        self._set()

    def _set(self) -> None:
        self._due_ns = time.monotonic_ns() + NANOSECONDS_BETWEEN_TICKS
        # What struct itimerspec is: no interval, and the instant.
        at = (ctypes.c_long * 4)(0, 0, *divmod(self._due_ns, _NANOSECONDS_PER_SECOND))
        _LIBC.timerfd_settime(self._clock_fd, _TFD_TIMER_ABSTIME, at, None)

    def _note(self) -> None:
        late_ns = time.monotonic_ns() - self._due_ns
        if late_ns < 0:
            return
        number = self._count[0] + 1
        if number < NOTES_MAX:
            self._notes[number] = late_ns / _NANOSECONDS_PER_SECOND
            self._count[0] = number
            self._set()


def _install(path: str) -> None:
    import uvloop  # noqa: PLC0415 - other processes shall not import it

    make = uvloop.new_event_loop

    def probed() -> "asyncio.AbstractEventLoop":
        loop = make()
        loop.call_soon(Probe(path).start, loop)
        return loop

    uvloop.new_event_loop = probed


if FILE in os.environ and {"control", "bare"} & set(sys.orig_argv):
    _install(os.environ[FILE])
