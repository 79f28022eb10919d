"""Own the control plane: every call, over any transport, goes through here to a core, and its effects come back.

One event loop runs all of it. A call that need not wait is answered synchronously, without a task of its own.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from time import monotonic
from typing import Final

import structlog
from google.protobuf.message import Message

from kvlease.errors import (
    InternalError,
    InvalidError,
    KVLeaseError,
    NotYoursError,
    StaleEpochError,
)
from kvlease.ids import Epoch, WorkerId
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.access.roles import Role, Roles
from kvleased.access.tokens import Keyring
from kvleased.answering.guarding import Guard
from kvleased.answering.observing import Observing, noted
from kvleased.answering.retries import Retries, check_key
from kvleased.answering.settling import Settling
from kvleased.answering.waiting import WaitingCalls
from kvleased.caches.entries import READY, CacheEntry
from kvleased.caches.registry import Registry
from kvleased.caches.tallies import verb_of
from kvleased.caches.tier_infos import restrictions
from kvleased.caches.tiers import Tiers
from kvleased.calls.draining import DRAINED, DRAINING, STOPS, draining
from kvleased.calls.idempotency import Answer
from kvleased.config.settings import Settings
from kvleased.core import commands as c
from kvleased.core.effects import Copy, Effect, Notice, Probe
from kvleased.credentials import root_secret
from kvleased.movers.batches import ObserveCopies
from kvleased.spans.tracing import Tracing, traced
from kvleased.supervision.keeper import Kept, Note
from kvleased.supervision.keeper_link import KeeperLink
from kvleased.telemetry.events import Events
from kvleased.verbs.caches import CacheVerbs
from kvleased.verbs.leases import LeaseVerbs
from kvleased.verbs.magazines import MagazineVerbs
from kvleased.verbs.operating import OperatorVerbs
from kvleased.verbs.runner import Respond, Verb
from kvleased.verbs.workers import WorkerVerbs

_NOT_WHILE_DRAINING: Final = frozenset({"attach", "register_cache"})
_DRAIN_POLL_SECONDS: Final = 0.05
_LOG = structlog.get_logger()


class Daemon:
    """Answer calls, from `start` to `stop`."""

    def __init__(
        self,
        settings: Settings,
        keeper: KeeperLink,
        epoch: int,
        observe_copies: ObserveCopies = lambda *_: None,
    ) -> None:
        """Take the settings, the link to the supervisor, the number of this life, and what counts copies."""
        self.epoch = Epoch(epoch)
        self.settings = settings
        self.registry = Registry(
            epoch, max_caches=settings.max_caches, max_workers=settings.max_workers
        )
        self.guard = Guard(self.registry, Keyring({}))
        self.knows, self.check_still = self.guard.knows, self.guard.check_still
        self.events = Events(epoch, settings.max_events, settings.max_watchers)
        self.tiers = Tiers(
            self.registry, self.apply, keeper, settings, observe_copies, self._note_store
        )
        self._observing = Observing(self.registry)
        self._keeper = keeper
        events, tiers = self.events, self.tiers
        self._caches = CacheVerbs(
            self.registry, settings, epoch=self.epoch, keeper=keeper, tiers=tiers, events=events
        )
        self.events.snapshot = self._caches.told
        self.events.is_known = self.registry.caches.__contains__
        self._workers = WorkerVerbs(
            self.registry, self, settings, epoch=epoch, keeper=keeper, events=events
        )
        self.counting = self._workers.counting
        self._caches.maker.end_workers = self._workers.end_all
        self._operating = OperatorVerbs(
            self.registry, self, settings, caches=self._caches, keeper=keeper, events=events
        )
        self._verbs: dict[str, Verb] = {
            **self._caches.table,
            **self._workers.table,
            **LeaseVerbs(self.registry, self, settings).table,
            **MagazineVerbs(self.registry, self, settings).table,
            **self._operating.table,
        }
        self._retries = Retries(self.registry, settings.max_remembered_replies)
        self._waiting = WaitingCalls(self._pass_time, self._leave)
        self.registry.on_drop.append(self._waiting.end_all_of)
        self._settling = Settling(self._carry_out)
        self._ticker: asyncio.TimerHandle | None = None
        self._not_ready, self._unreachable = "starting", ""
        self.tracing: Tracing | None = None
        """Makes spans of calls and copies; None where tracing is off."""

    def __repr__(self) -> str:
        """Show life."""
        return f"<Daemon {self._not_ready or 'ready'}, {self.registry!r}, {len(self._waiting)} calls waiting>"

    @property
    def readiness(self) -> tuple[bool, str]:
        """Whether calls can be granted, and why not or with what restriction."""
        if self._not_ready:
            return False, STOPS if self._not_ready == DRAINING else self._not_ready
        if self.registry.is_draining:
            return False, DRAINED
        if self._unreachable:
            return False, self._unreachable
        without = {"being replaced": self.tiers.away} | restrictions(self.registry)
        said = "; ".join(f"{what}: {names}" for what, names in without.items() if names)
        return True, f"degraded: {said}" if said else "ready"

    async def start(self, kept: Sequence[Kept], notes: Sequence[Note]) -> None:
        """Bring back what the supervisor kept from earlier lives, then start the ticks."""
        self._keeper.start(self.tiers)
        secret = await root_secret.load(kept, self._keeper, self.settings.secret_path)
        self._caches.take_secret(secret)
        self._workers.root_secret = self._operating.root_secret = secret
        self._caches.rules.recover(notes)
        self._operating.recover(notes)
        self.registry.memory_shortages.recover(self._keeper, notes)
        living = self._workers.living([*kept, *notes])
        self._caches.recover(
            kept,
            self._workers.tenants(living),
            self._workers.places(living),
            self._workers.magazines(living),
            monotonic(),
            apply=self.apply,
        )
        self._workers.recover(living)
        self._tick()
        _LOG.info(
            "recovered",
            epoch=self.epoch,
            caches=len(self.registry.caches),
            workers=len(self.registry.by_id),
        )

    def serve(self) -> None:
        """Take note that the transports are up: from now on the daemon is ready."""
        self._not_ready = ""

    def note_unreachable(self, reason: str) -> None:
        """Take note why clients cannot connect although calls are answered; an empty reason says that they can."""
        self._unreachable = reason

    async def drain(self, drain_seconds: float) -> None:
        """Grant nothing new, and wait for the leases to end, at most `drain_seconds`."""
        self._not_ready, self.registry.is_stopping = DRAINING, True
        _LOG.info("draining", leases=self.registry.num_leases)
        for entry in list(self.registry):
            self.apply(entry, c.Drain(is_daemon=True))
        deadline = monotonic() + drain_seconds
        # Leases end in many places, so polling is simpler than an event; it happens once in a life.
        while (num_leases := self.registry.num_leases) and monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        _LOG.info("drained", leases_left=num_leases)

    async def stop(self) -> None:
        """Stop the ticks, cancel the calls that wait, and close the links to the other processes."""
        if self._ticker is not None:
            self._ticker.cancel()
        self._observing.stop()
        self._waiting.cancel_all()
        await self._caches.stop()
        self._workers.stop()
        if self.tracing is not None:
            self.tracing.stop()
        self.tiers.close()
        self._keeper.close()

    # Calls

    def admit(self, allowed: Roles, caller: Caller, asked: str) -> Caller:
        """Return the caller with the role that was found for it, if all that comes before a call's body is right.

        Raises:
            UnknownWorkerError, NotYoursError: see `Guard.admit`.
            StaleEpochError: the caller means an earlier life of the daemon.
            InvalidError: the epoch is negative, or the idempotency key is malformed.
        """
        caller = self.guard.admit(allowed, caller, asked)
        if asked in self._verbs:
            self._check_epoch(asked, caller)
            check_key(caller.idempotency_key)
        return caller

    def call(self, verb: str, request: Message, caller: Caller) -> Answer:
        """Answer a call, at once if it need not wait, and carry out everything that follows from it.

        Raises:
            KVLeaseError: the call is refused; for a call that waits, the error is set on its future.
        """
        try:
            return self.answer(verb, request, caller)
        finally:
            self.settle()

    def answer(self, verb: str, request: Message, caller: Caller) -> Answer:
        """Answer a call as `call` does, but leave what the caller need not wait for to `settle`, which must follow."""
        try:
            if self._settling.left or self._retries.left:
                self.settle()
            self._check_epoch(verb, caller)
            if caller.cache:
                self._check_cache(caller)
            carry_out = self._verbs.get(verb)
            if carry_out is None or self._not_ready == DRAINING:
                carry_out = self._admitted(verb)
            if caller.idempotency_key:
                return self._retries.answer(verb, carry_out, request, caller)
            return carry_out(request, caller)
        except KVLeaseError:
            raise
        except Exception:  # noqa: BLE001 -- one call's fault must not end the daemon
            _LOG.exception("call_failed", verb=verb, transport=caller.transport)
            raise InternalError from None

    def trace(self, tracing: Tracing) -> None:
        """Make a span of every call from now on."""
        self.tracing = tracing
        # The method is replaced, so that without tracing a call pays nothing for it.
        self.answer = traced(tracing, self.answer, self.settle)  # type: ignore[method-assign, assignment]  # it is one

    def settle(self) -> None:
        """Remember the last answers for retries, and carry out what they left to be done."""
        self._retries.settle()
        self._settling.settle()

    def cancel(self, future: asyncio.Future[Message]) -> None:
        """Forget a waiting call whose caller has gone."""
        future.cancel()

    def fds(self, worker_id: int) -> list[int]:
        """Return the descriptors of a worker's regions, in the order of its AttachResponse; they stay the daemon's."""
        return self._workers.fds(WorkerId(worker_id))

    def watch(
        self, request: pb.WatchRequest, role: Role = Role.OPERATOR
    ) -> AsyncGenerator[pb.WatchResponse, None]:
        """Return events from a sequence number on, without end.

        Raises:
            InvalidError: no event has such a number.
            BusyError: there are too many watchers.
        """
        return self.events.watch(
            request.after_sequence,
            request.cache,
            with_snapshot=request.with_snapshot,
            is_operator=role is Role.OPERATOR,
        )

    def stream(self, verb: str, request: Message, caller: Caller) -> AsyncIterator[Message]:
        """Return the answers to a watch or a trace, without end; raises what `watch` and `Observing.trace` do."""
        if isinstance(request, pb.TraceRequest):
            return self.guard.while_admitted(self._observing.trace(request, caller), caller)
        assert isinstance(request, pb.WatchRequest), f"{verb} is answered once"
        return self.guard.while_admitted(self.watch(request, caller.role), caller)

    def _admitted(self, verb: str) -> Verb:
        carry_out = self._verbs.get(verb)
        if carry_out is None:
            raise InvalidError(
                f"{verb[:40]!r} is not a call that is answered once", resource="verb"
            )
        if verb in _NOT_WHILE_DRAINING:
            raise draining("the daemon is stopping and accepts no new calls")
        return carry_out

    def _check_epoch(self, verb: str, caller: Caller) -> None:
        epoch = caller.epoch
        if not epoch or epoch == self.epoch:
            return
        if epoch < 0:
            message = f"epoch is {epoch}; it must be 0 or the epoch of an earlier answer"
            raise InvalidError(message, resource="epoch", need=epoch)
        if verb != "attach":
            message = (
                f"the call names epoch {epoch}, but the current epoch is {self.epoch}; attach again"
            )
            raise StaleEpochError(message, resource="epoch", need=epoch, available=self.epoch)

    def _check_cache(self, caller: Caller) -> None:
        worker = self.registry.by_token.get(caller.token)
        if worker is not None and worker.entry.name != caller.cache:
            message = f"cache {caller.cache[:63]} is not the worker's cache; leave it out"
            raise NotYoursError(message, resource="cache")

    # Commands and effects

    def run(
        self, entry: CacheEntry, command: c.Command, respond: Respond, wait_ms: int = 0
    ) -> Answer:
        """Return the response to a command, or a future of it if the core makes the caller wait.

        Raises:
            KVLeaseError: the core refuses.
        """
        if entry.status is not READY:
            entry.require_ready()
        try:
            outcome = entry.core.handle(command, monotonic())
        except KVLeaseError as error:
            entry.tally.refused(verb_of(command), error)
            self._after_refusal(entry)
            raise
        if entry.observer is not None:
            respond = noted(entry.observer, command, respond)
        if outcome.ticket is None:
            if outcome.effects:
                self._settling.add(entry, outcome.effects)
            return respond(outcome.reply)
        wait = entry.tally.waits_for(command)
        future = self._waiting.promise(entry, outcome.ticket, respond, wait, wait_ms)
        self._carry_out(entry, outcome.effects)
        self._settling.settle_apart(entry)
        return future

    def apply(self, entry: CacheEntry, command: c.Command) -> object:
        """Return the core's reply to a command that never waits."""
        if self.tracing is not None:
            self.tracing.copy_ended(entry.pool, command)
        try:
            outcome = entry.core.handle(command, monotonic())
        except KVLeaseError:
            self._after_refusal(entry)
            raise
        self._carry_out(entry, outcome.effects)
        self._settling.settle_apart(entry)
        return outcome.reply

    def _after_refusal(self, entry: CacheEntry) -> None:
        # A command that is refused for want of room may have begun to make room.
        self._carry_out(entry, entry.core.take_effects())

    def _carry_out(self, entry: CacheEntry, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Notice):
                self.events.append(
                    effect.kind,
                    entry.name,
                    worker_id=effect.worker_id,
                    lease_id=effect.lease_id,
                    num_blocks=effect.num_blocks,
                )
            elif isinstance(effect, Probe):
                self.tiers.probe(entry, effect)
            elif isinstance(effect, Copy):
                if self.tracing is not None:
                    self.tracing.copy_began(entry.pool, entry.name, effect)
                self.tiers.send(entry, effect)
            else:
                self._waiting.wake(entry, effect)

    def _leave(self, entry: CacheEntry, ticket: int) -> None:
        if entry.pool in self.registry.by_pool:
            self.apply(entry, c.Cancel(ticket=ticket))

    # Time

    def _tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(self.settings.tick_seconds, self._tick)
        now = monotonic()
        for entry in list(self.registry.by_pool.values()):
            self._settling.once_settled(entry, self._pass_time, now + self.settings.tick_seconds)
        self.tiers.tick(now)
        self._observing.tick()

    def _pass_time(self, entry: CacheEntry) -> None:
        if entry.pool not in self.registry.by_pool:
            return
        try:
            self.apply(entry, c.Tick())
        except Exception:  # noqa: BLE001 -- time must go on for the other caches
            _LOG.exception("tick_failed", cache=entry.name)

    def _note_store(self, entry: CacheEntry) -> None:
        self._caches.note_store(entry)
        if self.settings.secret_path is not None:
            # A new store may lie in a new directory, which has no copy of the secret yet.
            root_secret.restore_aside(self.settings.secret_path, self._workers.root_secret)
