"""Laws of surveys: all metrics of a cache are of one instant, and their names are bounded."""

from pathlib import Path
from typing import Any

import pytest

from kvlease.errors import InvalidError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.config.settings import Settings
from kvleased.config.tenant_settings import TenantSettings
from kvleased.core.effects import Tier
from kvleased.metrics.catalogue import BY_NAME
from kvleased.verbs import surveys as module
from kvleased.verbs.figures import OTHERS
from kvleased.verbs.surveys import GroupFacts, surveys, unfilled_bytes
from tests.unit.service.conftest import Node
from tests.unit.service.verbs.test_figures import cached


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a small daemon that knows one tenant."""
    tenants = {"zoe": TenantSettings(min_percent=25)}
    return Settings(runtime_dir=tmp_path, max_leases=8, memory_bytes_max=1 << 30, tenants=tenants)


async def test_tenants_are_told_by_name_and_bounded(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tenants with settings come first, then attached ones, by name; all others share the last name."""
    monkeypatch.setattr(module, "TENANTS_MAX", 3)
    async with node.life() as daemon:
        await node.register()
        await cached(node, "gone")
        for tenant in ("b", "a"):
            await node.attach(tenant=tenant)

        (found,) = surveys(daemon.registry)

    spread: Any = found.survey.columns[Tier.DEVICE].by_tenant(found.digests)
    assert found.tenants == ("default", "zoe", "a", OTHERS)
    assert spread[:, 1:].tolist() == [[0, 0], [0, 0], [0, 0], [2, 0]]


@pytest.mark.parametrize("name", ["tenant_blocks", "tenant_leases"])
def test_help_says_which_tenants_are_told_apart(name: str) -> None:
    """What a metric of tenants says of itself is how they are chosen, so that a busy one may be among the others."""
    text = BY_NAME[name].text

    assert (
        f"At most {module.TENANTS_MAX} tenants are told apart: first those that have settings"
        in text
    )
    assert "neither" not in text


@pytest.mark.parametrize("name", [OTHERS, "(", "(nobody)"])
async def test_names_of_the_metrics_own_are_no_tenants(node: Node, name: str) -> None:
    """A name that the metrics use is refused wherever a tenant is named, and an old one makes no second series."""
    async with node.life() as daemon:
        await node.register()
        for verb, request in (
            ("attach", pb.AttachRequest(cache="main", tenant=name)),
            ("set_tenant", pb.SetTenantRequest(tenant=name, revision=1)),
            ("get_tenant", pb.GetTenantRequest(tenant=name)),
            ("clear", pb.ClearRequest(cache="main", tenant=name)),
        ):
            with pytest.raises(InvalidError, match="reserved for metrics"):
                await node.ask(verb, request)
        await node.attach(tenant="chat")
        (worker,) = daemon.registry.by_id.values()
        worker.tenant = name

        (found,) = surveys(daemon.registry)

    assert sorted(found.tenants) == sorted({"default", "zoe", OTHERS})


async def test_sizes_are_those_of_the_plan(node: Node) -> None:
    """Blocks are told in bytes over all ranks; the part of a block that a group's pages do not take is padding."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()
        await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=6), worker)

        (found,) = surveys(daemon.registry)
        plan = daemon.registry.cache("main").plan

    assert found.bytes_per_block["device"] * plan.num_blocks == plan.device_bytes
    assert found.groups == [
        GroupFacts(tokens_per_block=4, bytes_filled=plan.bytes_per_block, bytes_padded=0)
    ]
    (filling,) = found.survey.groups
    assert (filling.num_blocks, filling.tokens_unfilled) == (2, 2)
    assert unfilled_bytes(found.groups[0], 2) == plan.bytes_per_block // 2


def test_states_fill_nothing_in_part() -> None:
    """A group whose blocks are no arrays of tokens has no unfilled bytes."""
    assert unfilled_bytes(GroupFacts(tokens_per_block=0, bytes_filled=9, bytes_padded=0), 5) == 0
