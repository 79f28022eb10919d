"""Own an engine of owned memory that stands still between claim and attach, as long as a test wants."""

import os
import time
from pathlib import Path
from typing import Any, Final

from kvlease.integrations.vllm.owned.connector import KVLeaseOwnedConnector

_HELD_BY: Final = "KVLEASE_TEST_HELD_BY"
"""The variable that names a file: it appears when the ranks have claimed, and the engine goes on when it is gone."""


class HeldConnector(KVLeaseOwnedConnector):
    """Wait with the scheduler's half."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Restore the index when the test allows it."""
        mark = Path(os.environ[_HELD_BY])
        mark.touch()
        while mark.exists():
            time.sleep(0.02)
        super().set_xfer_handshake_metadata_pp_aware(metadata)
