"""Laws of turns: who sends much at once is served in parts, and nobody waits for more than one of them."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from kvleased.api.turns import Line, OneATurn, Turns


class Wordy:
    """A talker with so many things to say."""

    def __init__(self, name: str, num_turns: int, said: list[str]) -> None:
        self._name, self._left, self._said = name, num_turns, said

    def go_on(self) -> bool:
        """Say one of them."""
        self._said.append(self._name)
        self._left -= 1
        return self._left > 0


async def test_talkers_take_turns() -> None:
    """One talker goes on in each turn of the loop, in the order in which they came."""
    said: list[str] = []
    turns = Turns()

    in_line = [
        turns.take(Wordy(name, number, said)) for name, number in zip("abc", (3, 2, 1), strict=True)
    ]
    for _ in range(8):
        await asyncio.sleep(0)

    assert in_line == [True, True, True]
    assert said == ["a", "a", "b", "c", "a", "b"]
    assert repr(turns) == "<Turns 0 in line>"


async def test_talker_with_little_to_say_does_not_wait() -> None:
    """Where nobody is in line, what is said in one turn is heard at once."""
    said: list[str] = []

    is_in_line = Turns().take(Wordy("a", 1, said))

    assert (is_in_line, said) == (False, ["a"])


async def test_one_goes_on_after_each_breath() -> None:
    """Of those who pause one goes on in each turn of the loop, in the order in which they came; who left is passed."""
    line = Line()
    went_on: list[str] = []
    heard: list[int] = []

    async def pause(name: str) -> None:
        await line.breathe()
        went_on.append(name)

    tasks = [asyncio.create_task(pause(name)) for name in "abcd"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    assert repr(line) == "<Line of 4>"
    while len(went_on) < 3:
        heard.append(len(went_on))
        await asyncio.sleep(0)

    assert went_on == ["a", "c", "d"]
    assert {0, 1, 2} <= set(heard)
    assert repr(line) == "<Line of 0>"


def paced_requests(count: int) -> tuple[list[int], list[asyncio.Future[None]]]:
    """Send so many requests at once; return the numbers of those that have begun, and all of them."""
    begun: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001
        begun.append(scope["number"])

    async def nothing(*_: object) -> Any:
        return {}

    paced = OneATurn(app)
    return begun, [
        asyncio.ensure_future(paced({"number": one}, nothing, nothing)) for one in range(count)
    ]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("is_first_at_once", [True, False], ids=["at once", "later"])
async def test_others_are_heard_between_any_two_in_line(
    pair: tuple[socket.socket, socket.socket], *, is_first_at_once: bool
) -> None:
    """However many are in line, the loop hears who has something to say before the next of them is served."""
    ours, theirs = pair
    said: list[str] = []
    line = Line()

    def act(name: str) -> None:
        said.append(name)
        ours.send(b".")

    asyncio.get_running_loop().add_reader(theirs, lambda: said.append(theirs.recv(9).decode()))
    if is_first_at_once:
        assert line.take(lambda: act("a"))
    else:
        line.wait(lambda: act("a"))
        assert said == []
    assert not line.take(lambda: act("b"))
    line.wait(lambda: act("c"))
    assert repr(line) == f"<Line of {3 - is_first_at_once}>"
    for _ in range(20):
        await asyncio.sleep(0)
    asyncio.get_running_loop().remove_reader(theirs)

    assert said == ["a", ".", "b", ".", "c", "."]
    assert line.take(lambda: None), "whoever comes when nobody is in line is served at once"


async def test_requests_begin_one_in_each_turn() -> None:
    """However many requests come at once, the loop hears others between any two of them."""
    begun, tasks = paced_requests(5)
    seen = []
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        seen.append(len(begun))

    assert begun == [0, 1, 2, 3, 4]
    assert max(after - before for before, after in zip([0, *seen], seen, strict=False)) == 1


async def test_request_that_is_given_up_holds_nobody_up() -> None:
    """The turn of a request that was cancelled in line is the next one's."""
    begun, tasks = paced_requests(3)
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait(tasks)

    assert begun == [0, 2]
