"""Own one try to attach: register the cache, compare placement and identity, and get worker, magazine and memory.

`attacher.py` decides when to try, and what to do after a refusal.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvlease.client import Client
from kvlease.errors import LayoutMismatchError, NeverFitsError, StaleError, StartingError
from kvlease.integrations.vllm.identity.namespace import Identity
from kvlease.integrations.vllm.session.terms import Terms
from kvlease.integrations.vllm.settings import ConnectorSettings
from kvlease.memory.mapped import Identity as MemoryIdentity
from kvlease.plan import CachePlan
from kvlease.replies import CacheInfo
from kvlease.worker import Worker

_logger: Final = logging.getLogger(__name__)

_READY: Final = "ready"
ATTACH_SECONDS: Final = 5.0
"""Seconds that registering and attaching may take at least; only the background thread waits for them."""


@dataclass(frozen=True, slots=True, eq=False)
class Attachment:
    """One attachment: a worker, its magazine, and the memory that it has mapped."""

    worker: Worker
    magazine: Any
    plan: CachePlan
    device: NDArray[np.uint8] | None
    memory: MemoryIdentity
    memory_generation: int = field(default=0)

    @property
    def is_elsewhere(self) -> bool:
        """Whether the worker has attached again by itself and now has other memory than this attachment."""
        return self.worker.memory_generation != self.memory_generation

    def limit(self, seconds: float) -> None:
        """Set the deadline of the worker's calls, in seconds."""
        self.worker.deadline_seconds = seconds


def attach(settings: ConnectorSettings, terms: Terms) -> Attachment:
    """Register the cache, or find an equal one, and attach to it.

    Raises:
        LayoutMismatchError: anything differs, or the pool is on a GPU; the message says what to change.
        InvalidError: the address is not a local socket's.
        KVLeaseError: the daemon is away, is not ready yet, or refuses.
    """
    name = settings.cache or terms.cache
    with Client(
        settings.local_address,
        deadline_seconds=max(settings.start_seconds, ATTACH_SECONDS),
        on_doubt="raise",
    ) as client:
        if terms.inputs is None:
            info = client.get_cache(name)
            _check_identity(name, info.plan, terms.identity)
        else:
            info = _register(client, name, settings, terms)
        plan = info.plan
        if found := list(terms.disagreements(plan)):
            raise LayoutMismatchError(
                f"the plan of cache {name} differs from vLLM's own: {'; '.join(found)}",
                resource="layout",
            )
        if info.status != _READY:
            raise StartingError(f"cache {name} has {info.bytes_populated} bytes populated so far")
        worker = client.attach(
            name,
            worker_name="vllm",
            rank=terms.rank,
            tenant=settings.tenant,
            layout_fingerprint=plan.layout_fingerprint,
            # Only later calls have this deadline; attaching itself may take longer.
            deadline_seconds=settings.deadline_seconds,
            magazine=terms.magazine,
            key_counts=terms.key_counts,
        )
    if worker.gpu is not None:
        worker.close()
        message = (
            f"the blocks of cache {name} are in GPU memory, but this connector uses pools in CPU memory; start the "
            "daemon with --device cpu"
        )
        raise LayoutMismatchError(message, resource="device")
    return _described(worker, with_magazine=bool(terms.magazine))


def _register(client: Client, name: str, settings: ConnectorSettings, terms: Terms) -> CacheInfo:
    assert terms.inputs is not None, "only a process that has inputs registers"
    inputs = replace(
        terms.inputs,
        model_digest=terms.identity.model_digest,
        host_bytes=settings.host_bytes or terms.inputs.host_bytes,
        disk_bytes=settings.disk_bytes or terms.inputs.disk_bytes,
        remote_bytes=settings.remote_bytes or terms.inputs.remote_bytes,
    )
    try:
        return client.register(name, inputs, settings.options)
    except NeverFitsError as error:
        if error.resource != "memory_bytes":
            raise
        raise NeverFitsError(terms.no_room(error), resource=error.resource) from error
    except LayoutMismatchError as error:
        with suppress(StaleError):
            there = client.get_cache(name)
            _check_identity(name, there.plan, terms.identity)
            if terms.takes_other_capacity and not terms.disagreements(there.plan):
                _logger.info(
                    "The cache is used as it is: %s.",
                    error.message,
                    extra={"action": "other_sizes"},
                )
                return there
        message = (
            f"{error.message}, which is the setting `cache`; delete the old cache only when no engine "
            "uses it"
        )
        raise LayoutMismatchError(message, resource="layout") from error


def _check_identity(name: str, plan: CachePlan, identity: Identity) -> None:
    if differing := identity.differing(plan.model_digest):
        message = (
            f"cache {name} belongs to another engine, which differs in {'; '.join(differing)}. "
            "Set `cache` to another name, or start the engines with the same settings"
        )
        raise LayoutMismatchError(message, resource="identity")


def _described(worker: Worker, *, with_magazine: bool) -> Attachment:
    return Attachment(
        worker=worker,
        magazine=worker.magazine() if with_magazine else None,  # type: ignore[attr-defined,unused-ignore]
        plan=worker.plan,
        device=worker.device,
        memory=worker.memory_identity,
        memory_generation=worker.memory_generation,
    )
