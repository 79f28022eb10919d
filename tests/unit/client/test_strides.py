"""Laws of strides: bytes lie in the order of the axes, disjoint and in bounds, and blocks are split by states."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.errors import InvalidError
from kvlease.geometry import page_end_bytes
from kvlease.kernel_split import kernel_blocks_per_block, states_per_kernel_block
from kvlease.layout import Layout
from kvlease.plan import LayerPlacement
from kvlease.spec import MLA, FullAttention, LayerSpec, StateSpace
from kvlease.strides import (
    check_disjoint,
    packed_view_of,
    page_strides,
    state_views,
    view_of,
)
from tests.unit.client.placing import placed

LAYOUTS = st.sampled_from(Layout)


def full(tokens: int = 16, heads: int = 2, head_size: int = 4, **fields: int) -> FullAttention:
    """Return a plain layer of bfloat16."""
    return FullAttention(
        name="full",
        num_kv_heads=heads,
        head_size=head_size,
        dtype="bfloat16",
        tokens_per_block=tokens,
        **fields,
    )


def compressed(tokens: int = 256, per_state: int = 128, padded: bool = True) -> MLA:
    """Return a compressed layer as in DeepSeek V4: 584 bytes a state, pages of multiples of 576 bytes."""
    return MLA(
        name="c",
        head_size=512,
        dtype="uint8",
        bytes_per_state_packed=584,
        tokens_per_state=per_state,
        tokens_per_block=tokens,
        page_multiple_bytes=576 if padded else None,
    )


def recurrent(**fields: int) -> StateSpace:
    """Return a layer whose state is two tensors of different types."""
    return StateSpace(
        name="state",
        shapes=((3, 8), (2, 4, 5)),
        dtypes=("bfloat16", "float32"),
        tokens_per_block=32,
        **fields,
    )


def alone(spec: LayerSpec, num_blocks: int, layout: Layout = Layout.LBHNC) -> LayerPlacement:
    """Return the place of a layer that has a region to itself."""
    return placed(spec, layout=layout, num_blocks=num_blocks)[0][0]


def refused(rule: str, act: Callable[[], object]) -> InvalidError:
    """Return the refusal of an act, and check its rule."""
    with pytest.raises(InvalidError) as refusal:
        act()
    assert refusal.value.rule == rule
    return refusal.value


@given(
    LAYOUTS, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.sampled_from([None, 4, 8])
)
def test_strides_without_padding_fill_memory_in_the_axes_order(
    layout: Layout, num_layers: int, num_blocks: int, heads: int, kernel_tokens: int | None
) -> None:
    """Each axis's stride is the size of all axes inside it: the run has no gap and no overlap."""
    strides = page_strides(
        full(8, heads),
        num_layers=num_layers,
        num_blocks=num_blocks,
        layout=layout,
        kernel_tokens=kernel_tokens,
    )

    sizes = dict(
        zip("LBHNC", zip(strides.extents, strides.strides_bytes, strict=True), strict=True)
    )
    inside = 1
    for axis in reversed(layout):
        extent, stride_bytes = sizes[axis]
        assert stride_bytes == inside
        inside *= extent
    assert inside == num_layers * num_blocks * full(8, heads).bytes_per_page


def test_strides_have_names() -> None:
    """The strides of layers, blocks, heads and states are read by name."""
    strides = page_strides(full(), num_layers=3, num_blocks=4, layout=Layout.LBNHC)

    assert strides.extents == (3, 4, 2, 16, 16)
    assert (strides.layer_stride_bytes, strides.block_stride_bytes) == (2048, 512)
    assert (strides.head_stride_bytes, strides.state_stride_bytes) == (16, 32)


def test_fixed_stride_takes_the_place_of_the_computed_one() -> None:
    """Axes outside one with a fixed stride start from that stride."""
    strides = page_strides(
        full(), num_layers=3, num_blocks=4, layout=Layout.LBHNC, fixed={"B": 9000}
    )

    assert strides.strides_bytes == (36_000, 9000, 256, 16, 1)


@pytest.mark.parametrize("layout", [Layout.LBHNC, Layout.LBNHC, Layout.BLHNC, Layout.BLNHC])
def test_padded_page_takes_its_padding_at_the_inner_of_layers_and_blocks(layout: Layout) -> None:
    """Pages are bytes_per_page apart, whether the layer or the block is further in."""
    strides = page_strides(
        full(bytes_per_page_padded=1000), num_layers=3, num_blocks=4, layout=layout
    )

    assert min(strides.layer_stride_bytes, strides.block_stride_bytes) == 1000
    assert max(strides.layer_stride_bytes, strides.block_stride_bytes) in (3000, 4000)


@pytest.mark.parametrize("layout", [Layout.LHBNC, Layout.BHLNC])
def test_padded_page_of_several_heads_needs_a_layout_that_keeps_pages_whole(
    layout: Layout,
) -> None:
    """A layout that separates the heads of a page has no place for its padding, unless there is only one head."""
    many, one = full(bytes_per_page_padded=1000), full(heads=1, bytes_per_page_padded=1000)

    refusal = refused(
        "padded_page_non_compact_layout",
        lambda: page_strides(many, num_layers=2, num_blocks=4, layout=layout),
    )

    assert (refusal.need, refusal.limit) == (2, 1)
    assert page_strides(one, num_layers=2, num_blocks=4, layout=layout)


def test_padded_page_is_not_split() -> None:
    """Kernel blocks of a padded page would not be equally far apart; the refusal says which block size to take."""
    spec = full(128, bytes_per_page_padded=40_000)

    refusal = refused(
        "padded_page_split",
        lambda: page_strides(
            spec, num_layers=2, num_blocks=4, layout=Layout.LBHNC, kernel_tokens=64
        ),
    )

    assert "128 tokens" in refusal.message


def test_padded_page_is_not_spread_by_fixed_strides() -> None:
    """A page that fixed strides widen must span whole pages."""
    spec = full(bytes_per_page_padded=1000)

    def spread(head_stride: int) -> object:
        return page_strides(
            spec, num_layers=1, num_blocks=4, layout=Layout.LBHNC, fixed={"H": head_stride}
        )

    assert refused("padded_page_not_whole", lambda: spread(700)).need == 1400
    assert spread(1000)


@pytest.mark.parametrize("kernel_tokens", [32, 0, -16, 96])
def test_kernel_block_that_does_not_divide_is_refused(kernel_tokens: int) -> None:
    """A block of 48 tokens cannot be split into parts of 32, and both numbers are named."""
    refusal = refused(
        "kernel_block_does_not_divide", lambda: kernel_blocks_per_block(full(48), kernel_tokens)
    )

    assert (refusal.need, refusal.available) == (kernel_tokens, 48)


@pytest.mark.parametrize(
    ("kernel_tokens", "rule"),
    [
        pytest.param(64, "kernel_block_without_states", id="less than one state"),
        pytest.param(192, "kernel_block_splits_state", id="one and a half"),
    ],
)
def test_kernel_block_of_no_whole_states_is_refused(kernel_tokens: int, rule: str) -> None:
    """PR 43988: no view with 0 states, or with fewer states than a block has, is made silently."""
    spec = compressed(384, padded=False)

    refusal = refused(rule, lambda: states_per_kernel_block(spec, kernel_tokens))

    assert (refusal.need, refusal.available) == (128, kernel_tokens)
    assert "multiple of 128" in refusal.message


def test_kernel_block_counts_states_of_several_tokens_and_several_of_one_token() -> None:
    """A kernel block of k tokens has floor(k / tokens_per_state) or k * states_per_token states, or a recurrent one."""
    assert states_per_kernel_block(compressed(512), 256) == 2
    assert states_per_kernel_block(full(16, states_per_token=4), 8) == 32
    assert states_per_kernel_block(recurrent(), 32) == 1


@given(LAYOUTS, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=60)
def test_view_puts_every_state_on_bytes_of_its_own(
    layout: Layout, num_blocks: int, heads: int, tokens: int, num_layers: int
) -> None:
    """Over all layers of a group, no byte belongs to two states, and every byte is used."""
    specs = [full(tokens, heads) for _ in range(num_layers)]
    run = page_strides(specs[0], num_layers=num_layers, num_blocks=num_blocks, layout=layout)
    region_bytes = num_layers * num_blocks * specs[0].bytes_per_page
    seen = bytearray(region_bytes)
    for index in range(num_layers):
        place = dataclasses.replace(
            alone(specs[0], num_blocks),
            offset_bytes=index * run.layer_stride_bytes,
            block_stride_bytes=run.block_stride_bytes,
            head_stride_bytes=run.head_stride_bytes,
            state_stride_bytes=run.state_stride_bytes,
        )
        view = view_of(place, num_blocks=num_blocks, region_bytes=region_bytes)
        for at in itertools.product(*map(range, view.shape)):
            element = sum(map(int.__mul__, at, view.strides)) + view.storage_offset
            seen[2 * element] += 1

    assert seen == bytearray((1, 0) * (region_bytes // 2))


@pytest.mark.parametrize("layout", [Layout.LBHNC, Layout.LBNHC])
def test_kernel_block_is_a_part_of_its_blocks_page(layout: Layout) -> None:
    """PR 42766: of a block of 128 tokens, kernel blocks 2b and 2b + 1 are the halves of page b, byte by byte."""
    place = alone(full(128), 3, layout)

    split = view_of(place, num_blocks=3, region_bytes=3 * 4096, kernel_tokens=64)

    assert split.shape == (6, 2, 64, 8)
    for part, half in enumerate(range(0, 3 * 2048, 1024)):
        elements = {
            sum(map(int.__mul__, (part, *at), split.strides))
            for at in itertools.product(*map(range, split.shape[1:]))
        }
        assert elements == set(range(half, half + 1024))


def test_kernel_block_keeps_the_places_of_tokens_where_states_lie_outside_of_heads() -> None:
    """Token t of block b is token t mod 64 of kernel block 2b + floor(t / 64), at the same place."""
    place = alone(full(128), 3, Layout.LBNHC)
    whole = view_of(place, num_blocks=3, region_bytes=3 * 4096)
    split = view_of(place, num_blocks=3, region_bytes=3 * 4096, kernel_tokens=64)

    for block, head, token in itertools.product(range(3), range(2), (0, 63, 64, 127)):
        there = sum(map(int.__mul__, (block, head, token), whole.strides))
        part, inner = 2 * block + token // 64, token % 64
        assert sum(map(int.__mul__, (part, head, inner), split.strides)) == there


@pytest.mark.parametrize(
    ("specs", "layout"),
    [
        pytest.param([full(128), full(128)], Layout.BLHNC, id="packed"),
        pytest.param([full(128)], Layout.LHBNC, id="heads taken apart"),
        pytest.param([full(128, bytes_per_page_padded=40_000)], Layout.LBHNC, id="padded"),
    ],
)
def test_padded_or_packed_block_is_not_split(specs: list[FullAttention], layout: Layout) -> None:
    """Kernel blocks are equally far apart only if a block's bytes have no gaps."""
    places, region_bytes = placed(*specs, layout=layout)

    refusal = refused(
        "padded_or_packed_block_not_splittable",
        lambda: view_of(places[0], num_blocks=3, region_bytes=region_bytes, kernel_tokens=64),
    )

    assert (refusal.need, refusal.limit) == (places[0].block_stride_bytes, 4096)


def test_view_of_a_compressed_layer_is_bound_by_states() -> None:
    """PR 43988: 53,254,672 of 53,255,232 bytes are needed, and never 6,816,669,136."""
    spec = compressed()
    place = alone(spec, 30_819)

    view = view_of(place, num_blocks=30_819, region_bytes=53_255_232)
    blocks_by_tokens = 30_819 * 128
    refusal = refused(
        "storage_out_of_bounds",
        lambda: view_of(place, num_blocks=blocks_by_tokens, region_bytes=53_255_232),
    )

    assert view.shape == (30_819, 1, 2, 584)
    assert view.end_bytes == 53_254_672
    assert (refusal.need, refusal.available) == (6_816_669_136, 53_255_232)


@given(LAYOUTS, st.integers(1, 5), st.integers(1, 3))
def test_view_needs_no_byte_less_than_its_end(layout: Layout, num_blocks: int, heads: int) -> None:
    """A region of exactly end_bytes is enough, and a region of one byte less is refused."""
    place = alone(full(heads=heads), num_blocks, layout)
    need = view_of(place, num_blocks=num_blocks, region_bytes=2**40).end_bytes

    assert view_of(place, num_blocks=num_blocks, region_bytes=need).end_bytes == need
    refused(
        "storage_out_of_bounds",
        lambda: view_of(place, num_blocks=num_blocks, region_bytes=need - 1),
    )


def test_view_ends_where_the_last_page_does() -> None:
    """Where pages are whole, strides and pages give the same end of the needed bytes."""
    place = alone(full(), 7)

    assert view_of(place, num_blocks=7, region_bytes=7 * 512).end_bytes == page_end_bytes(
        num_blocks=7, bytes_per_block=512, offset_bytes=0, page_bytes=512
    )


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        pytest.param({"offset_bytes": 3}, "view_off_element_boundary", id="odd offset"),
        pytest.param({"block_stride_bytes": 1001}, "view_off_element_boundary", id="odd stride"),
        pytest.param({"bytes_per_page": 64}, "page_below_content", id="short page"),
        pytest.param({"block_stride_bytes": 400}, "blocks_overlap", id="blocks too close"),
        pytest.param({"head_stride_bytes": 128}, "blocks_overlap", id="heads too close"),
        pytest.param({"state_stride_bytes": 8}, "blocks_overlap", id="states too close"),
    ],
)
def test_place_that_no_view_can_be_made_of_is_refused(changes: dict[str, int], rule: str) -> None:
    """A place that comes from elsewhere is checked before a view is made of it."""
    place = dataclasses.replace(alone(full(), 3), **changes)

    refused(rule, lambda: view_of(place, num_blocks=3, region_bytes=2**20))


def test_stride_that_leads_nowhere_is_not_looked_at() -> None:
    """An axis with one entry may have any stride."""
    place = dataclasses.replace(alone(full(heads=1), 1), head_stride_bytes=3, block_stride_bytes=5)

    check_disjoint(place, 1)
    assert view_of(place, num_blocks=1, region_bytes=256).end_bytes == 256


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_view_of_no_blocks_is_refused(num_blocks: int) -> None:
    """A view has at least one block."""
    with pytest.raises(InvalidError, match="num_blocks"):
        view_of(alone(full(), 3), num_blocks=num_blocks, region_bytes=2**20)


def test_packed_view_counts_on_through_the_pages_of_others() -> None:
    """Block b of a compressed layer is the kernel blocks from b*m on, where m spans the pages of all layers."""
    specs = [compressed(256, 4, padded=False), compressed(256, 4, padded=False)]
    places, region_bytes = placed(*specs)
    whole = view_of(places[1], num_blocks=3, region_bytes=region_bytes)

    packed = packed_view_of(places[1], num_blocks=3, region_bytes=region_bytes, kernel_tokens=64)

    assert (packed.kernel_blocks_per_block, packed.kernel_block_stride) == (4, 8)
    assert packed.view.shape == (2 * 8 + 4, 1, 16, 584)
    assert packed.view.end_bytes == whole.end_bytes
    assert packed.kernel_block_stride * packed.view.strides[0] == whole.strides[0]


def test_packed_view_without_a_split_is_the_view() -> None:
    """Where kernels read whole blocks, the ids stay as they are, whatever the layer keeps."""
    places, region_bytes = placed(full(), full())

    packed = packed_view_of(places[0], num_blocks=3, region_bytes=region_bytes, kernel_tokens=16)

    assert packed.view == view_of(places[0], num_blocks=3, region_bytes=region_bytes)
    assert (packed.kernel_blocks_per_block, packed.kernel_block_stride) == (1, 1)


@pytest.mark.parametrize(
    "specs",
    [
        pytest.param([full(128), full(128)], id="not compressed"),
        pytest.param([full(128, tokens_per_state=2), full(128)], id="several heads"),
        pytest.param([compressed(256, 4, padded=False), full(16, 1)], id="no multiple"),
    ],
)
def test_packed_view_of_unequal_rows_is_refused(specs: list[LayerSpec]) -> None:
    """Kernel blocks can be counted on only if all rows are equally far apart, up to the next block."""
    places, region_bytes = placed(*specs)

    refused(
        "packed_cache_not_splittable",
        lambda: packed_view_of(
            places[0], num_blocks=3, region_bytes=region_bytes, kernel_tokens=64
        ),
    )


def test_tensors_of_a_state_follow_each_other_in_its_page() -> None:
    """Each tensor has its own shape and type, and starts where the one before it ends."""
    place = alone(recurrent(bytes_per_page_padded=512), 3)

    conv, ssm = state_views(place, num_blocks=3, region_bytes=3 * 512)

    assert (conv.dtype, conv.shape, conv.strides) == ("bfloat16", (3, 3, 8), (256, 8, 1))
    assert (ssm.dtype, ssm.shape, ssm.strides) == ("float32", (3, 2, 4, 5), (128, 20, 5, 1))
    assert ssm.storage_offset * ssm.bytes_per_element == 3 * 8 * 2
    assert ssm.end_bytes == 2 * 512 + recurrent().bytes_per_state


def test_bytes_of_a_state_are_one_view() -> None:
    """The page of a recurrent layer is [blocks, 1, 1, bytes], without its padding."""
    view = view_of(
        alone(recurrent(bytes_per_page_padded=512), 3), num_blocks=3, region_bytes=3 * 512
    )

    assert (view.dtype, view.shape, view.strides[0]) == ("int8", (3, 1, 1, 208), 512)


def test_tensor_of_a_state_off_its_boundary_is_refused() -> None:
    """A float32 tensor cannot start behind an odd number of bfloat16 values."""
    spec = dataclasses.replace(recurrent(), shapes=((3, 7), (2, 4, 5)))

    refused(
        "view_off_element_boundary",
        lambda: state_views(alone(spec, 3), num_blocks=3, region_bytes=2**20),
    )


def test_state_is_not_split() -> None:
    """The page of a recurrent layer is one state, whatever block size kernels read."""
    refused("state_not_splittable", lambda: kernel_blocks_per_block(recurrent(), 16))
