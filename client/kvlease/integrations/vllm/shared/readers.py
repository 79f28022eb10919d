"""Own which freed blocks a connector in an engine's process may still read, such as for a copy to the offload pool.

In an engine's own pool only that engine overwrites a freed block, so its connectors see it coming. In a shared pool
another engine may overwrite it. So no block is given back while a connector beside ours may still read it.
"""

from collections.abc import Callable, Collection
from typing import Final

_STEPS_UNTIL_PLANNED: Final = 3
"""Steps after which a connector beside ours has planned all copies of a freed block."""

_readers: Final[dict[str, list[Callable[[], Collection[int]]]]] = {}


def announce(engine_id: str, blocks_read: Callable[[], Collection[int]]) -> None:
    """Register a function that tells the engine's shared pool which blocks a connector beside it still reads."""
    _readers.setdefault(engine_id, []).append(blocks_read)


def has_readers(engine_id: str) -> bool:
    """Tell whether any connector of the engine reads blocks in the background."""
    return engine_id in _readers


def blocks_read(engine_id: str) -> set[int]:
    """Return the blocks that connectors of the engine still read."""
    return {block for reader in _readers.get(engine_id, ()) for block in reader()}


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
