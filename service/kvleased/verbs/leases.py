"""Own the verbs that a scheduler calls on blocks, leases and pins; the core makes the decisions."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import numpy as np
import structlog
from google.protobuf.message import Message

from kvlease._checks import check_token_ids
from kvlease.errors import InvalidError, NotYoursError
from kvlease.ids import BYTES_PER_KEY, LeaseId, PinId, WorkerId
from kvlease.keys import BlockKeys
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.caches.entries import CacheEntry, WorkerEntry
from kvleased.caches.registry import Registry
from kvleased.calls import checks
from kvleased.calls.idempotency import Answer
from kvleased.config.settings import Settings
from kvleased.core import commands as c
from kvleased.core.effects import Stepped
from kvleased.verbs import replies
from kvleased.verbs.explaining import Explainer, explain
from kvleased.verbs.runner import Respond, Runner, Verb

_LOG = structlog.get_logger()


class LeaseVerbs:
    """The verbs that a scheduler calls."""

    def __init__(self, registry: Registry, runner: Runner, settings: Settings) -> None:
        """Take what the verbs work with."""
        self._registry = registry
        self._run = runner.run
        self._settle = runner.settle
        self._settings = settings
        self._keys_max = settings.max_blocks_a_call
        self._operations_max = settings.max_operations_a_step
        self._wait_ms_max = settings.wait_ms_max

    @property
    def table(self) -> Mapping[str, Verb]:
        """The verbs by name."""
        return {
            "reserve": self.reserve,
            "map": self.map,
            "extend": self.extend,
            "commit": self.commit,
            "fork": self.fork,
            "trim": self.trim,
            "evict": self.evict,
            "reload": self.reload,
            "release": self.release,
            "explain": self.explain,
            "lookup": self.lookup,
            "pin": self.pin,
            "unpin": self.unpin,
            "step": self.step,
        }

    def reserve(self, request: pb.ReserveRequest, caller: Caller) -> Answer:
        """Grant blocks for one request."""
        worker = self._registry.worker(caller.token)
        command = self._reserve_command(worker, request)
        if request.token_ids:
            return asyncio.ensure_future(
                self._reserve_by_tokens(worker, command, request.token_ids)
            )
        respond = self._told(worker, command) if command.explain else replies.reserved
        return self._run(worker.entry, command, respond, command.wait_ms)

    def map(self, request: pb.MapRequest, caller: Caller) -> Answer:
        """Publish a lease's row."""
        worker = self._registry.worker(caller.token)
        command = c.Map(worker_id=worker.worker_id, lease_id=_lease(request.lease_id))
        return self._run(worker.entry, command, replies.mapped)

    def extend(self, request: pb.ExtendRequest, caller: Caller) -> Answer:
        """Make a lease longer."""
        worker = self._registry.worker(caller.token)
        command = c.Extend(
            worker_id=worker.worker_id,
            lease_id=_lease(request.lease_id),
            num_tokens=checks.count("num_tokens", request.num_tokens, 1, checks.TOKENS_MAX),
            wait_ms=self._wait_ms(request.wait_ms),
        )
        return self._run(worker.entry, command, replies.extended, command.wait_ms)

    def commit(self, request: pb.CommitRequest, caller: Caller) -> Answer:
        """Make full blocks findable."""
        worker = self._registry.worker(caller.token)
        checks.keys("keys", request.keys, self._keys_max)
        command = c.Commit(
            worker_id=worker.worker_id,
            lease_id=_lease(request.lease_id),
            num_tokens=checks.count("num_tokens", request.num_tokens, 0, checks.TOKENS_MAX),
            first_block=checks.count("first_block", request.first_block, 0, checks.TOKENS_MAX),
            keys=request.keys,
        )
        return self._run(worker.entry, command, replies.committed)

    def fork(self, request: pb.ForkRequest, caller: Caller) -> Answer:
        """Lease the blocks of a running request to a second one."""
        worker = self._registry.worker(caller.token)
        command = c.Fork(
            worker_id=worker.worker_id,
            lease_id=_lease(request.lease_id),
            request_id=checks.request_id(request.request_id),
            num_tokens=checks.count("num_tokens", request.num_tokens, 1, checks.TOKENS_MAX),
            wait_ms=self._wait_ms(request.wait_ms) or self._settings.copy_wait_ms,
        )
        return self._run(worker.entry, command, replies.forked, command.wait_ms)

    def trim(self, request: pb.TrimRequest, caller: Caller) -> Answer:
        """Give back a lease's blocks behind a token."""
        worker = self._registry.worker(caller.token)
        command = c.Trim(
            worker_id=worker.worker_id,
            lease_id=_lease(request.lease_id),
            num_tokens=checks.count("num_tokens", request.num_tokens, 1, checks.TOKENS_MAX),
        )
        return self._run(worker.entry, command, replies.trimmed)

    def evict(self, request: pb.EvictRequest, caller: Caller) -> Answer:
        """Move blocks out of the device pool."""
        checks.exactly_one(
            (
                ("lease_id", request.lease_id),
                ("keys", request.keys),
                ("num_blocks", request.num_blocks),
            )
        )
        checks.keys("keys", request.keys, self._keys_max)
        entry = self._registry.cache_of(caller)
        command = c.Evict(
            worker_id=self._worker_id(caller, request.lease_id),
            lease_id=_lease(request.lease_id) if request.lease_id else None,
            keys=request.keys,
            num_blocks=checks.count("num_blocks", request.num_blocks, 0, checks.TOKENS_MAX),
            wait_ms=self._wait_ms(request.wait_ms) or self._settings.copy_wait_ms,
        )
        respond = _noted("evicted_by_operator", entry, caller, replies.evicted)
        return self._run(entry, command, respond, command.wait_ms)

    def reload(self, request: pb.ReloadRequest, caller: Caller) -> Answer:
        """Bring blocks back into the device pool."""
        checks.exactly_one((("lease_id", request.lease_id), ("keys", request.keys)))
        checks.keys("keys", request.keys, self._keys_max)
        entry = self._registry.cache_of(caller)
        command = c.Reload(
            worker_id=self._worker_id(caller, request.lease_id),
            lease_id=_lease(request.lease_id) if request.lease_id else None,
            keys=request.keys,
            wait_ms=self._wait_ms(request.wait_ms) or self._settings.copy_wait_ms,
        )
        return self._run(entry, command, replies.reloaded, command.wait_ms)

    def release(self, request: pb.ReleaseRequest, caller: Caller) -> Answer:
        """End a lease."""
        worker = self._registry.worker(caller.token)
        command = c.Release(worker_id=worker.worker_id, lease_id=_lease(request.lease_id))
        return self._run(worker.entry, command, replies.released)

    def explain(self, request: pb.ExplainRequest, caller: Caller) -> Answer:
        """Tell why the rest of a lease's prefix was not found."""
        lease_id = _lease(request.lease_id)
        return explain(self._registry, self._run, caller, request.cache, lease_id)

    def lookup(self, request: pb.LookupRequest, caller: Caller) -> Answer:
        """Tell how long a prefix is cached."""
        checks.keys("keys", request.keys, self._keys_max)
        command = c.Lookup(keys=request.keys, tenant_digest=self._tenant(caller))
        return self._run(self._registry.cache_of(caller), command, replies.found)

    def pin(self, request: pb.PinRequest, caller: Caller) -> Answer:
        """Hold cached blocks on the device."""
        checks.keys("keys", request.keys, self._keys_max)
        command = c.Pin(keys=request.keys, tenant_digest=self._tenant(caller))
        entry = self._registry.cache_of(caller)
        return self._run(
            entry, command, _noted("pinned_by_operator", entry, caller, replies.pinned)
        )

    def unpin(self, request: pb.UnpinRequest, caller: Caller) -> Answer:
        """End a pin; there is none under 0, which pin returns if it held no block."""
        if request.pin_id < 0:
            message = f"pin_id is {request.pin_id}; it must be a pin_id that pin returned"
            raise InvalidError(message, resource="pin_id")
        command = c.Unpin(pin_id=PinId(request.pin_id), tenant_digest=self._tenant(caller))
        entry, pin = self._registry.cache_of(caller), {"pin_id": request.pin_id}
        respond = _noted("unpinned_by_operator", entry, caller, replies.unpinned, pin)
        return self._run(entry, command, respond)

    def step(self, request: pb.StepRequest, caller: Caller) -> Answer:
        """Carry out the operations of one scheduler step."""
        worker = self._registry.worker(caller.token)
        # The core checks that the columns fit each other. Each column is read only once, because reading copies it.
        command = c.Step(
            worker_id=worker.worker_id,
            verbs=request.verbs,
            lease_ids=request.lease_ids,
            num_tokens=request.num_tokens,
            num_keys=request.num_keys,
            first_blocks=request.first_blocks,
            keys=request.keys,
            reserves=self._step_reserves(worker, request),
        )
        checks.packed("verbs", command.verbs, 1, self._operations_max)
        if command.keys:
            checks.keys("keys", command.keys, self._keys_max)
        respond: Respond = replies.stepped
        if command.reserves:
            explainer = Explainer(self._registry, worker.entry, worker)
            respond = partial(replies.stepped, explain=explainer.add_misses)
        return self._run(worker.entry, command, _tallied(worker.entry, respond))

    def _step_reserves(self, worker: WorkerEntry, request: pb.StepRequest) -> tuple[c.Reserve, ...]:
        if not request.reserves:
            return ()
        checks.count("reserves", len(request.reserves), 0, self._operations_max)
        reserves = []
        for index, reserve in enumerate(request.reserves):
            where = f"reserves[{index}]."
            if reserve.wait_ms or reserve.token_ids:
                field = "wait_ms" if reserve.wait_ms else "token_ids"
                message = (
                    f"{where}{field} is set; a reserve in a step must bring keys and cannot wait"
                )
                raise InvalidError(message, resource=f"{where}{field}")
            reserves.append(self._reserve_command(worker, reserve, where))
        return tuple(reserves)

    def _reserve_command(
        self, worker: WorkerEntry, request: pb.ReserveRequest, where: str = ""
    ) -> c.Reserve:
        if request.keys:
            checks.keys(f"{where}keys", request.keys, self._keys_max)
            if request.token_ids:
                message = "keys and token_ids are both set; send one of them"
                raise InvalidError(message, resource="token_ids")
        if request.token_ids:
            checks.packed("token_ids", request.token_ids, 4, self._settings.max_tokens_hashed)
            if request.num_tokens:
                check_token_ids(request.token_ids, request.num_tokens)
        return c.Reserve(
            worker_id=worker.worker_id,
            request_id=checks.request_id(request.request_id, where + "request_id"),
            keys=request.keys,
            num_tokens=checks.count(where + "num_tokens", request.num_tokens, 1, checks.TOKENS_MAX),
            wait_ms=self._wait_ms(request.wait_ms) if request.wait_ms else 0,
            priority=(
                checks.priority(where + "priority", request.priority)
                if request.priority
                else checks.PRIORITY_DEFAULT
            ),
            retain_seconds=(
                checks.seconds_retained(where + "retain_seconds", request.retain_seconds)
                if request.retain_seconds
                else 0
            ),
            explain=request.explain,
            retain_priority=(
                checks.retain_priority(where + "retain_priority", request.retain_priority)
                if request.HasField("retain_priority")
                else None
            ),
        )

    async def _reserve_by_tokens(
        self, worker: WorkerEntry, command: c.Reserve, token_ids: bytes
    ) -> Message:
        """Compute the keys off the loop, for a caller that has only token ids."""
        plan = worker.entry.plan
        tokens = np.frombuffer(token_ids, "<i4")
        naming = BlockKeys(worker.tenant_key, plan.layout_fingerprint, plan.model_digest)
        keys = await asyncio.to_thread(naming.chain, tokens, plan.hash_block_tokens)
        command = replace(command, keys=keys[: self._keys_max * BYTES_PER_KEY])
        answer = self._run(worker.entry, command, self._told(worker, command), command.wait_ms)
        self._settle()
        return await answer if isinstance(answer, asyncio.Future) else answer

    def _told(self, worker: WorkerEntry, command: c.Reserve) -> Respond:
        if not command.explain:
            return replies.reserved
        explainer = Explainer(self._registry, worker.entry, worker)
        return lambda reply: explainer.add_misses(replies.reserved(reply), reply)

    def _wait_ms(self, wait_ms: int) -> int:
        return checks.count("wait_ms", wait_ms, 0, self._wait_ms_max) if wait_ms else 0

    def _tenant(self, caller: Caller) -> int | None:
        """Return the digest of the tenant whose blocks a call may be about; None, for an operator, is all tenants."""
        return self._registry.worker(caller.token).tenant_digest if caller.token else None

    def _worker_id(self, caller: Caller, lease_id: int) -> WorkerId | None:
        if caller.token:
            return self._registry.worker(caller.token).worker_id
        if lease_id:
            message = "a lease belongs to its worker; send the worker's token"
            raise NotYoursError(message, resource="lease_id")
        return None


def _tallied(entry: CacheEntry, respond: Respond) -> Respond:
    """Return a function that responds to a step, and counts what the step refused."""

    def count(reply: Stepped) -> Message:
        entry.tally.stepped(reply)
        return respond(reply)

    return count


def _noted(
    event: str,
    entry: CacheEntry,
    caller: Caller,
    respond: Respond,
    fields: Mapping[str, object] = MappingProxyType({}),
) -> Respond:
    """Return a function that responds to a call on cached blocks, and logs the call if it is an operator's."""
    if caller.token:
        return respond

    def note(reply: object) -> Message:
        response = respond(reply)
        told = {field.name: value for field, value in response.ListFields()}
        _LOG.info(event, cache=entry.name, **fields, **told, **caller.who)
        return response

    return note


def _lease(lease_id: int) -> LeaseId:
    if lease_id <= 0:
        message = f"lease_id is {lease_id}; it must be a lease_id that reserve returned"
        raise InvalidError(message, resource="lease_id")
    return LeaseId(lease_id)
