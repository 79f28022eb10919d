"""Laws of a daemon's caches: how they are registered, deleted and cleared, and which cache a call means."""

import asyncio

import pytest

from kvlease.errors import (
    BusyError,
    CacheInUseError,
    InvalidError,
    LayoutMismatchError,
    NeverFitsError,
    NotYoursError,
    UnknownCacheError,
)
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller

from .conftest import Node, inputs, keys


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
    """A cache larger than what is left of the memory limit is refused with need, available and limit."""
    async with node.life():
        request = pb.RegisterCacheRequest(cache="main", inputs=inputs(device_blocks=1 << 22))

        with pytest.raises(NeverFitsError) as refusal:
            await node.ask("register_cache", request)

        assert refusal.value.need == (1 << 22) * 512 + 8 * 512
        assert refusal.value.limit == refusal.value.available == 1 << 30


async def test_one_cache_too_many_is_told_which_are_without_workers(node: Node) -> None:
    """What may be deleted to make room is told, and how."""
    node.settings = node.settings.model_copy(update={"max_caches": 2})
    async with node.life():
        await node.register("left")
        await node.register("main")
        await node.attach()

        with pytest.raises(
            BusyError, match=r"delete a cache \(kvlease delete NAME\).*: left$"
        ) as refusal:
            await node.register("third")

        assert (refusal.value.available, refusal.value.limit) == (0, 2)


async def test_cache_with_workers_is_not_deleted(node: Node) -> None:
    """A cache is deleted only when no worker is attached, and then all its memory goes with it."""
    async with node.life() as daemon:
        await node.register()
        await node.until_kept(1 + 7)
        worker = await node.attach()
        with pytest.raises(CacheInUseError):
            await node.ask("delete_cache", pb.DeleteCacheRequest(cache="main"))
        await node.ask("detach", pb.DetachRequest(), worker)

        await node.ask("delete_cache", pb.DeleteCacheRequest(cache="main"))

        with pytest.raises(UnknownCacheError):
            daemon.registry.cache("main")
        await node.until_kept(1)


async def test_deleted_cache_tells_how_many_pins_ended_with_it(node: Node) -> None:
    """Pins do not keep a cache; the answer to a delete counts them. A purge without a disk store is a delete."""
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
    """A tenant whose name is no longer known can be cleared by its digest; any other digest clears nothing."""
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


async def test_operator_names_the_cache_when_there_are_several(node: Node) -> None:
    """An operator's call means the only cache or the one that it names; a worker's call means the worker's cache."""
    async with node.life():
        await node.register("one")
        assert (await node.ask("lookup", pb.LookupRequest(keys=keys(1, 1)))).num_device_blocks == 0
        await node.register("two")

        with pytest.raises(InvalidError, match="one, two"):
            await node.ask("lookup", pb.LookupRequest(keys=keys(1, 1)))

        named = Caller(transport="rest", cache="two")
        await node.ask("lookup", pb.LookupRequest(keys=keys(1, 1)), named)


async def test_ids_of_one_cache_mean_nothing_in_another(node: Node) -> None:
    """Ids are unique over caches, also over a later cache of the same name, so a late unpin or explain hits nothing."""
    given: list[int] = []
    async with node.life():
        for cache in ("main", "other", "main"):
            await node.register(cache)
            worker = await node.attach(cache)
            reserve = pb.ReserveRequest(request_id="r", keys=keys(1, 1), num_tokens=4)
            lease = await node.ask("reserve", reserve, worker)
            commit = pb.CommitRequest(lease_id=lease.lease_id, num_tokens=4, keys=keys(1, 1))
            await node.ask("commit", commit, worker)
            pin = await node.ask("pin", pb.PinRequest(keys=keys(1, 1)), worker)
            given += [lease.lease_id, pin.pin_id]
            await node.ask("detach", pb.DetachRequest(), worker)
            if cache == "other":
                await node.ask("delete_cache", pb.DeleteCacheRequest(cache="main"))

    assert len(set(given)) == 6


async def test_worker_is_told_of_its_own_cache_alone(node: Node) -> None:
    """A worker sees its own cache only; a caller without a worker's token sees all caches."""
    async with node.life():
        await node.register()
        await node.register("other")
        worker = await node.attach()

        listed = await node.ask("list_caches", pb.ListCachesRequest(), worker)
        own = await node.ask("get_cache", pb.GetCacheRequest(cache="main"), worker)
        with pytest.raises(NotYoursError, match="cache other is not the worker's cache"):
            await node.ask("get_cache", pb.GetCacheRequest(cache="other"), worker)
        with pytest.raises(UnknownCacheError, match="there is no cache ''; say which one is meant"):
            await node.ask("get_cache", pb.GetCacheRequest(), worker)
        with pytest.raises(UnknownCacheError, match="65536 characters, at most 63 are allowed"):
            await node.ask("get_cache", pb.GetCacheRequest(cache="x" * 65536))
        everything = await node.ask("list_caches", pb.ListCachesRequest())

    assert [info.cache for info in listed.caches] == [own.info.cache] == ["main"]
    assert [info.cache for info in everything.caches] == ["main", "other"]
