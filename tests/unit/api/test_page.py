"""Laws of the page's routes: its own files only, strict queries, nothing for workers, a stream of changes."""

import asyncio
import json
import re
from base64 import b64decode
from collections.abc import AsyncIterator, Iterator
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request

from kvlease.errors import BusyError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.api.rest.server import RestServer
from kvleased.config.settings import Settings
from kvleased.core.effects import Tier
from kvleased.core.views.picture import LOOKS, Picture
from kvleased.metrics import Metrics
from kvleased.verbs.picturing import Gallery, PoolName, Shown
from kvleased.web import Page, live
from kvleased.web.deltas import change, packed
from kvleased.web.page import FILES
from tests.unit.api.scripted import HttpAnswer, ScriptedDaemon, Served, http
from tests.unit.service.conftest import Node

NAME = PoolName("main", "device")
STATIC = Path(str(resources.files("kvleased.web"))) / "static"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Give a node whose daemon is not started yet."""
    made = Node(Settings(runtime_dir=tmp_path, max_leases=8, memory_bytes_max=1 << 30))
    yield made
    made.store.close()


@pytest.fixture
async def paged(settings: Settings, node: Node) -> AsyncIterator[Served]:
    """Give a REST server that serves the page over a real daemon's caches."""
    async with node.life():
        await node.register()
        metrics = Metrics()
        gallery = Gallery(node.daemon.registry, epoch=7, codes=lambda: metrics.codes, movers=dict)
        server = RestServer(metrics, Page(gallery))
        await server.start(ScriptedDaemon(), settings)  # type: ignore[arg-type]  # as its fixtures do
        yield Served(ScriptedDaemon(), settings, None, server, None, metrics)  # type: ignore[arg-type]
        await server.stop()


async def get(served: Served, path: str, **headers: str) -> HttpAnswer:
    """Get a path."""
    return await http(served, "GET", path, headers=headers)


async def test_files_are_served_with_a_strict_policy(paged: Served) -> None:
    """Each file has its own type, and a policy that allows nothing inline and nothing from other hosts."""
    for name, kind in FILES.items():
        answer = await get(paged, f"/ui/{name}")
        assert (answer.status, answer.headers["content-type"]) == (200, kind)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
    for path in ("/ui", "/ui/"):
        assert (await get(paged, path)).body == (STATIC / "index.html").read_bytes()


async def test_unchanged_file_is_not_sent_again(paged: Served) -> None:
    """A browser that has a file already is told that it is unchanged."""
    etag = (await get(paged, "/ui/app.js")).headers["etag"]

    again = await get(paged, "/ui/app.js", **{"If-None-Match": etag})

    assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize("path", ["/ui/page.py", "/ui/../page.py", "/ui/%2e%2e%2fpage.py", "/ui/x"])
async def test_nothing_else_is_served(paged: Served, path: str) -> None:
    """The page's routes lead to no other file."""
    assert (await get(paged, path)).status == 404


def test_files_are_all_there_and_load_nothing_of_others() -> None:
    """Every file is listed; none has an inline script or style, or names another host."""
    assert {one.name for one in STATIC.iterdir()} == set(FILES)
    for name in FILES:
        text = (STATIC / name).read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=", page)


async def test_map_is_a_line_and_two_bytes_a_cell(paged: Served) -> None:
    """The packed picture is its head, then the looks, then the tenants."""
    answer = await get(paged, "/ui/data/map?cache=main&tier=device")

    head, _, planes = answer.body.partition(b"\n")
    told = json.loads(head)
    assert (told["num_cells"], told["looks"], len(planes)) == (16, list(LOOKS), 32)
    assert answer.headers["cache-control"] == "no-store"


async def test_block_is_told(paged: Served) -> None:
    """A block is described in JSON."""
    answer = await get(paged, "/ui/data/block?cache=main&tier=host&block=3")

    assert (answer.status, answer.json["look"]) == (200, "free")


@pytest.mark.parametrize(
    ("query", "status"),
    [
        pytest.param("map?cache=nowhere", 404, id="no-such-cache"),
        pytest.param("map?cache=main&tier=disk", 422, id="no-such-tier"),
        pytest.param("map?cache=main&what=1", 422, id="no-such-parameter"),
        pytest.param("map?cache=main&cache=main", 422, id="parameter-twice"),
        pytest.param("map?cache=%ff", 422, id="no-utf-8"),
        pytest.param("block?cache=main&block=16", 422, id="no-such-block"),
        pytest.param("block?cache=main&block=-1", 422, id="no-number"),
        pytest.param("live?cache=nowhere", 404, id="stream-of-no-cache"),
    ],
)
async def test_queries_are_strict(paged: Served, query: str, status: int) -> None:
    """A senseless query is answered with a problem document."""
    answer = await get(paged, f"/ui/data/{query}")

    assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json")


@pytest.mark.parametrize("path", ["map?cache=main", "block?cache=main&block=1", "live"])
async def test_workers_see_nothing(paged: Served, path: str) -> None:
    """A worker's token is refused, because the page shows all tenants."""
    answer = await get(paged, f"/ui/data/{path}", Authorization="Bearer whose")

    assert (answer.status, answer.json["code"]) == (403, "NOT_YOURS")


async def test_other_hosts_are_refused(paged: Served) -> None:
    """A web page whose own name resolves to loopback reads nothing."""
    answer = await http(
        paged, "GET", "/ui/data/map?cache=main", headers={"Host": "evil.example"}, over_tcp=True
    )

    assert answer.status == 422


async def test_stream_sends_figures_then_pictures_then_changes(
    paged: Served, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream first sends everything, then changes; when the onlooker leaves, the daemon keeps nothing of it."""
    monkeypatch.setattr(live, "PERIOD_SECONDS", 0.05)
    monkeypatch.setattr("kvleased.verbs.picturing.FRESH_SECONDS", 0.0)
    reader, writer = await asyncio.open_unix_connection(paged.settings.http_socket)
    writer.write(b"GET /ui/data/live?cache=main HTTP/1.1\r\nHost: localhost\r\n\r\n")
    first = [await _event(reader) for _ in range(3)]
    worker = await node.attach(tenant="default")
    await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=8), worker)
    changed: dict[str, Any] = {}
    while not changed:
        kind, event = await _event(reader)
        changed = event if kind == "map" and "at" in event else {}

    writer.close()

    assert [kind for kind, _ in first] == ["figures", "map", "map"]
    assert len(b64decode(first[1][1]["looks"])) == 16
    assert {LOOKS[look] for look in b64decode(changed["looks"])} == {"reserved"}


async def test_stream_is_not_interrupted_by_a_refusal(paged: Served) -> None:
    """Where the body of a stream's own request is no HTTP, the stream ends; no other answer comes in its midst."""
    reader, writer = await asyncio.open_unix_connection(paged.settings.http_socket)
    head = b"GET /ui/data/live HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head)
    await _event(reader)

    writer.write(b"no length\r\n")
    async with asyncio.timeout(10):
        rest = await reader.read()
    writer.close()

    assert b"HTTP/1.1" not in rest


async def test_too_many_onlookers_are_refused(
    paged: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of streams is limited."""
    monkeypatch.setattr(live, "VIEWERS_MAX", 0)

    answer = await get(paged, "/ui/data/live")

    assert (answer.status, answer.json["code"]) == (BusyError.http_status, "BUSY")


async def test_onlooker_counts_before_its_first_bytes_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While one stream's head waits for a slow connection, no other takes its place."""
    monkeypatch.setattr(live, "VIEWERS_MAX", 1)
    never = asyncio.Event()
    gallery: Any = SimpleNamespace(pools=lambda _: ())
    viewers = live.Viewers(gallery)

    async def receive() -> dict[str, Any]:
        await never.wait()
        return {}

    async def send(_: Any) -> None:
        await never.wait()

    app = SimpleNamespace(state=SimpleNamespace(streams=set()))
    request = Request({"type": "http", "app": app}, receive)
    first = viewers.begin(request, "", [], lambda: None)
    writing = asyncio.ensure_future(first({}, receive, send))
    await asyncio.sleep(0)

    with pytest.raises(BusyError):
        viewers.begin(request, "", [], lambda: None)
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    assert (viewers.num_viewers, app.state.streams) == (0, set())


async def _event(reader: asyncio.StreamReader) -> tuple[str, dict[str, Any]]:
    async with asyncio.timeout(20):
        while not (line := await reader.readline()).startswith(b"event: "):
            assert line, "the stream ended"
        data = await reader.readline()
    return line[7:].strip().decode(), json.loads(data.removeprefix(b"data: "))


# How pictures travel --------------------------------------------------------------------------------------------------


def shown(looks: list[int], tenants: list[int] | None = None) -> Shown:
    """Return a picture with some looks."""
    made = Picture(
        first_block=0,
        num_blocks=len(looks),
        blocks_per_cell=1,
        looks=np.array(looks, np.uint8),
        tenants=np.array(tenants or [0] * len(looks), np.uint8),
    )
    return Shown(picture=made, tenants=("default",))


def test_only_what_differs_is_sent() -> None:
    """The cells whose look or tenant changed are sent with their places, and nothing is sent without a change."""
    before, after = shown([0] * 16), shown([0, 1, *[0] * 14], [*[0] * 15, 1])

    sent = change(NAME, after, before)

    assert sent is not None
    assert np.frombuffer(b64decode(str(sent["at"])), "<u4").tolist() == [1, 15]
    assert list(b64decode(str(sent["looks"]))) == [1, 0]
    assert change(NAME, shown([0] * 16), before) is None
    assert change(NAME, before, before) is None


def test_whole_picture_is_sent_where_it_is_new_or_much_has_changed() -> None:
    """A client without a picture, or with one of another size, gets all of it; so does one that lacks most of it."""
    now = shown([1] * 16)

    for before in (None, shown([1] * 8), shown([0] * 16)):
        sent = change(NAME, now, before)
        assert sent is not None
        assert "at" not in sent
        assert list(b64decode(str(sent["looks"]))) == [1] * 16


def test_packed_picture_is_bytes() -> None:
    """The planes of a picture follow its head unchanged."""
    assert packed(NAME, shown([1, 2], [3, 4])).endswith(b"\n\1\2\3\4")
    assert Tier(NAME.tier) is Tier.DEVICE
