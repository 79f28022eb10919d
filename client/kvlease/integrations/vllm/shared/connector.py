"""Own the connector of an engine that shares a pool with others: vLLM's hooks, and only what they need.

The worker's half lays the engine's one allocation into the daemon's pool. The scheduler's half asks the daemon which
blocks are the engine's and which cached blocks it can use. No byte is copied, and no hook waits longer than its
deadline.
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
from kvlease.integrations.vllm.planning import plan_inputs
from kvlease.integrations.vllm.shared.memory import Mapped, RankMemory
from kvlease.integrations.vllm.shared.scheduling import SharedScheduler, supply_of
from kvlease.integrations.vllm.uncached import why_uncached

_logger: Final = logging.getLogger(__name__)

_UNFIT_KINDS: Final = ("Mamba", "CrossAttention", "CircularBuffer", "HiSparse", "HiddenState")


@dataclass(frozen=True, slots=True)
class RankMapped(KVConnectorHandshakeMetadata):  # type: ignore[misc,unused-ignore] # vLLM has no types here
    """The memory that a rank's cache lies in."""

    mapped: Mapped


class KVLeaseSharedConnector(MemoryConnector):
    """Let several engines of one model serve from one pool, whose blocks the daemon grants."""

    mode = "shared"
    takes_other_capacity = True
    asks_by_request = True
    _memory: RankMemory | None
    _scheduler: SharedScheduler | None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Read the settings; later hooks map memory and attach to the daemon."""
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            supply = supply_of(vllm_config, kv_cache_config, self._settings.magazine_blocks)
            engine_id = str(vllm_config.kv_transfer_config.engine_id)
            self._scheduler = SharedScheduler(
                self._num_ranks, supply, self._open_session, engine_id
            )

    # The worker

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """Return the context in which vLLM's allocation becomes the daemon's pool; None if it cannot."""
        require_first(has_engine=self._memory is not None)
        if refusal := unfit(self._vllm_config, self._kv_cache_config):
            _logger.error(
                "The engine uses its own memory and shares nothing: %s.",
                refusal,
                extra={"action": "shared_refused"},
            )
            return None
        session = self._open_session()
        self._memory = RankMemory(session, self._rank)
        return session.guard.shield(self._memory.context, None, "the map of the pool")

    def _rank_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return which memory this rank's cache lies in."""
        if self._memory is None or self._memory.mapped is None:
            return None
        return RankMapped(self._memory.mapped)

    # The scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Remember the cache manager; its pool is shared from the handshake on."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Share the pool from now on, if any rank's cache lies in the daemon's memory."""
        if self._scheduler is not None:
            found = [one.mapped for one in metadata.values() if isinstance(one, RankMapped)]
            self._scheduler.begin(found)

    def on_new_request(self, request: Any) -> None:
        """Note a request whose prefix will be looked up."""
        if self._scheduler is not None:
            self._scheduler.arrived(request)

    def update_state_after_alloc(
        self,
        request: Any,
        blocks: Any,  # noqa: ARG002
        num_external_tokens: int,  # noqa: ARG002
    ) -> None:
        """Note that a request was admitted."""
        if self._scheduler is not None:
            self._scheduler.admitted(request.request_id)

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note that a request ended; vLLM frees its blocks at once."""
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Note that a request ended; vLLM frees its blocks at once."""
        if self._scheduler is not None:
            self._scheduler.finished(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def reset_cache(self) -> bool | None:
        """Agree: the pool's own reset has begun a new era of keys."""
        return True


def unfit(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return why an engine cannot share a pool, and what to change; empty if it can."""
    if why := why_uncached(vllm_config, kv_cache_config):
        return why
    if vllm_config.use_v2_model_runner:
        return (
            "vLLM's second model runner warms up in blocks that other engines may have; "
            "set VLLM_USE_V2_MODEL_RUNNER=0"
        )
    kinds = {type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups}
    if found := sorted(kind for kind in kinds if any(one in kind for one in _UNFIT_KINDS)):
        return f"layers of {', '.join(found)} cannot be shared block by block; use the offload mode"
    try:
        plan_inputs(vllm_config, kv_cache_config)
    except InvalidError as error:
        return error.message
    return ""
