"""Own the form of a call in REST: its path, its JSON body and its problem document; connections are elsewhere."""

import base64
import json
import ssl
from collections.abc import Iterator, Mapping
from http.client import BadStatusLine
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from kvlease.credentials import PLAIN_PEER, not_taken, wanted_certificate
from kvlease.errors import (
    InternalError,
    InvalidError,
    KVLeaseError,
    UnavailableError,
    UnknownCacheError,
)
from kvlease.transports._names import check_cache, check_new_cache, check_tenant
from kvlease.transports.base import Address, Outgoing
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire.faults import error_from_proto

Json = dict[str, Any]
"""A JSON object; `Any`, because it is the wire."""

ROUTES: Final[Mapping[str, tuple[str, str]]] = {
    "plan": ("POST", "/v1/plans"),
    "register_cache": ("PUT", "/v1/caches/{cache}"),
    "get_cache": ("GET", "/v1/caches/{cache}"),
    "list_caches": ("GET", "/v1/caches"),
    "delete_cache": ("DELETE", "/v1/caches/{cache}"),
    "attach": ("POST", "/v1/caches/{cache}/workers"),
    "detach": ("DELETE", "/v1/workers/self"),
    "heartbeat": ("POST", "/v1/workers/self/heartbeat"),
    "reserve": ("POST", "/v1/leases"),
    "map": ("POST", "/v1/leases/{lease_id}/map"),
    "extend": ("POST", "/v1/leases/{lease_id}/extend"),
    "commit": ("POST", "/v1/leases/{lease_id}/commit"),
    "evict": ("POST", "/v1/leases/{lease_id}/evict"),
    "reload": ("POST", "/v1/leases/{lease_id}/reload"),
    "fork": ("POST", "/v1/leases/{lease_id}/fork"),
    "trim": ("POST", "/v1/leases/{lease_id}/trim"),
    "release": ("DELETE", "/v1/leases/{lease_id}"),
    "explain": ("GET", "/v1/leases/{lease_id}/explanation"),
    "lookup": ("POST", "/v1/lookup"),
    "pin": ("POST", "/v1/pins"),
    "unpin": ("DELETE", "/v1/pins/{pin_id}"),
    "step": ("POST", "/v1/step"),
    "exchange": ("POST", "/v1/magazine/exchange"),
    "inventory": ("GET", "/v1/magazine"),
    "drain": ("POST", "/v1/drain"),
    "undrain": ("DELETE", "/v1/drain"),
    "clear": ("POST", "/v1/caches/{cache}/clear"),
    "resize": ("POST", "/v1/caches/{cache}/resize"),
    "set_tenant": ("PUT", "/v1/tenants/{tenant}"),
    "get_tenant": ("GET", "/v1/tenants/{tenant}"),
    "stats": ("GET", "/v1/stats"),
    "inspect": ("GET", "/v1/caches/{cache}/{what}"),
    "watch": ("GET", "/v1/events"),
    "trace": ("GET", "/v1/caches/{cache}/trace"),
}
"""Method and path of every verb."""

STREAMS: Final = frozenset({"watch", "trace"})
"""The verbs whose answers are an endless stream."""

LISTED: Final = ("workers", "leases", "pins", "waiting", "tenants", "magazines")
"""The lists that a cache has; each has its own path."""

WITHOUT_LEASE: Final[Mapping[str, tuple[str, str]]] = {
    "evict": ("POST", "/v1/evict"),
    "reload": ("POST", "/v1/reload"),
}
"""Method and path of verbs that name keys or a number of blocks instead of a lease."""

EVENT_BYTES_MAX: Final = 2**20
"""Bytes of the largest event that is accepted."""

PROBLEM_BYTES_SHOWN: Final = 200
"""Bytes that an error repeats of an answer that is not kvlease's."""


_PROBLEM_FIELDS: Final = (
    "code", "resource", "need", "available", "limit", "retry_after_ms", "rule", "remedies",
    "holdings",
)  # fmt: skip
_RESPONSES: Final[Mapping[str, type[Message]]] = {
    field.name: getattr(pb, field.message_type.name)
    for field in pb.Reply.DESCRIPTOR.oneofs_by_name["response"].fields
    if field.message_type is not None
}


class Rest(NamedTuple):
    """One call as HTTP carries it."""

    method: str
    path: str
    """The path, with the query."""
    body: bytes
    headers: dict[str, str]


def request_of(call: Outgoing, token: str = "") -> Rest:
    """Return a call as a REST request, with `token` if it has none; the body leaves out fields that are in the path."""
    fields = to_json(call.request)
    method, path = _route_of(call.verb, fields)
    for name in ("cache", "what", "lease_id", "pin_id", "worker_id", "tenant"):
        if f"{{{name}}}" in path:
            # A number that is not set is 0, which a path can carry.
            value = str(fields.pop(name, getattr(call.request, name, "")))
            _check_in_path(call.verb, name, value)
            path = path.replace(f"{{{name}}}", quote(value, safe=""))
    check_cache(call.cache)
    query = {"cache": call.cache} if call.cache else {}
    if method in ("GET", "DELETE"):
        query |= {
            name: str(int(value) if value is True else value) for name, value in fields.items()
        }
    if query:
        path += "?" + "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
    headers = {"Accept": "text/event-stream" if call.verb in STREAMS else "application/json"}
    body = b""
    if method in ("POST", "PUT"):
        body = json.dumps(fields, separators=(",", ":")).encode()
        headers["Content-Type"] = "application/json"
    if bearer := call.token or token:
        headers["Authorization"] = f"Bearer {bearer}"
    if call.idempotency_key:
        headers["Idempotency-Key"] = call.idempotency_key
    if call.traceparent:
        headers["traceparent"] = call.traceparent
    if call.epoch:
        headers["KVLease-Epoch"] = str(call.epoch)
    return Rest(method, path, body, headers)


def _check_in_path(verb: str, name: str, value: str) -> None:
    """Refuse a value that a path cannot carry, as the daemon would over other transports; it would see another path.

    Raises:
        InvalidError: there is no such list, or the name of a tenant, or of a cache to register or attach to, is empty
            or too long.
        UnknownCacheError: another verb names a cache by such a name.
    """
    if name == "what" and value not in LISTED:
        message = f"what is {value[:40]!r}; it must be one of {', '.join(LISTED)}"
        raise InvalidError(message, resource=name)
    if name == "tenant":
        check_tenant(value)
    elif name == "cache" and verb in ("register_cache", "attach"):
        check_new_cache(value)
    elif name == "cache" and not value:
        raise UnknownCacheError("there is no cache ''; say which one is meant", resource=name)
    elif name == "cache":
        check_cache(value)


def _route_of(verb: str, fields: Json) -> tuple[str, str]:
    if verb in WITHOUT_LEASE and "lease_id" not in fields:
        return WITHOUT_LEASE[verb]
    if verb == "detach" and "worker_id" in fields:
        return "DELETE", "/v1/workers/{worker_id}"
    if verb in ("drain", "undrain") and "cache" in fields:
        return ROUTES[verb][0], "/v1/caches/{cache}/drain"
    return ROUTES[verb]


def response_of(verb: str, status: int, body: bytes) -> Message:
    """Read the answer to a call, or raise the error that it carries."""
    if status >= 400:  # noqa: PLR2004 - HTTP's own boundary
        raise _problem(status, body)
    message = _RESPONSES[verb]()
    try:
        fill(message, json.loads(body) if body else {})
    except (ValueError, TypeError, AttributeError) as error:
        raise _not_ours(status, body) from error
    return message


def to_json(message: Message) -> Json:
    """Return the fields that are set, by their proto names; bytes as base64, integers plain."""
    fields: Json = {}
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            fields[field.name] = dict(value)
        elif field.is_repeated:
            fields[field.name] = [_value_to_json(field, item) for item in value]
        else:
            fields[field.name] = _value_to_json(field, value)
    return fields


def fill(message: Message, fields: Json) -> None:
    """Set the fields of `message` that `fields` names; unknown names come from a newer daemon and are ignored."""
    by_name = message.DESCRIPTOR.fields_by_name
    for name, value in fields.items():
        field = by_name.get(name)
        if field is None or value is None:
            continue
        if field.message_type is None and field.is_repeated:
            # Its items are never bytes: ids travel packed in one field.
            getattr(message, name).extend(value)
        elif field.message_type is None:
            setattr(
                message,
                name,
                base64.b64decode(value) if field.type == FieldDescriptor.TYPE_BYTES else value,
            )
        elif field.message_type.GetOptions().map_entry:
            getattr(message, name).update(value)
        elif field.is_repeated:
            for item in value:
                fill(getattr(message, name).add(), item)
        else:
            part = getattr(message, name)
            part.SetInParent()
            fill(part, value)


def _value_to_json(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return to_json(value)
    return base64.b64encode(value).decode() if field.type == FieldDescriptor.TYPE_BYTES else value


def _problem(status: int, body: bytes) -> KVLeaseError:
    """Return the error that a problem document explains."""
    try:
        fields = json.loads(body)
        message = pb.Error(message=fields.get("detail") or fields.get("title") or "")
        fill(
            message,
            {name: fields.get(name) for name in _PROBLEM_FIELDS},
        )
    except (ValueError, TypeError, AttributeError):
        return _not_ours(status, body)
    return error_from_proto(message) if message.code else _not_ours(status, body)


def _not_ours(status: int, body: bytes) -> KVLeaseError:
    text = f"HTTP {status} with an answer that is not from kvlease: {body[:PROBLEM_BYTES_SHOWN]!r}"
    return UnavailableError(text) if status >= 500 else InternalError(text)  # noqa: PLR2004 - HTTP's own boundary


def unreachable(address: Address, error: Exception) -> UnavailableError:
    """Return the error of an exchange with a daemon that failed before its answer; it says what to check."""
    # aiohttp wraps the certificate's error in one of its own.
    refused = getattr(error, "certificate_error", error)
    if isinstance(refused, ssl.SSLCertVerificationError):
        return UnavailableError(not_taken(address, refused.verify_message))
    is_hung_up = isinstance(error, ConnectionResetError) or "disconnected" in str(error)
    # The same end, where it comes while the request is written.
    is_hung_up |= isinstance(error, ssl.SSLEOFError) or "certificate required" in str(error)
    also = ""
    if address.has_tls and PLAIN_PEER in str(error):
        also = "; a daemon without a certificate is at http://"
    elif is_hung_up and address.has_tls:
        also = wanted_certificate(address.credentials)
    elif is_hung_up and address.protocol == "http" and not address.path:
        also = "; a daemon with a certificate is at https://"
    return UnavailableError(
        f"the daemon at {address} cannot be reached ({_in_words(error)}); "
        f"check its address, and that it is running{also}"
    )


def ended() -> OSError:
    """Return the error of a stream that its daemon has ended, as it does when it stops; an orderly end is one, too."""
    return ConnectionError("the connection was closed")


def _in_words(error: Exception) -> str:
    """Return the text of an exchange's error, but not bytes that some other program at the address has sent."""
    text = str(error)
    # The error for a strange answer: BadStatusLine of http.client, except the subclass that only says that the server
    # hung up, and an error of aiohttp with a status.
    is_strange = isinstance(error, BadStatusLine) and not isinstance(error, OSError)
    is_strange |= hasattr(error, "status") or not text.isprintable()
    return "the server there does not speak HTTP" if is_strange else text


class SseReader:
    """Put server-sent events together from the pieces in which they arrive."""

    def __init__(self, verb: str) -> None:
        """Begin with nothing received; the events answer `verb`."""
        self._verb = verb
        self._pending = b""

    def feed(self, chunk: bytes) -> Iterator[Message]:
        """Yield the events that this piece completes.

        Raises:
            KVLeaseError: the daemon says why the stream has ended, or what comes is no stream of its.
        """
        *events, self._pending = (self._pending + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._pending) > EVENT_BYTES_MAX:
            message = "the peer does not speak kvlease: it sent an event above the limit"
            raise UnavailableError(message, need=len(self._pending), limit=EVENT_BYTES_MAX)
        for event in events:
            fields: dict[bytes, list[bytes]] = {}
            for name, _, value in (line.partition(b":") for line in event.split(b"\n")):
                fields.setdefault(name, []).append(value.removeprefix(b" "))
            if data := b"\n".join(fields.get(b"data", ())):
                # Its status has been sent already.
                status = 500 if fields.get(b"event") == [b"problem"] else 200
                yield response_of(self._verb, status, data)
