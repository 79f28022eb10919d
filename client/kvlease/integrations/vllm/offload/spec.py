"""Own what vLLM's offloading connector asks for by name: a manager and workers whose medium is the daemon's pool."""

from typing import Final

from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
)

from kvlease.integrations.vllm.offload.manager import PoolManager
from kvlease.integrations.vllm.offload.worker import worker_of
from kvlease.integrations.vllm.settings import ConnectorSettings

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

    Under vLLM's own connector everything is a miss: it could not be told that a load has failed.
    """

    def get_manager(self) -> OffloadingManager:
        """Make the scheduler's side, closed as yet."""
        return PoolManager()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make a rank's side, closed as yet."""
        return worker_of(
            kv_caches,
            bytes_per_block=self.config.worker_kv_bytes_per_block,
            blocks_per_chunk=self.blocks_per_chunk,
            verifies=ConnectorSettings.read(self.extra_config, VLLM_SETTINGS).verify,
        )
