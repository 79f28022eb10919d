"""Own that a process logs an outage of a daemon once, however many connectors and ranks have sessions with it.

vLLM makes each connector by itself and gives it nothing that the others have too, except a configuration, which is
hashed, copied and pickled. So the guards of one process can find each other only by the daemon's address. The set of
guards that they share lives as long as any of them.
"""

from typing import Final
from weakref import WeakSet, WeakValueDictionary

from kvlease.integrations.vllm.session.guard import Guard

_away: Final[WeakValueDictionary[str, WeakSet[Guard]]] = WeakValueDictionary()


def of(address: str) -> WeakSet[Guard]:
    """Return the guards of this process that the daemon at an address does not answer; dropped guards leave the set."""
    return _away.setdefault(address, WeakSet())
