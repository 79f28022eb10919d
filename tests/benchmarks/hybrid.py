"""Own the figures of the block manager for several groups: full attention beside a sliding window, as in `manager`."""

from dataclasses import replace
from pathlib import Path
from typing import Final

from manager import CALLS, TIMES, Sizes, beside, one_group
from measure import Figure
from reference import reference

from kvlease.groups import GroupShape, Keeps
from kvleased.system.heap import keep_freed_memory

WINDOW_TOKENS: Final = 1_024
TIMES_FASTER: Final = 3


def hybrid(directory: Path) -> list[Figure]:  # noqa: ARG001 - every benchmark gets one
    """Measure requests of each size beside their floor."""
    times = dict.fromkeys(TIMES, TIMES_FASTER)
    keep_freed_memory()  # as in `manager`
    with reference() as process:
        return [
            one
            for num_blocks in CALLS
            for one in beside(
                "hybrid", Sizes(num_blocks, two_groups), process, times, WINDOW_TOKENS
            )
        ]


def two_groups(table_blocks: int) -> tuple[GroupShape, ...]:
    """Return full attention and a sliding window, which keeps all blocks of a request until they are computed."""
    (full,) = one_group(table_blocks)
    return full, replace(full, keeps=Keeps.WINDOW, kept_tokens=WINDOW_TOKENS - 1)
