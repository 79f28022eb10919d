"""Laws of what a client knows of a lease's blocks: by group, at the places where the daemon has them."""

from dataclasses import replace
from typing import Final

import numpy as np
import pytest

from kvlease._calling.grants import Grant, GroupedGrant
from kvlease.errors import InvalidError
from kvlease.groups import GroupShape, Keeps, keeps_everything

FULL: Final = keeps_everything(16, 64)
WINDOW: Final = GroupShape(
    keeps=Keeps.WINDOW,
    tokens_per_block=16,
    keys_per_block=1,
    table_blocks=64,
    max_blocks=4,
    kept_tokens=31,
)
CHUNK: Final = replace(WINDOW, keeps=Keeps.CHUNK, kept_tokens=32)
STATE: Final = replace(WINDOW, keeps=Keeps.STATE, kept_tokens=0, max_blocks=2)
FIXED: Final = replace(WINDOW, keeps=Keeps.FIXED, kept_tokens=0, max_blocks=1, table_blocks=1)


def grant_of(*groups: GroupShape) -> GroupedGrant:
    """Return a grant without blocks."""
    return GroupedGrant(request_id="r", groups=groups)


def packed(*blocks: int) -> bytes:
    """Pack block ids."""
    return np.array(blocks, "<i4").tobytes()


def tables(grant: GroupedGrant, num_groups: int) -> list[list[int]]:
    """Return the table of each group."""
    return [grant.blocks(group).tolist() for group in range(num_groups)]


def test_one_group_is_its_blocks() -> None:
    """With one group that keeps everything, its table is all blocks of the lease, and there is no other table."""
    grant = Grant(request_id="r", tokens_per_block=16)
    grant.put(packed(4, 5))

    assert (grant.blocks(0).tolist(), grant.covered_tokens) == ([4, 5], 32)
    with pytest.raises(InvalidError):
        grant.blocks(1)


@pytest.mark.parametrize("groups", [(), (FULL,), (FULL, WINDOW)])
def test_callers_may_write_to_the_blocks_they_are_told(groups: tuple[GroupShape, ...]) -> None:
    """An engine that counts on in the array that it was given changes its own array, and not what the lease has."""
    plain = Grant(request_id="r", tokens_per_block=16)
    grant = grant_of(*groups) if groups else plain
    grant.put(packed(*range(4, 4 + 2 * max(1, len(groups)))), [2] * len(groups))
    before = (grant.block_ids.tolist(), grant.blocks(0).tolist())

    told = grant.block_ids
    told += 1
    table = grant.blocks(0)
    table += 1

    assert (grant.block_ids.tolist(), grant.blocks(0).tolist()) == before


def test_prefix_counts_wherever_it_was_found() -> None:
    """A prefix that came from a store need not be computed either."""
    grant = Grant(request_id="r", tokens_per_block=16)
    grant.device_hit_tokens, grant.host_hit_tokens = 16, 32
    grant.disk_hit_tokens, grant.remote_hit_tokens = 64, 128

    assert grant.hit_tokens == 240


def test_groups_have_tables_of_their_own() -> None:
    """Blocks come group by group, and each group's table is read by place."""
    grant = grant_of(FULL, WINDOW)
    grant.put(packed(1, 2, 3, 0, 5), [3, 2])

    assert tables(grant, 2) == [[1, 2, 3], [0, 5]]
    assert grant.block_ids.tolist() == [1, 2, 3, 0, 5]
    assert (grant.num_blocks, grant.covered_tokens) == (4, 32)
    with pytest.raises(InvalidError):
        grant.blocks(2)


def test_extend_appends_to_each_group() -> None:
    """An extend's blocks go to the end of each group's table."""
    grant = grant_of(FULL, WINDOW)
    grant.put(packed(1, 4), [1, 1])
    first = tables(grant, 2)

    grant.add_unknown(packed(2, 3, 5), [2, 1], 48, [3, 2])

    assert (first, tables(grant, 2)) == ([[1], [4]], [[1, 2, 3], [4, 5]])
    assert (grant.num_blocks, grant.covered_tokens) == (5, 32)


def test_states_stand_at_the_end_of_what_is_covered() -> None:
    """Between two states of a recurrent group the places are empty."""
    grant = grant_of(FULL, STATE)
    grant.put(packed(1, 9), [1, 1])

    grant.add_unknown(packed(2, 3, 4, 8), [3, 1], 60, [4, 4])

    assert tables(grant, 2) == [[1, 2, 3, 4], [9, 0, 0, 8]]
    assert (grant.num_blocks, grant.covered_tokens) == (6, 64)


def test_speculative_states_lie_behind_the_newest() -> None:
    """Blocks for the states of speculative tokens come after the newest state, and make no room for tokens."""
    grant = grant_of(replace(STATE, extra_blocks=1, max_blocks=3))
    grant.put(packed(1, 2))

    grant.add_unknown(packed(3, 4), (), 64, [5])

    assert tables(grant, 1) == [[1, 2, 0, 3, 4]]
    assert grant.covered_tokens == 64


@pytest.mark.parametrize("num_tokens", [1000, 1008, 1009, 1024])
def test_speculative_states_give_way_at_the_end_of_the_table(num_tokens: int) -> None:
    """An extend that brings no more blocks still covers its tokens, because there is a place for their states."""
    grant = grant_of(replace(STATE, extra_blocks=2, max_blocks=4))
    grant.add_unknown(packed(1, 2, 3), (), 976, [63])

    grant.add_unknown(packed(4), (), 992, [64])
    grant.add_unknown(b"", (), num_tokens, [64])

    assert tables(grant, 1)[0][-4:] == [1, 2, 3, 4]
    assert grant.covered_tokens == num_tokens
    assert grant.reach(num_tokens) == num_tokens


def test_speculative_block_that_comes_again_has_moved_on() -> None:
    """A speculative block that comes again has only its new place, also if the table showed that before the answer."""
    shape = replace(STATE, extra_blocks=2, max_blocks=4)
    told, asked, late = grant_of(shape), packed(2, 4), grant_of(shape)
    told.put(packed(1, 2, 3))
    late.put(packed(1, 0, 3, 2, 4))

    told.add_unknown(asked, (), 44, [5])
    late.add_unknown(asked, (), 44, [5])

    assert tables(told, 1) == tables(late, 1) == [[1, 0, 3, 2, 4]]
    assert (told.num_blocks, late.num_blocks) == (4, 4)
    assert told.covered_tokens == late.covered_tokens == 48


def test_all_speculative_blocks_may_move_on() -> None:
    """Where a lease grows past all its speculative blocks, those that come again precede the fresh ones."""
    grant = grant_of(replace(STATE, extra_blocks=2, max_blocks=4))
    grant.put(packed(1, 2, 3))
    asked = packed(2, 3, 4)

    grant.add_unknown(asked, (), 80, [7])

    assert tables(grant, 1) == [[1, 0, 0, 0, 2, 3, 4]]


@pytest.mark.parametrize(
    ("shape", "num_tokens", "left"),
    [
        (WINDOW, 31, [1, 2, 3, 4]),
        (WINDOW, 47, [0, 2, 3, 4]),
        (WINDOW, 64, [0, 0, 3, 4]),
        (CHUNK, 31, [1, 2, 3, 4]),
        (CHUNK, 32, [0, 0, 3, 4]),
        (STATE, 16, [1, 2, 3, 4]),
        (STATE, 33, [0, 0, 3, 4]),
        (FIXED, 64, [1, 2, 3, 4]),
    ],
)
def test_what_no_later_token_needs_is_dropped(
    shape: GroupShape, num_tokens: int, left: list[int]
) -> None:
    """After a commit the places before a window, a chunk or the newest state are empty, and stay empty."""
    grant = grant_of(shape)
    grant.put(packed(1, 2, 3, 4))

    grant.compute(num_tokens)
    grant.compute(1)

    assert tables(grant, 1) == [left]
    assert (grant.num_blocks, grant.num_computed) == (4 - left.count(0), num_tokens)


def test_window_moves_on_with_what_is_computed() -> None:
    """A window bounds the tokens that an extend covers until a commit moves the window on."""
    grant = grant_of(FULL, WINDOW)
    assert (grant.reach(48), grant.reach(200)) == (48, 64)

    grant.compute(64)

    assert grant.reach(200) == 96


def test_fixed_blocks_cover_what_was_asked_for() -> None:
    """A group whose blocks stay the same for the life of a request bounds no tokens."""
    grant = grant_of(FIXED)
    assert grant.covered_tokens == 0

    grant.cover(100)
    grant.put(packed(7))

    assert (grant.covered_tokens, grant.reach(500)) == (100, 500)


@pytest.mark.parametrize(
    ("shape", "places", "left"),
    [
        (FULL, [1, 2, 3, 4], [1, 2]),
        (WINDOW, [0, 2, 3, 4], [0, 2]),
        (STATE, [1, 2, 0, 4], [1, 2]),
        (STATE, [1, 0, 0, 4], [1, 4]),
        (replace(FIXED, table_blocks=2, max_blocks=2), [1, 2], [1, 2]),
    ],
)
def test_trim_drops_what_lies_behind(shape: GroupShape, places: list[int], left: list[int]) -> None:
    """Blocks behind the tokens leave; the newest state of a recurrent group moves to the end of the tokens."""
    grant = grant_of(shape)
    grant.put(packed(*places))

    grant.cut(20)

    assert tables(grant, 1) == [left]
    assert grant.num_blocks == len(left) - left.count(0)


def test_trim_moves_speculative_states_down_in_their_order() -> None:
    """The newest state is the first of those that are kept, wherever the others were: so the daemon moves them, too."""
    grant = grant_of(replace(STATE, extra_blocks=2, max_blocks=4))
    grant.put(packed(0, 0, 1, 2, 3))

    grant.cut(2)

    assert tables(grant, 1) == [[1, 2, 3]]
    grant.put(packed(4, 0, 1, 2, 3))
    grant.cut(18)
    assert (tables(grant, 1), grant.num_blocks) == ([[4, 1, 2, 3]], 4)


def test_trim_of_one_group_keeps_whole_blocks() -> None:
    """A block that is needed in part is kept, and a trim to more tokens than there are changes nothing."""
    grant = Grant(request_id="r", tokens_per_block=16)
    grant.put(packed(4, 5, 6))

    grant.cut(100)
    assert grant.block_ids.tolist() == [4, 5, 6]
    grant.cut(17)

    assert (grant.block_ids.tolist(), grant.num_blocks) == ([4, 5], 2)


def test_block_0_counts_where_no_place_is_ever_empty() -> None:
    """A pool without null blocks grants block 0, too, to groups that keep everything."""
    grant = grant_of(FULL, FULL)
    grant.put(packed(0, 1, 2, 3), [2, 2])

    assert grant.num_blocks == 4


def test_evicted_lease_has_no_places() -> None:
    """A lease without blocks covers no token."""
    grant = grant_of(FULL, WINDOW)
    grant.put(packed(1, 2), [1, 1])

    grant.put(b"")

    assert (tables(grant, 2), grant.num_blocks, grant.covered_tokens) == ([[], []], 0, 0)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, STATE)])
def test_blocks_that_the_table_told_of_are_known(groups: tuple[GroupShape, ...]) -> None:
    """Blocks from another rank's extend may be read from the table before the daemon's answer names them."""
    is_plain = len(groups) == 1
    grant = Grant(request_id="r", tokens_per_block=16) if is_plain else grant_of(*groups)
    grant.put(packed(1, 2) if is_plain else packed(1, 2, 9), () if is_plain else (2, 1))

    told = packed(2, 3) if is_plain else packed(2, 3, 9, 0, 8)
    grant.add_unknown(told, () if is_plain else (2, 3), 48, () if is_plain else (3, 3))

    known = [1, 2, 3] if is_plain else [1, 2, 3, 9, 0, 8]
    assert (grant.block_ids.tolist(), grant.num_blocks) == (known, 3 if is_plain else 5)


def test_blocks_stand_where_the_daemon_says() -> None:
    """A rank's states stand where those of the rank stand that has asked for the most tokens."""
    grant = grant_of(FULL, STATE)
    grant.put(packed(1, 9), [1, 1])

    grant.add_unknown(packed(2, 8), [1, 1], 32, [2, 5])

    assert tables(grant, 2) == [[1, 2], [9, 0, 0, 0, 8]]


def test_block_behind_a_place_that_is_not_known_yet_is_left_out() -> None:
    """A group that keeps everything has no empty place, so blocks behind an unknown place are left to the table."""
    grant = grant_of(FULL, STATE)
    grant.put(packed(1, 9), [1, 1])

    grant.add_unknown(packed(3, 8), [1, 1], 48, [3, 3])
    assert (tables(grant, 2), grant.covered_tokens) == ([[1], [9, 0, 8]], 16)
    grant.add_unknown(packed(2, 3, 7), [2, 1], 32, [3, 2])

    assert (tables(grant, 2), grant.num_blocks) == ([[1, 2, 3], [9, 7, 8]], 6)


def test_state_that_was_given_back_does_not_come_again() -> None:
    """An answer may come after the commit that gave back the states it names; they stay given back."""
    grant = grant_of(STATE)
    grant.put(packed(9))
    grant.add_unknown(packed(8), (), 48, [3])
    grant.compute(48)

    grant.add_unknown(packed(7), (), 32, [2])

    assert (tables(grant, 1), grant.num_blocks) == ([[0, 0, 8]], 1)
