"""The log tells who did what: each act of an operator with role, transport and peer, each worker with its tenant."""

import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.access.roles import Role
from kvleased.config.settings import Settings
from tests.unit.service.conftest import Node
from tests.unit.service.verbs.test_figures import cached

REMOTE = Caller(transport="rest", role=Role.OPERATOR, address="10.0.0.7:4711")
LOCAL = Caller(transport="local", role=Role.OPERATOR, peer_pid=17, peer_uid=1000)
ACTS: list[tuple[str, Any, str, dict[str, object]]] = [
    ("drain", pb.DrainRequest(), "drain_begun", {}),
    ("undrain", pb.UndrainRequest(), "drain_ended", {}),
    ("drain", pb.DrainRequest(cache="main"), "cache_drained", {"cache": "main"}),
    ("undrain", pb.UndrainRequest(cache="main"), "cache_undrained", {"cache": "main"}),
    (
        "set_tenant",
        pb.SetTenantRequest(tenant="chat", limits=pb.TenantLimits(weight=2), revision=1),
        "tenant_set",
        {"tenant": "chat", "weight": 2.0},
    ),
    ("pin", pb.PinRequest(), "pinned_by_operator", {"cache": "main"}),
    ("unpin", pb.UnpinRequest(pin_id=1), "unpinned_by_operator", {"cache": "main", "pin_id": 1}),
    ("evict", pb.EvictRequest(num_blocks=1), "evicted_by_operator", {"cache": "main"}),
    (
        "clear",
        pb.ClearRequest(cache="main", tenant="chat"),
        "cache_cleared",
        {"cache": "main", "tenant": "chat"},
    ),
    (
        "resize",
        pb.ResizeRequest(cache="main", tier="device", num_blocks=8),
        "cache_resized",
        {"cache": "main", "tier": "device", "num_blocks": 8},
    ),
    ("delete_cache", pb.DeleteCacheRequest(cache="main"), "cache_deleted", {"cache": "main"}),
]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a small daemon."""
    return Settings(runtime_dir=tmp_path, max_leases=8, memory_bytes_max=1 << 30)


async def test_watchers_hear_of_a_drain_of_the_daemon(node: Node) -> None:
    """Watchers hear of a drain of the daemon as of one of a cache; repeating it is no event."""
    async with node.life() as daemon:
        for verb in ("drain", "drain", "undrain", "undrain"):
            request = pb.DrainRequest() if verb == "drain" else pb.UndrainRequest()
            await node.ask(verb, request, LOCAL)
        watcher = daemon.watch(pb.WatchRequest())
        kinds = [(await anext(watcher)).kind for _ in range(2)]
        await watcher.aclose()  # type: ignore[attr-defined]  # a generator behind the protocol
        assert repr(daemon.events) == "<Events 2 seen, 0 watchers>"

    assert kinds == ["daemon_drained", "daemon_undrained"]


@pytest.mark.parametrize(
    ("caller", "peer"),
    [
        pytest.param(REMOTE, {"transport": "rest", "peer": "10.0.0.7:4711"}, id="remote"),
        pytest.param(LOCAL, {"transport": "local", "peer_pid": 17, "peer_uid": 1000}, id="local"),
    ],
)
async def test_acts_of_an_operator_name_him(
    node: Node, caller: Caller, peer: dict[str, object]
) -> None:
    """Each act is one line with its subject, the role, the transport and the peer."""
    async with node.life():
        await node.register()
        await cached(node, "gone")
        found = {}
        for verb, request, event, _ in ACTS:
            with capture_logs() as lines:
                await node.ask(verb, request, caller)
            found[event] = [line for line in lines if line["event"] == event]

    for _, _, event, fields in ACTS:
        (line,) = found[event]
        assert (line | fields | peer | {"role": "operator"}) == line, event


async def test_events_of_a_tenant_name_it(node: Node) -> None:
    """An event names the tenant whose limits were set or blocks cleared; clearing all tenants names none."""
    acts = {
        "set_tenant": pb.SetTenantRequest(tenant="chat", revision=1),
        "clear": pb.ClearRequest(cache="main", tenant="chat"),
    }
    async with node.life() as daemon:
        await node.register()
        for verb, request in acts.items():
            await node.ask(verb, request, LOCAL)
        await node.ask("clear", pb.ClearRequest(cache="main"), LOCAL)
        watch = daemon.events.watch(0, "")
        told = [await anext(watch) for _ in range(4)]

    assert [(one.kind, one.tenant) for one in told] == [
        ("cache_registered", ""), ("tenant_set", "chat"), ("cache_cleared", "chat"), ("cache_cleared", ""),
    ]  # fmt: skip


async def test_event_of_a_resize_names_the_pool(node: Node) -> None:
    """An event tells which pool was resized, and how much it can grant now."""
    async with node.life() as daemon:
        await node.register()
        for tier, size in (("device", 9), ("host", 5)):
            resize = pb.ResizeRequest(cache="main", tier=tier, num_blocks=size)
            await node.ask("resize", resize, LOCAL)
        watch = daemon.events.watch(0, "")
        told = [await anext(watch) for _ in range(3)][1:]

    assert {one.kind for one in told} == {"cache_resized"}
    assert [(one.tier, one.num_blocks) for one in told] == [("device", 9), ("host", 5)]


async def test_workers_are_told_with_tenant_and_process(node: Node) -> None:
    """Each line about a worker that attaches, detaches or dies has its tenant and process, but not its token."""
    attach = pb.AttachRequest(cache="main", tenant="chat", worker_name="w")
    pidfd = os.pidfd_open(os.getpid())
    caller = Caller(
        transport="local", role=Role.OPERATOR, pidfd=pidfd, peer_pid=os.getpid(), peer_uid=0
    )
    async with node.life() as daemon:
        await node.register()
        with capture_logs() as lines:
            dying = await node.ask("attach", attach, caller)
            daemon._workers._died(daemon.registry.by_token[dying.token])
            ended = await node.ask("attach", attach, caller)
            request = pb.DetachRequest(worker_id=ended.worker_id, force=True)
            await node.ask("detach", request, REMOTE)
    os.close(pidfd)

    told = [line for line in lines if line["event"].startswith("worker_")]
    assert [line["event"] for line in told] == [
        "worker_attached", "worker_died", "worker_attached", "worker_detached",
    ]  # fmt: skip
    for line in told:
        assert (line["tenant"], line["cache"], line["worker_pid"]) == ("chat", "main", os.getpid())
    assert (told[3]["role"], told[3]["peer"]) == ("operator", "10.0.0.7:4711")
    assert dying.token not in str(lines)
    assert ended.token not in str(lines)


@pytest.mark.parametrize("role", [Role.OPERATOR, Role.JOINER], ids=lambda role: role.value)
async def test_worker_has_one_role_from_first_to_last(node: Node, role: Role) -> None:
    """Lines of attach, resume and detach have the role "worker"; the first two also tell the role it was let in as."""
    caller = Caller(transport="rest", role=role, address="10.0.0.7:4711")
    async with node.life():
        await node.register()
        with capture_logs() as lines:
            first = await node.ask("attach", pb.AttachRequest(cache="main"), caller)
            resumed = pb.AttachRequest(cache="main", resume_token=first.token)
            await node.ask("attach", resumed, caller)
            itself = caller.known_as(Role.WORKER, first.token)
            await node.ask("detach", pb.DetachRequest(), itself)

    told = [(line["event"], line["role"], line.get("let_in_as")) for line in lines]
    assert told == [
        ("worker_attached", "worker", role.value),
        ("worker_resumed", "worker", role.value),
        ("worker_detached", "worker", None),
    ]


async def test_workers_own_calls_are_no_news(node: Node) -> None:
    """Calls that workers make on cached blocks all the time are not logged."""
    async with node.life():
        await node.register()
        worker = await node.attach(tenant="chat")
        with capture_logs() as lines:
            await node.ask("pin", pb.PinRequest(), worker)
            await node.ask("evict", pb.EvictRequest(num_blocks=1), worker)

    assert not lines
