"""Own that an outage of a daemon is told once in a process, however many connectors and ranks of it have a session."""

from typing import Final
from weakref import WeakSet

from kvlease.integrations.vllm.guard import Guard

_away: Final[dict[str, WeakSet[Guard]]] = {}


def of(address: str) -> WeakSet[Guard]:
    """Return those of this process that the daemon at an address does not answer; who is dropped is none of them."""
    return _away.setdefault(address, WeakSet())
