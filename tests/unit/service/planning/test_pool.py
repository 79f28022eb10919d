"""Laws of the pool: where pages lie in each layout, what a block consists of, and what no layout can hold."""

import dataclasses
from collections.abc import Sequence

import pytest

from kvlease.errors import InvalidError
from kvlease.layout import Layout
from kvlease.plan import Extent, TensorPlan
from kvlease.spec import FullAttention, LayerSpec, StateSpace
from kvleased.planning.groups.grouping import Group
from kvleased.planning.pool import (
    Places,
    bytes_in_block,
    bytes_per_block,
    check_blocks_apart,
    check_layout,
    place,
)

FULL = FullAttention(name="", tokens_per_block=4, num_kv_heads=2, head_size=8, dtype="float16")
"""Pages of 2 heads * 4 tokens * 32 bytes = 256 bytes."""
BYTES = FullAttention(
    name="", tokens_per_block=1, num_kv_heads=1, head_size=3, head_size_v=0, dtype="uint8"
)
"""Pages of 3 bytes."""


def group(spec: LayerSpec, *names: str, also: tuple[LayerSpec, ...] = ()) -> Group:
    """Return a group of equal layers, and of others after them."""
    layers = tuple(dataclasses.replace(spec, name=name) for name in names)
    return Group(layers=(*layers, *also))


def placed(*groups: Group, layout: str, num_blocks: int = 10, multiple: int = 1) -> Places:
    """Return the places in a pool of ten blocks."""
    return place(
        groups, layout=Layout(layout), num_blocks=num_blocks, block_multiple_bytes=multiple
    )


@pytest.mark.parametrize(
    ("layout", "strides"),
    [
        # offset of "b", block stride, head stride, state stride
        pytest.param("BLHNC", (256, 512, 128, 32), id="BLHNC"),
        pytest.param("BLNHC", (256, 512, 32, 64), id="BLNHC"),
        pytest.param("BHLNC", (128, 512, 256, 32), id="BHLNC"),
        pytest.param("LBHNC", (2560, 256, 128, 32), id="LBHNC"),
        pytest.param("LBNHC", (2560, 256, 32, 64), id="LBNHC"),
        pytest.param("LHBNC", (2560, 128, 1280, 32), id="LHBNC"),
    ],
)
def test_layout_orders_the_strides(layout: str, strides: tuple[int, ...]) -> None:
    """An axis further out has the larger stride, and a run of layers is spaced as its tensor says."""
    layers, tensors, _ = placed(group(FULL, "a", "b"), layout=layout)

    _, b = layers
    found = (b.offset_bytes, b.block_stride_bytes, b.head_stride_bytes, b.state_stride_bytes)
    assert found == strides
    assert tensors == (
        TensorPlan(
            group=0,
            layer_names=("a", "b"),
            offset_bytes=0,
            layer_stride_bytes=strides[0],
            block_stride_bytes=strides[1],
        ),
    )


@pytest.mark.parametrize("layout", [layout for layout in Layout if layout.is_block_outermost])
def test_block_is_one_piece_where_blocks_are_outermost(layout: Layout) -> None:
    """With blocks outermost, a block with its padding is one piece."""
    groups = (group(FULL, "a", "b", "c"), group(FULL, "d"))

    assert bytes_per_block(groups, layout, 512) == 1024
    assert placed(*groups, layout=layout, multiple=512)[2] == (
        Extent(offset_bytes=0, block_stride_bytes=1024, num_bytes=1024, slot_offset_bytes=0),
    )


def test_block_has_a_piece_for_every_layer_where_layers_are_outermost() -> None:
    """With layers outermost, layers of all groups lie over those of the widest, and no piece counts twice."""
    groups = (group(FULL, "a", "b"), group(FULL, "c"))

    layers, _, extents = placed(*groups, layout="LBHNC", multiple=512)

    assert [layer.offset_bytes for layer in layers] == [0, 2560, 0]
    assert [(e.offset_bytes, e.num_bytes, e.slot_offset_bytes) for e in extents] == [
        (0, 256, 0),
        (2560, 256, 256),
    ]
    assert bytes_per_block(groups, Layout.LBHNC, 512) == 512


def test_block_has_a_piece_for_every_head_where_heads_are_outside_of_blocks() -> None:
    """With heads outside of blocks, each head of each layer has its own stretch of all blocks."""
    _, _, extents = placed(group(FULL, "a", "b"), layout="LHBNC")

    assert [(e.offset_bytes, e.num_bytes) for e in extents] == [
        (0, 128),
        (1280, 128),
        (2560, 128),
        (3840, 128),
    ]


def test_pieces_are_never_longer_than_their_stride() -> None:
    """In a pool of one block layers follow each other without a gap, and are still separate pieces."""
    _, _, extents = placed(group(FULL, "a", "b"), layout="LBHNC", num_blocks=1)

    assert [(e.offset_bytes, e.num_bytes) for e in extents] == [(0, 256), (256, 256)]


def test_empty_rank_has_blocks_of_nothing() -> None:
    """A rank without layers has blocks of no bytes and no piece."""
    nothing = group(FULL, "a").on(())

    for layout in Layout:
        assert bytes_per_block((nothing,), layout, 64) == 0
        assert placed(nothing, layout=layout) == ((), (), ())


@pytest.mark.parametrize(
    ("layout", "block_stride", "block"),
    [pytest.param("LBHNC", 300, 600, id="layers"), pytest.param("BLHNC", 600, 600, id="blocks")],
)
def test_blocks_lie_a_multiple_apart(layout: str, block_stride: int, block: int) -> None:
    """A layer's stride multiple spaces its own pages with layers outermost, and else whole blocks."""
    spaced = dataclasses.replace(FULL, block_stride_multiple_bytes=300)
    groups = (group(spaced, "a", "b"),)

    layers, _, extents = placed(*groups, layout=layout)

    assert {layer.block_stride_bytes for layer in layers} == {block_stride}
    assert sum(extent.num_bytes for extent in extents) == block
    assert bytes_per_block(groups, Layout(layout), 1) == block


def test_padded_blocks_need_pages_that_lie_together() -> None:
    """With heads outside of blocks there is no room between pages; the refusal has both sizes."""
    spaced = dataclasses.replace(FULL, block_stride_multiple_bytes=300)

    with pytest.raises(InvalidError) as refusal:
        placed(group(spaced, "a"), layout="LHBNC")

    assert refusal.value.rule == "layout_cannot_pad_pages"
    assert (refusal.value.need, refusal.value.available) == (300, 256)


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC"])
def test_elements_of_other_types_start_at_their_own_boundary(layout: str) -> None:
    """After pages of odd bytes, a layer of two-byte elements still starts at an even byte, in every block."""
    mixed = group(BYTES, "a", also=(dataclasses.replace(FULL, name="b", tokens_per_block=1),))

    layers, _, extents = placed(mixed, layout=layout, num_blocks=3)

    assert [layer.offset_bytes % 2 for layer in layers] == [0, 0]
    assert layers[1].block_stride_bytes % 2 == 0
    assert sum(extent.num_bytes for extent in extents) == bytes_per_block(
        (mixed,), Layout(layout), 1
    )


def test_states_start_at_the_boundary_of_their_widest_element() -> None:
    """A state is viewed as bytes, but starts at a boundary of its tensors' widest element."""
    state = StateSpace(name="s", tokens_per_block=1, shapes=((2,),), dtypes=("float32",))

    layers, _, _ = placed(group(BYTES, "a", also=(state,)), layout="BLHNC")

    assert layers[1].offset_bytes == 4


def test_group_takes_the_pages_of_its_layers() -> None:
    """A group takes the sum of its pages from a block, padded only with layers outermost."""
    spaced = group(dataclasses.replace(FULL, block_stride_multiple_bytes=300), "a", "b")

    assert bytes_in_block(spaced, Layout.BLHNC) == 512
    assert bytes_in_block(spaced, Layout.LBHNC) == 600


def check(groups: Sequence[Group], layout: Layout) -> None:
    """Check groups as the planner does."""
    check_layout(groups, layout)
    check_blocks_apart(groups, layout)


WIDE = dataclasses.replace(FULL, num_kv_heads=4)
FEW_WIDE_HEADS = dataclasses.replace(FULL, num_kv_heads=1, head_size=16)


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        pytest.param("BHLNC", (group(FULL, "a"), group(WIDE, "b")), id="pages taken apart"),
        pytest.param("BHLNC", (group(FULL, "a", also=(WIDE,)),), id="taken apart in one group"),
        pytest.param("LHBNC", (group(FULL, "a", also=(WIDE,)),), id="heads outside"),
        pytest.param("LBHNC", (group(FULL, "a"), group(WIDE, "b")), id="groups of two pages"),
        pytest.param(
            "LBHNC",
            (
                group(FULL, "a"),
                group(dataclasses.replace(FULL, block_stride_multiple_bytes=512), "b"),
            ),
            id="groups of two strides",
        ),
    ],
)
def test_pages_that_would_not_cover_the_same_bytes_are_refused(
    layout: str, groups: tuple[Group, ...]
) -> None:
    """Equal blocks of two groups must cover the same bytes; the refusal names a layout in which they do."""
    with pytest.raises(InvalidError, match="BLHNC") as refusal:
        check(groups, Layout(layout))

    assert refusal.value.rule == "layout_cannot_express_mixed_pages"
    check(groups, Layout.BLHNC)


def test_groups_of_different_heads_are_not_taken_apart() -> None:
    """If heads lie apart, equal pages of 1 and 2 heads cover different bytes, and the layout is refused."""
    groups = (group(FULL, "a"), group(FEW_WIDE_HEADS, "b"))

    with pytest.raises(InvalidError) as refusal:
        check_blocks_apart(groups, Layout.LHBNC)

    assert refusal.value.rule == "layout_cannot_express_mixed_pages"
    for layout in ("LBHNC", "BHLNC", "BLHNC"):
        check_layout(groups, Layout(layout))
        check_blocks_apart(groups, Layout(layout))
        placed(*groups, layout=layout)


def test_groups_of_equal_heads_share_their_places() -> None:
    """With heads outside of blocks, layers of two groups with equal heads lie over each other."""
    layers, _, extents = placed(group(FULL, "a"), group(FULL, "b"), layout="LHBNC")

    assert layers[0].offset_bytes == layers[1].offset_bytes == 0
    assert [extent.offset_bytes for extent in extents] == [0, 1280]


def test_block_of_too_many_pieces_is_refused() -> None:
    """A block with a piece for each of very many heads is refused, and the refusal names another layout."""
    many = dataclasses.replace(FULL, num_kv_heads=2**15)

    check_blocks_apart((group(many, "a", "b"),), Layout.LHBNC)
    with pytest.raises(InvalidError, match="BLHNC") as refusal:
        check_blocks_apart((group(many, "a", "b", "c"),), Layout.LHBNC)

    assert (refusal.value.rule, refusal.value.need) == ("too_many_pieces", 3 * 2**15)


def test_block_ends_at_an_element_of_every_group() -> None:
    """After one group's block of odd bytes, the next block still starts at an even byte for another's elements."""
    groups = (group(BYTES, "a", "b", "c"), group(dataclasses.replace(BYTES, dtype="float16"), "d"))

    assert bytes_per_block(groups, Layout.BLHNC, 1) == 10


def test_one_group_of_two_pages_needs_no_equal_pages() -> None:
    """Layers of one group never lie over each other, so their pages may differ if they lie together."""
    mixed = group(FULL, "a", also=(dataclasses.replace(WIDE, name="b"),))

    check_layout((mixed,), Layout.LBHNC)
    layers, _, extents = placed(mixed, layout="LBHNC")

    assert [(layer.offset_bytes, layer.block_stride_bytes) for layer in layers] == [
        (0, 256),
        (2560, 512),
    ]
    assert [extent.slot_offset_bytes for extent in extents] == [0, 256]
