"""Laws of REST's paths: every route is its verb, and an argument that a path cannot carry is named."""

import base64
from urllib.parse import quote

import pytest
from google.protobuf.message import Message

from kvlease.transports._rest import LISTED
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.api.rest.routes import ROUTES
from tests.unit.api.scripted import INPUTS, LAYER, Served, http

TRANSPORTS = ("rest",)
KEY = bytes(range(32))
KEY_TEXT = base64.b64encode(KEY).decode()
PACKED = base64.b64encode((5).to_bytes(8, "little")).decode()

WORDS: list[tuple[str, str, object, str, Message]] = [
    ("POST", "/v1/drain", None, "drain", pb.DrainRequest()),
    ("DELETE", "/v1/drain", None, "undrain", pb.UndrainRequest()),
    ("POST", "/v1/caches/demo/drain", None, "drain", pb.DrainRequest(cache="demo")),
    ("DELETE", "/v1/caches/demo/drain", None, "undrain", pb.UndrainRequest(cache="demo")),
    ("POST", "/v1/caches/demo/clear", {"tenant": "chat"}, "clear", pb.ClearRequest(cache="demo", tenant="chat")),
    ("POST", "/v1/caches/demo/resize", {"tier": "host", "num_blocks": 7}, "resize",
     pb.ResizeRequest(cache="demo", tier="host", num_blocks=7)),
    ("PUT", "/v1/tenants/chat%20room", {"limits": {"min_percent": 40, "leases_max": 2}, "revision": 3}, "set_tenant",
     pb.SetTenantRequest(tenant="chat room", revision=3, limits=pb.TenantLimits(
         min_percent=40, leases_max=2, max_percent=100, weight=1, pinned_percent_max=25))),
    ("GET", "/v1/tenants/chat", None, "get_tenant", pb.GetTenantRequest(tenant="chat")),
    ("POST", "/v1/plans", {"inputs": {"model_config": "{}"}}, "plan",
     pb.PlanRequest(inputs=pb.PlanInputs(model_config="{}"))),
    ("PUT", "/v1/caches/demo", {"inputs": INPUTS, "options": {"integrity": "none"}}, "register_cache",
     pb.RegisterCacheRequest(cache="demo", options=pb.CacheOptions(integrity="none"), inputs=pb.PlanInputs(
         layers=[pb.LayerSpec(**LAYER)], tokens_per_block=16, device_blocks=8))),
    ("GET", "/v1/caches/demo", None, "get_cache", pb.GetCacheRequest(cache="demo")),
    ("GET", "/v1/caches", None, "list_caches", pb.ListCachesRequest()),
    ("DELETE", "/v1/caches/demo", None, "delete_cache", pb.DeleteCacheRequest(cache="demo")),
    ("DELETE", "/v1/caches/demo?purge=1", None, "delete_cache", pb.DeleteCacheRequest(cache="demo", purge=True)),
    ("POST", "/v1/caches/demo/workers", {"worker_name": "w", "rank": 1, "engine": "e", "lease_ids": PACKED,
      "magazine": "m"}, "attach",
     pb.AttachRequest(cache="demo", worker_name="w", rank=1, engine="e", magazine="m",
                      lease_ids=(5).to_bytes(8, "little"))),
    ("DELETE", "/v1/workers/self", None, "detach", pb.DetachRequest()),
    ("DELETE", "/v1/workers/7?force=1", None, "detach", pb.DetachRequest(worker_id=7, force=True)),
    ("DELETE", "/v1/workers/7?force=true", None, "detach", pb.DetachRequest(worker_id=7, force=True)),
    ("DELETE", "/v1/workers/7?force=false", None, "detach", pb.DetachRequest(worker_id=7)),
    ("POST", "/v1/workers/self/heartbeat", {"lease_ids": PACKED, "newest_lease_id": 5}, "heartbeat",
     pb.HeartbeatRequest(lease_ids=(5).to_bytes(8, "little"), newest_lease_id=5)),
    ("POST", "/v1/leases", {"request_id": "r", "keys": KEY_TEXT, "num_tokens": 64, "wait_ms": 5}, "reserve",
     pb.ReserveRequest(request_id="r", keys=KEY, num_tokens=64, wait_ms=5)),
    ("POST", "/v1/leases", {"request_id": "r", "token_ids": [1, 258]}, "reserve",
     pb.ReserveRequest(request_id="r", token_ids=b"\1\0\0\0\2\1\0\0")),
    ("POST", "/v1/leases/5/map", None, "map", pb.MapRequest(lease_id=5)),
    ("POST", "/v1/leases/5/map", {}, "map", pb.MapRequest(lease_id=5)),
    ("POST", "/v1/leases/5/extend", {"num_tokens": 9}, "extend", pb.ExtendRequest(lease_id=5, num_tokens=9)),
    ("POST", "/v1/leases", {"request_id": "r", "num_tokens": 4, "priority": "high", "retain_seconds": 60}, "reserve",
     pb.ReserveRequest(request_id="r", num_tokens=4, priority="high", retain_seconds=60)),
    ("POST", "/v1/leases", {"request_id": "r", "num_tokens": 4, "retain_priority": 0}, "reserve",
     pb.ReserveRequest(request_id="r", num_tokens=4, retain_priority=0)),
    ("POST", "/v1/leases/5/fork", {"request_id": "s", "num_tokens": 9, "wait_ms": 3}, "fork",
     pb.ForkRequest(lease_id=5, request_id="s", num_tokens=9, wait_ms=3)),
    ("POST", "/v1/leases/5/trim", {"num_tokens": 9}, "trim", pb.TrimRequest(lease_id=5, num_tokens=9)),
    ("POST", "/v1/leases/5/commit", {"num_tokens": 16, "first_block": 1, "keys": KEY_TEXT}, "commit",
     pb.CommitRequest(lease_id=5, num_tokens=16, first_block=1, keys=KEY)),
    ("POST", "/v1/leases/5/evict", {"wait_ms": 3}, "evict", pb.EvictRequest(lease_id=5, wait_ms=3)),
    ("POST", "/v1/leases/5/reload", {}, "reload", pb.ReloadRequest(lease_id=5)),
    ("DELETE", "/v1/leases/5", None, "release", pb.ReleaseRequest(lease_id=5)),
    ("GET", "/v1/leases/5/explanation?cache=demo", None, "explain", pb.ExplainRequest(lease_id=5, cache="demo")),
    ("POST", "/v1/leases", {"request_id": "r", "explain": True}, "reserve",
     pb.ReserveRequest(request_id="r", explain=True)),
    ("POST", "/v1/lookup", {"keys": KEY_TEXT}, "lookup", pb.LookupRequest(keys=KEY)),
    ("POST", "/v1/pins", {"keys": KEY_TEXT}, "pin", pb.PinRequest(keys=KEY)),
    ("DELETE", "/v1/pins/9", None, "unpin", pb.UnpinRequest(pin_id=9)),
    ("POST", "/v1/evict", {"num_blocks": 3}, "evict", pb.EvictRequest(num_blocks=3)),
    ("POST", "/v1/reload", {"keys": KEY_TEXT}, "reload", pb.ReloadRequest(keys=KEY)),
    ("POST", "/v1/magazine/exchange", {"hold_keys": KEY_TEXT, "take_new": 3, "brings": True, "sequence": 5}, "exchange",
     pb.ExchangeRequest(hold_keys=KEY, take_new=3, brings=True, sequence=5)),
    ("GET", "/v1/magazine", None, "inventory", pb.InventoryRequest()),
    ("POST", "/v1/step", {"verbs": "AQ==", "lease_ids": PACKED, "reserves": [{"request_id": "r"}]}, "step",
     pb.StepRequest(verbs=b"\1", lease_ids=(5).to_bytes(8, "little"),
                    reserves=[pb.ReserveRequest(request_id="r")])),
    *(("GET", f"/v1/caches/demo/{what}?limit=5&after_id=7", None, "inspect",
       pb.InspectRequest(cache="demo", what=what, limit=5, after_id=7))
      for what in ("workers", "leases", "pins", "waiting", "tenants", "magazines")),
    ("GET", "/v1/stats?cache=demo", None, "stats", pb.StatsRequest(cache="demo")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "body", "verb", "request_"),
    [
        pytest.param(*words, id=f"{words[0]} {words[1]} {number}")
        for number, words in enumerate(WORDS)
    ],
)
async def test_route_is_its_verb(
    served: Served, method: str, path: str, body: object, verb: str, request_: Message
) -> None:
    """A route calls its verb with the message that the same words make in the protocol."""
    answer = await http(served, method, path, body)

    assert answer.status == 200, answer.body
    assert served.daemon.calls[0][:2] == (verb, request_)


@pytest.mark.parametrize(
    ("method", "path", "advice"),
    [
        ("DELETE", "/v1/caches/demo", "the query says purge"),
        ("DELETE", "/v1/leases/5", "leave it out"),
        ("GET", "/v1/stats", "the query says cache"),
    ],
)
async def test_body_where_none_is_read_is_refused(
    served: Served, method: str, path: str, advice: str
) -> None:
    """A body on a route that reads none is refused, as it would be ignored; an empty one is taken."""
    refused = await http(served, method, path, {"purge": True})

    assert refused.status == 422
    assert (
        f"{method} {path.replace('demo', '{cache}').replace('5', '{lease_id}')}"
        in refused.json["detail"]
    )
    assert advice in refused.json["detail"]
    assert not served.daemon.calls
    assert (await http(served, method, path, {})).status == 200


def test_every_verb_has_a_route() -> None:
    """REST offers every verb of the protocol."""
    verbs = {field.name for field in pb.Call.DESCRIPTOR.oneofs_by_name["request"].fields}

    assert {route.verb for route in ROUTES} == verbs
    assert {words[3] for words in WORDS} == verbs - {"watch", "trace"}


@pytest.mark.parametrize("written", ["yes", "2", "", "True"])
async def test_flag_says_how_it_is_written(served: Served, written: str) -> None:
    """A flag that is neither true nor false is refused with the words that are."""
    answer = await http(served, "GET", f"/v1/events?with_snapshot={written}")

    assert answer.json["detail"] == (
        f"with_snapshot must be true or false, or 1 or 0, not {written!r}"
    )


@pytest.mark.parametrize(
    ("path", "most"),
    [
        pytest.param("/v1/events?after_sequence=", 2**53 - 1, id="events"),
        pytest.param("/v1/caches/main/leases?after_id=", 2**63 - 1, id="page"),
    ],
)
@pytest.mark.parametrize("written", ["-9223372036854775809", "9223372036854775808"])
async def test_number_where_a_list_begins_is_told_that_it_begins_at_zero(
    served: Served, path: str, most: int, written: str
) -> None:
    """A number that is too long is not told that it may be negative, which would be refused, too."""
    answer = await http(served, "GET", path + written)

    name = path.partition("?")[2].removesuffix("=")
    assert (answer.status, answer.json["resource"]) == (422, name)
    assert answer.json["detail"] == f"{name} must be an integer from 0 to {most}, not {written!r}"


@pytest.mark.parametrize("written", ["many", "9223372036854775808"])
async def test_limit_of_a_page_is_refused_with_its_own_bounds(served: Served, written: str) -> None:
    """What is no number at all is told the range that the daemon accepts."""
    answer = await http(served, "GET", f"/v1/caches/main/leases?limit={written}")

    assert (answer.status, answer.json["resource"], answer.json["limit"]) == (422, "limit", 256)
    assert answer.json["detail"] == f"limit must be an integer from 0 to 256, not {written!r}"


@pytest.mark.parametrize("written", ["9" * 19, "9" * 20, "9" * 5_000, "one"])
async def test_number_of_a_path_is_refused_with_its_bounds(served: Served, written: str) -> None:
    """A number too long to be an id is refused as too long, and only its beginning is repeated."""
    answer = await http(served, "DELETE", f"/v1/leases/{written}")

    assert answer.status == 422
    assert (
        b"lease_id must be an integer from -9223372036854775808 to 9223372036854775807"
        in answer.body
    )
    assert len(answer.body) < 1_000


@pytest.mark.parametrize(
    ("method", "path", "argument"),
    [
        pytest.param("PUT", "/v1/caches/", "cache", id="no name"),
        pytest.param("POST", "/v1/caches//workers", "cache", id="no name amid a path"),
        pytest.param("GET", "/v1/caches/main/foo", "what", id="no such list"),
        pytest.param("GET", "/v1/tenants/", "tenant", id="no tenant"),
        pytest.param("DELETE", "/v1/pins/", "pin_id", id="no pin"),
        pytest.param("POST", "/v1/nothing/", "path", id="no route"),
    ],
)
async def test_argument_that_no_path_can_carry_is_named(
    served: Served, method: str, path: str, argument: str
) -> None:
    """The refusal names the caller's argument, since the caller passed no path."""
    answer = await http(served, method, path)

    assert (answer.json["code"], answer.json["resource"]) == ("INVALID", argument)


def test_client_knows_the_lists_that_have_paths() -> None:
    """The client refuses other lists before it makes a path of them."""
    listed = [what for route in ROUTES for name, what in route.settled if name == "what"]

    assert listed == list(LISTED)


@pytest.mark.parametrize("tenant", ["team/a b", "team/a/", "/", "a" + 30 * "/b"])
async def test_tenant_may_have_a_slash_in_its_name(served: Served, tenant: str) -> None:
    """A tenant's name with a slash works in attach, so it works in the path of limits, too."""
    answer = await http(served, "GET", f"/v1/tenants/{quote(tenant, safe='')}")

    assert (answer.status, served.daemon.calls[0][1]) == (200, pb.GetTenantRequest(tenant=tenant))


@pytest.mark.parametrize(
    ("method", "path", "resource"),
    [
        pytest.param("PUT", "/v1/tenants/%ff", "tenant", id="tenant"),
        pytest.param("PUT", "/v1/tenants/a%ed%a0%80", "tenant", id="surrogate"),
        pytest.param("DELETE", "/v1/caches/%c3", "cache", id="cache"),
        pytest.param("GET", "/v1/stats?cache=%ff", "cache", id="value in a query"),
        pytest.param("GET", "/v1/stats?%ff=demo", "query", id="name in a query"),
    ],
)
async def test_path_that_is_not_utf_8_is_refused(
    served: Served, method: str, path: str, resource: str
) -> None:
    """Bytes that are not UTF-8 are no name, and do not become one: whoever sends them is told so."""
    answer = await http(served, method, path, {"limits": {}} if method == "PUT" else None)

    assert (answer.status, answer.json["code"]) == (422, "INVALID")
    assert answer.json["resource"] == resource
    assert answer.json["detail"] == (
        f"{resource} has bytes that are not UTF-8; send the text as UTF-8, percent-encoded"
    )
    assert not served.daemon.calls


async def test_name_in_a_query_is_utf_8(served: Served) -> None:
    """A name in a query is the one that its percent-encoded UTF-8 says, as in a path."""
    await http(served, "GET", f"/v1/stats?cache={quote('café')}")

    assert served.daemon.calls[0][1] == pb.StatsRequest(cache="café")
