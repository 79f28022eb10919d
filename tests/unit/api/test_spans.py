"""Laws of the spans of requests: FastAPI's over REST, the interceptor's over gRPC, neither with a caller's text."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvlease.errors import UnknownCacheError
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.v1 import kvlease_pb2_grpc
from kvleased.api.grpc.server import GrpcServer
from kvleased.api.local.listener import LocalServer
from kvleased.api.rest.server import RestServer
from kvleased.config.settings import Settings
from kvleased.metrics import Metrics
from kvleased.spans.tracing import Tracing
from tests.unit.api.scripted import ScriptedDaemon, Served, http

pytest.importorskip("opentelemetry.sdk")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PARENT_ID = "0xb7ad6b7169203331"
SECRET = "secret-of-a-caller"
ALLOWED = {
    "http.request.method", "http.response.status_code", "http.route", "error.type", "network.protocol.version",
    "url.scheme",
}  # fmt: skip


Spans = Callable[[], dict[str, dict[str, Any]]]
"""A function that returns the written spans by name."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file in which spans are written."""
    return tmp_path / "spans"


@pytest.fixture
async def traced(settings: Settings, file: Path) -> AsyncIterator[Served]:
    """REST and gRPC over a scripted daemon, with tracing."""
    daemon, metrics = ScriptedDaemon(), Metrics()
    daemon.tracing = Tracing(endpoint="", file=file, epoch=7)
    daemon.tracing.start()
    rest, beside = RestServer(metrics), GrpcServer(metrics)
    await rest.start(daemon, settings)
    await beside.start(daemon, settings)
    yield Served(daemon, settings, LocalServer(metrics), rest, beside, metrics)
    await rest.stop()
    await beside.stop()
    daemon.tracing.stop()


@pytest.fixture
def spans(traced: Served, file: Path) -> Spans:
    """Read the spans."""

    def read() -> dict[str, dict[str, Any]]:
        assert traced.daemon.tracing is not None
        traced.daemon.tracing.provider.force_flush()
        return {one["name"]: one for one in map(json.loads, file.read_text().splitlines())}

    return read


def text(file: Path) -> str:
    """Return all text that was written."""
    return file.read_text()


async def ask(traced: Served, path: str) -> int:
    """Ask for a path with secrets wherever they are possible; return the status."""
    headers = {
        "traceparent": PARENT,
        "authorization": f"Bearer {SECRET}",
        "idempotency-key": SECRET,
    }
    return (await http(traced, "GET", path, headers=headers)).status


async def test_rest_span_is_fastapis_and_names_the_route_alone(
    traced: Served, spans: Spans, file: Path
) -> None:
    """The span is below the caller's, and has no name, query or token."""
    answered = await ask(traced, f"/v1/caches/{SECRET}")
    refused = await ask(traced, f"/v1/caches/{SECRET}/leases?{SECRET}=1")
    unknown = await ask(traced, f"/v1/{SECRET}")
    found = spans()

    assert (answered, refused, unknown) == (200, 422, 404)
    span = found["GET /v1/caches/{cache}"]
    assert span["parent_id"] == PARENT_ID
    assert span["kind"] == "SpanKind.SERVER"
    assert span["attributes"]["http.route"] == "/v1/caches/{cache}"
    assert found["GET /v1/caches/{cache}/leases"]["attributes"]["http.response.status_code"] == 422
    assert {name for one in found.values() for name in one["attributes"]} <= ALLOWED
    assert SECRET not in text(file)


@pytest.mark.parametrize(
    "header",
    [
        {"traceparent": SECRET * 40},
        {"traceparent": PARENT, "tracestate": SECRET},
        {"traceparent": PARENT, "tracestate": f"a={SECRET},a={SECRET}"},
        {"traceparent": PARENT, "tracestate": ",".join(f"a{number}=b" for number in range(99))},
        {"baggage": SECRET},
        {"baggage": f"a b={SECRET}"},
        {"baggage": SECRET * 1000},
    ],
)
async def test_what_is_wrong_with_a_header_is_not_logged(
    traced: Served, caplog: pytest.LogCaptureFixture, header: dict[str, str]
) -> None:
    """Anybody may send headers: nothing of them comes into the log, nor a line for each request."""
    await http(traced, "GET", "/v1/caches", headers=header)

    assert caplog.records == []


async def test_what_is_no_call_has_no_rest_span(traced: Served, spans: Spans) -> None:
    """Probes and pages have no span, nor have streams, whose spans would be as long as somebody watches."""
    for path in ("/livez", "/v1/caches/main/trace?unknown=1", "/v1/events?unknown=1"):
        await ask(traced, path)

    assert spans() == {}


async def test_grpc_span_tells_method_and_code(traced: Served, spans: Spans, file: Path) -> None:
    """Answered and refused calls have a span below the caller's; streams and other services have none."""
    traced.daemon.script["pin"] = UnknownCacheError(SECRET)
    metadata = (("traceparent", PARENT), ("authorization", f"Bearer {SECRET}"))
    async with grpc.aio.insecure_channel(f"unix:{traced.settings.grpc_socket}") as channel:
        stub = kvlease_pb2_grpc.KVLeaseServiceStub(channel)
        await stub.Stats(pb.StatsRequest(cache=SECRET), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Pin(pb.PinRequest(), metadata=metadata)
        watch = stub.Watch(pb.WatchRequest())
        watch.cancel()
        # A span ends after the answer.
        async with asyncio.timeout(10):
            while len(spans()) < 2:  # noqa: ASYNC110 -- nothing tells of it
                await asyncio.sleep(0)
    found = spans()

    method = "kvlease.v1.KVLeaseService/"
    assert set(found) == {f"{method}Stats", f"{method}Pin"}
    assert {one["parent_id"] for one in found.values()} == {PARENT_ID}
    codes = {name: one["attributes"]["rpc.response.status_code"] for name, one in found.items()}
    assert codes == {f"{method}Stats": "OK", f"{method}Pin": "NOT_FOUND"}
    assert SECRET not in text(file)


async def test_where_nothing_is_traced_nothing_is_between(settings: Settings) -> None:
    """Tracing is off by default: the app is served as it is, and gRPC has no interceptor."""
    server = RestServer(Metrics())
    await server.start(ScriptedDaemon(), settings)
    try:
        assert type(server._servers[0]._config.app).__name__ == "OneATurn"
        assert server._servers[0]._config.app._app._app is server.app
    finally:
        await server.stop()
