"""Own engines whose scheduler, as long as a test wants, waits between its ranks' start and its own."""

import os
import time
from pathlib import Path
from typing import Any, Final

from kvlease.integrations.vllm.owned.connector import KVLeaseOwnedConnector
from kvlease.integrations.vllm.shared.connector import KVLeaseSharedConnector

_HELD_BY: Final = "KVLEASE_TEST_HELD_BY"
"""Names a file that appears when the ranks have the pool; the engine goes on when it is removed."""


def _wait() -> None:
    mark = Path(os.environ[_HELD_BY])
    mark.touch()
    while mark.exists():
        time.sleep(0.02)


class HeldConnector(KVLeaseOwnedConnector):
    """Wait with the scheduler's half."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Restore the index when the test allows it."""
        _wait()
        super().set_xfer_handshake_metadata_pp_aware(metadata)


class HeldSharedConnector(KVLeaseSharedConnector):
    """Wait with the scheduler's half."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Rule the pool when the test allows it."""
        _wait()
        super().set_xfer_handshake_metadata_pp_aware(metadata)
