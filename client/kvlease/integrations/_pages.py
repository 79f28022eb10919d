"""Own a lease's blocks as tensors, and its pages as layers of a Transformers cache; the cache is `LeasedCache`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from kvlease.errors import InvalidError, UnknownLeaseError, WrongStateError
from kvlease.geometry import blocks_covering

if TYPE_CHECKING:
    from kvlease import Lease, Worker

WAIT_MS: Final = 1_000
"""Milliseconds that a call waits for blocks; without a wait, cached blocks would be dropped before they are saved."""


class LeasedBlocks:
    """The blocks of one lease as index tensors, one for each group; all layers of a cache share them."""

    def __init__(
        self,
        worker: Worker,
        lease: Lease,
        blocks_ahead: int,
        num_tokens_max: int | None,
        device: torch.device,
    ) -> None:
        plan = worker.plan
        longest = plan.longest_request_tokens
        self.lease = lease
        self._device = device
        self.num_tokens_max = min(num_tokens_max or longest, longest)
        self.shared_tokens = 0
        self._tokens_per_block = [group.tokens_per_block for group in plan.groups]
        self._tokens_ahead = blocks_ahead * plan.tokens_per_block
        self._tables: list[torch.Tensor] = []
        self._read_tables()

    def require_live(self) -> None:
        if not self.lease.is_live:
            raise self.lease.refusal or UnknownLeaseError

    def reach(self, num_tokens: int) -> int:
        """Extend the lease if it covers fewer than `num_tokens`; return how many of them it covers then."""
        self.require_live()
        covered = self.lease.covered_tokens
        if num_tokens <= covered:
            return num_tokens
        if not covered:
            raise WrongStateError("The lease is evicted; reload it first.")
        target = max(num_tokens, min(num_tokens + self._tokens_ahead, self.num_tokens_max))
        if not self.lease.extend(target, wait_ms=WAIT_MS):
            raise self.lease.refusal or UnknownLeaseError
        self._read_tables()
        return min(num_tokens, self.lease.covered_tokens)

    def cover(self, num_tokens: int) -> None:
        """Extend the lease if it covers fewer than `num_tokens`; refuse tokens that the windows have no room for."""
        covered = self.reach(num_tokens)
        if covered < num_tokens:
            message = (
                f"The windows of the model have room for {covered} tokens until a commit moves them on, but "
                f"{num_tokens} are to be computed; compute and commit fewer tokens at a time."
            )
            raise WrongStateError(message, resource="tokens", need=num_tokens, available=covered)

    def places(
        self, group: int, first_token: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block id of each token that is to be written, and its offset in that block."""
        if first_token < self.shared_tokens:
            raise WrongStateError("Committed blocks are never written again.")
        tokens = torch.arange(first_token, first_token + num_tokens, device=self._device)
        tokens_per_block = self._tokens_per_block[group]
        return self._tables[group][tokens // tokens_per_block], tokens % tokens_per_block

    def table(self, group: int, first_token: int, end_token: int) -> tuple[torch.Tensor, int]:
        """Return the ids of the blocks that hold a range of tokens, and the offset of the first token in its block."""
        tokens_per_block = self._tokens_per_block[group]
        first, offset = divmod(first_token, tokens_per_block)
        end = blocks_covering(end_token, tokens_per_block)
        return self._tables[group][first:end], offset

    def settle(self) -> None:
        """Wait until the device has done all work given to it: only then do the blocks hold what was computed."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def evict(self) -> int:
        self.require_live()
        self.settle()
        evicted = self.lease.evict()
        if not self.lease.is_evicted:
            raise self.lease.refusal or UnknownLeaseError
        self._read_tables()
        return evicted.num_evicted

    def reload(self) -> int:
        self.require_live()
        reloaded = self.lease.reload()
        if self.lease.is_evicted or not self.lease.is_live:
            raise self.lease.refusal or UnknownLeaseError
        self.lease.map()
        self._read_tables()
        num_tokens = min(reloaded.num_tokens, self.lease.covered_tokens)
        self.shared_tokens = min(self.shared_tokens, num_tokens)
        return num_tokens

    def _read_tables(self) -> None:
        self._tables = [
            torch.from_numpy(self.lease.blocks(group).astype(np.int64)).to(self._device)
            for group in range(len(self._tokens_per_block))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPages:
    """Where one layer keeps its states, and how many of them attention looks at."""

    keys: torch.Tensor
    """[blocks, heads, tokens of a block, head size]"""
    values: torch.Tensor
    group: int
    window_tokens: int = 0
    """Tokens that attention looks at, including the newest; 0 means all."""


class LeasedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # Transformers types no hooks
    """One layer's pages in the form of a Transformers cache layer."""

    supports_early_init = False
    is_croppable = True
    """Whether tokens that assisted decoding guessed wrongly can be dropped; `crop` refuses to drop tokens that others
    read."""

    def __init__(self, blocks: LeasedBlocks, pages: LayerPages, num_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor constructors
        self._blocks = blocks
        self._pages = pages
        self._num_tokens = num_tokens
        self.is_sliding = pages.window_tokens > 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the memory exists already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new states into their pages and return all states, read from the pool."""
        pages = self._pages
        if key_states.shape[0] != 1:
            message = (
                f"A leased cache holds one sequence, not {key_states.shape[0]}; use no batch and no beams, and set "
                "num_return_sequences to 1."
            )
            raise InvalidError(message, resource="sequences", need=key_states.shape[0], limit=1)
        if key_states.dtype != pages.keys.dtype:
            message = (
                f"The cache keeps {pages.keys.dtype}, but the model has {key_states.dtype}; register the cache with "
                "the model's dtype as kv_dtype."
            )
            raise InvalidError(message, resource="dtype", rule="other_model")
        for states, kept in ((key_states, pages.keys), (value_states, pages.values)):
            if (states.shape[1], states.shape[3]) != (kept.shape[1], kept.shape[3]):
                message = (
                    f"The cache keeps {kept.shape[1]} heads of {kept.shape[3]} elements in a layer, but the model has "
                    f"{states.shape[1]} of {states.shape[3]}; register a cache from the config of this model. If it "
                    "was, Transformers keeps other heads than the config says, which a leased cache does not support."
                )
                raise InvalidError(message, resource="heads", rule="other_model")
        num_new = key_states.shape[-2]
        self._blocks.cover(self._num_tokens + num_new)
        blocks, offsets = self._blocks.places(pages.group, self._num_tokens, num_new)
        pages.keys[blocks, :, offsets] = (
            key_states.detach()[0].transpose(0, 1).to(pages.keys.device)
        )
        pages.values[blocks, :, offsets] = (
            value_states.detach()[0].transpose(0, 1).to(pages.values.device)
        )
        num_seen, first_token = self.get_mask_sizes(num_new)
        self._num_tokens += num_new
        table, offset = self._blocks.table(pages.group, first_token, self._num_tokens)
        keys = _gather(pages.keys, table, offset, num_seen).to(key_states.device)
        return keys, _gather(pages.values, table, offset, num_seen).to(value_states.device)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many states attention looks at, and the first token among them."""
        first_token = 0
        if self.is_sliding:
            first_token = max(0, self._num_tokens - self._pages.window_tokens + 1)
        return self._num_tokens + query_length - first_token, first_token

    def get_seq_length(self) -> int:
        """Return the number of tokens whose states are in the cache."""
        return self._num_tokens

    def get_max_length(self) -> int:
        """Return the number of tokens that the cache can hold."""
        return self._blocks.num_tokens_max

    def truncate(self, num_tokens: int) -> None:
        """Drop all tokens after the first `num_tokens`."""
        self._num_tokens = min(self._num_tokens, num_tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens, whose number is given as zero or negative; committed blocks cannot be dropped."""
        num_tokens = self._num_tokens - abs(tokens_to_remove)
        if tokens_to_remove > 0 or num_tokens < self._blocks.shared_tokens:
            raise WrongStateError(
                "Only tokens after the last committed block can be cropped, by a negative number."
            )
        self.truncate(num_tokens)

    def reset(self) -> None:
        """Refuse: others may be reading these pages."""
        raise WrongStateError("A leased cache cannot be reset; release it and reserve another.")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:  # noqa: ARG002 - the contract
        """Refuse: a lease holds one sequence."""
        raise WrongStateError("A leased cache holds one sequence; beams are not supported.")

    def batch_repeat_interleave(self, repeats: int) -> None:  # noqa: ARG002 - the contract
        """Refuse: a lease holds one sequence."""
        raise WrongStateError("A leased cache holds one sequence; it cannot be repeated.")

    def batch_select_indices(self, indices: torch.Tensor) -> None:  # noqa: ARG002 - the contract
        """Refuse: a lease holds one sequence."""
        raise WrongStateError("A leased cache holds one sequence; there is nothing to select.")


def _gather(pool: torch.Tensor, table: torch.Tensor, offset: int, num_tokens: int) -> torch.Tensor:
    """Return `[1, heads, num_tokens, head_size]` from the pages `[blocks, heads, tokens_per_block, head_size]`."""
    pages = pool.index_select(0, table).transpose(0, 1)
    return pages.flatten(1, 2)[:, offset : offset + num_tokens].unsqueeze(0)
