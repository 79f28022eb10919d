"""No law breaks over many simulated histories full of faults."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import pytest

from tests.laws import simulate
from tests.laws.apart import ApartWorld
from tests.laws.histories import STEPS, Tally, live, lived, play
from tests.laws.mutations import MUTATIONS
from tests.laws.shapes import MIXES

_CHUNKS = 32
_HISTORIES = 64
_OPERATIONS = 1_000_000
_FAULTS = 200_000
_QUICK_CHUNKS = 3
_QUICK_OPERATIONS = 100_000


def _thorough(*numbers: int) -> list[object]:
    """Mark numbers that only `make test-thorough` plays."""
    return [pytest.param(number, marks=pytest.mark.thorough) for number in numbers]


@pytest.mark.parametrize(
    "chunk", [*range(_QUICK_CHUNKS), *_thorough(*range(_QUICK_CHUNKS, _CHUNKS))]
)
def test_no_law_breaks_under_faults(chunk: int) -> None:
    """Whatever workers, movers and the control process do or suffer, every invariant holds after every event."""
    tally = play(range(chunk * _HISTORIES, (chunk + 1) * _HISTORIES))

    assert not tally.violations
    # All chunks together make a million operations and two hundred thousand faults; the quick ones, a hundred thousand
    # operations.
    is_quick = chunk < _QUICK_CHUNKS
    least = _QUICK_OPERATIONS / _QUICK_CHUNKS if is_quick else _OPERATIONS / _CHUNKS
    assert tally.num_operations >= least
    assert tally.num_faults >= _FAULTS / _CHUNKS


@pytest.mark.parametrize("seed", [0, 6, 26, *_thorough(1, 8, 12)])
def test_history_is_the_same_however_often_it_is_checked(seed: int) -> None:
    """A history goes the same way whether all laws are checked after every event or only after several."""
    (seldom, _), (often, _) = (lived(seed, STEPS, events) for events in (50, 1))

    assert (seldom.num_operations, seldom.faults) == (often.num_operations, often.faults)
    assert seldom.digest() == often.digest()


@pytest.mark.parametrize(
    ("mix", "seed"),
    [
        pytest.param("full and fixed", 1040, id="rank joins again what it forks"),
        pytest.param("all", 1077, id="commit ends the wait of its own rank"),
    ],
)
def test_no_law_asks_too_much_of_ranks(mix: str, seed: int) -> None:
    """Two histories in which a law once took for broken what ranks of a mixed model may do."""
    world = ApartWorld(seed, replace(MIXES[mix], num_ranks=2))

    live(world, STEPS)

    world.check_whole()


def test_duplicate_may_leave_as_a_commit_of_ranks_serves_who_waits() -> None:
    """A history in which a commit counted as unpublished: the block cached under its key made room for a waiting call.

    The call was served by what the commit gave back, so the cached block left before the commit was answered.
    """
    _, violation = lived(313338, STEPS, 50)

    assert violation is None


def test_broken_law_is_told_with_the_first_step_after_which_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A history in which something is wrong is played again, with a check after each event."""
    MUTATIONS["held_block_is_evicted"](monkeypatch)

    (violation,) = play([0]).violations

    assert violation == lived(0, STEPS, 1)[1]


def test_runs_that_follow_one_another_play_each_seed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All histories that a run has begun count when it ends, so that the next run goes on after them."""
    played: list[int] = []

    def note(seeds: Iterable[int]) -> Tally:
        played.extend(seeds)
        return Tally(num_histories=len([*seeds]))

    monkeypatch.setattr(simulate, "play", note)
    first = 7
    for _ in range(2):
        calls, chunks = count(), (range(at, at + 4) for at in count(first, 4))
        with ThreadPoolExecutor(1) as pool:
            parts = [*simulate._played(pool, chunks, lambda calls=calls: next(calls) >= 5)]
        first += sum(part.num_histories for part in parts)

    assert played == [*range(7, first)]
