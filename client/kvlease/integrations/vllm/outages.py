"""Own that an outage of a daemon is told once in a process, however many connectors and ranks of it have a session.

vLLM makes each connector by itself and hands it nothing that those beside it have, too, but a configuration, which is
hashed, copied and pickled. So the guards of one process can only find each other by the daemon's address. What they
find belongs to them: it is here for as long as any of them is.
"""

from typing import Final
from weakref import WeakSet, WeakValueDictionary

from kvlease.integrations.vllm.guard import Guard

_away: Final[WeakValueDictionary[str, WeakSet[Guard]]] = WeakValueDictionary()


def of(address: str) -> WeakSet[Guard]:
    """Return those of this process that the daemon at an address does not answer; who is dropped is none of them."""
    return _away.setdefault(address, WeakSet())
