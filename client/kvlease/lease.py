"""Own what an engine sees of a lease: its blocks, its life and its verbs; how the verbs run is `verbs`' business."""

from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from kvlease._bound import Bound
from kvlease._calling.grants import Grant
from kvlease._checks import wrong_type
from kvlease.errors import InvalidError, KVLeaseError
from kvlease.replies import Committed, Evicted, Explanation, Miss, Reloaded

if TYPE_CHECKING:
    from kvlease.aio_worker import AsyncWorker
    from kvlease.worker import Worker
    from kvlease.worker_view import WorkerView


class GrantView(Bound):
    """The state of a lease; one thread at a time may use a lease's verbs."""

    def __init__(self, worker: "WorkerView", grant: Grant) -> None:
        """Join a grant to the worker that keeps it up to date and sends its calls."""
        self.grant = grant
        self._holder = worker

    def __repr__(self) -> str:
        """Show life: how many blocks it has, that it is evicted, or why it ended."""
        grant = self.grant
        if not grant.is_live:
            state = f"ended: {grant.refusal.code}" if grant.refusal else "released"
        else:
            state = "evicted" if grant.is_evicted else f"{grant.num_blocks} blocks"
        return f"<{type(self).__name__} {grant.lease_id} of {grant.request_id!r}, {state}>"

    @property
    def request_id(self) -> str:
        """The engine's name for the request."""
        return self.grant.request_id

    @property
    def lease_id(self) -> int:
        """The lease's id; 0 if none was granted."""
        return self.grant.lease_id

    @property
    def block_ids(self) -> NDArray[np.int32]:
        """The blocks, in token order; empty while the lease is evicted and after it ended.

        With several groups, their tables follow each other, with 0 at places that need no block. The array is the
        caller's own: what is written to it changes nothing here.
        """
        return self.grant.block_ids

    def blocks(self, group: int = 0) -> NDArray[np.int32]:
        """Return the table of a group: a block for each place, in token order; 0 at places that need none.

        The array is the caller's own, as that of `block_ids`.

        Raises:
            InvalidError: the cache has no such group.
        """
        return self.grant.blocks(group)

    @property
    def covered_tokens(self) -> int:
        """Tokens that may be computed now: every group's places have room for them.

        A window moves on only with commits, so cover a longer prompt by extending after each commit.
        """
        return self.grant.covered_tokens

    @property
    def row(self) -> int:
        """The lease's row of the block table, known from the reserve on; readable while the lease is mapped."""
        return self.grant.row

    @property
    def device_hit_tokens(self) -> int:
        """Tokens of the prefix whose bytes were on the device."""
        return self.grant.device_hit_tokens

    @property
    def host_hit_tokens(self) -> int:
        """Tokens of the prefix whose bytes were reloaded from the host pool."""
        return self.grant.host_hit_tokens

    @property
    def disk_hit_tokens(self) -> int:
        """Tokens of the prefix whose bytes were loaded from the disk store."""
        return self.grant.disk_hit_tokens

    @property
    def remote_hit_tokens(self) -> int:
        """Tokens of the prefix whose bytes were fetched from the remote store."""
        return self.grant.remote_hit_tokens

    @property
    def hit_tokens(self) -> int:
        """Tokens of the prefix that need not be computed."""
        return self.grant.hit_tokens

    @property
    def misses(self) -> tuple[Miss, ...]:
        """Why the rest of the prefix was not found; empty unless the reserve asked for it."""
        return self.grant.misses

    @property
    def is_live(self) -> bool:
        """Whether the blocks are still this lease's; once False, it stays so: reserve and compute the request anew."""
        return self.grant.is_live

    @property
    def is_evicted(self) -> bool:
        """Whether the blocks have left the device, so that the lease needs a reload."""
        return self.grant.is_evicted

    @property
    def refusal(self) -> KVLeaseError | None:
        """Why there is no lease, or why its last verb was refused; None after a verb that succeeded."""
        return self.grant.refusal


def grant_of(lease: GrantView, worker: "WorkerView") -> Grant:
    """Return the grant of a lease to a worker that is about to send a call for it.

    Raises:
        InvalidError: it is no lease, or another worker's; a lease stays as it is.
    """
    if not isinstance(lease, GrantView):
        raise wrong_type("lease", "", "a lease, as reserve and fork return it", lease)
    holder = lease._holder  # noqa: SLF001  # a lease shows its worker to nobody else
    if worker is not holder:
        message = (
            f"lease {lease.lease_id} belongs to worker {holder.worker_id}, not to worker {worker.worker_id}; "
            "use it through the worker that reserved it"
        )
        raise InvalidError(message, resource="lease", rule="foreign_lease")
    return lease.grant


def _hidden_by(kind: type[BaseException] | None) -> tuple[type[KVLeaseError], ...]:
    """Return what the release at the end of a block may not raise in place of an exception that ends the block.

    The lease counts as ended all the same, and has the reason in `refusal`.
    """
    return () if kind is None else (KVLeaseError,)


class Lease(GrantView):
    """A right to blocks until it is released; a context manager that releases at its end.

    With on_doubt="miss", the verbs of a lease that is not live do nothing. A refused verb returns the value for nothing
    done, and leaves the reason in `refusal`. The worker's heartbeats renew the lease.
    """

    def __init__(self, worker: "Worker", grant: Grant) -> None:
        """Join a grant to the worker that sends its calls."""
        self.grant = grant
        self._holder = self._worker = worker

    def __enter__(self) -> Self:
        """Return the lease."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release the lease; an exception that ends the block goes on, even if the release fails, too."""
        with suppress(*_hidden_by(kind)):
            self.release()

    def extend(self, num_tokens: int, *, wait_ms: int = 0) -> bool:
        """Make the lease cover `num_tokens` in all; returns whether it does."""
        return self._worker.extend(self, num_tokens, wait_ms=wait_ms)

    def commit(self, num_tokens: int, keys: bytes, first_block: int = 0) -> Committed:
        """Make the full blocks among the first `num_tokens`, all of them computed, findable under `keys`.

        Blocks that no later token needs, such as those before a window, leave the lease.
        """
        return self._worker.commit(self, num_tokens, keys, first_block)

    def fork(self, request_id: str, num_tokens: int, *, wait_ms: int = 0) -> "Lease":
        """Lease blocks to a second request that goes on from what is committed; see `Worker.fork`."""
        return self._worker.fork(self, request_id, num_tokens, wait_ms=wait_ms)

    def explain(self) -> Explanation:
        """Tell why the rest of the prefix was not found when the lease was granted."""
        return self._worker.explain(self)

    def trim(self, num_tokens: int) -> int:
        """Take back the blocks behind those that cover `num_tokens`; returns how many."""
        return self._worker.trim(self, num_tokens)

    def evict(self, *, wait_ms: int = 0) -> Evicted:
        """Move the blocks to the host pool and unmap the lease.

        If `is_evicted` is true afterwards, touch no block before a reload.
        """
        return self._worker.evict(self, wait_ms=wait_ms)

    def reload(self, *, wait_ms: int = 0) -> Reloaded:
        """Bring the blocks back, at new block ids; map the lease again before you read its row."""
        return self._worker.reload(self, wait_ms=wait_ms)

    def map(self) -> int:
        """Publish the row of the block table, until the lease is evicted or ends; returns its kernel blocks."""
        return self._worker.map(self)

    def release(self) -> bool:
        """End the lease; returns whether it was there."""
        return self._worker.release(self)


class AsyncLease(GrantView):
    """The same as `Lease`, for an event loop."""

    def __init__(self, worker: "AsyncWorker", grant: Grant) -> None:
        """Join a grant to the worker that sends its calls."""
        super().__init__(worker, grant)
        self._worker = worker

    async def __aenter__(self) -> Self:
        """Return the lease."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release the lease; an exception that ends the block goes on, even if the release fails, too."""
        with suppress(*_hidden_by(kind)):
            await self.release()

    def extend(self, num_tokens: int, *, wait_ms: int = 0) -> Coroutine[Any, Any, bool]:
        """Make the lease cover `num_tokens` in all; returns whether it does."""
        return self._worker.extend(self, num_tokens, wait_ms=wait_ms)

    def commit(
        self, num_tokens: int, keys: bytes, first_block: int = 0
    ) -> Coroutine[Any, Any, Committed]:
        """Make the full blocks among the first `num_tokens`, all of them computed, findable under `keys`.

        Blocks that no later token needs, such as those before a window, leave the lease.
        """
        return self._worker.commit(self, num_tokens, keys, first_block)

    def fork(
        self, request_id: str, num_tokens: int, *, wait_ms: int = 0
    ) -> Coroutine[Any, Any, "AsyncLease"]:
        """Lease blocks to a second request that goes on from what is committed; see `Worker.fork`."""
        return self._worker.fork(self, request_id, num_tokens, wait_ms=wait_ms)

    def explain(self) -> Coroutine[Any, Any, Explanation]:
        """Tell why the rest of the prefix was not found when the lease was granted."""
        return self._worker.explain(self)

    def trim(self, num_tokens: int) -> Coroutine[Any, Any, int]:
        """Take back the blocks behind those that cover `num_tokens`; returns how many."""
        return self._worker.trim(self, num_tokens)

    def evict(self, *, wait_ms: int = 0) -> Coroutine[Any, Any, Evicted]:
        """Move the blocks to the host pool and unmap the lease.

        If `is_evicted` is true afterwards, touch no block before a reload.
        """
        return self._worker.evict(self, wait_ms=wait_ms)

    def reload(self, *, wait_ms: int = 0) -> Coroutine[Any, Any, Reloaded]:
        """Bring the blocks back, at new block ids; map the lease again before you read its row."""
        return self._worker.reload(self, wait_ms=wait_ms)

    def map(self) -> Coroutine[Any, Any, int]:
        """Publish the row of the block table, until the lease is evicted or ends; returns its kernel blocks."""
        return self._worker.map(self)

    def release(self) -> Coroutine[Any, Any, bool]:
        """End the lease; returns whether it was there."""
        return self._worker.release(self)
