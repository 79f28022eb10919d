"""Own the figures of the core in process: the cost of the state itself, without sockets and without a floor."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, perf_counter_ns
from typing import Final

import numpy as np
from measure import Figure, Once, in_turns, known

from kvlease.groups import keeps_everything
from kvlease.ids import Epoch, WorkerId
from kvleased.core import Cache, CacheShape, commands
from kvleased.core.blocks.records import CacheRecords
from kvleased.core.effects import Reserved, Stepped
from kvleased.core.verbs.stepping import StepVerb

NUM_BLOCKS: Final = 64
NUM_REQUESTS: Final = 256
BYTES_PER_KEY: Final = 32
WORKER: Final = WorkerId(1)
SHAPE: Final = CacheShape(
    num_blocks=65_536,
    num_slots=0,
    groups=(keeps_everything(16, 8_192),),
    hash_tokens=16,
    hit_tokens=16,
)


def core_alone(directory: Path) -> list[Figure]:  # noqa: ARG001 - every benchmark gets one
    """Measure reserve and release without keys, with a full hit and with misses, and a step."""
    names = map(str, itertools.count())
    sides = (
        _pair(names, b""),
        _pair(names, _committed(names)),
        _misses(names),
        _step(names),
    )
    none, hit, missed, step = in_turns(sides, calls_a_round=300)
    what = f"core alone: reserve + release of {NUM_BLOCKS} blocks"
    return [
        known(f"{what}, no keys", none),
        known(f"{what}, all of them hits", hit),
        known(f"{what}, {NUM_BLOCKS} keys that miss", missed),
        known(f"core alone: step of {NUM_REQUESTS} requests", step, "one in 16 takes a block"),
    ]


_CACHE: Final = Cache(SHAPE, CacheRecords.plain(SHAPE), Epoch(1))
_CACHE.handle(commands.Attach(worker_id=WORKER, tenant_digest=7), monotonic())


def _reserve(name: str, keys: bytes, num_tokens: int) -> Reserved:
    command = commands.Reserve(worker_id=WORKER, request_id=name, keys=keys, num_tokens=num_tokens)
    reply = _CACHE.handle(command, monotonic()).reply
    assert isinstance(reply, Reserved)
    return reply


def _release(reserved: Reserved) -> None:
    command = commands.Release(worker_id=WORKER, lease_id=reserved.lease_id)
    _CACHE.handle(command, monotonic())


def _pair(names: Iterator[str], keys: bytes) -> Once:
    """Measure a reserve and its release with the same keys each time; the last token is never a hit."""
    num_tokens = NUM_BLOCKS * SHAPE.hash_tokens + (1 if keys else 0)
    num_hits = len(keys) // BYTES_PER_KEY

    def once() -> int:
        name = next(names)
        start = perf_counter_ns()
        reserved = _reserve(name, keys, num_tokens)
        _release(reserved)
        taken = perf_counter_ns() - start
        assert reserved.device_hit_tokens == num_hits * SHAPE.hash_tokens
        return taken

    return once


def _misses(names: Iterator[str]) -> Once:
    def once() -> int:
        name, keys = next(names), os.urandom(NUM_BLOCKS * BYTES_PER_KEY)
        start = perf_counter_ns()
        _release(_reserve(name, keys, NUM_BLOCKS * SHAPE.hash_tokens))
        return perf_counter_ns() - start

    return once


def _committed(names: Iterator[str]) -> bytes:
    """Commit blocks, and return their keys."""
    keys = os.urandom(NUM_BLOCKS * BYTES_PER_KEY)
    num_tokens = NUM_BLOCKS * SHAPE.hash_tokens
    reserved = _reserve(next(names), keys, num_tokens)
    command = commands.Commit(
        worker_id=WORKER,
        lease_id=reserved.lease_id,
        num_tokens=num_tokens,
        first_block=0,
        keys=keys,
    )
    _CACHE.handle(command, monotonic())
    _release(reserved)
    return keys


def _step(names: Iterator[str]) -> Once:
    num_tokens = np.arange(NUM_REQUESTS, dtype=np.int32) % SHAPE.hash_tokens + 1
    ids = [_reserve(next(names), b"", count).lease_id for count in num_tokens.tolist()]
    lease_ids = np.array(ids, np.int64).tobytes()
    verbs = bytes([StepVerb.EXTEND]) * NUM_REQUESTS

    def once() -> int:
        np.add(num_tokens, 1, out=num_tokens)
        command = commands.Step(
            worker_id=WORKER, verbs=verbs, lease_ids=lease_ids, num_tokens=num_tokens.tobytes()
        )
        start = perf_counter_ns()
        reply = _CACHE.handle(command, monotonic()).reply
        taken = perf_counter_ns() - start
        assert isinstance(reply, Stepped)
        assert len(reply.block_ids) == NUM_REQUESTS // SHAPE.hash_tokens * 4
        return taken

    return once
