"""What every refusal of a simulated cache must say: what is missing, who has it, and when to try again."""

from typing import TYPE_CHECKING, Final

from kvlease.errors import KVLeaseError

if TYPE_CHECKING:
    from tests.laws.world import World

_SAY_NO_TIME: Final = ("DEADLINE",)
"""Retryable refusals for which nobody knows how long they will last."""
_OF_POOLS: Final = ("device_blocks", "tenant_blocks", "host_slots", "leases", "tenant_leases")
"""Resources whose refusals say who has the pool."""


def explains(world: "World", error: KVLeaseError) -> None:
    """Check that a refusal says what was missing and who has it, and, if it is retryable, when to try again."""
    says_when = error.retry_after_ms is not None or error.code in _SAY_NO_TIME
    if error.retryable and not says_when:
        world.fail(f"{error.code} says retry, but not when")
    if error.code in ("POOL_FULL", "NEVER_FITS") and not (
        error.resource and error.limit is not None
    ):
        world.fail(f"{error.code} does not say of what there is too little")
    if error.code == "POOL_FULL" and error.resource in _OF_POOLS and not error.holdings:
        world.fail(f"{error} does not say who has the pool")
    if error.holdings:
        counted = sum(one.num_blocks for one in error.holdings)
        is_host = error.resource == "host_slots"
        usable = world.shape.num_blocks - world.shape.null_blocks
        expected = world.shape.num_slots if is_host else usable
        if counted != expected:
            world.fail(f"the holdings of {error.code} add up to {counted}, not {expected}")
