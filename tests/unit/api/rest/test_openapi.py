"""Laws of the OpenAPI document: it is complete, and the daemon runs without it."""

import base64
import hashlib
import re
import subprocess
import sys
import tempfile
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.routing import Route as StarletteRoute

from kvlease.wire.bodies import Problem
from kvleased.access.roles import Role
from kvleased.api.rest.app import documents, responses
from kvleased.api.rest.examples import REQUESTS
from kvleased.api.rest.refusals import OF_VERB, kinds
from kvleased.api.rest.routes import ROUTES, Route
from kvleased.calls import checks
from tests.unit.api.guarded import guarded
from tests.unit.api.scripted import Served, http

TRANSPORTS = ("rest",)


async def test_openapi_describes_every_route(served: Served) -> None:
    """Each operation has an id, a tag, a summary, its success and its problem, and every reference resolves."""
    document = (await http(served, "GET", "/openapi.json")).json
    operations = [one for path in document["paths"].values() for one in path.values()]

    assert len({one["operationId"] for one in operations}) == len(ROUTES) == len(operations)
    assert all(one["tags"] and one["summary"] for one in operations)
    assert all({"200", "401", "403", "422", "500"} <= one["responses"].keys() for one in operations)
    assert references(document) <= {
        f"#/components/{kind}/{name}"
        for kind in ("schemas", "responses", "examples")
        for name in document["components"][kind]
    }
    assert not any(path.endswith(("z", "metrics")) for path in document["paths"])


async def test_openapi_is_written_once(served: Served) -> None:
    """Anybody may ask for the document at any time, so it is made once and afterwards only sent."""
    route = documents()["/openapi.json"]
    assert isinstance(route, StarletteRoute)
    request = Request({"type": "http", "method": "GET", "path": route.path, "headers": []})

    first, second = await route.endpoint(request), await route.endpoint(request)

    assert first.body is second.body
    assert (await http(served, "GET", route.path)).body == first.body


async def test_openapi_requires_what_is_refused_if_left_out(served: Served) -> None:
    """No field has a default that the daemon would refuse: such a field is required."""
    schemas = (await http(served, "GET", "/openapi.json")).json["components"]["schemas"]

    assert set(schemas["ReserveBody"]["required"]) == {"request_id", "num_tokens"}
    fields = [one for schema in schemas.values() for one in schema.get("properties", {}).values()]
    for field in fields:
        default = field.get("default")
        assert not isinstance(default, int) or default >= field.get("minimum", default)
        assert not isinstance(default, str) or len(default) >= field.get("minLength", 0)


async def test_openapi_tells_the_limits_of_a_request(served: Served) -> None:
    """The document has the bounds of the daemon, even where a field's type has wider ones."""
    document = (await http(served, "GET", "/openapi.json")).json
    fields = document["components"]["schemas"]["ReserveBody"]["properties"]

    assert fields["request_id"]["maxLength"] == checks.REQUEST_ID_CHARACTERS_MAX
    assert fields["num_tokens"]["maximum"] == checks.TOKENS_MAX


@pytest.mark.parametrize(
    ("body", "is_limited"),
    [
        pytest.param("ReserveBody", False, id="reserve"),
        pytest.param("ExtendBody", False, id="extend"),
        pytest.param("ForkBody", True, id="fork"),
        pytest.param("MoveLeaseBody", True, id="evict or reload of a lease"),
        pytest.param("EvictBody", True, id="evict"),
        pytest.param("ReloadBody", True, id="reload"),
    ],
)
async def test_openapi_tells_what_a_wait_of_0_is(
    served: Served, body: str, *, is_limited: bool
) -> None:
    """For a wait_ms of 0 a call that copies takes the daemon's own limit; one that asks for blocks does not wait."""
    document = (await http(served, "GET", "/openapi.json")).json
    told = document["components"]["schemas"][body]["properties"]["wait_ms"]["description"]

    assert ("0 takes the daemon's own limit" in told) is is_limited
    assert ("0 does not wait" in told) is not is_limited


async def test_openapi_tells_which_calls_are_about_one_cache(served: Served) -> None:
    """Only of stats and watch does a cache that is left out mean all; the others are about the one that is meant."""
    document = (await http(served, "GET", "/openapi.json")).json
    told = {
        operation["operationId"]: parameter["description"]
        for path in document["paths"].values()
        for operation in path.values()
        for parameter in operation["parameters"]
        if (parameter["in"], parameter["name"]) == ("query", "cache")
    }

    assert {name for name, says in told.items() if "empty means all" in says} == {"stats", "watch"}
    assert "not needed if there is only one" in told["explain"]


@pytest.mark.parametrize(
    ("name", "most"),
    [
        pytest.param("limit", 256, id="limit"),
        pytest.param("after_id", 2**63 - 1, id="after_id"),
        pytest.param("after_sequence", 2**53 - 1, id="after_sequence"),
        pytest.param("kvlease-epoch", 2**63 - 1, id="epoch"),
    ],
)
async def test_range_of_a_parameter_is_told(served: Served, name: str, most: int) -> None:
    """Numbers in the query and in headers have the range that the daemon accepts."""
    document = (await http(served, "GET", "/openapi.json")).json
    found = [
        (parameter["schema"].get("minimum"), parameter["schema"].get("maximum"))
        for path in document["paths"].values()
        for operation in path.values()
        for parameter in operation["parameters"]
        if parameter["name"] == name
    ]

    assert set(found) == {(0, most)}


async def test_refusals_are_told_one_by_one(served: Served) -> None:
    """Each status of a route's refusals is listed with its codes and an example of each."""
    document = (await http(served, "GET", "/openapi.json")).json
    shared, examples = document["components"]["responses"], document["components"]["examples"]
    answers = {
        one["operationId"]: one["responses"]
        for path in document["paths"].values()
        for one in path.values()
    }

    assert set(OF_VERB) == {route.verb for route in ROUTES}
    for route in ROUTES:
        told = answers[route.operation_id]
        assert not any(status.endswith("XX") for status in told)
        for kind in kinds(route):
            answer = shared[told[str(kind.http_status)]["$ref"].rpartition("/")[2]]
            problem = answer["content"]["application/problem+json"]
            example = examples[problem["examples"][kind.code]["$ref"].rpartition("/")[2]]["value"]
            assert Problem.model_validate(example).code == kind.code
            assert example["status"] == kind.http_status


@pytest.mark.parametrize("route", [one for one in ROUTES if one.operation_id in REQUESTS], ids=str)
async def test_example_is_taken(served: Served, route: Route) -> None:
    """The example of a body is accepted when it is sent."""
    path = re.sub(r"{(\w+)}", lambda found: "1" if found[1].endswith("_id") else "main", route.path)

    answer = await http(served, route.method, path, REQUESTS[route.operation_id])

    assert answer.status == 200, answer.body


async def test_answers_of_every_role_are_described() -> None:
    """A call without a body, by any role on any route, gets a status that the document describes."""
    with tempfile.TemporaryDirectory(prefix="kvl") as directory:
        async with guarded(Path(directory) / "run") as serving:
            for role in Role:
                for route in ROUTES:
                    if route.is_stream or (route.verb, route.method) == ("delete_cache", "DELETE"):
                        continue
                    path = re.sub(
                        r"{(\w+)}",
                        lambda found: "9" if found[1].endswith("_id") else "main",
                        route.path,
                    )
                    status, _ = await serving.over_rest(
                        route.method, path, await serving.token(role)
                    )
                    assert status in responses(route), (role, route.path, status)


def references(part: Any) -> set[str]:
    """Return every reference in a document."""
    if isinstance(part, dict):
        own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
        return own.union(*map(references, part.values()))
    return set().union(*map(references, part)) if isinstance(part, list) else set()


async def test_docs_are_a_page(served: Served) -> None:
    """At /docs people find each operation with its path, and each record of the document."""
    document = (await http(served, "GET", "/openapi.json")).json
    answer = await http(served, "GET", "/docs")
    page = answer.body.decode()

    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for path, methods in document["paths"].items():
        assert all(f'id="{one["operationId"]}"' in page for one in methods.values())
        assert escape(path) in page
    assert all(f'id="record-{name}"' in page for name in document["components"]["schemas"])


async def test_docs_load_nothing(served: Served) -> None:
    """The page needs no network and runs no script: it has one style, which its policy names."""
    answer = await http(served, "GET", "/docs")
    page = Page(answer.body.decode())
    policy = answer.headers["content-security-policy"]

    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")
    assert "frame-ancestors 'none'" in policy
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "form", "base"})
    assert {name for name in page.attributes if name.startswith("on")} | (
        page.attributes & {"src", "style"}
    ) == set()
    assert {one for one in page.links if not one.startswith("#")} == {"/openapi.json"}


async def test_links_of_the_docs_lead_somewhere(served: Served) -> None:
    """Each link to a record leads to that record."""
    page = Page((await http(served, "GET", "/docs")).body.decode())

    assert {one[1:] for one in page.links if one.startswith("#")} <= page.ids


class Page(HTMLParser):
    """The links, ids and styles of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.style = ""
        self._is_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record what a tag begins."""
        self.tags.add(tag)
        self._is_style = tag == "style"
        for name, value in attrs:
            self.attributes.add(name)
            if name in ("href", "id"):
                (self.links if name == "href" else self.ids).add(value or "")

    def handle_endtag(self, tag: str) -> None:
        """Record what a tag ends."""
        self._is_style = self._is_style and tag != "style"

    def handle_data(self, data: str) -> None:
        """Keep the text of the style."""
        self.style += data if self._is_style else ""


def test_server_starts_without_fastapi() -> None:
    """Modules that only the document needs are imported when somebody asks for it."""
    modules = "kvleased.api.rest.server, kvleased.api.local.listener"
    script = f"import sys, {modules}; print({{'fastapi', 'grpc', 'torch'}} & set(sys.modules))"

    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert output.stdout.strip() == "set()"
