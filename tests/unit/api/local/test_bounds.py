"""Laws of the local socket's bounds: descriptors, frames, calls in flight and silences have limits."""

import array
import asyncio
import os
import socket
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from kvlease.v1 import kvlease_pb2 as pb
from kvleased.api.local import listener as local
from tests.unit.api.scripted import Served, framed

TRANSPORTS = ("local",)
STATS = pb.Call(call_number=1, stats=pb.StatsRequest())


def bound(served: Served, monkeypatch: pytest.MonkeyPatch, **settings: float) -> None:
    """Have the local socket use other settings."""
    monkeypatch.setattr(served.local, "settings", served.settings.model_copy(update=settings))


async def test_flood_of_descriptors_ends_the_connection(served: Served) -> None:
    """More descriptors than a first frame may carry end the connection."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(served.settings.local_socket))
    fds = array.array("i", [sock.fileno()] * 9)
    sock.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])

    assert await asyncio.to_thread(sock.recv, 1) == b""
    sock.close()


async def test_many_frames_at_once_hold_nobody_up(served: Served) -> None:
    """A call is answered between the frames that another connection sent at once, not after all of them."""
    crowd, other = await served.line(), await served.line()
    await crowd.ask(STATS)
    await other.ask(STATS)

    crowd.send(*[STATS] * 1000)
    reply = await other.ask(pb.Call(call_number=2, list_caches=pb.ListCachesRequest()))
    num_before = [verb for verb, _, _ in served.daemon.calls].index("list_caches")

    assert reply.HasField("list_caches")
    assert num_before < 500
    assert [(await crowd.receive()).call_number for _ in range(1000)] == [1] * 1000
    assert (await crowd.ask(STATS)).HasField("stats")


async def test_two_crowds_are_served_in_turns(served: Served) -> None:
    """Of two connections that send much at once, neither is finished before the other has begun."""
    lines = [await served.line(), await served.line()]
    for line in lines:
        await line.ask(STATS)
    served.daemon.calls.clear()

    for line, token in zip(lines, "ab", strict=True):
        call = pb.Call(call_number=1, token=token, reserve=pb.ReserveRequest())
        line.send(*[call] * 200)
    for line in lines:
        for _ in range(200):
            await line.receive()

    order = "".join(caller.token for _, _, caller in served.daemon.calls)
    assert len(order) == 400
    assert order.index("b") < 200
    assert order.rindex("a") > order.index("b")


async def test_crowd_that_leaves_is_forgotten(served: Served) -> None:
    """What a connection sent before it closed does not hold up the next one in line."""
    crowd, other = await served.line(), await served.line()
    await crowd.ask(STATS)

    crowd.send(*[STATS] * 1000)
    crowd.writer.transport.abort()
    numbers = list(range(1, 101))
    other.send(*(pb.Call(call_number=number, stats=pb.StatsRequest()) for number in numbers))

    assert [(await other.receive()).call_number for _ in numbers] == numbers


async def test_frames_that_ask_nothing_end_the_connection(served: Served) -> None:
    """A peer whose frames ask nothing, and cannot even be answered, is refused once and not a thousand times."""
    line = await served.line()

    line.send(bytes(4) * 1000)
    refused = await line.receive()

    assert (refused.call_number, refused.error.code) == (0, "INVALID")
    assert await line.reader.read() == b""


@pytest.mark.parametrize("before", [b"", framed(STATS)], ids=["first frame", "later frame"])
async def test_oversized_frame_is_refused_at_its_head(served: Served, before: bytes) -> None:
    """A length above the limit is refused before its bytes are read, and ends the connection."""
    line = await served.line()
    line.send(before, (served.settings.max_message_bytes + 1).to_bytes(4, "little"))
    if before:
        await line.receive()

    reply = await line.receive()

    assert (reply.error.code, reply.error.limit) == ("TOO_LARGE", 65536)
    assert "at least 65537 bytes, but the limit is 65536 (max_message_bytes)" in reply.error.message
    assert await line.reader.read() == b""


async def test_partial_frame_has_a_deadline(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that stops in the middle of a frame does not keep its connection."""
    bound(served, monkeypatch, head_seconds_max=0.2)
    line = await served.line()
    await line.ask(STATS)

    line.send(framed(STATS)[:-1])

    assert await line.reader.read() == b""


async def test_answer_that_the_kernel_takes_in_parts_arrives_whole(served: Served) -> None:
    """The part of an answer that the socket does not take at once follows in order, before the next answer."""
    name = "c" * 500_000
    served.daemon.script["stats"] = pb.StatsResponse(caches=[pb.CacheStats(cache=name)])
    line = await served.line()

    for number in range(1, 5):
        line.send(pb.Call(call_number=number, stats=pb.StatsRequest()))
        await line.writer.drain()
        await asyncio.sleep(0.01)
    replies = [await line.receive() for _ in range(4)]

    assert [reply.call_number for reply in replies] == [1, 2, 3, 4]
    assert {reply.stats.caches[0].cache for reply in replies} == {name}


async def test_peer_that_does_not_read_is_disconnected(served: Served) -> None:
    """Answers that a peer does not read do not pile up in the daemon."""
    served.daemon.script["stats"] = pb.StatsResponse(caches=[pb.CacheStats(cache="c" * 60_000)])

    def send_for_ever() -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(served.settings.local_socket))
            while True:
                sock.sendall(framed(STATS))

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(asyncio.to_thread(send_for_ever), 10)


async def test_calls_in_flight_are_bounded(served: Served) -> None:
    """A call above the limit of unanswered calls is refused, and forgotten by the daemon."""
    loop = asyncio.get_running_loop()
    line = await served.line()
    for number in range(1, 6):
        served.daemon.script["reserve"] = loop.create_future()
        line.send(pb.Call(call_number=number, reserve=pb.ReserveRequest()), STATS)
        last = await line.receive()

    assert (last.call_number, last.error.code, last.error.limit) == (5, "BUSY", 4)
    assert last.error.message.startswith(
        "4 calls are unanswered on this connection, as many as max_calls"
    )
    assert len(served.daemon.cancelled) == 1


async def test_slow_reader_of_a_stream_stays_connected(served: Served) -> None:
    """Where the reader of a stream lags, the daemon waits and does not disconnect it, however much there is to send."""
    digests = bytes(1 << 20)
    served.daemon.events = [
        pb.TraceResponse(input_tokens=number, key_digests=digests) for number in range(12)
    ]
    line = await served.line()
    line.send(pb.Call(call_number=8, token="tok", trace=pb.TraceRequest(cache="demo")))

    replies = []
    for _ in served.daemon.events:
        replies.append(await line.receive())
        await asyncio.sleep(0)

    assert [reply.trace.input_tokens for reply in replies] == list(range(12))
    (verb, request, caller) = served.daemon.calls[0]
    assert (verb, request, caller.token) == ("trace", pb.TraceRequest(cache="demo"), "tok")


async def test_stream_of_the_past_holds_nobody_up(served: Served) -> None:
    """However much a stream sends at once, others are answered in between, and none of it is lost."""
    num_told = 0

    def past() -> Iterator[pb.WatchResponse]:
        nonlocal num_told
        for num_told in range(1, 2001):
            yield pb.WatchResponse(sequence=num_told)

    served.daemon.events = past()  # type: ignore[assignment] -- an iterable will do
    watcher, other = await served.line(), await served.line()
    await watcher.ask(STATS)
    await other.ask(STATS)

    watcher.send(pb.Call(call_number=8, watch=pb.WatchRequest()))
    first = await watcher.receive()
    reply = await other.ask(STATS)
    num_before = num_told
    rest = [await watcher.receive() for _ in range(1999)]

    assert reply.HasField("stats")
    assert num_before < 1000
    assert [one.watch.sequence for one in [first, *rest]] == list(range(1, 2001))


async def test_silent_connections_give_way(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many connections, the longest silent one goes, and none that has just spoken."""
    monkeypatch.setattr(local, "SECONDS_SILENT", 0.0)
    bound(served, monkeypatch, max_connections=2)
    silent, busy = await served.line(), await served.line()
    await silent.ask(pb.Call(call_number=1, stats=pb.StatsRequest()))
    await busy.ask(pb.Call(call_number=1, stats=pb.StatsRequest()))

    third = await served.line()
    reply = await third.ask(pb.Call(call_number=1, stats=pb.StatsRequest()))

    assert reply.call_number == 1
    assert await silent.reader.read() == b""
    assert (await busy.ask(pb.Call(call_number=2, stats=pb.StatsRequest()))).call_number == 2
    monkeypatch.setattr(local, "SECONDS_SILENT", 1e9)
    fourth = await served.line()
    refusal = (await fourth.receive()).error
    assert (refusal.code, refusal.resource, refusal.need, refusal.limit) == (
        "BUSY",
        "connections",
        1,
        2,
    )
    assert refusal.message.startswith(
        "2 connections are open to this listener, as many as max_connections"
    )
    assert refusal.retry_after_ms


async def test_who_has_said_nothing_gives_way_first(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection without a whole frame goes before one that sent a frame, even if that one is silent for longer."""
    monkeypatch.setattr(local, "SECONDS_SILENT", 0.0)
    bound(served, monkeypatch, max_connections=2)
    silent = await served.line()
    await silent.ask(STATS)
    unheard = await served.line()
    unheard.writer.write(b"\1\0")

    third = await served.line()
    await third.ask(STATS)

    assert (await unheard.receive()).error.code == "BUSY"
    assert await unheard.reader.read() == b""
    assert (await silent.ask(STATS)).HasField("stats")


async def test_connections_without_a_place_are_counted_and_logged(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was refused counts, and so does one that gave way; the log says which process came without a place."""
    monkeypatch.setattr(local, "SECONDS_SILENT", 1e9)
    bound(served, monkeypatch, max_connections=1)
    with capture_logs() as lines:
        unheard, heard = await served.line(), await served.line()
        await heard.ask(STATS)
        refused = await served.line()
        answers = [(await line.receive()).error.code for line in (unheard, refused)]

    assert answers == ["BUSY", "BUSY"]
    assert served.local.num_turned_away == 2
    told = [line for line in lines if line["event"] == "connections_turned_away"]
    assert [(one["listener"], one["who"], one["limit"], one["peer_pid"]) for one in told] == [
        ("local", "member", 1, os.getpid())
    ]


async def test_half_open_connections_keep_no_worker_out(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New connections without a whole frame give way, told why; a worker that speaks comes in and stays."""
    monkeypatch.setattr(local, "SECONDS_SILENT", 1e9)
    bound(served, monkeypatch, max_connections=4)
    worker = await served.line()
    await worker.ask(STATS)
    flood = [await served.line() for _ in range(6)]

    another = await served.line()
    answers = [await line.ask(STATS) for line in (worker, another)]
    flood += [await served.line() for _ in range(6)]
    answers += [await line.ask(STATS) for line in (worker, another)]

    assert all(answer.HasField("stats") for answer in answers)
    refusal = (await flood[0].receive()).error
    assert (refusal.code, refusal.resource, refusal.limit) == ("BUSY", "connections", 4)
    assert await flood[0].reader.read() == b""


async def test_connection_that_says_nothing_is_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first frame of a connection has a deadline, too."""
    bound(served, monkeypatch, head_seconds_max=0.01)
    line = await served.line()

    assert await line.reader.read() == b""
