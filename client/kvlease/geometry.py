"""Own every division of the project, by name, and the sizes of one block; what fits a budget is the planner's job."""

from typing import Final

from kvlease.errors import InvalidError

ALIGNMENT_BYTES: Final = 64
"""Blocks and columns start at multiples of this: a cache line."""


def exact_div(dividend: int, divisor: int, *, what: str = "the division") -> int:
    """Return dividend / divisor, which must leave no remainder.

    Raises:
        InvalidError: there is a remainder; the message names both numbers.
    """
    quotient, rest = divmod(dividend, _positive(divisor))
    if rest:
        message = f"{what}: {dividend} is not a multiple of {divisor}"
        raise InvalidError(message, resource=what, need=dividend, limit=divisor)
    return quotient


def floor_div(dividend: int, divisor: int) -> int:
    """Return how many whole divisors the dividend holds."""
    return dividend // _positive(divisor)


def ceil_div(dividend: int, divisor: int) -> int:
    """Return how many divisors it takes to cover the dividend."""
    return -(-dividend // _positive(divisor))


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `number`."""
    return ceil_div(number, multiple) * multiple


def blocks_covering(num_tokens: int, tokens_per_block: int) -> int:
    """Return how many blocks hold `num_tokens`; the last block may be partial."""
    return ceil_div(num_tokens, tokens_per_block)


def full_blocks(num_tokens: int, tokens_per_block: int) -> int:
    """Return how many blocks `num_tokens` fill to the end."""
    return floor_div(num_tokens, tokens_per_block)


def page_end_bytes(
    *, num_blocks: int, bytes_per_block: int, offset_bytes: int, page_bytes: int
) -> int:
    """Return the bytes that a region needs so that a layer's page of the last block ends inside the region."""
    return (num_blocks - 1) * bytes_per_block + offset_bytes + page_bytes if num_blocks else 0


def _positive(divisor: int) -> int:
    assert divisor > 0, "division by a number that is not positive"
    return divisor
