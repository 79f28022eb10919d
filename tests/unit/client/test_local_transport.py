"""Laws of the local socket's connection, over real sockets."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from kvlease import Client
from kvlease.errors import (
    DeadlineError,
    InternalError,
    InvalidError,
    LayoutMismatchError,
    PoolFullError,
    TooLargeError,
    UnavailableError,
)
from kvlease.transports import _pool, local
from kvlease.transports._frames import late_token
from kvlease.transports.base import Outgoing
from kvlease.transports.local import LocalTransport
from kvlease.v1 import kvlease_pb2 as pb
from tests.unit.client.frame_server import Answer, Drop, FrameServer, Hang, Regions


def call(
    verb: str = "release", request: Message | None = None, *, seconds: float = 5.0, key: str = ""
) -> Outgoing:
    """Return a call of the transport."""
    return Outgoing(
        verb, request or pb.ReleaseRequest(lease_id=3), time.monotonic() + seconds, "token", 9, key
    )


def in_turn(*answers: Answer) -> Answer:
    """Return an answer function that gives the answers one after the other."""
    left = list(answers)
    return lambda sent: left.pop(0)(sent)  # noqa: PLW0108 - popped at each call


def until(is_so: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    ends_at = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < ends_at
        time.sleep(0.001)


def released(_: pb.Call) -> Message:
    """Answer a release."""
    return pb.ReleaseResponse(released=True)


def test_end_of_the_peer_is_seen_without_a_call(tmp_path: Path) -> None:
    """The kernel knows at once that the peer has ended; without an open connection nobody can tell."""
    with FrameServer(path=tmp_path / "s", answer=released) as server:
        transport = LocalTransport(str(server.path))
        before = transport.has_peer
        transport.send(call())
        meanwhile = transport.has_peer
    afterwards = transport.has_peer
    transport.close()

    assert (before, meanwhile, afterwards, transport.has_peer) == (False, True, False, False)


def test_call_carries_who_sends_it(tmp_path: Path) -> None:
    """Token, epoch and idempotency key travel with the request."""
    with FrameServer(path=tmp_path / "s", answer=released) as server:
        transport = LocalTransport(str(server.path))
        response = transport.send(call(key="key"))
        transport.close()

    sent = server.calls[0]
    assert response == pb.ReleaseResponse(released=True)
    assert (sent.token, sent.epoch, sent.idempotency_key) == ("token", 9, "key")
    assert sent.release.lease_id == 3


def test_call_is_carried_out_before_anybody_asks_for_its_answer(tmp_path: Path) -> None:
    """A call that was begun has a connection to itself, on which its answer waits; other calls go on meanwhile."""
    with FrameServer(path=tmp_path / "s", answer=released) as server:
        transport = LocalTransport(str(server.path))
        answer = transport.begin(call(key="begun"))
        until(lambda: bool(server.calls))
        transport.send(call(key="other"))
        response = answer()
        transport.send(call(key="next"))
        transport.close()

    assert response == pb.ReleaseResponse(released=True)
    assert [one.idempotency_key for one in server.calls] == ["begun", "other", "next"]
    assert len(server._connections) == 2


def test_end_of_the_peer_is_seen_while_a_call_is_on_its_way(tmp_path: Path) -> None:
    """The call's connection is the one that was idle before; one that had to be opened proves nothing yet."""
    with FrameServer(path=tmp_path / "s", answer=released) as server:
        transport = LocalTransport(str(server.path))
        first = transport.begin(call())
        opened = transport.has_peer
        first()
        second = transport.begin(call())
        meanwhile = transport.has_peer
        until(lambda: len(server.calls) == 2)
        server.break_connections()
        until(lambda: not transport.has_peer)
        del second
        transport.close()

    assert (opened, meanwhile) == (False, True)


def test_answer_that_came_in_time_may_be_taken_late(tmp_path: Path) -> None:
    """The deadline is the daemon's, not that of whoever has something else to do first."""
    with FrameServer(path=tmp_path / "s", answer=released) as server:
        transport = LocalTransport(str(server.path))
        answer = transport.begin(call(seconds=0.05))
        time.sleep(0.1)
        response = answer()
        transport.close()

    assert response == pb.ReleaseResponse(released=True)


def test_begun_call_without_answer_ends_at_its_deadline(tmp_path: Path) -> None:
    """Time that passed before somebody asked counts, and a late answer is not taken for that of the next call."""
    with FrameServer(path=tmp_path / "s", answer=in_turn(hang, released)) as server:
        transport = LocalTransport(str(server.path))
        answer = transport.begin(call(seconds=0.05))
        time.sleep(0.1)
        started = time.monotonic()
        with pytest.raises(DeadlineError):
            answer()
        waited = time.monotonic() - started
        assert transport.send(call()) == pb.ReleaseResponse(released=True)
        transport.close()

    assert waited < 1


def test_call_that_cannot_be_sent_is_refused_as_it_begins(tmp_path: Path) -> None:
    """The connection that it would have had is free for the next call."""
    transport = LocalTransport(str(tmp_path / "s"))
    with pytest.raises(UnavailableError):
        transport.begin(call())
    with FrameServer(path=tmp_path / "s", answer=released):
        assert transport.send(call()) == pb.ReleaseResponse(released=True)
        transport.close()


def test_connection_of_a_begun_call_breaks(tmp_path: Path) -> None:
    """A daemon that ends meanwhile leaves the call in doubt."""
    with FrameServer(path=tmp_path / "s", answer=in_turn(drop, released)) as server:
        transport = LocalTransport(str(server.path))
        answer = transport.begin(call())
        until(lambda: bool(server.calls))
        with pytest.raises(UnavailableError):
            answer()
        transport.close()


def test_begun_call_that_nobody_asks_about_leaves_nothing(tmp_path: Path) -> None:
    """Its connection is closed with the last reference to it."""
    with FrameServer(path=tmp_path / "s", answer=released) as server:
        transport = LocalTransport(str(server.path))
        begun = transport.begin(call())
        before = len(transport._pool._made)
        del begun
        assert transport.send(call()) == pb.ReleaseResponse(released=True)
        transport.close()
        assert (before, len(transport._pool._made)) == (1, 1)


def test_refusal_is_raised_as_itself(tmp_path: Path) -> None:
    """The daemon's error arrives with its class and its numbers, and the connection stays open."""

    def full(_: pb.Call) -> Message:
        raise PoolFullError(
            resource="device_blocks", need=5, available=2, limit=8, retry_after_ms=50
        )

    with FrameServer(path=tmp_path / "s", answer=full) as server:
        transport = LocalTransport(str(server.path))
        for _ in range(2):
            with pytest.raises(PoolFullError) as caught:
                transport.send(call())
        transport.close()
        assert len(server._connections) == 1

    assert (caught.value.need, caught.value.available, caught.value.retry_after_ms) == (5, 2, 50)


def test_large_frames_cross_in_pieces(tmp_path: Path) -> None:
    """A frame larger than any buffer arrives whole, both ways."""
    ids = bytes(range(256)) * 2000

    with FrameServer(
        path=tmp_path / "s", answer=lambda _: pb.ExtendResponse(block_ids=ids)
    ) as server:
        transport = LocalTransport(str(server.path))
        response = transport.send(call("extend", pb.ExtendRequest(lease_id=1)))
        transport.send(call("extend", pb.ExtendRequest(lease_id=1)))
        transport.close()

    assert response == pb.ExtendResponse(block_ids=ids)


def test_call_without_answer_ends_at_its_deadline(tmp_path: Path) -> None:
    """Every call ends by its deadline, and a late answer is never taken for the answer to the next call."""
    with FrameServer(path=tmp_path / "s", answer=in_turn(hang, released)) as server:
        transport = LocalTransport(str(server.path))
        started = time.monotonic()
        with pytest.raises(DeadlineError):
            transport.send(call(seconds=0.05))
        waited = time.monotonic() - started
        assert transport.send(call()) == pb.ReleaseResponse(released=True)
        transport.close()

    assert waited < 1


def hang(_: pb.Call) -> Message:
    """Answer nothing."""
    raise Hang


@contextmanager
def interrupted() -> Iterator[None]:
    """Have a signal interrupt this thread every 20 ms, for a second and a half."""
    ends_at = time.monotonic() + 1.5

    def rung(*_: object) -> None:
        if time.monotonic() > ends_at:
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, rung)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("verb", "request_"),
    [
        pytest.param("release", pb.ReleaseRequest(), id="read"),
        pytest.param("attach", pb.AttachRequest(cache="demo"), id="attach"),
        pytest.param("lookup", pb.LookupRequest(keys=bytes(2**22)), id="write"),
    ],
)
def test_signals_do_not_put_off_a_deadline(verb: str, request_: Message, tmp_path: Path) -> None:
    """A call of a program with a timer ends by its deadline, although each signal interrupts its wait."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()  # and nobody ever reads
        transport = LocalTransport(str(tmp_path / "s"))
        carry = transport.attach if verb == "attach" else transport.send
        started = time.monotonic()
        with interrupted(), pytest.raises(DeadlineError):
            carry(call(verb, request_, seconds=0.2))
        waited = time.monotonic() - started
        transport.close()

    assert waited < 1


def test_signals_do_not_keep_a_watch_from_its_end(tmp_path: Path) -> None:
    """A watch ends when no event has come for as long as its caller said."""
    with FrameServer(path=tmp_path / "s", answer=lambda _: pb.WatchResponse(sequence=1)) as server:
        transport = LocalTransport(str(server.path))
        started = time.monotonic()
        with interrupted():
            events = list(transport.stream(call("watch", pb.WatchRequest()), 0.2))
        waited = time.monotonic() - started

    assert (len(events), waited < 1) == (1, True)


class Recorder:
    """A socket that notes the flags with which it is read."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.flags: list[int] = []

    def __getattr__(self, name: str) -> Any:
        """Leave everything else to the socket."""
        return getattr(self._sock, name)

    def recv_into(self, buffer: bytearray, num_bytes: int = 0, flags: int = 0) -> int:
        """Read, and note the flags."""
        self.flags.append(flags)
        return self._sock.recv_into(buffer, num_bytes, flags)


@pytest.mark.parametrize(
    "seconds", [pytest.param(0.0, id="slept for"), pytest.param(60.0, id="looked for")]
)
def test_answer_is_received_however_it_is_waited_for(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call gets its answer both while its thread polls for it and once the thread sleeps."""
    monkeypatch.setattr(local, "_LOOK_SECONDS", seconds)

    with FrameServer(path=tmp_path / "s", answer=released) as server:
        transport = LocalTransport(str(server.path))
        answers = [transport.send(call()) for _ in range(3)]
        transport.close()

    assert answers == [pb.ReleaseResponse(released=True)] * 3


def test_calls_after_a_look_in_vain_sleep_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that polls in vain stops taking the core from the daemon at each call, but polls again now and then."""
    monkeypatch.setattr(local, "_LOOK_SECONDS", 0.0)
    with FrameServer(path=tmp_path / "s", answer=released) as server:
        transport = LocalTransport(str(server.path))
        transport.send(call())
        connection = transport._pool.newest()
        assert connection is not None
        assert connection._socket is not None
        recorder = Recorder(connection._socket)
        monkeypatch.setattr(connection, "_socket", recorder)
        monkeypatch.setattr(local, "_LOOK_SECONDS", 60.0)

        for _ in range(local._CALLS_WITHOUT_LOOK):
            transport.send(call())
        asleep = list(recorder.flags)
        transport.send(call())
        transport.close()

    assert asleep == [0] * local._CALLS_WITHOUT_LOOK
    assert set(recorder.flags[len(asleep) :]) == {socket.MSG_DONTWAIT}


def test_past_deadline_sends_nothing(tmp_path: Path) -> None:
    """A call whose deadline has passed is not sent."""
    with FrameServer(path=tmp_path / "s", answer=released) as server:
        with pytest.raises(DeadlineError):
            LocalTransport(str(server.path)).send(call(seconds=-1))

        assert server.calls == []


def test_absent_daemon_is_unavailable(tmp_path: Path) -> None:
    """Where nothing listens, the error names the address and says what to do."""
    with pytest.raises(UnavailableError, match="No such file"):
        LocalTransport(str(tmp_path / "none")).send(call())


def test_socket_at_no_possible_path_is_unavailable(tmp_path: Path) -> None:
    """What the system refuses even to look at is refused like an absent daemon, and not by the system's own error."""
    with (
        Client(f"unix://{tmp_path}/{'x' * 300}", on_doubt="raise") as client,
        pytest.raises(UnavailableError, match="cannot be reached"),
    ):
        client.stats()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_socket_of_another_user_is_unavailable(tmp_path: Path) -> None:
    """In a directory that only its owner may enter, the error says as whom to call."""
    program = (
        "import os, sys; from kvlease import Client, UnavailableError; client = Client(sys.argv[1])\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: client.stats()\n"
        "except UnavailableError as error: print(error)\n"
    )
    path = tmp_path / "kvlease.sock"
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        command = [sys.executable, "-c", program, f"unix://{path}"]
        told = subprocess.run(command, capture_output=True, text=True, check=False)

    assert told.stderr == ""
    assert f"unix://{path} cannot be reached (Permission denied)" in told.stdout
    assert "run as that user" in told.stdout


@pytest.mark.parametrize("is_directory", [False, True], ids=["file", "directory"])
def test_what_lies_where_a_socket_should_be_is_named(is_directory: bool, tmp_path: Path) -> None:
    """Where the path is no socket, the error says so, and not that a daemon refuses connections."""
    path = tmp_path / "kvlease.sock"
    path.mkdir() if is_directory else path.touch()
    what = "it is a directory, not a socket" if is_directory else "it is not a socket"

    with (
        Client(f"unix://{path}", deadline_seconds=0.1, on_doubt="raise") as client,
        pytest.raises(UnavailableError, match=what),
    ):
        client.stats()


def answer_in_http(listener: socket.socket) -> socket.socket:
    """Answer one connection as a server of HTTP/1.1 answers what it cannot read; return it, still open."""
    connection = listener.accept()[0]
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    return connection


def test_socket_of_another_protocol_is_told_with_the_right_one(tmp_path: Path) -> None:
    """A caller that used the socket of REST as the local one is told what each of a daemon's sockets is for."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "http.sock"))
        listener.listen()
        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(answer_in_http, listener)
            transport = LocalTransport(str(tmp_path / "http.sock"))
            with pytest.raises(
                UnavailableError, match=r"use unix:// .*, http\+unix:// with http\.sock"
            ):
                transport.send(call())
    answered.result().close()
    transport.close()


def test_broken_connection_is_unavailable_and_replaced(tmp_path: Path) -> None:
    """A call whose connection breaks is told so; the next call opens another connection."""
    with FrameServer(path=tmp_path / "s", answer=in_turn(drop, released)) as server:
        transport = LocalTransport(str(server.path))
        with pytest.raises(UnavailableError):
            transport.send(call())
        assert transport.send(call()) == pb.ReleaseResponse(released=True)
        transport.close()


def drop(_: pb.Call) -> Message:
    """Close the connection."""
    raise Drop


def test_connection_refusal_is_raised(tmp_path: Path) -> None:
    """An error under call number 0 refuses the whole connection, and its reason reaches the caller."""

    class Refusing(FrameServer):
        def _reply(self, connection: object, call: pb.Call) -> None:
            call.call_number = 0
            super()._reply(connection, call)  # type: ignore[arg-type]  # passed on as it came

    def too_large(_: pb.Call) -> Message:
        raise TooLargeError

    with Refusing(path=tmp_path / "s", answer=too_large) as server, pytest.raises(TooLargeError):
        LocalTransport(str(server.path)).send(call())


def test_unknown_error_code_is_internal(tmp_path: Path) -> None:
    """The code of a newer daemon becomes an internal error."""

    class NewerError(InternalError):
        code = "FROM_THE_FUTURE"

    def newer(_: pb.Call) -> Message:
        raise NewerError("later")

    with FrameServer(path=tmp_path / "s", answer=newer) as server:
        transport = LocalTransport(str(server.path))
        with pytest.raises(InternalError, match="later"):
            transport.send(call())
        transport.close()


def test_request_that_is_no_message_is_invalid(tmp_path: Path) -> None:
    """A request that does not fit into a frame is the caller's mistake, and nothing is sent."""
    with FrameServer(path=tmp_path / "s", answer=released) as server:
        with pytest.raises(InvalidError):
            LocalTransport(str(server.path)).send(call()._replace(token="\ud800"))

        assert server.calls == []


def test_attach_hands_over_a_pidfd_and_takes_regions(tmp_path: Path) -> None:
    """An attach sends a pidfd of this process; programs that we start do not inherit the descriptors that come back."""
    with (
        Regions() as regions,
        FrameServer(
            path=tmp_path / "s", answer=lambda _: regions.attached(), fds=regions.fds
        ) as server,
    ):
        transport = LocalTransport(str(server.path))
        attached = transport.attach(call("attach", pb.AttachRequest(cache="demo")))
        transport.close()

        assert (
            f"Pid:\t{os.getpid()}\n"
            in Path(f"/proc/self/fdinfo/{server.received_fds[0]}").read_text()
        )
        assert [os.fstat(fd).st_ino for fd in attached.fds] == [
            os.fstat(fd).st_ino for fd in regions.fds
        ]
        assert not any(os.get_inheritable(fd) for fd in attached.fds)
        for fd in attached.fds:
            os.close(fd)


def test_refused_attach_keeps_no_descriptor(tmp_path: Path) -> None:
    """An attach that fails leaves no descriptor open."""
    before = set(Path("/proc/self/fd").iterdir())

    with FrameServer(path=tmp_path / "s", answer=drop) as server:
        transport = LocalTransport(str(server.path))
        with pytest.raises(UnavailableError):
            transport.attach(call("attach", pb.AttachRequest(cache="demo")))

    assert set(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.parametrize("resume_token", ["", "before"], ids=["new worker", "resumed worker"])
def test_interrupted_attach_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume_token: str
) -> None:
    """An attach whose answer nobody waits for leaves no worker; a worker that only goes on is left alone."""
    before = set(Path("/proc/self/fd").iterdir())

    def interrupted(sock: socket.socket, _: bytearray) -> None:
        select.select([sock], [], [], 5)
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "receive_attached", interrupted)
    request = pb.AttachRequest(cache="demo", resume_token=resume_token)
    with Regions() as regions:

        def answered(sent: pb.Call) -> Message:
            return pb.DetachResponse() if sent.HasField("detach") else regions.attached()

        with FrameServer(path=tmp_path / "s", answer=answered, fds=regions.fds) as server:
            with pytest.raises(KeyboardInterrupt):
                LocalTransport(str(server.path)).attach(call("attach", request))

            assert server.verbs() == (["attach"] if resume_token else ["attach", "detach"])
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_answer_that_nobody_waits_for_cannot_be_sent() -> None:
    """After an attach is given up, its answer is there already or cannot be sent, so the daemon finds out."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert late_token(ours, bytearray()) == ""

        with pytest.raises(BrokenPipeError):
            theirs.send(b"x")


def test_watch_yields_until_idle(tmp_path: Path) -> None:
    """Events of one watch come one by one, over a connection that ends with the watch."""

    class Watched(FrameServer):
        def _reply(self, connection: object, call: pb.Call) -> None:
            for sequence in range(3):
                self.answer = lambda _, sequence=sequence: pb.WatchResponse(sequence=sequence)  # type: ignore[misc]
                super()._reply(connection, call)  # type: ignore[arg-type]  # passed on as it came

    with Watched(path=tmp_path / "s", answer=released) as server:
        transport = LocalTransport(str(server.path))
        events = list(transport.stream(call("watch", pb.WatchRequest()), 0.05))

    assert [event.sequence for event in events] == [0, 1, 2]


# Threads


RESERVE = pb.ReserveRequest(request_id="r", num_tokens=16)


class Waits:
    """A daemon that answers a release at once, and a reserve only after the release."""

    def __init__(self) -> None:
        self.is_asked, self.is_released = threading.Event(), threading.Event()

    def __call__(self, sent: pb.Call) -> Message:
        """Answer a call."""
        if sent.WhichOneof("request") == "release":
            self.is_released.set()
            return pb.ReleaseResponse(released=True)
        self.is_asked.set()
        assert self.is_released.wait(5)
        return pb.ReserveResponse(lease_id=1)


def test_waiting_call_does_not_hold_back_another_thread(tmp_path: Path) -> None:
    """A release goes through while a reserve waits for it, and afterwards both connections serve calls again."""
    waits = Waits()
    with (
        FrameServer(path=tmp_path / "s", answer=waits) as server,
        ThreadPoolExecutor() as threads,
    ):
        transport = LocalTransport(str(server.path))
        reserve = threads.submit(transport.send, call("reserve", RESERVE))
        assert waits.is_asked.wait(5)

        assert transport.send(call()) == pb.ReleaseResponse(released=True)

        assert reserve.result(5) == pb.ReserveResponse(lease_id=1)
        for _ in range(3):
            transport.send(call())
        assert len(server._connections) == 2
        transport.close()


def test_calls_above_the_limit_wait_for_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every connection in use a call waits until its deadline, or until a connection is put back."""
    monkeypatch.setattr(_pool, "CONNECTIONS_MAX", 1)
    waits = Waits()
    with (
        FrameServer(path=tmp_path / "s", answer=waits) as server,
        ThreadPoolExecutor() as threads,
    ):
        transport = LocalTransport(str(server.path))
        reserve = threads.submit(transport.send, call("reserve", RESERVE))
        assert waits.is_asked.wait(5)

        with pytest.raises(DeadlineError):
            transport.send(call(seconds=0.05))
        queued = threads.submit(transport.send, call())
        waits.is_released.set()

        assert reserve.result(5) == pb.ReserveResponse(lease_id=1)
        assert queued.result(5) == pb.ReleaseResponse(released=True)
        assert len(server._connections) == 1
        transport.close()


def test_connection_that_was_dropped_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that is interrupted just as it gets its connection does not take that connection from later calls."""
    monkeypatch.setattr(_pool, "CONNECTIONS_MAX", 1)
    monkeypatch.setattr(_pool, "LOOK_AGAIN_SECONDS", 0.01)
    with FrameServer(path=tmp_path / "s", answer=released) as server:
        transport = LocalTransport(str(server.path))
        held = [transport._pool.take(call())]
        with pytest.raises(DeadlineError, match="was not sent"):
            transport.send(call(seconds=0.05))

        held.clear()

        assert transport.send(call()) == pb.ReleaseResponse(released=True)
        transport.close()


def test_broken_connection_takes_the_idle_ones_along(tmp_path: Path) -> None:
    """After the daemon's end one call fails, and not one for every connection that was open."""
    waits = Waits()
    with (
        FrameServer(path=tmp_path / "s", answer=waits) as server,
        ThreadPoolExecutor() as threads,
    ):
        transport = LocalTransport(str(server.path))
        reserve = threads.submit(transport.send, call("reserve", RESERVE))
        assert waits.is_asked.wait(5)
        transport.send(call())
        reserve.result(5)
        server.break_connections()

        with pytest.raises(UnavailableError):
            transport.send(call())

        for _ in range(2):
            assert transport.send(call()) == pb.ReleaseResponse(released=True)
        transport.close()


def test_connection_in_use_is_closed_after_its_call(tmp_path: Path) -> None:
    """Closing the transport lets another thread's call end, and keeps no connection open."""
    waits = Waits()
    with (
        FrameServer(path=tmp_path / "s", answer=waits) as server,
        ThreadPoolExecutor() as threads,
    ):
        transport = LocalTransport(str(server.path))
        reserve = threads.submit(transport.send, call("reserve", RESERVE))
        assert waits.is_asked.wait(5)

        transport.close()
        waits.is_released.set()

        assert reserve.result(5) == pb.ReserveResponse(lease_id=1)
        assert repr(transport) == f"<LocalTransport {server.path} closed>"


def test_attach_whose_memory_cannot_be_mapped_leaves_no_worker(tmp_path: Path) -> None:
    """A worker that cannot map its memory is ended at once; nobody else would end it before this process ends."""
    with Regions() as regions:

        def answered(sent: pb.Call) -> Message:
            attached = regions.attached()
            attached.regions[0].region_bytes += 1
            return pb.DetachResponse() if sent.HasField("detach") else attached

        with FrameServer(path=tmp_path / "s", answer=answered, fds=regions.fds) as server:
            with Client(f"unix://{server.path}") as client, pytest.raises(LayoutMismatchError):
                client.attach("demo")

            assert server.verbs() == ["attach", "detach"]
            assert server.calls[-1].token == "token"
