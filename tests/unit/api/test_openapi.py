"""Laws of the description: it is complete, and the daemon runs without it."""

import base64
import hashlib
import subprocess
import sys
from html import escape
from html.parser import HTMLParser
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from kvleased import checks
from kvleased.api.rest_app import documents
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


async def test_openapi_is_written_once(served: Served) -> None:
    """To ask for the description again costs no more than to send it: anybody may, as often as he likes."""
    await served.rest.complete()
    route = documents()["/openapi.json"]
    assert isinstance(route, Route)
    request = Request({"type": "http", "method": "GET", "path": route.path, "headers": []})

    first, second = await route.endpoint(request), await route.endpoint(request)

    assert first.body is second.body
    assert (await http(served, "GET", route.path)).body == first.body


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
    """People find each operation, with its path, and each record of the description at /docs."""
    document = (await http(served, "GET", "/openapi.json")).json
    answer = await http(served, "GET", "/docs")
    page = answer.body.decode()

    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for path, methods in document["paths"].items():
        assert all(f'id="{one["operationId"]}"' in page for one in methods.values())
        assert escape(path) in page
    assert all(f'id="record-{name}"' in page for name in document["components"]["schemas"])


async def test_docs_load_nothing(served: Served) -> None:
    """The page is whole without a network and runs nobody's code: it has one style, which its policy names."""
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
    """Each record that is named can be gone to."""
    page = Page((await http(served, "GET", "/docs")).body.decode())

    assert {one[1:] for one in page.links if one.startswith("#")} <= page.ids


class Page(HTMLParser):
    """What a page is made of."""

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
        """Take note of what begins."""
        self.tags.add(tag)
        self._is_style = tag == "style"
        for name, value in attrs:
            self.attributes.add(name)
            if name in ("href", "id"):
                (self.links if name == "href" else self.ids).add(value or "")

    def handle_endtag(self, tag: str) -> None:
        """Take note of what ends."""
        self._is_style = self._is_style and tag != "style"

    def handle_data(self, data: str) -> None:
        """Keep the style."""
        self.style += data if self._is_style else ""


def test_server_starts_without_fastapi() -> None:
    """What only the description needs is not imported before somebody asks for it."""
    script = "import sys, kvleased.api.rest, kvleased.api.local; print({'fastapi', 'grpc', 'torch'} & set(sys.modules))"

    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert output.stdout.strip() == "set()"
