"""Own a rank's map of a shared pool: the engine's one allocation becomes the pool that other engines map, too."""

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from kvlease.integrations.vllm.arena import (
    ArenaContext,
    arena_tensor,
    lies_within,
    parted,
)
from kvlease.integrations.vllm.session.session import EngineSession, SessionEvent
from kvlease.memory.mapped import Identity

_logger: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mapped:
    """The memory that a rank's cache lies in."""

    rank: int
    memory: Identity


class RankMemory:
    """One rank's map of the pool. Only the engine's steps write to it, into blocks of the engine's magazine."""

    def __init__(self, session: EngineSession, rank: int) -> None:
        """Use an open session."""
        self._session = session
        self._rank = rank
        self._arena: Any = None
        self.mapped: Mapped | None = None
        """Where the cache lies; None if it lies in the engine's own memory."""
        self.is_apart = False
        """Whether the cache, once in the daemon's memory, has been made private to this engine."""
        self._has_failed = False

    def __repr__(self) -> str:
        """Show life: whether the cache lies in the pool."""
        return f"<RankMemory of rank {self._rank}, {'pool' if self.mapped else 'own memory'}>"

    def context(self) -> AbstractContextManager[Any] | None:
        """Return the context in which the engine allocates its cache; None to leave the allocation alone."""
        session = self._session
        session.poll()
        if session.device is None:
            self._refuse(session.refusal or "the daemon did not hand its pool over")
            return None
        self._arena = arena_tensor(session.device)
        self.mapped = Mapped(self._rank, session.memory)
        session.keep(session.memory)
        return ArenaContext(self._arena)

    def check(self, kv_caches: dict[str, Any]) -> None:
        """Check that every layer lies in the pool.

        Raises:
            RuntimeError: only some layers do; the engine must not start, as it would write where other engines read.
        """
        if self.mapped is None:
            return
        tensors = [
            tensor
            for cache in kv_caches.values()
            for tensor in (cache if isinstance(cache, list | tuple) else (cache,))
        ]
        within = [lies_within(tensor, self._arena) for tensor in tensors]
        if all(within):
            return
        if any(within):
            raise RuntimeError("vLLM placed only a part of its cache in the shared pool")
        self._refuse(f"vLLM did not allocate one buffer of {self._arena.numel()} bytes")

    def poll(self) -> None:
        """Keep the session going; if the cache's memory has ended, make it private to this engine.

        Nobody grants its blocks any more. This engine's blocks keep their content: other engines write only into their
        own blocks, and stop writing into this memory once they have noticed, too.
        """
        event = self._session.poll()
        if not event.ends_memory:
            return
        is_gone = event is SessionEvent.GONE
        if self.mapped is not None and (is_gone or self._session.memory != self.mapped.memory):
            self.part()
        self._session.close()

    def part(self) -> None:
        """Make the cache private to this engine; staying attached keeps others from writing the blocks it reads."""
        if not self.is_apart and not self._has_failed:
            mapped = self.mapped
            self.is_apart = mapped is None or parted(self._arena, mapped.memory)
            self._has_failed = not self.is_apart

    def close(self) -> None:
        """Detach."""
        self._session.close()

    def _refuse(self, why: str) -> None:
        self.mapped = None
        _logger.error(
            "The engine uses its own memory and shares nothing: %s.",
            why,
            extra={"action": "shared_refused"},
        )
        self._session.close()
