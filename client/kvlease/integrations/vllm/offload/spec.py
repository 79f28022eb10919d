"""Own the spec that vLLM's offloading connector loads by name: its manager and workers use the daemon's pool."""

import logging
from typing import Final

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    ReqContext,
    RequestOffloadingContext,
)

from kvlease.integrations.vllm.logs import join_engine_log
from kvlease.integrations.vllm.offload.manager import PoolManager
from kvlease.integrations.vllm.offload.worker import worker_of
from kvlease.integrations.vllm.settings import VLLM_SETTINGS, ConnectorSettings

_logger: Final = logging.getLogger(__name__)


class KVLeaseOffloadingSpec(OffloadingSpec):
    """Offload to the daemon's pool; `KVLeaseOffloadingConnector` opens the manager and workers made here.

    Under vLLM's own connector everything is a miss, which the first request logs: that connector could not be told of a
    failed load.
    """

    def get_manager(self) -> OffloadingManager:
        """Make the scheduler's side, not opened yet."""
        return _ManagerToOpen()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make a rank's side, not opened yet."""
        return worker_of(
            kv_caches,
            bytes_per_block=self.config.worker_kv_bytes_per_block,
            blocks_per_chunk=self.blocks_per_chunk,
            verifies=ConnectorSettings.read(self.extra_config, VLLM_SETTINGS).verify,
        )


class _ManagerToOpen(PoolManager):
    """A manager that logs once if requests come before it is opened; vLLM's own connector never opens it."""

    _has_said = False

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Note a request; log once if the manager is not open."""
        if self._desk is None and not self._has_said:
            self._has_said = True
            join_engine_log()
            _logger.error(
                "kvlease caches nothing: vLLM's own connector uses %s, but does not attach it to a daemon. Use the "
                "connector that does: set kv_connector to KVLeaseOffloadingConnector and kv_connector_module_path to "
                "kvlease.integrations.vllm, and remove spec_name and spec_module_path.",
                KVLeaseOffloadingSpec.__name__,
                extra={"action": "never_opened"},
            )
        return super().on_new_request(req_context)
