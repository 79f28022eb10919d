"""Own that a process logs each problem of an engine once, however many of its connectors meet it.

An engine in one process has both the scheduler's and the worker's session there, and both are refused for the same
reason. They find each other by the engine's magazine, as guards do by the daemon's address. The record that they share
lives as long as any of them.
"""

from typing import Final
from weakref import WeakValueDictionary


class Sayings:
    """What has been logged of one engine in this process."""

    def __init__(self) -> None:
        """Begin with nothing logged."""
        self._said: dict[str, object] = {}

    def __repr__(self) -> str:
        """Show life: how much was logged."""
        return f"<Sayings {len(self._said)} said>"

    def note(self, what: str) -> bool:
        """Note a message that is to be logged; return whether nobody has logged it yet. Works from any thread."""
        # Of several threads, only one gets its own object back.
        mine = object()
        return self._said.setdefault(what, mine) is mine

    def forget(self) -> None:
        """Forget what was logged, so that it is logged again if it happens again."""
        self._said.clear()


_by_engine: Final[WeakValueDictionary[str, Sayings]] = WeakValueDictionary()


def of(magazine: str) -> Sayings:
    """Return the record of the engine that has a magazine; without a magazine, a record of its own."""
    return _by_engine.setdefault(magazine, Sayings()) if magazine else Sayings()
