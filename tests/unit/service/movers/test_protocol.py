"""Packets say the same at both ends."""

from hypothesis import given
from hypothesis import strategies as st

from kvleased.core.effects import Direction
from kvleased.movers.protocol import (
    COPIES_A_BATCH_MAX,
    PACKET_BYTES_MAX,
    PIECES_A_PACKET_MAX,
    Batch,
    Completion,
    Piece,
    PoolMap,
    decode_pieces,
    decode_unmap,
    encode_unmap,
)

IDS = st.binary(max_size=40).map(lambda data: data[: len(data) // 4 * 4])
SUMS = st.binary(max_size=40).map(lambda data: data[: len(data) // 8 * 8])


@given(
    st.builds(
        Batch,
        number=st.integers(0, 2**64 - 1),
        pool=st.integers(0, 2**32 - 1),
        direction=st.sampled_from(Direction),
        with_checksums=st.booleans(),
        source_ids=IDS,
        target_ids=IDS,
        checksums=SUMS,
    )
)
def test_batches_arrive_as_they_were_sent(batch: Batch) -> None:
    """Encoding and decoding a batch changes nothing."""
    assert Batch.decode(batch.encode()) == batch


@given(
    st.builds(
        Completion,
        number=st.integers(0, 2**64 - 1),
        is_done=st.booleans(),
        checksums=SUMS,
        failed=st.lists(st.integers(0, 2**32 - 1)).map(tuple),
        num_bytes=st.integers(0, 2**64 - 1),
        nanoseconds=st.integers(0, 2**64 - 1),
    )
)
def test_completions_arrive_as_they_were_sent(completion: Completion) -> None:
    """Encoding and decoding a completion changes nothing."""
    assert Completion.decode(completion.encode()) == completion


def test_pool_maps_arrive_as_they_were_sent() -> None:
    """Encoding and decoding what maps and unmaps pools changes nothing."""
    pool = PoolMap(pool=3, num_blocks=7, num_slots=0, bytes_per_slot=64, device_bytes=(448, 0))

    assert [PoolMap.decode(packet) for packet in pool.packets()] == [pool]
    assert decode_unmap(encode_unmap(3)) == 3


def test_pieces_arrive_in_as_many_packets_as_it_takes() -> None:
    """Pieces above a packet's limit follow in further packets, in their order, each within the limit."""
    pieces = tuple(
        Piece(
            rank=number % 2,
            offset_bytes=number << 40,
            block_stride_bytes=64,
            num_bytes=32,
            slot_offset_bytes=number * 32,
        )
        for number in range(PIECES_A_PACKET_MAX + 1)
    )
    pool = PoolMap(
        pool=3, num_blocks=7, num_slots=0, bytes_per_slot=64, device_bytes=(448,), pieces=pieces
    )

    first, *rest = pool.packets()
    arrived = [decode_pieces(packet) for packet in rest]

    assert PoolMap.decode(first).pieces == ()
    assert [number for number, _ in arrived] == [3, 3]
    assert arrived[0][1] + arrived[1][1] == pieces
    assert max(map(len, rest)) <= PACKET_BYTES_MAX


def test_largest_packets_fit() -> None:
    """The largest batch and the largest completion fit into the buffer that receives a packet."""
    ids, sums = bytes(4 * COPIES_A_BATCH_MAX), bytes(8 * COPIES_A_BATCH_MAX)
    batch = Batch(
        number=1, pool=1, direction=Direction.RELOAD, with_checksums=True,
        source_ids=ids, target_ids=ids, checksums=sums,
    )  # fmt: skip
    failed = tuple(range(COPIES_A_BATCH_MAX))
    completion = Completion(number=1, is_done=True, checksums=sums, failed=failed)

    assert max(len(batch.encode()), len(completion.encode())) <= PACKET_BYTES_MAX
