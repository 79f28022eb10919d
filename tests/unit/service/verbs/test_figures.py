"""Laws of a cache's figures: they name tenants, and the number of names is bounded."""

import asyncio
from pathlib import Path

import pytest

from kvlease.v1 import kvlease_pb2 as pb
from kvleased.config.settings import Settings
from kvleased.config.tenant_settings import TenantSettings
from kvleased.verbs.figures import OTHERS, figures
from tests.unit.service.conftest import Node, keys


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a small daemon that knows one tenant."""
    tenants = {"chat": TenantSettings(min_percent=25)}
    return Settings(runtime_dir=tmp_path, max_leases=8, memory_bytes_max=1 << 30, tenants=tenants)


async def cached(node: Node, tenant: str, first: int = 1) -> None:
    """Leave two cached blocks of a tenant, under keys of its own, without a worker."""
    worker = await node.attach(tenant=tenant)
    reserve = pb.ReserveRequest(request_id="r", num_tokens=8)
    lease = await node.ask("reserve", reserve, worker)
    commit = pb.CommitRequest(lease_id=lease.lease_id, num_tokens=8, keys=keys(first, 2))
    await node.ask("commit", commit, worker)
    await node.ask("detach", pb.DetachRequest(), worker)


async def test_tenants_who_have_gone_share_one_name(node: Node) -> None:
    """Tenants with settings or workers, and the default, have their own names; all that have gone share one."""
    async with node.life() as daemon:
        await node.register()
        for number, tenant in enumerate(("chat", "", "gone", "gone too")):
            await cached(node, tenant, first=1 + 2 * number)
        await node.attach(tenant="here")

        found = figures(daemon.registry)["main"].tenants

    used = {name: count for (name, state), count in found.items() if state == "used"}
    assert used == {"chat": 2, "default": 2, OTHERS: 4, "here": 0}


async def test_held_and_pinned_blocks_are_part_of_the_used_ones(node: Node) -> None:
    """Blocks that a lease or a pin holds count as used, too."""
    async with node.life() as daemon:
        await node.register()
        await cached(node, "chat")
        worker = await node.attach(tenant="chat")
        await node.ask("pin", pb.PinRequest(keys=keys(1, 1)), worker)
        await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=12), worker)

        found = figures(daemon.registry)["main"].tenants

    assert [found["chat", state] for state in ("used", "held", "pinned")] == [5, 4, 1]


async def test_waiting_calls_are_counted_by_priority(node: Node) -> None:
    """A waiting call counts under its current priority; all of them add up to the census."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()
        await node.ask("reserve", pb.ReserveRequest(request_id="all", num_tokens=64), worker)
        waiting = [
            daemon.call(
                "reserve",
                pb.ReserveRequest(request_id=name, num_tokens=8, wait_ms=5_000, priority=name),
                worker,
            )
            for name in ("low", "high")
        ]

        found = figures(daemon.registry)["main"]

        assert all(isinstance(one, asyncio.Future) for one in waiting)
    assert dict(found.waiting) == {"low": 1, "normal": 0, "high": 1}
    assert sum(found.waiting.values()) == found.census.num_waiting
