"""Own how much each mover is given at once, and how long it may be silent; which links there are is `tiers`'s."""

from dataclasses import replace
from typing import Final

from kvleased.config.settings import Settings
from kvleased.core.effects import Mover
from kvleased.movers.batches import LinkLimits

REMOTE_CALLS_A_BATCH_MAX: Final = 8
"""Calls to the remote store, each within remote_ms_max, that one batch may take before its mover counts as wedged."""
REMOTE_SECONDS_MIN: Final = 1.0
"""Seconds that a batch of the remote mover may take in any case: a busy machine is no wedged process."""
REMOTE_BYTES_A_BATCH_MAX: Final = 16 << 20
"""Bytes of one batch of the remote mover: what a slow network carries in one call's time."""


def mover_limits(settings: Settings) -> dict[Mover, LinkLimits]:
    """Return the movers that there are, and what each is given at once."""
    limits = LinkLimits(
        seconds_max=settings.mover_seconds_max, copies_a_batch_max=settings.max_copies_a_batch
    )
    found = {Mover.MEMORY: limits}
    if settings.disk_dir is not None:
        found[Mover.DISK] = limits
    if settings.remote_url:
        seconds = REMOTE_CALLS_A_BATCH_MAX * settings.remote_ms_max / 1000
        found[Mover.REMOTE] = replace(
            limits,
            seconds_max=max(REMOTE_SECONDS_MIN, seconds),
            bytes_a_batch_max=REMOTE_BYTES_A_BATCH_MAX,
        )
    return found
