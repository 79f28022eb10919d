"""Own the gRPC channel, blocking and for an event loop; this module is imported only when a channel is wanted."""

import asyncio
import json
import re
import threading
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import (  # type: ignore[import-untyped]  # it has no types
    ErrorInfo,
    RetryInfo,
)
from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]  # the same

from kvlease.credentials import (
    CA_FILE_VARIABLE,
    PLAIN_PEER,
    Bearer,
    not_taken,
    wanted_certificate,
)
from kvlease.errors import (
    BusyError,
    InvalidError,
    KVLeaseError,
    TooLargeError,
    UnavailableError,
    UnknownCacheError,
)
from kvlease.transports._names import check_cache
from kvlease.transports._silence import PING_SECONDS, SILENT_SECONDS_MAX, hung
from kvlease.transports.base import Address, Attached, Outgoing, past_deadline
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire.faults import error_from_proto, fitting, holdings_from_text
from kvlease.wire.framing import GRPC_SLACK_BYTES

MESSAGE_BYTES_MAX: Final = 64 * 2**20
"""Bytes of the largest response that is accepted."""

OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # A daemon that restarts is back within a second or two; by default gRPC would try again only later than that.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Retries are ours, because they carry the idempotency key; proxies have no place on a node.
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    # A stream may be quiet for hours, so these pings ask whether its daemon lives.
    ("grpc.keepalive_time_ms", int(PING_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", int((SILENT_SECONDS_MAX - PING_SECONDS) * 1000)),
    # Newer versions of gRPC have this timeout, too; its default is a minute.
    ("grpc.http2.ping_timeout_ms", int((SILENT_SECONDS_MAX - PING_SECONDS) * 1000)),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Options of every channel."""

_SIGNS_OF_NO_HANDSHAKE: Final = ("CERTIFICATE_VERIFY_FAILED", "TSI_PROTOCOL_FAILURE", "andshake")
"""Words of gRPC's errors after a TLS handshake that failed."""
_CERTIFICATE: Final = re.compile(
    r"CERTIFICATE_VERIFY_FAILED: ([^:(]+)|(Hostname Verification Check failed)"
)
"""Words of gRPC's errors if the handshake failed because of the daemon's certificate."""
_NO_GRPC: Final = "parsing HTTP/2"
"""Words of gRPC's errors if the peer answers in another protocol."""
_DETAILS: Final = "grpc-status-details-bin"
_LARGER: Final = re.compile(r"SERVER: .*larger than max \((\d+) vs\. (\d+)\)")
_NUMBERS: Final = ("need", "available", "limit", "retry_after_ms")
_SERVICE: Final = pb.DESCRIPTOR.services_by_name["KVLeaseService"]
_METHODS: Final[dict[str, str]] = {
    field.name: method.name
    for field in pb.Call.DESCRIPTOR.oneofs_by_name["request"].fields
    for method in _SERVICE.methods
    if method.input_type is field.message_type
}


class GrpcTransport:
    """Calls over one channel, any number at once."""

    def __init__(self, address: Address) -> None:
        """Remember where the daemon listens."""
        self._address = address
        self._bearer = address.bearer
        self._channel: grpc.Channel | None = None
        self._lock = threading.Lock()
        self._methods: dict[str, Any] = {}

    def __repr__(self) -> str:
        """Show life: whether there is a channel."""
        return f"<GrpcTransport {self._address} {'open' if self._channel else 'closed'}>"

    @property
    def is_open(self) -> bool:
        """Whether it holds anything that `close` would give back."""
        return self._channel is not None

    def send(self, call: Outgoing) -> Message:
        """Send a call and return its response; raises the daemon's refusal, DeadlineError or UnavailableError."""
        method = self._methods.get(call.verb) or self._method(call.verb)
        try:
            response: Message = method(
                call.request, timeout=call.seconds_left(), metadata=_metadata(call, self._bearer)
            )
        except grpc.RpcError as error:
            raise _error_of(error, call, self._address) from error
        except ValueError as error:
            if self._methods.get(call.verb) is method:
                raise
            raise _closed(self._address) from error  # by another thread
        return response

    def attach(self, call: Outgoing) -> Attached:
        """Send an attach; gRPC hands over no memory."""
        response = self.send(call)
        assert isinstance(response, pb.AttachResponse)
        return Attached(response, [])

    def stream(self, call: Outgoing, idle_seconds: float | None) -> Iterator[Message]:
        """Yield the answers to a watch or a trace until none has come for `idle_seconds`."""
        method = self._method(call.verb)
        try:
            events = method(call.request, metadata=_metadata(call, self._bearer))
        except ValueError as error:
            raise _closed(self._address) from error
        try:
            _await_head(events, call)
            while True:
                # A blocking stream has no limit between two events, so a timer ends it.
                timer = threading.Timer(idle_seconds or threading.TIMEOUT_MAX, events.cancel)
                timer.daemon = True
                timer.start()
                try:
                    event = next(events, None)
                finally:
                    timer.cancel()
                if event is None:
                    return
                yield event
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise _error_of(error, call, self._address) from error
        finally:
            events.cancel()

    def close(self) -> None:
        """Close the channel; a later call would open another."""
        with self._lock:
            channel, self._channel = self._channel, None
            self._methods.clear()
        if channel is not None:
            channel.close()

    def _method(self, verb: str) -> Any:
        with self._lock:
            if self._channel is None:
                self._channel = _open(grpc, self._address)
            method = self._methods[verb] = _multi_callable(self._channel, verb)
        return method


class AsyncGrpcTransport:
    """Calls over one channel of the running event loop."""

    undoes = False

    def __init__(self, address: Address) -> None:
        """Remember where the daemon listens."""
        self._address = address
        self._bearer = address.bearer
        self._channel: grpc.aio.Channel | None = None
        self._methods: dict[str, Any] = {}

    @property
    def is_open(self) -> bool:
        """Whether it holds anything that `close` would give back."""
        return self._channel is not None

    async def send(self, call: Outgoing) -> Message:
        """Send a call and return its response; raises the daemon's refusal, DeadlineError or UnavailableError."""
        method = self._method(call.verb)
        try:
            response: Message = await method(
                call.request, timeout=call.seconds_left(), metadata=_metadata(call, self._bearer)
            )
        except grpc.RpcError as error:
            raise _error_of(error, call, self._address) from error
        except asyncio.CancelledError as error:
            if not self._is_closed_for(call.verb, method):
                raise
            raise _closed(self._address) from error
        return response

    async def attach(self, call: Outgoing) -> Attached:
        """Send an attach; gRPC hands over no memory."""
        response = await self.send(call)
        assert isinstance(response, pb.AttachResponse)
        return Attached(response, [])

    async def stream(self, call: Outgoing, idle_seconds: float | None) -> AsyncIterator[Message]:
        """Yield the answers to a watch or a trace until none has come for `idle_seconds`."""
        method = self._method(call.verb)
        events = method(call.request, metadata=_metadata(call, self._bearer))
        try:
            await _await_head_async(events, call)
            while True:
                async with asyncio.timeout(idle_seconds):
                    event = await events.read()
                if not isinstance(event, Message):
                    return
                yield event
        except TimeoutError:
            return
        except grpc.RpcError as error:
            raise _error_of(error, call, self._address) from error
        except asyncio.CancelledError as error:
            if not self._is_closed_for(call.verb, method):
                raise
            raise _closed(self._address) from error
        finally:
            events.cancel()

    async def close(self) -> None:
        """Close the channel; a later call would open another."""
        channel, self._channel = self._channel, None
        self._methods.clear()
        if channel is not None:
            await channel.close()

    def _is_closed_for(self, verb: str, method: Any) -> bool:
        """Tell whether a call was cancelled because another task closed the channel, and not with its caller."""
        caller = asyncio.current_task()
        return self._methods.get(verb) is not method and not (caller and caller.cancelling())

    def _method(self, verb: str) -> Any:
        if self._channel is None:
            self._channel = _open(grpc.aio, self._address)
        if verb not in self._methods:
            self._methods[verb] = _multi_callable(self._channel, verb)
        return self._methods[verb]


def _closed(address: Address) -> UnavailableError:
    """Return the error of a call whose channel was closed meanwhile; the next try opens another."""
    return UnavailableError(f"the connection to {address} was closed amid the call")


def _open(kind: Any, address: Address) -> Any:
    """Return a channel of a kind: of the module grpc, or grpc.aio."""
    if not address.has_tls:
        return kind.insecure_channel(_target(address), options=OPTIONS)
    credentials = grpc.ssl_channel_credentials(*address.credentials.pem())
    return kind.secure_channel(_target(address), credentials, options=OPTIONS)


def _target(address: Address) -> str:
    return f"unix://{urllib.parse.quote(address.path)}" if address.path else address.place


def _multi_callable(channel: Any, verb: str) -> Any:
    """Return the channel's callable for a verb; a generated stub would refuse any grpc older than its generator."""
    method = _SERVICE.methods_by_name[_METHODS[verb]]
    open_method = channel.unary_stream if method.server_streaming else channel.unary_unary
    return open_method(
        f"/{_SERVICE.full_name}/{method.name}",
        request_serializer=getattr(pb, method.input_type.name).SerializeToString,
        response_deserializer=getattr(pb, method.output_type.name).FromString,
    )


def _await_head(events: Any, call: Outgoing) -> None:
    """Wait until a stream has begun or ended; why it ended is said by its next event.

    Raises:
        DeadlineError: the daemon has done nothing by the call's deadline.
    """
    timer = threading.Timer(call.seconds_left(), events.cancel)
    timer.daemon = True
    timer.start()
    try:
        events.initial_metadata()
    finally:
        timer.cancel()
    if events.cancelled():
        raise past_deadline(call.verb)


async def _await_head_async(events: Any, call: Outgoing) -> None:
    """Do the same on an event loop."""
    try:
        async with asyncio.timeout(call.seconds_left()):
            await events.initial_metadata()
    except TimeoutError as error:
        raise past_deadline(call.verb) from error


def _metadata(call: Outgoing, bearer: Bearer) -> tuple[tuple[str, str], ...]:
    check_cache(call.cache)
    if not (call.cache.isascii() and call.cache.isprintable()):
        # Metadata carries no such text, and gRPC's error would look like that of a daemon that is away.
        message = f"there is no cache {call.cache[:63]!r}; register it first"
        raise UnknownCacheError(message, resource="cache")
    token = call.token or bearer.token
    pairs = (
        ("authorization", f"Bearer {token}" if token else ""),
        ("idempotency-key", call.idempotency_key),
        ("kvlease-epoch", str(call.epoch) if call.epoch else ""),
        ("kvlease-cache", call.cache),
        ("traceparent", call.traceparent),
    )
    return tuple(pair for pair in pairs if pair[1])


def _error_of(error: Any, call: Outgoing, address: Address) -> KVLeaseError:
    """Return the error that a status explains; gRPC's own failures become DeadlineError and UnavailableError."""
    for name, value in error.trailing_metadata() or ():
        if name == _DETAILS and (explained := _explained(value, error.details() or "")):
            return explained
    status = error.code()
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return past_deadline(call.verb)
    details = error.details() or status.name
    message = f"{details} ({address})"
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        # gRPC itself refuses a message that is far above the limit, and calls above its number.
        return _too_large(message) if "larger" in message else BusyError(message)
    if "ping timeout" in message or "keepalive" in message:
        return hung(address)
    if status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
        return InvalidError(message, resource="request")
    if status is grpc.StatusCode.UNAVAILABLE:
        # gRPC's own words for this are about frames and settings.
        reason = "the server there does not speak gRPC" if _NO_GRPC in details else details
        message = f"the daemon at {address} cannot be reached ({reason}); check its address, and that it is running"
    if address.has_tls:
        message = _without_tls(message, details, address)
    elif "Socket closed" in details and not address.path:
        message += "; a daemon with a certificate is at grpcs://"
    return UnavailableError(message)


def _without_tls(message: str, details: str, address: Address) -> str:
    """Return the message of a failed connection over TLS, with the advice that gRPC does not give."""
    if refused := _CERTIFICATE.search(details):
        return not_taken(address, refused[1] or refused[2])
    if PLAIN_PEER in details:
        return f"{message}; a daemon without a certificate is at grpc://"
    if any(sign in details for sign in _SIGNS_OF_NO_HANDSHAKE):
        return (
            f"{message}; if its certificate is not accepted, set {CA_FILE_VARIABLE} to the certificate file of the "
            "authority that signed it, and use a host that the certificate names"
        )
    return (
        message + wanted_certificate(address.credentials) if "Socket closed" in details else message
    )


def _too_large(message: str) -> TooLargeError:
    """Return the error that a daemon gives for a message above its limit; gRPC itself names a limit that is larger."""
    if (found := _LARGER.search(message)) is None:
        return TooLargeError(message)
    need, limit = int(found[1]), int(found[2]) - GRPC_SLACK_BYTES
    return TooLargeError.of_message(need, limit)


def _explained(packed_status: bytes, text: str) -> KVLeaseError | None:
    """Return the error in ErrorInfo and RetryInfo; None if the status is not kvlease's."""
    message = pb.Error(message=text)
    for detail in Status.FromString(packed_status).details:
        info, retry = ErrorInfo(), RetryInfo()
        if detail.Unpack(info) and info.domain == "kvlease":
            message.code = info.reason
            message.resource = info.metadata.get("resource", "")
            message.rule = info.metadata.get("rule", "")
            message.remedies.extend(json.loads(info.metadata.get("remedies", "[]")))
            message.holdings.extend(holdings_from_text(info.metadata.get("holdings", "")))
            for name in _NUMBERS:
                number = fitting(int(info.metadata[name])) if name in info.metadata else None
                if number is not None:
                    setattr(message, name, number)
        elif detail.Unpack(retry):
            message.retry_after_ms = retry.retry_delay.ToMilliseconds()
    return error_from_proto(message) if message.code else None
