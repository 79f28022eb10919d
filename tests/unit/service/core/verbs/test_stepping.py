"""Laws of Step: each operation succeeds alone or changes nothing, and none stops the others."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from kvlease.errors import KVLeaseError, PoolFullError, UnknownWorkerError
from kvlease.ids import LeaseId, WorkerId
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.states import State
from kvleased.core.effects import Reserved, Stepped
from kvleased.core.verbs.stepping import ERRORS_MAX, StepVerb
from tests.unit.service.core.builders import (
    LEASE_SECONDS,
    MATE,
    STRANGER,
    TOKENS_PER_BLOCK,
    WAIT_MS,
    WORKER,
    a_cache,
    a_full_cache,
    a_reserve,
    an_extend,
    answer,
    assert_holds_no_frame,
    cached,
    commit,
    evict,
    evicted,
    found,
    ids,
    keys,
    on_host,
    records,
    release,
    reserve,
    states,
    tick,
)

EXTEND, COMMIT, RELEASE = StepVerb.EXTEND, StepVerb.COMMIT, StepVerb.RELEASE
INVALID, NEVER_FITS, POOL_FULL, UNKNOWN_LEASE, NOT_YOURS, WRONG_STATE = 1, 2, 3, 8, 13, 16

Operation = tuple[int, LeaseId, int, int, bytes]
"""Verb, lease, token count, first block and keys."""


def grow(lease: Reserved, num_blocks: int) -> Operation:
    """Return the operation that makes a lease cover some blocks in all."""
    return EXTEND, lease.lease_id, num_blocks * TOKENS_PER_BLOCK, 0, b""


def publish(lease: Reserved, packed: bytes, first_block: int = 0) -> Operation:
    """Return the operation that commits a lease's blocks."""
    last = first_block + len(packed) // 32
    return COMMIT, lease.lease_id, last * TOKENS_PER_BLOCK, first_block, packed


def end(lease: Reserved) -> Operation:
    """Return the operation that releases a lease."""
    return RELEASE, lease.lease_id, 0, 0, b""


def a_step(
    *operations: Operation, reserves: Iterable[c.Reserve] = (), worker_id: WorkerId = WORKER
) -> c.Step:
    """Return the command of one scheduler step."""
    verbs, lease_ids, num_tokens, first_blocks, packed = (
        zip(*operations, strict=True) if operations else ((), (), (), (), ())
    )
    return c.Step(
        worker_id=worker_id,
        verbs=bytes(verbs),
        lease_ids=np.array(lease_ids, np.int64).tobytes(),
        num_tokens=np.array(num_tokens, np.int32).tobytes(),
        num_keys=np.array([len(one) // 32 for one in packed], np.int32).tobytes(),
        first_blocks=np.array(first_blocks, np.int32).tobytes(),
        keys=b"".join(packed),
        reserves=tuple(reserves),
    )


def step(
    cache: Cache, *operations: Operation, reserves: Iterable[c.Reserve] = (), now: float = 0.0
) -> Stepped:
    """Carry out one scheduler step, and assert that its refusals hold no frame."""
    stepped = answer(cache.handle(a_step(*operations, reserves=reserves), now), Stepped)
    for refused in (*(error for _, error in stepped.errors), *stepped.reserves):
        if isinstance(refused, KVLeaseError):
            assert_holds_no_frame(refused)
    return stepped


def release_to_another(cache: Cache, lease_id: LeaseId) -> None:
    """End a lease, and give its row to a new one."""
    release(cache, lease_id)
    reserve(cache, 1, "another")


# Operations -----------------------------------------------------------------------------------------------------------


def test_empty_step_does_nothing() -> None:
    """A step may have nothing to do."""
    assert step(a_cache()) == Stepped(codes=b"", num_blocks=b"", block_ids=b"", reserves=())


def test_step_does_what_single_calls_do() -> None:
    """All kinds of operations and reserves fit in one step, and the answer has the result of each."""
    cache = a_cache()
    first, second, third = (reserve(cache, 1, name) for name in "abc")

    reply = step(
        cache,
        grow(first, 3),
        publish(second, keys(1)),
        end(third),
        reserves=[a_reserve(2, "d", keys(1))],
    )

    assert ids(reply.codes) == [0, 0, 0]
    assert ids(reply.num_blocks) == [2, 0, 0]
    assert len(ids(reply.block_ids)) == 2
    (lease,) = reply.reserves
    assert isinstance(lease, Reserved)
    assert lease.device_hit_tokens == TOKENS_PER_BLOCK
    assert cache.check() == []


def test_extends_of_one_step_get_blocks_of_their_own() -> None:
    """The added blocks are listed in the order of the operations, and each lease gets its own."""
    cache = a_cache()
    first, second = reserve(cache, 1, "a"), reserve(cache, 1, "b")

    reply = step(cache, grow(first, 3), grow(second, 2))

    added, table = ids(reply.block_ids), records(cache).rows.block_ids
    assert ids(reply.num_blocks) == [2, 1]
    assert table[first.row, 1:3].tolist() == added[:2]
    assert table[second.row, 1:2].tolist() == added[2:]
    assert cache.check() == []


def test_leases_whose_ids_end_alike_are_told_apart() -> None:
    """A lease is found even if another one, whose id has the same lower bits, has taken its place."""
    cache = a_cache()
    first = reserve(cache, 1, "first")
    second = reserve(cache, 1, "second")
    while (second.lease_id - first.lease_id) % 64:
        release(cache, second.lease_id)
        second = reserve(cache, 1, "second")

    reply = step(cache, grow(first, 3), grow(second, 2))

    added, table = ids(reply.block_ids), records(cache).rows.block_ids
    assert ids(reply.num_blocks) == [2, 1]
    assert [*table[first.row, 1:3], *table[second.row, 1:2]] == added
    assert cache.check() == []


def test_extends_of_a_step_are_shown_to_kernels_where_leases_are_mapped() -> None:
    """Kernels read the blocks that a step adds to a mapped lease, and none of an unmapped one."""
    cache = a_cache()
    mapped, other = reserve(cache, 1, "a"), reserve(cache, 1, "b")
    cache.handle(c.Map(worker_id=WORKER, lease_id=mapped.lease_id), 0.0)

    reply = step(cache, grow(mapped, 2), grow(other, 2))

    kernel_rows = records(cache).kernel_rows
    assert kernel_rows.num_published[[mapped.row, other.row], 0].tolist() == [2, 0]
    shown = kernel_rows.kernel_ids[mapped.row, :2].tolist()
    assert shown == [*ids(mapped.block_ids), ids(reply.block_ids)[0]]


def test_extend_of_what_is_covered_adds_nothing() -> None:
    """An extend to a token that the lease covers already, which most operations ask for, adds nothing."""
    cache = a_cache()
    lease = reserve(cache, 2)

    reply = step(cache, grow(lease, 1), grow(lease, 2))

    assert (ids(reply.codes), ids(reply.num_blocks)) == ([0, 0], [0, 0])


def test_one_lease_extended_twice_grows_twice() -> None:
    """Two extends of one lease in a step are done one after the other."""
    cache = a_cache()
    lease = reserve(cache, 1)

    reply = step(cache, grow(lease, 2), grow(lease, 4))

    assert ids(reply.num_blocks) == [1, 2]
    assert records(cache).rows.num_blocks[lease.row] == 4
    assert cache.check() == []


def test_extend_evicts_as_a_single_call_does() -> None:
    """If free blocks do not suffice, cached ones make room."""
    cache = a_full_cache(4)
    lease = reserve(cache, 1)

    reply = step(cache, grow(lease, 3))

    assert (ids(reply.codes), ids(reply.num_blocks)) == ([0], [2])
    assert cache.check() == []


def test_refused_operation_stops_no_other() -> None:
    """Each operation has its own code; a refused one changes nothing."""
    cache = a_cache(4)
    first, second = reserve(cache, 2, "a"), reserve(cache, 1, "b")

    reply = step(cache, grow(first, 4), grow(second, 2), publish(first, keys(1)))

    assert ids(reply.codes) == [POOL_FULL, 0, 0]
    assert ids(reply.num_blocks) == [0, 1, 0]
    assert found(cache, keys(1)) == (1, 0)
    assert cache.check() == []


def test_refused_operation_says_why() -> None:
    """A step's refusal has the message and the figures of a single call's refusal, but not who holds the pool."""
    cache = a_cache(4)
    first, second = reserve(cache, 2, "a"), reserve(cache, 1, "b")
    with pytest.raises(PoolFullError) as alone:
        cache.handle(an_extend(first.lease_id, 4), 0.0)

    reply = step(
        cache, grow(second, 1), grow(first, 4), (9, first.lease_id, 4, 0, b""), grow(first, -1)
    )

    assert [(at, error.code) for at, error in reply.errors] == [
        (1, "POOL_FULL"), (2, "INVALID"), (3, "INVALID"),
    ]  # fmt: skip
    full, verb, tokens = (error for _, error in reply.errors)
    names = ("resource", "need", "available", "limit", "retry_after_ms", "rule", "message")
    assert [getattr(full, name) for name in names] == [getattr(alone.value, name) for name in names]
    assert (full.need, full.available, full.holdings, full.remedies) == (2, 1, (), ())
    assert (verb.resource, tokens.message) == ("verbs", "num_tokens is -4; it must be at least 1")
    assert alone.value.holdings


def test_step_says_of_the_first_refusals_alone_why() -> None:
    """However many operations are refused, a step explains only the first ones; the others have codes alone."""
    cache = a_cache(4)
    lease = reserve(cache, 2)

    reserve(cache, 1, "another")

    reply = step(cache, *[grow(lease, 4)] * (ERRORS_MAX + 9))

    assert ids(reply.codes) == [POOL_FULL] * (ERRORS_MAX + 9)
    assert [at for at, _ in reply.errors] == list(range(ERRORS_MAX))


def test_release_makes_room_for_later_operations() -> None:
    """Operations are done in order."""
    cache = a_cache(2)
    first, second = reserve(cache, 1, "a"), reserve(cache, 1, "b")

    reply = step(cache, end(first), grow(second, 2))
    refused = step(cache, grow(second, 3), end(second))

    assert ids(reply.codes) == [0, 0]
    assert ids(refused.codes) == [NEVER_FITS, 0]


@pytest.mark.parametrize("num_blocks", [1, 3], ids=["covered", "growing"])
def test_released_lease_is_not_extended(num_blocks: int) -> None:
    """An extend after a release of the same lease is refused, and gets no block."""
    cache = a_cache()
    lease = reserve(cache, 1)

    reply = step(cache, end(lease), grow(lease, num_blocks))

    assert ids(reply.codes) == [0, UNKNOWN_LEASE]
    assert reply.block_ids == b""
    assert cache.check() == []


def test_lease_is_extended_before_its_release() -> None:
    """An extend before a release of the same lease is done, and its blocks end with the lease."""
    cache = a_cache()
    lease = reserve(cache, 1)

    reply = step(cache, grow(lease, 3), end(lease))

    assert ids(reply.num_blocks) == [2, 0]
    assert cache.census().device["free"] == 8


def test_keys_belong_to_their_operations() -> None:
    """Keys are in the order of the operations, including those of a refused one."""
    cache = a_cache()
    first, second = reserve(cache, 1, "a"), reserve(cache, 3, "b")

    reply = step(
        cache,
        publish(first, keys(1, 2)),
        grow(second, 3),
        publish(second, keys(3)),
        publish(second, keys(4, 5), first_block=1),
    )

    assert ids(reply.codes) == [INVALID, 0, 0, 0]
    assert found(cache, keys(3, 4, 5)) == (3, 0)
    assert found(cache, keys(1)) == found(cache, keys(2)) == (0, 0)


@pytest.mark.parametrize(
    ("lease_id", "num_tokens", "code"),
    [
        pytest.param(None, 0, INVALID, id="no tokens"),
        pytest.param(None, -5, INVALID, id="negative tokens"),
        pytest.param(None, -(2**31), INVALID, id="the least number there is"),
        pytest.param(None, 1000, NEVER_FITS, id="never fits"),
        pytest.param(LeaseId(99), 8, UNKNOWN_LEASE, id="unknown lease"),
    ],
)
def test_extend_is_refused_as_a_single_call_is(
    lease_id: LeaseId | None, num_tokens: int, code: int
) -> None:
    """An operation's code is that of the error that a single call raises."""
    cache = a_cache()
    lease = reserve(cache, 1)

    reply = step(cache, (EXTEND, lease_id or lease.lease_id, num_tokens, 0, b""))

    assert ids(reply.codes) == [code]
    assert cache.check() == []


def test_step_of_another_workers_lease_is_refused() -> None:
    """Only its owner can extend a lease, in a step too."""
    cache = a_cache()
    lease = reserve(cache, 1, worker_id=MATE)

    reply = step(cache, grow(lease, 1), grow(lease, 2), publish(lease, keys(1)), end(lease))

    assert ids(reply.codes) == [NOT_YOURS] * 4
    assert states(cache, lease.block_ids) == {State.RESERVED}


def test_step_of_an_evicted_lease_is_refused() -> None:
    """A lease in the host pool cannot go on before it is reloaded."""
    cache = a_cache()
    lease = evicted(cache, keys(1))

    assert ids(step(cache, grow(lease, 1)).codes) == [WRONG_STATE]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param(release, UNKNOWN_LEASE, id="released"),
        pytest.param(evict, WRONG_STATE, id="evicted"),
        pytest.param(release_to_another, UNKNOWN_LEASE, id="another has its row"),
    ],
)
def test_repeated_step_sees_what_became_of_its_leases(
    change: Callable[[Cache, LeaseId], object], code: int
) -> None:
    """A step works on the present state of its leases, even if the last step named the same ones."""
    cache = a_cache()
    lease = reserve(cache, 1)
    assert ids(step(cache, grow(lease, 1)).codes) == [0]

    change(cache, lease.lease_id)

    assert ids(step(cache, grow(lease, 1)).codes) == [code]
    assert ids(step(cache, grow(lease, 2)).codes) == [code]
    assert cache.check() == []


def test_step_revives_a_quarantined_lease() -> None:
    """An extend in a step proves that its worker is alive."""
    cache = a_cache()
    lease = reserve(cache, 1)
    tick(cache, LEASE_SECONDS)

    reply = step(cache, grow(lease, 2), now=LEASE_SECONDS)

    assert ids(reply.num_blocks) == [1]
    assert states(cache, lease.block_ids) == {State.RESERVED}
    assert cache.check() == []


def test_step_does_not_overtake_waiting_extends() -> None:
    """While another running request waits for blocks, a step gets none of them."""
    cache = a_cache(4)
    first, second = reserve(cache, 2, "a"), reserve(cache, 1, "b")
    cache.handle(
        c.Extend(worker_id=WORKER, lease_id=first.lease_id, num_tokens=16, wait_ms=WAIT_MS), 0.0
    )

    assert ids(step(cache, grow(second, 2)).codes) == [POOL_FULL]


def test_step_overtakes_waiting_reserves() -> None:
    """A running request is extended even if new requests wait."""
    cache = a_cache(4)
    lease = reserve(cache, 2)
    cache.handle(a_reserve(4, "new", wait_ms=WAIT_MS), 0.0)

    assert ids(step(cache, grow(lease, 3)).num_blocks) == [1]
    assert cache.check() == []


def test_unknown_verb_is_refused_alone() -> None:
    """An operation with an unknown verb is refused; the others are done."""
    cache = a_cache()
    lease = reserve(cache, 1)

    reply = step(cache, (9, lease.lease_id, 4, 0, b""), grow(lease, 2))

    assert (ids(reply.codes), ids(reply.num_blocks)) == ([INVALID, 0], [0, 1])


def test_released_lease_may_be_released_again() -> None:
    """A second release succeeds, as in a single call."""
    cache = a_cache()
    lease = reserve(cache, 1)

    assert ids(step(cache, end(lease), end(lease)).codes) == [0, 0]


def test_release_does_not_look_at_a_number_of_tokens() -> None:
    """A caller may leave in its column what it has there for a lease, also below 0."""
    cache = a_cache()
    operations = [(RELEASE, reserve(cache, 1).lease_id, tokens, 0, b"") for tokens in (17, -1)]

    assert ids(step(cache, *operations).codes) == [0, 0]


def test_tenants_extend_only_over_their_own_bytes() -> None:
    """A step grants no block that has another tenant's bytes."""
    cache = a_cache(2, num_slots=0)
    lease = reserve(cache, 1)
    cached(cache, keys(1), worker_id=STRANGER)
    cache.handle(c.Evict(num_blocks=1), 0.0)

    assert ids(step(cache, grow(lease, 2)).codes) == [POOL_FULL]


def test_step_of_an_unknown_worker_is_refused() -> None:
    """Nothing is done for a worker that is not attached."""
    with pytest.raises(UnknownWorkerError):
        a_cache().handle(a_step(worker_id=WorkerId(99)), 0.0)


def test_step_commit_equals_single_commit() -> None:
    """A block that is committed in a step has the same entry as one committed by a single call."""
    alone, stepped = a_cache(), a_cache()
    lease = reserve(alone, 2)
    commit(alone, lease.lease_id, keys(1, 2))

    step(stepped, publish(reserve(stepped, 2), keys(1, 2)))

    assert (records(alone).device.seal == records(stepped).device.seal).all()


# Reserves -------------------------------------------------------------------------------------------------------------


def test_reserves_of_a_step_are_granted_or_refused_one_by_one() -> None:
    """A refused reserve says why, and does not stop the next one."""
    cache = a_cache(4)

    reply = step(
        cache, reserves=[a_reserve(3, "a"), a_reserve(2, "b"), a_reserve(1, "c"), a_reserve(9, "d")]
    )

    assert [type(one).__name__ for one in reply.reserves] == [
        "Reserved",
        "PoolFullError",
        "Reserved",
        "NeverFitsError",
    ]
    assert cache.check() == []


def test_refused_reserve_of_a_step_has_its_numbers() -> None:
    """Inside a step, too, a refusal says what was needed and what there was."""
    (refusal,) = step(a_cache(1), reserves=[a_reserve(1, "a"), a_reserve(1, "b")]).reserves[1:]

    assert isinstance(refusal, PoolFullError)
    assert (refusal.need, refusal.available) == (1, 0)
    assert isinstance(refusal, KVLeaseError)


def test_reserve_sees_what_the_step_committed() -> None:
    """Reserves come after the operations, so they find what the same step committed."""
    cache = a_cache()
    lease = reserve(cache, 1)

    (second,) = step(cache, publish(lease, keys(1)), reserves=[a_reserve(1, "b", keys(1))]).reserves

    assert isinstance(second, Reserved)
    assert second.block_ids == lease.block_ids


def test_reserve_of_a_step_does_not_wait_for_the_host_pool() -> None:
    """A step is answered at once, so it uses only what is on the device."""
    cache = a_cache()
    on_host(cache, keys(1))

    (lease,) = step(cache, reserves=[a_reserve(1, "a", keys(1))]).reserves

    assert isinstance(lease, Reserved)
    assert (lease.device_hit_tokens, lease.host_hit_tokens) == (0, 0)
