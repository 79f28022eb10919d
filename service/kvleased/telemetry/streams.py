"""Own the writing to the standard streams of a process: it never waits for a reader, and it never fails.

The reader of a log may be slow, stopped or gone, or its disk full. So each stream is written by a thread of its own,
from a queue of limited length. Text that finds no place there, or cannot be written, is lost and counted.
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
"""Most pieces of text, mostly lines, that wait to be written."""
DRAIN_SECONDS_MAX: Final = 1.0
"""Seconds that a process that ends waits at most until all is written."""
_STANDARD_FDS: Final = (0, 1, 2)


class Unhurried(io.TextIOBase):
    """A text stream over a descriptor whose writers never wait and never fail."""

    def __init__(self, fd: int, lost: Callable[[int], str]) -> None:
        """Take a descriptor, and a function that makes a line for a number of lost pieces, or "" for no line."""
        super().__init__()
        self._fd, self._lost = fd, lost
        self._pieces: SimpleQueue[str | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._num_refused = 0
        """Pieces for which the queue had no place; only the callers of `write` count these."""
        self._num_unwritten = self._num_told = 0
        """Pieces that could not be written, and lost pieces that a line has told of; only the thread counts these."""
        self._is_torn = False
        """Whether the last piece was cut short."""

    def __repr__(self) -> str:
        """Show what waits and what was lost."""
        num_lost = self._num_refused + self._num_unwritten
        return f"<Unhurried fd {self._fd}, {self._pieces.qsize()} wait, {num_lost} lost>"

    def writable(self) -> bool:
        """Say that the stream can be written."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Tell whether the descriptor is a terminal."""
        return os.isatty(self._fd)

    def write(self, text: str) -> int:
        """Queue a piece of text if there is room for it, and drop it otherwise."""
        if self._thread is None:
            self._thread = _started(self._run)
        if self._pieces.qsize() < PIECES_MAX:
            self._pieces.put(text)
        else:
            self._num_refused += 1
        return len(text)

    def drain(self, seconds_max: float = DRAIN_SECONDS_MAX) -> None:
        """Wait until all is written, or for `seconds_max`; a later write starts another thread."""
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
        """Write a piece, on a new line if the last one was cut short; tell whether all of it was written."""
        data = (("\n" if self._is_torn else "") + text).encode(errors="backslashreplace")
        try:
            while data:
                data = data[self._written(data) :]
                self._is_torn = bool(data)
        except OSError:
            return False
        return True

    def _written(self, data: bytes) -> int:
        """Write a part and return its bytes; wait even if somebody has made the descriptor non-blocking."""
        while True:
            try:
                return os.write(self._fd, data)
            except BlockingIOError:
                select.select([], [self._fd], [])


def take_over(lost: Callable[[int], str]) -> None:
    """Have both streams of this process written by threads from now on; `lost` makes the line about lost log lines."""
    streams = Unhurried(sys.stdout.fileno(), lambda _: ""), Unhurried(sys.stderr.fileno(), lost)
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in streams)
    atexit.register(drain)


def drain() -> None:
    """Wait, for a second at most, until all output is written; call it before the process ends abruptly."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Unhurried):
            stream.drain()


def open_closed() -> None:
    """Open /dev/null for each standard stream that is closed; otherwise the next file opened would get its number."""
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
    """Start a thread to which no signal is delivered, so that signals reach the threads that handle them."""
    thread = threading.Thread(target=run, name="kvleased-stream", daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread
