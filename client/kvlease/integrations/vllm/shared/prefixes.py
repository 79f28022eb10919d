"""Own which blocks of a request's prefix are held here and which are missing, under vLLM's names; makes no call."""

from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    make_block_hash_with_group_id,
    resolve_block_hashes,
)
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from kvlease.integrations.vllm.shared.pool import SharedBlockPool

_CHAINS_KEPT_MAX: Final = 32
"""Prefixes whose names are remembered, because waiting requests look theirs up again in every step."""

Names = list[BlockHashWithGroupId]


class Prefixes:
    """The prefixes of one engine's requests, compared with the index of its pool."""

    def __init__(self, coordinator: Any, pool: SharedBlockPool) -> None:
        """Remember the coordinator's groups and the pool's index."""
        self._managers = [
            (group_id, manager)
            for group_id, manager in enumerate(coordinator.single_type_managers)
            if manager.kv_cache_spec.prefix_cacheable
        ]
        self._pool = pool
        self._is_closed_downward = len(coordinator.single_type_managers) == 1 and all(
            isinstance(manager, FullAttentionManager) for _, manager in self._managers
        )
        self._chains: dict[tuple[int, BlockHash, int], Names] = {}

    def __repr__(self) -> str:
        """Show life: how many prefixes are remembered."""
        return f"<Prefixes {len(self._chains)} remembered>"

    def missing(self, block_hashes: Any, max_tokens: int) -> tuple[dict[bytes, int], set[int]]:
        """Return the names of a prefix that are not held here, in order, and the blocks that are.

        Each name comes with the number of tokens up to its end. If only blocks before the first gap can be used, all
        names after it count as missing.
        """
        missing: dict[bytes, int] = {}
        kept: set[int] = set()
        find = self._pool.cached_block_hash_to_block.get_one_block
        for group_id, manager in self._managers:
            block_tokens = manager.block_size
            names = self._names(block_hashes, group_id, block_tokens)
            num_blocks = min(len(names), max_tokens // block_tokens)
            for index, name in enumerate(islice(names, num_blocks)):
                block = find(name)
                if block is not None:
                    kept.add(block.block_id)
                elif self._is_closed_downward:
                    tokens = range(
                        (index + 1) * block_tokens, num_blocks * block_tokens + 1, block_tokens
                    )
                    missing.update(zip(names[index:num_blocks], tokens, strict=True))
                    break
                else:
                    missing[name] = (index + 1) * block_tokens
        return missing, kept

    def deciding(self, missing: Sequence[bytes]) -> Sequence[bytes]:
        """Return the missing names that decide: if none of these is cached, none of the missing names can be used."""
        return missing[:1] if self._is_closed_downward else missing

    def _names(self, block_hashes: Any, group_id: int, block_tokens: int) -> Names:
        """Return the names of all blocks of a chain of hashes, remembered by the chain's last hash and length."""
        hashes = resolve_block_hashes(block_hashes, self._pool.hash_block_size, block_tokens)
        if not len(hashes):
            return []
        chain = (group_id, hashes[len(hashes) - 1], len(hashes))
        names = self._chains.get(chain)
        if names is None:
            mark = make_block_hash_with_group_id(BlockHash(b""), group_id)
            names = [BlockHashWithGroupId(one + mark) for one in hashes]
            while len(self._chains) >= _CHAINS_KEPT_MAX:
                del self._chains[next(iter(self._chains))]
            self._chains[chain] = names
        return names
