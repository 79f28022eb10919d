"""Whatever is asked of REST, by whomever, the answer is one that the document describes, and never a fault of ours."""

import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvlease import Client, PlanInputs
from kvlease.spec import FullAttention
from tests.acceptance.serving import Serving
from tests.deploy.tools import ROOT

pytestmark = pytest.mark.deploy

SCHEMATHESIS = ROOT / "build" / "venv-schemathesis" / "bin" / "schemathesis"
EXAMPLES = {"worker": 15, "operator": 15}
"""Of each operation; those who may little are asked little."""
STREAMS = r"^/v1/(events|caches/[^/]+/trace)$"
"""These have no end; tests/unit/api/test_rest.py reads them."""
NOT_CHECKED = "negative_data_rejection,positive_data_acceptance"
"""Headers that nobody knows are allowed, and what fits the schema may contradict itself."""


class Api(NamedTuple):
    """REST on TCP, and tokens for it."""

    url: str
    tokens: dict[str, str]
    log: Path


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A daemon with a cache and a worker."""
    directory = tmp_path_factory.mktemp("api")
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


@pytest.mark.parametrize("role", ["stranger", "reader", "joiner", "worker", "operator"])
def test_every_answer_is_described(api: Api, role: str) -> None:
    """No status, type or body but those of the document, and no 5xx, for any role."""
    assert SCHEMATHESIS.exists(), "run make test-deploy, which installs what this needs"
    # A worker that detaches would be a stranger from then on, and what is drained says 503 to whoever comes.
    ends = {"worker": r"|^/v1/workers/self$", "operator": r"|/drain$"}
    left_out = STREAMS.removesuffix("$") + "$" + ends.get(role, "")
    command = [
        str(SCHEMATHESIS),
        "run",
        f"{api.url}/openapi.json",
        "--no-color",
        "--generation-database",
        "none",
    ]
    command += [
        "--max-examples",
        str(EXAMPLES.get(role, 3)),
        "--seed",
        "1",
        "--exclude-checks",
        NOT_CHECKED,
    ]
    command += ["--exclude-path-regex", left_out, "--phases", "examples,coverage,fuzzing"]
    command += ["--request-timeout", "20", "--suppress-health-check", "all"]
    if token := api.tokens[role]:
        command += ["--header", f"Authorization: Bearer {token}"]

    run = subprocess.run(
        command, check=False, cwd=api.log.parent, capture_output=True, text=True, timeout=600
    )

    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "call_failed" not in api.log.read_text()


def test_document_needs_no_token(api: Api) -> None:
    """Whoever comes can read how to ask."""
    with urllib.request.urlopen(f"{api.url}/openapi.json", timeout=20) as answer:  # noqa: S310 -- loopback
        assert answer.status == 200
