"""Own the laws of newcomers: a waiting request is told of once, with its blocks, when it has run its first step."""

from dataclasses import dataclass

from kvlease.integrations.vllm.offload.newcomers import Newcomers


@dataclass(slots=True)
class Scheduled:
    """The fields that are read of a request that vLLM schedules for the first time."""

    req_id: str
    block_ids: tuple[list[int], ...]


def test_who_runs_its_first_step_is_taken_once_with_its_blocks() -> None:
    """A newcomer comes with its first step's blocks, even if the runner's list grows; other requests are not ours."""
    newcomers = Newcomers()
    newcomers.waiting.update(a="request a", b="request b")
    newcomers.note_absent("b")
    blocks = [1, 2]

    started = newcomers.start([Scheduled("b", (blocks,)), Scheduled("c", ([3],))])
    blocks.append(9)

    assert [(one.request, one.block_ids, one.is_absent) for one in started] == [
        ("request b", ([1, 2],), True)
    ]
    assert newcomers.is_started("b")
    assert not newcomers.is_started("c")
    assert repr(newcomers) == "<Newcomers 1 wait, 1 started>"
    assert newcomers.take_started() == started
    assert newcomers.take_started() == []


def test_who_leaves_while_it_waits_leaves_nothing() -> None:
    """A later request of the same name is another one, of which nothing is known."""
    newcomers = Newcomers()
    newcomers.waiting["a"] = "before"
    newcomers.note_absent("a")

    newcomers.leave("a")
    newcomers.leave("a")
    assert newcomers.start([Scheduled("a", ([1],))]) == []

    newcomers.waiting["a"] = "after"
    (started,) = newcomers.start([Scheduled("a", ([1],))])
    assert (started.request, started.is_absent) == ("after", False)


def test_first_are_those_that_came_first() -> None:
    """The newcomers come in the order of arrival: as many as asked for, or all."""
    newcomers = Newcomers()
    newcomers.waiting.update(a=1, b=2, c=3)

    assert newcomers.first(2) == [1, 2]
    assert newcomers.first(9) == [1, 2, 3]
