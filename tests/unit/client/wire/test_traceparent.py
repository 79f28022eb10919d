"""Laws of tracing: a caller's span travels with its calls over every transport, and only where tracing is on."""

import sys

import pytest

from kvlease import Client, InvalidError
from kvlease._calling import calls, flows
from kvlease._calling.link import Link
from kvlease.transports._frames import encode
from kvlease.transports._rest import request_of
from kvlease.transports.base import Outgoing
from kvlease.transports.grpc import _metadata
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire.framing import BYTES_OF_LENGTH

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def outgoing(traceparent: str = "") -> Outgoing:
    """Return a call."""
    return Outgoing("stats", pb.StatsRequest(), 1.0, "token", 7, "key", "main", traceparent)


def test_local_frame_carries_the_span() -> None:
    """The span has a field of its own in the frame, and the caller's other fields stay as they are."""
    call = pb.Call.FromString(encode(outgoing(PARENT), 3)[BYTES_OF_LENGTH:])

    assert call.traceparent == PARENT
    assert (call.call_number, call.token, call.epoch, call.cache) == (3, "token", 7, "main")
    assert len(encode(outgoing(), 3)) < len(encode(outgoing(PARENT), 3)) - len(PARENT)


def test_rest_and_grpc_carry_it_in_their_heads() -> None:
    """REST and gRPC name the span as the standard does, and send nothing where there is none."""
    assert request_of(outgoing(PARENT)).headers["traceparent"] == PARENT
    assert dict(_metadata(outgoing(PARENT), ""))["traceparent"] == PARENT
    assert "traceparent" not in request_of(outgoing()).headers
    assert "traceparent" not in dict(_metadata(outgoing(), ""))


def test_call_asks_for_the_span_only_where_that_is_wanted() -> None:
    """Each call asks for the current span anew, because each may be made in another span."""
    spans = iter(("first", "second"))
    traced = Link(deadline_seconds=1.0, traceparent=lambda: next(spans))

    told = [flows.first_try(traced, calls.stats("")).traceparent for _ in range(2)]

    assert told == ["first", "second"]
    assert not flows.first_try(Link(deadline_seconds=1.0), calls.stats("")).traceparent


def test_client_without_opentelemetry_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry is an extra; a client that traces without it is told what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.trace.propagation.tracecontext", None)

    Client("unix:///nowhere/kvlease.sock").close()
    with pytest.raises(InvalidError, match=r"kvlease\[otel\]"):
        Client("unix:///nowhere/kvlease.sock", with_traces=True)


def test_client_outside_of_any_span_says_nothing() -> None:
    """Outside of any span there is none to name."""
    pytest.importorskip("opentelemetry")
    client = Client("unix:///nowhere/kvlease.sock", with_traces=True)

    assert not flows.first_try(client._link, calls.stats("")).traceparent
    client.close()
