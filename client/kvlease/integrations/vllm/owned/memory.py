"""Own the worker's half of owned memory: claim the daemon's pool for this engine, and lay the cache into it."""

import logging
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from kvlease.geometry import ceil_div
from kvlease.integrations.vllm.arena import ArenaContext, arena_tensor, lies_within, parted
from kvlease.integrations.vllm.fence import Retracted, unpacked_keys
from kvlease.integrations.vllm.session.session import EngineSession
from kvlease.magazine import ExchangeOrder
from kvlease.memory.mapped import Identity
from kvlease.plan import CachePlan

_logger: Final = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 0.05
_NOT_CLAIMED: Final = (
    "the daemon's pool could not be claimed within start_seconds, as when another engine has its blocks: give this "
    "engine another `cache`, or use the shared mode, in which engines have one pool together"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a rank found when it claimed the pool."""

    plan: CachePlan
    """The plan of the cache."""
    memory: Identity
    """The identity of the pool's memory."""
    coldest_first: tuple[int, ...] = ()
    """Findable blocks in the order to evict them, coldest first."""


class OwnedMemory:
    """One rank's part of the pool."""

    def __init__(self, session: EngineSession, rank: int, num_warmup_blocks: int) -> None:
        """Use an open session; the pool's first `num_warmup_blocks` are overwritten when the engine warms up."""
        self._session = session
        self._rank = rank
        self._num_warmup_blocks = num_warmup_blocks
        self._context: ArenaContext | None = None
        self._arena: Any = None
        self.claim: Claim | None = None
        """What was claimed; None if the cache does not lie in the pool."""
        self.is_apart = False
        """Whether the cache has been made private to this engine."""
        self._has_failed = False

    def context(self) -> AbstractContextManager[Any] | None:
        """Claim the pool, and return the context in which the engine allocates its cache; None to leave that alone."""
        session = self._session
        claim = claimed(session, self._rank, self._num_warmup_blocks)
        if claim is None or session.device is None:
            _logger.error(
                "The engine uses its own memory, and its cache ends with the engine: %s.",
                session.refusal or _NOT_CLAIMED,
                extra={"action": "owned_refused"},
            )
            session.close()
            return None
        self.claim = claim
        session.keep(claim.memory)
        self._arena = arena_tensor(session.device)
        self._context = ArenaContext(self._arena)
        return self._context

    def check(self, kv_caches: dict[str, Any]) -> None:
        """Check that every layer lies in the pool; if not, give up the claim."""
        if self.claim is None:
            return
        tensors = [
            tensor
            for cache in kv_caches.values()
            for tensor in (cache if isinstance(cache, list | tuple) else (cache,))
        ]
        if not all(lies_within(tensor, self._arena) for tensor in tensors):
            _logger.error(
                "vLLM did not allocate its cache as one buffer of %d bytes; the cache ends with the engine.",
                self._arena.numel(),
                extra={"action": "owned_refused"},
            )
            self.claim = None
            self._session.close()

    def close(self) -> None:
        """Detach."""
        self._session.close()

    def part(self) -> None:
        """Make the cache private to this engine; the claim stays, so that nobody writes the blocks it reads."""
        if not self.is_apart and not self._has_failed:
            claim = self.claim
            self.is_apart = claim is None or parted(self._arena, claim.memory)
            self._has_failed = not self.is_apart

    def poll(self) -> None:
        """Check whether the daemon has lost the memory, and if so, detach."""
        if self.claim is not None and self._session.poll().ends_memory:
            self._session.close()


def claimed(session: EngineSession, rank: int, num_warmup_blocks: int) -> Claim | None:
    """Take every block of the pool into this engine's magazine; None if that fails until `start_seconds` are over.

    The first rank does so, and the other ranks wait for it. A refused claim is tried again, because an engine that was
    just killed may not be proven dead yet.
    """
    session.poll()
    if not session.is_on:
        return None
    ends_at = time.monotonic() + session.settings.start_seconds
    while True:
        claim = (
            _see_claimed(session, num_warmup_blocks)
            if rank
            else _claim_once(session, num_warmup_blocks)
        )
        if claim is not None or time.monotonic() >= ends_at:
            return claim
        time.sleep(_PAUSE_SECONDS)
        session.poll()


def num_warmup_blocks(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many of the pool's first blocks the engine may overwrite before it serves.

    vLLM's second model runner warms up with real requests, each of a few tokens.
    """
    if not vllm_config.use_v2_model_runner:
        return 0
    speculative = getattr(vllm_config, "speculative_config", None)
    request_tokens = 8 * (1 + getattr(speculative, "num_speculative_tokens", 0))
    blocks_per_request = sum(
        ceil_div(request_tokens, group.kv_cache_spec.block_size) + 1
        for group in kv_cache_config.kv_cache_groups
    )
    return int(vllm_config.scheduler_config.max_num_seqs) * blocks_per_request


def _claim_of(session: EngineSession, coldest_first: tuple[int, ...] = ()) -> Claim:
    assert session.plan is not None, "a session that was on has a plan"
    return Claim(plan=session.plan, memory=session.memory, coldest_first=coldest_first)


def _claim_once(session: EngineSession, num_warmup_blocks: int) -> Claim | None:
    if session.needs_inventory and session.reconciled() is None:
        return None
    assert session.plan is not None, "a session that was on has a plan"
    order = ExchangeOrder(holds_all=True, take_running=session.plan.num_blocks)
    answer = session.exchange(order, None)
    if answer is None:
        return None
    coldest_first = answer.held_all_blocks.tolist()
    spoilt = {block_id for block_id in coldest_first if block_id <= num_warmup_blocks}
    if spoilt:
        answer = session.exchange(ExchangeOrder(retract_blocks=sorted(spoilt)), None)
        if answer is None or (answer.retracted != Retracted.PRIVATE).any():
            return None
    unspoilt = tuple(block_id for block_id in coldest_first if block_id not in spoilt)
    return _claim_of(session, unspoilt)


def _see_claimed(session: EngineSession, num_warmup_blocks: int) -> Claim | None:
    inventory = session.inventory()
    if inventory is None or not inventory.blocks.size:
        return None
    keys = unpacked_keys(inventory.keys)
    is_spoilt = any(
        block_id <= num_warmup_blocks and any(key)
        for block_id, key in zip(inventory.blocks.tolist(), keys, strict=True)
    )
    return None if is_spoilt else _claim_of(session)
