"""Own what the log says of a worker's heartbeats: the line stands among others' lines, so it names kvlease and why."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvlease import worker
from kvlease.errors import KVLeaseError, UnavailableError


class Stop:
    """An event that ends a thread after a number of waits."""

    def __init__(self, num_waits: int) -> None:
        self._left = num_waits

    def wait(self, _seconds: float) -> bool:
        """Tell whether the waits are over."""
        self._left -= 1
        return self._left < 0

    def is_set(self) -> bool:
        """Tell that it is not set."""
        return False


class Pulse:
    """A connection to the daemon on which some heartbeats fail."""

    def __init__(self, *errors: KVLeaseError | None) -> None:
        self._errors = list(errors)

    def run(self, flow: Any) -> None:
        """Send one heartbeat."""
        flow.close()
        if (error := self._errors.pop(0)) is not None:
            raise error


def test_failing_heartbeats_are_told_once_and_by_whom(caplog: pytest.LogCaptureFixture) -> None:
    """The log has one line, with the reason, when heartbeats begin to fail, and one when they succeed again."""
    away = UnavailableError("nobody answers")
    pulse: Any = Pulse(None, away, away, None, None)
    session: Any = SimpleNamespace(heartbeat_seconds=1.0)
    stop: Any = Stop(5)

    with caplog.at_level(logging.INFO, "kvlease"):
        worker._beat(session, pulse, stop)

    assert [record.getMessage() for record in caplog.records] == [
        "Heartbeats to the kvlease daemon fail, and will be tried again: nobody answers",
        "Heartbeats to the kvlease daemon succeed again.",
    ]
