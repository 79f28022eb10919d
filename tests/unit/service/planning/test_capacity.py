"""Laws of capacity: need grows with the request, and a request is admitted exactly if it fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import NeverFitsError
from kvlease.spec import CrossAttention, FullAttention, LayerSpec, SlidingWindow, StateSpace
from kvleased.planning.capacity import (
    Capacity,
    RankMemory,
    fewest_blocks,
    group_blocks,
    group_table_blocks,
)
from kvleased.planning.demand import Demand

FULL = FullAttention(name="full", tokens_per_block=16, num_kv_heads=2, head_size=8, dtype="float16")
WINDOW = SlidingWindow(
    name="window",
    tokens_per_block=16,
    num_kv_heads=2,
    head_size=8,
    dtype="float16",
    window_tokens=64,
)
STATE = StateSpace(name="state", tokens_per_block=16, shapes=((1,),), dtypes=("float32",))
CROSS = CrossAttention(name="cross", tokens_per_block=16, num_kv_heads=1, head_size=8, dtype="int8")
GROUPS = st.lists(st.sampled_from([FULL, WINDOW, STATE, CROSS]), min_size=1, max_size=4)


def memory(num_blocks: int, *, rank: int = 0, extra_bytes: int = 0) -> RankMemory:
    """Return memory for so many blocks of 1024 bytes."""
    return RankMemory(rank=rank, bytes_per_block=1024, device_bytes=num_blocks * 1024 + extra_bytes)


def capacity(*specs: LayerSpec, num_blocks: int, null_blocks: int = 0) -> Capacity:
    """Return the capacity of a pool with one group for each spec."""
    return Capacity(
        specs_by_group=tuple((spec,) for spec in specs),
        demand=Demand(num_tokens=0, in_flight_tokens=32, encoder_tokens=100),
        memory=memory(num_blocks),
        null_blocks=null_blocks,
    )


@given(GROUPS, st.integers(0, 300), st.integers(1, 2000))
def test_largest_request_fits_and_one_token_more_does_not(
    specs: list[LayerSpec], num_blocks: int, most: int
) -> None:
    """The largest request is the last one with blocks enough, up to the limit that is asked for."""
    pool = capacity(*specs, num_blocks=num_blocks)

    largest = pool.largest_request_tokens(most)

    assert 0 <= largest <= most
    if largest:
        assert pool.check_request(largest) <= pool.usable_blocks
    if largest < most:
        with pytest.raises(NeverFitsError) as refusal:
            pool.check_request(largest + 1)
        assert refusal.value.limit == largest


@given(GROUPS, st.integers(1, 5000), st.integers(0, 100))
def test_longer_request_never_takes_fewer_blocks(
    specs: list[LayerSpec], num_tokens: int, more_tokens: int
) -> None:
    """Need never falls with the request's length, as the search for the largest request relies on."""
    pool = capacity(*specs, num_blocks=0)

    assert pool.request_blocks(num_tokens) <= pool.request_blocks(num_tokens + more_tokens)


def test_refused_request_names_what_it_needs() -> None:
    """The refusal has the blocks needed and available, and names the rank, the hungriest group and the bytes."""
    with pytest.raises(NeverFitsError) as refusal:
        capacity(STATE, FULL, num_blocks=5, null_blocks=1).check_request(100)

    assert refusal.value.rule == "not_enough_memory"
    assert (refusal.value.need, refusal.value.available, refusal.value.limit) == (8, 4, 48)
    for part in ("rank 0", "group 1 (full_attention", "8192 bytes", "48 tokens"):
        assert part in refusal.value.message


def test_refusal_names_no_request_of_0_tokens_as_the_largest() -> None:
    """If not one token fits, the refusal says so: a longest request of 0 would mean as long as possible."""
    with pytest.raises(
        NeverFitsError, match="no request fits: even one token needs 2 blocks"
    ) as refusal:
        capacity(STATE, FULL, num_blocks=1).check_request(100)

    assert refusal.value.rule == "not_enough_memory"
    assert "0 tokens" not in refusal.value.message.replace("100 tokens", "")
    assert refusal.value.limit == 0


def test_request_is_shortened_to_what_fits() -> None:
    """A request that fits is kept as asked, and else shortened to the longest that does."""
    pool = capacity(FULL, num_blocks=4)

    assert pool.fit_request(50) == 50
    assert pool.fit_request(500) == 64


def test_nothing_that_fits_is_refused() -> None:
    """If not one token fits, the refusal has the blocks of one token."""
    with pytest.raises(NeverFitsError) as refusal:
        capacity(FULL, STATE, num_blocks=1).fit_request(500)

    assert refusal.value.rule == "auto_fit_failed"
    assert (refusal.value.need, refusal.value.available, refusal.value.limit) == (2, 1, 0)


@pytest.mark.parametrize(
    ("num_blocks", "null_blocks", "extra_bytes"),
    [
        pytest.param(0, 0, 0, id="nothing"),
        pytest.param(0, 0, 1023, id="less than a block"),
        pytest.param(1, 1, 0, id="only the null block"),
        pytest.param(1, 2, 1, id="fewer than the null blocks"),
    ],
)
def test_memory_without_a_block_to_grant_is_refused(
    num_blocks: int, null_blocks: int, extra_bytes: int
) -> None:
    """Memory for no more than the blocks that are never granted is refused."""
    pool = Capacity(
        specs_by_group=((FULL,),),
        demand=Demand(num_tokens=0),
        memory=memory(num_blocks, extra_bytes=extra_bytes),
        null_blocks=null_blocks,
    )

    assert pool.usable_blocks == 0
    with pytest.raises(NeverFitsError) as refusal:
        pool.check_memory()
    assert refusal.value.rule == "no_available_memory"
    assert refusal.value.need == (null_blocks + 1) * 1024


def test_memory_with_a_block_to_grant_is_taken() -> None:
    """One block more than those never granted is enough."""
    capacity(FULL, num_blocks=2, null_blocks=1).check_memory()


def test_group_takes_what_its_hungriest_layer_takes() -> None:
    """A group takes as many blocks as its layer that takes the most."""
    demand = Demand(num_tokens=1000, in_flight_tokens=0)

    assert group_blocks((WINDOW, FULL), demand) == group_blocks((FULL,), demand) == 63


def test_table_row_is_as_long_as_the_encoders_input() -> None:
    """A row for cross attention has the encoder's tokens, even if requests are shorter."""
    demand = Demand(num_tokens=16, encoder_tokens=100)

    assert group_table_blocks((CROSS,), demand) == 7
    assert group_table_blocks((FULL,), Demand(num_tokens=160)) == 10


def test_rank_with_the_fewest_blocks_decides() -> None:
    """Of ranks with equally many blocks, the one with no byte left over decides, then the first."""
    exact = memory(3, rank=2)

    assert fewest_blocks([memory(4), memory(3, rank=1, extra_bytes=5), exact]) is exact
    assert fewest_blocks([memory(3), exact]).rank == 0
