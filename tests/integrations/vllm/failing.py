"""Own a connector whose loads, which are to be there when a step begins, fail: it spoils the blocks and says so.

The engine takes these blocks' tokens back when the step returns, and computes them in the steps that follow.
"""

from dataclasses import dataclass, field
from typing import Any

from kvlease.geometry import floor_div
from tests.integrations.vllm.spoiling import SpoilingConnector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc,unused-ignore] # vLLM has no types here
    """The blocks that the step is to load."""

    blocks: list[int] = field(default_factory=list)


class FailingConnector(SpoilingConnector):
    """Claim all whole blocks but the last dozen of the first request that has as many, once."""

    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **words)
        self._is_done = False
        self._wanted = Loads()

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        """Find what is to be loaded in the request's first step."""
        num_blocks = floor_div(request.num_tokens - 1, self._tokens_per_block) - 12
        left = num_blocks * self._tokens_per_block - num_computed
        return (0 if self._is_done else max(0, left)), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        """Note which blocks are to be loaded."""
        del request
        if num_external:
            self._is_done = True
            count = floor_div(num_external, self._tokens_per_block)
            self._wanted.blocks = [one.block_id for one in blocks.blocks[0]][:count]

    def build_connector_meta(self, _output: Any) -> KVConnectorMetadata:
        """Order what is to be loaded."""
        wanted, self._wanted = self._wanted, Loads()
        return wanted

    def start_load_kv(self, *_arguments: Any, **_words: Any) -> None:
        """Spoil the blocks."""
        self._spoil(self._get_connector_metadata().blocks)
