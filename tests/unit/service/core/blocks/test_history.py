"""Laws of the history: it tells the last departure of a key before a grant, and forgets the oldest one first."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvleased.core.blocks.history import ENTRIES_MAX, ENTRIES_MIN, DepartureReason, History
from tests.unit.service.core.builders import leaving

DEVICE, HOST = 0, 1
OWNER, OTHER = 7, 8


def words(*numbers: int) -> np.ndarray:
    """Return keys as columns of 64-bit words."""
    return np.array(numbers, np.int64)


def leave(
    history: History,
    *numbers: int,
    tier: int = DEVICE,
    since: int = 0,
    owner: int = OWNER,
    why: DepartureReason = DepartureReason.EVICTED,
) -> None:
    """Have keys leave a tier."""
    history.left(tier, leaving(words(*numbers), owner=owner, since=since), why)


def test_departure_is_told_with_its_circumstances() -> None:
    """A look-up of a key tells when it left which tier, why, and for whom."""
    history = History(8)
    history.now, history.tenant = 2.5, 7
    leave(history, 1, 2, tier=HOST, why=DepartureReason.DAMAGED)

    found = history.find(words(2, 3), history.num_left, 1, OWNER)

    assert found.numbers.tolist() == [2, 0]
    assert history.reasons(found.numbers[:1]).tolist() == [DepartureReason.DAMAGED]
    assert history.tiers(found.numbers[:1]).tolist() == [HOST]
    assert history.tenants(found.numbers[:1]).tolist() == [7]
    assert history.times(found.numbers[:1]).tolist() == [2.5]
    assert repr(history) == "<History 2 of 2 departures>"


def test_history_begins_with_the_oldest_departure_that_is_remembered() -> None:
    """The history knows how far back it reaches, once something has left."""
    history = History(1)
    assert history.began is None
    for second in range(ENTRIES_MIN + 3):
        history.now = float(second)
        leave(history, second)

    assert history.began == 3.0
    assert len(history) == ENTRIES_MIN


@pytest.mark.parametrize(
    ("num_blocks", "num_entries"),
    [
        pytest.param(0, ENTRIES_MIN, id="least"),
        pytest.param(ENTRIES_MIN, 2 * ENTRIES_MIN, id="two a block"),
        pytest.param(ENTRIES_MAX, ENTRIES_MAX, id="most"),
    ],
)
def test_history_is_bounded(num_blocks: int, num_entries: int) -> None:
    """The history remembers two departures for each block, within fixed bounds, however many there are."""
    history = History(num_blocks)
    leave(history, *range(ENTRIES_MAX + 5))

    assert len(history) == num_entries


def test_batch_larger_than_the_history_leaves_its_end() -> None:
    """Of more departures at once than the history has room for, the last ones are remembered."""
    history = History(1)
    leave(history, *range(ENTRIES_MIN + 2))

    found = history.find(words(1, 2, ENTRIES_MIN + 1), history.num_left, 1, OWNER)

    assert found.numbers.tolist() == [0, 3, ENTRIES_MIN + 2]


def test_keys_that_collide_are_looked_for_so_far() -> None:
    """The search for keys that were made to collide ends after a bounded number of steps."""
    history = History(1)
    leave(history, *(number << 32 for number in range(1000)))

    found = history.find(words(999 << 32, 5 << 32), history.num_left, 1, OWNER)

    assert found.numbers.tolist() == [1000, 0]


Event = tuple[int, int, int, int]
"""Of a departure: key, tier, newest lease when the block became findable, and owner."""
EVENTS = st.lists(
    st.tuples(
        st.integers(1, 6),
        st.sampled_from((DEVICE, HOST)),
        st.integers(0, 40),
        st.sampled_from((OWNER, OTHER)),
    ),
    max_size=40,
)


@given(
    events=EVENTS,
    num_before=st.integers(0, 40),
    moment=st.integers(0, 41),
    stride=st.sampled_from((1, 1 << 13)),
)
def test_history_agrees_with_a_full_log(
    events: list[Event], num_before: int, moment: int, stride: int
) -> None:
    """For every key, the history agrees with a full log: an owner's last departure before a grant, and all after it."""
    history = History(1)
    num_before = min(num_before, len(events))
    for index, (key, tier, since, owner) in enumerate(events):
        leave(history, key * stride, tier=tier, since=since, owner=owner)
        if index % 5 == 0:
            history.find(words(0), 0, 0, OWNER)

    found = history.find(words(*(key * stride for key in range(1, 7))), num_before, moment, OWNER)

    for key in range(1, 7):
        before = [
            at + 1
            for at, (one, _, _, owner) in enumerate(events[:num_before])
            if (one, owner) == (key, OWNER)
        ]
        # An earlier departure has told what comes before the last one.
        assert found.numbers[key - 1] == max(before, default=0)
        assert found.tiers[key - 1] == tiers_left(events[num_before:], key, moment, OWNER)
        assert found.foreign_tiers[key - 1] == tiers_left(events[num_before:], key, moment, OTHER)


def tiers_left(events: list[Event], key: int, moment: int, owner: int) -> int:
    """Return bits of the tiers that had an owner's block under a key before a moment, and which it left."""
    return sum(
        1 << tier
        for tier in (DEVICE, HOST)
        if any(one == (key, tier, one[2], owner) and one[2] < moment for one in events)
    )
