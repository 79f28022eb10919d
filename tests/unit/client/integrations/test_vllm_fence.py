"""Own the laws of the fence: a write is done when its step is back, and only a block nobody finds is overwritten."""

import pytest

from kvlease.integrations.vllm.fence import (
    Fence,
    Ledger,
    Published,
    Retracted,
    Standing,
    unpacked_keys,
)

KEYS = [bytes([number]) * 32 for number in range(1, 9)]
PRIVATE = bytes(32)


def ledger(*private: int, **held: bytes) -> Ledger:
    """Return an account of eight blocks; `held` gives the keys of some, such as b3=KEYS[0]."""
    made = Ledger(8)
    made.take(private)
    for name, key in held.items():
        made.hold(int(name[1:]), key)
    return made


def test_write_is_done_when_its_step_is_back() -> None:
    """A noted write belongs to the step that goes out next."""
    fence = Fence()
    fence.note(3, b"a", position=5)
    step_id = fence.dispatch()

    assert fence.written(9) == []
    assert not fence.has_written

    fence.came_back(step_id)

    assert [(one.block_id, one.name, one.position) for one in fence.written(9)] == [(3, b"a", 5)]
    assert fence.has_written


def test_write_noted_after_a_dispatch_waits_for_the_next_step() -> None:
    """A step under way proves nothing about writes that are scheduled meanwhile."""
    fence = Fence()
    first = fence.dispatch()
    fence.note(3, b"a")
    fence.came_back(first)

    assert fence.written(9) == []
    assert fence.is_quiet

    second = fence.dispatch()
    assert not fence.is_quiet
    fence.came_back(second)

    assert len(fence.written(9)) == 1


def test_older_steps_are_back_with_a_newer_one() -> None:
    """Ranks carry steps out in order, and one answer may stand for several steps."""
    fence = Fence()
    fence.note(1, b"a")
    fence.dispatch()
    fence.note(2, b"b")
    fence.came_back(fence.dispatch())

    assert [one.block_id for one in fence.written(9)] == [1, 2]
    assert [one.block_id for one in fence.written(1)] == [1]


@pytest.mark.parametrize("step_id", [0, -1, 2, 99], ids=str)
def test_step_that_was_never_dispatched_proves_nothing(step_id: int) -> None:
    """A step that was never sent out, or has come back already, proves nothing."""
    fence = Fence()
    fence.note(1, b"a")
    fence.dispatch()

    fence.came_back(step_id)

    assert fence.written(9) == []
    assert fence.returned_id == 0


def test_step_that_comes_back_late_takes_nothing_back() -> None:
    """The newest step that is back counts."""
    fence = Fence()
    fence.dispatch()
    fence.came_back(fence.dispatch())

    fence.came_back(1)

    assert fence.returned_id == 2


def test_cancelled_write_is_never_done() -> None:
    """A block that will hold something else is not published under its old key."""
    fence = Fence()
    fence.note(1, b"a")
    step_id = fence.dispatch()

    assert fence.cancel(1)
    assert not fence.cancel(1)
    fence.came_back(step_id)

    assert fence.written(9) == []
    assert len(fence) == 0


def test_block_noted_again_waits_for_its_new_step() -> None:
    """A block that is noted again has its old note cancelled, even if that note's step is back."""
    fence = Fence()
    fence.note(1, b"a")
    first = fence.dispatch()
    fence.note(1, b"b")
    fence.came_back(first)

    assert fence.written(9) == []

    fence.came_back(fence.dispatch())

    assert [one.name for one in fence.written(9)] == [b"b"]


def test_block_that_holds_its_content_already_is_done_behind_what_waits() -> None:
    """A block that holds its content already needs no step, but writes are settled in the order of their notes."""
    fence = Fence()
    fence.note(1, b"a")
    fence.note_written(2, b"b")
    assert fence.written(9) == []

    fence.came_back(fence.dispatch())

    assert [one.block_id for one in fence.written(9)] == [1, 2]


def test_settled_writes_are_gone() -> None:
    """Each write is settled once."""
    fence = Fence()
    fence.note_written(1, b"a")
    fence.note_written(2, b"b")

    fence.settle(1)

    assert 1 not in fence
    assert 2 in fence
    fence.cancel_all()
    assert repr(fence) == "<Fence 0 of 0 steps back, 0 writes>"


def test_only_private_blocks_may_be_overwritten() -> None:
    """Absent, findable and doubtful blocks may not be overwritten."""
    account = ledger(1, 2, b3=KEYS[0])
    account.send_publish(2, KEYS[1])

    assert [block for block in range(8) if account.is_private(block)] == [1]
    assert account[0] is Standing.ABSENT
    assert account[2] is Standing.DOUBTFUL
    assert account[3] is Standing.FINDABLE
    assert account.has_doubt
    assert repr(account) == "<Ledger 5 absent, 1 private, 1 findable, 1 doubtful, 0 stale>"


@pytest.mark.parametrize(
    ("answer", "standing", "key"),
    [
        pytest.param(Published.FINDABLE, Standing.FINDABLE, KEYS[0], id="findable"),
        pytest.param(Published.DUPLICATE, Standing.PRIVATE, None, id="duplicate"),
        pytest.param(Published.NOT_PRIVATE, Standing.DOUBTFUL, KEYS[0], id="not-private"),
    ],
)
def test_publish_ends_as_it_is_answered(
    answer: Published, standing: Standing, key: bytes | None
) -> None:
    """An answer that cannot be leaves the block doubtful until an inventory."""
    account = ledger(1)
    account.send_publish(1, KEYS[0])

    account.heard_publish(1, answer)

    assert account[1] is standing
    assert account.key_of(1) == key
    assert account.block_of(KEYS[0]) == (1 if standing is Standing.FINDABLE else None)


@pytest.mark.parametrize(
    ("answer", "standing"),
    [
        pytest.param(Retracted.PRIVATE, Standing.PRIVATE, id="private"),
        pytest.param(Retracted.HELD_ELSEWHERE, Standing.FINDABLE, id="held"),
        pytest.param(Retracted.NOT_FINDABLE, Standing.DOUBTFUL, id="not-findable"),
    ],
)
def test_retract_ends_as_it_is_answered(answer: Retracted, standing: Standing) -> None:
    """Only the daemon's answer makes a findable block private."""
    account = ledger(b3=KEYS[0])
    account.send_retract(3)
    assert not account.is_private(3)

    account.heard_retract(3, answer)

    assert account[3] is standing


def test_inventory_ends_doubt_either_way() -> None:
    """A publish or a retract whose answer was lost may have been carried out or not; the inventory tells which."""
    for carried_out in (False, True):
        account = ledger(1, b3=KEYS[3])
        account.send_publish(1, KEYS[1])
        account.send_retract(3)

        keys = [KEYS[1], PRIVATE] if carried_out else [PRIVATE, KEYS[3]]
        account.reconcile([1, 3], keys)

        assert not account.has_doubt
        assert account.stale == set()
        assert account.is_private(3) is carried_out
        assert account.is_private(1) is not carried_out


def test_block_found_under_a_key_that_is_not_its_own_becomes_stale() -> None:
    """A block under a wrong or unknown key was overwritten: it is no hit, and is retracted first."""
    account = ledger(1, b2=KEYS[2], b3=KEYS[3])
    account.overwrite(2)

    account.reconcile([1, 2, 3], [KEYS[7], KEYS[2], KEYS[3]])

    assert account.stale == {1, 2}
    assert account.block_of(KEYS[2]) is None
    assert account[3] is Standing.FINDABLE
    account.send_retract(2)
    account.heard_retract(2, Retracted.PRIVATE)
    assert account.stale == {1}


def test_overwritten_private_block_is_not_stale() -> None:
    """A private block is never found, so overwriting it does not make it stale."""
    account = ledger(1)

    account.overwrite(1)

    assert account.stale == set()
    assert account.is_private(1)


def test_block_missing_from_the_inventory_is_absent() -> None:
    """A block that is missing from the inventory belongs to somebody else."""
    account = ledger(1, 2, b3=KEYS[3])

    account.reconcile([2], [PRIVATE])

    assert account.ids(Standing.ABSENT) == [0, 1, 3, 4, 5, 6, 7]
    assert account.count(Standing.PRIVATE) == 1


def test_block_of_which_nothing_is_known_must_not_be_overwritten() -> None:
    """An engine that got no inventory at its start may take no block for its own."""
    account = Ledger(3)

    account.doubt_all()

    assert [account[block] for block in range(3)] == [
        Standing.ABSENT,
        Standing.DOUBTFUL,
        Standing.DOUBTFUL,
    ]


def test_key_moves_to_the_block_that_got_it_last() -> None:
    """Dropping the earlier block's key leaves the key of the later block."""
    account = ledger(b1=KEYS[0], b2=KEYS[0])

    account.outdate(1)

    assert account.block_of(KEYS[0]) == 2
    assert account.stale == {1}


def test_packed_keys_are_split() -> None:
    """Each packed key has 32 bytes."""
    assert unpacked_keys(b"".join(KEYS)) == KEYS
