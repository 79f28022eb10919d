"""Own how an operator's verbs become requests and what their answers mean, as `calls` does for the other verbs."""

from typing import Any

import numpy as np

from kvlease._calling import answers
from kvlease._calling.calls import Ask, ask
from kvlease._calling.fields import given
from kvlease._checks import check_type
from kvlease._records import from_proto
from kvlease.operating import (
    Cleared,
    Deleted,
    Drained,
    DrainedCache,
    Resized,
    TenantLimits,
    TenantRule,
)
from kvlease.v1 import kvlease_pb2 as pb


def drain(cache: str) -> Ask[Drained]:
    """Ask for nothing new to be granted."""
    return ask("drain", lambda: pb.DrainRequest(**given(cache=cache)), _drained)


def undrain(cache: str) -> Ask[Drained]:
    """Ask for leases to be granted again."""
    return ask("undrain", lambda: pb.UndrainRequest(**given(cache=cache)), _drained)


def clear(cache: str, tenant: str) -> Ask[Cleared]:
    """Ask for cached blocks to be dropped."""
    return ask("clear", lambda: pb.ClearRequest(**given(cache=cache, tenant=tenant)), _cleared)


def delete_cache(cache: str, *, purge: bool) -> Ask[Deleted]:
    """Ask for a cache to be freed and, with `purge`, for its disk store to be removed."""
    return ask(
        "delete_cache",
        lambda: pb.DeleteCacheRequest(**given(cache=cache), purge=purge),
        answers.reader(Deleted),
    )


def resize(cache: str, tier: str, num_blocks: int) -> Ask[Resized]:
    """Ask for a pool to grant `num_blocks` blocks."""
    return ask(
        "resize",
        lambda: pb.ResizeRequest(**given(cache=cache, tier=tier, num_blocks=num_blocks)),
        answers.reader(Resized),
    )


def set_tenant(tenant: str, limits: TenantLimits, revision: int) -> Ask[TenantRule]:
    """Ask for a tenant's limits to be replaced."""
    check_type("limits", limits, TenantLimits)
    return ask(
        "set_tenant",
        lambda: pb.SetTenantRequest(
            **given(tenant=tenant, revision=revision), limits=limits.to_proto()
        ),
        _rule,
    )


def get_tenant(tenant: str) -> Ask[TenantRule]:
    """Ask for the limits of a tenant."""
    return ask("get_tenant", lambda: pb.GetTenantRequest(**given(tenant=tenant)), _rule)


def _drained(reply: pb.DrainResponse | pb.UndrainResponse) -> Drained:
    return Drained(
        is_daemon_draining=reply.is_daemon_draining,
        caches=tuple(map(answers.reader(DrainedCache), reply.caches)),
    )


def _cleared(reply: pb.ClearResponse) -> Cleared:
    names: dict[str, Any] = {name: getattr(reply, name) for name in Cleared.__slots__}
    for name in ("lease_ids", "pin_ids"):
        names[name] = tuple(np.frombuffer(names[name], "<i8").tolist())
    return Cleared(**names)


def _rule(reply: pb.SetTenantResponse | pb.GetTenantResponse) -> TenantRule:
    return TenantRule(
        tenant=reply.tenant,
        limits=from_proto(reply.limits, TenantLimits),
        revision=reply.revision,
    )
