"""Own what connectors have in common that spoil blocks, and say so afterwards, so that the engine computes them."""

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

_WRONG = 3.0


class SpoilingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc,unused-ignore] # vLLM has no types here
    """Which blocks are spoiled, and when, is for those below to say."""

    def __init__(self, *arguments: Any, **words: Any) -> None:
        super().__init__(*arguments, **words)
        self._tokens_per_block = self._vllm_config.cache_config.block_size
        self._tensors: list[Any] = []
        self._wrong: set[int] = set()

    def _spoil(self, blocks: Iterable[int]) -> None:
        spoiled = list(blocks)
        for tensor in self._tensors:
            tensor[spoiled] = _WRONG
        self._wrong.update(spoiled)

    def request_finished_all_groups(self, *_arguments: Any) -> tuple[bool, None]:
        """Let vLLM free the blocks at once."""
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Note the engine's tensors."""
        self._tensors = list(kv_caches.values())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Tell that nothing of it is right."""
        wrong, self._wrong = self._wrong, set()
        return wrong

    def _nothing(self, *_arguments: Any, **_words: Any) -> None:
        """Do nothing."""

    wait_for_layer_load = save_kv_layer = wait_for_save = _nothing
