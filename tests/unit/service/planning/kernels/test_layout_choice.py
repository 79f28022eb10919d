"""Laws of the choice of a layout: all backends of all ranks read it, and it can hold the layers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError
from kvlease.layout import Layout
from kvlease.spec import FullAttention, RingState, SlidingWindow
from kvleased.planning.kernels.layout_choice import (
    LAYOUTS_BY_DEFAULT,
    choose_layout,
    common_layouts,
)

DECLARED = st.none() | st.lists(st.sampled_from(Layout), min_size=1, unique=True)


def full(**fields: Any) -> FullAttention:
    """Return a plain layer."""
    given = {"num_kv_heads": 8, "head_size": 64, **fields}
    return FullAttention(name="full", dtype="bfloat16", tokens_per_block=16, **given)


def window(**fields: Any) -> SlidingWindow:
    """Return a layer with a window."""
    given = {"num_kv_heads": 4, "head_size": 64, **fields}
    return SlidingWindow(
        name="window", dtype="bfloat16", tokens_per_block=16, window_tokens=64, **given
    )


@given(st.lists(DECLARED, max_size=4))
def test_candidates_are_read_by_all_backends(declared: list[list[Layout] | None]) -> None:
    """A layout is a candidate if every backend that declares layouts reads it."""
    said = [set(layouts) for layouts in declared if layouts is not None]
    shared = set.intersection(*said) if said else set(Layout)
    if not shared:
        with pytest.raises(InvalidError) as refusal:
            common_layouts(declared)
        assert refusal.value.rule == "no_common_layout"
        return

    candidates = common_layouts(declared)

    assert set(candidates) == shared
    assert len(candidates) == len(shared)


def test_backends_of_one_mind_decide_the_order() -> None:
    """Equal declarations keep their order; backends without a declaration do not count."""
    wish = [Layout.LHBNC, Layout.LBHNC]

    assert common_layouts([wish, None, wish]) == tuple(wish)
    assert common_layouts([None, None]) == LAYOUTS_BY_DEFAULT


def test_what_most_backends_put_first_goes_first() -> None:
    """Backends that differ vote; if votes are equal, layers outermost come before blocks."""
    declared = [
        [Layout.LBHNC, Layout.LBNHC],
        [Layout.LBNHC, Layout.LBHNC],
        [Layout.LBNHC, Layout.LBHNC, Layout.BLHNC],
    ]

    assert common_layouts(declared) == (Layout.LBNHC, Layout.LBHNC)
    assert common_layouts(declared[:2]) == (Layout.LBHNC, Layout.LBNHC)


def test_backend_that_reads_no_layout_is_refused() -> None:
    """An empty declaration of layouts leaves no candidate."""
    with pytest.raises(InvalidError, match="none"):
        common_layouts([[]])


@pytest.mark.parametrize(
    ("requested", "preferred", "layout"),
    [
        pytest.param("", "", Layout.LBNHC, id="the first"),
        pytest.param("HND", "", Layout.LBHNC, id="requested"),
        pytest.param("", "HND", Layout.LBHNC, id="preferred"),
        pytest.param("BLHNC", "HND", Layout.BLHNC, id="a request beats a preference"),
    ],
)
def test_request_goes_before_preference_and_that_before_order(
    requested: str, preferred: str, layout: Layout
) -> None:
    """A request goes before a preference, and that before the candidates' order."""
    choice = choose_layout([full()], [None], requested=requested, preferred=preferred)

    assert choice.layout == layout
    assert choice.candidates == LAYOUTS_BY_DEFAULT


def test_preference_gives_way_and_request_is_refused() -> None:
    """A preferred layout that no backend reads is dropped; a requested one is refused."""
    reads = [[Layout.LBNHC]]

    assert choose_layout([full()], reads, preferred="BLHNC").layout == Layout.LBNHC
    with pytest.raises(InvalidError, match=r"BLHNC .* LBNHC") as refusal:
        choose_layout([full()], reads, requested="BLHNC")
    assert refusal.value.rule == "layout_not_a_candidate"


@pytest.mark.parametrize("where", ["requested", "preferred"])
def test_unknown_layout_is_refused(where: str) -> None:
    """An unknown layout is refused, even as a preference."""
    with pytest.raises(InvalidError) as refusal:
        choose_layout([full()], [None], **{where: "XYZ"})

    assert refusal.value.rule == "unknown_layout"


def test_layers_of_different_shape_need_whole_pages() -> None:
    """Layouts that take pages apart hold layers of one shape only, even if pages have equal bytes."""
    reads = [[Layout.LHBNC, Layout.LBHNC]]
    same_page = full(num_kv_heads=4, head_size=128)

    assert choose_layout([full(), full()], reads).layout == Layout.LHBNC
    assert choose_layout([full(), same_page], reads).layout == Layout.LBHNC
    with pytest.raises(InvalidError) as refusal:
        choose_layout([full(), window()], [[Layout.LHBNC]])
    assert refusal.value.rule == "layout_needs_block_compact"


def test_layers_that_only_some_ranks_split_need_blocks_outermost() -> None:
    """Layers that only some ranks split need blocks outermost; candidates are shown from before that rule."""
    layers = [full(), window(is_context_sharded=False)]

    choice = choose_layout(layers, [None])

    assert (choice.layout, choice.candidates) == (Layout.BLNHC, LAYOUTS_BY_DEFAULT)
    with pytest.raises(InvalidError) as refusal:
        choose_layout(layers, [[Layout.LBHNC]])
    assert refusal.value.rule == "layout_needs_block_outermost"


def test_layers_that_do_not_differ_in_page_or_have_no_slots_are_free() -> None:
    """Equal pages, and rings, which have no slots, do not need blocks outermost."""
    equal = window(num_kv_heads=8, is_context_sharded=False)
    ring = RingState(
        name="ring",
        num_kv_heads=1,
        head_size=4,
        dtype="float32",
        tokens_per_block=8,
        is_context_sharded=False,
    )

    assert choose_layout([full(), equal], [None]).layout == Layout.LBNHC
    assert choose_layout([full(), ring], [None]).layout == Layout.LBNHC


def test_ranks_must_have_the_same_candidates() -> None:
    """Ranks with other candidates, or with the same in another order, are refused."""
    for others in ([Layout.LBHNC], [*reversed(LAYOUTS_BY_DEFAULT)]):
        with pytest.raises(InvalidError) as refusal:
            choose_layout([full()], [None], of_other_ranks=[LAYOUTS_BY_DEFAULT, others])
        assert refusal.value.rule == "workers_disagree_on_layout"

    assert choose_layout([], [None], of_other_ranks=[LAYOUTS_BY_DEFAULT]).layout == Layout.LBNHC
