"""Own the way of kvlease's log messages into an engine's log, by vLLM's own handlers."""

import logging
from typing import Final

_OURS: Final = "kvlease"
_THEIRS: Final = "vllm"


def join_engine_log() -> None:
    """Make kvlease log where vLLM does, in its format and from its level on; safe to call again.

    vLLM sets up only the loggers of its own name. Without this, warnings of other loggers have no time, level and
    place, and their information, such as which cache is attached, does not appear at all. A handler that somebody has
    already set up for our loggers, as VLLM_LOGGING_CONFIG_PATH may do for "kvlease" or for all, is left alone.
    """
    ours, theirs = logging.getLogger(_OURS), logging.getLogger(_THEIRS)
    ours.addFilter(_is_no_heartbeat)
    if ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())
    ours.propagate = False


def _is_no_heartbeat(record: logging.LogRecord) -> bool:
    """Drop messages about failed heartbeats: each session also probes the daemon, and an outage is logged once."""
    return getattr(record, "action", "") != "heartbeat"
