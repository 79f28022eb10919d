"""Own where every byte of a page lies, as extents and strides; tensors over them are made in `views`.

Strides follow from the order of the axes: the stride of an axis is what all axes inside it take together. Before anyone
can make a tensor of a view, the view is proven to end inside its region, and its blocks not to overlap.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from types import MappingProxyType
from typing import Final

from kvlease.errors import InvalidError
from kvlease.geometry import exact_div, floor_div
from kvlease.kernel_split import kernel_blocks_per_block, states_per_kernel_block
from kvlease.layout import Layout
from kvlease.plan import LayerPlacement
from kvlease.spec import BYTES_PER_ELEMENT, AttentionSpec, LayerSpec, StateSpace
from kvlease.units import BLOCKS_MAX, checked_count

AXES: Final = "LBHNC"
"""Layers, kernel blocks, head slots, states and bytes of a state: the order of all extents and strides here."""

_NOTHING_FIXED: Final[Mapping[str, int]] = MappingProxyType({})
_IN_ORDER: Final = "order its tensors by the size of their elements, largest first, and "
_BYTES_DTYPE: Final = "int8"
"""Type of a view whose bytes belong to elements of different types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageStrides:
    """Extents and strides of a run of equal layers, both in the order of AXES."""

    extents: tuple[int, ...]
    """Numbers of layers, kernel blocks, head slots, states of a kernel block, and bytes of a state."""
    strides_bytes: tuple[int, ...]
    """Bytes from one entry to the next, for each axis."""

    @property
    def layer_stride_bytes(self) -> int:
        """Bytes from one layer to the next."""
        return self.strides_bytes[0]

    @property
    def block_stride_bytes(self) -> int:
        """Bytes from one kernel block to the next."""
        return self.strides_bytes[1]

    @property
    def head_stride_bytes(self) -> int:
        """Bytes from one head slot of a page to the next."""
        return self.strides_bytes[2]

    @property
    def state_stride_bytes(self) -> int:
        """Bytes from one state of a head to the next."""
        return self.strides_bytes[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """One layer as a strided view of its rank's region; shape, strides and offset count elements of `dtype`."""

    dtype: str
    shape: tuple[int, ...]
    """Kernel blocks, head slots, states, elements of a state; for a tensor of a recurrent state: blocks, its shape."""
    strides: tuple[int, ...]
    """Elements from one entry to the next, for each axis."""
    storage_offset: int
    """Elements of the region before the view's first element."""

    @property
    def bytes_per_element(self) -> int:
        """Bytes of one element."""
        return BYTES_PER_ELEMENT[self.dtype]

    @property
    def end_bytes(self) -> int:
        """(storage_offset + sum((extent - 1) * stride) + 1) * bytes_per_element: bytes that the region must have."""
        steps = zip(self.shape, self.strides, strict=True)
        last = self.storage_offset + sum((extent - 1) * stride for extent, stride in steps)
        return (last + 1) * self.bytes_per_element


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedView:
    """A view whose kernel blocks are counted on through other layers' pages, which no block id of the layer reaches."""

    view: LayerView
    kernel_blocks_per_block: int
    kernel_block_stride: int
    """Kernel blocks from one block to the next: block b starts at kernel block b * kernel_block_stride."""


def page_strides(
    spec: LayerSpec,
    *,
    num_layers: int,
    num_blocks: int,
    layout: Layout,
    kernel_tokens: int | None = None,
    fixed: Mapping[str, int] = _NOTHING_FIXED,
) -> PageStrides:
    """Return the strides of equal layers that lie in one run.

    `fixed` has the strides, in bytes, of the axes whose stride something else decides, by the axis's letter. A padded
    page stays whole: the inner one of the axes L and B has a multiple of bytes_per_page as its stride.

    Raises:
        InvalidError: rule kernel_block_does_not_divide, padded_page_split, padded_page_non_compact_layout,
            padded_page_not_whole, kernel_block_without_states, kernel_block_splits_state or state_not_splittable.
    """
    kernel_blocks = kernel_blocks_per_block(spec, kernel_tokens)
    is_padded = _is_padded(spec)
    if is_padded and kernel_blocks > 1:
        message = (
            f"pages of layer {spec.name!r} are padded to {spec.bytes_per_page} bytes, so a block cannot be split "
            f"into {kernel_blocks} kernel blocks; use kernel blocks of {spec.block_tokens} tokens"
        )
        raise InvalidError(
            message, resource="kernel_tokens", rule="padded_page_split", need=kernel_blocks, limit=1
        )
    states = states_per_kernel_block(spec, kernel_tokens)
    sizes = (num_layers, num_blocks * kernel_blocks, spec.head_slots, states, spec.bytes_per_state)
    extents = dict(zip(AXES, sizes, strict=True))
    page_axis = _page_axis(spec, layout, extents) if is_padded else ""
    strides: dict[str, int] = {}
    inside_bytes = 1
    for axis in reversed(layout):
        if axis == page_axis:
            inside_bytes = _padded(spec, inside_bytes)
        strides[axis] = fixed.get(axis, inside_bytes)
        inside_bytes = strides[axis] * extents[axis]
    return PageStrides(extents=sizes, strides_bytes=tuple(strides[axis] for axis in AXES))


def view_of(
    placement: LayerPlacement,
    *,
    num_blocks: int,
    region_bytes: int,
    kernel_tokens: int | None = None,
) -> LayerView:
    """Return a layer's view [num_blocks * kernel blocks, head slots, states, elements], proven in bounds and disjoint.

    A kernel block is a contiguous part of its block's page. If heads lie outside of states, a token has another place
    in this view than in the view of whole blocks, so all readers and writers must use the same one of the two views.

    Raises:
        InvalidError: rule kernel_block_does_not_divide, padded_or_packed_block_not_splittable,
            kernel_block_without_states, kernel_block_splits_state, state_not_splittable, page_below_content,
            view_off_element_boundary, blocks_overlap or storage_out_of_bounds.
    """
    spec = placement.spec
    checked_count("num_blocks", num_blocks, least=1, most=BLOCKS_MAX)
    kernel_blocks = kernel_blocks_per_block(spec, kernel_tokens)
    if kernel_blocks > 1 and placement.block_stride_bytes != spec.content_bytes_per_page:
        message = (
            f"blocks of layer {spec.name!r} are {placement.block_stride_bytes} bytes apart, but their content takes "
            f"{spec.content_bytes_per_page}; padded or packed blocks cannot be split into {kernel_blocks} kernel blocks"
        )
        raise InvalidError(
            message,
            resource="kernel_tokens",
            rule="padded_or_packed_block_not_splittable",
            need=placement.block_stride_bytes,
            limit=spec.content_bytes_per_page,
        )
    states = states_per_kernel_block(spec, kernel_tokens)
    check_disjoint(placement, num_blocks)
    head_stride_bytes = placement.head_stride_bytes
    if head_stride_bytes > placement.state_stride_bytes:
        # Heads lie outside of states, and each head has fewer states in a kernel block than in a block.
        head_stride_bytes = exact_div(head_stride_bytes, kernel_blocks)
    strides_bytes = (
        exact_div(placement.block_stride_bytes, kernel_blocks),
        head_stride_bytes,
        placement.state_stride_bytes,
    )
    extents = (num_blocks * kernel_blocks, spec.head_slots, states)
    return _proven(placement, extents, strides_bytes, region_bytes)


def packed_view_of(
    placement: LayerPlacement, *, num_blocks: int, region_bytes: int, kernel_tokens: int
) -> PackedView:
    """Return a layer's view in kernel blocks if other pages may lie between its blocks.

    All states of a compressed layer with one head are equally far apart, so kernel blocks can be counted on through
    other layers' pages: there are (num_blocks - 1) * kernel_block_stride + kernel_blocks_per_block of them.

    Raises:
        InvalidError: rule packed_cache_not_splittable, and those of `view_of`.
    """
    spec = placement.spec
    whole = view_of(placement, num_blocks=num_blocks, region_bytes=region_bytes)
    kernel_blocks = kernel_blocks_per_block(spec, kernel_tokens)
    if kernel_blocks == 1:
        return PackedView(view=whole, kernel_blocks_per_block=1, kernel_block_stride=1)
    assert isinstance(spec, AttentionSpec), "the page of a state is not split"
    states = states_per_kernel_block(spec, kernel_tokens)
    kernel_block_bytes = states * placement.state_stride_bytes
    _check_packed(placement, spec, kernel_blocks, kernel_block_bytes)
    stride = exact_div(placement.block_stride_bytes, kernel_block_bytes)
    extents = ((num_blocks - 1) * stride + kernel_blocks, 1, states)
    strides_bytes = (kernel_block_bytes, kernel_block_bytes, placement.state_stride_bytes)
    return PackedView(
        view=_proven(placement, extents, strides_bytes, region_bytes),
        kernel_blocks_per_block=kernel_blocks,
        kernel_block_stride=stride,
    )


def _check_packed(
    placement: LayerPlacement, spec: AttentionSpec, kernel_blocks: int, kernel_block_bytes: int
) -> None:
    """Refuse a layer whose kernel blocks cannot be counted on through other layers' pages."""
    rule = "packed_cache_not_splittable"
    if spec.tokens_per_state == 1 or spec.head_slots > 1:
        msg = (
            f"layer {spec.name!r} keeps one state per {spec.tokens_per_state} tokens for each of {spec.head_slots} "
            "heads; with other pages between blocks, only compressed layers with one head can be split"
        )
        raise InvalidError(msg, resource="kernel_tokens", rule=rule, need=kernel_blocks, limit=1)
    if placement.block_stride_bytes % kernel_block_bytes:
        msg = (
            f"blocks of layer {spec.name!r} are {placement.block_stride_bytes} bytes apart, not a multiple of a "
            f"kernel block's {kernel_block_bytes}; set block_stride_multiple_bytes={kernel_block_bytes} for the layer"
        )
        raise InvalidError(
            msg,
            resource="block_stride_multiple_bytes",
            rule=rule,
            need=kernel_block_bytes,
            available=placement.block_stride_bytes,
        )


def state_views(
    placement: LayerPlacement, *, num_blocks: int, region_bytes: int
) -> tuple[LayerView, ...]:
    """Return a view [num_blocks, *shape] of each tensor of a recurrent layer's state; a page holds them in turn.

    Raises:
        InvalidError: the rules of `view_of`.
    """
    spec = placement.spec
    assert isinstance(spec, StateSpace), "only recurrent layers keep states of several tensors"
    view_of(placement, num_blocks=num_blocks, region_bytes=region_bytes)
    views = []
    offset_bytes = placement.offset_bytes
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        block_stride = _elements(spec.name, dtype, "block stride", placement.block_stride_bytes)
        inner_strides = tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1]
        views.append(
            LayerView(
                dtype=dtype,
                shape=(num_blocks, *shape),
                strides=(block_stride, *inner_strides),
                storage_offset=_elements(spec.name, dtype, "offset", offset_bytes, first=_IN_ORDER),
            )
        )
        offset_bytes += prod(shape) * BYTES_PER_ELEMENT[dtype]
    return tuple(views)


def check_disjoint(placement: LayerPlacement, num_blocks: int) -> None:
    """Refuse a layer in which two states share a byte, be they in one block or in two.

    Raises:
        InvalidError: rule page_below_content or blocks_overlap; the message names what lies too close together.
    """
    spec = placement.spec
    if placement.bytes_per_page < spec.content_bytes_per_page:
        message = (
            f"a page of layer {spec.name!r} has {placement.bytes_per_page} bytes, but its content takes "
            f"{spec.content_bytes_per_page}"
        )
        raise InvalidError(
            message,
            resource="bytes_per_page",
            rule="page_below_content",
            need=spec.content_bytes_per_page,
            available=placement.bytes_per_page,
        )
    axes = (
        ("blocks", num_blocks, placement.block_stride_bytes),
        ("head slots", spec.head_slots, placement.head_stride_bytes),
        ("states", spec.states_per_block, placement.state_stride_bytes),
    )
    span_bytes = spec.bytes_per_state
    for name, extent, stride_bytes in sorted(axes, key=lambda axis: axis[2]):
        if extent > 1 and stride_bytes < span_bytes:
            message = f"{name} of layer {spec.name!r} are {stride_bytes} bytes apart, but each takes {span_bytes}"
            raise InvalidError(
                message,
                resource="block_stride_bytes",
                rule="blocks_overlap",
                need=span_bytes,
                available=stride_bytes,
            )
        span_bytes += (extent - 1) * stride_bytes


def _proven(
    placement: LayerPlacement,
    extents: tuple[int, int, int],
    strides_bytes: tuple[int, int, int],
    region_bytes: int,
) -> LayerView:
    """Return the view with these extents (blocks, head slots, states), or refuse it if it does not fit the region."""
    spec = placement.spec
    dtype = spec.dtype if isinstance(spec, AttentionSpec) else _BYTES_DTYPE
    # The stride of an axis with one entry is never used, so a remainder does no harm.
    strides = (
        _elements(spec.name, dtype, "stride", stride_bytes)
        if extent > 1
        else floor_div(stride_bytes, BYTES_PER_ELEMENT[dtype])
        for extent, stride_bytes in zip(extents, strides_bytes, strict=True)
    )
    view = LayerView(
        dtype=dtype,
        shape=(*extents, _elements(spec.name, dtype, "state", spec.bytes_per_state)),
        strides=(*strides, 1),
        storage_offset=_elements(spec.name, dtype, "offset", placement.offset_bytes),
    )
    if view.end_bytes > region_bytes:
        message = (
            f"layer {spec.name!r} needs {view.end_bytes} bytes of a region that has {region_bytes}; view only as many "
            "blocks as are in the plan that the region was made for"
        )
        raise InvalidError(
            message,
            resource="region_bytes",
            rule="storage_out_of_bounds",
            need=view.end_bytes,
            available=region_bytes,
        )
    return view


def _elements(layer_name: str, dtype: str, what: str, num_bytes: int, *, first: str = "") -> int:
    """Return a number of bytes as a number of elements of a type; refuse it if it cuts an element.

    `first` is what to do besides padding.
    """
    per_element = BYTES_PER_ELEMENT[dtype]
    if num_bytes % per_element:
        message = (
            f"the {what} of layer {layer_name!r} is {num_bytes} bytes, not a multiple of {dtype}'s {per_element}; "
            f"{first}pad its pages to a multiple of {per_element}"
        )
        rule, padded = "view_off_element_boundary", "bytes_per_page_padded"
        raise InvalidError(message, resource=padded, rule=rule, need=num_bytes, limit=per_element)
    return exact_div(num_bytes, per_element)


def _is_padded(spec: LayerSpec) -> bool:
    is_larger = spec.bytes_per_page > spec.content_bytes_per_page
    return is_larger or spec.bytes_per_page_padded is not None


def _page_axis(spec: LayerSpec, layout: Layout, extents: Mapping[str, int]) -> str:
    """Return the axis whose entries are padded pages; only layouts that keep pages whole have one."""
    position = max(layout.index("L"), layout.index("B"))
    outside = prod(extents[axis] for axis in layout[: position + 1])
    if outside != extents["L"] * extents["B"]:
        message = (
            f"pages of layer {spec.name!r} are padded to {spec.bytes_per_page} bytes, but layout {layout} separates "
            f"their {spec.head_slots} heads; choose LBHNC, LBNHC, BLHNC or BLNHC"
        )
        raise InvalidError(
            message,
            resource="layout",
            rule="padded_page_non_compact_layout",
            need=spec.head_slots,
            limit=1,
        )
    return layout[position]


def _padded(spec: LayerSpec, inside_bytes: int) -> int:
    """Return the bytes of a padded page whose content spans `inside_bytes`."""
    page_bytes = max(inside_bytes, spec.bytes_per_page)
    if page_bytes % spec.bytes_per_page:
        message = (
            f"the given strides spread a page of layer {spec.name!r} over {page_bytes} bytes, which is not a multiple "
            f"of its {spec.bytes_per_page}"
        )
        raise InvalidError(
            message,
            resource="fixed",
            rule="padded_page_not_whole",
            need=page_bytes,
            limit=spec.bytes_per_page,
        )
    return page_bytes
