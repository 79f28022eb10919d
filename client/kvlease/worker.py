"""Own the blocking worker: one process attached to one cache, its heartbeats and its verbs; leases are in `lease`."""

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

from numpy.typing import ArrayLike

from kvlease._calling import calls, flows, late, steps, verbs
from kvlease._calling.pulse import Pulse
from kvlease._calling.session import Session
from kvlease._checks import check_alone
from kvlease._unclosed import warn_unclosed
from kvlease.errors import KVLeaseError
from kvlease.lease import GrantView, Lease, grant_of
from kvlease.magazine import Magazine
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
from kvlease.transports.base import Outgoing, Transport, past_deadline
from kvlease.transports.local import LocalTransport
from kvlease.worker_view import WorkerView

R = TypeVar("R")


class Port:
    """Carry out the actions that flows yield, over one blocking transport."""

    def __init__(
        self,
        transport: Transport,
        session: Session | None = None,
        attaching: "threading.Lock | None" = None,
    ) -> None:
        """Join a transport to the session whose calls it carries."""
        self.transport = transport
        self._session = session
        self._attaching = attaching or threading.Lock()

    def run(self, flow: flows.Flow[R]) -> R:
        """Carry out a flow and return its result."""
        try:
            self._go_on(flow, next(flow))
        except StopIteration as stop:
            result: R = stop.value
            return result
        except BaseException:
            flow.close()
            raise

    def begin(self, flow: flows.Flow[R]) -> Callable[[], R]:
        """Send the first call of a flow, and return the function that carries out the rest and returns its result.

        Only over the local socket is the call on its way meanwhile; another transport sends it with the rest.
        """
        call = next(flow)
        assert type(call) is Outgoing, "a flow that can begin sends a call first"
        answer = self._begun(call)

        def result() -> R:
            try:
                try:
                    told = answer()
                except KVLeaseError as error:
                    action = flow.throw(error)
                else:
                    action = flow.send(told)
                self._go_on(flow, action)
            except StopIteration as stop:
                found: R = stop.value
                return found
            except BaseException:
                flow.close()
                raise

        return result

    def _begun(self, call: Outgoing) -> Callable[[], Any]:
        if not isinstance(self.transport, LocalTransport):
            return lambda: self.transport.send(call)
        try:
            return self.transport.begin(call)
        except KVLeaseError as error:
            return partial(_fail, error)

    def _go_on(self, flow: flows.Flow[Any], action: flows.Action) -> NoReturn:
        """Carry out a flow's actions from this one on; its end raises StopIteration with its result."""
        while True:
            try:
                if type(action) is Outgoing:
                    answer: Any = self.transport.send(action)
                else:
                    answer = self._perform(action)
            except KVLeaseError as error:
                action = flow.throw(error)
            else:
                action = flow.send(answer)

    def _perform(self, action: flows.Action) -> Any:
        if isinstance(action, Outgoing):
            return self.transport.send(action)
        if isinstance(action, flows.Pause):
            return time.sleep(action.seconds)
        if isinstance(action, flows.Attach):
            return self.transport.attach(action.call)
        return self._reattach(action)

    def _reattach(self, action: flows.Reattach) -> None:
        session = self._session
        assert session is not None, "only a worker attaches again"
        deadline_at = action.refused.deadline_at
        if not self._attaching.acquire(timeout=max(0, deadline_at - session.link.clock())):
            raise past_deadline("attach")
        try:
            if action.is_due(session.link):
                self.run(flows.reattach(session, deadline_at))
        finally:
            self._attaching.release()


class Worker(WorkerView):
    """One process attached to one cache; a context manager that detaches at its end.

    Threads may share it. A forked child may not use it, and must attach for itself.
    """

    def __init__(self, session: Session, port: Port, pulse: Transport) -> None:
        """Join an attached session to its connection, and to a second one for its heartbeats."""
        super().__init__(session)
        attaching = threading.Lock()
        self._port = Port(port.transport, session, attaching)
        self._pulse = Port(pulse, session, attaching)
        self._magazine: Magazine | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_beat,
            args=(session, self._pulse, self._stop),
            name=f"kvlease-worker-{session.worker_id}",
            daemon=True,
        )
        # The thread holds no reference to the worker, so a worker dropped without close stops its heartbeats, too.
        weakref.finalize(self, self._stop.set)

    @property
    def _is_written_to(self) -> bool:
        # Only the local socket hands over key counts.
        transport = self._port.transport
        return isinstance(transport, LocalTransport) and transport.has_peer

    def start(self) -> Self:
        """Begin the heartbeats."""
        self._thread.start()
        return self

    def __del__(self) -> None:
        """Warn if it was not closed: its leases are held until this process ends or they expire."""
        thread, link = getattr(self, "_thread", None), self._session.link
        if thread is not None and thread.ident and not link.is_detached and not link.is_forked:
            warn_unclosed(self)

    def __enter__(self) -> Self:
        """Return the worker."""
        return self

    def __exit__(self, *_: object) -> None:
        """Detach and close."""
        self.close()

    def reserve(  # noqa: PLR0913 - the fields of a reserve
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
    ) -> Lease:
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
        return Lease(self, self._port.run(verbs.reserved(self._session, request_id, ask)))

    def extend(self, lease: GrantView, num_tokens: int, *, wait_ms: int = 0) -> bool:
        """Make a lease cover `num_tokens` in all; returns whether it does."""
        return self._port.run(
            verbs.extend(self._session, grant_of(lease, self), num_tokens, wait_ms)
        )

    def commit(
        self, lease: GrantView, num_tokens: int, keys: bytes, first_block: int = 0
    ) -> Committed:
        """Make the full blocks among a lease's first `num_tokens`, all of them computed, findable under `keys`.

        There is one key for each `hash_block_tokens` of the plan, and `keys` begins at index `first_block` of the
        request's chain. Blocks that no later token needs leave the lease.
        """
        return self._port.run(
            verbs.commit(self._session, grant_of(lease, self), num_tokens, keys, first_block)
        )

    def fork(
        self, lease: GrantView, request_id: str, num_tokens: int, *, wait_ms: int = 0
    ) -> Lease:
        """Lease blocks to a second request that goes on from a running one; the two share the committed blocks.

        If the last committed block is partial, it is copied; `wait_ms` is the time that this copy may take. Nothing
        behind the last commit is copied, so commit first; with recurrent states, commit before the next token is
        written. A fork does not wait for room, and takes none while others have waited for long. If it is refused, it
        returns or raises what a refused reserve does.
        """
        source = grant_of(lease, self)
        flow = verbs.fork(self._session, source, request_id, num_tokens, wait_ms)
        return Lease(self, self._port.run(flow))

    def explain(self, lease: GrantView) -> Explanation:
        """Tell why the rest of a lease's prefix was not found when it was granted."""
        return self._port.run(verbs.explain(self._session, grant_of(lease, self)))

    def trim(self, lease: GrantView, num_tokens: int) -> int:
        """Take back a lease's blocks behind those that cover `num_tokens`; returns how many left it."""
        return self._port.run(verbs.trim(self._session, grant_of(lease, self), num_tokens))

    def evict(
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
            return self._port.run(verbs.evict(self._session, grant_of(lease, self), wait_ms))
        ask = calls.evict(keys=keys, num_blocks=num_blocks, wait_ms=wait_ms)
        return self._port.run(flows.missed(self._session, ask, Evicted))

    def reload(
        self, lease: GrantView | None = None, *, keys: bytes = b"", wait_ms: int = 0
    ) -> Reloaded:
        """Bring an evicted lease, or the blocks of `keys` in the host pool and disk store, back into the device pool.

        A lease that was mapped before its eviction must be mapped again.
        """
        if lease is not None:
            check_alone(keys=keys)
            return self._port.run(verbs.reload(self._session, grant_of(lease, self), wait_ms))
        return self._port.run(
            flows.missed(self._session, calls.reload_keys(keys, wait_ms), Reloaded)
        )

    def map(self, lease: GrantView) -> int:
        """Publish a lease's row of the block table until the lease is evicted or ends; returns its kernel blocks."""
        return self._port.run(verbs.map_row(self._session, grant_of(lease, self)))

    def release(self, lease: GrantView) -> bool:
        """End a lease; returns whether it was there. Committed blocks stay findable."""
        return self._port.run(verbs.release(self._session, grant_of(lease, self)))

    def lookup(self, keys: bytes) -> Found:
        """Tell how long a prefix is cached, without holding it.

        With on_doubt="miss", a failed lookup finds nothing, and says why in `refusal`.
        """
        return self._port.run(flows.missed(self._session, calls.lookup(keys), Found))

    def pin(self, keys: bytes) -> Pinned:
        """Hold cached blocks so that they are not evicted, until the pin is ended; it outlives the worker.

        With on_doubt="miss", a refusal or a failure returns a pin of no blocks, with the reason in `refusal`. A call
        that ends without an answer may have made a pin all the same: `kvlease pins` lists it, `kvlease unpin` ends it.
        """
        return self._port.run(flows.missed(self._session, calls.pin(keys), Pinned))

    def unpin(self, pin_id: int) -> bool:
        """End a pin; returns whether it was there."""
        return self._port.run(flows.missed(self._session, calls.unpin(pin_id), flows.not_there))

    def step(  # noqa: PLR0913 - one parameter a column
        self,
        *,
        verbs: ArrayLike,
        lease_ids: ArrayLike,
        num_tokens: ArrayLike,
        num_keys: ArrayLike | None = None,
        first_blocks: ArrayLike | None = None,
        keys: bytes = b"",
        reserves: Sequence[ReserveSpec] = (),
    ) -> tuple[StepColumns, list[Lease]]:
        """Carry out the columns of one scheduler step and then its reserves, in one call, and update the leases.

        In `verbs`, 1 is extend, 2 commit, 3 release, which does not look at its number of tokens. In the answer's
        `codes`, 0 means done; any other number is that of the error in `kvlease.errors.BY_NUMBER`. With
        on_doubt="miss", a step that fails as a whole has its error's number in every entry.
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
        columns, grants = self._port.run(steps.step(self._session, ask, reserves))
        return columns, [Lease(self, grant) for grant in grants]

    def magazine(self) -> Magazine:
        """Return the magazine that this worker shares with the other processes of its engine.

        Raises:
            WrongStateError: the worker attached without a magazine.
        """
        if self._magazine is None:
            self._magazine = Magazine(self._session, self._port)
        return self._magazine

    def heartbeat(self) -> None:
        """Renew the leases now, and end those whose answers were lost; a thread does so regularly."""
        self._port.run(late.disowning(self._session))

    def detach(self) -> int:
        """End the worker and all its leases; returns how many leases the daemon ended.

        While the daemon is away, this retries until the deadline. `close` describes what happens if that fails.
        """
        self._stop.set()
        return self._port.run(flows.detach(self._session))

    def close(self) -> None:
        """Detach if the worker is still attached, and close connections and memory; callers' views stay valid.

        While the daemon is away, such as for a second while it restarts, detaching is retried until the deadline. If
        it fails, the log warns, and the daemon quarantines the worker's leases. It gets their blocks back once it knows
        that this process has ended, which it learns over the local socket, or once an operator ends the worker by
        `kvlease detach`. Closing again tries again.
        """
        if not self._session.link.has_ended and not self._session.link.is_forked:
            with suppress(KVLeaseError):
                self.detach()
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._session.link.deadline_seconds)
        self._port.transport.close()
        self._pulse.transport.close()
        if self._session.memory is not None:
            self._session.memory.close()


def _fail(error: KVLeaseError) -> NoReturn:
    raise error


def _beat(session: Session, port: Port, stop: threading.Event) -> None:
    """Send heartbeats until told to stop."""
    pulse = Pulse()
    while not stop.wait(session.heartbeat_seconds):
        try:
            port.run(flows.heartbeat(session))
        except KVLeaseError as error:
            if not stop.is_set():
                pulse.failed(error)
        else:
            pulse.succeeded()
