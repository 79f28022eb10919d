"""Own Belady's bound: how many keys a pool could find at most if it knew the future.

Between two requests a pool can keep some of the keys that were asked for so far; a key that is kept until it is asked
for again is a hit. If there are more keys than fit, those that are asked for last leave: no other choice gives more
hits. A key is never asked for without the keys before it in its prompt, so these never leave before it, and what is
kept is always a prefix.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from kvlease.traces import Trace


def belady_hits(trace: Trace, num_blocks: int) -> int:
    """Return how many keys are found at most; a key counts only if all keys before it in its request are found.

    The request that is being served takes no room. So this is a bound for every policy, which none may reach.
    """
    never = len(trace)
    next_uses = next_requests(trace).tolist()
    names, offsets = trace.key_ids.tolist(), trace.offsets.tolist()
    kept: dict[int, int] = {}
    last: list[tuple[int, int, int]] = []
    num_hits = 0
    for request in range(len(trace)):
        begin, end = offsets[request], offsets[request + 1]
        is_prefix = True
        for place in range(begin, end):
            is_prefix = kept.pop(names[place], None) is not None and is_prefix
            num_hits += is_prefix
            next_use = next_uses[place]
            if next_use != never:
                kept[names[place]] = next_use
                # If keys are asked for together, the last of the prompt leaves first.
                heapq.heappush(last, (-next_use, -place, names[place]))
        while len(kept) > num_blocks:
            use, _, name = heapq.heappop(last)
            if kept.get(name) == -use:
                del kept[name]
    return num_hits


def next_requests(trace: Trace) -> NDArray[np.int64]:
    """Return for each key of the trace the next request that asks for it, or the number of requests if none does."""
    requests = np.arange(len(trace)).repeat(np.diff(trace.offsets))
    order = trace.key_ids.argsort(kind="stable")
    names, times = trace.key_ids[order], requests[order]
    following = np.full(len(order), len(trace), np.int64)
    following[:-1] = np.where(names[1:] == names[:-1], times[1:], len(trace))
    found = np.empty_like(following)
    found[order] = following
    return found
