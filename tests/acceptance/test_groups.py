"""A cache of full attention beside sliding windows: the local socket, REST and gRPC lease it alike."""

import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvlease.transports.base import Address, Outgoing, parse_address
from kvlease.v1 import kvlease_pb2 as pb
from tests.acceptance.scenario import SOCKETS, Comparable, Run, keys, packed, serving

pytestmark = pytest.mark.acceptance

CACHE = "groups"
FIELDS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 16, "dtype": "float32"}
INPUTS = pb.PlanInputs(
    layers=[
        pb.LayerSpec(name="0", kind="full_attention", tokens_per_block=8, **FIELDS),
        pb.LayerSpec(
            name="1", kind="sliding_window", tokens_per_block=4, window_tokens=8, **FIELDS
        ),
    ],
    tokens_per_block=4,
    device_blocks=48,
    null_blocks=1,
    host_bytes=1 << 16,
    longest_request_tokens=64,
    engine=pb.EngineInputs(tokens_per_step=8),
)  # fmt: skip
"""Full attention in blocks of 8 tokens; windows of 8 tokens in blocks of 4, at most 5 of them in a request."""


def counts(packed_counts: bytes) -> tuple[int, ...]:
    """Return the counts by group."""
    return struct.unpack("<2i", packed_counts)


def ids(packed_ids: bytes) -> tuple[int, ...]:
    """Return block ids."""
    return struct.unpack(f"<{len(packed_ids) // 4}i", packed_ids)


def register(run: Run) -> None:
    """Register the cache; the first try lacks the null block that it needs."""
    bare = pb.PlanInputs()
    bare.CopyFrom(INPUTS)
    bare.null_blocks = 0
    run.call("register_cache", pb.RegisterCacheRequest(cache=CACHE, inputs=bare))
    run.call("register_cache", pb.RegisterCacheRequest(cache=CACHE, inputs=INPUTS))
    run.said.pop()  # whether it is populated already is chance
    get = Outgoing("get_cache", pb.GetCacheRequest(cache=CACHE), time.monotonic() + 10)
    while run.transport.send(get).info.status != "ready":  # type: ignore[attr-defined]  # a GetCacheResponse
        time.sleep(0.01)


def attach(run: Run) -> str:
    """Attach a worker; returns its token."""
    attached = run.call("attach", pb.AttachRequest(cache=CACHE, engine="engine-1"))
    for name in ("regions", "death_proof", "token"):
        run.said[-1][1].pop(name)
    return str(attached.token)


def play(address: Address) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """Run two requests, a fork and a preemption; returns some responses by name, and all that was said."""
    with Run(address, CACHE) as run:
        register(run)
        token = attach(run)
        told = first_request(run, token) | second_request(run, token)
        told |= moved(run, token, told["first"].lease_id)
        for lease in (told["first"], told["second"], told["forked"].lease):
            run.call("release", pb.ReleaseRequest(lease_id=lease.lease_id), token=token)
        run.call("stats", pb.StatsRequest(cache=CACHE))
        run.call("detach", pb.DetachRequest(), token=token)
        run.call("delete_cache", pb.DeleteCacheRequest(cache=CACHE))
    return told, run.said


def first_request(run: Run, token: str) -> dict[str, Any]:
    """Compute a prompt of 16 tokens and go on to 32; the window moves on with the commit."""
    reserve = pb.ReserveRequest(
        request_id="first", keys=keys(1, 4), num_tokens=16, priority="high", retain_seconds=60
    )
    first = run.call("reserve", reserve, token=token)
    lease_id = first.lease_id
    extend = pb.ExtendRequest(lease_id=lease_id, num_tokens=32)
    commit = pb.CommitRequest(lease_id=lease_id, num_tokens=16, keys=keys(1, 4))
    return {
        "first": first,
        "mapped": run.call("map", pb.MapRequest(lease_id=lease_id), token=token),
        "held back": run.call("extend", extend, token=token),
        "committed": run.call("commit", commit, token=token),
        "moved on": run.call("extend", extend, token=token),
    }


def second_request(run: Run, token: str) -> dict[str, Any]:
    """Find the prefix of the first, fork it, take the fork's last block back, and step both."""
    found = run.call("lookup", pb.LookupRequest(keys=keys(1, 6)), token=token)
    reserve = pb.ReserveRequest(request_id="second", keys=keys(1, 4), num_tokens=24)
    second = run.call("reserve", reserve, token=token)
    fork = pb.ForkRequest(lease_id=second.lease_id, request_id="child", num_tokens=28)
    forked = run.call("fork", fork, token=token)
    trim = pb.TrimRequest(lease_id=forked.lease.lease_id, num_tokens=24)
    columns = pb.StepRequest(
        verbs=b"\2\1",
        lease_ids=packed(second.lease_id, second.lease_id),
        num_tokens=packed(24, 32, code="i"),
        num_keys=packed(2, 0, code="i"),
        first_blocks=packed(4, 0, code="i"),
        keys=keys(5, 2),
    )
    return {
        "found": found,
        "second": second,
        "forked": forked,
        "trimmed": run.call("trim", trim, token=token),
        "stepped": run.call("step", columns, token=token),
    }


def moved(run: Run, token: str, lease_id: int) -> dict[str, Any]:
    """Preempt a lease and bring it back."""
    return {
        "evicted": run.call("evict", pb.EvictRequest(lease_id=lease_id), token=token),
        "reloaded": run.call("reload", pb.ReloadRequest(lease_id=lease_id), token=token),
    }


@pytest.fixture(scope="module")
def plays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Play the scenario over each transport in turn; return what was said."""
    with serving(tmp_path_factory.mktemp("groups")) as directory:
        yield {
            scheme: play(parse_address(f"{scheme}://{directory}/{name}"))
            for scheme, name in SOCKETS.items()
        }


@pytest.mark.parametrize("scheme", ["http+unix", "grpc+unix"])
def test_transports_say_the_same_of_groups(plays: dict[str, Any], scheme: str) -> None:
    """Every reply has the same fields with the same values, whatever way it came."""
    reference, other = (Comparable().of(plays[one][1]) for one in ("unix", scheme))

    for said, also_said in zip(reference, other, strict=True):
        assert also_said == said


@pytest.mark.parametrize("scheme", list(SOCKETS))
def test_ids_come_group_by_group(plays: dict[str, Any], scheme: str) -> None:
    """A lease has the blocks that each group needs for its tokens: all different, and never block 0."""
    first, mapped = plays[scheme][0]["first"], plays[scheme][0]["mapped"]

    assert (counts(first.num_blocks), first.covered_tokens) == ((2, 4), 16)
    assert len(set(ids(first.block_ids))) == len(ids(first.block_ids)) == 6
    assert 0 not in ids(first.block_ids)
    assert sum(counts(mapped.kernel_blocks)) == mapped.num_kernel_blocks


@pytest.mark.parametrize("scheme", list(SOCKETS))
def test_window_moves_on_with_what_is_computed(plays: dict[str, Any], scheme: str) -> None:
    """A window holds at most five blocks; a commit returns those behind it, and the next extend goes further."""
    told = plays[scheme][0]
    held_back, committed, moved_on = told["held back"], told["committed"], told["moved on"]

    assert (counts(held_back.num_blocks), held_back.covered_tokens) == ((2, 1), 20)
    assert (committed.num_committed, committed.num_given_back) == (6, 2)
    assert (counts(moved_on.num_blocks), moved_on.covered_tokens) == ((0, 2), 28)


@pytest.mark.parametrize("scheme", list(SOCKETS))
def test_prefix_is_found_in_all_groups(plays: dict[str, Any], scheme: str) -> None:
    """A hit needs all blocks of full attention, and of the window those that its end looks at; others are 0."""
    told = plays[scheme][0]
    first, second = ids(told["first"].block_ids), ids(told["second"].block_ids)

    assert (told["found"].hit_tokens, told["second"].device_hit_tokens) == (16, 16)
    assert counts(told["second"].num_blocks) == (3, 6)
    assert (second[:2], second[3:7]) == (first[:2], (0, 0, *first[4:6]))
    assert len({*first, *second} - {0}) == 6 + 3


@pytest.mark.parametrize("scheme", list(SOCKETS))
def test_fork_shares_what_is_committed(plays: dict[str, Any], scheme: str) -> None:
    """A fork shares the blocks of the prefix, and a trim gives the last block of a group back."""
    told = plays[scheme][0]
    second, forked = ids(told["second"].block_ids), ids(told["forked"].lease.block_ids)

    assert told["forked"].num_shared == 4
    assert forked[:2] == second[:2]
    assert told["trimmed"].num_given_back >= 1


@pytest.mark.parametrize("scheme", list(SOCKETS))
def test_step_counts_by_group(plays: dict[str, Any], scheme: str) -> None:
    """Each operation of a step has a count for each group; a commit adds nothing, the extend after it moves on."""
    stepped = plays[scheme][0]["stepped"]

    assert struct.unpack("<2i", stepped.codes) == (0, 0)
    assert struct.unpack("<4i", stepped.num_blocks) == (0, 0, 1, 2)
    assert len(ids(stepped.block_ids)) == 3


@pytest.mark.parametrize("scheme", list(SOCKETS))
def test_lease_comes_back_with_its_places(plays: dict[str, Any], scheme: str) -> None:
    """A preempted lease of several groups comes back with each block at its place."""
    told = plays[scheme][0]
    reloaded = told["reloaded"]

    assert told["evicted"].num_evicted > 0
    assert reloaded.num_tokens >= 16
    assert len(ids(reloaded.block_ids)) == sum(counts(reloaded.num_blocks))


@pytest.mark.parametrize("scheme", list(SOCKETS))
def test_missing_null_block_is_refused_with_the_remedy(plays: dict[str, Any], scheme: str) -> None:
    """A plan without the null block is refused over every transport, and the refusal names the setting."""
    verb, told = plays[scheme][1][0]

    assert (verb, told["code"], told["rule"]) == ("register_cache", "INVALID", "null_block_needed")
    assert told["remedies"] == ("null_blocks=1",)
