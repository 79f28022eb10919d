"""Every answer of REST, to any request and role, is described by the document, and is never a fault of ours."""

import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvlease import Client, PlanInputs
from kvlease.spec import FullAttention
from tests.acceptance.serving import Serving
from tests.deploy.tools import ROOT

pytestmark = pytest.mark.deploy

SCHEMATHESIS = ROOT / "build" / "venv-schemathesis" / "bin" / "schemathesis"
SECONDS_A_RUN = 600
ROLES = ("stranger", "reader", "joiner", "worker", "operator")
EXAMPLES = {"worker": 15, "operator": 15}
"""Examples of each operation, by role; other roles, which may do little, get few."""
STREAMS = r"^/v1/(events|caches/[^/]+/trace)$"
"""Endless answers, of which only the beginnings are tested."""
ENDLESS = ("/v1/events?with_snapshot=1", "/v1/caches/main/trace")
"""Streams that begin at once."""
_READERS = {ENDLESS[0]: {"reader"}, ENDLESS[1]: set[str]()}
"""Roles that may have a stream, beside operators."""
MALFORMED = (
    "/v1/events?after_sequence=x",
    "/v1/events?after_sequence=-1",
    "/v1/events?after_sequence=9223372036854775808",
    "/v1/events?with_snapshot=maybe",
    "/v1/events?with_snapshot=2",
    "/v1/events?after=1",
    "/v1/events?cache=nowhere",
    "/v1/events?cache=a%20b",
    "/v1/caches/nowhere/trace",
    "/v1/caches/a%20b/trace",
    "/v1/caches/main/trace?cache=other",
)
"""Streams that do not exist, or have invalid parameters."""
NOT_CHECKED = "negative_data_rejection,positive_data_acceptance"
"""Checks left out: unknown headers are allowed, and values that fit the schema may contradict each other."""


class Api(NamedTuple):
    """REST on TCP, and tokens for it."""

    url: str
    tokens: dict[str, str]
    log: Path


class Run(NamedTuple):
    """Schemathesis at work for one role."""

    process: "subprocess.Popen[bytes]"
    said: Path
    log: Path
    """The daemon's log."""


@contextmanager
def served(directory: Path) -> Iterator[Api]:
    """Run a daemon with a cache and a worker."""
    options = [
        "--listen-tcp",
        "--http-port",
        "0",
        "--grpc-port",
        "0",
        "--memory-bytes-max",
        str(1 << 30),
    ]
    serving = Serving(
        directory / "run", *options, "--wait-ms-max", "200", "--max-message-bytes", "65536"
    )
    try:
        serving.wait_until_ready()
        layers = [FullAttention(name="l", num_kv_heads=1, head_size=16, dtype="float16")]
        with Client(serving.address("unix"), on_doubt="raise") as client:
            client.register(
                "main", PlanInputs(layers=layers, tokens_per_block=16, device_blocks=64)
            )
            serving.until(lambda: client.get_cache("main").status == "ready")
            with client.attach("main") as worker:
                url = re.search(r"http://127.0.0.1:\d+", Path(serving.log.name).read_text())
                assert url is not None
                tokens = {
                    role: (serving.runtime_dir / f"{role}.token").read_text().strip()
                    for role in ("reader", "joiner", "operator")
                }
                tokens |= {"worker": worker._session.link.token, "stranger": ""}
                yield Api(url[0], tokens, Path(serving.log.name))
    finally:
        serving.stop()


@contextmanager
def running(api: Api, role: str) -> Iterator[Run]:
    """Run schemathesis over all that the document describes, in one role."""
    assert SCHEMATHESIS.exists(), "run make test-deploy, which installs what this needs"
    # A detached worker would be a stranger from then on, and a drained daemon answers 503 to all.
    ends = {"worker": r"|^/v1/workers/self$", "operator": r"|/drain$"}
    left_out = STREAMS.removesuffix("$") + "$" + ends.get(role, "")
    command = [str(SCHEMATHESIS), "run", f"{api.url}/openapi.json", "--no-color"]
    command += ["--generation-database", "none", "--seed", "1"]
    command += ["--max-examples", str(EXAMPLES.get(role, 3)), "--exclude-checks", NOT_CHECKED]
    command += ["--exclude-path-regex", left_out, "--phases", "examples,coverage,fuzzing"]
    command += ["--request-timeout", "20", "--suppress-health-check", "all"]
    if token := api.tokens[role]:
        command += ["--header", f"Authorization: Bearer {token}"]
    said = api.log.with_name(f"said-{role}")
    with (
        said.open("wb") as file,
        subprocess.Popen(
            command, cwd=api.log.parent, stdout=file, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            yield Run(process, said, api.log)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Run a daemon with a cache and a worker, which no test ends."""
    with served(tmp_path_factory.mktemp("api")) as made:
        yield made


@pytest.fixture(scope="module")
def runs(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    """Run all roles side by side; operators, who end what others use, have a daemon of their own."""
    with ExitStack() as stack:
        apis = dict.fromkeys(ROLES, api)
        apis["operator"] = stack.enter_context(served(tmp_path_factory.mktemp("operator")))
        yield {role: stack.enter_context(running(made, role)) for role, made in apis.items()}


@pytest.mark.parametrize("role", ROLES)
def test_every_answer_is_described(runs: dict[str, Run], role: str) -> None:
    """For every role each answer has a documented status, type and body, and is no 5xx."""
    run = runs[role]

    status = run.process.wait(SECONDS_A_RUN)

    assert status == 0, run.said.read_text()[-8000:]
    assert "call_failed" not in run.log.read_text()


def test_document_needs_no_token(api: Api) -> None:
    """The document is served without a token."""
    with urllib.request.urlopen(f"{api.url}/openapi.json", timeout=20) as answer:  # noqa: S310 -- loopback
        assert answer.status == 200


class Beginning(NamedTuple):
    """The beginning of an answer."""

    status: int
    kind: str
    body: bytes
    """A whole problem, or the first event of a stream."""


def begun(api: Api, path: str, role: str) -> Beginning:
    """Ask for a stream, and hang up after its first event."""
    request = urllib.request.Request(f"{api.url}{path}")  # noqa: S310 -- loopback
    if token := api.tokens[role]:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310 -- loopback
            lines = [*iter(answer.readline, b"\n")]
            return Beginning(answer.status, answer.headers["content-type"], b"".join(lines))
    except urllib.error.HTTPError as error:
        with error:
            return Beginning(error.code, error.headers["content-type"], error.read())


def described(api: Api, path: str) -> dict[str, Any]:
    """Return a stream's documented answers by status: media types, and the fields of their schemas."""
    with urllib.request.urlopen(f"{api.url}/openapi.json", timeout=20) as answer:  # noqa: S310 -- loopback
        document = json.loads(answer.read())
    route = "/v1/events" if path.startswith("/v1/events") else "/v1/caches/{cache}/trace"
    return {
        status: {
            kind: _fields(document, content["schema"])
            for kind, content in _found(document, told)["content"].items()
        }
        for status, told in document["paths"][route]["get"]["responses"].items()
    }


def _fields(document: Any, schema: Any) -> set[str]:
    """Return the fields of a schema."""
    told = _found(document, schema)
    parts = (_fields(document, part) for part in told.get("allOf", ()))
    return set(told.get("properties", ())).union(*parts)


def _found(document: Any, told: Any) -> Any:
    """Return a part of the document, following a reference if it is one."""
    for name in told.get("$ref", "").split("/")[1:]:
        document = document[name]
    return document if "$ref" in told else told


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("path", ENDLESS)
def test_streams_begin_as_described(api: Api, path: str, role: str) -> None:
    """Each stream's status, type, and fields of its first event or refusal are documented."""
    found = begun(api, path, role)

    fields = described(api, path)[str(found.status)][found.kind]
    data = found.body
    if found.status == 200:
        named = dict(line.split(b": ", 1) for line in found.body.splitlines())
        assert named[b"event"] == (b"snapshot" if "events" in path else b"request")
        data = named[b"data"]
    assert json.loads(data).keys() <= fields
    assert (found.status == 200) is (role in {"operator", *_READERS[path]})


@pytest.mark.parametrize("path", MALFORMED)
def test_malformed_streams_are_refused_as_described(api: Api, path: str) -> None:
    """A malformed parameter gives a documented problem before any stream begins."""
    found = begun(api, path, "operator")

    told = json.loads(found.body)
    assert 400 <= found.status < 500
    assert told.keys() <= described(api, path)[str(found.status)][found.kind]
    assert told["status"] == found.status
    assert told["code"]
