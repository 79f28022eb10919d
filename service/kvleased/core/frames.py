"""Own how an error that is kept as an answer lets go of the calls that it came by; who keeps it is others' business."""

from kvlease.errors import KVLeaseError


def without_frames(error: KVLeaseError) -> KVLeaseError:
    """Return an error without the frames that it came by, which hold the cache and all that a command looked at.

    Those of another refusal, in the middle of which it was met, go too.
    """
    error.__context__ = None
    return error.with_traceback(None)
