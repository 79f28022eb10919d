"""Caches of every shape that can be planned: where their memory lies, and that evicted bytes come back."""

import os
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvlease.errors import (
    InvalidError,
    LayoutMismatchError,
    NeverFitsError,
)
from kvlease.plan import RankPlan
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.caches.entries import CacheEntry
from kvleased.memory.cpu import map_region
from kvleased.memory.regions import device_kind

from .conftest import Node, inputs, keys


def layer(name: str, **changes: Any) -> pb.LayerSpec:
    """Return a layer of one head of 16 elements, but for the changes."""
    settled: dict[str, Any] = {
        "name": name,
        "kind": "full_attention",
        "num_kv_heads": 1,
        "head_size": 16,
        "dtype": "float32",
    }
    return pb.LayerSpec(**(settled | changes))


TWO_LAYERS = [layer("0"), layer("1", num_kv_heads=2)]
EQUAL_LAYERS = [layer(str(number)) for number in range(3)]
HYBRID = [
    layer("0", tokens_per_block=8),
    layer("1", tokens_per_block=8, kind="sliding_window", window_tokens=8),
]
STATE = pb.LayerSpec(
    name="2",
    kind="state_space",
    tokens_per_block=8,
    shapes=[pb.Shape(extents=[16, 8])],
    dtypes=["float32"],
)
LAYOUTS = [
    pytest.param({"layers": TWO_LAYERS}, id="blocks outermost"),
    pytest.param({"layers": EQUAL_LAYERS, "layout": "LBHNC"}, id="layers outermost"),
    pytest.param({"layers": EQUAL_LAYERS, "layout": "LHBNC"}, id="heads outside of blocks"),
    pytest.param(
        {"layers": TWO_LAYERS, "parallel": pb.ParallelInputs(tensor_ranks=2)}, id="two ranks"
    ),
    pytest.param(
        {
            "layers": EQUAL_LAYERS,
            "layout": "LBHNC",
            "parallel": pb.ParallelInputs(tensor_ranks=2),
        },
        id="two ranks, layers outermost",
    ),
    pytest.param({"layers": EQUAL_LAYERS, "slot_multiple_bytes": 4096}, id="padded slots"),
    pytest.param(
        {
            "layers": [layer("0", tensor_shards_max=1)],
            "parallel": pb.ParallelInputs(tensor_ranks=2),
        },
        id="two ranks with the same bytes",
    ),
    pytest.param({"layers": EQUAL_LAYERS, "null_blocks": 1}, id="null block"),
]


def devices_of(entry: CacheEntry) -> list[NDArray[np.uint8]]:
    """Map every rank's device region."""
    return [
        map_region(entry.fds[device_kind(rank.rank)], rank.device_bytes)
        for rank in entry.plan.ranks
    ]


def read(device: NDArray[np.uint8], rank: RankPlan, block: int) -> bytes:
    """Return all bytes of a rank's block, piece by piece."""
    starts = [extent.offset_bytes + block * extent.block_stride_bytes for extent in rank.extents]
    return b"".join(
        device[start : start + extent.num_bytes].tobytes()
        for start, extent in zip(starts, rank.extents, strict=True)
    )


@pytest.mark.parametrize("changes", LAYOUTS)
async def test_evicted_bytes_come_back_in_every_layout(node: Node, changes: dict[str, Any]) -> None:
    """However a block's pieces lie, over any number of ranks, its bytes come back to the lease's new blocks."""
    async with node.life() as daemon:
        await node.register(**(changes | {"host_bytes": 1 << 20}))
        worker = await node.attach()
        entry = daemon.registry.cache("main")
        devices, ranks = devices_of(entry), entry.plan.ranks
        lease = await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=12), worker)
        random = np.random.default_rng(1)
        written = random.integers(0, 256, devices[0].shape, np.uint8)
        for device in devices:
            device[:] = (
                written if entry.plan.tensor_replicas > 1
                else random.integers(0, 256, device.shape, np.uint8)
            )  # fmt: skip
        commit = pb.CommitRequest(lease_id=lease.lease_id, num_tokens=8, keys=keys(1, 2))
        await node.ask("commit", commit, worker)
        before = [
            [read(device, rank, block) for block in np.frombuffer(lease.block_ids, np.int32)]
            for device, rank in zip(devices, ranks, strict=True)
        ]

        evicted = await node.ask("evict", pb.EvictRequest(lease_id=lease.lease_id), worker)
        for device in devices:
            device[:] = 0xEE
        back = await node.ask("reload", pb.ReloadRequest(lease_id=lease.lease_id), worker)

        assert (evicted.num_offloaded, back.num_reloaded) == (3, 3)
        after = [
            [read(device, rank, block) for block in np.frombuffer(back.block_ids, np.int32)]
            for device, rank in zip(devices, ranks, strict=True)
        ]
        assert after == before
        assert entry.core.check() == []


# Ranks ----------------------------------------------------------------------------------------------------------------


async def test_each_rank_has_its_own_region(node: Node) -> None:
    """A worker is handed the region of its rank; workers of one rank share it."""
    caller = Caller(transport="local")
    async with node.life() as daemon:
        await node.register(parallel=pb.ParallelInputs(tensor_ranks=2))
        entry = daemon.registry.cache("main")

        replies = [
            await node.ask("attach", pb.AttachRequest(cache="main", rank=rank), caller)
            for rank in (0, 1, 1)
        ]
        fds = [daemon.fds(reply.worker_id)[0] for reply in replies]

        assert fds == [entry.fds["device.0"], entry.fds["device.1"], entry.fds["device.1"]]
        assert [reply.regions[0].region_bytes for reply in replies] == [16 * 512] * 3
        assert [reply.regions[0].kind for reply in replies] == ["device"] * 3


async def test_rank_that_the_plan_lacks_is_refused(node: Node) -> None:
    """A worker of rank 2 is refused by a cache of two ranks."""
    async with node.life():
        await node.register(parallel=pb.ParallelInputs(tensor_ranks=2))

        with pytest.raises(InvalidError, match="ranks 0 to 1") as refusal:
            await node.attach(rank=2)

        assert (refusal.value.resource, refusal.value.need, refusal.value.limit) == ("rank", 2, 1)


async def test_rank_that_keeps_nothing_attaches(node: Node) -> None:
    """A pipeline stage without attention gets an empty region, and the other ranks' regions stay as they were."""
    ranks = [pb.RankInputs(), pb.RankInputs(keeps_nothing=True)]
    parallel = pb.ParallelInputs(pipeline_ranks=2)
    async with node.life() as daemon:
        await node.register(ranks=ranks, parallel=parallel)

        caller = Caller(transport="local")
        reply = await node.ask("attach", pb.AttachRequest(cache="main", rank=1), caller)

        assert reply.regions[0].region_bytes == 0
        assert len(daemon.fds(reply.worker_id)) == 2


async def test_every_rank_survives_a_restart(node: Node) -> None:
    """In the next life every rank has the same bytes, and each worker keeps its rank."""
    async with node.life() as daemon:
        await node.register(parallel=pb.ParallelInputs(tensor_ranks=2))
        worker = await node.attach(rank=1)
        plan = daemon.registry.cache("main").plan
        for rank, device in enumerate(devices_of(daemon.registry.cache("main"))):
            device[:] = rank + 1

    async with node.life() as daemon:
        entry = daemon.registry.cache("main")

        assert entry.plan == plan
        assert [set(device.tolist()) for device in devices_of(entry)] == [{1}, {2}]
        assert daemon.registry.worker(worker.token).rank == 1


async def test_registration_cut_off_while_the_plan_was_written_is_forgotten(node: Node) -> None:
    """A cache whose plan was not written whole is forgotten: its registration was never answered."""
    async with node.life():
        await node.register()
    for kept in node.store._kept.values():
        if kept.name == "cache/main/plan":
            os.pwrite(kept.fd, b"\0", 0)

    async with node.life() as daemon:
        assert list(daemon.registry.caches) == []
    assert [kept for kept in node.store._kept if kept.startswith("cache/")] == []


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        pytest.param(
            {"layers": [layer("0", head_size=32)]},
            r"groups\[0\].spec.head_size \(16, not 32\)",
            id="spec",
        ),
        pytest.param(
            {"layers": [layer("0", kind="mla")]},
            r"groups\[0\].spec.kind \(full_attention, not mla\)",
            id="kind",
        ),
        pytest.param(
            {"parallel": pb.ParallelInputs(tensor_ranks=2)},
            r"ranks \(1 entries, not 2 entries\)",
            id="ranks",
        ),
        pytest.param({"layout": "LBHNC"}, r"layout \(BLHNC, not LBHNC\)", id="layout"),
        pytest.param({"null_blocks": 1}, r"null_blocks \(0, not 1\)", id="null blocks"),
        pytest.param({"model_digest": "b"}, r"model_digest \(, not b\)", id="model"),
    ],
)
async def test_registrations_are_compared_field_by_field(
    node: Node, changes: dict[str, Any], path: str
) -> None:
    """Another layout under a taken name is refused with the path of each field that differs and both values."""
    async with node.life():
        await node.register()

        with pytest.raises(LayoutMismatchError, match=path):
            await node.register(**changes)


async def test_slots_of_several_blocks_are_planned_and_not_registered(node: Node) -> None:
    """A plan that no mover can carry out yet is refused at the registration, with what to change."""
    async with node.life():
        changed = inputs(blocks_per_slot=2)
        planned = await node.ask("plan", pb.PlanRequest(inputs=changed))
        assert planned.plan.blocks_per_slot == 2

        with pytest.raises(InvalidError, match="blocks_per_slot 1") as refusal:
            await node.ask("register_cache", pb.RegisterCacheRequest(cache="main", inputs=changed))

        assert refusal.value.rule == "blocks_per_slot_not_supported"


@pytest.mark.parametrize(
    ("changes", "ids_by_group"),
    [
        pytest.param({"layers": HYBRID}, (2, 2), id="two groups"),
        pytest.param({"layers": HYBRID[1:]}, (), id="window"),
        pytest.param(
            {"parallel": pb.ParallelInputs(tensor_ranks=2, context_ranks=2)}, (), id="context ranks"
        ),
        pytest.param({"layers": [*HYBRID, STATE]}, (2, 2, 1), id="states"),
    ],
)  # fmt: skip
async def test_cache_of_any_groups_is_leased(
    node: Node, changes: dict[str, Any], ids_by_group: tuple[int, ...]
) -> None:
    """Whatever the groups keep, a request gets blocks of all of them, and all blocks come back."""
    async with node.life() as daemon:
        await node.register(**({"null_blocks": 1} | changes))
        worker = await node.attach()

        reserve = pb.ReserveRequest(request_id="r", num_tokens=12)
        lease = await node.ask("reserve", reserve, worker)
        await node.ask("release", pb.ReleaseRequest(lease_id=lease.lease_id), worker)

        assert tuple(np.frombuffer(lease.num_blocks, np.int32)) == ids_by_group
        assert 0 < lease.covered_tokens <= 12
        assert daemon.registry.cache("main").core.check() == []


async def test_groups_that_give_back_need_a_null_block(node: Node) -> None:
    """A registration without the null block that its tables need is refused with the setting that is missing."""
    async with node.life() as daemon:
        with pytest.raises(InvalidError) as refusal:
            await node.register(layers=HYBRID)

        assert (refusal.value.rule, refusal.value.need) == ("null_block_needed", 1)
        assert refusal.value.remedies == ("null_blocks=1",)
        assert list(daemon.registry) == []


# Admission ------------------------------------------------------------------------------------------------------------


async def test_admission_is_by_tokens(node: Node) -> None:
    """A reserve above the plan's longest request never fits, even if there are blocks enough."""
    async with node.life():
        info = await node.register(longest_request_tokens=6)
        worker = await node.attach()
        assert info.plan.longest_request_tokens == 6

        with pytest.raises(NeverFitsError) as refusal:
            await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=7), worker)
        granted = await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=6), worker)

        assert (refusal.value.need, refusal.value.limit) == (7, 6)
        assert len(granted.block_ids) == 2 * 4


async def test_null_blocks_are_neither_granted_nor_counted(node: Node) -> None:
    """The stats of a pool with null blocks add up to what can be granted."""
    async with node.life():
        await node.register(null_blocks=1)
        worker = await node.attach()
        lease = await node.ask("reserve", pb.ReserveRequest(request_id="r", num_tokens=60), worker)

        stats = await node.ask("stats", pb.StatsRequest())

        pool = stats.caches[0].pools[0]
        assert sorted(np.frombuffer(lease.block_ids, np.int32)) == list(range(1, 16))
        assert (pool.num_blocks, pool.free, pool.reserved) == (15, 0, 15)


# Explanations ---------------------------------------------------------------------------------------------------------


async def test_plan_explains_itself_where_asked(node: Node) -> None:
    """A plan comes with its equations and with the outcomes of other settings, or with neither, as asked."""
    async with node.life():
        bare = await node.ask("plan", pb.PlanRequest(inputs=inputs()))
        request = pb.PlanRequest(inputs=inputs(), report=True, what_if=["tokens_per_block=8"])
        explained = await node.ask("plan", request)

    assert (len(bare.report.equations), len(bare.what_ifs)) == (0, 0)
    assert explained.plan == bare.plan
    values = {equation.name: equation.value for equation in explained.report.equations}
    assert values["bytes_per_block"] == 512
    (change,) = explained.what_ifs
    assert (change.change, change.after.bytes_per_block) == ("tokens_per_block=8", 1024)


async def test_refusal_names_settings_that_would_work(node: Node) -> None:
    """If a plan never fits, the verbs plan and register_cache name the same remedies."""
    changed = inputs(device_blocks=0, device_bytes=64)
    requests = {
        "plan": pb.PlanRequest(inputs=changed),
        "register_cache": pb.RegisterCacheRequest(cache="main", inputs=changed),
    }
    refusals = []

    async with node.life():
        for verb, request in requests.items():
            with pytest.raises(NeverFitsError) as refusal:
                await node.ask(verb, request)
            refusals.append(refusal.value)

    assert refusals[0].remedies == refusals[1].remedies
    assert refusals[0].remedies
