"""Own the simulation of a trace: how many of its keys each policy finds in a pool of each size."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from time import perf_counter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvlease.errors import InvalidError
from kvlease.traces import Simulated, Trace
from kvlease.units import TOKENS_MAX, checked_count
from kvleased.traces.bound import belady_hits
from kvleased.traces.policies import BELADY, POLICIES, policy_named
from kvleased.traces.shadow import ShadowPool

Named = TypeVar("Named", str, int)

_SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Sizes that are simulated unless others are named, as shares of the number of distinct keys."""


def simulate(
    trace: Trace, policies: Sequence[str] = (), sizes: Sequence[int] = ()
) -> Iterator[Simulated]:
    """Yield what each policy finds in a pool of each size; by default of all policies and some sizes.

    Raises:
        InvalidError: a policy is not known, a size is out of its range, or the trace has no keys.
    """
    names = [policy_named(one, (*POLICIES, BELADY)) for one in policies or POLICIES]
    sizes = [checked_count("blocks", one, least=1, most=TOKENS_MAX) for one in sizes]
    if not len(trace.key_ids):
        raise InvalidError("the trace has no keys, so there is nothing to find", resource="trace")
    return _simulated(trace, _once(names), _once(sizes or default_sizes(trace)))


def _once(named: Sequence[Named]) -> list[Named]:
    """Return the named values, each once, in the order in which they first occur."""
    return list(dict.fromkeys(named))


def default_sizes(trace: Trace) -> list[int]:
    """Return sizes from pools that are far too small for a trace to pools that hold half of its keys."""
    return sorted({max(1, round(share * trace.num_distinct)) for share in _SHARES})


def digests_of(trace: Trace) -> NDArray[np.uint64]:
    """Return 64 bits for each key that look like a digest, because policies are made for digests."""
    mixed = trace.key_ids.astype(np.uint64) + np.uint64(1)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _simulated(trace: Trace, policies: list[str], sizes: Sequence[int]) -> Iterator[Simulated]:
    digests, offsets = digests_of(trace), trace.offsets.tolist()
    requests = list(pairwise(offsets))
    for num_blocks in sizes:
        started = perf_counter()
        bound = belady_hits(trace, num_blocks)
        for policy in policies:
            num_hits = bound
            if policy != BELADY:
                started = perf_counter()
                # Blocks beyond the trace's keys would stay empty, and the pool keeps books for each.
                pool = ShadowPool(policy, min(num_blocks, trace.num_distinct))
                num_hits = sum(pool.ask(digests[begin:end]) for begin, end in requests)
            yield Simulated(
                policy=policy,
                num_blocks=num_blocks,
                num_requests=len(trace),
                num_keys=len(trace.key_ids),
                num_hits=num_hits,
                num_hits_bound=bound,
                seconds=perf_counter() - started,
            )
