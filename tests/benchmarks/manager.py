"""Own the figures of the block manager: the core alone beside vLLM's manager, on the same requests.

Then the cost per block in pools of growing size, which has no floor but should be the same in all of them; and the
bytes that the pool keeps for a block. Caches of several groups are in `hybrid`.
"""

import itertools
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter_ns
from typing import Final

import numpy as np
from measure import Figure, in_turns, paired, without_collector
from reference import Process, ask, figure, reference

from kvlease.groups import GroupShape, keeps_everything
from kvlease.ids import BYTES_PER_KEY, Epoch, LeaseId, WorkerId
from kvleased.core import Cache, CacheShape, commands
from kvleased.core.blocks.records import CacheRecords
from kvleased.core.effects import Evicted, Reserved, Stepped
from kvleased.core.verbs.stepping import StepVerb
from kvleased.system.heap import keep_freed_memory

TOKENS_PER_BLOCK: Final = 16
POOL_PER_REQUEST: Final = 4
NUM_RUNNING: Final = 64
BLOCKS_TO_GROW: Final = 4_096
ROUNDS: Final = 7
CALLS: Final = {64: 60, 512: 30, 8_192: 9}
"""Blocks of a request, and its measurements in a round; the first few find the CPU's caches cold."""
TIMES: Final = {
    "reserve": ("reserve, no hit", 3),
    "hit": ("reserve, all hit", 3),
    "extend": ("extend by a block", 3),
    "commit": ("commit", 3),
    "release": ("release", 3),
    "evict": ("evict", 3),
    "churn": ("reserve that evicts, and commit", 3),
}
"""Titles of the figures, and how many times faster than the floor they should be."""
TIMES_OF_LARGE: Final = {"hit": 10, "churn": 5}
BLOCKS_EACH: Final = 64
"""Blocks of each request to the pools of different sizes."""
BLOCKS_AT_ONCE: Final = 512
"""Blocks of each chain with which a pool is filled beforehand."""
CHAINS_KNOWN_MIN: Final = 8
POOLS: Final = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
WORKER: Final = WorkerId(1)
BYTES_PER_BLOCK_MAX: Final = 100
POOL_AT_WORST: Final = 2**20 + 1
"""Tables have a power of two places, so a pool of just more than one has the most places for a block."""

Groups = Callable[[int], tuple[GroupShape, ...]]
"""Returns the groups of a cache whose leases have so many places in each."""

_names = map(str, itertools.count())


def manager(directory: Path) -> list[Figure]:  # noqa: ARG001 - every benchmark gets one
    """Measure requests of each size beside their floor, then pools of each size."""
    keep_freed_memory()  # as the control process does
    with reference() as process:
        figures = [one for num_blocks in CALLS for one in _beside(num_blocks, process)]
    return figures + _over_pools() + [_memory(POOL_AT_WORST)]


# Requests -------------------------------------------------------------------------------------------------------------


class Holder:
    """A cache and its only worker."""

    def __init__(self, num_blocks: int, groups: tuple[GroupShape, ...]) -> None:
        """Start with all blocks free."""
        shape = CacheShape(
            num_blocks=num_blocks + 1,
            null_blocks=1,
            num_slots=0,
            groups=groups,
            hash_tokens=TOKENS_PER_BLOCK,
            hit_tokens=TOKENS_PER_BLOCK,
            max_leases=2 * NUM_RUNNING,
        )
        self.cache = Cache(shape, CacheRecords.plain(shape), Epoch(1))
        self.cache.handle(commands.Attach(worker_id=WORKER, tenant_digest=7), monotonic())

    def reserve(self, num_tokens: int, keys: bytes) -> Reserved:
        """Get blocks for a new request."""
        command = commands.Reserve(
            worker_id=WORKER, request_id=next(_names), keys=keys, num_tokens=num_tokens
        )
        reply = self.cache.handle(command, monotonic()).reply
        assert isinstance(reply, Reserved)
        return reply

    def commit(self, lease_id: LeaseId, keys: bytes) -> None:
        """Publish all blocks of a lease."""
        command = commands.Commit(
            worker_id=WORKER,
            lease_id=lease_id,
            num_tokens=len(keys) // BYTES_PER_KEY * TOKENS_PER_BLOCK,
            first_block=0,
            keys=keys,
        )
        self.cache.handle(command, monotonic())

    def release(self, lease_id: LeaseId) -> None:
        """End a lease, and do all that this leaves to be done."""
        self.cache.handle(commands.Release(worker_id=WORKER, lease_id=lease_id), monotonic())
        self.cache.settle()

    def evict(self, num_blocks: int) -> None:
        """Evict the coldest blocks."""
        reply = self.cache.handle(commands.Evict(num_blocks=num_blocks), monotonic()).reply
        assert isinstance(reply, Evicted)
        assert reply.num_evicted == num_blocks

    def cache_keys(self, keys: bytes) -> None:
        """Cache blocks under new keys."""
        num_tokens = len(keys) // BYTES_PER_KEY * TOKENS_PER_BLOCK
        lease_id = self.reserve(num_tokens, keys).lease_id
        self.commit(lease_id, keys)
        self.release(lease_id)


def one_group(table_blocks: int) -> tuple[GroupShape, ...]:
    """Return full attention alone."""
    return (keeps_everything(TOKENS_PER_BLOCK, table_blocks),)


class Sizes:
    """The caches for requests of one size, in the states that the figures start from."""

    def __init__(self, num_blocks: int, groups: Groups = one_group) -> None:
        """Fill one cache with cached blocks, and one with running requests; leave one empty."""
        self.num_blocks = num_blocks
        self.num_tokens = num_blocks * TOKENS_PER_BLOCK
        self.num_groups = len(groups(1))
        pool = self.num_groups * (POOL_PER_REQUEST * num_blocks + 1)
        self.empty = Holder(pool, groups(num_blocks + 1))
        self.full = Holder(pool, groups(num_blocks + 1))
        for _ in range(POOL_PER_REQUEST + 1):
            self.churn()
        num_running = self.num_groups * (NUM_RUNNING * (num_blocks + 1) + BLOCKS_TO_GROW)
        self.busy = Holder(num_running, groups(num_blocks + BLOCKS_TO_GROW))
        self.running: list[LeaseId] = []
        self.shrink()

    def churn(self) -> int:
        """Admit a request for which others' cached blocks must leave, and commit its own."""
        keys = os.urandom(self.num_blocks * BYTES_PER_KEY)
        start = perf_counter_ns()
        lease_id = self.full.reserve(self.num_tokens, keys).lease_id
        self.full.commit(lease_id, keys)
        taken = perf_counter_ns() - start
        self.full.release(lease_id)
        return taken

    def extend(self) -> int:
        """Extend every running request by a block."""
        self.tokens_each += TOKENS_PER_BLOCK
        command = commands.Step(
            worker_id=WORKER,
            verbs=bytes([StepVerb.EXTEND]) * NUM_RUNNING,
            lease_ids=np.array(self.running, np.int64).tobytes(),
            num_tokens=np.full(NUM_RUNNING, self.tokens_each, np.int32).tobytes(),
        )
        start = perf_counter_ns()
        reply = self.busy.cache.handle(command, monotonic()).reply
        taken = perf_counter_ns() - start
        assert isinstance(reply, Stepped)
        assert len(reply.block_ids) == NUM_RUNNING * self.num_groups * 4
        return taken

    def shrink(self) -> None:
        """Start all running requests over, for the next round."""
        for lease_id in self.running:
            self.busy.release(lease_id)
        self.tokens_each = self.num_tokens
        self.running = [
            self.busy.reserve(self.num_tokens, b"").lease_id for _ in range(NUM_RUNNING)
        ]

    def life(self) -> dict[str, int]:
        """Take one request through its life, then another with the same prefix."""
        keys = os.urandom(self.num_blocks * BYTES_PER_KEY)
        times = [perf_counter_ns()]
        first = self.empty.reserve(self.num_tokens, keys)
        times.append(perf_counter_ns())
        self.empty.commit(first.lease_id, keys)
        times.append(perf_counter_ns())
        self.empty.release(first.lease_id)
        times.append(perf_counter_ns())
        again = self.empty.reserve(self.num_tokens + 1, keys)
        times.append(perf_counter_ns())
        assert (first.device_hit_tokens, again.device_hit_tokens) == (0, self.num_tokens)
        self.empty.release(again.lease_id)
        times.append(perf_counter_ns())
        self.empty.evict(self.num_blocks * self.num_groups)
        times.append(perf_counter_ns())
        reserve, commit, release, hit, _, evict = (
            after - before for before, after in itertools.pairwise(times)
        )
        return {
            "reserve": reserve,
            "commit": commit,
            "release": release,
            "hit": hit,
            "evict": evict,
        }

    def round(self) -> dict[str, float]:
        """Return the median nanoseconds of each figure."""
        calls = range(CALLS[self.num_blocks])
        with without_collector():
            lives = [self.life() for _ in calls]
            figures: dict[str, float] = {
                name: median([life[name] for life in lives]) for name in lives[0]
            }
            figures["churn"] = median([self.churn() for _ in calls])
            figures["extend"] = median([self.extend() for _ in calls]) / NUM_RUNNING
        self.shrink()
        return figures


def _beside(num_blocks: int, process: Process | None) -> list[Figure]:
    """Return the figures of requests of one size, each with its goal."""
    times = {name: times for name, (_, times) in TIMES.items()}
    if num_blocks == max(CALLS):
        times |= TIMES_OF_LARGE
    return beside("manager", Sizes(num_blocks), process, times)


def beside(
    what: str, sizes: Sizes, process: Process | None, times: dict[str, int], window_tokens: int = 0
) -> list[Figure]:
    """Return the figures of requests of one size; the first round of either side only warms up."""
    rounds: list[dict[str, float]] = []
    floors: list[dict[str, float]] = []
    for _ in range(1 + ROUNDS):
        rounds.append(sizes.round())
        if process is not None:
            num_calls = CALLS[sizes.num_blocks]
            floors.append(ask(process, sizes.num_blocks, num_calls, window_tokens))
    return [
        figure(
            f"{what}: {TIMES[name][0]}, {sizes.num_blocks} blocks",
            [one[name] for one in rounds[1:]],
            [one[name] for one in floors[1:]],
            times[name],
        )
        for name in TIMES
    ]


# Pools ----------------------------------------------------------------------------------------------------------------


def _over_pools() -> list[Figure]:
    """Return the cost per block of a request's whole life in full pools, from small to large."""
    pools = [FullPool(num_in_pool) for num_in_pool in POOLS]
    sides = [once for pool in pools for once in (pool.hit, pool.churn)]
    rounds = in_turns(sides, calls_a_round=100)
    figures = []
    for first, what in enumerate(
        ("reserve of hits + release", "evict + reserve + commit + release")
    ):
        smallest = rounds[first]
        for num_in_pool, taken in zip(POOLS, rounds[first::2], strict=True):
            ratio = paired(taken, smallest)
            figures.append(
                Figure(
                    name=f"manager: {what} of {BLOCKS_EACH} blocks, per block, in a pool of {num_in_pool:,}",
                    ours=median(taken) / BLOCKS_EACH,
                    floor=median(smallest) / BLOCKS_EACH,
                    unit="ns",
                    ratio=ratio,
                    goal="≤ 1.3 x",
                    holds=ratio <= 1.3,
                    note=f"floor: the same in a pool of {POOLS[0]:,}",
                )
            )
    return figures


def _memory(num_in_pool: int) -> Figure:
    """Return the bytes of all arrays that a pool keeps, besides the records that contain the keys."""
    pool = Holder(num_in_pool, one_group(1)).cache._state.device
    arrays = [
        one
        for owner in (pool, pool.index, pool.order)
        for one in vars(owner).values()
        if isinstance(one, np.ndarray) and one.base is None
    ]
    ours = sum(one.nbytes for one in arrays) / num_in_pool
    return Figure(
        name=f"manager: memory beside the records, per block, in a pool of {num_in_pool:,}",
        ours=ours,
        unit="B",
        goal=f"≤ {BYTES_PER_BLOCK_MAX} B",
        holds=ours <= BYTES_PER_BLOCK_MAX,
        note="index, eviction order, holds, marks, free list; the records have 69 B, 32 of them the key",
    )


class FullPool:
    """A pool with only cached blocks."""

    def __init__(self, num_blocks: int) -> None:
        """Fill the pool, one large request at a time."""
        self.holder = Holder(num_blocks, one_group(BLOCKS_AT_ONCE))
        # The oldest chains may have been evicted again.
        num_known = max(CHAINS_KNOWN_MIN, num_blocks // BLOCKS_AT_ONCE // 2)
        self.known: deque[bytes] = deque(maxlen=num_known)
        for at_once, count in (
            (BLOCKS_AT_ONCE, num_blocks // BLOCKS_AT_ONCE),
            (BLOCKS_EACH, num_blocks % BLOCKS_AT_ONCE // BLOCKS_EACH),
        ):
            for _ in range(count):
                self.known.append(os.urandom(at_once * BYTES_PER_KEY))
                self.holder.cache_keys(self.known[-1])
        self._choose = np.random.default_rng(0)

    def hit(self) -> int:
        """Reserve cached blocks, and release them."""
        chain = self.known[self._choose.integers(len(self.known))]
        keys = chain[: BLOCKS_EACH * BYTES_PER_KEY]
        start = perf_counter_ns()
        reserved = self.holder.reserve(BLOCKS_EACH * TOKENS_PER_BLOCK, keys)
        self.holder.release(reserved.lease_id)
        taken = perf_counter_ns() - start
        assert reserved.device_hit_tokens == BLOCKS_EACH * TOKENS_PER_BLOCK
        return taken

    def churn(self) -> int:
        """Reserve new blocks in the place of cached ones."""
        keys = os.urandom(BLOCKS_EACH * BYTES_PER_KEY)
        start = perf_counter_ns()
        self.holder.cache_keys(keys)
        taken = perf_counter_ns() - start
        self.known.append(keys)
        return taken
