"""Own the floor of the block manager's figures: the same requests to vLLM's manager; for .venv-vllm only.

Reads one line a round, `num_blocks num_calls window_tokens`, and answers with one line of JSON: the median nanoseconds
by figure. With a window there are two groups, full attention and the window's; with 0 tokens there is one.
"""

import gc
import itertools
import json
import os
import sys
from statistics import median
from time import perf_counter_ns

import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

TOKENS_PER_BLOCK = 16
POOL_PER_REQUEST = 4
NUM_RUNNING = 64
BLOCKS_TO_GROW = 4_096
BYTES_PER_KEY = 32

_names = map(str, itertools.count())


def manager_of(num_blocks: int, longest_request_tokens: int, window_tokens: int) -> KVCacheManager:
    """Return a manager of a group of full attention, and one of a sliding window if it has tokens."""
    numbers = {
        "block_size": TOKENS_PER_BLOCK,
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.float32,
    }
    groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(**numbers))]
    if window_tokens:
        window = SlidingWindowSpec(sliding_window=window_tokens, **numbers)
        groups.append(KVCacheGroupSpec(["window"], window))
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config,
        max_model_len=longest_request_tokens,
        scheduler_block_size=TOKENS_PER_BLOCK,
        hash_block_size=TOKENS_PER_BLOCK,
    )


def request_of(num_tokens: int, keys: list[bytes]) -> Request:
    """Return a request with known keys, because hashing is not part of the figures."""
    return Request(
        request_id=next(_names),
        prompt_token_ids=[1] * num_tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=lambda request: keys[len(request.block_hashes) :],
    )


def some_keys(num_blocks: int) -> list[bytes]:
    """Return keys that nobody has yet."""
    return [os.urandom(BYTES_PER_KEY) for _ in range(num_blocks)]


def admit(manager: KVCacheManager, request: Request, *, publishes: bool) -> int:
    """Find a request's prefix and take blocks for the rest; return the number of cached tokens."""
    blocks, num_hits, _ = manager.get_computed_blocks(request)
    taken = manager.allocate_slots(
        request, request.num_tokens - num_hits, num_hits, blocks, delay_cache_blocks=not publishes
    )
    assert taken is not None
    return num_hits


class Sizes:
    """The managers for requests of one size, in the states that the figures start from."""

    def __init__(self, num_blocks: int, window_tokens: int) -> None:
        """Fill one manager with cached blocks, and one with running requests; leave one empty."""
        self.num_blocks = num_blocks
        num_groups = 2 if window_tokens else 1
        self.num_tokens = num_blocks * TOKENS_PER_BLOCK
        self.longest = self.num_tokens + BLOCKS_TO_GROW * TOKENS_PER_BLOCK
        pool = num_groups * (POOL_PER_REQUEST * num_blocks + 1) + 1
        self.empty = manager_of(pool, self.longest, window_tokens)
        self.full = manager_of(pool, self.longest, window_tokens)
        for _ in range(POOL_PER_REQUEST + 1):
            self.churn()
        num_running = num_groups * (NUM_RUNNING * (num_blocks + 1) + BLOCKS_TO_GROW)
        self.busy = manager_of(num_running, self.longest, window_tokens)
        self.running = [
            request_of(self.num_tokens, some_keys(num_blocks)) for _ in range(NUM_RUNNING)
        ]
        for request in self.running:
            admit(self.busy, request, publishes=True)
            request.num_computed_tokens = self.num_tokens

    def churn(self) -> int:
        """Admit a request for which others' cached blocks must leave, and publish its own."""
        request = request_of(self.num_tokens, some_keys(self.num_blocks))
        start = perf_counter_ns()
        admit(self.full, request, publishes=True)
        taken = perf_counter_ns() - start
        self.full.free(request)
        return taken

    def extend(self) -> int:
        """Extend every running request by a block."""
        start = perf_counter_ns()
        for request in self.running:
            self.busy.allocate_slots(request, 1)
        taken = perf_counter_ns() - start
        for request in self.running:
            request.num_computed_tokens += TOKENS_PER_BLOCK
        return taken

    def shrink(self) -> None:
        """Start all running requests over, for the next round."""
        for request in self.running:
            self.busy.free(request)
            request.num_computed_tokens = 0
            hits = admit(self.busy, request, publishes=True)
            assert hits == self.num_tokens - TOKENS_PER_BLOCK
            request.num_computed_tokens = self.num_tokens

    def life(self) -> dict[str, int]:
        """Take one request through its life, then another with the same prefix."""
        keys = some_keys(self.num_blocks)
        first = request_of(self.num_tokens, keys)
        again = request_of(self.num_tokens + 1, keys)
        times = [perf_counter_ns()]
        assert admit(self.empty, first, publishes=False) == 0
        times.append(perf_counter_ns())
        self.empty.cache_blocks(first, self.num_tokens)
        times.append(perf_counter_ns())
        ids = {id_ for ids in self.empty.get_block_ids(first.request_id) for id_ in ids}
        times.append(perf_counter_ns())
        self.empty.free(first)
        times.append(perf_counter_ns())
        assert admit(self.empty, again, publishes=True) == self.num_tokens
        times.append(perf_counter_ns())
        self.empty.free(again)
        times.append(perf_counter_ns())
        self.empty.evict_blocks(ids)
        times.append(perf_counter_ns())
        reserve, commit, _, release, hit, _, evict = (
            after - before for before, after in itertools.pairwise(times)
        )
        return {
            "reserve": reserve,
            "commit": commit,
            "release": release,
            "hit": hit,
            "evict": evict,
        }


def measure(sizes: Sizes, num_calls: int) -> dict[str, float]:
    """Return the median nanoseconds of each figure."""
    gc.collect()
    gc.freeze()
    gc.disable()
    lives = [sizes.life() for _ in range(num_calls)]
    figures = {name: median([life[name] for life in lives]) for name in lives[0]}
    figures["churn"] = median([sizes.churn() for _ in range(num_calls)])
    figures["extend"] = median([sizes.extend() for _ in range(num_calls)]) / NUM_RUNNING
    sizes.shrink()
    gc.enable()
    return figures


def main() -> None:
    """Answer round after round until standard input ends."""
    known: dict[tuple[int, int], Sizes] = {}
    for line in sys.stdin:
        num_blocks, num_calls, window_tokens = map(int, line.split())
        key = num_blocks, window_tokens
        if key not in known:
            known.clear()
            known[key] = Sizes(num_blocks, window_tokens)
        sys.stdout.write(json.dumps(measure(known[key], num_calls)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
