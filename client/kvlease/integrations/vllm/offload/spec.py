"""Own what vLLM's offloading connector asks for by name: a manager and workers whose medium is the daemon's pool."""

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
from kvlease.integrations.vllm.settings import ConnectorSettings

_logger: Final = logging.getLogger(__name__)

VLLM_SETTINGS: Final = frozenset(
    {
        "block_size",
        "blocks_per_chunk",
        "canonical_layout",
        "offload_prompt_only",
        "self_describing_kv_events",
        "spec_module_path",
        "spec_name",
    }
)
"""Names in the extra config that vLLM's offloading reads itself."""


class KVLeaseOffloadingSpec(OffloadingSpec):
    """Offload to the daemon's pool; `KVLeaseOffloadingConnector` opens what is made here.

    Under vLLM's own connector everything is a miss, which the first request says: it could not be told that a load
    has failed.
    """

    def get_manager(self) -> OffloadingManager:
        """Make the scheduler's side, closed as yet."""
        return _ManagerToOpen()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make a rank's side, closed as yet."""
        return worker_of(
            kv_caches,
            bytes_per_block=self.config.worker_kv_bytes_per_block,
            blocks_per_chunk=self.blocks_per_chunk,
            verifies=ConnectorSettings.read(self.extra_config, VLLM_SETTINGS).verify,
        )


class _ManagerToOpen(PoolManager):
    """A manager that says so once where requests come and nobody has opened it, as vLLM's own connector does not."""

    _has_said = False

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Take a request, as ever."""
        if self._desk is None and not self._has_said:
            self._has_said = True
            join_engine_log()
            _logger.error(
                "Nothing is cached by kvlease: vLLM's own connector uses %s, and does not attach it to a daemon. Name "
                "the connector that does: kv_connector KVLeaseOffloadingConnector, kv_connector_module_path "
                "kvlease.integrations.vllm; and leave spec_name and spec_module_path out.",
                KVLeaseOffloadingSpec.__name__,
                extra={"action": "never_opened"},
            )
        return super().on_new_request(req_context)
