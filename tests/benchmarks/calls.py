"""Own the figures of calls: local socket, REST, gRPC and a scheduler step, each beside a server that does no work."""

import http.client
import itertools
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter_ns
from typing import Any, Final

import cores
import grpc
import numpy as np
from floors import BYTES_OF_LENGTH, floor_server
from google.protobuf.message import Message
from measure import NS_PER_US, Figure, Once, at_most, in_turns
from node import TOKENS_PER_BLOCK, Node, UnixHttp

from kvlease import Client, Worker
from kvlease.transports import open_transport
from kvlease.transports._frames import encode
from kvlease.transports._rest import Rest, request_of
from kvlease.transports.base import Attached, Outgoing, Transport, parse_address
from kvlease.v1 import kvlease_pb2 as pb

NUM_BLOCKS: Final = 64
"""Blocks of one reserve."""
NUM_TOKENS: Final = NUM_BLOCKS * TOKENS_PER_BLOCK
NUM_REQUESTS: Final = 256
"""Requests of one scheduler step."""
NUM_ROUNDS: Final = 31
"""Rounds of calls beside an echo; fewer of such short calls would show the machine's fluctuations."""
CALLS_A_ROUND: Final = 60
"""Calls in a round, few enough that all requests, which grow by a token each step, fit the pool."""
CACHE: Final = "bench"
OVERHEAD_US_MAX: Final = 1000
DEADLINE_SECONDS: Final = 5.0


@contextmanager
def bench_node(
    directory: Path, placed: Callable[[], AbstractContextManager[None]] = cores.apart
) -> Iterator[Node]:
    """Run a daemon with one cache of small blocks, as no figure here moves their bytes."""
    with placed(), Node(directory / "node") as node:
        node.register(CACHE, bytes_per_token=4, num_blocks=32_768)
        yield node


@contextmanager
def attached(address: str, tenant: str = "") -> Iterator[Worker]:
    """Attach a worker that raises all errors."""
    client = Client(address, deadline_seconds=DEADLINE_SECONDS, on_doubt="raise")
    with client, client.attach(CACHE, tenant=tenant) as worker:
        yield worker


def local_socket(directory: Path) -> list[Figure]:
    """Measure reserve and release over the local socket beside an echo of the same bytes."""
    name = f"local socket: reserve + release of {NUM_BLOCKS} blocks"
    return _beside_echo(directory, name, _pairs, times=2.5)


def step(directory: Path) -> list[Figure]:
    """Measure a scheduler step: every request grows by a token, one in 16 of them into a new block."""
    name = f"local socket: step of {NUM_REQUESTS} requests in one call"
    return _beside_echo(directory, name, _steps, times=4)


def _beside_echo(
    directory: Path, name: str, measured: Callable[[Worker], Once], *, times: float
) -> list[Figure]:
    """Measure with client and server on two cores, which has the goal, and as scheduled, for information."""
    figures = []
    for where, placed in (("apart", cores.apart), ("free", nullcontext)):
        with ExitStack() as stack:
            folder = directory / where
            node = stack.enter_context(bench_node(folder, placed))
            worker = stack.enter_context(attached(node.local))
            echo = stack.enter_context(Echo.over(folder))
            ours = measured(worker)
            with tapped(worker) as sent:
                ours()
            sides = ours, echo.once_of(sent)
            turns = in_turns(sides, calls_a_round=CALLS_A_ROUND, rounds=NUM_ROUNDS)
            figures.append(at_most(name, *turns, times=times))
    counts, free = figures
    note = "wherever the scheduler has them, cores may sleep"
    return [counts, replace(free, goal="", holds=None, note=note)]


def _pairs(worker: Worker) -> Once:
    """Return a reserve and its release."""
    names = map(str, itertools.count())

    def once() -> int:
        name = next(names)
        start = perf_counter_ns()
        worker.reserve(name, num_tokens=NUM_TOKENS).release()
        return perf_counter_ns() - start

    return once


def _steps(worker: Worker) -> Once:
    """Return a step whose requests begin at different places of their blocks."""
    num_tokens = np.arange(NUM_REQUESTS, dtype=np.int32) % TOKENS_PER_BLOCK + 1
    leases = [
        worker.reserve(f"step-{index}", num_tokens=count)
        for index, count in enumerate(num_tokens.tolist())
    ]
    lease_ids = np.array([lease.lease_id for lease in leases], np.int64)
    verbs = np.full(NUM_REQUESTS, pb.STEP_VERB_EXTEND, np.uint8)

    def once() -> int:
        np.add(num_tokens, 1, out=num_tokens)
        start = perf_counter_ns()
        columns, _ = worker.step(verbs=verbs, lease_ids=lease_ids, num_tokens=num_tokens)
        taken = perf_counter_ns() - start
        assert not columns.codes.any()
        assert len(columns.block_ids) == NUM_REQUESTS // TOKENS_PER_BLOCK
        return taken

    return once


def rest(directory: Path) -> list[Figure]:
    """Measure a reserve over REST beside an empty FastAPI route, by http.client and by the library."""
    with ExitStack() as stack:
        node = stack.enter_context(bench_node(directory))
        worker = stack.enter_context(attached(f"http+unix://{node.http_socket}"))
        ours_raw = _RawRest(node.http_socket, worker)
        reply = ours_raw.sample()
        floor = stack.enter_context(floor_server("fastapi", directory / "fastapi.sock", reply))
        raw, raw_floor, library, library_floor = in_turns(
            (
                ours_raw,
                _RawRest(floor, worker),
                _reserve_by(worker),
                _send_by(open_transport(parse_address(f"http+unix://{floor}")), worker),
            ),
            calls_a_round=150,
        )
    added_us = median(one - other for one, other in zip(library, raw, strict=True)) / NS_PER_US
    overhead = Figure(
        name="REST: what the library adds to http.client",
        ours=median(library) / NS_PER_US,
        floor=median(raw) / NS_PER_US,
        unit="µs",
        ratio=median(library) / median(raw),
        goal=f"+ ≤ {OVERHEAD_US_MAX} µs",
        holds=added_us <= OVERHEAD_US_MAX,
        note=f"+ {added_us:.0f} µs",
    )
    return [
        at_most("REST: reserve, http.client at both", raw, raw_floor, times=1.5),
        at_most("REST: reserve, the library at both", library, library_floor, times=1.5),
        overhead,
    ]


def grpc_calls(directory: Path) -> list[Figure]:
    """Measure a reserve over gRPC beside an empty unary method, by a bare channel and by the library."""
    with ExitStack() as stack:
        node = stack.enter_context(bench_node(directory))
        worker = stack.enter_context(attached(f"grpc+unix://{node.grpc_socket}"))
        with tapped(worker) as sent:
            worker.reserve("sample", num_tokens=NUM_TOKENS).release()
        reply = sent[0][1].SerializeToString()
        floor = stack.enter_context(floor_server("grpc", directory / "floor-grpc.sock", reply))
        raw, raw_floor, library, library_floor = in_turns(
            (
                stack.enter_context(_raw_grpc(node.grpc_socket, worker)),
                stack.enter_context(_raw_grpc(floor, worker)),
                _reserve_by(worker),
                _send_by(open_transport(parse_address(f"grpc+unix://{floor}")), worker),
            ),
            calls_a_round=150,
        )
    return [
        at_most("gRPC: reserve, a bare channel at both", raw, raw_floor, times=1.5),
        at_most("gRPC: reserve, the library at both", library, library_floor, times=1.5),
    ]


def _outgoing(verb: str, request: Message, worker: Worker) -> Outgoing:
    """Return a call as a worker sends it."""
    link = worker._session.link
    return Outgoing(
        verb, request, monotonic() + DEADLINE_SECONDS, link.token, link.epoch, link.fresh_key()
    )


def _reserve(name: str) -> pb.ReserveRequest:
    return pb.ReserveRequest(request_id=name, num_tokens=NUM_TOKENS)


def _reserve_by(worker: Worker) -> Once:
    """Measure the reserve alone; its release is not counted."""
    names = map("library-{}".format, itertools.count())

    def once() -> int:
        name = next(names)
        start = perf_counter_ns()
        lease = worker.reserve(name, num_tokens=NUM_TOKENS)
        taken = perf_counter_ns() - start
        lease.release()
        return taken

    return once


def _send_by(transport: Transport, worker: Worker) -> Once:
    """Measure the same call by the library's transport to a server that does no work."""
    names = map("floor-{}".format, itertools.count())

    def once() -> int:
        name = next(names)
        start = perf_counter_ns()
        call = _outgoing("reserve", _reserve(name), worker)
        response = transport.send(call)
        taken = perf_counter_ns() - start
        assert isinstance(response, pb.ReserveResponse)
        assert len(response.block_ids) == NUM_BLOCKS * 4
        transport.send(_outgoing("release", pb.ReleaseRequest(lease_id=1), worker))
        return taken

    return once


class _RawRest:
    """A reserve by http.client with the library's request, built before the clock starts."""

    def __init__(self, path: Path, worker: Worker) -> None:
        self._connection = UnixHttp(path)
        self._worker = worker
        self._names = map("raw-{}".format, itertools.count())

    def __call__(self) -> int:
        request = request_of(_outgoing("reserve", _reserve(next(self._names)), self._worker))
        start = perf_counter_ns()
        body = self._ask(request)
        taken = perf_counter_ns() - start
        self._release(body)
        return taken

    def sample(self) -> bytes:
        """Return the body of one answer."""
        body = self._ask(request_of(_outgoing("reserve", _reserve("sample"), self._worker)))
        self._release(body)
        return body

    def _ask(self, request: Rest) -> bytes:
        connection = self._connection
        connection.request(
            request.method, request.path, body=request.body or None, headers=request.headers
        )
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == http.client.OK, body
        return body

    def _release(self, granted: bytes) -> None:
        request = pb.ReleaseRequest(lease_id=json.loads(granted)["lease_id"])
        self._ask(request_of(_outgoing("release", request, self._worker)))


@contextmanager
def _raw_grpc(path: Path, worker: Worker) -> Iterator[Once]:
    """Measure a reserve by a bare channel, with the library's metadata."""
    names = map("raw-{}".format, itertools.count())

    def metadata() -> tuple[tuple[str, str], ...]:
        link = worker._session.link
        return (
            ("authorization", f"Bearer {link.token}"),
            ("idempotency-key", link.fresh_key()),
            ("kvlease-epoch", str(link.epoch)),
        )

    with grpc.insecure_channel(f"unix://{path}") as channel:
        reserve: Callable[..., Any] = channel.unary_unary(
            "/kvlease.v1.KVLeaseService/Reserve",
            pb.ReserveRequest.SerializeToString,
            pb.ReserveResponse.FromString,
        )
        release: Callable[..., Any] = channel.unary_unary(
            "/kvlease.v1.KVLeaseService/Release",
            pb.ReleaseRequest.SerializeToString,
            pb.ReleaseResponse.FromString,
        )

        def once() -> int:
            request, told = _reserve(next(names)), metadata()
            start = perf_counter_ns()
            response = reserve(request, metadata=told, timeout=DEADLINE_SECONDS)
            taken = perf_counter_ns() - start
            release(pb.ReleaseRequest(lease_id=response.lease_id), metadata=metadata())
            return taken

        yield once


class _Tap:
    """A transport that records the calls and answers through it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.sent: list[tuple[Outgoing, Message]] = []

    def send(self, call: Outgoing) -> Message:
        response = self._transport.send(call)
        self.sent.append((call, response))
        return response

    def attach(self, call: Outgoing) -> Attached:
        return self._transport.attach(call)

    def stream(self, call: Outgoing, idle_seconds: float | None) -> Iterator[Message]:
        return self._transport.stream(call, idle_seconds)

    def close(self) -> None:
        self._transport.close()


@contextmanager
def tapped(worker: Worker) -> Iterator[list[tuple[Outgoing, Message]]]:
    """Record a worker's calls and their answers."""
    port = worker._port
    transport, tap = port.transport, _Tap(port.transport)
    port.transport = tap
    try:
        yield tap.sent
    finally:
        port.transport = transport


class Echo:
    """The client's end of an echo: frames as long as a call of ours and its answer."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._buffer = bytearray(1 << 16)

    @staticmethod
    @contextmanager
    def over(directory: Path) -> Iterator["Echo"]:
        """Start the echo and connect to it."""
        with floor_server("echo", directory / "echo.sock") as path:
            echo = Echo(path)
            try:
                yield echo
            finally:
                echo._socket.close()

    def once_of(self, sent: list[tuple[Outgoing, Message]]) -> Once:
        """Return the echo of these calls, one after the other."""
        frames = []
        for call, response in sent:
            call_bytes = len(encode(call, 1000)) - BYTES_OF_LENGTH
            fields: dict[str, Any] = {call.verb: response}
            reply_bytes = pb.Reply(call_number=1000, epoch=call.epoch, **fields).ByteSize()
            asks_for = reply_bytes.to_bytes(BYTES_OF_LENGTH, "little")
            body = asks_for + bytes(call_bytes - len(asks_for))
            frames.append((call_bytes.to_bytes(BYTES_OF_LENGTH, "little") + body, reply_bytes))

        def once() -> int:
            start = perf_counter_ns()
            for frame, reply_bytes in frames:
                self._ask(frame, BYTES_OF_LENGTH + reply_bytes)
            return perf_counter_ns() - start

        return once

    def _ask(self, frame: bytes, answer_bytes: int) -> None:
        self._socket.sendall(frame)
        num_received = self._socket.recv_into(self._buffer)
        while num_received < answer_bytes:
            num_received += self._socket.recv_into(memoryview(self._buffer)[num_received:])
