"""Laws of what operators type at a running daemon: which cache is meant, what is drained, and what it is worth."""

import json
from dataclasses import replace
from typing import Any, ClassVar, Self

import pytest
from typer.testing import CliRunner

from kvlease.cli import app as cli
from kvlease.cli import connecting
from kvlease.errors import UnavailableError, UnknownLeaseError
from kvlease.operating import Cleared, Drained, DrainedCache, Resized, TenantLimits, TenantRule
from kvlease.replies import CacheInfo, CacheStats, Evicted, Explanation, Stats
from tests.unit.client.test_cli import CACHE, INFO

CLEARED = Cleared(
    num_device=3, num_host=2, num_disk=1, num_held=0, lease_ids=(), pin_ids=(), num_copying=0, num_in_magazines=0,
    keeps_remote=False,
)  # fmt: skip


class Daemon:
    """A client of a daemon with some caches, which keeps what it was asked for."""

    caches: ClassVar[tuple[CacheInfo, ...]] = ()
    counters: ClassVar[dict[str, int]] = {}
    leases: ClassVar[dict[str, tuple[int, ...]]] = {}
    asked: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, address: str | None, **_: object) -> None:
        """Be somewhere."""
        self.address = address

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Have nothing to close."""

    def stats(self, _: str = "") -> Stats:
        """Describe the caches; of one address, be somebody else."""
        if self.address == "stranger":
            raise UnavailableError("cannot be reached (\x1b]0;\x07\x00\u202e)")
        names = [one.cache for one in self.caches]
        found: list[CacheStats] = [
            replace(CACHE, cache=name, counters=self.counters) for name in names
        ]
        return Stats(epoch=11, caches=tuple(found))

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
        """Clear it."""
        self.asked.append(("clear", cache, tenant))
        return CLEARED

    def resize(self, cache: str, tier: str, num_blocks: int) -> Resized:
        """Resize it."""
        self.asked.append(("resize", cache, tier, num_blocks))
        return Resized(num_blocks=num_blocks, num_parked=0, num_evicted=0, bytes_given_back=0)

    def evict(self, *, num_blocks: int, wait_ms: int, cache: str) -> Evicted:
        """Evict."""
        self.asked.append(("evict", cache, num_blocks, wait_ms))
        return Evicted()

    def drain(self, *, cache: str) -> Drained:
        """Drain it."""
        self.asked.append(("drain", cache))
        one = DrainedCache(
            cache=cache, is_draining=True, num_leases=0, num_waiting=0, num_workers=0
        )
        return Drained(is_daemon_draining=False, caches=(one,))

    def delete_cache(self, cache: str) -> None:
        """Delete it."""
        self.asked.append(("delete", cache))

    def get_tenant(self, tenant: str) -> TenantRule:
        """Return limits."""
        return TenantRule(tenant=tenant, limits=TenantLimits(), revision=0)

    def set_tenant(self, tenant: str, limits: TenantLimits, *, revision: int) -> TenantRule:
        """Set limits."""
        self.asked.append(("set_tenant", tenant, limits, revision))
        return TenantRule(tenant=tenant, limits=limits, revision=revision)


@pytest.fixture(autouse=True)
def daemon(monkeypatch: pytest.MonkeyPatch) -> type[Daemon]:
    """Have the commands talk to a daemon with the caches a and b."""

    class Own(Daemon):
        caches = (replace(INFO, cache="a"), replace(INFO, cache="b"))
        asked: ClassVar[list[tuple[Any, ...]]] = []

    monkeypatch.setattr(connecting, "Client", Own)
    return Own


def run(*arguments: str, address: str = "") -> tuple[int, str, str]:
    """Return exit status, output and errors of a command line."""
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
        pytest.param(("delete",), ("delete", "a"), id="delete"),
    ],
)
def test_cache_is_named_in_either_way(
    daemon: type[Daemon], arguments: tuple[str, ...], wanted: tuple[Any, ...]
) -> None:
    """An option or an argument, it is the same; two that differ are refused before anything is done."""
    assert run(*arguments, "--cache", "a")[0] == run(*arguments, "a")[0] == 0
    assert run(*arguments, "a", "--cache", "a")[0] == 0
    assert daemon.asked == [wanted] * 3

    status, _, errors = run(*arguments, "a", "--cache", "b")

    assert (status, daemon.asked) == (2, [wanted] * 3)
    assert "'b' and 'a' are two caches" in errors


@pytest.mark.parametrize("arguments", [("clear",), ("resize", "--blocks", "3"), ("delete",)])
def test_what_takes_away_guesses_no_cache(daemon: type[Daemon], arguments: tuple[str, ...]) -> None:
    """It must be named, and nothing is done where it is not."""
    status, _, errors = run(*arguments)

    assert (status, daemon.asked) == (2, [])
    assert "name the cache" in errors


def test_delete_says_what_is_gone() -> None:
    """An operator needs no program to be rid of a cache."""
    assert run("delete", "a") == (0, "a is deleted\n", "")


def test_device_pool_of_no_blocks_is_refused_with_what_to_do(daemon: type[Daemon]) -> None:
    """A host pool may have none, a device pool not; whoever wants that learns how to have it."""
    status, _, errors = run("resize", "a", "--blocks", "0")

    assert (status, daemon.asked) == (2, [])
    assert "kvlease drain" in errors
    assert run("resize", "a", "--blocks", "0", "--tier", "host")[0] == 0


def test_lease_is_looked_for_in_all_caches(daemon: type[Daemon]) -> None:
    """An id is enough where one cache has it; where several do, or none, they are named."""
    daemon.leases = {"a": (7, 9), "b": (8, 9)}

    assert run("explain", "8")[:2] == (
        0,
        "Lease 8: 0 of 0 tokens were found\nto compute  0 tokens\n",
    )
    assert run("explain", "9", "--cache", "b")[0] == 0
    status, _, errors = run("explain", "9")
    assert (status, "the caches a, b have a lease 9 each" in errors) == (2, True)
    status, _, errors = run("explain", "6")
    assert (status, "none of the caches a, b has a lease 6" in errors) == (1, True)


def test_lease_of_the_only_cache_takes_one_call(daemon: type[Daemon]) -> None:
    """Where there is nothing to choose the daemon is asked as it ever was."""
    daemon.caches, daemon.leases = daemon.caches[:1], {"a": (7,)}

    assert run("explain", "7")[0] == 0
    assert daemon.asked == [("explain", "")]


def test_drained_cache_is_shown(daemon: type[Daemon]) -> None:
    """Its status says so in both tables, and status tells how it ends."""
    daemon.caches = (replace(INFO, cache="a", is_draining=True), replace(INFO, cache="b"))

    shown = run("status")[1]

    assert "ready, draining, no remote" in shown
    assert "drained: a; kvlease drain --undo" in " ".join(shown.split())
    assert "ready, draining" in run("caches")[1]
    assert json.loads(run("caches", "--json")[1])[0]["is_draining"] is True


def test_health_is_3_where_nothing_new_is_granted(daemon: type[Daemon]) -> None:
    """One drained cache is named beside what is well; where all are drained, a script can see it."""
    a, b = daemon.caches
    daemon.caches = (replace(a, is_draining=True), b)
    assert run("health") == (0, "ok: epoch 11, 2 caches, 10 leases; drained: a\n", "")

    daemon.caches = (replace(a, is_draining=True), replace(b, is_draining=True))
    status, output, _ = run("health")

    assert status == 3
    assert output.startswith("draining: epoch 11, 2 caches, 10 leases; kvlease drain --undo")


def test_health_says_its_statuses() -> None:
    """Whoever writes a script finds the exit statuses in the help."""
    said = " ".join(run("health", "--help")[1].split())

    assert "0: it answers" in said
    assert "3: it answers and grants nothing new" in said


def test_what_a_peer_wrote_does_nothing_to_a_terminal() -> None:
    """Control characters, and those that turn a line around, are shown rather than sent."""
    status, _, errors = run("health", address="stranger")

    assert status == 1
    assert errors == "UNAVAILABLE: cannot be reached (\\x1b]0;\\x07\\x00\\u202e)\n"


def test_bytes_of_a_tenant_may_have_a_unit(daemon: type[Daemon]) -> None:
    """As a plan's may; what is no number of bytes is refused with an example."""
    assert run("tenants", "set", "chat", "--max-bytes", "8GiB", "--min-bytes", "4096")[0] == 0
    assert daemon.asked[0][2] == TenantLimits(max_bytes=8 << 30, min_bytes=4096)

    status, _, errors = run("tenants", "set", "chat", "--max-bytes", "8 gigs")

    assert status == 2
    assert "write for example 8GiB" in errors


def test_host_pool_that_stays_empty_is_explained(daemon: type[Daemon]) -> None:
    """Blocks that leave without a copy although there is a host pool are told, with what would copy them."""
    plan = replace(INFO.plan, num_slots=8)
    a, b = daemon.caches
    daemon.caches, daemon.counters = (replace(a, plan=plan), b), {"evictions": 5572}

    shown = " ".join(run("status")[1].split())

    assert "none copied to the host pool: a (5,572). " in shown
    assert "wait_ms above 0" in shown
    daemon.counters = {"evictions": 5572, "offloads": 1}
    assert "none copied" not in run("status")[1]
