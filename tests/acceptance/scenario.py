"""What scenarios over all transports share: a daemon, a run that records all replies, and replies that compare."""

import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from kvlease.errors import KVLeaseError
from kvlease.transports import open_transport
from kvlease.transports._frames import close_all
from kvlease.transports.base import Address, Outgoing
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire.faults import holdings_to_text

SECONDS_TO_START = 120.0
SOCKETS = {"unix": "kvlease.sock", "http+unix": "http.sock", "grpc+unix": "grpc.sock"}
ISSUED = re.compile(r"\b\d{13,}\b")
_EXPLAINED = ("resource", "need", "available", "limit", "retry_after_ms", "rule", "remedies")
_RESPONSES = {
    field.name: getattr(pb, field.message_type.name)
    for field in pb.Reply.DESCRIPTOR.oneofs_by_name["response"].fields
    if field.message_type is not None
}


def keys(first: int, count: int) -> bytes:
    """Return `count` packed keys, beginning with number `first`."""
    return b"".join(number.to_bytes(32, "little") for number in range(first, first + count))


def packed(*numbers: int, code: str = "q") -> bytes:
    """Return packed little-endian integers."""
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


class Run:
    """One run of the scenario over one transport, with all replies."""

    def __init__(self, address: Address, cache: str) -> None:
        self.address = address
        self.cache = cache
        self.transport = open_transport(address)
        self.said: list[tuple[str, dict[str, Any]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()

    def call(self, verb: str, request: Message, **who: Any) -> Any:
        """Make a call and record the reply; returns the response, or an empty one if the call was refused."""
        call = Outgoing(verb, request, time.monotonic() + 10, **who)
        try:
            response = self.attach(call) if verb == "attach" else self.transport.send(call)
        except KVLeaseError as error:
            told = {name: getattr(error, name) for name in _EXPLAINED}
            told["holdings"] = holdings_to_text(error.holdings)
            self.said.append((verb, {"code": error.code, "message": error.message, **told}))
            return _RESPONSES[verb]()
        options = {
            "preserving_proto_field_name": True,
            "always_print_fields_with_no_presence": True,
        }
        self.said.append((verb, MessageToDict(response, **options)))
        return response

    def attach(self, call: Outgoing) -> Message:
        """Attach over a connection of its own, because a connection that attached is that worker's."""
        transport = open_transport(self.address)
        try:
            attached = transport.attach(call)
        finally:
            transport.close()
        close_all(attached.fds)
        return attached.response

    def events(self) -> list[tuple[str, int]]:
        """Return the kind and the number of blocks of every event of the cache so far."""
        call = Outgoing("watch", pb.WatchRequest(cache=self.cache), time.monotonic() + 10)
        seen = self.transport.stream(call, 0.3)
        return [(event.kind, event.num_blocks) for event in seen]


class Comparable:
    """Replaces ids, which are new in each run, by the order in which each kind of them appears."""

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {}

    def of(self, part: Any, name: str = "") -> Any:
        """Return the part with its ids replaced."""
        if isinstance(part, dict):
            return {name: self.of(value, name) for name, value in part.items()}
        if isinstance(part, list | tuple):
            return [self.of(value) for value in part]
        if name.endswith("_id"):
            known = self.names.setdefault(name, [])
            known += [] if part in known else [part]
            return f"{name} {known.index(part)}"
        return ISSUED.sub("#", part) if isinstance(part, str) else part


@contextmanager
def serving(directory: Path) -> Iterator[Path]:
    """Run a daemon, and give the directory of its sockets."""
    options = ["--runtime-dir", str(directory / "run"), "--no-listen-tcp", "--drain-seconds", "0"]
    with (directory / "log").open("w") as log:
        command = [sys.executable, "-m", "kvleased", "serve", *options]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            limit = time.monotonic() + SECONDS_TO_START
            while not (directory / "run" / "grpc.sock").exists():
                assert process.poll() is None, (directory / "log").read_text()
                assert time.monotonic() < limit, (directory / "log").read_text()
                time.sleep(0.02)
            yield directory / "run"
        finally:
            process.terminate()
            assert process.wait(20) == 0
