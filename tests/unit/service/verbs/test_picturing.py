"""Laws of pictures: each shows one instant, is computed seldom, and is shown only to those who may see it."""

from typing import Any

import pytest

from kvlease.errors import InvalidError, UnknownCacheError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.core.views.picture import LOOKS
from kvleased.verbs import picturing
from kvleased.verbs.picturing import Gallery, PoolName
from tests.unit.service.conftest import OPERATOR, Node, keys

DEVICE = PoolName("main", "device")


def gallery(node: Node, **changes: Any) -> Gallery:
    """Return a gallery over a node's daemon."""
    found: dict[str, Any] = {"epoch": 7, "codes": dict, "movers": dict}
    return Gallery(node.daemon.registry, **(found | changes))


async def test_picture_shows_a_tenants_blocks(node: Node) -> None:
    """The picture names a tenant that is attached and gives it its own blocks."""
    async with node.life():
        await node.register()
        worker = await node.attach(tenant="acme")
        await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=8), worker)

        shown = gallery(node).shown(DEVICE)

    number = shown.tenants.index("acme") + 1
    assert [LOOKS[look] for look in shown.picture.looks].count("reserved") == 2
    assert shown.picture.tenants.tolist().count(number) == 2


async def test_picture_is_taken_once_a_moment(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many look, a picture and the figures are computed once a moment."""
    async with node.life():
        await node.register()
        seen = gallery(node)

        assert seen.shown(DEVICE) is seen.shown(DEVICE)
        assert seen.sheet() is seen.sheet()
        first, sheet = seen.shown(DEVICE), seen.sheet()
        monkeypatch.setattr(picturing, "FRESH_SECONDS", -1.0)

        assert seen.shown(DEVICE) is not first
        assert seen.sheet() is not sheet


async def test_sheet_tells_who_grants_nothing_new(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sheet tells a cache's drain of that cache, and the daemon's drain of all caches."""
    monkeypatch.setattr(picturing, "FRESH_SECONDS", -1.0)
    async with node.life():
        await node.register()
        await node.register("other")
        seen = gallery(node)

        def told() -> tuple[object, list[object]]:
            sheet: dict[str, Any] = seen.sheet()
            return sheet["is_draining"], [one["is_draining"] for one in sheet["caches"]]

        assert told() == (False, [False, False])
        await node.ask("drain", pb.DrainRequest(cache="main"), OPERATOR)
        assert told() == (False, [True, False])
        await node.ask("drain", pb.DrainRequest(), OPERATOR)
        assert told() == (True, [True, True])


async def test_bytes_of_a_block_are_those_of_all_ranks(node: Node) -> None:
    """A block takes bytes on each rank, and ranks that keep equal bytes are copied as one."""
    equal = pb.LayerSpec(name="0", kind="mla", head_size=32, dtype="float32")
    two = pb.ParallelInputs(tensor_ranks=2)
    async with node.life():
        await node.register("one")
        await node.register("different", parallel=two)
        await node.register("equal", parallel=two, layers=[equal])
        sheet: dict[str, Any] = gallery(node).sheet()

    found = {
        one["cache"]: (one["bytes_per_block"], one["bytes_per_copy"]) for one in sheet["caches"]
    }
    assert found == {"one": (512, 512), "different": (1024, 1024), "equal": (1024, 512)}


async def test_pools_are_those_of_tiers_with_blocks(node: Node) -> None:
    """Each tier whose blocks are counted has a picture, of one cache or of each; anything else is refused."""
    async with node.life():
        await node.register()
        await node.register("other", host_bytes=0)
        seen = gallery(node)

        assert seen.pools() == [DEVICE, PoolName("main", "host"), PoolName("other", "device")]
        assert seen.pools("other") == [PoolName("other", "device")]
        with pytest.raises(UnknownCacheError):
            seen.pools("nowhere")
        with pytest.raises(InvalidError, match="tier is 'host'"):
            seen.shown(PoolName("other", "host"))


async def test_block_tells_its_lease_and_no_whole_key(node: Node) -> None:
    """A block shows its lease's id as text, its tenant's name and eight digits of its key."""
    async with node.life():
        await node.register()
        worker = await node.attach(tenant="acme")
        lease = await node.ask(
            "reserve", pb.ReserveRequest(request_id="r", num_tokens=4, keys=keys(1, 1)), worker
        )
        commit = pb.CommitRequest(lease_id=lease.lease_id, num_tokens=4, keys=keys(1, 1))
        await node.ask("commit", commit, worker)
        block_id = int.from_bytes(lease.block_ids[:4], "little")

        told = gallery(node).block(DEVICE, block_id)
        free = gallery(node).block(DEVICE, (block_id + 1) % 16)

    assert (told["tenant"], told["look"], told["key_prefix"]) == ("acme", "held", "01000000")
    assert [one["lease_id"] for one in told["leases"]] == [str(lease.lease_id)]  # type: ignore[attr-defined]
    assert keys(1, 1).hex() not in str(told)
    assert (free["tenant"], free["leases"]) == ("", [])


async def test_sheet_tells_of_leases_tenants_and_refusals(node: Node) -> None:
    """The sheet has what `stats` and the lists say, in a form that can be written out."""
    async with node.life():
        await node.register()
        worker = await node.attach(tenant="acme")
        await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=8), worker)
        codes = {("reserve", "local", "POOL_FULL"): 2, ("reserve", "rest", "OK"): 9}

        sheet: Any = gallery(node, codes=lambda: codes).sheet()

    (cache,) = sheet["caches"]
    assert (cache["cache"], cache["num_leases"], cache["pools"]["device"]["reserved"]) == (
        "main",
        1,
        2,
    )
    assert [lease["phase"] for lease in cache["leases"]] == ["active"]
    assert {"tenant": "acme", "used": 2, "held": 2, "pinned": 0} in cache["tenants"]
    assert [(one["code"], one["count"]) for one in sheet["refusals"]] == [("POOL_FULL", 2)]
    assert worker.token not in str(sheet)


async def test_sheet_lists_tenants_with_the_most_blocks(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many tenants have limits, those that use blocks are listed, and the sheet says how many there are."""
    monkeypatch.setattr(picturing, "TENANTS_MAX", 1)
    async with node.life():
        await node.register()
        for tenant in ("a", "b", "c", "d"):
            limits = pb.TenantLimits(weight=2)
            await node.ask(
                "set_tenant",
                pb.SetTenantRequest(tenant=tenant, limits=limits, revision=1),
                OPERATOR,
            )
        for tenant, num_tokens in (("x", 4), ("y", 12), ("z", 8)):
            worker = await node.attach(tenant=tenant)
            await node.ask(
                "reserve", pb.ReserveRequest(request_id="r", num_tokens=num_tokens), worker
            )

        sheet: Any = gallery(node).sheet()

    (cache,) = sheet["caches"]
    assert [(one["tenant"], one["used"]) for one in cache["tenants"]] == [("y", 3), ("z", 2)]
    assert cache["num_tenants"] == 3
