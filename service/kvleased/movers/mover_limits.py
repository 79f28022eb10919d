"""Own how much each mover is given at once, and how long it may be silent; `tiers` owns which links there are."""

from dataclasses import replace
from typing import Final

from kvleased.config.settings import Settings
from kvleased.core.effects import Mover
from kvleased.movers.batches import LinkLimits

REMOTE_CALLS_A_BATCH_MAX: Final = 8
"""Calls to the remote store, each within remote_ms_max, that one batch may take before its mover counts as wedged."""
REMOTE_SECONDS_MIN: Final = 1.0
"""Least seconds that a batch of the remote mover may take: a busy machine does not mean a wedged process."""
REMOTE_BYTES_A_BATCH_MAX: Final = 16 << 20
"""Bytes of one batch of the remote mover: as many as a slow network carries in the time of one call."""
BATCHES_SENT_TO_GPU_MAX: Final = 4
"""Batches in the socket of a GPU's mover, which begins each as it comes.

One takes the bus a millisecond, so with two of them the bus would wait for the control process.
"""


def mover_limits(settings: Settings) -> dict[Mover, LinkLimits]:
    """Return the movers that the settings ask for, and what each is given at once."""
    limits = LinkLimits(
        seconds_max=settings.mover_seconds_max, copies_a_batch_max=settings.max_copies_a_batch
    )
    found = {Mover.MEMORY: limits}
    if settings.is_on_gpu:
        found[Mover.MEMORY] = replace(limits, batches_sent_max=BATCHES_SENT_TO_GPU_MAX)
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
