"""Own an engine process's link to the daemon: attachment, magazine, generation; when to call what is the connectors'.

A session never raises into the engine and never waits longer than its deadline, but for `open`, which may wait
`start_seconds`. It belongs to the process and the thread that opened it. What an owner sees of it changes only in its
own calls: background work is picked up by `poll`, which the owner calls once a step.

How a loss looks to an owner, case by case:

- The daemon does not answer in time: the call gives its default, `is_on` is False, further calls give their defaults
  at once, and `needs_inventory` is True where the call may have been carried out. A thread probes; after its success
  `poll` tells BACK.
- The control process restarts: calls go on by themselves; the magazine is what it was. Where the daemon could not
  resume the worker, `poll` tells BACK: its leases and pins have ended, and an inventory is owed.
- The daemon does not know the worker or the cache any more, or its memory became other memory: `poll` tells LOST. A
  thread registers and attaches again. Then `poll` tells BACK where the memory is the same (the magazine may be empty,
  an inventory is owed), or FRESH where it is other memory: `generation` has grown, `device` and `plan` are new.
- Another layout is registered: `refusal` says what differs; the session stays off until that is changed.
- The daemon answers, but the cache is no more, and no other one can be attached to, such as one of another layout that
  has its name now, or one of other memory than what was to be kept: after LOST `poll` tells GONE, once.
"""

import enum
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import DeadlineError, InvalidError, RefusedError
from kvlease.integrations.vllm import outages, sayings
from kvlease.integrations.vllm.attacher import Attacher
from kvlease.integrations.vllm.attachment import Attachment
from kvlease.integrations.vllm.guard import Guard
from kvlease.integrations.vllm.rekey import Rekeyer
from kvlease.integrations.vllm.settings import ConnectorSettings
from kvlease.integrations.vllm.terms import Terms
from kvlease.magazine import Exchanged, ExchangeOrder, Inventory
from kvlease.memory import Identity as MemoryIdentity
from kvlease.plan import CachePlan
from kvlease.worker import Worker

__all__ = ["EngineSession", "SessionEvent", "Terms"]

T = TypeVar("T")
D = TypeVar("D")

_logger: Final = logging.getLogger(__name__)

_ERA_BYTES: Final = 16
_RETURN_SECONDS: Final = 30.0
"""Seconds within which a daemon that went away is back where somebody starts it again, even on a busy machine."""
_NOTHING: Final = ExchangeOrder()


class SessionEvent(enum.Enum):
    """What has become of a session since its owner polled it before."""

    NONE = "nothing new"
    LOST = "off: calls give their defaults"
    GONE = "off, and nobody gives blocks of the memory that it had out any more"
    BACK = "on, with the memory that it had; where it is another worker by now, its leases and pins have ended"
    FRESH = "on with memory that is new to the owner, and an empty magazine"

    @property
    def ends_memory(self) -> bool:
        """Whether the memory that the owner had is the session's no more."""
        return self in {SessionEvent.FRESH, SessionEvent.GONE}


class EngineSession:
    """One process of an engine, attached to its cache for as long as the daemon allows."""

    def __init__(self, settings: ConnectorSettings, terms: Terms) -> None:
        """Remember what to attach by; `open` makes a session."""
        self.settings = settings
        self.terms = terms
        self.guard = Guard(
            deadline_seconds=settings.deadline_seconds,
            retry_seconds=settings.retry_seconds,
            is_probed=True,
            away=outages.of(settings.address),
        )
        self.generation = 0
        """Grows whenever memory or namespace became another: then views, keys and what is known of blocks are void."""
        self._sayings = sayings.of(terms.magazine)
        self._attacher = Attacher(settings, terms, self.guard, self._sayings)
        self._attached: Attachment | None = None
        self._process_id = os.getpid()
        self.is_closed = False
        """Whether it stays off."""
        self._end: weakref.finalize[[], Self] | None = None
        self._is_in_doubt = False
        self._worker_id = 0
        self._era = b""
        self._rekeyer: Rekeyer | None = None
        self._memory: MemoryIdentity = ()
        self._device: NDArray[np.uint8] | None = None
        self._plan: CachePlan | None = None
        self._off_at = -math.inf
        """When `poll` found that it is on no more."""
        self._told_on = False
        self._told_gone = False
        self._told_worker_id = 0
        self._told_generation = 0

    def __repr__(self) -> str:
        """Show life: whether it is on, and in which generation."""
        state = "on" if self.is_on else "off"
        return f"<EngineSession {state}, generation {self.generation}, {self.guard!r}>"

    @classmethod
    def open(cls, settings: ConnectorSettings, terms: Terms) -> Self:
        """Attach this process, waiting up to `start_seconds`, and longer while the daemon makes the memory.

        Never raises: where the daemon is away or refuses, the session is off and a thread goes on trying. The first
        `poll` after an attachment tells FRESH, also where it was there from the start.
        """
        session = cls(settings, terms)
        if terms.identity.refusal:
            if session._sayings.is_news(terms.identity.refusal):
                _logger.error("No kvlease cache for this engine: %s", terms.identity.refusal)
            session.is_closed = True
            return session
        if terms.identity.has_adapters:
            session._tell_adapters_apart()
        session._end = weakref.finalize(session, session._attacher.abandon)
        session._end.atexit = False
        session._attacher.start()
        session._attacher.wait()
        session._pick_up()
        return session

    # What it is

    @property
    def is_on(self) -> bool:
        """Whether calls are worth making: attached, by this process, to a daemon that answered lately."""
        attached = self._attached
        is_there = attached is not None and self._attacher.has(attached)
        return is_there and not self.guard.is_open and self._process_id == os.getpid()

    @property
    def is_returning(self) -> bool:
        """Whether the daemon answers, or `poll` has not found it away for longer than a restart takes.

        An engine that is idle polls nothing, so what counts is when it was found away, not when it was there last.
        """
        return self.is_on or self._told_on or time.monotonic() < self._off_at + _RETURN_SECONDS

    @property
    def refusal(self) -> str:
        """Why there is no attachment, such as the fields in which a layout differs; empty where there is one."""
        return self.terms.identity.refusal or self._attacher.refusal

    @property
    def worker(self) -> Worker | None:
        """The worker; its verbs raise, so they are called by way of `call`."""
        return None if self._attached is None else self._attached.worker

    @property
    def plan(self) -> CachePlan | None:
        """The plan of the cache that was attached last; stays when the session is off."""
        return self._plan

    @property
    def device(self) -> NDArray[np.uint8] | None:
        """The rank's region, writable; the same array as long as it is the same memory, on or off."""
        return self._device

    @property
    def memory(self) -> MemoryIdentity:
        """Which memory it is: kind, device and inode of every region; the same in all processes of a cache."""
        return self._memory

    @property
    def rekeyer(self) -> Rekeyer | None:
        """What turns vLLM's block hashes into keys, in the generation that is; None until the first attachment."""
        return self._rekeyer

    @property
    def needs_inventory(self) -> bool:
        """Whether nobody knows for sure what the magazine holds, so that `reconciled` must come before an exchange."""
        attached = self._attached
        if attached is None or attached.magazine is None:
            return False
        return self._is_in_doubt or self._now_worker_id != self._worker_id

    def counts(self) -> dict[str, int]:
        """Return what happened to this session's calls from its beginning on, for metrics."""
        return {**self.guard.counts.as_dict(), "generation": self.generation}

    # What it does

    def keep(self, memory: MemoryIdentity) -> None:
        """Seek no other memory from now on: the engine's cache lies in this one. Where it ends, `poll` tells GONE."""
        self._attacher.kept = memory

    def poll(self) -> SessionEvent:
        """Take over what the background has found, and tell what became of the session; cheap, once a step.

        Nothing but LOST becomes of one that was closed: it is told no news of another cache.
        """
        if self._process_id == os.getpid() and not self.is_closed:
            attached = self._attached
            if attached is not None and attached.is_elsewhere:
                self._lose(attached)
            self._pick_up()
            if self._attached is not None and not self._attacher.has(self._attached):
                self._attached = None
        was_on, self._told_on = self._told_on, self.is_on
        if not self._told_on:
            if was_on:
                self._off_at = time.monotonic()
            was_gone, self._told_gone = self._told_gone, self._attacher.is_gone
            if self._told_gone and not was_gone and not self.is_closed:
                return SessionEvent.GONE
            return SessionEvent.LOST if was_on else SessionEvent.NONE
        self._told_gone = False
        if self._told_generation != self.generation:
            self._told_generation, self._told_worker_id = self.generation, self._now_worker_id
            return SessionEvent.FRESH
        is_same = self._told_worker_id == self._now_worker_id
        self._told_worker_id = self._now_worker_id
        return SessionEvent.NONE if was_on and is_same else SessionEvent.BACK

    def exchange(self, order: ExchangeOrder, default: D) -> Exchanged | D:
        """Carry an exchange out; the default where the session is off, an inventory is owed, or no answer came.

        After a default nothing may be taken for granted: where it may have been carried out, `needs_inventory` says so.
        """
        attached = self._attached
        if attached is None or attached.magazine is None or self.needs_inventory:
            return default
        return self._surely(lambda: self._exchanged(attached, order), default, "exchange")

    def inventory(self) -> Inventory | None:
        """Return what the daemon says that the magazine holds; None where no answer came. Ends no doubt."""
        attached = self._attached
        if attached is None or attached.magazine is None:
            return None
        truth: Inventory | None = self._surely(attached.magazine.inventory, None, "inventory")
        return truth

    def reconciled(self) -> Inventory | None:
        """Return what the magazine holds and end the doubt, so that exchanges are made again; None: ask again later.

        An exchange whose answer was lost may still be on its way. It is made stale by an empty exchange before the
        truth is asked for, so that it cannot be carried out behind the owner's back.
        """
        attached = self._attached
        if attached is None or attached.magazine is None:
            return None
        return self._surely(lambda: self._reconciled(attached), None, "inventory")

    def absent(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell without a call of each key whether it is surely not cached; of none, where the terms want no counts."""
        attached = self._attached
        if attached is None or not self.is_on:
            return [False] * len(keys)
        return attached.worker.absent(keys)

    def call(self, function: Callable[[Worker], T], default: D, what: str) -> T | D:
        """Call a verb of the worker, such as `lambda worker: worker.pin(keys)`; its default where that fails."""
        attached = self._attached
        if attached is None:
            return default
        return self._surely(lambda: function(attached.worker), default, what)

    def reset(self, weights: str = "") -> None:
        """Begin a new era of keys: nothing that was computed before is found any more, by this engine. No call is made.

        The era is this engine's own fact, part of every key it makes from now on, and no fact of the cache: another
        engine of the cache still has the weights that it has, so what it finds under the keys of before is right, and
        what this one computes with other weights must not be found by it. Blocks of before stay in the pool until they
        are evicted; those of the magazine are the owner's to drop. Engines that say the same `weights`, such as the
        revision that all were updated to, find each other's blocks again; without, the era is like no other. A
        restarted engine has the weights that it loads, and so begins in the first era. Only the process that makes the
        keys, the scheduler's, has to reset.
        """
        self._era = weights.encode() if weights else os.urandom(_ERA_BYTES)
        self.generation += 1
        self._told_generation += 1
        self._make_keys()

    def close(self) -> None:
        """Detach, which ends this process's part of the magazine; the session stays off. Safe to call again."""
        if self.is_closed or self._process_id != os.getpid():
            return
        self.is_closed = True
        self.guard.shield(self._close, None, "close")
        self.guard.leave()

    # How it does that

    @property
    def _now_worker_id(self) -> int:
        return 0 if self._attached is None else self._attached.worker.worker_id

    def _tell_adapters_apart(self) -> None:
        """Begin in an era of the adapters: vLLM's hashes name them, and not what they have been trained to."""
        if not self.settings.adapters and self._sayings.is_news("adapters"):
            _logger.warning(
                "Adapters (LoRA) are on, and vLLM tells them apart by name and path alone, so what another engine "
                "or an earlier one computed is not found: set `adapters` to what they are, such as their revision.",
                extra={"action": "adapters_unknown"},
            )
        self.reset(self.settings.adapters and f"adapters {self.settings.adapters}")

    def _pick_up(self) -> None:
        """Make what the thread has found the attachment."""
        found = self._attacher.take()
        if found is None:
            return
        self._attached, self._plan = found, found.plan
        # A new worker's magazine may be one that other processes have kept alive.
        self._is_in_doubt = found.magazine is not None
        self._worker_id = found.worker.worker_id
        if found.memory != self._memory or not found.memory:
            self._memory, self._device = found.memory, found.device
            self.generation += 1
        self._make_keys()

    def _make_keys(self) -> None:
        attached = self._attached
        if attached is not None:
            tenant_key = attached.worker.keys.tenant_key
            self._rekeyer = Rekeyer(tenant_key, self.terms.identity.digest, self._era)

    def _lose(self, attached: Attachment) -> None:
        self._attached = None
        self._attacher.seek(attached)

    def _surely(self, function: Callable[[], T], default: D, what: str) -> T | D:
        if self._process_id != os.getpid():
            return default
        answer = self.guard.call(function, default, what)
        attached = self._attached
        if attached is not None and attached.is_elsewhere:
            # The worker has attached itself to a cache that was made anew: the answer speaks of other blocks.
            self._lose(attached)
            return default
        return answer

    def _exchanged(self, attached: Attachment, order: ExchangeOrder) -> Exchanged:
        self._is_in_doubt = True
        try:
            answer: Exchanged = attached.magazine.exchange(order)
        except (InvalidError, RefusedError):
            self._is_in_doubt = False
            raise
        self._is_in_doubt = False
        self._check_worker(attached)
        return answer

    def _reconciled(self, attached: Attachment) -> Inventory:
        deadline_at = time.monotonic() + self.settings.deadline_seconds
        worker_id = attached.worker.worker_id
        try:
            attached.magazine.inventory()
            _limit(attached, deadline_at)
            attached.magazine.exchange(_NOTHING)
            _limit(attached, deadline_at)
            truth: Inventory = attached.magazine.inventory()
        finally:
            attached.limit(self.settings.deadline_seconds)
        self._worker_id = worker_id
        self._check_worker(attached)
        self._is_in_doubt = False
        return truth

    def _check_worker(self, attached: Attachment) -> None:
        """Refuse an answer during which the worker became another one, with another magazine of the same name."""
        if attached.worker.worker_id != self._worker_id:
            self._is_in_doubt = True
            raise _AnotherWorkerError

    def _close(self) -> None:
        if self._end is not None:
            self._end.detach()
        attached, self._attached = self._attached, None
        # First the thread, so that no probe opens a connection behind the worker's end.
        self._attacher.close(self.settings.deadline_seconds)
        if attached is not None:
            attached.worker.close()


class _AnotherWorkerError(RefusedError):
    """The daemon has made this process another worker; the next inventory tells what it holds."""


def _limit(attached: Attachment, deadline_at: float) -> None:
    left = deadline_at - time.monotonic()
    if left <= 0:
        raise DeadlineError("the inventory was not complete before its deadline")
    attached.limit(left)
