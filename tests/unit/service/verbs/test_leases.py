"""Laws of the verbs on leases: a request becomes the core's command, and the core's reply becomes the response."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvlease.errors import InvalidError, UnknownWorkerError
from kvlease.ids import LeaseId
from kvlease.keys import BlockKeys
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.calls import checks
from kvleased.config.settings import Settings
from kvleased.core import commands as c
from kvleased.core import effects as e

from .scripted import WORKER, hybrid_plan, lease_verbs

IDS = b"\1\0\0\0\2\0\0\0"
COUNTS = b"\1\0\0\0\1\0\0\0"
GRANTED = e.Reserved(
    lease_id=LeaseId(5), block_ids=IDS, device_hit_tokens=0, host_hit_tokens=0, row=3, covered_tokens=8
)  # fmt: skip
STRANGER = Caller(transport="local", token="nobody's")


def asked(verb: str, request: Any, reply: Any) -> Any:
    """Return the command that a request becomes."""
    verbs, runner = lease_verbs(reply)
    verbs.table[verb](request, WORKER)
    return runner.commands[0]


def told(verb: str, request: Any, reply: Any) -> Any:
    """Return the response that a reply becomes."""
    verbs, _ = lease_verbs(reply)
    return verbs.table[verb](request, WORKER)


FORK = pb.ForkRequest(lease_id=5, request_id="child", num_tokens=12, wait_ms=7)
TRIM = pb.TrimRequest(lease_id=5, num_tokens=12)
RESERVE = pb.ReserveRequest(request_id="r", num_tokens=8)


def test_fork_asks_for_a_second_lease() -> None:
    """The core gets lease, request, tokens and time to wait, and answers with a lease like any other."""
    reply = e.Forked(lease=replace(GRANTED, num_blocks=COUNTS), num_shared=1, num_copied=2)

    command, response = asked("fork", FORK, reply), told("fork", FORK, reply)

    assert (command.lease_id, command.request_id) == (5, "child")
    assert (command.num_tokens, command.wait_ms) == (12, 7)
    assert (response.num_shared, response.num_copied) == (1, 2)
    assert (response.lease.lease_id, response.lease.num_blocks) == (5, COUNTS)


def test_fork_waits_as_long_as_copies_may_take() -> None:
    """A fork without a time to wait waits as long as evict and reload do."""
    request = pb.ForkRequest(lease_id=5, request_id="child", num_tokens=12)

    command = asked("fork", request, e.Forked(lease=GRANTED, num_shared=0, num_copied=0))

    assert command.wait_ms == Settings().copy_wait_ms


def test_trim_asks_for_the_tokens_that_stay() -> None:
    """The core gets lease and tokens, and answers with the blocks that it took back."""
    reply = e.Trimmed(num_given_back=3)

    command, response = asked("trim", TRIM, reply), told("trim", TRIM, reply)

    assert (command.lease_id, command.num_tokens) == (5, 12)
    assert response == pb.TrimResponse(num_given_back=3)


@pytest.mark.parametrize(
    ("verb", "request_", "field"),
    [
        pytest.param("fork", pb.ForkRequest(request_id="a", num_tokens=1), "lease_id", id="lease"),
        pytest.param("fork", pb.ForkRequest(lease_id=5, num_tokens=1), "request_id", id="request"),
        pytest.param("fork", pb.ForkRequest(lease_id=5, request_id="a"), "num_tokens", id="tokens"),
        pytest.param(
            "fork",
            pb.ForkRequest(lease_id=5, request_id="a", num_tokens=1, wait_ms=2**31),
            "wait_ms",
            id="patience",
        ),
        pytest.param("trim", pb.TrimRequest(num_tokens=1), "lease_id", id="lease of trim"),
        pytest.param("trim", pb.TrimRequest(lease_id=5), "num_tokens", id="tokens of trim"),
        pytest.param(
            "reserve",
            pb.ReserveRequest(request_id="r", num_tokens=1, retain_seconds=604_801),
            "retain_seconds",
            id="more than seven days",
        ),
        pytest.param(
            "reserve",
            pb.ReserveRequest(request_id="r", num_tokens=1, retain_priority=101),
            "retain_priority",
            id="more than a hundred",
        ),
    ],
)
def test_senseless_request_is_refused_by_name(verb: str, request_: Any, field: str) -> None:
    """A field that is missing or above its limit is named, and the core is not asked."""
    verbs, runner = lease_verbs()

    with pytest.raises(InvalidError) as caught:
        verbs.table[verb](request_, WORKER)

    assert caught.value.resource == field
    assert runner.commands == []


@pytest.mark.parametrize(("verb", "request_"), [("fork", FORK), ("trim", TRIM)])
def test_stranger_neither_forks_nor_trims(verb: str, request_: Any) -> None:
    """Only a lease's own worker may fork or trim it."""
    verbs, _ = lease_verbs()

    with pytest.raises(UnknownWorkerError):
        verbs.table[verb](request_, STRANGER)


@pytest.mark.parametrize(
    ("name", "number"), [("", 1), ("low", 0), ("normal", 1), ("high", 2)], ids=str
)
def test_priority_is_a_number_in_the_core(name: str, number: int) -> None:
    """A request without a priority has the normal one."""
    request = pb.ReserveRequest(request_id="r", num_tokens=8, priority=name, retain_seconds=60)

    command = asked("reserve", request, GRANTED)

    assert (command.priority, command.retain_seconds) == (number, 60)


def test_priority_that_is_none_is_refused_with_the_choices() -> None:
    """The refusal lists all priorities and says where the wrong one stood."""
    verbs, _ = lease_verbs()
    reserves = [pb.ReserveRequest(request_id="r", num_tokens=8, priority="urgent")]

    with pytest.raises(InvalidError, match=r"'urgent'.*low, normal, high") as caught:
        verbs.step(pb.StepRequest(reserves=reserves), WORKER)

    assert caught.value.resource == "reserves[0].priority"


@pytest.mark.parametrize("number", [None, 0, 50, 100])
def test_retain_priority_travels_where_it_is_given(number: int | None) -> None:
    """A retain priority of 0 is a number like others; one that is left out is none."""
    request = pb.ReserveRequest(request_id="r", num_tokens=8, retain_priority=number)

    command = asked("reserve", request, GRANTED)

    assert (command.priority, command.retain_priority) == (1, number)


def test_retain_priority_that_is_none_is_refused_with_the_bounds() -> None:
    """The refusal has the number, its bounds, and where it stood."""
    verbs, _ = lease_verbs()
    reserves = [pb.ReserveRequest(request_id="r", num_tokens=8, retain_priority=101)]

    with pytest.raises(InvalidError, match="is 101; it must be from 0 to 100") as caught:
        verbs.step(pb.StepRequest(reserves=reserves), WORKER)

    assert caught.value.resource == "reserves[0].retain_priority"
    assert (caught.value.need, caught.value.limit) == (101, 100)


def test_who_asks_for_nothing_special_gets_nothing_special() -> None:
    """A reserve without priority becomes the plain command."""
    command = asked("reserve", RESERVE, GRANTED)

    assert command == c.Reserve(worker_id=command.worker_id, request_id="r", keys=b"", num_tokens=8)


def test_answers_of_one_group_say_nothing_of_groups() -> None:
    """With one group, answers leave out the counts by group, except for the covered tokens."""
    extended = e.Extended(block_ids=IDS, covered_tokens=8)
    extend = pb.ExtendRequest(lease_id=5, num_tokens=8)
    committed = e.Committed(num_committed=1, num_duplicates=0)

    granted = told("reserve", RESERVE, GRANTED)

    assert granted == pb.ReserveResponse(lease_id=5, block_ids=IDS, row=3, covered_tokens=8)
    assert told("extend", extend, extended) == pb.ExtendResponse(block_ids=IDS, covered_tokens=8)
    assert told("commit", pb.CommitRequest(lease_id=5), committed) == pb.CommitResponse(
        num_committed=1
    )


def test_answers_of_several_groups_count_by_group() -> None:
    """With several groups, each answer with ids says how many of them are each group's."""
    lease = {"lease_id": 5}
    extended = e.Extended(block_ids=IDS, num_blocks=COUNTS, covered_tokens=8)
    mapped = e.Mapped(row=3, num_kernel_blocks=2, kernel_blocks=COUNTS)
    reloaded = e.Reloaded(block_ids=IDS, num_reloaded=1, num_tokens=8, row=3, num_blocks=COUNTS)

    assert told("reserve", RESERVE, replace(GRANTED, num_blocks=COUNTS)).num_blocks == COUNTS
    assert told("extend", pb.ExtendRequest(**lease, num_tokens=8), extended).num_blocks == COUNTS
    assert told("map", pb.MapRequest(**lease), mapped).kernel_blocks == COUNTS
    assert told("reload", pb.ReloadRequest(lease_id=5), reloaded).num_blocks == COUNTS


def test_commit_and_lookup_tell_what_groups_share_and_give_back() -> None:
    """A commit tells the blocks that left the lease, and a lookup the tokens that all groups can serve."""
    committed = e.Committed(num_committed=2, num_duplicates=1, num_given_back=4)
    found = e.Found(num_device_blocks=3, num_host_blocks=1, hit_tokens=64)

    assert told("commit", pb.CommitRequest(lease_id=5), committed).num_given_back == 4
    assert told("lookup", pb.LookupRequest(), found).hit_tokens == 64


async def test_token_ids_become_keys_of_hash_tokens() -> None:
    """A chain has a key for each `hash_block_tokens`, also if all blocks are larger; all else stays as asked."""
    planned = replace(hybrid_plan(), tokens_per_block=16, hash_block_tokens=4)
    verbs, runner = lease_verbs(GRANTED, planned)
    tokens = np.arange(9, dtype="<i4")
    naming = BlockKeys(b"acme".ljust(32, b"\0"), planned.layout_fingerprint, planned.model_digest)

    await verbs.reserve(  # type: ignore[misc]  # keys are computed off the loop
        pb.ReserveRequest(
            request_id="r", num_tokens=9, token_ids=tokens.tobytes(), priority="high"
        ),
        WORKER,
    )

    (command,) = runner.commands
    assert isinstance(command, c.Reserve)
    assert command.keys == naming.chain(tokens, 4)
    assert (command.priority, command.num_tokens) == (checks.PRIORITIES.index("high"), 9)
    assert runner.num_settled == 1
