"""A core and a runner that answer by script, and a registry with one cache and one worker for them."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvlease.ids import WorkerId
from kvlease.plan import CachePlan, EngineInputs, PlanInputs
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.caches.entries import READY, CacheEntry, WorkerEntry
from kvleased.caches.registry import Registry
from kvleased.calls.idempotency import Answer, Replies
from kvleased.config.settings import Settings
from kvleased.core.commands import Command
from kvleased.planning import plan
from kvleased.verbs.leases import LeaseVerbs
from kvleased.verbs.runner import Respond
from tests.unit.service.planning.specs import full, window

WORKER = Caller(transport="local", token="worker")


def hybrid_plan() -> CachePlan:
    """Return the plan of full attention with blocks of 32 tokens beside a window with blocks of 16."""
    layers = (full(tokens_per_block=32, num_kv_heads=1), window(window_tokens=64))
    inputs = PlanInputs(
        layers=layers,
        tokens_per_block=16,
        device_blocks=64,
        null_blocks=1,
        longest_request_tokens=512,
        engine=EngineInputs(tokens_per_step=64),
    )
    return plan(inputs)


@dataclass
class ScriptedRunner:
    """Keep the commands and answer each with the same reply."""

    reply: Any = None
    commands: list[Command] = field(default_factory=list)
    waits_ms: list[int] = field(default_factory=list)
    num_settled: int = 0

    def run(
        self, entry: CacheEntry, command: Command, respond: Respond, wait_ms: int = 0
    ) -> Answer:
        """Answer by the script."""
        assert entry.status == READY
        self.commands.append(command)
        self.waits_ms.append(wait_ms)
        return respond(self.reply)

    def settle(self) -> None:
        """Count the call."""
        self.num_settled += 1

    def apply(self, entry: CacheEntry, command: Command) -> object:
        """Answer by the script."""
        return self.run(entry, command, lambda reply: reply)


@dataclass
class ScriptedCore:
    """List what the script says."""

    waiting: tuple[Any, ...] = ()
    tenants: tuple[Any, ...] = ()
    magazines: tuple[Any, ...] = ()

    def list_waiting(self, after_id: int, limit: int, now: float) -> tuple[Any, ...]:
        """Return the waiting calls after an id."""
        assert now > 0
        return tuple(one for one in self.waiting if one.call_id > after_id)[:limit]

    def list_tenants(self) -> tuple[Any, ...]:
        """Return the tenants."""
        return self.tenants

    def list_magazines(self, now: float) -> tuple[Any, ...]:
        """Return the magazines."""
        assert now > 0
        return self.magazines

    def census(self) -> Any:
        """Count the waiting calls."""
        return SimpleNamespace(num_waiting=len(self.waiting))


def registry_of(planned: CachePlan | None = None, core: Any = None) -> Registry:
    """Return a registry with the cache "main" and one worker of it."""
    registry = Registry(epoch=1, max_caches=2, max_workers=8)
    entry = CacheEntry(
        name="main",
        pool=registry.take_pool_number(),
        plan=planned or hybrid_plan(),
        options=pb.CacheOptions(integrity="none"),
        core=core,
        fds={},
        tables_read_only_fd=-1,
        status=READY,
    )
    registry.add_cache(entry)
    add_worker(registry, WORKER.token, "acme")
    return registry


def add_worker(registry: Registry, token: str, tenant: str) -> WorkerEntry:
    """Add a worker of a tenant and return it."""
    worker = WorkerEntry(
        worker_id=WorkerId(registry.next_worker_id()),
        token=token,
        entry=registry.cache("main"),
        tenant=tenant,
        tenant_key=tenant.encode().ljust(32, b"\0"),
        name="engine",
        rank=0,
        pidfd=None,
        replies=Replies(8),
        attached_at=0.0,
    )
    registry.add_worker(worker)
    return worker


def lease_verbs(
    reply: Any = None, planned: CachePlan | None = None
) -> tuple[LeaseVerbs, ScriptedRunner]:
    """Return the verbs of leases over a runner that always gives one reply."""
    runner = ScriptedRunner(reply)
    return LeaseVerbs(registry_of(planned), runner, Settings()), runner
