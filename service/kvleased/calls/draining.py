"""Own the refusal of a call that wants something new of a daemon, or a cache, that is being drained."""

from typing import Final

from kvlease.errors import DrainingError
from kvleased.core.admission.refusals import RETRY_AFTER_MS_MAX

DRAINING: Final = "draining"
STOPS: Final = (
    f"{DRAINING}: it was told to stop, and ends when its leases have ended, or after drain_seconds"
)
DRAINED: Final = (
    f"{DRAINING}: an operator is draining it; to grant leases again, run kvlease drain --undo"
)
"""Why a daemon that was told to stop, or is drained, is not ready."""


def draining(message: str, resource: str = "daemon") -> DrainingError:
    """Return the refusal; it says when to try again, because the drain may be undone or the daemon replaced."""
    return DrainingError(message, resource=resource, retry_after_ms=RETRY_AFTER_MS_MAX)
