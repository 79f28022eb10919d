"""Laws of the commands for a running daemon: which cache they mean, what they drain, and how they report it."""

import json
from dataclasses import replace
from typing import Any, ClassVar, Self

import pytest
from typer.testing import CliRunner

from kvlease.cli import app as cli
from kvlease.cli import connecting, operating
from kvlease.errors import UnavailableError, UnknownLeaseError
from kvlease.operating import (
    Cleared,
    Deleted,
    Drained,
    DrainedCache,
    Resized,
    TenantLimits,
    TenantRule,
)
from kvlease.replies import CacheInfo, CacheStats, Evicted, Explanation, Stats
from tests.unit.client.cli.test_app import CACHE, INFO

CLEARED = Cleared(
    num_device=3, num_host=2, num_disk=1, num_held=0, lease_ids=(), pin_ids=(), num_copying=0, num_in_magazines=0,
    keeps_remote=False,
)  # fmt: skip


class Daemon:
    """A client of a daemon with some caches; it records the calls."""

    caches: ClassVar[tuple[CacheInfo, ...]] = ()
    is_draining: ClassVar[bool] = False
    counters: ClassVar[dict[str, int]] = {}
    leases: ClassVar[dict[str, tuple[int, ...]]] = {}
    asked: ClassVar[list[tuple[Any, ...]]] = []
    deleted: ClassVar[Deleted] = Deleted(num_pins=0, keeps_disk=False, keeps_remote=False)

    def __init__(self, address: str | None, **_: object) -> None:
        """Keep the address."""
        self.address = address

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Have nothing to close."""

    def stats(self, _: str = "") -> Stats:
        """Describe the caches; at one address, describe another daemon."""
        if self.address == "stranger":
            raise UnavailableError("cannot be reached (\x1b]0;\x07\x00\u202e)")
        names = [one.cache for one in self.caches]
        is_stopping = self.address == "stopping"
        found: list[CacheStats] = [
            replace(CACHE, cache=name, counters=self.counters) for name in names
        ]
        return Stats(
            epoch=11, caches=tuple(found), is_draining=self.is_draining, is_stopping=is_stopping
        )

    def list_caches(self) -> tuple[CacheInfo, ...]:
        """Return the caches."""
        return self.caches

    def explain_lease(self, lease_id: int, *, cache: str = "") -> Explanation:
        """Explain a lease that the cache has."""
        self.asked.append(("explain", cache))
        if lease_id not in self.leases.get(cache or "a", ()):
            raise UnknownLeaseError
        return Explanation(lease_id=lease_id)

    def clear(self, cache: str, *, tenant: str = "") -> Cleared:
        """Record a clear."""
        self.asked.append(("clear", cache, tenant))
        return CLEARED

    def resize(self, cache: str, tier: str, num_blocks: int) -> Resized:
        """Record a resize."""
        self.asked.append(("resize", cache, tier, num_blocks))
        return Resized(num_blocks=num_blocks, num_parked=0, num_evicted=0, bytes_given_back=0)

    def unpin(self, pin_id: int, *, cache: str) -> bool:
        """End a pin; there is only one."""
        self.asked.append(("unpin", pin_id, cache))
        return pin_id == 7

    def detach(self, worker_id: int, *, force: bool) -> int:
        """End a worker that has one lease."""
        self.asked.append(("detach", worker_id, force))
        return 1

    def evict(self, *, num_blocks: int, wait_ms: int, cache: str) -> Evicted:
        """Record an evict."""
        self.asked.append(("evict", cache, num_blocks, wait_ms))
        return Evicted()

    def drain(self, *, cache: str) -> Drained:
        """Record a drain."""
        self.asked.append(("drain", cache))
        one = DrainedCache(
            cache=cache, is_draining=True, num_leases=0, num_waiting=0, num_workers=0
        )
        return Drained(is_daemon_draining=False, caches=(one,))

    def undrain(self, *, cache: str) -> Drained:
        """Undo the drain."""
        self.asked.append(("undrain", cache))
        return Drained(is_daemon_draining=False, caches=())

    def delete_cache(self, cache: str, *, purge: bool) -> Deleted:
        """Record a deletion."""
        self.asked.append(("delete", cache, purge))
        return replace(self.deleted, keeps_disk=self.deleted.keeps_disk and not purge)

    def get_tenant(self, tenant: str) -> TenantRule:
        """Return limits."""
        return TenantRule(tenant=tenant, limits=TenantLimits(), revision=0)

    def set_tenant(self, tenant: str, limits: TenantLimits, *, revision: int) -> TenantRule:
        """Set limits."""
        self.asked.append(("set_tenant", tenant, limits, revision))
        return TenantRule(tenant=tenant, limits=limits, revision=revision)


@pytest.fixture(autouse=True)
def daemon(monkeypatch: pytest.MonkeyPatch) -> type[Daemon]:
    """Have the commands use a daemon with the caches a and b."""

    class Own(Daemon):
        caches = (replace(INFO, cache="a"), replace(INFO, cache="b"))
        asked: ClassVar[list[tuple[Any, ...]]] = []

    monkeypatch.setattr(connecting, "Client", Own)
    return Own


def run(*arguments: str, address: str = "") -> tuple[int, str, str]:
    """Return the exit status, output and errors of a command line."""
    runner = CliRunner(env={"COLUMNS": "200", "KVLEASE_ADDRESS": address})
    result = runner.invoke(cli.app, arguments)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        pytest.param(("clear",), ("clear", "a", ""), id="clear"),
        pytest.param(("resize", "--blocks", "3"), ("resize", "a", "device", 3), id="resize"),
        pytest.param(("evict", "--blocks", "3"), ("evict", "a", 3, 0), id="evict"),
        pytest.param(("drain",), ("drain", "a"), id="drain"),
        pytest.param(("drain", "--undo"), ("undrain", "a"), id="drain undone"),
        pytest.param(("undrain",), ("undrain", "a"), id="undrain"),
        pytest.param(("delete",), ("delete", "a", False), id="delete"),
    ],
)
def test_cache_is_named_in_either_way(
    daemon: type[Daemon], arguments: tuple[str, ...], wanted: tuple[Any, ...]
) -> None:
    """A cache may be named by an option or by an argument; two different names are refused before any call."""
    assert run(*arguments, "--cache", "a")[0] == run(*arguments, "a")[0] == 0
    assert run(*arguments, "a", "--cache", "a")[0] == 0
    assert daemon.asked == [wanted] * 3

    status, _, errors = run(*arguments, "a", "--cache", "b")

    assert (status, daemon.asked) == (2, [wanted] * 3)
    assert "'b' and 'a' are two different caches; name only one" in errors


@pytest.mark.parametrize(
    ("tier", "count", "wanted"),
    [
        pytest.param(
            "device",
            1,
            "1 block can be granted, 1 is out of use; 1 cached block was dropped, and 8 bytes are given back\n",
            id="one block",
        ),
        pytest.param(
            "host",
            2,
            "2 slots can be used, 2 are out of use; 2 cached blocks were dropped, and 8 bytes are given back\n",
            id="two slots",
        ),
    ],
)
def test_resize_counts_in_words(
    daemon: type[Daemon], monkeypatch: pytest.MonkeyPatch, tier: str, count: int, wanted: str
) -> None:
    """What a resize did is told of one block as of several."""
    done = Resized(num_blocks=count, num_parked=count, num_evicted=count, bytes_given_back=8)
    monkeypatch.setattr(daemon, "resize", lambda *_: done)

    told = run("resize", "a", "--tier", tier, "--blocks", str(count))

    assert told == (0, wanted, "")


@pytest.mark.parametrize("arguments", [("clear",), ("resize", "--blocks", "3"), ("delete",)])
def test_what_takes_away_guesses_no_cache(daemon: type[Daemon], arguments: tuple[str, ...]) -> None:
    """A command that takes something away needs the cache's name, and does nothing without it."""
    status, _, errors = run(*arguments)

    assert (status, daemon.asked) == (2, [])
    assert "name the cache" in errors


class Watched(Daemon):
    """A daemon with a lease; each look at it shows the next of some pictures."""

    looks: ClassVar[list[tuple[bool, int]]] = []
    """For each look to come: whether the daemon is drained, and how many leases it has."""

    def stats(self, _: str = "") -> Stats:
        """Show the next picture; the last one stays."""
        is_draining, num_leases = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        own = type(self)
        own.is_draining, own.caches = (
            is_draining,
            (replace(INFO, cache="a", is_draining=is_draining),),
        )
        found = replace(CACHE, cache="a", num_leases=num_leases)
        return Stats(epoch=11, caches=(found,), is_draining=is_draining)

    def drain(self, *, cache: str) -> Drained:
        """Begin a drain."""
        self.asked.append(("drain", cache))
        one = DrainedCache(cache="a", is_draining=True, num_leases=1, num_waiting=0, num_workers=1)
        return Drained(is_daemon_draining=not cache, caches=(one,))


@pytest.mark.parametrize("cache", ["", "a"])
@pytest.mark.parametrize(
    ("looks", "wanted", "told"),
    [
        pytest.param([(True, 1), (True, 0)], 0, "", id="the leases end"),
        pytest.param([(True, 1), (False, 1)], 4, "leases are granted again", id="ended by others"),
        pytest.param([(False, 0)], 4, "leases are granted again", id="a new daemon"),
    ],
)
def test_drain_that_waits_drains_once(
    monkeypatch: pytest.MonkeyPatch,
    looks: list[tuple[bool, int]],
    wanted: int,
    told: str,
    cache: str,
) -> None:
    """A drain that waits looks until all leases have ended or somebody undrains; it drains only once."""

    class Own(Watched):
        caches = (replace(INFO, cache="a", is_draining=True),)
        asked: ClassVar[list[tuple[Any, ...]]] = []

    Own.looks = list(looks)
    monkeypatch.setattr(connecting, "Client", Own)
    monkeypatch.setattr(operating, "_LOOK_SECONDS", 0.0)

    status, output, errors = run("drain", *([cache] if cache else []), "--wait-seconds", "600")

    assert (status, Own.asked) == (wanted, [("drain", cache)])
    assert told in errors
    assert ("a grants nothing new" in output) == (wanted == 0)


@pytest.mark.parametrize("arguments", [("drain", "--undo"), ("undrain",)])
def test_undone_drain_says_what_holds_now(arguments: tuple[str, ...]) -> None:
    """After an undrain, the command says what the daemon does now."""
    assert run(*arguments) == (0, "the daemon grants leases\n", "")


@pytest.mark.parametrize("arguments", [("drain",), ("drain", "--undo"), ("undrain",)])
def test_drain_of_a_cache_tells_of_that_cache(arguments: tuple[str, ...]) -> None:
    """A command about one cache does not begin with what the daemon grants, unless that bears on the cache."""
    assert "the daemon" not in run(*arguments, "a")[1]


def test_delete_says_what_is_gone() -> None:
    """A delete says what is gone; an operator needs no program to delete a cache."""
    assert run("delete", "a") == (0, "a is deleted\n", "")


def test_device_pool_of_no_blocks_is_refused_with_what_to_do(daemon: type[Daemon]) -> None:
    """A host pool may have no blocks, a device pool may not; the refusal says what to do instead."""
    status, _, errors = run("resize", "a", "--blocks", "0")

    assert (status, daemon.asked) == (2, [])
    assert "kvlease drain" in errors
    assert run("resize", "a", "--blocks", "0", "--tier", "host")[0] == 0


def test_lease_is_looked_for_in_all_caches(daemon: type[Daemon]) -> None:
    """A lease id is enough, as it is unique in a daemon; where no cache has it, the searched caches are named."""
    daemon.leases = {"a": (7,), "b": (8, 9)}

    assert run("explain", "8")[:2] == (
        0,
        "Lease 8: 0 of 0 tokens were found\nto compute  0 tokens\n",
    )
    assert run("explain", "9", "--cache", "b")[0] == 0
    status, _, errors = run("explain", "6")
    assert (status, "none of the caches a, b has a lease 6" in errors) == (1, True)


def test_lease_of_the_only_cache_takes_one_call(daemon: type[Daemon]) -> None:
    """With only one cache, the lease is asked for in a single call."""
    daemon.caches, daemon.leases = daemon.caches[:1], {"a": (7,)}

    assert run("explain", "7")[0] == 0
    assert daemon.asked == [("explain", "")]


def test_drained_cache_is_shown(daemon: type[Daemon]) -> None:
    """Both tables show that a cache is drained, and status says how to undrain it."""
    daemon.caches = (replace(INFO, cache="a", is_draining=True), replace(INFO, cache="b"))

    shown = run("status")[1]

    assert "ready, draining, no remote" in shown
    assert "drained: a; to grant leases again, use kvlease drain --undo" in " ".join(shown.split())
    assert "ready, draining" in run("caches")[1]
    assert json.loads(run("caches", "--json")[1])[0]["is_draining"] is True


def test_health_is_3_where_nothing_new_is_granted(daemon: type[Daemon]) -> None:
    """A single drained cache is named while the rest is well; if all are drained, the exit status says so."""
    a, b = daemon.caches
    daemon.caches = (replace(a, is_draining=True), b)
    assert run("health") == (0, "ok: epoch 11, 2 caches, 10 leases; drained: a\n", "")

    daemon.caches = (replace(a, is_draining=True), replace(b, is_draining=True))
    status, output, _ = run("health")

    assert status == 3
    assert output.startswith(
        "draining: epoch 11, 2 caches, 10 leases; to grant leases again, use kvlease drain --undo"
    )


def test_drained_daemon_without_caches_is_not_well(daemon: type[Daemon]) -> None:
    """A drained daemon is reported as drained, with or without caches."""
    daemon.caches, daemon.is_draining = (), True

    status, output, _ = run("health")

    assert status == 3
    assert output.startswith(
        "draining: epoch 11, 0 caches, 0 leases; to grant leases again, use kvlease drain --undo"
    )
    assert "the daemon is drained; to grant leases again, use kvlease drain --undo" in " ".join(
        run("status")[1].split()
    )


def test_health_says_its_statuses() -> None:
    """The help lists the exit statuses, for those who write scripts."""
    said = " ".join(run("health", "--help")[1].split())

    assert "0: it answers" in said
    assert "3: it answers and grants nothing new" in said


def test_what_a_peer_wrote_does_nothing_to_a_terminal() -> None:
    """Control characters, and characters that reverse a line, are shown in an escaped form."""
    status, _, errors = run("health", address="stranger")

    assert status == 1
    assert errors == "UNAVAILABLE: cannot be reached (\\x1b]0;\\x07\\x00\\u202e)\n"


def test_bytes_of_a_tenant_may_have_a_unit(daemon: type[Daemon]) -> None:
    """A tenant's bytes may have a unit, as in a plan; what is no number of bytes is refused with an example."""
    status, told, _ = run("tenants", "set", "chat", "--max-bytes", "8GiB", "--min-bytes", "4096")
    assert status == 0
    assert "until the whole daemon ends" in told
    assert daemon.asked[0][2] == TenantLimits(max_bytes=8 << 30, min_bytes=4096)

    status, _, errors = run("tenants", "set", "chat", "--max-bytes", "8 gigs")

    assert status == 2
    assert "write for example 8GiB" in errors


def test_limits_that_are_not_named_are_not_set(daemon: type[Daemon]) -> None:
    """A command without any limit would only raise the revision, so it is refused; one limit is enough."""
    status, _, errors = run("tenants", "set", "chat")
    assert (status, daemon.asked) == (2, [])
    assert "no limit is named" in errors

    assert run("tenants", "set", "chat", "--revision", "4")[0] == 0


@pytest.mark.usefixtures("daemon")
def test_how_long_limits_hold_is_said() -> None:
    """What is set, and what is taken away, holds until the daemon ends, which goes by its settings again."""
    told = [
        " ".join("".join(run("tenants", "set", "chat", *named)[1:]).split())
        for named in (["--max-bytes", "8GiB"], ["--unset"], ["--unset", "--weight", "2"])
    ]

    assert ["set them in the daemon's settings" in text for text in told] == [True, False, True]
    assert "then those of its settings hold again, if it has any" in told[1]


def test_host_pool_that_stays_empty_is_explained(daemon: type[Daemon]) -> None:
    """Where blocks leave without a copy although there is a host pool, the command says what would copy them."""
    plan = replace(INFO.plan, num_slots=8)
    a, b = daemon.caches
    daemon.caches, daemon.counters = (replace(a, plan=plan), b), {"evictions": 5572}

    shown = " ".join(run("status")[1].split())

    assert "none was copied to the host pool: a (5,572). " in shown
    assert "wait_ms above 0" in shown
    daemon.counters = {"evictions": 5572, "offloads": 1}
    assert "none was copied" not in run("status")[1]


def test_blocks_that_the_host_pool_had_before_are_not_missed(daemon: type[Daemon]) -> None:
    """Blocks of a host pool that was kept over a restart leave the device without a copy: no call need wait longer."""
    a, b = daemon.caches
    daemon.caches = (replace(a, plan=replace(INFO.plan, num_slots=8)), b)
    daemon.counters = {"evictions": 118, "reloads": 168}

    assert "none was copied" not in run("status")[1]


def test_delete_tells_what_ended_and_what_is_left(daemon: type[Daemon]) -> None:
    """A delete counts the pins that end and says what stays in lower tiers; a purge leaves no disk store."""
    daemon.deleted = Deleted(num_pins=1, keeps_disk=True, keeps_remote=True)

    kept, purged = run("delete", "a"), run("delete", "a", "--purge")

    assert "a is deleted, and 1 pin with it\n" in kept[1]
    assert "its disk store is kept" in kept[1]
    assert "disk store" not in purged[1]
    assert "the remote store keeps what it has" in purged[1]
    assert daemon.asked == [("delete", "a", False), ("delete", "a", True)]
    assert json.loads(run("delete", "a", "--json")[1])["num_pins"] == 1


def test_help_lists_what_looks_before_what_changes() -> None:
    """Each command stands in the panel of what it is for, and those that change nothing come first."""
    told = run("--help")[1]

    assert (
        told.index(" plan ")
        < told.index(" status ")
        < told.index(" Change ")
        < told.index(" drain ")
    )
    assert " Commands " not in told


def test_help_of_delete_says_what_stays() -> None:
    """The help of delete says that prompts stay in the disk store."""
    told = " ".join(run("delete", "--help")[1].split())

    assert "Its disk store stays, with all that was cached" in told
    assert "--purge" in told


def test_unpin_ends_the_pin_that_is_named(daemon: type[Daemon]) -> None:
    """Unpin ends the named pin; for an unknown pin it says so, and a script can tell the two by the status."""
    assert run("unpin", "7", "--cache", "a") == (0, "pin 7 has ended\n", "")
    status, _, errors = run("unpin", "8")
    assert (status, "there is no pin 8" in errors) == (1, True)
    assert daemon.asked == [("unpin", 7, "a"), ("unpin", 8, "a"), ("unpin", 8, "b")]
    assert json.loads(run("unpin", "7", "--json")[1]) == {"pin_id": 7, "released": True}


def test_unpin_of_the_id_of_no_pin_is_told_like_any_other(daemon: type[Daemon]) -> None:
    """0 is what a pin of no cached block is answered with; unpinning it is asked for and told as over the API."""
    status, _, errors = run("unpin", "0", "--cache", "a")

    assert (status, "there is no pin 0" in errors) == (1, True)
    assert daemon.asked == [("unpin", 0, "a")]


def test_limits_are_told_to_their_last_digit() -> None:
    """Limits that are read can be written again and are the same."""
    told = run("tenants", "set", "chat", "--max-bytes", "8GiB", "--min-percent", "33.3333333")[1]

    assert "max_bytes 8589934592," in told
    assert "min_percent 33.3333333," in told
    assert "max_percent 100," in told


def test_no_cache_is_said(daemon: type[Daemon]) -> None:
    """Where there is no cache, a sentence says so: empty output would look like a fault."""
    daemon.caches = ()

    assert run("caches") == (0, "no caches\n", "")
    assert run("caches", "--json") == (0, "[]\n", "")


def test_tenants_get_tells_the_limits_of_one() -> None:
    """`tenants get` shows one tenant's limits as `tenants set` does, and changes none."""
    assert run("tenants", "get", "chat")[1].startswith("chat, revision 0: min_percent 0")
    assert json.loads(run("tenants", "get", "chat", "--json")[1])["revision"] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("drain", "--cache", ""), id="drain"),
        pytest.param(("drain", ""), id="drain-by-name"),
        pytest.param(("drain", "--undo", "--cache", ""), id="undo"),
        pytest.param(("undrain", "--cache="), id="undrain"),
        pytest.param(("clear", "a", "--tenant", ""), id="tenant"),
    ],
)
def test_name_that_a_script_left_empty_does_not_mean_everything(arguments: tuple[str, ...]) -> None:
    """An empty name is refused where none at all means the whole daemon, or everybody."""
    status, output, errors = run(*arguments)

    assert (status, output) == (2, "")
    assert "it is empty; write a name, or leave it out" in errors


def test_clear_of_a_tenant_that_has_nothing_says_so(
    daemon: type[Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clear of a tenant without blocks says so, so that a misspelt name is noticed; it is no fault."""
    nothing = replace(CLEARED, num_device=0, num_host=0, num_disk=0)
    monkeypatch.setattr(daemon, "clear", lambda *_, **__: nothing)

    status, output, _ = run("clear", "a", "--tenant", "nobody")

    assert status == 0
    assert "nothing is cached for a tenant 'nobody' in a; kvlease tenants lists" in output
    assert "tenant" not in run("clear", "a")[1]


def test_health_of_a_daemon_that_stops_advises_nothing_that_is_refused() -> None:
    """For a daemon that SIGTERM stops, no undrain is advised, as it would be refused; status says the same.

    The signal may have come to the control process alone, which its supervisor replaces: then granting begins again.
    """
    status, output, _ = run("health", address="stopping")

    assert status == 3
    assert "told to stop: it ends with its leases" in output
    assert "if only its control process was told, its supervisor then starts another" in output
    shown = " ".join(run("status", address="stopping")[1].split())
    for said in (output, shown):
        assert "use kvlease drain --undo" not in said
        assert "drain --undo cannot end that" in said
    assert json.loads(run("health", "--json", address="stopping")[1])["status"] == "stopping"


def test_machines_read_what_commands_did(daemon: type[Daemon]) -> None:
    """Each command that changes or judges something has --json; a command about one thing names it."""
    daemon.caches = daemon.caches[:1]

    assert json.loads(run("evict", "a", "--blocks", "1", "--json")[1])["num_evicted"] == 0
    assert json.loads(run("detach", "5", "--json")[1]) == {"worker_id": 5, "num_leases": 1}
    assert run("detach", "5")[1] == "worker 5 ended, and 1 lease with it\n"
    assert json.loads(run("health", "--json")[1]) == {
        "status": "ok",
        "epoch": 11,
        "num_caches": 1,
        "num_leases": 5,
        "drained": [],
    }
    assert "1 cache," in run("health")[1]
