"""Own that what is wrong with an engine is said once in a process, however many of its connectors meet it there.

An engine of one process has the scheduler's session and the worker's in it, and both are refused for the same reason.
They find each other by the engine's magazine, as guards do by the daemon's address. What they find belongs to them.
"""

from typing import Final
from weakref import WeakValueDictionary


class Sayings:
    """What has been said of one engine in this process."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._said: dict[str, object] = {}

    def __repr__(self) -> str:
        """Show life: how much was said."""
        return f"<Sayings {len(self._said)} said>"

    def is_news(self, what: str) -> bool:
        """Note that something is to be said; returns whether nobody has said it yet. From any thread."""
        mine = object()
        return self._said.setdefault(what, mine) is mine

    def forget(self) -> None:
        """Have everything said again that comes again."""
        self._said.clear()


_by_engine: Final[WeakValueDictionary[str, Sayings]] = WeakValueDictionary()


def of(magazine: str) -> Sayings:
    """Return what has been said of the engine that has a magazine; who has none speaks for itself."""
    return _by_engine.setdefault(magazine, Sayings()) if magazine else Sayings()
