"""Own what a remote store did not tell of the keys that a call looks for; `verbs.asking` asks it."""

from enum import Enum
from typing import NamedTuple


class Silence(Enum):
    """Why the remote store said nothing about blocks that it may have."""

    OFF = "off"
    """It did not work."""
    UNANSWERED = "unanswered"
    """The call asked it and got no answer."""
    UNASKED = "unasked"
    """The call asked it for as many blocks as a call may, and they came behind these."""
    NO_WAIT = "no_wait"
    """The call did not wait for an answer, so it did not ask."""


class Untold(NamedTuple):
    """From where on a remote store said nothing of a call's keys."""

    silence: Silence
    first_key: int
    """The index of the first such key; those behind it are such, too."""
