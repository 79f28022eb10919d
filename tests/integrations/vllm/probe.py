"""Own a connector that moves nothing: it plans as the daemon does and reports where the engine's layout differs.

Runs in every process of an engine; `kv_connector_extra_config` names the folder for its reports.
"""

import json
from pathlib import Path
from typing import Any

from kvlease.errors import KVLeaseError
from kvlease.integrations.vllm.planning import agreement, plan_inputs
from kvleased.planning import plan
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)


class ProbeConnector(KVConnectorBase_V1, SupportsHMA):
    """Compare the engine's cache with the daemon's plan, once with tensors and once without."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config, kv_cache_config
        if role == KVConnectorRole.SCHEDULER:
            self._report("scheduler", 0)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Compare, including the tensors."""
        rank = self._config[0].parallel_config.rank
        self._report(f"worker-{rank}", rank, kv_caches)

    def _report(self, name: str, rank: int, tensors: dict[str, Any] | None = None) -> None:
        words: dict[str, Any] = {"differences": [], "error": ""}
        try:
            inputs = plan_inputs(*self._config)
            made = plan(inputs)
            found = agreement(made, self._config[1], tensors, rank=rank)
            words["inputs"] = inputs.to_proto().SerializeToString(deterministic=True).hex()
            words["fingerprint"] = made.layout_fingerprint
            words["differences"] = [str(one) for one in found]
        except KVLeaseError as error:
            words["error"] = f"{error.rule}: {error.message}"
        folder = Path(self._kv_transfer_config.kv_connector_extra_config["folder"])
        (folder / f"{name}.json").write_text(json.dumps(words))

    # Methods that a connector must have.

    def start_load_kv(self, forward_context: Any, **_words: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for nothing."""

    def save_kv_layer(self, *_arguments: Any, **_words: Any) -> None:
        """Save nothing."""

    def wait_for_save(self) -> None:
        """Wait for nothing."""

    def get_num_new_matched_tokens(self, *_arguments: Any) -> tuple[int, bool]:
        """Find nothing."""
        return 0, False

    def update_state_after_alloc(self, *_arguments: Any) -> None:
        """Note nothing."""

    def build_connector_meta(self, _scheduler_output: Any) -> KVConnectorMetadata:
        """Tell the workers nothing."""
        return KVConnectorMetadata()

    def request_finished_all_groups(self, *_arguments: Any) -> tuple[bool, None]:
        """Keep nothing."""
        return False, None
