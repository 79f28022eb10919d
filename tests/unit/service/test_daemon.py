"""What the daemon promises to every adapter."""

import asyncio
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from kvlease.errors import (
    BusyError,
    DrainingError,
    IdReusedError,
    InvalidError,
    NotYoursError,
    PoolFullError,
    StaleEpochError,
    StartingError,
    UnknownCacheError,
    UnknownWorkerError,
    WrongStateError,
)
from kvlease.keys import BlockKeys
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.control.presence import Presence
from kvleased.memory.cpu import map_region
from kvleased.telemetry.events import Events

from .conftest import OPERATOR, TOKENS_PER_BLOCK, Node, inputs, keys


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
    """A caller that goes away leaves the queue."""
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
    """A reserve with token ids finds what was committed under the keys that the client library computes."""
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
    """One step extends, commits, releases and reserves; an operation that fails has its code, and the others go on."""
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
    """A call repeated under its idempotency key gets the first answer; another body under that key is refused."""
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


async def test_retry_names_no_blocks_that_others_may_have(node: Node) -> None:
    """A reserve that is repeated after its lease has ended gets a lease, and not the blocks of the one that ended."""
    async with node.life() as daemon:
        await node.register()
        token = (await node.attach()).token
        caller = Caller(transport="rest", token=token, idempotency_key="k1")
        worker = caller._replace(idempotency_key="")
        request = pb.ReserveRequest(request_id="a", num_tokens=4)
        first = await node.ask("reserve", request, caller)
        await node.ask("release", pb.ReleaseRequest(lease_id=first.lease_id), worker)
        other = await node.ask("reserve", pb.ReserveRequest(request_id="b", num_tokens=4), worker)

        again = await node.ask("reserve", request, caller)

        assert again.lease_id not in {first.lease_id, other.lease_id}
        assert again.block_ids != other.block_ids
        assert daemon.registry.cache("main").core.census().num_leases == 2


async def test_key_of_a_call_about_one_cache_is_refused_for_another(node: Node) -> None:
    """The answer to a call about one cache is no answer to the same call about another."""
    async with node.life():
        for name in ("main", "other"):
            await node.register(name)
        caller = OPERATOR._replace(idempotency_key="k1", cache="main")
        request = pb.LookupRequest(keys=bytes(32))
        first = await node.ask("lookup", request, caller)

        assert await node.ask("lookup", request, caller) == first
        with pytest.raises(IdReusedError):
            await node.ask("lookup", request, caller._replace(cache="other"))


@pytest.mark.parametrize(
    ("verb", "request_"),
    [
        pytest.param("evict", pb.EvictRequest(num_blocks=1), id="evict"),
        pytest.param("lookup", pb.LookupRequest(keys=bytes(32)), id="lookup"),
        pytest.param("reserve", pb.ReserveRequest(request_id="r", num_tokens=4), id="reserve"),
    ],
)
async def test_call_of_a_worker_about_another_cache_is_refused(
    node: Node, verb: str, request_: Any
) -> None:
    """A worker's call that names another cache is not carried out on the worker's own."""
    async with node.life() as daemon:
        for name in ("main", "other"):
            await node.register(name)
        attached = await node.ask("attach", pb.AttachRequest(cache="main"), OPERATOR)
        caller = Caller(transport="rest", token=attached.token)

        for name in ("other", "nowhere"):
            with pytest.raises(NotYoursError, match=f"cache {name} is not the worker's cache"):
                await node.ask(verb, request_, caller._replace(cache=name))

        assert daemon.registry.cache("main").core.census().num_leases == 0
        await node.ask(verb, request_, caller._replace(cache="main"))


async def test_stale_epoch_is_refused_before_anything_else(node: Node) -> None:
    """A call of another epoch is refused and changes nothing; only attach works, since it tells the new epoch."""
    async with node.life() as daemon:
        await node.register()
        stale = Caller(transport="rest", epoch=daemon.epoch - 1)

        with pytest.raises(StaleEpochError):
            await node.ask("list_caches", pb.ListCachesRequest(), stale)

        reply = await node.ask("attach", pb.AttachRequest(cache="main"), stale)
        assert reply.epoch == daemon.epoch


async def test_readiness_tells_who_drains(node: Node) -> None:
    """Readiness names a drained cache and stays ready; of a drained daemon it says how an operator ends the drain."""
    async with node.life() as daemon:
        await node.register()

        await node.ask("drain", pb.DrainRequest(cache="main"), OPERATOR)
        assert daemon.readiness == (True, "degraded: drained: main")
        await node.ask("drain", pb.DrainRequest(), OPERATOR)
        is_ready, reason = daemon.readiness
        assert (is_ready, "kvlease drain --undo" in reason) == (False, True)


async def test_daemon_whose_sockets_are_gone_is_not_ready(node: Node, tmp_path: Path) -> None:
    """If a socket was removed or replaced, nobody can connect, and readiness says which one until it is back."""
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
    """A draining daemon is not ready and grants nothing new."""
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
    """A token that no attach returned is refused, whatever the verb."""
    async with node.life():
        await node.register()
        for verb, request in (
            ("release", pb.ReleaseRequest(lease_id=1)),
            ("lookup", pb.LookupRequest()),
        ):
            with pytest.raises(UnknownWorkerError):
                await node.ask(verb, request, Caller(transport="rest", token="made up"))


async def test_lease_of_another_worker_is_not_touched(node: Node) -> None:
    """A worker that names another worker's lease is told that the lease is not its own."""
    async with node.life():
        await node.register()
        owner, other = await node.attach(), await node.attach()
        lease = await node.ask("reserve", pb.ReserveRequest(request_id="a", num_tokens=4), owner)

        for caller in (other, OPERATOR):
            with pytest.raises(NotYoursError):
                await node.ask("evict", pb.EvictRequest(lease_id=lease.lease_id), caller)


async def test_engine_of_a_worker_survives_a_restart(node: Node) -> None:
    """A worker keeps its engine over lives of the daemon, and cannot move to another engine."""
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
    """Two tenants get different keys; one tenant gets the same key each time."""
    async with node.life() as daemon:
        await node.register()
        tokens = [(await node.attach(tenant=tenant)).token for tenant in ("a", "b", "a")]

        first, second, third = (daemon.registry.worker(token).tenant_key for token in tokens)

        assert first == third != second


async def test_what_an_answer_leaves_is_settled_before_the_next(node: Node) -> None:
    """An answer may leave before its effects are carried out, but they are carried out before the next answer."""
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
    """If the effects of an answer fail, the caller has its answer; the fault is logged, and the daemon goes on."""
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


async def test_events_tell_of_each_worker_that_ends(node: Node) -> None:
    """A watcher who counts workers hears of each end: by the worker itself, by an operator, after silence, by death."""
    async with node.life() as daemon:
        await node.register()
        itself, silent = await node.attach(), await node.attach()
        ended, dying = await node.attach(), await node.attach()
        ids = [
            daemon.registry.by_token[one.token].worker_id for one in (itself, ended, silent, dying)
        ]
        watcher = daemon.watch(pb.WatchRequest())
        before = [await anext(watcher) for _ in range(5)]

        await node.ask("detach", pb.DetachRequest(), itself)
        await node.ask("detach", pb.DetachRequest(worker_id=ids[1]))
        daemon._workers._silent._end(daemon.registry.by_token[silent.token])
        daemon._workers._died(daemon.registry.by_token[dying.token])
        events = [await anext(watcher) for _ in range(4)]

        assert sorted(event.worker_id for event in before[1:]) == sorted(ids)
        kinds = ["worker_detached", "worker_detached", "worker_detached", "worker_died"]
        assert [(event.kind, event.worker_id) for event in events] == [
            *zip(kinds, ids, strict=True)
        ]
        await watcher.aclose()  # type: ignore[attr-defined]  # a generator behind the protocol


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


@pytest.mark.parametrize(
    ("verb", "request_"),
    [
        pytest.param("evict", pb.EvictRequest(num_blocks=4, wait_ms=9_000), id="evict"),
        pytest.param(
            "resize", pb.ResizeRequest(cache="main", tier="device", num_blocks=8), id="resize"
        ),
    ],
)
async def test_call_that_waits_for_copies_ends_with_its_cache(
    node: Node, monkeypatch: pytest.MonkeyPatch, verb: str, request_: Message
) -> None:
    """Whoever waits for a cache that is deleted is told so at once, and holds up no call of another cache."""
    async with node.life() as daemon:
        await node.register()
        await node.register("other")
        worker = await node.attach()
        reserve = pb.ReserveRequest(request_id="a", num_tokens=64)
        lease = await node.ask("reserve", reserve, worker)
        commit = pb.CommitRequest(lease_id=lease.lease_id, num_tokens=64, keys=keys(1, 16))
        await node.ask("commit", commit, worker)
        await node.ask("detach", pb.DetachRequest(), worker)
        with monkeypatch.context() as patch:
            patch.setattr(daemon.tiers, "send", lambda *_: None)
            caller = OPERATOR._replace(cache="main")
            waiting = asyncio.ensure_future(node.ask(verb, request_, caller))
            await asyncio.sleep(0.01)
            assert not waiting.done()
            await node.ask("delete_cache", pb.DeleteCacheRequest(cache="main"))

            with pytest.raises(UnknownCacheError, match="main was deleted"):
                await asyncio.wait_for(waiting, 5)

        resize = pb.ResizeRequest(cache="other", tier="device", num_blocks=8)
        resized = await asyncio.wait_for(node.ask("resize", resize), 5)

    assert resized.num_blocks == 8
