"""Own the figures of a serving engine's calls: a step of running requests, and a fully cached long prompt."""

import itertools
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Final

import numpy as np
from calls import Echo, attached, bench_node, tapped
from measure import NS_PER_US, Figure, Once, in_turns
from node import TOKENS_PER_BLOCK

from kvlease import Worker
from kvlease.ids import BYTES_PER_KEY
from kvlease.v1 import kvlease_pb2 as pb

NUM_RUNNING: Final = 64
STEP_US_MAX: Final = 150
BLOCKS_OF_PROMPT: Final = 4_096
HIT_US_MAX: Final = 5_000


def serving(directory: Path) -> list[Figure]:
    """Measure both over the local socket, including the library and the transport."""
    return [
        _figure(directory / "step", f"step of {NUM_RUNNING} running requests", _steps, STEP_US_MAX),
        _figure(
            directory / "hit", f"reserve of {BLOCKS_OF_PROMPT} blocks, all hit", _hits, HIT_US_MAX
        ),
    ]


def _figure(directory: Path, name: str, measured: Callable[[Worker], Once], most_us: int) -> Figure:
    """Measure a call beside an echo of the same bytes, which shows the transport's cost."""
    with ExitStack() as stack:
        node = stack.enter_context(bench_node(directory))
        worker = stack.enter_context(attached(node.local))
        echo = stack.enter_context(Echo.over(directory))
        ours = measured(worker)
        with tapped(worker) as sent:
            ours()
        taken, floor = in_turns((ours, echo.once_of(sent[:1])), calls_a_round=60)
    ours_us, floor_us = median(taken) / NS_PER_US, median(floor) / NS_PER_US
    return Figure(
        name=f"local socket: {name}",
        ours=ours_us,
        floor=floor_us,
        unit="µs",
        ratio=ours_us / floor_us,
        goal=f"≤ {most_us} µs",
        holds=ours_us <= most_us,
        note="seen by the worker; floor: an echo",
    )


def _steps(worker: Worker) -> Once:
    """Return a step whose requests grow by a token or not at all, one in 16 into a new block."""
    num_tokens = np.arange(NUM_RUNNING, dtype=np.int32) % TOKENS_PER_BLOCK + 1
    leases = [
        worker.reserve(f"running-{index}", num_tokens=count)
        for index, count in enumerate(num_tokens.tolist())
    ]
    lease_ids = np.array([lease.lease_id for lease in leases], np.int64)
    verbs = np.full(NUM_RUNNING, pb.STEP_VERB_EXTEND, np.uint8)

    def once() -> int:
        np.add(num_tokens, 1, out=num_tokens)
        start = perf_counter_ns()
        columns, _ = worker.step(verbs=verbs, lease_ids=lease_ids, num_tokens=num_tokens)
        taken = perf_counter_ns() - start
        assert not columns.codes.any()
        return taken

    return once


def _hits(worker: Worker) -> Once:
    """Return the reserve of a prompt that is cached up to its last block; its release is not counted."""
    keys = os.urandom(BLOCKS_OF_PROMPT * BYTES_PER_KEY)
    num_tokens = BLOCKS_OF_PROMPT * TOKENS_PER_BLOCK
    with worker.reserve("first", num_tokens=num_tokens, keys=keys) as lease:
        lease.commit(num_tokens, keys)
    names = map("again-{}".format, itertools.count())

    def once() -> int:
        name = next(names)
        start = perf_counter_ns()
        lease = worker.reserve(name, num_tokens=num_tokens, keys=keys)
        taken = perf_counter_ns() - start
        assert lease.hit_tokens == num_tokens
        lease.release()
        return taken

    return once
