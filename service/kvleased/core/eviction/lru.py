"""Own the default policy: least recently used first, and leaves before the prefixes that they hang on.

A chain is always touched from its root, so a parent is never colder than its children as long as the blocks of one
release are added tail first; the order needs no tree. Adding tail first is the caller's part.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator


class LeafFirstLRU:
    """Evict what was let go of longest ago."""

    def __init__(self) -> None:
        """Start empty."""
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Count the evictable blocks."""
        return len(self._blocks)

    def __contains__(self, block: object) -> bool:
        """Tell whether a block is evictable."""
        return block in self._blocks

    def __iter__(self) -> Iterator[int]:
        """Go through the evictable blocks, the coldest first."""
        return iter(self._blocks)

    def __repr__(self) -> str:
        """Show how many blocks are evictable."""
        return f"<LeafFirstLRU {len(self._blocks)} evictable>"

    def add(self, blocks: Iterable[int]) -> None:
        """Add blocks as the hottest ones, in the given order."""
        for block in blocks:
            self._blocks[block] = None

    def add_coldest(self, blocks: Iterable[int]) -> None:
        """Put blocks back at the cold end, the first given one the coldest."""
        for block in reversed(list(blocks)):
            self._blocks[block] = None
            self._blocks.move_to_end(block, last=False)

    def discard(self, blocks: Iterable[int]) -> None:
        """Take blocks out; absent ones are ignored."""
        for block in blocks:
            self._blocks.pop(block, None)

    def coldest(self, count: int, protected: Container[int] = ()) -> list[int]:
        """Return up to `count` of the coldest blocks that are not protected."""
        found: list[int] = []
        for block in self._blocks:
            if len(found) == count:
                break
            if block not in protected:
                found.append(block)
        return found
