"""Laws of explain: each reason is told in numbers and in a sentence, and other tenants' names stay hidden."""

from dataclasses import replace
from time import monotonic
from typing import Any

import pytest

from kvlease.errors import (
    InvalidError,
    KVLeaseError,
    NotYoursError,
    UnknownCacheError,
    UnknownLeaseError,
    UnknownWorkerError,
)
from kvlease.ids import LeaseId
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.config.settings import Settings
from kvleased.core.effects import Missed, MissReason, Reserved, Tier
from kvleased.core.untold import Silence
from kvleased.verbs.explaining import ANOTHER_TENANT, Explainer
from tests.unit.service.conftest import Node, inputs, keys

MISSED = Missed(first_block=2, num_blocks=3, reason=MissReason.EVICTED, tier=Tier.DEVICE)


@pytest.fixture
def node(settings: Settings) -> Any:
    """A node whose daemon is not started yet."""
    node = Node(settings)
    yield node
    node.store.close()


@pytest.fixture
def settings(tmp_path: Any) -> Settings:
    """Settings of a small daemon."""
    return Settings(runtime_dir=tmp_path, max_leases=8, memory_bytes_max=1 << 30)


async def reserve(node: Node, caller: Caller, **fields: Any) -> Any:
    """Reserve, asking for an explanation."""
    return await node.ask("reserve", pb.ReserveRequest(explain=True, **fields), caller)


async def explain(node: Node, lease_id: int, caller: Caller | None = None, cache: str = "") -> Any:
    """Explain a lease, to an operator unless another caller is given."""
    request = pb.ExplainRequest(lease_id=lease_id, cache=cache)
    return await (node.ask("explain", request, caller) if caller else node.ask("explain", request))


async def cached(node: Node, num_blocks: int) -> Caller:
    """Return a worker whose tenant has so many cached blocks."""
    worker = await node.attach(tenant="victim")
    num_tokens = 4 * num_blocks
    asked = pb.ReserveRequest(request_id="a", num_tokens=num_tokens)
    lease = await node.ask("reserve", asked, worker)
    commit = pb.CommitRequest(
        lease_id=lease.lease_id, num_tokens=num_tokens, keys=keys(1, num_blocks)
    )
    await node.ask("commit", commit, worker)
    await node.ask("release", pb.ReleaseRequest(lease_id=lease.lease_id), worker)
    return worker


async def crowd_out(node: Node) -> tuple[Caller, Caller]:
    """Evict one tenant's cached blocks for another's request; return a worker of each."""
    await node.register(host_bytes=0)
    victim, other = await cached(node, 16), await node.attach(tenant="other")
    asked = pb.ReserveRequest(request_id="b", num_tokens=16, wait_ms=5_000)
    lease = await node.ask("reserve", asked, other)
    await node.ask("release", pb.ReleaseRequest(lease_id=lease.lease_id), other)
    return victim, other


async def test_reserve_tells_what_was_missed(node: Node) -> None:
    """The answer to a reserve that asks has the runs of misses, also in a step and by tokens; so has its lease."""
    async with node.life():
        await node.register()
        worker = await cached(node, 4)
        lease = await reserve(node, worker, request_id="b", num_tokens=24, keys=keys(1, 6))
        by_id = await explain(node, lease.lease_id, worker)
        request = pb.ReserveRequest(request_id="c", num_tokens=3, explain=True)
        silent = pb.ReserveRequest(request_id="d", num_tokens=3)
        stepped = await node.ask("step", pb.StepRequest(reserves=[request, silent]), worker)
        token_ids = b"".join(number.to_bytes(4, "little") for number in range(4))
        by_tokens = await reserve(node, worker, request_id="e", num_tokens=4, token_ids=token_ids)

    assert (by_id.num_tokens, dict(by_id.hit_tokens)) == (24, {"device": 16})
    assert [one.reason for one in lease.misses] == ["never_committed"]
    assert list(by_id.misses) == list(lease.misses)
    told = [[miss.reason for miss in one.granted.misses] for one in stepped.reserves]
    assert told == [["shorter_than_a_block"], []]
    assert [one.reason for one in by_tokens.misses] == ["never_committed"]


async def test_tenants_are_named_to_operators_only(node: Node) -> None:
    """A worker is told of other tenants only as "another tenant"; an operator is told all names."""
    async with node.life():
        victim, _ = await crowd_out(node)
        lease = await reserve(
            node, victim, request_id="c", num_tokens=64, keys=keys(1, 16), wait_ms=5_000
        )
        to_worker = await explain(node, lease.lease_id, victim)
        to_operator = await explain(node, lease.lease_id, cache="main")

    (miss,), (told,) = lease.misses, to_operator.misses
    assert (miss.first_block, miss.num_blocks, miss.reason) == (12, 4, "evicted")
    assert (miss.tier, miss.policy, miss.HasField("age_ms")) == ("device", "leaf-lru", True)
    assert [one.tenant for one in to_worker.misses] == [miss.tenant] == [ANOTHER_TENANT]
    assert (told.tenant, "to make room for other;" in told.why) == ("other", True)
    assert "to make room for another tenant;" in miss.why


async def test_leases_of_others_are_not_explained(node: Node) -> None:
    """A worker may ask about its own leases only, and a lease that does not exist is refused for all."""
    async with node.life():
        victim, other = await crowd_out(node)
        lease = await reserve(node, victim, request_id="c", num_tokens=8, wait_ms=5_000)
        stranger = Caller(transport="rest", token="nobody")
        refused: list[tuple[type[KVLeaseError], int, Caller | None, str]] = [
            (NotYoursError, lease.lease_id, other, ""),
            (UnknownWorkerError, lease.lease_id, stranger, ""),
            (UnknownCacheError, lease.lease_id, None, "none"),
            (UnknownLeaseError, 2**45, None, ""),
            (InvalidError, 0, None, ""),
        ]

        for error, lease_id, caller, cache in refused:
            with pytest.raises(error):
                await explain(node, lease_id, caller, cache)


# Sentences ------------------------------------------------------------------------------------------------------------


async def sentence(
    node: Node, miss: Missed, options: pb.CacheOptions | None = None, **changes: Any
) -> str:
    """Return the sentence that a worker gets about a run of misses; a tenant in it is the worker's own."""
    async with node.life() as daemon:
        await node.register(options=options, **changes)
        caller = await node.attach()
        worker = daemon.registry.worker(caller.token)
        explainer = Explainer(daemon.registry, worker.entry, worker)
        own = replace(miss, tenant=worker.tenant_digest) if miss.tenant else miss
        reply = Reserved(
            lease_id=LeaseId(1), block_ids=b"", device_hit_tokens=0, host_hit_tokens=0, row=0, covered_tokens=0,
            misses=(own,),
        )  # fmt: skip
        (told,) = explainer.add_misses(pb.ReserveResponse(), reply).misses
    return str(told.why)


SECOND_AGO, HOUR_AGO = monotonic() - 1, monotonic() - 3_700


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        pytest.param(
            {"policy": "arc", "tenant": 1, "first_left_at": HOUR_AGO, "last_left_at": HOUR_AGO},
            "arc chose them for eviction 1 h ago to make room for default; a larger device pool or a higher priority "
            "would keep them longer, and a call with wait_ms would copy them to the host pool first",
            id="evicted",
        ),
        pytest.param(
            {},
            "an evict call, or an engine through its magazine, took them off the device; with wait_ms, a call copies "
            "them to the host pool first",
            id="displaced",
        ),
        pytest.param(
            {"is_below": True},
            "they left the device, and a lower tier has them; reserve with a wait_ms, or a longer one, to load them",
            id="below",
        ),
        pytest.param(
            {"tier": Tier.HOST, "policy": "leaf-lru"},
            "leaf-lru chose them for eviction when the host tier was full; a larger host tier would keep them",
            id="host",
        ),
        pytest.param(
            {"reason": MissReason.CLEARED, "last_left_at": HOUR_AGO, "first_left_at": HOUR_AGO},
            "a clear took them from the device tier 1 h ago; compute them again",
            id="cleared",
        ),
        pytest.param(
            {"reason": MissReason.RESIZED, "tier": Tier.HOST},
            "a resize took them from the host tier; a larger host tier would keep them",
            id="resized",
        ),
        pytest.param(
            {"reason": MissReason.STORE_LOST, "tier": Tier.DISK},
            "the disk store was lost or replaced, and they with it; compute them again",
            id="store lost",
        ),
        pytest.param(
            {"reason": MissReason.RESIZED, "is_below": True},
            "they left the device, and a lower tier has them; reserve with a wait_ms, or a longer one, to load "
            "them",
            id="resized and below",
        ),
        pytest.param(
            {"reason": MissReason.DROPPED, "tier": Tier.HOST},
            "the host tier had them, but they could not be copied from there; compute them again",
            id="dropped",
        ),
        pytest.param(
            {"reason": MissReason.CHECKSUM, "tier": Tier.HOST},
            "their bytes in the host tier did not match their checksum and were thrown away; compute them again",
            id="checksum",
        ),
        pytest.param(
            {"reason": MissReason.TIER_OFF, "tier": Tier.HOST},
            "the host tier had them, but did not work then; kvlease caches says whether it works now",
            id="tier off",
        ),
        pytest.param(
            {"reason": MissReason.OTHER_TENANT},
            "another tenant's blocks have these keys; derive keys from your own tenant's key",
            id="other tenant",
        ),
        pytest.param(
            {"reason": MissReason.SHORTER_THAN_A_BLOCK, "num_tokens": 5},
            "the last 5 tokens cannot fill a block of 4 tokens, and only full blocks are kept",
            id="short",
        ),
        pytest.param(
            {"reason": MissReason.NEVER_COMMITTED},
            "no block has left this cache since it was registered, so these blocks were gone before that, or never "
            "committed, or only under another salt, adapter, tenant or layout, which gives different keys",
            id="never",
        ),
        pytest.param(
            {
                "reason": MissReason.NEVER_COMMITTED,
                "num_remembered": 2_000,
                "remembered_since": HOUR_AGO,
            },
            "none of the last 2,000 blocks that left, the first of them 1 h ago, has these keys; they were gone "
            "before that, or never committed, or only under another salt, adapter, tenant or layout, which gives "
            "different keys",
            id="not remembered",
        ),
        pytest.param(
            {"reason": MissReason.BEHIND_A_MISS, "num_runs_left_out": 1, "num_blocks_left_out": 30},
            "they are cached, but a prefix ends at the first block that is missing; see the run before this one; 1 "
            "further run of 30 blocks not shown",
            id="left out",
        ),
        pytest.param(
            {"reason": MissReason.DROPPED, "tier": Tier.HOST, "remote_silence": Silence.OFF},
            "the host tier had them, but they could not be copied from there; compute them again; the remote store "
            "may have them, but did not work then; kvlease caches says whether it works now",
            id="remote store off",
        ),
        pytest.param(
            {"reason": MissReason.DROPPED, "tier": Tier.HOST, "remote_silence": Silence.UNANSWERED},
            "the host tier had them, but they could not be copied from there; compute them again; "
            "the remote store may have them, but did not answer this call; kvlease caches says whether it works",
            id="remote store silent",
        ),
        pytest.param(
            {"reason": MissReason.DROPPED, "tier": Tier.HOST, "remote_silence": Silence.UNASKED},
            "the host tier had them, but they could not be copied from there; compute them again; "
            "the remote store may have them, but a call asks it for 4,096 blocks at most; with those before them on "
            "the node, a later call asks for these",
            id="remote store not asked",
        ),
        pytest.param(
            {"reason": MissReason.CLEARED, "remote_silence": Silence.NO_WAIT},
            "a clear took them from the device tier; compute them again; the remote store may have them; "
            "reserve with a wait_ms to ask it",
            id="remote store could not be asked",
        ),
    ],
)
async def test_reason_is_a_sentence(node: Node, changes: dict[str, Any], told: str) -> None:
    """Every reason is told with its numbers and with what to change."""
    assert await sentence(node, replace(MISSED, **changes)) == told


async def test_span_of_departures_is_told(node: Node) -> None:
    """If blocks left at different times, the first and the last time are told."""
    miss = replace(MISSED, first_left_at=HOUR_AGO, last_left_at=SECOND_AGO, policy="leaf-lru")

    told = await sentence(node, miss, host_bytes=0)

    assert told.startswith("leaf-lru chose them for eviction 1 h to ")
    assert told.endswith(
        " ago; a larger device pool or a higher priority would keep them longer, and so would a host pool"
    )


async def test_hits_that_a_copy_takes_are_told(node: Node) -> None:
    """Under after-n-hits, the sentence says how often a block must be found to be copied before it leaves."""
    options = pb.CacheOptions(write_policy="after-n-hits", write_after_hits=3)

    told = await sentence(node, replace(MISSED, policy="leaf-lru"), options)

    assert told == (
        "leaf-lru chose them for eviction; a larger device pool or a higher priority would keep them longer, "
        "and a call with wait_ms would copy blocks that were found 3 times to the host pool first"
    )


async def test_evict_call_without_a_host_pool_is_told(node: Node) -> None:
    """Without a host pool, the sentence says that an evict call drops blocks which a host pool would keep."""
    told = await sentence(node, MISSED, host_bytes=0)

    assert told == (
        "an evict call, or an engine through its magazine, took them off the device; a host pool would keep what a "
        "call evicts"
    )


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        (
            {},
            "no block has left this cache since the daemon restarted ",
            " ago, so these blocks were gone before that, or never committed, or only under another salt, ",
        ),
        (
            {"num_remembered": 2, "remembered_since": HOUR_AGO},
            "none of the last 2 blocks that left, the first of them 1 h ago, has these keys; they were gone before ",
            " ago, or never committed, or only under another salt, ",
        ),
    ],
)
async def test_departures_that_a_restart_forgot_are_told(
    node: Node, changes: dict[str, Any], before: str, after: str
) -> None:
    """After a restart the sentence says that departures from before it are forgotten."""
    async with node.life():
        await node.register()

    told = await sentence(node, replace(MISSED, reason=MissReason.NEVER_COMMITTED, **changes))

    assert told.startswith(before)
    assert after in told


async def test_group_is_told_where_there_are_several(node: Node) -> None:
    """If there are several groups, the one whose block was missing is named, unless all are meant."""
    window = pb.LayerSpec(
        name="1",
        kind="sliding_window",
        num_kv_heads=1,
        head_size=16,
        dtype="float32",
        window_tokens=8,
    )
    layers = [*inputs().layers, window]

    told = await sentence(node, replace(MISSED, group=1), layers=layers, null_blocks=1)

    assert told.startswith("in table group 1: an evict call")


async def test_cache_that_finds_no_prefix_says_so(node: Node) -> None:
    """Where no key is ever found, the sentence does not send the reader to look for salts and tenants."""
    cross = pb.LayerSpec(
        name="1", kind="cross_attention", num_kv_heads=1, head_size=16, dtype="float32"
    )
    engine = pb.EngineInputs(encoder_tokens_max=8)
    miss = replace(MISSED, reason=MissReason.NEVER_COMMITTED, tier=None)

    told = await sentence(
        node, miss, layers=[*inputs().layers, cross], null_blocks=1, engine=engine
    )

    assert told == (
        "this cache finds no prefix, whatever keys are sent, because group 1 (layers of kind cross_attention) depends "
        "on an encoder's output, which no key covers"
    )


async def test_missing_state_is_told_with_where_states_are_kept(node: Node) -> None:
    """For a missing recurrent state the sentence says that states are kept only at the ends of calls."""
    state = pb.LayerSpec(
        name="1",
        kind="state_space",
        tokens_per_block=4,
        shapes=[pb.Shape(extents=[16, 8])],
        dtypes=["float32"],
    )
    engine = pb.EngineInputs(state_mode="align")
    miss = replace(MISSED, reason=MissReason.NEVER_COMMITTED, tier=None)
    registered = {"layers": [*inputs().layers, state], "null_blocks": 1, "engine": engine}

    of_states = await sentence(node, replace(miss, group=1), **registered)

    assert (
        "never committed by a request whose reserve or extend ended there, because only such states are kept (end a "
        "reserve or extend at a multiple of 4 tokens), or only under another salt"
    ) in of_states
