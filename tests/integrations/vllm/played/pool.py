"""Own a played daemon of one pool: what exchanges of magazines do to its blocks. Nothing here is lost or late."""

from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease.exchanges import Exchanged, ExchangeOrder, Inventory
from kvlease.integrations.vllm.fence import Published, Retracted, unpacked_keys

_DONE: Final = 1
_NOT_THERE: Final = 3
_ABSENT: Final = -1
_PRIVATE_KEY: Final = bytes(32)


class PlayedPool:
    """The blocks of a pool: each is free, cached and held by nobody, held by magazines, or private to one."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(1, num_blocks))
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._cached: dict[int, None] = {}
        """Findable blocks that nobody holds, longest unused first."""
        self._private: dict[str, set[int]] = {}
        self._held: dict[str, set[int]] = {}

    @property
    def num_available(self) -> int:
        """Count the blocks that could be taken."""
        return len(self._free) + len(self._cached)

    @property
    def findable(self) -> set[int]:
        """The blocks that are found under a key."""
        return {*self._key_of}

    def has(self, key: bytes) -> bool:
        """Tell whether a block is found under a key."""
        return key in self._block_of

    def exchange(self, name: str, order: ExchangeOrder) -> Exchanged:
        """Carry out a magazine's exchange, in the order of its fields."""
        private = self._private.setdefault(name, set())
        held = self._held.setdefault(name, set())
        published = [
            self._publish(private, held, block, key)
            for block, key in zip(
                _numbers(order.publish_blocks), unpacked_keys(order.publish_keys), strict=True
            )
        ]
        retracted = [
            self._retract(private, held, block) for block in _numbers(order.retract_blocks)
        ]
        dropped = [self._drop(private, held, block) for block in _numbers(order.drop_blocks)]
        found = self._hold(held, unpacked_keys(order.hold_keys), stops=order.stops_at_miss)
        taken = self._take(private, order)
        return Exchanged(
            published=np.array(published, np.uint8),
            retracted=np.array(retracted, np.uint8),
            dropped=np.array(dropped, np.uint8),
            held=_column(found),
            held_all_blocks=_column([]),
            held_all_keys=b"",
            taken_running=_column(taken[: order.take_running]),
            taken_new=_column(taken[order.take_running :]),
            num_available=self.num_available,
            num_magazines=max(1, len(self._private)),
        )

    def inventory(self, name: str) -> Inventory:
        """Tell what is in a magazine."""
        blocks = sorted(self._private.get(name, set()) | self._held.get(name, set()))
        keys = b"".join(self._key_of.get(block, _PRIVATE_KEY) for block in blocks)
        return Inventory(blocks=_column(blocks), keys=keys, sequence=0)

    def empty(self, name: str) -> None:
        """Take everything out of a magazine, which goes on."""
        private, held = self._private.get(name, set()), self._held.get(name, set())
        for block in sorted(private | held):
            self._drop(private, held, block)

    def end(self, name: str) -> None:
        """End a magazine, as its engine has died."""
        self.empty(name)
        self._private.pop(name, None)
        self._held.pop(name, None)

    def claim(self, name: str) -> None:
        """Give a magazine every block, as an owning engine gets them; no other magazine may have any."""
        assert not self._private, "the pool has one owner"
        self._private[name], self._free = set(self._free), []
        self._held[name], self._cached = set(self._cached), {}

    def check(self) -> None:
        """Check that every block is in one state, and that only magazines that hold a block share it."""
        private = [block for blocks in self._private.values() for block in blocks]
        held = {block for blocks in self._held.values() for block in blocks}
        everywhere = sorted([*self._free, *self._cached, *private, *held])
        assert everywhere == list(range(1, self.num_blocks))
        assert self._key_of.keys() == self._cached.keys() | held
        assert {key: block for block, key in self._key_of.items()} == self._block_of

    def _publish(self, private: set[int], held: set[int], block: int, key: bytes) -> Published:
        if block not in private:
            return Published.NOT_PRIVATE
        if key in self._block_of:
            return Published.DUPLICATE
        self._block_of[key], self._key_of[block] = block, key
        private.remove(block)
        held.add(block)
        return Published.FINDABLE

    def _retract(self, private: set[int], held: set[int], block: int) -> Retracted:
        if block not in held:
            return Retracted.NOT_FINDABLE
        if sum(block in others for others in self._held.values()) > 1:
            return Retracted.HELD_ELSEWHERE
        self._forget(block)
        held.remove(block)
        private.add(block)
        return Retracted.PRIVATE

    def _drop(self, private: set[int], held: set[int], block: int) -> int:
        if block in private:
            private.remove(block)
            self._free.append(block)
        elif block in held:
            held.remove(block)
            if not any(block in others for others in self._held.values()):
                self._cached[block] = None
        else:
            return _NOT_THERE
        return _DONE

    def _hold(self, held: set[int], keys: Iterable[bytes], *, stops: bool) -> list[int]:
        found: list[int] = []
        for key in keys:
            is_over = stops and _ABSENT in found
            block = _ABSENT if is_over else self._block_of.get(key, _ABSENT)
            if block != _ABSENT:
                held.add(block)
                self._cached.pop(block, None)
            found.append(block)
        return found

    def _take(self, private: set[int], order: ExchangeOrder) -> list[int]:
        wanted = order.take_running + order.take_new
        if order.all_or_nothing and wanted > self.num_available:
            wanted = 0
        taken: list[int] = []
        for _ in range(min(wanted, self.num_available)):
            if self._free:
                block = self._free.pop(0)
            else:
                block = next(iter(self._cached))
                del self._cached[block]
                self._forget(block)
            taken.append(block)
        private.update(taken)
        return taken

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]


def _numbers(column: object) -> list[int]:
    return [int(number) for number in np.asarray(column)]


def _column(numbers: list[int]) -> NDArray[np.int32]:
    return np.array(numbers, np.int32)
