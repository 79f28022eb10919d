"""Laws of bodies: a wrong value is refused in the same words over every transport, and all of a body's at once."""

import asyncio
import http.client as http_client
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from pydantic import ValidationError

from kvlease.errors import InvalidError
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire import bodies
from kvleased.access.roles import Role
from kvleased.api import faults
from kvleased.api.rest.bodies import ERRORS_MAX, refusal_of
from tests.unit.api.guarded import Guarded, guarded

OF_TOKENS = "it must be from 1 to 2147483647"
OF_BLOCKS = "it must be from 0 to 2147483647"
OF_REQUEST_ID = "it must have 1 to 128, all printable"
LABEL = "it must have up to 128, all printable"

BOUNDED: list[tuple[str, str, Message, str, object, str]] = [
    ("POST", "/v1/leases", pb.ReserveRequest(request_id="r"), "num_tokens", 0, OF_TOKENS),
    ("POST", "/v1/leases", pb.ReserveRequest(request_id="r"), "num_tokens", 1 << 31, OF_TOKENS),
    ("POST", "/v1/leases", pb.ReserveRequest(num_tokens=1), "request_id", "", OF_REQUEST_ID),
    ("POST", "/v1/leases", pb.ReserveRequest(num_tokens=1), "request_id", "x" * 129, OF_REQUEST_ID),
    ("POST", "/v1/leases", pb.ReserveRequest(num_tokens=1), "request_id", "x" * 257, OF_REQUEST_ID),
    ("POST", "/v1/leases", pb.ReserveRequest(request_id="r", num_tokens=1), "retain_priority", 101,
     "it must be from 0 to 100"),
    ("POST", "/v1/leases", pb.ReserveRequest(request_id="r", num_tokens=1), "retain_seconds", 604_801,
     "it must be from 0 to 604800"),
    ("POST", "/v1/leases/1/extend", pb.ExtendRequest(lease_id=1), "num_tokens", 0, OF_TOKENS),
    ("POST", "/v1/leases/1/extend", pb.ExtendRequest(lease_id=1), "num_tokens", 1 << 31, OF_TOKENS),
    ("POST", "/v1/leases/1/fork", pb.ForkRequest(lease_id=1, request_id="r"), "num_tokens", 0, OF_TOKENS),
    ("POST", "/v1/leases/1/trim", pb.TrimRequest(lease_id=1), "num_tokens", 1 << 31, OF_TOKENS),
    ("POST", "/v1/leases/1/commit", pb.CommitRequest(lease_id=1), "num_tokens", 1 << 31, OF_BLOCKS),
    ("POST", "/v1/leases/1/commit", pb.CommitRequest(lease_id=1), "first_block", 1 << 31, OF_BLOCKS),
    ("POST", "/v1/evict", pb.EvictRequest(), "num_blocks", 1 << 31, OF_BLOCKS),
    ("POST", "/v1/caches/main/workers", pb.AttachRequest(cache="main"), "worker_name", "x" * 129, LABEL),
    ("POST", "/v1/caches/main/workers", pb.AttachRequest(cache="main"), "worker_name", "x" * 257, LABEL),
    ("POST", "/v1/caches/main/workers", pb.AttachRequest(cache="main"), "tenant", "x" * 257, LABEL),
    ("POST", "/v1/caches/main/workers", pb.AttachRequest(cache="main"), "magazine", "x" * 257, LABEL),
    ("POST", "/v1/caches/main/clear", pb.ClearRequest(cache="main"), "tenant", "x" * 257, LABEL),
    ("POST", "/v1/caches/main/resize", pb.ResizeRequest(cache="main", tier="device"), "num_blocks", 1 << 31,
     OF_BLOCKS),
]  # fmt: skip
"""Method, path, the rest of the request, the field, a value just outside its bounds, and the bounds."""
BELOW = [case for case in BOUNDED if isinstance(case[4], int) and case[3] != "retain_priority"]


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Guarded]:
    """A real daemon behind its servers."""
    async with guarded(tmp_path / "run") as found:
        yield found


async def token_for(serving: Guarded, request: Message) -> str:
    """Return the token of a caller who may make the call."""
    is_workers = isinstance(
        request,
        pb.ReserveRequest | pb.ExtendRequest | pb.ForkRequest | pb.TrimRequest | pb.CommitRequest,
    )
    return await serving.token(Role.WORKER if is_workers else Role.OPERATOR)


def over_rest(serving: Guarded, token: str, how: tuple[str, str], body: object) -> dict[str, Any]:
    """Return the problem with which a request is refused."""
    connection = http_client.HTTPConnection("127.0.0.1", serving.rest.http_port, timeout=20)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    connection.request(*how, json.dumps(body), headers)
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


async def over_grpc(serving: Guarded, token: str, request: Message) -> grpc.aio.AioRpcError:
    """Return the refusal of a call."""
    name = type(request).__name__.removesuffix("Request")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc.grpc_port}") as channel:
        call = channel.unary_unary(f"/kvlease.v1.KVLeaseService/{name}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(
                request.SerializeToString(), metadata=(("authorization", f"Bearer {token}"),)
            )
    return caught.value


def body_of(request: Message, field: str, value: object) -> dict[str, object]:
    """Return the body of the same call without what the path says."""
    beside = {name.name: said for name, said in request.ListFields()}
    return {k: v for k, v in (beside | {field: value}).items() if k not in ("lease_id", "cache")}


@pytest.mark.parametrize(("method", "path", "request_", "field", "value", "bounds"), BOUNDED)
async def test_value_out_of_bounds_is_refused_alike(  # noqa: PLR0913, PLR0917 -- a row of the table
    serving: Guarded,
    method: str,
    path: str,
    request_: Message,
    field: str,
    value: object,
    bounds: str,
) -> None:
    """REST, gRPC and the local socket refuse a value with the same code and words, whoever checks it."""
    token = await token_for(serving, request_)
    asked = type(request_).FromString(request_.SerializeToString())
    setattr(asked, field, value)
    verb = next(
        one.name
        for one in pb.Call.DESCRIPTOR.oneofs_by_name["request"].fields
        if one.message_type.name == type(asked).__name__
    )
    body = body_of(request_, field, value)

    problem = await asyncio.to_thread(over_rest, serving, token, (method, path), body)
    error = await over_grpc(serving, token, asked)
    local = await serving.over_local(pb.Call(call_number=1, token=token, **{verb: asked}))

    assert problem["detail"].endswith(bounds)
    assert problem["detail"] == error.details() == local.error.message
    assert problem["code"] == local.error.code == "INVALID"
    assert problem["resource"] == local.error.resource == field
    assert (problem["need"], problem["limit"]) == (local.error.need, local.error.limit)


@pytest.mark.parametrize(("method", "path", "request_", "field", "value", "bounds"), BELOW)
async def test_what_only_json_carries_has_the_same_bounds(  # noqa: PLR0913, PLR0917 -- the same
    serving: Guarded,
    method: str,
    path: str,
    request_: Message,
    field: str,
    value: object,
    bounds: str,
) -> None:
    """A number below 0, which only JSON can carry, is refused with the bounds that the daemon goes by."""
    del value
    token = await token_for(serving, request_)
    body = body_of(request_, field, -1)

    problem = await asyncio.to_thread(over_rest, serving, token, (method, path), body)

    assert problem["detail"] == f"{field} is -1; {bounds}"
    assert problem["errors"] == [
        {"pointer": f"#/{field}", "field": field, "detail": problem["detail"]}
    ]


LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"min_percent": 200}, "limits.min_percent is 200; it must be from 0 to 100"),
    ({"max_percent": -0.5}, "limits.max_percent is -0.5; it must be from 0 to 100"),
    ({"pinned_percent_max": float("nan")}, "limits.pinned_percent_max is nan; it must be from 0 to 100"),
    ({"weight": 0}, "limits.weight is 0; it must be above 0, and at most 1000"),
    ({"weight": 1e300}, "limits.weight is 1e+300; it must be above 0, and at most 1000"),
    ({"leases_max": 1 << 21}, "limits.leases_max is 2097152; it must be from 0 to 1048576"),
]  # fmt: skip


@pytest.mark.parametrize(("limits", "words"), LIMITS)
async def test_limits_of_a_tenant_are_refused_alike(
    serving: Guarded, limits: dict[str, Any], words: str
) -> None:
    """Each transport has the daemon's words and the limit's place in the body; REST has them in `errors`, too."""
    token = await serving.token(Role.OPERATOR)
    asked = pb.SetTenantRequest(tenant="chat", limits=pb.TenantLimits(**limits), revision=1)
    body = {"limits": limits, "revision": 1}

    problem = await asyncio.to_thread(over_rest, serving, token, ("PUT", "/v1/tenants/chat"), body)
    error = await over_grpc(serving, token, asked)
    local = await serving.over_local(pb.Call(call_number=1, token=token, set_tenant=asked))

    field = f"limits.{next(iter(limits))}"
    assert problem["detail"] == error.details() == local.error.message == words
    assert problem["resource"] == local.error.resource == field
    assert problem.get("need", 0) == local.error.need
    assert problem["limit"] == local.error.limit
    assert problem["errors"] == [
        {"pointer": f"#/{field.replace('.', '/')}", "field": field, "detail": words}
    ]


async def test_limits_that_contradict_each_other_are_refused_alike(serving: Guarded) -> None:
    """Limits that are each in range but cannot hold together are refused."""
    token = await serving.token(Role.OPERATOR)
    limits = {"min_percent": 50, "max_percent": 10}
    asked = pb.SetTenantRequest(tenant="chat", limits=pb.TenantLimits(**limits), revision=1)
    body = {"limits": limits, "revision": 1}

    problem = await asyncio.to_thread(over_rest, serving, token, ("PUT", "/v1/tenants/chat"), body)
    local = await serving.over_local(pb.Call(call_number=1, token=token, set_tenant=asked))

    assert problem["detail"] == local.error.message
    assert problem["detail"] == "min_percent (50) must be at most max_percent (10)"
    assert problem["resource"] == local.error.resource == "limits"


async def test_bytes_of_a_tenant_above_all_memory_are_refused(serving: Guarded) -> None:
    """A number of bytes that only gRPC and the local socket can carry is refused, too."""
    token = await serving.token(Role.OPERATOR)
    limits = pb.TenantLimits(max_bytes=(1 << 64) - 1)
    asked = pb.SetTenantRequest(tenant="chat", limits=limits, revision=1)

    error = await over_grpc(serving, token, asked)
    local = await serving.over_local(pb.Call(call_number=1, token=token, set_tenant=asked))

    assert error.details() == local.error.message
    assert local.error.message.endswith(f"it must be from 0 to {2**53 - 1}")


def test_all_limits_of_a_tenant_that_do_not_fit_are_told() -> None:
    """A caller who sets several wrong limits is told of all of them at once."""
    with pytest.raises(ValidationError) as caught:
        bodies.SetTenantBody.model_validate_json('{"limits": {"min_percent": 101, "weight": 0}}')
    refused = refusal_of(bodies.SetTenantBody, caught.value)

    assert [one.pointer for one in refused.errors] == ["#/limits/min_percent", "#/limits/weight"]
    assert refused.message.endswith("(1 more, see errors)")


SAID: list[tuple[type[bodies.Body], object, str]] = [
    (bodies.ReserveBody, {"num_tokens": "3"}, "num_tokens is '3'; it must be an integer"),
    (bodies.ReserveBody, {"num_tokens": None}, "num_tokens is null; it must be an integer"),
    (bodies.ReserveBody, {"num_tokens": 2.5}, "num_tokens is 2.5; it must be an integer"),
    (bodies.ReserveBody, {"explain": 1}, "explain is 1; it must be true or false"),
    (bodies.ReserveBody, {"priority": 7}, "priority is 7; it must be text"),
    (bodies.ReserveBody, {"keys": "***"}, "keys is '***'; it must be base64"),
    (bodies.ReserveBody, {"token_ids": 5}, "token_ids is 5; it must be base64 or a list"),
    (bodies.ReserveBody, {"token_ids": [1, -1]}, "token_ids[1] is -1; it must be from 0 to 2147483647"),
    (bodies.ReserveBody, {"num_token": 3}, "num_token is not a field here; did you mean num_tokens?"),
    (bodies.ReserveBody, {"zzz": 3}, "zzz is not a field here; leave it out"),
    (bodies.ReserveBody, [1], "body is a list of 1; it must be an object"),
    (bodies.StepBody, {"reserves": [{"num_tokens": -1}]},
     "reserves[0].num_tokens is -1; it must be from 1 to 2147483647"),
    (bodies.SetTenantBody, {"limits": {"weight": {}}}, "limits.weight is an object; it must be a number"),
    (bodies.RegisterCacheBody, {"inputs": {"layers": [{"num_kv_heads": -1}]}},
     "inputs.layers[0].num_kv_heads is -1; it must be 0 or more"),
    (bodies.RegisterCacheBody, {"options": {"write_after_hits": -1}},
     "options.write_after_hits is -1; it must be from 1 to 65536"),
    (bodies.RegisterCacheBody, {"options": {"ghosts": ["a"] * 4}}, "options.ghosts has 4 items; the limit is 3"),
    (bodies.PlanBody, {"what_if": ["a"] * 33}, "what_if has 33 items; the limit is 32"),
]  # fmt: skip


@pytest.mark.parametrize(("body_class", "body", "words"), SAID)
def test_body_is_told_field_and_wish(
    body_class: type[bodies.Body], body: object, words: str
) -> None:
    """The refusal has the field as programs write it, its value, and what it must be."""
    with pytest.raises(ValidationError) as caught:
        body_class.model_validate_json(json.dumps(body))

    assert refusal_of(body_class, caught.value).message == words


def test_all_fields_of_a_body_are_told_at_once() -> None:
    """Each wrong field has its place as in RFC 9457; a long list is cut, and its length is told."""
    with pytest.raises(ValidationError) as caught:
        bodies.ReserveBody.model_validate_json('{"num_tokens": -1, "a/b": 1, "token_ids": [-1]}')
    problem = json.loads(faults.problem(refusal_of(bodies.ReserveBody, caught.value)))

    assert [one["pointer"] for one in problem["errors"]] == [
        "#/num_tokens", "#/token_ids/0", "#/a~1b",
    ]  # fmt: skip
    assert problem["detail"] == f"{problem['errors'][0]['detail']} (2 more, see errors)"
    assert problem["title"] == json.loads(faults.problem(InvalidError()))["title"]

    with pytest.raises(ValidationError) as caught:
        bodies.ReserveBody.model_validate_json(json.dumps({"token_ids": [-1] * 99}))
    refused = refusal_of(bodies.ReserveBody, caught.value)
    assert len(refused.errors) == ERRORS_MAX
    assert refused.message.endswith("(98 more, see errors)")


def test_body_that_is_no_json_says_where() -> None:
    """The refusal of a body that is no JSON has the place at which it stops being JSON."""
    with pytest.raises(ValidationError) as caught:
        bodies.ReserveBody.model_validate_json("{")

    assert "the body is not valid JSON: EOF" in refusal_of(bodies.ReserveBody, caught.value).message
