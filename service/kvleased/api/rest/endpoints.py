"""Own the way from a REST request to the daemon and back: read strictly, call, write the response as JSON."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvlease.errors import InvalidError, KVLeaseError, TooLargeError, UnknownWorkerError
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire.fields import UINT32_MAX
from kvleased.access.callers import Caller
from kvleased.access.roles import Role, Roles
from kvleased.api import faults
from kvleased.api.rest import texts
from kvleased.api.rest.bodies import refusal_of, require_plain, schema_of
from kvleased.api.rest.conversion import to_json
from kvleased.api.rest.routes import NUMBERS, Route
from kvleased.api.seam import Backend, Observer
from kvleased.api.sockets import Peer, names_loopback
from kvleased.calls import checks

_USUAL_NAMES: Final = frozenset({b"localhost", b"127.0.0.1", b"[::1]"})
"""The usual names of loopback; another may be a web page's own, which was made to lead to loopback."""

_OK: Final = 200
_CREATED: Final = 201
_JSON: Final = (b"content-type", b"application/json")
_INTEGER: Final = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_INTEGER_MAX: Final = 2**63 - 1
_INTEGER_MIN: Final = -(2**63)
"""The range of ids in the protocol; in a path all digits count, where JSON would lose some."""
_LARGE_BYTES: Final = 1 << 17
"""Bytes of a body above which it is joined in one turn of the loop and parsed in another."""
_SHOWN_MAX: Final = 40
"""Most characters of a wrong value that a refusal repeats."""
_NOTHING: Final = frozenset({b"", b"{}"})
"""Empty bodies, which some clients send with every request."""
_NOBODY: Final = Peer()
_TEXTS: Final = frozenset({"cache", "tenant"})
"""Parameters that are texts, not numbers."""
_TRUTHS: Final = {"true": True, "1": True, "false": False, "0": False}
"""How a parameter is written that is neither text nor number."""


class Answer(Response):
    """A response that is already bytes."""

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Keep the parts as they are."""
        self.status_code = status
        self.raw_headers = headers
        self.body = body
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send the response."""
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        await send({"type": "http.response.body", "body": self.body})


def refusal(error: KVLeaseError, status: int | None = None) -> Answer:
    """Return a response with the problem document of an error; `status` replaces the error's own status."""
    body = faults.problem(error, status)
    headers = faults.problem_headers(error, body)
    return Answer(status or error.http_status, headers, body)


class Endpoint:
    """One route of a verb."""

    def __init__(
        self, route: Route, daemon: Backend, metrics: Observer, *, message_bytes_max: int
    ) -> None:
        """Take the route, the daemon, the object that counts calls, and the limit of a body."""
        self._route = route
        self._request_class = route.request_class
        self._in_path = route.in_path
        self._roles = route.roles
        self._settled = route.settled
        self._daemon = daemon
        self._metrics = metrics
        self._message_bytes_max = message_bytes_max
        self._has_schema = False
        """Whether the schema is made, which explains wrong bodies."""

    async def answer(self, request: Request) -> Response:
        """Answer one request."""
        started = perf_counter()
        try:
            message, caller = await self._read(request)
        except KVLeaseError as error:
            result: Message | KVLeaseError = faults.without_frames(error)
        else:
            asked = faults.ask(self._daemon.call, self._route.verb, message, caller)
            result = (
                await self._wait(request, asked) if isinstance(asked, asyncio.Future) else asked
            )
        self._metrics.observe(
            self._route.verb, "rest", faults.code_of(result), perf_counter() - started
        )
        return self._write(result)

    async def _read(self, request: Request) -> tuple[Message, Caller]:
        caller, content_type = _caller(request)
        # Before the body is read: a stranger must not make us read one.
        caller = self._daemon.admit(self._roles, caller, self._route.verb)
        fields: dict[str, Any] = dict(self._settled)
        body_class = self._route.body
        if body_class is not None:
            require_plain(_encoding(request))
            body = await _body(request, self._message_bytes_max)
            if body and not _is_json(content_type):
                raise InvalidError("send the body as application/json", resource="content-type")
            try:
                fields = _validated(body_class, body or b"{}")
            except ValidationError as error:
                if not self._has_schema:
                    # In a thread: to make the schema takes 20 ms, in which the loop would serve nobody.
                    await asyncio.to_thread(schema_of, body_class)
                    self._has_schema = True
                raise refusal_of(body_class, error) from error
        elif _has_body(request):
            await self._require_nothing(request)
        cache = ""
        if self._in_path or request.scope["query_string"]:
            named, cache = self._named(request)
            fields = {**fields, **named}
        if cache:
            caller = caller._replace(cache=cache)
        return _message(self._request_class, fields), caller

    async def _require_nothing(self, request: Request) -> None:
        """Refuse a body that is not empty if the route takes none: it would be ignored."""
        body = await _body(request, self._message_bytes_max)
        if body.strip() not in _NOTHING:
            query = self._route.query
            advice = f"the query says {' and '.join(query)}" if query else "leave it out"
            message = f"{request.method} {self._route.path} accepts no body; {advice}"
            raise InvalidError(message, resource="body")

    def _named(self, request: Request) -> tuple[dict[str, object], str]:
        """Return the fields in path and query, and the cache that the query names."""
        fields: dict[str, object] = {
            name: texts.text(name, value) if name in _TEXTS else _integer(name, value)
            for name, value in request.path_params.items()
        }
        asked = texts.query(request)
        cache_too = ("cache",) if self._route.takes_cache else ()
        checks.parameters([name for name, _ in asked], (*self._route.query, *cache_too))
        cache = ""
        for name, value in asked:
            if name in self._route.query:
                fields[name] = value if name in _TEXTS else _number(name, value)
            else:
                cache = value
        return fields, cache

    async def _wait(
        self, request: Request, future: asyncio.Future[Message]
    ) -> Message | KVLeaseError:
        """Wait for the daemon's answer; if the caller goes away meanwhile, have the daemon cancel the call."""
        gone = asyncio.ensure_future(until_gone(request))
        try:
            either: set[asyncio.Future[Any]] = {gone, future}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not future.done():
                self._daemon.cancel(future)
        if not future.done():
            future.cancel()
        return faults.outcome(self._route.verb, future)

    def _write(self, result: Message | KVLeaseError) -> Response:
        if isinstance(result, KVLeaseError):
            return refusal(result)
        body = to_json(result)
        created = isinstance(result, pb.RegisterCacheResponse) and result.created
        return Answer(
            _CREATED if created else _OK, [_JSON, (b"content-length", b"%d" % len(body))], body
        )


async def until_gone(request: Request) -> None:
    """Return when the caller has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def admitted(daemon: Backend, roles: Roles, request: Request) -> Caller:
    """Return the caller of a request that is for no verb.

    Raises:
        InvalidError: the host is not one of loopback's own names, as in requests of a foreign web page.
        UnknownWorkerError: the Authorization header has no bearer token, or one that nobody has.
        NotYoursError: the caller's role may not do this.
    """
    caller, _ = _caller(request)
    return daemon.admit(roles, caller, request.url.path)


def _caller(request: Request) -> tuple[Caller, bytes]:
    """Return the caller as connection and headers describe it, and the content type."""
    extensions = request.scope.get("extensions", {})
    peer: Peer = extensions.get("peercred", _NOBODY)
    fields: dict[str, Any] = {"transport": "rest", "peer_pid": peer.pid, "peer_uid": peer.uid}
    fields["role"] = extensions.get("role", Role.STRANGER)
    fields["address"] = extensions.get("address", "")
    content_type, hosts = b"", []
    for name, value in request.scope["headers"]:
        if name == b"content-type":
            content_type = value
        elif name == b"host":
            hosts.append(value)
        elif name == b"authorization":
            if "token" in fields:
                raise InvalidError(
                    "there are two Authorization headers; send one", resource="token"
                )
            fields["token"] = _token(value)
        elif name == b"idempotency-key":
            fields["idempotency_key"] = _key(value, is_first="idempotency_key" not in fields)
        elif name == b"traceparent":
            fields["traceparent"] = value.decode("latin-1")
        elif name == b"kvlease-epoch":
            fields["epoch"] = _epoch(value, is_first="epoch" not in fields)
    if extensions.get("checks_host", True):
        _check_hosts(hosts)
    return Caller(**fields), content_type


def _check_hosts(hosts: list[bytes]) -> None:
    """Refuse a request that names another host than loopback's; one of HTTP/1.0 may name none."""
    if not hosts or hosts[0].rpartition(b":")[0] in _USUAL_NAMES or hosts[0] in _USUAL_NAMES:
        return
    if not names_loopback(hosts[0].decode("latin-1")):
        message = "address the daemon as localhost, or by an address of loopback such as 127.0.0.1"
        raise InvalidError(message, resource="host")


def _token(header: bytes) -> str:
    scheme, _, token = header.decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise UnknownWorkerError("the Authorization header must be Bearer, a space and the token")
    return token.strip()


def _key(header: bytes, *, is_first: bool) -> str:
    if not is_first:
        raise checks.repeated("Idempotency-Key", resource="Idempotency-Key")
    return header.decode("latin-1")


def _epoch(header: bytes, *, is_first: bool) -> int:
    if not is_first:
        raise checks.repeated("KVLease-Epoch", resource="epoch")
    return _integer("KVLease-Epoch", header.decode("latin-1"), 0)


def _integer(name: str, written: str, least: int = _INTEGER_MIN, most: int = _INTEGER_MAX) -> int:
    """Read an integer that the protocol can carry; its range is for the message alone: the daemon checks it itself."""
    if _INTEGER.fullmatch(written) and _INTEGER_MIN <= int(written) <= _INTEGER_MAX:
        return int(written)
    shown = _shown(written)
    message = f"{name} must be an integer from {least} to {most}, not {shown}"
    raise InvalidError(message, resource=name, limit=most)


def _number(name: str, written: str) -> int:
    if name in NUMBERS:
        return _integer(name, written, 0, NUMBERS[name])
    if written not in _TRUTHS:
        message = f"{name} must be true or false, or 1 or 0, not {_shown(written)}"
        raise InvalidError(message, resource=name, limit=1)
    return _TRUTHS[written]


def _shown(written: str) -> str:
    return f"{written[:_SHOWN_MAX]!r}{'…' if len(written) > _SHOWN_MAX else ''}"


def _encoding(request: Request) -> bytes:
    """Return the Content-Encoding of the body, joined if there are several headers."""
    headers = request.scope["headers"]
    return b", ".join(value for name, value in headers if name == b"content-encoding")


def _is_json(content_type: bytes) -> bool:
    # A web page of another origin could send any other type without a preflight request.
    return content_type.partition(b";")[0].strip().lower() == b"application/json"


def _validated(body_class: Any, body: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = body_class.model_validate_json(body).fields()
    # Only now that the body is known to be valid, and so is not nested without end.
    json.loads(body, object_pairs_hook=_once_each)
    return fields


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object, and refuse one that has a name twice: pydantic would silently take the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        name = next(name for name, num_times in names.items() if num_times > 1)
        raise InvalidError(f"{name[:_SHOWN_MAX]} was sent twice; send it once", resource="body")
    return found


def _message(request_class: Any, fields: dict[str, Any]) -> Message:
    """Return the request; if the protocol cannot carry a number, refuse it with the name of its field."""
    try:
        request: Message = request_class(**fields)
    except (ValueError, TypeError) as error:
        for name, kind in request_class.DESCRIPTOR.fields_by_name.items():
            if kind.type == FieldDescriptor.TYPE_UINT32 and isinstance(fields.get(name), int):
                checks.count(name, fields[name], 0, UINT32_MAX)
        name = next(
            name for name, value in fields.items() if not _is_carried(request_class, name, value)
        )
        raise InvalidError(f"{name}: {error}", resource=name) from error
    return request


def _is_carried(request_class: Callable[..., Message], name: str, value: object) -> bool:
    try:
        request_class(**{name: value})
    except (ValueError, TypeError):
        return False
    return True


def _has_body(request: Request) -> bool:
    """Tell whether a head announces a body that is not empty."""
    return any(
        (name == b"content-length" and value != b"0") or name == b"transfer-encoding"
        for name, value in request.scope["headers"]
    )


async def _body(request: Request, bytes_max: int) -> bytes:
    """Read the body, up to the limit.

    Raises:
        TooLargeError: the body is longer; `need` is its length if the head tells it, else the bytes that were read.
    """
    announced = _announced_bytes(request)
    if announced > bytes_max:
        # Even if the body may never come: a caller that asks first whether to send it only gets the refusal.
        request.scope["extensions"]["pass_over_body"]()
        raise TooLargeError.of_message(announced, bytes_max)
    message = await request.receive()
    # Joined once, at the end: joining each piece to those before would copy all of them each time.
    pieces: list[bytes] = [message.get("body", b"")]
    num_bytes = len(pieces[0])
    if message.get("more_body"):
        try:
            async with asyncio.timeout(_body_seconds_max(request)):
                while message.get("more_body") and num_bytes <= bytes_max:
                    message = await request.receive()
                    pieces.append(message.get("body", b""))
                    num_bytes += len(pieces[-1])
        except TimeoutError as error:
            raise InvalidError("the body was not received in time", resource="body") from error
    if num_bytes > bytes_max:
        raise TooLargeError.of_message(num_bytes, bytes_max)
    body = b"".join(pieces)
    if num_bytes > _LARGE_BYTES:
        # Joining the body was enough work for one turn.
        await asyncio.sleep(0)
    return body


def _body_seconds_max(request: Request) -> float:
    return float(request.scope["extensions"]["body_seconds_max"])


def _announced_bytes(request: Request) -> int:
    """Return the Content-Length, which httptools has checked; 0 if the body comes in chunks."""
    return int(dict(request.scope["headers"]).get(b"content-length", 0))
