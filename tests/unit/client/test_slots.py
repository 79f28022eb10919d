"""Laws of slots: every token of a step has one slot, on one rank, where its request's row says."""

from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError
from kvlease.slots import NO_SLOT, WHOLE, ContextShard, TokenRuns, run_slots, state_slots
from kvlease.tables import NO_ROW, Ints, token_slots

TABLE = np.array([[3, 5, 0], [4, 7, 9]], np.int32)


def runs(*requests: tuple[int, int, int]) -> TokenRuns:
    """Return runs given as (row, first position, tokens)."""
    rows, first, num = ([request[i] for request in requests] for i in range(3))
    return TokenRuns(rows=rows, first_positions=first, num_tokens=num)


def test_runs_follow_each_other() -> None:
    """Each token has its request's row and a position of its own."""
    step = runs((1, 31, 2), (0, 7, 0), (0, 3, 1))

    assert step.row_of_token.tolist() == [1, 1, 0]
    assert step.positions.tolist() == [31, 32, 3]
    assert repr(step) == "<TokenRuns 3 tokens of 3 requests>"


@pytest.mark.parametrize(
    ("rows", "first", "num", "rule"),
    [
        pytest.param([0], [1, 2], [1], "runs_differ_in_length", id="lengths"),
        pytest.param([0], [-1], [1], "negative_run", id="position"),
        pytest.param([0], [1], [-1], "negative_run", id="tokens"),
        pytest.param([0], [1.5], [1], "not_whole_numbers", id="half a position"),
        pytest.param(["0"], [1], [1], "not_whole_numbers", id="a text for a row"),
    ],
)
def test_runs_that_are_none_are_refused(
    rows: list[Any], first: list[Any], num: list[int], rule: str
) -> None:
    """Each request has one row, one position and one number of tokens, none of them negative."""
    with pytest.raises(InvalidError) as refusal:
        TokenRuns(rows=rows, first_positions=first, num_tokens=num)

    assert refusal.value.rule == rule


def test_slots_of_several_requests_end_in_padding() -> None:
    """A decode at position 31 and prefills of 3 and 4 tokens are padded to six slots."""
    slots = run_slots(TABLE, runs((0, 31, 1), (1, 3, 2)), tokens_per_block=16, num_padded=6)

    assert slots.tolist() == [95, 67, 68, NO_SLOT, NO_SLOT, NO_SLOT]


def test_request_that_is_none_has_no_slots() -> None:
    """A request that only fills an engine's step has no slot in the pool, wherever it says that it starts."""
    step = runs((NO_ROW, 10**6, 2), (0, 0, 1))

    assert run_slots(TABLE, step, tokens_per_block=16).tolist() == [NO_SLOT, NO_SLOT, 48]
    assert run_slots(TABLE, runs((NO_ROW, 0, 1)), tokens_per_block=16).tolist() == [NO_SLOT]


def test_step_without_tokens_is_all_padding() -> None:
    """A step without tokens has no slot but padding."""
    assert run_slots(TABLE, runs(), tokens_per_block=16, num_padded=2).tolist() == [NO_SLOT] * 2


@given(st.integers(0, 30), st.integers(0, 16), st.integers(1, 16))
def test_slots_of_one_rank_are_those_of_single_tokens(
    first: int, num_tokens: int, tokens_per_block: int
) -> None:
    """Many requests at once get the same slots as each token alone."""
    table = np.arange(2 * 50, dtype=np.int32).reshape(2, 50)
    step = runs((1, first, num_tokens))

    slots = run_slots(table, step, tokens_per_block=tokens_per_block)

    assert (
        slots.tolist() == token_slots(table[1], step.positions.tolist(), tokens_per_block).tolist()
    )


@given(st.integers(1, 4), st.sampled_from([1, 2, 4, 8]), st.integers(0, 40), st.integers(0, 60))
def test_every_token_is_on_one_rank_at_a_slot_of_its_own(
    num_ranks: int, interleave_tokens: int, first: int, num_tokens: int
) -> None:
    """Context ranks share the tokens without a gap, and no two tokens have the same slot."""
    table = np.arange(1, 41, dtype=np.int32)[None]
    step = runs((0, first, num_tokens))
    by_rank = [
        run_slots(
            table,
            step,
            tokens_per_block=8,
            shard=ContextShard(num_ranks=num_ranks, rank=rank, interleave_tokens=interleave_tokens),
        )
        for rank in range(num_ranks)
    ]

    assert (np.sum([slots != NO_SLOT for slots in by_rank], axis=0) == 1).all()
    for rank, slots in enumerate(by_rank):
        kept = slots[slots != NO_SLOT]
        turns = step.positions[slots != NO_SLOT] // interleave_tokens
        assert len(set(kept.tolist())) == len(kept)
        assert (turns % num_ranks == rank).all()


def test_turns_that_do_not_divide_a_block_are_refused() -> None:
    """A turn that does not divide a block is refused, as it would end one rank's block early."""
    shard = ContextShard(num_ranks=2, interleave_tokens=3)

    with pytest.raises(InvalidError) as refusal:
        run_slots(TABLE, runs((0, 0, 1)), tokens_per_block=8, shard=shard)

    assert refusal.value.rule == "interleave_not_dividing"
    assert (refusal.value.need, refusal.value.available) == (3, 8)


@pytest.mark.parametrize(
    ("request_", "rule", "told"),
    [
        pytest.param((0, 48, 1), "position_outside_table", "block 3", id="behind the row"),
        pytest.param((2, 0, 1), "row_outside_table", "row 2", id="row too high"),
        pytest.param((-2, 0, 1), "row_outside_table", "row -2", id="row too low"),
    ],
)
def test_token_outside_of_the_table_is_refused(
    request_: tuple[int, int, int], rule: str, told: str
) -> None:
    """A token outside the table is refused, as it has no entry; the message names what is outside."""
    with pytest.raises(InvalidError) as refusal:
        run_slots(TABLE, runs(request_), tokens_per_block=16)

    assert refusal.value.rule == rule
    assert refusal.value.message.startswith(f"a token is in {told},")


def test_padding_below_the_tokens_is_refused() -> None:
    """Slots are padded, and never cut off."""
    with pytest.raises(InvalidError) as refusal:
        run_slots(TABLE, runs((0, 0, 3)), tokens_per_block=16, num_padded=2)

    assert (refusal.value.rule, refusal.value.need) == ("padding_too_short", 3)


@pytest.mark.parametrize(
    "fields", [{"num_ranks": 0}, {"rank": 1}, {"rank": -1}, {"interleave_tokens": 0}]
)
def test_shard_that_is_none_is_refused(fields: dict[str, int]) -> None:
    """There is at least one rank, and a rank takes at least one token in turn."""
    with pytest.raises(InvalidError):
        ContextShard(**fields).check()


def test_state_is_kept_at_the_last_of_its_tokens() -> None:
    """Of eight tokens from position 4, those at 7 and 11 end states 1 and 2, of four tokens each."""
    step = runs((0, 4, 8))
    own = run_slots(TABLE, step, tokens_per_block=8, num_padded=10)

    slots = state_slots(own, TABLE, step, tokens_per_state=4, states_per_block=2)

    assert slots.tolist() == [-1, -1, -1, 3 * 2 + 1, -1, -1, -1, 5 * 2, -1, -1]


def test_state_of_a_token_that_is_not_kept_here_has_no_slot() -> None:
    """With two ranks that take four tokens in turn, each keeps the states of its own tokens one after another."""
    shard = ContextShard(num_ranks=2, rank=0, interleave_tokens=4)
    step = runs((1, 0, 16))
    own = run_slots(TABLE, step, tokens_per_block=8, shard=shard)

    slots = state_slots(own, TABLE, step, tokens_per_state=4, states_per_block=2, shard=shard)

    assert [slot for slot in slots.tolist() if slot != NO_SLOT] == [4 * 2, 4 * 2 + 1]
    assert slots[3] == 4 * 2


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 30), st.integers(1, 40))
def test_states_fill_their_blocks_in_order(
    tokens_per_state: int, states_per_block: int, first: int, num_tokens: int
) -> None:
    """Every position p with p + 1 a multiple of c ends state p div c, at its place in the row's blocks."""
    table = np.arange(1, 81, dtype=np.int32)[None]
    step = runs((0, first, num_tokens))
    own = np.zeros(num_tokens, np.int64)

    slots = state_slots(
        own,
        table,
        step,
        tokens_per_state=tokens_per_state,
        states_per_block=states_per_block,
        shard=WHOLE,
    )

    for position, slot in zip(step.positions.tolist(), slots.tolist(), strict=True):
        state, rest = divmod(position, tokens_per_state)
        block, inner = divmod(state, states_per_block)
        ends = rest == tokens_per_state - 1
        assert slot == ((block + 1) * states_per_block + inner if ends else NO_SLOT)


@pytest.mark.parametrize(
    "arguments",
    [
        {"block_table": None},
        {"block_table": [[1, 2]]},
        {"block_table": np.zeros(3, np.int32)},
        {"runs": None},
        {"shard": None},
        {"num_padded": 7.5},
        {"num_padded": "7"},
        {"num_padded": True},
    ],
)
def test_arguments_of_the_wrong_type_are_refused(arguments: dict[str, Any]) -> None:
    """What is no table, no runs, no shard or no number is refused by its name."""
    runs = TokenRuns(rows=[0], first_positions=[0], num_tokens=[1])
    (name,) = arguments

    with pytest.raises(InvalidError, match=f"^{name} must be"):
        run_slots(**{"block_table": TABLE, "runs": runs, "tokens_per_block": 4} | arguments)


def test_types_of_runs_name_every_array_that_is_counted() -> None:
    """Whoever checks types may give arrays of any whole numbers, as to the block table."""
    hints = get_type_hints(TokenRuns.__init__)

    assert [hints[name] for name in ("rows", "first_positions", "num_tokens")] == [Ints] * 3
