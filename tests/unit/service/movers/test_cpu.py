"""Copies move exactly the bytes they name, and notice when they are not what they were."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvleased.core.effects import Direction
from kvleased.movers.cpu import Copied, CpuPools, OutOfBoundsError, checksum
from kvleased.movers.protocol import Batch

NUM_BLOCKS, NUM_SLOTS, BYTES_PER_BLOCK = 12, 9, 64


def _pools() -> CpuPools:
    random = np.random.default_rng(1)
    return CpuPools(
        device=random.integers(0, 256, (NUM_BLOCKS, BYTES_PER_BLOCK), np.uint8),
        host=random.integers(0, 256, (NUM_SLOTS, BYTES_PER_BLOCK), np.uint8),
    )


def _batch(
    direction: Direction,
    sources: list[int],
    targets: list[int],
    checksums: bytes = b"",
    *,
    summed: bool = True,
) -> Batch:
    return Batch(
        number=1,
        pool=1,
        direction=direction,
        with_checksums=summed,
        source_ids=np.array(sources, np.int32).tobytes(),
        target_ids=np.array(targets, np.int32).tobytes(),
        checksums=checksums,
    )


@given(
    st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=NUM_SLOTS),
    st.permutations(range(NUM_SLOTS)),
    st.booleans(),
)
def test_offload_and_reload_bring_back_the_bytes(
    blocks: list[int], slots: list[int], summed: bool
) -> None:
    """Whatever the ids, adjacent or not, blocks come back as they went, and nothing else changes."""
    pools = _pools()
    device, host = pools.device.copy(), pools.host.copy()
    slots = slots[: len(blocks)]

    down = pools.carry_out(_batch(Direction.OFFLOAD, blocks, slots, summed=summed))
    pools.device[blocks] = 0
    up = pools.carry_out(_batch(Direction.RELOAD, slots, blocks, down.checksums, summed=summed))

    assert up.failed == []
    assert len(down.checksums) == (8 * len(blocks) if summed else 0)
    assert np.array_equal(pools.device, device)
    others = np.setdiff1d(np.arange(NUM_SLOTS), slots)
    assert np.array_equal(pools.host[others], host[others])


def test_changed_bytes_are_noticed_by_position() -> None:
    """A single flipped bit fails the block it is in, and no other."""
    pools = _pools()
    down = pools.carry_out(_batch(Direction.OFFLOAD, [3, 4, 5, 9], [0, 1, 2, 7]))
    pools.host[2, 17] ^= 1

    up = pools.carry_out(_batch(Direction.RELOAD, [0, 1, 2, 7], [3, 4, 5, 9], down.checksums))

    assert up.failed == [2]


def test_unknown_checksum_proves_nothing() -> None:
    """A block of which no checksum was taken is copied without a verdict."""
    pools = _pools()

    up = pools.carry_out(_batch(Direction.RELOAD, [0], [0], bytes(8)))

    assert up == Copied()
    assert np.array_equal(pools.device[0], pools.host[0])


def test_scrub_leaves_zeros_in_its_blocks_only() -> None:
    """Scrubbed blocks are zero, their neighbours are as before."""
    pools = _pools()
    before = pools.device.copy()

    pools.carry_out(_batch(Direction.SCRUB, [], [2, 3, 7]))

    assert not pools.device[[2, 3, 7]].any()
    others = [block for block in range(NUM_BLOCKS) if block not in {2, 3, 7}]
    assert np.array_equal(pools.device[others], before[others])


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(_batch(Direction.OFFLOAD, [0, NUM_BLOCKS], [0, 1]), id="source beyond"),
        pytest.param(_batch(Direction.OFFLOAD, [0, 1], [0, NUM_SLOTS]), id="target beyond"),
        pytest.param(_batch(Direction.RELOAD, [0, -1], [0, 1]), id="negative"),
        pytest.param(_batch(Direction.SCRUB, [], [NUM_BLOCKS]), id="scrub beyond"),
        pytest.param(_batch(Direction.OFFLOAD, [0, 1], [0]), id="unequal"),
        pytest.param(_batch(Direction.RELOAD, [0, 1], [0, 1], bytes(8)), id="checksums missing"),
    ],
)
def test_batch_out_of_bounds_writes_nothing(batch: Batch) -> None:
    """A batch with any id outside its pool is refused before its first byte is written."""
    pools = _pools()
    before: tuple[NDArray[np.uint8], ...] = (pools.device.copy(), pools.host.copy())

    with pytest.raises(OutOfBoundsError):
        pools.carry_out(batch)

    assert np.array_equal(pools.device, before[0])
    assert np.array_equal(pools.host, before[1])


def test_checksum_is_never_the_mark_for_none() -> None:
    """No block has checksum 0, which stands for "none was taken"."""
    assert all(checksum(np.full(64, byte, np.uint8).data) for byte in range(256))
