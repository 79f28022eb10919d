"""Own the worker for an event loop; it shares the meaning of its calls with `worker`, and clients are in `aio`."""

import asyncio
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from numpy.typing import ArrayLike

from kvlease._calling import calls, flows, late, steps, verbs
from kvlease._calling.async_port import AsyncPort, beat
from kvlease._calling.session import Session
from kvlease._checks import check_alone
from kvlease._unclosed import warn_unclosed
from kvlease.errors import KVLeaseError
from kvlease.lease import AsyncLease, GrantView, grant_of
from kvlease.magazine import AsyncMagazine
from kvlease.replies import (
    Committed,
    Evicted,
    Explanation,
    Found,
    Pinned,
    Priority,
    Reloaded,
    ReserveSpec,
    StepColumns,
)
from kvlease.transports.base import AsyncTransport
from kvlease.transports.local_async import AsyncLocalTransport
from kvlease.worker_view import WorkerView


class AsyncWorker(WorkerView):
    """One process attached to one cache, for an event loop, with the same verbs as `Worker`."""

    def __init__(self, session: Session, transport: AsyncTransport) -> None:
        """Join an attached session to its connection."""
        super().__init__(session)
        self._port = AsyncPort(transport, session)
        self._task: asyncio.Task[None] | None = None
        self._magazine: AsyncMagazine | None = None

    @property
    def _is_written_to(self) -> bool:
        # Only the local socket hands over key counts.
        transport = self._port.transport
        return isinstance(transport, AsyncLocalTransport) and transport.has_peer

    def start(self) -> Self:
        """Begin the heartbeats; the worker belongs to the running event loop from here on."""
        self._port.bind()
        self._task = asyncio.create_task(
            beat(self._session, self._port), name=f"kvlease-worker-{self.worker_id}"
        )
        # The task holds no reference to the worker, so a worker dropped without close stops its heartbeats, too.
        weakref.finalize(self, _end, self._task).atexit = False
        return self

    def __del__(self) -> None:
        """Warn if it was not closed: its leases are held until this process ends."""
        link = self._session.link
        if self._task is not None and not link.is_detached and not link.is_forked:
            warn_unclosed(self)

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

        `ReserveSpec` describes the arguments. `wait_ms` is how many milliseconds the call may wait for blocks, and for
        copies from lower tiers; with 0 it gets what is on the device. With on_doubt="miss", a refusal or a failure
        returns a lease that is not live, with the reason in `refusal`.

        Raises:
            InvalidError: the call is malformed.
            KVLeaseError: the call was refused or failed, and on_doubt is "raise".
        """
        ask = calls.reserve(
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
        flow = verbs.reserved(self._session, request_id, ask)
        return AsyncLease(self, await self._port.run(flow))

    async def extend(self, lease: GrantView, num_tokens: int, *, wait_ms: int = 0) -> bool:
        """Make a lease cover `num_tokens` in all; returns whether it does."""
        return await self._port.run(
            verbs.extend(self._session, grant_of(lease, self), num_tokens, wait_ms)
        )

    async def commit(
        self, lease: GrantView, num_tokens: int, keys: bytes, first_block: int = 0
    ) -> Committed:
        """Make the full blocks among a lease's first `num_tokens`, all of them computed, findable under `keys`.

        There is one key for each `hash_block_tokens` of the plan, and `keys` begins at index `first_block` of the
        request's chain. Blocks that no later token needs leave the lease.
        """
        return await self._port.run(
            verbs.commit(self._session, grant_of(lease, self), num_tokens, keys, first_block)
        )

    async def fork(
        self, lease: GrantView, request_id: str, num_tokens: int, *, wait_ms: int = 0
    ) -> AsyncLease:
        """Lease blocks to a second request that goes on from a running one; the two share the committed blocks.

        If the last committed block is partial, it is copied; `wait_ms` is the time that this copy may take. Nothing
        behind the last commit is copied, so commit first; with recurrent states, commit before the next token is
        written. A fork does not wait for room, and takes none while others have waited for long. If it is refused, it
        returns or raises what a refused reserve does.
        """
        source = grant_of(lease, self)
        flow = verbs.fork(self._session, source, request_id, num_tokens, wait_ms)
        return AsyncLease(self, await self._port.run(flow))

    async def explain(self, lease: GrantView) -> Explanation:
        """Tell why the rest of a lease's prefix was not found when it was granted."""
        return await self._port.run(verbs.explain(self._session, grant_of(lease, self)))

    async def trim(self, lease: GrantView, num_tokens: int) -> int:
        """Take back a lease's blocks behind those that cover `num_tokens`; returns how many left it."""
        return await self._port.run(verbs.trim(self._session, grant_of(lease, self), num_tokens))

    async def evict(
        self,
        lease: GrantView | None = None,
        *,
        keys: bytes = b"",
        num_blocks: int = 0,
        wait_ms: int = 0,
    ) -> Evicted:
        """Move a lease, the blocks of `keys`, or the `num_blocks` coldest blocks out of the device pool."""
        if lease is not None:
            check_alone(keys=keys, num_blocks=num_blocks)
            return await self._port.run(verbs.evict(self._session, grant_of(lease, self), wait_ms))
        ask = calls.evict(keys=keys, num_blocks=num_blocks, wait_ms=wait_ms)
        return await self._port.run(flows.missed(self._session, ask, Evicted))

    async def reload(
        self, lease: GrantView | None = None, *, keys: bytes = b"", wait_ms: int = 0
    ) -> Reloaded:
        """Bring an evicted lease, or the blocks of `keys` in the host pool and disk store, back into the device pool.

        A lease that was mapped before its eviction must be mapped again.
        """
        if lease is not None:
            check_alone(keys=keys)
            return await self._port.run(verbs.reload(self._session, grant_of(lease, self), wait_ms))
        return await self._port.run(
            flows.missed(self._session, calls.reload_keys(keys, wait_ms), Reloaded)
        )

    async def map(self, lease: GrantView) -> int:
        """Publish a lease's row of the block table until the lease is evicted or ends; returns its kernel blocks."""
        return await self._port.run(verbs.map_row(self._session, grant_of(lease, self)))

    async def release(self, lease: GrantView) -> bool:
        """End a lease; returns whether it was there. Committed blocks stay findable."""
        return await self._port.run(verbs.release(self._session, grant_of(lease, self)))

    async def lookup(self, keys: bytes) -> Found:
        """Tell how long a prefix is cached, without holding it.

        With on_doubt="miss", a failed lookup finds nothing, and says why in `refusal`.
        """
        return await self._port.run(flows.missed(self._session, calls.lookup(keys), Found))

    async def pin(self, keys: bytes) -> Pinned:
        """Hold cached blocks so that they are not evicted, until the pin is ended; it outlives the worker.

        With on_doubt="miss", a refusal or a failure returns a pin of no blocks, with the reason in `refusal`. A call
        that ends without an answer may have made a pin all the same: `kvlease pins` lists it, `kvlease unpin` ends it.
        """
        return await self._port.run(flows.missed(self._session, calls.pin(keys), Pinned))

    async def unpin(self, pin_id: int) -> bool:
        """End a pin; returns whether it was there."""
        return await self._port.run(
            flows.missed(self._session, calls.unpin(pin_id), flows.not_there)
        )

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
        """Carry out the columns of one scheduler step and then its reserves, in one call, and update the leases.

        In `verbs`, 1 is extend, 2 commit, 3 release, which does not look at its number of tokens. In the answer's
        `codes`, 0 means done; any other number is that of the error in `kvlease.errors.BY_NUMBER`.
        """
        ask = calls.step(
            verbs=verbs,
            lease_ids=lease_ids,
            num_tokens=num_tokens,
            num_keys=num_keys,
            first_blocks=first_blocks,
            keys=keys,
            reserves=reserves,
        )
        columns, grants = await self._port.run(steps.step(self._session, ask, reserves))
        return columns, [AsyncLease(self, grant) for grant in grants]

    def magazine(self) -> AsyncMagazine:
        """Return the magazine that this worker shares with the other processes of its engine."""
        if self._magazine is None:
            self._magazine = AsyncMagazine(self._session, self._port)
        return self._magazine

    async def heartbeat(self) -> None:
        """Renew the leases now, and end those whose answers were lost; a task does so regularly."""
        await self._port.run(late.disowning(self._session))

    async def detach(self) -> int:
        """End the worker and all its leases, as `Worker.detach` does; returns how many leases the daemon ended."""
        return await self._port.run(flows.detach(self._session))

    async def close(self) -> None:
        """Detach if the worker is still attached, and close connections and memory, as `Worker.close` does.

        After a close that was cancelled, call it again. Once the worker's event loop has ended, any other may close it.

        Raises:
            InvalidError: it is called in another event loop while the worker's own still runs (rule other_loop).
        """
        if self._port.is_orphaned:
            # The heartbeats ended with their loop.
            await self._port.take_over()
        else:
            self._port.bind()
            await self._end_heartbeats()
        if not self._session.link.has_ended and not self._session.link.is_forked:
            with suppress(KVLeaseError):
                await self.detach()
        await self._port.close()
        if self._session.memory is not None:
            self._session.memory.close()

    async def _end_heartbeats(self) -> None:
        if self._task is not None:
            self._task.cancel()
            # Awaiting the task itself would raise its CancelledError; this raises only the caller's own.
            await asyncio.wait([self._task])


def _end(task: asyncio.Task[None]) -> None:
    """End the heartbeats of a worker that was dropped; any thread may call this."""
    with suppress(RuntimeError):  # the loop was closed, so no heartbeats are sent
        task.get_loop().call_soon_threadsafe(task.cancel)
