"""Own where the tokens of one engine step are kept, for all its requests; which blocks a row has is `rows`' business.

Here a slot is a token's place in its group's pool: block id * tokens_per_block + place in the block. It counts the
plan's blocks, whatever blocks a kernel reads.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease._checks import check_type, checked_integer, wrong_type
from kvlease.errors import InvalidError
from kvlease.tables import NO_ROW, Ints, whole_numbers
from kvlease.units import TOKENS_MAX, checked_count

NO_SLOT: Final = -1
"""The slot of padding, and of a token that is not kept or not on this rank."""

_RANKS_MAX: Final = 2**16
_TABLE_DIMENSIONS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextShard:
    """Which tokens one of several context ranks keeps: the ranks take turns, `interleave_tokens` at a time."""

    num_ranks: int = 1
    rank: int = 0
    interleave_tokens: int = 1

    def check(self) -> None:
        """Refuse a shard that cannot be.

        Raises:
            InvalidError: a field is out of range.
        """
        checked_count("num_ranks", self.num_ranks, least=1, most=_RANKS_MAX)
        checked_count("rank", self.rank, most=self.num_ranks - 1)
        checked_count("interleave_tokens", self.interleave_tokens, least=1, most=TOKENS_MAX)


WHOLE: Final = ContextShard()
"""The one rank that keeps every token."""


class TokenRuns:
    """The tokens of one step: for each request a run of new positions, one request after another."""

    def __init__(self, *, rows: Ints, first_positions: Ints, num_tokens: Ints) -> None:
        """Take for each request its row of the block table, or NO_ROW, its first position and its number of tokens.

        Raises:
            InvalidError: the three differ in length, a position or a number of tokens is negative, or one is
                no whole number.
        """
        self.rows = whole_numbers("rows", rows).astype(np.int64)
        self.first_positions = whole_numbers("first_positions", first_positions).astype(np.int64)
        self.num_tokens = whole_numbers("num_tokens", num_tokens).astype(np.int64)
        if not len(self.rows) == len(self.first_positions) == len(self.num_tokens):
            message = (
                f"there are {len(self.rows)} rows, {len(self.first_positions)} first positions and "
                f"{len(self.num_tokens)} numbers of tokens; pass one of each for every request"
            )
            raise InvalidError(message, resource="num_tokens", rule="runs_differ_in_length")
        if min(self.first_positions.min(initial=0), self.num_tokens.min(initial=0)) < 0:
            message = "a request starts at a negative position, or has a negative number of tokens"
            raise InvalidError(message, resource="num_tokens", rule="negative_run")

    def __repr__(self) -> str:
        """Show life: how many tokens there are, of how many requests."""
        return f"<TokenRuns {len(self.positions)} tokens of {len(self.rows)} requests>"

    @cached_property
    def row_of_token(self) -> NDArray[np.int64]:
        """The row of each token's request."""
        rows: NDArray[np.int64] = np.repeat(self.rows, self.num_tokens)
        return rows

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """The position of each token in its request."""
        ends = np.cumsum(self.num_tokens)
        starts = np.repeat(self.first_positions - ends + self.num_tokens, self.num_tokens)
        positions: NDArray[np.int64] = starts + np.arange(len(starts), dtype=np.int64)
        return positions


def run_slots(
    block_table: NDArray[np.int32],
    runs: TokenRuns,
    *,
    tokens_per_block: int,
    num_padded: int | None = None,
    shard: ContextShard = WHOLE,
) -> NDArray[np.int64]:
    """Return the slot of every token on one rank; NO_SLOT for other ranks' tokens and for padding up to `num_padded`.

    For position p, with w ranks that take i tokens in turn and blocks of s tokens on each rank:
    place = p mod s*w, kept here if floor(place / i) mod w = rank,
    slot = block_table[row, floor(p / (s*w))] * s + floor(place / (w*i)) * i + place mod i

    Raises:
        InvalidError: rule position_outside_table, row_outside_table, padding_too_short or interleave_not_dividing.
    """
    check_type("runs", runs, TokenRuns)
    check_type("shard", shard, ContextShard)
    shard.check()
    checked_count("tokens_per_block", tokens_per_block, least=1, most=TOKENS_MAX)
    turn_tokens = shard.interleave_tokens
    if tokens_per_block % turn_tokens and shard.num_ranks > 1:
        message = (
            f"ranks take turns of {turn_tokens} tokens, which do not divide the {tokens_per_block} tokens of a block; "
            "make tokens_per_block a multiple of interleave_tokens"
        )
        raise InvalidError(
            message,
            resource="interleave_tokens",
            rule="interleave_not_dividing",
            need=turn_tokens,
            available=tokens_per_block,
        )
    block_index, place = np.divmod(runs.positions, tokens_per_block * shard.num_ranks)
    turn, inner = np.divmod(place, turn_tokens)
    round_index, rank = np.divmod(turn, shard.num_ranks)
    is_kept = (rank == shard.rank) & (runs.row_of_token != NO_ROW)
    slots = _padded_slots(len(runs.positions), num_padded)
    ids = _looked_up(block_table, runs.row_of_token, block_index)
    here = ids * tokens_per_block + round_index * turn_tokens + inner
    slots[: len(here)] = np.where(is_kept, here, NO_SLOT)
    return slots


def state_slots(
    token_slots: NDArray[np.int64],
    block_table: NDArray[np.int32],
    runs: TokenRuns,
    *,
    tokens_per_state: int,
    states_per_block: int,
    shard: ContextShard = WHOLE,
) -> NDArray[np.int64]:
    """Return the slot of each compressed state, at the state's last token; NO_SLOT at all other tokens.

    A token at position p ends a state if p + 1 is a multiple of tokens_per_state and the token has a slot of its own.
    With p' = floor(p / (i*w)) * i + p mod i, its place among its rank's tokens, and q = floor(p' / tokens_per_state):
    slot = block_table[row, floor(q / states_per_block)] * states_per_block + q mod states_per_block

    Raises:
        InvalidError: rule position_outside_table, row_outside_table or padding_too_short.
    """
    shard.check()
    checked_count("tokens_per_state", tokens_per_state, least=1, most=TOKENS_MAX)
    checked_count("states_per_block", states_per_block, least=1, most=TOKENS_MAX)
    num_tokens = len(runs.positions)
    slots = _padded_slots(num_tokens, len(token_slots))
    turn_tokens = shard.interleave_tokens
    turn, place = np.divmod(runs.positions, turn_tokens)
    local = np.floor_divide(turn, shard.num_ranks) * turn_tokens + place
    state = np.floor_divide(local, tokens_per_state)
    block_index, inner = np.divmod(state, states_per_block)
    is_last = (runs.positions + 1) % tokens_per_state == 0
    is_kept = is_last & (token_slots[:num_tokens] != NO_SLOT) & (runs.row_of_token != NO_ROW)
    ids = _looked_up(block_table, runs.row_of_token, np.where(is_kept, block_index, 0))
    slots[:num_tokens] = np.where(is_kept, ids * states_per_block + inner, NO_SLOT)
    return slots


def _padded_slots(num_tokens: int, num_padded: int | None) -> NDArray[np.int64]:
    """Return an array for the slots of tokens and padding, filled with NO_SLOT."""
    length = num_tokens if num_padded is None else checked_integer("num_padded", num_padded)
    if length < num_tokens:
        message = f"there are {num_tokens} tokens, but only {length} slots for them; pad to at least {num_tokens}"
        raise InvalidError(
            message,
            resource="num_padded",
            rule="padding_too_short",
            need=num_tokens,
            available=length,
        )
    return np.full(length, NO_SLOT, dtype=np.int64)


def _looked_up(
    block_table: NDArray[np.int32], rows: NDArray[np.int64], block_index: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the block id of each token; for a token of a padding request, any id."""
    if not isinstance(block_table, np.ndarray) or block_table.ndim != _TABLE_DIMENSIONS:
        wanted = "an array [requests, width], as gather_blocks returns it"
        raise wrong_type("block_table", "", wanted, block_table)
    num_rows, width = block_table.shape
    is_real = rows != NO_ROW
    asked = np.where(is_real, rows, 0)
    index = np.where(is_real, block_index, 0)
    for values, limit, rule, what, count in (
        (asked, num_rows, "row_outside_table", "row", "rows in the table"),
        (index, width, "position_outside_table", "block", "blocks in a row"),
    ):
        least, most = int(values.min(initial=0)), int(values.max(initial=0))
        if is_real.any() and (least < 0 or most >= limit):
            wrong = most if most >= limit else least
            message = f"a token is in {what} {wrong}, but the number of {count} is {limit}"
            raise InvalidError(
                message,
                resource="block_table",
                rule=rule,
                need=most + 1 if most >= limit else least,
                available=limit,
            )
    if not is_real.any():
        return np.zeros(len(rows), dtype=np.int64)
    return block_table[asked, index].astype(np.int64)
