"""A worker's span continues in the daemon, and in the copies that its call causes, over every transport."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvlease import Client, PlanInputs
from tests.acceptance.serving import Serving, served, told_in
from tests.acceptance.test_operating import INPUTS, LAYER, TOKENS_PER_BLOCK

trace = pytest.importorskip("opentelemetry.sdk.trace")
pytestmark = pytest.mark.acceptance

_SERVICE = "kvlease.v1.KVLeaseService"
_REQUESTS: dict[str, dict[str, str]] = {
    "unix": {},
    "http+unix": {
        "reserve": "POST /v1/leases",
        "evict": "POST /v1/leases/{lease_id}/evict",
        "release": "DELETE /v1/leases/{lease_id}",
    },
    "grpc+unix": {
        "reserve": f"{_SERVICE}/Reserve",
        "evict": f"{_SERVICE}/Evict",
        "release": f"{_SERVICE}/Release",
    },
}
"""Names of the request spans of the REST and gRPC servers."""

TRACER = trace.TracerProvider().get_tracer("worker")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of the file to which the daemon writes its spans."""
    return tmp_path_factory.mktemp("traced") / "spans"


@pytest.fixture(scope="module")
def daemon(file: Path) -> Iterator[Serving]:
    """Run a daemon that traces, with a cache."""
    with served(file.parent / "run", "--trace-file", str(file)) as serving:
        with Client(serving.address("unix")) as client:
            client.register("main", INPUTS)
            serving.until(lambda: client.get_cache("main").status == "ready")
        yield serving


def spans_of(file: Path, span: Any) -> list[dict[str, Any]]:
    """Return the spans that the daemon wrote of one trace."""
    trace_id = f"0x{span.get_span_context().trace_id:032x}"
    return [one for one in told_in(file) if one["context"]["trace_id"] == trace_id]


def id_of(span: Any) -> str:
    """Return a span's id as the daemon writes it."""
    return f"0x{span.get_span_context().span_id:016x}"


@pytest.mark.parametrize(
    "scheme",
    [
        "unix",
        *(pytest.param(one, marks=pytest.mark.thorough) for one in ("http+unix", "grpc+unix")),
    ],
)
def test_spans_of_the_daemon_hang_below_the_workers(
    daemon: Serving, file: Path, scheme: str
) -> None:
    """Each call is a span below the caller's span, and a copy to the host pool is a span below its call."""
    with Client(daemon.address(scheme), on_doubt="raise", with_traces=True) as client:
        with client.attach("main") as worker, TRACER.start_as_current_span("step") as step:
            keys = worker.keys.chain([3] * 2 * TOKENS_PER_BLOCK, TOKENS_PER_BLOCK)
            lease = worker.reserve("secret-request", keys=keys, num_tokens=2 * TOKENS_PER_BLOCK)
            lease.evict(wait_ms=20_000)
            lease.release()
        token = worker._session.link.token

    daemon.until(lambda: len(spans_of(file, step)) >= (5 if scheme == "unix" else 8))
    spans = {one["name"]: one for one in spans_of(file, step)}
    for verb in ("reserve", "evict", "release"):
        span = spans[f"kvlease.{verb}"]
        request = spans.get(_REQUESTS[scheme].get(verb, ""))
        assert (request is None) == (scheme == "unix")
        assert span["parent_id"] == (
            id_of(step) if request is None else request["context"]["span_id"]
        )
        assert request is None or request["parent_id"] == id_of(step)
        assert span["attributes"]["kvlease.code"] == "OK"
        assert span["attributes"]["kvlease.transport"] == scheme.partition("+")[0].replace(
            "unix", "local"
        ).replace("http", "rest")
    copy = spans["kvlease.copy device_to_host"]
    assert copy["parent_id"] == spans["kvlease.evict"]["context"]["span_id"]
    assert copy["attributes"]["kvlease.outcome"] == "done"
    assert copy["attributes"]["kvlease.blocks"] == 2
    assert copy["end_time"] <= spans["kvlease.evict"]["end_time"]
    move = spans["kvlease.move device_to_host"]
    assert move["parent_id"] == copy["context"]["span_id"]
    assert copy["start_time"] <= move["start_time"] <= move["end_time"] <= copy["end_time"]
    assert move["attributes"]["kvlease.bytes"] > 0
    written = file.read_text()
    assert token not in written
    assert "secret-request" not in written


def test_refusal_is_a_span_with_its_code(daemon: Serving, file: Path) -> None:
    """A refused call is a span with the code that its caller was told."""
    client = Client(daemon.address("unix"), with_traces=True)
    with client, client.attach("main") as worker, TRACER.start_as_current_span("step") as step:
        assert not worker.reserve("large", num_tokens=10**6).is_live

    daemon.until(lambda: len(spans_of(file, step)) >= 1)
    (span,) = spans_of(file, step)
    assert span["attributes"]["kvlease.code"] == "NEVER_FITS"


def test_caller_without_a_span_begins_a_trace(daemon: Serving, file: Path) -> None:
    """A call without a span begins a trace of its own in the daemon."""
    with Client(daemon.address("unix")) as client:
        client.plan(PlanInputs(layers=(LAYER,), tokens_per_block=16, device_blocks=4))

    def roots() -> list[dict[str, Any]]:
        return [one for one in told_in(file) if one["name"] == "kvlease.plan"]

    daemon.until(lambda: bool(roots()))
    assert roots()[0]["parent_id"] is None


def test_file_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    """A start that could not write its trace file is refused at once."""
    serving = Serving(tmp_path / "run", "--trace-file", str(tmp_path / "no" / "spans"))
    try:
        assert serving.process.wait(60) != 0
        assert "cannot_trace" in Path(serving.log.name).read_text()
    finally:
        serving.stop()


def test_file_that_is_gone_keeps_no_control_process_from_following_another(tmp_path: Path) -> None:
    """A control process restarts although the trace file's directory was removed: memory is worth more than spans."""
    (tmp_path / "gone").mkdir()
    with served(tmp_path / "run", "--trace-file", str(tmp_path / "gone" / "spans")) as serving:
        (tmp_path / "gone" / "spans").unlink()
        (tmp_path / "gone").rmdir()
        serving.kill_control()
        serving.wait_until_ready()
        assert "goes on untraced" in Path(serving.log.name).read_text()
