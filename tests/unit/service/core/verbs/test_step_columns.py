"""Laws of the columns of Step: they agree with each other, or nothing is done."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from kvlease.errors import InvalidError
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.effects import Stepped
from kvleased.core.verbs.stepping import StepVerb
from tests.unit.service.core.builders import (
    WORKER,
    a_cache,
    answer,
    committed,
    ids,
    keys,
    reserve,
)
from tests.unit.service.core.grouped import FULL, WINDOW, cache_of

EXTEND, COMMIT, RELEASE = StepVerb.EXTEND, StepVerb.COMMIT, StepVerb.RELEASE


def columns(**changed: bytes) -> c.Step:
    """Return a step of two operations with some columns changed."""
    whole = {
        "verbs": bytes([EXTEND, COMMIT]),
        "lease_ids": bytes(16),
        "num_tokens": bytes(8),
        "num_keys": np.array([0, 1], np.int32).tobytes(),
        "first_blocks": bytes(8),
        "keys": keys(1),
    }
    return c.Step(worker_id=WORKER, **(whole | changed))  # type: ignore[arg-type]  # no reserves


@pytest.mark.parametrize(
    ("column", "packed", "need"),
    [
        pytest.param("lease_ids", bytes(15), 16, id="lease ids"),
        pytest.param("lease_ids", b"", 16, id="no lease ids"),
        pytest.param("num_tokens", bytes(4), 8, id="tokens"),
        pytest.param("num_keys", bytes(4), 8, id="key counts"),
        pytest.param("first_blocks", bytes(12), 8, id="first blocks"),
        pytest.param("keys", bytes(33), 32, id="ragged keys"),
        pytest.param("keys", keys(1, 2), 32, id="more keys than counted"),
        pytest.param("keys", b"", 32, id="fewer keys than counted"),
    ],
)
def test_columns_that_disagree_are_refused(column: str, packed: bytes, need: int) -> None:
    """Each column has one entry for each operation; the refusal names the column and both lengths."""
    with pytest.raises(InvalidError, match=column) as refusal:
        a_cache().handle(columns(**{column: packed}), 0.0)

    assert (refusal.value.resource, refusal.value.need) == (column, need)
    assert refusal.value.available == len(packed)


def test_keys_that_are_missing_are_counted() -> None:
    """The refusal says how many keys the counts add up to, and how many bytes each key has."""
    with pytest.raises(
        InvalidError, match=r"^keys has 0 bytes, but num_keys adds up to 1 key of 32 bytes$"
    ):
        a_cache().handle(columns(keys=b""), 0.0)


def test_one_verb_is_counted_in_the_singular() -> None:
    """The refusal of a step of one operation speaks of one verb, in the singular."""
    with pytest.raises(InvalidError, match=r"has 0 bytes, but 1 verb needs 8$"):
        a_cache().handle(c.Step(worker_id=WORKER, verbs=b"\1", lease_ids=b"", num_tokens=b""), 0.0)


def test_negative_key_counts_are_refused() -> None:
    """Negative key counts are refused, even if the sum is right."""
    counts = np.array([2, -1], np.int32).tobytes()

    with pytest.raises(
        InvalidError, match=r"^num_keys\[1\] is -1; it must be at least 0$"
    ) as refusal:
        a_cache().handle(columns(num_keys=counts), 0.0)

    assert (refusal.value.resource, refusal.value.need) == ("num_keys[1]", -1)


@pytest.mark.parametrize(
    ("verb", "name"), [(EXTEND, "an extend"), (RELEASE, "a release")], ids=["extend", "release"]
)
@pytest.mark.parametrize("column", ["num_keys", "first_blocks"])
@pytest.mark.parametrize(
    "make", [a_cache, partial(cache_of, FULL, WINDOW)], ids=["one group", "two groups"]
)
def test_keys_beside_another_verb_than_commit_are_refused(
    verb: StepVerb, name: str, column: str, make: Callable[[], Cache]
) -> None:
    """An extend or a release with keys or a first block is refused and changes nothing; the others are done."""
    cache = make()
    leases = [reserve(cache, 1, each) for each in "ab"]
    given = {column: np.array([1, 0], np.int32).tobytes()}
    command = c.Step(
        worker_id=WORKER,
        verbs=bytes([verb, EXTEND]),
        lease_ids=np.array([one.lease_id for one in leases], np.int64).tobytes(),
        num_tokens=np.array([12, 12], np.int32).tobytes(),
        keys=keys(1) if column == "num_keys" else b"",
        **given,
    )

    reply = answer(cache.handle(command, 0.0), Stepped)

    assert ids(reply.codes) == [InvalidError.number, 0]
    ((at, error),) = reply.errors
    assert (at, error.resource, error.need, error.limit) == (0, f"{column}[0]", 1, 0)
    assert str(error) == f"{column}[0] is 1; {name} uses none, only a commit does; send 0 there"
    added = np.frombuffer(reply.num_blocks, np.int32).reshape(2, -1)
    assert (added[0].sum(), cache.census().num_leases) == (0, 2)
    assert added[1].sum() > 0
    assert cache.check() == []


def test_malformed_step_changes_nothing() -> None:
    """A step is checked as a whole before any of it is done."""
    cache = a_cache()
    lease = reserve(cache, 1)
    command = c.Step(
        worker_id=WORKER,
        verbs=bytes([RELEASE]),
        lease_ids=np.array([lease.lease_id], np.int64).tobytes(),
        num_tokens=bytes(4),
        keys=keys(1),
    )

    with pytest.raises(InvalidError):
        cache.handle(command, 0.0)

    assert cache.census().num_leases == 1


def test_optional_columns_may_be_left_out() -> None:
    """Without commits there are no keys and no first blocks."""
    cache = a_cache()
    lease = committed(cache, keys(1))
    command = c.Step(
        worker_id=WORKER,
        verbs=bytes([EXTEND]),
        lease_ids=np.array([lease.lease_id], np.int64).tobytes(),
        num_tokens=np.array([8], np.int32).tobytes(),
    )

    reply = answer(cache.handle(command, 0.0), Stepped)

    assert ids(reply.num_blocks) == [1]
