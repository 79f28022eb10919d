"""Own a lease's blocks as tensors, and its pages as layers of a Transformers cache; the cache is in `transformers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from kvlease.errors import InvalidError, UnknownLeaseError, WrongStateError

if TYPE_CHECKING:
    from kvlease import Lease, Worker

WAIT_MS: Final = 1_000
"""Milliseconds that a call waits for blocks; without waiting, cached blocks would be dropped unsaved."""


class LeasedBlocks:
    """The blocks of one lease as an index tensor, shared by all layers of a cache."""

    def __init__(
        self, worker: Worker, lease: Lease, blocks_ahead: int, num_tokens_max: int | None
    ) -> None:
        longest = worker.plan.longest_request_tokens
        self.lease = lease
        self.num_tokens_max = min(num_tokens_max or longest, longest)
        self.tokens_per_block = worker.plan.tokens_per_block
        self.shared_tokens = 0
        self._plan = worker.plan
        self._tokens_ahead = blocks_ahead * self.tokens_per_block
        self._table = torch.empty(0, dtype=torch.int64)
        self._read_table()

    def require_live(self) -> None:
        if not self.lease.is_live:
            raise self.lease.refusal or UnknownLeaseError

    def cover(self, num_tokens: int) -> None:
        """Extend the lease where it covers fewer than `num_tokens`."""
        self.require_live()
        if num_tokens <= self._covered_tokens:
            return
        if not self._covered_tokens:
            raise WrongStateError("The lease is evicted; reload it first.")
        target = max(num_tokens, min(num_tokens + self._tokens_ahead, self.num_tokens_max))
        if not self.lease.extend(target, wait_ms=WAIT_MS):
            raise self.lease.refusal or UnknownLeaseError
        self._read_table()

    def places(self, first_token: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block id and the offset in the block of each token, to be written."""
        if first_token < self.shared_tokens:
            raise WrongStateError("Committed blocks are never written again.")
        tokens = torch.arange(first_token, first_token + num_tokens)
        return self._table[tokens // self.tokens_per_block], tokens % self.tokens_per_block

    def table(self, num_tokens: int) -> torch.Tensor:
        """Return the ids of the blocks that hold the first `num_tokens`."""
        return self._table[: self._plan.blocks_covering(num_tokens)]

    def evict(self) -> int:
        self.require_live()
        evicted = self.lease.evict()
        if not self.lease.is_evicted:
            raise self.lease.refusal or UnknownLeaseError
        self._table = self._table[:0]
        return evicted.num_evicted

    def reload(self) -> int:
        self.require_live()
        reloaded = self.lease.reload()
        if self.lease.is_evicted or not self.lease.is_live:
            raise self.lease.refusal or UnknownLeaseError
        self.lease.map()
        self._read_table()
        num_tokens = min(reloaded.num_tokens, self._covered_tokens)
        self.shared_tokens = min(self.shared_tokens, num_tokens)
        return num_tokens

    @property
    def _covered_tokens(self) -> int:
        return len(self._table) * self.tokens_per_block

    def _read_table(self) -> None:
        self._table = torch.from_numpy(self.lease.block_ids.astype(np.int64))


class LeasedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # Transformers types no hooks
    """One layer's pages, as Transformers sees a layer of a cache."""

    is_sliding = False
    supports_early_init = False

    def __init__(
        self,
        blocks: LeasedBlocks,
        pool_keys: torch.Tensor,
        pool_values: torch.Tensor,
        num_tokens: int,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor constructors
        self._blocks = blocks
        self._pool_keys = pool_keys
        self._pool_values = pool_values
        self._num_tokens = num_tokens
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new states into their pages and return all states, read from the pool."""
        if key_states.shape[0] != 1 or key_states.dtype != self._pool_keys.dtype:
            message = f"A leased cache holds one sequence of {self._pool_keys.dtype}, not {key_states.shape[0]} of "
            raise InvalidError(f"{message}{key_states.dtype}.")
        num_new = key_states.shape[-2]
        self._blocks.cover(self._num_tokens + num_new)
        blocks, offsets = self._blocks.places(self._num_tokens, num_new)
        self._pool_keys[blocks, :, offsets] = (
            key_states.detach()[0].transpose(0, 1).to(self._pool_keys.device)
        )
        self._pool_values[blocks, :, offsets] = (
            value_states.detach()[0].transpose(0, 1).to(self._pool_values.device)
        )
        self._num_tokens += num_new
        table = self._blocks.table(self._num_tokens)
        keys = _gather(self._pool_keys, table, self._num_tokens).to(key_states.device)
        return keys, _gather(self._pool_values, table, self._num_tokens).to(value_states.device)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many states attention sees, and from which on."""
        return self._num_tokens + query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens whose states are there."""
        return self._num_tokens

    def get_max_length(self) -> int:
        """Return the tokens that the cache can hold."""
        return self._blocks.num_tokens_max

    def truncate(self, num_tokens: int) -> None:
        """Forget what lies after the first `num_tokens`."""
        self._num_tokens = min(self._num_tokens, num_tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, given as a number not above zero; committed blocks cannot be forgotten."""
        num_tokens = self._num_tokens - abs(tokens_to_remove)
        if tokens_to_remove > 0 or num_tokens < self._blocks.shared_tokens:
            raise WrongStateError(
                "Only tokens after the last committed block can be cropped, by a negative number."
            )
        self.truncate(num_tokens)

    def reset(self) -> None:
        """Refuse: others may be reading these pages."""
        raise WrongStateError("A leased cache is not reset; release it and reserve another.")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:  # noqa: ARG002 - the contract
        """Refuse: a lease holds one sequence."""
        raise WrongStateError("A leased cache holds one sequence; beams are not supported.")

    def batch_repeat_interleave(self, repeats: int) -> None:  # noqa: ARG002 - the contract
        """Refuse: a lease holds one sequence."""
        raise WrongStateError("A leased cache holds one sequence; it cannot be repeated.")

    def batch_select_indices(self, indices: torch.Tensor) -> None:  # noqa: ARG002 - the contract
        """Refuse: a lease holds one sequence."""
        raise WrongStateError("A leased cache holds one sequence; there is nothing to select.")


def _gather(pool: torch.Tensor, table: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return `[1, heads, num_tokens, head_size]` from the pages `[blocks, heads, tokens_per_block, head_size]`."""
    pages = pool.index_select(0, table).transpose(0, 1)
    return pages.flatten(1, 2)[:, :num_tokens].unsqueeze(0)
