"""Own which blocks the step being scheduled is to fill, so that a request that is taken out of it again leaves none.

With scheduling by priority, vLLM may preempt a request that it has given blocks in the same step. These blocks have
their names by then, but nobody computes what is in them.
"""

from collections.abc import Iterable

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock


class Fills:
    """The blocks that got their names in the step being scheduled, by request."""

    def __init__(self) -> None:
        """Begin with none."""
        self._blocks: dict[str, list[tuple[KVCacheBlock, BlockHashWithGroupId]]] = {}

    def __repr__(self) -> str:
        """Show life: how many requests fill blocks."""
        return f"<Fills of {len(self._blocks)} requests>"

    def note(self, request_id: str, block: KVCacheBlock) -> None:
        """Note a block that has just got its name."""
        if block.block_hash is not None:
            self._blocks.setdefault(request_id, []).append((block, block.block_hash))

    def end_step(self, taken_out: Iterable[str]) -> set[int]:
        """Forget the step; return blocks that requests taken out of it were to fill, if they still have the names."""
        if not self._blocks:
            return set()
        blocks, self._blocks = self._blocks, {}
        return {
            block.block_id
            for request_id in taken_out
            for block, name in blocks.get(request_id, ())
            if block.block_hash == name
        }
