"""Laws of the command line: tables for people, JSON for machines, and a sentence and a status for a failure."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any, Self

import pytest
from typer.testing import CliRunner

from kvlease.cli import app as cli
from kvlease.cli import connecting, following, printing
from kvlease.cli.tables import event_line
from kvlease.errors import InvalidError, PoolFullError, UnavailableError, UnknownCacheError
from kvlease.options import CacheOptions
from kvlease.plan import PlanInputs
from kvlease.replies import (
    CacheInfo,
    CacheStats,
    Event,
    Evicted,
    Explanation,
    Inspection,
    LeaseInfo,
    MagazineInfo,
    Miss,
    PinInfo,
    PoolStats,
    Stats,
    TenantInfo,
    TierInfo,
    WaitingInfo,
    WorkerInfo,
)
from kvlease.spec import FullAttention
from kvleased.planning import plan

PLAN = plan(
    PlanInputs(
        layers=(FullAttention(name="l", num_kv_heads=2, head_size=16, dtype="float32"),),
        tokens_per_block=16,
        device_blocks=64,
    )
)
POOL = PoolStats(
    tier="device", num_blocks=64, free=50, reserved=4, filling=0, ready=7, ready_held=3, quarantined=2, scrubbing=1,
    bad=0,
)  # fmt: skip
CACHE = CacheStats(
    cache="demo", pools=(POOL,), num_leases=5, num_waiting=6, num_workers=2,
    counters={"leases_granted": 9, "prefix_tokens_device": 4096},
)  # fmt: skip
STATS = Stats(epoch=11, caches=(CACHE,))
TIERS = (
    TierInfo(tier="host", status="ready", reason="", num_slots=123_456, num_found=98_765),
    TierInfo(tier="disk", status="scanning", reason="", num_slots=12_345_678, num_found=1_234_567),
    TierInfo(
        tier="remote",
        status="off",
        reason="the store does not answer within 250 ms",
        num_slots=0,
        num_found=0,
    ),
)
INFO = CacheInfo(
    cache="demo", status="ready", bytes_populated=262144, num_workers=2, plan=PLAN, tiers=TIERS,
    longest_request_tokens=321,
    options=CacheOptions(integrity="xxh3", write_policy="after-n-hits", write_after_hits=2),
)  # fmt: skip
WORKER = WorkerInfo(
    worker_id=7, worker_name="engine", tenant="acme", rank=1, death_proof="pidfd", num_leases=2, age_ms=7_200_000,
    process_id=4242,
)  # fmt: skip
LEASE = LeaseInfo(
    lease_id=1, worker_id=7, request_digest="00", phase="active", num_blocks=2, num_tokens=1024, age_ms=None,
    left_ms=29_999, tenant="acme",
)  # fmt: skip
WAITING = WaitingInfo(
    call_id=3, worker_id=7, verb="reserve", position=1, priority="high", num_blocks=2048, available_blocks=12,
    reason="blocks", age_ms=1_500, left_ms=3_000,
)  # fmt: skip
TENANT = TenantInfo(
    tenant_id=1, tenant="acme", used_blocks=2000, held_blocks=40, pinned_blocks=3, min_blocks=100, max_blocks=4000,
    pinned_blocks_max=16, weight=2.5, num_leases=5, leases_max=8, revision=6,
)  # fmt: skip
MAGAZINE = MagazineInfo(
    magazine_id=31, magazine_digest="89abcdef01234567", tenant="acme", worker_ids=(7, 8, 9), private_blocks=123_456,
    held_blocks=123_457, num_exchanges=12_345_678, age_ms=1_500,
)  # fmt: skip
MISSES = (
    Miss(
        first_block=2, num_blocks=4_000, reason="evicted", tier="device", policy="leaf-lru", tenant="batch",
        age_ms=4_000, why="leaf-lru chose them 4.0 s ago to make room for batch; a larger device pool keeps them",
    ),
    Miss(
        first_block=4_002, num_blocks=1, reason="shorter_than_a_block", tier="", policy="", tenant="", age_ms=None,
        why="the last 5 tokens cannot fill a block of 16 tokens, and only full blocks are kept",
    ),
)  # fmt: skip
EXPLANATION = Explanation(lease_id=9, num_tokens=64_037, hit_tokens={"device": 32}, misses=MISSES)
LISTS = {
    "workers": Inspection(num_total=1, workers=(WORKER,)),
    "waiting": Inspection(num_total=1, waiting=(WAITING,)),
    "tenants": Inspection(num_total=1, tenants=(TENANT,)),
    "magazines": Inspection(num_total=1, magazines=(MAGAZINE,)),
}
TIERS_HIT = ("device", "host", "disk", "remote", "computed")
EVENT = Event(
    sequence=3, kind="lease_granted", cache="demo", worker_id=1, lease_id=2, num_blocks=4, unix_nanoseconds=10**9,
)  # fmt: skip


class ScriptedClient:
    """A client of a daemon that always answers the same."""

    name = "demo"
    pools = (POOL,)
    counters = CACHE.counters

    def __init__(self, address: str | None, **_: object) -> None:
        """Keep the address; calls at the address "full" are refused."""
        self.address = address

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Have nothing to close."""

    def stats(self, cache: str = "") -> Stats:
        """Return the snapshot."""
        assert cache in {"", "demo"}
        if self.address == "full":
            raise PoolFullError
        described = replace(CACHE, cache=self.name, pools=self.pools, counters=self.counters)
        return replace(STATS, caches=(described,))

    def list_caches(self) -> tuple[CacheInfo, ...]:
        """Return the cache."""
        return (replace(INFO, cache=self.name),)

    def inspect(self, cache: str, what: str, *, limit: int = 0, after_id: int = 0) -> Inspection:
        """Return a page of 300 leases, an empty page of pins, or one entry of any other kind."""
        assert cache == "demo"
        if what in LISTS:
            return LISTS[what]
        ids = range(after_id + 1, min(300, after_id + limit) + 1) if what == "leases" else ()
        found = tuple(replace(LEASE, lease_id=lease_id) for lease_id in ids)
        return Inspection(num_total=300 if found else 0, leases=found)

    def evict(self, **asked: Any) -> Evicted:
        """Evict as many blocks as are asked for."""
        assert asked["cache"] == "demo"
        return Evicted(num_evicted=asked["num_blocks"], num_offloaded=1)

    def explain_lease(self, lease_id: int, *, cache: str = "") -> Explanation:
        """Explain one lease; for any other, say that everything was found."""
        assert cache in {"", "demo"}
        return EXPLANATION if lease_id == EXPLANATION.lease_id else Explanation(lease_id=lease_id)

    def watch(self, **_: object) -> Iterator[Event]:
        """Yield the event."""
        yield EVENT


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the commands use the scripted client."""
    monkeypatch.setattr(connecting, "Client", ScriptedClient)


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Return the exit status, output and errors of a command line."""
    result = CliRunner(env={"COLUMNS": "200", **environment}).invoke(cli.app, arguments)
    return result.exit_code, result.stdout, result.stderr


def rows(output: str) -> list[list[str]]:
    """Return the cells of every line of a table whose cells are at least two spaces apart."""
    return [re.split(r" {2,}", line.strip()) for line in output.splitlines()]


def words(output: str) -> list[str]:
    """Return every line with single spaces between words, for a table whose cells are one space apart."""
    return [" ".join(line.split()) for line in output.splitlines()]


@pytest.mark.parametrize("columns", ["0", "00"])
def test_terminal_of_unknown_width_is_written_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    """Some shells of containers set COLUMNS to 0, which says nothing of the width; tables and help are printed."""
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.argv", ["kvlease", "status"])

    with pytest.raises(SystemExit):
        cli.main()

    assert "quarantined" in capsys.readouterr().out


def test_status_shows_pools_by_state() -> None:
    """The tables show the caches, each pool by the states of its blocks, and what prefixes were worth."""
    status, output, _ = run("status")

    assert status == 0
    assert ["demo", "ready, no remote", "2", "5", "6", "256.00 KiB", "0 B"] in rows(output)
    assert ["demo", "device", "64", "50", "4", "7", "3", "2 quarantined, 1 scrubbing"] in rows(
        output
    )
    assert ["demo", "9", "4,096", "0", "0"] in rows(output)
    assert ["demo", "0", "0", "0"] in rows(output)


@pytest.mark.parametrize("verb", ["waiting", "tenants", "magazines"])
def test_lists_fit_the_terminal(verb: str) -> None:
    """In a list, no number is cut in a terminal of 80 columns."""
    _, output, _ = run(verb, COLUMNS="80")

    assert max(map(len, output.splitlines())) <= 80
    assert "…" not in output


@pytest.mark.parametrize("verb", ["status", "caches"])
@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, verb: str, columns: int) -> None:
    """With the longest names and large numbers, no number is cut and no line is wider than the terminal."""
    pool = replace(POOL, num_blocks=123_456, free=123_456, quarantined=12_345)
    monkeypatch.setattr(ScriptedClient, "name", "n" * 63)
    monkeypatch.setattr(ScriptedClient, "pools", (pool, pool))
    names = (
        "leases_granted",
        "evictions",
        "reloads",
        *(f"prefix_tokens_{tier}" for tier in TIERS_HIT),
    )
    monkeypatch.setattr(ScriptedClient, "counters", dict.fromkeys(names, 12_345_678))

    _, output, _ = run(verb, COLUMNS=str(columns))

    assert max(map(len, output.splitlines())) <= columns
    assert "…" not in output
    assert "".join(re.findall(r"^ ?(n+)", output, re.MULTILINE)).count("n") % 63 == 0
    assert "123,456" in output or verb == "caches"


@pytest.mark.parametrize("columns", [20, 40, 60])
def test_terminal_that_is_too_narrow_cuts_no_id(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """Lines are wider than a terminal that is too narrow for them: a cut id or count would be another one."""
    lease = replace(LEASE, lease_id=7_708_950_994_944_001, worker_id=7_708_950_994_944_002)
    monkeypatch.setitem(LISTS, "leases", Inspection(num_total=1, leases=(lease,)))

    output = run("leases", COLUMNS=str(columns))[1]

    assert "7708950994944001 7708950994944002 acme active 2 1,024 29 s" in words(output)
    assert ["demo", "ready,", "2", "5", "6", "256.00 KiB", "0 B"] in rows(
        run("status", COLUMNS=str(columns))[1]
    )


def test_column_without_any_text_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A table may have a column without heading in which every row has nothing to say."""
    table = printing.PlainTable("", "name")
    table.add_row("", "main")

    printing.console().print(table, crop=False)

    assert "main" in capsys.readouterr().out


def test_longest_waiting_calls_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest ids and words, and a call of a large pool, are shown whole in 80 columns."""
    call = replace(
        WAITING, worker_id=2**53 - 1, priority="normal", position=4_096, num_blocks=123_456,
        available_blocks=1_234_567, reason="position", age_ms=599_999, left_ms=599_999,
    )  # fmt: skip
    monkeypatch.setitem(LISTS, "waiting", Inspection(num_total=1, waiting=(call,)))

    _, output, _ = run("waiting", COLUMNS="80")

    row = f"{2**53 - 1} reserve normal 4,096 123,456 1,234,567 position 9 min 9 min"
    assert row in words(output)
    assert max(map(len, output.splitlines())) <= 80
    assert "…" not in output


def test_longest_tenants_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 80 columns every tenant has its name and every column its whole head, also with a large pool's numbers."""
    blocks = dict.fromkeys(
        ("used_blocks", "held_blocks", "pinned_blocks", "min_blocks", "max_blocks", "pinned_blocks_max"), 12_345_678
    )  # fmt: skip
    tenant = replace(TENANT, tenant="n" * 40, num_leases=1_000_000, leases_max=1_000_000, **blocks)  # type: ignore[arg-type]  # all are numbers
    monkeypatch.setitem(LISTS, "tenants", Inspection(num_total=1, tenants=(tenant,)))

    _, output, _ = run("tenants", COLUMNS="80")

    assert max(map(len, output.splitlines())) <= 80
    assert "".join(re.findall(r"^ ?(n+)", output, re.MULTILINE)).count("n") == 80
    assert output.count("12,345,678") == 6
    heads = "\n".join(words(output))
    assert "tenant used held pinned leases" in heads
    assert "tenant at least at most at most at most weight revision" in heads


def test_names_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name that a worker gives itself is shown as it is, and never as something that a terminal would obey."""
    worker = replace(WORKER, worker_name="[/] [red]x", tenant="\x1b[2J")
    monkeypatch.setitem(LISTS, "workers", Inspection(num_total=1, workers=(worker,)))

    status, output, _ = run("workers")

    assert status == 0
    assert ["7", "[/] [red]x", "\\x1b[2J", "4242", "1", "2", "pidfd", "2 h"] in rows(output)


def test_json_is_the_snapshot() -> None:
    """With --json, machines read the snapshot itself."""
    _, output, _ = run("status", "--json")

    assert json.loads(output) == json.loads(json.dumps(asdict(STATS)))


def test_caches_shows_plans() -> None:
    """The tables have the numbers of each cache's plan, and how long a request may be now."""
    output = run("caches")[1]
    assert "4.00 KiB" in output
    assert "321 tokens" in output
    assert json.loads(run("caches", "--json")[1])[0]["plan"]["num_blocks"] == 64


def test_caches_shows_lower_tiers() -> None:
    """The table says whether a tier works, if not why, and when blocks are written to it."""
    found = rows(run("caches")[1])

    assert ["demo", "host", "ready", "123,456", "98,765", "after-2-hits"] in found
    assert ["demo", "remote", "off", "0", "after-2-hits", TIERS[2].reason] in found


def test_status_shows_stores_where_they_were_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits from a store are shown beside hits from memory, but only where there are any."""
    assert "disk" not in run("status")[1]
    monkeypatch.setattr(ScriptedClient, "counters", {"prefix_tokens_disk": 96})

    found = rows(run("status")[1])

    assert ["demo", "0", "0", "0", "96", "0"] in found


def test_status_shows_what_magazines_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that take blocks by magazines have figures of their own, and none of leases unless there are some."""
    done = {"exchanges": 12_345_678, "magazine_keys_held": 34_567_890, "magazine_keys_cached": 5}
    done |= {"magazine_keys_missed": 67_890_123, "blocks_taken": 98_765_432}
    monkeypatch.setattr(ScriptedClient, "counters", done)

    _, output, _ = run("status", COLUMNS="80")

    assert ["demo", "12,345,678", "34,567,890", "5", "67,890,123", "98,765,432"] in rows(output)
    assert "Prefixes" not in output
    monkeypatch.setattr(ScriptedClient, "counters", done | {"leases_granted": 7})
    assert ["demo", "7", "0", "0", "0"] in rows(run("status")[1])


def test_status_of_all_tiers_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all tiers no number is cut in 80 columns; reloads from all tiers are counted together."""
    tokens = {f"prefix_tokens_{tier}": 12_345_678 for tier in ("device", "host", "disk", "remote")}
    reloads = {"reloads": 1_000_000, "disk_loads": 200_000, "remote_loads": 30_000}
    stores = {"disk_stores": 4_000_000, "remote_stores": 5_000_000}
    monkeypatch.setattr(ScriptedClient, "counters", tokens | reloads | stores)

    _, output, _ = run("status", COLUMNS="80")

    assert max(map(len, output.splitlines())) <= 80
    assert "…" not in output
    assert ["demo", "0", *["12,345,678"] * 4, "0"] in rows(output)
    assert ["demo", "0", "0", "4,000,000", "5,000,000", "1,230,000"] in rows(output)


def test_workers_are_a_table() -> None:
    """The table shows who uses a cache, and what an operator must know to detach a worker."""
    status, output, _ = run("workers")

    assert status == 0
    assert ["7", "engine", "acme", "4242", "1", "2", "pidfd", "2 h"] in rows(output)
    assert json.loads(run("workers", "--json")[1])["demo"]["workers"] == [asdict(WORKER)]


def test_leases_tell_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table shows the tenant of each lease; long numbers are whole in 80 columns."""
    lease = replace(LEASE, lease_id=7_708_950_994_944_001, worker_id=7_708_950_994_944_002)
    monkeypatch.setitem(LISTS, "leases", Inspection(num_total=1, leases=(lease,)))

    output = run("leases", COLUMNS="80")[1]

    assert "7708950994944001 7708950994944002 acme active 2 1,024 29 s" in words(output)


def test_pins_tell_whose_and_how_old_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table shows whose each pin is, how old it is, and what ends it; an operator's may be of several tenants."""
    found = (
        PinInfo(pin_id=3, num_blocks=100, tenant="acme", age_ms=7_200_000),
        PinInfo(pin_id=4, num_blocks=1),
    )
    monkeypatch.setitem(LISTS, "pins", Inspection(num_total=2, pins=found))

    assert rows(run("pins")[1])[-2:] == [["3", "acme", "100", "2 h"], ["4", "several", "1", "0 s"]]


def test_waiting_calls_are_a_table() -> None:
    """The table shows who waits, for what, how much of it there is, and how long the call has waited and may wait."""
    status, output, _ = run("waiting")

    assert status == 0
    assert "7 reserve high 1 2,048 12 blocks 1 s 3 s" in words(output)
    assert json.loads(run("waiting", "--json")[1])["demo"]["waiting"] == [asdict(WAITING)]


def test_tenants_are_a_table() -> None:
    """The table shows what each tenant has of a cache, what it may have, and its share against the others."""
    status, output, _ = run("tenants")

    assert status == 0
    assert ["acme", "2,000", "40", "3", "5"] in rows(output)
    assert ["acme", "100", "4,000", "16", "8", "2.5", "6"] in rows(output)
    assert json.loads(run("tenants", "--json")[1])["demo"]["tenants"] == [asdict(TENANT)]


def test_tenants_with_the_most_blocks_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more tenants than are shown, those that use the most blocks are, in whatever order the daemon has them."""
    found = [
        replace(TENANT, tenant=f"t{number}", tenant_id=number, used_blocks=number % 7)
        for number in range(1, 301)
    ]

    def inspect(
        _: object, cache: str, what: str, *, limit: int = 0, after_id: int = 0
    ) -> Inspection:
        assert (cache, what) == ("demo", "tenants")
        return Inspection(num_total=300, tenants=tuple(found[after_id : after_id + limit]))

    monkeypatch.setattr(ScriptedClient, "inspect", inspect)

    _, output, _ = run("tenants", "--limit", "2")
    listed = json.loads(run("tenants", "--limit", "45", "--json")[1])["demo"]["tenants"]

    assert [row[0] for row in rows(output) if row[0].startswith("t1")] == ["t104", "t111"] * 2
    assert "2 of 300 shown" in output
    assert [one["used_blocks"] for one in listed] == [6] * 43 + [5] * 2


def test_list_tells_what_it_left_out() -> None:
    """A list is read in pages; where it ends at the limit, it says how many entries there are."""
    _, output, _ = run("leases", "--limit", "299")

    assert "299 7 acme active 2 1,024 29 s" in words(output)
    assert "299 of 300 shown" in output
    assert "shown" not in run("leases", "--limit", "300")[1]


def test_empty_list_is_a_sentence() -> None:
    """Where there is no entry, a sentence replaces the table."""
    assert run("pins", "--cache", "demo") == (0, "no pins\n", "")


@pytest.mark.parametrize("what", ["workers", "tenants", "waiting"])
def test_list_of_no_cache_says_so(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no cache is registered, the sentence says so; tenants' limits can be asked for all the same."""
    monkeypatch.setattr(ScriptedClient, "list_caches", lambda _: ())

    status, output, errors = run(what)

    assert (status, errors) == (0, "")
    assert ": no cache is registered" in output
    assert ("kvlease tenants get NAME" in output) is (what == "tenants")
    assert run(what, "--json") == (0, "{}\n", "")


@pytest.mark.parametrize(
    "arguments", [("status",), ("caches",), ("tenants",), ("explain", "9")], ids=" ".join
)
def test_piped_rows_are_not_folded(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where output is neither a terminal nor as wide as COLUMNS says, a script finds each row in one line."""
    monkeypatch.setattr(ScriptedClient, "name", "demo-" * 60)
    monkeypatch.setattr(ScriptedClient, "inspect", lambda *_, **__: LISTS["tenants"])
    monkeypatch.delenv("COLUMNS", raising=False)

    _, output, _ = run(*arguments, COLUMNS="")

    assert MISSES[0].why in output if arguments[0] == "explain" else "demo-" * 60 in output


def test_nobody_waiting_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no call waits, the sentence says so in words of its own."""
    monkeypatch.setitem(LISTS, "waiting", Inspection(num_total=0))

    assert run("waiting", "--cache", "demo") == (0, "no call is waiting\n", "")


def test_explain_tells_every_run_and_what_to_change() -> None:
    """The table shows what was found where, and each run of misses with its reason and a sentence; nothing is cut."""
    status, output, _ = run("explain", "9", COLUMNS="80")

    assert status == 0
    assert "Lease 9: 32 of 64,037 tokens were found" in output
    assert ["2-4,001", "evicted", "4 s ago", "device", "leaf-lru", "batch"] in rows(output)
    assert ["4,002", "shorter than a block"] in rows(output)
    assert "the last 5 tokens cannot fill a block of 16 tokens" in output
    assert max(map(len, output.splitlines())) <= 80
    assert json.loads(run("explain", "9", "--json")[1]) == json.loads(
        json.dumps(asdict(EXPLANATION))
    )


def test_what_left_at_this_moment_left_just_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """An age of less than a second is not told as a number of seconds."""
    fresh = replace(EXPLANATION, misses=(replace(MISSES[0], age_ms=999),))
    monkeypatch.setattr(ScriptedClient, "explain_lease", lambda *_, **__: fresh)

    assert ["2-4,001", "evicted", "just now", "device", "leaf-lru", "batch"] in rows(
        run("explain", "9")[1]
    )


def test_input_that_no_call_carries_is_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal of invalid input is the command line's fault, whether the client or the daemon finds it."""

    def refuse(*_: object, **__: object) -> Explanation:
        raise InvalidError("lease_id must be from 1 to 5, not 9", resource="lease_id")

    monkeypatch.setattr(ScriptedClient, "explain_lease", refuse)

    status, output, errors = run("explain", "9")

    assert (status, output) == (2, "")
    assert "lease_id must be" in errors


def test_explain_of_a_full_hit_has_no_table() -> None:
    """Where nothing was missed, no table is shown."""
    _, output, _ = run("explain", "8", "--cache", "demo")

    assert words(output) == ["Lease 8: 0 of 0 tokens were found", "to compute 0 tokens"]


def test_evict_says_what_left() -> None:
    """The command says how many blocks left, and how many of them were copied to the host."""
    status, output, _ = run("evict", "--cache", "demo", "--blocks", "4")

    assert (status, output) == (0, "4 blocks evicted, 1 copied to the host pool\n")


def test_events_are_lines() -> None:
    """Each event is one line."""
    expected = "00:00:01.000 3 lease_granted cache=demo worker_id=1 lease_id=2 num_blocks=4\n"

    assert run("events")[1] == expected
    assert json.loads(run("events", "--json")[1])["lease_id"] == 2


def test_snapshot_tells_what_the_cache_was() -> None:
    """The first lines of a watch say who is there and how many blocks of each pool are free."""
    event = replace(EVENT, kind="snapshot", worker_id=0, lease_id=0, num_blocks=0, snapshot=CACHE)

    assert event_line(event).endswith("snapshot cache=demo workers=2 leases=5 device_free=50/64")
    (pool,) = CACHE.pools
    smaller = replace(CACHE, pools=(replace(pool, free=10, parked=40),))
    assert event_line(replace(event, snapshot=smaller)).endswith("device_free=10/24")


def test_snapshots_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command has the same option as the library and REST, and it is off unless it is given."""
    asked: list[bool] = []

    def watch(_: object, **given: Any) -> Iterator[Event]:
        asked.append(given["with_snapshot"])
        yield EVENT

    monkeypatch.setattr(ScriptedClient, "watch", watch)
    run("events")
    run("events", "--with-snapshot")

    assert asked == [False, True]


def test_events_go_on_after_the_last_one_until_the_daemon_stays_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A watch that lost the daemon begins again after the last event; in the end it says after which to go on."""
    asked: list[int] = []
    answers = iter([True, False, True, False])

    def watch(_: object, **given: Any) -> Iterator[Event]:
        asked.append(given["after_sequence"])
        yield replace(EVENT, sequence=EVENT.sequence + len(asked))
        monkeypatch.setattr(following, "RETURN_SECONDS", 30.0 if len(asked) == 1 else -1.0)
        raise UnavailableError("lost")

    def stats(_: object) -> None:
        if not next(answers):
            raise UnavailableError("away")

    monkeypatch.setattr(following, "_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(ScriptedClient, "watch", watch)
    monkeypatch.setattr(ScriptedClient, "stats", stats)

    status, output, errors = run("events")

    assert (status, asked) == (1, [0, EVENT.sequence + 1])
    assert len(output.splitlines()) == len(asked)
    assert errors.count("lost; waiting for it to come back") == len(asked)
    assert f"UNAVAILABLE: away; to go on later, begin with --after {EVENT.sequence + 2}" in errors


def test_event_of_a_tenant_names_it() -> None:
    """A tenant's name stands between the cache and the numbers, if the event has one."""
    event = replace(EVENT, kind="cache_cleared", worker_id=0, lease_id=0, tenant="chat")

    assert event_line(event).endswith("cache_cleared cache=demo tenant=chat num_blocks=4")


def test_event_of_a_resize_names_the_pool() -> None:
    """The tier stands before the blocks or slots that it has now."""
    event = replace(EVENT, kind="cache_resized", worker_id=0, lease_id=0, tier="host")

    assert event_line(event).endswith("cache_resized cache=demo tier=host num_blocks=4")


def test_health_is_a_status() -> None:
    """A daemon that answers is reported as healthy."""
    assert run("health") == (0, "ok: epoch 11, 1 cache, 5 leases\n", "")


def test_version_is_that_of_the_package() -> None:
    """`kvlease --version` prints the installed version without a call."""
    assert run("--version", KVLEASE_ADDRESS="full") == (0, f"kvlease {version('kvlease')}\n", "")


def test_refusal_is_a_sentence() -> None:
    """A refusal of the daemon goes to standard error with its code, and the status is 1."""
    status, output, errors = run("health", KVLEASE_ADDRESS="full")

    assert (status, output) == (1, "")
    assert errors.startswith("POOL_FULL: More is asked for")


def test_cache_that_there_is_not_is_told_with_what_lists_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command that names an unknown cache, perhaps misspelt, is told which command lists the caches."""

    def refuse(*_: object, **__: object) -> Explanation:
        raise UnknownCacheError("there is no cache 'dmo'; register it first", resource="dmo")

    monkeypatch.setattr(ScriptedClient, "explain_lease", refuse)

    errors = run("explain", "9")[2]

    assert errors.endswith("; kvlease caches lists all caches\n")


@pytest.mark.parametrize("arguments", [["evict", "--blocks", "0"], ["nonsense"], ["evict"]])
def test_senseless_command_line_is_status_2(arguments: list[str]) -> None:
    """A senseless command line is refused before any call."""
    assert run(*arguments)[0] == 2


def test_refusal_is_one_line_however_narrow_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is one line, so that a log, or a search for its words, has the whole sentence."""
    sentence = f"ask for less: {'more than there is, ' * 20}"

    def refuse(*_: object, **__: object) -> Explanation:
        raise InvalidError(sentence, resource="lease_id")

    monkeypatch.setattr(ScriptedClient, "explain_lease", refuse)

    assert run("explain", "9", COLUMNS="40")[2] == f"INVALID: {sentence}\n"
