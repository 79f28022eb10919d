"""Laws of turns: a sender of much at once is served in parts, and nobody waits for more than one part of another."""

import asyncio
import functools
import itertools
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import uvloop
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from kvleased.api.rest.server import _Documents
from kvleased.api.turns import REST_SECONDS, Line, OneATurn, Turns


class Wordy:
    """A talker with a number of things to say."""

    def __init__(self, name: str, num_turns: int, said: list[str]) -> None:
        self._name, self._left, self._said = name, num_turns, said

    def go_on(self) -> bool:
        """Say one of the things."""
        self._said.append(self._name)
        self._left -= 1
        return self._left > 0


async def test_talkers_take_turns() -> None:
    """One talker goes on in each turn of the loop, in the order of arrival."""
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
    """Of talkers who pause, one goes on in each turn of the loop, in order of arrival; one that left is skipped."""
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


async def test_what_nobody_waits_for_is_done_in_rests() -> None:
    """However many such acts there are, one is done after each rest; those with nothing left to do take none."""
    loop, line = asyncio.get_running_loop(), Line()
    done_at = [loop.time()]

    async def rest(*names: str) -> None:
        ended = asyncio.Event()

        def act(name: str) -> int:
            done_at.append(loop.time())
            if name == names[-1]:
                ended.set()
            return 1

        for name in names:
            line.rest(lambda: 0)
            line.rest(functools.partial(act, name))
        await ended.wait()

    await rest("a", "b", "c")
    await rest("d")

    rests = [later - earlier for earlier, later in itertools.pairwise(done_at)]
    assert len(rests) == 4
    assert min(rests) >= REST_SECONDS / 2


def paced_requests(count: int) -> tuple[list[int], list[asyncio.Future[None]]]:
    """Send a number of requests at once; return the numbers of those that have begun, and all requests."""
    begun: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001
        begun.append(scope["number"])

    async def nothing(*_: object) -> Any:
        return {}

    paced = OneATurn(app, Line())
    return begun, [
        asyncio.ensure_future(paced({"number": one}, nothing, nothing)) for one in range(count)
    ]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("is_first_soon", [True, False], ids=["soon", "later"])
def test_others_are_heard_between_any_two_in_line(
    pair: tuple[socket.socket, socket.socket], *, is_first_soon: bool
) -> None:
    """However many talkers are in line, the loop hears all others between any two of them."""
    ours, theirs = pair
    said: list[str] = []

    def act(name: str) -> int:
        said.append(name)
        ours.send(b".")
        return 1

    async def serve() -> None:
        line, loop = Line(), asyncio.get_running_loop()
        loop.add_reader(theirs, lambda: said.append(theirs.recv(9).decode()))
        if is_first_soon:
            assert line.take(lambda: act("a"))
        else:
            line.wait(lambda: act("a"))
        assert said == [], "nothing is done before all are heard that have something to say now"
        assert not line.take(lambda: act("b"))
        line.wait(lambda: act("c"))
        assert repr(line) == "<Line of 3>"
        for _ in range(20):
            await asyncio.sleep(0)
        loop.remove_reader(theirs)
        assert line.take(lambda: 1), "whoever comes when nobody is in line is the next"

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())

    assert said == ["a", ".", "b", ".", "c", "."]


async def test_act_has_as_many_turns_as_it_says() -> None:
    """An act of three turns has two more turns before the next act; an act of no turn leaves its own to the next."""
    line = Line()
    done_in: list[tuple[str, int]] = []
    turn = 0

    def act(name: str, num_turns: int) -> int:
        done_in.append((name, turn))
        return num_turns

    line.take(lambda: act("long", 3))
    line.take(lambda: act("nothing", 0))
    line.take(lambda: act("short", 1))
    line.take(lambda: act("last", 1))
    for turn in range(10):  # noqa: B007 -- `act` tells it
        await asyncio.sleep(0)

    (_, first), *others = done_in
    assert others == [("nothing", first + 3), ("short", first + 3), ("last", first + 4)]
    assert line.begin(), "the turn is free when all is done"
    assert not line.begin()


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
    """The turn of a request that is cancelled in line goes to the next request."""
    begun, tasks = paced_requests(3)
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait(tasks)

    assert begun == [0, 2]


async def test_those_who_waited_for_documents_are_answered_one_a_turn() -> None:
    """However many wait while documents are made, each answer of hundreds of kilobytes has a turn of its own."""
    answered = 0

    class Told(BaseRoute):
        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
            nonlocal answered
            answered += 1

    async def nothing(*_: object) -> Any:
        return {}

    documents = _Documents(Line())
    made = documents._made = asyncio.get_running_loop().create_future()
    scope = {"type": "http", "path": "/docs"}
    tasks = [asyncio.ensure_future(documents(scope, nothing, nothing)) for _ in range(5)]
    await asyncio.sleep(0)
    made.set_result({"/docs": Told()})
    seen = [0]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        seen.append(answered)

    assert answered == 5
    assert max(after - before for before, after in itertools.pairwise(seen)) == 1
