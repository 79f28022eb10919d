"""What the daemon promises to every adapter."""

import asyncio
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlease.errors import (
    BusyError,
    CacheInUseError,
    DrainingError,
    IdReusedError,
    InvalidError,
    LayoutMismatchError,
    NeverFitsError,
    NotYoursError,
    PoolFullError,
    StaleEpochError,
    StartingError,
    TooLargeError,
    UnknownCacheError,
    UnknownWorkerError,
    WrongStateError,
)
from kvlease.keys import BlockKeys
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.callers import Caller
from kvleased.events import Events
from kvleased.memory.cpu import map_region
from kvleased.presence import Presence

from .conftest import OPERATOR, TOKENS_PER_BLOCK, Node, inputs, keys


async def test_equal_registration_finds_the_cache(node: Node) -> None:
    """Registering the same again returns the same cache and creates nothing."""
    async with node.life():
        await node.register()

        reply = await node.ask(
            "register_cache", pb.RegisterCacheRequest(cache="main", inputs=inputs())
        )

        assert not reply.created
        assert reply.info.status == "ready"


async def test_different_registration_names_what_differs(node: Node) -> None:
    """Registering something else under a name that is taken is refused with the fields that differ."""
    async with node.life():
        await node.register()

        with pytest.raises(
            LayoutMismatchError,
            match=r"tokens_per_block \(4, not 8\).*; delete it \(kvlease delete --cache main\), or",
        ):
            await node.ask(
                "register_cache",
                pb.RegisterCacheRequest(cache="main", inputs=inputs(tokens_per_block=8)),
            )


async def test_concurrent_registrations_create_one_cache(node: Node) -> None:
    """Of many equal registrations at once, exactly one creates the cache."""
    async with node.life():
        request = pb.RegisterCacheRequest(cache="main", inputs=inputs())

        replies = await asyncio.gather(*(node.ask("register_cache", request) for _ in range(5)))

        assert [reply.created for reply in replies].count(True) == 1


async def test_registration_above_the_memory_limit_never_fits(node: Node) -> None:
    """A cache larger than what is left of the limit is refused with need, available and limit."""
    async with node.life():
        request = pb.RegisterCacheRequest(cache="main", inputs=inputs(device_blocks=1 << 22))

        with pytest.raises(NeverFitsError) as refusal:
            await node.ask("register_cache", request)

        assert refusal.value.need == (1 << 22) * 512 + 8 * 512
        assert refusal.value.limit == refusal.value.available == 1 << 30


async def test_reserve_before_memory_is_there_is_told_to_come_back(node: Node) -> None:
    """While a cache is populating, reserve is refused as STARTING with the bytes that are there."""
    async with node.life():
        await node.ask("register_cache", pb.RegisterCacheRequest(cache="main", inputs=inputs()))
        node.daemon.registry.cache("main").status = "populating"
        worker = await node.attach()

        with pytest.raises(StartingError) as refusal:
            await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=1), worker)

        assert refusal.value.retry_after_ms


async def test_evicted_bytes_come_back(node: Node) -> None:
    """Bytes that a worker wrote and committed are the same after evict and reload, checksums verified."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()
        fd = daemon.registry.cache("main").fds["device.0"]
        device = map_region(fd, 16 * 512).reshape(16, 512)
        lease = await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=8), worker)
        for place, block in enumerate(np.frombuffer(lease.block_ids, np.int32)):
            device[block] = place + 1
        commit = pb.CommitRequest(lease_id=lease.lease_id, num_tokens=8, keys=keys(1, 2))
        await node.ask("commit", commit, worker)

        evicted = await node.ask("evict", pb.EvictRequest(lease_id=lease.lease_id), worker)
        device[:] = 0xEE
        reloaded = await node.ask("reload", pb.ReloadRequest(lease_id=lease.lease_id), worker)

        assert (evicted.num_offloaded, reloaded.num_reloaded, reloaded.num_tokens) == (2, 2, 8)
        blocks = np.frombuffer(reloaded.block_ids, np.int32)
        assert [set(device[block].tolist()) for block in blocks] == [{1}, {2}]


async def test_waiting_reserve_is_granted_when_room_comes(node: Node) -> None:
    """A reserve that waits is answered as soon as another lease is released."""
    async with node.life():
        await node.register()
        worker = await node.attach()
        first = await node.ask("reserve", pb.ReserveRequest(request_id="a", num_tokens=64), worker)

        waiting = node.daemon.call(
            "reserve", pb.ReserveRequest(request_id="b", num_tokens=64, wait_ms=10_000), worker
        )
        assert isinstance(waiting, asyncio.Future)
        assert not waiting.done()
        await node.ask("release", pb.ReleaseRequest(lease_id=first.lease_id), worker)

        granted = await waiting
        assert isinstance(granted, pb.ReserveResponse)
        assert granted.lease_id != first.lease_id


async def test_waiting_reserve_is_refused_at_its_deadline(node: Node) -> None:
    """A reserve that waits in vain is refused at its deadline, not at the next tick."""
    async with node.life():
        await node.register()
        worker = await node.attach()
        await node.ask("reserve", pb.ReserveRequest(request_id="a", num_tokens=64), worker)
        loop = asyncio.get_running_loop()

        started = loop.time()
        with pytest.raises(PoolFullError):
            await node.ask(
                "reserve", pb.ReserveRequest(request_id="b", num_tokens=64, wait_ms=20), worker
            )

        assert loop.time() - started < node.settings.tick_seconds / 2


async def test_cancelled_call_leaves_the_queue(node: Node) -> None:
    """A caller who goes away does not stand in the queue any more."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()
        await node.ask("reserve", pb.ReserveRequest(request_id="a", num_tokens=64), worker)
        waiting = daemon.call(
            "reserve", pb.ReserveRequest(request_id="b", num_tokens=64, wait_ms=10_000), worker
        )
        assert isinstance(waiting, asyncio.Future)

        daemon.cancel(waiting)

        assert daemon.registry.cache("main").core.census().num_waiting == 0


async def test_keys_are_computed_for_raw_token_ids(node: Node) -> None:
    """A reserve with token ids finds what was committed under the keys that the library computes."""
    async with node.life() as daemon:
        info = await node.register()
        worker = await node.attach()
        tokens = np.arange(8, dtype=np.int32)
        tenant_key = daemon.registry.worker(worker.token).tenant_key
        naming = BlockKeys(tenant_key, info.plan.layout_fingerprint, info.plan.model_digest)
        lease = await node.ask("reserve", pb.ReserveRequest(request_id="a", num_tokens=8), worker)
        packed = naming.chain(tokens, TOKENS_PER_BLOCK)
        await node.ask(
            "commit", pb.CommitRequest(lease_id=lease.lease_id, num_tokens=8, keys=packed), worker
        )

        again = pb.ReserveRequest(request_id="b", num_tokens=12, token_ids=tokens.tobytes())
        reply = await node.ask("reserve", again, worker)

        assert reply.device_hit_tokens == 8


async def test_step_answers_each_operation(node: Node) -> None:
    """One step extends, commits, releases and reserves; what fails alone says so by its code."""
    async with node.life():
        await node.register()
        worker = await node.attach()
        lease = await node.ask("reserve", pb.ReserveRequest(request_id="a", num_tokens=4), worker)
        step = pb.StepRequest(
            verbs=bytes([1, 1, 3]),
            lease_ids=struct.pack("<3q", lease.lease_id, 77, lease.lease_id),
            num_tokens=struct.pack("<3i", 8, 8, 0),
            reserves=[pb.ReserveRequest(request_id="b", num_tokens=4)],
        )

        reply = await node.ask("step", step, worker)

        assert struct.unpack("<3i", reply.codes) == (0, 8, 0)
        assert struct.unpack("<3i", reply.num_blocks) == (1, 0, 0)
        assert reply.reserves[0].granted.lease_id > lease.lease_id


async def test_retry_with_the_same_key_has_one_effect(node: Node) -> None:
    """A call repeated under its idempotency key gets the first answer; another body under it is refused."""
    async with node.life() as daemon:
        await node.register()
        token = (await node.attach()).token
        caller = Caller(transport="rest", token=token, idempotency_key="k1")
        request = pb.ReserveRequest(request_id="a", num_tokens=4)

        first, second = (
            await node.ask("reserve", request, caller),
            await node.ask("reserve", request, caller),
        )

        assert first == second
        assert daemon.registry.cache("main").core.census().num_leases == 1
        with pytest.raises(IdReusedError):
            await node.ask("reserve", pb.ReserveRequest(request_id="a", num_tokens=8), caller)


async def test_stale_epoch_is_refused_before_anything_else(node: Node) -> None:
    """A call of another epoch changes nothing, except attach, which is how a worker learns the new one."""
    async with node.life() as daemon:
        await node.register()
        stale = Caller(transport="rest", epoch=daemon.epoch - 1)

        with pytest.raises(StaleEpochError):
            await node.ask("list_caches", pb.ListCachesRequest(), stale)

        reply = await node.ask("attach", pb.AttachRequest(cache="main"), stale)
        assert reply.epoch == daemon.epoch


async def test_cache_with_workers_is_not_deleted(node: Node) -> None:
    """A cache goes only when no worker is attached, and then all its memory goes with it."""
    async with node.life() as daemon:
        await node.register()
        kept_before = len(node.store)
        worker = await node.attach()
        with pytest.raises(CacheInUseError):
            await node.ask("delete_cache", pb.DeleteCacheRequest(cache="main"))
        await node.ask("detach", pb.DetachRequest(), worker)

        await node.ask("delete_cache", pb.DeleteCacheRequest(cache="main"))

        with pytest.raises(UnknownCacheError):
            daemon.registry.cache("main")
        await node.register("other")
        assert len(node.store) == kept_before


async def test_deleted_cache_tells_how_many_pins_ended_with_it(node: Node) -> None:
    """Pins do not keep a cache, and whoever deletes it learns of them; a purge of no disk store is a delete."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()
        lease = await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=8), worker)
        commit = pb.CommitRequest(lease_id=lease.lease_id, num_tokens=8, keys=keys(1, 2))
        await node.ask("commit", commit, worker)
        await node.ask("pin", pb.PinRequest(keys=keys(1, 2)))
        await node.ask("detach", pb.DetachRequest(), worker)

        told = await node.ask("delete_cache", pb.DeleteCacheRequest(cache="main", purge=True))

        assert told == pb.DeleteCacheResponse(num_pins=1)
        assert not daemon.registry.caches


async def test_clear_takes_the_digest_that_lists_show(node: Node) -> None:
    """A tenant whose name is not known any more can be cleared by what stands for it; another digest is nobody's."""
    async with node.life():
        await node.register()
        worker = await node.attach(tenant="acme")
        lease = await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=8), worker)
        commit = pb.CommitRequest(lease_id=lease.lease_id, num_tokens=8, keys=keys(1, 2))
        await node.ask("commit", commit, worker)
        await node.ask("detach", pb.DetachRequest(), worker)
        listed = await node.ask("inspect", pb.InspectRequest(cache="main", what="tenants"))
        (digest,) = [one.tenant for one in listed.tenants if one.used_blocks]

        nobody = await node.ask("clear", pb.ClearRequest(cache="main", tenant="0" * 16))
        found = await node.ask("clear", pb.ClearRequest(cache="main", tenant=digest))

        assert len(digest) == 16
        assert (nobody.num_device, found.num_device) == (0, 2)


async def test_readiness_tells_who_drains(node: Node) -> None:
    """A cache that is drained is named where the daemon is ready; a daemon says how an operator's drain ends."""
    async with node.life() as daemon:
        await node.register()

        await node.ask("drain", pb.DrainRequest(cache="main"), OPERATOR)
        assert daemon.readiness == (True, "degraded: drained: main")
        await node.ask("drain", pb.DrainRequest(), OPERATOR)
        is_ready, reason = daemon.readiness
        assert (is_ready, "kvlease drain --undo" in reason) == (False, True)


async def test_daemon_whose_sockets_are_gone_is_not_ready(node: Node, tmp_path: Path) -> None:
    """Nobody can connect to a socket that was removed or replaced: readiness says which, until it is back."""
    path, aside = tmp_path / "kvlease.sock", tmp_path / "aside"
    path.touch()
    async with node.life() as daemon:
        presence = Presence(daemon.note_unreachable)
        presence.start([path])

        presence.look()
        before = daemon.readiness
        path.rename(aside)
        presence.look()
        gone = daemon.readiness
        path.touch()
        presence.look()
        replaced = daemon.readiness
        aside.replace(path)
        presence.look()
        presence.stop()

        assert before == daemon.readiness == (True, "ready")
        assert gone == replaced
        assert not gone[0]
        assert str(path) in gone[1]
        assert "restart the daemon" in gone[1]


async def test_draining_daemon_admits_nobody(node: Node) -> None:
    """While it drains the daemon is not ready and grants nothing new."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()
        assert daemon.readiness == (True, "ready")

        await daemon.drain(0)

        is_ready, reason = daemon.readiness
        assert (is_ready, "told to stop" in reason) == (False, True)
        for verb, request, caller in (
            ("attach", pb.AttachRequest(cache="main"), OPERATOR),
            ("reserve", pb.ReserveRequest(request_id="a", num_tokens=4), worker),
        ):
            with pytest.raises(DrainingError) as caught:
                await node.ask(verb, request, caller)
            assert (caught.value.resource, caught.value.retry_after_ms) == ("daemon", 5_000)


async def test_operator_names_the_cache_when_there_are_several(node: Node) -> None:
    """An operator's call is about the only cache, or the one that it names; a worker's about its own."""
    async with node.life():
        await node.register("one")
        assert (await node.ask("lookup", pb.LookupRequest(keys=keys(1, 1)))).num_device_blocks == 0
        await node.register("two")

        with pytest.raises(InvalidError, match="one, two"):
            await node.ask("lookup", pb.LookupRequest(keys=keys(1, 1)))

        named = Caller(transport="rest", cache="two")
        await node.ask("lookup", pb.LookupRequest(keys=keys(1, 1)), named)


async def test_workers_are_limited(node: Node) -> None:
    """One worker more than the limit is refused with the limit."""
    node.settings = node.settings.model_copy(update={"max_workers": 1})
    async with node.life():
        await node.register()
        await node.attach()

        with pytest.raises(BusyError) as refusal:
            await node.attach()

        assert refusal.value.limit == 1


async def test_unknown_token_is_refused(node: Node) -> None:
    """A token that attach never returned is no worker's, whatever the verb."""
    async with node.life():
        await node.register()
        for verb, request in (
            ("release", pb.ReleaseRequest(lease_id=1)),
            ("lookup", pb.LookupRequest()),
        ):
            with pytest.raises(UnknownWorkerError):
                await node.ask(verb, request, Caller(transport="rest", token="made up"))


MALFORMED: list[tuple[str, Any, type[Exception], str]] = [
    ("reserve", pb.ReserveRequest(request_id="", num_tokens=1), InvalidError, "request_id"),
    ("reserve", pb.ReserveRequest(request_id="a\nb", num_tokens=1), InvalidError, "request_id"),
    ("reserve", pb.ReserveRequest(request_id="a" * 129, num_tokens=1), InvalidError, "request_id"),
    ("reserve", pb.ReserveRequest(request_id="a"), InvalidError, "num_tokens"),
    ("reserve", pb.ReserveRequest(request_id="a", num_tokens=1 << 31), InvalidError, "num_tokens"),
    ("reserve", pb.ReserveRequest(request_id="a", num_tokens=1, keys=b"x"), InvalidError, "keys"),
    (
        "reserve",
        pb.ReserveRequest(request_id="a", num_tokens=1, keys=bytes(32 * 16_385)),
        TooLargeError,
        "keys",
    ),
    (
        "reserve",
        pb.ReserveRequest(request_id="a", num_tokens=1, wait_ms=60_001),
        InvalidError,
        "wait_ms",
    ),
    (
        "reserve",
        pb.ReserveRequest(request_id="a", num_tokens=1, token_ids=b"xyz"),
        InvalidError,
        "token_ids",
    ),
    (
        "reserve",
        pb.ReserveRequest(request_id="a", num_tokens=1, token_ids=bytes(4 * 131_073)),
        TooLargeError,
        "token_ids",
    ),
    (
        "reserve",
        pb.ReserveRequest(request_id="a", num_tokens=3, token_ids=bytes(16)),
        InvalidError,
        "token_ids has 4 tokens, num_tokens is 3",
    ),
    (
        "reserve",
        pb.ReserveRequest(request_id="a", num_tokens=4, token_ids=bytes(16), keys=bytes(32)),
        InvalidError,
        "token_ids",
    ),
    ("extend", pb.ExtendRequest(lease_id=0, num_tokens=1), InvalidError, "lease_id"),
    ("fork", pb.ForkRequest(lease_id=5, num_tokens=1), InvalidError, "request_id"),
    ("trim", pb.TrimRequest(lease_id=5), InvalidError, "num_tokens"),
    ("release", pb.ReleaseRequest(lease_id=-4), InvalidError, "lease_id"),
    ("evict", pb.EvictRequest(), InvalidError, "lease_id, keys, num_blocks"),
    ("evict", pb.EvictRequest(num_blocks=1, keys=bytes(32)), InvalidError, "keys, num_blocks"),
    ("reload", pb.ReloadRequest(), InvalidError, "lease_id, keys"),
    ("unpin", pb.UnpinRequest(), InvalidError, "pin_id"),
    ("heartbeat", pb.HeartbeatRequest(lease_ids=b"1234567"), InvalidError, "lease_ids"),
    ("heartbeat", pb.HeartbeatRequest(newest_lease_id=-1), InvalidError, "newest_lease_id"),
    ("step", pb.StepRequest(verbs=b"\x01", lease_ids=bytes(8)), InvalidError, "num_tokens"),
    (
        "step",
        pb.StepRequest(reserves=[pb.ReserveRequest(request_id="a", num_tokens=1, wait_ms=1)]),
        InvalidError,
        r"reserves\[0\].wait_ms",
    ),
    ("step", pb.StepRequest(verbs=bytes(8_193)), TooLargeError, "verbs"),
    ("attach", pb.AttachRequest(cache="Main"), InvalidError, "cache"),
    ("attach", pb.AttachRequest(cache="main", lease_ids=bytes(8)), InvalidError, "lease_ids"),
    ("attach", pb.AttachRequest(cache="main", tenant="a\tb"), InvalidError, "tenant"),
    ("attach", pb.AttachRequest(cache="main", engine="Engine 1"), InvalidError, "engine"),
    ("attach", pb.AttachRequest(cache="main", engine="e" * 64), InvalidError, "engine"),
    (
        "attach",
        pb.AttachRequest(cache="main", layout_fingerprint="00"),
        LayoutMismatchError,
        "layout",
    ),
    ("attach", pb.AttachRequest(cache="gone"), UnknownCacheError, "gone"),
    ("register_cache", pb.RegisterCacheRequest(cache="x/y"), InvalidError, "cache"),
    (
        "register_cache",
        pb.RegisterCacheRequest(cache="x", options=pb.CacheOptions(integrity="crc")),
        InvalidError,
        "integrity",
    ),
    ("watch", pb.WatchRequest(), InvalidError, "watch"),
]


@pytest.mark.parametrize(
    ("verb", "request_", "error", "names"),
    MALFORMED,
    ids=[f"{number}-{case[0]}-{case[3]}" for number, case in enumerate(MALFORMED)],
)
async def test_malformed_calls_are_refused(
    node: Node, verb: str, request_: Any, error: type[Exception], names: str
) -> None:
    """A malformed call is refused with the name of the field, and changes nothing."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()
        before = daemon.registry.cache("main").core.census()

        with pytest.raises(error, match=names):
            await node.ask(verb, request_, worker)

        assert daemon.registry.cache("main").core.census() == before


async def test_lease_of_another_worker_is_not_touched(node: Node) -> None:
    """A worker can name another's lease, and is told that it is not its own."""
    async with node.life():
        await node.register()
        owner, other = await node.attach(), await node.attach()
        lease = await node.ask("reserve", pb.ReserveRequest(request_id="a", num_tokens=4), owner)

        for caller in (other, OPERATOR):
            with pytest.raises(NotYoursError):
                await node.ask("evict", pb.EvictRequest(lease_id=lease.lease_id), caller)


async def test_engine_of_a_worker_survives_a_restart(node: Node) -> None:
    """A worker stays its engine's, over lives of the daemon, and cannot become another one's."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach(engine="engine-1")
        assert daemon.registry.worker(worker.token).engine == "engine-1"

    async with node.life() as daemon:
        assert daemon.registry.worker(worker.token).engine == "engine-1"
        for engine in ("", "engine-1"):
            await node.attach(resume_token=worker.token, engine=engine)
        with pytest.raises(InvalidError, match="engine differs"):
            await node.attach(resume_token=worker.token, engine="engine-2")
        with pytest.raises(InvalidError, match="rank is 1"):
            await node.attach(resume_token=worker.token, engine="engine-1", rank=1)
        with pytest.raises(WrongStateError, match="rank 0 of this engine"):
            await node.attach(engine="engine-1")
        await node.attach(engine="engine-1", tenant="another")


async def test_tenants_have_keys_of_their_own(node: Node) -> None:
    """Two tenants get different keys, one tenant the same each time."""
    async with node.life() as daemon:
        await node.register()
        tokens = [(await node.attach(tenant=tenant)).token for tenant in ("a", "b", "a")]

        first, second, third = (daemon.registry.worker(token).tenant_key for token in tokens)

        assert first == third != second


async def test_what_an_answer_leaves_is_settled_before_the_next(node: Node) -> None:
    """An answer may leave before its effects are carried out, but no other comes between them."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()

        daemon.answer("reserve", pb.ReserveRequest(request_id="a", num_tokens=4), worker)
        seen = [repr(daemon.events)]
        daemon.answer("stats", pb.StatsRequest(), worker)
        seen.append(repr(daemon.events))

        assert seen == ["<Events 2 seen, 0 watchers>", "<Events 3 seen, 0 watchers>"]


async def test_fault_in_what_an_answer_leaves_harms_nobody(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has its answer already; the fault is logged, and the daemon goes on."""
    async with node.life():
        await node.register()
        worker = await node.attach()

        with monkeypatch.context() as patch:
            patch.setattr(Events, "append", lambda *_, **__: 1 / 0)
            granted = await node.ask(
                "reserve", pb.ReserveRequest(request_id="a", num_tokens=4), worker
            )
        released = await node.ask("release", pb.ReleaseRequest(lease_id=granted.lease_id), worker)

        assert released.released


async def test_events_tell_what_happened(node: Node) -> None:
    """A watcher sees a registration, an attachment and a grant, in this order and numbered."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()
        await node.ask("reserve", pb.ReserveRequest(request_id="a", num_tokens=4), worker)

        watcher = daemon.watch(pb.WatchRequest())
        events = [await anext(watcher) for _ in range(3)]

        assert [event.kind for event in events] == [
            "cache_registered",
            "worker_attached",
            "lease_granted",
        ]
        assert [event.sequence - events[0].sequence for event in events] == [0, 1, 2]
        await watcher.aclose()  # type: ignore[attr-defined]  # a generator behind the protocol
