"""Numbers of 64 bits mean the same over every transport: none takes a number that another refuses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from google.protobuf.message import Message

from kvlease.transports.base import parse_address
from kvlease.v1 import kvlease_pb2 as pb
from tests.acceptance.scenario import SOCKETS, Run, serving

pytestmark = pytest.mark.acceptance

CACHE: Final = "wide"
LAYER: Final = {
    "name": "0", "kind": "full_attention", "num_kv_heads": 1, "head_size": 16, "dtype": "float32",
}  # fmt: skip
INPUTS: Final[dict[str, Any]] = {"tokens_per_block": 4, "device_blocks": 16}
BODY_MAX: Final = 2**53 - 1
"""The largest number in a message: JSON carries no larger one exactly, though two transports could."""
UNSIGNED: Final = (BODY_MAX, BODY_MAX + 1, 2**63 - 1, 2**63, 2**64 - 1)
SIGNED: Final = (-(2**63), -BODY_MAX - 1, -1, BODY_MAX, BODY_MAX + 1, 2**63 - 1)
EXPLAINED: Final = ("code", "resource", "need", "limit", "message")


def inputs(**changes: Any) -> pb.PlanInputs:
    """Return the inputs of a small cache, with changes."""
    layers = [pb.LayerSpec(**LAYER)]
    return pb.PlanInputs(**({"layers": layers} | INPUTS | changes))


def plans() -> Iterator[Message]:
    """Yield plans, each with one number above its own limit."""
    names = ["device_blocks", "device_bytes", "host_bytes", "disk_bytes", "remote_bytes"]
    for number in UNSIGNED:
        changes: list[dict[str, Any]] = [
            *({name: number} for name in (*names, "longest_request_tokens")),
            {"layers": [pb.LayerSpec(**(LAYER | {"head_size": number}))]},
            {"ranks": [pb.RankInputs(device_bytes=number)]},
            {"engine": pb.EngineInputs(lookahead_tokens=number)},
        ]
        for one in changes:
            yield pb.PlanRequest(inputs=inputs(**one))


def limits(number: int) -> Iterator[tuple[str, Message]]:
    """Yield limits of tenants with a large number in one place each."""
    for name in ("min_bytes", "max_bytes"):
        given = pb.TenantLimits(max_percent=100, weight=1, **{name: number})
        yield "set_tenant", pb.SetTenantRequest(tenant="t", limits=given)
    given = pb.TenantLimits(max_percent=100, weight=2)
    yield "set_tenant", pb.SetTenantRequest(tenant="r", limits=given, revision=number)


def by_operator() -> Iterator[tuple[str, Message]]:
    """Yield an operator's calls with unknown ids and other large numbers."""
    for number in UNSIGNED:
        yield from limits(number)
    for number in SIGNED:
        yield "inspect", pb.InspectRequest(cache=CACHE, what="leases", after_id=number)
        yield "explain", pb.ExplainRequest(cache=CACHE, lease_id=number)
        yield "detach", pb.DetachRequest(worker_id=number)


def by_worker() -> Iterator[tuple[str, Message]]:
    """Yield such calls of a worker."""
    for number in UNSIGNED:
        yield "exchange", pb.ExchangeRequest(sequence=number)
    for number in SIGNED:
        yield "heartbeat", pb.HeartbeatRequest(newest_lease_id=number)
        yield "map", pb.MapRequest(lease_id=number)
        yield "release", pb.ReleaseRequest(lease_id=number)
        yield "commit", pb.CommitRequest(lease_id=number)
        yield "unpin", pb.UnpinRequest(pin_id=number)


def test_wide_numbers_mean_the_same_over_each_transport(tmp_path: Path) -> None:
    """All transports take or refuse the same numbers for the same reason; only plans name fields differently."""
    with serving(tmp_path) as runtime_dir:
        said = [answers(f"{scheme}://{runtime_dir}/{name}") for scheme, name in SOCKETS.items()]

    asked = [("plan", one) for one in plans()] + [*by_operator(), *by_worker()]
    for (verb, request), *told in zip(asked, *said, strict=True):
        kept = EXPLAINED[:1] if verb == "plan" else EXPLAINED
        plain, *others = [{name: one.get(name) for name in kept} for one in told]
        assert others == [plain, plain], f"{verb} {request}"
    # Both refused and accepted calls were compared.
    assert {one.get("code") for one in said[0]} >= {None, "INVALID", "UNKNOWN_LEASE"}


def answers(address: str) -> list[dict[str, Any]]:
    """Return all replies over one transport, and leave tenants as they were."""
    with Run(parse_address(address), CACHE) as run:
        run.call("register_cache", pb.RegisterCacheRequest(cache=CACHE, inputs=inputs()))
        token = run.call("attach", pb.AttachRequest(cache=CACHE)).token
        run.said.clear()
        for request in plans():
            run.call("plan", request)
        for verb, request in by_operator():
            run.call(verb, request)
        for verb, request in by_worker():
            run.call(verb, request, token=token)
        told = [told for _, told in run.said]
        # Reset the limits for the next transport; only the highest revision can do that.
        unlimited = pb.TenantLimits(max_percent=100, weight=1, pinned_percent_max=25)
        run.call("set_tenant", pb.SetTenantRequest(tenant="r", limits=unlimited, revision=BODY_MAX))
        assert "code" not in run.said[-1][1], run.said[-1]
        run.call("detach", pb.DetachRequest(), token=token)
        return told
