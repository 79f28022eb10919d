"""Laws of the list of waiting calls: all of them, by id, with what each needs and why it is not served yet."""

from dataclasses import fields, replace

from kvleased.core.views.waiting_list import WaitingFacts
from tests.unit.service.core.builders import (
    MATE,
    STRANGER,
    WAIT_MS,
    WORKER,
    a_cache,
    a_reload,
    a_reserve,
    an_extend,
    evicted,
    keys,
    release,
    reserve,
    wait_for,
)


def test_waiting_call_is_listed_with_what_it_needs() -> None:
    """The list tells who waits for what, for how long already, and for how long yet."""
    cache = a_cache(4)
    reserve(cache, 3)
    ticket = wait_for(cache, 2, "r", worker_id=MATE)

    (listed,) = cache.list_waiting(0, 8, now=1.5)

    assert listed == WaitingFacts(
        call_id=ticket,
        worker_id=MATE,
        verb="reserve",
        position=0,
        priority=1,
        num_blocks=2,
        available_blocks=1,
        reason="blocks",
        age_seconds=1.5,
        left_seconds=3.5,
    )


def test_list_says_who_comes_first() -> None:
    """A position is that in the order in which calls are served, which may differ from the order of ids."""
    cache = a_cache(4)
    lease = evicted(cache, keys(1, 2))
    running = reserve(cache, 3, "running")
    wait_for(cache, 2, "new")
    cache.handle(a_reload(lease.lease_id), 0.0)
    cache.handle(an_extend(running.lease_id, 4, wait_ms=WAIT_MS), 0.0)
    cache.handle(a_reserve(4, "last", wait_ms=WAIT_MS), 0.0)

    listed = cache.list_waiting(0, 8, now=0.0)

    assert [(one.verb, one.position, one.priority, one.reason) for one in listed] == [
        ("reserve", 1, 1, "position"), ("reload", 0, 2, "blocks"), ("reserve", 2, 1, "position"),
    ]  # fmt: skip


def test_list_tells_the_class_that_a_call_has_come_to() -> None:
    """A request that has waited for long enough is listed in the higher class in which it is served."""
    cache = a_cache(4)
    reserve(cache, 4)
    low = replace(a_reserve(1, "r", wait_ms=60_000), priority=0)
    cache.handle(low, 0.0)

    listed = [cache.list_waiting(0, 8, now=now)[0].priority for now in (0.0, 5.0, 10.0)]

    assert listed == [0, 1, 2]


def test_list_tells_what_each_call_waits_for() -> None:
    """The list tells calls that wait for copies, or for rows of the block table, from those that wait for blocks."""
    scrubbing = a_cache(4)
    release(scrubbing, reserve(scrubbing, 4, worker_id=STRANGER).lease_id, worker_id=STRANGER)
    full = a_cache(4, max_leases=1)
    reserve(full, 1)
    for cache, reason in ((scrubbing, "copies"), (full, "leases")):
        wait_for(cache, 2, "r")

        assert [one.reason for one in cache.list_waiting(0, 8, now=0.0)] == [reason]


def test_overdue_call_has_no_time_left() -> None:
    """An overdue call has no time left, and no call has waited for less than no time."""
    cache = a_cache(4)
    reserve(cache, 4)
    wait_for(cache, 1, "r")

    (listed,) = cache.list_waiting(0, 8, now=99.0)

    assert (listed.age_seconds, listed.left_seconds) == (99.0, 0.0)


def test_pages_are_all_calls_by_id() -> None:
    """Each page begins after the last id of the one before."""
    cache = a_cache(4)
    reserve(cache, 4)
    tickets = [wait_for(cache, 1, name) for name in "abcd"]

    first = cache.list_waiting(0, 3, now=0.0)
    second = cache.list_waiting(first[-1].call_id, 3, now=0.0)

    assert [one.call_id for one in (*first, *second)] == tickets
    assert {one.worker_id for one in first} == {WORKER}


def test_list_tells_neither_keys_nor_tokens() -> None:
    """The list tells neither keys nor tokens, which are nobody else's business."""
    names = {field.name for field in fields(WaitingFacts)}

    assert names.isdisjoint({"keys", "key", "token_ids", "request", "request_id"})
