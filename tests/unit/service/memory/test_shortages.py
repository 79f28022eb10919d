"""A cache whose memory cannot be had is given up with a reason, and not populated over and over."""

import asyncio
import errno
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from kvlease.errors import PoolFullError, UnknownCacheError
from kvlease.plan import PlanInputs
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.daemon import Daemon
from kvleased.memory import cpu, shortages
from kvleased.memory.shortages import (
    PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    SHORTAGES_MAX,
    TOLD_SECONDS,
    MemoryShortages,
)
from kvleased.planning import plan
from kvleased.supervision import keeper
from kvleased.supervision.keeper import Note
from kvleased.supervision.keeper_link import KeeperLink
from tests.unit.service.conftest import Node, inputs
from tests.unit.service.descriptors import descriptors_left
from tests.unit.service.registering import request_of

PAGE_BYTES = 4096
PLAN = plan(PlanInputs.from_proto(inputs()))


class Clock:
    """Seconds, as a test sets them."""

    seconds = 100.0

    def __call__(self) -> float:
        """Return the seconds."""
        return self.seconds


def note(noted: MemoryShortages, name: str = "main") -> float:
    """Note a shortage in which half of the cache's memory could be had."""
    return noted.note(name, PLAN, "no pages", bytes_populated=5, of_bytes=10)


def test_each_failure_doubles_the_pause_up_to_a_limit() -> None:
    """Each failure doubles the pause, up to a limit, so the cache can always be tried again."""
    noted = MemoryShortages(Clock())

    pauses = [note(noted) for _ in range(12)]

    assert pauses[:3] == [PAUSE_SECONDS, 2 * PAUSE_SECONDS, 4 * PAUSE_SECONDS]
    assert pauses[-1] == PAUSE_SECONDS_MAX


def test_memory_that_is_given_back_ends_the_pause() -> None:
    """Deleting another cache ends the pause, but the number of failures is kept."""
    noted = MemoryShortages(Clock())
    note(noted)
    note(noted)

    noted.end_pauses()

    noted.require_none("main", PLAN)
    assert "2 times in a row" in noted.told("main")
    assert note(noted) == 4 * PAUSE_SECONDS


def test_same_cache_may_be_made_after_the_pause() -> None:
    """During the pause the same cache is refused with what to change, what there was, and how long to wait."""
    clock = Clock()
    noted = MemoryShortages(clock)
    note(noted)
    clock.seconds += 10

    with pytest.raises(PoolFullError, match=r"no pages when 5 of 10 bytes.*fewer bytes") as caught:
        noted.require_none("main", PLAN)
    clock.seconds += PAUSE_SECONDS - 10
    noted.require_none("main", PLAN)

    assert (caught.value.need, caught.value.available) == (10, 5)
    assert caught.value.retry_after_ms == 20_001


def test_what_nobody_asks_for_again_is_told_no_longer() -> None:
    """A shortage is forgotten after a while, and the list of them has a limit."""
    clock = Clock()
    noted = MemoryShortages(clock)
    for number in range(SHORTAGES_MAX + 1):
        note(noted, str(number))
    names = noted.names
    clock.seconds += PAUSE_SECONDS + TOLD_SECONDS

    assert names == [str(number) for number in range(1, SHORTAGES_MAX + 1)]
    assert (noted.names, noted.told("1"), repr(noted)) == ([], "", "<MemoryShortages of nothing>")


@pytest.fixture
def _failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the system run out of pages after the first chunk."""
    populate = cpu.populate_chunks

    def fail(fd: int, region_bytes: int, chunk_bytes: int) -> Iterator[int]:
        yield next(populate(fd, region_bytes, chunk_bytes))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cpu, "populate_chunks", fail)


async def given_up(daemon: Daemon, name: str = "main") -> None:
    """Wait until the cache is gone."""
    while name in daemon.registry.caches:  # noqa: ASYNC110 -- nothing tells of it
        await asyncio.sleep(0)


@pytest.mark.usefixtures("_failing")
async def test_reason_is_said_to_all_who_ask(node: Node) -> None:
    """Another registration, a caller that waits and a probe all learn what fails and what to change."""
    async with node.life() as daemon:
        await node.ask("register_cache", request_of())
        await given_up(daemon)

        with pytest.raises(PoolFullError, match=r"No space left on device.*fewer bytes"):
            await node.ask("register_cache", request_of())
        with pytest.raises(UnknownCacheError, match=r"No space left on device.*fewer bytes"):
            await node.ask("get_cache", pb.GetCacheRequest(cache="main"))
        assert daemon.readiness == (True, "degraded: memory could not be allocated: main")


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OSError(errno.ENOMEM, "Cannot allocate memory"), id="of the kernel"),
        pytest.param(MemoryError("Cannot allocate memory"), id="of the interpreter"),
    ],
)
async def test_cache_whose_records_cannot_be_mapped_is_refused_and_forgotten(
    node: Node, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A limit on a process's own addresses is told as such; nothing is kept, so the next life does not stumble."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    async with node.life() as daemon:
        with monkeypatch.context() as patched:
            patched.setattr(cpu, "map_region", fail)
            with pytest.raises(PoolFullError, match=r"Cannot allocate memory; .*ulimit -v"):
                await node.ask("register_cache", request_of())

        await node.until_kept(1)  # the secret of block keys
        assert not daemon.registry.caches
        assert (await node.register()).status == "ready"


async def test_deleting_another_cache_ends_the_pause(
    node: Node, request: pytest.FixtureRequest
) -> None:
    """Deleting another cache ends the pause, since its memory may have been what was missing."""
    second = pb.RegisterCacheRequest(cache="second", inputs=inputs())
    async with node.life() as daemon:
        await node.register()
        request.getfixturevalue("_failing")
        await node.ask("register_cache", second)
        await given_up(daemon, "second")
        with pytest.raises(PoolFullError, match="cannot be registered again"):
            await node.ask("register_cache", second)

        await node.ask("delete_cache", pb.DeleteCacheRequest(cache="main"))

        again = await node.ask("register_cache", second)
        assert again.created


@pytest.mark.usefixtures("_failing")
async def test_other_registration_is_tried_at_once(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller cache needs no pause, nor the same one after it; once a cache has its memory it is not reported."""
    async with node.life() as daemon:
        await node.ask("register_cache", request_of())
        await given_up(daemon)
        await node.ask("register_cache", request_of(device_blocks=8))
        monkeypatch.setattr(shortages, "PAUSE_SECONDS", 0.0)
        await given_up(daemon)
        monkeypatch.undo()
        info = await node.register()

        assert info.status == "ready"
        assert daemon.readiness == (True, "ready")


def kept_in(node: Node) -> dict[str, Any]:
    """Return what the supervisor keeps, by name."""
    return {
        entry["name"]: entry["metadata"]
        for message, _ in node.store.handover()
        for entry in message["entries"]
    }


@pytest.fixture
def _killing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep every life from reaching the end of populating."""
    populate = cpu.populate_chunks

    def hang(fd: int, region_bytes: int, chunk_bytes: int) -> Iterator[int]:
        is_device = region_bytes == PLAN.device_bytes
        yield from populate(fd, PAGE_BYTES if is_device else region_bytes, chunk_bytes)
        while is_device:
            yield 0

    monkeypatch.setattr(cpu, "populate_chunks", hang)


@pytest.mark.usefixtures("_killing")
async def test_populating_that_ends_lives_is_given_up(node: Node) -> None:
    """Populating that ended two lives in a row, or one more after a pause, is refused with that as the reason."""
    async with node.life() as daemon:
        await node.ask("register_cache", request_of())
    async with node.life() as daemon:
        while not daemon.registry.cache("main").bytes_populated:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0)
    async with node.life() as daemon:
        with pytest.raises(
            PoolFullError, match=r"the last 2 control processes ended .* when 4096 of"
        ):
            await node.ask("register_cache", request_of())
        assert not daemon.registry.caches
        daemon.registry.memory_shortages.end_pauses()
        await node.ask("register_cache", request_of())
    async with node.life() as daemon:
        with pytest.raises(
            PoolFullError, match=r"the last control process ended .* 2 times in a row"
        ):
            await node.ask("register_cache", request_of())
        told = daemon.readiness

    assert [name for name in kept_in(node) if name.startswith("cache/")] == []
    assert told == (True, "degraded: memory could not be allocated: main")


async def test_cache_that_had_its_memory_is_not_given_up(
    node: Node, request: pytest.FixtureRequest
) -> None:
    """Lives that end while populating are counted until it completes; then the count is reset."""
    request.getfixturevalue("_killing")
    async with node.life():
        await node.ask("register_cache", request_of())
    request.getfixturevalue("monkeypatch").undo()
    async with node.life():
        await node.register()

    assert kept_in(node)["cache/main/plan"]["num_populatings"] == 0


@pytest.mark.usefixtures("_killing")
async def test_cache_beside_one_that_ends_lives_is_not_given_up(node: Node) -> None:
    """After a life has ended, caches are populated one at a time, so the next end shows which cache caused it."""
    other = pb.RegisterCacheRequest(cache="other", inputs=inputs())
    async with node.life() as daemon:
        await node.ask("register_cache", request_of())
        await node.ask("register_cache", other)
        await begun(daemon, "main", "other")
    async with node.life() as daemon:
        await begun(daemon, "main")
        assert not daemon.registry.cache("other").bytes_populated
    async with node.life() as daemon:
        await begun(daemon, "other")

        assert list(daemon.registry.caches) == ["other"]
        assert daemon.registry.memory_shortages.names == ["main"]


async def begun(daemon: Daemon, *names: str) -> None:
    """Wait until some memory of each cache is there."""
    while not all(daemon.registry.cache(name).bytes_populated for name in names):  # noqa: ASYNC110 -- nothing tells of it
        await asyncio.sleep(0)


async def test_cache_that_was_ready_before_is_not_given_up(
    node: Node, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A cache that was ready keeps its leases, even if its memory seems absent, as on compressing file systems."""
    async with node.life():
        await node.register()
        worker = await node.attach()
        await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=4), worker)
    monkeypatch.setattr(cpu, "populated_bytes", lambda fd: 0 * fd)
    request.getfixturevalue("_killing")

    for _ in range(3):
        async with node.life() as daemon:
            await begun(daemon, "main")

            assert daemon.registry.cache("main").num_workers == 1


def test_shortage_is_kept_where_no_descriptor_is_left() -> None:
    """Where memory is short, descriptors may be, too; the next life knows of the shortage all the same."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link, noted, again = KeeperLink(theirs), MemoryShortages(Clock()), MemoryShortages(Clock())
    noted.recover(link, [])

    with ours, theirs:
        with descriptors_left(0):
            note(noted)
        received = keeper.receive(ours)
    assert received is not None
    again.recover(link, [Note(name=received[0]["name"], metadata=received[0]["metadata"])])

    assert received[0]["op"] == "note"
    assert (again.names, again.told("main")) == (["main"], noted.told("main"))


def test_shortage_that_another_build_kept_is_passed_over() -> None:
    """A new build starts although another build kept a shortage with other fields."""
    kept = Note(name="shortage/main", metadata={"of_another_build": 1})
    ours, theirs = socket.socketpair()
    noted = MemoryShortages()

    with ours, theirs:
        noted.recover(KeeperLink(ours), [kept])

    assert noted.names == []
