"""Own what every transport offers and how an address is written; how bytes travel is each transport's business."""

import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from google.protobuf.message import Message

from kvlease._checks import check_type
from kvlease._runtime import ADDRESS_VARIABLE, runtime_directory
from kvlease.credentials import (
    NO_CREDENTIALS,
    TOKEN_FILE_VARIABLE,
    Bearer,
    Credentials,
    checked,
    from_environment,
)
from kvlease.errors import DeadlineError, InvalidError
from kvlease.v1 import kvlease_pb2 as pb

_SCHEMES: Final = {
    "unix": True, "http": False, "https": False, "http+unix": True, "grpc": False, "grpcs": False, "grpc+unix": True,
}  # fmt: skip
"""Every scheme of an address, and whether a path follows it instead of a host and port."""
_WRITTEN: Final = ", ".join(
    f"{scheme}://{'/path' if takes_path else 'host:port'}"
    for scheme, takes_path in _SCHEMES.items()
)
"""The forms in which an address may be written."""


class Outgoing(NamedTuple):
    """One call, as every transport carries it; a tuple, because one is made for each call of the hot path."""

    verb: str
    """The field of `Call.request` that the request fills."""
    request: Message
    deadline_at: float
    """Monotonic seconds at which the caller stops waiting."""
    token: str = ""
    epoch: int = 0
    idempotency_key: str = ""
    cache: str = ""
    """The cache that an operator means; a worker's token tells its cache."""
    traceparent: str = ""
    """The W3C traceparent of the caller's span; empty if nothing is traced."""

    def seconds_left(self) -> float:
        """Return the seconds until the deadline.

        Raises:
            DeadlineError: the deadline has passed.
        """
        left = self.deadline_at - time.monotonic()
        if left <= 0:
            raise past_deadline(self.verb)
        return left


class Attached(NamedTuple):
    """The answer to an attach, and the descriptors that came with it, which the receiver must close."""

    response: pb.AttachResponse
    fds: list[int]


Undo = Callable[[pb.Reply], Iterable[Outgoing]]
"""Takes a reply whose caller has gone, and returns the calls that undo what it grants; nobody awaits their answers."""


class Transport(Protocol):
    """A blocking way to the daemon; connects at the first call, and again after a failure."""

    @property
    def is_open(self) -> bool:
        """Whether it holds anything that `close` would give back."""
        ...

    def send(self, call: Outgoing) -> Message:
        """Send a call and return its response; raises the daemon's refusal, DeadlineError or UnavailableError."""
        ...

    def attach(self, call: Outgoing) -> Attached:
        """Send an attach over a fresh connection, which later calls also use."""
        ...

    def stream(self, call: Outgoing, idle_seconds: float | None) -> Iterator[Message]:
        """Yield the answers to a watch or a trace, over its own connection, until none comes for `idle_seconds`."""
        ...

    def close(self) -> None:
        """Close the connection; a later call would open another."""
        ...


class AsyncTransport(Protocol):
    """The same as `Transport`, for callers on an event loop."""

    undoes: bool
    """Whether the transport itself undoes what a call grants whose caller was cancelled meanwhile."""

    @property
    def is_open(self) -> bool:
        """Whether it holds anything that `close` would give back."""
        ...

    async def send(self, call: Outgoing) -> Message:
        """Send a call and return its response; raises the daemon's refusal, DeadlineError or UnavailableError."""
        ...

    async def attach(self, call: Outgoing) -> Attached:
        """Send an attach over a fresh connection, which later calls also use."""
        ...

    def stream(self, call: Outgoing, idle_seconds: float | None) -> AsyncIterator[Message]:
        """Yield the answers to a watch or a trace until none has come for `idle_seconds`."""
        ...

    async def close(self) -> None:
        """Close the connection; a later call would open another."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a daemon listens, and in which protocol."""

    scheme: str
    """unix, http, https, http+unix, grpc, grpcs or grpc+unix."""
    path: str = ""
    """The socket's path, for the schemes of Unix sockets."""
    host: str = ""
    port: int = 0
    credentials: Credentials = NO_CREDENTIALS

    @property
    def protocol(self) -> str:
        """The protocol, without the kind of socket and without TLS: unix, http or grpc."""
        return self.scheme.partition("+")[0].removesuffix("s")

    @property
    def has_tls(self) -> bool:
        """Whether the connection uses TLS."""
        return self.scheme.endswith("s")

    @property
    def bearer(self) -> Bearer:
        """The source of the token of calls that have none of their own."""
        return Bearer(self.credentials, self.host, self.port, runtime_directory())

    @property
    def place(self) -> str:
        """Host and port as in URLs, with an address of IPv6 in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def __str__(self) -> str:
        """Write the address as it is given."""
        return f"{self.scheme}://{self.path or self.place}"


def parse_address(written: str) -> Address:
    """Read an address such as "unix:///run/kvlease.sock", "http://127.0.0.1:7070" or "grpc+unix:///run/grpc.sock".

    Raises:
        InvalidError: the address is not written in one of these forms.
    """
    check_type("address", written, str)
    if "@" in written.partition("://")[2].partition("/")[0]:
        # It may be a password, so it is not repeated.
        message = f"an address names no user; {TOKEN_FILE_VARIABLE} names the file with a token"
        raise InvalidError(message, resource="address")
    message = f"{written[:80]!r} is not an address; use one of {_WRITTEN}"
    try:
        parts = urlsplit(written)
        port = parts.port or 0
    except ValueError as error:
        raise InvalidError(message, resource="address") from error
    takes_path = _SCHEMES.get(parts.scheme)
    # A path is taken as it is: of a file's name, ? and # are no ends.
    path = written.partition("://")[2]
    if (
        takes_path is None
        or "\0" in written
        or (takes_path and (parts.netloc or not path.startswith("/")))
    ):
        raise InvalidError(message, resource="address")
    if takes_path:
        return Address(scheme=parts.scheme, path=path)
    is_more = parts.path not in ("", "/") or parts.query or parts.fragment
    if not parts.hostname or not port or is_more:
        raise InvalidError(message, resource="address")
    return Address(scheme=parts.scheme, host=parts.hostname, port=port)


def chosen_address(written: str | None, credentials: Credentials | None) -> Address:
    """Return the address that a caller names, or the default, with the given credentials or else the environment's.

    Raises:
        InvalidError: the address or the token is malformed, or the token's file cannot be read.
    """
    check_type("address", written, str | None)
    address = parse_address(written or default_address())
    shown = from_environment() if credentials is None else checked(credentials)
    return replace(address, credentials=shown)


def default_address() -> str:
    """Return KVLEASE_ADDRESS if it is set, else the local socket in the user's runtime directory."""
    return os.environ.get(ADDRESS_VARIABLE) or f"unix://{runtime_directory()}/kvlease.sock"


def past_deadline(verb: str) -> DeadlineError:
    """Return the error of a call whose answer did not come in time."""
    return DeadlineError(
        f"{verb} was not answered before its deadline; it may have been carried out"
    )
