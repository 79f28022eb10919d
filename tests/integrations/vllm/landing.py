"""Own a connector that, as those that move blocks between nodes do, writes into blocks while their request waits.

What it writes is wrong, and it says so afterwards, so that the engine computes these blocks itself.
"""

from dataclasses import dataclass, field
from typing import Any

from kvlease.geometry import floor_div
from tests.integrations.vllm.spoiling import SpoilingConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass
class Landings(KVConnectorMetadata):  # type: ignore[misc,unused-ignore] # vLLM has no types here
    """The blocks that each request waits for."""

    blocks: dict[str, list[int]] = field(default_factory=dict)


class LandingConnector(SpoilingConnector):
    """Find each request's whole blocks once, and spoil them."""

    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **words)
        self._known: set[str] = set()
        self._wanted = Landings()
        self._landed: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        """Find all whole blocks of a request that comes for the first time."""
        num_tokens = floor_div(request.num_tokens - 1, self._tokens_per_block)
        left = num_tokens * self._tokens_per_block - num_computed
        if left <= 0 or request.request_id in self._known:
            return 0, False
        return left, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        """Note which blocks a request waits for."""
        self._known.add(request.request_id)
        if num_external:
            fresh = [one.block_id for one in blocks.blocks[0] if one.block_hash is None]
            self._wanted.blocks[request.request_id] = fresh

    def build_connector_meta(self, _output: Any) -> KVConnectorMetadata:
        """Order what is to land."""
        wanted, self._wanted = self._wanted, Landings()
        return wanted

    def start_load_kv(self, *_arguments: Any, **_words: Any) -> None:
        """Spoil the blocks."""
        for request_id, blocks in self._get_connector_metadata().blocks.items():
            self._spoil(blocks)
            self._landed.add(request_id)

    def get_finished(self, _finished: set[str]) -> tuple[set[str], set[str]]:
        """Tell which requests wait no longer."""
        landed, self._landed = self._landed, set()
        return set(), landed
