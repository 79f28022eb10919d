"""Own the client for an event loop; it shares the meaning of its calls with the blocking client."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Self, TypeVar

from kvlease._bound import Bound
from kvlease._calling import calls, flows, late, operator_calls
from kvlease._calling.async_port import AsyncPort
from kvlease._calling.calls import Ask
from kvlease._calling.link import Link
from kvlease._unclosed import warn_unclosed
from kvlease.aio_worker import AsyncWorker
from kvlease.client import (
    DEADLINE_SECONDS,
    Listed,
    OnDoubt,
    Resizable,
    attach_request,
    attaching,
    check_options,
)
from kvlease.credentials import Credentials
from kvlease.operating import Cleared, Deleted, Drained, Resized, TenantLimits, TenantRule
from kvlease.options import DEFAULTS, CacheOptions
from kvlease.plan import CachePlan, PlanInputs
from kvlease.plan_report import ExplainedPlan
from kvlease.replies import (
    CacheInfo,
    Event,
    Evicted,
    Explanation,
    Found,
    Inspection,
    Pinned,
    Reloaded,
    Stats,
)
from kvlease.traces import TracedRequest
from kvlease.transports import open_async_transport
from kvlease.transports.base import chosen_address
from kvlease.wire import traceparent

R = TypeVar("R")


class AsyncClient(Bound):
    """A connection to a daemon for an event loop, with the same verbs as `Client`.

    It belongs to the loop of its first call until it is closed or that loop ends. Until then, calls in another loop are
    refused (InvalidError, rule other_loop).
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        on_doubt: OnDoubt = "miss",
        credentials: Credentials | None = None,
        with_traces: bool = False,
    ) -> None:
        """Remember where the daemon is: `address`, else KVLEASE_ADDRESS, else the user's own local socket.

        Over TCP the client shows the daemon `credentials`, or without them those that the environment names. If these
        have neither a token nor a certificate, it shows a daemon on loopback the token that this user's daemon has left
        there. With `with_traces`, each call names the OpenTelemetry span that it is made in, and the daemon's span
        becomes a child of it.

        Raises:
            InvalidError: the address is malformed, an option is out of range, or the token's file cannot be read.
        """
        check_options(deadline_seconds, on_doubt, with_traces=with_traces)
        self._address = chosen_address(address, credentials)
        self._raises = on_doubt == "raise"
        self._link = Link(
            deadline_seconds=deadline_seconds,
            socket_path=self._address.path,
            traceparent=traceparent.otel() if with_traces else None,
        )
        opened = partial(open_async_transport, self._address)
        self._port = AsyncPort(opened(), open_again=opened)

    def __repr__(self) -> str:
        """Show the address that it connects to."""
        return f"<AsyncClient {self._address}>"

    def __del__(self) -> None:
        """Warn if it was not closed."""
        port = getattr(self, "_port", None)
        if port is not None and port.transport.is_open and not self._link.is_forked:
            warn_unclosed(self)

    async def __aenter__(self) -> Self:
        """Return the client; it connects at its first call."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection; workers stay attached."""
        await self.close()

    async def close(self) -> None:
        """Close the connection; workers stay attached.

        Raises:
            InvalidError: the client belongs to another event loop, which still runs (rule other_loop).
        """
        await self._port.close()

    async def plan(self, inputs: PlanInputs) -> CachePlan:
        """Compute a cache's layout and capacity without changing anything."""
        return await self._told(calls.plan(inputs))

    async def explain(self, inputs: PlanInputs, *changes: str) -> ExplainedPlan:
        """Compute a plan with its equations, and with what each change, such as tokens_per_block=8, would alter."""
        return await self._told(calls.explain(inputs, changes))

    async def register(
        self, cache: str, inputs: PlanInputs, options: CacheOptions = DEFAULTS
    ) -> CacheInfo:
        """Create a cache, or find an equal one that exists.

        A worker that later attaches through this client registers the cache again if the cache ended with its daemon.
        """
        ask = calls.register(cache, inputs, options)
        info = await self._told(ask)
        self._link.registrations[cache] = ask.request
        return info

    async def get_cache(self, cache: str) -> CacheInfo:
        """Describe one cache."""
        return await self._told(calls.get_cache(cache))

    async def list_caches(self) -> tuple[CacheInfo, ...]:
        """Describe all caches."""
        return await self._told(calls.list_caches())

    async def delete_cache(self, cache: str, *, purge: bool = False) -> Deleted:
        """Free a cache that no worker is attached to; its pins end with it.

        The cache's disk store is kept in case the cache is registered again, unless `purge` removes it. A purge may
        take up to the daemon's `mover_seconds_max`, and is refused as WRONG_STATE if the store is off.
        """
        ask = operator_calls.delete_cache(cache, purge=purge)
        with self._link.deleting(cache):
            return await self._told(ask)

    async def stats(self, cache: str = "") -> Stats:
        """Take a snapshot of one cache, or of all."""
        return await self._told(calls.stats(cache))

    async def inspect(
        self, cache: str, what: Listed, *, limit: int = 0, after_id: int = 0
    ) -> Inspection:
        """List who uses a cache or waits for it, by id: at most 256 entries, starting after the id `after_id`."""
        return await self._told(calls.inspect(cache, what, limit, after_id))

    async def explain_lease(self, lease_id: int, *, cache: str = "") -> Explanation:
        """Tell why the rest of a lease's prefix was not found when it was granted."""
        return await self._told(calls.explain_lease(lease_id, cache))

    async def lookup(self, keys: bytes, *, cache: str = "") -> Found:
        """Tell how long a prefix is cached.

        If there is only one cache, `cache` may be left out, here and in `evict`, `reload`, `pin` and `unpin`.
        """
        return await self._told(calls.lookup(keys, cache))

    async def evict(
        self, *, keys: bytes = b"", num_blocks: int = 0, wait_ms: int = 0, cache: str = ""
    ) -> Evicted:
        """Move the blocks of `keys`, or the `num_blocks` coldest, out of the device pool."""
        return await self._told(
            calls.evict(keys=keys, num_blocks=num_blocks, wait_ms=wait_ms, cache=cache)
        )

    async def reload(self, keys: bytes, *, wait_ms: int = 0, cache: str = "") -> Reloaded:
        """Bring the blocks of `keys` back into the device pool."""
        return await self._told(calls.reload_keys(keys, wait_ms, cache))

    async def pin(self, keys: bytes, *, cache: str = "") -> Pinned:
        """Hold cached blocks so that they are not evicted."""
        return await self._told(calls.pin(keys, cache))

    async def unpin(self, pin_id: int, *, cache: str = "") -> bool:
        """End a pin; returns whether it was there."""
        return await self._told(calls.unpin(pin_id, cache))

    async def drain(self, *, cache: str = "") -> Drained:
        """Have a cache, or the daemon, grant no new lease; live leases go on, and the answer counts them.

        Meanwhile a call for a new lease is refused as DRAINING; its caller should ask another daemon. To wait for the
        last lease to end, watch `stats`: a second drain would reverse an undrain that somebody made in between.
        """
        return await self._told(operator_calls.drain(cache))

    async def undrain(self, *, cache: str = "") -> Drained:
        """Have a cache, or the daemon, grant leases again; a cache drained by name must also be undrained by name."""
        return await self._told(operator_calls.undrain(cache))

    async def clear(self, cache: str, *, tenant: str = "") -> Cleared:
        """Drop the cached blocks of one tenant, or of all, that nobody holds; the answer tells who holds the rest."""
        return await self._told(operator_calls.clear(cache, tenant))

    async def resize(self, cache: str, tier: Resizable, num_blocks: int) -> Resized:
        """Set how many blocks a pool grants, up to its registered number, and give the memory of the rest back."""
        return await self._told(operator_calls.resize(cache, tier, num_blocks))

    async def set_tenant(self, tenant: str, limits: TenantLimits, *, revision: int) -> TenantRule:
        """Replace all limits of a tenant at once; an outdated revision is refused."""
        return await self._told(operator_calls.set_tenant(tenant, limits, revision))

    async def get_tenant(self, tenant: str) -> TenantRule:
        """Return the limits that a tenant has now, and their revision."""
        return await self._told(operator_calls.get_tenant(tenant))

    async def detach(self, worker_id: int, *, force: bool = False) -> int:
        """End a worker that has gone and whose death cannot be proven; returns how many leases ended.

        The operator thereby vouches that the worker writes no more. If the daemon watches the worker's process, the
        call is refused without `force`: as long as that process lives, it may write into blocks that others then have.
        """
        return await self._told(calls.detach(worker_id, force=force))

    def watch(
        self,
        *,
        cache: str = "",
        after_sequence: int = 0,
        with_snapshot: bool = False,
        idle_seconds: float | None = None,
    ) -> AsyncIterator[Event]:
        """Yield events as `Client.watch` does, until none has come for `idle_seconds`; None waits for ever."""
        return self._stream(calls.watch(cache, after_sequence, with_snapshot), idle_seconds)

    def trace(
        self, cache: str, *, idle_seconds: float | None = None
    ) -> AsyncIterator[TracedRequest]:
        """Yield a cache's requests as their leases end; the first one has no keys: it says that recording has begun.

        A later one without keys only counts requests that were left out.
        """
        return self._stream(calls.trace(cache), idle_seconds)

    async def attach(  # noqa: PLR0913 - the fields of an attach
        self,
        cache: str,
        *,
        worker_name: str = "",
        rank: int = 0,
        tenant: str = "default",
        layout_fingerprint: str = "",
        engine: str = "",
        magazine: str = "",
        key_counts: bool = False,
        deadline_seconds: float | None = None,
    ) -> AsyncWorker:
        """Make this process a worker of a cache, over a connection of its own, which outlives this client.

        The arguments are those of `Client.attach`.
        """
        await self._port.join()
        request = attach_request(
            cache,
            worker_name=worker_name,
            rank=rank,
            tenant=tenant,
            layout_fingerprint=layout_fingerprint,
            engine=engine,
            magazine=magazine,
            key_counts=key_counts,
        )
        session = attaching(request, self._link, deadline_seconds, raises=self._raises)
        transport = open_async_transport(self._address, partial(late.undoing, session))
        port = AsyncPort(transport, session)
        try:
            await port.run(flows.attach(session))
        except BaseException:
            await port.close()
            raise
        self._link.is_reached = True
        session.link.deadline_seconds = deadline_seconds or self._link.deadline_seconds
        return AsyncWorker(session, transport).start()

    async def _stream(self, ask: Ask[R], idle_seconds: float | None) -> AsyncIterator[R]:
        await self._port.join()
        call = flows.streamed(self._link, ask, idle_seconds)
        async for message in self._port.transport.stream(call, idle_seconds):
            yield ask.read(message)

    async def _told(self, ask: Ask[R]) -> R:
        return await self._port.run(flows.told(self._link, ask))
