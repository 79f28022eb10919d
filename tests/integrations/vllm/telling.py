"""Own a connector that, as those that move blocks between nodes do, tells the scheduler something of its ranks."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)


class TellingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc,unused-ignore] # vLLM has no types here
    """Tell of a rank, and do nothing else."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        """Tell of a rank."""
        return KVConnectorHandshakeMetadata()

    def get_num_new_matched_tokens(self, *_arguments: Any) -> tuple[int, bool]:
        """Find nothing."""
        return 0, False

    def build_connector_meta(self, _output: Any) -> KVConnectorMetadata:
        """Order nothing."""
        return KVConnectorMetadata()

    def request_finished_all_groups(self, *_arguments: Any) -> tuple[bool, None]:
        """Let vLLM free the blocks at once."""
        return False, None

    def _nothing(self, *_arguments: Any, **_words: Any) -> None:
        """Do nothing."""

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _nothing
    update_state_after_alloc = _nothing
