"""An operator drains, clears, resizes and limits a running daemon, over every transport and over restarts."""

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlease import (
    Client,
    DrainingError,
    FullAttention,
    KVLeaseError,
    NeverFitsError,
    NotYoursError,
    PlanInputs,
    PoolFullError,
    StaleRevisionError,
    TenantLimits,
    Worker,
)
from kvlease.client import Resizable
from tests.acceptance.serving import Serving, command, new_cache, served

pytestmark = pytest.mark.acceptance

TOKENS_PER_BLOCK = 16
LAYER = FullAttention(name="l0", num_kv_heads=1, head_size=128, dtype="float32")
INPUTS = PlanInputs(
    layers=(LAYER,), tokens_per_block=TOKENS_PER_BLOCK, device_blocks=32, host_bytes=32 << 14
)
BYTES_PER_BLOCK = 2 * TOKENS_PER_BLOCK * 128 * 4


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Run one daemon for the tests that leave it as they found it."""
    with served(tmp_path_factory.mktemp("operating") / "run") as serving:
        yield serving


@pytest.fixture(params=["unix", "http+unix", "grpc+unix"])
def client(shared: Serving, request: pytest.FixtureRequest) -> Iterator[Client]:
    """Register a new cache, and give a client of it over each transport."""
    with Client(shared.address(request.param), on_doubt="raise") as client:
        client.register("main", INPUTS)
        shared.until(lambda: client.get_cache("main").status == "ready")
        yield client
        shared.until(lambda: client.stats("main").caches[0].num_workers == 0)
        client.delete_cache("main")


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Serving]:
    """Run a daemon of the test's own, with a ready cache."""
    with served(tmp_path / "run") as serving:
        with Client(serving.address("unix")) as client:
            client.register("main", INPUTS)
            serving.until(lambda: client.get_cache("main").status == "ready")
        yield serving


def attached(client: Client, serving: Serving, tenant: str = "default") -> Worker:
    """Return a worker over the local socket, whatever the client speaks."""
    del client
    with Client(serving.address("unix"), on_doubt="raise") as local:
        return local.attach("main", tenant=tenant)


def cached(worker: Worker, name: str, num_blocks: int) -> None:
    """Leave some blocks cached."""
    num_tokens = num_blocks * TOKENS_PER_BLOCK
    keys = worker.keys.chain([hash(name) % 1000] * num_tokens, TOKENS_PER_BLOCK)
    with worker.reserve(name, keys=keys, num_tokens=num_tokens) as lease:
        lease.commit(num_tokens, keys)


def pool(client: Client, tier: str) -> dict[str, int]:
    """Return the blocks of a tier by state."""
    (found,) = [one for one in client.stats("main").caches[0].pools if one.tier == tier]
    return {"free": found.free, "ready": found.ready, "parked": found.parked}


def code_of(error: pytest.ExceptionInfo[KVLeaseError]) -> tuple[str, bool]:
    """Return the error's code, and whether a retry helps."""
    return error.value.code, error.value.retryable


# Drain ----------------------------------------------------------------------------------------------------------------


def test_drained_cache_lets_leases_end_and_grants_no_new_one(
    client: Client, shared: Serving
) -> None:
    """A new lease is refused with advice to go elsewhere, leases go on, and the operator sees how many are left."""
    with attached(client, shared) as worker:
        lease = worker.reserve("running", num_tokens=16)

        drained = client.drain(cache="main")
        assert [(one.cache, one.is_draining, one.num_leases) for one in drained.caches] == [
            ("main", True, 1)
        ]
        assert not drained.is_daemon_draining
        with pytest.raises(DrainingError) as refused:
            worker.reserve("late", num_tokens=16)
        assert code_of(refused) == ("DRAINING", True)
        with pytest.raises(DrainingError):
            attached(client, shared)
        assert lease.extend(32)
        assert client.get_cache("main").is_draining
        lease.release()
        assert client.drain(cache="main").num_leases == 0

        assert not client.undrain(cache="main").caches[0].is_draining
        worker.reserve("again", num_tokens=16).release()


def test_drained_daemon_is_not_ready_until_the_drain_is_undone(own: Serving) -> None:
    """A drain outlives the control process, and a worker from before it goes on with its leases."""
    with Client(own.address("unix"), on_doubt="raise") as client, client.attach("main") as worker:
        lease = worker.reserve("running", num_tokens=16)

        assert client.drain().is_daemon_draining
        assert _readiness(own) == "503"
        with pytest.raises(DrainingError):
            client.register("other", INPUTS)
        own.restart_control(worker)
        own.until(lambda: _readiness(own) == "503")
        assert lease.extend(32)
        with pytest.raises(DrainingError) as refused:
            worker.reserve("late", num_tokens=16)
        assert (refused.value.resource, refused.value.retry_after_ms) == ("daemon", 5_000)

        assert not client.undrain().is_daemon_draining
        # Returning workers are served before all addresses listen.
        own.until(lambda: _readiness(own) == "200")
        worker.reserve("again", num_tokens=16).release()


def test_cache_that_was_drained_by_itself_stays_so(own: Serving) -> None:
    """Undoing the daemon's drain does not undo a cache's own, which outlives the control process, too."""
    with Client(own.address("unix"), on_doubt="raise") as client, client.attach("main") as worker:
        client.drain(cache="main")
        client.drain()

        assert client.undrain().caches[0].is_draining
        own.restart_control(worker)
        assert client.get_cache("main").is_draining
        assert not client.undrain(cache="main").caches[0].is_draining


def _readiness(serving: Serving) -> str:
    run = subprocess.run(
        ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "--unix-socket",
         str(serving.runtime_dir / "http.sock"), "http://localhost/readyz"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return run.stdout


# Clear ----------------------------------------------------------------------------------------------------------------


def test_clear_drops_one_tenants_blocks_and_names_what_holds_the_rest(
    client: Client, shared: Serving
) -> None:
    """Blocks that nobody holds leave every tier; held blocks stay, and so do other tenants' cached blocks."""
    with attached(client, shared, "chat") as chat, attached(client, shared, "batch") as batch:
        cached(chat, "gone", 4)
        cached(batch, "stays", 3)
        keys = chat.keys.chain([7] * 32, TOKENS_PER_BLOCK)
        lease = chat.reserve("held", keys=keys, num_tokens=32)
        lease.commit(32, keys)
        found = client.clear("main", tenant="chat")

        assert (found.num_device, found.num_held) == (4, 2)
        assert found.lease_ids == (lease.lease_id,)
        assert (found.pin_ids, found.num_copying, found.keeps_remote) == ((), 0, False)
        lease.release()
        assert client.clear("main").num_device == 2 + 3


def test_clear_empties_the_host_pool(client: Client, shared: Serving) -> None:
    """A clear drops the copies in the host pool, too, except those of an evicted lease."""
    with attached(client, shared) as worker:
        cached(worker, "below", 3)
        client.evict(num_blocks=3, wait_ms=20_000, cache="main")
        lease = worker.reserve("moved", num_tokens=32)
        lease.evict(wait_ms=20_000)
        assert pool(client, "host")["ready"] == 3

        found = client.clear("main")

        assert (found.num_device, found.num_host) == (0, 3)
        assert pool(client, "host")["ready"] == 0
        assert lease.reload(wait_ms=20_000).num_tokens == 32
        lease.release()


# Resize ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["device", "host"])
def test_pool_that_shrinks_gives_memory_back_and_grows_again(
    client: Client, tier: Resizable
) -> None:
    """Blocks that nobody holds leave, and the system gets their pages until the pool grows to its registered size."""
    resized = client.resize("main", tier, 12)

    assert (resized.num_blocks, resized.num_parked) == (12, 20)
    assert resized.bytes_given_back == 20 * BYTES_PER_BLOCK
    assert pool(client, tier)["parked"] == 20
    with pytest.raises(NeverFitsError) as refused:
        client.resize("main", tier, 33)
    assert (refused.value.need, refused.value.limit) == (33, 32)
    grown = client.resize("main", tier, 32)
    assert (grown.num_parked, grown.bytes_given_back) == (0, 0)


def test_longest_request_is_what_a_resize_has_left_room_for(client: Client) -> None:
    """A cache says how long a request may be now, which its plan cannot know; one token more is refused."""

    def longest() -> int:
        (cache,) = client.list_caches()
        return cache.longest_request_tokens

    (planned,) = {cache.plan.longest_request_tokens for cache in client.list_caches()}
    before = longest()
    client.resize("main", "device", 3)
    left = longest()

    assert (before, left) == (planned, 3 * TOKENS_PER_BLOCK)
    with client.attach("main") as worker:
        worker.reserve("fits", num_tokens=left).release()
        with pytest.raises(NeverFitsError):
            worker.reserve("too long", num_tokens=left + 1)
    client.resize("main", "device", 32)
    assert longest() == before


@pytest.mark.parametrize("tier", ["device", "host"])
def test_pool_that_ends_amid_a_page_shrinks_like_any_other(
    shared: Serving, tier: Resizable
) -> None:
    """Blocks of an odd size share memory pages, and a page stays as long as one of its blocks is in use."""
    odd = FullAttention(name="l0", num_kv_heads=1, head_size=126, dtype="float32")
    block_bytes = 2 * TOKENS_PER_BLOCK * 126 * 4
    inputs = PlanInputs(
        layers=(odd,),
        tokens_per_block=TOKENS_PER_BLOCK,
        device_blocks=31,
        host_bytes=31 * block_bytes,
    )
    with new_cache(shared, "odd", inputs) as client:
        assert client.get_cache("odd").plan.device_bytes % mmap.PAGESIZE

        resized = client.resize("odd", tier, 12)

        assert (resized.num_blocks, resized.num_parked) == (12, 19)
        assert 18 * block_bytes < resized.bytes_given_back <= 19 * block_bytes
        assert client.resize("odd", tier, 31).bytes_given_back == 0


def test_shrink_below_what_is_held_is_refused_with_numbers(client: Client, shared: Serving) -> None:
    """A resize that would need leased blocks is refused with numbers, and changes nothing."""
    with attached(client, shared) as worker:
        lease = worker.reserve("long", num_tokens=20 * TOKENS_PER_BLOCK)

        with pytest.raises(PoolFullError) as refused:
            client.resize("main", "device", 19)
        assert (refused.value.resource, refused.value.need, refused.value.available) == (
            "device_blocks", 13, 12,
        )  # fmt: skip
        assert pool(client, "device")["parked"] == 0
        assert client.resize("main", "device", 20).num_parked == 12
        with pytest.raises(NeverFitsError):
            worker.reserve("longer", num_tokens=21 * TOKENS_PER_BLOCK)
        lease.release()
        client.resize("main", "device", 32)


def test_cached_blocks_are_copied_down_before_the_pool_shrinks(
    client: Client, shared: Serving
) -> None:
    """Blocks that leave the device by a resize can be reloaded, as after an eviction."""
    with attached(client, shared) as worker:
        cached(worker, "kept", 30)

        client.resize("main", "device", 8)

        assert pool(client, "host")["ready"] >= 22
        client.resize("main", "device", 32)


def test_smaller_pool_outlives_the_control_process(own: Serving) -> None:
    """Parked blocks stay parked over a restart, without their memory, and the pool can grow afterwards."""
    with Client(own.address("unix"), on_doubt="raise") as client, client.attach("main") as worker:
        client.resize("main", "device", 10)

        own.restart_control(worker)

        assert pool(client, "device")["parked"] == 22
        found = worker.memory_identity
        assert found is not None
        again = client.resize("main", "device", 10)
        assert again.bytes_given_back == 22 * BYTES_PER_BLOCK
        client.resize("main", "device", 32)
        lease = worker.reserve("all", num_tokens=32 * TOKENS_PER_BLOCK)
        assert worker.device is not None
        worker.device[:] = 9
        lease.release()


# Limits of tenants ----------------------------------------------------------------------------------------------------


def test_limits_hold_at_once_and_a_late_call_changes_nothing(
    client: Client, shared: Serving
) -> None:
    """A tenant's maximum and cap hold from the next call on; an older revision is refused as stale."""
    name = f"capped-{os.urandom(4).hex()}"
    before = client.get_tenant(name)
    assert (before.limits, before.revision) == (TenantLimits(), 0)
    with attached(client, shared, name) as worker:
        first = worker.reserve("first", num_tokens=16)

        rule = client.set_tenant(name, TenantLimits(leases_max=2, max_percent=50), revision=7)
        assert (rule.limits.leases_max, rule.revision) == (2, 7)
        second = worker.reserve("second", num_tokens=16)
        with pytest.raises(PoolFullError) as refused:
            worker.reserve("third", num_tokens=16)
        assert (refused.value.resource, refused.value.limit) == ("tenant_leases", 2)
        with pytest.raises(NeverFitsError) as never:
            first.extend(17 * TOKENS_PER_BLOCK)
        assert never.value.limit == 16

        with pytest.raises(StaleRevisionError) as late:
            client.set_tenant(name, TenantLimits(), revision=6)
        assert (late.value.need, late.value.available) == (8, 6)
        with pytest.raises(StaleRevisionError):
            client.set_tenant(name, TenantLimits(leases_max=9), revision=7)
        assert (
            client.set_tenant(name, TenantLimits(leases_max=2, max_percent=50), revision=7) == rule
        )
        (facts,) = [one for one in client.inspect("main", "tenants").tenants if one.tenant == name]
        assert (facts.num_leases, facts.leases_max, facts.revision) == (2, 2, 7)

        second.release()
        worker.reserve("third", num_tokens=16).release()
        first.release()
    client.set_tenant(name, TenantLimits(), revision=8)


def test_limits_in_bytes_are_those_of_whole_blocks(client: Client) -> None:
    """A minimum in bytes is rounded up to blocks, a maximum down; the stricter of bytes and percent holds."""
    name = f"bytes-{os.urandom(4).hex()}"
    limits = TenantLimits(min_bytes=3 * BYTES_PER_BLOCK + 1, max_bytes=9 * BYTES_PER_BLOCK - 1)
    client.set_tenant(name, limits, revision=1)

    (facts,) = [one for one in client.inspect("main", "tenants").tenants if one.tenant == name]
    assert (facts.min_blocks, facts.max_blocks) == (4, 8)

    with pytest.raises(NeverFitsError) as refused:
        client.set_tenant(name, TenantLimits(min_bytes=33 * BYTES_PER_BLOCK), revision=2)
    assert (refused.value.resource, refused.value.need, refused.value.available) == (
        "tenant_minima", 33, 32,
    )  # fmt: skip
    assert client.get_tenant(name).revision == 1
    client.set_tenant(name, TenantLimits(), revision=2)


def test_limits_outlive_the_control_process(own: Serving) -> None:
    """Limits and their revision hold in the next life of the control process."""
    with Client(own.address("unix"), on_doubt="raise") as client:
        client.set_tenant("chat", TenantLimits(leases_max=1, min_percent=25), revision=3)
        with client.attach("main", tenant="chat") as worker:
            lease = worker.reserve("first", num_tokens=16)

            own.restart_control(worker)

            assert client.get_tenant("chat").revision == 3
            with pytest.raises(PoolFullError):
                worker.reserve("second", num_tokens=16)
            with pytest.raises(StaleRevisionError):
                client.set_tenant("chat", TenantLimits(), revision=3)
            lease.release()


def test_worker_may_not_operate(client: Client, shared: Serving) -> None:
    """The verbs of an operator are refused under a worker's token."""
    with attached(client, shared) as worker:
        client._link.token = worker._session.link.token
        for act in (
            client.drain,
            client.undrain,
            lambda: client.clear("main"),
            lambda: client.resize("main", "device", 8),
            lambda: client.get_tenant("chat"),
            lambda: client.set_tenant("chat", TenantLimits(), revision=1),
        ):
            with pytest.raises(NotYoursError):
                act()
        client._link.token = ""


# The command line -----------------------------------------------------------------------------------------------------


def test_commands_do_what_they_say(own: Serving) -> None:
    """Each verb of an operator is a command that reports its result."""
    address = own.address("unix")

    assert "main grants nothing new: 0 leases" in command(address, "drain", "--cache", "main")
    assert "main grants leases" in command(address, "drain", "--cache", "main", "--undo")
    assert json.loads(command(address, "drain", "--json", "--wait-seconds", "5"))[
        "is_daemon_draining"
    ]
    assert "the daemon grants leases" in command(address, "drain", "--undo")
    assert "12 blocks can be granted, 20 are out of use" in command(
        address, "resize", "main", "--blocks", "12"
    )
    assert "dropped 0 blocks" in command(address, "clear", "main", "--tenant", "chat")
    told = command(address, "tenants", "set", "chat", "--min-percent", "25", "--leases-max", "4")
    assert told.startswith("chat, revision 1: min_percent 25")
    again = json.loads(command(address, "tenants", "set", "chat", "--weight", "3", "--json"))
    assert (again["revision"], again["limits"]["min_percent"], again["limits"]["weight"]) == (
        2,
        25.0,
        3.0,
    )
    assert "chat" in command(address, "tenants")
    with Client(address, on_doubt="raise") as client, client.attach("main") as worker:
        lease = worker.reserve("running", num_tokens=16)
        with pytest.raises(subprocess.CalledProcessError) as waited:
            command(address, "drain", "--wait-seconds", "0.3")
        assert waited.value.returncode == 3
        assert "main grants nothing new: 1 lease" in waited.value.stdout
        lease.release()
    with pytest.raises(subprocess.CalledProcessError) as wrong:
        command(address, "resize", "main", "--blocks", "9", "--tier", "disk")
    assert wrong.value.returncode == 2


def test_drain_that_somebody_ends_stays_ended(own: Serving) -> None:
    """A command that waits for a drain which is undone ends with a status of its own, and leases are granted."""
    address = own.address("unix")
    program = Path(sys.executable).with_name("kvlease")
    with Client(address, on_doubt="raise") as client, client.attach("main") as worker:
        lease = worker.reserve("running", num_tokens=16)
        with subprocess.Popen(
            [program, "drain", "--wait-seconds", "600", "--address", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as waiting:
            own.until(lambda: client.stats().is_draining)
            assert not client.undrain().is_daemon_draining
            errors = waiting.communicate(timeout=120)[1]

        assert (waiting.returncode, "leases are granted again" in errors) == (4, True)
        assert not client.stats().is_draining
        assert worker.reserve("another", num_tokens=16).is_live
        lease.release()


# Events ---------------------------------------------------------------------------------------------------------------


def test_watch_begins_with_a_snapshot_and_tells_what_an_operator_did(client: Client) -> None:
    """A snapshot comes first, then the events after it, with growing numbers."""
    watch = client.watch(cache="main", with_snapshot=True, idle_seconds=10)
    first = next(watch)
    client.drain(cache="main")
    client.undrain(cache="main")
    client.clear("main")
    told = [next(watch) for _ in range(3)]
    watch.close()  # type: ignore[attr-defined]  # a generator

    assert first.kind == "snapshot"
    assert first.snapshot is not None
    assert first.snapshot.pools[0].num_blocks == 32
    assert [one.kind for one in told] == ["cache_drained", "cache_undrained", "cache_cleared"]
    numbers = [one.sequence for one in (first, *told)]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    "is_whole",
    [
        pytest.param(False, id="control process", marks=pytest.mark.thorough),
        pytest.param(True, id="daemon"),
    ],
)
def test_watcher_that_comes_again_after_a_restart_is_told_to_begin_anew(
    own: Serving, *, is_whole: bool
) -> None:
    """Numbers never go back over a restart; missed events are unknown, so a snapshot comes instead."""
    with Client(own.address("unix"), on_doubt="raise") as client, client.attach("main") as worker:
        client.clear("main")
        seen = [one.sequence for one in client.watch(idle_seconds=0.5)]
        if not is_whole:
            own.restart_control(worker)
    if is_whole:
        own.restart(is_killed=True)

    with Client(own.address("unix"), on_doubt="raise") as client:
        client.register("again", INPUTS)
        own.until(lambda: client.get_cache("again").status == "ready")
        found = list(client.watch(after_sequence=seen[-1], with_snapshot=True, idle_seconds=0.5))

    assert found[0].kind == "resync"
    assert {one.kind for one in found[1:]} == {"snapshot"}
    assert "again" in {one.cache for one in found[1:]}
    assert min(one.sequence for one in found) > max(seen)
