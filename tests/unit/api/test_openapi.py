"""Laws of the description: it is complete, and the daemon runs without it."""

import subprocess
import sys
from typing import Any

from kvleased import checks
from kvleased.api.rest_routes import ROUTES
from tests.unit.api.scripted import Served, http

TRANSPORTS = ("rest",)


async def test_openapi_describes_every_route(served: Served) -> None:
    """Each operation has an id, a tag, a summary, its success and its problem; every reference is there."""
    document = (await http(served, "GET", "/openapi.json")).json
    operations = [one for path in document["paths"].values() for one in path.values()]

    assert len({one["operationId"] for one in operations}) == len(ROUTES) == len(operations)
    assert all(one["tags"] and one["summary"] for one in operations)
    assert all({"200", "4XX", "5XX"} <= one["responses"].keys() for one in operations)
    assert references(document) <= {
        f"#/components/schemas/{name}" for name in document["components"]["schemas"]
    }
    assert not any(path.endswith(("z", "metrics")) for path in document["paths"])


async def test_openapi_tells_the_limits_of_a_request(served: Served) -> None:
    """A description is as narrow as what the daemon grants, where the type of a field is wider."""
    document = (await http(served, "GET", "/openapi.json")).json
    fields = document["components"]["schemas"]["ReserveBody"]["properties"]

    assert fields["request_id"]["maxLength"] == checks.REQUEST_ID_CHARACTERS_MAX
    assert fields["num_tokens"]["maximum"] == checks.TOKENS_MAX


def references(part: Any) -> set[str]:
    """Return every reference in a document."""
    if isinstance(part, dict):
        own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
        return own.union(*map(references, part.values()))
    return set().union(*map(references, part)) if isinstance(part, list) else set()


async def test_docs_are_a_page(served: Served) -> None:
    """People find the description at /docs."""
    answer = await http(served, "GET", "/docs")

    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"/openapi.json" in answer.body


def test_server_starts_without_fastapi() -> None:
    """What only the description needs is not imported before somebody asks for it."""
    script = "import sys, kvleased.api.rest, kvleased.api.local; print({'fastapi', 'grpc', 'torch'} & set(sys.modules))"

    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert output.stdout.strip() == "set()"
