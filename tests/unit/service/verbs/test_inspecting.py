"""Laws of the lists of waiting calls and of tenants: they show where each stands, to those who may see it."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvlease.errors import InvalidError, UnknownWorkerError
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.callers import Caller
from kvleased.caches.registry import Registry
from kvleased.verbs.inspecting import inspect

from .scripted import WORKER, ScriptedCore, add_worker, registry_of

OPERATOR = Caller(transport="local")


def waiting(call_id: int, **changes: Any) -> SimpleNamespace:
    """Return a waiting call as the core lists it."""
    facts = {
        "call_id": call_id, "worker_id": 7, "verb": "reserve", "position": 1, "priority": 2, "num_blocks": 4,
        "available_blocks": 3, "reason": "blocks", "age_seconds": 1.5, "left_seconds": 0.25,
    }  # fmt: skip
    return SimpleNamespace(**facts | changes)


def tenant(digest: int, **changes: Any) -> SimpleNamespace:
    """Return a tenant as the core lists it."""
    facts = {
        "tenant_digest": digest, "used_blocks": 9, "held_blocks": 5, "pinned_blocks": 2, "min_blocks": 1,
        "max_blocks": 16, "pinned_blocks_max": 4, "weight": 2.5, "num_leases": 3, "leases_max": 8,
    }  # fmt: skip
    return SimpleNamespace(**facts | changes)


def listed(
    registry: Registry, what: str, caller: Caller = OPERATOR, **page: int
) -> pb.InspectResponse:
    """Inspect the cache."""
    return inspect(registry, pb.InspectRequest(cache="main", what=what, **page), caller)


def test_waiting_calls_are_listed_with_their_reasons() -> None:
    """A waiting call is listed with its owner, its place, what it lacks and why, and its times."""
    page = listed(registry_of(core=ScriptedCore(waiting=(waiting(1),))), "waiting")

    assert page.num_total == 1
    assert list(page.waiting) == [
        pb.WaitingInfo(
            call_id=1, worker_id=7, verb="reserve", position=1, priority="high", num_blocks=4, available_blocks=3,
            reason="blocks", age_ms=1500, left_ms=250,
        )
    ]  # fmt: skip


def test_waiting_calls_come_a_page_at_a_time() -> None:
    """A page ends at its limit, and the next page starts after its last id."""
    registry = registry_of(core=ScriptedCore(waiting=tuple(map(waiting, (1, 2, 3)))))

    first = listed(registry, "waiting", limit=2)
    second = listed(registry, "waiting", limit=2, after_id=first.waiting[-1].call_id)

    assert [one.call_id for one in (*first.waiting, *second.waiting)] == [1, 2, 3]
    assert first.num_total == second.num_total == 3


def test_tenants_are_listed_by_name() -> None:
    """A tenant is listed by the name that its workers attached with, and one without workers by its digest."""
    registry = registry_of()
    acme = next(iter(registry.by_id.values())).tenant_digest
    registry.revisions = {acme: 6}
    registry.cache("main").core = ScriptedCore(tenants=(tenant(acme), tenant(0xAB)))  # type: ignore[assignment]  # lists alone

    page = listed(registry, "tenants")

    assert [one.tenant for one in page.tenants] == ["acme", "00000000000000ab"]
    assert page.tenants[0] == pb.TenantInfo(
        tenant_id=1, tenant="acme", used_blocks=9, held_blocks=5, pinned_blocks=2, min_blocks=1, max_blocks=16,
        pinned_blocks_max=4, weight=2.5, num_leases=3, leases_max=8, revision=6,
    )  # fmt: skip


def test_tenants_come_a_page_at_a_time() -> None:
    """A tenant's number in the list is the id after which the next page starts."""
    registry = registry_of(core=ScriptedCore(tenants=tuple(map(tenant, (1, 2, 3)))))

    first = listed(registry, "tenants", limit=2)
    second = listed(registry, "tenants", limit=2, after_id=first.tenants[-1].tenant_id)

    assert [one.tenant_id for one in (*first.tenants, *second.tenants)] == [1, 2, 3]
    assert first.num_total == second.num_total == 3


def test_worker_sees_its_own_tenant_alone() -> None:
    """A caller with a worker's token sees neither other tenants nor how many there are."""
    registry = registry_of()
    add_worker(registry, "other", "rival")
    digests = [one.tenant_digest for one in registry.by_id.values()]
    registry.cache("main").core = ScriptedCore(tenants=tuple(map(tenant, digests)))  # type: ignore[assignment]  # the same

    page = listed(registry, "tenants", WORKER)

    assert [(one.tenant_id, one.tenant) for one in page.tenants] == [(1, "acme")]
    assert page.num_total == 1


@pytest.mark.parametrize("what", ["tenants", "magazines"])
def test_token_of_nobody_lists_no_tenants(what: str) -> None:
    """An unknown token is not taken for an operator."""
    with pytest.raises(UnknownWorkerError):
        listed(registry_of(core=ScriptedCore()), what, Caller(transport="grpc", token="x"))


def magazine(number: int, digest: int, **changes: Any) -> SimpleNamespace:
    """Return a magazine as the core lists it."""
    facts = {
        "magazine_id": number, "name": 0xFE, "tenant_digest": digest, "worker_ids": (7, 8), "num_private": 3,
        "num_held": 2, "sequence": 9, "age_seconds": 1.5,
    }  # fmt: skip
    return SimpleNamespace(**facts | changes)


def test_magazines_are_listed_without_their_names() -> None:
    """A magazine is listed by a digest, with its tenant, processes and blocks, a page at a time."""
    registry = registry_of()
    acme = next(iter(registry.by_id.values())).tenant_digest
    of_both = (magazine(1, acme), magazine(3, 0xAB, age_seconds=None))
    registry.cache("main").core = ScriptedCore(magazines=of_both)  # type: ignore[assignment]  # lists alone

    page = listed(registry, "magazines", limit=1)
    rest = listed(registry, "magazines", after_id=1)

    assert list(page.magazines) == [
        pb.MagazineInfo(
            magazine_id=1, magazine_digest="00000000000000fe", tenant="acme",
            worker_ids=(7).to_bytes(8, "little") + (8).to_bytes(8, "little"),
            private_blocks=3, held_blocks=2, num_exchanges=9, age_ms=1500,
        )
    ]  # fmt: skip
    assert [(one.magazine_id, one.HasField("age_ms")) for one in rest.magazines] == [(3, False)]
    assert (page.num_total, listed(registry, "magazines", WORKER).num_total) == (2, 1)


def test_list_that_is_none_is_refused_with_all_lists() -> None:
    """The refusal names every list."""
    with pytest.raises(InvalidError, match="workers, leases, pins, waiting, tenants"):
        listed(registry_of(core=ScriptedCore()), "keys")
