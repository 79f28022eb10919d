"""Laws of what kernels read of leases in groups."""

from dataclasses import replace

import pytest

from kvlease.groups import GroupShape
from tests.unit.service.core.builders import (
    evict,
    land,
    release,
    the_copy,
)
from tests.unit.service.core.grouped import (
    FULL,
    WINDOW,
    cache_of,
    commit_tokens,
    counts,
    extend_tokens,
    kernel_parts,
    map_lease,
    places,
    reserve_tokens,
)


def test_kernels_read_what_the_lease_has() -> None:
    """Kernels read every group's blocks as they count them, and block 0 for empty places."""
    halves = replace(FULL, kernel_blocks_per_block=2, kernel_block_stride=6)
    cache = cache_of(halves, WINDOW)
    lease = reserve_tokens(cache, 16)

    reply = map_lease(cache, lease.lease_id)
    commit_tokens(cache, lease.lease_id, 16, b"")
    extend_tokens(cache, lease.lease_id, 20)

    full, window = places(cache, lease.row)
    assert (reply.num_kernel_blocks, counts(reply.kernel_blocks)) == (12, [8, 4])
    assert kernel_parts(cache, lease.row) == [
        [kernel_id for block in full for kernel_id in (block * 6, block * 6 + 1)],
        [0, 0, *window[2:]],
    ]


def test_evicted_lease_is_not_shown_to_kernels() -> None:
    """A lease that leaves the device leaves the table of every group."""
    cache = cache_of(FULL, WINDOW)
    lease = reserve_tokens(cache, 8)
    map_lease(cache, lease.lease_id)

    land(cache, the_copy(evict(cache, lease.lease_id)))

    assert kernel_parts(cache, lease.row) == [[], []]


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["one", "two"])
def test_row_of_an_ended_lease_shows_the_next_one_only_when_mapped(
    groups: tuple[GroupShape, ...],
) -> None:
    """After a published lease ends, the next lease in its row is published only when it is mapped."""
    cache = cache_of(*groups, max_leases=1)
    first = reserve_tokens(cache, 8, "first")
    map_lease(cache, first.lease_id)
    release(cache, first.lease_id)

    second = reserve_tokens(cache, 8, "second")

    assert second.row == first.row
    assert not any(kernel_parts(cache, second.row))
