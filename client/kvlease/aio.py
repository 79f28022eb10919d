"""Own the client and the worker for an event loop; what calls mean they share with the blocking ones."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Self, TypeVar

from numpy.typing import ArrayLike

from kvlease import _calls, _flows, _steps, _verbs
from kvlease._async_port import AsyncPort, beat
from kvlease._calls import Ask
from kvlease._session import Link, Session
from kvlease.client import DEADLINE_SECONDS, Listed, OnDoubt, attach_request, check_options
from kvlease.errors import KVLeaseError
from kvlease.lease import AsyncLease, GrantView
from kvlease.magazine import AsyncMagazine
from kvlease.options import DEFAULTS, CacheOptions
from kvlease.plan import CachePlan, PlanInputs
from kvlease.plan_report import ExplainedPlan
from kvlease.replies import (
    CacheInfo,
    Committed,
    Event,
    Evicted,
    Explanation,
    Found,
    Inspection,
    Pinned,
    Priority,
    Reloaded,
    ReserveSpec,
    Stats,
    StepColumns,
)
from kvlease.traces import TracedRequest
from kvlease.transports import open_async_transport
from kvlease.transports.base import AsyncTransport, default_address, parse_address
from kvlease.worker import WorkerView

R = TypeVar("R")


class AsyncWorker(WorkerView):
    """One process attached to one cache, for an event loop; the same verbs as `Worker`."""

    def __init__(self, session: Session, transport: AsyncTransport) -> None:
        """Join an attached session to its connection."""
        super().__init__(session)
        self._port = AsyncPort(transport, session)
        self._task: asyncio.Task[None] | None = None
        self._is_detached = False
        self._magazine: AsyncMagazine | None = None

    def start(self) -> Self:
        """Begin the heartbeats."""
        self._task = asyncio.create_task(
            beat(self._session, self._port), name=f"kvlease-worker-{self.worker_id}"
        )
        return self

    async def __aenter__(self) -> Self:
        """Return the worker."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Detach and close."""
        await self.close()

    async def reserve(  # noqa: PLR0913 - the fields of a reserve
        self,
        request_id: str,
        *,
        num_tokens: int,
        keys: bytes = b"",
        wait_ms: int = 0,
        token_ids: bytes = b"",
        priority: Priority = "normal",
        retain_seconds: int = 0,
        explain: bool = False,
        retain_priority: int | None = None,
    ) -> AsyncLease:
        """Lease blocks for `num_tokens`, reusing the longest cached prefix that `keys` name.

        `priority` says how soon it is served and how long its committed blocks stay cached after their last use: for
        `retain_seconds`, or with 0 always; a `retain_priority` from 0 to 100 says the second in its place, 0 as low, 50
        as normal, 100 as high. With `explain` the lease says in `misses` why the rest of the prefix was not found. With
        on_doubt="miss" a refusal or a failure gives a lease that is not live and says why in `refusal`.

        Raises:
            InvalidError: the call is malformed.
            KVLeaseError: it was refused or failed, and on_doubt is "raise".
        """
        ask = _calls.reserve(
            request_id=request_id,
            num_tokens=num_tokens,
            keys=keys,
            wait_ms=wait_ms,
            token_ids=token_ids,
            priority=priority,
            retain_seconds=retain_seconds,
            explain=explain,
            retain_priority=retain_priority,
        )
        flow = _verbs.reserved(self._session, request_id, ask)
        return AsyncLease(self, await self._port.run(flow))

    async def extend(self, lease: GrantView, num_tokens: int, *, wait_ms: int = 0) -> bool:
        """Make a lease cover `num_tokens` in all; returns whether it does."""
        return await self._port.run(
            _verbs.extend(self._session, lease.grant_of(self), num_tokens, wait_ms)
        )

    async def commit(
        self, lease: GrantView, num_tokens: int, keys: bytes, first_block: int = 0
    ) -> Committed:
        """Make the full blocks among a lease's first `num_tokens`, all of them computed, findable under `keys`.

        There is one key for each `hash_block_tokens` of the plan; `first_block` is the index of the first one that is
        given. What no later token needs leaves the lease.
        """
        return await self._port.run(
            _verbs.commit(self._session, lease.grant_of(self), num_tokens, keys, first_block)
        )

    async def fork(
        self, lease: GrantView, request_id: str, num_tokens: int, *, wait_ms: int = 0
    ) -> AsyncLease:
        """Lease blocks to a second request that goes on from a running one: shared as far as they are committed.

        Blocks that are written but not committed are copied. A refusal gives what it gives of a reserve.
        """
        source = lease.grant_of(self)
        flow = _verbs.fork(self._session, source, request_id, num_tokens, wait_ms)
        return AsyncLease(self, await self._port.run(flow))

    async def explain(self, lease: GrantView) -> Explanation:
        """Tell why the rest of a lease's prefix was not found when it was granted."""
        return await self._port.run(_verbs.explain(self._session, lease.grant_of(self)))

    async def trim(self, lease: GrantView, num_tokens: int) -> int:
        """Take back a lease's blocks behind those that cover `num_tokens`; returns how many left it."""
        return await self._port.run(_verbs.trim(self._session, lease.grant_of(self), num_tokens))

    async def evict(
        self,
        lease: GrantView | None = None,
        *,
        keys: bytes = b"",
        num_blocks: int = 0,
        wait_ms: int = 0,
    ) -> Evicted:
        """Move a lease, the blocks of `keys` or the `num_blocks` coldest out of the device pool."""
        if lease is not None:
            return await self._port.run(_verbs.evict(self._session, lease.grant_of(self), wait_ms))
        ask = _calls.evict(keys=keys, num_blocks=num_blocks, wait_ms=wait_ms)
        return await self._port.run(_flows.missed(self._session, ask, Evicted()))

    async def reload(
        self, lease: GrantView | None = None, *, keys: bytes = b"", wait_ms: int = 0
    ) -> Reloaded:
        """Bring an evicted lease, or what host pool and disk store have of `keys`, back into the device pool."""
        if lease is not None:
            return await self._port.run(_verbs.reload(self._session, lease.grant_of(self), wait_ms))
        return await self._port.run(
            _flows.missed(self._session, _calls.reload_keys(keys, wait_ms), Reloaded())
        )

    async def map(self, lease: GrantView) -> int:
        """Publish a lease's row of the block table; returns its kernel blocks."""
        return await self._port.run(_verbs.map_row(self._session, lease.grant_of(self)))

    async def release(self, lease: GrantView) -> bool:
        """End a lease; returns whether it was there. Committed blocks stay findable."""
        return await self._port.run(_verbs.release(self._session, lease.grant_of(self)))

    async def lookup(self, keys: bytes) -> Found:
        """Tell how long a prefix is cached, without holding it."""
        return await self._port.run(_flows.missed(self._session, _calls.lookup(keys), Found()))

    async def pin(self, keys: bytes) -> Pinned:
        """Hold cached blocks so that they are not evicted."""
        return await self._port.run(_flows.missed(self._session, _calls.pin(keys), Pinned()))

    async def unpin(self, pin_id: int) -> bool:
        """End a pin; returns whether it was there."""
        return await self._port.run(_flows.missed(self._session, _calls.unpin(pin_id), idle=False))

    async def step(  # noqa: PLR0913 - one parameter a column
        self,
        *,
        verbs: ArrayLike,
        lease_ids: ArrayLike,
        num_tokens: ArrayLike,
        num_keys: ArrayLike | None = None,
        first_blocks: ArrayLike | None = None,
        keys: bytes = b"",
        reserves: Sequence[ReserveSpec] = (),
    ) -> tuple[StepColumns, list[AsyncLease]]:
        """Carry out the columns of one scheduler step and then its reserves, in one call; leases follow suit."""
        ask = _calls.step(
            verbs=verbs,
            lease_ids=lease_ids,
            num_tokens=num_tokens,
            num_keys=num_keys,
            first_blocks=first_blocks,
            keys=keys,
            reserves=reserves,
        )
        columns, grants = await self._port.run(_steps.step(self._session, ask, reserves))
        return columns, [AsyncLease(self, grant) for grant in grants]

    def magazine(self) -> AsyncMagazine:
        """Return the magazine that this worker shares with the other processes of its engine."""
        if self._magazine is None:
            self._magazine = AsyncMagazine(self._session, self._port)
        return self._magazine

    async def heartbeat(self) -> None:
        """Renew the leases now; a task does so all the time."""
        await self._port.run(_flows.heartbeat(self._session))

    async def detach(self) -> int:
        """End the worker and all its leases; returns how many the daemon ended."""
        self._is_detached = True
        return await self._port.run(_flows.detach(self._session))

    async def close(self) -> None:
        """Detach if that was not done, and close connections and memory; views that callers keep stay valid."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if not self._is_detached and not self._session.link.is_forked:
            with suppress(KVLeaseError):
                await self.detach()
        await self._port.transport.close()
        if self._session.memory is not None:
            self._session.memory.close()


class AsyncClient:
    """A connection to a daemon for an event loop; the same verbs as `Client`."""

    def __init__(
        self,
        address: str | None = None,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        on_doubt: OnDoubt = "miss",
    ) -> None:
        """Remember where the daemon is: `address`, else KVLEASE_ADDRESS, else the user's own local socket.

        Raises:
            InvalidError: the address is malformed, or an option out of range.
        """
        check_options(deadline_seconds, on_doubt)
        self._address = parse_address(default_address() if address in (None, "") else address)
        self._raises = on_doubt == "raise"
        self._link = Link(deadline_seconds=deadline_seconds, socket_path=self._address.path)
        self._port = AsyncPort(open_async_transport(self._address))

    def __repr__(self) -> str:
        """Show where it connects to."""
        return f"<AsyncClient {self._address}>"

    async def __aenter__(self) -> Self:
        """Return the client; it connects at its first call."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection; workers stay attached."""
        await self.close()

    async def close(self) -> None:
        """Close the connection; workers stay attached."""
        await self._port.transport.close()

    async def plan(self, inputs: PlanInputs) -> CachePlan:
        """Compute a cache's layout and capacity without changing anything."""
        return await self._told(_calls.plan(inputs))

    async def explain(self, inputs: PlanInputs, *changes: str) -> ExplainedPlan:
        """Compute a plan with its equations, and what changes, such as tokens_per_block=8, would change."""
        return await self._told(_calls.explain(inputs, changes))

    async def register(
        self, cache: str, inputs: PlanInputs, options: CacheOptions = DEFAULTS
    ) -> CacheInfo:
        """Create a cache, or find an equal one that exists."""
        return await self._told(_calls.register(cache, inputs, options))

    async def get_cache(self, cache: str) -> CacheInfo:
        """Describe one cache."""
        return await self._told(_calls.get_cache(cache))

    async def list_caches(self) -> tuple[CacheInfo, ...]:
        """Describe all caches."""
        return await self._told(_calls.list_caches())

    async def delete_cache(self, cache: str) -> None:
        """Free a cache that no worker is attached to."""
        await self._told(_calls.delete_cache(cache))

    async def stats(self, cache: str = "") -> Stats:
        """Take a snapshot of one cache, or of all."""
        return await self._told(_calls.stats(cache))

    async def inspect(
        self, cache: str, what: Listed, *, limit: int = 0, after_id: int = 0
    ) -> Inspection:
        """List who uses or waits for a cache, by id: up to 256 entries after the last id of the page before."""
        return await self._told(_calls.inspect(cache, what, limit, after_id))

    async def explain_lease(self, lease_id: int, *, cache: str = "") -> Explanation:
        """Tell why the rest of a lease's prefix was not found when it was granted."""
        return await self._told(_calls.explain_lease(lease_id, cache))

    async def lookup(self, keys: bytes, *, cache: str = "") -> Found:
        """Tell how long a prefix is cached. `cache` may be left out where there is only one; so below."""
        return await self._told(_calls.lookup(keys, cache))

    async def evict(
        self, *, keys: bytes = b"", num_blocks: int = 0, wait_ms: int = 0, cache: str = ""
    ) -> Evicted:
        """Move the blocks of `keys`, or the `num_blocks` coldest, out of the device pool."""
        return await self._told(
            _calls.evict(keys=keys, num_blocks=num_blocks, wait_ms=wait_ms, cache=cache)
        )

    async def reload(self, keys: bytes, *, wait_ms: int = 0, cache: str = "") -> Reloaded:
        """Bring the blocks of `keys` back into the device pool."""
        return await self._told(_calls.reload_keys(keys, wait_ms, cache))

    async def pin(self, keys: bytes, *, cache: str = "") -> Pinned:
        """Hold cached blocks so that they are not evicted."""
        return await self._told(_calls.pin(keys, cache))

    async def unpin(self, pin_id: int, *, cache: str = "") -> bool:
        """End a pin; returns whether it was there."""
        return await self._told(_calls.unpin(pin_id, cache))

    async def detach(self, worker_id: int) -> int:
        """End a worker that has gone and whose death cannot be proven; returns how many leases ended.

        It is the operator's word that the worker writes no more. One whose process is watched is refused.
        """
        return await self._told(_calls.detach(worker_id))

    def watch(
        self, *, cache: str = "", after_sequence: int = 0, idle_seconds: float | None = None
    ) -> AsyncIterator[Event]:
        """Yield events, oldest first, until none came for `idle_seconds`; None waits for ever."""
        return self._stream(_calls.watch(cache, after_sequence), idle_seconds)

    def trace(
        self, cache: str, *, idle_seconds: float | None = None
    ) -> AsyncIterator[TracedRequest]:
        """Yield the requests of a cache as their leases end; the first one has no keys: recording has begun."""
        return self._stream(_calls.trace(cache), idle_seconds)

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
    ) -> AsyncWorker:
        """Make this process a worker of a cache, over a connection of its own that this client's end does not close.

        The arguments are those of `Client.attach`.
        """
        request = attach_request(
            cache,
            worker_name=worker_name,
            rank=rank,
            tenant=tenant,
            layout_fingerprint=layout_fingerprint,
            engine=engine,
            magazine=magazine,
        )
        # A worker may start before its daemon, and waits for it.
        link = Link(deadline_seconds=self._link.deadline_seconds, is_reached=True)
        session = Session(link, request, raises=self._raises)
        transport = open_async_transport(self._address)
        try:
            await AsyncPort(transport).run(_flows.attach(session))
        except BaseException:
            await transport.close()
            raise
        return AsyncWorker(session, transport).start()

    async def _stream(self, ask: Ask[R], idle_seconds: float | None) -> AsyncIterator[R]:
        call = _flows.streamed(self._link, ask)
        async for message in self._port.transport.stream(call, idle_seconds):
            yield ask.read(message)

    async def _told(self, ask: Ask[R]) -> R:
        return await self._port.run(_flows.told(self._link, ask))
