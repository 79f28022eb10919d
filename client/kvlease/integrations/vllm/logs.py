"""Own how what kvlease says comes into an engine's log: by vLLM's own handlers; what is said is the others'."""

import logging
from typing import Final

_OURS: Final = "kvlease"
_THEIRS: Final = "vllm"


def join_engine_log() -> None:
    """Have the library write where vLLM does, in its form and from its level on; safe to call again.

    vLLM sets up the loggers of its own name alone. What others warn of would stand there without time, level and
    place, and what they say of a good end, such as which cache is attached, nowhere. Whoever has set up a logger that
    ours come to, as VLLM_LOGGING_CONFIG_PATH may do for "kvlease" or for all, is left to it.
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
    """Leave out that heartbeats fail: each session probes the daemon besides, and an outage is told once for all."""
    return getattr(record, "action", "") != "heartbeat"
