"""Own what a caller is told who wants something new of a daemon, or a cache, that is being drained."""

from kvlease.errors import DrainingError
from kvleased.core.admission.refusals import RETRY_AFTER_MS_MAX


def draining(message: str, resource: str = "daemon") -> DrainingError:
    """Return the refusal; a drain may be undone, and the daemon replaced, so that it says when to come again."""
    return DrainingError(message, resource=resource, retry_after_ms=RETRY_AFTER_MS_MAX)
