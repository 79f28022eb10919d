"""Own what an engine with owned memory knows of its blocks, and the exchanges that follow from it; the pool is vLLM's.

What follows from a step is sent when the step comes back, and its answer is taken when the next one does: so the daemon
works while the engine computes. Blocks on their way are neither private nor findable until then.
Blocks that are free, and private at the daemon, are `spare`; only these are handed out to be overwritten. A stock of
them is kept ahead of need, by retracting the blocks that the pool would hand out next, so that handing out never waits.
While the daemon does not answer, the pool has only private blocks to give: no findable one is overwritten.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from kvlease.integrations.vllm.fence import (
    Fence,
    Ledger,
    Published,
    Retracted,
    Standing,
    Write,
    unpacked_keys,
)
from kvlease.integrations.vllm.owned.restored import Restored
from kvlease.integrations.vllm.owned.sent import Sent
from kvlease.integrations.vllm.owned.stock import Stock
from kvlease.integrations.vllm.owned.terms import Calls, Needs, Persistence
from kvlease.magazine import Exchanged

_logger: Final = logging.getLogger(__name__)

ENTRIES_MAX: Final = 4096
"""Publishes of one exchange at most, and likewise retracts."""
_WAITS: Final = 64
"""Exchanges after which a block that somebody else holds or has is asked for again."""


class Keeper:
    """Keep account of how an engine's blocks stand at the daemon."""

    def __init__(
        self,
        num_blocks: int,
        needs: Needs,
        calls: Calls,
        rekey: Callable[[list[bytes]], list[bytes]],
    ) -> None:
        """Begin with an empty magazine; call `restore` next."""
        self.fence = Fence()
        self.ledger = Ledger(num_blocks)
        self.persistence = Persistence.ON
        self.publishes = True
        """Whether anything is published; findable blocks are retracted in any case before they are overwritten."""
        self.num_exchanges = 0
        self.num_published = 0
        self.num_restored = 0
        self.num_adopted = 0
        self.spare: set[int] = set()
        """Free private blocks that have nothing to publish."""
        self.waiting: set[int] = set()
        """Free private blocks that are about to be published."""
        self._needs = needs
        self._calls = calls
        self._rekey = rekey
        self._names: dict[int, bytes] = {}
        self._restored = Restored()
        self._num_absent = 0
        self._is_doubtful = False
        self._sent: Sent | None = None
        self._asked_at: dict[int, int] = {}
        self._stock = Stock(needs)
        self._is_free: Callable[[int], bool] = lambda _: True
        self._next_free: Callable[[], Iterable[int]] = lambda: ()

    def __repr__(self) -> str:
        """Show life: persistence, spare blocks and ledger."""
        return f"<Keeper {self.persistence.value}, {len(self.spare)} spare, {self.ledger!r}>"

    # The pool

    def watch(self, is_free: Callable[[int], bool], next_free: Callable[[], Iterable[int]]) -> None:
        """Take the functions that tell which blocks are free, and in which order the pool would hand them out."""
        self._is_free, self._next_free = is_free, next_free

    @property
    def is_on(self) -> bool:
        """Whether to keep account of the pool at all."""
        return self.persistence is not Persistence.OFF

    @property
    def num_private_free(self) -> int:
        """Free private blocks, which nobody finds."""
        return len(self.spare) + len(self.waiting)

    @property
    def has_restored(self) -> bool:
        """Whether blocks from an earlier life of the engine have not been looked up yet."""
        return bool(self._restored)

    @property
    def restored_ids(self) -> list[int]:
        """The blocks from an earlier life that have not been looked up yet."""
        return self._restored.ids

    @property
    def has_work(self) -> bool:
        """Whether more steps of the engine, even empty ones, would let more blocks be published or retracted."""
        if self.persistence is Persistence.OFF:
            return False
        if self._is_doubtful:
            return self._calls.is_returning
        is_due = self._sent is not None or bool(self.fence) or bool(self.ledger.stale)
        return self._calls.is_answering and is_due

    def num_free(self, num_in_queue: int) -> int:
        """Return how many free blocks may be promised: all, if enough of them are private or can be made so.

        If not, only the private ones. No request uses more than `longest_blocks`, found or new, without asking again.
        """
        num_ours = num_in_queue - self._num_absent
        needs = self._needs
        need = min(max(needs.blocks_per_request, needs.longest_blocks), num_ours)
        # This is asked for every request of every step, so the usual answer comes first.
        is_enough = len(self.spare) + len(self.waiting) >= need or self.require(need)
        return num_ours if is_enough else self.num_private_free

    def require(self, num_blocks: int) -> bool:
        """Try to have `num_blocks` blocks to hand out; return whether there are that many."""
        num_before = -1
        while not self._has(num_blocks) and self.num_private_free > num_before:
            num_before = self.num_private_free
            self.exchange(num_blocks)
        return self._has(num_blocks)

    def pick(self, num_blocks: int) -> list[int]:
        """Choose the blocks to hand out, spare ones first; spare and waiting blocks keep the pool's order."""
        if self.persistence is Persistence.GONE:
            ledger, absent = self.ledger, Standing.ABSENT
            return list(islice((b for b in self._next_free() if ledger[b] != absent), num_blocks))
        spare = self.spare
        picked = list(islice((b for b in self._next_free() if b in spare), num_blocks))
        if len(picked) < num_blocks:
            waiting = self.waiting
            picked += islice(
                (b for b in self._next_free() if b in waiting), num_blocks - len(picked)
            )
        return picked

    def gave(self, block_ids: Iterable[int]) -> None:
        """Note that blocks were handed out to be overwritten."""
        for block_id in block_ids:
            self.spare.discard(block_id)
            self.waiting.discard(block_id)
            self._forget(block_id)
            if not self.ledger.is_private(block_id):
                self.ledger.overwrite(block_id)
            self._stock.gave(1)

    def note(self, block_id: int, name: bytes, position: int) -> None:
        """Note that the step being scheduled fills a block with the content that vLLM calls `name`."""
        self._names[block_id] = name
        self.fence.note(block_id, name, position)
        self.refile(block_id)

    def touched(self, block_id: int) -> None:
        """Note that a cached block is used again; if it was retracted to be spare, it is published again."""
        self.spare.discard(block_id)
        self.waiting.discard(block_id)
        if self.ledger.is_private(block_id) and block_id not in self.fence:
            name = self._names.get(block_id)
            if name is not None:
                self.fence.note_written(block_id, name)

    def refile(self, block_id: int) -> None:
        """File a block as spare, as waiting, or as neither, as it stands now."""
        if not self._is_free(block_id) or not self.ledger.is_private(block_id):
            self.spare.discard(block_id)
            self.waiting.discard(block_id)
        elif block_id in self.fence:
            self.spare.discard(block_id)
            self.waiting.add(block_id)
        else:
            self.waiting.discard(block_id)
            self.spare.add(block_id)

    def evicted(self, block_id: int) -> None:
        """Note that vLLM no longer finds a block."""
        self._forget(block_id)
        self.ledger.outdate(block_id)
        self.refile(block_id)

    def reset(self) -> None:
        """Note that vLLM no longer finds anything, and retract all findable blocks."""
        self._hear_sent()
        self.fence.cancel_all()
        for standing in (Standing.FINDABLE, Standing.DOUBTFUL):
            for block_id in self.ledger.ids(standing):
                self.ledger.outdate(block_id)
        self._names.clear()
        self._restored.clear()
        self._refile_all()
        while self.ledger.stale and self.exchange(0):
            if not self._stale_to_ask():
                break

    # The restored index

    def restore(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """Take over the magazine from an inventory: findable blocks become the restored index, private ones spare."""
        for block_id, key in zip(block_ids, keys, strict=True):
            if key == bytes(len(key)):
                self.ledger.take((block_id,))
            else:
                self.ledger.hold(block_id, key)
                self._restored.add(block_id, key)
        self.num_restored = len(self._restored)
        self._refile_all()

    def find_restored(self, name: bytes) -> int | None:
        """Return the restored block with the content that vLLM calls `name`, or None; vLLM knows it from now on."""
        block_id = self._restored.take(self._rekey([name])[0])
        if block_id is not None:
            self._names[block_id] = name
            self.num_adopted += 1
        return block_id

    # Steps and exchanges

    def came_back(self, step_id: int) -> None:
        """Note that a step came back on all ranks, hear what followed from the last one, and send what is due now."""
        self._hear_sent()
        self.fence.came_back(step_id)
        num_spare = min(self._stock.after_step(), ENTRIES_MAX)
        if not self._is_settled(num_spare) and (sent := self._due(num_spare)):
            self._send(sent)
            if not self._calls.begin(sent.order):
                self._hear(None)

    def exchange(self, num_spare: int) -> bool:
        """Publish written blocks, and retract stale ones and those needed soon; return whether the daemon answered.

        `num_spare` is the number of spare blocks to have afterwards.
        """
        self._hear_sent()
        if sent := self._due(num_spare):
            self._send(sent)
            return self._hear(self._calls.exchange(sent.order))
        return self.is_on and not self._is_doubtful and self._calls.is_answering

    def _due(self, num_spare: int) -> Sent | None:
        """Return what to exchange; None if nothing is due, or if the daemon does not answer."""
        is_heard = self.is_on and self._calls.is_answering
        if not is_heard or (self._is_doubtful and not self._reconcile()):
            self._note_unanswered()
            return None
        writes, keys = self._to_publish()
        retracts = self._to_retract(num_spare)
        num_absent = self._num_absent if self.num_exchanges % _WAITS == 0 else 0
        return Sent.of(writes, keys, retracts, num_absent)

    def _is_settled(self, num_spare: int) -> bool:
        """Tell whether an exchange would carry nothing, as in most decoding steps."""
        is_on = self.persistence is Persistence.ON and self._calls.is_answering
        is_usual = is_on and not self._is_doubtful
        has_news = self.fence.has_written or bool(self.ledger.stale) or self._num_absent
        return is_usual and not has_news and len(self.spare) >= num_spare

    def doubt(self) -> None:
        """Note that the ledger may differ from the daemon, so that an inventory comes before the next exchange."""
        self._is_doubtful = True

    def switch_off(self) -> None:
        """Go on without the daemon until the engine restarts: the engine's memory is no longer the daemon's."""
        self.persistence = Persistence.OFF
        self._sent = None
        self.fence.cancel_all()
        self._restored.clear()

    def _has(self, num_blocks: int) -> bool:
        return self.persistence is Persistence.GONE or self.num_private_free >= num_blocks

    def _note_unanswered(self) -> None:
        if self.persistence is Persistence.ON and self._calls.is_dead:
            self.persistence = Persistence.GONE
            self._is_doubtful = True
            _logger.info(
                "The kvlease daemon has ended; until one is back, nothing is found there, and the engine uses all "
                "blocks.",
                extra={"action": "owned_gone"},
            )

    def _reconcile(self) -> bool:
        inventory = self._calls.inventory()
        if inventory is None:
            return False
        self.ledger.reconcile(inventory.blocks.tolist(), unpacked_keys(inventory.keys))
        self._is_doubtful = False
        if self.persistence is Persistence.GONE:
            self.persistence = Persistence.ON
        self._refile_all()
        if self._num_absent > 0:
            _logger.warning(
                "%d blocks are not in the engine's magazine; they are left alone.",
                self._num_absent,
                extra={"action": "owned_absent"},
            )
        return True

    def _to_publish(self) -> tuple[list[Write], list[bytes]]:
        done = self.fence.written(ENTRIES_MAX)
        keys = self._rekey([write.name for write in done]) if done else []
        writes: dict[bytes, Write] = {}
        for write, key in zip(done, keys, strict=True):
            is_known = self.ledger.block_of(key) is not None or key in writes
            if is_known or not self.publishes or not self.ledger.is_private(write.block_id):
                self.fence.settle(write.block_id)
                self.refile(write.block_id)
            else:
                writes[key] = write
        return list(writes.values()), list(writes)

    def _to_retract(self, num_spare: int) -> list[int]:
        retracts = self._stale_to_ask()
        need = min(num_spare - len(self.spare), ENTRIES_MAX) - len(retracts)
        if need > 0:
            is_findable, stale = self.ledger.is_findable, self.ledger.stale
            findable = (
                block_id
                for block_id in self._next_free()
                if is_findable(block_id) and block_id not in stale and self._is_askable(block_id)
            )
            retracts += islice(findable, need)
        return retracts

    def _stale_to_ask(self) -> list[int]:
        return list(islice(filter(self._is_askable, self.ledger.stale), ENTRIES_MAX))

    def _is_askable(self, block_id: int) -> bool:
        asked_at = self._asked_at.get(block_id)
        return asked_at is None or self.num_exchanges >= asked_at + _WAITS

    def _send(self, sent: Sent) -> None:
        self._sent = sent
        for write, key in zip(sent.writes, sent.keys, strict=True):
            self.ledger.send_publish(write.block_id, key)
        for block_id in sent.retracts:
            self.ledger.send_retract(block_id)
        self._refile(sent.block_ids)  # none may be handed out before the answer

    def _hear_sent(self) -> None:
        if self._sent is not None:
            self._hear(self._calls.answered())

    def _hear(self, answer: Exchanged | None) -> bool:
        """Take over the answer to what was sent; return whether there is one."""
        sent, self._sent = self._sent, None
        assert sent is not None, "an answer follows what was sent"
        self.num_exchanges += 1
        if answer is None:
            self._is_doubtful = True
            self._refile(sent.block_ids)
            self._note_unanswered()
            return False
        for write, code in zip(sent.writes, answer.published.tolist(), strict=True):
            self.ledger.heard_publish(write.block_id, code)
            self.fence.settle(write.block_id)
            self.num_published += code == Published.FINDABLE
            self.refile(write.block_id)
        for block_id, code in zip(sent.retracts, answer.retracted.tolist(), strict=True):
            self.ledger.heard_retract(block_id, code)
            if code == Retracted.PRIVATE:
                self._asked_at.pop(block_id, None)
            else:
                self._asked_at[block_id] = self.num_exchanges
            self.refile(block_id)
            if not self._is_free(block_id):  # it has been used again since
                self.touched(block_id)
        taken = answer.taken_running.tolist()
        if taken:
            self.ledger.take(taken)
            self._refile_all()
        self._is_doubtful = self._is_doubtful or self.ledger.has_doubt
        return True

    def _refile(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.refile(block_id)

    def _refile_all(self) -> None:
        # The null block is never in a magazine, and never in the pool's free queue.
        self._num_absent = self.ledger.count(Standing.ABSENT) - 1
        self.spare.clear()
        self.waiting.clear()
        self._refile(self.ledger.ids(Standing.PRIVATE))

    def _forget(self, block_id: int) -> None:
        self.fence.cancel(block_id)
        self._names.pop(block_id, None)
        self._restored.forget(block_id)
