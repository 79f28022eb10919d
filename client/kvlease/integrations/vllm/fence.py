"""Own the fence of an engine: which writes of its steps are done, and how each block stands at the daemon.

It sends nothing and knows nothing of vLLM: a block is an id, and its content is named by bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import islice
from typing import Final, NamedTuple

KEY_BYTES: Final = 32
_PRIVATE_KEY: Final = bytes(KEY_BYTES)
"""The key that an inventory gives for a private block."""


class Write(NamedTuple):
    """A block that a step fills to its end."""

    block_id: int
    name: bytes
    """The engine's name for the block's content."""
    position: int
    """The block's index in its request's chain."""
    step_id: int
    """The step that writes its last token."""


class Fence:
    """Note what steps write, and tell which writes are done: those of steps that came back on all ranks.

    Step ids start at 1. A write that is noted counts for the step being scheduled, which is the next to be dispatched.
    That may be later than the step that really writes, but never earlier.
    """

    def __init__(self) -> None:
        """Begin with no step dispatched."""
        self._dispatched_id = 0
        self._returned_id = 0
        self._writes: dict[int, Write] = {}

    def __repr__(self) -> str:
        """Show life: how many steps are back, and how many writes wait."""
        steps = f"{self._returned_id} of {self._dispatched_id} steps back"
        return f"<Fence {steps}, {len(self._writes)} writes>"

    def __contains__(self, block_id: int) -> bool:
        """Tell whether a write of a block was noted, and neither cancelled nor settled since."""
        return block_id in self._writes

    def __len__(self) -> int:
        """Count the noted writes that were neither cancelled nor settled."""
        return len(self._writes)

    @property
    def returned_id(self) -> int:
        """The newest step that came back; all earlier ones have, too."""
        return self._returned_id

    @property
    def is_quiet(self) -> bool:
        """Whether every dispatched step has come back."""
        return self._returned_id == self._dispatched_id

    @property
    def has_written(self) -> bool:
        """Whether `written` would give anything."""
        return next(self._done(), None) is not None

    def note(self, block_id: int, name: bytes, position: int = 0) -> None:
        """Note that the step being scheduled fills a block; this replaces any earlier note of the block."""
        self._writes.pop(block_id, None)
        self._writes[block_id] = Write(block_id, name, position, self._dispatched_id + 1)

    def note_written(self, block_id: int, name: bytes, position: int = 0) -> None:
        """Note a block whose content was written by a step that came back long ago."""
        self._writes.pop(block_id, None)
        self._writes[block_id] = Write(block_id, name, position, 0)

    def cancel(self, block_id: int) -> bool:
        """Forget the write of a block that will hold something else; return whether there was one."""
        return self._writes.pop(block_id, None) is not None

    def cancel_all(self) -> None:
        """Forget all noted writes."""
        self._writes.clear()

    def dispatch(self) -> int:
        """Note that the scheduled step goes out to the ranks; return its id, which must come back with its outputs."""
        self._dispatched_id += 1
        return self._dispatched_id

    def came_back(self, step_id: int) -> None:
        """Note that a step came back on all ranks; older ones have, too, as ranks carry out steps in order.

        An id that was never dispatched proves nothing and is ignored.
        """
        if self._returned_id < step_id <= self._dispatched_id:
            self._returned_id = step_id

    def written(self, num_max: int) -> list[Write]:
        """Return the oldest writes that are done, `num_max` at most; each is returned until it is settled."""
        return list(islice(self._done(), num_max))

    def settle(self, block_id: int) -> None:
        """Forget the write of a block, which has been dealt with."""
        self._writes.pop(block_id, None)

    def _done(self) -> Iterator[Write]:
        # Writes are in the order of their steps, so almost none after the first unfinished one is done.
        for write in self._writes.values():
            if write.step_id > self._returned_id:
                return
            yield write


class Standing(IntEnum):
    """How a block stands at the daemon, as far as its engine knows."""

    ABSENT = 0
    """Not in the engine's magazine: it must not be touched at all."""
    PRIVATE = 1
    """In the magazine and found by nobody: it may be overwritten."""
    FINDABLE = 2
    """In the magazine and found under its key: it must keep its bytes."""
    DOUBTFUL = 3
    """Private or findable: an answer was lost, so it is treated as findable."""


_PRIVATE: Final = int(Standing.PRIVATE)
_FINDABLE: Final = int(Standing.FINDABLE)
# Plain integers, because reading an enumeration's member costs more than what is done with it.


class Published(IntEnum):
    """An exchange's answer to one publish."""

    FINDABLE = 1
    DUPLICATE = 2
    NOT_PRIVATE = 3


class Retracted(IntEnum):
    """An exchange's answer to one retract."""

    PRIVATE = 1
    HELD_ELSEWHERE = 2
    NOT_FINDABLE = 3


class Ledger:
    """How every block of a pool stands at the daemon, and under which key it is found there.

    A block is doubtful from when a change is sent until the answer comes; after a lost answer, until an inventory.
    """

    def __init__(self, num_blocks: int) -> None:
        """Begin with an empty magazine."""
        self._standings = bytearray(num_blocks)
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self.stale: set[int] = set()
        """Blocks that are or may be findable under keys that no longer match their content; they are retracted
        first."""

    def __repr__(self) -> str:
        """Show life: the number of blocks in each standing."""
        counts = ", ".join(
            f"{self.count(standing)} {standing.name.lower()}" for standing in Standing
        )
        return f"<Ledger {counts}, {len(self.stale)} stale>"

    def __getitem__(self, block_id: int) -> Standing:
        """Return how a block stands."""
        return Standing(self._standings[block_id])

    @property
    def has_doubt(self) -> bool:
        """Whether an inventory is needed to know how every block stands."""
        return Standing.DOUBTFUL in self._standings

    def count(self, standing: Standing) -> int:
        """Count the blocks with a standing."""
        return self._standings.count(standing)

    def ids(self, standing: Standing) -> list[int]:
        """Return the blocks with a standing, in ascending order."""
        return [block_id for block_id, found in enumerate(self._standings) if found == standing]

    def is_private(self, block_id: int) -> bool:
        """Tell whether a block may be overwritten."""
        return self._standings[block_id] == _PRIVATE

    def is_findable(self, block_id: int) -> bool:
        """Tell whether a block is found under its key, as far as is known."""
        return self._standings[block_id] == _FINDABLE

    def key_of(self, block_id: int) -> bytes | None:
        """Return the key under which a block is or may be found, or None."""
        return self._key_of.get(block_id)

    def block_of(self, key: bytes) -> int | None:
        """Return the block that is found under a key, or None."""
        return self._block_of.get(key)

    def doubt_all(self) -> None:
        """Note that every block except the null block may stand in any way; an inventory settles each standing."""
        self._standings[1:] = bytes((Standing.DOUBTFUL,)) * (len(self._standings) - 1)

    def take(self, block_ids: Iterable[int]) -> None:
        """Note that the daemon granted blocks, as private ones."""
        for block_id in block_ids:
            self._make_private(block_id)

    def hold(self, block_id: int, key: bytes) -> None:
        """Note that a block of the magazine is found under a key."""
        self._drop_key(block_id)
        self._standings[block_id] = Standing.FINDABLE
        self._key_of[block_id] = key
        self._block_of[key] = block_id

    def send_publish(self, block_id: int, key: bytes) -> None:
        """Note that the publish of a private block was sent."""
        assert self._standings[block_id] == Standing.PRIVATE, "only private blocks are published"
        self._standings[block_id] = Standing.DOUBTFUL
        self._key_of[block_id] = key

    def send_retract(self, block_id: int) -> None:
        """Note that the retract of a findable block was sent."""
        assert self._standings[block_id] != Standing.PRIVATE, "a private block is found by nobody"
        self._standings[block_id] = Standing.DOUBTFUL

    def heard_publish(self, block_id: int, answer: int) -> None:
        """Take over the daemon's answer to a publish; the block may have been outdated meanwhile, and stays stale."""
        key = self._key_of.get(block_id)
        if answer == Published.FINDABLE and key is None:
            self._standings[block_id] = Standing.FINDABLE
        elif answer == Published.FINDABLE and key is not None:
            self.hold(block_id, key)
        elif answer == Published.DUPLICATE:
            self._make_private(block_id)

    def heard_retract(self, block_id: int, answer: int) -> None:
        """Take over the daemon's answer to a retract."""
        if answer == Retracted.PRIVATE:
            self._make_private(block_id)
        elif answer == Retracted.HELD_ELSEWHERE:
            self._standings[block_id] = Standing.FINDABLE

    def outdate(self, block_id: int) -> None:
        """Note that a block that is or may be findable should no longer be found under its key."""
        if self._standings[block_id] in (Standing.FINDABLE, Standing.DOUBTFUL):
            self._drop_key(block_id)
            self.stale.add(block_id)

    def overwrite(self, block_id: int) -> None:
        """Note that a block's bytes no longer match its key, whoever may still find it."""
        self.outdate(block_id)
        if block_id in self.stale:
            self._standings[block_id] = Standing.DOUBTFUL

    def reconcile(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """Take over the daemon's inventory; blocks that are found under keys not theirs become stale."""
        expected, self._key_of, self._block_of = self._key_of, {}, {}
        was_stale, self.stale = self.stale, set()
        self._standings = bytearray(len(self._standings))
        for block_id, key in zip(block_ids, keys, strict=True):
            if key == _PRIVATE_KEY:
                self._standings[block_id] = Standing.PRIVATE
            elif expected.get(block_id) == key and block_id not in was_stale:
                self.hold(block_id, key)
            else:
                self._standings[block_id] = Standing.FINDABLE
                self.stale.add(block_id)

    def _make_private(self, block_id: int) -> None:
        self._drop_key(block_id)
        self.stale.discard(block_id)
        self._standings[block_id] = Standing.PRIVATE

    def _drop_key(self, block_id: int) -> None:
        key = self._key_of.pop(block_id, None)
        if key is not None and self._block_of.get(key) == block_id:
            del self._block_of[key]


def unpacked_keys(keys: bytes) -> list[bytes]:
    """Return the keys that are packed in `keys`."""
    return [keys[first : first + KEY_BYTES] for first in range(0, len(keys), KEY_BYTES)]
