"""Own who in an engine's process may still read blocks that requests have freed, such as a copy to the offload pool.

In an engine's own pool a freed block is overwritten by that engine alone, so that its connectors see it coming; in a
shared one another engine may do so. So nothing leaves an engine's hands that a connector beside ours may still read.
"""

from collections.abc import Callable, Collection
from typing import Final

_readers: Final[dict[str, list[Callable[[], Collection[int]]]]] = {}


def announce(engine_id: str, blocks_read: Callable[[], Collection[int]]) -> None:
    """Have an engine's shared pool ask which blocks a connector of the same engine still reads."""
    _readers.setdefault(engine_id, []).append(blocks_read)


def has_readers(engine_id: str) -> bool:
    """Tell whether any connector of the engine reads blocks behind its back."""
    return engine_id in _readers


def blocks_read(engine_id: str) -> set[int]:
    """Return the blocks that connectors of the engine still read."""
    return {block for reader in _readers.get(engine_id, ()) for block in reader()}
