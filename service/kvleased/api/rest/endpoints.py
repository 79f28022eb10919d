"""Own what happens between a REST request and the daemon: read strictly, call, write straight from the response."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final
from urllib.parse import parse_qsl

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvlease.errors import InvalidError, KVLeaseError, TooLargeError, UnknownWorkerError
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire_fields import UINT32_MAX
from kvleased import checks
from kvleased.access.callers import Caller
from kvleased.access.roles import Role, Roles
from kvleased.api import faults
from kvleased.api.rest.bodies import refusal_of, require_plain, schema_of
from kvleased.api.rest.conversion import to_json
from kvleased.api.rest.routes import Route
from kvleased.api.seam import Backend, Observer
from kvleased.api.sockets import Peer

LOCAL_NAMES: Final = frozenset({b"localhost", b"127.0.0.1", b"[::1]"})
"""Hosts under which loopback is addressed; any other is a web page that had its own name resolved to loopback."""

_OK: Final = 200
_CREATED: Final = 201
_JSON: Final = (b"content-type", b"application/json")
_INTEGER: Final = re.compile(r"-?[0-9]{1,19}", re.ASCII)
_INTEGER_MAX: Final = 2**63 - 1
_INTEGER_MIN: Final = -(2**63)
"""What the protocol has for an id; as the text of a path it is exact, where JSON would lose digits."""
_LARGE_BYTES: Final = 1 << 17
"""Bytes of a body from which on it is read in one turn and understood in another."""
_SHOWN_MAX: Final = 40
"""Characters of what is no integer that are repeated."""
_NOTHING: Final = frozenset({b"", b"{}"})
"""Bodies that say nothing, which some clients send with everything."""
_NOBODY: Final = Peer()
_TEXTS: Final = frozenset({"cache", "tenant"})
"""Parameters that are no numbers."""
_FLAGS: Final = frozenset({"with_snapshot", "force", "purge"})
_TRUTHS: Final = {"true": True, "1": True, "false": False, "0": False}
"""How a flag is written."""


class Answer(Response):
    """A response that is already bytes."""

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        """Keep the parts; nothing is derived from them."""
        self.status_code = status
        self.raw_headers = headers
        self.body = body
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send it."""
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        await send({"type": "http.response.body", "body": self.body})


def refusal(error: KVLeaseError, status: int | None = None) -> Answer:
    """Return the problem document of an error; `status` overrules the table."""
    body = faults.problem(error, status)
    headers = faults.problem_headers(error, body)
    return Answer(status or error.http_status, headers, body)


class Endpoint:
    """One route of a verb."""

    def __init__(
        self, route: Route, daemon: Backend, metrics: Observer, *, message_bytes_max: int
    ) -> None:
        """Remember whom to call and how large a body may be."""
        self._route = route
        self._request_class = route.request_class
        self._in_path = route.in_path
        self._roles = route.roles
        self._settled = route.settled
        self._daemon = daemon
        self._metrics = metrics
        self._message_bytes_max = message_bytes_max
        self._has_schema = False
        """Whether that is made by which a wrong body is explained."""

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
        # Before the body: a stranger does not make us read one.
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
                    # To make it takes 20 ms, in which the loop would hear nobody.
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
        """Refuse a body that says something where none is read: it would be passed over."""
        body = await _body(request, self._message_bytes_max)
        if body.strip() not in _NOTHING:
            query = self._route.query
            advice = f"the query says {' and '.join(query)}" if query else "leave it out"
            message = f"{request.method} of {self._route.path} takes no body; {advice}"
            raise InvalidError(message, resource="body")

    def _named(self, request: Request) -> tuple[dict[str, object], str]:
        """Return the fields that path and query name, and the cache that an operator means."""
        fields: dict[str, object] = {
            name: value if name in _TEXTS else _integer(name, value)
            for name, value in request.path_params.items()
        }
        query = request.scope["query_string"].decode("latin-1")
        asked = parse_qsl(query, keep_blank_values=True)
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
        """Wait for the daemon; when the caller goes away meanwhile, have it forget the call."""
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
    """Return who asks for something that is no verb.

    Raises:
        InvalidError: a name that leads to loopback was used, as a web page of somebody else's would.
        UnknownWorkerError: the Authorization header is not a bearer token, or that of nobody.
        NotYoursError: the caller's role may not.
    """
    caller, _ = _caller(request)
    return daemon.admit(roles, caller, request.url.path)


def _caller(request: Request) -> tuple[Caller, bytes]:
    """Return the caller as he says he is, and the content type."""
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
            fields["idempotency_key"] = value.decode("latin-1")
        elif name == b"traceparent":
            fields["traceparent"] = value.decode("latin-1")
        elif name == b"kvlease-epoch":
            fields["epoch"] = _epoch(value.decode("latin-1"))
    if extensions.get("checks_host", True):
        _check_hosts(hosts, request.scope["http_version"])
    return Caller(**fields), content_type


def _check_hosts(hosts: list[bytes], http_version: str) -> None:
    """Refuse what was not addressed to loopback, once, as HTTP since 1.1 has it."""
    if len(hosts) != 1 and (hosts or http_version != "1.0"):
        raise InvalidError("send one Host header: localhost or 127.0.0.1", resource="host")
    if hosts and hosts[0].rpartition(b":")[0] not in LOCAL_NAMES and hosts[0] not in LOCAL_NAMES:
        raise InvalidError("address the daemon as localhost or 127.0.0.1", resource="host")


def _token(header: bytes) -> str:
    scheme, _, token = header.decode("latin-1").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise UnknownWorkerError("the Authorization header must read: Bearer, a space, the token")
    return token.strip()


def _epoch(written: str) -> int:
    epoch = _integer("KVLease-Epoch", written)
    if epoch < 0:
        message = f"KVLease-Epoch is {epoch}; it must be 0 or the epoch of an answer"
        raise InvalidError(message, resource="KVLease-Epoch")
    return epoch


def _integer(name: str, written: str, least: int = _INTEGER_MIN) -> int:
    """Read what the protocol carries; `least` is only told, for what is below it the daemon refuses itself."""
    if _INTEGER.fullmatch(written) and _INTEGER_MIN <= int(written) <= _INTEGER_MAX:
        return int(written)
    shown = _shown(written)
    message = f"{name} must be an integer from {least} to {_INTEGER_MAX}, not {shown}"
    raise InvalidError(message, resource=name, limit=_INTEGER_MAX)


def _number(name: str, written: str) -> int:
    if name not in _FLAGS:
        return _integer(name, written, 0)
    if written not in _TRUTHS:
        message = f"{name} must be true or false, or 1 or 0, not {_shown(written)}"
        raise InvalidError(message, resource=name, limit=1)
    return _TRUTHS[written]


def _shown(written: str) -> str:
    return f"{written[:_SHOWN_MAX]!r}{'…' if len(written) > _SHOWN_MAX else ''}"


def _encoding(request: Request) -> bytes:
    """Return what was done to the body, in whatever number of headers."""
    headers = request.scope["headers"]
    return b", ".join(value for name, value in headers if name == b"content-encoding")


def _is_json(content_type: bytes) -> bool:
    # A page of another origin can send any other type without being asked for permission first.
    return content_type.partition(b";")[0].strip().lower() == b"application/json"


def _validated(body_class: Any, body: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = body_class.model_validate_json(body).fields()
    # Only now: what makes sense is not nested without end.
    json.loads(body, object_pairs_hook=_once_each)
    return fields


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object; one that says something twice says two things, of which pydantic would take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        name = next(name for name, num_times in names.items() if num_times > 1)
        raise InvalidError(f"{name[:_SHOWN_MAX]} is there twice; send it once", resource="body")
    return found


def _message(request_class: Any, fields: dict[str, Any]) -> Message:
    """Return the request; a number that the protocol cannot carry is refused by the name of its field."""
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
    """Tell whether a head announces a body, of whatever length but none."""
    return any(
        (name == b"content-length" and value != b"0") or name == b"transfer-encoding"
        for name, value in request.scope["headers"]
    )


async def _body(request: Request, bytes_max: int) -> bytes:
    """Read the body, no more of it than is allowed.

    Raises:
        TooLargeError: it is longer; `need` is its length where the head tells it, else what was read of it.
    """
    announced = _announced_bytes(request)
    if announced > bytes_max:
        # Also where the rest of it may never come: who asks whether to send it is told by the refusal alone.
        request.scope["extensions"]["pass_over_body"]()
        raise TooLargeError.of_message(announced, bytes_max)
    message = await request.receive()
    # Joined once, at the end: to add each piece to those before would copy all of them each time.
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
            raise InvalidError("the body did not arrive in time", resource="body") from error
    if num_bytes > bytes_max:
        raise TooLargeError.of_message(num_bytes, bytes_max)
    body = b"".join(pieces)
    if num_bytes > _LARGE_BYTES:
        # To put it together was enough for one turn.
        await asyncio.sleep(0)
    return body


def _body_seconds_max(request: Request) -> float:
    return float(request.scope["extensions"]["body_seconds_max"])


def _announced_bytes(request: Request) -> int:
    """Return the Content-Length, which httptools has checked; 0 where the body comes in chunks."""
    return int(dict(request.scope["headers"]).get(b"content-length", 0))
