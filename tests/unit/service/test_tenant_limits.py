"""Tenants of the settings become limits in blocks, under their workers' digests."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvlease.errors import BusyError, NeverFitsError
from kvlease.groups import keeps_everything
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.config.settings import Settings
from kvleased.config.sources import load
from kvleased.config.tenant_settings import TenantSettings
from kvleased.control.process import read_settings
from kvleased.core.limits import TenantLimits
from kvleased.core.shape import CacheShape
from kvleased.credentials.derived import tenant_digest, tenant_key
from kvleased.verbs import limits as limits_module
from kvleased.verbs.limits import Rules, limits_of, with_tenants

from .conftest import OPERATOR, Node, inputs
from .descriptors import descriptors_left

SECRET = bytes(range(32))
CHAT = tenant_digest(tenant_key(SECRET, "chat"))
BATCH = tenant_digest(tenant_key(SECRET, "batch"))


def a_shape(usable_blocks: int, **tenants: TenantSettings) -> CacheShape:
    """Return the shape of a cache with one null block and some tenants."""
    shape = CacheShape(
        num_blocks=usable_blocks + 1,
        num_slots=0,
        groups=(keeps_everything(4, 4),),
        hash_tokens=4,
        hit_tokens=4,
        null_blocks=1,
    )
    return with_tenants(shape, tenants, SECRET)


def test_percent_are_of_the_blocks_that_can_be_granted() -> None:
    """A minimum is rounded up, a maximum and a budget of pins are rounded down."""
    tenant = TenantSettings(min_percent=29, max_percent=57, weight=2, pinned_percent_max=12)

    shape = a_shape(101, chat=tenant)

    assert shape.tenants == {
        CHAT: TenantLimits(min_blocks=30, max_blocks=57, weight=2.0, pinned_blocks_max=12)
    }


def test_percent_are_exact() -> None:
    """29 % of 100 blocks are 29, though the nearest floating-point number below it is 28.99…."""
    shape = a_shape(100, chat=TenantSettings(min_percent=29, max_percent=29))

    assert (shape.tenants[CHAT].min_blocks, shape.tenants[CHAT].max_blocks) == (29, 29)


def test_tenant_that_is_not_named_has_the_defaults() -> None:
    """A tenant without limits may have the whole pool, is promised nothing, and pins a quarter at most."""
    assert a_shape(100).tenant_default == TenantLimits(max_blocks=100, pinned_blocks_max=25)
    assert not a_shape(100).limits_tenants


def test_rounded_minima_are_never_more_than_the_pool() -> None:
    """If not all minima can be rounded up, some are rounded down; none is above its own maximum."""
    shape = a_shape(
        5, chat=TenantSettings(min_percent=50), batch=TenantSettings(min_percent=50, max_percent=50)
    )

    assert (shape.tenants[BATCH].min_blocks, shape.tenants[CHAT].min_blocks) == (2, 2)
    assert sum(one.min_blocks for one in shape.tenants.values()) <= shape.usable_blocks


def test_limits_are_noticed() -> None:
    """A cache is limited if one tenant has a minimum, or a maximum below the pool."""
    assert a_shape(10, chat=TenantSettings(min_percent=10)).limits_tenants
    assert a_shape(10, chat=TenantSettings(max_percent=90)).limits_tenants
    assert not a_shape(10, chat=TenantSettings(weight=5)).limits_tenants


# Settings -------------------------------------------------------------------------------------------------------------


def test_tenants_come_from_file_environment_and_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tenants come from a table of the file, or as JSON from a variable or flag; the highest source wins."""
    file = tmp_path / "kvleased.toml"
    file.write_text("[tenants.chat]\nmin_percent = 40\n")

    from_file = load(["--config", str(file)]).tenants
    monkeypatch.setenv("KVLEASED_TENANTS", '{"chat": {"weight": 2}}')
    from_environment = load([]).tenants
    from_flag = load(["--tenants", '{"chat": {"max_percent": 50}}']).tenants

    assert from_file == {"chat": TenantSettings(min_percent=40)}
    assert from_environment == {"chat": TenantSettings(weight=2)}
    assert from_flag["chat"].max_percent == 50


@pytest.mark.parametrize(
    ("tenants", "says"),
    [
        pytest.param({"a": {"min_percent": 60}, "b": {"min_percent": 41}}, "101", id="too much"),
        pytest.param(
            {"a": {"min_percent": 6, "max_percent": 5}}, "at most max_p", id="upside down"
        ),
        pytest.param({"a": {"min_percent": -1}}, "--tenants: a.min_percent", id="negative"),
        pytest.param({"a": {"max_percent": 101}}, "--tenants: a.max_percent", id="above all"),
        pytest.param({"a": {"weight": 0}}, "--tenants: a.weight", id="weightless"),
        pytest.param({"a": {"min_per_cent": 1}}, "did you mean min_percent?", id="misspelt"),
        pytest.param({"": {}}, "tenants", id="nameless"),
        pytest.param({"a" * 129: {}}, "tenants", id="long name"),
        pytest.param({"a\nb": {}}, "not printable", id="name over two lines"),
        pytest.param({"(others)": {}}, "reserved for metrics", id="name of the metrics' own"),
    ],
)
def test_tenants_without_sense_are_refused(
    tenants: object, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Limits that contradict each other or are malformed end the start with a sentence that names them."""
    with pytest.raises(SystemExit):
        load(["--tenants", json.dumps(tenants)])

    assert says in capsys.readouterr().err.splitlines()[0]


def test_tenants_that_are_no_table_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that is not JSON is refused with an example, whatever source it comes from."""
    with pytest.raises(SystemExit):
        load(["--tenants", "chat"])
    monkeypatch.setenv("KVLEASED_TENANTS", "chat")
    with pytest.raises(SystemExit):
        load([])

    said = capsys.readouterr().err
    assert "--tenants: this is not JSON such as" in said
    assert "KVLEASED_TENANTS: this is not JSON such as" in said


def test_control_process_gets_tenants_as_they_were_resolved() -> None:
    """The control process reads all tenants back from the settings that the supervisor hands over."""
    settings = Settings(tenants={"chat": TenantSettings(min_percent=40)})
    fd = os.memfd_create("settings")
    os.write(fd, settings.model_dump_json().encode())

    assert read_settings(fd).tenants == settings.tenants
    os.close(fd)


# In bytes, and while the daemon runs ----------------------------------------------------------------------------------


def test_bytes_are_divided_by_those_of_a_block() -> None:
    """A minimum in bytes is rounded up to blocks, a maximum down; the stricter of bytes and percent holds."""
    tenant = TenantSettings(min_percent=10, min_bytes=1_501, max_percent=50, max_bytes=3_999)

    found = limits_of({"chat": tenant}, SECRET, 100, 100).tenants[CHAT]

    assert (found.min_blocks, found.max_blocks) == (16, 39)
    assert found.maxima == (("max_percent", 50), ("max_bytes", 39))
    found = limits_of({"chat": tenant}, SECRET, 1_000, 100).tenants[CHAT]
    assert (found.min_blocks, found.max_blocks) == (39, 39)


async def test_bytes_are_those_of_all_ranks(node: Node) -> None:
    """A block takes bytes on each rank, so of a cache of two ranks the same bytes are half as many blocks."""
    limits = pb.TenantLimits(
        min_bytes=2_048, max_bytes=4_096, max_percent=100, weight=1, pinned_percent_max=25
    )
    async with node.life():
        set_chat = pb.SetTenantRequest(tenant="chat", limits=limits, revision=1)
        await node.ask("set_tenant", set_chat, OPERATOR)
        found = {}
        for num_ranks in (1, 2):
            name, parallel = f"ranks-{num_ranks}", pb.ParallelInputs(tensor_ranks=num_ranks)
            info = await node.register(name, parallel=parallel)
            told = await node.ask(
                "inspect", pb.InspectRequest(cache=name, what="tenants"), OPERATOR
            )
            chat = next(one for one in told.tenants if one.tenant == "chat")
            total = sum(rank.bytes_per_block for rank in info.plan.ranks)
            found[num_ranks] = chat.min_blocks * total, chat.max_blocks * total

    assert found == {1: (2_048, 4_096), 2: (2_048, 4_096)}


async def test_first_rank_may_keep_nothing(node: Node) -> None:
    """Where the first rank has no layer that keeps anything, the bytes are those of the others."""
    ranks = [pb.RankInputs(keeps_nothing=True), pb.RankInputs()]
    limits = pb.TenantLimits(
        min_percent=50, max_bytes=4_096, max_percent=100, weight=1, pinned_percent_max=25
    )
    async with node.life():
        set_chat = pb.SetTenantRequest(tenant="chat", limits=limits, revision=1)
        await node.ask("set_tenant", set_chat, OPERATOR)
        parallel = pb.ParallelInputs(pipeline_ranks=2)
        info = await node.register(parallel=parallel, ranks=ranks, host_bytes=0)
        told = await node.ask("inspect", pb.InspectRequest(cache="main", what="tenants"), OPERATOR)

    (chat,) = [one for one in told.tenants if one.tenant == "chat"]
    assert info.plan.ranks[0].bytes_per_block == 0
    assert (chat.min_blocks, chat.max_blocks) == (8, 8)


def test_tenants_without_minimum_cost_no_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of limits is computed for each tenant in each cache while workers wait, so exactness must be cheap."""
    tenants = {f"tenant-{index}": TenantSettings(max_percent=57.3) for index in range(256)}
    before = limits_of(tenants, SECRET, 1_000, 100)
    monkeypatch.delattr(limits_module, "Fraction")

    assert limits_of(tenants, SECRET, 1_000, 100) == before


def test_minima_that_are_more_than_the_pool_are_refused() -> None:
    """Minima in bytes can add up to more than the pool, unlike percents, and are refused then."""
    tenants = {"chat": TenantSettings(min_bytes=900), "batch": TenantSettings(min_percent=20)}

    with pytest.raises(NeverFitsError) as refused:
        limits_of(tenants, SECRET, 10, 100)

    assert (refused.value.resource, refused.value.need, refused.value.available) == (
        "tenant_minima", 11, 10,
    )  # fmt: skip


def test_bytes_must_fit_each_other() -> None:
    """A minimum above the maximum is refused."""
    with pytest.raises(ValueError, match="min_bytes"):
        TenantSettings(min_bytes=2, max_bytes=1)


def test_rules_are_replaced_and_counted() -> None:
    """Limits have the revision that they were set with, and only so many tenants may have limits."""
    rules = Rules({"chat": TenantSettings(weight=2)}, max_tenants=2)

    assert rules.of("chat") == (TenantSettings(weight=2), 0)
    assert rules.of("unheard") == (TenantSettings(), 0)
    rules.set("batch", TenantSettings(leases_max=3), 7)
    assert rules.of("batch") == (TenantSettings(leases_max=3), 7)
    assert repr(rules) == "<Rules 2 tenants, 1 set>"
    assert rules.with_one("batch", TenantSettings(weight=3))["batch"] == TenantSettings(weight=3)
    assert "batch" not in rules.with_one("batch", TenantSettings())
    with pytest.raises(BusyError, match="max_tenants"):
        rules.with_one("third", TenantSettings(weight=2))


class Keeper:
    """A keeper that remembers names, as far as limits need it."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def note(self, name: str, metadata: dict[str, object]) -> None:
        """Remember a name."""
        del metadata
        self.names.add(name)

    def drop(self, name: str) -> None:
        """Forget a name."""
        self.names.discard(name)


def test_removed_limits_make_room_for_those_of_others() -> None:
    """A tenant that is set to the defaults frees its place; only the last such revisions are remembered."""
    rules, keeper = Rules({}, 2), Keeper()

    for number in range(5):
        name = f"tenant-{number}"
        for revision, limits in ((1, TenantSettings(weight=2)), (2, TenantSettings())):
            assert (name in rules.with_one(name, limits)) is (revision == 1)
            rules.set(name, limits, revision)
            rules.keep(keeper, name)  # type: ignore[arg-type]  # as far as it goes

    assert rules.tenants == {}
    assert [rules.of(f"tenant-{number}")[1] for number in range(5)] == [0, 0, 0, 2, 2]
    assert len(keeper.names) == 2


async def test_cache_too_small_for_a_minimum_that_was_just_set_leaves_nothing(node: Node) -> None:
    """A cache whose pool is less than a minimum set during its registration is refused, and the next life starts."""
    small = pb.RegisterCacheRequest(cache="small", inputs=inputs(device_blocks=4))
    least = pb.SetTenantRequest(tenant="t", revision=1, limits=pb.TenantLimits(min_bytes=8 * 512))
    async with node.life():
        await node.register()
        num_kept = len(node.store)
        registering = asyncio.ensure_future(node.ask("register_cache", small))
        while len(node.store) == num_kept:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0)
        await node.ask("set_tenant", least)

        with pytest.raises(NeverFitsError, match="minima of all tenants"):
            await registering
        await node.until_kept(num_kept + 1)
        assert node.noted == ["tenant/74"]

    async with node.life() as daemon:
        assert list(daemon.registry.caches) == ["main"]


async def test_life_that_ends_before_it_refuses_such_a_cache_leaves_the_next_one_whole(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control process may be killed when a cache's memory is kept and its minima are not looked at again yet."""
    small = pb.RegisterCacheRequest(cache="small", inputs=inputs(device_blocks=4))
    least = pb.SetTenantRequest(tenant="t", revision=1, limits=pb.TenantLimits(min_bytes=8 * 512))

    async with node.life() as daemon:
        await node.register()
        num_kept = len(node.store)
        make = daemon._caches._maker.create

        async def made_and_killed(*asked: Any) -> None:
            await make(*asked)
            raise asyncio.CancelledError

        monkeypatch.setattr(daemon._caches._maker, "create", made_and_killed)
        with pytest.raises(asyncio.CancelledError):
            await node.ask("register_cache", small)
        await node.ask("set_tenant", least)

    async with node.life() as daemon:
        assert list(daemon.registry.caches) == ["main"]
        await node.until_kept(num_kept + 1)
        with pytest.raises(NeverFitsError, match="minima of all tenants"):
            await node.ask("register_cache", small)


async def test_next_life_takes_limits_over_with_few_descriptors(node: Node) -> None:
    """However many tenants have limits, a control process that may have few descriptors takes all of them over."""
    node.settings = node.settings.model_copy(update={"max_tenants": 300})
    limits = pb.TenantLimits(weight=2)
    async with node.life():
        for number in range(300):
            request = pb.SetTenantRequest(tenant=f"tenant-{number}", limits=limits, revision=7)
            await node.ask("set_tenant", request)

    with descriptors_left(32):
        async with node.life() as daemon:
            rules = daemon._caches.rules

            assert len(rules.tenants) == 300
            assert rules.of("tenant-299") == (TenantSettings(weight=2), 7)
