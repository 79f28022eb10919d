"""Own an engine process's link to the daemon: attachment, magazine and generation; connectors decide when to call.

A session never raises into the engine and never waits longer than its deadline, except in `open`, which may wait
`start_seconds`. It belongs to the process and thread that opened it. What its owner sees changes only during the
owner's own calls: `poll`, which the owner calls once a step, takes over what the background thread has found.

How a loss looks to the owner, case by case:

- The daemon does not answer in time: the call gives its default, `is_on` is False, and further calls give their
  defaults at once. `needs_inventory` is True if the call may have been carried out. A thread probes the daemon, and
  once it succeeds `poll` returns BACK.
- The control process restarts: calls go on by themselves, and the magazine is unchanged. If the daemon could not resume
  the worker, `poll` returns BACK: the worker's leases and pins have ended, and an inventory is needed.
- The daemon no longer knows the worker or the cache, or has other memory: `poll` returns LOST. A thread registers and
  attaches again. Then `poll` returns BACK if the memory is the same (the magazine may be empty, so an inventory is
  needed), or FRESH if it is other memory: `generation` has grown, and `device` and `plan` are new.
- Another layout is registered: `refusal` names the differences, and the session stays off until they are gone.
- The daemon answers, but the cache has ended and no other one fits: the cache that has its name now has another layout,
  for example, or other memory than the memory to be kept. After LOST, `poll` returns GONE once.
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

from kvlease.integrations.vllm.identity.rekey import Rekeyer
from kvlease.integrations.vllm.session import outages, sayings
from kvlease.integrations.vllm.session.attacher import Attacher
from kvlease.integrations.vllm.session.attachment import Attachment
from kvlease.integrations.vllm.session.exchanging import Exchanging
from kvlease.integrations.vllm.session.guard import Guard
from kvlease.integrations.vllm.session.terms import Terms
from kvlease.integrations.vllm.settings import ConnectorSettings
from kvlease.magazine import Exchanged, ExchangeOrder, Inventory
from kvlease.memory.mapped import Identity as MemoryIdentity
from kvlease.plan import CachePlan
from kvlease.worker import Worker

__all__ = ["EngineSession", "SessionEvent", "Terms"]

T = TypeVar("T")
D = TypeVar("D")

_logger: Final = logging.getLogger(__name__)

_ERA_BYTES: Final = 16
_RETURN_SECONDS: Final = 30.0
"""Seconds within which a daemon that went away is back if something restarts it, even on a busy machine."""


class SessionEvent(enum.Enum):
    """What has become of a session since its owner last polled it."""

    NONE = "nothing new"
    LOST = "off: calls give their defaults"
    GONE = "off, and nobody gives blocks of the memory that it had out any more"
    BACK = "on, with the memory that it had; where it is another worker by now, its leases and pins have ended"
    FRESH = "on with memory that is new to the owner, and an empty magazine"

    @property
    def ends_memory(self) -> bool:
        """Whether the session no longer has the memory that the owner had."""
        return self in {SessionEvent.FRESH, SessionEvent.GONE}


class EngineSession:
    """One engine process's attachment to its cache, kept for as long as the daemon allows."""

    def __init__(self, settings: ConnectorSettings, terms: Terms) -> None:
        """Remember the settings and terms; use `open` to make a session."""
        self.settings = settings
        self.terms = terms
        self.guard = Guard(
            deadline_seconds=settings.deadline_seconds,
            retry_seconds=settings.retry_seconds,
            is_probed=True,
            away=outages.of(settings.address),
        )
        self.generation = 0
        """Grows whenever the memory or the namespace changes; views, keys and what is known of blocks are then void."""
        self._sayings = sayings.of(terms.magazine)
        self._attacher = Attacher(settings, terms, self.guard, self._sayings)
        self._attached: Attachment | None = None
        self._process_id = os.getpid()
        self.is_closed = False
        """Whether the session has ended and stays off."""
        self._end: weakref.finalize[[], Self] | None = None
        self._exchanging = Exchanging(settings.deadline_seconds)
        self._era = b""
        self._rekeyer: Rekeyer | None = None
        self._memory: MemoryIdentity = ()
        self._device: NDArray[np.uint8] | None = None
        self._plan: CachePlan | None = None
        self._off_at = -math.inf
        """When `poll` last found that the session had gone off."""
        self._told_on = False
        self._told_gone = False
        self._told_worker_id = 0
        self._told_generation = 0

    def __repr__(self) -> str:
        """Show life: whether the session is on, and its generation."""
        state = "on" if self.is_on else "off"
        return f"<EngineSession {state}, generation {self.generation}, {self.guard!r}>"

    @classmethod
    def open(cls, settings: ConnectorSettings, terms: Terms) -> Self:
        """Attach this process, waiting up to `start_seconds`, and longer while the daemon makes the memory.

        Never raises: if the daemon is away or refuses, the session is off and a thread goes on trying. The first `poll`
        after an attachment returns FRESH, even if the attachment was made in `open`.
        """
        session = cls(settings, terms)
        if terms.identity.refusal:
            if session._sayings.note(terms.identity.refusal):
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
        """Whether a call is worth making: this process is attached, and the daemon has answered lately."""
        attached = self._attached
        is_there = attached is not None and self._attacher.has(attached)
        return is_there and not self.guard.is_open and self._process_id == os.getpid()

    @property
    def is_returning(self) -> bool:
        """Whether the daemon answers, or has been away for no longer than a restart takes.

        An idle engine does not poll, so time counts from when `poll` found the daemon away, not from its last answer.
        """
        return self.is_on or self._told_on or time.monotonic() < self._off_at + _RETURN_SECONDS

    @property
    def refusal(self) -> str:
        """Why there is no attachment, such as the fields in which a layout differs; empty if there is one."""
        return self.terms.identity.refusal or self._attacher.refusal

    @property
    def worker(self) -> Worker | None:
        """The worker; its methods raise, so call them through `call`."""
        return None if self._attached is None else self._attached.worker

    @property
    def plan(self) -> CachePlan | None:
        """The plan of the cache that was attached last; it stays when the session is off."""
        return self._plan

    @property
    def device(self) -> NDArray[np.uint8] | None:
        """The rank's region, writable; it is the same array as long as the memory is the same, on or off."""
        return self._device

    @property
    def memory(self) -> MemoryIdentity:
        """The memory's identity: kind, device and inode of every region; the same in all processes of a cache."""
        return self._memory

    @property
    def rekeyer(self) -> Rekeyer | None:
        """The rekeyer that turns vLLM's block hashes into keys in this generation; None until the first attachment."""
        return self._rekeyer

    @property
    def needs_inventory(self) -> bool:
        """Whether the magazine's content is uncertain, so that `reconciled` must come before an exchange."""
        attached = self._attached
        if attached is None or attached.magazine is None:
            return False
        return self._exchanging.needs_inventory(attached)

    def counts(self) -> dict[str, int]:
        """Return the counts of this session's calls since it began, for metrics."""
        return {**self.guard.counts.as_dict(), "generation": self.generation}

    # What it does

    def keep(self, memory: MemoryIdentity) -> None:
        """Accept no other memory from now on: the engine's cache lies in this one. `poll` returns GONE if it ends."""
        self._attacher.kept = memory

    def poll(self) -> SessionEvent:
        """Take over what the background thread found, and return what became of the session; cheap, once a step.

        After `close` it returns no event but LOST: a closed session hears nothing of other caches.
        """
        attached = self._attached
        if attached is not None and self._is_as_told(attached):
            return SessionEvent.NONE
        if self._process_id == os.getpid() and not self.is_closed:
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
        """Carry out an exchange; give the default if the session is off, an inventory is needed, or no answer came.

        After a default the exchange may or may not have been carried out; `needs_inventory` tells whether that is in
        doubt.
        """
        attached = self._attached
        if attached is None or attached.magazine is None or self.needs_inventory:
            return default
        return self._surely(
            lambda: self._exchanging.carry_out(attached, order), default, "exchange"
        )

    def begin(self, order: ExchangeOrder) -> bool:
        """Send an exchange, whose answer `answered` takes; return False if the session is off or in doubt.

        Until then nothing else may be asked of the magazine.
        """
        attached = self._attached
        if attached is None or attached.magazine is None:
            return False
        if not self.is_on or self.needs_inventory:
            return False
        return self.guard.shield(lambda: self._exchanging.send(attached, order), False, "exchange")

    def answered(self) -> Exchanged | None:
        """Wait for the answer to the exchange that was begun; None if none came, or if it was given up meanwhile."""
        attached = self._attached
        answer: Exchanged | None = None
        if attached is not None and self._exchanging.is_underway:
            answer = self._surely(lambda: self._exchanging.answer(attached), None, "exchange")
        self._exchanging.forget()
        return answer

    def inventory(self) -> Inventory | None:
        """Return the daemon's inventory of the magazine, or None if no answer came; the doubt stays."""
        attached = self._attached
        if attached is None or attached.magazine is None:
            return None
        truth: Inventory | None = self._surely(attached.magazine.inventory, None, "inventory")
        return truth

    def reconciled(self) -> Inventory | None:
        """Return the magazine's inventory and end the doubt, so that exchanges work again; on None, ask again later.

        An exchange whose answer was lost may still be on its way. So an empty exchange makes it stale before the
        inventory is taken, and it cannot be carried out unnoticed afterwards.
        """
        attached = self._attached
        if attached is None or attached.magazine is None:
            return None
        return self._surely(lambda: self._exchanging.reconcile(attached), None, "inventory")

    def absent(self, keys: Sequence[bytes]) -> list[bool]:
        """Tell for each key, without a call, whether it is surely not cached; all False if there are no key counts."""
        attached = self._attached
        if attached is None or not self.is_on:
            return [False] * len(keys)
        return attached.worker.absent(keys)

    def call(self, function: Callable[[Worker], T], default: D, what: str) -> T | D:
        """Call a worker's method, such as `lambda worker: worker.pin(keys)`; give the default if the call fails."""
        attached = self._attached
        if attached is None:
            return default
        return self._surely(lambda: function(attached.worker), default, what)

    def reset(self, weights: str = "") -> None:
        """Begin a new era of keys, in which this engine finds nothing that was computed before; makes no call.

        The era is part of every key that this engine makes from now on; the cache knows nothing of it. Another engine
        of the cache still has its old weights, so what it finds under the old keys is right, and it must not find what
        this engine computes with new weights. Old blocks stay in the pool until they are evicted; the owner must drop
        those of its magazine. Engines that give the same `weights`, such as the revision that all were updated to, find
        each other's blocks; without `weights`, the era is unique. A restarted engine loads its own weights, and so
        begins in the first era. Only the scheduler's process, which makes the keys, has to reset.
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

    def _is_as_told(self, attached: Attachment) -> bool:
        """Tell whether the session is on and the same as at the last poll, as in nearly every step."""
        return (
            self._told_on
            and self._attacher.found is None
            and self._attacher.has(attached)
            and not attached.is_elsewhere
            and not self.guard.is_open
            and self._told_generation == self.generation
            and self._told_worker_id == attached.worker.worker_id
            and self._process_id == os.getpid()
        )

    def _tell_adapters_apart(self) -> None:
        """Begin in an era of the adapters: vLLM's hashes contain an adapter's name, but not its weights.

        If the settings do not say what the adapters are, the scheduler's half warns, once per engine.
        """
        is_rank = self.terms.touches
        if not self.settings.adapters and not is_rank and self._sayings.note("adapters"):
            _logger.warning(
                "Adapters (LoRA) are on, and vLLM tells them apart only by name and path, so what another engine or an "
                "earlier one computed is not found: set `adapters` to what identifies them, such as their revision.",
                extra={"action": "adapters_unknown"},
            )
        self.reset(self.settings.adapters and f"adapters {self.settings.adapters}")

    def _pick_up(self) -> None:
        """Use the attachment that the thread has found, if any."""
        found = self._attacher.take()
        if found is None:
            return
        self._attached, self._plan = found, found.plan
        self._exchanging.take_up(found)
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
            # The worker has attached itself to a cache that was made anew, so the answer is about other blocks.
            self._lose(attached)
            return default
        return answer

    def _close(self) -> None:
        if self._end is not None:
            self._end.detach()
        attached, self._attached = self._attached, None
        # End the thread first, so that no probe opens a connection after the worker's end.
        self._attacher.close(self.settings.deadline_seconds)
        if attached is not None:
            attached.worker.close()
