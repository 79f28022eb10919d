"""Own the refusal of a call that wants something new of a daemon, or a cache, that is being drained."""

from kvlease.errors import DrainingError
from kvleased.core.admission.refusals import RETRY_AFTER_MS_MAX


def draining(message: str, resource: str = "daemon") -> DrainingError:
    """Return the refusal; it says when to try again, because the drain may be undone or the daemon replaced."""
    return DrainingError(message, resource=resource, retry_after_ms=RETRY_AFTER_MS_MAX)
