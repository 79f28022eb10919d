"""Packets say the same at both ends."""

from hypothesis import given
from hypothesis import strategies as st

from kvleased.core.effects import Direction
from kvleased.movers.protocol import (
    COPIES_A_BATCH_MAX,
    PACKET_BYTES_MAX,
    Batch,
    Completion,
    PoolMap,
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
    pool = PoolMap(pool=3, bytes_per_block=64, num_blocks=7, num_slots=0)

    assert PoolMap.decode(pool.encode()) == pool
    assert decode_unmap(encode_unmap(3)) == 3


def test_largest_packets_fit() -> None:
    """The largest batch and the largest completion are within what is received in one piece."""
    ids, sums = bytes(4 * COPIES_A_BATCH_MAX), bytes(8 * COPIES_A_BATCH_MAX)
    batch = Batch(
        number=1, pool=1, direction=Direction.RELOAD, with_checksums=True,
        source_ids=ids, target_ids=ids, checksums=sums,
    )  # fmt: skip
    failed = tuple(range(COPIES_A_BATCH_MAX))
    completion = Completion(number=1, is_done=True, checksums=sums, failed=failed)

    assert max(len(batch.encode()), len(completion.encode())) <= PACKET_BYTES_MAX
