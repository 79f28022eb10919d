"""Own the table of REST routes; `endpoints` carries them out, and `app` describes them."""

from dataclasses import dataclass
from typing import Any, Final

from kvlease.ids import ID_MAX, SEQUENCE_MAX
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire import bodies
from kvlease.wire.fields import Body
from kvleased.access.roles import OF_OPERATION, Roles, of_verb
from kvleased.verbs.inspecting import ENTRIES_MAX

_REQUESTS: Final = {
    field.name: getattr(pb, field.message_type.name)
    for field in pb.Call.DESCRIPTOR.oneofs_by_name["request"].fields
    if field.message_type is not None
}
_LISTED: Final = {"waiting": "waiting calls"}
"""The words for a list, if they are not its name."""
NUMBERS: Final = {"after_id": ID_MAX, "after_sequence": SEQUENCE_MAX, "limit": ENTRIES_MAX}
"""The query parameters that are numbers, from 0, and the most that each may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One route: the verb that it calls, and where the fields of the verb's request come from."""

    verb: str
    method: str
    path: str
    tag: str
    summary: str
    body: type[Body] | None = None
    query: tuple[str, ...] = ()
    """The query parameters, which are fields of the request."""
    takes_cache: bool = False
    """Whether an operator may name the cache by `?cache=`."""
    settled: tuple[tuple[str, str], ...] = ()
    """Fields of the request that the path gives without a parameter."""
    name: str = ""
    """The operation id, if the verb has several routes."""

    @property
    def is_stream(self) -> bool:
        """Whether it is answered without end."""
        return self.verb in ("watch", "trace")

    @property
    def request_class(self) -> Any:
        """The message that the daemon takes."""
        return _REQUESTS[self.verb]

    @property
    def roles(self) -> Roles:
        """Who may call it."""
        return OF_OPERATION.get(self.operation_id) or of_verb(self.verb)

    @property
    def in_path(self) -> tuple[str, ...]:
        """The path parameters; all of them are fields of the request."""
        parts = self.path.split("/")
        return tuple(part[1:-1] for part in parts if part.startswith("{"))

    @property
    def operation_id(self) -> str:
        """The name of the operation in OpenAPI."""
        return self.name or self.verb


ROUTES: Final = (
    Route(verb="reserve", method="POST", path="/v1/leases", tag="leases", body=bodies.ReserveBody,
          summary="Grant blocks for a request under a lease, reusing the longest cached prefix"),
    Route(verb="step", method="POST", path="/v1/step", tag="leases", body=bodies.StepBody,
          summary="Carry out any number of operations of one scheduler step"),
    Route(verb="exchange", method="POST", path="/v1/magazine/exchange", tag="magazines", body=bodies.ExchangeBody,
          summary="Give blocks to, and take blocks from, the magazine of the worker's engine"),
    Route(verb="inventory", method="GET", path="/v1/magazine", tag="magazines",
          summary="Tell what is in that magazine"),
    Route(verb="release", method="DELETE", path="/v1/leases/{lease_id}", tag="leases",
          summary="End a lease; committed blocks stay findable"),
    Route(verb="extend", method="POST", path="/v1/leases/{lease_id}/extend", tag="leases", body=bodies.ExtendBody,
          summary="Make a lease cover more tokens"),
    Route(verb="commit", method="POST", path="/v1/leases/{lease_id}/commit", tag="leases", body=bodies.CommitBody,
          summary="Make full blocks findable under their keys"),
    Route(verb="fork", method="POST", path="/v1/leases/{lease_id}/fork", tag="leases", body=bodies.ForkBody,
          summary="Lease the blocks of a running request to a second one"),
    Route(verb="trim", method="POST", path="/v1/leases/{lease_id}/trim", tag="leases", body=bodies.TrimBody,
          summary="Give back a lease's blocks behind a token"),
    Route(verb="map", method="POST", path="/v1/leases/{lease_id}/map", tag="leases", body=bodies.Empty,
          summary="Publish a lease's row in the shared block table"),
    Route(verb="evict", method="POST", path="/v1/leases/{lease_id}/evict", tag="leases", body=bodies.MoveLeaseBody,
          name="evict_lease", summary="Move a lease's blocks to the host pool"),
    Route(verb="reload", method="POST", path="/v1/leases/{lease_id}/reload", tag="leases", body=bodies.MoveLeaseBody,
          name="reload_lease", summary="Bring an evicted lease's blocks back"),
    Route(verb="explain", method="GET", path="/v1/leases/{lease_id}/explanation", tag="watching", query=("cache",),
          summary="Tell why the rest of a lease's prefix was not found"),
    Route(verb="heartbeat", method="POST", path="/v1/workers/self/heartbeat", tag="workers", body=bodies.HeartbeatBody,
          summary="Renew the leases that the worker still knows and end the others"),
    Route(verb="detach", method="DELETE", path="/v1/workers/self", tag="workers",
          summary="End the calling worker and its leases"),
    Route(verb="detach", method="DELETE", path="/v1/workers/{worker_id}", tag="workers", name="end_worker",
          query=("force",),
          summary="End a worker that has gone and whose death cannot be proven, on an operator's word"),
    Route(verb="attach", method="POST", path="/v1/caches/{cache}/workers", tag="workers", body=bodies.AttachBody,
          summary="Become a worker of a cache; memory is handed over only by the local socket"),
    Route(verb="lookup", method="POST", path="/v1/lookup", tag="prefixes", body=bodies.KeysBody, takes_cache=True,
          summary="Tell how long a prefix is cached, without holding it"),
    Route(verb="pin", method="POST", path="/v1/pins", tag="prefixes", body=bodies.KeysBody, takes_cache=True,
          summary="Hold cached blocks so that they are not evicted"),
    Route(verb="unpin", method="DELETE", path="/v1/pins/{pin_id}", tag="prefixes", takes_cache=True,
          summary="End a pin"),
    Route(verb="evict", method="POST", path="/v1/evict", tag="prefixes", body=bodies.EvictBody, takes_cache=True,
          summary="Evict the blocks of keys, or the coldest"),
    Route(verb="reload", method="POST", path="/v1/reload", tag="prefixes", body=bodies.ReloadBody, takes_cache=True,
          summary="Reload the blocks of keys"),
    Route(verb="plan", method="POST", path="/v1/plans", tag="caches", body=bodies.PlanBody,
          summary="Compute a cache's layout and capacity without changing anything"),
    Route(verb="list_caches", method="GET", path="/v1/caches", tag="caches",
          summary="Describe all caches"),
    Route(verb="register_cache", method="PUT", path="/v1/caches/{cache}", tag="caches", body=bodies.RegisterCacheBody,
          summary="Create a cache, or find an equal one"),
    Route(verb="get_cache", method="GET", path="/v1/caches/{cache}", tag="caches",
          summary="Describe a cache"),
    Route(verb="delete_cache", method="DELETE", path="/v1/caches/{cache}", tag="caches", query=("purge",),
          summary="Free a cache that no worker is attached to"),
    Route(verb="clear", method="POST", path="/v1/caches/{cache}/clear", tag="operating", body=bodies.ClearBody,
          summary="Drop cached blocks of a tenant, or of all, that nobody holds; name what holds the others"),
    Route(verb="resize", method="POST", path="/v1/caches/{cache}/resize", tag="operating", body=bodies.ResizeBody,
          summary="Take blocks of a pool out of use and give their memory back, or bring them back into use"),
    Route(verb="drain", method="POST", path="/v1/caches/{cache}/drain", tag="operating", body=bodies.Empty,
          name="drain_cache", summary="Have a cache grant no new lease; tells how many are left"),
    Route(verb="undrain", method="DELETE", path="/v1/caches/{cache}/drain", tag="operating",
          name="undrain_cache", summary="Have a cache grant leases again"),
    Route(verb="drain", method="POST", path="/v1/drain", tag="operating", body=bodies.Empty,
          summary="Have the daemon grant no new lease in any cache, and be not ready; tells how many are left"),
    Route(verb="undrain", method="DELETE", path="/v1/drain", tag="operating",
          summary="Have the daemon grant leases again"),
    Route(verb="set_tenant", method="PUT", path="/v1/tenants/{tenant}", tag="operating", body=bodies.SetTenantBody,
          summary="Give a tenant other limits at once; an older revision is refused and changes nothing"),
    Route(verb="get_tenant", method="GET", path="/v1/tenants/{tenant}", tag="operating",
          summary="Tell a tenant's limits and their revision"),
    Route(verb="stats", method="GET", path="/v1/stats", tag="watching", query=("cache",),
          summary="Describe pools, leases and counters"),
    *(
        Route(verb="inspect", method="GET", path=f"/v1/caches/{{cache}}/{what}", tag="watching",
              query=("limit", "after_id"), settled=(("what", what),), name=f"list_{what}",
              summary=f"List the {_LISTED.get(what, what)} of a cache, a page at a time")
        for what in ("workers", "leases", "pins", "waiting", "tenants", "magazines")
    ),
    Route(verb="watch", method="GET", path="/v1/events", tag="watching",
          query=("after_sequence", "cache", "with_snapshot"),
          summary="Stream events, oldest first, as server-sent events"),
    Route(verb="trace", method="GET", path="/v1/caches/{cache}/trace", tag="watching",
          summary="Stream requests as their leases end, without what their tokens are, as server-sent events"),
)  # fmt: skip
"""Every route of /v1."""
