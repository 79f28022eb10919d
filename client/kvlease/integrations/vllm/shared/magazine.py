"""Own what one engine believes of its magazine: the standing of every block, and what the next exchange carries.

This is pure bookkeeping: it makes no call and knows neither vLLM nor the daemon; its caller tells it what happens.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from kvlease.integrations.vllm.fence import Fence, Published, Retracted, Write
from kvlease.integrations.vllm.shared.orders import (
    Notes,
    Order,
    Reconciled,
    Settled,
    Standing,
    Wish,
)

DROPS_MAX: Final = 4096
"""Blocks of each kind that leave with one exchange at most; the daemon limits how many a call may name."""

# Plain integers, because reading an enumeration's member costs more than what is done with it.
_OUT, _FREE, _PRIVATE, _HELD, _DOUBTED, _LOST = map(int, Standing)
_FINDABLE: Final = int(Published.FINDABLE)
_DUPLICATE: Final = int(Published.DUPLICATE)


class Books:
    """Keep the standing of every block of the pool, as one engine sees it."""

    def __init__(self, num_blocks: int, fence: Fence, publish_max: int = 4096) -> None:
        """Begin with an empty magazine of a pool of `num_blocks`; the fence tells which blocks are written."""
        self.fence = fence
        self._standing = bytearray(num_blocks)
        self._users = bytearray(num_blocks)
        self._stock: list[int] = []
        self._idle: dict[int, None] = {}
        self._limbo: dict[int, None] = {}
        self._doubted: dict[int, Write] = {}
        self._retract: dict[int, None] = {}
        self._strays: list[int] = []
        self._hot: dict[int, int] = {}
        self._publish_max = publish_max
        self._dispatched_id = 0
        self._num_used = 0
        self.is_doubtful = False
        self._is_alone = False

    def __repr__(self) -> str:
        """Show life: the number of blocks in each standing."""
        return (
            f"<Books {self.num_stock} free, {self._num_used} used, {self.num_idle} idle, "
            f"{len(self._limbo)} waiting{', in doubt' if self.is_doubtful else ''}>"
        )

    # What is.

    def standing(self, block: int) -> Standing:
        """Return how a block stands."""
        return Standing(self._standing[block])

    @property
    def num_stock(self) -> int:
        """Private blocks that can be handed out now."""
        return len(self._stock)

    @property
    def num_idle(self) -> int:
        """Held blocks that nobody uses."""
        return len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that requests use."""
        return self._num_used

    @property
    def num_unused(self) -> int:
        """Blocks of the magazine that no request uses."""
        return len(self._stock) + len(self._idle) + len(self._limbo)

    @property
    def num_owned(self) -> int:
        """Blocks of the magazine."""
        count = self._standing.count
        return len(self._standing) - count(_OUT) - count(_LOST)

    @property
    def has_news(self) -> bool:
        """Whether there is anything to tell the daemon."""
        return self.fence.has_written or bool(self._strays or self._retract) or self.is_doubtful

    # What the engine does.

    def grant(self, count: int) -> list[int]:
        """Hand out blocks of the stock, which must have that many."""
        assert count <= len(self._stock), "the stock is checked before"
        if not count:
            return []
        granted = self._stock[-count:][::-1]
        del self._stock[-count:]
        for block in granted:
            self._standing[block] = _PRIVATE
            self._users[block] = 1
        self._num_used += count
        return granted

    def reuse(self, block: int) -> None:
        """Note that a block without a user has one again."""
        assert not self._users[block], "a used block is not idle"
        self._idle.pop(block, None)
        self._limbo.pop(block, None)
        self._users[block] = 1
        self._num_used += 1

    def release(self, block: int) -> bool:
        """Note that a block lost its last user; return whether its name is to be forgotten."""
        assert self._users[block], "an idle block has no user"
        self._users[block] = 0
        self._num_used -= 1
        if not self.fence.is_quiet:
            self._hot[block] = self._dispatched_id
        standing = self._standing[block]
        if standing == _HELD:
            self._idle[block] = None
        elif standing == _LOST:
            self._standing[block] = _OUT
            return True
        elif standing == _DOUBTED or block in self.fence:
            self._limbo[block] = None
        else:
            self._shelve(block)
            return True
        return False

    def write(self, block: int, name: bytes, position: int) -> None:
        """Note what the step being scheduled writes into a private block."""
        if self._standing[block] != _PRIVATE:
            return
        if self._is_alone:
            self._standing[block] = _HELD
        else:
            self.fence.note(block, name, position)

    def spoil(self, block: int) -> None:
        """Note that a block's name no longer matches its bytes: the block is not published, or is retracted."""
        self.fence.cancel(block)
        standing = self._standing[block]
        if self._is_alone and standing == _HELD:
            self._withdraw(block)
        elif standing in {_HELD, _DOUBTED}:
            self._retract[block] = None
        elif standing == _PRIVATE and not self._users[block]:
            self._shelve(block)

    def dispatched(self, step_id: int) -> None:
        """Note that a step went out: the blocks of its requests are read and written until it comes back."""
        self._dispatched_id = step_id

    def give_up(self) -> list[int]:
        """Give up all pending publications; return the blocks that go into the stock instead."""
        self.fence.cancel_all()
        shelved = [block for block in self._limbo if self._standing[block] == _PRIVATE]
        for block in shelved:
            self._shelve(block)
        return shelved

    def outdate(self) -> None:
        """Note that names mean something else from now on: no publication in doubt is ever sent again."""
        self._retract.update(dict.fromkeys(self._doubted))

    def isolate(self) -> list[int]:
        """Take every block for this engine; return those whose names are to be forgotten.

        Held blocks stay findable here, as nobody else can write them any more. A new name counts as soon as it is
        given.
        """
        self._is_alone = True
        forgotten = self.give_up()
        for block in range(1, len(self._standing)):
            standing = self._standing[block]
            if standing == _OUT:
                self._shelve(block)
            elif standing == _LOST:
                self._standing[block] = _PRIVATE
            elif (standing == _DOUBTED or block in self._retract) and self._withdraw(block):
                forgotten.append(block)
        for book in (self._doubted, self._retract, self._strays, self._hot):
            book.clear()
        self.is_doubtful = False
        return forgotten

    def evict(self, count: int, *, kept: Collection[int]) -> list[int]:
        """Move up to `count` held blocks that nobody uses into the stock, longest unused first; return them."""
        evicted = [block for block in self._idle if block not in kept][:count]
        for block in evicted:
            self._withdraw(block)
        return evicted

    # What is exchanged.

    def order(self, wish: Wish) -> Order:
        """Compose the next exchange; blocks that leave with it leave the books now, and what it publishes is doubted.

        Held blocks without a user leave beyond `idle_max`, longest unused first, and stock leaves beyond `stock_max`.
        If no such block may stay held, unused blocks are published and dropped in the same exchange. Blocks that a step
        under way may read or write always stay: another engine could overwrite them, or find them overwritten.
        """
        returned_id = self.fence.returned_id
        self._hot = {block: step for block, step in self._hot.items() if step > returned_id}
        kept = {*wish.kept, *self._hot, *self._retract}
        written = self.fence.written(self._publish_max)
        publish = tuple(one for one in written if self._standing[one.block_id] == _PRIVATE)
        for write in publish:
            self.fence.settle(write.block_id)
            self._standing[write.block_id] = _DOUBTED
            self._doubted[write.block_id] = write
        # Most exchanges give nothing back, and then neither collection is walked.
        leaving, surplus = [], []
        if len(self._idle) > wish.idle_max:
            leaving = [block for block in self._idle if block not in kept]
            leaving = leaving[: min(DROPS_MAX, max(0, len(leaving) - wish.idle_max))]
        for block in leaving:
            del self._idle[block]
        if (excess := len(self._stock) - wish.stock_max) > 0:
            surplus = [block for block in self._stock if block not in kept]
            surplus = surplus[: min(DROPS_MAX, excess)]
            gone = set(surplus)
            self._stock = [block for block in self._stock if block not in gone]
        for block in (*leaving, *surplus):
            self._standing[block] = _OUT
        strays, self._strays = self._strays[:DROPS_MAX], self._strays[DROPS_MAX:]
        retract = tuple(b for b in self._retract if self._standing[b] == _HELD)
        for block in retract:
            del self._retract[block]
        done = []
        if not wish.idle_max:
            unused = (write.block_id for write in publish if write.block_id in self._limbo)
            done = [block for block in unused if block not in kept]
        for block in done:
            del self._limbo[block], self._doubted[block]
            self._standing[block] = _OUT
        # The daemon evicts first what is dropped last, so the longest unused block comes last.
        drop = (*strays, *surplus, *done, *reversed(leaving))
        forgotten = (*leaving, *done)
        return Order(publish=publish, retract=retract, drop=drop, wish=wish, forgotten=forgotten)

    def settle(
        self,
        order: Order,
        *,
        published: Sequence[int],
        retracted: Sequence[int],
        held: Sequence[int],
        taken: Iterable[int],
    ) -> Settled:
        """Take over the daemon's answer to an order."""
        forgotten: list[int] = []
        for write, code in zip(order.publish, published, strict=True):
            if self._heard_publish(write, code):
                forgotten.append(write.block_id)
        for block, code in zip(order.retract, retracted, strict=True):
            if code == Retracted.PRIVATE and self._withdraw(block):
                forgotten.append(block)
        names = tuple(
            (name, block)
            for name, block in zip(order.wish.names, held, strict=True)
            if block >= 0 and self._hold(block)
        )
        return Settled(
            held=names,
            forgotten=tuple(forgotten),
            num_published=published.count(_FINDABLE),
            num_duplicates=published.count(_DUPLICATE),
            num_taken=sum(self._receive(block) for block in taken),
        )

    def doubt(self, order: Order) -> None:
        """Note that an order may or may not have been carried out: an inventory must come before the next one."""
        self.is_doubtful = True
        self._retract.update(dict.fromkeys(order.retract))

    def reconcile(self, inventory: Mapping[int, bool]) -> Reconciled:
        """Bring the books in line with the daemon's inventory: each block of the magazine, and whether it is findable.

        A block that requests use but the inventory lacks cannot be taken from them; it is never handed out or published
        again.
        """
        notes = Notes()
        for block, standing in enumerate(self._standing):
            is_findable = inventory.get(block)
            if is_findable is None:
                if standing not in {_OUT, _LOST}:
                    self._lose(block, notes)
            elif is_findable:
                self._find_held(block, standing, notes)
            else:
                self._find_private(block, standing, notes)
        self._stock = [block for block in self._stock if self._standing[block] == _FREE]
        self._strays = list(notes.strays)
        self.is_doubtful = False
        return notes.told()

    # One block at a time.

    def _shelve(self, block: int) -> None:
        self._limbo.pop(block, None)
        self._standing[block] = _FREE
        self._stock.append(block)

    def _heard_publish(self, write: Write, code: int) -> bool:
        """Take over the answer to one publication; return whether the block's name is to be forgotten."""
        if code not in (_FINDABLE, _DUPLICATE):
            self.is_doubtful = True
            return False
        block = write.block_id
        if self._doubted.pop(block, None) is None:
            # It left in the same exchange.
            return False
        if code == _DUPLICATE:
            return self._withdraw(block)
        self._standing[block] = _HELD
        if block in self._limbo:
            del self._limbo[block]
            self._idle[block] = None
        return False

    def _withdraw(self, block: int) -> bool:
        self._standing[block] = _PRIVATE
        self._retract.pop(block, None)
        if self._users[block]:
            return False
        self._idle.pop(block, None)
        self._shelve(block)
        return True

    def _hold(self, block: int) -> bool:
        standing = self._standing[block]
        if standing == _OUT:
            self._standing[block] = _HELD
            self._idle[block] = None
        elif standing != _HELD:
            self.is_doubtful = True
            return False
        elif block in self._idle:
            del self._idle[block]
            self._idle[block] = None
        return True

    def _receive(self, block: int) -> bool:
        if self._standing[block] != _OUT:
            self.is_doubtful = True
            return False
        self._shelve(block)
        return True

    def _lose(self, block: int, notes: Notes) -> None:
        self.fence.cancel(block)
        for book in (self._doubted, self._retract, self._idle, self._limbo):
            book.pop(block, None)
        notes.forgotten.append(block)
        if self._users[block]:
            self._standing[block] = _LOST
            notes.lost.append(block)
        else:
            self._standing[block] = _OUT

    def _find_held(self, block: int, standing: int, notes: Notes) -> None:
        if standing == _HELD:
            return
        if standing in {_OUT, _FREE}:
            self._standing[block] = _OUT
            notes.strays.append(block)
            return
        self.fence.cancel(block)
        self._doubted.pop(block, None)
        self._limbo.pop(block, None)
        self._standing[block] = _HELD
        notes.held.append(block)
        if not self._users[block]:
            self._idle[block] = None

    def _find_private(self, block: int, standing: int, notes: Notes) -> None:
        if standing == _OUT:
            self._shelve(block)
            notes.adopted.append(block)
        elif standing == _DOUBTED:
            self._standing[block] = _PRIVATE
            write = self._doubted.pop(block)
            self.fence.note_written(block, write.name, write.position)
            if self._retract.pop(block, 0) is None:
                self.spoil(block)
        elif standing in {_HELD, _LOST}:
            self._standing[block] = _PRIVATE
            self._retract.pop(block, None)
            if not self._users[block]:
                self._idle.pop(block, None)
                self._shelve(block)
                notes.forgotten.append(block)
