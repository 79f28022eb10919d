"""Laws of the columns of Step: they agree with each other, or nothing is done."""

import numpy as np
import pytest

from kvlease.errors import InvalidError
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
    """Columns have one entry an operation; the refusal names the column and both lengths."""
    with pytest.raises(InvalidError, match=column) as refusal:
        a_cache().handle(columns(**{column: packed}), 0.0)

    assert (refusal.value.resource, refusal.value.need) == (column, need)
    assert refusal.value.available == len(packed)


def test_keys_that_are_missing_are_counted() -> None:
    """How many keys were named, and how many bytes each has."""
    with pytest.raises(
        InvalidError, match=r"^keys has 0 bytes, but num_keys adds up to 1 key of 32$"
    ):
        a_cache().handle(columns(keys=b""), 0.0)


def test_one_verb_is_counted_in_the_singular() -> None:
    """A step of one operation is told what one verb takes."""
    with pytest.raises(InvalidError, match=r"has 0 bytes, but 1 verb takes 8$"):
        a_cache().handle(c.Step(worker_id=WORKER, verbs=b"\1", lease_ids=b"", num_tokens=b""), 0.0)


def test_negative_key_counts_are_refused() -> None:
    """Counts that cancel each other out are not believed."""
    counts = np.array([2, -1], np.int32).tobytes()

    with pytest.raises(
        InvalidError, match=r"^num_keys\[1\] is -1; it must be at least 0$"
    ) as refusal:
        a_cache().handle(columns(num_keys=counts), 0.0)

    assert (refusal.value.resource, refusal.value.need) == ("num_keys[1]", -1)


def test_malformed_step_changes_nothing() -> None:
    """A step is read whole before any of it is done."""
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
