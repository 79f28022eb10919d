"""`kvlease top` in a real terminal, over a daemon that stands still."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.acceptance.serving import Serving
from tests.acceptance.test_hung import hanging

pytestmark = pytest.mark.acceptance

CTRL_C = "\x03"
SECONDS_MAX = 30.0
DEADLINE_SECONDS = 600
"""Seconds for which each read waits: many more than a test does."""
TOP = f"""
import sys
from kvlease import Client
from kvlease.cli.top import run
with Client(sys.argv[1], deadline_seconds={DEADLINE_SECONDS}, on_doubt="raise") as client:
    run(client, "", 0.2)
"""
"""What `kvlease top` does, with another deadline."""


class Terminal:
    """A terminal in which a program runs."""

    def __init__(self, *command: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
        )
        os.close(theirs)

    def press(self, key: str) -> None:
        """Press a key."""
        os.write(self._ours, key.encode())

    def read_until(self, words: str) -> None:
        """Wait until these words are drawn."""
        drawn, end = b"", time.monotonic() + SECONDS_MAX
        while words.encode() not in drawn:
            more = self._read(end)
            assert more, f"{words!r} is not drawn: {drawn[-2000:]!r}"
            drawn += more

    def has_ended(self) -> bool:
        """Wait until the program has ended; return false if it does not."""
        end = time.monotonic() + SECONDS_MAX
        while self._read(end):
            pass
        return time.monotonic() < end

    def close(self) -> None:
        """End the program."""
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def _read(self, end: float) -> bytes:
        """Return what is drawn next; nothing if the program has ended, or nothing comes in time."""
        if not select.select([self._ours], [], [], max(0.0, end - time.monotonic()))[0]:
            return b""
        try:
            return os.read(self._ours, 1 << 16)
        except OSError:  # nobody has the other side open any more
            return b""


@contextmanager
def shown(address: str) -> Iterator[Terminal]:
    """Run `kvlease top` until the test has ended, and give its terminal once it shows the daemon."""
    terminal = Terminal(sys.executable, "-c", TOP, address)
    try:
        terminal.read_until("epoch")
        yield terminal
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("scheme", "key"),
    [
        pytest.param("unix", "q", id="q"),
        pytest.param("unix", CTRL_C, id="ctrl-c"),
        pytest.param("http+unix", "q", id="rest"),
        pytest.param("grpc+unix", "q", id="grpc"),
    ],
)
def test_top_is_left_while_the_daemon_stands_still(daemon: Serving, scheme: str, key: str) -> None:
    """A read that waits for the daemon holds up neither the end of the screen nor that of the process."""
    with shown(daemon.address(scheme)) as terminal, hanging(daemon):
        terminal.press("r")
        terminal.press("p")
        terminal.read_until("paused")

        terminal.press(key)

        assert terminal.has_ended()
        assert terminal.process.wait(SECONDS_MAX) == 0
