"""Own what the adapters need of the daemon, the settings and the metrics; who provides it is not their business."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.message import Message
from starlette.applications import Starlette

from kvleased.access.callers import Caller
from kvleased.access.roles import Roles
from kvleased.api.tls import TlsSettings


class Traces(Protocol):
    """What makes spans of requests and calls."""

    @property
    def provider(self) -> Any:
        """OpenTelemetry's TracerProvider."""
        ...

    def request(
        self, name: str, traceparent: str, attributes: Mapping[str, str]
    ) -> AbstractContextManager[Any]:
        """Make the span of a request, below the one that its caller names; calls within it are below it."""
        ...


class Backend(Protocol):
    """What answers calls."""

    @property
    def epoch(self) -> int:
        """The daemon's life."""
        ...

    @property
    def tracing(self) -> Traces | None:
        """What makes spans of calls; None where nobody wants any, and then callers need not say who traces them."""
        ...

    @property
    def readiness(self) -> tuple[bool, str]:
        """Whether calls can be granted, and why not."""
        ...

    def admit(self, allowed: Roles, caller: Caller, asked: str) -> Caller:
        """Return the caller as who he is, before each call that asks for a verb or a path.

        Raises:
            UnknownWorkerError, NotYoursError: the caller may not.
        """
        ...

    def check_still(self, caller: Caller) -> None:
        """Refuse to go on with what lasts.

        Raises:
            UnknownWorkerError: the token that admitted the caller was replaced.
        """
        ...

    def knows(self, token: str, /) -> bool:
        """Whether a token is anybody's, so that its connection is no stranger's."""
        ...

    def call(
        self, verb: str, request: Message, caller: Caller
    ) -> Message | asyncio.Future[Message]:
        """Answer at once where nothing must be waited for; raises KVLeaseError, or sets it on the future."""
        ...

    def answer(
        self, verb: str, request: Message, caller: Caller
    ) -> Message | asyncio.Future[Message]:
        """Do the same, but leave what the caller need not wait for to `settle`, which must follow."""
        ...

    def settle(self) -> None:
        """Carry out what the last answer left to be done."""
        ...

    def cancel(self, future: asyncio.Future[Message]) -> None:
        """Forget a waiting call whose caller has gone."""
        ...

    def fds(self, worker_id: int) -> list[int]:
        """Return the descriptors of a worker's regions, in the order of its AttachResponse; they stay the daemon's."""
        ...

    def stream(self, verb: str, request: Message, caller: Caller) -> AsyncIterator[Message]:
        """Yield what a watch or a trace is answered with, without end."""
        ...


class Observer(Protocol):
    """What counts requests."""

    def observe(self, verb: str, transport: str, code: str, seconds: float) -> None:
        """Count one answered call; `code` is "OK" or an error's code."""
        ...

    async def scrape(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        ...


class Beside(Protocol):
    """What is served beside the API."""

    def add_to(self, app: Starlette, daemon: Backend) -> None:
        """Add its routes; the daemon says who may see what."""
        ...


class Limits(TlsSettings, Protocol):
    """Which settings the adapters read."""

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
        """The loopback address."""
        ...

    @property
    def http_port(self) -> int:
        """TCP port of REST; 0 takes any free one."""
        ...

    @property
    def grpc_port(self) -> int:
        """TCP port of gRPC; 0 takes any free one."""
        ...

    @property
    def max_message_bytes(self) -> int:
        """Bytes of one message."""
        ...

    @property
    def max_connections(self) -> int:
        """Connections of one transport at once."""
        ...

    @property
    def head_seconds_max(self) -> float:
        """Seconds from the first byte of a request's head or a frame to its last, and for a handshake."""
        ...

    @property
    def body_seconds_max(self) -> float:
        """Seconds from a request's head to the end of its body."""
        ...

    @property
    def idle_seconds_max(self) -> float:
        """Seconds that a connection may be idle over HTTP and gRPC, or leave an answer unread."""
        ...

    @property
    def max_calls_in_flight(self) -> int:
        """Unanswered calls of one connection."""
        ...
