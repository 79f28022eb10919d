"""Small traces to test with, and a simulator that is too plain to be wrong."""

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from random import Random

import numpy as np

from kvlease.traces import Trace, dense

Requests = Sequence[Sequence[int]]


def trace_of(requests: Requests) -> Trace:
    """Return the trace of some requests for keys, one a millisecond."""
    lengths = [len(keys) for keys in requests]
    return Trace(
        times_ms=np.arange(len(requests)),
        input_tokens=np.array(lengths, np.int64) * 512,
        output_tokens=np.zeros(len(requests), np.int64),
        offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        key_ids=dense(np.array([key for keys in requests for key in keys], np.int64)),
    )


def random_requests(seed: int, num_requests: int, num_keys: int, longest: int) -> list[list[int]]:
    """Return requests that are paths of a random tree, so that each key names a whole prefix."""
    random = Random(seed)  # noqa: S311 - nothing is secret
    paths: list[list[int]] = []
    for key in range(num_keys):
        parents = [path for path in paths if len(path) < longest]
        parent = random.choice([[], *parents])
        paths.append([*parent, key])
    return [random.choice(paths) for _ in range(num_requests)]


def plain_hits(requests: Requests, policy: str, num_blocks: int) -> int:
    """Return how many keys are found, by a list of keys with the next to leave first."""
    pool: list[int] = []
    num_hits = 0
    for keys in requests:
        for key in keys:
            if key not in pool:
                break
            num_hits += 1
        held = list(keys[:num_blocks])
        new = [key for key in held if key not in pool]
        others = [key for key in pool if key not in held]
        num_evicted = max(0, len(pool) + len(new) - num_blocks)
        evicted = others[:num_evicted]
        if policy == "fifo":
            pool = [key for key in pool if key not in evicted] + new
        else:
            last = held[::-1] if policy == "leaf-lru" else held
            pool = [key for key in others if key not in evicted] + last
    return num_hits


def most_hits(requests: Requests, num_blocks: int) -> int:
    """Return the most keys that can be found, by trying all that could be kept after each request."""
    asked = [tuple(keys) for keys in requests]

    @cache
    def best(request: int, kept: frozenset[int]) -> int:
        if request == len(asked):
            return 0
        num_hits = next(
            (place for place, key in enumerate(asked[request]) if key not in kept),
            len(asked[request]),
        )
        known = kept | set(asked[request])
        choices = combinations(sorted(known), min(num_blocks, len(known)))
        return num_hits + max(best(request + 1, frozenset(choice)) for choice in choices)

    return best(0, frozenset())
