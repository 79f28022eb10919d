"""Own what vLLM's offloading connector lacks: sessions with the daemon, and loads that fail without harm."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.forward_context import ForwardContext
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.kv_offload.base import OffloadKey, make_offload_key
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvlease.geometry import floor_div
from kvlease.integrations.vllm.fills import NOTHING_SPOILT, spoil
from kvlease.integrations.vllm.identity.namespace import Identity, magazine_name
from kvlease.integrations.vllm.offload import landings, preemptions, resets, streaming, windows
from kvlease.integrations.vllm.offload.alone import open_alone
from kvlease.integrations.vllm.offload.arrivals import CAN_TELL_LATER, REQUESTS_MAX
from kvlease.integrations.vllm.offload.copies import Rows
from kvlease.integrations.vllm.offload.desk import Desk, pool_id
from kvlease.integrations.vllm.offload.manager import PoolManager
from kvlease.integrations.vllm.offload.newcomers import Newcomers
from kvlease.integrations.vllm.offload.pool import (
    chunk_mark,
    no_room,
    pool_inputs,
    row_disagreements,
    rows_per_step,
    too_small,
)
from kvlease.integrations.vllm.offload.preemptions import changed
from kvlease.integrations.vllm.offload.progress import Progress
from kvlease.integrations.vllm.offload.reports import RankReport
from kvlease.integrations.vllm.offload.spec import KVLeaseOffloadingSpec
from kvlease.integrations.vllm.offload.worker import MappedPool, PoolWorker
from kvlease.integrations.vllm.outer import require_first, require_outer
from kvlease.integrations.vllm.session.session import EngineSession, Terms
from kvlease.integrations.vllm.settings import (
    VLLM_SETTINGS,
    ConnectorSettings,
    recompute_failed_loads,
    require_chunks,
    require_role,
)
from kvlease.integrations.vllm.shared import readers
from kvlease.integrations.vllm.uncached import why_uncached

MODE: Final = "offload"
_Parted = tuple[bool, dict[str, Any] | None]
STOCK_SHARE_MAX: Final = 8
"""The stock of private rows is at most the pool's rows divided by this."""


class KVLeaseOffloadingConnector(OffloadingConnector):
    """vLLM's offloading connector over the daemon's pool. No error of the daemon is ever raised into the engine."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Choose the spec and, in the scheduler's process, attach.

        Raises:
            InvalidError: a setting is unknown, out of range or not for this model, or the engine only produces, has
                two such connectors or, by the settings of a MultiConnector, fails requests whose loads fail.
        """
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        require_role(transfer.kv_role)
        if role is KVConnectorRole.WORKER:
            require_outer(transfer, loads=True)
        transfer.kv_connector_extra_config = {
            **transfer.kv_connector_extra_config,
            "spec_name": KVLeaseOffloadingSpec.__name__,
            "spec_module_path": KVLeaseOffloadingSpec.__module__,
        }
        self._settings = ConnectorSettings.read(transfer.kv_connector_extra_config, VLLM_SETTINGS)
        super().__init__(vllm_config, role, kv_cache_config)
        self._offloading = build_offloading_config(vllm_config, kv_cache_config)
        require_chunks(
            self._offloading.cache.blocks_per_chunk,
            [group.tokens_per_block for group in self._offloading.groups],
        )
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._has_one_group = len(specs) == 1
        self._is_plain = self._has_one_group and isinstance(specs[0], FullAttentionSpec)
        self._newcomers = Newcomers()
        self._engine_pool: Any = None
        self._loading: dict[int, str] = {}
        self._unwritten_blocks: set[int] = set()
        self._progress = Progress(
            [
                group.tokens_per_block * self._offloading.cache.blocks_per_chunk
                for group in self._offloading.groups
            ]
        )
        if role is KVConnectorRole.SCHEDULER:
            recompute_failed_loads(transfer)
            self._open_manager()

    # The scheduler's side

    @property
    def manager(self) -> PoolManager:
        """The scheduler's side of the pool."""
        manager = self.scheduler.manager
        assert isinstance(manager, PoolManager)
        return manager

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Observe the engine's own pool, if names can be left to blocks that are never filled, or filled wrongly."""
        super().bind_gpu_block_pool(gpu_block_pool)
        self._engine_pool = gpu_block_pool
        if self._has_one_group or self._vllm_config.scheduler_config.policy == "priority":
            preemptions.observe(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        """Note a request; if all layers attend to all tokens, vLLM's scheduler is told of it only when needed."""
        if self._is_plain and CAN_TELL_LATER:
            self._newcomers.waiting[request.request_id] = request
        else:
            self._take_in(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded; if a request has nothing to load, its blocks are not gone over."""
        if request.request_id in self._newcomers.waiting:
            if self._has_nothing_to_load(request, num_computed_tokens):
                return 0, False
            self._take_in_waiting(request)
        elif self._newcomers.is_started(request.request_id):
            # The request was preempted before its second step.
            self._take_in_started()
        matched: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return matched

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Note what a request loads; if it loads nothing from here, another connector may be about to write."""
        if not num_external_tokens:
            landings.note_given(self.scheduler, blocks)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan the step's loads and stores; what a request stores of its first step is planned in the next step.

        So no first token waits for that plan. The ranks begin a step's stores in the next step anyway.
        """
        scheduled, new = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_new_reqs
        preemptions.take_names_away(self._engine_pool, scheduler_output)
        self._take_in_started()
        self.manager.admit(scheduled.keys(), has_new=bool(new))
        # Layers with windows may have given up blocks by the next step, so their stores are not put off.
        first = {one.req_id for one in new} if self._is_plain else set[str]()
        due = self._progress.due(scheduled, first)
        seen = preemptions.without_loads(self.scheduler, scheduler_output)
        if first or len(due) < len(scheduled):
            seen = changed(seen, num_scheduled_tokens=due, scheduled_new_reqs=self._start(new))
        streaming.forget_replaced(self.scheduler, seen.scheduled_new_reqs)
        windows.forget_before_gaps(self.scheduler, seen)
        meta = super().build_connector_meta(seen)
        self._progress.forget(scheduler_output.finished_req_ids or ())
        assert isinstance(meta, OffloadingConnectorMetadata)
        self.manager.plan(meta.load_jobs, meta.store_jobs)
        return meta

    def reset_cache(self) -> bool | None:
        """Begin a new generation of keys; what requests have computed so far is stored again under the new keys."""
        self._take_in_started()
        self._progress.restart()
        resets.forget_behind_windows(self.scheduler)
        with resets.first_of_its_step(self.scheduler):
            is_done: bool | None = super().reset_cache()
        return is_done

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Return vLLM's own figures of loads and stores since the last call, if they are wanted."""
        stats: KVConnectorStats | None = super().get_kv_connector_stats()
        return stats if self._settings.stats else None

    def request_finished(self, request: Request, block_ids: list[int]) -> _Parted:
        """Forget a request; if it ran its first step, what it stores of that step is planned in the next one."""
        self._part(request)
        parted: _Parted = super().request_finished(request, block_ids)
        return parted

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> _Parted:
        """Forget a request, as above, with its blocks given by group."""
        self._part(request)
        parted: _Parted = super().request_finished_all_groups(request, block_ids)
        return parted

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Pass the ranks' report to the manager, and to vLLM; nothing is stored of what a failed load spoilt."""
        if connector_output.invalid_block_ids:
            spoilt = spoil(self._kv_cache_manager, connector_output.invalid_block_ids)
            self.manager.spoil(self._newcomers.known(spoilt.requests, self.scheduler), spoilt)
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, RankReport):
            self.manager.report(report.completed_jobs, report.failed_jobs, report.wrong_rows)
        super().update_connector_output(connector_output)

    # Requests that vLLM's scheduler is told of later

    def _take_in(self, request: Request) -> None:
        """Tell vLLM's scheduler of a request and make its keys, as one lookup asks for the keys of several requests."""
        super().on_new_request(request)
        self._progress.note(request)
        status = getattr(self.scheduler, "_req_status", {}).get(request.request_id)
        if status is not None and hasattr(status, "update_offload_keys"):
            status.update_offload_keys()

    def _has_nothing_to_load(self, request: Request, num_computed_tokens: int) -> bool:
        """Tell whether the engine has all whole chunks of a request, or the pool surely lacks the first one."""
        group = self.scheduler.config.kv_group_configs[0]
        per_chunk = group.tokens_per_chunk
        num_tokens = len(request.block_hashes) // group.hashes_per_chunk * per_chunk
        if request.skip_reading_prefix_cache or num_tokens - num_computed_tokens < per_chunk:
            return True
        if num_computed_tokens or not self.manager.absent([self._first_key(request)])[0]:
            return False
        self._newcomers.note_absent(request.request_id)
        return True

    def _first_key(self, request: Request) -> OffloadKey:
        group = self.scheduler.config.kv_group_configs[0]
        return make_offload_key(request.block_hashes[group.hashes_per_chunk - 1], group.group_idx)

    def _take_in_waiting(self, request: Request) -> None:
        """Tell vLLM's scheduler of a request that may load, and of those waiting behind it, to ask for all at once."""
        hashes = self.scheduler.config.kv_group_configs[0].hashes_per_chunk
        others = [
            one
            for one in self._newcomers.first(REQUESTS_MAX)
            if one is not request and len(one.block_hashes) >= hashes
        ]
        absent = self.manager.absent([self._first_key(one) for one in others])
        for one in [
            request,
            *(other for other, is_so in zip(others, absent, strict=True) if not is_so),
        ]:
            self._newcomers.leave(one.request_id)
            self._take_in(one)

    def _start(self, scheduled: list[Any]) -> list[Any]:
        """Note the requests in their first step, return the rest; stores that still read their blocks end first."""
        started = self._newcomers.start(scheduled)
        for one in started:
            for blocks in one.block_ids:
                self.scheduler._current_batch_allocated_block_ids.update(blocks)  # noqa: SLF001 - probed at import
        names = {one.request.request_id for one in started}
        return [one for one in scheduled if one.req_id not in names]

    def _take_in_started(self) -> None:
        for one in self._newcomers.take_started():
            name = one.request.request_id
            self._take_in(one.request)
            self.scheduler._req_status[name].update_block_id_groups(one.block_ids)  # noqa: SLF001 - probed at import
            if one.is_absent:
                self.manager.note_absent(name)

    def _part(self, request: Request) -> None:
        """Forget a request; if it ends by an error, vLLM takes its whole prompt for computed, wherever it was."""
        name = request.request_id
        self._newcomers.leave(name)
        if self._newcomers.is_started(name):
            self._take_in_started()
        if request.status is RequestStatus.FINISHED_ERROR:
            self.manager.spoil(self._newcomers.known((name,), self.scheduler), NOTHING_SPOILT)

    # A worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the engine's tensors, and attach."""
        require_first(has_engine=getattr(self.connector_worker, "worker", None) is not None)
        super().register_kv_caches(kv_caches)
        session = self._session(rank := self._offloading.parallel.rank)
        self._worker.open(_mapping(session, rank), session.close)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin the step's loads."""
        meta = self._connector_metadata
        assert isinstance(meta, OffloadingConnectorMetadata)
        self._loading.update((job_id, job.req_id) for job_id, job in meta.load_jobs.items())
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return which requests have ended their loads, and which of these must compute blocks, as a load failed."""
        results = super().get_transfer_results(finished_req_ids)
        failures = self._worker.failures
        for job_id, blocks in failures.loads.items():
            request_id = self._loading.get(job_id)
            if self._has_one_group:
                self._unwritten_blocks |= blocks
            elif request_id is not None:
                results.failed_recving.add(request_id)
        failures.loads.clear()
        done = results.finished_recving
        self._loading = {job: one for job, one in self._loading.items() if one not in done}
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that loads left unwritten; with several groups, whole requests are reported instead."""
        blocks, self._unwritten_blocks = self._unwritten_blocks, set()
        return blocks

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """Report the finished jobs, and the failures."""
        report = super().build_connector_worker_meta()
        if self.connector_worker is None or self.connector_worker.worker is None:
            return report
        jobs, wrong_rows = self._worker.failures.take_report()
        return RankReport.of(report, jobs, wrong_rows)

    # How both attach

    @property
    def _worker(self) -> PoolWorker:
        assert self.connector_worker is not None
        worker = self.connector_worker.worker
        assert isinstance(worker, PoolWorker)
        return worker

    def _open_manager(self) -> None:
        manager, config = self.manager, self._offloading
        session = self._session(0)
        desk = Desk(session, manager.held)
        num_rows = desk.books.num_rows or 1
        tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        stock = self._settings.magazine_blocks or rows_per_step(config, tokens)
        manager.open(
            desk,
            num_ranks=config.parallel.world_size,
            stock_rows=max(1, min(stock, floor_div(num_rows, STOCK_SHARE_MAX))),
            has_events=config.enable_kv_cache_events,
        )
        readers.announce(config.engine_id, manager)

    def _session(self, rank: int) -> EngineSession:
        """Attach this process; if that fails, the session goes on trying by itself."""
        vllm_config, settings, config = self._vllm_config, self._settings, self._offloading
        identity = Identity.of(vllm_config, self._kv_cache_config, weights=settings.weights)
        uncached = why_uncached(vllm_config, self._kv_cache_config)
        if refusal := uncached or too_small(config, settings.pool_bytes):
            identity = replace(identity, refusal=refusal)
        inputs = pool_inputs(config, self._kv_cache_config.num_blocks, settings.pool_bytes)
        terms = Terms(
            identity=identity,
            inputs=inputs,
            cache=f"{identity.cache_name(MODE)}{chunk_mark(config)}",
            rank=rank,
            magazine=magazine_name(vllm_config, MODE),
            key_counts=True,
            touches=self.role is KVConnectorRole.WORKER,
            disagreements=row_disagreements(config),
            no_room=no_room(config, inputs, settings.pool_bytes),
            takes_other_capacity=True,
        )
        if self.role is KVConnectorRole.SCHEDULER:
            return open_alone(settings, terms)
        return EngineSession.open(settings, terms)


def _mapping(session: EngineSession, rank: int) -> Callable[[], MappedPool | None]:
    """Return a function that gives a rank's pool as it is mapped now."""
    known: list[MappedPool] = []

    def mapped() -> MappedPool | None:
        session.poll()
        pool, device, plan = pool_id(session), session.device, session.plan
        if not pool or device is None or plan is None:
            return None
        if not known or known[0].pool != pool:
            (extent,) = plan.ranks[rank].extents
            region = device[extent.offset_bytes :]
            known[:] = [MappedPool(pool, Rows(region, plan.num_blocks, extent.block_stride_bytes))]
        return known[0]

    return mapped
