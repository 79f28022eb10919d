"""Own how kvlease's log messages get into an engine's log: through vLLM's own handlers."""

import logging
from typing import Final

_OURS: Final = "kvlease"
_THEIRS: Final = "vllm"


def join_engine_log() -> None:
    """Make kvlease log where vLLM does, in its format and from its level on; safe to call again.

    vLLM sets up only the loggers of its own name. Without this, our warnings would appear without time, level and
    place, and our information, such as which cache is attached, not at all. If somebody has set up a logger that
    receives ours, as VLLM_LOGGING_CONFIG_PATH may do for "kvlease" or for all, it is left alone.
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
    """Tell whether a message may be logged; one of a failed heartbeat may not, as the session logs an outage."""
    return getattr(record, "action", "") != "heartbeat"
