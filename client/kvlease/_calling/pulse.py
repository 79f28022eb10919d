"""Own what is logged of a worker's heartbeats: once that they fail, and once that they succeed again."""

import logging
from typing import Final

from kvlease.errors import KVLeaseError

_logger: Final = logging.getLogger("kvlease")


class Pulse:
    """Whether the heartbeats of one worker arrive."""

    def __init__(self) -> None:
        """Begin with a worker that has just attached."""
        self._is_failing = False

    def failed(self, error: KVLeaseError) -> None:
        """Note a heartbeat that failed; the first in a row is logged."""
        if not self._is_failing:
            told = {"action": "heartbeat", "code": error.code}
            _logger.warning(
                "Heartbeats to the kvlease daemon fail, and will be tried again: %s",
                error.message,
                extra=told,
            )
        self._is_failing = True

    def succeeded(self) -> None:
        """Note a heartbeat that arrived; the first after some that failed is logged."""
        if self._is_failing:
            _logger.warning(
                "Heartbeats to the kvlease daemon succeed again.", extra={"action": "heartbeat"}
            )
        self._is_failing = False
