"""Whatever the server or the network does, each packet is answered, and a store that is back is used again."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvleased.config.addresses import RemoteUrl
from kvleased.movers.remote.breaker import Breaker
from kvleased.movers.remote.redis_store import RedisStore
from kvleased.movers.remote.store import RemoteError
from tests.servers.faulty import Fault, faulty_server
from tests.servers.redis import RedisServer
from tests.unit.service.movers.remote.remote_node import (
    NUM_SLOTS,
    Node,
    served,
    served_by_process,
    wait_until,
)

SHORT_SECONDS = 0.5
"""A budget that faults use up."""
EVERY_SLOT = list(range(NUM_SLOTS))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may kill."""
    server = RedisServer(tmp_path)
    yield server
    server.kill()


def _comes_back(node: Node) -> bool:
    """Wait until the store is on, without traffic, and then move a block there and back."""
    node.until_on()
    return _works(node)


def _works(node: Node) -> bool:
    fetched = node.share([2], [2]).failed + node.fetch([3], [2]).failed
    return fetched == () and np.array_equal(node.block(3), node.slots[2])


def test_killed_server_gives_misses_and_comes_back(server: RedisServer) -> None:
    """A killed server gives misses; a new one is found without any request."""
    with served(server.url) as node:
        node.share([0], [0])
        assert node.status().is_on

        server.kill()
        fetched, shared, asked = node.fetch([1], [0]), node.share([1], [1]), node.ask([0])
        off = node.status()
        server.come_up()

        assert fetched.failed == shared.failed == (0,)
        assert asked == b""
        assert not off.is_on
        assert "refused" in off.reason
        assert _comes_back(node)


def test_restarted_server_costs_nothing(server: RedisServer) -> None:
    """A connection that the server closed while idle is noticed before it is used."""
    with served(server.url, breaker=Breaker(failures_max=1), idle_seconds=60) as node:
        assert node.ask([0]) == b"\0"
        server.kill()
        server.come_up()

        assert _works(node)
        assert [one.is_on for one in node.statuses] == [True]


def test_stopped_server_gives_misses_within_the_budget(server: RedisServer) -> None:
    """A server that hangs costs one budget and then nothing, until it goes on by itself."""
    with served(server.url, seconds_max=SHORT_SECONDS) as node:
        node.until_on()
        server.stop()
        try:
            fetched = node.fetch([1], [0])
            off = node.status()
            answers = [node.ask([0]) for _ in range(50)]
        finally:
            server.go_on()

        assert fetched.failed == (0,)
        assert not off.is_on
        assert answers == [b""] * 50
        assert _comes_back(node)


def test_no_server_from_the_start_is_said_and_not_waited_for(tmp_path: Path) -> None:
    """A mover whose store was never there starts, answers at once and says why there are only misses."""
    with served(f"unix://{tmp_path}/none.sock") as node:
        status = node.status()

        assert not status.is_on
        assert "none.sock" in status.reason
        assert node.fetch([1], [0]).failed == (0,)


def test_address_that_is_none_is_said() -> None:
    """A mover with a malformed URL gives misses and says what is wrong with the URL."""
    with served("redis://u:pw@") as node:
        status = node.status()
        assert node.ask([0]) == b""

    assert (status.is_on, status.reason) == (
        False,
        "remote_url: the scheme must be followed by a host and a port, or unix:// by the path of a socket",
    )


@pytest.mark.parametrize("fault", sorted(set(Fault) - {Fault.NONE, Fault.SLOW}, key=str))
def test_broken_answers_are_misses(server: RedisServer, fault: Fault) -> None:
    """Answers that are slow, missing, cut or meaningless are misses, and the store is used again afterwards."""
    with faulty_server(str(server.socket)) as way:
        url = f"redis://127.0.0.1:{way.port}"
        with served(url, seconds_max=SHORT_SECONDS) as node, served(server.url) as other:
            other.share([0, 1], [0, 1])
            node.until_on()
            way.fault = fault

            fetched = node.fetch([0, 1], [0, 1])
            wait_until(lambda: _is_off(node))
            way.fault = Fault.NONE

            assert fetched.failed == (0, 1)
            assert not node.device.any()
            node.until_on()
            wait_until(lambda: node.fetch([0, 1], [0, 1]).failed == ())
            assert np.array_equal(node.block(1), other.slots[1])


def _is_off(node: Node) -> bool:
    node.ask([0])
    return any(not one.is_on for one in node.statuses)


@pytest.mark.parametrize("direction", ["fetch", "share"])
def test_slow_way_gives_what_the_budget_allows(server: RedisServer, direction: str) -> None:
    """If a batch takes longer than its budget, its first positions are done, and the store stays on."""
    with faulty_server(str(server.socket)) as way:
        way.fault = Fault.SLOW
        url = f"redis://127.0.0.1:{way.port}"
        shape = {"page_bytes": 1 << 18}
        with served(url, seconds_max=2.0, **shape) as node, served(server.url, **shape) as other:
            if direction == "fetch":
                other.share(EVERY_SLOT, EVERY_SLOT)
                done = node.fetch(EVERY_SLOT, EVERY_SLOT)
            else:
                done = node.share(EVERY_SLOT, EVERY_SLOT)
                other.slots[:] = node.slots
                other.fetch(EVERY_SLOT, EVERY_SLOT)
                node.device[:] = other.device

            num_done = NUM_SLOTS - len(done.failed)
            assert done.failed == tuple(range(num_done, NUM_SLOTS))
            assert 0 < num_done < NUM_SLOTS
            assert done.num_bytes == num_done * node.slot_bytes
            for one in range(num_done):
                assert np.array_equal(node.block(one), other.slots[one])
            assert [one.is_on for one in node.statuses] == [True]


def test_full_server_takes_nothing_and_still_gives(tmp_path: Path) -> None:
    """A server at its limit that may not evict takes no new value, and still serves those that it has."""
    server = RedisServer(tmp_path, "--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    try:
        with served(server.url) as node, server.client() as client:
            client.config_set("maxmemory", "0")
            node.share([0], [0])
            client.config_set("maxmemory", "1mb")

            shared, fetched = node.share([1], [1]), node.fetch([5], [0])

            assert shared.failed == (0,)
            assert fetched.failed == ()
            assert [one.is_on for one in node.statuses] == [True]
    finally:
        server.kill()


def test_server_that_cannot_save_still_gives(tmp_path: Path) -> None:
    """A server that refuses writes and pings because its disk is broken is on, and serves what it has."""
    folder = (tmp_path / "data").resolve()
    folder.mkdir()
    server = RedisServer(tmp_path, "--dir", str(folder), "--save", "3600 1")
    try:
        with served(server.url) as other:
            other.share([0], [0])
        folder.rmdir()
        with server.client() as client:
            client.bgsave()
            wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
        with served(server.url) as node:
            assert node.status().is_on
            shared, fetched = node.share([1], [1]), node.fetch([5], [0])

            assert shared.failed == (0,)
            assert fetched.failed == ()
    finally:
        server.kill()


def test_evicted_values_are_misses(tmp_path: Path) -> None:
    """A value that the server evicted is a miss; those that it kept are right."""
    server = RedisServer(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    try:
        with served(server.url, page_bytes=1 << 16) as node, server.client() as client:
            shared = node.share(EVERY_SLOT, EVERY_SLOT)
            client.config_set("maxmemory", "0")
            asked, fetched = node.ask(EVERY_SLOT), node.fetch(EVERY_SLOT, EVERY_SLOT)

            there = [one for one in EVERY_SLOT if one not in fetched.failed]
            assert shared.failed == ()
            assert 0 < len(there) == client.dbsize() < NUM_SLOTS
            assert [one for one in EVERY_SLOT if asked[one]] == there
            assert all(np.array_equal(node.block(one), node.slots[one]) for one in there)
    finally:
        server.kill()


def test_values_live_as_long_as_the_settings_say(server: RedisServer) -> None:
    """With a time to live each value has it from its put; without one it has no limit."""
    with served(server.url, ttl_seconds=500) as node, server.client() as client:
        node.share([0], [0])
        (name,) = client.keys()
        assert 0 < client.ttl(name) <= 500

        client.pexpire(name, 1)
        wait_until(lambda: node.ask([0]) == b"\0")
        assert node.fetch([0], [0]).failed == (0,)

    with served(server.url) as node, server.client() as client:
        node.share([0], [0])
        assert client.ttl(client.keys()[0]) == -1


ACL = "--user cache on >p%ss/w#rd ~kvlease:* +get +getrange +strlen +set +unlink +select"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RedisServer]:
    """A server with one user, who has only the documented rights."""
    server = RedisServer(tmp_path, *ACL.split(), "--user", "default", "off")
    yield server
    server.kill()


@pytest.mark.parametrize("place", ["tcp", "unix"])
def test_user_with_the_least_rights_is_enough(guarded: RedisServer, place: str) -> None:
    """A user and password in the URL, and the documented commands, are enough."""
    entry = "cache:p%25ss%2Fw%23rd@"
    urls = {
        "tcp": f"redis://{entry}127.0.0.1:{guarded.port}/3",
        "unix": f"unix://{entry}{guarded.socket}?db=3",
    }
    with served(urls[place]) as node:
        assert _works(node)


def test_refused_user_is_said_without_the_password(guarded: RedisServer) -> None:
    """If the server refuses the user, the reason says so, and no log line has the password."""
    url = f"redis://cache:wr0ng-s3cret@127.0.0.1:{guarded.port}"
    with served_by_process(url) as (node, process):
        status = node.status()
        asked = node.ask([0])
        node.link.close()
        process.wait(60)
        assert process.stderr is not None
        said = process.stderr.read().decode()

    assert not status.is_on
    assert "invalid username-password" in status.reason
    assert asked == b""
    assert "wr0ng-s3cret" not in said + status.reason
    assert [json.loads(line)["event"] for line in said.splitlines()] == ["remote_store_off"]


def test_tier_that_stays_off_says_the_latest_reason(guarded: RedisServer) -> None:
    """The reason is that of the latest trial: a slow first trial does not hide a wrong password."""
    guarded.stop()
    url = f"redis://cache:wr0ng@127.0.0.1:{guarded.port}"
    with served(url, seconds_max=SHORT_SECONDS) as node:
        slow = node.status()
        guarded.go_on()
        refused = node.status()

    assert (slow.is_on, refused.is_on) == (False, False)
    assert "no answer within" in slow.reason
    assert "invalid username-password" in refused.reason


@pytest.mark.parametrize(
    ("rights", "said"),
    [
        pytest.param("+get", "run the 'strlen' command; grant the user +get", id="commands"),
        pytest.param("+strlen", "run the 'getrange' command; grant the user +get", id="bytes"),
        pytest.param("+strlen +getrange", "", id="enough"),
    ],
)
def test_trial_asks_for_what_callers_ask(tmp_path: Path, rights: str, said: str) -> None:
    """A server that answers pings only is off, and the reason says what its user may not do."""
    server = RedisServer(tmp_path, *f"--user some on nopass ~kvlease:* {rights}".split())
    try:
        with served(f"redis://some:any@127.0.0.1:{server.port}") as node:
            status = node.status()
    finally:
        server.kill()

    assert status.is_on == (not said)
    assert said in status.reason


def test_right_that_is_taken_away_ends_the_store_until_it_is_given_back(tmp_path: Path) -> None:
    """Once its user may not read, the store goes off although other calls succeed, until the right is back."""
    rights = "+strlen +getrange +set +expire"
    server = RedisServer(tmp_path, *f"--user some on nopass ~kvlease:* {rights}".split())
    try:
        with server.client() as admin, served(f"redis://some:any@127.0.0.1:{server.port}") as node:
            assert node.status().is_on
            admin.execute_command("ACL", "SETUSER", "some", "-getrange")

            assert node.ask([0]) == b"\0"
            assert node.share([1], [1]).failed == ()
            assert node.fetch([1], [1]).failed == (0,)
            off = node.status()
            admin.execute_command("ACL", "SETUSER", "some", "+getrange")

            assert not off.is_on
            assert "run the 'getrange' command; grant the user +get" in off.reason
            assert _comes_back(node)
    finally:
        server.kill()


def test_node_of_a_cluster_is_said_to_be_one(tmp_path: Path) -> None:
    """A cluster's node is off, as it would refuse most names, and the reason says so in words."""
    nodes = (tmp_path / "cluster-nodes.conf").resolve()
    server = RedisServer(tmp_path, "--cluster-enabled", "yes", "--cluster-config-file", str(nodes))
    try:
        with server.client() as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 100)
        with served(server.url) as node:
            status = node.status()
    finally:
        server.kill()

    assert not status.is_on
    assert "a node of a Redis cluster" in status.reason
    assert "name a server that has all" in status.reason


def test_full_server_is_said_with_what_to_do(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Puts without room fail and the log says what to set; the store stays on."""
    server = RedisServer(tmp_path, "--maxmemory", "1", "--maxmemory-policy", "noeviction")
    try:
        with served(server.url) as node:
            shared = node.share([1], [1])
            assert [one.is_on for one in node.statuses] == [True]
    finally:
        server.kill()

    assert shared.failed == (0,)
    assert "raise maxmemory, or set a maxmemory-policy" in "".join(capfd.readouterr())


def test_user_who_may_not_drop_is_told_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """If spoiled values cannot be dropped, the log says that, and not that puts are refused."""
    rights = "+strlen +getrange +set +expire"
    server = RedisServer(tmp_path, *f"--user some on nopass ~kvlease:* {rights}".split())
    try:
        with server.client() as admin, served(f"redis://some:any@127.0.0.1:{server.port}") as node:
            node.share([1], [1])
            (name,) = admin.keys("kvlease:*")
            admin.setrange(name, 0, b"spoiled")
            assert node.fetch([1], [1]).failed == (0,)
            assert node.share([2], [2]).failed == ()
    finally:
        server.kill()

    said = [json.loads(line) for line in "".join(capfd.readouterr()).splitlines()]
    refusals = {one["event"]: one["reason"] for one in said if one.get("reason")}
    assert list(refusals) == ["remote_drops_refused"]
    assert "grant the user +get +getrange +strlen +set +unlink" in refusals["remote_drops_refused"]


def test_user_who_may_only_read_still_gets(tmp_path: Path) -> None:
    """A user who may not write gets what others have shared, and the store stays on."""
    reads = "--user reader on nopass ~kvlease:* +getrange +strlen"
    server = RedisServer(tmp_path, *reads.split())
    try:
        with served(server.url) as other:
            other.share([0], [0])
        with served(f"redis://reader:any@127.0.0.1:{server.port}") as node:
            shared, fetched = node.share([1], [1]), node.fetch([5], [0])

            assert shared.failed == (0,)
            assert fetched.failed == ()
            assert [one.is_on for one in node.statuses] == [True]
    finally:
        server.kill()


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that speaks TLS with a certificate that it made itself."""
    server = RedisServer(tmp_path, is_tls=True)
    yield server
    server.kill()


def test_encrypted_server_is_used_with_its_authority(encrypted: RedisServer) -> None:
    """TLS works with the authority that the URL names, and not with the system's authorities."""
    base = f"rediss://127.0.0.1:{encrypted.port}"
    with served(f"{base}?ssl_ca_certs={encrypted.certificate}") as node:
        assert _works(node)
    with served(base) as node:
        status = node.status()

    assert not status.is_on
    assert "CERTIFICATE_VERIFY_FAILED" in status.reason
    assert "name its authority with ssl_ca_certs" in status.reason


def test_encrypted_server_named_as_a_plain_one_is_told(encrypted: RedisServer) -> None:
    """If a port speaks TLS and the URL does not, the connection ends, and the reason names the scheme to try."""
    with served(encrypted.url) as node:
        status = node.status()

    assert not status.is_on
    assert status.reason.endswith("; use rediss:// in remote_url if its port uses TLS")


def test_plain_server_named_as_an_encrypted_one_is_told(server: RedisServer) -> None:
    """If the URL asks for TLS and the port has none, the call waits or fails; the reason names the scheme to try."""
    with served(f"rediss://127.0.0.1:{server.port}", seconds_max=SHORT_SECONDS) as node:
        status = node.status()

    assert not status.is_on
    assert status.reason.endswith("; use redis:// in remote_url if its port does not use TLS")


def test_server_that_has_answered_is_not_asked_for_its_scheme(server: RedisServer) -> None:
    """If a server that has answered ends the connection later, the reason does not speak of the scheme."""
    with faulty_server(str(server.socket)) as way:
        url = RemoteUrl.parse(f"redis://127.0.0.1:{way.port}")
        store = RedisStore(url, ttl_seconds=0, seconds_max=5.0)
        store.ping()
        way.fault = Fault.HALF

        with pytest.raises(RemoteError) as refusal:
            store.ping()
        store.close()

    assert "rediss" not in str(refusal.value)


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
@pytest.mark.parametrize("content", ["no certificate", None])
def test_file_that_cannot_be_used_is_named(
    encrypted: RedisServer, tmp_path: Path, option: str, content: str | None
) -> None:
    """The reason names the file, whether it is missing or malformed."""
    file = tmp_path / "given.pem"
    if content is not None:
        file.write_text(content)
    trust = f"ssl_ca_certs={encrypted.certificate}&" if option != "ssl_ca_certs" else ""
    with served(f"rediss://127.0.0.1:{encrypted.port}?{trust}{option}={file}") as node:
        status = node.status()

    assert not status.is_on
    assert f"{file}: " in status.reason
    assert "name PEM files that the daemon can read" in status.reason


def test_named_authority_is_the_only_one(
    encrypted: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the URL names an authority, a server of one of the system's authorities is refused."""
    named = tmp_path / "named"
    named.mkdir()
    other = RedisServer(named, is_tls=True)
    other.kill()
    monkeypatch.setenv("SSL_CERT_FILE", str(encrypted.certificate))
    base = f"rediss://127.0.0.1:{encrypted.port}"
    with served(base) as node:
        assert _works(node)
    with served(f"{base}?ssl_ca_certs={other.certificate}") as node:
        status = node.status()

    assert not status.is_on
    assert "CERTIFICATE_VERIFY_FAILED" in status.reason


def test_authorities_of_the_system_are_read_once(
    encrypted: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Authorities take long to read, so a store reads them once for all connections; the next store reads anew."""
    monkeypatch.setenv("SSL_CERT_FILE", str(encrypted.certificate))
    url = RemoteUrl.parse(f"rediss://127.0.0.1:{encrypted.port}")
    store, next_store = (RedisStore(url, ttl_seconds=0, seconds_max=5.0) for _ in range(2))
    store.ping()
    store.close()
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "nothing"))

    store.ping()
    store.close()
    with pytest.raises(RemoteError, match="CERTIFICATE_VERIFY_FAILED"):
        next_store.ping()


def test_stopped_encrypted_server_is_cut_off(encrypted: RedisServer) -> None:
    """A call through TLS ends at its budget like any other, and the store connects again."""
    url = f"rediss://127.0.0.1:{encrypted.port}?ssl_ca_certs={encrypted.certificate}"
    with served(url, seconds_max=SHORT_SECONDS * 2) as node:
        node.until_on()
        encrypted.stop()
        try:
            fetched = node.fetch([1], [0])
        finally:
            encrypted.go_on()
        off = node.status()

        assert fetched.failed == (0,)
        assert not off.is_on
        node.until_on()
