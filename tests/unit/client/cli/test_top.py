"""Laws of `kvlease top`: it shows what it read, takes keys, says that a daemon has gone, and finds it again."""

import asyncio
import re
from dataclasses import replace
from threading import Event, Semaphore
from typing import Self

import pytest
from rich.console import Console, RenderableType
from textual.widgets import DataTable, Static
from textual.widgets._data_table import default_cell_formatter
from typer.testing import CliRunner

from kvlease import FullAttention, ParallelInputs, PlanInputs
from kvlease.cli import connecting, printing, tables
from kvlease.cli import top_parts as parts
from kvlease.cli.app import app
from kvlease.cli.top import Moment, Top, read
from kvlease.errors import UnavailableError, UnknownCacheError
from kvlease.replies import (
    CacheStats,
    GhostStats,
    Inspection,
    LeaseInfo,
    PoolStats,
    Stats,
    TenantInfo,
)
from kvlease.units import show_bytes
from kvleased.planning import plan
from tests.unit.client.cli.test_app import CACHE, INFO, LEASE, POOL, STATS, TENANT, WAITING

SECONDS_MAX = 30.0
GHOSTS = (GhostStats(name="lfu@64", num_keys=4, num_hits=3),)
OTHER = replace(CACHE, cache="other", num_leases=0)


class Told:
    """A daemon that answers as it is told to, and counts its answers."""

    def __init__(self) -> None:
        self.trouble: UnavailableError | None = None
        self.num_read = 0
        self.caches: list[str] = []
        self.leases: tuple[LeaseInfo, ...] = (LEASE,)
        self.tenants: tuple[TenantInfo, ...] = (TENANT,)

    def __call__(self, cache: str) -> Moment:
        """Answer one call."""
        self.num_read += 1
        self.caches.append(cache)
        if self.trouble is not None:
            raise self.trouble
        grown = {"leases_granted": 9 + self.num_read, "prefix_tokens_device": 4096 * self.num_read}
        stats = replace(STATS, caches=(replace(CACHE, counters=grown, ghosts=GHOSTS), OTHER))
        return Moment(
            seconds=float(self.num_read),
            stats=stats,
            caches=(INFO, replace(INFO, cache="other")),
            lists={
                "leases": Inspection(num_total=1, leases=self.leases),
                "waiting": Inspection(num_total=1, waiting=(WAITING,)),
                "tenants": Inspection(num_total=len(self.tenants), tenants=self.tenants),
            },
        )


def words(top: Top, name: str) -> str:
    """Return the words of a part."""
    return str(top.query_one(f"#{name}", Static).render())


def first_row(top: Top, name: str) -> list[str]:
    """Return the cells of a list's first row, as they are drawn."""
    return row_at(top, name, 0)


def row_at(top: Top, name: str, at: int) -> list[str]:
    """Return the cells of a list's row, as they are drawn."""
    row = top.query_one(f"#{name}", DataTable).get_row_at(at)
    return [default_cell_formatter(cell).plain for cell in row]


async def test_screen_shows_pools_lists_and_ghosts() -> None:
    """Pools, rates, leases, waiting calls, tenants and ghosts are all on one screen."""
    top = Top(Told(), every_seconds=60)

    async with top.run_test(size=(120, 60)) as pilot:
        await top.workers.wait_for_complete()
        await pilot.press("r")
        await top.workers.wait_for_complete()
        await pilot.pause()

        assert first_row(top, "leases")[:3] == ["1", "active", "2"]
        assert first_row(top, "waiting")[1] == "blocks"
        assert first_row(top, "tenants")[0] == "acme"
        assert (top.cache, len(top.moments)) == ("demo", 2)


async def test_pause_stops_reading_and_r_reads() -> None:
    """After p the screen stands still; r still reads once; another p goes on."""
    told = Told()
    top = Top(told, every_seconds=60)

    async with top.run_test() as pilot:
        await top.workers.wait_for_complete()
        await pilot.press("p")
        top._tick()
        assert (told.num_read, top.sub_title) == (1, "demo, paused")

        await pilot.press("r")
        await top.workers.wait_for_complete()
        assert told.num_read == 2
        await pilot.press("c")
        await top.workers.wait_for_complete()
        assert top.sub_title == "other, paused"
        await pilot.press("p")
        assert not top.is_paused
        assert top.sub_title == "other"


async def test_r_reads_once_at_a_time() -> None:
    """However often r is pressed over a daemon that does not answer, one read waits for it."""
    begun, go_on = Semaphore(0), Event()

    def slow(cache: str) -> Moment:
        begun.release()
        assert go_on.wait(SECONDS_MAX)
        return Told()(cache)

    top = Top(slow, every_seconds=60)

    async with top.run_test() as pilot:
        await asyncio.to_thread(begun.acquire, timeout=SECONDS_MAX)
        await pilot.press("r", "r", "r")
        go_on.set()
        await top.workers.wait_for_complete()

    assert not begun.acquire(blocking=False)


async def test_c_waits_for_an_answer_and_shows_the_last_chosen() -> None:
    """However often c is pressed over a daemon that does not answer, one read waits, and one of the last follows."""
    told, begun, go_on = Told(), Semaphore(0), Semaphore(1)
    asked: list[str] = []

    def slow(cache: str) -> Moment:
        asked.append(cache)
        begun.release()
        assert go_on.acquire(timeout=SECONDS_MAX)
        return told(cache)

    top = Top(slow, every_seconds=60)

    async with top.run_test() as pilot:
        await top.workers.wait_for_complete()
        await pilot.press("r", "c", "c", "c")
        go_on.release(9)
        await top.workers.wait_for_complete()
        await pilot.pause()
        assert (asked, top.cache, len(top.moments)) == (["", "demo", "other"], "other", 2)


async def test_c_goes_to_the_next_cache_and_round() -> None:
    """C shows one cache after the other."""
    told = Told()
    top = Top(told, every_seconds=60)

    async with top.run_test() as pilot:
        await pilot.press("c")
        await top.workers.wait_for_complete()
        await pilot.pause()
        seen = []
        for _ in range(2):
            await pilot.press("c")
            await top.workers.wait_for_complete()
            await pilot.pause()
            seen.append(top.cache)

    assert sorted(seen) == ["demo", "other"]


async def test_daemon_that_has_gone_is_told_and_come_back_to() -> None:
    """A refusal is shown as a sentence above the last picture, until the daemon answers again."""
    told = Told()
    top = Top(told, every_seconds=60)

    async with top.run_test() as pilot:
        await top.workers.wait_for_complete()
        told.trouble = UnavailableError("nobody is there")
        await pilot.press("r")
        await top.workers.wait_for_complete()
        await pilot.pause()
        trouble = top.query_one("#trouble", Static)
        assert trouble.has_class("shown")
        assert "nobody is there" in words(top, "trouble")
        assert top.query_one("#leases", DataTable).row_count == 1

        told.trouble = None
        await pilot.press("r")
        await top.workers.wait_for_complete()
        await pilot.pause()
        assert not trouble.has_class("shown")


@pytest.mark.parametrize("name", ["[/b]", "[red]acme[/red]", ":x:", "a[0]", "\\[b]"])
async def test_names_and_refusals_are_shown_as_they_are(name: str) -> None:
    """Brackets and colons of a tenant's name or of a refusal's words are no markup: none vanishes, and none fails."""
    told = Told()
    told.tenants = (replace(TENANT, tenant=name),)
    top = Top(told, every_seconds=60)

    async with top.run_test(size=(120, 60)) as pilot:
        await top.workers.wait_for_complete()
        told.trouble = UnavailableError(f"nobody knows {name}")
        await pilot.press("r")
        await top.workers.wait_for_complete()
        await pilot.pause()

        assert first_row(top, "tenants")[0] == name
        assert words(top, "trouble") == f"UNAVAILABLE: nobody knows {name}"


async def test_of_many_tenants_those_with_the_most_blocks_are_shown() -> None:
    """However many tenants have limits, those that use blocks come first, and the last row counts what is not shown."""
    told = Told()
    idle = [replace(TENANT, tenant=f"idle-{index:03}", used_blocks=0) for index in range(60)]
    busy = [replace(TENANT, tenant=f"busy-{index}", used_blocks=index) for index in (1, 2)]
    told.tenants = (*idle, *busy)
    top = Top(told, every_seconds=60)

    async with top.run_test(size=(120, 60)) as pilot:
        await top.workers.wait_for_complete()
        await pilot.pause()

        names = [row_at(top, "tenants", at)[0] for at in (0, 1, 2, 50)]
        assert names == ["busy-2", "busy-1", "idle-000", "… 12 more"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        pytest.param("n" * 24, "n" * 24, id="fits"),
        pytest.param("n" * 25, "n" * 23 + "…", id="too-long"),
        pytest.param("日本" * 12, "日本" * 5 + "日 …", id="two-columns-each"),
        pytest.param("\u202e" * 8, "\\u202e" * 3 + "\\u202…", id="escaped"),
    ],
)
async def test_long_name_of_a_tenant_leaves_room_for_its_numbers(name: str, shown: str) -> None:
    """On 80 columns a tenant's name is cut with an ellipsis, and all columns of numbers are in sight."""
    told = Told()
    told.tenants = (replace(TENANT, tenant=name),)
    top = Top(told, every_seconds=60)

    async with top.run_test(size=(80, 60)) as pilot:
        await top.workers.wait_for_complete()
        await pilot.pause()

        table = top.query_one("#tenants", DataTable)
        assert first_row(top, "tenants")[0] == shown
        assert table.virtual_size.width <= table.size.width


async def test_new_life_begins_a_new_history() -> None:
    """A new daemon's counters begin anew, so no rate spans two of its lives."""
    top = Top(Told(), every_seconds=60)

    async with top.run_test():
        await top.workers.wait_for_complete()
        moment = top.moments[-1]
        top.show(replace(moment, stats=replace(moment.stats, epoch=moment.stats.epoch + 1)))

        assert len(top.moments) == 1


def test_daemon_that_is_not_there_is_a_sentence_and_a_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no daemon answers, no screen opens; the address is that of every other command."""
    monkeypatch.setattr(printing, "has_terminal", lambda: True)
    result = CliRunner().invoke(app, ["top", "--address", "unix:///nowhere/kvlease.sock"])

    assert (result.exit_code, "UNAVAILABLE" in result.output) == (1, True)


# What the parts say ---------------------------------------------------------------------------------------------------


def test_top_without_a_terminal_ends_at_once() -> None:
    """In a pipe nobody could see or leave the screen, so top is refused before any call."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["top", "--address", "unix:///nowhere"])

    assert result.exit_code == 2
    assert "top needs a terminal" in result.stderr


def test_top_of_a_cache_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top of an unknown cache is refused, and no other cache is shown in its place."""

    class Strict:
        def __init__(self, *_: object, **__: object) -> None:
            """Connect to no daemon."""

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            """Have nothing to close."""

        def stats(self, cache: str = "") -> Stats:
            """Know no cache."""
            raise UnknownCacheError(f"there is no cache {cache!r}; register it first")

    monkeypatch.setattr(printing, "has_terminal", lambda: True)
    monkeypatch.setattr(connecting, "Client", Strict)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["top", "--cache", "nosuch"])

    assert result.exit_code == 1
    assert "there is no cache 'nosuch'" in result.stderr


def test_looks_add_up_to_the_pool() -> None:
    """The looks of a pool count each of its blocks once."""
    assert sum(parts.counts_of(POOL).values()) == POOL.num_blocks


@pytest.mark.parametrize("columns", [20, 33, 100])
@pytest.mark.parametrize(
    "pool",
    [
        pytest.param(POOL, id="some-of-all"),
        pytest.param(replace(POOL, num_blocks=10**6, free=10**6 - 14), id="few-of-many"),
        pytest.param(replace(POOL, num_blocks=14, free=0), id="full"),
        pytest.param(PoolStats(tier="host", num_blocks=0, free=0, reserved=0, filling=0, ready=0, ready_held=0,
                               quarantined=0, scrubbing=0, bad=0), id="none"),
    ],
)  # fmt: skip
def test_squares_fill_their_rows_and_hide_nothing(pool: PoolStats, columns: int) -> None:
    """There are as many squares as fit, and at least one for every look that occurs."""
    counts = parts.counts_of(pool)

    rows = parts._squares(counts, pool.num_blocks, columns)

    text = "".join(row.plain for row in rows)
    assert len(text) == (4 * columns if pool.num_blocks else 0)
    for name, _, character, _ in parts.LOOKS:
        assert not counts[name] or character in text


def test_timelines_are_shares_between_two_looks() -> None:
    """The share of tokens found is that of the time between two looks."""
    then = replace(CACHE, counters={"prefix_tokens_device": 0, "prefix_tokens_computed": 0})
    now = replace(CACHE, counters={"prefix_tokens_device": 30, "prefix_tokens_computed": 10})

    assert parts._hit_share(then, now) == 0.75
    assert parts._hit_share(now, now) is None
    assert parts._use(CACHE) == (64 - 50 - 4) / 64
    assert parts._use(replace(CACHE, pools=())) is None


def test_blocks_out_of_use_are_not_used() -> None:
    """A pool that was made smaller, or lost damaged blocks, is shown as full as the rest of it is."""
    pool = replace(POOL, free=10, parked=36, bad=4, num_blocks=64)
    small = replace(CACHE, pools=(pool,))
    given_back = replace(pool, reserved=0, ready=0, ready_held=0, quarantined=0, scrubbing=0)
    nothing = replace(given_back, free=0, parked=60)

    shown = plain(parts.pools(replace(STATS, caches=(small,)), "demo", 40))

    assert "58% used" in shown
    assert re.search(r"14 of .*\n24 ", shown), shown
    assert parts._use(small) == (24 - 10 - 4) / 24
    assert parts._use(replace(CACHE, pools=(nothing,))) is None
    held = INFO.plan.device_bytes - 36 * INFO.plan.bytes_per_block
    assert f"device {show_bytes(held)}," in plain(
        parts.summary(replace(STATS, caches=(small,)), (INFO,), "demo")
    )


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        ("c00", "[c00], c01, c02, c03, c04, c05, c06, c07 and 42 more"),
        ("c20", "c16, c17, c18, c19, [c20], c21, c22, c23 and 42 more"),
        ("c49", "c42, c43, c44, c45, c46, c47, c48, [c49] and 42 more"),
    ],
)
def test_many_caches_leave_room_for_the_pools(cache: str, said: str) -> None:
    """Of many caches, also of many that are drained, only some are named: those around the one that is shown."""
    many = tuple(replace(INFO, cache=f"c{number:02}", is_draining=True) for number in range(50))

    shown = plain(parts.summary(STATS, many, cache))

    assert f"caches: {said}\n" in shown
    assert "--undo: c00, c01, c02, c03, c04, c05, c06, c07 and 42 more" in shown


def test_one_lease_of_one_worker_is_in_the_singular() -> None:
    """One lease is no leases."""
    one = replace(STATS, caches=(replace(CACHE, num_leases=1, num_workers=1, num_waiting=0),))

    assert "1 lease of 1 worker, 0 waiting" in plain(parts.summary(one, (INFO,), "demo"))


def test_drained_caches_are_named() -> None:
    """The screen names the caches that grant nothing new, and says how that ends."""
    drained = replace(INFO, is_draining=True)

    assert "drain" not in plain(parts.summary(STATS, (INFO,), "demo"))
    assert "kvlease drain [--cache NAME] --undo: demo" in plain(
        parts.summary(STATS, (drained,), "demo")
    )


def test_looks_are_told_apart_without_colours() -> None:
    """Each look has its own character, for terminals without colours and for people who cannot tell them apart."""
    characters = [character for _, _, character, _ in parts.LOOKS]

    assert len(set(characters)) == len(characters)


@pytest.mark.parametrize("width", [60, 76, 118])
def test_character_and_its_meaning_stand_in_one_line(width: int) -> None:
    """However narrow the screen, a character and its meaning are never on two lines."""
    pool = replace(POOL, filling=1, parked=1, bad=1, num_blocks=67)
    all_looks = replace(STATS, caches=(replace(CACHE, pools=(pool,)),))

    lines = plain(parts.pools(all_looks, "demo", 40), width).splitlines()

    for _, words, character, _ in parts.LOOKS:
        assert any(f"{character} {words}" in line for line in lines), words


def plain(part: RenderableType, width: int = 200) -> str:
    """Return a part as text."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(part)
    return capture.get()


def test_parts_of_no_cache_say_so() -> None:
    """Before a cache is registered nothing is drawn, and nothing fails."""
    empty = Stats(epoch=1, caches=())

    assert "no cache" in str(parts.pools(empty, "", 40))
    assert str(parts.moves([(0.0, empty)], "")) == ""
    assert str(parts.moves([(0.0, empty), (1.0, empty)], "")) == ""
    assert parts.rows("leases", None) == []
    assert str(parts.ghosts(empty, "")) == ""


def test_moves_are_by_the_second() -> None:
    """Growth is divided by the seconds between two looks."""

    def at(granted: int) -> Stats:
        cache: CacheStats = replace(CACHE, counters={"leases_granted": granted})
        return replace(STATS, caches=(cache,))

    assert "granted 5.0" in str(parts.moves([(1.0, at(0)), (3.0, at(10))], "demo"))


def test_engine_with_a_magazine_is_seen_at_work() -> None:
    """What engines do without leases is shown by the second, and no share is said of tokens that nobody counts."""

    def at(num_taken: int) -> Stats:
        counters = {"blocks_taken": num_taken, "magazine_keys_held": 2 * num_taken}
        return replace(STATS, caches=(replace(CACHE, counters=counters),))

    history = [(1.0, at(0)), (3.0, at(10))]

    assert "taken 5.0, keys held 10.0" in str(parts.moves(history, "demo"))
    assert "no leases yet" in plain(parts.timelines(history, "demo", 40))


def test_read_asks_for_the_lists_of_one_cache() -> None:
    """A read asks for the lists of the wanted cache, or of the first one where that does not exist."""
    asked: list[str] = []

    class Answering:
        def stats(self) -> Stats:
            return STATS

        def list_caches(self) -> list[object]:
            return [INFO]

        def inspect(self, cache: str, what: str, *, limit: int, after_id: int = 0) -> Inspection:
            assert not after_id
            asked.append(f"{cache} {what} {limit}")
            return Inspection(num_total=0)

    moment = read(Answering(), "gone")  # type: ignore[arg-type]  # what of a client is used

    assert asked == ["demo leases 50", "demo waiting 50", "demo tenants 256"]
    assert moment.stats is STATS


def test_bytes_given_back_are_those_of_all_ranks_and_pools() -> None:
    """What a resize gave back counts no more, of both pools, and of a device pool on every rank."""
    inputs = PlanInputs(
        layers=(FullAttention(name="l", num_kv_heads=2, head_size=16, dtype="float32"),),
        tokens_per_block=16,
        device_blocks=64,
        host_bytes=64 * 2 * INFO.plan.bytes_per_block,
        parallel=ParallelInputs(tensor_ranks=2),
    )
    info = replace(INFO, plan=plan(inputs))
    device = replace(POOL, free=18, parked=32)
    host = replace(device, tier="host", num_blocks=64, free=16, parked=48)
    small = replace(CACHE, pools=(device, host))
    assert (info.plan.device_bytes, info.plan.host_bytes) == (512 << 10, 512 << 10)

    stats = replace(STATS, caches=(small,))

    said, row = plain(parts.summary(stats, (info,), "demo")), plain(tables.caches((info,), stats))

    assert "device 256.00 KiB, host 128.00 KiB" in said
    assert "8.00 KiB" in plain(tables.blocks((info,)))
    assert re.search("demo .* 256.00 KiB +128.00 KiB", row), row
