"""Laws of REST's bodies: one that is no JSON, has a field twice, or is encoded is refused and does nothing."""

import asyncio
import gzip
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.api.rest.test_routes import WORDS
from tests.unit.api.scripted import Served, http

TRANSPORTS = ("rest",)
OUR_MARK = "in this place"
BODIES = [pytest.param(*words[:3], id=f"{words[0]} {words[1]}") for words in WORDS if words[2]]
NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" + "0" * 400)


def replaced(body: Any, place: tuple[str | int, ...], written: str) -> bytes:
    """Return a body as JSON, with the value at one place replaced."""
    made = at = json.loads(json.dumps({"body": body}))
    path = ("body", *place)
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = OUR_MARK
    return json.dumps(made["body"]).replace(json.dumps(OUR_MARK), written).encode()


def places(
    value: Any, place: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield every value in a body with its place, the body itself first."""
    yield place, value
    parts = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for name, part in parts:
        yield from places(part, (*place, name))


@pytest.mark.parametrize(("method", "path", "body"), BODIES)
async def test_what_is_no_number_is_refused_wherever_it_is(
    served: Served, method: str, path: str, body: Any
) -> None:
    """A number that JSON does not have, or one that is too large, is refused with its field, and no verb is called."""
    asked = [place for place, value in places(body) if not isinstance(value, dict | list)]

    for place in asked:
        for written in NO_NUMBERS:
            answer = await http(served, method, path, replaced(body, place, written))
            assert (answer.status, answer.json["code"]) == (422, "INVALID"), (place, written)
            assert str(place[0]) in answer.json["resource"]

    assert asked
    assert not served.daemon.calls


@pytest.mark.parametrize(("method", "path", "body"), BODIES)
async def test_field_that_is_there_twice_is_refused_wherever_it_is(
    served: Served, method: str, path: str, body: Any
) -> None:
    """A field that appears twice is refused, even with the same value, and no verb is called."""
    objects = [(place, value) for place, value in places(body) if isinstance(value, dict) and value]

    for place, value in objects:
        name, first = next(iter(value.items()))
        twice = f"{{{json.dumps(name)}: {json.dumps(first)}, {json.dumps(value)[1:]}"
        sent = replaced(body, place, twice) if place else twice.encode()
        answer = await http(served, method, path, sent)
        assert (answer.status, answer.json["code"]) == (422, "INVALID")
        assert answer.json["detail"] == f"{name} was sent twice; send it once"

    assert objects
    assert not served.daemon.calls


@pytest.mark.parametrize(("method", "path", "body"), BODIES)
async def test_encoded_body_is_refused_with_what_to_change(
    served: Served, method: str, path: str, body: Any
) -> None:
    """A compressed body is not called malformed JSON: its caller is told to send it uncompressed."""
    packed = gzip.compress(json.dumps(body).encode())

    answer = await http(served, method, path, packed, headers={"Content-Encoding": "gzip"})

    assert (answer.status, answer.json["status"], answer.json["code"]) == (415, 415, "INVALID")
    assert answer.json["resource"] == "content-encoding"
    assert (
        answer.json["detail"]
        == "the body's Content-Encoding is 'gzip'; send the body without encoding it"
    )
    assert answer.headers["accept-encoding"] == "identity"
    assert not served.daemon.calls


@pytest.mark.parametrize("encoding", ["identity", "Identity", ""])
async def test_body_that_is_said_to_be_as_it_is_is_taken(served: Served, encoding: str) -> None:
    """A body whose encoding says that nothing was done to it is taken."""
    body = {"request_id": "r", "num_tokens": 4}

    answer = await http(served, "POST", "/v1/leases", body, headers={"Content-Encoding": encoding})

    assert answer.status == 200


async def test_caller_goes_on_after_an_encoded_body(served: Served) -> None:
    """An encoded body that was refused unread does not garble the next request on the same connection."""
    packed = gzip.compress(b'{"request_id":"r","num_tokens":4}')
    reader, writer = await asyncio.open_unix_connection(served.settings.http_socket)
    head = b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

    writer.write(head + b"Content-Encoding: br, gzip\r\nContent-Length: %d\r\n\r\n" % len(packed))
    writer.write(packed + head + b"Connection: close\r\nContent-Length: 33\r\n\r\n")
    writer.write(b'{"request_id":"r","num_tokens":4}')
    async with asyncio.timeout(20):
        told = await reader.read()
    writer.close()

    assert re.findall(rb"HTTP/1.1 (\d+)", told) == [b"415", b"200"]
