"""Own how an error that is kept as an answer drops its stack frames; who keeps it is the caller's business."""

from kvlease.errors import KVLeaseError


def without_frames(error: KVLeaseError) -> KVLeaseError:
    """Return an error without its stack frames, which keep the cache and all that a command looked at alive.

    If it was raised while another refusal was handled, that refusal is dropped from it, too.
    """
    error.__context__ = None
    return error.with_traceback(None)
