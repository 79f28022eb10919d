"""Own the connector of an engine whose KV cache is the daemon's memory: vLLM's hooks, and only what they need.

The worker's half lays the engine's one allocation into the daemon's pool. The scheduler's half restores the prefix
index and keeps the fence. No byte is copied, and no hook waits longer than its deadline.
"""

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)

from kvlease.errors import InvalidError
from kvlease.integrations.vllm.memory_connector import MemoryConnector
from kvlease.integrations.vllm.outer import require_first
from kvlease.integrations.vllm.owned.memory import Claim, OwnedMemory, num_warmup_blocks
from kvlease.integrations.vllm.owned.scheduler import OwnedScheduler, needs_of
from kvlease.integrations.vllm.planning import plan_inputs
from kvlease.integrations.vllm.uncached import why_uncached

_logger: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankClaim(KVConnectorHandshakeMetadata):  # type: ignore[misc,unused-ignore] # vLLM has no types here
    """A rank's message that its cache lies in the daemon's pool, and what it found there."""

    claim: Claim


class KVLeaseOwnedConnector(MemoryConnector):
    """Keep an engine's whole KV cache in the daemon's memory, where the engine finds it again after a restart."""

    scheduler_class = OwnedScheduler

    mode = "owned"
    has_pool_alone = True
    _memory: OwnedMemory | None
    _scheduler: OwnedScheduler | None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Read the settings; later hooks map memory and attach to the daemon."""
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            needs = needs_of(vllm_config, kv_cache_config)
            self._scheduler = self.scheduler_class(needs, self._open_session)

    # The worker

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Return the context in which vLLM's allocation becomes the daemon's memory; None if it cannot."""
        require_first(has_engine=self._memory is not None)
        refusal = unfit(self._vllm_config, self._kv_cache_config)
        if refusal:
            _logger.error(
                "The engine uses its own memory, and its cache ends with the engine: %s.",
                refusal,
                extra={"action": "owned_refused"},
            )
            return None
        session = self._open_session()
        num_warmup = num_warmup_blocks(self._vllm_config, self._kv_cache_config)
        self._memory = OwnedMemory(session, self._rank, num_warmup)
        return session.guard.shield(self._memory.context, None, "the claim of memory")

    def _rank_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what this rank has claimed."""
        if self._memory is None or self._memory.claim is None:
            return None
        return RankClaim(self._memory.claim)

    # The scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Remember the pool; it is observed from the handshake on."""
        if self._scheduler is not None:
            self._scheduler.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Restore the index if every rank's cache lies in the daemon's memory."""
        assert self._scheduler is not None, "vLLM tells the scheduler's half"
        claims = [one.claim for one in metadata.values() if isinstance(one, RankClaim)]
        is_whole = len(claims) == self._num_ranks
        if not is_whole:
            _logger.error(
                "Only %d of %d ranks have their cache in the daemon's memory; the cache ends with the engine.",
                len(claims),
                self._num_ranks,
                extra={"action": "owned_refused"},
            )
        if claims:
            self._scheduler.begin(claims, is_whole=is_whole)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing."""

    def reset_cache(self) -> bool | None:
        """Agree: the pool's own reset has begun a new era of keys."""
        return True


def unfit(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return why an engine's cache cannot outlive the engine, and what to change; empty if it can."""
    if why := why_uncached(vllm_config, kv_cache_config):
        return why
    kinds = {type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups}
    states = sorted(kind for kind in kinds if "Mamba" in kind)
    if states:
        return f"{', '.join(states)} rewrites blocks that are cached; use the offload mode for such a model"
    try:
        plan_inputs(vllm_config, kv_cache_config)
    except InvalidError as error:
        return error.message
    return ""
