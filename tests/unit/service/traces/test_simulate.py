"""Laws of simulation: it counts what a plain simulator counts, and no policy finds more than the bound."""

import os
import tracemalloc
from pathlib import Path

import pytest

from kvlease.errors import InvalidError
from kvlease.trace_files import read_trace
from kvleased.traces import BELADY, POLICIES, default_sizes, simulate
from kvleased.traces.bound import belady_hits
from tests.unit.service.traces.made import (
    Requests,
    most_hits,
    plain_hits,
    random_requests,
    trace_of,
)

PLAIN = ("fifo", "root-lru", "leaf-lru")
CUT = Path(__file__).parents[3] / "fixtures" / "traces" / "conversation-1000.jsonl"
PUBLISHED = os.environ.get("KVLEASE_TRACES", "")
SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
PERCENT = {
    "fifo": (4.3, 5.2, 10.5, 18.2, 25.8, 33.4),
    "root-lru": (4.5, 5.4, 11.0, 21.1, 28.8, 35.5),
    "leaf-lru": (4.5, 5.4, 11.2, 21.2, 28.8, 35.5),
    BELADY: (19.1, 25.5, 34.1, 36.6, 36.6, 36.6),
}
"""Hits that an independent simulator found in the conversation trace."""


def hits(requests: Requests, policy: str, num_blocks: int) -> int:
    """Return the hits that the simulation counts."""
    (found,) = simulate(trace_of(requests), [policy], [num_blocks])
    return found.num_hits


@pytest.mark.parametrize("policy", PLAIN)
def test_counts_what_a_plain_simulator_counts(policy: str) -> None:
    """On any small trace the hits equal the plain simulator's, also if requests are longer than the pool."""
    for seed in range(150):
        requests = random_requests(seed, num_requests=30, num_keys=14, longest=5)
        num_blocks = 2 + seed % 9

        assert hits(requests, policy, num_blocks) == plain_hits(requests, policy, num_blocks), seed


@pytest.mark.parametrize("policy", PLAIN)
def test_counts_the_same_on_a_real_trace(policy: str) -> None:
    """The hits are also equal on a real trace, in a pool so small that the policy matters."""
    trace = read_trace(CUT, 250)
    requests = [trace.keys_of(request).tolist() for request in range(len(trace))]

    (found,) = simulate(trace, [policy], [400])

    assert 0 < found.num_hits == plain_hits(requests, policy, 400)


def test_bound_is_the_most_that_can_be_found() -> None:
    """On tiny traces the best possible choice of keys finds exactly as many as the bound."""
    for seed in range(40):
        requests = random_requests(seed, num_requests=7, num_keys=6, longest=3)

        for num_blocks in (1, 2, 3):
            bound = belady_hits(trace_of(requests), num_blocks)
            assert bound == most_hits(requests, num_blocks), (seed, num_blocks)


@pytest.mark.parametrize(
    "num_blocks",
    [pytest.param(6, marks=pytest.mark.thorough), pytest.param(12, marks=pytest.mark.thorough), 24],
)
def test_no_policy_finds_more_than_the_bound(num_blocks: int) -> None:
    """No policy finds more hits than the bound, which knows the future, in a pool of the same size."""
    for seed in range(60):
        requests = random_requests(seed, num_requests=60, num_keys=30, longest=6)

        for found in simulate(trace_of(requests), POLICIES, [num_blocks]):
            assert found.num_hits <= found.num_hits_bound, (seed, found.policy)


@pytest.mark.parametrize("policy", [*POLICIES, BELADY])
def test_pool_that_holds_all_finds_all_that_came_before(policy: str) -> None:
    """If nothing needs to leave, every policy finds each key, except the first time."""
    requests = random_requests(1, num_requests=50, num_keys=20, longest=5)
    distinct = {key for keys in requests for key in keys}

    (found,) = simulate(trace_of(requests), [policy], [len(distinct)])

    assert found.num_hits == found.num_keys - len(distinct) == found.num_hits_bound
    assert found.hit_ratio == found.bound_hit_ratio == found.num_hits / found.num_keys


@pytest.mark.parametrize("policy", POLICIES)
def test_pool_beyond_all_keys_takes_no_memory_for_the_rest(policy: str) -> None:
    """A pool far larger than its trace finds what one finds that holds all, and takes no more memory."""
    trace = trace_of(random_requests(3, num_requests=50, num_keys=20, longest=5))

    tracemalloc.start()
    try:
        whole, larger = simulate(trace, [policy], [trace.num_distinct, 10_000_000])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert (larger.num_blocks, larger.num_hits) == (10_000_000, whole.num_hits)
    assert peak_bytes < 10_000_000


def test_every_policy_and_size_is_simulated_unless_named() -> None:
    """Without names there is a result for each policy in pools of growing size."""
    trace = trace_of(random_requests(2, num_requests=200, num_keys=100, longest=6))

    results = list(simulate(trace))

    sizes = default_sizes(trace)
    assert [(one.policy, one.num_blocks) for one in results] == [
        (policy, num_blocks) for num_blocks in sizes for policy in POLICIES
    ]


def test_lru_is_leaf_first() -> None:
    """The name "lru" means the daemon's own policy, "leaf-lru"; naming both simulates it once."""
    requests = random_requests(3, num_requests=20, num_keys=10, longest=4)

    assert [one.policy for one in simulate(trace_of(requests), ["lru", "leaf-lru"], [4])] == [
        "leaf-lru"
    ]


def test_what_is_named_twice_is_simulated_once() -> None:
    """Policies and sizes are answered in the order in which they are first named, each once."""
    requests = random_requests(3, num_requests=20, num_keys=10, longest=4)

    results = simulate(trace_of(requests), ["fifo", "arc", "fifo"], [6, 4, 6])

    assert [(one.policy, one.num_blocks) for one in results] == [
        ("fifo", 6), ("arc", 6), ("fifo", 4), ("arc", 4),
    ]  # fmt: skip


def test_unknown_policy_is_refused_with_the_known_ones() -> None:
    """The refusal lists the known policies and names the one that was probably meant."""
    with pytest.raises(InvalidError, match=r"did you mean fifo\?.*belady"):
        simulate(trace_of([[1]]), ["fifoo"], [4])


@pytest.mark.parametrize("sizes", [[0], [-1], [10**12]])
def test_size_that_is_none_is_refused(sizes: list[int]) -> None:
    """A pool has at least one block."""
    with pytest.raises(InvalidError, match="blocks"):
        simulate(trace_of([[1]]), ["fifo"], sizes)


def test_trace_without_keys_is_refused() -> None:
    """A trace without keys has no hit ratio and is refused."""
    with pytest.raises(InvalidError, match="no keys"):
        simulate(trace_of([[], []]), ["fifo"], [4])


@pytest.mark.skipif(not PUBLISHED, reason="KVLEASE_TRACES does not name the published traces")
def test_published_trace_gives_the_known_ratios() -> None:
    """The conversation trace gives what an independent simulator found, within 0.3 points."""
    trace = read_trace(Path(PUBLISHED) / "conversation_trace.jsonl")

    for found in simulate(trace, list(PERCENT), SIZES):
        known = PERCENT[found.policy][SIZES.index(found.num_blocks)]
        assert abs(100 * found.hit_ratio - known) <= 0.3, found
