"""Laws of the places of HTTP: the oldest stranger gives way to a new one, and members lose no place to strangers."""

import asyncio
import contextlib
import json
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvleased.access.roles import Role
from kvleased.api import places as places_module
from kvleased.api import turns
from kvleased.api.places import STRANGERS_MAX, Places
from kvleased.api.rest.http_server import HttpServer
from kvleased.api.rest.probes import LIMITS, ProbeServer
from tests.unit.api.certificates import Authority
from tests.unit.api.guarded import Guarded, guarded

PROBE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
MEMBERS_MAX = 2
TOKENS = ("known", "other")
Line = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Guest:
    """A connection that records whether it had to give way."""

    def __init__(self, host: str = "a") -> None:
        self.host = host
        self.has_given_way = False
        self.has_unread = False

    def give_way(self) -> None:
        """Record that it gave way."""
        self.has_given_way = True


@pytest.fixture
async def places() -> Places:
    """Two places for members, and three for strangers."""
    return Places(2, 3, 7070)


@pytest.fixture
async def serving() -> AsyncIterator[Guarded]:
    """A daemon with few places for members."""
    with tempfile.TemporaryDirectory(prefix="kvl") as directory:
        async with guarded(Path(directory) / "run", max_connections=MEMBERS_MAX) as found:
            yield found


def over_tcp(serving: Guarded) -> HttpServer:
    """Return the listener on TCP."""
    return serving.rest._servers[1]


@contextlib.asynccontextmanager
async def held(port: int, count: int, sent: bytes) -> AsyncIterator[list[Line]]:
    """Hold a number of connections, each of which has sent something and been answered, or been ended."""
    lines: list[Line] = []
    try:
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            lines.append((reader, writer))
            if sent:
                writer.write(sent)
                await reader.readuntil(b"live\n")
        yield lines
    finally:
        for _, writer in lines:
            writer.close()
        for _, writer in lines:
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def ask(line: Line, token: str = "") -> int:
    """Ask for the caches over a connection; return the status, or 0 if the connection has ended."""
    reader, writer = line
    shown = f"Authorization: Bearer {token}\r\n" if token else ""
    writer.write(f"GET /v1/caches HTTP/1.1\r\nHost: localhost\r\n{shown}\r\n".encode())
    async with asyncio.timeout(20):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            await reader.readexactly(length)
        except (ConnectionError, asyncio.IncompleteReadError):
            return 0
    return int(head.split()[1])


async def ended(line: Line) -> bool:
    """Wait until a connection has ended, whatever it sends before."""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            await line[0].read()
    return True


async def test_oldest_stranger_makes_room_where_there_are_no_descriptors(places: Places) -> None:
    """Without descriptors, the first of the strangers ends, however few there are, and members stay."""
    places.make_room()
    member, *strangers = [Guest() for _ in range(3)]
    for guest in (member, *strangers):
        places.enter(guest)
    assert places.let_in(member)

    places.make_room()

    assert [one.has_given_way for one in (member, *strangers)] == [False, True, False]
    assert places.turned_away["stranger"] == 1


async def test_oldest_stranger_gives_way(places: Places) -> None:
    """A new connection has a place at once: the oldest of the same host ends, or else the oldest of all."""
    guests = [Guest("a"), Guest("b"), Guest("b"), Guest("b"), Guest("c")]

    with capture_logs() as lines:
        for guest in guests:
            places.enter(guest)

    assert [guest.has_given_way for guest in guests] == [True, True, False, False, False]
    assert places.turned_away == {"stranger": 2}
    assert [(line["event"], line["who"], line["count"]) for line in lines] == [
        ("connections_turned_away", "stranger", 1)
    ]
    assert repr(places) == "<Places 0 of members, 3 of strangers>"


async def test_members_give_way_to_nobody(places: Places) -> None:
    """A caller who was let in keeps a place until the end, and without a free place nobody is let in."""
    member, other, late = Guest(), Guest(), Guest()
    for guest in (member, other):
        places.enter(guest)
        assert places.let_in(guest)
    places.enter(late)

    with capture_logs() as lines:
        assert not places.let_in(late)
    for _ in range(9):
        places.enter(Guest())

    assert (member.has_given_way, other.has_given_way, late.has_given_way) == (False, False, True)
    assert (places.num_members, places.num_strangers) == (2, 3)
    assert [(line["who"], line["limit"]) for line in lines] == [("member", 2)]


async def test_members_that_asked_nothing_give_way_to_members(places: Places) -> None:
    """The oldest member without a complete head, and without bytes to read, goes for a newcomer; who asked stays."""
    asked, reading, silent, late, too_late = (Guest() for _ in range(5))
    places.members_max = 3
    for guest in (asked, reading, silent):
        assert places.let_in_unheard(guest)
    places.hear(asked)
    reading.has_unread = True

    assert places.let_in_unheard(late)
    places.hear(late)
    assert not places.let_in_unheard(too_late)
    reading.has_unread = False
    assert places.let_in(too_late)

    guests = (asked, reading, silent, late, too_late)
    assert [one.has_given_way for one in guests] == [False, True, True, False, False]
    assert places.turned_away == {"member": 3}


async def test_idle_members_give_way_to_members(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has been idle longest goes for a newcomer, after who asked nothing; who asks again, or just asked, stays."""
    seconds = 0.0
    monkeypatch.setattr(places_module, "monotonic", lambda: seconds)
    places.members_max = 5
    asking, longest, reading, shorter, unheard = (Guest() for _ in range(5))
    for guest in (asking, reading, longest, shorter):
        assert places.let_in(guest)
        places.rest(guest)
    assert places.let_in_unheard(unheard)
    places.rouse(asking)
    places.rest(shorter)
    reading.has_unread = True
    assert places.let_in(Guest()), "in place of who asked nothing"
    assert not places.let_in(Guest()), "nobody has been idle for long"

    seconds = places_module.SECONDS_IDLE
    late = Guest()
    assert places.let_in(late)
    places.rest(late)

    guests = (asking, longest, reading, shorter, unheard, late)
    assert [one.has_given_way for one in guests] == [False, True, False, False, True, False]
    for guest in (late, shorter):
        places.show_out(guest)
    places.leave(reading)
    assert places._idle == {}


async def test_connection_that_was_answered_gives_way_while_it_is_idle(
    serving: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that is kept for later requests holds off no newcomer; one whose next head has begun does."""
    monkeypatch.setattr(places_module, "SECONDS_IDLE", 0.0)
    path = serving.settings.http_socket
    idle, other = [await asyncio.open_unix_connection(path) for _ in range(MEMBERS_MAX)]
    assert [await ask(idle), await ask(other)] == [200, 200]
    idle[1].write(b"GET /v1/caches HTTP/1.1\r\n")
    assert await ask(other) == 200

    newcomer = await asyncio.open_unix_connection(path)
    assert [await ask(newcomer), await ask(other)] == [200, 0]

    idle[1].write(b"Host: localhost\r\n\r\n")
    assert await idle[0].readline() == b"HTTP/1.1 200 OK\r\n", "a head had begun"
    for _, writer in (idle, other, newcomer):
        writer.close()


async def test_idle_connections_hold_off_nobody_over_the_unix_socket(serving: Guarded) -> None:
    """Who sends no whole head to the Unix socket gives way, told why; who has asked keeps its connection."""
    path, lines = serving.settings.http_socket, []
    busy, *idle = [await asyncio.open_unix_connection(path) for _ in range(MEMBERS_MAX)]
    lines += [busy, *idle]
    assert await ask(busy) == 200
    idle[0][1].write(b"GET /v1/caches HTTP/1.1\r\n")
    lines += [await asyncio.open_unix_connection(path) for _ in range(4 * MEMBERS_MAX)]

    assert await ask(lines[-1]) == 200
    assert await ask(busy) == 200
    assert b"as many as max_connections" in await idle[0][0].read()
    lines.append(await asyncio.open_unix_connection(path))
    assert await ask(lines[-1]) == 429
    for _, writer in lines:
        writer.close()


async def test_member_without_its_token_is_a_stranger_again(places: Places) -> None:
    """A place belongs to the class of its connection's last request."""
    guest = Guest()
    places.enter(guest)
    assert places.let_in(guest)
    assert places.let_in(guest)

    places.show_out(guest)
    places.show_out(guest)

    assert (places.num_members, places.num_strangers) == (0, 1)
    places.leave(guest)
    assert places.num_strangers == 0


@pytest.mark.parametrize("sent", [b"", PROBE], ids=["silent", "probing"])
async def test_strangers_hold_off_nobody_with_a_token(serving: Guarded, sent: bytes) -> None:
    """However many connections strangers hold, a caller with a token connects, is served, and stays connected."""
    port, token = serving.rest.http_port, serving.tokens[Role.READER]

    async with held(port, 1, b"") as (mine,):
        assert await ask(mine, token) == 200
        async with held(port, 2 * STRANGERS_MAX, sent) as lines:
            status, _ = await serving.over_rest("GET", "/v1/caches", token)
            ends = [await ended(line) for line in lines[:STRANGERS_MAX]]
            assert over_tcp(serving).num_connections <= STRANGERS_MAX + MEMBERS_MAX
            assert await ask(mine, token) == 200
            assert await ask(lines[-1]) == 401

    assert status == 200
    assert all(ends)


async def test_guessed_token_has_no_members_place(serving: Guarded) -> None:
    """A guessed token gives no member's place, as only a token of the daemon counts."""
    port = serving.rest.http_port

    async with held(port, MEMBERS_MAX + 1, b"") as lines:
        assert [await ask(line, "0" * 32) for line in lines] == [401] * len(lines)
        assert over_tcp(serving).places.num_members == 0
        async with held(port, 1, b"") as (mine,):
            assert await ask(mine, serving.tokens[Role.READER]) == 200
            assert over_tcp(serving).places.num_members == 1
            assert await ask(mine) == 401
            assert over_tcp(serving).places.num_members == 0


async def test_member_too_many_is_told_so_before_its_call(serving: Guarded) -> None:
    """When members hold all places, one more is refused, and nothing of its call is done."""
    port, token = serving.rest.http_port, serving.tokens[Role.OPERATOR]

    async with held(port, MEMBERS_MAX, b"") as lines:
        assert [await ask(line, token) for line in lines] == [200] * MEMBERS_MAX
        status, problem = await serving.over_rest("POST", "/v1/drain", token)

    assert (status, problem["code"], problem["resource"]) == (429, "BUSY", "connections")
    assert problem["detail"].startswith(
        "2 connections are open to this listener, as many as max_connections"
    )
    assert [problem[name] for name in ("need", "available", "limit")] == [1, 0, MEMBERS_MAX]
    assert problem["retry_after_ms"]
    assert not serving.node.daemon.registry.is_draining
    async with asyncio.timeout(20):
        while over_tcp(serving).num_connections:  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.01)
    assert (await serving.over_rest("GET", "/v1/caches", token))[0] == 200


async def test_stranger_who_gives_way_is_told_why(serving: Guarded) -> None:
    """The stranger learns how many strangers there may be, and that a token gives a place of another kind."""
    over_tcp(serving).places.strangers_max = 1

    async with held(serving.rest.http_port, 2, b"") as (oldest, _):
        async with asyncio.timeout(20):
            told = (await oldest[0].read()).decode()

    problem = json.loads(told.partition("\r\n\r\n")[2])
    assert (problem["code"], problem["limit"]) == ("BUSY", 1)
    assert problem["detail"].startswith("1 connection is open to this listener without a token")


async def test_stranger_does_not_go_on_for_ever(
    serving: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's first answer after the longest idle time is its last; a member's is not."""
    monkeypatch.setattr(over_tcp(serving)._protocol, "idle_seconds_max", 0.0)
    token = serving.tokens[Role.READER]

    async with held(serving.rest.http_port, 2, b"") as (stranger, member):
        assert [await ask(stranger), await ask(stranger)] == [401, 0]
        assert [await ask(member, token), await ask(member, token)] == [200, 200]


async def test_handshakes_hold_off_nobody_with_a_token() -> None:
    """Strangers without a handshake keep out nobody with a token; the first stranger gives way first."""
    with tempfile.TemporaryDirectory(prefix="kvl") as directory:
        authority = Authority(Path(directory))
        pair = await asyncio.to_thread(authority.sign, "server")
        files = {"tls_cert_file": pair.cert_file, "tls_key_file": pair.key_file}
        async with guarded(Path(directory) / "run", **files) as serving:
            port, token = serving.rest.http_port, serving.tokens[Role.READER]
            trusting = ssl.create_default_context(cafile=authority.cert_file)

            def ask_over_tls() -> int:
                connection = HTTPSConnection("127.0.0.1", port, timeout=20, context=trusting)
                connection.request(
                    "GET", "/v1/caches", headers={"Authorization": f"Bearer {token}"}
                )
                status = connection.getresponse().status
                connection.close()
                return status

            async with held(port, 2 * STRANGERS_MAX, b"") as lines:
                status = await asyncio.to_thread(ask_over_tls)
                assert await ended(lines[0])
                num_connections = over_tcp(serving).num_connections
            async with asyncio.timeout(20):
                while over_tcp(serving).num_connections:  # noqa: ASYNC110 -- nothing tells of it
                    await asyncio.sleep(0.01)

    assert status == 200
    assert num_connections <= STRANGERS_MAX + 1


async def test_connection_that_was_closed_already_has_no_place(
    serving: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller who opens and closes faster than the daemon accepts takes no place, and none is made for it."""
    port, server, made = serving.rest.http_port, over_tcp(serving), []
    make = server._make
    monkeypatch.setattr(server, "_make", lambda *about: made.append(about) or make(*about))

    async with held(port, 1, PROBE) as (line,):
        # While the loop is held here, nothing is accepted.
        for _ in range(2 * STRANGERS_MAX):
            socket.create_connection(("127.0.0.1", port), timeout=20).close()
        assert await ask(line) == 401
        assert (await serving.over_rest("GET", "/v1/caches", serving.tokens[Role.READER]))[0] == 200
        assert await ask(line) == 401

    assert len(made) == 2


@pytest.mark.parametrize("sent", [b"", PROBE], ids=["silent", "probing"])
async def test_liveness_gets_through(serving: Guarded, sent: bytes) -> None:
    """All callers of the probes' port are strangers, and a new one always has a place."""
    server = ProbeServer(serving.rest.probes)
    await server.start("127.0.0.1", 0)

    def probe() -> int:
        connection = HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("GET", "/livez", headers={"Connection": "close"})
        status = connection.getresponse().status
        connection.close()
        return status

    async with held(server.port, 2 * LIMITS.strangers_max, sent):
        statuses = [await asyncio.to_thread(probe) for _ in range(5)]
    await server.stop()

    assert statuses == [200] * 5


async def test_lost_connections_have_no_turn() -> None:
    """Requests whose connection has ended in line are not begun, and hold up nobody."""
    begun: list[int] = []

    async def app(scope: object, *_: object) -> None:
        begun.append(scope["number"])  # type: ignore[index]  # as it is made below

    async def nothing(*_: object) -> dict[str, object]:
        return {}

    paced = turns.OneATurn(app, turns.Line())
    lost = {"is_lost": False}
    scopes = [{"number": 0}, *({"number": n, "extensions": lost} for n in (1, 2, 3)), {"number": 4}]
    tasks = [asyncio.ensure_future(paced(scope, nothing, nothing)) for scope in scopes]
    await asyncio.sleep(0)
    lost["is_lost"] = True
    for _ in range(6):
        await asyncio.sleep(0)

    assert begun == [0, 4]
    assert all(task.done() for task in tasks)
