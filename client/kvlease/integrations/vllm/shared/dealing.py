"""Own an engine's exchanges with the daemon: orders become calls, and answers go into the books.

Others decide what to order. Nothing is raised: if the daemon does not answer, the engine goes on with what it has.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np

from kvlease.exchanges import packable
from kvlease.ids import BYTES_PER_KEY
from kvlease.integrations.vllm.identity.rekey import RememberedKeys
from kvlease.integrations.vllm.session.session import EngineSession, SessionEvent
from kvlease.integrations.vllm.shared.magazine import Books
from kvlease.integrations.vllm.shared.orders import Order, Reconciled, Settled, Wish
from kvlease.integrations.vllm.untold import Untold
from kvlease.magazine import Exchanged, ExchangeOrder, Inventory
from kvlease.memory.mapped import Identity

_logger: Final = logging.getLogger(__name__)

_PRIVATE: Final = bytes(BYTES_PER_KEY)


@dataclass(slots=True)
class DealCounts:
    """The counts of an engine's exchanges, since it began."""

    steps: int = 0
    """Steps that were scheduled."""
    exchanges: int = 0
    """Exchanges that were sent, answered or not."""
    inventories: int = 0
    """How often the books were compared with the daemon's inventory."""
    lost_answers: int = 0
    """Exchanges without an answer."""
    published: int = 0
    """Blocks that became findable."""
    duplicates: int = 0
    """Blocks that stayed private, because another block had the key."""
    held: int = 0
    """Blocks that were found at the daemon."""
    taken: int = 0
    """Private blocks that were granted."""
    dropped: int = 0
    """Blocks that were dropped."""
    lost_blocks: int = 0
    """Blocks that requests used although they were no longer the engine's."""

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)


class Dealer:
    """Exchange blocks with the daemon for one engine, from one thread."""

    def __init__(
        self,
        session: EngineSession,
        books: Books,
        forget: Callable[[Iterable[int]], None],
        memory: Identity,
    ) -> None:
        """Use a session; `forget` makes blocks unfindable in the engine, whose cache lies in `memory`."""
        self._memory = memory
        self.guard = session.guard
        self._session = session
        self._books = books
        self._forget = forget
        self._keys = RememberedKeys()
        self._untold: Untold[bytes] = Untold()
        self._underway: Order | None = None
        self.is_orphan = False
        """Whether the engine has left the shared cache for good, so that nothing more is published or found."""
        self.is_alone = False
        """Whether the engine's memory has become private to it, so that all its blocks are the engine's."""
        self.finds = True
        """Whether blocks are published and found; if not, they are only granted."""
        self.counts = DealCounts()
        self.num_available = 0
        self.num_magazines = 1

    def __repr__(self) -> str:
        """Show life: whether exchanges are made, and how many there were."""
        state = "orphaned" if self.is_orphan else "ready" if self.is_ready else "waiting"
        return f"<Dealer {state}, {self.counts.exchanges} exchanges>"

    @property
    def is_ready(self) -> bool:
        """Whether an exchange is worth composing."""
        return not self.is_orphan and self._session.is_on and self._session.rekeyer is not None

    def poll(self) -> None:
        """Learn what has become of the session since the last step."""
        event = self._session.poll()
        is_other = event is SessionEvent.FRESH and self._session.memory != self._memory
        if not self.is_orphan and (is_other or event is SessionEvent.GONE):
            self._orphan()

    def go_alone(self) -> None:
        """Take the whole memory for this engine, as every rank has made it private."""
        if not self.is_orphan:
            self._leave()
        self.is_alone = True
        self._forget(self._books.isolate())
        _logger.warning(
            "This engine now has all %d blocks of its memory for itself, like an engine without kvlease.",
            self._books.num_owned,
            extra={"action": "alone", "num_blocks": self._books.num_owned},
        )

    def _orphan(self) -> None:
        """Stop sharing: the engine's memory is no longer the cache's, so nobody decides whose its blocks are."""
        self._leave()
        _logger.error(
            "The daemon has lost the cache's memory. This engine goes on in that memory without sharing, and makes it "
            "its own once a daemon is back: restart the engine to share again.",
            extra={"action": "orphaned", "num_blocks": self._books.num_owned},
        )

    def _leave(self) -> None:
        self.is_orphan = True
        self.hear()
        self._forget(self._books.give_up())
        self.num_available = 0
        # Detach, because an empty magazine would still count when blocks are dealt out in shares.
        self._session.close()

    def note_miss(self, names: Sequence[bytes], deciding: Sequence[bytes]) -> bool:
        """Tell without a call whether surely nothing of a prefix is cached, and if so, note that it was missed.

        `deciding` are the names without which no other name can be used. If it returns False, the daemon must be asked.
        """
        request = names[-1]
        if self.is_absent(deciding):
            self._untold.note(request, names)
            return True
        self._untold.drop(request)
        return False

    def is_absent(self, deciding: Sequence[bytes]) -> bool:
        """Tell whether surely none of some names is cached."""
        rekeyer = self._session.rekeyer
        if rekeyer is None:
            return False
        return all(self._session.absent(self._keys.of_names(rekeyer, deciding)))

    def begin_generation(self) -> None:
        """Hear what names meant until now, and forget those that were not told yet: now they mean something else."""
        self.hear()
        self._books.outdate()
        self._untold.clear()

    def deal(self, wish: Wish) -> Settled | None:
        """Carry out one exchange; None if the daemon did not answer, and then the engine keeps what it had."""
        order = self._composed(wish)
        if order is None or order.is_empty:
            return None if order is None else Settled()
        return self._take(order, self._session.exchange(self._written(order), None))

    def begin(self, wish: Wish) -> None:
        """Send one exchange, whose answer is heard before anything else is exchanged, or by `hear`."""
        order = self._composed(wish)
        if order is None or order.is_empty:
            return
        self._underway = order
        if not self._session.begin(self._written(order)):
            self.hear()

    def hear(self) -> None:
        """Wait for the answer to the exchange that was begun, if one was."""
        order, self._underway = self._underway, None
        if order is not None:
            self._take(order, self._session.answered())

    def _composed(self, wish: Wish) -> Order | None:
        """Return the next exchange, which has left the books; None if the daemon cannot be asked."""
        self.hear()
        if not self.is_ready or not self._is_sure():
            self.num_available = 0
            return None
        if not self.finds:
            self._forget(self._books.give_up())
            wish = replace(wish, names=())
        order = self._books.order(wish)
        self._forget(order.forgotten)
        self.counts.exchanges += not order.is_empty
        return order

    def _take(self, order: Order, answer: Exchanged | None) -> Settled | None:
        if answer is None:
            self.counts.lost_answers += 1
            self.num_available = 0
            self._books.doubt(order)
            return None
        return self._settle(order, answer)

    def _is_sure(self) -> bool:
        """Tell whether the books agree with the daemon, after clearing up any doubt that a lost answer left."""
        if not (self._session.needs_inventory or self._books.is_doubtful):
            return True
        self.counts.inventories += 1
        truth = self._session.reconciled()
        if truth is None:
            return False
        result = self._books.reconcile(_findable(truth))
        self._forget(result.forgotten)
        self.counts.lost_blocks += len(result.lost)
        _tell(result)
        return True

    def _written(self, order: Order) -> ExchangeOrder:
        wish, rekeyer = order.wish, self._session.rekeyer
        assert rekeyer is not None, "orders are written while attached"
        turned = self._keys.of_names
        # A request that waits for this exchange does not wait for the report of what others missed.
        missed = () if wish.names else self._untold.take()
        return ExchangeOrder(
            publish_blocks=packable([write.block_id for write in order.publish], np.int32),
            publish_keys=b"".join(turned(rekeyer, [write.name for write in order.publish])),
            publish_positions=packable([write.position for write in order.publish], np.uint32),
            retract_blocks=packable(order.retract, np.int32),
            drop_blocks=packable(order.drop, np.int32),
            hold_keys=b"".join(turned(rekeyer, wish.names)),
            stops_at_miss=wish.stops_at_miss,
            brings=bool(wish.names),
            take_running=wish.num_running,
            take_new=wish.num_new,
            all_or_nothing=wish.all_or_nothing,
            missed_keys=b"".join(turned(rekeyer, missed)),
        )

    def _settle(self, order: Order, answer: Exchanged) -> Settled:
        self.num_available = answer.num_available
        self.num_magazines = answer.num_magazines
        settled = self._books.settle(
            order,
            published=answer.published.tolist(),
            retracted=answer.retracted.tolist(),
            held=answer.held.tolist(),
            taken=[*answer.taken_running.tolist(), *answer.taken_new.tolist()],
        )
        self._forget(settled.forgotten)
        counts = self.counts
        counts.published += settled.num_published
        counts.duplicates += settled.num_duplicates
        counts.held += len(settled.held)
        counts.taken += settled.num_taken
        counts.dropped += len(order.drop)
        return settled


def _findable(inventory: Inventory) -> dict[int, bool]:
    """Return each block of the magazine, and whether it is findable."""
    starts = range(0, len(inventory.keys), BYTES_PER_KEY)
    return {
        block: inventory.keys[start : start + BYTES_PER_KEY] != _PRIVATE
        for block, start in zip(inventory.blocks.tolist(), starts, strict=True)
    }


def _tell(result: Reconciled) -> None:
    if result.lost:
        _logger.error(
            "%d blocks that requests use no longer belong to this engine; the output of these requests may be wrong, "
            "and the blocks are no longer used. Restart the engine.",
            len(result.lost),
            extra={"action": "blocks_lost", "num_blocks": len(result.lost)},
        )
    is_news = bool(result.adopted or result.strays or result.held)
    # Every start compares, and mostly finds no difference.
    _logger.log(
        logging.INFO if is_news else logging.DEBUG,
        "The magazine was compared with the daemon's: %d blocks came with a lost answer, %d are dropped, %d turned out "
        "to be published.",
        len(result.adopted),
        len(result.strays),
        len(result.held),
        extra={"action": "reconciled"},
    )
