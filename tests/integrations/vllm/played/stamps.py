"""Own memory whose every slot carries a stamp of what it was written for; who may use it is not known here."""

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvlease.memory.mapped import Identity

BLOCK_TOKENS: Final = 32
VOCABULARY_TOKENS: Final = 97


class WrongTokenError(Exception):
    """A step reads what was not written for its request, so that its tokens would be wrong."""


class Stamp(NamedTuple):
    """What a slot holds in place of keys and values."""

    group: int
    weights: int
    """The weights of the engine that wrote it; they change with each reset."""
    prefix: bytes
    """A digest of all tokens up to that of the slot, as attention makes its values depend on all of them."""


Slots = dict[int, Stamp]
"""The written slots of a block or row, by position in it."""


class Text:
    """A request's tokens, each with the digest of all tokens up to it."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.prefixes: list[bytes] = []
        self._state = hashlib.blake2b(digest_size=8)
        for token in tokens:
            self._append(token)

    def __len__(self) -> int:
        return len(self.prefixes)

    def say(self) -> int:
        """Append the token that follows from all others, as if it had been sampled, and return it."""
        token = int.from_bytes(self.prefixes[-1], "little") % VOCABULARY_TOKENS
        self._append(token)
        return token

    def _append(self, token: int) -> None:
        self._state.update(token.to_bytes(4, "little"))
        self.prefixes.append(self._state.digest())


class Memory:
    """The blocks that engines lay their caches into."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks: list[Slots] = [{} for _ in range(num_blocks)]

    def at(self, block: int) -> Slots:
        """Return a block to be read."""
        return self._blocks[block]

    def own(self, block: int) -> Slots:
        """Return a block to be written."""
        return self._blocks[block]


class PrivateMemory(Memory):
    """A memory as an engine that has parted has it: blocks are copied as they are written, and nobody sees them."""

    def __init__(self, below: Memory) -> None:
        self._below = below
        self._copies: dict[int, Slots] = {}

    def at(self, block: int) -> Slots:
        """Return a block to be read."""
        return self._copies.get(block, self._below.at(block))

    def own(self, block: int) -> Slots:
        """Return a block to be written, copied by now."""
        if block not in self._copies:
            self._copies[block] = dict(self._below.at(block))
        return self._copies[block]


class Row(NamedTuple):
    """A row of the pool that blocks are offloaded to."""

    key: bytes
    """The key that the row itself carries, which a load compares."""
    slots: Slots


class Rows:
    """The rows of one pool, which lie in one memory."""

    def __init__(self, memory: Identity, num_rows: int) -> None:
        self.pool = b" ".join(b"%d:%d" % (device, inode) for _, device, inode in memory)
        """What jobs call the pool."""
        self._rows = [Row(b"", {}) for _ in range(num_rows)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Row:
        return self._rows[row]

    def erase(self, row: int) -> None:
        """Take a row's key away, as its bytes are about to change."""
        self._rows[row] = Row(b"", {})

    def store(self, row: int, key: bytes, slots: Slots) -> None:
        """Write a row."""
        self._rows[row] = Row(key, dict(slots))
