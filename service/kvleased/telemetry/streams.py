"""Own what a process writes to its standard streams: nobody ever waits for who reads it, and nothing fails by it.

A log reader may be slow, stopped or gone, a log's disk full. So each stream is written by a thread of its own, from
a queue of so many pieces; what finds no place there, or cannot be written, is lost, and counted.
"""

import atexit
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final, TextIO, cast

PIECES_MAX: Final = 4096
"""Pieces of text, mostly lines, that wait to be written at most."""
DRAIN_SECONDS_MAX: Final = 1.0
"""Seconds for which a process that ends waits until all is written."""
_STANDARD_FDS: Final = (0, 1, 2)


class Unhurried(io.TextIOBase):
    """A text stream over a descriptor whose writers never wait and never fail."""

    def __init__(self, fd: int, lost: Callable[[int], str]) -> None:
        """Take a descriptor, and what makes the line that tells how many pieces were lost before it; "" for none."""
        super().__init__()
        self._fd, self._lost = fd, lost
        self._pieces: SimpleQueue[str | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_refused = 0
        """Pieces for which there was no place; counted by who writes, as the others are by the thread alone."""
        self._num_unwritten = self._num_told = 0
        """Pieces that could not be written, and those lost that a line has told of."""
        self._is_torn = False
        """Whether the last piece was cut short."""

    def __repr__(self) -> str:
        """Show what waits and what was lost."""
        num_lost = self._num_refused + self._num_unwritten
        return f"<Unhurried fd {self._fd}, {self._pieces.qsize()} wait, {num_lost} lost>"

    def writable(self) -> bool:
        """Tell that it is."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Tell whether people read it."""
        return os.isatty(self._fd)

    def write(self, text: str) -> int:
        """Have a piece of text written when there is room for it."""
        if self._thread is None:
            self._thread = _started(self._run)
        if self._pieces.qsize() < PIECES_MAX:
            self._pieces.put(text)
        else:
            self._num_refused += 1
        return len(text)

    def drain(self, seconds_max: float = DRAIN_SECONDS_MAX) -> None:
        """Wait until all is written, or for so many seconds; what is written later begins another thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._pieces.put(None)
            thread.join(seconds_max)

    def _run(self) -> None:
        for piece in iter(self._pieces.get, None):
            num_untold = self._num_refused + self._num_unwritten - self._num_told
            if num_untold and self._put(self._lost(num_untold)):
                self._num_told += num_untold
            if not self._put(piece):
                self._num_unwritten += 1

    def _put(self, text: str) -> bool:
        """Write a piece, if need be on a line of its own; tell whether all of it was."""
        data = (("\n" if self._is_torn else "") + text).encode(errors="backslashreplace")
        try:
            while data:
                data = data[self._written(data) :]
                self._is_torn = bool(data)
        except OSError:
            return False
        return True

    def _written(self, data: bytes) -> int:
        """Write a part and return its bytes, though somebody may have made the descriptor one that does not wait."""
        while True:
            try:
                return os.write(self._fd, data)
            except BlockingIOError:
                select.select([], [self._fd], [])


def take_over(lost: Callable[[int], str]) -> None:
    """Have both streams of this process written by threads from now on; `lost` tells of what the log lacks."""
    streams = Unhurried(sys.stdout.fileno(), lambda _: ""), Unhurried(sys.stderr.fileno(), lost)
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in streams)
    atexit.register(drain)


def drain() -> None:
    """Wait, for a second at most, until what this process has said is written: before it ends at once."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Unhurried):
            stream.drain()


def open_closed() -> None:
    """Put /dev/null where a standard stream was closed: its number would be that of the next file to be opened."""
    for fd in _STANDARD_FDS:
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == fd, "the lowest number that is free is given first"
            os.set_inheritable(fd, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - a descriptor, for the process's life
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - the same


def _started(run: Callable[[], None]) -> threading.Thread:
    """Start a thread to which no signal is delivered: those are for who handles them."""
    thread = threading.Thread(target=run, name="kvleased-stream", daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread
