"""Copies move exactly the bytes that they name, and notice changed bytes, on a CPU and on a GPU.

Here the GPU's memory is host memory, and its streams are played; `tests/gpu` has a driver for the same laws.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvleased.core.effects import Direction
from kvleased.movers import cpu
from kvleased.movers.cpu import Copied, CpuPools, OutOfBoundsError, checksum
from kvleased.movers.pools import Pools
from kvleased.movers.protocol import Batch, Piece
from kvleased.movers.rows import PythonLoops
from tests.unit.service.movers.gpu.gpu_memory import laid_on_gpu

NUM_BLOCKS, NUM_SLOTS, BYTES_PER_BLOCK = 12, 9, 64
_PAGE_BYTES: Final = 16
_LAYER_BYTES: Final = NUM_BLOCKS * _PAGE_BYTES


@dataclass(frozen=True)
class Memory:
    """Regions of random bytes, and the pools in them."""

    devices: tuple[NDArray[np.uint8], ...]
    host: NDArray[np.uint8]
    pools: Pools

    pieces: list[Piece]

    def block(self, block: int) -> bytes:
        """Return all bytes of a block, over all ranks and pieces."""
        return b"".join(
            self.devices[piece.rank][start : start + piece.num_bytes].tobytes()
            for piece in self.pieces
            for start in [piece.offset_bytes + block * piece.block_stride_bytes]
        )


_lay: list[Callable[..., Pools]] = [CpuPools.laid]


@pytest.fixture(autouse=True, scope="module", params=["compiled", "interpreted", "gpu"])
def lay(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each law of this file for pools of both kinds, and for loops of both kinds."""
    _lay.append(laid_on_gpu if request.param == "gpu" else CpuPools.laid)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "interpreted":
            patch.setattr(cpu, "loops", PythonLoops)
        yield
    _lay.pop()


def _memory(
    pieces: list[Piece], device_bytes: list[int], bytes_per_slot: int = BYTES_PER_BLOCK
) -> Memory:
    random = np.random.default_rng(1)
    devices = tuple(random.integers(0, 256, size, np.uint8) for size in device_bytes)
    host = random.integers(0, 256, NUM_SLOTS * bytes_per_slot, np.uint8)
    pools = _lay[-1](
        devices, host, num_blocks=NUM_BLOCKS, bytes_per_slot=bytes_per_slot, pieces=pieces
    )
    return Memory(devices, host, pools, pieces)


def _whole() -> Memory:
    """One rank with blocks outermost: a block is one piece, and so is a run of blocks."""
    return _memory(
        [Piece(rank=0, offset_bytes=0, block_stride_bytes=64, num_bytes=64, slot_offset_bytes=0)],
        [NUM_BLOCKS * BYTES_PER_BLOCK],
    )


def _padded() -> Memory:
    """The same, in slots that are larger than a block."""
    return _memory(
        [Piece(rank=0, offset_bytes=0, block_stride_bytes=64, num_bytes=64, slot_offset_bytes=0)],
        [NUM_BLOCKS * BYTES_PER_BLOCK],
        bytes_per_slot=96,
    )


def _layers_outermost() -> Memory:
    """One rank with layers outermost: a block is one piece of each layer."""
    pieces = [
        Piece(
            rank=0,
            offset_bytes=layer * _LAYER_BYTES,
            block_stride_bytes=_PAGE_BYTES,
            num_bytes=_PAGE_BYTES,
            slot_offset_bytes=layer * _PAGE_BYTES,
        )
        for layer in range(4)
    ]
    return _memory(pieces, [4 * _LAYER_BYTES])


def _two_ranks() -> Memory:
    """Two ranks, the second with layers outermost, side by side in a slot."""
    pieces = [
        Piece(rank=0, offset_bytes=0, block_stride_bytes=32, num_bytes=32, slot_offset_bytes=0)
    ]
    pieces += [
        Piece(
            rank=1,
            offset_bytes=layer * _LAYER_BYTES,
            block_stride_bytes=_PAGE_BYTES,
            num_bytes=_PAGE_BYTES,
            slot_offset_bytes=32 + layer * _PAGE_BYTES,
        )
        for layer in range(2)
    ]
    return _memory(pieces, [NUM_BLOCKS * 32, 2 * _LAYER_BYTES])


MEMORIES = [
    pytest.param(_whole, id="whole"),
    pytest.param(_padded, id="padded slots"),
    pytest.param(_layers_outermost, id="layers outermost"),
    pytest.param(_two_ranks, id="two ranks"),
]
every_memory = pytest.mark.parametrize("make", MEMORIES)


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


@every_memory
@given(
    blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=NUM_SLOTS),
    slots=st.permutations(range(NUM_SLOTS)),
    summed=st.booleans(),
)
def test_offload_and_reload_bring_back_the_bytes(
    make: Callable[[], Memory], blocks: list[int], slots: list[int], *, summed: bool
) -> None:
    """However blocks lie, adjacent or not, they come back unchanged, and nothing else changes."""
    memory = make()
    before = [device.copy() for device in memory.devices]
    host = memory.pools.slots.copy()
    slots = slots[: len(blocks)]

    down = memory.pools.carry_out(_batch(Direction.OFFLOAD, blocks, slots, summed=summed))
    memory.pools.carry_out(_batch(Direction.SCRUB, [], blocks))
    is_zero = [not any(memory.block(block)) for block in blocks]
    up = memory.pools.carry_out(
        _batch(Direction.RELOAD, slots, blocks, down.checksums, summed=summed)
    )

    assert all(is_zero)
    assert up.failed == []
    assert len(down.checksums) == (8 * len(blocks) if summed else 0)
    assert all(map(np.array_equal, memory.devices, before))
    others = np.setdiff1d(np.arange(NUM_SLOTS), slots)
    assert np.array_equal(memory.pools.slots[others], host[others])


@every_memory
def test_blocks_come_back_in_other_places(make: Callable[[], Memory]) -> None:
    """A block that is reloaded to another place has all of its bytes there."""
    memory = make()
    before = [memory.block(block) for block in (3, 4, 9)]

    down = memory.pools.carry_out(_batch(Direction.OFFLOAD, [3, 4, 9], [1, 2, 0]))
    memory.pools.carry_out(_batch(Direction.RELOAD, [1, 2, 0], [7, 8, 0], down.checksums))

    assert [memory.block(block) for block in (7, 8, 0)] == before


@every_memory
def test_changed_bytes_are_noticed_by_position(make: Callable[[], Memory]) -> None:
    """A single flipped bit fails its own block, and no other."""
    memory = make()
    down = memory.pools.carry_out(_batch(Direction.OFFLOAD, [3, 4, 5, 9], [0, 1, 2, 7]))
    memory.pools.slots[2, 47] ^= 1

    up = memory.pools.carry_out(
        _batch(Direction.RELOAD, [0, 1, 2, 7], [3, 4, 5, 9], down.checksums)
    )

    assert up.failed == [2]


@every_memory
def test_unknown_checksum_proves_nothing(make: Callable[[], Memory]) -> None:
    """A block without a checksum is copied without a verdict."""
    memory = make()

    up = memory.pools.carry_out(_batch(Direction.RELOAD, [0], [0], bytes(8)))

    assert up == Copied()
    assert memory.block(0) == memory.pools.slots[0, : memory.pools.bytes_per_block].tobytes()


@every_memory
@given(blocks=st.permutations(range(NUM_BLOCKS)), num_copies=st.integers(0, NUM_BLOCKS // 2))
def test_duplicates_have_all_bytes_of_their_sources(
    make: Callable[[], Memory], blocks: list[int], num_copies: int
) -> None:
    """A duplicated block has the bytes of its source, in every piece and rank, and nothing else changes."""
    memory = make()
    before = [memory.block(block) for block in range(NUM_BLOCKS)]
    host = memory.host.copy()
    sources, targets = blocks[:num_copies], blocks[-num_copies:] if num_copies else []

    done = memory.pools.carry_out(_batch(Direction.DUPLICATE, sources, targets))

    source_of = dict(zip(targets, sources, strict=True))
    assert done == Copied()
    for block in range(NUM_BLOCKS):
        assert memory.block(block) == before[source_of.get(block, block)]
    assert np.array_equal(memory.host, host)


@every_memory
def test_one_block_is_duplicated_many_times(make: Callable[[], Memory]) -> None:
    """Several forks of one request may each take a copy of the same block."""
    memory = make()
    before = memory.block(3)

    memory.pools.carry_out(_batch(Direction.DUPLICATE, [3, 3, 3], [0, 1, 9]))

    assert [memory.block(block) for block in (0, 1, 3, 9)] == [before] * 4


@every_memory
def test_duplicate_over_a_source_is_a_fault_of_ours(make: Callable[[], Memory]) -> None:
    """A batch that writes a block which it also reads breaks an assertion: the core never asks for that."""
    memory = make()

    with pytest.raises(AssertionError):
        memory.pools.carry_out(_batch(Direction.DUPLICATE, [3, 4], [4, 5]))


@pytest.mark.parametrize("make", [_whole, _padded])
@pytest.mark.parametrize(
    ("blocks", "slots"),
    [
        pytest.param([9, 2, 5, 11], [4, 3, 6, 5], id="slots are one stretch"),
        pytest.param([4, 3, 6, 5], [8, 0, 2, 5], id="blocks are one stretch"),
        pytest.param([3, 4, 5, 6], [5, 4, 3, 2], id="both are, the other way round"),
        pytest.param([3, 4, 5, 7], [8, 0, 2, 5], id="blocks have a gap"),
        pytest.param([3, 3, 5, 6], [8, 0, 2, 5], id="one block twice"),
        pytest.param([11], [0], id="one"),
    ],
)
def test_stretches_bring_back_the_bytes(
    make: Callable[[], Memory], blocks: list[int], slots: list[int]
) -> None:
    """Blocks that are adjacent at one end only get the bytes of their own slots, and no others change."""
    memory = make()
    before = [memory.block(block) for block in range(NUM_BLOCKS)]
    host = memory.pools.slots.copy()

    memory.pools.carry_out(_batch(Direction.OFFLOAD, blocks, slots, summed=False))
    filled = memory.pools.slots.copy()
    memory.devices[0][:] = 0
    memory.pools.carry_out(_batch(Direction.RELOAD, slots, blocks, summed=False))

    expected = {slot: before[block] for block, slot in zip(blocks, slots, strict=True)}
    for slot in range(NUM_SLOTS):
        assert filled[slot, :64].tobytes() == expected.get(slot, host[slot, :64].tobytes())
    for block in range(NUM_BLOCKS):
        assert memory.block(block) == (before[block] if block in blocks else bytes(64))


@pytest.mark.parametrize(
    "slots",
    [
        pytest.param(range(5, 26), id="one stretch"),
        pytest.param(range(2, 202), id="many"),
        pytest.param([0, 2, *range(4, 24), 30, 31, *range(40, 60), 70], id="with others between"),
        pytest.param(range(0, 60, 2), id="no stretch"),
    ],
)
@pytest.mark.parametrize("block_bytes", [64, (20 << 10) - 64])
def test_small_blocks_have_their_own_checksums(slots: Sequence[int], block_bytes: int) -> None:
    """Small blocks that become adjacent have their own bytes and checksums, and damage is told by position."""
    random = np.random.default_rng(2)
    num_blocks = max(slots) + 2
    devices = (random.integers(0, 256, num_blocks * block_bytes, np.uint8),)
    host = random.integers(0, 256, num_blocks * block_bytes, np.uint8)
    piece = Piece(
        rank=0,
        offset_bytes=0,
        block_stride_bytes=block_bytes,
        num_bytes=block_bytes,
        slot_offset_bytes=0,
    )
    pools = _lay[-1](
        devices, host, num_blocks=num_blocks, bytes_per_slot=block_bytes, pieces=[piece]
    )
    device, host = devices[0].reshape(num_blocks, -1), host.reshape(num_blocks, -1)
    blocks = random.permutation(num_blocks)[: len(slots)].tolist()
    targets = random.permutation(slots).tolist()
    expected, before = host.copy(), device.copy()
    expected[targets] = before[blocks]

    down = pools.carry_out(_batch(Direction.OFFLOAD, blocks, targets))
    written = host.copy()
    host[targets[3], -1] ^= 1
    up = pools.carry_out(_batch(Direction.RELOAD, targets, blocks, down.checksums))

    assert (written == expected).all()
    sums = [checksum(before[block].data) for block in blocks]
    assert np.frombuffer(down.checksums, np.uint64).tolist() == sums
    assert up.failed == [3]
    assert (np.flatnonzero((device != before).any(axis=1)) == blocks[3]).all()


def test_checksum_covers_a_slot_with_gaps() -> None:
    """If other bytes lie between a slot's pieces, a block comes back whole and damage is noticed."""
    pieces = [
        Piece(
            rank=0,
            offset_bytes=layer * _LAYER_BYTES,
            block_stride_bytes=_PAGE_BYTES,
            num_bytes=_PAGE_BYTES,
            slot_offset_bytes=layer * 2 * _PAGE_BYTES,
        )
        for layer in range(2)
    ]
    memory = _memory(pieces, [2 * _LAYER_BYTES])
    before = memory.block(3)

    down = memory.pools.carry_out(_batch(Direction.OFFLOAD, [3, 4], [5, 6]))
    memory.pools.slots[6, 2 * _PAGE_BYTES] ^= 1
    up = memory.pools.carry_out(_batch(Direction.RELOAD, [5, 6], [7, 8], down.checksums))

    assert (up.failed, memory.block(7)) == ([1], before)


def test_large_block_has_the_checksum_of_its_bytes() -> None:
    """A block that is copied in parts has the checksum of all of its bytes."""
    block_bytes = 3 * (1 << 18) + 64
    piece = Piece(
        rank=0,
        offset_bytes=0,
        block_stride_bytes=block_bytes,
        num_bytes=block_bytes,
        slot_offset_bytes=0,
    )
    memory = _memory([piece], [NUM_BLOCKS * block_bytes], bytes_per_slot=block_bytes)
    before = memory.block(7)

    down = memory.pools.carry_out(_batch(Direction.OFFLOAD, [7], [2]))
    up = memory.pools.carry_out(_batch(Direction.RELOAD, [2], [4], down.checksums))

    assert down.checksums == np.uint64(checksum(memoryview(before))).tobytes()
    assert (up.failed, memory.block(4)) == ([], before)


@every_memory
def test_scattered_slot_is_the_block_that_was_offloaded(make: Callable[[], Memory]) -> None:
    """A slot's bytes, taken elsewhere and scattered, are the block that was offloaded to the slot."""
    memory = make()
    memory.pools.carry_out(_batch(Direction.OFFLOAD, [3], [5]))
    before = memory.block(3)

    image = bytes(memory.pools.slots[5, : memory.pools.image_bytes])
    memory.pools.scatter_slot(7, np.frombuffer(image, np.uint8))

    assert len(image) == memory.pools.image_bytes == BYTES_PER_BLOCK
    assert memory.block(7) == before


@pytest.mark.parametrize(
    ("block", "image_bytes"),
    [
        pytest.param(NUM_BLOCKS, BYTES_PER_BLOCK, id="block beyond"),
        pytest.param(-1, BYTES_PER_BLOCK, id="negative"),
        pytest.param(0, BYTES_PER_BLOCK - 1, id="image too short"),
    ],
)
@every_memory
def test_image_that_does_not_fit_is_refused(
    make: Callable[[], Memory], block: int, image_bytes: int
) -> None:
    """If the block is outside the pool or the image has another size, nothing is written."""
    memory = make()
    before = [region.copy() for region in memory.devices]

    with pytest.raises(OutOfBoundsError):
        memory.pools.scatter_slot(block, np.zeros(image_bytes, np.uint8))

    assert all(map(np.array_equal, memory.devices, before))


def test_image_reaches_every_rank_that_keeps_the_same() -> None:
    """If several ranks share a cell, the image is written to all of them."""
    pieces = [
        Piece(rank=rank, offset_bytes=0, block_stride_bytes=64, num_bytes=64, slot_offset_bytes=0)
        for rank in range(2)
    ]
    memory = _memory(pieces, [NUM_BLOCKS * 64] * 2)
    image = np.arange(64, dtype=np.uint8)

    memory.pools.scatter_slot(3, image)

    assert all(np.array_equal(device[192:256], image) for device in memory.devices)


def test_scrub_leaves_zeros_in_its_blocks_only() -> None:
    """Scrubbed blocks are zero in all ranks and layers, and their neighbours stay as they were."""
    memory = _two_ranks()
    before = [memory.block(block) for block in range(NUM_BLOCKS)]

    memory.pools.carry_out(_batch(Direction.SCRUB, [], [2, 3, 7]))

    for block in range(NUM_BLOCKS):
        expected = bytes(BYTES_PER_BLOCK) if block in {2, 3, 7} else before[block]
        assert memory.block(block) == expected


def test_ranks_that_keep_the_same_share_a_cell() -> None:
    """If ranks share a cell, the first one is offloaded and all are reloaded."""
    pieces = [
        Piece(rank=rank, offset_bytes=0, block_stride_bytes=64, num_bytes=64, slot_offset_bytes=0)
        for rank in range(2)
    ]
    memory = _memory(pieces, [NUM_BLOCKS * 64] * 2)
    first = memory.devices[0][:64].copy()

    down = memory.pools.carry_out(_batch(Direction.OFFLOAD, [0], [5]))
    up = memory.pools.carry_out(_batch(Direction.RELOAD, [5], [3], down.checksums))

    assert memory.pools.bytes_per_block == 64
    assert up.failed == []
    assert all(np.array_equal(device[192:256], first) for device in memory.devices)


def test_duplicates_stay_on_their_rank() -> None:
    """If ranks share a cell, each duplicates its own bytes, and none travels between them."""
    pieces = [
        Piece(rank=rank, offset_bytes=0, block_stride_bytes=64, num_bytes=64, slot_offset_bytes=0)
        for rank in range(2)
    ]
    memory = _memory(pieces, [NUM_BLOCKS * 64] * 2)
    own = [device[:64].copy() for device in memory.devices]

    memory.pools.carry_out(_batch(Direction.DUPLICATE, [0], [3]))

    assert all(map(np.array_equal, (device[192:256] for device in memory.devices), own))


@every_memory
@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(_batch(Direction.OFFLOAD, [0, NUM_BLOCKS], [0, 1]), id="source beyond"),
        pytest.param(_batch(Direction.OFFLOAD, [0, 1], [0, NUM_SLOTS]), id="target beyond"),
        pytest.param(_batch(Direction.RELOAD, [0, -1], [0, 1]), id="negative"),
        pytest.param(_batch(Direction.SCRUB, [], [NUM_BLOCKS]), id="scrub beyond"),
        pytest.param(_batch(Direction.DUPLICATE, [0, NUM_BLOCKS], [1, 2]), id="original beyond"),
        pytest.param(_batch(Direction.DUPLICATE, [0, 1], [2, NUM_BLOCKS]), id="duplicate beyond"),
        pytest.param(_batch(Direction.DUPLICATE, [0], [1, 2]), id="unequal duplicates"),
        pytest.param(_batch(Direction.OFFLOAD, [0, 1], [0]), id="unequal"),
        pytest.param(_batch(Direction.RELOAD, [0, 1], [0, 1], bytes(8)), id="checksums missing"),
    ],
)
def test_batch_out_of_bounds_writes_nothing(make: Callable[[], Memory], batch: Batch) -> None:
    """A batch with any id outside its pool is refused before its first byte is written."""
    memory = make()
    before = [region.copy() for region in (*memory.devices, memory.host)]

    with pytest.raises(OutOfBoundsError):
        memory.pools.carry_out(batch)

    assert all(map(np.array_equal, (*memory.devices, memory.host), before))


@pytest.mark.parametrize(
    ("piece", "num_blocks", "num_slots"),
    [
        pytest.param((0, 64, 64, 0), NUM_BLOCKS, NUM_SLOTS, id="all inside"),
        pytest.param((1, 64, 64, 0), NUM_BLOCKS - 1, NUM_SLOTS, id="last block ends outside"),
        pytest.param((0, 128, 64, 0), NUM_BLOCKS // 2, NUM_SLOTS, id="stride too large"),
        pytest.param((NUM_BLOCKS * 64, 64, 64, 0), 0, NUM_SLOTS, id="starts outside"),
        pytest.param((0, 64, 32, 33), NUM_BLOCKS, 0, id="ends outside the slot"),
    ],
)
def test_what_lies_outside_is_no_block(
    piece: tuple[int, int, int, int], num_blocks: int, num_slots: int
) -> None:
    """A block with a piece outside of its region or its slot is out of bounds."""
    offset, stride, num_bytes, slot_offset = piece
    described = Piece(
        rank=0,
        offset_bytes=offset,
        block_stride_bytes=stride,
        num_bytes=num_bytes,
        slot_offset_bytes=slot_offset,
    )

    pools = _memory([described], [NUM_BLOCKS * BYTES_PER_BLOCK]).pools

    assert (pools.num_blocks, len(pools.slots)) == (num_blocks, num_slots)


def test_empty_piece_takes_no_place() -> None:
    """The empty piece of a rank that keeps nothing takes no place in the slot."""
    pieces = [
        Piece(rank=0, offset_bytes=0, block_stride_bytes=0, num_bytes=0, slot_offset_bytes=0),
        Piece(rank=1, offset_bytes=0, block_stride_bytes=64, num_bytes=64, slot_offset_bytes=0),
    ]

    memory = _memory(pieces, [0, NUM_BLOCKS * 64])

    assert memory.pools.num_blocks == NUM_BLOCKS
    assert memory.pools.bytes_per_block == 64


def test_checksum_is_never_the_mark_for_none() -> None:
    """No block has checksum 0, which stands for "none was taken"."""
    assert all(checksum(np.full(64, byte, np.uint8).data) for byte in range(256))


@every_memory
def test_image_of_a_slot_becomes_a_block(make: Callable[[], Memory]) -> None:
    """A slot's image is written to any block, in all pieces and ranks, and nothing else changes."""
    memory = make()
    before = [memory.block(block) for block in range(NUM_BLOCKS)]
    down = memory.pools.carry_out(_batch(Direction.OFFLOAD, [3], [5]))

    image = memory.pools.slots[5, : memory.pools.image_bytes]
    memory.pools.scatter_slot(7, image)

    assert checksum(image.data) == np.frombuffer(down.checksums, np.uint64)[0]
    for block in range(NUM_BLOCKS):
        assert memory.block(block) == before[3 if block == 7 else block]


def test_image_reaches_every_rank_that_keeps_it() -> None:
    """All ranks that share a cell get its bytes."""
    pieces = [
        Piece(rank=rank, offset_bytes=0, block_stride_bytes=64, num_bytes=64, slot_offset_bytes=0)
        for rank in range(2)
    ]
    memory = _memory(pieces, [NUM_BLOCKS * 64] * 2)

    memory.pools.scatter_slot(1, np.arange(64, dtype=np.uint8))

    assert all(device[64:128].tolist() == list(range(64)) for device in memory.devices)


@every_memory
@pytest.mark.parametrize(
    ("block", "missing_bytes"),
    [
        pytest.param(NUM_BLOCKS, 0, id="block beyond"),
        pytest.param(-1, 0, id="negative"),
        pytest.param(0, 1, id="too short"),
    ],
)
def test_image_that_does_not_fit_writes_nothing(
    make: Callable[[], Memory], block: int, missing_bytes: int
) -> None:
    """A block outside the pool, or an image that is cut off, writes nothing."""
    memory = make()
    before = [device.copy() for device in memory.devices]
    image = np.zeros(memory.pools.image_bytes - missing_bytes, np.uint8)

    with pytest.raises(OutOfBoundsError):
        memory.pools.scatter_slot(block, image)

    assert all(map(np.array_equal, memory.devices, before))
