"""Own how values travel to a server that speaks the protocol of Redis, such as Valkey, whatever is in them.

The user of the server needs only `+get +getrange +strlen +set +unlink +expire ~kvlease:*` (and `+select` for a database
other than 0).
"""

import select
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from redis import Connection, SSLConnection, UnixDomainSocketConnection
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from kvlease.credentials import ask_for_no_phrase
from kvleased.config.addresses import TLS_FILES, RemoteUrl
from kvleased.movers.remote import redis_faults
from kvleased.movers.remote.store import (
    IS_SPOILED,
    IS_THERE,
    VALUE_BYTES_MAX,
    RemoteError,
    no_answer,
)
from kvleased.movers.remote.value import Value, ValueParts
from kvleased.telemetry import logs

_READ_BYTES: Final = 1 << 20
"""Bytes read from the socket at once; reading fewer costs more than the copying."""
_WRONG_TYPE: Final = "WRONGTYPE"
_TRIED: Final = tuple(f"kvlease:trial-{number}" for number in range(16))
"""Names that no value has; in a cluster they are spread over all of its nodes, except by an unlikely chance."""

_Command = tuple[object, ...]


class RedisStore:
    """One connection, made at the first call and again after each failure; no call is tried twice."""

    def __init__(self, url: RemoteUrl, *, ttl_seconds: int, seconds_max: float) -> None:
        """Assign; unless `ttl_seconds` is 0, no value lives longer than that after it was put or got."""
        self._url = url
        self._ttl_seconds = ttl_seconds
        self._seconds_max = seconds_max
        options = (b"EX", str(ttl_seconds).encode()) if ttl_seconds else ()
        self._set_start = b"*%d\r\n$3\r\nSET\r\n" % (3 + len(options))
        self._set_end = b"\r\n" + b"".join(map(_bulk, options))
        self._connection = _connection(url, seconds_max)
        self._was_answered = False
        """Whether the server has ever answered, which shows that the scheme of the URL is right."""
        self._refusals: dict[str, str] = {}
        """What was refused last, by event."""

    def __repr__(self) -> str:
        """Show the address, without its password."""
        return f"<RedisStore {self._url}>"

    @property
    def advice(self) -> str:
        """What to do if a TLS handshake with a server that has never answered takes too long."""
        is_shaking_hands = getattr(self._connection, "is_shaking_hands", False)
        return redis_faults.IF_NO_TLS if is_shaking_hands and not self._was_answered else ""

    def exists(self, names: Sequence[str], value_bytes: int) -> bytes:
        """Return a byte for each name: `IS_THERE` if it has `value_bytes`, `IS_SPOILED` if it has anything else, or 0.

        An empty value counts as none, which only commands that our user may lack would tell apart; the next put
        overwrites it.
        """
        found = self._ask([("STRLEN", name) for name in names])
        return bytes(IS_THERE if one == value_bytes else IS_SPOILED if one else 0 for one in found)

    def get(self, names: Sequence[str], value_bytes: int) -> Sequence[Value | None]:
        """Return the value of each name; of one that is too long or of another type, only as much as shows that."""
        commands: list[_Command] = [("GETRANGE", name, 0, value_bytes) for name in names]
        if self._ttl_seconds:
            # Sent with the others, and never shortens a life: another node may keep its values longer, or for good.
            commands += [("EXPIRE", name, self._ttl_seconds, "GT") for name in names]
        found = self._ask(commands, num_needed=len(names))
        if self._ttl_seconds:
            self._tell("remote_lives_not_prolonged", found[len(names) :])
        return [_value(one) for one in found[: len(names)]]

    def put(self, names: Sequence[str], values: Sequence[ValueParts]) -> bytes:
        """Store values; return a byte for each, 1 if it was taken.

        An existing value is overwritten: it is either a whole value of the same block, or not worth keeping.
        """
        if any(len(header) + len(slot) > VALUE_BYTES_MAX for header, slot in values):
            raise RemoteError(f"no value may have more than {VALUE_BYTES_MAX} bytes")
        packed: list[bytes | memoryview] = []
        for name, (header, slot) in zip(names, values, strict=True):
            packed += (self._set(name, len(header) + len(slot)) + header, slot, self._set_end)
        found = self._answers(packed, len(names), num_needed=0)
        self._tell("remote_puts_refused", found)
        return bytes(one == b"OK" for one in found)

    def drop(self, names: Sequence[str]) -> None:
        """Have values forgotten, if this user may."""
        found = self._ask([("UNLINK", name) for name in names], num_needed=0)
        self._tell("remote_drops_refused", found)

    def ping(self) -> None:
        """Check that the server answers, lets us in, and would say whether it has a value, and give it.

        No PING is sent: a server that cannot save to its disk refuses it as it refuses writes, and still gives values.
        """
        tried: list[_Command] = [("STRLEN", name) for name in _TRIED]
        tried.append(("GETRANGE", _TRIED[0], 0, 0))
        if not any(isinstance(one, int) for one in self._ask(tried)):
            raise RemoteError(
                "it did not answer a STRLEN with a number; check that remote_url names Redis or Valkey"
            )

    def cut(self) -> None:
        """Make the call that another thread is in fail."""
        if (sock := _socket_of(self._connection)) is not None:
            # This bypasses the shutdown of a TLS socket, which would take its state away from the reading thread.
            with suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._connection.disconnect()

    def _ask(
        self, commands: Sequence[_Command], *, num_needed: int | None = None
    ) -> list[bytes | int | ResponseError | None]:
        packed = self._connection.pack_commands(commands)
        num_commands = len(commands)
        return self._answers(
            packed, num_commands, num_needed=num_commands if num_needed is None else num_needed
        )

    def _answers(
        self, packed: Sequence[Value], num_commands: int, *, num_needed: int
    ) -> list[bytes | int | ResponseError | None]:
        """Send commands together and return their answers; the first `num_needed` may not be refused.

        Raises:
            RemoteError: a command was not answered, so nothing is known of any; or one that is needed was refused.
        """
        connection = self._connection
        try:
            if _is_stale(connection):
                connection.disconnect()
            connection.send_packed_command(packed)
            answers = [_answer(connection.read_response) for _ in range(num_commands)]
        except (RedisError, OSError) as error:
            advice = self.advice
            connection.disconnect()
            if isinstance(error, (RedisTimeoutError, TimeoutError)):
                # Worded as `bounded` words it, whose clock runs out at the same time.
                raise no_answer(self._seconds_max, advice) from None
            raise RemoteError(self._said(error)) from None
        except BaseException:
            # Answers that nobody has read must not be taken for those of the next call.
            connection.disconnect()
            raise
        self._was_answered = True
        for answer in answers[:num_needed]:
            if isinstance(answer, ResponseError) and not str(answer).startswith(_WRONG_TYPE):
                is_forbidden = isinstance(answer, NoPermissionError)
                raise RemoteError(self._said(answer), is_forbidden=is_forbidden)
        return answers

    def _set(self, name: str, value_bytes: int) -> bytes:
        """Return a SET command up to its value: redis-py would copy the value in packing it."""
        return b"%b%b$%d\r\n" % (self._set_start, _bulk(name.encode()), value_bytes)

    def _tell(self, event: str, answers: Sequence[object]) -> None:
        """Log which writes the server refuses, whenever that changes."""
        refusals = [one for one in answers if isinstance(one, ResponseError)]
        refusal = self._said(refusals[0]) if refusals else ""
        if refusal != self._refusals.get(event, ""):
            self._refusals[event] = refusal
            logs.line("warning" if refusal else "info", event, reason=refusal)

    def _said(self, error: Exception) -> str:
        may_want_tls = self._url.scheme == "redis" and not self._was_answered
        said = redis_faults.said_by_none if may_want_tls else redis_faults.said
        return said(error, self._url.password or "")


class _TlsConnection(SSLConnection):
    """A connection over TLS that trusts only the authority that the URL names, if it names one.

    redis-py adds that authority to those of the system, and reads all of these for each connection, which takes much of
    a call's time.
    """

    _system_context: ssl.SSLContext | None = None
    """The context that trusts the system's authorities, once they have been read."""
    is_shaking_hands = False
    """Whether the last connection made over TCP is still in its TLS handshake."""

    def _connect(self) -> Any:
        self.is_shaking_hands = False
        return super()._connect()  # type: ignore[no-untyped-call]  # redis-py has no type for it

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        context = self._trusting()
        context.check_hostname = self.check_hostname
        if self.certfile or self.keyfile:
            try:
                context.load_cert_chain(self.certfile, self.keyfile, ask_for_no_phrase)
            except OSError as error:
                files = " and ".join(filter(None, (self.certfile, self.keyfile)))
                raise redis_faults.unusable_file(files, error) from None
        self.is_shaking_hands = True
        wrapped = context.wrap_socket(sock, server_hostname=self.host)
        self.is_shaking_hands = False
        return wrapped

    def _trusting(self) -> ssl.SSLContext:
        """Return the context that trusts the authorities; a named file, which may be renewed, is read every time."""
        if self.ca_certs:
            try:
                return ssl.create_default_context(cafile=self.ca_certs)
            except OSError as error:
                raise redis_faults.unusable_file(self.ca_certs, error) from None
        if self._system_context is None:
            self._system_context = ssl.create_default_context()
        return self._system_context


_CONNECTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "redis": Connection,
    "rediss": _TlsConnection,
    "unix": UnixDomainSocketConnection,
}


def _bulk(argument: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(argument), argument)


def _answer(read: Callable[..., Any]) -> bytes | int | ResponseError | None:
    try:
        answer: bytes | int | None = read(disable_decoding=True)
    except ResponseError as error:
        return error
    return answer


def _value(answer: bytes | int | ResponseError | None) -> bytes | None:
    """Return what a GETRANGE found: nothing, a value, or something of another type, which no value can be."""
    if isinstance(answer, ResponseError):
        return b""
    return answer if isinstance(answer, bytes) and answer else None


def _connection(url: RemoteUrl, seconds_max: float) -> Any:
    """Return a redis-py connection that is not connected yet; its types are incomplete."""
    options: dict[str, Any] = {
        "db": url.number("db", 0),
        "username": url.username or None,
        "password": url.password or None,
        "socket_timeout": seconds_max,
        "socket_connect_timeout": seconds_max,
        "socket_read_size": _READ_BYTES,
        "protocol": 2,
        "driver_info": None,
        "retry": Retry(NoBackoff(), 0),
    }
    options |= {"path": url.path} if url.path else {"host": url.host, "port": url.port}
    if url.scheme == "rediss":
        options |= {name: url.options.get(name) for name in TLS_FILES}
        options["ssl_check_hostname"] = url.is_set("ssl_check_hostname", default=True)
    return _CONNECTIONS[url.scheme](**options)


def _socket_of(connection: Any) -> socket.socket | None:
    sock: socket.socket | None = getattr(connection, "_sock", None)
    return sock


def _is_stale(connection: Any) -> bool:
    """Tell whether the server has sent something unasked, which usually means that it has gone."""
    if (sock := _socket_of(connection)) is None:
        return False
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
