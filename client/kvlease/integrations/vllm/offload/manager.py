"""Own the scheduler's side of vLLM's offloading: which blocks the pool has and where new ones go; moves no bytes.

A request is looked up once. One exchange asks for all its keys, and for those of requests that arrived with it, and
holds the blocks found; every later lookup is a dict access. As soon as the request runs, its hold is given up, which
the next exchange tells the daemon. Stores take private rows from a stock; the rows are published when all ranks have
written them. A step makes one control call at most, besides one for its new requests.

While the daemon is away, everything is a miss and nothing is stored.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvlease.integrations.vllm.fills import Spoilt
from kvlease.integrations.vllm.offload.arrivals import KNOWS_POSITIONS, Arrivals
from kvlease.integrations.vllm.offload.books import Row, Rows, Written
from kvlease.integrations.vllm.offload.desk import Desk
from kvlease.integrations.vllm.offload.jobs import Jobs
from kvlease.integrations.vllm.offload.reloads import Reloads
from kvlease.integrations.vllm.offload.requests import BELOW, MISS, NOWHERE, Seeker, questions
from kvlease.integrations.vllm.offload.specs import RowsSpec

HELD_SHARE_MAX: Final = 0.5
"""When requests hold this share of the pool, no further request may hold blocks; the rest stays free for stores."""


class PoolManager(OffloadingManager):
    """vLLM's offloading manager over the daemon's pool; everything is a miss until it is opened."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin closed."""
        self._desk: Desk | None = None
        self._jobs = Jobs(1)
        self._arrivals = Arrivals()
        self._seekers: dict[str, Seeker] = {}
        self._holders: dict[str, Seeker] = {}
        self._reloads = Reloads(clock)
        self._unasked: dict[str, tuple[Seeker, dict[OffloadKey, None]]] = {}
        self._storing: dict[OffloadKey, Row] = {}
        self._spoiled: set[Row] = set()
        self._events: list[OffloadingEvent] = []
        self._stock_target = 0
        self._has_events = False
        self._has_new = False

    def __repr__(self) -> str:
        """Show life: the known requests, and the desk."""
        return f"<PoolManager {len(self._seekers)} requests, {self._desk!r}>"

    def open(self, desk: Desk, *, num_ranks: int, stock_rows: int, has_events: bool) -> None:
        """Begin to use the pool."""
        self._jobs = Jobs(num_ranks)
        self._stock_target = stock_rows
        self._has_events = has_events
        self._desk = desk
        desk.on_loss = self._lose

    # Lookups

    def absent(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Tell for each key, without a call, whether the pool surely lacks it."""
        desk, none = self._desk, [False] * len(keys)
        return none if desk is None else desk.shield(lambda: desk.absent(keys), none, "lookup")

    def note_absent(self, request_id: str) -> None:
        """Note that the first key of a request was absent, so nothing of it is cached; the daemon was not asked."""
        context, desk = self._arrivals.of(request_id), self._desk
        if context is not None and desk is not None:
            desk.absences.note(self._seeker(context), context._offload_key_positions)  # noqa: SLF001 - probed at import
            self._arrivals.forget((request_id,))

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Tell whether the pool has a block; the first lookup of a request asks for all of its blocks."""
        seeker = self._seekers.get(req_context.req_id)
        if seeker is not None and (answer := seeker.answers.get(key)) is not None:
            return answer
        return self._guarded(lambda desk: self._meet(desk, key, req_context), MISS, "lookup")

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Return the host: all blocks come from its memory."""
        del key, req_context
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Return where the blocks are that a request loads; they stay held until the load ends."""
        seeker = self._seeker(req_context)
        seeker.num_loads += 1
        rows, names = seeker.find(keys)
        return RowsSpec(b"" if self._desk is None else self._desk.pool, rows, names)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note that a load has ended; after the last one, give up the blocks that the request held."""
        del keys
        seeker = self._seekers.get(req_context.req_id)
        if seeker is None:
            return
        seeker.num_loads = max(0, seeker.num_loads - 1)
        if not seeker.num_loads:
            self._release(seeker)
            if seeker.is_finished:
                del self._seekers[seeker.request_id]

    # Stores

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Give rows to blocks that the pool lacks, as far as rows are at hand; other blocks are not stored."""
        nothing = PrepareStoreOutput([], RowsSpec(b"", np.zeros(0, np.int32), b""), [])
        return self._guarded(
            lambda desk: self._begin_store(desk, list(keys), req_context), nothing, "store"
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Queue blocks that all ranks have written to be published."""
        desk = self._desk
        if desk is None or not keys:
            return
        books, keys = desk.books, list(keys)
        for key, name in zip(keys, desk.names(keys), strict=True):
            row = self._storing.pop(key, -1)
            if not success or row in self._spoiled:
                self._spoiled.discard(row)
                books.unwrite(row)
            elif books.end_write(row):
                position = req_context.get_offload_key_position(key) or 0
                books.written.append(Written(row=row, name=name, position=position))
                if self._has_events:
                    self._events.append(OffloadingEvent([key], Medium.CPU, removed=False))

    # The life of requests and steps

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Note a request; the daemon is asked only when a request is looked up."""
        self._arrivals.note(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Give up what a request held, unless a load still reads it."""
        self._unasked.pop(req_context.req_id, None)
        self._arrivals.forget((req_context.req_id,))
        seeker = self._seekers.get(req_context.req_id)
        if seeker is None:
            return
        seeker.is_finished = True
        if not seeker.num_loads:
            self._release(seeker)
            del self._seekers[req_context.req_id]

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Make the step's one exchange: publish and give up rows, ask for blocks on their way, and take new stock."""
        can_wait = self._has_new or bool(context.new_req_ids) or self._jobs.is_storing
        self._guarded(lambda desk: self._close_step(desk, can_wait=can_wait), None, "step")

    def has_pending_work(self) -> bool:
        """Whether something waits for the next step's exchange."""
        return self._desk is not None and self._desk.has_work

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return events for the blocks that were stored; the daemon evicts them, and tells of that itself."""
        events, self._events = self._events, []
        return events

    def reset_cache(self) -> None:
        """Begin a new generation of keys; rows that jobs still use come back when the jobs end."""
        books = self._books
        if books is None:
            return
        for job in self._jobs.forget():
            if not job.is_store:
                books.hold(np.unique(job.rows[job.rows >= 0]))
        for seeker in self._seekers.values():
            seeker.num_loads = 0
            self._release(seeker)
            seeker.known = {}
        self._seekers = {key: one for key, one in self._seekers.items() if not one.is_finished}
        self._unasked.clear()
        self._storing.clear()
        books.stock.extend(one.row for one in books.written)
        books.written = []
        self._guarded(lambda desk: desk.begin_generation(), None, "reset")

    def shutdown(self) -> None:
        """Detach from the daemon."""
        if self._desk is not None:
            self._desk.close()

    # What the connector tells

    def plan(self, load_jobs: Mapping[int, Any], store_jobs: Mapping[int, Any]) -> None:
        """Note the jobs that a step hands to the ranks."""
        self._jobs.plan(load_jobs, store_jobs)

    def admit(self, request_ids: Collection[str], *, has_new: bool = False) -> None:
        """Note which requests run in this step, so that their loads have ended, and whether any is new."""
        self._has_new = has_new
        self._arrivals.forget(request_ids)
        if not self._holders:
            return
        for seeker in [one for name, one in self._holders.items() if name in request_ids]:
            if not seeker.num_loads:
                self._release(seeker)

    def report(
        self, completed: Mapping[int, int], failed: Collection[int], wrong_rows: Collection[Row]
    ) -> None:
        """Note what the ranks report of their jobs; must come before vLLM's own calls for the same report."""
        books = self._books
        if books is None:
            return
        books.condemn(wrong_rows)
        for job in self._jobs.find(failed):
            if job.is_store:
                self._spoiled.update(job.rows.tolist())
            elif (seeker := self._seekers.get(job.request_id)) is not None:
                seeker.is_refused = True
        for job in self._jobs.report(completed):
            if job.is_store:
                self._spoiled.difference_update(job.rows.tolist())
                for row in job.rows.tolist():
                    books.unwrite(row)
            else:
                books.release(np.unique(job.rows[job.rows >= 0]))

    def spoil(self, request_ids: Iterable[str], spoilt: Spoilt) -> None:
        """Note that nothing of some requests may be stored any more, nor what anybody stores of spoilt blocks."""
        for name in request_ids:
            self._seekers.setdefault(name, Seeker(name)).is_spoilt = True
        for job in self._jobs.storing(spoilt.requests, spoilt.blocks):
            self._spoiled.update(job.rows.tolist())

    def held(self) -> Iterable[tuple[bytes, Row]]:
        """Yield the keys and rows that requests believe they hold."""
        for seeker in self._holders.values():
            for place in np.flatnonzero(seeker.rows >= 0).tolist():
                yield seeker.names[place], int(seeker.rows[place])

    def blocks_read(self) -> set[int]:
        """Return the engine's blocks that unfinished stores read."""
        return self._jobs.blocks_read()

    # How it is done

    @property
    def _books(self) -> Any:
        return None if self._desk is None else self._desk.books

    def _guarded(self, work: Callable[[Desk], Any], default: Any, what: str) -> Any:
        desk = self._desk
        return default if desk is None else desk.shield(lambda: work(desk), default, what)

    def _seeker(self, req_context: ReqContext) -> Seeker:
        name = req_context.req_id
        return self._seekers.get(name) or self._seekers.setdefault(name, Seeker(name))

    def _meet(self, desk: Desk, key: OffloadKey, context: ReqContext) -> LookupResult:
        """Ask for all keys of a request that were not asked for yet, this one among them."""
        seeker = self._seeker(context)
        if seeker.is_refused or not desk.is_ready:
            seeker.answers[key] = MISS
            return MISS
        if not KNOWS_POSITIONS:
            _, keys = self._unasked.setdefault(context.req_id, (seeker, {}))
            keys[key] = None
            return LookupResult.RETRY
        positions = context._offload_key_positions  # noqa: SLF001 - probed at import; there is no other list
        if desk.absences.note_miss(seeker, key, positions):
            self._arrivals.forget((context.req_id,))
            return MISS
        self._ask(desk, [one for one in positions if one not in seeker.answers], seeker)
        return seeker.answers.setdefault(key, MISS)

    def _ask(self, desk: Desk, keys: list[OffloadKey], seeker: Seeker) -> None:
        """Make one exchange that holds the blocks that the pool has of the keys; if it fails, all are misses."""
        self._arrivals.forget((seeker.request_id,))
        asked = []
        if keys and desk.books.num_held < desk.books.num_rows * HELD_SHARE_MAX:
            early = self._arrivals.early(len(keys), self._seeker, desk.absences.absent)
            asked = [(seeker, keys), *early]
            desk.absences.ask(seeker.request_id, keys)
        names = [desk.names(of_request) for _, of_request in asked]
        hold = [one for own in names for one in own]
        rows = desk.exchange(hold=hold, is_waited_for=True) if asked else None
        if rows is None:
            seeker.miss(keys)
            return
        for (asking, of_request), own in zip(asked, names, strict=True):
            there, rows = rows[: len(own)], rows[len(own) :]
            self._take_in(desk, asking, of_request, own, there)

    def _take_in(
        self, desk: Desk, seeker: Seeker, keys: list[OffloadKey], names: list[bytes], rows: Rows
    ) -> None:
        if (found := rows.tolist()).count(NOWHERE) == len(found):
            # Most new requests find nothing; then numpy has nothing to do, which costs time even for little data.
            seeker.miss(keys)
            return
        seeker.learn(keys, names, rows)
        desk.books.hold(rows[rows >= 0])
        if seeker.holds:
            self._holders[seeker.request_id] = seeker
        if (rows == BELOW).any():
            self._reloads.note(seeker)

    def _release(self, seeker: Seeker) -> None:
        self._holders.pop(seeker.request_id, None)
        self._reloads.forget(seeker.request_id)
        rows = seeker.clear()
        if self._desk is not None and len(rows):
            self._desk.books.release(rows)

    def _begin_store(
        self, desk: Desk, keys: list[OffloadKey], context: ReqContext
    ) -> PrepareStoreOutput:
        books = desk.books
        seeker = self._seeker(context)
        if desk.is_ready and not seeker.known and not seeker.answers and KNOWS_POSITIONS:
            # The request was not looked up; but the pool may have blocks that the engine's own cache has.
            self._meet(desk, keys[0], context)
            self._release(seeker)
        lacking = [] if seeker.is_spoilt else seeker.lacking(keys, self._storing.keys())
        if (lack := desk.lack(len(lacking))) and desk.is_ready:
            desk.exchange(take=lack + self._stock_target)
        rows = books.write(len(lacking)) if desk.is_ready else []
        keys = lacking[: len(rows)]
        names = desk.names(keys)
        self._storing.update(zip(keys, rows, strict=True))
        spec = RowsSpec(desk.pool, np.array(rows, np.int32), b"".join(names))
        return PrepareStoreOutput(keys, spec, [])

    def _close_step(self, desk: Desk, *, can_wait: bool) -> None:
        desk.poll()
        for seeker in self._arrivals.end_step(self._holders, self._reloads.request_ids):
            self._release(seeker)
        waiting = questions(self._unasked.values(), self._reloads.due(), desk.names)
        books = desk.books
        lack = self._stock_target - len(books.stock)
        take = lack if lack > self._stock_target // 2 else 0
        names = [name for _, _, own in waiting for name in own]
        is_due = bool(names or take or desk.come_due(can_wait=can_wait)) and desk.is_ready
        if is_due and not waiting:
            desk.begin(take)
            return
        rows = desk.exchange(hold=names, take=take) if is_due else None
        if rows is None:
            self._give_up_unasked()
            return
        for seeker, places, own in waiting:
            there, rows = rows[: len(own)], rows[len(own) :]
            if places is None:
                _, keys = self._unasked.pop(seeker.request_id)
                self._take_in(desk, seeker, list(keys), own, there)
            else:
                seeker.arrive(places, there)
                books.hold(there[there >= 0])
                self._holders[seeker.request_id] = seeker

    def _give_up_unasked(self) -> None:
        for seeker, keys in self._unasked.values():
            seeker.miss(keys)
        self._unasked.clear()

    def _lose(self, rows: Collection[Row] | None) -> None:
        """Note rows that are no longer held; None means all rows, including those being written."""
        if rows is None:
            for seeker in list(self._holders.values()):
                seeker.lose(seeker.held_rows.tolist())
            for seeker in self._seekers.values():
                seeker.known = {}
            self._holders.clear()
            # vLLM still tells these stores' end, which must not be taken for that of stores into the new pool.
            self._storing = dict.fromkeys(self._storing, NOWHERE)
            self._spoiled.clear()
            self._jobs.clear()
            return
        for seeker in list(self._holders.values()):
            seeker.lose(rows)
