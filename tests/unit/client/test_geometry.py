"""Laws of division by name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease import geometry
from kvlease.errors import InvalidError
from kvlease.spec import FullAttention

COUNTS = st.integers(0, 2**60)
DIVISORS = st.integers(1, 2**40)


@given(COUNTS, DIVISORS)
def test_floor_and_ceil_enclose_the_quotient(dividend: int, divisor: int) -> None:
    """Floor never exceeds the quotient, ceil never falls short of it, and they differ by at most one."""
    floor = geometry.floor_div(dividend, divisor)
    ceil = geometry.ceil_div(dividend, divisor)

    assert floor * divisor <= dividend <= ceil * divisor
    assert ceil - floor == (1 if dividend % divisor else 0)


@given(COUNTS, DIVISORS)
def test_round_up_is_the_least_multiple_not_below(number: int, multiple: int) -> None:
    """Rounding up gives a multiple, and the multiple before it is too small."""
    rounded = geometry.round_up(number, multiple)

    assert rounded % multiple == 0
    assert rounded - multiple < number <= rounded


@given(st.integers(0, 2**40), DIVISORS)
def test_exact_div_undoes_multiplication(quotient: int, divisor: int) -> None:
    """A product divides by its factor without a remainder."""
    assert geometry.exact_div(quotient * divisor, divisor) == quotient


def test_exact_div_names_both_numbers() -> None:
    """A remainder is refused with both numbers and what they are."""
    with pytest.raises(InvalidError, match=r"hidden_size over heads: 100 is not a multiple of 3"):
        geometry.exact_div(100, 3, what="hidden_size over heads")


@pytest.mark.parametrize("divisor", [0, -1])
def test_division_by_less_than_one_is_our_own_mistake(divisor: int) -> None:
    """No unchecked number of a caller reaches a division."""
    with pytest.raises(AssertionError):
        geometry.floor_div(1, divisor)


@given(st.integers(0, 10**6), st.integers(1, 4096))
def test_covering_blocks_are_full_ones_and_at_most_one_more(
    num_tokens: int, per_block: int
) -> None:
    """Only the last block of a request may be partly used."""
    covering = geometry.blocks_covering(num_tokens, per_block)
    full = geometry.full_blocks(num_tokens, per_block)

    assert covering - full == (1 if num_tokens % per_block else 0)


def test_page_of_a_known_model() -> None:
    """Llama 3 8B keeps 64 KiB a layer and block: 8 heads * (128 + 128) * 2 bytes * 16 tokens."""
    spec = FullAttention(
        name="0", num_kv_heads=8, head_size=128, dtype="bfloat16", tokens_per_block=16
    )

    assert spec.bytes_per_page == 64 * 1024


def test_page_end_of_an_empty_pool_is_zero() -> None:
    """A pool without blocks needs no bytes, wherever a page would lie."""
    page = {"bytes_per_block": 64, "offset_bytes": 32, "page_bytes": 32}

    assert geometry.page_end_bytes(num_blocks=0, **page) == 0
    assert geometry.page_end_bytes(num_blocks=3, **page) == 192
