"""Own what the `owned` and `shared` connectors have in common: in both, the engine's KV cache is the daemon's memory.

The worker's half lays the engine's one allocation into the daemon's pool and reports which steps have come back. The
scheduler's half keeps account of blocks. No byte is copied, so the hooks for loads and saves do nothing.
"""

import logging
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvlease.errors import NeverFitsError
from kvlease.integrations.vllm import fills
from kvlease.integrations.vllm.identity.namespace import Identity, magazine_name, rank_mark
from kvlease.integrations.vllm.outer import require_outer
from kvlease.integrations.vllm.planning import agreement, plan_inputs
from kvlease.integrations.vllm.session.session import EngineSession, Terms
from kvlease.integrations.vllm.settings import VLLM_SETTINGS, ConnectorSettings, require_role
from kvlease.integrations.vllm.steps import StepMetadata, StepsBack
from kvlease.plan import CachePlan

_logger: Final = logging.getLogger(__name__)


class WorkersHalf(Protocol):
    """The connector's half in a rank's process."""

    is_apart: bool
    """Whether the cache has been made private to this engine."""

    def check(self, kv_caches: dict[str, Any]) -> None:
        """Check that the cache lies where it should."""

    def part(self) -> None:
        """Make the cache private to this engine."""

    def poll(self) -> None:
        """Learn what has become of the session."""

    def close(self) -> None:
        """Detach."""


class SchedulersHalf(Protocol):
    """The connector's half in the scheduler's process."""

    parts: bool
    """Whether steps make the ranks' caches private to this engine."""

    @property
    def has_work(self) -> bool:
        """Whether more steps of the engine, even empty ones, would let more blocks be published."""

    def dispatch(self, *, is_empty: bool) -> int:
        """Note that a step goes out; return its id."""

    def came_back(self, step_id: int, *, is_apart: bool) -> None:
        """Note that a step came back on all ranks, and publish what it wrote."""

    def close(self) -> None:
        """Detach."""


class MemoryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc,unused-ignore] # vLLM has no types here
    """Answer the hooks that work alike in both modes."""

    mode: ClassVar[str]
    """The name of the mode, which is part of the names of caches and magazines."""
    takes_other_capacity: ClassVar[bool] = False
    """Whether to accept a cache that another engine made for requests of other lengths, if every byte lies alike."""
    has_pool_alone: ClassVar[bool] = False
    """Whether an engine takes all blocks of its pool; then each data parallel rank, which is one, has a pool."""
    asks_by_request: ClassVar[bool] = False
    """Whether the scheduler looks up each request's prefix at the daemon, and so reads the key counts."""
    _memory: WorkersHalf | None
    _scheduler: SchedulersHalf | None

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Read the settings; later hooks map memory and attach to the daemon.

        Raises:
            InvalidError: a setting is unknown or out of range, or the engine is to produce only.
        """
        require_role(vllm_config.kv_transfer_config.kv_role)
        if role is KVConnectorRole.WORKER:
            require_outer(vllm_config.kv_transfer_config, loads=False)
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        settings = ConnectorSettings.read(extra, VLLM_SETTINGS)
        if role is KVConnectorRole.SCHEDULER:
            offload_only = [name for name in extra if name in VLLM_SETTINGS]
            _warn_without_effect(self.mode, [*settings.without_effect(self.mode), *offload_only])
        self._settings = settings.of_mode(self.mode)
        self._num_ranks = vllm_config.parallel_config.world_size
        self._memory = None
        self._scheduler = None
        self._step_id = 0
        self._is_heard = False

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a request waits until its blocks are handed over: never, as this is a cache."""
        return False

    # The worker

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler where this rank's cache lies."""
        self._is_heard = True
        return self._rank_metadata()

    def _rank_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return where this rank's cache lies; None if that is the engine's own memory."""
        raise NotImplementedError

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Check that the cache lies in the daemon's memory."""
        if self._memory is not None:
            self._memory.check(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Remember the step's id, and make the cache private if the step, or an unheard claim, asks for it.

        Raises:
            RuntimeError: the scheduler rules no pool, and the cache cannot be made private; a step must not write it.
        """
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata), "the scheduler's half makes it"
        self._step_id = connector_metadata.step_id
        if self._memory is None:
            return
        if connector_metadata.parts:
            self._memory.part()
        if not self._is_heard:
            self._part_unheard(self._memory)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Report that the step was carried out, and whether the cache is private to this engine."""
        memory = self._memory
        if memory is not None:
            memory.poll()
        is_apart = memory is None or memory.is_apart
        return StepsBack(self._step_id, is_apart=is_apart) if self._step_id else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: cached blocks are read where they lie."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: new blocks are kept where they are written."""

    def wait_for_save(self) -> None:
        """Do nothing."""

    def _part_unheard(self, memory: WorkersHalf) -> None:
        """Make the cache private, because the scheduler has not heard where it lies, and so rules no pool."""
        self._is_heard = True
        _logger.error(
            "MultiConnector passes on what one of its connectors tells of its ranks, and another one stands before %s. "
            "The engine has its memory for itself, and its cache ends with the engine: name %s first.",
            type(self).__name__,
            type(self).__name__,
            extra={"action": "unheard"},
        )
        memory.part()
        if not memory.is_apart:
            raise RuntimeError("the daemon's memory cannot be made private to this engine")

    # The scheduler

    def get_num_new_matched_tokens(
        self,
        request: Any,  # noqa: ARG002 - the hook's own signature
        num_computed_tokens: int,  # noqa: ARG002
    ) -> tuple[int, bool]:
        """Find nothing: the engine's own pool indexes every cached block."""
        return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Number the step."""
        assert self._scheduler is not None, "vLLM asks the scheduler's half"
        is_empty = not scheduler_output.total_num_scheduled_tokens
        if self._is_observed:
            fills.end_step(self._kv_cache_manager.block_pool, scheduler_output)
        step_id = self._scheduler.dispatch(is_empty=is_empty)
        return StepMetadata(step_id, parts=self._scheduler.parts)

    def update_connector_output(self, connector_output: Any) -> None:
        """Note which step has come back; what it wrote may be published, except what a failed load spoilt."""
        if connector_output.invalid_block_ids and self._is_observed:
            fills.spoil(self._kv_cache_manager, connector_output.invalid_block_ids)
        back = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(back, StepsBack):
            self._scheduler.came_back(back.step_id, is_apart=back.is_apart)

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM free the blocks at once."""
        del request, block_ids
        return False, None

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM free the blocks at once."""
        del request, block_ids
        return False, None

    def has_pending_push_work(self) -> bool:
        """Tell whether an idle engine should run more empty steps, so that its last blocks are published."""
        return self._scheduler is not None and self._scheduler.has_work

    def shutdown(self) -> None:
        """Publish the blocks that are written, and detach."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._memory is not None:
            self._memory.close()

    # Both

    @property
    def _rank(self) -> int:
        is_scheduler = self._role is KVConnectorRole.SCHEDULER
        return 0 if is_scheduler else int(self._vllm_config.parallel_config.rank)

    @property
    def _is_observed(self) -> bool:
        """Whether the engine's pool has been made one of ours."""
        return hasattr(self._kv_cache_manager.block_pool, "fills")

    def _open_session(self, had: CachePlan | None = None) -> EngineSession:
        config, kv_cache_config = self._vllm_config, self._kv_cache_config
        identity = Identity.of(config, kv_cache_config, weights=self._settings.weights)
        identity = identity.in_mode(self.mode)
        is_worker = self._role is KVConnectorRole.WORKER
        cache = self._settings.cache or identity.cache_name(self.mode)
        if self.has_pool_alone:
            cache += rank_mark(config)

        def disagreements(plan: CachePlan) -> list[str]:
            return [str(one) for one in agreement(plan, kv_cache_config, rank=self._rank)]

        terms = Terms(
            identity=identity,
            inputs=plan_inputs(config, kv_cache_config) if is_worker else None,
            cache=cache,
            rank=self._rank,
            magazine=magazine_name(config, self.mode),
            key_counts=self.asks_by_request and not is_worker,
            touches=is_worker,
            disagreements=disagreements,
            no_room=_no_room,
            had=had,
            takes_other_capacity=self.takes_other_capacity,
            ends_with_start=is_worker,
        )
        settings = self._settings.model_copy(update={"cache": cache})
        return EngineSession.open(settings, terms)


def _no_room(error: NeverFitsError) -> str:
    return (
        f"the engine's cache takes {error.need} bytes; of the {error.limit} bytes of memory that the daemon may use, "
        f"{error.available} are left: lower kv_cache_memory_bytes or num_gpu_blocks_override, delete a cache with "
        "`kvlease delete`, or raise the daemon's memory_bytes_max"
    )


def _warn_without_effect(mode: str, names: Sequence[str]) -> None:
    """Warn of settings that are set but have no effect in a mode; the scheduler's half does so, once per engine."""
    if names:
        _logger.warning(
            "In kv_connector_extra_config, %s %s no effect in the %s mode; remove %s, or use the offload mode.",
            ", ".join(names),
            "has" if len(names) == 1 else "have",
            mode,
            "it" if len(names) == 1 else "them",
            extra={"action": "setting_without_effect"},
        )
