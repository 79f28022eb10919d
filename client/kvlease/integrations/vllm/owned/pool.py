"""Own the block pool of an engine with owned memory: vLLM's, observed, handing out only blocks that nobody finds."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request

from kvlease.integrations.vllm.fills import Fills
from kvlease.integrations.vllm.owned.keeper import Keeper

_logger: Final = logging.getLogger(__name__)

_PAUSE_SECONDS: Final = 0.05
_WAIT_SECONDS: Final = 5.0
"""Seconds to wait for blocks that were taken without asking how many are free; a restarted daemon is back by then."""


class OwnedPool(BlockPool):  # type: ignore[misc,unused-ignore] # vLLM has no types here
    """vLLM's pool under observation; a pool gets this class when the engine starts, and keeps all of its state."""

    keeper: Keeper
    is_short: bool
    """Whether, at the last count, fewer blocks could be handed out than were free."""
    fills: Fills
    on_reset: Callable[[], None]
    _counts_all: bool

    @classmethod
    def observe(cls, pool: BlockPool, keeper: Keeper, on_reset: Callable[[], None]) -> "OwnedPool":
        """Turn a pool of which no block is in use yet into an observed one."""
        pool.__class__ = cls
        assert isinstance(pool, cls), "the pool has its new class"
        pool._begin(keeper)  # noqa: SLF001 - a constructor, but for a pool that is there already
        pool.on_reset = on_reset
        return pool

    def _begin(self, keeper: Keeper) -> None:
        self._counts_all = False
        self.is_short = False
        self.fills = Fills()
        self.keeper = keeper
        keeper.watch(self._is_free, self._free_ids)

    def order_restored(self, block_ids: Sequence[int]) -> None:
        """Put restored blocks at the end of the free queue, so that they are handed out last, in the given order."""
        blocks = [self.blocks[block_id] for block_id in block_ids]
        for block in blocks:
            self.free_block_queue.remove(block)
        self.free_block_queue.append_n(blocks)

    # Looking up

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: list[int]
    ) -> list[KVCacheBlock] | None:
        """Find a block as vLLM does, or else among the restored blocks."""
        found: list[KVCacheBlock] | None = super().get_cached_block(block_hash, kv_cache_group_ids)
        if (
            found is None
            and self.keeper.has_restored
            and self._adopt(block_hash, kv_cache_group_ids)
        ):
            found = super().get_cached_block(block_hash, kv_cache_group_ids)
        return found

    def _adopt(self, block_hash: BlockHash, group_ids: list[int]) -> bool:
        """Bring the restored blocks of a hash into vLLM's index; return whether any came."""
        has_adopted = False
        for group_id in group_ids:
            name = make_block_hash_with_group_id(block_hash, group_id)
            if self.cached_block_hash_to_block.get_one_block(name) is None:
                block_id = self.keeper.find_restored(name)
                if block_id is None:
                    return has_adopted
                self._insert_block_hash(name, self.blocks[block_id], num_tokens=None)
                has_adopted = True
        return has_adopted

    # What is observed

    def cache_full_blocks(  # noqa: PLR0913, PLR0917 - vLLM's own signature
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Cache as vLLM does, and note which blocks the step will have written; nothing, if a failed load spoilt it."""
        if request.request_id in self.fills.spoilt:
            return
        super().cache_full_blocks(
            request,
            blocks,
            num_cached_blocks,
            num_full_blocks,
            block_size,
            kv_cache_group_id,
            block_mask,
        )
        keeper = self.keeper
        for index in range(num_cached_blocks, num_full_blocks):
            block = blocks[index]
            is_masked = block_mask is not None and not block_mask[index - num_cached_blocks]
            if not block.is_null and not is_masked and block.block_hash is not None:
                self.fills.note(request.request_id, block, blocks)
                if keeper.is_on:
                    keeper.note(block.block_id, block.block_hash, index)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Touch as vLLM does, and note that the blocks are used again."""
        super().touch(blocks)
        if self.keeper.is_on:
            for block in blocks:
                if not block.is_null:
                    self.keeper.touched(block.block_id)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Free as vLLM does."""
        ordered_blocks = list(ordered_blocks)
        super().free_blocks(ordered_blocks)
        self._refile(ordered_blocks)

    def unpin_blocks(
        self, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]
    ) -> None:
        """Unpin as vLLM does."""
        blocks = list(blocks)
        super().unpin_blocks(blocks, on_reuse)
        self._refile(blocks)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Evict as vLLM does, and have the daemon forget the blocks, too."""
        super().evict_blocks(block_ids)
        if self.keeper.is_on:
            for block_id in block_ids:
                if not self.blocks[block_id].is_null:
                    self.keeper.evicted(block_id)

    def move_block_hashes(self, src_block: KVCacheBlock, dst_block: KVCacheBlock) -> None:
        """Move as vLLM does; the daemon may keep neither block."""
        super().move_block_hashes(src_block, dst_block)
        if self.keeper.is_on:
            self.keeper.evicted(src_block.block_id)

    def reset_prefix_cache(self) -> bool:
        """Reset as vLLM does, retract all findable blocks, and publish nothing more under the keys of before."""
        self._counts_all = True
        try:
            was_reset: bool = super().reset_prefix_cache()
        finally:
            self._counts_all = False
        if was_reset and self.keeper.is_on:
            self.keeper.reset()
        if was_reset:
            self.on_reset()
        return was_reset

    # Handing out

    def get_num_free_blocks(self) -> int:
        """Return how many blocks can be handed out; without the daemon's answer, that may be fewer than are free."""
        num_free: int = super().get_num_free_blocks()
        if self._counts_all or not self.keeper.is_on:
            return num_free
        num_given = self.keeper.num_free(num_free)
        self.is_short = num_given < num_free
        return num_given

    def get_usage(self) -> float:
        """Return vLLM's own figure, which counts all free blocks."""
        self._counts_all = True
        try:
            usage: float = super().get_usage()
        finally:
            self._counts_all = False
        return usage

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Hand out blocks in vLLM's order, but findable blocks only after they were retracted."""
        keeper = self.keeper
        if not keeper.is_on:
            return list(super().get_new_blocks(num_blocks))
        if not keeper.require(num_blocks):
            self._wait_for(num_blocks)
        self._bring_forward(keeper.pick(num_blocks))
        self._counts_all = True
        try:
            blocks: list[KVCacheBlock] = super().get_new_blocks(num_blocks)
        finally:
            self._counts_all = False
        keeper.gave(block.block_id for block in blocks)
        return blocks

    def _wait_for(self, num_blocks: int) -> None:
        """Wait, within limits, until the daemon has answered the retract or is dead.

        vLLM always asks first how many blocks are free, and that count holds for any one request; so this is for
        callers that did not ask.

        Raises:
            ValueError: neither happened in time; vLLM's own pool raises this when more blocks are taken than are free.
        """
        _logger.error(
            "%d blocks were taken without asking whether they are free, and the daemon does not answer; waiting for "
            "it for at most %g s.",
            num_blocks,
            _WAIT_SECONDS,
            extra={"action": "owned_wait"},
        )
        give_up_at = time.monotonic() + _WAIT_SECONDS
        while not self.keeper.require(num_blocks):
            if time.monotonic() >= give_up_at:
                num_free = self.keeper.num_private_free
                raise ValueError(
                    f"Cannot get {num_blocks} free blocks from the pool: {num_free} may be overwritten, and the "
                    "kvlease daemon does not answer"
                )
            time.sleep(_PAUSE_SECONDS)

    def _bring_forward(self, block_ids: list[int]) -> None:
        """Put blocks at the head of the free queue, in the given order."""
        queue = self.free_block_queue
        num_there = 0
        for block_id, free_id in zip(block_ids, self._free_ids(), strict=False):
            if block_id != free_id:
                break
            num_there += 1
        if num_there < len(block_ids):
            blocks = [self.blocks[block_id] for block_id in block_ids]
            for block in blocks:
                queue.remove(block)
            queue.prepend_n(blocks)

    def _free_ids(self) -> Iterator[int]:
        queue = self.free_block_queue
        block, tail = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail
        while block is not None and block is not tail:
            yield block.block_id
            block = block.next_free_block

    def _is_free(self, block_id: int) -> bool:
        block = self.blocks[block_id]
        return block.ref_cnt == 0 and not block.is_null

    def _refile(self, blocks: Iterable[KVCacheBlock]) -> None:
        if self.keeper.is_on:
            for block in blocks:
                if not block.is_null:
                    self.keeper.refile(block.block_id)
