"""Laws of traces: each request is recorded once its lease has ended, without its keys, and ghosts see all."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import numpy as np
import pytest

from kvlease.errors import BusyError, InvalidError, NotYoursError, UnknownCacheError
from kvlease.ids import LeaseId, WorkerId
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.core.commands import Exchange
from kvleased.core.effects import Reserved
from kvleased.core.magazine_replies import Exchanged
from kvleased.metrics import Metrics
from kvleased.traces import ghosts, recording
from kvleased.verbs.surveys import surveys
from tests.unit.service.conftest import OPERATOR, TOKENS_PER_BLOCK, Node, inputs, keys
from tests.unit.service.core.builders import a_cache, a_reserve

TRACE = pb.TraceRequest(cache="main")


async def begun(node: Node) -> AsyncIterator[Any]:
    """Return a trace that is being recorded."""
    trace = node.daemon.stream("trace", TRACE, OPERATOR)
    first = await anext(trace)
    assert (first.key_digests, first.tokens_per_key) == (b"", TOKENS_PER_BLOCK)
    return trace


async def reserve(node: Node, worker: Caller, name: str, packed: bytes, num_tokens: int) -> int:
    """Lease blocks and return the lease."""
    request = pb.ReserveRequest(request_id=name, keys=packed, num_tokens=num_tokens)
    return int((await node.ask("reserve", request, worker)).lease_id)


async def serve(node: Node, worker: Caller, name: str, packed: bytes) -> None:
    """Serve a request from its reserve to its release."""
    num_tokens = len(packed) // 32 * TOKENS_PER_BLOCK
    lease_id = await reserve(node, worker, name, packed, num_tokens)
    commit = pb.CommitRequest(lease_id=lease_id, num_tokens=num_tokens, keys=packed)
    await node.ask("commit", commit, worker)
    await node.ask("release", pb.ReleaseRequest(lease_id=lease_id), worker)


def digests(record: pb.TraceResponse) -> list[int]:
    """Return the digests of a record."""
    return list(np.frombuffer(record.key_digests, "<u8").tolist())


async def test_request_is_told_when_its_lease_has_ended(node: Node) -> None:
    """A record has input, output and hit tokens; equal keys have equal digests, and other keys other digests."""
    async with node.life():
        await node.register()
        worker = await node.attach()
        await serve(node, worker, "before", keys(0, 2))
        trace = await begun(node)

        lease_id = await reserve(node, worker, "a", keys(0, 3), 13)
        await node.ask("extend", pb.ExtendRequest(lease_id=lease_id, num_tokens=21), worker)
        await node.ask("release", pb.ReleaseRequest(lease_id=lease_id), worker)
        await serve(node, worker, "b", keys(2, 2))

        first, second = await anext(trace), await anext(trace)
    assert (first.input_tokens, first.output_tokens, first.hit_tokens) == (12, 9, 8)
    assert (second.input_tokens, second.output_tokens, second.hit_tokens) == (8, 0, 0)
    assert digests(first)[2] == digests(second)[0]
    assert len({*digests(first), *digests(second)}) == 4
    assert first.timestamp_ms <= second.timestamp_ms


async def test_recording_ends_with_its_cache(node: Node) -> None:
    """A recording tells all requests of a cache that is deleted, and then that it was; the next cache has others."""
    async with node.life():
        await node.register()
        worker = await node.attach()
        trace = await begun(node)
        late: Any = node.daemon.stream("trace", TRACE, OPERATOR)
        await serve(node, worker, "a", keys(0, 3))
        await reserve(node, worker, "b", keys(3, 2), 8)
        await node.ask("detach", pb.DetachRequest(), worker)

        await node.ask("delete_cache", pb.DeleteCacheRequest(cache="main"))
        await node.register()

        told = [(await anext(trace)).input_tokens for _ in range(2)]
        assert told == [12, 8]
        with pytest.raises(UnknownCacheError, match="main was deleted"):
            await asyncio.wait_for(anext(trace), 10)
        assert (await anext(late)).tokens_per_key == TOKENS_PER_BLOCK
        with pytest.raises(UnknownCacheError, match="main was deleted"):
            await asyncio.wait_for(anext(late), 10)


async def test_keys_mean_nothing_outside_of_their_trace(node: Node) -> None:
    """Two traces of one request share no digest, and no digest shows bytes of a key."""
    async with node.life():
        await node.register()
        worker = await node.attach()
        one, two = await begun(node), await begun(node)

        await serve(node, worker, "a", keys(7, 3))

        told = [await anext(one), await anext(two)]
    known = set(np.frombuffer(keys(7, 3), "<u8").tolist())
    assert not set(digests(told[0])) & set(digests(told[1]))
    assert not known & {*digests(told[0]), *digests(told[1])}


async def test_steps_are_noted_like_single_calls(node: Node) -> None:
    """Reserves, extends, commits and releases of a step make the same record."""
    async with node.life():
        await node.register()
        worker = await node.attach()
        trace = await begun(node)
        granting = pb.StepRequest(
            reserves=[pb.ReserveRequest(request_id="a", keys=keys(0, 2), num_tokens=8)]
        )
        granted = await node.ask("step", granting, worker)
        lease_id = granted.reserves[0].granted.lease_id
        ending = pb.StepRequest(
            verbs=bytes([pb.STEP_VERB_EXTEND, pb.STEP_VERB_COMMIT, pb.STEP_VERB_RELEASE]),
            lease_ids=np.array([lease_id] * 3, "<i8").tobytes(),
            num_tokens=np.array([14, 8, 0], "<i4").tobytes(),
            num_keys=np.array([0, 2, 0], "<i4").tobytes(),
            first_blocks=np.array([0, 0, 0], "<i4").tobytes(),
            keys=keys(0, 2),
        )

        await node.ask("step", ending, worker)

        record = await anext(trace)
    assert (record.input_tokens, record.output_tokens) == (8, 6)


async def test_lease_that_ends_with_its_worker_is_told(node: Node) -> None:
    """A lease that nobody releases is recorded at the next tick after its worker has died."""
    async with node.life():
        await node.register()
        worker = await node.attach()
        trace = await begun(node)
        await reserve(node, worker, "a", keys(0, 2), 8)

        await node.ask("detach", pb.DetachRequest(), worker)

        async with asyncio.timeout(10):
            assert (await anext(trace)).input_tokens == 8


async def test_only_what_is_granted_after_the_beginning_is_told(node: Node) -> None:
    """Leases from before the trace and requests without keys are left out; a live lease is not recorded yet."""
    async with node.life():
        await node.register()
        worker = await node.attach()
        early = await reserve(node, worker, "early", keys(0, 1), 4)
        trace = await begun(node)

        await node.ask("release", pb.ReleaseRequest(lease_id=early), worker)
        nameless = await reserve(node, worker, "nameless", b"", 4)
        await node.ask("release", pb.ReleaseRequest(lease_id=nameless), worker)
        await reserve(node, worker, "live", keys(5, 1), 4)
        await serve(node, worker, "last", keys(9, 3))

        assert (await anext(trace)).input_tokens == 12


async def test_slow_reader_is_told_how_many_it_missed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that do not fit are dropped, and the next record says how many; one without keys if no other comes."""
    monkeypatch.setattr(recording, "REQUESTS_QUEUED_MAX", 2)
    async with node.life():
        await node.register()
        worker = await node.attach()
        trace = await begun(node)
        for number in range(5):
            await serve(node, worker, f"{number}", keys(number, 1))

        told = [(await anext(trace)).num_dropped for _ in range(2)]
        await serve(node, worker, "6", keys(6, 1))

        assert [*told, (await anext(trace)).num_dropped] == [0, 0, 3]
        for number in range(7, 10):
            await serve(node, worker, f"{number}", keys(number, 1))
        last = [await anext(trace) for _ in range(3)][2]
        assert (last.num_dropped, last.key_digests) == (1, b"")


async def test_nothing_is_kept_when_nobody_records(node: Node) -> None:
    """Before the first trace there is no observer, and after the last trace it keeps nothing."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()
        await serve(node, worker, "a", keys(0, 1))
        entry = daemon.registry.cache("main")
        assert entry.observer is None

        trace: Any = await begun(node)
        await reserve(node, worker, "b", keys(0, 1), 4)
        assert repr(entry.observer) == "<Observer 1 recordings, 1 requests>"
        await trace.aclose()
        await reserve(node, worker, "c", keys(0, 1), 4)

        assert repr(entry.observer) == "<Observer 0 recordings, 0 requests>"


async def test_trace_is_the_operators(node: Node) -> None:
    """A worker may not trace; an unknown cache and one trace too many are refused as well."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()

        with pytest.raises(NotYoursError, match="operator's token"):
            daemon.stream("trace", TRACE, worker)
        with pytest.raises(UnknownCacheError):
            daemon.stream("trace", pb.TraceRequest(cache="other"), OPERATOR)
        traces = [await begun(node) for _ in range(recording.WATCHERS_MAX)]
        with pytest.raises(BusyError, match="4 traces"):
            daemon.stream("trace", TRACE, OPERATOR)
        assert len(traces) == recording.WATCHERS_MAX


async def test_long_request_is_digested_key_by_key() -> None:
    """However many keys a request has, each has its own digest, and equal keys have equal ones."""
    observer = recording.Observer(a_cache(2), TOKENS_PER_BLOCK)
    trace = observer.record(0.0)
    await anext(trace)

    for lease_id, first in ((1, 0), (2, 300)):
        asked = a_reserve(1200, f"{lease_id}", keys(first, 1200))
        granted = Reserved(
            lease_id=LeaseId(lease_id), covered_tokens=4, block_ids=b"", row=0, device_hit_tokens=0, host_hit_tokens=0,
        )  # fmt: skip
        observer.saw(asked, granted, 1.5)
    observer.tick()

    one, two = digests(await anext(trace)), digests(await anext(trace))
    assert (len(one), len({*one, *two})) == (1200, 1500)
    assert one[300:] == two[:900]


async def test_keys_of_an_exchange_are_told_as_a_request_that_has_ended() -> None:
    """Keys that an exchange asks to hold are a prefix; a cached key that is not held counts when asked for again."""
    observer = recording.Observer(a_cache(2), TOKENS_PER_BLOCK)
    trace = observer.record(0.0)
    await anext(trace)

    for held in ((7, 3, -1, 5), (7, -2, -2, -2), (-2, -2, -2, -2), (4, 5, 6, 7)):
        command = Exchange(worker_id=WorkerId(1), sequence=1, hold_keys=keys(0, 4))
        observer.saw(command, exchanged(*held), 1.5)
    observer.saw(Exchange(worker_id=WorkerId(1), sequence=1), exchanged(), 1.5)

    told = [await anext(trace) for _ in range(3)]
    numbers = [(one.input_tokens, one.output_tokens, one.hit_tokens) for one in told]
    per_key = TOKENS_PER_BLOCK
    assert numbers == [
        (4 * per_key, 0, 2 * per_key), (per_key, 0, per_key), (4 * per_key, 0, 4 * per_key),
    ]  # fmt: skip
    assert digests(told[1]) == digests(told[0])[:1]


async def test_keys_that_nobody_was_asked_for_are_told_as_a_request_that_found_nothing() -> None:
    """Keys that a worker knew to be absent are recorded as a miss; without a trace nothing is kept."""
    observer = recording.Observer(a_cache(2), TOKENS_PER_BLOCK)
    command = Exchange(worker_id=WorkerId(1), sequence=1, missed_keys=keys(0, 4))
    observer.saw(command, exchanged(), 1.0)
    trace = observer.record(0.0)
    await anext(trace)

    observer.saw(command, exchanged(), 1.5)

    told = await anext(trace)
    assert (told.input_tokens, told.hit_tokens) == (4 * TOKENS_PER_BLOCK, 0)
    assert len(digests(told)) == 4


async def test_requests_that_missed_the_same_keys_are_told_one_by_one() -> None:
    """Where a key comes again in an exchange's missed keys, another request begins; a trace names no key twice."""
    observer = recording.Observer(a_cache(2), TOKENS_PER_BLOCK)
    trace = observer.record(0.0)
    await anext(trace)
    missed = keys(0, 4) + keys(0, 3) + keys(0, 3) + keys(9, 1)

    observer.saw(Exchange(worker_id=WorkerId(1), sequence=1, missed_keys=missed), exchanged(), 1.5)

    async with asyncio.timeout(10):
        told = [await anext(trace) for _ in range(3)]
    assert [one.input_tokens // TOKENS_PER_BLOCK for one in told] == [4, 3, 4]
    assert digests(told[0])[:3] == digests(told[1]) == digests(told[2])[:3]


async def test_key_that_an_exchange_names_twice_is_told_once() -> None:
    """Keys that an exchange asks to hold are told without repetitions, with the hits of what is told."""
    observer = recording.Observer(a_cache(2), TOKENS_PER_BLOCK)
    trace = observer.record(0.0)
    await anext(trace)
    command = Exchange(worker_id=WorkerId(1), sequence=1, hold_keys=keys(0, 2) + keys(0, 3))

    observer.saw(command, exchanged(7, 3, 7, 3, -1), 1.5)

    told = await anext(trace)
    assert told.input_tokens == 3 * TOKENS_PER_BLOCK
    assert told.hit_tokens == 2 * TOKENS_PER_BLOCK
    assert len(set(digests(told))) == 3


def exchanged(*held: int) -> Exchanged:
    """Return the answer to an exchange that asked for blocks to be held."""
    return Exchanged(
        published=b"", retracted=b"", dropped=b"", held_blocks=np.array(held, "<i4").tobytes(), held_all_blocks=b"",
        held_all_keys=b"", taken_blocks=b"", num_taken_running=0, num_available=1, num_magazines=1,
    )  # fmt: skip


async def haunted(node: Node, *ghosts: str) -> None:
    """Register a cache with ghosts and wait until it is ready."""
    options = pb.CacheOptions(ghosts=ghosts)
    request = pb.RegisterCacheRequest(cache="main", inputs=inputs(), options=options)
    await node.ask("register_cache", request)
    await node.register()


async def ghost_stats(node: Node, num_keys: int) -> list[tuple[str, int, int]]:
    """Return what the ghosts found once they have seen so many keys."""
    async with asyncio.timeout(10):
        while True:
            stats = await node.ask("stats", pb.StatsRequest(cache="main"))
            found = [(one.name, one.num_keys, one.num_hits) for one in stats.caches[0].ghosts]
            if all(seen == num_keys for _, seen, _ in found):
                return found
            await asyncio.sleep(0.01)


async def test_ghosts_see_every_granted_request(node: Node) -> None:
    """Stats and metrics show what another policy and another size would have found."""
    async with node.life() as daemon:
        await haunted(node, "fifo", "lru@2")
        worker = await node.attach()
        for number in range(2):
            await serve(node, worker, f"{number}", keys(0, 3))

        assert await ghost_stats(node, 6) == [("fifo@16", 6, 3), ("leaf-lru@2", 6, 2)]
        metrics = Metrics()
        metrics.watch_caches(lambda: surveys(daemon.registry))
        assert b'kvlease_ghost_hits_total{cache="main",ghost="leaf-lru@2"} 2.0' in metrics.render()
        assert b'kvlease_ghost_keys_total{cache="main",ghost="fifo@16"} 6.0' in metrics.render()
        assert b'kvlease_ghost_dropped_keys_total{cache="main"} 0.0' in metrics.render()


async def test_ghosts_see_a_request_that_is_sent_again_once(node: Node) -> None:
    """A retry is granted nothing new, so it is no hit of a ghost either; under its name another request may come."""
    async with node.life():
        await haunted(node, "fifo@16")
        worker = await node.attach()
        again = worker._replace(idempotency_key="key")

        for caller in (worker, again, again):
            lease_id = await reserve(node, caller, "a", keys(0, 3), 12)

        assert await ghost_stats(node, 3) == [("fifo@16", 3, 0)]
        await node.ask("release", pb.ReleaseRequest(lease_id=lease_id), worker)
        await reserve(node, worker, "a", keys(0, 3), 12)
        assert await ghost_stats(node, 6) == [("fifo@16", 6, 3)]


async def test_ghosts_come_back_empty_after_a_restart(node: Node) -> None:
    """The next life has the same ghosts, and their counters start at zero, as all counters do."""
    async with node.life():
        await haunted(node, "fifo@8")
        await serve(node, await node.attach(), "a", keys(0, 2))

    async with node.life():
        assert await ghost_stats(node, 0) == [("fifo@8", 0, 0)]


async def test_ghosts_that_are_no_longer_known_do_not_stop_a_start(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ghost that another version wrote and this one cannot read is forgotten."""
    async with node.life():
        await haunted(node, "fifo@8")

    def knows_none(_: object) -> NoReturn:
        raise InvalidError("there are no such ghosts", resource="ghosts")

    monkeypatch.setattr(ghosts, "read_ghosts", knows_none)
    async with node.life() as daemon:
        assert daemon.registry.cache("main").ghosts is None


async def test_ghost_that_is_none_is_refused_at_registration(node: Node) -> None:
    """A malformed ghost is refused, and the cache is not registered."""
    async with node.life() as daemon:
        with pytest.raises(InvalidError, match="the policies are fifo, "):
            await haunted(node, "mru")
        assert not daemon.registry.caches
