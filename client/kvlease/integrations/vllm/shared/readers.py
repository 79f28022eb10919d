"""Own which freed blocks a connector in an engine's process may still read, such as for a copy to the offload pool.

In an engine's own pool only that engine overwrites a freed block, so its connectors see it coming. In a shared pool
another engine may overwrite it. So no block is given back while a connector beside ours may still read it.
"""

from collections.abc import Collection
from typing import Final, Protocol
from weakref import WeakKeyDictionary

_STEPS_UNTIL_PLANNED: Final = 3
"""Steps after which a connector beside ours has planned all copies of a freed block."""


class Reader(Protocol):
    """A connector's side that reads blocks of its engine in the background."""

    def blocks_read(self) -> Collection[int]:
        """Return the blocks that it still reads."""


_readers: Final[WeakKeyDictionary[Reader, str]] = WeakKeyDictionary()
"""The engine of each reader. A reader is known as long as somebody else holds it: it keeps the pool mapped."""


def announce(engine_id: str, reader: Reader) -> None:
    """Register a reader that tells the engine's shared pool which blocks a connector beside it still reads."""
    _readers[reader] = engine_id


def has_readers(engine_id: str) -> bool:
    """Tell whether any connector of the engine reads blocks in the background."""
    return engine_id in _readers.values()


def blocks_read(engine_id: str) -> set[int]:
    """Return the blocks that connectors of the engine still read."""
    readers = [reader for reader, engine in _readers.items() if engine == engine_id]
    return {block for reader in readers for block in reader.blocks_read()}


def still_read(engine_id: str, freed: dict[int, int] | None, step: int) -> set[int]:
    """Return blocks that connectors beside ours read or may plan to: those of requests that just ended, too.

    `freed` has the step in which each block lost its last user, and forgets blocks whose copies are all planned.
    """
    if freed is None:
        return set()
    for block, step_then in list(freed.items()):
        if step - step_then >= _STEPS_UNTIL_PLANNED:
            del freed[block]
    return blocks_read(engine_id) | freed.keys()
