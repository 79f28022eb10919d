"""Laws of waste: with the content it adds up to the whole budget, and each cause has its own numbers."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import KVLeaseError
from kvlease.layout import Layout
from kvlease.plan import CachePlan, ParallelInputs, PlanInputs, RankInputs
from kvlease.spec import FullAttention, LayerSpec, SlidingWindow, StateSpace
from kvleased.planning import plan

FULL = FullAttention(name="f", num_kv_heads=2, head_size=8, dtype="float16")
"""Pages of 1024 bytes in blocks of 16 tokens."""
WINDOW = SlidingWindow(name="w", num_kv_heads=2, head_size=8, dtype="float16", window_tokens=64)
STATE = StateSpace(name="s", shapes=((100,),), dtypes=("float32",))
"""A page of 400 bytes."""
LAYERS = st.lists(st.sampled_from([FULL, WINDOW, STATE]), min_size=1, max_size=9).map(
    lambda specs: tuple(
        dataclasses.replace(spec, name=str(index)) for index, spec in enumerate(specs)
    )
)


def planned(*layers: LayerSpec, **changes: object) -> CachePlan:
    """Return a plan of 100 KiB."""
    fields = {"layers": layers, "tokens_per_block": 16, "device_bytes": 102400} | changes
    return plan(PlanInputs(**fields))  # type: ignore[arg-type]  # fields of several types


def wasted(made: CachePlan, tier: str = "device") -> dict[str, int]:
    """Return the wasted bytes of each cause."""
    return {waste.cause: waste.num_bytes for waste in made.waste if waste.tier == tier}


@given(LAYERS, st.sampled_from(Layout), st.integers(10_000, 10**6), st.integers(0, 2))
def test_content_and_waste_are_the_whole_budget(
    layers: tuple[LayerSpec, ...], layout: Layout, device_bytes: int, null_blocks: int
) -> None:
    """Content and waste add up to the budget, with no byte counted twice; blocks are those of the longest request."""
    try:
        made = planned(
            *layers, layout=layout.value, device_bytes=device_bytes, null_blocks=null_blocks
        )
    except KVLeaseError:
        return
    content = sum(
        group.blocks_per_longest_request
        * sum(layer.spec.content_bytes_per_page for layer in made.layers if layer.group == index)
        for index, group in enumerate(made.groups)
    )
    content = made.usable_blocks * content // made.blocks_per_longest_request

    # Every cause is rounded down, so up to one byte of each may be missing.
    assert -1 <= device_bytes - content - sum(wasted(made).values()) <= len(made.waste)
    assert all(waste.num_bytes > 0 for waste in made.waste)


@pytest.mark.parametrize(
    ("layers", "changes", "expected"),
    [
        pytest.param((FULL,), {}, {}, id="nothing"),
        pytest.param((FULL,), {"null_blocks": 2}, {"null_blocks": 2048}, id="null blocks"),
        pytest.param((FULL,), {"device_bytes": 2100}, {"unfilled_budget": 52}, id="budget"),
        pytest.param(
            (FULL,), {"device_blocks": 60}, {"unfilled_budget": 40 * 1024}, id="blocks given"
        ),
        pytest.param(
            (dataclasses.replace(FULL, bytes_per_page_padded=2048),),
            {},
            {"page_padding": 50 * 1024},
            id="page padded as asked",
        ),
        pytest.param(
            (dataclasses.replace(FULL, block_stride_multiple_bytes=2048),),
            {"layout": "LBHNC"},
            {"page_padding": 50 * 1024},
            id="stride as asked",
        ),
        pytest.param(
            (dataclasses.replace(FULL, block_stride_multiple_bytes=2048),),
            {},
            {"block_padding": 50 * 1024},
            id="block rounded up",
        ),
        pytest.param(
            (FULL, STATE),
            {"layout": "LBHNC", "longest_request_tokens": 16},
            {"page_unification": 50 * 624},
            id="state padded to the page",
        ),
        pytest.param(
            (FULL, STATE),
            {"longest_request_tokens": 16},
            {"uneven_groups": 50 * 624},
            id="state in a wider block",
        ),
    ],
)
def test_each_cause_has_its_bytes(
    layers: tuple[LayerSpec, ...], changes: dict[str, object], expected: dict[str, int]
) -> None:
    """Each cause has the bytes that it wastes."""
    assert wasted(planned(*layers, **changes)) == expected


def test_ranks_with_room_for_more_blocks_waste_it() -> None:
    """Blocks that a rank has beyond the fewest count as waste of the minimum, and the rest as unfilled budget."""
    ranks = (RankInputs(device_bytes=5000), RankInputs(device_bytes=2048))

    made = planned(FULL, ranks=ranks)

    assert wasted(made) == {"rank_minimum": 2048, "unfilled_budget": 5000 - 4096}
    assert "could have 2 more" in made.waste[0].why


def test_rank_that_keeps_nothing_wastes_its_budget() -> None:
    """The budget of a rank without layers is all waste."""
    ranks = (RankInputs(), RankInputs(keeps_nothing=True, device_bytes=77))

    assert wasted(planned(FULL, ranks=ranks)) == {"unfilled_budget": 77}


def test_host_wastes_padding_of_slots_and_what_is_no_slot() -> None:
    """The host's waste is the padding of slots and the rest of its budget."""
    made = planned(FULL, host_bytes=10_000, slot_multiple_bytes=1500)

    assert wasted(made, "host") == {"slot_padding": 6 * 476, "unfilled_budget": 1000}


def test_waste_is_over_all_ranks_and_says_why() -> None:
    """Bytes are summed over all ranks, and each cause has a sentence with its numbers."""
    made = planned(FULL, null_blocks=1, parallel=ParallelInputs(tensor_ranks=2))

    assert wasted(made) == {"null_blocks": 2048}
    assert made.waste[0].why == "1 of 100 blocks are never granted; each takes 2048 bytes"


def test_no_tier_wastes_nothing() -> None:
    """Without a host tier the host wastes nothing."""
    assert wasted(planned(FULL), "host") == {}
