"""Own the interfaces of the daemon, the settings and the metrics that the adapters use."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.message import Message
from starlette.applications import Starlette

from kvleased.access.callers import Caller
from kvleased.access.roles import Roles
from kvleased.credentials.tls import TlsSettings


class Traces(Protocol):
    """Makes spans of requests and calls."""

    @property
    def provider(self) -> Any:
        """OpenTelemetry's TracerProvider."""
        ...

    def request(
        self, name: str, traceparent: str, attributes: Mapping[str, str]
    ) -> AbstractContextManager[Any]:
        """Make the span of a request, below the span that its caller names; spans of calls within it are below it."""
        ...


class Backend(Protocol):
    """Answers calls."""

    @property
    def epoch(self) -> int:
        """The daemon's epoch."""
        ...

    @property
    def tracing(self) -> Traces | None:
        """Makes spans of calls; None if tracing is off, and then `Caller.traceparent` may be left empty."""
        ...

    @property
    def readiness(self) -> tuple[bool, str]:
        """Whether calls can be granted, and why not."""
        ...

    def admit(self, allowed: Roles, caller: Caller, asked: str) -> Caller:
        """Return the caller with its role; called before each call for a verb or a path, and before its body is read.

        Raises:
            UnknownWorkerError, NotYoursError: the caller may not do this.
            StaleEpochError, InvalidError: the epoch or the idempotency key of a call is wrong.
        """
        ...

    def check_still(self, caller: Caller) -> None:
        """Refuse to go on with what lasts.

        Raises:
            UnknownWorkerError: the token that admitted the caller was replaced.
        """
        ...

    def knows(self, token: str, /) -> bool:
        """Tell whether a token is known, so that its connection is no stranger's."""
        ...

    def call(
        self, verb: str, request: Message, caller: Caller
    ) -> Message | asyncio.Future[Message]:
        """Answer, at once if the call need not wait; raises KVLeaseError, or sets it on the future."""
        ...

    def answer(
        self, verb: str, request: Message, caller: Caller
    ) -> Message | asyncio.Future[Message]:
        """Answer as `call` does, but leave what the caller need not wait for to `settle`, which must follow."""
        ...

    def settle(self) -> None:
        """Carry out what the last answer left to be done."""
        ...

    def cancel(self, future: asyncio.Future[Message]) -> None:
        """Forget a waiting call whose caller has gone."""
        ...

    def fds(self, worker_id: int) -> list[int]:
        """Return the descriptors of a worker's regions, in the order of its AttachResponse; the daemon owns them."""
        ...

    def stream(self, verb: str, request: Message, caller: Caller) -> AsyncIterator[Message]:
        """Yield the answers to a watch or a trace, without end."""
        ...


class Observer(Protocol):
    """Counts requests."""

    def observe(self, verb: str, transport: str, code: str, seconds: float) -> None:
        """Count one answered call; `code` is "OK" or an error's code."""
        ...

    async def scrape(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        ...


class Beside(Protocol):
    """Something that is served beside the API."""

    def add_to(self, app: Starlette, daemon: Backend) -> None:
        """Add its routes to the app; the daemon says who may see what."""
        ...


class Limits(TlsSettings, Protocol):
    """The settings that the adapters read."""

    @property
    def runtime_dir(self) -> Path:
        """Directory of the Unix sockets, mode 0700."""
        ...

    @property
    def listen_tcp(self) -> bool:
        """Whether REST and gRPC also listen on loopback TCP."""
        ...

    @property
    def tcp_host(self) -> str:
        """The address that TCP listens on."""
        ...

    @property
    def http_port(self) -> int:
        """TCP port of REST; 0 takes any free port."""
        ...

    @property
    def grpc_port(self) -> int:
        """TCP port of gRPC; 0 takes any free port."""
        ...

    @property
    def max_message_bytes(self) -> int:
        """Most bytes of one message."""
        ...

    @property
    def max_connections(self) -> int:
        """Most connections of one transport at once."""
        ...

    @property
    def head_seconds_max(self) -> float:
        """Most seconds from the first byte of a request's head or a frame to its last, and for a handshake."""
        ...

    @property
    def body_seconds_max(self) -> float:
        """Most seconds from a request's head to the end of its body."""
        ...

    @property
    def idle_seconds_max(self) -> float:
        """Most seconds that a connection may be idle over HTTP and gRPC, or leave an answer unread."""
        ...

    @property
    def max_calls_in_flight(self) -> int:
        """Most unanswered calls of one connection."""
        ...
