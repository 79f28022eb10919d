"""Own the blocks that an earlier life of the engine has left: each is found once, by its key, and is vLLM's then."""


class Restored:
    """The blocks that nobody has looked up yet, and their keys."""

    def __init__(self) -> None:
        """Begin without any."""
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    def __repr__(self) -> str:
        """Show life: how many there are."""
        return f"<Restored {len(self)} blocks>"

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._block_of)

    @property
    def ids(self) -> list[int]:
        """Their ids, in the order in which they were added."""
        return list(self._key_of)

    def add(self, block_id: int, key: bytes) -> None:
        """Add a block that is found under a key."""
        self._block_of[key] = block_id
        self._key_of[block_id] = key

    def take(self, key: bytes) -> int | None:
        """Return the block that is found under a key, or None; it is none of these any more."""
        block_id = self._block_of.pop(key, None)
        if block_id is not None:
            del self._key_of[block_id]
        return block_id

    def forget(self, block_id: int) -> None:
        """Note that a block's bytes are about to be overwritten, or that nobody is to find it."""
        key = self._key_of.pop(block_id, None)
        if key is not None:
            del self._block_of[key]

    def clear(self) -> None:
        """Forget all of them."""
        self._block_of.clear()
        self._key_of.clear()
