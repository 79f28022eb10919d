"""Own the fence of an engine: which writes of its steps are done, and how each block stands at the daemon.

Nothing is sent from here, and nothing here knows vLLM: a block is an id, what it holds is a name of bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import islice
from typing import Final, NamedTuple

KEY_BYTES: Final = 32
_PRIVATE_KEY: Final = bytes(KEY_BYTES)
"""What an inventory says in place of the key of a private block."""


class Write(NamedTuple):
    """A block that a step fills to its end."""

    block_id: int
    name: bytes
    """What the engine calls the block's content."""
    position: int
    """The block's index in its request's chain."""
    step_id: int
    """The step that writes its last token."""


class Fence:
    """Note what steps write, and tell which of it is written: by steps that came back on all ranks.

    Steps have ids from 1 on. What is noted counts for the step that is being scheduled, the next one to be dispatched;
    that may be later than the one that really writes, never earlier.
    """

    def __init__(self) -> None:
        """Begin with no step dispatched."""
        self._dispatched_id = 0
        self._returned_id = 0
        self._writes: dict[int, Write] = {}

    def __repr__(self) -> str:
        """Show life: how far the steps are, and how many writes wait."""
        steps = f"{self._returned_id} of {self._dispatched_id} steps back"
        return f"<Fence {steps}, {len(self._writes)} writes>"

    def __contains__(self, block_id: int) -> bool:
        """Tell whether a block's content was noted, and neither cancelled nor settled since."""
        return block_id in self._writes

    def __len__(self) -> int:
        """Count the writes that were neither cancelled nor settled."""
        return len(self._writes)

    @property
    def returned_id(self) -> int:
        """The newest step that came back; all before it have, too."""
        return self._returned_id

    @property
    def is_quiet(self) -> bool:
        """Whether every step that was dispatched came back."""
        return self._returned_id == self._dispatched_id

    @property
    def has_written(self) -> bool:
        """Whether `written` would give anything."""
        return next(self._done(), None) is not None

    def note(self, block_id: int, name: bytes, position: int = 0) -> None:
        """Note that the step being scheduled fills a block; what was noted of it before is void."""
        self._writes.pop(block_id, None)
        self._writes[block_id] = Write(block_id, name, position, self._dispatched_id + 1)

    def note_written(self, block_id: int, name: bytes, position: int = 0) -> None:
        """Note a block that holds its content already, by a step that came back long ago."""
        self._writes.pop(block_id, None)
        self._writes[block_id] = Write(block_id, name, position, 0)

    def cancel(self, block_id: int) -> bool:
        """Forget what was noted of a block that will hold something else; returns whether anything was."""
        return self._writes.pop(block_id, None) is not None

    def cancel_all(self) -> None:
        """Forget everything that was noted."""
        self._writes.clear()

    def dispatch(self) -> int:
        """Note that the scheduled step goes out to the ranks; returns its id, which must come back with its outputs."""
        self._dispatched_id += 1
        return self._dispatched_id

    def came_back(self, step_id: int) -> None:
        """Note that a step came back on all ranks; older ones have, too, as ranks carry steps out in order.

        An id that was never dispatched proves nothing and is ignored.
        """
        if self._returned_id < step_id <= self._dispatched_id:
            self._returned_id = step_id

    def written(self, num_max: int) -> list[Write]:
        """Return the oldest writes that are done, `num_max` at most; they stay until they are settled."""
        return list(islice(self._done(), num_max))

    def settle(self, block_id: int) -> None:
        """Forget a write that was dealt with."""
        self._writes.pop(block_id, None)

    def _done(self) -> Iterator[Write]:
        # In the order of notes, so in that of steps: behind the first that is not done, little else is.
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
# Reading a member of an enumeration costs more than what is done with it.


class Published(IntEnum):
    """What an exchange answers to one publish."""

    FINDABLE = 1
    DUPLICATE = 2
    NOT_PRIVATE = 3


class Retracted(IntEnum):
    """What an exchange answers to one retract."""

    PRIVATE = 1
    HELD_ELSEWHERE = 2
    NOT_FINDABLE = 3


class Ledger:
    """How every block of a pool stands at the daemon, and under which key it is found there.

    What is about to be sent is doubtful until its answer comes; a lost answer leaves it so, until an inventory.
    """

    def __init__(self, num_blocks: int) -> None:
        """Begin with nothing in the magazine."""
        self._standings = bytearray(num_blocks)
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self.stale: set[int] = set()
        """Blocks that are findable, or may be, under keys that are not theirs any more: to be retracted first."""

    def __repr__(self) -> str:
        """Show life: how many blocks stand how."""
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
        """Count the blocks that stand so."""
        return self._standings.count(standing)

    def ids(self, standing: Standing) -> list[int]:
        """Return the blocks that stand so, ascending."""
        return [block_id for block_id, found in enumerate(self._standings) if found == standing]

    def is_private(self, block_id: int) -> bool:
        """Tell whether a block may be overwritten."""
        return self._standings[block_id] == _PRIVATE

    def is_findable(self, block_id: int) -> bool:
        """Tell whether a block is found under its key, as far as is known."""
        return self._standings[block_id] == _FINDABLE

    def key_of(self, block_id: int) -> bytes | None:
        """Return the key under which a block is found, or may be."""
        return self._key_of.get(block_id)

    def block_of(self, key: bytes) -> int | None:
        """Return the block that is found under a key."""
        return self._block_of.get(key)

    def doubt_all(self) -> None:
        """Note that every block but the null block may stand in any way; an inventory makes them known or stale."""
        self._standings[1:] = bytes((Standing.DOUBTFUL,)) * (len(self._standings) - 1)

    def take(self, block_ids: Iterable[int]) -> None:
        """Note that blocks came into the magazine as private ones."""
        for block_id in block_ids:
            self._make_private(block_id)

    def hold(self, block_id: int, key: bytes) -> None:
        """Note that a block of the magazine is found under a key."""
        self._drop_key(block_id)
        self._standings[block_id] = Standing.FINDABLE
        self._key_of[block_id] = key
        self._block_of[key] = block_id

    def send_publish(self, block_id: int, key: bytes) -> None:
        """Note that a private block's publish is on its way."""
        assert self._standings[block_id] == Standing.PRIVATE, "only private blocks are published"
        self._standings[block_id] = Standing.DOUBTFUL
        self._key_of[block_id] = key

    def send_retract(self, block_id: int) -> None:
        """Note that a findable block's retract is on its way."""
        assert self._standings[block_id] != Standing.PRIVATE, "a private block is found by nobody"
        self._standings[block_id] = Standing.DOUBTFUL

    def heard_publish(self, block_id: int, answer: int) -> None:
        """Take over what the daemon answered to a publish."""
        if answer == Published.FINDABLE:
            self.hold(block_id, self._key_of[block_id])
        elif answer == Published.DUPLICATE:
            self._make_private(block_id)

    def heard_retract(self, block_id: int, answer: int) -> None:
        """Take over what the daemon answered to a retract."""
        if answer == Retracted.PRIVATE:
            self._make_private(block_id)
        elif answer == Retracted.HELD_ELSEWHERE:
            self._standings[block_id] = Standing.FINDABLE

    def outdate(self, block_id: int) -> None:
        """Note that a block that is findable, or may be, should not be found under its key any more."""
        if self._standings[block_id] in (Standing.FINDABLE, Standing.DOUBTFUL):
            self._drop_key(block_id)
            self.stale.add(block_id)

    def overwrite(self, block_id: int) -> None:
        """Note that a block's bytes are not those of its key any more, whoever may still find it."""
        self.outdate(block_id)
        if block_id in self.stale:
            self._standings[block_id] = Standing.DOUBTFUL

    def reconcile(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """Take over the daemon's inventory; blocks that are found under keys that are not theirs become stale."""
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
    """Return the keys that lie one after the other in `keys`."""
    return [keys[first : first + KEY_BYTES] for first in range(0, len(keys), KEY_BYTES)]
