"""Laws of numbers from outside, and of bytes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError
from kvlease.units import BYTES_MAX, checked_count, parse_bytes, show_bytes


def test_count_out_of_range_carries_both_numbers() -> None:
    """A refused count comes with its value and its bound; a number that int64 cannot carry is left out."""
    with pytest.raises(InvalidError) as refusal:
        checked_count("blocks", 9, most=8)
    with pytest.raises(InvalidError) as beyond:
        checked_count("blocks", 2**70, most=8)

    assert (refusal.value.need, refusal.value.limit) == (9, 8)
    assert beyond.value.need is None


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("8GiB", 8 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("500MB", 500 * 10**6),
        (" 2kib ", 2048),
        ("0.5TiB", 2**39),
    ],
)
def test_bytes_are_read_as_people_write_them(written: str, num_bytes: int) -> None:
    """Binary and decimal units, fractions and spaces are read as people mean them."""
    assert parse_bytes(written) == num_bytes


@pytest.mark.parametrize("written", ["", "GiB", "-1", "1.1B", "8 gigs", "1e9", "9999999TiB", "٣"])
def test_unclear_bytes_are_refused(written: str) -> None:
    """Text that is no whole, possible number of bytes is refused, and never guessed."""
    with pytest.raises(InvalidError):
        parse_bytes(written)


@given(st.integers(0, BYTES_MAX))
def test_shown_bytes_never_promise_more(num_bytes: int) -> None:
    """Bytes as shown are never more than the real ones, and less by under a hundredth of the unit."""
    number, unit = show_bytes(num_bytes).split()
    hundredths = int(number.replace(".", "")) if "." in number else int(number) * 100
    unit_bytes = parse_bytes(f"1{unit}")

    assert 0 <= num_bytes * 100 - hundredths * unit_bytes < unit_bytes
