"""Laws of ghosts: they find what the simulation finds, or nearly so by a sample, and their backlog is bounded."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from kvlease.errors import InvalidError
from kvlease.trace_files import read_trace
from kvleased.traces import simulate
from kvleased.traces.ghosts import (
    KEYS_WAITING_MAX,
    Ghost,
    GhostCache,
    GhostFigures,
    Ghosts,
    distinct,
    read_ghosts,
)
from kvleased.traces.simulate import digests_of
from tests.unit.service.traces.made import random_requests, trace_of

CUT = Path(__file__).parents[3] / "fixtures" / "traces" / "conversation-1000.jsonl"
REQUESTS = random_requests(5, num_requests=3_000, num_keys=900, longest=24)


def packed(keys: list[int]) -> bytes:
    """Return keys as a reserve brings them."""
    return b"".join(blake3(key.to_bytes(8, "little")).digest() for key in keys)


def digests(keys: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Return the part of each key that a ghost looks at."""
    return np.frombuffer(packed(keys), "<u8")[::4]


def test_ghost_finds_what_the_simulation_finds() -> None:
    """Fed with requests as they come, a ghost counts the hits of a simulation with its policy and size."""
    (expected,) = simulate(trace_of(REQUESTS), ["leaf-lru"], [200])
    ghosts = Ghosts(read_ghosts(["leaf-lru@200"]), num_blocks=16)

    for keys in REQUESTS:
        ghosts.offer(packed(keys))
        ghosts.work(seconds=0)

    assert not ghosts.is_behind
    assert ghosts.figures() == (
        GhostFigures(name="leaf-lru@200", num_keys=expected.num_keys, num_hits=expected.num_hits),
    )


@pytest.mark.parametrize("rate", [2, 4, 8])
def test_sample_finds_nearly_as_much(rate: int) -> None:
    """On a real trace, a ghost that looks at a sample of the keys is within four points of one that looks at all."""
    trace = read_trace(CUT)
    names, offsets = digests_of(trace), trace.offsets
    whole = GhostCache("leaf-lru", 4_096)
    sample = GhostCache("leaf-lru", 4_096, keys_held_max=4_096 // rate)

    for begin, end in pairwise(offsets.tolist()):
        whole.ask(names[begin:end])
        sample.ask(names[begin:end])

    assert (whole.rate, sample.rate) == (1, rate)
    assert whole.num_keys == sample.num_keys == len(trace.key_ids)
    assert abs(whole.num_hits - sample.num_hits) <= 0.04 * whole.num_keys


def test_ghost_without_blocks_is_as_large_as_the_cache() -> None:
    """A ghost with a policy alone has the cache's own size; if a key takes two blocks, it has half as many keys."""
    ghosts = Ghosts(read_ghosts(["fifo", "lru@6"]), num_blocks=8, blocks_per_key=2.0)

    for keys in ([0, 1, 2, 3], [0, 1, 2, 3]):
        ghosts.offer(packed(keys))
    ghosts.work(seconds=10)

    assert ghosts.figures() == (
        GhostFigures(name="fifo@8", num_keys=8, num_hits=4),
        GhostFigures(name="leaf-lru@6", num_keys=8, num_hits=3),
    )


def test_backlog_is_bounded_and_drops_are_counted() -> None:
    """Keys that come while too many wait are dropped all together."""
    ghosts = Ghosts(read_ghosts(["fifo"]), num_blocks=8)
    half = bytes(32 * (KEYS_WAITING_MAX // 2))

    for _ in range(3):
        ghosts.offer(half)

    assert ghosts.num_dropped == KEYS_WAITING_MAX // 2
    assert repr(ghosts).endswith(f"{KEYS_WAITING_MAX} keys waiting, {ghosts.num_dropped} dropped>")


def test_keys_that_come_twice_count_once() -> None:
    """A request with a key twice, which should not happen, counts it once."""
    assert distinct(np.array([7, 5, 7, 9, 5], np.uint64)).tolist() == [7, 5, 9]


def test_ghosts_are_read_as_written() -> None:
    """A ghost is a policy, or a policy and a size."""
    assert read_ghosts(["lru@20000", "fifo"]) == (
        Ghost(policy="leaf-lru", num_blocks=20_000),
        Ghost(policy="fifo", num_blocks=0),
    )
    assert [ghost.name for ghost in read_ghosts(["lru@20000", "fifo"])] == [
        "leaf-lru@20000",
        "fifo",
    ]


@pytest.mark.parametrize(
    ("written", "why"),
    [
        pytest.param(["mru"], "the policies are fifo, ", id="policy"),
        pytest.param(["belady@9"], "belady needs to know the future.*trace simulate", id="bound"),
        pytest.param(["fifo@"], "not have a number of blocks", id="nothing"),
        pytest.param(["fifo@0"], "not have a number of blocks", id="zero"),
        pytest.param(["fifo@1e3"], "not have a number of blocks", id="float"),
        pytest.param(["fifo@" + "9" * 5000], "not have a number of blocks", id="huge"),
        pytest.param(["fifo", "fifo"], "named twice", id="twice"),
        pytest.param(
            ["fifo@1", "fifo@2", "fifo@3", "fifo@4"],
            "4 ghosts are named; name at most 3",
            id="many",
        ),
    ],
)
def test_ghost_that_is_none_is_refused(written: list[str], why: str) -> None:
    """The refusal says what could be written instead."""
    with pytest.raises(InvalidError, match=why):
        read_ghosts(written)
