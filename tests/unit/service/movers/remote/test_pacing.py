"""A call is only as large as the time that is left allows."""

from hypothesis import given
from hypothesis import strategies as st

from kvleased.movers.remote.pacing import Pace
from kvleased.movers.remote.store import CALL_BYTES_MAX

MIB = 1 << 20


def test_first_call_is_small_and_later_ones_follow_the_rate() -> None:
    """A first call takes an eighth of the budget, within the limit of its bytes; later ones go by the rate."""
    pace = Pace(0.25)
    first = pace.count(MIB // 4, 0.25, is_first=True)

    pace.travelled(MIB, 1 / 40)
    later = pace.count(MIB // 4, 0.24, is_first=False)
    pace.travelled(MIB, 1 / 10_000)
    fast = pace.count(MIB // 4, 0.23, is_first=False)

    assert (first, later, fast) == (4, 5, 8)


def test_nothing_is_begun_that_would_not_end() -> None:
    """If not even one value fits into the time that is left, none is asked for."""
    pace = Pace(0.25)
    pace.travelled(MIB, 0.1)

    assert pace.count(MIB, 0.1, is_first=False) == 0
    assert pace.count(1, 0.0, is_first=True) == 0


def test_slow_call_is_not_held_against_the_store_for_ever() -> None:
    """A packet's first call is made, however slow the last call was."""
    pace = Pace(0.25)
    pace.travelled(1, 10.0)

    assert pace.count(8 * MIB, 0.25, is_first=True) == 1


def test_calls_without_bytes_tell_nothing() -> None:
    """Misses do not make a store seem slow, and do not end a batch."""
    pace = Pace(0.25)
    pace.travelled(0, 0.2)

    assert pace.bytes_a_second == 0
    assert pace.count(MIB, 0.05, is_first=False) == 1


@given(
    value_bytes=st.integers(1, 64 * MIB),
    left=st.floats(0, 10),
    rate=st.integers(0, 1 << 40),
    is_first=st.booleans(),
)
def test_no_call_has_more_bytes_than_the_limit(
    value_bytes: int, left: float, rate: int, *, is_first: bool
) -> None:
    """Only a single value may be larger than the limit of a call."""
    pace = Pace(0.25)
    pace.travelled(rate, 1.0)

    count = pace.count(value_bytes, left, is_first=is_first)

    assert count <= 1 or count * value_bytes <= CALL_BYTES_MAX
