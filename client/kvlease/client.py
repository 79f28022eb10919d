"""Own the blocking client: an operator's verbs, and attaching; a worker's verbs are in `worker`."""

from collections.abc import Iterator
from typing import Final, Literal, Self, TypeVar

from kvlease._bound import Bound
from kvlease._calling import calls, flows, operator_calls
from kvlease._calling.calls import Ask
from kvlease._calling.fields import given
from kvlease._calling.link import Link
from kvlease._calling.session import Session
from kvlease._checks import check_deadline, check_type, shown
from kvlease._unclosed import warn_unclosed
from kvlease.credentials import Credentials
from kvlease.errors import InvalidError
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
from kvlease.transports import open_transport
from kvlease.transports.base import chosen_address
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire import traceparent
from kvlease.worker import Port, Worker

R = TypeVar("R")

OnDoubt = Literal["miss", "raise"]
"""What a worker does when a call is refused or fails: answer as if nothing were cached, or raise."""

Listed = Literal["workers", "leases", "pins", "waiting", "tenants", "magazines"]
"""The lists that `inspect` can show of a cache."""

Resizable = Literal["device", "host"]
"""The pools that `resize` can make smaller, and larger again."""

DEADLINE_SECONDS: Final = 5.0
"""Seconds after which a call ends by default; the time that the daemon is asked to wait is added to them."""


class Client(Bound):
    """A connection to a daemon; a context manager. Its own verbs raise every error, whatever `on_doubt` says."""

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
        self._port = Port(open_transport(self._address))

    def __repr__(self) -> str:
        """Show the address that it connects to."""
        return f"<Client {self._address}>"

    def __del__(self) -> None:
        """Warn if it was not closed."""
        port = getattr(self, "_port", None)
        if port is not None and port.transport.is_open and not self._link.is_forked:
            warn_unclosed(self)

    def __enter__(self) -> Self:
        """Return the client; it connects at its first call."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection; workers stay attached."""
        self.close()

    def close(self) -> None:
        """Close the connection; workers stay attached."""
        self._port.transport.close()

    def plan(self, inputs: PlanInputs) -> CachePlan:
        """Compute a cache's layout and capacity without changing anything."""
        return self._told(calls.plan(inputs))

    def explain(self, inputs: PlanInputs, *changes: str) -> ExplainedPlan:
        """Compute a plan with its equations, and with what each change, such as tokens_per_block=8, would alter."""
        return self._told(calls.explain(inputs, changes))

    def register(
        self, cache: str, inputs: PlanInputs, options: CacheOptions = DEFAULTS
    ) -> CacheInfo:
        """Create a cache, or find an equal one that exists.

        A worker that later attaches through this client registers the cache again if the cache ended with its daemon.
        """
        ask = calls.register(cache, inputs, options)
        info = self._told(ask)
        self._link.registrations[cache] = ask.request
        return info

    def get_cache(self, cache: str) -> CacheInfo:
        """Describe one cache."""
        return self._told(calls.get_cache(cache))

    def list_caches(self) -> tuple[CacheInfo, ...]:
        """Describe all caches."""
        return self._told(calls.list_caches())

    def delete_cache(self, cache: str, *, purge: bool = False) -> Deleted:
        """Free a cache that no worker is attached to; its pins end with it.

        The cache's disk store is kept in case the cache is registered again, unless `purge` removes it. A purge may
        take up to the daemon's `mover_seconds_max`, and is refused as WRONG_STATE if the store is off.
        """
        ask = operator_calls.delete_cache(cache, purge=purge)
        with self._link.deleting(cache):
            return self._told(ask)

    def stats(self, cache: str = "") -> Stats:
        """Take a snapshot of one cache, or of all."""
        return self._told(calls.stats(cache))

    def inspect(self, cache: str, what: Listed, *, limit: int = 0, after_id: int = 0) -> Inspection:
        """List who uses a cache or waits for it, by id: at most 256 entries, starting after the id `after_id`."""
        return self._told(calls.inspect(cache, what, limit, after_id))

    def explain_lease(self, lease_id: int, *, cache: str = "") -> Explanation:
        """Tell why the rest of a lease's prefix was not found when it was granted."""
        return self._told(calls.explain_lease(lease_id, cache))

    def lookup(self, keys: bytes, *, cache: str = "") -> Found:
        """Tell how long a prefix is cached.

        If there is only one cache, `cache` may be left out, here and in `evict`, `reload`, `pin` and `unpin`.
        """
        return self._told(calls.lookup(keys, cache))

    def evict(
        self, *, keys: bytes = b"", num_blocks: int = 0, wait_ms: int = 0, cache: str = ""
    ) -> Evicted:
        """Move the blocks of `keys`, or the `num_blocks` coldest, out of the device pool."""
        return self._told(
            calls.evict(keys=keys, num_blocks=num_blocks, wait_ms=wait_ms, cache=cache)
        )

    def reload(self, keys: bytes, *, wait_ms: int = 0, cache: str = "") -> Reloaded:
        """Bring the blocks of `keys` back into the device pool."""
        return self._told(calls.reload_keys(keys, wait_ms, cache))

    def pin(self, keys: bytes, *, cache: str = "") -> Pinned:
        """Hold cached blocks so that they are not evicted."""
        return self._told(calls.pin(keys, cache))

    def unpin(self, pin_id: int, *, cache: str = "") -> bool:
        """End a pin; returns whether it was there."""
        return self._told(calls.unpin(pin_id, cache))

    def drain(self, *, cache: str = "") -> Drained:
        """Have a cache, or the daemon, grant no new lease; live leases go on, and the answer counts them.

        Meanwhile a call for a new lease is refused as DRAINING; its caller should ask another daemon. To wait for the
        last lease to end, watch `stats`: a second drain would reverse an undrain that somebody made in between.
        """
        return self._told(operator_calls.drain(cache))

    def undrain(self, *, cache: str = "") -> Drained:
        """Have a cache, or the daemon, grant leases again; a cache drained by name must also be undrained by name."""
        return self._told(operator_calls.undrain(cache))

    def clear(self, cache: str, *, tenant: str = "") -> Cleared:
        """Drop the cached blocks of one tenant, or of all, that nobody holds; the answer tells who holds the rest."""
        return self._told(operator_calls.clear(cache, tenant))

    def resize(self, cache: str, tier: Resizable, num_blocks: int) -> Resized:
        """Set how many blocks a pool grants, up to its registered number, and give the memory of the rest back."""
        return self._told(operator_calls.resize(cache, tier, num_blocks))

    def set_tenant(self, tenant: str, limits: TenantLimits, *, revision: int) -> TenantRule:
        """Replace all limits of a tenant at once; an outdated revision is refused."""
        return self._told(operator_calls.set_tenant(tenant, limits, revision))

    def get_tenant(self, tenant: str) -> TenantRule:
        """Return the limits that a tenant has now, and their revision."""
        return self._told(operator_calls.get_tenant(tenant))

    def detach(self, worker_id: int, *, force: bool = False) -> int:
        """End a worker that has gone and whose death cannot be proven; returns how many leases ended.

        The operator thereby vouches that the worker writes no more. If the daemon watches the worker's process, the
        call is refused without `force`: as long as that process lives, it may write into blocks that others then have.
        """
        return self._told(calls.detach(worker_id, force=force))

    def watch(
        self,
        *,
        cache: str = "",
        after_sequence: int = 0,
        with_snapshot: bool = False,
        idle_seconds: float | None = None,
    ) -> Iterator[Event]:
        """Yield events, oldest first, until none has come for `idle_seconds`; None waits for ever.

        With `with_snapshot`, a snapshot of each cache comes first, and again where events are missing: after a "gap",
        and after a "resync", which says that `after_sequence` belongs to another life of the daemon.
        """
        yield from self._stream(calls.watch(cache, after_sequence, with_snapshot), idle_seconds)

    def trace(self, cache: str, *, idle_seconds: float | None = None) -> Iterator[TracedRequest]:
        """Yield a cache's requests as their leases end, until none has ended for `idle_seconds`; None waits for ever.

        The first request has no keys: it only says that recording has begun. A later one without keys only counts
        requests that were left out. Keys mean nothing outside this trace.
        """
        yield from self._stream(calls.trace(cache), idle_seconds)

    def attach(  # noqa: PLR0913 - the fields of an attach
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
    ) -> Worker:
        """Make this process a worker of a cache, over connections of its own, which outlive this client.

        Over the local socket the worker maps the cache's memory, and the daemon learns of its death at once. If each
        rank of an engine calls for itself, `engine` names the engine, and its ranks share the leases of its requests.
        If an engine keeps block tables of its own, `magazine` names the magazine that all its processes share; see
        `Worker.magazine`. With `key_counts`, `Worker.absent` tells without a call which keys are surely not cached.
        The worker's calls end after `deadline_seconds`, by default the client's; attaching always has the client's.

        Raises:
            InvalidError: an argument is malformed or out of range.
            KVLeaseError: the daemon is away, or refuses.
        """
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
        port = Port(open_transport(self._address))
        try:
            port.run(flows.attach(session))
        except BaseException:
            port.transport.close()
            raise
        self._link.is_reached = True
        session.link.deadline_seconds = deadline_seconds or self._link.deadline_seconds
        return Worker(session, port, open_transport(self._address)).start()

    def _stream(self, ask: Ask[R], idle_seconds: float | None) -> Iterator[R]:
        call = flows.streamed(self._link, ask, idle_seconds)
        yield from map(ask.read, self._port.transport.stream(call, idle_seconds))

    def _told(self, ask: Ask[R]) -> R:
        return self._port.run(flows.told(self._link, ask))


def attach_request(  # noqa: PLR0913 - the fields of an attach
    cache: str,
    *,
    worker_name: str,
    rank: int,
    tenant: str,
    layout_fingerprint: str,
    engine: str,
    magazine: str,
    key_counts: bool = False,
) -> pb.AttachRequest:
    """Build the request by which a worker attaches, at first and after each restart of the daemon.

    Raises:
        InvalidError: an argument is not of its field's type, or out of its range; the message names it.
    """
    check_type("key_counts", key_counts, bool)
    return pb.AttachRequest(
        **given(
            cache=cache,
            worker_name=worker_name,
            rank=rank,
            tenant=tenant,
            layout_fingerprint=layout_fingerprint,
            engine=engine,
            magazine=magazine,
            wants_key_counts=key_counts,
        )
    )


def attaching(
    request: pb.AttachRequest, link: Link, deadline_seconds: float | None, *, raises: bool
) -> Session:
    """Return the session of a worker that is about to attach; the attach has the deadline of the worker's client.

    Raises:
        InvalidError: `deadline_seconds`, the deadline of the worker's later calls, is one that no call could honour.
    """
    if deadline_seconds is not None:
        check_deadline(deadline_seconds)
    # A worker may start before its daemon does; is_reached makes it wait.
    own = Link(
        deadline_seconds=link.deadline_seconds, is_reached=True, traceparent=link.traceparent
    )
    return Session(own, request, raises=raises, registration=link.registrations.get(request.cache))


def check_options(deadline_seconds: float, on_doubt: str, *, with_traces: bool) -> None:
    """Refuse options that no call could honour."""
    check_deadline(deadline_seconds)
    check_type("with_traces", with_traces, bool)
    if not isinstance(on_doubt, str) or on_doubt not in ("miss", "raise"):
        message = f"on_doubt must be 'miss' or 'raise', not {shown(on_doubt)}"
        raise InvalidError(message, resource="on_doubt")
