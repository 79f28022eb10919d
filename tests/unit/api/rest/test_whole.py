"""Laws of how an answer leaves: head and body in one system call, and a head without a body soon after."""

import asyncio
from collections.abc import Iterable

import pytest
from starlette.types import Message

from kvleased.api.rest.whole import Whole, in_pieces
from kvleased.api.turns import Line


class Wire(asyncio.Transport):
    """A transport that records each write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: object) -> None:
        """Record a write."""
        self.written.append(bytes(data))  # type: ignore[call-overload]  # it is bytes

    def writelines(self, list_of_data: Iterable[object]) -> None:
        """Record the parts as one write."""
        self.write(b"".join(list_of_data))  # type: ignore[arg-type]  # the same

    def close(self) -> None:
        """Record the close."""
        self.is_closed = True

    def is_closing(self) -> bool:
        """Tell whether it was closed."""
        return self.is_closed


@pytest.fixture
async def wire() -> Wire:
    """A transport that records its writes."""
    return Wire()


def whole(wire: Wire) -> Whole:
    """Return the transport of one answer."""
    return Whole(wire, asyncio.get_running_loop())


async def test_head_leaves_with_its_body(wire: Wire) -> None:
    """A body that follows at once leaves with its head; a later body leaves by itself."""
    answer = whole(wire)
    answer.write(b"head")
    assert wire.written == []

    answer.write(b"body")
    answer.write(b"more")
    await asyncio.sleep(0)

    assert wire.written == [b"headbody", b"more"]
    assert answer.is_closing() is False


async def test_head_of_a_stream_leaves_at_the_end_of_the_turn(wire: Wire) -> None:
    """A caller who waits for a stream's first event has the head meanwhile."""
    answer = whole(wire)
    answer.write(b"head")
    await asyncio.sleep(0)
    answer.write(b"event")

    assert wire.written == [b"head", b"event"]


async def test_head_without_a_body_leaves_before_the_end(wire: Wire) -> None:
    """The head of an answer without a body leaves before its connection closes."""
    answer = whole(wire)
    answer.write(b"head")
    answer.close()

    assert (wire.written, wire.is_closed) == ([b"head"], True)


async def test_nothing_is_written_to_who_has_gone(wire: Wire) -> None:
    """A head whose connection is lost meanwhile is dropped."""
    answer = whole(wire)
    answer.write(b"head")
    wire.close()
    await asyncio.sleep(0)

    assert wire.written == []


async def test_large_body_leaves_in_pieces_between_which_others_are_heard() -> None:
    """A large body leaves in order, one piece a turn; the last piece is marked as the last."""
    sent: list[Message] = []
    between: list[int] = []

    async def send(message: Message) -> None:
        sent.append(message)
        asyncio.get_running_loop().call_soon(lambda: between.append(len(sent)))

    body = bytes(range(256)) * 300
    send_on = in_pieces(send, Line())

    await send_on({"type": "http.response.start", "status": 200})
    await send_on({"type": "http.response.body", "body": body})

    assert sent[0] == {"type": "http.response.start", "status": 200}
    assert b"".join(one["body"] for one in sent[1:]) == body
    assert [one.get("more_body", False) for one in sent[1:]] == [True, True, False]
    assert between[1:] == [2, 3], "a piece left before others were heard"


@pytest.mark.parametrize("body", [b"", b"short"])
async def test_short_body_leaves_as_it_is(body: bytes) -> None:
    """A short body leaves in one piece, in the turn in which it is sent."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await in_pieces(send, Line())({"type": "http.response.body", "body": body, "more_body": True})

    assert sent == [{"type": "http.response.body", "body": body, "more_body": True}]
