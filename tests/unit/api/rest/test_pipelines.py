"""Laws of many requests at once on one connection: all are answered in order and hold up nobody else."""

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.roles import Role
from tests.unit.api.guarded import Guarded, guarded

SECONDS = 30
NUM_REQUESTS = 500
PIPELINE_MAX = 16
HEAD = b"HTTP/1.1\r\nHost: localhost\r\n"
GET = b"GET /livez " + HEAD + b"\r\n"
BODY = b'{"inputs": ' + b" " * 5000 + b"{}}"
POST = b"POST /v1/plans " + HEAD + b"Content-Type: application/json\r\nAuthorization: Bearer %b\r\n"


@pytest.fixture
async def serving() -> AsyncIterator[Guarded]:
    """A daemon."""
    with tempfile.TemporaryDirectory(prefix="kvl") as directory:
        async with guarded(Path(directory) / "run") as found:
            yield found


async def answers(serving: Guarded, said: bytes, num_answers: int) -> list[int]:
    """Send something in one go; return the statuses of a number of answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.rest.http_port)
    writer.write(said)
    statuses = []
    async with asyncio.timeout(SECONDS):
        for _ in range(num_answers):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            statuses.append(int(head.split()[1]))
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
    writer.close()
    return statuses


async def test_all_of_many_requests_are_answered(serving: Guarded) -> None:
    """Requests that come in one go have as many answers, each in its place."""
    said = (GET * 4 + GET.replace(b"/livez", b"/nowhere")) * (NUM_REQUESTS // 5)

    assert await answers(serving, said, NUM_REQUESTS) == [200, 200, 200, 200, 404] * (
        NUM_REQUESTS // 5
    )


async def test_few_requests_are_taken_up_at_once(serving: Guarded) -> None:
    """However many requests come in one go, only a few are read before the first answers."""
    connections = serving.rest._servers[1]._server.server_state.connections
    answering = asyncio.ensure_future(answers(serving, GET * NUM_REQUESTS, NUM_REQUESTS))
    waiting = set()
    while not answering.done():
        waiting |= {len(one.pipeline) for one in connections}  # type: ignore[union-attr]
        await asyncio.sleep(0)

    assert len(answering.result()) == NUM_REQUESTS
    assert 0 < max(waiting) <= PIPELINE_MAX


@pytest.mark.parametrize("is_chunked", [False, True], ids=["whole", "chunked"])
async def test_bodies_between_requests_arrive_whole(serving: Guarded, is_chunked: bool) -> None:
    """A body belongs to its own request to the last byte, whatever follows in the same go."""
    token = (await serving.token(Role.JOINER)).encode()
    if is_chunked:
        body = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    else:
        body = b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    said = (GET + POST % token + body) * 20
    statuses = await answers(serving, said, 40)
    alone = await answers(serving, POST % token + body, 1)

    assert statuses == [200, *alone] * 20
    assert await answers(serving, POST % token + body.replace(b'"inputs"', b'"inputz"'), 1) == [422]


async def test_what_comes_behind_a_refusal_is_not_answered(serving: Guarded) -> None:
    """Where one of many requests is no HTTP, the requests before it are answered, and nothing behind it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.rest.http_port)
    writer.write(GET * 50 + b"\0\1\2\r\n\r\n" + GET * 50)
    async with asyncio.timeout(SECONDS):
        answer = await reader.read()
    writer.close()

    assert answer.count(b"HTTP/1.1 200") <= 50
    assert answer.count(b"HTTP/1.1 400") == 1


@pytest.mark.parametrize(
    ("refused", "status"),
    [(b"\0\1\2\r\n\r\n", 400), (b"GET /livez " + HEAD + b"X: %b\r\n" % (b"x" * 70_000), 431)],
    ids=["no HTTP", "a large head"],
)
async def test_refusal_waits_for_the_answers_before_it(
    serving: Guarded, refused: bytes, status: int
) -> None:
    """A request that is refused behind others is answered behind them, however long these take."""
    assert await _answered_behind_a_slow_one(serving, GET + refused + GET) == [200, 200, status]


async def test_request_whose_body_is_refused_is_not_begun(serving: Guarded) -> None:
    """A request behind others whose body is no HTTP is refused behind them, and not even asked to go on."""
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    head = POST % serving.tokens[Role.OPERATOR].encode()
    body = b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n"

    assert await _answered_behind_a_slow_one(serving, head + body) == [200, 400]
    assert not faults


async def _answered_behind_a_slow_one(serving: Guarded, requests: bytes) -> list[int]:
    """Send requests behind one whose answer comes last, and return the statuses of all answers in order."""
    slow = asyncio.get_running_loop().create_future()
    serving.node.daemon.call = lambda *_: slow  # type: ignore[method-assign]  # an answer that waits
    token = serving.tokens[Role.OPERATOR].encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.rest.http_port)
    writer.write(b"GET /v1/stats " + HEAD + b"Authorization: Bearer %b\r\n\r\n" % token)
    writer.write(requests)
    for _ in range(200):
        await asyncio.sleep(0)
    slow.set_result(pb.StatsResponse(epoch=7))
    async with asyncio.timeout(SECONDS):
        answer = await reader.read()
    writer.close()
    return [int(one) for one in re.findall(rb"HTTP/1.1 (\d+)", answer)]


async def test_refusal_comes_behind_an_answer_without_a_body(serving: Guarded) -> None:
    """In whichever turn of the loop bytes are refused, the answer before them is sent, though it has no body."""
    for num_turns in range(8):
        reader, writer = await asyncio.open_connection("127.0.0.1", serving.rest.http_port)
        writer.write(b"HEAD /livez " + HEAD + b"\r\n")
        for _ in range(num_turns):
            await asyncio.sleep(0)
        writer.write(b"\0\1\2\r\n\r\n")
        async with asyncio.timeout(SECONDS):
            answer = await reader.read()
        writer.close()

        assert [int(one) for one in re.findall(rb"HTTP/1.1 (\d+)", answer)] == [200, 400]


async def test_connections_take_turns(serving: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what many connections send at once, one connection is read at a time, and the loop hears others between."""
    protocol = serving.rest._servers[1]._protocol
    feed = protocol._feed
    fed: list[int] = []
    turns = 0

    def noted(self: object, data: bytes) -> None:
        fed.append(turns)
        feed(self, data)  # type: ignore[arg-type]  # it is one

    monkeypatch.setattr(protocol, "_feed", noted)
    asked = [asyncio.ensure_future(answers(serving, GET * 3, 3)) for _ in range(20)]
    while not all(one.done() for one in asked):
        await asyncio.sleep(0)
        turns += 1

    assert [one.result() for one in asked] == [[200] * 3] * 20
    assert len(fed) >= 20
    assert len(fed) == len(set(fed)), "two in one turn"


async def test_listener_that_closes_in_line_accepts_nobody(serving: Guarded) -> None:
    """A connection whose turn comes after the listener's end is not opened."""
    server = serving.rest._servers[1]
    port = serving.rest.http_port
    server._line.take(lambda: None)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    server._accept()
    await serving.rest.stop()
    for _ in range(5):
        await asyncio.sleep(0)
    writer.close()

    assert server.num_connections == 0
