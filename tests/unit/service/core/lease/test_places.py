"""Laws of the places of one lease: they equal what the formulas for many leases say."""

from dataclasses import replace

import numpy as np
import pytest

from kvlease.groups import GroupShape, first_needed, last_covered
from kvleased.core.lease.covering import Covering
from kvleased.core.lease.places import Places
from tests.unit.service.core.builders import SHAPE
from tests.unit.service.core.grouped import CHUNK, FIXED, FULL, GUESSING, HASH_TOKENS, STATE, WINDOW

GROUPS = {
    "everything": FULL,
    "window": WINDOW,
    "narrow table": replace(WINDOW, table_blocks=5),
    "chunk": CHUNK,
    "state": STATE,
    "speculative": GUESSING,
    "fixed": FIXED,
}
SHORT = replace(GUESSING, table_blocks=2)
"""A table with fewer places than there are states at a time."""
TOKENS = np.arange(1, FULL.table_blocks * FULL.tokens_per_block + 1)
every_group = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS)


@every_group
def test_first_place_needed_is_that_of_many(group: GroupShape) -> None:
    """The first place that one lease needs is that of the formula for many."""
    one = Places(group)

    assert [one.first_needed(tokens) for tokens in TOKENS.tolist()] == (
        first_needed(group, TOKENS).tolist()
    )


@every_group
@pytest.mark.parametrize("num_computed", [0, 1, 9, 30])
def test_last_place_covered_is_that_of_many(group: GroupShape, num_computed: int) -> None:
    """The last place that one lease covers is that of the formula for many."""
    one = Places(group)

    assert [one.last_covered(num_computed, tokens) for tokens in TOKENS.tolist()] == (
        last_covered(group, np.full_like(TOKENS, num_computed), TOKENS).tolist()
    )


@pytest.mark.parametrize("group", [*GROUPS.values(), SHORT], ids=[*GROUPS, "short table"])
@pytest.mark.parametrize("end", [0, 2, 5])
def test_growth_is_that_of_many(group: GroupShape, end: int) -> None:
    """One lease grows as each lease does in the formula for many."""
    covering = Covering(
        replace(SHAPE, groups=(group,), hash_tokens=HASH_TOKENS, hit_tokens=HASH_TOKENS)
    )
    computed = np.full_like(TOKENS, 9)

    begins, afters = covering.growth(computed, TOKENS, np.full((len(TOKENS), 1), end))

    together = [
        (begin, after) for begin, after in zip(begins.tolist(), afters.tolist(), strict=True)
    ]
    assert [covering.growth_of_one(9, tokens, [end]) for tokens in TOKENS.tolist()] == together


@every_group
@pytest.mark.parametrize("num_tokens", [1, 4, 9, 14])
def test_places_passed_over_are_those_of_many(group: GroupShape, num_tokens: int) -> None:
    """One lease passes over the places of the formula for many, however far it grows."""
    covering = Covering(
        replace(SHAPE, groups=(group,), hash_tokens=HASH_TOKENS, hit_tokens=HASH_TOKENS)
    )
    now = np.full_like(TOKENS, num_tokens)
    ends = last_covered(group, np.zeros_like(TOKENS), now)[:, None]
    _, afters = covering.growth(np.zeros_like(TOKENS), TOKENS, ends)

    passed = covering.passed(now, ends, afters)

    one_by_one = [
        covering.num_passed_by_one(num_tokens, *places)
        for places in zip(ends.tolist(), afters.tolist(), strict=True)
    ]
    assert one_by_one == ([0] * len(TOKENS) if passed is None else passed[1][:, 0].tolist())
    assert (passed is not None) == (group.extra_blocks > 0)


@pytest.mark.parametrize("table_blocks", [2, 3, 4, 6, 12])
def test_no_more_blocks_move_on_than_there_are_new_places(table_blocks: int) -> None:
    """Growth adds a place for each block that moves on and one for the newest state, at the end of a table, too."""
    group = replace(GUESSING, table_blocks=table_blocks)
    one = Places(group)
    growths = [
        (num_tokens, one.last_covered(0, num_tokens), more)
        for num_tokens in range(1, table_blocks * group.tokens_per_block + 1)
        for more in range(num_tokens, (table_blocks + 2) * group.tokens_per_block)
    ]

    for num_tokens, end, more in growths:
        begin, after = one.growth(0, more, end)
        num_passed = one.num_passed(num_tokens, end, after)
        assert not num_passed or num_passed < after - begin, (num_tokens, more)
