"""Own vLLM's block pool in shared mode: the same calls, over the blocks that the books say are this engine's.

Reference counts stay vLLM's. The free blocks are those in stock. No block is ever evicted here: only the daemon evicts.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from vllm.distributed.kv_events import AllBlocksCleared
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)

from kvlease.integrations.vllm.fills import Fills
from kvlease.integrations.vllm.shared.magazine import Books

_logger: Final = logging.getLogger(__name__)


class SharedBlockPool(BlockPool):  # type: ignore[misc,unused-ignore] # vLLM has no types here
    """A pool of which this engine has only the blocks of its magazine; `share` turns vLLM's pool into one."""

    books: Books
    fills: Fills
    allowance: int
    """Blocks that count as free in the current check, besides those in stock."""
    num_elsewhere: int
    """Blocks that the daemon could have granted when it was last asked."""
    on_reset: Callable[[], None]
    freed: dict[int, int] | None
    """The step in which each freed block lost its last user; None if no connector beside ours needs it."""
    step: int
    """The step being scheduled."""
    announced: set[int]
    """Blocks that this engine's events have announced."""

    @classmethod
    def share(
        cls, pool: BlockPool, books: Books, on_reset: Callable[[], None]
    ) -> "SharedBlockPool":
        """Turn vLLM's pool, of which no block is used yet, into the engine's view of the shared pool."""
        num_free = pool.free_block_queue.num_free_blocks
        assert num_free == pool.num_gpu_blocks - 1, (
            "all but the null block are free before the first request"
        )
        pool.free_block_queue.popleft_n(num_free)
        pool.__class__ = cls
        assert isinstance(pool, cls), "its class was just set"
        pool.books = books
        pool.fills = Fills()
        pool.allowance = 0
        pool.num_elsewhere = 0
        pool.on_reset = on_reset
        pool.freed = None
        pool.step = 1
        pool.announced = set()
        return pool

    # What vLLM asks.

    def get_num_free_blocks(self) -> int:
        """Count the blocks that can be handed out, plus the allowance of the check under way."""
        return self.books.num_stock + self.allowance

    def get_usage(self) -> float:
        """Return the share of the pool that this engine could not get."""
        total = self.num_gpu_blocks - 1
        return 1 - min(total, self.books.num_unused + self.num_elsewhere) / total if total else 0

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Hand out blocks of the stock."""
        if num_blocks > self.books.num_stock:
            # vLLM checks get_num_free_blocks first, so this is never reached.
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        blocks = [self.blocks[block_id] for block_id in self.books.grant(num_blocks)]
        for block in blocks:
            assert block.ref_cnt == 0, "a block in stock has no user"
            block.ref_cnt = 1
            if self.metrics_collector:
                self.metrics_collector.on_block_allocated(block)
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Note that a request uses blocks that were hit."""
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.books.reuse(block.block_id)
            block.ref_cnt += 1
            if self.metrics_collector:
                self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Give blocks back in the order to evict them; private ones return to the stock, findable ones stay held."""
        for block in ordered_blocks:
            if block.pool is not None and block.pool is not self:
                block.pool.free_blocks([block])
                continue
            block.ref_cnt -= 1
            if block.ref_cnt or block.is_null:
                continue
            if self.freed is not None:
                self.freed[block.block_id] = self.step
            if self.books.release(block.block_id):
                self.forget((block.block_id,))

    def cache_full_blocks(  # noqa: PLR0913, PLR0917 - vLLM's own signature
        self,
        request: Any,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Name full blocks, if no failed load spoilt them, and note them for publication once their step is back."""
        if request.request_id in self.fills.spoilt:
            return
        nameless = [
            (position, blocks[position])
            for position in range(num_cached_blocks, num_full_blocks)
            if blocks[position].block_hash is None
        ]
        super().cache_full_blocks(
            request,
            blocks,
            num_cached_blocks,
            num_full_blocks,
            block_size,
            kv_cache_group_id,
            block_mask,
        )
        announced, write = self.announced, self.books.write
        for position, block in nameless:
            if block.block_hash is not None:
                announced.add(block.block_id)
                self.fills.note(request.request_id, block, blocks)
                write(block.block_id, block.block_hash, position)

    def emit_cached_block_events(
        self, request: Any, num_cached_blocks: int, block_size: int, kv_cache_group_id: int
    ) -> None:
        """Announce blocks that a request found here, and note them, so that their leaving is announced, too."""
        super().emit_cached_block_events(request, num_cached_blocks, block_size, kv_cache_group_id)
        if not self.enable_kv_cache_events:
            return
        hashes = resolve_block_hashes(request.block_hashes, self.hash_block_size, block_size)
        for index in range(num_cached_blocks):
            name = make_block_hash_with_group_id(hashes[index], kv_cache_group_id)
            block = self.cached_block_hash_to_block.get_one_block(name)
            if block is not None:
                self.announced.add(block.block_id)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Forget blocks whose bytes do not match their names."""
        super().evict_blocks(block_ids)
        self.announced -= block_ids
        for block_id in block_ids:
            self.books.spoil(block_id)

    def unpin_blocks(
        self, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]
    ) -> None:
        """Give pinned blocks back at once: a block in stock may be another engine's next."""
        for block in blocks:
            if block.ref_cnt == 1:
                on_reuse(block)
            self.free_blocks((block,))

    def reset_prefix_cache(self) -> bool:
        """Forget all names, and find nothing that was published before; refused while requests have blocks."""
        if self.books.num_used:
            _logger.warning(
                "The prefix cache is not reset, because %d blocks are in use.", self.books.num_used
            )
            return False
        self.books.give_up()
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.cached_block_hashes_by_block.clear()
        self.announced.clear()
        for block in self.blocks:
            block.reset_hash()
        if self.metrics_collector:
            self.metrics_collector.reset()
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(AllBlocksCleared())
        self.on_reset()
        return True

    # What the books bring about.

    def hold(self, held: Iterable[tuple[bytes, int]], tokens: Mapping[bytes, int]) -> None:
        """Make blocks that the magazine now holds findable; `tokens` gives the length of each name's prefix."""
        for name, block_id in held:
            block = self.blocks[block_id]
            if block.block_hash is not None:
                if bytes(block.block_hash) == name:
                    continue
                self.forget((block_id,))
            key = BlockHashWithGroupId(name)
            block.set_block_hash(key, num_tokens=tokens[name])
            self.cached_block_hash_to_block.insert(key, block)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable; the engine's events announce it for those blocks that they had announced before."""
        blocks, announced = self.blocks, self.announced
        told: set[int] = set()
        for block_id in block_ids:
            block = blocks[block_id]
            if block.block_hash is None:
                continue
            if block_id in announced:
                told.add(block_id)
            else:
                # The block was never announced: it came with others or was fetched ahead, and was never used.
                self.cached_block_hash_to_block.pop(block.block_hash, block_id)
                block.reset_hash()
        if told:
            announced -= told
            super().evict_blocks(told)
