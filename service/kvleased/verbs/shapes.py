"""Own the conversion of a plan and the settings to the numbers that a core works with."""

from collections.abc import Sequence
from typing import Any

from kvlease.errors import InvalidError
from kvlease.groups import GroupShape
from kvlease.plan import CachePlan
from kvlease.plan_groups import groups_of, why_no_prefix
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.config.settings import Settings
from kvleased.core.shape import CacheShape, WritePolicy


def shape_of(
    plan: CachePlan, settings: Settings, options: pb.CacheOptions | None = None
) -> CacheShape:
    """Return the numbers that the core of a cache works with; without `options`, numbers that suit any cache.

    Parts of blocks are not shared: if the plan lets a prefix end inside a group's block, `hit_tokens` is
    `scheduler_block_tokens`, at whose multiples a block of every group ends.
    """
    groups = groups_of(plan)
    return CacheShape(
        num_blocks=plan.num_blocks,
        num_slots=plan.num_slots,
        num_disk_slots=plan.num_disk_slots,
        uses_remote=plan.num_remote_slots > 0,
        **({} if options is None else _kept(options)),
        groups=groups,
        hash_tokens=plan.hash_block_tokens,
        hit_tokens=_hit_tokens(plan, groups),
        shares_prefixes=not why_no_prefix(plan),
        longest_request_tokens=plan.longest_request_tokens,
        null_blocks=plan.null_blocks,
        num_ranks=len(plan.ranks),
        max_leases=settings.max_leases,
        max_waiting=settings.max_waiting,
        max_pins=settings.max_pins,
        lease_seconds=settings.lease_seconds,
        ageing_seconds=settings.ageing_seconds,
        retry_after_ms=settings.retry_after_ms,
        wait_ms_max=settings.wait_ms_max,
        layout_digest=int(plan.layout_fingerprint[:16], 16),
    )


def _kept(options: pb.CacheOptions) -> dict[str, Any]:
    """Return the options that matter to the core; they have all defaults filled in."""
    return {
        "write_policy": WritePolicy(options.write_policy),
        "write_after_hits": max(1, options.write_after_hits),
        "eviction_policy": options.eviction_policy,
    }


def require_null_block(plan: CachePlan) -> None:
    """Refuse a plan that may grant block 0 although its tables will have empty places, which kernels read as block 0.

    Raises:
        InvalidError: rule null_block_needed, with the remedy.
    """
    if plan.null_blocks:
        return
    for index, shape in enumerate(groups_of(plan)):
        if shape.gives_back:
            kind = plan.groups[index].spec.kind
            message = (
                f"group {index} (layers of kind {kind}) gives blocks back while a request runs, and the places they "
                "leave are read as block 0 of the pool, so block 0 must not be granted; set null_blocks=1"
            )
            raise InvalidError(
                message,
                resource="null_blocks",
                rule="null_block_needed",
                need=1,
                available=0,
                remedies=("null_blocks=1",),
            )


def _hit_tokens(plan: CachePlan, groups: Sequence[GroupShape]) -> int:
    ends_blocks = all(
        plan.hit_alignment_tokens % shape.tokens_per_block == 0
        for shape in groups
        if shape.keys_per_block
    )
    return plan.hit_alignment_tokens if ends_blocks else plan.scheduler_block_tokens
